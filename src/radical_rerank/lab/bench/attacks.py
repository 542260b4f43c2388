"""The service under attack: how many good requests are answered, how fast, and with how much memory."""

from __future__ import annotations

import gzip
import math
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from radical_rerank.lab.bench.payloads import brackets, many_scans, numbers, picture, polyglot, request
from radical_rerank.lab.bench.service import request_of, resident, serving
from radical_rerank.lab.paper import CANDIDATES
from radical_rerank.progress import Progress, silent

HOST = "attacker.test"
"""the name of the hostile host"""
# `radical serve`, but HOST counts as public: normally the service fetches nothing from this machine.
SERVE = """
import sys
from radical_rerank.lab.bench.attacks import host_known
from radical_rerank.cli import main
with host_known():
    main(sys.argv[1:])
"""
CLIENTS = 4
"""attackers at the same time"""
PAUSE = 0.05
"""seconds between the answer to an attacker and its next request"""


@dataclass(frozen=True)
class AttackResult:
    """Measurements under one attack.

    Args:
        name: the attack
        good: requests of the good client that were answered with a ranking
        asked: all requests of the good client
        p95: 95th percentile of its seconds during the attack
        unloaded: 95th percentile of its seconds before the attack
        megabytes: peak memory of the service and its processes, over their memory when idle
        statuses: HTTP statuses of the attack's requests with their counts; 0 for requests without an answer
    """

    name: str
    good: int
    asked: int
    p95: float
    unloaded: float
    megabytes: float
    statuses: dict[int, int]


Attack = Callable[[str], int]
"""attacks the service at this address once and returns the HTTP status"""


def run_attacks(
    model: str,
    *,
    seconds: float = 12.0,
    candidates: int = CANDIDATES,
    names: Sequence[str] | None = None,
    progress: Progress = silent,
) -> list[AttackResult]:
    """Run each attack next to one good client.

    Both have the same address and send no key, so only their requests distinguish them.

    Args:
        model: a model id or a folder
        seconds: how long each attack lasts at least
        candidates: candidates per good request
        names: the attacks; by default all
        progress: shows the progress over attacks
    """
    work = [request_of(7000 + seed, candidates)[1] for seed in range(12)]
    results = []
    with hostile_host() as port:
        for name in progress(list(names or all_attacks(port)), "attacks"):
            with (
                serving(model, program=("-c", SERVE), allow_host=HOST) as (url, process),
                httpx.Client(base_url=url, timeout=120) as http,
            ):
                _ask(http, cycle(work), len(work))  # warm up: every list once
                _, calm = _ask(http, cycle(work), 3 * len(work))
                with Peak(process.pid) as peak, attackers(name, url, port) as statuses:
                    good, spent = _ask(http, cycle(work), len(work), seconds)
                results.append(
                    AttackResult(
                        name, good, len(spent), p95(spent), p95(calm), peak.megabytes, dict(statuses)
                    )
                )
    return results


def _ask(
    http: httpx.Client, work: Iterator[dict[str, Any]], least: int, seconds: float = 0.0
) -> tuple[int, list[float]]:
    """Send at least `least` requests, for at least `seconds`.

    Returns how many were answered with a ranking, and the seconds of each.
    """
    good, spent = 0, list[float]()
    end = time.perf_counter() + seconds
    while len(spent) < least or time.perf_counter() < end:
        start = time.perf_counter()
        good += http.post("/rerank", json=next(work)).status_code == 200
        spent.append(time.perf_counter() - start)
    return good, spent


def p95(values: Sequence[float]) -> float:
    """Return the 95th percentile."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


@contextmanager
def attackers(name: str, url: str, port: int) -> Iterator[dict[int, int]]:
    """Attack the service from another process for as long as the context lasts.

    The process has a low priority, since real attackers have their own machines. Yields a dict that holds
    the statuses of the attack's requests and their counts when the context ends.
    """
    statuses: dict[int, int] = {}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_attack, args=(name, url, port, theirs), daemon=True)
    process.start()
    try:
        ours.recv()  # wait until it has started
        yield statuses
    finally:
        ours.send("stop")
        if ours.poll(150):
            statuses |= ours.recv()
        process.kill()
        process.join()


def _attack(name: str, url: str, port: int, connection: Connection) -> None:
    os.nice(10)
    attack = all_attacks(port)[name]
    statuses: Counter[int] = Counter()
    over = threading.Event()

    def keep_on() -> None:
        while not over.wait(PAUSE):
            try:
                statuses[attack(url)] += 1
            except (HTTPException, OSError):
                statuses[0] += 1

    threads = [threading.Thread(target=keep_on, daemon=True) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    connection.send("begun")
    connection.recv()
    over.set()
    for thread in threads:
        thread.join(120)
    connection.send(dict(statuses))


class Peak:
    """A context that measures the peak memory of a process and its children, over their memory at first."""

    def __init__(self, pid: int) -> None:
        self.pid, self.megabytes = pid, 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._idle = self._now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.megabytes = max(self.megabytes, self._now() - self._idle)

    def _now(self) -> float:
        sizes = [resident(pid) for pid in (self.pid, *children(self.pid))]
        return sum(size for size in sizes if not math.isnan(size))


def children(pid: int) -> list[int]:
    """Return the child processes of a process; none if the system does not list them."""
    pids: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            pids += map(int, path.read_text(encoding="ascii").split())
    return pids


# The attacks.


def all_attacks(port: int) -> dict[str, Attack]:
    """Return all attacks by name. port: the port of the hostile host"""
    host = f"http://{HOST}:{port}"
    small = picture(128, 128)
    bodies: dict[str, Callable[[], bytes]] = {
        "numbers for documents, 6 MB": lambda: numbers(6_000_000),
        "brackets for documents, 60 MB": lambda: brackets(60_000_000),
        "one string of 60 MB": lambda: b'{"query": "\xf0\x9f\x98\x80' + b"a" * 60_000_000 + b'"}',
        "a JPEG of 2,400 scans": lambda: request(many_scans(5600, 5600, 2400)),
        "a JPEG of the most scans allowed": lambda: request(many_scans(5600, 5600, 9)),
        "a host that drips": lambda: _naming(f"{host}/drip"),
        "pictures of 201 x 1": lambda: request(*[picture(201, 1)] * 3),
        "queries of 10,000 characters": lambda: request(small, small, query="star " * 2000),
        "a WebP that is also an IM": lambda: request(polyglot((64, 64), (6000, 5000))),
        "pictures of 31 megapixels": lambda: request(picture(5600, 5600)),
        "a host that packs twice": lambda: _naming(f"{host}/packed"),
    }
    return {"bodies that drip": dripping, **{name: _Posting(body) for name, body in bodies.items()}}


def _naming(url: str) -> bytes:
    return ('{"query": "a red star", "documents": ["' + url + '"]}').encode()


class _Posting:
    """Sends a body, which is made once, on first use."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = lru_cache(make)

    def __call__(self, url: str) -> int:
        connection = HTTPConnection(urlsplit(url).netloc, timeout=120)
        try:
            connection.request("POST", "/rerank", self._make(), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()


def dripping(url: str, connections: int = 100, seconds: float = 4.0) -> int:
    """Send many requests whose bodies arrive byte by byte."""
    parts = urlsplit(url)
    head = f"POST /rerank HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    head += "Content-Length: 1000000\r\n\r\n{"
    opened = []
    try:
        for _ in range(connections):
            opened.append(socket.create_connection((parts.hostname or "", parts.port or 80), timeout=5))
            opened[-1].sendall(head.encode())
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for one in opened:
                with suppress(OSError):
                    one.sendall(b" ")
            time.sleep(0.5)
    finally:
        for one in opened:
            one.close()
    return 0


@lru_cache(maxsize=1)
def packed_twice() -> bytes:
    """Return 200 MB of zeros, compressed twice to less than a kilobyte."""
    return gzip.compress(gzip.compress(bytes(200_000_000), 1))


class _Hostile(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        if self.path == "/packed":
            self.send_header("Content-Encoding", "gzip, gzip")
            self.end_headers()
            self.wfile.write(packed_twice())
            return
        self.end_headers()
        with suppress(OSError):
            for _ in range(600):
                self.wfile.write(b"\x89")
                self.wfile.flush()
                time.sleep(1)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def hostile_host() -> Iterator[int]:
    """Run a host on this machine that sends too slowly (/drip) or too much (/packed). Yields its port."""
    packed_twice()  # before anything is timed
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hostile)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def host_known() -> Iterator[None]:
    """Make the fetcher of this process take the hostile host for a public one."""
    from radical_rerank.service.fetch import SafeFetcher

    known = SafeFetcher._address

    def address(self: SafeFetcher, host: str, port: int) -> str:
        return "127.0.0.1" if host == HOST else known(self, host, port)

    SafeFetcher._address = address  # type: ignore[method-assign]
    try:
        yield
    finally:
        SafeFetcher._address = known  # type: ignore[method-assign]
