"""A sample of served jobs: bounded, even, and not to be chosen without its seed (AR-061)."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.tensors import Array
from penstock.safety.golden_store import GoldenStore


def job(rows: int = 1, value: float = 1.0) -> tuple[dict[str, Array], dict[str, Array]]:
    return {"x": np.full((rows, 8), value, np.float32)}, {"y": np.full((rows, 2), value * 2, np.float32)}


def offered(store: GoldenStore, job_ids: list[str], rows: int = 1) -> None:
    for job_id in job_ids:
        if store.wants(job_id):
            store.offer(job_id, *job(rows))


IDS = st.lists(st.uuids().map(lambda number: f"minilm.{number}"), unique=True, max_size=200)


@given(IDS, st.integers(1, 16), st.randoms(use_true_random=False))
def test_same_jobs_give_the_same_sample_in_whatever_order(job_ids: list[str], size: int, shuffle):
    """The ids and the seed alone decide, not the order in which jobs came."""
    one, other = GoldenStore(max_jobs=size), GoldenStore(max_jobs=size)
    offered(one, job_ids)
    shuffle.shuffle(job_ids)
    offered(other, job_ids)
    assert [golden.job_id for golden in one.goldens()] == [golden.job_id for golden in other.goldens()]
    assert len(one) == min(size, len(job_ids))


def test_who_chooses_ids_does_not_choose_the_sample():
    """Of ids that were picked to be kept by one seed, another keeps no more than of any others."""
    picked = GoldenStore(max_jobs=64)
    offered(picked, [f"minilm.{number:032x}" for number in range(6400)])
    store = GoldenStore(max_jobs=64, seed=0x5EED_5EED)
    offered(store, [golden.job_id for golden in picked.goldens()])
    offered(store, [f"minilm.{number:032x}" for number in range(6400, 12_800)])
    assert sum(int(golden.job_id.partition(".")[2], 16) < 6400 for golden in store.goldens()) < 16


@given(IDS, st.integers(40, 2000))
def test_bytes_stay_within_their_bound(job_ids: list[str], max_bytes: int):
    """However many jobs come, and what is counted is what is held."""
    store = GoldenStore(max_bytes=max_bytes)
    for number, job_id in enumerate(job_ids):
        if store.wants(job_id):
            store.offer(job_id, *job(rows=1 + number % 5))
    kept = store.goldens()
    held = sum(values.nbytes for one in kept for values in (*one.inputs.values(), *one.outputs.values()))
    assert held == store.nbytes <= max_bytes


def test_sample_is_even_over_time():
    """Early jobs and late ones are kept alike: not the first 64, nor the last."""
    store = GoldenStore(max_jobs=64)
    job_ids = [f"minilm.{number:032x}" for number in range(6400)]
    offered(store, job_ids)
    early = sum(int(golden.job_id.partition(".")[2], 16) < 3200 for golden in store.goldens())
    assert len(store) == 64
    assert 16 <= early <= 48


def test_few_are_wanted_once_the_sample_is_full():
    """After ten thousand jobs hardly one in a hundred is even looked at."""
    store = GoldenStore(max_jobs=64)
    offered(store, [f"minilm.{number:032x}" for number in range(10_000)])
    assert sum(store.wants(f"minilm.{number:032x}") for number in range(10_000, 20_000)) < 150


def test_copies_are_kept_and_cannot_be_written_to():
    """What a model does to its inputs later, or a batch to its outputs, does not reach a golden."""
    store = GoldenStore()
    inputs, outputs = job(value=1.0)
    assert store.offer("minilm.1", inputs, outputs)
    inputs["x"][:] = outputs["y"][:] = 9
    (golden,) = store.goldens()
    assert golden.inputs["x"][0, 0] == 1
    assert golden.outputs["y"][0, 0] == 2
    with pytest.raises(ValueError, match="read-only"):
        golden.inputs["x"][0, 0] = 5


def test_job_is_kept_once():
    """A job that runs twice after a crash is no second proof."""
    store = GoldenStore()
    assert store.offer("minilm.1", *job())
    assert not store.offer("minilm.1", *job())
    assert len(store) == 1


def test_huge_job_is_no_sample():
    """One job may not take the room of eight."""
    store = GoldenStore(max_bytes=8 * 40)
    assert not store.offer("minilm.1", *job(rows=2))
    assert store.offer("minilm.2", *job(rows=1))


def test_text_counts_by_its_bytes():
    """Text is measured as it is sent, not as pointers."""
    store = GoldenStore()
    store.offer("minilm.1", {"text": np.array(["äö", "abc"], object)}, {})
    assert store.nbytes == 7


def test_cleared_store_begins_anew():
    """After a clear everything is wanted again."""
    store = GoldenStore(max_jobs=1)
    offered(store, [f"minilm.{number}" for number in range(50)])
    store.clear()
    assert (len(store), store.nbytes) == (0, 0)
    assert all(store.wants(f"minilm.{number}") for number in range(50))


def test_job_that_was_pushed_out_leaves_no_gap_for_later_ones():
    """Room that a large job left is not given to a small one of a higher hash: the sample would lean to the late."""
    job_ids = sorted((f"minilm.{number}" for number in range(12)), key=lambda job_id: zlib.crc32(job_id.encode()))
    store = GoldenStore(max_bytes=320)
    *low, pushed_out, later = job_ids
    for job_id in (*low[:7], pushed_out):
        assert store.offer(job_id, {"x": np.zeros(40, np.uint8)}, {})
    assert store.offer(low[7], {"x": np.zeros(30, np.uint8)}, {})
    assert pushed_out not in [golden.job_id for golden in store.goldens()]
    assert store.nbytes == 310
    assert not store.wants(later)
    assert not store.offer(later, {"x": np.zeros(8, np.uint8)}, {})
