"""Parts of a worker that check what they do, or let virtual time pass; worker.py puts them in their places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from penstock.registry.envelope import Failure
from penstock.workers.backlog import Waiting
from penstock.workers.batch_run import BatchRun
from penstock.workers.claims import WakeUp
from penstock.workers.executor import Executor
from penstock.workers.frameworks.inference_proxy import InferenceProxy
from penstock.workers.job import ClaimedJob
from penstock.workers.router import JobRouter
from penstock.workers.runtime.base import Runtime
from penstock.workers.runtime.python_entrypoint import PythonRuntime
from penstock.workers.scheduler import Scheduler
from penstock.workers.versions.loader import Loader
from penstock.workers.versions.version import ServedVersion
from tests.simulation.broker import UnreliableEnd
from tests.simulation.virtual_time import Schedule

__all__ = [
    *("Double", "SteppedExecutor", "SteppedLoader", "SteppedRouter", "SteppedScheduler", "SteppedWakeUp"),
    *("content_hash_of", "put_in_place"),
]

Double: TypeAlias = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
"""Version and inputs -> outputs."""


class SteppedWakeUp(WakeUp):
    """A bell without a descriptor, which the scheduler of the schedule hears, too. Nobody sleeps."""

    hear_bell: Callable[[], None] = staticmethod(lambda: None)
    has_answer: Callable[[], bool] = staticmethod(lambda: False)
    """Whether the blocking claim has one."""

    def __init__(self) -> None:
        self.fd = -1
        self.is_lost = False
        self.has_rung = False
        """Since the I/O thread was last awake."""
        self.has_woken = False
        """Whether a ring ended the last sleep, or came before it."""

    def ring(self) -> None:
        """As ever."""
        self.has_rung = True
        self.hear_bell()

    def clear(self) -> None:
        """As ever."""
        self.has_rung = False

    def sleep(self, answer_fd: int, timeout_s: float) -> bool:
        """As ever, for no time."""
        self.has_woken, self.has_rung = self.has_rung, False
        return answer_fd >= 0 and self.has_answer()

    def forget_descriptors(self) -> None:
        """There are none."""


class SteppedRouter(JobRouter):
    """Says when it finds no worker with a version."""

    when_nowhere: Callable[[str, str], None] = staticmethod(lambda _slot, _label: None)

    def find_elsewhere(self, job: ClaimedJob, *, waiting: int) -> ServedVersion | str | Failure | None:
        """As ever."""
        place = super().find_elsewhere(job, waiting=waiting)
        if isinstance(place, Failure):
            self.when_nowhere(job.header.model, job.header.version)
        return place


class SteppedScheduler(Scheduler):
    """Checks that no more urgent job with the same batch key stays behind; ageing is off in simulations."""

    violate: Callable[[str], None] = staticmethod(lambda _: None)
    worker = ""
    end: UnreliableEnd | None = None

    def next_run(self, expired: list[Waiting], *, is_idle: bool) -> BatchRun | None:
        """As ever."""
        run = super().next_run(expired, is_idle=is_idle)
        if run is not None:
            if run.version.policy.concurrency > self._executor.threads:
                self.violate(f"fewer model threads than a version may use: {self.worker}")
            least = max(item.priority for item in run.batch.items)
            pending = run.version.queue.batcher.pending()
            if any(item.priority < least and item.key == run.batch.key for item in pending):
                self.violate(f"batched a less urgent job first: {self.worker}")
        return run


class SteppedExecutor(Executor):
    """Checks what runs on the I/O thread, and lets the time of such a forward pass there."""

    violate: Callable[[str], None] = staticmethod(lambda _: None)
    worker = ""
    pass_time: Callable[[BatchRun, Callable[[BatchRun], None]], None]
    """Called with a run on the I/O thread, and with what runs it."""

    def submit(self, run: BatchRun, *, prepare_apart: bool) -> None:
        """As ever."""
        if self.kept is not None:
            self.violate(f"submitted beside a batch that is kept: {self.worker}")
        super().submit(run, prepare_apart=prepare_apart)

    def run_kept(self) -> None:
        """As ever."""
        if self.kept is not None and self.running():
            self.violate(f"ran on the I/O thread beside a model thread: {self.worker}")
        if self.kept is not None and any(job.is_suspect for job in self.kept.jobs):
            self.violate(f"ran a suspect on the I/O thread: {self.worker}")
        super().run_kept()

    def run(self, run: BatchRun) -> None:
        """As ever; on the I/O thread it takes its time."""
        if self.here is run:
            self.pass_time(run, super().run)
        else:
            super().run(run)


class SteppedLoader(Loader):
    """Loads take virtual time, and some of them fail."""

    schedule: Schedule
    double: Double
    has_short_forwards = False
    seats = 0

    def begin(self, version: ServedVersion, runtime: Runtime) -> None:
        """See Loader.begin."""
        rng = self.schedule.rng
        self.schedule.inject("load", version.spec.reference)
        problem = "a load that fails" if rng.random() < 0.1 else ""

        def end() -> None:
            put_in_place(version, self.double, self.has_short_forwards, self.seats)
            self.end(runtime, problem, 0)

        self.schedule.after(rng.choice((0.0, rng.uniform(0.0, 0.3), rng.uniform(0.0, 1.5))), end)


class _UnboundRuntime(PythonRuntime):
    """Of a double that runs on any thread."""

    @property
    def may_change_threads(self) -> bool:
        """As that of a model of torch."""
        return True


def put_in_place(version: ServedVersion, double: Double, may_change_threads: bool, seats: int) -> None:
    """The double in the place of what the package would build, with the hash that promotions name."""
    if seats:
        version.follow(replace(version.policy, seats=seats, concurrency=2 * seats))
    assert isinstance(version.runtime, PythonRuntime)
    if may_change_threads:
        version.runtime.__class__ = _UnboundRuntime
    version.runtime.model = partial(double, version.label)
    version.runtime._adapter = InferenceProxy(version.runtime.model)
    version.runtime._content_hash = content_hash_of(version.label)


def content_hash_of(version: str) -> str:
    """What the doubles hash to."""
    return version * 64
