"""A budget becomes a schedule: against trying every share."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radical_rerank.method import (
    DecoderShape,
    Schedule,
    alpha_maximin,
    arithmetic,
    counts_within,
    macs,
    nucleus_count,
    plan,
)

SHAPE = DecoderShape(num_layers=12, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=128)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    layers = sorted(draw(st.sets(st.integers(0, 11), min_size=1, max_size=4)))
    steps = [draw(st.floats(0.1, 1)) for _ in layers]
    total = sum(steps)
    return Schedule(tuple(layers), tuple(sum(steps[: h + 1]) / total for h in range(len(steps))))


def test_arithmetic_is_the_cost_of_the_tokens_in_each_layer() -> None:
    # 100 tokens run through layers 0 to 3, 60 through 4 to 7, 30 through the rest.
    slow = macs([100] * 4 + [60] * 4 + [30] * 4, SHAPE)
    assert arithmetic((4, 8), (50, 20), SHAPE, visual=90, text=10) == slow


@given(schedules(), st.integers(50, 900), st.integers(5, 120), st.floats(0.02, 0.98))
def test_the_budget_is_met_where_the_schedule_can(
    schedule: Schedule, visual: int, text: int, flops: float
) -> None:
    dense = arithmetic((), (), SHAPE, visual, text)
    counts = counts_within(schedule, flops * dense, SHAPE, visual, text)
    assert list(counts) == sorted(counts, reverse=True)
    assert all(1 <= count <= visual for count in counts)
    cost = arithmetic(schedule.layers, counts, SHAPE, visual, text)
    least = arithmetic(schedule.layers, schedule.counts(1e-300, visual), SHAPE, visual, text)
    # The obvious version: the nearest cost of a fine grid of shares.
    grid = [math.exp(-i / 50) for i in range(int(50 * math.log(visual) / schedule.exponents[0]) + 2)]
    costs = (arithmetic(schedule.layers, schedule.counts(r, visual), SHAPE, visual, text) for r in grid)
    nearest = min((abs(one - flops * dense) for one in costs), default=math.inf)
    assert abs(cost - flops * dense) <= nearest + 1e-6
    if flops * dense < least:
        assert cost == least


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_nucleus_is_the_smallest_set_that_holds_the_share(values: list[float], share: float) -> None:
    score = torch.tensor(values, dtype=torch.float64)
    count = nucleus_count(score, share)
    ordered = sorted(values, reverse=True)
    total = sum(ordered)
    assert 1 <= count <= len(values)
    assert sum(ordered[:count]) >= share * total - 1e-9
    if count > 1:
        assert sum(ordered[: count - 1]) < share * total


def test_a_schedule_is_made_from_its_shares() -> None:
    schedule = Schedule.of((1, 5, 7), (0.5, 0.25, 0.1))
    assert schedule.shares(0.1) == pytest.approx((0.5, 0.25, 0.1))
    assert Schedule.equal((1, 5)).shares(0.25) == pytest.approx((0.5, 0.25))


def test_a_plan_is_maximin_among_the_first_layers_and_goes_deeper_with_the_budget() -> None:
    alpha = (0.9, 0.8, 0.95, 0.7, 0.99, 0.6, 0.2, 0.8, 0.0, 0.8, 0.4, 0.6)
    layers = tuple(range(12))
    depths = []
    for flops in (0.1, 0.2, 0.3, 0.5, 0.8):
        schedule = plan(layers, alpha, 12, flops)
        depth = max(schedule.layers) + 1
        found = [alpha_maximin(layers[:d], alpha[:d], 4) for d in range(depth, 13)]
        assert list(schedule.layers) in found or schedule.layers == (0,)
        depths.append(depth)
    assert depths == sorted(depths)
    assert plan(layers, alpha, 12, 0.8).layers == tuple(alpha_maximin(layers, alpha, 4))
