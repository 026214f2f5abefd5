"""The text of data keys, in PENSTOCK_L2_ENCRYPTION_KEY and in the key file: 32 bytes as 64 hex digits or as base64."""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from typing import Final

from penstock.registry.errors import ConfigurationError

__all__ = ["KEY_BYTES", "new_data_key", "parse_data_key", "parse_data_keys"]

KEY_BYTES: Final = 32
_HEX: Final = re.compile(r"[0-9a-fA-F]{64}")


def parse_data_keys(text: str) -> tuple[bytes, ...]:
    """The keys of `key[,key]`, the sealing one first; empty text: no keys. Raises ConfigurationError, without a key."""
    items = filter(None, map(str.strip, text.split(",")))
    return tuple(parse_data_key(item, f"Data key {place}") for place, item in enumerate(items, 1))


def parse_data_key(text: str, name: str) -> bytes:
    """The key in one piece of text. name: the key in the error. Raises ConfigurationError, without the key."""
    if _HEX.fullmatch(text):
        return bytes.fromhex(text)
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):  # letters outside of ASCII are a ValueError
        found = "is neither hex nor base64"
    else:
        found = f"has {len(key)} bytes as base64"
        if len(key) == KEY_BYTES:
            return key
    raise ConfigurationError(
        f"{name} {found}. Expected {KEY_BYTES} random bytes as {2 * KEY_BYTES} hex digits or as base64; "
        "`penstock keys generate` makes such a key"
    )


def new_data_key() -> str:
    """A random key as hex digits."""
    return secrets.token_hex(KEY_BYTES)
