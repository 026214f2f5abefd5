"""What every call has in common: metadata, keys, cancellation, deadlines, bounds, figures, and bytes of any kind."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from penstock import Client
from penstock.producers.gateway.rpc.messages import message
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.rpc.conftest import (
    INFER,
    PATIENCE_S,
    PREDICT,
    ROW,
    TWICE,
    Caller,
    infer_request,
    predict_request,
)
from tests.servers import wait_until

MIB = 1024 * 1024


def test_a_job_has_one_id_behind_every_protocol(stack: GatewayStack, rpc: Caller, http: httpx.Client):
    """The trailing metadata of a call names the job, which HTTP and Python show."""
    _, trailing = rpc.call(INFER, infer_request())
    job_id = trailing["penstock-job-id"]
    assert http.get(f"/v1/jobs/{job_id}").json()["outputs"]["y"]["data"] == [TWICE]
    assert len(trailing["penstock-content-hash"]) == 64
    with Client(stack.server.url) as client:
        assert client.job(job_id).result(180)["y"].tolist() == [TWICE]


def test_a_key_names_one_job(rpc: Caller):
    """idempotency-key: the same job for the same inputs; ALREADY_EXISTS for others; out of grammar is refused."""
    key = [("idempotency-key", '"a call"')]
    first, second = (rpc.call(INFER, infer_request(), metadata=key)[1]["penstock-job-id"] for _ in range(2))
    assert first == second
    assert rpc.refusal(INFER, infer_request(rows=[[9.0] * 4]), metadata=key).code().name == "ALREADY_EXISTS"
    for bad in ("", "x" * 256, "a,b"):
        error = rpc.refusal(INFER, infer_request(), metadata=[("idempotency-key", bad)])
        assert error.code().name == "INVALID_ARGUMENT"
        assert "Expected" in error.details()


def test_a_failed_model_tells_its_job_and_no_more(rpc: Caller):
    """The text of the model's exception is for operators."""
    error = rpc.refusal(INFER, infer_request("raiser", [[-1.0, 0, 0, 0]]))
    trailing = dict(error.trailing_metadata())
    assert (error.code().name, trailing["penstock-problem"]) == ("INTERNAL", "model-error")
    assert "negative" not in error.details()
    assert trailing["penstock-job-id"]


_numbers = itertools.count()


@pytest.fixture
def frozen(stack: GatewayStack) -> Iterator[None]:
    """The worker answers nothing until the test ends, and has claimed a job: further ones stay in the queue."""
    stack.worker.freeze()
    try:
        with Client(stack.server.url) as client:
            job = client.submit("napper", {"x": [[next(_numbers), 6, 5, 5]]})
            yield
            stack.worker.thaw()
            job.result(180)
    finally:
        stack.worker.thaw()


def jobs(stack: GatewayStack) -> set[str]:
    """The ids of napper's jobs."""
    with stack.server.client() as redis:
        keys = set(redis.scan_iter("{napper}:job:*", count=10_000))
        return {f"napper.{key.decode().rpartition(':')[2]}" for key in keys if not key.endswith(b":events")}


def status(stack: GatewayStack, job_id: str) -> str:
    """Of a job."""
    with Client(stack.server.url) as client:
        return client.job(job_id).status()


@pytest.mark.usefixtures("frozen")
def test_a_cancelled_call_cancels_its_job(stack: GatewayStack, rpc: Caller):
    """Nobody else waits for it."""
    before = jobs(stack)
    call = rpc.channel.unary_unary(INFER).future(infer_request("napper", [[1, 5, 5, 5]]).SerializeToString())
    wait_until(lambda: jobs(stack) > before, 60, "the job is accepted")
    (job_id,) = jobs(stack) - before
    assert status(stack, job_id) == "queued"
    call.cancel()
    wait_until(lambda: status(stack, job_id) == "cancelled", 60, "the job is cancelled")


@pytest.mark.usefixtures("frozen")
def test_a_deadline_of_the_call_is_one_of_the_job(stack: GatewayStack, rpc: Caller):
    """The client gets DEADLINE_EXCEEDED, and the job never runs."""
    before = jobs(stack)
    call = rpc.channel.unary_unary(INFER).future(
        infer_request("napper", [[2, 5, 5, 5]]).SerializeToString(), timeout=2, wait_for_ready=True
    )
    wait_until(lambda: call.done() or jobs(stack) > before, 60, "the job is accepted")
    assert call.code().name == "DEADLINE_EXCEEDED"
    for job_id in jobs(stack) - before:
        wait_until(lambda: status(stack, job_id) in ("cancelled", "expired"), 60, "the job ends")  # noqa: B023 - at once


@pytest.mark.usefixtures("frozen")
def test_a_timeout_of_the_request_is_one_of_the_job(rpc: Caller):
    """Triton's `timeout`, in microseconds, in which the job may wait in the queue."""
    request = infer_request("napper", [[3, 5, 5, 5]])
    request.parameters["timeout"].int64_param = 1000
    error = rpc.refusal(INFER, request)
    assert (error.code().name, dict(error.trailing_metadata())["penstock-problem"]) == ("DEADLINE_EXCEEDED", "expired")


def test_a_message_that_is_too_long_is_refused(rpc: Caller):
    """max_request_size_mb, also for one that is short while it is compressed; others are answered meanwhile."""
    request = infer_request()
    request.raw_input_contents.append(bytes(10 * MIB + 1))
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        error = rpc.refusal(INFER, request, compression=compression)
        assert error.code().name == "RESOURCE_EXHAUSTED"
    assert list(rpc.call(PREDICT, predict_request())[0].predictions) == TWICE


def test_more_calls_than_may_wait_are_refused(
    stack: GatewayStack, frozen: None, start_gateway: StartGateway, open_caller: Any
):
    """server.max_waiting: RESOURCE_EXHAUSTED at once, with the time of the next try, and no job.

    CX-036: further calls of the same connection wait in the client.
    """
    gateway = start_gateway(PENSTOCK_INFERENCE_SERVER_MAX_WAITING="2")
    before = jobs(stack)
    infer = open_caller(gateway.rpc).channel.unary_unary(INFER)
    requests = [infer_request("napper", [[number, 4, 4, 4]]).SerializeToString() for number in range(3)]
    waiting = [infer.future(request, timeout=PATIENCE_S, wait_for_ready=True) for request in requests]
    wait_until(lambda: len(jobs(stack) - before) == 2, 60, "two calls wait")
    error = open_caller(gateway.rpc).refusal(INFER, infer_request("napper", [[9, 4, 4, 4]]))
    trailing = dict(error.trailing_metadata())
    assert error.code().name == "RESOURCE_EXHAUSTED"
    assert (trailing["penstock-problem"], trailing["retry-after"]) == ("queue-full", "1")
    assert len(jobs(stack) - before) == 2
    stack.worker.thaw()
    assert [bool(each.result()) for each in waiting] == [True] * 3


def test_calls_are_counted(stack: GatewayStack, rpc: Caller, http: httpx.Client):
    """By method and code, and their time by method."""

    def counted(code: str) -> float:
        families = text_string_to_metric_families(http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        wanted = {"method": PREDICT, "code": code}
        return sum(s.value for s in samples if s.name == "penstock_grpc_calls_total" and s.labels == wanted)

    before = counted("OK"), counted("INVALID_ARGUMENT")
    rpc.call(PREDICT, predict_request())
    rpc.refusal(PREDICT, predict_request([]))
    assert (counted("OK"), counted("INVALID_ARGUMENT")) == (before[0] + 1, before[1] + 1)
    assert f'penstock_grpc_seconds_count{{method="{PREDICT}"}}' in http.get("/metrics").text


GOOD = infer_request().SerializeToString()
RAW = np.array([ROW], "<f4").tobytes()
datatypes = st.sampled_from(["FP32", "FP16", "FP64", "INT8", "UINT64", "INT64", "BOOL", "BYTES", "x", ""])
inputs = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "x", "text", "", "é"]),
        "datatype": datatypes,
        "shape": st.lists(st.sampled_from([0, 1, 1, 4, -1, 3, 1 << 40, -(1 << 63)]), max_size=10),
    },
    optional={
        "contents": st.sampled_from(
            [{"fp32_contents": ROW}, {"int_contents": [300] * 4}, {"bytes_contents": [b"a", b"\xff"]}, {}]
        )
    },
)
parameters = st.dictionaries(
    st.sampled_from(["priority", "timeout", "x"]),
    st.sampled_from([{"int64_param": -1}, {"uint64_param": (1 << 64) - 1}, {"string_param": "é"}, {}]),
    max_size=2,
)
requests = st.fixed_dictionaries(
    {
        "model_name": st.sampled_from(["double", "double", "embedder", "", "é", "x" * 300, "a/b"]),
        "inputs": st.lists(inputs, max_size=3),
        "raw_input_contents": st.lists(st.sampled_from([b"", RAW, RAW[:3], b"\x04\0\0\0abcd"]), max_size=3),
    },
    optional={"model_version": st.sampled_from(["1", "2", "é"]), "parameters": parameters},
)


_REFUSALS = ("INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED", "OUT_OF_RANGE")


def mutated(data: bytes, place: int, value: int) -> bytes:
    """One byte is another one."""
    place %= len(data)
    return data[:place] + bytes([value]) + data[place + 1 :]


messages = st.one_of(
    requests.map(lambda fields: message("ModelInferRequest")(**fields).SerializeToString()),
    st.binary(max_size=100),
    st.builds(mutated, st.just(GOOD), st.integers(0, 1000), st.integers(0, 255)),
)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=messages)
def test_no_message_breaks_the_gateway(stack: GatewayStack, rpc: Caller, data: bytes):
    """0 answers of INTERNAL or UNKNOWN, and what was expected in each refusal."""
    if (error := rpc.refused(INFER, data)) is not None:
        assert error.code().name in _REFUSALS, error.details()
        assert re.search("Expected|Declared|expected|not found", error.details()), error.details()


def test_no_mistake_was_logged(stack: GatewayStack):
    """By any test of this file before this one."""
    assert "call failed" not in stack.gateway.output.read_text()
    assert json.loads(httpx.get(f"{stack.gateway.url}/health/ready").text)["ready"]
