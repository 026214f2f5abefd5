"""What API keys pay for: jobs when they are accepted, tokens when they are committed, once for each job id."""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec.structs import replace

from penstock.registry.broker.base import Broker, CommitStatus, Limits, Publication, Usage
from tests.conformance.jobs import ROOMY, claim, commit_of, publication, settle


def paid(slot: str, account: str = "k1", *, idempotency: str = "") -> Publication:
    """A job that an account pays for."""
    job = publication(slot, idempotency_digest=idempotency, fingerprint=idempotency)
    return replace(job, account=account)


def used(broker: Broker, slot: str) -> dict[str, int]:
    """The counts by account. The month is that of the broker's clock: November, or that of the server's clock."""
    found = broker.usage(slot)
    assert {month for _, month in found} <= {"2023-11", datetime.now(UTC).strftime("%Y-%m")}
    return {account: usage.jobs for (account, _), usage in found.items()}


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


def test_counted_tokens_count_with_the_acceptance_of_their_job(broker: Broker, slot: str):
    """Those of embeddings, which no result tells: once for each job id and each idempotency key."""
    jobs = [replace(paid(slot), prompt_tokens=5), paid(slot), replace(paid(slot, "k2"), prompt_tokens=3)]
    jobs += [replace(paid(slot, idempotency="d"), prompt_tokens=2), replace(publication(slot), prompt_tokens=9)]
    for _ in range(2):
        broker.publish(slot, jobs, ROOMY)
    broker.publish(slot, [replace(paid(slot, idempotency="d"), prompt_tokens=2)], ROOMY)
    full = Limits(max_depth=1, tenant_max_in_flight=0, job_ttl_ms=60_000)
    broker.publish(slot, [replace(paid(slot), prompt_tokens=100)], full)
    found = {account: used for (account, _), used in broker.usage(slot).items()}
    assert found == {"k1": Usage(3, 7, 0), "k2": Usage(1, 3, 0)}
    (first, *_) = claim(broker, "w1", slot, 5)
    settle(broker, "w1", replace(commit_of(first), account="k1", prompt_tokens=1, generated_tokens=2))
    assert {each for (account, _), each in broker.usage(slot).items() if account == "k1"} == {Usage(3, 8, 2)}


def test_tokens_count_with_the_commit_of_their_job(broker: Broker, slot: str):
    """Each job adds its own, once: a repeated commit and one of a lost job add nothing."""
    broker.publish(slot, [paid(slot), paid(slot), paid(slot, "k2"), publication(slot)], ROOMY)
    deliveries = claim(broker, "w1", slot, 4)
    tokens = (("k1", 5, 7), ("k1", 1, 2), ("k2", 3, 0), ("", 0, 0))
    commits = [
        replace(commit_of(delivery), account=account, prompt_tokens=prompt, generated_tokens=generated)
        for delivery, (account, prompt, generated) in zip(deliveries, tokens, strict=True)
    ]
    # By another consumer, which does not hold the jobs.
    assert settle(broker, "w2", *commits) == [CommitStatus.FENCED] * 4
    for _ in range(2):
        assert settle(broker, "w1", *commits) == [CommitStatus.COMMITTED] * 4
    found = {account: usage for (account, _), usage in broker.usage(slot).items()}
    assert found == {"k1": Usage(2, 6, 9), "k2": Usage(1, 3, 0)}
