"""Every method: the same invariants, and its scoring rule against an obvious slow version."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radical_rerank import Reranker
from radical_rerank.backbones import Backbone, ImageFeatures
from radical_rerank.backbones.engine import at_attention
from radical_rerank.errors import InputError, LayoutError
from radical_rerank.method import discriminative_importance, keep_count, query_relevance
from radical_rerank.pruning import (
    DART,
    METHODS,
    DynResDTI,
    FastV,
    LowRes,
    Pruner,
    PyramidDrop,
    SparseVLM,
    VisionSignals,
    VisionZip,
    build,
)
from radical_rerank.pruning.dynres import shares
from radical_rerank.pruning.images import apportion
from radical_rerank.pruning.sparsevlm import cluster, raters_of, recycling
from tests.cases import (
    LAYERS,
    PROFILE,
    Case,
    draw_list,
    first_fast,
    greedy,
    hooks_on,
    make_case,
    model_of,
    placed,
    stack,
    stock_pixels,
)
from tests.reference import Look, Reference, last_row_rule
from tests.tiny import READABLE, TINY_FAMILIES, on_grid

CUTS = [name for name in METHODS if name not in ("dense", "lowres", "dynres-qrel", "dynres-dti")]
RESIZERS = ["lowres", "dynres-qrel", "dynres-dti"]
SHAPES = [(4, 5), (3, 3), (5, 4), (2, 6)]
# A method's rule sees a family only through the view: one family of each kind of decoder will do.
RULED = [*TINY_FAMILIES[:6], "qwen3_5", "glm4v"]


def method(name: str, keep: float, **options: Any) -> Pruner:
    if name in ("radical", "random"):
        options["profile"] = PROFILE
    return build(name, keep=keep, **options)


def shapes_of(family: str) -> list[tuple[int, int]]:
    return [(2, 1), (1, 1), (3, 1)] if not on_grid(family) else SHAPES


def signals_of(case: Case, seed: int = 0) -> VisionSignals:
    draw = torch.Generator().manual_seed(seed)
    tokens = len(case.layout.positions)
    return VisionSignals(torch.rand(tokens, generator=draw), torch.randn(tokens, 6, generator=draw))


# What holds for every method that drops tokens.


@pytest.mark.parametrize("keep", first_fast([0.2, 0.1, 0.6]))
@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("family", first_fast(RULED))
def test_budget_order_protection_and_decoding(family: str, name: str, keep: float) -> None:
    model = model_of(family)
    case = make_case(family, shapes_of(family), seed=2, reference=(2, 3))
    before = hooks_on(model)
    pruner = method(name, keep)
    visual, text = len(case.layout.positions), case.layout.length - len(case.layout.positions)
    with pruner.on(model, case.layout, [signals_of(case)]) as run, torch.no_grad():
        output = model.generate(
            **case.inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0
        )
        lengths = run.tokens_per_layer
    assert output.shape[1] == case.layout.length + 4
    assert hooks_on(model) == before
    records = run.stages[0]
    left = visual
    stages = pruner.stages(LAYERS)
    if pruner.reads_attention:
        stages = at_attention(stages, READABLE.get(family, range(LAYERS)))
    for stage, record in zip(stages, records, strict=True):
        assert record.before == left
        left = min(left, keep_count(stage.keep, visual if stage.of_all else left))
        assert record.after == left == len(record.survivors)
        assert record.survivors.tolist() == sorted(set(record.survivors.tolist()))
        after = [n for at, n in enumerate(lengths) if at > record.layer]
        assert not after or after[0] <= text + left  # text and the reference's tokens are all there
    if name not in ("radical", "random"):  # these take K equal steps, each rounded up
        assert left == keep_count(keep, visual)
    assert lengths[-1] in (text + left, text + records[-1].before)


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("family", first_fast(["qwen3_vl", "internvl_qwen3"]))
def test_a_batch_is_its_lists_one_by_one(family: str, name: str) -> None:
    model = model_of(family)
    cases = [make_case(family, shapes_of(family)[:n], seed=n, text=6 + n) for n in (3, 2)]
    signals = [signals_of(case, seed) for seed, case in enumerate(cases)]
    pruner = method(name, 0.3)
    with pruner.on(model, [case.layout for case in cases], signals) as run, torch.no_grad():
        batch = stack(cases)
        if not on_grid(family):  # as `generate` counts: keys, and their norms, depend on it
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        together = model(**batch).logits[:, -1]
    for row, case in enumerate(cases):
        with pruner.on(model, case.layout, [signals[row]]) as alone, torch.no_grad():
            single = model(**case.inputs).logits[0, -1]
        for a, b in zip(run.stages[row], alone.stages[0], strict=True):
            assert a.survivors.tolist() == b.survivors.tolist()
        torch.testing.assert_close(together[row], single, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CUTS)
def test_an_exception_leaves_the_model_as_it_was(name: str) -> None:
    model = model_of("qwen3_vl")
    case = make_case("qwen3_vl", SHAPES)
    before = hooks_on(model)
    with pytest.raises(ZeroDivisionError), method(name, 0.2).on(model, case.layout, [signals_of(case)]):
        1 / 0  # noqa: B018
    assert hooks_on(model) == before


@pytest.mark.parametrize("name", [*CUTS, *RESIZERS])
@pytest.mark.parametrize("family", first_fast(["qwen3_vl", "qwen2_5_vl", "internvl_llama"]))
def test_the_reranker_runs_it(name: str, family: str, backbones: dict[str, Backbone]) -> None:
    query, images = draw_list(3, 5)
    images = [image.resize((160, 128)) for image in images]
    reranker = Reranker(backbones[family], method(name, 0.2))
    ranking = reranker.rank(query, images)
    assert sorted(ranking.order) == list(range(5))
    report = ranking.report
    assert report is not None
    budget = 0.2 * report.visual_tokens
    assert report.visual_tokens_left <= math.ceil(budget) + 4
    assert report.visual_tokens_left > 0.3 * budget  # resolutions come in steps, tiles in large ones
    assert 0 < report.flops_saved < 1
    assert min(report.tokens_per_layer) <= report.average_tokens < report.tokens
    again = reranker.rank(query, images)
    assert again.order == ranking.order


# Each rule, against a slow version of it.


def survivors(
    pruner: Pruner, family: str, case: Case, signals: VisionSignals | None = None
) -> list[list[int]]:
    with pruner.on(model_of(family), case.layout, [signals or signals_of(case)]) as run, torch.no_grad():
        model_of(family)(**case.inputs)
    return [record.survivors.tolist() for record in run.stages[0]]


@pytest.mark.parametrize("family", first_fast(RULED))
def test_fastv_keeps_what_the_last_token_looks_at(family: str) -> None:
    case = make_case(family, shapes_of(family), seed=4)
    stages = placed(family, [(2, "after", 0.2)])
    reference = Reference(model_of(family), case, stages, last_row_rule)
    expected = reference.run(0)[0]
    pruner = FastV(keep=0.2, layer=2)
    assert survivors(pruner, family, case) == reference.survivors
    with pruner.on(model_of(family), case.layout), torch.no_grad():
        actual = model_of(family)(**case.inputs).logits[0, -1]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", first_fast(RULED))
def test_pyramiddrop_reads_the_next_layer_at_shares_of_all(family: str) -> None:
    case = make_case(family, shapes_of(family), seed=5)
    total = len(case.layout.positions)
    counts = [math.ceil(total * share) for share in (0.5, 0.25, 0.1)]
    ratios = [count / before - 1e-9 for count, before in zip(counts, [total, *counts], strict=False)]
    stages = [(layer + 1, "before", ratio) for layer, ratio in zip((1, 3, 5), ratios, strict=True)]
    reference = Reference(model_of(family), case, placed(family, stages), last_row_rule)
    reference.run(0)
    kept_by_stage = survivors(PyramidDrop(keep=0.1, layers=(1, 3, 5)), family, case)
    assert [len(kept) for kept in kept_by_stage] == counts
    assert kept_by_stage == reference.survivors


def test_pyramiddrop_never_keeps_less_than_asked() -> None:
    assert [stage.keep for stage in PyramidDrop(keep=0.4).stages(36)] == [0.5, 0.4, 0.4]
    assert [stage.layer for stage in PyramidDrop(keep=0.2).stages(36)] == [8, 16, 24]
    assert len(PyramidDrop(keep=0.2).stages(2)) >= 1


def slow_compact(model: Any, case: Case, cut: int, kept: list[int], tokens: list[int]) -> list[torch.Tensor]:
    """Logits of a run that renumbers after one cut before layer `cut`, decoding the given tokens after it."""
    text = model.model.language_model
    reference = Reference(model, case, [], last_row_rule)
    reference.group = [-1] * (case.layout.length + len(tokens))
    embeds = text.embed_tokens(case.inputs["input_ids"])[0].clone()
    visual = [i for i, token in enumerate(case.ids) if token == model.config.image_token_id]
    features = model.model.get_image_features(pixel_values=case.inputs["pixel_values"], return_dict=True)
    embeds[visual] = features.pooler_output.flatten(0, 1)
    positions = list(case.layout.positions.tolist())
    drop = {p for i, p in enumerate(positions) if i not in kept}
    stay = [p for p in range(len(embeds)) if p not in drop]
    cos, sin = (part[0] for part in text.rotary_emb(embeds[None], torch.arange(len(embeds) + 9)[None]))
    hidden, caches = embeds, []
    for at, layer in enumerate(text.layers):
        if at == cut:
            hidden = hidden[stay]
        n = len(hidden)
        weights, keys, values = reference._attend(layer, hidden, cos[:n], sin[:n], list(range(n)))
        caches.append([keys, values])
        hidden = reference._finish(layer, hidden, weights @ values)
    logits = [model.lm_head(text.norm(hidden[-1]))]
    for token in tokens:
        hidden = text.embed_tokens(torch.tensor([token]))
        for layer, cache in zip(text.layers, caches, strict=True):
            n = cache[0].shape[1]  # the layer's own next number
            q, k, v = reference._project(layer, hidden, cos[n : n + 1], sin[n : n + 1])
            cache[0], cache[1] = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
            weights = reference._softmax(layer, q, cache[0], list(range(n + 1)))
            hidden = reference._finish(layer, hidden, weights @ cache[1])
        logits.append(model.lm_head(text.norm(hidden[-1])))
    return logits


def test_compact_positions_are_renumbered_and_decoding_follows_them() -> None:
    family = "internvl_llama"
    model, case = model_of(family), make_case(family, [(1, 1), (2, 1)], seed=6)
    pruner = PyramidDrop(keep=0.25, layers=(2,), shares=(), positions="compact")
    with pruner.on(model, case.layout) as run, torch.no_grad():
        logits = greedy(model, case.inputs, 4)
    kept = run.stages[0][0].survivors.tolist()
    new = [int(row.argmax()) for row in logits]
    with torch.no_grad():
        expected = slow_compact(model, case, 3, kept, new[:-1])
    for ours, theirs in zip(logits, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    with PyramidDrop(keep=0.25, layers=(2,), shares=()).on(model, case.layout), torch.no_grad():
        original = model(**case.inputs).logits[0, -1]
    assert not torch.allclose(original, logits[0], atol=1e-4)
    # M-RoPE: three axes, one number.
    case = make_case("qwen3_vl", SHAPES)
    with pruner.on(model_of("qwen3_vl"), case.layout), torch.no_grad():
        assert model_of("qwen3_vl")(**case.inputs).logits.isfinite().all()
    with pytest.raises(InputError, match="positions"):
        PyramidDrop(positions="new")


def test_sparsevlm_raters_by_hand() -> None:
    vision = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    text = torch.tensor([[2.0, 0.0], [0.0, 0.0], [0.0, 0.1]])
    share = []
    for t in range(3):
        total = 0.0
        for v in vision:
            logits = [math.exp(float(v @ word)) for word in text]
            total += logits[t] / sum(logits) / 2
        share.append(total)
    expected = [t for t in range(3) if share[t] > sum(share) / 3]
    assert raters_of(vision, text).tolist() == expected == [0]
    assert raters_of(vision, torch.zeros(3, 2)).tolist() == [0, 1, 2]  # none above the mean: all


@pytest.mark.parametrize("family", first_fast(RULED))
def test_sparsevlm_scores_by_its_raters_and_clusters_the_rest(family: str) -> None:
    """Two cuts, the first with recycling written out again; the second sees its consequences."""
    model, case = model_of(family), make_case(family, shapes_of(family), seed=7)
    total = len(case.layout.positions)
    text = model.model.language_model
    words = text.embed_tokens(case.inputs["input_ids"])[0, list(case.layout.rows)]

    def rule(look: Look) -> list[tuple[float, ...]]:
        share = (look.vision @ words.T).softmax(-1).mean(0)
        rows = [row for row, value in zip(look.rows, share, strict=True) if value > share.mean()]
        mean = look.weights.mean(0)[rows].mean(0)
        return [(float(mean[column]),) for column in look.columns]

    keep = math.ceil(0.3 * total - 1e-9) / total
    reference = Reference(model, case, placed(family, [(2, "after", keep)]), rule)
    reference.run(0)
    assert survivors(SparseVLM(keep=0.3, layers=(2,), recycle=0), family, case) == reference.survivors
    # With recycling, fewer are kept as they are, and all of those are among the best.
    clusters, _ = recycling(total, math.ceil(0.3 * total - 1e-9), 0.3)
    assert clusters >= 1
    merged = survivors(SparseVLM(keep=0.3, layers=(2,)), family, case)[0]
    assert len(merged) == len(reference.survivors[0])
    stages = placed(family, [(2, "after", (len(merged) - clusters) / total - 1e-9)])
    best = Reference(model, case, stages, rule)
    best.run(0)
    assert set(best.survivors[0]) <= set(merged)


def test_recycling_counts_towards_the_budget() -> None:
    for alive in (30, 200, 3600):
        for count in (alive // 10, alive // 5, alive // 2):
            clusters, recycled = recycling(alive, count, 0.3)
            assert 0 < clusters < count
            assert recycled == int(0.3 * (alive - count + clusters)) + 1
            assert clusters == int(recycled / 10) + 1
    assert recycling(100, 50, 0) == (0, 0)
    assert recycling(100, 2, 0.3) == (0, 0)


def test_clusters_by_an_obvious_version() -> None:
    draw = torch.Generator().manual_seed(3)
    points = torch.cat([torch.randn(6, 4, generator=draw) * 0.1 + centre for centre in (0.0, 5.0, -5.0)])
    centres, group = cluster(points, 3)
    assert sorted(int(c) // 6 for c in centres) == [0, 1, 2]  # one centre in each heap
    for start in (0, 6, 12):
        assert len(set(group[start : start + 6].tolist())) == 1
    # Density and separation, written out.
    n, k = len(points), 3
    d = [[float((points[i] - points[j]).norm()) / 2 for j in range(n)] for i in range(n)]
    density = [math.exp(-sum(x * x for x in sorted(row)[:k]) / k) for row in d]
    score = []
    for i in range(n):
        denser = [d[i][j] for j in range(n) if density[j] > density[i]]
        score.append(density[i] * (min(denser) if denser else max(max(row) for row in d)))
    assert set(centres.tolist()) == set(sorted(range(n), key=lambda i: -score[i])[:k])


def test_merged_tokens_and_their_deepstack_features_are_means() -> None:
    """A cluster's place goes on with the mean of its members, DeepStack features to come included."""
    from dataclasses import dataclass

    from radical_rerank.pruning import Merge, Stage, StageView

    model, case = model_of("qwen3_vl"), make_case("qwen3_vl", [(2, 2), (2, 2)], seed=8)

    @dataclass(kw_only=True)
    class Halves(Pruner):
        when: str = "before"

        def stages(self, num_layers: int) -> list[Stage]:
            return [Stage(1, 0.5, self.when)]  # type: ignore[arg-type]

        def select(self, view: StageView, count: int) -> Merge:
            mix = torch.zeros(4, 8)
            for i in range(4):
                mix[i, 2 * i : 2 * i + 2] = 0.5
            return Merge(torch.tensor([0, 2, 4, 6]), mix)

    seen: dict[int, torch.Tensor] = {}
    text = model.model.language_model
    spans = [p for span in case.layout.candidates for p in span]
    for when, first in (("before", 1), ("after", 2)):
        handles = [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, at=at: seen.__setitem__(at, args[0].clone()), with_kwargs=True
            )
            for at, layer in enumerate(text.layers)
        ]
        with torch.no_grad():
            model(**case.inputs)
        plain = dict(seen)
        for handle in handles:
            handle.remove()
        with Halves(when=when).on(model, case.layout), torch.no_grad():
            handles = [  # after the engine's own hooks
                layer.register_forward_pre_hook(
                    lambda _, args, kwargs, at=at: seen.__setitem__(at, args[0].clone()), with_kwargs=True
                )
                for at, layer in enumerate(text.layers)
            ]
            model(**case.inputs)
            for handle in handles:
                handle.remove()
        pairs = plain[first][0, spans].view(4, 2, -1).mean(1)
        kept = [p for p in range(case.layout.length) if p not in spans or spans.index(p) % 2 == 0]
        mine = seen[first][0, [kept.index(spans[i]) for i in (0, 2, 4, 6)]]
        torch.testing.assert_close(mine, pairs)


@pytest.mark.parametrize("family", first_fast(RULED))
def test_dart_takes_the_least_like_of_each_pivot(family: str) -> None:
    model, case = model_of(family), make_case(family, shapes_of(family), seed=9)
    text, total = model.model.language_model, len(case.layout.positions)
    entering: dict[int, torch.Tensor] = {}
    handles = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, at=at: entering.__setitem__(
                at, (args[0] if args else kwargs["hidden_states"])[0].clone()
            ),
            with_kwargs=True,
        )
        for at, layer in enumerate(text.layers)
    ]
    rotary: list[torch.Tensor] = []
    handles.append(text.rotary_emb.register_forward_hook(lambda _, args, out: rotary.extend(out)))
    with torch.no_grad():
        model(**case.inputs)
    for handle in handles:
        handle.remove()
    reference = Reference(model, case, [], last_row_rule)
    with torch.no_grad():
        _, keys, _ = reference._project(text.layers[1], entering[1], rotary[0][0], rotary[1][0])
        states = text.norm(entering[2])
    groups = text.config.num_attention_heads // text.config.num_key_value_heads
    norm = keys[::groups].abs().sum((0, 2))
    visual = case.layout.positions.tolist()
    rows = list(case.layout.rows)
    count = math.ceil(0.4 * total - 1e-9)
    pivots = sorted(visual, key=lambda p: -float(norm[p]))[:4]
    words = sorted(rows, key=lambda p: -float(norm[p]))[:4]
    kept = set(pivots)
    for number, pivot in enumerate([*pivots, *words]):
        quota = (count - 4) // 8 + (number < (count - 4) % 8)
        pool = [p for p in visual if p not in kept]
        likeness = {p: float(torch.cosine_similarity(states[p], states[pivot], dim=0)) for p in pool}
        kept |= set(sorted(pool, key=lambda p: likeness[p])[:quota])
    numbers = survivors(DART(keep=0.4, layer=1), family, case)[0]
    assert [visual[i] for i in numbers] == sorted(kept)
    assert len(survivors(DART(keep=2.5 / total), family, case)[0]) == 3  # fewer than the pivots


def test_visionzip_by_hand() -> None:
    """One image of eight tokens, budget four: three dominant, one contextual."""
    case = make_case("qwen3_vl", [(2, 4)], seed=1)
    attention = torch.tensor([0.1, 0.9, 0.2, 0.8, 0.3, 0.05, 0.7, 0.0])
    keys = torch.eye(8, 3)
    model = model_of("qwen3_vl")
    entering: list[torch.Tensor] = []
    pruner = VisionZip(keep=0.5)
    with pruner.on(model, case.layout, [VisionSignals(attention, keys)]) as run, torch.no_grad():
        layer = model.model.language_model.layers[0]
        handle = layer.register_forward_pre_hook(
            lambda _, args, kwargs: entering.append(args[0][0].clone()), with_kwargs=True
        )
        model(**case.inputs)
        handle.remove()
    # Dominant: 1, 3, 6. The rest 0, 2, 4, 5, 7: the first is the only target, all others join it.
    assert run.stages[0][0].survivors.tolist() == [0, 1, 3, 6]
    with torch.no_grad():
        output = model.model.get_image_features(
            case.inputs["pixel_values"], case.inputs["image_grid_thw"], return_dict=True
        )
    tokens = output.pooler_output[0]
    start = case.layout.candidates[0].start
    expected = [tokens[0] + tokens[[2, 4, 5, 7]].mean(0), tokens[1], tokens[3], tokens[6]]
    torch.testing.assert_close(entering[0][start : start + 4], torch.stack(expected))


def test_visionzip_never_looks_across_images() -> None:
    case = make_case("qwen3_vl", SHAPES, seed=2)
    signals = signals_of(case)
    first = survivors(VisionZip(keep=0.3), "qwen3_vl", case, signals)[0]
    other = VisionSignals(signals.attention.clone(), signals.keys)
    size = len(case.layout.candidates[0])
    other.attention[:size] = other.attention[:size].flip(0) * 100
    second = survivors(VisionZip(keep=0.3), "qwen3_vl", case, other)[0]
    assert [t for t in first if t >= size] == [t for t in second if t >= size]
    assert first != second
    with pytest.raises(LayoutError, match="pass signals="):
        VisionZip().on(model_of("qwen3_vl"), case.layout)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.floats(0.02, 1))
def test_shares_of_a_budget_are_exact(sizes: list[int], keep: float) -> None:
    count = keep_count(keep, sum(sizes))
    parts = apportion(sizes, count)
    assert sum(parts) == count
    assert all(0 <= part <= size for part, size in zip(parts, sizes, strict=True))
    assert all(abs(part - count * size / sum(sizes)) < 1 for part, size in zip(parts, sizes, strict=True))


@pytest.mark.parametrize("family", first_fast(TINY_FAMILIES))
def test_the_encoder_s_signals_are_its_own_attention(family: str, backbones: dict[str, Backbone]) -> None:
    """Against the attention that the encoder itself reports, image by image."""
    backbone = backbones[family]
    images = [
        image.resize(size)
        for image, size in zip(draw_list(2, 3)[1], [(96, 96), (128, 64), (64, 96)], strict=True)
    ]
    pixels = [backbone.preprocess(image, 400) for image in images]
    together = backbone.encode(pixels, signals=True)
    plain = backbone.encode(pixels)
    for feature, alone, p in zip(together, plain, pixels, strict=True):
        torch.testing.assert_close(feature.tokens, alone.tokens)
        assert alone.signals is None
        assert feature.signals is not None
        assert len(feature.signals.attention) == len(feature.signals.keys) == len(feature.tokens)
        expected = slow_signals(backbone, family, p)
        torch.testing.assert_close(feature.signals.attention, expected, atol=1e-6, rtol=1e-3)


def slow_tile_signals(backbone: Backbone, family: str, p: Any) -> torch.Tensor:
    """For towers that report their attention weights themselves."""
    base = backbone.model.model
    tower = base.vision_model if hasattr(base, "vision_model") else base.vision_tower
    blocks = tower.transformer.layers if family == "mistral3" else None
    if blocks is None:
        blocks = tower.encoder.layer if family.startswith("internvl") else tower.encoder.layers
    block = blocks[-2 if family == "llava_next" else -1]  # LLaVA-NeXT leaves out the last one
    attention = block.self_attn if hasattr(block, "self_attn") else block.attention
    old = tower.config._attn_implementation
    tower.config._attn_implementation = "eager"
    weights: list[torch.Tensor] = []
    handle = attention.register_forward_hook(lambda _, args, out: weights.append(out[1]))
    with torch.no_grad():
        base.get_image_features(**stock_pixels(family, [p]), return_dict=True)
    handle.remove()
    tower.config._attn_implementation = old
    mean = weights[0].mean(1)
    cls = family.startswith("internvl") or family == "llava_next"
    received = mean[:, 0, 1:] if cls else mean.mean(1)
    if family == "internvl_lite":  # the first token is the class token, which VisionZip always keeps
        received[:, 0] = 1.0
    if family.startswith("llava"):  # arranged by the model's own code
        options = {"vision_aspect_ratio": "anyres_max_9"}
        if family == "llava_next":
            options = {"vision_feature_select_strategy": "full"}
        packed, _ = base.pack_image_features([received[..., None]], torch.tensor([p.grid[2:]]), **options)
        return packed[0][:, 0]
    joined = 1 if family == "internvl_lite" else 2  # patches along each side of a token
    sides = [side // 8 for side in p.grid] if family == "mistral3" else [math.isqrt(received.shape[1])] * 2
    result = []
    for tile in received:
        grid = tile.view(*sides)
        for r in range(0, sides[0], joined):
            for c in range(0, sides[1], joined):
                result.append(grid[r : r + joined, c : c + joined].mean())
    return torch.stack(result)


def slow_signals(backbone: Backbone, family: str, p: Any) -> torch.Tensor:
    """Eager attention weights of the last block, with the model's own code."""
    base = backbone.model.model
    if family == "mistral3" or not on_grid(family):
        return slow_tile_signals(backbone, family, p)
    module = importlib.import_module(type(base).__module__)
    tower = base.visual
    seen: dict[str, Any] = {}
    attn = tower.blocks[-1].attn
    handle = attn.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(kwargs, x=args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    with torch.no_grad():
        base.get_image_features(p.values, torch.tensor([p.grid]), return_dict=True)
        handle.remove()
        q, k, _ = (
            attn.qkv(seen["x"]).reshape(len(seen["x"]), 3, attn.num_heads, -1).permute(1, 0, 2, 3).unbind(0)
        )
        q, k = module.apply_rotary_pos_emb_vision(q, k, *seen["position_embeddings"])
        weights_ = torch.stack(
            [(q[:, h] @ k[:, h].T * attn.scaling).softmax(-1) for h in range(attn.num_heads)]
        )
        received = weights_.mean(0).mean(0).view(-1, 4).mean(-1)
    if family == "qwen2_5_vl":
        # Where each token of the encoder's order ends up: follow the merged tokens themselves.
        order = window_order(tower, p)
        ordered = torch.empty_like(received)
        ordered[order] = received
        return ordered
    return received


def window_order(tower: Any, p: Any) -> torch.Tensor:
    """Window by window, row by row: the token numbers in the order in which the blocks see them."""
    _, h, w = p.grid
    rows, columns = h // 2, w // 2
    side = tower.window_size // 2 // tower.patch_size
    order = []
    for top in range(0, rows, side):
        for left in range(0, columns, side):
            for r in range(top, min(top + side, rows)):
                for c in range(left, min(left + side, columns)):
                    order.append(r * columns + c)
    return torch.tensor(order)


# Resolution.


@given(
    st.lists(st.integers(4, 400), min_size=1, max_size=20),
    st.floats(0.05, 0.9),
    st.integers(0, 1000),
)
def test_dynamic_shares_meet_the_budget(sizes: list[int], keep: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    signal = torch.rand(len(sizes), generator=draw).tolist()
    tokens = shares(sizes, signal, keep, 0.5)
    budget = keep * sum(sizes)
    assert sum(tokens) <= budget + len(sizes)
    assert sum(tokens) >= budget - len(sizes) - 1
    assert all(1 <= t <= size for t, size in zip(tokens, sizes, strict=True))
    for a, b in zip(range(len(sizes)), range(1, len(sizes)), strict=False):
        if signal[a] > signal[b]:
            assert tokens[a] / sizes[a] >= tokens[b] / sizes[b] - 1 / sizes[a] - 1 / sizes[b]


def test_dynres_gives_more_to_candidates_with_a_higher_mean(backbones: dict[str, Backbone]) -> None:
    backbone = backbones["qwen3_vl"]
    query, images = draw_list(5, 4)
    images = [image.resize((128, 128)) for image in images]
    reranker = Reranker(backbone, DynResDTI(keep=0.3))
    report = reranker.rank(query, images).report
    assert report is not None
    sizes = [sum(b.rows * b.columns for b in blocks) for blocks in report.blocks]
    (features,) = [backbone.encode([backbone.preprocess(image, 384) for image in images])]
    means = slow_means(reranker, query, features)
    assert sizes[means.index(max(means))] >= sizes[means.index(min(means))]
    assert sum(sizes) <= 0.3 * report.visual_tokens + 4


@pytest.mark.parametrize("method", ["lowres", "dynres-qrel"])
@pytest.mark.parametrize("keep", [0.1, 0.2, 0.5])
def test_small_images_use_the_budget_as_far_as_whole_rows_allow(
    backbone: Backbone, method: str, keep: float
) -> None:
    query, images = draw_list(7, 8)
    images = [image.resize((48 + 16 * (i % 4), 80)) for i, image in enumerate(images)]
    pruner = build(method, keep=keep)
    reranker = Reranker(backbone, pruner)
    report = reranker.rank(query, images).report
    assert report is not None
    budget = keep_count(keep, report.visual_tokens)
    assert report.visual_tokens_left <= budget
    if method == "lowres":  # every factor, one by one
        sizes = [backbone.count_tokens(image, 384) for image in images]
        limits = pruner.resize(sizes, lambda: pytest.fail("LowRes need not look"))
        assert limits is not None
        tried = [
            sum(
                backbone.count_tokens(image, int(limit * step / 100))
                for image, limit in zip(images, limits, strict=True)
            )
            for step in range(100, 1000)
        ]
        assert report.visual_tokens_left >= max(total for total in tried if total <= budget)


def slow_means(reranker: Reranker, query: str, features: list[ImageFeatures]) -> list[float]:
    tokenizer = reranker.backbone.tokenizer
    ids = tokenizer(" " + query, add_special_tokens=False)["input_ids"]
    q = reranker.backbone.model.get_input_embeddings().weight[ids].mean(0).detach()
    tokens = torch.cat([f.tokens for f in features])
    owner = torch.arange(len(features)).repeat_interleave(torch.tensor([len(f.tokens) for f in features]))
    score = discriminative_importance(tokens, q, owner)
    assert query_relevance(tokens, q).shape == score.shape
    return [float(score[owner == k].mean()) for k in range(len(features))]


def test_lowres_shrinks_every_image(backbones: dict[str, Backbone]) -> None:
    for family in ("qwen3_vl", "internvl_qwen2"):
        query, images = draw_list(6, 3)
        images = [image.resize((160, 160)) for image in images]
        most = 16 if not on_grid(family) else 384  # one tile
        dense = Reranker(backbones[family], "dense", max_image_tokens=most).rank(query, images).report
        low = Reranker(backbones[family], LowRes(keep=0.25), max_image_tokens=most).rank(query, images).report
        assert dense is not None
        assert low is not None
        assert low.visual_tokens == dense.visual_tokens
        assert 0.5 * 0.25 * low.visual_tokens <= low.visual_tokens_left <= 0.25 * low.visual_tokens
        assert low.flops_saved > 0.2
        assert low.stages == []
