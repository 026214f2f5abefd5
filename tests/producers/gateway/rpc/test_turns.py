"""Calls pass in groups while many run, and at once while few do."""

from __future__ import annotations

import asyncio

import pytest

from penstock.producers.gateway.rpc.turns import FEW, Turns


def test_few_calls_wait_for_nobody():
    """No turn of the loop passes."""

    async def run() -> None:
        turns = Turns()
        turns.running = FEW - 1
        with pytest.raises(StopIteration):
            turns.pass_through().send(None)

    asyncio.run(run())


def test_many_calls_pass_together():
    """The last running call opens the group for all, without the timer; then the next group begins."""

    async def run() -> list[str]:
        turns, order = Turns(), []
        turns.running = FEW

        async def call(number: int) -> None:
            order.append(f"in {number}")
            await turns.pass_through()
            order.append("out")

        for _ in range(2):
            await asyncio.gather(*(call(number) for number in range(FEW)))
        return order

    group = [*(f"in {number}" for number in range(FEW)), *["out"] * FEW]
    assert asyncio.run(run()) == group * 2


def test_a_group_opens_without_its_last_call():
    """After a moment; a call that was cancelled leaves the others their group."""

    async def run() -> None:
        turns = Turns()
        turns.running = FEW
        cancelled, *others = [asyncio.ensure_future(turns.pass_through()) for _ in range(3)]
        await asyncio.sleep(0)
        cancelled.cancel()
        async with asyncio.timeout(60):
            await asyncio.gather(*others)
        assert cancelled.cancelled()

    asyncio.run(run())
