"""The demo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_demo_writes_its_pages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "radical_rerank.cli", "demo", "--out", str(tmp_path / "demo")]
    done = subprocess.run(
        [*command, "--size", "60", "--queries", "2", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    photos, scenes = json.loads(done.stdout)
    assert (photos["model"], scenes["model"]) == ("photos", "scenes")
    assert (len(photos["rows"]), len(scenes["rows"])) == (12, 2)
    for world in (photos, scenes):
        for row in world["rows"]:
            dense, pruned = row["Dense"], row["RaDiCal 20%"]
            budget = 0.2 * dense["visual_tokens"]
            assert budget <= pruned["visual_tokens_left"] < budget + 4  # four stages, each rounded up
            assert 0 < pruned["flops_saved"] < row["RaDiCal 10%"]["flops_saved"]
        assert Path(world["page"]).stat().st_size > 10_000
    first = [row["RaDiCal 20%"]["rank"] == 1 for row in photos["rows"]]
    assert sum(first) >= 6
