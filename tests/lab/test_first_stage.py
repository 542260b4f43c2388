"""Run files, exact search and pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from radical_rerank.backbones import Backbone
from radical_rerank.embedded.scenes.datasets import TESTBED
from radical_rerank.errors import InputError
from radical_rerank.lab import first_stage
from radical_rerank.lab.datasets import Dataset, Task
from radical_rerank.lab.first_stage import pools_of
from radical_rerank.retrieval import nearest
from radical_rerank.retrieval.pools import read_run, write_run
from tests.cases import draw_list
from tests.lab.data import (
    drawn_lists,
)


def test_run_files_round_trip_and_name_the_bad_line(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a.run", {"q1": [("x", 2.0), ("y", 1.0)], "q2": [("y", 0.5)]}, "tag")
    assert read_run(path, known={"x", "y"}) == {"q1": ["x", "y"], "q2": ["y"]}
    assert read_run(path, depth=1) == {"q1": ["x"], "q2": ["y"]}
    with pytest.raises(InputError, match=r"line 1: 'x' is not a picture"):
        read_run(path, known={"y"})
    for text, message in (
        ("q1 Q0 x one 2 t\n", "line 1"),
        ("q1 Q0 x 1 2 t\nq1 Q0 x 2 1 t\n", "twice"),
        ("\n", "is empty"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            read_run(path)
    with pytest.raises(InputError, match="spaces"):
        write_run(path, {"q": [("a b", 1.0)]}, "t")
    with pytest.raises(InputError, match="cannot read"):
        read_run(tmp_path / "none.run")


def test_pools(tmp_path: Path, backbone: Backbone) -> None:
    data = drawn_lists()
    assert pools_of(data, backbone, None, 5, tmp_path / "pool.run", testbed=TESTBED) is None
    bare = Dataset("bare", [Task("q1", "x", {"a": 1})], lambda name: b"", ["a", "b"])
    with pytest.raises(InputError, match="pass --embedder"):
        pools_of(bare, backbone, None, 5, tmp_path / "pool.run", testbed=TESTBED)
    run = write_run(tmp_path / "a.run", {"q2": [("a", 1.0)]}, "t")
    with pytest.raises(InputError, match="no candidates for query q1"):
        pools_of(bare, backbone, str(run), 5, tmp_path / "pool.run", testbed=TESTBED)


def test_exact_search() -> None:
    draw = torch.Generator().manual_seed(0)
    queries, gallery = torch.randn(7, 6, generator=draw), torch.randn(30, 6, generator=draw)
    gallery[11] = gallery[4]  # a tie
    scores, numbers = nearest(queries, gallery, 5, chunk=3)
    for query, row, best in zip(queries, scores, numbers.tolist(), strict=True):
        obvious = sorted(range(30), key=lambda n: (-float(gallery[n] @ query), n))[:5]
        assert best == obvious
        torch.testing.assert_close(row, gallery[best] @ query)
    assert nearest(queries, gallery[:3], 5)[1].shape == (7, 3)


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
    monkeypatch.setattr(first_stage, "embedder_of", Counting)
    monkeypatch.setattr(Counting, "made", 0)
    path = tmp_path / "pool.run"
    names = ["a", "b", "c", "d"]
    shown = dict(zip(names, draw_list(1, 4)[1], strict=True))

    def pool(gallery: list[str], depth: int, embedder: str) -> list[str]:
        data = Dataset("bare", [Task("q", "x", {"a": 1})], lambda name: shown[name], gallery)
        pools = pools_of(data, backbone, None, depth, path, testbed=TESTBED, embedder=embedder)
        assert pools is not None
        return pools["q"]

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
