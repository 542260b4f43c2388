"""What a scene shows, and which scenes match a description."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radical_rerank.embedded.scenes.world import (
    COLOURS,
    PLACES,
    RELATIONS,
    SHAPES,
    Description,
    Phrase,
    Thing,
    stands,
)
from tests.embedded.matching import obvious_match

slots = st.tuples(st.integers(0, 3), st.integers(0, 3))
small_things = st.builds(
    Thing, st.sampled_from(SHAPES[:3]), st.sampled_from(COLOURS[:3]), st.just("small"), slots
)
maybe = st.none() | st.sampled_from(COLOURS[:3])
phrases = st.builds(
    Phrase, maybe, st.none() | st.sampled_from(SHAPES[:3]), st.none(), st.none() | st.sampled_from(PLACES)
)


@given(
    st.lists(small_things, max_size=5, unique=True),
    st.lists(phrases, min_size=2, max_size=2),
    st.none() | st.sampled_from(RELATIONS),
)
def test_matching_is_its_definition(things: list[Thing], two: list[Phrase], relation: str | None) -> None:
    description = Description(tuple(two), relation)
    assert description.matches(things) == obvious_match(description, things)


def test_places_and_relations_worked_out_by_hand() -> None:
    a = Thing("star", "red", "small", (0, 3))
    b = Thing("ring", "blue", "large", (1, 1))
    assert a.places() == {"left", "bottom"}
    assert b.places() == set()  # its centre is the picture's
    assert stands(a, "left of", b)
    assert stands(a, "below", b)
    assert not stands(a, "right of", b)
    assert Description((Phrase("red", "star"), Phrase("blue", "ring")), "left of").text() == (
        "a red star left of a blue ring"
    )
    text = Description(
        (Phrase("orange", None, None, "top"),), None, (Phrase("blue", "ring", "large"),)
    ).text()
    assert text == "an orange thing at the top with a large blue ring"
