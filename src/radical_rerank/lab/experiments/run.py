"""Runs an experiment: first the records, then tables and plots that are made from the records alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radical_rerank.lab.experiments import studies
from radical_rerank.lab.experiments.costs import costs
from radical_rerank.lab.experiments.definitions import EXPERIMENTS
from radical_rerank.lab.experiments.nucleus import nucleus
from radical_rerank.lab.experiments.position import position
from radical_rerank.lab.experiments.promise import promise
from radical_rerank.lab.experiments.setup import Setup
from radical_rerank.lab.paper import KEEPS, SEEDS, published
from radical_rerank.lab.plots import bars, curves, pareto
from radical_rerank.lab.records import RunFolder
from radical_rerank.lab.runner import Runner
from radical_rerank.lab.tables import summarize, write_tables
from radical_rerank.lab.testbed import Testbed
from radical_rerank.progress import Progress, silent


@dataclass(frozen=True)
class Study:
    """An experiment that is more than a list of settings.

    Args:
        about: what it shows
        run: runs it and returns the rows of its table
    """

    about: str
    run: Callable[[Setup], list[Any]]


STUDIES: dict[str, Study] = {
    "similarity": Study("how alike the candidates are, in quintiles", studies.similarity),
    "retrievers": Study("three first stages and what their pools share", studies.retrievers),
    "composed": Study("a reference picture and a change in words", studies.composed),
    "transfer": Study("questions about single pictures, without uniqueness", studies.transfer),
    "diagnose": Study("reliability z_l and entropy, layer by layer", studies.diagnosis),
    "position": Study("the slot of the match, with one order of the candidates and several", position),
    "costs": Study("all methods at the same arithmetic: half of it down to a tenth, or --keep", costs),
    "nucleus": Study("a share of the score instead of a number of tokens", nucleus),
    "promise": Study("a promise about the best document, on fresh lists", promise),
    "cases": Study("which tokens each method keeps, as pictures", studies.cases),
}
"""the experiments that are more than a list of settings, by name"""


def run_study(
    name: str,
    runner: Runner,
    testbed: Testbed,
    out: Path,
    *,
    keeps: Sequence[float],
    seeds: Sequence[int],
    limit: int,
    progress: Progress = silent,
) -> list[Any]:
    """Run an experiment and write its records, tables and plots to `out / name`.

    Records that exist already are not computed again: a run that was interrupted continues, and a ranking
    that another experiment in `out` made is taken over.

    Args:
        name: a name from `EXPERIMENTS` or `STUDIES`
        runner: the model and its options
        testbed: the data
        out: the parent folder
        keeps: the budgets
        seeds: the seeds; each one shuffles the candidates
        limit: queries per setting
        progress: shows the progress

    Returns:
        The rows of the table: `TableRow`s, or dicts if its rows are not settings.
    """
    with RunFolder(out / name, share=True) as folder:
        command = command_of(name, runner, testbed, keeps=keeps, seeds=seeds, limit=limit)
        setup = Setup(runner, testbed, folder, command, keeps, seeds, limit, progress)
        return STUDIES[name].run(setup) if name in STUDIES else _run(name, setup)


def command_of(
    name: str, runner: Runner, testbed: Testbed, *, keeps: Sequence[float], seeds: Sequence[int], limit: int
) -> str:
    """Return the command line that repeats an experiment."""
    parts = [f"radical experiment {name} --limit {limit}"]
    if testbed.name != "scenes":
        parts.append(f"--testbed {testbed.name} --data DIR")
    if testbed.pooled:
        parts.append("--pools")
    if tuple(keeps) != KEEPS:
        parts.append(f"--keep {' '.join(f'{keep:g}' for keep in keeps)}")
    if tuple(seeds) != SEEDS:
        parts.append(f"--seeds {' '.join(map(str, seeds))}")
    parts += [f"--{option.replace('_', '-')} {value}" for option, value in runner.options.items()]
    return " ".join(parts) + (
        f" --model {runner.backbone.name}" if runner.backbone.name != testbed.name else ""
    )


def _run(name: str, setup: Setup) -> list[Any]:
    """Run an experiment that is a list of settings, and write its table and plot."""
    experiment, records, keeps = EXPERIMENTS[name], setup.folder.records(), setup.keeps
    setup.run(experiment, records)
    # Settings that do not name their budget were published at 20%.
    rows = summarize(records.claimed(), published(name) if 0.2 in keeps else None)
    note = (
        f"`{setup.command}` on {setup.runner.backbone.name}. Quality in percent. p: paired randomisation "
        "tests over lists. The column `paper`, if any, is the paper's MRR@10 on its own model and data."
    )
    title = experiment.about
    if tuple(keeps) != KEEPS and len({row.keep for row in rows if row.method != "dense"}) == 1:
        title += f", {keeps[0]:.0%} kept"
    write_tables(setup.folder.path, name, title, rows, note)
    picture = setup.folder.path / f"{name}.png"
    if name == "pareto":
        pareto(picture, rows, title)
    elif experiment.axis and any(experiment.axis in {**r.data, **r.options} for r in rows):
        curves(picture, rows, experiment.axis, title)
    else:
        bars(picture, rows, title)
    return rows
