"""The command line: `radical rank`, `calibrate`, `methods`, `demo`, `scenes train`, `scenes evaluate`.

Tables for people, `--json` for programs; errors go to stderr in one line, with exit code 2.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radical_rerank.errors import InputError, RadicalError
from radical_rerank.files import EMBEDDED

app = typer.Typer(
    help="Listwise image reranking with vision-language models, at a fraction of their visual tokens.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

scenes_app = typer.Typer(help="The embedded world.", no_args_is_help=True)
app.add_typer(scenes_app, name="scenes")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, …; by default the accelerator if there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, …; by default what suits the device.")]


@app.command()
def rank(
    query: Annotated[str, typer.Argument(help="What to look for, in words.")],
    images: Annotated[list[str], typer.Argument(help="Image files, the candidates.", metavar="IMAGE...")],
    model: Annotated[
        str, typer.Option(help="A model id or a folder; by default the small model of scenes that ships.")
    ] = EMBEDDED,
    method: Annotated[str, typer.Option(help="A name from `radical methods`.")] = "radical",
    keep: Annotated[float, typer.Option(help="The fraction of visual tokens that is kept.")] = 0.2,
    top_k: Annotated[int | None, typer.Option(help="Show only the best so many.")] = None,
    reference: Annotated[str | None, typer.Option(help="An image that the query changes.")] = None,
    scorer: Annotated[str, typer.Option(help="logits or generate.")] = "logits",
    template: Annotated[str | None, typer.Option(help="A prompt template, a JSON file.")] = None,
    max_image_tokens: Annotated[int, typer.Option(help="Larger images are scaled down to this.")] = 384,
    on_error: Annotated[
        str, typer.Option(help="raise or skip: what to do with an unreadable image.")
    ] = "raise",
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Put images in the order in which they match a query."""
    from radical_rerank.pruning import build
    from radical_rerank.reranking import Reranker

    pruner = build(method, keep=keep)
    missing = [image for image in [*images, *([reference] if reference else [])] if not Path(image).exists()]
    if missing and on_error == "raise":  # before a large model is loaded in vain
        raise InputError(f"{missing[0]} does not exist")
    reranker = Reranker.from_pretrained(
        model,
        pruner,
        scorer=scorer,
        template=template,
        max_image_tokens=max_image_tokens,
        device=device,
        dtype=dtype,
        say=_say,
    )
    ranking = reranker.rank(query, images, top_k=top_k, reference=reference, on_error=on_error)  # type: ignore[arg-type]
    for skipped in ranking.skipped:
        _say(f"skipped: {skipped.reason}")
    if as_json:
        results = [
            {"rank": place, "index": result.index, "score": result.score, "image": str(result.document)}
            for place, result in enumerate(ranking, start=1)
        ]
        _print_json(
            {
                "query": query,
                "model": model,
                "method": method,
                "results": results,
                "skipped": [{"index": s.index, "reason": s.reason} for s in ranking.skipped],
                "repairs": ranking.repairs,
                "pruning": [report.to_dict() for report in ranking.reports],
            }
        )
        return
    table = Table("rank", "score", title=escape(query), title_justify="left")
    table.add_column("image", overflow="fold")
    for place, result in enumerate(ranking, start=1):
        table.add_row(str(place), f"{result.score:.3f}", escape(str(result.document)))
    console = Console()
    console.print(table)
    if ranking.repairs:
        console.print(f"the written order had to be mended {ranking.repairs} times")
    report = ranking.report
    if report is not None:
        seconds = sum(sum(r.seconds.values()) for r in ranking.reports)
        console.print(
            f"{report.visual_tokens} visual tokens, {report.visual_tokens_left} at the end; "
            f"{report.flops_saved:.0%} of the decoder's FLOPs and {report.kv_saved:.0%} of its KV cache "
            f"saved; {seconds:.2f} s"
        )


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="A model id or a folder.")],
    lists: Annotated[
        str | None,
        typer.Option(help='Your own lists, JSON lines of {"query": …, "images": [paths]}.'),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Where to write the profile; by default your cache.")
    ] = None,
    stages: Annotated[int, typer.Option(help="K: the stages of the schedule that is shown.")] = 4,
    gap: Annotated[int, typer.Option(help="g: the least distance between its layers.")] = 2,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Measure how concentrated a model's attention is, layer by layer, and keep it as its trust profile."""
    from radical_rerank.backbones import Backbone
    from radical_rerank.method import alpha_maximin
    from radical_rerank.pruning import Profile
    from radical_rerank.reranking import calibrate as measure

    wanted = list(_read_lists(Path(lists))) if lists else None
    backbone = Backbone.from_pretrained(model, device=device, dtype=dtype)
    profile = measure(backbone, wanted, say=_say)
    path = profile.save(out or Profile.cache_path(backbone.name))
    schedule = alpha_maximin(profile.layers, profile.alpha, stages, gap=gap)
    _say(f"saved to {path}")
    if as_json:
        _print_json(json.loads(path.read_text(encoding="utf-8")) | {"schedule": schedule})
        return
    table = Table(
        "layer", "H_norm", "alpha", "", title=f"{escape(model)}, {profile.lists} lists", title_justify="left"
    )
    assert profile.h_norm is not None
    for layer, h, alpha in zip(profile.layers, profile.h_norm, profile.alpha, strict=True):
        bar = "█" * round(20 * alpha) + (" ◄ prunes" if layer in schedule else "")
        table.add_row(str(layer), f"{h:.4f}", f"{alpha:.2f}", bar)
    Console().print(table)


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the token-reduction methods."""
    from radical_rerank.pruning import METHODS

    rows = {name: method.summary for name, method in METHODS.items()}
    if as_json:
        _print_json([{"name": name, "summary": summary} for name, summary in rows.items()])
        return
    table = Table("name", "what it keeps")
    for name, summary in rows.items():
        table.add_row(name, summary)
    Console().print(table)


@app.command()
def demo(
    out: Annotated[str, typer.Option(help="The folder of the page.")] = "demo",
    queries: Annotated[int, typer.Option(min=1, help="How many queries.")] = 8,
    size: Annotated[int, typer.Option(min=20, help="How many scenes the gallery has.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """Search a gallery of generated scenes and rerank what is found, unpruned and pruned."""
    from radical_rerank.demo import run_demo

    run_demo(Path(out), queries=queries, size=size, as_json=as_json)


DEFAULT_KEEPS = (0.2, 0.1)
Keeps = Annotated[list[float] | None, typer.Option("--keep", help="Budgets: --keep 0.2 0.1.")]
Seeds = Annotated[list[int] | None, typer.Option("--seeds", help="Seeds: they shuffle the candidates.")]
Model = Annotated[str, typer.Option(help="A model id or a folder; by default the embedded model.")]
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
    from radical_rerank.evaluation.experiments import Experiment, compared, run_experiment
    from radical_rerank.evaluation.open import open_dataset, pools_of
    from radical_rerank.evaluation.records import Records
    from radical_rerank.report.tables import summarize, write_tables

    names, keeps = methods or ["dense", "radical"], keep or list(DEFAULT_KEEPS)
    plan = Experiment(f"{dataset}", lambda budgets: compared(names, budgets))
    cells = plan.cells(keeps)  # an unknown method is told before anything is loaded
    opened = partial(open_dataset, dataset, lists=limit, annotations=annotations, images=images, split=split)
    data = opened()
    runner = _runner(model)
    found = Path(out) / "pool.run"
    pools = pools_of(data, runner.backbone, pool, depth, found, embedder=embedder, say=_say)
    records = Records(Path(out) / "records.jsonl")
    if ray is not None:
        from radical_rerank.evaluation.on_ray import Job, run_on_ray

        every = [replace(cell, seed=seed) for cell in cells for seed in seeds or [42]]
        job = Job(model, opened, every, runner.provenance, pools)
        run_on_ray(ray, job, records, min(limit or len(data.tasks), len(data.tasks)), workers=workers)
    run_experiment(
        plan,
        runner,
        records,
        keeps=keeps,
        seeds=seeds or [42],
        limit=limit or len(data.tasks),
        track=_track,
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
        _print_json([{"name": name, "about": about} for name, about in ABOUT.items()])
        return
    table = Table("name", "what it is, and what it needs")
    for name, about in ABOUT.items():
        table.add_row(name, about)
    Console().print(table)


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
    from radical_rerank.evaluation.experiments import EXPERIMENTS
    from radical_rerank.report.present import STUDIES, run_study

    about = {key: found.about for key, found in EXPERIMENTS.items()} | {
        key: found.about for key, found in STUDIES.items()
    }
    if not name:
        if as_json:
            _print_json([{"name": key, "about": value} for key, value in about.items()])
            return
        table = Table("name", "what it shows")
        for key, value in about.items():
            table.add_row(key, value)
        Console().print(table)
        return
    if name not in about:
        raise InputError(f"unknown experiment {name!r}; there are: {', '.join(sorted(about))}")
    rows = run_study(
        name,
        _runner(model),
        Path(out),
        keeps=keep or list(DEFAULT_KEEPS),
        seeds=seeds or [42],
        limit=limit,
        track=_track,
    )
    _show_rows(rows, name, as_json)
    _say(f"records, tables and plots are in {Path(out) / name}")


def _runner(model: str) -> Any:
    from radical_rerank.backbones import Backbone
    from radical_rerank.evaluation.records import provenance
    from radical_rerank.evaluation.runner import Runner

    return Runner(Backbone.from_pretrained(model), provenance(), say=_say)


def _track(items: Any, label: str) -> Any:
    from rich.progress import track

    return track(items, label, console=Console(stderr=True))


def _show_rows(rows: Any, title: str, as_json: bool) -> None:
    from dataclasses import asdict

    from radical_rerank.report.tables import table_of

    if as_json:
        _print_json([row if isinstance(row, dict) else asdict(row) for row in rows])
        return
    if rows and isinstance(rows[0], dict):
        table = Table(*rows[0], title=escape(title), title_justify="left")
        for row in rows:
            table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    else:
        heads, lines = table_of(rows)
        table = Table(*heads, title=escape(title), title_justify="left")
        for line in lines:
            table.add_row(*map(escape, line))
    Console().print(table)


@scenes_app.command("evaluate")
def scenes_evaluate(
    model: Annotated[str, typer.Option(help="A folder that `radical scenes train` wrote.")] = EMBEDDED,
    lists: Annotated[int, typer.Option(min=1, help="Held-out lists per figure.")] = 1000,
    out: Annotated[str | None, typer.Option(help="Keep the figures here; a killed run goes on.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the figures of the embedded model's card on held-out scenes."""
    from rich.progress import track

    from radical_rerank.backbones import Backbone
    from radical_rerank.training.evaluate import Card

    console = Console(stderr=True)
    card = Card(
        Backbone.from_pretrained(model),
        lists,
        Path(out) if out else None,
        lambda items, label: track(items, label, console=console),
    )
    figures = card.run()
    if as_json:
        _print_json(figures)
        return
    table = Table("figure", "values", title=f"{escape(model)}, {lists} lists", title_justify="left")
    for name, values in figures.items():
        table.add_row(
            name, "  ".join(f"{key} {value:.3f}".removesuffix(".000") for key, value in values.items())
        )
    Console().print(table)


@scenes_app.command("card")
def scenes_card(
    folder: Annotated[str, typer.Argument(help="A trained model with its figures.json.")],
    commit: Annotated[str, typer.Option(help="The commit at which it was trained.")],
) -> None:
    """Write a trained model's card from its figures and its training log."""
    from radical_rerank.training.card import write_card

    _say(f"wrote {write_card(folder, commit)}")


@scenes_app.command("train")
def scenes_train(
    out: Annotated[str, typer.Argument(help="The folder of the run; an unfinished one there goes on.")],
    seed: Annotated[int, typer.Option(help="Seeds the weights and all data.")] = 0,
    plan: Annotated[
        str | None, typer.Option(help="JSON file with what differs from the default plan.")
    ] = None,
) -> None:
    """Train a small listwise reranker on generated scenes, from scratch."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from radical_rerank.training.run import Plan, train

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
    Console(stderr=True).print(f"the model is in {escape(out)}")


def _read_lists(path: Path) -> Iterator[tuple[str, list[str]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            query, images = record["query"], record["images"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}, line {number}: not a list record: {error!r}") from None
        if not (isinstance(query, str) and query.strip() and isinstance(images, list) and images):
            raise InputError(f"{path}, line {number}: needs a query and a list of images")
        yield query, [str(path.parent / image) for image in images]


def _spread(arguments: list[str]) -> list[str]:
    """`--keep 0.2 0.1` as `--keep 0.2 --keep 0.1`: options of several values take them in a row."""
    if not arguments or arguments[0] not in ("eval", "experiment"):
        return arguments
    result: list[str] = []
    option = ""
    for argument in arguments:
        if argument.startswith("--"):
            option = argument if argument in ("--keep", "--seeds", "--methods") else ""
        elif option and result[-1] != option:
            result.append(option)
        result.append(argument)
    return result


def _say(line: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(escape(line))


def _print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def main(arguments: list[str] | None = None) -> None:
    if not sys.stderr.isatty():  # loading bars are for people
        from transformers.utils import logging

        logging.disable_progress_bar()
    arguments = _spread(sys.argv[1:] if arguments is None else arguments)
    warnings.showwarning = lambda message, *_: _say(f"note: {message}")
    try:
        app(arguments)
    except RadicalError as error:
        _say(f"error: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
