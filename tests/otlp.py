"""An OpenTelemetry collector for tests: it takes spans and metrics by OTLP over HTTP, and keeps them in memory."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

__all__ = ["Collector", "CollectedSpan", "collector"]

_KINDS: Final = {0: "unspecified", 1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}
_ERROR: Final = 2


class CollectedSpan(NamedTuple):
    """A span as it arrived; ids in hex, `parent` empty for a root."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str
    service: str
    instance: str
    attributes: dict[str, Any]
    is_error: bool
    begin_ns: int
    end_ns: int


class Collector:
    """What has arrived so far.

    Attributes:
        url: for OTEL_EXPORTER_OTLP_ENDPOINT.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[CollectedSpan] = []
        self.metrics: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """(attributes of the resource, metrics by name) of each export, as protobuf has them."""

    @property
    def environ(self) -> dict[str, str]:
        """Variables of a process that sends here at once."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
            "PENSTOCK_INFERENCE_OPEN_TELEMETRY_TRACES": "true",
            "PENSTOCK_INFERENCE_OPEN_TELEMETRY_METRICS": "true",
        }

    def of_trace(self, trace: str, name: str = "") -> list[CollectedSpan]:
        """The spans of a trace, or those of this name."""
        return [span for span in list(self.spans) if span.trace == trace and name in ("", span.name)]

    def last(self, name: str, service: str) -> Any:
        """The newest state of a metric of a service, as protobuf has it; None: it has not come."""
        for resource, metrics in reversed(list(self.metrics)):
            if resource["service.name"] == service and name in metrics:
                return metrics[name]
        return None

    def take(self, path: str, body: bytes) -> bytes:
        """Keeps a request; returns the answer."""
        if path == "/v1/metrics":
            asked = ExportMetricsServiceRequest.FromString(body)
            for each in asked.resource_metrics:
                found = {metric.name: metric for scope in each.scope_metrics for metric in scope.metrics}
                self.metrics.append((_plain(each.resource.attributes), found))
            return bytes(ExportMetricsServiceResponse().SerializeToString())
        assert path == "/v1/traces"
        for of in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _plain(of.resource.attributes)
            self.spans += [_span(span, resource) for scope in of.scope_spans for span in scope.spans]
        return bytes(ExportTraceServiceResponse().SerializeToString())


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a free port of the loopback, inside of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            answer = found.take(self.path, body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()


def _span(span: Any, resource: dict[str, Any]) -> CollectedSpan:
    return CollectedSpan(
        *(span.name, _KINDS[span.kind], span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()),
        *(resource["service.name"], resource["service.instance.id"], _plain(span.attributes)),
        *(span.status.code == _ERROR, span.start_time_unix_nano, span.end_time_unix_nano),
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
