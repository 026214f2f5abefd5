"""Orders and pairs of a shadow: who is sampled, who signed, and what travels. SH-005, AR-088."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.envelope import Keyring, open_event, open_result
from penstock.registry.errors import BadSeal, BadSignature, Corrupt, InvalidInput, UndecodableEnvelope
from penstock.registry.queues import new_job_id
from penstock.registry.shadow import Sample, ShadowOrder, ShadowPair
from penstock.safety.operator_key import OperatorKey, PublicKeys
from tests.payload_keys import sealing
from tests.workers.shadow.pairs import UNSIGNED, order_of, pair_of

SIGNED = Keyring.parse(f"first:{base64.b64encode(b'1' * 32).decode()}")


def test_an_order_reaches_workers_unchanged():
    """What was sealed is opened, field by field."""
    order = order_of("mlp", share=0.25, max_pairs=7, pair_ttl_ms=1234, candidate_hash="a" * 64)
    assert ShadowOrder.open(order.seal(), "mlp") == order


def test_an_order_needs_the_operators_signature(tmp_path: Path):
    """Unsigned, signed by another key, changed, or copied to another model: workers refuse it."""
    key, other = OperatorKey.generate(tmp_path / "a.pem"), OperatorKey.generate(tmp_path / "b.pem")
    order = order_of("mlp")
    verify = PublicKeys.parse(key.public_text).verify
    assert ShadowOrder.open(order.seal(key.sign), "mlp", verify) == order
    changed = order.seal(key.sign).replace(b'"share":1.0', b'"share":0.5')
    for record in (order.seal(), order.seal(other.sign), changed):
        with pytest.raises(BadSignature):
            ShadowOrder.open(record, "mlp", verify)
    with pytest.raises(BadSignature):
        ShadowOrder.open(order.seal(key.sign), "other", verify)


@pytest.mark.parametrize(
    "record", [b"", b"no line", b"\n", b"\n{}", b"\n[1]", b"\n" + b"x" * 5000, b'\n{"id":"1","model":"mlp"}']
)
def test_other_bytes_are_no_order(record: bytes):
    """They are refused as corrupt: a worker that reads them goes on."""
    with pytest.raises(Corrupt):
        ShadowOrder.open(record, "mlp")


def test_an_order_with_values_out_of_range_is_refused_when_it_is_read():
    """A process of another version may have written it."""
    record = order_of("mlp").seal().replace(b'"share":1.0', b'"share":7.0')
    with pytest.raises(UndecodableEnvelope, match="share"):
        ShadowOrder.open(record, "mlp")


@pytest.mark.parametrize("share", [0.0, -0.1, 1.0001, float("nan"), float("inf")])
def test_a_share_out_of_range_is_refused(share: float):
    """The message says what is expected."""
    with pytest.raises(InvalidInput, match="above 0 and up to 1"):
        order_of("mlp", share=share)


@pytest.mark.parametrize("name", ["max_pairs", "max_bytes", "pair_ttl_ms"])
def test_a_cap_of_nothing_is_refused(name: str):
    """The message names the value."""
    with pytest.raises(InvalidInput, match=name):
        order_of("mlp", **{name: 0})


def test_an_order_ends_by_itself():
    """A signed order of an earlier time that somebody puts back has no effect."""
    order = order_of("mlp", until_ms=1000)
    assert not order.is_over(999.9)
    assert order.is_over(1000)


def test_the_sample_has_its_share_and_is_the_same_everywhere():
    """10 % of 20,000 jobs, within five standard deviations; a second worker takes the same jobs."""
    order = order_of("mlp", share=0.1)
    ids = [new_job_id("mlp") for _ in range(20_000)]
    taken = list(filter(Sample(order).__contains__, ids))
    assert abs(len(taken) - 2000) < 5 * (20_000 * 0.1 * 0.9) ** 0.5
    again = Sample(ShadowOrder.open(order.seal(), "mlp"))
    assert [ids[place] for place in again.places(ids)] == taken


IDS = {
    "counted": lambda number: f"mlp.{number}",
    "hexadecimal": lambda number: f"mlp.{number:x}",
    "of a day": lambda number: f"mlp.2026-11-{number // 1000:02d}_{number % 1000:04d}",
    "of an order": lambda number: f"mlp.order-{number // 100}:{number % 100}",
}


@pytest.mark.parametrize("kind", IDS)
def test_ids_that_clients_count_are_sampled_alike(kind: str):
    """Their characters differ little, and still the sample has its share, whatever the order."""
    ids = [*map(IDS[kind], range(20_000))]
    for name in map(str, range(20)):
        order = ShadowOrder(name, "mlp", "1", 0.1, 10**13)
        assert abs(len(Sample(order).places(ids)) - 2000) < 5 * (20_000 * 0.1 * 0.9) ** 0.5


def test_another_shadow_samples_other_jobs():
    """The id of the order salts the sample: one job in a hundred is in both, not one in ten."""
    ids = [new_job_id("mlp") for _ in range(20_000)]
    first, second = (set(Sample(order_of("mlp", share=0.1)).places(ids)) for _ in range(2))
    assert len(first & second) < 400


def test_a_larger_share_keeps_the_jobs_of_a_smaller_one():
    """The hash is compared with the share, so samples are nested."""
    order = order_of("mlp", share=0.05)
    larger = ShadowOrder(order.id, "mlp", "1", 0.5, order.until_ms)
    ids = [new_job_id("mlp") for _ in range(5000)]
    assert set(Sample(order).places(ids)) < set(Sample(larger).places(ids))


def test_a_share_of_one_takes_every_job():
    """Also the one with the largest hash."""
    everything = Sample(order_of("mlp"))
    assert all(new_job_id("mlp") in everything for _ in range(1000))


@pytest.mark.parametrize("keyring", [UNSIGNED, SIGNED, sealing(SIGNED)], ids=["plain", "signed", "sealed"])
def test_a_pair_has_both_sides_of_a_job(keyring: Keyring):
    """Inputs as they were received and outputs as they were served, joined by the id of the job."""
    order = order_of("mlp")
    pair = ShadowPair.open(pair_of(order, 5.0, keyring=keyring), keyring)
    assert pair.inputs["x"].tolist() == [[5, 1, 2, 3]]
    assert pair.outputs["y"].tolist() == [[10, 2, 4, 6]]
    assert (pair.header.shadow, pair.header.version) == (order.id, "2")


def test_a_sealed_pair_shows_nothing_of_its_inputs():
    """The bytes of the row are in the plain pair, and not in the sealed one."""
    row = np.array([[5, 1, 2, 3]], np.float32).tobytes()
    assert row in pair_of(order_of("mlp"), 5.0)
    assert row not in pair_of(order_of("mlp"), 5.0, keyring=sealing(SIGNED))


def test_a_reader_that_seals_refuses_a_plain_pair():
    """As for jobs and results: who may write to the broker could otherwise feed the comparison."""
    with pytest.raises(BadSeal):
        ShadowPair.open(pair_of(order_of("mlp"), keyring=SIGNED), sealing(SIGNED))


def test_a_pair_passes_for_nothing_else():
    """The kind is part of what is signed."""
    sealed = pair_of(order_of("mlp"), keyring=SIGNED)
    for open_other in (open_result, open_event):
        with pytest.raises(UndecodableEnvelope):
            open_other(sealed, SIGNED)
        with pytest.raises(Corrupt):
            open_other(sealed[:3] + (b"R" if open_other is open_result else b"E") + sealed[4:], SIGNED)


@given(st.data())
def test_a_changed_pair_is_refused(data: st.DataObject):
    """Each bit of a signed pair matters."""
    sealed = bytearray(pair_of(order_of("mlp"), keyring=SIGNED))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Corrupt):
        ShadowPair.open(bytes(sealed), SIGNED)


def test_a_pair_that_claims_more_inputs_than_bytes_is_refused():
    """The header is not trusted without its body."""
    order = order_of("mlp")
    pair = ShadowPair.open(pair_of(order), UNSIGNED)
    wrong = ShadowPair(pair.header, b"", b"").seal(UNSIGNED)
    with pytest.raises(UndecodableEnvelope, match="claims"):
        ShadowPair.open(wrong, UNSIGNED)
