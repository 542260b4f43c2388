"""Scorers, windows and the vision cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radical_rerank.backbones import ImageFeatures
from radical_rerank.errors import ScoringError
from radical_rerank.pruning import Layout
from radical_rerank.reranking.encoding import VisionCache
from radical_rerank.reranking.permutation import (
    Permutation,
    parse_permutation,
    permutation_scores,
)
from radical_rerank.reranking.prompt import Prompt
from radical_rerank.reranking.windows import rank_in_windows


def scores_of(logits: torch.Tensor, identifiers: list[int]) -> list[float]:
    layout = Layout(4, (range(1),), (1,))
    return Prompt([0] * 4, layout, identifiers).scores(logits).scores


def test_scores_are_log_probabilities_among_the_identifiers() -> None:
    logits = torch.tensor([9.0, 1.0, 2.0, 0.0])
    scores = scores_of(logits, [1, 3])
    assert scores == pytest.approx([math.log(math.e / (math.e + 1)), math.log(1 / (math.e + 1))])
    for bad in (math.nan, math.inf):
        with pytest.raises(ScoringError, match="not finite"):
            scores_of(torch.tensor([0.0, bad]), [0, 1])
    scores_of(torch.tensor([0.0, 1.0, math.nan]), [0, 1])  # what is not asked for does not matter


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B > A > C", Permutation([1, 0, 2])),
        ("[B] > [A] > [C]", Permutation([1, 0, 2])),
        ("B, A\nC.", Permutation([1, 0, 2])),
        ("B > B > A > C", Permutation([1, 0, 2], repeated=1)),
        ("C > Z > A", Permutation([2, 0, 1], unknown=1, missing=1)),
        ("Ranking: C", Permutation([2, 0, 1], unknown=1, missing=2)),
        ("A good match is B, then C > A", Permutation([1, 2, 0], unknown=4)),
        ("A is not it. The best is C", Permutation([2, 0, 1], unknown=7, missing=2)),
        ("1. B\n2. A\n3. C", Permutation([1, 0, 2])),
        ("C and B look alike, so: B > C > A", Permutation([1, 2, 0], unknown=5)),
        ("B (a dog) > A (a cat) > C", Permutation([1, 0, 2], unknown=4)),
        ("<think>A > B > C? No, C is red.</think>B > A > C", Permutation([1, 0, 2])),
        ("A first, maybe</think>\n\nC > A > B", Permutation([2, 0, 1])),
        ("B > A > C <think>or A > B", Permutation([1, 0, 2])),
    ],
)
def test_permutations_are_parsed_and_every_repair_is_counted(text: str, expected: Permutation) -> None:
    parsed = parse_permutation(text, "ABC")
    assert parsed == expected
    assert parsed.repairs == expected.repeated + expected.unknown + expected.missing


@pytest.mark.parametrize("text", ["", "no idea", "x > y", "AB > CA", "<think>B > A > C", "1 > 2 > 3"])
def test_text_without_identifiers_is_an_error_not_an_order(text: str) -> None:
    with pytest.raises(ScoringError, match="none of the identifiers A to C"):
        parse_permutation(text, "ABC")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[2] > [1] > [4] > [3]", Permutation([1, 0, 3, 2])),
        ("2, 1\n4 3", Permutation([1, 0, 3, 2])),
        ("[2] > [2] > [7] > [12] > [1]", Permutation([1, 0, 2, 3], repeated=1, unknown=2, missing=2)),
        ("The best is [3], then [1]", Permutation([2, 0, 1, 3], unknown=3, missing=2)),
        ("<think>[1] > [2]</think>[4] > [3] > [2] > [1]", Permutation([3, 2, 1, 0])),
    ],
)
def test_identifiers_may_be_digits(text: str, expected: Permutation) -> None:
    assert parse_permutation(text, "1234") == expected
    with pytest.raises(ScoringError, match="none of the identifiers 1 to 4"):
        parse_permutation("A > B > 12", "1234")


@given(st.permutations(list(range(12))))
def test_a_written_order_comes_back(order: list[int]) -> None:
    names = "ABCDEFGHIJKL"
    parsed = parse_permutation(" > ".join(names[i] for i in order), names)
    assert (parsed.order, parsed.repairs) == (order, 0)
    scores = permutation_scores(order)
    assert sorted(range(12), key=lambda i: -scores[i]) == order
    assert max(scores) <= 0  # logs, as the other scorer's
    assert sum(map(math.exp, scores)) == pytest.approx(1)
    assert math.exp(scores[order[0]] - scores[order[3]]) == pytest.approx(4)


@given(st.integers(1, 130), st.integers(2, 52), st.data())
def test_windows_cover_everything_and_find_the_best(count: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window - 1))
    quality = data.draw(st.permutations(list(range(count))))
    calls: list[int] = []

    def score(items: Sequence[int]) -> list[float]:
        calls.append(len(items))
        top = max(quality[i] for i in items)
        return [float(quality[i] - top) for i in items]  # comparable inside a window only

    result = rank_in_windows(count, window, stride, score)
    order = [item for item, _ in result]
    scores = [value for _, value in result]
    assert sorted(order) == list(range(count))
    assert all(a >= b for a, b in pairwise(scores))
    assert max(calls) <= window
    if count <= window:
        assert order == sorted(range(count), key=lambda i: -quality[i])
        assert calls == [count]
    # An exact comparison carries the best `window - stride` of all to the very front.
    head = min(window - stride, count)
    assert order[:head] == sorted(range(count), key=lambda i: -quality[i])[:head]


def features(size: int) -> ImageFeatures:
    return ImageFeatures(torch.zeros(size, 4), (), (1,), ())


def test_the_cache_is_bounded_and_forgets_the_oldest() -> None:
    cache = VisionCache(max_bytes=3 * 10 * 16)
    for name in "abc":
        cache.put(name, features(10))
    assert cache.get("a") is not None  # used: now the youngest
    cache.put("d", features(10))
    assert cache.get("b") is None
    assert {name for name in "abcd" if cache.get(name)} == {"a", "c", "d"}
    assert cache.bytes == 3 * 10 * 16
    cache.put("huge", features(1000))
    assert cache.get("huge") is None
    assert len(cache) == 3
    cache.clear()
    assert (len(cache), cache.bytes) == (0, 0)


def test_a_cached_image_does_not_keep_its_batch_alive() -> None:
    batch = torch.zeros(1000, 4)
    cache = VisionCache(1 << 20)
    cache.put("a", ImageFeatures(batch[:10], (batch[10:20],), (1,), ()))
    kept = cache.get("a")
    assert kept is not None
    assert kept.tokens.untyped_storage().nbytes() == 10 * 16
    assert kept.deepstack[0].untyped_storage().nbytes() == 10 * 16
