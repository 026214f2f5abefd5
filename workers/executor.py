"""The model threads: micro-batches in, outputs out, one entry per job.

    I/O thread -- submit --> ready --> model thread: prepare, run --> done -- wake --> I/O thread
                  recall <--'   `--> prepare thread, for a batch that waits while another one runs

A model thread is a loop over `begin`, `run` and `finish`, which anybody may step in its place.
An exception bisects a batch, so that one bad job fails alone; a batch that does not fit the device is halved. What
is on a model thread stands in the journal, for whoever looks into this process's death.
Nothing here talks to a broker, but for the events of streaming jobs, which their context sends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from queue import SimpleQueue
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from penstock.registry.broker.base import Held
from penstock.registry.envelope import Failure
from penstock.registry.errors import JobFailed
from penstock.registry.tensors import Array
from penstock.workers.batching.batcher import Batch
from penstock.workers.job import ClaimedJob
from penstock.workers.process.crash_journal import FormInUse, Journal, NullJournal
from penstock.workers.runtime.base import DeviceLost, Prepared, Runtime, StreamContext
from penstock.workers.runtime.forms import EAGER, Forms

__all__ = ["Executor", "JobStream", "Outputs", "TooLarge", "BatchRun", "seats_for"]

logger = logging.getLogger("penstock.runtime")

Outputs: TypeAlias = dict[str, Array]
_MOST_THREADS: Final = 16
"""As many as `grow` makes: each model thread has a seat in the journal, whose file does not grow."""
_PREPARE_SEAT: Final = 0
_LONGEST_MESSAGE = 500
_size = attrgetter("size")
_STOPPED = Failure("Cancelled", "The job was cancelled while it ran")


class JobStream(StreamContext, Protocol):
    """What an entry point sees of its job, and where its chunks go."""

    def chunk(self, values: Mapping[str, Array], /) -> None:
        """Sends what the entry point yielded."""


class TooLarge(NamedTuple):
    """What did not fit a device."""

    rows: int
    tokens: int

    @property
    def size(self) -> tuple[int, int]:
        """What of two forwards takes more memory: the tokens say, and the rows where there are none."""
        return self.tokens, self.rows


@dataclass(slots=True, eq=False)
class BatchRun:
    """One micro-batch on its way through a model. Times are monotonic seconds."""

    batch: Batch[ClaimedJob]
    runtime: Runtime
    max_rows: int
    finite_outputs: Sequence[str] = ()
    """Outputs in which NaN and infinity fail their job."""
    open_context: Callable[[ClaimedJob, Callable[[], None]], JobStream] | None = None
    """For streaming models: makes the job's context, which calls back whenever the job shows progress."""
    limit_s: float = inf
    """For how long it may show no progress."""
    content_hash: str = ""
    """Of the version that answers."""
    forms: Forms | None = None
    """Those of a model that has others than the one that its author built."""
    form: int = 0
    """See Forms.generation: that of when the batch was made."""
    is_as_built: bool = False
    """Whether no other form of the model may run it: for what was on the model when a process died, see `forward`."""
    clock: Callable[[], float] = time.monotonic
    journal: Journal = field(default_factory=NullJournal)
    """Both are its executor's."""
    seat: int = 0
    """The model thread that runs it."""
    answers: list[Outputs | Failure] = field(default_factory=list)
    """One per job of the batch once it is done, in order."""
    started: float = 0.0
    ended: float = 0.0
    alive_at: float = 0.0
    """When it last showed progress; a forward's limit counts from here."""
    tokens: int = 0
    padded_tokens: int = 0
    prepared: Prepared | None = None
    is_prepared: threading.Event | None = None
    """Set for work that the prepare thread looks after."""
    misfits: list[TooLarge] = field(default_factory=list)
    """The parts of it that did not fit the device."""
    fitted: tuple[int, int] = (0, 0)
    """The size of the largest part that did."""

    def touch(self) -> None:
        """It shows progress."""
        self.alive_at = self.clock()
        self.journal.touch(self.seat, self.alive_at)

    def forward(self, prepared: Prepared) -> Outputs:
        """See Runtime.run. A form may end or hang its process for a job that the model as it was built would answer."""
        if self.is_as_built and self.forms is not None:
            return self.forms.reference(prepared)
        return self.runtime.run(prepared)

    @property
    def form_in_use(self) -> FormInUse | None:
        """What is about to run it, where that is not the model as its author built it."""
        if self.is_as_built or self.forms is None or (name := self.forms.name) == EAGER:
            return None
        return FormInUse(self.batch.key.model, self.content_hash, name)

    @property
    def held(self) -> list[Held]:
        """Its jobs as the broker knows them."""
        return [item.job.held for item in self.batch.items]

    def did_not_fit(self, rows: int, tokens: int) -> None:
        """A forward of so many rows and padded tokens, 0 where there are none, was too large for the device."""
        self.misfits.append(TooLarge(rows, tokens))

    def did_fit(self, prepared: Prepared) -> None:
        """A forward was not too large."""
        self.fitted = max(self.fitted, (prepared.padded_tokens, prepared.rows))

    @property
    def too_large(self) -> TooLarge | None:
        """The smallest part that did not fit the device and could be halved, of those larger than any that did fit.

        Otherwise one job was at fault and not the size of the batch: others need not be cut for it.
        """
        halvable = (part for part in self.misfits if part.size > max(self.fitted, (0, 1)))
        return min(halvable, key=_size, default=None)


def seats_for(threads: int) -> int:
    """Seats in the journal of an executor that begins with so many model threads: theirs, those of threads that may
    come, and the prepare thread's."""
    return max(threads, _MOST_THREADS) + 1


class Executor:
    """Runs work on `threads` model threads, in the order of submission.

    Both are called on a model thread: `on_done` when work has ended, `too_late` with the jobs of work that is about
    to begin; those for whose id() it names a failure do not run. clock: monotonic seconds. journal: with the seats that
    `seats_for` says.
    """

    def __init__(
        self,
        threads: int,
        on_done: Callable[[], None],
        too_late: Callable[[Sequence[ClaimedJob]], Mapping[int, Failure]],
        checkpoint: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
    ) -> None:
        self.threads = threads
        self._most = seats_for(threads) - 1
        self._on_done = on_done
        self._too_late = too_late
        self._checkpoint = checkpoint
        self._clock = clock
        self._journal = journal or NullJournal()
        self._seats: dict[Hashable, int] = {}
        self.device_lost = ""
        """Why no forward can succeed in this process any more; empty while all is well."""
        self._lock = threading.Lock()
        """Held for moments: work is always in exactly one of ready, running, done."""
        self._ready: deque[BatchRun] = deque()
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._unprepared: SimpleQueue[BatchRun | None] = SimpleQueue()
        self._done: deque[BatchRun] = deque()
        self._running: dict[Hashable, BatchRun | None] = {}
        """By seat: the model thread, or whatever steps in its place."""
        self._model_threads: set[threading.Thread] = set()
        self._preparer = threading.Thread(target=self._prepare_ahead, name="prepare", daemon=True)
        self._is_started = False

    def start(self) -> None:
        """Begins."""
        self._is_started = True
        self._preparer.start()
        for _ in range(self.threads):
            self._add_thread()

    def grow(self, threads: int) -> None:
        """From now on there are at least so many model threads, or as many as the journal has seats for."""
        wanted = min(threads, self._most)
        if wanted < threads:
            logger.warning("a restart would give a version more model threads", extra={"asked": threads, "has": wanted})
        for _ in range(self.threads, wanted):
            self.threads += 1
            if self._is_started:
                self._add_thread()

    def stop(self) -> None:
        """Ends the threads as they become idle."""
        self._unprepared.put(None)
        for _ in self._model_threads:
            self._tokens.put(False)

    def is_alive(self) -> bool:
        """Whether every thread runs."""
        return self._preparer.is_alive() and all(thread.is_alive() for thread in tuple(self._model_threads))

    @property
    def idle(self) -> int:
        """Model threads without work, less the work that waits for one."""
        with self._lock:
            running = sum(work is not None for work in self._running.values())
            return self.threads - len(self._ready) - running

    def waiting(self) -> list[BatchRun]:
        """The work that waits for a model thread."""
        return list(self._ready)

    def running(self) -> list[BatchRun]:
        """The work on the model threads now."""
        return [work for work in tuple(self._running.values()) if work is not None]

    def submit(self, work: BatchRun, *, prepare_apart: bool) -> None:
        """Queue work; `prepare_apart` has its texts tokenised while the model threads are busy."""
        work.clock, work.journal = self._clock, self._journal
        if prepare_apart:
            work.is_prepared = threading.Event()
            self._unprepared.put(work)
        self._ready.append(work)
        self._tokens.put(True)

    def recall(self, *, more_urgent: int = -1) -> BatchRun | None:
        """The last submitted work that has not begun, if any: it will not run.

        more_urgent: only work whose leader is less urgent than this priority.
        """
        with self._lock:
            if not self._ready or self._ready[-1].batch.priority <= more_urgent:
                return None
            return self._ready.pop()

    def take_done(self) -> list[BatchRun]:
        """Work that has ended since the last call."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def begin(self, seat: Hashable) -> BatchRun | None:
        """Puts the next work on a model thread's seat. None without any: it was recalled."""
        with self._lock:
            if not self._ready:
                return None
            work = self._ready.popleft()
            work.started = work.alive_at = self._clock()
            work.seat = self._seats.setdefault(seat, len(self._seats) + 1)
            self._running[seat] = work
        self._journal.begin(work.seat, work.held, work.limit_s, work.started, work.form_in_use)
        return work

    def run(self, work: BatchRun) -> None:
        """The forward of work that has begun: an answer for each of its jobs. Raises DeviceLost."""
        _answer(work, self._too_late, self._checkpoint)

    def finish(self, seat: Hashable, work: BatchRun) -> None:
        """Hands in work that has run."""
        self._journal.end(work.seat)
        with self._lock:
            work.ended = self._clock()
            self._done.append(work)
            self._running[seat] = None
        self._on_done()

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name="model", daemon=True)
        self._model_threads.add(thread)
        thread.start()

    def _serve(self) -> None:
        seat = threading.current_thread()
        while self._tokens.get():
            work = self.begin(seat)
            if work is None:
                continue
            try:
                self.run(work)
            except DeviceLost as error:
                # Its jobs stay in the journal: they are suspects, and run alone where the device works.
                self.device_lost = str(error)
                return
            self.finish(seat, work)

    def _prepare_ahead(self) -> None:
        while (work := self._unprepared.get()) is not None:
            self._journal.begin(_PREPARE_SEAT, work.held, inf, self._clock())
            try:
                work.prepared = work.runtime.prepare([item.job.inputs for item in work.batch.items])
            except (Exception, SystemExit):  # the model thread meets it again, job by job
                logger.debug("preparing failed", exc_info=True)
            self._journal.end(_PREPARE_SEAT)
            if work.is_prepared is not None:
                work.is_prepared.set()


def _answer(
    work: BatchRun,
    too_late: Callable[[Sequence[ClaimedJob]], Mapping[int, Failure]],
    checkpoint: Callable[[str], None],
) -> None:
    jobs = [item.job for item in work.batch.items]
    refusals = too_late(jobs)
    checkpoint("mid-forward")
    if not refusals:
        work.answers = _forward(work, jobs, is_whole=True)
    else:
        admitted = [job for job in jobs if id(job) not in refusals]
        answers = iter(_forward(work, admitted, is_whole=False) if admitted else ())
        work.answers = [refusals.get(id(job)) or next(answers) for job in jobs]
    checkpoint("after-forward")


def _forward(work: BatchRun, jobs: list[ClaimedJob], *, is_whole: bool) -> list[Outputs | Failure]:
    if work.open_context is not None:
        return [_stream(work, job, work.open_context(job, work.touch)) for job in jobs]
    if work.is_prepared is not None:
        work.is_prepared.wait()
    return _run(work, jobs, work.prepared if is_whole else None)


def _run(work: BatchRun, jobs: list[ClaimedJob], prepared: Prepared | None) -> list[Outputs | Failure]:
    rows = sum(job.rows for job in jobs)
    try:
        if prepared is None:
            prepared = work.runtime.prepare([job.inputs for job in jobs])
        if prepared.rows > work.max_rows:
            return [_run_in_slices(work, job, work.max_rows) for job in jobs]
        outputs = work.forward(prepared)
        work.tokens += prepared.tokens
        work.padded_tokens += prepared.padded_tokens
        work.did_fit(prepared)
        return _by_job(outputs, jobs, work.finite_outputs)
    except DeviceLost:
        raise
    except MemoryError as error:
        work.did_not_fit(rows, prepared.padded_tokens if prepared else 0)
        logger.warning("a forward did not fit the device", extra={"rows": rows})
        if rows == 1:
            return [_failure(error, jobs[0])]
    except (Exception, SystemExit) as error:  # a model may raise anything, and its neighbours must not pay for it
        if len(jobs) == 1:
            return [_failure(error, jobs[0])]
        logger.warning("a batch failed and is bisected", extra={"size": len(jobs), "error": repr(error)[:200]})
    # Out here, because an exception that is being handled keeps all that the failed forward had on the device.
    if len(jobs) > 1:
        return _run_halves(work, jobs)
    return [_run_in_slices(work, jobs[0], rows // 2)]


def _run_halves(work: BatchRun, jobs: list[ClaimedJob]) -> list[Outputs | Failure]:
    middle = len(jobs) // 2
    answers = []
    for half in (jobs[:middle], jobs[middle:]):
        work.touch()
        answers += _run(work, half, None)
    return answers


def _run_in_slices(work: BatchRun, job: ClaimedJob, max_rows: int) -> Outputs | Failure:
    """A job with more rows than a batch may have, or than fit the device."""
    parts: list[Outputs] = []
    start = 0
    try:
        while start < job.rows:
            work.touch()
            stop = min(start + max_rows, job.rows)
            inputs = {name: values[start:stop] for name, values in job.inputs.items()}
            prepared = work.runtime.prepare([inputs])
            try:
                parts.append(work.forward(prepared))
                work.did_fit(prepared)
                start = stop
            except MemoryError:
                work.did_not_fit(stop - start, prepared.padded_tokens)
                if stop - start == 1:
                    raise
                max_rows = (stop - start) // 2
        outputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return _by_job(outputs, [job], work.finite_outputs)[0]
    except DeviceLost:
        raise
    except (Exception, SystemExit) as error:  # as in _run
        return _failure(error, job)


def _by_job(outputs: Mapping[str, Array], jobs: list[ClaimedJob], finite: Sequence[str]) -> list[Outputs | Failure]:
    rows = sum(job.rows for job in jobs)
    for name, values in outputs.items():
        if values.shape[:1] != (rows,):
            raise ValueError(f"output {name} has shape {values.shape}, expected {rows} rows")
    answers: list[Outputs | Failure] = []
    start = 0
    for job in jobs:
        stop = start + job.rows
        answers.append({name: values[start:stop] for name, values in outputs.items()})
        start = stop
    for name in finite:
        if not np.isfinite(outputs[name]).all():
            answers = [answer if _is_finite(answer, name) else _not_finite(name) for answer in answers]
    return answers


def _is_finite(answer: Outputs | Failure, name: str) -> bool:
    return isinstance(answer, Failure) or bool(np.isfinite(answer[name]).all())


def _not_finite(name: str) -> Failure:
    return Failure("NonFiniteOutput", f"Output {name} contains NaN or infinity. Expected finite numbers")


def _stream(work: BatchRun, job: ClaimedJob, context: JobStream) -> Outputs | Failure:
    steps = work.runtime.stream(job.inputs, context)
    try:
        while True:
            chunk = next(steps)
            context.chunk(chunk)
            if context.is_cancelled:
                return _STOPPED
    except StopIteration as end:
        outputs: Outputs = end.value
        if context.is_cancelled:
            return _STOPPED
        return next((_not_finite(name) for name in work.finite_outputs if not _is_finite(outputs, name)), outputs)
    except DeviceLost:
        raise
    except (Exception, SystemExit) as error:  # as in _run
        return _failure(error, job)
    finally:
        steps.close()


def _failure(error: BaseException, job: ClaimedJob) -> Failure:
    if isinstance(error, JobFailed):
        return Failure(type(error).__name__, str(error)[:_LONGEST_MESSAGE])
    logger.warning(
        "a job failed", extra={"job_id": job.header.id, "model": job.header.model, "error": repr(error)[:200]}
    )
    return Failure("ModelError", f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE])
