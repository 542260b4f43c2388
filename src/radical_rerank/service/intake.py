"""What requests hold before they are ranked: memory, and places while they wait for bytes from outside.

Both are bounded over all requests together, and so that no client can take all of it: see `Memory`, `Intake`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeVar

from radical_rerank.service.errors import ServiceError, overloaded

T = TypeVar("T")

SMALL = 32
"""a request that holds at most one in so many bytes of the memory is small"""


class Memory:
    """The bytes that requests hold: bodies, fetched files, decoded pictures.

    The last quarter is for small requests: however many large ones come, a small one finds room.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._lock = Lock()

    @contextmanager
    def held(self) -> Iterator[Held]:
        held = Held(self)
        try:
            yield held
        finally:
            held.release()

    def take(self, held: Held, count: int) -> bool:
        with self._lock:
            size = held.bytes + count
            limit = self.limit if size <= self.limit // SMALL else self.limit * 3 // 4
            if held.released or (count > 0 and self.used + count > limit):
                return False
            held.bytes, self.used = size, self.used + count
            return True

    def give_back(self, held: Held) -> None:
        with self._lock:
            self.used -= held.bytes
            held.bytes, held.released = 0, True


@dataclass(eq=False)
class Held:
    """What one request holds."""

    memory: Memory
    bytes: int = 0
    released: bool = False

    def grow(self, count: int) -> None:
        """Hold so many bytes more (fewer, if negative), or raise a ServiceError."""
        if not self.memory.take(self, count):
            raise overloaded("other requests fill the memory that is set aside for them")

    @property
    def small(self) -> bool:
        return self.bytes <= self.memory.limit // SMALL

    def release(self) -> None:
        self.memory.give_back(self)


@dataclass(eq=False)
class _Waiting:
    client: str
    held: Held
    number: int
    task: asyncio.Task[Any] = field(init=False)
    displaced: bool = False


class Pace:
    """So many bytes a second, for all together: whoever is ahead of it waits."""

    def __init__(self, rate: float) -> None:
        self.rate, self._due = rate, 0.0

    async def keep(self, count: int) -> None:
        now = time.monotonic()
        self._due = max(now, self._due) + count / self.rate
        if self._due > now + 0.01:
            await asyncio.sleep(self._due - now)


class Intake:
    """Requests that wait for bytes from outside: their body's, or a host's that was named in it.

    Such a wait costs little but a place, and how long it lasts is the other side's choice. So a newcomer is
    never refused: where the places are full, the one that has waited longest makes way, of the client that
    has the most of them.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()

    async def wait(
        self, client: str, held: Held, work: Coroutine[Any, Any, T], seconds: float, late: ServiceError
    ) -> T:
        """The result of `work`; the error `late` after so many seconds, or one of its own where another
        needed the place."""
        if len(self._waiting) >= self.places:
            self._displace(self._waiting)
        mine = _Waiting(client, held, next(self._numbers))
        mine.task = asyncio.ensure_future(work)
        self._waiting.append(mine)
        try:
            done, _ = await asyncio.wait([mine.task], timeout=max(0.0, seconds))
            if mine.displaced:
                raise overloaded("the request's bytes came too slowly, and others were waiting")
            if not done:
                raise late
            return mine.task.result()
        finally:
            mine.task.cancel()
            if mine in self._waiting:
                self._waiting.remove(mine)

    def grow(self, held: Held, count: int) -> None:
        """`held.grow`; where a small request finds no room, those that wait with bytes in hand make way."""
        while True:
            try:
                held.grow(count)
                return
            except ServiceError:
                others = [one for one in self._waiting if one.held is not held and one.held.bytes]
                if held.released or not held.small or not others:
                    raise
                self._displace(others)

    def _displace(self, among: list[_Waiting]) -> None:
        places = Counter(one.client for one in among)
        loser = min(among, key=lambda one: (-places[one.client], one.number))
        loser.displaced = True
        loser.held.release()
        loser.task.cancel()
        self._waiting.remove(loser)
