"""Fetching images from allowed hosts, and never from where they do not belong."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urljoin, urlsplit

import httpx

from radical_rerank.service.errors import ServiceError

REDIRECTS = 3


class SafeFetcher:
    """Only http(s), only allowed hosts, only public addresses; redirects are checked like first requests.

    The connection goes to the very address that was checked, so that a name which resolves differently a
    moment later gains nothing.
    """

    def __init__(self, hosts: Collection[str], *, timeout: float, max_bytes: int) -> None:
        """timeout: for all of one image, redirects included"""
        self.hosts = {host.lower().rstrip(".") for host in hosts}
        self.timeout, self.max_bytes = timeout, max_bytes
        self._tls = httpx.create_ssl_context(trust_env=False)  # reading the certificates takes its time: once
        self._resolver = ThreadPoolExecutor(8, thread_name_prefix="resolver")

    async def get(self, url: str, count: Callable[[int], None] = lambda size: None) -> bytes:
        """The bytes behind an allowed URL, or a ServiceError.

        count: told of every piece's size before it is kept; may raise
        """
        try:
            return await asyncio.wait_for(self._get(url, count), self.timeout)
        except asyncio.TimeoutError:
            raise ServiceError(422, "fetch_failed", "the URL takes too long to fetch") from None

    async def _get(self, url: str, count: Callable[[int], None]) -> bytes:
        for _ in range(REDIRECTS + 1):
            answer = await self._once(url, count)
            if isinstance(answer, bytes):
                return answer
            try:
                url = urljoin(url, answer)
            except ValueError:
                raise _malformed() from None
        raise ServiceError(422, "url_not_allowed", "the URL redirects too often")

    async def _once(self, url: str, count: Callable[[int], None]) -> bytes | str:
        """The body, or where the answer redirects to."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower().rstrip("."), parts.port
            url.encode()
        except ValueError:
            raise _malformed() from None
        if parts.scheme not in ("http", "https") or host not in self.hosts or parts.username is not None:
            raise ServiceError(422, "url_not_allowed", "the URL's host is not on the allow-list")
        port = port or (443 if parts.scheme == "https" else 80)
        resolve = asyncio.get_running_loop().run_in_executor
        address = await resolve(self._resolver, self._address, host, port)
        literal = f"[{address}]" if ":" in address else address
        target = parts._replace(netloc=f"{literal}:{port}", fragment="").geturl()
        # Compressed, a few bytes may stand for any number, and be wrapped several times: as they are, or not.
        headers = {"Host": parts.netloc, "Accept-Encoding": "identity"}
        try:
            async with httpx.AsyncClient(timeout=self.timeout, trust_env=False, verify=self._tls) as client:
                request = client.build_request(
                    "GET", target, headers=headers, extensions={"sni_hostname": host}
                )
                response = await client.send(request, stream=True, follow_redirects=False)
                try:
                    return await self._body(response, count)
                finally:
                    await response.aclose()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            kind = type(error).__name__
            raise ServiceError(422, "fetch_failed", f"the URL cannot be fetched: {kind}") from None

    async def _body(self, response: httpx.Response, count: Callable[[int], None]) -> bytes | str:
        if response.is_redirect:
            return response.headers.get("location", "")
        if response.status_code != 200:
            raise ServiceError(422, "fetch_failed", f"the URL answers {response.status_code}")
        if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise ServiceError(
                422, "fetch_failed", "the URL's image is encoded, though that was not asked for"
            )
        body = bytearray()
        async for chunk in response.aiter_raw():
            if len(body) + len(chunk) > self.max_bytes:
                raise ServiceError(422, "fetch_failed", "the URL's image is too large")
            count(len(chunk))
            body += chunk
        return bytes(body)

    def _address(self, host: str, port: int) -> str:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise ServiceError(422, "fetch_failed", "the URL's host cannot be resolved") from None
        addresses = [str(entry[4][0]) for entry in found]
        if not addresses or not all(is_public(address) for address in addresses):
            raise ServiceError(422, "url_not_allowed", "the URL's host has a private address")
        return addresses[0]


def _malformed() -> ServiceError:
    return ServiceError(422, "url_not_allowed", "the URL is not well-formed")


# Ways to write an IPv4 address as an IPv6 one, and how many bits from the right it stands.
_V6 = ipaddress.IPv6Network
EMBEDDED = (
    (_V6("::ffff:0:0/96"), 0),  # mapped
    (_V6("::ffff:0:0:0/96"), 0),  # translated
    (_V6("64:ff9b::/96"), 0),  # NAT64
    (_V6("2002::/16"), 80),  # 6to4
)
# Tunnels and translators whose other end this side cannot know: local NAT64, Teredo, IPv4-compatible.
REFUSED = (_V6("64:ff9b:1::/48"), _V6("2001::/32"), _V6("::/96"))
ISATAP = (0x00005EFE, 0x02005EFE)
"""the third quarter of an address whose last quarter is IPv4"""
UNICAST = _V6("2000::/3")
"""where all public addresses of IPv6 lie"""


def is_public(address: str) -> bool:
    """Neither private nor link-local nor loopback nor reserved, also when wrapped in IPv6."""
    value = ipaddress.ip_address(address.split("%")[0])
    if isinstance(value, ipaddress.IPv6Address):
        number = int(value)
        if any(value in network for network in REFUSED) or number >> 32 & 0xFFFFFFFF in ISATAP:
            return False
        for network, shift in EMBEDDED:
            if value in network:
                return is_public(str(ipaddress.IPv4Address(number >> shift & 0xFFFFFFFF)))
        if value not in UNICAST:
            return False
    return value.is_global and not value.is_multicast
