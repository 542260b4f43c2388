"""`radical bench prefill`, `end-to-end`, `throughput`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from radical_rerank.cli.common import AsJson, Model, print_json, print_table, progress, say
from radical_rerank.errors import InputError
from radical_rerank.files import EMBEDDED

app = typer.Typer(help="How fast, and how far from the limit.", no_args_is_help=True)

Keeps = Annotated[list[float] | None, typer.Option("--keep", help="Budgets: --keep 0.2 0.1.")]
Methods = Annotated[list[str] | None, typer.Option("--methods", help="Methods, see `radical methods`.")]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are reported.")]


@app.command()
def prefill(
    shape: Annotated[
        str, typer.Option(help="paper: 36 layers, 3,904 tokens; small: a quarter of it.")
    ] = "paper",
    width: Annotated[int, typer.Option(min=128, help="Hidden size; the 4B has 2560.")] = 512,
    keep: Keeps = None,
    methods: Methods = None,
    rounds: Rounds = 5,
    as_json: AsJson = False,
) -> None:
    """A random decoder of the paper's shape: speed-up, what the arithmetic predicts, and the limit."""
    from radical_rerank.bench.prefill import SHAPES, run_prefill
    from radical_rerank.pruning import build

    names, keeps = methods or ["radical", "random"], keep or [0.2]
    for name in names:
        build(name)  # an unknown one is told before anything is made
    if shape not in SHAPES:
        raise InputError(f"unknown shape {shape!r}; there are: {', '.join(SHAPES)}")
    wanted = [(name, budget) for budget in keeps for name in names]
    ticks = iter(progress(range((rounds + 1) * (2 + 2 * len(wanted))), "prefill"))
    result = run_prefill(SHAPES[shape](width), wanted, rounds=rounds, tell=lambda: next(ticks, None) and None)
    for _ in ticks:
        pass
    if as_json:
        print_json(result.to_dict())
        return
    lines = [
        (
            found.method,
            f"{found.seconds:.3f}",
            str(found.speedup),
            f"{found.predicted:.3f}",
            f"{found.speedup.median / found.predicted:.3f}",
            str(found.efficiency),
            str(found.visual_tokens_left),
        )
        for found in result.methods
    ]
    heads = (
        "method",
        "s",
        "speed-up",
        "predicted",
        "speed-up / predicted",
        "efficiency",
        "visual tokens left",
    )
    print_table(heads, lines, f"prefill, {asdict(result.shape)}, {result.device}, {result.threads} threads")
    say(f"dense: {result.dense_seconds:.3f} s; with our hooks, keep = 1: {result.hooks} of the stock model")
    if result.over_random is not None:
        say(f"RaDiCal over Random at the same schedule: {result.over_random}")
    say(f"extra peak memory of a stage / eager attention of its layer: {result.stage_memory:.3f}")


@app.command("end-to-end")
def end_to_end(
    model: Model = EMBEDDED,
    keep: Annotated[float, typer.Option(help="The budget.")] = 0.2,
    scorers: Annotated[list[str] | None, typer.Option(help="logits, generate.")] = None,
    rounds: Rounds = 5,
    as_json: AsJson = False,
) -> None:
    """Images in, ranking out: cold and warm vision cache, both scorers, N = 5, 10, 20, 50."""
    from radical_rerank.backbones import Backbone
    from radical_rerank.bench.end_to_end import growth, run_end_to_end

    backbone = Backbone.from_pretrained(model)
    results = run_end_to_end(backbone, scorers=scorers or ["logits", "generate"], keep=keep, rounds=rounds)
    fields = ("dense_cold", "dense_warm", "pruned_cold", "pruned_warm")
    exponents: dict[str, Any] = {}
    for scorer in dict.fromkeys(result.scorer for result in results):
        mine = [result for result in results if result.scorer == scorer]
        exponents[scorer] = {field: growth(mine, field) for field in fields}
    if as_json:
        print_json({"results": [asdict(result) for result in results], "exponents": exponents})
        return
    lines = [
        (
            result.scorer,
            str(result.candidates),
            *(f"{getattr(result, field):.3f}" for field in fields),
            str(result.warm_speedup),
            "  ".join(f"{part} {seconds:.3f}" for part, seconds in result.parts.items()),
        )
        for result in results
    ]
    heads = ["scorer", "N", "dense cold", "dense warm", "pruned cold", "pruned warm"]
    heads += ["dense cold / pruned warm", "parts of pruned warm"]
    print_table(heads, lines, f"seconds per list, {model}, {keep:.0%} kept")
    for scorer, found in exponents.items():
        say(f"{scorer}: time grows as N to the " + ", ".join(f"{v:.2f} ({k})" for k, v in found.items()))


@app.command()
def throughput(model: Model = EMBEDDED, rounds: Rounds = 3, as_json: AsJson = False) -> None:
    """Lists per second of `rank_many`, one at a time and in batches."""
    from radical_rerank.backbones import Backbone
    from radical_rerank.bench.throughput import run_throughput

    results = run_throughput(Backbone.from_pretrained(model), rounds=rounds)
    if as_json:
        print_json([asdict(result) for result in results])
        return
    lines = [(r.method, str(r.batch_size), f"{r.lists_per_second:.2f}") for r in results]
    print_table(("method", "batch", "lists / s"), lines, f"throughput, {model}, N = 20")
