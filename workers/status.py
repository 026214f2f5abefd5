"""Once a second, on the lease thread: report, queue gauges, pauses, shadows, overdue jobs of paused models.

report -- the broker has the last one    --> every few seconds: names of the keys, missing specs, foreign keys
       '- its data are not those of before --> at once: all of that, every spec, and the decisions that are followed
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from penstock.registry.broker.base import Broker, Depth, State
from penstock.registry.broker.limits import OBSERVATIONS_TTL_MS
from penstock.registry.envelope import Keyring
from penstock.registry.key_reports import key_report
from penstock.registry.overdue import OverdueJobs
from penstock.registry.queues import slot_in
from penstock.workers.cache import AnswerCache
from penstock.workers.generation.predicted_wait import predicted_wait_s, queue_share
from penstock.workers.leases import LeasedJobs
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.observe.process_memory import device_bytes, host_bytes
from penstock.workers.shadow.mirror import Mirror
from penstock.workers.telemetry import BatchTelemetry
from penstock.workers.versions.arm_counts import ArmCounts
from penstock.workers.versions.lifecycle import ModelLifecycle
from penstock.workers.versions.token_limits import follow_limits
from penstock.workers.versions.tuner import Tuner

__all__ = ["StatusReporter", "WorkerIdentity"]

logger = logging.getLogger("penstock.server")

_REPORT_TTL_MS: Final = 5000
_RENEW_EVERY: Final = 4
"""Reports between two renewals of what clients and other workers read."""
_KEYS_TTL_MS: Final = 15_000
_TRY_AGAIN_EVERY: Final = 10
"""Reports, and so seconds, between two tries to load an active version that could not be loaded."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """How a worker is known. name: unique on the broker. consumer: unique for each start of it."""

    name: str
    consumer: str
    device: str
    probe_url: str = ""
    """Where its probe answers; empty: it has none."""
    keyring: Keyring = field(default=Keyring.parse(None), repr=False)
    """Its signing keys. Only their names are reported."""


class StatusReporter:
    """Reports one worker. The lease thread calls `report`, every thread may call `is_paused`.

    on_change: called when the set of paused models has changed.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        broker: Broker,
        lifecycle: ModelLifecycle,
        leased: LeasedJobs,
        telemetry: BatchTelemetry,
        answers: AnswerCache,
        metrics: InferenceMetrics,
        tuner: Tuner,
        overdue: OverdueJobs,
        mirror: Mirror,
        arms: ArmCounts,
        *,
        on_change: Callable[[], None],
    ) -> None:
        self.paused: frozenset[str] = frozenset()
        """The models that an operator paused."""
        self._identity = identity
        self._broker = broker
        self._lifecycle = lifecycle
        self._leased = leased
        self._telemetry = telemetry
        self._answers = answers
        self._metrics = metrics
        self._tuner = tuner
        self._overdue = overdue
        self._mirror = mirror
        self._arms = arms
        self._on_change = on_change
        self._key_report = key_report(identity.name, identity.keyring)
        self._started_at = time.time()
        self._host = socket.gethostname()
        self._reports = 0
        self._must_replace = False
        """Whether the broker's data may be others than before the last report, and were not renewed since."""

    def is_paused(self, model: str) -> bool:
        """Whether an operator paused the model."""
        return model in self.paused

    def report(self, *, is_ready: bool) -> None:
        """Read pauses and shadows, set the gauges, publish the report, keep the decisions that this machine followed.

        A paused model hands out no jobs: those whose time has passed are ended here, a page at a time.
        Raises BrokerUnavailable.
        """
        names = list(self._lifecycle.models)
        self._reports += 1
        if self._reports % _TRY_AGAIN_EVERY == 0 and len(self._lifecycle.offers.claimable()) < len(names):
            self._lifecycle.request(self._lifecycle.try_again)
        self._read_pauses(names)
        self._mirror.follow(names, self._broker.now_ms())
        for name in self.paused:
            if ended := self._overdue.end_some(name, self._broker.now_ms()):
                self._metrics.requests(name, "", ended)
                self._metrics.outcome(name, "", "", State.EXPIRED.name.lower(), ended)
        depths = {name: self._broker.depths(name) for name in names}
        for name, each in depths.items():
            for depth in each:
                self._metrics.queue(name, depth.priority.label, depth.jobs, depth.oldest_waiting_s)
        for version in tuple(self._lifecycle.table.turns):
            if version.spec.instances > 1 and not version.shares_model:
                self._metrics.instances_lost(version.name, version.label, version.instances_lost)
        engines = self._engines(depths)
        memory = self._answers.memory
        memory.expire()
        self._metrics.cache_size(memory.name, len(memory), memory.nbytes, memory.evicted)
        for tier, stats in self._answers.tier_stats().items():
            if stats.is_size_known:
                self._metrics.cache_size(tier, stats.entries, stats.nbytes, stats.evicted)
            faults = {"error": stats.errors, "skipped": stats.skipped, "refused": stats.refused}
            self._metrics.cache_faults(tier, faults)
        self._metrics.cache_faults("", self._answers.faults())
        encoded = self._encoded(names, engines, is_ready=is_ready)
        if not self._broker.report(self._identity.name, encoded, _REPORT_TTL_MS):
            self._must_replace = True
        if self._must_replace or self._reports % _RENEW_EVERY == 0:
            self._renew(names)
        self._write_counts()
        self._lifecycle.remember()

    def withdraw(self) -> None:
        """The worker has left. Raises BrokerUnavailable: then the report expires by itself."""
        self._write_counts()
        self._broker.report(self._identity.name, b"", 1)
        for name in self._lifecycle.models:
            self._broker.report_keys(name, self._key_report, _KEYS_TTL_MS, is_live=False)

    def _renew(self, names: list[str]) -> None:
        """Write again what was written once, in case that the broker has lost it. First, foreign keys make room."""
        self._broker.quarantine(names)
        for quarantined in self._broker.take_quarantined():
            self._metrics.quarantined(slot_in(quarantined.key))
        for name in names:
            self._broker.report_keys(name, self._key_report, _KEYS_TTL_MS)
        self._lifecycle.announcements.publish_again(replaces=self._must_replace)
        follow_limits(self._broker, self._lifecycle.models)
        self._must_replace = False

    def _write_counts(self) -> None:
        for counted in self._arms.unwritten():
            self._broker.observe(counted.model, counted.experiment, counted.field, counted.figures, OBSERVATIONS_TTL_MS)
            self._arms.written(counted)

    def _read_pauses(self, names: list[str]) -> None:
        paused = self._broker.paused(names)
        if paused != self.paused:
            logger.info("paused", extra={"models": sorted(paused)})
            self.paused = paused
            self._on_change()

    def _engines(self, depths: Mapping[str, Sequence[Depth]]) -> list[dict[str, Any]]:
        """The figures of the engines that generate text, with the predicted wait; they are metrics, too."""
        engines = []
        for version in tuple(self._lifecycle.table.turns):
            figures = version.generation_figures()
            if version.spec.format == "generate" and not version.shares_model:
                compute_s = None if figures is None else figures.compute_s
                self._metrics.engine_ran(version.name, version.label, version.endpoint, compute_s)
            if figures is None:
                continue
            queues = depths.get(version.name, ())
            running = sum(depth.running for depth in queues)
            queued = sum(depth.jobs for depth in queues) - running
            share = queue_share(queued, figures.running + figures.waiting, running, figures.seats)
            wait_s = predicted_wait_s(figures.seat_s, figures.text_s, figures.seats, share)
            self._metrics.generation(version.name, version.label, figures, wait_s)
            own = {"model": version.name, "version": version.label, "predicted_wait_s": wait_s}
            engines.append({**own, **figures.as_report()})
        return engines

    def _encoded(self, names: list[str], engines: list[dict[str, Any]], *, is_ready: bool) -> bytes:
        models = self._lifecycle.models
        report = {
            "name": self._identity.name,
            "pid": os.getpid(),
            "device": self._identity.device,
            "models": {name: models[name].label for name in names},
            "versions": self._lifecycle.described(),
            "ready": is_ready,
            "in_memory": len(self._leased),
            "in_memory_bytes": self._leased.nbytes,
            "process_bytes": host_bytes(),
            "device_bytes": device_bytes(),
            "batches": self._telemetry.batches,
            "probe": self._identity.probe_url,
            "host": self._host,
            "keys": self._identity.keyring.names,
            "started": self._started_at,
            "load": self._metrics.totals(),
            "at": time.time(),
            "costs": self._metrics.costs(),
            "cache": self._answers.as_data(),
            "levels": self._tuner.report(),
            "engines": engines,
        }
        return msgspec.json.encode(report)
