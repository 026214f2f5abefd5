"""Requests of HTTP as Ray's proxy gives them to a deployment: those of Starlette, with a worker in memory."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from penstock import AsyncClient, Client, InvalidInput
from penstock.producers.ray_serve import RayServeWrapper, ray_serve
from tests.producers.ray_serve.conftest import X, counted, run
from tests.servers import require_module


def double(inputs: Any) -> dict[str, np.ndarray]:
    """What the worker in memory serves."""
    return {"y": np.asarray(inputs["x"]) * 2}


def asked(model: str, *bodies: bytes) -> list[httpx.Response]:
    """The answers of a wrapper to these bodies."""
    requests = require_module("starlette.requests")

    async def main() -> list[httpx.Response]:
        async with AsyncClient.in_memory({model: double}) as client:
            wrapper = RayServeWrapper(model, client=client)

            async def app(scope: Any, receive: Any, send: Any) -> None:
                answer = await wrapper(requests.Request(scope, receive))
                await answer(scope, receive, send)

            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica") as http:
                return [await http.post("/", content=body) for body in bodies]

    return run(main())


def test_a_request_gets_the_outputs(slot: str):
    """CF-055: inputs and priority come from the body; the call is counted as any other."""
    (found,) = asked(slot, b'{"inputs": {"x": [[1, 2, 4.5]]}, "priority": "high"}')
    assert (found.status_code, found.headers["content-type"]) == (200, "application/json")
    assert found.json() == {
        "model": slot,
        "outputs": {"y": {"dtype": "float64", "shape": [1, 3], "data": [[2.0, 4.0, 9.0]]}},
    }
    assert counted(slot) == {("high", "completed"): 1}


def test_a_wrong_request_gets_problem_details(slot: str):
    """Each error has its status and says what was expected; a caller names no tenant."""
    bodies = [
        b"\xff{",
        b'{"inputs": 5}',
        b'{"inputs": {"x": [[1]]}, "priority": "hgih"}',
        b'{"inputs": {"x": [[1]]}, "tenant": "acme"}',
    ]
    for found in asked(slot, *bodies):
        assert (found.status_code, found.headers["content-type"]) == (422, "application/problem+json")
        assert "Expected" in found.json()["detail"]
    assert counted(slot) == {("", "refused"): len(bodies)}


def test_a_blocking_function_takes_no_request(slot: str):
    """The body of a request is awaited: the error names the kind of function that can."""
    request = require_module("starlette.requests").Request({"type": "http", "headers": []})
    with Client.in_memory({slot: double}) as client:
        predict = ray_serve(slot, client=client)(double)
        with pytest.raises(InvalidInput, match="Expected a decorated coroutine function"):
            predict(request)
        assert "y" in predict({"x": X})
    assert counted(slot) == {("", "refused"): 1, ("normal", "completed"): 1}
