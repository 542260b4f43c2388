"""The paper's formulas against slow, obvious versions and their stated properties."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radical_rerank.method import (
    STRATEGIES,
    DecoderShape,
    LayerCost,
    alpha_maximin,
    arithmetic_fusion,
    attention_information,
    candidate_uniqueness,
    discriminative_importance,
    exact_uniqueness,
    geometric_fusion,
    keep_ratio,
    kv_bytes,
    macs,
    min_max,
    normalized_entropy,
    query_relevance,
    saliency,
    saving,
    text_averaged,
    tokens_per_layer,
    top_k,
    trust,
)

# What.


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() @ b.double()) / (a.double().norm() * b.double().norm()))


def tokens_of(sizes: list[int], seed: int = 0, width: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return torch.randn(sum(sizes), width, generator=rng) + 0.5, owner


def test_uniqueness_and_relevance_token_by_token() -> None:
    tokens, owner = tokens_of([3, 5, 2])
    query = torch.randn(12, generator=torch.Generator().manual_seed(9))
    prototype = tokens.mean(dim=0)
    unique, relevant = candidate_uniqueness(tokens), query_relevance(tokens, query)
    exact = exact_uniqueness(tokens, owner)
    for i, token in enumerate(tokens):
        assert float(unique[i]) == pytest.approx(1 - cosine(token, prototype), abs=1e-6)
        assert float(relevant[i]) == pytest.approx(max(cosine(token, query), 0), abs=1e-6)
        nearest = max(cosine(token, tokens[j]) for j in range(len(tokens)) if owner[j] != owner[i])
        assert float(exact[i]) == pytest.approx(1 - nearest, abs=1e-6)
    assert (relevant == 0).any()
    torch.testing.assert_close(discriminative_importance(tokens, query, owner), unique * relevant)
    words = torch.randn(4, 12, generator=torch.Generator().manual_seed(10))
    nearest_word = query_relevance(tokens, words, signed=True)
    for i, token in enumerate(tokens):
        assert float(nearest_word[i]) == pytest.approx(max(cosine(token, word) for word in words), abs=1e-6)
    torch.testing.assert_close(
        discriminative_importance(tokens, words, owner, signed=True), unique * nearest_word
    )
    torch.testing.assert_close(discriminative_importance(tokens, query, owner, exact=True), exact * relevant)


def test_exact_uniqueness_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, owner = tokens_of([7, 4, 9, 1])
    whole = exact_uniqueness(tokens, owner)
    monkeypatch.setattr("radical_rerank.method.what._BLOCK", 50)
    torch.testing.assert_close(exact_uniqueness(tokens, owner), whole)


def test_a_single_candidate_is_all_equally_unique() -> None:
    tokens, owner = tokens_of([6])
    assert exact_uniqueness(tokens, owner).tolist() == [1.0] * 6


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.randoms(use_true_random=False), st.booleans())
def test_permuting_candidates_permutes_dti(sizes: list[int], rng: random.Random, exact: bool) -> None:
    tokens, owner = tokens_of(sizes, seed=len(sizes))
    query = torch.ones(12)
    order = list(range(len(sizes)))
    rng.shuffle(order)
    places = torch.cat([(owner == k).nonzero()[:, 0] for k in order])
    moved_owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor([sizes[k] for k in order]))
    before = discriminative_importance(tokens, query, owner, exact=exact)
    after = discriminative_importance(tokens[places], query, moved_owner, exact=exact)
    torch.testing.assert_close(after, before[places], atol=1e-6, rtol=1e-5)


distributions = st.lists(st.floats(0, 1), min_size=2, max_size=30).filter(lambda x: sum(x) > 1e-3)


@given(distributions)
def test_attention_information_sums_with_its_negative_part_to_the_kl_gap(raw: list[float]) -> None:
    p = torch.tensor(raw, dtype=torch.float64)
    p = p / p.sum()
    information = attention_information(p)
    assert torch.equal(information > 0, p * len(p) > 1)
    kl = sum(float(x) * math.log(len(p) * float(x)) for x in p if x > 0)
    negative = sum(min(float(x) * math.log(len(p) * float(x)), 0) for x in p if x > 0)
    assert float(information.sum()) + negative == pytest.approx(kl, abs=1e-9)
    assert 1 - float(normalized_entropy(p)) == pytest.approx(kl / math.log(len(p)), abs=1e-9)


def test_saliency_falls_back_to_uniform_only_when_all_are_zero() -> None:
    assert saliency(attention_information(torch.full((4,), 0.25))).tolist() == [0.25] * 4
    assert saliency(torch.tensor([0.0, 0.1, 0.4])).tolist() == pytest.approx([0.0, 0.25, 1.0])
    # Not the fallback: equal but positive information.
    assert saliency(torch.tensor([0.3, 0.3])).tolist() == [0.0, 0.0]


def test_min_max() -> None:
    assert min_max(torch.tensor([2.0, 4.0, 3.0])).tolist() == [0.0, 1.0, 0.5]
    assert min_max(torch.tensor([5.0, 5.0])).tolist() == [0.0, 0.0]
    assert min_max(torch.empty(0)).tolist() == []


# When.


def test_text_averaged_ignores_rows_that_see_nothing() -> None:
    attention = torch.tensor([[0.1, 0.3], [0.0, 0.0], [0.2, 0.2]])
    assert text_averaged(attention).tolist() == pytest.approx([(0.25 + 0.5) / 2, (0.75 + 0.5) / 2])
    assert text_averaged(torch.zeros(2, 4)).tolist() == [0.25] * 4


def test_entropy_at_its_ends() -> None:
    assert float(normalized_entropy(torch.full((10,), 0.1))) == pytest.approx(1)
    assert float(normalized_entropy(torch.tensor([0.0, 1.0, 0.0]))) == 0
    assert float(normalized_entropy(torch.tensor([1.0]))) == 0


def test_trust_maps_the_sharpest_layer_to_0_and_uniform_to_1() -> None:
    assert trust(torch.tensor([1.0, 0.6, 0.8])).tolist() == pytest.approx([1.0, 0.0, 0.5])
    assert trust(torch.tensor([0.9, 0.7]), h_min=0.6).tolist() == pytest.approx([0.75, 0.25])
    assert trust(torch.tensor([1.0, 1.0])).tolist() == [1.0, 1.0]


def test_fusion_at_its_ends_and_its_veto() -> None:
    d, s = torch.tensor([0.2, 0.9, 0.0]), torch.tensor([0.8, 0.0, 0.5])
    torch.testing.assert_close(geometric_fusion(d, s, 1.0), d.clamp(min=1e-6))
    torch.testing.assert_close(geometric_fusion(d, s, 0.0), s.clamp(min=1e-6))
    assert geometric_fusion(d, s, 0.5).argmax() == 0  # 0.9 with a zero beside it is vetoed
    assert arithmetic_fusion(d, s, 0.5).tolist() == pytest.approx([0.5, 0.45, 0.25])
    slow = [max(float(a), 1e-6) ** 0.3 * max(float(b), 1e-6) ** 0.7 for a, b in zip(d, s, strict=True)]
    assert geometric_fusion(d, s, 0.3).tolist() == pytest.approx(slow, rel=1e-5)


@given(st.integers(2, 70), st.floats(0.01, 0.99))
def test_tokens_at_the_floor_of_both_channels_tie_exactly(count: int, alpha: float) -> None:
    floor = torch.zeros(count)
    assert len(geometric_fusion(floor, floor, alpha).unique()) == 1


# Where.

# α of Qwen3-VL-4B at the layers that the paper names.
PUBLISHED = {
    4: 0.63, 7: 0.84, 12: 0.83, 14: 0.82, 15: 0.67, 17: 0.50, 21: 0.50, 22: 0.43, 24: 0.22, 25: 0.18,
    26: 0.03, 27: 0.04, 29: 0.00, 30: 0.20, 33: 0.10, 34: 0.39,
}  # fmt: skip


def interpolated() -> dict[int, float]:
    """All 36 layers: straight lines between the published points, the shallow plateau before them."""
    known = sorted(PUBLISHED)
    curve = {}
    for layer in range(36):
        below = max((k for k in known if k <= layer), default=None)
        above = min((k for k in known if k >= layer), default=None)
        if below is None:
            curve[layer] = 0.83
        elif above is None:
            curve[layer] = PUBLISHED[below]
        else:
            part = (layer - below) / (above - below) if above > below else 0
            curve[layer] = PUBLISHED[below] + part * (PUBLISHED[above] - PUBLISHED[below])
    return curve


@pytest.mark.parametrize("curve", [PUBLISHED, interpolated()], ids=["points", "interpolated"])
@pytest.mark.parametrize(
    ("K", "gap", "layers"),
    [
        (3, 1, [7, 22, 29]),
        (3, 2, [7, 22, 29]),
        (4, 1, [7, 22, 24, 29]),
        (4, 2, [7, 22, 24, 29]),
        (5, 1, [4, 7, 22, 24, 29]),
        (5, 2, [4, 7, 22, 24, 29]),
        (4, 3, [4, 7, 22, 29]),
        (4, 4, [7, 15, 22, 29]),
        (4, 5, [7, 15, 22, 29]),
        (4, 6, [7, 15, 22, 29]),
    ],
)
def test_alpha_maximin_gives_the_published_schedules(
    curve: dict[int, float], K: int, gap: int, layers: list[int]
) -> None:
    assert alpha_maximin(list(curve), list(curve.values()), K, gap=gap) == layers


def test_alpha_maximin_breaks_ties_and_relaxes_the_gap() -> None:
    # All equal: the shallowest anchor, then the shallowest allowed.
    assert alpha_maximin(range(6), [0.5] * 6, 3, gap=2) == [0, 2, 4]
    # No layer is 10 away from layer 1: the gap is given up, the farthest in α is taken.
    assert alpha_maximin(range(4), [0.9, 0.0, 0.3, 0.5], 2, gap=10) == [0, 1]
    assert alpha_maximin([3], [0.2], 4) == [3]


def brute_force_maximin(layers: list[int], alpha: Sequence[float], K: int, gap: int) -> list[int]:
    value = dict(zip(layers, alpha, strict=True))
    chosen = [min(layers, key=lambda x: (value[x], x))]
    while len(chosen) < min(K, len(layers)):
        allowed = [x for x in layers if x not in chosen and min(abs(x - c) for c in chosen) >= gap]
        allowed = allowed or [x for x in layers if x not in chosen]
        chosen.append(min(allowed, key=lambda x: (-min(abs(value[x] - value[c]) for c in chosen), x)))
    return sorted(chosen)


curves = st.lists(st.integers(0, 1000), min_size=2, max_size=40).map(lambda x: [v / 1000 for v in x])


@given(curves, st.integers(1, 6), st.integers(1, 8))
def test_alpha_maximin_equals_its_definition(alpha: list[float], K: int, gap: int) -> None:
    # Distances in whole thousandths, so that the definition has no rounding of its own.
    layers = list(range(len(alpha)))
    exact = [round(a * 1000) for a in alpha]
    assert alpha_maximin(layers, alpha, K, gap=gap) == brute_force_maximin(layers, exact, K, gap)


@given(curves, st.integers(1, 5), st.integers(1, 4), st.sampled_from(sorted(STRATEGIES)))
def test_every_strategy_gives_distinct_layers_in_order(
    alpha: list[float], K: int, gap: int, name: str
) -> None:
    layers = list(range(2, 2 + len(alpha)))
    chosen = STRATEGIES[name](layers, alpha, K, gap=gap, seed=3)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(layers)
    expected = min(K, len(layers))
    assert 1 <= len(chosen) <= expected if name == "deep_only" else len(chosen) == expected
    assert chosen == STRATEGIES[name](layers, alpha, K, gap=gap, seed=3)


def test_the_other_strategies_on_curves_worked_out_by_hand() -> None:
    layers = list(range(8))
    # Σ(1−α) = 4; a third is passed at layer 1 (1.5), two thirds at layer 5 (2.75 of 4).
    alpha = [0.25, 0.25, 1.0, 0.75, 0.5, 0.5, 0.5, 0.25]
    assert STRATEGIES["cumulative_information"](layers, alpha, 2) == [1, 5]
    # Steepest into layer 2 (0.75), then 3, 4 and 7 alike (0.25): the shallowest that is far enough.
    assert STRATEGIES["max_gradient"](layers, alpha, 2, gap=2) == [2, 4]
    assert STRATEGIES["max_gradient"](layers, alpha, 2, gap=5) == [2, 7]
    # Quantiles 1/3 and 2/3 of 0 … 0.7 are 0.2333 and 0.4667.
    rising = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert STRATEGIES["alpha_quantile"](layers, rising, 2) == [2, 5]
    # Maximin takes 0 (anchor), 7 and 3 or 4; the shallow half goes.
    assert STRATEGIES["deep_only"](layers, rising, 2) == [7]
    # Maxima at 2 (1.0) and 5 (0.6), minima at 4 (0.1) and 6 (0.2).
    wave = [0.5, 0.7, 1.0, 0.4, 0.1, 0.6, 0.2, 0.9]
    assert STRATEGIES["local_extrema"](layers, wave, 2) == [2, 4]
    assert STRATEGIES["local_extrema"](layers, wave, 4) == [2, 4, 5, 6]
    draws = {tuple(STRATEGIES["random"](layers, wave, 3, seed=seed)) for seed in range(20)}
    assert len(draws) > 5


def test_deep_only_on_the_published_points_is_the_published_choice() -> None:
    assert STRATEGIES["deep_only"](list(PUBLISHED), list(PUBLISHED.values()), 4) == [22, 24, 29]


@given(st.floats(0.01, 1), st.integers(1, 8))
def test_keep_ratios_multiply_to_the_budget(R: float, K: int) -> None:
    assert keep_ratio(R, K) ** K == pytest.approx(R)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.data())
def test_top_k_keeps_the_best_in_order_with_ties_as_told(values: list[int], data: st.DataObject) -> None:
    score = torch.tensor(values, dtype=torch.float32)
    ties = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=len(values), max_size=len(values))))
    count = data.draw(st.integers(0, len(values)))
    slow = sorted(range(len(values)), key=lambda i: (-values[i], -int(ties[i]), i))[:count]
    assert top_k(score, count, [ties]).tolist() == sorted(slow)


# Cost.

QWEN3_VL_4B = DecoderShape(num_layers=36, hidden=2560, heads=32, kv_heads=8, head_dim=128, mlp=9728)


@pytest.mark.parametrize(("keep", "flops", "kv"), [(0.2, 43.8, 39.0), (0.1, 51.8, 47.1)], ids=["20%", "10%"])
def test_the_paper_s_savings_of_radical(keep: float, flops: float, kv: float) -> None:
    """3904 tokens, 3600 of them visual, layers [7, 22, 24, 29]; the paper's own table, Flickr30K."""
    visual, total, stages = 3600, 3904, []
    for layer in (7, 22, 24, 29):
        visual = math.ceil(visual * keep**0.25)
        stages.append((layer, "before", 304 + visual))
    counts = tokens_per_layer(total, stages, 36)
    dense = [total] * 36
    assert macs(dense, QWEN3_VL_4B) / 1e12 == pytest.approx(18.68, abs=0.005)
    assert 100 * saving(macs(counts, QWEN3_VL_4B), macs(dense, QWEN3_VL_4B)) == pytest.approx(flops, abs=1.2)
    assert 100 * saving(kv_bytes(counts, QWEN3_VL_4B), kv_bytes(dense, QWEN3_VL_4B)) == pytest.approx(
        kv, abs=0.5
    )


def test_tokens_leave_before_or_after_a_layer() -> None:
    assert tokens_per_layer(10, [(1, "before", 6), (2, "after", 3)], 5) == [10, 6, 6, 3, 3]


COUNTED = ["internvl_qwen2", "qwen3_vl_moe", "internvl_qwen3_moe", "qwen3_5", "qwen3_5_moe"]


@pytest.mark.parametrize("family", COUNTED)
def test_macs_equal_the_flop_counter_on_a_tiny_decoder(family: str) -> None:
    """Of a mixture, the active experts; of a linear layer, all but its products with the state."""
    from torch.utils.flop_counter import FlopCounterMode

    from radical_rerank.backbones import decoder_shape
    from tests.cases import model_of

    # Eager attention multiplies in full, as the formula counts; a flop is half a multiply-accumulate. Torch
    # runs the recurrence in chunks, one multiplication of matrices after the other: it is counted apart.
    model, length = model_of(family, "eager"), 30
    text, shape = model.model.language_model, decoder_shape(model.config)
    embeds = torch.randn(1, length, 64)
    if "moe" in family:  # else they run as one grouped product, which the counter does not know
        model.set_experts_implementation("eager")
    apart = 0
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), without_chunks(model), counter:
        text(inputs_embeds=embeds, use_cache=False)
    for layer in text.layers:
        if hasattr(layer, "linear_attn"):
            net = layer.linear_attn
            apart += 3 * net.num_v_heads * net.head_k_dim * net.head_v_dim * length
            # Torch's convolution also runs over the padding at the end, which is cut off.
            apart -= net.conv1d.weight.numel() * (net.conv_kernel_size - 1)
    assert counter.get_total_flops() == 2 * (macs([length] * shape.num_layers, shape) - apart)


@contextmanager
def without_chunks(model: Any) -> Iterator[None]:
    """Gated DeltaNets element by element, which a counter of matrix products does not see."""
    module: Any = importlib.import_module(type(model).__module__)
    chunked = getattr(module, "torch_chunk_gated_delta_rule", None)
    if chunked is not None:
        module.torch_chunk_gated_delta_rule = module.torch_recurrent_gated_delta_rule
    try:
        yield
    finally:
        if chunked is not None:
            module.torch_chunk_gated_delta_rule = chunked


def test_a_recurrence_takes_three_products_with_its_state() -> None:
    """Read, write and answer, written out token by token in the reference."""
    from torch.utils.flop_counter import FlopCounterMode

    from tests.cases import make_case, model_of
    from tests.reference import Reference, last_row_rule

    model, length = model_of("qwen3_5"), 10
    layer = model.model.language_model.layers[0]
    net, hidden = layer.linear_attn, torch.randn(length, 64)
    reference = Reference(model, make_case("qwen3_5", [(1, 1)]), [], last_row_rule)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        reference._recur(layer, hidden, [])
    projections = sum(
        part.weight.numel()
        for part in (net.in_proj_qkv, net.in_proj_z, net.in_proj_a, net.in_proj_b, net.out_proj)
    )
    state = net.num_v_heads * net.head_k_dim * net.head_v_dim
    assert counter.get_total_flops() == 2 * length * (projections + 3 * state)


def test_a_linear_layer_caches_a_state_and_no_tokens() -> None:
    from radical_rerank.backbones import decoder_shape
    from tests.tiny import tiny_config

    shape = decoder_shape(tiny_config("qwen3_5"))
    assert [cost.cached > 0 for cost in shape.costs] == [layer in (1, 4, 6) for layer in range(8)]
    few, many = kv_bytes([10] * 8, shape), kv_bytes([30] * 8, shape)
    assert many - few == 2 * 20 * 3 * 2 * 2 * 16
    # 5 states of 4 heads x 8 x 12, and the last 3 inputs of a convolution over 2 x 16 + 48 channels.
    assert few == 2 * (10 * 3 * 2 * 2 * 16 + 5 * (4 * 8 * 12 + 3 * 80))
    window = DecoderShape(2, 8, 2, 1, 4, 16, (LayerCost(1, cached=8, window=5), LayerCost(1, cached=8)))
    assert kv_bytes([12, 12], window) == 2 * 8 * (5 + 12)
    assert kv_bytes([3, 3], window) == 2 * 8 * (3 + 3)
