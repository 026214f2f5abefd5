"""A claimed job: its name for the broker, and the marks of a lost lease and of a cancellation."""

from __future__ import annotations

import pytest

from penstock.registry.broker.base import Held
from penstock.registry.queues import Priority
from tests.workers.doubles import job_of

NONE: frozenset[Held] = frozenset()


def test_a_job_is_held_under_its_queue_and_entry():
    """Slot, priority and entry id together name it for the broker."""
    job = job_of(priority=Priority.LOW)
    assert job.held == Held("double", Priority.LOW, job.delivery.entry_id, job.header.id)


@pytest.mark.parametrize(("crashes", "is_suspect"), [(0, False), (1, True), (2, True)])
def test_one_crash_makes_a_suspect(crashes: int, is_suspect: bool):
    """The count comes with the delivery."""
    assert job_of(crashes=crashes).is_suspect is is_suspect


def test_a_lost_lease_is_told_from_that_of_another_entry():
    """An entry id is unique in its queue only: the same id under another priority is another job."""
    job = job_of()
    other = job.held._replace(priority=Priority.HIGH)
    assert not job.mark(frozenset({other}), frozenset())
    assert (job.is_lost, job.is_cancelled) == (False, False)
    assert job.mark(frozenset({job.held}), frozenset())
    assert (job.is_lost, job.is_cancelled) == (True, False)


def test_a_mark_stays():
    """A later update that does not name the job takes nothing back."""
    job = job_of()
    assert job.mark(NONE, frozenset({job.header.id}))
    assert job.mark(NONE, frozenset({"double.another"}))
    assert job.is_cancelled
    assert job.mark(frozenset({job.held}), frozenset())
    assert job.mark(NONE, frozenset())
    assert (job.is_lost, job.is_cancelled) == (True, True)
