"""Keyrings that seal bodies. Equal bodies in equal envelopes are sealed alike, so that tests can compare bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from penstock.registry.envelope import Keyring
from penstock.safety.sealing import DataKeys

__all__ = ["DATA_KEY", "DATA_KEY_TEXT", "OTHER_DATA_KEY", "SteadyKeys", "sealing"]

DATA_KEY: Final = b"d" * 32
DATA_KEY_TEXT: Final = DATA_KEY.hex()
OTHER_DATA_KEY: Final = b"o" * 32


class SteadyKeys(DataKeys):
    """Data keys whose nonces follow from the body and what it is bound to. For tests only."""

    __slots__ = ("_cipher",)

    def __init__(self, keys: Sequence[bytes]) -> None:
        super().__init__(keys)
        self._cipher = AESGCM(keys[0])

    def seal(self, plain: bytes | memoryview, bound: bytes) -> bytes:
        nonce = hashlib.sha256(bound + b"\0" + bytes(plain)).digest()[:12]
        return bytes.fromhex(self.ids[0]) + nonce + self._cipher.encrypt(nonce, bytes(plain), bound)


def sealing(keyring: Keyring, key: bytes = DATA_KEY) -> Keyring:
    """This keyring with a data key, which seals and refuses plain bodies."""
    return replace(keyring, body_keys=SteadyKeys((key,)), seals=True)
