"""Calls in which requests and answers flow both ways: several requests are worked on at a time, answers keep the order.

    requests -> one task each, at most so many -> answers, in the order of the requests -> the client

A server that stops reads no further requests, sends the answers of those that it has read, and ends the call with the
hint to come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias

import grpc

from penstock.producers.gateway.exchange import RequestRefused
from penstock.producers.gateway.rpc.calls import Call, Calls
from penstock.producers.gateway.rpc.messages import parsed
from penstock.registry.errors import BadApiKey, ClientUnusable, InvalidInput

__all__ = ["Refused", "Send", "StreamMethod", "Streams"]

Send: TypeAlias = Callable[[Any], Awaitable[None]]
"""Sends one message of an answer."""
StreamMethod: TypeAlias = Callable[[Call, Any, Send], Awaitable[None]]
"""(call, request, send): works on one request of a stream, and sends its answers."""
Refused: TypeAlias = Callable[[Any, Exception], Any]
"""(request, error) -> the message that answers a request that failed. The request is None if its bytes are none."""
_MOST_AHEAD: Final = 32
"""Requests of one stream that are worked on at a time."""
_MOST_UNSENT: Final = 16
"""Answers to one request that wait for those of the requests before it."""

_Work: TypeAlias = Callable[[Call, bytes, Send], Awaitable[None]]


class Streams:
    """The streams of one process. client_timeout_s: in which a client takes an answer."""

    def __init__(self, calls: Calls, client_timeout_s: float) -> None:
        self._calls = calls
        self._client_timeout_s = client_timeout_s
        self._readers: set[asyncio.Task[None]] = set()
        self.stopping = asyncio.Event()

    def stop(self) -> None:
        """Ends all streams once what they have read is answered, and each new one at once."""
        self.stopping.set()
        for reader in self._readers:
            reader.cancel()

    def both_ways(self, name: str, kind: Any, method: StreamMethod, refused: Refused | None = None) -> Any:
        """The handler of a method with streams of requests of this kind and of answers. name: /service/method.

        refused: answers a request that failed, and the stream goes on; None: its error ends the stream.
        """

        async def work(call: Call, data: bytes, send: Send) -> None:
            request: Any = None
            try:
                # Each request counts, and a key may have been revoked since the first one.
                await self._calls.enter(call, name)
                request = parsed(kind, data)
                await method(call, request, send)
            except BadApiKey:
                # No later request would be admitted.
                raise
            except Exception as error:  # the last place where an error can become an answer
                if refused is None:
                    raise
                await send(refused(request, error))

        async def serve(_requests: Any, context: Any) -> None:
            await self._calls.end(name, context, lambda call: self._serve(call, context, work))

        return grpc.stream_stream_rpc_method_handler(serve)

    async def write(self, context: Any, data: bytes) -> None:
        """Sends a message. Raises RequestRefused when the client does not take it in its time."""
        try:
            async with asyncio.timeout(self._client_timeout_s):
                await context.write(data)
        except TimeoutError:
            raise RequestRefused(408, "The answers are not taken. Expected a client that reads its stream") from None

    async def _serve(self, call: Call, context: Any, work: _Work) -> None:
        if call.idempotency_key() is not None:
            raise InvalidInput("Found idempotency-key, which names one job. Expected none in a stream of several")
        places, answers = asyncio.Semaphore(_MOST_AHEAD), asyncio.Queue[_Answers | None]()

        async def read() -> None:
            # A reader that `stop` has cancelled ends the answers as the client's own end does.
            with suppress(asyncio.CancelledError):
                while not self.stopping.is_set():
                    await places.acquire()
                    if (data := await context.read()) is grpc.aio.EOF:
                        break
                    answers.put_nowait(_Answers(context, data, work))
            answers.put_nowait(None)

        reader = asyncio.get_running_loop().create_task(read())
        self._readers.add(reader)
        current: _Answers | None = None
        try:
            with call.entry.until_revoked():
                while (current := await answers.get()) is not None:
                    async for message in current.messages():
                        await self.write(context, message.SerializeToString())
                    places.release()
        finally:
            self._readers.discard(reader)
            reader.cancel()
            for each in (current, *_left(answers)):
                if each is not None:
                    each.cancel()
        if self.stopping.is_set():
            raise ClientUnusable("the process stops")


class _Answers:
    """The answers to one request, which a task of its own makes."""

    def __init__(self, context: Any, data: bytes, work: _Work) -> None:
        self._unsent = asyncio.Queue[Any](_MOST_UNSENT)
        self._task = asyncio.get_running_loop().create_task(self._run(Call(context), data, work))

    async def messages(self) -> AsyncIterator[Any]:
        """Each message. Raises what ended the task."""
        while (message := await self._unsent.get()) is not None:
            yield message
        await self._task

    def cancel(self) -> None:
        """Nobody takes them any more, nor the error that the task may have ended with."""
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._task.cancel()

    async def _run(self, call: Call, data: bytes, work: _Work) -> None:
        try:
            await work(call, data, self._unsent.put)
        except Exception:
            await self._unsent.put(None)
            raise
        # A task that is cancelled has no reader: the end of its answers would wait for a place.
        await self._unsent.put(None)


def _left(answers: asyncio.Queue[_Answers | None]) -> list[_Answers | None]:
    return [answers.get_nowait() for _ in range(answers.qsize())]
