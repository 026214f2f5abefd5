"""The envelope: what goes in comes out, and nothing that was changed, cut or made elsewhere gets past."""

from __future__ import annotations

import base64
import hmac
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.envelope import (
    MAX_HEADER_BYTES,
    EventHeader,
    Failure,
    JobHeader,
    Keyring,
    Options,
    RequestContext,
    ResultHeader,
    Timings,
    open_event,
    open_job,
    open_result,
    seal,
)
from penstock.registry.errors import BadSignature, ConfigurationError, Corrupt, UndecodableEnvelope
from penstock.registry.tensors import MAX_BYTES, Tensor


def _key(name: str, letter: str) -> str:
    return f"{name}:{base64.b64encode(letter.encode() * 32).decode()}"


OLD, NEW = _key("old", "o"), _key("new", "n")
UNSIGNED = Keyring.parse(None)
SIGNING = Keyring.parse(f"{NEW},{OLD}")
CONTENT = (Tensor("x", "float32", (1, 4)),)
BODY = bytes(range(16))
JOB = JobHeader(
    id="mlp.1",
    tenant="acme",
    model="mlp",
    priority="high",
    content=CONTENT,
    version="2",
    deadline_ms=1500,
    reply="{mlp}:reply:c",
    idempotency_digest="d1",
    traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01",
    options=Options(("y",), lane=True),
)
RESULT = ResultHeader(
    id="mlp.1",
    context=RequestContext("acme", "trace"),
    version="1",
    worker="gpu0@host",
    content=CONTENT,
    error=Failure("ModelError", "ValueError: no"),
    attempt=2,
    batch_size=7,
    timings=Timings(1.5, 2.5, 3.5),
)
EVENT = EventHeader(id="mlp.1", type="response", attempt=2)
OPENERS: dict[str, Any] = {"job": open_job, "result": open_result, "event": open_event}
HEADERS: dict[str, Any] = {"job": JOB, "result": RESULT, "event": EVENT}


def _sealed(kind: Any, keyring: Keyring) -> bytes:
    return seal(kind, _keyed(HEADERS[kind], keyring), BODY, keyring)


def _keyed(header: Any, keyring: Keyring) -> Any:
    return type(header)(
        **{name: getattr(header, name) for name in header.__struct_fields__} | {"key": keyring.signing_id}
    )


@pytest.mark.parametrize("keyring", [UNSIGNED, SIGNING], ids=["unsigned", "signed"])
@pytest.mark.parametrize("kind", HEADERS)
def test_everything_comes_back(kind: str, keyring: Keyring):
    """Every field of every header and every byte of the body, signed or not."""
    header, body = OPENERS[kind](_sealed(kind, keyring), keyring)
    assert header == _keyed(HEADERS[kind], keyring)
    assert bytes(body) == BODY


@pytest.mark.parametrize("kind", HEADERS)
@pytest.mark.parametrize("other", HEADERS)
def test_one_kind_never_passes_for_another(kind: str, other: str):
    """A result is no job, also with another letter: jobs and results are signed with different keys."""
    if kind == other:
        return
    sealed = _sealed(kind, SIGNING)
    with pytest.raises(UndecodableEnvelope, match=f"not a {other}"):
        OPENERS[other](sealed, SIGNING)
    relabelled = sealed[:3] + _sealed(other, SIGNING)[3:4] + sealed[4:]
    with pytest.raises(Corrupt):
        OPENERS[other](relabelled, SIGNING)


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7), kind=st.sampled_from(sorted(HEADERS)))
def test_any_changed_bit_is_noticed(place: int, bit: int, kind: str):
    """In the frame, the header, the body or the signature itself."""
    sealed = bytearray(_sealed(kind, SIGNING))
    sealed[place % len(sealed)] ^= 1 << bit
    with pytest.raises(Corrupt):
        OPENERS[kind](bytes(sealed), SIGNING)


@given(length=st.integers(0, 10_000), is_signed=st.booleans())
def test_a_cut_envelope_is_corrupt_or_loses_body_bytes_only(length: int, is_signed: bool):
    """Signed: any cut is noticed. Unsigned: the header is whole or refused, and a short body fits no tensor."""
    keyring = SIGNING if is_signed else UNSIGNED
    sealed = _sealed("job", keyring)
    cut = sealed[: length % len(sealed)]
    try:
        header, body = open_job(cut, keyring)
    except Corrupt:
        return
    assert not is_signed
    assert header == JOB
    assert BODY.startswith(bytes(body))


@given(noise=st.binary(max_size=200), has_frame=st.booleans())
def test_noise_is_corrupt_and_nothing_else(noise: bytes, has_frame: bool):
    """Whatever bytes lie in a queue, opening them raises what sends them to the dead letters."""
    framed = b"PS\x01J" + len(noise).to_bytes(4, "little") + noise if has_frame else noise
    with pytest.raises(Corrupt):
        open_job(framed, UNSIGNED)


def test_text_that_is_no_text_is_undecodable():
    """A name in the header whose bytes are not UTF-8 is foreign bytes like any other."""
    with pytest.raises(UndecodableEnvelope):
        open_job(_sealed("job", UNSIGNED).replace(b"acme", b"ac\xffe"), UNSIGNED)


def test_both_live_keys_verify_and_the_first_signs():
    """While keys are exchanged either is good; when the old one is dropped, what it signed is refused."""
    assert (SIGNING.signing_id, SIGNING.signs) == ("new", True)
    by_old = _sealed("job", Keyring.parse(OLD))
    assert open_job(by_old, SIGNING)[0].key == "old"
    with pytest.raises(BadSignature, match="signed with key 'old', which its reader does not have"):
        open_job(by_old, Keyring.parse(NEW))
    with pytest.raises(BadSignature, match="is wrong"):
        open_job(by_old, Keyring.parse(_key("old", "x")))


def test_unsigned_is_refused_where_signatures_are_required():
    """Leaving the signature out is no way around it."""
    with pytest.raises(BadSignature, match="an unsigned job, but its reader has signing keys"):
        open_job(_sealed("job", UNSIGNED), SIGNING)
    with pytest.raises(BadSignature, match="does not have"):
        open_job(_sealed("job", SIGNING), UNSIGNED)


@pytest.mark.parametrize(
    "text",
    [
        "noid",
        ":" + "A" * 44,
        "k1:not base64!",
        "k1:" + base64.b64encode(b"k" * 31).decode(),
        f"{NEW},{NEW}",
        f"{'k' * 65}:" + "A" * 44,
    ],
)
def test_unusable_keys_are_refused_without_being_shown(text: str):
    """No id, no base64, fewer than 32 bytes, the same id twice: one line that says what is expected."""
    with pytest.raises(ConfigurationError, match=r"Expected id:base64\[,id:base64\]") as refused:
        Keyring.parse(text)
    assert text.partition(":")[2] not in str(refused.value) or ":" not in text
    assert "\n" not in str(refused.value)


def test_signature_is_hmac_sha256_under_a_key_of_its_kind():
    """Another program can check it (RFC 2104); what signs jobs signs no results."""
    secret, message = b"n" * 32, _sealed("job", UNSIGNED)
    for macs, purpose in ((SIGNING.job_macs, b"penstock job v1"), (SIGNING.result_macs, b"penstock result v1")):
        derived = hmac.digest(secret, purpose, "sha256")
        assert macs["new"].digest(message) == hmac.digest(derived, message, "sha256")


def test_keys_are_not_in_a_repr():
    """A keyring that ends up in a log line says ids only."""
    assert "new" in repr(SIGNING)
    assert not any(part in repr(SIGNING) for part in (NEW.partition(":")[2], "nnnn", "Mac"))


def test_sizes_are_capped():
    """A header of more than 64 KiB and a body above the largest request are refused before they are read."""
    sealed = _sealed("job", UNSIGNED)
    size = MAX_HEADER_BYTES + 1
    with pytest.raises(UndecodableEnvelope, match=f"claims {size} bytes"):
        open_job(sealed[:4] + size.to_bytes(4, "little") + sealed[8:] + b"\0" * size, UNSIGNED)
    largest = seal("job", JOB, b"\0" * MAX_BYTES, UNSIGNED)
    assert len(open_job(largest, UNSIGNED)[1]) == MAX_BYTES
    with pytest.raises(UndecodableEnvelope, match="exceed the cap"):
        open_job(largest + b"\0" * 33, UNSIGNED)


def test_another_protocol_is_named():
    """A worker that is older than a producer says which version it met."""
    sealed = _sealed("job", UNSIGNED)
    with pytest.raises(UndecodableEnvelope, match="protocol 9; expected 1"):
        open_job(sealed[:2] + b"\x09" + sealed[3:], UNSIGNED)
