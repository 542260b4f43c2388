"""The engine: forward hooks on a stock Hugging Face model that drop visual tokens on the way.

A prompt runs through the model's own code. Before (or after) a stage's layer, the hidden states are
gathered to the survivors. The hook of every later layer passes it the survivors' rotary embeddings and mask,
which the model keeps as local variables of its loop. Positions are never renumbered. Each layer's key-value
cache holds the tokens that ran through it (`decoding` masks each layer by its own survivors).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from radical_rerank.backbones.decoding import Decoding
from radical_rerank.backbones.families.base import FULL, LINEAR, Family, Tokens
from radical_rerank.backbones.hooks import Hooks, entered_for
from radical_rerank.backbones.model import (
    base_model,
    decoder_shape,
    device_of,
    family_of,
    identity_of,
    text_model,
    unwrapped,
)
from radical_rerank.backbones.view import LazyTensor, View, all_keys
from radical_rerank.errors import CalibrationError, LayoutError, UnsupportedModelError
from radical_rerank.method import keep_count
from radical_rerank.pruning import (
    Layout,
    Merge,
    Profile,
    PrunedStage,
    Pruner,
    Share,
    Stage,
    VisionSignals,
)


class Run:
    """One `with pruner.on(model, layouts) as run`.

    `stages`, `seconds` and `tokens_per_layer` describe the latest prompt that ran.
    """

    def __init__(
        self,
        pruner: Pruner,
        model: Any,
        layouts: Sequence[Layout],
        signals: Sequence[VisionSignals] | None = None,
        shares: Sequence[Share] | None = None,
        prefix: Prefix | None = None,
    ) -> None:
        self._text = text_model(model)
        self._base = base_model(model)
        self._family = family_of(self._base.config)
        self._image_token: int = self._base.config.image_token_id
        self._layers = list(self._text.layers)
        needed = pruner.needs_profile
        if needed is not None:
            profile = Profile.find(identity_of(model), alpha=needed == "alpha")
            if profile is None:
                raise CalibrationError(
                    f"{type(pruner).__name__} needs the model's trust profile, and none is known: pass "
                    "profile=calibrate(...)"
                )
            pruner = pruner.with_profile(profile)
        self._pruner = pruner
        self._layouts = list(layouts)
        self._signals = _checked(signals, self._layouts) if pruner.reads_encoder else None
        self._shares, self._prefix = shares, prefix
        sizes = [len(layout.positions) for layout in self._layouts]
        if shares is not None and [len(share.prior) for share in shares] != sizes:
            raise LayoutError("the shares of the list's budget do not fit the candidates' tokens")
        stages = stages_of(pruner, len(self._layers), self._family.readable)
        self._stages = {(stage.layer, stage.when): stage for stage in stages}
        self._plans: list[Mapping[Stage, int] | None] = [None] * len(self._layouts)
        if shares is not None:
            self._plans = [share.counts for share in shares]
        elif getattr(pruner, "flops", None) is not None:  # a budget that each prompt meets in its own way
            shape = decoder_shape(self._base.config)
            self._plans = [pruner.plan(stages, layout, shape) for layout in self._layouts]
        self._model = model
        self._images: Tensor | None = None
        self._mask: Any = None
        self._groups: Tensor | None = None
        self._positions_given = False
        self._state: BatchState | None = None
        self._decoding: Decoding | None = None
        self._ran = False
        self.stages: list[list[PrunedStage]] = [[] for _ in self._layouts]
        self.seconds: dict[str, float] = {"prior": 0.0, "selection": 0.0}
        self.tokens_per_layer: list[int] = []
        """the longest list's tokens in each layer, at the latest prompt"""
        self.reused = (0, 0)
        """how many tokens of the latest prompt were known, and after how many layers"""

    @contextmanager
    def entered(self) -> Iterator[Run]:
        """Set the hooks for a block. They are removed after it, also after an exception."""
        if entered_for(self._text):
            raise RuntimeError("this model is already being pruned; leave the other context first")
        if not self._stages:
            yield self
            return
        with Hooks(unwrapped(self._model), self._base, self._text, owner=self._text) as hooks:
            hooks.before(self._base, self._find_images)
            hooks.before(self._text, self._begin)
            for index, layer in enumerate(self._layers):
                hooks.before(layer, partial(self._before, index))
            # A hook on the norm makes the last layer compute all rows: only if there is something to do.
            last = len(self._layers) - 1
            levels = getattr(self._base.config.vision_config, "deepstack_visual_indexes", None) or ()
            if last < len(levels) or (last, "after") in self._stages:
                hooks.before(self._text.norm, self._end)
            try:
                yield self
            finally:
                self._state = self._decoding = None
        if not self._ran and hooks.elsewhere:
            warnings.warn(
                "the model ran unpruned: it was called from another thread or task than the one that "
                "entered this context",
                RuntimeWarning,
                stacklevel=3,
            )

    # The hooks, in the order in which they run: the model without its head, its text model, each layer, the
    # final norm.

    def _find_images(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._ran = True
        self._positions_given = kwargs.get("position_ids") is not None
        self._mask = kwargs.get("attention_mask")
        ids, embeddings = kwargs.get("input_ids", args[0] if args else None), kwargs.get("inputs_embeds")
        if ids is not None:
            self._images = ids == self._image_token
        elif embeddings is not None:  # the model, too, finds placeholders by their embedding
            token = torch.tensor(self._image_token, device=embeddings.device)
            placeholder = self._text.embed_tokens(token).to(embeddings.device)
            self._images = (embeddings == placeholder).all(dim=-1)
        if self._family.own_masks and self._images is not None:
            self._groups = self._family.groups(kwargs, self._images)

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
            raise LayoutError(
                "call the whole model, not its text model: the layout is checked against the images"
            )
        embeddings = kwargs.get("inputs_embeds")
        if embeddings is None:
            raise LayoutError("the text model was called without inputs_embeds")
        state = BatchState(
            self._pruner,
            self._family,
            self._text,
            self._layouts,
            self._signals,
            self._shares,
            self._plans,
            images,
            embeddings,
            self._mask,
        )
        state.groups = None if self._groups is None else self._groups.to(embeddings.device)
        self._state, self._decoding = state, None
        # The model adds DeepStack features with a mask of the full prompt; we add them instead.
        state.deepstack = list(kwargs.pop("deepstack_visual_embeds", None) or [])
        state.visual = kwargs.pop("visual_pos_masks", None)
        self.stages, self.seconds, self.reused = state.stages, state.seconds, (0, 0)
        self.tokens_per_layer = state.lengths
        return args, kwargs

    def _continue(self, cache: Any, kwargs: dict[str, Any]) -> None:
        state = self._state
        if state is None or state.cache is not cache:
            raise LayoutError("the cache comes from a prompt that did not run inside this context")
        first = self._family.attending[0]
        if state.lengths[first] != state.length and not self._positions_given:
            # The model would count from the first cache with keys, which has lost tokens.
            raise LayoutError(
                f"decoding after a stage before layer {first} needs position_ids (`generate` passes them)"
            )
        if self._decoding is None:
            self._decoding = Decoding(state)
        self._decoding.begin_step(self._mask)

    def _before(self, index: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self._state
        assert state is not None
        hidden = args[0] if args else kwargs.pop("hidden_states")
        device = device_of(layer)  # layers may lie on several devices
        split = state.split
        if split is not None and split.inside:
            return (hidden, *args[1:]), kwargs
        if self._decoding is not None:
            hidden = hidden.to(device)
            return (hidden, *args[1:]), self._decoding.enter(index, hidden, kwargs)
        if index == 0:
            state.start(kwargs.get("past_key_values"))
        elif split is None or index > split.depth:
            hidden = self._leave(state, index - 1, hidden)
        elif index == split.depth:
            hidden = split.join(hidden)
        hidden = hidden.to(device)
        state.move(device)
        state.meet(index, hidden, kwargs)
        if index == 0:
            hidden = self._split(state, hidden, kwargs)
        stage = self._stages.get((index, "before"))
        if stage is not None:
            hidden = state.prune(stage, layer, hidden, hidden)
        if (index, "after") in self._stages:
            state.entering = hidden
        return (hidden, *args[1:]), state.enter(index, hidden, kwargs)

    def _split(self, state: BatchState, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Run the prompt in two parts up to the first cut, if it can. Returns what enters the first layer."""
        if self._prefix is None or all(stage.keep >= 1 for stage in self._stages.values()):
            return hidden  # where nothing is dropped, the model computes what it does without us
        # A stage after a layer needs all that enters this layer.
        depth = min(layer for layer, _ in self._stages)
        if not can_split(state, self._prefix, depth):
            return hidden
        state.split = split = SplitRun(self._prefix, depth, self._layers)
        rest = split.start(state, hidden, kwargs)
        self.reused = split.length, split.known
        return rest

    def _end(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self._state
        assert state is not None
        if self._decoding is not None:
            return None
        return (self._leave(state, len(self._layers) - 1, args[0]), *args[1:]), kwargs

    def _leave(self, state: BatchState, index: int, hidden: Tensor) -> Tensor:
        """Do what comes after layer `index`: add DeepStack features, prune.

        It runs before the next module, so that other hooks on the layer see the stock model's output.
        """
        layer = self._layers[index]
        if index < len(state.deepstack):
            hidden = state.add_deepstack(index, hidden, watched=bool(layer._forward_hooks))
        stage = self._stages.get((index, "after"))
        if stage is not None:
            assert state.entering is not None
            hidden = state.prune(stage, layer, state.entering, hidden)
            state.entering = None
        return hidden


class BatchState:
    """The state of one batch of prompts: which tokens are alive, and what the later layers get.

    B prompts, padded on the left to S tokens; n of them are alive at present. List b has V_b candidate
    visual tokens, n_b of them alive.

    ================  ====================  ==========================================================
    embeddings        (B, S, d)             input embeddings; at visual tokens, the encoder's outputs
    index             (B, n)                position in the prompt of each token that is alive
    columns           (B, n)                their new positions, if they are renumbered
    valid             (B, n) or None        which of them are not padding; None if there is none
    rotary[kind]      2 × (B or 1, n, hd)   their rotary embeddings in layers of this kind
    masks[kind]       as the kernel's       the mask of these layers
    candidate_of[b]   (V_b,)                the candidate of each visual token
    alive[b]          (n_b,)                the visual tokens alive, as indices among the V_b
    slots[b]          (n_b,)                where they are in `index[b]`
    marks[b]          (m,)                  where its candidates' markup is in `index[b]`
    rows_of[b]        (m, 2)                from which to which of the V_b visual tokens it belongs to
    visual            (B, S) or None        where the prompt has visual tokens (DeepStack)
    deepstack[l]      (ΣV, d)               features to add after layer l
    lengths[l]        n                     tokens that ran through layer l
    layer_valid[l]    (B, n) or None        `valid` at layer l
    layer_index[l]    (B, n)                `index` at layer l
    groups            (B, S) or None        tokens that see each other in both directions
    layer_pruned[l]   bool                  whether tokens were dropped before layer l
    ================  ====================  ==========================================================
    """

    def __init__(
        self,
        pruner: Pruner,
        family: Family,
        text: Any,
        layouts: Sequence[Layout],
        signals: Sequence[VisionSignals] | None,
        shares: Sequence[Share] | None,
        plans: Sequence[Mapping[Stage, int] | None],
        images: Tensor,
        embeddings: Tensor,
        mask: Any,
    ) -> None:
        """Check the layouts against the prompt.

        images: (B, S) where the prompt has image tokens
        embeddings: (B, S, d)
        mask: (B, S) or None
        """
        self.pruner, self.family, self.text = pruner, family, text
        self.embeddings = embeddings
        batch, self.length = embeddings.shape[:2]
        if batch % len(layouts):
            raise LayoutError(f"{len(layouts)} layouts cannot describe a batch of {batch}")
        self.layouts = [layout for layout in layouts for _ in range(batch // len(layouts))]
        self.signals = [own for own in signals or () for _ in range(batch // len(layouts))]
        self.shares = [own for own in shares or () for _ in range(batch // len(layouts))]
        self.plans = [own for own in plans for _ in range(batch // len(layouts))]
        self.valid = self._padding(mask, embeddings.device)
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
        self.marks, self.rows_of = self._marks(device)
        self.pruned = False
        self.columns = self.index
        self.deepstack: list[Tensor] = []
        self.visual: Tensor | None = None
        self.entering: Tensor | None = None
        self.split: SplitRun | None = None
        self.rotary: dict[str, tuple[Tensor, Tensor]] = {}
        self.masks: dict[str, Any] = {}
        self.cache: Any = None
        self.groups: Tensor | None = None
        self.lengths: list[int] = []
        self.layer_valid: list[Tensor | None] = []
        self.layer_index: list[Tensor] = []
        self.layer_pruned: list[bool] = []
        # A prior that was compared with the whole list is what the method finds at its first stage.
        self.memory: list[dict[str, Tensor]] = [{"prior": share.prior} for share in self.shares]
        self.memory = self.memory or [{} for _ in self.layouts]
        self.stages: list[list[PrunedStage]] = [[] for _ in self.layouts]
        self.seconds = {"prior": 0.0, "selection": 0.0}

    def _marks(self, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """Per list, (m,) where its candidates' markup is, and (m, 2) from which to which of the V visual
        tokens each belongs to."""
        slots, rows = [], []
        for layout, offset in zip(self.layouts, self.offsets, strict=True):
            own = [(p, row) for p, row in layout.markup if any(p in c for c in layout.candidates)]
            ends = torch.tensor([(row.start, row.stop) for _, row in own], dtype=torch.long).view(-1, 2)
            slots.append(torch.tensor([p + offset for p, _ in own], dtype=torch.long, device=device))
            rows.append(torch.searchsorted(layout.positions, ends).to(device))
        return slots, rows

    def _padding(self, mask: Any, device: torch.device) -> Tensor | None:
        """Return (B, S) which tokens are not padding, None if there is none. Checks the layouts' lengths."""
        lengths = [layout.length for layout in self.layouts]
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
            raise LayoutError("only attention masks of shape (batch, tokens) are supported")
        counts = [self.length] * len(lengths) if mask is None else mask.sum(dim=1).tolist()
        for row, (expected, count) in enumerate(zip(lengths, counts, strict=True)):
            if expected != count:
                raise LayoutError(
                    f"prompt {row} has {count} tokens, its layout describes {expected}. A prompt must run "
                    "alone and in one pass (no assisted decoding, no chunked prefill), and what follows it "
                    "needs the cache (use_cache=True)"
                )
        if mask is None or min(lengths) == self.length:
            return None
        valid = mask.to(device).bool()
        columns = torch.arange(self.length, device=device)
        if not torch.equal(valid, columns >= self.length - valid.sum(dim=1, keepdim=True)):
            raise LayoutError("prompts of different lengths must be padded on the left")
        return valid

    def _check_images(self, images: Tensor) -> None:
        """Raise a LayoutError if a layout's images are not where the prompt's image tokens are."""
        for row, (layout, offset) in enumerate(zip(self.layouts, self.offsets, strict=True)):
            described = torch.zeros(self.length, dtype=torch.bool)
            described[layout.positions + offset] = True
            for span in layout.protected:
                described[span.start + offset : span.stop + offset] = True
            shown = images[row].cpu()
            marks = [position + offset for position, _ in layout.markup]
            described[marks] = shown[marks]  # placeholders or text, both will do
            if self.valid is not None:
                shown = shown & self.valid[row].cpu()
            wrong = (described != shown).nonzero()
            if len(wrong):
                place = int(wrong[0])
                says, has = ("image", "text") if described[place] else ("text", "an image")
                raise LayoutError(
                    f"the layout does not describe prompt {row}: at position {place - offset} it says "
                    f"{says}, but the prompt has {has}"
                )

    # Running the prompt.

    def start(self, cache: Any) -> None:
        """Take over the cache that the model made, or was given."""
        self.cache = cache
        if cache is not None and not _grows(cache):
            raise UnsupportedModelError(
                f"{type(cache).__name__} keeps all layers at one length; use a DynamicCache"
            )

    def move(self, device: torch.device) -> None:
        """Follow the hidden states to the device of the next layer.

        The prompt's embeddings and DeepStack features stay where they are; what is read of them is moved.
        """
        index = self.index.to(device)
        if index is self.index:
            return
        self.index = index
        self.valid = None if self.valid is None else self.valid.to(device)
        self.rotary = {kind: (cos.to(device), sin.to(device)) for kind, (cos, sin) in self.rotary.items()}
        self.groups = None if self.groups is None else self.groups.to(device)
        if self.pruned and self.compact:
            self.columns = self.columns.to(device)
        for own in (self.candidate_of, self.alive, self.slots, self.marks, self.rows_of):
            own[:] = [tensor.to(device) for tensor in own]
        for memory in self.memory:
            memory |= {name: tensor.to(device) for name, tensor in memory.items()}
        self.masks = {}

    def meet(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> None:
        """Gather the rotary embeddings that the model made for layer `index`, once for layers of a kind."""
        kind = self.family.kinds[index]
        if kind in self.rotary or kind == LINEAR:
            return
        rotary = kwargs["position_embeddings"]
        if self.pruned and self.compact:
            rotary = self.family.rotary(self.text, hidden, self.columns, kind)
        cos, sin = (part.to(hidden.device) for part in rotary)
        if self.pruned and not self.compact:
            cos, sin = _take(cos, self.index), _take(sin, self.index)
        self.rotary[kind] = cos, sin

    def enter(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of layer `index` for the tokens that are alive."""
        self.lengths.append(self.index.shape[1])
        self.layer_valid.append(self.valid)
        self.layer_index.append(self.index)
        self.layer_pruned.append(self.pruned)
        if self.split is not None and index < self.split.depth:
            return self.split.enter(self, hidden, kwargs)
        if not self.pruned:
            return kwargs
        self.meet(index, hidden, kwargs)
        kind = self.family.kinds[index]
        if kind not in self.masks:
            tokens = Tokens(self.valid, self.index, self.length, groups=self.groups)
            self.masks[kind] = self.mask(index, hidden, tokens)
        kwargs["attention_mask"] = self.masks[kind]
        if kind in self.rotary:
            kwargs["position_embeddings"] = self.rotary[kind]
        # Rotation uses the argument above. Attention kernels read position_ids only to find packed
        # sequences, and would take the gaps between survivors for boundaries.
        kwargs["position_ids"] = None
        return kwargs

    def add_deepstack(self, index: int, hidden: Tensor, *, watched: bool) -> Tensor:
        """Add level `index` of the visual features to the visual tokens that are alive.

        hidden: of all tokens that are alive, or of the first part of a prompt with all its pictures
        watched: other hooks may keep the layer's output, so it is not changed in place
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
        mask = mask[:, : hidden.shape[1]]
        if watched or hidden.requires_grad:
            hidden = hidden.clone()
        hidden[mask] += features
        return hidden

    def prune(self, stage: Stage, layer: Any, entering: Tensor, hidden: Tensor) -> Tensor:
        """Ask the method for each list's survivors and gather `hidden` to them.

        entering: (B, n, d) input of the layer, for its attention
        hidden: (B, n, d) what is gathered
        """
        start = time.perf_counter()
        with torch.no_grad():  # the choice has no gradient, the survivors do
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
                self._drop_markup(row, stay)
        if dropped:
            hidden = self._gather(hidden, stay)
        self.seconds["selection"] += time.perf_counter() - start
        return hidden

    def _drop_markup(self, row: int, stay: Tensor) -> None:
        """Markup stays as long as a token of its row does. stay: (B, n) is changed"""
        if not len(self.marks[row]):
            return
        first, last = torch.searchsorted(self.alive[row], self.rows_of[row]).unbind(-1)
        seen = first < last
        stay[row, self.marks[row][~seen]] = False
        self.marks[row], self.rows_of[row] = self.marks[row][seen], self.rows_of[row][seen]

    def _choose(self, stage: Stage, layer: Any, entering: Tensor, hidden: Tensor) -> list[Tensor | Merge]:
        """Return what the method keeps of each list, and add it to `stages`."""
        rotary = self.rotary.get(self.family.kinds[stage.layer])
        keys = LazyTensor(partial(all_keys, self.family, layer, entering, rotary))
        chosen: list[Tensor | Merge] = []
        for row, stages in enumerate(self.stages):
            view = View(self, row, stage, layer, entering, hidden, keys, rotary)
            alive = len(view.alive)
            plan = self.plans[row]
            if plan is not None:
                count = min(alive, plan[stage])
            else:
                whole = len(self.candidate_of[row]) if stage.of_all else alive
                count = min(alive, keep_count(stage.keep, whole))
            # A list of texts alone has nothing to choose from.
            chosen.append(self.pruner.select(view, count) if alive else view.alive)
            kept = chosen[-1].kept if isinstance(chosen[-1], Merge) else chosen[-1]
            survivors = view.alive[kept]
            stages.append(PrunedStage(stage.layer, stage.when, alive, len(survivors), survivors, view.facts))
        return chosen

    def _mix(self, stage: Stage, row: int, hidden: Tensor, merge: Merge) -> Tensor:
        """Mix a list's hidden states into its survivors, and later DeepStack features in the same way."""
        slots = self.slots[row]
        mix = merge.mix.to(hidden.device, hidden.dtype)
        hidden = hidden.clone()
        hidden[row, slots[merge.kept]] = mix @ hidden[row, slots]
        if self.visual is not None:
            visual = self.visual.to(hidden.device)
            ordinal = visual.flatten().cumsum(0).view_as(visual) - 1
            tokens = ordinal[row, self.index[row, slots]]
            for level in range(stage.layer + (stage.when == "after"), len(self.deepstack)):
                features = self.deepstack[level].to(hidden.device, copy=True)
                features[tokens[merge.kept]] = mix.to(features.dtype) @ features[tokens]
                self.deepstack[level] = features
        return hidden

    def _gather(self, hidden: Tensor, stay: Tensor) -> Tensor:
        """Drop the tokens that do not stay. Shorter lists are padded on the left."""
        counts = stay.sum(dim=1)
        longest = int(counts.max())
        ragged = bool((counts != longest).any())
        if ragged:
            # A stable sort moves dropped tokens to the front. The last `longest` columns are the survivors
            # in order, with padding before them.
            order = stay.int().argsort(dim=1, stable=True)[:, -longest:]
            self.valid = torch.arange(longest, device=stay.device) >= longest - counts[:, None]
        else:
            order = stay.nonzero()[:, 1].view(len(stay), longest)
            self.valid = None
        place = stay.cumsum(dim=1) - 1 + (longest - counts)[:, None]
        self.slots = [place[row, slots] for row, slots in enumerate(self.slots)]
        self.marks = [place[row, slots] for row, slots in enumerate(self.marks)]
        self.index = self.index.gather(1, order)
        if self.compact:
            columns = torch.arange(longest, device=stay.device) - (longest - counts)[:, None]
            self.columns = columns.clamp(min=0)
        self.rotary, self.masks, self.pruned = {}, {}, True
        return _take(hidden, order)

    def mask(self, index: int, hidden: Tensor, tokens: Tokens) -> Any:
        """Return the mask of layer `index`, as its kernel expects it. hidden: (B, r, d) what enters it"""
        from transformers.masking_utils import create_causal_mask

        kind, config = self.family.kinds[index], self.text.config
        if kind == LINEAR:
            return tokens.valid
        if self.family.own_masks:
            return self.family.mask(kind, config, hidden, tokens, self.cache, index)
        return create_causal_mask(
            config=config,
            inputs_embeds=hidden,
            attention_mask=tokens.valid,
            past_key_values=self.cache,
            layer_idx=index,
        )

    @property
    def compact(self) -> bool:
        """Whether survivors get new, consecutive positions."""
        return self.pruner.positions == "compact"


def _take(x: Tensor, order: Tensor) -> Tensor:
    """x[b, order[b]] for x: (B or 1, n, d), order: (B, m)."""
    if len(order) == 1:
        return x.index_select(1, order[0])
    return x.expand(len(order), -1, -1).gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


def _grows(cache: Any) -> bool:
    from transformers import DynamicCache

    return isinstance(cache, DynamicCache)


def _checked(signals: Sequence[VisionSignals] | None, layouts: Sequence[Layout]) -> Sequence[VisionSignals]:
    if signals is None:
        raise LayoutError("this method reads the vision encoder: pass signals=, one per prompt")
    sizes = [len(layout.positions) for layout in layouts]
    if [len(own.attention) for own in signals] != sizes:
        raise LayoutError("the encoder's signals do not fit the candidates' tokens")
    return signals


def stages_of(pruner: Pruner, num_layers: int, readable: Sequence[int]) -> list[Stage]:
    """Return a method's stages, checked, and at layers that it can read."""
    stages = pruner.stages(num_layers)
    places = [(stage.layer, stage.when) for stage in stages]
    for stage in stages:
        if places.count((stage.layer, stage.when)) > 1:
            raise LayoutError(f"there are two stages {stage.when} layer {stage.layer}")
        if not 0 <= stage.layer < num_layers or stage.when not in ("before", "after"):
            raise LayoutError(
                f"there is no place {stage.when!r} layer {stage.layer}: the model has {num_layers} layers"
            )
        if not 0 < stage.keep <= 1:
            raise LayoutError(f"the stage at layer {stage.layer} keeps {stage.keep}, not in (0, 1]")
    moves = pruner.reads_attention and len(readable) < num_layers
    return at_attention(stages, readable) if moves else stages


def at_attention(stages: Sequence[Stage], readable: Sequence[int]) -> list[Stage]:
    """Move stages to layers whose attention can be read: to the nearest one, the shallower of two.

    Stages that meet at one place become one, which keeps what they would have kept together.
    """
    moved: dict[tuple[int, str], Stage] = {}
    for stage in sorted(stages, key=lambda stage: (stage.layer, stage.when == "after")):
        layer = min(readable, key=lambda other: (abs(other - stage.layer), other))
        earlier = moved.get((layer, stage.when))
        keep = stage.keep if earlier is None or stage.of_all else stage.keep * earlier.keep
        moved[layer, stage.when] = replace(stage, layer=layer, keep=keep)
    return list(moved.values())


# The prompt before the query.
#
# A decoder is causal, and the query comes after the pictures. So the layers before the first cut can run in
# two parts: the tokens before the query, which see nothing of it, and the rest, which sees the keys and
# values of the first part. The first part is kept for the next query over the same candidates.
#
# Prompts run in these two parts whether or not the first one is known, so a ranking is the same, bit by bit.


@dataclass(frozen=True)
class PrefixState:
    """What the first layers made of P tokens.

    entering: by D, (1, P, d) what enters layer D, for each D at which a prompt was cut
    keys, values: of all layers before the largest D, (1, KV, P, hd)
    pictures: the vision features among the tokens
    """

    entering: Mapping[int, Tensor]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    pictures: tuple[Tensor, ...]

    def before(self, depth: int) -> int:
        """The largest D up to `depth` from which a prompt can go on; 0 if there is none."""
        return max((known for known in self.entering if known <= depth), default=0)

    @property
    def nbytes(self) -> int:
        """The memory that it takes. The pictures are those of the vision cache."""
        return sum(tensor.nbytes for tensor in (*self.entering.values(), *self.keys, *self.values))


class KnownStates(Protocol):
    """Where states are kept."""

    def get(self, key: Hashable) -> PrefixState | None:
        """Return the state of this key, or None."""

    def keep(self, key: Hashable, value: PrefixState, size: int) -> None:
        """Keep a state of so many bytes, instead of an earlier one of this key."""


@dataclass(frozen=True)
class Prefix:
    """The part of a prompt that may be known, and where it is kept.

    ids: the P tokens before the query
    pictures: the vision features among them
    known: the states that are kept
    """

    ids: tuple[int, ...]
    pictures: tuple[Tensor, ...]
    known: KnownStates

    @property
    def length(self) -> int:
        """P, the number of tokens."""
        return len(self.ids)

    @property
    def key(self) -> Hashable:
        """The same for the same tokens and pictures. A state keeps its pictures, so no other has their id."""
        return self.ids, tuple(map(id, self.pictures))


class SplitRun:
    """One prompt that runs in two parts up to layer `depth`, where the first cut is."""

    def __init__(self, prefix: Prefix, depth: int, layers: Sequence[Any]) -> None:
        self._prefix, self._layers, self.depth = prefix, layers, depth
        self._cache: Any = None
        self._mask: Any = None
        self._joined: Tensor | None = None
        self.known = 0
        """how many layers were known before"""
        self.inside = False
        """whether a layer runs for the first part"""

    @property
    def length(self) -> int:
        """P, the number of tokens in the first part."""
        return self._prefix.length

    def start(self, state: BatchState, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Find or compute the first part. hidden: (1, S, d) -> (1, S − P, d) the second part"""
        from transformers import DynamicCache

        known, first = self._prefix.known.get(self._prefix.key), hidden[:, : self.length]
        if known is None:
            known = PrefixState({}, (), (), self._prefix.pictures)
        self.known = known.before(self.depth)
        if self.known < self.depth:
            known = self._run_on(known, first, state, kwargs)
            self._prefix.known.keep(self._prefix.key, known, known.nbytes)
        self._joined, self._cache = known.entering[self.depth], DynamicCache()
        for index in range(self.depth):
            self._cache.update(known.keys[index], known.values[index], index)
        return hidden[:, self.length :]

    def _run_on(
        self, known: PrefixState, hidden: Tensor, state: BatchState, kwargs: dict[str, Any]
    ) -> PrefixState:
        """Run the first part on to layer `depth`. hidden: (1, P, d) what enters the first layer"""
        from transformers import DynamicCache

        hidden, cache = known.entering.get(self.known, hidden), DynamicCache()
        for index in range(self.known):  # a cache has no gaps
            cache.update(known.keys[index][:, :, :0], known.values[index][:, :, :0], index)
        self.inside = True
        try:
            for index in range(self.known, self.depth):
                layer = self._layers[index]
                hidden = hidden.to(device_of(layer))
                own = self._cut(kwargs, slice(0, self.length), hidden.device)
                own |= {"past_key_values": cache, "attention_mask": None}
                hidden = layer(hidden, **own)
                if index < len(state.deepstack):
                    hidden = state.add_deepstack(index, hidden, watched=True)
        finally:
            self.inside = False
        new = cache.layers[self.known : self.depth]
        keys = (*known.keys[: self.known], *(one.keys for one in new), *known.keys[self.depth :])
        values = (*known.values[: self.known], *(one.values for one in new), *known.values[self.depth :])
        return PrefixState({**known.entering, self.depth: hidden}, keys, values, known.pictures)

    def enter(self, state: BatchState, hidden: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a layer for the second part. hidden: (1, S − P, d)"""
        from transformers.masking_utils import create_causal_mask

        if self._mask is None:
            self._mask = create_causal_mask(
                config=state.text.config,
                inputs_embeds=hidden,
                attention_mask=None,
                past_key_values=self._cache,
            )
        own = self._cut(kwargs, slice(self.length, None), hidden.device)
        return own | {"past_key_values": self._cache, "attention_mask": self._mask}

    def join(self, hidden: Tensor) -> Tensor:
        """Return (1, S, d) both parts. hidden: (1, S − P, d)"""
        assert self._joined is not None
        return torch.cat([self._joined.to(hidden.device), hidden], dim=1)

    def _cut(self, kwargs: dict[str, Any], part: slice, device: torch.device) -> dict[str, Any]:
        cos, sin = kwargs["position_embeddings"]
        rotary = cos[:, part].to(device), sin[:, part].to(device)
        return {**kwargs, "position_embeddings": rotary, "position_ids": None}


def can_split(state: BatchState, prefix: Prefix, depth: int) -> bool:
    """Return whether a prompt can run in two parts up to layer `depth`.

    It must run alone and without a cache of its own, on layers with full attention, and all its pictures must
    be in the first part.
    """
    return (
        depth > 0
        and state.cache is None
        and len(state.layouts) == 1
        and last_picture(state.layouts[0]) <= prefix.length < state.length
        and not state.family.own_masks
        and set(state.family.kinds[:depth]) == {FULL}
        and not torch.is_grad_enabled()
    )


def last_picture(layout: Layout) -> int:
    """Return where the last picture of a prompt ends."""
    return max((span.stop for span in (*layout.candidates, *layout.protected)), default=0)
