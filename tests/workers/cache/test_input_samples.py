"""Samples of inputs: jobs that are called new are equal to none before them."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.broker.base import Delivery
from penstock.registry.envelope import JobHeader
from penstock.registry.queues import Priority, new_job_id
from penstock.workers.cache import InputSamples
from penstock.workers.job import ClaimedJob


def job(body: bytes | memoryview) -> ClaimedJob:
    """A claimed job with these inputs."""
    header = JobHeader(new_job_id("m"), "acme", "m", "normal", ())
    return ClaimedJob(Delivery("m", Priority.NORMAL, b"1-1", b""), header, body, 1, 0.0, 0.0, 0)


def test_equal_inputs_are_new_once():
    """Also as a view of other bytes, and twice in one claim, whose other jobs are remembered with them."""
    samples = InputSamples(100)
    assert samples.are_new([job(b"one"), job(b"two")])
    assert not samples.are_new([job(memoryview(b"a one")[2:])])
    assert not samples.are_new([job(b"three"), job(b"three")])
    assert not samples.are_new([job(b"four"), job(b"two")])
    assert not samples.are_new([job(b"four")])
    assert samples.are_new([job(b"five")])


@given(st.lists(st.binary(max_size=200), max_size=30), st.integers(1, 5))
def test_no_equal_inputs_are_called_new(bodies: list[bytes], size: int):
    """In claims of any size, as long as the generation lasts."""
    samples, before = InputSamples(1000), set[bytes]()
    for at in range(0, len(bodies), size):
        claim = bodies[at : at + size]
        if samples.are_new([job(body) for body in claim]):
            assert before.isdisjoint(claim)
            assert len({*claim}) == len(claim)
        before.update(claim)


def test_samples_tell_vectors_apart():
    """Of 384 floats a few bytes are enough."""
    samples = InputSamples(10_000)
    vectors = [struct.pack("<384f", *(number * 0.1 + at for at in range(384))) for number in range(200)]
    assert all(samples.are_new([job(vector)]) for vector in vectors)


@pytest.mark.parametrize("generation", [1, 10])
def test_what_was_seen_is_forgotten_after_two_generations(generation: int):
    """Memory is bounded; what is remembered lasts for one generation at least."""
    samples = InputSamples(generation)
    assert samples.are_new([job(b"first")])
    for number in range(generation):
        assert samples.are_new([job(b"%d" % number)])
    assert not samples.are_new([job(b"first")])
    for number in range(3 * generation + 3):
        samples.are_new([job(b"later %d" % number)])
    assert samples.are_new([job(b"first")])
    assert len(samples._newer) + len(samples._older) <= 2 * (generation + 1)
