"""What the blocking and the asyncio client are made of before they connect: settings, keys, limits."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from producers.publish import Press
from registry import local_stack
from registry.errors import ConfigurationError
from registry.settings import Settings

__all__ = ["LONGEST_PAUSE_S", "client_settings", "new_client_id", "press_of", "settings_with_broker"]

LONGEST_PAUSE_S: Final = 1.0
"""A client that waits for room in a queue asks again after so long at the latest."""


def client_settings(
    settings: Settings | None, *, tenant: str | None, signing_keys: str | None, models_root: str | Path | None
) -> Settings:
    """The settings of a client: those given, else the environment's; what the caller named wins."""
    if (tenant, signing_keys, models_root) == (None, None, None):
        return settings or Settings.load()
    root = None if models_root is None else str(models_root)
    named = {"tenant_id": tenant, "signing_keys": signing_keys, "repo_root": root}
    return Settings.load(overrides=named)


def settings_with_broker(settings: Settings) -> Settings:
    """The settings with a broker in them: an explicit URL wins, else the embedded stack's with its keys.

    Raises ConfigurationError when there is neither.
    """
    if settings.redis_url is not None:
        return settings
    stack = local_stack.read(settings.home)
    if stack is None:
        raise ConfigurationError(
            "No broker. Expected its URL in PENSTOCK_REDIS_URL, or a stack that `penstock up` runs"
        )
    return Settings.load(overrides={"redis_url": stack.redis_url, "signing_keys": stack.signing_keys()})


def press_of(settings: Settings) -> Press:
    """What a client seals its jobs with."""
    max_bytes = settings.inference.max_request_size_mb * 1024 * 1024
    return Press(tenant=settings.tenant_id, keyring=settings.keyring, max_bytes=max_bytes)


def new_client_id() -> str:
    """Names the reply streams of one client in one process."""
    return secrets.token_hex(6)
