"""Webhooks: each end of a job queues exactly one, and deliverers take, settle and replay them under a lease."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import pytest
from msgspec import structs

from penstock.registry.broker import memory_webhooks, redis_webhooks
from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.base import (
    Broker,
    CancelOutcome,
    CommitStatus,
    Emission,
    Limits,
    Replay,
    State,
    Withdrawal,
)
from penstock.registry.broker.webhooks import BrokerOfWebhooks, Webhook
from penstock.registry.envelope import Options
from penstock.registry.queues import Priority, events_key, record_key, reply_key, webhook_key, webhook_keys
from tests.conformance.conftest import Brokerage, OnRedis
from tests.conformance.jobs import (
    LEASE_MS,
    ROOMY,
    TTL_MS,
    claim,
    commit_of,
    held,
    publication,
    settle,
)

URL = "https://example.com/hook?x=1"
NEVER_MS = 60_000
DEADLINE_MS = 40


def called_back(broker: Broker, slot: str, *, reply: str = "", deadline_ms: int = 0) -> str:
    """Publishes a job with a webhook; returns its id."""
    job = publication(slot, reply=reply, deadline_ms=deadline_ms, webhook=URL)
    assert [receipt.outcome for receipt in broker.publish(slot, [job], ROOMY)] == ["accepted"]
    return job.job_id


def waiting(broker: BrokerOfWebhooks, slot: str) -> list[Webhook]:
    """The webhooks of a slot that are not delivered."""
    return broker.list_webhooks(slot, dead=False)


def ended(broker: BrokerOfWebhooks, slot: str, count: int = 1) -> list[str]:
    """Jobs with webhooks that a worker has committed; their ids."""
    ids = [called_back(broker, slot) for _ in range(count)]
    settle(broker, "w", *map(commit_of, claim(broker, "w", slot)))
    return ids


def _completes(brokerage: Brokerage, broker: Broker, slot: str, job_id: str) -> None:
    (delivery,) = claim(broker, "w", slot)
    assert settle(broker, "w", commit_of(delivery, reply=reply_key(slot, "c1"))) == [CommitStatus.COMMITTED]


def _fails(brokerage: Brokerage, broker: Broker, slot: str, job_id: str) -> None:
    (delivery,) = claim(broker, "w", slot)
    assert settle(broker, "w", commit_of(delivery, state=State.FAILED, reply=reply_key(slot, "c1"))) == [
        CommitStatus.COMMITTED
    ]


def _is_cancelled(brokerage: Brokerage, broker: Broker, slot: str, job_id: str) -> None:
    assert broker.cancel(job_id, "acme", b"cancelled") is CancelOutcome.CANCELLED


def _is_cancelled_while_it_runs(brokerage: Brokerage, broker: Broker, slot: str, job_id: str) -> None:
    (delivery,) = claim(broker, "w", slot)
    assert broker.cancel(job_id, "acme", b"cancelled") is CancelOutcome.REQUESTED
    assert settle(broker, "w", commit_of(delivery, state=State.CANCELLED, reply=reply_key(slot, "c1"))) == [
        CommitStatus.COMMITTED
    ]


def _expires(brokerage: Brokerage, broker: Broker, slot: str, job_id: str) -> None:
    brokerage.elapse(2 * DEADLINE_MS)
    assert broker.expire(job_id, "acme", b"expired")


def _is_dead_lettered(brokerage: Brokerage, broker: Broker, slot: str, job_id: str) -> None:
    (delivery,) = claim(broker, "w", slot)
    assert broker.dead_letter("w", delivery, "poison", job_id=job_id, sealed=b"dead")


def _is_purged(brokerage: Brokerage, broker: Broker, slot: str, job_id: str) -> None:
    (entry,) = broker.waiting(slot, Priority.NORMAL, b"", 8, 64)
    assert broker.withdraw(slot, Priority.NORMAL, [Withdrawal(entry.entry_id, job_id, "acme", b"x")], TTL_MS) == 1


def _is_swept(brokerage: Brokerage, broker: Broker, slot: str, job_id: str) -> None:
    (entry,) = broker.waiting(slot, Priority.NORMAL, b"", 8, 64)
    withdrawal = Withdrawal(entry.entry_id, job_id, "acme", b"x", State.EXPIRED)
    assert broker.withdraw(slot, Priority.NORMAL, [withdrawal], TTL_MS) == 1


End = Callable[[Brokerage, Broker, str, str], None]
ENDS: dict[End, State] = {
    _completes: State.COMPLETED,
    _fails: State.FAILED,
    _is_cancelled: State.CANCELLED,
    _is_cancelled_while_it_runs: State.CANCELLED,
    _expires: State.EXPIRED,
    _is_dead_lettered: State.DEAD,
    _is_purged: State.CANCELLED,
    _is_swept: State.EXPIRED,
}


@pytest.mark.parametrize("is_followed", [False, True], ids=["alone", "followed"])
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__.lstrip("_"))
def test_each_end_queues_exactly_one(
    end: End, is_followed: bool, brokerage: Brokerage, broker: BrokerOfWebhooks, slot: str
):
    """It names the job, how it ended and where to report it. Subscribers and the client are told as without it."""
    reply = reply_key(slot, "c1")
    job_id = called_back(broker, slot, reply=reply, deadline_ms=DEADLINE_MS if end is _expires else 0)
    if is_followed:
        broker.job_record(job_id, subscribe=True)
        broker.job_record(job_id, subscribe=True)
    assert waiting(broker, slot) == []
    end(brokerage, broker, slot, job_id)
    (webhook,) = waiting(broker, slot)
    assert (webhook.slot, webhook.job_id, webhook.state, webhook.target) == (slot, job_id, ENDS[end], URL)
    assert webhook.id.startswith(f"evt_{job_id.rpartition('.')[2]}_")
    assert webhook.tries == 0
    assert slot in broker.webhook_slots()
    told, events = (broker.read({key: "0-0"}, 0) for key in (reply, events_key(job_id)))
    assert len(told) == 1
    assert [entry.fields[1] for entry in events] == ([ENDS[end].value.encode()] if is_followed else [])
    record = broker.job_record(job_id)
    assert record is not None
    assert record.state is ENDS[end]


def test_job_without_one_queues_none(broker: BrokerOfWebhooks, slot: str):
    """Also beside one that has a webhook, in the same calls."""
    jobs = [publication(slot), publication(slot, webhook=URL), publication(slot)]
    broker.publish(slot, jobs, ROOMY)
    settle(broker, "w", *map(commit_of, claim(broker, "w", slot)))
    assert [webhook.job_id for webhook in waiting(broker, slot)] == [jobs[1].job_id]


def test_emitted_events_keep_the_webhook(broker: BrokerOfWebhooks, slot: str):
    """A job that emits events has subscribers from then on; its end goes to both."""
    job_id = called_back(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    broker.emit("w", [Emission(held(delivery), "a run", b"1")], TTL_MS, max_bytes=1000)
    settle(broker, "w", commit_of(delivery))
    assert [webhook.job_id for webhook in waiting(broker, slot)] == [job_id]
    kinds = [entry.fields[1] for entry in broker.read({events_key(job_id): "0-0"}, 0)]
    assert kinds == [b"started", b"events", b"C"]


def test_late_and_repeated_commits_queue_none(brokerage: Brokerage, broker: BrokerOfWebhooks, slot: str):
    """The fenced commit of a worker that lost the job has no effect, and neither has the second of the same commit."""
    called_back(broker, slot)
    (lost,) = claim(broker, "frozen", slot)
    brokerage.elapse(LEASE_MS + 10)
    (taken,) = broker.take_over("w", slot, LEASE_MS, 8)
    assert settle(broker, "frozen", commit_of(lost, b"late")) == [CommitStatus.FENCED]
    assert waiting(broker, slot) == []
    assert settle(broker, "w", commit_of(taken)) == [CommitStatus.COMMITTED]
    assert settle(broker, "w", commit_of(taken)) == [CommitStatus.COMMITTED]
    assert settle(broker, "frozen", commit_of(lost, b"late")) == [CommitStatus.FENCED]
    assert len(waiting(broker, slot)) == 1


def test_repeated_publication_has_one(broker: BrokerOfWebhooks, slot: str):
    """The same job id, and the same idempotency key with another URL: the first webhook counts."""
    job = publication(slot, idempotency_digest="d", fingerprint="f", webhook=URL)
    again = publication(slot, idempotency_digest="d", fingerprint="f", webhook="https://example.com/other")
    for each in (job, job, again):
        broker.publish(slot, [each], ROOMY)
    settle(broker, "w", *map(commit_of, claim(broker, "w", slot)))
    assert [(webhook.job_id, webhook.target) for webhook in waiting(broker, slot)] == [(job.job_id, URL)]


def test_replayed_dead_letter_ends_twice(brokerage: Brokerage, broker: BrokerOfWebhooks, slot: str):
    """Each end has its event, with an id of its own: dead first, completed after the replay."""
    job_id = called_back(broker, slot)
    _is_dead_lettered(brokerage, broker, slot, job_id)
    (letter,) = broker.dead_letters(slot)
    brokerage.elapse(5)
    job = publication(slot, job_id=job_id, webhook=URL)
    assert broker.replay(slot, letter.entry, job, TTL_MS) is Replay.REPLAYED
    settle(broker, "w", *map(commit_of, claim(broker, "w", slot)))
    found = waiting(broker, slot)
    assert [webhook.state for webhook in found] == [State.DEAD, State.COMPLETED]
    assert len({webhook.id for webhook in found}) == 2


def test_record_of_a_waiting_job_reads_as_without_one(broker: BrokerOfWebhooks, slot: str):
    """State, tenant and the rest of its time."""
    records = []
    for job in (publication(slot, deadline_ms=50_000, webhook=f"{URL}&n=9"), publication(slot, deadline_ms=50_000)):
        broker.publish(slot, [job], ROOMY)
        record = broker.job_record(job.job_id)
        assert record is not None
        assert record.left_ms is not None
        assert 0 < record.left_ms <= 50_000
        records.append(structs.replace(record, left_ms=0))
        assert broker.queued_job(job.job_id) is not None
    assert records[0] == records[1]


def test_taken_one_is_due_again_after_the_lease(brokerage: Brokerage, broker: BrokerOfWebhooks, slot: str):
    """What a killed deliverer held comes back under its id, as the next try."""
    ended(broker, slot)
    other = brokerage.connect()
    (first,) = broker.take_webhooks(slot, 8, LEASE_MS)
    assert broker.take_webhooks(slot, 8, LEASE_MS) == []
    brokerage.elapse(LEASE_MS + 10)
    (second,) = other.take_webhooks(slot, 8, LEASE_MS)
    assert (second.id, first.tries, second.tries) == (first.id, 1, 2)
    # Nobody saw the first try fail: it is none of those that make the pauses longer.
    assert (first.failures, second.failures) == (0, 0)
    assert other.postpone_webhook(second, 0, "no answer")
    (third,) = other.take_webhooks(slot, 8, LEASE_MS)
    assert (third.tries, third.failures) == (3, 1)
    other.close()


def test_each_is_taken_by_one(broker: BrokerOfWebhooks, slot: str):
    """At most as many as asked for, and none twice."""
    ids = ended(broker, slot, 5)
    taken = [broker.take_webhooks(slot, 2, NEVER_MS) for _ in range(4)]
    assert [len(each) for each in taken] == [2, 2, 1, 0]
    assert sorted(webhook.job_id for each in taken for webhook in each) == sorted(ids)


def test_delivered_one_is_gone(broker: BrokerOfWebhooks, slot: str):
    """A second answer finds nothing."""
    ended(broker, slot)
    (webhook,) = broker.take_webhooks(slot, 8, NEVER_MS)
    assert broker.webhook_delivered(webhook)
    assert not broker.webhook_delivered(webhook)
    assert waiting(broker, slot) == []
    assert broker.count_webhooks(slot) == (0, 0, 0)


def test_postponed_one_is_due_later(brokerage: Brokerage, broker: BrokerOfWebhooks, slot: str):
    """With its error; a try that did not begin is taken back."""
    ended(broker, slot)
    (webhook,) = broker.take_webhooks(slot, 8, 0)
    assert broker.postpone_webhook(webhook, LEASE_MS, "no answer")
    assert broker.take_webhooks(slot, 8, NEVER_MS) == []
    (listed,) = waiting(broker, slot)
    assert (listed.tries, listed.error) == (1, "no answer")
    assert listed.due_ms > listed.ended_ms
    brokerage.elapse(LEASE_MS + 10)
    (again,) = broker.take_webhooks(slot, 8, 0)
    assert broker.postpone_webhook(again, 0, "no answer", counts=False)
    (third,) = broker.take_webhooks(slot, 8, NEVER_MS)
    assert (again.tries, third.tries) == (2, 2)
    assert (listed.failures, again.failures, third.failures) == (1, 1, 1)


def test_stale_deliverer_changes_nothing_but_a_delivery(brokerage: Brokerage, broker: BrokerOfWebhooks, slot: str):
    """After another try has begun, the failure of the earlier one is void; its success counts."""
    ended(broker, slot)
    (stale,) = broker.take_webhooks(slot, 8, 0)
    brokerage.elapse(5)
    (fresh,) = broker.take_webhooks(slot, 8, NEVER_MS)
    assert not broker.postpone_webhook(stale, 0, "late")
    assert not broker.give_up_webhook(stale, "late")
    assert broker.take_webhooks(slot, 8, NEVER_MS) == []
    assert broker.webhook_delivered(stale)
    assert not broker.postpone_webhook(fresh, 0, "too late")
    assert broker.count_webhooks(slot) == (0, 0, 0)


def test_dead_one_is_kept_and_replayed(broker: BrokerOfWebhooks, slot: str):
    """With its reason; a replay makes it due now, under the same id, with all its tries."""
    (job_id,) = ended(broker, slot)
    (webhook,) = broker.take_webhooks(slot, 8, NEVER_MS)
    assert broker.give_up_webhook(webhook, "gone")
    assert not broker.give_up_webhook(webhook, "gone")
    (dead,) = broker.list_webhooks(slot, dead=True)
    assert (dead.id, dead.job_id, dead.error, dead.tries) == (webhook.id, job_id, "gone", 1)
    assert waiting(broker, slot) == broker.take_webhooks(slot, 8, NEVER_MS) == []
    assert broker.count_webhooks(slot)[:2] == (0, 1)
    assert broker.replay_webhook(slot, webhook.id)
    assert not broker.replay_webhook(slot, webhook.id)
    assert not broker.replay_webhook(slot, "evt_unknown")
    (again,) = broker.take_webhooks(slot, 8, NEVER_MS)
    assert (again.id, again.target, again.tries, again.failures) == (webhook.id, URL, 1, 0)
    assert broker.count_webhooks(slot)[:2] == (1, 0)


def test_late_success_revives_a_dead_one(broker: BrokerOfWebhooks, slot: str):
    """The receiver has the event: it is delivered, not dead."""
    ended(broker, slot)
    (webhook,) = broker.take_webhooks(slot, 8, NEVER_MS)
    broker.give_up_webhook(webhook, "no answer")
    assert broker.webhook_delivered(webhook)
    assert broker.list_webhooks(slot, dead=True) == []


def test_dead_ones_are_bounded(broker: BrokerOfWebhooks, slot: str, monkeypatch: pytest.MonkeyPatch):
    """The oldest make room."""
    for module in (memory_webhooks, redis_webhooks):
        monkeypatch.setattr(module, "DEAD_WEBHOOKS_CAP", 2)
    ended(broker, slot, 4)
    given_up = []
    for _ in range(4):
        (webhook,) = broker.take_webhooks(slot, 1, NEVER_MS)
        broker.give_up_webhook(webhook, "gone")
        given_up.append(webhook.id)
    assert {webhook.id for webhook in broker.list_webhooks(slot, dead=True)} <= set(given_up)
    assert broker.count_webhooks(slot).dead == 2


def test_list_is_paged_oldest_first(brokerage: Brokerage, broker: BrokerOfWebhooks, slot: str):
    """And the age is that of the oldest."""
    ids = []
    for _ in range(3):
        ids += ended(broker, slot)
        brokerage.elapse(20)
    pages = [broker.list_webhooks(slot, dead=False, after=after, count=2) for after in (0, 2, 4)]
    assert [[webhook.job_id for webhook in page] for page in pages] == [ids[:2], ids[2:], []]
    counts = broker.count_webhooks(slot)
    assert counts.waiting == 3
    assert counts.oldest_s >= 0.055


def test_tenants_count_is_as_without_one(broker: BrokerOfWebhooks, slot: str):
    """Ended jobs are no longer in flight."""
    limits = Limits(100, 2, TTL_MS)
    jobs = [publication(slot, webhook=URL) for _ in range(2)]
    broker.publish(slot, jobs, limits)
    assert broker.publish(slot, [publication(slot)], limits)[0].outcome == "tenant-full"
    settle(broker, "w", *map(commit_of, claim(broker, "w", slot)))
    assert broker.publish(slot, [publication(slot)], limits)[0].outcome == "accepted"


def test_job_without_one_costs_no_byte(redis_brokerage: OnRedis, slot: str):
    """Neither in the call that publishes it, nor in its header, nor in its record; it makes no key."""
    job = publication(slot)
    call = scripts.publish(slot, [job], ROOMY)
    assert len(call) == 3 + call[2] + 9 + 5 + 1
    assert scripts.webhook_slot(slot, [job]) is None
    assert msgspec.msgpack.encode(Options()) == b"\x80"
    with closing(redis_brokerage.connect()) as broker, redis_brokerage.server.client() as client:
        broker.publish(slot, [job], ROOMY)
        record: Any = client.get(record_key(job.job_id))
        assert re.fullmatch(rb"Q-2\d+-\d+\nacme\n\n\n\d+", record)
        settle(broker, "w", *map(commit_of, claim(broker, "w", slot)))
        assert list(client.scan_iter(f"{{{slot}}}:webhooks:*")) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", b"Z"),
        ("state", b"\xff"),
        ("job", None),
        ("ended", b"soon"),
        ("target", None),
        ("tries", b"one"),
        ("tries", str(2**63 - 1).encode()),
        ("failures", b"one"),
    ],
)
def test_one_that_another_program_changed_keeps_no_other_waiting(
    redis_brokerage: OnRedis, slot: str, field: str, value: bytes | None
):
    """It is removed when it is taken: otherwise each deliverer would fail at it, again after each lease."""
    with closing(redis_brokerage.connect()) as broker, redis_brokerage.server.client() as client:
        ended(broker, slot, 3)
        bad, *good = waiting(broker, slot)
        key = webhook_key(slot, bad.id)
        if value is None:
            client.hdel(key, field)
        else:
            client.hset(key, field, value)
        assert [each.id for each in waiting(broker, slot)] == [each.id for each in good]
        assert {each.id for each in broker.take_webhooks(slot, 8, NEVER_MS)} == {each.id for each in good}
        assert broker.count_webhooks(slot).waiting == 2
        assert client.zcard(webhook_keys(slot)[1]) == 2


def test_a_dead_one_that_another_program_deleted_is_not_replayed(redis_brokerage: OnRedis, slot: str):
    """The answer is that there is none, and nothing of it is left."""
    with closing(redis_brokerage.connect()) as broker, redis_brokerage.server.client() as client:
        ended(broker, slot)
        (webhook,) = broker.take_webhooks(slot, 1, NEVER_MS)
        broker.give_up_webhook(webhook, "gone")
        client.delete(webhook_key(slot, webhook.id))
        assert not broker.replay_webhook(slot, webhook.id)
        assert broker.count_webhooks(slot)[:2] == (0, 0)
        assert not client.exists(webhook_key(slot, webhook.id))


def test_webhooks_are_lost_and_restored_with_the_data_of_the_broker(brokerage: Brokerage, slot: str):
    """A broker that comes back empty has none; one that comes back older has those of its copy."""
    with closing(brokerage.connect()) as broker:
        ended(broker, slot)
        kept = waiting(broker, slot)
        restore = brokerage.save()
        ended(broker, slot)
        brokerage.lose_everything()
        assert waiting(broker, slot) == []
        restore()
        assert waiting(broker, slot) == kept
