"""Sealed bodies open in their own envelope only, and a reader that seals takes no plain body."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from penstock.producers.events import EventMerger
from penstock.registry.broker.base import StreamEntry
from penstock.registry.envelope import (
    FIXED_BYTES,
    MAC_BYTES,
    SEAL_BYTES,
    EventHeader,
    Failure,
    Keyring,
    RequestContext,
    encode_header,
    envelope_prefix,
    open_event,
    open_job,
    open_result,
    seal,
    verify_job,
    verify_result,
)
from penstock.registry.errors import BadSeal, Corrupt, UndecodableEnvelope
from penstock.registry.event_body import EventPart, encode_parts
from penstock.registry.queues import events_key, new_job_id
from penstock.registry.tensors import MAX_BYTES, MAX_RESULT_BYTES
from penstock.registry.unrun import CANCELLED, unrun_result
from penstock.safety import sealing as safety_sealing
from penstock.safety.sealing import DataKeys
from tests.payload_keys import DATA_KEY, OTHER_DATA_KEY, sealing
from tests.registry.test_envelope import BODY, HEADERS, OPENERS, SIGNING, UNSIGNED

KEYRINGS: Final = {"sealed": sealing(UNSIGNED), "signed and sealed": sealing(SIGNING)}
CAPS: Final = {"job": MAX_BYTES, "result": MAX_RESULT_BYTES, "event": MAX_RESULT_BYTES}


def header_of(kind: Any, keyring: Keyring, **changes: Any) -> Any:
    """A header whose body is sealed if the keyring seals. A result is that of a job that completed."""
    own = {"error": None} if kind == "result" else {"tenant": "acme"} if kind == "event" else {}
    return structs.replace(HEADERS[kind], key=keyring.signing_id, is_sealed=keyring.seals, **own | changes)


def sealed_by(keyring: Keyring, kind: Any, body: bytes = BODY, **changes: Any) -> bytes:
    """The envelope of such a header."""
    return seal(kind, header_of(kind, keyring, **changes), body, keyring)


def refused(kind: str, sealed: bytes, keyring: Keyring) -> str:
    """The text with which the bytes are refused. Any other error fails the test."""
    with pytest.raises(Corrupt) as error:
        OPENERS[kind](sealed, keyring)
    return str(error.value)


def test_the_envelope_knows_the_length_of_a_seal():
    """Of the module that makes it, which a plain client does not import."""
    assert SEAL_BYTES == safety_sealing.SEAL_BYTES
    assert len(DataKeys((DATA_KEY,)).seal(b"plain", b"bound")) == 5 + SEAL_BYTES


@pytest.mark.parametrize("keyring", KEYRINGS.values(), ids=KEYRINGS)
@pytest.mark.parametrize("kind", OPENERS)
def test_a_sealed_body_is_what_it_was(kind: str, keyring: Keyring):
    """For a reader that seals, and for one that has the key only; nothing of it stands in the envelope."""
    sealed = sealed_by(keyring, kind)
    assert BODY not in sealed
    for reader in (keyring, replace(keyring, seals=False)):
        header, body = OPENERS[kind](sealed, reader)
        assert (header, bytes(body)) == (header_of(kind, keyring), BODY)


@pytest.mark.parametrize("kind", OPENERS)
def test_one_body_is_never_sealed_alike_twice(kind: str):
    """Nonces are random: equal inputs cannot be told from the bytes."""
    keyring = replace(UNSIGNED, body_keys=DataKeys((DATA_KEY,)), seals=True)
    assert len({sealed_by(keyring, kind) for _ in range(100)}) == 100


@pytest.mark.parametrize("keyring", KEYRINGS.values(), ids=KEYRINGS)
@pytest.mark.parametrize("kind", OPENERS)
def test_no_bit_of_a_sealed_envelope_may_change(kind: str, keyring: Keyring):
    """Not of its header either, also where nothing is signed: the body is bound to all bytes before it."""
    sealed = sealed_by(keyring, kind)
    for place in range(len(sealed)):
        for bit in (0, 7):
            refused(kind, sealed[:place] + bytes([sealed[place] ^ (1 << bit)]) + sealed[place + 1 :], keyring)
    for size in range(len(sealed)):
        refused(kind, sealed[:size], keyring)
    refused(kind, sealed + b"\0", keyring)


MOVES: Final[dict[str, dict[str, Any]]] = {
    "another job": {"id": "mlp.2"},
    "another model": {"id": "other.1", "model": "other"},
    "another tenant": {"tenant": "rival"},
    "another priority": {"priority": "low"},
    "another shape": {"content": ()},
    "another attempt": {"attempt": 9},
}


@pytest.mark.parametrize("keyring", KEYRINGS.values(), ids=KEYRINGS)
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("kind", OPENERS)
def test_a_body_that_is_moved_does_not_open(kind: Any, move: str, keyring: Keyring):
    """Into an envelope of another job, model, tenant or kind, even if the signature of the new envelope is good."""
    whole, changes = sealed_by(keyring, kind), dict(MOVES[move])
    if kind == "result" and "tenant" in changes:
        changes["context"] = RequestContext(changes["tenant"])
    known = {name: value for name, value in changes.items() if name in type(HEADERS[kind]).__struct_fields__}
    targets = [(kind, known)] if known else []
    targets += [(other, {}) for other in OPENERS if other != kind]
    for target, fields in targets:
        assert "cannot be decrypted" in refused(target, _with_body_of(whole, target, keyring, fields), keyring)


def _with_body_of(sealed: bytes, kind: Any, keyring: Keyring, changes: dict[str, Any]) -> bytes:
    """An envelope of this kind with the sealed body of another one, signed by a holder of the signing key."""
    body_at = FIXED_BYTES + int.from_bytes(sealed[4:FIXED_BYTES], "little")
    body = sealed[body_at : len(sealed) - (MAC_BYTES if keyring.signs else 0)]
    encoded = encode_header(header_of(kind, keyring, **changes))
    front = envelope_prefix(kind, encoded) + encoded + body
    macs = keyring.job_macs if kind == "job" else keyring.result_macs
    return front + macs[keyring.signing_id].digest(front) if keyring.signs else front


@pytest.mark.parametrize("keyring", KEYRINGS.values(), ids=KEYRINGS)
@pytest.mark.parametrize("kind", OPENERS)
def test_a_reader_that_seals_takes_no_plain_body(kind: Any, keyring: Keyring):
    """Neither one that says so nor one that is called sealed; an empty one is refused as well."""
    plain = replace(keyring, seals=False)
    for body in (BODY, b""):
        text = refused(kind, sealed_by(plain, kind, body), keyring)
        assert f"a {kind}" in text
        assert "whose body is not encrypted" in text
        assert "privacy.seal_payloads" in text
    encoded = encode_header(header_of(kind, keyring))
    front = envelope_prefix(kind, encoded) + encoded + BODY
    macs = keyring.job_macs if kind == "job" else keyring.result_macs
    sealed = front + macs[keyring.signing_id].digest(front) if keyring.signs else front
    assert "cannot be decrypted" in refused(kind, sealed, keyring)


@pytest.mark.parametrize("kind", OPENERS)
def test_a_reader_without_the_key_says_so(kind: str):
    """Without any data key, and with another one. The texts hold no key."""
    sealed = sealed_by(KEYRINGS["sealed"], kind)
    assert "its reader has no data key" in refused(kind, sealed, UNSIGNED)
    text = refused(kind, sealed, sealing(UNSIGNED, OTHER_DATA_KEY))
    assert "sealed with a key that is not here" in text
    assert DATA_KEY.decode() not in text
    assert OTHER_DATA_KEY.decode() not in text


def test_a_plain_job_that_is_refused_names_its_job():
    """So that its client gets a failure: see Intake."""
    for sealed, keyring in (
        (sealed_by(UNSIGNED, "job"), KEYRINGS["sealed"]),
        (sealed_by(KEYRINGS["sealed"], "job"), UNSIGNED),
        (sealed_by(sealing(UNSIGNED, OTHER_DATA_KEY), "job"), KEYRINGS["sealed"]),
    ):
        with pytest.raises(BadSeal) as error:
            open_job(sealed, keyring)
        assert error.value.claimed == ("mlp.1", "acme")


def test_a_failure_without_a_body_needs_no_seal():
    """An operator's shell ends jobs without a data key. A failure with a body is refused: it would be plain."""
    failure = unrun_result("mlp.1", RequestContext("acme"), CANCELLED, UNSIGNED)
    header, body = open_result(failure, KEYRINGS["sealed"])
    assert (header.error, bytes(body)) == (CANCELLED, b"")
    with_body = sealed_by(UNSIGNED, "result", error=Failure("ModelError", "no"))
    assert "not encrypted" in refused("result", with_body, KEYRINGS["sealed"])


@pytest.mark.parametrize("keyring", KEYRINGS.values(), ids=KEYRINGS)
def test_headers_are_verified_without_a_data_key(keyring: Keyring):
    """For operators: `penstock job` and `penstock dead show` do not read bodies."""
    shell = replace(keyring, body_keys=None, seals=False)
    assert verify_job(sealed_by(keyring, "job"), shell) == header_of("job", keyring)
    assert verify_result(sealed_by(keyring, "result"), shell) == header_of("result", keyring)
    if keyring.signs:
        sealed = bytearray(sealed_by(keyring, "job"))
        sealed[-1] ^= 1
        with pytest.raises(Corrupt, match="whose signature is wrong"):
            verify_job(bytes(sealed), shell)


@pytest.mark.parametrize("kind", ["job", "result"])
def test_caps_are_those_of_plain_bytes(kind: Any):
    """The largest body may be sealed, and one byte more may not, sealed or plain."""
    keyring, cap = KEYRINGS["signed and sealed"], CAPS[kind]
    body = OPENERS[kind](sealed_by(keyring, kind, bytes(cap)), keyring)[1]
    assert len(body) == cap
    for keys in (keyring, SIGNING):
        with pytest.raises(UndecodableEnvelope, match="exceed the cap"):
            OPENERS[kind](sealed_by(keys, kind, bytes(cap + 1)), keys)


EVENTS: Final = [EventPart(fraction=0.25), EventPart(fraction=0.5)]


def entry_of(job_id: str, keyring: Keyring, tenant: str, *, seq: int = 4) -> StreamEntry:
    """Two progress reports of a job, as the broker hands them out."""
    tenant = tenant if keyring.seals else ""
    header = EventHeader(job_id, key=keyring.signing_id, is_sealed=keyring.seals, tenant=tenant)
    sealed = seal("event", header, encode_parts(EVENTS), keyring)
    return StreamEntry(events_key(job_id), f"{seq}-0", [b"t", b"events", b"d", sealed])


@settings(max_examples=60, derandomize=True)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_events_of_another_job_or_tenant_or_with_a_changed_bit_are_refused(at: int, bit: int):
    """The subscriber gets none of them; its own come as they were."""
    keyring, job_id, other = KEYRINGS["sealed"], new_job_id("m"), new_job_id("m")
    own = entry_of(job_id, keyring, "acme")
    merger = EventMerger(job_id, "acme", keyring, 0)
    assert [event.data for event in merger.entries([own]) if event.type == "progress"] == [0.25, 0.5]
    sealed = own.fields[3]
    at %= len(sealed)
    changed = sealed[:at] + bytes([sealed[at] ^ (1 << bit)]) + sealed[at + 1 :]
    entries = [
        entry_of(other, keyring, "acme"),
        entry_of(job_id, keyring, "rival"),
        entry_of(job_id, sealing(UNSIGNED, OTHER_DATA_KEY), "acme"),
        entry_of(job_id, UNSIGNED, "acme"),
        own._replace(fields=[*own.fields[:3], changed]),
    ]
    for entry in entries:
        with pytest.raises(Corrupt):
            list(EventMerger(job_id, "acme", keyring, 0).entries([entry]))


def test_an_event_of_a_reader_with_the_key_only_opens():
    """A client whose settings do not seal reads the events of a worker that does."""
    keyring, job_id = KEYRINGS["signed and sealed"], new_job_id("m")
    merger = EventMerger(job_id, "acme", replace(keyring, seals=False), 0)
    found = list(merger.entries([entry_of(job_id, keyring, "acme")]))
    assert [event.data for event in found if event.type == "progress"] == [0.25, 0.5]
    assert open_event(entry_of(job_id, keyring, "acme").fields[3], keyring)[0].tenant == "acme"
