"""CF-056: a decorated predict function submits its calls; the function itself stays reachable."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from penstock import AsyncClient, Cancelled, Client, ConfigurationError, InvalidInput, ResultTimeout
from penstock.producers.ray_serve import RayServeConfig, ray_serve
from penstock.producers.ray_serve.decorator import BlockingCalls
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.queues import Priority
from tests.conftest import StartWorker
from tests.packages import write_package
from tests.producers.ray_serve.conftest import X, counted, run
from tests.servers import RedisServer, wait_until

_SCORED = """
import os

from penstock.producers.ray_serve import RayServeConfig, ray_serve


@ray_serve(config=RayServeConfig(timeout_s=120), url={url!r})
def scored(inputs):
    "Scores rows."
    with open({log!r}, "a") as log:
        log.write(str(os.getpid()) + " ")
    return {{"y": inputs["x"] * 3 - 1}}


def build():
    return scored.direct
"""


def module_of(file: Path) -> ModuleType:
    """The module of a package, as a program that submits imports it."""
    spec = importlib.util.spec_from_file_location("scored_model", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def double(inputs: Any) -> dict[str, np.ndarray]:
    """What the worker in memory serves."""
    return {"y": np.asarray(inputs["x"]) * 2}


def test_result_is_that_of_the_direct_function(
    shared_redis: RedisServer, models_root: Path, tmp_path: Path, start_worker: StartWorker
):
    """CF-056: a real worker serves the same function; its process runs the submitted call, and this one the direct."""
    log = tmp_path / "forwards"
    folder = write_package(models_root, "scored", _SCORED.format(url=shared_redis.url, log=str(log)))
    worker = start_worker(shared_redis, models_root)
    scored = module_of(folder / "model.py").scored
    inputs = {"x": np.array([[1.0, 2.0, 3.0, 4.5], [-1.0, 0.0, 0.5, 7.0]], np.float32)}
    log.write_text("")
    submitted = scored(inputs, priority="high")
    forwards = set(log.read_text().split())
    assert forwards
    assert str(os.getpid()) not in forwards, worker.tail()
    direct = scored.direct(inputs)
    assert str(os.getpid()) in log.read_text().split()
    assert submitted.keys() == direct.keys() == {"y"}
    assert submitted["y"].dtype == direct["y"].dtype
    assert np.array_equal(submitted["y"], direct["y"])
    assert counted("scored") == {("high", "completed"): 1}
    scored.close()


def test_a_coroutine_function_stays_one():
    """CF-056: its calls are awaited, and give what the direct function gives."""

    async def main() -> None:
        async with AsyncClient.in_memory({"double": double}) as client:

            @ray_serve("double", client=client)
            async def twice(inputs: Any) -> dict[str, np.ndarray]:
                """Twice."""
                return double(inputs)

            assert inspect.iscoroutinefunction(twice)
            submitted, direct = await twice({"x": X}, priority="low"), await twice.direct({"x": X})
            assert np.array_equal(submitted["y"], direct["y"])
            await twice.close()

    before = counted("double").get(("low", "completed"), 0)
    run(main())
    assert counted("double")["low", "completed"] == before + 1


def test_a_decorated_function_never_runs_here(slot: str):
    """What answers is the worker: the body of the decorated function is not called."""
    with Client.in_memory({slot: double}) as client:

        @ray_serve(slot, client=client)
        def absent(inputs: Any) -> dict[str, np.ndarray]:
            raise AssertionError("it runs here")

        assert np.array_equal(absent({"x": X})["y"], double({"x": X})["y"])


def test_blocking_calls_reach_the_queue_of_their_priority(
    shared_redis: RedisServer, broker: RedisStreams, client: Client, parked: str
):
    """CF-055: the job waits there while the call blocks; the end of the job is the end of the call."""

    @ray_serve(parked, config=RayServeConfig(timeout_s=120), url=shared_redis.url)
    def predict(inputs: Any) -> dict[str, np.ndarray]:
        return double(inputs)

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(predict, {"x": X}, priority="critical")
        wait_until(lambda: broker.depths(parked)[Priority.CRITICAL].jobs == 1, 60, "the job waits")
        with shared_redis.client() as redis:
            (key,) = redis.scan_iter(f"{{{parked}}}:job:*")
        assert client.job(f"{parked}.{key.decode().rpartition(':')[2]}").cancel() == "cancelled"
        with pytest.raises(Cancelled):
            call.result(180)
    predict.close()
    assert counted(parked) == {("critical", "failed"): 1}


def test_a_blocking_call_whose_time_is_up_cancels_its_job(shared_redis: RedisServer, broker: RedisStreams, parked: str):
    """The error says so, and no job is left in the queue."""

    @ray_serve(parked, config=RayServeConfig(timeout_s=0.01), url=shared_redis.url)
    def predict(inputs: Any) -> dict[str, np.ndarray]:
        return double(inputs)

    with pytest.raises(ResultTimeout, match="the job is cancelled"):
        predict({"x": X})
    predict.close()
    assert sum(depth.jobs for depth in broker.depths(parked)) == 0
    assert counted(parked) == {("normal", "timeout"): 1}


def test_it_looks_like_the_function():
    """Name and documentation are those of the function; the signature says what a call may name beside its inputs."""

    @ray_serve("double")
    def predict(inputs: Any) -> dict[str, np.ndarray]:
        """Predicts."""
        return double(inputs)

    function: Any = predict
    assert (function.__name__, function.__doc__) == ("predict", "Predicts.")
    assert list(inspect.signature(function).parameters) == ["inputs", "priority", "tenant"]
    assert inspect.isfunction(function)


def test_a_function_names_its_model():
    """Without a name, that of the function; one that no model can have is refused where it is decorated."""

    def Double(inputs: Any) -> dict[str, np.ndarray]:
        return double(inputs)

    with Client.in_memory({"double": double}) as client:
        assert "y" in ray_serve(client=client)(double)({"x": X})
    with pytest.raises(InvalidInput, match="Bad model name 'Double'"):
        ray_serve()(Double)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda *, inputs: {}, "cannot be called with one argument"),
        (lambda self, inputs: {}, "cannot be called with one argument"),
        (type("Model", (), {}), "decorates a type. Expected a function"),
    ],
)
def test_what_is_no_predict_function_is_refused(function: Any, expected: str):
    """Where it is decorated, and not with a call."""
    with pytest.raises(ConfigurationError, match=expected):
        ray_serve("double")(function)


def test_a_generator_is_refused():
    """A stream of outputs is no result of one call."""

    def numbers(inputs: Any) -> Any:
        yield inputs

    with pytest.raises(ConfigurationError, match="numbers yields its outputs"):
        ray_serve("double")(numbers)


def test_parentheses_and_the_right_client_are_asked_for():
    """`@ray_serve` without them, and a client of the other kind, are mistakes with a clear error."""
    with pytest.raises(ConfigurationError, match=r"Expected @ray_serve\(\) with parentheses"):
        ray_serve(double)  # type: ignore[arg-type]
    with (
        Client.in_memory({"double": double}) as client,
        pytest.raises(ConfigurationError, match=r"of type InMemoryClient\. Expected an AsyncClient for a coroutine"),
    ):

        @ray_serve("double", client=client)
        async def predict(inputs: Any) -> Any:
            return inputs


def test_calls_of_a_function_can_be_pickled(shared_redis: RedisServer, parked: str):
    """Ray Serve copies a function with all that it holds; a copy connects anew."""
    config = RayServeConfig(timeout_s=0.01)
    calls = BlockingCalls(parked, config, None, shared_redis.url, None)
    for each in (calls, pickle.loads(pickle.dumps(calls))):  # noqa: S301 - our own bytes
        with pytest.raises(ResultTimeout):
            each.run({"x": X}, "normal", None)
        assert pickle.dumps(each)
        each.close()
        each.close()


def test_priorities_of_a_coroutine_function(shared_redis: RedisServer, broker: RedisStreams, parked: str):
    """CF-055: the job of a decorated call waits in the queue of its priority."""

    @ray_serve(parked, url=shared_redis.url)
    async def predict(inputs: Any) -> Any:
        return inputs

    async def main() -> None:
        call = asyncio.create_task(predict({"x": X}, priority="high"))
        await asyncio.to_thread(wait_until, lambda: broker.depths(parked)[Priority.HIGH].jobs == 1, 60, "the job waits")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await predict.close()

    run(main())
    assert counted(parked) == {("high", "cancelled"): 1}
