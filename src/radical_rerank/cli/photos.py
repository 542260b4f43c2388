"""`radical photos train` and `evaluate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from radical_rerank.cli.common import AsJson, log, print_figures
from radical_rerank.progress import bar

app = typer.Typer(help="The small model of photographs: train it, measure it.", no_args_is_help=True)


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


@app.command("evaluate")
def photos_evaluate(
    model: Annotated[
        str, typer.Argument(help="The folder of a trained model, or the name of a shipped one.")
    ],
    data: Annotated[str, typer.Option(help="The folder of Flickr8k: captions, splits and images.")],
    lists: Annotated[int, typer.Option(min=1, help="Lists of the dev split per figure.")] = 1000,
    out: Annotated[
        str | None,
        typer.Option(
            help="Keep the figures in this JSON file, and the rankings in a folder beside it. If the run is "
            "stopped, the same command continues it."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the figures of the model card on photographs that it was not trained on."""
    from radical_rerank.backbones import Backbone
    from radical_rerank.embedded.photos.figures import PhotoEvaluation

    path = Path(out) if out else None
    figures = PhotoEvaluation(Backbone.from_pretrained(model), lists, path, bar, data=data).run()
    print_figures(figures, f"{model}, {lists} lists", as_json)
