"""Every name that processes share: priorities, job ids, Redis keys, Celery's queue and task.

A slot is the name of a model as the hash tag of its keys, `{model}`; it is not a hash slot of Redis. All keys of one
script have the same hash tag, so that a script stays on one node of a Redis Cluster.
A job id is `<model>.<uuid7>`: it contains the slot of its keys and the time at which it was made. By its age, a
result that has expired is told from a job that never existed. The jobs of a batch have ids that follow from the batch:
see DerivedIds.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from enum import IntEnum
from functools import lru_cache
from typing import Final, Literal

from penstock.registry.errors import InvalidInput, described

__all__ = [
    "AUDIT_HEADS_KEY",
    "CELERY_QUEUE",
    "CELERY_TASK",
    "DEFAULT_ENDPOINT",
    "GROUP",
    "MODELS_KEY",
    "WEBHOOKS_KEY",
    "WORKERS_KEY",
    "DerivedIds",
    "Priority",
    "PriorityName",
    "active_key",
    "breakers_key",
    "charged_key",
    "crashes_key",
    "dead_key",
    "event_stream_key",
    "events_key",
    "experiment_key",
    "flow_key",
    "followers_key",
    "idempotency_key",
    "is_derived",
    "is_job_id",
    "is_reply_key",
    "job_id_pattern",
    "job_time_ms",
    "key_group",
    "key_type",
    "keyrings_key",
    "lane_key",
    "local_record_key",
    "meter_key",
    "new_job_id",
    "overdue_key",
    "parse_name",
    "parse_priority",
    "paused_key",
    "quarantine_key",
    "ratings_key",
    "record_key",
    "reply_key",
    "shadow_flow_key",
    "shadow_key",
    "shadow_order_key",
    "shadow_report_key",
    "shadow_series_key",
    "shadow_worst_key",
    "slot_in",
    "slot_of",
    "spec_key",
    "specs_key",
    "split_job_id",
    "stream_key",
    "stream_keys",
    "task_request_key",
    "usage_key",
    "webhook_key",
    "webhook_keys",
    "worker_key",
]

DEFAULT_ENDPOINT: Final = "infer"
"""The endpoint of jobs that name none. Every model has it."""
GROUP: Final = "penstock"
"""The consumer group of every stream of jobs."""
CELERY_QUEUE: Final = "penstock"
CELERY_TASK: Final = "penstock.infer"
AUDIT_HEADS_KEY: Final = "penstock:audit_heads"
"""Hash: the last entry of each writer of the audit log; see registry/audit_heads.py."""
MODELS_KEY: Final = "penstock:models"
"""Set: the names of the models with a spec."""
WEBHOOKS_KEY: Final = "penstock:webhooks"
"""Set: the names of the models whose jobs have had a webhook."""
WORKERS_KEY: Final = "penstock:workers"
"""Sorted set: worker name by the time of its last report, in ms of the broker's clock."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")
# No id ends as the keys that belong to another job's record do.
_LOCAL_ID = re.compile(r"(?![\w:-]*:(?:events|overdue)\Z)[A-Za-z0-9][A-Za-z0-9_:-]{0,127}\Z")
_TIMED = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[78][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\Z")


PriorityName = Literal["critical", "high", "normal", "low"]
"""The name of a priority, as users write it."""


class Priority(IntEnum):
    """Priorities in the order in which they are claimed. Users see the names, not the numbers."""

    CRITICAL = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3

    @property
    def label(self) -> str:
        """The public name: `critical`, `high`, `normal` or `low`."""
        return _LABELS[self]


_LABELS: Final = tuple(priority.name.lower() for priority in Priority)
_BY_LABEL: Final = {priority.label: priority for priority in Priority}


def parse_priority(name: str) -> Priority:
    """The priority with this name. Raises InvalidInput with the four names."""
    try:
        return _BY_LABEL[name]
    except (KeyError, TypeError):
        raise InvalidInput(f"Unknown priority {described(name)}. Expected one of: {', '.join(_LABELS)}") from None


def parse_name(kind: str, name: object) -> str:
    """`name`, if it is a valid name of a model or a tenant. `kind`: the word for it in the message."""
    if isinstance(name, str) and _NAME.match(name):
        return name
    raise InvalidInput(
        f"Bad {kind} name {described(name)}. Expected 1 to 64 characters of a-z, 0-9, '.', '_' or '-', "
        "starting with a letter or digit"
    )


def new_job_id(model: str) -> str:
    """`<model>.<uuid7>`; the UUID follows RFC 9562, section 5.7 (48 bits of unix ms, 74 random bits)."""
    random = _random_hex()
    global _begun
    ms = time.time_ns() // 1_000_000
    last_ms, begins = _begun
    if ms != last_ms:
        digits = f"{ms:012x}"
        begins = f"{digits[:8]}-{digits[8:]}-7"
        _begun = ms, begins
    return f"{model}.{begins}{random[:3]}-{_VARIANT[random[3]]}{random[4:7]}-{random[7:19]}"


class DerivedIds:
    """Job ids that follow from a name and a number, so that a process which repeats its work names the same jobs.

    model: of the jobs. name: no two sets of jobs have the same. made_ms: when the set was made, in Unix ms. An id is a
    UUIDv8: that time, as in a UUIDv7, and a hash.
    """

    __slots__ = ("_begins", "_hash")

    def __init__(self, model: str, name: str, made_ms: int) -> None:
        digits = f"{made_ms:012x}"
        self._begins = f"{model}.{digits[:8]}-{digits[8:]}-8"
        # Names of models hold no NUL. Clients know the jobs of all models by their local ids alone.
        self._hash = hashlib.blake2b(f"{model}\0{name}\0".encode(), digest_size=10)

    def of(self, number: int) -> str:
        """The id of the job with this number."""
        state = self._hash.copy()
        state.update(b"%d" % number)
        digits = state.hexdigest()
        return f"{self._begins}{digits[:3]}-{_VARIANT[digits[3]]}{digits[4:7]}-{digits[7:19]}"


_begun: tuple[int, str] = -1, ""
"""How the ids of the last millisecond begin. One assignment changes both: any thread makes ids."""
_VARIANT: Final = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}
_IDS_PER_DRAW: Final = 128
_random: Final[list[str]] = []
# A forked child must not use the random numbers of its parent.
os.register_at_fork(after_in_child=_random.clear)


def _random_hex() -> str:
    """20 random hex digits. One system call serves many ids."""
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
    """Whether this is the id of a job of this slot."""
    prefix = f"{slot}."
    return job_id.startswith(prefix) and _LOCAL_ID.match(job_id, len(prefix)) is not None


@lru_cache(maxsize=256)
def job_id_pattern(slot: str) -> re.Pattern[bytes]:
    """A pattern that the ids of jobs of this slot match, as bytes, and nothing else does; see is_job_id."""
    return re.compile(re.escape(slot.encode()) + rb"\." + _LOCAL_ID.pattern.encode())


def job_time_ms(job_id: str) -> int | None:
    """When the id was made, in Unix ms of its maker's clock; None for an id without a time.

    That is when the job was submitted, but for a derived id, whose job came later.
    """
    local = job_id.rpartition(".")[2]
    return int(local[:8] + local[9:13], 16) if _TIMED.match(local) else None


def is_derived(job_id: str) -> bool:
    """Whether an id with a time is one of DerivedIds."""
    return job_id.rpartition(".")[2][14:15] == "8"


def slot_of(job_id: str) -> str:
    """The slot of a job id."""
    return split_job_id(job_id)[0]


def slot_in(key: str) -> str:
    """The slot in the name of a key; empty for a key of no slot."""
    return key.partition("{")[2].partition("}")[0]


def stream_key(slot: str, priority: Priority) -> str:
    """The stream of waiting and running jobs: `infer.{minilm}.high`."""
    return f"infer.{{{slot}}}.{priority.label}"


@lru_cache(maxsize=1024)
def stream_keys(slot: str) -> tuple[str, str, str, str]:
    """The four streams of a slot, most urgent first; the index is a Priority."""
    critical, high, normal, low = (stream_key(slot, priority) for priority in Priority)
    return critical, high, normal, low


def dead_key(slot: str) -> str:
    """The stream of dead letters."""
    return f"infer.{{{slot}}}.dead"


def crashes_key(slot: str, priority: Priority, entry_id: bytes) -> str:
    """Set: the crashes during which the job of this entry was running.

    The scripts derive this key from that of the stream: change both together.
    """
    return f"{stream_key(slot, priority)}{_CRASHES}{entry_id.decode()}"


def shadow_key(slot: str) -> str:
    """The shadow queue: a stream of pairs of answered jobs; see registry/shadow.py."""
    return f"infer.{{{slot}}}.shadow"


def shadow_order_key(slot: str) -> str:
    """The record of the shadow that runs; missing while none does."""
    return f"{{{slot}}}:shadow"


def shadow_flow_key(slot: str) -> str:
    """Hash: the id of the shadow, the bytes in its queue, and counts of pairs that were mirrored and dropped."""
    return f"{{{slot}}}:shadowflow"


def shadow_report_key(slot: str) -> str:
    """Hash: the comparisons of the last shadow, added up."""
    return f"{{{slot}}}:shadowreport"


def shadow_worst_key(slot: str) -> str:
    """Sorted set: the worst comparisons of the last shadow, as JSON, by how bad they are."""
    return f"{{{slot}}}:shadowworst"


def shadow_series_key(slot: str) -> str:
    """Stream: the figures of the latest comparisons of the last shadow, in order, each pair once."""
    return f"{{{slot}}}:shadowseries"


def spec_key(slot: str) -> str:
    """The model's spec, as JSON."""
    return f"{{{slot}}}:spec"


def specs_key(slot: str) -> str:
    """Hash: the specs of the versions that jobs may name, as JSON."""
    return f"{{{slot}}}:specs"


def keyrings_key(slot: str) -> str:
    """The names of the live workers' signing keys, a line for each worker; see registry/key_reports.py."""
    return f"{{{slot}}}:keyrings"


def active_key(slot: str) -> str:
    """The record of the active version; see registry/deployment.py. It is missing until a version is promoted."""
    return f"{{{slot}}}:active"


def breakers_key(slot: str) -> str:
    """Hash: the circuit breakers of the model's optimisations, by version and optimisation; see broker/breakers.py."""
    return f"{{{slot}}}:breakers"


def experiment_key(slot: str, experiment: str) -> str:
    """Hash: what each worker has counted of the arms of an experiment; see safety/arm_figures.py."""
    return f"{{{slot}}}:experiment:{experiment}"


def ratings_key(slot: str, experiment: str) -> str:
    """Hash: the quality that clients have reported, summed by version; see safety/arm_figures.py."""
    return f"{{{slot}}}:ratings:{experiment}"


def flow_key(slot: str) -> str:
    """Hash: jobs in flight per tenant, committed jobs, the rate of commits for `retry_after_s`, whether the server is
    short of memory, and the bytes in the dead letters."""
    return f"{{{slot}}}:flow"


def usage_key(slot: str) -> str:
    """Hash: accepted jobs by `<account>:<month>`; the account is the id of the API key that pays. Tokens of its texts
    are behind `:prompt` and `:generated`.

    publish.lua and commit.lua derive this key from flow_key: change them together.
    """
    return f"{{{slot}}}:usage"


def meter_key(subject: str, meter: str) -> str:
    """Hash: what one caller, tenant, address or route has spent of one limit; see spend.lua.

    All have one hash tag: one call of the script charges several.
    """
    return f"{{gateway}}:limits:{meter}:{subject}"


def charged_key(batch_id: str) -> str:
    """Bits: the lines of a batch that were charged on the limits of its key, by their numbers; see spend.lua."""
    return f"{{gateway}}:charged:{batch_id}"


def record_key(job_id: str) -> str:
    """The key of a job: its record, and after its end its result."""
    return local_record_key(*split_job_id(job_id))


def local_record_key(slot: str, local: str) -> str:
    """The key of the job with this local id, which the caller has checked."""
    return f"{{{slot}}}:job:{local}"


def events_key(job_id: str) -> str:
    """The stream of a job's events. It exists only for jobs that emit events or have a subscriber.

    The scripts derive this key from that of the record: change both together.
    """
    return event_stream_key(record_key(job_id))


def event_stream_key(record: str) -> str:
    """The stream of the events of the job with this record."""
    return record + _EVENTS


def overdue_key(job_id: str) -> str:
    """The last call that asked to end this overdue job under its lapsed lease, and the time that is counted so far."""
    return record_key(job_id) + ":overdue"


def followers_key(job_id: str) -> str:
    """A line `<until in ms> <follower>` for each process that waits for the job and has not submitted it."""
    slot, local = split_job_id(job_id)
    return f"{{{slot}}}:followers:{local}"


def paused_key(slot: str) -> str:
    """Exists while the slot is paused; holds when it was paused, in ms of the broker's clock."""
    return f"{{{slot}}}:paused"


def idempotency_key(slot: str, digest: str) -> str:
    """The key that holds the first job of an idempotency key."""
    return f"{{{slot}}}:idempotency:{digest}"


def reply_key(slot: str, client_id: str) -> str:
    """The stream of one client's finished jobs of one slot."""
    return f"{{{slot}}}:reply:{client_id}"


def is_reply_key(key: str, slot: str) -> bool:
    """Whether `key` may be the reply stream of a job of this slot."""
    return key.startswith(f"{{{slot}}}:reply:") or key == lane_key(slot)


def lane_key(slot: str) -> str:
    """The reply stream of jobs that came through Celery. The workers share it; entries stay until they are stored."""
    return f"{{{slot}}}:lane"


def webhook_keys(slot: str) -> tuple[str, str, str]:
    """Three sorted sets of webhooks, by times in ms: waiting ones by the end of their job and by when they are due, and
    dead ones.

    The scripts derive these keys, and `webhook_key`, from that of the record: change them together.
    """
    return f"{{{slot}}}:webhooks:waiting", f"{{{slot}}}:webhooks:due", f"{{{slot}}}:webhooks:dead"


def webhook_key(slot: str, event_id: str) -> str:
    """Hash: one webhook, until it is delivered."""
    return f"{{{slot}}}:webhooks:event:{event_id}"


def key_group(key: str) -> str:
    """The pattern of keys like this one, as the rules of a Redis user name them; empty for a name that is none of ours.

    >>> key_group("{minilm}:job:0198c5"), key_group("infer.{minilm}.high"), key_group("penstock:worker:cpu0@host")
    ('{*}:job:*', 'infer.{*}.high', 'penstock:worker:*')
    """
    found = _KEY.fullmatch(key)
    if found is None:
        return ""
    name, rest = (found[2], found[3]) if found[2] else (found[4], found[5])
    return f"{f'{found[1]}{{*}}' if found[2] else 'penstock'}{name}{':*' if rest else ''}"


def key_type(key: str) -> str:
    """The type of our key of this name, as Redis names it; empty for a name that is none of ours.

    >>> key_type("{mlp}:flow"), key_type("infer.{mlp}.high:crashes:1-0"), key_type("{mlp}:job:7:events")
    ('hash', 'set', 'stream')
    """
    group = key_group(key)
    if group.startswith("infer.") and _CRASHES in key:
        return "set"
    if group == "{*}:job:*" and key.endswith(_EVENTS):
        return "stream"
    if group == "{*}:webhooks:*":
        return "hash" if _WEBHOOK in key else "zset"
    return _TYPES.get(group, "")


_TYPES: Final = {
    "infer.{*}.critical": "stream",
    "infer.{*}.high": "stream",
    "infer.{*}.normal": "stream",
    "infer.{*}.low": "stream",
    "infer.{*}.dead": "stream",
    "infer.{*}.shadow": "stream",
    "{*}:reply:*": "stream",
    "{*}:lane": "stream",
    "{*}:job:*": "string",
    "{*}:idempotency:*": "string",
    "{*}:experiment:*": "hash",
    "{*}:ratings:*": "hash",
    "{*}:task:*": "string",
    "{*}:spec": "string",
    "{*}:active": "string",
    "{*}:keyrings": "string",
    "{*}:paused": "string",
    "{*}:specs": "hash",
    "{*}:breakers": "hash",
    "{*}:flow": "hash",
    "{*}:followers:*": "string",
    "{*}:usage": "hash",
    "{*}:limits:*": "hash",
    "{*}:charged:*": "string",
    "{*}:shadow": "string",
    "{*}:shadowflow": "hash",
    "{*}:shadowreport": "hash",
    "{*}:shadowworst": "zset",
    "{*}:shadowseries": "stream",
    "{*}:quarantine": "zset",
    "penstock:audit_heads": "hash",
    "penstock:models": "set",
    "penstock:webhooks": "set",
    "penstock:workers": "zset",
    "penstock:worker:*": "string",
    "penstock:quarantine": "zset",
}
"""The type of each group of keys; see key_group."""
_CRASHES: Final = ":crashes:"
_EVENTS: Final = ":events"
_WEBHOOK: Final = ":webhooks:event:"
_KEY: Final = re.compile(r"(infer\.|)\{[a-z0-9._-]+\}([.:][a-z]+)(:.*)?|penstock(:[a-z_]+)(:.*)?", re.DOTALL)


def quarantine_key(slot: str = "") -> str:
    """Sorted set: the names to which foreign keys of this slot were renamed, by the time in ms of the broker's clock.
    Without a slot: keys of no slot. Each name is `<this key>:<ms>:<type>:<former key>`."""
    return f"{{{slot}}}:quarantine" if slot else "penstock:quarantine"


def task_request_key(job_id: str) -> str:
    """What the Celery message of this job said beside the task's arguments; see celery_bridge/task_request.py."""
    slot, local = split_job_id(job_id)
    return f"{{{slot}}}:task:{local}"


def worker_key(name: str) -> str:
    """The last report of a worker, as JSON; it expires."""
    return f"penstock:worker:{name}"
