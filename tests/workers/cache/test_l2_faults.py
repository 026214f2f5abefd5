"""The cache on disk when the disk is full, the file is damaged, foreign or locked: misses, and no wrong answer."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from penstock.safety.cache_entry import EntryKey
from penstock.workers.cache.l2 import L2Cache, L2CacheConfig
from penstock.workers.cache.tier import Put
from tests.servers import ROOT, leave_out, require
from tests.workers.cache.l2_files import KEY, Clock, cache_at, disk_bytes, run_sql

FLIPS = 1000


def value_of(number: int) -> bytes:
    """The only value that is ever stored under this number; of several sizes, some larger than a page."""
    return number.to_bytes(8, "little") * (1 + number * 37 % 2000)


KEYS = [EntryKey("version", n.to_bytes(16, "little")) for n in range(120)]


def fill(cache: L2Cache) -> None:
    stored = cache.put_many([Put(key, value_of(n), 3600) for n, key in enumerate(KEYS)])
    assert stored == len(KEYS)


def hits(cache: L2Cache) -> int:
    """How many entries are found, each with its own value."""
    found = cache.get_many(KEYS)
    assert all(each is None or each.value == value_of(n) for n, each in enumerate(found))
    return len(KEYS) - found.count(None)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder that syncs nothing to a disk, where there is one."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, prefix="penstock-test-") as folder:
        yield Path(folder)


@contextmanager
def write_lock(file: Path) -> Iterator[None]:
    """Another process holds the lock for writing."""
    program = (
        "import sqlite3, sys\n"
        "connection = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "connection.execute('BEGIN IMMEDIATE')\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        yield


def test_a_locked_file_costs_one_error_and_no_answer(tmp_path: Path):
    """While another process holds the lock for writing, entries are read; a write fails, and the next ones are
    skipped until the pause is over."""
    clock = Clock()
    with cache_at(tmp_path, monotonic=clock, write_wait_ms=5) as cache:
        fill(cache)
        with write_lock(tmp_path / "cache.db"):
            assert not cache.put("key", b"value")
            assert not cache.put("key", b"value")
            stats = cache.stats
            assert (stats.errors, stats.skipped) == (1, 1)
            assert hits(cache) == len(KEYS)
        assert not cache.put("key", b"value")
        clock.now += 1.0
        assert cache.put("key", b"value")
        assert cache.stats.errors == 1


def test_pauses_double_up_to_a_minute(tmp_path: Path):
    """Each failure in a row doubles the pause; a success ends it."""
    clock = Clock()
    with cache_at(tmp_path, monotonic=clock, write_wait_ms=1) as cache:
        with write_lock(tmp_path / "cache.db"):
            for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
                assert not cache.put("key", b"value")
                clock.now += pause_s - 0.25
                errors = cache.stats.errors
                assert not cache.put("key", b"value")
                assert cache.stats.errors == errors
                clock.now += 0.25
        assert cache.put("key", b"value")
        with write_lock(tmp_path / "cache.db"):
            assert not cache.put("key", b"value")
        clock.now += 1.0
        assert cache.put("key", b"value")


FULL_DISK = """
import os, sys
from pathlib import Path
from tests.workers.cache.test_l2_faults import KEYS, Clock, cache_at, fill, hits
from penstock.workers.cache.tier import Put

folder, clock = Path(sys.argv[1]), Clock()
with cache_at(folder, monotonic=clock) as cache:
    fill(cache)
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    large = [Put(key, os.urandom(20_000), 3600) for key in KEYS[60:]]
    stored = cache.put_many(large)
    assert stored < len(large), stored
    assert cache.stats.errors == 1
    kept = [n for n, found in enumerate(cache.get_many(KEYS[:60])) if found is not None]
    assert kept == list(range(60)), kept
    ballast.unlink()
    clock.now += 1
    assert cache.put_many(large) == len(large)
    assert cache.stats.errors == 1
    assert all(found is not None and found.value == put.value for found, put in zip(cache.get_many(KEYS[60:]), large))
print("served")
"""


def test_a_full_disk_leaves_the_stored_entries(tmp_path: Path):
    """On a full tmpfs puts fail and are counted, entries are served, and puts succeed when there is room again."""
    script = 'mount -t tmpfs -o size=4m,mode=700 tmpfs "$1" || exit 99; exec "$2" -c "$3" "$1"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, FULL_DISK]
    require(shutil.which("unshare"), "unshare on PATH")
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode == 99 or ended.stderr.startswith("unshare:"):
        leave_out("this machine mounts no disk in a namespace")
    assert ended.stdout == "served\n", ended.stderr


def test_a_start_on_a_full_disk_is_no_error(tmp_path: Path):
    """Where no byte can be written the cache starts, finds nothing, counts errors, and works once there is room."""
    program = """
import resource, signal, sys
from pathlib import Path
from tests.workers.cache.test_l2_faults import Clock, cache_at
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
clock = Clock()
with cache_at(Path(sys.argv[1]), monotonic=clock) as cache:
    assert cache.get("key") is None
    assert not cache.put("key", b"value")
    assert cache.stats.errors >= 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    clock.now += 1
    assert cache.put("key", b"value")
    clock.now += 1
    assert cache.get("key") == b"value"
print("served")
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout == "served\n", ended.stderr


@pytest.mark.parametrize(
    "content", [b"no database at all" * 1000, b"SQLite format 3\0" + os.urandom(8176), b"x", b"\xff" * 65536]
)
def test_a_file_that_is_no_database_is_moved_aside(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture):
    """It is kept under another name, the log says so, and a new file serves."""
    (tmp_path / "cache.db").write_bytes(content)
    with cache_at(tmp_path) as cache:
        assert cache.put("key", b"value")
        assert cache.get("key") == b"value"
    assert (tmp_path / "cache.db.aside").read_bytes() == content
    assert "is moved aside; a new one is begun" in caplog.text


@pytest.mark.parametrize(
    "statement", ["PRAGMA user_version = 99", "PRAGMA application_id = 7", "DROP TABLE totals", "DELETE FROM totals"]
)
def test_a_file_of_another_format_is_moved_aside(tmp_path: Path, statement: str):
    """A database of another program or of another format is kept under another name, and not changed."""
    with cache_at(tmp_path) as cache:
        fill(cache)
    run_sql(tmp_path / "cache.db", statement)
    with cache_at(tmp_path) as cache:
        assert hits(cache) == 0
        fill(cache)
        assert hits(cache) == len(KEYS)
    assert run_sql(tmp_path / "cache.db.aside", "SELECT count(*) FROM entries") == [(len(KEYS),)]


def test_only_one_file_is_kept_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A second bad file takes the place of the first one, so that the disk does not fill; the log says so."""
    for content in (b"first", b"second"):
        (tmp_path / "cache.db").write_bytes(content * 1000)
        with cache_at(tmp_path) as cache:
            assert cache.put("key", b"value")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.db", "cache.db-lock", "cache.db.aside"]
    assert "replaces the one that was moved aside before" in caplog.text


def test_damage_under_a_running_cache_begins_a_new_file(tmp_path: Path):
    """Pages are overwritten while the file is in use: no wrong answer; after the pause a new file serves."""
    clock = Clock()
    with cache_at(tmp_path, monotonic=clock) as cache:
        fill(cache)
        run_sql(tmp_path / "cache.db", "PRAGMA wal_checkpoint(TRUNCATE)")
        with (tmp_path / "cache.db").open("r+b") as file:
            file.seek(8192)
            file.write(os.urandom((tmp_path / "cache.db").stat().st_size - 8192))
        with closing(L2Cache(L2CacheConfig(db_path=tmp_path / "cache.db", encryption_key=KEY))) as fresh:
            hits(fresh)
        assert (tmp_path / "cache.db.aside").is_file()
        clock.now += 2
        hits(cache)
        clock.now += 2
        fill(cache)
        assert hits(cache) == len(KEYS)


@pytest.mark.parametrize(
    "kept", [0.0, 0.5, 0.999, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.1, 0.9))]
)
@pytest.mark.parametrize("name", ["cache.db", "cache.db-wal"])
def test_a_truncated_file_gives_no_wrong_answer(tmp_path: Path, name: str, kept: float):
    """After a loss of the end of the file, or of its log, entries are right or missing, and the cache works."""
    clock = Clock()
    folder = copy_of_a_killed_cache(tmp_path)
    os.truncate(folder / name, int((folder / name).stat().st_size * kept))
    with cache_at(folder, monotonic=clock) as cache:
        hits(cache)
        clock.now += 5
        fill(cache)
        clock.now += 5
        assert hits(cache) == len(KEYS)


@pytest.mark.parametrize("encryption_key", [KEY, None], ids=["sealed", "plain"])
@pytest.mark.parametrize("copies", [60, pytest.param(FLIPS // 2, marks=pytest.mark.slow)])
def test_flipped_bits_give_no_wrong_answer(in_memory: Path, encryption_key: bytes | None, copies: int):
    """In many copies, 1,000 in all, one to three bits of the file, its log or the sealed values flip: every value that
    is served is right, no call raises, and the cache can be written again."""
    source = copy_of_a_killed_cache(in_memory, encryption_key)
    originals = {path.name: path.read_bytes() for path in source.iterdir() if path.name != "cache.db-shm"}
    rnd, served, refused, moved = random.Random(14), 0, 0, 0
    for turn in range(copies):
        folder = in_memory / str(turn)
        folder.mkdir()
        for name, content in originals.items():
            changed = bytearray(content)
            if name != "cache.db-lock" and rnd.random() < 0.7:
                for _ in range(rnd.randint(1, 3)):
                    # Half of the flips hit the first pages: the header, the schema, the roots of the trees.
                    end = len(changed) if rnd.random() < 0.5 else min(len(changed), 6 * 8192)
                    changed[rnd.randrange(end)] ^= 1 << rnd.randrange(8)
            (folder / name).write_bytes(changed)
        clock = Clock()
        with cache_at(folder, monotonic=clock, encryption_key=encryption_key) as cache:
            served += hits(cache)
            refused += cache.stats.refused
            clock.now += 5
            cache.put_many([Put(key, value_of(n), 3600) for n, key in enumerate(KEYS)])
            hits(cache)
            clock.now += 5
            cache.forget("version")
            clock.now += 5
            cache.clear()
        moved += (folder / "cache.db.aside").exists()
        shutil.rmtree(folder)
    assert served > copies * len(KEYS) // 10
    assert refused > 0
    assert moved > 0


def test_a_killed_writer_loses_no_stored_entry(tmp_path: Path):
    """After kill -9 of a process that has just stored entries, they are all there."""
    with cache_at(copy_of_a_killed_cache(tmp_path)) as cache:
        assert hits(cache) == len(KEYS)
        assert cache.stats.entries == len(KEYS)


def copy_of_a_killed_cache(folder: Path, encryption_key: bytes | None = KEY) -> Path:
    """The files of a cache whose process was killed after its writes: half of the entries are in the log only."""
    source = folder / "killed"
    program = """
import os, signal, sys
from pathlib import Path
from tests.workers.cache.test_l2_faults import KEYS, cache_at, value_of
from penstock.workers.cache.tier import Put
key = bytes.fromhex(sys.argv[2]) or None
puts = [Put(key, value_of(n), 3600 * 24 * 3650) for n, key in enumerate(KEYS)]
with cache_at(Path(sys.argv[1]), encryption_key=key) as cache:
    assert cache.put_many(puts[:60]) == 60
with cache_at(Path(sys.argv[1]), encryption_key=key) as cache:
    assert cache.put_many(puts[60:]) == 60
    os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", program, str(source), (encryption_key or b"").hex()]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    assert (source / "cache.db-wal").stat().st_size > 0
    return source


def test_damage_is_told_apart_from_trouble(tmp_path: Path):
    """A file that cannot be reached now stays where it is."""
    clock = Clock()
    with cache_at(tmp_path, monotonic=clock) as cache:
        fill(cache)
        (tmp_path / "cache.db").rename(tmp_path / "away.db")
        (tmp_path / "cache.db").mkdir()
        clock.now += 2
        assert hits(cache) == 0
        assert cache.stats.errors > 0
        (tmp_path / "cache.db").rmdir()
        (tmp_path / "away.db").rename(tmp_path / "cache.db")
        clock.now += 2
        assert hits(cache) == len(KEYS)
    assert not (tmp_path / "cache.db.aside").exists()
    assert sqlite3.connect(tmp_path / "cache.db").execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_reader_that_does_not_end_makes_the_log_no_larger(tmp_path: Path):
    """A transaction that keeps the log from being shortened costs puts, not the bound of the file."""
    clock, most = Clock(), 4 << 20
    with cache_at(tmp_path, monotonic=clock, max_bytes=most, write_wait_ms=1) as cache:
        fill(cache)
        with closing(sqlite3.connect(tmp_path / "cache.db", isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM entries").fetchone()
            for _ in range(200):
                cache.put("key", os.urandom(20_000))
                assert disk_bytes(tmp_path) <= most
            assert cache.stats.errors == 1
            assert hits(cache) == len(KEYS)
        clock.now += 2
        assert cache.put("key", b"value")
