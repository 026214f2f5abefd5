"""Faults around versions: other content, hanging loads, hostile records, floods, conflicting operators."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import Failure
from penstock.registry.errors import BrokerUnavailable, ConfigurationError
from penstock.registry.package import ModelSpec, find, load_package
from penstock.registry.settings import Settings
from penstock.safety.operator_key import OperatorKey, PublicKeys
from penstock.workers.assembly import DrainOptions, build_drain
from penstock.workers.runtime.loading import PackageRuntime
from penstock.workers.versions.repository import DiskRepository
from tests.packages import write_package
from tests.servers import wait_until
from tests.workers.versions.test_lifecycle import Stage, take_turns, two_versions, write_gated, write_scale


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Versions 1 (x) and 2 (10 x) of a model."""
    with two_versions(tmp_path, MemoryBroker().connect) as stage:
        yield stage


def test_a_request_for_other_content_leaves_the_active_version_alone(stage: Stage):
    """A promotion is prepared where the files differ: the worker changes nothing."""
    drain = stage.start()
    assert stage.answer() == ("2", 10.0)
    drain.lifecycle.request_load(stage.model, "2", content_hash="ab" * 32)
    take_turns(drain)
    wait_until(lambda: not _loading_threads(stage), 30, "nothing is loaded")
    assert stage.state("2") == "ready"
    assert stage.answer() == ("2", 10.0)


def test_a_refused_record_promotes_nothing_at_a_start(stage: Stage, tmp_path: Path):
    """An unsigned record replaces the signed one: a worker that starts must not use the highest version on disk."""
    operator = OperatorKey.generate(tmp_path / "operator.pem")
    verify = PublicKeys.parse(operator.public_text).verify
    stage.promote("1", epoch=1, sign=operator.sign)
    stage.start(verify=verify)
    assert stage.answer() == ("1", 1.0)
    stage.drains.pop().stop(1.0)
    stage.promote("2", epoch=2)  # unsigned: any client of Redis may write it
    drain = stage.start(verify=verify)
    job_id = stage.submit()
    take_turns(drain)
    job_record = stage.broker.job_record(job_id)
    assert job_record is not None
    assert not job_record.result, stage.result(job_id)


def test_a_worker_that_refuses_the_record_at_its_start_leaves_the_spec_alone(stage: Stage, tmp_path: Path):
    """Clients still check jobs against the promoted version."""
    operator = OperatorKey.generate(tmp_path / "operator.pem")
    stage.promote("1", epoch=1, sign=operator.sign)
    stranger = OperatorKey.generate(tmp_path / "stranger.pem")
    stage.start(verify=PublicKeys.parse(stranger.public_text).verify)
    assert ModelSpec.from_json(stage.broker.spec(stage.model) or b"").version == "1"


def test_a_pinned_worker_does_not_announce_its_version_as_the_active_one(stage: Stage):
    """Clients keep the spec of the promoted version."""
    stage.promote("1", epoch=1)
    stage.start(model_version="2")
    assert ModelSpec.from_json(stage.broker.spec(stage.model) or b"").version == "1"


def test_a_runtime_that_loads_too_late_is_closed(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    """An abandoned load must release its weights when it ends, not at the next load."""
    released: list[str] = []
    close = PackageRuntime.close

    def noted(self: PackageRuntime) -> None:
        released.append(self.version)
        close(self)

    monkeypatch.setattr(PackageRuntime, "close", noted)
    write_scale(stage.root, stage.model, "0.1", 5, load_s=4.0)
    stage.start(load_timeout_s=2.0)
    stage.result(stage.submit(1.0, "0.1"))
    wait_until(lambda: "0.1" in released, 30, "the abandoned load ends and is closed")


def test_a_load_that_hangs_is_not_tried_beside_itself(stage: Stage):
    """The promoted version hangs while it loads; every try leaves a thread and half a model behind."""
    write_scale(stage.root, stage.model, "0.1", 5, load_s=600)
    drain = stage.start(load_timeout_s=3.0)
    stage.promote("0.1", epoch=1)
    for _ in range(4):
        drain.lifecycle.request(drain.lifecycle.try_again)
        wait_until(lambda: stage.state("0.1") == "failed", 30, "it takes too long")
        take_turns(drain)
    assert len(_loading_threads(stage)) <= 1


def _loading_threads(stage: Stage) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith(f"load {stage.model}")]


def test_jobs_that_wait_for_a_named_version_do_not_delay_the_active_one(stage: Stage):
    """200 jobs name a version that does not end loading; others are answered meanwhile."""
    write_scale(stage.root, stage.model, "0.1", 5, load_s=600)
    stage.start()
    for number in range(200):
        stage.submit(float(number), "0.1")
    wait_until(lambda: stage.state("0.1") == "loading", 30, "the load begins")
    assert stage.answer() == ("2", 10.0)
    assert stage.state("0.1") == "loading"


def test_a_worker_that_loads_leaves_jobs_to_workers_that_have_the_version(stage: Stage):
    """Worker B starts after A was prepared and before the promotion: A answers while B loads."""
    gate = stage.root.parent / "gate"
    write_gated(stage.root, stage.model, "0.1", gate, "return lambda inputs: {'y': inputs['x'] * 5}")
    gate.touch()
    a = stage.start()
    a.lifecycle.request_load(stage.model, "0.1")
    wait_until(lambda: stage.state("0.1", a) == "ready", 30, "A is prepared")
    gate.unlink()
    b = stage.start()
    stage.promote("0.1", epoch=1)
    jobs = [stage.submit(float(number)) for number in range(30)]
    assert all(stage.result(job_id)[0].version == "0.1" for job_id in jobs)
    assert stage.state("0.1", b) != "ready"
    gate.touch()


def test_a_model_yaml_that_was_repaired_on_disk_is_read_again(stage: Stage):
    """Every version under the root is read at the start; its model.yaml changes before its promotion."""
    drain = stage.start()
    file = stage.root / stage.model / "1" / "model.yaml"
    file.write_text(file.read_text().replace("max_batch_size: 16", "max_batch_size: 8"))
    stage.promote("1", epoch=1)
    job_id = stage.submit()
    wait_until(lambda: stage.state("1") in ("ready", "failed"), 30, "the load ends")
    drain.lifecycle.request(drain.lifecycle.try_again)
    assert stage.result(job_id)[1] == 1.0, drain.lifecycle.described()[stage.model]["1"]["problem"]


def test_a_folder_that_cannot_be_read_does_not_end_the_io_thread(stage: Stage):
    """A link to itself only makes its package invalid."""
    drain = stage.start()
    loop = stage.root / stage.model / "0.3"
    write_scale(stage.root, stage.model, "0.3", 100)
    (loop / "model.py").unlink()
    (loop / "model.py").symlink_to("model.py")
    drain.lifecycle.request_load(stage.model, "0.3")
    take_turns(drain)
    assert drain.health.unhealthy_reason() is None
    assert stage.answer() == ("2", 10.0)


def test_a_prepared_version_is_not_unloaded_first(stage: Stage):
    """With a memory limit, another load unloads other versions before the one that was prepared for a promotion."""
    for version in ("0.1", "0.2"):
        write_scale(stage.root, stage.model, version, 100)
    for version in ("0.1", "0.2", "1", "2"):
        file = stage.root / stage.model / version / "model.yaml"
        file.write_text(file.read_text() + "memory_mb: 10\n")
    drain = stage.start(model_memory_mb=35)
    assert stage.answer() == ("2", 10.0)
    assert stage.answer(1.0, "0.2")[1] == 100.0
    drain.lifecycle.request_load(stage.model, "1")
    wait_until(lambda: stage.state("1") == "ready", 30, "prepared")
    assert stage.answer(1.0, "0.1")[1] == 100.0
    take_turns(drain)
    assert stage.state("1") == "ready"


def test_a_request_survives_an_outage_of_the_broker(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    """A model is added after the start: the broker is away for the one call that prepares its queue."""
    drain = stage.start()
    write_package(stage.root, "another", "def build():\n    return lambda inputs: {'y': inputs['x']}\n")
    prepare = drain.parts.broker.prepare
    failures = [BrokerUnavailable("away")]

    def flaky(slots: list[str]) -> None:
        if failures:
            raise failures.pop()
        prepare(slots)

    monkeypatch.setattr(drain.parts.broker, "prepare", flaky)
    drain.lifecycle.request_load("another", "1")

    def is_ready() -> bool:
        return bool(drain.lifecycle.described().get("another", {}).get("1", {}).get("state") == "ready")

    wait_until(is_ready, 30, "it is loaded")


@pytest.mark.parametrize("is_leader_named", [True, False])
def test_each_follower_goes_its_own_way_when_a_load_fails(stage: Stage, is_leader_named: bool):
    """The active version cannot be loaded here: of two equal jobs the one that names it fails, the other is given back
    for other workers, whichever of them leads."""
    write_package(stage.root, stage.model, "def build():\n    raise ValueError('no weights')\n", version="0.5")
    yaml = stage.root / stage.model / "0.5" / "model.yaml"
    yaml.write_text(yaml.read_text() + "deterministic: true\n")
    stage.promote("0.5", epoch=1)
    names = ["0.5", ""] if is_leader_named else ["", "0.5"]
    jobs = {name: stage.submit(1.0, name) for name in names}
    drain = stage.start(preload=False)
    assert isinstance(stage.result(jobs["0.5"])[1], Failure)
    take_turns(drain)
    job_record = stage.broker.job_record(jobs[""])
    assert job_record is not None
    assert not job_record.result


def test_a_worker_that_tries_a_broken_version_again_claims_nothing_meanwhile(stage: Stage):
    """Otherwise its jobs would be blocked for the time of each failing load."""
    gate = stage.root.parent / "gate"
    write_gated(stage.root, stage.model, "0.5", gate, "raise ValueError('no weights')")
    gate.touch()
    drain = stage.start()
    stage.promote("0.5", epoch=1)
    wait_until(lambda: stage.state("0.5") == "failed", 30, "the load fails")
    gate.unlink()
    drain.lifecycle.request(drain.lifecycle.try_again)
    wait_until(lambda: stage.state("0.5") == "loading", 30, "it is tried again")
    stage.submit()
    take_turns(drain)
    assert stage.state("0.5") == "loading"
    assert drain.health.readiness[1]["in_memory"] == 0
    gate.touch()


@pytest.mark.parametrize("raised", ["SystemExit(3)", "MemoryError()"])
def test_whatever_a_promoted_package_raises_at_the_start_the_other_models_are_served(stage: Stage, raised: str):
    """Also SystemExit and MemoryError fail only that version."""
    write_package(stage.root, stage.model, f"def build():\n    raise {raised}\n", version="3")
    stage.promote("3", epoch=1)
    write_package(stage.root, "another", "def build():\n    return lambda inputs: {'y': inputs['x']}\n")
    from penstock.workers.observe.listener import NullListener
    from penstock.workers.observe.metrics import InferenceMetrics

    drain = build_drain(
        Settings.load(environ={}, cwd=stage.root),
        stage._make_broker(),
        [load_package(find(stage.root, name).path) for name in (stage.model, "another")],
        DrainOptions(
            name="w",
            device="cpu",
            threads=1,
            listener=NullListener(),
            metrics=InferenceMetrics((0.1, 1.0)),
            repository=DiskRepository(stage.root, [stage.root]),
        ),
    )
    stage.drains.append(drain)
    try:
        drain.load()
    except BaseException as error:
        pytest.fail(f"the worker does not start: {error!r}")
    assert drain.lifecycle.described()[stage.model]["3"]["state"] == "failed"


def test_drafts_that_cannot_be_loaded_are_passed_over_at_the_start(stage: Stage, caplog: pytest.LogCaptureFixture):
    """One raises, one has another output, one hangs: the highest version that loads is active."""
    write_package(stage.root, stage.model, "def build():\n    raise ValueError('no weights')\n", version="3")
    write_package(stage.root, stage.model, "def build():\n    return lambda x: {'y': x['x'][:, :2]}\n", version="4")
    write_scale(stage.root, stage.model, "5", 100, load_s=600)
    stage.start(load_timeout_s=2.0)
    assert stage.answer() == ("2", 10.0)
    assert [stage.state(label) for label in "12345"] == ["cold", "ready", "failed", "failed", "failed"]
    assert ModelSpec.from_json(stage.broker.spec(stage.model) or b"").version == "2"
    (line,) = [each.getMessage() for each in caplog.records if "version skipped" in each.getMessage()]
    assert line == f"version skipped: {stage.model}/5: loading took longer than 2 s"
    (stage.root / stage.model / "3" / "model.py").write_text("def build():\n    return lambda x: {'y': x['x'] * 3}\n")
    stage.promote("3", epoch=1)
    assert stage.answer() == ("3", 3.0)


def test_a_model_without_a_loadable_version_does_not_affect_other_models(stage: Stage):
    """The worker claims none of its jobs and serves the other models; after a repair it serves this one, too."""
    broken = write_package(stage.root, "another", "def build():\n    return lambda inputs: {'z': inputs['x']}\n")
    drain = stage.start(load_package(broken))
    assert stage.answer() == ("2", 10.0)
    assert drain.lifecycle.described()["another"]["1"]["state"] == "failed"
    assert "z" in drain.lifecycle.described()["another"]["1"]["problem"]
    assert drain.lifecycle.offers.claimable() == [stage.model]
    (broken / "model.yaml").write_text((broken / "model.yaml").read_text().replace("name: y", "name: z"))
    drain.lifecycle.request(drain.lifecycle.try_again)
    wait_until(lambda: drain.lifecycle.offers.claimable() == [stage.model, "another"], 30, "it is loaded")


@pytest.mark.parametrize("settings", [{}, {"model_version": "3"}], ids=["no other version", "the settings name it"])
def test_a_worker_that_can_serve_no_model_does_not_start(stage: Stage, settings: dict[str, Any]):
    """No model can be loaded, or the settings name a version that cannot: the start is a configuration error."""
    write_package(stage.root, stage.model, "def build():\n    raise ValueError('no weights')\n", version="3")
    for label in () if settings else ("1", "2"):
        (stage.root / stage.model / label / "model.py").write_text("def build():\n    raise ValueError('none')\n")
    with pytest.raises(ConfigurationError, match=r"/3: .*no weights"):
        stage.start(**settings)


def test_memory_is_freed_once_versions_are_idle(stage: Stage):
    """Both older versions have jobs when the third one exceeds the limit: they are unloaded after their jobs."""
    for version in ("0.1", "0.2", "2"):
        if version != "2":
            write_scale(stage.root, stage.model, version, 100, forward_s=0.8 if version == "0.1" else 0.0)
        file = stage.root / stage.model / version / "model.yaml"
        file.write_text(file.read_text() + "memory_mb: 10\n")
    stage.start(model_memory_mb=15)
    jobs = [stage.submit(1.0, "0.1")]
    wait_until(lambda: stage.drains[0].active(), 30, "0.1 runs")
    jobs += [stage.submit(2.0, "0.1"), stage.submit(1.0, "0.2")]
    for job_id in jobs:
        stage.result(job_id)

    def ready() -> list[str]:
        return [label for label in ("0.1", "0.2", "2") if stage.state(label) == "ready"]

    wait_until(lambda: len(ready()) == 1, 30, "one of them is left")


def test_a_worker_that_starts_during_the_first_flip_leaves_the_promoted_spec(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    """It reads that no version is promoted; a promotion follows, and then the worker announces the version on disk."""
    end = type(stage.broker)
    actives = end.actives
    flips: list[bytes] = []

    def then_flip(self: MemoryBroker, slots: list[str]) -> dict[str, bytes]:
        found = actives(self, slots)
        if not flips:
            flips.append(stage.promote("1", epoch=1))
        return found

    monkeypatch.setattr(end, "actives", then_flip)
    stage.start()
    assert ModelSpec.from_json(stage.broker.spec(stage.model) or b"").version == "1"


def test_the_memory_limit_holds_from_the_start(stage: Stage):
    """Two models are loaded at the start and exceed the limit: one is unloaded, and loaded again for its next job."""
    write_package(stage.root, "another", "def build():\n    return lambda inputs: {'y': inputs['x']}\n")
    for folder in (stage.root / stage.model / "2", stage.root / "another" / "1"):
        (folder / "model.yaml").write_text((folder / "model.yaml").read_text() + "memory_mb: 10\n")
    another = load_package(find(stage.root, "another").path)
    drain = stage.start(another, model_memory_mb=15)

    def ready() -> int:
        return [stage.state("2"), drain.lifecycle.described()["another"]["1"]["state"]].count("ready")

    wait_until(lambda: ready() == 1, 30, "one of them is unloaded")
    assert stage.answer() == ("2", 10.0)
