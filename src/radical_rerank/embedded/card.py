"""Writes a trained model's card from its figures and its training log."""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

from radical_rerank.errors import InputError
from radical_rerank.files import replacing

PAUSE = 12
"""a step that took this many times as long as usual was paused"""

_COUNTS = ("lists", "questions", "queries", "pictures")
_LABELS = {
    "signals": "",
    "questions": "right answers, ",
    "first stage": "first stage, ",
    "cold list": "{pictures:.0f} photographs of 12 megapixels, nothing cached, RaDiCal 20%, two cores, ",
    "plain words": "plain words, right picture first of {pictures:.0f}, {queries:.0f} queries, ",
    "class names": "names in no caption, right picture first of {pictures:.0f}, {queries:.0f} queries, ",
}


def write_card(world: str, folder: str | Path, commit: str, remark: str = "") -> Path:
    """Write `README.md` to the folder of a trained model.

    Args:
        world: "scenes" or "photos"; its `card.md` is the template
        folder: with the model, `training_log.jsonl` and `figures.json` (see `radical scenes evaluate`)
        commit: at which the model was trained
        remark: what else to say about the training

    Returns:
        The path of the card.

    Example:
        >>> import shutil, tempfile
        >>> from radical_rerank.embedded import MODELS
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     copy = shutil.copytree(MODELS["scenes"].folder, Path(folder) / "model")
        ...     write_card("scenes", copy, "0" * 40).name
        'README.md'
    """
    folder = Path(folder)
    data = _read(folder / "figures.json")
    config = _read(folder / "config.json")["text_config"]
    figures = data["figures"]
    template = (resources.files(f"radical_rerank.embedded.{world}") / "card.md").read_text(encoding="utf-8")
    text = template.format(
        parameters=sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2e6,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        window=_read(folder / "radical_template.json")["window"],
        commit=commit,
        remark=f"\n\n{remark}" if remark else "",
        **_training_facts(folder / "training_log.jsonl"),
        lists=data["lists"],
        protocol=data["protocol"],
        ranking="\n".join(_ranking_rows(figures)),
        signals="\n".join(_signal_rows(figures)),
        entropy=", ".join(
            f"{value:.3f}" for key, value in figures["H_norm"].items() if key.startswith("layer")
        ),
    )
    with replacing(folder / "README.md") as file:
        file.write(text)
    return folder / "README.md"


def _training_facts(path: Path) -> dict[str, Any]:
    """Return the number of steps, the minutes of computing, and the last validation."""
    log = [json.loads(line) for line in _text(path).splitlines()]
    log = [record for record in log if "seconds" in record]  # the others are figures, not steps
    # The time of a step during which the process was paused says nothing about training.
    usual = sorted(record["seconds"] for record in log)[len(log) // 2]
    paused = sum(record["seconds"] > PAUSE * usual for record in log)
    seconds = sum(min(record["seconds"], PAUSE * usual) for record in log)
    return {
        "steps": len(log),
        "minutes": seconds / 60,
        "pauses": f"; {paused} steps during which the process was paused count as {PAUSE} usual steps each"
        if paused
        else "",
        "validation": next((r["validation R@1"] for r in reversed(log) if "validation R@1" in r), math.nan),
    }


def _ranking_rows(figures: dict[str, dict[str, float]]) -> list[str]:
    rows = []
    for name, values in figures.items():
        if "MRR@10" in values:
            numbers = f"{values['MRR@10']:.3f} | {values['±']:.3f} | {values['R@1']:.3f}"
            rows.append(f"| {name} | {numbers} | {values['lists']:.0f} |")
    return rows


def _signal_rows(figures: dict[str, dict[str, float]]) -> list[str]:
    rows = [
        f"| {_LABELS[name].format(**values)}{key} | {value:.3f} |"
        for name, values in figures.items()
        if name in _LABELS
        for key, value in values.items()
        if key not in _COUNTS
    ]
    agreement = figures["H_norm"]["Pearson r"]
    return [*rows, f"| H_norm on two data sets, Pearson's r | {agreement:.4f} |"]


def _read(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except ValueError as error:
        raise InputError(f"the card needs {path}: {error}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"the card needs {path}: {error}") from None
