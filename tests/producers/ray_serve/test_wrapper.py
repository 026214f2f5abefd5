"""CF-055, AR-004: the wrapper as a replica of Ray Serve uses it, with a real Redis, and a worker in memory."""

from __future__ import annotations

import asyncio
import gc
import pickle
from typing import Any

import numpy as np
import pytest

from penstock import (
    AsyncClient,
    BrokerUnavailable,
    Client,
    ClientUnusable,
    InvalidInput,
    ModelError,
    ResultTimeout,
    UnknownJob,
)
from penstock.producers.ray_serve import RayServeConfig, RayServeWrapper
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.queues import Priority, PriorityName
from tests.producers.ray_serve.conftest import X, counted, run
from tests.servers import RedisServer, wait_until

CALLS: tuple[PriorityName, ...] = ("critical", "high", "high", "normal", "normal", "normal", "low")


def double(inputs: Any) -> dict[str, np.ndarray]:
    """What the worker in memory serves."""
    return {"y": np.asarray(inputs["x"]) * 2}


async def wait_for_jobs(broker: RedisStreams, slot: str, number: int) -> dict[str, int]:
    """The jobs in the queues of a slot by priority, once there are so many."""

    def found() -> list[Any]:
        depths = broker.depths(slot)
        return depths if sum(depth.jobs for depth in depths) == number else []

    depths = await asyncio.to_thread(wait_until, found, 60, f"{number} jobs wait")
    return {priority.label: depths[priority].jobs for priority in Priority if depths[priority].jobs}


def test_outputs_are_those_of_the_model():
    """AR-004: a call returns what the function of the worker returns for the same inputs."""

    async def main() -> dict[str, np.ndarray]:
        async with AsyncClient.in_memory({"double": double}) as client:
            return await RayServeWrapper("double", client=client)({"x": X})

    outputs = run(main())
    assert outputs.keys() == {"y"}
    assert np.array_equal(outputs["y"], double({"x": X})["y"])


@pytest.mark.parametrize(
    ("routing", "expected"),
    [(True, {"critical": 1, "high": 2, "normal": 3, "low": 1}), (False, {"normal": 7})],
    ids=["on", "off"],
)
def test_calls_reach_the_queues_of_their_priorities(
    shared_redis: RedisServer, broker: RedisStreams, parked: str, routing: bool, expected: dict[str, int]
):
    """CF-055: a call's priority is that of the queue its job waits in; without routing all wait in that of `normal`.

    A caller who leaves takes the job along, and each such call is counted under the priority of its job.
    """

    async def main() -> dict[str, int]:
        config = RayServeConfig(enable_priority_routing=routing)
        wrapper = RayServeWrapper(parked, config, url=shared_redis.url)
        calls = [asyncio.create_task(wrapper({"x": X}, priority=priority)) for priority in CALLS]
        found = await wait_for_jobs(broker, parked, len(calls))
        for call in calls:
            call.cancel()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(end) for end in ends} == {asyncio.CancelledError}
        await wrapper.close()
        return found

    assert run(main()) == expected
    assert sum(depth.jobs for depth in broker.depths(parked)) == 0
    assert counted(parked) == {(priority, "cancelled"): number for priority, number in expected.items()}


def test_a_call_whose_time_is_up_cancels_its_job(shared_redis: RedisServer, broker: RedisStreams, parked: str):
    """The error says so, and no job is left in the queue."""

    async def main() -> None:
        wrapper = RayServeWrapper(parked, RayServeConfig(timeout_s=0.01), url=shared_redis.url)
        with pytest.raises(ResultTimeout, match=r"within 0.01 s; the job is cancelled. Expected a shorter job"):
            await wrapper({"x": X})
        await wrapper.close()

    run(main())
    assert sum(depth.jobs for depth in broker.depths(parked)) == 0
    assert counted(parked) == {("normal", "timeout"): 1}


def test_calls_of_a_tenant_are_its_jobs(shared_redis: RedisServer, broker: RedisStreams, client: Client, parked: str):
    """The job belongs to the tenant of the call: to another one it does not exist."""

    async def main() -> None:
        wrapper = RayServeWrapper(parked, url=shared_redis.url)
        call = asyncio.create_task(wrapper({"x": X}, tenant="acme"))
        await wait_for_jobs(broker, parked, 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await wrapper.close()

    run(main())
    with shared_redis.client() as redis:
        (key,) = redis.scan_iter(f"{{{parked}}}:job:*")
    job_id = f"{parked}.{key.decode().rpartition(':')[2]}"
    assert client.job(job_id, tenant="acme").status() == "cancelled"
    with pytest.raises(UnknownJob):
        client.job(job_id).status()


def test_telemetry_counts_each_call_once(slot: str):
    """CF-055: by outcome and by the priority of the job; a call that was refused early has none."""

    def serve(inputs: Any) -> dict[str, np.ndarray]:
        if (np.asarray(inputs["x"]) < 0).any():
            raise ValueError("a negative row")
        return double(inputs)

    async def main() -> None:
        async with AsyncClient.in_memory({slot: serve}) as client:
            wrapper = RayServeWrapper(slot, client=client)
            for priority in CALLS:
                await wrapper({"x": X}, priority=priority)
            with pytest.raises(ModelError):
                await wrapper({"x": [[-1.0]]}, priority="low")
            with pytest.raises(InvalidInput):
                await wrapper({"x": X}, priority="hgih")  # type: ignore[call-overload]
            with pytest.raises(InvalidInput):
                await wrapper({"x": X}, priority="high", tenant="No Tenant")

    run(main())
    assert counted(slot) == {
        ("critical", "completed"): 1,
        ("high", "completed"): 2,
        ("normal", "completed"): 3,
        ("low", "completed"): 1,
        ("low", "failed"): 1,
        ("", "refused"): 1,
        ("high", "refused"): 1,
    }


def test_without_telemetry_nothing_is_counted(slot: str):
    """CF-055: the calls are answered all the same."""

    async def main() -> None:
        async with AsyncClient.in_memory({slot: double}) as client:
            wrapper = RayServeWrapper(slot, RayServeConfig(enable_telemetry=False), client=client)
            for priority in CALLS:
                assert "y" in await wrapper({"x": X}, priority=priority)

    run(main())
    assert counted(slot) == {}


def test_health_is_that_of_the_broker(redis_server: RedisServer, announced: str):
    """check_health returns while the broker answers, and raises when it has gone; it is no call."""

    async def main() -> None:
        wrapper = RayServeWrapper(announced, url=redis_server.url)
        await wrapper.check_health()
        await asyncio.to_thread(redis_server.kill)
        with pytest.raises(BrokerUnavailable):
            await wrapper.check_health()
        await wrapper.close()

    run(main())
    assert counted(announced) == {}


def test_a_wrapper_can_be_pickled_before_and_after_a_call(shared_redis: RedisServer, parked: str):
    """Ray Serve copies what a program binds; a copy has a client of its own."""

    async def main() -> None:
        wrapper = RayServeWrapper(parked, RayServeConfig(timeout_s=5), version="1", url=shared_redis.url)
        await wrapper.check_health()
        copy = pickle.loads(pickle.dumps(wrapper))  # noqa: S301 - our own bytes
        assert (copy.model, copy.version, copy.config) == (parked, "1", wrapper.config)
        await copy.check_health()
        for each in (wrapper, copy):
            await each.close()

    run(main())


def test_a_wrapper_with_a_given_client_cannot_be_pickled():
    """The client belongs to this process; the error says so, and close leaves the client to its owner."""

    async def main() -> None:
        async with AsyncClient.in_memory({"double": double}) as client:
            wrapper = RayServeWrapper("double", client=client)
            with pytest.raises(ClientUnusable, match="cannot be pickled"):
                pickle.dumps(wrapper)
            await wrapper.close()
            assert "y" in await wrapper({"x": X})

    run(main())


@pytest.mark.parametrize("is_called", [True, False], ids=["by Ray Serve", "by garbage collection"])
def test_the_destructor_closes_the_client(redis_server: RedisServer, announced: str, is_called: bool):
    """Ray Serve calls it in the event loop of the replica: the connections end while the process goes on."""

    async def main() -> None:
        wrapper = RayServeWrapper(announced, url=redis_server.url)
        await wrapper.check_health()
        with redis_server.client() as redis:
            others = len(redis.client_list()) - 1
            assert others > 0
            if is_called:
                wrapper.__del__()
            else:
                del wrapper
                gc.collect()
            await asyncio.to_thread(wait_until, lambda: len(redis.client_list()) <= others, 60, "it has disconnected")

    run(main())


def test_a_closed_wrapper_connects_anew(shared_redis: RedisServer, parked: str):
    """A second close does nothing."""

    async def main() -> None:
        wrapper = RayServeWrapper(parked, url=shared_redis.url)
        for _ in range(2):
            await wrapper.check_health()
            await wrapper.close()
            await wrapper.close()

    run(main())


def test_a_broker_of_the_environment_is_found_in_the_replica(
    shared_redis: RedisServer, parked: str, monkeypatch: pytest.MonkeyPatch
):
    """Without a URL the settings of the process name it, when the first call or health check comes."""
    wrapper = RayServeWrapper(parked)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", shared_redis.url)

    async def main() -> None:
        await wrapper.check_health()
        await wrapper.close()

    run(main())


def test_a_bad_name_is_refused_at_once():
    """Where the deployment begins, and not with a call."""
    with pytest.raises(InvalidInput, match="Bad model name 'Double'"):
        RayServeWrapper("Double")
