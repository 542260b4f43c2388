"""A table shows its own run: records of other data, models and settings never answer for it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from radical_rerank.backbones import Backbone
from radical_rerank.cli import main
from radical_rerank.errors import InputError, ScoringError
from radical_rerank.lab import catalog as opening
from radical_rerank.lab.caption_sets import flickr8k, karpathy
from radical_rerank.lab.catalog import open_dataset, pools_of
from radical_rerank.lab.datasets import Dataset, Task
from radical_rerank.lab.experiments.definitions import ADAPTIVE, EXPERIMENTS, seeded
from radical_rerank.lab.metrics import SEEDS
from radical_rerank.lab.records import Cell, Records, RunFolder, digest_of
from radical_rerank.lab.runner import Runner, work_of
from radical_rerank.lab.tables import facts_of, summarize
from radical_rerank.pruning import Profile
from radical_rerank.reranking.prompt import PromptTemplate
from tests.cases import PROFILE, draw_list
from tests.tiny import write_tiny

WORDS = ("A dog .", "A car .", "A cat .", "A cow .")


def write_data(folder: Path, *, words: tuple[str, ...] = WORDS, shift: int = 0) -> None:
    """A Flickr8k of four pictures with one caption each, and a run that names all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(draw_list(3 + shift, 4)[1]):
        image.save(folder / f"{number}.png")
    lines = [f"{number}.png#0\t{text}\n" for number, text in enumerate(words)]
    (folder / "token.txt").write_text("".join(lines))
    write_pool(folder, range(4))


def write_pool(folder: Path, order: Any) -> None:
    lines = [
        f"{q}.png#0 Q0 {d}.png {rank} {1 / rank} x\n"
        for q in range(4)
        for rank, d in enumerate(order, start=1)
    ]
    (folder / "pool.run").write_text("".join(lines))


def evaluate(
    capsys: pytest.CaptureFixture[str], data: Path, model: Path, out: Path, *extra: str
) -> tuple[list[dict[str, Any]], str]:
    """The rows of `radical eval` but for their times, and what it said."""
    command = [
        "eval", "--dataset", "flickr8k", "--annotations", str(data / "token.txt"), "--images", str(data),
        "--pool", str(data / "pool.run"), "--methods", "fastv", "--keep", "0.5", "--model", str(model),
        "--out", str(out), "--json", *extra,
    ]  # fmt: skip
    with pytest.raises(SystemExit) as stop:
        main(command)
    captured = capsys.readouterr()
    assert not stop.value.code, captured.err
    rows = json.loads(captured.out)
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows], captured.err


def other_words(data: Path, model: Path) -> None:
    write_data(data, words=("A red star .", "A blue ring .", "A green heart .", "A car ."))


def other_pictures(data: Path, model: Path) -> None:
    write_data(data, shift=1)


def other_pool(data: Path, model: Path) -> None:
    write_pool(data, (1, 0, 3))


def other_weights(data: Path, model: Path) -> None:
    write_tiny(model, seed=5)


@pytest.mark.parametrize("change", [other_words, other_pictures, other_pool, other_weights])
def test_a_second_run_into_a_folder_reports_its_own_figures(
    change: Callable[[Path, Path], None],
    tmp_path: Path,
    tiny_folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, model, out = tmp_path / "data", tmp_path / "model", tmp_path / "out"
    write_data(data)
    shutil.copytree(tiny_folders["qwen3_vl"], model)
    before, said = evaluate(capsys, data, model, out)
    assert "left alone" not in said
    change(data, model)
    after, said = evaluate(capsys, data, model, out)
    fresh, _ = evaluate(capsys, data, model, tmp_path / "fresh")
    assert after == fresh
    assert f"8 records of other settings in {out} were left alone" in said
    assert after != before  # else the change tests nothing
    lines = (out / "records.jsonl").read_text().splitlines()
    assert len(lines) == 16


def test_a_smaller_limit_tabulates_fewer_queries(
    tmp_path: Path, tiny_folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path / "data")
    model = tiny_folders["qwen3_vl"]
    for limit in (4, 2, 3):
        rows, said = evaluate(capsys, tmp_path / "data", model, tmp_path / "out", "--limit", str(limit))
        assert [row["queries"] for row in rows] == [limit, limit]
        assert ("left alone" in said) == (limit < 4)
    assert len((tmp_path / "out" / "records.jsonl").read_text().splitlines()) == 8  # nothing ran twice


# The key, fact by fact.


def tiny_data(name: str = "tiny", seed: int = 0, **change: Any) -> Dataset:
    """One query over four pictures; its ids say nothing of what they show."""
    text, images = draw_list(seed, 4)
    task = Task("q", text, {"0": 1}, candidates=("0", "1", "2", "3"))
    return Dataset(name, [replace(task, **change)], lambda key: images[int(key)])


def key_with(
    backbone: Backbone, data: Dataset, cell: Cell, profile: Profile = PROFILE, **options: Any
) -> tuple[str, ...]:
    runner = Runner(backbone, {}, options=options, profile=profile)
    return runner.key(cell, 0, work_of(data, 0).content)


def test_the_key_holds_everything_that_changes_a_ranking(
    backbone: Backbone, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell("RaDiCal", "radical", 0.5)
    template = PromptTemplate.of(backbone)
    model = str(tiny_folders["qwen3_vl"])
    half = Backbone.from_pretrained(model, dtype="bfloat16")
    seen = Profile.measured("tiny", [0.9, 0.9, 0.97, 0.8, 0.7, 0.55, 0.75, 0.85], 1, "made up for tests")
    keys = {
        "as it is": key_with(backbone, tiny_data(), cell),
        "data set": key_with(backbone, tiny_data("other"), cell),
        "pictures": key_with(backbone, tiny_data(seed=1, text=tiny_data().tasks[0].text), cell),
        "words": key_with(backbone, tiny_data(text="a red star"), cell),
        "judgements": key_with(backbone, tiny_data(relevant={"1": 1}), cell),
        "reference": key_with(backbone, tiny_data(reference="2"), cell),
        "candidates": key_with(backbone, tiny_data(candidates=("0", "1", "2")), cell),
        "reference or candidate": key_with(
            backbone, tiny_data(candidates=("0", "1", "2"), reference="3"), cell
        ),
        "their order": key_with(backbone, tiny_data(candidates=("1", "0", "2", "3")), cell),
        "dtype": key_with(half, tiny_data(), cell),
        "scorer": key_with(backbone, tiny_data(), cell, scorer="generate"),
        "image size": key_with(backbone, tiny_data(), cell, max_image_tokens=9),
        "template": key_with(backbone, tiny_data(), cell, template=replace(template, intro="Look: ")),
        "window": key_with(backbone, tiny_data(), cell, window=3),
        "stride": key_with(backbone, tiny_data(), cell, window=3, stride=2),
        "method": key_with(backbone, tiny_data(), Cell("RaDiCal", "random", 0.5)),
        "keep": key_with(backbone, tiny_data(), replace(cell, keep=0.4)),
        "seed": key_with(backbone, tiny_data(), replace(cell, seed=7)),
        "options": key_with(backbone, tiny_data(), replace(cell, options={"gap": 3})),
        "trust profile": key_with(backbone, tiny_data(), cell, seen),
    }
    with torch.no_grad():
        weight = half.model.lm_head.weight
        weight[0, 0] += 1
    keys["weights"] = key_with(half, tiny_data(), cell)
    monkeypatch.setattr(backbone.tokenizer, "chat_template", "{{ messages[0].content }}")
    keys["chat template"] = key_with(backbone, tiny_data(), cell)
    monkeypatch.undo()
    monkeypatch.setattr(backbone.image_processor, "image_mean", [0.1, 0.1, 0.1])
    keys["preprocessing"] = key_with(backbone, tiny_data(), cell)
    monkeypatch.undo()
    same = [(a, b) for a in keys for b in keys if a < b and keys[a] == keys[b]]
    assert not same
    # And nothing else: not the object, nor when it was made.
    again = Backbone.from_pretrained(model)
    assert key_with(again, tiny_data(), Cell("RaDiCal", "radical", 0.5)) == keys["as it is"]


def test_a_method_s_defaults_are_part_of_the_key(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default that changes between versions is another setting, though nobody passed it."""
    from radical_rerank.pruning import METHODS, SparseVLM

    before = key_with(backbone, tiny_data(), Cell("SparseVLM", "sparsevlm", 0.5))
    monkeypatch.setitem(METHODS, "sparsevlm", lambda **options: SparseVLM(**{"recycle": 0.1, **options}))
    assert key_with(backbone, tiny_data(), Cell("SparseVLM", "sparsevlm", 0.5)) != before


def test_digests_refuse_what_they_cannot_tell_apart() -> None:
    assert digest_of([1, {"b": 1, "a": PROFILE}]) == digest_of([1, {"a": PROFILE, "b": 1}])
    with pytest.raises(TypeError, match="object has no digest"):
        digest_of([object()])


def test_a_picture_that_vanished_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    data = Dataset("files", [Task("q", "x", {"a": 1}, candidates=("a",))], lambda name: path)
    with pytest.raises(InputError, match=r"the picture a of files .*a\.png.*: No such file"):
        work_of(data, 0)
    Image.new("RGB", (4, 4)).save(path)
    first = work_of(data, 0).content
    Image.new("RGB", (4, 4), "red").save(path)
    assert work_of(data, 0).content != first


def test_mixed_records_are_never_averaged(backbone: Backbone, tmp_path: Path) -> None:
    runner = Runner(backbone, {})
    records = Records(tmp_path / "r.jsonl")
    for seed in (0, 1):
        runner.run(tiny_data(seed=seed), [Cell("Dense", "dense")], records)
    assert len(list(records)) == 2
    with pytest.raises(InputError, match="two records of 'Dense' for query 0 and seed 42"):
        summarize(records)
    runner.run(tiny_data("other", text="a red star"), [Cell("Dense", "dense")], records)
    with pytest.raises(InputError, match="are of 2 datasets"):
        summarize(records)


# Pools.


class Counting:
    """An embedder that orders pictures by their id, forwards or backwards."""

    made = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def embed_images(self, images: Any) -> torch.Tensor:
        Counting.made += 1
        step = 1.0 if self.name == "forwards" else -1.0
        return torch.arange(len(images), dtype=torch.float32)[:, None] * step

    def embed_queries(self, queries: Any) -> torch.Tensor:
        return torch.ones(len(queries), 1)


def test_a_pool_is_kept_for_its_own_data_depth_and_embedder(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "embedder_of", lambda name, backbone=None: Counting(name))
    monkeypatch.setattr(Counting, "made", 0)
    path = tmp_path / "pool.run"
    names = ["a", "b", "c", "d"]
    shown = dict(zip(names, draw_list(1, 4)[1], strict=True))

    def pool(gallery: list[str], depth: int, embedder: str) -> list[str]:
        data = Dataset("bare", [Task("q", "x", {"a": 1})], lambda name: shown[name], gallery)
        found = pools_of(data, backbone, None, depth, path, embedder=embedder)
        assert found is not None
        return found["q"]

    assert pool(names[:3], 2, "forwards") == ["c", "b"]
    assert pool(names[:3], 3, "forwards") == ["c", "b", "a"]
    assert pool(names[:3], 2, "backwards") == ["a", "b"]
    assert pool(names, 2, "forwards") == ["d", "c"]
    assert Counting.made == 4
    assert pool(names[:3], 2, "forwards") == ["c", "b"]
    assert Counting.made == 4  # kept
    shown["a"] = draw_list(2, 1)[1][0]
    assert pool(names[:3], 2, "forwards") == ["c", "b"]
    assert Counting.made == 5  # another picture under the same name
    assert len(list(tmp_path.glob("pool-*.run"))) == 5
    assert not path.exists()


# One run at a time.

HOLD = """
import sys, time
from pathlib import Path
from radical_rerank.lab.records import RunFolder
with RunFolder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_two_runs_into_one_folder_are_refused_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InputError) as refused, RunFolder(folder):
            pass
        assert str(folder) in str(refused.value)
        assert f"process {other.pid} " in str(refused.value)
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    for _ in range(2):  # killed, or ended: the folder is free again
        with RunFolder(folder), pytest.raises(InputError, match=f"process {os.getpid()} "), RunFolder(folder):
            pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match=r"cannot run in .*file/out: Not a directory"),
        RunFolder(tmp_path / "file" / "out"),
    ):
        pass


def test_the_commands_hold_the_lock(
    tmp_path: Path, tiny_folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path / "data")
    model = str(tiny_folders["qwen3_vl"])
    for command, folder in (
        (["experiment", "dynres", "--limit", "1", "--out", str(tmp_path)], tmp_path / "dynres"),
        (["eval", "--limit", "1", "--out", str(tmp_path / "out")], tmp_path / "out"),
    ):
        with RunFolder(folder), pytest.raises(SystemExit) as stop:
            main([*command, "--model", model])
        assert stop.value.code == 2
        assert f"is writing to {folder}" in capsys.readouterr().err


# Files that are not records.


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1]", "it has no cell_key"),
        (b'"text"', "it has no cell_key"),
        (b'{"task": "1"}', "it has no cell_key"),
        (b'{"cell_key": "a"}', "it has no task"),
        (b'{"cell_key": "a", "task": 1}', "it has no task"),
        (b"{", "is not a record"),
        (b"\xff\xfe", "is not a record"),
    ],
)
def test_a_line_that_is_no_record_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"cell_key": "a", "task": "1"}\n' + line + b"\n")
    with pytest.raises(InputError, match=message) as error:
        Records(path)
    assert f"{path}, line 2 " in str(error.value)


def test_records_of_versions_without_a_setting_are_left_alone(backbone: Backbone, tmp_path: Path) -> None:
    path, cell, said = tmp_path / "records.jsonl", Cell("Dense", "dense"), []
    path.write_text(json.dumps({"cell_key": cell.key, "task": "0", "measures": {}}) + "\n")
    with RunFolder(tmp_path, said.append) as folder:
        Runner(backbone, {}).run(tiny_data(), [cell], folder.records())
        assert [record["query"] for record in folder.records().claimed()] == [tiny_data().tasks[0].text]
    assert said == [f"1 records of other settings in {tmp_path} were left alone"]


# Ray.


def test_a_ray_worker_has_the_runner_s_settings(backbone: Backbone, tiny_folders: dict[str, Path]) -> None:
    from radical_rerank.lab.on_ray import Job, Worker

    template = replace(PromptTemplate.of(backbone), intro="Look: ")
    options = {"scorer": "generate", "max_image_tokens": 9, "template": template, "max_new_tokens": 256}
    cells = [Cell("RaDiCal", "radical", 0.5), Cell("Dense", "dense")]
    runner = Runner(backbone, {}, options=options, profile=PROFILE)
    expected = list(runner.records_of(tiny_data(), 0, cells))
    threads = torch.get_num_threads()
    job = Job(
        str(tiny_folders["qwen3_vl"]), tiny_data, cells, {}, threads=threads, options=options,
        profile=PROFILE, dtype="float32",
    )  # fmt: skip
    worker = Worker(job)
    lines = worker({"number": [0], "there": ["[]"]})["record"]
    for line, record in zip(lines, expected, strict=True):
        found = json.loads(line)
        assert {k: v for k, v in found.items() if k != "seconds"} == {
            k: v for k, v in json.loads(json.dumps(record)).items() if k != "seconds"
        }
        assert (found["scorer"], found["max_image_tokens"]) == ("generate", 9)
    work = work_of(tiny_data(), 0)
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


# The paper's protocol.


def captioned(folder: Path) -> tuple[Path, Path]:
    """Three pictures with five captions each, as Karpathy's file and as Flickr8k's."""
    for name in "abc":
        Image.new("RGB", (8, 8)).save(folder / f"{name}.jpg")
    images = [
        {
            "filename": f"{name}.jpg",
            "split": "test",
            "sentences": [{"raw": f"{name} {k}", "sentid": 5 * i + k} for k in range(5)],
        }
        for i, name in enumerate("abc")
    ]
    (folder / "karpathy.json").write_text(json.dumps({"images": images}))
    lines = [f"{name}.jpg#{k}\t{name} {k}\n" for name in "abc" for k in range(5)]
    (folder / "token.txt").write_text("".join(lines))
    return folder / "karpathy.json", folder / "token.txt"


def test_one_caption_per_picture(tmp_path: Path) -> None:
    annotations, tokens = captioned(tmp_path)
    loaders: list[Callable[..., Dataset]] = [
        lambda **options: karpathy(annotations, tmp_path, name="flickr30k", **options),
        lambda **options: flickr8k(tokens, tmp_path, **options),
    ]
    for load in loaders:
        assert [task.text for task in load(captions="first").tasks] == ["a 0", "b 0", "c 0"]
        assert len(load(captions="all").tasks) == 15
        drawn = [[task.text for task in load(captions="random", caption_seed=s).tasks] for s in range(20)]
        assert all([text[0] for text in texts] == ["a", "b", "c"] for texts in drawn)
        assert {texts[0] for texts in drawn} == {f"a {k}" for k in range(5)}
        assert len({tuple(texts) for texts in drawn}) > 10  # pictures draw apart from each other
        assert drawn[3] == [task.text for task in load(captions="random", caption_seed=3).tasks]
        assert list(load(captions="random").gallery) == ["a.jpg", "b.jpg", "c.jpg"]
        with pytest.raises(InputError, match="captions must be one of first, all, random, not 'last'"):
            load(captions="last")
    for name, file in (("flickr30k", annotations), ("mscoco", annotations), ("flickr8k", tokens)):
        data = open_dataset(name, annotations=str(file), images=str(tmp_path))
        assert len(data.tasks) == 3, "the paper's protocol is the default"
        data = open_dataset(name, annotations=str(file), images=str(tmp_path), captions="all")
        assert len(data.tasks) == 15
    with pytest.raises(InputError, match="scenes has no captions to choose from"):
        open_dataset("scenes", captions="all")


def test_captions_and_judgements_go_together(tmp_path: Path) -> None:
    """A judgement of a caption that is not asked is no error; that of one that is asked counts."""
    _, tokens = captioned(tmp_path)
    expert = tmp_path / "expert.txt"
    expert.write_text("b.jpg\ta.jpg#0\t3\t3\t2\nc.jpg\ta.jpg#4\t4\t4\t4\n")
    data = flickr8k(tokens, tmp_path, expert=expert, captions="first")
    assert [task.relevant for task in data.tasks] == [{"a.jpg": 3, "b.jpg": 2}, {"b.jpg": 3}, {"c.jpg": 3}]


def test_the_model_may_write_the_order_in_an_evaluation(
    tmp_path: Path, tiny_folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path / "data")
    template = json.loads(json.dumps(vars(PromptTemplate.load("qwen3_vl"))))
    (tmp_path / "template.json").write_text(json.dumps({**template, "intro": "Look at these. "}))
    for extra in ([], ["--scorer", "generate"], ["--template", str(tmp_path / "template.json")]):
        evaluate(
            capsys, tmp_path / "data", tiny_folders["qwen3_vl"], tmp_path / "out", "--limit", "1", *extra
        )
    records = list(Records(tmp_path / "out" / "records.jsonl"))
    assert [record["scorer"] for record in records] == ["logits"] * 2 + ["generate"] * 2 + ["logits"] * 2
    assert records[0]["template"] == records[2]["template"] != records[4]["template"]
    assert records[0]["scores"] != records[4]["scores"]
    with pytest.raises(SystemExit):
        main(["eval", "--scorer", "guess", "--out", str(tmp_path / "x"), "--limit", "1"])
    assert "scorer must be one of" in capsys.readouterr().err


def test_a_query_that_cannot_be_ranked_is_named(backbone: Backbone) -> None:
    options = {"scorer": "generate", "max_new_tokens": 1, "on_unreadable": "raise"}
    runner = Runner(backbone, {}, options=options)
    with pytest.raises(ScoringError, match=r"^tiny, query q, Dense: the model wrote no identifier"):
        list(runner.records_of(tiny_data(), 0, [Cell("Dense", "dense")]))


def test_an_answer_that_cannot_be_read_does_not_end_a_run(backbone: Backbone) -> None:
    """The prompt's order counts, costs are those of the pass, and the table says so."""
    runner = Runner(backbone, {}, options={"scorer": "generate", "max_new_tokens": 1})
    (record,) = runner.records_of(tiny_data(), 0, [Cell("Dense", "dense")])
    order = list(tiny_data().tasks[0].candidates or ())
    random.Random(f"42 {tiny_data().tasks[0].id}").shuffle(order)
    assert record["ranking"] == order
    assert (record["unreadable"], record["repairs"]) == (1, len(order))
    assert record["tokens"] > 0
    (row,) = summarize([record])
    assert row.unreadable == 1
    assert "answers without an order, for which the prompt's own counts: Dense 1" in facts_of([row])


def test_experiments_have_the_paper_s_five_seeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    asked: dict[str, Any] = {}

    def run_study(name: str, runner: Runner, out: Path, **options: Any) -> list[Any]:
        asked.update(options, runner=runner)
        return []

    monkeypatch.setattr("radical_rerank.lab.experiments.run.run_study", run_study)
    command = ["experiment", "main", "--out", str(tmp_path), "--model", str(tiny_folders["qwen3_vl"])]
    with pytest.raises(SystemExit):
        main([*command, "--scorer", "generate", "--max-image-tokens", "99"])
    assert tuple(asked["seeds"]) == SEEDS == (42, 123, 456, 789, 1024)
    assert asked["runner"].options == {"scorer": "generate", "max_image_tokens": 99}
    with pytest.raises(SystemExit):
        main([*command, "--seeds", "7", "8"])
    assert asked["seeds"] == [7, 8]
    cells = seeded(EXPERIMENTS["main"].cells([0.2]), SEEDS)
    rows = {cell.name for cell in cells}
    assert all([c.seed for c in cells if c.name == name] == list(SEEDS) for name in rows)
    assert ADAPTIVE.name in rows
    assert len(seeded(EXPERIMENTS["main"].cells([0.2]), [1, 1])) == len(rows)
