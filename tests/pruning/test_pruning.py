"""Constructor arguments, the registry, layouts and profiles."""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radical_rerank.backbones import Backbone, decoder_shape, layout_of
from radical_rerank.errors import CalibrationError, InputError, LayoutError
from radical_rerank.lab.experiments.definitions import ABLATION, EXPERIMENTS
from radical_rerank.method import STRATEGIES, DecoderShape, keep_ratio, signed_prior
from radical_rerank.pruning import (
    METHODS,
    Layout,
    ModelIdentity,
    Profile,
    Pruner,
    RaDiCal,
    Random,
    StageView,
    build,
)
from tests.cases import END, IMAGE, PROFILE, START, first_fast, keep_profile, make_case, model_of
from tests.reference import Look, Reference, normalised, text_averaged
from tests.tiny import on_grid

SHAPES = [(6, 8), (5, 5), (8, 6), (4, 4)]


def survivors(pruner: Pruner) -> list[list[int]]:
    case = make_case("qwen3_vl", SHAPES, seed=2)
    model = model_of("qwen3_vl")
    with torch.no_grad(), pruner.on(model, case.layout) as run:
        model(**case.inputs)
    return [record.survivors.tolist() for record in run.stages[0]]


def test_every_row_of_the_ablation_is_a_constructor_argument() -> None:
    rows = {
        "full": RaDiCal(keep=0.3, profile=PROFILE),
        "without DTI": RaDiCal(keep=0.3, profile=PROFILE, alpha=0),
        "fixed": RaDiCal(keep=0.3, profile=PROFILE, alpha=0.5),
        "without maximin": RaDiCal(keep=0.3, profile=PROFILE, strategy="random"),
        "without geometric": RaDiCal(keep=0.3, profile=PROFILE, fusion="arithmetic"),
        "DTI only": RaDiCal(keep=0.3, profile=PROFILE, alpha=1),
        "QRel only": RaDiCal(keep=0.3, profile=PROFILE, prior="relevance"),
        "CCU only": RaDiCal(keep=0.3, profile=PROFILE, prior="uniqueness"),
        "without scoring": RaDiCal(keep=0.3, profile=PROFILE, prior="random", alpha=1),
        "exact": RaDiCal(keep=0.3, profile=PROFILE, uniqueness="exact"),
        "raw attention": RaDiCal(keep=0.3, profile=PROFILE, saliency="attention"),
    }
    outcomes = {name: survivors(pruner) for name, pruner in rows.items()}
    budgets = {tuple(len(stage) for stage in stages) for stages in outcomes.values()}
    assert len(budgets) == 1
    assert len({str(stages) for stages in outcomes.values()}) == len(rows)
    assert survivors(Random(keep=0.3, profile=PROFILE)) == outcomes["without scoring"]


def written_out(look: Look, row: str) -> list[float]:
    """The paper's ablation, row by row: the score of every alive token, from the whole attention matrix."""

    def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(a @ b / (a.norm() * b.norm()))

    prototype = look.vision.mean(0)
    unique = [1 - cosine(token, prototype) for token in look.vision]
    relevant = [max(cosine(token, look.query), 0) for token in look.vision]
    raw = {"QRel only": relevant, "CCU only": unique}.get(
        row, [u * q for u, q in zip(unique, relevant, strict=True)]
    )
    d = [normalised(raw)[token] for token in look.alive]
    p = text_averaged(look)
    info = [max(x * math.log(len(p) * x), 0.0) for x in p]
    s = normalised(info) if max(info) > 0 else [1 / len(p)] * len(p)
    fixed = {"w/o DTI (α = 0)": 0.0, "fixed α = 0.5": 0.5, "DTI only (α = 1)": 1.0}
    a = fixed.get(row, PROFILE.alpha_at(look.layer))
    if row == "w/o geometric fusion":
        return [a * x + (1 - a) * y for x, y in zip(d, s, strict=True)]
    return [max(x, 1e-6) ** a * max(y, 1e-6) ** (1 - a) for x, y in zip(d, s, strict=True)]


@pytest.mark.parametrize("row", [row for row in ABLATION if row != "w/o token scoring"])
def test_every_row_of_the_ablation_keeps_what_its_formula_rates_highest(row: str) -> None:
    """The settings of `radical experiment ablation` against the slow decoder, which follows the same
    survivors and rates them by the row's formula. Among equal scores anyone may stay."""
    model, case = model_of("qwen3_vl"), make_case("qwen3_vl", SHAPES, seed=2)
    (cell,) = [cell for cell in EXPERIMENTS["ablation"].cells([0.03]) if cell.name == row]
    pruner = build(cell.method, keep=cell.keep, profile=PROFILE, **cell.options)
    with torch.no_grad(), pruner.on(model, case.layout) as run:
        logits = model(**case.inputs).logits[0, -1]
    stages = run.stages[0]
    kept = {stage.layer: set(stage.survivors.tolist()) for stage in stages}
    told_apart = 0

    def rule(look: Look) -> list[tuple[float, ...]]:
        nonlocal told_apart
        chosen = [token in kept[look.layer] for token in look.alive]
        scores = written_out(look, row)
        stayed = [score for score, stays in zip(scores, chosen, strict=True) if stays]
        left = [score for score, stays in zip(scores, chosen, strict=True) if not stays]
        assert min(stayed) >= max(left) * (1 - 1e-4) - 1e-9, (row, look.layer)
        told_apart += min(stayed) > max(left)
        return [(float(stays),) for stays in chosen]

    places = [(stage.layer, stage.when, stage.after / stage.before) for stage in stages]
    expected = Reference(model, case, places, rule).run(0)[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert told_apart > 1  # not every stage is a tie
    usual = [stage.layer for stage in RaDiCal(keep=0.03, profile=PROFILE).stages(8)]
    assert ([stage.layer for stage in stages] == usual) == (row != "w/o α-Maximin")


def test_the_row_without_token_scoring_draws() -> None:
    (cell,) = [cell for cell in EXPERIMENTS["ablation"].cells([0.3]) if cell.name == "w/o token scoring"]
    drawn = [
        survivors(build(cell.method, keep=cell.keep, profile=PROFILE, seed=seed, **cell.options))
        for seed in range(3)
    ]
    assert drawn == [survivors(Random(keep=0.3, profile=PROFILE, seed=seed)) for seed in range(3)]
    assert len({str(one) for one in drawn}) == 3


@pytest.mark.parametrize("keep", [0.05, 0.2, 0.6])
@pytest.mark.parametrize("family", first_fast(["qwen3_vl", "qwen2_5_vl", "internvl_llama"]))
def test_at_alpha_0_the_query_positions_change_nothing(family: str, keep: float) -> None:
    """Pure saliency: the prior, the only reader of the query's positions, has no say in any tie."""
    model = model_of(family)
    case = make_case(family, SHAPES if on_grid(family) else [(2, 1), (1, 1), (2, 1)], seed=2)
    outcomes: dict[float, set[str]] = {}
    for alpha in (0.0, 0.3):
        for query in (case.layout.query, case.layout.query[-1:], case.layout.query[:1], (0, 1)):
            layout = replace(case.layout, query=query)
            pruner = RaDiCal(keep=keep, layers=(0, 2, 5), alpha=alpha)
            with torch.no_grad(), pruner.on(model, layout) as run:
                model(**case.inputs)
            stages = [record.survivors.tolist() for record in run.stages[0]]
            outcomes.setdefault(alpha, set()).add(str(stages))
    assert len(outcomes[0.0]) == 1
    assert len(outcomes[0.3]) > 1  # where the prior has a say, they do


@dataclass
class Signals:
    """A view of tokens whose attention and signed prior are given."""

    p: torch.Tensor
    prior: torch.Tensor
    layer: int = 3
    key: int = 0

    def __post_init__(self) -> None:
        self.alive = torch.arange(len(self.p))
        self.candidate_of = torch.zeros(len(self.p), dtype=torch.long)

    def attention(self) -> torch.Tensor:
        return self.p[None]

    def once(self, name: str, compute: object) -> torch.Tensor:
        return self.prior

    def note(self, **facts: float) -> None:
        self.facts = facts


def kept_of(pruner: RaDiCal, p: list[float], prior: list[float], count: int) -> list[int]:
    kept = pruner.select(cast(StageView, Signals(torch.tensor(p), torch.tensor(prior))), count)
    assert isinstance(kept, torch.Tensor)
    return kept.tolist()


@given(st.lists(st.integers(1, 1000), min_size=4, max_size=30, unique=True), st.data())
def test_each_end_of_alpha_is_one_channel_alone(weights: list[int], data: st.DataObject) -> None:
    p = [weight / sum(weights) for weight in weights]
    places = st.lists(st.integers(-500, 500), min_size=len(p), max_size=len(p), unique=True)
    prior = [place / 500 for place in data.draw(places)]
    count = data.draw(st.integers(1, len(p) - 1))
    by_p = sorted(sorted(range(len(p)), key=lambda i: -p[i])[:count])
    by_prior = sorted(sorted(range(len(p)), key=lambda i: -prior[i])[:count])
    assert kept_of(RaDiCal(alpha=0), p, prior, count) == by_p
    assert kept_of(RaDiCal(alpha=1), p, prior, count) == by_prior


def test_between_the_ends_neither_channel_decides_a_tie_alone() -> None:
    """Tokens 1 to 4 are below both cuts: little attention, a negative cosine."""
    p, prior = [0.9, 0.01, 0.02, 0.03, 0.04], [0.5, -0.1, -0.2, -0.3, -0.4]
    by_trust = {alpha: kept_of(RaDiCal(alpha=alpha), p, prior, 3) for alpha in (0.0, 0.1, 0.9, 1.0)}
    assert by_trust == {0.0: [0, 3, 4], 0.1: [0, 3, 4], 0.9: [0, 1, 2], 1.0: [0, 1, 2]}
    for alpha in (0.1, 0.5, 0.9):
        same_prior = kept_of(RaDiCal(alpha=alpha), p, [0.5, -0.1, -0.1, -0.1, -0.1], 3)
        same_attention = kept_of(RaDiCal(alpha=alpha), [0.9, 0.02, 0.02, 0.02, 0.02], prior, 3)
        assert same_prior == [0, 3, 4]
        assert same_attention == [0, 1, 2]


def test_an_attention_free_score_asks_for_no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("attention was computed")

    monkeypatch.setattr("radical_rerank.backbones.view.row_attention", refuse)
    survivors(RaDiCal(keep=0.3, profile=PROFILE, alpha=1))
    survivors(Random(keep=0.3, profile=PROFILE))
    with pytest.raises(AssertionError, match="attention was computed"):
        survivors(RaDiCal(keep=0.3, profile=PROFILE))


def test_the_prior_is_computed_once_per_list(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    from radical_rerank.pruning import radical

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return signed_prior(*args, **options)

    monkeypatch.setattr(radical, "signed_prior", counted)
    assert len(survivors(RaDiCal(keep=0.3, profile=PROFILE))) == 4
    assert len(calls) == 1


def test_stages_follow_the_strategy_and_share_the_budget() -> None:
    for name, strategy in STRATEGIES.items():
        pruner = RaDiCal(keep=0.2, num_stages=3, gap=1, strategy=name, seed=5, profile=PROFILE)
        stages = pruner.stages(8)
        expected = strategy(PROFILE.layers, PROFILE.alpha, 3, gap=1, seed=5)
        assert [stage.layer for stage in stages] == expected
        assert {stage.keep for stage in stages} == {keep_ratio(0.2, len(expected))}
        assert {stage.when for stage in stages} == {"before"}


def test_published_schedule_of_qwen3_vl_4b() -> None:
    profile = Profile.find("Qwen/Qwen3-VL-4B-Instruct")
    assert profile is not None
    stages = RaDiCal(profile=profile).stages(36)
    assert [stage.layer for stage in stages] == [7, 22, 24, 29]
    assert [profile.alpha_at(stage.layer) for stage in stages] == [0.84, 0.43, 0.22, 0.0]
    assert all(stage.keep == pytest.approx(0.2**0.25) for stage in stages)
    with pytest.raises(CalibrationError, match="layer 34, but the model has 28 layers"):
        RaDiCal(profile=profile).stages(28)
    with pytest.raises(CalibrationError, match="no value for layer 8"):
        profile.alpha_at(8)


def test_without_a_profile_the_error_says_so() -> None:
    case = make_case("qwen3_vl", SHAPES)
    with pytest.raises(CalibrationError, match="profile="):
        RaDiCal(keep=0.2).on(model_of("qwen3_vl"), case.layout)


@pytest.mark.parametrize(
    "options",
    [
        {"keep": 0},
        {"keep": 1.01},
        {"keep": "half"},
        {"strategy": "best"},
        {"prior": "magic"},
        {"uniqueness": "some"},
        {"saliency": "none"},
        {"fusion": "cold"},
        {"alpha": 1.5},
        {"num_stages": 0},
        {"gap": 0},
        {"layers": ()},
    ],
)
def test_unknown_options_are_refused(options: dict) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        RaDiCal(**options)


def test_the_registry() -> None:
    assert set(METHODS) >= {"radical", "random", "dense"}
    for name, method in METHODS.items():
        assert method.summary, name
        assert isinstance(build(name, keep=0.5), method)
    with pytest.raises(InputError, match="unknown method 'none'; choose from: "):
        build("none")
    with pytest.raises(InputError, match="unknown option 'colour' of method 'dense'"):
        build("dense", colour="red")


# Layouts.


def test_layout_of_a_prompt_finds_its_images() -> None:
    model = model_of("qwen3_vl")
    ids = [1, START, IMAGE, IMAGE, END, 2, START, IMAGE, END, 3, START, IMAGE, IMAGE, IMAGE, END, 4, 5]
    layout = layout_of(model, torch.tensor(ids), protected=[0])
    assert layout.protected == (range(2, 4),)
    assert layout.candidates == (range(7, 8), range(11, 14))
    assert layout.query == layout.rows == (14, 15, 16)
    assert layout.positions.tolist() == [7, 11, 12, 13]
    assert layout.candidate_of.tolist() == [0, 1, 1, 1]
    assert layout_of(model, ids, query=[15]).query == (15,)
    with pytest.raises(LayoutError, match="no candidate image"):
        layout_of(model, [1, 2, 3])
    with pytest.raises(LayoutError, match="3 images"):
        layout_of(model, ids, protected=[3])
    with pytest.raises(LayoutError, match="one prompt"):
        layout_of(model, torch.tensor([ids]))
    with pytest.raises(LayoutError, match="no text follows"):
        layout_of(model, [1, IMAGE, IMAGE])


def test_the_context_manager_on_a_stock_model() -> None:
    """As the README shows it."""
    model, case = model_of("internvl_qwen3"), make_case("internvl_qwen3", [(1, 1), (2, 1)])
    layout = layout_of(model, case.inputs["input_ids"][0])
    assert (layout.length, layout.candidates) == (case.layout.length, case.layout.candidates)
    with RaDiCal(keep=0.2, profile=PROFILE).on(model, layout) as run, torch.no_grad():
        output = model.generate(**case.inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert output.shape[1] > case.layout.length
    assert run.stages[0][-1].after < 0.25 * len(layout.positions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidates": (range(4, 6), range(2, 4))}, "in order"),
        ({"candidates": (range(2, 2),)}, "not empty"),
        ({"query": ()}, "no query"),
        ({"query": (10,)}, "position 10 is outside"),
        ({"protected": (range(3, 5),)}, "protected token is inside"),
    ],
)
def test_impossible_layouts_are_refused(change: dict, message: str) -> None:
    good = Layout(10, (range(2, 4), range(5, 7)), (8, 9))
    with pytest.raises(LayoutError, match=message):
        replace(good, rows=(), **change)


# Profiles.


def test_profiles_survive_a_round_trip(tmp_path: Path) -> None:
    path = PROFILE.save(tmp_path / "deep" / "profile.json")
    assert Profile.load(path) == PROFILE
    data = json.loads(path.read_text())
    assert set(data) == {f.name for f in fields(Profile)}
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_an_interrupted_save_leaves_the_old_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = PROFILE.save(tmp_path / "profile.json")
    before = path.read_text()

    class Stopped:
        def sub(self, *args: Any) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr("radical_rerank.pruning.profile.NUMBERS", Stopped())  # used while the file is written
    with pytest.raises(KeyboardInterrupt):
        replace(PROFILE, lists=99).save(path)
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"model": "x"}', '{"model": "x", "layers": [0], "alpha": [2]}']
)
def test_broken_profiles_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=r"profile"):
        Profile.load(path)


def test_a_profile_serves_the_model_it_was_measured_on_and_no_other(tiny_folders: dict[str, Path]) -> None:
    """Models without a name, or with the same one, are told apart by what they are."""
    backbones = [Backbone.from_pretrained(tiny_folders["qwen3_vl"]) for _ in range(2)]
    first, second = backbones
    for backbone in backbones:
        backbone.model.config._name_or_path = ""
    with torch.no_grad():
        second.model.lm_head.weight[0, 0] += 1
    profile = keep_profile(first)
    assert Profile.find(first.identity) == profile
    assert Profile.find(second.identity) is None
    assert Profile.cache_path(second.identity) != Profile.cache_path(first.identity)
    profile.save(Profile.cache_path(second.identity))  # whoever put it there
    with pytest.warns(UserWarning, match="measured on another model"):
        assert Profile.find(second.identity) is None
    with torch.no_grad():
        first.model.lm_head.weight[0, 1] += 1  # trained on
    assert Profile.find(first.identity) is None


def test_a_profile_in_a_models_folder_is_checked_too(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folders["internvl_qwen2"], tmp_path / "model")
    backbone = Backbone.from_pretrained(folder)
    own = replace(PROFILE, model=backbone.name, fingerprint=backbone.fingerprint)
    own.save(folder / "radical_profile.json")
    assert Profile.find(backbone.identity) == own
    replace(own, fingerprint="0" * 16).save(folder / "radical_profile.json")
    with pytest.warns(UserWarning, match="measured on another model"):
        assert Profile.find(backbone.identity) is None


def test_a_published_profile_is_for_models_of_its_name_and_shape() -> None:
    published = Profile.find("Qwen/Qwen3-VL-4B-Instruct")
    assert published is not None
    assert published.shape == DecoderShape(36, 2560, 32, 8, 128, 9728)
    same = ModelIdentity("Qwen/Qwen3-VL-4B-Instruct", "1" * 16, published.shape)
    assert Profile.find(same) == published
    assert Profile.find(replace(same, name="Qwen/Qwen3-VL-4B-Thinking")) is None
    assert Profile.find(replace(same, shape=replace(published.shape, hidden=2048))) is None
    whole = Profile.measured(same.name, [0.5 + i / 100 for i in range(36)], 1, "measured", same.fingerprint)
    whole.save(Profile.cache_path(same))
    assert Profile.find(same) == whole  # what was measured on this very model comes first


def test_a_profile_of_some_layers_says_what_it_cannot_do(recwarn: pytest.WarningsRecorder) -> None:
    published = Profile.find("Qwen/Qwen3-VL-4B-Instruct")
    assert published is not None
    for strategy in STRATEGIES:
        pruner = RaDiCal(profile=published, strategy=strategy)
        if strategy in ("alpha_maximin", "deep_only"):
            assert pruner.stages(36)
            continue
        with pytest.raises(CalibrationError, match=f"'{strategy}' needs α of every layer, but .* 16 of 36"):
            pruner.stages(36)
    assert not recwarn
    with pytest.warns(UserWarning, match="16 of 36 layers"):
        RaDiCal(profile=published, num_stages=5).stages(36)
    with pytest.warns(UserWarning, match="16 of 36 layers"):
        RaDiCal(profile=published, gap=3).stages(36)


SCHEDULES = {
    "Qwen/Qwen3-VL-8B-Instruct": ([4, 7, 21, 29], DecoderShape(36, 4096, 32, 8, 128, 12288)),
    "OpenGVLab/InternVL2_5-8B": ([8, 22, 25, 27], DecoderShape(32, 4096, 32, 8, 128, 14336)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_published_schedule_without_alpha_does_what_it_can_and_says_what_it_cannot(name: str) -> None:
    layers, shape = SCHEDULES[name]
    profile = Profile.find(name)
    assert profile is not None
    assert (list(profile.layers), profile.alpha, profile.shape) == (layers, (), shape)
    # A method with an α of its own needs no more than the layers.
    for pruner in (Random(profile=profile), RaDiCal(alpha=0.5, profile=profile)):
        assert [stage.layer for stage in pruner.stages(shape.num_layers)] == layers
        assert not pruner.needs_profile
    # RaDiCal with each layer's α does: the error says how to get it.
    missing = rf"of {name}, only the schedule .*{layers[0]}, .* is published, not its α: .*radical calibrate"
    needing: list[dict[str, Any]] = [{}, {"layers": layers}]
    for options in needing:
        with pytest.raises(CalibrationError, match=missing):
            RaDiCal(profile=profile, **options).stages(shape.num_layers)
    # Another schedule cannot be chosen without α.
    others: list[dict[str, Any]] = [{"num_stages": 3}, {"gap": 3}, {"strategy": "deep_only"}]
    for options in others:
        with pytest.raises(CalibrationError, match="only the α-Maximin schedule of 4 stages 2 apart"):
            RaDiCal(alpha=0.5, profile=profile, **options).stages(shape.num_layers)
    with pytest.raises(CalibrationError, match="the model has 24 layers"):
        Random(profile=profile).stages(24)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_found_where_alpha_is_not_needed(name: str) -> None:
    same = ModelIdentity(name, "1" * 16, SCHEDULES[name][1])
    assert Profile.find(same) is None  # so RaDiCal is calibrated, as for any model
    assert Profile.find(same, alpha=False) == Profile.find(name)
    assert Profile.find(replace(same, name=f"{name}-hf"), alpha=False) == Profile.find(name)
    assert Profile.find(replace(same, name="another"), alpha=False) is None
    needed = [pruner.needs_profile for pruner in (RaDiCal(), RaDiCal(alpha=0.5), Random(layers=(2,)))]
    assert needed == ["alpha", "layers", None]
    whole = Profile.measured(name, [0.5 + i / 100 for i in range(32)], 1, "measured", same.fingerprint)
    whole.save(Profile.cache_path(same))
    assert Profile.find(same) == Profile.find(same, alpha=False) == whole


def test_a_schedule_serves_a_model_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine looks it up for a method that needs only layers, and refuses one that needs α."""
    model, case = copy.deepcopy(model_of("qwen3_vl")), make_case("qwen3_vl", SHAPES)
    model.config._name_or_path = "tiny"
    shape = decoder_shape(model.config)
    schedule = Profile("tiny", (1, 3, 4, 6), (), shape=shape)
    monkeypatch.setattr("radical_rerank.pruning.profile.published_profiles", lambda: (schedule,))
    with torch.no_grad(), Random(keep=0.2).on(model, case.layout) as run:
        model(**case.inputs)
    assert [stage.layer for stage in run.stages[0]] == [1, 3, 4, 6]
    with pytest.raises(CalibrationError, match="profile=calibrate"):
        RaDiCal(keep=0.2).on(model, case.layout)


def test_nan_is_no_profile() -> None:
    with pytest.raises(CalibrationError):
        Profile.measured("m", [0.5, float("nan"), 0.7], 1, "")


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RADICAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = DecoderShape(2, 8, 2, 1, 4, 16)
    path = Profile.cache_path(ModelIdentity("Some/Model", "1" * 16, shape))
    assert path.parent == tmp_path / "radical-rerank" / "profiles"
    assert path.name.startswith("Model-")
    assert Profile.cache_path(ModelIdentity("Some/Model", "2" * 16, shape)) != path
