"""Sealed bytes: only the same bytes, in the same place, open with the key that sealed them; nonces never repeat."""

from __future__ import annotations

import random
import secrets
import subprocess
import sys
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.registry.errors import ConfigurationError
from penstock.safety.sealing import KEY_BYTES, SEAL_BYTES, DataKeys, Unopenable
from tests.servers import ROOT

KEYS = DataKeys([bytes(range(KEY_BYTES))])
_ID_BYTES, _NONCE_BYTES = 4, 12


@given(plain=st.binary(max_size=4096), bound=st.binary(max_size=200))
def test_sealed_bytes_open_to_the_plain_ones(plain: bytes, bound: bytes):
    """Any bytes come back, also empty ones, and from a view of a larger buffer."""
    sealed = KEYS.seal(plain, bound)
    assert KEYS.open(sealed, bound) == plain
    assert KEYS.open(memoryview(b"x" + sealed)[1:], bound) == plain
    assert KEYS.seal(memoryview(plain), bound) != sealed
    assert len(sealed) == len(plain) + SEAL_BYTES


@given(plain=st.binary(min_size=8, max_size=4096))
def test_plain_bytes_are_not_in_the_sealed_ones(plain: bytes):
    """CF-027: no eight bytes of the value stand in the sealed bytes."""
    sealed = KEYS.seal(plain, b"place")
    assert not any(plain[at : at + 8] in sealed for at in range(len(plain) - 7))


@given(bound=st.binary(max_size=100), other=st.binary(max_size=100))
def test_moved_values_do_not_open(bound: bytes, other: bytes):
    """CF-047: sealed bytes in the place of other ones are refused, so that swapped rows never answer."""
    assume(bound != other)
    with pytest.raises(Unopenable):
        KEYS.open(KEYS.seal(b"value", bound), other)


@given(plain=st.binary(max_size=64), data=st.data())
def test_cut_and_lengthened_values_do_not_open(plain: bytes, data: st.DataObject):
    """No beginning of sealed bytes opens, nor their end, nor the bytes with others behind them."""
    sealed = KEYS.seal(plain, b"place")
    cut = data.draw(st.integers(0, len(sealed) - 1))
    for changed in (sealed[:cut], sealed[cut + 1 :], sealed + b"\0"):
        with pytest.raises(Unopenable):
            KEYS.open(changed, b"place")


def test_no_flipped_bit_opens():
    """CF-044: of 1,000 values with one flipped bit each, none opens, and each is Unopenable."""
    source = random.Random(14)
    opened, refused = 0, 0
    for _ in range(1000):
        plain = source.randbytes(source.randrange(1500))
        sealed = bytearray(KEYS.seal(plain, b"place"))
        bit = source.randrange(8 * len(sealed))
        sealed[bit // 8] ^= 1 << bit % 8
        try:
            KEYS.open(bytes(sealed), b"place")
            opened += 1
        except Unopenable:
            refused += 1
    assert (opened, refused) == (0, 1000)


def test_every_bit_of_a_value_counts():
    """Each single bit of a short sealed value, its id and nonce included, is under the seal."""
    sealed = KEYS.seal(b"value", b"place")
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Unopenable):
            KEYS.open(bytes(changed), b"place")


@pytest.mark.parametrize("count", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_nonces_never_repeat(count: int):
    """CF-047: 1,000,000 seals of one value have 1,000,000 nonces, of 12 bytes each."""
    seal, front, end = KEYS.seal, _ID_BYTES, _ID_BYTES + _NONCE_BYTES
    nonces = {seal(b"value", b"place")[front:end] for _ in range(count)}
    assert len(nonces) == count
    assert {len(nonce) for nonce in nonces} == {12}


def test_old_keys_open_and_the_first_seals():
    """After a rotation values of the old key open, and are known as those to seal again."""
    old, new = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES)
    before, during, after = DataKeys([old]), DataKeys([new, old]), DataKeys([new])
    sealed = before.seal(b"value", b"place")
    assert during.open(sealed, b"place") == b"value"
    assert (before.is_current(sealed), during.is_current(sealed)) == (True, False)
    again = during.seal(during.open(sealed, b"place"), b"place")
    assert during.is_current(again)
    assert after.open(again, b"place") == b"value"
    with pytest.raises(Unopenable, match="key that is not here"):
        after.open(sealed, b"place")


def test_ids_name_keys_and_show_none():
    """The ids follow from the keys, the sealing one first, and are no part of them."""
    keys = [secrets.token_bytes(KEY_BYTES) for _ in range(3)]
    ids = DataKeys(keys).ids
    assert ids == tuple(DataKeys([key]).ids[0] for key in keys)
    assert all(len(each) == 8 for each in ids)
    assert not any(each in key.hex() for each in ids for key in keys)
    assert all(first != second for first, second in combinations(ids, 2))


@pytest.mark.parametrize("length", [0, 5, 16, 31, 33, 64])
def test_keys_of_another_length_are_refused(length: int):
    """CF-044: only 32 bytes are a key; the error names the place of the key."""
    with pytest.raises(ConfigurationError, match=f"Data key 2 has {length} bytes. Expected 32"):
        DataKeys([bytes(KEY_BYTES), bytes(length)])


def test_no_key_and_one_key_twice_are_refused():
    """Without a key nothing can be sealed; a key twice is a mistake of the operator."""
    with pytest.raises(ConfigurationError, match="at least one key of 32 bytes"):
        DataKeys([])
    key = secrets.token_bytes(KEY_BYTES)
    with pytest.raises(ConfigurationError, match="distinct ids"):
        DataKeys([key, key])


def test_without_the_library_there_are_no_keys():
    """CF-046: where cryptography cannot be imported this module can be; keys raise an error with the extra's name."""
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from penstock.registry.errors import ConfigurationError\n"
        "from penstock.safety.sealing import DataKeys\n"
        "try:\n    DataKeys([bytes(32)])\n"
        "except ConfigurationError as error:\n    print(error)\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "cryptography cannot be imported" in shown.stdout
    assert "pip install '.[cli]'" in shown.stdout
