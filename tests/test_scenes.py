"""The embedded world: what a scene shows, who matches a description, and that a seed is a seed."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radical_rerank.embedded.scenes import drawing
from radical_rerank.embedded.scenes.drawing import SPLITS, Scene, render
from radical_rerank.embedded.scenes.lists import make_composed, make_list, make_questions
from radical_rerank.embedded.scenes.training.batches import (
    WORDS,
    Packed,
    collate,
    encode_images,
    label_cells,
    patchify,
    shown_by,
)
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

slots = st.tuples(st.integers(0, 3), st.integers(0, 3))
small_things = st.builds(
    Thing, st.sampled_from(SHAPES[:3]), st.sampled_from(COLOURS[:3]), st.just("small"), slots
)


def obvious_match(description: Description, things: list[Thing]) -> bool:
    """Try every ordered choice of different things."""
    from itertools import permutations

    phrases = [*description.phrases, *description.shared]
    for chosen in permutations(things, len(phrases)):
        good = all(
            (p.colour is None or p.colour == t.colour)
            and (p.shape is None or p.shape == t.shape)
            and (p.size is None or p.size == t.size)
            and (p.place is None or p.place in t.places())
            for p, t in zip(phrases, chosen, strict=True)
        )
        if good and (description.relation is None or stands(chosen[0], description.relation, chosen[1])):
            return True
    return False


maybe = st.none() | st.sampled_from(COLOURS[:3])
phrases = st.builds(
    Phrase, maybe, st.none() | st.sampled_from(SHAPES[:3]), st.none(), st.none() | st.sampled_from(PLACES)
)


@given(
    st.lists(small_things, max_size=5, unique=True),
    st.lists(phrases, min_size=2, max_size=2),
    st.none() | st.sampled_from(RELATIONS),
)
def test_matching_is_its_definition(things, two, relation) -> None:
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


def test_the_same_seed_gives_the_same_bytes() -> None:
    def digest() -> str:
        # Banks are built anew: nothing may depend on what was drawn before.
        for bank in (drawing._sprites, drawing._oddities, drawing._background):
            bank.cache_clear()
        value = hashlib.sha256()
        item = make_list("test", 5, 6, queries=2)
        for image in item.images:
            value.update(image.tobytes())
        value.update(" ".join(d.text() for d in item.descriptions).encode())
        composed = make_composed("test", 5, 6)
        value.update(composed.changes[0].text.encode() + composed.images[3].tobytes())
        return value.hexdigest()

    first = digest()
    make_list("train", 1, 4).images  # noqa: B018
    assert digest() == first


def test_splits_share_no_sprite_and_no_background() -> None:
    def sprites(split: str) -> set[bytes]:
        return {m.tobytes() + bytes(m.shape) for bank in drawing._sprites(split).values() for m in bank}

    def backgrounds(split: str) -> set[bytes]:
        return {drawing._background(split, n).tobytes() for n in range(drawing._BACKGROUNDS)}

    for kind in (sprites, backgrounds):
        banks = [kind(split) for split in SPLITS]
        assert all(len(bank) > 50 for bank in banks)
        assert sum(map(len, banks)) == len(set().union(*banks))
    texts = [make_list(split, 0, 6).images[0].tobytes() for split in SPLITS]
    assert len(set(texts)) == 3


def test_cells_show_the_things_that_are_there() -> None:
    """The colour of the cells that a thing fills is the thing's colour."""
    checked = 0
    for seed in range(30):
        item = make_list("test", seed, 4)
        for scene, (image, cover) in zip(item.scenes, item.rendered, strict=True):
            assert cover.shape == (len(scene.things), scene.height // 16, scene.width // 16)
            pixels = np.asarray(image, dtype=float)
            for number, thing in enumerate(scene.things):
                assert shown_by(cover)[number].any()
                for row, column in zip(*np.nonzero(cover[number] > 0.9), strict=True):
                    cell = pixels[16 * row : 16 * row + 16, 16 * column : 16 * column + 16].mean((0, 1))
                    nearest = min(COLOURS, key=lambda c: np.abs(cell - drawing._RGB[c]).sum())
                    assert nearest == thing.colour
                    checked += 1
    assert checked > 20


def test_cell_labels() -> None:
    things = (Thing("star", "red", "small", (0, 0)), Thing("ring", "blue", "large", (2, 2)))
    cover = np.zeros((2, 2, 2), dtype=np.float32)
    cover[0, 0] = [0.5, 0.08]
    cover[1, 1] = [0.0, 0.9]
    labels = label_cells(things, cover)
    assert labels.dominant.tolist() == [0, -1, -1, 1]

    def shown(cell: int, value: int) -> set[str]:
        return {WORDS[i] for i in (labels.words[cell] == value).nonzero()[:, 0].tolist()}

    assert shown(0, 1) == {"red", "star", "small", "left", "top"}
    assert shown(1, -1) == {"red", "star", "small", "left", "top"}
    assert shown(2, 1) == shown(2, -1) == set()
    assert shown(3, 1) == {"blue", "ring", "large", "right", "bottom"}


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


def test_a_smaller_picture_shows_the_same_things() -> None:
    scene = make_list("test", 0, 1).scenes[0]
    image, cover = render(scene)
    small, less = drawing.shrink(image, cover, 0.5)
    assert (
        (small.height // 16, small.width // 16)
        == less.shape[1:]
        == tuple(round(side / 2) for side in cover.shape[1:])
    )
    # A thing keeps its share of the picture, and the fullest cell is where it was.
    np.testing.assert_allclose(less.mean((1, 2)), cover.mean((1, 2)), rtol=0.02)
    for before, after in zip(cover, less, strict=True):
        old, new = (np.array(np.unravel_index(c.argmax(), c.shape)) / c.shape for c in (before, after))
        assert np.abs(old - new).max() <= 0.5


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


# The model's own tokenizer and prompt.


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory):
    from radical_rerank.embedded.scenes.training.model import (
        make_config,
        make_model,
        make_tokenizer,
        save_model,
    )

    tokenizer = make_tokenizer()
    model = make_model(make_config(tokenizer), seed=3)
    with torch.no_grad():  # the first weights are zero where layers write: give them something to say
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.normal_(std=0.05)
    folder = tmp_path_factory.mktemp("embedded")
    save_model(folder, model, tokenizer)
    return folder


def test_words_and_identifiers_are_different_tokens(untrained) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(untrained)
    tokens = tokenizer.convert_ids_to_tokens
    assert tokens(tokenizer("query: A small Red star left of a ring answer:a")["input_ids"]) == [
        "query", ":", "▁a", "▁small", "▁red", "▁star", "▁left", "▁of", "▁a", "▁ring", "▁answer", ":", "a",
    ]  # fmt: skip
    assert tokens(tokenizer(" a zebra")["input_ids"]) == ["▁a", "<unk>"]
    for seed in range(40):
        text = " " + make_list("train", seed, 4).descriptions[0].text()
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def test_patches_are_the_image_processor_s(untrained) -> None:
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(untrained)
    for image in make_list("train", 2, 8).images:
        patches, grid = patchify(image)
        batch = processor([image], return_tensors="np")
        assert batch["image_grid_thw"][0].tolist() == list(grid)
        np.testing.assert_allclose(batch["pixel_values"], patches, atol=1e-5)


def test_packed_queries_score_as_single_prompts_do(untrained) -> None:
    """Many queries behind one set of images, under the block mask, against the Reranker."""
    from radical_rerank import Reranker
    from radical_rerank.embedded.scenes.training.losses import Packer, forward

    reranker = Reranker.from_pretrained(untrained, "dense")
    model, tokenizer = reranker.backbone.model, reranker.backbone.tokenizer
    lists = [make_list("test", 3, 5, queries=4), make_list("test", 4, 3, queries=2)]
    packer = Packer(model, tokenizer)
    rng_in_order = type("InOrder", (), {"random": lambda self: 0.0})()
    prompts: list[Packed] = []
    images = []
    for item in lists:
        prompts.append(packer.pack_list(item, len(images), rng_in_order))
        images += item.images
    with torch.no_grad():
        batch = collate(model, prompts, *encode_images(model, images))
        states = forward(model, batch)
    asked = [(item, d) for item in lists for d in item.descriptions]
    for (item, description), (b, start, ask) in zip(asked, batch.asks, strict=True):
        ours = model.lm_head(states[-1][b, start + len(ask.ids) - 1])[ask.choices].log_softmax(-1)
        ranking = reranker.rank(description.text(), item.images)
        theirs = torch.tensor([score for _, score in sorted((r.index, r.score) for r in ranking)])
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        for row, tokens, has, words in ask.looks:
            assert tokenizer.convert_ids_to_tokens(ask.ids[row])[1:] in description.text().split()
            assert tokens
            assert ask.answer in has
            assert words


# Training.


def small_plan(**changes):
    from radical_rerank.embedded.scenes.training.run import Phase, Plan

    phases = (Phase(3, 3, 2, 1, 0.3, extras=2), Phase(2, 4, 2, 1, 0.5, extras=0))
    options = {"num_layers": 8, "align_steps": 5, "align_scenes": 6, "phases": phases, "validate_every": 4}
    return Plan(**{**options, **changes})


def test_training_resumes_to_the_same_state(tmp_path) -> None:
    import json

    from radical_rerank import Reranker
    from radical_rerank.embedded.scenes.training.run import Training, train
    from radical_rerank.errors import InputError

    whole = train(tmp_path / "whole", small_plan(), save_every=4)
    kills = {3, 7, 9}

    class KilledError(Exception):
        pass

    def kill(step: int, facts: dict[str, float]) -> None:
        if step in kills:
            kills.remove(step)
            raise KilledError

    resumed = None
    while resumed is None:
        with suppress(KilledError):
            resumed = train(tmp_path / "killed", small_plan(), save_every=2, tell=kill)
    assert not kills
    for (name, a), b in zip(
        whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    logs = [[json.loads(line) for line in run.log.read_text().splitlines()] for run in (whole, resumed)]
    for record in [*logs[0], *logs[1]]:
        assert record.pop("seconds") > 0
    assert logs[0] == logs[1]
    assert [record["step"] for record in logs[0]] == list(range(10))
    assert "validation R@1" in logs[0][8]
    with pytest.raises(InputError, match="another plan"):
        Training(small_plan(seed=1), tmp_path / "whole")
    ranking = Reranker.from_pretrained(tmp_path / "whole", "dense").rank(
        "a red star", make_list("test", 0, 4).images
    )
    assert len(ranking) == 4


def test_a_longer_plan_goes_on_where_a_shorter_one_stopped(tmp_path) -> None:
    """If it would have done the same so far, and only then."""
    from radical_rerank.embedded.scenes.training.run import Phase, Training, train
    from radical_rerank.errors import InputError

    first = Phase(4, 3, 2, 1, 0.3, extras=2)
    short = small_plan(phases=(first,), fade_from=0.9, fade_to=0.95)
    long = small_plan(
        phases=(replace(first, steps=2), Phase(4, 4, 2, 1, 0.5, extras=1, composed=2, composed_candidates=3)),
        fade_from=0.9,
        fade_to=0.95,
    )

    class StopError(Exception):
        pass

    def stop(step: int, facts: dict[str, float]) -> None:
        if step == 7:
            raise StopError

    with suppress(StopError):
        train(tmp_path / "a", short, save_every=1, tell=stop)
    resumed = train(tmp_path / "a", long)
    whole = train(tmp_path / "b", long)
    for a, b in zip(resumed.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(InputError, match="another plan"):
        Training(small_plan(phases=(replace(first, queries=1), first)), tmp_path / "b")


def test_the_alignment_loss_falls(tmp_path) -> None:
    from radical_rerank.embedded.scenes.training.run import Training

    training = Training(small_plan(align_steps=14, align_scenes=12), tmp_path)
    losses = [training.advance()["loss"] for _ in range(14)]
    assert sum(losses[-3:]) < 0.85 * sum(losses[:3])


def test_roc_auc() -> None:
    from radical_rerank.embedded.scenes.figures import roc_auc

    score = torch.tensor([0.1, 0.4, 0.4, 0.9, 0.2])
    positive = torch.tensor([False, True, False, True, False])
    pairs = [(1.0 if a > b else 0.5 if a == b else 0.0) for a in score[positive] for b in score[~positive]]
    assert roc_auc(score, positive) == pytest.approx(sum(pairs) / len(pairs))


def test_muon_orthogonalizes() -> None:
    from radical_rerank.embedded.muon import orthogonalize

    for shape in ((16, 16), (8, 24), (24, 8)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalize(matrix))
        assert values.min() > 0.4
        assert values.max() < 1.4


def test_the_training_command(tmp_path, capsys) -> None:
    import json

    from radical_rerank.cli import main

    plan = tmp_path / "plan.json"
    phase = {"steps": 1, "candidates": 3, "queries": 2, "lists": 1, "similarity": 0.3}
    plan.write_text(json.dumps({"num_layers": 8, "align_steps": 1, "align_scenes": 4, "phases": [phase]}))
    with pytest.raises(SystemExit) as stop:
        main(["scenes", "train", str(tmp_path / "run"), "--plan", str(plan)])
    assert not stop.value.code
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert "the model is in" in capsys.readouterr().err
    plan.write_text('{"depth": 3}')
    with pytest.raises(SystemExit) as stop:
        main(["scenes", "train", str(tmp_path / "other"), "--plan", str(plan)])
    assert stop.value.code == 2
    assert "depth" in capsys.readouterr().err
