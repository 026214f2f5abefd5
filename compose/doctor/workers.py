"""Checks of the workers and the queues: live workers, models that no worker serves, pauses, dead letters."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from penstock.compose.doctor.findings import Finding
from penstock.compose.stack import restarts
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import KeyName, Keyring
from penstock.registry.key_reports import KeyReport, difference

__all__ = ["check_restarts", "check_workers"]


def check_restarts(home: Path) -> Iterator[Finding]:
    """The workers of this machine that crash and are started again; they may never reach the broker."""
    for row in restarts.failing(restarts.read(home, time.monotonic())):
        yield Finding("workers", "warning", restarts.sentence(row), "read its log; `penstock status` shows it")


_KEYS: Final = "the same PENSTOCK_SIGNING_KEYS on every machine; restart what had others"


def check_workers(broker: RedisStreams, keyring: Keyring) -> Iterator[Finding]:
    """The workers by their reports and keys, then the queues of each model. Raises BrokerUnavailable.

    keyring: the signing keys of this shell.
    """
    models = broker.models()
    reports = sorted(map(json.loads, broker.workers()), key=lambda report: str(report["name"]))
    served: dict[str, set[str]] = {model: set() for model in models}
    for report in reports:
        for model, version in report["models"].items():
            served.setdefault(model, set()).add(version)
        if not report["ready"]:
            what = f"worker {report['name']} is alive and accepts no jobs"
            yield Finding("workers", "warning", what, "read its log; `penstock workers` shows its state")
        yield from _check_keys(keyring, report)
    if reports:
        yield Finding("workers", "ok", f"{len(reports)} alive: {', '.join(report['name'] for report in reports)}")
    else:
        yield Finding("workers", "warning", "no worker is alive: jobs wait", "penstock worker")
    paused = broker.paused(models)
    for model in models:
        yield from _check_model(broker, model, served[model], is_paused=model in paused)


def _check_keys(keyring: Keyring, report: Mapping[str, Any]) -> Iterator[Finding]:
    """The signing keys of this shell beside those of a worker: which side lacks which id."""
    theirs = tuple(KeyName(*name) for name in report.get("keys", ()))
    lacking = [
        f"{side} lacks {', '.join(repr(name.id) for name in names if name not in others)}"
        for side, names, others in (("this shell", theirs, keyring.names), ("the worker", keyring.names, theirs))
        if set(names) - set(others)
    ]
    problem = difference(keyring, KeyReport(report["name"], theirs))
    if problem:
        yield Finding("security", "broken", f"{problem} ({'; '.join(lacking)})", _KEYS)
    elif lacking:
        what = f"the signing keys of worker {report['name']} are not those of this shell: {'; '.join(lacking)}"
        yield Finding("security", "warning", what, _KEYS)


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
