"""Sealed results that differ in nothing but their id, their timings and their outputs: the rest is encoded once.

ResultHeader of one job --> ResultTemplate -- id, timings, body --> the bytes that envelope.seal would make

Sealed bodies differ in their nonces.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from penstock.registry.envelope import (
    FIXED_BYTES,
    ID_AT,
    BodyKeys,
    Keyring,
    Mac,
    ResultHeader,
    Timings,
    encode_header,
    envelope_prefix,
)

__all__ = ["ResultTemplate"]

_TIMINGS: Final = Struct(">BdBdBd").pack
_FLOAT: Final = 0xCB
"""The type of a msgpack number of 64 bits."""
_BEFORE_TIMINGS: Final = b"\xa7timings\x93"


class ResultTemplate:
    """The envelopes of results like the one with this header, for ids of the same length. Made by `of`."""

    __slots__ = ("_behind", "_between", "_body_keys", "_front", "_id_bytes", "_mac")

    def __init__(
        self, front: bytes, between: bytes, behind: bytes, id_bytes: int, mac: Mac | None, body_keys: BodyKeys | None
    ) -> None:
        self._front = front
        self._between = between
        self._behind = behind
        self._id_bytes = id_bytes
        self._mac = mac
        self._body_keys = body_keys

    @classmethod
    def of(cls, header: ResultHeader, keyring: Keyring) -> ResultTemplate | None:
        """From the header of one of these results; None: its encoding does not show where the id and the timings are.

        Raises KeyError for an unknown key; see envelope.seal.
        """
        encoded = encode_header(header)
        job_id, timings = header.id.encode(), _BEFORE_TIMINGS + _packed(header.timings)
        id_at = ID_AT - FIXED_BYTES
        behind_id = id_at + len(job_id)
        if encoded[id_at:behind_id] != job_id or encoded.count(timings) != 1:
            return None
        timings_at = encoded.index(timings) + len(_BEFORE_TIMINGS)
        if timings_at < behind_id:
            return None
        front = envelope_prefix("result", encoded) + encoded[:id_at]
        behind = encoded[timings_at + len(timings) - len(_BEFORE_TIMINGS) :]
        mac = keyring.result_macs[header.key] if header.key else None
        body_keys = keyring.body_keys if header.is_sealed else None
        return cls(front, encoded[behind_id:timings_at], behind, len(job_id), mac, body_keys)

    def seal(
        self, job_id: str, queue_ms: float, batch_ms: float, compute_ms: float, body: bytes | memoryview
    ) -> bytes | None:
        """The envelope of the result of this job; None: its id has another length. For the times see Timings."""
        local = job_id.encode()
        if len(local) != self._id_bytes:
            return None
        timings = _TIMINGS(_FLOAT, queue_ms, _FLOAT, batch_ms, _FLOAT, compute_ms)
        front = b"".join((self._front, local, self._between, timings, self._behind))
        if self._body_keys is not None:
            body = self._body_keys.seal(body, front)
        if self._mac is None:
            return b"".join((front, body))
        return b"".join((front, body, self._mac.digest(front, body)))


def _packed(timings: Timings) -> bytes:
    return _TIMINGS(_FLOAT, timings.queue_ms, _FLOAT, timings.batch_ms, _FLOAT, timings.compute_ms)
