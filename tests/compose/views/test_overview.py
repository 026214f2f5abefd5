"""The figures and tables of `penstock status`, `workers` and `bench`."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import pytest
from rich.console import Console, RenderableType

from penstock.compose.views.overview import (
    batch_sizes,
    draw_batches,
    draw_latency,
    draw_models,
    draw_status,
    draw_workers,
    jobs,
    kinds,
    latency_ms,
    models,
    snapshots,
    status,
    worker_pids,
    workers,
)
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.package import ModelSpec
from tests.conformance.jobs import claim, publish
from tests.registry.catalog.catalogs import registered

SPEC = json.dumps(registered("1").spec).encode()
HERE = f"cpu0@{socket.gethostname()}"
REPORT = {
    "name": HERE,
    "pid": os.getpid(),
    "device": "cpu",
    "ready": True,
    "models": {"minilm": "2"},
    "versions": {"minilm": {"1": {"state": "cold"}, "2": {"state": "ready"}, "3": {"state": "ready"}}},
    "in_memory": 1234,
    "batches": 7,
}
SNAPSHOTS: list[dict[str, Any]] = [
    {"models": {"minilm": {"jobs": 3, "batch_sizes": {"1": 1, "8": 2}, "latency_ms": {"total": {"p50": 1, "p99": 2}}}}},
    {"models": {"minilm": {"jobs": 9, "batch_sizes": {"8": 5}, "latency_ms": {"total": {"p50": 3, "p99": 1234}}}}},
    {"models": {"mlp": {"jobs": 99, "batch_sizes": {"64": 1}, "latency_ms": {}}}},
]


@pytest.fixture
def broker() -> MemoryBroker:
    """A broker with a registered model and a worker."""
    broker = MemoryBroker()
    broker.put_spec("minilm", SPEC)
    broker.report(HERE, json.dumps(REPORT).encode(), 3_600_000)
    return broker


def drawn(drawing: RenderableType) -> str:
    """The text on a wide console."""
    console = Console(width=200, no_color=True)
    with console.capture() as printed:
        console.print(drawing)
    return printed.get()


def test_the_status_has_queues_workers_models_and_pauses(broker: MemoryBroker):
    """The state is plain data: jobs by priority, running ones among them, and the reports of workers."""
    publish(broker, "minilm", 3)
    claim(broker, "w", "minilm", 1)
    broker.pause("minilm")
    state = json.loads(json.dumps(status(broker)))
    assert {queue["priority"]: (queue["jobs"], queue["running"]) for queue in state["queues"]} == {
        "critical": (0, 0),
        "high": (0, 0),
        "normal": (3, 1),
        "low": (0, 0),
    }
    assert (state["workers"], state["paused"]) == ([REPORT], ["minilm"])
    assert state["models"] == models(broker)


def test_models_have_names_dtypes_and_shapes(broker: MemoryBroker):
    """The inputs and outputs of a model are shown as its signature has them."""
    expected = {"inputs": {"x": "float32 (batch, 4)"}, "outputs": {"y": "float32 (batch, 4)"}}
    assert models(broker) == [{"name": "minilm", "version": "1", **expected}]
    assert kinds(ModelSpec.from_json(SPEC)) == expected


def test_only_workers_of_this_machine_are_processes_here(broker: MemoryBroker):
    """The process id of another machine's worker means another process here."""
    broker.report("cpu0@elsewhere", json.dumps({**REPORT, "name": "cpu0@elsewhere", "pid": 1}).encode(), 60_000)
    assert len(workers(broker)) == 2
    assert worker_pids(broker) == [os.getpid()]


def test_a_probe_that_is_away_is_left_out():
    """A worker that has just ended, and one of another machine, have no snapshot."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert snapshots([{"name": HERE, "probe": closed}, {"name": "cpu0@elsewhere", "probe": "http://192.0.2.1:1"}]) == []


def test_batch_sizes_are_summed_over_workers():
    """Each size counts the batches of all workers that ran the model."""
    assert batch_sizes(SNAPSHOTS, "minilm") == {1: 1, 8: 7}
    assert batch_sizes(SNAPSHOTS, "absent") == {}


def test_jobs_are_summed_over_workers():
    """All workers that ran the model count."""
    assert jobs(SNAPSHOTS, "minilm") == 12
    assert jobs(SNAPSHOTS, "absent") == 0


def test_latency_is_that_of_the_busiest_worker():
    """Percentiles cannot be summed: the worker with most jobs of the model tells."""
    assert latency_ms(SNAPSHOTS, "minilm") == {"total": {"p50": 3, "p99": 1234}}
    assert latency_ms(SNAPSHOTS, "absent") == {}
    assert drawn(draw_latency(latency_ms(SNAPSHOTS, "minilm"))).splitlines()[1].split() == ["total", "3.0", "1,234.0"]


def test_empty_queues_are_left_out(broker: MemoryBroker):
    """A system at rest is one sentence; a queue with jobs is one line, which says whether the model is paused."""
    assert drawn(draw_status({**status(broker), "supervised": []})).startswith("No job waits or runs.\n")
    publish(broker, "minilm", 2)
    claim(broker, "w", "minilm", 1)
    broker.pause("minilm")
    lines = drawn(draw_status({**status(broker), "supervised": []})).splitlines()
    assert lines[1].split()[:4] == ["minilm", "normal", "1", "1"]
    assert lines[1].rstrip().endswith("paused")
    assert "Paused: minilm" in lines


def test_a_worker_is_one_line():
    """The line has the active version, the other loaded ones, and the worker's counts."""
    line = drawn(draw_workers([REPORT])).splitlines()[1]
    assert line.split() == [HERE, "cpu", "ready", "minilm/2", "(and", "3)", "1,234", "7"]
    fresh = {"name": "cpu1@b", "device": "cpu", "ready": False, "models": {"minilm": ""}}
    assert drawn(draw_workers([fresh])).splitlines()[1].split() == [
        *["cpu1@b", "cpu", "not", "ready", "minilm/none", "0", "0"],
    ]
    assert drawn(draw_workers([])) == "No worker runs.\n"


def test_models_without_a_package_are_explained():
    """Without a model the text says how one is registered."""
    assert "`penstock models register`" in drawn(draw_models([]))


def test_many_batch_sizes_are_drawn_in_bands():
    """Up to eight sizes have a line each; more sizes share bands that double, and no batch is lost."""
    few = drawn(draw_batches({1: 10, 64: 5})).splitlines()
    assert [line.split()[:2] for line in few[1:]] == [["1", "10"], ["64", "5"]]
    assert few[1].count("█") == 2 * few[2].count("█")
    many = drawn(draw_batches(dict.fromkeys(range(1, 17), 1))).splitlines()
    assert [line.split()[:2] for line in many[1:]] == [
        ["1", "1"],
        ["2", "1"],
        ["3-4", "2"],
        ["5-8", "4"],
        ["9-16", "8"],
    ]
