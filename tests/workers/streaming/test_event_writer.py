"""When events are written, on which thread, and how many travel in one call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from penstock.registry.errors import BrokerUnavailable
from penstock.workers.streaming.event_writer import EventWriter
from tests.servers import wait_until
from tests.workers.streaming.jobs import Broker, chunk, outbox_of, writer_of

PATIENCE_S = 180.0


def untouched() -> None:
    """No call of it is expected to matter."""


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def in_thread(action: Callable[[], object]) -> threading.Thread:
    """Runs the action on a thread named `model`."""
    thread = threading.Thread(target=action, name="model", daemon=True)
    thread.start()
    return thread


def test_a_lone_event_is_written_at_once_by_its_own_thread():
    """No other thread is started for it, and it is in the broker when `add` returns."""
    broker, clock = Broker(), Clock()
    (job,), writer = broker.running(), writer_of(broker, clock)
    box = outbox_of(job)
    for number in range(3):
        writer.add(box, chunk(number), untouched)
        assert broker.chunks(job) == [*range(number + 1)]
        clock.now += 0.005
    assert set(broker.threads) == {threading.current_thread().name}
    assert broker.entries(job) == [[0], [1], [2]]


def test_events_in_quick_succession_travel_together():
    """While 5 ms have not passed, they wait; the end of the job writes them at once."""
    broker, clock = Broker(), Clock()
    (job,), writer = broker.running(), writer_of(broker, clock)
    box = outbox_of(job)
    for number in range(100):
        writer.add(box, chunk(number), untouched)
    assert broker.entries(job) == [[0]]
    writer.flush(box, untouched)
    assert broker.entries(job) == [[0], [*range(1, 100)]]
    assert len(broker.calls) == 2
    writer.stop()


def test_events_that_wait_are_written_without_another_one():
    """A model that pauses after quick events holds nothing back: the thread writes them, each time."""
    broker = Broker()
    (job,), writer = broker.running(), writer_of(broker, time.monotonic)
    box = outbox_of(job)
    for number in range(0, 30, 3):
        for offset in range(3):
            writer.add(box, chunk(number + offset), untouched)
        expected = [*range(number + 3)]
        wait_until(lambda: broker.chunks(job) == expected, PATIENCE_S, "the events are written")  # noqa: B023  # at once
    writer.stop()
    assert "events" not in {thread.name for thread in threading.enumerate()}


def test_the_first_event_of_a_job_does_not_wait_for_those_of_others():
    """Another job has written a moment ago: the new one is written at once, and takes with it what waits."""
    broker, clock = Broker(), Clock()
    jobs, writer = broker.running(2), writer_of(broker, clock)
    first, second = map(outbox_of, jobs)
    writer.add(first, chunk(0), untouched)
    writer.add(first, chunk(1), untouched)
    writer.add(second, chunk(7), untouched)
    assert broker.chunks(jobs[1]) == [7]
    assert broker.chunks(jobs[0]) == [0, 1]
    assert [len(call) for call in broker.calls] == [1, 2]
    writer.stop()


def test_jobs_share_a_call():
    """A step of a hundred jobs takes one call, whoever makes it."""
    broker, clock = Broker(), Clock()
    jobs, writer = broker.running(100), writer_of(broker, clock)
    boxes = [*map(outbox_of, jobs)]
    for box in boxes:
        writer.add(box, chunk(0), untouched)
    before = len(broker.calls)
    for box in boxes:
        writer.add(box, chunk(1), untouched)
    clock.now += 0.005
    writer.add(boxes[0], chunk(2), untouched)
    assert len(broker.calls) == before + 1
    assert [broker.chunks(job) for job in jobs] == [[0, 1, 2]] + 99 * [[0, 1]]
    writer.stop()


def test_events_that_come_during_a_write_go_with_the_next():
    """The model goes on while a write of another thread is under way; what it made meanwhile travels together."""
    broker = Broker()
    jobs, writer = broker.running(2), writer_of(broker, time.monotonic)
    slow, fast = map(outbox_of, jobs)
    writer.add(fast, chunk(0), untouched)
    broker.gate.clear()
    held = in_thread(lambda: writer.add(slow, chunk(9), untouched))
    assert broker.is_held.wait(PATIENCE_S)
    for number in range(1, 50):
        writer.add(fast, chunk(number), untouched)
    assert broker.chunks(jobs[1]) == [0]
    broker.gate.set()
    wait_until(lambda: broker.chunks(jobs[1]) == [*range(50)], PATIENCE_S, "what waited is written")
    held.join(PATIENCE_S)
    assert broker.entries(jobs[1])[1:] == [[*range(1, 50)]]
    writer.stop()


def test_a_model_that_is_faster_than_the_broker_waits():
    """It is stopped when 256 KiB of its job wait, shows progress meanwhile, and loses nothing."""
    broker = Broker()
    jobs, writer = broker.running(2), writer_of(broker, time.monotonic)
    slow, fast = map(outbox_of, jobs)
    broker.gate.clear()
    held = in_thread(lambda: writer.add(slow, chunk(9), untouched))
    assert broker.is_held.wait(PATIENCE_S)
    added: list[int] = []
    touched = threading.Event()

    def produce() -> None:
        for number in range(100):
            writer.add(fast, chunk(number, 10_000), touched.set)
            added.append(number)

    model = in_thread(produce)
    assert touched.wait(PATIENCE_S)
    assert 20 <= len(added) < 40
    broker.gate.set()
    model.join(PATIENCE_S)
    writer.flush(fast, untouched)
    assert broker.chunks(jobs[1]) == [*range(100)]
    held.join(PATIENCE_S)
    writer.stop()


def test_no_event_is_lost_or_repeated_while_the_broker_is_away():
    """A call that failed is repeated, with what it held and nothing else."""
    broker = Broker()
    (job,), writer = broker.running(), writer_of(broker, time.monotonic)
    box = outbox_of(job)
    for number in range(30):
        if number % 10 == 0:
            broker.errors += [BrokerUnavailable("away")]
        writer.add(box, chunk(number), untouched)
    writer.flush(box, untouched)
    assert broker.chunks(job) == [*range(30)]
    assert broker.errors == []
    writer.stop()


def test_a_job_is_given_up_with_a_broker_that_stays_away():
    """When the worker must end, its streaming jobs are lost to it, and no thread waits on."""
    broker, stopping = Broker(), threading.Event()
    (job,), writer = broker.running(), writer_of(broker, time.monotonic, lambda: not stopping.is_set())
    box = outbox_of(job)
    broker.errors += [BrokerUnavailable("away")] * 1000
    writer.add(box, chunk(0), untouched)
    assert broker.chunks(job) == []
    stopping.set()
    writer.flush(box, untouched)
    assert box.is_empty
    assert job.is_lost
    writer.stop()


def test_a_lost_job_stops_writing():
    """Its lease is another worker's: nothing more is sent, and the model may go on without a wait."""
    broker, clock = Broker(), Clock()
    (job,), writer = broker.running(), writer_of(broker, clock)
    box = outbox_of(job)
    writer.add(box, chunk(0), untouched)
    broker.release("w", [job.held])
    clock.now += 0.005
    writer.add(box, chunk(1), untouched)
    assert job.is_lost
    writer.flush(box, untouched)
    assert broker.chunks(job) == [0]


def test_what_the_broker_refuses_fails_its_job_alone():
    """The events of one job cannot be written: that job is told, the others' are written."""
    broker, clock = Broker(), Clock()
    jobs, writer = broker.running(3), writer_of(broker, clock)
    boxes = [*map(outbox_of, jobs)]
    for box in boxes:
        writer.add(box, chunk(0), untouched)
    broker.poisoned = jobs[1].header.id
    for box in boxes:
        writer.add(box, chunk(1), untouched)
    for box in (boxes[0], boxes[2]):
        writer.flush(box, untouched)
    with pytest.raises(ValueError, match="another type"):
        writer.flush(boxes[1], untouched)
    assert [broker.chunks(job) for job in jobs] == [[0, 1], [0], [0, 1]]
    writer.stop()


def test_discarded_events_are_not_written():
    """The job runs again: what its first run still had is dropped, and a write under way is waited for."""
    broker = Broker()
    (job,), writer = broker.running(), writer_of(broker, time.monotonic)
    box = outbox_of(job)
    writer.add(box, chunk(0), untouched)
    broker.gate.clear()
    # On a busy machine 5 ms have passed: then this thread writes, and waits at the gate.
    adding = in_thread(lambda: writer.add(box, chunk(1), untouched))
    assert broker.is_held.wait(PATIENCE_S)
    writer.add(box, chunk(2), untouched)
    discarding = in_thread(lambda: writer.discard(box))
    broker.gate.set()
    for thread in (adding, discarding):
        thread.join(PATIENCE_S)
    again = outbox_of(job)
    writer.add(again, chunk(5), untouched)
    writer.flush(again, untouched)
    assert broker.chunks(job) in ([0, 1, 5], [0, 1, 2, 5])
    writer.stop()


def test_a_writer_without_events_has_no_thread():
    """Workers without streaming models pay nothing."""
    writer = EventWriter(Broker(), "w", ttl_ms=1, max_bytes=1, may_wait=lambda: True)
    writer.stop()
    assert "events" not in {thread.name for thread in threading.enumerate()}


def test_events_of_many_jobs_are_added_together():
    """One call has them all, also first ones and those that are due; a thread that waits for its own writes at once."""
    broker, clock = Broker(), Clock()
    jobs, writer = broker.running(4), writer_of(broker, clock)
    boxes = [outbox_of(job) for job in jobs]
    for turn in range(2):
        with writer.together():
            for box in boxes:
                writer.add(box, chunk(turn), untouched)
                clock.now += 0.01
            assert len(broker.calls) == turn
        assert len(broker.calls) == turn + 1
    assert [broker.entries(job) for job in jobs] == [[[0], [1]]] * 4
    with writer.together():
        writer.add(boxes[0], chunk(2), untouched)
        writer.flush(boxes[0], untouched)
        assert broker.chunks(jobs[0]) == [0, 1, 2]
    clock.now += 0.01
    writer.add(boxes[1], chunk(2), untouched)
    assert broker.chunks(jobs[1]) == [0, 1, 2]
    writer.stop()
