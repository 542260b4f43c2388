"""How many replicas a load needs: the cost model, and a simulation of the service's own admission rules.

Nothing is loaded but a configuration. The time of a list is its arithmetic over the device's speed, or what
you measured; the rest follows from `worker.Load`, which also decides in the service.
"""

from __future__ import annotations

import json
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from typing import Any

from radical_rerank.backbones.size import Footprint, footprint_of
from radical_rerank.errors import InputError
from radical_rerank.method import DecoderShape, Schedule, kv_bytes, macs, tokens_per_layer
from radical_rerank.pruning import Profile, RaDiCal
from radical_rerank.reranking.encoding import PROMPT_CACHE_BYTES, VISION_CACHE_BYTES
from radical_rerank.service import DEFAULT_PATIENCE, DEFAULT_QUEUE
from radical_rerank.service.worker import Load

TEXT_TOKENS = 304
"""text tokens of the paper's prompt with 20 candidates"""
PRUNED_EFFICIENCY = 0.93
"""measured speed-up over predicted speed-up (`radical bench prefill`)"""
BYTES_PER_VALUE = 2
"""half precision"""
MOST_REPLICAS = 4096
REFUSED = 0.01
"""a plan refuses at most this share of the requests"""
REQUESTS, SEARCHED = 20_000, 6_000
"""simulated requests: of the result, and of each try"""
PATIENCES = (DEFAULT_PATIENCE, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""the settings that a plan chooses from"""


@dataclass(frozen=True)
class Prompt:
    """The lists that come in. image_tokens: the visual tokens of a candidate; text: all other tokens"""

    candidates: int
    image_tokens: int
    text: int = TEXT_TOKENS

    @property
    def visual(self) -> int:
        """The visual tokens of a list."""
        return self.candidates * self.image_tokens


@dataclass(frozen=True)
class ListCost:
    """What one list costs.

    Args:
        decoder, vision: multiply-accumulates
        activations, cache: bytes of one layer's activations, and of the key-value cache of all
    """

    decoder: int
    vision: int
    activations: int
    cache: int


def known_footprint(model: str) -> Footprint:
    """Return the size of a model, from its configuration or from what ships about large models."""
    file = resources.files("radical_rerank.service") / "models.json"
    facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    try:
        return footprint_of(facts.get(model, model))
    except OSError:
        raise InputError(
            f"no configuration of {model!r} is here; pass a folder with its config.json, or one of: "
            f"{', '.join(facts)}"
        ) from None


def schedule_of(model: str, shape: DecoderShape) -> tuple[int, ...]:
    """Return the layers that prune: the published ones, or the paper's at the same depths."""
    profile = Profile.find(model)
    if profile is None or profile.shape is None or profile.shape.num_layers != shape.num_layers:
        return tuple(round(layer / 36 * shape.num_layers) for layer in (7, 22, 24, 29))
    if not profile.alpha:
        return profile.layers
    stages = RaDiCal(profile=profile).stages(shape.num_layers)
    return tuple(stage.layer for stage in stages)


def list_cost(
    model: Footprint, prompt: Prompt, schedule: Sequence[int] = (), keep: float = 1.0, *, cached: float = 0.0
) -> ListCost:
    """Count what a list costs.

    Args:
        model: its size
        prompt: the list
        schedule: the layers that prune, in equal steps; none: nothing is pruned
        keep: the share of visual tokens at the end
        cached: the share of images whose features are known
    """
    shape, length = model.shape, prompt.visual + prompt.text
    passing = Schedule.equal(schedule).counts(keep, prompt.visual)
    stages = [(layer, "before", prompt.text + count) for layer, count in zip(schedule, passing, strict=True)]
    counts = tokens_per_layer(length, stages, shape.num_layers)
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    values = 4 * shape.hidden + 2 * query + 2 * key + 2 * shape.mlp
    return ListCost(
        macs(counts, shape),
        round((1 - cached) * prompt.candidates * model.vision_macs(prompt.image_tokens)),
        length * values * BYTES_PER_VALUE,
        kv_bytes(counts, shape, BYTES_PER_VALUE),
    )


# The simulation.


@dataclass(frozen=True)
class Outcome:
    """What clients see.

    Args:
        p50, p95: seconds of answered requests
        refused: the share that gets 429
        busy: the share of the time in which a replica computes
    """

    p50: float
    p95: float
    refused: float
    busy: float


@dataclass
class _Replica:
    """One replica as `worker.RankWorker` runs it."""

    load: Load
    queue: deque[float] = field(default_factory=deque)
    batch: list[float] = field(default_factory=list)
    start: float = 0.0
    end: float = 0.0
    busy: float = 0.0


def simulate(
    seconds: float,
    qps: float,
    replicas: int = 1,
    *,
    patience: float = DEFAULT_PATIENCE,
    places: int = DEFAULT_QUEUE,
    max_batch: int = 4,
    spread: float = 0.1,
    overhead: float = 0.0,
    requests: int = REQUESTS,
    seed: int = 0,
) -> Outcome:
    """Simulate requests that arrive at random times.

    A request goes to the less busy of two replicas, as Ray Serve chooses. A batch takes as long as its lists
    one after the other.

    Args:
        seconds: of one list
        qps: requests per second, of all replicas together
        replicas: how many there are
        patience, places, max_batch: the service's settings (`places` is `queue`)
        spread: the standard deviation of a list's time, as a part of it
        overhead: seconds of a request besides the model
        requests: how many are simulated
        seed: of the arrivals

    Example:
        >>> calm = simulate(0.1, qps=1)
        >>> calm.refused < 0.05 and 0.05 < calm.p50 < 0.15
        True
    """
    draw = random.Random(seed)
    pool = [_Replica(Load(seconds=seconds)) for _ in range(replicas)]
    sigma = math.sqrt(math.log1p(spread**2))
    spent: list[float] = []
    refused, now = 0, 0.0

    def begin(one: _Replica, at: float) -> None:
        one.batch = [one.queue.popleft() for _ in range(min(max_batch, len(one.queue)))]
        one.load.running, one.start = len(one.batch), at
        took = sum(seconds * draw.lognormvariate(-(sigma**2) / 2, sigma) for _ in one.batch)
        one.end, one.busy = at + took, one.busy + took

    def advance(one: _Replica, until: float) -> None:
        while one.batch and one.end <= until:
            spent.extend(one.end - arrived + overhead for arrived in one.batch)
            one.load.in_flight -= len(one.batch)
            one.load.running = 0
            one.load.learn((one.end - one.start) / len(one.batch))
            one.batch = []
            if one.queue:
                begin(one, one.end)

    for _ in range(requests):
        now += draw.expovariate(qps)
        chosen = pool if replicas == 1 else draw.sample(pool, 2)
        for one in chosen:
            advance(one, now)
        one = min(chosen, key=lambda each: each.load.in_flight)
        wait = one.load.wait(now - one.start)
        if one.load.in_flight >= places or wait > patience * one.load.seconds:
            refused += 1
            continue
        one.load.in_flight += 1
        one.queue.append(now)
        if not one.batch:
            begin(one, now)
    for one in pool:
        advance(one, math.inf)
    spent.sort()
    busy = sum(one.busy for one in pool) / (replicas * max(now, 1e-9))
    return Outcome(_quantile(spent, 0.5), _quantile(spent, 0.95), refused / requests, min(1.0, busy))


def _quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[int(share * len(ascending))] if ascending else math.nan


# The plan.


@dataclass(frozen=True)
class Plan:
    """What one way to rank needs.

    Args:
        name: "Dense" or "RaDiCal 20%"
        seconds: of one list
        replicas: the fewest that hold the p95 and refuse at most 1%; None if no number does
        patience: the service's setting that goes with them
        memory: bytes per replica: weights, a batch, the caches
        outcome: what clients see with so many replicas
    """

    name: str
    seconds: float
    replicas: int | None
    patience: float | None
    memory: int
    outcome: Outcome | None

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return asdict(self)


def fewest(
    seconds: float, qps: float, p95: float, *, patience: float | None = None, **settings: Any
) -> tuple[int | None, float | None, Outcome | None]:
    """Return the fewest replicas that hold a p95 and refuse at most 1%.

    Args:
        seconds: of one list
        qps, p95: what is asked for
        patience: as in `simulate`; by default the one that needs the fewest replicas
        settings: of `simulate`

    Returns:
        The replicas, the patience, and what clients see then. None for each if no number is enough.
    """
    if seconds + settings.get("overhead", 0.0) > p95:
        return None, None, None  # even a request alone takes longer
    work = max(1, math.ceil(qps * seconds))  # fewer cannot do it

    def outcome(count: int, own: float, requests: int = SEARCHED) -> Outcome:
        return simulate(seconds, qps, count, patience=own, requests=requests, **settings)

    def holds(found: Outcome) -> bool:
        return found.p95 <= p95 and found.refused <= REFUSED

    def least(own: float, most: int) -> int | None:
        """Return the fewest replicas up to `most` with this patience."""
        low, high = work - 1, work
        while not holds(outcome(high, own)):
            if high >= most:
                return None
            low, high = high, min(2 * high, most)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(outcome(middle, own)) else (middle, high)
        return high

    best: tuple[int, float] | None = None
    for own in PATIENCES if patience is None else (patience,):
        count = least(own, MOST_REPLICAS if best is None else best[0] - 1)
        if count is not None:
            best = count, own
        if best is not None and best[0] == work:
            break
    if best is None:
        return None, None, None
    return *best, outcome(*best, REQUESTS)


def plan_replicas(
    model: str,
    prompt: Prompt,
    *,
    qps: float,
    p95: float,
    tflops: float,
    utilisation: float,
    keep: float,
    cached: float = 0.0,
    max_batch: int = 4,
    seconds: float | None = None,
    **settings: Any,
) -> list[Plan]:
    """Plan a deployment, dense and pruned.

    Args:
        model: its name, or a folder with its configuration
        prompt: the lists that come in
        qps, p95: requests per second, and the seconds that 95% of the answers may take
        tflops, utilisation: the device's peak in half precision, and the part of it that prefill reaches
        keep: of the pruned plan
        cached: the share of images whose features are known
        max_batch: lists that run together
        seconds: of one list without pruning, if you measured it; `tflops` does not count then
        settings: of `simulate`
    """
    size = known_footprint(model)
    layers = schedule_of(model, size.shape)
    dense, pruned = (
        list_cost(size, prompt, cached=cached),
        list_cost(size, prompt, layers, keep, cached=cached),
    )
    rate = 1e12 * tflops * utilisation / 2  # multiply-accumulates per second
    if seconds is not None:
        rate = (dense.decoder + dense.vision) / seconds
    plans = []
    for name, cost, efficiency in (("Dense", dense, 1.0), (f"RaDiCal {keep:.0%}", pruned, PRUNED_EFFICIENCY)):
        took = (cost.decoder / efficiency + cost.vision) / rate
        count, patience, outcome = fewest(took, qps, p95, max_batch=max_batch, **settings)
        caches = VISION_CACHE_BYTES + PROMPT_CACHE_BYTES
        memory = BYTES_PER_VALUE * size.parameters + max_batch * cost.activations + caches
        plans.append(Plan(name, took, count, patience, memory, outcome))
    return plans
