"""An operator who can reach only Celery's broker: this process decides and signs, a worker reads and writes.

CX-003, IN-001, IN-064, IN-065.
"""

from __future__ import annotations

import base64
import secrets
from pathlib import Path
from typing import Any

import pytest

from penstock.compose.deploy import Deployer
from penstock.compose.rollout.active_version import active_deployment
from penstock.compose.rollout.remote import Remote, RemoteFleet, RemoteRegistryStore
from penstock.registry import operator_rpc
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.catalog import ModelRegistryClient
from penstock.registry.catalog.lineage import ModelLineage
from penstock.registry.catalog.stages import ModelStage
from penstock.registry.catalog.store import ModelRows
from penstock.registry.control import Command
from penstock.registry.deployment import Deployment
from penstock.registry.envelope import Keyring
from penstock.registry.errors import (
    BadSignature,
    ContentChanged,
    InvalidInput,
    ModelNotReady,
    TransitionConflict,
    UnknownModel,
)
from penstock.registry.settings import Settings
from penstock.safety.operator_key import OperatorKey, PublicKeys
from penstock.workers.process.operator_rpc import OperatorRpcServer
from tests.packages import write_package
from tests.registry.catalog.catalogs import SOURCE, new_key

WORKER = "gpu0@host"


class LocalControl:
    """ControlClient without Celery: the server is in this process; a test may replace one of its answers."""

    def __init__(self, rpc_server: OperatorRpcServer, keyring: Keyring) -> None:
        self._rpc_server = rpc_server
        self._keyring = keyring
        self.replaced: dict[type, object] = {}
        self.called: list[str] = []

    def find_worker(self, worker: str | None = None) -> str:
        """The one worker."""
        if worker not in (None, WORKER):
            raise ModelNotReady(f"No worker {worker!r} listens")
        return WORKER

    def call(self, request: operator_rpc.Request, worker: str, kind: Any) -> Any:
        """See ControlClient.call."""
        assert worker == WORKER
        self.called.append(type(request).__name__)
        command = Command("rpc", request_id=secrets.token_hex(8), body=operator_rpc.encode(request))
        while not (
            answer := operator_rpc.open_response(command.request_id, self._rpc_server.handle(command), self._keyring)
        ).is_done:
            pass
        return self.replaced.get(type(request), None) or answer.read(kind)


class WorkerMachine:
    """A worker's machine with versions 1 and 2 of a model, and operators who reach it through the worker."""

    def __init__(self, folder: Path) -> None:
        self.key = new_key()
        environ = {
            "PENSTOCK_HOME": str(folder / "home"),
            "PENSTOCK_INFERENCE_REPO_ROOT": str(folder / "models"),
            "PENSTOCK_SIGNING_KEYS": "k1:" + base64.b64encode(b"a" * 32).decode(),
        }
        self.settings = Settings.load(environ=environ)
        self.broker = MemoryBroker()
        self.root = folder / "models"
        for version in ("1", "2"):
            write_package(self.root, "times", SOURCE, version=version)
        self.rpc_server = OperatorRpcServer(self.settings, self.broker, self._verify(self.key))

    def operator(self, key: OperatorKey | None = None) -> tuple[Deployer, LocalControl]:
        """One more operator, with the control client between operator and worker."""
        key = key or self.key
        control = LocalControl(self.rpc_server, self.settings.keyring)
        remote = Remote(control)  # type: ignore[arg-type]
        registry = ModelRegistryClient(
            RemoteRegistryStore(remote), sign=key.sign, verify=self._verify(self.key), rehash=remote.rehash, actor="far"
        )
        return Deployer(registry, RemoteFleet(remote), files=remote, sign=key.sign, load_timeout_s=2), control

    @staticmethod
    def _verify(key: OperatorKey) -> Any:
        return PublicKeys.parse(key.public_text).verify


@pytest.fixture
def machine(tmp_path: Path) -> WorkerMachine:
    """See WorkerMachine."""
    return WorkerMachine(tmp_path)


def _prepare(deployer: Deployer) -> None:
    """Version 1 in production, 2 in staging."""
    for version in ("1", "2"):
        deployer.register(Path(f"times/{version}"))
        deployer.promote("times", version, "staging")
    deployer.promote("times", "1")


def test_an_operator_needs_neither_database_nor_broker(machine: WorkerMachine):
    """Register, promote, roll back, verify and read: signed here, written there, and visible to other operators."""
    deployer, control = machine.operator()
    lineage = ModelLineage(data_version="d7")
    deployer.register(Path("times/1"), lineage, reason="first")
    _prepare(deployer)
    assert active_deployment(machine.broker, "times").version == "1"  # type: ignore[union-attr]
    assert deployer.promote("times", "2", reason="better").transition.productions == ("1", "2")
    assert active_deployment(machine.broker, "times").version == "2"  # type: ignore[union-attr]
    assert deployer.rollback("times").transition.version == "1"
    assert deployer.sync("times").version == "1"
    assert deployer.registry.lineage("times", "1") == lineage
    assert deployer.registry.verify("times", "2").stage is ModelStage.ARCHIVED
    assert deployer.registry.models() == ("times",)
    assert [each.reference for each in deployer.registry.versions()] == ["times/1", "times/2"]
    near = ModelRegistryClient(machine.settings.registry_url, verify=WorkerMachine._verify(machine.key))
    assert near.history("times") == deployer.registry.history("times")
    assert {each.actor for each in near.history("times")} == {"far"}
    assert machine.broker.spec("times", "2") is not None
    assert {"Read", "Enter", "Inspect", "Rehash", "Activate", "PutSpec"} <= set(control.called)


def test_of_two_operators_the_second_is_refused(machine: WorkerMachine):
    """No lock is held between read and write: a change that another one overtook is refused and not written."""
    (one, _), (other, control) = machine.operator(), machine.operator()
    _prepare(one)
    seen = other.registry._store.read(("times",))["times"]
    one.registry.promote("times", "2", "production")
    control.replaced[operator_rpc.Read] = {"times": seen}
    with pytest.raises(TransitionConflict, match="changed meanwhile"):
        other.registry.promote("times", "2", "production")
    control.replaced.clear()
    assert other.registry.find("times").version == "2"
    assert len(other.registry.history("times")) == 6


def test_forged_rows_of_a_worker_are_refused(machine: WorkerMachine):
    """Unsigned rows, an older state of a row, a missing row and another content hash are refused (S0.3)."""
    deployer, control = machine.operator()
    _prepare(deployer)
    true = deployer.registry._store.read(("times",))["times"]
    old = true.versions[0]
    deployer.promote("times", "2")
    now = deployer.registry._store.read(("times",))["times"]
    forgeries = [
        ModelRows([{**now.versions[0], "stage": "draft"}, now.versions[1]], now.transitions),
        ModelRows([old, now.versions[1]], now.transitions),
        ModelRows(now.versions[:1], now.transitions),
        ModelRows(now.versions, [*now.transitions[:-2], now.transitions[-1]]),
    ]
    for forged in forgeries:
        control.replaced[operator_rpc.Read] = {"times": forged}
        with pytest.raises(BadSignature):
            deployer.registry.find("times", "1")
    control.replaced = {operator_rpc.Rehash: operator_rpc.HashedFiles({"model.py": "0" * 64}, {}, "0" * 64)}
    with pytest.raises(ContentChanged):
        deployer.registry.verify("times", "1")


def test_an_unknown_operator_changes_nothing(machine: WorkerMachine):
    """Every row is checked, also when a known operator signed the command (S0.3)."""
    deployer, _ = machine.operator()
    _prepare(deployer)
    stranger, _ = machine.operator(new_key())
    with pytest.raises(BadSignature):
        stranger.registry.promote("times", "2", "production")
    assert deployer.registry.find("times").version == "1"


def test_errors_of_the_worker_are_raised_here(machine: WorkerMachine):
    """A missing model, worker or package raises the same error as on the worker's machine."""
    deployer, control = machine.operator()
    with pytest.raises(UnknownModel, match="Unknown model 'times'"):
        deployer.registry.find("times")
    with pytest.raises(ModelNotReady, match="absent@host"):
        Remote(control, "absent@host")  # type: ignore[arg-type]
    deployer.register(Path("times/1"))
    with pytest.raises(UnknownModel, match="Unknown version '9'"):
        deployer.registry.find("times", "9")
    (machine.root / "times" / "1" / "model.py").write_text("def build():\n    return None\n")
    with pytest.raises(ContentChanged, match=r"times/1: file model\.py is not as it was registered"):
        deployer.registry.promote("times", "1", "staging")


def test_a_key_is_rotated_while_both_are_trusted(machine: WorkerMachine):
    """`sign` signs the records and the active version with the new key; then the old key is not needed."""
    deployer, _ = machine.operator()
    _prepare(deployer)
    new = new_key()
    both = PublicKeys.parse(f"{machine.key.public_text},{new.public_text}").verify
    machine.rpc_server = OperatorRpcServer(machine.settings, machine.broker, both)
    control = LocalControl(machine.rpc_server, machine.settings.keyring)
    remote = Remote(control)  # type: ignore[arg-type]
    registry = ModelRegistryClient(RemoteRegistryStore(remote), sign=new.sign, verify=both, rehash=remote.rehash)
    before = registry.history("times")
    signed = Deployer(registry, RemoteFleet(remote), files=remote, sign=new.sign).sign("times", reason="rotation")
    assert (signed.action, signed.version, signed.productions) == ("sign", "1", ("1",))
    alone = WorkerMachine._verify(new)
    near = ModelRegistryClient(machine.settings.registry_url, sign=new.sign, verify=alone)
    assert near.history("times")[:-1] == before
    active = machine.broker.actives(["times"])["times"]
    assert Deployment.open(active, "times", alone).version == "1"
    assert near.promote("times", "2", "production").replaced == "1"
    with pytest.raises(InvalidInput, match="does not sign"):
        ModelRegistryClient(machine.settings.registry_url, verify=alone).renew("times")
