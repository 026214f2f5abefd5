"""The producers' end of Redis Streams for asyncio: the same scripts as redis_streams, awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import redis.asyncio
from hiredis import pack_command
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, ResponseError

from registry.broker import redis_scripts as scripts
from registry.broker.base import CancelOutcome, Limits, Publication, Receipt, Standing, StreamEntry
from registry.broker.redis_streams import LOST_CONNECTION, RETRY_PAUSE_S, connection_options, refusal, unanswered
from registry.errors import ConfigurationError
from registry.queues import record_key, spec_key

__all__ = ["AsyncRedisStreams"]


class AsyncRedisStreams:
    """ProducerEnd, awaited. Belongs to one event loop."""

    def __init__(self, client: redis.asyncio.Redis, *, timeout_s: float, result_ttl_ms: int) -> None:
        self.timeout_s = timeout_s
        self._redis = client
        # redis-py leaves the pool's methods untyped.
        self._pool: Any = client.connection_pool
        self._publishing = _Line(self._pool)
        self._reading = _Line(self._pool)
        self._result_ttl_ms = result_ttl_ms

    @classmethod
    def from_url(cls, url: str, *, timeout_s: float = 5.0, result_ttl_ms: int = 3_600_000) -> AsyncRedisStreams:
        """From redis://, rediss:// or unix://. Raises ConfigurationError for another scheme; connects later."""
        try:
            client = redis.asyncio.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **connection_options(timeout_s))
        except ValueError:
            raise ConfigurationError(
                "The broker's URL is not usable. Expected redis://host:port/db, rediss://... or unix:///path?db=0"
            ) from None
        return cls(client, timeout_s=timeout_s, result_ttl_ms=result_ttl_ms)

    async def publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        """See ProducerEnd.publish."""
        return scripts.receipts(slot, jobs, await self._run(scripts.publish(slot, jobs, limits), self._publishing))

    async def standings(self, job_ids: Sequence[str]) -> list[Standing | None]:
        """See ProducerEnd.standings."""
        if not job_ids:
            return []
        records = await self._run(["MGET", *map(record_key, job_ids)])
        return [None if record is None else scripts.record_standing(record) for record in records]

    async def standing(self, job_id: str, *, subscribe: bool = False) -> Standing | None:
        """See ProducerEnd.standing."""
        return scripts.stood(await self._run(scripts.standing(job_id, subscribe=subscribe)))

    async def cancel(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome:
        """See ProducerEnd.cancel."""
        return scripts.cancelled(await self._run(scripts.cancel(job_id, tenant, sealed, self._result_ttl_ms)))

    async def read(self, cursors: Mapping[str, str], block_ms: int, count: int = 256) -> list[StreamEntry]:
        """See ProducerEnd.read."""
        line = self._reading if block_ms > 0 else None
        return scripts.entries(await self._run(scripts.read(cursors, block_ms, count, self.timeout_s), line))

    async def trim(self, key: str, before: str) -> None:
        """See ProducerEnd.trim."""
        await self._run(scripts.trim(key, before))

    async def nudge(self, key: str) -> None:
        """See ProducerEnd.nudge."""
        for command in scripts.nudge(key):
            await self._run(command)

    async def spec(self, slot: str) -> bytes | None:
        """See ProducerEnd.spec."""
        found: bytes | None = await self._run(["GET", spec_key(slot)])
        return found

    def forget_connections(self) -> None:
        """After a fork: drop what the parent opened without saying goodbye on its sockets."""
        self._pool.reset()
        self._publishing.forget()
        self._reading.forget()

    async def aclose(self) -> None:
        """Give the connections back."""
        await self._publishing.aclose()
        await self._reading.aclose()
        await self._redis.aclose()

    async def _run(self, command: scripts.Call, line: _Line | None = None) -> Any:
        """One command, repeated on a new connection while the time-out lasts; on a line of its own, or the pool's."""
        deadline = time.monotonic() + self.timeout_s
        ask = self._ask if line is None else line.ask
        while True:
            try:
                return await self._once(ask, command)
            except ResponseError as error:
                raise refusal(error) or error from error
            except LOST_CONNECTION as error:
                if deadline - time.monotonic() <= RETRY_PAUSE_S:
                    raise unanswered(error, self.timeout_s) from error
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _once(self, ask: Callable[[scripts.Call], Awaitable[Any]], command: scripts.Call) -> Any:
        try:
            return await ask(command)
        except NoScriptError:
            for source in scripts.SOURCES.values():
                await self._ask(["SCRIPT", "LOAD", source])
            return await ask(command)

    async def _ask(self, command: scripts.Call) -> Any:
        connection = await self._pool.get_connection()
        try:
            return await _answer(connection, command)
        finally:
            await self._pool.release(connection)


class _Line:
    """A connection for one kind of command, one at a time: the pool looks at a socket before it lends it, and that
    costs as much as the command itself."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._connection: Any = None
        self._lock: asyncio.Lock | None = None

    async def ask(self, command: scripts.Call) -> Any:
        """The answer to one command."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            if self._connection is None:
                connection = self._pool.make_connection()
                await connection.connect()
                self._connection = connection
            try:
                return await _answer(self._connection, command)
            except ResponseError:
                raise
            except BaseException:
                self._connection = None
                raise

    def forget(self) -> None:
        """After a fork: the connection is the parent's."""
        self._connection = self._lock = None

    async def aclose(self) -> None:
        """Gives the connection back."""
        if self._connection is not None:
            await self._connection.disconnect()
            self._connection = None


async def _answer(connection: Any, command: scripts.Call) -> Any:
    """Packed in C: redis-py's asyncio client packs in Python, which took a fifth of a client's time per job."""
    try:
        await connection.send_packed_command(pack_command(tuple(command)), check_health=False)
        return await connection.read_response()
    except ResponseError:
        raise
    except BaseException:
        # Cancelled, too: the answer is still to come, and must not be taken for that of the next command.
        await connection.disconnect(nowait=True)
        raise
