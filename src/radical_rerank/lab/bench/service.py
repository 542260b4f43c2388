"""The service under load: its overhead, its latency when overloaded, and its memory."""

from __future__ import annotations

import base64
import io
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from radical_rerank.backbones import Backbone
from radical_rerank.lab.bench.timing import Ratio, interleaved
from radical_rerank.lab.paper import CANDIDATES
from radical_rerank.progress import Progress, silent
from radical_rerank.reranking import Reranker
from radical_rerank.reranking.calibration import generated_list
from radical_rerank.service.app import create_app
from radical_rerank.service.backend import Local
from radical_rerank.service.capacity import Outcome, simulate
from radical_rerank.service.settings import Settings

LOAD = 2.0


@dataclass(frozen=True)
class ServiceResult:
    """Measurements of the service.

    Args:
        overhead: a request over a direct call of `Reranker.rank` with the same images, for new lists
        unloaded: median seconds of a single request
        loaded: 95th percentile of the seconds of accepted requests at twice the load
        statuses: HTTP statuses at twice the load, with their counts
        list_seconds, reading_seconds: of the model per list, and of a request besides the model and the
            queue, in a time of the same load before that
        predicted: what `radical plan` computes from these two for this load
        requests: requests over which memory was measured
        megabytes: growth of resident memory over these requests, after the first tenth
    """

    overhead: Ratio
    unloaded: float
    loaded: float
    statuses: dict[int, int]
    list_seconds: float
    reading_seconds: float
    predicted: Outcome
    requests: int
    megabytes: float


def run_service(
    model: str,
    *,
    candidates: int = CANDIDATES,
    rounds: int = 15,
    seconds: float = 30.0,
    requests: int = 2000,
    progress: Progress = silent,
) -> ServiceResult:
    """Measure the service, which runs in its own process.

    Args:
        model: a model id or a folder
        candidates: candidates per request
        rounds: rounds of the overhead
        seconds: how long the overload lasts
        requests: requests over which memory is measured
        progress: shows the progress
    """
    with serving(model, patience=100.0) as (url, process), httpx.Client(base_url=url, timeout=120) as http:
        ratio = _overhead(Backbone.from_pretrained(model), http, candidates, rounds, progress)
        before = 0.0
        bodies = [request_of(seed, 5)[1] for seed in range(20)]
        for number in progress(range(requests), "memory"):
            if number == requests // 10:
                before = resident(process.pid)
            http.post("/rerank", json=bodies[number % len(bodies)]).raise_for_status()
        gained = resident(process.pid) - before
    with serving(model) as (url, _), httpx.Client(base_url=url, timeout=120) as http:
        alone = statistics.median(_ask(http, request_of(3000 + seed, candidates)[1])[1] for seed in range(12))
        rate = LOAD / alone
        seen = _Seen(http)
        earlier = _open_loop(http, candidates, rate, seconds / 2, first=4000)
        each, waited = seen.seconds_since("ranked"), seen.seconds_since("waited")
        overhead = statistics.mean(took for status, took in earlier if status == 200) - waited - each
        spent = _open_loop(http, candidates, rate, seconds, first=9000)
    accepted = sorted(took for status, took in spent if status == 200)
    return ServiceResult(
        ratio,
        alone,
        accepted[int(0.95 * len(accepted))] if accepted else float("nan"),
        dict(Counter(status for status, _ in spent)),
        each,
        overhead,
        simulate(each, rate, overhead=max(0.0, overhead)),
        requests,
        gained,
    )


def _overhead(
    backbone: Backbone, http: httpx.Client, candidates: int, rounds: int, progress: Progress
) -> Ratio:
    """Compare requests with direct calls."""
    direct = Reranker(backbone, "radical", keep=0.2)
    work = [request_of(1000 + seed, candidates) for seed in range(rounds + 1)]
    turn = {"direct": iter(work), "service": iter(work)}

    def directly() -> None:
        images, body = next(turn["direct"])
        direct.rank(body["query"], images)

    def by_request() -> None:
        http.post("/rerank", json=next(turn["service"])[1]).raise_for_status()

    times = interleaved(
        {"service": by_request, "direct": directly}, rounds, progress=progress, label="overhead"
    )
    return times.ratio("service", "direct")


def closed_loop(http: httpx.Client, work: Sequence[dict[str, Any]], clients: int) -> float:
    """Return the lists per second of several clients that each send a request when the last is answered.

    Args:
        http: a client of the service
        work: the requests
        clients: how many clients
    """
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        for answer in pool.map(lambda body: http.post("/rerank", json=body), work):
            answer.raise_for_status()
    return len(work) / (time.perf_counter() - start)


def _ask(http: httpx.Client, body: dict[str, Any]) -> tuple[int, float]:
    """Send a request. Returns its status and its seconds."""
    start = time.perf_counter()
    answer = http.post("/rerank", json=body)
    return answer.status_code, time.perf_counter() - start


def _open_loop(
    http: httpx.Client, candidates: int, rate: float, seconds: float, *, first: int
) -> list[tuple[int, float]]:
    """Send so many requests per second, at random times. Returns (status, seconds) of each.

    first: the seed of the first list. No list comes twice: the service would rank it faster from its caches
    """
    draw, arrivals = random.Random(first), [0.0]
    while arrivals[-1] < seconds:
        arrivals.append(arrivals[-1] + draw.expovariate(rate))
    work = [request_of(first + number, candidates)[1] for number in range(len(arrivals))]
    with ThreadPoolExecutor(64) as pool:
        futures, start = [], time.perf_counter()
        for body, arrival in zip(work, arrivals, strict=True):
            time.sleep(max(0.0, start + arrival - time.perf_counter()))
            futures.append(pool.submit(_ask, http, body))
        return [future.result() for future in futures]


class _Seen:
    """What the service's histograms of seconds have seen up to now."""

    def __init__(self, http: httpx.Client) -> None:
        self._http, self._start = http, _histograms(http)

    def seconds_since(self, name: str) -> float:
        """Return the mean of "ranked" or "waited" since then."""
        now = _histograms(self._http)
        total, count = (
            now[key] - self._start[key]
            for key in (f"radical_{name}_seconds_sum", f"radical_{name}_seconds_count")
        )
        return total / max(1.0, count)


def _histograms(http: httpx.Client) -> dict[str, float]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def request_of(seed: int, candidates: int) -> tuple[list[bytes], dict[str, Any]]:
    """Return the encoded images of a generated list, and the request with them."""
    query, pictures = generated_list(seed, candidates)
    images = []
    for image in pictures:
        image.save(file := io.BytesIO(), "PNG")
        images.append(file.getvalue())
    documents = [base64.b64encode(data).decode() for data in images]
    return images, {"query": query, "documents": documents}


@contextmanager
def listening(backbone: Backbone, **limits: Any) -> Iterator[str]:
    """Run a service in a thread of this process, on a free port. Yields its address.

    Args:
        backbone: the model
        limits: settings of the service
    """
    settings = Settings(**limits)
    app = create_app(settings, Local(settings, load=lambda: backbone))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the server did not start")
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


@contextmanager
def serving(
    model: str,
    *,
    within: float = 600.0,
    program: Sequence[str] = ("-m", "radical_rerank.cli"),
    **limits: Any,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run `radical serve` in its own process, on a free port. Yields its address and its process.

    Args:
        model: a model id or a folder
        within: seconds after which it must be ready
        program: Python's arguments that run the command line
        limits: options of `radical serve`
    """
    port, end = str(free_port()), time.monotonic() + within
    given = [part for name, value in limits.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, *program, "serve", "--model", model, "--port", port, *given]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            time.sleep(0.1)
        yield url, process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def resident(process: int | str = "self") -> float:
    """Return the resident memory of a process in megabytes; nan if the system does not provide it."""
    try:
        with open(f"/proc/{process}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return float("nan")
