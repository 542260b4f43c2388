"""The model card."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from radical_rerank.backbones import Backbone
from radical_rerank.embedded import MODELS
from radical_rerank.embedded.card import write_card
from radical_rerank.embedded.scenes.figures import SceneEvaluation
from radical_rerank.errors import InputError

FOLDER = MODELS["scenes"].folder


def test_its_card_says_where_it_comes_from_and_what_was_measured(embedded: Backbone) -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.search(r"commit `[0-9a-f]{40}`", card)
    assert "radical scenes train" in card
    assert "radical scenes evaluate" in card
    figures = json.loads((FOLDER / "figures.json").read_text(encoding="utf-8"))
    groups = SceneEvaluation(embedded, 1000).groups()
    assert set(figures["figures"]) == {name for names in groups for name in names}
    for name, values in figures["figures"].items():
        if "MRR@10" in values:
            line = next(line for line in card.splitlines() if line.startswith(f"| {name} |"))
            assert f"| {values['MRR@10']:.3f} |" in line
            assert line.endswith(f"| {values['lists']} |")


def test_its_card_is_what_the_command_writes(tmp_path: Path) -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    commit = re.search(r"commit `([0-9a-f]{40})`", card)
    remark = re.search(r"(?m)^The run was .*$", card)
    assert commit
    assert remark
    copy = shutil.copytree(FOLDER, tmp_path / "model")
    assert write_card("scenes", copy, commit[1], remark[0]).read_text(encoding="utf-8") == card
    (copy / "figures.json").unlink()
    with pytest.raises(InputError, match="figures"):
        write_card("scenes", copy, commit[1])
