"""The decisions that a machine remembers, and how a restarted worker uses them (S0.1)."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.deployment import Deployment
from penstock.registry.signed import Verifier
from penstock.safety.operator_key import OperatorKey, PublicKeys
from penstock.workers.versions.deployment_store import FileDeploymentStore, epoch_of
from tests.servers import wait_until
from tests.workers.versions.test_lifecycle import Stage, two_versions


@pytest.fixture
def operator(tmp_path: Path) -> OperatorKey:
    """The operator whose decisions count."""
    return OperatorKey.generate(tmp_path / "operator.pem")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Versions 1 (x) and 2 (10 x) of a model."""
    with two_versions(tmp_path, MemoryBroker().connect) as stage:
        yield stage


def trust(*operators: OperatorKey) -> Verifier:
    """A verifier that trusts these operators."""
    return PublicKeys.parse(",".join(each.public_text for each in operators)).verify


def put_back(stage: Stage, *decision: object) -> None:
    """Replace the broker's record by any other, or remove it, as each client of the broker can."""
    activated = stage.broker._state.activated  # type: ignore[attr-defined]
    activated.pop(stage.model, None)
    if decision:
        activated[stage.model] = decision


def restarted(stage: Stage, verify: Verifier) -> None:
    """Stop the worker of this machine, and start it again."""
    if stage.drains:
        stage.drains.pop().stop(1.0)
    stage.start(verify=verify, home=str(home_of(stage)))


def home_of(stage: Stage) -> Path:
    """The home of all workers of this machine."""
    return stage.root.parent / "home"


def deployments(stage: Stage, epoch: int) -> Path:
    """Wait until the file has the decision of that epoch; returns the file."""
    file = home_of(stage) / "deployments" / f"{stage.model}.active"
    wait_until(lambda: file.exists() and epoch_of(file.read_bytes()) == epoch, 5, "the decision is remembered")
    return file


@pytest.mark.parametrize("how", ["an older record", "no record", "garbage"])
def test_a_restarted_worker_follows_the_last_decision(stage: Stage, operator: OperatorKey, how: str):
    """It ignores an older record, a missing record and garbage in the broker until a later decision comes."""
    verify = trust(operator)
    stage.promote("2", epoch=6, sign=operator.sign)
    old = stage.broker._state.activated[stage.model]  # type: ignore[attr-defined]
    restarted(stage, verify)
    stage.promote("1", epoch=7, sign=operator.sign)
    assert stage.answer() == ("1", 1.0)
    deployments(stage, 7)
    put_back(stage, *{"an older record": old, "no record": (), "garbage": (9, b"\nrubbish")}[how])
    restarted(stage, verify)
    assert stage.answer() == ("1", 1.0)
    put_back(stage)
    stage.promote("2", epoch=8, sign=operator.sign)
    assert stage.answer() == ("2", 10.0)
    deployments(stage, 8)


def test_operators_may_start_again(stage: Stage, operator: OperatorKey, tmp_path: Path):
    """A new registry begins with epoch 1: it is accepted after the key was replaced or the file was removed."""
    stage.promote("1", epoch=7, sign=operator.sign)
    restarted(stage, trust(operator))
    file = deployments(stage, 7)
    put_back(stage)
    stage.promote("2", epoch=1, sign=operator.sign)
    restarted(stage, trust(operator))
    assert stage.answer() == ("1", 1.0), "the new decision could be a replay"
    other = OperatorKey.generate(tmp_path / "other.pem")
    put_back(stage)
    stage.promote("2", epoch=1, sign=other.sign)
    restarted(stage, trust(other))
    assert stage.answer() == ("2", 10.0)
    assert deployments(stage, 1) == file
    put_back(stage)
    stage.promote("1", epoch=1, sign=other.sign)
    stage.drains.pop().stop(1.0)
    file.unlink()
    restarted(stage, trust(other))
    assert stage.answer() == ("1", 1.0)


def test_a_file_holds_the_latest_decision_in_any_order_of_writes(tmp_path: Path, operator: OperatorKey):
    """Two workers of a machine write, the later one an older decision; only the owner may read the file."""
    first, second = (FileDeploymentStore(tmp_path / "deployments", trust(operator)) for _ in range(2))
    assert first.last("model") == b""
    later, earlier = (active_of(operator, epoch) for epoch in (12, 3))
    first.keep("model", later)
    second.keep("model", earlier)
    assert first.last("model") == second.last("model") == later
    (file,) = (tmp_path / "deployments").iterdir()
    assert stat.filemode(file.stat().st_mode) == "-rw-------"


def active_of(operator: OperatorKey, epoch: int) -> bytes:
    """The record as a delivery carries it."""
    return b"%d %s" % (epoch, Deployment(epoch, "model", "1", "ab" * 32).seal(operator.sign))


@pytest.mark.parametrize("what", ["empty", "garbage", "another model's", "a stranger's", "a pipe", "a folder"])
def test_an_invalid_file_counts_as_no_decision(tmp_path: Path, operator: OperatorKey, what: str):
    """An invalid file raises no error at the start."""
    files = FileDeploymentStore(tmp_path, trust(operator))
    path = tmp_path / "model.active"
    stranger = OperatorKey.generate(tmp_path / "stranger.pem")
    contents = {
        "empty": b"",
        "garbage": os.urandom(20_000),
        "another model's": active_of(operator, 3).replace(b'"model":"model"', b'"model":"other"'),
        "a stranger's": active_of(stranger, 3),
    }
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a folder":
        path.mkdir()
    else:
        path.write_bytes(contents[what])
    assert files.last("model") == b""


def test_a_home_that_cannot_be_written_stops_no_worker(stage: Stage, operator: OperatorKey, caplog):
    """The worker serves and follows promotions; it logs once that it will forget them."""
    home_of(stage).mkdir()
    (home_of(stage) / "deployments").write_text("in its place")
    restarted(stage, trust(operator))
    for epoch, version in enumerate(("1", "2"), 1):
        stage.promote(version, epoch=epoch, sign=operator.sign)
        assert stage.answer()[0] == version
    logged = "will be forgotten"
    wait_until(lambda: logged in caplog.text, 5, "it is logged")
    time.sleep(1.2)
    assert caplog.text.count(logged) == 1


def test_unsigned_decisions_are_not_remembered(stage: Stage):
    """Without signatures a restarted worker follows the broker alone."""
    stage.promote("1", epoch=7)
    stage.start(home=str(home_of(stage)))
    assert stage.answer() == ("1", 1.0)
    stage.drains.pop().stop(1.0)
    put_back(stage)
    stage.start(home=str(home_of(stage)))
    assert stage.answer() == ("2", 10.0)
    assert not (home_of(stage) / "deployments").exists()


def test_the_decision_of_an_untrusted_key_is_replaced(tmp_path: Path, operator: OperatorKey):
    """After a key lost its trust, the first decision of another key replaces its last one, whatever the epochs."""
    other = OperatorKey.generate(tmp_path / "other.pem")
    FileDeploymentStore(tmp_path, trust(operator)).keep("model", active_of(operator, 9))
    both, only_other = (FileDeploymentStore(tmp_path, trust(*keys)) for keys in ((operator, other), (other,)))
    both.keep("model", active_of(other, 2))
    assert epoch_of(both.last("model")) == 9
    only_other.keep("model", active_of(other, 2))
    assert epoch_of(only_other.last("model")) == 2


@pytest.mark.parametrize("loss", ["everything", "the latest decision"])
def test_a_lost_decision_is_put_back_by_a_live_worker(stage: Stage, operator: OperatorKey, loss: str):
    """The broker comes back empty or with an older copy: a worker on another machine follows the decision, too."""
    stage.promote("2", epoch=5, sign=operator.sign)
    older = stage.broker.save()  # type: ignore[attr-defined]
    restarted(stage, trust(operator))
    stage.promote("1", epoch=7, sign=operator.sign)
    assert stage.answer() == ("1", 1.0)
    if loss == "everything":
        stage.broker.lose_everything()  # type: ignore[attr-defined]
    else:
        stage.broker.restore(older)  # type: ignore[attr-defined]
    wait_until(lambda: epoch_of(stage.broker.actives([stage.model])[stage.model]) == 7, 30, "it is put back")
    assert json.loads(stage.broker.spec(stage.model) or b"{}")["version"] == "1"
    stage.start(verify=trust(operator))
    assert stage.answer() == ("1", 1.0)
    assert stage.drains[-1].lifecycle.models[stage.model].label == "1"
