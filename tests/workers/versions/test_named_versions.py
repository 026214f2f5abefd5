"""Jobs that name a version which their worker does not have: another worker answers them, or they fail."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.registry.admission import SubmitOptions
from penstock.registry.broker.base import State
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import Failure
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.package import Package, find, load_package
from penstock.safety.operator_key import OperatorKey, PublicKeys
from penstock.workers.drain import Drain
from penstock.workers.versions import peers
from tests.packages import write_package
from tests.servers import wait_until
from tests.workers.test_drain import ROOMY
from tests.workers.versions.test_lifecycle import Stage, two_versions, write_scale


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """Versions 1 (x) and 2 (10 x) of a model."""
    monkeypatch.setattr(peers, "_LOOK_EVERY_S", 0.1)
    with two_versions(tmp_path, MemoryBroker().connect) as stage:
        yield stage


@pytest.fixture
def soon_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers decide after a shorter time that no worker has a version."""
    monkeypatch.setattr(peers, "_SURE_AFTER_S", 0.6)


def elsewhere(stage: Stage, *without: str) -> Path:
    """The models root of another machine, without these versions."""
    root = stage.root.parent / "elsewhere"
    shutil.copytree(stage.root, root)
    for version in without:
        shutil.rmtree(root / stage.model / version)
    return root


def ask_for(stage: Stage, *versions: str, number: float = 1.0, deadline_s: float | None = None) -> list[str]:
    """Submit a job for each named version, also for versions that no worker has; returns the ids."""
    known = load_package(find(stage.root, stage.model).path).spec
    jobs = []
    for version in versions:
        spec = known.model_copy(update={"version": version})
        options = SubmitOptions(version=version, deadline_s=deadline_s)
        jobs.append(stage._builder.build(spec, {"x": [[number, 0, 0, 0]]}, options))
    assert {receipt.outcome for receipt in stage.broker.publish(stage.model, jobs, ROOMY)} == {"accepted"}
    return [job.job_id for job in jobs]


def failure_of(stage: Stage, job_id: str) -> str:
    """The message of the job's failure."""
    _, failure = stage.result(job_id)
    assert isinstance(failure, Failure)
    return failure.message


def has_claimed(stage: Stage, drain: Drain, job_id: str) -> bool:
    """Whether the job is claimed and the worker has jobs in memory."""
    job_record = stage.broker.job_record(job_id)
    return bool(job_record and job_record.is_claimed and drain.health.readiness[1]["in_memory"])


def content_hash_of(package: Package) -> str:
    """The content hash that a promotion of the package names."""
    return package.manifest().content_hash


def test_a_job_goes_to_the_worker_that_has_its_version(stage: Stage):
    """A worker without the version claims it and hands it over; the hand-over counts as no attempt (IN-001)."""
    without = stage.start(root=elsewhere(stage, "1"))
    job_ids = [stage.submit(float(number), "1") for number in range(30)]
    wait_until(lambda: has_claimed(stage, without, job_ids[-1]), 5, "they are claimed where version 1 is not")
    having = stage.start()
    for number, job_id in enumerate(job_ids):
        header, value = stage.result(job_id)
        assert (header.version, header.worker, header.attempt, value) == ("1", having.name, 1, float(number))
    assert stage.answer(3.0) == ("2", 30.0)


@pytest.mark.usefixtures("soon_sure")
def test_a_version_that_no_worker_has_fails_the_jobs_that_name_it(stage: Stage):
    """The failure lists the served versions; the jobs do not circulate, and other jobs are answered meanwhile."""
    drains = [stage.start(root=elsewhere(stage, "1")), stage.start()]
    job_id = stage.submit(1.0, "2")
    assert stage.result(job_id)[1] == 10.0
    job_ids = ask_for(stage, *["3"] * 5)
    assert stage.answer() == ("2", 10.0)
    for job_id in job_ids:
        assert failure_of(stage, job_id).endswith("is not served by any live worker. Expected one of: 1, 2")
    assert all(drain.health.unhealthy_reason() is None for drain in drains)


def test_a_load_that_fails_here_does_not_fail_a_job_that_others_can_answer(stage: Stage):
    """One machine has a broken copy: its jobs go to the other machine."""
    root = elsewhere(stage, "1")
    write_package(root, stage.model, "def build():\n    raise ValueError('no weights')\n", version="1")
    broken = stage.start(root=root)
    job_id = stage.submit(2.0, "1")
    wait_until(lambda: stage.state("1", broken) == "failed", 5, "the load fails")
    having = stage.start()
    header, value = stage.result(job_id)
    assert (header.worker, value) == (having.name, 2.0)


def test_a_version_may_be_named_by_its_content_wherever_it_is(stage: Stage):
    """A job may name the first digits of the content hash of a version that only another worker has loaded."""
    without = stage.start(root=elsewhere(stage, "1"))
    package = load_package(find(stage.root, stage.model, "1").path)
    (job_id,) = ask_for(stage, content_hash_of(package)[:12], number=4.0)
    wait_until(lambda: has_claimed(stage, without, job_id), 5, "it is claimed where version 1 is not")
    having = stage.start()
    having.lifecycle.request_load(stage.model, "1")
    header, value = stage.result(job_id)
    assert (header.version, value) == ("1", 4.0)


def test_a_job_unloads_no_active_version_while_another_worker_has_its_version(stage: Stage):
    """Memory holds only the active version: a job for another version goes to the worker that has it loaded."""
    for version in ("1", "2"):
        file = stage.root / stage.model / version / "model.yaml"
        file.write_text(file.read_text() + "memory_mb: 10\n")
    full = stage.start(model_memory_mb=15)
    assert stage.answer(1.0, "1") == ("1", 1.0), "without another worker it is loaded"
    wait_until(lambda: stage.state("1", full) == "cold" or stage.state("2", full) == "cold", 5, "one is unloaded")
    assert stage.answer(1.0) == ("2", 10.0)
    wait_until(lambda: stage.state("1", full) == "cold", 5, "the other is unloaded")
    having = stage.start()
    having.lifecycle.request_load(stage.model, "1")
    wait_until(lambda: stage.state("1", having) == "ready", 5, "the other worker has it")

    def is_offered() -> bool:
        reports = [json.loads(each)["versions"][stage.model]["1"] for each in stage.broker.workers()]
        return any(report["is_offered"] for report in reports)

    wait_until(is_offered, 5, "and reports it")
    time.sleep(1.1)
    workers = {stage.result(stage.submit(1.0, "1"))[0].worker for _ in range(10)}
    assert workers == {having.name}
    assert stage.loads().count("1") == 2


@pytest.mark.usefixtures("soon_sure")
def test_jobs_load_only_content_that_operators_approved(stage: Stage, tmp_path: Path):
    """After a signed promotion, a job cannot load another version on disk before an operator requests it (S0.1)."""
    operator = OperatorKey.generate(tmp_path / "operator.pem")
    drain = stage.start(verify=PublicKeys.parse(operator.public_text).verify)
    stage.promote("2", epoch=1, sign=operator.sign)
    assert stage.answer() == ("2", 10.0)
    message = failure_of(stage, stage.submit(1.0, "1"))
    assert "no operator has registered, promoted or requested this content. Expected one of: 2" in message
    assert stage.loads() == ["2"]
    package = load_package(find(stage.root, stage.model, "1").path)
    drain.lifecycle.request_load(stage.model, "1", content_hash=content_hash_of(package))
    assert stage.answer(1.0, "1") == ("1", 1.0)
    drain.lifecycle.request_unload(stage.model, "1")
    wait_until(lambda: stage.state("1") == "cold", 5, "it is unloaded")
    source = stage.root / stage.model / "1" / "model.py"
    good = source.read_text()
    source.write_text(good.replace("* 1", "* 7"))
    assert "promoted" in failure_of(stage, stage.submit(1.0, "1")), "other content under its label"
    source.write_text(good)


@pytest.mark.usefixtures("soon_sure")
def test_jobs_load_content_that_operators_registered(stage: Stage, tmp_path: Path):
    """Registered content may be loaded for jobs, requested or not; its files may come after the record (S0.1)."""
    operator = OperatorKey.generate(tmp_path / "operator.pem")
    stage.promote("2", epoch=1, sign=operator.sign)
    drain = stage.start(verify=PublicKeys.parse(operator.public_text).verify)
    registered = content_hash_of(load_package(find(stage.root, stage.model, "1").path))
    write_scale(stage.root, stage.model, "1.5", 7)
    later = write_scale(stage.root.parent / "to come", stage.model, "1.7", 9)
    drain.lifecycle.request_unload(stage.model, "1.7", content_hash=content_hash_of(later))
    drain.lifecycle.request_unload(stage.model, "2", content_hash=registered)
    drain.lifecycle.request_unload(stage.model, "1", content_hash=registered)
    drain.lifecycle.request_unload(stage.model, "1.5", content_hash=registered)
    assert stage.answer(1.0, "1") == ("1", 1.0)
    assert "promoted" in failure_of(stage, stage.submit(1.0, "1.5")), "not the registered content"
    shutil.copytree(stage.root.parent / "to come" / stage.model / "1.7", stage.root / stage.model / "1.7")
    assert stage.answer(1.0, "1.7") == ("1.7", 9.0)
    assert stage.answer() == ("2", 10.0)
    assert drain.lifecycle.models[stage.model].versions["2"].pinned_hash != registered, (
        "only a promotion changes the active version"
    )


def test_before_a_promotion_jobs_may_name_every_version_on_disk(stage: Stage, tmp_path: Path):
    """This holds also where operators sign."""
    operator = OperatorKey.generate(tmp_path / "operator.pem")
    stage.start(verify=PublicKeys.parse(operator.public_text).verify)
    assert stage.answer(1.0, "1") == ("1", 1.0)


def test_a_job_whose_deadline_passes_while_its_version_loads_ends_in_time(stage: Stage):
    """It expires at its deadline, not at the end of the load."""
    write_scale(stage.root, stage.model, "0.1", 5, load_s=600)
    stage.start()
    (job_id,) = ask_for(stage, "0.1", deadline_s=3.0)
    stage.result(job_id)
    job_record = stage.broker.job_record(job_id)
    assert job_record is not None
    assert job_record.state is State.EXPIRED
    assert stage.state("0.1") == "loading"


def test_unplaced_jobs_are_released_at_a_stop(stage: Stage):
    """They wait for a worker that has their version; after the stop another worker claims them at once."""
    drain = stage.start(root=elsewhere(stage, "1"))
    job_id = stage.submit(5.0, "1")
    wait_until(lambda: has_claimed(stage, drain, job_id), 5, "it is claimed")
    drain.stop(1.0)
    job_record = stage.broker.job_record(job_id)
    assert job_record is not None
    assert (job_record.is_claimed, job_record.state) == (False, State.QUEUED)
    stage.start()
    assert stage.result(job_id)[1] == 5.0


@pytest.mark.usefixtures("soon_sure")
def test_a_flood_of_unknown_versions_delays_no_other_job(stage: Stage):
    """A thousand jobs each name another unknown version: a job that names none is answered soon."""
    stage.start()
    job_ids = ask_for(stage, *(f"no-{number}" for number in range(1000)))
    assert stage.answer() == ("2", 10.0)
    assert "not served by any live worker" in failure_of(stage, job_ids[-1])


def test_unreadable_reports_delay_no_other_job(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    """The worker may not read reports: the jobs that need them wait, and all other jobs are answered."""
    drain = stage.start(root=elsewhere(stage, "1"))

    def refuse() -> list[bytes]:
        raise BrokerUnavailable("The broker refuses to work: NOPERM")

    read = drain.parts.broker.workers
    monkeypatch.setattr(drain.parts.broker, "workers", refuse)
    job_id = stage.submit(5.0, "1")
    wait_until(lambda: has_claimed(stage, drain, job_id), 5, "it is claimed")
    assert [stage.answer(float(number))[1] for number in range(5)] == [10.0 * number for number in range(5)]
    monkeypatch.setattr(drain.parts.broker, "workers", read)
    stage.start()
    assert stage.result(job_id)[1] == 5.0


def test_invalid_reports_are_skipped(stage: Stage):
    """Any client of the broker may write a report: an invalid one harms no worker."""
    for number, report in enumerate((b"{", b"[]", b'{"versions": 3}', b'{"versions": {"m": {"1": null}}}', b"\xff")):
        stage.broker.report(f"stranger-{number}", report, 60_000)
    stage.start(root=elsewhere(stage, "1"))
    job_id = stage.submit(5.0, "1")
    having = stage.start()
    header, value = stage.result(job_id)
    assert (header.worker, value) == (having.name, 5.0)


def test_a_worker_without_the_active_version_offers_its_other_versions(stage: Stage, tmp_path: Path):
    """It serves other models, claims no jobs of this one, and takes over jobs that name the versions it has."""
    other = tmp_path / "other"
    content_hash = write_scale(other, stage.model, "1", 5).manifest().content_hash
    stage.promote("1", epoch=1, content_hash=content_hash)
    without = stage.start(write_scale(stage.root, f"{stage.model}-beside", "1", 1))
    stage.start(root=other)
    wait_until(lambda: stage.state("1", without) == "failed", 10, "it has other content under the label")
    assert stage.answer(3.0) == ("1", 15.0)
    assert stage.answer(3.0, "2") == ("2", 30.0)
