"""The engine under what people do with models: compiling, threads, fine-tuning, other ways to generate."""

from __future__ import annotations

import asyncio
import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from radical_rerank import Dense, RaDiCal
from radical_rerank.backbones.hooks import Hooks
from radical_rerank.backbones.model import text_model
from radical_rerank.backbones.view import row_attention
from radical_rerank.errors import LayoutError, ScoringError, UnsupportedModelError
from radical_rerank.method import text_averaged
from radical_rerank.pruning import Layout
from tests.cases import PROFILE, Case, first_fast, greedy, hooks_on, make_case, model_of, stack
from tests.reference import Reference, radical_rule
from tests.tiny import READABLE, TINY_FAMILIES, on_grid

SHAPES = [(3, 4), (2, 2), (4, 3), (2, 5)]
PRUNER = RaDiCal(keep=0.3, layers=(1, 4), profile=PROFILE)


def case_of(family: str, **options: Any) -> Case:
    return make_case(family, [(1, 1), (2, 1), (1, 1)] if not on_grid(family) else SHAPES, **options)


# torch.compile.


def compiled(way: str, backend: str, model: Any) -> Any:
    """What to call after compiling the model in one of the ways there are."""
    layers = text_model(model).layers
    if way == "model":
        return torch.compile(model, backend=backend)
    if way == "model.compile()":
        model.compile(backend=backend)
    elif way == "a function":
        return torch.compile(lambda **inputs: model(**inputs), backend=backend)
    elif way == "layers":
        for number in range(len(layers)):
            layers[number] = torch.compile(layers[number], backend=backend)
    elif way == "layer.compile()":
        for layer in layers:
            layer.compile(backend=backend)
    return model


WAYS = [
    (way, "eager", first)
    for way in ("model", "model.compile()", "a function", "layers", "layer.compile()")
    for first in ("dense first", "pruned first")
] + [(way, "inductor", "dense first") for way in ("model", "layers")]


@pytest.mark.slow
@pytest.mark.no_cover  # measuring coverage makes tracing several times slower
@pytest.mark.parametrize(("way", "backend", "first"), WAYS)
def test_a_compiled_model_is_pruned_too(way: str, backend: str, first: str) -> None:
    """Prefill and decode, in both orders: nothing of one is taken for the other."""
    torch.compiler.reset()
    model, case = copy.deepcopy(model_of("internvl_qwen2", num_layers=5)), case_of("internvl_qwen2")
    with torch.no_grad():
        dense = model(**case.inputs).logits[:, -1]
        with PRUNER.on(model, case.layout):
            pruned, steps = model(**case.inputs).logits[:, -1], greedy(model, case.inputs, 3)
    call = compiled(way, backend, model)
    for turn in ("dense", "pruned", "dense") if first == "dense first" else ("pruned", "dense", "pruned"):
        with torch.no_grad():
            if turn == "dense":
                torch.testing.assert_close(call(**case.inputs).logits[:, -1], dense, atol=1e-4, rtol=0)
                continue
            with PRUNER.on(call if way == "model" else model, case.layout) as run:
                logits = call(**case.inputs).logits[:, -1]
                torch.testing.assert_close(logits, pruned, atol=1e-4, rtol=0)
                assert len(run.stages[0]) == 2
                if hasattr(call, "generate"):
                    for ours, theirs in zip(greedy(call, case.inputs, 3), steps, strict=True):
                        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert "forward" not in model.__dict__
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.no_cover
def test_layers_stay_compiled_while_they_are_pruned() -> None:
    torch.compiler.reset()
    runs = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph.forward(*args)

        return run

    model, case = copy.deepcopy(model_of("internvl_qwen2", num_layers=5)), case_of("internvl_qwen2")
    for layer in text_model(model).layers:
        layer.compile(backend=backend)
    with torch.no_grad(), PRUNER.on(model, case.layout):
        model(**case.inputs)
        runs.clear()
        model(**case.inputs)
    assert len(runs) >= 5
    torch.compiler.reset()


def test_a_forward_that_somebody_else_replaced_comes_back() -> None:
    """As accelerate does where a model lies on several devices."""
    model, case = copy.deepcopy(model_of("qwen3_vl")), case_of("qwen3_vl")
    calls, stock = [], model.forward

    def theirs(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return stock(*args, **options)

    model.forward = theirs
    with torch.no_grad(), PRUNER.on(model, case.layout) as run:
        model(**case.inputs)
    assert run.stages[0]
    assert calls == [1]
    assert model.forward is theirs


# Layouts that belong to another prompt.


def shifted(layout: Layout, by: int) -> Layout:
    move = lambda spans: tuple(range(s.start + by, s.stop + by) for s in spans)  # noqa: E731
    markup = tuple((position + by, range(row.start + by, row.stop + by)) for position, row in layout.markup)
    candidates, protected = move(layout.candidates), move(layout.protected)
    return replace(layout, candidates=candidates, protected=protected, rows=(), markup=markup)


def first_token(layout: Layout, span: range) -> int:
    """The first visual token of an image: a tile's name may come before it."""
    marks = {position for position, _ in layout.markup}
    return next(position for position in span if position not in marks)


@pytest.mark.parametrize("family", first_fast(TINY_FAMILIES))
def test_a_layout_of_another_prompt_is_refused(family: str) -> None:
    model, case = model_of(family), case_of(family, reference=(1, 2))
    first = first_token(case.layout, case.layout.protected[0])
    with torch.no_grad():
        with PRUNER.on(model, case.layout):
            model(**case.inputs)
        # A tile's name may be anything, so the next place that differs is told.
        place = "" if first - 1 in dict(case.layout.markup) else f"{first} it says text, but"
        with (
            pytest.raises(LayoutError, match=f"prompt 0: at position {place}"),
            PRUNER.on(model, shifted(case.layout, 1)),
        ):
            model(**case.inputs)
        with (
            pytest.raises(LayoutError, match=f"at position {first - 1} it says image, but"),
            PRUNER.on(model, shifted(case.layout, -1)),
        ):
            model(**case.inputs)
        last = case.layout.candidates[-1]
        markup = tuple(mark for mark in case.layout.markup if mark[0] not in last)
        unsaid = replace(case.layout, candidates=case.layout.candidates[:-1], markup=markup)
        with (
            pytest.raises(LayoutError, match=f"at position {first_token(case.layout, last)} it says text"),
            PRUNER.on(model, unsaid),
        ):
            model(**case.inputs)
        words = {name: case.inputs[name] for name in ("input_ids", "attention_mask")}
        words["input_ids"] = words["input_ids"].where(words["input_ids"] < 250, 7)
        with (
            pytest.raises(LayoutError, match="says image, but the prompt has text"),
            PRUNER.on(model, case.layout),
        ):
            model(**words)


def test_two_layouts_that_were_swapped_are_refused() -> None:
    model = model_of("qwen3_vl")
    cases = [make_case("qwen3_vl", [(3, 4), (2, 2)]), make_case("qwen3_vl", [(2, 2), (3, 4)])]
    layouts = [case.layout for case in cases]
    assert layouts[0].length == layouts[1].length
    with torch.no_grad():
        with PRUNER.on(model, layouts):
            model(**stack(cases))
        with (
            pytest.raises(LayoutError, match="not describe prompt 0: at position 9"),
            PRUNER.on(model, layouts[::-1]),
        ):
            model(**stack(cases))


def test_placeholders_are_found_among_embeddings() -> None:
    model, case = model_of("internvl_llama"), case_of("internvl_llama")
    inputs = {name: value for name, value in case.inputs.items() if name != "input_ids"}
    with torch.no_grad():
        inputs["inputs_embeds"] = text_model(model).embed_tokens(case.inputs["input_ids"])
        with PRUNER.on(model, case.layout):
            expected = model(**case.inputs).logits
            assert torch.equal(model(**inputs).logits, expected)
        with pytest.raises(LayoutError, match="says text"), PRUNER.on(model, shifted(case.layout, 1)):
            model(**inputs)
        with pytest.raises(LayoutError, match="call the whole model"), PRUNER.on(model, case.layout):
            text_model(model)(inputs_embeds=inputs["inputs_embeds"])


@pytest.mark.parametrize("change", [{"query": (3,)}, {"rows": (3,)}, {"rows": (1, 9)}], ids=str)
def test_the_query_and_its_rows_are_text(change: dict[str, Any]) -> None:
    good = Layout(10, (range(2, 4), range(5, 7)), (8, 9), (range(0, 2),))
    with pytest.raises(LayoutError, match=f"position {next(iter(change.values()))[0]} is an image"):
        replace(good, **change)


# Numbers.


def test_float16_products_that_overflow_before_scaling_do_not_reach_the_attention() -> None:
    draw = torch.Generator().manual_seed(0)
    query = (24 + 0.2 * torch.randn(4, 3, 128, generator=draw)).half()
    key = (24 + 0.2 * torch.randn(2, 40, 128, generator=draw)).half()
    assert (query[0] @ key[0].T).isinf().any()
    allowed = torch.ones(3, 40, dtype=torch.bool).tril(37)
    attention = row_attention(query, key, 128**-0.5, allowed, torch.arange(5, 30))
    wide = query.double() @ key.double().repeat_interleave(2, 0).transpose(1, 2) * 128**-0.5
    expected = wide.masked_fill(~allowed, -torch.inf).softmax(-1).mean(0)[:, 5:30]
    assert attention.dtype == torch.float32
    torch.testing.assert_close(attention.double(), expected, atol=5e-4, rtol=0)


def test_attention_that_is_not_finite_is_an_error() -> None:
    model, case = copy.deepcopy(model_of("qwen3_vl")), case_of("qwen3_vl")
    before = hooks_on(model)
    with torch.no_grad():
        text_model(model).layers[4].self_attn.k_proj.weight[0, 0] = torch.nan
        broken = PRUNER.on(model, case.layout)
        with pytest.raises(ScoringError, match="attention of layer 4 is not finite"), broken:
            model(**case.inputs)
    assert hooks_on(model) == before


def test_rows_with_hardly_any_attention_to_images_do_no_harm() -> None:
    rows = torch.tensor([[1e-40, 3e-40], [0.2, 0.6], [0.0, 0.0]])
    torch.testing.assert_close(text_averaged(rows), torch.tensor([0.25, 0.75]))
    small = torch.tensor([[1e-30, 3e-30]])
    torch.testing.assert_close(text_averaged(small), torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(text_averaged(rows[:1]), torch.tensor([0.5, 0.5]))


# Fine-tuning.


@pytest.mark.parametrize("family", first_fast(TINY_FAMILIES))
def test_gradients_are_those_of_the_slow_reference(family: str) -> None:
    model, case = copy.deepcopy(model_of(family)), case_of(family, seed=3)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    reference = Reference(
        model,
        case,
        [(stage.layer, stage.when, stage.keep) for stage in PRUNER.stages(8)],
        radical_rule({layer: PROFILE.alpha_at(layer) for layer in (1, 4)}),
    )
    reference.logits().log_softmax(-1)[7].backward()
    expected = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    model.zero_grad()
    with PRUNER.on(model, case.layout) as run:
        model(**case.inputs).logits[0, -1].log_softmax(-1)[7].backward()
    assert [record.survivors.tolist() for record in run.stages[0]] == reference.survivors
    trained = {name for name, p in parameters.items() if p.grad is not None}
    assert trained == set(expected)
    decoder = "text_model" if hasattr(model.model, "text_model") else "language_model"
    for number in range(8):
        assert any(f"{decoder}.layers.{number}." in name for name in trained)
    assert any("vis" in name for name in trained)
    for name in trained:
        scale = max(1.0, float(expected[name].abs().max()))
        torch.testing.assert_close(parameters[name].grad, expected[name], atol=2e-4 * scale, rtol=0, msg=name)
    first = READABLE.get(family, (0,))[0]
    queries = parameters[f"model.{decoder}.layers.{first}.self_attn.q_proj.weight"]
    assert float(queries.grad.abs().max()) > 0


def test_gradient_checkpointing_is_refused_by_name() -> None:
    model, case = copy.deepcopy(model_of("qwen3_vl")), case_of("qwen3_vl")
    model.gradient_checkpointing_enable()
    model.train()
    with (
        pytest.raises(UnsupportedModelError, match="gradient_checkpointing_disable"),
        PRUNER.on(model, case.layout),
    ):
        model(**case.inputs)
    model.eval()  # then nothing is checkpointed
    with torch.no_grad(), PRUNER.on(model, case.layout) as run:
        model(**case.inputs)
    assert run.stages[0]


@pytest.mark.slow
def test_a_model_with_adapters_is_pruned_as_its_merged_self() -> None:
    peft = pytest.importorskip("peft", reason="a library of others")
    model, case = copy.deepcopy(model_of("qwen3_vl")), case_of("qwen3_vl")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        with PRUNER.on(wrapped, case.layout) as run:
            actual = greedy(wrapped, case.inputs, 4)
        assert len(run.stages[0]) == 2
        merged = wrapped.merge_and_unload()
        with PRUNER.on(merged, case.layout) as other:
            expected = greedy(merged, case.inputs, 4)
    assert run.stages[0][-1].survivors.tolist() == other.stages[0][-1].survivors.tolist()
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


# Threads and tasks.


def test_another_threads_dense_call_is_not_pruned() -> None:
    model, case = model_of("qwen3_vl"), case_of("qwen3_vl")
    with torch.no_grad():
        dense = model(**case.inputs).logits
        with PRUNER.on(model, case.layout):
            pruned = model(**case.inputs).logits
    inside, done = threading.Event(), threading.Event()
    results = {}

    def prunes() -> None:
        with torch.no_grad(), PRUNER.on(model, case.layout) as run:
            inside.set()
            done.wait(30)
            results["pruned"] = model(**case.inputs).logits
            results["stages"] = len(run.stages[0])

    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        task = pool.submit(prunes)
        inside.wait(30)
        results["dense"] = model(**case.inputs).logits
        with Dense().on(model, case.layout):
            results["Dense"] = model(**case.inputs).logits
        done.set()
        task.result()
    assert torch.equal(results["dense"], dense)
    assert torch.equal(results["Dense"], dense)
    assert torch.equal(results["pruned"], pruned)
    assert results["stages"] == 2


@pytest.mark.slow
def test_threads_prune_one_model_each_in_its_own_way() -> None:
    model = model_of("qwen3_vl")
    before = hooks_on(model)
    cases = [case_of("qwen3_vl", seed=seed) for seed in range(4)]
    ways = [RaDiCal(keep=k, layers=s, profile=PROFILE) for k, s in ((0.2, (1, 4)), (0.5, (0, 2, 6)))]

    @torch.no_grad()
    def survivors(job: tuple[RaDiCal, Case]) -> list[list[int]]:
        pruner, case = job
        with pruner.on(model, case.layout) as run:
            greedy(model, case.inputs, 2)
        return [record.survivors.tolist() for record in run.stages[0]]

    jobs = [(way, case) for way in ways for case in cases] * 2
    alone = list(map(survivors, jobs))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(survivors, jobs)) == alone
    assert hooks_on(model) == before
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_another_tasks_dense_call_is_not_pruned() -> None:
    model, case = model_of("qwen3_vl"), case_of("qwen3_vl")
    with torch.no_grad():
        dense = model(**case.inputs).logits

    async def both() -> tuple[torch.Tensor, torch.Tensor]:
        inside, done = asyncio.Event(), asyncio.Event()

        async def prunes() -> torch.Tensor:
            with torch.no_grad(), PRUNER.on(model, case.layout):
                inside.set()
                await done.wait()
                return model(**case.inputs).logits

        task = asyncio.create_task(prunes())
        await inside.wait()
        with torch.no_grad():
            other = model(**case.inputs).logits
        done.set()
        return other, await task

    other, pruned = asyncio.run(both())
    assert torch.equal(other, dense)
    assert pruned.shape[1] < dense.shape[1]


def test_a_pass_that_ran_in_another_thread_is_told() -> None:
    model, case = model_of("qwen3_vl"), case_of("qwen3_vl")
    with pytest.warns(RuntimeWarning, match="ran unpruned"), PRUNER.on(model, case.layout):
        ThreadPoolExecutor(1).submit(lambda: model(**case.inputs)).result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with PRUNER.on(model, case.layout), torch.no_grad():
            model(**case.inputs)


# Other ways to call a model.


@pytest.mark.parametrize("family", first_fast(TINY_FAMILIES))
def test_hidden_states_are_the_stock_models_where_nothing_is_dropped(family: str) -> None:
    for asked_before in (False, True):  # Hugging Face's recorders come before our hooks, or after
        model, case = copy.deepcopy(model_of(family)), case_of(family)
        stock_model = copy.deepcopy(model)
        with torch.no_grad():
            stock = stock_model(**case.inputs, output_hidden_states=True).hidden_states
            if asked_before:
                model(**case.inputs, output_hidden_states=True)
            with RaDiCal(keep=1.0, layers=(1, 4), profile=PROFILE).on(model, case.layout):
                ours = model(**case.inputs, output_hidden_states=True).hidden_states
        assert len(ours) == len(stock) == 9
        for number, (a, b) in enumerate(zip(ours, stock, strict=True)):
            assert torch.equal(a, b), number


def test_other_ways_to_generate_are_refused_by_name() -> None:
    model, case = model_of("qwen3_vl"), case_of("qwen3_vl")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        with pytest.raises(LayoutError, match="use_cache=True"), PRUNER.on(model, case.layout):
            model.generate(**case.inputs, **options, use_cache=False)
        with pytest.raises(LayoutError, match="no chunked prefill"), PRUNER.on(model, case.layout):
            model.generate(**case.inputs, **options, prefill_chunk_size=16)
        with pytest.raises(LayoutError, match="no assisted decoding"), PRUNER.on(model, case.layout):
            model.generate(**case.inputs, **options, prompt_lookup_num_tokens=3)


def test_decoded_tokens_can_be_taken_back() -> None:
    """As assisted decoding does with tokens that it guessed wrongly."""
    model, case = model_of("qwen3_vl"), case_of("qwen3_vl")
    with torch.no_grad(), PRUNER.on(model, case.layout):
        cache = model(**case.inputs, use_cache=True).past_key_values
        model(input_ids=torch.tensor([[7, 8]]), past_key_values=cache)
        kept = copy.deepcopy([(layer.keys, layer.values) for layer in cache.layers])
        expected = model(input_ids=torch.tensor([[9]]), past_key_values=cache).logits
        cache.crop(-1)
        model(input_ids=torch.tensor([[11, 12, 13]]), past_key_values=cache)
        cache.crop(-3)
        for layer, (keys, values) in zip(cache.layers, kept, strict=True):
            assert torch.equal(layer.keys, keys)
            assert torch.equal(layer.values, values)
        assert torch.equal(model(input_ids=torch.tensor([[9]]), past_key_values=cache).logits, expected)
        cache.layers[5].crop(-1)
        with pytest.raises(LayoutError, match="the same number of decoded tokens from every layer"):
            model(input_ids=torch.tensor([[9]]), past_key_values=cache)
        cache.crop(-5)
        with pytest.raises(LayoutError, match="into the prompt"):
            model(input_ids=torch.tensor([[9]]), past_key_values=cache)


def test_a_hook_that_another_thread_is_removing_does_nothing() -> None:
    """torch reads a module's hooks and their flags one after the other: in between, a flag may be gone."""
    module, called = torch.nn.Linear(2, 2), []
    with Hooks() as hooks:
        hooks.before(module, lambda *arguments: called.append(arguments))
        (hook,) = module._forward_pre_hooks.values()
        assert hook(module, (torch.zeros(1, 2),)) is None
        assert not called
        module(torch.zeros(1, 2))
    assert len(called) == 1
