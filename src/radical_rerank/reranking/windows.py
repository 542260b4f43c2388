"""Lists longer than a window: overlapping windows from the back, as listwise rerankers do."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def rank_in_windows(
    count: int, window: int, stride: int, score: Callable[[Sequence[int]], Sequence[float]]
) -> list[tuple[int, float]]:
    """Order `count` items by scoring at most `window` of them at a time.

    score: item numbers of one window -> their scores. Windows run from the back of the list to its
    front, `stride` apart; what ranks high in one enters the next. Returns (item, score), best first.
    Scores of different windows do not compare: those behind the last window are shifted down, by one
    constant per window, to where the order puts them.
    """
    order = list(range(count))
    settled: list[list[tuple[int, float]]] = []
    end = count
    while True:
        start = max(0, end - window)
        items = order[start:end]
        scores = score(items)
        ranked = sorted(zip(items, scores, strict=True), key=lambda pair: -pair[1])
        order[start:end] = [item for item, _ in ranked]
        if start == 0:
            settled.append(ranked)
            break
        # The next window ends `stride` earlier: the items behind its end stay where they are.
        next_end = max(end - stride, min(window, count))
        settled.append(ranked[next_end - start :])
        end = next_end
    result: list[tuple[int, float]] = []
    for part in reversed(settled):
        shift = min(0.0, result[-1][1] - part[0][1]) if result and part else 0.0
        result += [(item, score + shift) for item, score in part]
    return result
