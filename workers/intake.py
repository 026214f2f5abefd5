"""Deliveries -> opened jobs. Bytes that cannot be a job, and poison, go to the dead letters.

claim --> Intake.open_all --> ClaimedJob
                 `--> dead letter: foreign or forged bytes, other protocols, poison; a waiting client gets a failure
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from penstock.registry.broker.base import Delivery, State, WorkerEnd
from penstock.registry.envelope import Failure, JobHeader, Keyring, RequestContext, open_job
from penstock.registry.errors import BadSignature, Corrupt
from penstock.registry.queues import is_job_id, is_reply_key
from penstock.registry.tensors import decode
from penstock.registry.unrun import unrun_result
from penstock.workers.job import ClaimedJob, route_of
from penstock.workers.observe.listener import Ended, JobListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.shared_headers import SharedHeaders
from penstock.workers.versions.arm_counts import ArmCounts

__all__ = ["Intake"]

_MOST_DEFERRED: Final = 16
_MOST_DEFERRED_BYTES: Final = 16 * 1024 * 1024

logger = logging.getLogger("penstock.server")


class Intake:
    """Opens the deliveries of one consumer.

    version_of: the active version of a model. arms: counts poison as an error of its arm.
    """

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
        arms: ArmCounts | None = None,
        listener: JobListener,
        metrics: InferenceMetrics,
    ) -> None:
        self.max_crashes = max_crashes
        self._broker = broker
        self._consumer = consumer
        self._keyring = keyring
        self._worker = worker
        self._headers = SharedHeaders(keyring, job_ttl_ms)
        self._version_of = version_of
        self._arms = arms
        self._listener = listener
        self._metrics = metrics
        self._deferred: deque[tuple[Delivery, str, tuple[str, str]]] = deque()
        self._deferred_bytes = 0

    def open_all(self, deliveries: Sequence[Delivery], now: float, broker_now: float) -> list[ClaimedJob]:
        """The jobs of a claim that are no dead letters, in order. Of headers that are alike, one is decoded.

        `now` is monotonic, `broker_now` in ms by the broker's clock.
        """
        open_alike, opened = self._headers.open, []
        for delivery in deliveries:
            job = open_alike(delivery, now, broker_now) or self.open(delivery, now, broker_now)
            if job is not None:
                opened.append(job)
        return opened

    def open(self, delivery: Delivery, now: float, broker_now: float) -> ClaimedJob | None:
        """One job, by itself; None: it is a dead letter. See `open_all`."""
        claimed = ("", "")
        try:
            header, body = open_job(delivery.sealed, self._keyring)
            _check_place(header, delivery)
            claimed = (header.id, header.tenant)
            inputs = decode(header.content, body)
        except Corrupt as error:
            logger.warning(
                "quarantined: %s", error, extra={"model": delivery.slot, "entry": delivery.entry_id.decode()}
            )
            self._metrics.quarantined(delivery.slot)
            self._defer(delivery, f"{type(error).__name__}: {error}", error.claimed or claimed)
            return None
        if delivery.crashes >= self.max_crashes and not delivery.exceeded_s:
            self._dead_letter_poison(delivery, header)
            return None
        accepted_ms = delivery.accepted_ms
        expires_ms = accepted_ms + self._headers.lifetime_ms(header)
        job = ClaimedJob(delivery, header, body, 1, now, max(0.0, broker_now - accepted_ms), expires_ms)
        job.decoded = inputs
        self._headers.learn(job)
        return job

    @property
    def has_deferred(self) -> bool:
        """Whether there are deferred dead letters."""
        return bool(self._deferred)

    def dead_letter_next(self) -> None:
        """Write the oldest deferred dead letter. Raises BrokerUnavailable, and then keeps it."""
        delivery, reason, claimed = self._deferred[0]
        self._dead_letter(delivery, reason, claimed)
        self._deferred.popleft()
        self._deferred_bytes -= len(delivery.sealed)

    def _defer(self, delivery: Delivery, reason: str, claimed: tuple[str, str]) -> None:
        """The broker needs some time for large bytes, and the jobs behind them need not wait for that."""
        self._deferred.append((delivery, reason, claimed))
        self._deferred_bytes += len(delivery.sealed)
        while len(self._deferred) > _MOST_DEFERRED or self._deferred_bytes > _MOST_DEFERRED_BYTES:
            self.dead_letter_next()

    def _dead_letter(self, delivery: Delivery, reason: str, claimed: tuple[str, str]) -> bool:
        """Keep the bytes. If they were accepted as a job, its client gets a failure. claimed: the id and the tenant."""
        job_id, tenant = claimed
        if not is_job_id(job_id, delivery.slot):
            return self._broker.dead_letter(self._consumer, delivery, reason)
        failure = Failure("DeadLettered", f"The job went to the dead letters. {reason}")
        sealed = unrun_result(job_id, RequestContext(tenant), failure, self._keyring, worker=self._worker)
        return self._broker.dead_letter(self._consumer, delivery, reason, job_id=job_id, sealed=sealed)

    def _dead_letter_poison(self, delivery: Delivery, header: JobHeader) -> None:
        """A job during which too many processes died."""
        reason = f"Poison: {delivery.crashes} worker processes died, or hung and were killed, while it ran"
        logger.error("poison", extra={"job_id": header.id, "model": header.model, "crashes": delivery.crashes})
        if not self._dead_letter(delivery, reason, (header.id, header.tenant)):
            return
        if self._arms is not None:
            self._arms.stopped(header)
        version, route = self._version_of(delivery.slot), route_of(header.model, header.reply)
        self._metrics.dead_lettered(delivery.slot, version, route)
        self._metrics.requests(delivery.slot, route)
        self._metrics.outcome(delivery.slot, version, route, State.DEAD.name.lower())
        at, failure = time.time(), Failure("DeadLettered", reason)
        self._listener.received([header], at)
        self._listener.finished([Ended(header, State.DEAD, 0.0, failure, version)], at)


def _check_place(header: JobHeader, delivery: Delivery) -> None:
    """Check that the names in the header are those of this queue: without signatures anyone may write a header."""
    slot = delivery.slot
    is_ours = header.model == slot and header.priority == delivery.priority.label and is_job_id(header.id, slot)
    if not is_ours or (header.reply and not is_reply_key(header.reply, slot)):
        raise BadSignature("the envelope was made for another queue", (header.id, header.tenant))
