"""The crash journal: what its readers conclude about a living process and about a dead one."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.registry.broker.base import Held, Limits, Publication
from penstock.registry.broker.incidents import timeout_incident
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.queues import Priority, new_job_id
from penstock.workers.levels.decision_log import DecisionKey, DecisionLog
from penstock.workers.process.crash_journal import MARGIN_S, FileJournal, hung, journal_path, report_crashes
from tests.servers import ROOT, RedisServer, wait_until

A_DAY_MS = 86_400_000


def held(count: int, slot: str = "mlp") -> list[Held]:
    return [Held(slot, Priority.HIGH, f"{number + 1}-0".encode(), f"{slot}.{number}") for number in range(count)]


def reported(home: Path, broker: MemoryBroker | RedisStreams) -> int:
    """The jobs that `report_crashes` counts, with the deaths noted in the decision log of the same home."""
    return report_crashes(home, broker, A_DAY_MS, DecisionLog(home).note_death)


def one_of(slot: str, number: int) -> Held:
    """The job that a process of `start` calls `<slot>=<number>-0`."""
    return Held(slot, Priority.HIGH, f"{number}-0".encode(), f"{slot}.{number}-0")


class Suspicions(MemoryBroker):
    """A broker that records reported crashes, and is away for the first `away` calls."""

    def __init__(self, away: int = 0) -> None:
        super().__init__()
        self.away = away
        self.told: list[tuple[str, list[Held], str]] = []

    def suspect(self, slot: str, jobs: Sequence[Held], incident: str, ttl_ms: int) -> None:
        if self.away:
            self.away -= 1
            raise BrokerUnavailable("The broker does not answer")
        self.told.append((slot, list(jobs), incident))


WORKER = """
import os, sys, time
from pathlib import Path
from penstock.registry.broker.base import Held
from penstock.registry.queues import Priority
from penstock.workers.process.crash_journal import FileJournal, FormInUse, journal_path

home, consumer, fault = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
journal = FileJournal(journal_path(home, os.getpid()), consumer, 3)
jobs = [Held(slot, Priority.HIGH, entry.encode(), slot + "." + entry) for slot, entry in
        (pair.split("=") for pair in sys.argv[4:])]
form = FormInUse("mlp", "ab" * 32, "compiled") if fault == "run compiled" else None
journal.begin(0, jobs[:2], 30.0, time.monotonic(), form)
journal.begin(1, jobs[2:], 30.0, time.monotonic())
journal.begin(2, jobs, 30.0, time.monotonic())
journal.end(2)
if fault == "retire":
    journal.retire()
print("up", flush=True)
time.sleep(600)
"""


class Process:
    """A worker process that runs forwards and nothing else."""

    def __init__(self, home: Path, *jobs: str, fault: str = "run", consumer: str = "gpu0@test:1") -> None:
        command = [sys.executable, "-c", WORKER, str(home), consumer, fault, *jobs]
        self._child = subprocess.Popen(command, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
        assert self._child.stdout is not None
        assert self._child.stdout.readline() == b"up\n"
        self.path = journal_path(home, self._child.pid)

    def kill(self) -> None:
        """kill -9, and wait for its end."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGKILL)
            self._child.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts worker processes, and kills those that are left."""
    started: list[Process] = []

    def start(*jobs: str, fault: str = "run", consumer: str = "gpu0@test:1") -> Process:
        started.append(Process(tmp_path, *jobs, fault=fault, consumer=consumer))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where this process would have its journal."""
    return journal_path(tmp_path, os.getpid())


# While its process lives


def test_a_journal_has_the_name_of_its_machine_and_process(tmp_path: Path):
    """A supervisor finds it by these, and several machines may share a home."""
    assert journal_path(tmp_path, 77) == tmp_path / "running" / f"{socket.gethostname()}-77.journal"


def test_a_forward_is_hung_when_it_is_over_its_limit_and_the_margin(path: Path):
    """The limit counts from the beginning or the last progress, on every seat, until the forward ends."""
    journal = FileJournal(path, "gpu0@test:1", 2)
    assert hung(path, 1e9) is None
    journal.begin(1, held(3), 30.0, 1000.0)
    assert hung(path, 1030.0 + MARGIN_S) is None
    assert hung(path, 1030.1 + MARGIN_S) == "a forward took longer than its limit of 30 s"
    journal.touch(1, 1020.0)
    assert hung(path, 1050.0 + MARGIN_S) is None
    assert hung(path, 1050.1 + MARGIN_S) is not None
    journal.end(1)
    assert hung(path, 1e9) is None


def test_a_run_without_a_limit_never_hangs(path: Path):
    """The prepare thread has no limit: the journal holds its jobs in case of a crash only."""
    FileJournal(path, "gpu0@test:1", 1).begin(0, held(1), float("inf"), 0.0)
    assert hung(path, 1e9) is None


def test_a_worker_that_shows_progress_never_looks_hung_meanwhile(path: Path):
    """The supervisor may read at any moment, also during a touch: a wrong result would kill a healthy worker."""
    writer = subprocess.Popen(
        [sys.executable, "-c", _BUSY_WRITER, str(path)], env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"up\n"
        looks = [hung(path, time.monotonic()) for _ in range(50_000)]
        assert set(looks) == {None}
    finally:
        writer.kill()
        writer.communicate()


_BUSY_WRITER = """
import sys, time
from pathlib import Path
from penstock.registry.broker.base import Held
from penstock.registry.queues import Priority
from penstock.workers.process.crash_journal import FileJournal

journal = FileJournal(Path(sys.argv[1]), "gpu0@test:1", 1)
jobs = [Held("mlp", Priority.HIGH, b"1-0", "mlp.0")]
print("up", flush=True)
while True:
    journal.begin(0, jobs, 30.0, time.monotonic())
    for _ in range(1000):
        journal.touch(0, time.monotonic())
    journal.end(0)
"""


def test_the_disk_has_room_for_the_whole_journal_from_the_start(path: Path):
    """On a full disk a worker does not start, and says so. It must not die of a signal during a batch."""
    journal = FileJournal(path, "gpu0@test:1", 2)
    found = path.stat()
    assert found.st_blocks * 512 >= found.st_size > 500_000
    assert found.st_mode & 0o777 == 0o600
    journal.retire()


def test_of_more_jobs_than_a_seat_holds_the_first_are_kept(path: Path, tmp_path: Path):
    """Of a batch of ten thousand jobs the journal keeps the first ones; the next seat is untouched."""
    journal = FileJournal(path, "gpu0@test:1", 2)
    journal.begin(1, held(3, "other"), 30.0, 0.0)
    journal.begin(0, held(10_000), 30.0, 0.0)
    broker = Suspicions()
    copy_of_the_dead(path, tmp_path / "dead")
    reported(tmp_path / "dead", broker)
    (_, kept, _), (slot, others, _) = broker.told
    assert kept == held(10_000)[: len(kept)]
    assert len(kept) >= 2000
    assert (slot, others) == ("other", held(3, "other"))


def copy_of_the_dead(path: Path, home: Path) -> Path:
    """The journal as a dead process leaves it, in another home."""
    copy = journal_path(home, 1)
    copy.parent.mkdir(parents=True)
    copy.write_bytes(path.read_bytes())
    return copy


def test_a_living_process_is_not_reported(start: Callable[..., Process], tmp_path: Path):
    """Its forwards run as they should."""
    process = start("mlp=1-0")
    broker = Suspicions()
    assert reported(tmp_path, broker) == 0
    assert broker.told == []
    assert process.path.exists()


def test_a_journal_that_another_process_holds_cannot_be_taken(start: Callable[..., Process]):
    """Of two processes with the same file on a shared home the second is refused; the first one's jobs stay."""
    process = start("mlp=1-0")
    before = process.path.read_bytes()
    with pytest.raises(BlockingIOError):
        FileJournal(process.path, "gpu0@test:2", 1, patience_s=0.1)
    assert process.path.read_bytes() == before


def test_a_journal_waits_for_the_reporter_of_an_older_one(path: Path):
    """A pid comes again while the older journal is being reported: the new journal is made afterwards, and is not
    removed with the older one.
    """
    path.parent.mkdir()
    old = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(old, fcntl.LOCK_EX)
    made: list[FileJournal] = []
    thread = threading.Thread(target=lambda: made.append(FileJournal(path, "gpu0@test:2", 1)))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive(), "it waits"
    path.unlink()
    os.close(old)
    thread.join(60)
    made[0].begin(0, held(1), 30.0, 0.0)
    assert hung(path, 1e9) is not None


def test_a_closed_journal_can_be_opened_again(path: Path):
    """A worker that failed to start gives its journal back: the same process may open another at once."""
    FileJournal(path, "gpu0@test:1", 1).close()
    assert not path.exists()
    again = FileJournal(path, "gpu0@test:2", 1, patience_s=0.0)
    again.begin(0, held(1), 30.0, 0.0)
    assert hung(path, 1e9) is not None
    again.close()


# After its death


def test_the_jobs_of_a_killed_process_are_reported_once(start: Callable[..., Process], tmp_path: Path):
    """After kill -9: the jobs of every seat that had not ended, by model, under the consumer's name, and only once."""
    process = start("mlp=1-0", "mlp=2-0", "other=3-0")
    process.kill()
    broker = Suspicions()
    assert reported(tmp_path, broker) == 3
    assert broker.told == [
        ("mlp", [one_of("mlp", 1), one_of("mlp", 2)], "gpu0@test:1"),
        ("other", [one_of("other", 3)], "gpu0@test:1"),
    ]
    assert reported(tmp_path, broker) == 0
    assert len(broker.told) == 2
    assert not process.path.exists()


def test_two_reporters_at_once_count_one_death(
    start: Callable[..., Process], tmp_path: Path, shared_redis: RedisServer, slot: str
):
    """A supervisor and the next worker report at the same time: the broker counts one crash for the job."""
    with_broker = RedisStreams.from_url(shared_redis.url)
    with_broker.prepare([slot])
    job = Publication(new_job_id(slot), Priority.HIGH, b"sealed", "acme")
    with_broker.publish(slot, [job], Limits(100, 0, A_DAY_MS))
    with_broker.arm("gpu0@test:1", [slot], 1, 1000)
    (delivery,) = wait_until(with_broker.collect, 5, "the job is claimed")
    process = start(f"{slot}={delivery.entry_id.decode()}")
    process.kill()
    brokers = [RedisStreams.from_url(shared_redis.url) for _ in range(4)]
    gate = threading.Barrier(len(brokers))
    counts: list[int] = []

    def report_at_once(broker: RedisStreams) -> None:
        gate.wait()
        counts.append(reported(tmp_path, broker))

    threads = [threading.Thread(target=report_at_once, args=(broker,)) for broker in brokers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(counts) == [0, 0, 0, 1]
    (again,) = with_broker.take_over("gpu1@test:1", slot, 0, 10)
    assert (again.crashes, again.attempt) == (1, 2)
    for broker in (*brokers, with_broker):
        broker.close()


@pytest.mark.parametrize("fault", ["run", "run compiled"])
def test_the_form_that_ran_is_noted(start: Callable[..., Process], tmp_path: Path, fault: str):
    """Once per death, in the decision log: a form that kills its process is refused by it."""
    key = DecisionKey("mlp", "1", "ab" * 32, "any machine")
    for deaths in (1, 2, 3):
        start("mlp=1-0", "mlp=2-0", fault=fault).kill()
        for _ in range(2):
            reported(tmp_path, Suspicions())
        known = DecisionLog(tmp_path).earlier(key)
        assert ("compiled" in known) == (deaths == 3 and fault == "run compiled")
    assert DecisionLog(tmp_path).earlier(replace(key, content_hash="cd" * 32)) == {}


def test_a_death_that_cannot_be_noted_counts_all_the_same(start: Callable[..., Process], tmp_path: Path):
    """The jobs are suspects also when the form cannot be written down."""
    (tmp_path / "decisions").write_text("in the way")
    process = start("mlp=1-0", "mlp=2-0", fault="run compiled")
    process.kill()
    assert reported(tmp_path, Suspicions()) == 2
    assert not process.path.exists()


def test_while_the_broker_is_away_a_death_is_kept(start: Callable[..., Process], tmp_path: Path):
    """The error is raised, the journal stays, and the next call reports it."""
    process = start("mlp=1-0", "mlp=2-0", "other=3-0")
    process.kill()
    broker = Suspicions(away=1)
    with pytest.raises(BrokerUnavailable):
        reported(tmp_path, broker)
    assert process.path.exists()
    assert reported(tmp_path, broker) == 3


def test_a_retired_journal_makes_no_suspects(start: Callable[..., Process], tmp_path: Path):
    """A worker is asked to stop and then killed in its forward: its jobs are not suspects."""
    process = start("mlp=1-0", fault="retire")
    assert not process.path.exists()
    process.kill()
    broker = Suspicions()
    assert reported(tmp_path, broker) == 0


@pytest.mark.parametrize("by", ["the worker", "the supervisor"])
def test_a_last_forward_over_its_limit_is_reported_as_a_time_out(by: str, path: Path, tmp_path: Path):
    """Whoever notes it: the jobs whose last forward it was are told apart from those of the other seats."""
    journal = FileJournal(path, "gpu0@test:1", 3)
    journal.begin(0, held(1, "waits"), float("inf"), 1000.0)
    journal.begin(1, held(2, "last"), 30.0, 1000.0, is_last=True)
    journal.begin(2, held(3, "other"), 30.0, 1000.0)
    if by == "the worker":
        journal.exceeded(1)
    else:
        assert hung(path, 1031.0) is not None
    broker = Suspicions()
    copy_of_the_dead(path, tmp_path / "dead")
    assert reported(tmp_path / "dead", broker) == 6
    assert broker.told == [
        ("last", held(2, "last"), timeout_incident("gpu0@test:1", 30.0)),
        ("other", held(3, "other"), "gpu0@test:1"),
        ("waits", held(1, "waits"), "gpu0@test:1"),
    ]


def test_a_forward_during_which_the_process_stood_still_is_not_noted(path: Path, tmp_path: Path):
    """Its worker says so before the supervisor looks: the process is killed, and the jobs are suspects only."""
    journal = FileJournal(path, "gpu0@test:1", 1)
    journal.begin(0, held(1), 30.0, 1000.0, is_last=True)
    journal.disturbed(0)
    assert hung(path, 1031.0) is not None
    broker = Suspicions()
    copy_of_the_dead(path, tmp_path / "first")
    reported(tmp_path / "first", broker)
    # The next forward on the seat is noted again.
    journal.begin(0, held(1), 30.0, 2000.0, is_last=True)
    assert hung(path, 2031.0) is not None
    copy_of_the_dead(path, tmp_path / "second")
    reported(tmp_path / "second", broker)
    assert [incident for _, _, incident in broker.told] == ["gpu0@test:1", timeout_incident("gpu0@test:1", 30.0)]


@pytest.mark.parametrize("what", ["progress", "another forward"])
def test_a_note_is_void_when_the_forward_went_on(what: str, path: Path, tmp_path: Path):
    """A supervisor noted a forward that moved at that very moment: its process is killed, and no job has timed out."""
    journal = FileJournal(path, "gpu0@test:1", 1)
    journal.begin(0, held(1), 30.0, 1000.0, is_last=True)
    assert hung(path, 1031.0) is not None
    if what == "progress":
        journal.touch(0, 1031.0)
    else:
        journal.begin(0, held(2), 30.0, 1031.0, is_last=True)
    broker = Suspicions()
    copy_of_the_dead(path, tmp_path / "dead")
    reported(tmp_path / "dead", broker)
    assert [incident for _, _, incident in broker.told] == ["gpu0@test:1"]


def test_the_journal_of_a_dead_process_does_not_make_a_living_one_look_hung(start: Callable[..., Process]):
    """A pid comes again, and the new process has not made its journal yet."""
    process = start("mlp=1-0")
    assert hung(process.path, time.monotonic() + 60) is not None
    process.kill()
    assert hung(process.path, time.monotonic() + 60) is None


def torn(whole: bytes, tmp_path: Path) -> dict[str, bytes]:
    """Files that are not a journal, or not a whole one."""
    jobs_at = 4096 + 32
    return {
        "empty": b"",
        "cut in the head": whole[:6],
        "cut in a seat": whole[: jobs_at + 5],
        "of another kind": b"\x7fELF" + whole[4:],
        "jobs overwritten": whole[:jobs_at] + b"\xc1" * 40 + whole[jobs_at + 40 :],
        "an endless seat": whole[:4112] + struct.pack("<Q", 1 << 62) + whole[4120:],
        "more seats than there are": whole[:4] + struct.pack("<H", 60_000) + whole[6:],
        "no such priority": whole.replace(b"\x94\xa3mlp\x01", b"\x94\xa3mlp\x63"),
    }


@pytest.mark.parametrize("damage", list(torn(b"", Path())))
def test_a_damaged_journal_is_dropped_and_the_others_are_reported(
    damage: str, start: Callable[..., Process], path: Path, tmp_path: Path
):
    """No damage makes a reporter fail or a worker look hung."""
    process = start("mlp=1-0")
    process.kill()
    journal = FileJournal(path, "gpu1@test:1", 2)
    journal.begin(0, held(2), 30.0, 0.0)
    wrong = path.with_name("a-first.journal")
    wrong.write_bytes(torn(path.read_bytes(), tmp_path)[damage])
    assert wrong.read_bytes() != path.read_bytes()
    assert hung(wrong, 1e9) is None
    broker = Suspicions()
    assert reported(tmp_path, broker) == 1
    assert [incident for _, _, incident in broker.told] == ["gpu0@test:1"]
    assert not wrong.exists()
    journal.retire()


def test_a_home_without_journals_reports_nothing(tmp_path: Path):
    """The first worker of a machine has none to report."""
    assert reported(tmp_path / "new", Suspicions()) == 0
