"""Versions of one model side by side in one drain: which is active, how it changes, and which are loaded."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.admission import JobBuilder, SubmitOptions
from penstock.registry.broker.base import Broker, Publication, State
from penstock.registry.deployment import Deployment
from penstock.registry.envelope import Failure, ResultHeader, open_result
from penstock.registry.package import Package, find, load_package
from penstock.registry.settings import Settings
from penstock.registry.signed import Verifier
from penstock.registry.tensors import decode
from penstock.safety.operator_key import OperatorKey, PublicKeys
from penstock.workers.assembly import DrainOptions, build_drain
from penstock.workers.drain import Drain
from penstock.workers.observe.listener import NullListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.versions.repository import DiskRepository
from tests.packages import write_package
from tests.servers import wait_until
from tests.workers.test_drain import ROOMY, UNSIGNED, Connect, connect

__all__ = ["connect"]

_numbers = itertools.count()


def write_scale(
    root: Path, model: str, version: str, factor: float, *, load_s: float = 0.0, forward_s: float = 0.0
) -> Package:
    """A version that answers factor * x, and adds a line to `<root>/../loads` at every load."""
    folder = write_package(
        root,
        model,
        f"""
        import time
        from pathlib import Path

        def build():
            with open({str(root.parent / "loads")!r}, "a") as loads:
                loads.write({version!r} + "\\n")
            time.sleep({load_s!r})

            def forward(inputs):
                time.sleep({forward_s!r})
                return {{"y": inputs["x"] * {factor!r}}}

            return forward
        """,
        version=version,
    )
    return load_package(folder)


def take_turns(drain: Drain, count: int = 20) -> None:
    """Returns when the drain's loop has turned so often."""
    for _ in range(count):
        has_turned = threading.Event()
        drain.lifecycle.request(has_turned.set)
        assert has_turned.wait(180)


def write_gated(root: Path, model: str, version: str, gate: Path, end: str) -> None:
    """A version whose load waits for the file `gate`, and then runs the statement `end`."""
    source = f"""
        import time
        from pathlib import Path

        def build():
            while not Path({str(gate)!r}).exists():
                time.sleep(0.01)
            {end}
        """
    write_package(root, model, source, version=version)


class Stage:
    """A models root, a drain over it, and both sides of the broker."""

    def __init__(self, root: Path, broker: Broker, make_broker: Callable[[], Broker]) -> None:
        self.metrics = InferenceMetrics((0.1, 1.0))
        self.root = root
        # Decisions stay in a broker that tests share.
        self.model = f"scale-{os.getpid()}-{next(_numbers)}"
        self.broker = broker
        self._make_broker = make_broker
        self._names = itertools.count()
        self.changes: list[tuple[str, str, str]] = []
        self.drains: list[Drain] = []
        self._builder = JobBuilder(tenant="acme", keyring=UNSIGNED, max_bytes=1 << 20)

    def start(
        self, *others: Package, verify: Verifier | None = None, root: Path | None = None, **settings: Any
    ) -> Drain:
        """Start a drain that serves the highest version on disk, and other models; without a set home it has its own.

        root: its models root, if it is not the one of the stage.
        """
        name, root = f"stage-{next(self._names)}", root or self.root
        overrides = {"queue": {"lease_s": 1.0}, "home": str(self.root.parent / name), **settings}
        drain = build_drain(
            Settings.load(overrides=overrides, environ={}, cwd=self.root),
            self._make_broker(),
            [load_package(find(root, self.model).path), *others],
            DrainOptions(
                name=name,
                device="cpu",
                threads=1,
                listener=NullListener(),
                metrics=self.metrics,
                repository=DiskRepository(root, [root]),
                verify=verify,
                on_version_change=lambda *change: self.changes.append(change),
            ),
        )
        self.drains.append(drain)
        drain.load()
        drain.start()
        return drain

    def loads(self) -> list[str]:
        """Labels of the versions that were built, in order."""
        file = self.root.parent / "loads"
        return file.read_text().split() if file.exists() else []

    def loaded(self) -> dict[str, float]:
        """The gauge model_loaded, by version."""
        (family,) = [family for family in self.metrics.collect() if family.name == "model_loaded"]
        return {sample.labels["version"]: sample.value for sample in family.samples}

    def submit(self, number: float = 1.0, version: str = "") -> str:
        """Submit one job; returns its id."""
        spec = load_package(find(self.root, self.model, version or None).path).spec
        options = SubmitOptions(version=version)
        job: Publication = self._builder.build(spec, {"x": [[number, 0, 0, 0]]}, options)
        (receipt,) = self.broker.publish(self.model, [job], ROOMY)
        assert receipt.outcome == "accepted"
        return job.job_id

    def result(self, job_id: str) -> tuple[ResultHeader, float | Failure]:
        """Wait for the end of the job; returns its header, and the first number of `y` or the failure."""

        def sealed() -> bytes:
            job_record = self.broker.job_record(job_id)
            return job_record.result if job_record else b""

        header, body = open_result(wait_until(sealed, 10, "the job ends"), UNSIGNED)
        return header, header.error or float(decode(header.content, body)["y"][0, 0])

    def answer(self, number: float = 1.0, version: str = "") -> tuple[str, float | Failure]:
        """Submit one job; returns the version that answered it, and its answer."""
        header, value = self.result(self.submit(number, version))
        return header.version, value

    def promote(self, version: str, epoch: int, *, content_hash: str = "", sign: Any = None) -> bytes:
        """Make a version the active one."""
        package = load_package(find(self.root, self.model, version).path)
        content_hash = content_hash or package.manifest().content_hash
        record = Deployment(epoch, self.model, version, content_hash).seal(sign)
        assert self.broker.activate(self.model, epoch, record, version, package.spec.to_json())
        return record

    def state(self, version: str, drain: Drain | None = None) -> str:
        """The load state of a version; empty while the worker does not know it."""
        return str((drain or self.drains[-1]).lifecycle.described()[self.model].get(version, {"state": ""})["state"])


@contextmanager
def two_versions(folder: Path, connect: Connect) -> Iterator[Stage]:
    """Versions 1 (x) and 2 (10 x) of a model in a folder; the block ends the drains that were started."""
    root = folder / "models"
    root.mkdir()
    stage = Stage(root, connect(), connect)
    write_scale(root, stage.model, "1", 1)
    write_scale(root, stage.model, "2", 10)
    yield stage
    for drain in stage.drains:
        drain.stop(1.0)


@pytest.fixture
def stage(connect: Connect, tmp_path: Path) -> Iterator[Stage]:
    """See two_versions."""
    with two_versions(tmp_path, connect) as stage:
        yield stage


def test_highest_version_is_active_until_one_is_promoted(stage: Stage):
    """From the next claim on, the promoted version answers; each result names it and its content (IN-001, AR-022)."""
    stage.start()
    assert stage.answer() == ("2", 10.0)
    stage.promote("1", epoch=1)
    header, value = stage.result(stage.submit())
    assert (header.version, value) == ("1", 1.0)
    assert header.content_hash == load_package(find(stage.root, stage.model, "1").path).manifest().content_hash
    stage.promote("2", epoch=2)
    assert stage.answer() == ("2", 10.0)
    assert [len(new) for _, _, new in stage.changes] == [64, 64]
    assert stage.loads() == ["2", "1"]


def test_versions_answer_side_by_side(stage: Stage):
    """A job that names a version gets its answer; the version is loaded for its first job (IN-001, IN-014)."""
    stage.start()
    wait_until(lambda: stage.broker.spec(stage.model, "1"), 5, "the spec of the other version")
    assert (stage.answer(2.0, "1"), stage.answer(2.0, "2"), stage.answer(2.0)) == (("1", 2.0), ("2", 20.0), ("2", 20.0))
    assert stage.loads() == ["2", "1"]


def test_equal_jobs_of_two_versions_do_not_share_a_forward(stage: Stage):
    """A job claimed after a promotion never gets the answer of one that was claimed before."""
    write_scale(stage.root, stage.model, "3", 100, forward_s=0.5)
    drain = stage.start()
    before = stage.submit()
    wait_until(drain.active, 5, "the old version's forward")
    stage.promote("2", epoch=1)
    after = stage.submit()
    assert stage.result(before)[1] == 100.0
    assert stage.result(after)[1] == 10.0


def test_nothing_is_loaded_at_start_without_preload(stage: Stage):
    """The load counter is 1 or 0 before the first job (IN-014)."""
    stage.start(preload=False)
    assert stage.loads() == []
    assert stage.answer() == ("2", 10.0)
    assert stage.loads() == ["2"]


def test_jobs_wait_for_a_version_that_is_being_loaded(stage: Stage):
    """The version is promoted before this worker has loaded it: its jobs wait, and no job gets the old answer."""
    gate = stage.root.parent / "gate"
    write_gated(stage.root, stage.model, "3", gate, "return lambda inputs: {'y': inputs['x'] * 100}")
    stage.promote("2", epoch=1)
    drain = stage.start()
    assert stage.answer() == ("2", 10.0)
    stage.promote("3", epoch=2)
    job_ids = [stage.submit(float(number)) for number in range(1, 30)]
    wait_until(lambda: stage.state("3", drain) == "loading", 5, "the load begins")
    gate.touch()
    assert [stage.result(job_id)[1] for job_id in job_ids] == [100.0 * number for number in range(1, 30)]


def test_a_worker_that_cannot_load_the_promoted_version_claims_nothing(stage: Stage):
    """Its jobs return to the queue for a worker that can load it; other content is never executed."""
    stage.promote("2", epoch=1)
    stage.start()
    stage.promote("1", epoch=2, content_hash="0" * 64)
    job_id = stage.submit()
    wait_until(lambda: stage.state("1") == "failed", 5, "the load fails")
    problem = stage.drains[0].lifecycle.described()[stage.model]["1"]["problem"]
    assert "were promoted" in problem or "promoted" in problem
    job_record = stage.broker.job_record(job_id)
    assert job_record is not None
    assert job_record.state is State.QUEUED
    assert "1" not in stage.loads()
    stage.promote("1", epoch=3)
    assert stage.result(job_id)[1] == 1.0


def test_a_version_that_cannot_be_loaded_fails_the_jobs_that_name_it(stage: Stage):
    """Each of these jobs ends with one clear error; other jobs are answered (bad input)."""
    write_package(stage.root, stage.model, "def build():\n    raise ValueError('no weights')\n", version="0.5")
    stage.start()
    header, failure = stage.result(stage.submit(1.0, "0.5"))
    assert isinstance(failure, Failure)
    assert "0.5 cannot be loaded" in failure.message
    assert "no weights" in failure.message
    assert header.version in ("", "0.5")
    assert stage.answer() == ("2", 10.0)


def test_loading_has_a_limit(stage: Stage):
    """A load beyond the time limit has failed, and its result is discarded (CX-026)."""
    write_scale(stage.root, stage.model, "0.1", 5, load_s=600)
    stage.start(load_timeout_s=2.0)
    _, failure = stage.result(stage.submit(1.0, "0.1"))
    assert isinstance(failure, Failure)
    assert "longer than 2 s" in failure.message


def test_load_and_unload_on_demand(stage: Stage):
    """Requested versions are loaded without a job and unloaded on request; the active version is never unloaded.

    The gauge model_loaded says which are loaded (IN-049).
    """
    drain = stage.start()
    assert stage.loaded() == {"2": 1}
    drain.lifecycle.request_load(stage.model, "1")
    wait_until(lambda: stage.state("1") == "ready", 5, "the version is loaded")
    assert stage.loaded() == {"1": 1, "2": 1}
    drain.lifecycle.request_unload(stage.model, "1")
    drain.lifecycle.request_unload(stage.model, "2")
    wait_until(lambda: stage.loaded() == {"1": 0, "2": 1}, 5, "the version is unloaded")
    assert stage.state("1") == "cold"
    assert stage.answer() == ("2", 10.0)
    assert stage.state("2") == "ready"
    drain.lifecycle.request_load(stage.model, "no-such")
    drain.lifecycle.request_load("../../etc", "1")
    assert stage.answer() == ("2", 10.0)


def test_the_least_recently_used_version_goes_when_memory_is_short(stage: Stage):
    """Memory holds two of three versions: the third load unloads the least recently used one, never a busy one."""
    for version in ("1", "2", "3"):
        folder = stage.root / stage.model / version
        if not folder.exists():
            write_scale(stage.root, stage.model, version, 100)
        text = (folder / "model.yaml").read_text()
        (folder / "model.yaml").write_text(text + "memory_mb: 10\n")
    stage.start(model_memory_mb=25)
    assert stage.answer(1.0, "1")[1] == 1.0
    assert stage.answer(1.0, "3")[1] == 100.0
    assert stage.answer(1.0, "2")[1] == 10.0
    wait_until(lambda: stage.state("1") == "cold", 5, "the least recently used is unloaded")
    assert (stage.state("2"), stage.state("3")) == ("ready", "ready")
    assert stage.answer(1.0, "1")[1] == 1.0
    wait_until(lambda: stage.state("2") == "cold", 5, "the next is unloaded, and the active version stays")
    assert stage.state("3") == "ready"


def test_a_late_decision_changes_nothing(stage: Stage):
    """A worker never returns to an older epoch, whatever record is in the broker."""
    drain = stage.start()
    stage.promote("1", epoch=5)
    assert stage.answer() == ("1", 1.0)
    older = Deployment(4, stage.model, "2", "0" * 64).seal()
    drain.lifecycle.follow(drain.lifecycle.models[stage.model], b"4 " + older)
    assert stage.answer() == ("1", 1.0)


def test_only_the_operators_decide(stage: Stage, tmp_path: Path):
    """With a public key set, unsigned and foreign records are refused, and the active version stays (S0.1)."""
    operator = OperatorKey.generate(tmp_path / "operator.pem")
    stranger = OperatorKey.generate(tmp_path / "stranger.pem")
    stage.start(verify=PublicKeys.parse(operator.public_text).verify)
    stage.promote("1", epoch=1)
    assert stage.answer() == ("2", 10.0)
    stage.promote("1", epoch=2, sign=stranger.sign)
    assert stage.answer() == ("2", 10.0)
    stage.promote("1", epoch=3, sign=operator.sign)
    assert stage.answer() == ("1", 1.0)


def test_a_pinned_version_stays_active_whatever_is_promoted(stage: Stage):
    """A worker with a version in `model_version` follows no promotion; with `latest` it would (CX-014)."""
    stage.start(model_version="2")
    stage.promote("1", epoch=1)
    assert stage.answer() == ("2", 10.0)


def test_idle_workers_follow_a_change_within_two_seconds(stage: Stage):
    """Each worker reports the change once, also without a job (AR-018, AR-080)."""
    for _ in range(3):
        stage.start()
    stage.promote("1", epoch=1)
    wait_until(lambda: len(stage.changes) == 3, 2, "every worker reports it")
    old = load_package(find(stage.root, stage.model, "2").path).manifest().content_hash
    new = load_package(find(stage.root, stage.model, "1").path).manifest().content_hash
    assert stage.changes == [(stage.model, old, new)] * 3
    stage.answer()
    assert len(stage.changes) == 3


def test_a_copy_that_was_repaired_on_disk_is_loaded_again(stage: Stage):
    """It was loaded with other files before its promotion: it is loaded again, and the old content never answers."""
    drain = stage.start()
    drain.lifecycle.request_load(stage.model, "1")
    wait_until(lambda: stage.state("1") == "ready", 5, "the version is loaded")
    source = stage.root / stage.model / "1" / "model.py"
    source.write_text(source.read_text().replace("* 1", "* 7"))
    stage.promote("1", epoch=1)
    assert stage.answer() == ("1", 7.0)


def test_other_content_that_loads_during_a_promotion_is_not_served(stage: Stage):
    """The promotion comes during the load: the loaded content is not the promoted content, and the load fails."""
    gate = stage.root.parent / "gate"
    write_gated(stage.root, stage.model, "0.1", gate, "return lambda inputs: {'y': inputs['x'] * 5}")
    drain = stage.start()
    drain.lifecycle.request_load(stage.model, "0.1")
    wait_until(lambda: stage.state("0.1") == "loading", 5, "the load begins")
    stage.promote("0.1", epoch=1, content_hash="ab" * 32)
    gate.touch()
    job_id = stage.submit()
    wait_until(lambda: stage.state("0.1") == "failed", 5, "the load has failed")
    job_record = stage.broker.job_record(job_id)
    assert job_record is not None
    assert job_record.state is State.QUEUED


def test_a_requested_version_that_is_not_found_is_reported(stage: Stage):
    """The operator reads why it is not found; after its folder was added, a new request loads it."""
    drain = stage.start()
    drain.lifecycle.request_load(stage.model, "7")
    wait_until(lambda: stage.state("7") == "failed", 5, "the worker says that it has no such version")
    write_scale(stage.root, stage.model, "7", 70)
    drain.lifecycle.request_load(stage.model, "7")
    wait_until(lambda: stage.state("7") == "ready", 5, "it is loaded")
    drain.lifecycle.request_load(stage.model, "8")
    wait_until(lambda: stage.state("8") == "failed", 5, "the next")
    drain.lifecycle.request_unload(stage.model, "8")
    wait_until(lambda: stage.state("8") == "", 5, "the request is withdrawn")


def test_a_version_that_is_released_during_its_load_is_unloaded_afterwards(stage: Stage):
    """The operator withdraws the request: the load ends, and the version is unloaded."""
    gate = stage.root.parent / "gate"
    write_gated(stage.root, stage.model, "0.1", gate, "return lambda inputs: {'y': inputs['x'] * 5}")
    drain = stage.start()
    drain.lifecycle.request_load(stage.model, "0.1")
    wait_until(lambda: stage.state("0.1") == "loading", 5, "the load begins")
    drain.lifecycle.request_unload(stage.model, "0.1")
    take_turns(drain)
    gate.touch()
    wait_until(lambda: stage.state("0.1") != "loading", 5, "the load ends")
    wait_until(lambda: stage.state("0.1") == "cold", 2, "it is unloaded")


def test_a_version_that_is_released_while_active_is_unloaded_after_the_next_promotion(stage: Stage):
    """The request may come before the promotion; each of its last results still names its version and content."""
    drain = stage.start()
    drain.lifecycle.request_unload(stage.model, "2")
    jobs = [stage.submit(float(number)) for number in range(40)]
    stage.promote("1", epoch=1)
    jobs += [stage.submit(float(number)) for number in range(40)]
    headers = [stage.result(job_id)[0] for job_id in jobs]
    assert {(header.version, len(header.content_hash)) for header in headers} <= {("1", 64), ("2", 64)}
    wait_until(lambda: stage.state("2", drain) == "cold", 5, "it is unloaded")


def test_a_later_version_may_run_more_forwards_at_a_time_than_the_first(stage: Stage):
    """Its `concurrency` holds from its promotion on; the older version keeps its own."""
    write_scale(stage.root, stage.model, "1.5", 100, forward_s=1.0)
    file = stage.root / stage.model / "1.5" / "model.yaml"
    file.write_text(file.read_text().replace("max_batch_size: 16", "max_batch_size: 1") + "concurrency: 3\n")
    drain = stage.start()
    assert stage.answer() == ("2", 10.0)
    assert drain.parts.executor.threads == 1
    stage.promote("1.5", epoch=1)
    job_ids = [stage.submit(float(number)) for number in range(6)]
    wait_until(lambda: len(drain.active()) == 3, 5, "three forwards run")
    assert [stage.result(job_id)[1] for job_id in job_ids] == [100.0 * number for number in range(6)]
    stage.promote("2", epoch=2)
    assert stage.answer() == ("2", 10.0)
