"""The active version: every claim brings it along as it stands at that moment, and a later decision wins."""

from __future__ import annotations

from penstock.registry.broker.base import Broker
from tests.conformance.conftest import Brokerage
from tests.conformance.jobs import LEASE_MS, claim, held, publish
from tests.servers import wait_until


def test_claims_bring_the_active_version(brokerage: Brokerage, broker: Broker, slot: str):
    """Nothing before the first decision; from a decision on, every kind of claim carries it (IN-001)."""
    publish(broker, slot, 4)
    (before, *_) = claim(broker, "w", slot, credit=1)
    assert before.active == b""
    assert broker.activate(slot, 1, b"first", "1", b"{}")
    (after, *_) = claim(broker, "w", slot, credit=1)
    assert after.active == b"1 first"
    broker.activate(slot, 2, b"second", "2", b"{}")
    broker.release("w", [held(before)])
    assert [each.active for each in broker.take_over("w2", slot, 60_000, 8)] == [b"2 second"]
    brokerage.elapse(LEASE_MS + 10)
    assert {each.active for each in broker.take_over("w2", slot, LEASE_MS, 8)} == {b"2 second"}
    assert broker.actives([slot, f"{slot}-b"]) == {slot: b"2 second", f"{slot}-b": b""}


def test_armed_claim_brings_the_version_of_its_end(brokerage: Brokerage, broker: Broker, slot: str):
    """A worker that has waited for jobs since before a decision hears of it with the first of them."""
    broker.prepare([slot])
    broker.activate(slot, 1, b"first", "1", b"{}")
    broker.arm("w", [slot], 4, 30_000)
    operator = brokerage.connect()
    operator.activate(slot, 2, b"second", "2", b"{}")
    publish(operator, slot, 1)
    delivered = []

    def has_arrived() -> bool:
        delivered.extend(broker.disarm())
        return bool(delivered)

    wait_until(has_arrived, 10, "the armed claim's job")
    assert [each.active for each in delivered] == [b"2 second"]
    operator.close()


def test_the_later_decision_stands_in_any_order_of_arrival(broker: Broker, slot: str):
    """Epochs order decisions: an older one that arrives late changes nothing, its own repetition is confirmed."""
    assert broker.activate(slot, 10, b"tenth", "2", b'{"name": "new"}')
    assert not broker.activate(slot, 9, b"ninth", "1", b'{"name": "old"}')
    assert not broker.activate(slot, 10, b"other", "1", b'{"name": "old"}')
    assert broker.activate(slot, 10, b"tenth", "2", b'{"name": "new"}')
    assert broker.actives([slot])[slot] == b"10 tenth"
    assert broker.spec(slot) == broker.spec(slot, "2") == b'{"name": "new"}'
    assert broker.spec(slot, "1") is None
    assert slot in broker.models()
    broker.put_spec(slot, b'{"name": "of a worker that starts"}')
    assert broker.spec(slot) == b'{"name": "new"}'


def test_versions_have_specs_of_their_own(broker: Broker, slot: str):
    """The spec of a version that jobs may name stands beside the one that answers."""
    broker.put_spec(slot, b'{"version": "1"}')
    broker.put_spec(slot, b'{"version": "0.9"}', "0.9")
    assert broker.spec(slot) == b'{"version": "1"}'
    assert broker.spec(slot, "0.9") == b'{"version": "0.9"}'
    assert broker.spec(slot, "2") is None
