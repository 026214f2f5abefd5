"""What is open for a key ends when the key does; what other keys have open goes on."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from msgspec import structs
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from penstock.producers.gateway.revocations import REVOKED, Revocations
from penstock.registry.api_keys import ShownKey, new_api_key
from penstock.registry.errors import RegistryUnavailable
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.rpc.conftest import Caller
from tests.producers.gateway.test_key_copy import Registry
from tests.producers.gateway.test_keys import Keyed
from tests.producers.gateway.texts import Site
from tests.servers import wait_until

NAP: dict[str, Any] = {"model": "napper", "inputs": {"x": [[8, 4, 4, 4]]}}
PATIENCE_S = 180.0


@pytest.fixture
def keyed(start_gateway: StartGateway, tmp_path: Path) -> Keyed:
    """A gateway that asks for keys."""
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    return Keyed(start_gateway(PENSTOCK_REGISTRY_URL=url, PENSTOCK_INFERENCE_SERVER_API_KEYS="required"), url)


@pytest.fixture
def frozen(stack: GatewayStack) -> Iterator[Callable[[], None]]:
    """No job of the shared worker ends until this is called."""
    stack.worker.freeze()
    yield stack.worker.thaw
    stack.worker.thaw()


def events(http: httpx.Client, location: str, opened: queue.Queue[None]) -> str:
    """Reads a stream to its end."""
    with http.stream("GET", f"{location}/events") as stream:
        lines = stream.iter_lines()
        found = [next(lines)]
        opened.put(None)
        return "\n".join([*found, *lines])


def closed(keyed: Keyed, made: ShownKey, opened: queue.Queue[None]) -> tuple[int, str]:
    """Opens a WebSocket, and waits for its end."""
    address = f"{keyed.gateway.url.replace('http', 'ws')}/predict/stream"
    with connect(address, additional_headers={"X-API-Key": made.text}) as socket:
        opened.put(None)
        with pytest.raises(ConnectionClosed) as end:
            socket.recv(PATIENCE_S)
        assert end.value.rcvd is not None
        return end.value.rcvd.code, end.value.rcvd.reason


def called(keyed: Keyed, made: ShownKey, opened: queue.Queue[None]) -> tuple[Any, str]:
    """Opens a stream of gRPC that sends nothing, and waits for its end."""
    caller, sent = Caller(keyed.gateway.rpc), queue.SimpleQueue[bytes | None]()
    stream = caller.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    answers = stream(iter(sent.get, None), PATIENCE_S, metadata=[("x-api-key", made.text)])
    opened.put(None)
    with pytest.raises(grpc.RpcError):
        next(answers)
    sent.put(None)
    caller.channel.close()
    return answers.code(), answers.details()


@pytest.mark.parametrize("change", ["revoke", "rotate"])
def test_what_is_open_ends_with_its_key(keyed: Keyed, frozen: Callable[[], None], change: str):
    """An event stream ends, requests that wait get 401, a WebSocket 1008, gRPC UNAUTHENTICATED; another key goes on."""
    made, other = keyed.key("ends", tenant="one"), keyed.key("goes on", tenant="one")
    opened: queue.Queue[None] = queue.Queue()
    with keyed.client(made) as http, keyed.client(other) as neighbour, ThreadPoolExecutor(6) as pool:
        location = http.post("/v1/jobs", json=NAP).headers["location"]
        stream = pool.submit(events, http, location, opened)
        kept = pool.submit(events, neighbour, location, opened)
        waits: list[Future[httpx.Response]] = [
            pool.submit(http.get, f"{location}?wait=300"),
            pool.submit(http.post, "/v1/models/napper:predict", json={"inputs": NAP["inputs"]}),
        ]
        socket = pool.submit(closed, keyed, made, opened)
        call = pool.submit(called, keyed, made, opened)
        for _ in range(4):
            opened.get(timeout=PATIENCE_S)
        wait_until(lambda: "penstock_http_waiting 2.0" in _metrics(keyed), PATIENCE_S, "two requests wait")
        if change == "revoke":
            keyed.registry.revoke(made.key.id, int(time.time()))
        else:
            keyed.registry.replace_secret(made.key.id, time.time())
        assert "completed" not in stream.result(PATIENCE_S)
        for wait in waits:
            found = wait.result(PATIENCE_S)
            assert (found.status_code, found.headers["content-type"]) == (401, "application/problem+json")
            assert "revoked, or has expired" in found.json()["detail"]
            assert "www-authenticate" in found.headers
        assert socket.result(PATIENCE_S) == (1008, REVOKED)
        code, details = call.result(PATIENCE_S)
        assert (code, "revoked" in details) == (grpc.StatusCode.UNAUTHENTICATED, True)
        assert not kept.done()
        frozen()
        assert "completed" in kept.result(PATIENCE_S)
        assert neighbour.get(location).json()["status"] == "completed"
    assert "request failed" not in keyed.gateway.output.read_text()
    assert "ASGI callable" not in keyed.gateway.output.read_text()


def test_a_stream_of_text_ends_with_the_reason(keyed: Keyed, site: Site):
    """OpenAI's clients read it as an error; there is no [DONE]."""
    made, opened = keyed.key("texts"), queue.Queue[None]()
    wish = {"model": "writer", "messages": [{"role": "user", "content": "a"}], "stream": True}

    def read(http: httpx.Client) -> list[str]:
        with http.stream("POST", "/v1/chat/completions", json=wish) as stream:
            lines = stream.iter_lines()
            found = [next(lines)]
            opened.put(None)
            return [line for line in (*found, *lines) if line]

    with keyed.client(made) as http, ThreadPoolExecutor(1) as pool:
        site.worker.freeze()  # the text cannot end
        try:
            text = pool.submit(read, http)
            opened.get(timeout=PATIENCE_S)
            keyed.registry.revoke(made.key.id, int(time.time()))
            lines = text.result(PATIENCE_S)
        finally:
            site.worker.thaw()
    assert "revoked, or has expired" in lines[-1]
    assert lines[-1].startswith('data: {"error":')


def test_expired_and_forgotten_keys_end_and_others_are_looked_for_again():
    """Each is told once; while the keys cannot be read nothing ends; a watch that was ended hears nothing."""
    keys = [structs.replace(new_api_key(name, now=0).key, revision=number + 1) for number, name in enumerate("abc")]
    short, long, closed_one = structs.replace(keys[0], expires_at=50), *keys[1:]
    ended: list[str] = []

    async def run(registry: Registry) -> None:
        unix_s = 0.0
        revocations = Revocations(registry.copy, lambda: unix_s, interval_s=0)
        for key in (short, long):
            revocations.watch(key, lambda key=key: ended.append(key.label))  # type: ignore[misc]
        revocations.watch(closed_one, lambda: ended.append(closed_one.label))()
        await turns(registry)
        assert ended == []
        unix_s, registry.error = 60.0, RegistryUnavailable("away")
        registry.now_s += 5
        await turns(registry)
        assert ended == []
        registry.error = None
        await turns(registry)
        assert ended == ["a"]
        registry.keys[1] = structs.replace(long, revision=9, revoked_at=60)
        registry.now_s += 5
        await turns(registry)
        await turns(registry)
        assert ended == ["a", "b"]
        assert revocations._looking is None
        await revocations.aclose()

    async def turns(registry: Registry) -> None:
        """Lets it look several times."""
        for _ in range(3):
            read = len(registry.asked)
            for _ in range(50):
                await asyncio.sleep(0.001)
                if len(registry.asked) > read:
                    break
            await registry.idle()

    registry = Registry([short, long, closed_one])
    asyncio.run(run(registry))


def _metrics(keyed: Keyed) -> str:
    with keyed.client(keyed.key("monitor", role="admin")) as http:
        return http.get("/metrics").text
