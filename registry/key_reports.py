"""Signing keys that differ between a client and its workers, found before a job is sent. Names only, never keys.

    worker   Keyring.names -> KeyReport --> broker, beside the model's spec
    client   one read of both           --> check_keys(own, reports) -> Unauthorized
    doctor   the workers' reports       --> difference(own, report)

The reports are hints, and not signed: they refuse a job early whose worker would refuse it. Signatures decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from penstock.registry.envelope import KeyName, Keyring
from penstock.registry.errors import Unauthorized, shown

__all__ = ["KeyReport", "check_keys", "difference", "key_report"]


class KeyReport(NamedTuple):
    """The names of one worker's keys. The first one signs its results; without names it signs nothing."""

    worker: str
    keys: tuple[KeyName, ...]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(KeyReport).decode


def key_report(worker: str, keyring: Keyring) -> bytes:
    """What a worker publishes about its keys."""
    return _encode(KeyReport(worker, keyring.names))


def check_keys(own: Keyring, reports: Sequence[bytes]) -> None:
    """Raises Unauthorized when no live worker would accept a job of this process, or none's results could be read.

    Without a report nothing is known, and nothing is refused.
    """
    problems = []
    for report in _readable(reports):
        problem = difference(own, report)
        if not problem:
            return
        problems.append(problem)
    if problems:
        others = f" (and {len(problems) - 1} other workers, too)" if len(problems) > 1 else ""
        raise Unauthorized(f"{problems[0]}{others}")


def difference(own: Keyring, report: KeyReport) -> str:
    """Why jobs between this process and a worker fail, and which side to change; empty: they do not fail."""
    worker, theirs, mine = shown(report.worker), report.keys, own.names
    both = f"This process and worker {worker} have different PENSTOCK_SIGNING_KEYS"
    # What signs here is verified there, and the other way round.
    if set(mine[:1]) <= set(theirs) and set(theirs[:1]) <= set(mine) and bool(mine) == bool(theirs):
        return ""
    if not mine:
        return (
            f"{both}: none here, {_listed(theirs)} there. Expected the worker's keys in this process; "
            "Client.from_env() has those of the stack that `penstock up` runs"
        )
    if not theirs:
        return f"{both}: {_listed(mine)} here, none there. Expected them on the worker, too, or none here"
    if other := next((name for name in theirs for key in mine if name.id == key.id and name != key), None):
        (key,) = (key for key in mine if key.id == other.id)
        return (
            f"{both}: {shown(key.id)!r} is another key here (fingerprint {key.fingerprint}) than there "
            f"({shown(other.fingerprint)}). Expected one key for one id"
        )
    if mine[0] not in theirs:
        return (
            f"{both}: the worker lacks {shown(mine[0].id)!r}, which signs here; it has {_listed(theirs)}. Expected "
            f"{shown(mine[0].id)!r} on the worker, too, or a key of the worker first here"
        )
    return (
        f"{both}: this process lacks {shown(theirs[0].id)!r}, which signs there; it has {_listed(mine)}. Expected "
        f"{shown(theirs[0].id)!r} here, too"
    )


def _readable(reports: Iterable[bytes]) -> Iterable[KeyReport]:
    for report in reports:
        try:
            yield _decode(report)
        except msgspec.MsgspecError:
            # Written by another version, or by a process that is none of ours.
            continue


def _listed(keys: Sequence[KeyName]) -> str:
    return ", ".join(repr(shown(key.id)) for key in keys[:8])
