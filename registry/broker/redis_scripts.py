"""Calls and answers of the Lua scripts in lua/: arguments to a command, an answer to typed values. Pure, no connection.

The synchronous and the asynchronous connections share this file. Each script has a function of its name that makes
its call, and usually a second one that parses its answer. All keys of one call carry the same hash tag. The calls for
operators are in redis_letters.py.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any, Final, TypeAlias

from msgspec import structs

from penstock.registry.broker.base import (
    Announced,
    CancelOutcome,
    Claim,
    Commit,
    CommitStatus,
    Delivery,
    Depth,
    Emission,
    Held,
    JobRecord,
    Limits,
    Position,
    Publication,
    Rating,
    Receipt,
    Renewal,
    State,
    StreamEntry,
)
from penstock.registry.broker.incidents import exceeded_limit_s
from penstock.registry.broker.limits import (
    CALL_BYTES,
    CLAIM_BYTES,
    DEAD_LETTERS_BYTES,
    DEAD_LETTERS_CAP,
    MEMORY_HIGH_WATER_PCT,
    OBSERVATIONS_TTL_MS,
    OUTLIVES_MS,
    QUARANTINE_CAP,
    REPLY_CAP,
    REPLY_TTL_MS,
)
from penstock.registry.broker.record import encode_result, parse_record, record_parts
from penstock.registry.envelope import MAX_JOB_BYTES
from penstock.registry.queues import (
    GROUP,
    WEBHOOKS_KEY,
    Priority,
    active_key,
    crashes_key,
    dead_key,
    events_key,
    flow_key,
    followers_key,
    idempotency_key,
    key_group,
    keyrings_key,
    lane_key,
    local_record_key,
    overdue_key,
    paused_key,
    ratings_key,
    record_key,
    slot_of,
    spec_key,
    specs_key,
    stream_key,
    stream_keys,
)

__all__ = ["SOURCES", "Call", "call", "commands_of", "keys_of", "local_of", "number", "script_of", "sha_of"]

Call: TypeAlias = list[Any]
"""The words of a command; EVALSHA is the first one of a script's call. A tuple is one word in parts; see
redis_packing.py."""

_FILES: Final[dict[str, str]] = {
    path.name.removesuffix(".lua"): path.read_text()
    for path in (resources.files("penstock.registry.broker") / "lua").iterdir()
    if path.name.endswith(".lua")
}
_WEBHOOK: Final = _FILES.pop("webhook")
_CALENDAR: Final = _FILES.pop("calendar")
_BEGINNINGS: Final = {
    "commit": _WEBHOOK + _CALENDAR,
    **dict.fromkeys(("publish", "spend"), _CALENDAR),
    **dict.fromkeys(("cancel", "dead_letter", "expire", "replay", "withdraw"), _WEBHOOK + _FILES.pop("ending")),
    **dict.fromkeys([name for name in _FILES if name.startswith("breaker_")], _FILES.pop("breaker")),
}
SOURCES: Final[dict[str, str]] = {name: _BEGINNINGS.get(name, "") + source for name, source in _FILES.items()}
"""Each script as Redis loads it. Scripts that end jobs begin with webhook.lua, those that end a single one with
ending.lua, too; those of circuit breakers begin with breaker.lua, those that count by months with calendar.lua."""
_SHAS: Final = {
    name: hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest() for name, source in SOURCES.items()
}
_NAMES: Final = {sha: name for name, sha in _SHAS.items()}
_COMMAND: Final = re.compile(r"redis\.p?call\('([A-Z]+)'")
_PRIORITIES: Final = tuple(Priority)
_CLAIM_LIMITS: Final = str(CLAIM_BYTES), str(MAX_JOB_BYTES)
"""As texts, like all numbers of which a call has many: a number takes hiredis four times as long as its text."""
_STATUSES: Final = {ord("C"): CommitStatus.COMMITTED, ord("F"): CommitStatus.FENCED, ord("G"): CommitStatus.GONE}
_REFUSALS: Final = {b"f": "full", b"t": "tenant-full", b"m": "memory"}
_RATINGS: Final = {b"C": Rating.COUNTED, b"R": Rating.REPEATED, b"U": Rating.UNKNOWN}
_CANCELS: Final = {
    b"C": CancelOutcome.CANCELLED,
    b"R": CancelOutcome.REQUESTED,
    b"U": CancelOutcome.UNKNOWN,
    b"F": CancelOutcome.FOLLOWED,
}


def sha_of(name: str) -> str:
    """The name of a loaded script in Redis."""
    return _SHAS[name]


def script_of(call: Sequence[Any]) -> str:
    """The name of the script that a call runs; empty for any other command."""
    return _NAMES.get(call[1], "") if call and call[0] == "EVALSHA" else ""


def commands_of(name: str) -> list[str]:
    """The commands that a script runs, in alphabetical order."""
    return sorted(set(_COMMAND.findall(SOURCES[name])))


def keys_of(call: Sequence[Any]) -> list[str]:
    """The keys of a call, without its values."""
    words = call[3 : 3 + call[2]] if script_of(call) else call[1:]
    return [word for word in words if isinstance(word, str) and key_group(word)]


def call(name: str, keys: Sequence[str], args: Iterable[Any]) -> Call:
    """The command that runs a script."""
    return ["EVALSHA", _SHAS[name], len(keys), *keys, *args]


def local_of(job_id: str) -> str:
    """The id of a job within its slot."""
    return job_id.rpartition(".")[2]


def publish(slot: str, jobs: Sequence[Publication], limits: Limits) -> Call:
    """One call that accepts or refuses `jobs`."""
    prefix, cut = local_record_key(slot, ""), len(slot) + 1
    idempotency_keys: list[str] = []
    # What jobs have in common is named once for each kind of them. A job names the number of its kind.
    numbers: dict[tuple[Priority, str, str, int, str], str] = {}
    last_kind: tuple[Priority, str, str, int, str] | None = None
    number = ""
    kinds: list[Any] = []
    idempotent: list[Any] = []
    words: list[Any] = []
    counted: list[Any] = []
    targets: list[Any] = []
    for index, job in enumerate(jobs, 1):
        kind = job.priority, job.tenant, job.reply, job.deadline_ms, job.account
        if kind != last_kind:
            if kind not in numbers:
                numbers[kind] = str(len(numbers) + 1)
                lifetime_ms = job.lifetime_ms(limits.job_ttl_ms)
                kinds += (int(job.priority), job.tenant, job.reply, lifetime_ms, job.account)
            last_kind, number = kind, numbers[kind]
        words += (job.sealed, number)
        if job.idempotency_digest:
            idempotency_keys.append(idempotency_key(slot, job.idempotency_digest))
            idempotent += (index, job.idempotency_digest, job.fingerprint)
        if job.prompt_tokens:
            counted += (index, job.prompt_tokens)
        if job.webhook:
            targets += (index, job.webhook)
    if len(numbers) == 1:
        del words[1::2]
    records = [prefix + job.job_id[cut:] for job in jobs]
    record_ttl_ms = limits.job_ttl_ms + OUTLIVES_MS
    args: list[Any] = [GROUP, limits.max_depth, limits.tenant_max_in_flight, record_ttl_ms, len(jobs)]
    args += (MEMORY_HIGH_WATER_PCT, len(numbers), len(idempotency_keys), len(counted) // 2)
    keys = [flow_key(slot), *stream_keys(slot), *records, *idempotency_keys]
    return call("publish", keys, [*args, *kinds, *idempotent, *counted, *words, *targets])


def webhook_slot(slot: str, jobs: Sequence[Publication]) -> Call | None:
    """Tells deliverers of a slot whose jobs have webhooks, before they are published. None: no job has one."""
    for job in jobs:
        if job.webhook:
            return ["SADD", WEBHOOKS_KEY, slot]
    return None


def receipts(slot: str, jobs: Sequence[Publication], answer: Sequence[bytes]) -> list[Receipt]:
    """Parses the answer of `publish`."""
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
    if letter == b"e":
        return Receipt("exists", job_id)
    return Receipt(_REFUSALS[letter], job_id, int(rest) / 1000)


def claim(consumer: str, request: Claim) -> Call:
    """One call that takes jobs of one slot."""
    credits = str(request.credit), str(request.reserve), str(request.ageing_ms), str(request.credit_bytes)
    expected = str(request.expected_bytes), str(request.bands)
    return [*_claim_begun(request.slot), consumer, *credits, *_CLAIM_LIMITS, *expected]


@lru_cache(maxsize=1024)
def _claim_begun(slot: str) -> tuple[Any, ...]:
    """What all claims of a slot begin with."""
    return tuple(call("claim", [*stream_keys(slot), paused_key(slot), active_key(slot)], [GROUP]))


def claimed(slot: str, answer: Sequence[Any]) -> tuple[float, bool, list[Delivery]]:
    """Parses the answer of `claim`: (the broker's time in ms, whether the slot is paused, deliveries)."""
    deliveries: list[Delivery] = []
    active = answer[3] or b""
    for index in range(4, len(answer), 2):
        priority, jobs = _PRIORITIES[answer[index] - 1], iter(answer[index + 1])
        deliveries += [
            Delivery(slot, priority, entry_id, sealed, 1, 0, 0, active)
            if isinstance(sealed, bytes)
            else _unusual(slot, priority, entry_id, sealed, active)
            for entry_id, sealed in zip(jobs, jobs, strict=True)
        ]
    return int(answer[0]) * 1000 + int(answer[1]) / 1000, answer[2] == 1, deliveries


def _deliveries(slot: str, priority: Priority, entries: Sequence[Any], active: bytes) -> list[Delivery]:
    return [
        Delivery(slot, priority, entry_id, fields[1], active=active)
        if len(fields) == 2
        else _unusual(slot, priority, entry_id, fields, active)
        for entry_id, fields in entries
    ]


def _unusual(slot: str, priority: Priority, entry_id: bytes, fields: Sequence[bytes], active: bytes) -> Delivery:
    """A replayed dead letter; or the fields of a foreign XADD, joined to bytes that are no envelope."""
    if len(fields) == 4 and fields[2] == b"a" and (accepted_ms := number(fields[3].decode(errors="replace"))):
        return Delivery(slot, priority, entry_id, fields[1], accepted_first_ms=accepted_ms, active=active)
    return Delivery(slot, priority, entry_id, b"".join(fields), active=active)


def armed(consumer: str, slots: Sequence[str], count: int, block_ms: int, bands: Mapping[str, int]) -> Call:
    """The blocking claim of a worker that waits: XREADGROUP with BLOCK."""
    keys = [key for slot in slots for key in stream_keys(slot)[: bands.get(slot)]]
    fixed = ["XREADGROUP", "GROUP", GROUP, consumer, "COUNT", count, "BLOCK", block_ms, "STREAMS"]
    return [*fixed, *keys, *[">"] * len(keys)]


def spec(slot: str, version: str) -> Call:
    """Reads the spec of a version, or of the active one."""
    return ["HGET", specs_key(slot), version] if version else ["GET", spec_key(slot)]


def announced(slot: str) -> Call:
    """Reads the spec of the active version and the keyrings of the slot's workers."""
    return ["MGET", spec_key(slot), keyrings_key(slot)]


def parse_announced(answer: Sequence[bytes | None]) -> Announced:
    """Parses the answer of `announced`."""
    spec, lines = answer
    return Announced(spec, tuple(line.partition(b" ")[2] for line in (lines or b"").splitlines()))


def report_keys(slot: str, report: bytes, ttl_ms: int, *, is_live: bool) -> Call:
    """One call that publishes or withdraws a worker's report about its keys."""
    return call("report_keys", [keyrings_key(slot)], [ttl_ms, report, int(is_live)])


def actives(slots: Sequence[str]) -> Call:
    """Reads the active versions of slots. Sent after a blocking claim, it is answered when the claim has ended."""
    return ["MGET", *map(active_key, slots)]


def parse_actives(slots: Sequence[str], answer: Sequence[bytes | None]) -> dict[str, bytes]:
    """Parses the answer of `actives`."""
    return {slot: record or b"" for slot, record in zip(slots, answer, strict=True)}


def armed_deliveries(
    slots: Sequence[str], answer: Sequence[Any] | None, actives: Sequence[bytes | None]
) -> list[Delivery]:
    """Parses the answers of `armed` (None when its time ran out) and of `actives`; most urgent first."""
    if not answer:
        return []
    active = dict(zip(slots, actives, strict=True))
    owners = _owners(tuple(slots))
    deliveries: list[Delivery] = []
    for key, entries in answer:
        slot, priority = owners[key]
        deliveries += _deliveries(slot, priority, entries, active[slot] or b"")
    return deliveries


@lru_cache(maxsize=64)
def _owners(slots: tuple[str, ...]) -> dict[bytes, tuple[str, Priority]]:
    """The slot and the priority of each stream, by its key as Redis names it."""
    return {
        key.encode(): (slot, priority)
        for slot in slots
        for priority, key in zip(_PRIORITIES, stream_keys(slot), strict=True)
    }


def commit(consumer: str, slot: str, commits: Sequence[Commit], result_ttl_ms: int) -> Call:
    """One call that commits jobs of one slot."""
    prefix, cut = local_record_key(slot, ""), len(slot) + 1
    idempotency_keys: list[str] = []
    reply_index: dict[str, int] = {}
    # Kinds of jobs, as in `publish`.
    numbers: dict[tuple[Priority, str, str], str] = {}
    last_kind: tuple[Priority, str, str] | None = None
    number = ""
    kinds: list[Any] = []
    entry_ids: tuple[list[bytes], ...] = ([], [], [], [])
    idempotent: list[int] = []
    words: list[Any] = []
    paid: list[Any] = []
    for index, commit in enumerate(commits, 1):
        kind = commit.priority, commit.tenant, commit.reply
        if kind != last_kind:
            if kind not in numbers:
                numbers[kind] = str(len(numbers) + 1)
                reply = reply_index.setdefault(commit.reply, len(reply_index) + 1) if commit.reply else 0
                kinds += (int(commit.priority), commit.tenant, reply)
            last_kind, number = kind, numbers[kind]
        entry_ids[commit.priority].append(commit.entry_id)
        words += (commit.entry_id, record_parts(commit.state, commit.sealed), number)
        if commit.idempotency_digest:
            idempotency_keys.append(idempotency_key(slot, commit.idempotency_digest))
            idempotent.append(index)
        if commit.account:
            paid += (index, commit.account, commit.prompt_tokens, commit.generated_tokens)
    if len(numbers) == 1:
        del words[2::3]
    records = [prefix + commit.job_id[cut:] for commit in commits]
    args: list[Any] = [GROUP, consumer, result_ttl_ms, REPLY_TTL_MS, len(reply_index), len(commits)]
    args += (len(numbers), len(idempotency_keys))
    for span in map(_span, entry_ids):
        args += span
    lane = lane_key(slot)
    args += [0 if reply == lane else REPLY_CAP for reply in reply_index]
    keys = [flow_key(slot), *stream_keys(slot), *reply_index, *records, *idempotency_keys]
    return call("commit", keys, [*args, *kinds, *idempotent, *words, *paid])


def _span(entry_ids: list[bytes]) -> tuple[bytes, bytes]:
    """Two incomplete ids between which all of these are: the ms of the first one and of the last one."""
    if not entry_ids:
        return b"", b""
    # While milliseconds have 13 digits, bytes are ordered as the numbers are.
    return min(entry_ids).partition(b"-")[0], max(entry_ids).partition(b"-")[0]


def statuses(answer: bytes) -> list[CommitStatus]:
    """Parses the answer of `commit`."""
    return [_STATUSES[letter] for letter in answer]


def renew(consumer: str, slot: str, held: Sequence[Held]) -> Call:
    """One call that extends leases of one slot."""
    args: list[Any] = [GROUP, consumer, len(held)]
    for job in held:
        args += (int(job.priority), job.entry_id)
    return call("renew", [*stream_keys(slot), *[record_key(job.job_id) for job in held]], args)


def renewed(held: Sequence[Held], answer: bytes) -> Renewal:
    """Parses the answer of `renew`."""
    pairs = list(zip(held, answer, strict=True))
    return Renewal(
        frozenset(job for job, letter in pairs if letter == ord("L")),
        frozenset(job.job_id for job, letter in pairs if letter == ord("K")),
    )


def release(consumer: str, slot: str, held: Sequence[Held], version: str = "") -> Call:
    """One call that releases jobs of one slot; with `version`, for workers that have this version."""
    args: list[Any] = [GROUP, consumer, len(held), _owner_for(version) if version else ""]
    for job in held:
        args += (int(job.priority), job.entry_id)
    return call("release", stream_keys(slot), args)


def _owner_for(version: str) -> str:
    # No consumer has such a name: theirs end with the id of a boot.
    return f"version {version}"


def adopt(consumer: str, slot: str, versions: Sequence[str], count: int) -> Call:
    """One call that claims jobs that were released for one of these versions. It answers as `take_over` does."""
    keys = [*stream_keys(slot), paused_key(slot), active_key(slot)]
    return call("adopt", keys, [GROUP, consumer, count, *map(_owner_for, versions)])


def forget_consumers(stream: str, left_ms: int) -> Call:
    """One call that deletes the consumers of a stream that made no call for so long and hold no entry."""
    return call("forget_consumers", [stream], [GROUP, left_ms])


def take_over(consumer: str, slot: str, lease_ms: int, count: int, now_ms: float) -> Call:
    """One call that claims jobs of one slot whose lease has lapsed. It does nothing when it arrives late."""
    keys = [*stream_keys(slot), paused_key(slot), active_key(slot), flow_key(slot)]
    return call("take_over", keys, [GROUP, consumer, lease_ms, count, int(now_ms)])


def announce(slot: str, spec: bytes, versions: Mapping[str, bytes], *, replaces: bool) -> Call:
    """One call that publishes the active version's spec, unless a version was promoted, and specs by version.

    replaces: False fills in what is missing.
    """
    pairs = [word for version in versions.items() for word in version]
    return call("announce", [active_key(slot), spec_key(slot), specs_key(slot)], [int(replaces), spec, *pairs])


def activate(slot: str, epoch: int, record: bytes, version: str, spec: bytes) -> Call:
    """One call that makes a version the active one."""
    return call("activate", [active_key(slot), spec_key(slot), specs_key(slot)], [epoch, record, version, spec])


def taken_over(slot: str, answer: Sequence[Any]) -> list[Delivery]:
    """Parses the answer of `take_over` and of `adopt`."""
    deliveries: list[Delivery] = []
    active = (answer[0] if answer else None) or b""
    for index in range(1, len(answer), 4):
        found = _deliveries(slot, _PRIORITIES[answer[index] - 1], answer[index + 1], active)
        deliveries += [
            structs.replace(_with_incidents(delivery, incidents), attempt=attempt)
            for delivery, attempt, incidents in zip(found, answer[index + 2], answer[index + 3], strict=True)
        ]
    return deliveries


def _with_incidents(delivery: Delivery, incidents: Sequence[bytes]) -> Delivery:
    exceeded_s = exceeded_limit_s(incident.decode(errors="replace") for incident in incidents)
    return structs.replace(delivery, crashes=len(incidents), exceeded_s=exceeded_s)


def quarantine(quarantine: str, types: Mapping[str, str]) -> Call:
    """One call that quarantines foreign keys. types: by key, its type; empty: quarantine it, whatever it holds.

    counters: a hash of whole numbers.
    """
    return call("quarantine", [quarantine, *types], [QUARANTINE_CAP, *types.values()])


def suspect(slot: str, jobs: Sequence[Held], incident: str, ttl_ms: int) -> Call:
    """One call that counts a crash for jobs of one slot."""
    args: list[Any] = [GROUP, incident, ttl_ms, len(jobs)]
    for job in jobs:
        args += (int(job.priority), job.entry_id)
    marks = [crashes_key(slot, job.priority, job.entry_id) for job in jobs]
    return call("suspect", [*stream_keys(slot), *marks], args)


def emit(consumer: str, emissions: Sequence[Emission], ttl_ms: int, max_bytes: int) -> Call:
    """One call that appends events of running jobs of one slot."""
    args: list[Any] = [GROUP, consumer, ttl_ms, max_bytes]
    keys: list[str] = []
    for held, attempt, sealed, count, after, keep_from, resumes in emissions:
        keys += (stream_key(held.slot, held.priority), record_key(held.job_id))
        args += (held.entry_id, attempt, after.seq, after.size, count, keep_from, sealed, int(resumes))
    return call("emit", keys, args)


def job_events(job_id: str) -> Call:
    """One command that reads a job's event stream."""
    return ["XRANGE", events_key(job_id), "-", "+"]


def parse_job_events(job_id: str, answer: Sequence[Any]) -> list[StreamEntry]:
    """Parses the answer of `job_events`."""
    key = events_key(job_id)
    return [StreamEntry(key, entry_id.decode(), fields) for entry_id, fields in answer]


def positions(answer: Sequence[int]) -> list[Position]:
    """Parses the answer of `emit`."""
    return [Position(*pair) for pair in zip(answer[::2], answer[1::2], strict=True)]


def cancel(job_id: str, tenant: str, sealed: bytes, result_ttl_ms: int, *, unless_followed: bool) -> Call:
    """One call that withdraws a waiting job, or asks its worker to stop."""
    slot = slot_of(job_id)
    args = [GROUP, tenant, *_ending(job_id, State.CANCELLED, sealed, result_ttl_ms), int(unless_followed)]
    return call("cancel", [flow_key(slot), *stream_keys(slot), record_key(job_id), followers_key(job_id)], args)


def follow(job_ids: Sequence[str], follower: str, ttl_ms: int) -> list[Call]:
    """A call for each slot that notes a follower of its jobs. A `ttl_ms` of 0 ends that."""
    by_slot: defaultdict[str, list[str]] = defaultdict(list)
    for job_id in job_ids:
        by_slot[slot_of(job_id)].append(followers_key(job_id))
    return [call("follow", keys, [ttl_ms, follower, int(ttl_ms > 0)]) for keys in by_slot.values()]


def expire(job_id: str, tenant: str, sealed: bytes, result_ttl_ms: int) -> Call:
    """One call that ends a job whose time has passed. It answers 1 when it ended the job."""
    slot = slot_of(job_id)
    args = [GROUP, tenant, *_ending(job_id, State.EXPIRED, sealed, result_ttl_ms)]
    return call("expire", [flow_key(slot), *stream_keys(slot), record_key(job_id), overdue_key(job_id)], args)


def rate(job_id: str, experiment: str, version: str, quality: float) -> Call:
    """One call that counts the quality of an ended job."""
    keys = [record_key(job_id), ratings_key(slot_of(job_id), experiment)]
    return call("rate", keys, [version, repr(float(quality)), OBSERVATIONS_TTL_MS])


def rated(answer: bytes) -> Rating:
    """Parses the answer of `rate`."""
    return _RATINGS[answer]


def _ending(job_id: str, state: State, sealed: bytes, result_ttl_ms: int) -> tuple[Any, ...]:
    """The arguments of `finish` in ending.lua."""
    idempotency_prefix = idempotency_key(slot_of(job_id), "")
    return encode_result(state, sealed), local_of(job_id), result_ttl_ms, REPLY_TTL_MS, REPLY_CAP, idempotency_prefix


def cancelled(answer: bytes) -> CancelOutcome | JobRecord:
    """Parses the answer of `cancel`. A record is longer than a letter."""
    return _CANCELS.get(answer) or parse_record(answer) or CancelOutcome.UNKNOWN


def job_record(job_id: str, *, subscribe: bool) -> Call:
    """One call that reads a job's record."""
    keys = [*stream_keys(slot_of(job_id)), record_key(job_id)]
    return call("job_record", keys, [GROUP, int(subscribe), CALL_BYTES])


def is_cut(answer: Sequence[Any] | None) -> bool:
    """Whether the answer of `job_record` is the first piece of a large record, and its size."""
    return answer is not None and len(answer) == 2


def job_records(job_ids: Sequence[str]) -> Call:
    """One call that reads records of one slot; see job_records.lua for its answer."""
    return call("job_records", [record_key(job_id) for job_id in job_ids], [CALL_BYTES])


def parse_job_record(answer: Sequence[Any] | None) -> JobRecord | None:
    """Parses the answer of `job_record`."""
    if answer is None:
        return None
    found, consumer, deliveries, *left_ms = answer
    record, holder = parse_record(found), consumer.decode()
    return record and structs.replace(
        record,
        is_claimed=bool(holder),
        deliveries=deliveries,
        holder=holder,
        left_ms=left_ms[0] if left_ms else None,
    )


def queued_job(slot: str, priority: Priority, entry_id: bytes) -> tuple[Call, Call]:
    """Two calls: one reads a queue entry, the other its incidents."""
    stream = stream_key(slot, priority)
    return ["XRANGE", stream, entry_id, entry_id], ["SMEMBERS", crashes_key(slot, priority, entry_id)]


def parse_queued_job(
    slot: str, priority: Priority, entries: Sequence[Any], incidents: Iterable[bytes]
) -> Delivery | None:
    """Parses the answers of `queued_job`."""
    found = _deliveries(slot, priority, entries, b"")
    return _with_incidents(found[0], list(incidents)) if found else None


def dead_letter(
    consumer: str,
    delivery: Delivery,
    reason: str,
    job_id: str,
    sealed: bytes,
    result_ttl_ms: int,
    most_bytes: int = DEAD_LETTERS_BYTES,
) -> Call:
    """One call that moves an entry to the dead letters, and ends its job."""
    slot, priority, entry_id = delivery.slot, delivery.priority, delivery.entry_id
    keys = [flow_key(slot), stream_key(slot, priority), dead_key(slot), crashes_key(slot, priority, entry_id)]
    args: list[Any] = [GROUP, consumer, entry_id, int(priority), reason]
    args += (DEAD_LETTERS_CAP, most_bytes, delivery.accepted_ms)
    if job_id:
        keys.append(record_key(job_id))
        args += _ending(job_id, State.DEAD, sealed, result_ttl_ms)
    return call("dead_letter", keys, args)


def depths(slot: str) -> Call:
    """One call that measures the four queues of a slot."""
    return call("depths", stream_keys(slot), [GROUP])


def measured(slot: str, answer: Sequence[int]) -> list[Depth]:
    """Parses the answer of `depths`."""
    now = answer[0]
    found = []
    for priority in _PRIORITIES:
        jobs, running, oldest = answer[1 + priority * 3 : 4 + priority * 3]
        found.append(Depth(slot, priority, jobs, running, max(0, now - oldest) / 1000 if oldest else 0.0))
    return found


def read(cursors: Mapping[str, str], block_ms: int, count: int, timeout_s: float) -> Call:
    """XREAD of several streams. A `block_ms` of 0 means no wait; BLOCK 0 would wait for ever.

    It waits for at most half of `timeout_s`: a socket that is silent for all of it counts as broken.
    """
    wait = ["BLOCK", max(1, min(block_ms, int(timeout_s * 500)))] if block_ms > 0 else []
    return ["XREAD", "COUNT", count, *wait, "STREAMS", *cursors.keys(), *cursors.values()]


def trim(key: str, before: str) -> Call:
    """XTRIM up to and including the entry `before`."""
    milliseconds, _, sequence = before.partition("-")
    return ["XTRIM", key, "MINID", f"{milliseconds}-{int(sequence) + 1}"]


def nudge(key: str) -> tuple[Call, Call]:
    """Appends an empty entry, and lets the stream expire."""
    return ["XADD", key, "MAXLEN", "~", REPLY_CAP, "*", b"", b""], ["PEXPIRE", key, REPLY_TTL_MS]


def entries(answer: Sequence[Any] | None) -> list[StreamEntry]:
    """Parses the answer of XREAD."""
    return [
        StreamEntry(key.decode(), entry_id.decode(), fields)
        for key, found in answer or ()
        for entry_id, fields in found
    ]


def number(text: str | None) -> int:
    """A number that any program may have written; 0 for another text."""
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 18 else 0
