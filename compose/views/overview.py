"""Queues, workers and models: the data of `penstock status` and of the tables of a demo, and their drawing.

broker (depths, worker reports, specs) + each worker's probe (/snapshot) --> plain data --> JSON or tables
"""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.registry.broker.base import Broker, FleetEnd
from penstock.registry.package import ModelSpec
from penstock.registry.package.signature import TensorSpec

__all__ = [
    "batch_sizes",
    "draw_batches",
    "draw_latency",
    "draw_models",
    "draw_status",
    "draw_workers",
    "jobs",
    "kinds",
    "latency_ms",
    "models",
    "served",
    "snapshots",
    "status",
    "worker_pids",
    "workers",
]

PARTS: Final = {
    "queue": "queue wait: in the broker",
    "batch": "batch wait: in the worker, until the forward",
    "compute": "compute: the forward",
    "commit": "commit: result stored, client notified",
    "total": "total",
}
_PROBE_TIMEOUT_S: Final = 2.0
_BAR: Final = 40


def status(broker: Broker) -> dict[str, Any]:
    """{"queues": [...], "workers": [...], "models": [...], "paused": [...]}, ready for JSON.

    Raises BrokerUnavailable.
    """
    return {
        "queues": [
            {
                "model": depth.slot,
                "priority": depth.priority.label,
                "jobs": depth.jobs,
                "running": depth.running,
                "oldest_waiting_s": round(depth.oldest_waiting_s, 3),
            }
            for model in broker.models()
            for depth in broker.depths(model)
        ],
        "workers": workers(broker),
        "models": models(broker),
        "paused": sorted(broker.paused(broker.models())),
    }


def workers(broker: FleetEnd) -> list[dict[str, Any]]:
    """The reports of the live workers. Raises BrokerUnavailable."""
    return [json.loads(report) for report in broker.workers()]


def models(broker: Broker) -> list[dict[str, Any]]:
    """The models whose jobs are accepted: name, version, inputs and outputs. Raises BrokerUnavailable."""
    specs = [ModelSpec.from_json(spec) for spec in map(broker.spec, broker.models()) if spec]
    return [{"name": spec.name, "version": spec.version, **kinds(spec)} for spec in specs]


def served(broker: FleetEnd) -> list[ModelSpec]:
    """The models that a live worker serves, by name; those that stream come last. Raises BrokerUnavailable."""
    names = {name for report in workers(broker) for name, active in report["models"].items() if active}
    specs = [ModelSpec.from_json(sealed) for sealed in map(broker.spec, sorted(names)) if sealed]
    return sorted(specs, key=lambda spec: spec.streams)


def kinds(spec: ModelSpec) -> dict[str, dict[str, str]]:
    """The inputs and outputs of a model: names with dtype and shape."""
    return {
        "inputs": {tensor.name: _kind(tensor) for tensor in spec.inputs},
        "outputs": {tensor.name: _kind(tensor) for tensor in spec.outputs},
    }


def _kind(tensor: TensorSpec) -> str:
    return f"{tensor.dtype} ({', '.join(map(str, tensor.shape))})"


def snapshots(reports: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The /snapshot of the probe of each worker on this machine; other machines' probes listen on their loopback."""
    found = []
    for report in filter(_is_here, reports):
        try:
            with urllib.request.urlopen(report["probe"] + "/snapshot", timeout=_PROBE_TIMEOUT_S) as reply:  # noqa: S310 - http
                found.append(json.load(reply))
        except (urllib.error.URLError, OSError):
            # The worker has just ended, or its probe requires a bearer token.
            continue
    return found


def jobs(found: Iterable[Mapping[str, Any]], model: str) -> int:
    """How many jobs of one model ran, over all workers."""
    return sum(snapshot["models"].get(model, {}).get("jobs", 0) for snapshot in found)


def batch_sizes(found: Iterable[Mapping[str, Any]], model: str) -> dict[int, int]:
    """How many batches of each size one model ran, over all workers."""
    sizes: dict[int, int] = {}
    for snapshot in found:
        for rows, batches in snapshot["models"].get(model, {}).get("batch_sizes", {}).items():
            sizes[int(rows)] = sizes.get(int(rows), 0) + batches
    return sizes


def latency_ms(found: Sequence[Mapping[str, Any]], model: str) -> dict[str, dict[str, float]]:
    """p50 and p99 of each part of a job's latency, from the worker that ran most of the model's jobs."""
    states = [snapshot["models"][model] for snapshot in found if model in snapshot["models"]]
    return max(states, key=lambda state: int(state["jobs"]))["latency_ms"] if states else {}


def worker_pids(broker: Broker) -> list[int]:
    """The process ids of this machine's workers."""
    reports = map(json.loads, broker.workers())
    return [report["pid"] for report in reports if _is_here(report)]


def _is_here(report: Mapping[str, Any]) -> bool:
    return str(report["name"]).endswith("@" + socket.gethostname())


def draw_status(state: Mapping[str, Any]) -> RenderableType:
    """Three tables, and the workers that crash; empty queues are left out."""
    queues = _table("queue", "priority", "waiting", "running", "oldest waits", "")
    for queue in state["queues"]:
        if queue["jobs"]:
            waiting = queue["jobs"] - queue["running"]
            age = f"{queue['oldest_waiting_s']:.1f} s" if waiting else ""
            note = "paused" if queue["model"] in state["paused"] else ""
            queues.add_row(queue["model"], queue["priority"], f"{waiting:,}", f"{queue['running']:,}", age, note)
    paused = f"Paused: {', '.join(state['paused'])}"
    return Group(
        queues if queues.row_count else Text("No job waits or runs."),
        *([Text(paused, style="yellow")] if state["paused"] else []),
        Text(),
        draw_workers(state["workers"]),
        *_draw_restarts(state["supervised"]),
        Text(),
        draw_models(state["models"]),
    )


def draw_workers(reports: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One line per worker."""
    table = _table("worker", "device", "state", "models", "in memory", "batches")
    for report in reports:
        loaded = ", ".join(_loaded(report, name, active) for name, active in report["models"].items())
        state = "ready" if report["ready"] else "not ready"
        held, batches = report.get("in_memory", 0), report.get("batches", 0)
        table.add_row(report["name"], report["device"], state, loaded, f"{held:,}", f"{batches:,}")
    return table if table.row_count else Text("No worker runs.")


def _draw_restarts(supervised: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """The workers of this machine that crashed and have not run steadily since; nothing without one."""
    table = _table("worker that crashes", "restarts", "last exit status", "next start")
    for row in supervised:
        if row["failures"]:
            wait_s, status = row["next_start_in_s"], row["last_status"]
            then = "runs again" if wait_s is None else f"in {wait_s:.1f} s"
            table.add_row(row["worker"], f"{row['restarts']:,}", "" if status is None else str(status), then)
    return [Text(), table] if table.row_count else []


def _loaded(report: Mapping[str, Any], name: str, active: str) -> str:
    """`minilm/2`, the active version, with the versions that are loaded beside it: `minilm/2 (and 3)`."""
    versions = report.get("versions", {}).get(name, {})
    others = [label for label, entry in versions.items() if entry["state"] == "ready" and label != active]
    beside = f" (and {', '.join(others)})" if others else ""
    return f"{name}/{active or 'none'}{beside}"


def draw_models(known: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The inputs and outputs of each model."""
    table = _table("model", "version", "inputs", "outputs")
    for model in known:
        table.add_row(model["name"], model["version"], _named(model["inputs"]), _named(model["outputs"]))
    return table if known else Text("No model is registered. Expected a worker, or `penstock models register`")


def draw_latency(latency_ms: Mapping[str, Mapping[str, float]]) -> Table:
    """The parts of a job's latency, at the median and at the 99th percentile."""
    table = _table("part of a job's latency", "p50 ms", "p99 ms")
    for part, meaning in PARTS.items():
        if part in latency_ms:
            table.add_row(meaning, f"{latency_ms[part]['p50']:,.1f}", f"{latency_ms[part]['p99']:,.1f}")
    return table


def draw_batches(sizes: Mapping[int, int]) -> Table:
    """The histogram of batch sizes; when there are many sizes, in bands whose size doubles."""
    table = _table("rows in a batch", "batches", "")
    bands = _in_bands(sizes)
    longest = max(bands.values(), default=1)
    for label, batches in bands.items():
        table.add_row(label, f"{batches:,}", Text("█" * max(1, round(_BAR * batches / longest)), style="cyan"))
    return table


def _in_bands(sizes: Mapping[int, int]) -> dict[str, int]:
    if len(sizes) <= 8:
        return {str(size): sizes[size] for size in sorted(sizes)}
    bands: dict[str, int] = {}
    for size in sorted(sizes):
        top = 1 << (size - 1).bit_length()
        label = str(top) if top <= 2 else f"{top // 2 + 1}-{top}"
        bands[label] = bands.get(label, 0) + sizes[size]
    return bands


def _named(tensors: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {kind}" for name, kind in tensors.items())


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    numeric = {"waiting", "running", "oldest waits", "in memory", "batches", "p50 ms", "p99 ms", "restarts"}
    for column in columns:
        table.add_column(column, justify="right" if column in numeric else "left")
    return table
