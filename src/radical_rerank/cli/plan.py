"""`radical plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from radical_rerank.cli.common import AsJson, log, print_json, print_table
from radical_rerank.errors import needs_extra
from radical_rerank.service import DEFAULT_KEEP, DEFAULT_QUEUE

if TYPE_CHECKING:
    from radical_rerank.service.capacity import Plan

app = typer.Typer()

HEADS = ("", "s / list", "replicas", "patience", "memory each", "p50", "p95", "429", "busy")


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="A model id, or a folder with its config.json.")],
    qps: Annotated[float, typer.Option(min=1e-6, help="Requests per second.")],
    p95: Annotated[float, typer.Option(min=1e-6, help="Seconds that 95% of the answers may take.")],
    candidates: Annotated[int, typer.Option(min=1, help="Candidates per request.")] = 20,
    image_tokens: Annotated[int, typer.Option(min=1, help="Visual tokens per candidate.")] = 300,
    device_tflops: Annotated[
        float, typer.Option(min=1e-6, help="The device's peak in half precision, in TFLOP/s.")
    ] = 400.0,
    utilisation: Annotated[
        float, typer.Option(min=0.01, max=1, help="The part of the peak that prefill reaches.")
    ] = 0.4,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1e-6, help="Seconds of one list without pruning, if you measured it: replaces both."
        ),
    ] = None,
    keep: Annotated[float, typer.Option(min=0.001, max=1, help="The budget of pruning.")] = DEFAULT_KEEP,
    cached: Annotated[
        float, typer.Option(min=0, max=1, help="The share of images whose features are in the vision cache.")
    ] = 0.0,
    overhead: Annotated[
        float, typer.Option(min=0, help="Seconds of a request besides the model: reading, network.")
    ] = 0.0,
    patience: Annotated[
        float | None,
        typer.Option(min=0, help="As of `radical serve`.", show_default="the one that needs fewest replicas"),
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="As of `radical serve`.")] = DEFAULT_QUEUE,
    max_batch: Annotated[int, typer.Option(min=1, help="Lists that run together.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Say how many replicas a load needs, dense and pruned. No weights are loaded."""
    with needs_extra("serve"):
        from radical_rerank.service.capacity import Prompt, plan_replicas
    plans = plan_replicas(
        model,
        Prompt(candidates, image_tokens),
        qps=qps,
        p95=p95,
        tflops=device_tflops,
        utilisation=utilisation,
        seconds=seconds,
        keep=keep,
        cached=cached,
        overhead=overhead,
        patience=patience,
        places=queue,
        max_batch=max_batch,
    )
    if as_json:
        print_json([one.to_dict() for one in plans])
        return
    title = f"{model}: {qps:g} requests per second, {candidates} candidates of {image_tokens} tokens"
    print_table(HEADS, [_row(one) for one in plans], title)
    if any(one.replicas is None for one in plans):
        log.info("no number of replicas holds %g s where it says none: a list alone takes longer", p95)
    source = f"you measured {seconds:g} s" if seconds else f"{device_tflops:g} TFLOP/s at {utilisation:.0%}"
    log.info("computed, not measured: %s, and a simulation of the service's queue", source)


def _row(one: Plan) -> list[str]:
    start = [one.name, f"{one.seconds:.3f}"]
    memory = f"{one.memory / 1e9:.1f} GB"
    if one.outcome is None:
        return [*start, "none", "–", memory, "–", "–", "–", "–"]
    found = one.outcome
    return [
        *start,
        str(one.replicas),
        f"{one.patience:g}",
        memory,
        f"{found.p50:.3f}",
        f"{found.p95:.3f}",
        f"{found.refused:.2%}",
        f"{found.busy:.0%}",
    ]
