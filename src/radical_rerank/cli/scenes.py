"""`radical scenes train`, `evaluate`, `card`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from radical_rerank import progress as bars
from radical_rerank.cli.common import AsJson, log, print_json, print_table
from radical_rerank.embedded import DEFAULT_MODEL

app = typer.Typer(help="The embedded world.", no_args_is_help=True)


@app.command("evaluate")
def scenes_evaluate(
    model: Annotated[str, typer.Option(help="A folder that `radical scenes train` wrote.")] = DEFAULT_MODEL,
    lists: Annotated[int, typer.Option(min=1, help="Held-out lists per figure.")] = 1000,
    out: Annotated[str | None, typer.Option(help="Keep the figures here; a killed run goes on.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the figures of the embedded model's card on held-out scenes."""
    from radical_rerank.backbones import Backbone
    from radical_rerank.embedded.scenes.figures import Card

    figures = Card(Backbone.from_pretrained(model), lists, Path(out) if out else None, bars.bar).run()
    if as_json:
        print_json(figures)
        return
    lines = [
        (name, "  ".join(f"{key} {value:.3f}".removesuffix(".000") for key, value in values.items()))
        for name, values in figures.items()
    ]
    print_table(("figure", "values"), lines, f"{model}, {lists} lists")


@app.command("card")
def scenes_card(
    folder: Annotated[str, typer.Argument(help="A trained model with its figures.json.")],
    commit: Annotated[str, typer.Option(help="The commit at which it was trained.")],
    remark: Annotated[str, typer.Option(help="What else is to be said of the training.")] = "",
) -> None:
    """Write a trained model's card from its figures and its training log."""
    from radical_rerank.embedded.scenes.card import write_card

    log.info(f"wrote {write_card(folder, commit, remark)}")


@app.command("train")
def scenes_train(
    out: Annotated[str, typer.Argument(help="The folder of the run; an unfinished one there goes on.")],
    seed: Annotated[int, typer.Option(help="Seeds the weights and all data.")] = 0,
    plan: Annotated[
        str | None, typer.Option(help="JSON file with what differs from the default plan.")
    ] = None,
) -> None:
    """Train a small listwise reranker on generated scenes, from scratch."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from radical_rerank.embedded.scenes.training.run import Plan, train

    chosen = Plan.load(plan, seed=seed) if plan else Plan(seed=seed)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn(
            "loss {task.fields[loss]:.3f}  R@1 {task.fields[right]:.2f}  validation {task.fields[held]:.2f}"
        ),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=chosen.steps, loss=0.0, right=0.0, held=0.0)

        def tell(step: int, facts: dict[str, float]) -> None:
            shown = {"loss": facts["loss"]}
            shown |= {"right": facts["list"]} if "list" in facts else {}
            shown |= {"held": facts["validation R@1"]} if "validation R@1" in facts else {}
            bar.update(task, completed=step, **shown)  # type: ignore[arg-type]

        train(out, chosen, tell=tell)
    log.info(f"the model is in {out}")
