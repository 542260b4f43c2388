"""The command line. Tables for people, `--json` for programs; errors in one line on stderr, exit code 2."""

from __future__ import annotations

import sys
import warnings

import typer

from radical_rerank.cli import bench, evaluation, ranking, scenes, serve
from radical_rerank.cli.common import say
from radical_rerank.errors import RadicalError

app = typer.Typer(
    help="Listwise image reranking with vision-language models, at a fraction of their visual tokens.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(ranking.app)
app.add_typer(evaluation.app)
app.add_typer(serve.app)
app.add_typer(scenes.app, name="scenes")
app.add_typer(bench.app, name="bench")


SEVERAL = ("--keep", "--seeds", "--methods", "--counts", "--scorers")


def spread(arguments: list[str]) -> list[str]:
    """`--keep 0.2 0.1` as `--keep 0.2 --keep 0.1`: options of several values take them in a row."""
    if not arguments or arguments[0] not in ("eval", "experiment", "bench"):
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


def main(arguments: list[str] | None = None) -> None:
    if not sys.stderr.isatty():  # loading bars are for people
        from transformers.utils import logging

        logging.disable_progress_bar()
    arguments = spread(sys.argv[1:] if arguments is None else arguments)
    warnings.showwarning = lambda message, *_: say(f"note: {message}")
    try:
        app(arguments)
    except RadicalError as error:
        say(f"error: {error}")
        sys.exit(2)
