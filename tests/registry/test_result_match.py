"""A result that is only compared with an earlier one has the outputs or the error that decoding it would give."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.producers import job_state
from penstock.producers.job_state import JobState, ResultPolicy
from penstock.registry import result_match
from penstock.registry.broker.base import JobRecord, State
from penstock.registry.envelope import Failure, Keyring, RequestContext, ResultHeader, Timings, open_result, seal
from penstock.registry.errors import PenstockError, UndecodableEnvelope, UnknownJob
from penstock.registry.queues import new_job_id
from penstock.registry.result_match import ResultMatcher
from penstock.registry.tensors import Tensor, encode
from tests.payload_keys import OTHER_DATA_KEY, sealing


def _keys(*names: str) -> str:
    return ",".join(f"{name[:1]}:{base64.b64encode(name.encode() * 32).decode()}" for name in names)


UNSIGNED = Keyring.parse(None)
SIGNED = Keyring.parse(_keys("a", "b"))
TURNED = Keyring.parse(_keys("b", "a"))
FOREIGN = Keyring.parse(_keys("alien"))
OTHER_ID = Keyring.parse(_keys("c"))
SEALED = sealing(SIGNED)
KEYRINGS = {
    "unsigned": UNSIGNED,
    "signed": SIGNED,
    "turned": TURNED,
    "foreign": FOREIGN,
    "other id": OTHER_ID,
    "only sealed": sealing(UNSIGNED),
    "sealed": SEALED,
    "sealed with another key": sealing(SIGNED, OTHER_DATA_KEY),
}
TIMES = Timings(1.5, 2.5, 3.5)
IDS = [new_job_id("m") for _ in range(4)] + ["m.a-task-of-celery", f"{'n' * 64}.7"]
OUTPUTS: dict[str, dict[str, Any]] = {
    "one": {"y": np.arange(4, dtype=np.float32).reshape(1, 4)},
    "rows": {"y": np.arange(8, dtype=np.float32).reshape(2, 4)},
    "like one": {"y": np.arange(4, dtype=np.int32).reshape(1, 4)},
    "scalar": {"y": np.array(7, np.int64)},
    "two": {"y": np.ones((1, 2), np.float32), "z": np.ones((1, 2), bool)},
    "text": {"y": np.array(["one", "two"], object)},
    "none": {},
    "empty": {"y": np.ones((0, 4), np.float32)},
    "large": {"y": np.ones((1, 20_000), np.float32)},
}


def sealed_by(
    keyring: Keyring, job_id: str = IDS[0], kind: str = "one", body: bytes | None = None, **changes: Any
) -> bytes:
    """The result of a job of the tenant `acme`."""
    content, encoded = encode(OUTPUTS[kind])
    fields = {"content": content, "worker": "cpu0@host", "version": "1", "timings": TIMES, **changes}
    fields.setdefault("is_sealed", keyring.seals and fields.get("error") is None)
    header = ResultHeader(job_id, fields.pop("context", RequestContext("acme")), key=keyring.signing_id, **fields)
    return seal("result", header, encoded if body is None else body, keyring)


def moved_body(sealed: bytes, other: bytes, keyring: Keyring) -> bytes:
    """A result with the body of another one as it travels, signed."""
    size = 8 + int.from_bytes(sealed[4:8], "little")
    other_size = 8 + int.from_bytes(other[4:8], "little")
    front = sealed[:size] + other[other_size : len(other) - (32 if keyring.signs else 0)]
    return front + keyring.result_macs[keyring.signing_id].digest(front) if keyring.signs else front


def job_of(policy: ResultPolicy, job_id: str, sealed: bytes) -> JobState:
    """A job of the tenant `acme` whose record has this result."""
    job = JobState(job_id, "acme", policy, awaits_reply=True)
    job.receive(JobRecord(State.COMPLETED, "", sealed))
    return job


def told(call: Callable[[], Any]) -> object:
    """What a call gives, so that it can be compared; or what its error says."""
    try:
        found = call()
    except (PenstockError, msgspec.MsgspecError, ValueError) as error:
        return type(error), str(error)
    if not isinstance(found, dict):
        return found
    return [(name, each.dtype, each.shape, each.tolist(), each.flags.writeable) for name, each in found.items()]


times = st.floats(0, 1e6) | st.just(0.0)
fields = st.fixed_dictionaries(
    {},
    optional={
        "timings": st.builds(Timings, times, times, times),
        "worker": st.sampled_from(["cpu1@host", "", "\u00a7timings"]),
        "batch_size": st.sampled_from([0, 1, 200]),
        "attempt": st.integers(1, 2),
        "content_digest": st.sampled_from([b"a" * 32, b"b" * 32]),
        "version": st.sampled_from(["2", ""]),
        "context": st.sampled_from([RequestContext("rival"), RequestContext("acme", "trace")]),
        "is_cached": st.booleans(),
        "error": st.sampled_from([None, None, Failure("ModelError", "no")]),
        "content": st.just((Tensor("y", "float32", (1, 5)),)),
    },
)


@st.composite
def results(draw: st.DrawFn) -> tuple[str, bytes]:
    """The job that is asked for, and the bytes in its record: good ones mostly."""
    job_id = draw(st.sampled_from(IDS))
    keyring = KEYRINGS[draw(st.sampled_from(["signed"] * 6 + ["sealed"] * 6 + sorted(KEYRINGS)))]
    owner = draw(st.sampled_from([job_id] * 5 + IDS))
    kind = draw(st.sampled_from(["one"] * 5 + sorted(OUTPUTS)))
    changes: dict[str, Any] = draw(st.just({}) | fields)
    sealed = sealed_by(keyring, owner, kind, **changes)
    harm = draw(st.sampled_from(["none"] * 8 + ["cut", "bit", "more", "id", "body", "kind", "other", "moved", "plain"]))
    place = draw(st.integers(0, len(sealed) - 1))
    if harm == "cut":
        sealed = sealed[:place]
    elif harm == "bit":
        sealed = sealed[:place] + bytes([sealed[place] ^ (1 << draw(st.integers(0, 7)))]) + sealed[place + 1 :]
    elif harm == "more":
        sealed += draw(st.binary(min_size=1, max_size=40))
    elif harm == "id":
        # The header is that of this job now, and the signature that of another job.
        sealed = sealed.replace(owner.encode(), IDS[(IDS.index(job_id) + 1) % 4].encode())
    elif harm == "body":
        sealed = sealed_by(keyring, owner, kind, body=b"\x00" * draw(st.integers(0, 40)))
    elif harm == "moved":
        sealed = moved_body(sealed, sealed_by(keyring, IDS[0], kind, **changes), keyring)
    elif harm == "plain":
        sealed = sealed_by(replace(keyring, seals=False), owner, kind, **changes)
    elif harm == "kind":
        sealed = sealed[:3] + b"J" + sealed[4:]
    elif harm == "other":
        sealed = draw(st.binary(max_size=60))
    return job_id, sealed


READERS = [SIGNED, TURNED, UNSIGNED, SEALED, sealing(UNSIGNED), replace(SEALED, seals=False)]


@given(found=st.lists(results(), min_size=1, max_size=12), reader=st.sampled_from(READERS))
def test_every_result_is_that_of_the_plain_way(found: list[tuple[str, bytes]], reader: Keyring):
    """Good, forged, cut, swapped, foreign and unsigned ones in any order: equal outputs and times, or equal errors."""
    policy = ResultPolicy(reader, ttl_s=86_400)
    for job_id, sealed in found * 2:
        seen, plain = job_of(policy, job_id, sealed), job_of(ResultPolicy(reader, ttl_s=86_400), job_id, sealed)
        assert told(seen.outputs) == told(plain.opened().outputs if _opens(plain) else plain.opened)
        assert told(lambda: seen.opened().info()) == told(lambda: plain.opened().info())  # noqa: B023 - called at once


def _opens(job: JobState) -> bool:
    try:
        job.opened()
    except PenstockError:
        return False
    return True


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the jobs whose results were opened the plain way."""
    ids: list[str] = []

    def open_outcome(job_id: str, record: JobRecord, keyring: Keyring) -> Any:
        ids.append(job_id)
        return plain(job_id, record, keyring)

    plain = job_state.open_outcome
    monkeypatch.setattr(job_state, "open_outcome", open_outcome)
    return ids


@pytest.mark.parametrize("keyring", [UNSIGNED, SIGNED, SEALED], ids=["unsigned", "signed", "sealed"])
def test_one_header_of_a_kind_is_decoded(keyring: Keyring, opened: list[str]):
    """Ids and times may differ. Batches of two sizes and results of two workers do not disturb each other."""
    policy = ResultPolicy(keyring, ttl_s=86_400)
    kinds: list[dict[str, Any]] = [{}, {"batch_size": 4}, {"worker": "cpu1@host"}, {"content_digest": b"a" * 32}]
    for number, job_id in enumerate(IDS[:4] * 5):
        for changes in kinds:
            timings = Timings(number / 3, number / 7, float(number))
            job = job_of(policy, job_id, sealed_by(keyring, job_id, timings=timings, **changes))
            assert job.outputs()["y"].tolist() == [[0, 1, 2, 3]]
            if number == 19:
                assert opened == [IDS[0]] * 4
                assert job.opened().info().compute_ms == 19
                opened.clear()
                opened += [IDS[0]] * 4


def test_a_result_of_a_known_kind_must_be_signed_for_its_job(opened: list[str]):
    """Each of these differs from a known good result in one thing; the plain way refuses it."""
    policy = ResultPolicy(SIGNED, ttl_s=86_400)
    job_of(policy, IDS[0], sealed_by(SIGNED)).outputs()
    good = sealed_by(SIGNED, IDS[1])
    assert job_of(policy, IDS[1], good).outputs()["y"].shape == (1, 4)
    assert opened == [IDS[0]]
    size = int.from_bytes(good[4:8], "little")
    text = good[: 8 + size].replace(b"\x93\xcb", b"\x93\xa8") + good[8 + size : -32]
    bad = [
        text + SIGNED.result_macs["a"].digest(text),
        sealed_by(SIGNED, IDS[1], body=bytes(12)),
        sealed_by(SIGNED, IDS[1], body=bytes(20)),
        good[:-1] + bytes([good[-1] ^ 1]),
        good[:-33] + bytes([good[-33] ^ 1]) + good[-32:],
        sealed_by(FOREIGN, IDS[1]),
        sealed_by(SIGNED, IDS[2]),
        sealed_by(SIGNED, IDS[2]).replace(IDS[2].encode(), IDS[1].encode()),
        sealed_by(SIGNED, IDS[1], context=RequestContext("evil")),
        good[:-40],
        good + b"\x00",
    ]
    for number, sealed in enumerate(bad, 2):
        with pytest.raises(PenstockError):
            job_of(policy, IDS[1], sealed).outputs()
        assert len(opened) == number


@pytest.mark.parametrize("keyring", [SEALED, sealing(UNSIGNED)], ids=["signed", "unsigned"])
def test_a_sealed_result_of_a_known_kind_must_open(keyring: Keyring, opened: list[str]):
    """Its signature may be good: a body that was moved, changed, cut, or sealed with another key is refused."""
    policy = ResultPolicy(keyring, ttl_s=86_400)
    job_of(policy, IDS[0], sealed_by(keyring)).outputs()
    good = sealed_by(keyring, IDS[1])
    assert job_of(policy, IDS[1], good).outputs()["y"].tolist() == [[0, 1, 2, 3]]
    assert opened == [IDS[0]]
    size = 8 + int.from_bytes(good[4:8], "little")
    body = good[size : len(good) - (32 if keyring.signs else 0)]
    flipped = [body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :] for at in range(len(body))]
    bad = [
        moved_body(good, sealed_by(keyring, IDS[0]), keyring),
        moved_body(good, sealed_by(sealing(keyring, OTHER_DATA_KEY), IDS[1]), keyring),
        *(moved_body(good, good[:size] + each + good[size + len(body) :], keyring) for each in flipped),
        sealed_by(replace(keyring, seals=False), IDS[1]),
        moved_body(good, good[:size] + bytes(len(body)) + good[size + len(body) :], keyring),
        good[: size + 5],
    ]
    for number, sealed in enumerate(bad, 2):
        with pytest.raises(PenstockError):
            job_of(policy, IDS[1], sealed).outputs()
        assert len(opened) == number


def test_an_unsigned_result_must_have_the_bytes_of_its_output():
    """Fewer or more of them fit no tensor."""
    policy = ResultPolicy(UNSIGNED, ttl_s=86_400)
    job_of(policy, IDS[0], sealed_by(UNSIGNED)).outputs()
    for size in (0, 12, 20):
        with pytest.raises(UndecodableEnvelope):
            job_of(policy, IDS[1], sealed_by(UNSIGNED, IDS[1], body=bytes(size))).outputs()


def test_a_known_result_of_another_tenant_is_missing():
    """A client that serves two tenants knows the headers of both."""
    policy = ResultPolicy(SIGNED, ttl_s=86_400)
    own, other = (sealed_by(SIGNED, IDS[1], context=RequestContext(tenant)) for tenant in ("acme", "rival"))
    rival = JobState(IDS[1], "rival", policy, awaits_reply=False, record=JobRecord(State.COMPLETED, "", other))
    for _ in range(2):
        assert rival.outputs()["y"].shape == job_of(policy, IDS[1], own).outputs()["y"].shape
        with pytest.raises(UnknownJob):
            job_of(policy, IDS[1], other).outputs()


def test_an_unsigned_header_is_nothing_to_a_reader_with_keys():
    """Whatever was learnt."""
    matcher = ResultMatcher(SIGNED)
    sealed = sealed_by(UNSIGNED)
    matcher.learn(open_result(sealed, UNSIGNED)[0], sealed)
    assert matcher._layouts
    assert matcher.answer(IDS[0], "acme", sealed) is None


def test_a_header_of_another_writer_is_decoded_each_time(opened: list[str]):
    """It has a field that this release does not know, so that nothing is said about where its bytes are."""
    policy = ResultPolicy(UNSIGNED, ttl_s=86_400)
    known = sealed_by(UNSIGNED)
    size = int.from_bytes(known[4:8], "little")
    header = msgspec.msgpack.encode({**msgspec.msgpack.decode(known[8 : 8 + size]), "new": b"\xa7timings\x93" * 4})
    sealed = known[:4] + len(header).to_bytes(4, "little") + header + known[8 + size :]
    for _ in range(3):
        assert job_of(policy, IDS[0], sealed).outputs()["y"].tolist() == [[0, 1, 2, 3]]
    assert len(opened) == 3


def test_what_is_remembered_is_bounded():
    """In layouts, in headers and in the bytes of a header."""
    policy = ResultPolicy(SIGNED, ttl_s=86_400)
    matcher = policy.matcher
    for number in range(100):
        for size in range(3):
            job_of(policy, IDS[0], sealed_by(SIGNED, worker=f"{number:03d}", batch_size=100**size)).outputs()
    for size in range(40):
        job_of(policy, IDS[0], sealed_by(SIGNED, worker="w" * size)).outputs()
        assert 0 < len(matcher._layouts) <= result_match.MOST_LAYOUTS
        assert all(0 < len(each.headers) <= result_match.MOST_HEADERS for each in matcher._layouts.values())
    known = {size: dict(layout.headers) for size, layout in matcher._layouts.items()}
    job_of(policy, IDS[0], sealed_by(SIGNED, worker="w" * result_match.MOST_HEADER_BYTES)).outputs()
    assert {size: dict(layout.headers) for size, layout in matcher._layouts.items()} == known


def test_a_result_with_a_trace_of_its_own_is_not_learnt():
    """No later result has its header: to remember it would cost more than it could bring."""
    matcher = ResultMatcher(SIGNED)
    traced = RequestContext("acme", "00-" + "1" * 32 + "-" + "2" * 16 + "-01")
    for context, is_learnt in ((traced, False), (RequestContext("acme"), True)):
        sealed = sealed_by(SIGNED, context=context)
        matcher.learn(open_result(sealed, SIGNED)[0], sealed)
        assert bool(matcher._layouts) is is_learnt
