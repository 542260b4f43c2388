"""The Reranker: a query and candidate images in, the images in order out."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from numbers import Integral
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image

from radical_rerank import progress as bars
from radical_rerank.backbones import DEFAULT_MODEL, Backbone, ImageFeatures
from radical_rerank.errors import InputError, UnreadableAnswerError
from radical_rerank.pruning import Layout, Look, Profile, Pruner, VisionSignals, build
from radical_rerank.reranking.calibration import measured_profile
from radical_rerank.reranking.encoding import (
    MAX_IMAGE_TOKENS,
    MAX_PIXELS,
    VISION_CACHE_BYTES,
    CandidateList,
    Clock,
    Document,
    Encoder,
    VisionCache,
    joined_signals,
)
from radical_rerank.reranking.permutation import parse_permutation, permutation_scores
from radical_rerank.reranking.prompt import (
    IDENTIFIERS,
    Answer,
    Prompt,
    PromptTemplate,
    build_prompt,
    query_tokens,
)
from radical_rerank.reranking.results import (
    PruningReport,
    Query,
    RankedDocument,
    Ranking,
    Skipped,
    make_report,
)
from radical_rerank.reranking.windows import rank_in_windows

OnError = Literal["raise", "skip"]
SCORERS = ("logits", "generate")


@dataclass(frozen=True)
class _Scored:
    """What one prompt gave."""

    answer: Answer
    report: PruningReport


class Reranker:
    """Ranks images for a query with a vision-language model, listwise, in one forward pass.

    Threads may share a Reranker: their calls take turns. It can be pickled (its cache is left out). A forked
    process cannot use it.

    Args:
        model: a model id, a folder, or a `Backbone`; by default the small model that ships with the package
        method: the name of a pruning method (see `METHODS`) or a `Pruner`
        keep: the fraction of visual tokens alive at the end
        scorer: "logits" (one forward pass) or "generate" (the model writes the order)
        template: a model family's name, a JSON file or a dict; by default the model's own
        window, stride: lists longer than `window` (by default the template's, at most 52) are ranked in
            windows, `stride` apart
        max_image_tokens: larger images are scaled down to this many visual tokens
        max_pixels: larger images are refused
        max_query_tokens: longer queries are refused; by default there is no limit
        vision_cache_bytes: how much of the images encoded last to keep; 0 for none
        vision_cache: the cache of another Reranker with the same model, to share it
        max_new_tokens: the limit of a generated answer
        on_unreadable: with scorer "generate", what to do with an answer that names no candidate: "raise" a
            ScoringError, or "keep" the order of the prompt and count it in `Ranking.unreadable`
        device, dtype, attn_implementation, model_kwargs: for loading the model, see
            `Backbone.from_pretrained`
        options: options of the method

    Example:
        >>> reranker = Reranker("scenes", method="radical", keep=0.2)
        >>> query, images = generated_list(0, candidates=8)
        >>> ranking = reranker.rank(query, images, top_k=3)
        >>> len(ranking), ranking[0].index
        (3, 0)
    """

    def __init__(
        self,
        model: str | Path | Backbone = DEFAULT_MODEL,
        method: str | Pruner = "radical",
        *,
        keep: float | None = None,
        scorer: str = "logits",
        template: PromptTemplate | dict[str, Any] | str | Path | None = None,
        window: int | None = None,
        stride: int | None = None,
        max_image_tokens: int = MAX_IMAGE_TOKENS,
        max_pixels: int = MAX_PIXELS,
        max_query_tokens: int | None = None,
        vision_cache_bytes: int = VISION_CACHE_BYTES,
        vision_cache: VisionCache | None = None,
        max_new_tokens: int = 512,
        on_unreadable: Literal["raise", "keep"] = "raise",
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        attn_implementation: str | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        # Everything that can be wrong is checked before a model is loaded.
        if scorer not in SCORERS:
            raise InputError(f"scorer must be one of {', '.join(SCORERS)}, not {scorer!r}")
        if on_unreadable not in ("raise", "keep"):
            raise InputError(f'on_unreadable must be "raise" or "keep", not {on_unreadable!r}')
        if max_image_tokens < 1:
            raise InputError(f"max_image_tokens must be at least 1, not {max_image_tokens}")
        if isinstance(method, Pruner):
            if keep is not None or options:
                raise InputError("set keep and other options in the Pruner that you pass")
            self.pruner = method
        else:
            given = options if keep is None else {**options, "keep": keep}
            self.pruner = build(method, _also=_OPTIONS, **given)
        loading: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "attn_implementation": attn_implementation,
            "model_kwargs": model_kwargs,
        }
        if not isinstance(model, Backbone):
            model = Backbone.from_pretrained(model, **loading)
        elif any(value is not None for value in loading.values()):
            raise InputError(f"set {', '.join(loading)} in the Backbone that you pass")
        self.backbone = model
        if not isinstance(template, PromptTemplate):
            template = PromptTemplate.of(model) if template is None else PromptTemplate.load(template)
        self.template = template
        self.window = template.window if window is None else window
        self.stride = max(1, self.window // 2) if stride is None else stride
        if not 2 <= self.window <= len(IDENTIFIERS):
            raise InputError(f"window must lie between 2 and {len(IDENTIFIERS)}, not {self.window}")
        if not 1 <= self.stride < self.window:
            raise InputError(
                f"stride must lie between 1 and window - 1 = {self.window - 1}, not {self.stride}"
            )
        self.scorer, self.on_unreadable, self.max_new_tokens = scorer, on_unreadable, max_new_tokens
        self.max_query_tokens, self.max_image_tokens = max_query_tokens, max_image_tokens
        self.vision_cache = VisionCache(vision_cache_bytes) if vision_cache is None else vision_cache
        self.encoder = Encoder(model, self.vision_cache, max_image_tokens, max_pixels)

    @classmethod
    def from_pretrained(cls, model: str | Path = DEFAULT_MODEL, *args: Any, **options: Any) -> Reranker:
        """The same as `Reranker(model, ...)`, under the name that Hugging Face uses."""
        return cls(model, *args, **options)

    def rank(
        self,
        query: str | Query,
        documents: Iterable[Document],
        *,
        top_k: int | None = None,
        reference: Document | None = None,
        on_error: OnError = "raise",
    ) -> Ranking:
        """Order the documents by how well they match the query.

        Args:
            query: text, or a `Query`
            documents: paths, PIL images, arrays, encoded bytes or data URIs
            top_k: return only the best K
            reference: an image that the query's text changes (composed retrieval)
            on_error: "raise" on a document that cannot be read, or "skip" it and rank the rest

        Returns:
            The documents, best first.
        """
        if reference is not None:
            if isinstance(query, Query):
                raise InputError("pass the reference either in the Query or as an argument, not both")
            query = Query(query, reference)
        return next(iter(self.rank_many([(query, documents)], top_k=top_k, on_error=on_error)))

    def rank_many(
        self,
        lists: Iterable[tuple[str | Query, Iterable[Document]]],
        *,
        top_k: int | None = None,
        batch_size: int = 1,
        on_error: OnError = "raise",
        progress: bool | bars.Progress = False,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[Ranking]:
        """Rank many lists.

        Args:
            lists: (query, documents) pairs
            top_k, on_error: as in `rank`
            batch_size: lists that run through the model together; the rankings are the same
            progress: show a bar on stderr, or pass a `Progress` of your own
            stop: called before each layer; once it returns True, a StoppedError is raised

        Returns:
            An iterator over the rankings, in the order of the lists.
        """
        if on_error not in ("raise", "skip"):
            raise InputError(f'on_error must be "raise" or "skip", not {on_error!r}')
        if top_k is not None:
            _check_count("top_k", top_k)
        _check_count("batch_size", batch_size)
        rankings = self._rank_many(lists, top_k, batch_size, on_error)
        if stop is not None:
            rankings = self._until(stop, rankings)
        if not progress:
            return rankings
        total = len(lists) if isinstance(lists, Sequence) else None
        shown = bars.bar if progress is True else progress
        return iter(shown(rankings, "ranking", total=total))

    def _until(self, stop: Callable[[], bool], rankings: Iterator[Ranking]) -> Iterator[Ranking]:
        while True:
            # Only while a ranking is made: between two, the caller may use the model for other things.
            with self.backbone.stopping(stop):
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
    ) -> Iterator[Ranking]:
        remaining = iter(lists)
        while batch := [(query, _listed(documents)) for query, documents in islice(remaining, batch_size)]:
            loaded = [self._load(query, documents, on_error) for query, documents in batch]
            # Lists that fit a window run together; longer ones take several passes of their own.
            short = [i for i, (work, _) in enumerate(loaded) if 1 < len(work.images) <= self.window]
            together = dict(zip(short, self._score([loaded[i][0] for i in short]), strict=True))
            for i, (work, skipped) in enumerate(loaded):
                scored = [together[i]] if i in together else []
                if scored:
                    order = sorted(enumerate(scored[0].answer.scores), key=itemgetter(1), reverse=True)
                else:
                    order = self._in_windows(work, scored)
                yield Ranking(
                    tuple(
                        RankedDocument(work.indices[place], score, batch[i][1][work.indices[place]])
                        for place, score in order[:top_k]
                    ),
                    tuple(part.report for part in scored),
                    skipped,
                    sum(part.answer.repairs for part in scored),
                    sum(not part.answer.readable for part in scored),
                    work.text,
                    self.backbone.name,
                    type(self.pruner).__name__,
                )

    # Before the model runs.

    def _load(
        self, query: str | Query, documents: Sequence[Document], on_error: OnError
    ) -> tuple[CandidateList, tuple[Skipped, ...]]:
        query = query if isinstance(query, Query) else Query(query)
        self.check_query(query.text)
        work, unusable = self.encoder.load(
            query.text.strip(), query.reference, documents, skip=on_error == "skip"
        )
        return work, tuple(Skipped(index, reason) for index, reason in unusable.items())

    def check_query(self, text: str) -> None:
        """Raise an InputError if this text cannot be a query."""
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"the query is empty: {text!r}")
        if self.max_query_tokens is not None:
            with self.backbone.exclusive():
                count = query_tokens(self.backbone, text)
            if count > self.max_query_tokens:
                raise InputError(
                    f"the query has {count} tokens, more than the limit of {self.max_query_tokens}"
                )

    def _in_windows(self, work: CandidateList, scored: list[_Scored]) -> list[tuple[int, float]]:
        """Rank a list that does not fit a window. Returns (place in `work`, score) pairs, best first.

        scored: gets what every prompt gave
        """
        if len(work.images) < 2:
            return [(0, 0.0)] * len(work.images)  # a single candidate is certain: log 1 = 0
        for index, image in zip(work.indices, work.images, strict=True):
            self.encoder.check(image, f"document {index}")  # now, not after some windows have run

        def score(places: Sequence[int]) -> Sequence[float]:
            images = [work.images[place] for place in places]
            part = replace(work, images=images, indices=[work.indices[place] for place in places])
            scored.extend(self._score([part]))
            return scored[-1].answer.scores

        return rank_in_windows(len(work.images), self.window, self.stride, score)

    # Running the model.

    def _score(self, lists: Sequence[CandidateList]) -> list[_Scored]:
        """Score lists that each fit a window, in one batch."""
        if not lists:
            return []
        self.prepare()
        model, pruner, generate = self.backbone, self.pruner, self.scorer == "generate"
        with model.exclusive():
            clock = Clock(len(lists))
            full, features = self.encoder.encode_lists(lists, pruner, self._look, clock)
            with clock("preprocess"):
                prompts, layouts, signals = list[Prompt](), list[Layout](), list[VisionSignals]()
                for work, own in zip(lists, features, strict=True):
                    sizes = work.sizes(own)
                    prompts.append(build_prompt(model, self.template, work.text, **sizes, generate=generate))
                    layouts.append(prompts[-1].layout)
                    if pruner.reads_encoder:
                        signals.append(joined_signals(work.own(own)))
                pruning = pruner.on(model.model, layouts, signals or None)
                inputs = model.inputs(list(map(attrgetter("ids"), prompts)), list(chain(*features)))
            with clock("decoder"), pruning as run:
                if generate:
                    output: Iterable[Any] = model.write(inputs, self.max_new_tokens)
                else:
                    output = model.next_token_logits(inputs)
            # A method computes its prior at its first stage: that time is part of the selection's.
            prior, selection = run.seconds["prior"], run.seconds["selection"]
            clock.add("prior", prior)
            clock.add("selection", selection - prior)
            clock.add("decoder", -selection)
            with clock("scoring"):
                read = self._read if generate else Prompt.scores
                answers = list(map(read, prompts, output))
        scored = []
        for i, work in enumerate(lists):
            report = make_report(
                method=type(pruner).__name__,
                keep=pruner.keep,
                layout=layouts[i],
                stages=run.stages[i],
                shape=model.shape,
                seconds=dict(clock.seconds),
                indices=work.indices,
                features=work.own(features[i]),
                full=full[i],
            )
            scored.append(_Scored(answers[i], report))
        return scored

    def _read(self, prompt: Prompt, text: str) -> Answer:
        """Read a generated order."""
        count = len(prompt.identifiers)
        try:
            parsed = parse_permutation(text, IDENTIFIERS[:count])
        except UnreadableAnswerError:
            if self.on_unreadable == "raise":
                raise
            return Answer(permutation_scores(range(count)), count, readable=False)
        return Answer(permutation_scores(parsed.order), parsed.repairs)

    def _look(self, work: CandidateList, features: Sequence[ImageFeatures]) -> Look:
        """Return the candidates at full size, and the query as the decoder will read it."""
        generate = self.scorer == "generate"
        prompt = build_prompt(
            self.backbone, self.template, work.text, **work.sizes(features), generate=generate
        )
        ids = torch.tensor(prompt.ids, device=self.backbone.device)[list(prompt.layout.query)]
        query = self.backbone.model.get_input_embeddings()(ids).detach().float().mean(dim=0)
        vision = torch.cat([feature.tokens for feature in work.own(features)])
        return Look(vision, prompt.layout.candidate_of.to(vision.device), query)

    # The settings in use.

    @property
    def settings(self) -> dict[str, Any]:
        """The model and how lists are put to it. Together with the pruner, this decides a ranking."""
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

    @property
    def profile(self) -> Profile | None:
        """The trust profile in use, if the method has one."""
        return getattr(self.pruner, "profile", None)

    def prepare(self) -> None:
        """Find the model's trust profile if the method needs it, or measure and save it now."""
        if self.pruner.needs_profile:
            with self.backbone.exclusive():
                known = Profile.find(self.backbone.identity, alpha=self.pruner.needs_alpha)
                profile = known or measured_profile(self)
                self.pruner = self.pruner.with_profile(profile)


_OPTIONS = [
    name
    for name, parameter in inspect.signature(Reranker).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
]


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1, not {value!r}")


def _listed(documents: Any) -> Sequence[Document]:
    """Return the documents of any iterable as a list. A single document is an error."""
    shape = getattr(documents, "shape", None)
    single = isinstance(documents, (str, bytes, bytearray, memoryview, os.PathLike, Image.Image, Mapping))
    if single or not isinstance(documents, Iterable) or (shape is not None and len(shape) < 4):
        raise InputError(f"documents must be a list of images, not a single one ({type(documents).__name__})")
    return documents if isinstance(documents, (list, tuple)) else list(documents)
