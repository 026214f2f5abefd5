"""The asyncio client of models in this process; `AsyncClient.in_memory` makes it.

a call of the client -> AsyncClientEnd -> the broker in memory, at once: its lock is held for moments
a read that waits    -> the thread `replies` -> the event loop that asked
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, TypeAlias

from penstock.producers.async_client import AsyncClient
from penstock.registry.broker.base import (
    Announced,
    CancelOutcome,
    JobRecord,
    Limits,
    Publication,
    Rating,
    Receipt,
    StreamEntry,
)
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.settings import Settings
from penstock.testing.client import ServedSpecs
from penstock.testing.model import Served
from penstock.testing.worker import ClientEnd, InMemoryWorker, InParent

__all__ = ["AsyncClientEnd", "InMemoryAsyncClient"]

_READ_COUNT: Final = 256
_JOIN_S: Final = 5.0
_CLOSING_S: Final = 0.002
"""How often an event loop looks whether the worker has ended."""
Answer: TypeAlias = Callable[[list[StreamEntry] | None], None]


class InMemoryAsyncClient(AsyncClient):
    """An AsyncClient with a broker and a worker of its own, on threads of this process. `aclose` ends them."""

    _broker: Any
    """An AsyncClientEnd in the place of a connection to Redis; in a forked child InParent."""

    def __init__(
        self, models: Mapping[str, Served], *, tenant: str | None = None, settings: Settings | None = None
    ) -> None:
        settings = settings or Settings.load()
        self._worker = InMemoryWorker(models, settings)
        super().__init__("", tenant=tenant, settings=settings)
        self._specs = ServedSpecs(self._worker, settings)
        weakref.finalize(self, self._worker.abandon).atexit = False

    async def aclose(self) -> None:
        """Ends the worker and its threads. Its running jobs are asked to stop; waiting ones end with it."""
        await super().aclose()
        ending = threading.Thread(target=self.close_worker, name="closing", daemon=True)
        ending.start()
        while ending.is_alive():
            await asyncio.sleep(_CLOSING_S)

    def close_worker(self) -> None:
        """Ends the worker and its threads without an event loop: for one that was closed before the client."""
        self._end.close()
        self._worker.close()

    def _connect(self, url: str, timeout_s: float, result_ttl_ms: int) -> None:
        self._end = self._broker = AsyncClientEnd(self._worker.connect())
        self._start_reading()

    def _leave_parent(self) -> None:
        self._worker.forget()
        self._broker = InParent()
        self._start_reading()


class _Read(NamedTuple):
    """A read that waits, and where its answer goes."""

    cursors: Mapping[str, str]
    block_ms: int
    most: int
    loop: asyncio.AbstractEventLoop
    answer: Callable[[list[StreamEntry] | Exception], None]


class AsyncClientEnd:
    """ProducerEnd, awaited: the calls of AsyncRedisStreams over a broker in memory. For any event loop."""

    def __init__(self, end: ClientEnd) -> None:
        self._end = end
        self._reads: SimpleQueue[_Read | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # Without `aclose` the thread would wait for the next read for ever.
        weakref.finalize(self, self._reads.put, None).atexit = False

    def publish_now(
        self, slot: str, jobs: Sequence[Publication], limits: Limits, on_answer: Callable[[list[Receipt] | None], None]
    ) -> bool:
        """`publish` without a task; see AsyncRedisStreams.publish_now."""
        try:
            receipts = self._end.publish(slot, jobs, limits)
        except BrokerUnavailable:
            return False
        asyncio.get_running_loop().call_soon(on_answer, receipts)
        return True

    async def publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        """See ProducerEnd.publish."""
        return self._end.publish(slot, jobs, limits)

    async def job_records(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """See ProducerEnd.job_records."""
        return self._end.job_records(job_ids)

    async def job_record(self, job_id: str, *, subscribe: bool = False) -> JobRecord | None:
        """See ProducerEnd.job_record."""
        return self._end.job_record(job_id, subscribe=subscribe)

    async def cancel(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome | JobRecord:
        """See ProducerEnd.cancel."""
        return self._end.cancel(job_id, tenant, sealed)

    async def abandon(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome | JobRecord:
        """See ProducerEnd.abandon."""
        return self._end.abandon(job_id, tenant, sealed)

    async def follow(self, job_ids: Sequence[str], follower: str, ttl_ms: int) -> None:
        """See ProducerEnd.follow."""
        self._end.follow(job_ids, follower, ttl_ms)

    def unfollow(self, job_ids: Sequence[str], follower: str) -> None:
        """See ProducerEnd.unfollow."""
        self._end.unfollow(job_ids, follower)

    async def expire(self, job_id: str, tenant: str, sealed: bytes) -> bool:
        """See ProducerEnd.expire."""
        return self._end.expire(job_id, tenant, sealed)

    async def rate(self, job_id: str, experiment: str, version: str, quality: float) -> Rating:
        """See ProducerEnd.rate."""
        return self._end.rate(job_id, experiment, version, quality)

    async def read(self, cursors: Mapping[str, str], block_ms: int, count: int = _READ_COUNT) -> list[StreamEntry]:
        """See ProducerEnd.read."""
        if found := self._end.read(cursors, 0, count):
            return found
        if not block_ms:
            return []
        entries: asyncio.Future[list[StreamEntry]] = asyncio.get_running_loop().create_future()

        def receive(found: list[StreamEntry] | Exception) -> None:
            if entries.done():
                return
            if isinstance(found, Exception):
                entries.set_exception(found)
            else:
                entries.set_result(found)

        self._ask(cursors, block_ms, count, receive)
        return await entries

    def read_now(self, cursors: Mapping[str, str], block_ms: int, on_answer: Answer) -> bool:
        """`read` without a task; see AsyncRedisStreams.read_now."""
        if found := self._end.read(cursors, 0, _READ_COUNT):
            asyncio.get_running_loop().call_soon(on_answer, found)
        else:
            self._ask(
                cursors, block_ms, _READ_COUNT, lambda found: on_answer(None if isinstance(found, Exception) else found)
            )
        return True

    def trim(self, key: str, before: str) -> None:
        """See ProducerEnd.trim."""
        self._end.trim(key, before)

    async def nudge(self, key: str) -> None:
        """See ProducerEnd.nudge."""
        self._end.nudge(key)

    async def spec(self, slot: str, version: str = "") -> bytes | None:
        """See ProducerEnd.spec."""
        return self._end.spec(slot, version)

    async def announced(self, slot: str) -> Announced:
        """See ProducerEnd.announced."""
        return self._end.announced(slot)

    async def actives(self, slots: Sequence[str]) -> dict[str, bytes]:
        """See WorkerEnd.actives."""
        return self._end.actives(slots)

    def abandon_connections(self) -> None:
        """After the event loop was closed: nothing here belongs to it."""

    async def aclose(self) -> None:
        """The thread ends by `close`: it may be reading for a moment yet."""

    def close(self) -> None:
        """End the thread. A read under way ends within its time to block."""
        self._reads.put(None)
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _ask(
        self,
        cursors: Mapping[str, str],
        block_ms: int,
        count: int,
        answer: Callable[[list[StreamEntry] | Exception], None],
    ) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve_reads, args=(self._end, self._reads), name="replies", daemon=True
            )
            self._thread.start()
        self._reads.put(_Read(cursors, block_ms, count, asyncio.get_running_loop(), answer))


def _serve_reads(end: ClientEnd, reads: SimpleQueue[_Read | None]) -> None:
    """The thread: one read after the other. A client has one that waits at a time."""
    while (read := reads.get()) is not None:
        found: list[StreamEntry] | Exception
        try:
            found = end.read(read.cursors, read.block_ms, read.most)
        except BrokerUnavailable as error:
            found = error
        # The event loop may have been closed meanwhile.
        with suppress(RuntimeError):
            read.loop.call_soon_threadsafe(read.answer, found)
        # The answer's way leads to the client, which must not live for as long as this thread waits.
        del read, found
