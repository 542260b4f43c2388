"""The checks of a model: they pass on every family, and each one fails if what it checks is broken."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radical_rerank.backbones import Backbone, decoding, engine, hooks, view
from radical_rerank.backbones.slow import attention_of, eager, pruned_logits
from radical_rerank.cli import main
from radical_rerank.errors import InputError
from radical_rerank.method import keep_count, normalized_entropy
from radical_rerank.pruning import Profile
from radical_rerank.reranking import calibration, check, check_model, generated_list
from radical_rerank.reranking.check import TOLERANCES, Check, _Bench, _run
from tests.cases import first_fast
from tests.tiny import TINY_FAMILIES

NAMES = [
    "keep 1",
    "attention",
    "entropy",
    "calibration",
    "survivors",
    "pruned",
    "decoding",
    "batch attention",
    "batch",
    "budget",
    "restored",
]
SMALL: dict[str, Any] = {"lists": 1, "candidates": 3}


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SIDE", 64)


@pytest.mark.parametrize("family", first_fast(TINY_FAMILIES))
def test_every_family_passes_every_check(family: str, backbones: dict[str, Backbone]) -> None:
    report = check_model(backbones[family], **SMALL, calibration=[generated_list(0, 3)])
    assert [one.name for one in report.checks] == NAMES
    assert [one for one in report.checks if not one.passed] == []
    assert report.passed
    assert report.profile is not None
    assert report.profile.layers == backbones[family].family.readable
    assert report.speed["visual_tokens_left"] < report.speed["visual_tokens"]
    assert report.speed["speed_up"] > 0
    assert json.loads(json.dumps(report.to_dict()))["facts"]["torch"] == torch.__version__


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_with_its_own_tolerances(dtype: str, tiny_folders: dict[str, Path]) -> None:
    backbone = Backbone.from_pretrained(tiny_folders["qwen3_vl"], dtype=dtype)
    report = check_model(backbone, **SMALL, calibration=[generated_list(0, 3)])
    assert [one for one in report.checks if not one.passed] == []
    assert report.checks[0].tolerance == TOLERANCES[dtype].logits > TOLERANCES["float32"].logits


# What breaks each check. A break changes the engine as a mistake in it might.

Break = Callable[[pytest.MonkeyPatch], None]


def after(owner: Any, name: str, change: Callable[..., Any]) -> Break:
    """The method `name` of `owner` returns change(itself's object, its result, its arguments)."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        stock = getattr(owner, name)

        def broken(self: Any, *args: Any, **options: Any) -> Any:
            return change(self, stock(self, *args, **options), *args)

        patch.setattr(owner, name, broken)

    return apply


def every_stage_scales(state: Any, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
    return hidden * torch.linspace(1, 1.2, hidden.shape[-1])


def attention_is_one_token_off(patch: pytest.MonkeyPatch) -> None:
    stock = view.row_attention
    patch.setattr(view, "row_attention", lambda *args: stock(*args).roll(1, -1))


def entropy_has_another_base(module: Any) -> Break:
    return lambda patch: patch.setattr(module, "normalized_entropy", lambda p: 0.99 * normalized_entropy(p))


def the_query_is_another(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(view.View, "query_embedding", property(lambda own: own.vision[0].float()))


def survivors_change_places(state: Any, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.cat((hidden[:, :-1].flip(1), hidden[:, -1:]), dim=1)


def decoded_tokens_are_elsewhere(own: Any, kwargs: dict[str, Any], *_: Any) -> dict[str, Any]:
    cos, sin = kwargs["position_embeddings"]
    return {**kwargs, "position_embeddings": (sin, cos)}


def rows_of_a_padded_batch_are_one_off(own: Any, slots: torch.Tensor, *_: Any) -> torch.Tensor:
    return slots if own._state.valid is None else slots - 1


def padding_is_seen(state: Any, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
    state.valid = None if state.valid is None else torch.ones_like(state.valid)
    return hidden


def one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    stock = keep_count
    patch.setattr(engine, "keep_count", lambda keep, alive: min(alive, stock(keep, alive) + 1))


def the_model_is_left_changed(own: Any, result: Any, *_: Any) -> Any:
    if own.owner is not None:  # the hooks of a pruned block
        with torch.no_grad():
            own.owner.norm.weight *= torch.linspace(1, 1.2, len(own.owner.norm.weight))
    return result


BREAKS: dict[str, Break] = {
    "keep 1": after(engine.BatchState, "prune", every_stage_scales),
    "attention": attention_is_one_token_off,
    "entropy": entropy_has_another_base(check),
    "calibration": entropy_has_another_base(calibration),
    "survivors": the_query_is_another,
    "pruned": after(engine.BatchState, "_gather", survivors_change_places),
    "decoding": after(decoding.Decoding, "enter", decoded_tokens_are_elsewhere),
    "batch attention": after(view.View, "_slots_of", rows_of_a_padded_batch_are_one_off),
    "batch": after(engine.BatchState, "_gather", padding_is_seen),
    "budget": one_token_too_many,
    "restored": after(hooks.Hooks, "__exit__", the_model_is_left_changed),
}


def measured(backbone: Backbone, name: str) -> Check:
    """One check alone, as `check_model` runs it."""
    bench = _Bench(backbone, keep=0.2, **SMALL, calibration=[generated_list(0, 3)])
    rows = {row[0]: row for row in bench.plan(TOLERANCES["float32"])}
    if name == "budget":
        assert _run(*rows["calibration"]).passed
    if name == "restored":
        assert bench.stock.isfinite().all()
        _run(*rows["pruned"])
    return _run(*rows[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_engine_fails_the_check_that_is_for_it(
    name: str, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Backbone(copy.deepcopy(backbone.model), backbone.tokenizer, backbone.image_processor)
    whole = measured(own, name)
    assert whole.passed, whole
    BREAKS[name](monkeypatch)
    broken = measured(own, name)
    assert not broken.passed
    assert broken.difference is not None, "a difference is measured; the check does not just crash"
    assert broken.difference > 5 * broken.tolerance


@pytest.mark.parametrize("name", ["pruned", "decoding"])
def test_a_broken_engine_fails_on_a_decoder_that_ends_with_a_linear_layer(
    name: str, backbones: dict[str, Backbone], monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid = backbones["qwen3_5"]
    assert hybrid.shape.num_layers - 1 not in hybrid.family.attending
    whole = measured(hybrid, name)
    assert whole.passed, whole
    BREAKS[name](monkeypatch)
    broken = measured(hybrid, name)
    assert broken.difference is not None
    assert broken.difference > 5 * broken.tolerance


def test_breaks_are_told_apart(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens in the wrong order do not change the entropy, and a wrong query not the logits of survivors."""
    with monkeypatch.context() as patch:
        attention_is_one_token_off(patch)
        assert measured(backbone, "entropy").passed
    with monkeypatch.context() as patch:
        the_query_is_another(patch)
        assert measured(backbone, "pruned").passed
    with monkeypatch.context() as patch:
        BREAKS["decoding"](patch)
        assert measured(backbone, "pruned").passed


def test_a_check_that_raises_is_a_failure_with_its_reason(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(engine.BatchState, "_gather", fail)
    report = check_model(backbone, **SMALL, calibration=[generated_list(0, 3)])
    rows = {one.name: one for one in report.checks}
    assert not report.passed
    assert not rows["pruned"].passed
    assert rows["pruned"].note == "RuntimeError: out of memory"
    assert rows["pruned"].difference is None
    assert rows["attention"].passed
    assert report.speed == {}


def test_differences_that_are_no_numbers_fail() -> None:
    assert not Check("x", "", float("nan"), 1.0).passed
    assert Check("x", "", 1.0, 1.0).passed


def test_the_model_is_left_as_it_was(backbone: Backbone) -> None:
    before = backbone.text.config._attn_implementation
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    with pytest.raises(ZeroDivisionError), eager(backbone), attention_of(backbone, [0], [0]):
        1 / 0  # noqa: B018
    with pytest.raises(IndexError):
        pruned_logits(backbone, inputs, [[99]] * backbone.shape.num_layers)
    assert backbone.text.config._attn_implementation == before
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in backbone.text.layers.modules()
    )


def test_an_unusual_dtype_has_no_tolerances(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backbone, "dtype", "float64")
    with pytest.raises(InputError, match="no tolerances for float64; load the model in float32"):
        check_model(backbone)


# The command.


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["check", *arguments, "--lists", "1", "--candidates", "3"])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_the_command_prints_a_table_or_json_and_its_code_says_what_happened(
    tiny_folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(calibration, "CALIBRATION_LISTS", 1)
    monkeypatch.setattr(calibration, "CALIBRATION_CANDIDATES", 3)
    folder = str(tiny_folders["qwen3_vl"])
    code, out, err = run(capsys, folder)
    assert code == 0
    assert out.count("│ pass │") == len(NAMES)
    assert "everything passed" in out
    assert "saved the trust profile" in err
    identity = Backbone.from_pretrained(folder).identity
    assert Profile.cache_path(identity).is_file()
    one_token_too_many(monkeypatch)
    code, out, _ = run(capsys, folder, "--json")
    assert code == 1
    rows = {row["name"]: row for row in json.loads(out)["checks"]}
    assert (rows["budget"]["passed"], rows["keep 1"]["passed"]) == (False, True)
    assert rows["keep 1"]["tolerance"] == TOLERANCES["float32"].logits
