"""AR-098, AR-099: what a worker's metrics are in OTLP, without a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import AggregationTemporality, Histogram, MetricExportResult, Sum
from opentelemetry.sdk.resources import Resource

from penstock.registry import metrics as table
from penstock.registry.open_telemetry.metrics import OTelExporter
from penstock.workers.observe.metrics import BatchStats, InferenceMetrics
from tests.servers import wait_until


class Sink:
    """An exporter that keeps what it gets. fails: what the first exports do, in order."""

    def __init__(self, *fails: Any) -> None:
        self.fails = list(fails)
        self.got: list[Any] = []
        self.is_shut = False

    def export(self, data: Any) -> MetricExportResult:
        self.got.append(data)
        end = self.fails.pop(0) if self.fails else MetricExportResult.SUCCESS
        if isinstance(end, Exception):
            raise end
        return MetricExportResult(end)

    def shutdown(self) -> None:
        self.is_shut = True


def exporter_of(metrics: InferenceMetrics, sink: Any, refresh: Callable[[], object] = lambda: None) -> Any:
    return OTelExporter(metrics, refresh, sink, Resource({}), interval_s=0.01)


def exported(metrics: InferenceMetrics) -> dict[str, Any]:
    """The metrics by name."""
    (resource,) = exporter_of(metrics, Sink()).data().resource_metrics
    (scope,) = resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}


def value(metrics: InferenceMetrics, name: str) -> dict[tuple[str, ...], float]:
    """The points of a counter or gauge by their labels."""
    found = exported(metrics)[name]
    return {tuple((point.attributes or {}).values()): point.value for point in found.data.data_points}


REPORTS: dict[str, tuple[Callable[[InferenceMetrics], None], dict[tuple[str, ...], float]]] = {
    "penstock_canary_verdicts_total": (
        lambda metrics: metrics.canary("m", "2", "candidate", "FAIL"),
        {("m", "2", "", "candidate", "FAIL"): 1},
    ),
    "penstock_breaker_open": (
        lambda metrics: metrics.breaker("m", "2", "compiled", is_open=True),
        {("m", "2", "", "compiled"): 1},
    ),
    "penstock_drift_alerts_total": (
        lambda metrics: metrics.drift_alert("m", "2", "compiled"),
        {("m", "2", "", "compiled"): 1},
    ),
    "penstock_drift_ratio": (
        lambda metrics: metrics.drift("m", "2", "compiled", 1.5),
        {("m", "2", "", "compiled"): 1.5},
    ),
    "penstock_hysteresis_transitions_total": (
        lambda metrics: metrics.transition("m", "2", "compiled", "off"),
        {("m", "2", "", "compiled", "off"): 1},
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_safety_is_in_the_instruments(name: str):
    """AR-099: canary, circuit breaker, drift and hysteresis: each report changes its own instrument, and no other."""
    report, expected = REPORTS[name]
    metrics = InferenceMetrics((0.1,))
    before = exported(metrics).keys()
    report(metrics)
    assert value(metrics, name) == expected
    assert exported(metrics).keys() - before == {name}


def test_histograms_count_what_lies_between_two_edges():
    """Prometheus counts what lies below an edge. The unit is a code of UCUM."""
    metrics = InferenceMetrics((0.1, 1.0))
    metrics.latency("m", "1", "queue", [0.05, 0.06, 0.5, 7.0])
    latency = exported(metrics)["infer_latency_seconds"]
    assert isinstance(latency.data, Histogram)
    assert latency.data.aggregation_temporality is AggregationTemporality.CUMULATIVE
    (point,) = latency.data.data_points
    assert (point.attributes, point.count, point.bucket_counts) == ({"model": "m"}, 4, [2, 1, 1])
    assert list(point.explicit_bounds) == [0.1, 1.0]
    assert point.sum == pytest.approx(7.61)
    assert latency.unit == "s"


def test_every_name_is_one_of_the_table():
    """AR-098: one table has the names of all exporters, with unit and text."""
    metrics = InferenceMetrics((0.1,))
    metrics.batch(BatchStats("m", "1", "queue", 2, 2, [0.1, 0.1], [0.0, 0.0], 0.2, 0.1, [0.3, 0.3]))
    metrics.outcome("m", "1", "queue", "completed", 2)
    metrics.ready(True)
    known = {metric.name: metric for metric in table.METRICS}
    found = exported(metrics)
    assert {"penstock_jobs_total", "infer_batch_size", "penstock_compute_seconds", "READY"} <= found.keys()
    for name, metric in found.items():
        assert metric.description == known[name].help
        assert isinstance(metric.data, Histogram) == (known[name].kind == "histogram")
        assert isinstance(metric.data, Sum) == (known[name].kind == "counter")
    assert found["penstock_jobs_total"].unit == "{jobs}"
    assert found["penstock_jobs_total"].data.is_monotonic


def test_figures_are_brought_up_to_date_before_each_export():
    metrics, sink = InferenceMetrics((0.1,)), Sink()
    exporter = exporter_of(metrics, sink, lambda: metrics.outcome("m", "1", "queue", "completed", 1))
    exporter.start()
    wait_until(lambda: len(sink.got) > 2, 30, "some exports")
    exporter.stop()
    assert sink.is_shut
    jobs = [each.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points[0].value for each in sink.got]
    assert jobs == [*range(1, len(jobs) + 1)]


@pytest.mark.parametrize("failure", [MetricExportResult.FAILURE, RuntimeError("broken")])
def test_exports_go_on_after_a_failure(failure: Any, caplog: pytest.LogCaptureFixture):
    """It is one line of the log."""
    metrics, sink = InferenceMetrics((0.1,)), Sink(failure)
    exporter = exporter_of(metrics, sink)
    exporter.start()
    wait_until(lambda: len(sink.got) > 1, 30, "an export after the failure")
    exporter.stop()
    assert len([each for each in caplog.records if "metrics were not exported" in each.message]) == 1


def test_the_end_sends_what_came_last():
    """Also before the first interval is over."""
    metrics, sink = InferenceMetrics((0.1,)), Sink()
    exporter = OTelExporter(metrics, lambda: None, sink, Resource({}), interval_s=3600)  # type: ignore[arg-type]
    exporter.start()
    metrics.outcome("m", "1", "queue", "completed", 3)
    exporter.stop()
    (only,) = sink.got
    assert only.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points[0].value == 3
