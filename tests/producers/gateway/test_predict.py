"""Predictions in one request: JSON, base64, bytes; refusals before anything is queued; flat numbers."""

from __future__ import annotations

import base64
import json
import re
import threading
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from websockets.sync.client import connect

from penstock import Client
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.servers import wait_until

ROW = [1.0, 2.0, 3.0, 4.5]
TWICE = [2.0, 4.0, 6.0, 9.0]
BYTES = np.array([ROW], "<f4").tobytes()
PREDICT = "/v1/models/double:predict"


def tensor(**fields: Any) -> dict[str, Any]:
    """A request with one input of these fields."""
    return {"inputs": {"x": {"dtype": "float32", "shape": [1, 4], **fields}}}


@pytest.mark.parametrize(
    "document",
    [
        tensor(data=[ROW]),
        tensor(base64=base64.b64encode(BYTES).decode()),
        {"inputs": {"x": [ROW]}},
        {"inputs": {"x": [[1, 2, 3, 4.5]]}, "outputs": ["y"], "timeout_ms": 60_000, "priority": "high"},
    ],
)
def test_json_is_answered_with_named_tensors(http: httpx.Client, document: dict[str, Any]):
    """IN-029, IN-030, IN-033: each form of an input gives the exact output, and headers tell job, version and times."""
    found = http.post(PREDICT, json=document)
    assert found.status_code == 200, found.text
    assert found.json() == {
        "model": "double",
        "version": "1",
        "outputs": {"y": {"dtype": "float32", "shape": [1, 4], "data": [TWICE]}},
    }
    assert found.headers["penstock-job-id"].startswith("double.")
    assert found.headers["penstock-model-version"] == "1"
    assert len(found.headers["penstock-content-hash"]) == 64
    assert {part.strip().partition(";")[0] for part in found.headers["server-timing"].split(",")} == {
        "queue",
        "batch",
        "compute",
    }


def test_outputs_are_those_of_the_python_client(stack: GatewayStack, http: httpx.Client):
    """IN-033: the same inputs give the same bits through both."""
    rows = np.random.default_rng(0).standard_normal((3, 4), np.float32)
    with Client(stack.server.url) as client:
        direct = client.submit("double", {"x": rows}).result(180)["y"]
    found = http.post(PREDICT, json={"inputs": {"x": rows.tolist()}}).json()["outputs"]["y"]
    assert np.array(found["data"], np.float32).tobytes() == direct.tobytes()


def test_messagepack_carries_bytes(http: httpx.Client):
    """The document may be MessagePack with bytes as data; the answer then is, too."""
    body = msgspec.msgpack.encode(tensor(data=BYTES))
    found = http.post(PREDICT, content=body, headers={"Content-Type": "application/msgpack"})
    assert found.headers["content-type"] == "application/msgpack"
    output = msgspec.msgpack.decode(found.content)["outputs"]["y"]
    assert np.frombuffer(output["data"], "<f4").tolist() == TWICE


def test_octets_follow_their_document(http: httpx.Client):
    """Bytes behind a JSON document, both ways; an answer in JSON where Accept says so."""
    head = json.dumps(tensor(nbytes=len(BYTES))).encode()
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    found = http.post(PREDICT, content=head + BYTES, headers=headers)
    assert found.status_code == 200, found.text
    length = int(found.headers["inference-header-content-length"])
    output = json.loads(found.content[:length])["outputs"]["y"]
    assert output == {"dtype": "float32", "shape": [1, 4], "nbytes": 16}
    assert np.frombuffer(found.content[length:], "<f4").tolist() == TWICE
    as_json = http.post(PREDICT, content=head + BYTES, headers={**headers, "Accept": "application/json"})
    assert as_json.json()["outputs"]["y"]["data"] == [TWICE]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (tensor(), "x: found no tensor. Expected dtype, shape, and either data or base64"),
        (tensor(data=[ROW], base64="AAAA"), "x: found no tensor. Expected dtype, shape, and either data or base64"),
        (tensor(base64="?"), "x: not base64"),
        (tensor(base64="AAAA"), "x: bytes that do not fit dtype and shape"),
        (tensor(data=[ROW[:3]]), r"x: data: shape \(1, 3\)"),
        (tensor(data=[ROW], dtype="float31"), "x: dtype 'float31'. Expected one of: bool"),
        ({"inputs": {"x": [["a", 1, 2, 3]]}}, "x: contains str"),
        ({"inputs": {"x": [[True, 1, 2, 3]]}}, "x: contains bool"),
        ({"inputs": {"x": [[1e300, 1, 2, 3]]}}, "x: a value does not fit"),
        ({"inputs": {"x": [[1, 2, 3]]}}, r"x: shape \(1, 3\). Expected \(batch, 4\)"),
        ({"inputs": {"x": [[1, 2, 3], [4]]}}, "x: nested lists of unequal lengths|x: shape"),
        ({"inputs": {}}, "Missing required input.*: x"),
        ({"inputs": {"x": [ROW], "z": 1}}, "Unexpected input.*: z"),
        ({"inputs": {"x": [ROW]}, "outputs": ["q"]}, "Unknown output.*: q"),
        ({"inputs": {"x": [ROW]}, "timeout_ms": 0}, "timeout_ms is 0"),
        ({"inputs": {"x": [ROW]}, "timeout_ms": -1}, "timeout_ms is -1"),
        ({"inputs": {"x": [ROW]}, "priority": "urgent"}, "Invalid enum value"),
        ({"inputs": [1]}, "Expected `object`, got `array`"),
        ({"inputs": {"x": [ROW]}, "input": 1}, "unknown field `input`"),
        ([1], "The body is no object"),
        ("text", "The body is no object"),
    ],
)
def test_bad_input_is_422_and_never_queued(stack: GatewayStack, http: httpx.Client, document: object, expected: str):
    """IN-030, IN-031, IN-032, IN-034, IN-035: the text names the input and what was expected; no job is written."""
    before = _jobs(stack)
    found = http.post(PREDICT, json=document)
    assert found.status_code == 422, found.text
    assert found.headers["content-type"] == "application/problem+json"
    problem = found.json()
    assert problem["title"] == "invalid input"
    assert problem["status"] == 422
    assert re.search(expected, problem["detail"]), problem["detail"]
    assert _jobs(stack) == before


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{", "The body is no JSON"),
        (b"", "The body is no JSON"),
        (b'{"inputs": {"x": ' + b"[" * 100_000, "The body is no JSON"),
        (b'{"inputs": {"x": [[1e999, 1, 1, 1]]}}', "x|JSON"),
        (b'{"inputs": {"x": [[NaN, 1, 1, 1]]}}', "The body is no JSON"),
        (b'{"inputs": {"\xff": 1}}', "The body is no JSON"),
    ],
)
def test_broken_json_is_422(http: httpx.Client, body: bytes, expected: str):
    """A body that is no JSON, or is nested too deeply, is refused with its reason."""
    found = http.post(PREDICT, content=body, headers={"Content-Type": "application/json"})
    assert found.status_code == 422, found.text
    assert re.search(expected, found.json()["detail"])


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/v1/models/nothing:predict", {"inputs": {"x": [ROW]}}),
        ("/v1/models/nothing/versions/1:predict", {"inputs": {"x": [ROW]}}),
        ("/v1/models/double/versions/9:predict", {"inputs": {"x": [ROW]}}),
        ("/v1/models/Nothing-7B:predict", {"inputs": {"x": [ROW]}}),
        ("/predict?model=nothing", {"inputs": ROW}),
        ("/v1/jobs", {"model": "nothing", "inputs": {"x": [ROW]}}),
        ("/v1/jobs", {"model": "some/nothing", "inputs": {"x": [ROW]}}),
        ("/v1/jobs:batch", {"model": "nothing", "inputs": [{"x": [ROW]}]}),
    ],
)
def test_unknown_model_is_404(stack: GatewayStack, http: httpx.Client, path: str, document: dict[str, Any]):
    """IN-036: on every route, for a version, too, and for a name that no model can have; nothing is queued, and Redis
    has no key of that model.
    """
    before = _jobs(stack)
    found = http.post(path, json=document)
    assert found.status_code == 404
    assert found.json()["title"] == "model not found or not loaded"
    assert "nothing" in found.json()["detail"].lower() or "double/9" in found.json()["detail"]
    assert _jobs(stack) == before
    with stack.server.client() as redis:
        assert not [*redis.scan_iter("*nothing*")]


def test_latest_is_the_active_version(stack: GatewayStack, http: httpx.Client):
    """CX-014: `latest` names the version in production wherever a version may be named."""
    oip = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": ROW}]}
    inputs, wait = {"x": [ROW]}, {"Prefer": "wait=60"}
    for path, document in (
        ("/v1/models/double/versions/latest:predict", {"inputs": inputs}),
        (PREDICT, {"inputs": inputs, "version": "latest"}),
        ("/predict?model=double", {"inputs": ROW, "model_version": "latest"}),
        ("/v1/jobs", {"model": "double", "inputs": inputs, "version": "latest"}),
        ("/v2/models/double/versions/latest/infer", oip),
    ):
        found = http.post(path, json=document, headers=wait)
        assert found.status_code == 200, (path, found.text)
        assert found.headers["penstock-model-version"] == "1"
    many = http.post("/v1/jobs:batch", json={"model": "double", "inputs": [inputs], "version": "latest"})
    location = many.json()["jobs"][0]["location"]
    assert http.get(location, params={"wait": 60}).headers["penstock-model-version"] == "1"
    assert http.get("/v2/models/double/versions/latest").json()["versions"] == ["1"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "null", "true", '"1"'])
@pytest.mark.parametrize("path", ["/predict", "/predict/batch"])
def test_numbers_that_are_none_are_422_on_plain_routes(stack: GatewayStack, http: httpx.Client, path: str, number: str):
    """CX-041: NaN and infinity in each form that JSON parsers know, and what is no number; nothing is queued."""
    before = _jobs(stack)
    row = f"[1, 2, 3, {number}]"
    body = f'{{"batch": [{row}]}}' if path.endswith("batch") else f'{{"inputs": {row}}}'
    headers = {"Content-Type": "application/json"}
    found = http.post(f"{path}?model=double", content=body.encode(), headers=headers)
    assert found.status_code == 422, found.text
    assert "xpected" in found.json()["detail"]
    assert _jobs(stack) == before


def test_other_content_type_is_415(http: httpx.Client):
    """A body of a type that nobody reads is refused before it is read as something else."""
    found = http.post(PREDICT, content=b"<x/>", headers={"Content-Type": "text/xml"})
    assert found.status_code == 415
    assert "Expected application/json" in found.json()["detail"]


def test_a_failing_model_is_502_without_its_text(http: httpx.Client):
    """CX-028: what the model raised stays with its operators; the job's id leads them to it."""
    found = http.post("/v1/models/raiser:predict", json={"inputs": {"x": [[-1.0, 0, 0, 0]]}})
    assert found.status_code == 502
    assert found.json()["detail"].startswith("The model failed")
    assert "model.py" not in found.text
    assert found.headers["penstock-job-id"].startswith("raiser.")


def test_a_job_that_may_not_start_in_time_is_504(stack: GatewayStack, http: httpx.Client):
    """IN-053: timeout_ms bounds the wait in the queue; the job never runs."""
    with Client(stack.server.url) as client:
        running = client.submit_many("napper", [{"x": [[n, 0, 0, 2]]} for n in range(3)])
        found = http.post("/v1/models/napper:predict", json={"inputs": {"x": [ROW]}, "timeout_ms": 1})
        assert found.status_code == 504
        assert found.json()["detail"].startswith("The deadline passed before the job ran")
        for job in running:
            job.result(180)
        assert client.job(found.headers["penstock-job-id"]).status() == "expired"


def test_a_job_that_takes_too_long_is_504(stack: GatewayStack, start_gateway: StartGateway):
    """timeout_seconds bounds the wait of a request; its job is cancelled, because nobody will read the result.

    The answer says so, also over WebSocket. With an idempotency key the job goes on, and the answer says that.
    """
    gateway = start_gateway(PENSTOCK_INFERENCE_TIMEOUT_SECONDS="0.1")
    with Client(stack.server.url) as client, gateway.client() as http:
        # Frozen, the worker cannot be faster than the cancellation.
        stack.worker.freeze()
        try:
            running = client.submit_many("napper", [{"x": [[n, 0, 0, 4]]} for n in range(4)])
            found = http.post("/v1/models/napper:predict", json={"inputs": {"x": [[9, 0, 0, 4]]}})
            assert found.status_code == 504
            job_id = found.headers["penstock-job-id"]
            wait_until(lambda: client.job(job_id).status() == "cancelled", 30, "it is cancelled")
            assert "s; the job is cancelled, unless another request waits for it. Expected" in found.json()["detail"]
            headers, request = {"Idempotency-Key": "late"}, {"inputs": {"x": [[9, 0, 1, 4]]}}
            keyed = http.post("/v1/models/napper:predict", json=request, headers=headers)
            assert keyed.json()["detail"] == "No result within 0.1 s; the job goes on"
            with connect(f"{gateway.url.replace('http', 'ws')}/predict/stream?model=napper") as socket:
                socket.send(json.dumps({"inputs": {"x": [[9, 0, 2, 4]]}}))
                assert "; the job is cancelled, unless" in json.loads(socket.recv())["error"]["detail"]
        finally:
            stack.worker.thaw()
        for job in running:
            job.result(180)


def test_the_job_of_a_closed_connection_is_cancelled(stack: GatewayStack):
    """Nobody reads the answer, so that the job does not run; one with an idempotency key goes on."""
    with Client(stack.server.url) as client:
        running = client.submit_many("napper", [{"x": [[n, 0, 0, 0]]} for n in range(6)])
        known = set(_job_keys(stack))
        for number, headers in enumerate(({}, {"Idempotency-Key": "goes-on"})):
            document = {"inputs": {"x": [[number, 1, 0, 0]]}}
            with pytest.raises(httpx.ReadTimeout), stack.gateway.client() as http:
                http.post("/v1/models/napper:predict", json=document, headers=headers, timeout=0.3)
        new = ["napper." + key.decode().rpartition(":")[2] for key in set(_job_keys(stack)) - known]
        assert len(new) == 2
        wait_until(lambda: [client.job(each).status() for each in new].count("cancelled") == 1, 20, "one is cancelled")
        for job in running:
            job.result(180)
        ended = [_ended(client, each) for each in new]
        assert sorted(ended) == ["cancelled", "completed"]


def test_flat_numbers(http: httpx.Client):
    """CX-023, CX-024, CX-034: one row, or a batch, of plain numbers."""
    one = http.post("/predict?model=double", json={"inputs": ROW})
    assert one.json()["predictions"] == TWICE
    assert one.json()["model_version"] == "1"
    assert one.json()["latency_ms"] > 0
    for path in ("/predict", "/predict/batch"):
        many = http.post(f"{path}?model=double", json={"batch": [ROW, ROW]})
        assert many.json()["predictions"] == [TWICE, TWICE]


def test_latency_is_that_of_the_job(http: httpx.Client):
    """CX-024: at least as long as the model takes, 0.3 s, and at most as long as the client waits."""
    found = http.post("/predict?model=napper", json={"inputs": [5, 5, 6, 6]})
    # The whole is longer than its part on any machine.
    assert 300 <= found.json()["latency_ms"] <= found.elapsed.total_seconds() * 1000


@pytest.mark.parametrize(
    "document",
    [
        {"inputs": []},
        {"inputs": [1.0] * 10_001},
        {"inputs": ["1", 2, 3, 4]},
        {"inputs": [True, 2, 3, 4]},
        {"inputs": [None, 2, 3, 4]},
        {"inputs": ROW, "batch": [ROW]},
        {"batch": [ROW, ROW[:3]]},
        {"batch": []},
        {},
    ],
)
def test_bad_flat_numbers_are_422(stack: GatewayStack, http: httpx.Client, document: dict[str, Any]):
    """CX-032, CX-041: none, too many, no numbers (a bool is none); nothing is queued."""
    before = _jobs(stack)
    assert http.post("/predict?model=double", json=document).status_code == 422
    assert _jobs(stack) == before


def test_the_model_must_be_named_while_several_are_served(http: httpx.Client):
    """/predict without ?model= serves the only model."""
    found = http.post("/predict", json={"inputs": ROW})
    assert found.status_code == 422
    assert "Expected ?model=" in found.json()["detail"]


def test_waiting_requests_do_not_wait_for_each_other(http: httpx.Client, stack: GatewayStack):
    """Requests of several clients are answered while one waits for a slow model."""
    answers: list[int] = []

    def wait() -> None:
        with stack.gateway.client() as other:
            answers.append(other.post("/v1/models/napper:predict", json={"inputs": {"x": [ROW]}}).status_code)

    thread = threading.Thread(target=wait)
    thread.start()
    assert http.post(PREDICT, json={"inputs": {"x": [ROW]}}).status_code == 200
    thread.join()
    assert answers == [200]


def _ended(client: Client, job_id: str) -> str:
    wait_until(lambda: client.job(job_id).status() not in ("queued", "running"), 60, "the job has ended")
    return client.job(job_id).status()


def _job_keys(stack: GatewayStack) -> list[bytes]:
    with stack.server.client() as client:
        return [key for key in set(client.scan_iter("{*}:job:*")) if not key.endswith(b":events")]


def _jobs(stack: GatewayStack) -> int:
    return len(_job_keys(stack))
