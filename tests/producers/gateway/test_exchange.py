"""How long an exchange waits for the body of its request, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.producers.gateway.exchange import Exchange, Limits, Message, RequestRefused


def exchange_of(body: asyncio.Queue[Message], client_timeout_s: float) -> Exchange:
    """An exchange whose messages come from a queue."""

    async def send(_: Message) -> None:
        raise AssertionError("no answer is sent")

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    return Exchange(scope, body.get, send, Limits(1000, client_timeout_s))


def test_a_body_in_time_leaves_no_timer():
    """Also one of several parts. The task goes on as if there had been no limit."""

    async def run() -> None:
        body = asyncio.Queue[Message]()
        exchange = exchange_of(body, client_timeout_s=0.001)
        body.put_nowait({"type": "http.request", "body": b"ab", "more_body": True})
        body.put_nowait({"type": "http.request", "body": b"c"})
        assert await exchange.body() == b"abc"
        await asyncio.sleep(0.05)

    asyncio.run(run())


def test_a_body_that_does_not_come_is_refused():
    """With 408. The task that read it is not cancelled: it answers."""

    async def run() -> None:
        with pytest.raises(RequestRefused) as refused:
            await exchange_of(asyncio.Queue(), client_timeout_s=0.001).body()
        assert refused.value.status == 408
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        await asyncio.sleep(0)

    asyncio.run(run())


@pytest.mark.parametrize("is_late", [False, True])
def test_a_cancelled_task_is_no_slow_client(is_late: bool, monkeypatch: pytest.MonkeyPatch):
    """A server that stops cancels its requests. That is not taken for the end of their time, also if both come."""

    async def run() -> None:
        timers: list[Callable[[], object]] = []
        loop = asyncio.get_running_loop()

        def call_later(_: float, end: Callable[[], object]) -> asyncio.Handle:
            timers.append(end)
            return loop.call_soon(lambda: None)

        monkeypatch.setattr(loop, "call_later", call_later)
        reading = asyncio.ensure_future(exchange_of(asyncio.Queue(), client_timeout_s=60.0).body())
        await asyncio.sleep(0)
        if is_late:
            timers[0]()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(run())
