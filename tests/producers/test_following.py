"""The jobs of other processes that one call waits for: when the broker is told of them."""

from __future__ import annotations

from penstock.producers.following import FOLLOW_TTL_MS, Follower


def test_the_broker_is_told_at_once_and_before_it_forgets():
    """Two renewals may fail. A job that comes later does not wait for the renewal of the others."""
    follower = Follower(["m.a", "m.b"])
    assert follower.due(5.0) == ["m.a", "m.b"]
    follower.told(["m.a", "m.b"], 5.0)
    assert not follower.is_due(5.0)
    follower.add("m.c")
    assert follower.is_due(5.0)
    assert follower.due(5.0) == ["m.c"]
    assert follower.due(5.0 + FOLLOW_TTL_MS / 3000) == ["m.a", "m.b", "m.c"]


def test_only_jobs_that_the_broker_knows_of_are_withdrawn():
    """A job that has ended needs no call, nor does one of which the broker was never told."""
    follower = Follower(["m.a", "m.b"])
    follower.told(["m.a", "m.b"], 5.0)
    follower.add("m.c")
    follower.drop("m.a")
    assert follower.take_told() == ["m.b"]
    assert follower.take_told() == []
    assert Follower().id != Follower().id
