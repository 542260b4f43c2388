"""Fetching images by URL: allowed hosts, public addresses, redirects."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the service is an extra")

from radical_rerank.backbones import Backbone
from radical_rerank.reranking import Ranking
from radical_rerank.service.errors import ServiceError
from radical_rerank.service.fetch import SafeFetcher, is_public
from tests.service.helpers import PICTURES, QUERY, encoded, serving, uri


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("192.168.0.1", False),
        ("172.16.9.9", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_only_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


class _Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/picture.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(encoded(PICTURES[0]))
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(bytes(10_000))
        elif self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", base64.urlsafe_b64decode(self.path[4:]).decode())
            self.end_headers()
        else:
            self.send_response(404)
            self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A local server called good.example, and a host inner.example with a private address."""
    server = HTTPServer(("127.0.0.1", 0), _Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    true = SafeFetcher._address

    def address(self: SafeFetcher, host: str, port: int) -> str:
        return "127.0.0.1" if host == "good.example" else true(self, host, port)

    known = socket.getaddrinfo

    def resolved(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host == "inner.example":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.7", port))]
        return known(host, port, *args, **more)

    monkeypatch.setattr(SafeFetcher, "_address", address)
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    yield port
    server.shutdown()
    server.server_close()


def test_allowed_urls_are_fetched_and_no_others(site: int) -> None:
    fetcher = SafeFetcher(["good.example", "inner.example"], timeout=5, max_bytes=100_000)

    def get(url: str) -> bytes:
        return asyncio.run(fetcher.get(url))

    here = f"http://good.example:{site}"

    def to(target: str) -> str:
        return f"{here}/to/{base64.urlsafe_b64encode(target.encode()).decode()}"

    assert get(f"{here}/picture.png") == encoded(PICTURES[0])
    assert get(to("/picture.png")) == encoded(PICTURES[0])
    for refused, code in (
        (f"http://127.0.0.1:{site}/picture.png", "url_not_allowed"),
        (f"http://other.example:{site}/picture.png", "url_not_allowed"),
        ("http://inner.example/picture.png", "url_not_allowed"),
        (f"http://good.example@127.0.0.1:{site}/picture.png", "url_not_allowed"),
        (f"http://user@good.example:{site}/picture.png", "url_not_allowed"),
        ("file:///etc/passwd", "url_not_allowed"),
        ("http://[::1", "url_not_allowed"),
        (to(f"http://127.0.0.1:{site}/picture.png"), "url_not_allowed"),
        (to("http://inner.example/latest/meta-data"), "url_not_allowed"),
        (to("file:///etc/passwd"), "url_not_allowed"),
        (f"{here}/missing", "fetch_failed"),
        (f"{here}/endless", "fetch_failed"),
    ):
        with pytest.raises(ServiceError) as caught:
            get(refused)
        assert caught.value.code == code, refused
        assert caught.value.status == 422
    loop = here + "/to/" + base64.urlsafe_b64encode(b"/picture.png").decode()
    for _ in range(4):
        loop = to(loop)
    with pytest.raises(ServiceError, match="too many redirects"):
        get(loop)


@pytest.mark.slow
def test_a_request_may_name_an_allowed_url(embedded: Backbone, site: int, expected: Ranking) -> None:
    with serving(embedded, allowed_hosts=["good.example"], patience=9.0) as client:
        documents = [f"http://good.example:{site}/picture.png", *(uri(image) for image in PICTURES[1:])]
        answer = client.post("/rerank", json={"query": QUERY, "documents": documents})
        assert [result["index"] for result in answer.json()["results"]] == expected.order
