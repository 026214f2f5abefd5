"""Operator RPC in a worker: each request runs once, beside Celery's thread, within the worker's folders. IN-064."""

from __future__ import annotations

import base64
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.registry import operator_rpc
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.control import Command
from penstock.registry.deployment import Deployment
from penstock.registry.errors import (
    BadSignature,
    ConfigurationError,
    InvalidInput,
    ModelNotReady,
    PenstockError,
    RegistryUnavailable,
    UndecodableEnvelope,
)
from penstock.registry.package import load_package
from penstock.registry.settings import Settings
from penstock.safety.operator_key import PublicKeys
from penstock.workers.process.operator_rpc import OperatorRpcServer
from tests.packages import write_double, write_package
from tests.registry.catalog.catalogs import new_key
from tests.servers import ROOT, wait_until

KEY = "k1:" + base64.b64encode(b"a" * 32).decode()


class SlowBroker(MemoryBroker):
    """Lists its models when the test permits it, and counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()
        self.asked = 0

    def models(self) -> list[str]:
        self.asked += 1
        self.may_answer.wait(600)
        return super().models()

    def workers(self) -> list[bytes]:
        raise RuntimeError("a secret /path")


class Harness:
    """The RPC server of a worker, and an operator who sends requests to it."""

    def __init__(self, folder: Path) -> None:
        environ = {
            "PENSTOCK_HOME": str(folder / "home"),
            "PENSTOCK_INFERENCE_REPO_ROOT": str(folder / "models"),
            "PENSTOCK_SIGNING_KEYS": KEY,
        }
        self.settings = Settings.load(environ=environ)
        self.root = folder / "models"
        self.root.mkdir()
        self.broker = SlowBroker()
        self.rpc_server = OperatorRpcServer(self.settings, self.broker, None)

    def ask(self, request: operator_rpc.Request, key: str = "e1") -> operator_rpc.Response:
        """Send a request once."""
        sealed = self.rpc_server.handle(Command("rpc", request_id=key, body=operator_rpc.encode(request)))
        return operator_rpc.open_response(key, sealed, self.settings.keyring)

    def run(self, request: operator_rpc.Request, kind: Any = None) -> Any:
        """Send a request until it is done."""
        while not (answer := self.ask(request, key=str(request))).is_done:
            time.sleep(0.01)
        return answer.read(kind)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    """See Harness."""
    made = Harness(tmp_path)
    yield made
    made.broker.may_answer.set()


def test_a_long_request_is_sent_again(harness: Harness):
    """While a request runs, each call returns "not done". However often it is sent, it runs once."""
    assert [harness.ask(operator_rpc.Models()).is_done for _ in range(3)] == [False] * 3
    harness.broker.may_answer.set()
    assert harness.run(operator_rpc.Names(), tuple[str, ...]) == ()
    while not (answer := harness.ask(operator_rpc.Models())).is_done:
        time.sleep(0.01)
    assert answer.read(list[str]) == []
    assert harness.broker.asked == 1


def test_requests_do_not_pile_up(harness: Harness):
    """Four requests run at a time. The fifth is refused with the reason, and accepted after one of them ends."""
    for number in range(4):
        harness.ask(operator_rpc.Models(), key=f"e{number}")
    with pytest.raises(ModelNotReady, match="4 operator requests already"):
        harness.ask(operator_rpc.Names(), key="e5")
    harness.broker.may_answer.set()
    wait_until(lambda: _is_accepted(harness), 10, "room for a fifth request")


def _is_accepted(harness: Harness) -> bool:
    try:
        harness.ask(operator_rpc.Inspect("none/1"), key="e5")
    except ModelNotReady:
        return False
    return True


def test_a_package_is_read_below_the_models_root(harness: Harness):
    """The response has spec, files and content hash. For a wrong package it has the text of the package's own error."""
    write_double(harness.root)
    found = harness.run(operator_rpc.Inspect("double/1"), operator_rpc.InspectedPackage)
    assert found.source == str(harness.root / "double" / "1")
    assert sorted(found.hashed.files) == ["model.py", "model.yaml"]
    assert harness.run(operator_rpc.Rehash(found.source), operator_rpc.HashedFiles) == found.hashed
    with pytest.raises(ConfigurationError, match=r"none/1/model\.yaml: "):
        harness.run(operator_rpc.Inspect("none/1"))


def test_an_id_belongs_to_one_request(harness: Harness):
    """A command with the id of another request is refused: it does not get the response to that one."""
    harness.ask(operator_rpc.Names(), key="e1")
    with pytest.raises(InvalidInput, match="another operator request"):
        harness.ask(operator_rpc.Actives(("double",)), key="e1")


def test_a_running_request_is_remembered(harness: Harness):
    """However many others end meanwhile, it does not begin again."""
    harness.ask(operator_rpc.Models(), key="long")
    for number in range(300):
        harness.run(operator_rpc.Spec(f"m{number}", "1"))
    assert not harness.ask(operator_rpc.Models(), key="long").is_done
    assert harness.broker.asked == 1


def test_a_request_without_a_thread_is_refused(harness: Harness):
    """Where the machine starts no thread, the operator learns it at once, and later requests run."""
    usual = threading.stack_size(2**46)
    try:
        for number in range(5):
            with pytest.raises(ModelNotReady, match="start no thread"):
                harness.ask(operator_rpc.Names(), key=f"e{number}")
    finally:
        threading.stack_size(usual)
    assert harness.run(operator_rpc.Names(), tuple[str, ...]) == ()


@pytest.mark.parametrize(
    ("slot", "spec", "version"),
    [
        ("double", b"garbage", "1"),
        ("double", b"{}", ""),
        ("other", None, "1"),
        ("double", None, "2"),
        ("not a name}", None, ""),
    ],
)
def test_a_spec_that_clients_could_not_read_is_not_written(
    harness: Harness, slot: str, spec: bytes | None, version: str
):
    """A spec that is none, or that is another model's, leaves no trace in the broker."""
    encoded = load_package(write_double(harness.root)).spec.to_json() if spec is None else spec
    with pytest.raises((ConfigurationError, InvalidInput)):
        harness.run(operator_rpc.PutSpec(slot, encoded, version))
    harness.broker.may_answer.set()
    assert (harness.broker.models(), harness.broker.spec(slot, version)) == ([], None)


def test_a_deployment_that_workers_would_refuse_is_not_written(harness: Harness):
    """A record of another model or epoch, or of an unknown key, does not reach the broker (S0.3)."""
    known, unknown = new_key(), new_key()
    spec = load_package(write_double(harness.root)).spec.to_json()
    harness.rpc_server = OperatorRpcServer(harness.settings, harness.broker, PublicKeys.parse(known.public_text).verify)
    decision = Deployment(3, "double", "1", "ab" * 32)
    for slot, epoch, record in (
        ("double", 3, decision.seal(unknown.sign)),
        ("double", 3, decision.seal()),
        ("double", 4, decision.seal(known.sign)),
        ("other", 3, decision.seal(known.sign)),
    ):
        with pytest.raises(BadSignature):
            harness.run(operator_rpc.Activate(slot, epoch, record, "1", spec))
    with pytest.raises(ConfigurationError, match="Stored model spec"):
        harness.run(operator_rpc.Activate("double", 3, decision.seal(known.sign), "1", b"{}"))
    assert harness.broker.actives(["double", "other"]) == {"double": b"", "other": b""}
    assert harness.run(operator_rpc.Activate("double", 3, decision.seal(known.sign), "1", spec), bool)


def test_code_outside_the_trusted_roots_is_refused(harness: Harness, tmp_path: Path):
    """A request does not extend the roots that the worker trusts (S0.4)."""
    source = "def build():\n    return lambda inputs: inputs\n"
    folder = write_package(tmp_path / "elsewhere", "double", source)
    with pytest.raises(ConfigurationError, match="trusted"):
        harness.run(operator_rpc.Inspect(str(folder)))


def test_code_is_trusted_under_the_roots_of_the_settings(harness: Harness, tmp_path: Path):
    """With PENSTOCK_TRUSTED_ROOTS, code there is read, and the models root is trusted no more."""
    folder = write_double(tmp_path / "elsewhere")
    write_double(harness.root)
    settings = harness.settings.changed({"trusted_roots": (tmp_path / "elsewhere",)})
    harness.rpc_server = OperatorRpcServer(settings, harness.broker, None)
    assert harness.run(operator_rpc.Inspect(str(folder)), operator_rpc.InspectedPackage).source == str(folder)
    with pytest.raises(ConfigurationError, match="trusted"):
        harness.run(operator_rpc.Inspect("double/1"))


@pytest.mark.parametrize("file", ["../x.onnx", "/tmp/x.onnx", "a/b.onnx", ".x", "..", "", "x\n.onnx"])
def test_exports_stay_in_their_folder(harness: Harness, file: str):
    """No file name of a request leads out of the export folder (S0.5)."""
    source = str(write_double(harness.root))
    with pytest.raises(InvalidInput, match="no plain file name"):
        harness.run(operator_rpc.Export(source, "", file, False))
    assert not (harness.settings.home / "exports").exists()


def _mlp(harness: Harness) -> operator_rpc.InspectedPackage:
    shutil.copytree(ROOT / "models" / "mlp" / "1", harness.root / "mlp" / "1")
    found: operator_rpc.InspectedPackage = harness.run(operator_rpc.Inspect("mlp/1"), operator_rpc.InspectedPackage)
    return found


def test_a_version_with_other_content_is_not_exported(harness: Harness):
    """What is exported is what the operator has seen."""
    found = _mlp(harness)
    with pytest.raises(ConfigurationError, match="mlp/1"):
        harness.run(operator_rpc.Export(found.source, "0" * 64, "wrong.onnx", False))


@pytest.mark.slow
def test_a_version_is_exported_and_checked(harness: Harness):
    """A child process compares the export with the model."""
    found = _mlp(harness)
    done = harness.run(
        operator_rpc.Export(found.source, found.hashed.content_hash, "mlp.onnx", False), operator_rpc.ExportedFile
    )
    assert done.path == str(harness.settings.home / "exports" / "mlp.onnx")
    assert done.bytes == Path(done.path).stat().st_size
    assert done.differences["logits"] < 1e-4
    assert [path.name for path in Path(done.path).parent.iterdir()] == ["mlp.onnx"]


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda harness: operator_rpc.Workers(), PenstockError, "log has the reason"),
        (lambda harness: _without_registry(harness), RegistryUnavailable, "registry's database"),
    ],
    ids=["a defect", "no database"],
)
def test_errors_reach_the_operator_without_secrets(
    harness: Harness, spoil: Callable[[Harness], operator_rpc.Request], error: type[PenstockError], message: str
):
    """An expected error arrives with its class and text. Of an unexpected one the operator learns that it happened."""
    with pytest.raises(error, match=message) as raised:
        harness.run(spoil(harness))
    assert "/path" not in str(raised.value)


def _without_registry(harness: Harness) -> operator_rpc.Request:
    harness.settings.home.mkdir(exist_ok=True)
    (harness.settings.home / "registry.db").write_bytes(b"not a database at all" * 100)
    return operator_rpc.Names()


def test_a_body_that_is_not_a_request_is_refused(harness: Harness):
    """The command is refused before a request begins."""
    with pytest.raises(UndecodableEnvelope, match="not an RPC request"):
        harness.rpc_server.handle(Command("rpc", request_id="e1", body=b"\x91\xa5erase"))
