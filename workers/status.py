"""Once a second, on the lease thread: the worker's report, queue gauges, pauses, overdue jobs of paused models."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from penstock.registry.broker.base import Broker
from penstock.registry.envelope import Keyring
from penstock.registry.key_reports import key_report
from penstock.registry.overdue import OverdueJobs
from penstock.workers.cache import L1Cache
from penstock.workers.leases import LeasedJobs
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.telemetry import BatchTelemetry
from penstock.workers.versions.lifecycle import ModelLifecycle
from penstock.workers.versions.tuner import Tuner

__all__ = ["StatusReporter", "WorkerIdentity"]

logger = logging.getLogger("penstock.server")

_REPORT_TTL_MS: Final = 5000
_KEYS_EVERY: Final = 5
"""Reports between two announcements of the names of the signing keys."""
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
        cache: L1Cache,
        metrics: InferenceMetrics,
        tuner: Tuner,
        overdue: OverdueJobs,
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
        self._cache = cache
        self._metrics = metrics
        self._tuner = tuner
        self._overdue = overdue
        self._on_change = on_change
        self._key_report = key_report(identity.name, identity.keyring)
        self._started_at = time.time()
        self._reports = 0

    def is_paused(self, model: str) -> bool:
        """Whether an operator paused the model."""
        return model in self.paused

    def report(self, *, is_ready: bool) -> None:
        """Read the pauses, set the gauges, publish the report, and keep the decisions that this machine has followed.

        A paused model hands out no jobs: those whose time has passed are ended here, a page at a time.
        Raises BrokerUnavailable.
        """
        names = list(self._lifecycle.models)
        self._reports += 1
        if self._reports % _TRY_AGAIN_EVERY == 0 and len(self._lifecycle.claimable()) < len(names):
            self._lifecycle.request(self._lifecycle.try_again)
        self._read_pauses(names)
        for name in self.paused:
            self._overdue.end_some(name, self._broker.now_ms())
        for name in names:
            for depth in self._broker.depths(name):
                self._metrics.queue(name, depth.priority.label, depth.jobs, depth.oldest_waiting_s)
        self._cache.expire()
        self._metrics.cache_size(len(self._cache), self._cache.nbytes, self._cache.evicted)
        self._broker.report(self._identity.name, self._encoded(names, is_ready=is_ready), _REPORT_TTL_MS)
        if self._reports % _KEYS_EVERY == 1:
            for name in names:
                self._broker.report_keys(name, self._key_report, _KEYS_TTL_MS)
        self._lifecycle.remember()

    def withdraw(self) -> None:
        """The worker has left. Raises BrokerUnavailable: then the report expires by itself."""
        self._broker.report(self._identity.name, b"", 1)
        for name in self._lifecycle.models:
            self._broker.report_keys(name, self._key_report, _KEYS_TTL_MS, is_live=False)

    def _read_pauses(self, names: list[str]) -> None:
        paused = self._broker.paused(names)
        if paused != self.paused:
            logger.info("paused", extra={"models": sorted(paused)})
            self.paused = paused
            self._on_change()

    def _encoded(self, names: list[str], *, is_ready: bool) -> bytes:
        models = self._lifecycle.models
        report = {
            "name": self._identity.name,
            "pid": os.getpid(),
            "device": self._identity.device,
            "models": {name: models[name].label for name in names},
            "versions": self._lifecycle.described(),
            "ready": is_ready,
            "in_memory": len(self._leased),
            "batches": self._telemetry.batches,
            "probe": self._identity.probe_url,
            "host": socket.gethostname(),
            "keys": self._identity.keyring.names,
            "started": self._started_at,
            "load": self._metrics.totals(),
            "levels": self._tuner.report(),
        }
        return json.dumps(report).encode()
