"""The model's queue: one thread owns the model and ranks requests in batches."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from PIL import Image

from radical_rerank.errors import RadicalError, StoppedError
from radical_rerank.reranking import Query, Ranking, Reranker
from radical_rerank.reranking.encoding import Document, ImageLike, Parts
from radical_rerank.service.errors import (
    ServiceError,
    overloaded,
    ranking_failed,
    shutting_down,
    too_late,
)
from radical_rerank.service.readers import LIGHT_PIXELS

log = logging.getLogger("radical_rerank.service")


LIGHT_TEXT = 100_000
"""a request with more characters of text is heavy"""


@dataclass(frozen=True)
class RankWork:
    """A list to rank.

    documents: with decoded images; a page of a PDF is a document
    kind: method and keep (None: the service's own budget); only lists of the same kind run in one batch
    deadline: on this machine's monotonic clock
    """

    query: Query
    documents: Sequence[Document]
    kind: tuple[str, float | None]
    deadline: float
    names: Sequence[str] = ()
    """of the documents in error messages"""

    @property
    def parts(self) -> list[Parts]:
        """The images and the text of each document."""
        return [Parts.of(document, f"document {i}") for i, document in enumerate(self.documents)]

    @property
    def context(self) -> list[Image.Image]:
        """The query's images, decoded; of a composed query, its reference."""
        query = self.query
        return _decoded(query.images if query.reference is None else [query.reference])

    @property
    def heavy(self) -> bool:
        """Whether the images are so large that scaling them down takes long, or the texts so long."""
        parts = self.parts
        images = [*self.context, *_decoded(image for one in parts for image in one.images)]
        pixels = sum(image.width * image.height for image in images)
        return pixels > LIGHT_PIXELS or sum(len(one.text) for one in parts) > LIGHT_TEXT


def _decoded(images: Iterable[ImageLike]) -> list[Image.Image]:
    """Return images that were decoded by the readers."""
    found = list(images)
    assert all(isinstance(image, Image.Image) for image in found)
    return cast("list[Image.Image]", found)


@dataclass
class Load:
    """The requests of one weight, light or heavy.

    in_flight: requests running or waiting
    running: lists in the current batch
    seconds: per list, a running mean
    """

    in_flight: int = 0
    running: int = 0
    seconds: float = 0.0

    def wait(self, elapsed: float) -> float:
        """Estimate the seconds until all requests in flight are done. elapsed: of the current batch"""
        waiting = max(0, self.in_flight - self.running)
        left = self.running * self.seconds - elapsed if self.running else 0.0
        return waiting * self.seconds + max(0.0, left)

    def learn(self, seconds: float) -> None:
        """Update the mean with the seconds of one list."""
        self.seconds += 0.2 * (seconds - self.seconds) if self.seconds else seconds


@dataclass(eq=False)
class RankJob:
    """A list to rank, and the future of its ranking."""

    work: RankWork
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Ranking]
    since: float = field(default_factory=time.monotonic)


class RankWorker:
    """A thread that owns the model, with a bounded queue.

    Call `admitted`, `submit` and `forget` from the event loop. Heavy requests are refused if light ones are
    waiting, but not the other way round: when a light request is admitted, the time of heavy ones does not
    count.

    Args:
        reranker_for: returns the reranker of a method and a budget
        places: requests in flight, running or waiting; the next one is refused
        patience: how long a request may wait, in units of one ranking's time; if it would wait longer, it is
            refused
        max_batch: lists that run through the model together
        prepare: called first, in the thread: loads the model and returns the seconds of one ranking. No other
            thread should compute with torch, since OpenMP pools on the same cores slow each other down
        observe: called with the name and value of each metric
    """

    def __init__(
        self,
        reranker_for: Callable[[str, float | None], Reranker],
        *,
        places: int,
        patience: float,
        max_batch: int,
        prepare: Callable[[], float] = lambda: 0.0,
        observe: Callable[[str, float], None] = lambda name, value: None,
    ) -> None:
        self._reranker_for, self._places, self._max_batch = reranker_for, places, max_batch
        self._patience, self._prepare, self._observe = patience, prepare, observe
        self._prepared = threading.Event()
        self._error: BaseException | None = None
        self._queue: deque[RankJob] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._light, self._heavy = Load(), Load()
        self._batch_start = 0.0
        self._thread = threading.Thread(target=self._run, name="ranker", daemon=True)

    def start(self) -> None:
        """Start the thread and wait until it is prepared. Raises what went wrong there."""
        self._thread.start()
        self._prepared.wait()
        if self._error is not None:
            raise self._error

    def stop(self, timeout: float | None = None) -> None:
        """Refuse new requests and wait until those in flight are done, at most `timeout` seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        """Whether new requests are accepted."""
        return self._thread.is_alive() and not self._stopping

    @property
    def in_flight(self) -> int:
        """Requests running or waiting."""
        return self._light.in_flight + self._heavy.in_flight

    @property
    def seconds(self) -> float:
        """Seconds per light list, a running mean."""
        return self._light.seconds

    @contextmanager
    def admitted(self, heavy: bool = False) -> Iterator[None]:
        """Hold a place in the queue for one request, or raise a ServiceError immediately."""
        load = self._heavy if heavy else self._light
        with self._changed:
            if self._stopping:
                raise shutting_down()
            elapsed = time.monotonic() - self._batch_start
            wait = self._light.wait(elapsed) + (self._heavy.wait(elapsed) if heavy else 0.0)
            if self.in_flight >= self._places or wait > self._patience * load.seconds:
                raise overloaded(seconds=wait)
            load.in_flight += 1
        try:
            yield
        finally:
            with self._changed:
                load.in_flight -= 1

    def submit(self, job: RankJob) -> None:
        """Add a job to the queue. Its future gets the ranking or a ServiceError."""
        with self._changed:
            self._queue.append(job)
            self._changed.notify()

    def forget(self, job: RankJob) -> None:
        """Remove a job from the queue, if it is still there: nobody waits for it any more."""
        with self._changed:
            if job in self._queue:
                self._queue.remove(job)

    # The thread.

    def _run(self) -> None:
        try:
            self._light.seconds = self._heavy.seconds = self._prepare()
        except BaseException as error:
            self._error = error
            return
        finally:
            self._prepared.set()
        while batch := self._next():
            start = time.monotonic()
            try:
                ranked = self._rank(batch)
            except BaseException:  # no request may end the thread
                log.exception("ranking a batch of %d failed", len(batch))
                ranked = 0
                for job in batch:
                    self._answer(job, ranking_failed())
            spent = time.monotonic() - start
            load = self._heavy if batch[0].work.heavy else self._light
            with self._changed:
                load.running = 0
                if ranked:
                    load.learn(spent / ranked)
            if ranked:
                self._observe("batch_size", ranked)
                for _ in range(ranked):
                    self._observe("ranked_seconds", spent / ranked)

    def _next(self) -> list[RankJob]:
        """Return the next batch: the first job and others of its kind and weight. Empty at the end."""
        with self._changed:
            while not self._queue:
                if self._stopping and not self.in_flight:
                    return []
                self._changed.wait(0.1 if self._stopping else None)
            first = self._queue.popleft()
            batch, heavy = [first], first.work.heavy
            for job in list(self._queue):
                if len(batch) == self._max_batch:
                    break
                if (job.work.kind, job.work.heavy) == (first.work.kind, heavy):
                    self._queue.remove(job)
                    batch.append(job)
            load = self._heavy if heavy else self._light
            load.running, self._batch_start = len(batch), time.monotonic()
            return batch

    def _rank(self, batch: list[RankJob]) -> int:
        """Answer every job. Returns how many lists were ranked."""
        now = time.monotonic()
        for job in batch:
            if now > job.work.deadline:
                self._answer(job, too_late())
        batch = [job for job in batch if now <= job.work.deadline and not job.future.done()]
        if not batch:
            return 0
        reranker = self._reranker_for(*batch[0].work.kind)
        for job, result in zip(batch, self._results(reranker, batch), strict=True):
            if isinstance(result, Ranking):
                self._observe("waited_seconds", now - job.since)
            self._answer(job, result)
        return len(batch)

    def _results(self, reranker: Reranker, batch: list[RankJob]) -> list[Ranking | ServiceError]:
        """Return each job's ranking or error. If the batch fails, its jobs are ranked one by one."""

        def nobody_waits() -> bool:
            now = time.monotonic()
            return all(job.future.done() or now > job.work.deadline for job in batch)

        lists = [(job.work.query, job.work.documents) for job in batch]
        try:
            return list(reranker.rank_many(lists, batch_size=len(lists), stop=nobody_waits))
        except StoppedError:
            return [too_late()] * len(batch)
        except Exception as error:
            if len(batch) > 1:  # one bad list must not fail the others
                return [result for job in batch for result in self._results(reranker, [job])]
            if isinstance(error, RadicalError):
                return [ServiceError(422, "cannot_rank", str(error))]
            log.exception("a ranking failed")
            return [ranking_failed()]

    def _answer(self, job: RankJob, result: Ranking | ServiceError) -> None:
        job.loop.call_soon_threadsafe(_settle, job.future, result)


def _settle(future: asyncio.Future[Ranking], result: Ranking | ServiceError) -> None:
    if future.done():
        return
    if isinstance(result, ServiceError):
        future.set_exception(result)
    else:
        future.set_result(result)
