"""The producers' end of Redis Streams for asyncio: the same scripts as redis_producer.py, awaited.

redis-py opens the connections, with every option of the URL. After that, hiredis packs the commands and parses the
answers, without a task or a stream: those took a third of a client's time per job.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import hiredis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, NoScriptError, OutOfMemoryError, ReadOnlyError, ResponseError

from penstock.registry.broker import foreign_keys, meters
from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.base import (
    Announced,
    Backlog,
    CancelOutcome,
    JobRecord,
    Limits,
    Publication,
    Rating,
    Receipt,
    StreamEntry,
    Usage,
)
from penstock.registry.broker.broker_url import BrokerAddress, parse_broker_url
from penstock.registry.broker.meters import Charge, Lines, Spent, spend, spent
from penstock.registry.broker.redis_connection import (
    LOST_CONNECTION,
    REPAIRS,
    RETRY_PAUSE_S,
    closed_connection,
    diagnosed,
    log_quarantined,
    may_speak_tls,
    open_client,
)
from penstock.registry.broker.redis_reads import Steps, T, read_job_record, read_job_records
from penstock.registry.broker.redis_refusals import final, refusal, unanswered
from penstock.registry.errors import BrokerDamaged
from penstock.registry.queues import MODELS_KEY, WORKERS_KEY, events_key, flow_key, record_key, stream_keys, worker_key

__all__ = ["AsyncRedisStreams"]


_READ_COUNT: Final = 256


class AsyncRedisStreams:
    """ProducerEnd, awaited. Belongs to one event loop at a time."""

    def __init__(
        self, client: redis.asyncio.Redis, address: BrokerAddress, *, timeout_s: float, result_ttl_ms: int
    ) -> None:
        self.timeout_s = timeout_s
        self.address = address
        self._calling = _Connection(client, timeout_s)
        self._reading = _Connection(client, timeout_s)
        self._result_ttl_ms = result_ttl_ms
        self._has_answered = False

    @classmethod
    def from_url(cls, url: str, *, timeout_s: float = 5.0, result_ttl_ms: int = 3_600_000) -> AsyncRedisStreams:
        """From redis://, rediss:// or unix://. Connects later. Raises ConfigurationError for other URLs."""
        client = open_client(redis.asyncio.Redis.from_url, Retry(NoBackoff(), 0), url, timeout_s)
        return cls(client, parse_broker_url(url), timeout_s=timeout_s, result_ttl_ms=result_ttl_ms)

    def publish_now(
        self, slot: str, jobs: Sequence[Publication], limits: Limits, on_answer: Callable[[list[Receipt] | None], None]
    ) -> bool:
        """`publish` without a task. Returns False, and nothing happens, when the connection is not open.

        on_answer: called when the answer is read. None means that it failed, and `publish` is to repeat it.
        """

        def receive(found: Any) -> None:
            on_answer(None if isinstance(found, Exception) else scripts.receipts(slot, jobs, found))

        if (call := scripts.webhook_slot(slot, jobs)) is not None and not self._calling.ask_now(call, lambda _: None):
            return False
        return self._calling.ask_now(scripts.publish(slot, jobs, limits), receive)

    async def publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        """See ProducerEnd.publish."""
        if (call := scripts.webhook_slot(slot, jobs)) is not None:
            await self._run(call)
        return scripts.receipts(slot, jobs, await self._run(scripts.publish(slot, jobs, limits)))

    async def job_records(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """See ProducerEnd.job_records."""
        return await self._run_steps(read_job_records(job_ids))

    async def job_record(self, job_id: str, *, subscribe: bool = False) -> JobRecord | None:
        """See ProducerEnd.job_record."""
        try:
            return await self._run_steps(read_job_record(job_id, subscribe=subscribe))
        except BrokerDamaged:
            # See RedisProducer.
            return None

    async def cancel(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome | JobRecord:
        """See ProducerEnd.cancel."""
        return await self._cancel(job_id, tenant, sealed, unless_followed=False)

    async def abandon(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome | JobRecord:
        """See ProducerEnd.abandon."""
        return await self._cancel(job_id, tenant, sealed, unless_followed=True)

    async def _cancel(
        self, job_id: str, tenant: str, sealed: bytes, *, unless_followed: bool
    ) -> CancelOutcome | JobRecord:
        call = scripts.cancel(job_id, tenant, sealed, self._result_ttl_ms, unless_followed=unless_followed)
        return scripts.cancelled(await self._run(call))

    async def follow(self, job_ids: Sequence[str], follower: str, ttl_ms: int) -> None:
        """See ProducerEnd.follow."""
        for call in scripts.follow(job_ids, follower, ttl_ms):
            await self._run(call)

    def unfollow(self, job_ids: Sequence[str], follower: str) -> None:
        """See ProducerEnd.unfollow. Not awaited: a note that is not deleted lapses."""
        for call in scripts.follow(job_ids, follower, 0):
            self._calling.ask_now(call, lambda _: None)

    async def expire(self, job_id: str, tenant: str, sealed: bytes) -> bool:
        """See ProducerEnd.expire."""
        return bool(await self._run(scripts.expire(job_id, tenant, sealed, self._result_ttl_ms)))

    async def forget(self, job_id: str) -> None:
        """Deletes the result and the events of a job that has ended."""
        for key in (record_key(job_id), events_key(job_id)):
            await self._run(["PEXPIRE", key, 0])

    async def rate(self, job_id: str, experiment: str, version: str, quality: float) -> Rating:
        """See ProducerEnd.rate."""
        return scripts.rated(await self._run(scripts.rate(job_id, experiment, version, quality)))

    async def read(self, cursors: Mapping[str, str], block_ms: int, count: int = _READ_COUNT) -> list[StreamEntry]:
        """See ProducerEnd.read."""
        connection = self._reading if block_ms > 0 else self._calling
        return scripts.entries(await self._run(scripts.read(cursors, block_ms, count, self.timeout_s), connection))

    def read_now(
        self, cursors: Mapping[str, str], block_ms: int, on_answer: Callable[[list[StreamEntry] | None], None]
    ) -> bool:
        """`read` without a task; see publish_now."""

        def receive(found: Any) -> None:
            on_answer(None if isinstance(found, Exception) else scripts.entries(found))

        return self._reading.ask_now(scripts.read(cursors, block_ms, _READ_COUNT, self.timeout_s), receive)

    def trim(self, key: str, before: str) -> None:
        """See ProducerEnd.trim. Not awaited: entries that are not deleted expire with the stream."""
        self._calling.ask_now(scripts.trim(key, before), lambda _: None)

    async def nudge(self, key: str) -> None:
        """See ProducerEnd.nudge."""
        for command in scripts.nudge(key):
            await self._run(command)

    async def spec(self, slot: str, version: str = "") -> bytes | None:
        """See ProducerEnd.spec."""
        found: bytes | None = await self._run(scripts.spec(slot, version))
        return found

    async def announced(self, slot: str) -> Announced:
        """See ProducerEnd.announced."""
        return scripts.parse_announced(await self._run(scripts.announced(slot)))

    async def actives(self, slots: Sequence[str]) -> dict[str, bytes]:
        """See WorkerEnd.actives."""
        return scripts.parse_actives(slots, await self._run(scripts.actives(slots)))

    async def spend(
        self, requests: Sequence[Sequence[Charge]], lines: Mapping[int, Lines] | None = None
    ) -> list[Spent]:
        """Admits or refuses requests within their limits, in order. See registry/broker/meters.py."""
        return spent(requests, await self._run(spend(requests, lines)))

    async def charged(self, batch_id: str) -> frozenset[int]:
        """The numbers of the lines of a batch that `spend` has charged."""
        return meters.parse_charged(await self._run(meters.charged(batch_id)))

    async def models(self) -> list[str]:
        """See FleetEnd.models."""
        return sorted(name.decode() for name in await self._run(["SMEMBERS", MODELS_KEY]))

    async def workers(self) -> list[bytes]:
        """See FleetEnd.workers. The name of a worker without a report stays: operators remove it."""
        names = [name.decode() for name in await self._run(["ZRANGE", WORKERS_KEY, 0, -1])]
        reports = await self._run(["MGET", *map(worker_key, names)]) if names else []
        return [report for report in reports if report is not None]

    async def backlog(self, slot: str) -> Backlog:
        """The jobs of a slot now. Two readings tell how fast its workers are. Raises BrokerUnavailable."""
        done, *depths = await asyncio.gather(
            self._run(["HGET", flow_key(slot), "done"]), *(self._run(["XLEN", key]) for key in stream_keys(slot))
        )
        # Another program may have written to the field.
        return Backlog(sum(depths), int(done) if done and done.isdigit() else 0)

    async def usage(self, slot: str) -> dict[tuple[str, str], Usage]:
        """See OperatorEnd.usage."""
        return meters.parse_usage(await self._run(meters.usage(slot)))

    def forget_connections(self) -> None:
        """After a fork: drop the parent's connections without closing its sockets."""
        self._calling.forget()
        self._reading.forget()

    def abandon_connections(self) -> None:
        """After the event loop was closed: close the sockets without it. The next call connects in its own loop."""
        self._calling.abandon()
        self._reading.abandon()

    async def aclose(self) -> None:
        """Close the connections. Later calls raise ClientUnusable."""
        await self._calling.aclose()
        await self._reading.aclose()

    async def _run(self, command: scripts.Call, connection: _Connection | None = None) -> Any:
        """One command, repeated on a new connection until the time-out. A blocking read has its own connection."""
        deadline, repairs = time.monotonic() + self.timeout_s, 0
        foreign: ResponseError | None = None
        connection = connection or self._calling
        while True:
            try:
                if foreign is not None:
                    await self._quarantine(command, foreign)
                answer = await self._once(connection, command)
            except ResponseError as error:
                if not foreign_keys.is_foreign(error) or repairs == REPAIRS:
                    raise refusal(error, self.address, command) or error from error
                foreign, repairs = error, repairs + 1
            except BrokerDamaged:
                raise
            except LOST_CONNECTION as error:
                await self._raise_if_final(error)
                if deadline - time.monotonic() <= RETRY_PAUSE_S:
                    raise unanswered(error, self.address, self.timeout_s) from error
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                self._has_answered = True
                return answer

    async def _run_steps(self, steps: Steps[T]) -> T:
        answer: Any = None
        try:
            while True:
                answer = await self._run(steps.send(answer))
        except StopIteration as end:
            found: T = end.value
            return found

    async def _quarantine(self, command: scripts.Call, error: ResponseError) -> None:
        """See RedisConnection."""
        for call in foreign_keys.calls(command, error):
            try:
                log_quarantined(await self._once(self._calling, call))
            except ResponseError as refused:
                raise refusal(error, self.address, command) or error from refused

    async def _raise_if_final(self, error: BaseException) -> None:
        """See RedisConnection."""
        was_known, self._has_answered = self._has_answered, True
        refused = final(error, self.address)
        if refused is None and not was_known and may_speak_tls(error, self.address):
            refused = await asyncio.to_thread(diagnosed, error, self.address)
        if refused is not None:
            raise refused from error

    async def _once(self, connection: _Connection, command: scripts.Call) -> Any:
        try:
            return await connection.ask(command)
        except NoScriptError:
            for source in scripts.SOURCES.values():
                await connection.ask(["SCRIPT", "LOAD", source])
            return await connection.ask(command)


class _Connection:
    """One connection, opened at its first use and again after it was lost."""

    def __init__(self, client: redis.asyncio.Redis, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._wire: _Wire | None = None
        self._opening: asyncio.Lock | None = None
        self._is_closed = False

    def ask_now(self, command: scripts.Call, on_answer: Callable[[Any], None]) -> bool:
        """Sends one command if the connection is open; see _Wire.send."""
        wire = self._wire
        return wire is not None and wire.send(hiredis.pack_command(tuple(command)), on_answer)

    async def ask(self, command: scripts.Call) -> Any:
        """The answer to one command. Others may be sent meanwhile. Raises the errors of redis-py."""
        wire = self._wire
        if wire is None or wire.is_lost:
            wire = await self._open()
        return await wire.ask(hiredis.pack_command(tuple(command)))

    async def _open(self) -> _Wire:
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._is_closed:
                raise closed_connection()
            if self._wire is None or self._wire.is_lost:
                # redis-py leaves the pool's methods untyped.
                pool: Any = self._client.connection_pool
                connection = pool.connection_class(**pool.connection_kwargs)
                try:
                    await connection.connect()
                except BaseException:
                    # A caller that is cancelled meanwhile would leave its socket behind.
                    connection._close()
                    raise
                self._wire = _Wire(connection, self._timeout_s)
            return self._wire

    def forget(self) -> None:
        """After a fork: the connection belongs to the parent."""
        self._wire = self._opening = None

    def abandon(self) -> None:
        """After its event loop was closed: closes the socket."""
        wire = self._wire
        self.forget()
        if wire is not None:
            wire.abandon()

    async def aclose(self) -> None:
        """Closes the connection for good."""
        self._is_closed = True
        if self._wire is not None:
            await self._wire.aclose()


class _Wire(asyncio.Protocol):
    """Commands and their answers on an open connection, in order. A caller may stop waiting for its answer."""

    def __init__(self, connection: Any, timeout_s: float) -> None:
        self.is_lost = False
        self._connection = connection
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._answers = hiredis.Reader(replyError=_reply_error)
        self._asked: deque[tuple[Callable[[Any], None], float]] = deque()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._alarm: asyncio.TimerHandle | None = None
        # No answer is outstanding: redis-py has read the answers to all commands that it sent while connecting.
        self._transport = connection._writer.transport
        self._transport.set_protocol(self)
        if self._transport.is_closing():
            self.connection_lost(None)

    def ask(self, packed: bytes) -> asyncio.Future[Any]:
        """The answer to one packed command. Without one: ConnectionError or TimeoutError of redis-py."""
        answer: asyncio.Future[Any] = self._loop.create_future()

        def receive(found: Any) -> None:
            if answer.done():
                return
            if isinstance(found, Exception):
                answer.set_exception(found)
            else:
                answer.set_result(found)

        if not self.send(packed, receive):
            answer.set_exception(redis.ConnectionError("the connection was lost"))
        return answer

    def send(self, packed: bytes, on_answer: Callable[[Any], None]) -> bool:
        """Sends one packed command. Returns False when the connection is lost.

        on_answer: called when the answer is read, with the answer or with the exception in its place.
        """
        if self.is_lost:
            return False
        self._asked.append((on_answer, self._loop.time() + self._timeout_s))
        if self._alarm is None:
            self._alarm = self._loop.call_later(self._timeout_s, self._check_time)
        self._transport.write(packed)
        return True

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._answers.feed(data)
        try:
            while self._asked and (found := self._answers.gets()) is not False:
                on_answer, _ = self._asked.popleft()
                on_answer(found)
        except hiredis.ProtocolError:
            self._lose(redis.ConnectionError("the server does not speak the Redis protocol"))

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._lose(redis.ConnectionError("the connection was lost"))
        if not self._closed.done():
            self._closed.set_result(None)

    def _check_time(self) -> None:
        """One timer serves all commands: the oldest one times out first."""
        self._alarm = None
        if not self._asked:
            return
        due = self._asked[0][1]
        if due <= self._loop.time():
            self._lose(redis.TimeoutError("no answer in time"))
        else:
            self._alarm = self._loop.call_at(due, self._check_time)

    def _lose(self, error: Exception) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        if self._alarm is not None:
            self._alarm.cancel()
        self._transport.abort()
        self._connection._close()
        asked, self._asked = self._asked, deque()
        for on_answer, _ in asked:
            on_answer(error)

    def abandon(self) -> None:
        """Closes the socket of a connection whose event loop was closed, and drops the callers of that loop."""
        self.is_lost = True
        self._asked.clear()
        transport: Any = self._transport
        # With TLS, the transport of the socket is below.
        below = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None) or transport
        for close in (transport.abort, self._connection._close):
            # They mark it as closed before they ask the loop.
            with contextlib.suppress(RuntimeError):
                close()
        # asyncio closes the socket in a callback of its loop, which runs no more. Other loops do it themselves.
        if getattr(below, "_sock", None) is not None:
            with contextlib.suppress(RuntimeError):
                below._call_connection_lost(None)

    async def aclose(self) -> None:
        """Closes the connection."""
        self._lose(redis.ConnectionError("the connection was closed"))
        await asyncio.wait([self._closed], timeout=self._timeout_s)


def _reply_error(text: str) -> redis.RedisError:
    """The exception for an error line of the server. Only the kinds that we handle have classes of their own."""
    word, _, rest = text.partition(" ")
    if word == "NOSCRIPT":
        return NoScriptError(rest)
    if word == "LOADING":
        # A ConnectionError: the call is repeated until its time is over.
        return BusyLoadingError(rest)
    if word == "OOM":
        return OutOfMemoryError(rest)
    if word == "READONLY":
        return ReadOnlyError(rest)
    return ResponseError(text.removeprefix("ERR "))
