"""A stream that ends early leaves nothing behind: no task that waits, no error that nobody saw."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.producers.gateway.figures import GatewayFigures
from penstock.producers.gateway.rpc.calls import Call, Calls
from penstock.producers.gateway.rpc.messages import message
from penstock.producers.gateway.rpc.streams import Send, Streams
from penstock.registry.errors import InvalidInput


class Context:
    """What a stream needs of a call of grpc.aio: four requests, and a client that goes away at some write."""

    def __init__(self, writes: int) -> None:
        self.left = 4
        self.writes = writes
        self.status = ""

    def invocation_metadata(self) -> tuple[()]:
        """None."""
        return ()

    async def read(self) -> bytes:
        """The next request; then the client waits."""
        if self.left == 0:
            await asyncio.Event().wait()
        self.left -= 1
        return b""

    async def write(self, data: bytes) -> None:
        """Takes so many messages."""
        if self.writes == 0:
            raise ConnectionError
        self.writes -= 1

    async def abort(self, code: Any, details: str, trailing: Any) -> None:
        """Keeps the status."""
        self.status = code.name


@pytest.mark.parametrize(("writes", "fails"), [(3, False), (100, True)])
def test_a_stream_that_ends_early_leaves_no_task(writes: int, fails: bool):
    """The client goes while many answers are unsent, or a request is refused while others fail, too."""
    seen: list[dict[str, Any]] = []

    async def answer(call: Call, request: Any, send: Send) -> None:
        if fails:
            raise InvalidInput("Expected something else")
        for _ in range(100):
            await send(request)

    async def enter(call: Call, method: str) -> None:
        """Everybody may call."""

    async def run() -> str:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
        streams, context = Streams(Calls(GatewayFigures(), enter), 60), Context(writes)
        handler = streams.both_ways("/a/b", message("PredictRequest"), answer)
        with pytest.raises((InvalidInput, ConnectionError)):
            await handler.stream_stream(None, context)
        async with asyncio.timeout(60):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0)
        return context.status

    assert asyncio.run(run()) == ("INVALID_ARGUMENT" if fails else "INTERNAL")
    assert seen == []
