"""The secrets that sign webhooks, as Standard Webhooks writes them: `whsec_<base64>[,whsec_<base64>]`. Each signs."""

from __future__ import annotations

import base64
import binascii
import secrets
from typing import Final

from penstock.registry.errors import ConfigurationError

__all__ = ["new_secret", "parse_secrets"]

_PREFIX: Final = "whsec_"
_SHORTEST: Final = 24
_LONGEST: Final = 64
"""Bytes of a key, as the standard says."""


def parse_secrets(text: str) -> tuple[bytes, ...]:
    """The keys of `whsec_<base64>[,whsec_<base64>]`. Raises ConfigurationError, without the secret."""
    keys = []
    for position, item in enumerate(filter(None, map(str.strip, text.split(","))), 1):
        try:
            key = base64.b64decode(item.removeprefix(_PREFIX), validate=True)
        except binascii.Error:
            key = b""
        if not item.startswith(_PREFIX) or not _SHORTEST <= len(key) <= _LONGEST:
            raise ConfigurationError(
                f"Webhook secret {position} is not usable. Expected whsec_ and {_SHORTEST} to {_LONGEST} bytes as "
                "base64; `penstock webhooks secret` makes one"
            )
        keys.append(key)
    return tuple(keys)


def new_secret() -> str:
    """A random secret."""
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()
