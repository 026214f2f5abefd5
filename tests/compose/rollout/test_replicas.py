"""Replicas: one version in the reports of workers, and the wait until all of them agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.compose.rollout.replicas import ABSENT, ProgressCallback, Replica, Watch, replicas, workers_of
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.errors import ModelNotReady

HASH, OTHER = "ab" * 32, "cd" * 32
READY = {"state": "ready", "content_hash": HASH}


class Fleet:
    """A broker with the reports of workers that serve `mlp`, and the lines of progress that a watch writes."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.lines: list[str] = []
        self.reactions: dict[str, Callable[[], None]] = {}

    def report(self, worker: str, **entry: Any) -> None:
        """A worker's report on mlp/2; without an entry it does not know the version."""
        versions = {"mlp": {"2": entry} if entry else {}}
        self.broker.report(worker, json.dumps({"name": worker, "versions": versions}).encode(), 3_600_000)

    def leave(self, worker: str) -> None:
        """A worker ends."""
        self.broker.report(worker, b"", 1)

    def watch(self, *, sweep_s: float = 3600, only: str | None = None) -> Watch:
        """A watch of mlp/2."""
        return Watch(self.broker, "mlp", "2", sweep_s=sweep_s, on_progress=self._on_progress, only=only, poll_s=0.001)

    def after(self, line: str, act: Callable[[], None]) -> None:
        """Calls `act` when the watch writes this line."""
        self.reactions[line] = act

    @property
    def _on_progress(self) -> ProgressCallback:
        def on_progress(line: str) -> None:
            self.lines.append(line)
            self.reactions.pop(line, lambda: None)()

        return on_progress


@pytest.fixture
def fleet() -> Fleet:
    """No worker."""
    return Fleet()


def test_a_replica_is_what_a_worker_reports(fleet: Fleet):
    """Each worker of the model is one replica; a worker of other models is none, and unknown versions are absent."""
    fleet.report("a", **READY, is_active=True)
    fleet.report("b", state="failed", problem="no memory")
    fleet.report("c")
    fleet.broker.report("d", b'{"name": "d", "versions": {"minilm": {}}}', 60_000)
    fleet.broker.report("e", b'{"name": "e"}', 60_000)
    assert replicas(fleet.broker, "mlp", "2") == [
        Replica("a", "ready", HASH, True, ""),
        Replica("b", "failed", "", False, "no memory"),
        Replica("c", ABSENT, "", False, ""),
    ]
    assert workers_of(fleet.broker, "mlp") == ["a", "b", "c"]
    assert (workers_of(fleet.broker, "mlp", only="b"), workers_of(fleet.broker, "mlp", only="d")) == (["b"], [])


def test_a_watch_ends_when_all_workers_are_ready(fleet: Fleet):
    """Workers that start meanwhile are waited for, workers that stop are not, and each change is one line."""
    fleet.report("a", state="loading")
    fleet.report("b", state="loading")

    def change() -> None:
        fleet.report("a", **READY)
        fleet.leave("b")
        fleet.report("c", **READY)

    fleet.after("b: mlp/2 is loading", change)
    assert fleet.watch().await_ready(HASH, 20) == ["a", "c"]
    assert fleet.lines == [
        "a: mlp/2 is loading",
        "b: mlp/2 is loading",
        "a: mlp/2 is ready",
        "c: mlp/2 is ready",
    ]


def test_without_workers_nothing_is_waited_for(fleet: Fleet):
    """A version can be prepared before the first worker starts."""
    assert fleet.watch().await_ready(HASH, 20) == []
    assert fleet.watch().await_gone(20) == []
    assert fleet.watch().await_active(20) == []


def test_one_worker_can_be_watched(fleet: Fleet):
    """The other workers of the model do not count."""
    fleet.report("a", **READY)
    fleet.report("b", state="failed", problem="no memory")
    assert fleet.watch(only="a").await_ready(HASH, 20) == ["a"]


def test_a_new_problem_ends_the_wait(fleet: Fleet):
    """A worker that fails to load the version ends the wait with its reason."""
    fleet.report("a", state="loading")
    fleet.after("a: mlp/2 is loading", lambda: fleet.report("a", state="failed", problem="no memory"))
    with pytest.raises(ModelNotReady, match=r"^a: no memory$"):
        fleet.watch().await_ready(HASH, 20)


def test_an_old_problem_stays_until_the_worker_tries_again(fleet: Fleet):
    """The problem of an earlier request does not end the wait; the problem of the next try does."""
    fleet.report("a", state="failed", problem="old")
    fleet.after("a: mlp/2 is failed", lambda: fleet.report("a", state="loading"))
    fleet.after("a: mlp/2 is loading", lambda: fleet.report("a", **READY))
    assert fleet.watch().await_ready(HASH, 20) == ["a"]
    fleet.report("a", state="failed", problem="old")
    fleet.after("a: mlp/2 is failed", lambda: fleet.report("a", state="loading"))
    fleet.after("a: mlp/2 is loading", lambda: fleet.report("a", state="failed", problem="new"))
    with pytest.raises(ModelNotReady, match=r"^a: new$"):
        fleet.watch().await_ready(HASH, 20)


def test_an_old_problem_counts_when_every_worker_has_read_the_request(fleet: Fleet):
    """A worker that has had the time to try again has the problem still."""
    fleet.report("a", state="failed", problem="old")
    with pytest.raises(ModelNotReady, match=r"^a: old$"):
        fleet.watch(sweep_s=-3600).await_ready(HASH, 20)


def test_other_files_under_the_label_are_replaced_or_refused(fleet: Fleet):
    """A worker may load the registered files yet; afterwards, other files end the wait with both hashes."""
    fleet.report("a", state="ready", content_hash=OTHER)
    fleet.after("a: mlp/2 is ready", lambda: fleet.report("a", **READY))
    assert fleet.watch().await_ready(HASH, 20) == ["a"]
    fleet.report("a", state="ready", content_hash=OTHER)
    with pytest.raises(ModelNotReady, match=rf"a has other files under mlp/2 \({OTHER[:12]}\).*\({HASH[:12]}\)"):
        fleet.watch(sweep_s=-3600).await_ready(HASH, 20)


def test_the_end_of_the_time_names_the_late_workers(fleet: Fleet):
    """The error has each worker that is late, with its state, and no worker that is done."""
    fleet.report("a", **READY)
    fleet.report("b", state="loading")
    fleet.report("c")
    with pytest.raises(ModelNotReady, match=r"mlp/2 was not ready everywhere within 0 s: b is loading, c is absent$"):
        fleet.watch().await_ready(HASH, 0)
    with pytest.raises(ModelNotReady, match=r"mlp/2 was not unloaded everywhere within 0 s: a is ready, b is loading$"):
        fleet.watch().await_gone(0)


def test_late_activations_are_returned(fleet: Fleet):
    """Workers where another version is active when the time is over are returned, not raised."""
    fleet.report("a", **READY, is_active=True)
    fleet.report("b", **READY)
    assert fleet.watch().await_active(0) == ["b"]
    fleet.report("b", **READY, is_active=True)
    assert fleet.watch().await_active(20) == []
