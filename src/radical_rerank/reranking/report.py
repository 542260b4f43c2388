"""What pruning did to one list: tokens, trust, cost, time, and who survived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from radical_rerank.backbones import Block
from radical_rerank.method import DecoderShape, kv_bytes, macs, saving, tokens_per_layer
from radical_rerank.pruning import Layout, StageRecord


@dataclass(frozen=True)
class StageReport:
    """One stage: visual tokens before and after, α where the method has one, and the survivors.

    survivors: per candidate of the list, the numbers of its tokens that are still alive.
    """

    layer: int
    when: str
    before: int
    after: int
    alpha: float | None
    survivors: list[list[int]]


@dataclass(frozen=True)
class PruningReport:
    """Costs count multiply-accumulates of the decoder's prefill and its key-value cache, as the paper does.

    tokens, visual_tokens: of the unreduced prompt; visual_tokens_entering: fewer where the method reduces
    before the decoder
    candidates: the documents of this list by number, in the order of the prompt
    blocks: per candidate, which part of its image each token shows (for overlays)
    seconds: preprocess, vision, prior (once per list), selection (at the stages), decoder, scoring.
    Lists that ran in one batch share the batch's time equally.
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
    seconds: dict[str, float]
    candidates: list[int]
    blocks: list[list[Block]] = field(repr=False)

    @property
    def visual_tokens_left(self) -> int:
        return self.stages[-1].after if self.stages else self.visual_tokens_entering

    @property
    def average_tokens(self) -> float:
        """Tokens per layer, text included, mean over layers."""
        return sum(self.tokens_per_layer) / max(1, len(self.tokens_per_layer))

    @property
    def flops_saved(self) -> float:
        return saving(self.macs, self.macs_dense)

    @property
    def kv_saved(self) -> float:
        return saving(self.kv_bytes, self.kv_bytes_dense)

    def to_dict(self, *, survivors: bool = False) -> dict[str, Any]:
        """JSON-ready. The survivors and their places only if asked for: they are long."""
        data = asdict(self)
        if not survivors:
            data.pop("blocks")
            for stage in data["stages"]:
                stage.pop("survivors")
        derived = ("visual_tokens_left", "average_tokens", "flops_saved", "kv_saved")
        return data | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class Totals:
    """What all prompts of one ranking took together: a list longer than a window takes several."""

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
        seconds: dict[str, float] = {}
        for report in reports:
            for part, spent in report.seconds.items():
                seconds[part] = seconds.get(part, 0.0) + spent
        return cls(
            prompts=len(reports),
            tokens=sum(report.tokens for report in reports),
            visual_tokens=sum(report.visual_tokens for report in reports),
            visual_tokens_left=sum(report.visual_tokens_left for report in reports),
            average_tokens=sum(report.average_tokens for report in reports),
            flops_saved=saving(sum(r.macs for r in reports), sum(r.macs_dense for r in reports)),
            kv_saved=saving(sum(r.kv_bytes for r in reports), sum(r.kv_bytes_dense for r in reports)),
            seconds=seconds,
        )


def make_report(
    *,
    method: str,
    keep: float,
    layout: Layout,
    records: Sequence[StageRecord],
    shape: DecoderShape,
    seconds: dict[str, float],
    candidates: Sequence[int],
    blocks: Sequence[Sequence[Block]],
    full: int,
) -> PruningReport:
    """full: the candidates' visual tokens at full size."""
    visual = len(layout.positions)
    other = layout.length - visual
    places = [(record.layer, record.when, other + record.after) for record in records]
    counts = tokens_per_layer(layout.length, places, shape.layers)
    dense = [other + full] * shape.layers
    return PruningReport(
        method=method,
        keep=keep,
        tokens=other + full,
        visual_tokens=full,
        visual_tokens_entering=visual,
        stages=[_stage(record, layout) for record in records],
        tokens_per_layer=counts,
        macs=macs(counts, shape),
        macs_dense=macs(dense, shape),
        kv_bytes=kv_bytes(counts, shape),
        kv_bytes_dense=kv_bytes(dense, shape),
        seconds=seconds,
        candidates=list(candidates),
        blocks=[list(b) for b in blocks],
    )


def _stage(record: StageRecord, layout: Layout) -> StageReport:
    sizes = torch.tensor([len(candidate) for candidate in layout.candidates])
    ends = sizes.cumsum(0)
    tokens = record.survivors.cpu()
    owners = layout.candidate_of[tokens]
    counts = owners.bincount(minlength=len(sizes)).tolist()
    survivors = [part.tolist() for part in (tokens - (ends - sizes)[owners]).split(counts)]
    return StageReport(
        record.layer, record.when, record.before, record.after, record.facts.get("alpha"), survivors
    )
