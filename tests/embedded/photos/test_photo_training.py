"""The three stages of training, killed or not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radical_rerank import Reranker
from radical_rerank.cli import main
from radical_rerank.embedded.photos.embedder import PhotoEmbedder
from radical_rerank.embedded.photos.training.alignment import contrast, recall, scores
from radical_rerank.embedded.photos.training.features import Features, load_split, view_of
from radical_rerank.embedded.photos.training.lists import draw_list
from radical_rerank.embedded.photos.training.run import train
from radical_rerank.errors import InputError
from tests.embedded.photos.conftest import TINY
from tests.embedded.test_training import KillBefore, KilledError


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_state(corpus_folder: Path, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", corpus_folder, TINY, save_every=4)
    killed = tmp_path / "killed"
    train(killed, corpus_folder, TINY, stages=["features"])
    for stage in ("alignment", "listwise"):
        with pytest.raises(KilledError):
            train(killed, corpus_folder, TINY, stages=[stage], save_every=2, progress=KillBefore(3))
        train(killed, corpus_folder, TINY, stages=[stage], save_every=2)
        ends = [torch.load(run / stage / "checkpoint.pt", weights_only=True) for run in (whole, killed)]
        for name, value in ends[0]["model"].items():
            assert torch.equal(value, ends[1]["model"][name]), name
        logs = [(run / stage / "training_log.jsonl").read_text().splitlines() for run in (whole, killed)]
        steps = [[{**json.loads(line), "seconds": 0} for line in lines] for lines in logs]
        assert steps[0] == steps[1]
        assert len(steps[0]) == 4
    assert "held-out R@1" in logs_of(whole, "alignment")[-1]
    assert 0 < logs_of(whole, "model")[-1]["held-out MRR@10"] <= 1

    # The finished model ranks pictures like any other, and its embedder searches them.
    reranker = Reranker(whole / "model", "random", keep=0.5)
    images = [corpus_folder / "images" / f"{number}.jpg" for number in range(4)]
    assert sorted(reranker.rank("a red wall", images).order) == [0, 1, 2, 3]
    embedder = PhotoEmbedder(reranker.backbone)
    vectors = embedder.embed_images([str(image) for image in images])
    assert vectors.shape == (4, 192)
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(4))
    # The same vector as in training, from the maps in 8 bits.
    assert embedder.embed_queries(["a red wall", "the wall"]).shape == (2, 192)
    with pytest.raises(InputError, match="another plan"):
        train(killed, corpus_folder, replace(TINY, align_lr=1.0), stages=["alignment"])
    with pytest.raises(InputError, match="reference"):
        reranker.rank("make it blue", images, reference=images[0])
    with pytest.raises(InputError, match="ask_generate"):
        Reranker(reranker.backbone, "dense", scorer="generate").rank("a wall", images)


def logs_of(run: Path, stage: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / stage / "training_log.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_plan_may_train_on_all_photographs(corpus_folder: Path, tmp_path: Path) -> None:
    plan = replace(TINY, held_out=0, align_steps=1, views=1, phases=())
    train(tmp_path, corpus_folder, plan)
    (last,) = [line for line in logs_of(tmp_path, "model") if line["stage"] == "listwise"]
    assert not any("held-out" in fact for fact in last)  # there is nothing to measure on
    images = [corpus_folder / "images" / f"{number}.jpg" for number in range(3)]
    assert len(Reranker(tmp_path / "model", "dense").rank("a red wall", images)) == 3


def test_stages_ask_for_the_ones_before_them(corpus_folder: Path, tmp_path: Path) -> None:
    for stage in ("alignment", "listwise"):
        with pytest.raises(InputError, match="run the stage features first"):
            train(tmp_path, corpus_folder, TINY, stages=[stage])
    with pytest.raises(InputError, match="unknown stage 'rest'"):
        train(tmp_path, corpus_folder, TINY, stages=["rest"])


def test_a_folder_without_the_corpus_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["photos", "train", str(tmp_path / "out"), "--data", str(tmp_path)])
    assert "is not Flickr8k: it has no Flickr_8k.trainImages.txt" in " ".join(capsys.readouterr().err.split())


def test_the_splits_and_their_captions(corpus_folder: Path) -> None:
    train_split, dev = load_split(corpus_folder, "train"), load_split(corpus_folder, "dev")
    assert [photo.name for photo in dev] == [f"{number}.jpg" for number in range(12, 20)]
    assert train_split[1].captions == ("A green wall .", "The picture is green .")


def test_views_are_drawn_from_the_name(corpus_folder: Path) -> None:
    photo = load_split(corpus_folder, "train")[0]
    plain, mirrored = np.asarray(view_of(photo, 0)), np.asarray(view_of(photo, 1))
    assert np.array_equal(plain[:, ::-1], mirrored)
    crop = view_of(photo, 2)
    assert np.array_equal(np.asarray(crop), np.asarray(view_of(photo, 2)))
    assert crop.size <= (64, 48)


def test_an_interrupted_view_leaves_no_file(corpus_folder: Path, tmp_path: Path) -> None:
    class Broken:
        def maps(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            raise KilledError

    features = Features(tmp_path, 0)
    with pytest.raises(KilledError):
        features.make(Broken(), load_split(corpus_folder, "train"), 0)
    assert not features.exist


def test_contrast_against_the_obvious_loop() -> None:
    score = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    owner = torch.tensor([0, 0, 1, 1, 2, 2])
    find = [-(score[q].log_softmax(0)[owner[q]]) for q in range(6)]
    back = []
    for q in range(6):
        picture = owner[q]
        rivals = [score[r, picture] for r in range(6) if owner[r] != picture]
        back.append(-torch.stack([score[q, picture], *rivals]).log_softmax(0)[0])
    expected = torch.stack(find).mean() + torch.stack(back).mean()
    torch.testing.assert_close(contrast(score, owner), expected)


def test_scores_against_the_obvious_loop() -> None:
    draw = torch.Generator().manual_seed(1)
    table = torch.nn.Embedding.from_pretrained(torch.randn(9, 256, generator=draw))
    tokens = torch.randn(2, 1 + 5, 256, generator=draw)
    model = type("Model", (), {"get_input_embeddings": lambda self: table})()
    queries = [[1, 2, 2], [8]]
    late, pooled = scores(model, tokens, queries)
    for q, query in enumerate(queries):
        vectors = [table.weight[word, :192] for word in query]
        for p in range(2):
            cells = [cell[:192] for cell in tokens[p, 2:]]  # without the token of the whole picture
            total = sum(
                float(v.norm()) * max(float(torch.cosine_similarity(v, c, dim=0)) for c in cells)
                for v in vectors
            )
            assert late[q, p].item() == pytest.approx(total, abs=1e-4)
            whole = torch.cosine_similarity(torch.stack(vectors).sum(0), tokens[p, 0, :192], dim=0)
            assert pooled[q, p].item() == pytest.approx(float(whole), abs=1e-5)


def test_recall_counts_the_diagonal() -> None:
    score = torch.tensor([[3.0, 1, 2], [5, 4, 3], [1, 2, 3]])
    assert recall(score, (1, 2)) == {"R@1": pytest.approx(2 / 3), "R@2": 1.0}


def test_lists_have_alike_pictures_and_their_own_captions() -> None:
    near = torch.arange(40).view(-1, 4).repeat_interleave(4, dim=0)
    captions = [[[number, 0], [number, 1]] for number in range(40)]
    for seed in range(20):
        pictures, queries = draw_list(
            np.random.default_rng(seed), near, captions, count=8, alike=3, queries=10
        )
        assert len(set(pictures)) == 8
        assert len(queries) == 10
        assert all(pictures[place] == words[0] for words, place in queries)
        groups = [picture // 4 for picture in pictures]
        assert max(groups.count(group) for group in groups) >= 3
