"""`radical photos train`, `evaluate` and `card`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from radical_rerank.cli.common import (
    AsJson,
    FiguresFile,
    Remark,
    RunFolder,
    Seed,
    TrainedAt,
    TrainedFolder,
    log,
    print_figures,
)
from radical_rerank.progress import bar

app = typer.Typer(
    help="The small model of photographs: train it, measure it, write its card.", no_args_is_help=True
)


Data = Annotated[str, typer.Option(help="The folder of Flickr8k: captions, splits and images.")]


@app.command("train")
def photos_train(
    out: RunFolder,
    data: Data,
    stage: Annotated[
        list[str] | None,
        typer.Option(help="features, alignment or listwise; by default all three, in this order."),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Train a small listwise reranker on photographs with captions."""
    from radical_rerank.embedded.photos.training.plan import Plan
    from radical_rerank.embedded.photos.training.run import STAGES, train

    train(out, data, replace(Plan(), seed=seed), stages=stage or STAGES, progress=bar)
    log.info("the run is in %s", out)


@app.command("evaluate")
def photos_evaluate(
    data: Data,
    model: Annotated[
        str,
        typer.Option(help="The model in a folder of `radical photos train`; by default the one that ships."),
    ] = "photos",
    lists: Annotated[int, typer.Option(min=1, help="Lists of the dev split per figure.")] = 1000,
    stamps: Annotated[
        str | None,
        typer.Option(help="The folder of Tux Paint's stamps; by default where Debian's package has it."),
    ] = None,
    out: FiguresFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure the figures of the model card on photographs that it was not trained on."""
    from radical_rerank.backbones import Backbone
    from radical_rerank.embedded.photos.figures import PhotoEvaluation
    from radical_rerank.embedded.photos.pictures import STAMPS

    path, folder = Path(out) if out else None, Path(stamps) if stamps else STAMPS
    backbone = Backbone.from_pretrained(model)
    figures = PhotoEvaluation(backbone, lists, path, bar, data=data, stamps=folder).run()
    print_figures(figures, f"{model}, {lists} lists", as_json)


@app.command("card")
def photos_card(folder: TrainedFolder, commit: TrainedAt, remark: Remark = "") -> None:
    """Write a trained model's card from its figures and its training log."""
    from radical_rerank.embedded.card import write_card

    log.info("wrote %s", write_card("photos", folder, commit, remark))
