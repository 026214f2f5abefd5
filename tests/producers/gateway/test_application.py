"""The application without a server: mounted in another one, and its event streams in detail."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import httpx

from penstock import AsyncClient
from penstock.producers.gateway.application import Gateway
from penstock.registry.settings import Settings
from tests.producers.gateway.conftest import GatewayStack
from tests.producers.gateway.texts import Site
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

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    predicted, unknown, own = asyncio.run(ask())
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert predicted.json()["outputs"]["y"]["data"] == [[2.0, 4.0, 6.0, 9.0]]
    assert (unknown.status_code, unknown.headers["content-type"]) == (404, "application/problem+json")
    assert own.json() == {"own": True}


def test_addresses_of_a_mounted_gateway_have_its_path(stack: GatewayStack):
    """A job is found at its Location, and the paths of the OpenAPI document begin below the mounted application."""
    app = require_module("fastapi").FastAPI()
    gateway = Gateway(settings(stack))
    app.mount("/our inference", gateway)

    async def ask() -> tuple[list[str], list[httpx.Response]]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as http:
            below = "/our%20inference"
            job = {"model": "double", "inputs": {"x": [ROW]}}
            one = await http.post(f"{below}/v1/jobs", json=job)
            batch = await http.post(f"{below}/v1/jobs:batch", json={"model": "double", "inputs": [{"x": [ROW]}]})
            locations = [one.headers["location"], batch.json()["jobs"][0]["location"]]
            found = [await http.get(each) for each in (*locations, f"{below}/openapi.json")]
        await gateway.aclose()
        return locations, found

    locations, (*jobs, document) = asyncio.run(ask())
    assert [each.rpartition("/")[0] for each in locations] == ["/our%20inference/v1/jobs"] * 2
    assert [each.json()["model"] for each in jobs] == ["double"] * 2
    assert document.json()["servers"] == [{"url": "/our%20inference"}]


def test_a_text_that_is_asked_for_while_the_gateway_stops_is_refused(stack: GatewayStack, site: Site):
    """503 before a chunk: clients ask again, and find another process. An empty stream would be an empty text."""
    gateway = Gateway(settings(stack))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://app") as http:
            assert (await http.get("/health/live")).status_code == 200
            gateway.stop_soon()
            await asyncio.sleep(0)
            found = await http.post("/v1/completions", json={"model": "writer", "prompt": "a", "stream": True})
        await gateway.aclose()
        return found

    found = asyncio.run(ask())
    assert (found.status_code, found.headers["retry-after"]) == (503, "1"), found.text
    assert found.json()["error"]["code"] == "stopping"


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
                await each.result(180)
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


async def _websocket(gateway: Gateway, *messages: Any, until: asyncio.Event | None = None) -> list[dict[str, Any]]:
    """What a gateway sends on a WebSocket on which the client sends these messages, and closes it at `until`."""
    sent: list[dict[str, Any]] = []
    left: list[dict[str, Any]] = [{"type": "websocket.connect"}]
    left += [{"type": "websocket.receive", "text": json.dumps(message)} for message in messages]

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        if left:
            return left.pop(0)
        await (until or asyncio.Event()).wait()
        return {"type": "websocket.disconnect"}

    await gateway({"type": "websocket", "path": "/predict/stream", "headers": [], "query_string": b""}, receive, send)
    return sent


def test_a_mistake_of_the_gateway_closes_a_websocket(stack: GatewayStack):
    """CX-037: the request is answered without a word of the mistake, and the connection is closed with 1011."""

    async def run() -> list[dict[str, Any]]:
        gateway = Gateway(settings(stack))
        parts = gateway._open()
        jobs = parts.jobs
        client, jobs.client = jobs.client, None  # type: ignore[assignment]  # the mistake
        try:
            async with asyncio.timeout(60):
                return await _websocket(gateway, {"id": 1, "model": "double", "inputs": {"x": [ROW]}})
        finally:
            jobs.client = client
            await gateway.aclose()

    accepted, answer, closed = asyncio.run(run())
    assert accepted["type"] == "websocket.accept"
    assert json.loads(answer["text"]) == {
        "id": 1,
        "type": "error",
        "status": 500,
        "error": {
            "code": "internal-error",
            "title": "internal error",
            "detail": "The gateway failed. Its operators find the reason in its log",
        },
    }
    assert (closed["type"], closed["code"], closed["reason"]) == ("websocket.close", 1011, "The gateway failed")


def test_clients_that_go_leave_nothing_behind(stack: GatewayStack):
    """Requests that wait, streams and connections: no place, no waiter and no stream of them is left, and no job."""

    async def leave(gateway: Gateway, gone: asyncio.Event, path: str, body: bytes = b"") -> None:
        left = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            if left:
                return left.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            """Nobody reads it."""

        path, _, query = path.partition("?")
        method = "POST" if body else "GET"
        scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": query.encode()}
        await gateway(scope, receive, send)

    async def run() -> None:
        gateway, gone = Gateway(settings(stack)), asyncio.Event()
        parts = gateway._open()
        async with AsyncClient(stack.server.url) as client, asyncio.timeout(120):
            # The frozen worker may have asked for one job before.
            first = await client.submit("napper", {"x": [[41, 9, 1, 1]]})
            job = await client.submit("napper", {"x": [[42, 9, 1, 1]]})
            tasks = []
            for number in range(10):
                document = {"model": "napper", "inputs": {"x": [[number, 9, 0, 9]]}}
                body = json.dumps({"inputs": document["inputs"]}).encode()
                tasks += [
                    leave(gateway, gone, "/v1/models/napper:predict", body),
                    leave(gateway, gone, f"/v1/jobs/{job.id}?wait=100"),
                    leave(gateway, gone, f"/v1/jobs/{job.id}/events"),
                    _websocket(gateway, {"id": number, **document}, {"job": job.id}, until=gone),
                ]
            running = asyncio.gather(*tasks)
            jobs = parts.jobs
            # Twenty jobs have one waiter each; one has the requests, the streams and the connections.
            while (len(jobs._waiters), jobs._waiters.get(job.id)) != (21, 30):
                await asyncio.sleep(0.01)
            assert (jobs.waiting, parts.places.taken) == (30, 20)
            submitted = [each for each in jobs._waiters if each != job.id]
            gone.set()
            await running
            await jobs.aclose()
            assert (jobs._waiters, jobs.waiting, parts.places.taken) == ({}, 0, 0)
            assert not jobs._cancelling
            assert {await client.job(each).status() for each in submitted} == {"cancelled"}
            stack.worker.thaw()
            await first.result(180)
            await job.result(180)
        await gateway.aclose()

    stack.worker.freeze()
    try:
        asyncio.run(run())
    finally:
        stack.worker.thaw()
