"""A worker process in a schedule: the real Drain, whose threads the scheduler steps.

    Strand "io"     Drain.step          woken by the broker's answer and by a finished forward
    Strand "leases" LeaseKeeper.tick
    Seat            Executor.begin, run -- the forward's time passes --> finish, on each model thread
    Seat "here"     Executor.run_kept, on the strand "io": it waits while the forward's time passes

The strand "leases" also asks the executor, as the watchdog's thread does, whether a forward on the strand "io" hangs.

A process dies by `Crash`, which unwinds whatever it was doing: its memory is gone, its leases stay. A frozen one is
not stepped until it thaws, also when it freezes in the middle of a step. A supervisor starts another in the place of
one that died, and reports what its journal had on the model.
"""

from __future__ import annotations

import traceback
from asyncio import CancelledError
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

from penstock.registry.broker.base import Claim, Held
from penstock.registry.broker.incidents import timeout_incident
from penstock.registry.errors import BrokerUnavailable, OutOfMemory, UnknownModel
from penstock.registry.package import Package
from penstock.registry.settings import Settings
from penstock.workers.assembly import DrainOptions, PartTypes, build_drain
from penstock.workers.batch_run import BatchRun
from penstock.workers.drain import Drain
from penstock.workers.health import WorkerHealth
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.process.crash_journal import FormInUse
from penstock.workers.runtime.base import InstanceLost
from penstock.workers.versions.deployment_store import epoch_of
from penstock.workers.versions.version import ServedVersion, VersionState
from tests.simulation.broker import TTL_MS, Bystander, Entry, UnreliableEnd
from tests.simulation.packages import further_version
from tests.simulation.parts import (
    Double,
    SteppedExecutor,
    SteppedLoader,
    SteppedRouter,
    SteppedScheduler,
    SteppedWakeUp,
    put_in_place,
)
from tests.simulation.plan import LEASE_S, MOST_AT_ONCE, Fault
from tests.simulation.reports import CountedEnds
from tests.simulation.tiers import SimulatedTiers
from tests.simulation.virtual_time import Schedule

if TYPE_CHECKING:
    from tests.simulation.checker import Simulation

__all__ = [
    *("STEPPED", "Crash", "Machine", "Seat", "SteppedDrain", "Strand", "Supervisor", "Worker"),
]


class _SilentMetrics(InferenceMetrics):
    """No check reads them: what a worker does once a second takes no time."""

    def totals(self) -> dict[str, dict[str, float]]:
        """Nothing."""
        return {}

    def queue(self, model: str, priority: str, depth: int, oldest_s: float) -> None:
        """Keeps nothing."""

    def cache_size(self, tier: str, entries: int, nbytes: int, evicted: int) -> None:
        """Keeps nothing."""


_METRICS: Final = _SilentMetrics((0.1, 1.0))
"""Shared by all workers, which report to it."""
_JOBS_BEYOND: Final = 2 + MOST_AT_ONCE
"""The last job of a claim and of a take-over, and the jobs of one call that publishes, for a blocking claim."""
_SHORT_FORWARD_S: Final = 0.0002
_FORWARDS_BEFORE: Final = 20
"""So many short ones, and a version is known to have short forwards."""
_LATE_S: Final = 0.05
"""A wait that takes so much longer than meant may have cost a renewal."""


class _Unprintable(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise GeneratorExit

    __repr__ = __str__


class _NoException(BaseException):
    """One of the model's own."""


_RUDE: Final = (
    GeneratorExit(),
    SystemExit(1),
    CancelledError(),
    _NoException("a question"),
    BaseExceptionGroup("a group", [_NoException("a question")]),
    _Unprintable(),
    ValueError("a lone surrogate: \ud800"),
)
"""What models raise that are rude: it is no Exception, or cannot be told as it is."""


class Crash(BaseException):
    """The process is dead. Not an Exception: no code of ours survives it."""


class Hung(BaseException):
    """The thread stays where it is, for ever: nothing of it goes on. It waits on top of no other one."""


class SteppedHealth(WorkerHealth):
    """Of a worker whose threads are the schedule's."""

    @property
    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """As ever, but for the threads."""
        is_closed = self._parts.stop.is_set or bool(self._parts.scheduler.unhealthy_reason)
        return not is_closed and self._leases.is_in_touch and bool(self._parts.lifecycle.offers.claimable()), {}


class SteppedDrain(Drain):
    """A drain with a model double, whose threads the schedule steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.health.__class__ = SteppedHealth
        self._schedule: Schedule
        self._double: Double
        self._end: UnreliableEnd
        self._offered_since: dict[ServedVersion, float] = {}
        """Versions that jobs which name them may wait for here, and since when, in virtual time."""
        self._offers: list[ServedVersion] = []
        self._is_turning = False
        self._unable_at = -inf

    def take_part(
        self,
        schedule: Schedule,
        end: UnreliableEnd,
        *,
        double: Double,
        hear_bell: Callable[[], None],
        when_nowhere: Callable[[str, str], None],
        has_short_forwards: bool,
        seats: int,
        pass_time: Callable[[BatchRun, Callable[[BatchRun], None]], None],
    ) -> None:
        """Join a schedule. when_nowhere: called with a version that no worker is said to have. pass_time: see
        SteppedExecutor."""
        self._schedule, self._double, self._end = schedule, double, end
        self._has_short_forwards, self._engine_seats = has_short_forwards, seats
        parts = self.parts
        wake_up, router, scheduler, executor, loader = (
            parts.claimer.wake_up,
            parts.router,
            parts.scheduler,
            parts.executor,
            parts.lifecycle.loader,
        )
        assert isinstance(wake_up, SteppedWakeUp)
        assert isinstance(router, SteppedRouter)
        assert isinstance(scheduler, SteppedScheduler)
        assert isinstance(executor, SteppedExecutor)
        assert isinstance(loader, SteppedLoader)
        wake_up.hear_bell, wake_up.has_answer = hear_bell, end.has_answer
        router.when_nowhere = when_nowhere
        scheduler.violate, scheduler.worker, scheduler.end = schedule.violate, self.name, end
        executor.violate, executor.worker, executor.pass_time = schedule.violate, self.name, pass_time
        loader.schedule, loader.double, loader.has_short_forwards = schedule, double, has_short_forwards
        loader.seats = seats

    def load(self) -> None:
        """The double in the place of what the packages would build."""
        lifecycle = self.lifecycle
        for name, active in self.parts.broker.actives(list(lifecycle.models)).items():
            lifecycle.follow_at_start(lifecycle.models[name], active)
        for model in lifecycle.models.values():
            assert model.active is not None
            put_in_place(model.active, self._double, self._has_short_forwards, self._engine_seats)
            model.active.has_loaded()
            self.parts.executor.grow(model.active.policy.concurrency)
            for label in lifecycle.table.labels(model.name):
                lifecycle.table.resolve(model, label)
        self._remember_forwards(())
        self._note_offered()

    def _follow_lifecycle(self) -> None:
        """As ever."""
        ready = [version for version in self.lifecycle.turns if version.is_ready] if self._has_short_forwards else ()
        super()._follow_lifecycle()
        self._remember_forwards(ready)

    def _remember_forwards(self, known: Sequence[ServedVersion]) -> None:
        """As if versions had served for a while before: their forwards are known to be short."""
        for version in self.lifecycle.turns if self._has_short_forwards else ():
            for _ in range(_FORWARDS_BEFORE if version.is_ready and version not in known else 0):
                version.queue.note_forward(_SHORT_FORWARD_S)

    def step(self, longest_wait_s: float = 0.0) -> float | None:
        """As ever."""
        self._is_turning = True
        pause_s = super().step(longest_wait_s)
        self._is_turning = False
        self._check_bytes()
        self._note_offered()
        if not self.serves_all:
            self._unable_at = self._schedule.now
        return pause_s

    @property
    def unable_at(self) -> float:
        """When it last had something to load before it could serve all."""
        return self._unable_at if self.serves_all else self._schedule.now

    def sleep_s(self) -> float:
        """As ever; a turn here does not sleep."""
        return 0.0 if self._is_turning else super().sleep_s()

    def _exchange(self, claims: Sequence[Claim]) -> bool:
        """As ever."""
        if claims:
            # A model may have its share of the credit, however much the others hold.
            most, asked = self._limits.most_bytes, sum([claim.credit_bytes for claim in claims])
            if asked > max(most - self.parts.leased.nbytes, most // 2):
                self._schedule.violate(f"asked for more bytes than its credit: {self.name} for {asked}")
        return super()._exchange(claims)

    def _check_bytes(self) -> None:
        """The jobs in memory stay within the credit, but for those of the last calls."""
        beyond = self.parts.leased.nbytes - self._limits.most_bytes
        if beyond > 0:
            sizes = [len(job.delivery.sealed) for job in self.parts.leased._held.values()]
            if beyond > _JOBS_BEYOND * max(sizes):
                self._schedule.violate(f"more bytes than its credit: {self.name} by {beyond}")

    def _note_offered(self) -> None:
        # After each turn: no properties. What is not ready has the room of its queue.
        lifecycle = self.parts.lifecycle
        offered = [
            version
            for version in lifecycle.turns
            if version.state is VersionState.READY or (version.queue.free and lifecycle.offers.is_offered(version))
        ]
        if offered != self._offers:
            now = self._schedule.now
            self._offered_since = {version: self._offered_since.get(version, now) for version in offered}
            self._offers = offered

    def epoch_of(self, slot: str) -> int:
        """Of the decision that it obeys."""
        return epoch_of(self.lifecycle.models[slot].decided)

    def has_had(self, slot: str, label: str, since: float) -> bool:
        """Whether jobs that name the version could wait for it here from `since` on."""
        version = self.lifecycle.models[slot].versions.get(label)
        return version is not None and self._offered_since.get(version, inf) <= since and self.health.readiness[0]

    @property
    def ails(self) -> bool:
        """Whether it gives its jobs back, and can only be replaced."""
        return bool(self.parts.scheduler.unhealthy_reason)

    @property
    def serves_all(self) -> bool:
        """Whether every active version can be loaded here."""
        return all([model.is_claimable for model in self.lifecycle.models.values()])

    def holds(self, entry: Entry) -> bool:
        """Whether the job is in memory."""
        slot, priority, entry_id = entry
        return (slot, int(priority), entry_id) in self.parts.leased._held

    def has_jobs(self) -> bool:
        """Whether any are in memory, or running on after they were given back."""
        return bool(len(self.parts.leased) or self.parts.executor.running())


STEPPED: Final = PartTypes(
    drain=SteppedDrain,
    router=SteppedRouter,
    scheduler=SteppedScheduler,
    executor=SteppedExecutor,
    loader=SteppedLoader,
    wake_up=SteppedWakeUp,
    tiers=SimulatedTiers,
)
"""The parts of a worker in a schedule."""


class SimulatedRepository:
    """The other versions of the models; `labels` are those of all of them."""

    def __init__(
        self,
        packages: Sequence[Package],
        labels: Sequence[str],
        further_threads: int,
    ) -> None:
        self._packages = {package.spec.name: package for package in packages}
        self._labels = labels
        self._further_threads = further_threads

    def package(self, name: str, label: str) -> Package:
        """See ModelRepository.package."""
        if label not in self._labels:
            raise UnknownModel(f"{name}/{label}")
        package = self._packages[name]
        spec = further_version(package.spec, label, further_threads=self._further_threads if label == "2" else 0)
        return Package(spec, package.folder)

    def labels(self, name: str) -> list[str]:
        """See ModelRepository.labels."""
        return list(self._labels)


class Machine:
    """What outlives the workers of the one machine that they all are on: the decisions that were obeyed."""

    def __init__(self) -> None:
        self._decisions: dict[str, bytes] = {}

    def last(self, model: str) -> bytes:
        """See DeploymentStore.last."""
        return self._decisions.get(model, b"")

    def keep(self, model: str, active: bytes) -> None:
        """See DeploymentStore.keep."""
        self._decisions[model] = max(active, self.last(model), key=epoch_of)


class Strand:
    """One thread: `body` is one turn of it, and says in how many seconds the next is due; None: when roused."""

    def __init__(self, worker: Worker, body: Callable[[], float | None]) -> None:
        self._worker = worker
        self._body = body
        self._turn = 0
        self.is_busy = False
        self.is_asleep = True
        self._is_roused = False
        self._hangs = False

    def due(self, delay: float) -> None:
        """The next turn comes in `delay` seconds, and not when it was due before."""
        self._turn += 1
        self.is_asleep = False
        self._worker.schedule.after(delay, partial(self._fire, self._turn))

    def rouse(self) -> None:
        """The next turn comes at once, or right after the one that is under way."""
        if self.is_busy:
            self._is_roused = True
        else:
            self.due(0.0005 * self._worker.schedule.rng.random())

    def _fire(self, turn: int) -> None:
        worker, schedule = self._worker, self._worker.schedule
        if turn != self._turn or worker.is_gone or self._hangs:
            return
        if schedule.now < worker.frozen_until:
            self.due(worker.frozen_until - schedule.now + schedule.rng.uniform(0.0, 0.01))
            return
        self.is_busy, self._is_roused = True, False
        try:
            delay = self._body()
        except Crash:
            worker.die()
            return
        except Hung:
            self._hangs = True
            worker.stay_in_forward()
            return
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the process would end here, which is not expected
            schedule.violate(f"raised {error!r} at {_place_of(error)}")
            worker.die()
            return
        finally:
            self.is_busy = False
        if self._is_roused:
            delay = 0.0
        if delay is None:
            self.is_asleep = True
        else:
            self.due(delay + 0.002 * schedule.rng.random())


class Seat:
    """One model thread of a worker, and the batch that is on it."""

    def __init__(self, worker: Worker, simulation: Simulation, number: int) -> None:
        self.strand = Strand(worker, self._turn)
        self.forward_s = 0.0
        """How long the forward takes; for ever, if it hangs."""
        self.asked: set[float] = set()
        """What the batch has asked the model so far."""
        self.began = (0.0, 0.0)
        """When the batch was last looked over: virtual time, and the broker's in ms."""
        self._worker = worker
        self._simulation = simulation
        self._number = number
        self._work: BatchRun | None = None
        self._jobs: list[ClaimedJob] = []
        self._versions: set[str] = set()

    @property
    def is_free(self) -> bool:
        """Whether it waits for work."""
        return self._work is None and self.strand.is_asleep and not self.strand.is_busy

    @property
    def work(self) -> BatchRun | None:
        """The batch."""
        return self._work

    def versions(self) -> set[str]:
        """The versions that the jobs of the batch wait for."""
        return self._versions

    def jobs(self) -> list[ClaimedJob]:
        """The jobs of the batch."""
        return self._jobs

    def timed_out(self) -> list[ClaimedJob]:
        """The jobs that get no further forward, because this one is over its limit and was their last."""
        work = self._work
        is_over = work is not None and self._worker.schedule.now - work.alive_at > work.limit_s
        return self.jobs() if work is not None and is_over and work.is_last else []

    def _turn(self) -> float | None:
        executor = self._worker.drain.parts.executor
        if self._work is not None:
            executor.finish(self._number, self._work)
            self._work, self._jobs, self._versions = None, [], set()
        work = executor.begin(self._number)
        if work is None:
            return None
        self._answer(work, executor.run)
        return None if self.forward_s == inf else self.forward_s

    def run_here(self, work: BatchRun, run: Callable[[BatchRun], None]) -> None:
        """A forward on the strand that calls this, to its end. Raises Hung for one that has none."""
        self._answer(work, run)
        if self.forward_s == inf:
            raise Hung
        self._worker.wait(self.forward_s)
        if self.forward_s > LEASE_S / 2:
            # What the lease thread has taken over meanwhile is not in memory yet: nobody renews it.
            self._worker.disturbed_at = self._worker.schedule.now
        self._work, self._jobs, self._versions = None, [], set()

    def _answer(self, work: BatchRun, run: Callable[[BatchRun], None]) -> None:
        """The forward, whose time has yet to pass."""
        worker = self._worker
        self._work = work
        self._jobs = [item.job for item in work.batch.items]
        self._versions = {item.key.version for item in work.batch.items}
        self.asked = set()
        self.forward_s = self._simulation.forward_s()
        self.began = (worker.schedule.now, worker.end.now_ms())
        # While this one waits at a checkpoint, another may begin and end.
        outer, worker.seat = worker.seat, self
        try:
            run(work)
        finally:
            worker.seat = outer
        # The executor takes whatever is raised in a forward for the model's failure.
        worker.check_alive()


def _place_of(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.name}:{frame.lineno}"


class KeptJournal:
    """A journal that outlives its process, like the file."""

    def __init__(self) -> None:
        self._seats: dict[int, tuple[Sequence[Held], float]] = {}
        self._over: set[int] = set()
        self._last: set[int] = set()
        self._is_retired = False

    def leftovers(self, consumer: str) -> dict[str, list[Held]]:
        """What was on the model by incident, if the process was not told to stop."""
        found: defaultdict[str, list[Held]] = defaultdict(list)
        for seat, (jobs, limit_s) in {} if self._is_retired else self._seats.items():
            is_timeout = seat in self._over & self._last
            found[timeout_incident(consumer, limit_s) if is_timeout else consumer] += jobs
        return found

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
        """See Journal.begin."""
        self._seats[seat] = jobs, limit_s
        self._over.discard(seat)
        self._last = self._last | {seat} if is_last else self._last - {seat}

    def touch(self, seat: int, now: float) -> None:
        """See Journal.touch."""

    def exceeded(self, seat: int) -> None:
        """See Journal.exceeded."""
        self._over.add(seat)

    def disturbed(self, seat: int) -> None:
        """See Journal.disturbed."""
        self._last.discard(seat)

    def end(self, seat: int) -> None:
        """See Journal.end."""
        self._seats.pop(seat, None)

    def retire(self) -> None:
        """See Journal.retire."""
        self._is_retired = True


class Supervisor(Bystander):
    """Starts workers in the place of those that died or left, and reports what had been on their models."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation.schedule, "supervisor")
        self._simulation = simulation
        self.end: UnreliableEnd = simulation.connect(self)

    def has_died(self, worker: Worker) -> None:
        """Looks into its journal, as soon as it notices."""
        for incident, suspects in worker.journal.leftovers(worker.drain.consumer).items():
            self._report(incident, suspects)
        self.replace()

    def replace(self) -> None:
        """Another worker boots in a moment."""
        self.schedule.after(self.schedule.rng.choice((0.0, 0.3, 1.2)), self._simulation.boot)

    def _report(self, incident: str, suspects: Sequence[Held]) -> None:
        try:
            for slot in sorted({job.slot for job in suspects}):
                self.end.suspect(slot, [job for job in suspects if job.slot == slot], incident, TTL_MS)
        except BrokerUnavailable:
            self.schedule.after(self.schedule.rng.uniform(0.05, 0.3), partial(self._report, incident, suspects))


class Worker:
    """One boot of one worker."""

    def __init__(self, simulation: Simulation, label: str, settings: Settings) -> None:
        schedule: Schedule = simulation.schedule
        self.schedule = schedule
        self.label = label
        self.cut_until = 0.0
        self._disturbed_at = -1e9
        self.frozen_until = 0.0
        self._waits = 0
        """How many of its threads wait for something just now."""
        self.is_gone = False
        self.born = schedule.now
        self.stopped_at: float | None = None
        """When it was told to wind up."""
        self._simulation = simulation
        self._io_began = 0.0
        self._fail_points: list[Fault] = []
        self.seat: Seat | None = None
        """The one whose forward is under way."""
        self._io: Strand
        self._is_given_up = False
        self._is_dying = False
        self.journal = KeptJournal()
        self.end: UnreliableEnd = simulation.connect(self)
        drain = build_drain(
            settings,
            self.end,
            simulation.packages,
            DrainOptions(
                name=label,
                device="cpu",
                threads=1,
                listener=CountedEnds(simulation.reported_ends),
                metrics=_METRICS,
                checkpoint=self._checkpoint,
                clock=lambda: schedule.now,
                jitter=schedule.rng.random,
                journal=lambda _consumer, _seats: self.journal,
                repository=SimulatedRepository(
                    simulation.packages,
                    simulation.labels_of(label),
                    simulation.plan.further_threads,
                ),
                deployments=simulation.mutation.deployments(simulation.machine),
                tiers=[simulation.store] if simulation.plan.has_tier else (),
                types=simulation.mutation.types,
            ),
        )
        assert isinstance(drain, SteppedDrain)
        self.drain = drain
        self.drain.take_part(
            schedule,
            self.end,
            double=self._forward,
            hear_bell=lambda: self._io.rouse(),
            when_nowhere=partial(simulation.is_nowhere, self),
            has_short_forwards=simulation.plan.has_short_forwards,
            seats=simulation.plan.seats,
            pass_time=lambda work, run: self._here.run_here(work, run),
        )
        self.drain.load()
        simulation.truth.callers[self.drain.consumer] = self
        self._io = Strand(self, self._turn_io)
        self._leases = Strand(self, self._turn_leases)
        self._here = Seat(self, simulation, -1)
        """Its strand has no turns."""
        self._seats = [Seat(self, simulation, number) for number in range(simulation.plan.concurrency)]
        self.end.rouse = self._io.rouse
        self._io.due(schedule.rng.uniform(0.0, 0.05))
        self._leases.due(schedule.rng.uniform(0.0, 0.05))
        schedule.note(f"{label} boots")

    @property
    def disturbed_at(self) -> float:
        """See Caller.disturbed_at. How long a wait will be is known when it is over."""
        return inf if self._waits else self._disturbed_at

    @disturbed_at.setter
    def disturbed_at(self, at: float) -> None:
        self._disturbed_at = max(self._disturbed_at, at)

    # What happens to it

    def die(self) -> None:
        """kill -9. Its jobs come back within a lease and a second, if another worker lives."""
        if self.is_gone:
            return
        self.is_gone = True
        self.schedule.inject("death", self.label)
        leased = self.end.leased_to(self.drain.consumer)
        if self.stopped_at is None:
            seats = (self._here, *self._seats)
            self._simulation.truth.crashes.update(job.header.id for seat in seats for job in seat.jobs())
        # The system closes a dead process's connections in a moment; jobs that its blocking claim receives
        # until then are leased to no living worker.
        self.schedule.after(self.schedule.rng.uniform(0.0, 0.05), self.end.drop_armed)
        self._simulation.expect_redelivery(self, leased)
        self._simulation.supervisor.has_died(self)

    def freeze(self, seconds: float) -> None:
        """Not a step of it for so long."""
        self.schedule.inject("freeze", self.label)
        self.frozen_until = max(self.frozen_until, self.schedule.now + seconds)
        self.disturbed_at = self.frozen_until

    def fail_at(self, fault: Fault) -> None:
        """It crashes or freezes when it next passes the fault's point, or the nth time."""
        self._fail_points.append(fault)

    def terminate(self, grace_s: float) -> None:
        """SIGTERM."""
        if self.stopped_at is None and not self.is_gone:
            self.stopped_at = self.schedule.now
            self.schedule.inject("drain", self.label)
            self.drain.ask_to_stop(grace_s)

    # What it does

    def wait(self, delay: float) -> None:
        """See Caller.wait."""
        self._waits += 1
        overran_s = self.schedule.elapse(delay)
        self._waits -= 1
        if overran_s > _LATE_S:
            self.disturbed_at = self.schedule.now
        self.check_alive()

    def check_alive(self) -> None:
        """Raises Crash if it died meanwhile, or dies now."""
        if self.is_gone or self._is_dying:
            raise Crash

    def _crash(self) -> None:
        self._is_dying = True
        raise Crash

    def _lose_instance(self) -> None:
        """The process of the model's instance ends in the forward."""
        assert self.seat is not None
        self.schedule.inject("instance", self.label)
        self._simulation.truth.crashes.update(job.header.id for job in self.seat.jobs())
        raise InstanceLost("an instance ended", f"instance {self._simulation.next_number()}")

    def holds(self, entry: Entry) -> bool:
        """See Caller.holds."""
        return not self.is_gone and self.drain.holds(entry)

    def is_winding_up(self) -> bool:
        """See Caller.is_winding_up."""
        return self.stopped_at is not None and self._io_began > self.stopped_at

    def _checkpoint(self, point: str) -> None:
        for fault in self._fail_points:
            if fault.point == point:
                self._fail_points.remove(fault)
                if fault.nth > 1:
                    self._fail_points.append(Fault(fault.kind, 0.0, 0, fault.seconds, point, fault.nth - 1))
                elif fault.kind == "crash":
                    self.schedule.inject(f"crash {point}", self.label)
                    self._crash()
                elif fault.kind == "instance":
                    self._lose_instance()
                else:
                    self.schedule.inject(f"freeze {point}", self.label)
                    self.freeze(fault.seconds)
                    self.wait(fault.seconds)
                return

    def _turn_io(self) -> float | None:
        self._io_began = self.schedule.now
        pause_s = self.drain.step(0.0)
        if pause_s is None:
            self._leave()
            return None
        if self.drain.ails:
            self._give_up(self._seats)
        executor = self.drain.parts.executor
        for number in range(len(self._seats), executor.threads):
            self._seats.append(Seat(self, self._simulation, number))
        # One that is kept for this thread wakes no other.
        if waiting := [run for run in executor.waiting() if run is not executor.kept]:
            for seat, _ in zip((each for each in self._seats if each.is_free), waiting, strict=False):
                seat.strand.due(self.schedule.rng.uniform(0.0, 0.001))
        return pause_s or max(0.0002, self.drain.sleep_s())

    def stay_in_forward(self) -> None:
        """The strand of the I/O thread has left a forward that a thread would not leave."""
        self.drain.parts.executor.here = self._here.work

    def _turn_leases(self) -> float:
        pause_s = self.drain.leases.tick()
        executor = self.drain.parts.executor
        run = executor.here
        # A strand can wait below another one, whose forward is longer: that is no time of its own forward.
        if run is not None and self._here.forward_s > run.limit_s and executor.overdue_here(self.schedule.now):
            self._give_up([self._here])
        return pause_s

    def _give_up(self, seats: Sequence[Seat]) -> None:
        """Its own watchdog ends the process, or its supervisor, who reads in the journal that the forward hangs.

        A process that was told to stop has no watchdog any more, and a journal that nobody reads. It ends as well.
        """
        if self._is_given_up:
            return
        self._is_given_up = True
        if self.stopped_at is None:
            for seat in seats:
                self._simulation.have_timed_out(seat.timed_out())
            with suppress(BrokerUnavailable):
                self.drain.give_back_others()
        self.schedule.after(self.schedule.rng.uniform(0.3, 1.5), self.die)

    def _forward(self, version: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model double: answers twice the question and which version it is, unless its job's making is another."""
        self.check_alive()
        questions = inputs["x"][:, 0].tolist()
        assert self.seat is not None
        makings = self._simulation.forward_begins(self, self.seat, questions)
        if "poison" in makings:
            self.schedule.inject("poison", self.label)
            if self._simulation.plan.has_instances:
                self._lose_instance()
            self._crash()
        if "hung" in makings:
            self.schedule.inject("hung", self.label)
            self.seat.forward_s = inf
        if 0 < self._simulation.plan.device_rows < len(questions):
            raise OutOfMemory(f"{len(questions)} rows")
        if "rude" in makings:
            raise _RUDE[int(questions[0]) % len(_RUDE)]
        if "bad" in makings or "flaky" in makings:
            raise ValueError("a bad question")
        answer = inputs["x"] * 2
        answer[:, 1] = float(version)
        return {"y": answer}

    def _leave(self) -> None:
        self.is_gone = True
        self.schedule.note(f"{self.label} leaves")
        self.end.drop_armed()
        self._simulation.has_left(self)
        self._simulation.supervisor.replace()

    def take_apart(self) -> None:
        """It is looked at no more: its parts no longer hold each other."""
        parts = self.drain.parts
        for part in (
            *(parts.lifecycle, parts.placement, parts.intake, parts.router, parts.backlog, parts.scheduler),
            *(parts.executor, parts.completer, parts.claimer, parts.releaser, parts.telemetry, parts.status),
            *(parts.events, self.drain.leases, self.drain, self._io, self._leases, *self._seats, self._here, self),
        ):
            vars(part).clear()

    def is_engaged(self) -> bool:
        """Whether it has jobs in memory, or may turn out to have had some once it thaws."""
        return not self.is_gone and (self.frozen_until > self.schedule.now or self.drain.has_jobs())

    def has_had(self, slot: str, label: str, since: float) -> bool:
        """Whether it has had a version since then, in peace, and could have said so."""
        lives = not self.is_gone and self.stopped_at is None and not self.drain.ails
        # While its I/O thread is in a forward, it takes nothing over.
        is_free = self.drain.parts.executor.here is None
        return lives and is_free and self.disturbed_at < since and self.drain.has_had(slot, label, since)

    def has_lived(self, since: float) -> bool:
        """Whether it has served in peace since then."""
        lives = not self.is_gone and self.stopped_at is None and not self.drain.ails and self.frozen_until < since
        return lives and self.born < since and self.disturbed_at < since

    def may_take_over(self, since: float) -> bool:
        """Whether it has lived and been in touch for long enough, at `since`, to take over from others."""
        return (
            not self.is_gone
            and self.stopped_at is None
            and not self.drain.ails
            and self.drain.unable_at < since
            # While its I/O thread is in a forward, it takes nothing over.
            and self.drain.parts.executor.here is None
            and self.born < since - LEASE_S - 0.2
            and self.disturbed_at < since - LEASE_S
        )
