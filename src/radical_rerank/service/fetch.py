"""Fetching images from allowed hosts, and never from where they do not belong."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urljoin, urlsplit

import httpx

from radical_rerank.service.errors import ServiceError

REDIRECTS = 3
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class SafeFetcher:
    """Only http(s), only allowed hosts, only public addresses; redirects are checked like first requests.

    The connection goes to the very address that was checked, so that a name which resolves differently a
    moment later gains nothing.
    """

    def __init__(self, hosts: Collection[str], *, timeout: float, max_bytes: int) -> None:
        self.hosts = {host.lower().rstrip(".") for host in hosts}
        self.timeout, self.max_bytes = timeout, max_bytes

    def get(self, url: str) -> bytes:
        for _ in range(REDIRECTS + 1):
            answer = self._once(url)
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer)
        raise ServiceError(422, "url_not_allowed", "the URL redirects too often")

    def _once(self, url: str) -> bytes | str:
        """The body, or where the answer redirects to."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower().rstrip("."), parts.port
        except ValueError:
            raise ServiceError(422, "url_not_allowed", "the URL is not well-formed") from None
        if parts.scheme not in ("http", "https") or host not in self.hosts or parts.username is not None:
            raise ServiceError(422, "url_not_allowed", "the URL's host is not on the allow-list")
        port = port or (443 if parts.scheme == "https" else 80)
        address = self._address(host, port)
        literal = f"[{address}]" if ":" in address else address
        target = parts._replace(netloc=f"{literal}:{port}", fragment="").geturl()
        try:
            with httpx.Client(timeout=self.timeout, follow_redirects=False, trust_env=False) as client:
                request = client.build_request(
                    "GET", target, headers={"Host": parts.netloc}, extensions={"sni_hostname": host}
                )
                response = client.send(request, stream=True)
                try:
                    if response.is_redirect:
                        return response.headers.get("location", "")
                    if response.status_code != 200:
                        raise ServiceError(422, "fetch_failed", f"the URL answers {response.status_code}")
                    body = bytearray()
                    for chunk in response.iter_bytes():
                        body += chunk
                        if len(body) > self.max_bytes:
                            raise ServiceError(422, "fetch_failed", "the URL's image is too large")
                    return bytes(body)
                finally:
                    response.close()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            kind = type(error).__name__
            raise ServiceError(422, "fetch_failed", f"the URL cannot be fetched: {kind}") from None

    def _address(self, host: str, port: int) -> str:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            raise ServiceError(422, "fetch_failed", "the URL's host cannot be resolved") from None
        addresses = [str(entry[4][0]) for entry in found]
        if not addresses or not all(is_public(address) for address in addresses):
            raise ServiceError(422, "url_not_allowed", "the URL's host has a private address")
        return addresses[0]


def is_public(address: str) -> bool:
    """Neither private nor link-local nor loopback nor reserved, also when wrapped in IPv6."""
    value = ipaddress.ip_address(address.split("%")[0])
    if isinstance(value, ipaddress.IPv6Address):
        inner = value.ipv4_mapped or value.sixtofour or (value.teredo or (None, None))[1]
        if inner is None and value in NAT64:
            inner = ipaddress.IPv4Address(int(value) & 0xFFFFFFFF)
        if inner is not None:
            value = inner
    return value.is_global and not value.is_multicast
