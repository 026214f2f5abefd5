"""A broker whose data were cleared, or restored from an older copy: what its workers and clients can tell."""

from __future__ import annotations

import pytest

from penstock.registry.broker.base import Broker, Claim, CommitStatus, Emission, State
from penstock.registry.queues import events_key
from tests.conformance.conftest import Brokerage
from tests.conformance.jobs import ROOMY, TTL_MS, claim, commit_of, held, ids, publication, publish, queued, settle


def _claimed(broker: Broker, consumer: str, slot: str) -> list[str]:
    """The jobs of a claim that nothing was prepared for."""
    return ids(broker.exchange(consumer, [], [Claim(slot, 64, 0, 60_000)], TTL_MS)[1])


def test_a_report_tells_whether_the_broker_had_the_last_one(brokerage: Brokerage, slot: str):
    """Not at first, after the end of its time, from a cleared broker, and from one with older data."""
    broker, name = brokerage.connect(), f"{slot}@host"
    assert not broker.report(name, b"1", TTL_MS)
    assert broker.report(name, b"2", TTL_MS)
    restore = brokerage.save()
    assert broker.report(name, b"3", 50)
    brokerage.elapse(100)
    assert not broker.report(name, b"4", TTL_MS)
    brokerage.lose_everything()
    assert not broker.report(name, b"5", TTL_MS)
    assert broker.report(name, b"6", TTL_MS)
    restore()
    assert not broker.report(name, b"7", TTL_MS)
    assert broker.report(name, b"", TTL_MS)
    broker.close()


def test_a_repeated_announcement_fills_in_what_is_missing(broker: Broker, slot: str):
    """It leaves what is there, or replaces it, and never the spec of a promoted version."""
    broker.announce(slot, b"one", {"1": b"one"}, replaces=True)
    assert (broker.spec(slot), broker.spec(slot, "1")) == (b"one", b"one")
    broker.announce(slot, b"two", {"1": b"other", "2": b"two"}, replaces=False)
    assert (broker.spec(slot), broker.spec(slot, "1"), broker.spec(slot, "2")) == (b"one", b"one", b"two")
    broker.announce(slot, b"two", {"1": b"other"}, replaces=True)
    assert (broker.spec(slot), broker.spec(slot, "1")) == (b"two", b"other")
    broker.activate(slot, 3, b"record", "3", b"three")
    broker.announce(slot, b"two", {}, replaces=True)
    assert broker.spec(slot) == b"three"
    assert slot in broker.models()


def test_work_goes_on_when_the_broker_comes_back_empty(brokerage: Brokerage, slot: str):
    """Held jobs are lost, late commits are fenced, and the next jobs are claimed without any preparation."""
    broker = brokerage.connect()
    job_ids = publish(broker, slot, 2)
    first, second = claim(broker, "w", slot)
    brokerage.lose_everything()
    assert broker.renew("w", [held(first)]).lost == {held(first)}
    assert settle(broker, "w", commit_of(first)) == [CommitStatus.FENCED]
    assert broker.job_records(job_ids) == [None, None]
    later = publish(broker, slot)
    assert _claimed(broker, "w", slot) == later
    assert broker.take_over("w", slot, 60_000, 8) == []
    assert settle(broker, "w", commit_of(second)) == [CommitStatus.FENCED]
    broker.close()


def test_claims_without_a_group_mend_it(brokerage: Brokerage, slot: str):
    """A take-over, an adoption and a blocking claim after the loss: each goes on, and the next job is claimed."""
    broker = brokerage.connect()
    broker.prepare([slot])
    for ask in (
        lambda: broker.take_over("w", slot, 60_000, 8),
        lambda: broker.adopt("w", slot, ["1"], 8),
        lambda: broker.release("w", []),
    ):
        brokerage.lose_everything()
        ask()
        job_ids = publish(broker, slot)
        assert _claimed(broker, "w", slot) == job_ids
    broker.arm("w", [slot], 8, 1000)
    brokerage.lose_everything()
    (job_id,) = publish(broker, slot)
    assert [*ids(broker.disarm()), *_claimed(broker, "w", slot)] == [job_id]
    broker.close()


def test_an_older_copy_brings_back_waiting_jobs_and_loses_later_ones(brokerage: Brokerage, slot: str):
    """A job that had ended waits again and runs again; its former holder no longer holds it."""
    broker = brokerage.connect()
    (earlier,) = publish(broker, slot)
    restore = brokerage.save()
    (delivery,) = claim(broker, "w", slot)
    assert settle(broker, "w", commit_of(delivery)) == [CommitStatus.COMMITTED]
    (later,) = publish(broker, slot)
    restore()
    record, missing = broker.job_records([earlier, later])
    assert record is not None
    assert record.state is State.QUEUED
    assert missing is None
    assert settle(broker, "w", commit_of(delivery)) == [CommitStatus.FENCED]
    (again,) = claim(broker, "w2", slot)
    assert again.sealed.decode() == earlier
    assert settle(broker, "w2", commit_of(again)) == [CommitStatus.COMMITTED]
    assert queued(broker, slot) == 0
    broker.close()


def test_events_go_on_when_their_stream_is_gone(brokerage: Brokerage, slot: str):
    """A subscriber reads on after the last number that it has seen; nothing that the job emits is dropped."""
    broker = brokerage.connect()
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    first = Emission(held(delivery), "a run", b"1", 2)
    (last,) = broker.emit("w", [first], 50, max_bytes=1000)
    brokerage.elapse(100)
    second = Emission(held(delivery), "a run", b"2", after=last)
    (again,) = broker.emit("w", [second], TTL_MS, max_bytes=1000)
    assert again == (last.seq + 1, last.size + 1)
    assert broker.emit("w", [second], TTL_MS, max_bytes=1000) == [again]
    (entry,) = broker.read({events_key(job_id): f"{last.seq}-0"}, 0)
    assert entry.fields[3] == b"2"
    broker.close()


@pytest.mark.parametrize("stored", [0, 5, 9])
def test_the_later_decision_wins_when_it_is_put_back(brokerage: Brokerage, slot: str, stored: int):
    """A worker puts back the decision that it follows: a later one in the broker stays."""
    broker = brokerage.connect()
    if stored:
        broker.activate(slot, stored, b"stored", "s", b"spec of s")
    assert broker.activate(slot, 7, b"mine", "m", b"spec of m") is (stored < 7)
    assert broker.actives([slot])[slot] == (b"7 mine" if stored < 7 else b"9 stored")
    broker.close()


def test_a_publication_with_a_lost_idempotency_key_is_a_new_job(brokerage: Brokerage, slot: str):
    """The key is lost with the job, so that the client may submit again."""
    broker = brokerage.connect()
    first, second = (publication(slot, idempotency_digest="d", fingerprint="f") for _ in range(2))
    broker.publish(slot, [first], ROOMY)
    brokerage.lose_everything()
    (receipt,) = broker.publish(slot, [second], ROOMY)
    assert (receipt.outcome, receipt.job_id) == ("accepted", second.job_id)
    broker.close()
