"""The model threads: micro-batches in, outputs out, one entry per job.

    I/O thread -- submit --> ready --> model thread: prepare, run --> done -- wake --> I/O thread
                  recall <--'   `--> prepare thread, for a batch that waits while another one runs

A model thread is a loop over `begin`, `run` and `finish`; the simulator steps these in its place. Jobs with NaN where
the signature forbids it are refused: whether a batch has any is asked once, of its joined inputs. An exception bisects
a batch, so that one bad job fails alone; a batch that does not fit the device is halved. A forward over its limit is
given up: it goes on until the process ends, and its jobs have failed. The crash journal names the jobs on each model
thread. Nothing here talks to the broker, except the context of a streaming job, which sends events.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import suppress
from math import inf
from queue import SimpleQueue
from typing import Final

import numpy as np

from penstock.registry.envelope import Failure
from penstock.registry.errors import JobFailed, NonFiniteOutput
from penstock.registry.tensors import encoded_size
from penstock.registry.unrun import EXPIRED
from penstock.workers import children
from penstock.workers.batch_run import BatchRun, JobStream, JointAnswers, Outputs, forward_timeout
from penstock.workers.job import ClaimedJob, inputs_of
from penstock.workers.process.crash_journal import Journal, NullJournal
from penstock.workers.runtime.base import DeadlinePassed, DeviceLost, InstanceLost, Prepared, TooLongHere
from penstock.workers.runtime.closing import close_stream
from penstock.workers.runtime.tracebacks import (
    FAILURE_CHARACTERS,
    ErrorText,
    ModelTrace,
    error_text,
    name_of,
    trace_of_frame,
)

__all__ = ["Executor", "seats_for"]

logger = logging.getLogger("penstock.runtime")

_SOON_S: Final = 0.005
"""A forward that was shorter of late ends before anybody misses the report of the batch before it."""
_MOST_THREADS: Final = 16
"""`grow` makes no more: each model thread has a seat in the journal, and the file of the journal does not grow."""
_PREPARE_SEAT: Final = 0
_STOPPED = Failure("Cancelled", "The job was cancelled while it ran")
_LATE = Failure("Expired", "The job's deadline passed while it ran")


def seats_for(threads: int) -> int:
    """Seats in the journal of an executor that begins with `threads` model threads: for these, for later ones, for the
    prepare thread, and for the thread of `run_kept`."""
    return max(threads, _MOST_THREADS) + 2


class Executor:
    """Runs batches on `threads` model threads, in the order of submission.

    All three are called on a model thread: `on_done` when a run has ended, `too_late` with the jobs of a run that is
    about to begin, `after_run` before the next one may begin. A job does not run if `too_late` gives a failure for its
    id(). clock: monotonic seconds. journal: with as many seats as `seats_for` says.
    """

    def __init__(
        self,
        threads: int,
        on_done: Callable[[], None],
        too_late: Callable[[Sequence[ClaimedJob]], Mapping[int, Failure]],
        checkpoint: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
        after_run: Callable[[], None] = lambda: None,
    ) -> None:
        self.threads = threads
        self._after_run = after_run
        self._most = seats_for(threads) - 2
        self._on_done = on_done
        self._too_late = too_late
        self._checkpoint = checkpoint
        self._clock = clock
        self._journal = journal or NullJournal()
        self._seats: dict[Hashable, int] = {}
        self.device_lost = ""
        """Why no forward can succeed in this process any more; empty while all is well."""
        self._lock = threading.Lock()
        """Held for moments: a run is always in exactly one of ready, running, done."""
        self._ready: deque[BatchRun] = deque()
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._unprepared: SimpleQueue[BatchRun | None] = SimpleQueue()
        self._done: deque[BatchRun] = deque()
        self._interrupted: deque[BatchRun] = deque()
        self._running: dict[Hashable, BatchRun | None] = {}
        """By seat: the model thread, or its stand-in in the simulator."""
        self._busy = 0
        """Seats with a run."""
        self.kept: BatchRun | None = None
        """The batch that waits for `run_kept`."""
        self.here: BatchRun | None = None
        """The run that `run_kept` is busy with, for any thread."""
        self.left_at = 0.0
        """When `run_kept` has ended the last one, for any thread; set before `here` is cleared."""
        self._model_threads: set[threading.Thread] = set()
        self._preparer = threading.Thread(target=self._prepare_ahead, name="prepare", daemon=True)
        self._is_started = False

    def start(self) -> None:
        """Start the threads."""
        self._is_started = True
        self._preparer.start()
        for _ in range(self.threads):
            self._add_thread()

    def grow(self, threads: int) -> None:
        """Have at least `threads` model threads, as far as the journal has seats."""
        wanted = min(threads, self._most)
        if wanted < threads:
            logger.warning(
                "a version gets its model threads after a restart only", extra={"asked": threads, "has": wanted}
            )
        for _ in range(self.threads, wanted):
            self.threads += 1
            if self._is_started:
                self._add_thread()

    def stop(self) -> None:
        """End each thread when it becomes idle."""
        self._unprepared.put(None)
        for _ in self._model_threads:
            self._tokens.put(False)

    def join(self, timeout_s: float) -> None:
        """Wait for up to `timeout_s` seconds until the threads have ended; `stop` comes first."""
        until = time.monotonic() + timeout_s
        for thread in (self._preparer, *self._model_threads):
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))

    def is_alive(self) -> bool:
        """Whether every thread is alive."""
        return self._preparer.is_alive() and all(thread.is_alive() for thread in tuple(self._model_threads))

    @property
    def idle(self) -> int:
        """Idle model threads, less the batches that wait for one."""
        with self._lock:
            return self.threads - len(self._ready) - self._busy

    def waiting(self) -> list[BatchRun]:
        """The batches that wait for a model thread."""
        return list(self._ready)

    def running(self) -> list[BatchRun]:
        """The batches on the model threads now."""
        if not self._busy:
            return []
        return [run for run in tuple(self._running.values()) if run is not None]

    def ends_soon(self, now: float) -> bool:
        """Whether forwards run or wait for a thread, none has run for 5 ms, and all were shorter of late."""
        running, waiting = self.running(), self.waiting()
        runs = (*running, *waiting)
        return (
            bool(runs)
            and all(run.started > now - _SOON_S for run in running)
            and all(run.version.queue.longest_forward_s < _SOON_S for run in runs)
        )

    def submit(self, run: BatchRun, *, prepare_apart: bool) -> None:
        """Queue a batch. prepare_apart: tokenise its texts on the prepare thread, while the model threads are busy."""
        run.clock, run.journal = self._clock, self._journal
        if prepare_apart:
            run.is_prepared = threading.Event()
            self._unprepared.put(run)
        self._ready.append(run)
        self._tokens.put(True)

    def keep(self, run: BatchRun) -> None:
        """Queue a batch for `run_kept`, while no model thread is busy. No other one is submitted before it has run."""
        run.clock, run.journal = self._clock, self._journal
        self._ready.append(run)
        self.kept = run

    def run_kept(self) -> None:
        """Run the batch that was kept, if any, on the calling thread. `take_done` returns it; nobody is woken."""
        if self.kept is None:
            return
        self.kept = None
        seat = threading.current_thread()
        # None: a model thread was awake for a batch that had been recalled, and has taken this one.
        run = self.begin(seat)
        if run is None:
            return
        self.here = run
        try:
            self.run(run)
            self._end(seat, run)
        except DeviceLost as error:
            self.device_lost = str(error)
        finally:
            self.left_at = self._clock()
            self.here = None

    def overdue_here(self, now: float) -> str | None:
        """Why this process must end: the forward of `run_kept` is over its limit. None: it is not. For any thread.

        The journal then tells other workers so: this one cannot commit the failure of the jobs any more.
        """
        run = self.here
        if run is None or now - run.alive_at <= run.limit_s:
            return None
        if run.is_last:
            self._journal.exceeded(run.seat)
        return f"a forward of {run.batch.key.model} took longer than its limit of {run.limit_s:g} s"

    def recall(self, *, more_urgent: int = -1) -> BatchRun | None:
        """Take back the last submitted batch that has not begun; None without one.

        more_urgent: only a batch whose leader is less urgent than this priority.
        """
        with self._lock:
            if not self._ready or self._ready[-1].batch.priority <= more_urgent:
                return None
            run = self._ready.pop()
            if run is self.kept:
                self.kept = None
            return run

    def take_done(self) -> list[BatchRun]:
        """The runs that have ended since the last call."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def take_interrupted(self) -> list[BatchRun]:
        """The runs since the last call in which the process of an instance ended: their jobs have no answer."""
        if not self._interrupted:
            return []
        return [self._interrupted.popleft() for _ in range(len(self._interrupted))]

    def begin(self, seat: Hashable) -> BatchRun | None:
        """Put the next batch on a model thread's seat. None: it was recalled."""
        with self._lock:
            if not self._ready:
                return None
            run = self._ready.popleft()
            run.started = run.alive_at = self._clock()
            run.seat = self._seats.setdefault(seat, len(self._seats) + 1)
            self._running[seat] = run
            self._busy += 1
        self._journal.begin(run.seat, run.held, run.limit_s, run.started, run.form_in_use, is_last=run.is_last)
        return run

    def run(self, run: BatchRun) -> None:
        """The forward of a batch that has begun: an answer for each of its jobs. Raises DeviceLost."""
        try:
            _answer(run, self._too_late, self._checkpoint)
        except InstanceLost as error:
            run.incident = error.incident
        finally:
            self._after_run()

    def finish(self, seat: Hashable, run: BatchRun) -> None:
        """Hand in a batch that has run. Its answers are discarded if it was given up."""
        if self._end(seat, run):
            self._on_done()

    def _end(self, seat: Hashable, run: BatchRun) -> bool:
        with self._lock:
            if self._running[seat] is not run:
                return False
            self._journal.end(run.seat)
            run.ended = self._clock()
            (self._interrupted if run.incident else self._done).append(run)
            self._running[seat] = None
            self._busy -= 1
        return True

    def give_up(self, run: BatchRun) -> ModelTrace:
        """The forward exceeded its limit. If it was the last one of its jobs, `take_done` returns them as failed.

        Other jobs stay on the model: another process runs them once more. Returns where the forward is now.
        """
        with self._lock:
            seat = next((seat for seat, running in self._running.items() if running is run), None)
            trace = _trace_of_thread(seat)
            if seat is None or not run.is_last:
                return trace
            # First the note: this process may end before the failures are committed.
            self._journal.exceeded(run.seat)
            self._running[seat] = None
            self._busy -= 1
            given_up = copy.copy(run)
            given_up.is_given_up, given_up.ended = True, self._clock()
            given_up.refusals = refusals = dict(run.refusals)
            timeout = forward_timeout(run.limit_s, trace.where, trace.text)
            given_up.answers = [refusals.get(job) or (_STOPPED if job.is_cancelled else timeout) for job in run.jobs]
            self._done.append(given_up)
        return trace

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name="model", daemon=True)
        self._model_threads.add(thread)
        thread.start()

    def _serve(self) -> None:
        seat = threading.current_thread()
        while self._tokens.get():
            run = self.begin(seat)
            if run is None:
                continue
            try:
                self.run(run)
            except DeviceLost as error:
                # Its jobs stay in the journal: they become suspects, and run alone on a device that works.
                self.device_lost = str(error)
                return
            self.finish(seat, run)
            # An idle thread must not keep the last batch in memory.
            del run

    def _prepare_ahead(self) -> None:
        while (run := self._unprepared.get()) is not None:
            self._journal.begin(_PREPARE_SEAT, run.held, inf, self._clock())
            try:
                run.prepared = run.model.runtime.prepare(inputs_of(run.jobs))
            except BaseException as error:  # the model thread meets the error again, job by job
                logger.debug("preparing failed: %s", name_of(error))
            self._journal.end(_PREPARE_SEAT)
            if run.is_prepared is not None:
                run.is_prepared.set()
            del run


def _trace_of_thread(seat: Hashable) -> ModelTrace:
    """Where a model thread is now; empty for its stand-in in the simulator."""
    ident = seat.ident if isinstance(seat, threading.Thread) else None
    frame = sys._current_frames().get(ident) if ident is not None else None
    return ModelTrace("", "") if frame is None else trace_of_frame(frame)


def _answer(
    run: BatchRun,
    too_late: Callable[[Sequence[ClaimedJob]], Mapping[int, Failure]],
    checkpoint: Callable[[str], None],
) -> None:
    jobs = [item.job for item in run.batch.items]
    refusals = too_late(jobs)
    checkpoint("mid-forward")
    if not refusals:
        run.answers = _forward(run, jobs, is_whole=True)
    else:
        admitted = [job for job in jobs if id(job) not in refusals]
        answers = iter(_forward(run, admitted, is_whole=False) if admitted else ())
        run.answers = [refusals.get(id(job)) or next(answers) for job in jobs]
    checkpoint("after-forward")


def _forward(run: BatchRun, jobs: list[ClaimedJob], *, is_whole: bool) -> Sequence[Outputs | Failure]:
    if run.open_stream is not None:
        run.refuses_some(jobs, [job.inputs for job in jobs])
        return [run.refusals.get(job) or _stream(run, job, run.open_stream(job, run.touch)) for job in jobs]
    if run.is_prepared is not None:
        run.is_prepared.wait()
    return _run(run, jobs, run.prepared if is_whole else None)


def _run(run: BatchRun, jobs: list[ClaimedJob], prepared: Prepared | None) -> Sequence[Outputs | Failure]:
    rows = sum(job.rows for job in jobs)
    try:
        if prepared is None:
            inputs = inputs_of(jobs)
            if run.refuses_some(jobs, inputs):
                return _run_those_that_fit(run, jobs)
            prepared = run.model.runtime.prepare(inputs)
        if prepared.rows > run.max_rows:
            return [_run_in_slices(run, job, run.max_rows) for job in jobs]
        outputs = run.forward(prepared)
        run.tokens += prepared.tokens
        run.padded_tokens += prepared.padded_tokens
        run.did_fit(prepared)
        run.output_bytes += encoded_size(outputs)
        return _by_job(outputs, jobs, run.version.policy.finite_outputs)
    except DeviceLost:
        raise
    except MemoryError as error:
        run.did_not_fit(rows, prepared.padded_tokens if prepared else 0)
        logger.warning("a forward did not fit the device", extra={"rows": rows})
        reason = "it did not fit the device"
        if rows == 1:
            run.has_unfit_row = True
            return [_failure(run, error, jobs[0])]
    except BaseException as error:  # a model may raise anything; only its own job fails
        if len(jobs) == 1:
            return [_failure(run, error, jobs[0])]
        reason = _logged(run, error, "a batch failed and is bisected", {"size": len(jobs)}).name
    # Outside of `except`: an exception in handling keeps everything that the failed forward had on the device.
    if len(jobs) > 1:
        run.fail_batch(reason)
        return _run_halves(run, jobs)
    return [_run_in_slices(run, jobs[0], rows // 2)]


def _run_those_that_fit(run: BatchRun, jobs: list[ClaimedJob]) -> list[Outputs | Failure]:
    """The batch without the jobs that were just refused."""
    fitting = [job for job in jobs if job not in run.refusals]
    answers = iter(_run(run, fitting, None) if fitting else ())
    return [run.refusals.get(job) or next(answers) for job in jobs]


def _run_halves(run: BatchRun, jobs: list[ClaimedJob]) -> list[Outputs | Failure]:
    """The level `plain` of the fallback chain: parts of the batch, down to one job at a time."""
    middle = len(jobs) // 2
    answers: list[Outputs | Failure] = []
    for half in (jobs[:middle], jobs[middle:]):
        run.touch()
        answers += _run(run, half, None)
    return answers


def _run_in_slices(run: BatchRun, job: ClaimedJob, max_rows: int) -> Outputs | Failure:
    """A job with more rows than a batch may have, or than the device has room for."""
    parts: list[Outputs] = []
    start = 0
    try:
        while start < job.rows:
            run.touch()
            stop = min(start + max_rows, job.rows)
            inputs = {name: values[start:stop] for name, values in job.inputs.items()}
            prepared = run.model.runtime.prepare([inputs])
            try:
                parts.append(run.forward(prepared))
                run.did_fit(prepared)
                start = stop
            except MemoryError:
                run.did_not_fit(stop - start, prepared.padded_tokens)
                if stop - start == 1:
                    run.has_unfit_row = True
                    raise
                max_rows = (stop - start) // 2
        outputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        run.output_bytes += encoded_size(outputs)
        return _by_job(outputs, [job], run.version.policy.finite_outputs)[0]
    except DeviceLost:
        raise
    except BaseException as error:  # as in _run
        return _failure(run, error, job)


def _by_job(outputs: Outputs, jobs: list[ClaimedJob], finite: Sequence[str]) -> Sequence[Outputs | Failure]:
    rows = sum(job.rows for job in jobs)
    for name, values in outputs.items():
        if values.shape[:1] != (rows,):
            raise ValueError(f"output {name} has shape {values.shape}, expected {rows} rows")
    answers: Sequence[Outputs | Failure] = JointAnswers(outputs, jobs)
    for name in finite:
        if not np.isfinite(outputs[name]).all():
            answers = [answer if _is_finite(answer, name) else _not_finite(name) for answer in answers]
    return answers


def _is_finite(answer: Outputs | Failure, name: str) -> bool:
    return isinstance(answer, Failure) or bool(np.isfinite(answer[name]).all())


def _not_finite(name: str) -> Failure:
    return Failure("NonFiniteOutput", f"Output {name} contains NaN or infinity. Expected finite numbers")


def _stream(run: BatchRun, job: ClaimedJob, context: JobStream) -> Outputs | Failure:
    answer: Outputs | Failure = _STOPPED
    steps = run.model.runtime.stream(job.inputs, context)
    try:
        answer = _streamed(run, job, context, steps)
        with children.ForksEnd():
            close_stream(steps)
        context.finish()
    except DeviceLost:
        context.discard()
        raise
    except Exception as error:
        # The broker refuses the events of this job.
        failure = _failure(run, error, job)
        answer = answer if isinstance(answer, Failure) else failure
    return answer


def _streamed(
    run: BatchRun, job: ClaimedJob, context: JobStream, steps: Generator[Outputs, None, Outputs]
) -> Outputs | Failure:
    """The chunks of a stream are sent, one by one; returns its answer. The stream may not have ended."""
    finite = run.version.policy.finite_outputs
    try:
        while True:
            with children.ForksEnd():
                chunk = next(steps)
            _send_chunk(chunk, context, finite, steps)
            if context.is_cancelled:
                return _STOPPED
    except StopIteration as end:
        outputs: Outputs = end.value
        if context.is_cancelled:
            return _STOPPED
        run.output_bytes += encoded_size(outputs)
        return next((_not_finite(name) for name in finite if not _is_finite(outputs, name)), outputs)
    except DeviceLost:
        raise
    except TooLongHere as refusal:
        run.num_tokens_needed = refusal.num_tokens
        return Failure("InputRefused", str(refusal))
    except DeadlinePassed as end:
        return _STOPPED if context.is_cancelled else _LATE if end.has_begun else EXPIRED
    except BaseException as error:  # as in _run
        failure = _failure(run, error, job)
        # A model may raise in order to end: the client has asked for that.
        return _STOPPED if context.is_cancelled else failure


def _send_chunk(
    chunk: Outputs, context: JobStream, finite: Sequence[str], steps: Generator[Outputs, None, Outputs]
) -> None:
    """Raises JobFailed for a chunk that cannot be sent, and raises it in the stream before, at its `yield`."""
    try:
        for name in finite:
            if name in chunk and not _is_finite(chunk, name):
                raise NonFiniteOutput(_not_finite(name).message)
        context.chunk(chunk)
    except JobFailed as refusal:
        with children.ForksEnd(), suppress(StopIteration):
            steps.throw(refusal)
        raise


def _failure(run: BatchRun, error: BaseException, job: ClaimedJob) -> Failure:
    traced = {"trace_id": job.header.trace_id} if job.header.traceparent else {}
    text = _logged(run, error, "a job failed", {"job_id": job.header.id, "model": job.header.model, **traced})
    run.exceptions[job] = text.name
    # Not isinstance, which asks the exception for its class: that is the model's code.
    if issubclass(type(error), JobFailed):
        return Failure(text.name, text.message, text.where, text.traceback)
    message = f"{text.name}: {text.message}"[:FAILURE_CHARACTERS]
    return Failure("ModelError", message, text.where, text.traceback)


def _logged(run: BatchRun, error: BaseException, event: str, facts: Mapping[str, object]) -> ErrorText:
    """One line with the traceback; returns the text of the exception, the last that is seen of it."""
    policy = run.version.policy
    text = error_text(error, withholds_message=policy.withholds_texts, redact=policy.redact)
    # A model may have given the loggers a handler or a filter of its own.
    with suppress(BaseException):
        logger.warning(event, extra={**facts, "error": text.line, "exception": text.traceback})
    return text
