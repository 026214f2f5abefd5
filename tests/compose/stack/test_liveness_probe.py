"""JournalProbe: the crash journal of a worker, while it runs and after its death."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.compose.stack.fleet import JournalProbe
from penstock.compose.stack.supervisor import Program, Supervisor, SupervisorTimeouts
from penstock.registry.broker.base import Delivery, Limits, Publication
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.queues import Priority, new_job_id
from penstock.registry.settings import Settings
from penstock.workers.process.crash_journal import journal_path
from tests.packages import write_package
from tests.servers import ROOT, RedisServer, let_pass, wait_until

LIMIT_S = 1.0
CONSUMER = "gpu0@test:1"
A_DAY_MS = 86_400_000
# The silence limit is ten minutes, so only the journal can cause a kill within this test.
TIMEOUTS = SupervisorTimeouts(silence_s=600, first_delay_s=600, longest_delay_s=600)
PROCESS = """
import ctypes, os, sys, threading, time
from pathlib import Path
from penstock.registry.broker.base import Held
from penstock.registry.queues import Priority
from penstock.workers.process import heartbeat
from penstock.workers.process.crash_journal import FileJournal, journal_path

home, consumer, slot, entry, fault, limit_s = sys.argv[1:]
journal = FileJournal(journal_path(Path(home), os.getpid()), consumer, 2)
beats = threading.Semaphore(0)
heartbeat.start(int(os.environ["PENSTOCK_HEARTBEAT_FD"]), beats.release)
jobs = [Held(slot, Priority.NORMAL, entry.encode(), slot + ".1")]
if fault == "works":
    while True:
        journal.begin(0, jobs, float(limit_s), time.monotonic())
        time.sleep(0.01)
        journal.touch(0, time.monotonic())
        journal.end(0)
journal.begin(0, jobs, float(limit_s), time.monotonic())
print("begun", flush=True)
if fault == "dies":
    os._exit(0)
if fault == "sleeps":
    time.sleep(3600)
if fault == "holds the GIL for a while":
    # The first beat is written before the second one is asked for.
    beats.acquire()
    beats.acquire()
    ctypes.PyDLL(None).sleep(4)
    print("ended", flush=True)
ctypes.PyDLL(None).sleep(3600)
"""


class SupervisedWorker:
    """A worker with a claimed job, under a supervisor with a JournalProbe."""

    def __init__(
        self,
        folder: Path,
        server: RedisServer,
        slot: str,
        fault: str,
        url: str = "",
        *,
        limit_s: float = LIMIT_S,
        timeouts: SupervisorTimeouts = TIMEOUTS,
    ) -> None:
        self.broker = RedisStreams.from_url(server.url)
        self.broker.prepare([slot])
        job = Publication(new_job_id(slot), Priority.NORMAL, b"sealed", "acme")
        self.broker.publish(slot, [job], Limits(100, 0, A_DAY_MS))
        self.broker.arm(CONSUMER, [slot], 1, 1000)
        (delivery,) = wait_until(self.broker.collect, 5, "the job is claimed")
        self.slot, self.home, self.output = slot, folder / "home", folder / "output"
        root = folder / "packages"
        root.mkdir(exist_ok=True)
        environ = {"PENSTOCK_HOME": str(self.home), "PENSTOCK_INFERENCE_REPO_ROOT": str(root)}
        settings = Settings.load(environ=environ, cwd=folder)
        entry = delivery.entry_id.decode()
        arguments = [sys.executable, "-c", PROCESS, str(self.home), CONSUMER, slot, entry, fault, str(limit_s)]
        environ = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
        self.probe = JournalProbe(settings, url or server.url)
        program = Program("gpu0", arguments, environ, beats=True, output=self.output, probe=self.probe)
        self.supervisor = Supervisor([program], timeouts)
        self.supervisor.start()
        self.pid: int = wait_until(self.supervisor.pids, 20, "the worker runs")["gpu0"]

    def wait_for_forward(self) -> None:
        """Returns when the forward has begun."""
        wait_until(lambda: self.output.exists() and self.output.read_text(), 30, "the forward begins")

    @property
    def is_gone(self) -> bool:
        """Whether the supervisor has noticed the worker's exit."""
        return not self.supervisor.pids()

    def take_over(self) -> list[Delivery]:
        """The job with its crashes, taken over by another consumer."""
        return self.broker.take_over("gpu1@test:1", self.slot, 0, 10)

    @property
    def is_reported(self) -> bool:
        """Whether the death is reported to the broker, and no journal is left."""
        return list((self.home / "running").iterdir()) == []

    def close(self) -> None:
        self.supervisor.stop()
        self.supervisor.stop()
        self.supervisor.close()
        self.broker.close()


@pytest.fixture
def workers() -> Iterator[list[SupervisedWorker]]:
    """The workers of the test, closed at its end."""
    opened: list[SupervisedWorker] = []
    yield opened
    for worker in opened:
        worker.close()


@pytest.mark.parametrize("fault", ["sleeps", "holds the GIL"])
def test_a_forward_that_hangs_is_killed_for_its_limit(
    fault: str,
    workers: list[SupervisedWorker],
    tmp_path: Path,
    shared_redis: RedisServer,
    slot: str,
    caplog: pytest.LogCaptureFixture,
):
    """A hung forward is killed, also while it holds the GIL, and its job is a suspect for the next worker."""
    workers.append(SupervisedWorker(tmp_path, shared_redis, slot, fault))
    workers[0].wait_for_forward()
    wait_until(lambda: workers[0].is_gone, 30, "the worker is killed")
    assert "gpu0 is killed: a forward took longer than its limit of 1 s" in caplog.text
    wait_until(lambda: workers[0].is_reported, 30, "its death is reported")
    assert [delivery.crashes for delivery in workers[0].take_over()] == [1]


@pytest.mark.parametrize("fault", ["dies", "is killed"])
def test_a_death_is_reported(
    fault: str, workers: list[SupervisedWorker], tmp_path: Path, shared_redis: RedisServer, slot: str
):
    """A death is reported before the lease of its job lapses, so that the job is a suspect."""
    workers.append(SupervisedWorker(tmp_path, shared_redis, slot, fault))
    workers[0].wait_for_forward()
    if fault == "is killed":
        os.kill(workers[0].pid, signal.SIGKILL)
    wait_until(lambda: workers[0].is_gone, 30, "the worker has ended")
    wait_until(lambda: workers[0].is_reported, 30, "its death is reported")
    assert [delivery.crashes for delivery in workers[0].take_over()] == [1]


def test_a_worker_whose_forwards_end_in_time_is_left_alone(
    workers: list[SupervisedWorker], tmp_path: Path, shared_redis: RedisServer, slot: str
):
    """A worker with short forwards, for longer than the limit of one: it is not killed, and its job is no suspect."""
    workers.append(SupervisedWorker(tmp_path, shared_redis, slot, "works"))
    worker = workers[0]
    path = journal_path(worker.home, worker.pid)
    wait_until(path.exists, 20, "the worker has a journal")
    let_pass(2 * LIMIT_S)
    assert worker.supervisor.pids() == {"gpu0": worker.pid}
    assert [delivery.crashes for delivery in worker.take_over()] == [0]


def test_a_silent_forward_has_the_limit_of_a_version_that_was_added_later(
    workers: list[SupervisedWorker], tmp_path: Path, shared_redis: RedisServer, slot: str
):
    """A forward that holds the GIL has the limit of its package, also of one that the supervisor did not start with.

    The silence limit of the start is one and a half seconds; the package allows ten minutes.
    """
    package = write_package(tmp_path / "packages", "slow", "def build(): ...")
    with (package / "model.yaml").open("a") as spec:
        spec.write("timeout_s: 600\n")
    short = SupervisorTimeouts(silence_s=1.5, first_delay_s=600, longest_delay_s=600)
    fault = "holds the GIL for a while"
    workers.append(SupervisedWorker(tmp_path, shared_redis, slot, fault, limit_s=600, timeouts=short))
    worker = workers[0]
    wait_until(lambda: worker.is_gone or "ended" in worker.output.read_text(), 60, "the forward ends")
    assert worker.supervisor.pids() == {"gpu0": worker.pid}


def test_a_broker_that_is_away_neither_stops_the_supervisor_nor_loses_the_death(
    workers: list[SupervisedWorker],
    tmp_path: Path,
    shared_redis: RedisServer,
    slot: str,
    caplog: pytest.LogCaptureFixture,
):
    """A failed report is a line of the log, and the journal stays for the next report."""
    workers.append(SupervisedWorker(tmp_path, shared_redis, slot, "dies", url=f"unix://{tmp_path}/absent"))
    worker = workers[0]
    wait_until(lambda: "the death of a worker is not reported yet" in caplog.text, 20, "the report fails")
    assert not worker.is_reported
    again = JournalProbe(Settings.load(environ={"PENSTOCK_HOME": str(worker.home)}, cwd=tmp_path), shared_redis.url)
    again.on_exit()
    wait_until(lambda: worker.is_reported, 5, "its death is reported")
    assert [delivery.crashes for delivery in worker.take_over()] == [1]
