"""One schedule from its seed to its verdict.

seed -> Plan -> Simulation: clients and workers, stepped until all is quiet --> Outcome
                    |  forwards, effects, records -> tests/faults/history.py: lost, duplicated, unexpected
                    '-> states, deadlines, cancels, redelivery, hang
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from random import Random
from typing import Final

from penstock.producers.job_state import ResultPolicy
from penstock.registry.admission import JobBuilder
from penstock.registry.broker.base import JobRecord, Limits, State
from penstock.registry.broker.limits import REPLY_TTL_MS
from penstock.registry.deployment import DeployedArm, Deployment, Routing
from penstock.registry.envelope import ResultHeader
from penstock.registry.result_match import ResultMatcher
from penstock.registry.settings import Settings
from penstock.registry.tensors import decode
from penstock.workers.assembly import PartTypes
from penstock.workers.job import ClaimedJob
from penstock.workers.versions.deployment_store import DeploymentStore, epoch_of
from penstock.workers.versions.version import routing_table
from tests.faults.history import Effect, History, check
from tests.simulation.broker import TTL_MS, UNSIGNED, Caller, Entry, Truth, UnreliableEnd, opened
from tests.simulation.client import CLIENTS, Client, Job
from tests.simulation.operators import Operator
from tests.simulation.packages import packages_of
from tests.simulation.parts import content_hash_of
from tests.simulation.plan import (
    LEASE_S,
    Fault,
    Making,
    Plan,
    Promotion,
    draw_experiment,
    draw_promotions,
    draw_replay,
    plan_of,
)
from tests.simulation.tiers import SharedStore
from tests.simulation.virtual_time import Schedule
from tests.simulation.worker import STEPPED, Machine, Seat, Supervisor, Worker

__all__ = ["SOUND", "Mutation", "Outcome", "Simulation", "simulate"]

_ENDS: Final[dict[Making, State]] = {
    "good": State.COMPLETED,
    "bad": State.FAILED,
    "flaky": State.COMPLETED,
    "poison": State.DEAD,
    "hung": State.FAILED,
    "rude": State.FAILED,
}
_PATIENCE_S: Final = 60.0
"""Quiet must come so long after the last fault; the longest lease, freeze and retry need less."""
_PAUSE_S: Final = 1.5
"""A worker learns once a second that a model is paused."""
_REDELIVERY_S: Final = LEASE_S + 1.0
_ADOPTION_S: Final = 0.8
"""A worker looks four times in a lease for what was handed over."""
_ANNOUNCED_S: Final = 6.2
"""A worker renews its announcements with every fifth report, and reports once a second."""
_HEARD_OF_S: Final = 2.6
"""A worker reports once a second, and another reads that within a second and a quarter."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """The parts of a schedule that may be broken on purpose; see mutants.py."""

    name: str
    end: type[UnreliableEnd] = UnreliableEnd
    types: PartTypes = STEPPED
    deployments: Callable[[DeploymentStore], DeploymentStore] = lambda machine: machine
    builder: type[JobBuilder] = JobBuilder
    matcher: type[ResultMatcher] = ResultMatcher


SOUND: Final = Mutation("sound")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one schedule."""

    seed: int
    violations: tuple[str, ...]
    digest: str
    steps: int
    jobs: int
    re_executed: int
    injected: Counter[str]
    plan: Plan
    trace: tuple[str, ...]


class Simulation:
    """The processes of one schedule and what they are to each other."""

    def __init__(self, seed: int, mutation: Mutation) -> None:
        rng = Random(seed)
        self.seed = seed
        self.plan = plan_of(seed, rng)
        self.schedule = Schedule(rng)
        self.mutation = mutation
        self.truth = Truth()
        self.packages = packages_of(self.plan.models, self.plan.max_rows, self.plan.concurrency)
        self.history = History()
        self.machine = Machine()
        self.store = SharedStore(self.schedule)
        # Numbers of their own: the schedules of before they were drawn stay as they are.
        promotions = draw_promotions(Random(f"promotions of {seed}"), self.plan)
        self._promotions = draw_experiment(Random(f"arms of {seed}"), self.plan, promotions)
        self._records = {
            (name, each.epoch): _record(name, each)
            for each in self._promotions
            for name in [self.packages[each.model].spec.name]
        }
        self._tables = {
            (self.packages[each.model].spec.name, each.epoch): routing_table(_routing(each.arms))
            for each in self._promotions
            if each.arms
        }
        """By slot and epoch: the shares of an experiment."""
        self.truth.answering = {package.spec.name: [(-1.0, 0, "1")] for package in self.packages}
        self._replay_at = draw_replay(Random(f"replay of {seed}"), self.plan) if self._promotions else None
        self.truth.when_handed_over = self._expect_adoption
        plan = self.plan
        self._settings = _settings(plan.single_flight, plan.keeps_answers, plan.has_tier, plan.credit_bytes)
        self._max_crashes = self._settings.inference.queue.max_crashes
        # A process of an engine takes many jobs with it: they run together once more.
        self._alone_after = max(1, self._max_crashes - 1) if self.plan.seats else 1
        self._ends: list[UnreliableEnd] = []
        self._jobs: dict[str, Job] = {}
        self._numbers = itertools.count(1)
        self._labels = itertools.count(1)
        self.schedule.awaited = len(self.plan.faults) + len(self._promotions)
        self.workers: list[Worker] = []
        self._booted: list[Worker] = []
        """Those that are gone, too."""
        self._flaked: set[float] = set()
        self._timed_out: set[int] = set()
        self._mended: set[float] = set()
        self._paused_since: dict[str, float] = {}
        self.reported_ends: Counter[str] = Counter()
        """By job id: how often a worker told monitors that the job has ended."""
        self._handed_over: dict[Entry, float] = {}
        """When each was, for the last time."""
        limits = Limits(self.plan.max_depth, 0, TTL_MS)
        self.policy = ResultPolicy(UNSIGNED, TTL_MS / 1000)
        """Both clients have it: they are two tenants of one process, such as the gateway."""
        self.policy.matcher = mutation.matcher(UNSIGNED)
        self.heard: JobRecord | None = None
        """The last one with an answer that a client has read."""
        self.supervisor = Supervisor(self)
        self._operator = Operator(self) if self.plan.has_operator else None
        self._clients = [Client(self, index, limits) for index in range(CLIENTS)]

    def run(self) -> bool:
        """Everything happens; False when it does not come to rest."""
        for order in self.plan.orders:
            self._clients[order.client].plan(order, self.packages[order.model].spec)
        for client in self._clients:
            client.begin_reading()
        for fault in self.plan.faults:
            self.schedule.after(fault.at, partial(self._strike, fault))
        for promotion in self._promotions:
            self.schedule.after(promotion.at, partial(self._promote, promotion))
        if self._replay_at is not None:
            self.schedule.after(self._replay_at, self._put_back)
        for _ in range(self.plan.workers):
            self.boot()
        is_quiet = self.schedule.run(self._is_quiet, self.plan.until + _PATIENCE_S)
        self.schedule.is_over = True
        for client in self._clients:
            client.read()
        return is_quiet

    def close(self) -> None:
        """Gives the descriptors back, and takes everything apart: a tenth of the time went into finding the cycles."""
        self.schedule.close()
        for worker in self._booted:
            worker.take_apart()
        state = self._ends[0]._state
        for end in self._ends:
            end.close()
            vars(end).clear()
        vars(state).clear()
        for client in self._clients:
            vars(client).clear()
        vars(self).clear()

    # What the processes ask

    def connect(self, caller: Caller) -> UnreliableEnd:
        """An end of the broker for one process."""
        shared = self._ends[0] if self._ends else None
        self._ends.append(self.mutation.end(self.schedule, self.plan, self.truth, caller, shared))
        return self._ends[-1]

    def next_number(self) -> int:
        """A job's own."""
        return next(self._numbers)

    def know(self, job: Job) -> None:
        """A client is about to offer it."""
        for job_id in job.job_ids:
            self._jobs[job_id] = job

    def has_lost(self, job: Job) -> bool:
        """Whether the broker came back without the job, and has not accepted it again."""
        return self.truth.has_lost(job.job_ids)

    def mend(self, job_id: str) -> None:
        """From now on the model takes the job's question like any other."""
        self._mended.add(self._jobs[job_id].question)

    def have_timed_out(self, jobs: list[ClaimedJob]) -> None:
        """The last forwards of these jobs are over their limit."""
        self._timed_out.update(self._jobs[job.header.id].number for job in jobs)

    def forward_s(self) -> float:
        """How long the next forward takes."""
        rng = self.schedule.rng
        if self.plan.has_long_forwards and rng.random() < 0.2:
            return rng.uniform(1.2, 2.6)
        return self.plan.forward_s * rng.uniform(0.3, 2.0)

    def forward_begins(self, worker: Worker, seat: Seat, questions: list[float]) -> set[Making]:
        """A model is asked: nothing may be among it that was late or withdrawn when its batch began.

        Returns what the jobs are made to do.
        """
        self.schedule.note(f"forward {worker.label} {questions}")
        asked, jobs, (began, began_ms) = set(questions), seat.jobs(), seat.began
        # A job that is cut into slices, or taken out of a failed batch, has begun once all the same.
        self.history.forwards += sorted(asked - seat.asked)
        seat.asked |= asked
        makings: set[Making] = set()
        if len(seat.versions()) > 1:
            self.schedule.violate(f"a batch of two versions: {questions}")
        asking = Counter(self._jobs[claimed.header.id].question for claimed in jobs) if self.plan.has_tier else {}
        for claimed in jobs:
            job = self._jobs[claimed.header.id]
            # Of several jobs with one question it is not known which one was left out as too late.
            if job.question not in asked or (job.question < 0 and asking.get(job.question, 1) > 1):
                continue
            if job.number in self._timed_out and self._reports_arrive:
                self.schedule.violate(f"ran after its time-out: {job.number}")
            if claimed.delivery.crashes >= self._alone_after and (len(jobs) > 1 or len(worker.drain.active()) > 1):
                self.schedule.violate(f"a suspect in company: {job.number}")
            if self.truth.withdrawn.get(claimed.header.id, began) < began:
                self.schedule.violate(f"ran after it was withdrawn: {job.number}")
            deadline_s = job.order.deadline_s
            if deadline_s and began_ms > self.truth.accepted_ms[claimed.header.id] + deadline_s * 1000:
                self.schedule.violate(f"ran after its deadline: {job.number}")
            if (
                self._paused_since.get(claimed.header.model, began) < began - _PAUSE_S
                and worker.disturbed_at < began - 3
                # While the broker is away no worker learns of a pause.
                and self.schedule.down_until < began - _PAUSE_S
            ):
                self.schedule.violate(f"ran while its model was paused: {job.number}")
            if job.order.making == "flaky":
                # Its own retry finds it mended; the batch in which it failed first is only taken apart.
                if job.question in self._flaked:
                    continue
                if len(asked) == 1:
                    self._flaked.add(job.question)
            if job.question not in self._mended:
                makings.add(job.order.making)
        return makings

    def expect_redelivery(self, dead: Worker, leased: list[Entry]) -> None:
        """Its jobs must go to another within a lease and a second, if another lives in peace all that time."""
        since = self.schedule.now
        peers = [worker for worker in self.workers if worker.may_take_over(since)]
        if not leased or not peers or self._is_troubled(since) or self.plan.credit_bytes:
            return

        def check_in_time() -> None:
            still_able = [peer for peer in peers if peer.may_take_over(since)]
            if still_able and not self._is_troubled(since):
                forgotten = set(leased) & set(dead.end.leased_to(dead.drain.consumer))
                if forgotten:
                    self.schedule.violate(
                        f"not redelivered within {_REDELIVERY_S:g} s: {len(forgotten)} of {dead.label}"
                    )

        self.schedule.after(_REDELIVERY_S, check_in_time)

    def labels_of(self, worker: str) -> list[str]:
        """The versions that lie on a worker's disk."""
        has_third = Random(f"disk of {worker} in {self.seed}").random() < 0.5
        return ["1", "2", "3"] if has_third else ["1", "2"]

    def is_nowhere(self, worker: Worker, slot: str, label: str) -> None:
        """A worker fails a job that no worker has the version for: none may have had it long enough to report it."""
        since = self.schedule.now - _HEARD_OF_S
        if self._is_lossy or self._is_troubled(since) or worker.disturbed_at >= since:
            return
        having = [each.label for each in self.workers if each.has_had(slot, label, since)]
        if having:
            self.schedule.violate(f"failed, and a worker had it: {slot}/{label}, {having} and not {worker.label}")

    def _expect_adoption(self, entries: list[Entry], version: str) -> None:
        """A worker that has had the version undisturbed must adopt the jobs that were handed over for it."""
        since, (slot, _, _) = self.schedule.now, entries[0]
        self._handed_over.update(dict.fromkeys(entries, since))
        # A worker that holds as many bytes as it may adopts nothing.
        if self._is_lossy or self._is_troubled(since) or self.plan.credit_bytes:
            return

        def check_in_time() -> None:
            if self._is_troubled(since) or slot in self._paused_since:
                return
            having = [each.label for each in self.workers if each.has_had(slot, version, since)]
            waiting = set(entries) & set(self._ends[0].leased_to(f"version {version}"))
            # One that could not load it has handed some over once more.
            waiting = {entry for entry in waiting if self._handed_over[entry] == since}
            if having and waiting:
                self.schedule.violate(f"not adopted within {_ADOPTION_S:g} s: {len(waiting)} by {having}")

        self.schedule.after(_ADOPTION_S, check_in_time)

    @property
    def _is_lossy(self) -> bool:
        """Whether reports may come late at any time."""
        return bool(self.plan.loss or self.plan.delay)

    def _put_back(self) -> None:
        """A client puts the first record of a model back, once this machine knows the later one everywhere."""
        for slot, history in self.truth.answering.items():
            _, newest, _ = history[-1]
            living = [worker for worker in self.workers if not worker.is_gone]
            known = [epoch_of(self.machine.last(slot)), *(worker.drain.epoch_of(slot) for worker in living)]
            if len(history) > 2 and set(known) == {newest}:
                _, epoch, _ = history[1]
                self.schedule.inject("replay", f"{slot} epoch {epoch}")
                self._ends[0].put_back(slot, epoch, self._records[slot, epoch])

    def _is_troubled(self, since: float) -> bool:
        return self.schedule.down_until >= since or self.schedule.disturbed_at >= since

    def has_left(self, worker: Worker) -> None:
        """A worker has wound up: nothing may still be leased to it, were the network sound."""
        kept = worker.end.leased_to(worker.drain.consumer)
        if kept and not self.plan.loss and not self.plan.delay and worker.disturbed_at < 0 and not self._had_outage:
            self.schedule.violate(f"left with {len(kept)} leases: {worker.label}")

    @property
    def _had_outage(self) -> bool:
        return self.schedule.down_until > 0

    def boot(self) -> None:
        """Another worker."""
        self.workers = [worker for worker in self.workers if not worker.is_gone]
        self.workers.append(Worker(self, f"w{next(self._labels)}", self._settings))
        self._booted.append(self.workers[-1])

    def _strike(self, fault: Fault) -> None:
        schedule = self.schedule
        if fault.kind == "pause":
            self._pause(self.packages[fault.worker % len(self.packages)].spec.name, fault.seconds)
            return
        self.schedule.awaited -= 1
        if fault.kind == "outage":
            schedule.inject("outage")
            schedule.down_until = max(schedule.down_until, schedule.now + fault.seconds)
            self._outlast_jump()
        elif fault.kind == "loss":
            self._lose_everything(fault.seconds)
        elif fault.kind == "jump":
            schedule.inject("jump", f"{fault.seconds:g} s")
            schedule.skew_s += fault.seconds
            schedule.disturbed_at = schedule.now
            self._outlast_jump()
        elif living := [worker for worker in self.workers if not worker.is_gone]:
            if fault.kind == "drain" and fault.nth > 1:
                schedule.inject("rolling restart")
                for turn, worker in enumerate(living):
                    schedule.after(0.4 * turn, partial(worker.terminate, fault.seconds))
            else:
                self._strike_worker(fault, living[fault.worker % len(living)])

    def _lose_everything(self, seconds: float) -> None:
        """The broker comes back after so many seconds, empty. No promise holds for what it had accepted."""
        schedule = self.schedule
        schedule.inject("loss")
        schedule.down_until = max(schedule.down_until, schedule.now + seconds)
        schedule.disturbed_at = schedule.now
        self._outlast_jump()
        self._ends[0].lose_everything()
        self._paused_since.clear()
        self._timed_out.clear()
        for client in self._clients:
            client.look_at_all()
        schedule.awaited += 1
        schedule.after(seconds + 0.01, self._expect_announcements)

    def _expect_announcements(self) -> None:
        """A worker that lives undisturbed must announce its models again."""
        since = self.schedule.now

        def check_in_time() -> None:
            self.schedule.awaited -= 1
            if self._is_lossy or self._is_troubled(since):
                return
            if not any(worker.has_lived(since) for worker in self.workers):
                return
            for package in self.packages:
                if self._ends[0].spec(package.spec.name) is None:
                    self.schedule.violate(f"not announced within {_ANNOUNCED_S:g} s: {package.spec.name}")

        self.schedule.after(_ANNOUNCED_S, check_in_time)

    def _promote(self, promotion: Promotion) -> None:
        name, version = self.packages[promotion.model].spec.name, promotion.version
        self.schedule.inject(
            "arms" if promotion.arms else "promotion", f"{name}/{version} {promotion.arms or ''}".strip()
        )
        self._ends[0].activate(name, promotion.epoch, self._records[name, promotion.epoch], version, b"{}")
        self.schedule.awaited -= 1

    def _outlast_jump(self) -> None:
        """Leases that lapsed by a jump of the clock are not renewed before the broker is back."""
        if self.schedule.disturbed_at >= self.schedule.now - 2 * LEASE_S:
            self.schedule.disturbed_at = max(self.schedule.disturbed_at, self.schedule.down_until)

    def _pause(self, slot: str, seconds: float) -> None:
        """An operator pauses the model for a while. No worker takes over its jobs meanwhile."""
        schedule, end = self.schedule, self._ends[0]
        schedule.inject("pause", slot)
        schedule.disturbed_at = max(schedule.disturbed_at, schedule.now + seconds)
        end.pause(slot)
        self._paused_since.setdefault(slot, schedule.now)

        def resume() -> None:
            self.schedule.awaited -= 1
            schedule.disturbed_at = max(schedule.disturbed_at, schedule.now)
            self._paused_since.pop(slot, None)
            end.resume(slot)

        schedule.after(seconds, resume)

    @staticmethod
    def _strike_worker(fault: Fault, worker: Worker) -> None:
        if fault.kind == "partition":
            worker.schedule.inject("partition", worker.label)
            worker.cut_until = worker.schedule.now + fault.seconds
        elif fault.kind == "kill":
            worker.die()
        elif fault.kind == "drain":
            worker.terminate(fault.seconds)
        elif fault.point:
            worker.fail_at(fault)
            if fault.point == "mid-drain":
                worker.terminate(1.0)
        else:
            worker.freeze(fault.seconds)

    def _is_quiet(self) -> bool:
        if self._ends[0].has_unfinished():
            return False
        return not any(worker.is_engaged() for worker in self.workers)

    # The verdict

    def check(self, is_quiet: bool) -> Outcome:
        """Everything that was promised, now that it is over."""
        violate = self.schedule.violate
        if not is_quiet:
            violate(f"no end: {self._ends[0].unfinished()} jobs are still there")
        jobs = [job for client in self._clients for job in client.jobs]
        self._note_effects(jobs)
        findings = check(self.history)
        self._check_reports()
        for name, numbers in findings.violations.items():
            violate(f"{name}: {[int(number) for number in numbers]}")
        if self.plan.is_calm:
            twins = {job.question for job in jobs if job.order.is_twin}
            several = {question for question, count in Counter(job.question for job in jobs).items() if count > 1}
            if again := findings.re_executed - twins - several:
                violate(f"ran twice, and nothing had gone wrong: {sorted(again)}")
        return Outcome(
            self.seed,
            tuple(self.schedule.violations),
            self.schedule.digest(),
            self.schedule.steps,
            len(jobs),
            len(findings.re_executed),
            self.schedule.injected,
            self.plan,
            tuple(self.schedule.trace),
        )

    def _note_effects(self, jobs: list[Job]) -> None:
        history, violate = self.history, self.schedule.violate
        by_local_id = {job_id.rpartition(".")[2]: job for job_id, job in self._jobs.items()}
        records = dict(zip(self._jobs, self._ends[0].job_records(list(self._jobs)), strict=True))
        for job in jobs:
            history.questions[job.number] = job.question
            if job.is_accepted or job.is_doubtful:
                history.offered.add(job.number)
            if job.is_accepted and self.has_lost(job):
                if not job.is_told and not job.is_known_lost:
                    violate(f"its waiter was not told that it is lost: {job.number}")
            elif job.is_accepted:
                history.accepted.add(job.number)
                if not job.is_told and not self._replies_expired:
                    violate(f"its waiter was not told: {job.number}")
            for job_id in job.job_ids:
                job_record = records.get(job_id)
                if job_record is not None and job_record.result:
                    if job.number in history.records:
                        violate(f"two records of one idempotency key: {job.number}")
                    history.records[job.number] = job_record.result
                    self._check_state(job, job_id, job_record.state)
        for client in self._clients:
            for entry in client.replies():
                for local_id, record in zip(entry.fields[::2], entry.fields[1::2], strict=True):
                    self._note_effect(by_local_id[local_id.decode()], bytes(record))
        self._forget_replayed(jobs)
        if self._replies_expired:
            told = {effect.job for effect in history.effects}
            for job in jobs:
                if job.number in history.records and job.number not in told:
                    self._note_effect(job, b"C-" + history.records[job.number])

    def _check_reports(self) -> None:
        """An end is reported by the worker that the broker believed, and once more for each time that it was undone."""
        if self.schedule.injected["loss"]:
            return
        for job_id, count in self.reported_ends.items():
            if count > 1 + self.truth.replayed[job_id]:
                self.schedule.violate(f"reported {count} ends: {job_id[-4:]}")

    def _forget_replayed(self, jobs: list[Job]) -> None:
        """An end that an operator took back was told, and then once more for each time that he did."""
        if not self.truth.replayed:
            return
        told = Counter(effect.job for effect in self.history.effects)
        for job in jobs:
            superseded = sum(self.truth.replayed[job_id] for job_id in job.job_ids)
            if superseded and told[job.number] == superseded + 1:
                ends = [effect for effect in self.history.effects if effect.job == job.number]
                for effect in ends[:-1]:
                    self.history.effects.remove(effect)

    @property
    def _reports_arrive(self) -> bool:
        """Whether every death was reported long before its jobs' leases ran out."""
        kinds = {fault.kind for fault in self.plan.faults}
        return not (self.plan.loss or self.plan.delay or kinds & {"outage", "partition", "jump", "loss", "instance"})

    @property
    def _replies_expired(self) -> bool:
        """Whether a client may have learnt of results only by asking for the record, after a second of silence."""
        return self.schedule.skew_s * 1000 > REPLY_TTL_MS / 2

    def _note_effect(self, job: Job, record: bytes) -> None:
        header, body = opened(record[2:])
        is_answer = header.error is None
        if is_answer:
            self._check_version(job, header)
        self.history.effects.append(Effect(job.number, record[2:], is_answer))
        if is_answer:
            answer = decode(header.content, body)["y"]
            if answer[:, 0].tolist() != [2 * job.question] * job.order.rows:
                self.schedule.violate(f"the answer of another: {job.number}")
            if answer[:, 1].tolist() != [float(header.version)] * job.order.rows:
                self.schedule.violate(f"the answer of another version: {job.number}")

    def _check_version(self, job: Job, header: ResultHeader) -> None:
        """A version may answer that did so at some moment between the job's acceptance and its end; or the one that the
        job named."""
        if job.order.version:
            if header.version != job.order.version:
                self.schedule.violate(f"answered by another version than it named: {job.number}")
            return
        slot = job.publication.job_id.rpartition(".")[0]
        history = self.truth.answering[slot]
        if len(history) == 1:
            answering = {history[0][2]}
        else:
            ends = [since for since, _, _ in history[1:]] + [inf]
            accepted = min(self.truth.accepted_at[job_id] for job_id in job.job_ids if job_id in self.truth.accepted_at)
            answering = {
                self._answering(slot, epoch, version, header.id)
                for (_, epoch, version), end in zip(history, ends, strict=True)
                if end >= accepted
            }
        # A decision that no worker has heard of is lost with the broker's data.
        if header.version not in answering and not self.schedule.injected["loss"]:
            is_of_arms = any((slot, epoch) in self._tables for _, epoch, _ in history)
            what = "an arm that it did not have" if is_of_arms else "a version of before"
            self.schedule.violate(f"answered by {what}: {job.number}")
        if self._promotions and header.content_hash != content_hash_of(header.version):
            self.schedule.violate(f"content of another version: {job.number}")

    def _answering(self, slot: str, epoch: int, version: str, job_id: str) -> str:
        """The version that answers this job under the decision of this epoch."""
        table = self._tables.get((slot, epoch))
        return version if table is None else table.version_for(job_id)

    def _check_state(self, job: Job, job_id: str, state: State) -> None:
        """Whether it could end like this."""
        allowed = {State.COMPLETED if job.question in self._mended else _ENDS[job.order.making]}
        if (crashes := self.truth.crashes[job_id]) >= self._max_crashes:
            allowed.add(State.DEAD)
            # A worker that thaws may run what it held, before it learns that the job went on elsewhere.
            if crashes > self._max_crashes + self.schedule.injected["freeze"] and self._reports_arrive:
                self.schedule.violate(f"outlived {crashes} processes: {job.number}")
        if job.number in self._timed_out and self.schedule.injected["freeze"]:
            # While one worker is frozen, a thread of another one can wait below it: its forward takes as long.
            allowed.add(State.FAILED)
        if job.cancel_asked:
            allowed.add(State.CANCELLED)
        if job.order.deadline_s is not None:
            allowed.add(State.EXPIRED)
        if job.order.making == "flaky" and (job.cancel_asked or job.order.deadline_s is not None):
            # No retry is begun that could not end well.
            allowed.add(State.FAILED)
        if job.order.version:
            # What it named may be nowhere, or fail to load.
            allowed.add(State.FAILED)
        if job_id in self.truth.withdrawn:
            allowed = {State.CANCELLED}
        if state not in allowed:
            self.schedule.violate(f"ended {state.name.lower()}: {job.number}")


def _record(name: str, decision: Promotion) -> bytes:
    version = decision.version
    routing = _routing(decision.arms) if decision.arms else None
    return Deployment(decision.epoch, name, version, content_hash_of(version), routing).seal()


def _routing(arms: tuple[tuple[str, float], ...]) -> Routing:
    deployed = tuple(DeployedArm(label, content_hash_of(label), share) for label, share in arms)
    return Routing("experiment", "rollout", deployed)


@cache
def _settings(single_flight: bool, keeps_answers: bool, has_tier: bool, credit_bytes: int) -> Settings:
    settings = Settings.load(
        overrides={
            # Ageing would let a less urgent job go first, and the order could not be checked as simply.
            "queue": {"lease_s": LEASE_S, "ageing_s": 86_400.0, "result_ttl_s": TTL_MS / 1000},
            "batching": {"single_flight": single_flight},
            # With a tier behind it, the memory has next to nothing: else hardly a job would find its answer there.
            "cache": {"enabled": keeps_answers, "l1_size": 1 if has_tier else 10_000},
        }
    )
    if credit_bytes:
        # Less than the settings accept.
        object.__setattr__(settings.inference.batching, "max_queue_bytes", credit_bytes)
    return settings


def simulate(seed: int, mutation: Mutation = SOUND) -> Outcome:
    """Runs the seed's schedule. The same seed gives the same trace, whatever process runs it."""
    simulation = Simulation(seed, mutation)
    try:
        return simulation.check(simulation.run())
    finally:
        simulation.close()
