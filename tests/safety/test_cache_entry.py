"""The names of entries in Redis, and what is stored under them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.errors import PenstockError, UndecodableEnvelope
from penstock.safety.cache_entry import (
    EntryKey,
    is_stored_name,
    open_entry,
    seal_entry,
    stored_name,
    stored_pattern,
)
from penstock.safety.sealing import DataKeys, Unopenable
from penstock.safety.shared_entries import SharedEntries, server_ms

KEYS: Final = DataKeys([b"1" * 32])
KEY: Final = EntryKey("5f1c", b"\xa0\xb1", "acme")
ODD: Final = st.text(alphabet=st.sampled_from("ab:%*?[]\\entry\u00e9\ud800"), max_size=12)
ENTRY_KEYS: Final = st.builds(EntryKey, ODD, st.binary(max_size=4), ODD)


@given(st.tuples(ODD, ENTRY_KEYS), st.tuples(ODD, ENTRY_KEYS))
def test_names_are_injective(first: tuple[str, EntryKey], second: tuple[str, EntryKey]):
    """Two names are equal only for one prefix, group, tenant and digest, whatever letters these have."""
    assert (stored_name(*first) == stored_name(*second)) == (first == second)


@given(ODD, ODD, ENTRY_KEYS)
def test_names_tell_their_prefix(prefix: str, other: str, key: EntryKey):
    """A name belongs to its own prefix only, also where one prefix begins with the other."""
    assert is_stored_name(prefix, stored_name(prefix, key))
    assert is_stored_name(prefix, stored_name(other, key)) == (prefix == other)
    assert not other or not is_stored_name(prefix, stored_name(prefix + other, key))


def test_fields_do_not_run_into_each_other():
    """A separator within a field is encoded."""
    names = {
        stored_name("p:", EntryKey(group, digest, tenant))
        for group, tenant, digest in [("a", "b", b""), ("a:b", "", b""), ("", "a:b", b""), ("a%3Ab", "", b"")]
    }
    assert len(names) == 4


def test_patterns_are_literal():
    """Letters with a meaning in a pattern of Redis lose it."""
    assert stored_pattern("a*b?[c]\\:", "d") == b"a\\*b\\?\\[c\\]\\\\:entry:d:*"
    assert stored_pattern("p:") == b"p:entry:*"
    assert stored_pattern("p:", "x:*") == b"p:entry:x%3A%2A:*"


@given(st.binary(max_size=100), st.integers(0, 2**63), st.sampled_from([None, KEYS]))
def test_entries_open(value: bytes, expires_ms: int, data_keys: DataKeys | None):
    """Value and end are those that were stored."""
    assert open_entry(data_keys, KEY, seal_entry(data_keys, KEY, value, expires_ms)) == (value, expires_ms)


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: b"",
        lambda stored: stored[:5],
        lambda stored: stored[:-1],
        lambda stored: stored + b"\0",
        lambda stored: stored[:1] + bytes(8) + stored[9:],
        lambda stored: b"\0" + stored[1:],
        lambda stored: b"\2" + stored[1:],
    ],
    ids=["empty", "cut", "last byte", "longer", "another end", "marked as plain", "unknown mark"],
)
def test_changed_entries_do_not_open(change: Callable[[bytes], bytes]):
    """The end of an entry is bound to it like its key, and the mark decides nothing."""
    stored = seal_entry(KEYS, KEY, b"value", 7)
    with pytest.raises(PenstockError):
        open_entry(KEYS, KEY, change(stored))


def test_other_readers_are_refused():
    """Another key, no key, another entry: none of them gets a value."""
    sealed, plain = seal_entry(KEYS, KEY, b"value", 7), seal_entry(None, KEY, b"value", 7)
    for data_keys, key, stored, error in [
        (DataKeys([b"2" * 32]), KEY, sealed, Unopenable),
        (KEYS, KEY._replace(tenant="other"), sealed, Unopenable),
        (None, KEY, sealed, UndecodableEnvelope),
        (KEYS, KEY, plain, UndecodableEnvelope),
        (None, KEY, plain[:4], UndecodableEnvelope),
    ]:
        with pytest.raises(error):
            open_entry(data_keys, key, stored)


def test_a_look_up_opens_what_lives():
    """Expired, foreign and missing entries are none; only foreign ones are refused."""
    entries = SharedEntries("p:", KEYS)
    keys = [KEY._replace(digest=bytes([number])) for number in range(4)]
    assert entries.commands(keys) == [("MGET", *[stored_name("p:", key) for key in keys]), ("TIME",)]
    stored = [seal_entry(KEYS, keys[0], b"0", 5001), seal_entry(KEYS, keys[1], b"1", 5000), None, b"foreign"]
    opened = entries.opened(keys, [stored, [b"5", b"999"]])
    assert (opened.values, opened.lives_ms, opened.refused) == ([b"0", None, None, None], [1, 0, 0, 0], 1)
    assert opened.server_ms == 5000


@pytest.mark.parametrize("answers", [["x", [b"5", b"0"]], [[None], "x"], [[None, None], [b"5", b"0"]]])
def test_refused_look_ups_find_nothing(answers: list[object]):
    """An answer that is no answer to a look-up is none."""
    opened = SharedEntries("p:", KEYS).opened([KEY], answers)
    assert (opened.values, opened.server_ms) == ([None], None)


@pytest.mark.parametrize("answer", [None, [], [b"1"], [b"x", b"0"], [1, 2], [b"1" * 5000, b"0"], [b"\xb2", b"0"]])
def test_odd_clocks_are_none(answer: object):
    """Only two numbers are a time."""
    assert server_ms(answer) is None
