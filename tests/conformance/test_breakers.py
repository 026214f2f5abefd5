"""Shared circuit breakers: Redis and the pure machine reach the same records on the same histories. AR-064."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Final

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.registry.broker.breakers import (
    BreakerEnd,
    BreakerLimits,
    BreakerRecord,
    BreakerTransition,
    breaker_name,
    new_breaker_id,
)
from penstock.registry.broker.redis_breakers import UNREADABLE, RedisBreakers
from penstock.registry.errors import InvalidInput
from penstock.registry.queues import breakers_key
from penstock.safety.breaker import MemoryBreakers
from tests.conformance.conftest import Brokerage, OnRedis

LIMITS: Final = BreakerLimits(failures=3, window_ms=600_000, open_ms=1_200_000, probe_ms=900_000)
"""So long that the time which the calls themselves take makes no difference."""
START_MS: Final = 1_700_000_000_000


class Store(ABC):
    """One store of breakers, whose clock the test moves."""

    @abstractmethod
    def connect(self) -> BreakerEnd:
        """An end, as a worker of its own would have it."""

    @abstractmethod
    def elapse(self, model: str, ms: int) -> None:
        """Let this much time pass for the breakers of a model."""

    @abstractmethod
    def lose(self, model: str) -> None:
        """The store loses the breakers of a model."""


class InMemory(Store):
    def __init__(self) -> None:
        self._now_ms = START_MS
        self._end = MemoryBreakers(lambda: self._now_ms)

    def connect(self) -> BreakerEnd:
        return self._end

    def elapse(self, model: str, ms: int) -> None:
        self._now_ms += ms

    def lose(self, model: str) -> None:
        self._end._records.clear()


class InRedis(Store):
    """Time passes for a record when all of its times are moved back."""

    def __init__(self, brokerage: OnRedis) -> None:
        self._server = brokerage.server

    def connect(self) -> RedisBreakers:
        return RedisBreakers.from_url(self._server.url)

    def elapse(self, model: str, ms: int) -> None:
        with self._server.client() as client:
            for name, line in client.hgetall(breakers_key(model)).items():
                client.hset(breakers_key(model), name, _moved_back(line.decode(), ms))

    def lose(self, model: str) -> None:
        with self._server.client() as client:
            client.delete(breakers_key(model))


def _moved_back(line: str, ms: int) -> str:
    circuit, epoch, *times, by, probe, failures, reason = line.split(" ", 8)
    times = [str(int(time) - ms if int(time) else 0) for time in times]
    marks = [mark.split(":") for mark in failures.split(",")] if failures != "-" else []
    moved = ",".join(f"{int(at) - ms}:{failure}" for at, failure in marks) or "-"
    return " ".join([circuit, epoch, *times, by, probe, moved, reason])


@pytest.fixture
def store(brokerage: Brokerage) -> Store:
    return InRedis(brokerage) if isinstance(brokerage, OnRedis) else InMemory()


@pytest.fixture
def end(store: Store) -> Iterator[BreakerEnd]:
    with connected(store) as found:
        yield found


@contextmanager
def connected(store: Store) -> Iterator[BreakerEnd]:
    """An end, closed afterwards where it has connections."""
    found = store.connect()
    if isinstance(found, RedisBreakers):
        with closing(found):
            yield found
    else:
        yield found


@pytest.fixture
def name(slot: str) -> str:
    return breaker_name(slot, "2", "compiled")


def fail(end: BreakerEnd, name: str, *, probe: str = "", reason: str = "it raised ValueError") -> BreakerTransition:
    """A failure of its own."""
    return end.fail_breaker(name, reason, new_breaker_id(), LIMITS, probe=probe)


def trip(end: BreakerEnd, name: str) -> BreakerRecord:
    """As many failures as open it."""
    assert [fail(end, name).did for _ in range(LIMITS.failures)] == [False, False, True]
    return end.breakers(name.partition("/")[0]).records[name]


def test_failures_within_the_window_open_it(store: Store, end: BreakerEnd, name: str, slot: str):
    """Failures that are older than the window do not count, and one that opens it says why."""
    assert not fail(end, name).did
    assert not fail(end, name).did
    store.elapse(slot, LIMITS.window_ms)
    assert not fail(end, name).did
    assert not fail(end, name).did
    opened = fail(end, name, reason="output y contains NaN or infinity")
    assert opened.did
    assert (opened.record.circuit, opened.record.epoch) == ("open", 1)
    assert opened.record.reason == "output y contains NaN or infinity"
    reading = end.breakers(slot)
    assert reading.records == {name: opened.record}
    assert 0 <= reading.now_ms - opened.record.opened_ms < LIMITS.window_ms
    assert opened.record.retry_ms - opened.record.opened_ms == LIMITS.open_ms


def test_one_breaker_leaves_the_others_closed(end: BreakerEnd, name: str, slot: str):
    """Another optimisation, another version and another model are not touched; all workers see the one that opened."""
    others = [breaker_name(slot, "2", "int8"), breaker_name(slot, "1", "compiled")]
    elsewhere = breaker_name(f"{slot}-b", "2", "compiled")
    for each in (*others, elsewhere):
        fail(end, each)
    trip(end, name)
    records = end.breakers(slot).records
    assert {each: record.circuit for each, record in records.items()} == {
        name: "open",
        **dict.fromkeys(others, "closed"),
    }
    assert end.breakers(f"{slot}-b").records[elsewhere].is_closed


def test_a_probe_waits_for_the_end_of_the_pause(store: Store, end: BreakerEnd, name: str, slot: str):
    """A closed and a newly opened breaker grant none. Afterwards one is granted, and its success closes the breaker."""
    assert not end.probe_breaker(name, "early", LIMITS).did
    trip(end, name)
    assert not end.probe_breaker(name, "early", LIMITS).did
    store.elapse(slot, LIMITS.open_ms)
    granted = end.probe_breaker(name, "first", LIMITS)
    assert (granted.did, granted.record.circuit, granted.record.probe) == (True, "half-open", "first")
    assert not end.probe_breaker(name, "second", LIMITS).did
    closed = end.pass_breaker(name, "first")
    assert (closed.did, closed.record.circuit, closed.record.epoch) == (True, "closed", 1)
    assert not end.probe_breaker(name, "third", LIMITS).did


def test_a_failed_probe_opens_it_again(store: Store, end: BreakerEnd, name: str, slot: str):
    """One failure is enough, and the pause begins anew. Failures of batches that began earlier change nothing."""
    trip(end, name)
    store.elapse(slot, LIMITS.open_ms)
    assert end.probe_breaker(name, "first", LIMITS).did
    assert not fail(end, name).did
    assert not fail(end, name, probe="another").did
    assert end.breakers(slot).records[name].circuit == "half-open"
    again = fail(end, name, probe="first", reason="again")
    assert (again.did, again.record.circuit, again.record.epoch, again.record.reason) == (True, "open", 2, "again")
    assert not end.probe_breaker(name, "second", LIMITS).did
    assert not end.pass_breaker(name, "first").did


def test_the_probe_of_a_dead_worker_goes_to_another_one(store: Store, end: BreakerEnd, name: str, slot: str):
    """After its lease, and once. If the first one was only slow, its outcome has no effect."""
    trip(end, name)
    store.elapse(slot, LIMITS.open_ms)
    assert end.probe_breaker(name, "dead", LIMITS).did
    store.elapse(slot, LIMITS.probe_ms - 60_000)
    assert not end.probe_breaker(name, "second", LIMITS).did
    store.elapse(slot, 60_000)
    assert end.probe_breaker(name, "second", LIMITS).did
    assert not end.probe_breaker(name, "third", LIMITS).did
    assert not end.pass_breaker(name, "dead").did
    assert not fail(end, name, probe="dead").did
    assert end.pass_breaker(name, "second").did


def test_drift_opens_it_whatever_its_state(store: Store, end: BreakerEnd, name: str, slot: str):
    """One call opens a closed and a half-open breaker; an open one begins its pause anew, and is not opened twice."""
    opened = end.force_open_breaker(name, "drift of min_cosine", "a", LIMITS)
    assert (opened.did, opened.record.circuit, opened.record.epoch) == (True, "open", 1)
    store.elapse(slot, LIMITS.open_ms)
    longer = end.force_open_breaker(name, "drift of recall", "b", LIMITS)
    assert (longer.did, longer.record.epoch, longer.record.reason) == (False, 1, "drift of recall")
    assert not end.probe_breaker(name, "early", LIMITS).did
    store.elapse(slot, LIMITS.open_ms)
    assert end.probe_breaker(name, "p", LIMITS).did
    assert end.force_open_breaker(name, "drift", "c", LIMITS).did
    assert not end.pass_breaker(name, "p").did


def test_repeated_calls_have_no_second_effect(store: Store, end: BreakerEnd, name: str, slot: str):
    """The answer to a call may be lost: the same call again gives the same answer, and changes nothing."""
    for number in range(LIMITS.failures):
        is_last = number == LIMITS.failures - 1
        assert [end.fail_breaker(name, "x", f"f{number}", LIMITS).did for _ in range(3)] == [is_last] * 3
    assert end.breakers(slot).records[name].epoch == 1
    store.elapse(slot, LIMITS.open_ms)
    assert [end.probe_breaker(name, "p", LIMITS).did for _ in range(3)] == [True] * 3
    assert [end.pass_breaker(name, "p").did for _ in range(3)] == [True] * 3
    assert [end.force_open_breaker(name, "x", "a", LIMITS).did for _ in range(3)] == [True] * 3
    assert end.breakers(slot).records[name].epoch == 2


def test_an_operator_closes_it(store: Store, end: BreakerEnd, name: str, slot: str):
    """The probe that ran has no say any more, and failures count from zero."""
    assert not end.reset_breaker(name).did
    trip(end, name)
    store.elapse(slot, LIMITS.open_ms)
    end.probe_breaker(name, "p", LIMITS)
    assert end.reset_breaker(name).did
    assert not end.pass_breaker(name, "p").did
    trip(end, name)


@pytest.mark.parametrize("bad", ["minilm", "minilm/2", "minilm/:x", "/2:x", "minilm/2:x y", "Mini/2:x", "a/b/2:x", ""])
def test_a_bad_name_is_refused(end: BreakerEnd, bad: str):
    """The message says how a name looks; nothing is written."""
    with pytest.raises(InvalidInput, match="Expected"):
        end.force_open_breaker(bad, "x", "a", LIMITS)


def test_limits_below_one_are_refused():
    """A breaker without failures or pauses would never close, or never open."""
    for limit in BreakerLimits._fields:
        with pytest.raises(InvalidInput, match=f"{limit} of a circuit breaker is 0. Expected at least 1"):
            BreakerLimits(**{limit: 0}).check()


Step = tuple[str, int]
STEPS: Final = st.lists(
    st.tuples(
        st.sampled_from(["fail", "probe", "pass", "fail probe", "force", "reset", "elapse"]),
        st.integers(min_value=0, max_value=3),
    ),
    max_size=25,
)
PERIODS_MS: Final = (300_000, 700_000, 900_000, 1_200_000)


def _stepped(store: Store, end: BreakerEnd, model: str, steps: list[Step]) -> list[tuple[bool, BreakerRecord]]:
    """What each step answered, with times relative to now in units of 100 s."""
    found = []
    name = breaker_name(model, "2", "compiled")
    for number, (kind, which) in enumerate(steps):
        if kind == "elapse":
            store.elapse(model, PERIODS_MS[which])
            continue
        transition = {
            "fail": lambda which, n: end.fail_breaker(name, f"r{which}", f"f{n if which else 0}", LIMITS),
            "probe": lambda which, _: end.probe_breaker(name, f"p{which}", LIMITS),
            "pass": lambda which, _: end.pass_breaker(name, f"p{which}"),
            "fail probe": lambda which, n: end.fail_breaker(name, "r", f"f{n}", LIMITS, probe=f"p{which}"),
            "force": lambda which, _: end.force_open_breaker(name, f"d{which}", f"d{which}", LIMITS),
            "reset": lambda *_: end.reset_breaker(name),
        }[kind](which, number)
        now_ms = end.breakers(model).now_ms
        found.append((transition.did, _relative(transition.record, now_ms)))
        stored = end.breakers(model).records.get(name, BreakerRecord())
        assert stored == transition.record
    return found


def _relative(record: BreakerRecord, now_ms: int) -> BreakerRecord:
    def since(time_ms: int) -> int:
        return round((time_ms - now_ms) / 100_000) if time_ms else 0

    return record._replace(
        opened_ms=since(record.opened_ms),
        retry_ms=since(record.retry_ms),
        probe_until_ms=since(record.probe_until_ms),
        failures=tuple(mark._replace(at_ms=since(mark.at_ms)) for mark in record.failures),
    )


PASSED_TWICE: Final[list[Step]] = [
    *[("fail", 1)] * 3,
    ("elapse", 3),
    ("probe", 1),
    ("pass", 1),
    ("fail", 1),
    ("pass", 1),
]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
@example(steps=PASSED_TWICE)
def test_redis_and_the_pure_machine_agree(redis_brokerage: OnRedis, steps: list[Step]):
    """On every history: the same answers, and the same records up to the time that the calls took."""
    model, memory, server = f"m-{new_breaker_id()}", InMemory(), InRedis(redis_brokerage)
    with connected(server) as end:
        assert _stepped(server, end, model, steps) == _stepped(memory, memory.connect(), model, steps)


@pytest.mark.parametrize(
    "line", ["", "foreign", "open x 1 1 1 - - - r", "ajar 1 1 1 1 - - - r", "open 1 1 1 1 - - 7 r"]
)
def test_a_record_that_another_program_wrote_admits_nothing(redis_brokerage: OnRedis, name: str, slot: str, line: str):
    """It reads as open, and the next transition writes a record anew."""
    store = InRedis(redis_brokerage)
    with connected(store) as end, redis_brokerage.server.client() as client:
        client.hset(breakers_key(slot), name.partition("/")[2], line)
        assert end.breakers(slot).records[name] == UNREADABLE
        opened = end.force_open_breaker(name, "a reason", "a", LIMITS)
        assert opened.record.circuit == "open"
        assert end.breakers(slot).records[name] == opened.record


def test_six_workers_get_exactly_one_probe(redis_brokerage: OnRedis, name: str, slot: str):
    """100 rounds: each of six connections asks at the same moment, and each round grants exactly one probe."""
    store = InRedis(redis_brokerage)
    rounds, workers = 100, 6
    granted: list[tuple[int, int]] = []
    start, asked = threading.Barrier(workers + 1), threading.Barrier(workers + 1)

    def work(worker: int) -> None:
        with connected(store) as mine:
            for number in range(rounds):
                start.wait()
                if mine.probe_breaker(name, f"r{number}w{worker}", LIMITS).did:
                    granted.append((number, worker))
                asked.wait()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(workers)]
    for thread in threads:
        thread.start()
    with connected(store) as end:
        for number in range(rounds):
            end.force_open_breaker(name, "the next round", f"o{number}", LIMITS)
            store.elapse(slot, LIMITS.open_ms)
            start.wait()
            asked.wait()
    for thread in threads:
        thread.join()
    assert [number for number, _ in granted] == list(range(rounds))
    assert len({worker for _, worker in granted}) > 1
