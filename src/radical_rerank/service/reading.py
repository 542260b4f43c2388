"""From an HTTP request to what is to be ranked: its body, its URLs, its pictures, all within limits."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from PIL import Image

from radical_rerank.pruning import METHODS
from radical_rerank.service.documents import Asked, Limits
from radical_rerank.service.errors import ServiceError, too_late
from radical_rerank.service.fetch import SafeFetcher
from radical_rerank.service.intake import Held, Intake, Memory, Pace
from radical_rerank.service.readers import LIGHT_BYTES, Readers, ReadTask
from radical_rerank.service.settings import Settings

PIXEL = 4
"""bytes of a decoded pixel, as Pillow keeps it"""
LARGE_RATE = 32e6
"""bytes a second in which large bodies are taken in: receiving and parsing them costs the model's time"""
AT_ONCE = 8
"""URLs of one request that are fetched at the same time"""


@dataclass(frozen=True)
class Incoming:
    """A request whose body was not read yet.

    client: whose it is, as far as fairness goes: see `client_of`
    length: what it says of its size, if it does
    end: its deadline, on this machine's monotonic clock
    """

    client: str
    length: int | None
    body: AsyncIterator[bytes]
    end: float

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


class Reading:
    """Everything that happens to a request before the ranker hears of it.

    It waits for bytes (`Intake`), in memory that is shared out (`Memory`), and is parsed and decoded where it
    can be killed (`Readers`): at no point does it hold a place in the ranker's line.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.memory = Memory(settings.max_memory)
        self.intake = Intake(settings.max_reading)
        self.pace = Pace(LARGE_RATE)
        self.readers = Readers(settings.readers, memory=settings.reader_memory, seconds=settings.read_timeout)
        self.limits = Limits(
            tuple(METHODS), settings.max_documents, settings.max_pixels, settings.max_total_pixels
        )
        self.fetcher = None
        if settings.allowed_hosts:
            self.fetcher = SafeFetcher(
                settings.allowed_hosts, timeout=settings.fetch_timeout, max_bytes=settings.fetch_max_bytes
            )

    async def read(self, incoming: Incoming, held: Held) -> tuple[Asked, list[Image.Image]]:
        """The request and its pictures, the reference first. What it still holds is in `held`."""
        seconds = min(self.settings.body_timeout, incoming.left)
        late = ServiceError(408, "body_timeout", f"the request's body took longer than {seconds:.1f} s")
        body = await self.intake.wait(incoming.client, held, self._body(incoming, held), seconds, late)
        size = len(body)

        def admit(asked: Asked | None, pixels: int) -> None:
            body.clear()  # it is parsed
            kept = asked is not None and asked.shown is not None  # the answer will repeat most of it
            held.grow(PIXEL * pixels - (0 if kept else size))

        task = ReadTask(incoming.client, incoming.end, admit)
        found = await self.readers.request(body, self.limits, task)
        asked = found.asked
        assert asked is not None
        urls = {number: url for number, url in enumerate(asked.sources) if url is not None}
        if not urls:
            return asked, found.images
        names = [asked.names[number] for number in urls]
        more = await self._fetched(list(urls.values()), names, incoming, held, found.pixels)
        given, added = iter(found.images), iter(more)
        return asked, [next(added if number in urls else given) for number in range(len(asked.sources))]

    async def _fetched(
        self, urls: list[str], names: list[str], incoming: Incoming, held: Held, pixels: int
    ) -> list[Image.Image]:
        work = self._fetch(urls, names, held)
        data = await self.intake.wait(incoming.client, held, work, incoming.left, too_late())
        size = sum(map(len, data))

        def admit(_: Asked | None, pixels: int) -> None:
            data.clear()
            held.grow(PIXEL * pixels - size)

        task = ReadTask(incoming.client, incoming.end, admit)
        return (await self.readers.pictures(data, names, self.limits, pixels, task)).images

    async def _body(self, incoming: Incoming, held: Held) -> bytearray:
        most = self.settings.max_body
        if incoming.length is not None and incoming.length > most:
            raise _too_large()
        body = bytearray()
        async for chunk in incoming.body:
            if len(body) + len(chunk) > most:
                raise _too_large()
            self.intake.grow(held, len(chunk))
            body += chunk
            if len(body) > LIGHT_BYTES:
                await self.pace.keep(len(chunk))
        return body

    async def _fetch(self, urls: list[str], names: list[str], held: Held) -> list[bytes]:
        if self.fetcher is None:
            raise ServiceError(
                422, "url_not_allowed", f"{names[0]}: URLs are not fetched here; send a data URI or base64"
            )
        gate, left = asyncio.Semaphore(AT_ONCE), self.settings.max_body

        def count(size: int) -> None:
            nonlocal left
            left -= size
            if left < 0:
                raise ServiceError(422, "fetch_failed", "the URLs' images are too large together")
            self.intake.grow(held, size)

        async def one(url: str) -> bytes:
            assert self.fetcher is not None
            async with gate:
                return await self.fetcher.get(url, count)

        tasks = [asyncio.ensure_future(one(url)) for url in urls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


def client_of(key: str | None, address: str | None) -> str:
    """Who a request comes from: its key, or the network it was sent from."""
    if key is not None:
        return "key " + hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    try:
        value = ipaddress.ip_address((address or "").split("%")[0])
    except ValueError:
        return f"client {address}"
    if isinstance(value, ipaddress.IPv6Address):  # one subscriber has all the addresses of a /64
        return f"network {ipaddress.ip_network((int(value) >> 64 << 64, 64))}"
    return f"address {value}"


def _too_large() -> ServiceError:
    return ServiceError(413, "too_large", "the request is too large")
