"""Checks of the workers and the queues: live workers, models that no worker serves, pauses, dead letters."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.compose.doctor.findings import Finding
from penstock.compose.stack import restarts
from penstock.registry.broker.redis_streams import RedisStreams

__all__ = ["check_restarts", "check_workers"]


def check_restarts(home: Path) -> Iterator[Finding]:
    """The workers of this machine that crash and are started again; they may never reach the broker."""
    for row in restarts.failing(restarts.read(home, time.monotonic())):
        yield Finding("workers", "warning", restarts.sentence(row), "read its log; `penstock status` shows it")


def check_workers(broker: RedisStreams) -> Iterator[Finding]:
    """The workers by their reports, then the queues of each model. Raises BrokerUnavailable."""
    models = broker.models()
    reports = [json.loads(report) for report in broker.workers()]
    served: dict[str, set[str]] = {model: set() for model in models}
    for report in reports:
        for model, version in report["models"].items():
            served.setdefault(model, set()).add(version)
        if not report["ready"]:
            what = f"worker {report['name']} is alive and accepts no jobs"
            yield Finding("workers", "warning", what, "read its log; `penstock workers` shows its state")
    if reports:
        yield Finding("workers", "ok", f"{len(reports)} alive: {', '.join(report['name'] for report in reports)}")
    else:
        yield Finding("workers", "warning", "no worker is alive: jobs wait", "penstock worker")
    paused = broker.paused(models)
    for model in models:
        yield from _check_model(broker, model, served[model], is_paused=model in paused)


def _check_model(broker: RedisStreams, model: str, versions: set[str], *, is_paused: bool) -> Iterator[Finding]:
    waiting = sum(depth.jobs - depth.running for depth in broker.depths(model))
    if is_paused:
        what = f"{model} is paused; jobs waiting: {waiting:,}"
        yield Finding("queues", "warning", what, f"penstock queue resume {model}")
    elif waiting and not versions:
        what = f"no worker serves {model}; jobs waiting: {waiting:,}"
        yield Finding("queues", "broken", what, f"penstock worker --models {model}")
    if len(versions) > 1:
        what = f"workers serve different versions of {model}: {', '.join(sorted(versions))}"
        yield Finding("workers", "warning", what, f"penstock models promote {model} VERSION --to production")
    if broker.dead_letters(model, count=1):
        yield Finding("queues", "warning", f"{model} has dead letters", f"penstock dead list {model}")
