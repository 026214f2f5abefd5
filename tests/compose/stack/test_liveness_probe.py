"""The supervisor's second pair of eyes: a worker's journal, while it runs and after its death."""

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
from tests.servers import ROOT, RedisServer, let_pass, wait_until

LIMIT_S = 1.0
CONSUMER = "gpu0@test:1"
A_DAY_MS = 86_400_000
# A supervisor that acts within this test has read the journal: a silent process has ten minutes.
PATIENCE = SupervisorTimeouts(silence_s=600, first_delay_s=600, longest_delay_s=600)
PROCESS = """
import ctypes, os, sys, time
from pathlib import Path
from penstock.registry.broker.base import Held
from penstock.registry.queues import Priority
from penstock.workers.process import heartbeat
from penstock.workers.process.crash_journal import FileJournal, journal_path

home, consumer, slot, entry, fault, limit_s = sys.argv[1:]
journal = FileJournal(journal_path(Path(home), os.getpid()), consumer, 2)
heartbeat.start(int(os.environ["PENSTOCK_HEARTBEAT_FD"]), lambda: None)
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
ctypes.PyDLL(None).sleep(3600)
"""


class Scene:
    """A job that is claimed by a worker, which a supervisor with a witness runs."""

    def __init__(self, folder: Path, server: RedisServer, slot: str, fault: str, url: str = "") -> None:
        self.broker = RedisStreams.from_url(server.url)
        self.broker.prepare([slot])
        job = Publication(new_job_id(slot), Priority.NORMAL, b"sealed", "acme")
        self.broker.publish(slot, [job], Limits(100, 0, A_DAY_MS))
        self.broker.arm(CONSUMER, [slot], 1, 1000)
        (delivery,) = wait_until(self.broker.collect, 5, "the job is claimed")
        self.slot, self.home, self.output = slot, folder / "home", folder / "output"
        settings = Settings.load(environ={"PENSTOCK_HOME": str(self.home)}, cwd=folder)
        entry, limit_s = delivery.entry_id.decode(), str(LIMIT_S)
        arguments = [sys.executable, "-c", PROCESS, str(self.home), CONSUMER, slot, entry, fault, limit_s]
        environ = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
        self.probe = JournalProbe(settings, url or server.url)
        program = Program("gpu0", arguments, environ, beats=True, output=self.output, probe=self.probe)
        self.supervisor = Supervisor([program], PATIENCE)
        self.supervisor.start()
        self.pid: int = wait_until(self.supervisor.pids, 20, "the worker runs")["gpu0"]

    def wait_for_forward(self) -> None:
        """Returns when the forward has begun."""
        wait_until(lambda: self.output.exists() and self.output.read_text(), 30, "the forward begins")

    @property
    def is_gone(self) -> bool:
        """Whether the supervisor has seen the worker's end."""
        return not self.supervisor.pids()

    def suspicions(self) -> list[Delivery]:
        """The job, taken over by somebody else, with its crashes."""
        return self.broker.take_over("gpu1@test:1", self.slot, 0, 10)

    @property
    def is_reported(self) -> bool:
        """Whether nothing is left to tell the broker."""
        return list((self.home / "running").iterdir()) == []

    def close(self) -> None:
        self.supervisor.stop()
        self.supervisor.stop()
        self.supervisor.close()
        self.broker.close()


@pytest.fixture
def scenes() -> Iterator[list[Scene]]:
    """The scenes of the test; closed at its end."""
    opened: list[Scene] = []
    yield opened
    for scene in opened:
        scene.close()


@pytest.mark.parametrize("fault", ["sleeps", "holds the GIL"])
def test_a_forward_that_hangs_is_killed_for_its_limit(
    fault: str,
    scenes: list[Scene],
    tmp_path: Path,
    shared_redis: RedisServer,
    slot: str,
    caplog: pytest.LogCaptureFixture,
):
    """Also one in which no other thread of the process runs; the job that it ran is a suspect for whoever is next."""
    scenes.append(Scene(tmp_path, shared_redis, slot, fault))
    scenes[0].wait_for_forward()
    wait_until(lambda: scenes[0].is_gone, 30, "the worker is killed")
    assert "gpu0 is killed: a forward took longer than its limit of 1 s" in caplog.text
    wait_until(lambda: scenes[0].is_reported, 30, "its death is reported")
    assert [delivery.crashes for delivery in scenes[0].suspicions()] == [1]


@pytest.mark.parametrize("fault", ["dies", "is killed"])
def test_a_death_is_reported(fault: str, scenes: list[Scene], tmp_path: Path, shared_redis: RedisServer, slot: str):
    """The supervisor reports it when it sees the end of the process, whatever the lease of its job says."""
    scenes.append(Scene(tmp_path, shared_redis, slot, fault))
    scenes[0].wait_for_forward()
    if fault == "is killed":
        os.kill(scenes[0].pid, signal.SIGKILL)
    wait_until(lambda: scenes[0].is_gone, 30, "the worker is gone")
    wait_until(lambda: scenes[0].is_reported, 30, "its death is reported")
    assert [delivery.crashes for delivery in scenes[0].suspicions()] == [1]


def test_a_worker_whose_forwards_end_in_time_is_left_alone(
    scenes: list[Scene], tmp_path: Path, shared_redis: RedisServer, slot: str
):
    """A hundred forwards a second, for longer than the limit of one: nobody is killed, nobody is a suspect."""
    scenes.append(Scene(tmp_path, shared_redis, slot, "works"))
    scene = scenes[0]
    path = journal_path(scene.home, scene.pid)
    wait_until(path.exists, 20, "the worker has a journal")
    let_pass(2 * LIMIT_S)
    assert scene.supervisor.pids() == {"gpu0": scene.pid}
    assert [delivery.crashes for delivery in scene.suspicions()] == [0]


def test_a_broker_that_is_away_neither_stops_the_supervisor_nor_loses_the_death(
    scenes: list[Scene], tmp_path: Path, shared_redis: RedisServer, slot: str, caplog: pytest.LogCaptureFixture
):
    """The report fails in a line of the log; the journal waits for the next one who looks."""
    scenes.append(Scene(tmp_path, shared_redis, slot, "dies", url=f"unix://{tmp_path}/nobody"))
    scene = scenes[0]
    wait_until(lambda: "death is not reported yet" in caplog.text, 20, "the report fails")
    assert not scene.is_reported
    again = JournalProbe(Settings.load(environ={"PENSTOCK_HOME": str(scene.home)}, cwd=tmp_path), shared_redis.url)
    again.ended()
    wait_until(lambda: scene.is_reported, 5, "its death is reported")
    assert [delivery.crashes for delivery in scene.suspicions()] == [1]
