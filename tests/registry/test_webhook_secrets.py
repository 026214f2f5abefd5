"""Secrets of webhooks: their form, and that a message never has one."""

from __future__ import annotations

import base64

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.webhook_secrets import new_secret, parse_secrets


def _secret(size: int) -> str:
    return "whsec_" + base64.b64encode(bytes(size)).decode()


def test_made_secret_is_usable():
    """32 random bytes."""
    one, other = new_secret(), new_secret()
    assert one != other
    assert [len(key) for key in parse_secrets(f"{one},{other}")] == [32, 32]


def test_secrets_are_a_list():
    """Spaces and empty items are left out; none is no error."""
    assert parse_secrets("") == parse_secrets(" , ") == ()
    assert parse_secrets(f" {_secret(24)} ,{_secret(64)},") == (bytes(24), bytes(64))


@pytest.mark.parametrize("secret", [_secret(23), _secret(65), "whsec_", "whsec_%%%%", _secret(32)[6:], "secret"])
def test_unusable_secret_is_refused(secret: str):
    """With its place in the list, and without itself."""
    with pytest.raises(ConfigurationError, match=r"^Webhook secret 2 is not usable\. Expected whsec_") as refused:
        parse_secrets(f"{_secret(32)},{secret}")
    assert secret.removeprefix("whsec_")[:8] not in str(refused.value) or len(secret) < 8
