"""Jobs that name a version which the worker that claimed them has not: they go where it is, or end with a reason."""

from __future__ import annotations

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
from penstock.safety.keys import OperatorKey, PublicKeys
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
    """Workers soon believe that nobody has a version."""
    monkeypatch.setattr(peers, "_SURE_AFTER_S", 0.6)


def elsewhere(stage: Stage, *without: str) -> Path:
    """The models root of another machine, which has not got these versions."""
    root = stage.root.parent / "elsewhere"
    shutil.copytree(stage.root, root)
    for version in without:
        shutil.rmtree(root / stage.model / version)
    return root


def ask_for(stage: Stage, *versions: str, number: float = 1.0, deadline_s: float | None = None) -> list[str]:
    """A job for each version that it names, whoever may have that."""
    known = load_package(find(stage.root, stage.model).path).spec
    jobs = []
    for version in versions:
        spec = known.model_copy(update={"version": version})
        options = SubmitOptions(version=version, deadline_s=deadline_s)
        jobs.append(stage._builder.build(spec, {"x": [[number, 0, 0, 0]]}, options))
    assert {receipt.outcome for receipt in stage.broker.publish(stage.model, jobs, ROOMY)} == {"accepted"}
    return [job.job_id for job in jobs]


def failure_of(stage: Stage, job_id: str) -> str:
    """What a job failed with."""
    _, failure = stage.result(job_id)
    assert isinstance(failure, Failure)
    return failure.message


def has_claimed(stage: Stage, drain: Drain, job_id: str) -> bool:
    """Whether the job is in that worker's memory."""
    job_record = stage.broker.job_record(job_id)
    return bool(job_record and job_record.is_claimed and drain.readiness[1]["in_memory"])


def content_hash_of(package: Package) -> str:
    """What a promotion of it names."""
    return package.manifest().content_hash


def test_a_job_goes_to_the_worker_that_has_its_version(stage: Stage):
    """Claimed by one that has not, it is answered by one that has, and no attempt is counted (IN-001)."""
    without = stage.start(root=elsewhere(stage, "1"))
    job_ids = [stage.submit(float(number), "1") for number in range(30)]
    wait_until(lambda: has_claimed(stage, without, job_ids[-1]), 5, "they are claimed where version 1 is not")
    having = stage.start()
    for number, job_id in enumerate(job_ids):
        header, value = stage.result(job_id)
        assert (header.version, header.worker, header.attempt, value) == ("1", having.name, 1, float(number))
    assert stage.answer(3.0) == ("2", 30.0)


@pytest.mark.usefixtures("soon_sure")
def test_a_version_that_nobody_has_fails_the_jobs_that_name_it(stage: Stage):
    """With the versions that are served; it does not go round, and jobs beside it are answered meanwhile."""
    drains = [stage.start(root=elsewhere(stage, "1")), stage.start()]
    job_id = stage.submit(1.0, "2")
    assert stage.result(job_id)[1] == 10.0
    job_ids = ask_for(stage, *["3"] * 5)
    assert stage.answer() == ("2", 10.0)
    for job_id in job_ids:
        assert failure_of(stage, job_id).endswith("is not served by any live worker. Expected one of: 1, 2")
    assert all(drain.unhealthy_reason() is None for drain in drains)


def test_a_load_that_fails_here_does_not_fail_a_job_that_others_can_answer(stage: Stage):
    """A broken copy on one machine: its jobs go to the other."""
    root = elsewhere(stage, "1")
    write_package(root, stage.model, "def build():\n    raise ValueError('no weights')\n", version="1")
    broken = stage.start(root=root)
    job_id = stage.submit(2.0, "1")
    wait_until(lambda: stage.state("1", broken) == "failed", 5, "the load fails")
    having = stage.start()
    header, value = stage.result(job_id)
    assert (header.worker, value) == (having.name, 2.0)


def test_a_version_may_be_named_by_its_content_wherever_it_is(stage: Stage):
    """The beginning of the hash of a version that only another worker has loaded."""
    without = stage.start(root=elsewhere(stage, "1"))
    package = load_package(find(stage.root, stage.model, "1").path)
    (job_id,) = ask_for(stage, content_hash_of(package)[:12], number=4.0)
    wait_until(lambda: has_claimed(stage, without, job_id), 5, "it is claimed where version 1 is not")
    having = stage.start()
    having.lifecycle.request_load(stage.model, "1")
    header, value = stage.result(job_id)
    assert (header.version, value) == ("1", 4.0)


def test_a_job_does_not_push_out_what_a_worker_needs_while_another_has_its_version(stage: Stage):
    """model_memory_mb: there is no room beside the version that answers, and the job goes where it is loaded."""
    for version in ("1", "2"):
        file = stage.root / stage.model / version / "model.yaml"
        file.write_text(file.read_text() + "memory_mb: 10\n")
    full = stage.start(model_memory_mb=15)
    assert stage.answer(1.0, "1") == ("1", 1.0), "alone it makes room"
    wait_until(lambda: stage.state("1", full) == "cold" or stage.state("2", full) == "cold", 5, "one goes")
    assert stage.answer(1.0) == ("2", 10.0)
    wait_until(lambda: stage.state("1", full) == "cold", 5, "the other goes")
    having = stage.start()
    having.lifecycle.request_load(stage.model, "1")
    wait_until(lambda: stage.state("1", having) == "ready", 5, "the other worker has it")
    wait_until(lambda: any(b'"is_offered": true' in each for each in stage.broker.workers()), 5, "and says so")
    time.sleep(1.1)
    workers = {stage.result(stage.submit(1.0, "1"))[0].worker for _ in range(10)}
    assert workers == {having.name}
    assert stage.loads().count("1") == 2


@pytest.mark.usefixtures("soon_sure")
def test_jobs_have_nothing_loaded_that_the_operators_did_not_ask_for(stage: Stage, tmp_path: Path):
    """They sign, and have promoted a version: another that lies on the disk is theirs to load (S0.1)."""
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
    wait_until(lambda: stage.state("1") == "cold", 5, "it is let go of")
    source = stage.root / stage.model / "1" / "model.py"
    good = source.read_text()
    source.write_text(good.replace("* 1", "* 7"))
    assert "promoted" in failure_of(stage, stage.submit(1.0, "1")), "other content under its name"
    source.write_text(good)


@pytest.mark.usefixtures("soon_sure")
def test_jobs_have_loaded_what_operators_have_registered(stage: Stage, tmp_path: Path):
    """By content, wanted or not: a worker that has just started knows of it by the same record (S0.1)."""
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
    assert "promoted" in failure_of(stage, stage.submit(1.0, "1.5")), "other content than was registered"
    shutil.copytree(stage.root.parent / "to come" / stage.model / "1.7", stage.root / stage.model / "1.7")
    assert stage.answer(1.0, "1.7") == ("1.7", 9.0)
    assert stage.answer() == ("2", 10.0)
    assert drain.lifecycle.models[stage.model].versions["2"].pinned_hash != registered, "what answers is for promotions"


def test_before_a_promotion_the_disk_decides_what_jobs_may_name(stage: Stage, tmp_path: Path):
    """As it decides what answers, also where operators sign."""
    operator = OperatorKey.generate(tmp_path / "operator.pem")
    stage.start(verify=PublicKeys.parse(operator.public_text).verify)
    assert stage.answer(1.0, "1") == ("1", 1.0)


def test_a_job_whose_time_runs_out_while_its_version_is_loaded_ends_in_time(stage: Stage):
    """Its caller hears so at its deadline, not at the end of the load."""
    write_scale(stage.root, stage.model, "0.1", 5, load_s=600)
    stage.start()
    (job_id,) = ask_for(stage, "0.1", deadline_s=0.5)
    stage.result(job_id)
    job_record = stage.broker.job_record(job_id)
    assert job_record is not None
    assert job_record.state is State.EXPIRED
    assert stage.state("0.1") == "loading"


def test_jobs_without_a_place_are_given_back_at_a_stop(stage: Stage):
    """They wait to hear of a worker that has their version; another will find them at once."""
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
def test_a_flood_of_names_that_nobody_has_keeps_no_job_waiting(stage: Stage):
    """A thousand jobs, each naming another version: the next that names none is answered soon."""
    stage.start()
    job_ids = ask_for(stage, *(f"no-{number}" for number in range(1000)))
    assert stage.answer() == ("2", 10.0)
    assert "not served by any live worker" in failure_of(stage, job_ids[-1])


def test_workers_that_cannot_be_asked_hold_nothing_up(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    """Reports that may not be read: the jobs that need them wait, and all others are answered."""
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


def test_reports_that_are_none_are_passed_over(stage: Stage):
    """Whoever may write to the broker may write one: no worker falls over it."""
    for number, report in enumerate((b"{", b"[]", b'{"versions": 3}', b'{"versions": {"m": {"1": null}}}', b"\xff")):
        stage.broker.report(f"stranger-{number}", report, 60_000)
    stage.start(root=elsewhere(stage, "1"))
    job_id = stage.submit(5.0, "1")
    having = stage.start()
    header, value = stage.result(job_id)
    assert (header.worker, value) == (having.name, 5.0)


def test_a_worker_without_the_version_that_answers_has_the_others(stage: Stage, tmp_path: Path):
    """It serves other models, claims nothing of this one, and takes what others hand over for versions that it has."""
    other = tmp_path / "other"
    content_hash = write_scale(other, stage.model, "1", 5).manifest().content_hash
    stage.promote("1", epoch=1, content_hash=content_hash)
    without = stage.start(write_scale(stage.root, f"{stage.model}-beside", "1", 1))
    stage.start(root=other)
    wait_until(lambda: stage.state("1", without) == "failed", 10, "it has other content under the label")
    assert stage.answer(3.0) == ("1", 15.0)
    assert stage.answer(3.0, "2") == ("2", 30.0)
