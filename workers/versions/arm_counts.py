"""What the arms of experiments did in one worker: its totals by experiment and epoch.

committed jobs -- ran, found, failed --> ArmCounts -- unwritten, once a second --> Broker.observe -- written -->
                                            '-- an arm fails: safety/arm_failures.py --> on_failing
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.registry.envelope import JobHeader
from penstock.safety.arm_failures import ArmFailures
from penstock.safety.arm_figures import ArmFigures, observation_field
from penstock.workers.versions.version import ServedModel

__all__ = ["ArmCounts", "CountedArms"]


class CountedArms(NamedTuple):
    """The totals of one worker in one epoch of an experiment, as they are written."""

    model: str
    experiment: str
    field: str
    figures: bytes


class ArmCounts:
    """What the arms of this worker's experiments did. The I/O thread counts, the lease thread takes the totals.

    consumer: this boot of the worker. models: by name; jobs count for the epoch that the worker follows at their end.
    on_failing: is told (model, label, reason) on the I/O thread when an arm fails too often to go on. clock: monotonic
    seconds.
    """

    def __init__(
        self,
        consumer: str,
        models: Mapping[str, ServedModel],
        *,
        on_failing: Callable[[str, str, str], None] = lambda model, label, reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._consumer = consumer
        self._models = models
        self._on_failing = on_failing
        self._clock = clock
        self._failures: dict[str, tuple[str, ArmFailures]] = {}
        """By model: its experiment, and the last jobs of its arms. The I/O thread's."""
        self._totals: dict[tuple[str, str, int], dict[str, ArmFigures]] = {}
        """By model, experiment and epoch: the figures by version."""
        self._unwritten: set[tuple[str, str, int]] = set()
        self._lock = threading.Lock()

    def is_open(self, model: str) -> bool:
        """Whether an experiment divides the jobs of this model."""
        served = self._models.get(model)
        return served is not None and served.arms is not None

    def ran(self, model: str, label: str, totals_s: Sequence[float]) -> None:
        """These jobs of an arm were answered by a forward, so many seconds after their acceptance."""
        with self._lock:
            figures = self._figures(model, label)
            figures.jobs += len(totals_s)
            figures.add_latencies(totals_s)
        self._ended(model, label, len(totals_s))

    def found(self, model: str, label: str, count: int) -> None:
        """So many jobs of an arm were answered by the cache."""
        with self._lock:
            figures = self._figures(model, label)
            figures.jobs += count
            figures.cached += count
        self._ended(model, label, count)

    def failed(self, model: str, label: str) -> None:
        """A job of an arm ended with an error."""
        with self._lock:
            figures = self._figures(model, label)
            figures.jobs += 1
            figures.errors += 1
        self._ended(model, label, 1, failed=1)

    def stopped(self, header: JobHeader) -> None:
        """A job ended because its forward hung, or because processes died while it ran: an error of its arm.

        Jobs that name a version, and jobs of a model without an experiment, do not count.
        """
        served = self._models.get(header.model)
        if served is not None and served.arms is not None and not header.version:
            self.failed(header.model, served.arms.label_for(header))

    def unwritten(self) -> list[CountedArms]:
        """The totals that the broker does not have yet. Call `written` for those that it got."""
        with self._lock:
            return [self._encoded(key) for key in sorted(self._unwritten)]

    def written(self, counted: CountedArms) -> None:
        """The broker has these totals. Those of an epoch that is over are forgotten."""
        with self._lock:
            for key in [key for key in self._unwritten if self._encoded(key) == counted]:
                self._unwritten.remove(key)
                model, _, epoch = key
                arms = self._models[model].arms
                if arms is None or arms.epoch != epoch:
                    del self._totals[key]

    def _ended(self, model: str, label: str, jobs: int, failed: int = 0) -> None:
        arms = self._models[model].arms
        if arms is None:
            return
        experiment, failures = self._failures.get(model, ("", None))
        if failures is None or experiment != arms.routing.experiment:
            failures = ArmFailures()
            self._failures[model] = (arms.routing.experiment, failures)
        now_s = self._clock()
        failures.ended(label, jobs, failed, now_s)
        if failed and label != arms.production and (reason := failures.why_stopped(label, arms.production, now_s)):
            failures.forget(label)
            self._on_failing(model, label, reason)

    def _figures(self, model: str, label: str) -> ArmFigures:
        arms = self._models[model].arms
        if arms is None:
            # No experiment: these figures are dropped.
            return ArmFigures()
        key = (model, arms.routing.experiment, arms.epoch)
        self._unwritten.add(key)
        return self._totals.setdefault(key, {}).setdefault(label, ArmFigures())

    def _encoded(self, key: tuple[str, str, int]) -> CountedArms:
        model, experiment, epoch = key
        field = observation_field(epoch, self._consumer)
        return CountedArms(model, experiment, field, msgspec.json.encode(self._totals[key]))
