"""The Open Inference Protocol, through Triton's own client and by hand."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest

from penstock import Client
from penstock.registry.queues import MODELS_KEY
from tests.producers.conftest import announce
from tests.producers.gateway.conftest import GatewayStack
from tests.servers import require_module

ROW = [1.0, 2.0, 3.0, 4.5]
TWICE = [2.0, 4.0, 6.0, 9.0]
INFER = "/v2/models/double/infer"
INPUT = {"name": "x", "shape": [1, 4], "datatype": "FP32"}


def test_tritons_client_works_unchanged(stack: GatewayStack):
    """Health, metadata, and inference with binary tensors and with JSON, of a fixed version and of the active one."""
    triton = require_module("tritonclient.http")
    client = triton.InferenceServerClient(stack.gateway.url.removeprefix("http://"))
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("double")
    assert client.get_server_metadata()["name"] == "penstock"
    metadata = client.get_model_metadata("double", "1")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert {model["name"]: model["state"] for model in client.get_model_repository_index()}["double"] == "READY"
    rows = np.random.default_rng(0).standard_normal((3, 4), np.float32)
    for is_binary in (True, False):
        given = triton.InferInput("x", [3, 4], "FP32")
        given.set_data_from_numpy(rows, binary_data=is_binary)
        wanted = [triton.InferRequestedOutput("y", binary_data=is_binary)]
        for outputs in (wanted, None):
            found = client.infer("double", [given], outputs=outputs, request_id="7", priority=1, timeout=60_000_000)
            assert np.array_equal(found.as_numpy("y"), rows * 2)
            response = found.get_response()
            assert (response["id"], response["model_name"], response["model_version"]) == ("7", "double", "1")
    with pytest.raises(triton.InferenceServerException, match="model not found or not loaded"):
        client.infer("nothing", [given])
    client.close()


def test_tritons_client_sends_text(stack: GatewayStack):
    """BYTES tensors are text, of any length."""
    triton = require_module("tritonclient.http")
    client = triton.InferenceServerClient(stack.gateway.url.removeprefix("http://"))
    given = triton.InferInput("text", [2], "BYTES")
    given.set_data_from_numpy(np.array(["abcd", "ä"], object))
    vector = client.infer("embedder", [given]).as_numpy("vector")
    assert (vector[0] * 255).round().tolist() == [97, 98, 99, 100]
    client.close()


def test_tritons_other_ways_to_infer(stack: GatewayStack):
    """`async_infer` of the plain client, several at a time, and the client for asyncio."""
    triton, aio = require_module("tritonclient.http"), require_module("tritonclient.http.aio")
    address = stack.gateway.url.removeprefix("http://")
    rows = [np.full((2, 4), number, np.float32) for number in range(4)]
    with triton.InferenceServerClient(address, concurrency=4) as client:
        begun = [client.async_infer("double", [_given(triton, each)]) for each in rows]
        for given, each in zip(rows, begun, strict=True):
            assert np.array_equal(each.get_result().as_numpy("y"), given * 2)
        failed = client.async_infer("nothing", [_given(triton, rows[0])])
        with pytest.raises(triton.InferenceServerException, match="model not found or not loaded"):
            failed.get_result()

    async def ask() -> list[Any]:
        async with aio.InferenceServerClient(address) as client:
            assert await client.is_model_ready("double")
            found = await asyncio.gather(*(client.infer("double", [_given(aio, each)]) for each in rows))
            return [each.as_numpy("y") for each in found]

    for given, output in zip(rows, asyncio.run(ask()), strict=True):
        assert np.array_equal(output, given * 2)


def test_the_index_lists_ready_models_only_where_that_is_asked(stack: GatewayStack, http: httpx.Client):
    """The extension of Triton: `{"ready": true}`. Without a body, all; a body that is no JSON is refused."""
    announce(stack.server, "unserved")
    try:
        names = {
            body: {each["name"] for each in http.post("/v2/repository/index", content=body).json()}
            for body in (b"", b"{}", b'{"ready": false}', b'{"ready": true}')
        }
    finally:
        with stack.server.client() as redis:
            redis.srem(MODELS_KEY, "unserved")
            redis.delete(*redis.scan_iter("{unserved}:*"))
    assert names[b""] == names[b"{}"] == names[b'{"ready": false}'] == {*names[b'{"ready": true}'], "unserved"}
    assert "unserved" not in names[b'{"ready": true}']
    assert http.post("/v2/repository/index", content=b"not json").status_code == 422


def test_parameters_that_are_not_obeyed_are_refused(stack: GatewayStack):
    """Classification, sequences, shared memory and parameters of one's own: the error names them; there is no job."""
    triton = require_module("tritonclient.http")
    given, plain = _given(triton, np.zeros((1, 4), np.float32)), [triton.InferRequestedOutput("y")]
    shared_input, shared_output = triton.InferInput("x", [1, 4], "FP32"), triton.InferRequestedOutput("y")
    shared_input.set_shared_memory("region", 16)
    shared_output.set_shared_memory("region", 16)
    with (
        triton.InferenceServerClient(stack.gateway.url.removeprefix("http://")) as client,
        stack.server.client() as redis,
    ):
        before = set(redis.scan_iter("*:job:*"))
        for names, inputs, outputs, more in (
            ("output: classification", [given], [triton.InferRequestedOutput("y", class_count=2)], {}),
            ("request: sequence_end, sequence_id, sequence_start", [given], plain, {"sequence_id": 5}),
            ("input: shared_memory_byte_size, shared_memory_region", [shared_input], plain, {}),
            ("output: shared_memory_byte_size, shared_memory_region", [given], [shared_output], {}),
            ("request: beam", [given], plain, {"parameters": {"beam": 3}}),
        ):
            with pytest.raises(
                triton.InferenceServerException, match=f"Unknown parameters of the {names}. Expected"
            ) as e:
                client.infer("double", inputs, outputs=outputs, **more)
            assert e.value.status() == "422"
        assert set(redis.scan_iter("*:job:*")) == before


def test_extensions_that_are_not_here_are_404_in_the_protocols_shape(stack: GatewayStack):
    """Triton's client reads the reason, which says where the routes are listed."""
    triton = require_module("tritonclient.http")
    with triton.InferenceServerClient(stack.gateway.url.removeprefix("http://")) as client:
        for call in (
            lambda: client.get_inference_statistics("double"),
            lambda: client.get_model_config("double"),
            lambda: client.get_trace_settings(),
            lambda: client.load_model("double"),
        ):
            with pytest.raises(triton.InferenceServerException, match=r"no such path\. Expected one of") as missing:
                call()
            assert missing.value.status() == "404"


@pytest.mark.parametrize("data", [ROW, [ROW], [[1, 2], [3, 4.5]]])
def test_data_may_be_flat_or_nested(http: httpx.Client, data: list[Any]):
    """Values are in row-major order, however they are nested."""
    found = http.post(INFER, json={"inputs": [{**INPUT, "data": data}]})
    assert found.json()["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 4], "data": TWICE}]


def test_binary_outputs_are_behind_the_json(http: httpx.Client):
    """Inference-Header-Content-Length tells where the bytes begin, both ways."""
    raw = np.array(ROW, "<f4").tobytes()
    request = {
        "inputs": [{**INPUT, "parameters": {"binary_data_size": 16}}],
        "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
    }
    head = json.dumps(request).encode()
    found = http.post(INFER, content=head + raw, headers={"Inference-Header-Content-Length": str(len(head))})
    assert found.status_code == 200, found.text
    length = int(found.headers["inference-header-content-length"])
    assert json.loads(found.content[:length])["outputs"][0]["parameters"] == {"binary_data_size": 16}
    assert np.frombuffer(found.content[length:], "<f4").tolist() == TWICE


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"data": ROW, "parameters": {"binary_data_size": 0}}, "found both or none"),
        ({}, "found both or none"),
        ({"data": ROW[:3]}, "Expected 4 of FP32"),
        ({"data": ["1", 2, 3, 4]}, "Expected 4 of FP32"),
        ({"data": [True, 2, 3, 4]}, "Expected 4 of FP32"),
        ({"data": [[[[[[[[[[1]]]]]]]]]]}, "nested too deeply"),
        ({"data": ROW, "datatype": "BF16"}, "an unknown datatype"),
        ({"data": ROW, "shape": [-1, 4]}, "an impossible shape"),
        ({"data": ROW, "shape": [1 << 40, 1 << 40]}, "an impossible shape"),
        ({"parameters": {"binary_data_size": 17}}, "bad binary_data_size"),
        ({"data": ROW, "name": "z"}, "Missing required input"),
    ],
)
def test_bad_tensors_are_422_in_the_protocols_shape(http: httpx.Client, given: dict[str, Any], expected: str):
    """An error is {"error": text}, and the text says what was expected."""
    found = http.post(INFER, json={"inputs": [{**INPUT, **given}]})
    assert found.status_code == 422, found.text
    assert found.json().keys() == {"error"}
    assert expected in found.json()["error"]


@pytest.mark.parametrize("length", ["-1", "9" * 30, "x", "1000"])
def test_a_wrong_length_of_the_head_is_422(http: httpx.Client, length: str):
    """The head must lie inside the body."""
    found = http.post(INFER, content=b"{}", headers={"Inference-Header-Content-Length": length})
    assert found.status_code == 422


def test_a_compressed_body_is_415(http: httpx.Client):
    """Nothing is unpacked here, so that a small body cannot become a large one."""
    assert http.post(INFER, content=b"x", headers={"Content-Encoding": "gzip"}).status_code == 415


@pytest.mark.parametrize(
    "parameters", [{"priority": "high"}, {"priority": -1}, {"timeout": -1}, {"timeout": 0.5}, {"timeout": 10**400}]
)
def test_bad_parameters_are_422(http: httpx.Client, parameters: dict[str, Any]):
    """priority and timeout are whole numbers."""
    found = http.post(INFER, json={"inputs": [{**INPUT, "data": ROW}], "parameters": parameters})
    assert found.status_code == 422


def test_metadata_names_the_extensions_that_work(http: httpx.Client):
    """The server's: bytes behind the JSON, priorities and time-outs, and the index, as the tests of this file use
    them. A model's has its platform and its versions."""
    server = http.get("/v2").json()
    assert (server["name"], server["extensions"]) == (
        "penstock",
        ["binary_tensor_data", "schedule_policy", "model_repository"],
    )
    for path in ("/v2/models/double", "/v2/models/double/versions/1"):
        model = http.get(path).json()
        assert (model["name"], model["platform"], "1" in model["versions"]) == ("double", "penstock_python", True)
        assert model["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}]


def test_routes_of_a_version(http: httpx.Client):
    """They answer for that version, and for no other one: an unknown one is 404 in the protocol's shape."""
    request = {"inputs": [{**INPUT, "data": ROW}]}
    assert http.get("/v2/models/double/versions/1/ready").json() == {"name": "double", "ready": True}
    infer = "/v2/models/double/versions/1/infer"
    assert http.post(infer, json=request).json()["model_version"] == "1"
    for method, path in (
        *(("GET", "/v2/models/double/versions/9"), ("GET", "/v2/models/double/versions/9/ready")),
        *(("POST", "/v2/models/double/versions/9/infer"), ("GET", "/v2/models/nothing/ready")),
    ):
        found = http.request(method, path, json=request if method == "POST" else None)
        assert (found.status_code, found.json().keys()) == (404, {"error"}), path


def test_timeout_bounds_the_wait_in_the_queue(stack: GatewayStack, http: httpx.Client):
    """Microseconds: the job expires and never runs; 0 is none."""
    request = {"inputs": [{**INPUT, "data": ROW}]}
    with Client(stack.server.url) as client:
        running = client.submit_many("napper", [{"x": [[n, 5, 0, 2]]} for n in range(3)])
        found = http.post("/v2/models/napper/infer", json={**request, "parameters": {"timeout": 1000}})
        assert found.status_code == 504
        assert client.job(found.headers["penstock-job-id"]).status() == "expired"
        for each in running:
            each.result(180)
    assert http.post(INFER, json={**request, "parameters": {"timeout": 0}}).status_code == 200


def _given(triton: Any, rows: Any) -> Any:
    """The input `x` of Triton's client."""
    given = triton.InferInput("x", list(rows.shape), "FP32")
    given.set_data_from_numpy(rows)
    return given
