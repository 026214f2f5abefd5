"""`penstock top`: rates and means, as differences between two snapshots of the broker.

    take_snapshot --> compare(before, after) --> plain data --> screen, one line, or JSON

Throughput comes from the broker's count of committed jobs. Batch sizes, the split of the latency and the figures of
engines that generate text come from the workers' reports; they are unknown for workers that do not report them.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.compose.views import overview
from penstock.registry.broker.base import Broker, Depth
from penstock.registry.errors import BrokerUnavailable

__all__ = ["Snapshot", "compare", "draw", "line", "measure", "show_screen", "take_snapshot", "write_lines"]

_LEAVE: Final = frozenset(b"qQ\x03\x04\x1b")
"""Keys that end the screen: q, Ctrl-C, Ctrl-D, Escape."""
_PARTS: Final = {"queue": "jobs", "batch": "jobs", "compute": "batches", "commit": "batches"}
"""The parts of a job's latency, each with the count that its sum is divided by."""
_RETRY_S: Final = 2.0
"""After an error of the broker the screen tries again this soon, also when its interval is longer."""
_MODELS: Final = ("model", "jobs/s", "wait", "run", "oldest", "rows", *_PARTS)
_QUEUES: Final = ("queue", "priority", "wait", "run", "oldest")
_ENGINES: Final = ("engine", "tokens/s", "wait", "run", "rows", "step ms", "pages", "prefix", "wait s", "worker")
_WORKERS: Final = ("worker", "device", "state", "jobs/s", "rows", "held", "MB", "memory", "cached", "models")
_NAMED: Final = 3
"""At most so many models of a worker are named; `penstock workers` names all."""
_LINES_AROUND: Final = 8
"""Lines of a screen that are no rows: the title, three headings, the legend, and blank lines."""
_LINES_OF_ENGINES: Final = 2
"""The same, of the table that only models of format `generate` have."""
_COUNTS: Final = ("generated_tokens", "steps", "rows", "prefix_queried", "prefix_found")
"""What an engine counts since it was loaded."""
_SUMS: Final = ("jobs", "cached", "batches", "rows", *(f"{part}_s" for part in _PARTS))


class Snapshot(NamedTuple):
    """The broker at one moment; `at` is monotonic. `load` has the sums of the workers by process and model."""

    at: float
    depths: Mapping[str, list[Depth]]
    committed: Mapping[str, int]
    paused: frozenset[str]
    reports: list[dict[str, Any]]
    load: Mapping[tuple[str, int, str], Mapping[str, float]]


def take_snapshot(broker: Broker) -> Snapshot:
    """Read queues, counts, pauses and reports. Raises BrokerUnavailable."""
    models = broker.models()
    reports = overview.workers(broker)
    load = {
        (report["name"], report["pid"], model): sums
        for report in reports
        for model, sums in report.get("load", {}).items()
    }
    return Snapshot(
        time.monotonic(),
        {model: broker.depths(model) for model in models},
        {model: broker.committed(model) for model in models},
        broker.paused(models),
        reports,
        load,
    )


def measure(broker: Broker, interval_s: float) -> dict[str, Any]:
    """Compare two snapshots, one interval apart. Raises BrokerUnavailable."""
    before = take_snapshot(broker)
    time.sleep(interval_s)
    return compare(before, take_snapshot(broker))


def compare(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """The difference of two snapshots, ready for JSON; a figure that no worker reports is None.

    {"interval_s", "models": [{"model", "paused", "jobs_per_s", "waiting", "running", "oldest_waiting_s",
    "rows_per_batch", "latency_ms": {part: mean}}], "queues": [...], "engines": [...], "workers": [...]}
    """
    span_s = max(after.at - before.at, 1e-9)
    return {
        "interval_s": round(span_s, 3),
        "models": [_model(model, before, after, span_s) for model in after.depths],
        "queues": [_queue(depth) for depths in after.depths.values() for depth in depths],
        "engines": _engines(before.reports, after.reports, span_s),
        "workers": [_worker(report, before, after, span_s) for report in after.reports],
    }


def _model(model: str, before: Snapshot, after: Snapshot, span_s: float) -> dict[str, Any]:
    depths = after.depths[model]
    done = after.committed[model] - before.committed.get(model, after.committed[model])
    sums = _added(before, after, lambda key: key[2] == model)
    return {
        "model": model,
        "paused": model in after.paused,
        "jobs_per_s": round(max(0, done) / span_s, 1),
        "waiting": sum(depth.jobs - depth.running for depth in depths),
        "running": sum(depth.running for depth in depths),
        "oldest_waiting_s": round(max(depth.oldest_waiting_s for depth in depths), 3),
        "rows_per_batch": _ratio(sums, "rows", "batches", 1),
        "latency_ms": {part: _ratio(sums, f"{part}_s", per, 1000) for part, per in _PARTS.items()},
    }


def _queue(depth: Depth) -> dict[str, Any]:
    return {
        "model": depth.slot,
        "priority": depth.priority.label,
        "waiting": depth.jobs - depth.running,
        "running": depth.running,
        "oldest_waiting_s": round(depth.oldest_waiting_s, 3),
    }


def _engines(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], span_s: float
) -> list[dict[str, Any]]:
    """The engines that generate text, of all workers."""
    earlier = {_engine_key(report, engine): engine for report in before for engine in report.get("engines", ())}
    return [
        _engine(report, engine, earlier.get(_engine_key(report, engine), {}), span_s)
        for report in after
        for engine in report.get("engines", ())
    ]


def _engine_key(report: Mapping[str, Any], engine: Mapping[str, Any]) -> tuple[str, int, str, str]:
    return report["name"], report["pid"], engine["model"], engine["version"]


def _engine(
    report: Mapping[str, Any], engine: Mapping[str, Any], earlier: Mapping[str, Any], span_s: float
) -> dict[str, Any]:
    """One engine. It counts from its load on: a count that has become smaller began anew."""
    is_new = any(engine[name] < earlier.get(name, 0) for name in _COUNTS)
    grown = {name: engine[name] - (0 if is_new else earlier.get(name, 0)) for name in _COUNTS}
    return {
        "model": engine["model"],
        "version": engine["version"],
        "worker": report["name"],
        "tokens_per_s": round(grown["generated_tokens"] / span_s, 1),
        "waiting": engine["waiting"],
        "running": engine["running"],
        "rows_per_step": _ratio(grown, "rows", "steps", 1),
        "step_ms": None if engine["step_s"] is None else round(engine["step_s"] * 1e3, 2),
        "pages_used": engine["pages_used"],
        "pages": engine["pages"],
        "prefix_found": _ratio(grown, "prefix_found", "prefix_queried", 1),
        "predicted_wait_s": engine["predicted_wait_s"],
    }


def _worker(report: Mapping[str, Any], before: Snapshot, after: Snapshot, span_s: float) -> dict[str, Any]:
    sums = _added(before, after, lambda key: key[:2] == (report["name"], report["pid"]))
    return {
        "name": report["name"],
        "device": report["device"],
        "ready": report["ready"],
        "models": report["models"],
        "in_memory": report.get("in_memory", 0),
        "in_memory_bytes": report.get("in_memory_bytes", 0),
        "process_bytes": report.get("process_bytes"),
        "device_bytes": report.get("device_bytes"),
        "jobs_per_s": None if sums is None else round((sums["jobs"] + sums["cached"]) / span_s, 1),
        "rows_per_batch": _ratio(sums, "rows", "batches", 1),
        "cached": None if sums is None else _share(sums["cached"], sums["jobs"]),
    }


def _share(found: float, others: float) -> float | None:
    return round(found / (found + others), 3) if found + others > 0 else None


def _added(
    before: Snapshot, after: Snapshot, is_chosen: Callable[[tuple[str, int, str]], bool]
) -> dict[str, float] | None:
    """The growth of the chosen sums; None when no worker reports them. A new process started at 0."""
    chosen = [key for key in after.load if is_chosen(key)]
    if not chosen:
        return None
    return {
        name: sum(after.load[key].get(name, 0) - before.load.get(key, {}).get(name, 0) for key in chosen)
        for name in _SUMS
    }


def _ratio(sums: Mapping[str, float] | None, name: str, per: str, factor: float) -> float | None:
    return None if not sums or sums[per] <= 0 else round(sums[name] / sums[per] * factor, 2)


def line(state: Mapping[str, Any]) -> str:
    """The state in one line, for logs and pipes."""
    models = state["models"]
    parts = [
        time.strftime("%H:%M:%S"),
        f"{sum(model['jobs_per_s'] for model in models):,.0f} jobs/s",
        f"waiting {sum(model['waiting'] for model in models):,}",
        f"running {sum(model['running'] for model in models):,}",
        f"oldest {max((model['oldest_waiting_s'] for model in models), default=0.0):.1f} s",
    ]
    for model in models:
        if model["rows_per_batch"] is not None:
            split = " ".join(f"{part} {_number(ms)}" for part, ms in model["latency_ms"].items())
            parts.append(f"{model['model']}: {model['rows_per_batch']:.1f} rows/batch, {split} ms")
    for engine in state["engines"]:
        wait_s = engine["predicted_wait_s"]
        parts.append(
            f"{engine['model']}: {engine['tokens_per_s']:,.0f} tokens/s, {engine['running']} run, {engine['waiting']} "
            f"wait, pages {engine['pages_used']:,}/{engine['pages']:,}, prefix {_percent(engine['prefix_found'])}, "
            f"predicted wait {_number(wait_s)} s"
        )
    ready = sum(worker["ready"] for worker in state["workers"])
    return "  ".join([*parts, f"workers {ready} of {len(state['workers'])} ready"])


def draw(state: Mapping[str, Any], lines: int | None = None) -> RenderableType:
    """Tables: models, queues that are not empty, engines that generate text, if any, workers. Models with jobs, engines
    with texts and workers that are not ready come first.

    lines: the height of a screen. Then each row has one line, cut off at its end; when there are too few lines for all
    rows, the last line of a table counts the rows that are left out.
    """
    models = sorted(state["models"], key=lambda model: not _has_jobs(model))
    queues = [queue for queue in state["queues"] if queue["waiting"] or queue["running"]]
    engines = sorted(state["engines"], key=lambda engine: not engine["running"])
    workers = sorted(state["workers"], key=lambda worker: worker["ready"])
    sizes = [len(models), len(queues), len(workers), len(engines)]
    around = _LINES_AROUND + (_LINES_OF_ENGINES if engines else 0)
    rooms = sizes if lines is None else _rooms(sizes, lines - around)
    folds = lines is None
    shown_engines = _rows(_ENGINES, engines, rooms[3], _engine_row, folds=folds)
    legend = (
        "rows: mean of a batch; queue, batch, compute, commit: mean ms; memory: MB of process + GPUs; -: not reported"
    )
    return Group(
        _rows(_MODELS, models, rooms[0], _model_row, folds=folds) or Text("No model is registered."),
        Text(legend, style="dim", no_wrap=not folds, overflow="ellipsis"),
        Text(),
        _rows(_QUEUES, queues, rooms[1], _queue_row, folds=folds) or Text("No job waits or runs."),
        Text(),
        *((shown_engines, Text()) if shown_engines is not None else ()),
        _rows(_WORKERS, workers, rooms[2], _worker_row, folds=folds) or Text("No worker runs."),
    )


def _has_jobs(model: Mapping[str, Any]) -> bool:
    return bool(model["waiting"] or model["running"] or model["jobs_per_s"])


def _rooms(sizes: list[int], lines: int) -> list[int]:
    """The lines of each table: those that a small table does not need go to the larger ones."""
    rooms = [0] * len(sizes)
    left = max(lines, len(sizes))
    for tables, (size, index) in zip(
        range(len(sizes), 0, -1), sorted((size, index) for index, size in enumerate(sizes)), strict=True
    ):
        rooms[index] = min(size, left // tables)
        left -= rooms[index]
    return rooms


def _rows(
    columns: tuple[str, ...],
    rows: Sequence[Mapping[str, Any]],
    lines: int,
    cells: Callable[[Mapping[str, Any]], tuple[str | Text, ...]],
    *,
    folds: bool,
) -> RenderableType | None:
    """The table, None without rows; its last line counts the rows for which there is no room."""
    if not rows:
        return None
    table = _table(columns, folds=folds)
    shown = len(rows) if len(rows) <= lines else lines - 1
    for row in rows[:shown]:
        table.add_row(*cells(row))
    if shown < len(rows):
        table.add_row(Text(f"and {len(rows) - shown:,} more", style="dim"))
    return table


def _model_row(model: Mapping[str, Any]) -> tuple[str | Text, ...]:
    return (
        Text(model["model"] + (" (paused)" if model["paused"] else "")),
        f"{model['jobs_per_s']:,.0f}",
        f"{model['waiting']:,}",
        f"{model['running']:,}",
        f"{model['oldest_waiting_s']:.1f} s" if model["waiting"] else "",
        _number(model["rows_per_batch"]),
        *(_number(ms) for ms in model["latency_ms"].values()),
    )


def _queue_row(queue: Mapping[str, Any]) -> tuple[str | Text, ...]:
    age = f"{queue['oldest_waiting_s']:.1f} s" if queue["waiting"] else ""
    return Text(queue["model"]), queue["priority"], f"{queue['waiting']:,}", f"{queue['running']:,}", age


def _engine_row(engine: Mapping[str, Any]) -> tuple[str | Text, ...]:
    return (
        Text(f"{engine['model']}/{engine['version']}"),
        f"{engine['tokens_per_s']:,.0f}",
        f"{engine['waiting']:,}",
        f"{engine['running']:,}",
        _number(engine["rows_per_step"]),
        _number(engine["step_ms"]),
        f"{engine['pages_used']:,}/{engine['pages']:,}",
        _percent(engine["prefix_found"]),
        _number(engine["predicted_wait_s"]),
        Text(engine["worker"]),
    )


def _worker_row(worker: Mapping[str, Any]) -> tuple[str | Text, ...]:
    served = [f"{name}/{version}" for name, version in worker["models"].items()]
    further = f" and {len(served) - _NAMED} more" if len(served) > _NAMED else ""
    return (
        Text(worker["name"]),
        worker["device"],
        "ready" if worker["ready"] else "not ready",
        _number(worker["jobs_per_s"]),
        _number(worker["rows_per_batch"]),
        f"{worker['in_memory']:,}",
        f"{worker['in_memory_bytes'] / 1e6:,.1f}",
        _megabytes(worker["process_bytes"], worker["device_bytes"]),
        _percent(worker["cached"]),
        Text(", ".join(served[:_NAMED]) + further),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _megabytes(*sizes: float | None) -> str:
    return "+".join(f"{size / 1e6:,.0f}" for size in sizes if size is not None) or "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _table(columns: tuple[str, ...], *, folds: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # On a narrow screen names are cut off, figures are not.
        is_name = column in ("model", "queue", "engine", "worker", "models")
        is_text = is_name or column in ("priority", "device", "state")
        table.add_column(
            column,
            justify="left" if is_text else "right",
            no_wrap=not (is_name and folds),
            overflow="fold" if folds else "ellipsis",
            min_width=None if is_name else len(column),
        )
    return table


def write_lines(broker: Broker, interval_s: float, *, once: bool, draw: Callable[[dict[str, Any]], str]) -> None:
    """One line per interval on stdout until interrupted; an error of the broker is a line on stderr.

    once: print one line and return; then an error of the broker raises BrokerUnavailable.
    """
    before: Snapshot | None = None
    while True:
        try:
            now = take_snapshot(broker)
            if before is not None:
                click.echo(draw(compare(before, now)))
                if once:
                    return
            before = now
        except BrokerUnavailable as error:
            if once:
                raise
            click.echo(str(error), err=True)
        time.sleep(interval_s)


def show_screen(broker: Broker, interval_s: float, console: Console) -> None:
    """A full screen, drawn again after each interval and when the terminal changes its size, until a key ends it."""
    with (
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        before: Snapshot | None = None
        state: dict[str, Any] | None = None
        due = 0.0
        while True:
            if time.monotonic() >= due:
                due = time.monotonic() + interval_s
                try:
                    now = take_snapshot(broker)
                    state = compare(before or now, now)
                    note = f"{time.strftime('%H:%M:%S')}   every {interval_s:g} s   q ends"
                    before = now
                except BrokerUnavailable as error:
                    due = time.monotonic() + min(interval_s, _RETRY_S)
                    note = f"{error}   q ends"
            shown = Text("Reading ...") if state is None else draw(state, console.height)
            title = Text(f"penstock top   {note}", style="bold", no_wrap=True, overflow="ellipsis")
            live.update(Group(title, Text(), shown), refresh=True)
            if pressed(max(0.0, due - time.monotonic())) & _LEAVE:
                return


@contextmanager
def _keys() -> Iterator[Callable[[float], frozenset[int]]]:
    """Waits for keys, or for a new size of the terminal. The end of the block restores the terminal."""
    stdin = sys.stdin.fileno()
    resized, resize = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    handler = signal.signal(signal.SIGWINCH, lambda *_: os.write(resize, b"!"))
    mode = termios.tcgetattr(stdin)

    def pressed(timeout_s: float) -> frozenset[int]:
        ready, _, _ = select.select([stdin, resized], [], [], timeout_s)
        if resized in ready:
            os.read(resized, 4096)
        # A closed terminal reads as an empty string, which ends the screen, too.
        return frozenset(os.read(stdin, 64) or b"q") if stdin in ready else frozenset()

    try:
        tty.setcbreak(stdin)
        yield pressed
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, mode)
        signal.signal(signal.SIGWINCH, handler)
        os.close(resized)
        os.close(resize)
