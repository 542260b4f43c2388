"""`radical bench prefill`, `end-to-end`, `throughput`, `service`, `attacks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from radical_rerank import progress as bars
from radical_rerank.cli.common import AsJson, Keeps, Model, log, print_json, print_table
from radical_rerank.errors import InputError, MissingExtraError, needs_extra, unknown_name
from radical_rerank.lab.paper import CANDIDATES, COUNTS

if TYPE_CHECKING:
    from radical_rerank.lab.bench.end_to_end import EndToEnd
    from radical_rerank.lab.bench.prefill import OnceResult, PrefillResult

app = typer.Typer(help="Benchmarks of speed, memory and the service.", no_args_is_help=True)

Methods = Annotated[list[str] | None, typer.Option("--methods", help="Methods, see `radical methods`.")]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are reported.")]


@app.command()
def prefill(
    shape: Annotated[
        str, typer.Option(help="paper: 36 layers, 3,904 tokens; small: 12 layers, 1,000 tokens.")
    ] = "paper",
    width: Annotated[int, typer.Option(min=128, help="Hidden size; Qwen3-VL-4B has 2560.")] = 512,
    keep: Keeps = None,
    methods: Methods = None,
    rounds: Rounds = 5,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="One pass of each method and no more: for widths where it takes minutes."
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="With --once: float32 or bfloat16.", show_default="float32 on a CPU, else bfloat16"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time the prefill of a random decoder: measured speed-up, predicted speed-up, and the limit."""
    import torch

    from radical_rerank.lab.bench.prefill import PROMPT_SHAPES, run_once, run_prefill
    from radical_rerank.pruning import build

    dtypes = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in dtypes:
        raise InputError(f"--dtype must be float32 or bfloat16, not {dtype}")
    if dtype and not once:
        raise InputError("--dtype goes with --once")

    names, keeps = methods or ["radical", "random"], keep or [0.2]
    for name in names:
        build(name)  # checks the name before anything is loaded
    if shape not in PROMPT_SHAPES:
        raise unknown_name("shape", shape, PROMPT_SHAPES)
    wanted = [(name, budget) for budget in keeps for name in names]
    if once:
        _show_once(
            run_once(PROMPT_SHAPES[shape](width), wanted, dtype=dtypes[dtype], progress=bars.bar), as_json
        )
        return
    result = run_prefill(PROMPT_SHAPES[shape](width), wanted, rounds=rounds, progress=bars.bar)
    if as_json:
        print_json(result.to_dict())
    else:
        _show_prefill(result)


def _show_once(result: OnceResult, as_json: bool) -> None:
    if as_json:
        print_json(asdict(result))
        return
    lines = [
        (
            f"{one.method} {one.keep:.0%}",
            f"{one.seconds:.1f}",
            f"{one.speedup:.2f}",
            f"{one.predicted:.2f}",
            f"{one.speedup / one.predicted:.2f}",
            f"{one.scoring:.3f}",
        )
        for one in result.methods
    ]
    heads = ["method", "s", "speed-up", "predicted", "speed-up / predicted", "scoring / dense"]
    title = f"prefill, {asdict(result.shape)}, {result.dtype}, {result.threads} threads, one pass"
    print_table(heads, lines, title)
    log.info("dense: %.1f s", result.dense_seconds)


def _show_prefill(result: PrefillResult) -> None:
    lines = [
        (
            f"{method.method} {method.keep:.0%}",
            f"{method.seconds:.2f}",
            str(method.speedup),
            f"{method.predicted:.3f}",
            f"{method.speedup.median / method.predicted:.3f}",
            str(method.efficiency),
            "" if method.over_random is None else str(method.over_random),
            f"{method.scoring:.3f}",
            str(method.visual_tokens_left),
        )
        for method in result.methods
    ]
    heads = ["method", "s", "speed-up", "predicted", "speed-up / predicted", "efficiency"]
    heads += ["over Random", "scoring / dense", "tokens left"]
    print_table(heads, lines, f"prefill, {asdict(result.shape)}, {result.device}, {result.threads} threads")
    log.info(
        "dense: %.2f s; with hooks and keep = 1: %s of the stock model", result.dense_seconds, result.hooks
    )
    log.info("with the last layer for one row only: %s of the first method's time", result.one_row)
    stages = ", ".join(f"layer {s.layer} ({s.tokens} tokens) {s.peak / s.eager:.3f}" for s in result.stages)
    log.info("peak extra memory of a stage / eager attention: at most %.3f; %s", result.memory, stages)


@app.command("end-to-end")
def end_to_end(
    model: Model = "scenes",
    shape: Annotated[
        str | None, typer.Option(help="paper: a random model of 36 layers, pictures of 180 tokens.")
    ] = None,
    width: Annotated[
        int, typer.Option(min=128, help="Hidden size of --shape paper; Qwen3-VL-4B has 2560.")
    ] = 512,
    counts: Annotated[
        list[int] | None, typer.Option(help=f"Candidates per list; by default {' '.join(map(str, COUNTS))}.")
    ] = None,
    keep: Annotated[float, typer.Option(help="The budget.")] = 0.2,
    scorers: Annotated[list[str] | None, typer.Option(help="logits, generate.")] = None,
    rounds: Rounds = 5,
    as_json: AsJson = False,
) -> None:
    """Time whole rankings: cold and warm vision cache, both scorers, several list lengths N."""
    from radical_rerank.backbones import Backbone
    from radical_rerank.lab.bench.end_to_end import (
        PAPER_SIZE,
        VARIANTS,
        growth,
        paper_backbone,
        run_end_to_end,
    )
    from radical_rerank.lab.paper import MODEL
    from radical_rerank.pruning import Profile

    if shape not in (None, "paper"):
        raise unknown_name("shape", shape, ["paper"])
    results = run_end_to_end(
        paper_backbone(width) if shape else Backbone.from_pretrained(model),
        counts=counts or COUNTS,
        scorers=scorers or ["logits", "generate"],
        keep=keep,
        profile=Profile.find(MODEL) if shape else None,  # made for this depth, at any width
        size=PAPER_SIZE if shape else None,
        rounds=rounds,
        progress=bars.bar,
    )
    exponents: dict[str, dict[str, float]] = {}
    for scorer in dict.fromkeys(result.scorer for result in results):
        mine = [result for result in results if result.scorer == scorer]
        if len(mine) > 1:
            exponents[scorer] = {variant: growth(mine, variant) for variant in VARIANTS}
    if as_json:
        print_json({"results": [asdict(result) for result in results], "exponents": exponents})
    else:
        _show_end_to_end(results, exponents, f"seconds per list, {shape or model}, {keep:.0%} kept")


def _show_end_to_end(results: Sequence[EndToEnd], exponents: dict[str, dict[str, float]], title: str) -> None:
    from radical_rerank.lab.bench.end_to_end import VARIANTS

    lines = [
        (
            result.scorer,
            str(result.candidates),
            *(f"{result.seconds[variant]:.3f}" for variant in VARIANTS),
            str(result.speedup),
            " ".join(f"{kind} {seconds:.3f}" for kind, seconds in result.phases["dense_warm"].items()),
            " ".join(f"{kind} {seconds:.3f}" for kind, seconds in result.phases["pruned_warm"].items()),
            str(result.again),
        )
        for result in results
    ]
    heads = ["scorer", "N", *(variant.replace("_", " ") for variant in VARIANTS)]
    heads += ["dense cold / pruned warm", "dense decoder", "pruned decoder", "another query / the first"]
    print_table(heads, lines, title)
    for scorer, fitted in exponents.items():
        powers = ", ".join(f"{power:.2f} ({variant})" for variant, power in fitted.items())
        log.info("%s: time grows with N to the power of %s", scorer, powers)


@app.command()
def throughput(model: Model = "scenes", rounds: Rounds = 3, as_json: AsJson = False) -> None:
    """Measure lists per second of `rank_many` and of the service, one at a time and in batches."""
    from radical_rerank.lab.bench.throughput import run_throughput

    clients: tuple[int, ...] = (1, 4)
    try:
        with needs_extra("serve"):
            import radical_rerank.lab.bench.service  # noqa: F401
    except MissingExtraError as error:
        log.info("without the service: %s", error)
        clients = ()
    results = run_throughput(model, clients=clients, rounds=rounds, progress=bars.bar)
    if as_json:
        print_json([asdict(result) for result in results])
        return
    lines = [(r.through, r.method, str(r.at_once), f"{r.lists_per_second:.2f}") for r in results]
    heads = ("through", "method", "at once", "lists / s")
    print_table(heads, lines, f"throughput, {model}, N = {CANDIDATES}")


@app.command()
def service(
    model: Model = "scenes",
    seconds: Annotated[float, typer.Option(min=1, help="How long the overload lasts.")] = 30.0,
    requests: Annotated[int, typer.Option(min=10, help="Requests over which memory is measured.")] = 2000,
    rounds: Rounds = 15,
    as_json: AsJson = False,
) -> None:
    """Measure the HTTP service: overhead, latency at twice its load, memory."""
    with needs_extra("serve"):
        from radical_rerank.lab.bench.service import run_service
    result = run_service(model, rounds=rounds, seconds=seconds, requests=requests, progress=bars.bar)
    if as_json:
        print_json(asdict(result))
        return
    answers = ", ".join(f"{count} × {status}" for status, count in sorted(result.statuses.items()))
    lines = [
        ("a request / a direct call", str(result.overhead)),
        ("a request alone, median", f"{result.unloaded:.3f} s"),
        (
            "let in at twice the load, p95",
            f"{result.loaded:.3f} s = {result.loaded / result.unloaded:.2f} ×",
        ),
        ("answers at twice the load", answers),
        ("the model, per list under load", f"{result.list_seconds:.3f} s"),
        ("reading a request under load", f"{result.reading_seconds:.3f} s"),
        (
            "predicted by `radical plan` from these",
            f"p95 {result.predicted.p95:.3f} s, {result.predicted.refused:.0%} × 429",
        ),
        (f"memory gained over {result.requests} requests", f"{result.megabytes:.1f} MB"),
    ]
    print_table(("figure", "measured"), lines, f"service, {model}, N = {CANDIDATES}")


@app.command()
def attacks(
    model: Model = "scenes",
    seconds: Annotated[float, typer.Option(min=1, help="How long each attack lasts at least.")] = 12.0,
    only: Annotated[list[str] | None, typer.Option(help="Run only attacks whose names contain this.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the HTTP service under attack: good requests answered, their latency, peak memory."""
    with needs_extra("serve"):
        from radical_rerank.lab.bench.attacks import all_attacks, run_attacks
    known = list(all_attacks(0))
    names = [name for name in known if not only or any(part in name for part in only)]
    if not names:
        raise InputError(f"no attack has this name; choose from: {'; '.join(known)}")
    results = run_attacks(model, seconds=seconds, names=names, progress=bars.bar)
    if as_json:
        print_json([asdict(result) for result in results])
        return
    lines = [
        (
            r.name,
            f"{r.good} / {r.asked}",
            f"{r.p95:.3f} s = {r.p95 / r.unloaded:.2f} ×",
            f"{r.megabytes:.0f}",
            ", ".join(f"{count} × {status or 'none'}" for status, count in sorted(r.statuses.items())),
        )
        for r in results
    ]
    heads = ("attack", "good answered", "their p95, over unloaded", "peak MB over idle", "attack answered")
    print_table(heads, lines, f"service under attack, {model}, N = {CANDIDATES}")
