"""The Reranker: a query and candidate images in, the images in order out."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image

from radical_rerank.backbones import Backbone, ImageFeatures, Pixels, stopping
from radical_rerank.errors import InputError, OutOfWorldWarning, UnreadableAnswerError
from radical_rerank.files import EMBEDDED
from radical_rerank.method import keep_count
from radical_rerank.pruning import Look, Profile, Pruner, RaDiCal, VisionSignals, build
from radical_rerank.reranking.cache import VisionCache, content_key
from radical_rerank.reranking.calibration import profile_of
from radical_rerank.reranking.images import MAX_PIXELS, THREADS, Document, load_image, load_images
from radical_rerank.reranking.prompt import (
    IDENTIFIERS,
    Prompt,
    PromptTemplate,
    build_prompt,
    query_tokens,
    unknown_words,
)
from radical_rerank.reranking.report import PruningReport, Totals, make_report
from radical_rerank.reranking.scorers import (
    SCORERS,
    identifier_scores,
    parse_permutation,
    permutation_scores,
)
from radical_rerank.reranking.windows import rank_in_windows
from radical_rerank.scenes.drawing import is_scene_size

OnError = Literal["raise", "skip"]
ENCODED_TOGETHER = 8
"""images per call of the encoder; the next ones are preprocessed meanwhile"""


@dataclass(frozen=True)
class Query:
    """What is looked for: text, or a change in words to a reference image (composed retrieval)."""

    text: str
    reference: Document | None = None


@dataclass(frozen=True)
class RankedDocument:
    """One document of a ranking.

    index: its number in the list that was passed
    score: the log of its probability among the candidates of its list, at most 0
    """

    index: int
    score: float
    document: Document

    @property
    def probability(self) -> float:
        """exp(score), in [0, 1]. In lists longer than a window, comparable only by order."""
        return math.exp(self.score)


@dataclass(frozen=True)
class Skipped:
    """A document that could not be read (`on_error="skip"`), and why."""

    index: int
    reason: str


@dataclass(frozen=True)
class Ranking(Sequence[RankedDocument]):
    """Documents, best first; indexable and iterable.

    reports: one per prompt that ran, the last one ranked the front of the list
    repairs: how often a written permutation had to be mended (scorer "generate")
    unreadable: how many answers had no order in them, so that the prompt's was kept (`on_unreadable="keep"`)
    """

    results: tuple[RankedDocument, ...]
    reports: tuple[PruningReport, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    repairs: int = 0
    unreadable: int = 0

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, place: Any) -> Any:
        return self.results[place]

    @property
    def report(self) -> PruningReport | None:
        """What pruning did to the (front of the) list; None where no prompt ran."""
        return self.reports[-1] if self.reports else None

    @property
    def totals(self) -> Totals:
        """What all prompts took together."""
        return Totals.of(self.reports)

    @property
    def order(self) -> list[int]:
        return [result.index for result in self.results]


@dataclass(frozen=True)
class _List:
    """One prompt's worth of work: `numbers` are the documents' places in the user's list."""

    text: str
    reference: Image.Image | None
    images: Sequence[Image.Image]
    numbers: Sequence[int]

    def candidates(self, features: Sequence[ImageFeatures]) -> Sequence[ImageFeatures]:
        """The list's features without its reference's, which come first."""
        return features[len(features) - len(self.images) :]


@dataclass(frozen=True)
class _Scored:
    scores: list[float]
    repairs: int
    readable: bool
    report: PruningReport


class Reranker:
    """Ranks images for a query with a vision-language model, listwise, in one forward pass.

    Threads may share one: their calls take turns at the model. It can be pickled, without what its cache
    holds. A forked process cannot use it.

    >>> reranker = Reranker.from_pretrained("Qwen/Qwen3-VL-4B-Instruct", method="radical", keep=0.2)
    >>> ranking = reranker.rank("a dog catching a red frisbee", images, top_k=5)
    >>> ranking[0].index, ranking[0].score, ranking[0].document
    """

    def __init__(
        self,
        backbone: Backbone,
        method: str | Pruner = "radical",
        *,
        keep: float | None = None,
        scorer: str = "logits",
        template: PromptTemplate | dict[str, str] | str | Path | None = None,
        window: int | None = None,
        stride: int | None = None,
        max_image_tokens: int = 384,
        max_pixels: int = MAX_PIXELS,
        max_query_tokens: int | None = None,
        vision_cache_bytes: int = 1 << 30,
        vision_cache: VisionCache | None = None,
        max_new_tokens: int = 512,
        on_unreadable: Literal["raise", "keep"] = "raise",
        say: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        """
        method: a name (see `radical methods`) with its `options`, or a Pruner
        keep: the fraction of visual tokens alive at the end
        scorer: "logits" (one forward pass) or "generate" (the model writes the order)
        template: a family's name, a JSON file or a dict; by default the model family's own
        window, stride: lists longer than `window` (by default the template's, at most 52) are ranked in
            windows `stride` apart
        max_image_tokens: larger images are scaled down to this many visual tokens (COCO's have about 300)
        max_pixels: larger images are refused
        max_query_tokens: longer queries are refused; by default none are
        vision_cache_bytes: how much of the images seen last is kept encoded; 0 for none
        vision_cache: another Reranker's cache of the same model, to share it
        on_unreadable: with scorer "generate", what to do with an answer that names no candidate: "raise" a
            ScoringError, or "keep" the order of the prompt and count it in `Ranking.unreadable`
        say: receives one line when something slow happens that was not asked for (calibration)
        """
        if scorer not in SCORERS:
            raise InputError(f"scorer must be one of {', '.join(SCORERS)}, not {scorer!r}")
        if on_unreadable not in ("raise", "keep"):
            raise InputError(f'on_unreadable must be "raise" or "keep", not {on_unreadable!r}')
        if max_image_tokens < 1:
            raise InputError(f"max_image_tokens must be at least 1, not {max_image_tokens}")
        self.backbone = backbone
        if isinstance(method, Pruner):
            if keep is not None or options:
                raise InputError("keep and other options belong to the Pruner that was passed")
            self.pruner = method
        else:
            self.pruner = build(method, **options, **({} if keep is None else {"keep": keep}))
        self.scorer = scorer
        if not isinstance(template, PromptTemplate):
            template = PromptTemplate.of(backbone) if template is None else PromptTemplate.load(template)
        self.template = template
        window = template.window if window is None else window
        if not 2 <= window <= len(IDENTIFIERS):
            raise InputError(f"window must lie between 2 and {len(IDENTIFIERS)}, not {window}")
        stride = max(1, window // 2) if stride is None else stride
        if not 1 <= stride < window:
            raise InputError(f"stride must lie between 1 and window - 1 = {window - 1}, not {stride}")
        self.window, self.stride = window, stride
        self.max_image_tokens, self.max_pixels = max_image_tokens, max_pixels
        self.max_query_tokens = max_query_tokens
        self.max_new_tokens, self.on_unreadable = max_new_tokens, on_unreadable
        self.vision_cache = VisionCache(vision_cache_bytes) if vision_cache is None else vision_cache
        self._say = say

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = EMBEDDED,
        method: str | Pruner = "radical",
        *,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        attn_implementation: str | None = None,
        **options: Any,
    ) -> Reranker:
        """Load a model by its id or folder, by default the small one that ships with the package.

        options: those of `Reranker` and of the method
        """
        if isinstance(method, str):
            build(method)  # an unknown name is told before anything is loaded
        backbone = Backbone.from_pretrained(
            model, device=device, dtype=dtype, attn_implementation=attn_implementation
        )
        return cls(backbone, method, **options)

    # Ranking.

    def rank(
        self,
        query: str | Query,
        documents: Iterable[Document],
        *,
        top_k: int | None = None,
        reference: Document | None = None,
        on_error: OnError = "raise",
    ) -> Ranking:
        """Order the documents by how well they match the query, best first.

        documents: paths, PIL images, arrays, encoded bytes or data URIs
        reference: an image that the query's text changes (composed retrieval)
        on_error: "raise" on a document that cannot be read, or "skip" it and rank the rest
        """
        if reference is not None:
            if isinstance(query, Query):
                raise InputError("pass the reference either in the Query or as an argument, not both")
            query = Query(query, reference)
        return next(self.rank_many([(query, documents)], top_k=top_k, on_error=on_error))

    def rank_many(
        self,
        lists: Iterable[tuple[str | Query, Iterable[Document]]],
        *,
        top_k: int | None = None,
        batch_size: int = 1,
        on_error: OnError = "raise",
        progress: bool = False,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[Ranking]:
        """Rankings of many lists, in their order, as they are ready.

        batch_size: lists that run through the model together; the rankings are the same.
        progress: show a bar on stderr.
        stop: asked before each layer of the encoder and of the decoder; once it says True, a StoppedError
            is raised
        """
        if on_error not in ("raise", "skip"):
            raise InputError(f'on_error must be "raise" or "skip", not {on_error!r}')
        if top_k is not None:
            _check_count("top_k", top_k)
        _check_count("batch_size", batch_size)
        rankings = self._rank_many(lists, top_k, batch_size, on_error, progress)
        return rankings if stop is None else self._until(stop, rankings)

    def _until(self, stop: Callable[[], bool], rankings: Iterator[Ranking]) -> Iterator[Ranking]:
        while True:
            # Only while a ranking is made: what the caller does with the model between two is not ours.
            with stopping(self.backbone.model, stop):
                ranking = next(rankings, None)
            if ranking is None:
                return
            yield ranking

    def _rank_many(
        self,
        lists: Iterable[tuple[str | Query, Iterable[Document]]],
        top_k: int | None,
        batch_size: int,
        on_error: OnError,
        progress: bool,
    ) -> Iterator[Ranking]:
        total = len(lists) if isinstance(lists, Sequence) else None
        with _progress_bar(progress, total) as advance:
            remaining = iter(lists)
            while batch := [(q, _listed(d)) for q, d in islice(remaining, batch_size)]:
                loaded = [self._load(query, documents, on_error) for query, documents in batch]
                # Lists that fit a window run together; longer ones take several passes of their own.
                short = [i for i, (work, _) in enumerate(loaded) if 1 < len(work.images) <= self.window]
                together = dict(zip(short, self._score([loaded[i][0] for i in short]), strict=True))
                for i, (work, skipped) in enumerate(loaded):
                    scored = [together[i]] if i in together else []
                    ranking = self._ranking(work, batch[i][1], scored, skipped)
                    advance()
                    yield replace(ranking, results=ranking.results[:top_k])

    def _load(
        self, query: str | Query, documents: Sequence[Document], on_error: OnError
    ) -> tuple[_List, tuple[Skipped, ...]]:
        query = query if isinstance(query, Query) else Query(query)
        self.check_query(query.text)
        reference = None
        if query.reference is not None:
            reference = load_image(query.reference, name="the reference image", max_pixels=self.max_pixels)
            self.check_image(reference, "the reference image")
        images: list[Image.Image] = []
        numbers: list[int] = []
        skipped: list[Skipped] = []
        names = [f"document {number}" for number in range(len(documents))]
        for number, found in enumerate(load_images(documents, names=names, max_pixels=self.max_pixels)):
            if not isinstance(found, InputError):
                try:
                    self.check_image(found, names[number], thoroughly=on_error == "skip")
                except InputError as error:
                    found = error
            if not isinstance(found, InputError):
                images.append(found)
                numbers.append(number)
            elif on_error == "raise":
                raise found
            else:
                skipped.append(Skipped(number, str(found)))
        work = _List(query.text.strip(), reference, images, numbers)
        self._warn_of_other_worlds(work)
        return work, tuple(skipped)

    def check_query(self, text: str) -> None:
        """An InputError where this text cannot be a query."""
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"the query is empty: {text!r}")
        if self.max_query_tokens is not None:
            with self.backbone.exclusive():
                count = query_tokens(self.backbone, text)
            if count > self.max_query_tokens:
                raise InputError(
                    f"the query has {count} tokens, more than the limit of {self.max_query_tokens}"
                )

    def check_image(self, image: Image.Image, name: str, *, thoroughly: bool = False) -> None:
        """An InputError where the model cannot take this RGB image, for example for its aspect ratio.

        thoroughly: prepare it as for the encoder, not only its size
        """
        try:
            self.backbone.count_tokens(image, self.max_image_tokens)
            if thoroughly:
                self.backbone.preprocess(image, self.max_image_tokens)
        except Exception as error:  # processors raise what they like
            raise unusable(name, error) from error

    def _warn_of_other_worlds(self, work: _List) -> None:
        """The embedded model's world is closed: say so where a query or a picture is not of it."""
        with self.backbone.exclusive():
            unknown = unknown_words(self.backbone, work.text)
        if unknown:
            warnings.warn(
                f"the model does not know the words {', '.join(map(repr, unknown))} of {work.text!r}",
                OutOfWorldWarning,
                stacklevel=2,
            )
        if self.backbone.name == EMBEDDED and not all(map(is_scene_size, work.images)):
            warnings.warn(
                "the embedded model knows only generated scenes: name a real model for photographs, "
                'for example "Qwen/Qwen3-VL-4B-Instruct"',
                OutOfWorldWarning,
                stacklevel=2,
            )

    def _ranking(
        self,
        work: _List,
        documents: Sequence[Document],
        scored: list[_Scored],
        skipped: tuple[Skipped, ...],
    ) -> Ranking:
        if len(work.images) < 2:
            pairs = [(0, 0.0)] * len(work.images)  # the only candidate is certain: log 1 = 0
        elif scored:
            scores = scored[0].scores
            pairs = sorted(enumerate(scores), key=lambda pair: -pair[1])
        else:

            def score(items: Sequence[int]) -> Sequence[float]:
                part = replace(
                    work, images=[work.images[i] for i in items], numbers=[work.numbers[i] for i in items]
                )
                scored.append(self._score([part])[0])
                return scored[-1].scores

            pairs = rank_in_windows(len(work.images), self.window, self.stride, score)
        return Ranking(
            tuple(RankedDocument(work.numbers[i], value, documents[work.numbers[i]]) for i, value in pairs),
            tuple(part.report for part in scored),
            skipped,
            sum(part.repairs for part in scored),
            sum(not part.readable for part in scored),
        )

    # One batch of prompts, from images to scores.

    def _score(self, lists: Sequence[_List]) -> list[_Scored]:
        if not lists:
            return []
        with self.backbone.exclusive():
            return self._score_batch(lists)

    def _score_batch(self, lists: Sequence[_List]) -> list[_Scored]:
        self.prepare()
        clock = _Clock(len(lists))
        limits = [[self.max_image_tokens] * len(work.images) for work in lists]
        full, features = self._resized(lists, limits, clock)
        with clock("preprocess"):
            prompts = [self._prompt(work, found) for work, found in zip(lists, features, strict=True)]
            flat = [feature for found in features for feature in found]
            inputs = self.backbone.inputs([prompt.ids for prompt in prompts], flat)
        layouts = [prompt.layout for prompt in prompts]
        signals = None
        if self.pruner.reads_encoder:
            signals = [_signals(work.candidates(f)) for work, f in zip(lists, features, strict=True)]
        with clock("decoder"), self.pruner.on(self.backbone.model, layouts, signals) as run:
            if self.scorer == "logits":
                logits = self.backbone.next_token_logits(inputs)
            else:
                texts = self.backbone.write(inputs, self.max_new_tokens)
        for part, spent in run.seconds.items():
            # The method's first stage asks for the prior: its time lies within the selection's.
            clock.move("decoder", part, spent - (run.seconds["prior"] if part == "selection" else 0))
        with clock("scoring"):
            if self.scorer == "logits":
                rows = zip(logits, prompts, strict=True)
                answers = [(identifier_scores(row, prompt.identifiers), 0, True) for row, prompt in rows]
            else:
                answers = [self._read(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]
        return [
            _Scored(scores, repairs, readable, self._report(work, prompt, found, records, clock, tokens))
            for (scores, repairs, readable), work, prompt, found, records, tokens in zip(
                answers, lists, prompts, features, run.records, full, strict=True
            )
        ]

    def _read(self, text: str, prompt: Prompt) -> tuple[list[float], int, bool]:
        """A written answer as scores, with its repairs, and whether there was an order in it."""
        count = len(prompt.identifiers)
        try:
            parsed = parse_permutation(text, IDENTIFIERS[:count])
        except UnreadableAnswerError:
            if self.on_unreadable == "raise":
                raise
            return permutation_scores(range(count)), count, False
        return permutation_scores(parsed.order), parsed.repairs, True

    def _prompt(self, work: _List, features: Sequence[ImageFeatures]) -> Prompt:
        sizes = [len(feature.tokens) for feature in features]
        key = hashlib.blake2b(f"{work.text} {sizes}".encode(), digest_size=4).digest()
        return build_prompt(
            self.backbone,
            self.template,
            work.text,
            sizes[1:] if work.reference is not None else sizes,
            reference_size=sizes[0] if work.reference is not None else None,
            generate=self.scorer == "generate",
            key=int.from_bytes(key, "big"),
        )

    def _resized(
        self, lists: Sequence[_List], limits: list[list[int]], clock: _Clock
    ) -> tuple[list[int], list[list[ImageFeatures]]]:
        """Per list, its visual tokens at full size and its features at the sizes that the method wants."""
        if not self.pruner.resizes:
            features = self._features(lists, limits, clock)
            return [
                sum(len(feature.tokens) for feature in work.candidates(found))
                for work, found in zip(lists, features, strict=True)
            ], features
        full, wanted = [], []
        for work, limit in zip(lists, limits, strict=True):
            with clock("preprocess"):
                sizes = [self.backbone.count_tokens(image, self.max_image_tokens) for image in work.images]
            chosen = self.pruner.resize(sizes, partial(self._look, work, limit, clock))
            full.append(sum(sizes))
            if chosen is not None:
                with clock("preprocess"):
                    chosen = self._grown(work.images, chosen, keep_count(self.pruner.keep, sum(sizes)))
            wanted.append(limit if chosen is None else chosen)
        return full, self._features(lists, wanted, clock)

    def _grown(self, images: Sequence[Image.Image], limits: Sequence[int], budget: int) -> list[int]:
        """The limits times the largest factor at which the tokens together stay within the budget.

        An image has whole rows and columns of tokens, fewer than its limit: without this, small images would
        leave a good part of the budget unused.
        """

        def at(factor: float) -> list[int]:
            return [min(self.max_image_tokens, int(limit * factor)) for limit in limits]

        def fits(chosen: Sequence[int]) -> bool:
            pairs = zip(images, chosen, strict=True)
            return sum(self.backbone.count_tokens(image, most) for image, most in pairs) <= budget

        low, high = 1.0, float(self.max_image_tokens)
        for _ in range(20):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if fits(at(middle)) else (low, middle)
        return at(low)

    def _look(self, work: _List, limit: list[int], clock: _Clock) -> Look:
        """The candidates at full size, and the query as the decoder will read it."""
        (found,) = self._features([work], [limit], clock)
        prompt = self._prompt(work, found)
        ids = torch.tensor(prompt.ids, device=self.backbone.device)[list(prompt.layout.query)]
        query = self.backbone.model.get_input_embeddings()(ids).detach().float().mean(dim=0)
        vision = torch.cat([feature.tokens for feature in work.candidates(found)])
        return Look(vision, prompt.layout.candidate_of.to(vision.device), query)

    def _features(
        self, lists: Sequence[_List], limits: Sequence[Sequence[int]], clock: _Clock
    ) -> list[list[ImageFeatures]]:
        """Vision features per list, the reference image first; every distinct image is encoded once.

        limits: the most tokens each candidate may have
        """
        signals = self.pruner.reads_encoder
        wanted: list[list[str]] = []
        found: dict[str, ImageFeatures] = {}
        new: dict[str, tuple[Image.Image, int]] = {}
        names: dict[str, str] = {}
        with clock("preprocess"):
            for work, limit in zip(lists, limits, strict=True):
                context = [] if work.reference is None else [(work.reference, self.max_image_tokens)]
                images = [*context, *zip(work.images, limit, strict=True)]
                keys = [content_key(image, most, signals) for image, most in images]
                wanted.append(keys)
                called = ["the reference image"] * len(context) + [f"document {n}" for n in work.numbers]
                names.update(zip(keys, called, strict=True))
                for key, image in zip(keys, images, strict=True):
                    if key in found or key in new:
                        continue
                    cached = self.vision_cache.get(key)
                    if cached is None:
                        new[key] = image
                    else:
                        found[key] = cached

        def prepared(key: str) -> Pixels:
            try:
                return self.backbone.preprocess(*new[key])
            except Exception as error:
                raise unusable(names[key], error) from error

        with ThreadPoolExecutor(THREADS) as pool:
            pixels = pool.map(prepared, new)
            remaining = iter(new)
            while keys := list(islice(remaining, ENCODED_TOGETHER)):
                with clock("preprocess"):
                    batch = list(islice(pixels, len(keys)))
                with clock("vision"):
                    for key, feature in zip(keys, self.backbone.encode(batch, signals), strict=True):
                        found[key] = feature
                        self.vision_cache.put(key, feature)
        return [[found[key] for key in keys] for keys in wanted]

    def _report(
        self,
        work: _List,
        prompt: Prompt,
        features: Sequence[ImageFeatures],
        records: Sequence[Any],
        clock: _Clock,
        full: int,
    ) -> PruningReport:
        return make_report(
            method=type(self.pruner).__name__,
            keep=self.pruner.keep,
            layout=prompt.layout,
            records=records,
            shape=self.backbone.shape,
            seconds=dict(clock.seconds),
            candidates=work.numbers,
            blocks=[feature.blocks for feature in work.candidates(features)],
            full=full,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The model and how lists are put to it: with the pruner, all that decides a ranking."""
        words = json.dumps(asdict(self.template), sort_keys=True)
        return {
            "model": self.backbone.name,
            "fingerprint": self.backbone.fingerprint,
            "dtype": self.backbone.dtype,
            "scorer": self.scorer,
            "max_image_tokens": self.max_image_tokens,
            "max_new_tokens": self.max_new_tokens,
            "template": hashlib.sha256(words.encode()).hexdigest()[:16],
            "window": self.window,
            "stride": self.stride,
        }

    # Calibration.

    @property
    def calibration(self) -> Profile | None:
        """The trust profile in use, where the method needs one."""
        return self.pruner.calibration if isinstance(self.pruner, RaDiCal) else None

    def prepare(self) -> None:
        """Find the model's trust profile where the method needs it, or measure it now and keep it."""
        if self.pruner.needs_profile:
            self.pruner = self.pruner.with_profile(profile_of(self, say=self._say))


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise InputError(f"{name} must be at least 1 and a whole number, not {value!r}")


def _listed(documents: Any) -> Sequence[Document]:
    """Documents in any iterable, as a list; not one document by itself."""
    shape = getattr(documents, "shape", None)
    single = isinstance(documents, (str, bytes, bytearray, memoryview, os.PathLike, Image.Image, Mapping))
    if single or not isinstance(documents, Iterable) or (shape is not None and len(shape) < 4):
        raise InputError(f"documents must be a list of images, not a single one ({type(documents).__name__})")
    return documents if isinstance(documents, (list, tuple)) else list(documents)


def unusable(name: str, error: Exception) -> InputError:
    return InputError(f"{name} cannot be prepared for the model: {error}")


def _signals(features: Sequence[ImageFeatures]) -> VisionSignals:
    """The encoder's signals of a list's candidates, one after the other."""
    found = [feature.signals for feature in features if feature.signals is not None]
    return VisionSignals(torch.cat([s.attention for s in found]), torch.cat([s.keys for s in found]))


class _Clock:
    """Seconds by part, shared equally by the lists of a batch."""

    def __init__(self, lists: int) -> None:
        self.seconds: dict[str, float] = {"preprocess": 0.0, "vision": 0.0}
        self._lists = lists

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.move(None, part, time.perf_counter() - start)

    def move(self, source: str | None, part: str, spent: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + spent / self._lists
        if source is not None:
            self.seconds[source] -= spent / self._lists


@contextmanager
def _progress_bar(show: bool, total: int | None) -> Iterator[Callable[[], None]]:
    if not show:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("ranking"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("ranking", total=total)
        yield lambda: bar.advance(task)
