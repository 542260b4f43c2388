"""The Reranker: a query and documents in, the documents in order out.

Listwise (scorers "logits" and "generate"), a list is one prompt. Pointwise, every candidate has a prompt of
its own.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from numbers import Integral
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from PIL import Image
from torch import Tensor

from radical_rerank import progress as bars
from radical_rerank.backbones import DEFAULT_MODEL, Backbone, ImageFeatures, load_head, stages_of
from radical_rerank.backbones.engine import Prefix
from radical_rerank.backbones.model import folder_of
from radical_rerank.errors import InputError, ScoringError, UnreadableAnswerError
from radical_rerank.method import arithmetic
from radical_rerank.pruning import Dense, Layout, Look, Profile, Pruner, RaDiCal, Share, build
from radical_rerank.reranking.budget import Budget, Pace, measured_pace
from radical_rerank.reranking.calibration import measured_profile
from radical_rerank.reranking.encoding import (
    CONTEXT,
    MAX_IMAGE_TOKENS,
    MAX_PIXELS,
    MAX_TEXT_TOKENS,
    PROMPT_CACHE_BYTES,
    REFERENCE,
    VISION_CACHE_BYTES,
    CandidateList,
    Clock,
    Document,
    Encoder,
    ImageLike,
    PromptCache,
    Query,
    VisionCache,
    content_of,
    joined_signals,
)
from radical_rerank.reranking.orders import (
    DEFAULT_WEIGHT,
    averaged,
    checked_scores,
    mixed,
    shuffles,
    standardised,
)
from radical_rerank.reranking.permutation import parse_permutation, permutation_scores
from radical_rerank.reranking.preset import Preset
from radical_rerank.reranking.prompt import (
    Answer,
    Content,
    Prompt,
    PromptTemplate,
    build_pair,
    build_prompt,
    choose_template,
    cut_text,
    own_template,
    query_tokens,
    sizes_of,
)
from radical_rerank.reranking.results import (
    Cut,
    PruningReport,
    RankedDocument,
    Ranking,
    Skipped,
    join_reports,
    make_report,
)
from radical_rerank.reranking.safety import Promise, SecondOrder, margin, promise
from radical_rerank.reranking.scores import ScoreCalibration, calibration_for, probabilities_of
from radical_rerank.reranking.windows import rank_in_windows

OnError = Literal["raise", "skip"]
AnyQuery: TypeAlias = "str | Query | Mapping[str, Any]"
ListToRank: TypeAlias = (
    "tuple[AnyQuery, Iterable[Document]] | tuple[AnyQuery, Iterable[Document], Iterable[float] | None]"
)
"""a query and documents, and the documents' scores of a first stage if there are any"""
SCORERS = ("logits", "generate", "pointwise")
Permutations: TypeAlias = "int | Literal['auto']"


@dataclass(frozen=True)
class _Asked:
    """One prompt to run.

    work: its list; pointwise, one candidate of it
    features: of its images, the query's first; own: of each candidate
    full: the candidates' visual tokens at full size
    place: pointwise, its candidate's place in the list
    share: what it gets of its list's budget, if the method shares one
    """

    work: CandidateList
    features: Sequence[ImageFeatures]
    own: Sequence[Sequence[ImageFeatures]]
    full: int
    place: int = 0
    share: Share | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Its visual tokens at the end of the decoder, if that is known, and at the start."""
        visual = sum(len(feature.tokens) for feature in chain(*self.own))
        return visual if self.share is None else min(self.share.counts.values(), default=visual), visual


@dataclass(frozen=True)
class _Scored:
    """What one prompt gave, or the prompts of one list together. others: reports of the prompts before it"""

    answer: Answer
    report: PruningReport
    others: tuple[PruningReport, ...] = ()

    def after(self, earlier: Sequence[PruningReport]) -> _Scored:
        """Return this with the reports of prompts before it, which its own prompts repeat."""
        again = [replace(one, repeats=True) for one in (*self.others, self.report)]
        return replace(self, report=again[-1], others=(*earlier, *again[:-1]))


class _Given:
    """A list to rank, as the caller gave it."""

    def __init__(
        self, query: AnyQuery, documents: Iterable[Document], scores: Iterable[float] | None = None
    ) -> None:
        self.query, self.documents = query, _listed(documents)
        self.scores = None if scores is None else checked_scores(scores, len(self.documents))

    def prior(self, work: CandidateList) -> list[float] | None:
        """Return a first stage's scores of the candidates, standardised; None if there are none."""
        if self.scores is None:
            return None
        return standardised([self.scores[one.index] for one in work.candidates])


@dataclass(frozen=True)
class _Wanted:
    """What a ranking should be like, see `Reranker.rank`."""

    top_k: int | None
    on_error: OnError
    min_probability: float | None
    permutations: Permutations
    weight: float | None


class Reranker:
    """Ranks documents for a query with a vision-language model: by default listwise, in one forward pass.

    A document is a picture, a text, or a dict with `image` or `images` and `text`: one document, one score.
    Texts are never pruned.

    Threads may share a Reranker: their calls take turns. It can be pickled (its cache is left out). A forked
    process cannot use it.

    Args:
        model: a model id, a folder, or a `Backbone`; by default the small model that ships with the package
        method: the name of a pruning method (see `METHODS`) or a `Pruner`
        keep: the fraction of visual tokens alive at the end
        speedup, flops, latency, agreement: a budget in other terms than `keep`, with method "radical"; one of
            them. flops: the part of the decoder's arithmetic that a list may cost. speedup: 1 / flops.
            latency: seconds per list, from a timing of the model at its first list; what is left after
            encoding is the decoder's. agreement: the share of lists whose best document must be Dense's; a
            list is ranked again with more tokens where that is not safe. It needs a profile that was tuned
            (`radical tune`); the others are better with one
        scorer: "logits" (default; one forward pass), "generate" (the model writes the order) or "pointwise"
            (each image alone with the query; the score is the probability that it is relevant)
        preset: how a trained reranker is asked: a preset's name, a JSON file or a dict. "auto" finds it by
            the model's name or configuration; "none" or None: no preset. Other arguments come before it
        template: a model family's name, a JSON file or a dict; by default the preset's or the model's own
        instruction: what to look for, for templates that have an `{instruction}`
        window, stride: lists longer than `window` (by default the template's, at most 52) are ranked in
            windows, `stride` apart; not pointwise
        permutations: how many orders of a list's candidates are ranked; more than one makes the result
            independent of the order of the documents, at that many times the cost. "auto", with `flops` or
            `speedup` and a tuned profile: one order, and a second one where the first is not sure, so that
            the mean cost is the budget
        pair_batch: pointwise, how many images run together; the scores are the same
        max_image_tokens: larger images are scaled down to this many visual tokens (default 384)
        max_pixels: larger images are refused
        max_query_tokens: longer queries and instructions are refused; by default there is no limit
        max_text_tokens: longer texts of documents are cut to this many tokens (`Ranking.cut`)
        page_text: pages of PDF files come with their own text; by default if the model reads texts
        vision_cache_bytes: how much of the images encoded last to keep; 0 for none
        vision_cache: the cache of another Reranker with the same model, to share it
        prompt_cache_bytes: how much to keep of what the layers before the first cut compute for the
            candidates. The next query over the same candidates in the same order starts there; its ranking is
            the same, bit by bit
        prompt_cache: the prompt cache of another Reranker with the same model, to share it
        max_new_tokens: the limit of a generated answer (default 512)
        on_unreadable: with scorer "generate", what to do with an answer that names no candidate: "raise" a
            ScoringError, or "keep" the order of the prompt and count it in `Ranking.unreadable`
        device, dtype, attn_implementation, model_kwargs: for loading the model, see
            `Backbone.from_pretrained`
        options: options of the method

    Example:
        >>> reranker = Reranker("scenes", method="radical", keep=0.2)
        >>> query, images = generated_list(0, candidates=8)
        >>> ranking = reranker.rank(query, images, top_k=3)
        >>> len(ranking), ranking[0].index
        (3, 0)
    """

    def __init__(
        self,
        model: str | Path | Backbone = DEFAULT_MODEL,
        method: str | Pruner = "radical",
        *,
        keep: float | None = None,
        speedup: float | None = None,
        flops: float | None = None,
        latency: float | None = None,
        agreement: float | None = None,
        scorer: str | None = None,
        preset: Preset | dict[str, Any] | str | Path | None = "auto",
        template: PromptTemplate | dict[str, Any] | str | Path | None = None,
        instruction: str | None = None,
        window: int | None = None,
        stride: int | None = None,
        permutations: Permutations = 1,
        pair_batch: int = 8,
        max_image_tokens: int | None = None,
        max_pixels: int = MAX_PIXELS,
        max_query_tokens: int | None = None,
        max_text_tokens: int = MAX_TEXT_TOKENS,
        page_text: bool | None = None,
        vision_cache_bytes: int = VISION_CACHE_BYTES,
        vision_cache: VisionCache | None = None,
        prompt_cache_bytes: int = PROMPT_CACHE_BYTES,
        prompt_cache: PromptCache | None = None,
        max_new_tokens: int | None = None,
        on_unreadable: Literal["raise", "keep"] = "raise",
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        attn_implementation: str | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        # Everything that can be wrong is checked before a model is loaded.
        if scorer is not None and scorer not in SCORERS:
            raise InputError(f"scorer must be one of {', '.join(SCORERS)}, not {scorer!r}")
        if on_unreadable not in ("raise", "keep"):
            raise InputError(f'on_unreadable must be "raise" or "keep", not {on_unreadable!r}')
        if max_image_tokens is not None and max_image_tokens < 1:
            raise InputError(f"max_image_tokens must be at least 1, not {max_image_tokens}")
        _check_count("pair_batch", pair_batch)
        _check_count("max_text_tokens", max_text_tokens)
        if preset == "none":
            preset = None
        if not (preset is None or preset == "auto" or isinstance(preset, Preset)):
            preset = Preset.load(preset)
        self.pruner = _pruner(
            method,
            options,
            keep=keep, speedup=speedup, flops=flops, latency=latency, agreement=agreement,
        )  # fmt: skip
        if permutations != 1:
            _checked_orders(permutations, self.pruner, scorer or "logits")
        self.latency, self.agreement = latency, agreement
        self._pace: Pace | None = None
        self._safety: Promise | None = None
        loading: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "attn_implementation": attn_implementation,
            "model_kwargs": model_kwargs,
        }
        if not isinstance(model, Backbone):
            model = Backbone.from_pretrained(model, **loading)
        elif any(value is not None for value in loading.values()):
            raise InputError(f"set {', '.join(loading)} in the Backbone that you pass")
        self.backbone = model
        if preset == "auto":  # a template of the user's or the model's own comes first
            preset = Preset.of(model) if template is None and own_template(model) is None else None
        assert preset is None or isinstance(preset, Preset)
        words = None if preset is None else preset.template
        self.template = choose_template(model, template, words, instruction)
        self._template_digest = self.template.digest
        self._head = None
        if self.template.head is not None:
            self._head = load_head(model.name, self.template.head.weights).to(model.device)
        self.scorer: str = scorer or (preset and preset.scorer) or "logits"
        self.max_new_tokens: int = max_new_tokens or (preset and preset.max_new_tokens) or 512
        self.max_image_tokens: int = (
            max_image_tokens or (preset and preset.max_image_tokens) or MAX_IMAGE_TOKENS
        )
        self._set_windows(window, stride)
        self.on_unreadable, self.max_query_tokens = on_unreadable, max_query_tokens
        self.pair_batch, self.max_text_tokens = pair_batch, max_text_tokens
        self.page_text = self.template.texts if page_text is None else page_text
        self.permutations = _checked_orders(permutations, self.pruner, self.scorer)
        self._calibrations: tuple[dict[str, Any], ...] | None = None
        self.vision_cache = VisionCache(vision_cache_bytes) if vision_cache is None else vision_cache
        # A known prompt is recognised by its cached features: without those, none would be found again.
        kept = prompt_cache_bytes if self.vision_cache.max_bytes else 0
        self.prompt_cache = PromptCache(kept) if prompt_cache is None else prompt_cache
        self.encoder = Encoder(model, self.vision_cache, self.max_image_tokens, max_pixels)

    def _set_windows(self, window: int | None, stride: int | None) -> None:
        template = self.template
        most = len(template.identifiers)
        self.window = template.window if window is None else window
        if not 2 <= self.window <= most:
            raise InputError(f"window must lie between 2 and {most}, not {self.window}")
        if stride is None and template.stride is not None:
            stride = min(template.stride, self.window - 1)
        self.stride = max(1, self.window // 2) if stride is None else stride
        if not 1 <= self.stride < self.window:
            raise InputError(
                f"stride must lie between 1 and window - 1 = {self.window - 1}, not {self.stride}"
            )

    @classmethod
    def from_pretrained(cls, model: str | Path = DEFAULT_MODEL, *args: Any, **options: Any) -> Reranker:
        """The same as `Reranker(model, ...)`, under the name that Hugging Face uses."""
        return cls(model, *args, **options)

    def with_pruner(self, pruner: Pruner) -> Reranker:
        """Return a Reranker that differs in its pruning method alone: the model and the cache are shared."""
        other = copy.copy(self)
        other.pruner, other.latency, other.agreement, other._safety = pruner, None, None, None
        return other

    def clear_caches(self) -> None:
        """Forget all images and prompts."""
        self.vision_cache.clear()
        self.prompt_cache.clear()

    def rank(
        self,
        query: str | Query | Mapping[str, Any],
        documents: Iterable[Document],
        *,
        top_k: int | None = None,
        reference: ImageLike | None = None,
        on_error: OnError = "raise",
        min_probability: float | None = None,
        permutations: Permutations | None = None,
        scores: Iterable[float] | None = None,
        weight: float | None = None,
    ) -> Ranking:
        """Order the documents by how well they match the query.

        Args:
            query: text, a `Query`, or a dict with `text`, `image` or `images`, and `instruction`
            documents: pictures (paths, PIL images, arrays, encoded bytes, data URIs), texts of several words,
                or dicts with `image` or `images` and `text`. Every page of a PDF file (a path, or bytes) is
                a result of its own
            top_k: return only the best K
            reference: an image that the query's text changes (composed retrieval)
            on_error: "raise" on a document that cannot be read, or "skip" it and rank the rest
            min_probability: leave out results below it. An empty ranking says that nothing fits
            permutations: rank several orders of the documents and average, or "auto"; by default the
                Reranker's. With scorer "pointwise" the order never matters
            scores: of a first stage, one per document; they are standardised over the list and added to the
                model's log-probabilities, times the weight
            weight: by default the one that was fitted for the model, or 0.2

        Returns:
            The documents, best first.
        """
        if reference is not None:
            if not isinstance(query, str):
                raise InputError("pass the reference either in the Query or as an argument, not both")
            query = Query(query, reference)
        one: Any = (query, documents) if scores is None else (query, documents, scores)
        rankings = self.rank_many(
            [one],
            top_k=top_k,
            on_error=on_error,
            min_probability=min_probability,
            permutations=permutations,
            weight=weight,
        )
        return next(iter(rankings))

    def rank_many(
        self,
        lists: Iterable[ListToRank],
        *,
        top_k: int | None = None,
        batch_size: int = 1,
        on_error: OnError = "raise",
        min_probability: float | None = None,
        permutations: Permutations | None = None,
        weight: float | None = None,
        progress: bool | bars.Progress = False,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[Ranking]:
        """Rank many lists.

        Args:
            lists: (query, documents) pairs, or (query, documents, scores of a first stage)
            top_k, on_error, min_probability, permutations, weight: as in `rank`
            batch_size: lists that run through the model together; the rankings are the same
            progress: show a bar on stderr, or pass a `Progress` of your own
            stop: called before each layer; once it returns True, a StoppedError is raised

        Returns:
            An iterator over the rankings, in the order of the lists.
        """
        if on_error not in ("raise", "skip"):
            raise InputError(f'on_error must be "raise" or "skip", not {on_error!r}')
        if top_k is not None:
            _check_count("top_k", top_k)
        _check_count("batch_size", batch_size)
        orders = _checked_orders(
            self.permutations if permutations is None else permutations, self.pruner, self.scorer
        )
        if min_probability is not None and not 0 <= min_probability <= 1:
            raise InputError(f"min_probability must lie between 0 and 1, not {min_probability!r}")
        if weight is not None and not (math.isfinite(weight) and weight >= 0):
            raise InputError(f"weight must be at least 0, not {weight!r}")
        wanted = _Wanted(top_k, on_error, min_probability, orders, weight)
        rankings = self._rank_many(lists, batch_size, wanted)
        if stop is not None:
            rankings = self._until(stop, rankings)
        if not progress:
            return rankings
        total = len(lists) if isinstance(lists, Sequence) else None
        shown = bars.bar if progress is True else progress
        return iter(shown(rankings, "ranking", total=total))

    def _until(self, stop: Callable[[], bool], rankings: Iterator[Ranking]) -> Iterator[Ranking]:
        while True:
            # Only while a ranking is made: between two, the caller may use the model for other things.
            with self.backbone.stopping(stop):
                ranking = next(rankings, None)
            if ranking is None:
                return
            yield ranking

    def _rank_many(self, lists: Iterable[ListToRank], batch_size: int, wanted: _Wanted) -> Iterator[Ranking]:
        remaining = iter(lists)
        while batch := [_Given(*given) for given in islice(remaining, batch_size)]:
            loaded = [self._load(given, wanted.on_error) for given in batch]
            priors = [given.prior(work) for given, (work, *_) in zip(batch, loaded, strict=True)]
            # Lists that fit a window run together; longer ones take several passes of their own.
            short = [i for i, (work, *_) in enumerate(loaded) if self._fits(len(work.candidates))]
            scored = self._score_in_orders([loaded[i][0] for i in short], [priors[i] for i in short], wanted)
            together = dict(zip(short, scored, strict=True))
            for i, (work, skipped, cut) in enumerate(loaded):
                parts = [together[i]] if i in together else []
                if parts:
                    order = sorted(enumerate(parts[0].answer.scores), key=itemgetter(1), reverse=True)
                else:
                    order = self._in_windows(work, priors[i], wanted, parts)
                yield self._ranking(work, batch[i].documents, order, parts, wanted, skipped, cut)

    def _ranking(
        self,
        work: CandidateList,
        documents: Sequence[Document],
        order: Sequence[tuple[int, float]],
        parts: Sequence[_Scored],
        wanted: _Wanted,
        skipped: tuple[Skipped, ...],
        cut: tuple[Cut, ...],
    ) -> Ranking:
        """Return the ranking of a list. order: (place in `work`, score), best first; parts: its prompts"""
        signals = parts[-1].answer.signals if parts else {}
        known = self.known_calibrations if self.scorer == "logits" and signals else ()
        fitted, calibrated = probabilities_of(
            [score for _, score in order], signals, known, self.score_settings, front=self.window
        )
        results = []
        for (place, score), probability in zip(order, fitted, strict=True):
            one = work.candidates[place]
            results.append(RankedDocument(one.index, score, documents[one.index], one.page, probability))
        least = wanted.min_probability
        return Ranking(
            tuple([one for one in results if least is None or one.probability >= least][: wanted.top_k]),
            tuple(report for part in parts for report in (*part.others, part.report)),
            skipped,
            sum(part.answer.repairs for part in parts),
            sum(not part.answer.readable for part in parts),
            work.text,
            self.backbone.name,
            type(self.pruner).__name__,
            cut,
            results[0].probability if results else 0.0,
            calibrated,
            signals,
            self.agreement,
        )

    # Before the model runs.

    def _load(
        self, given: _Given, on_error: OnError
    ) -> tuple[CandidateList, tuple[Skipped, ...], tuple[Cut, ...]]:
        query = self.check_query(given.query)
        composed = query.reference is not None
        context = self.encoder.load_context(
            query.images if query.reference is None else [query.reference], REFERENCE if composed else CONTEXT
        )
        candidates, unusable = self.encoder.load(
            given.documents, skip=on_error == "skip", page_text=self.page_text
        )
        cuts: list[Cut] = []
        for place, one in enumerate(candidates):
            if one.text:
                with self.backbone.exclusive():  # other threads use the tokenizer, too
                    text, tokens = cut_text(self.backbone, one.text, self.max_text_tokens)
                if text != one.text:
                    candidates[place] = replace(one, text=text)
                    cuts.append(Cut(one.index, tokens, self.max_text_tokens, one.page))
        work = CandidateList(query.text.strip(), candidates, context, composed, query.instruction)
        skipped = (Skipped(index, reason) for index, reason in unusable.items())
        return work, tuple(skipped), tuple(cuts)

    def check_query(self, query: str | Query | Mapping[str, Any]) -> Query:
        """Return a query in any form as a `Query`, or raise an InputError."""
        query = Query.of(query)
        text = query.text
        if query.images and query.reference is not None:
            raise InputError("a query with a reference image has no other pictures")
        if not isinstance(text, str) or not (text.strip() or query.images):
            raise InputError(f"the query is empty: {text!r}")
        limit = self.max_query_tokens
        for name, given in (("query", text), ("instruction", query.instruction)):
            if limit is None or given is None:
                continue
            with self.backbone.exclusive():
                count = query_tokens(self.backbone, given)
            if count > limit:
                raise InputError(f"the {name} has {count} tokens, more than the limit of {limit}")
        return query

    def _fits(self, count: int) -> bool:
        """Return whether a list of so many candidates is scored in one go."""
        if self.scorer == "pointwise":
            return count > 0
        # A single candidate is first in any case; but the model may say that it does not fit.
        least = 1 if self.template.none is not None and self.scorer == "logits" else 2
        return least <= count <= self.window

    def _in_windows(
        self, work: CandidateList, prior: Sequence[float] | None, wanted: _Wanted, scored: list[_Scored]
    ) -> list[tuple[int, float]]:
        """Rank a list that does not fit a window. Returns (place in `work`, score) pairs, best first.

        scored: gets what every prompt gave
        """
        if len(work.candidates) < 2:
            return [(0, 0.0)] * len(work.candidates)  # a single candidate is certain: log 1 = 0
        for name, image in zip(work.names, work.images, strict=True):
            self.encoder.check(image, name)  # now, not after some windows have run

        def score(places: Sequence[int]) -> Sequence[float]:
            part = _part(work, places)
            own = None if prior is None else [prior[place] for place in places]
            scored.extend(self._score_in_orders([part], [own], wanted))
            return scored[-1].answer.scores

        return rank_in_windows(len(work.candidates), self.window, self.stride, score)

    # Running the model.

    def _score_in_orders(
        self, lists: Sequence[CandidateList], priors: Sequence[Sequence[float] | None], wanted: _Wanted
    ) -> list[_Scored]:
        """Score lists that each fit a window, in several orders of their candidates, with a prior."""
        if wanted.permutations == 1 or self.scorer == "pointwise":
            scored = self._score(lists)
        else:
            scored = self._averaged_orders(lists, wanted.permutations)
        return [
            one if prior is None else self._with_prior(one, prior, wanted.weight)
            for one, prior in zip(scored, priors, strict=True)
        ]

    def _averaged_orders(self, lists: Sequence[CandidateList], permutations: Permutations) -> list[_Scored]:
        """Score lists in several orders of their candidates. "auto": in two if the first is not sure."""
        if permutations == "auto":
            rankers, threshold = self._two_orders()
        else:
            rankers, threshold = [self] * permutations, math.inf
        orders = [shuffles(list(map(content_of, one.candidates)), len(rankers)) for one in lists]
        rounds: list[list[_Scored]] = [[] for _ in lists]
        for turn, ranker in enumerate(rankers):
            # The vision cache has the features from the first turn on.
            asked = [
                i
                for i, own in enumerate(orders)
                if turn < len(own) and (not turn or margin(rounds[i][-1].answer.scores) < threshold)
            ]
            parts = ranker._score([_part(lists[i], orders[i][turn]) for i in asked])
            for i, part in zip(asked, parts, strict=True):
                rounds[i].append(part)
        return [_averaged(own[: len(parts)], parts) for own, parts in zip(orders, rounds, strict=True)]

    def _two_orders(self) -> tuple[list[Reranker], float]:
        """Return what ranks the first order and the second, and the margin below which there is a second."""
        self.prepare()
        assert isinstance(self.pruner, RaDiCal)
        assert self.pruner.flops is not None
        second = SecondOrder.of(self._tuned_pairs, self.pruner.flops, self.backbone.name)
        return [self.with_pruner(replace(self.pruner, flops=second.first)), self], second.threshold

    def _with_prior(self, scored: _Scored, prior: Sequence[float], weight: float | None) -> _Scored:
        """Add a first stage's standardised scores."""
        weight = self.weight if weight is None else weight
        scores = mixed(scored.answer.scores, prior, weight, pointwise=self.scorer == "pointwise")
        return replace(scored, answer=replace(scored.answer, scores=scores))

    def _score(self, lists: Sequence[CandidateList]) -> list[_Scored]:
        """Score lists that each fit a window; again with more tokens if the first result is not safe."""
        if not lists:
            return []
        scored = self._score_once(lists)
        if self._safety is None:
            return scored
        threshold = self._safety.threshold
        again = [i for i, one in enumerate(scored) if margin(one.answer.scores) < threshold]
        larger = self.with_pruner(self._pruner_for(self._safety.pair.large))
        for i, one in zip(again, larger._score([lists[i] for i in again]), strict=True):
            scored[i] = one.after((*scored[i].others, scored[i].report))
        return scored

    def _score_once(self, lists: Sequence[CandidateList]) -> list[_Scored]:
        """Score lists that each fit a window: listwise in one batch, pointwise in batches of pairs."""
        self.prepare()
        with self.backbone.exclusive():
            clock = Clock(len(lists))
            look = partial(self._look, by_image=True)
            full, features = self.encoder.encode_lists(lists, self.pruner, look, clock)
            asked = [self._asked(*each, clock) for each in zip(lists, full, features, strict=True)]
            flat = list(chain(*asked))
            scored: dict[int, _Scored] = {}
            order, together = list(range(len(flat))), len(flat)
            if self.scorer == "pointwise":
                # Prompts of similar length share a batch, so that little of it is padding.
                order.sort(key=lambda i: flat[i].size)
                together = self.pair_batch
            for start in range(0, len(flat), together):
                places = order[start : start + together]
                scored |= zip(places, self._run([flat[i] for i in places], clock), strict=True)
        parts = map(scored.__getitem__, range(len(flat)))
        if self.scorer != "pointwise":
            return list(parts)
        return [_joined(list(islice(parts, len(own))), dict(clock.seconds)) for own in asked]

    def _asked(
        self, work: CandidateList, full: Sequence[int], features: Sequence[ImageFeatures], clock: Clock
    ) -> list[_Asked]:
        """Return the prompts of one list: one of all candidates, or one of each."""
        own = work.own(features)
        if self.scorer != "pointwise":
            return [_Asked(work, features, own, sum(full))]
        context, sizes = features[: len(work.context)], iter(full)
        asked = [
            _Asked(
                replace(work, candidates=[candidate]),
                [*context, *images],
                [images],
                sum(islice(sizes, len(images))),
                place,
            )
            for place, (candidate, images) in enumerate(zip(work.candidates, own, strict=True))
        ]
        with clock("prior"):
            stages = stages_of(self.pruner, self.backbone.shape.num_layers, self.backbone.family.readable)
            shares = self.pruner.pool(partial(self._look, work, features), stages)
        if shares is None:
            return asked
        return [replace(one, share=share) for one, share in zip(asked, shares, strict=True)]

    def _prompt(self, work: CandidateList, features: Sequence[ImageFeatures], place: int = 0) -> Prompt:
        """Return the prompt of a list; pointwise, of its first candidate, at this place of the whole list."""
        context = tuple(sizes_of(features[: len(work.context)]))
        contents = [
            Content(tuple(sizes_of(own)), candidate.text)
            for candidate, own in zip(work.candidates, work.own(features), strict=True)
        ]
        query = Content(() if work.composed else context, work.text)
        model, template = self.backbone, self.template
        options: Any = {
            "reference_size": context[0] if work.composed else None,
            "instruction": work.instruction,
        }
        if self.scorer == "pointwise":
            return build_pair(model, template, query, contents[0], place=place, **options)
        generate = self.scorer == "generate"
        return build_prompt(model, template, query, contents, generate=generate, **options)

    def _run(self, asked: Sequence[_Asked], clock: Clock) -> list[_Scored]:
        """Run prompts in one batch."""
        model = self.backbone
        with clock("preprocess"):
            prompts = [self._prompt(one.work, one.features, one.place) for one in asked]
            layouts = [prompt.layout for prompt in prompts]
            pruner = self.pruner if self.latency is None else self._in_time(self.latency, layouts, clock)
            signals = None
            if pruner.reads_encoder:
                signals = [joined_signals(list(chain(*one.own))) for one in asked]
            shares = [one.share for one in asked if one.share is not None]
            prefix = None
            if len(prompts) == 1 and self.scorer != "pointwise":  # what other queries share
                ids = tuple(prompts[0].ids[: min(layouts[0].query)])
                pictures = tuple(asked[0].features[i].tokens for i in prompts[0].order)
                prefix = Prefix(ids, pictures, self.prompt_cache)
            pruning = pruner.on(model.model, layouts, signals, shares or None, prefix)
            features = [one.features[i] for one, own in zip(asked, prompts, strict=True) for i in own.order]
            inputs = model.inputs([prompt.ids for prompt in prompts], features)
        with clock("decoder"), pruning as run:
            if self.scorer == "generate":
                output: Iterable[Any] = model.write(inputs, self.max_new_tokens)
            else:
                output = model.next_token_logits(inputs) if self._head is None else model.last_hidden(inputs)
        # A method computes its prior at its first stage: that time is part of the selection's.
        prior, selection = run.seconds["prior"], run.seconds["selection"]
        clock.add("prior", prior)
        clock.add("selection", selection - prior)
        clock.add("decoder", -selection)
        with clock("scoring"):
            read: Callable[[Prompt, Any], Answer] = Prompt.scores
            if self.scorer != "logits":
                read = self._read_order if self.scorer == "generate" else self._read_pair
            answers = list(map(read, prompts, output))
        reports = [
            make_report(
                method=type(pruner).__name__,
                keep=None if getattr(pruner, "flops", None) else pruner.keep,
                layout=layouts[i],
                stages=run.stages[i],
                shape=model.shape,
                seconds=dict(clock.seconds),
                indices=[candidate.index for candidate in one.work.candidates],
                features=one.own,
                full=one.full,
                reused=run.reused,
            )
            for i, one in enumerate(asked)
        ]
        return list(map(_Scored, answers, reports))

    def _in_time(self, latency: float, layouts: Sequence[Layout], clock: Clock) -> Pruner:
        """Return the method for these prompts: one that fits what is left of the latency."""
        assert self._pace is not None
        sizes = [(len(layout.positions), layout.length - len(layout.positions)) for layout in layouts]
        dense = sum(arithmetic((), (), self.backbone.shape, *size) for size in sizes)
        # The clock counts seconds per list; pointwise, the prompts of a list share them.
        left = (latency - sum(clock.seconds.values())) * (1 if self.scorer == "pointwise" else len(layouts))
        assert isinstance(self.pruner, RaDiCal)
        return replace(self.pruner, flops=self._pace.flops(left, dense))

    def _pruner_for(self, flops: float) -> Pruner:
        return Dense() if flops >= 1 else RaDiCal(flops=flops, profile=self.profile)

    def _read_pair(self, prompt: Prompt, output: Tensor) -> Answer:
        """Read the log of the probability that a candidate is relevant. output: logits, or a hidden state"""
        if self._head is None or self.template.head is None:
            return Answer(prompt.scores(output).scores[:1])
        value = self._head(output)[0] - self.template.head.bias
        if not value.isfinite():
            raise ScoringError("the value of the model's head is not finite: there is no score in it")
        return Answer([float(torch.nn.functional.logsigmoid(value))])

    def _read_order(self, prompt: Prompt, text: str) -> Answer:
        """Read a generated order."""
        count = len(prompt.identifiers)
        try:
            parsed = parse_permutation(text, self.template.identifiers[:count])
        except UnreadableAnswerError:
            if self.on_unreadable == "raise":
                raise
            return Answer(permutation_scores(range(count)), count, readable=False)
        return Answer(permutation_scores(parsed.order), parsed.repairs)

    def _look(
        self, work: CandidateList, features: Sequence[ImageFeatures], *, by_image: bool = False
    ) -> Look:
        """Return the candidates, and the query as the decoder will read it.

        by_image: every picture counts as a candidate
        """
        context, images = features[: len(work.context)], features[len(work.context) :]
        if work.text:
            prompt = self._prompt(work, features)
            ids = torch.tensor(prompt.ids, device=self.backbone.device)[list(prompt.layout.query)]
            words = self.backbone.model.get_input_embeddings()(ids).detach()
        else:  # a query of pictures alone
            words = torch.cat([feature.tokens for feature in context])
        query = words.float().mean(dim=0)
        owners = list(range(len(images)))
        if not by_image:
            owners = [number for number, one in enumerate(work.candidates) for _ in one.images]
        sizes = torch.tensor([len(feature.tokens) for feature in images], dtype=torch.long)
        vision = torch.cat([words[:0], *(feature.tokens for feature in images)])
        owner = torch.tensor(owners, dtype=torch.long).repeat_interleave(sizes).to(vision.device)
        return Look(vision, owner, query, len(images) if by_image else len(work.candidates), words)

    # The settings in use.

    @property
    def settings(self) -> dict[str, Any]:
        """The model and how lists are put to it. Together with the pruner, this decides a ranking."""
        return {
            "model": self.backbone.name,
            "fingerprint": self.backbone.fingerprint,
            "dtype": self.backbone.dtype,
            "scorer": self.scorer,
            "max_image_tokens": self.max_image_tokens,
            "max_new_tokens": self.max_new_tokens,
            "max_text_tokens": self.max_text_tokens,
            "page_text": self.page_text,
            "template": self._template_digest,
            "window": self.window,
            "stride": self.stride,
            **({"permutations": self.permutations} if self.permutations != 1 else {}),
            **{
                name: value for name in ("latency", "agreement") if (value := getattr(self, name)) is not None
            },
        }

    @property
    def score_settings(self) -> dict[str, Any]:
        """What a calibration of the scores depends on."""
        return {
            "method": type(self.pruner).__name__,
            "keep": self.pruner.keep,
            **({"flops": flops} if (flops := getattr(self.pruner, "flops", None)) else {}),
            "scorer": self.scorer,
            "template": self._template_digest,
            "max_image_tokens": self.max_image_tokens,
        }

    @property
    def calibration(self) -> ScoreCalibration | None:
        """The calibration of the scores in use, if one was fitted with these settings."""
        return calibration_for(self.known_calibrations, self.score_settings)

    @property
    def known_calibrations(self) -> tuple[dict[str, Any], ...]:
        """All calibrations in the model's profile."""
        if self._calibrations is None:
            name, profile = self.backbone.name, self.profile
            if (profile is None or not profile.scores) and Profile.may_exist(name, folder_of(name)):
                profile = Profile.find(self.backbone.identity)
            self._calibrations = () if profile is None else profile.scores
        return self._calibrations

    @property
    def weight(self) -> float:
        """The weight of a first stage's scores by default: the fitted one, or 0.2."""
        calibration = self.calibration
        fitted = None if calibration is None else calibration.weight
        return DEFAULT_WEIGHT if fitted is None else fitted

    @property
    def profile(self) -> Profile | None:
        """The trust profile in use, if the method has one."""
        return getattr(self.pruner, "profile", None)

    @property
    def _tuned_pairs(self) -> tuple[dict[str, Any], ...]:
        """What `radical tune` saw of the model's schedules."""
        return () if self.profile is None else self.profile.safety

    def prepare(self) -> None:
        """Find the model's trust profile if the method needs it, or measure and save it now."""
        needed = self.pruner.needs_profile
        if needed is not None:
            with self.backbone.exclusive():
                known = Profile.find(self.backbone.identity, alpha=needed == "alpha")
                profile = known or measured_profile(self)
                self.pruner = self.pruner.with_profile(profile)
        if self.latency is not None and self._pace is None:
            self._pace = measured_pace(self.with_pruner(Dense()))
        if self.agreement is not None and self._safety is None:
            self._safety = promise(self._tuned_pairs, self.agreement, self.backbone.name)
            self.pruner = self._pruner_for(self._safety.pair.small)


def _pruner(method: str | Pruner, options: dict[str, Any], **budgets: float | None) -> Pruner:
    """Return the method: as it is, or by its name with the options and the budget that were given."""
    given = {name: value for name, value in budgets.items() if value is not None}
    if isinstance(method, Pruner):
        if given or options:
            raise InputError("set keep and other options in the Pruner that you pass")
        return method
    if given.keys() - {"keep"}:
        given = Budget(**given).options(method)
    return build(method, _also=_OPTIONS, **options, **given)


_OPTIONS = [
    name
    for name, parameter in inspect.signature(Reranker).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
]


def _joined(parts: Sequence[_Scored], seconds: dict[str, float]) -> _Scored:
    """Return what the prompts of one list gave together."""
    answers = [part.answer for part in parts]
    answer = Answer(
        list(chain(*(own.scores for own in answers))),
        sum(own.repairs for own in answers),
        all(own.readable for own in answers),
    )
    return _Scored(answer, join_reports([part.report for part in parts], seconds))


def _part(work: CandidateList, places: Sequence[int]) -> CandidateList:
    """Return the list with these of its candidates, in this order."""
    return replace(work, candidates=[work.candidates[place] for place in places])


def _averaged(orders: Sequence[Sequence[int]], parts: Sequence[_Scored]) -> _Scored:
    """Return what the prompts of one list in several orders gave together."""
    answers = [part.answer for part in parts]
    names = answers[0].signals
    answer = Answer(
        averaged(orders, [own.scores for own in answers]),
        sum(own.repairs for own in answers),
        all(own.readable for own in answers),
        {name: sum(own.signals[name] for own in answers) / len(answers) for name in names},
    )
    whole = parts[0]
    for part in parts[1:]:
        whole = part.after((*whole.others, whole.report))
    return replace(whole, answer=answer)


def _checked_orders(permutations: Permutations, pruner: Pruner, scorer: str) -> Permutations:
    """Return how many orders are wanted, or raise an InputError."""
    if permutations != "auto":
        _check_count("permutations", permutations)
    elif not isinstance(pruner, RaDiCal) or pruner.flops is None or scorer != "logits":
        raise InputError(
            'permutations="auto" needs the method "radical" with flops or speedup, and the scorer "logits"'
        )
    return permutations


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1, not {value!r}")


def _listed(documents: Any) -> Sequence[Document]:
    """Return the documents of any iterable as a list. A single document is an error."""
    shape = getattr(documents, "shape", None)
    single = isinstance(documents, (str, bytes, bytearray, memoryview, os.PathLike, Image.Image, Mapping))
    if single or not isinstance(documents, Iterable) or (shape is not None and len(shape) < 4):
        raise InputError(f"documents must be a list, not a single document ({type(documents).__name__})")
    return documents if isinstance(documents, (list, tuple)) else list(documents)
