"""`radical photos train`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from radical_rerank.cli.common import log
from radical_rerank.progress import bar

app = typer.Typer(help="The small model of photographs: train it.", no_args_is_help=True)


@app.command("train")
def photos_train(
    out: Annotated[str, typer.Argument(help="The folder of the run. An unfinished run in it is continued.")],
    data: Annotated[str, typer.Option(help="The folder of Flickr8k: captions, splits and images.")],
    stage: Annotated[
        list[str] | None,
        typer.Option(help="features, alignment or listwise; by default all three, in this order."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seeds the weights and all data.")] = 0,
) -> None:
    """Train a small listwise reranker on photographs with captions."""
    from radical_rerank.embedded.photos.training.plan import Plan
    from radical_rerank.embedded.photos.training.run import STAGES, train

    train(out, data, replace(Plan(), seed=seed), stages=stage or STAGES, progress=bar)
    log.info("the run is in %s", out)


@app.callback()
def photos() -> None:
    """Keep `train` a command of its own, also while it is the only one."""
