"""Prepare, decide, activate: versions change under drains in this process, with a real registry and state store.

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

from penstock.compose.deploy import Deployer
from penstock.compose.rollout.active_version import active_deployment
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
from penstock.safety.operator_key import OperatorKey, PublicKeys
from penstock.workers.drain import Drain
from penstock.workers.versions.reconciler import Reconciler
from tests.packages import write_package
from tests.registry.catalog.catalogs import new_key
from tests.servers import RedisServer, wait_until
from tests.workers.versions.test_lifecycle import Stage, write_scale

TIMEOUT_S = 20.0


class UnreliableBroker(MemoryBroker):
    """A broker that operators cannot reach while `is_away`; workers can."""

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


class UnreliableStore(StateStore):
    """A state store that operators cannot reach while `is_away`; workers can."""

    is_away = False

    def desired(self) -> dict[str, bytes]:
        if self.is_away:
            raise BrokerUnavailable("The store of model states does not answer (ConnectionError)")
        return super().desired()


class Site:
    """A models root with its registry, and an operator. `start` adds a worker that reads the state store."""

    def __init__(
        self, root: Path, broker: UnreliableBroker, make_store: Callable[[], UnreliableStore], ends: ExitStack
    ) -> None:
        self.stage = Stage(root, broker, broker.connect)
        self.model = self.stage.model
        self.broker = broker
        self.store = make_store()
        self.vetoes: list[str] = []
        self.progress: list[str] = []
        self.registry = self._open_registry()
        self.deployer = self._deployer(self.registry, self.progress.append)
        self._make_store = make_store
        self._ends = ends

    def operator(self, on_progress: ProgressCallback = lambda line: None, *, sign: Signer | None = None) -> Deployer:
        """Another operator of the same registry and the same workers."""
        return self._deployer(self._open_registry(), on_progress, sign)

    def start(self, **settings: Any) -> Drain:
        """A worker that serves the highest version on disk until one is promoted; returns once it has reported."""
        drain = self.stage.start(**settings)
        reconciler = Reconciler(self._make_store(), drain.lifecycle, worker=drain.name, interval_s=0.05)
        reconciler.start()
        self._ends.callback(reconciler.stop)
        wait_until(lambda: self.state(drain, "2") == "ready", 10, "the worker reports")
        return drain

    def state(self, drain: Drain, label: str) -> str:
        """The state of a version in the worker's report."""
        found = {each.worker: each.state for each in replicas(self.stage.broker, self.model, label)}
        return found.get(drain.name, "")

    def register(self, *labels: str) -> None:
        """Registers versions and promotes them to staging."""
        for label in labels:
            self.deployer.register(self.stage.root / self.model / label)
            self.registry.promote(self.model, label, ModelStage.STAGING)

    def is_wanted(self, label: str) -> bool | None:
        """Whether the last request was to load the version; None without a request."""
        record = self.store.desired().get(f"{self.model}/{label}")
        return None if record is None else DesiredVersion.open(record, None).is_wanted

    def active(self) -> str:
        """The label of the active version; empty before the first decision."""
        decision = active_deployment(self.stage.broker, self.model)
        return decision.version if decision else ""

    def _deployer(
        self, registry: ModelRegistryClient, on_progress: ProgressCallback, sign: Signer | None = None
    ) -> Deployer:
        return Deployer(
            registry,
            self.broker,
            states=self.store,
            sign=sign,
            load_timeout_s=TIMEOUT_S,
            sweep_s=0.05,
            on_progress=on_progress,
        )

    def _open_registry(self) -> ModelRegistryClient:
        return ModelRegistryClient(f"sqlite:///{self.stage.root.parent}/registry.db", approve=self._approve)

    def _approve(self, change: Change) -> str | None:
        return self.vetoes.pop() if self.vetoes and change.after is ModelStage.PRODUCTION else None


@pytest.fixture
def site(shared_redis: RedisServer, tmp_path: Path) -> Iterator[Site]:
    """Versions 1 (x) and 2 (10 x) of a model; no worker runs."""
    root = tmp_path / "models"
    root.mkdir()
    prefix = f"test:{uuid4().hex}"
    with ExitStack() as ends:
        site = Site(root, UnreliableBroker(), lambda: UnreliableStore.from_url(shared_redis.url, prefix), ends)
        ends.callback(site.store.close)
        write_scale(root, site.model, "1", 1)
        write_scale(root, site.model, "2", 10)
        yield site
        ends.close()
        for drain in site.stage.drains:
            drain.stop(1.0)


def once_ready(act: Callable[[], object]) -> ProgressCallback:
    """Calls `act` once a worker has loaded the version, which is before the decision."""
    done: list[str] = []

    def on_progress(line: str) -> None:
        if line.endswith("is ready") and not done:
            done.append(line)
            act()

    return on_progress


def test_a_promotion_is_prepared_then_activated(site: Site):
    """Every worker has the version before it is active; then jobs that name no version run on it (CX-003)."""
    drains = [site.start(), site.start()]
    site.register("1")
    assert site.stage.answer() == ("2", 10.0)
    rollout = site.deployer.promote(site.model, "1", reason="smaller")
    assert set(rollout.prepared) == {drain.name for drain in drains}
    assert rollout.late == ()
    assert rollout.transition.after is ModelStage.PRODUCTION
    assert site.stage.loads() == ["2", "2", "1", "1"]
    assert site.stage.answer() == ("1", 1.0)
    assert f"{drains[0].name}: {site.model}/1 is ready" in site.progress
    # `latest` is the version in production, not the highest number, also for a worker that starts later (CX-014).
    for drain in drains:
        drain.stop(1.0)
    site.stage.start()
    assert site.stage.answer() == ("1", 1.0)


def test_a_hash_names_a_version(site: Site):
    """Six digits of the content hash name a version like its label; five do not, and the error lists the versions."""
    site.register("1")
    content_hash = site.registry.find(site.model, "1").content_hash
    with pytest.raises(UnknownModel, match=r"1 \(staging, "):
        site.deployer.promote(site.model, content_hash[:5])
    assert site.deployer.promote(site.model, content_hash[:6]).transition.version == "1"


def test_without_a_worker_nothing_is_prepared(site: Site):
    """A promotion needs no workers: those that start later find the active version."""
    site.register("1")
    assert site.deployer.promote(site.model, "1").prepared == ()
    assert site.active() == "1"
    assert any("nothing to prepare" in line for line in site.progress)


def test_a_version_that_does_not_load_is_not_promoted(site: Site):
    """The worker's problem is raised, nothing is activated, the request is withdrawn, and a repair works at once."""
    site.start()
    broken = site.stage.root.parent / "is-broken"
    broken.touch()
    source = f"""
    from pathlib import Path

    def build():
        if Path({str(broken)!r}).exists():
            raise ValueError("no weights")
        return lambda inputs: {{"y": inputs["x"] * 3}}
    """
    write_package(site.stage.root, site.model, source, version="3")
    site.register("3")
    with pytest.raises(TransitionRefused, match=r"3 stays in staging\. stage-0: .*no weights"):
        site.deployer.promote(site.model, "3")
    assert (site.active(), site.is_wanted("3")) == ("", False)
    assert site.stage.answer() == ("2", 10.0)
    broken.unlink()
    site.deployer.promote(site.model, "3")
    assert site.stage.answer() == ("3", 3.0)


def test_a_veto_withdraws_the_request(site: Site):
    """The approver is asked after the preparation, and its veto withdraws the load request."""
    drain = site.start()
    site.register("1")
    site.vetoes.append("not on a Friday")
    with pytest.raises(TransitionRefused, match="not on a Friday"):
        site.deployer.promote(site.model, "1")
    assert (site.active(), site.is_wanted("1")) == ("", False)
    wait_until(lambda: site.state(drain, "1") == "cold", 10, "the version is unloaded")


def test_an_earlier_request_stays(site: Site):
    """A veto withdraws the request of the promotion, and not an earlier request of an operator."""
    drain = site.start()
    site.register("1")
    site.deployer.load(site.model, "1")
    site.vetoes.append("not on a Friday")
    with pytest.raises(TransitionRefused, match="not on a Friday"):
        site.deployer.promote(site.model, "1")
    assert (site.is_wanted("1"), site.state(drain, "1")) == (True, "ready")


def test_the_active_version_stays_wanted(site: Site):
    """A refused promotion of a version that is active without a promotion does not unload it."""
    site.start()
    site.register("2")
    site.vetoes.append("not on a Friday")
    with pytest.raises(TransitionRefused, match="not on a Friday"):
        site.deployer.promote(site.model, "2")
    assert site.is_wanted("2")


def test_an_interrupted_promotion_withdraws_the_request(site: Site):
    """Ctrl-C while workers load: nothing is decided, and the request is withdrawn."""
    site.start()
    site.register("1")

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    deployer = Deployer(site.registry, site.stage.broker, states=site.store, on_progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        deployer.promote(site.model, "1")
    assert (site.active(), site.is_wanted("1")) == ("", False)
    assert site.registry.find(site.model, "1").stage is ModelStage.STAGING


def test_changed_files_are_not_even_loaded(site: Site):
    """A file that changed since the registration stops the promotion before any worker is asked to load."""
    site.start()
    site.register("1")
    with (site.stage.root / site.model / "1" / "model.py").open("a") as module:
        module.write("# changed\n")
    with pytest.raises(ContentChanged, match=r"model\.py is not as it was registered"):
        site.deployer.promote(site.model, "1")
    assert not site.is_wanted("1")
    assert site.stage.loads() == ["2"]


def _change(site: Site, label: str) -> None:
    """From its next load on the version computes twice the value."""
    module = site.stage.root / site.model / label / "model.py"
    module.write_text(module.read_text().replace('inputs["x"]', 'inputs["x"] * 2'))


def test_other_files_in_a_worker_are_refused(site: Site):
    """When the active version of a worker has other files, the promotion is refused and the worker continues."""
    drain = site.start()
    _change(site, "2")
    site.register("2")
    with pytest.raises(TransitionRefused, match=r"2 stays in staging\. stage-0 has other files under .*/2 \("):
        site.deployer.promote(site.model, "2")
    assert (site.active(), site.is_wanted("2")) == ("", False)
    assert site.stage.answer() == ("2", 10.0)
    assert (site.stage.loads(), site.state(drain, "2")) == (["2"], "ready")


def test_other_files_of_an_inactive_version_are_replaced(site: Site):
    """An inactive version is loaded again, from the files that were registered since."""
    drain = site.start()
    drain.lifecycle.request_load(site.model, "1")
    wait_until(lambda: site.state(drain, "1") == "ready", 10, "the old files are loaded")
    _change(site, "1")
    site.register("1")
    assert site.deployer.promote(site.model, "1").prepared == (drain.name,)
    assert site.stage.answer() == ("1", 2.0)


def test_a_worker_that_reads_no_request_stops_the_promotion(site: Site):
    """It reports other files without a problem: the wait ends after a few seconds, before the limit of a load."""
    drain = site.stage.start()
    wait_until(lambda: site.state(drain, "2") == "ready", 10, "the worker reports")
    _change(site, "2")
    site.register("2")
    with pytest.raises(TransitionRefused, match="stage-0 has other files under"):
        site.deployer.promote(site.model, "2")


def test_a_rollback_restores_the_previous_version(site: Site):
    """A rollback is prepared and activated like a promotion; versions that none would restore are unloaded."""
    drain = site.start()
    site.register("1", "2")
    site.deployer.promote(site.model, "1")
    with pytest.raises(TransitionRefused, match="no earlier production version"):
        site.deployer.rollback(site.model)
    site.deployer.promote(site.model, "2")
    rollout = site.deployer.rollback(site.model, reason="wrong")
    assert (rollout.transition.version, rollout.prepared) == ("1", (drain.name,))
    assert site.stage.answer() == ("1", 1.0)
    assert (site.is_wanted("1"), site.is_wanted("2")) == (True, False)
    wait_until(lambda: site.state(drain, "2") == "cold", 10, "the other version is unloaded")


def test_a_rollback_activates_only_the_version_that_it_prepared(site: Site):
    """When another operator promotes between preparation and decision, the rollback is refused."""
    site.start()
    write_scale(site.stage.root, site.model, "3", 100)
    site.register("1", "2", "3")
    site.deployer.promote(site.model, "1")
    site.deployer.promote(site.model, "2")
    second = site.operator(once_ready(lambda: site.deployer.promote(site.model, "3")))
    with pytest.raises(TransitionConflict, match=r"restores 2 by now\. Expected '1'"):
        second.rollback(site.model)
    assert site.stage.answer() == ("3", 100.0)


@pytest.mark.parametrize("is_activated", [True, False])
def test_the_second_promotion_keeps_the_request_of_the_first(site: Site, is_activated: bool):
    """Of two promotions of one version the second is refused, and the version stays wanted."""
    site.start()
    site.register("1")
    first = site.deployer if is_activated else site.registry
    second = site.operator(once_ready(lambda: first.promote(site.model, "1", ModelStage.PRODUCTION)))
    with pytest.raises(TransitionRefused, match="in production already"):
        second.promote(site.model, "1")
    assert (site.active(), site.is_wanted("1")) == ("1" if is_activated else "", True)


def test_errors_after_the_activation_are_only_reported(site: Site):
    """When store and broker go away after the activation, the rollout succeeds, and names the late workers."""
    drain = site.start()
    site.register("1")
    progress: list[str] = []

    def leave(line: str) -> None:
        progress.append(line)
        if "is active from now on" in line:
            site.store.is_away = site.broker.is_away = True

    rollout = site.operator(leave).promote(site.model, "1")
    assert rollout.activated_at
    assert (rollout.prepared, rollout.late) == ((drain.name,), (drain.name,))
    assert progress[-1].startswith(
        "the workers could not be asked which version they serve: The broker does not answer"
    )


def test_versions_that_cannot_be_released_are_reported(site: Site):
    """When the state store goes away after the activation, the promotion succeeds, and old versions stay wanted."""
    write_scale(site.stage.root, site.model, "3", 100)
    site.register("1", "2", "3")
    progress: list[str] = []

    def leave(line: str) -> None:
        progress.append(line)
        site.store.is_away = "is active from now on" in line

    operator = site.operator(leave)
    site.deployer.promote(site.model, "1")
    site.deployer.promote(site.model, "2")
    assert operator.promote(site.model, "3").activated_at
    assert progress[-1].startswith("older versions may still be in memory: The store of model states does not answer")
    site.store.is_away = False
    assert (site.active(), site.is_wanted("1")) == ("3", True)


def test_sync_does_not_sign_a_decision_again(site: Site, tmp_path: Path):
    """After a change of the key `sync` is refused, and a new decision has the new signature."""
    old, new = (OperatorKey.generate(tmp_path / f"{name}.pem") for name in ("old", "new"))
    site.register("1", "2")
    site.operator(sign=old.sign).promote(site.model, "1")
    operator = site.operator(sign=new.sign)
    with pytest.raises(TransitionConflict, match=r"that another key signed\. Expected a new decision"):
        operator.sync(site.model)
    operator.promote(site.model, "2")
    active = site.broker.actives([site.model])[site.model]
    assert Deployment.open(active, site.model, PublicKeys.parse(new.public_text).verify).version == "2"


def test_sync_completes_a_rollout_after_a_crash(site: Site):
    """When the broker missed a decision, `sync` or a second promotion activates it; repeating is harmless."""
    site.register("1", "2")
    site.registry.promote(site.model, "1", ModelStage.PRODUCTION)
    assert site.active() == ""
    assert [site.deployer.sync(site.model).version for _ in range(2)] == ["1", "1"]
    assert site.active() == "1"
    site.registry.promote(site.model, "2", ModelStage.PRODUCTION)
    with pytest.raises(TransitionRefused, match="in production already"):
        site.deployer.promote(site.model, "2")
    assert site.active() == "2"


def test_an_older_copy_of_the_registry_decides_nothing(site: Site, tmp_path: Path):
    """An older copy is refused before anything is written, because workers would ignore it; `sign` adopts it."""
    site.register("1", "2")
    site.deployer.promote(site.model, "1")
    shutil.copy(tmp_path / "registry.db", tmp_path / "copy.db")
    site.deployer.promote(site.model, "2")
    registry = ModelRegistryClient(f"sqlite:///{tmp_path}/copy.db", sign=new_key().sign)
    copy = Deployer(registry, site.stage.broker, states=site.store)
    before = registry.history(site.model)
    for decide in (lambda: copy.promote(site.model, "2"), lambda: copy.rollback(site.model)):
        with pytest.raises((TransitionConflict, TransitionRefused), match=r"older copy\. Nothing was|no earlier"):
            decide()
    assert (site.active(), registry.history(site.model)) == ("2", before)
    assert copy.sign(site.model).epoch == before[-1].epoch + 2
    assert site.active() == "1"
    copy.promote(site.model, "2")
    assert site.active() == "2"


def test_a_new_registry_starts_after_the_active_epoch(site: Site, tmp_path: Path):
    """After the loss of a registry, registering again is enough: the epochs of a model never go back."""
    site.register("1", "2")
    site.deployer.promote(site.model, "1")
    site.deployer.promote(site.model, "2")
    operator = new_key()
    registry = ModelRegistryClient(
        f"sqlite:///{tmp_path}/other.db", sign=operator.sign, verify=PublicKeys.parse(operator.public_text).verify
    )
    other = Deployer(registry, site.stage.broker, states=site.store)
    other.register(site.stage.root / site.model / "1")
    assert registry.find(site.model, "1").epoch == site.registry.history(site.model)[-1].epoch + 1
    other.promote(site.model, "1", "staging")
    other.promote(site.model, "1")
    assert site.active() == "1"
    with pytest.raises(TransitionConflict, match="older copy"):
        site.deployer.rollback(site.model)
    assert site.registry.find(site.model).version == "2"


def test_load_and_unload_wait_for_the_workers(site: Site):
    """Both return the workers; the active version is not unloaded, and after the time limit late workers are named."""
    drain = site.start()
    site.register("1", "2")
    assert site.deployer.load(site.model, "1") == [drain.name]
    assert site.state(drain, "1") == "ready"
    assert site.deployer.unload(site.model, "1") == [drain.name]
    assert site.state(drain, "1") == "cold"
    with pytest.raises(TransitionRefused, match="is the active version"):
        site.deployer.unload(site.model, "2")
    write_scale(site.stage.root, site.model, "4", 4, load_s=2.0)
    site.register("4")
    with pytest.raises(ModelNotReady, match=r"4 was not ready everywhere within 0\.1 s: stage-0 is "):
        site.deployer.load(site.model, "4", timeout_s=0.1)
    with pytest.raises(ModelNotReady, match=r"'absent' is no live worker .* one of: stage-0"):
        site.deployer.load(site.model, "1", worker="absent")
    with pytest.raises(ConfigurationError, match="Expected an operator's key"):
        site.deployer.load(site.model, "1", worker=drain.name)


def test_a_registration_publishes_the_spec(site: Site):
    """Without workers the spec of the first version is that of the model; later ones are only their version's."""
    site.deployer.register(site.stage.root / site.model / "2")
    site.deployer.register(site.stage.root / site.model / "2")
    broker = site.stage.broker
    assert broker.spec(site.model, "2") is not None
    assert broker.spec(site.model) == broker.spec(site.model, "2")
    site.deployer.promote(site.model, "2", "staging")
    site.deployer.promote(site.model, "2")
    site.deployer.register(site.stage.root / site.model / "1")
    assert b'"version":"2"' in (broker.spec(site.model) or b"")
    assert b'"version":"1"' in (broker.spec(site.model, "1") or b"")


def test_a_registration_without_a_broker_can_be_repeated(site: Site):
    """The error tells that the version is registered and its jobs are not accepted; repeating it publishes it."""
    site.broker.is_away = True
    with pytest.raises(BrokerUnavailable, match=r"/1 is registered, in draft, but its jobs are not accepted yet"):
        site.deployer.register(site.stage.root / site.model / "1")
    site.broker.is_away = False
    assert site.deployer.register(site.stage.root / site.model / "1").stage is ModelStage.DRAFT
    assert site.stage.broker.spec(site.model, "1")


def test_another_content_hash_under_a_label_is_refused(site: Site):
    """A label belongs to one content hash for ever."""
    site.register("1")
    with (site.stage.root / site.model / "1" / "model.py").open("a") as module:
        module.write("# changed\n")
    with pytest.raises(InvalidInput, match="changed files need another label"):
        site.deployer.register(site.stage.root / site.model / "1")
