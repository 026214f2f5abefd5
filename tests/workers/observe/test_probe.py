"""The worker's HTTP endpoint for monitors, which requires a token beyond loopback."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from penstock.registry.errors import ConfigurationError
from penstock.workers.observe.metrics import BatchStats, InferenceMetrics
from penstock.workers.observe.probe import Probe


class Worker:
    """The metrics and the readiness that a probe reads."""

    def __init__(self) -> None:
        self.metrics = InferenceMetrics((0.1, 1.0))
        self.is_ready = False

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        return self.is_ready, {"models": {"mlp": "loading"}}


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def probe(worker: Worker) -> Iterator[Probe]:
    probe = Probe(worker.metrics, worker.readiness, port=0)
    probe.start()
    yield probe
    probe.stop()


def get(probe: Probe, path: str, **headers: str) -> tuple[int, str, str]:
    """(status, content type, body)."""
    request = urllib.request.Request(f"http://127.0.0.1:{probe.port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=180) as answer:  # noqa: S310 - ours
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_port_zero_takes_a_free_port(worker: Worker):
    """Two probes on port 0 listen on different ports, and `port` holds them."""
    first, second = (Probe(worker.metrics, worker.readiness, port=0) for _ in range(2))
    first.start()
    second.start()
    try:
        assert first.port != second.port
        assert get(first, "/health/live")[0] == get(second, "/health/live")[0] == 200
    finally:
        first.stop()
        second.stop()


def test_metrics_are_plain_text_by_default(worker: Worker, probe: Probe):
    """Without an Accept header the page is Prometheus text 0.0.4, with figures of the process."""
    worker.metrics.requests("mlp", "python", 3)
    status, content_type, body = get(probe, "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(body)}
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert families["infer_requests"].samples[0].value == 3
    assert "process_resident_memory_bytes" in families


def test_metrics_are_openmetrics_where_accepted(probe: Probe):
    """The Accept header chooses the format."""
    _, content_type, body = get(probe, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert any(family.name == "READY" for family in parse_openmetrics(body))


def test_readiness_follows_the_worker(worker: Worker, probe: Probe):
    """The status is 503 with the reasons until the worker is ready, then 200."""
    status, content_type, body = get(probe, "/health/ready")
    assert (status, content_type) == (503, "application/json")
    assert json.loads(body) == {"ready": False, "models": {"mlp": "loading"}}
    worker.is_ready = True
    assert get(probe, "/health/ready")[0] == 200


def test_the_gauge_of_readiness_follows_the_worker(worker: Worker, probe: Probe):
    """It says what /health/ready says at that moment; a process that takes no jobs has no such gauge."""

    def gauges() -> tuple[list[float], bool]:
        families = {family.name: family for family in text_string_to_metric_families(get(probe, "/metrics")[2])}
        return [sample.value for sample in families["READY"].samples], json.loads(get(probe, "/snapshot")[2])["ready"]

    worker.is_ready = True
    assert gauges() == ([], False)
    worker.metrics.ready(True)
    assert gauges() == ([1], True)
    worker.is_ready = False
    assert gauges() == ([0], False)
    worker.is_ready = True
    assert gauges() == ([1], True)


def test_liveness_does_not_wait_for_readiness(probe: Probe):
    """A worker that loads its models is alive."""
    assert get(probe, "/health/live")[::2] == (200, '{"live": true}')


def test_snapshot_is_json(worker: Worker, probe: Probe):
    """The snapshot arrives unchanged, except that JSON turns the sizes into text."""
    two = [0.1, 0.1]
    worker.metrics.batch(
        BatchStats(
            model="mlp",
            version="1",
            endpoint="queue",
            rows=2,
            jobs=2,
            queue_s=two,
            batch_s=two,
            compute_s=0.1,
            commit_s=0.1,
            total_s=two,
        )
    )
    status, _, body = get(probe, "/snapshot")
    assert status == 200
    assert json.loads(body) == json.loads(json.dumps(worker.metrics.snapshot()))
    assert json.loads(body)["models"]["mlp"]["batch_sizes"] == {"2": 1}


def test_other_paths_are_not_found(probe: Probe):
    """Any other path is a 404 that lists the paths. A query string is ignored."""
    status, _, body = get(probe, "/secret")
    assert status == 404
    assert "/health/ready" in json.loads(body)["error"]
    assert get(probe, "/health/live?verbose=1")[0] == 200


def test_failing_readiness_does_not_end_the_probe(worker: Worker, caplog: pytest.LogCaptureFixture):
    """An exception in the readiness check costs one answer and leaves a log line; the next request is served."""

    def fail() -> tuple[bool, dict[str, Any]]:
        raise RuntimeError("no view of the broker")

    broken = Probe(worker.metrics, fail, port=0)
    broken.start()
    try:
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            get(broken, "/health/ready")
        assert get(broken, "/health/live")[0] == 200
    finally:
        broken.stop()
    assert "probe request failed" in caplog.text


def test_port_in_use_is_one_clear_line(worker: Worker, probe: Probe):
    """The error of a second probe names the port and the variable that changes it."""
    second = Probe(worker.metrics, worker.readiness, port=probe.port)
    with pytest.raises(ConfigurationError) as refused:
        second.start()
    assert str(refused.value) == (
        f"Metrics port {probe.port} on 127.0.0.1 is in use. Expected a free one in PENSTOCK_METRICS_PORT; 0 takes any"
    )


def test_address_of_another_machine_is_one_clear_line(worker: Worker, tmp_path: Path):
    """A host that cannot be bound is a configuration error, too."""
    token = tmp_path / "token"
    token.write_text("t0ken\n")
    foreign = Probe(worker.metrics, worker.readiness, host="192.0.2.1", port=0, bearer_file=token)
    with pytest.raises(ConfigurationError, match=r"on 192\.0\.2\.1 cannot be used"):
        foreign.start()


def test_port_is_free_after_stop(worker: Worker):
    """stop() frees the port, and may be called twice."""
    probe = Probe(worker.metrics, worker.readiness, port=0)
    probe.start()
    probe.stop()
    probe.stop()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", probe.port))


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "example.org"])  # noqa: S104 - refused
def test_beyond_loopback_a_token_is_required(worker: Worker, host: str):
    """Without a bearer file, a probe does not listen on an address that other machines can reach."""
    with pytest.raises(ConfigurationError, match="PENSTOCK_METRICS_BEARER_FILE"):
        Probe(worker.metrics, worker.readiness, host=host, port=0).start()


def test_token_guards_every_path(worker: Worker, tmp_path: Path):
    """With a bearer file, only a client with the token gets an answer."""
    token = tmp_path / "token"
    token.write_text("t0ken\n")
    probe = Probe(worker.metrics, worker.readiness, port=0, bearer_file=token)
    probe.start()
    try:
        for path in ("/metrics", "/health/live", "/health/ready", "/snapshot", "/other"):
            assert get(probe, path)[0] == get(probe, path, Authorization="Bearer wrong")[0] == 401
        assert get(probe, "/metrics", Authorization="Bearer t0ken")[0] == 200
    finally:
        probe.stop()


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_bearer_file_without_a_token_is_refused(worker: Worker, tmp_path: Path, content: str | None):
    """With a missing or empty file the probe refuses to start, instead of accepting any token."""
    token = tmp_path / "token"
    if content is not None:
        token.write_text(content)
    with pytest.raises(ConfigurationError, match="No token in token"):
        Probe(worker.metrics, worker.readiness, port=0, bearer_file=token).start()
