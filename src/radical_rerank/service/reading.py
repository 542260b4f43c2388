"""From an HTTP request to a list to rank: its body, its URLs and its images, all within limits."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields

from PIL import Image

from radical_rerank.pruning import METHODS
from radical_rerank.service.documents import Limits, ParsedRequest
from radical_rerank.service.errors import ServiceError, too_late
from radical_rerank.service.fetch import SafeFetcher
from radical_rerank.service.intake import BYTES_PER_PIXEL, Intake, Memory, RateLimit, Reservation
from radical_rerank.service.readers import LIGHT_BYTES, Readers, ReadTask
from radical_rerank.service.settings import Settings

LARGE_BODY_RATE = 32e6
"""bytes per second of large bodies, all together: receiving and parsing them slows the model down"""
PARALLEL_FETCHES = 8
"""URLs of one request that are fetched at the same time"""


@dataclass(frozen=True)
class Incoming:
    """A request whose body is not read yet.

    client: who sent it, see `client_of`
    length: its Content-Length, if it has one
    body: the chunks of its body
    end: its deadline, on this machine's monotonic clock
    """

    client: str
    length: int | None
    body: AsyncIterator[bytes]
    end: float

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self.end - time.monotonic()


class Reading:
    """Reads requests: everything that happens before the model's queue.

    A request waits for its bytes (`Intake`), holds memory (`Memory`), and is parsed and decoded in a process
    that can be killed (`Readers`). Meanwhile it takes no place in the model's queue.

    Args:
        settings: the limits
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.memory = Memory(settings.max_memory)
        self.intake = Intake(settings.max_reading)
        self.large_bodies = RateLimit(LARGE_BODY_RATE)
        self.readers = Readers(settings.readers, memory=settings.reader_memory, seconds=settings.read_timeout)
        named = (field.name for field in fields(Limits) if field.name != "methods")
        self.limits = Limits(tuple(METHODS), **{name: getattr(settings, name) for name in named})
        self.fetcher = None
        if settings.allowed_hosts:
            self.fetcher = SafeFetcher(
                settings.allowed_hosts, timeout=settings.fetch_timeout, max_bytes=settings.fetch_max_bytes
            )

    async def read(
        self, incoming: Incoming, reservation: Reservation
    ) -> tuple[ParsedRequest, list[Image.Image]]:
        """Read a request, or raise a ServiceError.

        Args:
            incoming: the request
            reservation: grows with the memory that the request holds

        Returns:
            The request and its images, the query's first.
        """
        seconds = min(self.settings.body_timeout, incoming.seconds_left)
        late = ServiceError(408, "body_timeout", f"the request's body did not arrive within {seconds:.1f} s")
        work = self._body(incoming, reservation)
        body = await self.intake.wait(incoming.client, reservation, work, seconds, late)
        size = len(body)

        def admit(request: ParsedRequest | None, pixels: int) -> None:
            body.clear()  # it is parsed
            assert request is not None
            texts = sum(map(sys.getsizeof, filter(None, request.texts)))
            kept = size if request.shown is not None else 0  # the response repeats most of it
            reservation.grow(BYTES_PER_PIXEL * pixels + texts + kept - size)

        task = ReadTask(incoming.client, incoming.end, admit)
        result = await self.readers.request(body, self.limits, task)
        request = result.request
        assert request is not None
        urls = {number: url for number, url in enumerate(request.sources) if url is not None}
        if not urls:
            return request, result.images
        names = [request.names[number] for number in urls]
        fetched = iter(await self._fetched(list(urls.values()), names, incoming, reservation, result.pixels))
        sent = iter(result.images)
        return request, [next(fetched if i in urls else sent) for i in range(len(request.sources))]

    async def _body(self, incoming: Incoming, reservation: Reservation) -> bytearray:
        limit = self.settings.max_body
        if incoming.length is not None and incoming.length > limit:
            raise _too_large()
        body = bytearray()
        async for chunk in incoming.body:
            if len(body) + len(chunk) > limit:
                raise _too_large()
            self.intake.grow(reservation, len(chunk))
            body += chunk
            if len(body) > LIGHT_BYTES:
                await self.large_bodies.wait(len(chunk))
        return body

    async def _fetched(
        self, urls: list[str], names: list[str], incoming: Incoming, reservation: Reservation, pixels: int
    ) -> list[Image.Image]:
        """Fetch and decode these URLs. pixels: of the request's other images"""
        work = self._fetch(urls, names, reservation)
        data = await self.intake.wait(incoming.client, reservation, work, incoming.seconds_left, too_late())
        size = sum(map(len, data))

        def admit(_: ParsedRequest | None, pixels: int) -> None:
            data.clear()
            reservation.grow(BYTES_PER_PIXEL * pixels - size)

        task = ReadTask(incoming.client, incoming.end, admit)
        return (await self.readers.images(data, names, self.limits, pixels, task)).images

    async def _fetch(self, urls: list[str], names: list[str], reservation: Reservation) -> list[bytes]:
        fetcher = self.fetcher
        if fetcher is None:
            raise ServiceError(
                422, "url_not_allowed", f"{names[0]}: fetching URLs is disabled; send a data URI or base64"
            )
        parallel, left = asyncio.Semaphore(PARALLEL_FETCHES), self.settings.max_body

        def count(size: int) -> None:
            nonlocal left
            left -= size
            if left < 0:
                raise ServiceError(422, "fetch_failed", "the images of all URLs together are too large")
            self.intake.grow(reservation, size)

        async def fetch(url: str) -> bytes:
            async with parallel:
                return await fetcher.get(url, count)

        tasks = [asyncio.ensure_future(fetch(url)) for url in urls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


def client_of(key: str | None, address: str | None) -> str:
    """Name the client of a request: by its API key, or else by the network it was sent from.

    Example:
        >>> client_of(None, "192.0.2.7"), client_of(None, "2001:db8::7")
        ('address 192.0.2.7', 'network 2001:db8::/64')
    """
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
