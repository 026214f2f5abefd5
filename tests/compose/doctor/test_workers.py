"""check_workers: what the reports of workers and the queues of a real broker say."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from penstock.compose.doctor.findings import Finding
from penstock.compose.doctor.workers import check_workers
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import Keyring
from tests.conformance.jobs import publish
from tests.servers import RedisServer


@pytest.fixture
def broker(redis_server: RedisServer) -> Iterator[RedisStreams]:
    """A broker of the test's own, in which `mlp` is registered."""
    with closing(RedisStreams.from_url(redis_server.url)) as broker:
        broker.put_spec("mlp", b"{}")
        yield broker


def report(broker: RedisStreams, name: str, *, ready: bool = True, keys: str = "", **models: str) -> None:
    """The report of a live worker that serves these versions."""
    names = Keyring.parse(keys).names
    broker.report(name, json.dumps({"name": name, "ready": ready, "keys": names, "models": models}).encode(), 60_000)


def found(broker: RedisStreams, keys: str = "") -> list[tuple[str, str]]:
    """The status and the text of each finding, for a shell with these keys."""
    return [(finding.status, finding.what) for finding in check_workers(broker, Keyring.parse(keys))]


def test_live_workers_are_listed(broker: RedisStreams):
    """Workers that report and are ready are one good finding."""
    report(broker, "cpu0@a", mlp="1")
    report(broker, "cpu1@a", mlp="1")
    assert found(broker) == [("ok", "2 alive: cpu0@a, cpu1@a")]


def test_a_worker_that_is_not_ready_is_a_warning(broker: RedisStreams):
    """A worker that is alive and accepts no jobs is named beside the list."""
    report(broker, "cpu0@a", ready=False, mlp="1")
    assert found(broker) == [("warning", "worker cpu0@a is alive and accepts no jobs"), ("ok", "1 alive: cpu0@a")]


def test_workers_with_different_versions_are_a_warning(broker: RedisStreams):
    """Before the first promotion, two workers may choose two versions: a promotion ends that."""
    report(broker, "cpu0@a", mlp="1")
    report(broker, "cpu0@b", mlp="2")
    (finding,) = [each for each in check_workers(broker, Keyring.parse(None)) if each.status == "warning"]
    assert finding == Finding(
        "workers",
        "warning",
        "workers serve different versions of mlp: 1, 2",
        "penstock models promote mlp VERSION --to production",
    )


def test_waiting_jobs_need_a_worker_of_their_model(broker: RedisStreams):
    """Jobs of a model that no live worker serves are broken; with a worker they only wait."""
    publish(broker, "mlp", 3)
    report(broker, "cpu0@a", minilm="1")
    assert ("broken", "no worker serves mlp; jobs waiting: 3") in found(broker)
    report(broker, "cpu0@b", mlp="1")
    assert found(broker) == [("ok", "2 alive: cpu0@a, cpu0@b")]


def test_a_paused_model_is_a_warning_whether_it_is_served_or_not(broker: RedisStreams):
    """The pause explains why jobs wait, so a missing worker is not reported beside it."""
    publish(broker, "mlp", 2)
    broker.pause("mlp")
    expected = ("warning", "mlp is paused; jobs waiting: 2")
    assert found(broker) == [("warning", "no worker is alive: jobs wait"), expected]
    report(broker, "cpu0@a", mlp="1")
    assert found(broker) == [("ok", "1 alive: cpu0@a"), expected]


def _key(name: str, letter: str = "") -> str:
    return f"{name}:{base64.b64encode((letter or name[0]).encode() * 32).decode()}"


A, B = _key("a"), _key("b")


@pytest.mark.parametrize(
    ("own", "worker", "status", "parts"),
    [
        ("", A, "broken", ["none here, 'a' there", "(this shell lacks 'a')"]),
        (A, "", "broken", ["'a' here, none there", "(the worker lacks 'a')"]),
        (A, B, "broken", ["(this shell lacks 'b'; the worker lacks 'a')"]),
        (A, _key("a", "x"), "broken", ["'a' is another key here", "(this shell lacks 'a'; the worker lacks 'a')"]),
        (f"{A},{B}", A, "warning", ["are not those of this shell: the worker lacks 'b'"]),
        (A, f"{A},{B}", "warning", ["are not those of this shell: this shell lacks 'b'"]),
    ],
)
def test_keys_that_differ_from_a_workers_are_found(
    broker: RedisStreams, own: str, worker: str, status: str, parts: list[str]
):
    """Which side lacks which id, for each live worker: broken where jobs fail, a warning while keys are exchanged."""
    report(broker, "cpu0@a", keys=own, mlp="1")
    report(broker, "cpu0@b", keys=worker, mlp="1")
    (finding,) = [each for each in check_workers(broker, Keyring.parse(own)) if each.status != "ok"]
    assert (finding.area, finding.status) == ("security", status)
    assert "cpu0@b" in finding.what
    assert [part for part in parts if part not in finding.what] == []
    assert finding.fix.startswith("the same PENSTOCK_SIGNING_KEYS on every machine")


@pytest.mark.parametrize("keys", ["", A, f"{A},{B}"])
def test_equal_keys_are_no_finding(broker: RedisStreams, keys: str):
    """With keys and without."""
    report(broker, "cpu0@a", keys=keys, mlp="1")
    assert found(broker, keys) == [("ok", "1 alive: cpu0@a")]
