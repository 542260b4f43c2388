"""Models that are loaded with options of Hugging Face: several devices, disk, quantized, other kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from radical_rerank import Backbone, RaDiCal, Reranker, SparseVLM
from radical_rerank.backbones import slow
from radical_rerank.backbones.engine import BatchState
from radical_rerank.backbones.model import config_digest, device_of
from radical_rerank.cli import main
from radical_rerank.errors import InputError
from radical_rerank.pruning import Pruner
from radical_rerank.reranking import check_model, generated_list
from radical_rerank.reranking.check import _Bench
from tests.cases import PROFILE, draw_list, first_fast, greedy, make_case, model_of, stack
from tests.tiny import tiny_config, write_tiny

PRUNER = RaDiCal(keep=0.3, layers=(1, 4, 7), profile=PROFILE)


def test_options_are_passed_on(tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the model all of them; to the tokenizer and the image processor those that say where files are."""
    seen: dict[str, dict[str, Any]] = {}
    for kind in ("AutoModelForImageTextToText", "AutoTokenizer", "AutoImageProcessor", "AutoConfig"):
        stock = getattr(transformers, kind).from_pretrained

        def note(*args: Any, _kind: str = kind, _stock: Any = stock, **options: Any) -> Any:
            seen[_kind] = options
            return _stock(*args, **options)

        monkeypatch.setattr(getattr(transformers, kind), "from_pretrained", note)
    kwargs = {"attn_implementation": "eager", "revision": "v2", "dtype": "bfloat16"}
    reranker = Reranker(tiny_folders["qwen3_vl"], model_kwargs=kwargs)
    assert reranker.backbone.text.config._attn_implementation == "eager"
    assert reranker.backbone.dtype == "bfloat16"
    assert seen["AutoModelForImageTextToText"] == kwargs
    assert seen["AutoTokenizer"] == seen["AutoImageProcessor"] == {"revision": "v2"}
    assert seen["AutoConfig"]["revision"] == "v2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu", "model_kwargs": {"device_map": "auto"}}, "either a device or .* a device_map"),
        ({"dtype": "float32", "model_kwargs": {"dtype": "bfloat16"}}, "dtype is 'float32', but model_kwargs"),
        ({"model_kwargs": {"dtype": "float3"}}, "unknown dtype 'float3'"),
        ({"model_kwargs": {"no_such_option": 1}}, "cannot load the model .*no_such_option"),
    ],
)
def test_options_that_cannot_be_are_named(
    options: dict[str, Any], message: str, tiny_folders: dict[str, Path]
) -> None:
    with pytest.raises(InputError, match=message):
        Backbone.from_pretrained(tiny_folders["qwen3_vl"], **options)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[1]", "not a JSON object")])
def test_the_command_line_takes_an_object(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", "none", "--model-kwargs", text])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


# Weights on disk.


def blocks(model: Any) -> list[str]:
    """The parts of a model that a device map names."""
    base, text = model.model, model.model.language_model
    names = [f"model.{name}" for name, _ in base.named_children() if name != "language_model"]
    names += [f"model.language_model.{name}" for name, _ in text.named_children() if name != "layers"]
    return [*names, *(f"model.language_model.layers.{i}" for i in range(len(text.layers))), "lm_head"]


ON_DISK = (
    "qwen3_vl",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "internvl_llama",
    "internvl_qwen3",
    "internvl_lite",
)
"""families whose whole model may lie on disk; mixtures of experts sum in another order there"""


@pytest.mark.parametrize("share", ["some layers", "everything"])
@pytest.mark.parametrize("family", first_fast(ON_DISK))
def test_weights_may_lie_on_disk(
    family: str, share: str, tiny_folders: dict[str, Path], backbones: dict[str, Backbone], tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="a library of others")
    plain = backbones[family]
    device_map = {
        name: "disk" if share == "everything" or name.endswith((".1", ".5", ".7")) else "cpu"
        for name in blocks(plain.model)
    }
    kwargs = {"device_map": device_map, "offload_folder": str(tmp_path)}
    spread = Backbone.from_pretrained(tiny_folders[family], dtype="float32", model_kwargs=kwargs)
    assert any(weight.is_meta for weight in spread.model.parameters())
    assert (str(spread.device), spread.devices) == ("cpu", ["cpu"])
    assert spread.fingerprint == plain.fingerprint
    query, images = draw_list(1, 4)
    answers = []
    for backbone in (plain, spread):
        ranking = Reranker(backbone, PRUNER).rank(query, images)
        assert ranking.report is not None
        answers.append((ranking.order, [r.score for r in ranking], ranking.report.visual_tokens_left))
    assert answers[0] == answers[1]
    written = []
    for backbone in (plain, spread):
        bench = _Bench(backbone, keep=0.3, lists=1, candidates=3, calibration=None)
        with PRUNER.on(backbone.model, bench.cases[0].layout):
            written.append(slow.greedy(backbone, bench.inputs(bench.cases[0]), 4))
    assert written[0][0] == written[1][0]
    assert torch.equal(written[0][1], written[1][1])


# Other attention kernels.


@contextmanager
def kernel(model: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, the decoder calls this function where it would call a kernel that is not installed here."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = model.model.language_model.config
    before, known = config._attn_implementation, ALL_ATTENTION_FUNCTIONS[name]
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        ALL_ATTENTION_FUNCTIONS.register(name, known)


class FlashKernel:
    """Does what FlashAttention 2 does with its arguments, and writes them down.

    It knows a mask of two dimensions, or none; queries are aligned with the last keys; without a mask,
    positions that do not count up by one are taken for several packed prompts.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **options: Any
    ) -> Any:
        rows, keys = query.shape[2], key.shape[2]
        assert mask is None or (mask.ndim == 2 and mask.shape == (len(query), keys))
        positions = options.get("position_ids")
        if mask is None and positions is not None and rows > 1 and positions.ndim == 2:
            assert bool((positions.diff(dim=-1) == 1).all()), "gaps would be taken for packed prompts"
        self.calls.append({"rows": rows, "keys": keys, "masked": mask is not None, "positions": positions})
        allowed = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        if mask is not None:
            allowed = allowed & mask.bool()[:, None, None]
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        weights = (query @ key.transpose(2, 3) * scaling).masked_fill(~allowed, -1e30).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("family", first_fast(["qwen3_vl", "internvl_qwen2"]))
def test_flash_attention_is_called_as_it_wants_to_be(family: str) -> None:
    model = copy.deepcopy(model_of(family))
    shapes = [(1, 1), (2, 1)] if family.startswith("internvl") else [(3, 4), (2, 2)]
    cases = [make_case(family, shapes, seed=1), make_case(family, shapes[:1], seed=2, text=5)]
    for inputs, layouts in (
        (cases[0].inputs, [cases[0].layout]),
        (stack(cases), [case.layout for case in cases]),
    ):
        flash = FlashKernel()
        with PRUNER.on(model, layouts):
            expected = greedy(model, inputs, 3)
        with kernel(model, "flash_attention_2", flash), PRUNER.on(model, layouts) as run:
            actual = greedy(model, inputs, 3)
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        prompt, steps = flash.calls[:8], flash.calls[8:]
        assert [call["rows"] for call in prompt] == [call["keys"] for call in prompt] == run.tokens_per_layer
        assert all(call["positions"] is None for call in prompt[1:])  # layer 1 is the first that prunes
        assert all(call["rows"] == 1 for call in steps)
        assert [call["keys"] for call in steps[:8]] == [n + 1 for n in run.tokens_per_layer]
        assert any(call["masked"] for call in flash.calls) == (len(layouts) > 1)


# Several devices.


def spread_over(model: Any, borders: tuple[int, int]) -> Any:
    """A copy with its layers on three devices that are not there, its head on the last."""
    from tests.devices import place

    model = copy.deepcopy(model)
    text = model.model.language_model
    for number, layer in enumerate(text.layers):
        place(layer, f"cuda:{sum(number >= border for border in borders)}")
    place(text.norm, "cuda:2")
    place(model.lm_head, "cuda:2")
    return model


METHODS: list[Pruner] = [
    PRUNER,
    SparseVLM(keep=0.3),
    RaDiCal(keep=0.3, layers=(1, 4), profile=PROFILE, positions="compact"),
]


@pytest.mark.parametrize("number", first_fast(range(len(METHODS))))
@pytest.mark.parametrize("family", first_fast(["qwen3_vl", "internvl_qwen2"]))
def test_every_tensor_follows_its_layer(family: str, number: int) -> None:
    """Prefill and decode of a padded batch. A tensor on another device than its layer would be an error."""
    pytest.importorskip("accelerate", reason="a library of others")
    from tests.devices import Pretending

    model, pruner = model_of(family, "eager"), METHODS[number]
    shapes = [(1, 1), (2, 1)] if family.startswith("internvl") else [(3, 4), (2, 2)]
    cases = [make_case(family, shapes, seed=1), make_case(family, shapes[:1], seed=2, text=5)]
    layouts = [case.layout for case in cases]
    with pruner.on(model, layouts) as run:
        expected = greedy(model, stack(cases), 2)
    spread = spread_over(model, (2, 5))
    assert [str(device_of(layer)) for layer in spread.model.language_model.layers] == [
        *["cuda:0"] * 2,
        *["cuda:1"] * 3,
        *["cuda:2"] * 3,
    ]
    with Pretending() as pretending, pruner.on(spread, layouts) as elsewhere:
        actual = greedy(spread, stack(cases), 2)
    assert {("cuda:0", "cuda:1"), ("cuda:1", "cuda:2")} <= pretending.moves
    for row in range(2):
        ours = [stage.survivors.tolist() for stage in elsewhere.stages[row]]
        assert ours == [stage.survivors.tolist() for stage in run.stages[row]]
    for logits, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(logits, theirs, atol=1e-5, rtol=0)


def test_a_tensor_that_stays_behind_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would prove nothing."""
    pytest.importorskip("accelerate", reason="a library of others")
    from tests.devices import Pretending

    case = make_case("internvl_qwen2", [(1, 1), (2, 1)])
    spread = spread_over(model_of("internvl_qwen2", "eager"), (2, 5))
    monkeypatch.setattr(BatchState, "move", lambda state, device: None)
    with pytest.raises(RuntimeError, match="tensors on c"), Pretending(), PRUNER.on(spread, case.layout):
        greedy(spread, case.inputs, 1)


def quantized_by(library: str) -> Any:
    """The configuration of a quantizer, which is a library of others."""
    name, _, option = library.partition(" ")
    pytest.importorskip(name, reason="a library of others")
    if name == "bitsandbytes":
        return {"quant_method": name, option: True}
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torchao", "bitsandbytes load_in_4bit", "bitsandbytes load_in_8bit"])
def test_a_quantized_model_passes_the_checks(library: str, tmp_path: Path) -> None:
    config = quantized_by(library)
    folder = write_tiny(tmp_path / "model", "qwen3_vl")
    backbone = Backbone.from_pretrained(folder, dtype="float32", model_kwargs={"quantization_config": config})
    assert type(backbone.text.layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter
    assert backbone.fingerprint != Backbone.from_pretrained(folder).fingerprint
    report = check_model(backbone, lists=1, candidates=3, calibration=[generated_list(0, 3)])
    assert [one for one in report.checks if not one.passed] == []


# The identity of a model.


@pytest.mark.parametrize("part", ["the model's", "text_config", "vision_config"])
def test_a_default_that_a_later_version_adds_leaves_the_digest_as_it_is(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part_of(config: Any) -> Any:
        return getattr(config, part, config)

    before = config_digest(tiny_config("qwen3_vl"))
    kind = type(part_of(tiny_config("qwen3_vl")))
    made = kind.__init__

    def later(self: Any, *args: Any, **values: Any) -> None:
        made(self, *args, **values)
        self.novelty = "as before"

    monkeypatch.setattr(kind, "__init__", later)
    config = tiny_config("qwen3_vl")
    assert part_of(config).to_dict()["novelty"] == "as before"
    assert config_digest(config) == before
    part_of(config).novelty = "another"
    assert config_digest(config) != before
