"""Jobs that API keys pay for: counted when they are accepted, once for each job id."""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec.structs import replace

from penstock.registry.broker.base import Broker, Limits, Publication
from tests.conformance.jobs import ROOMY, publication


def paid(slot: str, account: str = "k1", *, idempotency: str = "") -> Publication:
    """A job that an account pays for."""
    job = publication(slot, idempotency_digest=idempotency, fingerprint=idempotency)
    return replace(job, account=account)


def used(broker: Broker, slot: str) -> dict[str, int]:
    """The counts by account. The month is that of the broker's clock: November, or that of the server's clock."""
    found = broker.usage(slot)
    assert {month for _, month in found} <= {"2023-11", datetime.now(UTC).strftime("%Y-%m")}
    return {account: jobs for (account, _), jobs in found.items()}


def test_each_account_has_its_own_count(broker: Broker, slot: str):
    """Jobs without an account count nowhere."""
    broker.publish(slot, [paid(slot), paid(slot, "k2"), publication(slot), paid(slot)], ROOMY)
    assert used(broker, slot) == {"k1": 2, "k2": 1}


def test_a_repeated_call_counts_nothing(broker: Broker, slot: str):
    """A client that has not received the answer publishes the same job again."""
    job = paid(slot)
    for _ in range(3):
        assert [each.outcome for each in broker.publish(slot, [job], ROOMY)] == ["accepted"]
    assert used(broker, slot) == {"k1": 1}


def test_a_job_that_is_known_counts_nothing(broker: Broker, slot: str):
    """A second request with the same idempotency key gets the first one's job, and pays for none."""
    for _ in range(2):
        broker.publish(slot, [paid(slot, idempotency="d")], ROOMY)
    assert used(broker, slot) == {"k1": 1}


def test_a_refused_job_counts_nothing(broker: Broker, slot: str):
    """The queue is full."""
    full = Limits(max_depth=1, tenant_max_in_flight=0, job_ttl_ms=60_000)
    outcomes = [each.outcome for each in broker.publish(slot, [paid(slot), paid(slot)], full)]
    assert outcomes == ["accepted", "full"]
    assert used(broker, slot) == {"k1": 1}
