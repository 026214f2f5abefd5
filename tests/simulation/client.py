"""A producer in a schedule: the real JobBuilder and ReplyRouter, and what a client does when it hears nothing.

    order --> JobBuilder.build_many: one call for the jobs of one version --> publish
    reply --> ReplyRouter --> JobState.answer, as a handle reads it --> the checker's questions

A call that fails is repeated with the very same bytes, as the real clients do; a caller that used an idempotency key
and gave up tries once more with a job of its own. Whatever is offered, answered or told is kept for the checker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import structs

from penstock.producers.job_state import JobState
from penstock.producers.replies import ReplyRouter
from penstock.producers.submission import accepted, cancellation, expiry
from penstock.registry.admission import JobBuilder, SubmitOptions
from penstock.registry.broker.base import CancelOutcome, JobRecord, Limits, Publication, State, StreamEntry
from penstock.registry.envelope import RequestContext, Retry, open_result, seal
from penstock.registry.errors import (
    BadSignature,
    BrokerUnavailable,
    IdempotencyConflict,
    JobFailed,
    JobLost,
    PenstockError,
    QueueFull,
    ResultGone,
    UnknownJob,
)
from penstock.registry.package import ModelSpec
from penstock.registry.tensors import Array
from tests.simulation.broker import UNSIGNED, Bystander
from tests.simulation.packages import further_version
from tests.simulation.plan import Order

if TYPE_CHECKING:
    from tests.simulation.checker import Simulation

__all__ = ["CLIENTS", "Client", "Job"]

CLIENTS: Final = 2
"""Of a schedule: each is a tenant."""
_ATTEMPTS: Final = 5
_QUESTIONS: Final = 3
_READ_EVERY_S: Final = 0.5
_SILENCE_S: Final = 1.0
_AGAIN: Final = 0x800000
"""Added to a job's number for the id of its second submission."""


@dataclass(slots=True, eq=False)
class Job:
    """One question asked once; `number` is its own, and twins share a `question`."""

    number: int
    question: float
    order: Order
    client: Client
    publication: Publication
    second: Publication | None = None
    """The same request under the same idempotency key, as a job of its own."""
    is_accepted: bool = False
    is_doubtful: bool = False
    """Some call to publish it was not answered."""
    cancel_asked: bool = False
    is_told: bool = False
    """Its result has reached the client that waits for it."""
    is_known_lost: bool = False
    """The client that waits for it knows that the broker has lost it."""

    @property
    def job_ids(self) -> list[str]:
        """Under which it may be known."""
        if self.second is None:
            return [self.publication.job_id]
        return [self.publication.job_id, self.second.job_id]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Waiter:
    """A caller that waits for one of the ids under which a job was offered."""

    id: str
    job: Job

    def receive(self, record: JobRecord | None) -> None:
        """Notes that the job's reply has come, and reads the result in it."""
        self.job.is_told = True
        if record is not None:
            self.job.client.has_heard(self.id, self.job, record)


class Client(Bystander):
    """One tenant's client, with a reply stream per model."""

    def __init__(self, simulation: Simulation, index: int, limits: Limits) -> None:
        super().__init__(simulation.schedule, f"c{index}")
        self.tenant = f"tenant-{index}"
        self.jobs: list[Job] = []
        self._simulation = simulation
        self._limits = limits
        self._builder: JobBuilder = simulation.mutation.builder(tenant=self.tenant, keyring=UNSIGNED, max_bytes=1 << 20)
        # Numbers of its own: other calls of a schedule stay where they are.
        self._pauses = Random(f"pauses of {simulation.seed} {index}")
        self._waiters: list[Waiter] = []
        """Kept alive, as handles are by those who wait."""
        self._router: ReplyRouter[Waiter] = ReplyRouter(self.label)
        self.end = simulation.connect(self)

    def plan(self, order: Order, spec: ModelSpec) -> None:
        """Carry out the order, when its time comes."""
        self._later(order.at, lambda: self._place(order, spec))

    def begin_reading(self) -> None:
        """Read replies from now on, for ever."""
        self.schedule.after(self.schedule.rng.uniform(0.1, _READ_EVERY_S), self._read_on)

    def read(self) -> None:
        """Hands new replies to those who wait."""
        self._router.deliver(self.end.read(self._router.cursors(), 0))

    def replies(self) -> list[StreamEntry]:
        """All that was ever told on its reply streams, which it never trims."""
        return self.end.read(dict.fromkeys(self._router.cursors(), "0-0"), 0, 1_000_000)

    def _read_on(self) -> None:
        try:
            self.read()
        except BrokerUnavailable:
            self.schedule.note(f"{self.label} hears nothing")
        self.begin_reading()

    def _later(self, delay: float, action: Callable[[], None]) -> None:
        """A thing to do, which the schedule does not end without."""
        schedule = self.schedule
        schedule.awaited += 1

        def act() -> None:
            action()
            schedule.awaited -= 1

        schedule.after(delay, act)

    def has_heard(self, job_id: str, job: Job, record: JobRecord) -> None:
        """A reply has come: the client reads it as a handle does."""
        violate = self.schedule.violate
        try:
            outputs, version = self._state(job_id, record).answer()
        except JobFailed:
            if record.state is State.COMPLETED:
                violate(f"its client read no answer: {job.number}")
            return
        except PenstockError as error:
            violate(f"its client cannot read its result: {job.number}, {error}")
            return
        rows = [[2 * job.question, float(version)]] * job.order.rows
        if outputs["y"][:, :2].tolist() != rows:
            violate(f"its client read the answer of another: {job.number}")
        if self._simulation.plan.has_forger:
            for forged in self._forged(job_id, record):
                self._read_forged(job_id, job, forged)
            self._simulation.heard = record

    def _forged(self, job_id: str, record: JobRecord) -> list[JobRecord]:
        """What a stranger may put in the place of this record: that of another job, and one of another tenant."""
        last, (header, body) = self._simulation.heard, open_result(record.result, UNSIGNED)
        (rival,) = {f"tenant-{index}" for index in range(CLIENTS)} - {self.tenant}
        header = structs.replace(header, context=RequestContext(rival))
        of_rival = JobRecord(record.state, "", seal("result", header, bytes(body), UNSIGNED))
        is_of_another = last is not None and open_result(last.result, UNSIGNED)[0].id != job_id
        return [of_rival, last] if last is not None and is_of_another else [of_rival]

    def _read_forged(self, job_id: str, job: Job, forged: JobRecord) -> None:
        self.schedule.injected["forged result"] += 1
        with suppress(BadSignature, UnknownJob, ResultGone):
            self._state(job_id, forged).answer()
            self.schedule.violate(f"its client took a forged result: {job.number}")

    def _state(self, job_id: str, record: JobRecord) -> JobState:
        state = JobState(job_id, self.tenant, self._simulation.policy, awaits_reply=True)
        state.receive(record)
        return state

    def _place(self, order: Order, spec: ModelSpec) -> None:
        numbers = [self._simulation.next_number() for _ in range(order.count)]
        questions = [self._question(order, numbers[0], number) for number in numbers]
        orders = [replace(order, version="") if order.is_mixed and count % 2 else order for count in range(order.count)]
        first = self._publications(orders, spec, numbers, questions)
        second: Sequence[Publication | None] = [None] * order.count
        if order.has_key and order.again_after is not None:
            second = self._publications(orders, spec, numbers, questions, id_offset=_AGAIN)
        jobs = [
            Job(number, question, its, self, publication, again)
            for number, question, its, publication, again in zip(numbers, questions, orders, first, second, strict=True)
        ]
        for job in jobs:
            self._simulation.know(job)
        self.jobs += jobs
        if order.deadline_s is not None:
            for job in jobs:
                self._later(order.deadline_s + self._pauses.uniform(0.0, 0.3), partial(self._look, job))
        self._publish(spec.name, [(job, job.publication) for job in jobs], 1)
        if order.again_after is not None:
            offered_again = [(job, job.second or job.publication) for job in jobs]
            self.schedule.injected["publish again"] += 1
            self._later(order.again_after, lambda: self._publish(spec.name, offered_again, 1))
        if order.cancel_after is not None:
            for job in jobs:
                self._later(order.cancel_after, partial(self._cancel, job, 1))

    def _question(self, order: Order, first: int, number: int) -> float:
        if self._simulation.plan.has_tier and order.making == "good":
            # The same few questions again and again, so that some are found in the tier.
            return -1.0 - number % _QUESTIONS
        return float(first if order.is_twin else number)

    def _publications(
        self,
        orders: Sequence[Order],
        spec: ModelSpec,
        numbers: Sequence[int],
        questions: Sequence[float],
        *,
        id_offset: int = 0,
    ) -> list[Publication]:
        """One for each of these jobs, which differ in their version only. id_offset: added to the number in the id."""
        made: dict[int, Publication] = {}
        for version in dict.fromkeys(order.version for order in orders):
            places = [place for place, order in enumerate(orders) if order.version == version]
            its = orders[places[0]]
            built = self._builder.build_many(
                further_version(spec, version) if version else spec,
                [
                    (_inputs(its.rows, questions[place]), f"key-{numbers[place]}" if its.has_key else None)
                    for place in places
                ],
                _options(its),
                reply=self._router.address(spec.name),
                job_ids=[_job_id(spec, numbers[place] + id_offset) for place in places],
            )
            made.update(zip(places, built, strict=True))
        lifetime_ms = self._simulation.truth.lifetime_ms
        for each in made.values():
            lifetime_ms[each.job_id] = each.lifetime_ms(self._limits.job_ttl_ms)
        return [made[place] for place in sorted(made)]

    def _publish(self, slot: str, offers: Sequence[tuple[Job, Publication]], attempt: int) -> None:
        for job, publication in offers:
            if not job.is_told:
                self._waiters.append(Waiter(publication.job_id, job))
                self._router.expect(self._waiters[-1])
        try:
            receipts = self.end.publish(slot, [publication for _, publication in offers], self._limits)
        except BrokerUnavailable:
            for job, _ in offers:
                job.is_doubtful = True
            if attempt < _ATTEMPTS:
                pause = self.schedule.rng.uniform(0.05, 0.5)
                self._later(pause, lambda: self._publish(slot, offers, attempt + 1))
            return
        for (job, _), receipt in zip(offers, receipts, strict=True):
            try:
                job_id = accepted(receipt, slot)
            except QueueFull:
                continue
            except IdempotencyConflict:
                self.schedule.violate(f"its key is that of another job: {job.number}")
                continue
            job.is_accepted = True
            if self._simulation.has_lost(job):
                self._later(_SILENCE_S, partial(self._look_for, job))
            if job_id not in job.job_ids:
                self.schedule.violate(f"job {job.number} is answered for by {job_id[-4:]}")

    def _look(self, job: Job) -> None:
        """What a client that waits does when the job's deadline has passed, until the job has ended."""
        is_live = False
        for job_id in job.job_ids if job.is_accepted or job.is_doubtful else ():
            try:
                record = self.end.job_record(job_id)
                if record is None or record.state is not State.QUEUED:
                    continue
                is_live = True
                if record.left_ms is not None and record.left_ms < 0:
                    self.end.expire(job_id, self.tenant, expiry(job_id, self.tenant, UNSIGNED))
            except BrokerUnavailable:
                is_live = True
        if is_live:
            pause_s = self._pauses.uniform(0.2, 1.0) / (20 if self._simulation.plan.looks_often else 1)
            self._later(pause_s, partial(self._look, job))

    def look_at_all(self) -> None:
        """Look at each job of which nothing was heard, after a silence."""
        for job in self.jobs:
            if job.is_accepted and not job.is_told:
                self._later(_SILENCE_S, partial(self._look_for, job))

    def _look_for(self, job: Job) -> None:
        """What a client that waits does after a silence: it reads the record, and may find that there is none."""
        try:
            records = self.end.job_records(job.job_ids)
        except BrokerUnavailable:
            self._later(_SILENCE_S, partial(self._look_for, job))
            return
        if not job.is_told and not any(records):
            seen_at = time.monotonic()
            policy = self._simulation.policy
            state = JobState(job.job_ids[0], self.tenant, policy, awaits_reply=True, seen_at=seen_at)
            job.is_known_lost = isinstance(state.missing(), JobLost)

    def _cancel(self, job: Job, attempt: int) -> None:
        if not job.is_accepted:
            return
        job.cancel_asked = True
        outcomes = []
        for job_id in job.job_ids:
            try:
                outcomes.append(self.end.cancel(job_id, self.tenant, cancellation(job_id, self.tenant, UNSIGNED)))
            except BrokerUnavailable:
                if attempt < _ATTEMPTS:
                    self._later(self.schedule.rng.uniform(0.05, 0.5), lambda: self._cancel(job, attempt + 1))
                return
        if all(outcome is CancelOutcome.UNKNOWN for outcome in outcomes) and not self._simulation.has_lost(job):
            self.schedule.violate(f"job {job.number} was accepted and is unknown")


def _inputs(rows: int, question: float) -> dict[str, Array]:
    inputs = np.zeros((rows, 4), np.float32)
    inputs[:, 0] = question
    return {"x": inputs}


def _job_id(spec: ModelSpec, number: int) -> str:
    return f"{spec.name}.00000000-0000-7000-8000-{number:012x}"


def _options(order: Order) -> SubmitOptions:
    return SubmitOptions(
        priority=order.priority,
        version=order.version,
        deadline_s=order.deadline_s,
        retry=Retry(attempts=2, backoff_s=0.1, longest_s=0.1) if order.making == "flaky" else None,
    )
