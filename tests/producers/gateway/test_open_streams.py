"""The bound of event streams and WebSockets in one process: what comes beyond it is told when to come back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.texts import Site
from tests.servers import wait_until


def test_more_streams_than_may_be_open_are_refused(stack: GatewayStack, start_gateway: StartGateway):
    """server.max_streams: 503 with Retry-After, or the code 1013. A place that becomes free is given again."""
    gateway = start_gateway(PENSTOCK_INFERENCE_SERVER_MAX_STREAMS="2")
    address = f"{gateway.url.replace('http', 'ws')}/predict/stream"

    async def third() -> tuple[int, str]:
        async with connect(address) as socket:
            try:
                await socket.send("{")
                return 0, str(await socket.recv())
            except ConnectionClosed as closed:
                return (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd else (0, "")

    async def run(http: httpx.AsyncClient, location: str) -> None:
        async with connect(address) as socket:
            async with http.stream("GET", f"{location}/events") as events:
                lines = events.aiter_lines()  # kept: an iterator that is dropped closes its response
                assert await anext(lines)
                refused = await http.get(f"{location}/events")
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert refused.json()["detail"] == "2 streams are open in this process. Expected a retry after 1 s"
                assert await third() == (1013, refused.json()["detail"])
                # Those that are open go on.
                await socket.send("{")
                assert json.loads(await socket.recv())["type"] == "error"
            async with asyncio.timeout(60):
                while (await third())[0] == 1013:
                    await asyncio.sleep(0.05)

    async def client(location: str) -> None:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=180) as http:
            await run(http, location)

    stack.worker.freeze()  # the job cannot end before the test does
    try:
        with stack.gateway.client() as http:
            job = http.post("/v1/jobs", json={"model": "napper", "inputs": {"x": [[7, 3, 3, 3]]}})
        asyncio.run(client(job.headers["location"]))
    finally:
        stack.worker.thaw()
    with gateway.client() as http:
        wait_until(lambda: "penstock_http_streams 0.0" in http.get("/metrics").text, 60, "the places are free")


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/v1/completions", {"prompt": "the stream", "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 4}),
    ],
)
def test_a_stream_of_text_without_a_place_has_no_job(
    stack: GatewayStack, site: Site, start_gateway: StartGateway, path: str, document: dict[str, Any]
):
    """The place is taken before the job is submitted; a whole text needs none."""
    gateway = start_gateway(PENSTOCK_INFERENCE_SERVER_MAX_STREAMS="1")
    wish = {"model": "writer", "temperature": 0, **document}

    def jobs() -> set[bytes]:
        with stack.server.client() as redis:
            return set(redis.scan_iter("{writer}:job:*"))

    async def run() -> httpx.Response:
        async with (
            connect(f"{gateway.url.replace('http', 'ws')}/predict/stream"),
            httpx.AsyncClient(base_url=gateway.url, timeout=180) as http,
        ):
            assert (await http.post(path, json=wish)).status_code == 200
            before = jobs()
            refused = await http.post(path, json={**wish, "stream": True})
            assert jobs() == before
            return refused

    refused = asyncio.run(run())
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "1 streams are open" in refused.json()["error"]["message"]
    with gateway.client() as http:
        assert http.post(path, json={**wish, "stream": True}).status_code == 200
