"""One job behind every protocol: its id, its key, its events and its cancellation are the same in all of them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from penstock import AsyncClient, Client
from penstock.registry.queues import followers_key
from tests.gateway_process import GatewayProcess
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.rpc.conftest import INFER, Caller, infer_request
from tests.producers.gateway.test_event_stream import events
from tests.producers.gateway.test_jobs import ROW, TWICE, job
from tests.servers import wait_until

OIP_INPUT = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": ROW}
ENDLESS = {"model": "counter", "inputs": {"count": [1_000_000], "delay_ms": [10]}}
"""It counts until it is cancelled."""


class Ways:
    """The ways to submit one row to `double` with an idempotency key; each gives the id of its job."""

    def __init__(self, stack: GatewayStack) -> None:
        self._stack = stack

    def jobs(self, key: str) -> str:
        """As a job."""
        return self._post("/v1/jobs", key, job())

    def batch(self, key: str) -> str:
        """As one job of many."""
        document = {"model": "double", "inputs": [{"x": [ROW]}], "idempotency_keys": [key]}
        with self._stack.gateway.client() as http:
            return str(http.post("/v1/jobs:batch", json=document).json()["jobs"][0]["id"])

    def predict(self, key: str) -> str:
        """As a prediction."""
        return self._post("/v1/models/double:predict", key, {"inputs": {"x": [ROW]}})

    def oip(self, key: str) -> str:
        """By the Open Inference Protocol over REST."""
        return self._post("/v2/models/double/infer", key, {"inputs": [OIP_INPUT]})

    def grpc(self, key: str) -> str:
        """By the Open Inference Protocol over gRPC."""
        caller = Caller(self._stack.gateway.rpc)
        _, trailing = caller.call(INFER, infer_request(), metadata=[("idempotency-key", key)])
        caller.channel.close()
        return str(trailing["penstock-job-id"])

    def websocket(self, key: str) -> str:
        """As a message."""
        return str(asyncio.run(_ask(self._stack.gateway, {**job(), "idempotency_key": key}))[-1]["job_id"])

    def python(self, key: str) -> str:
        """By the client of Python."""
        with Client(self._stack.server.url) as client:
            return client.submit("double", {"x": [ROW]}, idempotency_key=key).id

    def _post(self, path: str, key: str, document: Any) -> str:
        with self._stack.gateway.client() as http:
            return http.post(path, json=document, headers={"Idempotency-Key": key}).headers["penstock-job-id"]


async def _ask(gateway: GatewayProcess, request: dict[str, Any]) -> list[dict[str, Any]]:
    """All messages that answer a request."""
    found: list[dict[str, Any]] = []
    async with (
        asyncio.timeout(120),
        connect(f"{gateway.url.replace('http', 'ws')}/predict/stream") as connection,
    ):
        await connection.send(json.dumps(request))
        while not found or found[-1]["type"] not in ("completed", "failed", "cancelled", "error"):
            found.append(json.loads(await connection.recv()))
    return found


def jobs_of(stack: GatewayStack, model: str) -> set[str]:
    """The ids of a model's jobs."""
    with stack.server.client() as redis:
        keys = [key.decode() for key in redis.scan_iter(f"{{{model}}}:job:*", count=10_000)]
    return {f"{model}.{key.rpartition(':')[2]}" for key in keys if not key.endswith(":events")}


WAYS = ["jobs", "batch", "predict", "oip", "grpc", "websocket", "python"]


@pytest.mark.parametrize("first", WAYS)
def test_a_key_names_the_same_job_in_every_protocol(stack: GatewayStack, http: httpx.Client, first: str):
    """Whoever submits first: each later request with its key has its job, which each of them shows with its outputs."""
    ways, key = Ways(stack), f"first by {first}".replace(" ", "-")
    submit: dict[str, Callable[[str], str]] = {way: getattr(ways, way) for way in WAYS}
    job_id = submit[first](key)
    assert {way: submit[way](key) for way in WAYS} == dict.fromkeys(WAYS, job_id)
    shown = http.get(f"/v1/jobs/{job_id}?wait=60").json()
    assert (shown["id"], shown["outputs"]["y"]["data"]) == (job_id, [TWICE])
    followed = events(http.get(f"/v1/jobs/{job_id}/events").text)
    streamed = asyncio.run(_ask(stack.gateway, {"job": job_id}))
    for last in (followed[-1][2], streamed[-1]):
        assert (last["job_id"], last["type"], last["outputs"]["y"]["data"]) == (job_id, "completed", [TWICE])
    assert [each["seq"] for each in streamed] == [seq for seq, _, _ in followed]
    with Client(stack.server.url) as client:
        assert client.job(job_id).result(180)["y"].tolist() == [TWICE]


@pytest.mark.parametrize("by", ["python", "rest", "websocket"])
def test_submitted_by_rest_streamed_by_websocket_cancelled_by_any(stack: GatewayStack, http: httpx.Client, by: str):
    """Both streams of the running job, one of events and one of messages, end with its cancellation."""
    job_id = http.post("/v1/jobs", json=ENDLESS).json()["id"]

    async def follow() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        address = f"{stack.gateway.url.replace('http', 'ws')}/predict/stream"
        async with asyncio.timeout(120), connect(address) as connection:
            await connection.send(json.dumps({"id": "followed", "job": job_id}))
            while not found or found[-1]["type"] in ("queued", "started", "chunk", "progress"):
                found.append(json.loads(await connection.recv()))
                if [each["type"] for each in found].count("chunk") == 1 and found[-1]["type"] == "chunk":
                    # The model counts on meanwhile.
                    await cancel(connection)
        return found

    async def cancel(connection: Any) -> None:
        if by == "python":
            with Client(stack.server.url) as client:
                assert await asyncio.to_thread(client.job(job_id).cancel) == "requested"
        elif by == "rest":
            assert (await asyncio.to_thread(http.delete, f"/v1/jobs/{job_id}")).json()["status"] == "requested"
        else:
            await connection.send(json.dumps({"cancel": "followed"}))

    with stack.gateway.client() as other, other.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
        streamed = asyncio.run(follow())
        followed = events("\n".join(stream.iter_lines()))
    for found in (streamed, [data for _, _, data in followed]):
        assert [each["type"] for each in found][-1] == "cancelled"
        assert {each["job_id"] for each in found} == {job_id}
    shown = http.get(f"/v1/jobs/{job_id}").json()
    assert (shown["status"], shown["error"]["code"]) == ("cancelled", "cancelled")
    assert http.delete(f"/v1/jobs/{job_id}").json()["status"] == "cancelled"
    with Client(stack.server.url) as client:
        assert client.job(job_id).status() == "cancelled"


def counted(gateway: GatewayProcess, name: str) -> float:
    """A gauge of a gateway, without its `penstock_http_`."""
    with gateway.client() as http:
        # The page has the figures as they were when the request before it ended.
        http.get("/health/live")
        line = f"penstock_http_{name} "
        (found,) = (each for each in http.get("/metrics").text.splitlines() if each.startswith(line))
        return float(found.split()[1])


@contextmanager
def asking(gateway: GatewayProcess, model: str, inputs: dict[str, Any]) -> Iterator[None]:
    """A client that asks for a prediction without a key, and closes its connection at the end of the block."""
    url, body = httpx.URL(gateway.url), json.dumps({"inputs": inputs}).encode()
    with socket.create_connection((url.host, url.port or 80), 30) as client:
        head = f"POST /v1/models/{model}:predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        yield


@contextmanager
def waited_for(stack: GatewayStack, gateway: GatewayProcess) -> Iterator[str]:
    """A job that a client waits for, before a frozen worker. At the end of the block the client goes."""
    with Client(stack.server.url) as client:
        # The frozen worker may have asked for one job before.
        client.submit("double", {"x": [ROW]})
    before = jobs_of(stack, "double")
    with asking(gateway, "double", {"x": [ROW]}):
        wait_until(lambda: jobs_of(stack, "double") > before, 60, "the job is accepted")
        (job_id,) = jobs_of(stack, "double") - before
        yield job_id


@pytest.mark.parametrize("other", ["poll", "events", "websocket"])
def test_a_job_that_somebody_else_waits_for_goes_on(stack: GatewayStack, start_gateway: StartGateway, other: str):
    """The client that submitted it closes its connection; the one that has only its id gets the outputs."""
    gateway = start_gateway()
    found = list[dict[str, Any]]()

    def wait(job_id: str) -> None:
        with gateway.client() as http:
            if other == "poll":
                found.append(http.get(f"/v1/jobs/{job_id}?wait=120", timeout=120).json())
            elif other == "events":
                found.append(events(http.get(f"/v1/jobs/{job_id}/events", timeout=120).text)[-1][2])
            else:
                found.append(asyncio.run(_ask(gateway, {"job": job_id}))[-1])

    stack.worker.freeze()
    try:
        with waited_for(stack, gateway) as job_id:
            waiter = threading.Thread(target=wait, args=(job_id,))
            waiter.start()
            waiting, streams = (2, 0) if other == "poll" else (1, 1)
            wait_until(
                lambda: (counted(gateway, "waiting"), counted(gateway, "streams")) == (waiting, streams),
                60,
                "both wait",
            )
        wait_until(lambda: counted(gateway, "waiting") == waiting - 1, 60, "the first client has gone")
    finally:
        stack.worker.thaw()
    waiter.join()
    assert [each["outputs"]["y"]["data"] for each in found] == [[TWICE]]


class Elsewhere:
    """The ways to wait for a job in another process than the gateway that submitted it. Each gives its output."""

    def __init__(self, stack: GatewayStack, gateway: GatewayProcess) -> None:
        self._url = stack.server.url
        self._gateway = gateway

    def poll(self, job_id: str) -> Any:
        """A request that waits, to another gateway."""
        with self._gateway.client() as http:
            return _output(http.get(f"/v1/jobs/{job_id}?wait=120", timeout=120).json())

    def events(self, job_id: str) -> Any:
        """Server-sent events of another gateway."""
        with self._gateway.client() as http:
            return _output(events(http.get(f"/v1/jobs/{job_id}/events", timeout=120).text)[-1][2])

    def websocket(self, job_id: str) -> Any:
        """A WebSocket of another gateway."""
        return _output(asyncio.run(_ask(self._gateway, {"job": job_id}))[-1])

    def result(self, job_id: str) -> Any:
        """The client of Python."""
        with Client(self._url) as client:
            return client.job(job_id).result(120)["y"].tolist()

    def stream(self, job_id: str) -> Any:
        """The events of the client of Python."""
        with Client(self._url) as client:
            *_, last = client.job(job_id).stream(timeout=120)
            return client.job(job_id).result()["y"].tolist() if last.type == "completed" else last.type

    def as_completed(self, job_id: str) -> Any:
        """One job of many of the client of Python."""
        with Client(self._url) as client:
            (found,) = client.as_completed([client.job(job_id)], timeout=120)
            return found.result()["y"].tolist()

    def gather(self, job_id: str) -> Any:
        """The asyncio client of Python."""

        async def gathered() -> Any:
            async with AsyncClient(self._url) as client:
                (found,) = await client.gather([client.job(job_id)], timeout=120)
                return found["y"].tolist()

        return asyncio.run(gathered())


def _output(document: dict[str, Any]) -> Any:
    return document["outputs"]["y"]["data"] if "outputs" in document else document


@pytest.mark.parametrize("other", ["poll", "events", "websocket", "result", "stream", "as_completed", "gather"])
def test_a_job_that_another_process_waits_for_goes_on(stack: GatewayStack, start_gateway: StartGateway, other: str):
    """The first gateway's client closes its connection. The one in another process, which has only the id, gets it."""
    wait, found = getattr(Elsewhere(stack, stack.gateway), other), list[Any]()
    gateway = start_gateway()
    stack.worker.freeze()
    try:
        with waited_for(stack, gateway) as job_id:
            waiter = threading.Thread(target=lambda: found.append(wait(job_id)))
            waiter.start()
            wait_until(lambda: followed(stack, job_id), 60, "the other one waits")
        wait_until(lambda: counted(gateway, "waiting") == 0, 60, "the first client has gone")
    finally:
        stack.worker.thaw()
    waiter.join()
    assert found == [[TWICE]]


@pytest.mark.parametrize("other", ["events", "stream"])
def test_a_job_is_cancelled_once_the_other_process_has_left(stack: GatewayStack, start_gateway: StartGateway, other):
    """The other process reads some events and goes; then the first client goes, and nobody waits."""
    gateway = start_gateway()
    before = jobs_of(stack, "counter")
    with asking(gateway, "counter", {"count": [1_000_000], "delay_ms": [10]}):
        wait_until(lambda: jobs_of(stack, "counter") > before, 60, "the job is accepted")
        (job_id,) = jobs_of(stack, "counter") - before
        if other == "events":
            with stack.gateway.client() as http, http.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
                wait_until(lambda: followed(stack, job_id), 60, "the other one waits")
                next(stream.iter_lines())
        else:
            with Client(stack.server.url) as client:
                for _ in client.job(job_id).stream():
                    assert followed(stack, job_id)
                    break
        wait_until(lambda: not followed(stack, job_id), 60, "the other one has left")
    with Client(stack.server.url) as client:
        wait_until(lambda: client.job(job_id).status() == "cancelled", 60, "the job is cancelled")


def followed(stack: GatewayStack, job_id: str) -> bool:
    """Whether the broker knows of a process that waits for the job."""
    with stack.server.client() as redis:
        return bool(redis.exists(followers_key(job_id)))
