"""The paper's protocol and its published figures."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

MODEL = "Qwen/Qwen3-VL-4B-Instruct"
"""the paper's main model"""
CANDIDATES = 20
"""candidates per query"""
COUNTS = (5, 10, 20, 50)
"""numbers of candidates in experiments that vary them"""
KEEPS = (0.2, 0.1)
"""budgets: the fraction of visual tokens alive at the end"""
SEEDS = (42, 123, 456, 789, 1024)
"""seeds; each one shuffles the candidates"""
SEED = SEEDS[0]
"""the seed where there is only one"""


def published(experiment: str, dataset: str = "Flickr30K") -> dict[str, Any]:
    """Return the paper's MRR@10 by setting, on the paper's own model and data.

    Args:
        experiment: the name of an experiment, such as "main"
        dataset: the paper's data set

    Returns:
        MRR@10 in percent by the name of the setting. It is empty if nothing was published.

    Example:
        >>> published("main")["Dense"]
        84.04
    """
    file = resources.files("radical_rerank.lab.experiments") / "published.json"
    figures: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")).get(experiment, {})
    return figures.get(dataset, {})
