"""The Open Inference Protocol over gRPC, through Triton's own clients and by hand."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import numpy as np
import pytest

from penstock import Client
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.rpc.conftest import INFER, ROW, TWICE, Caller, infer_request
from tests.servers import require_module

ROWS = np.random.default_rng(0).standard_normal((3, 4), np.float32)


def given(triton: Any, rows: Any = ROWS, name: str = "x", datatype: str = "FP32") -> Any:
    """An input of Triton's client."""
    found = triton.InferInput(name, list(rows.shape), datatype)
    found.set_data_from_numpy(rows)
    return found


def test_tritons_client_works_unchanged(stack: GatewayStack):
    """Health, metadata, and inference with raw tensors, of a fixed version and of the active one."""
    triton = require_module("tritonclient.grpc")
    with triton.InferenceServerClient(stack.gateway.rpc) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("double")
        assert client.is_model_ready("double", "1")
        assert not client.is_model_ready("nothing")
        assert not client.is_model_ready("A name that no model can have")
        assert client.get_server_metadata().name == "penstock"
        metadata = client.get_model_metadata("double", "1", as_json=True)
        assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": ["-1", "4"]}]
        states = {model.name: model.state for model in client.get_model_repository_index().models}
        assert states["double"] == "READY"
        for version, outputs in (("", None), ("1", [triton.InferRequestedOutput("y")])):
            found = client.infer(
                "double", [given(triton)], version, outputs, request_id="7", priority=1, timeout=60_000_000
            )
            assert np.array_equal(found.as_numpy("y"), ROWS * 2)
            response = found.get_response()
            assert (response.id, response.model_name, response.model_version) == ("7", "double", "1")
        with pytest.raises(triton.InferenceServerException, match="model not found or not loaded") as refused:
            client.infer("nothing", [given(triton)])
        assert refused.value.status() == "StatusCode.NOT_FOUND"
        with pytest.raises(triton.InferenceServerException, match="Expected"):
            client.infer("double", [given(triton)], "9")


def test_tritons_asyncio_client_works_unchanged(stack: GatewayStack):
    """Many calls at a time get each their own answer; more than pass one by one."""
    triton = require_module("tritonclient.grpc.aio")

    async def ask() -> list[Any]:
        async with triton.InferenceServerClient(stack.gateway.rpc) as client:
            calls = [client.infer("double", [given(triton, ROWS + number)]) for number in range(64)]
            return [found.as_numpy("y") for found in await asyncio.gather(*calls)]

    for number, found in enumerate(asyncio.run(ask())):
        assert np.array_equal(found, (ROWS + number) * 2)


def test_tritons_client_sends_text(stack: GatewayStack):
    """BYTES tensors are text, of any length."""
    triton = require_module("tritonclient.grpc")
    with triton.InferenceServerClient(stack.gateway.rpc) as client:
        vector = client.infer("embedder", [given(triton, np.array(["abcd", "ä"], object), "text", "BYTES")])
        assert (vector.as_numpy("vector")[0] * 255).round().tolist() == [97, 98, 99, 100]


def test_tritons_client_streams(stack: GatewayStack):
    """ModelStreamInfer: answers in the order of the requests; a refused one is told, and those behind it go on."""
    triton = require_module("tritonclient.grpc")
    found: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(stack.gateway.rpc) as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        for number, model in enumerate(["double", "napper", "nothing", "double"]):
            client.async_stream_infer(model, [given(triton, ROWS[:1] + number)], request_id=str(number))
        answers = [found.get(timeout=180) for _ in range(4)]
        client.stop_stream()
    assert [result.get_response().id for result, _ in answers if result] == ["0", "1", "3"]
    assert np.array_equal(answers[3][0].as_numpy("y"), (ROWS[:1] + 3) * 2)
    assert "model not found or not loaded" in str(answers[2][1])


def test_a_model_that_streams_answers_with_each_chunk(stack: GatewayStack):
    """Chunks come as answers of one request; a parameter marks the last one, which has the outputs."""
    triton = require_module("tritonclient.grpc")
    found: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(stack.gateway.rpc) as client:
        client.start_stream(lambda result, error: found.put(result or error))
        client.async_stream_infer("counter", [given(triton, np.array([3]), "count", "INT64")])
        answers: list[Any] = []
        while not answers or not answers[-1].get_response().parameters["triton_final_response"].bool_param:
            answers.append(found.get(timeout=180))
        client.stop_stream()
    assert [name for answer in answers[:-1] for name in (each.name for each in answer.get_response().outputs)]
    assert len(answers) == 4
    assert answers[-1].as_numpy("total").tolist() == [3]


def test_chunks_that_are_gone_are_told(stack: GatewayStack, start_gateway: StartGateway):
    """A stream behind which the broker has dropped chunks ends with an error that does not speak of a new run."""
    triton = require_module("tritonclient.grpc")
    gateway, pattern = start_gateway(), "{counter}:job:*:events"
    found: queue.Queue[Any] = queue.Queue()
    with stack.server.client() as redis, triton.InferenceServerClient(gateway.rpc) as client:
        known = set(redis.scan_iter(pattern))
        client.start_stream(lambda result, error: found.put(error or result))
        delay = given(triton, np.array([50], np.float32), "delay_ms")
        client.async_stream_infer("counter", [given(triton, np.array([60]), "count", "INT64"), delay])
        found.get(timeout=180)
        gateway.freeze()
        try:
            (events,) = set(redis.scan_iter(pattern)) - known
            with Client(stack.server.url) as direct:
                direct.job(f"counter.{events.decode().split(':')[2]}").result(180)
            redis.xtrim(events, 1, approximate=False)
        finally:
            gateway.thaw()
        while not isinstance(last := found.get(timeout=180), Exception):
            assert not last.get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()
    assert "gone: The broker keeps chunks" in str(last)


def test_parameters_that_are_not_obeyed_are_refused(stack: GatewayStack):
    """As over REST: the error names them. The one that streams of Triton's client send is obeyed."""
    triton = require_module("tritonclient.grpc")
    found: queue.Queue[Any] = queue.Queue()
    classes, plain = [triton.InferRequestedOutput("y", class_count=2)], [triton.InferRequestedOutput("y")]
    with triton.InferenceServerClient(stack.gateway.rpc) as client:
        for names, outputs, more in (
            ("output: classification", classes, {}),
            ("request: sequence_end, sequence_id, sequence_start", plain, {"sequence_id": 5}),
            ("request: beam", plain, {"parameters": {"beam": 3}}),
        ):
            with pytest.raises(
                triton.InferenceServerException, match=f"Unknown parameters of the {names}. Expected"
            ) as e:
                client.infer("double", [given(triton)], outputs=outputs, **more)
            assert "INVALID_ARGUMENT" in e.value.status()
        client.start_stream(lambda result, error: found.put(result or error))
        client.async_stream_infer("double", [given(triton)], enable_empty_final_response=True)
        assert np.array_equal(found.get(timeout=180).as_numpy("y"), ROWS * 2)
        client.stop_stream()


def test_contents_are_answered_with_contents(rpc: Caller):
    """A request without raw bytes: values in the list of the datatype, both ways."""
    answer, trailing = rpc.call(INFER, infer_request())
    (output,) = answer.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("y", "FP32", [1, 4])
    assert list(output.contents.fp32_contents) == TWICE
    assert not answer.raw_output_contents
    assert trailing["penstock-model-version"] == "1"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"inputs": 0, "datatype": "FP99"}, "unknown datatype"),
        ({"inputs": 0, "shape": [1, -4]}, "an impossible shape"),
        ({"inputs": 0, "shape": [1 << 40, 1 << 40]}, "an impossible shape"),
        ({"inputs": 0, "shape": [2, 4]}, "Expected 8 in fp32_contents"),
        ({"inputs": 0, "datatype": "FP16"}, "Expected raw_input_contents"),
        ({"inputs": 0, "datatype": "INT32"}, "Expected 4 in int_contents"),
        ({"inputs": 0, "name": "z"}, "Expected inputs: x"),
        ({"raw_input_contents": [b"1234"]}, "Expected one of them"),
        ({"raw_input_contents": [b"", b""]}, "Expected one for each input"),
        ({"outputs": [{"name": "z"}]}, "Declared outputs: y"),
        ({"parameters": {"priority": {"string_param": "high"}}}, "Bad parameter priority"),
        ({"parameters": {"timeout": {"int64_param": -1}}}, "Bad parameter timeout"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_expected(rpc: Caller, change: dict[str, Any], text: str):
    """INVALID_ARGUMENT, and no job."""
    request = infer_request()
    if "inputs" in change:
        changed = {name: value for name, value in change.items() if name != "inputs"}
        request.inputs[0].ClearField(next(iter(changed)))
        request.inputs[0].MergeFrom(type(request.inputs[0])(**changed))
    else:
        request.MergeFrom(type(request)(**change))
    error = rpc.refusal(INFER, request)
    assert error.code().name == "INVALID_ARGUMENT"
    assert text in error.details()
    assert "penstock-job-id" not in dict(error.trailing_metadata())


def test_raw_bytes_must_fit(rpc: Caller):
    """Too few bytes, and contents left out."""
    request = infer_request()
    request.inputs[0].ClearField("contents")
    request.raw_input_contents.append(np.array(ROW[:3], "<f4").tobytes())
    error = rpc.refusal(INFER, request)
    assert error.code().name == "INVALID_ARGUMENT"
    assert "Expected those of datatype and shape" in error.details()
