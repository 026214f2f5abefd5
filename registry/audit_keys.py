"""The keys of the audit log as text: `key[,key]`, each at least 32 bytes as hex or base64. The first one writes."""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from typing import Final

from penstock.registry.errors import ConfigurationError

__all__ = ["new_audit_key", "parse_audit_keys"]

_SHORTEST: Final = 32
_HEX: Final = re.compile(r"(?:[0-9a-fA-F]{2}){32,}")


def parse_audit_keys(text: str) -> tuple[bytes, ...]:
    """The keys of `key[,key]`, the writing one first; empty text: none. Raises ConfigurationError, without a key.

    Text of at least 64 hex digits is hex, all other text base64.
    """
    items = filter(None, map(str.strip, text.split(",")))
    return tuple(_parse(item, place) for place, item in enumerate(items, 1))


def new_audit_key() -> str:
    """A random key as hex digits."""
    return secrets.token_hex(_SHORTEST)


def _parse(item: str, place: int) -> bytes:
    if _HEX.fullmatch(item):
        return bytes.fromhex(item)
    try:
        key = base64.b64decode(item, validate=True)
    except (binascii.Error, ValueError):  # letters outside of ASCII are a ValueError
        key = b""
    if len(key) < _SHORTEST:
        raise ConfigurationError(
            f"Audit key {place} is not usable. Expected at least {_SHORTEST} random bytes as hex digits or as base64"
        )
    return key
