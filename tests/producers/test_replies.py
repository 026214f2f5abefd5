"""Replies and events in the blocking client: which job or subscriber gets an entry, and which thread reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from penstock.producers.job_state import JobState, ResultPolicy
from penstock.producers.replies import RECORDS_AT_ONCE, ReplyReader, ReplyRouter
from penstock.registry.broker.base import JobRecord, Limits, Publication, State, StreamEntry
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import Keyring
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.queues import Priority, events_key, new_job_id
from tests.servers import wait_until

POLICY = ResultPolicy(Keyring.parse(None), ttl_s=60)
LIMITS = Limits(10_000, 0, 60_000)


def new_job(slot: str = "m") -> JobState:
    """A job that this client has just submitted."""
    return JobState(new_job_id(slot), "acme", POLICY, awaits_reply=True)


def reply(key: str, number: int, *jobs: JobState, record: bytes = b"C-result") -> StreamEntry:
    """One entry about ended jobs, with the record of each."""
    fields = [part for job in jobs for part in (job.id.rpartition(".")[2].encode(), record)]
    return StreamEntry(key, f"{number}-0", fields)


@pytest.fixture
def router() -> ReplyRouter[JobState]:
    """The router of one client."""
    return ReplyRouter("client")


def test_each_job_gets_its_own_record(router: ReplyRouter[JobState]):
    """One entry may be about several jobs; entries about other jobs and of other streams are ignored."""
    first, second, waiting, other = (new_job() for _ in range(4))
    key = router.address("m")
    for job in (first, second, waiting):
        router.expect(job)
    router.deliver([reply(key, 1, second, other, first), reply("{m}:reply:stranger", 2, waiting)])
    assert first.record == second.record == JobRecord(State.COMPLETED, "", b"result")
    assert [router.expects(job.id) for job in (first, second, waiting)] == [False, False, True]
    assert router.expected() == [waiting]


def test_a_large_result_is_read_by_its_id(router: ReplyRouter[JobState]):
    """The entry then has no record: the job awaits no reply any more, and its record is still unknown."""
    job = new_job()
    key = router.address("m")
    router.expect(job)
    router.deliver([reply(key, 1, job, record=b"")])
    assert (job.awaits_reply, job.record) == (False, None)


def test_an_answered_job_is_announced_once():
    """By its reply or by the record that the client read, whichever came first."""
    announced: list[JobState] = []
    router = ReplyRouter("client", announced.extend)
    first, second = new_job(), new_job()
    key = router.address("m")
    for job in (first, second):
        router.expect(job)
    router.settle(first, JobRecord(State.FAILED, "", b"failure"))
    router.deliver([reply(key, 1, first, second), reply(key, 2, second)])
    assert announced == [first, second]
    assert first.record == JobRecord(State.FAILED, "", b"failure")


def test_dropped_handles_are_forgotten(router: ReplyRouter[JobState]):
    """A caller that keeps no handle awaits nothing. The router forgets such jobs whenever it has 1024."""
    kept = new_job()
    router.expect(kept)
    for _ in range(2):
        while len(router._pending) < 1023:
            router.expect(new_job())
        newest = new_job()
        router.expect(newest)
        assert router.expected() == [kept, newest]
        assert len(router._pending) == 2
    del kept, newest
    router.sweep()
    assert not router.is_awaited


def test_events_go_to_every_subscriber_of_their_job(router: ReplyRouter[JobState]):
    """A second subscription does not move the cursor; an ended one gets nothing; the last end stops the reading."""
    job_id = new_job_id("m")
    key = events_key(job_id)
    first: deque[StreamEntry] = deque()
    second: deque[StreamEntry] = deque()
    router.subscribe(job_id, 3, first)
    assert router.cursors()[key] == "3-0"
    events = [StreamEntry(key, f"{number}-0", []) for number in (4, 5, 6)]
    router.deliver(events[:1])
    router.subscribe(job_id, 0, second)
    assert router.cursors()[key] == "4-0"
    router.deliver(events[1:2])
    router.unsubscribe(job_id, first)
    router.deliver(events[2:])
    assert (list(first), list(second)) == (events[:2], events[1:])
    are_awaited = [router.is_awaited]
    router.unsubscribe(job_id, second)
    router.deliver(events)
    are_awaited.append(router.is_awaited)
    assert are_awaited == [True, False]
    assert key not in router.cursors()
    assert len(second) == 2


def test_reply_streams_are_trimmed_every_128_entries(router: ReplyRouter[JobState]):
    """Up to the last entry that was handed out. Event streams belong to all readers and are never trimmed."""
    key, job_id = router.address("m"), new_job_id("m")
    router.subscribe(job_id, 0, deque())
    assert router.deliver([reply(key, number) for number in range(1, 128)]) == []
    assert router.deliver([StreamEntry(events_key(job_id), f"{number}-0", []) for number in range(1, 100)]) == []
    assert router.deliver([reply(key, 128), reply(key, 129)]) == [(key, "128-0")]


def test_a_reader_is_woken_only_if_it_misses_a_stream(router: ReplyRouter[JobState]):
    """Through a reply stream that it reads: other clients read the event streams, too."""
    job_id = new_job_id("m")
    router.subscribe(job_id, 0, deque())
    reading = dict(reversed(router.cursors().items()))
    assert next(iter(reading)) == events_key(job_id)
    assert router.wake_key(reading) is None
    router.address("other")
    assert router.wake_key(reading) == router.address("m")


class CountedBroker(MemoryBroker):
    """A broker that notes the reads and nudges of its client."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[dict[str, str]] = []
        self.record_calls: list[int] = []
        self.nudged: list[str] = []
        self.is_away = False

    def read(self, cursors: Mapping[str, str], block_ms: int, count: int = 256) -> list[StreamEntry]:
        self.reads.append(dict(cursors))
        if self.is_away:
            raise BrokerUnavailable("The broker does not answer")
        return super().read(cursors, block_ms, count)

    def job_records(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        self.record_calls.append(len(job_ids))
        return super().job_records(job_ids)

    def nudge(self, key: str) -> None:
        self.nudged.append(key)
        super().nudge(key)

    def submit(self, reader: ReplyReader, slot: str = "m", *, with_reply: bool = True) -> JobState:
        """Publish a job whose reply the reader expects; without `with_reply` the reply is lost."""
        job = new_job(slot)
        address = reader.address(slot)
        reader.expect_all([job])
        publication = Publication(job.id, Priority.NORMAL, b"sealed", "acme", address if with_reply else "")
        self.publish(slot, [publication], LIMITS)
        return job

    def end(self, job: JobState) -> None:
        """The job ends, as cancelled."""
        self.cancel(job.id, "acme", b"result")


@pytest.fixture
def broker() -> CountedBroker:
    """A broker in memory."""
    return CountedBroker()


@pytest.fixture
def reader(broker: CountedBroker) -> ReplyReader:
    """The reply reader of a client."""
    return ReplyReader(broker)


def _is_answered(job: JobState) -> bool:
    return not job.awaits_reply


def test_one_waiting_thread_reads_for_all(broker: CountedBroker, reader: ReplyReader):
    """The others wait for it; each gets the reply about its own job."""
    jobs = [broker.submit(reader) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(reader.wait, partial(_is_answered, job), 60) for job in jobs]
        wait_until(lambda: broker.reads, 5, "a thread reads")
        for job in jobs:
            broker.end(job)
        assert all(wait.result(180) for wait in waits)
    assert {job.record.state for job in jobs if job.record} == {State.CANCELLED}
    assert reader._reading is None


def test_a_wait_ends_at_its_time_limit(broker: CountedBroker, reader: ReplyReader):
    """It returns False; a condition that holds already needs no read."""
    job = broker.submit(reader)
    assert not reader.wait(lambda: not job.awaits_reply, 0)
    assert reader.wait(lambda: True, 0)
    assert broker.reads == []
    assert not reader.wait(lambda: not job.awaits_reply, 0.01)
    assert reader.expects(job.id)


def test_a_new_stream_wakes_the_thread_that_reads(broker: CountedBroker, reader: ReplyReader):
    """It would otherwise read the former streams until a second of silence is over; a known stream wakes nothing."""
    first = broker.submit(reader)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.wait, lambda: not first.awaits_reply, 10)
        wait_until(lambda: reader._reading, 5, "the thread reads")
        reader.address("m")
        assert broker.nudged == []
        reader.address("other")
        assert broker.nudged == [reader.address("m")]
        wait_until(lambda: reader.address("other") in broker.reads[-1], 5, "the new stream is read")
        broker.end(first)
        assert waiting.result(180)


def test_a_broker_that_does_not_answer_is_the_error_of_the_reading_thread(broker: CountedBroker, reader: ReplyReader):
    """The next wait reads again."""
    job = broker.submit(reader)
    broker.is_away = True
    with pytest.raises(BrokerUnavailable):
        reader.wait(lambda: not job.awaits_reply, 10)
    broker.is_away = False
    broker.end(job)
    assert reader.wait(lambda: not job.awaits_reply, 10)


def test_lost_replies_are_made_up_for_by_records(broker: CountedBroker, reader: ReplyReader):
    """All pending jobs in calls of 256; jobs that wait on stay pending, and a job without a record has ended."""
    ended, waiting = ([broker.submit(reader, with_reply=False) for _ in range(number)] for number in (300, 10))
    missing = new_job()
    reader.expect_all([missing])
    for job in ended:
        broker.end(job)
    reader.catch_up()
    assert broker.record_calls == [RECORDS_AT_ONCE, 311 - RECORDS_AT_ONCE]
    assert not any(job.awaits_reply for job in (*ended, missing))
    assert {job.record.state for job in ended if job.record} == {State.CANCELLED}
    assert missing.record is None
    assert all(reader.expects(job.id) for job in waiting)
