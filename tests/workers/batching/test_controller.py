"""The latency controller in a simulated worker: when it changes the rows, and when it does not."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from penstock.registry.queues import Priority
from penstock.workers.batching import Batch, Batcher, BatchKey, BatchLimits, Pending
from penstock.workers.batching.controller import LatencyController
from tests.workers.batching.plant import Plant, poisson

KEY = BatchKey("m", "1", "infer")
TARGET_S = 0.1
MAX_ROWS = 64
MAX_WAIT_S = 0.05
NORMAL, LOW = Priority.NORMAL, Priority.LOW


def controller() -> LatencyController:
    return LatencyController(TARGET_S, MAX_ROWS, MAX_WAIT_S)


def step_load(steered: LatencyController | None, *, fixed_s: float = 0.002, per_row_s: float = 0.002) -> Plant:
    """A backlog of low priority all the time, and 40 jobs a second of normal priority between seconds 10 and 40."""
    plant = Plant(fixed_s, per_row_s, MAX_ROWS, steered, has_backlog=True)
    return plant.run([(at, NORMAL) for at in poisson(40, 10, 40, seed=1)], until=60)


def batch_of(urgent: int, less_urgent: int) -> Batch[int]:
    items = [Pending(KEY, NORMAL if n < urgent else LOW, 1, 1, 0, 0.0, n) for n in range(urgent + less_urgent)]
    return Batch(KEY, items, len(items), len(items), "full", items[0].priority)


def observe(
    steered: LatencyController, batch: Batch[int], total_s: float, *, forward_s: float, start: float, times: int
) -> None:
    """So many equal batches, one after the other; the size of every fifth is another, so that costs are known."""
    for number in range(times):
        now = start + number * forward_s
        steered.observe(batch_of(0, 1 + number % 2), forward_s / 10, [total_s] * (1 + number % 2), 0, now)
        steered.observe(batch, forward_s, [total_s] * len(batch.items), 0, now)


class Load(NamedTuple):
    """An urgent load on a model of these costs."""

    per_row_ms: float
    fixed_rows: float
    share: float
    noise: float
    seed: int

    def check(self) -> None:
        """The target is reached where it is within reach."""
        per_row_s = self.per_row_ms / 1000
        fixed_s = self.fixed_rows * per_row_s
        rate = max(20.0, self.share / per_row_s * 0.8)
        least = _fewest_rows_at(0.8, self.fixed_rows)
        assume(3.2 * (fixed_s + per_row_s * least) * (1 + self.noise) < 0.75 * TARGET_S and rate * per_row_s < 0.4)
        plant = Plant(fixed_s, per_row_s, MAX_ROWS, controller(), has_backlog=True, noise=self.noise, seed=self.seed)
        plant.run([(at, NORMAL) for at in poisson(rate, 1, 25, self.seed)], until=26)
        assert plant.p95_s(NORMAL, 10, 25) < TARGET_S


LOADS = st.builds(Load, st.floats(0.5, 6), st.floats(0, 2), st.floats(0.02, 0.3), st.floats(0, 0.2), st.integers(0, 99))


class TestStepLoad:
    """CF-010: a step of urgent load on a worker that is busy with a backlog."""

    def test_p95_comes_under_the_target_with_the_controller_and_stays_over_it_without(self):
        """The same arrivals, the same model: five seconds after the step the target is kept, and only with it."""
        with_it, without = step_load(controller()), step_load(None)
        assert with_it.p95_s(NORMAL, 15, 40) < TARGET_S
        assert without.p95_s(NORMAL, 15, 40) > 2 * TARGET_S

    def test_the_batches_fall_with_the_step_and_grow_back_after_it(self):
        """The rows follow the load down within seconds, and rise to the limit again once no urgent job comes."""
        steered = controller()
        plant = step_load(steered)
        under_load = [rows for at, rows in plant.sizes if 15 < at < 40]
        assert max(under_load, default=0) < MAX_ROWS // 2
        assert steered.rows == MAX_ROWS

    def test_it_settles(self):
        """A little below the target nothing moves: the rows change a few times and then hardly ever."""
        changes = [at for at, _ in step_load(controller()).sizes if 20 < at < 40]
        assert len(changes) <= 4

    def test_the_backlog_pays_no_more_than_a_fifth_of_its_rows_per_second(self):
        """With a fixed cost of 16 rows small batches are expensive: the target is missed rather than the throughput."""
        steered = controller()
        with_it = step_load(steered, fixed_s=0.032)
        without = step_load(None, fixed_s=0.032)
        assert with_it.rows_per_s(15, 40) > 0.78 * without.rows_per_s(15, 40)
        assert with_it.p95_s(NORMAL, 15, 40) < 0.7 * without.p95_s(NORMAL, 15, 40)

    @settings(max_examples=8, deadline=None)
    @given(load=LOADS)
    def test_every_target_within_reach_is_reached(self, load: Load):
        """Whatever a row costs and however many urgent jobs come: where 0.8 of the rows per second allow it, p95 is
        under the target."""
        load.check()

    @pytest.mark.slow
    @settings(max_examples=60, deadline=None)
    @given(load=LOADS)
    def test_many_targets_within_reach_are_reached(self, load: Load):
        """The same, with more loads."""
        load.check()


def _fewest_rows_at(share: float, fixed_rows: float) -> float:
    best = MAX_ROWS / (fixed_rows + MAX_ROWS)
    return max(1.0, share * best * fixed_rows / (1 - share * best))


class TestBacklog:
    """A queue that is long because there is much to do."""

    @pytest.mark.parametrize("fixed_rows", [0, 1, 16])
    def test_a_saturated_queue_is_served_as_without_a_controller(self, fixed_rows: int):
        """p95 far over the target, and not one batch is smaller: it would only take longer."""
        plants = [
            Plant(fixed_rows * 0.002, 0.002, MAX_ROWS, steered).run([(0.0, NORMAL)] * 5000, until=30)
            for steered in (controller(), None)
        ]
        assert plants[0].p95_s(NORMAL, 0) > TARGET_S
        assert plants[0].sizes == []
        assert plants[0].done == plants[1].done

    def test_an_open_load_below_saturation_is_served_as_without_a_controller(self):
        """Batches that are not full hold all there was: a smaller limit would leave some of it behind."""
        arrivals = [(at, NORMAL) for at in poisson(400, 0, 30, seed=2)]
        plants = [Plant(0.03, 0.001, MAX_ROWS, steered).run(arrivals, until=30) for steered in (controller(), None)]
        assert plants[0].sizes == []
        assert plants[0].p95_s(NORMAL, 5, 29) <= plants[1].p95_s(NORMAL, 5, 29) * 1.05

    def test_a_wait_of_many_forwards_is_not_blamed_on_the_size(self):
        """Urgent jobs that take ten full forwards wait for something else: another model, a dead worker's lease."""
        steered = controller()
        observe(steered, batch_of(8, 56), 1.0, forward_s=0.1, start=0.0, times=50)
        assert steered.rows == MAX_ROWS

    def test_an_aged_job_does_not_make_the_others_urgent(self):
        """One job of low priority in a batch of a normal backlog came in because it was old."""
        steered = controller()
        observe(steered, batch_of(56, 8), 0.3, forward_s=0.1, start=0.0, times=50)
        assert steered.rows == MAX_ROWS
        observe(steered, batch_of(8, 56), 0.3, forward_s=0.1, start=5.0, times=50)
        assert steered.rows < MAX_ROWS

    def test_a_few_jobs_have_no_p95(self):
        """Nineteen slow jobs change nothing, the twentieth does."""
        steered = controller()
        observe(steered, batch_of(19, 45), 0.3, forward_s=0.1, start=0.0, times=1)
        steered.observe(batch_of(0, 64), 0.1, [0.3] * 64, 0, 1.0)
        assert steered.rows == MAX_ROWS
        steered.observe(batch_of(1, 63), 0.1, [0.3] * 64, 0, 1.5)
        assert steered.rows < MAX_ROWS

    def test_a_little_below_the_target_nothing_moves(self):
        """A p95 at 0.85 of the target is no reason for smaller batches; one at 0.95 is."""
        steered = controller()
        observe(steered, batch_of(8, 56), 0.85 * TARGET_S, forward_s=0.05, start=0.0, times=50)
        assert steered.rows == MAX_ROWS
        observe(steered, batch_of(8, 56), 0.95 * TARGET_S, forward_s=0.05, start=2.5, times=200)
        assert steered.rows < MAX_ROWS


class TestWait:
    """AR-038: how long a job may wait for more jobs."""

    @settings(deadline=None)
    @given(
        depths=st.lists(st.integers(0, 500), min_size=2, max_size=2),
        forward_ms=st.floats(0.1, 200),
        max_wait_ms=st.floats(0, 100),
    )
    @example(depths=[0, MAX_ROWS], forward_ms=5.0, max_wait_ms=50.0)
    @example(depths=[0, MAX_ROWS], forward_ms=30.0, max_wait_ms=50.0)
    @example(depths=[0, MAX_ROWS], forward_ms=0.109375, max_wait_ms=100.0)
    def test_it_shrinks_as_the_depth_rises(self, depths: list[int], forward_ms: float, max_wait_ms: float):
        """The more jobs wait, the shorter; all the settings allow while none does, one forward when a batch does."""
        waits = []
        for depth in sorted(depths):
            steered = LatencyController(TARGET_S, MAX_ROWS, max_wait_ms / 1000)
            for number in range(40):
                steered.observe(batch_of(0, MAX_ROWS), forward_ms / 1000, [0.01] * MAX_ROWS, depth, number * 0.1)
            waits.append(steered.wait_s)
        shallow, deep = waits
        assert 0 <= deep <= shallow <= max_wait_ms / 1000
        if sorted(depths) == [0, MAX_ROWS]:
            assert shallow == pytest.approx(min(max_wait_ms, max(forward_ms, 100 - 2 * forward_ms)) / 1000)
            # 40 observations bring it within a hundred-thousandth of the distance.
            assert deep == pytest.approx(min(max_wait_ms, forward_ms) / 1000, rel=1e-3, abs=max_wait_ms / 1000 * 2e-5)

    def test_nothing_is_changed_before_anything_is_known(self):
        """A new model has the rows and the wait of its settings."""
        steered = controller()
        assert (steered.rows, steered.wait_s) == (MAX_ROWS, MAX_WAIT_S)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), max_rows=st.integers(1, 300), target_s=st.floats(0.001, 5), wait_s=st.floats(0, 1))
def test_rows_and_wait_stay_within_their_bounds(seed: int, max_rows: int, target_s: float, wait_s: float):
    """Whatever is observed, time standing still included: 1 <= rows <= max_rows and 0 <= wait <= max_wait_s."""
    chance = random.Random(seed)
    steered = LatencyController(target_s, max_rows, wait_s)
    now = 0.0
    for _ in range(60):
        batch = batch_of(chance.randint(0, max_rows), chance.randint(1, max_rows))
        compute_s = chance.choice([0.0, chance.uniform(0, 2)])
        steered.observe(batch, compute_s, [chance.uniform(0, 3)] * len(batch.items), chance.randint(0, 999), now)
        assert 1 <= steered.rows <= max_rows
        assert 0 <= steered.wait_s <= wait_s
        now += chance.choice([0.0, 0.1, 5.0])


def test_what_is_steered_is_what_the_batcher_does():
    """Rows and wait take effect at once, never beyond the limits or what fits the device, and can be taken back."""
    batcher = Batcher[int](BatchLimits(max_rows=8, max_wait_s=1.0, ageing_s=5.0))
    batcher.steer(2, 0.25)
    batcher.extend(Pending(KEY, NORMAL, 1, 1, 0, 0.0, n) for n in range(3))
    assert [item.job for item in _formed(batcher, 0.0).items] == [0, 1]
    assert batcher.next_flush_at() == 0.25
    assert batcher.next(0.2, device_idle=False) is None
    assert _formed(batcher, 0.25).reason == "wait"
    batcher.steer(100, 9.0)
    batcher.extend(Pending(KEY, NORMAL, 1, 1, 0, 1.0, n) for n in range(20))
    assert _formed(batcher, 1.0).rows == 8
    batcher.narrow(3, 0)
    assert _formed(batcher, 1.0).rows == 3
    batcher.steer(2, 9.0)
    batcher.narrow(8, 0)
    assert _formed(batcher, 1.0).rows == 2
    assert batcher.next_flush_at() == 2.0


def _formed(batcher: Batcher[int], now: float) -> Batch[int]:
    batch = batcher.next(now, device_idle=False)
    assert batch is not None
    return batch
