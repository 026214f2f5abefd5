"""Every answer about an ended job tells its id, the model's version and content hash, and the job's times."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.producers.gateway.conftest import GatewayStack
from tests.producers.gateway.rpc.conftest import INFER, PREDICT, Caller, infer_request, predict_request
from tests.producers.gateway.test_jobs import ROW, job
from tests.producers.gateway.texts import Site

TIMES = re.compile(r"queue;dur=\d+\.\d{3}, batch;dur=\d+\.\d{3}, compute;dur=\d+\.\d{3}")
INPUTS = {"inputs": {"x": [ROW]}}
OIP = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": ROW}]}
TEXT = {"model": "writer", "max_tokens": 4}
ROUTES: list[tuple[str, str, dict[str, Any]]] = [
    ("double", "/v1/jobs", job()),
    ("double", "/v1/models/double:predict", INPUTS),
    ("double", "/v1/models/double/versions/1:predict", INPUTS),
    ("double", "/predict?model=double", {"inputs": ROW}),
    ("double", "/predict/batch?model=double", {"batch": [ROW, ROW]}),
    ("double", "/v2/models/double/infer", OIP),
    ("double", "/v2/models/double/versions/1/infer", OIP),
    ("embedder", "/v1/embeddings", {"model": "embedder", "input": "abcd"}),
    ("writer", "/v1/completions", {**TEXT, "prompt": "a"}),
    ("writer", "/v1/chat/completions", {**TEXT, "messages": [{"role": "user", "content": "a"}]}),
    ("writer", "/v1/responses", {"model": "writer", "input": "a", "max_output_tokens": 4}),
]
FAILING: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/models/raiser:predict", {"inputs": {"x": [[-1.0, 0, 0, 0]]}}, 502),
    ("/predict?model=raiser", {"inputs": [-1.0, 0, 0, 0]}, 502),
    ("/v2/models/raiser/infer", {"inputs": [{**OIP["inputs"][0], "data": [-1.0, 0, 0, 0]}]}, 502),
]


def check(headers: Any, model: str, http: httpx.Client) -> str:
    """The id of the job, whose facts the headers tell."""
    job_id: str = headers["penstock-job-id"]
    assert job_id.startswith(f"{model}.")
    assert headers["penstock-model-version"] == "1"
    assert headers["penstock-content-hash"] == http.get(f"/v1/models/{model}").json()["content_hash"]
    assert TIMES.fullmatch(headers["server-timing"])
    shown = http.get(f"/v1/jobs/{job_id}")
    assert shown.json()["status"] in ("completed", "failed")
    # The times are those of the job, and not of the request.
    names = ("penstock-job-id", "penstock-model-version", "penstock-content-hash", "server-timing")
    assert [shown.headers[name] for name in names] == [headers[name] for name in names]
    return job_id


@pytest.mark.parametrize(("model", "path", "document"), ROUTES, ids=[path for _, path, _ in ROUTES])
def test_routes_of_jobs(http: httpx.Client, site: Site, model: str, path: str, document: dict[str, Any]):
    """All routes that answer with outputs; the same headers are on the job itself and on its response."""
    with site.gateway.client() as of_texts:
        client = of_texts if model == "writer" else http
        answer = client.post(path, json=document, headers={"Prefer": "wait=60"})
        assert answer.status_code == 200, answer.text
        job_id = check(answer.headers, model, http)
        if path == "/v1/responses":
            again = client.get(f"/v1/responses/{answer.json()['id']}")
            assert check(again.headers, model, http) == job_id


@pytest.mark.parametrize(("path", "document", "status"), FAILING)
def test_failed_jobs(http: httpx.Client, path: str, document: dict[str, Any], status: int):
    """An error has them, too."""
    answer = http.post(path, json=document)
    assert answer.status_code == status, answer.text
    check(answer.headers, "raiser", http)


@pytest.mark.parametrize(("method", "request_of"), [(INFER, infer_request), (PREDICT, predict_request)])
def test_trailing_metadata(stack: GatewayStack, http: httpx.Client, method: str, request_of: Any):
    """Of gRPC's unary calls."""
    caller = Caller(stack.gateway.rpc)
    _, trailing = caller.call(method, request_of())
    caller.channel.close()
    check(trailing, "double", http)


def test_streams_and_pending_jobs_name_their_job(http: httpx.Client, site: Site):
    """Their head is sent before the job ends: it has the id alone."""
    accepted = http.post("/v1/jobs", json=job())
    job_id = accepted.json()["id"]
    with http.stream("GET", f"/v1/jobs/{job_id}/events") as events, site.gateway.client() as texts:
        document = {**TEXT, "prompt": "a", "stream": True}
        with texts.stream("POST", "/v1/completions", json=document) as pieces:
            assert pieces.headers["penstock-job-id"].startswith("writer.")
            for headers in (accepted.headers, events.headers, pieces.headers):
                assert not {"penstock-model-version", "penstock-content-hash", "server-timing"} & headers.keys()
            pieces.read()
        events.read()
    assert events.headers["penstock-job-id"] == job_id
