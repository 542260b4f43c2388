"""`radical eval`, `datasets`, `experiment`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from radical_rerank import progress as bars
from radical_rerank.cli.common import AsJson, Scorer, log, print_json, print_table
from radical_rerank.errors import unknown_name
from radical_rerank.lab.paper import CANDIDATES, KEEPS, SEED, SEEDS
from radical_rerank.reranking.encoding import MAX_IMAGE_TOKENS

if TYPE_CHECKING:
    from radical_rerank.lab.datasets import Dataset
    from radical_rerank.lab.on_ray import EvaluationJob
    from radical_rerank.lab.records import Cell
    from radical_rerank.lab.runner import Pools, Runner
    from radical_rerank.lab.testbed import Testbed

app = typer.Typer()

PAPER_SEEDS = " ".join(map(str, SEEDS))
PaperKeeps = Annotated[
    list[float] | None,
    typer.Option("--keep", help=f"Budgets; by default {' '.join(map(str, KEEPS))}."),
]
Template = Annotated[
    str | None, typer.Option(help="A prompt template: the name of a model family, or a JSON file.")
]
Model = Annotated[
    str | None, typer.Option(help="A model id or a folder; by default the model of the testbed.")
]
Data = Annotated[str | None, typer.Option(help="The folder of Flickr8k, for photographs.")]
Tokens = Annotated[
    int | None, typer.Option(min=1, help=f"Maximum visual tokens per image; default {MAX_IMAGE_TOKENS}.")
]


@app.command("eval")
def evaluate(
    out: Annotated[str, typer.Option(help="Output folder. An interrupted run there continues.")],
    dataset: Annotated[
        str, typer.Option(help="A data set, see `radical datasets`, or a file of your own lists, FILE.jsonl.")
    ] = "scenes",
    methods: Annotated[list[str] | None, typer.Option(help="Methods, see `radical methods`.")] = None,
    keep: PaperKeeps = None,
    seeds: Annotated[
        list[int] | None,
        typer.Option(help=f"Seeds that shuffle the candidates; default {SEED}. The paper's: {PAPER_SEEDS}."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N queries.")] = None,
    annotations: Annotated[str | None, typer.Option(help="The data set's annotation file.")] = None,
    images: Annotated[str | None, typer.Option(help="The folder of its pictures.")] = None,
    split: Annotated[str, typer.Option(help="Its split, or its file of ids.")] = "test",
    expert: Annotated[
        str | None, typer.Option(help="Flickr8k's expert judgements, for graded relevance.")
    ] = None,
    crowd: Annotated[str | None, typer.Option(help="Flickr8k's crowd judgements.")] = None,
    captions: Annotated[
        str | None,
        typer.Option(
            help="Which captions of a picture are queries: first (default, as in the paper), all, or random."
        ),
    ] = None,
    caption_seed: Annotated[int, typer.Option(help="Seed of --captions random.")] = SEED,
    scorer: Scorer = None,
    max_image_tokens: Tokens = None,
    template: Template = None,
    pool: Annotated[str | None, typer.Option(help="Candidates, as a TREC run file.")] = None,
    embedder: Annotated[
        str | None, typer.Option(help="A first stage: scenes, siglip2, jina, qwen or a model id.")
    ] = None,
    depth: Annotated[int, typer.Option(min=2, help="Candidates per query.")] = CANDIDATES,
    ray: Annotated[str | None, typer.Option(help="Run on Ray: local, or the address of a cluster.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Workers on Ray.")] = 2,
    data_folder: Annotated[
        str | None, typer.Option("--data", help="The folder of Flickr8k, for photos and photos-gallery.")
    ] = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate methods on a data set. Writes one record per query and method, and a table."""
    from radical_rerank.backbones import DEFAULT_MODEL
    from radical_rerank.lab.catalog import LISTS, open_dataset
    from radical_rerank.lab.experiments.definitions import Experiment, compared, run_experiment, seeded
    from radical_rerank.lab.first_stage import pools_of
    from radical_rerank.lab.records import RunFolder
    from radical_rerank.lab.tables import summarize, write_tables

    own = dataset.endswith(LISTS)
    testbed = _testbed("photos" if "photos" in (dataset, model) and not own else dataset, data_folder)
    model = model or (DEFAULT_MODEL if own else testbed.name)
    names, keeps, seeds = methods or ["dense", "radical"], keep or list(KEEPS), seeds or [SEED]
    plan = Experiment(dataset, lambda budgets: compared(names, budgets))
    cells = seeded(plan.cells(keeps), seeds)  # checks the methods before anything is loaded
    opened = partial(
        open_dataset,
        dataset,
        testbed=testbed,
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
        pools = pools_of(data, runner.backbone, pool, depth, path, testbed=testbed, embedder=embedder)
        records = folder.records()
        if ray is not None and _is_incomplete(runner, data, pools, cells, records, count):
            from radical_rerank.lab.on_ray import run_on_ray

            run_on_ray(ray, _job(model, opened, cells, runner, pools), records, count, workers=workers)
        run_experiment(
            plan, runner, records, keeps=keeps, seeds=seeds, limit=count, data=data, pools=pools,
            progress=bars.bar,
        )  # fmt: skip
        rows = summarize(records.claimed())
        note = f"Scorer {runner.plain.scorer}, at most {runner.plain.max_image_tokens} tokens an image."
        write_tables(folder.path, "table", f"{dataset}, {model}", rows, note)
        _show_rows(rows, dataset, as_json)


def _is_incomplete(
    runner: Runner, data: Dataset, pools: Pools | None, cells: Sequence[Cell], records: Any, count: int
) -> bool:
    """Return whether a record of the first `count` queries is missing."""
    from radical_rerank.lab.runner import work_of

    return any(runner.missing(work_of(data, number, pools), cells, records) for number in range(count))


def _job(
    model: str, opened: Callable[[], Dataset], cells: Sequence[Cell], runner: Runner, pools: Pools | None
) -> EvaluationJob:
    """Return what Ray's workers need to make the same records as this runner."""
    from radical_rerank.lab.on_ray import EvaluationJob

    return EvaluationJob(
        model,
        opened,
        cells,
        runner.provenance,
        pools,
        # The template itself: its file may not exist on the workers' machines.
        options={**runner.options, "template": runner.plain.template},
        profile=runner.known_profile,
        dtype=runner.backbone.dtype,
        fingerprint=runner.backbone.fingerprint,
    )


@app.command()
def datasets(as_json: AsJson = False) -> None:
    """List the data sets and the files that they need."""
    from radical_rerank.embedded.photos.datasets import ABOUT
    from radical_rerank.embedded.scenes.datasets import TESTBED
    from radical_rerank.lab.catalog import FILES

    _show_names({**TESTBED.about, **ABOUT, **FILES}, "what it is, and what it needs", as_json)


@app.command()
def experiment(
    name: Annotated[
        str, typer.Argument(help="An experiment of the paper. Without a name, all are listed.")
    ] = "",
    out: Annotated[
        str, typer.Option(help="Folder for records, tables and plots. An interrupted run there continues.")
    ] = "results",
    keep: PaperKeeps = None,
    seeds: Annotated[
        list[int] | None,
        typer.Option(help=f"Seeds that shuffle the candidates; by default the paper's: {PAPER_SEEDS}."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Queries per setting.")] = 500,
    scorer: Scorer = None,
    max_image_tokens: Tokens = None,
    template: Template = None,
    testbed: Annotated[
        str, typer.Option(help="scenes or photos: the data, and the model by default.")
    ] = "scenes",
    data: Data = None,
    pools: Annotated[
        bool, typer.Option("--pools", help="Candidates that the first stage finds, not random ones.")
    ] = False,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Run one of the paper's experiments. Writes its records, tables and plots."""
    from radical_rerank.lab.experiments.definitions import EXPERIMENTS
    from radical_rerank.lab.experiments.run import STUDIES, run_study

    about = {key: plan.about for key, plan in EXPERIMENTS.items()}
    about |= {key: study.about for key, study in STUDIES.items()}
    if not name:
        _show_names(about, "what it shows", as_json)
        return
    if name not in about:
        raise unknown_name("experiment", name, sorted(about))
    if testbed not in ("scenes", "photos"):
        raise unknown_name("testbed", testbed, ["scenes", "photos"])
    bed = _testbed(testbed, data)
    rows = run_study(
        name,
        _runner(model or testbed, scorer, max_image_tokens, template),
        bed.with_pools() if pools else bed,
        Path(out),
        keeps=keep or list(KEEPS),
        seeds=seeds or list(SEEDS),
        limit=limit,
        progress=bars.bar,
    )
    _show_rows(rows, name, as_json)
    log.info("records, tables and plots are in %s", Path(out) / name)


def _testbed(dataset: str, folder: str | None) -> Testbed:
    """Return the testbed that a data set belongs to; scenes for data sets from files."""
    if not dataset.startswith("photos") or dataset.endswith(".jsonl"):
        from radical_rerank.embedded.scenes.datasets import TESTBED

        return TESTBED
    from radical_rerank.embedded.photos.datasets import testbed

    return testbed(folder)


def _runner(model: str, scorer: str | None, max_image_tokens: int | None, template: str | None) -> Runner:
    from radical_rerank.backbones import Backbone
    from radical_rerank.lab.records import provenance
    from radical_rerank.lab.runner import Runner

    given = {"scorer": scorer, "max_image_tokens": max_image_tokens, "template": template}
    options = {name: value for name, value in given.items() if value is not None}
    return Runner(Backbone.from_pretrained(model), provenance(), options=options)


def _show_names(about: dict[str, str], head: str, as_json: bool) -> None:
    if as_json:
        print_json([{"name": name, "about": text} for name, text in about.items()])
    else:
        print_table(("name", head), about.items())


def _show_rows(rows: Sequence[Any], title: str, as_json: bool) -> None:
    from radical_rerank.lab.tables import short_table_of

    if as_json:
        print_json([row if isinstance(row, dict) else asdict(row) for row in rows])
    elif rows and isinstance(rows[0], dict):
        lines = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
        print_table(list(rows[0]), lines, title)
    else:
        print_table(*short_table_of(rows), title)
