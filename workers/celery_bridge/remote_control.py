"""Celery's remote control and heartbeat: they show the jobs of the drain, and only safe commands stay.

    inspect active, reserved, stats; the heartbeat's counts --> DrainView, CeleryEventSender
    revoke --> Celery's list of revoked ids, which drain and consumer read; no result of a task that is not held here
    a signed command of an operator --> CommandVerifier --> the worker
    shutdown, pool_grow, add_consumer ... --> a refusal in words

Celery keeps these entries in tables of the process. `restored_tables` gives them back.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final, Protocol

from celery import states
from celery.utils.collections import AttributeDict
from celery.worker import heartbeat
from celery.worker import state as worker_state
from celery.worker.control import Panel
from kombu.utils.url import maybe_sanitize_url

from penstock.registry.control import CONTROL_COMMAND, Command, CommandVerifier
from penstock.registry.envelope import JobHeader
from penstock.registry.errors import PenstockError, UndecodableEnvelope
from penstock.workers.celery_bridge.events import CeleryEventSender
from penstock.workers.celery_bridge.presentation import shown_arguments, shown_id, shown_name

__all__ = [
    "OPEN_COMMANDS",
    "DrainView",
    "keep_foreign_results",
    "refuse_commands",
    "refuse_pool_commands",
    "register_control_command",
    "restored_tables",
    "show_drain",
]

_MAX_SHOWN_JOBS: Final = 1_000

OPEN_COMMANDS: Final = frozenset(
    (
        *("active", "active_queues", "clock", "conf", "disable_events", "enable_events", "heartbeat", "hello"),
        *("dump_active", "dump_conf", "dump_reserved", "dump_revoked", "dump_schedule", "dump_tasks"),
        *("memsample", "ping", "query_task", "registered", "report", "reserved", "revoke", "revoked", "scheduled"),
        *("stats", CONTROL_COMMAND),
    )
)
"""The remote control commands that stay: they read, switch events, revoke a job, or are signed."""

_POOL_COMMANDS: Final = frozenset(("autoscale", "pool_grow", "pool_restart", "pool_shrink"))

logger = logging.getLogger("penstock.server")


class DrainView(Protocol):
    """What remote control reads of a drain, on Celery's thread."""

    def active(self) -> list[JobHeader]:
        """Jobs whose forward runs."""

    def reserved(self) -> list[JobHeader]:
        """Jobs in memory that wait for their batch."""


@contextmanager
def restored_tables() -> Iterator[None]:
    """At the end of the block, Celery's process-wide tables are as they were at its beginning."""
    commands, descriptions = dict(Panel.data), dict(Panel.meta)
    counted = heartbeat.active_requests, heartbeat.all_total_count
    try:
        yield
    finally:
        for table, kept in ((Panel.data, commands), (Panel.meta, descriptions)):
            table.clear()
            table.update(kept)
        heartbeat.active_requests, heartbeat.all_total_count = counted


def show_drain(view: DrainView, listener: CeleryEventSender, hostname: str, *, settings: Mapping[str, object]) -> None:
    """Add the drain's jobs to `inspect active`, `reserved` and `stats`, and to the counts of Celery's heartbeat.

    settings: `stats` shows them under `inference`; plain data without secrets. A job costs nothing: the drain is read
    when a monitor asks. Replaces entries of Celery's process-wide tables.
    """
    celery_active, celery_reserved, celery_stats = (Panel.data[name] for name in ("active", "reserved", "stats"))

    def active(state: Any, safe: bool = False) -> list[dict[str, Any]]:
        return [*celery_active(state, safe=safe), *_requests(view.active(), hostname)]

    def reserved(state: Any) -> list[dict[str, Any]]:
        return [*celery_reserved(state), *_requests(view.reserved(), hostname)]

    def stats(state: Any) -> dict[str, Any]:
        known = _without_secrets(celery_stats(state))
        return {
            **known,
            "total": {**known["total"], **listener.totals.copy()},
            "events": {"dropped": listener.dropped},
            "inference": settings,
        }

    Panel.data.update(active=active, dump_active=active, reserved=reserved, dump_reserved=reserved, stats=stats)
    heartbeat.active_requests = _ActiveJobs(view)
    heartbeat.all_total_count = _FinishedJobs(listener)


def keep_foreign_results() -> None:
    """Let `revoke` store results of those tasks only whose messages this worker holds.

    Celery 5.7 stores REVOKED for every other id, too, while the task runs elsewhere: as the task of another program, or
    as a job. Its sender would get TaskRevokedError.
    """
    for name in ("revoke", "terminate"):
        Panel.data[name] = _keeping_results(Panel.data[name])


def _keeping_results(celery_command: Callable[..., Any]) -> Callable[..., Any]:
    # Celery leaves the result of a task alone that has ended.
    backend = SimpleNamespace(get_state=lambda task_id: states.SUCCESS)

    def command(state: Any, *arguments: Any, **named: Any) -> Any:
        return celery_command(AttributeDict({**state, "app": SimpleNamespace(backend=backend)}), *arguments, **named)

    return command


def _without_secrets(stats: dict[str, Any]) -> dict[str, Any]:
    """Celery's `stats`. Where its broker is a socket, it shows the whole URL as the host."""
    broker = stats.get("broker")
    if not isinstance(broker, dict):
        return stats
    alternates = [maybe_sanitize_url(url) for url in broker.get("alternates") or ()]
    hidden = {"hostname": maybe_sanitize_url(broker.get("hostname")), "alternates": alternates}
    return {**stats, "broker": {**broker, **hidden}}


def register_control_command(verifier: CommandVerifier, execute: Callable[[Command], str]) -> None:
    """Accept signed commands through Celery's remote control. `execute` returns the reply, or raises PenstockError."""

    def command(state: Any, /, command: object = None, **further: object) -> dict[str, str]:
        try:
            if further:
                raise UndecodableEnvelope(f"a control command with {len(further) + 1} arguments. Expected one")
            return {"ok": execute(verifier.open(command))}
        except PenstockError as error:
            logger.warning("a control command was refused: %s", error)
            return {"error": str(error)}

    Panel.register(command, type="control", name=CONTROL_COMMAND, args=[("command", str)], signature="<sealed>")


def refuse_commands() -> None:
    """Refuse the commands that stop, resize or re-route a worker. Flower and `celery control` show the refusal."""
    for name in Panel.data.keys() - OPEN_COMMANDS:
        text = f"{name} is off on this worker. Expected PENSTOCK_INFERENCE_CELERY_REMOTE_CONTROL=true"
        Panel.data[name] = _refusal(name, text)
    refuse_pool_commands()


def refuse_pool_commands() -> None:
    """Refuse the commands that resize the pool, whatever the settings allow: this pool has no size."""
    for name in Panel.data.keys() & _POOL_COMMANDS:
        text = f"{name}: a worker is one process with one device. Expected another worker: `penstock worker`"
        Panel.data[name] = _refusal(name, text)


def _refusal(name: str, text: str) -> Callable[..., dict[str, str]]:
    def refuse(state: Any, *arguments: Any, **named: Any) -> dict[str, str]:
        # Without the arguments, which come from the wire.
        logger.warning("a control command was refused", extra={"command": name})
        return {"error": text}

    return refuse


def _requests(jobs: Sequence[JobHeader], hostname: str) -> list[dict[str, Any]]:
    """The jobs in the form of Celery's Request.info."""
    return [
        {
            "id": shown_id(job),
            "name": shown_name(job.model),
            "args": "()",
            "kwargs": shown_arguments(job),
            "type": shown_name(job.model),
            "hostname": hostname,
            "time_start": None,
            "acknowledged": False,
            "delivery_info": {"exchange": "", "routing_key": "", "priority": job.priority, "redelivered": False},
            "worker_pid": os.getpid(),
        }
        for job in jobs[:_MAX_SHOWN_JOBS]
    ]


class _ActiveJobs:
    """Takes the place of Celery's set of active requests, which the heartbeat counts."""

    def __init__(self, view: DrainView) -> None:
        self._view = view

    def __len__(self) -> int:
        return len(worker_state.active_requests) + len(self._view.active())


class _FinishedJobs:
    """Takes the place of Celery's list with one total, which the heartbeat reads."""

    def __init__(self, listener: CeleryEventSender) -> None:
        self._listener = listener

    def __getitem__(self, index: int) -> int:
        return int(worker_state.all_total_count[index]) + self._listener.totals.total()
