"""The gateway's own figures: requests and calls by their end, their time, requests that wait, open streams, API keys.

With PROMETHEUS_MULTIPROC_DIR, which `penstock serve --workers` sets, each process writes into files of that folder, and
the page of any of them adds up all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from penstock.registry import metrics
from penstock.registry.broker.base import Usage
from penstock.registry.metrics import Metric

__all__ = ["MOST_KEYS", "GatewayFigures"]

MOST_KEYS: Final = 1000
"""Keys with series of their own; the others are counted together: Prometheus holds each series for weeks."""
_OTHER: Final = "other"
_METHODS: Final = frozenset(
    ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "WEBSOCKET")
)
"""Methods with series of their own: some servers let clients send any word."""


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
        self._of_keys: Final = Counter(*_named(metrics.API_KEY_REQUESTS), registry=self._registry)
        self._keys: set[str] = set()
        self._counters: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    @property
    def collector(self) -> Collector:
        """The figures of this process alone."""
        return self._registry

    def count(self, route: str, method: str, status: int, seconds: float) -> None:
        """One answered request. route: the path with names in braces."""
        if method not in _METHODS:
            method = _OTHER
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

    def count_key(self, key_id: str, outcome: str) -> None:
        """One request with an API key: admitted, limited or denied."""
        if key_id not in self._keys:
            if len(self._keys) >= MOST_KEYS:
                key_id = _OTHER
            self._keys.add(key_id)
        self._of_keys.labels(key_id, outcome).inc()

    def set_open(self, waiting: int, streams: int) -> None:
        """The requests that wait for a job, and the open event streams and WebSockets."""
        self._waiting.set(waiting)
        self._streams.set(streams)

    def page(self, usage: Mapping[str, Usage]) -> tuple[bytes, bytes]:
        """(content type, text) for Prometheus. usage: what the broker has counted, by the id of the API key."""
        registry = self._registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        counted = CollectorRegistry()
        counted.register(_UsageCollector(usage))
        return CONTENT_TYPE_PLAIN_0_0_4.encode(), generate_latest(registry) + generate_latest(counted)


class _UsageCollector(Collector):
    """Counters that the broker keeps."""

    def __init__(self, usage: Mapping[str, Usage]) -> None:
        self._usage = usage

    def collect(self) -> Iterator[CounterMetricFamily]:
        """See prometheus_client."""
        jobs = CounterMetricFamily(*_named(metrics.API_KEY_JOBS)[:2], labels=metrics.API_KEY_JOBS.labels)
        tokens = CounterMetricFamily(*_named(metrics.API_KEY_TOKENS)[:2], labels=metrics.API_KEY_TOKENS.labels)
        for key_id, used in _bounded(self._usage).items():
            jobs.add_metric([key_id], used.jobs)
            tokens.add_metric([key_id, "prompt"], used.prompt_tokens)
            tokens.add_metric([key_id, "generated"], used.generated_tokens)
        yield jobs
        yield tokens


def _bounded(usage: Mapping[str, Usage]) -> dict[str, Usage]:
    # By id: a key keeps its place, so that its counter does not go back.
    names = sorted(usage)
    found = {name: usage[name] for name in names[:MOST_KEYS]}
    if rest := [usage[name] for name in names[MOST_KEYS:]]:
        found[_OTHER] = Usage(*map(sum, zip(*rest, strict=True)))
    return found


def _named(metric: Metric) -> tuple[str, str, tuple[str, ...]]:
    return metric.name, metric.help, metric.labels
