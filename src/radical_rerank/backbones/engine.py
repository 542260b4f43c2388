"""The engine: forward hooks on a stock Hugging Face model that drop tokens on the way.

A prompt runs through the model's own code. Before (or after) a stage's layer the hidden states
are gathered to the survivors; every later layer's hook swaps in the survivors' rotary embeddings
and mask, which the model holds as loop locals. Positions are never renumbered. Each layer's
key-value cache holds just what ran through it, and decoding masks each layer by its own survivors.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from radical_rerank.backbones.families import base_model, deepstack_levels, text_model, unwrapped
from radical_rerank.backbones.hooks import Hooks, entered_for
from radical_rerank.backbones.identity import identity_of
from radical_rerank.backbones.probe import all_keys, project, row_attention
from radical_rerank.errors import CalibrationError, LayoutError, ScoringError, UnsupportedModelError
from radical_rerank.method import keep_count
from radical_rerank.pruning import Layout, Merge, Profile, Pruner, Stage, StageRecord, VisionSignals


class Run:
    """One `with pruner.on(model, layouts) as run`. `records` and `seconds` tell of the latest prompt."""

    def __init__(
        self,
        pruner: Pruner,
        model: Any,
        layouts: Sequence[Layout],
        signals: Sequence[VisionSignals] | None = None,
    ) -> None:
        self._text = text_model(model)
        self._base = base_model(model)
        self._image_token: int = self._base.config.image_token_id
        self._layers = list(self._text.layers)
        devices = {parameter.device for parameter in self._text.parameters()}
        if len(devices) > 1:
            raise UnsupportedModelError(f"the decoder lies on several devices: {sorted(map(str, devices))}")
        if pruner.needs_profile:
            profile = Profile.find(identity_of(model))
            if profile is None:
                raise CalibrationError(
                    f"{type(pruner).__name__} needs the model's trust profile, and none is known: pass "
                    "calibration=calibrate(...)"
                )
            pruner = pruner.with_profile(profile)
        self._pruner = pruner
        self._layouts = list(layouts)
        self._signals = _checked(signals, self._layouts) if pruner.reads_encoder else None
        self._stages = _by_place(pruner.stages(len(self._layers)), len(self._layers))
        self._hooks = Hooks(unwrapped(model), self._base, self._text, owner=self._text)
        self._images: Tensor | None = None
        self._positions_given = False
        self._prompt: _Prompt | None = None
        self._ran = False
        self.records: list[list[StageRecord]] = [[] for _ in self._layouts]
        self.seconds: dict[str, float] = {"prior": 0.0, "selection": 0.0}
        self.tokens_per_layer: list[int] = []
        """the longest list's tokens in each layer, at the latest prompt"""

    def __enter__(self) -> Run:
        if entered_for(self._text):
            raise RuntimeError("this model is already being pruned; leave the other context first")
        if self._stages:
            self._hooks.__enter__()
            self._hooks.before(self._base, self._outset)
            self._hooks.before(self._text, self._begin)
            for index, layer in enumerate(self._layers):
                self._hooks.before(layer, partial(self._before, index))
            if self._leaves(len(self._layers) - 1):
                self._hooks.before(self._text.norm, self._end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._stages:
            return
        self._hooks.__exit__(kind, error, trace)
        self._prompt = None
        if error is None and not self._ran and self._hooks.elsewhere:
            warnings.warn(
                "the model ran unpruned: it was called from another thread or task than the one that "
                "entered this context",
                RuntimeWarning,
                stacklevel=2,
            )

    # The hooks: the model without its head, its text model, then layer by layer, the norm behind them.

    def _outset(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._ran = True
        self._positions_given = kwargs.get("position_ids") is not None
        ids, embeddings = kwargs.get("input_ids", args[0] if args else None), kwargs.get("inputs_embeds")
        if ids is not None:
            self._images = ids == self._image_token
        elif embeddings is not None:  # placeholders go by their embedding, as the model finds them
            token = torch.tensor(self._image_token, device=embeddings.device)
            self._images = (embeddings == self._text.embed_tokens(token)).all(dim=-1)

    def _begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length() > 0:
            self._continue(cache, kwargs)
            return args, kwargs
        if any(layer.training and getattr(layer, "gradient_checkpointing", False) for layer in self._layers):
            raise UnsupportedModelError(
                "gradient checkpointing runs each layer twice, and pruning would then prune twice: "
                "call model.gradient_checkpointing_disable()"
            )
        images, self._images = self._images, None
        if images is None:
            raise LayoutError("call the whole model, not its text model: the images are checked on the way")
        self._prompt = prompt = _Prompt(
            self._pruner, self._text, self._layouts, self._signals, images, kwargs
        )
        # The model adds DeepStack features with a mask of the full prompt; we add them instead.
        prompt.deepstack = list(kwargs.pop("deepstack_visual_embeds", None) or [])
        prompt.visual = kwargs.pop("visual_pos_masks", None)
        self.records, self.seconds = prompt.records, prompt.seconds
        self.tokens_per_layer = prompt.lengths
        return args, kwargs

    def _continue(self, cache: Any, kwargs: dict[str, Any]) -> None:
        prompt = self._prompt
        if prompt is None or prompt.cache is not cache:
            raise LayoutError("the cache comes from a prompt that did not run inside this context")
        if prompt.lengths[0] != prompt.length and not self._positions_given:
            # The model would count from its first layer's cache, which has lost tokens.
            raise LayoutError(
                "decoding after a stage before layer 0 needs position_ids (`generate` passes them)"
            )
        prompt.decode(kwargs.get("attention_mask"))

    def _before(self, index: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        prompt = self._prompt
        assert prompt is not None
        hidden = args[0] if args else kwargs.pop("hidden_states")
        if prompt.decoding:
            kwargs["attention_mask"] = prompt.decode_mask(index, hidden, kwargs.get("attention_mask"))
            if prompt.compact and prompt.layer_pruned[index]:
                kwargs["position_embeddings"] = prompt.decode_rotary(index, hidden)
            return (hidden, *args[1:]), kwargs
        if index == 0:
            prompt.start(kwargs)
        else:
            hidden = self._leave(prompt, index - 1, hidden)
        stage = self._stages.get((index, "before"))
        if stage is not None:
            hidden = prompt.prune(stage, layer, hidden, hidden)
        if (index, "after") in self._stages:
            prompt.entering = hidden
        return (hidden, *args[1:]), prompt.enter(index, hidden, kwargs)

    def _end(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        prompt = self._prompt
        assert prompt is not None
        if prompt.decoding:
            return None
        return (self._leave(prompt, len(self._layers) - 1, args[0]), *args[1:]), kwargs

    def _leaves(self, index: int) -> bool:
        """Whether anything is left to do on what a layer has put out."""
        return index < deepstack_levels(self._base) or (index, "after") in self._stages

    def _leave(self, prompt: _Prompt, index: int, hidden: Tensor) -> Tensor:
        """What is to be done after layer `index`. It is done on the way into the next module, so that whoever
        watches the layer's output sees what the stock model puts out there."""
        layer = self._layers[index]
        if index < len(prompt.deepstack):
            hidden = prompt.add_deepstack(index, hidden, watched=bool(layer._forward_hooks))
        stage = self._stages.get((index, "after"))
        if stage is not None:
            assert prompt.entering is not None
            hidden = prompt.prune(stage, layer, prompt.entering, hidden)
            prompt.entering = None
        return hidden


class _Prompt:
    """The state of one batch of prompts: who is alive, and what the later layers must be given."""

    def __init__(
        self,
        pruner: Pruner,
        text: Any,
        layouts: Sequence[Layout],
        signals: Sequence[VisionSignals] | None,
        images: Tensor,
        kwargs: dict[str, Any],
    ) -> None:
        """images: (B, S) where the prompt's own image tokens are."""
        embeddings = kwargs.get("inputs_embeds")
        if embeddings is None:
            raise LayoutError("the text model was called without inputs_embeds")
        self.pruner, self.config, self.text = pruner, text.config, text
        self.embeddings: Tensor = embeddings
        batch, self.length = embeddings.shape[:2]
        if batch % len(layouts):
            raise LayoutError(f"{len(layouts)} layouts cannot describe a batch of {batch}")
        self.layouts = [layout for layout in layouts for _ in range(batch // len(layouts))]
        self.signals = [found for found in signals or () for _ in range(batch // len(layouts))]
        self.valid = self._padding(kwargs.get("attention_mask"))
        self.offsets = [self.length - layout.length for layout in self.layouts]
        self._check_images(images)

        device = embeddings.device
        self.index = torch.arange(self.length, device=device).expand(batch, -1)
        self.candidate_of = [layout.candidate_of.to(device) for layout in self.layouts]
        self.alive = [torch.arange(len(c), device=device) for c in self.candidate_of]
        self.slots = [
            layout.positions.to(device) + offset
            for layout, offset in zip(self.layouts, self.offsets, strict=True)
        ]
        self.pruned = False
        self.deepstack: list[Tensor] = []
        self.visual: Tensor | None = None
        self.entering: Tensor | None = None
        self.rotary: tuple[Tensor, Tensor]
        self.mask: Any = None
        self.mask_is_current = True
        self.cache: Any = None
        self.decoding = False
        self.lengths: list[int] = []
        self.layer_valid: list[Tensor | None] = []
        self.layer_pruned: list[bool] = []
        self.memory: list[dict[str, Tensor]] = [{} for _ in self.layouts]
        self.records: list[list[StageRecord]] = [[] for _ in self.layouts]
        self.seconds = {"prior": 0.0, "selection": 0.0}

    def _padding(self, mask: Any) -> Tensor | None:
        """(B, S) which tokens are real; None where all are. Checks the layouts against it."""
        lengths = [layout.length for layout in self.layouts]
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
            raise LayoutError("only attention masks of shape (batch, tokens) are supported")
        found = [self.length] * len(lengths) if mask is None else mask.sum(dim=1).tolist()
        for row, (expected, count) in enumerate(zip(lengths, found, strict=True)):
            if expected != count:
                raise LayoutError(
                    f"prompt {row} has {count} tokens, its layout describes {expected}. A prompt must run "
                    "alone and in one pass (no assisted decoding, no chunked prefill), and what follows it "
                    "needs the cache (use_cache=True)"
                )
        if mask is None or min(lengths) == self.length:
            return None
        valid = mask.bool()
        columns = torch.arange(self.length, device=mask.device)
        if not torch.equal(valid, columns >= self.length - mask.sum(dim=1, keepdim=True)):
            raise LayoutError("prompts of different lengths must be padded on the left")
        return valid

    def _check_images(self, images: Tensor) -> None:
        """The layouts' images must be where the prompts' image tokens are."""
        for row, (layout, offset) in enumerate(zip(self.layouts, self.offsets, strict=True)):
            described = torch.zeros(self.length, dtype=torch.bool)
            described[layout.positions + offset] = True
            for span in layout.protected:
                described[span.start + offset : span.stop + offset] = True
            shown = images[row].cpu()
            if self.valid is not None:
                shown = shown & self.valid[row].cpu()
            wrong = (described != shown).nonzero()
            if len(wrong):
                place = int(wrong[0])
                says, has = ("image", "text") if described[place] else ("text", "an image")
                raise LayoutError(
                    f"the layout is not of prompt {row}: at position {place - offset} it says {says}, "
                    f"but the prompt has {has}"
                )

    # Running the prompt.

    def start(self, kwargs: dict[str, Any]) -> None:
        """What the model made for all its layers."""
        self.rotary = kwargs["position_embeddings"]
        self.mask = kwargs.get("attention_mask")
        self.cache = kwargs.get("past_key_values")
        if self.cache is not None and not _grows(self.cache):
            raise UnsupportedModelError(
                f"{type(self.cache).__name__} holds all layers at one length; use a DynamicCache"
            )

    def enter(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of layer `index` for the tokens that are alive."""
        self.lengths.append(hidden.shape[1])
        self.layer_valid.append(self.valid)
        self.layer_pruned.append(self.pruned)
        if not self.pruned:
            return kwargs
        if not self.mask_is_current:
            self.mask = _causal_mask(self.config, hidden, self.valid, self.cache, index)
            self.mask_is_current = True
        kwargs["attention_mask"] = self.mask
        kwargs["position_embeddings"] = self.rotary
        # Rotation has its own argument above. Attention kernels read position_ids only to find
        # packed sequences, and would take the gaps between survivors for boundaries.
        kwargs["position_ids"] = None
        return kwargs

    def add_deepstack(self, index: int, hidden: Tensor, *, watched: bool) -> Tensor:
        """Add level `index` of the visual features to the visual tokens that are alive.

        watched: somebody else has seen, and may keep, the layer's output
        """
        assert self.visual is not None
        features = self.deepstack[index].to(hidden.device, hidden.dtype)
        mask = self.visual.to(hidden.device)
        if self.pruned:
            ordinal = mask.flatten().cumsum(0).view_as(mask) - 1
            mask = mask.gather(1, self.index)
            if self.valid is not None:
                mask = mask & self.valid
            features = features[ordinal.gather(1, self.index)[mask]]
        if watched or hidden.requires_grad:
            hidden = hidden.clone()
        hidden[mask] += features
        return hidden

    def prune(self, stage: Stage, layer: Any, entering: Tensor, hidden: Tensor) -> Tensor:
        """Ask the method for each list's survivors and gather `hidden` to them.

        entering: (B, n, d) what enters the layer, for its attention; hidden: what is gathered.
        """
        start = time.perf_counter()
        with torch.no_grad():  # the choice has no gradient; what passes keeps its own
            chosen = self._choose(stage, layer, entering, hidden)
        stay = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        if self.valid is not None:
            stay &= self.valid
        dropped = False
        for row, kept in enumerate(chosen):
            if isinstance(kept, Merge):
                hidden = self._mix(stage, row, hidden, kept)
                kept = kept.kept
            alive, slots = self.alive[row], self.slots[row]
            if len(kept) < len(alive):
                dropped = True
                stay[row, slots] = False
                stay[row, slots[kept]] = True
                self.alive[row], self.slots[row] = alive[kept], slots[kept]
        if dropped:
            hidden = self._gather(hidden, stay)
        self.seconds["selection"] += time.perf_counter() - start
        return hidden

    def _choose(self, stage: Stage, layer: Any, entering: Tensor, hidden: Tensor) -> list[Tensor | Merge]:
        """Per list, what the method keeps; each choice is put on record."""
        keys = _Lazy(lambda: all_keys(layer, entering, *self.rotary))
        chosen: list[Tensor | Merge] = []
        for row, records in enumerate(self.records):
            view = _View(self, row, stage, layer, entering, hidden, keys)
            alive = len(view.alive)
            whole = len(self.candidate_of[row]) if stage.of_all else alive
            chosen.append(self.pruner.select(view, min(alive, keep_count(stage.keep, whole))))
            kept = chosen[-1].kept if isinstance(chosen[-1], Merge) else chosen[-1]
            survivors = view.alive[kept]
            records.append(StageRecord(stage.layer, stage.when, alive, len(survivors), survivors, view.facts))
        return chosen

    def _mix(self, stage: Stage, row: int, hidden: Tensor, merge: Merge) -> Tensor:
        """Give a list's survivors their new hidden states, and the DeepStack features to come theirs."""
        slots = self.slots[row]
        mix = merge.mix.to(hidden.device, hidden.dtype)
        hidden = hidden.clone()
        hidden[row, slots[merge.kept]] = mix @ hidden[row, slots]
        if self.visual is not None:
            ordinal = self.visual.flatten().cumsum(0).view_as(self.visual) - 1
            tokens = ordinal[row, self.index[row, slots]]
            for level in range(stage.layer + (stage.when == "after"), len(self.deepstack)):
                features = self.deepstack[level].clone()
                features[tokens[merge.kept]] = mix.to(features.dtype) @ features[tokens]
                self.deepstack[level] = features
        return hidden

    def _gather(self, hidden: Tensor, stay: Tensor) -> Tensor:
        """Drop what does not stay: hidden states, positions, masks. Shorter lists are padded on the left."""
        counts = stay.sum(dim=1)
        longest = int(counts.max())
        ragged = bool((counts != longest).any())
        if ragged:
            # A stable sort moves what leaves to the front; the last `longest` columns are the
            # survivors in order, behind as much padding as their list lacks.
            order = stay.int().argsort(dim=1, stable=True)[:, -longest:]
            self.valid = torch.arange(longest, device=stay.device) >= longest - counts[:, None]
        else:
            order = stay.nonzero()[:, 1].view(len(stay), longest)
            self.valid = None
        place = stay.cumsum(dim=1) - 1 + (longest - counts)[:, None]
        self.slots = [place[row, slots] for row, slots in enumerate(self.slots)]
        self.index = self.index.gather(1, order)
        hidden = _take(hidden, order)
        if self.compact:
            columns = torch.arange(longest, device=stay.device) - (longest - counts)[:, None]
            self.rotary = self._rotary_at(hidden, columns.clamp(min=0))
        else:
            self.rotary = (_take(self.rotary[0], order), _take(self.rotary[1], order))
        self.pruned, self.mask_is_current = True, False
        return hidden

    @property
    def compact(self) -> bool:
        """Whether survivors are renumbered."""
        return self.pruner.positions == "compact"

    def _rotary_at(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary embeddings of these positions, (B, n), the same on all axes of M-RoPE."""
        sections = (getattr(self.config, "rope_parameters", None) or {}).get("mrope_section")
        return self.text.rotary_emb(hidden, positions.expand(3, -1, -1) if sections else positions)

    # Decoding after the prompt.

    def decode(self, mask: Tensor | None) -> None:
        """A decode step begins. mask: (B, prompt + new tokens) or None."""
        held = {self.cache.get_seq_length(index) - length for index, length in enumerate(self.lengths)}
        if len(held) > 1 or min(held) < 0:
            # Layers hold different parts of the prompt: who cuts them must take the same tokens from each.
            raise LayoutError(
                "since the last step the cache was cut to one length for all layers, or into the prompt; on "
                "a pruned prompt, take back the same number of decoded tokens from every layer"
            )
        self.decoding = True
        self._new = None if mask is None else mask[:, self.length :].bool()
        self._masks: dict[tuple[int, int], Any] = {}

    def decode_rotary(self, index: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """New tokens follow the renumbered prompt of layer `index`."""
        valid, length = self.layer_valid[index], self.lengths[index]
        first = torch.full((len(hidden), 1), length, device=hidden.device)
        if valid is not None:
            first = valid.sum(dim=1, keepdim=True)
        decoded = self.cache.get_seq_length(index) - length
        steps = torch.arange(hidden.shape[1], device=hidden.device)
        return self._rotary_at(hidden, first + decoded + steps)

    def decode_mask(self, index: int, hidden: Tensor, mask: Any) -> Any:
        """The mask of layer `index`: over its own survivors and all that was decoded since."""
        if not self.pruned:
            return mask
        valid, length = self.layer_valid[index], self.lengths[index]
        group = length, id(valid)  # layers between two stages share one mask
        if group not in self._masks:
            columns = None
            if valid is not None:
                new = self.cache.get_seq_length(index) + hidden.shape[1] - length
                later = valid.new_ones(len(valid), new) if self._new is None else self._new[:, -new:]
                columns = torch.cat((valid, later), dim=1)
            self._masks[group] = _causal_mask(self.config, hidden, columns, self.cache, index)
        return self._masks[group]


class _View:
    """`StageView` of one list at one stage; what is not asked for is not computed."""

    def __init__(
        self,
        prompt: _Prompt,
        row: int,
        stage: Stage,
        layer: Any,
        entering: Tensor,
        hidden: Tensor,
        keys: _Lazy,
    ) -> None:
        self._prompt, self._row, self._module = prompt, row, layer
        self._entering, self._hidden, self._keys = entering, hidden, keys
        self.layer = stage.layer
        self.rows = prompt.layouts[row].rows
        self.alive = prompt.alive[row]
        self.candidate_of = prompt.candidate_of[row]
        self.key = prompt.layouts[row].key
        self.facts: dict[str, float] = {}

    @property
    def vision(self) -> Tensor:
        layout = self._prompt.layouts[self._row]
        return self._embedded(layout.positions)

    @property
    def query_embedding(self) -> Tensor:
        return self._embedded(self._prompt.layouts[self._row].query).float().mean(dim=0)

    @property
    def text_embeddings(self) -> Tensor:
        return self._embedded(self._prompt.layouts[self._row].rows)

    @property
    def hidden(self) -> Tensor:
        return self._hidden[self._row, self._prompt.slots[self._row]]

    @property
    def keys(self) -> Tensor:
        return self._keys()[self._row, :, self._prompt.slots[self._row]].transpose(0, 1)

    @property
    def text_hidden(self) -> Tensor:
        return self._hidden[self._row, self._places(self.rows)]

    @property
    def text_keys(self) -> Tensor:
        return self._keys()[self._row, :, self._places(self.rows)].transpose(0, 1)

    @property
    def signals(self) -> VisionSignals:
        return self._prompt.signals[self._row]

    def normed(self, hidden: Tensor) -> Tensor:
        return self._prompt.text.norm(hidden)

    def _places(self, rows: Sequence[int]) -> Tensor:
        """Where text rows are among the tokens alive."""
        prompt, row = self._prompt, self._row
        index = prompt.index[row]
        asked = torch.as_tensor(rows, device=index.device) + prompt.offsets[row]
        # Survivors keep their order, so a text row's place is where its position sorts. Padding
        # repeats dropped positions in front: only the real part is sorted.
        pads = 0 if prompt.valid is None else int((~prompt.valid[row]).sum())
        return torch.searchsorted(index[pads:].contiguous(), asked) + pads

    def attention(self, rows: Sequence[int] | None = None) -> Tensor:
        prompt, row = self._prompt, self._row
        wanted = self.rows if rows is None else rows
        place = self._places(wanted)
        allowed = prompt.index[row] <= prompt.index[row, place][:, None]
        if prompt.valid is not None:
            allowed = allowed & prompt.valid[row]
        cos, sin = (part[row if len(part) > 1 else 0, place] for part in prompt.rotary)
        query = project(self._module, "q", self._entering[row, place], cos, sin)
        scaling = self._module.self_attn.scaling
        found = row_attention(query, self._keys()[row], scaling, allowed, prompt.slots[row])
        if not found.sum().isfinite():
            raise ScoringError(
                f"layer {self.layer} gives attention that is not finite; check the weights, or use bfloat16 "
                "or float32 where the model does not fit float16"
            )
        return found

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        memory = self._prompt.memory[self._row]
        if name not in memory:
            start = time.perf_counter()
            memory[name] = compute()
            self._prompt.seconds["prior"] += time.perf_counter() - start
        return memory[name]

    def note(self, **facts: float) -> None:
        self.facts.update(facts)

    def _embedded(self, positions: Sequence[int] | Tensor) -> Tensor:
        """Input embeddings at positions of this list: the encoder's outputs at its visual tokens."""
        embeddings = self._prompt.embeddings
        where = torch.as_tensor(positions, device=embeddings.device) + self._prompt.offsets[self._row]
        return embeddings[self._row, where]


class _Lazy:
    """A tensor that is computed when first asked for."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._value: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._value is None:
            self._value = self._compute()
        return self._value


def _take(x: Tensor, order: Tensor) -> Tensor:
    """x[b, order[b]] for x: (B or 1, n, d), order: (B, m)."""
    if len(order) == 1:
        return x.index_select(1, order[0])
    return x.expand(len(order), -1, -1).gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


def _causal_mask(config: Any, hidden: Tensor, valid: Tensor | None, cache: Any, layer: int) -> Any:
    """The mask that the model itself would make for this layer, in its attention implementation's form."""
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(
        config=config, inputs_embeds=hidden, attention_mask=valid, past_key_values=cache, layer_idx=layer
    )


def _grows(cache: Any) -> bool:
    from transformers import DynamicCache

    return isinstance(cache, DynamicCache)


def _checked(signals: Sequence[VisionSignals] | None, layouts: Sequence[Layout]) -> Sequence[VisionSignals]:
    if signals is None:
        raise LayoutError("this method reads the vision encoder: pass its signals, one per prompt")
    sizes = [len(layout.positions) for layout in layouts]
    if [len(found.attention) for found in signals] != sizes:
        raise LayoutError("the encoder's signals do not fit the candidates' tokens")
    return signals


def _by_place(stages: Sequence[Stage], num_layers: int) -> dict[tuple[int, str], Stage]:
    places: dict[tuple[int, str], Stage] = {}
    for stage in stages:
        place = stage.layer, stage.when
        if not 0 <= stage.layer < num_layers or stage.when not in ("before", "after"):
            raise LayoutError(f"there is no place {stage.when!r} layer {stage.layer} of {num_layers}")
        if not 0 < stage.keep <= 1:
            raise LayoutError(f"the stage at layer {stage.layer} keeps {stage.keep}, not in (0, 1]")
        if place in places:
            raise LayoutError(f"two stages {stage.when} layer {stage.layer}")
        places[place] = stage
    return places
