"""The `radical` command: its start, and `rank`, `calibrate`, `check`, `methods`, `demo`.

Tables are for people, `--json` is for programs. Errors are one line on stderr, with exit code 2.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radical_rerank import progress as bars
from radical_rerank.cli import bench, lab, photos, plan, scenes, search, serve
from radical_rerank.cli.common import (
    Agreement,
    AsJson,
    Device,
    Dtype,
    Flops,
    Keeps,
    Latency,
    ModelKwargs,
    ModelPreset,
    Permutations,
    Scorer,
    Speedup,
    log,
    print_json,
    print_table,
)
from radical_rerank.cli.scores import KEEPS, calibrate_scores
from radical_rerank.embedded import DEFAULT_MODEL
from radical_rerank.errors import InputError, RadicalError
from radical_rerank.reranking.calibration import CALIBRATION_CANDIDATES
from radical_rerank.reranking.encoding import MAX_IMAGE_TOKENS, with_page

if TYPE_CHECKING:
    from radical_rerank.reranking import CheckReport

app = typer.Typer(
    help="Listwise image reranking with vision-language models, at a fraction of their visual tokens.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


class StderrHandler(logging.Handler):
    """Prints the package's messages as plain lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        Console(stderr=True, highlight=False, soft_wrap=True).print(escape(record.getMessage()))


SEVERAL = ("--keep", "--flops", "--seeds", "--methods", "--counts", "--scorers")
"""options that take several values in a row"""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    if not sys.stderr.isatty():  # loading bars are for people
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
    log.handlers = [StderrHandler()]
    log.setLevel("INFO")
    warnings.showwarning = lambda message, *_: log.warning("warning: %s", message)
    try:
        app(spread(sys.argv[1:] if arguments is None else arguments))
    except RadicalError as error:
        log.error("error: %s", error)
        sys.exit(2)


def spread(arguments: list[str]) -> list[str]:
    """Turn `--keep 0.2 0.1` into `--keep 0.2 --keep 0.1`, which typer understands."""
    if not arguments or arguments[0] not in ("eval", "experiment", "bench", "calibrate", "tune"):
        return arguments
    result: list[str] = []
    option = ""
    for argument in arguments:
        if argument.startswith("--"):
            option = argument if argument in SEVERAL else ""
        elif option and result[-1] != option:
            result.append(option)
        result.append(argument)
    return result


@app.command()
def rank(
    query: Annotated[str, typer.Argument(help="What to look for, in words.")],
    documents: Annotated[
        list[str],
        typer.Argument(
            help="The candidates: image files, PDF files (each page is one), or texts of several words.",
            metavar="DOCUMENT...",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(help="A model id or a folder; by default the small model of photographs that ships."),
    ] = DEFAULT_MODEL,
    method: Annotated[str, typer.Option(help="A name from `radical methods`.")] = "radical",
    keep: Annotated[
        float | None,
        typer.Option(help="The fraction of visual tokens to keep.", show_default="0.2"),
    ] = None,
    speedup: Speedup = None,
    flops: Flops = None,
    latency: Latency = None,
    agreement: Agreement = None,
    top_k: Annotated[int | None, typer.Option(help="Show only the best K.")] = None,
    reference: Annotated[str | None, typer.Option(help="An image that the query changes.")] = None,
    query_image: Annotated[
        list[str] | None, typer.Option(help="A picture that is a part of the query; may be repeated.")
    ] = None,
    instruction: Annotated[
        str | None, typer.Option(help="What to look for, for models that take an instruction.")
    ] = None,
    text: Annotated[
        bool | None,
        typer.Option(
            "--text/--no-text",
            help="Whether the text of a PDF's page goes along with its picture.",
            show_default="if the model reads texts",
        ),
    ] = None,
    scorer: Scorer = None,
    preset: ModelPreset = None,
    template: Annotated[str | None, typer.Option(help="A prompt template, a JSON file.")] = None,
    max_image_tokens: Annotated[
        int | None,
        typer.Option(
            help="Larger images are scaled down to this.", show_default=f"{MAX_IMAGE_TOKENS}, or the preset's"
        ),
    ] = None,
    min_probability: Annotated[
        float | None, typer.Option(help="Leave out results below this probability.")
    ] = None,
    permutations: Permutations = None,
    on_error: Annotated[
        str, typer.Option(help="raise or skip: what to do with an unreadable image.")
    ] = "raise",
    device: Device = None,
    dtype: Dtype = None,
    model_kwargs: ModelKwargs = None,
    as_json: AsJson = False,
) -> None:
    """Rank pictures, pages and texts by how well they match a query."""
    from radical_rerank.reranking import Query, Reranker

    orders = _orders(permutations)
    if on_error == "raise":  # before a large model is loaded for nothing
        _check_exist([*documents, *(query_image or ()), *([reference] if reference else [])])
    reranker = Reranker(
        model,
        method,
        keep=keep,
        speedup=speedup,
        flops=flops,
        latency=latency,
        agreement=agreement,
        scorer=scorer,
        preset=preset or "auto",
        template=template,
        max_image_tokens=max_image_tokens,
        page_text=text,
        permutations=orders,
        device=device,
        dtype=dtype,
        model_kwargs=model_kwargs,
    )
    ranking = reranker.rank(
        Query(query, reference, query_image or (), instruction),
        documents,
        top_k=top_k,
        on_error=on_error,  # type: ignore[arg-type]
        min_probability=min_probability,
    )
    for skipped in ranking.skipped:
        log.info("skipped: %s", skipped.reason)
    if text is None and not reranker.page_text and any(result.page for result in ranking):
        log.info("%s reads no texts: pages are ranked by their pictures alone", model)
    for cut in ranking.cut:
        log.info("cut: the text of %s from %d to %d tokens", cut.name, cut.tokens, cut.kept)
    if as_json:
        print_json(ranking.to_dict())
        return
    table = Table("rank", "score", "probability", title=escape(ranking.query), title_justify="left")
    table.add_column("document", overflow="fold")
    for place, result in enumerate(ranking, start=1):
        shown = escape(with_page(str(result.document), result.page))
        table.add_row(str(place), f"{result.score:.3f}", f"{result.probability:.3f}", shown)
    console = Console()
    console.print(table)
    if min_probability is not None and not ranking.results:
        console.print(f"nothing fits: the best has a probability of {ranking.confidence:.3f}")
    if ranking.repairs:
        console.print(f"the generated order needed {ranking.repairs} corrections")
    totals = ranking.totals
    if totals.prompts:
        prompts = f"{totals.prompts} prompts, " if totals.prompts > 1 else ""
        console.print(
            f"{prompts}{totals.visual_tokens} visual tokens, {totals.visual_tokens_left} at the end; "
            f"{totals.flops_saved:.0%} of the decoder's FLOPs and {totals.kv_saved:.0%} of its KV cache "
            f"saved; {sum(totals.seconds.values()):.2f} s"
        )
    if agreement is not None:
        console.print(f"promised: the same best document in {agreement:.1%} of lists like the tuning's")


def _orders(permutations: str | None) -> int | Literal["auto"]:
    """Return --permutations as the Reranker takes it."""
    if permutations == "auto":
        return "auto"
    try:
        return int(permutations or 1)
    except ValueError:
        raise InputError(f"--permutations must be a number or auto, not {permutations!r}") from None


def _check_exist(documents: Iterable[str]) -> None:
    """Raise an InputError if a file does not exist. Several words are a text."""
    for document in documents:
        if len(document.split()) < 2 and not Path(document).exists():
            raise InputError(f"{document} does not exist")


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
    num_stages: Annotated[int, typer.Option(help="K: the stages of the schedule that is shown.")] = 4,
    gap: Annotated[int, typer.Option(help="g: the least distance between its layers.")] = 2,
    scores: Annotated[
        str | None,
        typer.Option(
            help="Fit the probabilities of results instead, on scenes, photos, scenes-gallery, "
            "photos-gallery, or a file of your own lists, FILE.jsonl."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=4, help="With --scores, how many lists.")] = 400,
    keep: Keeps = None,
    data: Annotated[str | None, typer.Option(help="With --scores photos, the folder of Flickr8k.")] = None,
    plot: Annotated[str | None, typer.Option(help="With --scores, a file for a reliability diagram.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    model_kwargs: ModelKwargs = None,
    as_json: AsJson = False,
) -> None:
    """Measure how concentrated a model's attention is, layer by layer, and keep it as its trust profile.

    With --scores, fit the probabilities of its results, and keep them in that profile.
    """
    if scores is not None:
        calibrate_scores(
            model,
            scores,
            limit=limit,
            keeps=keep or KEEPS,
            data=data,
            out=out,
            plot=plot,
            loading={"device": device, "dtype": dtype, "model_kwargs": model_kwargs},
            as_json=as_json,
        )
        return
    from radical_rerank.backbones import Backbone
    from radical_rerank.method import alpha_maximin
    from radical_rerank.pruning import Profile
    from radical_rerank.reranking import calibrate as measure

    wanted = list(_read_lists(Path(lists))) if lists else None
    backbone = Backbone.from_pretrained(model, device=device, dtype=dtype, model_kwargs=model_kwargs)
    known = Profile.find(backbone.identity)
    profile = measure(backbone, wanted, progress=bars.bar)
    if known is not None:
        # The schedules stay. What they promise does not: it was counted with the trust of before.
        profile = replace(profile, scores=known.scores, schedules=known.schedules)
        if known.safety:
            log.warning("make the promise of --agreement again: radical tune %s --promise-only", model)
    path = profile.save(out or Profile.cache_path(backbone.identity))
    schedule = alpha_maximin(profile.layers, profile.alpha, num_stages, gap=gap)
    log.info("saved to %s", path)
    if as_json:
        print_json(json.loads(path.read_text(encoding="utf-8")) | {"schedule": schedule})
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
def tune(
    model: Annotated[str, typer.Argument(help="A model id, a folder, or scenes or photos.")] = "scenes",
    lists: Annotated[
        str | None,
        typer.Option(help="Lists of your own, FILE.jsonl, no labels needed; by default generated ones."),
    ] = None,
    limit: Annotated[int, typer.Option(min=2, help="Lists to compare schedules on.")] = 48,
    promise: Annotated[
        int, typer.Option(min=0, help="Lists for the promise of --agreement; 0: make none.")
    ] = 1000,
    flops: Annotated[
        list[float] | None,
        typer.Option(help="Tune for these parts of Dense's arithmetic alone; other schedules stay."),
    ] = None,
    promise_only: Annotated[
        bool, typer.Option("--promise-only", help="Keep all schedules and make only the promise again.")
    ] = False,
    data: Annotated[str | None, typer.Option(help="For photos, the folder of Flickr8k.")] = None,
    out: Annotated[
        str | None, typer.Option(help="Where to write the profile; by default your cache.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    model_kwargs: ModelKwargs = None,
    as_json: AsJson = False,
) -> None:
    """Find the schedules that keep a model's own order best at each cost, without labels."""
    from radical_rerank.cli.tune import tune_model

    tune_model(
        model,
        lists,
        limit=limit,
        promise=promise,
        budgets=flops,
        promise_only=promise_only,
        data=data,
        out=out,
        loading={"device": device, "dtype": dtype, "model_kwargs": model_kwargs},
        as_json=as_json,
    )


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="A model id or a folder.")],
    keep: Annotated[float, typer.Option(help="The fraction of visual tokens to keep.")] = 0.2,
    lists: Annotated[int, typer.Option(min=1, help="How many generated lists are ranked and timed.")] = 3,
    candidates: Annotated[int, typer.Option(min=2, help="Images per list.")] = CALIBRATION_CANDIDATES,
    device: Device = None,
    dtype: Dtype = None,
    model_kwargs: ModelKwargs = None,
    as_json: AsJson = False,
) -> None:
    """Check that a model is pruned correctly here, and time it. The exit code is 1 if a check fails.

    The JSON is what a bug report needs.
    """
    from radical_rerank.backbones import Backbone
    from radical_rerank.pruning import Profile
    from radical_rerank.reranking import check_model

    backbone = Backbone.from_pretrained(model, device=device, dtype=dtype, model_kwargs=model_kwargs)
    report = check_model(backbone, keep=keep, lists=lists, candidates=candidates, progress=bars.bar)
    known = Profile.find(backbone.identity)
    if report.passed and report.profile is not None and known is None:  # so that no ranking measures it again
        log.info("saved the trust profile to %s", report.profile.save(Profile.cache_path(backbone.identity)))
    if as_json:
        print_json(report.to_dict())
    else:
        _print_report(report)
    if not report.passed:
        raise typer.Exit(1)


def _print_report(report: CheckReport) -> None:
    console = Console(highlight=False)
    table = Table("check", "compared", "difference", "tolerance", "", title=escape(report.model))
    for one in report.checks:
        measured = "–" if one.difference is None else f"{one.difference:.1e}"
        table.add_row(
            one.name, one.meaning, measured, f"{one.tolerance:.0e}", "pass" if one.passed else "FAIL"
        )
    console.print(table)
    for one in report.checks:
        if one.note:
            console.print(f"{one.name}: {escape(one.note)}")
    if report.speed:
        console.print(
            "a list of {visual_tokens:.0f} visual tokens: {dense_seconds:.3f} s dense, {pruned_seconds:.3f} "
            "s pruned to {visual_tokens_left:.0f} ({speed_up:.2f}×); {flops_saved:.0%} of the decoder's "
            "FLOPs saved; the same image first in {same_first:.0%} of the lists".format(**report.speed)
        )
    console.print(", ".join(f"{name} {escape(value)}" for name, value in report.facts.items()))
    console.print("everything passed" if report.passed else "some checks failed: report them with --json")


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the token-reduction methods."""
    from radical_rerank.pruning import METHODS

    rows = {name: method.summary for name, method in METHODS.items()}
    if as_json:
        print_json([{"name": name, "summary": summary} for name, summary in rows.items()])
        return
    print_table(("name", "what it keeps"), rows.items())


@app.command()
def demo(
    out: Annotated[str, typer.Option(help="The folder to write the pages to.")] = "demo",
    queries: Annotated[int, typer.Option(min=1, help="How many queries over the scenes.")] = 8,
    size: Annotated[int, typer.Option(min=20, help="How many generated scenes there are.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """Search photographs and generated scenes and rerank the results, dense and pruned."""
    from radical_rerank.embedded.demo import run_demo

    run_demo(Path(out), queries=queries, size=size, as_json=as_json)


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


app.add_typer(search.app)
app.add_typer(lab.app)
app.add_typer(serve.app)
app.add_typer(plan.app)
app.add_typer(scenes.app, name="scenes")
app.add_typer(photos.app, name="photos")
app.add_typer(bench.app, name="bench")
