"""An operator with Celery's broker and nothing else: decides and signs here, and a worker lends its connections.

CX-003, IN-001, IN-064, IN-065.
"""

from __future__ import annotations

import base64
import secrets
from pathlib import Path
from typing import Any

import pytest

from penstock.compose.deploy import Deployer, deployed
from penstock.compose.rollout.remote import Remote, RemoteFleet, RemoteLedger
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
from penstock.safety.keys import OperatorKey, PublicKeys
from penstock.workers.process.operator_rpc import OperatorRpcServer
from tests.packages import write_package
from tests.registry.catalog.catalogs import SOURCE, new_key

WORKER = "gpu0@host"


class Post:
    """ControlClient without Celery: sealed answers of a server in this process; a test may replace one of them."""

    def __init__(self, rpc_server: OperatorRpcServer, keyring: Keyring) -> None:
        self._rpc_server = rpc_server
        self._keyring = keyring
        self.replaced: dict[type, object] = {}
        self.asked: list[str] = []

    def listener(self, worker: str | None = None) -> str:
        """The one worker."""
        if worker not in (None, WORKER):
            raise ModelNotReady(f"No worker {worker!r} listens")
        return WORKER

    def run(self, request: operator_rpc.Request, worker: str, kind: Any) -> Any:
        """See ControlClient.run."""
        assert worker == WORKER
        self.asked.append(type(request).__name__)
        command = Command("rpc", request_id=secrets.token_hex(8), body=operator_rpc.encode(request))
        while not (
            answer := operator_rpc.open_response(command.request_id, self._rpc_server.handle(command), self._keyring)
        ).is_done:
            pass
        return self.replaced.get(type(request), None) or answer.read(kind)


class Outpost:
    """A worker's machine with versions 1 and 2 of a model, and operators far from it."""

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

    def operator(self, key: OperatorKey | None = None) -> tuple[Deployer, Post]:
        """One more operator, and what is between them and the worker."""
        key = key or self.key
        post = Post(self.rpc_server, self.settings.keyring)
        remote = Remote(post)  # type: ignore[arg-type]
        registry = ModelRegistryClient(
            RemoteLedger(remote), sign=key.sign, verify=self._verify(self.key), rehash=remote.rehash, actor="far"
        )
        return Deployer(registry, RemoteFleet(remote), files=remote, sign=key.sign, load_timeout_s=2), post

    @staticmethod
    def _verify(key: OperatorKey) -> Any:
        return PublicKeys.parse(key.public_text).verify


@pytest.fixture
def outpost(tmp_path: Path) -> Outpost:
    """See Outpost."""
    return Outpost(tmp_path)


def _prepare(deployer: Deployer) -> None:
    """Version 1 in production, 2 in staging."""
    for version in ("1", "2"):
        deployer.register(Path(f"times/{version}"))
        deployer.promote("times", version, "staging")
    deployer.promote("times", "1")


def test_everything_is_done_without_a_database_or_a_broker(outpost: Outpost):
    """Register, promote, roll back, verify, look: signed here, and written there as any other operator finds it."""
    deployer, post = outpost.operator()
    lineage = ModelLineage(data_version="d7")
    deployer.register(Path("times/1"), lineage, reason="first")
    _prepare(deployer)
    assert deployed(outpost.broker, "times").version == "1"  # type: ignore[union-attr]
    assert deployer.promote("times", "2", reason="better").transition.productions == ("1", "2")
    assert deployed(outpost.broker, "times").version == "2"  # type: ignore[union-attr]
    assert deployer.rollback("times").transition.version == "1"
    assert deployer.sync("times").version == "1"
    assert deployer.registry.lineage("times", "1") == lineage
    assert deployer.registry.verify("times", "2").stage is ModelStage.ARCHIVED
    assert deployer.registry.models() == ("times",)
    assert [each.reference for each in deployer.registry.versions()] == ["times/1", "times/2"]
    near = ModelRegistryClient(outpost.settings.registry_url, verify=Outpost._verify(outpost.key))
    assert near.history("times") == deployer.registry.history("times")
    assert {each.actor for each in near.history("times")} == {"far"}
    assert outpost.broker.spec("times", "2") is not None
    assert {"Read", "Enter", "Inspect", "Rehash", "Activate", "PutSpec"} <= set(post.asked)


def test_of_two_operators_one_is_told_that_the_other_came_first(outpost: Outpost):
    """Nothing is locked while an operator thinks: what was overtaken is refused, and nothing of it written."""
    (one, _), (other, post) = outpost.operator(), outpost.operator()
    _prepare(one)
    seen = other.registry._store.read(("times",))["times"]
    one.registry.promote("times", "2", "production")
    post.replaced[operator_rpc.Read] = {"times": seen}
    with pytest.raises(TransitionConflict, match="changed meanwhile"):
        other.registry.promote("times", "2", "production")
    post.replaced.clear()
    assert other.registry.find("times").version == "2"
    assert len(other.registry.history("times")) == 6


def test_a_worker_that_lies_is_not_believed(outpost: Outpost):
    """Rows that no operator signed, an older state of one of them, one left out, another content: refused (S0.3)."""
    deployer, post = outpost.operator()
    _prepare(deployer)
    true = deployer.registry._store.read(("times",))["times"]
    old = true.versions[0]
    deployer.promote("times", "2")
    now = deployer.registry._store.read(("times",))["times"]
    lies = [
        ModelRows([{**now.versions[0], "stage": "draft"}, now.versions[1]], now.transitions),
        ModelRows([old, now.versions[1]], now.transitions),
        ModelRows(now.versions[:1], now.transitions),
        ModelRows(now.versions, [*now.transitions[:-2], now.transitions[-1]]),
    ]
    for lie in lies:
        post.replaced[operator_rpc.Read] = {"times": lie}
        with pytest.raises(BadSignature):
            deployer.registry.find("times", "1")
    post.replaced = {operator_rpc.Rehash: operator_rpc.HashedFiles({"model.py": "0" * 64}, {}, "0" * 64)}
    with pytest.raises(ContentChanged):
        deployer.registry.verify("times", "1")


def test_an_operator_whom_the_worker_does_not_know_changes_nothing(outpost: Outpost):
    """Even behind an order of somebody whom it knows: every row is checked (S0.3)."""
    deployer, _ = outpost.operator()
    _prepare(deployer)
    stranger, _ = outpost.operator(new_key())
    with pytest.raises(BadSignature):
        stranger.registry.promote("times", "2", "production")
    assert deployer.registry.find("times").version == "1"


def test_what_is_missing_there_is_said_here(outpost: Outpost):
    """Models, workers and packages by name, in the words of whoever missed them."""
    deployer, post = outpost.operator()
    with pytest.raises(UnknownModel, match="Unknown model 'times'"):
        deployer.registry.find("times")
    with pytest.raises(ModelNotReady, match="nobody@host"):
        Remote(post, "nobody@host")  # type: ignore[arg-type]
    deployer.register(Path("times/1"))
    with pytest.raises(UnknownModel, match="Unknown version '9'"):
        deployer.registry.find("times", "9")
    (outpost.root / "times" / "1" / "model.py").write_text("def build():\n    return None\n")
    with pytest.raises(ContentChanged, match=r"times/1: file model\.py is not as it was registered"):
        deployer.registry.promote("times", "1", "staging")


def test_a_new_key_takes_over_while_both_are_believed(outpost: Outpost):
    """Records and the decision that workers follow are signed anew; after that the old key is needed no more."""
    deployer, _ = outpost.operator()
    _prepare(deployer)
    new = new_key()
    both = PublicKeys.parse(f"{outpost.key.public_text},{new.public_text}").verify
    outpost.rpc_server = OperatorRpcServer(outpost.settings, outpost.broker, both)
    post = Post(outpost.rpc_server, outpost.settings.keyring)
    remote = Remote(post)  # type: ignore[arg-type]
    registry = ModelRegistryClient(RemoteLedger(remote), sign=new.sign, verify=both, rehash=remote.rehash)
    before = registry.history("times")
    signed = Deployer(registry, RemoteFleet(remote), files=remote, sign=new.sign).sign("times", reason="rotation")
    assert (signed.action, signed.version, signed.productions) == ("sign", "1", ("1",))
    alone = Outpost._verify(new)
    near = ModelRegistryClient(outpost.settings.registry_url, sign=new.sign, verify=alone)
    assert near.history("times")[:-1] == before
    active = outpost.broker.actives(["times"])["times"]
    assert Deployment.open(active, "times", alone).version == "1"
    assert near.promote("times", "2", "production").replaced == "1"
    with pytest.raises(InvalidInput, match="does not sign"):
        ModelRegistryClient(outpost.settings.registry_url, verify=alone).renew("times")
