"""Prefill of a decoder of the paper's shape: does the arithmetic that pruning saves turn into time saved?

The limit of a schedule is the time of its layers alone, each on exactly the n_l tokens that are alive there,
without scoring or bookkeeping. Efficiency is that time over the measured time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from radical_rerank.backbones import Block, ImageFeatures, decoder_shape, family_of, layout_of
from radical_rerank.backbones.model import last_row_only
from radical_rerank.lab.bench.memory import PeakMemory
from radical_rerank.lab.bench.models import bench_model
from radical_rerank.lab.bench.timing import Ratio, StepTimes, lockstep
from radical_rerank.lab.paper import CANDIDATES, MODEL
from radical_rerank.method import macs
from radical_rerank.progress import Progress, silent
from radical_rerank.pruning import Layout, Profile, Pruner, VisionSignals, build


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder and its prompt. By default the paper's on Flickr30K, with 3,904 tokens.

    Args:
        num_layers: decoder layers
        candidates: candidates per list
        rows, columns: visual tokens per candidate
        text: text tokens
        width: the hidden size
    """

    num_layers: int = 36
    candidates: int = CANDIDATES
    rows: int = 12
    columns: int = 15
    text: int = 304
    width: int = 512


PROMPT_SHAPES: dict[str, Callable[[int], Shape]] = {
    "paper": lambda width: Shape(width=width),
    "small": lambda width: Shape(num_layers=12, candidates=10, rows=9, columns=10, text=100, width=width),
}
"""shapes by name, for a hidden size"""
SCORED = 3
"""runs at most whose median is a method's scoring time"""
QUERY = 40
"""text tokens after the last candidate"""


@dataclass(frozen=True)
class MethodResult:
    """One method at one budget. Times are of the whole decoder; ratios are medians over rounds.

    Args:
        method, keep: the method and its budget
        seconds: its time
        speedup: stock model / method
        predicted: the speed-up if time were proportional to arithmetic
        efficiency: the schedule's layers alone / method
        over_random: method / Random with the same schedule, for RaDiCal
        visual_tokens_left: visual tokens at the end
        scoring: the method's own part of its time over the time of the stock model: scoring and choosing
    """

    method: str
    keep: float
    seconds: float
    speedup: Ratio
    predicted: float
    efficiency: Ratio
    over_random: Ratio | None
    visual_tokens_left: int
    scoring: float


@dataclass(frozen=True)
class StageMemory:
    """The memory of one stage.

    Args:
        layer: where it acts
        tokens: tokens before it
        peak: its peak extra memory in bytes
        eager: the attention matrix of its layer in bytes, which eager attention would hold
    """

    layer: int
    tokens: int
    peak: int
    eager: int


@dataclass(frozen=True)
class PrefillResult:
    """Measurements of the prefill.

    Args:
        shape: the decoder and its prompt
        device: where it ran
        threads: CPU threads
        dense_seconds: the time of the stock model
        hooks: the model with hooks and keep = 1 / the stock model
        one_row: the first method with the last layer for one row only, as in the Reranker / without this
        methods: the methods
        stages: the stages of RaDiCal at 20%
        seconds: of every variant, round by round
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

    @property
    def memory(self) -> float:
        """The extra memory of a stage / eager attention of its layer, for the worst stage."""
        return max(stage.peak / stage.eager for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements, ready for JSON."""
        return {**asdict(self), "memory": self.memory}


class Bench:
    """A random model and a prompt, and the ways to run it.

    Args:
        shape: the decoder and its prompt
        device: by default the accelerator if there is one
        dtype: by default bfloat16, on a CPU float32
    """

    def __init__(self, shape: Shape, device: str | None = None, dtype: torch.dtype | None = None) -> None:
        self.shape = shape
        self.device = device or str(torch.accelerator.current_accelerator() or "cpu")
        usual = torch.float32 if self.device == "cpu" else torch.bfloat16
        model = bench_model(shape.width, shape.num_layers, dtype=dtype or usual)
        self.model = model.to(self.device)
        self.decoder = self.model.model.language_model
        draw = torch.Generator().manual_seed(0)
        ids = self._ids(draw)
        features = self._features(draw)
        input_ids = torch.tensor([ids], device=self.device)
        self.layout: Layout = layout_of(self.model, ids, query=range(len(ids) - 30, len(ids) - 10))
        visual = shape.rows * shape.columns * shape.candidates
        self.signals = VisionSignals(
            torch.rand(visual, generator=draw), torch.randn(visual, 64, generator=draw)
        )
        self.inputs = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            **family_of(self.model.config).inputs(features, input_ids),
        }
        # The input of `bare`.
        self.states = self._noise(draw, 1, len(ids), shape.width)
        positions = torch.arange(len(ids), device=self.device).expand(3, 1, -1)
        self.rotary = self.decoder.rotary_emb(self.states, positions)

    def _ids(self, draw: torch.Generator) -> list[int]:
        """Return the prompt: text, the candidates, and the text of the query."""
        shape, image = self.shape, self.model.config.image_token_id
        head = shape.text - QUERY - 2 * shape.candidates
        ids: list[int] = torch.randint(10, 90, (head,), generator=draw).tolist()
        for number in range(shape.candidates):
            ids += [100 + number, *[image] * (shape.rows * shape.columns), 99]
        ids += torch.randint(10, 90, (QUERY,), generator=draw).tolist()
        return ids

    def _features(self, draw: torch.Generator) -> list[ImageFeatures]:
        """Return random vision features of the candidates, with three levels of DeepStack."""
        shape = self.shape
        block = Block((0.0, 0.0, 1.0, 1.0), shape.rows, shape.columns)
        grid = (1, 2 * shape.rows, 2 * shape.columns)

        def noise() -> torch.Tensor:
            return self._noise(draw, shape.rows * shape.columns, shape.width)

        return [
            ImageFeatures(noise(), (noise(), noise(), noise()), grid, (block,))
            for _ in range(shape.candidates)
        ]

    def _noise(self, draw: torch.Generator, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw).to(self.device, self.model.dtype)

    def twin(self) -> Bench:
        """Return a copy with the same weights but its own modules, so that hooks do not interfere."""
        twin = copy(self)
        shared = {id(tensor): tensor for tensor in [*self.model.parameters(), *self.model.buffers()]}
        twin.model = deepcopy(self.model, shared)
        twin.decoder = twin.model.model.language_model
        return twin

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:
        """Run the stock model. Returns the logits of the last token."""
        logits: torch.Tensor = self.model(**self.inputs, logits_to_keep=1, use_cache=False).logits
        return logits

    def pruned(self, pruner: Pruner) -> float:
        """Run the model with a pruning method. Returns the seconds in which it scores and chooses tokens."""
        with pruner.on(self.model, self.layout, [self.signals]) as run:
            self.forward()
        return run.seconds["selection"]  # the prior's time is part of it

    def one_row(self, pruner: Pruner) -> None:
        """Run the model with a pruning method, and its last layer for the last row only."""
        with pruner.on(self.model, self.layout, [self.signals]), last_row_only(self.model):
            self.forward()

    def counts(self, pruner: Pruner) -> list[int]:
        """Run the model with a pruning method. Returns n_l, the tokens of each layer."""
        with pruner.on(self.model, self.layout, [self.signals]) as run:
            self.forward()
        return list(run.tokens_per_layer)

    @torch.inference_mode()
    def bare(self, counts: Sequence[int]) -> None:
        """Run the layers alone, each on this many tokens, and the last norm and head."""
        hidden, (cos, sin) = self.states, self.rotary
        for layer, count in zip(self.decoder.layers, counts, strict=True):
            if count != hidden.shape[1]:
                hidden = hidden[:, :count].contiguous()
            hidden = layer(hidden, attention_mask=None, position_embeddings=(cos[:, :count], sin[:, :count]))
        self.model.lm_head(self.decoder.norm(hidden[:, -1:]))

    def stage_memory(self, pruner: Pruner) -> list[StageMemory]:
        """Measure the memory of each stage of a method."""
        heads = self.model.config.text_config.num_attention_heads
        text = self.layout.length - len(self.layout.positions)
        select, stages = pruner.select, []

        def metered(view: Any, count: int) -> Any:
            with PeakMemory() as meter:
                kept = select(view, count)
            tokens = text + len(view.alive)
            stages.append(StageMemory(view.layer, tokens, meter.peak, 4 * heads * tokens**2))
            return kept

        pruner.select = metered  # type: ignore[method-assign]
        try:
            self.pruned(pruner)
        finally:
            del pruner.select
        return stages


def run_prefill(
    shape: Shape,
    methods: Sequence[tuple[str, float]],
    *,
    rounds: int = 5,
    progress: Progress = silent,
    device: str | None = None,
) -> PrefillResult:
    """Time the prefill of a random decoder with several methods.

    Args:
        shape: the decoder and its prompt
        methods: (name, keep) pairs
        rounds: how many rounds; medians are reported
        progress: shows the progress
        device: by default the accelerator if there is one
    """
    bench = Bench(shape, device)
    pruners = {(name, keep): _pruner(shape, name, keep) for name, keep in methods}
    counts = {pair: bench.counts(pruner) for pair, pruner in pruners.items()}
    scoring = {
        pair: median(bench.pruned(pruner) for _ in range(min(SCORED, rounds)))
        for pair, pruner in pruners.items()
    }
    times = _times(bench, pruners, counts, rounds, progress)
    return PrefillResult(
        shape=shape,
        device=bench.device,
        threads=torch.get_num_threads(),
        dense_seconds=times.median("stock"),
        hooks=times.ratio("hooks", "stock"),
        one_row=times.ratio("one row", _label(*next(iter(pruners)))),
        methods=[_result(bench, pair, counts, times, scoring[pair]) for pair in pruners],
        stages=bench.stage_memory(_pruner(shape, "radical", 0.2)),
        seconds=times.seconds,
    )


@dataclass(frozen=True)
class OnceResult:
    """One pass of each method, for decoders so wide that a pass takes minutes.

    Args:
        shape: the decoder and its prompt
        dtype: of its weights
        threads: CPU threads
        dense_seconds: the time of the stock model
        methods: the methods; without the comparisons that need more passes
    """

    shape: Shape
    dtype: str
    threads: int
    dense_seconds: float
    methods: list[OnceMethod]


@dataclass(frozen=True)
class OnceMethod:
    """One pass of a method. The fields are those of `MethodResult`, and n_l, the tokens of each layer."""

    method: str
    keep: float
    seconds: float
    speedup: float
    predicted: float
    scoring: float
    tokens_per_layer: list[int]


def run_once(
    shape: Shape,
    methods: Sequence[tuple[str, float]],
    *,
    dtype: torch.dtype | None = None,
    progress: Progress = silent,
    device: str | None = None,
) -> OnceResult:
    """Time one pass of the stock model and of each method, layer by layer in turn.

    Args:
        shape: the decoder and its prompt
        methods: (name, keep) pairs
        dtype: of the weights; by default bfloat16, on a CPU float32
        progress: shows the progress
        device: by default the accelerator if there is one
    """
    bench = Bench(shape, device, dtype)
    runs: dict[tuple[str, float], Any] = {}

    def ranked(twin: Bench, pair: tuple[str, float]) -> None:
        with _pruner(shape, *pair).on(twin.model, twin.layout, [twin.signals]) as runs[pair]:
            twin.forward()

    variants: dict[str, tuple[Callable[[], object], Any]] = {"stock": (bench.forward, bench.decoder.layers)}
    for pair in methods:
        twin = bench.twin()
        variants[_label(*pair)] = partial(ranked, twin, pair), twin.decoder.layers
    times = lockstep(variants, 1, warm_up=False, progress=progress, label="prefill")
    cost, dense = decoder_shape(bench.model.config), times.median("stock")
    whole = macs([bench.layout.length] * shape.num_layers, cost)
    return OnceResult(
        shape,
        str(bench.model.dtype).removeprefix("torch."),
        torch.get_num_threads(),
        dense,
        [
            OnceMethod(
                *pair,
                seconds=(seconds := times.median(_label(*pair))),
                speedup=dense / seconds,
                predicted=whole / macs(run.tokens_per_layer, cost),
                scoring=run.seconds["selection"] / dense,
                tokens_per_layer=list(run.tokens_per_layer),
            )
            for pair, run in runs.items()
        ],
    )


def _pruner(shape: Shape, name: str, keep: float) -> Pruner:
    """Make a method. Without a trust profile of this depth, fixed layers and a fixed trust are used."""
    options: dict[str, Any] = {}
    if build(name).needs_profile:
        profile = Profile.find(MODEL)
        if profile is not None and shape.num_layers == len(profile.layers):
            options = {"profile": profile}
        else:
            options = {"layers": _spread(shape.num_layers), "alpha": 0.5}
        if name == "random":
            options["alpha"] = 1.0
    return build(name, keep=keep, **options)


def _spread(num_layers: int) -> list[int]:
    return sorted({round(num_layers * part) for part in (0.2, 0.6, 0.67, 0.8)})


def _label(name: str, keep: float) -> str:
    return f"{name} {keep:.0%}"


def _times(
    bench: Bench,
    pruners: dict[tuple[str, float], Pruner],
    counts: dict[tuple[str, float], list[int]],
    rounds: int,
    progress: Progress,
) -> StepTimes:
    """Time the stock model, the methods, and the layers of each method alone."""
    ways: dict[str, Callable[[Bench], object]] = {
        "stock": Bench.forward,
        "hooks": partial(Bench.pruned, pruner=_pruner(bench.shape, "radical", 1.0)),
        "one row": partial(Bench.one_row, pruner=next(iter(pruners.values()))),
    }
    for pair, pruner in pruners.items():
        ways[_label(*pair)] = partial(Bench.pruned, pruner=pruner)
        ways[f"{_label(*pair)}, bare"] = partial(Bench.bare, counts=counts[pair])
    variants = {}
    for name, way in ways.items():
        twin = bench.twin()
        variants[name] = partial(way, twin), twin.decoder.layers
    return lockstep(variants, rounds, progress=progress, label="prefill")


def _result(
    bench: Bench,
    pair: tuple[str, float],
    counts: dict[tuple[str, float], list[int]],
    times: StepTimes,
    scoring: float,
) -> MethodResult:
    """Return the measurements of one method. pair: its name and budget"""
    name, keep = pair
    label, cost = _label(name, keep), decoder_shape(bench.model.config)
    dense = macs([bench.layout.length] * bench.shape.num_layers, cost)
    text = bench.layout.length - len(bench.layout.positions)
    compared = name == "radical" and ("random", keep) in counts
    return MethodResult(
        method=name,
        keep=keep,
        seconds=times.median(label),
        speedup=times.ratio("stock", label),
        predicted=dense / macs(counts[pair], cost),
        efficiency=times.ratio(f"{label}, bare", label),
        over_random=times.ratio(label, _label("random", keep)) if compared else None,
        visual_tokens_left=counts[pair][-1] - text,
        scoring=scoring / times.median("stock"),
    )
