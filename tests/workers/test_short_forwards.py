"""A batch that the I/O thread runs itself, and the same batch on a model thread: nothing but the thread differs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from penstock.registry.broker.base import CommitStatus
from penstock.registry.envelope import Failure, Keyring, Options, Retry
from penstock.registry.errors import OutOfMemory
from penstock.registry.settings_sections import CacheConfig
from penstock.registry.tensors import Array
from penstock.workers.batch_run import BatchRun
from penstock.workers.cache import AnswerCache, SingleFlight
from penstock.workers.completer import Completer
from penstock.workers.executor import Executor
from penstock.workers.job import ClaimedJob
from penstock.workers.leases import LeasedJobs
from penstock.workers.observe.listener import NullListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime.base import DeviceLost, InstanceLost
from penstock.workers.scheduler import Scheduler
from penstock.workers.versions.version import ServedModel
from tests.workers.claims_of_jobs import KINDS, SIGNING, UNSIGNED, Sealer, delivery_of
from tests.workers.doubles import NEVER_MS, job_of, run_of, spec_of, version_of
from tests.workers.test_executor import Device, RecordedJournal
from tests.workers.test_shared_headers import Reader

NOW_MS: Final = 5000.0
RAISES, NOT_A_NUMBER, TOO_LARGE, ENDS_INSTANCE, LOSES_DEVICE = -1.0, -2.0, -3.0, -4.0, -5.0
FINITE: Final = {"name": "y", "dtype": "float32", "shape": ["batch", 1]}
NUMBERS: Final[Mapping[str, float]] = {
    "raises": RAISES,
    "raises, has tries": RAISES,
    "NaN": NOT_A_NUMBER,
    "never fits": TOO_LARGE,
    "ends its instance": ENDS_INSTANCE,
    "loses the device": LOSES_DEVICE,
}
"""The first number of jobs of a kind, which tells the model what to do."""
KIND: Final = st.sampled_from(
    [*["good"] * 4, *sorted({*NUMBERS} - {"ends its instance", "loses the device"}), "cancelled", "lost", "expired"]
)
JOB: Final = st.tuples(KIND, st.integers(1, 3))
LOSS: Final = st.sampled_from(["", "", "", "ends its instance", "loses the device"])


def forward_of(room: int, reached: list[threading.Thread]) -> Any:
    """A model on a device with room for so many rows. reached: takes the thread of each forward."""

    def forward(rows: Array) -> Array:
        reached.append(threading.current_thread())
        if (rows == RAISES).any():
            raise ValueError("a bad question")
        if (rows == ENDS_INSTANCE).any():
            raise InstanceLost("an instance was ended by SIGKILL", "7f3a")
        if (rows == LOSES_DEVICE).any():
            raise DeviceLost("cuda:0: an illegal access")
        if len(rows) > room or (rows == TOO_LARGE).any():
            raise OutOfMemory(f"{len(rows)} rows")
        return np.where(rows == NOT_A_NUMBER, np.float32(np.nan), rows * 2)

    return forward


class Worker:
    """The executor and the completer of a worker, at 100 s by its clock and at 5000 ms by the broker's."""

    def __init__(self, room: int, keyring: Keyring) -> None:
        self.reached: list[threading.Thread] = []
        self.device = Device(forward_of(room, self.reached))
        self.version = version_of(self.device, spec_of(outputs=[FINITE]), 64)
        self.journal, self.points, self.leased = RecordedJournal(), list[str](), LeasedJobs()
        self.executor = Executor(
            1,
            lambda: None,
            Scheduler.too_late_check(lambda: NOW_MS),
            self.points.append,
            lambda: 100.0,
            self.journal,
            lambda: self.points.append("after the run"),
        )
        self.completer = Completer(
            "worker-1",
            keyring,
            {"double": ServedModel("double", self.version)},
            self.leased,
            SingleFlight(),
            AnswerCache(CacheConfig(), lambda: 100.0),
            NullListener(),
            InferenceMetrics((1.0,)),
            client_tracebacks=True,
            now_ms=lambda: NOW_MS,
            clock=lambda: 100.0,
            jitter=lambda: 1.0,
        )

    def run_of(self, jobs: Sequence[ClaimedJob]) -> BatchRun:
        """A batch of copies of these jobs."""
        mine = [structs.replace(job) for job in jobs]
        self.leased.take(mine)
        return run_of(self.version, *mine)

    def run_on_a_model_thread(self, run: BatchRun) -> None:
        """To its end, and that of the thread."""
        self.executor.start()
        self.executor.submit(run, prepare_apart=False)
        self.executor.stop()
        self.executor.join(10.0)

    def facts(self, run: BatchRun) -> dict[str, Any]:
        """All that is known of a run that has ended, and what becomes of its jobs."""
        done, interrupted = self.executor.take_done(), self.executor.take_interrupted()
        self.completer.collect(done)
        goes_on = [(type(each).__name__, each.job.header.id) for each in self.completer.seal()]
        commits = self.completer.commits
        settlement = self.completer.settle([CommitStatus.COMMITTED] * len(commits), 99.0)
        queue = self.version.queue
        return {
            "answers": [shown(answer) for answer in run.answers],
            "ways": ([each is run for each in done], [each is run for each in interrupted]),
            "process": (self.executor.device_lost, self.executor.here, len(self.executor.running())),
            "journal": self.journal.told,
            "points": self.points,
            "forwards": self.device.ran,
            "sizes": (run.misfits, run.fitted, run.too_large, run.output_bytes, queue.max_rows),
            "levels": (run.failures, run.level, run.incident),
            "commits": commits,
            "goes on": goes_on,
            "settled": [(outcome.job.header.id, outcome.how, state) for outcome, state in settlement.outcomes],
            "memory": (len(self.leased), queue.in_memory, queue.in_flight, queue.usual_forward_s),
        }


def shown(answer: Any) -> object:
    """An answer, as it can be compared: NaN is equal to itself."""
    if isinstance(answer, Failure):
        return answer
    return {name: (values.dtype, values.shape, values.tobytes()) for name, values in answer.items()}


def job_of_kind(kind: str, rows: int, number: int) -> ClaimedJob:
    """A job of this kind. The numbers of its rows differ from those of others."""
    numbers = [float(10 * number + row + 1) for row in range(rows)]
    numbers[0] = NUMBERS.get(kind, numbers[0])
    options = Options(retry=Retry(attempts=2)) if kind == "raises, has tries" else Options()
    job = job_of(*numbers, expires_ms=int(NOW_MS) - 1 if kind == "expired" else NEVER_MS, options=options)
    job.is_cancelled, job.is_lost = kind == "cancelled", kind == "lost"
    return job


def assert_equal_on_both_threads(jobs: Sequence[ClaimedJob], room: int, keyring: Keyring) -> dict[str, Any]:
    """Run the jobs as one batch on this thread and on a model thread; returns what is known of both."""
    here, there = Worker(room, keyring), Worker(room, keyring)
    run_here, run_there = here.run_of(jobs), there.run_of(jobs)
    here.executor.keep(run_here)
    here.executor.run_kept()
    there.run_on_a_model_thread(run_there)
    assert {*here.reached} <= {threading.current_thread()}
    assert threading.current_thread() not in there.reached
    facts = here.facts(run_here)
    assert facts == there.facts(run_there)
    return facts


@pytest.mark.parametrize("keyring", [UNSIGNED, SIGNING], ids=["unsigned", "signed"])
@settings(max_examples=60, derandomize=True)
@given(kinds=st.lists(JOB, min_size=1, max_size=6), room=st.integers(1, 8), loss=LOSS, at=st.integers(0, 5))
@example(kinds=[("cancelled", 1), ("expired", 2)], room=8, loss="", at=0)
@example(kinds=[("raises", 1), ("NaN", 1), ("never fits", 2), ("lost", 1), ("good", 3)], room=2, loss="", at=0)
def test_a_batch_of_any_mix_ends_the_same_on_both_threads(
    kinds: list[tuple[str, int]], room: int, loss: str, at: int, keyring: Keyring
):
    """Equal answers, notes in the journal, forwards, caps and commits, whatever its jobs or the device do."""
    if loss:
        kinds.insert(at % (len(kinds) + 1), (loss, 1))
    jobs = [job_of_kind(kind, rows, number) for number, (kind, rows) in enumerate(kinds)]
    facts = assert_equal_on_both_threads(jobs, room, keyring)
    if facts["process"][0]:
        assert facts["ways"] == ([], [])
    else:
        assert facts["ways"] == (([], [True]) if facts["levels"][2] else ([True], []))
        assert facts["memory"][2] == (1 if facts["levels"][2] else 0)


@pytest.mark.parametrize("keyring", [UNSIGNED, SIGNING], ids=["unsigned", "signed"])
@settings(max_examples=30, derandomize=True)
@given(kinds=st.lists(st.sampled_from(["plain", "another tenant", "several rows", "a reply"]), min_size=1, max_size=6))
def test_a_plain_batch_ends_the_same_on_both_threads(kinds: list[str], keyring: Keyring):
    """Its results are sealed together, as they are behind a model thread."""
    sealer = Sealer(keyring)
    deliveries = [delivery_of(sealer.job(KINDS[kind]), KINDS[kind], number) for number, kind in enumerate(kinds)]
    jobs = Reader(keyring).open_all(deliveries, 96.5, 6500.0)
    version = version_of(Device(lambda rows: rows), spec_of(), 16)
    for job in jobs:
        version.fit(job)
        job.expires_ms = NEVER_MS
    facts = assert_equal_on_both_threads(jobs, 100, keyring)
    assert len(facts["commits"]) == len(jobs)
    assert facts["settled"] == [], "the run is settled as a whole"
