"""Calls of the scripts for publishing and committing: what jobs have in common is sent once, not for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


JOB = st.tuples(st.sampled_from(["acme", "globex", "umbrella"]), st.booleans(), st.booleans())
"""Tenant, whether there is an idempotency key, and whether there is a webhook (of a commit: an account that pays)."""


@given(st.lists(JOB, max_size=30))
def test_a_call_has_no_words_beside_those_of_its_jobs_and_their_kinds(asked: list[tuple[str, bool, bool]]):
    """A job has two words to publish and three to commit, one more where there are several kinds, and those of what
    only some jobs have. A further word for each job fails this test."""
    jobs = [
        Publication(
            new_job_id("m"),
            Priority.LOW,
            b"sealed",
            tenant,
            "{m}:reply:me",
            f"digest-{number}" if is_keyed else "",
            "fingerprint" if is_keyed else "",
            webhook="https://receiver.example" if has_more else "",
        )
        for number, (tenant, is_keyed, has_more) in enumerate(asked)
    ]
    commits = [
        Commit(
            "m",
            Priority.LOW,
            b"1700000000000-%d" % number,
            job.job_id,
            State.COMPLETED,
            b"sealed",
            job.tenant,
            job.reply,
            job.idempotency_digest,
            account="account" if job.webhook else "",
        )
        for number, job in enumerate(jobs)
    ]
    kinds, keyed = len({tenant for tenant, _, _ in asked}), sum(is_keyed for _, is_keyed, _ in asked)
    more, numbers = sum(has_more for _, _, has_more in asked), len(jobs) if kinds > 1 else 0
    empty = len(scripts.publish("m", [], LIMITS))
    assert len(scripts.publish("m", jobs, LIMITS)) - empty == 2 * len(jobs) + numbers + 5 * kinds + 4 * keyed + 2 * more
    # One reply address: its key and its cap.
    replies = 2 if jobs else 0
    empty = len(scripts.commit("w", "m", [], 60_000))
    words = len(scripts.commit("w", "m", commits, 60_000)) - empty - replies
    assert words == 3 * len(jobs) + numbers + 3 * kinds + 2 * keyed + 4 * more


def test_an_empty_call_names_no_kind():
    """A script reads the numbers of jobs and of kinds before it reads any."""
    assert scripts.publish("m", [], LIMITS)[-5:] == [0, 80, 0, 0, 0]


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
