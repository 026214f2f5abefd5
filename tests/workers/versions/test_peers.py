"""The versions that other workers report, and when a version counts as being at no worker."""

from __future__ import annotations

import json

import pytest

from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.errors import BrokerUnavailable
from penstock.workers.versions.peers import Peers

MODEL = "scale"
HASH = "ab12cd" + "0" * 58


class Reports(MemoryBroker):
    """A broker under the clock of the test: it counts the readings of reports, and may refuse them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.readings = 0
        self.may_be_read = True
        super().__init__(self.clock)

    def clock(self) -> float:
        return self.now

    def workers(self) -> list[bytes]:
        self.readings += 1
        if not self.may_be_read:
            raise BrokerUnavailable("The broker refuses to work: NOPERM")
        return super().workers()

    def put(self, worker: str, *, is_ready: bool = True, **labels: bool) -> None:
        """A worker reports its versions, and whether it offers each to jobs that name it."""
        versions = {label: {"content_hash": HASH, "is_offered": offered} for label, offered in labels.items()}
        report = {"name": worker, "ready": is_ready, "versions": {MODEL: versions}}
        self.report(worker, json.dumps(report).encode(), 3_600_000)


@pytest.fixture
def broker() -> Reports:
    """A broker without reports."""
    return Reports()


@pytest.fixture
def peers(broker: Reports) -> Peers:
    """The other workers, as the worker `here` sees them."""
    return Peers(broker, "here", broker.clock)


def look_after(broker: Reports, peers: Peers, *seconds: float) -> None:
    """Look at the reports after each of these pauses."""
    for pause in seconds:
        broker.now += pause
        peers.look()


def test_a_version_is_found_by_label_or_content(broker: Reports, peers: Peers):
    """Six or more digits of the content hash stand for the version; the answer is its label."""
    broker.put("there", v1=True)
    peers.look()
    assert [peers.label_of(MODEL, wanted) for wanted in ("v1", HASH, HASH[:6])] == ["v1"] * 3
    assert [peers.label_of(MODEL, wanted) for wanted in (HASH[:5], "v2", "")] == [""] * 3
    assert peers.label_of("other", "v1") == ""


def test_only_ready_other_workers_count(broker: Reports, peers: Peers):
    """The own report, that of a worker that is not ready, and versions that are not offered are left out."""
    broker.put("here", v1=True)
    broker.put("starting", is_ready=False, v2=True)
    broker.put("there", v3=False, v4=True)
    peers.look()
    assert peers.labels(MODEL) == {"v4"}
    assert peers.labels("other") == set()


def test_reports_are_read_once_a_second(broker: Reports, peers: Peers):
    """A worker looks at every turn of its loop; a second after the last reading the reports are read again."""
    for _ in range(9):
        peers.look()
        broker.now += 0.25
    assert broker.readings == 3


def test_a_version_without_a_report_is_no_longer_offered(broker: Reports, peers: Peers):
    """A worker that stopped withdraws its report: the next reading forgets its versions."""
    broker.put("there", v1=True)
    peers.look()
    broker.report("there", b"", 0)
    look_after(broker, peers, 1.0)
    assert peers.label_of(MODEL, "v1") == ""


def test_a_version_is_nowhere_after_three_seconds_of_search(broker: Reports, peers: Peers):
    """The time counts from the first search for it, not from the first reading."""
    peers.look()
    look_after(broker, peers, 1.0, 1.0, 1.0, 1.0)
    assert not peers.is_nowhere(MODEL, "v1"), "no job has named it"
    assert peers.label_of(MODEL, "v1") == ""
    look_after(broker, peers, 1.0, 1.0)
    peers.label_of(MODEL, "v1")
    assert not peers.is_nowhere(MODEL, "v1")
    look_after(broker, peers, 1.0)
    assert peers.is_nowhere(MODEL, "v1")
    assert not peers.is_nowhere(MODEL, "v2")


def test_a_reported_version_is_searched_afresh_when_it_is_lost(broker: Reports, peers: Peers):
    """Its earlier search does not count: a report ended that search."""
    peers.look()
    peers.label_of(MODEL, "v1")
    broker.put("there", v1=True)
    look_after(broker, peers, 1.0)
    broker.report("there", b"", 0)
    look_after(broker, peers, 1.0)
    peers.label_of(MODEL, "v1")
    look_after(broker, peers, 1.0)
    assert not peers.is_nowhere(MODEL, "v1")


@pytest.mark.parametrize(("pause_s", "counts"), [(2.5, True), (2.75, False)])
def test_a_search_ends_when_no_reports_were_read(broker: Reports, peers: Peers, pause_s: float, counts: bool):
    """A worker that did not look for more than 2.5 s may have missed a report: the search begins again."""
    peers.look()
    peers.label_of(MODEL, "v1")
    look_after(broker, peers, pause_s)
    peers.label_of(MODEL, "v1")
    look_after(broker, peers, 1.0)
    assert peers.is_nowhere(MODEL, "v1") is counts


def test_unreadable_reports_say_nothing(broker: Reports, peers: Peers, caplog: pytest.LogCaptureFixture):
    """While the broker refuses, no version is at another worker and none is nowhere; the log has the reason."""
    broker.put("there", v1=True)
    peers.look()
    assert (peers.label_of(MODEL, "v1"), peers.label_of(MODEL, "v2")) == ("v1", "")
    broker.may_be_read = False
    look_after(broker, peers, 1.0, 1.0, 1.0)
    assert peers.label_of(MODEL, "v1") == ""
    assert not peers.is_nowhere(MODEL, "v2")
    assert "NOPERM" in caplog.text
    broker.may_be_read = True
    look_after(broker, peers, 1.0)
    assert peers.label_of(MODEL, "v1") == "v1"


@pytest.mark.parametrize("report", [b"{", b"[]", b"\xff", b'{"versions": 3}', b'{"versions": {"scale": {"v1": null}}}'])
def test_an_invalid_report_hides_no_other(broker: Reports, peers: Peers, report: bytes):
    """Any client of the broker may write a report."""
    broker.report("a", report, 60_000)
    broker.put("b", v1=True)
    peers.look()
    assert peers.labels(MODEL) == {"v1"}


def test_more_searches_than_the_memory_holds_end_too(broker: Reports, peers: Peers):
    """Jobs may name any version: 2,500 unknown ones are all known to be nowhere in the end, a thousand at a time."""
    peers.look()
    wanted = {f"no-{number}" for number in range(2500)}
    most_at_once = 0
    for _ in range(40):
        for version in sorted(wanted):
            peers.label_of(MODEL, version)
        found = {version for version in wanted if peers.is_nowhere(MODEL, version)}
        most_at_once = max(most_at_once, len(found))
        wanted -= found
        look_after(broker, peers, 1.0)
    assert wanted == set()
    assert most_at_once == 1000


def test_the_largest_limit_of_other_workers_counts(broker: Reports, peers: Peers):
    """The own one, and that of a worker that is not ready, do not. While the broker is away, the last ones hold."""
    for name, is_ready, most in (("here", True, 900), ("a", True, 300), ("b", True, 500), ("c", False, 700)):
        versions = {"v1": {"is_offered": True, "most_tokens": most}}
        report = {"name": name, "ready": is_ready, "versions": {MODEL: versions}}
        broker.report(name, json.dumps(report).encode(), 3_600_000)
    peers.look()
    assert peers.most_tokens(MODEL, "v1") == 500
    assert peers.most_tokens(MODEL, "v2") == peers.most_tokens("other", "v1") == 0
    broker.may_be_read = False
    look_after(broker, peers, 2.0)
    assert peers.most_tokens(MODEL, "v1") == 500
    broker.may_be_read = True
    broker.report("b", b"", 1)
    look_after(broker, peers, 2.0)
    assert peers.most_tokens(MODEL, "v1") == 300
