"""Deliveries -> opened jobs. What cannot be a job, and what nobody survives, goes to the dead letters.

claim --> Intake.open --> ClaimedJob
              `--> bury: foreign or forged bytes, other protocols, poison; a client that waits is told
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from penstock.registry.broker.base import Delivery, State, WorkerEnd
from penstock.registry.envelope import Failure, JobHeader, Keyring, open_job
from penstock.registry.errors import BadSignature, Corrupt
from penstock.registry.queues import is_job_id, is_reply_key
from penstock.registry.tensors import decode
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.listener import Ended, JobListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.results import unrun_result

__all__ = ["Intake"]

_MOST_ASIDE: Final = 16
_MOST_ASIDE_BYTES: Final = 16 * 1024 * 1024

logger = logging.getLogger("penstock.server")


class Intake:
    """Opens what one consumer was handed. version_of: the version that is served of a model."""

    def __init__(
        self,
        broker: WorkerEnd,
        consumer: str,
        keyring: Keyring,
        *,
        worker: str,
        job_ttl_ms: int,
        max_crashes: int,
        version_of: Callable[[str], str],
        listener: JobListener,
        metrics: InferenceMetrics,
    ) -> None:
        self.max_crashes = max_crashes
        self._broker = broker
        self._consumer = consumer
        self._keyring = keyring
        self._worker = worker
        self._job_ttl_ms = job_ttl_ms
        self._version_of = version_of
        self._listener = listener
        self._metrics = metrics
        self._aside: deque[tuple[Delivery, str, tuple[str, str]]] = deque()
        self._aside_bytes = 0

    def open(self, delivery: Delivery, now: float, broker_now: float) -> ClaimedJob | None:
        """The job, or None when it was put aside. `now` is monotonic, `broker_now` in ms by the broker's clock."""
        try:
            header, body = open_job(delivery.sealed, self._keyring)
            _check_place(header, delivery)
            inputs = decode(header.content, body)
        except Corrupt as error:
            logger.warning(
                "quarantined: %s", error, extra={"model": delivery.slot, "entry": delivery.entry_id.decode()}
            )
            self._metrics.quarantined(delivery.slot)
            self._put_aside(delivery, f"{type(error).__name__}: {error}", error.claimed or ("", ""))
            return None
        if delivery.crashes >= self.max_crashes:
            self._bury_poison(delivery, header)
            return None
        accepted_ms = delivery.accepted_ms
        lifetime_ms = min(header.deadline_ms or self._job_ttl_ms, self._job_ttl_ms)
        return ClaimedJob(
            delivery, header, inputs, 1, now, max(0.0, broker_now - accepted_ms), accepted_ms + lifetime_ms
        )

    @property
    def is_behind(self) -> bool:
        """Whether there is something to bury."""
        return bool(self._aside)

    def bury_next(self) -> None:
        """Moves what was put aside first to the dead letters. Raises BrokerUnavailable, and then keeps it."""
        delivery, reason, claimed = self._aside[0]
        self._bury(delivery, reason, claimed)
        self._aside.popleft()
        self._aside_bytes -= len(delivery.sealed)

    def _put_aside(self, delivery: Delivery, reason: str, claimed: tuple[str, str]) -> None:
        """The broker takes a while over large bytes, and the jobs behind them need not wait for that."""
        self._aside.append((delivery, reason, claimed))
        self._aside_bytes += len(delivery.sealed)
        while len(self._aside) > _MOST_ASIDE or self._aside_bytes > _MOST_ASIDE_BYTES:
            self.bury_next()

    def _bury(self, delivery: Delivery, reason: str, claimed: tuple[str, str]) -> bool:
        """Keeps the bytes; where they were accepted as a job, its client is told. claimed: its id and tenant."""
        job_id, tenant = claimed
        if not is_job_id(job_id, delivery.slot):
            return self._broker.dead_letter(self._consumer, delivery, reason)
        failure = Failure("DeadLettered", f"The job went to the dead letters. {reason}")
        sealed = unrun_result(job_id, tenant, failure, worker=self._worker, keyring=self._keyring)
        return self._broker.dead_letter(self._consumer, delivery, reason, job_id=job_id, sealed=sealed)

    def _bury_poison(self, delivery: Delivery, header: JobHeader) -> None:
        """Takes a job out of traffic that nobody survives."""
        reason = f"Poison: {delivery.crashes} worker processes died, or hung and were killed, while it ran"
        logger.error("poison", extra={"job_id": header.id, "model": header.model, "crashes": delivery.crashes})
        if not self._bury(delivery, reason, (header.id, header.tenant)):
            return
        self._metrics.dead_lettered(delivery.slot)
        at, failure = time.time(), Failure("DeadLettered", reason)
        self._listener.received([header], at)
        self._listener.finished([Ended(header, State.DEAD, 0.0, failure, self._version_of(delivery.slot))], at)


def _check_place(header: JobHeader, delivery: Delivery) -> None:
    """Without signatures anybody may write a header: its names must be those of this queue."""
    slot = delivery.slot
    is_ours = header.model == slot and header.priority == delivery.priority.label and is_job_id(header.id, slot)
    if not is_ours or (header.reply and not is_reply_key(header.reply, slot)):
        raise BadSignature("the envelope was made for another queue", (header.id, header.tenant))
