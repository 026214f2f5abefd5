"""Streams deliver before the end: the first chunk is with the client while the model still works."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import connect

from penstock.producers.gateway.rpc.messages import message
from tests.producers.gateway.conftest import GatewayStack
from tests.producers.gateway.rpc.conftest import PATIENCE_S, Caller
from tests.producers.gateway.test_one_job import ENDLESS
from tests.producers.gateway.texts import Site
from tests.servers import wait_until

TEXT = {"model": "writer", "stream": True, "ignore_eos": True, "temperature": 0}
TEXTS = {
    "/v1/completions": {**TEXT, "prompt": "abc", "max_tokens": 200},
    "/v1/chat/completions": {**TEXT, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 200},
    "/v1/responses": {**TEXT, "input": "abc", "max_output_tokens": 200},
}


def data_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The data of server-sent events."""
    return (json.loads(line[6:]) for line in lines if line.startswith("data: {"))


def test_events_of_a_job(http: httpx.Client):
    """Server-sent events of a model that counts until it is cancelled; then the stream ends."""
    location = http.post("/v1/jobs", json=ENDLESS).headers["location"]
    chunks = []
    with http.stream("GET", f"{location}/events") as stream:
        for event in data_of(stream.iter_lines()):
            chunks += [event["outputs"]["value"]["data"]] if event["type"] == "chunk" else []
            if len(chunks) == 3 and event["type"] == "chunk":
                with httpx.Client(base_url=http.base_url) as other:
                    assert other.delete(location).json()["status"] == "requested"
    assert chunks[:3] == [[1], [2], [3]]
    assert event["type"] == "cancelled"


def test_messages_of_a_websocket(stack: GatewayStack):
    """Of a model that counts until it is cancelled."""

    async def run() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        address = f"{stack.gateway.url.replace('http', 'ws')}/predict/stream"
        async with asyncio.timeout(120), connect(address) as connection:
            await connection.send(json.dumps({"id": 1, **ENDLESS}))
            while [each["type"] for each in found].count("chunk") < 3:
                found.append(json.loads(await connection.recv()))
            await connection.send(json.dumps({"cancel": 1}))
            while found[-1]["type"] in ("chunk", "progress"):
                found.append(json.loads(await connection.recv()))
        return found

    found = asyncio.run(run())
    assert [each["outputs"]["value"]["data"] for each in found if each["type"] == "chunk"][:3] == [[1], [2], [3]]
    assert found[-1]["type"] == "cancelled"


def test_answers_of_grpc(stack: GatewayStack):
    """ModelStreamInfer of a model that counts until its call is cancelled."""
    request = message("ModelInferRequest")(model_name="counter")
    for name, datatype, value in (("count", "INT64", np.int64(1_000_000)), ("delay_ms", "FP32", np.float32(10))):
        request.inputs.add(name=name, datatype=datatype, shape=[1])
        request.raw_input_contents.append(value.tobytes())
    caller, kind = Caller(stack.gateway.rpc), message("ModelStreamInferResponse")
    call = caller.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    answers = call(iter([request.SerializeToString()]), PATIENCE_S)
    values = [
        np.frombuffer(kind.FromString(next(answers)).infer_response.raw_output_contents[0], "<i8") for _ in range(3)
    ]
    answers.cancel()
    caller.channel.close()
    assert [each.tolist() for each in values] == [[1], [2], [3]]


@pytest.mark.parametrize("path", TEXTS)
def test_tokens_of_a_text(site: Site, path: str):
    """The job of an OpenAI stream still runs when the first piece of its text has come.

    A fast machine may have written it all, so that the test tries several times; a stream that is held back never
    passes.
    """

    def is_delivered_early() -> bool:
        with site.gateway.client() as http, http.stream("POST", path, json=TEXTS[path]) as answer:
            assert answer.status_code == 200
            job_id = answer.headers["penstock-job-id"]
            assert any(_text_of(event) for event in data_of(answer.iter_lines()))
            site.worker.freeze()
            try:
                status = http.get(f"/v1/jobs/{job_id}").json()["status"]
            finally:
                site.worker.thaw()
        return bool(status == "running")

    wait_until(is_delivered_early, 60, "the first piece comes while the job runs")


def _text_of(event: dict[str, Any]) -> str:
    """The piece of text in an event of any of the three streams."""
    if "choices" not in event:
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
    (choice,) = event["choices"]
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""
