"""The circuit breaker of one optimisation: which failures switch it off, and which probe switches it on again. Pure.

    closed -- failures within the window, or force_open --> open -- pause --> half-open: ONE probe --> closed or open

Time is an argument, in ms of the clock of the store. The workers of a model share the records through Redis, where each
transition is a script of the same rules; see registry/broker/breakers.py. `LocalBreakers` is the copy that a worker
asks for each batch: memory only, at most a second old.

Nygard, Release It!, 2007, section 5.2, describes the pattern. Failures are counted in a window and successes are not
reported, so that a closed breaker costs no write; a candidate that fails one batch in a hundred opens it, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.registry.broker.breakers import (
    BreakerLimits,
    BreakerReading,
    BreakerRecord,
    BreakerTransition,
    FailureMark,
    split_breaker_name,
)

__all__ = [
    "MAX_COPY_AGE_S",
    "LocalBreakers",
    "MemoryBreakers",
    "failed",
    "forced_open",
    "passed",
    "probing",
    "reset",
]

MAX_COPY_AGE_S: Final = 1.0
"""Without a reading for this long the state is unknown, and no optimisation is admitted."""


def failed(
    record: BreakerRecord, now_ms: int, id: str, reason: str, limits: BreakerLimits, *, probe: str = ""
) -> BreakerTransition:
    """A failure of the optimisation. `did`: this failure opened the breaker, also when it is told again."""
    if record.circuit == "half-open" and probe and probe == record.probe:
        return BreakerTransition(_opened(record, now_ms, id, reason, limits), True)
    if not record.is_closed:
        return BreakerTransition(record, record.circuit == "open" and record.opened_by == id)
    if any(mark.id == id for mark in record.failures):
        return BreakerTransition(record, False)
    since_ms = now_ms - limits.window_ms
    marks = (*(mark for mark in record.failures if mark.at_ms > since_ms), FailureMark(now_ms, id))
    if len(marks) >= limits.failures:
        return BreakerTransition(_opened(record, now_ms, id, reason, limits), True)
    return BreakerTransition(record._replace(failures=marks), False)


def passed(record: BreakerRecord, probe: str) -> BreakerTransition:
    """The probe passed. `did`: the breaker is closed by it. A probe that another one has replaced does nothing."""
    if record.probe != probe or record.circuit == "open":
        return BreakerTransition(record, False)
    if record.circuit == "closed":
        # The same call again: failures since then go on counting.
        return BreakerTransition(record, True)
    return BreakerTransition(record._replace(circuit="closed", failures=()), True)


def probing(record: BreakerRecord, now_ms: int, probe: str, limits: BreakerLimits) -> BreakerTransition:
    """A caller asks for the probe. `did`: it has it; the same caller may ask again."""
    if record.circuit == "half-open" and record.probe == probe:
        return BreakerTransition(record, True)
    if not record.may_probe(now_ms):
        return BreakerTransition(record, False)
    probing = record._replace(circuit="half-open", probe=probe, probe_until_ms=now_ms + limits.probe_ms)
    return BreakerTransition(probing, True)


def forced_open(record: BreakerRecord, now_ms: int, id: str, reason: str, limits: BreakerLimits) -> BreakerTransition:
    """The breaker is opened, whatever its state. `did`: it was not open; an open one begins its pause anew."""
    if record.circuit == "open":
        again = record._replace(retry_ms=now_ms + limits.open_ms, reason=reason)
        return BreakerTransition(again, record.opened_by == id)
    return BreakerTransition(_opened(record, now_ms, id, reason, limits), True)


def reset(record: BreakerRecord) -> BreakerTransition:
    """The breaker is closed, whatever its state. `did`: it was not closed."""
    if record.is_closed and not record.failures:
        return BreakerTransition(record, False)
    return BreakerTransition(record._replace(circuit="closed", probe="", failures=()), not record.is_closed)


def _opened(record: BreakerRecord, now_ms: int, id: str, reason: str, limits: BreakerLimits) -> BreakerRecord:
    return record._replace(
        circuit="open",
        epoch=record.epoch + 1,
        opened_ms=now_ms,
        retry_ms=now_ms + limits.open_ms,
        opened_by=id,
        reason=reason,
        failures=(),
    )


class MemoryBreakers:
    """BreakerEnd in the memory of this process, for a worker without Redis and for tests. Thread-safe.

    clock_ms: whole milliseconds.
    """

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._records: dict[str, BreakerRecord] = {}
        self._lock = threading.Lock()

    def breakers(self, model: str) -> BreakerReading:
        """See BreakerEnd.breakers."""
        with self._lock:
            of_model = {name: record for name, record in self._records.items() if name.startswith(f"{model}/")}
            return BreakerReading(self._clock_ms(), of_model)

    def fail_breaker(
        self, name: str, reason: str, id: str, limits: BreakerLimits, *, probe: str = ""
    ) -> BreakerTransition:
        """See BreakerEnd.fail_breaker."""
        return self._step(name, lambda record, now_ms: failed(record, now_ms, id, reason, limits, probe=probe))

    def pass_breaker(self, name: str, probe: str) -> BreakerTransition:
        """See BreakerEnd.pass_breaker."""
        return self._step(name, lambda record, _: passed(record, probe))

    def probe_breaker(self, name: str, probe: str, limits: BreakerLimits) -> BreakerTransition:
        """See BreakerEnd.probe_breaker."""
        return self._step(name, lambda record, now_ms: probing(record, now_ms, probe, limits))

    def force_open_breaker(self, name: str, reason: str, id: str, limits: BreakerLimits) -> BreakerTransition:
        """See BreakerEnd.force_open_breaker."""
        return self._step(name, lambda record, now_ms: forced_open(record, now_ms, id, reason, limits))

    def reset_breaker(self, name: str) -> BreakerTransition:
        """See BreakerEnd.reset_breaker."""
        return self._step(name, lambda record, _: reset(record))

    def _step(self, name: str, step: Callable[[BreakerRecord, int], BreakerTransition]) -> BreakerTransition:
        split_breaker_name(name)
        with self._lock:
            before = self._records.get(name, BreakerRecord())
            transition = step(before, self._clock_ms())
            if transition.record != before:
                self._records[name] = transition.record
            return transition


@dataclass(frozen=True, slots=True)
class _Copy:
    """The breakers of one model as they were read, and when, in seconds of the worker's monotonic clock."""

    records: Mapping[str, BreakerRecord]
    read_at_s: float


@dataclass(slots=True)
class LocalBreakers:
    """A worker's copy of the breakers of its models. Pure: readings and times are arguments, and nothing blocks.

    One thread changes it; any thread may ask `admits`.
    """

    max_age_s: float = MAX_COPY_AGE_S
    _copies: dict[str, _Copy] = field(default_factory=dict)
    _held_back: set[str] = field(default_factory=set)
    """Names that this worker wants open, until the store has confirmed it."""

    def admits(self, name: str, now_s: float) -> bool:
        """Whether the optimisation may run now: its breaker is closed, and the copy is recent enough to know."""
        copy = self._copies.get(name.partition("/")[0])
        return copy is not None and now_s - copy.read_at_s <= self.max_age_s and self.is_closed(name)

    def is_closed(self, name: str) -> bool:
        """Whether the breaker was closed when it was read last, however long ago, and nothing was reported since."""
        return name not in self._held_back and self.record(name).is_closed

    def is_known(self, model: str, now_s: float) -> bool:
        """Whether the copy of this model is recent enough."""
        copy = self._copies.get(model)
        return copy is not None and now_s - copy.read_at_s <= self.max_age_s

    def record(self, name: str) -> BreakerRecord:
        """The record as it was read last, however old."""
        copy = self._copies.get(name.partition("/")[0])
        return (copy.records.get(name) if copy else None) or BreakerRecord()

    def records(self, model: str) -> Mapping[str, BreakerRecord]:
        """The records of a model as they were read last, by name."""
        copy = self._copies.get(model)
        return copy.records if copy else {}

    def has_read(self, model: str) -> bool:
        """Whether there is a copy of this model's breakers, however old."""
        return model in self._copies

    def keep(self, models: Collection[str]) -> None:
        """Forget the copies of all other models: nobody reads them any more, and they are not as they were."""
        for model in [model for model in self._copies if model not in models]:
            del self._copies[model]

    def hold_back(self, name: str) -> None:
        """Admit the optimisation no more. The store is asked to open its breaker; `take` has the answer."""
        self._held_back.add(name)

    def read(self, model: str, reading: BreakerReading, asked_at_s: float) -> list[str]:
        """Take over a reading. asked_at_s: when it was asked for, so that its age is never underestimated.

        Returns the names of breakers that were not closed and have no record any more: the store lost its data. They
        are held back, and the caller opens them again.
        """
        lost = [
            name for name, record in self.records(model).items() if not record.is_closed and name not in reading.records
        ]
        self._held_back.update(lost)
        self._copies[model] = _Copy(reading.records, asked_at_s)
        return lost

    def take(self, name: str, record: BreakerRecord) -> None:
        """Take over the record that a transition answered, without waiting for the next reading."""
        model = name.partition("/")[0]
        if (copy := self._copies.get(model)) is not None:
            self._copies[model] = _Copy({**copy.records, name: record}, copy.read_at_s)
        self._held_back.discard(name)
