"""A worker's clerk: errands are done once, beside Celery's thread, and within the worker's own folders. IN-064."""

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
from penstock.registry.settings import Settings
from penstock.safety.keys import PublicKeys
from penstock.workers.process.operator_rpc import OperatorRpcServer
from tests.packages import write_double, write_package
from tests.registry.catalog.catalogs import new_key
from tests.servers import ROOT, wait_until

KEY = "k1:" + base64.b64encode(b"a" * 32).decode()


class SlowBroker(MemoryBroker):
    """Lists its models when it is told to, and counts how often it was asked."""

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


class Counter:
    """A worker's counter, and an operator before it."""

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

    def ask(self, errand: operator_rpc.Errand, key: str = "e1") -> operator_rpc.Answer:
        """One look at an errand."""
        sealed = self.rpc_server.handle(Command("errand", errand=key, body=operator_rpc.encode(errand)))
        return operator_rpc.open_answer(key, sealed, self.settings.keyring)

    def run(self, errand: operator_rpc.Errand, kind: Any = None) -> Any:
        """Until it is done."""
        while not (answer := self.ask(errand, key=str(errand))).is_done:
            time.sleep(0.01)
        return answer.read(kind)


@pytest.fixture
def counter(tmp_path: Path) -> Iterator[Counter]:
    """See Counter."""
    made = Counter(tmp_path)
    yield made
    made.broker.may_answer.set()


def test_an_errand_that_takes_long_is_asked_for_again(counter: Counter):
    """Celery's thread gets "not yet" and does not wait; the errand runs once, whoever asks how often."""
    assert [counter.ask(operator_rpc.Models()).is_done for _ in range(3)] == [False] * 3
    counter.broker.may_answer.set()
    assert counter.run(operator_rpc.Names(), tuple[str, ...]) == ()
    while not (answer := counter.ask(operator_rpc.Models())).is_done:
        time.sleep(0.01)
    assert answer.read(list[str]) == []
    assert counter.broker.asked == 1


def test_errands_do_not_pile_up(counter: Counter):
    """Four at a time; the fifth is refused in words, and taken when there is room."""
    for number in range(4):
        counter.ask(operator_rpc.Models(), key=f"e{number}")
    with pytest.raises(ModelNotReady, match="4 errands already"):
        counter.ask(operator_rpc.Names(), key="e5")
    counter.broker.may_answer.set()
    wait_until(lambda: _is_taken(counter), 10, "room for a fifth errand")


def _is_taken(counter: Counter) -> bool:
    try:
        counter.ask(operator_rpc.Inspect("none/1"), key="e5")
    except ModelNotReady:
        return False
    return True


def test_a_package_is_read_below_the_models_root(counter: Counter):
    """Spec, files and content hash; what is wrong with one is said in the words of the package's own error."""
    write_double(counter.root)
    found = counter.run(operator_rpc.Inspect("double/1"), operator_rpc.InspectedPackage)
    assert found.source == str(counter.root / "double" / "1")
    assert sorted(found.hashed.files) == ["model.py", "model.yaml"]
    assert counter.run(operator_rpc.Rehash(found.source), operator_rpc.HashedFiles) == found.hashed
    with pytest.raises(ConfigurationError, match=r"none/1/model\.yaml: "):
        counter.run(operator_rpc.Inspect("none/1"))


def test_no_decision_is_written_that_workers_would_not_believe(counter: Counter):
    """Of another model or epoch, or signed by a stranger: refused before the broker has it (S0.3)."""
    known, stranger = new_key(), new_key()
    counter.rpc_server = OperatorRpcServer(counter.settings, counter.broker, PublicKeys.parse(known.public_text).verify)
    decision = Deployment(3, "double", "1", "ab" * 32)
    for slot, epoch, record in (
        ("double", 3, decision.seal(stranger.sign)),
        ("double", 3, decision.seal()),
        ("double", 4, decision.seal(known.sign)),
        ("other", 3, decision.seal(known.sign)),
    ):
        with pytest.raises(BadSignature):
            counter.run(operator_rpc.Activate(slot, epoch, record, "1", b"{}"))
    assert counter.broker.actives(["double", "other"]) == {"double": b"", "other": b""}
    assert counter.run(operator_rpc.Activate("double", 3, decision.seal(known.sign), "1", b"{}"), bool)


def test_code_from_outside_of_the_trusted_roots_is_no_package(counter: Counter, tmp_path: Path):
    """An operator's order does not widen what the worker trusts (S0.4)."""
    source = "def build():\n    return lambda inputs: inputs\n"
    folder = write_package(tmp_path / "elsewhere", "double", source)
    with pytest.raises(ConfigurationError, match="trusted"):
        counter.run(operator_rpc.Inspect(str(folder)))


@pytest.mark.parametrize("file", ["../x.onnx", "/tmp/x.onnx", "a/b.onnx", ".x", "..", "", "x\n.onnx"])
def test_exports_stay_in_their_folder(counter: Counter, file: str):
    """Whatever the operator calls them (S0.5)."""
    source = str(write_double(counter.root))
    with pytest.raises(InvalidInput, match="no plain name"):
        counter.run(operator_rpc.Export(source, "", file, False))
    assert not (counter.settings.home / "exports").exists()


def test_a_version_is_exported_beside_the_others(counter: Counter):
    """Checked against the model in a child process, into the worker's own folder; other content is refused."""
    shutil.copytree(ROOT / "models" / "mlp" / "1", counter.root / "mlp" / "1")
    found = counter.run(operator_rpc.Inspect("mlp/1"), operator_rpc.InspectedPackage)
    with pytest.raises(ConfigurationError, match="mlp/1"):
        counter.run(operator_rpc.Export(found.source, "0" * 64, "wrong.onnx", False))
    done = counter.run(
        operator_rpc.Export(found.source, found.hashed.content_hash, "mlp.onnx", False), operator_rpc.ExportedFile
    )
    assert done.path == str(counter.settings.home / "exports" / "mlp.onnx")
    assert done.bytes == Path(done.path).stat().st_size
    assert done.differences["logits"] < 1e-4
    assert [path.name for path in Path(done.path).parent.iterdir()] == ["mlp.onnx"]


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda counter: operator_rpc.Workers(), PenstockError, "its log says why"),
        (lambda counter: _without_registry(counter), RegistryUnavailable, "registry's database"),
    ],
    ids=["a defect", "no database"],
)
def test_what_goes_wrong_is_told_without_secrets(
    counter: Counter, spoil: Callable[[Counter], operator_rpc.Errand], error: type[PenstockError], message: str
):
    """As the error that it is; of a defect only that there was one."""
    with pytest.raises(error, match=message) as raised:
        counter.run(spoil(counter))
    assert "/path" not in str(raised.value)


def _without_registry(counter: Counter) -> operator_rpc.Errand:
    counter.settings.home.mkdir(exist_ok=True)
    (counter.settings.home / "registry.db").write_bytes(b"not a database at all" * 100)
    return operator_rpc.Names()


def test_what_is_no_errand_is_refused_before_anything_runs(counter: Counter):
    """It is the answer to the command itself."""
    with pytest.raises(UndecodableEnvelope, match="not an errand"):
        counter.rpc_server.handle(Command("errand", errand="e1", body=b"\x91\xa5erase"))
