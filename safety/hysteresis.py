"""Whether an optimisation is on: off quickly, on again slowly. Pure: times are arguments, in seconds of any one clock.

    on  -- trip: a breaker opened ----------------------------------------> off, at once
    on  -- soft disable: a FAIL, a drift that is no alert -- min_on_s ----> off
    off -- min_off_s AND N PASS in a row; MARGINAL and FAIL reset them ---> on

The two sides differ on purpose, as those of a Schmitt trigger: a wrong answer costs more than a slow one. If an
optimisation goes off again soon after its return, it stays off twice as long, up to `max_off_s`. Thus input that flaps
all day changes the state less than once per `min_off_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite
from typing import NamedTuple

from penstock.registry.errors import InvalidInput, described
from penstock.registry.settings_sections import SafetyConfig
from penstock.safety.validators import Verdict

__all__ = ["Hysteresis", "HysteresisLimits", "HysteresisState", "StateChange"]


@dataclass(frozen=True, slots=True)
class HysteresisLimits:
    """min_off_s, max_off_s: the shortest and the longest time off. passes: PASS verdicts in a row that it takes to come
    back. min_on_s: the shortest time on before a soft disable. Raises InvalidInput."""

    min_off_s: float = 300.0
    max_off_s: float = 3600.0
    min_on_s: float = 60.0
    passes: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.min_off_s <= self.max_off_s or not isfinite(self.max_off_s):
            raise InvalidInput(
                f"min_off_s is {self.min_off_s:g} and max_off_s {self.max_off_s:g}. Expected 0 < min_off_s <= max_off_s"
            )
        if not 0 <= self.min_on_s < float("inf"):
            raise InvalidInput(f"min_on_s is {self.min_on_s:g}. Expected a number of seconds from 0 on")
        if self.passes < 1:
            raise InvalidInput(f"passes is {self.passes}. Expected at least 1")

    @classmethod
    def of(cls, config: SafetyConfig) -> HysteresisLimits:
        """The limits of the settings."""
        return cls(config.min_off_s, config.max_off_s, config.min_on_s, config.min_passes)


@dataclass(frozen=True, slots=True)
class HysteresisState:
    """The state of one optimisation. Nothing stores it: the shared record of the breaker says how long a form is off.
    A worker that restarts reads it there; see workers/levels/form_breakers.py.
    """

    is_on: bool = False
    since_s: float = 0.0
    """When it went on or off."""
    off_s: float = 0.0
    """The least time off of the present or the last time; 0 before the first one."""
    passes: int = 0
    """PASS verdicts in a row since it went off."""
    soft_reason: str = ""
    """Why it goes off at the end of `min_on_s`; empty: it does not."""


class StateChange(NamedTuple):
    """The optimisation went on or off."""

    is_on: bool
    at_s: float
    reason: str


class _Step(NamedTuple):
    """The state after a call, and the change, if there was one."""

    state: HysteresisState
    change: StateChange | None


@dataclass(slots=True)
class Hysteresis:
    """One optimisation's switch. Each call returns the change that it caused, or None.

    A call with an earlier time than the last one counts as a call at that time.
    """

    limits: HysteresisLimits = field(default_factory=HysteresisLimits)
    state: HysteresisState = field(default_factory=HysteresisState)
    _now_s: float = float("-inf")

    @property
    def is_on(self) -> bool:
        """Whether the optimisation is on."""
        return self.state.is_on

    def observe(self, verdict: Verdict, now_s: float, *, reason: str = "") -> StateChange | None:
        """A verdict of the gate. While on, a FAIL is a soft disable. INSUFFICIENT is no verdict, and changes nothing.

        Raises InvalidInput for another word.
        """
        if not isinstance(verdict, Verdict):
            raise InvalidInput(f"Unknown verdict {described(verdict)}. Expected one of: {', '.join(Verdict)}")
        if verdict is Verdict.FAIL and self.state.is_on:
            return self.disable(reason or "the verdict is FAIL", now_s)
        if verdict is not Verdict.INSUFFICIENT and not self.state.is_on:
            passes = self.state.passes + 1 if verdict is Verdict.PASS else 0
            self.state = replace(self.state, passes=passes)
        return self.advance(now_s)

    def trip(self, reason: str, now_s: float) -> StateChange | None:
        """A breaker opened: off at once. While off, the time off and the passes begin anew."""
        now_s = self._at(now_s)
        if self.state.is_on:
            return self._go_off(reason, now_s)
        self.state = replace(self.state, since_s=now_s, passes=0, off_s=self.state.off_s or self.limits.min_off_s)
        return None

    def disable(self, reason: str, now_s: float) -> StateChange | None:
        """A soft disable: off as soon as it has been on for `min_on_s`. The first reason stays."""
        if self.state.is_on and not self.state.soft_reason:
            self.state = replace(self.state, soft_reason=reason or "a soft disable")
        return self.advance(now_s)

    def advance(self, now_s: float) -> StateChange | None:
        """Time has passed: carry out what waited for it."""
        now_s, state = self._at(now_s), self.state
        if state.is_on:
            if state.soft_reason and now_s - state.since_s >= self.limits.min_on_s:
                return self._go_off(state.soft_reason, now_s)
            return None
        if state.passes < self.limits.passes or now_s - state.since_s < self.least_off_s:
            return None
        self.state = HysteresisState(True, now_s, state.off_s)
        return StateChange(True, now_s, f"{state.passes} PASS in a row, {now_s - state.since_s:g} s off")

    @property
    def least_off_s(self) -> float:
        """How long it stays off at least, from `state.since_s` on."""
        # Nothing is known against an optimisation that was never on: its passes alone decide.
        return self.state.off_s

    def off_s_at(self, now_s: float) -> float:
        """How long it would stay off at least if it went off at this time; while it is off, how long it does."""
        state, limits = self.state, self.limits
        if not state.is_on:
            return state.off_s or limits.min_off_s
        was_brief = state.off_s > 0 and now_s - state.since_s < max(state.off_s, limits.min_off_s)
        return min(2 * state.off_s, limits.max_off_s) if was_brief else limits.min_off_s

    def _go_off(self, reason: str, now_s: float) -> StateChange:
        self.state = HysteresisState(False, now_s, self.off_s_at(now_s))
        return StateChange(False, now_s, reason)

    def _at(self, now_s: float) -> float:
        if not isfinite(now_s):
            raise InvalidInput(f"The time is {now_s}. Expected a finite number of seconds")
        self._now_s = max(self._now_s, self.state.since_s, now_s)
        return self._now_s
