"""The purge of a queue over both brokers: the jobs that wait now, and no newer one."""

from __future__ import annotations

from penstock.compose.jobs.purge import purge
from penstock.registry.broker.base import Broker
from penstock.registry.envelope import Keyring
from penstock.registry.queues import Priority
from tests.conformance.conftest import Brokerage
from tests.conformance.conftest import broker as broker
from tests.conformance.conftest import brokerage as brokerage
from tests.conformance.conftest import running as running
from tests.conformance.jobs import TTL_MS, claim, ids, publish

UNSIGNED = Keyring.parse(None)


def test_jobs_are_withdrawn_after_the_clock_was_set_back(broker: Broker, brokerage: Brokerage, slot: str):
    """The ids of waiting jobs are later than the broker's time then."""
    publish(broker, slot, 2)
    brokerage.elapse(-3_600_000)
    publish(broker, slot, 1)
    assert purge(broker, slot, tuple(Priority), UNSIGNED, result_ttl_ms=TTL_MS) == 3
    assert claim(broker, "w", slot) == []


def test_jobs_that_come_during_a_purge_stay(broker: Broker, slot: str):
    """Of each priority, those that were there at its start are withdrawn."""
    publish(broker, slot, 2)
    publish(broker, slot, 1, Priority.LOW)
    newer: list[str] = []

    def submit(_: int) -> None:
        if not newer:
            newer.extend((*publish(broker, slot, 1), *publish(broker, slot, 1, Priority.LOW)))

    assert purge(broker, slot, tuple(Priority), UNSIGNED, result_ttl_ms=TTL_MS, on_progress=submit) == 3
    assert sorted(ids(claim(broker, "w", slot))) == sorted(newer)
