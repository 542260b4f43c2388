"""Check a model: the engine against slow versions of the same, on the user's own weights and device."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from radical_rerank.backbones import Backbone, ImageFeatures, slow
from radical_rerank.errors import CalibrationError, InputError
from radical_rerank.method import keep_count, normalized_entropy, text_averaged
from radical_rerank.progress import Progress, silent
from radical_rerank.pruning import Layout, Profile, Pruner, RaDiCal, Random, Stage, StageView
from radical_rerank.reranking.calibration import CALIBRATION_CANDIDATES, calibrate, generated_list
from radical_rerank.reranking.encoding import ImageLike
from radical_rerank.reranking.prompt import Prompt, PromptTemplate, build_prompt, sizes_of
from radical_rerank.reranking.reranker import Reranker
from radical_rerank.reranking.results import Ranking

CANDIDATES = (4, 3)
"""of the two lists that are checked; different, so that a batch of them is padded"""
IMAGE_TOKENS = 64
"""visual tokens per image at most: full attention of a small prompt is cheap on any model"""
DECODED = 4
"""tokens that are decoded"""
KEEP = 0.25
SIDE = 448
"""images of the lists that are timed, in pixels: about as many visual tokens as a photograph has"""


@dataclass(frozen=True)
class Tolerance:
    """How much two ways to compute the same may differ.

    logits: ‖a − b‖ / ‖b − mean b‖ over the vocabulary
    attention: half of Σ |p − q|, the mass that is elsewhere
    entropy: |H_norm − H_norm|
    survivors: the fraction of survivors that are others
    """

    logits: float
    attention: float
    entropy: float
    survivors: float


TOLERANCES = {
    "float32": Tolerance(logits=1e-3, attention=1e-4, entropy=1e-4, survivors=0.01),
    "float16": Tolerance(logits=0.02, attention=5e-3, entropy=1e-3, survivors=0.05),
    "bfloat16": Tolerance(logits=0.1, attention=0.02, entropy=5e-3, survivors=0.1),
}
"""By the dtype of the weights. In half precision, they leave room for what rounding alone does to a decoder
of 36 layers: the same random model, with its own attention and with eager attention, differs by up to 0.033
(bfloat16) and 0.0024 (float16) in its logits. In float32, the checks are sharp."""


@dataclass(frozen=True)
class Check:
    """One comparison.

    Args:
        name: what is checked
        meaning: what is compared with what
        difference: how far apart they are; None if the check itself failed
        tolerance: the most that it may be
        note: what went wrong

    Example:
        >>> Check("pruned", "logits against a masked pass", difference=1e-6, tolerance=1e-3).passed
        True
    """

    name: str
    meaning: str
    difference: float | None
    tolerance: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.difference is not None and self.difference <= self.tolerance


@dataclass(frozen=True)
class CheckReport:
    """What `check_model` found.

    Args:
        model: the model's name
        facts: versions, device, dtype and shape
        checks: the comparisons
        speed: seconds per list dense and pruned, and what pruning saved; empty if it failed
        profile: the trust profile that was measured, if it could be

    Example:
        >>> CheckReport("m", {}, (Check("keep 1", "", difference=0.1, tolerance=0.01),)).passed
        False
    """

    model: str
    facts: dict[str, str]
    checks: tuple[Check, ...]
    speed: dict[str, float] = field(default_factory=dict)
    profile: Profile | None = None

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
        checks = [{**asdict(check), "passed": check.passed} for check in self.checks]
        profile = None if self.profile is None else asdict(self.profile)
        return {
            "model": self.model,
            "passed": self.passed,
            "facts": self.facts,
            "checks": checks,
            "speed": self.speed,
            "profile": profile,
        }


def check_model(
    model: Backbone,
    *,
    keep: float = 0.2,
    lists: int = 3,
    candidates: int = CALIBRATION_CANDIDATES,
    calibration: Iterable[tuple[str, Sequence[ImageLike]]] | None = None,
    progress: Progress = silent,
) -> CheckReport:
    """Check that a model is pruned correctly on this machine, and measure what it gains.

    The model's logits, attention and decoding under pruning are compared with slow versions made of the stock
    model alone. Then it is calibrated, and ranks generated lists dense and pruned.

    Args:
        model: the model to check
        keep: the fraction of visual tokens that the pruned rankings keep
        lists: how many lists are ranked and timed
        candidates: images per list
        calibration: lists to calibrate on; by default those of `calibrate`
        progress: shows which check runs

    Returns:
        The comparisons, each with its tolerance, and the times.

    Example:
        >>> report = check_model(
        ...     Backbone.from_pretrained("scenes"), lists=1, candidates=4, calibration=[generated_list(0, 4)]
        ... )
        >>> report.passed, report.checks[0].name
        (True, 'keep 1')
    """
    if model.dtype not in TOLERANCES:
        raise InputError(
            f"there are no tolerances for {model.dtype}; load the model in {', '.join(TOLERANCES)}"
        )
    bench = _Bench(model, keep, lists, candidates, calibration)
    quantized = getattr(model.model.config, "quantization_config", None) is not None
    # Some quantizers round activations, too, and differently for each batch.
    limit = TOLERANCES["bfloat16" if quantized else model.dtype]
    with model.exclusive():
        checks = [
            _run(name, meaning, tolerance, measure)
            for name, meaning, tolerance, measure in progress(bench.plan(limit), f"checking {model.name}")
        ]
    return CheckReport(model.name, facts_of(model), tuple(checks), bench.speed, bench.profile)


def _run(name: str, meaning: str, tolerance: float, measure: Callable[[], float]) -> Check:
    try:
        return Check(name, meaning, measure(), tolerance)
    except Exception as error:  # whatever goes wrong belongs in the report, and the other checks still run
        reason = next(iter(str(error).strip().splitlines()), "")
        return Check(name, meaning, None, tolerance, f"{type(error).__name__}: {reason}")


def facts_of(backbone: Backbone) -> dict[str, str]:
    """Return what a bug report needs to say about a model and the machine."""
    config = backbone.model.config
    shape = backbone.shape
    facts = {
        "family": f"{config.model_type} on {config.text_config.model_type}",
        "decoder": f"{shape.num_layers} layers, width {shape.hidden}, {shape.heads} heads",
        "dtype": backbone.dtype,
        "attention": str(backbone.text.config._attn_implementation),
        "device": ", ".join(map(_device_name, backbone.devices)),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        facts["quantization"] = str(getattr(quantized, "quant_method", quantized))
    for package in ("radical-rerank", "torch", "transformers", "accelerate", "torchao", "bitsandbytes"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return device


@dataclass(frozen=True)
class _Case:
    """One list, ready to run."""

    features: list[ImageFeatures]
    prompt: Prompt

    @property
    def layout(self) -> Layout:
        return self.prompt.layout


@dataclass(kw_only=True)
class _Recorder(Pruner):
    """Keeps every token and writes down p of every layer, for each list of the batch."""

    keep: float = 1.0
    p: dict[int, list[Tensor]] = field(default_factory=dict)

    def stages(self, num_layers: int) -> list[Stage]:
        return [Stage(layer, 1.0) for layer in range(num_layers)]

    def select(self, view: StageView, count: int) -> Tensor:
        self.p.setdefault(view.layer, []).append(text_averaged(view.attention()).cpu())
        return torch.arange(count, device=view.alive.device)


class _Bench:
    """The lists that are checked, and one method per check that returns a difference."""

    def __init__(
        self,
        backbone: Backbone,
        keep: float,
        lists: int,
        candidates: int,
        calibration: Iterable[tuple[str, Sequence[ImageLike]]] | None,
    ) -> None:
        self.model, self.keep, self.lists, self.candidates = backbone, keep, lists, candidates
        self.calibration = calibration
        self.profile: Profile | None = None
        self.speed: dict[str, float] = {}

    def plan(self, limit: Tolerance) -> list[tuple[str, str, float, Callable[[], float]]]:
        """Return the checks in their order: name, meaning, tolerance, and what measures the difference."""
        return [
            ("keep 1", "logits with every token kept: the stock model's", limit.logits, self.keep_one),
            ("attention", "p of every layer: that of full attention", limit.attention, self.attention),
            ("entropy", "H_norm of every layer: that of full attention", limit.entropy, self.entropy),
            ("calibration", "H_norm as calibrated: that of full attention", limit.entropy, self.calibrated),
            ("survivors", "tokens kept: those the formulas choose", limit.survivors, self.survivors),
            ("pruned", "logits after two stages: a pass that hides tokens", limit.logits, self.pruned),
            ("decoding", f"{DECODED} tokens after pruning: the same pass", limit.logits, self.decoding),
            (
                "batch attention",
                "p in a padded batch: each list alone",
                limit.attention,
                self.batch_attention,
            ),
            ("batch", "logits of a pruned batch: each list alone", limit.logits, self.batch),
            ("budget", f"tokens left in rankings at keep {self.keep:g}: ⌈…⌉", 0.0, self.budget),
            ("restored", "logits after all this: the stock model's", limit.logits, self.restored),
        ]

    # The lists.

    @cached_property
    def cases(self) -> list[_Case]:
        """Two lists of different lengths."""
        template = PromptTemplate.of(self.model)
        cases = []
        for seed, count in enumerate(CANDIDATES):
            query, images = generated_list(seed, count)
            features = self.model.encode([self.model.preprocess(image, IMAGE_TOKENS) for image in images])
            prompt = build_prompt(self.model, template, query, sizes_of(features))
            cases.append(_Case(features, prompt))
        return cases

    def inputs(self, *cases: _Case, written: Sequence[int] = ()) -> dict[str, Any]:
        """Return the model's arguments for these lists; `written` follows the prompt."""
        ids = [[*case.prompt.ids, *written] for case in cases]
        return self.model.inputs(ids, [own for case in cases for own in case.features])

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Two layers to prune at: an early one, within DeepStack's, and a middle one."""
        layers = slow.attending(self.model)
        return tuple(sorted({layers[min(1, len(layers) // 4)], layers[len(layers) // 2]}))

    @property
    def radical(self) -> RaDiCal:
        """A method that reads everything and needs no profile."""
        return RaDiCal(keep=KEEP, layers=self.stages, alpha=0.5)

    # The checks.

    @cached_property
    def stock(self) -> Tensor:
        """(vocabulary,) the stock model's logits after the first list."""
        return slow.stock_logits(self.model, self.inputs(self.cases[0]))[0, -1]

    def keep_one(self) -> float:
        case, stock = self.cases[0], self.stock
        with RaDiCal(keep=1.0, layers=self.stages, alpha=0.5).on(self.model.model, case.layout):
            every = slow.stock_logits(self.model, self.inputs(case))[0, -1]
            last = self.model.next_token_logits(self.inputs(case))[0]
        return max(_apart(every, stock), _apart(last, stock))

    @cached_property
    def probed(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """By layer, the engine's p and that of full attention, in one and the same pass."""
        case, recorder = self.cases[0], _Recorder()
        columns = case.layout.positions.tolist()
        watch = slow.attention_of(self.model, case.layout.rows, columns)
        with slow.eager(self.model), watch as full, recorder.on(self.model.model, case.layout):
            slow.stock_logits(self.model, self.inputs(case))
        ours = {layer: p for layer, (p,) in recorder.p.items()}
        return ours, {layer: _averaged(full[layer].cpu()) for layer in ours}

    def attention(self) -> float:
        ours, full = self.probed
        return max(_elsewhere(p, full[layer]) for layer, p in ours.items())

    def entropy(self) -> float:
        ours, full = self.probed
        return max(abs(float(normalized_entropy(p)) - _entropy(full[layer])) for layer, p in ours.items())

    def calibrated(self) -> float:
        # Measured as a ranking would, and compared with the attention of the model's own code.
        small = Reranker(self.model, "dense", max_image_tokens=IMAGE_TOKENS)
        profile = calibrate(small, [generated_list(0, CANDIDATES[0])])
        self.profile = calibrate(self.model, self.calibration)
        assert profile.h_norm is not None
        h_norm = dict(zip(profile.layers, profile.h_norm, strict=True))
        return max(abs(h_norm[layer] - _entropy(p)) for layer, p in self.probed[1].items())

    def survivors(self) -> float:
        case, (layer, *_) = self.cases[0], self.stages
        with self.radical.on(self.model.model, case.layout) as run:
            slow.stock_logits(self.model, self.inputs(case))
        kept = set(run.stages[0][0].survivors.tolist())
        vision = torch.cat([own.tokens for own in case.features]).float().cpu()
        words = [case.prompt.ids[place] for place in case.layout.query]
        embedding = self.model.model.get_input_embeddings()
        query = embedding(torch.tensor(words, device=self.model.device)).detach().float().mean(dim=0).cpu()
        view: Any = SimpleNamespace(
            layer=layer,
            alive=torch.arange(len(vision)),
            candidate_of=case.layout.candidate_of,
            vision=vision,
            query_embedding=query,
            attention=lambda: self.probed[1][layer][None],
            once=lambda name, compute: compute(),
            note=lambda **facts: None,
        )
        count = keep_count(self.radical.stages(self.model.shape.num_layers)[0].keep, len(vision))
        expected = self.radical.select(view, count)
        assert isinstance(expected, Tensor)
        return len(set(expected.tolist()) ^ kept) / (2 * count)

    @cached_property
    def decoded(self) -> tuple[Tensor, Tensor]:
        """The engine's (1 + DECODED, vocabulary) logits after the prompt and each token; the slow ones."""
        case = self.cases[0]
        with self.radical.on(self.model.model, case.layout) as run:
            tokens, ours = slow.greedy(self.model, self.inputs(case), DECODED + 1)
            stages = run.stages[0]
        unseen: list[list[int]] = []
        everything, dropped = set(range(len(case.layout.positions))), set[int]()
        for layer in range(self.model.shape.num_layers):
            for stage in stages:
                if stage.layer == layer:
                    dropped = everything - set(stage.survivors.tolist())
            unseen.append(_gone(case.layout, dropped))
        inputs = self.inputs(case, written=tokens[:-1])
        return ours, slow.pruned_logits(self.model, inputs, unseen)[case.layout.length - 1 :]

    def pruned(self) -> float:
        ours, slowly = self.decoded
        return _apart(ours[0], slowly[0])

    def decoding(self) -> float:
        return max(_apart(a, b) for a, b in zip(*(part[1:] for part in self.decoded), strict=True))

    def batch_attention(self) -> float:
        together, alone = _Recorder(), [_Recorder() for _ in self.cases]
        with together.on(self.model.model, [case.layout for case in self.cases]):
            slow.stock_logits(self.model, self.inputs(*self.cases))
        for case, recorder in zip(self.cases, alone, strict=True):
            with recorder.on(self.model.model, case.layout):
                slow.stock_logits(self.model, self.inputs(case))
        return max(
            _elsewhere(p, recorder.p[layer][0])
            for layer, values in together.p.items()
            for p, recorder in zip(values, alone, strict=True)
        )

    def batch(self) -> float:
        # A random draw: which tokens survive must not depend on the last bit of a score.
        pruner = Random(keep=KEEP, layers=self.stages)
        with pruner.on(self.model.model, [case.layout for case in self.cases]):
            together = self.model.next_token_logits(self.inputs(*self.cases))
        differences = []
        for case, logits in zip(self.cases, together, strict=True):
            with pruner.on(self.model.model, case.layout):
                differences.append(_apart(logits, self.model.next_token_logits(self.inputs(case))[0]))
        return max(differences)

    def budget(self) -> float:
        if self.profile is None:
            raise CalibrationError("the model could not be calibrated")
        pruner = RaDiCal(keep=self.keep, profile=self.profile)
        dense = Reranker(self.model, "dense")
        pruned = Reranker(self.model, pruner, vision_cache=dense.vision_cache)
        seconds: dict[str, list[float]] = {"dense": [], "pruned": []}
        rankings: dict[str, list[Ranking]] = {"dense": [], "pruned": []}
        for seed in range(self.lists):
            query, images = generated_list(seed, self.candidates)
            images = [image.resize((SIDE, SIDE)) for image in images]
            for timed in (False, True):  # the first time, images are encoded and kernels are chosen
                for name, reranker in (("dense", dense), ("pruned", pruned)):
                    start = time.perf_counter()
                    ranking = reranker.rank(query, images)
                    if timed:
                        seconds[name].append(time.perf_counter() - start)
                        rankings[name].append(ranking)
        self.speed = _speed(seconds, rankings)
        return max(
            _over_budget(ranking, pruner, self.model.shape.num_layers) for ranking in rankings["pruned"]
        )

    def restored(self) -> float:
        return _apart(slow.stock_logits(self.model, self.inputs(self.cases[0]))[0, -1], self.stock)


# Differences.


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """‖a − b‖ / ‖b − mean b‖: a constant that is added to all logits changes no probability."""
    scale = (theirs - theirs.mean()).norm()
    return float((ours - theirs.to(ours.device)).norm() / scale.to(ours.device))


def _gone(layout: Layout, dropped: set[int]) -> list[int]:
    """Return the positions of dropped visual tokens, and of markup all of whose row was dropped."""
    gone = layout.positions[sorted(dropped)].tolist()
    return gone + [place for place, row in layout.markup if set(row) <= set(gone)]


def _elsewhere(p: Tensor, q: Tensor) -> float:
    return float((p - q).abs().sum()) / 2


def _averaged(attention: Tensor) -> Tensor:
    """The paper's p, written out. attention: (rows, V) -> (V,)"""
    return (attention / attention.sum(dim=1, keepdim=True)).mean(dim=0)


def _entropy(p: Tensor) -> float:
    return float(-(p * p.clamp(min=1e-30).log()).sum() / torch.tensor(float(len(p))).log())


def _over_budget(ranking: Ranking, pruner: RaDiCal, num_layers: int) -> float:
    """How far the number of tokens left is from ⌈…⌉ of each stage in turn."""
    totals = ranking.totals
    left = totals.visual_tokens
    for stage in pruner.stages(num_layers):
        left = keep_count(stage.keep, left)
    return float(abs(totals.visual_tokens_left - left))


def _speed(seconds: dict[str, list[float]], rankings: dict[str, list[Ranking]]) -> dict[str, float]:
    dense, pruned = median(seconds["dense"]), median(seconds["pruned"])
    pairs = list(zip(rankings["dense"], rankings["pruned"], strict=True))
    totals = rankings["pruned"][0].totals
    return {
        "dense_seconds": dense,
        "pruned_seconds": pruned,
        "speed_up": dense / pruned,
        "visual_tokens": totals.visual_tokens,
        "visual_tokens_left": totals.visual_tokens_left,
        "flops_saved": totals.flops_saved,
        "kv_saved": totals.kv_saved,
        "same_first": sum(a.order[0] == b.order[0] for a, b in pairs) / len(pairs),
    }
