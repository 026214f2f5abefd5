"""The operator's Ed25519 key: the private half signs on the operator's machine, workers have the public half.

    OperatorKey.generate -> operator.pem (mode 0600) -> OperatorKey.load -> .sign        a Signer of registry/signed.py
                                     .public_text -> settings -> PublicKeys.parse -> .verify           its Verifier

The id of a key is the first 8 hex digits of the SHA-256 of its 32 public bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from penstock.registry.errors import ConfigurationError
from penstock.safety.private_file import read_private, write_new

__all__ = ["OperatorKey", "PublicKeys"]


class OperatorKey:
    """A private key. It leaves the object only into its file."""

    __slots__ = ("_private", "key_id", "public_text")

    def __init__(self, private: Ed25519PrivateKey) -> None:
        public = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self._private = private
        self.key_id = _key_id(public)
        self.public_text = f"{self.key_id}:{base64.b64encode(public).decode()}"
        """The public half, in the format of the setting operator_public_keys."""

    @classmethod
    def generate(cls, path: Path) -> OperatorKey:
        """Makes a key in a new file (mode 0600), in one atomic step.

        Raises ConfigurationError when the file exists or cannot be written.
        """
        key = cls(Ed25519PrivateKey.generate())
        try:
            write_new(path, key._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        except FileExistsError:
            raise ConfigurationError(
                f"{path.name} exists already. Expected a new file for the operator's key"
            ) from None
        except OSError as error:
            raise ConfigurationError(f"{path.name} cannot be written ({error.strerror})") from None
        return key

    @classmethod
    def load(cls, path: Path) -> OperatorKey:
        """The key in a file that only its owner can read. Raises ConfigurationError."""
        try:
            text = read_private(path, "The operator's key")
        except OSError as error:
            raise ConfigurationError(f"The operator's key {path.name} cannot be read ({error.strerror})") from None
        try:
            private = load_pem_private_key(text, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            private = None
        if not isinstance(private, Ed25519PrivateKey):
            raise ConfigurationError(f"{path.name} is not usable. Expected an unencrypted Ed25519 key as PKCS #8 PEM")
        return cls(private)

    def sign(self, message: bytes) -> tuple[str, bytes]:
        """(key id, signature of 64 bytes)."""
        return self.key_id, self._private.sign(message)


class PublicKeys:
    """The public keys of trusted operators, by key id."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._keys = {_key_id(key): Ed25519PublicKey.from_public_bytes(key) for key in keys}

    @classmethod
    def parse(cls, text: str) -> PublicKeys:
        """From `id:base64[,id:base64]`; empty text: no keys. Raises ConfigurationError."""
        return cls(_public_bytes(item.strip(), place) for place, item in enumerate(filter(None, text.split(",")), 1))

    def __len__(self) -> int:
        return len(self._keys)

    def verify(self, message: bytes, key_id: str, signature: bytes) -> bool:
        """Whether a key with this id is trusted and made the signature."""
        key = self._keys.get(key_id)
        if key is None:
            return False
        try:
            key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


def _key_id(public: bytes) -> str:
    return hashlib.sha256(public).hexdigest()[:8]


def _public_bytes(item: str, place: int) -> bytes:
    key_id, _, encoded = item.partition(":")
    try:
        public = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        public = b""
    if len(public) != 32 or key_id != _key_id(public):
        raise ConfigurationError(
            f"Operator's public key {place} is not usable. Expected id:base64 of 32 bytes, with the id of these bytes"
        )
    return public
