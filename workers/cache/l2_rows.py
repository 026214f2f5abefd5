"""An entry -> a row of the cache on disk -> the entry, if nobody has changed, cut or moved the row.

    EntryKey --> name, by which SQLite finds the row, and `bound`, to which the value is bound
    value --seal--> front: id of the key (4)  nonce (12)  stored (8)  expires (8)
                    data:  ciphertext  tag (16), bound to `bound` and the front

A value opens only in a row with its front, and for its key: swapped rows and prolonged lifetimes are found. Two keys
with one name have one row: each of them replaces the entry of the other one, and never opens it.
Without keys, values are stored plain behind a SHA-256 of the same things. It finds damage, but no intention.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.safety.cache_entry import KEY_BYTES, EntryKey

if TYPE_CHECKING:
    from penstock.safety.sealing import DataKeys, Decrypt

__all__ = [
    "FORMAT",
    "ID_BYTES",
    "PLAIN_ID",
    "Name",
    "Opened",
    "Rows",
    "group_number",
    "name_of",
    "rows_for",
    "times_of",
    "unpack_front",
]

FORMAT: Final = b"penstock l2 2"
"""Begins `bound`, and is not stored: no value of another store opens here."""
ID_BYTES: Final = 4
"""The length of the id of the key at the beginning of each front; see safety/sealing.py."""
PLAIN_ID: Final = bytes(ID_BYTES)
_NO_NONCE: Final = bytes(12)
_OWNER_BYTES: Final = 16
_CHECK_BYTES: Final = 16
times_of: Final = Struct("<qq").pack
"""The end of a front: when the entry was stored, and when it expires, in milliseconds since 1970."""
unpack_front: Final = Struct("<4s12sqq").unpack
"""The id of the key, the nonce and the two times."""
# A damaged file has rows of any type and length, and fronts with any id.
_CHANGED: Final = (struct.error, TypeError, KeyError, ValueError)
_first: Final = Struct("<q").unpack_from
_halves: Final = Struct("<qq").unpack


Name = tuple[int, bytes]
"""What stands for an EntryKey in the file: 64 bits of it, by which SQLite finds the row, and `bound`, which is FORMAT,
128 bits of its group and its tenant, and its digest."""


class Opened(NamedTuple):
    """A value with its times, in milliseconds since 1970."""

    value: bytes
    stored: int
    expires: int


@lru_cache(maxsize=1024)
def group_number(group: str) -> int:
    """The number that stands for a group in the file: 64 bits of its SHA-256."""
    number: int = _first(hashlib.sha256(group.encode()).digest())[0]
    return number


def name_of(key: EntryKey) -> Name:
    """The name of an entry in the file."""
    group, digest, tenant = key
    if len(digest) == KEY_BYTES:
        begin, number = _owner(group, tenant)
    else:
        # No digest of key_of: a text of the caller, for example.
        digest = hashlib.sha256(digest).digest()[:KEY_BYTES]
        begin, number = _owner(group, tenant, is_hashed=True)
    low, high = _halves(digest)
    return number ^ low ^ high, begin + digest


@lru_cache(maxsize=1024)
def _owner(group: str, tenant: str, is_hashed: bool = False) -> tuple[bytes, int]:
    """The beginning of `bound`, and the share of the number, that all entries of a group and tenant have."""
    digest = hashlib.sha256(EntryKey(group, b"hashed" if is_hashed else b"", tenant).bound).digest()
    return FORMAT + digest[:_OWNER_BYTES], _first(digest, _OWNER_BYTES)[0]


@dataclass(frozen=True, slots=True)
class Rows:
    """How values become the columns `front` and `data`, and back."""

    seal: Callable[[bytes, bytes, bytes], tuple[bytes, bytes]]
    """Value, bound and times -> front and data. times: see times_of."""
    decrypt_by_id: Mapping[bytes, Decrypt]
    """How data is opened, by the id at the beginning of the front: nonce, data, and bound + front -> value."""
    unopenable: tuple[type[Exception], ...]
    """What is raised when a row was changed, cut or moved, or when no key here sealed it."""
    ids: tuple[str, ...] = ()
    """The ids of the keys in hex, the sealing one first; empty without keys."""

    def open(self, front: Any, data: Any, bound: bytes) -> Opened | None:
        """The value of a row; None if the row was changed, cut or moved, or no key here sealed it."""
        try:
            key_id, nonce, stored, expires = unpack_front(front)
            return Opened(self.decrypt_by_id[key_id](nonce, data, bound + front), stored, expires)
        except self.unopenable:
            return None

    def is_ours(self, front: bytes) -> bool:
        """Whether a key that is here sealed the value, as its front says."""
        return front[:ID_BYTES] in self.decrypt_by_id

    def is_current(self, front: bytes) -> bool:
        """Whether the first key sealed the value, as its front says."""
        return front[:ID_BYTES] == next(iter(self.decrypt_by_id))


def rows_for(key: bytes | DataKeys | None) -> Rows:
    """How values are stored: sealed with the key or keys, or plain without.

    Raises ConfigurationError for a key of another length, and where the package that encrypts is missing.
    """
    if key is None:
        return Rows(_mark_plain, {PLAIN_ID: _check_plain}, _CHANGED)
    # Imported here: plain values need no library that encrypts. Where it is missing, this raises.
    from penstock.safety.sealing import DataKeys

    keys = DataKeys([key]) if isinstance(key, bytes) else key
    return Rows(keys.seal_apart, keys.decrypt_by_id, (*keys.damage, *_CHANGED), keys.ids)


def _mark_plain(value: bytes, bound: bytes, times: bytes) -> tuple[bytes, bytes]:
    front = PLAIN_ID + _NO_NONCE + times
    return front, _check(value, bound + front) + value


def _check_plain(nonce: bytes, data: bytes, bound: bytes) -> bytes:
    value = data[_CHECK_BYTES:]
    if nonce != _NO_NONCE or data[:_CHECK_BYTES] != _check(value, bound):
        raise ValueError("the row was changed")
    return value


def _check(value: bytes, bound: bytes) -> bytes:
    state = hashlib.sha256(bound)
    state.update(value)
    return state.digest()[:_CHECK_BYTES]
