"""Runs an experiment and presents it: records, then tables and plots made from the records alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from radical_rerank.evaluation.experiments import EXPERIMENTS, KEEPS, run_experiment
from radical_rerank.evaluation.metrics import SEEDS
from radical_rerank.evaluation.records import RunFolder
from radical_rerank.evaluation.runner import Runner, Track
from radical_rerank.files import EMBEDDED
from radical_rerank.report import studies
from radical_rerank.report.plots import bars, curves, pareto
from radical_rerank.report.tables import published, summarize, write_tables


@dataclass(frozen=True)
class Study:
    """An experiment that is more than a list of settings."""

    about: str
    run: Callable[..., list[Any]]


STUDIES: dict[str, Study] = {
    "similarity": Study("how alike the candidates are, in quintiles", studies.similarity),
    "retrievers": Study("three first stages and what their pools share", studies.retrievers),
    "composed": Study("a reference picture and a change in words", studies.composed),
    "transfer": Study("questions about single pictures, without uniqueness", studies.transfer),
    "diagnose": Study("reliability z_l and entropy, layer by layer", studies.diagnosis),
    "cases": Study("which tokens each method keeps, as pictures", studies.cases),
}


def run_study(
    name: str,
    runner: Runner,
    out: Path,
    *,
    keeps: Sequence[float],
    seeds: Sequence[int],
    limit: int,
    track: Track,
) -> list[Any]:
    """Everything goes to `out / name`."""
    with RunFolder(out / name, runner.say) as folder:
        command = command_of(name, runner, keeps=keeps, seeds=seeds, limit=limit)
        run = STUDIES[name].run if name in STUDIES else partial(_run, name)
        return run(runner, folder, command, keeps=keeps, seeds=seeds, limit=limit, track=track)


def command_of(name: str, runner: Runner, *, keeps: Sequence[float], seeds: Sequence[int], limit: int) -> str:
    """What makes the same table again."""
    parts = [f"radical experiment {name} --limit {limit}"]
    if tuple(keeps) != KEEPS:
        parts.append(f"--keep {' '.join(f'{keep:g}' for keep in keeps)}")
    if tuple(seeds) != SEEDS:
        parts.append(f"--seeds {' '.join(map(str, seeds))}")
    parts += [f"--{option.replace('_', '-')} {value}" for option, value in runner.options.items()]
    return " ".join(parts) + (f" --model {runner.backbone.name}" if runner.backbone.name != EMBEDDED else "")


def _run(
    name: str,
    runner: Runner,
    folder: RunFolder,
    command: str,
    *,
    keeps: Sequence[float],
    seeds: Sequence[int],
    limit: int,
    track: Track,
) -> list[Any]:
    """An experiment that is a list of settings."""
    experiment, records = EXPERIMENTS[name], folder.records()
    run_experiment(experiment, runner, records, keeps=keeps, seeds=seeds, limit=limit, track=track)
    # Settings that do not name their budget were published at 20%.
    rows = summarize(records.claimed(), published(name) if 0.2 in keeps else None)
    note = (
        f"`{command}` on {runner.backbone.name}. Quality in percent. p: paired randomisation tests over "
        "lists. The column `paper`, where there is one, is the paper's MRR@10 on its own model and data."
    )
    title = experiment.about
    if tuple(keeps) != KEEPS and len({row.keep for row in rows if row.method != "dense"}) == 1:
        title += f", {keeps[0]:.0%} kept"
    write_tables(folder.path, name, title, rows, note)
    picture = folder.path / f"{name}.png"
    if name == "pareto":
        pareto(picture, rows, title)
    elif experiment.axis and any(experiment.axis in {**r.data, **r.options} for r in rows):
        curves(picture, rows, experiment.axis, title)
    else:
        bars(picture, rows, title)
    return rows
