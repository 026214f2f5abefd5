"""Models and health: what is served, which version answers, and what monitors read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.compose.deploy import Deployer
from penstock.registry.metrics import GATEWAY_METRICS
from penstock.registry.settings import Settings
from penstock.safety.operator_key import OperatorKey
from tests.conftest import StartWorker
from tests.flow.hot_swap import write_multiplier
from tests.gateway_process import GatewayProcess
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.servers import RedisServer, wait_until

SERVED = ["counter", "double", "embedder", "napper", "raiser"]
WRITER = "writer"
"""Of tests that came before, maybe, on a worker of its own."""


def test_models_are_listed_with_what_is_loaded(http: httpx.Client):
    """IN-037: every model whose jobs are accepted, and its versions in memory."""
    found = http.get("/v1/models").json()
    assert found["object"] == "list"
    assert [model["id"] for model in found["data"] if model["id"] != WRITER] == SERVED
    assert all(model["active_version"] == "1" and model["loaded_versions"] == ["1"] for model in found["data"])
    assert http.get("/v1/models?loaded=true").json() == found
    assert http.get("/v1/models?loaded=maybe").status_code == 422


def test_a_model_shows_its_signature(http: httpx.Client):
    """IN-038, of a model in memory: name, version, inputs and outputs."""
    found = http.get("/v1/models/double").json()
    assert (found["name"], found["version"], found["format"], found["streams"]) == ("double", "1", "python", False)
    assert found["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch", 4], "optional": False}]
    assert [tensor["name"] for tensor in found["outputs"]] == ["y"]
    assert len(found["content_hash"]) == 64
    assert found["created"] > 0
    assert http.get("/v1/models/nothing").status_code == 404


def test_the_active_version_is_shown(http: httpx.Client):
    """IN-039 before a promotion."""
    assert http.get("/v1/models/double/active").json() == {"name": "double", "version": "1", "loaded": True}


def test_health(http: httpx.Client):
    """IN-042, IN-043, CX-029, CX-030, ES-044: alive, ready, and which versions are loaded."""
    assert http.get("/health/live").json() == {"live": True}
    for path in ("/health/ready", "/ready", "/health", "/v2/health/ready"):
        found = http.get(path)
        assert (found.status_code, {**found.json(), "workers": 1}) == (
            200,
            {"ready": True, "broker": True, "workers": 1},
        )
        assert found.json()["workers"] in (1, 2)
    loaded = http.get("/healthz")
    assert (loaded.status_code, loaded.json()["status"]) == (200, "ok")
    assert {WRITER: "1", **loaded.json()["models"]} == dict.fromkeys([*SERVED, WRITER], "1")
    assert http.head("/health/live").content == b""


@pytest.mark.slow
def test_without_a_worker_nothing_is_ready(start_gateway: StartGateway, redis_server, stack: GatewayStack):
    """503 while no worker claims jobs, and while the broker is away; the process lives all the time."""
    gateway = start_gateway(PENSTOCK_REDIS_URL=redis_server.url)
    with gateway.client() as http:
        found = http.get("/health/ready")
        assert (found.status_code, found.json()) == (503, {"ready": False, "broker": True, "workers": 0})
        assert http.get("/healthz").json() == {"status": "unavailable", "model_version": None, "models": {}}
        redis_server.kill()
        found = http.get("/ready")
        assert (found.status_code, found.json()["broker"]) == (503, False)
        refused = http.post("/v1/jobs", json={"model": "double", "inputs": {}})
        assert (refused.status_code, refused.json()["type"]) == (503, "urn:penstock:problem:broker-unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert http.get("/health/live").status_code == 200


def test_monitors_follow_workers_and_promotions(
    redis_server: RedisServer, start_worker: StartWorker, models_root: Path, tmp_path: Path
):
    """CX-029, ES-044, IN-039: 503 until a worker is ready, then 200 with the version; a promotion changes it for
    monitors, in the list, and for jobs."""
    for version in (1, 2):
        write_multiplier(models_root, "only", version, forward_s=0)
    operator = OperatorKey.generate(tmp_path / "operator.pem")
    environ = {"PENSTOCK_REDIS_URL": redis_server.url, "PENSTOCK_CELERY_URL": redis_server.celery_url}
    gateway = GatewayProcess(redis_server, tmp_path / "gateway").start()
    monitors = ("/healthz", "/health", "/health/ready", "/ready", "/v2/health/ready")
    try:
        with (
            gateway.client() as http,
            Deployer.connect(Settings.load(environ={"PENSTOCK_HOME": str(tmp_path), **environ})) as deployer,
        ):

            def seen() -> tuple[Any, ...]:
                active = http.get("/v1/models/only/active").json()
                (line,) = http.get("/v1/models").json()["data"]
                predicted = http.post("/v1/models/only:predict", json={"inputs": {"x": [[1, 1, 1, 1]]}}).json()
                return (
                    *(http.get("/healthz").json()["model_version"], active, line["active_version"]),
                    *(predicted["version"], predicted["outputs"]["y"]["data"][0][0]),
                )

            def expected(version: int) -> tuple[Any, ...]:
                text = str(version)
                return text, {"name": "only", "version": text, "loaded": True}, text, text, float(version)

            assert [http.get(path).status_code for path in monitors] == [503] * 5
            for name in ("1", "2"):
                deployer.register(models_root / "only" / name)
                deployer.promote("only", name, "staging")
            trust = {
                "PENSTOCK_OPERATOR_PUBLIC_KEYS": operator.public_text,
                "PENSTOCK_INFERENCE_STATE_RECONCILE_INTERVAL_S": "0.2",
            }
            start_worker(redis_server, models_root, environment=trust)
            deployer.promote("only", "1")
            wait_until(lambda: [http.get(path).status_code for path in monitors] == [200] * 5, 60, "all say ready")
            wait_until(lambda: seen() == expected(1), 60, "version 1 answers everywhere")
            deployer.promote("only", "2")
            wait_until(lambda: seen() == expected(2), 60, "version 2 answers everywhere")
    finally:
        gateway.stop()


def test_metrics_count_requests(http: httpx.Client):
    """IN-044, CF-063: Prometheus reads the page; routes have their names, and no request's own path."""
    http.get("/v1/models/double")
    http.get("/v1/models/nothing")
    page = http.get("/metrics")
    assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(page.text)}
    assert {metric.name.removesuffix("_total") for metric in GATEWAY_METRICS} <= families.keys()
    counted = {
        (sample.labels["route"], sample.labels["status"])
        for sample in families["penstock_http_requests"].samples
        if sample.name.endswith("_total")
    }
    assert {("/v1/models/{name}", "200"), ("/v1/models/{name}", "404")} <= counted
    timed = {
        sample.labels["route"]: sample.value
        for sample in families["penstock_http_seconds"].samples
        if sample.name.endswith("_count")
    }
    assert timed["/v1/models/{name}"] >= 2
    assert "nothing" not in page.text


def test_metrics_can_be_left_out(start_gateway: StartGateway):
    """ES-045: server.metrics is off, and there is no such page."""
    with start_gateway(PENSTOCK_INFERENCE_SERVER_METRICS="false").client() as http:
        assert http.get("/metrics").status_code == 404
        assert "/metrics" not in http.get("/openapi.json").json()["paths"]


def test_the_openapi_document_has_every_route(http: httpx.Client):
    """Every path that is served is described, and each reference leads to a type."""
    found = http.get("/openapi.json").json()
    assert {"/v1/jobs", "/v1/models/{name}:predict", "/v2/models/{name}/infer", "/v1/embeddings"} <= found[
        "paths"
    ].keys()
    text = json.dumps(found)
    types = found["components"]["schemas"]
    assert set(re.findall(r"#/components/schemas/([\w.]+)", text)) <= types.keys()
    identifiers = [each["operationId"] for path in found["paths"].values() for each in path.values()]
    assert len(identifiers) == len(set(identifiers))


def test_the_page_needs_no_network(http: httpx.Client):
    """/docs has no script and loads nothing from elsewhere."""
    page = http.get("/docs")
    assert page.status_code == 200
    assert "/v1/jobs:batch" in page.text
    assert not re.search(r"<script|https?://|<link|@import", page.text)
