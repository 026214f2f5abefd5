"""Calls of the scripts for publishing and committing: what jobs have in common is sent once, not for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.base import Commit, Delivery, Limits, Publication, State
from penstock.registry.queues import Priority, new_job_id

LIMITS = Limits(100, 0, 60_000)


def _publish(*tenants: str) -> list[Any]:
    jobs = [Publication(new_job_id("m"), Priority.LOW, b"sealed", tenant, "{m}:reply:me") for tenant in tenants]
    return scripts.publish("m", jobs, LIMITS)


def _commit(*tenants: str, entry_ids: Sequence[bytes] = ()) -> list[Any]:
    entry_ids = entry_ids or [b"1700000000000-%d" % number for number in range(len(tenants))]
    commits = [
        Commit("m", Priority.LOW, entry_id, new_job_id("m"), State.FAILED, b"sealed", tenant, "{m}:reply:me")
        for entry_id, tenant in zip(entry_ids, tenants, strict=True)
    ]
    return scripts.commit("w", "m", commits, 60_000)


def test_a_further_job_of_one_kind_costs_two_words_to_publish_and_three_to_commit():
    """Its key with its sealed bytes; its key with its entry and its record."""
    assert len(_publish(*["acme"] * 9)) - len(_publish(*["acme"] * 8)) == 2
    assert len(_commit(*["acme"] * 9)) - len(_commit(*["acme"] * 8)) == 3


def test_jobs_of_several_kinds_name_theirs():
    """One word for each job, and three or five for each kind."""
    one, two = ["acme"] * 8, ["acme", "globex"] * 4
    assert len(_publish(*two)) - len(_publish(*one)) == 8 + 5
    assert len(_commit(*two)) - len(_commit(*one)) == 8 + 3


def test_an_empty_call_names_no_kind():
    """A script reads the numbers of jobs and of kinds before it reads any."""
    assert scripts.publish("m", [], LIMITS)[-4:] == [0, 80, 0, 0]


@pytest.mark.parametrize(
    "entry_ids",
    [
        [b"1700000000000-2", b"1700000000000-10"],
        [b"1700000000007-0", b"1700000000000-0", b"1700000000003-5"],
    ],
)
def test_a_commit_looks_for_its_entries_between_the_first_ms_and_the_last_one(entry_ids: list[bytes]):
    """Whatever the order of the commits is; an id without its number stands for all of that ms."""
    call = _commit(*["acme"] * len(entry_ids), entry_ids=entry_ids)
    times = sorted(entry_id.partition(b"-")[0] for entry_id in entry_ids)
    words = call[3 + call[2] + 8 :][:8]
    assert words == [b"", b"", b"", b"", b"", b"", times[0], times[-1]]


def test_claimed_jobs_are_read_in_order_with_what_is_unusual_about_them():
    """A new job, a replayed one with the time of its first acceptance, and what another program has put there."""
    replayed, foreign = [b"e", b"two", b"a", b"1699999999999"], [b"name", b"value", b"a", b"soon"]
    jobs = [b"1-1", b"one", b"1-2", replayed, b"1-3", foreign, b"1-4", b""]
    now_ms, is_paused, deliveries = scripts.claimed(
        "m", [b"1700000000", b"5000", 0, b"active", 2, jobs, 4, [b"2-1", b"x"]]
    )
    assert (now_ms, is_paused) == (1_700_000_000_005.0, False)
    assert deliveries == [
        Delivery("m", Priority.HIGH, b"1-1", b"one", active=b"active"),
        Delivery("m", Priority.HIGH, b"1-2", b"two", accepted_first_ms=1_699_999_999_999, active=b"active"),
        Delivery("m", Priority.HIGH, b"1-3", b"namevalueasoon", active=b"active"),
        Delivery("m", Priority.HIGH, b"1-4", b"", active=b"active"),
        Delivery("m", Priority.LOW, b"2-1", b"x", active=b"active"),
    ]
