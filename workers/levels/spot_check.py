"""Spot checks: a small share of the batches that a form answered runs again by the reference, beside the traffic.

    I/O thread, after the commit     SpotSampler.offer: one batch at a time waits; its inputs and its answers
    the optimizer's thread, idle     SpotSampler.take -> the reference on a copy for this thread -> SpotWatch.judge
        each figure of each job -> DriftMonitor -> an alert: the form's breaker opens at once
        all pairs so far        -> Canary       -> FAIL: a soft disable, after the form's shortest time on

A check takes no time of a model thread and delays no answer. Checks take at most `share` of this thread's time, so that
a slow reference is run less often. A form that is switched on anew has a new reference window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from penstock.registry.tensors import Array
from penstock.safety.canary import Canary, CanaryVerdict, Pair
from penstock.safety.drift import DriftAlert, DriftLimits, DriftMonitor
from penstock.safety.validator_registry import compare_outputs
from penstock.safety.validators import Comparison, Validator
from penstock.workers.runtime.forms import EAGER, Forms
from penstock.workers.versions.tuner import AnsweredJob, BatchObservation

__all__ = ["SpotFinding", "SpotSample", "SpotSampler", "SpotWatch"]

_MIN_PAIRS: Final = 200
"""With fewer, only what more pairs cannot change is a FAIL; see Canary."""
_DECIMALS: Final = 9
"""Rounding is no drift: equal outputs differ in the last bits only, and ranks would see that."""


class SpotSample(NamedTuple):
    """One batch that a form answered."""

    form: str
    generation: int
    jobs: tuple[AnsweredJob, ...]


class SpotSampler:
    """Chooses the batches of one version. `offer` is for the I/O thread, the rest for the optimizer's.

    share: of the batches that a form answers, 0 to 1. random: numbers in [0, 1). clock: monotonic seconds.
    """

    def __init__(self, forms: Forms, share: float, *, random: Callable[[], float], clock: Callable[[], float]) -> None:
        self._forms = forms
        self._share = share
        self._random = random
        self._clock = clock
        self._waiting: SpotSample | None = None
        self._next_at = -inf

    def offer(self, batch: BatchObservation) -> None:
        """A batch has ended. It is kept if it is chosen, if none waits, and if the form in use answered it."""
        if self._waiting is not None or not self._share or batch.generation == 0:
            return
        # The same number before the batch and now: one form has answered it; see Forms.generation.
        if batch.generation != self._forms.generation or self._random() >= self._share:
            return
        if (form := self._forms.name) != EAGER and (jobs := tuple(batch.answered(_every))):
            self._waiting = SpotSample(form, batch.generation, jobs)

    def take(self) -> SpotSample | None:
        """The batch that waits, once the earlier checks have had their pause; None without one."""
        sample = self._waiting
        if sample is None or self._clock() < self._next_at:
            return None
        self._waiting = None
        return sample if sample.generation == self._forms.generation else None

    def took(self, seconds: float) -> None:
        """A check took so long: the next one comes after a pause."""
        self._next_at = self._clock() + seconds * (1 / self._share - 1)


class SpotFinding(NamedTuple):
    """What a form's spot checks have found so far."""

    verdict: CanaryVerdict
    alert: DriftAlert | None
    """The alert that this check has raised."""
    drift: float
    """The largest smoothed score of a figure, as a share of its control limit; 0 before there is a reference window."""


@dataclass
class SpotWatch:
    """The spot checks of one form since it was switched on."""

    form: str
    validators: Mapping[str, Validator]
    limits: DriftLimits = field(default_factory=DriftLimits)
    monitors: dict[str, DriftMonitor] = field(default_factory=dict)
    """By `<output>.<figure>`."""

    def __post_init__(self) -> None:
        self._canary = Canary(self.validators, min_pairs=_MIN_PAIRS)

    def judge(
        self,
        jobs: Sequence[AnsweredJob],
        expected: Sequence[Mapping[str, Array]],
    ) -> SpotFinding:
        """Take in one batch. expected: what the reference answers to each of its jobs."""
        pairs = [Pair(theirs, job.outputs, name=job.job_id) for job, theirs in zip(jobs, expected, strict=True)]
        verdict = self._canary.observe(pairs)
        alert: DriftAlert | None = None
        for job, theirs in zip(jobs, expected, strict=True):
            for name, validator in self.validators.items():
                if name in job.outputs:
                    alert = self._watch(name, compare_outputs(validator, job.outputs[name], theirs[name])) or alert
        return SpotFinding(verdict, alert, max((_way_to_limit(each) for each in self.monitors.values()), default=0.0))

    def _watch(self, output: str, found: Comparison) -> DriftAlert | None:
        alert: DriftAlert | None = None
        for name, figure in found.figures.items():
            place = f"{output}.{name}"
            monitor = self.monitors.get(place)
            if monitor is None:
                monitor = self.monitors[place] = DriftMonitor(place, figure.worse_side, self.limits)
            alert = monitor.observe(round(figure.value, _DECIMALS)) or alert
        return alert


def _every(_job_id: str) -> bool:
    return True


def _way_to_limit(monitor: DriftMonitor) -> float:
    return abs(monitor.score) / monitor.limit if monitor.count else 0.0
