"""Which answers are kept for later jobs, and which of them still count.

For whole workers see test_cached_answers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.registry.broker.base import Delivery
from penstock.registry.envelope import Failure, JobHeader
from penstock.registry.queues import Priority, new_job_id
from penstock.registry.settings import CacheConfig
from penstock.registry.tensors import Tensor
from penstock.workers.cache import AnswerCache
from penstock.workers.job import ClaimedJob
from penstock.workers.results import EncodedOutputs, How, JobOutcome
from penstock.workers.versions.version import ServedVersion
from tests.workers.doubles import version_of
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


def job(digest: bytes = b"digest", *, named: str = "") -> ClaimedJob:
    """A claimed job. Jobs with one digest are equal."""
    header = JobHeader(new_job_id("rotation"), "acme", "rotation", "normal", (), named)
    return ClaimedJob(Delivery("rotation", Priority.NORMAL, b"1-1", b""), header, {}, 1, 0.0, 0.0, 0, digest)


def answer_of(version: ServedVersion) -> EncodedOutputs:
    """An answer that the version gives in its present form."""
    return EncodedOutputs((Tensor("y", "float32", (1, 4)),), b"1234", version.content_hash, version.generation)


def ran(version: ServedVersion, answer: EncodedOutputs | None = None, *, named: str = "") -> JobOutcome:
    """The end of a job that had a forward."""
    return JobOutcome(job(named=named), answer or answer_of(version), "ran", version)


def test_an_equal_job_finds_the_answer_of_a_forward(cache: AnswerCache, version: ServedVersion):
    """The bytes are given as they were encoded; a job with another digest finds nothing."""
    outcome = ran(version)
    cache.keep(outcome, version)
    assert cache.find(job(), version) is outcome.answer
    assert cache.find(job(b"another"), version) is None


def test_a_hit_counts_as_use_of_the_version(cache: AnswerCache, version: ServedVersion, clock: Clock):
    """The memory limit unloads the least recently used version: a version whose answers are asked for is in use."""
    cache.keep(ran(version), version)
    clock.now = 7.0
    cache.find(job(b"another"), version)
    assert version.used_at == 0.0
    cache.find(job(), version)
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
    assert (cache.find(job(), version) is not None) is is_kept


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
    assert cache.find(job(), version) is None
    cache.memory.forget(before.content_hash)
    cache.keep(ran(version, before), version)
    assert len(cache.memory) == 0


def test_an_answer_ends_with_the_lifetime_of_its_model(cache: AnswerCache, clock: Clock):
    """The lifetime in the package replaces the setting's."""
    version = loaded(clock, policy={"default": {"cache_ttl_s": 5.0}})
    cache.keep(ran(version), version)
    clock.now = 4.5
    assert cache.find(job(), version) is not None
    clock.now = 5.0
    assert cache.find(job(), version) is None


def test_lookups_are_counted_until_they_are_taken(cache: AnswerCache, version: ServedVersion):
    """By model and by whether there was a hit; each look-up is taken once."""
    cache.keep(ran(version), version)
    for digest in (b"digest", b"another", b"digest"):
        cache.find(job(digest), version)
    assert cache.take_lookups() == {("rotation", "1", "", True): 2, ("rotation", "1", "", False): 1}
    assert cache.take_lookups() == {}
