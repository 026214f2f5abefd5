"""What a machine remembers of the decisions that its workers have obeyed, and what a restart makes of it (S0.1)."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.deployment import Deployment
from penstock.registry.signed import Verifier
from penstock.safety.keys import OperatorKey, PublicKeys
from penstock.workers.versions.deployment_store import FileDeploymentStore, epoch_of
from tests.servers import wait_until
from tests.workers.versions.test_lifecycle import Stage, two_versions


@pytest.fixture
def operator(tmp_path: Path) -> OperatorKey:
    """Whose decisions count."""
    return OperatorKey.generate(tmp_path / "operator.pem")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Versions 1 (x) and 2 (10 x) of a model."""
    with two_versions(tmp_path, MemoryBroker().connect) as stage:
        yield stage


def trust(*operators: OperatorKey) -> Verifier:
    """The signatures of these."""
    return PublicKeys.parse(",".join(each.public_text for each in operators)).verify


def put_back(stage: Stage, *decision: object) -> None:
    """What whoever may write to the broker can do: any record in the place of the one that is there, or none."""
    activated = stage.broker._state.activated  # type: ignore[attr-defined]
    activated.pop(stage.model, None)
    if decision:
        activated[stage.model] = decision


def restarted(stage: Stage, verify: Verifier) -> None:
    """The worker of this machine ends, and begins again."""
    if stage.drains:
        stage.drains.pop().stop(1.0)
    stage.start(verify=verify, home=str(home_of(stage)))


def home_of(stage: Stage) -> Path:
    """Of every worker here."""
    return stage.root.parent / "home"


def deployments(stage: Stage, epoch: int) -> Path:
    """The file, once it has the decision of that epoch."""
    file = home_of(stage) / "deployments" / f"{stage.model}.active"
    wait_until(lambda: file.exists() and epoch_of(file.read_bytes()) == epoch, 5, "the decision is remembered")
    return file


@pytest.mark.parametrize("how", ["an older record", "no record", "garbage"])
def test_a_restarted_worker_goes_on_with_the_last_decision(stage: Stage, operator: OperatorKey, how: str):
    """Whatever somebody has put in its place in the broker, until a later decision is made."""
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


def test_operators_may_begin_anew(stage: Stage, operator: OperatorKey, tmp_path: Path):
    """A new registry begins with epoch 1: believed with another key in place of the old one, or without the file."""
    stage.promote("1", epoch=7, sign=operator.sign)
    restarted(stage, trust(operator))
    file = deployments(stage, 7)
    put_back(stage)
    stage.promote("2", epoch=1, sign=operator.sign)
    restarted(stage, trust(operator))
    assert stage.answer() == ("1", 1.0), "it might be a replay"
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


def test_a_file_holds_the_latest_decision_whoever_writes_last(tmp_path: Path, operator: OperatorKey):
    """Two workers of a machine, one of them late; for the owner's eyes only, and nothing half-written is left."""
    first, second = (FileDeploymentStore(tmp_path / "deployments", trust(operator)) for _ in range(2))
    assert first.last("model") == b""
    later, earlier = (active_of(operator, epoch) for epoch in (12, 3))
    first.keep("model", later)
    second.keep("model", earlier)
    assert first.last("model") == second.last("model") == later
    (file,) = (tmp_path / "deployments").iterdir()
    assert stat.filemode(file.stat().st_mode) == "-rw-------"


def active_of(operator: OperatorKey, epoch: int) -> bytes:
    """As a delivery brings it."""
    return b"%d %s" % (epoch, Deployment(epoch, "model", "1", "ab" * 32).seal(operator.sign))


@pytest.mark.parametrize("what", ["nothing", "rubbish", "another model's", "a stranger's", "a pipe", "a folder"])
def test_what_is_no_decision_of_an_operator_counts_as_nothing(tmp_path: Path, operator: OperatorKey, what: str):
    """Neither does it keep a worker from starting."""
    files = FileDeploymentStore(tmp_path, trust(operator))
    path = tmp_path / "model.active"
    stranger = OperatorKey.generate(tmp_path / "stranger.pem")
    contents = {
        "nothing": b"",
        "rubbish": os.urandom(20_000),
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


def test_a_home_that_cannot_be_written_stops_nobody(stage: Stage, operator: OperatorKey, caplog):
    """The worker serves, follows promotions, and says once that it will have forgotten them."""
    home_of(stage).mkdir()
    (home_of(stage) / "deployments").write_text("in its place")
    restarted(stage, trust(operator))
    for epoch, version in enumerate(("1", "2"), 1):
        stage.promote(version, epoch=epoch, sign=operator.sign)
        assert stage.answer()[0] == version
    said = "will be forgotten"
    wait_until(lambda: said in caplog.text, 5, "it says so")
    time.sleep(1.2)
    assert caplog.text.count(said) == 1


def test_unsigned_decisions_are_not_remembered(stage: Stage):
    """Where anybody may decide, the broker's word is the last one."""
    stage.promote("1", epoch=7)
    stage.start(home=str(home_of(stage)))
    assert stage.answer() == ("1", 1.0)
    stage.drains.pop().stop(1.0)
    put_back(stage)
    stage.start(home=str(home_of(stage)))
    assert stage.answer() == ("2", 10.0)
    assert not (home_of(stage) / "deployments").exists()


def test_a_key_that_is_not_trusted_any_more_does_not_count_against_those_that_are(
    tmp_path: Path, operator: OperatorKey
):
    """Its last decision is written over by the first of another, whatever its epoch."""
    other = OperatorKey.generate(tmp_path / "other.pem")
    FileDeploymentStore(tmp_path, trust(operator)).keep("model", active_of(operator, 9))
    both, only_other = (FileDeploymentStore(tmp_path, trust(*keys)) for keys in ((operator, other), (other,)))
    both.keep("model", active_of(other, 2))
    assert epoch_of(both.last("model")) == 9
    only_other.keep("model", active_of(other, 2))
    assert epoch_of(only_other.last("model")) == 2
