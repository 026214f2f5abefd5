"""The traffic of the asyncio client: calls that carry several jobs, and replies for awaiting tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import pytest
import redis

from penstock.producers.async_replies import AsyncReplyReader, SubmitCoalescer, Subscription
from penstock.producers.job_state import JobState, ResultPolicy
from penstock.registry.broker.base import Limits, Publication, Receipt, State, StreamEntry
from penstock.registry.broker.redis_async import AsyncRedisStreams, _reply_error
from penstock.registry.envelope import Keyring
from penstock.registry.errors import BrokerUnavailable, ClientUnusable
from penstock.registry.queues import Priority, events_key, new_job_id
from tests.servers import RedisServer

REQUEST: ContextVar[str] = ContextVar("request")
POLICY = ResultPolicy(Keyring.parse(None), ttl_s=60)
LIMITS = Limits(10_000, 0, 60_000)
ENTRIES = [StreamEntry("events", f"{number}-0", []) for number in range(3)]


class CountedBroker(AsyncRedisStreams):
    """A connection that notes the number of jobs in each call."""

    calls: list[int]

    def publish_now(
        self, slot: str, jobs: Sequence[Publication], limits: Limits, on_answer: Callable[[list[Receipt] | None], None]
    ) -> bool:
        if is_sent := super().publish_now(slot, jobs, limits, on_answer):
            self.calls.append(len(jobs))
        return is_sent

    async def publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        self.calls.append(len(jobs))
        return await super().publish(slot, jobs, limits)


@asynccontextmanager
async def connected(url: str, timeout_s: float = 5.0) -> AsyncIterator[CountedBroker]:
    """A connection of a client."""
    broker = CountedBroker.from_url(url, timeout_s=timeout_s)
    assert isinstance(broker, CountedBroker)
    broker.calls = []
    try:
        yield broker
    finally:
        await broker.aclose()


@asynccontextmanager
async def reading(broker: CountedBroker) -> AsyncIterator[AsyncReplyReader]:
    """A reply reader; it is closed at the end."""
    reader = AsyncReplyReader(broker)
    try:
        yield reader
    finally:
        await reader.aclose()


def publication(slot: str, *, reply: str = "") -> Publication:
    """A job of this model."""
    return Publication(new_job_id(slot), Priority.NORMAL, b"sealed", "acme", reply)


async def submitted(broker: CountedBroker, reader: AsyncReplyReader, slot: str) -> JobState:
    """A published job whose reply the reader expects."""
    job = publication(slot, reply=reader.address(slot))
    state = JobState(job.job_id, "acme", POLICY, awaits_reply=True)
    reader.expect_all([state])
    await broker.publish(slot, [job], LIMITS)
    return state


def is_reading(reader: AsyncReplyReader) -> bool:
    """Whether the reading task runs."""
    return reader._reader is not None


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine; a wait that never ends fails the test."""
    asyncio.run(asyncio.wait_for(main, 180))


def test_the_jobs_of_one_turn_travel_in_one_call(shared_redis: RedisServer, slot: str):
    """Jobs that come while a call is out travel in the next one; each job gets its own receipt."""

    async def main() -> None:
        async with connected(shared_redis.url) as broker:
            coalescer = SubmitCoalescer(slot, broker, LIMITS)
            jobs = [publication(slot) for _ in range(7)]
            answers = [coalescer.send(job) for job in jobs[:4]]
            await asyncio.sleep(0)
            answers += [coalescer.send(job) for job in jobs[4:]]
            receipts = await asyncio.gather(*answers)
            assert receipts == [Receipt("accepted", job.job_id) for job in jobs]
            await coalescer.send(publication(slot))
            assert broker.calls == [4, 3, 1]

    run(main())


def test_a_call_is_bounded(shared_redis: RedisServer, slot: str):
    """More jobs of one turn than a call may carry travel in several calls, one after the other."""

    async def main() -> None:
        async with connected(shared_redis.url) as broker:
            coalescer = SubmitCoalescer(slot, broker, LIMITS)
            receipts = await asyncio.gather(*(coalescer.send(publication(slot)) for _ in range(300)))
            assert {receipt.outcome for receipt in receipts} == {"accepted"}
            assert broker.calls == [256, 44]

    run(main())


def test_a_cancelled_caller_does_not_stop_the_call_of_the_others(shared_redis: RedisServer, slot: str):
    """Its job travels with theirs: the call was gathered before."""

    async def main() -> None:
        async with connected(shared_redis.url) as broker:
            coalescer = SubmitCoalescer(slot, broker, LIMITS)
            jobs = [publication(slot) for _ in range(2)]
            gone, kept = [coalescer.send(job) for job in jobs]
            gone.cancel()
            assert (await kept).outcome == "accepted"
            assert broker.calls == [2]
            assert await broker.job_record(jobs[0].job_id) is not None

    run(main())


def test_a_broker_that_does_not_answer_is_the_error_of_each_caller(slot: str):
    """The next call is tried afresh."""

    async def main() -> None:
        async with connected("redis://127.0.0.1:1/0", timeout_s=0.05) as broker:
            coalescer = SubmitCoalescer(slot, broker, LIMITS)
            for _ in range(2):
                answers = [coalescer.send(publication(slot)) for _ in range(2)]
                ends = await asyncio.gather(*answers, return_exceptions=True)
                assert [type(end) for end in ends] == [BrokerUnavailable] * 2
            assert broker.calls == [2, 2]

    run(main())


def test_a_subscriber_takes_all_that_has_come():
    """Each entry once; after a silence there are none."""

    async def main() -> None:
        subscription = Subscription()
        waiting = asyncio.ensure_future(subscription.next(10))
        await asyncio.sleep(0)
        for entry in ENTRIES:
            subscription.append(entry)
        assert await waiting == ENTRIES
        assert await subscription.next(0.01) == []
        subscription.append(ENTRIES[0])
        assert await subscription.next(10) == ENTRIES[:1]
        waiting = asyncio.ensure_future(subscription.next(10))
        await asyncio.sleep(0)
        assert not waiting.done()
        subscription.append(ENTRIES[1])
        assert await waiting == ENTRIES[1:2]

    run(main())


def test_every_waiter_of_a_job_is_woken_by_its_reply(shared_redis: RedisServer, slot: str):
    """Other jobs wait on. The reading task starts with the first waiter and ends when nothing is awaited."""

    async def main() -> None:
        async with connected(shared_redis.url) as broker, reading(broker) as reader:
            ended, other = [await submitted(broker, reader, slot) for _ in range(2)]
            assert not is_reading(reader)
            waiters = [reader.reply_to(ended), reader.reply_to(ended)]
            others = reader.reply_to(other)
            await broker.cancel(ended.id, "acme", b"result")
            await asyncio.gather(*waiters)
            assert ended.record is not None
            assert ended.record.state is State.CANCELLED
            assert not others.done()
            task = reader._reader
            assert task is not None
            await broker.cancel(other.id, "acme", b"result")
            await others
            await task
            assert not is_reading(reader)

    run(main())


def test_what_serves_all_callers_is_no_part_of_the_first_one(shared_redis: RedisServer, slot: str):
    """OpenTelemetry keeps the present span in a context variable: each later read would be a child of that span."""
    seen: list[tuple[str, str]] = []

    class WatchedBroker(CountedBroker):
        async def read(self, *arguments: Any) -> Any:
            seen.append(("read", REQUEST.get("none")))
            return await super().read(*arguments)

        def read_now(self, *arguments: Any) -> bool:
            return False

        async def publish(self, *arguments: Any) -> Any:
            seen.append(("publish", REQUEST.get("none")))
            return await super().publish(*arguments)

    async def main() -> None:
        REQUEST.set("first")
        broker = WatchedBroker.from_url(shared_redis.url, timeout_s=5.0)
        assert isinstance(broker, WatchedBroker)
        broker.calls = []
        try:
            async with reading(broker) as reader:
                # The connection is not open: the jobs travel by a task.
                await SubmitCoalescer(slot, broker, LIMITS).send(publication(slot))
                assert seen == [("publish", "none")]
                job = await submitted(broker, reader, slot)
                seen.clear()
                reply = reader.reply_to(job)
                await broker.cancel(job.id, "acme", b"result")
                await reply
        finally:
            await broker.aclose()
        assert {*seen} == {("read", "none")}

    run(main())


def test_a_waiter_gives_up_at_its_own_time(shared_redis: RedisServer, slot: str):
    """One timer serves all: each limit ends its own waiter with TimeoutError, and the others wait on."""

    async def main() -> None:
        async with connected(shared_redis.url) as broker, reading(broker) as reader:
            job = await submitted(broker, reader, slot)
            now = asyncio.get_running_loop().time()
            patient, late, early = (reader.reply_to(job, now + limit_s) for limit_s in (20.0, 0.02, 0.0))
            for waiter in (early, late):
                with pytest.raises(TimeoutError):
                    await waiter
            assert not patient.done()
            await broker.cancel(job.id, "acme", b"result")
            await patient

    run(main())


def test_events_reach_a_subscriber_until_it_leaves(shared_redis: RedisServer, slot: str):
    """From the given number on; `read_now` returns the events that are there without waiting."""

    async def main() -> None:
        async with connected(shared_redis.url) as broker, reading(broker) as reader:
            job = await submitted(broker, reader, slot)
            await broker.job_record(job.id, subscribe=True)
            subscription = reader.subscribe(job.id, 0)
            await broker.cancel(job.id, "acme", b"result")
            (event,) = await subscription.next(10)
            assert event.key == events_key(job.id)
            assert await reader.read_now(job.id, 0) == [event]
            assert await reader.read_now(job.id, int(event.entry_id.partition("-")[0])) == []
            reader.unsubscribe(job.id, subscription)
            assert events_key(job.id) not in reader._router.cursors()

    run(main())


def test_a_closed_reader_answers_at_once(shared_redis: RedisServer, slot: str):
    """Its waiters get ClientUnusable, and so do later ones: no reply would come."""

    async def main() -> None:
        async with connected(shared_redis.url) as broker:
            reader = AsyncReplyReader(broker)
            job = await submitted(broker, reader, slot)
            waiter = reader.reply_to(job)
            await reader.aclose()
            with pytest.raises(ClientUnusable, match="was closed"):
                await waiter
            for ask in (lambda: reader.reply_to(job), lambda: reader.subscribe(job.id, 0)):
                with pytest.raises(ClientUnusable, match="was closed"):
                    ask()
            assert not is_reading(reader)

    run(main())


def test_a_server_that_loads_its_data_is_asked_again():
    """As by redis-py: its error is that of a connection, which is repeated, and not that of a refused command."""
    assert isinstance(_reply_error("LOADING Redis is loading the dataset in memory"), redis.ConnectionError)
    assert not isinstance(_reply_error("ERR unknown command"), redis.ConnectionError)
