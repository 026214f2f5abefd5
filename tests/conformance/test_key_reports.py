"""The names of the workers' signing keys: read with the spec, gone with the worker."""

from __future__ import annotations

from penstock.registry.broker.base import Announced, Broker
from tests.conformance.conftest import Brokerage


def test_reports_are_read_with_the_spec(brokerage: Brokerage, broker: Broker, slot: str):
    """Each live worker has one, and it may be repeated; other models have their own."""
    assert broker.announced(slot) == Announced(None, ())
    broker.put_spec(slot, b'{"name": 1}')
    assert broker.announced(slot) == Announced(b'{"name": 1}', ())
    for report in (b'["w1",[]]', b'["w2",[["k", "12"]]]', b'["w1",[]]'):
        brokerage.connect().report_keys(slot, report, 60_000)
    spec, reports = broker.announced(slot)
    assert (spec, sorted(reports)) == (b'{"name": 1}', [b'["w1",[]]', b'["w2",[["k", "12"]]]'])
    assert broker.announced(f"{slot}-b") == Announced(None, ())


def test_a_worker_withdraws_its_report(broker: Broker, slot: str):
    """The reports of others stay; to withdraw twice changes nothing."""
    broker.report_keys(slot, b"one", 60_000)
    broker.report_keys(slot, b"two", 60_000)
    for _ in range(2):
        broker.report_keys(slot, b"one", 60_000, is_live=False)
        assert broker.announced(slot).key_reports == (b"two",)
    broker.report_keys(slot, b"two", 60_000, is_live=False)
    assert broker.announced(slot).key_reports == ()


def test_the_report_of_a_dead_worker_goes(brokerage: Brokerage, broker: Broker, slot: str):
    """It is dropped after its time, when another worker reports, and with the last one."""
    broker.report_keys(slot, b"dead", 100)
    brokerage.elapse(120)
    broker.report_keys(slot, b"live", 200)
    assert broker.announced(slot).key_reports == (b"live",)
    brokerage.elapse(220)
    assert broker.announced(slot).key_reports == ()
