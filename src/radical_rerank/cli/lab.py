"""`radical eval`, `datasets`, `experiment`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from radical_rerank import progress as bars
from radical_rerank.cli.common import AsJson, Model, log, print_json, print_table
from radical_rerank.embedded import DEFAULT_MODEL
from radical_rerank.errors import unknown_name

app = typer.Typer()

Keeps = Annotated[list[float] | None, typer.Option("--keep", help="Budgets: --keep 0.2 0.1.")]
Scorer = Annotated[
    str | None,
    typer.Option(help="logits (the default): one forward pass; generate: the model writes the order."),
]
Template = Annotated[str | None, typer.Option(help="A prompt template: a family's name or a JSON file.")]
Tokens = Annotated[int | None, typer.Option(min=1, help="The most visual tokens of an image; default 384.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first so many queries.")]


@app.command("eval")
def evaluate(
    out: Annotated[str, typer.Option(help="The folder of the records; a killed run there goes on.")],
    dataset: Annotated[str, typer.Option(help="A data set, see `radical datasets`.")] = "scenes",
    methods: Annotated[list[str] | None, typer.Option(help="Methods, see `radical methods`.")] = None,
    keep: Keeps = None,
    seeds: Annotated[
        list[int] | None,
        typer.Option(help="They shuffle the candidates; by default 42. The paper: 42 123 456 789 1024."),
    ] = None,
    limit: Limit = None,
    annotations: Annotated[str | None, typer.Option(help="The data set's annotation file.")] = None,
    images: Annotated[str | None, typer.Option(help="The folder of its pictures.")] = None,
    split: Annotated[str, typer.Option(help="Its split, or its file of ids.")] = "test",
    expert: Annotated[
        str | None, typer.Option(help="Flickr8k's expert judgements: graded relevance.")
    ] = None,
    crowd: Annotated[str | None, typer.Option(help="Flickr8k's crowd judgements.")] = None,
    captions: Annotated[
        str | None,
        typer.Option(
            help="Of a picture with several captions: first (the default, as in the paper: 1,000 queries "
            "over 1,000 pictures), all, or random."
        ),
    ] = None,
    caption_seed: Annotated[int, typer.Option(help="What --captions random draws by.")] = 42,
    scorer: Scorer = None,
    max_image_tokens: Tokens = None,
    template: Template = None,
    pool: Annotated[str | None, typer.Option(help="A TREC run file of candidates.")] = None,
    embedder: Annotated[
        str | None, typer.Option(help="A first stage: scenes, siglip2, jina, qwen or a model id.")
    ] = None,
    depth: Annotated[int, typer.Option(min=2, help="Candidates per query.")] = 20,
    ray: Annotated[str | None, typer.Option(help="Run on Ray: local, or a cluster's address.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Rerankers on Ray.")] = 2,
    model: Model = DEFAULT_MODEL,
    as_json: AsJson = False,
) -> None:
    """Rank a data set with several methods: one record per query and method, and a table of them."""
    from radical_rerank.embedded.scenes.datasets import TESTBED
    from radical_rerank.lab.catalog import open_dataset, pools_of
    from radical_rerank.lab.experiments.definitions import KEEPS, Experiment, compared, run_experiment, seeded
    from radical_rerank.lab.records import RunFolder
    from radical_rerank.lab.runner import work_of
    from radical_rerank.lab.tables import summarize, write_tables

    names, keeps, seeds = methods or ["dense", "radical"], keep or list(KEEPS), seeds or [42]
    plan = Experiment(f"{dataset}", lambda budgets: compared(names, budgets))
    cells = seeded(plan.cells(keeps), seeds)  # an unknown method is told before anything is loaded
    opened = partial(
        open_dataset,
        dataset,
        testbed=TESTBED,
        lists=limit,
        annotations=annotations,
        images=images,
        split=split,
        expert=expert,
        crowd=crowd,
        captions=captions,
        caption_seed=caption_seed,
    )
    data = opened()
    count = min(limit or len(data.tasks), len(data.tasks))
    runner = _runner(model, scorer, max_image_tokens, template)
    with RunFolder(Path(out)) as folder:
        path = folder.path / "pool.run"
        pools = pools_of(data, runner.backbone, pool, depth, path, testbed=TESTBED, embedder=embedder)
        records = folder.records()
        if ray is not None and any(
            runner.missing(work_of(data, number, pools), cells, records) for number in range(count)
        ):
            from radical_rerank.lab.on_ray import EvaluationJob, run_on_ray

            job = EvaluationJob(
                model,
                opened,
                cells,
                runner.provenance,
                pools,
                # The template itself: a file of it need not be where the workers are.
                options={**runner.options, "template": runner.plain.template},
                profile=runner.known_profile,
                dtype=runner.backbone.dtype,
                fingerprint=runner.backbone.fingerprint,
            )
            run_on_ray(ray, job, records, count, workers=workers)
        run_experiment(
            plan,
            runner,
            records,
            keeps=keeps,
            seeds=seeds,
            limit=count,
            progress=bars.bar,
            data=data,
            pools=pools,
        )
        rows = summarize(records.claimed())
        note = f"Scorer {runner.plain.scorer}, at most {runner.plain.max_image_tokens} tokens an image."
        write_tables(folder.path, "table", f"{dataset}, {model}", rows, note)
        _show_rows(rows, dataset, as_json)


@app.command()
def datasets(as_json: AsJson = False) -> None:
    """List the data sets, and what each needs."""
    from radical_rerank.embedded.scenes.datasets import TESTBED
    from radical_rerank.lab.catalog import FILES

    about = {**TESTBED.about, **FILES}
    if as_json:
        print_json([{"name": name, "about": about} for name, about in about.items()])
        return
    print_table(("name", "what it is, and what it needs"), about.items())


@app.command()
def experiment(
    name: Annotated[
        str, typer.Argument(help="An experiment of the paper; without one they are listed.")
    ] = "",
    out: Annotated[str, typer.Option(help="The folder of records, tables and plots.")] = "results",
    keep: Keeps = None,
    seeds: Annotated[
        list[int] | None,
        typer.Option(help="They shuffle the candidates; by default the paper's: 42 123 456 789 1024."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Lists per setting.")] = 500,
    scorer: Scorer = None,
    max_image_tokens: Tokens = None,
    template: Template = None,
    model: Model = DEFAULT_MODEL,
    as_json: AsJson = False,
) -> None:
    """Run one of the paper's experiments and write its records, tables and plots."""
    from radical_rerank.embedded.scenes.datasets import TESTBED
    from radical_rerank.lab.experiments.definitions import EXPERIMENTS, KEEPS
    from radical_rerank.lab.experiments.run import STUDIES, run_study
    from radical_rerank.lab.metrics import SEEDS

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
        raise unknown_name("experiment", name, sorted(about))
    rows = run_study(
        name,
        _runner(model, scorer, max_image_tokens, template),
        TESTBED,
        Path(out),
        keeps=keep or list(KEEPS),
        seeds=seeds or list(SEEDS),
        limit=limit,
        progress=bars.bar,
    )
    _show_rows(rows, name, as_json)
    log.info(f"records, tables and plots are in {Path(out) / name}")


def _runner(model: str, scorer: str | None, max_image_tokens: int | None, template: str | None) -> Any:
    from radical_rerank.backbones import Backbone
    from radical_rerank.lab.records import provenance
    from radical_rerank.lab.runner import Runner

    asked = {"scorer": scorer, "max_image_tokens": max_image_tokens, "template": template}
    options = {name: value for name, value in asked.items() if value is not None}
    return Runner(Backbone.from_pretrained(model), provenance(), options=options)


def _show_rows(rows: list[Any], title: str, as_json: bool) -> None:
    from radical_rerank.lab.tables import short_table_of

    if as_json:
        print_json([row if isinstance(row, dict) else asdict(row) for row in rows])
    elif rows and isinstance(rows[0], dict):
        lines = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
        print_table(list(rows[0]), lines, title)
    else:
        print_table(*short_table_of(rows), title)
