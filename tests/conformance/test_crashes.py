"""Crash marks: which jobs were running when a process died, and how often that happened to each."""

from __future__ import annotations

import pytest

from penstock.registry.broker.base import Broker, Held
from penstock.registry.broker.incidents import timeout_incident
from penstock.registry.queues import Priority
from tests.conformance.conftest import Brokerage
from tests.conformance.jobs import LEASE_MS, TTL_MS, claim, commit_of, held, publish, settle


def _crashes_after_lapse(brokerage: Brokerage, broker: Broker, slot: str, consumer: str) -> list[tuple[int, int]]:
    """(deliveries, crashes) of the jobs that `consumer` takes over, one lease later."""
    brokerage.elapse(LEASE_MS + 10)
    return [(job.attempt, job.crashes) for job in broker.take_over(consumer, slot, LEASE_MS, 8)]


def test_each_crash_counts_once(brokerage: Brokerage, broker: Broker, slot: str):
    """Two processes died while the job ran; one of the reports came twice."""
    publish(broker, slot)
    (delivery,) = claim(broker, "w1", slot)
    assert delivery.crashes == 0
    broker.suspect(slot, [held(delivery)], "w1:boot1", TTL_MS)
    broker.suspect(slot, [held(delivery)], "w1:boot1", TTL_MS)
    assert _crashes_after_lapse(brokerage, broker, slot, "w2") == [(2, 1)]
    broker.suspect(slot, [held(delivery)], "w2:boot1", TTL_MS)
    assert _crashes_after_lapse(brokerage, broker, slot, "w3") == [(3, 2)]


@pytest.mark.parametrize("how", ["taken over", "adopted"])
def test_a_last_forward_over_its_limit_is_told_to_the_next_worker(
    how: str, brokerage: Brokerage, broker: Broker, slot: str
):
    """The limit is in the delivery, beside the count of crashes; a job that only crashed has none."""
    publish(broker, slot, 2)
    hung, crashed = claim(broker, "w1", slot)
    for delivery in (hung, crashed):
        broker.suspect(slot, [held(delivery)], "w1:boot1", TTL_MS)
    broker.suspect(slot, [held(hung)], timeout_incident("w2:boot1", 1.5), TTL_MS)
    if how == "taken over":
        brokerage.elapse(LEASE_MS + 10)
        found = broker.take_over("w3", slot, LEASE_MS, 8)
    else:
        broker.release("w1", [held(hung), held(crashed)], version="2")
        found = broker.adopt("w3", slot, ["2"], 8)
    assert [(each.crashes, each.exceeded_s) for each in found] == [(2, 1.5), (1, 0.0)]


def test_only_the_jobs_that_ran_are_suspects(brokerage: Brokerage, broker: Broker, slot: str):
    """A neighbour in the same worker's memory, and one of the same entry id in another queue, count no crash."""
    publish(broker, slot, 2, Priority.HIGH)
    publish(broker, slot, 1, Priority.LOW)
    running, _, _ = claim(broker, "w1", slot)
    broker.suspect(slot, [held(running)], "w1:boot1", TTL_MS)
    assert _crashes_after_lapse(brokerage, broker, slot, "w2") == [(2, 1), (2, 0), (2, 0)]


def test_release_and_lapse_count_no_crash(brokerage: Brokerage, broker: Broker, slot: str):
    """What living workers give back or let lapse says nothing against a job."""
    publish(broker, slot)
    (delivery,) = claim(broker, "w1", slot)
    broker.release("w1", [held(delivery)])
    (delivery,) = broker.take_over("w2", slot, LEASE_MS, 8)
    assert (delivery.attempt, delivery.crashes) == (1, 0)
    assert _crashes_after_lapse(brokerage, broker, slot, "w3") == [(2, 0)]


def test_crash_is_remembered_after_the_job_changed_hands(brokerage: Brokerage, broker: Broker, slot: str):
    """The report may come after the next worker took the job over, or gave it back."""
    publish(broker, slot)
    (delivery,) = claim(broker, "w1", slot)
    assert _crashes_after_lapse(brokerage, broker, slot, "w2") == [(2, 0)]
    broker.suspect(slot, [held(delivery)], "w1:boot1", TTL_MS)
    broker.release("w2", [held(delivery)])
    broker.suspect(slot, [held(delivery)], "w0:boot7", TTL_MS)
    (delivery,) = broker.take_over("w3", slot, LEASE_MS, 8)
    assert (delivery.attempt, delivery.crashes) == (2, 2)


def test_job_that_has_ended_or_waits_is_no_suspect(brokerage: Brokerage, broker: Broker, slot: str):
    """Neither a finished job nor one that was never claimed is marked, and the call is no error."""
    publish(broker, slot, 2)
    finished, poison = claim(broker, "w1", slot)
    settle(broker, "w1", commit_of(finished))
    broker.suspect(slot, [held(finished)], "w1:boot1", TTL_MS)
    (waiting_id,) = publish(broker, slot)
    (entry,) = broker.waiting(slot, Priority.NORMAL, b"", 8, 8)
    broker.suspect(slot, [Held(slot, Priority.NORMAL, entry.entry_id, waiting_id)], "w1:boot1", TTL_MS)
    broker.suspect(f"{slot}-unheard-of", [held(finished)._replace(slot=f"{slot}-unheard-of")], "w1:boot1", TTL_MS)
    broker.suspect(slot, [], "w1:boot1", TTL_MS)
    assert broker.dead_letter("w1", poison, "poison")
    (letter,) = broker.dead_letters(slot)
    assert letter.crashes == 0
    (waiting,) = claim(broker, "w2", slot)
    assert waiting.crashes == 0
    assert _crashes_after_lapse(brokerage, broker, slot, "w3") == [(2, 0)]


def test_marks_expire(brokerage: Brokerage, broker: Broker, slot: str):
    """A crash is forgotten when its time has passed; another one begins it anew."""
    publish(broker, slot)
    (delivery,) = claim(broker, "w1", slot)
    broker.suspect(slot, [held(delivery)], "w1:boot1", LEASE_MS)
    assert _crashes_after_lapse(brokerage, broker, slot, "w2") == [(2, 0)]
    broker.suspect(slot, [held(delivery)], "w1:boot1", LEASE_MS * 20)
    assert _crashes_after_lapse(brokerage, broker, slot, "w3") == [(3, 1)]


def test_many_suspects_are_one_incident(brokerage: Brokerage, broker: Broker, slot: str):
    """A batch of any size is marked as a whole."""
    publish(broker, slot, 600)
    deliveries = claim(broker, "w1", slot, 600)
    broker.suspect(slot, [held(delivery) for delivery in deliveries], "w1:boot1", TTL_MS)
    brokerage.elapse(LEASE_MS + 10)
    assert [job.crashes for job in broker.take_over("w2", slot, LEASE_MS, 600)] == [1] * 600
