"""Prometheus metrics. Each application has its own registry, so that one process can run several."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2)
"""bucket limits of durations"""


class Metrics:
    """The metrics of one application.

    Example:
        >>> metrics = Metrics()
        >>> metrics.refused.labels("too_large").inc()
        >>> b'radical_refused_total{code="too_large"} 1.0' in metrics.text()
        True
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry}
        self.seconds = Histogram("radical_request_seconds", "seconds per ranking", buckets=SECONDS, **own)
        self.refused = Counter("radical_refused", "requests not ranked, by code", ["code"], **own)
        self.in_flight = Gauge("radical_inside", "requests running or waiting", **own)
        self._observed = {
            "batch_size": Histogram("radical_batch_size", "lists per batch", buckets=(1, 2, 4, 8, 16), **own),
            "waited_seconds": Histogram(
                "radical_waited_seconds", "seconds in the queue", buckets=SECONDS, **own
            ),
            "ranked_seconds": Histogram(
                "radical_ranked_seconds", "seconds of the model, per list", buckets=SECONDS, **own
            ),
        }

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram: "batch_size", "waited_seconds" or "ranked_seconds"."""
        self._observed[name].observe(value)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
