"""A worker on threads of this process, and the broker in memory that it serves.

    ServedModels -> build_drain -> InMemoryWorker -- connect --> ClientEnd, for each client

The parts, the threads and the turns are those of a worker process: see workers/drain.py. Not here: Celery, the crash
journal, the optimizer, the probe, and the supervisor that would restart a worker whose forward hangs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from penstock.registry.broker.base import Limits, Publication, Receipt, StreamEntry
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.broker.webhooks import Webhook
from penstock.registry.errors import BrokerUnavailable, ConfigurationError
from penstock.registry.settings import Settings
from penstock.testing.model import Served
from penstock.testing.packages import FunctionLoader, ServedModels
from penstock.testing.turns import NotifiedClaimer, SharedDrain, SharedExecutor, SharedWakeUp, Turns
from penstock.testing.undeclared import UndeclaredSpec
from penstock.workers.assembly import DrainOptions, PartTypes, build_drain
from penstock.workers.drain import Drain
from penstock.workers.observe.listener import NullListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.process.device import granted_threads
from penstock.workers.versions.deployment_store import NullDeploymentStore
from penstock.workers.versions.version import VersionState

__all__ = ["ClientEnd", "InMemoryWorker", "InParent"]

_NAME: Final = "memory"
_TYPES: Final = PartTypes(
    drain=SharedDrain,
    executor=SharedExecutor,
    loader=FunctionLoader,
    claimer=NotifiedClaimer,
    wake_up=SharedWakeUp,
)
_LEASE_S: Final = 0.4
"""A running job hears of its cancellation within a third of it. No other worker waits for a lease to lapse."""
_JOIN_S: Final = 5.0
_MOST_WEBHOOKS: Final = 1_000_000
CLOSED: Final = "This client was closed. Expected an open one"


class InMemoryWorker:
    """Serves models until `close`.

    Raises ConfigurationError for a model that cannot be loaded; then nothing of the worker is left.
    """

    def __init__(self, models: Mapping[str, Served], settings: Settings) -> None:
        served, device = ServedModels.of(models, settings), _device(settings)
        self.undeclared: Final[Mapping[str, UndeclaredSpec]] = served.undeclared
        self.models: Final = sorted(models)
        self._grace_s = settings.inference.queue.drain_grace_s
        self._closing = threading.Lock()
        self.is_closed = False
        self._broker = MemoryBroker(result_ttl_ms=int(settings.inference.queue.result_ttl_s * 1000))
        self._end = self._broker.connect()
        self._drain = build_drain(
            settings.changed({"queue.lease_s": _LEASE_S}),
            self._end,
            served.packages,
            DrainOptions(
                name=_NAME,
                device=device,
                threads=granted_threads(device, os.environ),
                listener=NullListener(),
                metrics=InferenceMetrics(settings.inference.metrics_buckets),
                repository=served.repository,
                deployments=NullDeploymentStore(),
                types=_TYPES,
            ),
        )
        self._turns = _share_turns(self._drain)
        try:
            self._load()
        except BaseException:
            self._drain.parts.lifecycle.close()
            raise
        self._drain.start()

    def _load(self) -> None:
        """Load all models. A worker process goes on without one that cannot be loaded; a test wants to know."""
        self._drain.load()
        for version in self._drain.lifecycle.table.active():
            if version.state is VersionState.FAILED:
                raise ConfigurationError(version.problem)

    def connect(self) -> ClientEnd:
        """The connection of one client."""
        return ClientEnd(self, self._broker)

    def published(self, model: str) -> None:
        """Have the worker claim the model's jobs."""
        self._turns.published(model)

    def webhooks(self) -> list[Webhook]:
        """The webhooks of ended jobs, oldest first. Nothing delivers them."""
        slots = self._broker.webhook_slots()
        found = [each for slot in slots for each in self._broker.list_webhooks(slot, dead=False, count=_MOST_WEBHOOKS)]
        return sorted(found, key=lambda each: each.ended_ms)

    @property
    def problem(self) -> str:
        """Why jobs are not served any more; empty while they are."""
        if self.is_closed:
            return CLOSED
        reason = self._drain.health.unhealthy_reason()
        return f"The worker in memory has ended: {reason}. Expected a new client" if reason else ""

    def close(self) -> None:
        """End all threads. Running jobs are asked to stop, and have the grace period; waiting ones are dropped."""
        with self._closing:
            if self.is_closed:
                return
            self.is_closed = True
            for header in self._drain.active():
                self._broker.cancel(header.id, header.tenant, b"")
            self._drain.stop(self._grace_s)
            self._drain.parts.executor.join(_JOIN_S)
            self._end.close()

    def abandon(self) -> None:
        """Have all threads end by themselves, soon: the client was dropped without `close`. Takes no lock."""
        self._turns.is_abandoned = True

    def forget(self) -> None:
        """In a forked child: the threads and the locks are the parent's."""
        self.is_closed = True


class ClientEnd(MemoryBroker):
    """The connection of one client. It tells the worker of new jobs, and the client of a worker that has ended."""

    def __init__(self, worker: InMemoryWorker, broker: MemoryBroker) -> None:
        # A connection has nothing of its own but an armed claim, which clients do not use.
        self.__dict__.update(vars(broker.connect()))
        self._worker = worker

    def publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        """See ProducerEnd.publish."""
        if self._worker.is_closed:
            raise BrokerUnavailable(CLOSED)
        receipts = super().publish(slot, jobs, limits)
        self._worker.published(slot)
        return receipts

    def read(self, cursors: Mapping[str, str], block_ms: int, count: int = 256) -> list[StreamEntry]:
        """See ProducerEnd.read. After a silence, raises BrokerUnavailable if no worker is left that could end it."""
        found = super().read(cursors, block_ms, count)
        if block_ms and not found and (problem := self._worker.problem):
            raise BrokerUnavailable(problem)
        return found


class InParent:
    """The connection of a client whose worker is in the parent process. Each use raises BrokerUnavailable."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BrokerUnavailable("The worker in memory is in the parent process. Expected a client that the child makes")


def _share_turns(drain: Drain) -> Turns:
    """Let the drain's thread and the model threads take the turns of the drain."""
    executor, claimer = drain.parts.executor, drain.parts.claimer
    if (
        isinstance(drain, SharedDrain)
        and isinstance(executor, SharedExecutor)
        and isinstance(claimer, NotifiedClaimer)
        and isinstance(claimer.wake_up, SharedWakeUp)
    ):
        turns = drain.turns = executor.turns = claimer.wake_up.turns = Turns(drain, executor, claimer)
        return turns
    raise RuntimeError("the drain was built of other parts")


def _device(settings: Settings) -> str:
    """The device of the settings; the CPU where they leave the choice: a test need not start CUDA."""
    return "cpu" if settings.inference.device == "auto" else settings.inference.device
