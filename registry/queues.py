"""Every name that two processes share: priorities, job ids, Redis keys, Celery's queue and task.

A job id is `<model>.<uuid7>`: whoever holds one knows the slot of its keys, and its age tells a result that is
gone from one that never was. Every key that one script touches carries the hash tag `{model}`, so that a script
stays on one node of a Redis Cluster.
"""

from __future__ import annotations

import os
import re
import time
from enum import IntEnum
from typing import Final, Literal

from penstock.registry.errors import InvalidInput, described

__all__ = [
    "CELERY_QUEUE",
    "CELERY_TASK",
    "GROUP",
    "MODELS_KEY",
    "WORKERS_KEY",
    "Priority",
    "PriorityName",
    "active_key",
    "crashes_key",
    "dead_key",
    "events_key",
    "flow_key",
    "idempotency_key",
    "is_job_id",
    "is_reply_key",
    "job_time_ms",
    "lane_key",
    "local_record_key",
    "new_job_id",
    "parse_name",
    "parse_priority",
    "paused_key",
    "record_key",
    "reply_key",
    "slot_of",
    "spec_key",
    "specs_key",
    "split_job_id",
    "stream_key",
    "stream_keys",
    "worker_key",
]

GROUP: Final = "penstock"
"""The consumer group on every stream of jobs."""
CELERY_QUEUE: Final = "penstock"
CELERY_TASK: Final = "penstock.infer"
MODELS_KEY: Final = "penstock:models"
"""Set: the names of the models that have a spec."""
WORKERS_KEY: Final = "penstock:workers"
"""Sorted set: worker name by the broker time of its last sign of life, in ms."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")
_LOCAL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_:-]{0,127}\Z")
_UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\Z")


PriorityName = Literal["critical", "high", "normal", "low"]
"""The name of a priority, as users write it."""


class Priority(IntEnum):
    """Drained in this order; numbers are ours alone, users see the names."""

    CRITICAL = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3

    @property
    def label(self) -> str:
        """The name that users see: `critical`, `high`, `normal` or `low`."""
        return _LABELS[self]


_LABELS: Final = tuple(priority.name.lower() for priority in Priority)
_BY_LABEL: Final = {priority.label: priority for priority in Priority}


def parse_priority(name: str) -> Priority:
    """The priority called `name`. Raises InvalidInput that lists the four names."""
    try:
        return _BY_LABEL[name]
    except (KeyError, TypeError):
        raise InvalidInput(f"Unknown priority {described(name)}. Expected one of: {', '.join(_LABELS)}") from None


def parse_name(kind: str, name: object) -> str:
    """`name` if it may name a model or a tenant (`kind` says which, for the error)."""
    if isinstance(name, str) and _NAME.match(name):
        return name
    raise InvalidInput(
        f"Bad {kind} name {described(name)}. Expected 1 to 64 characters of a-z, 0-9, '.', '_' or '-', "
        "starting with a letter or digit"
    )


def new_job_id(model: str) -> str:
    """`<model>.<uuid7>`; the UUID follows RFC 9562, section 5.7 (48 bits of unix ms, 74 random bits)."""
    random = _random_hex()
    ms = f"{time.time_ns() // 1_000_000:012x}"
    return f"{model}.{ms[:8]}-{ms[8:]}-7{random[:3]}-{_VARIANT[random[3]]}{random[4:7]}-{random[7:19]}"


_VARIANT: Final = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}
_IDS_PER_DRAW: Final = 128
_random: Final[list[str]] = []
# A child must not draw the numbers that its parent has drawn.
os.register_at_fork(after_in_child=_random.clear)


def _random_hex() -> str:
    """20 random hex digits; one system call serves many ids."""
    try:
        return _random.pop()
    except IndexError:
        drawn = os.urandom(10 * _IDS_PER_DRAW).hex()
        _random.extend(drawn[start : start + 20] for start in range(20, len(drawn), 20))
        return drawn[:20]


def split_job_id(job_id: str) -> tuple[str, str]:
    """(slot, local id) of a job id; a local id is a UUIDv7, or the task id of a job that came through Celery.

    Raises InvalidInput for anything else.
    """
    slot, dot, local = job_id.rpartition(".") if isinstance(job_id, str) else ("", "", "")
    if not dot or not _NAME.match(slot) or not _LOCAL_ID.match(local):
        raise InvalidInput(f"Bad job id {job_id!r:.80}. Expected <model>.<uuid>")
    return slot, local


def is_job_id(job_id: str, slot: str) -> bool:
    """Whether this is the id of a job of that slot."""
    prefix = f"{slot}."
    return job_id.startswith(prefix) and _LOCAL_ID.match(job_id, len(prefix)) is not None


def job_time_ms(job_id: str) -> int | None:
    """Unix ms at which the id was made, by its maker's clock; None for ids that carry no time."""
    local = job_id.rpartition(".")[2]
    return int(local[:8] + local[9:13], 16) if _UUID7.match(local) else None


def slot_of(job_id: str) -> str:
    """The slot (hash tag) that a job id belongs to."""
    return split_job_id(job_id)[0]


def stream_key(slot: str, priority: Priority) -> str:
    """The stream of waiting and running jobs: `infer.{minilm}.high`."""
    return f"infer.{{{slot}}}.{priority.label}"


def stream_keys(slot: str) -> tuple[str, str, str, str]:
    """The four streams of a slot, most urgent first: index them by Priority."""
    critical, high, normal, low = (stream_key(slot, priority) for priority in Priority)
    return critical, high, normal, low


def dead_key(slot: str) -> str:
    """The stream of dead letters."""
    return f"infer.{{{slot}}}.dead"


def crashes_key(slot: str, priority: Priority, entry_id: bytes) -> str:
    """Set: the crashes in whose batch the job of this entry was running.

    The scripts derive it from the stream's key: keep the two in step.
    """
    return f"{stream_key(slot, priority)}:crashes:{entry_id.decode()}"


def spec_key(slot: str) -> str:
    """The model's spec, as JSON."""
    return f"{{{slot}}}:spec"


def specs_key(slot: str) -> str:
    """Hash: the spec of each version that jobs may name, as JSON."""
    return f"{{{slot}}}:specs"


def active_key(slot: str) -> str:
    """Which version answers, as registry/deployment.py writes it; missing while no version was ever promoted."""
    return f"{{{slot}}}:active"


def flow_key(slot: str) -> str:
    """Hash: jobs in flight per tenant, jobs drained, the drain rate that `retry_after_s` comes from, whether
    the server is short of memory, and the bytes in the dead letters."""
    return f"{{{slot}}}:flow"


def record_key(job_id: str) -> str:
    """The job's one key: its record while it lives, its result afterwards."""
    return local_record_key(*split_job_id(job_id))


def local_record_key(slot: str, local: str) -> str:
    """The record of the job with this local id; for ids that were checked before."""
    return f"{{{slot}}}:job:{local}"


def events_key(job_id: str) -> str:
    """The stream of a job's events; exists only for jobs that emit or are subscribed to.

    The scripts derive it from the record's key: keep the two in step.
    """
    return record_key(job_id) + ":events"


def paused_key(slot: str) -> str:
    """There while the slot is paused: since when, in ms of the broker's clock."""
    return f"{{{slot}}}:paused"


def idempotency_key(slot: str, digest: str) -> str:
    """Where the first job of an idempotency key is remembered."""
    return f"{{{slot}}}:idempotency:{digest}"


def reply_key(slot: str, client_id: str) -> str:
    """The stream on which one client hears of its finished jobs of one slot."""
    return f"{{{slot}}}:reply:{client_id}"


def is_reply_key(key: str, slot: str) -> bool:
    """Whether a job of this slot may be answered on `key`."""
    return key.startswith(f"{{{slot}}}:reply:") or key == lane_key(slot)


def lane_key(slot: str) -> str:
    """The reply stream of jobs that came through Celery; shared by the workers, kept until stored."""
    return f"{{{slot}}}:lane"


def worker_key(name: str) -> str:
    """One worker's last report, as JSON, expiring."""
    return f"penstock:worker:{name}"
