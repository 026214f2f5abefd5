"""The last levels of the fallback chain: the version that a model's policy names, and an error that tells every level.

    form -> micro-batch -> parts of it    Forms and the executor, within one run
    a job failed in all of them -> fallen_back: it goes on to the version of the policy, as a job of that version
    that failed, too, or there is none -> with_levels: the error of the job names every level and its reason

Pure: the completer and the drain carry it out. A job that names a version has that version or an error.
"""

from __future__ import annotations

from penstock.registry.broker.base import State
from penstock.registry.envelope import Failure
from penstock.safety.fallback import LevelFailure, exhausted
from penstock.workers.job import FellBack
from penstock.workers.results import JobOutcome

__all__ = ["fallen_back", "with_levels"]


def fallen_back(outcome: JobOutcome) -> FellBack | None:
    """How the job of this outcome goes on to the version of its policy; None: the outcome stands.

    A job falls back once. A forward over its limit has ended its process, so it is not run again.
    """
    job, run, version, failure = outcome.job, outcome.run, outcome.version, outcome.failure
    if failure is None or run is None or version is None or not version.policy.fallback_version:
        return None
    if outcome.how != "ran" or outcome.state is not State.FAILED or run.is_given_up or version.spec.streams:
        return None
    if job.fell_back is not None or job.header.version or job.is_lost or job.is_cancelled:
        return None
    failures = (*run.failures, LevelFailure("plain", failure.message))
    if version.policy.chain.next([each.level for each in failures]) != "fallback":
        return None
    return FellBack(version.label, failures)


def with_levels(outcome: JobOutcome) -> JobOutcome:
    """The same outcome; its error names every level, where others than the model as its author built it had failed.

    A bad job fails in its micro-batch and alone, with the same error: that text does not depend on its neighbours.
    """
    job, run, failure = outcome.job, outcome.run, outcome.failure
    if failure is None or outcome.state is not State.FAILED or (run is not None and run.is_given_up):
        return outcome
    before = job.fell_back.failures if job.fell_back is not None else run.failures if run is not None else ()
    if all(each.level == "micro-batched" for each in before):
        return outcome
    if before[-1].level != "fallback":
        before = [*before, LevelFailure("plain" if job.fell_back is None else "fallback", failure.message)]
    message = f"{failure.message}. {exhausted(before)}"
    told = Failure(failure.code, message, failure.where, failure.traceback)
    return JobOutcome(job, told, outcome.how, outcome.version, run)
