"""The text of data keys: two encodings, 32 bytes, and errors without a key."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.data_keys import KEY_BYTES, new_data_key, parse_data_key, parse_data_keys
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings


@given(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES))
def test_both_encodings_give_the_key(key: bytes):
    """CF-045: 32 bytes as hex digits in either case and as base64 are read as the same key."""
    texts = (key.hex(), key.hex().upper(), base64.b64encode(key).decode())
    assert {parse_data_key(text, "The key") for text in texts} == {key}


def test_several_keys_keep_their_order():
    """Keys are separated by commas, with or without spaces; the first one seals."""
    first, second = new_data_key(), new_data_key()
    keys = parse_data_keys(f"{first}, {second},")
    assert [key.hex() for key in keys] == [first, second]
    assert parse_data_keys("") == parse_data_keys(" , ") == ()


@given(st.binary(max_size=100).filter(lambda key: len(key) != KEY_BYTES))
def test_keys_of_another_length_are_refused(key: bytes):
    """CF-044: neither encoding accepts fewer or more bytes, and the error shows no key."""
    for text in (key.hex(), base64.b64encode(key).decode()):
        with pytest.raises(
            ConfigurationError, match="Expected 32 random bytes as 64 hex digits or as base64"
        ) as refused:
            parse_data_key(text, "Data key 1")
        assert len(text) < 12 or text not in str(refused.value)


@pytest.mark.parametrize("text", ["hunter2", "not a key", "ключ" * 8, "g" * 64, new_data_key()[:-1] + "é"])
def test_other_text_is_refused(text: str):
    """Text that is no encoded key is refused, and not shown."""
    with pytest.raises(ConfigurationError, match="Data key 2") as refused:
        parse_data_keys(f"{new_data_key()},{text}")
    assert text not in str(refused.value)


def test_keys_are_checked_when_settings_are_loaded():
    """A key of five bytes is an error of the settings, in one line that names the variable and no key."""
    short = base64.b64encode(b"short").decode()
    with pytest.raises(
        ConfigurationError, match="Bad value of PENSTOCK_L2_ENCRYPTION_KEY: Data key 1 has 5"
    ) as refused:
        Settings.load(environ={"PENSTOCK_L2_ENCRYPTION_KEY": short})
    assert short not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_new_keys_differ():
    """A new key is random, and text that is read as a key."""
    texts = {new_data_key() for _ in range(100)}
    assert len(texts) == len({parse_data_key(text, "The key") for text in texts}) == 100
