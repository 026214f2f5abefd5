"""The events of a job as server-sent events. A client that lost its connection goes on behind the last id it saw.

    handle.stream(after = Last-Event-ID) -> id: 3, event: chunk, data: {...} -> ... -> the end of the job

A silence is filled with comments, so that proxies keep the connection. A server that stops ends its streams; `retry:`
tells clients when to come back, to this process or to another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Final

import msgspec
import numpy as np

from penstock.producers.async_client import AsyncJobHandle
from penstock.producers.events import JobEvent
from penstock.producers.gateway.exchange import Exchange
from penstock.producers.gateway.problems import problem_of
from penstock.producers.gateway.waiting import job_headers
from penstock.registry import codecs
from penstock.registry.codecs import Codec
from penstock.registry.errors import BrokerUnavailable, InvalidInput, QueueFull, ResultTimeout
from penstock.registry.tensors import Array

__all__ = ["EVENTS", "HEARTBEAT", "STREAM_HEADERS", "EventStreams", "StreamPlaces", "StreamsStopped", "event_data"]

EVENTS: Final = b"text/event-stream"
STREAM_HEADERS: Final = (
    (b"cache-control", b"no-store"),
    # nginx would collect the events of a stream.
    (b"x-accel-buffering", b"no"),
)
HEARTBEAT: Final = b":\n\n"
_LONGEST_ID: Final = 18


class StreamsStopped(Exception):
    """The server stops, and its streams end."""


class StreamPlaces:
    """The places of event streams and WebSockets in one process. most: places.

    on_change: called when `taken` has changed.
    """

    def __init__(self, most: int, on_change: Callable[[], None]) -> None:
        self._most = most
        self._on_change = on_change
        self.taken = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Inside of the block a stream has a place. Raises QueueFull without one."""
        if self.taken >= self._most:
            raise QueueFull(f"{self._most} streams are open in this process. Expected a retry after 1 s", 1)
        self.taken += 1
        self._on_change()
        try:
            yield
        finally:
            self.taken -= 1
            self._on_change()


class EventStreams:
    """The event streams of one process. heartbeat_s: the longest silence. retry_ms: when clients come back."""

    def __init__(self, places: StreamPlaces, *, heartbeat_s: float = 15.0, retry_ms: int = 1000) -> None:
        self.place: Final = places.place
        """See StreamPlaces.place: it is entered before a job is submitted."""
        self.heartbeat_s: Final = heartbeat_s
        self._retry = b"retry: %d\n\n" % retry_ms
        self._open: set[asyncio.Task[Any] | None] = set()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Ends all streams, and each new one at once."""
        self._stopping.set()
        for task in self._open:
            if task is not None:
                task.cancel()

    async def send(self, handle: AsyncJobHandle, codec: Codec, exchange: Exchange) -> None:
        """Answers with the events of a job. 204 when its end was seen: a browser comes back no more then.

        Raises UnknownJob, QueueFull and BrokerUnavailable before the first byte.
        """
        last = _last_event_id(exchange)
        await handle.status()
        exchange.about = job_headers(handle.id)
        if exchange.method == "HEAD":
            await exchange.begin_stream(EVENTS, STREAM_HEADERS)
            await exchange.end_stream()
            return
        try:
            with self.place(), self.opened(), exchange.watch():
                await self._send(handle, codec, exchange, last)
        except StreamsStopped:
            await self._end(exchange)
        except (BrokerUnavailable, TimeoutError):
            # The client comes back with the last id that it saw.
            if not exchange.has_begun:
                raise
            await self._end(exchange)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside of the block the task is an open stream. The stop of the server ends its wait.

        Raises StreamsStopped.
        """
        if self._stopping.is_set():
            raise StreamsStopped
        task = asyncio.current_task()
        self._open.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._stopping.is_set() or task is None:
                raise
            task.uncancel()
            raise StreamsStopped from None
        finally:
            self._open.discard(task)

    async def _send(self, handle: AsyncJobHandle, codec: Codec, exchange: Exchange, last: int) -> None:
        async with aclosing(self.events(handle, last)) as events:
            async for event in events:
                if not exchange.has_begun:
                    await exchange.begin_stream(EVENTS, STREAM_HEADERS)
                    await exchange.write(self._retry)
                await exchange.write(HEARTBEAT if event is None else _written(handle.id, event, codec))
        if exchange.has_begun:
            await exchange.end_stream()
        else:
            await exchange.answer(204)

    async def events(self, handle: AsyncJobHandle, last: int) -> AsyncGenerator[JobEvent | None, None]:
        """The events behind `last`, and None after each silence."""
        while not self._stopping.is_set():
            try:
                async for event in handle.stream(after=last, timeout=self.heartbeat_s):
                    last = event.seq
                    yield event
                return
            except ResultTimeout:
                yield None

    async def _end(self, exchange: Exchange) -> None:
        if not exchange.has_begun:
            await exchange.begin_stream(EVENTS, STREAM_HEADERS)
        await exchange.write(self._retry)
        await exchange.end_stream()


def event_data(job_id: str, event: JobEvent, codec: Codec) -> dict[str, Any]:
    """{"job_id", "type"}, with "outputs", "fraction", "reason" or "error" as the type has them."""
    facts: dict[str, Any] = {"job_id": job_id, "type": event.type}
    if isinstance(event.data, Mapping):
        facts["outputs"] = {name: _tensor(values, codec) for name, values in event.data.items()}
    elif isinstance(event.data, Exception):
        problem = problem_of(event.data)
        facts["error"] = {"code": problem.code, "title": problem.title, "detail": problem.detail}
    elif event.type == "progress":
        facts["fraction"] = event.data
    elif event.type == "reset":
        facts["reason"] = event.data
    return facts


def _tensor(values: Array, codec: Codec) -> dict[str, Any]:
    is_json = codec == "json" and (values.dtype.kind != "f" or bool(np.isfinite(values).all()))
    return codecs.written(values, "json" if is_json else "base64")


def _written(job_id: str, event: JobEvent, codec: Codec) -> bytes:
    data = msgspec.json.encode(event_data(job_id, event, codec))
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.seq, event.type.encode(), data)


def _last_event_id(exchange: Exchange) -> int:
    text = exchange.header(b"last-event-id").strip() or exchange.query().get("after", "0")
    if not text.isascii() or not text.isdigit() or len(text) > _LONGEST_ID:
        raise InvalidInput("Bad Last-Event-ID. Expected the id of an event of this job, or none")
    return int(text)
