"""What the blocking and the asyncio client are made of before they connect: settings, keys, limits."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from penstock.registry.settings import Settings

__all__ = ["LONGEST_PAUSE_S", "client_settings", "new_client_id"]

LONGEST_PAUSE_S: Final = 1.0
"""A client that waits for room in a queue asks again after so long at the latest."""


def client_settings(
    settings: Settings | None, *, tenant: str | None, signing_keys: str | None, models_root: str | Path | None
) -> Settings:
    """The settings of a client: those given, else the environment's; what the caller named wins."""
    root = None if models_root is None else Path(models_root)
    named = {"tenant_id": tenant, "signing_keys": signing_keys, "repo_root": root}
    if settings is None:
        return Settings.load(overrides=named)
    return settings.changed({key: value for key, value in named.items() if value is not None})


def new_client_id() -> str:
    """Names the reply streams of one client in one process."""
    return secrets.token_hex(6)
