"""What every experiment gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radical_rerank.lab.experiments.definitions import Experiment, run_experiment
from radical_rerank.lab.records import Cell, Records, RunFolder
from radical_rerank.lab.runner import Runner
from radical_rerank.lab.testbed import Testbed
from radical_rerank.progress import Progress


@dataclass(frozen=True)
class Setup:
    """The model, the data, the folder and the size of an experiment.

    Args:
        runner: the model and its options
        testbed: the data
        folder: where records, tables and plots are written
        command: the command line that repeats the experiment
        keeps: the budgets
        seeds: the seeds
        limit: queries per setting
        progress: shows the progress
    """

    runner: Runner
    testbed: Testbed
    folder: RunFolder
    command: str
    keeps: Sequence[float]
    seeds: Sequence[int]
    limit: int
    progress: Progress

    def run(self, experiment: Experiment, records: Records) -> list[Cell]:
        """Run an experiment on the testbed's lists, except where a record exists. Returns all settings."""
        return run_experiment(
            experiment,
            self.runner,
            records,
            keeps=self.keeps,
            seeds=self.seeds,
            limit=self.limit,
            data=self.testbed.lists,
            progress=self.progress,
        )
