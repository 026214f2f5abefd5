"""A sample of served jobs: bounded, of every stratum, fresh, and not to be chosen without its seed (AR-061)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.tensors import Array
from penstock.safety.golden_store import GoldenStore
from penstock.safety.privacy import InputRedactor


def job(rows: int = 1, value: float = 1.0) -> tuple[dict[str, Array], dict[str, Array]]:
    return {"x": np.full((rows, 8), value, np.float32)}, {"y": np.full((rows, 2), value * 2, np.float32)}


def serve(store: GoldenStore, numbers: range, rows: int = 1) -> int:
    """Offers these jobs, each with other inputs; returns how many were looked at."""
    wanted = 0
    for number in numbers:
        if store.wants(f"minilm.{number:032x}"):
            wanted += 1
            store.offer(f"minilm.{number:032x}", *job(rows, number))
    return wanted


def numbers_of(store: GoldenStore) -> list[int]:
    return [int(golden.job_id.partition(".")[2], 16) for golden in store.goldens()]


def labelled(
    number: int, label: int, classes: int = 4, size: int = 8
) -> tuple[str, dict[str, Array], dict[str, Array]]:
    """A job whose answer is this class."""
    return (
        f"m.{number:032x}",
        {"x": np.full((1, size), number, np.float32)},
        {"y": np.eye(classes, dtype=np.float32)[[label]] * 3},
    )


def test_same_jobs_give_the_same_sample():
    """The jobs, their order and the seed alone decide: there are no random numbers."""
    one, other = GoldenStore(max_jobs=16), GoldenStore(max_jobs=16)
    for store in (one, other):
        serve(store, range(20_000))
    assert numbers_of(one) == numbers_of(other)
    assert len(one) == 16


def test_who_chooses_ids_does_not_choose_the_sample():
    """Of ids that were picked to be looked at with one seed, another seed looks at no more than of any others."""
    full = GoldenStore(max_jobs=1)
    serve(full, range(1))
    picked = [f"m.{number}" for number in range(100_000) if full.wants(f"m.{number}")]
    store = GoldenStore(max_jobs=1, seed=0x5EED_5EED)
    serve(store, range(1))
    assert len(picked) > 300
    assert sum(map(store.wants, picked)) < len(picked) / 32


@given(st.lists(st.integers(1, 5), max_size=200), st.integers(40, 2000))
def test_bytes_stay_within_their_bound(rows: list[int], max_bytes: int):
    """However many jobs come, and what is counted is what is held."""
    store = GoldenStore(max_bytes=max_bytes)
    for number, count in enumerate(rows):
        store.offer(f"m.{number}", *job(count, number))
    kept = store.goldens()
    held = sum(values.nbytes for one in kept for values in (*one.inputs.values(), *one.outputs.values()))
    assert held == store.nbytes <= max_bytes
    assert sum(store.strata.values()) == len(store) == len(kept)
    assert store.rows == sum(golden.rows for golden in kept)


def test_few_are_looked_at_once_the_sample_is_full():
    """Of ten thousand jobs about one in 256."""
    store = GoldenStore(max_jobs=64)
    assert serve(store, range(64)) == 64
    assert 20 <= serve(store, range(64, 10_064)) <= 60


def test_equal_inputs_are_kept_once():
    """A popular input is one sample. When nothing else comes, few jobs are looked at, although the sample is small."""
    store = GoldenStore(max_jobs=4)
    looked_at = 0
    for number in range(10_000):
        if store.wants(f"m.{number}"):
            looked_at += 1
            assert store.offer(f"m.{number}", *job()) is (number == 0)
    assert len(store) == 1
    assert looked_at < 64 + 10_000 / 100


def test_a_rare_class_is_in_the_sample():
    """The answers are of one class in 99 of 100 jobs. The sample has both, and the rare one grows to its share."""
    store = GoldenStore(max_jobs=16)
    for number in range(200_000):
        if store.wants(f"m.{number:032x}"):
            store.offer(*labelled(number, int(number % 100 == 0)))
    strata = {name.partition("#")[2]: count for name, count in store.strata.items()}
    assert strata == {"0": 16 - strata["1"], "1": strata["1"]}
    assert strata["1"] >= 5


def test_sizes_of_inputs_are_strata():
    """Short and long texts are both there, however seldom the long ones are."""
    store = GoldenStore(max_jobs=8)
    for number in range(100_000):
        if store.wants(f"m.{number:032x}"):
            store.offer(*labelled(number, 0, size=200 if number % 50 == 0 else 8))
    assert {name.partition(" ")[0] for name in store.strata} == {"2^6", "2^10"}


def test_old_jobs_are_replaced_at_a_bounded_rate():
    """After a million jobs nothing of the first ones is left; a replacement comes once in some 8,000 jobs."""
    store = GoldenStore(max_jobs=8)
    serve(store, range(8))
    before, replaced = set(numbers_of(store)), 0
    for part in range(10):
        serve(store, range(8 + part * 40_000, 8 + (part + 1) * 40_000))
        after = set(numbers_of(store))
        replaced += len(after - before)
        before = after
    assert min(numbers_of(store)) >= 8
    assert 30 <= replaced <= 70


def test_many_classes_do_not_churn_the_sample():
    """Where each job has a class of its own, no class is rare: only the refresh replaces."""
    store = GoldenStore(max_jobs=8)
    for number in range(20_000):
        if store.wants(f"m.{number:032x}"):
            values = np.array([number], np.int64)
            store.offer(f"m.{number:032x}", {"x": values}, {"y": values})
    assert sum(number < 8 for number in numbers_of(store)) >= 4


def test_labels_of_texts_are_not_readable():
    """A stratum may be shown; a text of the output stays in the sample."""
    store = GoldenStore()
    store.offer("m.1", {"x": np.ones((1, 2))}, {"label": np.array(["a name"], object)})
    (stratum,) = store.strata
    assert "name" not in stratum


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
    serve(store, range(50))
    store.clear()
    assert (len(store), store.nbytes, store.strata) == (0, 0, {})
    assert all(store.wants(f"minilm.{number}") for number in range(50))


def text_job(text: str) -> tuple[dict[str, Array], dict[str, Array]]:
    return {"t": np.array([text], object)}, {"y": np.zeros((1, 2), np.float32)}


def test_personal_data_is_not_kept():
    """CF-034: a job whose inputs or outputs redaction would change is no sample; others are, numbers included."""
    store = GoldenStore(redactor=InputRedactor(detectors=("ssn",)))
    assert store.offer("m.1", *text_job("fine"))
    assert not store.offer("m.2", *text_job("SSN 123-45-6789"))
    assert not store.offer("m.3", *reversed(text_job("SSN 123-45-6789")))
    assert store.offer("m.4", *job())
    assert [golden.job_id for golden in sorted(store.goldens(), key=lambda golden: golden.job_id)] == ["m.1", "m.4"]
    assert GoldenStore().offer("m.2", *text_job("SSN 123-45-6789"))


def test_long_texts_are_not_searched():
    """The thread of the drain waits for the search, so a job with much text is left out."""
    store = GoldenStore(redactor=InputRedactor(["x"]))
    assert store.offer("m.1", *text_job("a" * (1 << 16)))
    assert not store.offer("m.2", *text_job("a" * ((1 << 16) + 1)))


def test_refused_jobs_are_asked_for_seldom():
    """Where all jobs have personal data, the searches stay few."""
    store = GoldenStore(max_jobs=4, redactor=InputRedactor(["x"]))
    ids = [f"m.{number:032x}" for number in range(20_000)]
    wanted = 0
    for number, job_id in enumerate(ids):
        if store.wants(job_id):
            wanted += 1
            assert not store.offer(job_id, *text_job(f"x{number}"))
    assert 64 <= wanted < 64 + 20_000 / 100
    assert len(store) == 0
    store.clear()
    assert store.wants(ids[-1])
