"""API keys as text and as records."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.registry.api_keys import KeyLimits, digest_of, new_api_key, new_secret, parse_api_key
from penstock.registry.errors import InvalidInput


def test_a_text_has_its_id_and_256_bits():
    """Two texts of one id differ, and neither is in the record."""
    made = new_api_key("one", now=0)
    again, digest = new_secret(made.key.id)
    assert parse_api_key(made.text) == parse_api_key(again) == made.key.id
    assert len(made.text.rpartition(made.key.id)[2]) - 1 == 43
    assert (digest_of(made.text), digest_of(again)) == (made.key.digest, digest)
    assert made.text != again


@pytest.mark.parametrize("text", ["", "pk_", "pk_00_x", "sk_000000000000_" + "x" * 43, "pk_000000000000_" + "x" * 44])
def test_another_text_has_no_id(text: str):
    """A key of another system, and a text that was cut."""
    assert parse_api_key(text) is None


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"label": ""}, "The label is"),
        ({"label": "a\nb"}, "Expected 1 to 100 printable characters"),
        ({"label": "x" * 101}, "Expected 1 to 100 printable characters"),
        ({"role": "owner"}, "The role is 'owner'. Expected one of: admin, user, readonly"),
        ({"tenant": "Not A Tenant"}, "Bad tenant name"),
        ({"models": ("ok", "not ok")}, "Bad model name"),
        ({"expires_at": 100}, "Expected a time in the future"),
        ({"limits": KeyLimits(requests_per_day=-1)}, "A limit is negative"),
    ],
)
def test_bad_facts_are_refused(facts: dict[str, Any], message: str):
    """One line that says what was expected."""
    with pytest.raises(InvalidInput, match=message):
        new_api_key(**{"label": "ok", "now": 100, **facts})
