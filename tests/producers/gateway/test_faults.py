"""A killed gateway, a broker that restarts, a thousand silent clients: no job is lost, and none runs twice."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis
from websockets.asyncio.client import connect

from penstock.registry.api_keys import KeyLimits, new_api_key
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.catalog.api_keys import SqlApiKeys
from penstock.registry.queues import meter_key
from tests.conftest import StartWorker
from tests.gateway_process import GatewayProcess
from tests.packages import recorded_forwards, write_recorder
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.test_event_stream import events
from tests.servers import ROOT, RedisServer, wait_until

pytestmark = [pytest.mark.slow]
WAITING = 500


async def ask_all(url: str, count: int, api_key: str) -> list[httpx.Response | Exception]:
    """One request with an idempotency key of its own for each number, all at once; what became of each."""
    limits, headers = httpx.Limits(max_connections=count), {"X-API-Key": api_key}
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, headers=headers) as http:
        asked = (
            http.post(
                "/v1/models/recorder:predict",
                json={"inputs": {"x": [[number, 0, 0, 0]]}},
                headers={"Idempotency-Key": f"key-{number}"},
            )
            for number in range(count)
        )
        return list(await asyncio.gather(*asked, return_exceptions=True))  # type: ignore[arg-type]


def test_a_killed_gateway_loses_no_job_and_repeats_none(
    redis_server: RedisServer, start_worker: StartWorker, models_root: Path, tmp_path: Path
):
    """SIGKILL while 500 requests wait: with their keys another gateway gives the same jobs, and each ran once. The API
    key pays for each job once, and its day has each request."""
    forward_log = tmp_path / "forwards"
    write_recorder(models_root, forward_log, forward_s=0.1)
    registry_url = f"sqlite:///{tmp_path / 'registry.db'}"
    made = new_api_key("pays", now=int(time.time()), limits=KeyLimits(requests_per_day=1_000_000))
    SqlApiKeys(registry_url).add(made.key)
    asks = {"PENSTOCK_REGISTRY_URL": registry_url, "PENSTOCK_INFERENCE_SERVER_API_KEYS": "required"}
    gateways = [GatewayProcess(redis_server, tmp_path / f"gateway{n}", environment=asks) for n in range(2)]
    try:
        for gateway in gateways:
            gateway.start()
        worker = start_worker(redis_server, models_root, wait=False)
        with redis_server.client() as redis:

            def accepted() -> bool:
                return _jobs(redis) == WAITING

            # The spec lets the jobs in before the worker runs them.
            wait_until(worker.is_ready, 60, "the worker is ready")
            worker.freeze()

            async def ask_and_kill() -> list[httpx.Response | Exception]:
                asking = asyncio.create_task(ask_all(gateways[0].url, WAITING, made.text))
                await asyncio.to_thread(wait_until, accepted, 60, "all jobs are accepted")
                await asyncio.to_thread(gateways[0].kill)
                return await asking

            lost = asyncio.run(ask_and_kill())
            worker.thaw()
            assert all(isinstance(each, httpx.TransportError) for each in lost)
            found = asyncio.run(ask_all(gateways[1].url, WAITING, made.text))
            assert _jobs(redis) == WAITING
            assert int(redis.hget(meter_key(f"key:{made.key.id}", "day"), "sum") or 0) == 2 * WAITING
        with closing(RedisStreams.from_url(redis_server.url)) as broker:
            used = {account: each.jobs for (account, _), each in broker.usage("recorder").items()}
        assert used == {made.key.id: WAITING}
        for number, answer in enumerate(found):
            assert isinstance(answer, httpx.Response)
            assert answer.json()["outputs"]["y"]["data"] == [[2.0 * number, 0, 0, 0]]
        ran = [row for forward in recorded_forwards(forward_log) for row in forward]
        # The warm-up runs zeros.
        assert sorted(row for row in ran if row) == [float(number) for number in range(1, WAITING)]
    finally:
        for gateway in gateways:
            gateway.stop()


def test_submits_are_refused_while_the_broker_is_away(
    redis_server: RedisServer, start_worker: StartWorker, models_root: Path, tmp_path: Path
):
    """503 with Retry-After, and not ready; ready again once the broker is back."""
    write_recorder(models_root, tmp_path / "forwards")
    start_worker(redis_server, models_root)
    gateway = GatewayProcess(redis_server, tmp_path / "gateway")
    try:
        with gateway.start().client() as http:
            document = {"model": "recorder", "inputs": {"x": [[1, 0, 0, 0]]}}
            assert http.post("/v1/jobs", json=document).status_code == 202
            redis_server.kill()
            refused = http.post("/v1/jobs", json=document)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert http.get("/ready").status_code == 503
            redis_server.start()
            wait_until(lambda: http.get("/ready").status_code == 200, 60, "the gateway is ready again")
            assert http.post("/v1/jobs", json=document).status_code == 202
    finally:
        gateway.stop()


Seen = list[tuple[int, str, dict[str, Any]]]
"""(number, type, event) of each event."""
CHUNKS, CUT_AFTER = 40, 7


async def follow_by_events(gateway: GatewayProcess, job_id: str, after: int, cut: Callable[[Seen], None]) -> Seen:
    """Server-sent events behind `after`, until they end. cut: sees what has come, after each line."""
    headers = {"Last-Event-ID": str(after)} if after else {}
    lines: list[str] = []
    seen: Seen = []
    async with (
        httpx.AsyncClient(base_url=gateway.url, timeout=200) as http,
        http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as stream,
    ):
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            lines.append(line)
            if not line:
                # An event is whole.
                seen = events("\n".join(lines))
                await asyncio.to_thread(cut, seen)
    return seen


async def follow_by_websocket(gateway: GatewayProcess, job_id: str, after: int, cut: Callable[[Seen], None]) -> Seen:
    """The same by a WebSocket. An error ends it, too."""
    seen: Seen = []
    async with connect(f"{gateway.url.replace('http', 'ws')}/predict/stream") as socket:
        await socket.send(json.dumps({"job": job_id, "after": after}))
        async for message in socket:
            event = json.loads(message)
            if "seq" not in event:
                assert event["error"]["code"] == "broker-unavailable"
                break
            seen.append((event["seq"], event["type"], event))
            if event["type"] in ("completed", "failed", "cancelled", "expired", "dead"):
                break
            await asyncio.to_thread(cut, seen)
    return seen


@pytest.mark.parametrize("follow", [follow_by_events, follow_by_websocket])
def test_streams_go_on_after_a_broker_restart(
    redis_server: RedisServer, start_worker: StartWorker, models_root: Path, tmp_path: Path, follow: Any
):
    """SIGKILL of the broker in the middle of a stream. Behind its last event the client gets each further one once: all
    chunks, in order, the same list as a client that begins anew."""
    shutil.copytree(ROOT / "models" / "counter", models_root / "counter")
    start_worker(redis_server, models_root)
    # A WebSocket is told that the broker is away: it does not wait for the end of an idle time.
    patient = {"PENSTOCK_INFERENCE_SERVER_WEBSOCKET_IDLE_S": "3600"}
    gateway = GatewayProcess(redis_server, tmp_path / "gateway", environment=patient)
    was_cut = False

    def cut(seen: Seen) -> None:
        nonlocal was_cut
        if not was_cut and _chunks(seen) >= CUT_AFTER:
            was_cut = True
            redis_server.kill()

    async def follow_on(job_id: str) -> tuple[Seen, Seen, Seen]:
        async with asyncio.timeout(200):
            seen = await follow(gateway, job_id, 0, cut)
            redis_server.start()
            await asyncio.to_thread(wait_until, gateway_is_ready, 60, "the gateway is ready again")
            rest = await follow(gateway, job_id, seen[-1][0], cut)
            return seen, rest, await follow(gateway, job_id, 0, cut)

    def gateway_is_ready() -> bool:
        with gateway.client() as http:
            return http.get("/ready").status_code == 200

    try:
        with gateway.start().client() as http, redis_server.client() as redis:
            # A client has seen nothing that the disk does not hold.
            redis.config_set("appendfsync", "always")
            document = {"model": "counter", "inputs": {"count": [CHUNKS], "delay_ms": [50.0]}}
            job_id = http.post("/v1/jobs", json=document).json()["id"]
        seen, rest, anew = asyncio.run(follow_on(job_id))
    finally:
        gateway.stop()
    assert CUT_AFTER <= _chunks(seen) < CHUNKS
    assert rest[-1][1] == "completed"
    numbers = [number for number, _, _ in seen + rest]
    assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]
    values = [event["outputs"]["value"]["data"][0] for _, name, event in seen + rest if name == "chunk"]
    assert values == [*range(1, CHUNKS + 1)]
    assert seen + rest == anew


def _chunks(seen: Seen) -> int:
    return sum(name == "chunk" for _, name, _ in seen)


def test_a_killed_worker_in_the_middle_of_streams(
    redis_server: RedisServer, start_worker: StartWorker, models_root: Path, tmp_path: Path
):
    """SIGKILL while a job streams by WebSocket and by server-sent events: both see `reset`, then the whole run."""
    shutil.copytree(ROOT / "models" / "counter", models_root / "counter")
    first = start_worker(redis_server, models_root)
    gateway = GatewayProcess(redis_server, tmp_path / "gateway")
    request = {"model": "counter", "inputs": {"count": [20], "delay_ms": [50.0]}}

    async def run() -> tuple[list[dict[str, Any]], str]:
        url = f"{gateway.url.replace('http', 'ws')}/predict/stream"
        async with asyncio.timeout(200), connect(url) as socket, httpx.AsyncClient(base_url=gateway.url) as http:
            await socket.send(json.dumps(request))
            found: list[dict[str, Any]] = [json.loads(await socket.recv())]
            sse = asyncio.create_task(http.get(f"/v1/jobs/{found[0]['job_id']}/events", timeout=200))
            while [each["type"] for each in found].count("chunk") < 3:
                found.append(json.loads(await socket.recv()))
            await asyncio.to_thread(first.kill)
            await asyncio.to_thread(start_worker, redis_server, models_root)
            while found[-1]["type"] != "completed":
                found.append(json.loads(await socket.recv()))
            return found, (await sse).text

    try:
        gateway.start()
        found, text = asyncio.run(run())
    finally:
        gateway.stop()
    names = [each["type"] for each in found]
    place = names.index("reset")
    assert names[place:].count("chunk") == 20
    assert found[-1]["outputs"]["total"]["data"] == [20]
    by_sse = [name for _, name, _ in events(text)]
    assert by_sse[by_sse.index("reset") :] == names[place:]


def test_a_thousand_silent_clients_hold_nothing(start_gateway: StartGateway):
    """They are disconnected after server.client_timeout_s, and others are answered meanwhile."""
    gateway = start_gateway(PENSTOCK_INFERENCE_SERVER_CLIENT_TIMEOUT_S="5")
    url = httpx.URL(gateway.url)
    silent = []
    try:
        for _ in range(1000):
            silent.append(socket.create_connection((url.host, url.port or 80), 60))
        with gateway.client() as http:
            for _ in range(20):
                found = http.post("/v1/models/double:predict", json={"inputs": {"x": [[1, 2, 3, 4]]}})
                assert found.status_code == 200
        assert {client.recv(1) for client in silent} == {b""}
    finally:
        for client in silent:
            client.close()


def test_clients_that_read_slowly_are_disconnected(stack: GatewayStack, start_gateway: StartGateway):
    """An answer that nobody takes is given up after server.client_timeout_s, with the memory that it holds."""
    gateway = start_gateway(PENSTOCK_INFERENCE_SERVER_CLIENT_TIMEOUT_S="15")
    url = httpx.URL(gateway.url)
    rows = [[1.25, 2.5, 3.75, 5.0]] * 50_000
    body = json.dumps({"inputs": {"x": rows}}).encode()
    head = f"POST /v1/models/double:predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with gateway.client() as http:
        # It is connected to the broker from now on.
        assert http.post("/v1/models/double:predict", json={"inputs": {"x": rows[:1]}}).status_code == 200
        # That of this client is one of them.
        before = _connections(gateway) - 1
    slow = []
    try:
        for _ in range(4):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(120)
            client.connect((url.host, url.port or 80))
            client.sendall(head + body)
            slow.append(client)
        for client in slow:
            assert client.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: _connections(gateway) <= before, 120, "the connections are closed")
        assert gateway.answers()
    finally:
        for client in slow:
            client.close()


SLOW_CLIENTS = 200


def test_200_clients_that_read_a_byte_a_second_hold_a_bounded_memory(start_gateway: StartGateway):
    """Others are answered meanwhile, the process holds no more than the answers, and each of them is disconnected."""
    gateway = start_gateway(PENSTOCK_INFERENCE_SERVER_CLIENT_TIMEOUT_S="30")
    url, path = httpx.URL(gateway.url), "/v1/models/double:predict"
    body = json.dumps({"inputs": {"x": [[1.25, 2.5, 3.75, 5.0]] * 10_000}}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with gateway.client() as http:
        answer_bytes = len(http.post(path, content=body, headers={"Content-Type": "application/json"}).content)
        connections, before = _connections(gateway) - 1, _peak_bytes(gateway)
    slow: list[socket.socket] = []
    stop = threading.Event()

    def read_slowly() -> None:
        while not stop.wait(1):
            for client in slow:
                # It is read without waiting: the others must have their byte, too.
                with suppress(OSError):
                    client.recv(1, socket.MSG_DONTWAIT)

    reader = threading.Thread(target=read_slowly)
    try:
        for _ in range(SLOW_CLIENTS):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(120)
            client.connect((url.host, url.port or 80))
            slow.append(client)
            client.sendall(head + body)
        reader.start()
        with gateway.client() as http:
            for number in range(20):
                found = http.post(path, json={"inputs": {"x": [[number, 2, 3, 4]]}})
                assert found.status_code == 200
        wait_until(lambda: _connections(gateway) <= connections, 300, "the connections are closed")
        assert gateway.answers()
        # The request, the answer, and what decoding makes of them.
        assert _peak_bytes(gateway) - before < SLOW_CLIENTS * 2 * (len(body) + answer_bytes) + 64 * 2**20
    finally:
        stop.set()
        if reader.is_alive():
            reader.join()
        for client in slow:
            client.close()


def _peak_bytes(gateway: GatewayProcess) -> int:
    """The most memory that the process has had."""
    (line,) = (
        each for each in Path(f"/proc/{gateway.pid}/status").read_text().splitlines() if each.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def _connections(gateway: GatewayProcess) -> int:
    """The open sockets of the process, those to the broker included."""
    found = 0
    for link in Path(f"/proc/{gateway.pid}/fd").iterdir():
        # One may be closed meanwhile.
        with suppress(FileNotFoundError):
            found += "socket:" in str(link.readlink())
    return found


def _jobs(redis: Redis) -> int:
    """The jobs of `recorder`, without the streams of events that their subscribers have made."""
    keys = set(redis.scan_iter("{recorder}:job:*", count=10_000))
    return sum(not key.endswith(b":events") for key in keys)
