"""What the arms of experiments did in one worker: its totals by experiment and epoch.

committed jobs -- ran, found, failed --> ArmCounts -- unwritten, once a second --> Broker.observe -- written -->
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.registry.envelope import JobHeader
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
    """

    def __init__(self, consumer: str, models: Mapping[str, ServedModel]) -> None:
        self._consumer = consumer
        self._models = models
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

    def found(self, model: str, label: str, count: int) -> None:
        """So many jobs of an arm were answered by the cache."""
        with self._lock:
            figures = self._figures(model, label)
            figures.jobs += count
            figures.cached += count

    def failed(self, model: str, label: str) -> None:
        """A job of an arm ended with an error."""
        with self._lock:
            figures = self._figures(model, label)
            figures.jobs += 1
            figures.errors += 1

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
