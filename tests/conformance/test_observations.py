"""What workers have counted of an experiment: the last totals of each field, until their time is over."""

from __future__ import annotations

from penstock.registry.broker.base import Broker, Rating
from penstock.safety.arm_figures import read_ratings
from penstock.safety.statistics import Moments
from tests.conformance.conftest import Brokerage
from tests.conformance.jobs import claim, commit_of, publish, settle

TTL_MS = 60_000


def test_last_totals_of_each_field_are_kept(broker: Broker, slot: str):
    """A repeated write changes nothing, a later one replaces the earlier, and experiments are apart."""
    assert broker.observations(slot, "e-1") == {}
    for figures in (b"1", b"2", b"2"):
        broker.observe(slot, "e-1", "7 w0:a", figures, TTL_MS)
    broker.observe(slot, "e-1", "7 w1:b", b"\x00\xff", TTL_MS)
    broker.observe(slot, "e-2", "7 w0:a", b"other", TTL_MS)
    assert broker.observations(slot, "e-1") == {"7 w0:a": b"2", "7 w1:b": b"\x00\xff"}
    assert broker.observations(slot, "e-2") == {"7 w0:a": b"other"}


def test_totals_expire_after_the_last_write(brokerage: Brokerage, broker: Broker, slot: str):
    """An experiment that is over leaves nothing behind: the last write says for how long all is kept."""
    broker.observe(slot, "e-1", "7 w0:a", b"1", TTL_MS)
    broker.observe(slot, "e-1", "7 w1:b", b"1", 50)
    brokerage.elapse(100)
    assert broker.observations(slot, "e-1") == {}


def test_quality_of_a_job_counts_once_for_its_arm(brokerage: Brokerage, broker: Broker, slot: str):
    """A repeated report changes nothing, a job that has not ended or is unknown counts nothing; the sums are exact."""
    qualities = (0.5, -1.25, 3e9)
    jobs = publish(broker, slot, len(qualities))
    assert broker.rate(jobs[0], "e-1", "1", 0.5) is Rating.UNKNOWN
    settle(broker, "w0", *(commit_of(each, b"answer") for each in claim(broker, "w0", slot)))
    for job, quality in zip(jobs, qualities, strict=True):
        assert broker.rate(job, "e-1", "1", quality) is Rating.COUNTED
        assert broker.rate(job, "e-1", "2", 100.0) is Rating.REPEATED
    assert broker.rate(f"{slot}.00000000-0000-7000-8000-000000000000", "e-1", "1", 1.0) is Rating.UNKNOWN
    found = read_ratings(broker.ratings(slot, "e-1"))
    assert list(found) == ["1"]
    expected = Moments.of(qualities)
    assert (found["1"].count, found["1"].mean, found["1"].m2) == (3, expected.mean, expected.m2)
    assert broker.ratings(slot, "e-2") == {}
    record = broker.job_record(jobs[0])
    assert record is not None
    assert record.result == b"answer"
