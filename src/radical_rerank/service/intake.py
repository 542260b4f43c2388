"""What requests hold before they are ranked: memory, and a place while their bytes arrive.

Both have a limit over all requests together, and no client can take all of it: see `Memory` and `Intake`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from threading import Lock
from typing import Any, TypeVar

from radical_rerank.service.errors import ServiceError, overloaded

T = TypeVar("T")

BYTES_PER_PIXEL = 4
"""of a decoded image, as Pillow stores it"""
SMALL_SHARE = 32
"""a request that holds at most 1/32 of the memory is small"""
LARGE_LIMIT = Fraction(3, 4)
"""the part of the memory that large requests may fill"""


class Memory:
    """The bytes that requests hold: bodies, fetched files, decoded images.

    The last quarter is reserved for small requests, so that large ones cannot keep them out.

    Args:
        limit: bytes that all requests together may hold

    Example:
        >>> memory = Memory(3200)
        >>> with memory.reservation() as reservation:
        ...     reservation.grow(100)
        ...     memory.used
        100
        >>> memory.used
        0
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._large_limit = int(limit * LARGE_LIMIT)
        self._lock = Lock()

    @contextmanager
    def reservation(self) -> Iterator[Reservation]:
        """Open an empty reservation for one request; it is released at the end of the block."""
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            reservation.release()

    def is_small(self, size: int) -> bool:
        """Check whether a request that holds this many bytes is small."""
        return size <= self.limit // SMALL_SHARE

    def take(self, reservation: Reservation, count: int) -> bool:
        """Add bytes (negative: give some back) to a reservation. Returns whether there was room."""
        with self._lock:
            size = reservation.bytes + count
            limit = self.limit if self.is_small(size) else self._large_limit
            if reservation.released or (count > 0 and self.used + count > limit):
                return False
            reservation.bytes, self.used = size, self.used + count
            return True

    def give_back(self, reservation: Reservation) -> None:
        """Release a reservation. It cannot grow again."""
        with self._lock:
            self.used -= reservation.bytes
            reservation.bytes, reservation.released = 0, True


@dataclass(eq=False)
class Reservation:
    """The memory of one request.

    bytes: how much it holds now
    released: set once the request has ended or was evicted
    """

    memory: Memory
    bytes: int = 0
    released: bool = False

    def grow(self, count: int) -> None:
        """Hold this many bytes more (negative: fewer), or raise a ServiceError if there is no room."""
        if not self.memory.take(self, count):
            raise overloaded("the memory limit for requests is reached")

    @property
    def small(self) -> bool:
        """Whether the request counts as small."""
        return self.memory.is_small(self.bytes)

    def release(self) -> None:
        """Give all bytes back."""
        self.memory.give_back(self)


class RateLimit:
    """A limit on bytes per second, shared by all requests.

    Args:
        rate: bytes per second
    """

    def __init__(self, rate: float) -> None:
        self.rate, self._due = rate, 0.0

    async def wait(self, count: int) -> None:
        """Count this many bytes, and sleep if they came faster than the rate."""
        now = time.monotonic()
        self._due = max(now, self._due) + count / self.rate
        if self._due > now + 0.01:
            await asyncio.sleep(self._due - now)


@dataclass(eq=False)
class _Waiting:
    client: str
    reservation: Reservation
    number: int
    task: asyncio.Future[Any] = field(init=False)
    evicted: bool = False


class Intake:
    """Requests that wait for bytes: of their own body, or of a URL in it.

    Waiting costs only a place, but the other side decides how long it lasts. So a new request is never
    refused. If all places are taken, one request is evicted: the oldest of the client that has the most.

    Args:
        places: requests that may wait at the same time
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()

    async def wait(
        self,
        client: str,
        reservation: Reservation,
        work: Coroutine[Any, Any, T],
        seconds: float,
        late: ServiceError,
    ) -> T:
        """Run `work`, which waits for bytes.

        Args:
            client: who sent the request
            reservation: the memory of the request
            work: a coroutine
            seconds: the time limit
            late: the error to raise after it

        Returns:
            The result of `work`.
        """
        if len(self._waiting) >= self.places:
            self._evict(self._waiting)
        mine = _Waiting(client, reservation, next(self._numbers))
        task: asyncio.Task[T] = asyncio.ensure_future(work)
        mine.task = task
        self._waiting.append(mine)
        try:
            done, _ = await asyncio.wait([task], timeout=max(0.0, seconds))
            if mine.evicted:
                raise overloaded("the request arrived too slowly and made room for others")
            if not done:
                raise late
            return task.result()
        finally:
            task.cancel()
            if mine in self._waiting:
                self._waiting.remove(mine)

    def grow(self, reservation: Reservation, count: int) -> None:
        """Grow a reservation. If a small request finds no room, evict requests that hold bytes and wait."""
        while True:
            try:
                reservation.grow(count)
                return
            except ServiceError:
                others = [one for one in self._waiting if one.reservation.bytes]
                others = [one for one in others if one.reservation is not reservation]
                if reservation.released or not reservation.small or not others:
                    raise
                self._evict(others)

    def _evict(self, among: list[_Waiting]) -> None:
        places = Counter(one.client for one in among)
        evicted = min(among, key=lambda one: (-places[one.client], one.number))
        evicted.evicted = True
        evicted.reservation.release()
        evicted.task.cancel()
        self._waiting.remove(evicted)
