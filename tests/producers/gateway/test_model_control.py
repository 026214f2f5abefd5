"""Inferno's :load and :unload: the answer comes after the workers have done it; who may not, and what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import Client
from penstock.registry.settings_sections import ServerConfig
from tests.conftest import StartWorker
from tests.gateway_process import GatewayProcess
from tests.packages import write_double, write_package
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.servers import RedisServer, wait_until

_TRIPLE = """
def build():
    return lambda inputs: {"y": inputs["x"] * 3}
"""


def post(http: httpx.Client, verb: str, **fields: Any) -> httpx.Response:
    """One request."""
    return http.post(f"/v1/models:{verb}", json=fields)


def test_versions_are_loaded_and_unloaded(stack: GatewayStack, start_gateway: StartGateway):
    """IN-037, IN-040, IN-041: a version that came later is loaded, answers jobs that name it, and is unloaded."""
    write_package(stack.models_root, "double", _TRIPLE, version="2")
    gateway = start_gateway(
        PENSTOCK_INFERENCE_SERVER_MODEL_CONTROL="true", PENSTOCK_INFERENCE_STATE_RECONCILE_INTERVAL_S="0.2"
    )

    def loaded() -> list[str]:
        (line,) = (each for each in http.get("/v1/models").json()["data"] if each["id"] == "double")
        return list(line["loaded_versions"])

    def knows_spec() -> bool:
        document = {"inputs": {"x": [[0, 0, 0, 0]]}}
        return http.post("/v1/models/double/versions/2:predict", json=document).status_code == 200

    with gateway.client() as http, Client(stack.server.url) as client:
        assert loaded() == ["1"]
        found = post(http, "load", name="double", version="2")
        assert (found.status_code, found.json()) == (200, {"loaded": True, "workers": ["gateway@test"]})
        assert loaded() == ["1", "2"]
        wait_until(knows_spec, 60, "the worker has published the spec of the new version")
        row = [1.0, 2.0, 3.0, 4.0]
        assert client.submit("double", {"x": [row]}, version="2").result(180)["y"].tolist() == [[3.0, 6.0, 9.0, 12.0]]
        assert post(http, "load", name="double").json()["loaded"] is True
        found = post(http, "unload", name="double", version="2")
        assert (found.status_code, found.json()) == (200, {"unloaded": True})
        assert loaded() == ["1"]
        refused = post(http, "unload", name="double", version="1")
        assert (refused.status_code, refused.json()["detail"][:18]) == (409, "The active version")
        missing = post(http, "load", name="double", version="77")
        assert (missing.status_code, missing.json()["title"]) == (503, "service unavailable")
        assert str(stack.models_root) not in missing.text
        assert post(http, "load", name="nothing").status_code == 404
        assert post(http, "load", name="double", version="../1").status_code == 422
        assert post(http, "load").status_code == 422


@pytest.mark.parametrize(
    "environment",
    [{}, {"PENSTOCK_INFERENCE_SERVER_MODEL_CONTROL": "true", "PENSTOCK_OPERATOR_PUBLIC_KEYS": "a:" + "A" * 43 + "="}],
)
def test_requests_that_are_not_the_gateways_to_make(start_gateway: StartGateway, environment: dict[str, str]):
    """403 unless server.model_control is on, and where operators sign their requests."""
    assert not ServerConfig().model_control
    with start_gateway(**environment).client() as http:
        for verb in ("load", "unload"):
            refused = post(http, verb, name="double", version="1")
            assert (refused.status_code, "Expected" in refused.json()["detail"]) == (403, True), refused.text


def test_a_model_without_memory_is_loaded_when_it_is_shown_or_used(
    redis_server: RedisServer, start_worker: StartWorker, models_root: Path, tmp_path: Path
):
    """IN-036, IN-038: memory holds one of two models. GET loads the other where the gateway may; a job always does."""
    for name in ("left", "right"):
        file = write_double(models_root, name) / "model.yaml"
        file.write_text(f"{file.read_text()}memory_mb: 10\n")
    often = {"PENSTOCK_INFERENCE_STATE_RECONCILE_INTERVAL_S": "0.2"}
    start_worker(redis_server, models_root, environment={**often, "PENSTOCK_INFERENCE_MODEL_MEMORY_MB": "15"})
    may_load = {**often, "PENSTOCK_INFERENCE_SERVER_MODEL_CONTROL": "true"}
    gateways = [
        GatewayProcess(redis_server, tmp_path / f"gateway{number}", environment=environment)
        for number, environment in enumerate(({}, may_load))
    ]
    try:
        plain, loading = (gateway.start() for gateway in gateways)
        with plain.client() as http, loading.client() as loader:

            def loaded() -> list[str]:
                models = http.get("/v1/models").json()["data"]
                return [model["id"] for model in models if model["loaded_versions"]]

            for used in ("left", "right"):
                found = http.post(f"/v1/models/{used}:predict", json={"inputs": {"x": [[1, 2, 3, 4]]}})
                assert found.json()["outputs"]["y"]["data"] == [[2, 4, 6, 8]]
                wait_until(lambda: loaded() == [used], 60, "memory holds the model that was used")  # noqa: B023 - now
            assert http.get("/v1/models/left").json()["loaded_versions"] == []
            assert loaded() == ["right"]
            assert loader.get("/v1/models/left").json()["loaded_versions"] == ["1"]
    finally:
        for gateway in gateways:
            gateway.stop()
