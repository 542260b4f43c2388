"""`radical eval`, `datasets`, `experiment`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from radical_rerank.cli.common import AsJson, Model, print_json, print_table, progress, say
from radical_rerank.errors import InputError
from radical_rerank.files import EMBEDDED

app = typer.Typer()

Keeps = Annotated[list[float] | None, typer.Option("--keep", help="Budgets: --keep 0.2 0.1.")]
Seeds = Annotated[list[int] | None, typer.Option("--seeds", help="Seeds: they shuffle the candidates.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first so many queries.")]


@app.command("eval")
def evaluate(
    out: Annotated[str, typer.Option(help="The folder of the records; a killed run there goes on.")],
    dataset: Annotated[str, typer.Option(help="A data set, see `radical datasets`.")] = "scenes",
    methods: Annotated[list[str] | None, typer.Option(help="Methods, see `radical methods`.")] = None,
    keep: Keeps = None,
    seeds: Seeds = None,
    limit: Limit = None,
    annotations: Annotated[str | None, typer.Option(help="The data set's annotation file.")] = None,
    images: Annotated[str | None, typer.Option(help="The folder of its pictures.")] = None,
    split: Annotated[str, typer.Option(help="Its split, or its file of ids.")] = "test",
    expert: Annotated[
        str | None, typer.Option(help="Flickr8k's expert judgements: graded relevance.")
    ] = None,
    crowd: Annotated[str | None, typer.Option(help="Flickr8k's crowd judgements.")] = None,
    pool: Annotated[str | None, typer.Option(help="A TREC run file of candidates.")] = None,
    embedder: Annotated[
        str | None, typer.Option(help="A first stage: embedded, siglip2, jina, qwen or a model id.")
    ] = None,
    depth: Annotated[int, typer.Option(min=2, help="Candidates per query.")] = 20,
    ray: Annotated[str | None, typer.Option(help="Run on Ray: local, or a cluster's address.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Rerankers on Ray.")] = 2,
    model: Model = EMBEDDED,
    as_json: AsJson = False,
) -> None:
    """Rank a data set with several methods: one record per query and method, and a table of them."""
    from radical_rerank.evaluation.experiments import KEEPS, Experiment, compared, run_experiment, seeded
    from radical_rerank.evaluation.open import open_dataset, pools_of
    from radical_rerank.evaluation.records import Records
    from radical_rerank.report.tables import summarize, write_tables

    names, keeps = methods or ["dense", "radical"], keep or list(KEEPS)
    plan = Experiment(f"{dataset}", lambda budgets: compared(names, budgets))
    cells = plan.cells(keeps)  # an unknown method is told before anything is loaded
    opened = partial(
        open_dataset,
        dataset,
        lists=limit,
        annotations=annotations,
        images=images,
        split=split,
        expert=expert,
        crowd=crowd,
    )
    data = opened()
    runner = _runner(model)
    found = Path(out) / "pool.run"
    pools = pools_of(data, runner.backbone, pool, depth, found, embedder=embedder, say=say)
    records = Records(Path(out) / "records.jsonl")
    if ray is not None:
        from radical_rerank.evaluation.on_ray import Job, run_on_ray

        job = Job(model, opened, seeded(cells, seeds or [42]), runner.provenance, pools)
        run_on_ray(ray, job, records, min(limit or len(data.tasks), len(data.tasks)), workers=workers)
    run_experiment(
        plan,
        runner,
        records,
        keeps=keeps,
        seeds=seeds or [42],
        limit=limit or len(data.tasks),
        track=progress,
        data=data,
        pools=pools,
    )
    wanted = {cell.name for cell in cells}
    rows = summarize(record for record in records if record["cell"] in wanted)
    write_tables(out, "table", f"{dataset}, {model}", rows)
    _show_rows(rows, dataset, as_json)


@app.command()
def datasets(as_json: AsJson = False) -> None:
    """List the data sets, and what each needs."""
    from radical_rerank.evaluation.open import ABOUT

    if as_json:
        print_json([{"name": name, "about": about} for name, about in ABOUT.items()])
        return
    print_table(("name", "what it is, and what it needs"), ABOUT.items())


@app.command()
def experiment(
    name: Annotated[
        str, typer.Argument(help="An experiment of the paper; without one they are listed.")
    ] = "",
    out: Annotated[str, typer.Option(help="The folder of records, tables and plots.")] = "results",
    keep: Keeps = None,
    seeds: Seeds = None,
    limit: Annotated[int, typer.Option(min=1, help="Lists per setting.")] = 500,
    model: Model = EMBEDDED,
    as_json: AsJson = False,
) -> None:
    """Run one of the paper's experiments and write its records, tables and plots."""
    from radical_rerank.evaluation.experiments import EXPERIMENTS, KEEPS
    from radical_rerank.report.present import STUDIES, run_study

    about = {key: found.about for key, found in EXPERIMENTS.items()} | {
        key: found.about for key, found in STUDIES.items()
    }
    if not name:
        if as_json:
            print_json([{"name": key, "about": value} for key, value in about.items()])
            return
        print_table(("name", "what it shows"), about.items())
        return
    if name not in about:
        raise InputError(f"unknown experiment {name!r}; there are: {', '.join(sorted(about))}")
    rows = run_study(
        name,
        _runner(model),
        Path(out),
        keeps=keep or list(KEEPS),
        seeds=seeds or [42],
        limit=limit,
        track=progress,
    )
    _show_rows(rows, name, as_json)
    say(f"records, tables and plots are in {Path(out) / name}")


def _runner(model: str) -> Any:
    from radical_rerank.backbones import Backbone
    from radical_rerank.evaluation.records import provenance
    from radical_rerank.evaluation.runner import Runner

    return Runner(Backbone.from_pretrained(model), provenance(), say=say)


def _show_rows(rows: list[Any], title: str, as_json: bool) -> None:
    from radical_rerank.report.tables import table_of

    if as_json:
        print_json([row if isinstance(row, dict) else asdict(row) for row in rows])
    elif rows and isinstance(rows[0], dict):
        lines = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
        print_table(list(rows[0]), lines, title)
    else:
        print_table(*table_of(rows), title)
