"""Fetch images by URL: only from allowed hosts, never from a private address."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import SplitResult, urljoin, urlsplit

import httpx

from radical_rerank.service.errors import ServiceError

MAX_REDIRECTS = 3


class SafeFetcher:
    """Fetches http(s) URLs of allowed hosts with public addresses. Redirects are checked in the same way.

    The connection goes to the address that was checked, so a name that resolves to another address a moment
    later (DNS rebinding) has no effect.

    Args:
        hosts: the host names to allow
        timeout: seconds per URL, including redirects
        max_bytes: larger images are refused

    Example:
        >>> fetcher = SafeFetcher(["images.example"], timeout=10, max_bytes=20 << 20)
        >>> asyncio.run(fetcher.get("http://127.0.0.1/a.png"))
        Traceback (most recent call last):
        radical_rerank.service.errors.ServiceError: the URL's host is not allowed
    """

    def __init__(self, hosts: Collection[str], *, timeout: float, max_bytes: int) -> None:
        self.hosts = {host.lower().rstrip(".") for host in hosts}
        self.timeout, self.max_bytes = timeout, max_bytes
        self._tls = httpx.create_ssl_context(trust_env=False)  # once: reading the certificates is slow
        self._resolver = ThreadPoolExecutor(8, thread_name_prefix="resolver")

    async def get(self, url: str, count: Callable[[int], None] = lambda size: None) -> bytes:
        """Fetch an allowed URL, or raise a ServiceError.

        Args:
            url: the URL
            count: called with the size of each chunk before it is kept; may raise

        Returns:
            The body of the response.
        """
        try:
            return await asyncio.wait_for(self._follow(url, count), self.timeout)
        except asyncio.TimeoutError:
            raise _failed("fetching the URL timed out") from None

    async def _follow(self, url: str, count: Callable[[int], None]) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            result = await self._fetch(url, count)
            if isinstance(result, bytes):
                return result
            try:
                url = urljoin(url, result)
            except ValueError:
                raise _malformed() from None
        raise _not_allowed("the URL has too many redirects")

    async def _fetch(self, url: str, count: Callable[[int], None]) -> bytes | str:
        """Return the body, or the location of a redirect."""
        parts, host, port = self._checked(url)
        resolve = asyncio.get_running_loop().run_in_executor
        address = await resolve(self._resolver, self._address, host, port)
        literal = f"[{address}]" if ":" in address else address
        target = parts._replace(netloc=f"{literal}:{port}", fragment="").geturl()
        # No compression: a few compressed bytes can expand to any size, and be compressed several times.
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
            raise _failed(f"the URL cannot be fetched: {type(error).__name__}") from None

    def _checked(self, url: str) -> tuple[SplitResult, str, int]:
        """Return the parts, the host and the port of an allowed URL, or raise a ServiceError."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower().rstrip("."), parts.port
            url.encode()
        except ValueError:
            raise _malformed() from None
        if parts.scheme not in ("http", "https") or host not in self.hosts or parts.username is not None:
            raise _not_allowed("the URL's host is not allowed")
        return parts, host, port or (443 if parts.scheme == "https" else 80)

    async def _body(self, response: httpx.Response, count: Callable[[int], None]) -> bytes | str:
        if response.is_redirect:
            location: str = response.headers.get("location", "")
            return location
        if response.status_code != 200:
            raise _failed(f"the URL returned status {response.status_code}")
        if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise _failed("the URL returned a compressed response, which is not accepted")
        body = bytearray()
        async for chunk in response.aiter_raw():
            if len(body) + len(chunk) > self.max_bytes:
                raise _failed("the URL's image is too large")
            count(len(chunk))
            body += chunk
        return bytes(body)

    def _address(self, host: str, port: int) -> str:
        """Resolve a host. All its addresses must be public."""
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise _failed("the URL's host cannot be resolved") from None
        addresses = [str(entry[4][0]) for entry in entries]
        if not addresses or not all(is_public(address) for address in addresses):
            raise _not_allowed("the URL's host has a private address")
        return addresses[0]


def _failed(message: str) -> ServiceError:
    return ServiceError(422, "fetch_failed", message)


def _not_allowed(message: str) -> ServiceError:
    return ServiceError(422, "url_not_allowed", message)


def _malformed() -> ServiceError:
    return _not_allowed("the URL is not well-formed")


_V6 = ipaddress.IPv6Network
# IPv6 networks whose addresses contain an IPv4 address, and its distance from the right, in bits.
EMBEDDED_V4 = (
    (_V6("::ffff:0:0/96"), 0),  # mapped
    (_V6("::ffff:0:0:0/96"), 0),  # translated
    (_V6("64:ff9b::/96"), 0),  # NAT64
    (_V6("2002::/16"), 80),  # 6to4
)
# Tunnels and translators with an unknown other end: local NAT64, Teredo, IPv4-compatible.
REFUSED = (_V6("64:ff9b:1::/48"), _V6("2001::/32"), _V6("::/96"))
ISATAP = (0x00005EFE, 0x02005EFE)
"""the third quarter of an IPv6 address whose last quarter is an IPv4 address"""
UNICAST = _V6("2000::/3")
"""contains all public addresses of IPv6"""


def is_public(address: str) -> bool:
    """Check that an address is public: not private, loopback, link-local or reserved, also within IPv6.

    Example:
        >>> is_public("8.8.8.8"), is_public("::ffff:127.0.0.1")
        (True, False)
    """
    value = ipaddress.ip_address(address.split("%")[0])
    if isinstance(value, ipaddress.IPv6Address):
        number = int(value)
        if any(value in network for network in REFUSED) or number >> 32 & 0xFFFFFFFF in ISATAP:
            return False
        for network, shift in EMBEDDED_V4:
            if value in network:
                return is_public(str(ipaddress.IPv4Address(number >> shift & 0xFFFFFFFF)))
        if value not in UNICAST:
            return False
    return value.is_global and not value.is_multicast
