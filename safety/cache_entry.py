"""Cached answers: their keys, and their form in the tiers that outlive a process.

    key_of       what is asked, the inputs as received  --> 16 bytes
    EntryKey     the key, the tenant, and the content of the version --> the name of an entry in a tier
    stored_name  that name as a key of the Redis of the shared tier
    pack         CacheEntry --> bytes --> unpack
    seal_entry   bytes --> what the shared tier stores, sealed or marked as plain --> open_entry

A key covers all that decides an answer, as one injective encoding: tenant, model, version, names, dtypes and shapes of
the inputs, the requested outputs, and the bytes of the inputs. Redaction changes no key: two inputs that differ in a
redacted part only have different keys.
"""

from __future__ import annotations

import hashlib
import re
import struct
from binascii import hexlify
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote

import msgspec

from penstock.registry.envelope import JobHeader
from penstock.registry.errors import UndecodableEnvelope
from penstock.registry.tensors import Tensor

if TYPE_CHECKING:
    from hashlib import _Hash

    # The clients import this module, and need no cryptography unless they have a key.
    from penstock.safety.sealing import DataKeys

__all__ = [
    "EXACT",
    "KEY_BYTES",
    "CacheEntry",
    "EntryKey",
    "begin_key",
    "is_stored_name",
    "key_of",
    "open_entry",
    "pack",
    "seal_entry",
    "stored_name",
    "stored_names",
    "stored_pattern",
    "unpack",
]

KEY_BYTES: Final = 16
EXACT: Final = "exact"
"""The form of answers that are within `compilation.tolerance` of those of the model as it was built."""
_HEAD_BYTES: Final = 4
_FORMAT: Final = 1
_ENTRY: Final = "entry:"
"""Behind the prefix of every name. Without it, a prefix that begins another prefix would cover the names of both."""
_OWN_PART: Final = re.compile(rb"entry:[^:]*:[^:]*:[0-9a-f]*")
_GLOB: Final = re.compile(rb"[\\*?\[\]]")
_PLAIN: Final = b"\x00"
_SEALED: Final = b"\x01"
_END_BYTES: Final = 8
_VALUE_AT: Final = 1 + _END_BYTES
_unpack_head: Final = struct.Struct(">cQ").unpack_from


class EntryKey(NamedTuple):
    """The name of an entry in a tier.

    group: entries that become void together; the content hash of the version. digest: see key_of. tenant: the owner
    of the entry; empty if all tenants share it.
    """

    group: str
    digest: bytes
    tenant: str = ""

    @property
    def bound(self) -> bytes:
        """The whole name in one encoding, to which a sealed entry is bound."""
        return _encode((_FORMAT, self.group, self.digest, self.tenant))


class CacheEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The outputs of a model as they travel; see registry.tensors.encode."""

    content: tuple[Tensor, ...]
    body: bytes
    content_hash: str
    """SHA-256 of the files of the version that gave them."""
    form: str
    """The form of the model that gave them, such as EXACT: answers of another precision are other answers."""


class _Head(msgspec.Struct, frozen=True, array_like=True, gc=False):
    format: int
    content: tuple[Tensor, ...]
    content_hash: str
    form: str


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_head: Final = msgspec.msgpack.Decoder(_Head).decode


def begin_key(header: JobHeader, label: str, *, tenant: str) -> _Hash:
    """The state of a key before the inputs, which jobs with equal headers share.

    label: of the version. tenant: the owner of the answer; empty if all tenants share it.
    """
    # SHA-256, as in the signature: most processors have instructions for it, none has them for BLAKE2.
    return hashlib.sha256(_encode((tenant, header.model, label, header.content, header.options.outputs)))


def key_of(header: JobHeader, body: bytes | memoryview, label: str, *, tenant: str) -> bytes:
    """The key of an answer, KEY_BYTES long: equal for jobs with equal inputs and options for the version with this
    label. body: the encoded inputs of the job with this header. See begin_key.
    """
    state = begin_key(header, label, tenant=tenant)
    state.update(body)
    return state.digest()[:KEY_BYTES]


def pack(entry: CacheEntry) -> bytes:
    """An entry as bytes; see unpack."""
    head = _encode(_Head(_FORMAT, entry.content, entry.content_hash, entry.form))
    return b"".join((len(head).to_bytes(_HEAD_BYTES, "little"), head, entry.body))


def unpack(packed: bytes) -> CacheEntry:
    """The entry in these bytes. Raises UndecodableEnvelope for anything that `pack` did not make."""
    end = _HEAD_BYTES + int.from_bytes(packed[:_HEAD_BYTES], "little")
    try:
        head = _decode_head(packed[_HEAD_BYTES:end])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UndecodableEnvelope("the bytes are not a cached answer") from None
    if head.format != _FORMAT or end > len(packed):
        raise UndecodableEnvelope("the bytes are not a cached answer of this format")
    return CacheEntry(head.content, packed[end:], head.content_hash, head.form)


def stored_name(prefix: str, key: EntryKey) -> bytes:
    """The name of an entry in Redis: `<prefix>entry:<group>:<tenant>:<digest in hex>`. No two entries share one, also
    of two prefixes. Group and tenant are percent-encoded.

    >>> stored_name("penstock:cache:", EntryKey("5f1c", bytes.fromhex("a0b1"), "acme"))
    b'penstock:cache:entry:5f1c:acme:a0b1'
    """
    return _front(prefix, key.group, key.tenant) + hexlify(key.digest)


def stored_names(prefix: str, keys: Sequence[EntryKey]) -> list[bytes]:
    """The names of several entries in Redis; see stored_name."""
    if len({(key.group, key.tenant) for key in keys}) != 1:
        return [stored_name(prefix, key) for key in keys]
    # The keys of one look-up mostly have one group and one tenant.
    front = _front(prefix, keys[0].group, keys[0].tenant)
    return [front + hexlify(key.digest) for key in keys]


def stored_pattern(prefix: str, group: str | None = None) -> bytes:
    """The pattern of Redis for the names of a group, or of all entries. `is_stored_name` decides about each name."""
    front = f"{prefix}{_ENTRY}" if group is None else f"{prefix}{_ENTRY}{_escaped(group)}:"
    return _GLOB.sub(rb"\\\g<0>", _encoded(front)) + b"*"


def is_stored_name(prefix: str, name: bytes) -> bool:
    """Whether this is the name of an entry of the cache with this prefix, and not of one with a longer prefix."""
    front = _encoded(prefix)
    return name.startswith(front) and _OWN_PART.fullmatch(name, len(front)) is not None


@lru_cache(maxsize=1024)
def _front(prefix: str, group: str, tenant: str) -> bytes:
    return _encoded(f"{prefix}{_ENTRY}{_escaped(group)}:{_escaped(tenant)}:")


def _escaped(part: str) -> str:
    return quote(part, safe="", errors="surrogatepass")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def seal_entry(data_keys: DataKeys | None, key: EntryKey, value: bytes, expires_ms: int) -> bytes:
    """What the shared tier stores: the value, sealed and bound to its key and to its end. Without data keys: plain.

    expires_ms: Unix milliseconds of the server's clock, at least 0.
    """
    end = expires_ms.to_bytes(_END_BYTES, "big")
    if data_keys is None:
        return b"".join((_PLAIN, end, value))
    return b"".join((_SEALED, end, data_keys.seal(value, key.bound + end)))


def open_entry(data_keys: DataKeys | None, key: EntryKey, stored: bytes) -> tuple[bytes, int]:
    """The value and `expires_ms`. Raises UndecodableEnvelope, and Unopenable of safety/sealing.py.

    With data keys, plain values are refused, too: anyone who may write to that Redis could have put them there.
    """
    try:
        mark, expires_ms = _unpack_head(stored)
    except struct.error:
        raise UndecodableEnvelope("the entry is too short") from None
    if data_keys is None:
        if mark != _PLAIN:
            raise UndecodableEnvelope("the bytes are not a plain entry, and there are no data keys here")
        return stored[_VALUE_AT:], expires_ms
    if mark != _SEALED:
        raise UndecodableEnvelope("the entry is not sealed")
    return data_keys.open(stored[_VALUE_AT:], key.bound + stored[1:_VALUE_AT]), expires_ms
