"""Clients that start beside an embedded stack: they wait for it, say so once, and end with it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import AsyncClient, BrokerUnavailable, Client, ConfigurationError
from penstock.producers.stack_start import StackStart
from penstock.registry import stack_file
from penstock.registry.settings import Settings
from penstock.registry.stack_file import RunningStack

AWAITED = "the workers, which load their models: cpu0"


class Starting:
    """A stack that another process would run, as its file and lock show it."""

    def __init__(self, home: Path) -> None:
        keys = home / "signing-keys"
        stack_file.write_private(keys, "local:" + "QUFB" * 11)
        self._home = home
        self._stack = RunningStack(1, f"unix://{home}/redis.sock", str(keys), awaits=AWAITED)
        self._lock = ExitStack()
        self._lock.enter_context(stack_file.hold(home))
        stack_file.write(home, self._stack)

    def become_ready(self) -> None:
        stack_file.write(self._home, replace(self._stack, awaits=""))

    def end(self) -> None:
        """As after SIGKILL: the file stays, the lock does not."""
        self._lock.close()


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Starting]:
    stack = Starting(tmp_path)
    yield stack
    stack.end()


def settings_of(home: Path, **more: str) -> Settings:
    return Settings.load(environ={"PENSTOCK_HOME": str(home), **more}, cwd=home)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record for record in caplog.records if record.name == "penstock.client"]
    assert all(record.levelno == logging.WARNING for record in found)
    return [record.getMessage() for record in found]


def test_a_client_waits_for_a_stack_that_is_starting(tmp_path, starting, caplog):
    """from_env returns when the stack is ready, not before, and says once that it waits and for what."""
    clients: list[Client] = []
    waiting = threading.Thread(target=lambda: clients.append(Client.from_env(settings=settings_of(tmp_path))))
    waiting.start()
    waiting.join(0.3)
    assert not clients
    starting.become_ready()
    waiting.join(60)
    (client,) = clients
    client.close()
    (said,) = warnings_of(caplog)
    assert said.endswith(f"It waits for {AWAITED}")


def test_a_ready_stack_needs_no_waiting(tmp_path, starting, caplog):
    """With a ready stack, or a broker in the settings, there is no wait and no word of one."""
    there = settings_of(tmp_path, PENSTOCK_REDIS_URL="redis://elsewhere:6379/0")
    assert StackStart.of(there, 1.0) is None
    Client.from_env(settings=there).close()
    starting.become_ready()
    Client.from_env(settings=settings_of(tmp_path)).close()
    assert warnings_of(caplog) == []


def test_a_stack_that_is_not_ready_in_time_is_an_error_that_names_the_missing_part(tmp_path, starting):
    """After start_timeout_s the error says what the stack waits for, for both clients."""
    missing = rf"not ready within 0\.1 s: it waits for {AWAITED}\. Expected"
    with pytest.raises(BrokerUnavailable, match=missing):
        Client.from_env(settings=settings_of(tmp_path), start_timeout_s=0.1)

    async def enter() -> None:
        async with AsyncClient.from_env(settings=settings_of(tmp_path), start_timeout_s=0.1):
            pytest.fail("the stack is not ready")

    with pytest.raises(BrokerUnavailable, match=missing):
        asyncio.run(enter())


def test_a_stack_that_dies_while_it_starts_is_an_error_at_once(tmp_path, starting):
    """The wait ends with the stack, long before its time is over."""
    start = StackStart.of(settings_of(tmp_path), 1e6)
    assert start is not None
    assert not start.look(is_over=False)
    starting.end()
    with pytest.raises(ConfigurationError, match=r"ended while it was starting\. Expected .* `penstock up`"):
        start.wait()
    with pytest.raises(ConfigurationError, match="No broker is configured"):
        Client.from_env(settings=settings_of(tmp_path))


def test_no_stack_is_an_error_at_once(tmp_path, caplog):
    """Where no stack runs and none starts, nothing is awaited."""
    with pytest.raises(ConfigurationError, match="No broker is configured and no embedded stack runs"):
        Client.from_env(settings=settings_of(tmp_path))
    assert warnings_of(caplog) == []


def test_the_event_loop_goes_on_while_an_async_client_waits(tmp_path, starting, caplog):
    """AsyncClient.from_env returns at once; `async with` waits for the stack, and other tasks run meanwhile."""

    async def run() -> int:
        turns = 0
        ready = asyncio.Event()

        async def enter() -> None:
            async with AsyncClient.from_env(settings=settings_of(tmp_path)):
                ready.set()

        task = asyncio.create_task(enter())
        while not ready.is_set() and not task.done():
            turns += 1
            if turns == 20:
                assert not ready.is_set()
                starting.become_ready()
            await asyncio.sleep(0.01)
        await task
        return turns

    assert asyncio.run(run()) >= 20
    assert len(warnings_of(caplog)) == 1


def test_a_submit_of_an_async_client_waits_for_the_stack(tmp_path, starting):
    """Without `async with`, the first call that needs a model waits, and ends with the stack."""

    async def submit() -> None:
        client = AsyncClient.from_env(settings=settings_of(tmp_path))
        try:
            task = asyncio.create_task(client.submit("m", {"x": [1]}))
            await asyncio.sleep(0)
            starting.end()
            await task
        finally:
            await client.aclose()

    with pytest.raises(ConfigurationError, match="ended while it was starting"):
        asyncio.run(submit())
