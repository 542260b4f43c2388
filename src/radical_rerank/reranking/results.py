"""What comes out: rankings, and what pruning did to each list."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any, overload

from radical_rerank.backbones import Block, ImageFeatures
from radical_rerank.method import DecoderShape, kv_bytes, macs, saving, tokens_per_layer
from radical_rerank.pruning import Layout, PrunedStage
from radical_rerank.reranking.encoding import Document, Parts, with_page


@dataclass(frozen=True)
class RankedDocument:
    """One document of a ranking.

    Args:
        index: its place in the list that was passed
        score: the log of its probability among the candidates of its list, at most 0; with scorer
            "pointwise", the log of the probability that it is relevant
        document: the document itself
        page: the number of the page, from 1, if it is one of a PDF file
        fitted: the probability by a calibration of the model's scores, if there is one

    Example:
        >>> RankedDocument(index=3, score=0.0, document="a.jpg").probability
        1.0
    """

    index: int
    score: float
    document: Document | None
    page: int | None = None
    fitted: float | None = None

    @property
    def probability(self) -> float:
        """The probability that it is relevant, if `Ranking.calibrated` or with scorer "pointwise".

        Otherwise exp(score), its share of the list: one document of a list always has a large one.
        """
        return math.exp(self.score) if self.fitted is None else self.fitted


@dataclass(frozen=True)
class Skipped:
    """A document that could not be read (`on_error="skip"`).

    Args:
        index: its place in the list that was passed
        reason: why it was skipped

    Example:
        >>> Skipped(2, "document 2 is empty").index
        2
    """

    index: int
    reason: str


@dataclass(frozen=True)
class Cut:
    """A document whose text was longer than `max_text_tokens`.

    Args:
        index: its place in the list that was passed
        tokens: of its text
        kept: how many of them the model read
        page: the number of the page, if it is one of a PDF file

    Example:
        >>> Cut(index=2, tokens=700, kept=512).kept
        512
    """

    index: int
    tokens: int
    kept: int
    page: int | None = None

    @property
    def name(self) -> str:
        """What messages call the document."""
        return with_page(f"document {self.index}", self.page)


@dataclass(frozen=True, repr=False)
class Ranking(Sequence[RankedDocument]):
    """Documents, best first. Index it, slice it or iterate over it.

    Args:
        results: the documents in order
        reports: one per prompt that ran; the last one ranked the front of the list. With scorer "pointwise",
            one for all prompts of the list
        skipped: documents that could not be read
        repairs: corrections made to a generated order (scorer "generate")
        unreadable: answers without an order, for which the prompt's order was kept (`on_unreadable="keep"`)
        query: the query's text
        model: the model's name
        method: the pruning method
        cut: documents whose text was cut
        confidence: the probability that the best document is a match, before any was left out; 0 without
            documents
        calibrated: whether probabilities are fitted on lists with known matches; see `radical calibrate`
        signals: facts about the whole list that a calibration can use
        agreement: the promised share of lists whose best document is Dense's, if one was asked for; a list
            with several reports was then ranked again with more tokens

    Example:
        >>> ranking = Ranking((RankedDocument(1, -0.1, "b.jpg"), RankedDocument(0, -2.4, "a.jpg")))
        >>> ranking[0].document, ranking.order
        ('b.jpg', [1, 0])
        >>> ranking
        <Ranking of 2: 1 (0.90), 0 (0.09)>
    """

    results: tuple[RankedDocument, ...]
    reports: tuple[PruningReport, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    repairs: int = 0
    unreadable: int = 0
    query: str = ""
    model: str = ""
    method: str = ""
    cut: tuple[Cut, ...] = ()
    confidence: float = 0.0
    calibrated: bool = False
    signals: Mapping[str, float] = field(default_factory=dict)
    agreement: float | None = None

    def __len__(self) -> int:
        return len(self.results)

    @overload
    def __getitem__(self, place: int) -> RankedDocument: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[RankedDocument, ...]: ...
    def __getitem__(self, place: int | slice) -> RankedDocument | tuple[RankedDocument, ...]:
        return self.results[place]

    def __repr__(self) -> str:
        best = ", ".join(f"{r.index} ({r.probability:.2f})" for r in self.results[:3])
        more = ", …" if len(self.results) > 3 else ""
        return f"<Ranking of {len(self.results)}{': ' if best else ''}{best}{more}>"

    @property
    def order(self) -> list[int]:
        """The documents' indices, best first."""
        return [result.index for result in self.results]

    @property
    def report(self) -> PruningReport | None:
        """What pruning did to the (front of the) list; None if no prompt ran."""
        return self.reports[-1] if self.reports else None

    @property
    def totals(self) -> Totals:
        """The cost of all prompts together."""
        return Totals.of(self.reports)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the pictures, ready for JSON: what `radical rank --json` prints."""
        return {
            "query": self.query,
            "model": self.model,
            "method": self.method,
            "confidence": self.confidence,
            "calibrated": self.calibrated,
            **({} if self.agreement is None else {"agreement": self.agreement}),
            "results": [
                {
                    "rank": rank,
                    "index": result.index,
                    "score": result.score,
                    "probability": result.probability,
                    "document": _path_of(result.document),
                    **({} if result.page is None else {"page": result.page}),
                }
                for rank, result in enumerate(self.results, start=1)
            ],
            "skipped": [asdict(skipped) for skipped in self.skipped],
            "cut": [asdict(cut) for cut in self.cut],
            "repairs": self.repairs,
            "unreadable": self.unreadable,
            "totals": asdict(self.totals),
            "pruning": [report.to_dict() for report in self.reports],
        }


def _path_of(document: Document | None) -> str | None:
    """Return the document's path, name or text; None for pictures, bytes and data URIs."""
    if isinstance(document, Mapping):  # the path of its only picture says more than its text
        parts = Parts.of(document, "")
        return (_path_of(parts.images[0]) if parts.images else None) or parts.text or None
    if isinstance(document, (str, os.PathLike)) and not str(document).startswith("data:"):
        return str(document)
    return None


# What pruning did.


@dataclass(frozen=True)
class StageReport:
    """One pruning stage, ready for JSON.

    Args:
        layer, when: where it acted
        before, after: visual tokens alive before and after it
        alpha: the trust coefficient α, if the method has one
        survivors: per candidate, the numbers of its tokens that are still alive

    Example:
        >>> StageReport(4, "before", 100, 67, 0.5, [[0, 1], [3]]).after
        67
    """

    layer: int
    when: str
    before: int
    after: int
    alpha: float | None
    survivors: list[list[int]]


@dataclass(frozen=True)
class PruningReport:
    """What pruning did to one prompt, and what it cost. Pointwise, to the prompts of one list together.

    Costs are multiply-accumulates of the decoder's prefill and bytes of its key-value cache, counted as in
    the paper.

    Args:
        method, keep: the pruning method and its budget
        tokens, visual_tokens: of the prompt without any reduction
        visual_tokens_entering: fewer if the method reduces before the decoder
        stages: one per pruning stage
        tokens_per_layer: text and visual tokens in each layer
        macs, macs_dense, kv_bytes, kv_bytes_dense: costs with and without pruning
        macs_reused: what of `macs` an earlier prompt over the same candidates had already computed
        tokens_before_query: of the prompt; what other queries over the same candidates share
        flops_saved, kv_saved: the fractions that pruning saved
        seconds: preprocess, vision, prior (once per list), selection (at the stages), decoder, scoring.
            Lists of one batch share its time equally
        indices: the documents of this prompt, in its order, by their index in the list that was passed
        blocks: per candidate, which part of its pictures each token shows
        images: per candidate, the visual tokens of each of its pictures
        prompts: how many prompts these are the sums of
        repeats: whether an earlier prompt had ranked the same candidates, in another order or with fewer
            tokens

    Example:
        >>> query, images = generated_list(0, candidates=4)
        >>> report = Reranker("scenes", keep=0.5).rank(query, images).report
        >>> report.visual_tokens_left < report.visual_tokens, round(report.flops_saved, 1)
        (True, 0.3)
    """

    method: str
    keep: float
    tokens: int
    visual_tokens: int
    visual_tokens_entering: int
    stages: list[StageReport]
    tokens_per_layer: list[int]
    macs: int
    macs_dense: int
    kv_bytes: int
    kv_bytes_dense: int
    flops_saved: float
    kv_saved: float
    seconds: dict[str, float]
    indices: list[int]
    blocks: list[list[Block]] = field(repr=False)
    images: list[list[int]]
    prompts: int = 1
    macs_reused: int = 0
    tokens_before_query: int = 0
    repeats: bool = False

    @property
    def visual_tokens_left(self) -> int:
        """Visual tokens alive after the last stage."""
        return self.stages[-1].after if self.stages else self.visual_tokens_entering

    @property
    def average_tokens(self) -> float:
        """Tokens per layer including text, mean over layers."""
        return sum(self.tokens_per_layer) / max(1, len(self.tokens_per_layer))

    def to_dict(self, *, survivors: bool = False) -> dict[str, Any]:
        """Return the report, ready for JSON; with the survivors and their places only if requested."""
        data = asdict(self)
        if not survivors:
            data.pop("blocks")
            data.pop("images")
            for stage in data["stages"]:
                stage.pop("survivors")
        return data | {name: getattr(self, name) for name in ("visual_tokens_left", "average_tokens")}


@dataclass(frozen=True)
class Totals:
    """The cost of all prompts of one ranking: a list longer than a window takes several.

    flops_saved, kv_saved: against one prompt of the same candidates without pruning. Negative if ranking them
    several times cost more than that.
    """

    prompts: int
    tokens: int
    visual_tokens: int
    visual_tokens_left: int
    average_tokens: float
    flops_saved: float
    kv_saved: float
    seconds: dict[str, float]

    @classmethod
    def of(cls, reports: Sequence[PruningReport]) -> Totals:
        """Add up these reports."""
        seconds: dict[str, float] = {}
        for report in reports:
            for part, spent in report.seconds.items():
                seconds[part] = seconds.get(part, 0.0) + spent
        once = [report for report in reports if not report.repeats]
        return cls(
            prompts=sum(report.prompts for report in reports),
            tokens=sum(report.tokens for report in reports),
            visual_tokens=sum(report.visual_tokens for report in reports),
            visual_tokens_left=sum(report.visual_tokens_left for report in reports),
            average_tokens=sum(report.average_tokens for report in reports),
            flops_saved=saving(sum(r.macs for r in reports), sum(r.macs_dense for r in once)),
            kv_saved=saving(sum(r.kv_bytes for r in reports), sum(r.kv_bytes_dense for r in once)),
            seconds=seconds,
        )


def make_report(
    *,
    method: str,
    keep: float | None,
    layout: Layout,
    stages: Sequence[PrunedStage],
    shape: DecoderShape,
    seconds: dict[str, float],
    indices: Sequence[int],
    features: Sequence[Sequence[ImageFeatures]],
    full: int,
    reused: tuple[int, int] = (0, 0),
) -> PruningReport:
    """Report on one prompt.

    keep: None if the budget is another one; the report then has the share that is left
    features: per candidate, of its pictures
    full: the candidates' visual tokens at full size
    reused: how many tokens were known, and after how many layers
    """
    blocks = [[block for feature in own for block in feature.blocks] for own in features]
    reports = [_stage_report(stage, layout) for stage in stages]
    visual = len(layout.positions)
    other = layout.length - visual
    places = [(stage.layer, stage.when, other + stage.after) for stage in stages]
    counts = tokens_per_layer(layout.length, places, shape.num_layers)
    dense = [other + full] * shape.num_layers
    cost, cost_dense = macs(counts, shape), macs(dense, shape)
    known = [reused[0] if layer < reused[1] else 0 for layer in range(shape.num_layers)]
    cache, cache_dense = kv_bytes(counts, shape), kv_bytes(dense, shape)
    return PruningReport(
        method=method,
        keep=(stages[-1].after if stages else visual) / max(visual, 1) if keep is None else keep,
        tokens=other + full,
        visual_tokens=full,
        visual_tokens_entering=visual,
        stages=reports,
        tokens_per_layer=counts,
        macs=cost,
        macs_dense=cost_dense,
        kv_bytes=cache,
        kv_bytes_dense=cache_dense,
        flops_saved=saving(cost, cost_dense),
        kv_saved=saving(cache, cache_dense),
        seconds=seconds,
        indices=list(indices),
        blocks=blocks,
        images=[[len(feature.tokens) for feature in own] for own in features],
        macs_reused=macs(known, shape),
        tokens_before_query=min(layout.query, default=0),
    )


def join_reports(parts: Sequence[PruningReport], seconds: dict[str, float]) -> PruningReport:
    """Report on the prompts of one list together. seconds: of all of them"""
    if len(parts) == 1:
        return replace(parts[0], seconds=seconds)
    sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
    return replace(
        parts[0],
        **sums,
        stages=[_joined_stage(same) for same in zip(*(part.stages for part in parts), strict=True)],
        tokens_per_layer=[sum(n) for n in zip(*(part.tokens_per_layer for part in parts), strict=True)],
        flops_saved=saving(sums["macs"], sums["macs_dense"]),
        kv_saved=saving(sums["kv_bytes"], sums["kv_bytes_dense"]),
        seconds=seconds,
        indices=list(chain(*(part.indices for part in parts))),
        blocks=list(chain(*(part.blocks for part in parts))),
        images=list(chain(*(part.images for part in parts))),
    )


_COSTS = ("macs", "macs_dense", "kv_bytes", "kv_bytes_dense")
_SUMMED = ("tokens", "visual_tokens", "visual_tokens_entering", *_COSTS, "macs_reused", "prompts")


def _joined_stage(same: Sequence[StageReport]) -> StageReport:
    return replace(
        same[0],
        before=sum(stage.before for stage in same),
        after=sum(stage.after for stage in same),
        # A prompt that keeps all its tokens at a stage has not asked for α.
        alpha=next((stage.alpha for stage in same if stage.alpha is not None), None),
        survivors=list(chain(*(stage.survivors for stage in same))),
    )


def _stage_report(stage: PrunedStage, layout: Layout) -> StageReport:
    sizes = layout.candidate_of.bincount(minlength=layout.num_candidates)
    ends = sizes.cumsum(0)
    tokens = stage.survivors.cpu()
    owners = layout.candidate_of[tokens]
    counts = owners.bincount(minlength=len(sizes)).tolist()
    survivors = [part.tolist() for part in (tokens - (ends - sizes)[owners]).split(counts)]
    return StageReport(
        stage.layer, stage.when, stage.before, stage.after, stage.facts.get("alpha"), survivors
    )
