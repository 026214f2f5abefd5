"""Which answers are kept for later jobs, and which of them still count.

For whole workers see test_cached_answers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.registry.broker.base import Delivery
from penstock.registry.envelope import Failure, JobHeader
from penstock.registry.queues import Priority, new_job_id
from penstock.registry.settings_sections import CacheConfig
from penstock.registry.tensors import Tensor
from penstock.workers.cache import AnswerCache
from penstock.workers.job import ClaimedJob
from penstock.workers.results import EncodedOutputs, How, JobOutcome
from penstock.workers.versions.version import ServedVersion
from tests.workers.doubles import run_of, version_of
from tests.workers.levels.fake_model import Clock, Rotation


@pytest.fixture
def clock() -> Clock:
    """Monotonic seconds that the test sets."""
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> AnswerCache:
    """An empty cache."""
    return AnswerCache(CacheConfig(), clock)


@pytest.fixture
def version(clock: Clock) -> ServedVersion:
    """A loaded version whose answers may be cached."""
    return loaded(clock)


def loaded(clock: Clock, **spec: Any) -> ServedVersion:
    """A loaded version of the model `rotation`."""
    runtime = Rotation(clock, {}, **spec)
    return version_of(runtime, runtime.spec, 8)


def job(digest: bytes = b"digest", *, named: str = "", reply: str = "", tenant: str = "acme") -> ClaimedJob:
    """A claimed job. Jobs with one digest are equal."""
    header = JobHeader(new_job_id("rotation"), tenant, "rotation", "normal", (), named, reply=reply)
    return ClaimedJob(
        Delivery("rotation", Priority.NORMAL, b"1-1", b""), header, b"", 1, 0.0, 0.0, 0, known_digest=digest
    )


def answer_of(version: ServedVersion) -> EncodedOutputs:
    """An answer that the version gives in its present form."""
    return EncodedOutputs((Tensor("y", "float32", (1, 4)),), b"1234", version.content_hash, version.generation)


def find(cache: AnswerCache, job: ClaimedJob, version: ServedVersion) -> EncodedOutputs | None:
    """The cached answer to one job."""
    return cache.find_all([job], version)[0]


def ran(
    version: ServedVersion, answer: EncodedOutputs | None = None, *, named: str = "", digest: bytes = b"digest"
) -> JobOutcome:
    """The end of a job that had a forward."""
    return JobOutcome(job(digest, named=named), answer or answer_of(version), "ran", version)


def test_an_equal_job_finds_the_answer_of_a_forward(cache: AnswerCache, version: ServedVersion):
    """The bytes are given as they were encoded; a job with another digest finds nothing."""
    outcome = ran(version)
    cache.keep(outcome, version)
    assert find(cache, job(), version) is outcome.answer
    assert find(cache, job(b"another"), version) is None


def test_a_hit_counts_as_use_of_the_version(cache: AnswerCache, version: ServedVersion, clock: Clock):
    """The memory limit unloads the least recently used version: a version whose answers are asked for is in use."""
    cache.keep(ran(version), version)
    clock.now = 7.0
    find(cache, job(b"another"), version)
    assert version.used_at == 0.0
    find(cache, job(), version)
    assert version.used_at == 7.0


def test_only_encoded_answers_of_forwards_are_kept(cache: AnswerCache, version: ServedVersion, clock: Clock):
    """Followers and cached answers repeat an answer, a failure may be temporary, and a job without a digest is equal
    to none."""
    answer = answer_of(version)
    hows: list[How] = ["followed", "cached", "refused"]
    for how in hows:
        cache.keep(JobOutcome(job(), answer, how, version), version)
    cache.keep(JobOutcome(job(), Failure("ModelError", "not today"), "ran", version), version)
    cache.keep(JobOutcome(job(b""), answer, "ran", version), version)
    cache.keep(JobOutcome(job(), answer, "ran", None), version)
    uncached = loaded(clock, policy={"default": {"cache_ttl_s": 0.0}})
    cache.keep(ran(uncached), uncached)
    assert len(cache.memory) == 0


@pytest.mark.parametrize(("named", "is_kept"), [("", False), ("1", True)])
def test_a_former_versions_answer_is_kept_for_jobs_that_name_it(
    cache: AnswerCache, version: ServedVersion, clock: Clock, named: str, is_kept: bool
):
    """Its batch ended after another version was activated; jobs without a name will get the other one."""
    other = loaded(clock, version="2")
    cache.keep(ran(version, named=named), other)
    assert (find(cache, job(), version) is not None) is is_kept


def _other_form(version: ServedVersion) -> None:
    forms = version.model.forms
    assert forms is not None
    forms.use("other", forms.reference)


def _unloaded(version: ServedVersion) -> None:
    version.model = version.model._replace(content_hash="")


def _other_content(version: ServedVersion) -> None:
    version.model = version.model._replace(content_hash="cd" * 32)


@pytest.mark.parametrize("change", [_other_form, _unloaded, _other_content])
def test_an_answer_counts_for_its_content_and_form(
    cache: AnswerCache, version: ServedVersion, change: Callable[[ServedVersion], None]
):
    """After a change it is not given, and an answer from before the change is not kept."""
    before = answer_of(version)
    cache.keep(ran(version), version)
    change(version)
    assert find(cache, job(), version) is None
    cache.memory.forget(before.content_hash)
    cache.keep(ran(version, before), version)
    assert len(cache.memory) == 0


def test_an_answer_ends_with_the_lifetime_of_its_model(cache: AnswerCache, clock: Clock):
    """The lifetime in the package replaces the setting's."""
    version = loaded(clock, policy={"default": {"cache_ttl_s": 5.0}})
    cache.keep(ran(version), version)
    clock.now = 4.5
    assert find(cache, job(), version) is not None
    clock.now = 5.0
    assert find(cache, job(), version) is None


def test_lookups_are_counted_until_they_are_taken(cache: AnswerCache, version: ServedVersion):
    """By model and by whether there was a hit; each look-up is taken once."""
    cache.keep(ran(version), version)
    for digest in (b"digest", b"another", b"digest"):
        find(cache, job(digest), version)
    assert cache.take_accesses() == {
        ("rotation", "1", "", "acme", "l1", True): 2,
        ("rotation", "1", "", "acme", "l1", False): 1,
    }
    assert cache.take_accesses() == {}


def test_answers_of_a_claim_are_found_in_its_order(cache: AnswerCache, version: ServedVersion, clock: Clock):
    """Hits, misses and an answer of other content beside each other; look-ups are counted by reply and tenant."""
    kept = {digest: ran(version, digest=digest) for digest in (b"1", b"3")}
    for outcome in kept.values():
        cache.keep(outcome, version)
    old = EncodedOutputs((), b"old", "ef" * 32, version.generation)
    cache.memory.put(b"4", old, 60.0)
    clock.now = 3.0
    found = cache.find_all([job(b"2"), job(b"1"), job(b"4"), job(b"3"), job(b"1")], version)
    assert found == [None, kept[b"1"].answer, None, kept[b"3"].answer, kept[b"1"].answer]
    assert version.used_at == 3.0
    assert cache.take_accesses() == {
        ("rotation", "1", "", "acme", "l1", True): 3,
        ("rotation", "1", "", "acme", "l1", False): 2,
    }
    cache.find_all([job(b"1", reply="a"), job(b"2", reply="b"), job(b"3", reply="a")], version)
    assert cache.take_accesses() == {
        ("rotation", "1", "a", "acme", "l1", True): 2,
        ("rotation", "1", "b", "acme", "l1", False): 1,
    }
    cache.find_all([job(b"1", tenant="one"), job(b"2", tenant="two")], version)
    assert cache.take_accesses() == {
        ("rotation", "1", "", "one", "l1", True): 1,
        ("rotation", "1", "", "two", "l1", False): 1,
    }


def _inactive(version: ServedVersion) -> None:
    """Another version is active; see the test."""


def _uncached(version: ServedVersion) -> None:
    version.policy = replace(version.policy, cache_ttl_s=0.0)


@pytest.mark.parametrize("change", [_other_form, _unloaded, _other_content, _inactive, _uncached])
def test_a_run_is_kept_as_a_whole_where_each_of_its_answers_would_be(
    cache: AnswerCache, version: ServedVersion, change: Callable[[ServedVersion], None]
):
    """Its version is still active, and answers in the same form with the same content; see `keep`."""
    run = run_of(version, job())
    assert cache.keeps(run, version)
    cache.keep_all([(job(), answer_of(version))], run)
    assert find(cache, job(), version) == answer_of(version)
    cache.keep_alike([job(b"1"), job(b"2")], [answer_of(version)] * 2, run)
    assert [find(cache, job(key), version) for key in (b"1", b"2")] == [answer_of(version)] * 2
    change(version)
    assert not cache.keeps(run, None if change is _inactive else version)
