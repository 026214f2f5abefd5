"""Prepare, decide, flip: versions change under drains in this process, with a real registry and a real state store.

CX-003, CX-014, IN-001, IN-065.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis

from penstock.compose.deploy import Deployer, deployed
from penstock.compose.rollout.replicas import ProgressCallback, replicas
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.catalog import Change, ModelRegistryClient
from penstock.registry.catalog.stages import ModelStage
from penstock.registry.deployment import Deployment
from penstock.registry.desired_state import DesiredVersion, StateStore
from penstock.registry.errors import (
    BrokerUnavailable,
    ConfigurationError,
    ContentChanged,
    InvalidInput,
    ModelNotReady,
    TransitionConflict,
    TransitionRefused,
    UnknownModel,
)
from penstock.registry.signed import Signer
from penstock.safety.keys import OperatorKey, PublicKeys
from penstock.workers.drain import Drain
from penstock.workers.versions.reconciler import Reconciler
from tests.packages import write_package
from tests.registry.catalog.catalogs import new_key
from tests.servers import RedisServer, wait_until
from tests.workers.versions.test_lifecycle import Stage, write_scale

TIMEOUT_S = 20.0


class FadingBroker(MemoryBroker):
    """The operators' end of a broker, which may stop answering them."""

    is_away = False

    def put_spec(self, slot: str, spec: bytes, version: str = "") -> None:
        self._reach()
        super().put_spec(slot, spec, version)

    def workers(self) -> list[bytes]:
        self._reach()
        return super().workers()

    def _reach(self) -> None:
        if self.is_away:
            raise BrokerUnavailable("The broker does not answer (ConnectionError)")


class FadingStore(StateStore):
    """The operators' end of the state store, which may stop answering them."""

    is_away = False

    def desired(self) -> dict[str, bytes]:
        if self.is_away:
            raise BrokerUnavailable("The store of model states does not answer (ConnectionError)")
        return super().desired()


class Town:
    """A models root with its registry, and an operator. `start` adds a worker that follows the state store."""

    def __init__(
        self, root: Path, broker: FadingBroker, make_store: Callable[[], FadingStore], ends: ExitStack
    ) -> None:
        self.stage = Stage(root, broker, broker.connect)
        self.model = self.stage.model
        self.broker = broker
        self.store = make_store()
        self.vetoes: list[str] = []
        self.told: list[str] = []
        self.registry = self._open_registry()
        self.deployer = self._deployer(self.registry, self.told.append)
        self._make_store = make_store
        self._ends = ends

    def operator(self, tell: ProgressCallback = lambda line: None, *, sign: Signer | None = None) -> Deployer:
        """Another operator of the same registry and the same workers."""
        return self._deployer(self._open_registry(), tell, sign)

    def start(self, **settings: Any) -> Drain:
        """A worker that serves the highest version on disk until one is promoted; returns once it has reported."""
        drain = self.stage.start(**settings)
        reconciler = Reconciler(self._make_store(), drain.lifecycle, worker=drain.name, interval_s=0.05)
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
        record = self.store.desired().get(f"{self.model}/{label}")
        return None if record is None else DesiredVersion.open(record, None).is_wanted

    def active(self) -> str:
        """The label that the broker hands out; empty before the first decision."""
        decision = deployed(self.stage.broker, self.model)
        return decision.version if decision else ""

    def _deployer(self, registry: ModelRegistryClient, tell: ProgressCallback, sign: Signer | None = None) -> Deployer:
        return Deployer(
            registry, self.broker, states=self.store, sign=sign, load_timeout_s=TIMEOUT_S, sweep_s=0.05, tell=tell
        )

    def _open_registry(self) -> ModelRegistryClient:
        return ModelRegistryClient(f"sqlite:///{self.stage.root.parent}/registry.db", approve=self._approve)

    def _approve(self, change: Change) -> str | None:
        return self.vetoes.pop() if self.vetoes and change.after is ModelStage.PRODUCTION else None


@pytest.fixture
def town(shared_redis: RedisServer, tmp_path: Path) -> Iterator[Town]:
    """Versions 1 (x) and 2 (10 x) of a model; no worker runs."""
    root = tmp_path / "models"
    root.mkdir()
    prefix = f"test:{uuid4().hex}"
    with ExitStack() as ends:
        town = Town(root, FadingBroker(), lambda: FadingStore(redis.Redis.from_url(shared_redis.url), prefix), ends)
        ends.callback(town.store.close)
        write_scale(root, town.model, "1", 1)
        write_scale(root, town.model, "2", 10)
        yield town
        ends.close()
        for drain in town.stage.drains:
            drain.stop(1.0)


def once_ready(act: Callable[[], object]) -> ProgressCallback:
    """Does something when a worker has the version, which is before it is decided on."""
    done: list[str] = []

    def tell(line: str) -> None:
        if line.endswith("is ready") and not done:
            done.append(line)
            act()

    return tell


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


def test_a_wish_from_before_stays(town: Town):
    """A refusal takes back what it brought, and not what an operator had asked for already."""
    drain = town.start()
    town.register("1")
    town.deployer.load(town.model, "1")
    town.vetoes.append("not on a Friday")
    with pytest.raises(TransitionRefused, match="not on a Friday"):
        town.deployer.promote(town.model, "1")
    assert (town.is_wanted("1"), town.state(drain, "1")) == (True, "ready")


def test_what_answers_stays_wanted(town: Town):
    """A refused promotion of the version that answers already, though never promoted, lets nobody unload it."""
    town.start()
    town.register("2")
    town.vetoes.append("not on a Friday")
    with pytest.raises(TransitionRefused, match="not on a Friday"):
        town.deployer.promote(town.model, "2")
    assert town.is_wanted("2")


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
    assert not town.is_wanted("1")
    assert town.stage.loads() == ["2"]


def _change(town: Town, label: str) -> None:
    """The version answers twice as much from its next load on."""
    module = town.stage.root / town.model / label / "model.py"
    module.write_text(module.read_text().replace('inputs["x"]', 'inputs["x"] * 2'))


def test_other_files_in_a_worker_are_refused(town: Town):
    """A worker that answers with something else under that label says so, and goes on as it was."""
    drain = town.start()
    _change(town, "2")
    town.register("2")
    with pytest.raises(TransitionRefused, match=r"2 stays in staging\. stage-0 has other files under .*/2 \("):
        town.deployer.promote(town.model, "2")
    assert (town.active(), town.is_wanted("2")) == ("", False)
    assert town.stage.answer() == ("2", 10.0)
    assert (town.stage.loads(), town.state(drain, "2")) == (["2"], "ready")


def test_other_files_that_answer_nothing_are_replaced(town: Town):
    """What is loaded beside the version that answers is loaded again, from the files that were registered since."""
    drain = town.start()
    drain.lifecycle.request_load(town.model, "1")
    wait_until(lambda: town.state(drain, "1") == "ready", 10, "the old files are loaded")
    _change(town, "1")
    town.register("1")
    assert town.deployer.promote(town.model, "1").prepared == (drain.name,)
    assert town.stage.answer() == ("1", 2.0)


def test_a_worker_that_hears_of_no_wish_is_refused(town: Town):
    """It reports other files and no problem with them: that is waited for a few seconds, not as long as for a load."""
    drain = town.stage.start()
    wait_until(lambda: town.state(drain, "2") == "ready", 10, "the worker reports")
    _change(town, "2")
    town.register("2")
    with pytest.raises(TransitionRefused, match="stage-0 has other files under"):
        town.deployer.promote(town.model, "2")


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


def test_a_rollback_flips_to_nothing_but_what_it_prepared(town: Town):
    """Another operator promotes between its preparation and its decision: what it would restore by then is another."""
    town.start()
    write_scale(town.stage.root, town.model, "3", 100)
    town.register("1", "2", "3")
    town.deployer.promote(town.model, "1")
    town.deployer.promote(town.model, "2")
    second = town.operator(once_ready(lambda: town.deployer.promote(town.model, "3")))
    with pytest.raises(TransitionConflict, match=r"restores 2 by now\. Expected '1'"):
        second.rollback(town.model)
    assert town.stage.answer() == ("3", 100.0)


@pytest.mark.parametrize("is_flipped", [True, False])
def test_who_comes_second_leaves_the_wish_of_the_first(town: Town, is_flipped: bool):
    """Two promote one version: the second is refused, and what answers by then, or is about to, stays wanted."""
    town.start()
    town.register("1")
    first = town.deployer if is_flipped else town.registry
    second = town.operator(once_ready(lambda: first.promote(town.model, "1", ModelStage.PRODUCTION)))
    with pytest.raises(TransitionRefused, match="in production already"):
        second.promote(town.model, "1")
    assert (town.active(), town.is_wanted("1")) == ("1" if is_flipped else "", True)


def test_a_flip_that_was_made_is_no_failure(town: Town):
    """The state store and the broker go away right after it: what could not be done is told, and who may be late."""
    drain = town.start()
    town.register("1")
    told: list[str] = []

    def leave(line: str) -> None:
        told.append(line)
        if "answers from now on" in line:
            town.store.is_away = town.broker.is_away = True

    rollout = town.operator(leave).promote(town.model, "1")
    assert rollout.flipped_at
    assert (rollout.prepared, rollout.late) == ((drain.name,), (drain.name,))
    assert told[-1].startswith("its workers could not be asked whether they follow: The broker does not answer")


def test_old_versions_that_could_not_be_let_go_of_are_told(town: Town):
    """The state store goes away right after the flip: the promotion stands, and they stay wanted."""
    write_scale(town.stage.root, town.model, "3", 100)
    town.register("1", "2", "3")
    told: list[str] = []

    def leave(line: str) -> None:
        told.append(line)
        town.store.is_away = "answers from now on" in line

    operator = town.operator(leave)
    town.deployer.promote(town.model, "1")
    town.deployer.promote(town.model, "2")
    assert operator.promote(town.model, "3").flipped_at
    assert told[-1].startswith("older versions may still be in memory: The store of model states does not answer")
    town.store.is_away = False
    assert (town.active(), town.is_wanted("1")) == ("3", True)


def test_a_decision_is_not_signed_anew(town: Town, tmp_path: Path):
    """After a change of the key `sync` says what to do instead, and a new decision carries the new signature."""
    old, new = (OperatorKey.generate(tmp_path / f"{name}.pem") for name in ("old", "new"))
    town.register("1", "2")
    town.operator(sign=old.sign).promote(town.model, "1")
    operator = town.operator(sign=new.sign)
    with pytest.raises(TransitionConflict, match=r"as another key has signed it\. Expected a new decision"):
        operator.sync(town.model)
    operator.promote(town.model, "2")
    active = town.broker.actives([town.model])[town.model]
    assert Deployment.open(active, town.model, PublicKeys.parse(new.public_text).verify).version == "2"


def test_a_crash_before_the_flip_is_made_up_for(town: Town):
    """The registry has decided and the broker has not heard: `sync`, or asking again, flips; repeating is harmless."""
    town.register("1", "2")
    town.registry.promote(town.model, "1", ModelStage.PRODUCTION)
    assert town.active() == ""
    assert [town.deployer.sync(town.model).version for _ in range(2)] == ["1", "1"]
    assert town.active() == "1"
    town.registry.promote(town.model, "2", ModelStage.PRODUCTION)
    with pytest.raises(TransitionRefused, match="in production already"):
        town.deployer.promote(town.model, "2")
    assert town.active() == "2"


def test_an_older_copy_of_the_registry_decides_nothing(town: Town, tmp_path: Path):
    """Its decisions would not be followed: it is told so before anything is written, and `sign` takes it up again."""
    town.register("1", "2")
    town.deployer.promote(town.model, "1")
    shutil.copy(tmp_path / "registry.db", tmp_path / "copy.db")
    town.deployer.promote(town.model, "2")
    registry = ModelRegistryClient(f"sqlite:///{tmp_path}/copy.db", sign=new_key().sign)
    copy = Deployer(registry, town.stage.broker, states=town.store)
    before = registry.history(town.model)
    for decide in (lambda: copy.promote(town.model, "2"), lambda: copy.rollback(town.model)):
        with pytest.raises((TransitionConflict, TransitionRefused), match=r"older copy\. Nothing was|no earlier"):
            decide()
    assert (town.active(), registry.history(town.model)) == ("2", before)
    assert copy.sign(town.model).epoch == before[-1].epoch + 2
    assert town.active() == "1"
    copy.promote(town.model, "2")
    assert town.active() == "2"


def test_a_new_registry_begins_after_what_workers_follow(town: Town, tmp_path: Path):
    """Where the old one is lost, registering again is enough: the epochs of a model never go back."""
    town.register("1", "2")
    town.deployer.promote(town.model, "1")
    town.deployer.promote(town.model, "2")
    operator = new_key()
    registry = ModelRegistryClient(
        f"sqlite:///{tmp_path}/other.db", sign=operator.sign, verify=PublicKeys.parse(operator.public_text).verify
    )
    other = Deployer(registry, town.stage.broker, states=town.store)
    other.register(town.stage.root / town.model / "1")
    assert registry.find(town.model, "1").epoch == town.registry.history(town.model)[-1].epoch + 1
    other.promote(town.model, "1", "staging")
    other.promote(town.model, "1")
    assert town.active() == "1"
    with pytest.raises(TransitionConflict, match="older copy"):
        town.deployer.rollback(town.model)
    assert town.registry.find(town.model).version == "2"


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


def test_registration_without_a_broker_says_what_was_done(town: Town):
    """The version is registered, its jobs are not accepted: the error says both, and the same command again does it."""
    town.broker.is_away = True
    with pytest.raises(BrokerUnavailable, match=r"/1 is registered, in draft, but its jobs are not accepted yet"):
        town.deployer.register(town.stage.root / town.model / "1")
    town.broker.is_away = False
    assert town.deployer.register(town.stage.root / town.model / "1").stage is ModelStage.DRAFT
    assert town.stage.broker.spec(town.model, "1")


def test_another_content_under_a_label_is_refused(town: Town):
    """A label belongs to one content for ever."""
    town.register("1")
    with (town.stage.root / town.model / "1" / "model.py").open("a") as module:
        module.write("# changed\n")
    with pytest.raises(InvalidInput, match="changed files are another version"):
        town.deployer.register(town.stage.root / town.model / "1")
