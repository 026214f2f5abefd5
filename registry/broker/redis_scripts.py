"""Calls and answers of the Lua scripts in lua/, without a connection: arguments in, typed values out.

The synchronous and the asynchronous client of Redis share this; a script and its caller are read side by side.
All keys of one call carry the same hash tag.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, Final, TypeAlias

from msgspec import structs

from registry.broker.base import (
    CancelOutcome,
    Claim,
    Commit,
    Delivery,
    Depth,
    Event,
    Held,
    Limits,
    Publication,
    Receipt,
    Renewal,
    Standing,
    State,
    StreamEntry,
    Verdict,
)
from registry.queues import (
    GROUP,
    Priority,
    dead_key,
    flow_key,
    idempotency_key,
    lane_key,
    local_record_key,
    record_key,
    slot_of,
    stream_key,
    stream_keys,
)

__all__ = ["EVENTS_CAP", "REPLY_CAP", "REPLY_TTL_MS", "SOURCES", "Call", "sha_of"]

Call: TypeAlias = list[Any]
"""A command's words, EVALSHA first."""

REPLY_CAP: Final = 512
"""Entries of at most 64 KiB that a reply stream keeps; a client that falls behind reads records instead."""
REPLY_TTL_MS: Final = 120_000
OUTLIVES_MS: Final = 3_600_000
"""How long a record outlives its job: a forward that began in time must find it, and whoever asks, the reason."""
EVENTS_CAP: Final = 10_000
"""Events that a job's stream keeps; a subscriber who missed more is told so."""

_FILES: Final[dict[str, str]] = {
    path.name.removesuffix(".lua"): path.read_text()
    for path in (resources.files("registry.broker") / "lua").iterdir()
    if path.name.endswith(".lua")
}
_ENDING: Final = _FILES.pop("ending")
SOURCES: Final[dict[str, str]] = {
    name: _ENDING + source if name in ("cancel", "bury") else source for name, source in _FILES.items()
}
"""Each script as Redis gets it; those that end a single job share how."""
_SHAS: Final = {
    name: hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest() for name, source in SOURCES.items()
}
_PRIORITIES: Final = tuple(Priority)
_STATES: Final = {state.value: state for state in State}
_VERDICTS: Final = {ord("C"): Verdict.COMMITTED, ord("F"): Verdict.FENCED, ord("G"): Verdict.GONE}
_CANCELS: Final = {
    b"C": CancelOutcome.CANCELLED,
    b"R": CancelOutcome.REQUESTED,
    b"S": CancelOutcome.SETTLED,
    b"U": CancelOutcome.UNKNOWN,
}


def sha_of(name: str) -> str:
    """What Redis calls the script after loading it."""
    return _SHAS[name]


def _call(name: str, keys: Sequence[str], args: Iterable[Any]) -> Call:
    return ["EVALSHA", _SHAS[name], len(keys), *keys, *args]


def _local(job_id: str) -> str:
    return job_id.rpartition(".")[2]


def _record(state: State, sealed: bytes) -> bytes:
    return _RECORD_HEADS[state] + sealed


_RECORD_HEADS: Final = {state: state.value.encode() + b"-" for state in State}


def publish(slot: str, jobs: Sequence[Publication], limits: Limits) -> Call:
    """One call that accepts or refuses `jobs`."""
    once_keys: list[str] = []
    record_ttl_ms = limits.job_ttl_ms + OUTLIVES_MS
    args: list[Any] = [GROUP, limits.max_depth, limits.tenant_max_in_flight, record_ttl_ms, len(jobs)]
    records: list[str] = []
    for job in jobs:
        once = job.once
        if once:
            once_keys.append(idempotency_key(slot, once))
        local = _local(job.job_id)
        records.append(local_record_key(slot, local))
        args += (
            int(job.priority),
            job.sealed,
            local,
            job.tenant,
            job.reply,
            once,
            len(once_keys) if once else 0,
            job.fingerprint,
        )
    return _call("publish", [flow_key(slot), *stream_keys(slot), *records, *once_keys], args)


def receipts(slot: str, jobs: Sequence[Publication], answer: Sequence[bytes]) -> list[Receipt]:
    """The answer of `publish`."""
    return [
        Receipt("accepted", job.job_id) if letter == b"a" else _receipt(slot, job.job_id, letter)
        for job, letter in zip(jobs, answer, strict=True)
    ]


def _receipt(slot: str, job_id: str, answer: bytes) -> Receipt:
    letter, rest = answer[:1], answer[1:].decode()
    if letter == b"k":
        return Receipt("known", f"{slot}.{rest}")
    if letter == b"c":
        return Receipt("conflict", job_id)
    return Receipt("full" if letter == b"f" else "tenant-full", job_id, int(rest) / 1000)


def claim(consumer: str, wish: Claim) -> Call:
    """One call that takes jobs of one slot."""
    return _call("claim", stream_keys(wish.slot), [GROUP, consumer, wish.credit, wish.reserve, wish.ageing_ms])


def claimed(slot: str, answer: Sequence[Any]) -> tuple[float, list[Delivery]]:
    """(the broker's time in ms, deliveries) of an answer of `claim`."""
    deliveries: list[Delivery] = []
    for index in range(2, len(answer), 2):
        deliveries += _deliveries(slot, _PRIORITIES[answer[index] - 1], answer[index + 1])
    return int(answer[0]) * 1000 + int(answer[1]) / 1000, deliveries


def _deliveries(slot: str, priority: Priority, entries: Sequence[Any]) -> list[Delivery]:
    # A foreign XADD may have any fields: what is not ours goes on as bytes that do not open.
    return [
        Delivery(slot, priority, entry_id, fields[1] if len(fields) == 2 else b"".join(fields))
        for entry_id, fields in entries
    ]


def armed(consumer: str, slots: Sequence[str], count: int, block_ms: int) -> Call:
    """The blocking claim of an idle worker."""
    keys = [key for slot in slots for key in stream_keys(slot)]
    fixed = ["XREADGROUP", "GROUP", GROUP, consumer, "COUNT", count, "BLOCK", block_ms, "STREAMS"]
    return [*fixed, *keys, *[">"] * len(keys)]


def armed_deliveries(slots: Sequence[str], answer: Sequence[Any] | None) -> list[Delivery]:
    """The answer of `armed`, None when its time ran out; most urgent first."""
    if not answer:
        return []
    owners = {stream_key(slot, priority).encode(): (slot, priority) for slot in slots for priority in _PRIORITIES}
    deliveries: list[Delivery] = []
    for key, entries in answer:
        slot, priority = owners[key]
        deliveries += _deliveries(slot, priority, entries)
    return deliveries


def commit(consumer: str, slot: str, commits: Sequence[Commit], result_ttl_ms: int) -> Call:
    """One call that commits jobs of one slot."""
    reply_index: dict[str, int] = {"": 0}
    once_keys: list[str] = []
    records: list[str] = []
    spans: list[list[bytes]] = [[], [], [], []]
    jobs: list[Any] = []
    for commit in commits:
        once, priority = commit.once, int(commit.priority)
        if once:
            once_keys.append(idempotency_key(slot, once))
        spans[priority].append(commit.entry_id)
        local = _local(commit.job_id)
        records.append(local_record_key(slot, local))
        jobs += (
            priority,
            commit.entry_id,
            local,
            _record(commit.state, commit.sealed),
            commit.tenant,
            reply_index.setdefault(commit.reply, len(reply_index)),
            len(once_keys) if once else 0,
        )
    del reply_index[""]
    args: list[Any] = [GROUP, consumer, result_ttl_ms, REPLY_TTL_MS, len(reply_index), len(commits)]
    for span in spans:
        args += _span(span)
    lane = lane_key(slot)
    args += [0 if reply == lane else REPLY_CAP for reply in reply_index]
    keys = [flow_key(slot), *stream_keys(slot), *reply_index, *records, *once_keys]
    return _call("commit", keys, args + jobs)


def _span(entry_ids: list[bytes]) -> tuple[bytes, bytes]:
    if not entry_ids:
        return b"", b""
    ordered = sorted(entry_ids, key=_entry_order) if len(entry_ids) > 1 else entry_ids
    return ordered[0], ordered[-1]


def _entry_order(entry_id: bytes) -> tuple[bytes, int, bytes]:
    # As long as milliseconds have 13 digits, this orders ids as numbers do, and without parsing.
    return entry_id[:13], len(entry_id), entry_id


def verdicts(answer: bytes) -> list[Verdict]:
    """The answer of `commit`."""
    return [_VERDICTS[letter] for letter in answer]


def renew(consumer: str, slot: str, held: Sequence[Held]) -> Call:
    """One call that extends leases of one slot."""
    args: list[Any] = [GROUP, consumer, len(held)]
    for job in held:
        args += (int(job.priority), job.entry_id)
    return _call("renew", [*stream_keys(slot), *[record_key(job.job_id) for job in held]], args)


def renewed(held: Sequence[Held], answer: bytes) -> Renewal:
    """The answer of `renew`."""
    pairs = list(zip(held, answer, strict=True))
    return Renewal(
        frozenset(job for job, letter in pairs if letter == ord("L")),
        frozenset(job.job_id for job, letter in pairs if letter == ord("K")),
    )


def release(consumer: str, slot: str, held: Sequence[Held]) -> Call:
    """One call that gives jobs of one slot back."""
    args: list[Any] = [GROUP, consumer, len(held)]
    for job in held:
        args += (int(job.priority), job.entry_id)
    return _call("release", stream_keys(slot), args)


def take_over(consumer: str, slot: str, lease_ms: int, count: int, now_ms: float) -> Call:
    """One call that claims lapsed jobs of one slot; it does nothing when it arrives late."""
    return _call("take_over", stream_keys(slot), [GROUP, consumer, lease_ms, count, int(now_ms)])


def taken_over(slot: str, answer: Sequence[Any]) -> list[Delivery]:
    """The answer of `take_over`."""
    deliveries: list[Delivery] = []
    for index in range(0, len(answer), 3):
        found = _deliveries(slot, _PRIORITIES[answer[index] - 1], answer[index + 1])
        deliveries += [
            structs.replace(delivery, attempt=attempt)
            for delivery, attempt in zip(found, answer[index + 2], strict=True)
        ]
    return deliveries


def emit(consumer: str, held: Held, events: Sequence[Event], ttl_ms: int, after: int) -> Call:
    """One call that appends events of one running job."""
    args: list[Any] = [GROUP, consumer, held.entry_id, after, ttl_ms, EVENTS_CAP]
    for event in events:
        args += (event.type, event.sealed)
    return _call("emit", [stream_key(held.slot, held.priority), record_key(held.job_id)], args)


def cancel(job_id: str, tenant: str, sealed: bytes, result_ttl_ms: int) -> Call:
    """One call that withdraws a job or asks for its end."""
    slot = slot_of(job_id)
    args = [GROUP, tenant, *_ending(job_id, State.CANCELLED, sealed, result_ttl_ms)]
    return _call("cancel", [flow_key(slot), *stream_keys(slot), record_key(job_id)], args)


def _ending(job_id: str, state: State, sealed: bytes, result_ttl_ms: int) -> tuple[Any, ...]:
    """What `finish` in ending.lua wants to know."""
    once_prefix = idempotency_key(slot_of(job_id), "")
    return _record(state, sealed), _local(job_id), result_ttl_ms, REPLY_TTL_MS, REPLY_CAP, once_prefix


def cancelled(answer: bytes) -> CancelOutcome:
    """The answer of `cancel`."""
    return _CANCELS[answer]


def standing(job_id: str, *, subscribe: bool) -> Call:
    """One call that reads a job's record."""
    return _call("standing", [*stream_keys(slot_of(job_id)), record_key(job_id)], [GROUP, int(subscribe)])


def stood(answer: Sequence[Any] | None) -> Standing | None:
    """The answer of `standing`."""
    if answer is None:
        return None
    record, consumer, deliveries = answer
    return structs.replace(record_standing(record), is_claimed=bool(consumer), deliveries=deliveries)


def record_standing(record: bytes) -> Standing:
    """What a record says by itself. A terminal record's tenant is inside its sealed result."""
    letter = chr(record[0])
    if letter in "QK":
        tenant = record.split(b"\n", 2)[1].decode()
        return Standing(State.QUEUED, tenant, cancel_requested=letter == "K")
    return Standing(_STATES[letter], "", record[2:])


def bury(consumer: str, delivery: Delivery, reason: str, job_id: str, sealed: bytes, result_ttl_ms: int) -> Call:
    """One call that moves bytes to the dead letters, and ends the job that they were accepted as."""
    slot = delivery.slot
    keys = [flow_key(slot), stream_key(slot, delivery.priority), dead_key(slot)]
    args: list[Any] = [GROUP, consumer, delivery.entry_id, int(delivery.priority), reason, delivery.sealed]
    if job_id:
        keys.append(record_key(job_id))
        args += _ending(job_id, State.DEAD, sealed, result_ttl_ms)
    return _call("bury", keys, args)


def depths(slot: str) -> Call:
    """One call that measures the four queues of a slot."""
    return _call("depths", stream_keys(slot), [GROUP])


def measured(slot: str, answer: Sequence[int]) -> list[Depth]:
    """The answer of `depths`."""
    now = answer[0]
    found = []
    for priority in _PRIORITIES:
        jobs, running, oldest = answer[1 + priority * 3 : 4 + priority * 3]
        found.append(Depth(slot, priority, jobs, running, max(0, now - oldest) / 1000 if oldest else 0.0))
    return found


def read(cursors: Mapping[str, str], block_ms: int, count: int, timeout_s: float) -> Call:
    """XREAD of several streams; BLOCK 0 would wait for ever, so 0 means not to wait.

    It waits for half of `timeout_s` at most: a socket that is silent for all of it counts as broken.
    """
    wait = ["BLOCK", max(1, min(block_ms, int(timeout_s * 500)))] if block_ms > 0 else []
    return ["XREAD", "COUNT", count, *wait, "STREAMS", *cursors.keys(), *cursors.values()]


def trim(key: str, before: str) -> Call:
    """XTRIM up to and including the entry `before`."""
    milliseconds, _, sequence = before.partition("-")
    return ["XTRIM", key, "MINID", f"{milliseconds}-{int(sequence) + 1}"]


def nudge(key: str) -> tuple[Call, Call]:
    """An empty entry, on a stream that goes away by itself."""
    return ["XADD", key, "MAXLEN", "~", REPLY_CAP, "*", b"", b""], ["PEXPIRE", key, REPLY_TTL_MS]


def entries(answer: Sequence[Any] | None) -> list[StreamEntry]:
    """The answer of XREAD."""
    return [
        StreamEntry(key.decode(), entry_id.decode(), fields)
        for key, found in answer or ()
        for entry_id, fields in found
    ]
