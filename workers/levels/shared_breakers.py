"""A worker's part in the shared circuit breakers: asks and tells the broker on one thread, and answers from memory.

    model threads -- admits --------------> LocalBreakers: memory only, at most a second old
                  -- failed, passed ------> waiting reports
    its thread    -- turn: reports, then a reading of each model, then the probes that this worker wants --> the broker

While the broker is away, the copy grows old, and after a second no optimisation is admitted: the plain path serves.
Reports wait until the broker is back. A breaker that was open, and whose record the broker lost, is opened again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.registry.broker.breakers import (
    BreakerEnd,
    BreakerLimits,
    BreakerRecord,
    BreakerTransition,
    new_breaker_id,
    split_breaker_name,
)
from penstock.registry.errors import BrokerUnavailable
from penstock.safety.breaker import LocalBreakers

__all__ = ["READ_EVERY_S", "SharedBreakers"]

READ_EVERY_S: Final = 0.25
"""Between two readings: a quarter of the greatest age, so that a slow answer or two make no copy too old."""
_MOST_REPORTS: Final = 1000
_LOST: Final = "the broker lost the record of an open breaker"
logger = logging.getLogger("penstock.runtime")


@dataclass(frozen=True, slots=True)
class _Report:
    """One call that waits for the broker. It has an id of its own, and is repeated with it."""

    name: str
    send: Callable[[BreakerEnd], BreakerTransition]
    may_open: bool


class SharedBreakers:
    """The breakers of one worker's models, read by a thread of their own between `start` and `stop`.

    `admits`, `failed`, `passed`, `force_open`, `take_probe` and `wake` are for any thread and wait for nothing.

    models: those whose breakers are read now. The copy of another model is forgotten. thread: the name of the thread.
    wanted: the optimisations that it could probe now, by name; without any it probes none. on_change: is told (name,
    record) when a breaker has opened or closed, on the thread of `turn`. on_trip: is told (name, record) on the one
    worker whose report opened the breaker; alerts belong there. clock: monotonic seconds.
    """

    def __init__(
        self,
        end: BreakerEnd,
        models: Callable[[], Sequence[str]],
        *,
        thread: str = "breakers",
        limits: BreakerLimits | None = None,
        wanted: Callable[[], Collection[str]] = tuple,
        on_change: Callable[[str, BreakerRecord], None] = lambda name, record: None,
        on_trip: Callable[[str, BreakerRecord], None] = lambda name, record: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end = end
        self._models = models
        self._limits = (limits or BreakerLimits()).check()
        self._wanted = wanted
        self._on_change = on_change
        self._on_trip = on_trip
        self._clock = clock
        self._local = LocalBreakers()
        self._reports: deque[_Report] = deque()
        self._probes: dict[str, str] = {}
        """By name: a probe that was granted to this worker and that no batch has taken."""
        self._told: dict[str, bool] = {}
        """By name: whether `on_change` was last told that it is closed."""
        self._now_ms: dict[str, int] = {}
        """By model: the broker's clock at the last reading."""
        self._wake = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)
        self._read_at = clock()
        """When the last exchange with the broker began in which it answered."""
        self._is_away = False
        self.dropped = 0
        """Reports for which there was no room while the broker was away."""

    def start(self) -> None:
        """Begin to read the breakers and to send what was reported."""
        self._thread.start()

    def stop(self, timeout_s: float = 3.0) -> None:
        """Send what waits, once, and end the thread."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    # For any thread

    def wake(self) -> None:
        """Let the next turn follow at once."""
        self._wake.set()

    def has_read(self, model: str) -> bool:
        """Whether the breakers of this model were read since it is one of the models."""
        return self._local.has_read(model)

    def admits(self, name: str) -> bool:
        """Whether this optimisation may run the next batch. Memory only."""
        return self._local.admits(name, self._clock())

    def is_closed(self, name: str) -> bool:
        """Whether the breaker was closed when it was read last, and nothing was reported since. Memory only."""
        return self._local.is_closed(name)

    def take_probe(self, name: str) -> str:
        """The id of the probe that this worker was granted, once; empty without one. Tell its outcome with the id."""
        return self._probes.pop(name, "")

    def failed(self, name: str, reason: str, *, probe: str = "", open_ms: int = 0) -> None:
        """The optimisation failed. open_ms: the pause if this opens the breaker; 0: that of the limits.

        Raises InvalidInput for a bad name.
        """
        split_breaker_name(name)
        if not probe and len(self._reports) >= _MOST_REPORTS:
            self.dropped += 1
            return
        failure, limits = new_breaker_id(), self._limits_of(open_ms)
        if probe:
            self._local.hold_back(name)
        self._report(name, lambda end: end.fail_breaker(name, reason, failure, limits, probe=probe))

    def passed(self, name: str, probe: str) -> None:
        """The probe passed. Raises InvalidInput for a bad name."""
        split_breaker_name(name)
        self._report(name, lambda end: end.pass_breaker(name, probe), may_open=False)

    def force_open(self, name: str, reason: str, *, open_ms: int = 0) -> None:
        """Open the breaker: here at once, and on the other workers within a second. Raises InvalidInput for a bad name.

        Drift, a gate that refuses, and operators come this way. open_ms: the pause; 0: that of the limits.
        """
        split_breaker_name(name)
        forced, limits = new_breaker_id(), self._limits_of(open_ms)
        self._local.hold_back(name)
        self._report(name, lambda end: end.force_open_breaker(name, reason, forced, limits))

    def record(self, name: str) -> BreakerRecord:
        """The record as it was read last."""
        return self._local.record(name)

    def now_ms(self, name: str) -> int:
        """The broker's clock at the last reading of the breaker; 0 before the first one."""
        return self._now_ms.get(name.partition("/")[0], 0)

    @property
    def away_s(self) -> float:
        """How old the last reading is while the broker does not answer, in seconds; 0 while it does."""
        return self._clock() - self._read_at if self._is_away else 0.0

    def _limits_of(self, open_ms: int) -> BreakerLimits:
        return self._limits._replace(open_ms=open_ms) if open_ms else self._limits

    # Its thread

    def _run(self) -> None:
        while not self._is_stopping:
            self._wake.wait(READ_EVERY_S)
            self._wake.clear()
            self.turn()
        self.turn()

    def turn(self) -> bool:
        """One exchange with the broker. False: it was away, and what waits is sent by a later turn.

        For tests as well, which are the thread then.
        """
        models, begun_at = self._models(), self._clock()
        self._local.keep(models)
        try:
            self._send_reports()
            for model in models:
                self._read(model)
            self._send_reports()
            self._ask_for_probes()
        except BrokerUnavailable as error:
            if not self._is_away:
                logger.warning("circuit breakers cannot be read, the plain path serves: %s", error)
                self._is_away = True
            return False
        self._read_at, self._is_away = begun_at, False
        return True

    def _report(self, name: str, send: Callable[[BreakerEnd], BreakerTransition], *, may_open: bool = True) -> None:
        self._reports.append(_Report(name, send, may_open))
        self._wake.set()

    def _send_reports(self) -> None:
        while self._reports:
            report = self._reports[0]
            transition = report.send(self._end)
            # Sent: only this thread takes reports out.
            self._reports.popleft()
            self._local.take(report.name, transition.record)
            self._tell(report.name, transition.record)
            if transition.did and report.may_open:
                _call(self._on_trip, report.name, transition.record)

    def _read(self, model: str) -> None:
        asked_at_s = self._clock()
        reading = self._end.breakers(model)
        self._now_ms[model] = reading.now_ms
        is_first = not self._local.has_read(model)
        for name in self._local.read(model, reading, asked_at_s):
            logger.warning("%s, and it is opened again", _LOST, extra={"breaker": name})
            self.force_open(name, _LOST)
        for name, record in reading.records.items():
            self._tell(name, record)
        if is_first:
            # Open when the model was one of the models last, which is so long ago that the record has gone.
            for name in [name for name in self._told if name.startswith(f"{model}/") and name not in reading.records]:
                self._tell(name, BreakerRecord())

    def _tell(self, name: str, record: BreakerRecord) -> None:
        if self._told.get(name, True) == record.is_closed:
            return
        self._told[name] = record.is_closed
        logger.warning(
            "a circuit breaker %s",
            "closed" if record.is_closed else "opened",
            extra={"breaker": name, "reason": record.reason, "epoch": record.epoch},
        )
        _call(self._on_change, name, record)

    def _ask_for_probes(self) -> None:
        wanted = self._wanted()
        for name in [name for name in self._probes if name not in wanted]:
            # Its lease lapses, and another worker gets it.
            del self._probes[name]
        for name in wanted:
            record = self._local.record(name)
            if name in self._probes or not record.may_probe(self.now_ms(name)):
                continue
            probe = new_breaker_id()
            transition = self._end.probe_breaker(name, probe, self._limits)
            self._local.take(name, transition.record)
            if transition.did:
                self._probes[name] = probe


def _call(listener: Callable[[str, BreakerRecord], None], name: str, record: BreakerRecord) -> None:
    """A listener that raises must not end the thread: without it no optimisation would be admitted any more."""
    try:
        listener(name, record)
    except Exception:
        logger.exception("a listener of circuit breakers failed", extra={"breaker": name})
