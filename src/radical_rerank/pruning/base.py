"""The central abstraction: a `Pruner` says where and what; the engine does the rest.

Nothing here knows a model. A method is written against `StageView`, which computes only what is read. The
engine in `backbones` implements the view; `Pruner.on` is the one place that imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from radical_rerank.errors import InputError, LayoutError, unknown_name
from radical_rerank.method import DecoderShape, keep_count, top_k
from radical_rerank.pruning.profile import Profile

if TYPE_CHECKING:
    from radical_rerank.backbones.engine import Prefix


@dataclass(frozen=True)
class Layout:
    """Where things are in the prompt of one list. Positions count from the list's first token.

    Args:
        length: tokens of the prompt
        candidates: the ranges of visual tokens that may be pruned, in order: one per picture
        query: positions of the query's words; their mean input embedding is q_emb. A query without words has
            the positions of its pictures here
        protected: ranges of visual tokens that always survive (the pictures of the query)
        rows: the text rows whose attention is read; by default all text after the last candidate's picture
        key: a number for this list, so that seeded methods draw differently for each list
        markup: tokens inside these ranges that show no part of an image, such as row breaks, each with the
            range of visual tokens it belongs to: it leaves with the last of them
        owners: the candidate of each of `candidates`, ascending, if some have several pictures or none; by
            default each range is a candidate of its own
        count: the number of candidates; by default the last owner is the last candidate

    Example:
        >>> layout = Layout(length=10, candidates=(range(1, 4), range(5, 7)), query=(8,))
        >>> layout.positions.tolist(), layout.candidate_of.tolist(), layout.rows
        ([1, 2, 3, 5, 6], [0, 0, 0, 1, 1], (7, 8, 9))
    """

    length: int
    candidates: tuple[range, ...]
    query: tuple[int, ...]
    protected: tuple[range, ...] = ()
    rows: tuple[int, ...] = ()
    key: int = 0
    markup: tuple[tuple[int, range], ...] = ()
    owners: tuple[int, ...] | None = None
    count: int | None = None
    positions: Tensor = field(init=False, repr=False, compare=False)
    """(V,) positions of all candidate visual tokens"""
    candidate_of: Tensor = field(init=False, repr=False, compare=False)
    """(V,) the candidate of each of these tokens"""
    image_of: Tensor = field(init=False, repr=False, compare=False)
    """(V,) the picture of each of these tokens"""

    def __post_init__(self) -> None:
        marks = {position for position, _ in self.markup}
        visual = [[p for p in candidate if p not in marks] for candidate in self.candidates]
        sizes = torch.tensor([len(own) for own in visual], dtype=torch.long)
        every = [p for own in visual for p in own]
        object.__setattr__(self, "positions", torch.tensor(every, dtype=torch.long))
        object.__setattr__(self, "image_of", torch.arange(len(sizes)).repeat_interleave(sizes))
        owners = range(len(sizes)) if self.owners is None else self.owners
        if len(owners) != len(sizes) or list(owners) != sorted(owners):
            raise LayoutError("owners must name the candidate of every range, in ascending order")
        of_image = torch.tensor(owners, dtype=torch.long)
        object.__setattr__(self, "candidate_of", of_image[self.image_of])
        self._check()

    @property
    def num_candidates(self) -> int:
        """How many candidates there are, with those that have no picture."""
        if self.count is not None:
            return self.count
        return len(self.candidates) if self.owners is None else max(self.owners, default=-1) + 1

    def _check(self) -> None:
        end = 0
        for k, candidate in enumerate(self.candidates):
            if candidate.step != 1 or candidate.start < end or not len(candidate):
                raise LayoutError(f"candidate {k} covers {candidate}: ranges must be in order, not empty")
            end = candidate.stop
        taken = set[int]().union(*self.protected)
        if not self.rows:
            rows = tuple(p for p in range(end, self.length) if p not in taken)
            object.__setattr__(self, "rows", rows)
        if not self.rows:
            raise LayoutError("no text follows the last candidate, so no row can judge the images")
        if not self.query:
            raise LayoutError("the layout names no query tokens")
        images = set[int]().union(*self.candidates)
        if taken & images:
            raise LayoutError("a protected token is inside a candidate")
        shown = [p for p in (*self.query, *self.rows) if p in images]
        shown += [p for p in self.rows if p in taken]
        if shown:
            raise LayoutError(f"position {shown[0]} is an image's, not the query's or a text row's")
        if not all(0 <= owner < self.num_candidates for owner in self.owners or ()):
            raise LayoutError(f"there are {self.num_candidates} candidates, the owners are {self.owners}")
        for position, row in self.markup:
            if position not in images | taken or not set(row) <= images | taken:
                raise LayoutError(f"the markup at position {position} is not inside an image")
        beyond = [p for p in (*self.query, *self.rows, end - 1, *taken) if not 0 <= p < self.length]
        if beyond and self.candidates:
            raise LayoutError(f"position {beyond[0]} is outside a prompt of {self.length} tokens")


@dataclass(frozen=True)
class Stage:
    """One pruning step: ⌈keep · alive⌉ visual tokens of each list pass it.

    Args:
        layer: the decoder layer, from 0
        keep: the fraction of tokens that passes
        when: "before" the layer, which then runs on the survivors, or "after" it
        of_all: `keep` is a fraction of all of the list's visual tokens, not of those alive

    Example:
        >>> Stage(layer=4, keep=0.5)
        Stage(layer=4, keep=0.5, when='before', of_all=False)
    """

    layer: int
    keep: float
    when: Literal["before", "after"] = "before"
    of_all: bool = False


@dataclass(frozen=True)
class Merge:
    """Survivors that absorb a part of the dropped tokens: what `Pruner.select` may return.

    Args:
        kept: (count,) ascending indices into `view.alive`
        mix: (count, n): the survivors' new hidden states are mix @ those of all alive tokens. DeepStack
            features of later layers are mixed in the same way

    Example:
        >>> half = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
        >>> Merge(kept=torch.tensor([0, 2]), mix=half).kept.tolist()
        [0, 2]
    """

    kept: Tensor
    mix: Tensor


@dataclass(frozen=True)
class VisionSignals:
    """Attention and keys of the vision encoder's last block, for an image's M tokens (after the merger).

    attention: (M,) what each received; keys: (M, k) its keys, mean over heads.
    """

    attention: Tensor
    keys: Tensor


class StageView(Protocol):
    """What a method sees at one stage, of one list with V candidate tokens, n of them alive.

    Everything is computed when it is read, so a method pays only for what it uses.

    Example:
        >>> def score(self, view: StageView) -> Tensor:
        ...     return view.hidden.norm(dim=-1)  # (n,)
    """

    layer: int
    alive: Tensor
    """(n,) indices of the alive tokens among all V, ascending"""
    candidate_of: Tensor
    """(V,) the candidate of each token"""
    image_of: Tensor
    """(V,) the picture of each token; a candidate may have several"""
    rows: tuple[int, ...]
    """positions of the text rows after the images; the last is the prompt's last token"""
    key: int
    """the list's own number (see `Layout`)"""

    @property
    def vision(self) -> Tensor:
        """(V, d) encoder outputs after the merger, of all V tokens"""

    @property
    def query_embedding(self) -> Tensor:
        """(d,) mean input embedding of the query's words"""

    @property
    def query_words(self) -> Tensor:
        """(words, d) input embeddings of the query's words"""

    @property
    def text_embeddings(self) -> Tensor:
        """(rows, d) input embeddings of the text rows after the images"""

    @property
    def hidden(self) -> Tensor:
        """(n, d) hidden states of the alive tokens: entering the layer ("before") or leaving it ("after")"""

    @property
    def entering(self) -> Tensor:
        """(n, d) hidden states of the alive tokens that enter the layer, also at a stage "after" it"""

    @property
    def keys(self) -> Tensor:
        """(n, KV, hd) the layer's keys of the alive tokens, after rotation"""

    @property
    def text_hidden(self) -> Tensor:
        """(rows, d) hidden states of the text rows after the images"""

    @property
    def text_keys(self) -> Tensor:
        """(rows, KV, hd) the layer's keys of these rows, after rotation"""

    @property
    def signals(self) -> VisionSignals:
        """the encoder's signals of all V tokens, for methods that set `reads_encoder`"""

    def normed(self, hidden: Tensor) -> Tensor:
        """Apply the decoder's final norm."""

    def attention(self, rows: Sequence[int] | None = None) -> Tensor:
        """Return (rows, n) this layer's head-averaged attention from text rows to the alive tokens.

        The softmax runs over everything a row sees, so a row's sum is below 1. No (tokens × tokens) matrix is
        ever built.
        rows: positions in the prompt; by default the layout's
        """

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Return `compute()` of the first stage that calls this, and the same tensor at later stages."""

    def note(self, **facts: float) -> None:
        """Add facts about this stage, such as its α, to the report."""


@dataclass(frozen=True)
class Look:
    """The candidates and the query, before the decoder: what `Pruner.resize` and `Pruner.pool` see.

    vision: (V, d), candidate_of: (V,), query_embedding: (d,)
    count: the number of candidates, some of which may have no tokens; by default the last one has some.
        For `resize`, every picture counts as a candidate
    query_words: (words, d), whose mean is the embedding
    """

    vision: Tensor
    candidate_of: Tensor
    query_embedding: Tensor
    count: int = 0
    query_words: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.count:
            object.__setattr__(self, "count", len(self.candidate_of.bincount()))


@dataclass(frozen=True)
class Share:
    """What one candidate of a list gets if every candidate has a prompt of its own: see `Pruner.pool`.

    prior: (V_k,) the prior of its tokens, compared with the whole list
    counts: how many of them pass each stage
    """

    prior: Tensor
    counts: Mapping[Stage, int]


@dataclass(frozen=True)
class PrunedStage:
    """What one stage did to one list."""

    layer: int
    when: str
    before: int
    after: int
    survivors: Tensor
    """(after,) indices among the V candidate tokens"""
    facts: dict[str, float] = field(default_factory=dict)


class PruningRun(Protocol):
    """What `with pruner.on(model, layout) as run` gives. It describes the latest prompt that ran."""

    stages: list[list[PrunedStage]]
    """per list, its stages in order"""
    seconds: dict[str, float]
    """time spent in the method: "prior" (once per list) and "selection" (every stage)"""
    tokens_per_layer: list[int]
    """n_l: the longest list's tokens in each layer"""
    reused: tuple[int, int]
    """how many tokens were known from an earlier prompt, and after how many layers"""


@dataclass(kw_only=True)
class Pruner:
    """The base class of every method. Override `stages` and `score`; also `select` if it is not top-k.

    Args:
        keep: R, the fraction of candidate visual tokens alive at the end
        positions: "original": survivors keep their rotary positions; "compact": they are renumbered after
            each stage

    Example:
        >>> @dataclass(kw_only=True)
        ... class Norm(Pruner):
        ...     def stages(self, num_layers: int) -> list[Stage]:
        ...         return [Stage(num_layers // 3, self.keep)]
        ...     def score(self, view: StageView) -> Tensor:
        ...         return view.hidden.norm(dim=-1)
        >>> Norm(keep=0.1).stages(num_layers=36)[0].layer
        12
    """

    keep: float = 0.2

    summary: ClassVar[str] = ""
    reads_attention: ClassVar[bool] = True
    """the method reads the attention or the keys of its layers: only layers that have them will do"""
    reads_encoder: ClassVar[bool] = False
    """the method reads `view.signals`"""
    resizes: ClassVar[bool] = False
    """the method sets the candidates' sizes by `resize`"""
    positions: str = field(default="original", repr=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.keep, (int, float)) and 0 < self.keep <= 1):
            raise InputError(f"keep must lie in (0, 1], not {self.keep!r}")
        if self.positions not in ("original", "compact"):
            raise InputError(f'positions must be "original" or "compact", not {self.positions!r}')
        self.check()

    def check(self) -> None:
        """Raise an InputError if an option of the method is not valid."""

    def stages(self, num_layers: int) -> list[Stage]:
        """Where: return the stages for a decoder with this many layers."""
        raise NotImplementedError

    def score(self, view: StageView) -> Tensor:
        """What: return (n,) one number per alive visual token; the highest survive."""
        raise NotImplementedError

    def resize(self, sizes: Sequence[int], look: Callable[[], Look]) -> list[int] | None:
        """Return how many visual tokens each candidate's picture may have; None: leave them as they are.

        sizes: how many each would have
        look: encodes the pictures at full size, for methods that decide by content
        """
        raise NotImplementedError

    def plan(self, stages: Sequence[Stage], layout: Layout, shape: DecoderShape) -> dict[Stage, int] | None:
        """Return how many visual tokens of a prompt pass each stage, if that is known before it runs.

        None: ⌈keep · alive⌉ pass each.
        """
        return None

    def select(self, view: StageView, count: int) -> Tensor | Merge:
        """Return (count,) ascending indices into `view.alive` of the tokens that survive."""
        if count >= len(view.alive):
            return torch.arange(len(view.alive), device=view.alive.device)
        return top_k(self.score(view), count)

    def pool(self, look: Callable[[], Look], stages: Sequence[Stage]) -> list[Share] | None:
        """Share one budget among the candidates of a list that each have a prompt of their own (pointwise).

        look: returns all candidates of the list
        stages: as `stages` returns them

        Returns:
            One share per candidate, or None: each prompt keeps its own fraction.
        """
        return None

    def budget_of(self, tokens: int) -> int:
        """Return ⌈R · tokens⌉."""
        return keep_count(self.keep, tokens)

    # What a method needs to know. RaDiCal overrides these; most methods need nothing.

    @property
    def needs_profile(self) -> Literal["alpha", "layers"] | None:
        """What it lacks of a trust profile, if anything: α, or only the layers. `with_profile` takes one."""
        return None

    def with_profile(self, profile: Profile) -> Pruner:
        """Return this method with the model's trust profile."""
        return self

    def with_seed(self, seed: int) -> Pruner:
        """Return this method with another seed, if it draws at random."""
        return self

    def for_single_image(self) -> Pruner:
        """Return this method for a prompt with one image: there are no other candidates to compare with."""
        return self

    def on(
        self,
        model: Any,
        layout: Layout | Sequence[Layout],
        signals: Sequence[VisionSignals] | None = None,
        shares: Sequence[Share] | None = None,
        prefix: Prefix | None = None,
    ) -> AbstractContextManager[PruningRun]:
        """Prune every forward pass inside the context: `with RaDiCal(keep=0.2).on(model, layout) as run: …`.

        Args:
            model: a supported Hugging Face model
            layout: one layout per prompt of the batch
            signals: the encoder's signals of the candidates, for methods that read them (`reads_encoder`)
            shares: what each prompt gets of its list's budget (`pool`); by default each keeps its fraction
            prefix: the part of a single prompt that other queries share, and where its state is kept

        Returns:
            A context manager that gives a `PruningRun`. The model is restored on exit, also after an
            exception.
        """
        from radical_rerank.backbones.engine import Run

        layouts = [layout] if isinstance(layout, Layout) else list(layout)
        return Run(self, model, layouts, signals, shares, prefix).entered()


@dataclass(kw_only=True)
class EarlyPruner(Pruner):
    """The base class of methods that reduce before the decoder: one stage, which reads none of its layers."""

    reads_attention: ClassVar[bool] = False

    def stages(self, num_layers: int) -> list[Stage]:
        return [Stage(0, self.keep)]


def build(name: str, *, _also: Iterable[str] = (), **options: Any) -> Pruner:
    """Build a method by its name.

    Args:
        name: one of `METHODS`
        options: the method's fields

    Returns:
        The method. A misspelt name or option is an InputError that names the nearest one.

    Example:
        >>> build("fastv", keep=0.1).keep
        0.1
    """
    from radical_rerank.pruning import METHODS  # it lists the subclasses, which import this file

    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    method = METHODS[name]
    known = [field.name for field in fields(method) if field.init]
    for option in options:
        if option not in known:
            raise unknown_name("option", option, [*known, *_also], of=f"method {name!r}")
    return method(**options)


def list_counts(stages: Sequence[Stage], tokens: int) -> list[int]:
    """Return how many of a list's tokens pass each stage: ⌈share · tokens⌉, of the share that is left then.

    Rounded once, not stage by stage, so that exactly ⌈R · tokens⌉ pass the last.
    """
    counts, share = [tokens], 1.0
    for stage in stages:
        share = stage.keep if stage.of_all else share * stage.keep
        counts.append(min(counts[-1], keep_count(share, tokens)))
    return counts[1:]


def scaled(layer: int, num_layers: int, reference: int = 36) -> int:
    """Map a layer of Qwen3-VL-4B's 36, as the paper gives it, to the same depth of another decoder."""
    return min(num_layers - 1, round(layer * num_layers / reference))
