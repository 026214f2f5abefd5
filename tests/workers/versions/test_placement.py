"""Where a job goes that names a version: to the version here, to another worker, or to its failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from penstock.registry.broker.base import Delivery
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.deployment import Deployment
from penstock.registry.envelope import Failure, JobHeader
from penstock.registry.package import load_package
from penstock.registry.queues import Priority, new_job_id
from penstock.registry.settings_sections import InferenceConfig
from penstock.safety.operator_key import OperatorKey, PublicKeys
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.versions.deployment_store import NullDeploymentStore
from penstock.workers.versions.lifecycle import ModelLifecycle
from penstock.workers.versions.loader import Loader
from penstock.workers.versions.peers import Peers
from penstock.workers.versions.placement import Placement
from penstock.workers.versions.repository import DiskRepository
from penstock.workers.versions.tuner import NullTuner
from penstock.workers.versions.version import ServedVersion
from tests.packages import write_package

MODEL = "scale"
MOST_WAITING = 2
SOURCE = """
def build():
    return lambda inputs: {"y": inputs["x"]}
"""


def job_for(wanted: str) -> ClaimedJob:
    """A claimed job that names this version."""
    header = JobHeader(new_job_id(MODEL), "acme", MODEL, "normal", (), wanted)
    return ClaimedJob(Delivery(MODEL, Priority.NORMAL, b"1-1", b""), header, b"", 1, 0.0, 0.0, 0)


class Stage:
    """The versions 1 and 2 of a model under the models root, of which 2 is active, and the reports of other workers."""

    def __init__(self, root: Path, *, memory_mb: int = 0, operator: OperatorKey | None = None) -> None:
        self.now = 100.0
        self.broker = MemoryBroker(self.clock)
        for label in ("1", "2"):
            folder = write_package(root, MODEL, SOURCE, version=label)
            document = yaml.safe_load((folder / "model.yaml").read_text())
            (folder / "model.yaml").write_text(yaml.safe_dump(document | {"memory_mb": 10}))
        self.lifecycle = ModelLifecycle(
            InferenceConfig.model_validate({"model_memory_mb": memory_mb}),
            [load_package(root / MODEL / "2", (root,))],
            self.broker,
            Loader("cpu", 1),
            repository=DiskRepository(root, [root]),
            tuner=NullTuner(),
            metrics=InferenceMetrics((0.1, 1.0)),
            verify=PublicKeys.parse(operator.public_text).verify if operator else None,
            on_version_change=lambda *_: None,
            ring=lambda: None,
            accepts_new_models=False,
            deployments=NullDeploymentStore(),
        )
        self.placement = Placement(
            self.lifecycle, Peers(self.broker, "here", self.clock), self.clock, most_waiting=MOST_WAITING
        )

    def clock(self) -> float:
        return self.now

    def version(self, label: str) -> ServedVersion:
        """A version that is under the models root."""
        version = self.lifecycle.named(MODEL, label)
        assert version is not None
        return version

    def other_worker(self, *labels: str) -> None:
        """Another worker reports that it offers these versions, each with a content of its own."""
        versions = {label: {"content_hash": label * 64, "is_offered": True} for label in labels}
        report = {"name": "there", "ready": True, "versions": {MODEL: versions}}
        self.broker.report("there", json.dumps(report).encode(), 60_000)
        self.placement.look()

    def find(self, wanted: str, *, waiting: int = 0) -> ServedVersion | str | Failure | None:
        """The place of a job that names this version."""
        return self.placement.find(job_for(wanted), waiting=waiting)

    def find_at_last(self, wanted: str) -> str:
        """Search until the search has lasted long enough; returns the message of the failure."""
        found = self.find(wanted)
        assert found is None
        for _ in range(4):
            self.now += 1.0
            self.placement.look()
            found = self.find(wanted)
        assert isinstance(found, Failure)
        assert found.code == "ModelError"
        return found.message


def test_a_job_waits_for_a_version_that_can_be_loaded_here(models_root: Path):
    """The version is returned as it is, not loaded yet; other workers that have it are not considered."""
    stage = Stage(models_root)
    stage.other_worker("1")
    assert stage.find("1") is stage.version("1")


def test_a_job_of_a_full_version_goes_to_another_worker(models_root: Path):
    """As many jobs wait as the version may hold: the job is handed over under the version's label."""
    stage = Stage(models_root)
    queue = stage.version("1").queue
    queue.in_memory = queue.capacity
    assert stage.find("1") == "1"
    queue.in_memory -= 1
    assert stage.find("1") is stage.version("1")


def test_a_job_goes_to_the_worker_that_has_its_content(models_root: Path):
    """A job may name the beginning of a content hash: it is handed over under the label of that version."""
    stage = Stage(models_root)
    stage.other_worker("7")
    assert (stage.find("7"), stage.find("77777777")) == ("7", "7")


def test_a_version_that_no_worker_reports_fails_its_jobs_at_last(models_root: Path):
    """The job waits at first; the failure lists the versions of this worker and of the others."""
    stage = Stage(models_root)
    stage.other_worker("7")
    message = stage.find_at_last("9")
    assert message == "Version 9 is not served by any live worker. Expected one of: 2, 7"


def test_jobs_fail_at_once_while_too_many_wait(models_root: Path):
    """The bound is the number of jobs that may wait; a job for a reported version is still handed over."""
    stage = Stage(models_root)
    stage.other_worker("7")
    assert stage.find("9", waiting=MOST_WAITING) is None
    assert isinstance(stage.find("9", waiting=MOST_WAITING + 1), Failure)
    assert stage.find("7", waiting=MOST_WAITING + 1) == "7"


def test_a_version_that_failed_here_is_looked_for_elsewhere(models_root: Path):
    """Its jobs go to a worker that has it; without one they fail with the reason of the load."""
    stage = Stage(models_root)
    stage.version("1").has_failed("scale/1: model.py has no build")
    assert stage.find_at_last("1") == "Version 1 cannot be loaded. scale/1: model.py has no build"
    stage.now += 1.0
    stage.other_worker("1")
    assert stage.find("1") == "1"


def test_a_version_without_memory_is_loaded_here_only_if_no_other_worker_has_it(models_root: Path):
    """Beside the loaded active version it exceeds the limit: another worker takes the job, else this one makes room."""
    stage = Stage(models_root, memory_mb=15)
    stage.version("2").runtime.load("cpu", 1)
    stage.version("2").has_loaded()
    assert not stage.lifecycle.offers.is_offered(stage.version("1"))
    assert stage.find("1") is stage.version("1")
    stage.other_worker("1")
    assert stage.find("1") == "1"


def test_a_version_that_no_operator_approved_is_not_loaded(models_root: Path, tmp_path: Path):
    """After a signed promotion the failure says that the content was not registered, promoted or requested."""
    operator = OperatorKey.generate(tmp_path / "operator.pem")
    stage = Stage(models_root, operator=operator)
    model = stage.lifecycle.models[MODEL]
    stage.lifecycle.follow(model, b"1 " + Deployment(1, MODEL, "2", "").seal(operator.sign))
    message = stage.find_at_last("1")
    assert "no operator has registered, promoted or requested this content. Expected one of: 2" in message


@pytest.mark.parametrize("length", [8, 500])
def test_a_failure_quotes_a_bounded_name(models_root: Path, length: int):
    """A job may name anything: the message holds at most 80 characters of it."""
    failure = Stage(models_root).placement.not_served(job_for("9" * length))
    assert failure.message.count("9") == min(80, length)


def test_waiting_jobs_are_searched_again_four_times_a_second(models_root: Path):
    """Between two searches `look` says that there is nothing to do."""
    stage = Stage(models_root)
    answers = []
    for _ in range(9):
        answers.append(stage.placement.look())
        stage.now += 0.125
    assert answers == [True, False] * 4 + [True]
