from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from radical_rerank.errors import CalibrationError, InputError
from radical_rerank.method import (
    STRATEGIES,
    arithmetic_fusion,
    attention_information,
    candidate_uniqueness,
    discriminative_importance,
    exact_uniqueness,
    geometric_fusion,
    keep_ratio,
    min_max,
    query_relevance,
    ranks,
    saliency,
    text_averaged,
    top_k,
)
from radical_rerank.pruning.base import Merge, Pruner, Stage, StageView
from radical_rerank.pruning.profile import Profile

FUSIONS = {"geometric": geometric_fusion, "arithmetic": arithmetic_fusion}


@dataclass(kw_only=True)
class RaDiCal(Pruner):
    """Rank-Discriminative Calibration ("From Saliency to Discriminability").

    Before each of K layers chosen by α-Maximin, the tokens with the highest
    f = max(d̂, ε)^α · max(ŝ, ε)^(1−α) pass: d̂ the prior DTI = CCU · QRel, ŝ the layer's
    AttentionInfo, α how diffuse the layer's attention is on this model (its profile).

    Every row of the paper's ablation is an argument:

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
    """K: the number of stages"""
    gap: int = 2
    """g: chosen layers are at least this far apart"""
    strategy: str = "alpha_maximin"
    layers: Sequence[int] | None = None
    """these layers instead of a strategy's"""
    prior: str = "dti"
    """"dti", "relevance", "uniqueness" or "random" """
    uniqueness: str = "prototype"
    """"prototype", O(Vd), or "exact", the largest cosine to another candidate, O(V²d)"""
    saliency: str = "information"
    """"information" (AttentionInfo) or "attention" (the raw text-averaged attention p)"""
    fusion: str = "geometric"
    alpha: float | None = None
    """a fixed α for all stages; None: each layer's own"""
    profile: Profile | None = None
    """the model's trust profile; None: looked up by the model's name"""
    seed: int = 0

    summary: ClassVar[str] = "fits the query and sets its candidate apart, weighed against attention by trust"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, known in (
            ("strategy", self.strategy, STRATEGIES),
            ("prior", self.prior, ("dti", "relevance", "uniqueness", "random")),
            ("uniqueness", self.uniqueness, ("prototype", "exact")),
            ("saliency", self.saliency, ("information", "attention")),
            ("fusion", self.fusion, FUSIONS),
        ):
            if value not in known:
                raise InputError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise InputError(f"alpha must lie in [0, 1], not {self.alpha!r}")
        if self.layers is not None and not len(self.layers):
            raise InputError("layers must name at least one layer")
        if self.num_stages < 1 or self.gap < 1:
            raise InputError(f"num_stages and gap must be at least 1, not {self.num_stages} and {self.gap}")

    @property
    def needs_profile(self) -> bool:
        return self.profile is None and (self.layers is None or self.alpha is None)

    def with_profile(self, profile: Profile) -> RaDiCal:
        return replace(self, profile=profile)

    def with_seed(self, seed: int) -> RaDiCal:
        return replace(self, seed=seed)

    def for_single_image(self) -> RaDiCal:
        return replace(self, prior="relevance") if self.prior == "dti" else self

    def stages(self, num_layers: int) -> list[Stage]:
        chosen = self.layers
        if chosen is None:
            if self.profile is None:
                raise CalibrationError("RaDiCal needs the model's trust profile: pass profile=")
            profile = self.profile.checked(num_layers)
            self._check_known(profile, num_layers)
            choose = STRATEGIES[self.strategy]
            chosen = choose(profile.layers, profile.alpha, self.num_stages, gap=self.gap, seed=self.seed)
        keep = keep_ratio(self.keep, len(chosen))
        return [Stage(layer, keep) for layer in sorted(chosen)]

    def _check_known(self, profile: Profile, num_layers: int) -> None:
        """A published profile names the layers that its schedule was chosen by, not all of them."""
        if profile.knows_all(num_layers):
            return
        known = f"the profile of {profile.model} knows {len(profile.layers)} of {num_layers} layers"
        if self.strategy not in ("alpha_maximin", "deep_only"):
            raise CalibrationError(
                f"the strategy {self.strategy!r} needs α of every layer, but {known}: "
                "measure the model with `radical calibrate`"
            )
        if (self.num_stages, self.gap) != (4, 2):
            warnings.warn(
                f"{known}, those of its published schedule of 4 stages 2 apart; for {self.num_stages} stages "
                f"{self.gap} apart, measure the model with `radical calibrate`",
                stacklevel=3,
            )

    def score(self, view: StageView) -> Tensor:
        return self._scores(view)[0]

    def select(self, view: StageView, count: int) -> Tensor | Merge:
        if count >= len(view.alive):
            return super().select(view, count)
        score, tie = self._scores(view)
        return top_k(score, count, [tie])

    def _scores(self, view: StageView) -> tuple[Tensor, Tensor]:
        """(n,) each: the fused score f, and what tells equal scores apart.

        Both channels are cut at zero: AttentionInfo where attention is below uniform, QRel where the cosine
        is negative. Tokens below both cuts tie, often most of them. There the channels go on uncut, under
        the same trust and by rank, since they share no scale: α · rank of the signed prior + (1 − α) · rank
        of attention. At α = 0 the prior has no say in either, at α = 1 attention has none.
        """
        alpha = self.alpha if self.alpha is not None else self._trust_at(view.layer)
        view.note(alpha=alpha)
        if alpha == 1:
            signed = self._prior(view)
            return min_max(signed.clamp(min=0))[view.alive], signed[view.alive]
        p = text_averaged(view.attention())
        salience = saliency(attention_information(p)) if self.saliency == "information" else min_max(p)
        if alpha == 0:
            return salience, p
        signed = self._prior(view)
        prior = min_max(signed.clamp(min=0))[view.alive]
        tie = arithmetic_fusion(ranks(signed[view.alive]), ranks(p), alpha)
        return FUSIONS[self.fusion](prior, salience, alpha), tie

    def _trust_at(self, layer: int) -> float:
        if self.profile is None:
            raise CalibrationError("RaDiCal needs the model's trust profile or a fixed alpha")
        return self.profile.alpha_at(layer)

    def _prior(self, view: StageView) -> Tensor:
        """(V,) the prior of all tokens, signed where it is cut at zero. Made once, reused at every stage."""
        if self.prior == "random":
            seed = hash((self.seed, view.key, view.layer)) & 0x7FFFFFFF
            draw = torch.Generator().manual_seed(seed)
            return torch.rand(len(view.candidate_of), generator=draw).to(view.alive.device)
        return view.once("prior", lambda: self._signed_prior(view))

    def _signed_prior(self, view: StageView) -> Tensor:
        vision, query, exact = view.vision, view.query_embedding, self.uniqueness == "exact"
        if self.prior == "relevance":
            return query_relevance(vision, query, signed=True)
        if self.prior == "uniqueness":
            return exact_uniqueness(vision, view.candidate_of) if exact else candidate_uniqueness(vision)
        return discriminative_importance(vision, query, view.candidate_of, exact=exact, signed=True)
