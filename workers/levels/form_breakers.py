"""Forms behind shared circuit breakers: a form that fails on one worker serves on none, and returns slowly.

    a form fails or drifts here --> trip --> open: within a second the reference answers on every worker of the model
    its spot checks FAIL --> observed --> a soft disable: the same, once it has been on for its shortest time
    300 s later one worker has the probe --> trials in a row pass --> closed --> each worker tries the form again

The trials of a probe are those of the gate, on golden jobs beside the traffic, so no client meets a form on probation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from penstock.registry.broker.breakers import BreakerEnd, BreakerLimits, BreakerRecord
from penstock.safety.hysteresis import Hysteresis, HysteresisLimits, HysteresisState, StateChange
from penstock.safety.validators import Verdict
from penstock.workers.levels.shared_breakers import SharedBreakers

__all__ = ["FormBreakers"]

_HYSTERESIS: Final = HysteresisLimits()
_LIMITS: Final = BreakerLimits(open_ms=int(_HYSTERESIS.min_off_s * 1000), probe_ms=600_000)
"""A probe may compile its form three times, which takes minutes."""


class FormBreakers:
    """The breakers of one worker's forms, by `model/version:form`. Its methods are for any thread.

    models: those with a form in use, or with one that was tripped. on_change: is told (name, record) on a thread of its
    own when a breaker has opened or closed, on whichever worker. on_trip: is told (name, record) on that thread, on the
    one worker whose report opened it. on_transition: is told (name, change) when a form goes on or off here. clock:
    monotonic seconds.
    """

    def __init__(
        self,
        end: BreakerEnd,
        models: Callable[[], Sequence[str]],
        on_change: Callable[[str, BreakerRecord], None],
        clock: Callable[[], float],
        *,
        on_trip: Callable[[str, BreakerRecord], None] = lambda name, record: None,
        on_transition: Callable[[str, StateChange], None] = lambda name, change: None,
    ) -> None:
        self._on_change = on_change
        self._on_transition = on_transition
        self._clock = clock
        self._lock = threading.Lock()
        self._switches: dict[str, Hysteresis] = {}
        """Of the forms that are on here, or were tripped, by name."""
        self.shared: Final = SharedBreakers(
            end,
            models,
            thread="breakers",
            limits=_LIMITS,
            wanted=self._due,
            on_change=self._changed,
            on_trip=on_trip,
            clock=clock,
        )
        """Reads them, and sends what was reported, between its `start` and `stop`."""

    def admits(self, name: str) -> bool:
        """Whether the form may run the next batch. Memory only; False while the breaker could not be read."""
        return self.shared.admits(name)

    def is_open(self, name: str) -> bool:
        """Whether the breaker was not closed when it was read last."""
        return not self.shared.record(name).is_closed

    def switched_on(self, name: str) -> None:
        """The gate has switched the form on here."""
        with self._lock:
            before = self._switches.get(name, Hysteresis(_HYSTERESIS)).state
            if before.is_on:
                return
            change = StateChange(True, self._clock(), "the gate switched it on")
            self._switches[name] = Hysteresis(_HYSTERESIS, HysteresisState(True, change.at_s, before.off_s))
        self._on_transition(name, change)

    def observed(self, name: str, verdict: Verdict, reason: str) -> None:
        """A spot check of the form ended. After a FAIL it goes off once it has been on for its shortest time."""
        self._soften(name, lambda switch, now_s: switch.observe(verdict, now_s, reason=reason))

    def advance(self, name: str) -> None:
        """Time has passed: carry out a soft disable that waited for it."""
        self._soften(name, lambda switch, now_s: switch.advance(now_s))

    def _soften(self, name: str, step: Callable[[Hysteresis, float], StateChange | None]) -> None:
        with self._lock:
            switch = self._switches.get(name)
            if switch is None or not switch.is_on:
                return
            change = step(switch, self._clock())
        if change is not None:
            self._on_transition(name, change)
            self.shared.force_open(name, change.reason)

    def trip(self, name: str, reason: str) -> None:
        """The form failed at serving: it is off here at once, and on the other workers within a second."""
        self._switch_off(name, reason)
        self.shared.force_open(name, reason)

    def failed(self, name: str, reason: str) -> None:
        """The form failed a batch, and stays on until the breaker has counted enough of these."""
        self.shared.failed(name, reason)

    def take_probe(self, name: str) -> str:
        """The id of the probe, if this worker has it; empty otherwise. Tell each trial to `judged`."""
        return self.shared.take_probe(name)

    def judged(self, name: str, probe: str, verdict: Verdict, reason: str) -> bool:
        """A trial of the probe ended; whether another one is needed. The last one closes the breaker or opens it."""
        with self._lock:
            switch = self._switches.setdefault(name, Hysteresis(_HYSTERESIS))
            change = switch.observe(verdict, self._clock(), reason=reason)
            needs_more = verdict is Verdict.PASS and change is None
        if change is not None:
            self._on_transition(name, change)
            self.shared.passed(name, probe)
        elif not needs_more:
            self.shared.failed(name, reason, probe=probe)
        return needs_more

    def _changed(self, name: str, record: BreakerRecord) -> None:
        # The switch stays when the probe of another worker has passed: a form that flaps is off for longer each time.
        if not record.is_closed:
            self._switch_off(name, record.reason)
        self._on_change(name, record)

    def _switch_off(self, name: str, reason: str) -> None:
        with self._lock:
            change = self._switches.setdefault(name, Hysteresis(_HYSTERESIS)).trip(reason, self._clock())
        if change is not None:
            self._on_transition(name, change)

    def _due(self) -> list[str]:
        """The forms that this worker could probe now."""
        now = self._clock()
        with self._lock:
            return [
                name
                for name, switch in self._switches.items()
                if not switch.is_on and now - switch.state.since_s >= switch.least_off_s
            ]
