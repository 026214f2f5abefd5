"""The interface between the drain and Celery: which steps of its jobs a listener is told of, and how often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from penstock.registry.admission import JobBuilder, SubmitOptions
from penstock.registry.broker.base import State
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import JobHeader, Retry
from penstock.registry.package import load_package
from penstock.registry.settings import Settings
from penstock.workers.assembly import DrainOptions, build_drain
from penstock.workers.drain import Drain
from penstock.workers.observe.listener import Ended, Failed, JobListener, NullListener
from penstock.workers.observe.metrics import InferenceMetrics
from tests.packages import write_raiser
from tests.workers.stepped import LIMITS, UNSIGNED


class Steps(NullListener):
    """A listener that notes each call; it revokes the jobs in `revoked`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.ended: list[Ended] = []
        self.failed: list[Failed] = []
        self.asked: list[str] = []
        self.revoked: set[str] = set()

    def received(self, jobs: Sequence[JobHeader], at: float) -> None:
        self.calls.append(("received", [job.id for job in jobs]))

    def started(self, jobs: Sequence[JobHeader], at: float) -> None:
        self.calls.append(("started", [job.id for job in jobs]))

    def finished(self, ended: Sequence[Ended], at: float) -> None:
        self.calls.append(("finished", [each.header.id for each in ended]))
        self.ended += ended

    def retried(self, failed: Sequence[Failed], at: float) -> None:
        self.calls.append(("retried", [each.header.id for each in failed]))
        self.failed += failed

    has_revoked = True

    def is_revoked(self, job_id: str) -> bool:
        self.asked.append(job_id)
        return job_id in self.revoked


class Stage:
    """A worker whose drain the test steps. Its model raises for rows that begin with a negative number."""

    def __init__(self, root: Path, listener: JobListener) -> None:
        package = load_package(write_raiser(root))
        self.spec = package.spec
        self.broker = MemoryBroker()
        self.end = self.broker.connect()
        self.drain: Drain = build_drain(
            Settings.load(overrides={"home": str(root)}, environ={}),
            self.end,
            [package],
            DrainOptions(name="w", device="cpu", threads=1, listener=listener, metrics=InferenceMetrics((1.0,))),
        )
        self.drain.load()

    def publish(self, *numbers: float, retry: Retry | None = None) -> list[str]:
        """One job for each number; returns their ids."""
        builder = JobBuilder(tenant="acme", keyring=UNSIGNED, max_bytes=1 << 20)
        options = SubmitOptions(retry=retry)
        jobs = [builder.build(self.spec, {"x": [[number, 0, 0, 0]]}, options) for number in numbers]
        self.broker.publish("raiser", jobs, LIMITS)
        return [job.job_id for job in jobs]

    def step(self, turns: int = 3) -> None:
        """Turns of the loop, and the forwards that they lead to."""
        for _ in range(turns):
            self.drain.step(0.0)
            while (run := self.drain.parts.executor.begin("a")) is not None:
                self.drain.parts.executor.run(run)
                self.drain.parts.executor.finish("a", run)


@pytest.fixture
def steps() -> Steps:
    """A listener that notes its calls."""
    return Steps()


@pytest.fixture
def stage(models_root: Path, steps: Steps) -> Iterator[Stage]:
    """A worker with that listener."""
    stage = Stage(models_root, steps)
    yield stage
    stage.end.close()


def test_each_step_is_told_once_for_a_batch(stage: Stage, steps: Steps):
    """Jobs of one batch are received, started and finished together, and each is asked about once."""
    jobs = stage.publish(1, 2, 3)
    stage.step()
    assert steps.calls == [("received", jobs), ("started", jobs), ("finished", jobs)]
    assert steps.asked == jobs


def test_an_end_names_state_version_and_error(stage: Stage, steps: Steps):
    """Each job of a batch has its own end."""
    stage.publish(1, -1)
    stage.step()
    by_state = {each.state: each for each in steps.ended}
    completed, failed = by_state[State.COMPLETED], by_state[State.FAILED]
    assert (completed.error, completed.version, failed.version) == (None, "1", "1")
    assert failed.error is not None
    assert "a negative row" in failed.error.message


def test_a_job_that_will_run_again_is_retried_and_not_finished(stage: Stage, steps: Steps):
    """The listener learns the error of the try; the end comes with the last one."""
    (job,) = stage.publish(-1, retry=Retry(attempts=2, backoff_s=600, longest_s=600))
    stage.step()
    assert steps.calls == [("received", [job]), ("started", [job]), ("retried", [job])]
    (failed,) = steps.failed
    assert (failed.header.id, failed.error.code) == (job, "ModelError")


def test_a_revoked_job_is_finished_without_a_start(stage: Stage, steps: Steps):
    """It ends as cancelled; the other jobs of the claim run."""
    revoked, other = stage.publish(1, 2)
    steps.revoked.add(revoked)
    stage.step()
    assert ("started", [other]) in steps.calls
    assert {each.header.id: each.state for each in steps.ended} == {
        revoked: State.CANCELLED,
        other: State.COMPLETED,
    }


def test_without_a_listener_no_job_is_revoked(models_root: Path):
    """NullListener takes every call: jobs run as they would without Celery."""
    listener = NullListener()
    stage = Stage(models_root, listener)
    jobs = stage.publish(1, -1)
    stage.step()
    states = [record.state for job in jobs if (record := stage.broker.job_record(job)) is not None]
    assert states == [State.COMPLETED, State.FAILED]
    assert not listener.is_revoked(jobs[0])
    stage.end.close()
