"""The execution guards of a drain, stepped under a clock of the test's: no thread, no sleep, the broker in memory.

Bench.employ -> Worker.turn (the drain's), Worker.forward (a model thread's), Bench.pass_time (everybody's)
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.registry.admission import JobBuilder, SubmitOptions
from penstock.registry.broker.base import Broker, Depth, Held, JobRecord, Limits, State
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import Keyring, Retry, open_result
from penstock.registry.package import Package, load_package
from penstock.registry.settings import Settings
from penstock.registry.tensors import Array, decode
from penstock.workers.drain import Drain
from penstock.workers.executor import BatchRun
from penstock.workers.observe.listener import Ended, Failed, NullListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.process.crash_journal import FormInUse
from penstock.workers.runtime.base import Prepared, Runtime
from penstock.workers.runtime.forms import Forms, Forward
from penstock.workers.versions.version import VersionState
from tests.flow.conftest import amend
from tests.packages import write_double, write_package, write_recorder
from tests.servers import wait_until

UNSIGNED = Keyring.parse(None)
LEASE_S = 5.0
LIMIT_S = 30.0
A_DAY_MS = 86_400_000
LIMITS = Limits(100_000, 0, A_DAY_MS)


class Notes(NullListener):
    """A watcher that remembers who was retried and who ended how."""

    def __init__(self) -> None:
        self.retries: list[str] = []
        self.ends: list[tuple[str, State, str]] = []
        self.revoked: set[str] = set()

    def is_revoked(self, job_id: str) -> bool:
        return job_id in self.revoked

    def retried(self, failed: Sequence[Failed], at: float) -> None:
        self.retries += [each.header.id for each in failed]

    def finished(self, ended: Sequence[Ended], at: float) -> None:
        self.ends += [(each.header.id, each.state, each.error.code if each.error else "") for each in ended]


class Pages:
    """A journal that outlives its worker."""

    def __init__(self) -> None:
        self.seats: dict[int, list[Held]] = {}
        self.forms: list[FormInUse | None] = []
        """What ran each forward."""
        self.is_retired = False

    def begin(self, seat: int, jobs: Sequence[Held], limit_s: float, now: float, form: FormInUse | None = None) -> None:
        self.seats[seat] = list(jobs)
        self.forms.append(form)

    def touch(self, seat: int, now: float) -> None:
        """What is on the model stays."""

    def end(self, seat: int) -> None:
        self.seats.pop(seat, None)

    def retire(self) -> None:
        self.is_retired = True

    @property
    def jobs(self) -> list[Held]:
        return [] if self.is_retired else [job for jobs in self.seats.values() for job in jobs]


class Worker:
    """A drain whose threads are the test."""

    def __init__(self, bench: Bench, broker: Broker, packages: list[Package], jitter: float) -> None:
        self.journal = Pages()
        self.notes = Notes()
        self.metrics = InferenceMetrics((0.1, 1.0))
        self.broker = broker
        self.drain = Drain(
            bench.settings,
            broker,
            packages,
            name=f"bench-{len(bench.workers)}",
            device="cpu",
            threads=1,
            listener=self.notes,
            metrics=self.metrics,
            clock=bench.clock,
            jitter=lambda: jitter,
            journal=lambda _consumer, _seats: self.journal,
        )
        self.drain.load()

    def turn(self, times: int = 1) -> None:
        """Turns of the drain's loop."""
        for _ in range(times):
            self.drain.step(0.0)

    def begin(self, seat: str = "a") -> BatchRun | None:
        """A model thread takes its next work."""
        return self.drain.executor.begin(seat)

    def end(self, work: BatchRun, seat: str = "a") -> None:
        """The forward of that work, and its handing in."""
        self.drain.executor.run(work)
        self.drain.executor.finish(seat, work)
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


class Bench:
    """A broker, a clock, a producer, and workers."""

    def __init__(self, models_root: Path, **settings: Any) -> None:
        self.now = 1_000_000.0
        self.clock: Callable[[], float] = lambda: self.now
        self.settings = Settings.load(overrides={"queue": {"lease_s": LEASE_S}, "timeout_seconds": LIMIT_S, **settings})
        self.workers: list[Worker] = []
        self._root = models_root
        self._broker = MemoryBroker(self.clock)
        self.ends: list[Broker] = [self._broker]
        self._builder = JobBuilder(tenant="acme", keyring=UNSIGNED, max_bytes=10 << 20)

    @property
    def broker(self) -> MemoryBroker:
        """The producer's and operator's end."""
        return self._broker

    def employ(self, *, jitter: float = 1.0, connect: Callable[[MemoryBroker], Broker] | None = None) -> Worker:
        """One more worker for all models of the root."""
        packages = [load_package(path / "1") for path in sorted(self._root.iterdir())]
        broker = connect(self._broker) if connect else self._broker.connect()
        self.ends.append(broker)
        self.workers.append(Worker(self, broker, packages, jitter))
        return self.workers[-1]

    def publish(self, model: str, *numbers: float, **how: Any) -> list[str]:
        """One job per number; their ids."""
        spec = load_package(self._root / model / "1").spec
        jobs = [self._builder.build(spec, {"x": [[number, 0, 0, 0]]}, SubmitOptions(**how)) for number in numbers]
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

    def suspend(self, worker: Worker) -> None:
        """Time passes without it: it has a forward under way, or is gone; its connection takes nothing more."""
        self.workers.remove(worker)
        worker.broker.drop_armed()

    def crash(self, worker: Worker) -> None:
        """kill -9: what was on its model is reported; its leases lapse by themselves."""
        self.suspend(worker)
        for slot in {job.slot for job in worker.journal.jobs}:
            suspects = [job for job in worker.journal.jobs if job.slot == slot]
            self.broker.suspect(slot, suspects, worker.drain.consumer, A_DAY_MS)

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


@pytest.fixture
def bench(models_root: Path) -> Iterator[Bench]:
    """A bench with models that the test has written, or writes before it employs anybody."""
    yield from open_bench(models_root)


def open_bench(models_root: Path, **settings: Any) -> Iterator[Bench]:
    bench = Bench(models_root, **settings)
    yield bench
    for end in bench.ends:
        end.close()


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Where recorders note their forwards."""
    return tmp_path / "ledger"


def write_flaky(root: Path, name: str = "flaky", *, failures: int) -> Path:
    """Answers 2 x; raises ValueError for a negative first number, until it has been alone for `failures` times."""
    return write_package(
        root,
        name,
        f"""
        from collections import Counter

        def build():
            failed = Counter()

            def forward(inputs):
                for number in inputs["x"][:, 0].tolist():
                    if number < 0 and failed[number] < {failures}:
                        failed[number] += len(inputs["x"]) == 1
                        raise ValueError("not now")
                return {{"y": inputs["x"] * 2}}

            return forward
        """,
    )


def write_narrow(root: Path, room: Path, name: str = "narrow") -> Path:
    """Answers 2 x where the file `room` has room for so many rows."""
    return write_package(
        root,
        name,
        f"""
        from pathlib import Path

        from penstock.registry.errors import OutOfMemory

        def build():
            def forward(inputs):
                if len(inputs["x"]) > int(Path({str(room)!r}).read_text()):
                    raise OutOfMemory("no room")
                return {{"y": inputs["x"] * 2}}

            return forward
        """,
    )


def test_a_worker_that_loads_what_answers_stays_in_touch(models_root: Path):
    """With a lease of a second: it takes over from the dead as soon as it can serve, not a lease after that."""
    write_double(models_root)
    for bench in open_bench(models_root, queue={"lease_s": 1.0}):
        bench.employ()
        bench.pass_time(2.0)
        (job,) = bench.publish("double", 3)
        bench.workers[0].turn(2)
        dead = bench.workers[0]
        worker = bench.employ()
        bench.crash(dead)
        version = worker.drain._served["double"].active
        assert version is not None
        version.state = VersionState.LOADING
        bench.pass_time(3.0)
        assert bench.state(job) is State.QUEUED
        version.state = VersionState.READY
        bench.pass_time(0.5)
        assert worker.forward() == [job]


# Suspects


def crashed(bench: Bench, model: str, numbers: Sequence[float]) -> list[str]:
    """Jobs during whose forward a worker died, each waiting for somebody to take it over."""
    jobs = bench.publish(model, *numbers)
    first = bench.employ()
    first.turn(2)
    work = first.begin()
    assert work is not None
    assert [item.job.header.id for item in work.batch.items] == jobs
    bench.crash(first)
    return jobs


def test_suspects_run_one_by_one_and_the_others_together(bench: Bench, models_root: Path, ledger: Path):
    """After a crash each of its jobs has a forward to itself; those that only waited run together as ever."""
    write_recorder(models_root, ledger)
    suspects = crashed(bench, "recorder", [1, 2, 3])
    worker = bench.employ()
    worker.drain.leases.tick()
    bench.pass_time(LEASE_S + 1)
    innocent = bench.publish("recorder", *range(10, 15))
    batches = worker.forwards()
    assert sorted(map(len, batches)) == [1, 1, 1, 5]
    assert innocent in batches
    assert [bench.answer(job) for job in (*suspects, *innocent)] == [2 * n for n in (1, 2, 3, *range(10, 15))]


def test_a_suspect_starts_on_an_idle_device_and_nothing_beside_it(bench: Bench, models_root: Path, ledger: Path):
    """With two model threads: while anything runs a suspect waits; while it waits or runs nothing else begins."""
    amend(write_recorder(models_root, ledger), concurrency=2)
    amend(write_recorder(models_root, ledger, "other"), concurrency=2)
    worker = bench.employ()
    (running,) = bench.publish("other", 1)
    worker.turn(2)
    on_a = worker.begin("a")
    assert on_a is not None
    other = bench.employ()
    bench.suspend(worker)
    (suspect,) = bench.publish("recorder", 7)
    other.turn(2)
    assert other.begin() is not None
    bench.crash(other)
    bench.workers.append(worker)
    bench.pass_time(LEASE_S + 1)
    bench.publish("other", 2, 3)
    worker.turn(3)
    assert worker.begin("b") is None, "the suspect waits for the device to be idle, and the others behind it"
    worker.end(on_a, "a")
    alone = worker.begin("b")
    assert alone is not None
    assert [item.job.header.id for item in alone.batch.items] == [suspect]
    worker.turn(3)
    assert worker.begin("a") is None, "nothing begins beside the suspect"
    worker.end(alone, "b")
    beside = worker.begin("a")
    assert beside is not None
    worker.end(beside, "a")
    worker.forwards()
    assert (bench.answer(running), bench.answer(suspect)) == (2, 14)


def test_a_suspect_that_has_not_begun_yet_has_the_device_already(bench: Bench, models_root: Path, ledger: Path):
    """Between the drain's giving it out and a model thread's taking it nothing else is given out."""
    amend(write_recorder(models_root, ledger), concurrency=2)
    (suspect,) = crashed(bench, "recorder", [7])
    worker = bench.employ()
    bench.pass_time(LEASE_S + 1)
    bench.publish("recorder", 1, 2)
    worker.turn(5)
    waiting = worker.drain.executor.waiting()
    assert [[item.job.header.id for item in work.batch.items] for work in waiting] == [[suspect]]


class Formed:
    """A runtime that has another form, which ends the process for whatever it is given."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.forms = Forms(runtime.run)
        self.forms.use("compiled", self._end)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def candidates(self, compiler: object) -> dict[str, Callable[[], Forward]]:
        return {}

    def run(self, prepared: Prepared) -> dict[str, Array]:
        return self.forms.run(prepared)

    @staticmethod
    def _end(prepared: Prepared) -> dict[str, Array]:
        raise ProcessEnds


class ProcessEnds(BaseException):
    """No code of ours survives it."""


@pytest.mark.parametrize("max_rows", [16, 2], ids=["at once", "in slices"])
def test_a_suspect_runs_in_the_form_that_its_author_built(bench: Bench, models_root: Path, max_rows: int):
    """A form that kills its process costs no job: the second forward is the model's own, and no observer hears of it.
    Others go on in the form in use."""
    amend(write_double(models_root), batching={"max_batch_size": max_rows})
    spec = load_package(models_root / "double" / "1").spec
    job = bench._builder.build(spec, {"x": [[float(row), 0, 0, 0] for row in range(1, 5)]})
    bench.broker.publish("double", [job], LIMITS)
    first = bench.employ()
    first.turn(2)
    assert first.begin() is not None
    bench.crash(first)
    worker = bench.employ()
    heard: list[BatchRun] = []
    version = worker.drain._served["double"].active
    assert version is not None
    version.runtime = formed = Formed(version.runtime)
    version._forms = formed.forms
    version.observer = SimpleNamespace(observe=heard.append)
    worker.drain.leases.tick()
    bench.pass_time(LEASE_S + 1)
    assert worker.forward() == [job.job_id]
    assert bench.answer(job.job_id) == 2.0
    assert heard == []
    assert formed.forms.name == "compiled"
    bench.publish("double", 1)
    with pytest.raises(ProcessEnds):
        worker.forward()
    assert worker.journal.forms == [None, FormInUse("double", version.content_hash, "compiled")]


def test_suspects_and_others_take_turns(bench: Bench, models_root: Path, ledger: Path):
    """Neither keeps the other from running, however many there are of both."""
    write_recorder(models_root, ledger)
    write_recorder(models_root, ledger, "other")
    suspects = set(crashed(bench, "recorder", range(1, 9)))
    worker = bench.employ()
    bench.pass_time(LEASE_S + 1)
    for round_ in range(6):
        bench.publish("other", *range(round_ * 100, round_ * 100 + 16))
    kinds = ["suspect" if set(batch) <= suspects else "others" for batch in worker.forwards()]
    assert kinds.count("suspect") == 8
    assert "suspect others suspect others suspect others suspect others" in " ".join(kinds)


def test_a_suspect_shares_no_flight(bench: Bench, models_root: Path, ledger: Path):
    """Neither does a suspect follow an equal job, nor an equal job it: the answer of poison is a crash."""
    write_recorder(models_root, ledger)
    first, second = crashed(bench, "recorder", [7]), bench.publish("recorder", 7)
    worker = bench.employ()
    bench.pass_time(LEASE_S + 1)
    batches = worker.forwards()
    assert sorted(batches) == sorted([first, second])
    assert worker.counted("penstock_single_flight") == 0


@pytest.mark.parametrize("fate", ["cancelled", "expired", "lost", "drained", "paused"])
def test_a_suspect_that_waits_may_still_come_to_another_end(fate: str, bench: Bench, models_root: Path, ledger: Path):
    """While it waits for its forward it is cancelled, expires, is lost, or goes back; it has not run then."""
    write_recorder(models_root, ledger)
    write_recorder(models_root, ledger, "other")
    (job,) = bench.publish("recorder", 7, **({"deadline_s": LEASE_S + 3} if fate == "expired" else {}))
    first = bench.employ()
    first.turn(2)
    assert first.begin() is not None
    bench.crash(first)
    worker = bench.employ()
    bench.publish("other", 1)
    worker.turn(2)
    busy = worker.begin()
    assert busy is not None
    bench.pass_time(LEASE_S + 1)
    assert [header.id for header in worker.drain.reserved()] == [job]
    if fate == "cancelled":
        bench.broker.cancel(job, "acme", b"")
        bench.pass_time(3)
    elif fate == "expired":
        bench.pass_time(4)
    elif fate == "lost":
        assert len(bench.broker.take_over("a thief", "recorder", 0, 10)) == 1
        bench.pass_time(3)
    elif fate == "paused":
        bench.broker.pause("recorder")
        bench.pass_time(2)
        assert not bench.job_record(job).is_claimed
    else:
        worker.drain.ask_to_stop(10.0)
        worker.turn()
    worker.end(busy)
    worker.turn(3)
    ends = {"cancelled": State.CANCELLED, "expired": State.EXPIRED}
    assert bench.state(job) is ends.get(fate, State.QUEUED)
    assert worker.forwards() == []
    assert worker.drain.reserved() == []
    if fate in ("drained", "paused"):
        assert not bench.job_record(job).is_claimed
        bench.broker.resume("recorder")
        bench.workers[:] = [bench.employ()]
        bench.pass_time(1)
        assert bench.workers[0].forwards() == [[job]]
        assert bench.answer(job) == 14
    elif fate != "lost":
        assert worker.drain.readiness[1]["in_memory"] == 0


def test_the_third_crash_makes_a_dead_letter(bench: Bench, models_root: Path, ledger: Path):
    """Alone at every further crash; after the third it is not run again: its bytes and the reason are kept, its
    client is told, the monitor sees a failure, and its neighbours have their answers.
    """
    write_recorder(models_root, ledger)
    neighbours = bench.publish("recorder", 1, 2)
    (poison,) = bench.publish("recorder", 666)
    crashes = 0
    while crashes < 3:
        worker = bench.employ()
        bench.pass_time(LEASE_S + 1)
        worker.turn(2)
        work = worker.begin()
        assert work is not None
        jobs = [item.job.header.id for item in work.batch.items]
        if poison in jobs:
            assert jobs == ([*neighbours, poison] if crashes == 0 else [poison])
            bench.crash(worker)
            crashes += 1
        else:
            worker.end(work)
            bench.suspend(worker)
            worker.drain.ask_to_stop(0.0)
            worker.turn(2)
    last = bench.employ()
    bench.pass_time(LEASE_S + 1)
    assert all(poison not in batch for batch in last.forwards())
    assert (bench.state(poison), bench.answer(poison)) == (State.DEAD, "DeadLettered")
    (letter,) = bench.broker.dead_letters("recorder")
    assert letter.reason == "Poison: 3 worker processes died, or hung and were killed, while it ran"
    assert (letter.job_id, letter.crashes) == (poison, 3)
    kept = bench.broker.read_dead_letter("recorder", letter.entry)
    assert kept is not None
    assert b"666" not in kept.sealed
    assert poison.encode() in kept.sealed
    assert (poison, State.DEAD, "DeadLettered") in last.notes.ends
    assert last.counted("penstock_dead_lettered") == 1
    assert [bench.answer(job) for job in neighbours] == [2, 4]


def test_drains_releases_and_lapsed_leases_count_against_nobody(bench: Bench, models_root: Path, ledger: Path):
    """A worker that was told to stop and killed in its forward, and one that froze: their jobs are no suspects."""
    write_recorder(models_root, ledger)
    jobs = bench.publish("recorder", 1, 2, 3)
    told = bench.employ()
    told.turn(2)
    assert told.begin() is not None
    told.drain.ask_to_stop(10.0)
    bench.crash(told)
    frozen = bench.employ()
    bench.pass_time(LEASE_S + 1)
    frozen.turn(2)
    assert frozen.begin() is not None
    bench.suspend(frozen)
    worker = bench.employ()
    bench.pass_time(LEASE_S + 1)
    assert worker.forwards() == [jobs]


# Out of memory


def test_a_cap_is_learnt_and_later_relaxed(bench: Bench, models_root: Path, tmp_path: Path):
    """Room for four rows: batches of 16 are split, later ones have four rows, and after a while of room for all they
    grow again; every job is answered.
    """
    room = tmp_path / "room"
    room.write_text("16")
    write_narrow(models_root, room)
    worker = bench.employ()
    room.write_text("4")
    jobs = bench.publish("narrow", *range(48))
    batches = worker.forwards()
    # The second was ready before the first had ended.
    assert [len(batch) for batch in batches] == [16, 16, 4, 4, 4, 4]
    assert worker.counted("penstock_out_of_memory") == 2
    room.write_text("16")
    for size in (4, 8, 16):
        numbers = range(len(jobs), len(jobs) + 16)
        jobs += bench.publish("narrow", *numbers)
        assert [len(batch) for batch in worker.forwards()] == [size] * (16 // size)
        bench.now += 300.0
        bench.pass_time(0.5)
    assert [bench.answer(job) for job in jobs] == [2.0 * n for n in range(len(jobs))]


def test_one_row_that_never_fits_narrows_nobody_elses_batches(bench: Bench, models_root: Path, tmp_path: Path):
    """A job that fits no device by itself fails by itself, and the batches after it are as large as before."""
    room = tmp_path / "room"
    room.write_text("16")
    write_narrow(models_root, room)
    worker = bench.employ()
    room.write_text("0")
    (job,) = bench.publish("narrow", 1)
    assert worker.forwards() == [[job]]
    assert bench.answer(job) == "ModelError"
    room.write_text("16")
    bench.publish("narrow", *range(16))
    assert [len(batch) for batch in worker.forwards()] == [16]


# Retries

TWICE = Retry(attempts=2, backoff_s=4, longest_s=60)
THRICE = Retry(attempts=3, backoff_s=4, longest_s=60)


def test_a_job_without_a_policy_has_one_forward(bench: Bench, models_root: Path):
    """A failure is its end."""
    write_flaky(models_root, failures=1)
    worker = bench.employ()
    (job,) = bench.publish("flaky", -1)
    assert worker.forwards() == [[job]]
    assert bench.answer(job) == "ModelError"
    assert worker.notes.retries == []


@pytest.mark.parametrize(("jitter", "pauses"), [(0.0, [2.0, 4.0]), (1.0, [4.0, 8.0])])
def test_a_failed_job_rests_and_runs_again(jitter: float, pauses: list[float], bench: Bench, models_root: Path):
    """The third forward succeeds; between them are the policy's pauses, to the moment."""
    write_flaky(models_root, failures=2)
    worker = bench.employ(jitter=jitter)
    (job,) = bench.publish("flaky", -1, retry=THRICE)
    for pause in pauses:
        assert worker.forwards() == [[job]]
        bench.pass_time(pause - 0.01)
        assert worker.forwards() == []
        bench.pass_time(0.01)
    assert worker.forwards() == [[job]]
    assert (bench.state(job), bench.answer(job)) == (State.COMPLETED, -2)
    assert worker.notes.retries == [job, job]
    assert worker.counted("penstock_retried") == 2
    assert worker.drain.readiness[1]["in_memory"] == 0


def test_the_last_attempt_is_the_end(bench: Bench, models_root: Path):
    """After as many forwards as the policy has the failure is the job's own; its neighbour never waited for it."""
    write_flaky(models_root, failures=9)
    worker = bench.employ()
    job, neighbour = bench.publish("flaky", -1, 5, retry=TWICE)
    assert worker.forwards() == [[job, neighbour]]
    assert bench.answer(neighbour) == 10
    bench.pass_time(4)
    assert worker.forwards() == [[job]]
    assert bench.answer(job) == "ModelError"
    bench.pass_time(60)
    assert worker.forwards() == []


def test_a_deadline_ends_the_retries(bench: Bench, models_root: Path):
    """When the next forward could only begin too late the failure stands at once."""
    write_flaky(models_root, failures=9)
    worker = bench.employ()
    (job,) = bench.publish("flaky", -1, retry=THRICE, deadline_s=6)
    worker.forwards()
    bench.pass_time(4)
    worker.forwards()
    assert (bench.state(job), bench.answer(job)) == (State.FAILED, "ModelError")
    assert worker.notes.retries == [job]


def test_a_resting_job_can_be_cancelled(bench: Bench, models_root: Path):
    """Its pause ends with the news, and it does not run again."""
    write_flaky(models_root, failures=1)
    worker = bench.employ()
    (job,) = bench.publish("flaky", -1, retry=Retry(attempts=2, backoff_s=600, longest_s=600))
    worker.forwards()
    bench.broker.cancel(job, "acme", b"")
    bench.pass_time(LEASE_S)
    assert bench.state(job) is State.CANCELLED
    assert worker.drain.readiness[1]["in_memory"] == 0


def test_a_job_that_is_revoked_while_it_rests_does_not_run_again(bench: Bench, models_root: Path):
    """Withdrawn through Celery in the middle of its pause: that is its end."""
    write_flaky(models_root, failures=1)
    worker = bench.employ()
    (job,) = bench.publish("flaky", -1, retry=TWICE)
    worker.forwards()
    worker.notes.revoked.add(job)
    bench.pass_time(4)
    assert worker.forwards() == []
    assert bench.state(job) is State.CANCELLED


def test_a_resting_job_that_was_lost_is_forgotten(bench: Bench, models_root: Path):
    """Somebody else has it by now: it neither runs nor ends here."""
    write_flaky(models_root, failures=1)
    worker = bench.employ()
    (job,) = bench.publish("flaky", -1, retry=TWICE)
    worker.forwards()
    assert len(bench.broker.take_over("somebody else", "flaky", 0, 10)) == 1
    bench.pass_time(LEASE_S)
    assert worker.forwards() == []
    assert bench.job_record(job).is_claimed
    assert worker.drain.readiness[1]["in_memory"] == 0


def test_a_resting_job_is_kept_from_others_by_its_lease(bench: Bench, models_root: Path):
    """A pause longer than the lease: the job stays where it rests, and has one forward there."""
    write_flaky(models_root, failures=1)
    worker, other = bench.employ(), bench.employ()
    (job,) = bench.publish("flaky", -1, retry=Retry(attempts=2, backoff_s=20, longest_s=20))
    assert worker.forwards() == [[job]]
    bench.pass_time(20)
    assert other.forwards() == []
    assert worker.forwards() == [[job]]
    assert bench.answer(job) == -2


@pytest.mark.parametrize("when", ["resting", "failing"])
def test_sigterm_gives_a_retried_job_back(when: str, bench: Bench, models_root: Path):
    """Neither a rest nor a failure under SIGTERM is the job's end: another worker runs it, as a first attempt."""
    write_flaky(models_root, failures=1)
    worker = bench.employ()
    (job,) = bench.publish("flaky", -1, retry=TWICE)
    worker.turn(2)
    work = worker.begin()
    assert work is not None
    if when == "resting":
        worker.end(work)
        worker.drain.ask_to_stop(10.0)
    else:
        worker.drain.ask_to_stop(10.0)
        worker.end(work)
    worker.turn(3)
    assert not bench.job_record(job).is_claimed
    bench.workers[:] = [bench.employ()]
    bench.pass_time(1)
    bench.workers[0].forwards()
    bench.pass_time(4)
    bench.workers[0].forwards()
    header, _ = open_result(bench.job_record(job).result, UNSIGNED)
    assert (header.error, header.attempt) == (None, 1)


def test_a_crash_while_a_job_rests_counts_against_nobody(bench: Bench, models_root: Path, ledger: Path):
    """A resting job was not on the model when the process died: it is no suspect, and runs in company."""
    write_flaky(models_root, failures=1)
    worker = bench.employ()
    (resting,) = bench.publish("flaky", -1, retry=Retry(attempts=2, backoff_s=600, longest_s=600))
    worker.forwards()
    bench.publish("flaky", 3)
    worker.turn(2)
    assert worker.begin() is not None
    bench.crash(worker)
    successor = bench.employ()
    bench.pass_time(LEASE_S + 1)
    (company,) = bench.publish("flaky", 4)
    assert {resting, company} in [set(batch) for batch in successor.forwards()]


def test_resting_jobs_take_no_room_from_others(bench: Bench, models_root: Path):
    """More jobs rest than batches have room for, and new ones are claimed and run as ever."""
    write_flaky(models_root, failures=1)
    worker = bench.employ()
    bench.publish("flaky", *range(-100, 0), retry=Retry(attempts=2, backoff_s=600, longest_s=600))
    assert len(worker.forwards()) >= 7
    jobs = bench.publish("flaky", *range(16))
    assert sorted(job for batch in worker.forwards() for job in batch) == sorted(jobs)


def test_equal_jobs_that_fail_do_not_keep_others_out(models_root: Path):
    """A hundred equal jobs fail on a worker that holds forty at most: the job behind them runs all the same."""
    write_flaky(models_root, failures=10_000)
    for bench in open_bench(models_root, batching={"max_queue_depth": 40}):
        worker = bench.employ()
        bench.publish("flaky", *[-1] * 100, retry=Retry(attempts=2, backoff_s=600, longest_s=600))
        (behind,) = bench.publish("flaky", 5)
        worker.forwards()
        assert bench.state(behind) is State.COMPLETED


def test_when_too_many_rest_the_next_runs_again_at_once(models_root: Path):
    """Half of the memory may rest; beyond it a pause would keep sound jobs out."""
    write_flaky(models_root, failures=1)
    for bench in open_bench(models_root, batching={"max_queue_depth": 8}):
        worker = bench.employ()
        jobs = bench.publish("flaky", *range(-6, 0), retry=Retry(attempts=2, backoff_s=600, longest_s=600))
        worker.forwards()
        assert sum(bench.state(job) is State.COMPLETED for job in jobs) == 2
        bench.pass_time(600)
        worker.forwards()
        assert {bench.state(job) for job in jobs} == {State.COMPLETED}


def test_who_followed_a_job_that_rests_goes_ahead(bench: Bench, models_root: Path):
    """Of equal jobs the first fails and rests; the others do not wait for it, can be cancelled, and keep their
    deadlines, and one forward answers them all.
    """
    write_flaky(models_root, failures=1)
    worker = bench.employ()
    leader, *followers = bench.publish("flaky", *[-1] * 4, retry=Retry(attempts=2, backoff_s=600, longest_s=600))
    assert worker.forwards() == [[leader], followers[:1]]
    assert {bench.answer(job) for job in followers} == {-2}
    assert bench.state(leader) is State.QUEUED
    bench.pass_time(600)
    assert worker.forwards() == [[leader]]
    assert bench.answer(leader) == -2


# A forward that hangs, and a device that is lost


class Thread:
    """A model thread of the test's own."""

    def __init__(self, worker: Worker, seat: str) -> None:
        self.seat = seat
        self._worker = worker
        self.work = worker.begin(seat)

    def finish(self) -> None:
        assert self.work is not None
        self._worker.end(self.work, self.seat)


def test_beside_a_hung_forward_the_rest_is_given_back_at_the_limit(bench: Bench, models_root: Path, ledger: Path):
    """At the limit and not before: what waits goes to others, and this worker takes nothing any more, not even what
    it has just given back; the batch that hangs stays in its journal and under its lease.
    """
    write_recorder(models_root, ledger)
    worker = bench.employ()
    hung = bench.publish("recorder", 1)
    worker.turn(2)
    thread = Thread(worker, "a")
    waiting = bench.publish("recorder", *range(2, 40))
    bench.pass_time(LIMIT_S - 0.5)
    assert any(bench.job_record(job).is_claimed for job in waiting)
    bench.pass_time(1)
    assert not any(bench.job_record(job).is_claimed for job in waiting)
    bench.pass_time(3)
    assert not any(bench.job_record(job).is_claimed for job in waiting)
    assert worker.counted("penstock_taken_over") == 0
    assert [job.job_id for job in worker.journal.jobs] == hung
    assert bench.job_record(hung[0]).is_claimed
    other = bench.employ()
    bench.pass_time(1)
    other.forwards()
    assert [bench.answer(job) for job in waiting] == [2 * number for number in range(2, 40)]
    assert bench.state(hung[0]) is State.QUEUED
    # It ends after all, before anybody has killed the process: its answer counts, and nobody is a suspect.
    thread.finish()
    assert bench.answer(hung[0]) == 2
    assert worker.journal.jobs == []


def test_a_limit_shorter_than_the_drains_own_rest_is_kept(models_root: Path, ledger: Path):
    """A forward of a tenth of a second hangs: noticed at the drain's next turn, though that comes later than that."""
    write_recorder(models_root, ledger)
    for bench in open_bench(models_root, timeout_seconds=0.1):
        worker = bench.employ()
        bench.publish("recorder", 1)
        worker.turn(2)
        thread = Thread(worker, "a")
        (waiting,) = bench.publish("recorder", 2)
        bench.pass_time(1)
        assert not bench.job_record(waiting).is_claimed
        thread.finish()


def test_a_process_that_stood_still_gives_its_forward_another_limit(bench: Bench, models_root: Path, ledger: Path):
    """Frozen for longer than the limit, as a whole: nobody hangs, and the forward is answered; one that then takes its
    limit again does hang.
    """
    write_recorder(models_root, ledger)
    worker = bench.employ()
    (job,) = bench.publish("recorder", 1)
    worker.turn(2)
    thread = Thread(worker, "a")
    bench.now += 2 * LIMIT_S
    (waiting,) = bench.publish("recorder", 2)
    bench.pass_time(LIMIT_S - 1)
    assert bench.job_record(waiting).is_claimed
    bench.pass_time(2)
    assert not bench.job_record(waiting).is_claimed
    thread.finish()
    assert bench.answer(job) == 2


def test_progress_moves_the_limit(bench: Bench, models_root: Path, ledger: Path):
    """A forward in parts has its limit for each of them."""
    write_recorder(models_root, ledger)
    worker = bench.employ()
    (job,) = bench.publish("recorder", 1)
    worker.turn(2)
    thread = Thread(worker, "a")
    for _ in range(4):
        bench.pass_time(LIMIT_S - 1)
        assert thread.work is not None
        thread.work.touch()
    (later,) = bench.publish("recorder", 2)
    bench.pass_time(1)
    assert bench.job_record(later).is_claimed
    thread.finish()
    assert bench.answer(job) == 2


def test_on_a_lost_device_nothing_more_is_begun_and_the_rest_is_given_back(
    bench: Bench, models_root: Path, ledger: Path
):
    """What was on the model stays in the journal; what waited goes back at once; the process asks to be replaced."""
    write_package(
        models_root,
        "lost",
        """
        from penstock.workers.runtime.base import DeviceLost

        def build():
            def forward(inputs):
                if (inputs["x"][:, 0] < 0).any():
                    raise DeviceLost("cuda:0: an illegal access")
                return {"y": inputs["x"]}

            return forward
        """,
        max_batch_size=1,
    )
    worker = bench.employ()
    # The model thread is a real one here: what it does about the error is the point.
    worker.drain.start()
    try:
        lost, *waiting = bench.publish("lost", -1, 2, 3)
        deadline = time.monotonic() + 10
        while worker.drain.is_healthy() is None and time.monotonic() < deadline:
            os.sched_yield()
        assert worker.drain.is_healthy() == "the device is lost: cuda:0: an illegal access"
        while any(bench.job_record(job).is_claimed for job in waiting) and time.monotonic() < deadline:
            os.sched_yield()
        assert not any(bench.job_record(job).is_claimed for job in waiting)
        assert [job.job_id for job in worker.journal.jobs] == [lost]
    finally:
        worker.drain.stop(0.0)


class SlowDepths(MemoryBroker):
    """A broker that takes its time to count, once `is_slow` is set, until `may_go` is."""

    def __init__(self, of: MemoryBroker) -> None:
        super().__init__()
        self._state, self._changed = of._state, of._changed
        self.is_slow, self.has_begun, self.may_go = threading.Event(), threading.Event(), threading.Event()

    def depths(self, slot: str) -> list[Depth]:
        if self.is_slow.is_set():
            self.has_begun.set()
            self.may_go.wait(10)
        return super().depths(slot)


def test_a_worker_that_has_stopped_is_not_reported_any_more(bench: Bench, models_root: Path, ledger: Path):
    """A report that was under way when the drain wound up does not outlive it."""
    write_recorder(models_root, ledger)
    worker = bench.employ(connect=SlowDepths)
    broker = worker.broker
    assert isinstance(broker, SlowDepths)
    broker.is_slow.set()
    worker.drain.start()
    assert broker.has_begun.wait(10), "a report is under way"
    stopping = threading.Thread(target=worker.drain.stop, args=(1.0,))
    stopping.start()
    wait_until(lambda: "drain" not in [each.name for each in threading.enumerate()], 10, "the drain has wound up")
    broker.may_go.set()
    stopping.join(10)
    assert bench.broker.workers() == []
