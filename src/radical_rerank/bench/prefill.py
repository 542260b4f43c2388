"""Prefill of a decoder of the paper's shape: is the arithmetic saved time saved?

The physical limit of a schedule is its bare layers, each run on exactly the n_l tokens that it keeps there,
with no scoring and no bookkeeping. Efficiency is that time over the measured one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from radical_rerank.backbones import ImageFeatures, layout_of
from radical_rerank.backbones.families import Block, decoder_shape, family_of
from radical_rerank.backbones.tiny import bench_model
from radical_rerank.bench.memory import PeakMemory
from radical_rerank.bench.timing import Ratio, Times, interleaved
from radical_rerank.method import macs, tokens_per_layer
from radical_rerank.pruning import Layout, Profile, Pruner, VisionSignals, build


@dataclass(frozen=True)
class Shape:
    """The paper's Flickr30K prompt: 20 candidates of 12 × 15 visual tokens and 304 of text, 3,904 in all."""

    layers: int = 36
    candidates: int = 20
    rows: int = 12
    columns: int = 15
    text: int = 304
    width: int = 512


SHAPES: dict[str, Callable[[int], Shape]] = {
    "paper": lambda width: Shape(width=width),
    "small": lambda width: Shape(layers=12, candidates=10, rows=9, columns=10, text=100, width=width),
}


@dataclass(frozen=True)
class MethodResult:
    """One method: seconds (median), speed-up over Dense, what the arithmetic predicts, efficiency."""

    method: str
    keep: float
    seconds: float
    speedup: Ratio
    predicted: float
    efficiency: Ratio
    visual_tokens_left: int


@dataclass(frozen=True)
class PrefillResult:
    shape: Shape
    device: str
    threads: int
    dense_seconds: float
    hooks: Ratio
    """Dense with our hooks (keep = 1) over the stock model"""
    over_random: Ratio | None
    """RaDiCal over Random at the same schedule, time"""
    stage_memory: float
    """extra peak memory of a stage over eager full attention of its layer"""
    methods: list[MethodResult]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Bench:
    """A random model, a prompt, and the ways through it."""

    def __init__(self, shape: Shape, device: str | None = None) -> None:
        self.shape = shape
        self.device = device or str(torch.accelerator.current_accelerator() or "cpu")
        self.model = bench_model(shape.width, shape.layers)
        self.model = self.model.to(self.device, torch.float32 if self.device == "cpu" else torch.bfloat16)
        self.decoder = self.model.model.language_model
        family = family_of(self.model.config)
        image, size = self.model.config.image_token_id, shape.rows * shape.columns
        draw = torch.Generator().manual_seed(0)
        head, tail = shape.text - 40 - 2 * shape.candidates, 40
        ids = torch.randint(0, 100, (head,), generator=draw).tolist()
        for number in range(shape.candidates):
            ids += [100 + number, *[image] * size, 99]
        ids += torch.randint(0, 100, (tail,), generator=draw).tolist()
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
            **family.inputs(self.model, features, input_ids),
        }

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:
        return self.model(**self.inputs, logits_to_keep=1, use_cache=False).logits

    def pruned(self, pruner: Pruner) -> Callable[[], object]:
        def run() -> None:
            with pruner.on(self.model, self.layout, [self.signals]):
                self.forward()

        return run

    def counts(self, pruner: Pruner) -> list[int]:
        """n_l of a method, from a run."""
        with pruner.on(self.model, self.layout, [self.signals]) as run:
            self.forward()
        text = self.layout.length - len(self.layout.positions)
        places = [(r.layer, r.when, text + r.after) for r in run.records[0]]
        return tokens_per_layer(self.layout.length, places, self.shape.layers)

    def bare(self, counts: Sequence[int]) -> Callable[[], object]:
        """The layers alone on so many tokens each, and the norm and head of the last."""
        longest = max(counts)
        states = torch.randn(1, longest, self.shape.width).to(self.device, self.model.dtype)
        positions = torch.arange(longest, device=self.device).expand(3, 1, -1)
        cos, sin = self.decoder.rotary_emb(states, positions)

        @torch.inference_mode()
        def run() -> None:
            hidden = states
            for layer, count in zip(self.decoder.layers, counts, strict=True):
                if count != hidden.shape[1]:
                    hidden = hidden[:, :count].contiguous()
                rotary = cos[:, :count], sin[:, :count]
                hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
            self.model.lm_head(self.decoder.norm(hidden[:, -1:]))

        return run

    def stage_memory(self, pruner: Pruner) -> float:
        """Extra peak memory of the method's first stage over the eager attention of its layer."""
        select = pruner.select
        peak = 0

        def metered(view: Any, count: int) -> Any:
            nonlocal peak
            with PeakMemory() as meter:
                kept = select(view, count)
            peak = max(peak, meter.peak)
            return kept

        pruner.select = metered  # type: ignore[method-assign]
        try:
            self.pruned(pruner)()
        finally:
            del pruner.select
        heads = self.model.config.text_config.num_attention_heads
        full = heads * self.layout.length**2 * 4
        return peak / full


def run_prefill(
    shape: Shape,
    methods: Sequence[tuple[str, float]],
    *,
    rounds: int = 5,
    tell: Callable[[], None] = lambda: None,
    device: str | None = None,
) -> PrefillResult:
    """methods: (name, keep) pairs."""
    bench = Bench(shape, device)
    profile = Profile.find("Qwen/Qwen3-VL-4B-Instruct")
    cost = decoder_shape(bench.model.config)

    def made(name: str, keep: float) -> Pruner:
        options: dict[str, Any] = {}
        if name in ("radical", "random"):
            options = (
                {"calibration": profile}
                if shape.layers == 36
                else {"schedule": _spread(shape.layers), "alpha": 0.5}
            )
            options |= {"alpha": 1.0} if name == "random" else {}
        return build(name, keep=keep, **options)

    pruners = {f"{name} {keep:.0%}": made(name, keep) for name, keep in methods}
    variants: dict[str, Callable[[], object]] = {
        "stock": bench.forward,
        "dense": bench.pruned(made("radical", 1.0)),
    }
    counts = {name: bench.counts(pruner) for name, pruner in pruners.items()}
    for name, pruner in pruners.items():
        variants[name] = bench.pruned(pruner)
        variants[f"{name}, bare"] = bench.bare(counts[name])
    times = interleaved(variants, rounds, tell=tell)
    whole = macs([bench.layout.length] * shape.layers, cost)
    text = bench.layout.length - len(bench.layout.positions)
    results = [
        MethodResult(
            method=name,
            keep=pruners[name].keep,
            seconds=times.median(name),
            speedup=times.ratio("stock", name),
            predicted=whole / macs(counts[name], cost),
            efficiency=times.ratio(f"{name}, bare", name),
            visual_tokens_left=counts[name][-1] - text,
        )
        for name in pruners
    ]
    return PrefillResult(
        shape=shape,
        device=bench.device,
        threads=torch.get_num_threads(),
        dense_seconds=times.median("stock"),
        hooks=times.ratio("dense", "stock"),
        over_random=_over_random(times, pruners),
        stage_memory=bench.stage_memory(made("radical", 0.2)),
        methods=results,
    )


def _over_random(times: Times, pruners: dict[str, Pruner]) -> Ratio | None:
    for name in pruners:
        rival = name.replace("radical", "random")
        if name.startswith("radical") and rival in pruners:
            return times.ratio(name, rival)
    return None


def _spread(layers: int) -> list[int]:
    return sorted({round(layers * part) for part in (0.2, 0.6, 0.67, 0.8)})
