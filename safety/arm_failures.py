"""The jobs of arms that failed on one worker -> an arm that gets no more. Pure: time is an argument.

    jobs that ended, by arm --> those of the last minute --> why_stopped: enough failed, half of them or more, and twice
                                                             the share of the version in production

The gate of a rollout compares figures of all workers, step by step, while its driver runs. This rule needs no driver:
an A/B experiment has none, and that of a rollout may be dead. An input that fails on every version stops no arm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from penstock.registry.errors import InvalidInput

__all__ = ["ArmFailureLimits", "ArmFailures"]

_SLOTS: Final = 12
"""Parts of the window; the oldest leaves it as a whole."""


@dataclass(frozen=True, slots=True)
class ArmFailureLimits:
    """When an arm is stopped: so many `failures` within `window_s` seconds, which are at least `share` of its jobs.

    Raises InvalidInput.
    """

    failures: int = 5
    share: float = 0.5
    window_s: float = 60.0

    def __post_init__(self) -> None:
        if self.failures < 1:
            raise InvalidInput(f"failures of an arm is {self.failures}. Expected at least 1")
        if not 0 < self.share <= 1:
            raise InvalidInput(f"share of failures of an arm is {self.share:g}. Expected more than 0 and at most 1")
        if not 0 < self.window_s < float("inf"):
            raise InvalidInput(f"window_s of an arm is {self.window_s:g}. Expected a positive number of seconds")


@dataclass(slots=True)
class _Slot:
    """What ended in a part of the window. number: counts these parts since time 0."""

    number: int
    jobs: int = 0
    failed: int = 0


class ArmFailures:
    """The last jobs of the arms of one experiment. Times are seconds of one clock."""

    def __init__(self, limits: ArmFailureLimits | None = None) -> None:
        self.limits: Final = limits or ArmFailureLimits()
        self._slots: dict[str, deque[_Slot]] = {}

    def ended(self, label: str, jobs: int, failed: int, now_s: float) -> None:
        """So many jobs of this version ended, of which `failed` with an error."""
        slots = self._slots.setdefault(label, deque(maxlen=_SLOTS))
        number = self._number(now_s)
        if not slots or slots[-1].number != number:
            slots.append(_Slot(number))
        slots[-1].jobs += jobs
        slots[-1].failed += failed

    def forget(self, label: str) -> None:
        """The version was stopped: what it did before does not count again."""
        self._slots.pop(label, None)

    def why_stopped(self, label: str, production: str, now_s: float) -> str:
        """Why this version is to get no more jobs; empty: it may. production: the version that answers otherwise."""
        jobs, failed = self._counted(label, now_s)
        if failed < self.limits.failures or failed < self.limits.share * jobs:
            return ""
        others, others_failed = self._counted(production, now_s)
        if others_failed * jobs * 2 > failed * others:
            return ""
        return (
            f"{failed} of {jobs} jobs failed within {self.limits.window_s:g} s; "
            f"of version {production}, {others_failed} of {others} did"
        )

    def _counted(self, label: str, now_s: float) -> tuple[int, int]:
        since = self._number(now_s) - _SLOTS
        slots: Iterable[_Slot] = self._slots.get(label, ())
        recent = [slot for slot in slots if slot.number > since]
        return sum(slot.jobs for slot in recent), sum(slot.failed for slot in recent)

    def _number(self, now_s: float) -> int:
        return int(now_s * _SLOTS // self.limits.window_s)
