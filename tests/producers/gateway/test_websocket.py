"""WebSocket /predict/stream with a real client: streams, many requests, cancellation, close codes, bad frames."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from penstock import Client
from tests.gateway_process import GatewayProcess
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.naps import naps_before
from tests.servers import wait_until

ROW = [1.0, 2.0, 3.0, 4.5]
TWICE = [2.0, 4.0, 6.0, 9.0]
DOUBLE = {"model": "double", "inputs": {"x": [ROW]}}
Talk = Callable[[ClientConnection], Awaitable[Any]]


def address(gateway: GatewayProcess, query: str = "") -> str:
    """Where the gateway takes WebSockets."""
    return f"{gateway.url.replace('http', 'ws')}/predict/stream{query}"


def talk(gateway: GatewayProcess, with_socket: Talk, query: str = "", **options: Any) -> Any:
    """What a coroutine gives that has a connection."""

    async def run() -> Any:
        async with asyncio.timeout(120), connect(address(gateway, query), max_size=None, **options) as socket:
            return await with_socket(socket)

    return asyncio.run(run())


async def ask(socket: ClientConnection, request: Any) -> Any:
    """The next message behind a request."""
    await socket.send(request if isinstance(request, str | bytes) else json.dumps(request))
    return json.loads(await socket.recv())


async def closed(socket: ClientConnection) -> tuple[int, str]:
    """The close code and the reason, once the gateway has closed."""
    _, code, reason = await rest(socket)
    return code, reason


async def rest(socket: ClientConnection) -> tuple[list[Any], int, str]:
    """All messages until the gateway closes; the close code and the reason."""
    found: list[Any] = []
    with suppress(ConnectionClosed):
        while True:
            found.append(json.loads(await socket.recv()))
    return found, socket.close_code or 0, socket.close_reason or ""


def napped(number: int, kind: int = 3) -> dict[str, Any]:
    """A request of 0.3 s."""
    return {"id": number, "model": "napper", "inputs": {"x": [[number, kind, kind, kind]]}}


def test_json_and_messagepack(stack: GatewayStack):
    """A text frame is answered with JSON, a binary one with MessagePack whose tensors are bytes; flat numbers, too."""

    async def run(socket: ClientConnection) -> list[Any]:
        first = await ask(socket, {"id": "a", **DOUBLE})
        tensor = {"dtype": "float32", "shape": [1, 4], "data": np.array([ROW], "<f4").tobytes()}
        await socket.send(msgspec.msgpack.encode({"id": 7, "inputs": {"x": tensor}}))
        second = msgspec.msgpack.decode(await socket.recv(decode=False))
        return [first, second, await ask(socket, {"inputs": [3]})]

    json_answer, bytes_answer, flat = talk(stack.gateway, run, "?model=double")
    assert json_answer.pop("job_id").startswith("double.")
    assert json_answer == {
        "id": "a",
        "type": "completed",
        "model": "double",
        "version": "1",
        "outputs": {"y": {"dtype": "float32", "shape": [1, 4], "data": [TWICE]}},
    }
    assert bytes_answer["id"] == 7
    assert np.frombuffer(bytes_answer["outputs"]["y"]["data"], "<f4").tolist() == TWICE
    assert flat["type"] == "error"
    assert "Expected" in flat["error"]["detail"]


def test_plain_numbers(stack: GatewayStack):
    """CX-037: the fields of /predict, and {"error"} without inputs; the connection goes on."""

    async def run(socket: ClientConnection) -> list[Any]:
        return [await ask(socket, each) for each in ({"inputs": ROW}, {}, {"inputs": ROW})]

    first, refused, last = talk(stack.gateway, run, "?model=double")
    assert (first["predictions"], first["model_version"]) == (TWICE, "1")
    assert first["latency_ms"] > 0
    assert refused["error"]["detail"] == "Missing inputs. Expected an object with: x, or one row of numbers"
    assert last["predictions"] == TWICE


def test_streams_beside_each_other(stack: GatewayStack):
    """Chunks of several jobs on one connection: each has the id of its request, and its own order."""

    async def run(socket: ClientConnection) -> list[Any]:
        for number in range(3):
            await socket.send(json.dumps({"id": number, "model": "counter", "inputs": {"count": [4 + number]}}))
        await socket.send(json.dumps({"id": "d", **DOUBLE}))
        found: list[Any] = []
        while sum(each["type"] == "completed" for each in found) < 4:
            found.append(json.loads(await socket.recv()))
        return found

    found = talk(stack.gateway, run)
    for number in range(3):
        events = [each for each in found if each["id"] == number]
        assert [each["type"] for each in events].count("chunk") == 4 + number
        assert [each["seq"] for each in events] == sorted({each["seq"] for each in events})
        assert events[-1]["type"] == "completed"
        assert len({each["job_id"] for each in events}) == 1


def test_a_job_of_another_protocol_is_followed(stack: GatewayStack, http: httpx.Client):
    """Submitted by REST, streamed by WebSocket: all events, those behind a number, and an unknown job."""
    job = http.post("/v1/jobs", json={"model": "counter", "inputs": {"count": [5]}}).json()["id"]

    async def run(socket: ClientConnection) -> list[list[Any]]:
        runs: list[list[Any]] = []
        for after in (0, 4):
            await socket.send(json.dumps({"id": "f", "job": job, "after": after}))
            runs.append([])
            while not runs[-1] or runs[-1][-1]["type"] != "completed":
                runs[-1].append(json.loads(await socket.recv()))
        end = runs[0][-1]["seq"]
        unknown = {"job": "double.ffffffff-ffff-7fff-bfff-ffffffffffff"}
        others = ({"job": job, "after": end}, {"job": job, "after": end + 9}, {"job": job, "after": 2**64}, unknown)
        return [*runs, [await ask(socket, other) for other in others]]

    whole, behind, (seen, beyond, unreadable, unknown) = talk(stack.gateway, run)
    assert [each["type"] for each in whole].count("chunk") == 5
    assert behind == [each for each in whole if each["seq"] > 4]
    # Each request has an answer: a client that has seen the end gets it once more.
    assert {**seen, "id": "f"} == whole[-1]
    assert (beyond["type"], beyond["outputs"]) == ("completed", whole[-1]["outputs"])
    assert (unreadable["status"], "Expected the sequence number" in unreadable["error"]["detail"]) == (422, True)
    assert unknown["status"] == 404


def test_a_closed_connection_cancels_its_jobs(stack: GatewayStack):
    """Those with an idempotency key go on, and those that were only followed."""

    async def run(socket: ClientConnection) -> list[str]:
        for number in range(8):
            key = {"idempotency_key": "ws-kept"} if number == 7 else {}
            await socket.send(json.dumps({**napped(number), "stream": True, **key}))
        jobs: dict[int, str] = {}
        while len(jobs) < 8:
            event = json.loads(await socket.recv())
            jobs[event["id"]] = event["job_id"]
        return [jobs[number] for number in range(8)]

    jobs = talk(stack.gateway, run)
    with Client(stack.server.url) as client:
        kept = client.job(jobs[7])
        assert kept.result(180)["y"].shape == (1, 4)
        ends = [client.job(job).status() for job in jobs[:7]]
    # A worker runs one at a time, so it cannot have had the last ones.
    assert ends[-4:] == ["cancelled"] * 4


def test_a_request_is_cancelled_by_its_id(stack: GatewayStack):
    """{"cancel": id}: the request ends as cancelled, and the others go on."""

    async def run(socket: ClientConnection) -> dict[int, Any]:
        # Frozen, the worker cannot be faster than the cancellation.
        stack.worker.freeze()
        try:
            for number in range(4):
                await socket.send(json.dumps(napped(number, 4)))
            unknown = await ask(socket, {"cancel": 99, "id": "c"})
            assert "Expected" in unknown["error"]["detail"]
            await socket.send(json.dumps({"cancel": 3}))
            first = json.loads(await socket.recv())
        finally:
            stack.worker.thaw()
        ends: dict[int, Any] = {first["id"]: first}
        while len(ends) < 4:
            message = json.loads(await socket.recv())
            ends[message["id"]] = message
        return ends

    ends = talk(stack.gateway, run)
    assert [ends[number]["type"] for number in range(4)] == ["completed"] * 3 + ["error"]
    assert ends[3]["error"]["code"] == "cancelled"


def test_a_job_that_is_followed_is_cancelled_at_once(stack: GatewayStack, http: httpx.Client):
    """The cancellation comes right behind the request, before the gateway has found the job."""
    document = {"model": "counter", "inputs": {"count": [300], "delay_ms": [100.0]}}
    job = http.post("/v1/jobs", json=document).json()["id"]

    async def run(socket: ClientConnection) -> list[str]:
        await socket.send(json.dumps({"id": 1, "job": job}))
        await socket.send(json.dumps({"cancel": 1}))
        kinds: list[str] = []
        while not kinds or kinds[-1] not in ("completed", "cancelled"):
            kinds.append(json.loads(await socket.recv())["type"])
        return kinds

    assert talk(stack.gateway, run)[-1] == "cancelled"


BAD: list[tuple[str | bytes, int]] = [
    ("{", 422),
    ("[]", 422),
    ("", 422),
    ("null", 422),
    ('{"inputs": {"x": [[1, 2, 3]]}}', 422),
    ('{"inputs": {"x": [["a", 2, 3, 4]]}}', 422),
    ('{"inputs": {"z": [[1, 2, 3, 4]]}}', 422),
    ('{"inputs": [1, true, 3, 4]}', 422),
    ('{"inputs": [1e999, 2, 3, 4]}', 422),
    ('{"inputs": 5}', 422),
    ('{"inputs": {"x": [[1, 2, 3, 4]]}, "priority": "soon"}', 422),
    ('{"inputs": {"x": [[1, 2, 3, 4]]}, "timeout_ms": 0}', 422),
    ('{"inputs": {"x": [[1, 2, 3, 4]]}, "unheard": 1}', 422),
    ('{"id": [], "inputs": {"x": [[1, 2, 3, 4]]}}', 422),
    ('{"job": 5}', 422),
    ('{"job": "double.x", "after": -1}', 404),
    ('{"cancel": null}', 422),
    ('{"model": "nothing", "inputs": [1]}', 404),
    ("[" * 100_000, 422),
    (b"", 422),
    (b"\xc1\xff\x00 junk", 422),
    (b"\x81\xa6inputs\xc4\x02ab", 422),
    (msgspec.msgpack.encode({"inputs": {"x": [[float("nan"), 1, 2, 3]]}}), 422),
]


def test_bad_messages_are_answered_with_their_reason(stack: GatewayStack):
    """Broken JSON, binary junk, wrong shapes and unknown names: an error that says what was expected, and no job."""

    async def run(socket: ClientConnection) -> list[Any]:
        found: list[Any] = []
        for message, _ in BAD:
            await socket.send(message)
            answer = await socket.recv(decode=False)
            is_text = isinstance(message, str) or answer[:1] == b"{"
            found.append(json.loads(answer) if is_text else msgspec.msgpack.decode(answer))
        assert (await ask(socket, DOUBLE))["type"] == "completed"
        return found

    for (message, status), answer in zip(BAD, talk(stack.gateway, run, "?model=double"), strict=True):
        assert (answer["type"], answer["status"]) == ("error", status), (message[:60], answer)
        assert "Expected" in answer["error"]["detail"], (message[:60], answer)
        assert "job_id" not in answer, message[:60]
    assert "request failed" not in stack.gateway.output.read_text()


def test_handshakes_that_are_refused(stack: GatewayStack):
    """Another path is 404, a page of another origin 403; the gateway's own origin is let in."""

    async def status(path: str, **options: Any) -> int:
        try:
            async with connect(f"{stack.gateway.url.replace('http', 'ws')}{path}", **options):
                return 101
        except InvalidStatus as refused:
            return refused.response.status_code if b"Expected" in (refused.response.body or b"") else 0

    assert asyncio.run(status("/nothing")) == 404
    assert asyncio.run(status("/predict/stream?" + "&" * 50)) == 422
    assert asyncio.run(status("/predict/stream", origin="https://elsewhere.example")) == 403
    assert asyncio.run(status("/predict/stream", origin=stack.gateway.url)) == 101


def test_the_limits_of_a_connection(start_gateway: StartGateway):
    """CX-037: 1000 Timeout without traffic, 1008 above the rate, 1009 for a long message; too many open requests."""
    gateway = start_gateway(
        PENSTOCK_INFERENCE_SERVER_WEBSOCKET_IDLE_S="1",
        PENSTOCK_INFERENCE_SERVER_WEBSOCKET_REQUESTS="2",
        PENSTOCK_INFERENCE_SERVER_WEBSOCKET_MESSAGES_PER_S="20",
        PENSTOCK_INFERENCE_SERVER_ALLOWED_ORIGINS="https://friend.example",
        PENSTOCK_INFERENCE_MAX_REQUEST_SIZE_MB="1",
    )

    async def flood(socket: ClientConnection) -> tuple[int, str]:
        # Within less than a second, on any machine, or else the gateway's answers are slower.
        for _ in range(2000):
            await socket.send("{")
        return await closed(socket)

    async def many(socket: ClientConnection) -> list[Any]:
        for number in range(5):
            await socket.send(json.dumps(napped(number, 5)))
        return [json.loads(await socket.recv()) for _ in range(5)]

    async def too_long(socket: ClientConnection) -> tuple[int, str]:
        await socket.send("x" * (1024 * 1024 + 1))
        return await closed(socket)

    async def no_text(socket: ClientConnection) -> tuple[int, str]:
        await socket.send(b"\xff\xfe", text=True)
        return await closed(socket)

    assert talk(gateway, closed, origin="https://friend.example") == (1000, "Timeout")
    assert talk(gateway, too_long)[0] == 1009
    assert talk(gateway, no_text)[0] == 1007
    assert talk(gateway, flood) == (1008, "Too many messages. Expected at most 20 in a second")
    answers = talk(gateway, many)
    refused = [each for each in answers if each["type"] == "error"]
    assert [each["id"] for each in refused] == [2, 3, 4]
    assert {(each["status"], each["retry_after_s"]) for each in refused} == {(503, 1)}
    assert [each["id"] for each in answers if each["type"] == "completed"] == [0, 1]


def test_a_gateway_that_stops_tells_its_clients(stack: GatewayStack, start_gateway: StartGateway):
    """Open requests are answered, streams end, then 1012 with a retry hint; another gateway continues the stream."""
    gateway = start_gateway()

    async def run(socket: ClientConnection) -> tuple[list[Any], tuple[Any, ...]]:
        for number in range(3):
            await socket.send(json.dumps({**napped(number, 6), "priority": "critical"}))
        await socket.send(json.dumps({**napped(9, 6), "stream": True}))
        found: list[Any] = []
        while not any(each["id"] == 9 for each in found):
            found.append(json.loads(await socket.recv()))
        gateway.terminate()
        more, *end = await rest(socket)
        return [*found, *more], tuple(end)

    with naps_before(stack):
        found, end = talk(gateway, run)
    assert end == (1012, "The gateway stops. Expected a new connection in 1 s")
    assert sorted(each["id"] for each in found if each["type"] == "completed") == [0, 1, 2]
    seen = [each for each in found if each["id"] == 9]

    async def go_on(socket: ClientConnection) -> list[Any]:
        await socket.send(json.dumps({"job": seen[-1]["job_id"], "after": seen[-1]["seq"]}))
        events: list[Any] = []
        while not events or events[-1]["type"] != "completed":
            events.append(json.loads(await socket.recv()))
        return events

    seqs = [each["seq"] for each in [*seen, *talk(stack.gateway, go_on)]]
    assert seqs == sorted(set(seqs))
    assert gateway.wait(180) == 0


@pytest.mark.slow
def test_clients_that_do_not_read_are_given_up(start_gateway: StartGateway):
    """Answers that nobody takes hold the connection for server.client_timeout_s, and its queue does not grow."""
    gateway = start_gateway(PENSTOCK_INFERENCE_SERVER_CLIENT_TIMEOUT_S="2")
    rows = [[1.25, 2.5, 3.75, 5.0]] * 30_000
    request = json.dumps({"model": "double", "inputs": {"x": rows}})

    async def run() -> int:
        async with asyncio.timeout(600):
            socket = await connect(address(gateway), max_size=None, max_queue=1, ping_interval=None, close_timeout=1)
            # Nothing is read: the client's own buffers fill, then those of the kernel, then the gateway's.
            sent = 0
            try:
                while sent < 500:
                    await asyncio.wait_for(socket.send(request), 60)
                    sent += 1
            except (ConnectionClosed, TimeoutError):
                pass
            await socket.close()
            return sent

    assert asyncio.run(run()) < 500
    wait_until(gateway.answers, 60, "it answers")
    with gateway.client() as http:
        wait_until(lambda: "penstock_http_streams 0.0" in http.get("/metrics").text, 60, "the connection is forgotten")
