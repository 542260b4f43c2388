"""Diagnosis and calibration against the slow version of slow.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from radical_rerank import Reranker
from radical_rerank.backbones import Backbone, slow
from radical_rerank.lab.diagnosis import Evidence, Without, diagnose, evidence, spearman, summary, z_score
from radical_rerank.reranking import calibrate
from radical_rerank.reranking.prompt import PromptTemplate, build_prompt, sizes_of
from tests.cases import draw_list, make_case, model_of
from tests.lab.slow import SlowList, slow_z
from tests.tiny import READABLE

SIZES = ((64, 64), (96, 64), (32, 64), (128, 96), (64, 32))
"""a sum over a candidate's tokens is not a mean only where they differ in number"""


def pictures(seed: int, count: int = 4) -> tuple[str, list[Image.Image]]:
    query, images = draw_list(seed, count)
    return query, [image.resize(size) for image, size in zip(images, SIZES, strict=False)]


@pytest.fixture(scope="module")
def eager(tiny_folders: dict[str, Path]) -> dict[str, Backbone]:
    return {
        family: Backbone.from_pretrained(tiny_folders[family], attn_implementation="eager")
        for family in ("qwen3_vl", "internvl_llama")
    }


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl_llama"])
def test_evidence_is_what_the_stock_model_shows(
    family: str, backbones: dict[str, Backbone], eager: dict[str, Backbone]
) -> None:
    query, images = pictures(1)
    template = replace(PromptTemplate.of(backbones[family]), intro="Look at these. ")
    measured = evidence(backbones[family], query, images, template=template, max_image_tokens=24)
    plain = SlowList(eager[family], query, images, template, 24)
    sizes = {len(candidate) for candidate in plain.prompt.layout.candidates}
    assert len(sizes) > 1 or family != "qwen3_vl"
    assert measured.contribution == pytest.approx(plain.contribution(), rel=2e-3, abs=1e-7)
    assert min(measured.contribution) > 1e-4  # far above what rounding does
    assert measured.layers == list(range(backbones[family].shape.num_layers))
    assert measured.h_norm == pytest.approx(plain.h_norm(), rel=1e-4)
    for layer, p in enumerate(plain.attention()):
        assert measured.attention[layer] == pytest.approx(plain.means(p), rel=1e-3)
    priors = plain.priors()
    assert set(measured.priors) == set(priors)
    for name, values in priors.items():
        assert measured.priors[name] == pytest.approx(plain.means(values), rel=1e-3, abs=1e-6)


def test_evidence_of_a_hybrid_decoder_is_that_of_its_layers_with_attention(
    backbones: dict[str, Backbone],
) -> None:
    """And a candidate is removed before the first layer: no state of a linear layer has seen it."""
    backbone, (query, images) = backbones["qwen3_5"], pictures(1)
    measured = evidence(backbone, query, images, max_image_tokens=24)
    assert measured.layers == list(READABLE["qwen3_5"])
    features = backbone.encode([backbone.preprocess(image, 24) for image in images])
    prompt = build_prompt(backbone, PromptTemplate.of(backbone), query, sizes_of(features))
    inputs, columns = backbone.inputs([prompt.ids], features), prompt.layout.positions.tolist()
    seen: dict[str, Any] = {}
    handle = backbone.text.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    with slow.eager(backbone), slow.attention_of(backbone, prompt.layout.rows, columns) as full:
        stock = slow.stock_logits(backbone, inputs)[0, -1]
    handle.remove()
    for layer, h_norm, means in zip(measured.layers, measured.h_norm, measured.attention, strict=True):
        p = (full[layer] / full[layer].sum(dim=1, keepdim=True)).mean(dim=0)
        assert h_norm == pytest.approx(float(-(p * p.log()).sum() / np.log(len(p))), rel=1e-4)
        sizes = [len(candidate) for candidate in prompt.layout.candidates]
        assert means == pytest.approx([float(part.mean()) for part in p.split(sizes)], rel=1e-3)
    expected = []
    for candidate in prompt.layout.candidates:
        rest = [place for place in range(len(prompt.ids)) if place not in candidate]
        with torch.no_grad():
            hidden = backbone.text(
                inputs_embeds=seen["inputs_embeds"][:, rest], position_ids=seen["position_ids"][..., rest]
            ).last_hidden_state[0, -1]
            other = backbone.model.lm_head(hidden)
        changed = (logits[prompt.identifiers].softmax(-1) for logits in (stock, other))
        expected.append(float(torch.sub(*changed).abs().sum() / 2))
    assert measured.contribution == pytest.approx(expected, rel=2e-3, abs=1e-7)
    assert min(expected) > 1e-4


@pytest.mark.slow
def test_z_and_h_norm_are_means_over_lists_of_the_exact_figures() -> None:
    """z against the null of all 120 permutations; 4,000 drawn ones come close."""
    first = Evidence(
        contribution=[0.1, 0.5, 0.2, 0.3, 0.4],
        layers=[1, 4],
        attention=[[1, 5, 2, 3, 4], [5, 1, 2, 3, 4]],
        h_norm=[0.9, 0.5],
        priors={"U": [1, 2, 3, 4, 5]},
    )
    second = Evidence(
        contribution=[0.3, 0.1, 0.4, 0.2, 0.6],
        layers=[1, 4],
        attention=[[2, 1, 1, 3, 4], [3, 5, 5, 1, 2]],
        h_norm=[0.7, 0.1],
        priors={"U": [2, 2, 2, 1, 5]},
    )
    lists = [first, second]
    measured = summary(lists, permutations=4000)
    assert measured.lists == 2
    assert measured.layers == (1, 4)
    assert measured.h_norm == pytest.approx([0.8, 0.3])
    for layer in (0, 1):
        exact = [slow_z(one.attention[layer], one.contribution) for one in lists]
        assert measured.z[layer] == pytest.approx(sum(exact) / 2, abs=0.08)
    exact = [slow_z(one.priors["U"], one.contribution) for one in lists]
    assert measured.references["U"] == pytest.approx(sum(exact) / 2, abs=0.08)
    assert measured.pearson == pytest.approx(1.0 if measured.z[1] > measured.z[0] else -1.0)
    assert summary(lists) == summary(lists)


def test_a_diagnosis_is_the_summary_of_its_lists(backbone: Backbone) -> None:
    lists = [pictures(seed) for seed in (1, 2)]
    each = [evidence(backbone, query, images, max_image_tokens=24) for query, images in lists]
    done: list[str] = []

    def progress(items: Iterable[Any], label: str, *, total: int | None = None) -> Iterator[Any]:
        for item in items:
            yield item
            done.append(label)

    assert diagnose(backbone, lists, max_image_tokens=24, progress=progress) == summary(each)
    assert done == ["diagnosis"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("size", [9, 24])
def test_calibration_measures_the_reranker_s_own_prompt(
    size: int, backbone: Backbone, eager: dict[str, Backbone]
) -> None:
    """With its template and its image size, not with the defaults."""
    own = PromptTemplate.of(backbone)
    lists = [pictures(seed) for seed in (1, 2)]
    curves = {}
    for template in (own, replace(own, intro="Look: ", ask_logits="Which of them shows {query}?\n")):
        reranker = Reranker(backbone, "dense", template=template, max_image_tokens=size)
        measured = calibrate(reranker, lists).h_norm
        assert measured is not None
        slow = [SlowList(eager["qwen3_vl"], *one, template, size).h_norm() for one in lists]
        assert measured == pytest.approx([(a + b) / 2 for a, b in zip(*slow, strict=True)], rel=1e-5)
        curves[template.intro] = measured
    first, second = curves.values()
    assert first != pytest.approx(second, rel=1e-5)  # else the template would not be seen


def test_spearman_and_z() -> None:
    assert spearman(np.array([1, 2, 3, 4]), np.array([10, 20, 30, 400])) == pytest.approx(1)
    assert spearman(np.array([1, 2, 3, 4]), np.array([4, 3, 2, 1])) == pytest.approx(-1)
    assert spearman(np.array([1, 2, 2, 4]), np.array([1, 2, 3, 4])) == pytest.approx(0.9486832980505138)
    assert spearman(np.ones(4), np.arange(4)) == 0
    rng = np.random.default_rng(0)
    a = rng.random(20)
    assert z_score(a, a, 400, rng) == pytest.approx(19**0.5, rel=0.15)  # ρ = 1, the null's deviation 1/√(N−1)
    assert abs(np.mean([z_score(a, rng.random(20), 100, rng) for _ in range(60)])) < 0.45


@pytest.mark.slow
def test_diagnosis_runs_on_any_model(backbone: Backbone, tiny_folders: dict[str, Path]) -> None:
    lists = [draw_list(seed, 4) for seed in range(2)]
    measured = diagnose(backbone, lists, permutations=1000, max_image_tokens=16)
    assert len(measured.z) == len(measured.h_norm) == backbone.shape.num_layers
    assert set(measured.references) == {"U", "Q", "U×Q"}
    assert all(0 < h <= 1 for h in measured.h_norm)
    assert -1 <= measured.pearson <= 1
    # And the figures are those of the slow version, whose null is exact.
    eager = Backbone.from_pretrained(tiny_folders["qwen3_vl"], attn_implementation="eager")
    slow = [SlowList(eager, *one, PromptTemplate.of(backbone), 16) for one in lists]
    contributions = [one.contribution() for one in slow]
    h_norm = np.mean([one.h_norm() for one in slow], axis=0).tolist()
    assert measured.h_norm == pytest.approx(h_norm, rel=1e-4)
    z = [
        [slow_z(one.means(p), contribution) for p in one.attention()]
        for one, contribution in zip(slow, contributions, strict=True)
    ]
    assert measured.z == pytest.approx(np.mean(z, axis=0).tolist(), abs=0.15)
    for name, value in measured.references.items():
        exact = [slow_z(a.means(a.priors()[name]), c) for a, c in zip(slow, contributions, strict=True)]
        assert value == pytest.approx(np.mean(exact), abs=0.15)


def test_masking_a_candidate_is_dropping_its_tokens(backbone: Backbone) -> None:
    """Against the same prompt with those tokens hidden from every row."""
    model, case = model_of("internvl_llama"), make_case("internvl_llama", [(1, 1), (1, 1), (1, 1)])
    span = case.layout.candidates[1]
    length = case.layout.length
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    allowed[:, span.start : span.stop] = False
    allowed[span.start : span.stop, span.start : span.stop] = torch.eye(len(span), dtype=torch.bool)
    mask = torch.zeros(1, 1, length, length).masked_fill(~allowed, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(**{**case.inputs, "attention_mask": mask}).logits[0, -1]
        with Without().on(model, replace(case.layout, key=1)):
            actual = model(**case.inputs).logits[0, -1]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
