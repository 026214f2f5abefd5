"""The blueprint in a real application of Flask, with a real worker."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import Client
from tests.producers.gateway.conftest import GatewayStack
from tests.producers.gateway.naps import naps_before
from tests.servers import require_module, wait_until

ROW = [1.0, 2.0, 3.0, 4.5]


@pytest.fixture
def http(stack: GatewayStack) -> Iterator[Any]:
    """A client of an application that has the blueprint below /inference."""
    flask = require_module("flask")
    from penstock.producers.flask_blueprint import blueprint

    app = flask.Flask(__name__)
    with Client(stack.server.url) as client:
        app.register_blueprint(blueprint(client, wait_s=60), url_prefix="/inference")
        app.register_blueprint(blueprint(client, name="short", wait_s=0.01), url_prefix="/short")
        yield app.test_client()


def test_predictions_and_jobs(http: Any):
    """CX-001: a prediction, a job that is looked at until it has ended, one that is cancelled."""
    found = http.post("/inference/models/double:predict", json={"inputs": {"x": [ROW]}})
    assert found.json["outputs"] == {"y": {"dtype": "float32", "shape": [1, 4], "data": [[2.0, 4.0, 6.0, 9.0]]}}
    assert found.json["version"] == "1"
    tensor = {"dtype": "float32", "shape": [1, 4], "data": [ROW]}
    accepted = http.post("/inference/jobs", json={"model": "double", "inputs": {"x": tensor}})
    assert accepted.status_code == 202
    location = f"/inference/jobs/{accepted.json['id']}"
    wait_until(lambda: http.get(location).json["status"] == "completed", 60, "the job has ended")
    assert http.get(location).json["outputs"]["y"]["data"] == [[2.0, 4.0, 6.0, 9.0]]
    assert http.delete(location).json["status"] == "too_late"


def test_refusals(http: Any):
    """Each error has its status and says what was expected; a failed job shows its error."""
    for path, document, status in (
        ("/models/double:predict", {"inputs": {"x": [[1]]}}, 422),
        ("/models/double:predict", {"inputs": {"x": [ROW]}, "timeout_ms": 0}, 422),
        ("/models/double:predict", {"inputs": 5}, 422),
        ("/models/nothing:predict", {"inputs": {"x": [ROW]}}, 404),
        ("/jobs", {"model": "double"}, 422),
    ):
        found = http.post(f"/inference{path}", json=document)
        assert (found.status_code, found.content_type) == (status, "application/problem+json"), found.text
        assert "Expected" in found.json["detail"]
    assert http.post("/inference/models/double:predict", data=b"\xff{").status_code == 422
    for name in ("double.x", "x"):
        for found in (http.get(f"/inference/jobs/{name}"), http.delete(f"/inference/jobs/{name}")):
            assert (found.status_code, found.json["title"]) == (404, "job not found"), found.text
    failed = http.post("/inference/jobs", json={"model": "raiser", "inputs": {"x": [[-1, 0, 0, 0]]}}).json["id"]
    wait_until(lambda: http.get(f"/inference/jobs/{failed}").json["status"] == "failed", 60, "it has failed")
    assert http.get(f"/inference/jobs/{failed}").json["error"]["code"] == "model-error"


def test_a_prediction_that_takes_too_long_cancels_its_job(http: Any):
    """504, and the job does not go on for nobody."""
    found = http.post("/short/models/napper:predict", json={"inputs": {"x": [[1, 9, 9, 9]]}})
    assert found.status_code == 504
    assert "; the job is cancelled, unless" in found.json["detail"]


def test_an_idempotency_key_is_read_as_by_the_gateway(http: Any):
    """Quoted or bare, it is the same key, for jobs and for predictions; one out of grammar is refused with 400."""
    document, key = {"model": "double", "inputs": {"x": [ROW]}}, f"order-{uuid.uuid4().hex}"
    quoted, bare = (
        http.post("/inference/jobs", json=document, headers={"Idempotency-Key": text}) for text in (f'"{key}"', key)
    )
    assert (quoted.status_code, bare.status_code) == (202, 202)
    assert quoted.json["id"] == bare.json["id"]
    predictions = [
        http.post(
            "/inference/models/double:predict",
            json={"inputs": {"x": [ROW]}},
            headers={"Idempotency-Key": text.format(f"prediction-{key}")},
        ).json
        for text in ("{}", '"{}"')
    ]
    assert len({each["job_id"] for each in predictions}) == 1
    for path in ("/jobs", "/models/double:predict"):
        for wrong in ("a, b", "x" * 256, ""):
            refused = http.post(f"/inference{path}", json=document, headers={"Idempotency-Key": wrong})
            assert (refused.status_code, refused.content_type) == (400, "application/problem+json"), refused.text
            assert "Bad Idempotency-Key. Expected" in refused.json["detail"]


def test_a_prediction_that_takes_too_long_leaves_a_shared_job(stack: GatewayStack, http: Any):
    """Another request with its key may wait for it: the job runs on, as in the gateway."""
    headers = {"Idempotency-Key": f"nap-{uuid.uuid4().hex}"}
    request = {"inputs": {"x": [[2, 9, 9, 9]]}}
    with naps_before(stack):
        assert http.post("/short/models/napper:predict", json=request, headers=headers).status_code == 504
    assert http.post("/inference/models/napper:predict", json=request, headers=headers).status_code == 200


def test_only_json_is_taken(http: Any):
    """415 for another type, which a form of another site may send; no type at all is taken for JSON."""
    for path, document in (
        ("/jobs", {"model": "double", "inputs": {"x": [ROW]}}),
        ("/models/double:predict", {"inputs": {"x": [ROW]}}),
    ):
        body = json.dumps(document)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/msgpack"):
            refused = http.post(f"/inference{path}", data=body, content_type=kind)
            assert (refused.status_code, refused.content_type) == (415, "application/problem+json"), refused.text
            assert "Expected `Content-Type: application/json`" in refused.json["detail"]
        for taken in (None, "application/json; charset=utf-8"):
            assert http.post(f"/inference{path}", data=body, content_type=taken).status_code in {200, 202}
