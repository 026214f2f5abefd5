"""In other people's applications: the middleware and the dependency under a real uvicorn, with a real worker."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from penstock import AsyncClient, Client, ConfigurationError
from penstock.producers.asgi import ASGIMiddleware, ModelDependency, close_client, model
from tests.gateway_process import GatewayProcess
from tests.producers.gateway.conftest import GatewayStack
from tests.servers import RedisServer, free_port, require_module, wait_until

ROW = [1.0, 2.0, 3.0, 4.5]


@contextmanager
def served(server: RedisServer, folder: Path, module: str, path: str) -> Iterator[GatewayProcess]:
    """The application of a module under uvicorn, once the path is answered."""
    require_module("fastapi")
    port = free_port()
    process = GatewayProcess(server, folder)
    process.url = f"http://127.0.0.1:{port}"
    process.launch(
        *(sys.executable, "-m", "uvicorn", f"tests.producers.gateway.{module}:app", "--port", str(port)),
        *("--ws", "websockets-sansio"),
    )

    def answers() -> bool:
        assert process.is_running, process.tail()
        try:
            return httpx.get(f"{process.url}{path}", headers={"X-Caller": "probe"}).status_code in (200, 429)
        except httpx.TransportError:
            return False

    try:
        wait_until(answers, 60, "it answers")
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="module")
def application(stack: GatewayStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """asgi_application.py under uvicorn."""
    with served(stack.server, tmp_path_factory.mktemp("application"), "asgi_application", "/plain") as process:
        yield process


def test_an_application_stops_while_a_stream_of_its_mounted_gateway_is_open(stack: GatewayStack, tmp_path: Path):
    """SIGTERM ends the stream with a hint: the server waits for it, and calls `aclose` only behind it."""
    with served(stack.server, tmp_path, "mounted_application", "/inference/health/live") as process:
        stack.worker.freeze()
        try:
            with process.client() as http:
                job = {"model": "napper", "inputs": {"x": [[8, 1, 8, 1]]}}
                location = http.post("/inference/v1/jobs", json=job).headers["location"]
                with http.stream("GET", f"{location}/events") as events:
                    lines = events.iter_lines()
                    assert next(lines).startswith("retry:")
                    process.terminate()
                    assert any(line.startswith("retry:") for line in lines)
            process.wait(180)
            assert "Application shutdown complete" in process.tail()
        finally:
            stack.worker.thaw()


def test_a_route_runs_a_model(application: GatewayProcess):
    """AR-047: the dependency gives the model; the answer has its time."""
    with application.client() as http:
        found = http.post("/double", json=ROW)
    assert found.json() == [2.0, 4.0, 6.0, 9.0]
    assert re.fullmatch(r"app;dur=\d+\.\d{3}", found.headers["server-timing"])


def test_errors_of_jobs_are_answers(application: GatewayProcess):
    """An unknown model is 404, inputs that do not fit are 422; neither is the 500 of an exception nobody caught."""
    with application.client() as http:
        unknown, unfit = http.post("/unknown"), http.post("/double", json=[1.0])
    assert (unknown.status_code, unknown.headers["content-type"]) == (404, "application/problem+json")
    assert (unfit.status_code, "Expected" in unfit.json()["detail"]) == (422, True)


def test_requests_beyond_the_places_are_503(application: GatewayProcess):
    """AR-003: the third at a time is refused with Retry-After; the two others are answered."""
    found: list[httpx.Response] = []
    gate = threading.Barrier(6)

    def nap(number: int) -> None:
        with application.client() as http:
            gate.wait()
            found.append(http.post("/nap", json=[number, 0, 0, 0], headers={"X-Caller": "many"}))

    threads = [threading.Thread(target=nap, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {each.status_code for each in found} == {200, 503}
    for each in found:
        assert each.status_code == 200 or each.headers["retry-after"] == "1"


def test_callers_above_their_rate_are_429(application: GatewayProcess):
    """AR-003: 30 at once, then Retry-After; another caller is not concerned."""
    with application.client() as http:
        found = [http.get("/plain", headers={"X-Caller": "eager"}) for _ in range(35)]
        assert http.get("/plain", headers={"X-Caller": "calm"}).status_code == 200
    refused = [each for each in found if each.status_code == 429]
    assert [each.status_code for each in found[:30]] == [200] * 30
    assert refused
    assert 1 <= int(refused[0].headers["retry-after"]) <= 2


def test_websockets_and_the_lifespan_pass_through(application: GatewayProcess):
    """AR-003: neither is counted nor changed."""

    async def talk() -> Any:
        async with asyncio.timeout(60), connect(f"{application.url.replace('http', 'ws')}/echo") as socket:
            await socket.send("hello")
            return json.loads(await socket.recv())

    assert asyncio.run(talk()) == {"events": ["started"], "said": "hello"}


def test_a_dependency_is_overridden_in_tests(stack: GatewayStack):
    """FastAPI's dependency_overrides finds it by value; without a worker then."""
    fastapi = require_module("fastapi")
    app = fastapi.FastAPI()

    class Fake:
        async def predict(self, inputs: Any) -> Any:
            return {"y": "fake"}

    minilm = fastapi.Depends(model("minilm", "2"))

    async def show(found: Any = minilm) -> Any:
        return await found.predict({})

    app.add_api_route("/", show)
    app.dependency_overrides[model("minilm", "2")] = Fake

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as http:
            return await http.get("/")

    assert asyncio.run(ask()).json() == {"y": "fake"}
    assert model("a") == ModelDependency("a")


def test_a_job_that_takes_too_long_is_cancelled(stack: GatewayStack, monkeypatch: pytest.MonkeyPatch):
    """The time of `predict`: nobody waits any more, so the job does not run; close_client ends the loop's client."""
    monkeypatch.setenv("PENSTOCK_REDIS_URL", stack.server.url)

    async def run() -> str:
        napper = await model("napper")()
        jobs = [await napper.submit({"x": [[number, 7, 7, 7]]}) for number in range(3)]
        before = ids()
        with pytest.raises(TimeoutError):
            await napper.predict({"x": [[9, 7, 7, 7]]}, timeout_s=0.01)
        (late,) = ids() - before
        for job in jobs:
            await job.result(180)
        await close_client()
        await close_client()
        return late

    def ids() -> set[str]:
        with stack.server.client() as redis:
            keys = [key.decode().split(":") for key in redis.scan_iter("{napper}:job:*")]
        return {f"napper.{key[2]}" for key in keys}

    late = asyncio.run(run())
    with Client(stack.server.url) as client:
        assert client.job(late).status() == "cancelled"


def test_clients_of_ended_loops_are_let_go(stack: GatewayStack, monkeypatch: pytest.MonkeyPatch):
    """A program may run each request in a loop of its own, and end none of their clients: connections stay few."""
    monkeypatch.setenv("PENSTOCK_REDIS_URL", stack.server.url)
    clients: list[weakref.ref[AsyncClient]] = []

    async def ask(*, is_last: bool = False) -> None:
        double = await model("double")()
        await double.predict({"x": [ROW]})
        clients.append(weakref.ref(double.client))
        if is_last:
            await close_client()

    for number in range(3):
        asyncio.run(ask(is_last=number == 2))
    gc.collect()
    assert [client() for client in clients] == [None] * 3


@pytest.mark.parametrize("limits", [{"max_in_flight": 0}, {"requests_per_minute": 0}])
def test_limits_below_one_are_refused(limits: dict[str, int]):
    """Where the application is built, and not with a request."""
    with pytest.raises(ConfigurationError, match="Expected at least 1"):
        ASGIMiddleware(None, **limits)  # type: ignore[arg-type]


def test_the_table_of_callers_is_bounded():
    """Each caller that is remembered costs memory: of 20,000 only the last 10,000 are."""
    middleware = ASGIMiddleware(None, requests_per_minute=1)  # type: ignore[arg-type]
    for number in range(20_000):
        assert middleware._admit(str(number), 1, 0.0).is_granted
    assert not middleware._admit("19999", 1, 0.0).is_granted
    assert len(middleware._left) == 10_000
