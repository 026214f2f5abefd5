"""The application without a server: mounted in another one, and its event streams in detail."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from penstock import AsyncClient
from penstock.producers.gateway.application import Gateway
from penstock.registry.settings import Settings
from tests.producers.gateway.conftest import GatewayStack
from tests.servers import require_module

ROW = [1.0, 2.0, 3.0, 4.5]


def settings(stack: GatewayStack) -> Settings:
    """Those of a process that knows the server."""
    return Settings.load(environ={"PENSTOCK_REDIS_URL": stack.server.url})


def test_the_gateway_can_be_mounted(stack: GatewayStack):
    """CX-001: below a path of a FastAPI application, whose own routes stay, and without a lifespan."""
    app = require_module("fastapi").FastAPI()
    gateway = Gateway(settings(stack))
    app.mount("/inference", gateway)
    app.add_api_route("/own", lambda: {"own": True})

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as http:
            document = {"inputs": {"x": [ROW]}}
            predicted = await http.post("/inference/v1/models/double:predict", json=document)
            answers = [predicted, await http.get("/inference/nothing"), await http.get("/own")]
        await gateway.aclose()
        return answers

    predicted, unknown, own = asyncio.run(ask())
    assert predicted.json()["outputs"]["y"]["data"] == [[2.0, 4.0, 6.0, 9.0]]
    assert (unknown.status_code, unknown.headers["content-type"]) == (404, "application/problem+json")
    assert own.json() == {"own": True}


def test_a_silence_is_filled_with_comments(stack: GatewayStack):
    """While a job waits in the queue, proxies see that the connection lives; a client that goes ends the stream."""
    gateway = Gateway(settings(stack), heartbeat_s=0.02)

    async def follow() -> list[bytes]:
        async with AsyncClient(stack.server.url) as client:
            blocking = [await client.submit("napper", {"x": [[n, 4, 4, 4]]}) for n in range(3)]
            job = await client.submit("napper", {"x": [[9, 4, 4, 4]]})
            parts: list[bytes] = []
            gone = asyncio.Event()

            async def receive() -> dict[str, Any]:
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                parts.append(message.get("body", b""))
                if parts.count(b":\n\n") == 3:
                    gone.set()

            path = f"/v1/jobs/{job.id}/events"
            scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
            async with asyncio.timeout(60):
                await gateway(scope, receive, send)
            await gateway.aclose()
            for each in (*blocking, job):
                await each.result(60)
            return parts

    parts = asyncio.run(follow())
    assert parts.count(b":\n\n") >= 3
    assert any(part.startswith(b"id: 1\nevent: queued\n") for part in parts)


def test_another_websocket_is_refused(stack: GatewayStack):
    """Under a server that cannot answer a handshake with a status, a WebSocket of another path is closed."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def connect() -> None:
        gateway = Gateway(settings(stack))
        await gateway({"type": "websocket", "path": "/", "headers": []}, receive, send)
        await gateway.aclose()

    asyncio.run(connect())
    assert [message["type"] for message in sent] == ["websocket.close"]
