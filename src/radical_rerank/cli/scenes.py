"""`radical scenes train`, `evaluate` and `card`."""

from __future__ import annotations

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
    help="The small model of generated scenes: train it, measure it, write its card.", no_args_is_help=True
)


@app.command("evaluate")
def scenes_evaluate(
    model: Annotated[
        str, typer.Option(help="A folder of `radical scenes train`; by default the model that ships.")
    ] = "scenes",
    lists: Annotated[int, typer.Option(min=1, help="Held-out lists per figure.")] = 1000,
    out: FiguresFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure the figures of the model card on held-out scenes."""
    from radical_rerank.backbones import Backbone
    from radical_rerank.embedded.scenes.figures import SceneEvaluation

    path = Path(out) if out else None
    figures = SceneEvaluation(Backbone.from_pretrained(model), lists, path, bar).run()
    print_figures(figures, f"{model}, {lists} lists", as_json)


@app.command("card")
def scenes_card(folder: TrainedFolder, commit: TrainedAt, remark: Remark = "") -> None:
    """Write a trained model's card from its figures and its training log."""
    from radical_rerank.embedded.card import write_card

    log.info("wrote %s", write_card("scenes", folder, commit, remark))


@app.command("train")
def scenes_train(
    out: RunFolder,
    seed: Seed = 0,
    plan: Annotated[
        str | None, typer.Option(help="A JSON file of the fields that differ from the default plan.")
    ] = None,
) -> None:
    """Train a small listwise reranker on generated scenes, from scratch."""
    from radical_rerank.embedded.scenes.training.plan import Plan
    from radical_rerank.embedded.scenes.training.run import train

    train(out, Plan.load(plan, seed=seed) if plan else Plan(seed=seed), progress=bar)
    log.info("the model is in %s", out)
