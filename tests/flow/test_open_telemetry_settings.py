"""AR-015: each of the two settings alone, what is missing for them, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock import Client
from penstock.registry.errors import ConfigurationError
from penstock.registry.open_telemetry.metrics import interval_s
from tests.flow.test_open_telemetry import ROWS, new_trace
from tests.otlp import Collector, collector
from tests.packages import write_double
from tests.servers import ROOT, RedisServer, WorkerProcess


def served(server: RedisServer, folder: Path, name: str, **settings: str) -> tuple[Collector, str]:
    """What came to a collector from a worker of one job, and the trace of the job. settings: beside the collector's."""
    write_double(folder / "models", name)
    trace, traceparent = new_trace()
    with collector() as found:
        variables = {key: value for key, value in found.environ.items() if key.startswith("OTEL_")}
        worker = WorkerProcess(
            server, folder / "models", folder, name=f"{name}@test", environment={**variables, **settings}
        ).start()
        with Client(server.url) as client:
            client.submit(name, {"x": ROWS}, traceparent=traceparent).result(180)
        worker.terminate()
        assert worker.wait(180) == 0, worker.tail()
    return found, trace


def test_spans_are_sent_where_that_is_on(shared_redis: RedisServer, tmp_path: Path, slot: str):
    """And nothing else; the last are sent before the worker ends."""
    found, trace = served(shared_redis, tmp_path, slot, PENSTOCK_INFERENCE_OPEN_TELEMETRY_TRACES="true")
    assert {span.name for span in found.of_trace(trace)} == {f"process {slot}", f"forward {slot}"}
    assert found.metrics == []


def test_metrics_are_sent_where_that_is_on(shared_redis: RedisServer, tmp_path: Path, slot: str):
    found, _ = served(shared_redis, tmp_path, slot, PENSTOCK_INFERENCE_OPEN_TELEMETRY_METRICS="true")
    assert found.last("penstock_jobs_total", "penstock-worker") is not None
    assert found.spans == []


def test_nothing_is_sent_where_both_are_off(shared_redis: RedisServer, tmp_path: Path, slot: str):
    found, _ = served(shared_redis, tmp_path, slot)
    assert (found.spans, found.metrics) == ([], [])


OPEN = """
import sys
sys.modules["{blocked}"] = None
from penstock.registry.open_telemetry.providers import exported_metrics, exported_spans
from penstock.registry.settings_sections import OpenTelemetryConfig
config = OpenTelemetryConfig(traces=True, metrics=True)
for opened in (exported_spans(config, "s", "i"), exported_metrics(config, None, print, "s", "i")):
    try:
        with opened:
            print("opened")
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("blocked", "distribution"),
    [
        ("opentelemetry.exporter", "opentelemetry-exporter-otlp-proto-http"),
        ("opentelemetry.sdk", "opentelemetry-sdk"),
    ],
)
def test_a_package_that_is_missing_is_named(tmp_path: Path, blocked: str, distribution: str):
    line = f"ConfigurationError {distribution} is not installed. Expected: pip install '.[otel]'"
    shown = _printed(tmp_path, OPEN.format(blocked=blocked)).splitlines()
    assert shown == 2 * [f"{line} in the checkout of Penstock"]


def test_another_protocol_is_refused(tmp_path: Path):
    """Spans that nobody can read would be dropped without a word."""
    line = (
        "ConfigurationError OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'. "
        "Expected http/protobuf, which collectors take at port 4318\n"
    )
    assert _printed(tmp_path, OPEN.format(blocked="none"), OTEL_EXPORTER_OTLP_PROTOCOL="grpc") == 2 * line


@pytest.mark.parametrize("text", ["soon", "0", "-5", "nan", "inf", " "])
def test_an_interval_that_is_none_is_refused(text: str):
    with pytest.raises(
        ConfigurationError, match=r"OTEL_METRIC_EXPORT_INTERVAL is .*Expected milliseconds, more than 0$"
    ):
        interval_s({"OTEL_METRIC_EXPORT_INTERVAL": text})


def test_the_interval_is_in_milliseconds():
    assert (interval_s({}), interval_s({"OTEL_METRIC_EXPORT_INTERVAL": "250"})) == (60.0, 0.25)
    assert interval_s({"OTEL_METRIC_EXPORT_INTERVAL": ""}) == 60.0


EXPORT = """
import threading
from prometheus_client import CollectorRegistry
from penstock.registry.open_telemetry.providers import exported_metrics, exported_spans
from penstock.registry.settings_sections import OpenTelemetryConfig
config = OpenTelemetryConfig(traces=True, metrics=True)
with exported_metrics(config, CollectorRegistry(), print, "s", "i"), exported_spans(config, "s", "i"):
    print(sorted(each.name for each in threading.enumerate() if each.name.startswith("open-telemetry")))
"""


def test_empty_variables_are_not_set(tmp_path: Path):
    """Compose files pass on variables that nobody has set."""
    empty = {"OTEL_EXPORTER_OTLP_PROTOCOL": "", "OTEL_METRIC_EXPORT_INTERVAL": "", "OTEL_SDK_DISABLED": ""}
    with collector() as collected:
        shown = _printed(tmp_path, EXPORT, OTEL_EXPORTER_OTLP_ENDPOINT=collected.url, **empty)
    assert "['open-telemetry']" in shown
    assert len(collected.metrics) == 1


def test_the_switch_of_opentelemetry_is_kept(tmp_path: Path):
    """OTEL_SDK_DISABLED: one for spans and metrics of all programs."""
    with collector() as collected:
        shown = _printed(tmp_path, EXPORT, OTEL_EXPORTER_OTLP_ENDPOINT=collected.url, OTEL_SDK_DISABLED="true")
    assert shown == "[]\n"
    assert collected.metrics == []


def _printed(folder: Path, code: str, **variables: str) -> str:
    environ = {"PATH": "", "PYTHONPATH": str(ROOT), **variables}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=folder, capture_output=True, text=True, check=True, timeout=180
    )
    return ended.stdout
