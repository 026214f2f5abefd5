"""The model threads, stepped in this thread: what a batch becomes when its forward fails, does not fit, or hangs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from penstock.registry.broker.base import Delivery, Held
from penstock.registry.envelope import Failure, JobHeader
from penstock.registry.errors import OutOfMemory
from penstock.registry.package import ModelSpec, load_package
from penstock.registry.queues import Priority
from penstock.registry.settings_sections import InferenceConfig
from penstock.registry.tensors import Array, encode
from penstock.workers.batch_run import BatchRun, JointAnswers
from penstock.workers.batching.batcher import Batch, BatchKey, Pending
from penstock.workers.batching.forward_size import ForwardSize
from penstock.workers.executor import Executor, seats_for
from penstock.workers.job import ClaimedJob
from penstock.workers.process.crash_journal import FormInUse
from penstock.workers.runtime.base import DeviceLost, InstanceLost, Prepared, concatenate
from penstock.workers.versions.version import ServedVersion
from tests.packages import write_double, write_package
from tests.servers import wait_until
from tests.workers.doubles import RowRuntime, spec_of, version_of

KEY = BatchKey("double", "1", "infer")
Forward = Callable[[Array], Array]


class Device(RowRuntime):
    """A runtime over one function of `x`; rows have `length` tokens each where that is not 0."""

    def __init__(self, forward: Forward, length: int = 0) -> None:
        self._forward = forward
        self._length = length
        self.ran: list[int] = []
        """Rows of each forward, in order."""

    @property
    def spec(self) -> ModelSpec:
        raise NotImplementedError

    def length(self, inputs: Mapping[str, Array]) -> int:
        return self._length or 1

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        rows = concatenate(jobs)["x"]
        tokens = len(rows) * self._length
        return Prepared(len(rows), rows, tokens, tokens)

    def run(self, prepared: Prepared) -> dict[str, Array]:
        self.ran.append(prepared.rows)
        return {"y": self._forward(prepared.payload)}


def fits(most: int, forward: Forward = lambda rows: rows * 2) -> Forward:
    """A forward on a device with room for `most` rows."""

    def on_device(rows: Array) -> Array:
        if len(rows) > most:
            raise OutOfMemory(f"{len(rows)} rows")
        return forward(rows)

    return on_device


def work_of(runtime: Device, jobs: Sequence[Sequence[float]], max_rows: int = 16) -> BatchRun:
    """A batch with one job per list of numbers, a row for each number."""
    items = []
    for order, numbers in enumerate(jobs):
        inputs = {"x": np.array([[number] for number in numbers], np.float32)}
        content, body = encode(inputs)
        header = JobHeader(f"double.{order}", "acme", "double", "normal", content)
        delivery = Delivery("double", Priority.NORMAL, f"{order + 1}-0".encode(), b"")
        job = ClaimedJob(delivery, header, body, len(numbers), 0.0, 0.0, 0)
        items.append(Pending(KEY, 2, job.rows, runtime.length(inputs), 0, 0.0, job))
    rows = sum(item.rows for item in items)
    return BatchRun(version_of(runtime, spec_of(), max_rows), Batch(KEY, items, rows, rows, "full", 2))


def run(work: BatchRun, executor: Executor | None = None) -> list[list[float] | str]:
    """The forward of one batch, on this thread: the numbers of each job's answer, or the code of its failure."""
    executor = executor or executor_of()
    executor.submit(work, prepare_apart=False)
    assert executor.begin("here") is work
    executor.run(work)
    executor.finish("here", work)
    return [answer.code if isinstance(answer, Failure) else answer["y"][:, 0].tolist() for answer in work.answers]


def executor_of(journal: RecordedJournal | None = None, clock: Callable[[], float] = lambda: 0.0) -> Executor:
    """An executor without threads."""
    return Executor(1, lambda: None, lambda _: {}, lambda _: None, clock, journal)


class RecordedJournal:
    """A journal that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, object]] = []

    def begin(
        self,
        seat: int,
        jobs: Sequence[Held],
        limit_s: float,
        now: float,
        form: FormInUse | None = None,
        *,
        is_last: bool = False,
    ) -> None:
        self.told.append(("begin", seat, [job.job_id for job in jobs]))

    def touch(self, seat: int, now: float) -> None:
        self.told.append(("touch", seat, now))

    def exceeded(self, seat: int) -> None:
        self.told.append(("exceeded", seat, None))

    def disturbed(self, seat: int) -> None:
        self.told.append(("disturbed", seat, None))

    def end(self, seat: int) -> None:
        self.told.append(("end", seat, None))

    def retire(self) -> None:
        self.told.append(("retire", -1, None))


SIXTEEN = [[number] for number in range(16)]


def test_a_batch_that_does_not_fit_is_halved_until_it_does():
    """Room for four rows: 16, then 8, then 4 at a time, every job answered, and the 8 that did not fit noted."""
    device = Device(fits(4))
    work = work_of(device, SIXTEEN)
    assert run(work) == [[2.0 * number] for number in range(16)]
    assert device.ran == [16, 8, 4, 4, 8, 4, 4]
    assert work.too_large == ForwardSize(0, 8)


def test_tokens_are_noted_where_forwards_have_them():
    """What did not fit is told in padded tokens, and the smallest of it counts."""
    work = work_of(Device(fits(4), length=100), SIXTEEN)
    run(work)
    assert work.too_large == ForwardSize(800, 8)


def test_one_large_job_is_cut_into_slices_that_fit():
    """A job of twelve rows on a device with room for four comes back whole, its rows in order."""
    device = Device(fits(4))
    work = work_of(device, [list(range(12))])
    assert run(work) == [[2.0 * number for number in range(12)]]
    assert device.ran == [12, 6, 3, 3, 3, 3]
    assert work.too_large == ForwardSize(0, 6)


def test_a_row_that_never_fits_fails_alone():
    """One row is too large for the device: its job fails, its neighbours are answered, and what they ran in is not
    what others are cut to half of.
    """

    def forward(rows: Array) -> Array:
        if (rows < 0).any():
            raise OutOfMemory("a large row")
        return rows * 2

    work = work_of(Device(forward), [[-1] if number == 5 else [number] for number in range(16)])
    answers = run(work)
    assert answers[5] == "ModelError"
    assert [answer for number, answer in enumerate(answers) if number != 5] == [
        [2.0 * number] for number in range(16) if number != 5
    ]
    assert len(work.misfits) == 5
    # The row is at fault, not the size of the batch.
    assert work.too_large is None
    alone = work_of(Device(forward), [[-1]])
    assert run(alone) == ["ModelError"]
    assert alone.too_large is None


class Activations:
    """What a forward allocates on its way."""


@pytest.mark.parametrize(
    ("error", "jobs"),
    [(OutOfMemory, SIXTEEN), (OutOfMemory, [list(range(16))]), (ValueError, SIXTEEN)],
    ids=["a batch does not fit", "a job does not fit", "a batch fails"],
)
def test_what_a_failed_forward_had_allocated_is_free_for_its_parts(
    error: type[Exception], jobs: Sequence[Sequence[float]]
):
    """While the parts run nothing of the whole is alive: on a full device they could not run beside it."""
    allocated: list[weakref.ref[Activations]] = []
    alive: list[int] = []

    def forward(rows: Array) -> Array:
        alive.append(sum(each() is not None for each in allocated))
        activations = Activations()
        allocated.append(weakref.ref(activations))
        if len(rows) > 4:
            raise error(f"{len(rows)} rows")
        return rows * 2

    work = work_of(Device(forward), jobs)
    assert "ModelError" not in run(work)
    assert len(alive) >= 6
    assert not any(alive)


def test_work_is_in_the_journal_while_it_runs_and_touched_at_every_part():
    """Begun with its jobs, touched before each half, ended: a split batch has its limit for each part."""
    now = iter(range(100))
    journal = RecordedJournal()
    run(work_of(Device(fits(1)), [[1], [2]]), executor_of(journal, lambda: float(next(now))))
    assert journal.told == [
        ("begin", 1, ["double.0", "double.1"]),
        ("touch", 1, 1.0),
        ("touch", 1, 2.0),
        ("end", 1, None),
    ]


def test_a_lost_device_ends_its_thread_and_keeps_the_batch_in_the_journal():
    """No halves, no answers, no end in the journal: the jobs run again in another process, as suspects."""

    def forward(rows: Array) -> Array:
        raise DeviceLost("cuda:0: an illegal access")

    device, journal = Device(forward), RecordedJournal()
    executor = Executor(1, lambda: None, lambda _: {}, lambda _: None, journal=journal)
    executor.start()
    executor.submit(work_of(device, SIXTEEN), prepare_apart=False)
    wait_until(lambda: not executor.is_alive(), 5, "the model thread ends")
    assert executor.device_lost == "cuda:0: an illegal access"
    assert device.ran == [16]
    assert [what for what, _, _ in journal.told] == ["begin"]
    assert len(executor.running()) == 1
    assert executor.take_done() == []
    executor.stop()


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_lost_instance_interrupts_its_run_and_no_other(is_prepared: bool):
    """No halves and no answers: the run says which process it was. The model thread takes the next batch."""

    def forward(rows: Array) -> Array:
        if rows[0, 0] == 0:
            raise InstanceLost("an instance was ended by SIGKILL", "7f3a")
        return rows * 2

    device, journal = Device(forward), RecordedJournal()
    executor = executor_of(journal)
    lost, sound = work_of(device, SIXTEEN), work_of(device, [[1.0]])
    if is_prepared:
        lost.prepared, lost.is_prepared = device.prepare([{"x": np.zeros((16, 1), np.float32)}]), threading.Event()
        lost.is_prepared.set()
    assert run(lost, executor) == []
    assert run(sound, executor) == [[2.0]]
    assert device.ran == [16, 1]
    assert (lost.incident, executor.device_lost) == ("7f3a", "")
    assert (executor.take_done(), executor.take_interrupted()) == ([sound], [lost])
    assert executor.take_interrupted() == []
    assert [what for what, _, _ in journal.told] == ["begin", "end"] * 2


def test_a_run_on_the_calling_thread_wakes_nobody_and_is_in_the_journal():
    """Its answers are there when the call returns, and `take_done` gives it once."""
    rung: list[bool] = []
    journal = RecordedJournal()
    executor = Executor(1, lambda: rung.append(True), lambda _: {}, lambda _: None, journal=journal)
    work = work_of(Device(fits(16)), SIXTEEN)
    executor.keep(work)
    executor.run_kept()
    assert isinstance(work.answers, JointAnswers)
    assert work.answers.outputs["y"][:, 0].tolist() == [2.0 * number for number in range(16)]
    assert (executor.take_done(), executor.take_done()) == ([work], [])
    assert (rung, executor.here, executor.idle) == ([], None, 1)
    assert [what for what, _, _ in journal.told] == ["begin", "end"]


def test_a_device_that_is_lost_on_the_calling_thread_is_noted():
    """As on a model thread: no answers, no end in the journal."""

    def forward(rows: Array) -> Array:
        raise DeviceLost("cuda:0: an illegal access")

    journal = RecordedJournal()
    executor = executor_of(journal)
    executor.keep(work_of(Device(forward), SIXTEEN))
    executor.run_kept()
    assert (executor.device_lost, executor.here) == ("cuda:0: an illegal access", None)
    assert executor.take_done() == []
    assert [what for what, _, _ in journal.told] == ["begin"]


def test_the_calling_thread_runs_the_batch_that_it_is_given():
    """Another one stands before the batch that was kept. It has begun, so it is run; a model thread has the other."""
    executor = executor_of()
    first, kept = work_of(Device(fits(16)), [[1.0]]), work_of(Device(fits(16)), [[2.0]])
    executor.submit(first, prepare_apart=False)
    executor.keep(kept)
    executor.run_kept()
    assert len(first.answers) == 1
    assert (executor.take_done(), executor.running(), executor.here) == ([first], [], None)
    assert executor.waiting() == [kept]
    assert executor.begin("a model thread") is kept


def test_it_is_known_when_the_calling_thread_has_left_a_run():
    """At its end, also if the device was lost, and before other threads see that it has left."""
    now = [5.0]

    def forward(rows: Array) -> Array:
        now[0] += 60.0
        if (rows < 0).any():
            raise DeviceLost("cuda:0: an illegal access")
        return rows

    executor = executor_of(clock=lambda: now[0])
    executor.run_kept()
    assert executor.left_at == 0.0, "there was none"
    for number, left_at in ((1.0, 65.0), (-1.0, 125.0)):
        executor.keep(work_of(Device(forward), [[number]]))
        executor.run_kept()
        assert executor.left_at == left_at


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_run_on_the_calling_thread_that_exceeds_its_limit_condemns_the_process(is_alone: bool):
    """Other threads see it from its limit on; the journal has the note if no job has another forward."""
    now = [0.0]
    seen: list[str | None] = []

    def forward(rows: Array) -> Array:
        limit_s = work.limit_s
        for at in (limit_s, limit_s + 0.1):
            now[0] = at
            seen.append(executor.overdue_here(at))
        return rows * 2

    journal = RecordedJournal()
    executor = executor_of(journal, lambda: now[0])
    work = work_of(Device(forward), SIXTEEN[: 1 if is_alone else 2])
    executor.keep(work)
    executor.run_kept()
    assert seen == [None, f"a forward of double took longer than its limit of {work.limit_s:g} s"]
    assert [what for what, _, _ in journal.told] == ["begin", *(["exceeded"] if is_alone else []), "end"]
    assert executor.overdue_here(1e9) is None


def model(models_root, **batching: int) -> ServedVersion:
    """The model `double`, as served with these limits."""
    return ServedVersion(
        load_package(write_double(models_root)), InferenceConfig.model_validate({"batching": batching})
    )


def test_a_cap_of_rows_is_half_of_what_did_not_fit_and_is_relaxed_step_by_step(models_root):
    """8 of 16 rows did not fit: batches of 4, of 8 after five quiet minutes, of 16 after ten; not a moment earlier."""
    served = model(models_root)
    served.queue.cap_batches(ForwardSize(0, 8), 1000.0)
    assert served.queue.max_rows == 4
    served.queue.raise_cap(1299.9)
    assert served.queue.max_rows == 4
    served.queue.raise_cap(1300.0)
    assert (served.queue.max_rows, served.queue.is_capped) == (8, True)
    served.queue.raise_cap(1600.0)
    assert (served.queue.max_rows, served.queue.is_capped) == (16, False)
    served.queue.raise_cap(9999.0)
    assert served.queue.max_rows == 16


def test_another_misfit_tightens_the_cap_and_begins_the_wait_anew(models_root):
    """A smaller misfit halves again; a larger one loosens nothing."""
    served = model(models_root)
    served.queue.cap_batches(ForwardSize(0, 8), 0.0)
    served.queue.cap_batches(ForwardSize(0, 4), 200.0)
    assert served.queue.max_rows == 2
    served.queue.cap_batches(ForwardSize(0, 16), 250.0)
    assert served.queue.max_rows == 2
    served.queue.raise_cap(549.0)
    assert served.queue.max_rows == 2
    served.queue.raise_cap(550.0)
    assert served.queue.max_rows == 4


def test_a_cap_of_tokens_leaves_short_texts_their_full_batches(models_root):
    """800 padded tokens did not fit: what is longer is cut to 400, sixteen rows of 20 tokens still run at once."""
    root = models_root
    write_package(root, "texts", "def build():\n    return lambda inputs: {'y': inputs['x']}\n")
    served = ServedVersion(load_package(root / "texts" / "1"), InferenceConfig())
    served.queue.cap_batches(ForwardSize(800, 8), 0.0)
    assert served.queue.max_rows == 16
    assert [batch_rows(served, length) for length in (20, 50, 100, 500)] == [16, 8, 4, 1]
    served.queue.raise_cap(300.0)
    assert batch_rows(served, 100) == 8
    for minutes in range(10, 100, 5):
        served.queue.raise_cap(60.0 * minutes)
    assert not served.queue.is_capped
    assert batch_rows(served, 500) == 16


def batch_rows(served: ServedVersion, length: int) -> int:
    """The rows of the first batch of 16 rows of so many tokens each."""
    one = work_of(Device(fits(16)), [[0]]).batch.items[0]
    for _ in range(16):
        served.queue.batcher.add(Pending(KEY, 2, 1, length, 0, 0.0, one.job))
    batch = served.queue.batcher.next(0.0, device_idle=True)
    served.queue.batcher.discard(lambda _: True)
    assert batch is not None
    return batch.rows


def test_model_threads_are_added_while_it_runs():
    """For a version that may run more forwards at a time than those before it; never fewer, nor beyond the seats."""
    meeting = threading.Barrier(3)

    def resolve(rows: Array) -> Array:
        meeting.wait(180)
        return rows

    ended = threading.Semaphore(0)
    executor = Executor(1, ended.release, lambda _: {}, lambda _: None)
    executor.grow(2)
    executor.start()
    try:
        executor.grow(3)
        executor.grow(1)
        assert (executor.threads, executor.idle) == (3, 3)
        works = [work_of(Device(resolve), [[float(number)]]) for number in range(3)]
        for work in works:
            executor.submit(work, prepare_apart=False)
        for _ in works:
            assert ended.acquire(timeout=180)
        assert executor.is_alive()
        assert {work.seat for work in works} == {1, 2, 3}
        assert not [work for work in works if isinstance(work.answers[0], Failure)]
        executor.grow(1000)
        assert executor.threads == seats_for(1) - 2
    finally:
        executor.stop()
