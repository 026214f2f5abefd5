"""AES-256-GCM: bytes that are stored or sent -> sealed bytes that only holders of a key read, and nobody can change.

    sealed bytes = id of the key (4)  nonce (12)  ciphertext  tag (16)

The bytes to which a value is bound are not stored: `open` succeeds only with the same ones. So a value that is moved
to another place, tenant or job does not open there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from penstock.registry.data_keys import KEY_BYTES
from penstock.registry.errors import ConfigurationError, MissingRequirement, PenstockError

__all__ = ["HEAD_BYTES", "KEY_BYTES", "SEAL_BYTES", "DataKeys", "Decrypt", "Unopenable"]

Decrypt = Callable[[bytes, bytes, bytes], bytes]
"""Nonce, ciphertext with its tag, and the bytes to which the value is bound -> the plain bytes."""

_ID_BYTES: Final = 4
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
HEAD_BYTES: Final = _ID_BYTES + _NONCE_BYTES
"""The id of the key and the nonce."""
SEAL_BYTES: Final = HEAD_BYTES + _TAG_BYTES
"""By how many bytes sealed bytes are longer."""


class Unopenable(PenstockError):
    """Sealed bytes were changed, cut or moved, or no key here sealed them."""


class DataKeys:
    """The keys of data at rest and of payloads: the first one seals, all open. For any thread.

    Each key has KEY_BYTES random bytes. One key should seal at most 2**32 values: nonces are random.
    Raises ConfigurationError without a key, for a key of another length, and for two keys with one id;
    MissingRequirement where the library cryptography is not installed.
    """

    __slots__ = ("_ciphers", "_seal_id", "_sealing", "damage", "decrypt_by_id", "ids")

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys:
            raise ConfigurationError(f"There is no key for data. Expected at least one key of {KEY_BYTES} bytes")
        for number, key in enumerate(keys, 1):
            if len(key) != KEY_BYTES:
                raise ConfigurationError(f"Data key {number} has {len(key)} bytes. Expected {KEY_BYTES}")
        try:
            # Here: a worker that encrypts nothing runs without the library.
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise MissingRequirement(
                "The library cryptography cannot be imported, and it encrypts data. Expected: pip install '.[cli]' in "
                "the checkout of Penstock"
            ) from None
        ciphers = {_id_of(key): AESGCM(key) for key in keys}
        if len(ciphers) < len(keys):
            raise ConfigurationError("Two data keys are equal or have the same id. Expected keys with distinct ids")
        self.damage: Final = (InvalidTag, ValueError)  # too few bytes are a ValueError
        """What a function of `decrypt_by_id` raises for bytes that were changed, cut or moved."""
        self.decrypt_by_id: Final[Mapping[bytes, Decrypt]] = {key_id: each.decrypt for key_id, each in ciphers.items()}
        """How each key opens values of `seal_apart`. For many values in a row: `open` costs a call more for each."""
        self._ciphers = ciphers
        self._seal_id, self._sealing = next(iter(ciphers.items()))
        self.ids: Final = tuple(each.hex() for each in ciphers)
        """The ids of the keys, 8 hex digits each, the sealing one first. They tell nothing about the keys."""

    def seal(self, plain: bytes | memoryview, bound: bytes) -> bytes:
        """`plain`, sealed by the first key and bound to `bound`. Longer by SEAL_BYTES."""
        nonce = os.urandom(_NONCE_BYTES)
        return b"".join((self._seal_id, nonce, self._sealing.encrypt(nonce, plain, bound)))

    def seal_apart(self, plain: bytes, bound: bytes, tail: bytes) -> tuple[bytes, bytes]:
        """`plain`, sealed by the first key, as a front and a ciphertext that are stored apart.

        The front is the id of the key, the nonce and `tail`. The ciphertext is bound to `bound` and the whole front.
        """
        nonce = os.urandom(_NONCE_BYTES)
        front = self._seal_id + nonce + tail
        return front, self._sealing.encrypt(nonce, plain, bound + front)

    def open(self, sealed: bytes | memoryview, bound: bytes) -> bytes:
        """The plain bytes. Raises Unopenable, also when `bound` is another one than at the sealing."""
        cipher = self._ciphers.get(bytes(sealed[:_ID_BYTES]))
        if cipher is None:
            raise Unopenable("The data is sealed with a key that is not here. Expected the key that sealed it")
        try:
            return cipher.decrypt(sealed[_ID_BYTES:HEAD_BYTES], sealed[HEAD_BYTES:], bound)
        except self.damage:
            raise Unopenable("The sealed data was changed, cut or moved") from None

    def is_current(self, sealed: bytes | memoryview) -> bool:
        """Whether the first key sealed these bytes. Others are sealed again when keys are rotated."""
        return bytes(sealed[:_ID_BYTES]) == self._seal_id


def _id_of(key: bytes) -> bytes:
    return hashlib.sha256(b"penstock data key v1" + key).digest()[:_ID_BYTES]
