"""Prefill of a decoder of the paper's shape: is the arithmetic saved time saved?

The physical limit of a schedule is its bare layers, each run on exactly the n_l tokens that it keeps there,
with no scoring and no bookkeeping. Efficiency is that time over the measured one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from radical_rerank.backbones import Block, ImageFeatures, decoder_shape, family_of, layout_of
from radical_rerank.backbones.model import last_row_only
from radical_rerank.lab.bench.memory import PeakMemory
from radical_rerank.lab.bench.models import bench_model
from radical_rerank.lab.bench.timing import Ratio, lockstep
from radical_rerank.method import macs
from radical_rerank.progress import Progress, silent
from radical_rerank.pruning import Layout, Profile, Pruner, VisionSignals, build


@dataclass(frozen=True)
class Shape:
    """The paper's Flickr30K prompt: 20 candidates of 12 × 15 visual tokens and 304 of text, 3,904 in all."""

    num_layers: int = 36
    candidates: int = 20
    rows: int = 12
    columns: int = 15
    text: int = 304
    width: int = 512


SHAPES: dict[str, Callable[[int], Shape]] = {
    "paper": lambda width: Shape(width=width),
    "small": lambda width: Shape(num_layers=12, candidates=10, rows=9, columns=10, text=100, width=width),
}


@dataclass(frozen=True)
class MethodResult:
    """One method at one budget. Times are of the whole decoder; ratios are medians over rounds.

    speedup: stock model / method; predicted: what the arithmetic saved would give
    efficiency: the schedule's bare layers / method
    over_random: method / Random at the same schedule, for RaDiCal
    """

    method: str
    keep: float
    seconds: float
    speedup: Ratio
    predicted: float
    efficiency: Ratio
    over_random: Ratio | None
    visual_tokens_left: int


@dataclass(frozen=True)
class StageMemory:
    """Peak extra memory of one stage, and what eager attention of its layer would hold, in bytes."""

    layer: int
    tokens: int
    peak: int
    eager: int


@dataclass(frozen=True)
class PrefillResult:
    """hooks: the stock model with our hooks, keep = 1, over the stock model alone
    one_row: the first method with the last layer run for one row only, as the Reranker does, over without
    """

    shape: Shape
    device: str
    threads: int
    dense_seconds: float
    hooks: Ratio
    one_row: Ratio
    methods: list[MethodResult]
    stages: list[StageMemory]
    seconds: dict[str, list[float]]
    """of every variant, round by round"""

    @property
    def memory(self) -> float:
        """What a stage holds over what eager attention of its layer would, at the stage where it is most."""
        return max(stage.peak / stage.eager for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "memory": self.memory}


class Bench:
    """A random model, a prompt, and the ways through it."""

    def __init__(self, shape: Shape, device: str | None = None) -> None:
        self.shape = shape
        self.device = device or str(torch.accelerator.current_accelerator() or "cpu")
        self.model = bench_model(shape.width, shape.num_layers)
        self.model = self.model.to(self.device, torch.float32 if self.device == "cpu" else torch.bfloat16)
        self.decoder = self.model.model.language_model
        family = family_of(self.model.config)
        image, size = self.model.config.image_token_id, shape.rows * shape.columns
        draw = torch.Generator().manual_seed(0)
        head, tail = shape.text - 40 - 2 * shape.candidates, 40
        ids = torch.randint(10, 90, (head,), generator=draw).tolist()
        for number in range(shape.candidates):
            ids += [100 + number, *[image] * size, 99]
        ids += torch.randint(10, 90, (tail,), generator=draw).tolist()
        hidden, dtype = shape.width, self.model.dtype

        def noise() -> torch.Tensor:
            return torch.randn(size, hidden, generator=draw).to(self.device, dtype)

        block = Block((0.0, 0.0, 1.0, 1.0), shape.rows, shape.columns)
        grid = (1, 2 * shape.rows, 2 * shape.columns)
        features = [
            ImageFeatures(noise(), (noise(), noise(), noise()), grid, (block,))
            for _ in range(shape.candidates)
        ]
        input_ids = torch.tensor([ids], device=self.device)
        self.layout: Layout = layout_of(self.model, ids, query=range(len(ids) - 30, len(ids) - 10))
        self.signals = VisionSignals(
            torch.rand(size * shape.candidates, generator=draw),
            torch.randn(size * shape.candidates, 64, generator=draw),
        )
        self.inputs = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            **family.inputs(features, input_ids),
        }

        # What the bare layers run on.
        self.states = torch.randn(1, len(ids), hidden, generator=draw).to(self.device, dtype)
        positions = torch.arange(len(ids), device=self.device).expand(3, 1, -1)
        self.rotary = self.decoder.rotary_emb(self.states, positions)

    def twin(self) -> Bench:
        """The same with modules of its own, so that hooks do not meet, and with the same weights."""
        twin = copy(self)
        shared = {id(tensor): tensor for tensor in [*self.model.parameters(), *self.model.buffers()]}
        twin.model = deepcopy(self.model, shared)
        twin.decoder = twin.model.model.language_model
        return twin

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:
        return self.model(**self.inputs, logits_to_keep=1, use_cache=False).logits

    def pruned(self, pruner: Pruner) -> None:
        with pruner.on(self.model, self.layout, [self.signals]):
            self.forward()

    def counts(self, pruner: Pruner) -> list[int]:
        """n_l of a method, from a run."""
        with pruner.on(self.model, self.layout, [self.signals]) as run:
            self.forward()
        return list(run.tokens_per_layer)

    @torch.inference_mode()
    def bare(self, counts: Sequence[int]) -> None:
        """The layers alone on so many tokens each, and the norm and head of the last."""
        hidden, (cos, sin) = self.states, self.rotary
        for layer, count in zip(self.decoder.layers, counts, strict=True):
            if count != hidden.shape[1]:
                hidden = hidden[:, :count].contiguous()
            hidden = layer(hidden, attention_mask=None, position_embeddings=(cos[:, :count], sin[:, :count]))
        self.model.lm_head(self.decoder.norm(hidden[:, -1:]))

    def stage_memory(self, pruner: Pruner) -> list[StageMemory]:
        heads = self.model.config.text_config.num_attention_heads
        text = self.layout.length - len(self.layout.positions)
        select, found = pruner.select, []

        def metered(view: Any, count: int) -> Any:
            with PeakMemory() as meter:
                kept = select(view, count)
            tokens = text + len(view.alive)
            found.append(StageMemory(view.layer, tokens, meter.peak, 4 * heads * tokens**2))
            return kept

        pruner.select = metered  # type: ignore[method-assign]
        try:
            self.pruned(pruner)
        finally:
            del pruner.select
        return found


def run_prefill(
    shape: Shape,
    methods: Sequence[tuple[str, float]],
    *,
    rounds: int = 5,
    progress: Progress = silent,
    device: str | None = None,
) -> PrefillResult:
    """methods: (name, keep) pairs."""
    bench = Bench(shape, device)
    profile = Profile.find("Qwen/Qwen3-VL-4B-Instruct")
    cost = decoder_shape(bench.model.config)

    def made(name: str, keep: float) -> Pruner:
        options: dict[str, Any] = {}
        if build(name).needs_profile:
            known = profile is not None and shape.num_layers == len(profile.layers)
            spread = {"layers": _spread(shape.num_layers), "alpha": 0.5}
            options = {"profile": profile} if known else spread
            options |= {"alpha": 1.0} if name == "random" else {}
        return build(name, keep=keep, **options)

    pruners = {(name, keep): made(name, keep) for name, keep in methods}
    labels = {pair: f"{pair[0]} {pair[1]:.0%}" for pair in pruners}
    first = next(iter(pruners))

    def one_row(bench: Bench) -> None:
        pruned = pruners[first].on(bench.model, bench.layout, [bench.signals])
        with pruned, last_row_only(bench.model):
            bench.forward()

    counts = {pair: bench.counts(pruner) for pair, pruner in pruners.items()}
    ways: dict[str, Callable[[Bench], object]] = {
        "stock": Bench.forward,
        "hooks": partial(Bench.pruned, pruner=made("radical", 1.0)),
        "one row": one_row,
    }
    for pair, pruner in pruners.items():
        ways[labels[pair]] = partial(Bench.pruned, pruner=pruner)
        ways[f"{labels[pair]}, bare"] = partial(Bench.bare, counts=counts[pair])
    variants = {}
    for name, way in ways.items():
        twin = bench.twin()
        variants[name] = partial(way, twin), twin.decoder.layers
    times = lockstep(variants, rounds, progress=progress, label="prefill")
    whole = macs([bench.layout.length] * shape.num_layers, cost)
    text = bench.layout.length - len(bench.layout.positions)
    results = []
    for (name, keep), label in labels.items():
        rival = labels.get(("random", keep)) if name == "radical" else None
        results.append(
            MethodResult(
                method=name,
                keep=keep,
                seconds=times.median(label),
                speedup=times.ratio("stock", label),
                predicted=whole / macs(counts[name, keep], cost),
                efficiency=times.ratio(f"{label}, bare", label),
                over_random=times.ratio(label, rival) if rival else None,
                visual_tokens_left=counts[name, keep][-1] - text,
            )
        )
    return PrefillResult(
        shape=shape,
        device=bench.device,
        threads=torch.get_num_threads(),
        dense_seconds=times.median("stock"),
        hooks=times.ratio("hooks", "stock"),
        one_row=times.ratio("one row", labels[first]),
        methods=results,
        stages=bench.stage_memory(made("radical", 0.2)),
        seconds=times.seconds,
    )


def _spread(layers: int) -> list[int]:
    return sorted({round(layers * part) for part in (0.2, 0.6, 0.67, 0.8)})
