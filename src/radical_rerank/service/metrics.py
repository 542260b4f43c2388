"""Prometheus metrics of one application; no global registry, so that tests may make many."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2)


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry}
        self.seconds = Histogram("radical_request_seconds", "seconds per ranking", buckets=SECONDS, **own)
        self.refused = Counter("radical_refused", "requests not ranked, by code", ["code"], **own)
        self.inside = Gauge("radical_inside", "requests running or waiting", **own)
        self._more = {
            "batch_size": Histogram("radical_batch_size", "lists per batch", buckets=(1, 2, 4, 8, 16), **own),
            "waited_seconds": Histogram(
                "radical_waited_seconds", "seconds in the line", buckets=SECONDS, **own
            ),
        }

    def observe(self, name: str, value: float) -> None:
        self._more[name].observe(value)

    def text(self) -> bytes:
        return generate_latest(self._registry)
