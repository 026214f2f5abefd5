"""The tables of `penstock models list`, `show` and `history`."""

from __future__ import annotations

import json

import pytest
from rich.console import Console, RenderableType

from penstock.compose.views.versions import as_data, draw_history, draw_version, draw_versions, listing
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.catalog.stages import ModelStage, TransitionAction
from penstock.registry.catalog.tables import Transition
from penstock.registry.deployment import Deployment
from tests.registry.catalog.catalogs import registered

PRODUCTION = registered("1", ModelStage.PRODUCTION, epoch=3)
STAGING = registered("2", ModelStage.STAGING)
DECISION = Deployment(3, "minilm", "1", PRODUCTION.content_hash)


@pytest.fixture
def broker() -> MemoryBroker:
    """A broker without a model."""
    return MemoryBroker()


def report(broker: MemoryBroker, worker: str, active: str, **states: str) -> None:
    """A worker that serves minilm, with versions v1, v2, ... in these states."""
    versions = {label[1:]: {"state": state, "content_hash": "ee" * 32} for label, state in states.items()}
    document = {"name": worker, "models": {"minilm": active}, "versions": {"minilm": versions}}
    broker.report(worker, json.dumps(document).encode(), 3_600_000)


def drawn(drawing: RenderableType) -> list[str]:
    """The lines on a wide console."""
    console = Console(width=300, no_color=True)
    with console.capture() as printed:
        console.print(drawing)
    return [line.rstrip() for line in printed.get().splitlines()]


def test_registered_versions_are_listed_without_a_broker():
    """The registry alone has stage, content hash and inputs; no version is active, and no worker is known."""
    rows = listing([STAGING, PRODUCTION], None)
    assert [(row["version"], row["stage"], row["is_active"], row["workers"]) for row in rows] == [
        ("1", "production", False, []),
        ("2", "staging", False, []),
    ]
    assert rows[0]["inputs"] == {"x": "float32 (batch, 4)"}
    assert json.loads(json.dumps(rows)) == rows


def test_the_promoted_version_is_active(broker: MemoryBroker):
    """The record of the broker says which version is active; workers are listed where a version is ready."""
    broker.activate("minilm", 3, DECISION.seal(), "1", json.dumps(PRODUCTION.spec).encode())
    report(broker, "a", "2", v1="ready", v2="ready")
    report(broker, "b", "1", v1="loading", v2="ready")
    rows = {row["version"]: row for row in listing([PRODUCTION, STAGING], broker)}
    assert (rows["1"]["is_active"], rows["1"]["workers"]) == (True, ["a"])
    assert (rows["2"]["is_active"], rows["2"]["workers"]) == (False, ["a", "b"])
    assert rows["2"]["content_hash"] == STAGING.content_hash


@pytest.mark.parametrize("is_corrupt", [False, True])
def test_before_a_promotion_the_workers_choose(broker: MemoryBroker, is_corrupt: bool):
    """Without a readable record, the versions that the workers chose themselves are active."""
    if is_corrupt:
        broker.activate("minilm", 3, b"foreign", "1", json.dumps(PRODUCTION.spec).encode())
    report(broker, "a", "2", v2="ready")
    rows = {row["version"]: row["is_active"] for row in listing([PRODUCTION, STAGING], broker)}
    assert rows == {"1": False, "2": True}


def test_unregistered_versions_are_listed(broker: MemoryBroker):
    """A version that a worker serves and the registry does not know has no stage, and the worker's content hash."""
    broker.put_spec("minilm", json.dumps(registered("7").spec).encode())
    broker.put_spec("minilm", json.dumps(registered("8").spec).encode(), "8")
    report(broker, "a", "7", v7="ready", v8="cold")
    rows = listing([PRODUCTION], broker)
    assert [(row["version"], row["stage"], row["content_hash"], row["workers"]) for row in rows] == [
        ("1", "production", PRODUCTION.content_hash, []),
        ("7", None, "ee" * 32, ["a"]),
        ("8", None, "", []),
    ]


def test_the_list_tells_what_waits_for_its_activation(broker: MemoryBroker):
    """A version in production that is not active is `not yet`; hashes are shortened."""
    report(broker, "a", "2", v2="ready")
    broker.put_spec("minilm", json.dumps(registered("7").spec).encode())
    _, first, second, third = (line.split() for line in drawn(draw_versions(listing([PRODUCTION, STAGING], broker))))
    assert first[:6] == ["minilm", "1", "production", "1" * 12, "not", "yet"]
    assert second[:6] == ["minilm", "2", "staging", "2" * 12, "yes", "1"]
    assert third[:4] == ["minilm", "7", "not", "registered"]
    assert "`penstock models register PATH`" in drawn(draw_versions([]))[0]


def test_one_version_is_shown_with_its_files():
    """The record has its complete hash, its times, and the hash of each file, also of weights elsewhere."""
    version = registered(
        "1", ModelStage.ARCHIVED, released_at="2026-02-02T00:00:00+00:00", source_files={"weights.bin": "cd" * 32}
    )
    text = "\n".join(drawn(draw_version(version)))
    for part in ("minilm/1", "1" * 64, "archived", "2026-02-02", "model.py", "ab" * 32, "weights.bin", "cd" * 32):
        assert part in text
    assert "first in production" in text
    assert "in production since" in "\n".join(drawn(draw_version(PRODUCTION)))


def test_the_record_is_plain_data():
    """The JSON of a version has the words of the registry."""
    data = json.loads(json.dumps(as_data(PRODUCTION)))
    assert (data["stage"], data["content_hash"], data["lineage"]["data_version"]) == ("production", "1" * 64, "")


def test_a_history_has_one_line_for_each_change():
    """A change has its epoch, action, stages, the version that it replaced, the operator and the reason."""
    change = Transition(
        name="minilm",
        epoch=12,
        action=TransitionAction.ROLLBACK,
        version="1",
        content_hash="1" * 64,
        before=ModelStage.ARCHIVED,
        after=ModelStage.PRODUCTION,
        replaced="2",
        productions=("1",),
        actor="ann",
        reason="slow",
        at="2026-01-01T10:20:30.123456+00:00",
    )
    head, line = drawn(draw_history([change]))
    assert head.split()[:4] == ["epoch", "time", "action", "version"]
    assert line.split() == [
        *["12", "2026-01-01T10:20:30", "rollback", "1", "1" * 12, "archived", "production", "2", "ann", "slow"]
    ]
    assert len(drawn(draw_history([]))) == 1
