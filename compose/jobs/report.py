"""One job -> what the broker has stored about it, as plain data and as lines for a person.

    has not ended: record, queue entry, incidents          has ended: sealed result
    dead: sealed result and dead letter                    record gone: the dead letter, or an error

A field that nothing stores is left out. Times are Unix times in ms; see `_ended` for those that are reckoned.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from penstock.compose.jobs.dead_letters import letters
from penstock.compose.terminal import printable
from penstock.producers.job_state import END_NAMES
from penstock.registry.broker.base import Broker, DeadLetter, JobRecord, State
from penstock.registry.envelope import Failure, JobHeader, Keyring, verify_job, verify_result
from penstock.registry.errors import BadSignature, Corrupt, ResultGone, UnknownJob
from penstock.registry.queues import is_derived, job_time_ms, slot_of
from penstock.safety.privacy import InputRedactor

__all__ = ["describe", "lines"]

_LABELS: Final = {
    "job_id": "job",
    "submitted_ms": "submitted",
    "started_ms": "started",
    "ended_ms": "ended",
    "deadline_ms": "must start by",
    "attempt": "deliveries",
    "queue_ms": "in the queue",
    "batch_ms": "batch wait",
    "compute_ms": "forward",
    "batch_size": "rows in batch",
    "level": "answered by level",
    "dead_letter": "dead letter",
}
_TIMES: Final = frozenset({"submitted_ms", "started_ms", "ended_ms", "deadline_ms"})


def describe(
    broker: Broker, job_id: str, keyring: Keyring, result_ttl_s: float, redactor: InputRedactor
) -> dict[str, Any]:
    """What is stored about a job, of any tenant, ready for JSON. The error is redacted.

    Raises InvalidInput for a malformed id, UnknownJob, ResultGone, Corrupt for a result that cannot be verified.
    """
    facts = _stored(broker, job_id, keyring, result_ttl_s)
    return {**facts, "error": redactor.redact_all(facts["error"])} if "error" in facts else facts


def _stored(broker: Broker, job_id: str, keyring: Keyring, result_ttl_s: float) -> dict[str, Any]:
    slot = slot_of(job_id)
    facts: dict[str, Any] = {"job_id": job_id, "model": slot}
    record = broker.job_record(job_id)
    if record is not None and record.state is State.QUEUED:
        entry = broker.queued_job(job_id)
        if entry is not None:
            header = _verified(entry.sealed, keyring)
            return {**facts, **_live(record), **_submission(header, entry.accepted_ms), "crashes": entry.crashes}
        # It has ended in this moment.
        record = broker.job_record(job_id)
    letter = _letter_of(broker, slot, job_id) if record is None or record.state is State.DEAD else None
    if record is not None:
        ended = _live(record) if record.state is State.QUEUED else _ended(job_id, record, keyring)
        return {**facts, **ended, **(_dead(broker, letter, keyring) if letter is not None else {})}
    if letter is None:
        raise _missing(job_id, result_ttl_s)
    error = {"code": "DeadLettered", "message": letter.reason}
    return {**facts, "state": "dead", "tenant": letter.tenant, "error": error, **_dead(broker, letter, keyring)}


def _live(record: JobRecord) -> dict[str, Any]:
    facts: dict[str, Any] = {"state": "running" if record.is_claimed else "queued", "tenant": record.tenant}
    # A consumer is `<worker>:<boot>`; a job that is handed over to a version has another holder.
    if worker := record.holder.rpartition(":")[0]:
        facts["worker"] = worker
    if record.cancel_requested:
        facts["cancel_requested"] = True
    return {**facts, "attempt": record.deliveries}


def _submission(header: JobHeader | None, accepted_ms: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"submitted_ms": accepted_ms}
    if header is None:
        return facts
    facts["priority"] = header.priority
    if header.version:
        facts["version"] = header.version
    if header.deadline_ms:
        facts["deadline_ms"] = accepted_ms + header.deadline_ms
    if header.options.retry is not None:
        facts["tries_allowed"] = header.options.retry.attempts
    return facts


def _ended(job_id: str, record: JobRecord, keyring: Keyring) -> dict[str, Any]:
    """From the header of a result. It has durations only, and no priority and no deadline. No data key is needed.

    The time of submission is in the id, by the client's clock; the times of the forward are reckoned from there. The
    ids of a batch do not tell it.
    """
    header = verify_result(record.result, keyring)
    if header.id != job_id:
        raise BadSignature("the result belongs to another job")
    timings = header.timings
    facts: dict[str, Any] = {"state": END_NAMES[record.state], "tenant": header.context.tenant}
    named = {
        "version": header.version,
        "content_hash": header.content_hash,
        "worker": header.worker,
        "level": header.level,
    }
    facts.update({name: value for name, value in named.items() if value})
    facts.update(attempt=header.attempt, is_cached=header.is_cached, queue_ms=round(timings.queue_ms, 3))
    submitted_ms = None if is_derived(header.id) else job_time_ms(header.id)
    if submitted_ms is not None:
        facts["submitted_ms"] = submitted_ms
    if header.batch_size:
        durations = {"batch_ms": round(timings.batch_ms, 3), "compute_ms": round(timings.compute_ms, 3)}
        facts.update(batch_size=header.batch_size, **durations)
        if submitted_ms is not None:
            facts["started_ms"] = started_ms = round(submitted_ms + timings.queue_ms + timings.batch_ms)
            facts["ended_ms"] = round(started_ms + timings.compute_ms)
    return facts if header.error is None else {**facts, "error": _error(header.error)}


def _error(failure: Failure) -> dict[str, str]:
    facts = {"code": failure.code, "message": failure.message, "where": failure.where, "traceback": failure.traceback}
    return {name: value for name, value in facts.items() if value}


def _dead(broker: Broker, letter: DeadLetter, keyring: Keyring) -> dict[str, Any]:
    whole = broker.read_dead_letter(letter.slot, letter.entry)
    return {
        "priority": letter.priority.label,
        **_submission(_verified(whole.sealed, keyring) if whole else None, letter.accepted_ms),
        "ended_ms": letter.dead_lettered_ms,
        "attempt": letter.deliveries,
        "crashes": letter.crashes,
        "dead_letter": letter.entry,
    }


def _letter_of(broker: Broker, slot: str, job_id: str) -> DeadLetter | None:
    """The latest dead letter of the job: it may have been replayed and given up once more."""
    return max(
        (letter for letter in letters(broker, slot) if letter.job_id == job_id),
        key=lambda letter: letter.dead_lettered_ms,
        default=None,
    )


def _verified(sealed: bytes, keyring: Keyring) -> JobHeader | None:
    """The header of a job; None for bytes that this shell cannot verify."""
    try:
        return verify_job(sealed, keyring)
    except Corrupt:
        return None


def _missing(job_id: str, result_ttl_s: float) -> UnknownJob | ResultGone:
    made_ms = job_time_ms(job_id)
    if made_ms is not None and made_ms < (time.time() - result_ttl_s) * 1000:
        return ResultGone(
            f"The record of job {job_id} is gone: the job ended longer ago than records are kept ({result_ttl_s:g} s), "
            "or the broker lost it"
        )
    return UnknownJob(f"Unknown job {job_id!r:.120}. Expected the id of a job that this broker accepted")


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The same for a person, a line for each field; a stored traceback comes last."""
    order = [*("job_id", "state", "model", "version", "tenant", "priority", "worker"), *sorted(_TIMES, key=_by_time)]
    for name in [*order, *(name for name in facts if name not in order)]:
        if name in facts and name not in ("error", "is_cached"):
            yield _line(_LABELS.get(name, name.replace("_", " ")), _shown(name, facts[name]))
    if facts.get("is_cached"):
        yield _line("answer", "from the response cache or of an equal job")
    error = facts.get("error", {})
    if error:
        yield _line("error", f"{error['code']}: {error['message']}")
    if "where" in error:
        yield _line("at", error["where"])
    yield from (f"    {printable(line)}" for line in error.get("traceback", "").splitlines())


def _by_time(name: str) -> int:
    return ("submitted_ms", "deadline_ms", "started_ms", "ended_ms").index(name)


def _line(label: str, value: str) -> str:
    return f"{label:<14} {printable(value)}"


def _shown(name: str, value: Any) -> str:
    if name in _TIMES:
        return _time(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,} ms" if name.endswith("_ms") else str(value)


def _time(at_ms: int) -> str:
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds")[:-6] + "Z"
    except (OverflowError, ValueError, OSError):
        return "?"
