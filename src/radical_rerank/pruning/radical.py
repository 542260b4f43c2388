from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from radical_rerank.errors import CalibrationError, InputError
from radical_rerank.method import (
    STRATEGIES,
    DecoderShape,
    Schedule,
    allot,
    arithmetic,
    arithmetic_fusion,
    attention_information,
    counts_within,
    geometric_fusion,
    keep_ratio,
    min_max,
    nucleus_count,
    ranks,
    saliency,
    signed_prior,
    text_averaged,
    top_k,
)
from radical_rerank.pruning.base import Layout, Look, Merge, Pruner, Share, Stage, StageView, list_counts
from radical_rerank.pruning.profile import Profile

FUSIONS = {"geometric": geometric_fusion, "arithmetic": arithmetic_fusion}


@dataclass(kw_only=True)
class RaDiCal(Pruner):
    """RaDiCal keeps tokens that fit the query and set their candidate apart.

    "From Saliency to Discriminability: Rank-Preserving Visual Token Pruning for VLM Rerankers".

    Before each of K layers chosen by α-Maximin, the tokens with the highest
    f = max(d̂, ε)^α · max(ŝ, ε)^(1−α) pass. d̂ is the prior DTI = CCU · QRel, ŝ the layer's AttentionInfo,
    and α says how diffuse the layer's attention is on this model (its trust profile).

    Args:
        keep: R, the fraction of visual tokens alive at the end
        num_stages: K, the number of stages
        gap: g, the least distance between chosen layers
        strategy: how layers are chosen, one of `STRATEGIES`
        layers: these layers instead of a strategy's choice
        shares: with `layers`, the share of all tokens alive after each, instead of K equal steps
        flops: a budget instead of `keep`: the part of Dense's arithmetic that each list may cost. The layers
            come from the profile, tuned or planned (`radical tune`), unless `layers` are given
        nucleus: each stage keeps the smallest set of tokens that holds this share of the score, so that easy
            lists cost less; "auto", with `flops`: the tuned share that costs this much on average
        prior: "dti", "relevance", "uniqueness" or "random"
        relevance: "mean", cos with the mean embedding of the query's words, or "words", the largest cosine
            with one of them. None: "mean", or with `flops` what the tuned schedule has
        uniqueness: "prototype", O(Vd), or "exact", by the nearest token of another candidate, O(V²d)
        saliency: "information" (AttentionInfo) or "attention" (the text-averaged attention p)
        fusion: "geometric" or "arithmetic"
        alpha: a fixed α for all stages; None: each layer's own
        least: pointwise, what every candidate keeps at least, as a fraction of an even share of the budget
        profile: the model's trust profile; None: looked up by the model's identity
        seed: for the random prior and the random strategy

    Example:
        >>> profile = Profile.find("Qwen/Qwen3-VL-4B-Instruct")
        >>> [stage.layer for stage in RaDiCal(keep=0.2, profile=profile).stages(num_layers=36)]
        [7, 22, 24, 29]

    Every row of the paper's ablation is a setting:

    ========================  ====================================
    full                      RaDiCal()
    w/o DTI                   RaDiCal(alpha=0)
    fixed fusion              RaDiCal(alpha=0.5)
    w/o α-Maximin             RaDiCal(strategy="random")
    w/o geometric             RaDiCal(fusion="arithmetic")
    DTI only                  RaDiCal(alpha=1)
    QRel only, single images  RaDiCal(prior="relevance")
    CCU only                  RaDiCal(prior="uniqueness")
    w/o token scoring         RaDiCal(prior="random", alpha=1)
    ========================  ====================================
    """

    num_stages: int = 4
    gap: int = 2
    strategy: str = "alpha_maximin"
    layers: Sequence[int] | None = None
    shares: Sequence[float] | None = None
    flops: float | None = None
    nucleus: float | Literal["auto"] | None = None
    prior: str = "dti"
    relevance: str | None = None
    uniqueness: str = "prototype"
    saliency: str = "information"
    fusion: str = "geometric"
    alpha: float | None = None
    least: float = 0.5
    profile: Profile | None = None
    seed: int = 0

    summary: ClassVar[str] = (
        "tokens that fit the query and set their candidate apart, weighed against attention by trust"
    )

    def check(self) -> None:
        for name, value, known in (
            ("strategy", self.strategy, STRATEGIES),
            ("prior", self.prior, ("dti", "relevance", "uniqueness", "random")),
            ("relevance", self.relevance, (None, "mean", "words")),
            ("uniqueness", self.uniqueness, ("prototype", "exact")),
            ("saliency", self.saliency, ("information", "attention")),
            ("fusion", self.fusion, FUSIONS),
        ):
            if value not in known:
                raise InputError(f"{name} must be one of {', '.join(filter(None, known))}, not {value!r}")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise InputError(f"alpha must lie in [0, 1], not {self.alpha!r}")
        if not 0 <= self.least <= 1:
            raise InputError(f"least must lie in [0, 1], not {self.least!r}")
        if self.layers is not None and not len(self.layers):
            raise InputError("layers must name at least one layer")
        if self.shares is not None:
            falls = all(0 < b <= a <= 1 for a, b in pairwise((1.0, *self.shares)))
            if self.layers is None or len(self.shares) != len(self.layers) or not falls:
                raise InputError(
                    "shares must be one per layer of `layers`, in (0, 1], none above the one before"
                )
        if self.flops is not None and not 0 < self.flops <= 1:
            raise InputError(f"flops must lie in (0, 1], not {self.flops!r}")
        if self.nucleus == "auto" and self.flops is None:
            raise InputError('nucleus="auto" needs flops, the cost to reach on average')
        if isinstance(self.nucleus, float) and not 0 < self.nucleus <= 1:
            raise InputError(f"nucleus must lie in (0, 1], not {self.nucleus!r}")
        if self.num_stages < 1 or self.gap < 1:
            raise InputError(f"num_stages and gap must be at least 1, not {self.num_stages} and {self.gap}")

    @property
    def needs_profile(self) -> Literal["alpha", "layers"] | None:
        if self.profile is not None:
            return None
        if self.alpha is None:
            return "alpha"
        return "layers" if self.layers is None else None

    def with_profile(self, profile: Profile) -> RaDiCal:
        return replace(self, profile=profile)

    def with_seed(self, seed: int) -> RaDiCal:
        return replace(self, seed=seed)

    def for_single_image(self) -> RaDiCal:
        return replace(self, prior="relevance") if self.prior == "dti" else self

    def stages(self, num_layers: int) -> list[Stage]:
        chosen, profile = self.layers, self.profile
        if self.needs_profile is not None:
            raise CalibrationError("RaDiCal needs the model's trust profile: pass profile=")
        if chosen is None:
            assert profile is not None
            self._check_depth(profile, num_layers)
            # A measured profile has all layers whose attention can be read.
            if profile.h_norm is None and profile.layers != tuple(range(num_layers)):
                self._check_partial(profile, num_layers)
            if self.flops is not None:
                chosen = profile.schedule(self.flops, num_layers).layers
            elif profile.alpha:
                choose = STRATEGIES[self.strategy]
                chosen = choose(profile.layers, profile.alpha, self.num_stages, gap=self.gap, seed=self.seed)
            else:
                chosen = self._published(profile)
        keep = keep_ratio(self.keep, len(chosen))
        if self.alpha is None:
            assert profile is not None
            for layer in chosen:
                profile.alpha_at(layer)  # raises now, not when the model runs
        if self.shares is not None:
            return [
                Stage(layer, share, of_all=True) for layer, share in zip(chosen, self.shares, strict=True)
            ]
        return [Stage(layer, keep) for layer in sorted(chosen)]

    def plan(self, stages: Sequence[Stage], layout: Layout, shape: DecoderShape) -> dict[Stage, int] | None:
        """Meet the budget `flops` for this prompt: with the schedule's exponents, or equal steps."""
        if self.flops is None:
            return None
        layers = tuple(stage.layer for stage in stages)
        schedule = Schedule.equal(layers)
        if self.layers is None and self.profile is not None:
            known = self.profile.schedule(self.flops, shape.num_layers)
            if len(known.layers) == len(layers):  # else stages met at one layer with attention
                schedule = replace(known, layers=layers)
        visual = len(layout.positions)
        text = layout.length - visual
        dense = arithmetic((), (), shape, visual, text)
        counts = counts_within(schedule, self.flops * dense, shape, visual, text)
        cost = arithmetic(layers, counts, shape, visual, text) / dense
        if cost > 1.03 * self.flops:
            warnings.warn(
                f"a list of {visual} visual and {text} other tokens costs {cost:.1%} of Dense's arithmetic "
                f"at least, not {self.flops:.1%}: only {counts[-1]} visual tokens are left",
                stacklevel=2,
            )
        return dict(zip(stages, counts, strict=True))

    def _check_depth(self, profile: Profile, num_layers: int) -> None:
        if profile.layers[-1] >= num_layers:
            raise CalibrationError(
                f"the profile of {profile.model} has a value for layer {profile.layers[-1]}, "
                f"but the model has {num_layers} layers"
            )

    def _check_partial(self, profile: Profile, num_layers: int) -> None:
        """Check that a profile of some layers, as published, fits the options."""
        known = f"the profile of {profile.model} has {len(profile.layers)} of {num_layers} layers"
        if self.strategy not in ("alpha_maximin", "deep_only"):
            raise CalibrationError(
                f"the strategy {self.strategy!r} needs α of every layer, but {known}: "
                "measure the model with `radical calibrate`"
            )
        if profile.alpha and (self.num_stages, self.gap) != (4, 2):
            warnings.warn(
                f"{known}, those of its published schedule of 4 stages 2 apart; for {self.num_stages} stages "
                f"{self.gap} apart, measure the model with `radical calibrate`",
                stacklevel=3,
            )

    def _published(self, profile: Profile) -> tuple[int, ...]:
        """Return the layers of a published schedule, if it is the one that the options ask for."""
        if (self.strategy, self.num_stages, self.gap) != ("alpha_maximin", len(profile.layers), 2):
            raise CalibrationError(
                f"of {profile.model}, only the α-Maximin schedule of {len(profile.layers)} stages 2 apart is "
                f"published, {list(profile.layers)}: for another, measure the model with `radical calibrate`"
            )
        return profile.layers

    def score(self, view: StageView) -> Tensor:
        return self._scores(view)[0]

    def select(self, view: StageView, count: int) -> Tensor | Merge:
        if count >= len(view.alive) and self.nucleus is None:
            return super().select(view, count)
        score, tie = self._scores(view)
        share = self._tuned_share() if self.nucleus == "auto" else self.nucleus
        if share is not None:
            count = nucleus_count(score, share)
        return top_k(score, count, [tie])

    def _tuned_share(self) -> float:
        """The share of the score that costs `flops` on average."""
        assert self.flops is not None
        tuned = None if self.profile is None else self.profile.tuned(self.flops)
        if tuned is None or tuned.nucleus is None:
            raise CalibrationError('nucleus="auto" needs a tuned profile: run `radical tune`')
        return tuned.nucleus

    def _scores(self, view: StageView) -> tuple[Tensor, Tensor]:
        """Return (n,) the fused score f, and (n,) what breaks ties between equal scores.

        Both channels are cut at zero: AttentionInfo where attention is below uniform, QRel where the cosine
        is negative. Tokens below both cuts tie, often most of them. Their order is decided by both channels
        without the cuts: α · rank of the signed prior + (1 − α) · rank of attention. At α = 0 only attention
        counts, at α = 1 only the prior.
        """
        alpha = self.alpha
        if alpha is None:
            if self.profile is None:
                raise CalibrationError("RaDiCal needs the model's trust profile or a fixed alpha")
            alpha = self.profile.alpha_at(view.layer)
        signed = self._prior(view) if alpha > 0 else None
        view.note(alpha=alpha)
        if alpha == 1:
            assert signed is not None
            return min_max(signed.clamp(min=0))[view.alive], signed[view.alive]
        p = text_averaged(view.attention())
        salience = saliency(attention_information(p)) if self.saliency == "information" else min_max(p)
        if signed is None:
            return salience, p
        prior = min_max(signed.clamp(min=0))[view.alive]
        tie = arithmetic_fusion(ranks(signed[view.alive]), ranks(p), alpha)
        return FUSIONS[self.fusion](prior, salience, alpha), tie

    def _prior(self, view: StageView) -> Tensor:
        """Return (V,) the prior of all tokens, without the cut at zero; computed once for all stages."""
        if self.prior == "random":
            seed = hash((self.seed, view.key, view.layer)) & 0x7FFFFFFF
            draw = torch.Generator().manual_seed(seed)
            return torch.rand(len(view.candidate_of), generator=draw).to(view.alive.device)
        exact = self.uniqueness == "exact"
        words = self._reads_words
        return view.once(
            "prior",
            lambda: signed_prior(
                self.prior,
                view.vision,
                view.query_words if words else view.query_embedding,
                view.candidate_of,
                exact=exact,
            ),
        )

    @property
    def _reads_words(self) -> bool:
        """Whether relevance looks at single words."""
        chosen = self.relevance
        if chosen is None and self.flops is not None and self.layers is None and self.profile is not None:
            tuned = self.profile.tuned(self.flops)
            chosen = None if tuned is None else tuned.relevance
        return chosen == "words"

    def pool(self, look: Callable[[], Look], stages: Sequence[Stage]) -> list[Share] | None:
        """Give each candidate of a pointwise list as much of the list's budget as its tokens' prior earns.

        The prior compares a token with all candidates of the list, and it is known before the decoder runs.
        So it alone decides how many tokens of a candidate pass a stage: as many as it has among the best of
        the list, and at least `least` of an even share at the last stage. Which of its tokens those are is
        decided at the stage, by the same fusion with attention as in a listwise prompt.

        Attention has no say between candidates, because it sums to 1 within each prompt: a hopeless candidate
        gets as much of it as the best one. For the same reason no prompt has to wait for another at a stage.
        A list runs in batches of any size with the same survivors, and only one batch is in memory.
        """
        if self.prior == "random" or self.alpha == 0 or self.flops is not None:
            return None  # with a budget, every prompt keeps to its own
        seen = look()
        sizes = seen.candidate_of.bincount(minlength=seen.count).tolist()
        if not len(seen.vision):  # texts alone
            return [Share(seen.vision[:, 0], dict.fromkeys(stages, 0)) for _ in sizes]
        kind = self.prior if sum(map(bool, sizes)) > 1 else self.for_single_image().prior
        exact = self.uniqueness == "exact"
        query = seen.query_embedding
        if self._reads_words and seen.query_words is not None:
            query = seen.query_words
        prior = signed_prior(kind, seen.vision, query, seen.candidate_of, exact=exact)
        counts = list_counts(stages, len(prior))
        least = [int(self.least * counts[-1] * size / len(prior)) for size in sizes]
        allotted = zip(*allot(prior, seen.candidate_of, counts, torch.tensor(least)), strict=True)
        return [
            Share(own, dict(zip(stages, passing, strict=True)))
            for own, passing in zip(prior.split(sizes), allotted, strict=True)
        ]
