"""What a worker reports about itself, and when that ends."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from penstock.registry.broker.base import Depth
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import Keyring
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.key_reports import key_report
from tests.packages import write_double, write_recorder
from tests.servers import wait_until
from tests.workers.stepped import SteppedHarness, open_harness


class SlowDepths(MemoryBroker):
    """A broker that takes its time to count, once `is_slow` is set, until `may_go` is."""

    def __init__(self, of: MemoryBroker) -> None:
        super().__init__()
        self._state, self._changed = of._state, of._changed
        self.is_slow, self.has_begun, self.may_go = threading.Event(), threading.Event(), threading.Event()

    def depths(self, slot: str) -> list[Depth]:
        if self.is_slow.is_set():
            self.has_begun.set()
            self.may_go.wait(180)
        return super().depths(slot)


def test_a_worker_that_has_stopped_is_not_reported_any_more(
    harness: SteppedHarness, models_root: Path, forward_log: Path
):
    """A report that was under way when the drain wound up does not outlive it."""
    write_recorder(models_root, forward_log)
    worker = harness.start_worker(connect=SlowDepths)
    broker = worker.broker
    assert isinstance(broker, SlowDepths)
    broker.is_slow.set()
    worker.drain.start()
    assert broker.has_begun.wait(180), "a report is under way"
    stopping = threading.Thread(target=worker.drain.stop, args=(1.0,))
    stopping.start()
    wait_until(lambda: "drain" not in [each.name for each in threading.enumerate()], 10, "the drain has wound up")
    broker.may_go.set()
    stopping.join(60)
    assert harness.broker.workers() == []


def test_depth_and_age_of_each_queue_are_metrics(harness: SteppedHarness, models_root: Path):
    """Jobs that wait or run by priority, and for how many seconds the oldest one has waited; none: 0."""
    write_double(models_root)
    worker = harness.start_worker()
    harness.publish("double", 1, 2, priority="high")
    harness.now += 7.0
    harness.publish("double", 3, priority="low")
    worker.drain.leases.tick()

    def by_priority(metric: str) -> dict[str, float]:
        (family,) = [family for family in worker.metrics.collect() if family.name == metric]
        return {sample.labels["priority"]: sample.value for sample in family.samples}

    assert by_priority("penstock_queue_depth") == {"critical": 0, "high": 2, "normal": 0, "low": 1}
    assert by_priority("penstock_queue_age_seconds") == {"critical": 0, "high": 7.0, "normal": 0, "low": 0}


SECRET = base64.b64encode(b"s" * 32).decode()


@pytest.fixture
def signing(models_root: Path) -> Iterator[SteppedHarness]:
    """Two models, and workers with two keys."""
    write_double(models_root, "one")
    write_double(models_root, "two")
    yield from open_harness(models_root, signing_keys=f"k1:{SECRET},k2:{SECRET}")


def test_the_names_of_the_signing_keys_are_published(signing: SteppedHarness):
    """In the worker's report and beside the spec of each model, while the worker lives; the keys are in neither."""
    harness = signing
    worker = harness.start_worker()
    worker.drain.leases.tick()
    names = harness.settings.keyring.names
    published = (key_report(worker.drain.name, harness.settings.keyring),)
    assert {model: harness.broker.announced(model).key_reports for model in ("one", "two")} == {
        "one": published,
        "two": published,
    }
    (report,) = harness.broker.workers()
    assert json.loads(report)["keys"] == [[name.id, name.fingerprint] for name in names]
    assert SECRET.encode() not in report + published[0]
    harness.pass_time(60)
    assert harness.broker.announced("one").key_reports == published
    worker.drain.parts.status.withdraw()
    assert harness.broker.announced("one").key_reports == ()


def test_a_worker_without_keys_says_so(harness: SteppedHarness, models_root: Path):
    """Then a client that signs learns that no job of its would be accepted; a dead worker says nothing."""
    write_double(models_root)
    worker = harness.start_worker()
    worker.drain.leases.tick()
    assert harness.broker.announced("double").key_reports == (key_report(worker.drain.name, Keyring.parse(None)),)
    harness.suspend(worker)
    harness.pass_time(16)
    assert harness.broker.announced("double").key_reports == ()


def _announced(harness: SteppedHarness, model: str) -> tuple[bool, bool, int]:
    """Whether the broker has the spec and that of version 1, and how many workers' keys it knows."""
    broker = harness.broker
    return broker.spec(model) is not None, broker.spec(model, "1") is not None, len(broker.announced(model).key_reports)


def test_everything_is_announced_again_to_a_broker_that_comes_back_empty(harness: SteppedHarness, models_root: Path):
    """At the next report, a second later: specs, names of keys and the report; and the next job is answered."""
    write_double(models_root)
    harness.start_worker()
    harness.pass_time(3)
    harness.broker.lose_everything()
    harness.pass_time(1.25)
    assert _announced(harness, "double") == (True, True, 1)
    assert harness.broker.models() == ["double"]
    assert len(harness.broker.workers()) == 1
    (job,) = harness.publish("double", 3.0)
    harness.pass_time(1)
    worker = harness.workers[0]
    if (work := worker.begin()) is not None:
        worker.end(work)
    assert harness.answer(job) == 6.0


def test_an_older_copy_of_the_broker_gets_the_present_specs(harness: SteppedHarness, models_root: Path):
    """The copy is from before the worker: what it has of another worker is replaced."""
    write_double(models_root)
    harness.broker.put_spec("double", b"older")
    saved = harness.broker.save()
    harness.start_worker()
    harness.pass_time(3)
    present = harness.broker.spec("double")
    harness.broker.restore(saved)
    assert harness.broker.spec("double") == b"older"
    harness.pass_time(1.25)
    assert harness.broker.spec("double") == present != b"older"


def test_a_single_lost_spec_is_announced_again(harness: SteppedHarness, models_root: Path):
    """Within 5 s, without a sign that data were lost. What is there stays as it is."""
    write_double(models_root)
    harness.start_worker()
    harness.pass_time(3)
    specs = harness.broker._state.specs
    del specs["double", "1"]
    specs["double", ""] = b"of a newer worker"
    harness.pass_time(5)
    assert ("double", "1") in specs
    assert specs["double", ""] == b"of a newer worker"
    del specs["double", ""]
    harness.pass_time(5)
    assert ("double", "") in specs


class DyingBroker(MemoryBroker):
    """A broker that fails at the announcements of a renewal, as long as `is_down`."""

    is_down = False

    def __init__(self, of: MemoryBroker) -> None:
        super().__init__(of._state.clock)
        self._state, self._changed = of._state, of._changed

    def announce(self, slot: str, spec: bytes, versions: Mapping[str, bytes], *, replaces: bool) -> None:
        if self.is_down:
            raise BrokerUnavailable("away")
        super().announce(slot, spec, versions, replaces=replaces)


def test_a_renewal_that_fails_is_repeated_in_full(harness: SteppedHarness, models_root: Path):
    """The broker forgets, and goes away during the renewal: the next report replaces what an older copy brought."""
    write_double(models_root)
    harness.broker.put_spec("double", b"older")
    saved = harness.broker.save()
    worker = harness.start_worker(connect=DyingBroker)
    assert isinstance(worker.broker, DyingBroker)
    harness.pass_time(3)
    harness.broker.restore(saved)
    worker.broker.is_down = True
    harness.pass_time(3)
    worker.broker.is_down = False
    harness.pass_time(1.5)
    assert harness.broker.spec("double") not in (None, b"older")
