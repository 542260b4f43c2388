"""Lists, composed lists and questions have exactly one answer."""

from __future__ import annotations

import pytest

from radical_rerank.embedded.scenes.drawing import Scene
from radical_rerank.embedded.scenes.lists import make_composed, make_list, make_questions
from tests.embedded.matching import obvious_match


@pytest.mark.parametrize("count", [4, 8, 20, 50])
@pytest.mark.parametrize("similarity", [0.1, 0.7, 1.0])
def test_a_list_has_exactly_one_match_per_description(count: int, similarity: float) -> None:
    for seed in range(3):
        item = make_list("test", seed, count, queries=3, similarity=similarity)
        assert len(item.scenes) == count
        assert len({d.text() for d in item.descriptions}) == 3
        for description, target in zip(item.descriptions, item.targets, strict=True):
            fits = [i for i, s in enumerate(item.scenes) if obvious_match(description, list(s.things))]
            assert fits == [target]
            for phrase in description.shared:
                assert all(any(phrase.fits(t) for t in s.things) for s in item.scenes)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_matches_a_description_whose_scene_is_left_out(seed: int) -> None:
    whole = make_list("test", seed, 16, queries=8)
    hidden = {*whole.targets[:3], 5}
    item = whole.without(hidden)
    assert len(item.scenes) == 16 - len(hidden)
    for description, target, before in zip(item.descriptions, item.targets, whole.targets, strict=True):
        fits = [i for i, s in enumerate(item.scenes) if obvious_match(description, list(s.things))]
        assert fits == ([] if before in hidden else [target])
        assert (target == -1) == (before in hidden)
    composed = make_composed("test", seed, 12, queries=5)
    gone = composed.changes[0].target
    left = composed.without([gone])
    for one, other in zip(left.changes, composed.changes, strict=True):
        assert (
            one.target == -1
            if other.target == gone
            else left.scenes[one.target] == composed.scenes[other.target]
        )


def test_more_similar_lists_are_more_alike() -> None:
    def shared_kinds(similarity: float) -> float:
        total = 0.0
        for seed in range(12):
            item = make_list("validation", seed, 10, similarity=similarity)
            kinds = [{(t.colour, t.shape) for t in s.things if t.size == "small"} for s in item.scenes]
            pairs = [(a, b) for i, a in enumerate(kinds) for b in kinds[:i]]
            total += sum(len(a & b) / len(a | b) for a, b in pairs) / len(pairs)
        return total

    assert shared_kinds(0.1) < shared_kinds(0.6) < shared_kinds(1.0)


def test_things_never_share_a_slot() -> None:
    for seed in range(20):
        scenes = [*make_list("train", seed, 6).scenes, make_questions("train", seed)[0].scene]
        composed = make_composed("train", seed, 8)
        for scene in [*scenes, composed.reference, *composed.scenes]:
            taken = [slot for thing in scene.things for slot in thing.slots]
            taken += [slot for _, slot in scene.oddities]
            assert len(taken) == len(set(taken))
            assert all(0 <= x < 4 and 0 <= y < 4 for x, y in taken)


@pytest.mark.parametrize("seed", range(4))
def test_composed_queries_have_one_answer(seed: int) -> None:
    item = make_composed("test", seed, 20, queries=3)

    def kinds(scene: Scene) -> list[tuple[str, str, str]]:
        return sorted((t.colour, t.shape, t.size) for t in scene.things)

    for change in item.changes:
        _, shape, _, colour, _, _, old = change.text.split()
        reference = kinds(item.reference)
        wanted = sorted((colour if (c, s) == (old, shape) else c, s, z) for c, s, z in reference)
        assert wanted != reference
        assert [i for i, s in enumerate(item.scenes) if kinds(s) == wanted] == [change.target]
        with_change = [s for s in item.scenes if any(change.new.fits(t) for t in s.things)]
        assert len(with_change) > 1  # the words alone do not decide
        with_rest = [s for s in item.scenes if all(any(p.fits(t) for t in s.things) for p in change.kept)]
        assert len(with_rest) > 1  # nor does likeness to the reference


@pytest.mark.parametrize("count", [1, 2, 4, 50, 120])
def test_composed_lists_of_any_length(count: int) -> None:
    item = make_composed("test", 4, count, queries=6)
    assert len(item.scenes) == count
    assert 1 <= len(item.changes) <= count


def test_questions_are_answered_by_the_scene() -> None:
    answers = {"yes": 0, "no": 0}
    for seed in range(60):
        for question in make_questions("test", seed, 3):
            words = question.text.split()
            things = question.scene.things
            if words[0] == "what":
                assert [t.colour for t in things if t.shape == words[4]] == [question.answer]
            else:
                there = any((t.colour, t.shape) == (words[3], words[4]) for t in things)
                assert question.answer == ("yes" if there else "no")
                answers[question.answer] += 1
    assert 0.4 < answers["yes"] / sum(answers.values()) < 0.6
