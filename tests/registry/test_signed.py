"""Sealed records: what was signed comes back, and nothing else does (RELIABILITY, threat S0.1)."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from penstock.registry.errors import BadSignature
from penstock.registry.signed import open_record, seal_record
from penstock.safety.operator_key import OperatorKey, PublicKeys

PAYLOAD = b'{"epoch":3}\nand a second line'


@pytest.fixture(scope="module")
def key() -> OperatorKey:
    """An operator's key."""
    return OperatorKey(Ed25519PrivateKey.generate())


@pytest.fixture(scope="module")
def keys(key: OperatorKey) -> PublicKeys:
    """What a worker holds of it."""
    return PublicKeys.parse(key.public_text)


def test_signed_record_opens(key: OperatorKey, keys: PublicKeys):
    """The payload comes back byte for byte, with and without a verifier."""
    sealed = seal_record(PAYLOAD, key.sign, "active minilm")
    assert sealed.startswith(f"{key.key_id}:".encode())
    assert open_record(sealed, keys.verify, "active minilm") == PAYLOAD
    assert open_record(sealed, None) == PAYLOAD


def test_unsigned_record_is_refused_where_signatures_are_required(keys: PublicKeys):
    """Without a signer the first line is empty; only a reader without keys takes it."""
    sealed = seal_record(PAYLOAD, None)
    assert sealed == b"\n" + PAYLOAD
    assert open_record(sealed, None) == PAYLOAD
    with pytest.raises(BadSignature, match="unsigned record"):
        open_record(sealed, keys.verify)


def test_no_changed_bit_goes_through(key: OperatorKey, keys: PublicKeys):
    """Every single flipped bit of line and payload is noticed."""
    sealed = seal_record(PAYLOAD, key.sign)
    for bit in range(8 * len(sealed)):
        forged = bytearray(sealed)
        forged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadSignature):
            open_record(bytes(forged), keys.verify)


def test_record_of_another_place_is_refused(key: OperatorKey, keys: PublicKeys):
    """What was signed for one model does not verify for another, nor without a context."""
    sealed = seal_record(PAYLOAD, key.sign, "active minilm")
    for context in ("active other", "", "active minilm\n"):
        with pytest.raises(BadSignature, match="is wrong"):
            open_record(sealed, keys.verify, context)


def test_context_and_payload_do_not_run_into_each_other(key: OperatorKey, keys: PublicKeys):
    """Bytes cannot move from the payload into the context."""
    sealed = seal_record(b"b\nc", key.sign, "a")
    line = sealed.partition(b"\n")[0]
    with pytest.raises(BadSignature):
        open_record(line + b"\nc", keys.verify, "a\nb")


def test_record_of_a_stranger_is_refused(keys: PublicKeys):
    """A good signature under a key that is not known here counts for nothing."""
    stranger = OperatorKey(Ed25519PrivateKey.generate())
    with pytest.raises(BadSignature, match="not known here"):
        open_record(seal_record(PAYLOAD, stranger.sign), keys.verify)


@pytest.mark.parametrize(
    "data", [b"", b"no line", b"x" * 300 + b"\n", b"abc:%%%\n{}", b"abc\n{}", b"\xff:AAAA\n{}", b":\n{}"]
)
def test_foreign_bytes_are_refused(data: bytes, keys: PublicKeys):
    """Whatever lies there instead of a record is a BadSignature, never another error."""
    with pytest.raises(BadSignature):
        open_record(data, keys.verify)
