"""The micro-batcher: when a batch is flushed, which jobs share one, and that no job is lost or starves."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import email.message
import http.client
import inspect
import logging
import pathlib
import subprocess
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.registry.errors import ConfigurationError
from penstock.registry.queues import Priority
from penstock.workers.batching import Batch, Batcher, BatchKey, BatchLimits, Pending

MLP = BatchKey("mlp", "1", "infer")
MINILM = BatchKey("minilm", "1", "infer")
AGEING_S = 5.0


def limits(
    max_rows: int = 4, max_wait_s: float = 1.0, max_tokens: int = 0, max_bytes: int = 0, sort_window: int = 1
) -> BatchLimits:
    return BatchLimits(
        max_rows=max_rows,
        max_wait_s=max_wait_s,
        max_tokens=max_tokens,
        max_bytes=max_bytes,
        sort_window=sort_window,
        ageing_s=AGEING_S,
    )


def pending(
    job: int = 0,
    priority: int = Priority.NORMAL,
    key: BatchKey = MLP,
    rows: int = 1,
    length: int = 1,
    nbytes: int = 100,
    arrived: float = 0.0,
) -> Pending[int]:
    return Pending(key, priority, rows, length, nbytes, arrived, job)


def filled(wanted: BatchLimits, *jobs: Pending[int]) -> Batcher[int]:
    batcher = Batcher[int](wanted)
    batcher.extend(jobs)
    return batcher


def formed(batch: Batch[int] | None) -> Batch[int]:
    assert batch is not None
    return batch


def jobs_of(batch: Batch[int] | None) -> list[int]:
    return [item.job for item in formed(batch).items]


def drained(batcher: Batcher[int], now: float = 0.0) -> Iterator[Batch[int]]:
    while batch := batcher.next(now, device_idle=True):
        yield batch


class TestFlush:
    """Each reason to flush, and none."""

    def test_a_batch_is_flushed_when_it_is_full(self):
        """`max_rows` rows make a batch at once, also while the device is busy; the rest waits."""
        batcher = filled(limits(max_rows=4), *(pending(n) for n in range(5)))
        batch = formed(batcher.next(0.0, device_idle=False))
        assert (jobs_of(batch), batch.rows, batch.reason) == ([0, 1, 2, 3], 4, "full")
        assert batcher.next(0.0, device_idle=False) is None
        assert len(batcher) == 1

    def test_a_batch_is_flushed_when_the_oldest_has_waited_long_enough(self):
        """`max_wait_s` after the arrival of the oldest job, all pending jobs go."""
        batcher = filled(limits(max_wait_s=1.0), pending(0, arrived=3.0), pending(1, arrived=3.9))
        assert batcher.next_flush_at() == 4.0
        assert batcher.next(3.99, device_idle=False) is None
        batch = formed(batcher.next(4.0, device_idle=False))
        assert (jobs_of(batch), batch.reason) == ([0, 1], "wait")

    def test_a_lone_request_is_answered_at_once_by_an_idle_device(self):
        """No job waits for others while the device is idle."""
        batch = formed(filled(limits(max_rows=32), pending(7)).next(0.0, device_idle=True))
        assert (jobs_of(batch), batch.reason) == ([7], "idle")

    def test_a_batch_is_flushed_when_its_padded_tokens_reach_the_budget(self):
        """One long job makes its short neighbours as expensive as itself: rows * longest counts."""
        batcher = filled(limits(max_tokens=100), pending(0, length=10), pending(1, length=49))
        assert batcher.next(0.0, device_idle=False) is None
        batcher.add(pending(2, length=10))
        batch = formed(batcher.next(0.0, device_idle=False))
        assert (jobs_of(batch), batch.tokens, batch.reason) == ([0, 1], 98, "budget")

    def test_a_batch_is_flushed_when_its_bytes_reach_the_budget(self):
        """The byte budget cuts as the row limit does."""
        batcher = filled(limits(max_bytes=250), pending(0), pending(1))
        assert batcher.next(0.0, device_idle=False) is None
        batcher.add(pending(2))
        batch = formed(batcher.next(0.0, device_idle=False))
        assert (jobs_of(batch), batch.reason) == ([0, 1], "budget")
        assert batcher.next(0.0, device_idle=False) is None

    def test_the_token_budget_forgets_a_long_job_that_has_left(self):
        """Short jobs are not flushed early because of a long one that ran before them."""
        batcher = filled(limits(max_tokens=100), pending(0, length=99), pending(1, length=5), pending(2, length=5))
        assert jobs_of(batcher.next(0.0, device_idle=False)) == [0]
        assert batcher.next(0.0, device_idle=False) is None

    def test_an_empty_batcher_has_nothing_to_say(self):
        """No batch, no flush time, no priority; a wait of zero changes nothing."""
        batcher = Batcher[int](limits(max_wait_s=0.0))
        assert batcher.next(99.0, device_idle=True) is None
        assert batcher.next_flush_at() is None
        assert batcher.most_urgent() is None

    @given(arrivals=st.lists(st.floats(0, 1e6), min_size=1, max_size=20), max_wait_s=st.floats(0, 10))
    def test_the_flush_time_is_when_a_batch_becomes_due(self, arrivals: list[float], max_wait_s: float):
        """Asked at `next_flush_at` there is a batch, asked before there is none."""
        jobs = (pending(n, arrived=arrived) for n, arrived in enumerate(sorted(arrivals)))
        batcher = filled(limits(max_rows=100, max_wait_s=max_wait_s), *jobs)
        flush_at = batcher.next_flush_at()
        assert flush_at is not None
        assert batcher.next(flush_at - 0.001, device_idle=False) is None
        assert formed(batcher.next(flush_at, device_idle=False)).reason == "wait"

    def test_two_batchers_keep_their_own_limits(self):
        """Thresholds belong to a model, not to the worker."""
        small, large = (filled(limits(max_rows=rows), *(pending(n) for n in range(6))) for rows in (2, 5))
        assert [batch.rows for batch in drained(small)] == [2, 2, 2]
        assert [batch.rows for batch in drained(large)] == [5, 1]

    def test_with_one_row_every_job_runs_alone(self):
        """`max_rows` 1 is batching switched off."""
        batcher = filled(limits(max_rows=1), *(pending(n) for n in range(3)))
        assert [jobs_of(batch) for batch in drained(batcher)] == [[0], [1], [2]]

    @pytest.mark.parametrize("too_large", [{"rows": 9}, {"length": 101}, {"nbytes": 1001}])
    @pytest.mark.parametrize("sort_window", [1, 4])
    def test_a_job_beyond_a_limit_goes_alone(self, too_large: dict[str, Any], sort_window: int):
        """It is not held for ever, and no other job goes with it."""
        wanted = limits(max_rows=8, max_tokens=100, max_bytes=1000, sort_window=sort_window)
        batcher = filled(wanted, pending(0), pending(1, **too_large), pending(2))
        assert sorted(jobs_of(batch) for batch in drained(batcher)) in ([[0], [1], [2]], [[0, 2], [1]])

    @pytest.mark.parametrize("name", ["max_rows", "sort_window"])
    def test_limits_that_no_batch_can_keep_are_refused(self, name: str):
        """The error names the limit and what was expected."""
        with pytest.raises(ConfigurationError, match=rf"{name} is 0\. Expected at least 1"):
            limits(**{name: 0})


class TestPriority:
    """Strict between bands, except for jobs that have waited too long."""

    def test_the_most_urgent_jobs_run_first(self):
        """Priority decides, then arrival; one batch may hold several priorities."""
        urgency = [3, 2, 0, 3, 1, 0]
        batcher = filled(limits(max_rows=3), *(pending(n, priority=p) for n, p in enumerate(urgency)))
        assert batcher.most_urgent() == 0
        assert [jobs_of(batch) for batch in drained(batcher)] == [[2, 5, 4], [1, 0, 3]]

    def test_among_equally_urgent_jobs_of_two_keys_the_oldest_goes_first(self):
        """No key is served before another because it was seen first."""
        batcher = filled(limits(max_rows=1), *(pending(n, key=key) for n, key in enumerate([MLP, MINILM, MINILM, MLP])))
        assert [jobs_of(batch) for batch in drained(batcher)] == [[0], [1], [2], [3]]

    def test_a_more_urgent_job_of_another_key_goes_before_a_full_batch(self):
        """When some batch is due anyway, it is the one of the most urgent job."""
        full = [pending(n, priority=Priority.LOW) for n in range(4)]
        batcher = filled(limits(max_rows=4), *full, pending(9, priority=Priority.CRITICAL, key=MINILM))
        overtaking = formed(batcher.next(0.0, device_idle=False))
        assert (jobs_of(overtaking), overtaking.reason) == ([9], "priority")
        assert jobs_of(batcher.next(0.0, device_idle=False)) == [0, 1, 2, 3]

    def test_a_batch_put_back_lets_a_critical_job_pass(self):
        """The dissolved jobs keep their places behind the one that overtook them."""
        batcher = filled(limits(max_rows=2), *(pending(n) for n in range(4)))
        ready = formed(batcher.next(0.0, device_idle=False))
        batcher.add(pending(9, priority=Priority.CRITICAL))
        batcher.put_back(ready)
        assert [jobs_of(batch) for batch in drained(batcher)] == [[9, 0], [1, 2], [3]]

    @given(
        urgency=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([MLP, MINILM])), min_size=1, max_size=20),
        forms_before=st.integers(0, 5),
        max_tokens=st.sampled_from([0, 12]),
    )
    def test_putting_a_batch_back_undoes_forming_it(
        self, urgency: list[tuple[int, BatchKey]], forms_before: int, max_tokens: int
    ):
        """Asked again, the batcher forms the very same batch: a dissolved one costs no aged job its turn."""
        jobs = [pending(n, priority, key, length=1 + n % 5) for n, (priority, key) in enumerate(urgency)]
        batcher = filled(limits(max_rows=2, max_tokens=max_tokens), *jobs)
        for _ in range(forms_before):
            batcher.next(AGEING_S, device_idle=True)
        batch = batcher.next(AGEING_S, device_idle=True)
        if batch is not None:
            batcher.put_back(batch)
            assert batcher.next(AGEING_S, device_idle=True) == batch

    def test_a_share_of_a_batch_is_kept_for_aged_jobs(self):
        """One slot in eight goes to the oldest jobs that have waited longer than `ageing_s`, no more."""
        low = [pending(n, priority=Priority.LOW) for n in range(5)]
        urgent = [pending(100 + n, priority=Priority.HIGH, arrived=AGEING_S) for n in range(40)]
        batcher = filled(limits(max_rows=16), *low, *urgent)
        assert not set(range(5)) & set(jobs_of(batcher.next(AGEING_S - 0.1, device_idle=False)))
        assert set(range(5)) & set(jobs_of(batcher.next(AGEING_S, device_idle=False))) == {0, 1}

    def test_a_batch_led_by_an_aged_job_is_not_put_back_for_an_urgent_one(self):
        """It says priority 0: nothing is more urgent than a job whose turn has come."""
        batcher = filled(limits(max_rows=1), pending(0, priority=Priority.LOW))
        batcher.extend(pending(100 + n, priority=Priority.HIGH, arrived=AGEING_S) for n in range(9))
        batches = [formed(batcher.next(AGEING_S, device_idle=True)) for _ in range(4)]
        assert [(jobs_of(batch), batch.priority) for batch in batches] == [([100], 1), ([101], 1), ([102], 1), ([0], 0)]

    @settings(deadline=None)
    @given(
        max_rows=st.integers(1, 20),
        sort_window=st.integers(1, 3),
        low_key=st.sampled_from([MLP, MINILM]),
        low_rows=st.integers(1, 25),
        floods=st.lists(
            st.lists(st.tuples(st.integers(0, 2), st.sampled_from([MLP, MINILM]), st.integers(1, 50)), max_size=30),
            min_size=10,
            max_size=10,
        ),
    )
    def test_an_aged_job_leaves_within_four_batches_whatever_the_flood(
        self,
        max_rows: int,
        sort_window: int,
        low_key: BatchKey,
        low_rows: int,
        floods: list[list[tuple[int, BatchKey, int]]],
    ):
        """It is in the fourth batch, even while urgent jobs of any key come and dissolve batches that are ready."""
        batcher = filled(limits(max_rows=max_rows, sort_window=sort_window), pending(-1, 3, low_key, low_rows))
        arriving = iter(floods)

        def flood() -> None:
            batcher.extend(
                pending(0, priority, key, length=length, arrived=AGEING_S)
                for priority, key, length in [(1, MLP, 9)] * max_rows + next(arriving)
            )

        flood()
        for _ in range(4):
            ready = formed(batcher.next(AGEING_S, device_idle=True))
            flood()
            most_urgent = batcher.most_urgent()
            if most_urgent is not None and most_urgent < ready.priority:
                batcher.put_back(ready)
                ready = formed(batcher.next(AGEING_S, device_idle=True))
            if -1 in jobs_of(ready):
                return
        pytest.fail("four batches ran without the aged job")


class TestOrder:
    """Arrival order where lengths are equal, similar lengths together where they are not."""

    @given(
        urgency=st.lists(st.integers(0, 3), max_size=60),
        max_rows=st.integers(1, 8),
        sort_window=st.integers(1, 4),
        put_back=st.integers(0, 3),
    )
    def test_jobs_of_one_priority_and_length_run_in_order_of_arrival(
        self, urgency: list[int], max_rows: int, sort_window: int, put_back: int
    ):
        """First in, first out within a priority, also when batches were dissolved in between."""
        wanted = limits(max_rows=max_rows, sort_window=sort_window)
        batcher = filled(wanted, *(pending(n, priority) for n, priority in enumerate(urgency)))
        for batch in [ready for _ in range(put_back) if (ready := batcher.next(0.0, device_idle=True))]:
            batcher.put_back(batch)
        ran = [item for batch in drained(batcher) for item in batch.items]
        assert [(item.priority, item.job) for item in ran] == sorted((p, n) for n, p in enumerate(urgency))

    @given(lengths=st.lists(st.integers(0, 256), min_size=1, max_size=80), sort_window=st.integers(1, 4))
    def test_every_batch_holds_the_oldest_job(self, lengths: list[int], sort_window: int):
        """Looking for similar lengths never leaves the oldest job behind."""
        wanted = limits(max_rows=8, sort_window=sort_window)
        batcher = filled(wanted, *(pending(n, length=length) for n, length in enumerate(lengths)))
        waiting = set(range(len(lengths)))
        for batch in drained(batcher):
            assert min(waiting) in jobs_of(batch)
            waiting -= set(jobs_of(batch))
        assert not waiting

    def test_the_nearest_lengths_join_the_oldest_job_and_older_ones_first(self):
        """Of the shorter jobs the longest come in, of the longer ones the shortest, of equals the oldest."""
        by_length = limits(max_rows=3, sort_window=4)
        for lengths, expected in (
            ([100, 50, 90, 95], {0, 2, 3}),
            ([100, 180, 120, 110], {0, 2, 3}),
            ([100, 90, 90, 90], {0, 1, 2}),
            ([100, 110, 110, 110], {0, 1, 2}),
        ):
            batcher = filled(by_length, *(pending(n, length=length) for n, length in enumerate(lengths)))
            assert set(jobs_of(batcher.next(0.0, device_idle=True))) == expected

    @pytest.mark.parametrize(("others", "expected"), [([10, 100], [0, 2]), ([10, 10, 100], [0])])
    def test_the_window_of_similar_lengths_is_counted_in_rows(self, others: list[int], expected: list[int]):
        """Two batches of four rows hold two jobs of three rows; what comes after is not looked at yet."""
        jobs = (pending(n, rows=3, length=length) for n, length in enumerate(others, 1))
        batcher = filled(limits(max_rows=4, sort_window=2), pending(0, length=100), *jobs)
        assert jobs_of(batcher.next(0.0, device_idle=True)) == expected

    @given(lengths=st.lists(st.integers(1, 256), min_size=1, max_size=64))
    def test_a_batch_is_one_run_of_the_sorted_lengths(self, lengths: list[int]):
        """No job that stayed behind is of a length between those that went."""
        wanted = limits(max_rows=8, sort_window=8)
        batcher = filled(wanted, *(pending(n, length=length) for n, length in enumerate(lengths)))
        went = [item.length for item in formed(batcher.next(0.0, device_idle=True)).items]
        stayed = [item.length for item in batcher.discard(lambda item: True)]
        assert not [length for length in stayed if min(went) < length < max(went)]

    def test_similar_lengths_together_compute_far_less_padding_than_arrival_order(self):
        """On the lengths of real docstrings, comparing four batches of jobs saves most of the padded tokens."""
        lengths = docstring_lengths()
        assert len(lengths) > 500
        in_order, by_length = (tokens_computed(lengths, sort_window) for sort_window in (1, 4))
        assert by_length <= 0.3 * in_order

    def test_the_padding_ratio_of_a_batch_is_what_its_shorter_rows_waste(self):
        """Rows of 10 and 30 tokens in one batch waste a third of it."""
        batch = filled(limits(), pending(0, length=10), pending(1, length=30)).next(0.0, device_idle=True)
        assert formed(batch).padding_ratio == pytest.approx(1 / 3)


def docstring_lengths() -> list[int]:
    """Words of the standard library's docstrings, in the order in which they stand there, as a tokeniser cuts them."""
    modules = (argparse, collections, datetime, decimal, email.message, http.client, logging, pathlib, subprocess)
    return [min(256, 2 + len(text.split())) for module in modules for text in docstrings(module)]


def docstrings(module: ModuleType) -> Iterator[str]:
    for _, outer in inspect.getmembers(module):
        for _, member in inspect.getmembers(outer) if inspect.isclass(outer) else [("", outer)]:
            text = inspect.getdoc(member) if callable(member) else None
            if text:
                yield text


def tokens_computed(lengths: list[int], sort_window: int) -> int:
    """Padded tokens of all batches, with four batches waiting while there are that many."""
    batcher = Batcher[int](limits(max_rows=64, sort_window=sort_window))
    computed = 0
    for start in range(0, len(lengths), 64):
        batcher.extend(pending(n, length=length) for n, length in enumerate(lengths[start : start + 64]))
        while len(batcher) >= 256:
            computed += formed(batcher.next(0.0, device_idle=True)).tokens
    return computed + sum(batch.tokens for batch in drained(batcher))


class TestDiscard:
    """Jobs that must not run any more."""

    def test_discarded_jobs_are_returned_and_never_run(self):
        """Cancelled and expired jobs leave the batcher, in their order of arrival."""
        batcher = filled(limits(), *(pending(n, priority=n % 4, key=(MLP, MINILM)[n % 3 == 0]) for n in range(9)))
        assert [item.job for item in batcher.discard(lambda item: item.job % 2 == 1)] == [1, 3, 5, 7]
        assert len(batcher) == 5
        assert sorted(job for batch in drained(batcher) for job in jobs_of(batch)) == [0, 2, 4, 6, 8]

    def test_a_discarded_job_no_longer_counts_towards_a_full_batch(self):
        """The totals that make a batch due follow the jobs that are really there."""
        batcher = filled(limits(max_rows=4, max_tokens=40), *(pending(n, length=9 + n // 3) for n in range(4)))
        batcher.discard(lambda item: item.job == 3)
        assert batcher.next(0.0, device_idle=False) is None
        assert batcher.discard(lambda item: True)
        assert batcher.next_flush_at() is None


class AnySequence(RuleBasedStateMachine):
    """After any sequence of calls, no job is lost or doubled, and no limit is exceeded."""

    @initialize(
        wanted=st.builds(
            limits,
            max_rows=st.integers(1, 9),
            max_wait_s=st.sampled_from([0.0, 0.5, 2.0]),
            max_tokens=st.sampled_from([0, 40, 200]),
            max_bytes=st.sampled_from([0, 500]),
            sort_window=st.integers(1, 3),
        )
    )
    def start(self, wanted: BatchLimits) -> None:
        self.limits = wanted
        self.batcher = Batcher[int](wanted)
        self.now = 0.0
        self.waiting: dict[int, Pending[int]] = {}
        self.ready: Batch[int] | None = None
        self.added = 0

    @rule(
        jobs=st.lists(
            st.builds(
                pending,
                priority=st.integers(0, 3),
                key=st.sampled_from([MLP, MINILM]),
                rows=st.sampled_from([1, 1, 1, 2, 5, 12]),
                length=st.integers(0, 60),
                nbytes=st.integers(0, 600),
            ),
            max_size=12,
        )
    )
    def extend(self, jobs: list[Pending[int]]) -> None:
        for item in jobs:
            item.job, item.arrived = self.added, self.now
            self.waiting[item.job] = item
            self.added += 1
        self.batcher.extend(jobs)

    @rule(seconds=st.sampled_from([0.1, 0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(device_idle=st.booleans())
    def next(self, device_idle: bool) -> None:
        flush_at = self.batcher.next_flush_at()
        self.ready = self.batcher.next(self.now, device_idle=device_idle)
        if self.ready is None:
            assert flush_at is None or (flush_at > self.now and not device_idle)
            return
        self.check(self.ready)
        for item in self.ready.items:
            assert self.waiting.pop(item.job) is item
        self.check_priority(self.ready)

    @precondition(lambda self: self.ready is not None)
    @rule()
    def put_back(self) -> None:
        batch, self.ready = formed(self.ready), None
        self.batcher.put_back(batch)
        self.waiting |= {item.job: item for item in batch.items}

    @rule(modulus=st.integers(2, 5))
    def discard(self, modulus: int) -> None:
        gone = self.batcher.discard(lambda item: item.job % modulus == 0)
        assert [item.job for item in gone] == sorted(job for job in self.waiting if job % modulus == 0)
        for item in gone:
            del self.waiting[item.job]

    def check(self, batch: Batch[int]) -> None:
        assert {item.key for item in batch.items} == {batch.key}
        assert batch.rows == sum(item.rows for item in batch.items)
        assert batch.tokens == batch.rows * max(item.length for item in batch.items)
        if len(batch.items) > 1:
            assert batch.rows <= self.limits.max_rows
            assert batch.tokens <= (self.limits.max_tokens or batch.tokens)
            assert not self.limits.max_bytes or sum(item.nbytes for item in batch.items) <= self.limits.max_bytes

    def check_priority(self, batch: Batch[int]) -> None:
        """A job goes before a more urgent one of its key only when it has aged."""
        most_urgent = min((item.priority for item in self.waiting.values() if item.key == batch.key), default=9)
        assert all(item.arrived <= self.now - AGEING_S for item in batch.items if item.priority > most_urgent), (
            "a young job overtook a more urgent one"
        )

    @invariant()
    def every_job_is_somewhere(self) -> None:
        assert len(self.batcher) == len(self.waiting)
        assert self.batcher.most_urgent() == min((item.priority for item in self.waiting.values()), default=None)

    def teardown(self) -> None:
        ran = [job for batch in drained(self.batcher, self.now) for job in jobs_of(batch)]
        assert sorted(ran) == sorted(self.waiting)


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
