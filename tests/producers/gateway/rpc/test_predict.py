"""InferenceService: plain numbers, in single calls and in streams both ways."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from penstock.producers.gateway.rpc.messages import message
from tests.producers.gateway.rpc.conftest import PATIENCE_S, PREDICT, ROW, TWICE, Caller, predict_request

STREAM = "/inference.InferenceService/PredictStream"


def stream(rpc: Caller, requests: Iterator[Any], **options: Any) -> Any:
    """The call of PredictStream."""
    method = rpc.channel.stream_stream(
        STREAM,
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=message("PredictResponse").FromString,
    )
    return method(requests, timeout=PATIENCE_S, wait_for_ready=True, **options)


def test_predict_answers_a_row(rpc: Caller):
    """CX-035: inputs=1, model_version=2 -> predictions=1, model_version=2, latency_ms=3."""
    answer, trailing = rpc.call(PREDICT, predict_request(model_version="1"))
    assert list(answer.predictions) == TWICE
    assert (answer.model_version, trailing["penstock-model-version"]) == ("1", "1")
    assert answer.latency_ms > 0
    assert trailing["server-timing"].startswith("queue;dur=")
    numbers = {field.name: field.number for field in answer.DESCRIPTOR.fields}
    assert numbers == {"predictions": 1, "model_version": 2, "latency_ms": 3}


@pytest.mark.parametrize(
    ("request_of", "text"),
    [
        (lambda: predict_request([]), "Expected rows of 1 to 10000 numbers each"),
        (lambda: predict_request([1.0] * 10_001), "Expected rows of 1 to 10000 numbers each"),
        (lambda: predict_request([1.0]), "Expected"),
        (lambda: predict_request([float("nan")] * 4), "Expected"),
        (lambda: predict_request(model=""), "models are served. Expected model with the name of one"),
        (lambda: predict_request(model="embedder"), "takes other inputs than one row of numbers"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rpc: Caller, request_of: Any, text: str):
    """INVALID_ARGUMENT with what was expected."""
    error = rpc.refusal(PREDICT, request_of())
    assert error.code().name == "INVALID_ARGUMENT"
    assert text in error.details()


def test_a_stream_answers_in_the_order_of_its_requests(rpc: Caller):
    """More requests than are worked on at a time, of a fast and of a slow model in turns."""
    models = itertools.cycle(["napper", *["double"] * 39])
    requests = (predict_request([number, 1, 1, 1], next(models)) for number in range(80))
    answers = [answer.predictions[0] for answer in stream(rpc, requests)]
    assert answers == [2.0 * number for number in range(80)]


def test_answers_do_not_wait_for_the_end_of_the_requests(rpc: Caller):
    """Both ways at once: a client that sends its next request when it has the last answer."""
    received: queue.Queue[float] = queue.Queue()

    def requests() -> Iterator[Any]:
        last = 1.0
        for _ in range(3):
            yield predict_request([last, 0, 0, 0])
            last = received.get(timeout=180)

    answers = []
    for answer in stream(rpc, requests()):
        answers.append(answer.predictions[0])
        received.put(answer.predictions[0])
    assert answers == [2.0, 4.0, 8.0]


def test_a_refused_request_ends_the_stream_with_its_status(rpc: Caller):
    """The answers before it arrive."""
    call = stream(rpc, iter([predict_request(ROW), predict_request([1.0]), predict_request(ROW)]))
    assert list(next(call).predictions) == TWICE
    with pytest.raises(grpc.RpcError):
        next(call)
    assert call.code().name == "INVALID_ARGUMENT"
    assert "Expected" in call.details()


def test_a_stream_has_no_idempotency_key(rpc: Caller):
    """It names one job, and a stream has several."""
    call = stream(rpc, iter([predict_request()]), metadata=[("idempotency-key", "k")])
    with pytest.raises(grpc.RpcError):
        next(call)
    assert call.code().name == "INVALID_ARGUMENT"
