"""Redaction, its detectors, and the namespaces of tenants."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.admission import JobBuilder
from penstock.registry.envelope import JobHeader, Keyring
from penstock.registry.errors import ConfigurationError, InvalidInput
from penstock.registry.queues import new_job_id
from penstock.registry.settings import Settings
from penstock.registry.settings_sections import PrivacyConfig, PrivacyDetector
from penstock.registry.tensors import encode
from penstock.safety.cache_entry import key_of
from penstock.safety.privacy import DETECTORS, InputRedactor, TenantIsolation, redactor_of

SSN = r"\b\d{3}-\d{2}-\d{4}\b"
EMAIL = r"\b[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}\b"
CARD = r"\b\d{16}\b"
EVERY = InputRedactor(detectors=DETECTORS)
NAMES = "a.b_c-9"
Pair = namedtuple("Pair", "left right")


# Patterns


def test_sample_patterns_redact():
    """CF-035: the text of each match is replaced, the text around it stays."""
    redactor = InputRedactor([SSN, EMAIL, CARD])
    assert redactor.redact("SSN: 123-45-6789") == "SSN: [REDACTED]"
    assert (
        redactor.redact("write to a.b@example.org, card 4111111111111111!") == "write to [REDACTED], card [REDACTED]!"
    )
    assert InputRedactor([SSN], replacement=r"<\1>").redact("123-45-6789") == r"<\1>"


def test_nothing_to_redact_gives_the_same_text():
    """The text itself is returned, and without patterns it is not even looked at."""
    text = "nothing here"
    assert InputRedactor([SSN]).redact(text) is text
    assert not InputRedactor().is_active
    assert InputRedactor().redact_all(text) is text


def test_overlapping_matches_are_one():
    """A first replacement must not keep a later pattern from finding its text."""
    assert InputRedactor(["foo", "foobar", "bar!"]).redact("a foobar! b") == "a [REDACTED] b"
    assert InputRedactor(["a", "b"]).redact("ab") == "[REDACTED][REDACTED]"


def test_empty_matches_change_nothing():
    """A pattern that finds a place instead of a text finds nothing to remove."""
    assert InputRedactor([r"\b"]).redact("a b") == "a b"


@pytest.mark.parametrize("text", ["\ud800 x", "caf\udce9 x", "🦊x", "x\x00"])
def test_any_text_is_redacted(text: str):
    """Lone surrogates, letters beyond the basic plane and zeros stay as they are."""
    assert InputRedactor(["x"]).redact(text) == text.replace("x", "[REDACTED]")


def test_a_part_of_a_character_may_be_redacted():
    """`\\C` matches one byte: what is left of the character becomes a replacement character."""
    assert InputRedactor([r"^\C"]).redact("é!") == "[REDACTED]\ufffd!"


def test_unusable_pattern_and_detector_are_refused():
    """The error says which, and what is expected."""
    with pytest.raises(ConfigurationError, match="RE2 has no back-references"):
        InputRedactor(["ok", r"(a)\1"])
    with pytest.raises(ConfigurationError, match="Expected one of: payment_card, email, ssn"):
        InputRedactor(detectors=["iban"])


# Nested data


def test_nested_data_is_redacted():
    """CF-035: every text in mappings, keys included, sequences, sets, bytes and arrays; the kinds stay."""
    redactor = InputRedactor(["secret"], replacement="*")
    nested = {
        "a": ["secret 1", ("secret", 2, None, True, 1.5)],
        "secret": {"secret", "b"},
        b"k": [b"\xffsecret", bytearray(b"secret"), memoryview(b"secret")],
        "pair": Pair("secret", 1),
        3: frozenset({"secret"}),
    }
    assert redactor.redact_all(nested) == {
        "a": ["* 1", ("*", 2, None, True, 1.5)],
        "*": {"*", "b"},
        b"k": [b"\xff*", b"*", b"*"],
        "pair": Pair("*", 1),
        3: frozenset({"*"}),
    }
    assert type(redactor.redact_all(nested)["pair"]) is Pair


def test_keys_that_become_equal_keep_their_values():
    """Two redacted keys stay two entries."""
    redactor = InputRedactor(["[0-9]+"], replacement="*")
    assert redactor.redact_all({"1": "a", "2": "b", "3": "c"}) == {"*": "a", "* (2)": "b", "* (3)": "c"}


@pytest.mark.parametrize(
    "values",
    [
        np.array([["secret", "b"], ["c", "d"]], object),
        np.array([["secret", "b"], ["c", "d"]]),
        np.array([[b"secret", b"b"], [b"c", b"d"]]),
    ],
    ids=["object", "str", "bytes"],
)
def test_arrays_of_text_are_redacted(values: np.ndarray):
    """Also where the replacement is longer than the width of the dtype; the shape and the original stay."""
    redactor = InputRedactor(["secret"])
    redacted = redactor.redact_all(values)
    found = [text.decode() if isinstance(text, bytes) else text for text in redacted.ravel().tolist()]
    assert (found, redacted.shape) == (["[REDACTED]", "b", "c", "d"], (2, 2))
    assert redactor.changes(values)
    assert not redactor.changes(redacted)


def test_numbers_are_no_text():
    """An array of numbers is the same object afterwards."""
    numbers = np.arange(4)
    assert InputRedactor(["[0-9]"]).redact_all(numbers) is numbers
    assert not InputRedactor(["[0-9]"]).changes([numbers, 4, 4.5, None])


NESTED = st.recursive(
    st.one_of(st.text("a1 ", max_size=6), st.binary(max_size=4), st.integers(), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text("a1", max_size=3), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(NESTED)
def test_changes_says_whether_redaction_would(value: object):
    """`changes` is true exactly where `redact_all` gives other data, and redacted data is not changed again."""
    redactor = InputRedactor(["1+"], replacement="#")
    assert redactor.changes(value) == (redactor.redact_all(value) != value)
    assert not redactor.changes(redactor.redact_all(value))


# Detectors


def test_detectors_are_those_of_the_settings():
    """Each name that the settings accept has its detector."""
    assert set(DETECTORS) == set(get_args(PrivacyDetector))


def test_settings_make_the_redactor():
    """privacy.redact_patterns and privacy.redact_detectors work together; without both nothing is redacted."""
    privacy = PrivacyConfig(redact_patterns=("x{2,}",), redact_detectors=("ssn",))
    assert redactor_of(privacy).redact("xx 123-45-6789 a@b.example") == "[REDACTED] [REDACTED] a@b.example"
    assert not redactor_of(PrivacyConfig()).is_active


@pytest.mark.parametrize(
    "card",
    [
        "4111111111111111",
        "4111-1111-1111-1111",
        "4111 1111 1111 1111",
        "378282246310005",
        "3782 822463 10005",
        "30569309025904",
        "4222222222222",
        "6304000000000000",
        "6011000990139424",
    ],
)
def test_payment_cards_are_found(card: str):
    """Plain, spaced and dashed numbers with Luhn's sum, also beside letters; not with a wrong digit."""
    wrong = card[:-1] + str((int(card[-1]) + 1) % 10)
    for before, after in (("", ""), ("card:", "."), ("no", "x"), ("12 ", " 7"), ("€", "€")):
        assert EVERY.redact(f"{before}{card}{after}") == f"{before}[REDACTED]{after}"
        assert EVERY.redact(f"{before}{wrong}{after}") == f"{before}{wrong}{after}"


def _with_luhn_digit(digits: str) -> str:
    """Appends the check digit, by the table of the standard and not by arithmetic."""
    table = {digit: int(doubled) for digit, doubled in zip("0123456789", "0246813579", strict=True)}
    total = sum(table[d] if place % 2 == 0 else int(d) for place, d in enumerate(reversed(digits)))
    return digits + str(-total % 10)


@given(st.from_regex(r"[1-9][0-9]{11,17}", fullmatch=True, alphabet="0123456789"))
def test_every_card_number_is_found(digits: str):
    """13 to 19 digits with Luhn's sum; one other last digit and it is no card."""
    card = _with_luhn_digit(digits)
    assert EVERY.redact(card) == "[REDACTED]"
    assert EVERY.redact(digits + str((int(card[-1]) + 1) % 10)) != "[REDACTED]"


@pytest.mark.parametrize(
    "text",
    [
        "0000000000000000",
        "411111111111",
        "41111111111111111111111",
        "2026-11-23 2026-11-24",
        "1 2 3 4 5 6 7 8 9 0 1 2 3 4",
    ],
)
def test_other_numbers_are_no_cards(text: str):
    """Zeros, too few or too many digits, dates, and lists of small numbers."""
    assert EVERY.redact(text) == text


@pytest.mark.parametrize("text", ["123-45-6789", "001 01 0001", "899-99-9999"])
def test_social_security_numbers_are_found(text: str):
    """Dashed and spaced."""
    assert EVERY.redact(f"SSN: {text}.") == "SSN: [REDACTED]."


@pytest.mark.parametrize(
    "text", ["000-12-3456", "666-12-3456", "900-12-3456", "123-00-4567", "123-45-0000", "1123-45-6789", "123-45 6789"]
)
def test_numbers_that_were_never_given_stay(text: str):
    """Areas, groups and serials that do not exist, parts of longer numbers, and mixed separators."""
    assert EVERY.redact(text) == text


@pytest.mark.parametrize("address", ["a@b.co", "first.last+tag@mail.example.org", "José@exámple.com", "o'neil@x-y.org"])
def test_addresses_are_found(address: str):
    """The end of a sentence is not part of the address."""
    assert EVERY.redact(f"Write to {address}.") == "Write to [REDACTED]."


@pytest.mark.parametrize("text", ["user@localhost", "@handle", "a @ b.co", "x|y"])
def test_other_texts_with_an_at_sign_stay(text: str):
    """An address has a local part, and a domain with a dot."""
    assert EVERY.redact(text) == text


# Cached answers


def test_text_that_redaction_changes_may_not_leave_memory():
    """A cached answer stays in L1 where its text, or that of its question, would be redacted."""
    clean = encode({"t": np.array(["fine"], object), "n": np.ones(3, np.float32)})
    personal = encode({"t": np.array(["fine", "123-45-6789"], object)})
    numbers = encode({"n": np.array([123456789], np.int64)})
    assert [EVERY.may_leave_memory(*each) for each in (clean, personal, numbers)] == [True, False, True]
    assert InputRedactor().may_leave_memory(*personal)


def test_texts_are_judged_one_by_one():
    """The end of one text and the beginning of the next are not one number."""
    halves = encode({"t": np.array(["4111111111", "111111"], object)})
    assert EVERY.may_leave_memory(*halves)


def test_inputs_that_differ_in_a_redacted_part_have_two_keys():
    """CF-036: the key of an answer is made of the raw input."""
    keys = set()
    for text in ("SSN: 123-45-6789", "SSN: 123-45-6788"):
        content, body = encode({"text": np.array([text], object)})
        header = JobHeader(new_job_id("m"), "acme", "m", "normal", content)
        keys.add(key_of(header, body, "1", tenant="acme"))
    assert len({EVERY.redact(text) for text in ("SSN: 123-45-6789", "SSN: 123-45-6788")}) == 1
    assert len(keys) == 2


# Tenants


def test_key_is_put_into_the_namespace():
    """CF-037, CF-039: the tenant comes first."""
    isolation = TenantIsolation("customer_abc")
    assert isolation.namespace_key("model:bert:input_hash_abc123") == "customer_abc:model:bert:input_hash_abc123"


@pytest.mark.parametrize("tenant", ["", "a:b", ":", "a b", "A", "x" * 65, "a\n", None, 7])
def test_unusable_tenant_is_refused(tenant: str):
    """CF-039: the empty one, and each with a letter that could end it in a key."""
    with pytest.raises(InvalidInput, match="Bad tenant name"):
        TenantIsolation(tenant)


TENANTS = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,5}", fullmatch=True)
KEYS = st.text(":ab.-", max_size=8)


@given(TENANTS, KEYS, TENANTS, KEYS)
def test_names_of_keys_never_collide(tenant: str, key: str, other_tenant: str, other_key: str):
    """CF-039: two names are equal only for the same tenant and the same key."""
    name, other = (TenantIsolation(t).namespace_key(k) for t, k in ((tenant, key), (other_tenant, other_key)))
    assert (name == other) == ((tenant, key) == (other_tenant, other_key))


@pytest.mark.parametrize(("variables", "name"), [({"PENSTOCK_TENANT_ID": "acme"}, "acme:k"), ({}, "default:k")])
def test_tenant_comes_from_the_environment(variables: dict[str, str], name: str):
    """CF-029, CF-038: of another process, with PENSTOCK_TENANT_ID or its default."""
    code = "from penstock.safety.privacy import TenantIsolation; print(TenantIsolation.from_env().namespace_key('k'))"
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")} | variables
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=180
    )
    assert shown.stdout.strip() == name


def test_tenant_of_the_environment_is_in_the_key(tmp_path):
    """CF-029: two processes with other tenants ask the same question under two keys."""
    content, body = encode({"x": np.ones((1, 4), np.float32)})
    keys = set()
    for tenant in ("acme", "globex"):
        settings = Settings.load(environ={"PENSTOCK_TENANT_ID": tenant}, cwd=tmp_path)
        builder = JobBuilder.of(settings, settings.keyring)
        header = JobHeader(new_job_id("m"), builder.tenant, "m", "normal", content, key=Keyring.parse(None).signing_id)
        keys.add(key_of(header, body, "1", tenant=header.tenant))
    assert len(keys) == 2
