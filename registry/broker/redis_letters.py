"""What operators read and change of the dead letters and the waiting jobs: calls of scripts, and their answers. Pure.

list, read -> replay or purge        dead letters
list       -> withdraw               jobs that no worker holds
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from msgspec import structs

from penstock.registry.broker.base import DeadLetter, Publication, Replay, WaitingEntry, Withdrawal
from penstock.registry.broker.limits import OUTLIVES_MS, REPLY_CAP, REPLY_TTL_MS
from penstock.registry.broker.record import encode_result
from penstock.registry.broker.redis_scripts import Call, call, local_of, number
from penstock.registry.queues import (
    GROUP,
    Priority,
    dead_key,
    flow_key,
    idempotency_key,
    local_record_key,
    record_key,
    stream_key,
)

__all__ = [
    "list_dead",
    "listed_dead",
    "parse_dead_letter",
    "parse_waiting",
    "purge_dead",
    "read_dead_letter",
    "replay",
    "replayed",
    "waiting",
    "withdraw",
    "withdrawn",
]

_PRIORITIES: Final = tuple(Priority)
_REPLAYS: Final = {
    b"R": Replay.REPLAYED,
    b"N": Replay.MISSING,
    b"L": Replay.LIVE,
    b"S": Replay.SETTLED,
    b"K": Replay.SUPERSEDED,
}


def list_dead(slot: str, after: str, count: int) -> Call:
    """One call that describes dead letters of one slot."""
    return call("list_dead", [dead_key(slot)], [after or "0-0", count])


def listed_dead(slot: str, answer: Sequence[Any]) -> list[DeadLetter]:
    """Parses the answer of `list_dead`."""
    return [_letter(slot, entry, size, fields) for entry, size, fields in answer]


def read_dead_letter(slot: str, entry: str) -> Call:
    """Reads a dead letter with its bytes."""
    return ["XRANGE", dead_key(slot), entry, entry]


def parse_dead_letter(slot: str, answer: Sequence[Any]) -> DeadLetter | None:
    """Parses the answer of `read_dead_letter`."""
    if not answer:
        return None
    entry, fields = answer[0]
    sealed = dict(_pairs(fields)).get(b"e", b"")
    return structs.replace(_letter(slot, entry, len(sealed), fields), sealed=sealed)


def replay(slot: str, entry: str, job: Publication, job_ttl_ms: int, keeps_acceptance: bool) -> Call:
    """One call that puts a dead letter back into its queue."""
    keys = [flow_key(slot), dead_key(slot), stream_key(slot, job.priority), record_key(job.job_id)]
    if job.idempotency_digest:
        keys.append(idempotency_key(slot, job.idempotency_digest))
    args: list[Any] = [entry, int(job.priority), local_of(job.job_id), job.tenant, job.reply, job.idempotency_digest]
    args += (job_ttl_ms + OUTLIVES_MS, int(keeps_acceptance), job.lifetime_ms(job_ttl_ms), job.webhook)
    return call("replay", keys, args)


def replayed(answer: bytes) -> Replay:
    """Parses the answer of `replay`."""
    return _REPLAYS[answer]


def purge_dead(slot: str, entries: Sequence[str]) -> Call:
    """One call that deletes dead letters of one slot."""
    return call("purge_dead", [flow_key(slot), dead_key(slot)], entries)


def waiting(slot: str, priority: Priority, after: bytes, count: int, head_bytes: int) -> Call:
    """One call that reads entries that no worker holds."""
    return call("waiting", [stream_key(slot, priority)], [GROUP, after or b"0-0", count, head_bytes])


def parse_waiting(answer: Sequence[Any]) -> list[WaitingEntry]:
    """Parses the answer of `waiting`."""
    return [WaitingEntry(entry_id, head, number(first_ms.decode()) or 0) for entry_id, head, first_ms in answer]


def withdraw(slot: str, priority: Priority, jobs: Sequence[Withdrawal], result_ttl_ms: int) -> Call:
    """One call that withdraws jobs of one queue."""
    idempotency_prefix = idempotency_key(slot, "")
    args: list[Any] = [GROUP, int(priority), result_ttl_ms, REPLY_TTL_MS, REPLY_CAP, idempotency_prefix, len(jobs)]
    keys = [flow_key(slot), stream_key(slot, priority)]
    for job in jobs:
        local = local_of(job.job_id)
        keys.append(local_record_key(slot, local))
        args += (job.entry_id, local, job.tenant, encode_result(job.state, job.sealed))
    return call("withdraw", keys, args)


def withdrawn(answer: bytes) -> int:
    """Parses the answer of `withdraw`: how many entries left the queue."""
    return answer.count(b"W") + answer.count(b"R")


def _letter(slot: str, entry: bytes, size: int, fields: Sequence[bytes]) -> DeadLetter:
    # Any program with the broker's password may have written it: a field of unexpected form is left empty.
    known = {name: value.decode(errors="replace") for name, value in _pairs(fields) if name != b"e"}
    local = known.get(b"job", "")
    return DeadLetter(
        slot,
        entry.decode(),
        known.get(b"reason", ""),
        _PRIORITIES[number(known.get(b"priority")) % len(_PRIORITIES)],
        known.get(b"entry", ""),
        number(known.get(b"accepted")),
        number(known.get(b"deliveries")),
        number(known.get(b"crashes")),
        size,
        f"{slot}.{local}" if local else "",
        known.get(b"tenant", ""),
    )


def _pairs(fields: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(fields[::2], fields[1::2], strict=False))
