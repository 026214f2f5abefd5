"""A worker in touch with its broker: it renews what it has and takes over from the dead."""

from __future__ import annotations

from pathlib import Path

from penstock.registry.broker.base import State
from penstock.workers.versions.version import VersionState
from tests.packages import write_double
from tests.workers.stepped import (
    open_harness,
)


def test_a_worker_that_loads_what_answers_stays_in_touch(models_root: Path):
    """With a lease of a second: it takes over from the dead as soon as it can serve, not a lease after that."""
    write_double(models_root)
    for harness in open_harness(models_root, queue={"lease_s": 1.0}):
        harness.start_worker()
        harness.pass_time(2.0)
        (job,) = harness.publish("double", 3)
        harness.workers[0].turn(2)
        dead = harness.workers[0]
        worker = harness.start_worker()
        harness.crash(dead)
        version = worker.drain.lifecycle.models["double"].active
        assert version is not None
        version.state = VersionState.LOADING
        harness.pass_time(3.0)
        assert harness.state(job) is State.QUEUED
        version.state = VersionState.READY
        harness.pass_time(0.5)
        assert worker.forward() == [job]
