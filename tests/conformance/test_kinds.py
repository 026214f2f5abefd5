"""Jobs of several kinds in one call: each keeps its own priority, tenant, client, deadline, key and webhook."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from penstock.registry.broker.base import Commit, CommitStatus, Delivery, JobRecord, Limits, Publication, State
from penstock.registry.broker.webhooks import BrokerOfWebhooks
from penstock.registry.queues import Priority, idempotency_key, record_key, reply_key
from tests.conformance.conftest import OnRedis
from tests.conformance.jobs import ROOMY, TTL_MS, claim, commit_of, publication, publish, queued, settle

TENANTS = ("acme", "globex")
STATES = (State.COMPLETED, State.FAILED, State.EXPIRED)
NEVER_MS = 3_600_000
DEADLINE_MS = 30_000


class Kind(NamedTuple):
    """What jobs have in common. client: the name of the client that is told; empty: none is."""

    priority: Priority
    tenant: str
    client: str
    deadline_ms: int


KINDS = [Kind(*each) for each in itertools.product(Priority, TENANTS, ("me", "you", ""), (0, DEADLINE_MS))]


class Ask(NamedTuple):
    """A job of one call, and how it ends."""

    kind: Kind
    is_keyed: bool
    has_webhook: bool
    state: State


ASK = st.builds(Ask, st.sampled_from(KINDS), st.booleans(), st.booleans(), st.sampled_from(STATES))
MIX = st.one_of(
    st.lists(ASK, min_size=1, max_size=12),
    # Few kinds in many jobs.
    st.lists(ASK, min_size=1, max_size=2).flatmap(lambda few: st.lists(st.sampled_from(few), min_size=2, max_size=40)),
)


def asks_of(kinds: list[Kind]) -> list[Ask]:
    """A job of each kind. Every third one has an idempotency key, every fourth one a webhook; the states take turns."""
    return [Ask(kind, n % 3 == 0, n % 4 == 0, STATES[n % len(STATES)]) for n, kind in enumerate(kinds)]


def jobs_of(slot: str, asks: list[Ask]) -> list[Publication]:
    """One for each."""
    return [
        publication(
            slot,
            kind.priority,
            tenant=kind.tenant,
            reply=reply_key(slot, kind.client) if kind.client else "",
            deadline_ms=kind.deadline_ms,
            idempotency_digest=f"digest-{number}" if is_keyed else "",
            fingerprint=f"fingerprint-{number}" if is_keyed else "",
            webhook=f"https://receiver.example/{number}" if has_webhook else "",
        )
        for number, (kind, is_keyed, has_webhook, _) in enumerate(asks)
    ]


def commits_of(jobs: list[Publication], deliveries: list[Delivery], states: Sequence[State] = STATES) -> list[Commit]:
    """The commit of each job, in the order of the jobs; the states take turns."""
    by_id = {delivery.sealed.decode(): delivery for delivery in deliveries}
    return [
        commit_of(
            by_id[job.job_id],
            f"result {number}".encode(),
            state=states[number % len(states)],
            tenant=job.tenant,
            reply=job.reply,
            idempotency_digest=job.idempotency_digest,
        )
        for number, job in enumerate(jobs)
    ]


@pytest.fixture(params=["several", "one", "in turn"])
def kinds(request: pytest.FixtureRequest) -> list[Kind]:
    """Those of the jobs of one call: all of them, the same one many times, two of them by turns."""
    return {"several": KINDS, "one": KINDS[:1] * 48, "in turn": [KINDS[0], KINDS[-1]] * 24}[request.param]


def test_each_job_of_a_call_is_published_as_its_own(broker: BrokerOfWebhooks, slot: str, kinds: list[Kind]):
    """In its queue, for its tenant, until its time, under its idempotency key."""
    assert_published_as_its_own(broker, slot, asks_of(kinds))


def test_each_job_of_a_call_is_committed_as_its_own(broker: BrokerOfWebhooks, slot: str, kinds: list[Kind]):
    """Its result and its state, its client, its tenant's count and its webhook."""
    assert_committed_as_its_own(broker, slot, asks_of(kinds))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asks=MIX)
def test_each_job_of_any_mix_is_published_and_committed_as_its_own(broker: BrokerOfWebhooks, asks: list[Ask]):
    """Of any kinds in any order, with and without keys and webhooks, whatever their ends are."""
    assert_published_as_its_own(broker, f"mix-{uuid4().hex[:12]}", asks)
    assert_committed_as_its_own(broker, f"mix-{uuid4().hex[:12]}", asks)


def assert_published_as_its_own(broker: BrokerOfWebhooks, slot: str, asks: list[Ask]) -> None:
    """Publish these jobs in one call, and then once more under the same keys."""
    jobs = jobs_of(slot, asks)
    assert [each.outcome for each in broker.publish(slot, jobs, ROOMY)] == ["accepted"] * len(jobs)
    counts = [depth.jobs for depth in broker.depths(slot)]
    assert counts == [sum(job.priority is priority for job in jobs) for priority in Priority]
    for job in jobs:
        record = broker.job_record(job.job_id)
        assert record is not None
        assert (record.state, record.tenant) == (State.QUEUED, job.tenant)
        assert record.left_ms is not None
        assert (record.left_ms <= DEADLINE_MS) is (job.deadline_ms > 0)
    again = broker.publish(slot, jobs_of(slot, asks), ROOMY)
    keyed = [number for number, job in enumerate(jobs) if job.idempotency_digest]
    assert [(again[number].outcome, again[number].job_id) for number in keyed] == [
        ("known", jobs[number].job_id) for number in keyed
    ]


def assert_committed_as_its_own(broker: BrokerOfWebhooks, slot: str, asks: list[Ask]) -> None:
    """Publish these jobs, claim them, and commit them in one call."""
    jobs = jobs_of(slot, asks)
    broker.publish(slot, jobs, ROOMY)
    states = [ask.state for ask in asks]
    commits = commits_of(jobs, claim(broker, "w", slot, credit=len(jobs)), states)
    # A job that the consumer does not hold, among the others.
    commits.insert(len(commits) // 2, commits[0])
    assert settle(broker, "w", *commits) == [CommitStatus.COMMITTED] * len(commits)
    results = [JobRecord(commit.state, "", commit.sealed) for commit in commits_of_each(commits, jobs)]
    assert broker.job_records([job.job_id for job in jobs]) == results
    assert queued(broker, slot) == 0
    told: dict[str, list[bytes]] = defaultdict(list)
    replies = {job.reply for job in jobs if job.reply}
    for entry in broker.read(dict.fromkeys(replies, "0-0"), 0) if replies else ():
        told[entry.key] += entry.fields
    assert told == {
        reply: [
            word
            for job, result in zip(jobs, results, strict=True)
            if job.reply == reply
            for word in (job.job_id.rpartition(".")[2].encode(), result.state.value.encode() + b"-" + result.result)
        ]
        for reply in replies
    }
    limits = Limits(100, 1, TTL_MS)
    for tenant in {job.tenant for job in jobs}:
        assert broker.publish(slot, [publication(slot, tenant=tenant)], limits)[0].outcome == "accepted"
    webhooks = broker.take_webhooks(slot, 100, NEVER_MS)
    assert {(each.job_id, each.state, each.target) for each in webhooks} == {
        (job.job_id, result.state, job.webhook) for job, result in zip(jobs, results, strict=True) if job.webhook
    }


def commits_of_each(commits: list[Commit], jobs: list[Publication]) -> list[Commit]:
    """The commit of each job."""
    by_id = {commit.job_id: commit for commit in commits}
    return [by_id[job.job_id] for job in jobs]


def test_two_entries_of_one_job_are_one_commit(broker: BrokerOfWebhooks, slot: str):
    """Another program has put a job's message into the queue again: in one call, too, the first commit wins."""
    reply = reply_key(slot, "me")
    job_id, other = publish(broker, slot, 2, reply=reply)
    first, second = (commit_of(each, reply=reply) for each in claim(broker, "w", slot))
    second = structs.replace(second, job_id=job_id, sealed=b"another")
    assert settle(broker, "w", first, second) == [CommitStatus.COMMITTED, CommitStatus.GONE]
    assert broker.job_records([job_id]) == [JobRecord(State.COMPLETED, "", b"result")]
    (entry,) = broker.read({reply: "0-0"}, 0)
    assert len(entry.fields) == 2
    # The other job has lost its entry, and still counts.
    assert broker.job_records([other]) == [JobRecord(State.QUEUED, "acme")]
    limits = Limits(100, 1, TTL_MS)
    assert broker.publish(slot, [publication(slot)], limits)[0].outcome == "tenant-full"


def test_a_result_keeps_its_bytes_and_its_time_under_a_second_commit(redis_brokerage: OnRedis, slot: str):
    """Its worker holds a second copy of the message, and the neighbours in the call are committed."""
    with closing(redis_brokerage.connect()) as broker, redis_brokerage.server.client() as client:
        job_ids = publish(broker, slot, 3)
        deliveries = claim(broker, "w", slot)
        result = b"C-" + bytes(range(256)) * 10
        client.set(record_key(job_ids[1]), result, px=5_000)
        statuses = settle(broker, "w", *(commit_of(each, b"another") for each in deliveries))
        assert statuses == [CommitStatus.COMMITTED, CommitStatus.GONE, CommitStatus.COMMITTED]
        assert client.get(record_key(job_ids[1])) == result
        assert 0 < client.pttl(record_key(job_ids[1])) <= 5_000
        assert queued(broker, slot) == 0
        for job_id in (job_ids[0], job_ids[2]):
            assert 5_000 < client.pttl(record_key(job_id)) <= TTL_MS


def test_a_commit_shortens_the_life_of_its_own_idempotency_key(redis_brokerage: OnRedis, slot: str):
    """The key lives as long as the result. That of a neighbour, which the consumer does not hold, lives on."""
    with closing(redis_brokerage.connect()) as broker, redis_brokerage.server.client() as client:
        jobs = [publication(slot, idempotency_digest=digest) for digest in ("", "lost", "kept")]
        broker.publish(slot, jobs, ROOMY)
        first, lost, kept = commits_of(jobs, claim(broker, "w", slot))
        lost = structs.replace(lost, entry_id=b"1-1")
        statuses = settle(broker, "w", first, lost, kept)
        assert statuses == [CommitStatus.COMMITTED, CommitStatus.FENCED, CommitStatus.COMMITTED]
        assert client.pttl(idempotency_key(slot, "lost")) > TTL_MS
        assert 0 < client.pttl(idempotency_key(slot, "kept")) <= TTL_MS
