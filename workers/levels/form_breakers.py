"""Forms behind shared circuit breakers: a form that fails on one worker serves on none, and returns slowly.

    a form fails or drifts here --> trip --> open: within a second the reference answers on every worker of the model
    its spot checks FAIL --> observed --> a soft disable: the same, once it has been on for its shortest time
    a canary refuses it in the shadow, or it drifts there --> open: the same
    after its time off one worker has the probe --> trials in a row pass --> closed --> each worker tries the form again

The trials of a probe are those of the gate, on golden jobs beside the traffic, so no client meets a form on probation.

The pause in the shared record is the time off. A worker that has just started reads there how long a form is off, or
was off the last time, so that a form that flaps is off for longer each time whichever worker restarts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final

from penstock.registry.broker.breakers import BreakerEnd, BreakerRecord, split_breaker_name
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.settings_sections import SafetyConfig
from penstock.safety.hysteresis import Hysteresis, HysteresisLimits, HysteresisState, StateChange
from penstock.safety.validators import Verdict
from penstock.workers.levels.shared_breakers import SharedBreakers

__all__ = ["FormBreakers"]


class FormBreakers:
    """The breakers of one worker's forms, by `model/version:form`. Its methods are for any thread.

    models: those with a form in use, or with one that was tripped or found open. forms: the breakers of the forms that
    this worker could try. on_change: is told (name, record) on a thread of its own when a breaker has opened or closed,
    on whichever worker. on_trip: is told (name, record) on that thread, on the one worker whose report opened it.
    on_transition: is told (name, change) when a form goes on or off here. clock: monotonic seconds.
    """

    def __init__(
        self,
        end: BreakerEnd,
        models: Callable[[], Sequence[str]],
        on_change: Callable[[str, BreakerRecord], None],
        clock: Callable[[], float],
        *,
        config: SafetyConfig,
        forms: Callable[[], Collection[str]],
        on_trip: Callable[[str, BreakerRecord], None] = lambda name, record: None,
        on_transition: Callable[[str, StateChange], None] = lambda name, change: None,
    ) -> None:
        self._end = end
        self._limits: Final = HysteresisLimits.of(config)
        self._forms = forms
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
            limits=config.breaker_limits,
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
        """Whether the breaker was not closed when it was read last. A model whose breakers are not read is asked about
        now, which waits for the broker; while that is away, a form is no better known, and `admits` refuses it.
        """
        model = split_breaker_name(name)[0]
        if self.shared.has_read(model):
            return not self.shared.record(name).is_closed
        try:
            return not self._end.breakers(model).records.get(name, BreakerRecord()).is_closed
        except BrokerUnavailable:
            return False

    def switched_on(self, name: str) -> None:
        """The gate has switched the form on here."""
        with self._lock:
            switch = self._switch_of(name)
            if switch.is_on:
                return
            change = StateChange(True, self._clock(), "the gate switched it on")
            switch.state = HysteresisState(True, change.at_s, switch.state.off_s)
        self._on_transition(name, change)

    def observed(self, name: str, verdict: Verdict, reason: str) -> None:
        """A spot check of the form ended. After a FAIL it goes off once it has been on for its shortest time."""
        self._soften(name, lambda switch, now_s: switch.observe(verdict, now_s, reason=reason))

    def advance(self, name: str) -> None:
        """Time has passed: carry out a soft disable that waited for it."""
        self._soften(name, lambda switch, now_s: switch.advance(now_s))

    def _soften(self, name: str, step: Callable[[Hysteresis, float], StateChange | None]) -> None:
        with self._lock:
            switch = self._switch_of(name)
            if not switch.is_on:
                return
            change, open_ms = step(switch, self._clock()), _ms(switch.state.off_s)
        if change is not None:
            self._on_transition(name, change)
            self.shared.force_open(name, change.reason, open_ms=open_ms)

    def trip(self, name: str, reason: str) -> None:
        """The form failed at serving: it is off here at once, and on the other workers within a second."""
        with self._lock:
            switch = self._switch_of(name)
            change, open_ms = switch.trip(reason, self._clock()), _ms(switch.state.off_s)
        if change is not None:
            self._on_transition(name, change)
        self.shared.force_open(name, reason, open_ms=open_ms)

    def failed(self, name: str, reason: str) -> None:
        """The form failed a batch, and stays on until the breaker has counted enough of these."""
        with self._lock:
            open_ms = _ms(self._switch_of(name).off_s_at(self._clock()))
        self.shared.failed(name, reason, open_ms=open_ms)

    def take_probe(self, name: str) -> str:
        """The id of the probe, if this worker has it; empty otherwise. Tell each trial to `judged`."""
        return self.shared.take_probe(name)

    def judged(self, name: str, probe: str, verdict: Verdict, reason: str) -> bool:
        """A trial of the probe ended; whether another one is needed. The last one closes the breaker or opens it."""
        with self._lock:
            switch = self._switch_of(name)
            change = switch.observe(verdict, self._clock(), reason=reason)
            needs_more = verdict is Verdict.PASS and change is None
            open_ms = _ms(switch.off_s_at(self._clock()))
        if change is not None:
            self._on_transition(name, change)
            self.shared.passed(name, probe)
        elif not needs_more:
            self.shared.failed(name, reason, probe=probe, open_ms=open_ms)
        return needs_more

    def _changed(self, name: str, record: BreakerRecord) -> None:
        # The switch stays when the probe of another worker has passed: a form that flaps is off for longer each time.
        if not record.is_closed:
            with self._lock:
                switch = self._switches.setdefault(name, Hysteresis(self._limits))
                change = switch.trip(record.reason, self._clock())
                switch.state = self._as_recorded(name, switch.state, record)
            if change is not None:
                self._on_transition(name, change)
        self._on_change(name, record)

    def _as_recorded(self, name: str, state: HysteresisState, record: BreakerRecord) -> HysteresisState:
        """The state of a form that is off since its breaker has opened, and at least for the pause of the record."""
        pause_s = (record.retry_ms - record.opened_ms) / 1000
        age_ms = max(0, self.shared.now_ms(name) - record.opened_ms) if record.opened_ms else 0
        off_s = max(state.off_s, min(pause_s, self._limits.max_off_s))
        return replace(state, off_s=off_s, since_s=self._clock() - age_ms / 1000)

    def _switch_of(self, name: str) -> Hysteresis:
        """The caller holds the lock. Where this worker knows of no time off, the shared record may tell of one."""
        switch = self._switches.setdefault(name, Hysteresis(self._limits))
        if not switch.state.off_s and (off_s := self._last_off_s(name)):
            switch.state = replace(switch.state, off_s=off_s)
        return switch

    def _last_off_s(self, name: str) -> float:
        """How long the form was off at least before it returned; 0: it never was, or it returned long ago."""
        record = self.shared.record(name)
        if not record.is_closed or not record.opened_ms:
            return 0.0
        off_s = min((record.retry_ms - record.opened_ms) / 1000, self._limits.max_off_s)
        on_s = (self.shared.now_ms(name) - record.retry_ms) / 1000
        return off_s if on_s < max(off_s, self._limits.min_off_s) else 0.0

    def _due(self) -> list[str]:
        """The forms that this worker could probe now."""
        forms, now = self._forms(), self._clock()
        with self._lock:
            return [
                name
                for name, switch in self._switches.items()
                if name in forms and not switch.is_on and now - switch.state.since_s >= switch.least_off_s
            ]


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
