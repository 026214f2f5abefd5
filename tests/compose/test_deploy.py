"""Prepare, decide, flip: versions change under drains in this process, with a real registry and a real state store.

CX-003, CX-014, IN-001, IN-065.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from compose.deploy import Deployer, deployed
from compose.replicas import replicas
from registry.broker.memory import MemoryBroker
from registry.catalog import Change, ModelRegistryClient
from registry.errors import (
    BrokerUnavailable,
    ConfigurationError,
    ContentChanged,
    InvalidInput,
    ModelNotReady,
    TransitionConflict,
    TransitionRefused,
    UnknownModel,
)
from registry.reconciler import Reconciler, StateStore, Wish
from registry.stages import ModelStage
from tests.packages import write_package
from tests.servers import RedisServer, wait_until
from tests.workers.test_versions import Stage, write_scale
from workers.drain import Drain

TIMEOUT_S = 20.0


class Town:
    """A models root with its registry, and an operator. `start` adds a worker that follows the state store."""

    def __init__(self, folder: Path, stage: Stage, make_store: Callable[[], StateStore], ends: ExitStack) -> None:
        self.stage = stage
        self.model = stage.model
        self.store = make_store()
        self.vetoes: list[str] = []
        self.told: list[str] = []
        self.registry = ModelRegistryClient(f"sqlite:///{folder}/registry.db", approve=self._approve)
        self.deployer = Deployer(
            self.registry,
            stage.broker,
            states=self.store,
            load_timeout_s=TIMEOUT_S,
            sweep_s=0.05,
            tell=self.told.append,
        )
        self._make_store = make_store
        self._ends = ends

    def start(self, **settings: Any) -> Drain:
        """A worker that serves the highest version on disk until one is promoted; returns once it has reported."""
        drain = self.stage.start(**settings)
        reconciler = Reconciler(self._make_store(), drain, worker=drain.name, interval_s=0.05)
        reconciler.start()
        self._ends.callback(reconciler.stop)
        wait_until(lambda: self.state(drain, "2") == "ready", 10, "the worker reports")
        return drain

    def state(self, drain: Drain, label: str) -> str:
        """What the worker's report says of a version."""
        found = {each.worker: each.state for each in replicas(self.stage.broker, self.model, label)}
        return found.get(drain.name, "")

    def register(self, *labels: str) -> None:
        """Drafts that are candidates already."""
        for label in labels:
            self.deployer.register(self.stage.root / self.model / label)
            self.registry.promote(self.model, label, ModelStage.STAGING)

    def is_wanted(self, label: str) -> bool | None:
        """What the newest wish says of a version; None when there was none."""
        record = self.store.wishes().get(f"{self.model}/{label}")
        return None if record is None else Wish.open(record, None).is_wanted

    def active(self) -> str:
        """The label that the broker hands out; empty before the first decision."""
        decision = deployed(self.stage.broker, self.model)
        return decision.version if decision else ""

    def _approve(self, change: Change) -> str | None:
        return self.vetoes.pop() if self.vetoes and change.after is ModelStage.PRODUCTION else None


@pytest.fixture
def town(shared_redis: RedisServer, tmp_path: Path) -> Iterator[Town]:
    """Versions 1 (x) and 2 (10 x) of a model; no worker runs."""
    root = tmp_path / "models"
    root.mkdir()
    connect = MemoryBroker().connect
    prefix = f"test:{uuid4().hex}"
    with ExitStack() as ends:
        stage = Stage(root, connect(), connect)
        write_scale(root, stage.model, "1", 1)
        write_scale(root, stage.model, "2", 10)
        town = Town(tmp_path, stage, lambda: StateStore.from_url(shared_redis.url, prefix), ends)
        ends.callback(town.store.close)
        yield town
        ends.close()
        for drain in stage.drains:
            drain.stop(1.0)


def test_promotion_is_prepared_then_flipped(town: Town):
    """Every worker has the version before it answers; then jobs that name none get it, and no other (CX-003)."""
    drains = [town.start(), town.start()]
    town.register("1")
    assert town.stage.answer() == ("2", 10.0)
    rollout = town.deployer.promote(town.model, "1", reason="smaller")
    assert set(rollout.prepared) == {drain.name for drain in drains}
    assert rollout.late == ()
    assert rollout.transition.after is ModelStage.PRODUCTION
    assert town.stage.loads() == ["2", "2", "1", "1"]
    assert town.stage.answer() == ("1", 1.0)
    assert f"{drains[0].name}: {town.model}/1 is ready" in town.told
    # `latest` is what is in production, not the highest number: also for a worker that comes later (CX-014).
    for drain in drains:
        drain.stop(1.0)
    town.stage.start()
    assert town.stage.answer() == ("1", 1.0)


def test_a_hash_names_a_version(town: Town):
    """Six digits of the content hash are as good as the label; five are not, and the error lists what there is."""
    town.register("1")
    content_hash = town.registry.find(town.model, "1").content_hash
    with pytest.raises(UnknownModel, match=r"1 \(staging, "):
        town.deployer.promote(town.model, content_hash[:5])
    assert town.deployer.promote(town.model, content_hash[:6]).transition.version == "1"


def test_without_a_worker_nothing_is_prepared(town: Town):
    """A promotion does not need a fleet: workers that come later find the version that answers."""
    town.register("1")
    assert town.deployer.promote(town.model, "1").prepared == ()
    assert town.active() == "1"
    assert any("nothing to prepare" in line for line in town.told)


def test_a_version_that_does_not_load_is_not_promoted(town: Town):
    """The problem is the worker's own; nothing was flipped, the wish is taken back, and a repair is seen at once."""
    town.start()
    broken = town.stage.root.parent / "is-broken"
    broken.touch()
    source = f"""
    from pathlib import Path

    def build():
        if Path({str(broken)!r}).exists():
            raise ValueError("no weights")
        return lambda inputs: {{"y": inputs["x"] * 3}}
    """
    write_package(town.stage.root, town.model, source, version="3")
    town.register("3")
    with pytest.raises(TransitionRefused, match=r"3 stays in staging\. stage-0: .*no weights"):
        town.deployer.promote(town.model, "3")
    assert (town.active(), town.is_wanted("3")) == ("", False)
    assert town.stage.answer() == ("2", 10.0)
    broken.unlink()
    town.deployer.promote(town.model, "3")
    assert town.stage.answer() == ("3", 3.0)


def test_a_veto_takes_the_wish_back(town: Town):
    """The approver is asked after the preparation, and its refusal leaves nothing behind."""
    drain = town.start()
    town.register("1")
    town.vetoes.append("not on a Friday")
    with pytest.raises(TransitionRefused, match="not on a Friday"):
        town.deployer.promote(town.model, "1")
    assert (town.active(), town.is_wanted("1")) == ("", False)
    wait_until(lambda: town.state(drain, "1") == "cold", 10, "the version is let go")


def test_an_interrupted_promotion_takes_the_wish_back(town: Town):
    """Ctrl-C while workers load: nothing was decided, and they need not go on."""
    town.start()
    town.register("1")

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    deployer = Deployer(town.registry, town.stage.broker, states=town.store, tell=interrupt)
    with pytest.raises(KeyboardInterrupt):
        deployer.promote(town.model, "1")
    assert (town.active(), town.is_wanted("1")) == ("", False)
    assert town.registry.find(town.model, "1").stage is ModelStage.STAGING


def test_changed_files_are_not_even_loaded(town: Town):
    """What was registered is what is promoted: a file that changed since stops everything before any worker hears."""
    town.start()
    town.register("1")
    with (town.stage.root / town.model / "1" / "model.py").open("a") as module:
        module.write("# changed\n")
    with pytest.raises(ContentChanged, match=r"model\.py is not as it was registered"):
        town.deployer.promote(town.model, "1")
    assert town.is_wanted("1") is None
    assert town.stage.loads() == ["2"]


def test_other_files_in_a_worker_are_refused(town: Town):
    """A worker that loaded something else under that label cannot serve what was registered."""
    package = town.stage.root / town.model / "2" / "model.py"
    town.start()
    source = package.read_text()
    package.write_text(source.replace("10", "11"))
    town.register("2")
    with pytest.raises(TransitionRefused, match=r"stage-0 has other files under .*/2"):
        town.deployer.promote(town.model, "2")
    assert town.active() == ""


def test_rollback_restores_what_was_there(town: Town):
    """Prepared and flipped like a promotion; versions that no rollback would restore are let go of."""
    drain = town.start()
    town.register("1", "2")
    town.deployer.promote(town.model, "1")
    with pytest.raises(TransitionRefused, match="no earlier production version"):
        town.deployer.rollback(town.model)
    town.deployer.promote(town.model, "2")
    rollout = town.deployer.rollback(town.model, reason="wrong")
    assert (rollout.transition.version, rollout.prepared) == ("1", (drain.name,))
    assert town.stage.answer() == ("1", 1.0)
    assert (town.is_wanted("1"), town.is_wanted("2")) == (True, False)
    wait_until(lambda: town.state(drain, "2") == "cold", 10, "the other version is let go")


def test_a_crash_before_the_flip_is_made_up_for(town: Town):
    """The registry has decided and the broker has not heard: `sync`, or asking again, flips; repeating is harmless."""
    town.register("1", "2")
    town.registry.promote(town.model, "1", ModelStage.PRODUCTION)
    assert town.active() == ""
    assert [town.deployer.sync(town.model).version for _ in range(2)] == ["1", "1"]
    assert town.active() == "1"
    town.registry.promote(town.model, "2", ModelStage.PRODUCTION)
    with pytest.raises(TransitionRefused, match="in production, no promote leads"):
        town.deployer.promote(town.model, "2")
    assert town.active() == "2"


def test_a_later_decision_of_another_registry_stands(town: Town, tmp_path: Path):
    """An emptied registry counts from one again: it cannot overrule what workers follow, and says so."""
    town.register("1", "2")
    town.deployer.promote(town.model, "1")
    town.deployer.promote(town.model, "2")
    registry = ModelRegistryClient(f"sqlite:///{tmp_path}/other.db")
    other = Deployer(registry, town.stage.broker, states=town.store)
    other.register(town.stage.root / town.model / "1")
    other.promote(town.model, "1", "staging")
    with pytest.raises(TransitionConflict, match="another decision"):
        other.promote(town.model, "1")
    assert town.active() == "2"


def test_load_and_unload_answer_when_workers_have_followed(town: Town):
    """Each names the workers; the version that answers is not unloaded, and a time limit names who is late."""
    drain = town.start()
    town.register("1", "2")
    assert town.deployer.load(town.model, "1") == [drain.name]
    assert town.state(drain, "1") == "ready"
    assert town.deployer.unload(town.model, "1") == [drain.name]
    assert town.state(drain, "1") == "cold"
    with pytest.raises(TransitionRefused, match="answers jobs"):
        town.deployer.unload(town.model, "2")
    write_scale(town.stage.root, town.model, "4", 4, load_s=2.0)
    town.register("4")
    with pytest.raises(ModelNotReady, match=r"4 was not ready everywhere within 0\.1 s: stage-0 is "):
        town.deployer.load(town.model, "4", timeout_s=0.1)
    with pytest.raises(ModelNotReady, match=r"'nobody' is no live worker .* one of: stage-0"):
        town.deployer.load(town.model, "1", worker="nobody")
    with pytest.raises(ConfigurationError, match="Expected an operator's key"):
        town.deployer.load(town.model, "1", worker=drain.name)


def test_registration_makes_jobs_welcome(town: Town):
    """Without a worker the first registered version says what a model takes; a later one only says so for itself."""
    town.deployer.register(town.stage.root / town.model / "2")
    town.deployer.register(town.stage.root / town.model / "2")
    broker = town.stage.broker
    assert broker.spec(town.model, "2") is not None
    assert broker.spec(town.model) == broker.spec(town.model, "2")
    town.deployer.promote(town.model, "2", "staging")
    town.deployer.promote(town.model, "2")
    town.deployer.register(town.stage.root / town.model / "1")
    assert b'"version":"2"' in (broker.spec(town.model) or b"")
    assert b'"version":"1"' in (broker.spec(town.model, "1") or b"")


class _Away(MemoryBroker):
    """Does not answer."""

    def put_spec(self, slot: str, spec: bytes, version: str = "") -> None:
        raise BrokerUnavailable("The broker does not answer (ConnectionError)")


def test_registration_without_a_broker_says_what_was_done(town: Town):
    """The version is registered, its jobs are not accepted: the error says both, and the same command again does it."""
    deployer = Deployer(town.registry, _Away())
    with pytest.raises(BrokerUnavailable, match=r"/1 is registered, in draft, but its jobs are not accepted yet"):
        deployer.register(town.stage.root / town.model / "1")
    assert town.deployer.register(town.stage.root / town.model / "1").stage is ModelStage.DRAFT
    assert town.stage.broker.spec(town.model, "1")


def test_another_content_under_a_label_is_refused(town: Town):
    """A label belongs to one content for ever."""
    town.register("1")
    with (town.stage.root / town.model / "1" / "model.py").open("a") as module:
        module.write("# changed\n")
    with pytest.raises(InvalidInput, match="changed files are another version"):
        town.deployer.register(town.stage.root / town.model / "1")
