"""Where rankings come from: a model in this process, or replicas elsewhere (`on_ray`)."""

from __future__ import annotations

import asyncio
import copy
import time
import warnings
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from threading import Lock
from typing import Any, Protocol

from radical_rerank.backbones import Backbone
from radical_rerank.errors import OutOfWorldWarning, RadicalError
from radical_rerank.pruning import Profile, RaDiCal, build
from radical_rerank.reranking import Ranking, Reranker
from radical_rerank.reranking.calibration import generated_list
from radical_rerank.reranking.encoding import VISION_CACHE_BYTES, VisionCache
from radical_rerank.service.errors import ServiceError, too_late
from radical_rerank.service.settings import Settings
from radical_rerank.service.worker import RankJob, RankWorker, Work

Gone = Callable[[], Awaitable[bool]]
"""whether the client has gone away"""


class Backend(Protocol):
    @property
    def ready(self) -> bool: ...

    @property
    def inside(self) -> int:
        """requests running or waiting"""

    def start(self) -> None: ...

    def stop(self) -> None:
        """Finish what is inside, take nothing new."""

    async def check(self, work: Work) -> None:
        """A ServiceError where the model cannot take this query or one of these images. Needs no place."""

    def admitted(self, heavy: bool) -> AbstractContextManager[None]:
        """A place for one request, or a ServiceError at once."""

    async def rank(self, work: Work, gone: Gone) -> Ranking:
        """The ranking, or a ServiceError."""

    async def profile(self) -> dict[str, Any] | None:
        """H_norm, α and the chosen layers of the model, for the page."""


class Rerankers:
    """One model, one vision cache, a reranker per method and budget."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self._cache = VisionCache(VISION_CACHE_BYTES)
        self._made: dict[tuple[str, float], Reranker] = {}

    def __call__(self, method: str, keep: float) -> Reranker:
        key = (method, max(0.001, round(keep, 3)))
        if key not in self._made:
            if len(self._made) > 64:  # budgets are the client's choice: do not collect them for ever
                self._made.clear()
            self._made[key] = Reranker(self.backbone, build(method, keep=key[1]), vision_cache=self._cache)
        return self._made[key]


class Local:
    """The model in this process, with one thread that owns it."""

    def __init__(
        self,
        settings: Settings,
        *,
        load: Callable[[], Backbone] | None = None,
        observe: Callable[[str, float], None] = lambda name, value: None,
    ) -> None:
        self.settings, self._load, self._observe = settings, load or self._from_settings, observe
        self.worker: RankWorker | None = None
        self._checking = Lock()

    def _from_settings(self) -> Backbone:
        own = self.settings
        return Backbone.from_pretrained(own.model, device=own.device, dtype=own.dtype)

    def start(self) -> None:
        # The reranker's notes are for whoever calls it; Python would remember each client's for ever.
        warnings.simplefilter("ignore", OutOfWorldWarning)

        def prepare() -> float:
            backbone = self._load()
            self.rerankers = Rerankers(backbone)
            # Tokenizers are not for two threads at once: checks have their own.
            own = replace(backbone, tokenizer=copy.deepcopy(backbone.tokenizer))
            self._checks = Reranker(own, "dense", max_query_tokens=self.settings.max_query_tokens)
            return warm_up(self.rerankers(self.settings.method, self.settings.keep))

        worker = RankWorker(
            lambda method, keep: self.rerankers(method, keep),
            places=self.settings.queue,
            patience=self.settings.patience,
            max_batch=self.settings.max_batch,
            prepare=prepare,
            observe=self._observe,
        )
        worker.start()
        self.worker = worker

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.stop(self.settings.deadline)

    @property
    def ready(self) -> bool:
        return self.worker is not None and self.worker.alive

    @property
    def inside(self) -> int:
        return 0 if self.worker is None else self.worker.inside

    async def check(self, work: Work) -> None:
        await asyncio.to_thread(self._check, work)

    def _check(self, work: Work) -> None:
        try:
            with self._checking:
                self._checks.check_query(work.query.text)
                if work.query.reference is not None:
                    self._checks.check_image(work.query.reference, "the reference")
                for number, image in enumerate(work.images):
                    self._checks.check_image(image, f"document {number}")
        except RadicalError as error:
            raise ServiceError(422, "cannot_rank", str(error)) from None

    def admitted(self, heavy: bool) -> AbstractContextManager[None]:
        assert self.worker is not None
        return self.worker.admitted(heavy)

    async def rank(self, work: Work, gone: Gone) -> Ranking:
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
                done, _ = await asyncio.wait([job.future], timeout=min(left, 0.25))
                if done:
                    return job.future.result()
                if await gone():
                    job.future.cancel()
                    raise ServiceError(499, "gone", "the client has gone")
        finally:
            self.worker.forget(job)

    async def profile(self) -> dict[str, Any] | None:
        backbone = self.rerankers.backbone
        known = self.rerankers("radical", self.settings.keep).profile
        profile = known or Profile.find(backbone.identity)  # not measured here: the model is the worker's
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
    """Rank a generated list twice: finds or measures the trust profile, and tells the seconds per list."""
    query, images = generated_list(0, split="train")
    seconds = 0.0
    for _ in range(2):
        reranker.vision_cache.clear()
        start = time.monotonic()
        reranker.rank(query, images)
        seconds = time.monotonic() - start
    reranker.vision_cache.clear()
    return seconds
