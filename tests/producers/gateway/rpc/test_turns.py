"""Calls pass in groups while several run, and at once while one does."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

from penstock.producers.gateway.rpc.turns import Turn, Turns

MANY: Final = 8


def test_a_call_alone_waits_for_nobody():
    """No turn of the loop passes."""

    async def run() -> None:
        turns = Turn()
        turns.running = 1
        with pytest.raises(StopIteration):
            turns.pass_through().send(None)

    asyncio.run(run())


def test_calls_pass_together():
    """The last running call opens the group for all, without the timer; then the next group begins."""

    async def run() -> list[str]:
        turns, order = Turn(), []
        turns.running = MANY

        async def call(number: int) -> None:
            order.append(f"in {number}")
            await turns.pass_through()
            order.append("out")

        for _ in range(2):
            await asyncio.gather(*(call(number) for number in range(MANY)))
        return order

    group = [*(f"in {number}" for number in range(MANY)), *["out"] * MANY]
    assert asyncio.run(run()) == group * 2


def test_a_group_opens_without_its_last_call():
    """After a moment; a call that was cancelled leaves the others their group."""

    async def run() -> None:
        turns = Turn()
        turns.running = MANY
        cancelled, *others = [asyncio.ensure_future(turns.pass_through()) for _ in range(3)]
        await asyncio.sleep(0)
        cancelled.cancel()
        async with asyncio.timeout(60):
            await asyncio.gather(*others)
        assert cancelled.cancelled()

    asyncio.run(run())


def test_a_group_opens_when_no_other_call_runs():
    """Without the timer: once the jobs of all calls outside of the group have ended, nothing is gained by a wait."""

    async def run() -> None:
        turns = Turn()
        turns.running = 4
        waiting = [asyncio.ensure_future(turns.pass_through()) for _ in range(2)]

        async def opened() -> list[bool]:
            for _ in range(3):
                await asyncio.sleep(0)
            return [call.done() for call in waiting]

        assert await opened() == [False, False]
        turns.leave()
        assert await opened() == [False, False]
        turns.leave()
        assert await opened() == [True, True]

    asyncio.run(run())


def test_each_model_has_its_own_turn():
    """A call of another model passes at once. A model without running calls is forgotten."""

    async def run() -> None:
        turns = Turns()
        first, again, other = turns.begin("a"), turns.begin("a"), turns.begin("b")
        assert first is again is not other
        with pytest.raises(StopIteration):
            other.pass_through().send(None)
        waiting = asyncio.ensure_future(first.pass_through())
        await asyncio.sleep(0)
        turns.end("b")
        turns.end("a")
        await asyncio.wait_for(waiting, 180)
        turns.end("a")
        assert turns.begin("a") is not first

    asyncio.run(run())
