"""Shared by all commands: options, messages on stderr, JSON, tables."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radical_rerank.errors import InputError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, …; by default the accelerator if there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, …; by default what suits the device.")]
ModelKwargs = Annotated[
    dict[str, Any] | None,
    typer.Option(
        parser=lambda text: _json_object(text),
        metavar="JSON",
        help='More options for loading, passed on to Hugging Face: \'{"device_map": "auto"}\'.',
    ),
]
Scorer = Annotated[
    str | None,
    typer.Option(
        help="logits: one forward pass; generate: the model writes the order; pointwise: each image alone.",
        show_default="logits, or the preset's",
    ),
]
ModelPreset = Annotated[
    str | None,
    typer.Option(
        help="How a trained reranker is asked: a name, a JSON file, or none.",
        show_default="found by the model",
    ),
]
Speedup = Annotated[float | None, typer.Option(help="Instead of --keep: how many times less arithmetic.")]
Flops = Annotated[
    float | None, typer.Option(help="Instead of --keep: the part of the unpruned decoder's arithmetic.")
]
Latency = Annotated[float | None, typer.Option(help="Instead of --keep: seconds per list.")]
Agreement = Annotated[
    float | None,
    typer.Option(
        help="Instead of --keep: how often the best document must be the same as without pruning. Needs "
        "`radical tune`."
    ),
]
Permutations = Annotated[
    str | None,
    typer.Option(
        help="Rank this many orders of the candidates and average. auto, with --flops or --speedup: a second "
        "order where the first is not sure.",
        show_default="1",
    ),
]
Keeps = Annotated[list[float] | None, typer.Option("--keep", help="Budgets: --keep 0.2 0.1.")]
# The commands of the models that ship.
RunFolder = Annotated[
    str, typer.Argument(help="The folder of the run. An unfinished run in it is continued.")
]
Seed = Annotated[int, typer.Option(help="Seeds the weights and all data.")]
FiguresFile = Annotated[
    str | None,
    typer.Option(
        help="Keep the figures in this JSON file, and the rankings in a folder beside it. If the run is "
        "stopped, the same command continues it."
    ),
]
TrainedFolder = Annotated[str, typer.Argument(help="The folder of a trained model, with its figures.json.")]
TrainedAt = Annotated[str, typer.Option(help="The commit at which it was trained.")]
Remark = Annotated[str, typer.Option(help="What else to say about the training.")]
Model = Annotated[str, typer.Option(help="A model id or a folder; by default the embedded model.")]

log = logging.getLogger("radical_rerank")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InputError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"not a JSON object: {text}")
    return value


def print_json(data: Any) -> None:
    """Print data as JSON on stdout."""
    sys.stdout.write(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def print_table(heads: Sequence[str], lines: Iterable[Sequence[str]], title: str = "") -> None:
    """Print a table on stdout."""
    table = Table(*heads, title=escape(title), title_justify="left")
    for line in lines:
        table.add_row(*map(escape, line))
    Console().print(table)


def print_figures(figures: Mapping[str, Mapping[str, float]], title: str, as_json: bool) -> None:
    """Print the figures of a model card, as a table or as JSON."""
    if as_json:
        print_json(figures)
        return
    lines = [
        (name, "  ".join(f"{key} {value:.3f}".removesuffix(".000") for key, value in values.items()))
        for name, values in figures.items()
    ]
    print_table(("figure", "values"), lines, title)
