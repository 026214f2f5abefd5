"""The backlog: which jobs a caller gets, in which order, and whose room is free afterwards."""

from __future__ import annotations

from collections import deque
from math import inf

import pytest

from penstock.workers.backlog import Backlog, Waiting
from penstock.workers.job import ClaimedJob
from penstock.workers.versions.version import ServedVersion, VersionState
from tests.workers.doubles import cold_version, job_of, ready_version, spec_of


class Shelf:
    """A backlog of two models with one version each, and in it a job for each reason to wait."""

    def __init__(self) -> None:
        self.double, self.other = ready_version(), ready_version(name="other")
        self.backlog = Backlog(deque([self.double, self.other]))

    def fill(self, version: ServedVersion) -> list[ClaimedJob]:
        """A pending, a suspect, a delayed, an unplaced and a searched job."""
        pending, suspect, delayed, unplaced, searched = jobs = [job_of(model=version.name) for _ in range(5)]
        self.backlog.add(version, [pending])
        self.backlog.add_suspect(version, suspect)
        self.backlog.delay(version, delayed, 50.0)
        self.backlog.add_unplaced([unplaced])
        self.backlog.add_unplaced([searched], is_searched=True)
        return jobs

    @property
    def rooms(self) -> tuple[int, int]:
        """The jobs that take room in each version."""
        return self.double.queue.in_memory, self.other.queue.in_memory


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def test_only_pending_jobs_and_suspects_take_room(shelf: Shelf):
    """A job that is delayed releases the room that it had; an unplaced job has no version to take room in."""
    (job,) = jobs = [job_of()]
    shelf.backlog.add(shelf.double, jobs)
    shelf.backlog.delay(shelf.double, job, 1.0)
    assert shelf.rooms == (0, 0)
    shelf.fill(shelf.double)
    assert shelf.rooms == (2, 0)


def test_take_finds_a_job_whatever_it_waits_for(shelf: Shelf):
    """Each job comes out once with its version, frees its room, and leaves the others where they are."""
    jobs, others = shelf.fill(shelf.double), shelf.fill(shelf.other)
    wanted = {job.header.id for job in jobs}
    taken = shelf.backlog.take(lambda job: job.header.id in wanted)
    versions = [shelf.double, shelf.double, shelf.double, None, None]
    assert [(each.job, each.version) for each in taken] == list(zip(jobs, versions, strict=True))
    assert shelf.rooms == (0, 2)
    assert [each.job for each in shelf.backlog.take()] == others
    assert list(shelf.backlog) == []
    assert (shelf.backlog.suspects, shelf.backlog.delayed, shelf.backlog.has_unplaced) == (0, 0, False)


def test_jobs_that_could_run_now_are_listed_without_the_delayed_ones(shelf: Shelf):
    """The list is a snapshot: a job that is taken out afterwards is still in it."""
    pending, suspect, _, unplaced, searched = shelf.fill(shelf.double)
    listed = iter(shelf.backlog)
    shelf.backlog.take()
    assert list(listed) == [pending, suspect, unplaced, searched]


def test_delayed_jobs_come_out_in_the_order_of_their_times(shelf: Shelf):
    """A job is due at its very time; of jobs with one time the first delayed comes first."""
    late, soon, later, also_soon = (job_of() for _ in range(4))
    for job, due in ((late, 30.0), (soon, 10.0), (later, 40.0), (also_soon, 10.0)):
        shelf.backlog.delay(shelf.double, job, due)
    assert shelf.backlog.next_due == 10.0
    assert shelf.backlog.take_due(9.9) == []
    assert shelf.backlog.take_due(10.0) == [(soon, shelf.double), (also_soon, shelf.double)]
    assert shelf.backlog.next_due == 30.0
    assert [job for job, _ in shelf.backlog.take_due(inf)] == [late, later]
    assert shelf.backlog.next_due == inf


def test_a_delayed_job_that_is_taken_out_leaves_the_others_in_order(shelf: Shelf):
    """The first due job goes, and the next time is that of the next one."""
    jobs = [job_of() for _ in range(7)]
    for job, due in zip(jobs, (1.0, 5.0, 2.0, 7.0, 6.0, 3.0, 4.0), strict=True):
        shelf.backlog.delay(shelf.double, job, due)
    shelf.backlog.take(lambda job: job in (jobs[0], jobs[1]))
    assert shelf.backlog.next_due == 2.0
    assert [job for job, _ in shelf.backlog.take_due(inf)] == [jobs[index] for index in (2, 5, 6, 4, 3)]


def test_the_jobs_of_a_model_leave_without_its_delayed_ones(shelf: Shelf):
    """A paused model gives back the jobs that could run now; a pause between two tries goes on, as do other models."""
    pending, suspect, delayed, unplaced, searched = shelf.fill(shelf.double)
    others = shelf.fill(shelf.other)
    taken = shelf.backlog.take_models(frozenset({"double"}))
    assert [each.job for each in taken] == [pending, suspect, unplaced, searched]
    assert shelf.rooms == (0, 2)
    assert [each.job for each in shelf.backlog.take()] == [others[0], others[1], delayed, *others[2:]]


def test_a_version_gives_up_its_pending_jobs_and_suspects(shelf: Shelf):
    """Jobs of other versions stay, and so do unplaced jobs."""
    pending, suspect, *_ = shelf.fill(shelf.double)
    shelf.fill(shelf.other)
    assert shelf.backlog.take_version(shelf.double) == [Waiting(pending, shelf.double), Waiting(suspect, shelf.double)]
    assert shelf.rooms == (0, 2)
    assert shelf.backlog.searched == 2


@pytest.mark.parametrize("state", list(VersionState))
def test_suspects_are_stranded_where_nothing_loads_their_version(state: VersionState):
    """They are while it is cold or failed; while it loads or is ready they wait on."""
    version = cold_version(spec_of(), 4)
    backlog, job = Backlog(deque([version])), job_of(crashes=1)
    backlog.add_suspect(version, job)
    version.state = state
    is_stranded = state in (VersionState.COLD, VersionState.FAILED)
    assert backlog.take_stranded() == ([(job, version)] if is_stranded else [])
    assert version.queue.in_memory == backlog.suspects == (0 if is_stranded else 1)


def test_expired_jobs_keep_their_room_until_they_end(shelf: Shelf):
    """A job expires after its time, not at it; jobs of other versions are not looked at."""
    early, late = job_of(expires_ms=10), job_of(expires_ms=11)
    shelf.backlog.add(shelf.double, [early, late])
    shelf.backlog.add(shelf.other, [job_of(model="other", expires_ms=1)])
    assert shelf.backlog.take_expired(shelf.double, 10.0) == []
    assert shelf.backlog.take_expired(shelf.double, 11.0) == [Waiting(early, shelf.double)]
    assert shelf.rooms == (2, 1)


def test_suspects_and_sought_jobs_expire_as_pending_ones_do(shelf: Shelf):
    """Those of the version whose time has passed; they keep their room, and the others stay where they are."""
    late = [job_of(crashes=crashes, expires_ms=10) for crashes in (0, 1, 0)]
    sound = [job_of(crashes=crashes, expires_ms=11) for crashes in (0, 1, 0)]
    others = [job_of(model="other", crashes=crashes, expires_ms=1) for crashes in (0, 1, 0)]
    for version, (pending, suspect, sought) in (
        (shelf.double, late),
        (shelf.double, sound),
        (shelf.other, others),
    ):
        shelf.backlog.add(version, [pending])
        shelf.backlog.add_suspect(version, suspect)
        shelf.backlog.add_sought(version, [sought])
    assert shelf.backlog.take_expired(shelf.double, 10.0) == []
    assert shelf.backlog.take_expired(shelf.double, 11.0) == [Waiting(job, shelf.double) for job in late]
    assert shelf.rooms == (6, 3)
    assert sorted(map(id, shelf.backlog)) == sorted(map(id, [*sound, *others]))


def test_suspects_run_in_the_order_in_which_they_came(shelf: Shelf):
    """One that could not run yet goes behind the others."""
    first, second = job_of(crashes=1), job_of(crashes=1)
    for job in (first, second):
        shelf.backlog.add_suspect(shelf.double, job)
    assert shelf.backlog.pop_suspect() == (shelf.double, first)
    shelf.backlog.add_suspect(shelf.double, first)
    assert shelf.rooms == (2, 0), "it had its room already"
    assert [shelf.backlog.pop_suspect()[1] for _ in range(2)] == [second, first]
    with pytest.raises(IndexError):
        shelf.backlog.pop_suspect()


@pytest.mark.parametrize("state", list(VersionState))
def test_a_suspect_can_run_where_its_version_is_loaded(state: VersionState):
    """Another one, whose version is not, changes nothing."""
    version, other = ready_version(), cold_version(spec_of(name="other"), 4)
    backlog = Backlog(deque([other, version]))
    backlog.add_suspect(other, job_of(model="other", crashes=1))
    assert not backlog.has_ready_suspects
    backlog.add_suspect(version, job_of(crashes=1))
    version.state = state
    assert backlog.has_ready_suspects is version.is_ready
    assert version.is_ready is (state is VersionState.READY)


def test_a_search_looks_at_new_unplaced_jobs_and_now_and_then_at_all(shelf: Shelf):
    """Jobs for which a search found no worker come out only when asked for, behind the new ones."""
    new, searched = [job_of(), job_of()], [job_of()]
    shelf.backlog.add_unplaced(searched, is_searched=True)
    shelf.backlog.add_unplaced(new)
    assert (shelf.backlog.searched, shelf.backlog.has_unplaced) == (1, True)
    assert shelf.backlog.take_unplaced(with_searched=False) == new
    assert shelf.backlog.has_unplaced
    shelf.backlog.add_unplaced(new)
    assert shelf.backlog.take_unplaced(with_searched=True) == [*new, *searched]
    assert (shelf.backlog.searched, shelf.backlog.has_unplaced) == (0, False)
