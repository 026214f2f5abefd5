"""The token that readers of metrics present: a file of the setting `worker.metrics_bearer_file`."""

from __future__ import annotations

import hmac
from pathlib import Path

from penstock.registry.errors import ConfigurationError

__all__ = ["presents", "read_bearer"]


def read_bearer(bearer_file: Path | None) -> str:
    """The token in a file; empty without a file. Raises ConfigurationError for a file without one."""
    if bearer_file is None:
        return ""
    try:
        token = bearer_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        token = ""
    if not token:
        raise ConfigurationError(f"No token in {bearer_file.name}. Expected ASCII text in a file that can be read")
    return token


def presents(authorization: str, token: str) -> bool:
    """Whether the header Authorization has this token. None does where the token is empty."""
    return bool(token) and hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode())
