"""The service on Ray Serve: one front that takes requests, and replicas that own models.

The front forwards each request to a replica, and to another one if that replica dies. It needs the extras
`serve` and `ray`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from radical_rerank.errors import InputError, needs_extra
from radical_rerank.reranking import Ranking
from radical_rerank.service import (
    DEFAULT_DOWNSCALE_DELAY,
    DEFAULT_HOST,
    DEFAULT_PORT,
    DEFAULT_UPSCALE_DELAY,
)
from radical_rerank.service.app import create_app
from radical_rerank.service.backend import IsDisconnected, Local
from radical_rerank.service.errors import ServiceError, overloaded, ranking_failed, too_late
from radical_rerank.service.settings import Settings
from radical_rerank.service.worker import RankWork

APP_NAME = "radical"
MAX_ATTEMPTS = 3
"""replicas that are tried for one request"""
TARGET_LOAD = 0.7
"""requests in flight per replica, on average, above which another replica is added"""


class Ranker:
    """A replica: one model and its queue.

    Args:
        settings: model, queue and limits
    """

    def __init__(self, settings: Settings) -> None:
        self._local = Local(settings)
        self._local.start()

    async def rank(self, work: RankWork, seconds: float) -> Ranking | tuple[int, str, str, dict[str, str]]:
        """Rank a list.

        Args:
            work: the list; its deadline is ignored, since clocks differ between machines
            seconds: the time left until the deadline

        Returns:
            The ranking, or the arguments of a ServiceError: Ray would wrap a raised one.
        """

        async def connected() -> bool:
            return False

        here = replace(work, deadline=time.monotonic() + seconds)
        try:
            await self._local.check(here)
            with self._local.admitted(here.heavy):
                ranking = await self._local.rank(here, is_disconnected=connected)
        except ServiceError as error:
            return error.status, error.code, error.message, error.headers
        # The front has the documents: do not send them back.
        return replace(ranking, results=tuple(replace(result, document=None) for result in ranking))

    async def reads_texts(self) -> bool:
        """Return whether the model reads documents with text."""
        return await self._local.reads_texts()

    async def profile(self) -> dict[str, Any] | None:
        """Return the model's trust profile, as `Local.profile` does."""
        return await self._local.profile()

    def check_health(self) -> None:
        """Raise an error if the replica cannot rank any more. Ray calls it every two seconds."""
        if not self._local.ready:
            raise RuntimeError("the thread that owns the model has ended")


class Remote:
    """The front's backend: it forwards requests to the replicas.

    Args:
        places: requests in flight; the next one is refused
    """

    def __init__(self, places: int) -> None:
        self.places, self.in_flight, self.ready = places, 0, False

    def start(self) -> None:
        """Connect to the replicas."""
        from ray import serve

        self._ranker = serve.get_deployment_handle("Ranker", app_name=APP_NAME)
        self.ready = True

    def stop(self) -> None:
        """Refuse new requests."""
        self.ready = False

    async def check(self, work: RankWork) -> None:
        """Do nothing: the replica has the model, and checks."""

    @contextmanager
    def admitted(self, heavy: bool) -> Iterator[None]:
        """Hold a place for one request, or raise a ServiceError immediately."""
        if self.in_flight >= self.places:
            raise overloaded()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def rank(self, work: RankWork, is_disconnected: IsDisconnected) -> Ranking:
        """Rank a list on a replica, or raise a ServiceError."""
        from ray.exceptions import RayActorError, RayTaskError
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

        for attempt in range(MAX_ATTEMPTS):
            left = work.deadline - time.monotonic()
            if left <= 0 or await is_disconnected():
                raise too_late()
            try:
                answer: Ranking | tuple[int, str, str, dict[str, str]] = await asyncio.wait_for(
                    self._ranker.rank.remote(work, left), timeout=left
                )
            except (RayActorError, DeploymentUnavailableError):  # the replica died: try another one
                await asyncio.sleep(0.1 * 2**attempt)
                continue
            except asyncio.TimeoutError:
                raise too_late() from None
            except BackPressureError:
                raise overloaded() from None
            except RayTaskError:
                raise ranking_failed() from None
            if isinstance(answer, tuple):
                raise ServiceError(*answer)
            return answer
        raise ServiceError(503, "replica_lost", "the replica died during the ranking", {"Retry-After": "1"})

    async def reads_texts(self) -> bool:
        """Return whether the replicas' model reads documents with text."""
        return bool(await self._ranker.reads_texts.remote())

    async def profile(self) -> dict[str, Any] | None:
        """Return the trust profile of a replica's model."""
        profile: dict[str, Any] | None = await self._ranker.profile.remote()
        return profile


class Front:
    """The deployment that holds the application. ranker: passed so that it is deployed with the front"""

    def __init__(self, ranker: Any) -> None:
        pass


def deploy(
    settings: Settings,
    address: str = "local",
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    replicas: int = 1,
    max_replicas: int | None = None,
    upscale_delay: float = DEFAULT_UPSCALE_DELAY,
    downscale_delay: float = DEFAULT_DOWNSCALE_DELAY,
    gpus: float | None = None,
) -> None:
    """Start the service on a Ray cluster; return when it is ready.

    Args:
        settings: model, method, keys and limits
        address: "local" starts a cluster here, "auto" or an address joins one
        host, port: where the front listens
        replicas: models to start with
        max_replicas: add replicas under load, up to this number
        upscale_delay: seconds of load before a replica is added
        downscale_delay: seconds without load before one is removed
        gpus: per replica; by default one if the cluster has any
    """
    serve = _connect(address, replicas, max_replicas)
    serve.start(http_options={"host": host, "port": port})
    if max_replicas is None:
        scaling: dict[str, Any] = {"num_replicas": replicas}
    else:
        scaling = {"autoscaling_config": _scaling(replicas, max_replicas, upscale_delay, downscale_delay)}
    ranker = serve.deployment(
        Ranker,
        name="Ranker",
        max_ongoing_requests=settings.queue,
        ray_actor_options={"num_cpus": 1, "num_gpus": _gpus() if gpus is None else gpus},
        health_check_period_s=2,
        **scaling,
    ).bind(settings)
    places = settings.queue * (max_replicas or replicas)

    def application() -> Any:  # created where it runs: Ray accepts only a plain function here
        return create_app(settings, Remote(places))

    front = serve.deployment(
        serve.ingress(application)(Front),
        name="Front",
        max_ongoing_requests=places + 16,
        ray_actor_options={"num_cpus": 0.5},
    ).bind(ranker)
    serve.run(front, name=APP_NAME, route_prefix="/")


def _connect(address: str, replicas: int, max_replicas: int | None) -> Any:
    """Connect to the cluster and return Ray Serve."""
    with needs_extra("ray"):
        import ray
        from ray import serve
    if max_replicas is not None and max_replicas < replicas:
        raise InputError(f"max_replicas ({max_replicas}) must be at least replicas ({replicas})")
    if not ray.is_initialized():
        ray.init(
            address=None if address == "local" else address, include_dashboard=False, log_to_driver=False
        )
    return serve


def _gpus() -> float:
    import ray

    return 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0


def _scaling(
    replicas: int, max_replicas: int, upscale_delay: float, downscale_delay: float
) -> dict[str, Any]:
    return {
        "min_replicas": replicas,
        "max_replicas": max_replicas,
        # A replica ranks one list at a time and soon refuses more, so requests do not pile up. The load
        # shows in the part of the time that it is busy.
        "target_ongoing_requests": TARGET_LOAD,
        "upscale_delay_s": upscale_delay,
        "downscale_delay_s": downscale_delay,
        "look_back_period_s": max(12.0, upscale_delay),  # replicas report their load every 10 s
    }


def wait() -> None:
    """Wait for SIGINT or SIGTERM, then shut down; the replicas finish their requests."""
    from ray import serve

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    serve.shutdown()
