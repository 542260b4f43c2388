"""One thread owns the model; requests wait in a bounded line."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from PIL import Image

from radical_rerank.errors import RadicalError, StoppedError
from radical_rerank.reranking import Query, Ranking, Reranker
from radical_rerank.service.errors import ServiceError, overloaded, too_late
from radical_rerank.service.readers import LIGHT_WORK

log = logging.getLogger("radical_rerank.service")


@dataclass(frozen=True)
class Work:
    """One list to rank.

    kind: method and keep; lists of a kind may run together
    deadline: on this machine's monotonic clock
    """

    query: Query
    images: Sequence[Image.Image]
    kind: tuple[str, float]
    deadline: float

    @property
    def heavy(self) -> bool:
        """Whether its pictures take long to scale down."""
        return sum(image.width * image.height for image in self.images) > LIGHT_WORK


@dataclass
class Load:
    """Requests inside and lists that run now; seconds per list, a running mean."""

    inside: int = 0
    running: int = 0
    seconds: float = 0.0

    def wait(self, elapsed: float) -> float:
        """Seconds until all of them are done: what is left of those that run, and all that wait."""
        ahead = max(0, self.inside - self.running)
        left = self.running * self.seconds - elapsed if self.running else 0.0
        return ahead * self.seconds + max(0.0, left)

    def learn(self, seconds: float) -> None:
        self.seconds += 0.2 * (seconds - self.seconds) if self.seconds else seconds


@dataclass(eq=False)
class RankJob:
    """Work, and where its answer goes."""

    work: Work
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Ranking]
    since: float = field(default_factory=time.monotonic)


class RankWorker:
    """`admitted` and `submit` from the event loop; the thread ranks and answers.

    Heavy requests are refused for the sake of light ones, never the other way round: what a light one would
    wait for heavy ones does not count when it is let in.
    """

    def __init__(
        self,
        reranker_for: Callable[[str, float], Reranker],
        *,
        places: int,
        patience: float,
        max_batch: int,
        prepare: Callable[[], float] = lambda: 0.0,
        observe: Callable[[str, float], None] = lambda name, value: None,
    ) -> None:
        """prepare: loads and warms up, first and in the thread, and tells the seconds of a list. No other
        thread should compute with torch: OpenMP slows all of them when they are more than the cores."""
        self._reranker_for, self._places, self._max_batch = reranker_for, places, max_batch
        self._patience, self._prepare, self._observe = patience, prepare, observe
        self._prepared = threading.Event()
        self._error: BaseException | None = None
        self._line: deque[RankJob] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._light, self._heavy = Load(), Load()
        self._since = 0.0
        """when the lists that run now began"""
        self._thread = threading.Thread(target=self._run, name="ranker", daemon=True)

    def start(self) -> None:
        """Returns when the thread has prepared; raises what went wrong there."""
        self._thread.start()
        self._prepared.wait()
        if self._error is not None:
            raise self._error

    def stop(self, timeout: float | None = None) -> None:
        """Finish what is inside, take nothing new."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def inside(self) -> int:
        return self._light.inside + self._heavy.inside

    @property
    def seconds(self) -> float:
        """Per light list, a running mean."""
        return self._light.seconds

    @contextmanager
    def admitted(self, heavy: bool = False) -> Iterator[None]:
        """A place for one request from when it is read until it is answered; or a ServiceError at once."""
        load = self._heavy if heavy else self._light
        with self._changed:
            if self._stopping:
                raise ServiceError(503, "shutting_down", "the service is shutting down", {"Retry-After": "5"})
            elapsed = time.monotonic() - self._since
            wait = self._light.wait(elapsed) + (self._heavy.wait(elapsed) if heavy else 0.0)
            if self.inside >= self._places or wait > self._patience * load.seconds:
                raise overloaded(seconds=wait)
            load.inside += 1
        try:
            yield
        finally:
            with self._changed:
                load.inside -= 1

    def submit(self, job: RankJob) -> None:
        with self._changed:
            self._line.append(job)
            self._changed.notify()

    def forget(self, job: RankJob) -> None:
        """The client has gone, or its time is up: it need not run."""
        with self._changed:
            if job in self._line:
                self._line.remove(job)

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
            except BaseException:  # the thread must outlive whatever a request does
                log.exception("a batch of %d failed", len(batch))
                ranked = 0
                for job in batch:
                    self._fail(job, ServiceError(500, "internal", "the ranking failed"))
            spent = time.monotonic() - start
            load = self._heavy if batch[0].work.heavy else self._light
            with self._changed:
                load.running = 0
                if ranked:
                    load.learn(spent / ranked)
            if ranked:
                self._observe("batch_size", ranked)

    def _next(self) -> list[RankJob]:
        """The first job and others of its kind, as heavy as it; none when it is time to stop."""
        with self._changed:
            while not self._line:
                if self._stopping and not self.inside:
                    return []
                self._changed.wait(0.1 if self._stopping else None)
            first = self._line.popleft()
            batch, heavy = [first], first.work.heavy
            for job in list(self._line):
                if len(batch) == self._max_batch:
                    break
                if (job.work.kind, job.work.heavy) == (first.work.kind, heavy):
                    self._line.remove(job)
                    batch.append(job)
            (self._heavy if heavy else self._light).running, self._since = len(batch), time.monotonic()
            return batch

    def _rank(self, batch: list[RankJob]) -> int:
        """Answers every job; returns how many lists were ranked."""
        now = time.monotonic()
        for job in batch:
            if now > job.work.deadline:
                self._fail(job, too_late())
        batch = [job for job in batch if now <= job.work.deadline and not job.future.done()]
        if not batch:
            return 0
        reranker = self._reranker_for(*batch[0].work.kind)
        for job, ranking in zip(batch, self._rankings(reranker, batch), strict=True):
            if isinstance(ranking, ServiceError):
                self._fail(job, ranking)
            else:
                self._observe("waited_seconds", now - job.since)
                job.loop.call_soon_threadsafe(_settle, job.future, ranking)
        return len(batch)

    def _rankings(self, reranker: Reranker, batch: list[RankJob]) -> list[Ranking | ServiceError]:
        """Each job's ranking or error; where a batch fails, for whatever reason, each on its own."""

        def over() -> bool:
            now = time.monotonic()
            return all(job.future.done() or now > job.work.deadline for job in batch)

        lists = [(job.work.query, job.work.images) for job in batch]
        try:
            return list(reranker.rank_many(lists, batch_size=len(lists), stop=over))
        except StoppedError:
            return [too_late()] * len(batch)
        except Exception as error:
            if len(batch) > 1:  # nobody pays for another
                return [found for job in batch for found in self._rankings(reranker, [job])]
            if isinstance(error, RadicalError):
                return [ServiceError(422, "cannot_rank", str(error))]
            log.exception("a ranking failed")
            return [ServiceError(500, "internal", "the ranking failed")]

    def _fail(self, job: RankJob, error: ServiceError) -> None:
        job.loop.call_soon_threadsafe(_settle, job.future, error)


def _settle(future: asyncio.Future[Ranking], result: Ranking | ServiceError) -> None:
    if future.done():
        return
    if isinstance(result, ServiceError):
        future.set_exception(result)
    else:
        future.set_result(result)
