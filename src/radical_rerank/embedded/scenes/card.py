"""The embedded model's card, written from its measured figures and its training log."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from radical_rerank.errors import InputError
from radical_rerank.files import replacing


def write_card(folder: str | Path, commit: str, remark: str = "") -> Path:
    """`README.md` of a trained model's folder, from its `figures.json` and `training_log.jsonl`."""
    folder = Path(folder)
    figures = _read(folder / "figures.json")
    config = _read(folder / "config.json")["text_config"]
    log = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    # A step during which the machine was asked to pause says nothing about training.
    usual = sorted(record["seconds"] for record in log)[len(log) // 2]
    paused = [record for record in log if record["seconds"] > 12 * usual]
    seconds = sum(min(record["seconds"], 12 * usual) for record in log)
    ranking, signals = [], []
    for name, values in figures["figures"].items():
        if "MRR@10" in values:
            shown = f"{values['MRR@10']:.3f} | {values['±']:.3f} | {values['R@1']:.3f}"
            ranking.append(f"| {name} | {shown} | {values['lists']:.0f} |")
        elif name != "H_norm":
            label = {"signals": "", "questions": "answers right, "}.get(name, f"{name}: ")
            signals += [
                f"| {label}{key} | {value:.3f} |" for key, value in values.items() if key not in _COUNTS
            ]
    entropy = figures["figures"]["H_norm"]
    signals.append(f"| H_norm on two differently seeded data sets, Pearson r | {entropy['Pearson r']:.4f} |")
    curve = ", ".join(f"{value:.3f}" for key, value in entropy.items() if key.startswith("layer"))
    template = (resources.files("radical_rerank.embedded.scenes") / "card.md").read_text(encoding="utf-8")
    text = template.format(
        parameters=sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 2e6,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        window=_read(folder / "radical_template.json")["window"],
        commit=commit,
        remark=f" {remark}" if remark else "",
        steps=len(log),
        minutes=seconds / 60,
        pauses=f", {len(paused)} steps during which the process was paused cut to the length of twelve"
        if paused
        else "",
        validation=[record["validation R@1"] for record in log if "validation R@1" in record][-1],
        lists=figures["lists"],
        ranking="\n".join(ranking),
        signals="\n".join(signals),
        entropy=curve,
    )
    with replacing(folder / "README.md") as file:
        file.write(text)
    return folder / "README.md"


_COUNTS = ("lists", "questions")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"the card needs {path}: {error}") from None
