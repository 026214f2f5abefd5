"""How this process sends webhooks: the secrets that sign them, and the limits of its requests, by the settings."""

from __future__ import annotations

from typing import Final

from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.registry.webhook_secrets import parse_secrets
from penstock.registry.webhooks.address import AddressRules
from penstock.registry.webhooks.request import Requests

__all__ = ["WEBHOOK_FILE", "keys_of", "requests_of", "secret_of"]

WEBHOOK_FILE: Final = "webhook-secret"
"""Under the home: the secret that signs webhooks."""


def secret_of(settings: Settings) -> str:
    """The secrets of the settings, else that of the home; empty when there is none. Raises ConfigurationError."""
    if settings.webhook_secrets is not None:
        return settings.webhook_secrets.get_secret_value()
    try:
        return (settings.home / WEBHOOK_FILE).read_text("ascii").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError):
        raise ConfigurationError(
            f"{WEBHOOK_FILE} in PENSTOCK_HOME cannot be read. Expected a file of this user, or PENSTOCK_WEBHOOK_SECRETS"
        ) from None


def keys_of(settings: Settings) -> tuple[bytes, ...]:
    """The keys that sign webhooks, at least one. Raises ConfigurationError."""
    keys = parse_secrets(secret_of(settings))
    if not keys:
        raise ConfigurationError(
            "No secret signs the webhooks. Expected PENSTOCK_WEBHOOK_SECRETS, or the secret that "
            "`penstock webhooks secret` makes for this home"
        )
    return keys


def requests_of(settings: Settings) -> Requests:
    """How receivers are called."""
    webhooks = settings.inference.webhooks
    return Requests(
        AddressRules(webhooks.allow), connect_timeout_s=webhooks.connect_timeout_s, timeout_s=webhooks.timeout_s
    )
