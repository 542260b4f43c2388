"""Small data sets, files and runs that the tests of the lab share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from radical_rerank.cli import main
from radical_rerank.lab.datasets import Dataset, Task
from radical_rerank.lab.records import Cell, Records
from tests.cases import draw_list


def drawn_lists(count: int = 6, queries: int = 4) -> Dataset:
    lists = [draw_list(seed, count) for seed in range(queries)]
    tasks = [
        Task(f"q{n}", text, {f"{n}-{n % count}": 1}, candidates=tuple(f"{n}-{i}" for i in range(count)))
        for n, (text, _) in enumerate(lists)
    ]

    def picture(name: str) -> Image.Image:
        number, place = map(int, name.split("-"))
        return lists[number][1][place]

    return Dataset("tiny", tasks, picture)


CELLS = [
    Cell("Dense", "dense"),
    Cell("RaDiCal 20%", "radical", 0.2),
    Cell("Random 20%", "random", 0.2, seed=7),
    Cell("LowRes 20%", "lowres", 0.2),
]


def without_time(records: Records) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in ("seconds", "scoring")} for record in records]


def blank_pictures(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)


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
    return [{k: v for k, v in row.items() if k not in ("seconds", "scoring")} for row in rows], captured.err


def one_query(name: str = "tiny", seed: int = 0, **change: Any) -> Dataset:
    """One query over four pictures; its ids say nothing of what they show."""
    text, images = draw_list(seed, 4)
    task = Task("q", text, {"0": 1}, candidates=("0", "1", "2", "3"))
    return Dataset(name, [replace(task, **change)], lambda key: images[int(key)])


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


class KilledError(Exception):
    pass
