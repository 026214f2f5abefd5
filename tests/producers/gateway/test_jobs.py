"""Jobs as resources: submit, wait, poll, cancel, many at once. Their ids are those of every other client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from penstock import Client
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.servers import wait_until

ROW = [1.0, 2.0, 3.0, 4.5]
TWICE = [2.0, 4.0, 6.0, 9.0]


def job(model: str = "double", row: list[float] = ROW, **fields: Any) -> dict[str, Any]:
    """A job of one row."""
    return {"model": model, "inputs": {"x": [row]}, **fields}


def test_a_job_is_accepted_and_found_at_its_location(http: httpx.Client):
    """202 with Location and Retry-After; the location has the outputs once the job has ended."""
    accepted = http.post("/v1/jobs", json=job())
    assert accepted.status_code == 202
    assert accepted.json()["status"] == "queued"
    assert accepted.headers["location"] == f"/v1/jobs/{accepted.json()['id']}"
    assert accepted.headers["penstock-job-id"] == accepted.json()["id"]
    assert int(accepted.headers["retry-after"]) >= 1
    ended = http.get(accepted.headers["location"], params={"wait": 60})
    assert ended.status_code == 200
    assert ended.json()["status"] == "completed"
    assert ended.json()["outputs"]["y"]["data"] == [TWICE]
    assert ended.headers["penstock-model-version"] == "1"


def test_a_job_that_ends_in_time_is_answered_at_once(http: httpx.Client):
    """Prefer: wait=N gives the job itself."""
    ended = http.post("/v1/jobs", json=job(), headers={"Prefer": "respond-async, wait=60"})
    assert ended.status_code == 200
    assert ended.json()["outputs"]["y"]["data"] == [TWICE]


def test_a_job_that_does_not_end_in_time_goes_on(stack: GatewayStack, http: httpx.Client):
    """Prefer: wait=N runs out: 202 with Location, Retry-After and the status, as if the client had not waited."""
    stack.worker.freeze()
    try:
        accepted = http.post("/v1/jobs", json=job(row=[4, 4, 4, 4]), headers={"Prefer": "wait=1"})
    finally:
        stack.worker.thaw()
    assert accepted.status_code == 202
    assert accepted.json().keys() == {"id", "model", "status"}
    assert accepted.json()["status"] in ("queued", "running")
    assert int(accepted.headers["retry-after"]) >= 1
    assert accepted.headers["penstock-job-id"] == accepted.json()["id"]
    ended = http.get(accepted.headers["location"], params={"wait": 60}).json()
    assert (ended["id"], ended["outputs"]["y"]["data"]) == (accepted.json()["id"], [[8, 8, 8, 8]])


def test_a_job_of_the_gateway_is_a_job_of_python(stack: GatewayStack, http: httpx.Client):
    """One id behind both: submitted here, read there, and the other way around."""
    with Client(stack.server.url) as client:
        here = http.post("/v1/jobs", json=job()).json()["id"]
        assert client.job(here).result(180)["y"].tolist() == [TWICE]
        there = client.submit("double", {"x": [ROW]})
        assert http.get(f"/v1/jobs/{there.id}?wait=60").json()["outputs"]["y"]["data"] == [TWICE]


@pytest.mark.parametrize("kind", ["application/msgpack", "application/octet-stream"])
def test_a_job_may_be_binary(http: httpx.Client, kind: str):
    """POST /v1/jobs in MessagePack, and as bytes behind JSON: 202 in JSON, and outputs in the type of the body."""
    raw = np.array([ROW], "<f4").tobytes()
    packed = kind == "application/msgpack"
    given = {"dtype": "float32", "shape": [1, 4], **({"data": raw} if packed else {"nbytes": len(raw)})}
    document = {"model": "double", "inputs": {"x": given}, "priority": "high"}
    headers = {"Content-Type": kind}
    if packed:
        body = msgspec.msgpack.encode(document)
    else:
        head = json.dumps(document).encode()
        body, headers["Inference-Header-Content-Length"] = head + raw, str(len(head))
    accepted = http.post("/v1/jobs", content=body, headers=headers)
    assert accepted.status_code == 202, accepted.text
    location = accepted.headers["location"]
    assert http.get(location, params={"wait": 60}).json()["outputs"]["y"]["data"] == [TWICE]
    ended = http.post("/v1/jobs", content=body, headers={**headers, "Prefer": "wait=60"})
    assert (ended.status_code, ended.headers["content-type"]) == (200, kind)
    if packed:
        facts = msgspec.msgpack.decode(ended.content)
        outputs = facts["outputs"]["y"]["data"]
    else:
        length = int(ended.headers["inference-header-content-length"])
        facts, outputs = json.loads(ended.content[:length]), ended.content[length:]
    assert facts["status"] == "completed"
    assert np.frombuffer(outputs, "<f4").tolist() == TWICE


def test_a_batch_of_jobs_may_be_messagepack(http: httpx.Client):
    """POST /v1/jobs:batch takes it, too; bytes behind a document are of one job."""
    raw = np.array([ROW], "<f4").tobytes()
    inputs = [{"x": {"dtype": "float32", "shape": [1, 4], "data": raw}}] * 2
    body = msgspec.msgpack.encode({"model": "double", "inputs": inputs})
    found = http.post("/v1/jobs:batch", content=body, headers={"Content-Type": "application/msgpack"})
    assert [each["status"] for each in found.json()["jobs"]] == ["accepted"] * 2
    for each in found.json()["jobs"]:
        assert http.get(each["location"], params={"wait": 60}).json()["outputs"]["y"]["data"] == [TWICE]
    refused = http.post("/v1/jobs:batch", content=body, headers={"Content-Type": "application/octet-stream"})
    assert refused.status_code == 415


def test_the_same_key_is_the_same_job(http: httpx.Client):
    """A repeated request gets the first one's job; with other inputs it is refused."""
    headers = {"Idempotency-Key": '"order 7"'}
    first, again = (http.post("/v1/jobs", json=job(), headers=headers).json()["id"] for _ in range(2))
    assert first == again
    other = http.post("/v1/jobs", json=job(row=[0, 0, 0, 0]), headers=headers)
    assert other.status_code == 422
    assert "idempotency key" in other.json()["detail"]
    # A request that waits for its answer gets that of the first one, too.
    predicted = http.post("/v1/models/double:predict", json={"inputs": {"x": [ROW]}}, headers=headers)
    assert predicted.headers["penstock-job-id"] == first


@pytest.mark.parametrize(
    "headers",
    [
        {"Idempotency-Key": ""},
        {"Idempotency-Key": "x" * 256},
        {"Idempotency-Key": '"open'},
        {"Idempotency-Key": "a,b"},
        {"Prefer": "wait"},
        {"Prefer": "wait=soon"},
        {"Prefer": "wait=-1"},
        {"Prefer": "=;"},
    ],
)
def test_headers_out_of_grammar_are_400(http: httpx.Client, headers: dict[str, str]):
    """A header that cannot be understood is no header that was not sent."""
    found = http.post("/v1/jobs", json=job(), headers=headers)
    assert found.status_code == 400
    assert "Expected" in found.json()["detail"]


def test_a_waiting_job_is_cancelled(stack: GatewayStack, http: httpx.Client):
    """DELETE: a job that waits never runs; one that has ended stays as it is."""
    with Client(stack.server.url) as client:
        running = client.submit_many("napper", [{"x": [[n, 7, 0, 0]]} for n in range(3)])
        waiting = http.post("/v1/jobs", json=job("napper", [9, 9, 9, 9])).headers["location"]
        assert http.delete(waiting).json()["status"] == "cancelled"
        shown = http.get(waiting).json()
        assert shown["status"] == "cancelled"
        assert shown["error"]["code"] == "cancelled"
        for each in running:
            each.result(180)
        assert http.delete(f"/v1/jobs/{running[0].id}").json()["status"] == "too_late"


def test_an_unknown_endpoint_is_422(http: httpx.Client):
    """The refusal names those that the model has, for one job and for many."""
    many = {"model": "double", "inputs": [job()["inputs"]], "endpoint": "bulk"}
    for refused in (http.post("/v1/jobs", json=job(endpoint="bulk")), http.post("/v1/jobs:batch", json=many)):
        assert refused.status_code == 422
        assert "Unknown endpoint 'bulk' of double. Expected one of: infer" in refused.json()["detail"]


def test_a_failed_job_says_how(http: httpx.Client):
    """The job is there, and its error has no text of the model's own exception."""
    failed = http.post("/v1/jobs", json=job("raiser", [-1, 0, 0, 0]), headers={"Prefer": "wait=60"})
    assert failed.status_code == 200
    assert failed.json()["status"] == "failed"
    assert failed.json()["error"]["code"] == "model-error"
    assert "model.py" not in failed.text


def test_an_unknown_job_is_404(http: httpx.Client):
    """An id of nobody, and one that can be none."""
    assert http.get("/v1/jobs/double.01920000-0000-7000-8000-000000000000").status_code in (404, 410)
    assert http.get("/v1/jobs/double.ffffffff-ffff-7fff-bfff-ffffffffffff").status_code == 404
    for found in (http.get("/v1/jobs/nothing"), http.delete("/v1/jobs/nothing"), http.get("/v1/jobs/nothing/events")):
        assert (found.status_code, found.json()["title"]) == (404, "job not found")


@pytest.mark.parametrize("wait", ["x", "-1", "301", "1.5"])
def test_a_wait_out_of_range_is_422(http: httpx.Client, wait: str):
    """?wait= has whole seconds, at most 300."""
    found = http.get(f"/v1/jobs/double.ffffffff-ffff-7fff-bfff-ffffffffffff?wait={wait}")
    assert found.status_code == 422


def test_many_jobs_in_one_request(http: httpx.Client):
    """202 with an id for each, in order."""
    rows = [[float(n), 0, 0, 0] for n in range(20)]
    document = {"model": "double", "inputs": [{"x": [row]} for row in rows], "priority": "low"}
    accepted = http.post("/v1/jobs:batch", json=document)
    assert accepted.status_code == 202, accepted.text
    ids = [each["id"] for each in accepted.json()["jobs"]]
    found = [http.get(f"/v1/jobs/{each}?wait=60").json()["outputs"]["y"]["data"][0] for each in ids]
    assert found == [[2 * value for value in row] for row in rows]


def test_one_bad_item_refuses_the_batch(stack: GatewayStack, http: httpx.Client):
    """All are checked before the first is written; the text names the item."""
    document = {"model": "double", "inputs": [{"x": [ROW]}, {"x": [[1, 2]]}]}
    with stack.server.client() as redis:
        before = len(set(redis.scan_iter("{double}:job:*")))
        found = http.post("/v1/jobs:batch", json=document)
        assert found.status_code == 422
        assert found.json()["detail"].startswith("Item 1: x:")
        assert len(set(redis.scan_iter("{double}:job:*"))) == before
    for inputs in ([], [{"x": [ROW]}] * 10_001):
        assert http.post("/v1/jobs:batch", json={"model": "double", "inputs": inputs}).status_code == 422


def test_a_conflicting_key_of_a_batch_is_told_in_its_place(stack: GatewayStack, http: httpx.Client):
    """The others are accepted, also those of later calls of the broker; nothing is accepted where all conflict."""
    count, known, taken = 1200, 500, 700
    for key, row in (("batch-known", [float(known), 0, 0, 0]), ("batch-taken", ROW)):
        http.post("/v1/jobs", json=job(row=row), headers={"Idempotency-Key": key})
    keys: list[str | None] = [None] * count
    keys[known], keys[taken] = "batch-known", "batch-taken"
    inputs = [{"x": [[number, 0, 0, 0]]} for number in range(count)]
    with stack.server.client() as redis:

        def jobs() -> int:
            return sum(not key.endswith(b":events") for key in set(redis.scan_iter("{double}:job:*", count=10_000)))

        before = jobs()
        found = http.post("/v1/jobs:batch", json={"model": "double", "inputs": inputs, "idempotency_keys": keys})
        assert found.status_code == 202, found.text
        told = found.json()["jobs"]
        assert jobs() - before == count - 2
        assert [place for place, each in enumerate(told) if each["status"] == "refused"] == [taken]
        assert told[taken].keys() == {"status", "error"}
        assert told[taken]["error"]["code"] == "idempotency-conflict"
        assert told[taken]["error"]["detail"].startswith("The idempotency key belongs to a job with")
        for number in (0, known, taken - 1, taken + 1, count - 1):
            outputs = http.get(told[number]["location"], params={"wait": 60}).json()["outputs"]
            assert outputs["y"]["data"] == [[2 * number, 0, 0, 0]]
        both = {"model": "double", "inputs": inputs[:2], "idempotency_keys": ["batch-known", "batch-taken"]}
        none = http.post("/v1/jobs:batch", json=both)
        assert (none.status_code, none.json()["type"]) == (422, "urn:penstock:problem:idempotency-conflict")
        assert jobs() - before == count - 2


def test_a_batch_takes_the_room_that_is_left(stack: GatewayStack, start_gateway: StartGateway):
    """Each item without room says so, and Retry-After when to ask again; a batch without any room is 503."""
    gateway = start_gateway(PENSTOCK_INFERENCE_QUEUE_MAX_DEPTH="5")
    document = {"model": "napper", "inputs": [{"x": [[number, 8, 0, 8]]} for number in range(12)]}
    with gateway.client() as http:
        found = http.post("/v1/jobs:batch", json=document)
        assert (found.status_code, int(found.headers["retry-after"]) >= 1) == (202, True)
        told = found.json()["jobs"]
        accepted = [each for each in told if each["status"] == "accepted"]
        assert 1 <= len(accepted) < len(told) == 12
        assert {each["error"]["code"] for each in told if each["status"] == "refused"} == {"queue-full"}
        stack.worker.freeze()
        try:
            refused = [http.post("/v1/jobs:batch", json=document) for _ in range(2)][-1]
            assert (refused.status_code, refused.json()["type"]) == (503, "urn:penstock:problem:queue-full")
            assert int(refused.headers["retry-after"]) >= 1
        finally:
            stack.worker.thaw()
        for each in accepted:
            wait_until(lambda at=each["location"]: http.get(at).json()["status"] == "completed", 60, "it has ended")  # type: ignore[misc]


def test_a_webhook_must_be_https(http: httpx.Client):
    """The check of every client, with its status."""
    found = http.post("/v1/jobs", json=job(webhook="http://example.com/hook"))
    assert found.status_code == 422
    assert "https" in found.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/", 404), ("PUT", "/v1/jobs", 405), ("DELETE", "/v1/models/double", 405)],
)
def test_other_paths_and_methods(http: httpx.Client, method: str, path: str, status: int):
    """404 and 405 are problems, too; 405 says which methods there are."""
    found = http.request(method, path)
    assert found.status_code == status
    assert found.headers["content-type"] == "application/problem+json"
    assert ("allow" in found.headers) == (status == 405)


def test_a_full_queue_is_503(start_gateway: Any):
    """Retry-After comes from the rate at which the queue drains."""
    gateway = start_gateway(PENSTOCK_INFERENCE_QUEUE_MAX_DEPTH="1")
    with gateway.client() as http:
        found = [http.post("/v1/jobs", json=job("napper", [n, 3, 0, 0])) for n in range(6)]
        assert {each.status_code for each in found} == {202, 503}
        refused = next(each for each in found if each.status_code == 503)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["detail"].startswith("The queue is full")
        for each in found:
            if each.status_code == 202:
                location = each.headers["location"]
                wait_until(lambda at=location: http.get(at).json()["status"] == "completed", 60, "it has ended")  # type: ignore[misc]
