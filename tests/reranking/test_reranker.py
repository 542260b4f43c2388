"""From images to rankings, end to end on tiny random models."""

from __future__ import annotations

import math
import os
import pickle
import select
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from radical_rerank import Dense, Document, PromptTemplate, Query, RaDiCal, Reranker, calibrate
from radical_rerank.backbones import Backbone, ImageFeatures, Pixels
from radical_rerank.errors import (
    CalibrationError,
    InputError,
    ScoringError,
    StoppedError,
    UnsupportedModelError,
)
from radical_rerank.method import macs
from radical_rerank.pruning import Profile
from radical_rerank.reranking.prompt import build_prompt
from tests.cases import PROFILE, across, draw_list, first_fast, hooks_on, stock_pixels
from tests.tiny import TINY_FAMILIES


def pictures(seed: int, count: int) -> tuple[str, list[Image.Image]]:
    return draw_list(seed, count)


@pytest.fixture(scope="module")
def reranker(backbone: Backbone) -> Reranker:
    return Reranker(backbone, "radical", keep=0.2, profile=PROFILE)


# Ranking.


@pytest.mark.parametrize("family", first_fast(TINY_FAMILIES))
def test_a_list_is_ranked_by_the_identifiers_logits(family: str, backbones: dict[str, Backbone]) -> None:
    query, images = pictures(1, 7)
    reranker = Reranker(backbones[family], "radical", keep=0.3, profile=PROFILE, max_image_tokens=48)
    ranking = reranker.rank(query, images)
    assert sorted(ranking.order) == list(range(7))
    scores = [result.score for result in ranking]
    assert scores == sorted(scores, reverse=True)
    assert sum(math.exp(score) for score in scores) == pytest.approx(1, abs=1e-5)
    assert all(result.document is images[result.index] for result in ranking)
    assert reranker.rank(query, images).order == ranking.order
    # Pruning is real: the dense model scores differently.
    dense = Reranker(backbones[family], "dense", max_image_tokens=48).rank(query, images)
    assert [r.score for r in dense] != scores


@pytest.mark.parametrize("family", first_fast(TINY_FAMILIES))
def test_dense_equals_the_stock_model_fed_with_pixels(family: str, backbones: dict[str, Backbone]) -> None:
    """The whole path (cache, prompt, precomputed features) against one plain forward pass."""
    backbone = backbones[family]
    query, images = pictures(2, 4)
    reranker = Reranker(backbone, "dense", max_image_tokens=48)
    ranking = reranker.rank(query, images)
    pixels = [backbone.preprocess(image, 48) for image in images]
    from radical_rerank.reranking.prompt import build_prompt

    features = backbone.encode(pixels)
    sizes = [sum(block.rows * block.columns for block in p.blocks) for p in pixels]
    assert [len(feature.tokens) for feature in features] == sizes
    prompt = build_prompt(backbone, reranker.template, query, [f.rows or len(f.tokens) for f in features])
    assert [len(c) for c in prompt.layout.candidate_of.split(sizes)] == sizes
    inputs = {"input_ids": torch.tensor([prompt.ids]), **stock_pixels(family, pixels)}
    images_at = inputs["input_ids"] == backbone.image_token_id
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = images_at.int()
    if family == "gemma3":
        inputs["token_type_ids"] = images_at.int()
    with torch.no_grad():
        logits = backbone.model(**inputs).logits[0, -1]
    expected = logits[prompt.identifiers].log_softmax(-1)
    actual = torch.tensor([score for _, score in sorted((r.index, r.score) for r in ranking)])
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@given(
    width=st.integers(8, 900), height=st.integers(8, 900), limit=st.integers(1, 400), which=st.integers(0, 1)
)
def test_tokens_are_counted_as_preprocessing_makes_them(
    backbones: dict[str, Backbone], width: int, height: int, limit: int, which: int
) -> None:
    backbone = backbones[("qwen3_vl", "internvl_qwen2")[which]]
    assume(max(width, height) / min(width, height) < 100)
    image = Image.new("RGB", (width, height))
    pixels = backbone.preprocess(image, limit)
    assert backbone.count_tokens(image, limit) == sum(block.rows * block.columns for block in pixels.blocks)


def test_top_k(reranker: Reranker) -> None:
    query, images = pictures(3, 6)
    assert reranker.rank(query, images, top_k=2).order == reranker.rank(query, images).order[:2]
    assert len(reranker.rank(query, images, top_k=99)) == 6


@pytest.mark.parametrize(
    ("family", "method"), across([("radical",), ("random",), ("dense",)], [("radical",)])
)
def test_batches_give_the_rankings_of_single_lists(
    method: str, family: str, backbones: dict[str, Backbone]
) -> None:
    options: dict[str, Any] = {} if method == "dense" else {"profile": PROFILE}
    reranker = Reranker(backbones[family], method, keep=0.3, max_image_tokens=32, **options)
    lists = [
        (Query(query, images[0]) if n % 3 == 2 else query, images)
        for n, (query, images) in ((n, pictures(n, 2 + 2 * n)) for n in range(5))
    ]
    lists.insert(2, ("red", []))
    lists.insert(3, ("red", lists[0][1][:1]))
    alone = [reranker.rank(query, images) for query, images in lists]
    for batch_size in (2, 7):
        together = list(reranker.rank_many(lists, batch_size=batch_size))
        for a, b in zip(alone, together, strict=True):
            assert a.order == b.order
            assert [r.score for r in a] == pytest.approx([r.score for r in b], abs=1e-4)
            assert [s.survivors for r in a.reports for s in r.stages] == [
                s.survivors for r in b.reports for s in r.stages
            ]


def test_composed_queries_protect_the_reference(backbone: Backbone) -> None:
    query, images = pictures(4, 5)
    reranker = Reranker(backbone, RaDiCal(keep=0.1, profile=PROFILE))
    plain = reranker.rank(query, images).report
    composed = reranker.rank(query, images, reference=images[2])
    report = composed.report
    assert plain is not None
    assert report is not None
    assert report.visual_tokens == plain.visual_tokens  # the reference's are not among them
    own = report.tokens - report.visual_tokens
    assert own - (plain.tokens - plain.visual_tokens) > 40  # but they are in the prompt
    assert report.tokens_per_layer[-1] == own + report.visual_tokens_left
    as_query = reranker.rank(Query(query, images[2]), images)
    assert as_query.order == composed.order
    with pytest.raises(InputError, match="not both"):
        reranker.rank(Query(query, images[2]), images, reference=images[2])


def test_more_candidates_than_letters_go_through_windows(backbone: Backbone) -> None:
    query, images = pictures(5, 70)
    reranker = Reranker(backbone, "radical", profile=PROFILE, max_image_tokens=16)
    ranking = reranker.rank(query, images)
    assert sorted(ranking.order) == list(range(70))
    scores = [result.score for result in ranking]
    assert scores == sorted(scores, reverse=True)
    assert len(ranking.reports) == 2
    assert len(ranking.reports[0].indices) == len(ranking.reports[1].indices) == 52
    small = Reranker(backbone, "dense", window=8, stride=4, max_image_tokens=16)
    query, images = pictures(6, 20)
    ranking = small.rank(query, images)
    assert sorted(ranking.order) == list(range(20))
    assert len(ranking.reports) == 4
    # The last window decided the front: its own list, ranked alone, gives the same order.
    assert ranking.report is not None
    front = ranking.report.indices
    alone = small.rank(query, [images[i] for i in front])
    assert [front[i] for i in alone.order] == ranking.order[:8]


def test_the_vision_cache_spares_the_encoder(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = backbone.encode

    def counted(pixels: Sequence[Pixels], signals: bool = False) -> list[ImageFeatures]:
        encoded.append(len(pixels))
        return encode(pixels, signals)

    monkeypatch.setattr(backbone, "encode", counted)
    query, images = pictures(7, 6)
    reranker = Reranker(backbone, "dense")
    first = reranker.rank(query, images)
    again = reranker.rank(query, [image.copy() for image in images])
    assert encoded == [6]
    assert [r.score for r in first] == pytest.approx([r.score for r in again], abs=1e-6)
    # One image twice in a list, and in two lists of a batch, is encoded once.
    fresh = Reranker(backbone, "dense")
    list(fresh.rank_many([(query, [images[0], images[0], images[1]]), (query, images[:3])], batch_size=2))
    assert encoded[1:] == [3]
    none = Reranker(backbone, "dense", vision_cache_bytes=0)
    none.rank(query, images[:2])
    none.rank(query, images[:2])
    assert encoded[2:] == [2, 2]
    # Another resolution is another entry.
    other = Reranker(backbone, "dense", max_image_tokens=9, vision_cache=reranker.vision_cache)
    other.rank(query, images)
    assert encoded[4:] == [6]
    # Long lists go through the encoder in parts.
    fresh.rank(*pictures(8, 19))
    assert encoded[5:] == [8, 8, 3]


def test_the_model_may_write_the_order(
    backbones: dict[str, Backbone], monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = backbones["qwen3_vl"]
    query, images = pictures(8, 4)
    reranker = Reranker(backbone, "radical", profile=PROFILE, scorer="generate", max_new_tokens=12)
    written: list[str] = []
    write = backbone.write

    def overheard(inputs: dict[str, Any], limit: int) -> list[str]:
        written.extend(write(inputs, limit))
        # A random model writes noise; what it wrote stays in front of an order that can be read.
        return [f"{written[-1]} C > A > A > B"]

    monkeypatch.setattr(backbone, "write", overheard)
    ranking = reranker.rank(query, images)
    assert written[0]
    assert len(written[0].split()) <= 12
    assert sorted(ranking.order) == [0, 1, 2, 3]
    assert ranking.repairs > 0
    shares = [1, 1 / 2, 1 / 3, 1 / 4]
    assert [r.probability for r in ranking] == pytest.approx([share / sum(shares) for share in shares])
    monkeypatch.setattr(backbone, "write", lambda inputs, limit: ["nothing of use"])
    with pytest.raises(ScoringError, match="none of the identifiers"):
        reranker.rank(query, images)


def test_what_is_written_under_pruning_is_what_generate_writes(backbone: Backbone) -> None:
    query, images = pictures(9, 5)
    pruner = RaDiCal(keep=0.2, profile=PROFILE)
    reranker = Reranker(backbone, pruner, scorer="generate", max_new_tokens=10)
    texts: list[str] = []
    write = backbone.write
    backbone.write = lambda inputs, limit: texts.extend(write(inputs, limit)) or ["A"]  # type: ignore
    try:
        reranker.rank(query, images)
    finally:
        del backbone.write
    from radical_rerank.reranking.prompt import build_prompt

    features = backbone.encode([backbone.preprocess(image, 384) for image in images])
    sizes = [len(f.tokens) for f in features]
    prompt = build_prompt(backbone, reranker.template, query, sizes, generate=True)
    with pruner.on(backbone.model, prompt.layout):
        expected = write(backbone.inputs([prompt.ids], features), 10)
    assert texts == expected


# The report.


def test_the_report_adds_up(reranker: Reranker) -> None:
    query, images = pictures(10, 8)
    report = reranker.rank(query, images).report
    assert report is not None
    assert report.method == "RaDiCal"
    assert report.indices == list(range(8))
    sizes = [sum(b.rows * b.columns for b in blocks) for blocks in report.blocks]
    assert sum(sizes) == report.visual_tokens
    alive = report.visual_tokens
    for stage in report.stages:
        assert stage.before == alive
        assert stage.after == math.ceil(round(0.2**0.25 * alive, 9))
        alive = stage.after
        assert stage.alpha == PROFILE.alpha_at(stage.layer)
        assert sum(len(tokens) for tokens in stage.survivors) == stage.after
        for tokens, size in zip(stage.survivors, sizes, strict=True):
            assert tokens == sorted(set(tokens))
            assert all(0 <= token < size for token in tokens)
    assert report.visual_tokens_left == alive
    assert 0 < report.flops_saved < 1
    assert 0 < report.kv_saved < report.flops_saved
    mean = sum(report.tokens_per_layer) / len(report.tokens_per_layer)
    assert report.kv_saved == pytest.approx(1 - mean / report.tokens)
    assert set(report.seconds) == {"preprocess", "vision", "prior", "selection", "decoder", "scoring"}
    assert all(seconds >= 0 for seconds in report.seconds.values())
    short, long = report.to_dict(), report.to_dict(survivors=True)
    assert "blocks" not in short
    assert "survivors" not in short["stages"][0]
    assert long["stages"][0]["survivors"] == report.stages[0].survivors
    import json

    json.dumps(long)


def test_a_dense_report_saves_nothing(backbone: Backbone) -> None:
    report = Reranker(backbone, Dense()).rank(*pictures(11, 3)).report
    assert report is not None
    assert (report.stages, report.flops_saved, report.kv_saved) == ([], 0, 0)


# Calibration.


@pytest.mark.slow
def test_a_profile_is_measured_once_logged_and_kept(
    backbone: Backbone, private_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="radical_rerank")
    query, images = pictures(12, 4)
    reranker = Reranker(backbone, "radical")
    assert reranker.profile is None
    ranking = reranker.rank(query, images)
    assert caplog.messages[0].startswith("no trust profile of")
    assert "measuring one on 8 lists" in caplog.messages[0]
    path = Profile.cache_path(backbone.identity)
    assert private_cache in path.parents
    assert path.is_file()
    assert reranker.profile == Profile.load(path)
    other = Reranker(backbone, "radical")
    count = len(caplog.messages)
    assert other.rank(query, images).order == ranking.order
    assert len(caplog.messages) == count


def test_calibration_on_own_lists_is_the_mean_over_lists(backbone: Backbone) -> None:
    lists = [pictures(seed, 5) for seed in (1, 2)]
    each = [calibrate(backbone, [one]) for one in lists]
    both = calibrate(Reranker(backbone, "dense"), lists)
    assert both.lists == 2
    assert both.h_norm is not None
    for layer, value in enumerate(both.h_norm):
        assert value == pytest.approx(sum(p.h_norm[layer] for p in each if p.h_norm is not None) / 2)
    assert both.h_min == min(both.h_norm)
    assert min(both.alpha) == 0
    expected = [(h - both.h_min) / (1 - both.h_min) for h in both.h_norm]
    assert list(both.alpha) == pytest.approx(expected)
    with pytest.raises(CalibrationError, match="at least one list"):
        calibrate(backbone, [])


def test_a_profile_beside_the_model_is_used(
    backbone: Backbone, tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_folders["qwen3_vl"], folder)
    reranker = Reranker.from_pretrained(folder)
    own = replace(PROFILE, fingerprint=reranker.backbone.fingerprint)
    own.save(folder / "radical_profile.json")
    reranker.rank(*pictures(13, 3))
    assert reranker.profile == own


def test_a_model_of_broken_weights_is_not_calibrated(
    tiny_folders: dict[str, Path], private_cache: Path
) -> None:
    backbone = Backbone.from_pretrained(tiny_folders["qwen3_vl"])
    with torch.no_grad():
        backbone.model.model.language_model.layers[2].self_attn.q_proj.weight[:] = torch.nan
    with pytest.raises(CalibrationError, match="cannot be calibrated: the attention of layer 2"):
        Reranker(backbone, "radical").rank(*pictures(13, 3))
    assert not list(private_cache.rglob("*.json"))


# Bad input.


def test_few_candidates(reranker: Reranker) -> None:
    query, images = pictures(14, 1)
    empty = reranker.rank(query, [])
    assert (len(empty), empty.report, list(empty)) == (0, None, [])
    single = reranker.rank(query, images)
    assert (single.order, single[0].score, single[0].document) == ([0], 0.0, images[0])


def test_unusable_documents_are_named_or_skipped(reranker: Reranker, tmp_path: Path) -> None:
    query, images = pictures(15, 3)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    documents: list[Document] = [images[0], broken, images[1], tmp_path / "missing.png", images[2]]
    with pytest.raises(InputError, match=r"document 1 .*broken.png"):
        reranker.rank(query, documents)
    ranking = reranker.rank(query, documents, on_error="skip")
    assert sorted(ranking.order) == [0, 2, 4]
    assert [s.index for s in ranking.skipped] == [1, 3]
    assert "missing.png) does not exist" in ranking.skipped[1].reason
    assert [documents[i] for i in ranking.order] == [r.document for r in ranking]
    rest = reranker.rank(query, images)
    assert [[0, 2, 4][i] for i in rest.order] == ranking.order
    nothing = reranker.rank(query, [broken], on_error="skip")
    assert (len(nothing), len(nothing.skipped)) == (0, 1)
    with pytest.raises(InputError, match="the reference image"):
        reranker.rank(query, images, reference=broken, on_error="skip")


@pytest.mark.parametrize("query", ["", "   ", "\n\t"])
def test_an_empty_query_is_refused(reranker: Reranker, query: str) -> None:
    with pytest.raises(InputError, match="the query is empty"):
        reranker.rank(query, pictures(1, 2)[1])


def test_options_out_of_range_are_refused(backbone: Backbone) -> None:
    images = pictures(1, 2)[1]
    for keep in (0, -0.1, 1.1, float("nan")):
        with pytest.raises(InputError, match="keep must lie in"):
            Reranker(backbone, "radical", keep=keep)
    for options, message in (
        ({"method": "magic"}, "unknown method 'magic'"),
        ({"scorer": "guess"}, "scorer must be one of"),
        ({"window": 53}, "window"),
        ({"window": 10, "stride": 10}, "stride"),
        ({"max_image_tokens": 0}, "max_image_tokens"),
        ({"temperature": 1}, "unknown option 'temperature' of method 'radical'"),
        ({"method": Dense(), "keep": 0.5}, "in the Pruner that you pass"),
    ):
        with pytest.raises(InputError, match=message):
            Reranker(backbone, **options)
    reranker = Reranker(backbone, "dense")
    with pytest.raises(InputError, match="top_k"):
        reranker.rank("red", images, top_k=0)
    with pytest.raises(InputError, match="on_error"):
        reranker.rank("red", images, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="batch_size"):
        reranker.rank_many([], batch_size=0)
    with pytest.raises(InputError, match="not a single document"):
        reranker.rank("red", "picture.png")


def test_logits_that_are_not_finite_are_an_error(tiny_folders: dict[str, Path]) -> None:
    backbone = Backbone.from_pretrained(tiny_folders["internvl_llama"])
    with torch.no_grad():
        backbone.model.lm_head.weight[:] = float("nan")
    with pytest.raises(ScoringError, match="not finite"):
        Reranker(backbone, "dense").rank(*pictures(1, 3))


def test_models_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        Reranker.from_pretrained(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="cannot load the model"):
        Reranker.from_pretrained(tmp_path / "empty")
    with pytest.raises(InputError, match="unknown dtype"):
        Reranker.from_pretrained(tmp_path / "empty", dtype="float99")
    with pytest.raises(InputError, match="unknown method"):
        Reranker.from_pretrained(tmp_path / "empty", method="magic")
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=64).save_pretrained(tmp_path / "llama")
    with pytest.raises(UnsupportedModelError, match="'llama' is not supported"):
        Reranker.from_pretrained(tmp_path / "llama")


def test_an_error_in_one_list_leaves_the_reranker_usable(reranker: Reranker) -> None:
    query, images = pictures(16, 4)
    before = reranker.rank(query, images)
    with pytest.raises(InputError):
        list(reranker.rank_many([(query, images), ("", images)]))
    assert reranker.rank(query, images).order == before.order


def test_results_come_as_they_are_ready(reranker: Reranker) -> None:
    query, images = pictures(17, 3)

    def lists() -> Iterator[tuple[str, list[Image.Image]]]:
        yield query, images
        raise KeyboardInterrupt

    results = reranker.rank_many(lists())
    assert len(next(results)) == 3
    with pytest.raises(KeyboardInterrupt):
        next(results)


def test_progress_goes_to_stderr(reranker: Reranker, capsys: pytest.CaptureFixture[str]) -> None:
    list(reranker.rank_many([pictures(1, 2)] * 2, progress=True))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "ranking" in captured.err


def test_templates_can_be_replaced(backbone: Backbone) -> None:
    shipped = PromptTemplate.load("qwen3_vl")
    query, images = pictures(18, 4)
    default = Reranker(backbone, "dense").rank(query, images)
    other = Reranker(backbone, "dense", template=replace(shipped, intro="images : ")).rank(query, images)
    assert default.report is not None
    assert other.report is not None
    assert default.report.tokens != other.report.tokens


@pytest.mark.parametrize("family", first_fast(["qwen3_vl", "internvl_qwen2"]))
def test_half_precision_ranks_alike(family: str, tiny_folders: dict[str, Path]) -> None:
    """bfloat16 weights run through every stage; scores agree with float32 to bfloat16's own precision."""
    query, images = pictures(19, 5)
    scores = {}
    for dtype in ("float32", "bfloat16"):
        reranker = Reranker.from_pretrained(
            tiny_folders[family],
            RaDiCal(keep=0.9, layers=(3,), alpha=1.0),
            dtype=dtype,
            max_image_tokens=48,
        )
        assert reranker.backbone.model.dtype == getattr(torch, dtype)
        ranking = reranker.rank(query, images)
        scores[dtype] = [score for _, score in sorted((r.index, r.score) for r in ranking)]
    assert scores["bfloat16"] == pytest.approx(scores["float32"], abs=0.15)
    fused = Reranker.from_pretrained(tiny_folders[family], dtype="bfloat16", profile=PROFILE, keep=0.1)
    report = fused.rank(query, images).report
    assert report is not None
    assert report.visual_tokens_left < 0.2 * report.visual_tokens


# Totals, threads, processes.


@pytest.mark.parametrize("scorer", ["logits", "generate"])
def test_scores_are_logs_and_probabilities_are_told(backbone: Backbone, scorer: str) -> None:
    query, images = pictures(3, 6)
    reranker = Reranker(
        backbone, "radical", profile=PROFILE, scorer=scorer, max_new_tokens=6, window=4, stride=2
    )
    if scorer == "generate":
        reranker.backbone = replace_writer(backbone, "B > A > D > C")
    for documents in (images[:4], images):
        ranking = reranker.rank(query, documents)
        probabilities = [result.probability for result in ranking]
        assert probabilities == sorted(probabilities, reverse=True)
        assert len(set(probabilities[:4])) == 4  # none is cut to 1
        assert all(0 < p < 1 for p in probabilities)
        assert probabilities == pytest.approx([math.exp(result.score) for result in ranking])
    assert sum(r.probability for r in reranker.rank(query, images[:4])) == pytest.approx(1)


def replace_writer(backbone: Backbone, text: str) -> Backbone:
    """The same model, which writes this answer."""
    copy = replace(backbone)
    copy.write = lambda inputs, max_new_tokens: [text] * len(inputs["input_ids"])  # type: ignore[method-assign]
    return copy


def test_totals_of_several_windows_add_up(backbone: Backbone) -> None:
    query, images = pictures(4, 9)
    images[0] = images[0].resize((64, 64))  # windows of different sizes
    reranker = Reranker(backbone, "radical", profile=PROFILE, keep=0.3, window=4, stride=2)
    ranking = reranker.rank(query, images)
    totals, reports = ranking.totals, ranking.reports
    assert totals.prompts == len(reports) > 2
    for name in ("tokens", "visual_tokens", "visual_tokens_left", "average_tokens"):
        assert getattr(totals, name) == sum(getattr(report, name) for report in reports)
    assert totals.flops_saved == pytest.approx(
        1 - sum(macs(r.tokens_per_layer, backbone.shape) for r in reports)
        / sum(macs([r.tokens] * backbone.shape.num_layers, backbone.shape) for r in reports)
    )  # fmt: skip
    assert len({report.flops_saved for report in reports}) > 1
    assert sum(totals.seconds.values()) == pytest.approx(sum(sum(r.seconds.values()) for r in reports))
    assert reranker.rank(query, []).totals.prompts == 0


@pytest.mark.slow
def test_threads_share_a_reranker(backbone: Backbone) -> None:
    lists = [pictures(seed, 4) for seed in range(6)]
    reranker = Reranker(backbone, "radical", profile=PROFILE, keep=0.3)
    other = Reranker(backbone, "dense", vision_cache=reranker.vision_cache)
    alone = [(reranker.rank(*one).order, other.rank(*one).order) for one in lists]
    reranker.vision_cache.clear()
    with ThreadPoolExecutor(8) as pool:
        pruned = [pool.submit(reranker.rank, *lists[i % 6]) for i in range(48)]
        dense = [pool.submit(other.rank, *lists[i % 6]) for i in range(12)]
        assert [future.result().order for future in pruned] == [alone[i % 6][0] for i in range(48)]
        assert [future.result().order for future in dense] == [alone[i % 6][1] for i in range(12)]


def test_a_reranker_can_be_pickled(reranker: Reranker) -> None:
    query, images = pictures(6, 4)
    expected = reranker.rank(query, images)
    copy = pickle.loads(pickle.dumps(reranker))
    assert len(copy.vision_cache) == 0
    assert [r.score for r in copy.rank(query, images)] == pytest.approx([r.score for r in expected])


def test_a_forked_process_is_told_that_it_cannot_rank(reranker: Reranker) -> None:
    """OpenMP's threads do not survive a fork: without a word it would hang."""
    query, images = pictures(6, 3)
    reranker.rank(query, images)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            reranker.rank(query, images)
            message = "ranked"
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(writing, message.encode())
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], 30)
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert ready, "the child hangs"
    assert "RadicalError" in (told := os.read(reading, 1000).decode())
    assert "spawn" in told


# Forms of input.


def test_documents_come_in_any_iterable(reranker: Reranker) -> None:
    query, images = pictures(7, 4)
    expected = reranker.rank(query, images).order
    assert reranker.rank(query, (image for image in images)).order == expected
    assert reranker.rank(query, dict(enumerate(images)).values()).order == expected
    arrays = np.stack([np.asarray(image.resize((64, 64))) for image in images])
    assert len(reranker.rank(query, arrays)) == 4
    assert next(reranker.rank_many((q, iter(d)) for q, d in [(query, images)])).order == expected


@pytest.mark.parametrize("documents", [None, 7, "a.png", b"png", Path("a.png"), Image.new("RGB", (8, 8)),
                                       {"a": 1}, np.zeros((8, 8, 3), np.uint8)])  # fmt: skip
def test_one_document_is_no_list(reranker: Reranker, documents: object) -> None:
    with pytest.raises(InputError, match="documents must be a list, not a single"):
        reranker.rank("a red star", documents)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, "3", True])
def test_counts_are_whole_numbers(reranker: Reranker, value: object) -> None:
    for name in ("top_k", "batch_size"):
        with pytest.raises(InputError, match=f"{name} must be a whole number of at least 1"):
            reranker.rank_many([], **{name: value})  # type: ignore[arg-type]
    assert len(reranker.rank(*pictures(1, 3), top_k=np.int64(2))) == 2


def test_truncated_weights_are_named(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folders["qwen3_vl"], tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(InputError, match=f"cannot load the model '{folder}'"):
        Backbone.from_pretrained(folder)


# Templates that think.


def test_a_template_that_can_think_is_told_not_to(
    backbone: Backbone, recwarn: pytest.WarningsRecorder
) -> None:
    think = "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    other = replace(backbone, tokenizer=deepcopy(backbone.tokenizer))
    plain = build_prompt(backbone, PromptTemplate.of(backbone), "red star", [4, 4]).ids
    other.tokenizer.chat_template += think
    assert build_prompt(other, PromptTemplate.of(other), "red star", [4, 4]).ids == plain
    assert not recwarn
    other.tokenizer.chat_template = backbone.tokenizer.chat_template + "<think>"
    with pytest.warns(UserWarning, match="think before it answers"):
        ids = build_prompt(other, PromptTemplate.of(other), "red star", [4, 4]).ids
    assert "</think>" in other.tokenizer.decode(ids[len(plain) :]) or len(ids) > len(plain)


# What a model is, whatever it is called.


def test_the_fingerprint_knows_every_weight_and_the_configuration(tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders["qwen3_vl"]
    one, two = Backbone.from_pretrained(folder), Backbone.from_pretrained(folder)
    first = one.fingerprint
    assert first == two.fingerprint
    assert first != Backbone.from_pretrained(tiny_folders["internvl_qwen2"]).fingerprint
    two.model.config._name_or_path = "another name"
    assert two.fingerprint == first
    weight = two.model.model.language_model.layers[3].mlp.up_proj.weight
    with torch.no_grad():
        kept = weight[5, 7].item()
        weight[5, 7] += 1e-3
        assert two.fingerprint != first
        weight[5, 7] = kept
        assert two.fingerprint == first
        weight[[1, 2]] = weight[[2, 1]]  # the same values elsewhere
        assert two.fingerprint != first
        weight[[1, 2]] = weight[[2, 1]]
    one.model.config.text_config.rms_norm_eps = 1e-3
    assert one.fingerprint != first
    with torch.no_grad():
        half, single = Backbone.from_pretrained(folder, dtype="bfloat16"), two
        single.model.load_state_dict(half.model.state_dict())
    assert half.fingerprint == single.fingerprint != first


# What one document or one query may not do.


SIZES = [((201, 1),), ((1, 201),), ((1, 1),), ((0, 0),), ((9000, 2),), ((2, 9000),)]


@pytest.mark.parametrize(("family", "size"), across(SIZES, SIZES[::4]))
def test_a_document_of_any_size_is_ranked_named_or_skipped(
    family: str, size: tuple[int, int], backbones: dict[str, Backbone]
) -> None:
    query, images = pictures(1, 3)
    documents = [*images[:2], Image.new("RGB", size), images[2]]
    reranker = Reranker(backbones[family], "dense", max_image_tokens=48)
    ranking = reranker.rank(query, documents, on_error="skip")
    skipped = [document.index for document in ranking.skipped]
    assert skipped in ([], [2])
    assert sorted([*ranking.order, *skipped]) == [0, 1, 2, 3]
    if size == (0, 0) or (family.startswith(("qwen", "glm")) and size == (201, 1)):
        assert skipped == [2]
    if skipped:
        assert ranking.order == [i + (i == 2) for i in reranker.rank(query, images).order]
        with pytest.raises(InputError, match="document 2"):
            reranker.rank(query, documents)
        with pytest.raises(InputError, match="the reference image"):
            reranker.rank(query, images, reference=documents[2])


def test_whatever_preparing_a_document_raises_is_that_documents_error(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, images = pictures(1, 4)
    known = backbone.family.preprocess

    def picky(processor: Any, image: Image.Image, max_tokens: int) -> Pixels:
        if image.tobytes() == images[2].tobytes():
            raise RuntimeError("no such picture")
        return known(processor, image, max_tokens)

    monkeypatch.setattr(backbone.family, "preprocess", picky)
    reranker = Reranker(backbone, "dense")
    with pytest.raises(InputError, match="document 2 cannot be prepared for the model: no such picture"):
        reranker.rank(query, images)
    (skipped,) = reranker.rank(query, images, on_error="skip").skipped
    assert skipped.index == 2
    assert "no such picture" in skipped.reason


def test_a_long_query_is_refused_with_its_length(backbone: Backbone) -> None:
    _, images = pictures(1, 2)
    reranker = Reranker(backbone, "dense", max_query_tokens=8)
    assert len(reranker.rank("red " * 8, images)) == 2
    with pytest.raises(InputError, match="the query has 9 tokens, more than the limit of 8"):
        reranker.rank("red " * 9, images)
    assert len(Reranker(backbone, "dense").rank("red " * 2000, images)) == 2


@pytest.mark.parametrize("family", first_fast(TINY_FAMILIES))
def test_a_ranking_stops_between_any_two_layers(family: str, backbones: dict[str, Backbone]) -> None:
    query, images = pictures(1, 3)
    backbone = backbones[family]
    reranker = Reranker(backbone, "radical", keep=0.3, profile=PROFILE, max_image_tokens=48)
    expected = reranker.rank(query, images)
    hooks = hooks_on(backbone.model)  # Hugging Face's own recorders of hidden states, if any
    asked = 0

    def stop_at(number: int) -> Callable[[], bool]:
        def stop() -> bool:
            nonlocal asked
            asked += 1
            return asked > number

        return stop

    reranker.vision_cache.clear()
    (unstopped,) = reranker.rank_many([(query, images)], stop=stop_at(10**9))
    assert unstopped.order == expected.order
    assert [r.score for r in unstopped] == [r.score for r in expected]
    # The decoder's layers, and at least one block of the encoder.
    total = asked
    assert total > backbone.shape.num_layers
    for number in (0, 1, total // 2, total - 1):
        asked = 0
        reranker.vision_cache.clear()
        with pytest.raises(StoppedError):
            list(reranker.rank_many([(query, images)], stop=stop_at(number)))
        assert asked == number + 1
        assert hooks_on(backbone.model) == hooks
    assert [r.score for r in reranker.rank(query, images)] == [r.score for r in expected]


def test_a_stopped_thread_stops_no_other(backbone: Backbone) -> None:
    query, images = pictures(1, 3)
    reranker = Reranker(backbone, "dense")
    with backbone.stopping(lambda: True), ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(reranker.rank, query, images).result()) == 3
        with pytest.raises(StoppedError):
            reranker.rank(query, images)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_picture_is_scaled_as_the_processor_scales_it(family: str, backbones: dict[str, Backbone]) -> None:
    """Ours makes no copies of the whole; what the encoder gets is the same to the bit."""
    processor = backbones[family].image_processor
    draw = torch.Generator().manual_seed(0)
    for size in ((1, 1), (33, 700), (640, 480), (1, 150), (9, 9), (801, 5)):
        noise = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8, generator=draw)
        image = Image.fromarray(noise.numpy())
        for limit in (1, 4, 48, 384):
            least, most = backbones[family].family._pixels(processor, limit)  # type: ignore[attr-defined]
            sizes = {"longest_edge": most, "shortest_edge": least}
            expected = processor([image], size=sizes, return_tensors="pt")
            pixels = backbones[family].preprocess(image, limit)
            assert torch.equal(pixels.values, expected["pixel_values"]), (size, limit)
            assert pixels.grid == tuple(expected["image_grid_thw"][0].tolist())
