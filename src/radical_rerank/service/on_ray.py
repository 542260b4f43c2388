"""The same application on Ray Serve: one front that takes requests, replicas that own models.

The front forwards a request to a replica and, should that die, to another; the model never sees HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from radical_rerank.errors import InputError
from radical_rerank.reranking import Ranking
from radical_rerank.service.app import create_app
from radical_rerank.service.backend import Gone, Local
from radical_rerank.service.errors import ServiceError, overloaded, too_late
from radical_rerank.service.settings import Settings
from radical_rerank.service.worker import Work

APP = "radical"
TRIES = 3
BUSY = 0.7
"""requests inside per replica, on average, beyond which another replica is added"""


class Ranker:
    """A replica: one model and its line. Refusals come back as values, so that they survive the way."""

    def __init__(self, settings: Settings) -> None:
        self._local = Local(settings)
        self._local.start()

    async def rank(self, work: Work, seconds: float) -> Ranking | tuple[int, str, str, dict[str, str]]:
        """seconds: what is left until the deadline, since clocks differ between machines"""

        async def never() -> bool:
            return False

        here = replace(work, deadline=time.monotonic() + seconds)
        try:
            await self._local.check(here)
            with self._local.admitted(here.heavy):
                ranking = await self._local.rank(here, never)
        except ServiceError as error:
            return error.status, error.code, error.message, error.headers
        # The documents stay with the front.
        return replace(ranking, results=tuple(replace(result, document=None) for result in ranking))

    async def profile(self) -> dict[str, Any] | None:
        return await self._local.profile()

    def check_health(self) -> None:
        if not self._local.ready:
            raise RuntimeError("the thread that owns the model has ended")


class Remote:
    """The backend of the front."""

    def __init__(self, places: int) -> None:
        self.places, self.inside, self.ready = places, 0, False

    def start(self) -> None:
        from ray import serve

        self._ranker = serve.get_deployment_handle("Ranker", app_name=APP)
        self.ready = True

    def stop(self) -> None:
        self.ready = False

    async def check(self, work: Work) -> None:
        """The replica does: it has the model."""

    @contextmanager
    def admitted(self, heavy: bool) -> Iterator[None]:
        if self.inside >= self.places:
            raise overloaded()
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    async def rank(self, work: Work, gone: Gone) -> Ranking:
        from ray.exceptions import RayActorError, RayTaskError
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

        for attempt in range(TRIES):
            left = work.deadline - time.monotonic()
            if left <= 0 or await gone():
                raise too_late()
            try:
                answer = await asyncio.wait_for(self._ranker.rank.remote(work, left), timeout=left)
            except (RayActorError, DeploymentUnavailableError):  # the replica has died: another may live
                await asyncio.sleep(0.1 * 2**attempt)
                continue
            except asyncio.TimeoutError:
                raise too_late() from None
            except BackPressureError:
                raise overloaded() from None
            except RayTaskError:
                raise ServiceError(500, "internal", "the ranking failed") from None
            if isinstance(answer, tuple):
                raise ServiceError(*answer)
            return answer
        raise ServiceError(503, "replica_lost", "the replica that ranked has died", {"Retry-After": "1"})

    async def profile(self) -> dict[str, Any] | None:
        return await self._ranker.profile.remote()


def deploy(
    settings: Settings,
    address: str = "local",
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    replicas: int = 1,
    max_replicas: int | None = None,
    upscale_delay: float = 10.0,
    downscale_delay: float = 300.0,
    gpus: float | None = None,
) -> None:
    """Start the application on a Ray cluster and return when it is ready.

    address: "local" starts a cluster here, "auto" or an address joins one
    max_replicas: replicas are added under load, from `replicas` up to so many
    upscale_delay, downscale_delay: seconds that load must last, or be gone, before one is added or taken
    gpus: per replica, by default one where the cluster has any
    """
    try:
        import ray
        from ray import serve
    except ImportError:
        raise InputError("this needs an extra: pip install 'radical-rerank[ray]'") from None
    if max_replicas is not None and max_replicas < replicas:
        raise InputError(f"max_replicas is {max_replicas}, fewer than the {replicas} replicas to start with")
    if not ray.is_initialized():
        ray.init(
            address=None if address == "local" else address, include_dashboard=False, log_to_driver=False
        )
    if gpus is None:
        gpus = 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0
    serve.start(http_options={"host": host, "port": port})
    count: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas is not None:
        scaling = {
            "min_replicas": replicas,
            "max_replicas": max_replicas,
            # A replica ranks one list at a time and soon refuses more, so that requests do not pile up: how
            # much of the time it is busy tells of load.
            "target_ongoing_requests": BUSY,
            "upscale_delay_s": upscale_delay,
            "downscale_delay_s": downscale_delay,
            "look_back_period_s": max(12.0, upscale_delay),  # replicas tell of their load every 10 s
        }
        count = {"autoscaling_config": scaling}
    ranker = serve.deployment(
        Ranker,
        name="Ranker",
        max_ongoing_requests=settings.queue,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        health_check_period_s=2,
        **count,
    ).bind(settings)
    places = settings.queue * (max_replicas or replicas)

    def application() -> Any:  # made where it runs: Ray takes only a plain function for that
        return create_app(settings, Remote(places))

    front = serve.deployment(
        serve.ingress(application)(Front), name="Front", max_ongoing_requests=places + 16,
        ray_actor_options={"num_cpus": 0.5},
    ).bind(ranker)  # fmt: skip
    serve.run(front, name=APP, route_prefix="/")


class Front:
    """Holds the application; it is given the rankers, so that they are deployed with it."""

    def __init__(self, ranker: Any) -> None:
        pass


def wait() -> None:
    """Until the process is told to stop; then the replicas finish what they have."""
    import signal
    import threading

    from ray import serve

    stop = threading.Event()
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda *_: stop.set())
    stop.wait()
    serve.shutdown()
