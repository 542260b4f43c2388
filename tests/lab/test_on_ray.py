"""The runner on Ray Data gives the same records."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.scenes.datasets import TESTBED
from radical_rerank.lab.catalog import open_dataset
from radical_rerank.lab.on_ray import EvaluationJob, EvaluationWorker, run_on_ray
from radical_rerank.lab.records import Cell, Records
from radical_rerank.lab.runner import Runner, work_of
from radical_rerank.reranking.prompt import PromptTemplate
from tests.cases import PROFILE, keep_profile
from tests.lab.data import (
    CELLS,
    evaluate,
    one_query,
    without_time,
    write_data,
)

pytestmark = pytest.mark.slow


def test_ray_gives_the_same_records(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    """Two workers on a local Ray against the plain runner; what is there already is not run again."""
    pytest.importorskip("ray", reason="Ray is an extra")
    model = str(tiny_folders["qwen3_vl"])
    cells = [CELLS[0], CELLS[2]]
    dataset = partial(open_dataset, "scenes", testbed=TESTBED, lists=4)
    keep_profile(Backbone.from_pretrained(model))
    plain = Records(tmp_path / "plain.jsonl")
    Runner(Backbone.from_pretrained(model), {"commit": "test"}).run(dataset(), cells, plain)
    spread = Records(tmp_path / "ray.jsonl")
    for record in list(plain)[:3]:
        spread.add({**record, "commit": "before"})
    run_on_ray("local", EvaluationJob(model, dataset, cells, {"commit": "test"}, threads=1), spread, 4)
    key = lambda r: (r["task"], r["cell_key"])  # noqa: E731
    ours, theirs = (sorted(without_time(r), key=key) for r in (spread, plain))
    assert [r["commit"] for r in ours].count("before") == 3
    for a, b in zip(ours, theirs, strict=True):
        # One thread adds in another order than two.
        assert a.pop("scores") == pytest.approx(b.pop("scores"), abs=5e-5)
        assert {**a, "commit": ""} == {**b, "commit": ""}


def test_a_ray_worker_has_the_runner_s_settings(backbone: Backbone, tiny_folders: dict[str, Path]) -> None:

    template = replace(PromptTemplate.of(backbone), intro="Look: ")
    options = {"scorer": "generate", "max_image_tokens": 9, "template": template, "max_new_tokens": 256}
    cells = [Cell("RaDiCal", "radical", 0.5), Cell("Dense", "dense")]
    runner = Runner(backbone, {}, options=options, profile=PROFILE)
    expected = list(runner.records_of(one_query(), 0, cells))
    threads = torch.get_num_threads()
    job = EvaluationJob(
        str(tiny_folders["qwen3_vl"]), one_query, cells, {}, threads=threads, options=options,
        profile=PROFILE, dtype="float32",
    )  # fmt: skip
    worker = EvaluationWorker(job)
    lines = worker({"number": [0], "there": ["[]"]})["record"]
    for line, record in zip(lines, expected, strict=True):
        record_of_worker = json.loads(line)
        assert {k: v for k, v in record_of_worker.items() if k != "seconds"} == {
            k: v for k, v in json.loads(json.dumps(record)).items() if k != "seconds"
        }
        assert (record_of_worker["scorer"], record_of_worker["max_image_tokens"]) == ("generate", 9)
    work = work_of(one_query(), 0)
    there = json.dumps([runner.key(cells[0], 0, work.content)])
    assert len(worker({"number": [0], "there": [there]})["record"]) == 1
    assert worker.runner.backbone.model.dtype == torch.float32


def test_eval_on_ray_leaves_nothing_to_run_here(
    tmp_path: Path,
    tiny_folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray", reason="Ray is an extra")
    write_data(tmp_path / "data")
    model, extra = tiny_folders["qwen3_vl"], ("--max-image-tokens", "9", "--limit", "2")
    plain, _ = evaluate(capsys, tmp_path / "data", model, tmp_path / "plain", *extra)
    ray = (*extra, "--ray", "local", "--workers", "1")
    spread, _ = evaluate(capsys, tmp_path / "data", model, tmp_path / "out", *ray)
    assert [row["visual_tokens"] for row in spread] == [row["visual_tokens"] for row in plain]
    lines = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    assert len(lines) == 4  # none was made twice, here and there
    monkeypatch.setattr("radical_rerank.lab.on_ray.run_on_ray", None)  # and now there is nothing to do
    again, _ = evaluate(capsys, tmp_path / "data", model, tmp_path / "out", *ray)
    assert again == spread
