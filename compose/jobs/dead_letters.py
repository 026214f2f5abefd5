"""Dead letters for operators: describe a letter, decide whether it can be replayed, replay it.

    broker (letters) --> describe: header, signature, age           --> data for tables and JSON
                     --> replay: verified by the rules of a worker  --> broker, one step per letter

The bytes of a letter are untrusted. They are decoded with the size limits of the envelope, and bytes that cannot be
decoded are described by their fault. Texts that a worker or a client wrote are redacted before they are shown; ids, on
which a command acts, are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from penstock.registry.broker.base import Broker, DeadLetter, Publication, Replay
from penstock.registry.envelope import JobHeader, Keyring, open_job, peek_job, verify_job
from penstock.registry.errors import BadSeal, BadSignature, Corrupt, InvalidInput, UndecodableEnvelope
from penstock.registry.queues import is_job_id, is_reply_key, parse_name, parse_priority
from penstock.registry.webhook_target import sealed_target
from penstock.safety.privacy import InputRedactor

__all__ = [
    "Replayed",
    "ReplayCheck",
    "check_replay",
    "describe",
    "find",
    "letters",
    "parse_age_ms",
    "replay",
    "summary",
    "utc_time",
]

_PAGE: Final = 200
_ENTRY: Final = re.compile(r"\d{1,20}-\d{1,20}")
_AGE: Final = re.compile(r"(\d+)([smhd])")
_UNIT_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_FIXED: Final = 8
"""Bytes before the header of an envelope; see registry/envelope.py."""


class ReplayCheck(NamedTuple):
    """Whether a worker would run the bytes of a letter: the header of the job, or None and the problem."""

    job: JobHeader | None
    problem: str = ""


class Replayed(NamedTuple):
    """The outcome of one replay; `reason` is set when the letter stays."""

    entry: str
    job_id: str
    is_replayed: bool
    reason: str = ""


def letters(broker: Broker, slot: str) -> Iterator[DeadLetter]:
    """All dead letters of a model, oldest first, without their bytes."""
    after = ""
    while page := broker.dead_letters(slot, after, _PAGE):
        yield from page
        after = page[-1].entry


def find(broker: Broker, slot: str, entry: str) -> DeadLetter:
    """One letter with its bytes. Raises InvalidInput for an unknown entry."""
    letter = broker.read_dead_letter(slot, entry) if _ENTRY.fullmatch(entry) else None
    if letter is None:
        raise InvalidInput(
            f"No dead letter {entry!r:.60} of model {slot}. Expected an entry that `penstock dead list {slot}` shows"
        )
    return letter


def parse_age_ms(text: str) -> int:
    """An age such as 7d, 12h, 30m or 45s, in ms. Raises InvalidInput."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise InvalidInput(f"Bad age {text!r:.40}. Expected a number and s, m, h or d, such as 7d")
    return int(match[1]) * _UNIT_MS[match[2]]


def check_replay(letter: DeadLetter, keyring: Keyring, now_ms: float) -> ReplayCheck:
    """Whether the bytes of a letter are a job that a worker would run now, by the same rules."""
    try:
        header, _ = open_job(letter.sealed, keyring)
        _check_queue(header, letter)
    except Corrupt as error:
        return ReplayCheck(None, f"its bytes are no valid job: {error}")
    if header.deadline_ms and now_ms > letter.accepted_ms + header.deadline_ms:
        return ReplayCheck(None, f"its deadline has passed: {utc_time(letter.accepted_ms + header.deadline_ms)}")
    return ReplayCheck(header)


def _check_queue(header: JobHeader, letter: DeadLetter) -> None:
    slot = letter.slot
    try:
        parse_priority(header.priority)
        parse_name("tenant", header.tenant)
    except InvalidInput as error:
        raise UndecodableEnvelope(str(error)) from None
    is_same_job = header.model == slot and is_job_id(header.id, slot) and letter.job_id in ("", header.id)
    # Line breaks separate the fields of a record.
    is_one_line = "\n" not in header.reply + header.idempotency_digest + header.options.webhook
    if not is_same_job or not is_one_line or (header.reply and not is_reply_key(header.reply, slot)):
        raise BadSignature("the envelope was made for another queue")


def describe(letter: DeadLetter, keyring: Keyring, now_ms: float, redactor: InputRedactor) -> dict[str, Any]:
    """A letter with its bytes, ready for JSON. Never raises because of the bytes."""
    checked = check_replay(letter, keyring, now_ms)
    header = checked.job or peek_job(letter.sealed)
    return {
        **summary(letter, redactor),
        "protocol": _protocol(letter.sealed),
        "header": None if header is None else _header_data(header, redactor),
        "signature": redactor.redact(_signature(letter.sealed, header, keyring)),
        "body": redactor.redact(_sealing(letter.sealed, keyring)),
        "replay": "possible" if checked.job else redactor.redact(f"refused: {checked.problem}"),
    }


def summary(letter: DeadLetter, redactor: InputRedactor) -> dict[str, Any]:
    """A letter without its bytes, ready for JSON."""
    return {
        "model": letter.slot,
        "entry": letter.entry,
        "reason": redactor.redact(letter.reason),
        "job_id": letter.job_id,
        "tenant": letter.tenant,
        "priority": letter.priority.label,
        "accepted_ms": letter.accepted_ms,
        "dead_lettered_ms": letter.dead_lettered_ms,
        "deliveries": letter.deliveries,
        "crashes": letter.crashes,
        "size": letter.size,
    }


def utc_time(at_ms: int) -> str:
    """A time as text, in UTC; `?` for 0 and for times out of range."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ") if at_ms else "?"
    except (OverflowError, ValueError, OSError):
        return "?"


def _protocol(sealed: bytes) -> int | None:
    return sealed[2] if sealed[:2] == b"PS" and len(sealed) >= _FIXED else None


def _signature(sealed: bytes, header: JobHeader | None, keyring: Keyring) -> str:
    if header is None:
        return "unknown: the header cannot be read"
    if not header.key and not keyring.signs:
        return "none: the job is unsigned, and this command has no signing keys"
    try:
        verify_job(sealed, keyring)
    except Corrupt as error:
        return f"refused: {error}"
    return f"valid: key {header.key}"


def _sealing(sealed: bytes, keyring: Keyring) -> str:
    """Whether the inputs are encrypted, and whether the keys here open them. They are not shown."""
    header = peek_job(sealed)
    if header is None:
        return "unknown: the header cannot be read"
    try:
        open_job(sealed, keyring)
    except BadSeal as error:
        return f"{'sealed' if header.is_sealed else 'plain'}, refused: {error}"
    except Corrupt:
        return "sealed, not checked" if header.is_sealed else "plain"
    return "sealed: the data keys here open them" if header.is_sealed else "plain"


def _header_data(header: JobHeader, redactor: InputRedactor) -> dict[str, Any]:
    # The header of a refused letter may hold any text in any field.
    texts = {
        "tenant": header.tenant,
        "model": header.model,
        "version": header.version,
        "priority": header.priority,
        "key": header.key,
        "inputs": {tensor.name: f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in header.content},
    }
    return {"id": header.id, "deadline_ms": header.deadline_ms, **redactor.redact_all(texts)}


_REFUSALS: Final = {
    Replay.MISSING: "the letter was replayed or deleted meanwhile",
    Replay.LIVE: "its job is already in the queue",
    Replay.SETTLED: "its job has another result now",
    Replay.SUPERSEDED: "its idempotency key belongs to another job now",
}


def replay(broker: Broker, letter: DeadLetter, keyring: Keyring, *, job_ttl_ms: int, now_ms: float) -> Replayed:
    """Replay a letter under the id of its job, unless a worker could not run it.

    The lifetime of the job starts again; its deadline does not.
    """
    checked = check_replay(letter, keyring, now_ms)
    if (job := checked.job) is None:
        return Replayed(letter.entry, letter.job_id, False, checked.problem)
    publication = Publication(
        job.id,
        parse_priority(job.priority),
        b"",
        job.tenant,
        job.reply,
        job.idempotency_digest,
        deadline_ms=job.deadline_ms,
        webhook=sealed_target(job.options.webhook, job.id, keyring),
    )
    outcome = broker.replay(letter.slot, letter.entry, publication, job_ttl_ms, keeps_acceptance=bool(job.deadline_ms))
    return Replayed(letter.entry, job.id, outcome is Replay.REPLAYED, _REFUSALS.get(outcome, ""))
