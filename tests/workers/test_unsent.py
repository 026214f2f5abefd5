"""Large results on their way to the broker: in order, a bounded number of bytes at a time."""

from __future__ import annotations

import numpy as np

from penstock.registry.envelope import Failure
from penstock.workers.credit import TURN_BYTES
from penstock.workers.results import EncodedOutputs, JobOutcome
from penstock.workers.unsent import UnsentOutcomes, without_outputs
from penstock.workers.versions.version import ServedVersion
from tests.workers.doubles import job_of, ready_version, run_of


def _outcome(version: ServedVersion, nbytes: int) -> JobOutcome:
    job = job_of()
    return JobOutcome(job, {"y": np.zeros(nbytes, np.uint8)}, "ran", version, run_of(version, job))


def test_at_least_one_and_no_further_one_beyond_the_bytes():
    """In the order in which they came."""
    version, unsent = ready_version(), UnsentOutcomes()
    outcomes = [_outcome(version, nbytes) for nbytes in (60, 50, 30, 200, 10)]
    unsent.add(outcomes)
    assert [unsent.take(100) for _ in range(4)] == [outcomes[:1], outcomes[1:3], outcomes[3:4], outcomes[4:]]
    assert (unsent.take(100), len(unsent)) == ([], 0)


def test_a_version_knows_what_of_it_is_unsent():
    """Each version its own bytes; a failure has none."""
    one, other, unsent = ready_version(), ready_version(name="other"), UnsentOutcomes()
    failed = JobOutcome(job_of(), Failure("ModelError", "no"), "ran", one)
    unsent.add([_outcome(one, 60), _outcome(other, 50), failed, _outcome(one, 5)])
    assert (one.queue.unsent_bytes, other.queue.unsent_bytes) == (65, 50)
    unsent.take(60)
    assert (one.queue.unsent_bytes, other.queue.unsent_bytes) == (5, 50)
    unsent.take(TURN_BYTES)
    assert (one.queue.unsent_bytes, other.queue.unsent_bytes) == (0, 0)


def test_it_knows_the_batches_that_are_not_sent_whole():
    """Until their last result is taken."""
    version, unsent = ready_version(), UnsentOutcomes()
    first, second = outcomes = [_outcome(version, 10) for _ in range(2)]
    unsent.add(outcomes)
    assert first.run is not None
    assert second.run is not None
    unsent.take(10)
    assert (unsent.has(first.run), unsent.has(second.run)) == (False, True)
    assert unsent.take_all() == [second.job]
    assert not unsent.has(second.run)


def test_a_report_keeps_no_outputs():
    """A committed outcome without them: how it ended stays."""
    version = ready_version()
    outcome = _outcome(version, 100)
    kept = without_outputs(outcome)
    assert isinstance(kept.answer, EncodedOutputs)
    assert (kept.nbytes, kept.job, kept.run, kept.state) == (0, outcome.job, outcome.run, outcome.state)
    failed = JobOutcome(job_of(), Failure("ModelError", "no"), "ran", version)
    assert without_outputs(failed) is failed
