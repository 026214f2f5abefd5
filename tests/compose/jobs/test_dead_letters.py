"""Dead letters: all bytes can be described, and only a job that a worker would run is replayed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from penstock.compose.jobs.dead_letters import describe, parse_age_ms, replay, summary
from penstock.registry.broker.base import Claim, DeadLetter, Limits, Publication
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import PROTOCOL, JobHeader, Keyring, peek_job, seal
from penstock.registry.errors import InvalidInput
from penstock.registry.queues import Priority, new_job_id, reply_key
from penstock.registry.tensors import Tensor
from penstock.safety.privacy import InputRedactor

KEYS = Keyring.parse("k1:" + "A" * 43 + "=")
OTHER_KEYS = Keyring.parse("k2:" + "B" * 43 + "=")
NO_KEYS = Keyring.parse(None)
NOW_S = 1_700_000_000.0
PLAIN = InputRedactor()


def _header(slot: str = "m", **changes: object) -> JobHeader:
    plain = JobHeader(new_job_id(slot), "acme", slot, "normal", (), key="k1")
    return structs.replace(plain, **changes)


def _sealed(header: JobHeader, body: bytes = b"body") -> bytes:
    return seal("job", header, body, {"k1": KEYS, "k2": OTHER_KEYS, "": NO_KEYS}[header.key])


def _letter(sealed: bytes, *, slot: str = "m", job_id: str = "", accepted_ms: int = int(NOW_S * 1000)) -> DeadLetter:
    entry = f"{int(NOW_S * 1000)}-0"
    return DeadLetter(
        slot, entry, "why", Priority.NORMAL, f"{accepted_ms}-0", accepted_ms, 1, 0, len(sealed), job_id, "", sealed
    )


def _dead_lettered(broker: MemoryBroker, sealed: bytes) -> DeadLetter:
    """The letter of bytes that a worker has dead-lettered."""
    broker.publish("m", [Publication(new_job_id("m"), Priority.NORMAL, sealed, "x")], Limits(10, 0, 1000))
    _, (delivery,) = broker.exchange("w", [], [Claim("m", 1, 0, 0)], 1000)
    assert broker.dead_letter("w", delivery, "why")
    letter = broker.read_dead_letter("m", broker.dead_letters("m")[-1].entry)
    assert letter is not None
    return letter


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans(), st.integers(0, 300))
def test_any_bytes_are_described(noise: bytes, is_cut: bool, position: int):
    """Foreign, cut off or changed bytes are described with their fault, as JSON, without an error."""
    good = _sealed(_header())
    sealed = good[:position] + noise if is_cut else noise
    shown = describe(_letter(sealed), KEYS, NOW_S * 1000, PLAIN)
    assert json.loads(json.dumps(shown))["size"] == len(sealed)
    assert (shown["replay"] == "possible") == (sealed == good)


def test_signed_job_is_shown_with_its_header():
    """A signed job is described with its header and a valid signature; without the key only the header is shown."""
    header = _header(deadline_ms=5000)
    shown = describe(_letter(_sealed(header)), KEYS, NOW_S * 1000, PLAIN)
    assert (shown["protocol"], shown["signature"], shown["replay"]) == (PROTOCOL, "valid: key k1", "possible")
    assert shown["header"] == {
        "id": header.id,
        "tenant": "acme",
        "model": "m",
        "version": "",
        "priority": "normal",
        "deadline_ms": 5000,
        "key": "k1",
        "inputs": {},
    }
    shown = describe(_letter(_sealed(header)), NO_KEYS, NOW_S * 1000, PLAIN)
    assert shown["header"]["id"] == header.id
    assert shown["signature"].startswith("refused: a job that is signed with key")
    assert shown["replay"].startswith("refused: ")


def test_texts_of_a_letter_are_redacted():
    """CF-034: the reason, and what the header of foreign bytes holds, are shown redacted; ids stay whole."""
    header = _header(tenant="123-45-6789", version="a@b.co", content=(Tensor("c@d.eu", "float32", (1,)),))
    letter = structs.replace(_letter(_sealed(header)), reason="it says 4111-1111-1111-1111")
    redactor = InputRedactor(detectors=("payment_card", "email", "ssn"))
    shown = describe(letter, KEYS, NOW_S * 1000, redactor)
    assert shown["reason"] == summary(letter, redactor)["reason"] == "it says [REDACTED]"
    assert (shown["header"]["tenant"], shown["header"]["version"]) == ("[REDACTED]", "[REDACTED]")
    assert shown["header"]["inputs"] == {"[REDACTED]": "float32 (1,)"}
    assert (shown["header"]["id"], shown["entry"]) == (header.id, letter.entry)
    assert "4111" in describe(letter, KEYS, NOW_S * 1000, PLAIN)["reason"]


def _forged(sealed: bytes) -> bytes:
    """With another last byte, whatever that byte is."""
    return sealed[:-1] + bytes([sealed[-1] ^ 1])


@pytest.mark.parametrize(
    ("sealed", "why"),
    [
        (b"not an envelope", "not a Penstock envelope"),
        (b"PS\x02J" + bytes(20), "protocol 2; expected 1"),
        (_sealed(_header()).replace(b"PS\x01J", b"PS\x01R"), "not a job"),
        (_forged(_sealed(_header())), "signature"),
        (_sealed(_header(key="")), "unsigned"),
        (_sealed(_header(key="k2")), "key 'k2', which its reader"),
        (_sealed(_header("other")), "another queue"),
        (_sealed(_header(model="other")), "another queue"),
        (_sealed(_header(reply="penstock:elsewhere")), "another queue"),
        (_sealed(_header(reply=reply_key("m", "me\nyou"))), "another queue"),
        (_sealed(_header(idempotency_digest="a\nb")), "another queue"),
        (_sealed(_header(tenant="Mallory\nacme")), "Bad tenant name"),
        (_sealed(_header(priority="urgent")), "Unknown priority"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_job_stays(sealed: bytes, why: str):
    """The replay is refused with a reason, `describe` shows the same reason, and the letter stays."""
    broker = MemoryBroker(lambda: NOW_S)
    letter = _dead_lettered(broker, sealed)
    outcome = replay(broker, letter, KEYS, job_ttl_ms=1000, now_ms=NOW_S * 1000)
    assert not outcome.is_replayed
    assert why in outcome.reason
    assert describe(letter, KEYS, NOW_S * 1000, PLAIN)["replay"] == f"refused: {outcome.reason}"
    assert len(broker.dead_letters("m")) == 1
    assert broker.depths("m")[Priority.NORMAL].jobs == 0


def test_a_valid_job_is_replayed_unchanged():
    """It keeps the id, tenant, reply address and priority of its signed header."""
    broker = MemoryBroker(lambda: NOW_S)
    header = _header(priority="high", reply=reply_key("m", "me"), idempotency_digest="ab")
    outcome = replay(broker, _dead_lettered(broker, _sealed(header)), KEYS, job_ttl_ms=60_000, now_ms=NOW_S * 1000)
    assert (outcome.is_replayed, outcome.job_id, outcome.reason) == (True, header.id, "")
    _, (delivery,) = broker.exchange("w", [], [Claim("m", 1, 0, 0)], 1000)
    assert (delivery.priority, delivery.sealed) == (Priority.HIGH, _sealed(header))
    (job_record,) = broker.job_records([header.id])
    assert job_record is not None
    assert job_record.tenant == "acme"


def test_an_expired_job_stays():
    """A deadline counts from the first acceptance: after it the job stays, before it the job is replayed."""
    now = [NOW_S]
    broker = MemoryBroker(lambda: now[0])
    letter = _dead_lettered(broker, _sealed(_header(deadline_ms=5000)))
    now[0] += 5.1
    outcome = replay(broker, letter, KEYS, job_ttl_ms=60_000, now_ms=now[0] * 1000)
    assert not outcome.is_replayed
    assert outcome.reason == "its deadline has passed: 2023-11-14 22:13:25Z"
    now[0] -= 1
    assert replay(broker, letter, KEYS, job_ttl_ms=60_000, now_ms=now[0] * 1000).is_replayed
    _, (delivery,) = broker.exchange("w", [], [Claim("m", 1, 0, 0)], 1000)
    assert delivery.accepted_ms == letter.accepted_ms == NOW_S * 1000


def test_letter_about_another_job_is_refused():
    """Bytes that were accepted as one job are never replayed as another."""
    letter = _letter(_sealed(_header()), job_id=new_job_id("m"))
    outcome = replay(MemoryBroker(), letter, KEYS, job_ttl_ms=1000, now_ms=NOW_S * 1000)
    assert "another queue" in outcome.reason


def test_header_is_read_from_the_beginning_alone():
    """A purge reads only the beginning of each job: the body may be missing, the header may not."""
    header = _header()
    sealed = _sealed(header, bytes(1000))
    end = 8 + int.from_bytes(sealed[4:8], "little")
    assert peek_job(sealed[:end]) == header
    assert peek_job(sealed[: end - 1]) is None
    assert peek_job(b"") is None


@pytest.mark.parametrize(
    ("text", "ms"), [("45s", 45_000), ("30m", 1_800_000), ("12h", 43_200_000), ("7d", 604_800_000)]
)
def test_ages_have_units(text: str, ms: int):
    """An age has a unit: seconds, minutes, hours or days."""
    assert parse_age_ms(text) == ms


@pytest.mark.parametrize("text", ["", "7", "d", "7w", "-7d", "7 d", "1.5h"])
def test_other_ages_are_refused(text: str):
    """An age without a known unit is refused, and the error lists the units."""
    with pytest.raises(InvalidInput, match="Expected a number and s, m, h or d"):
        parse_age_ms(text)
