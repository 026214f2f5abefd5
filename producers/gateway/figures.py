"""The gateway's own figures: requests and calls by their end, their time, requests that wait, open streams.

With PROMETHEUS_MULTIPROC_DIR, which `penstock serve --workers` sets, each process writes into files of that folder, and
the page of any of them adds up all.
"""

from __future__ import annotations

import os
from typing import Final

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from penstock.registry import metrics
from penstock.registry.metrics import Metric

__all__ = ["GatewayFigures"]


class GatewayFigures:
    """The figures of one process."""

    def __init__(self) -> None:
        self._registry: Final = CollectorRegistry()
        self._requests: Final = Counter(*_named(metrics.HTTP_REQUESTS), registry=self._registry)
        self._seconds: Final = Histogram(
            *_named(metrics.HTTP_SECONDS), registry=self._registry, buckets=metrics.HTTP_SECONDS.buckets
        )
        self._waiting: Final = Gauge(
            *_named(metrics.HTTP_WAITING), registry=self._registry, multiprocess_mode="livesum"
        )
        self._streams: Final = Gauge(
            *_named(metrics.HTTP_STREAMS), registry=self._registry, multiprocess_mode="livesum"
        )
        self._calls: Final = Counter(*_named(metrics.GRPC_CALLS), registry=self._registry)
        self._call_seconds: Final = Histogram(
            *_named(metrics.GRPC_SECONDS), registry=self._registry, buckets=metrics.GRPC_SECONDS.buckets
        )
        self._call_counters: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        self._counters: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def count(self, route: str, method: str, status: int, seconds: float) -> None:
        """One answered request. route: the path with names in braces."""
        found = self._counters.get((route, method, status))
        if found is None:
            found = self._requests.labels(route, method, str(status)), self._seconds.labels(route)
            self._counters[route, method, status] = found
        found[0].inc()
        found[1].observe(seconds)

    def count_call(self, method: str, code: str, seconds: float) -> None:
        """One ended gRPC call. method: /service/method. code: the name of its status."""
        found = self._call_counters.get((method, code))
        if found is None:
            found = self._calls.labels(method, code), self._call_seconds.labels(method)
            self._call_counters[method, code] = found
        found[0].inc()
        found[1].observe(seconds)

    def set_open(self, waiting: int, streams: int) -> None:
        """The requests that wait for a job, and the open event streams and WebSockets."""
        self._waiting.set(waiting)
        self._streams.set(streams)

    def page(self) -> tuple[bytes, bytes]:
        """(content type, text) for Prometheus."""
        registry = self._registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return CONTENT_TYPE_PLAIN_0_0_4.encode(), generate_latest(registry)


def _named(metric: Metric) -> tuple[str, str, tuple[str, ...]]:
    return metric.name, metric.help, metric.labels
