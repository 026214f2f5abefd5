"""A worker's part in the shared breakers: answers from memory, one probe, one alert, the plain path when in doubt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

import pytest

from penstock.registry.broker.breakers import BreakerEnd, BreakerLimits, BreakerRecord, breaker_name
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.errors import InvalidInput
from penstock.safety.breaker import MAX_COPY_AGE_S, MemoryBreakers
from penstock.workers.levels.shared_breakers import SharedBreakers
from tests.servers import RedisServer, wait_until

LIMITS: Final = BreakerLimits(failures=3, window_ms=60_000, open_ms=60_000, probe_ms=30_000)
NAME: Final = "minilm/2:compiled"
OTHER: Final = "minilm/2:int8"


class Clock:
    """Seconds of the workers and of the store."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Worker:
    """One worker's breakers, and what its listeners heard."""

    def __init__(self, end: BreakerEnd, clock: Clock, model: str = "minilm") -> None:
        self.trips: list[str] = []
        self.changes: list[tuple[str, bool]] = []
        self.wanted: list[str] = []
        self.breakers = SharedBreakers(
            end,
            lambda: [model],
            limits=LIMITS,
            wanted=lambda: self.wanted,
            on_change=lambda name, record: self.changes.append((name, record.is_closed)),
            on_trip=lambda name, record: self.trips.append(record.reason),
            clock=clock,
        )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def workers(clock: Clock) -> list[Worker]:
    """Four workers of one store, which have read it once."""
    store = MemoryBreakers(lambda: int(clock.now_s * 1000))
    found = [Worker(store, clock) for _ in range(4)]
    turn(found)
    return found


def turn(workers: list[Worker]) -> None:
    """Each exchanges with the broker once."""
    for worker in workers:
        assert worker.breakers.turn()


def admitting(workers: list[Worker], name: str = NAME) -> list[bool]:
    """Who admits the optimisation now."""
    return [worker.breakers.admits(name) for worker in workers]


def trip(workers: list[Worker]) -> None:
    """The optimisation fails on three of the workers."""
    for worker in workers[:3]:
        worker.breakers.failed(NAME, "it raised ValueError")
    turn(workers)
    turn(workers)


def test_nothing_is_admitted_before_the_first_reading(clock: Clock):
    """A worker that starts while the broker is away serves on the plain path."""
    worker = Worker(MemoryBreakers(lambda: 0), clock)
    assert not worker.breakers.admits(NAME)
    assert worker.breakers.turn()
    assert worker.breakers.admits(NAME)


def test_nothing_is_admitted_by_an_old_copy(workers: list[Worker], clock: Clock):
    """A copy may be one second old, and no older; the age counts from before it was asked for."""
    clock.now_s += MAX_COPY_AGE_S
    assert admitting(workers) == [True] * 4
    clock.now_s += 0.001
    assert admitting(workers) == [False] * 4
    turn(workers)
    assert admitting(workers) == [True] * 4


def test_failures_of_all_workers_count_together(workers: list[Worker]):
    """Three on three workers open the breaker on all four; the others stay closed. One worker alerts (AR-064)."""
    trip(workers)
    assert admitting(workers) == [False] * 4
    assert admitting(workers, OTHER) == [True] * 4
    assert [worker.trips for worker in workers] == [[], [], ["it raised ValueError"], []]
    assert [worker.changes for worker in workers] == [[(NAME, False)]] * 4


def test_drift_opens_it_here_at_once_and_elsewhere_with_the_next_reading(workers: list[Worker]):
    """One alert is enough (AR-073)."""
    workers[0].breakers.force_open(NAME, "drift: cosine is lower")
    assert admitting(workers) == [False, True, True, True]
    turn(workers)
    assert admitting(workers) == [False] * 4
    assert [len(worker.trips) for worker in workers] == [1, 0, 0, 0]


def test_one_worker_probes_and_its_success_admits_all(workers: list[Worker], clock: Clock):
    """Only workers that want to are asked, and a granted probe is taken once."""
    trip(workers)
    for worker in workers[1:]:
        worker.wanted = [NAME]
    turn(workers)
    assert [worker.breakers.take_probe(NAME) for worker in workers] == [""] * 4
    clock.now_s += LIMITS.open_ms / 1000
    turn(workers)
    probes = [worker.breakers.take_probe(NAME) for worker in workers]
    assert [bool(probe) for probe in probes] == [False, True, False, False]
    assert workers[1].breakers.take_probe(NAME) == ""
    assert admitting(workers) == [False] * 4
    workers[1].breakers.passed(NAME, probes[1])
    turn(workers)
    turn(workers)
    assert admitting(workers) == [True] * 4
    assert [worker.changes for worker in workers] == [[(NAME, False), (NAME, True)]] * 4


def test_a_failed_probe_opens_it_again(workers: list[Worker], clock: Clock):
    """And its worker alerts once more: the breaker opened a second time."""
    trip(workers)
    workers[1].wanted = [NAME]
    clock.now_s += LIMITS.open_ms / 1000
    turn(workers)
    workers[1].breakers.failed(NAME, "again", probe=workers[1].breakers.take_probe(NAME))
    turn(workers)
    assert workers[1].trips == ["again"]
    assert workers[0].breakers.record(NAME).circuit == "half-open"
    turn(workers)
    assert {worker.breakers.record(NAME).circuit for worker in workers} == {"open"}


def test_the_probe_of_a_dead_worker_goes_to_another_one(workers: list[Worker], clock: Clock):
    """After the lease of the probe; so does one that its worker does not want any more."""
    trip(workers)
    dead, *others = workers
    dead.wanted = [NAME]
    clock.now_s += LIMITS.open_ms / 1000
    turn(workers)
    dead.wanted = []
    for worker in others:
        worker.wanted = [NAME]
    turn(others)
    assert [worker.breakers.take_probe(NAME) for worker in others] == [""] * 3
    clock.now_s += LIMITS.probe_ms / 1000
    turn(workers)
    assert [bool(worker.breakers.take_probe(NAME)) for worker in workers] == [False, True, False, False]


def test_a_listener_that_raises_ends_nothing(clock: Clock):
    """The next turns are taken, and other listeners hear of the change."""

    def broken(name: str, record: BreakerRecord) -> None:
        raise RuntimeError(name)

    heard: list[str] = []
    breakers = SharedBreakers(
        MemoryBreakers(lambda: 0),
        lambda: ["minilm"],
        on_change=broken,
        on_trip=lambda name, _: heard.append(name),
        clock=clock,
    )
    breakers.force_open(NAME, "x")
    assert breakers.turn()
    assert breakers.turn()
    assert heard == [NAME]


def test_bad_names_are_refused_at_once(workers: list[Worker]):
    """Not later, on another thread."""
    breakers = workers[0].breakers
    for call in (breakers.force_open, breakers.failed, breakers.passed):
        with pytest.raises(InvalidInput, match="Expected model/version:optimisation"):
            call("minilm", "x")
    assert breakers.turn()


@pytest.fixture
def on_redis(redis_server: RedisServer, clock: Clock) -> Iterator[Callable[[], Worker]]:
    """Makes workers with connections of their own to a server that the test may kill."""
    with ExitStack() as ends:

        def make() -> Worker:
            end = RedisBreakers.from_url(redis_server.url, timeout_s=1.0)
            ends.callback(end.close)
            return Worker(end, clock)

        yield make


def test_without_the_broker_the_plain_path_serves(
    redis_server: RedisServer, on_redis: Callable[[], Worker], clock: Clock
):
    """After a second nothing is admitted. What was told meanwhile arrives when the broker is back."""
    workers = [on_redis(), on_redis()]
    turn(workers)
    assert admitting(workers) == [True, True]
    redis_server.kill()
    assert [worker.breakers.turn() for worker in workers] == [False, False]
    assert admitting(workers) == [True, True]
    clock.now_s += 1.001
    assert admitting(workers) == [False, False]
    workers[0].breakers.force_open(NAME, "drift")
    assert not workers[0].breakers.turn()
    redis_server.start()
    wait_until(lambda: all([worker.breakers.turn() for worker in workers]), 30, "the broker answers")
    turn(workers)
    assert admitting(workers, OTHER) == [True, True]
    assert admitting(workers) == [False, False]
    assert [worker.trips for worker in workers] == [["drift"], []]


def test_an_open_breaker_survives_a_broker_that_lost_its_data(
    redis_server: RedisServer, on_redis: Callable[[], Worker]
):
    """A worker that knows of it opens it again: not even the worker that opened it is needed."""
    workers = [on_redis(), on_redis()]
    workers[0].breakers.force_open(NAME, "drift")
    turn(workers)
    with redis_server.client() as client:
        client.flushall()
    turn(workers[1:])
    assert admitting(workers[1:]) == [False]
    turn([on_redis()])
    late = on_redis()
    turn([late])
    assert not late.breakers.admits(NAME)
    assert late.breakers.record(NAME).reason == "the broker lost the record of an open breaker"


def test_its_thread_takes_turns_until_it_is_stopped(on_redis: Callable[[], Worker]):
    """A report wakes it, and what was told last is sent before it ends."""
    worker, other = on_redis(), on_redis()
    worker.breakers.start()
    wait_until(lambda: worker.breakers.admits(NAME), 30, "the first reading")
    worker.breakers.force_open(NAME, "drift")
    wait_until(lambda: worker.trips, 30, "the broker has heard of it")
    worker.breakers.force_open(OTHER, "drift")
    worker.breakers.stop(30)
    turn([other])
    assert admitting([other]) + admitting([other], OTHER) == [False, False]


def test_what_nobody_reads_is_forgotten(clock: Clock):
    """A model that is gone for some time has new breakers afterwards, and a closed one is told."""
    store = MemoryBreakers(lambda: int(clock.now_s * 1000))
    models = ["minilm"]
    changes: list[bool] = []
    breakers = SharedBreakers(
        store, lambda: models, on_change=lambda name, record: changes.append(record.is_closed), clock=clock
    )
    breakers.force_open(NAME, "drift")
    assert breakers.turn()
    assert breakers.has_read("minilm")
    assert not breakers.record(NAME).is_closed
    models.clear()
    assert breakers.turn()
    assert not breakers.has_read("minilm")
    assert breakers.record(NAME).is_closed
    store = MemoryBreakers(lambda: int(clock.now_s * 1000))
    breakers._end = store
    models.append("minilm")
    assert breakers.turn()
    assert (breakers.admits(NAME), changes) == (True, [False, True])
    assert not store.breakers("minilm").records, "nothing was lost, and nothing is opened again"


def test_names_are_made_of_three_parts():
    """The name of a breaker says which optimisation of which version it guards."""
    assert breaker_name("minilm", "2", "compiled") == NAME
