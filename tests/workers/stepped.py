"""A drain that the test steps under a clock of its own: no thread, no sleep, the broker in memory.

SteppedHarness.start_worker -> SteppedWorker.turn (the drain's), .forward (a model thread's) -> SteppedHarness.pass_time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.registry.admission import JobBuilder, SubmitOptions
from penstock.registry.broker.base import Broker, Held, JobRecord, Limits, State
from penstock.registry.broker.incidents import timeout_incident
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import Failure, Keyring, open_result
from penstock.registry.package import Package, load_package
from penstock.registry.settings import Settings
from penstock.registry.tensors import decode
from penstock.workers.assembly import DrainOptions, build_drain
from penstock.workers.batch_run import BatchRun
from penstock.workers.observe.listener import Ended, Failed, NullListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.process.crash_journal import FormInUse

UNSIGNED = Keyring.parse(None)
KNOWN = 40
LEASE_S = 5.0
LIMIT_S = 30.0
A_DAY_MS = 86_400_000
LIMITS = Limits(100_000, 0, A_DAY_MS)


class RecordingListener(NullListener):
    """A watcher that remembers who was retried and who ended how."""

    def __init__(self) -> None:
        self.retries: list[str] = []
        self.ends: list[tuple[str, State, str]] = []
        self.errors: list[Failure] = []
        self.revoked: set[str] = set()

    @property
    def has_revoked(self) -> bool:
        return bool(self.revoked)

    def is_revoked(self, job_id: str) -> bool:
        return job_id in self.revoked

    def retried(self, failed: Sequence[Failed], at: float) -> None:
        self.retries += [each.header.id for each in failed]

    def finished(self, ended: Sequence[Ended], at: float) -> None:
        self.ends += [(each.header.id, each.state, each.error.code if each.error else "") for each in ended]
        self.errors += [each.error for each in ended if each.error]


class MemoryJournal:
    """A journal that outlives its worker."""

    def __init__(self) -> None:
        self.seats: dict[int, list[Held]] = {}
        self.forms: list[FormInUse | None] = []
        """What ran each forward."""
        self.last: set[str] = set()
        """Jobs that have no further forward if theirs exceeds its limit."""
        self.over: set[int] = set()
        """Seats whose forward exceeded its limit."""
        self.is_retired = False

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
        self.seats[seat] = list(jobs)
        self.forms.append(form)
        if is_last:
            self.last.update(job.job_id for job in jobs)

    def touch(self, seat: int, now: float) -> None:
        """What is on the model stays."""

    def exceeded(self, seat: int) -> None:
        self.over.add(seat)

    def disturbed(self, seat: int) -> None:
        self.last.difference_update(job.job_id for job in self.seats.get(seat, ()))

    def end(self, seat: int) -> None:
        self.seats.pop(seat, None)

    def retire(self) -> None:
        self.is_retired = True

    @property
    def jobs(self) -> list[Held]:
        return [] if self.is_retired else [job for jobs in self.seats.values() for job in jobs]


class SteppedWorker:
    """A drain whose threads are the test."""

    def __init__(
        self, harness: SteppedHarness, broker: Broker, packages: list[Package], jitter: float, **options: Any
    ) -> None:
        self.journal = MemoryJournal()
        self.notes = RecordingListener()
        self.metrics = InferenceMetrics((0.1, 1.0))
        self.broker = broker
        self.drain = build_drain(
            harness.settings,
            broker,
            packages,
            DrainOptions(
                name=f"stepped-{len(harness.workers)}",
                device="cpu",
                threads=1,
                listener=self.notes,
                metrics=self.metrics,
                clock=harness.clock,
                jitter=lambda: jitter,
                journal=lambda _consumer, _seats: self.journal,
                **options,
            ),
        )
        self.drain.load()

    def turn(self, times: int = 1) -> None:
        """Turns of the drain's loop."""
        for _ in range(times):
            self.drain.step(0.0)

    def begin(self, seat: str = "a") -> BatchRun | None:
        """A model thread takes its next work."""
        return self.drain.parts.executor.begin(seat)

    def begin_next(self) -> BatchRun:
        """The next forward has begun; there must be one."""
        self.turn(2)
        run = self.begin()
        assert run is not None
        return run

    def end(self, work: BatchRun, seat: str = "a") -> None:
        """The forward of that work, and its handing in."""
        self.drain.parts.executor.run(work)
        self.drain.parts.executor.finish(seat, work)
        self.turn(2)

    def forward(self) -> list[str]:
        """A whole forward: the ids of its jobs; empty when there was nothing to run."""
        self.turn(2)
        work = self.begin()
        if work is None:
            return []
        self.end(work)
        return [item.job.header.id for item in work.batch.items]

    def forwards(self) -> list[list[str]]:
        """Forwards until there is nothing left to run."""
        return list(iter(self.forward, []))

    def counted(self, counter: str) -> float:
        """The sum of a counter over its labels."""
        (family,) = [family for family in self.metrics.collect() if family.name == counter]
        return sum(sample.value for sample in family.samples)


class SteppedHarness:
    """A broker, a clock, a producer, and workers."""

    def __init__(self, models_root: Path, **settings: Any) -> None:
        self.now = 1_000_000.0
        self.clock: Callable[[], float] = lambda: self.now
        self.settings = Settings.load(overrides={"queue": {"lease_s": LEASE_S}, "timeout_seconds": LIMIT_S, **settings})
        self.workers: list[SteppedWorker] = []
        self.models_root = models_root
        self._broker = MemoryBroker(self.clock)
        self.ends: list[Broker] = [self._broker]
        self._builder = JobBuilder(tenant="acme", keyring=UNSIGNED, max_bytes=10 << 20)

    @property
    def broker(self) -> MemoryBroker:
        """The producer's and operator's end."""
        return self._broker

    def start_worker(
        self, *, jitter: float = 1.0, connect: Callable[[MemoryBroker], Broker] | None = None, **options: Any
    ) -> SteppedWorker:
        """One more worker for all models of the root. options: of DrainOptions."""
        packages = [load_package(path / "1") for path in sorted(self.models_root.iterdir())]
        broker = connect(self._broker) if connect else self._broker.connect()
        self.ends.append(broker)
        self.workers.append(SteppedWorker(self, broker, packages, jitter, **options))
        return self.workers[-1]

    def publish(self, model: str, *numbers: float, **how: Any) -> list[str]:
        """One job per number; their ids."""
        return self.publish_inputs(model, *({"x": [[number, 0, 0, 0]]} for number in numbers), **how)

    def publish_inputs(self, model: str, *inputs: Mapping[str, Any], **how: Any) -> list[str]:
        """One job for each of these inputs; their ids."""
        spec = load_package(self.models_root / model / "1").spec
        jobs = [self._builder.build(spec, each, SubmitOptions(**how)) for each in inputs]
        assert {receipt.outcome for receipt in self.broker.publish(model, jobs, LIMITS)} == {"accepted"}
        return [job.job_id for job in jobs]

    def pass_time(self, seconds: float) -> None:
        """The clock goes on, and every worker that lives renews, takes over and turns meanwhile."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.25)
            for worker in self.workers:
                worker.drain.leases.tick()
                worker.turn()

    def suspend(self, worker: SteppedWorker) -> None:
        """Time passes without it: it has a forward under way, or is gone; its connection takes nothing more."""
        self.workers.remove(worker)
        worker.broker.drop_armed()

    def crash(self, worker: SteppedWorker, *, over_limit: bool = False) -> None:
        """kill -9: what was on its model is reported; its leases lapse by themselves.

        over_limit: the supervisor killed it because its forward exceeded the limit, and noted that in the journal.
        """
        self.suspend(worker)
        for job in worker.journal.jobs:
            is_timeout = over_limit and job.job_id in worker.journal.last
            consumer = worker.drain.consumer
            incident = timeout_incident(consumer, LIMIT_S) if is_timeout else consumer
            self.broker.suspect(job.slot, [job], incident, A_DAY_MS)

    def job_record(self, job_id: str) -> JobRecord:
        """What the job's record says."""
        job_record = self.broker.job_record(job_id)
        assert job_record is not None
        return job_record

    def state(self, job_id: str) -> State:
        return self.job_record(job_id).state

    def answer(self, job_id: str) -> float | str:
        """The first number of `y`, or the code of the failure."""
        header, body = open_result(self.job_record(job_id).result, UNSIGNED)
        return header.error.code if header.error else float(decode(header.content, body)["y"][0, 0])


def open_harness(models_root: Path, **settings: Any) -> Iterator[SteppedHarness]:
    harness = SteppedHarness(models_root, **settings)
    yield harness
    for end in harness.ends:
        end.close()


def make_known(harness: SteppedHarness, worker: SteppedWorker, seconds: float) -> None:
    """The forwards of late of the model `double` took so long: as many as decide."""
    for number in range(KNOWN):
        harness.publish("double", number)
        run = worker.begin_next()
        harness.now += seconds
        worker.end(run)
