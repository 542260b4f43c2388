"""Runs an experiment and presents it: records, then tables and plots made from the records alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radical_rerank.evaluation.experiments import EXPERIMENTS, KEEPS, run_experiment
from radical_rerank.evaluation.records import Records
from radical_rerank.evaluation.runner import Runner, Track
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
    folder = out / name
    if name in STUDIES:
        return STUDIES[name].run(runner, folder, keeps=keeps, seeds=seeds, limit=limit, track=track)
    experiment = EXPERIMENTS[name]
    records = Records(folder / "records.jsonl")
    cells = run_experiment(experiment, runner, records, keeps=keeps, seeds=seeds, limit=limit, track=track)
    # Settings that do not name their budget were published at 20%.
    rows = summarize(records.of(cells, limit), published(name) if 0.2 in keeps else None)
    budgets = "" if tuple(keeps) == KEEPS else f" --keep {' '.join(f'{keep:g}' for keep in keeps)}"
    note = (
        f"`radical experiment {name} --limit {limit}{budgets}` on {runner.backbone.name}: {rows[0].queries} "
        f"lists per setting, {rows[0].seeds} seed(s). Quality in percent. p: paired randomisation tests over "
        "lists. The column `paper`, where there is one, is the paper's MRR@10 on its own model and data."
    )
    title = experiment.about
    if budgets and len({row.keep for row in rows if row.method != "dense"}) == 1:
        title += f", {keeps[0]:.0%} kept"
    write_tables(folder, name, title, rows, note)
    if name == "pareto":
        pareto(folder / f"{name}.png", rows, title)
    elif experiment.axis and any(experiment.axis in {**r.data, **r.options} for r in rows):
        curves(folder / f"{name}.png", rows, experiment.axis, title)
    else:
        bars(folder / f"{name}.png", rows, title)
    return rows
