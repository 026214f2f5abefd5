"""One micro-batch on its way through a model.

Scheduler -- BatchRun --> Executor: prepare, forward --> answers, one per job --> Completer
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias, overload

from penstock.registry.broker.base import Held
from penstock.registry.envelope import Failure
from penstock.registry.errors import InvalidInput
from penstock.registry.tensors import Array
from penstock.safety.fallback import Level, LevelFailure
from penstock.workers import children
from penstock.workers.batching.batcher import Batch
from penstock.workers.batching.forward_size import ForwardSize
from penstock.workers.job import ClaimedJob
from penstock.workers.process.crash_journal import FormInUse, Journal, NullJournal
from penstock.workers.runtime.base import Prepared, StreamContext
from penstock.workers.runtime.forms import EAGER
from penstock.workers.versions.tuner import AnsweredJob, BatchObservation
from penstock.workers.versions.version import LoadedModel, ServedVersion

__all__ = ["BatchRun", "JobStream", "JointAnswers", "OpenStream", "Outputs", "forward_timeout"]

Outputs: TypeAlias = dict[str, Array]
"""By name, with the rows of one job, or of all jobs of a forward in order."""
_NOTHING = ForwardSize(0, 0)
_MOST_TOGETHER: Final = 8
"""Deliveries of an engine's job before a step that hangs fails it, too: only workers with one home count crashes."""


class JobStream(StreamContext, Protocol):
    """The context of a streaming job: the entry point's view of the job, and the way of its chunks."""

    def chunk(self, values: Mapping[str, Array], /) -> None:
        """Send the values that the entry point yielded. Raises ModelError for values that no subscriber could read."""

    def finish(self) -> None:
        """Wait until the broker has all events of the job."""

    def discard(self) -> None:
        """The job runs again: drop the events that wait."""


class JointAnswers(Sequence[Outputs]):
    """The answers of jobs that one forward answered. They are cut out of its outputs when they are asked for."""

    def __init__(self, outputs: Outputs, jobs: Sequence[ClaimedJob]) -> None:
        self.outputs: Final = outputs
        """Of all jobs together: one row for each row of a job."""
        self._ends = [*itertools.accumulate(job.rows for job in jobs)]

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int, /) -> Outputs: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[Outputs]: ...
    def __getitem__(self, index: int | slice, /) -> Outputs | list[Outputs]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        number = range(len(self))[index]
        start, stop = self._ends[number - 1] if number else 0, self._ends[number]
        return {name: values[start:stop] for name, values in self.outputs.items()}


OpenStream: TypeAlias = Callable[[ClaimedJob, Callable[[], None]], JobStream]
"""Makes the context of a job. The second argument is called whenever the job shows progress."""


@dataclass(slots=True, eq=False)
class BatchRun:
    """One micro-batch of one model version. Times are monotonic seconds.

    The model is taken when the run is made: the version may be unloaded before the results are committed.
    """

    version: ServedVersion
    batch: Batch[ClaimedJob]
    open_stream: OpenStream | None = None
    """For streaming models."""
    is_as_built: bool = False
    """Whether only the model as its author built it may run the batch; see `forward`."""
    model: LoadedModel = field(init=False)
    max_rows: int = field(init=False)
    """Rows of the largest forward that was allowed when the run was made."""
    generation: int = field(init=False)
    """The generation of the model's form when the run was made; see Forms.generation."""
    clock: Callable[[], float] = time.monotonic
    journal: Journal = field(default_factory=NullJournal)
    """The executor sets both."""
    seat: int = 0
    """The model thread that runs it."""
    answers: Sequence[Outputs | Failure] = ()
    """One per job of the batch, in order, after the run."""
    incident: str = ""
    """Names the process of the instance that ended in this run; there are no answers then. Empty: none ended."""
    started: float = 0.0
    ended: float = 0.0
    alive_at: float = 0.0
    """The last sign of progress. The time limit of a forward counts from here."""
    refusals: dict[ClaimedJob, Failure] = field(default_factory=dict)
    """The jobs that have no forward, because their inputs do not fit."""
    exceptions: dict[ClaimedJob, str] = field(default_factory=dict)
    """The class of what the model raised for a job."""
    has_unfit_row: bool = False
    """Whether a row did not fit the device alone."""
    output_bytes: int = 0
    """Of all its answers."""
    tokens: int = 0
    padded_tokens: int = 0
    num_tokens_needed: int = 0
    """More than the model has room for here, of a job that another worker may have room for."""
    prepared: Prepared | None = None
    is_prepared: threading.Event | None = None
    """Set by the prepare thread, for a batch that it prepares."""
    misfits: list[ForwardSize] = field(default_factory=list)
    """Forwards of this batch that did not fit the device."""
    fitted: ForwardSize = _NOTHING
    """The largest forward of this batch that did fit."""
    is_disturbed: bool = False
    """Whether the process stood still during the forward."""
    failures: list[LevelFailure] = field(default_factory=list)
    """The levels of the fallback chain that failed for this batch, or were stopped before it."""
    is_given_up: bool = False
    """Whether its forward exceeded its limit and still runs: the answers are its failures."""

    def __post_init__(self) -> None:
        self.model = self.version.model
        self.max_rows = self.version.queue.max_rows
        self.generation = self.version.generation

    @property
    def limit_s(self) -> float:
        """The longest time without progress."""
        return self.version.policy.timeout_s

    @property
    def jobs(self) -> list[ClaimedJob]:
        """The jobs of the batch, in order."""
        return [item.job for item in self.batch.items]

    @property
    def held(self) -> list[Held]:
        """The jobs as the broker knows them."""
        return [item.job.held for item in self.batch.items]

    def refuses_some(self, jobs: Sequence[ClaimedJob], inputs: Sequence[Mapping[str, Array]]) -> bool:
        """Whether the values of some jobs do not fit; these are in `refusals` then. inputs: see inputs_of."""
        try:
            self.version.check_values(inputs)
        except InvalidInput:
            for job in jobs:
                self._refuse_misfit(job)
            return True
        return False

    def _refuse_misfit(self, job: ClaimedJob) -> None:
        try:
            self.version.check_values([job.inputs])
        except InvalidInput as error:
            self.refusals[job] = Failure("InputRefused", str(error))

    def touch(self) -> None:
        """Show progress."""
        self.alive_at = self.clock()
        self.journal.touch(self.seat, self.alive_at)

    def forward(self, prepared: Prepared) -> Outputs:
        """One forward; see Runtime.run.

        A job that was on the model when a process died runs on the model as its author built it: another form may
        have ended the process.
        """
        forms = self.model.forms
        with children.ForksEnd():
            if self.is_as_built and forms is not None:
                return forms.reference(prepared)
            return self.model.runtime.run(prepared) if forms is None else forms.run(prepared, self.failures)

    def fail_batch(self, reason: str) -> None:
        """The forward of the whole batch, or of a part of it, failed. reason: without texts, which may repeat inputs of
        any of its jobs."""
        if all(failure.level != "micro-batched" for failure in self.failures):
            self.failures.append(LevelFailure("micro-batched", reason))

    @property
    def next_level(self) -> Level | None:
        """The level of the fallback chain behind those that failed. A batch of one job has no level of its own."""
        failed = [failure.level for failure in self.failures]
        skipped: tuple[Level, ...] = ("micro-batched",) if len(self.batch.items) == 1 else ()
        return self.version.policy.chain.next(failed, skipped=skipped)

    @property
    def level(self) -> str:
        """The level that answered its jobs, where an earlier one had failed or was stopped; empty: the first one."""
        return (self.next_level or "") if self.failures else ""

    @property
    def form_in_use(self) -> FormInUse | None:
        """The form that is about to run; None for the model as its author built it."""
        forms = self.model.forms
        if self.is_as_built or forms is None or (name := forms.name) == EAGER:
            return None
        return FormInUse(self.batch.key.model, self.model.content_hash, name)

    @property
    def is_last(self) -> bool:
        """Whether its jobs have no further forward if this one exceeds its limit.

        A job has one more if its neighbours, in the batch or in an engine, an optimized form or a process that stood
        still may be at fault.
        """
        if self._is_last_crash:
            return True
        if self.is_disturbed or len(self.batch.items) > 1 or self.form_in_use is not None:
            return False
        job = self.batch.items[0].job
        if self.version.policy.seats and not self.is_as_built and job.delivery.attempt <= _MOST_TOGETHER:
            # The jobs of an engine share its steps. Only one that runs alone, as a suspect, is surely at fault.
            return False
        retry = job.header.options.retry
        return retry is None or job.delivery.crashes + job.tries >= retry.attempts

    @property
    def _is_last_crash(self) -> bool:
        """Whether no further process may end for these jobs."""
        items, most = self.batch.items, self.version.policy.max_crashes
        # Most jobs crashed no process: the first one decides.
        return items[0].job.delivery.crashes + 1 >= most and all(
            item.job.delivery.crashes + 1 >= most for item in items
        )

    def disturb(self) -> None:
        """The process stood still: that the forward takes long says little about its jobs."""
        if not self._is_last_crash:
            self.is_disturbed = True
            self.journal.disturbed(self.seat)

    @property
    def observation(self) -> BatchObservation:
        """The run as an observer of its version sees it, after the run."""
        seconds = self.ended - self.started
        return BatchObservation(self.batch.rows, self.tokens, seconds, self._answered, self.generation)

    def _answered(self, is_wanted: Callable[[str], bool]) -> Iterator[AnsweredJob]:
        for number, item in enumerate(self.batch.items):
            job_id = item.job.header.id
            if is_wanted(job_id) and not isinstance(answer := self.answers[number], Failure):
                yield AnsweredJob(job_id, item.job.inputs, answer)

    def did_not_fit(self, rows: int, padded_tokens: int) -> None:
        """A forward of this size was too large for the device."""
        self.misfits.append(ForwardSize(padded_tokens, rows))

    def did_fit(self, prepared: Prepared) -> None:
        """A forward was not too large."""
        self.fitted = max(self.fitted, ForwardSize(prepared.padded_tokens, prepared.rows))

    @property
    def too_large(self) -> ForwardSize | None:
        """The smallest forward that did not fit, could be halved, and was larger than every forward that did fit.

        None: a single job is at fault, not the size of the batch, so later batches need no cap.
        """
        if self.has_unfit_row:
            return None
        return min((size for size in self.misfits if size.rows > 1 and size > self.fitted), default=None)


def forward_timeout(limit_s: float, where: str = "", traceback: str = "") -> Failure:
    """Why a job ended whose forward exceeded its limit. where, traceback: what its thread did then, if it is known."""
    message = f"The forward took longer than its limit of {limit_s:g} s"
    return Failure("ForwardTimeout", message, where, traceback)
