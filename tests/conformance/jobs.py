"""Jobs as the suite sends them: the sealed bytes are the job id, so that a delivery names its job."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.registry.broker.base import (
    Broker,
    Claim,
    Commit,
    CommitStatus,
    Delivery,
    Held,
    Limits,
    Publication,
    State,
)
from penstock.registry.queues import Priority, new_job_id

ROOMY = Limits(max_depth=100_000, tenant_max_in_flight=0, job_ttl_ms=60_000)
TTL_MS = 60_000
LEASE_MS = 150


def publication(
    slot: str,
    priority: Priority = Priority.NORMAL,
    *,
    job_id: str = "",
    tenant: str = "acme",
    reply: str = "",
    idempotency_digest: str = "",
    fingerprint: str = "",
    deadline_ms: int = 0,
    webhook: str = "",
) -> Publication:
    """A job with an id of its own."""
    job_id = job_id or new_job_id(slot)
    sealed = job_id.encode()
    return Publication(job_id, priority, sealed, tenant, reply, idempotency_digest, fingerprint, deadline_ms, webhook)


def publish(
    broker: Broker, slot: str, count: int = 1, priority: Priority = Priority.NORMAL, *, reply: str = ""
) -> list[str]:
    """Publish `count` jobs that must be accepted; their ids."""
    jobs = [publication(slot, priority, reply=reply) for _ in range(count)]
    receipts = broker.publish(slot, jobs, ROOMY)
    assert [receipt.outcome for receipt in receipts] == ["accepted"] * count
    return [job.job_id for job in jobs]


def claim(
    broker: Broker, consumer: str, slot: str, credit: int = 64, *, reserve: int = 0, ageing_ms: int = 60_000
) -> list[Delivery]:
    """What the consumer is handed now."""
    broker.prepare([slot])
    statuses, deliveries = broker.exchange(consumer, [], [Claim(slot, credit, reserve, ageing_ms)], TTL_MS)
    assert statuses == []
    return deliveries


def ids(deliveries: Sequence[Delivery]) -> list[str]:
    """The jobs that were handed out."""
    return [delivery.sealed.decode() for delivery in deliveries]


def held(delivery: Delivery) -> Held:
    """The delivery as its holder names it."""
    return Held(delivery.slot, delivery.priority, delivery.entry_id, delivery.sealed.decode())


def commit_of(
    delivery: Delivery,
    sealed: bytes = b"result",
    *,
    state: State = State.COMPLETED,
    tenant: str = "acme",
    reply: str = "",
    idempotency_digest: str = "",
) -> Commit:
    """How the delivery ended."""
    job_id = delivery.sealed.decode()
    return Commit(
        delivery.slot, delivery.priority, delivery.entry_id, job_id, state, sealed, tenant, reply, idempotency_digest
    )


def settle(broker: Broker, consumer: str, *commits: Commit, result_ttl_ms: int = TTL_MS) -> list[CommitStatus]:
    """Commit, and claim nothing."""
    statuses, deliveries = broker.exchange(consumer, commits, [], result_ttl_ms)
    assert deliveries == []
    return statuses


def queued(broker: Broker, slot: str) -> int:
    """Jobs of all priorities, waiting or running."""
    return sum(depth.jobs for depth in broker.depths(slot))
