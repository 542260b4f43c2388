"""Where rankings come from: a model in this process, or replicas elsewhere (see `on_ray`)."""

from __future__ import annotations

import asyncio
import copy
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from threading import Lock
from typing import Any, Protocol

from radical_rerank.backbones import Backbone
from radical_rerank.errors import OutOfWorldWarning, RadicalError
from radical_rerank.pruning import Profile, RaDiCal
from radical_rerank.reranking import Query, Ranking, Reranker, VisionCache
from radical_rerank.reranking.calibration import generated_list
from radical_rerank.reranking.encoding import (
    PROMPT_CACHE_BYTES,
    VISION_CACHE_BYTES,
    Parts,
    PromptCache,
    image_names,
)
from radical_rerank.reranking.prompt import Content, build_pair, build_prompt
from radical_rerank.service.errors import ServiceError, disconnected, too_late
from radical_rerank.service.settings import Settings
from radical_rerank.service.worker import RankJob, RankWork, RankWorker

IsDisconnected = Callable[[], Awaitable[bool]]
"""tells whether the client has closed its connection"""
MAX_RERANKERS = 64
"""rerankers to keep: clients choose the budgets, so there is no end to them"""
DISCONNECT_CHECK = 0.25
"""seconds between two checks whether the client is still there"""


class Backend(Protocol):
    """What the application needs from whoever ranks."""

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""

    @property
    def in_flight(self) -> int:
        """Requests running or waiting."""

    def start(self) -> None:
        """Load the model; return when it is ready."""

    def stop(self) -> None:
        """Refuse new requests and finish those in flight."""

    async def check(self, work: RankWork) -> None:
        """Raise a ServiceError if the model cannot take this query or these documents. Takes no place."""

    def admitted(self, heavy: bool) -> AbstractContextManager[None]:
        """Hold a place for one request, or raise a ServiceError immediately."""

    async def rank(self, work: RankWork, is_disconnected: IsDisconnected) -> Ranking:
        """Rank a list, or raise a ServiceError."""

    async def reads_texts(self) -> bool:
        """Return whether the model reads documents with text."""

    async def profile(self) -> dict[str, Any] | None:
        """Return H_norm, α and the chosen layers of the model, for the web page."""


class Rerankers:
    """One model and its caches, with a reranker per method and budget.

    Args:
        backbone: the model
        budget: options of the `Reranker` of requests that name no method and no budget, such as `latency`
        asking: how it is asked: options of every `Reranker`, such as `preset` and `scorer`

    Example:
        >>> rerankers = Rerankers(Backbone.from_pretrained("scenes"))
        >>> rerankers("radical", 0.2) is rerankers("radical", 0.2)
        True
    """

    def __init__(self, backbone: Backbone, budget: Mapping[str, Any] | None = None, **asking: Any) -> None:
        self.backbone, self._budget, self._asking = backbone, budget or {}, asking
        self._caches: dict[str, Any] = {
            "vision_cache": VisionCache(VISION_CACHE_BYTES),
            "prompt_cache": PromptCache(PROMPT_CACHE_BYTES),
        }
        self._rerankers: dict[tuple[str, float | None], Reranker] = {}

    def __call__(self, method: str, keep: float | None) -> Reranker:
        """Return the reranker of this method and `keep`; None stands for the service's own budget."""
        key = (method, keep and max(0.001, round(keep, 3)))
        if key not in self._rerankers:
            if len(self._rerankers) > MAX_RERANKERS:
                self._rerankers.clear()
            options = {**self._asking, **(self._budget if keep is None else {"keep": key[1]})}
            self._rerankers[key] = Reranker(self.backbone, method, **options, **self._caches)
        return self._rerankers[key]


class Local:
    """A backend with the model in this process, owned by one thread.

    Args:
        settings: model, method, queue and limits
        load: returns the model; by default the one of the settings is loaded
        observe: called with the name and value of each metric
    """

    def __init__(
        self,
        settings: Settings,
        *,
        load: Callable[[], Backbone] | None = None,
        observe: Callable[[str, float], None] = lambda name, value: None,
    ) -> None:
        self.settings, self._load, self._observe = settings, load or self._load_model, observe
        self.worker: RankWorker | None = None
        self._checking = Lock()

    def _load_model(self) -> Backbone:
        own = self.settings
        return Backbone.from_pretrained(
            own.model, device=own.device, dtype=own.dtype, model_kwargs=own.model_kwargs
        )

    def start(self) -> None:
        """Load the model in its thread and warm it up; return when it is ready."""
        # Python would remember each client's warning for ever.
        warnings.simplefilter("ignore", OutOfWorldWarning)
        worker = RankWorker(
            lambda method, keep: self.rerankers(method, keep),
            places=self.settings.queue,
            patience=self.settings.patience,
            max_batch=self.settings.max_batch,
            prepare=self._prepare,
            observe=self._observe,
        )
        worker.start()
        self.worker = worker

    def _prepare(self) -> float:
        backbone = self._load()
        asking = self.settings.asking
        self.rerankers = Rerankers(backbone, budget=self.settings.budget, **asking)
        # A tokenizer cannot be used by two threads at once: checks get their own.
        own = replace(backbone, tokenizer=copy.deepcopy(backbone.tokenizer))
        self._checks = Reranker(own, "dense", max_query_tokens=self.settings.max_query_tokens, **asking)
        return warm_up(self.rerankers(*self.settings.kind(None, None)))

    def stop(self) -> None:
        """Refuse new requests and finish those in flight."""
        if self.worker is not None:
            self.worker.stop(self.settings.deadline)

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.worker is not None and self.worker.alive

    @property
    def in_flight(self) -> int:
        """Requests running or waiting."""
        return 0 if self.worker is None else self.worker.in_flight

    async def check(self, work: RankWork) -> None:
        """Raise a ServiceError if the model cannot take this query or these documents."""
        await asyncio.to_thread(self._check, work)

    def _check(self, work: RankWork) -> None:
        parts = work.parts
        texts = [name for name, one in zip(work.names, parts, strict=True) if one.text]
        if texts and not self._checks.template.texts:
            message = f"{texts[0]} has a text, but the model of this service reads images alone"
            raise ServiceError(422, "texts_not_supported", message)
        try:
            with self._checking:
                self._checks.check_query(work.query)
                self._check_prompt(work.query, parts)
                self._check_images(work, parts)
        except RadicalError as error:
            raise ServiceError(422, "cannot_rank", str(error)) from None

    def _check_prompt(self, query: Query, parts: Sequence[Parts]) -> None:
        """Ask for one small candidate: the model's template may have no words for such a query."""
        checks, composed = self._checks, query.reference is not None
        asked = Content((1,) * len(query.images), query.text.strip())
        candidate = Content((1,), "text" if any(one.text for one in parts) else "")
        options: dict[str, Any] = {
            "reference_size": 1 if composed else None,
            "instruction": query.instruction,
        }
        if checks.scorer == "pointwise":
            build_pair(checks.backbone, checks.template, asked, candidate, **options)
        else:
            generate = checks.scorer == "generate"
            build_prompt(checks.backbone, checks.template, asked, [candidate], generate=generate, **options)

    def _check_images(self, work: RankWork, parts: Sequence[Parts]) -> None:
        """Check that the model can take every image, and all documents of a prompt together."""
        checks = self._checks
        context = sum(self._tokens(image, "the query's image") for image in work.context)
        sizes = [
            sum(map(self._tokens, one.images, image_names(name, len(one.images))))
            + min(checks.max_text_tokens, len(one.text))
            for name, one in zip(work.names, parts, strict=True)
        ]
        together = 1 if checks.scorer == "pointwise" else checks.window
        largest = context + sum(sorted(sizes, reverse=True)[:together])
        limit = self.settings.max_prompt_tokens
        if largest > limit:
            message = (
                f"the images and texts of one prompt have {largest} tokens, more than the limit of {limit}"
            )
            raise ServiceError(422, "too_many_tokens", message)

    def _tokens(self, image: Any, name: str) -> int:
        """Return the visual tokens of an image, or raise an InputError if the model cannot take it."""
        checks = self._checks
        checks.encoder.check(image, name)
        return checks.backbone.count_tokens(image, checks.max_image_tokens)

    def admitted(self, heavy: bool) -> AbstractContextManager[None]:
        """Hold a place for one request, or raise a ServiceError immediately."""
        assert self.worker is not None
        return self.worker.admitted(heavy)

    async def rank(self, work: RankWork, is_disconnected: IsDisconnected) -> Ranking:
        """Rank a list, or raise a ServiceError."""
        assert self.worker is not None
        loop = asyncio.get_running_loop()
        job = RankJob(work, loop, loop.create_future())
        self.worker.submit(job)
        try:
            while True:
                left = work.deadline - time.monotonic()
                if left <= 0:
                    job.future.cancel()
                    raise too_late()
                done, _ = await asyncio.wait([job.future], timeout=min(left, DISCONNECT_CHECK))
                if done:
                    return job.future.result()
                if await is_disconnected():
                    job.future.cancel()
                    raise disconnected()
        finally:
            self.worker.forget(job)

    async def reads_texts(self) -> bool:
        """Return whether the model reads documents with text."""
        return self._checks.template.texts

    async def profile(self) -> dict[str, Any] | None:
        """Return H_norm, α and the chosen layers of the model; None if its trust profile is not known."""
        backbone = self.rerankers.backbone
        known = self.rerankers("radical", self.settings.keep).profile
        profile = known or Profile.find(backbone.identity)  # do not measure: another thread owns the model
        if profile is None:
            return None
        chosen = RaDiCal(keep=self.settings.keep, profile=profile).stages(backbone.shape.num_layers)
        return {
            "layers": list(profile.layers),
            "alpha": list(profile.alpha),
            "h_norm": None if profile.h_norm is None else list(profile.h_norm),
            "schedule": [stage.layer for stage in chosen],
        }


def warm_up(reranker: Reranker) -> float:
    """Rank a generated list twice, which also loads or measures the trust profile.

    Returns:
        The seconds of the second ranking.
    """
    query, images = generated_list(0, split="train")
    seconds = 0.0
    for _ in range(2):
        reranker.clear_caches()
        start = time.monotonic()
        reranker.rank(query, images)
        seconds = time.monotonic() - start
    reranker.clear_caches()
    return seconds
