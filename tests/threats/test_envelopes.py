"""S0.1: without the key no envelope is accepted: flips, swaps, copies, replays, downgrades. Accepted: 0."""

from __future__ import annotations

import itertools
from random import Random

import msgspec
import pytest
from msgspec import structs

from penstock.registry.broker.base import State
from penstock.registry.envelope import (
    EventHeader,
    Keyring,
    Options,
    RequestContext,
    ResultHeader,
    open_event,
    open_job,
    open_result,
    seal,
)
from penstock.registry.errors import BadSignature, Corrupt
from penstock.registry.queues import Priority, dead_key, is_job_id, new_job_id, record_key, stream_key
from tests.packages import recorded_forwards
from tests.servers import wait_until
from tests.threats import fuzz
from tests.threats.conftest import AttackedWorker

FLIPS = 10_000
OPENERS = {"job": open_job, "result": open_result, "event": open_event}


def _sealed(kind: str, random: Random) -> bytes:
    header, body = fuzz.good_job(random)
    if kind == "job":
        header = structs.replace(header, options=Options(webhook="https://example.com/hook"))
        return seal("job", header, body, fuzz.SIGNING)
    if kind == "result":
        result = ResultHeader(id=header.id, context=RequestContext("default"), content=header.content, key="new")
        return seal("result", result, body, fuzz.SIGNING)
    return seal("event", EventHeader(id=header.id, key="new"), body, fuzz.SIGNING)


def _is_accepted(kind: str, sealed: bytes, keyring: Keyring = fuzz.SIGNING) -> bool:
    try:
        OPENERS[kind](sealed, keyring)
    except Corrupt:
        return False
    return True


@pytest.mark.parametrize("kind", OPENERS)
def test_ten_thousand_flips_are_all_noticed(kind: str):
    """Any bit, in envelopes of every kind; unchanged ones are accepted."""
    random = Random(f"flips {kind}")
    accepted = 0
    for number in range(FLIPS):
        if number % 100 == 0:
            sealed = _sealed(kind, random)
            assert _is_accepted(kind, sealed)
        flipped = bytearray(sealed)
        flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
        accepted += _is_accepted(kind, bytes(flipped))
    assert accepted == 0


def _parts(sealed: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """(prefix and header length, header, body, signature)."""
    size = int.from_bytes(sealed[4:8], "little")
    return sealed[:8], sealed[8 : 8 + size], sealed[8 + size : -32], sealed[-32:]


def test_no_mixture_of_two_jobs_is_a_job():
    """Header, body and signature of two signed jobs of different tenants: only the two originals are accepted."""
    random = Random("mixtures")
    for _ in range(200):
        one = _parts(seal("job", *fuzz.good_job(random), fuzz.SIGNING))
        other = _parts(seal("job", *fuzz.good_job(random, tenant="acme"), fuzz.SIGNING))
        mixtures = {
            b"".join(parts) for parts in itertools.product(*(tuple(pair) for pair in zip(one, other, strict=True)))
        }
        accepted = {sealed for sealed in mixtures if _is_accepted("job", sealed)}
        assert accepted == {b"".join(one), b"".join(other)}


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "acme"},
        {"id": "double.stolen"},
        {"model": "recorder"},
        {"priority": "critical"},
        {"deadline_ms": 86_400_000},
        {"version": "9"},
        {"reply": "{double}:reply:mine"},
        {"idempotency_digest": "f" * 32},
        {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"},
        {"options": Options(webhook="https://attacker.example/")},
        {"key": "old"},
        {"key": ""},
        {"key": "unknown"},
    ],
    ids=str,
)
def test_no_field_of_a_header_can_be_exchanged(change: dict[str, object]):
    """Each of them is under the signature, the id of the key included."""
    header, body = fuzz.good_job(Random(1))
    signature = seal("job", header, body, fuzz.SIGNING)[-32:]
    head = msgspec.msgpack.encode(structs.replace(header, **change))
    frame = b"PS\x01J" + len(head).to_bytes(4, "little") + head + body
    assert not _is_accepted("job", frame + signature)
    assert not _is_accepted("job", frame)


def test_keys_of_jobs_and_results_are_apart():
    """A signature of a result is none of a job, and the other way round, also under another letter."""
    header, body = fuzz.good_job(Random(2))
    for letter, kind, macs in (
        (b"J", "job", fuzz.SIGNING.result_macs),
        (b"R", "result", fuzz.SIGNING.job_macs),
        (b"E", "event", fuzz.SIGNING.job_macs),
    ):
        for sealed in (_sealed(other, Random(3)) for other in OPENERS):
            frame = sealed[:3] + letter + sealed[4:-32]
            assert not _is_accepted(kind, frame + macs["new"].digest(frame))
    head = msgspec.msgpack.encode(header)
    frame = b"PS\x01J" + len(head).to_bytes(4, "little") + head + body
    assert _is_accepted("job", frame + fuzz.SIGNING.job_macs["new"].digest(frame))
    assert not _is_accepted("job", frame + fuzz.SIGNING.result_macs["new"].digest(frame))


def test_downgrades_are_refused():
    """Another protocol version, no signature, a retired key, a stranger's key under a known id."""
    header, body = fuzz.good_job(Random(4))
    sealed = seal("job", header, body, fuzz.SIGNING)
    unsigned = seal("job", structs.replace(header, key=""), body, fuzz.UNSIGNED)
    by_old = seal("job", structs.replace(header, key="old"), body, fuzz.SIGNING)
    only_new = Keyring.parse(fuzz.KEYS.split(",")[0])
    assert _is_accepted("job", by_old)
    assert not _is_accepted("job", by_old, only_new)
    assert not _is_accepted("job", unsigned)
    assert not _is_accepted("job", seal("job", header, body, fuzz.STRANGER))
    for version in (0, 2, 255):
        changed = sealed[:2] + bytes([version]) + sealed[3:]
        assert not _is_accepted("job", changed)
        resigned = changed[:-32] + fuzz.SIGNING.job_macs["new"].digest(changed[:-32])
        assert not _is_accepted("job", resigned)
    with pytest.raises(BadSignature):
        open_job(unsigned, fuzz.SIGNING)


def test_replayed_and_copied_envelopes_have_no_effect(target: AttackedWorker):
    """Validly signed bytes put into a queue again, into another queue, or after the end: one effect, nothing else."""
    marker = 424242.0
    with target.client() as client, target.server.client() as overseer:
        before = overseer.xlen(dead_key("recorder"))
        waiting = client.submit_many("recorder", [{"x": [[marker, 0, 0, n]]} for n in range(3)])
        results = [job.result(180)["y"].tolist() for job in waiting]
        record = overseer.get(record_key(waiting[0].id))
        # The bytes as they lay in the queue: made again here, for the queue is empty by now.
        header, body = fuzz.good_job(Random(5), model="recorder")
        sealed = seal("job", structs.replace(header, id=waiting[0].id, priority="normal"), body, fuzz.SIGNING)
        for priority in (Priority.NORMAL, Priority.NORMAL, Priority.HIGH):
            overseer.xadd(stream_key("recorder", priority), {"e": sealed})
        overseer.xadd(stream_key("double", Priority.NORMAL), {"e": sealed})
        client.submit("recorder", {"x": [[1, 1, 1, 1]]}, priority="low").result(180)
        client.submit("double", {"x": [[1, 1, 1, 1]]}, priority="low").result(180)
        wait_until(
            lambda: overseer.xlen(dead_key("recorder")) == before + 1, 10, "the copy to another queue is put aside"
        )
        assert overseer.get(record_key(waiting[0].id)) == record
        assert [job.result(180)["y"].tolist() for job in waiting] == results
        assert overseer.hget("{recorder}:flow", "t:default") is None
    rows = [row for batch in recorded_forwards(target.forward_log) for row in batch]
    assert rows.count(marker) == 3


def test_result_of_another_job_is_not_believed(target: AttackedWorker):
    """A validly signed result copied over the record of another job, or sealed as an event: refused by its reader."""
    with target.client() as client, target.server.client() as overseer:
        one, other = client.submit_many("double", [{"x": [[1, 1, 1, 1]]}, {"x": [[2, 2, 2, 2]]}])
        one.result(180)
        other.result(180)
        overseer.set(record_key(one.id), overseer.get(record_key(other.id)))
        with pytest.raises(BadSignature):
            client.job(one.id).result(180)
        event = _sealed("event", Random(6))
        overseer.set(record_key(one.id), State.COMPLETED.value.encode() + b"-" + event)
        with pytest.raises(Corrupt):
            client.job(one.id).result(180)
    assert is_job_id(new_job_id("double"), "double")
