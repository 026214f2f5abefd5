"""Collectors of Prometheus -> OTLP. Each metric has one name, on the page /metrics and here.

OpenTelemetry's own instruments would count everything a second time, and two counts can differ. Here each export reads
what /metrics reads. Sums and histograms are cumulative, from the start of the exporter's process on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from penstock.registry.errors import ConfigurationError
from penstock.registry.metrics import ENGINE_METRICS, GATEWAY_METRICS, METRICS, RAY_SERVE_METRICS
from penstock.registry.open_telemetry.ending import ended_soon

__all__ = ["OTelExporter", "interval_s"]

Attributes: TypeAlias = tuple[tuple[str, str], ...]

_INTERVAL_VARIABLE: Final = "OTEL_METRIC_EXPORT_INTERVAL"
_UNITS: Final = {"seconds": "s", "bytes": "By", "ratio": "1", "": "1"}
"""Those that UCUM knows; any other one counts things, and is an annotation."""
_UNIT_OF: Final = {
    metric.name: metric.unit for metric in (*METRICS, *GATEWAY_METRICS, *ENGINE_METRICS, *RAY_SERVE_METRICS)
}
_SCOPE: Final = InstrumentationScope("penstock")

logger = logging.getLogger("penstock.server")


def interval_s(environ: Mapping[str, str]) -> float:
    """Seconds between two exports: OTEL_METRIC_EXPORT_INTERVAL, in milliseconds; by default a minute.

    Raises ConfigurationError for what is no positive number.
    """
    # OpenTelemetry: an empty variable is one that is not set.
    text = environ.get(_INTERVAL_VARIABLE) or "60000"
    try:
        interval_ms = float(text)
    except ValueError:
        interval_ms = 0.0
    if not 0 < interval_ms < float("inf"):
        raise ConfigurationError(f"{_INTERVAL_VARIABLE} is {text!r:.40}. Expected milliseconds, more than 0")
    return interval_ms / 1000


class OTelExporter:
    """Sends what a collector of Prometheus has, at an interval, from start() to stop(), which sends it once more.

    refresh: brings the metrics up to date before they are read. While the other side is away, nothing is lost but
    points in time, because the sums are cumulative.
    """

    def __init__(
        self,
        metrics: Collector,
        refresh: Callable[[], object],
        exporter: MetricExporter,
        resource: Resource,
        *,
        interval_s: float,
    ) -> None:
        self._metrics: Final = metrics
        self._refresh: Final = refresh
        self._exporter: Final = exporter
        self._resource: Final = resource
        self._interval_s: Final = interval_s
        self._began_ns: Final = time.time_ns()
        self._is_over: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="open-telemetry", daemon=True)

    def start(self) -> None:
        """Begin to export."""
        self._thread.start()

    def stop(self) -> None:
        """Export once more, within seconds, and disconnect. Call it after `start`."""
        self._is_over.set()
        if not ended_soon(self._thread.join):
            logger.warning("the last metrics were not sent: the collector does not answer")
        self._exporter.shutdown()

    def data(self) -> MetricsData:
        """What the next export would send."""
        now_ns = time.time_ns()
        self._refresh()
        metrics = [found for each in self._metrics.collect() if (found := self._metric(each, now_ns)) is not None]
        scope = ScopeMetrics(_SCOPE, metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _run(self) -> None:
        while not self._is_over.wait(self._interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        try:
            if self._exporter.export(self.data()) is MetricExportResult.FAILURE:
                logger.warning("metrics were not exported; the next export has them")
        except Exception:  # a figure that cannot be read must not end all later exports
            logger.exception("metrics were not exported")

    def _metric(self, family: Family, now_ns: int) -> Metric | None:
        """A family without a value is left out."""
        samples = list(family.samples)
        name = f"{family.name}_total" if family.type == "counter" else family.name
        data: Sum | Gauge | Histogram
        if family.type == "histogram":
            data = Histogram(list(_histograms(samples, self._began_ns, now_ns)), AggregationTemporality.CUMULATIVE)
        else:
            numbers = [
                NumberDataPoint(dict(each.labels), self._began_ns, now_ns, each.value)
                for each in samples
                if each.name == name
            ]
            is_sum = family.type == "counter"
            data = Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True) if is_sum else Gauge(numbers)
        if not data.data_points:
            return None
        return Metric(name, family.documentation, _unit(name), data)


def _histograms(samples: Iterable[Sample], began_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    """The histograms of a family, one for each label set. Prometheus counts what is below an edge; OTLP what is
    between two."""
    edges: defaultdict[Attributes, list[tuple[float, int]]] = defaultdict(list)
    sums: dict[Attributes, float] = {}
    for sample in samples:
        attributes = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        if "le" in sample.labels:
            edges[attributes].append((float(sample.labels["le"]), int(sample.value)))
        elif sample.name.endswith("_sum"):
            sums[attributes] = sample.value
    for attributes, cumulative in edges.items():
        bounds, below = zip(*sorted(cumulative), strict=True)
        # No values are kept that could tell the least and the greatest.
        unknown: Any = None
        yield HistogramDataPoint(
            *(dict(attributes), began_ns, now_ns, below[-1], sums.get(attributes, 0.0), _between(below)),
            explicit_bounds=bounds[:-1],
            min=unknown,
            max=unknown,
        )


def _between(below: Sequence[int]) -> list[int]:
    return [count - before for count, before in zip(below, (0, *below), strict=False)]


def _unit(name: str) -> str:
    unit = _UNIT_OF.get(name)
    if unit is None:
        # Of the process: see prometheus_client.
        return _UNITS.get(name.removesuffix("_total").rpartition("_")[2], "1")
    return _UNITS.get(unit, f"{{{unit}}}")
