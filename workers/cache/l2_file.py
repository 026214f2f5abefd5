"""The SQLite file of the cache on disk: opening, connections, transactions, its bound, and what becomes of a bad file.

    L2File.read   any thread; one connection of a pool for each call
    L2File.write  one thread at a time; a transaction, which other processes see as a whole

    file is damaged, or not ours --> moved aside as NAME.aside (one such file is kept), logged; a new file is begun
    file holds plain values, and values are to be encrypted --> removed, logged; a new file is begun

Several processes use one file. A process must not open this file by other means than SQLite: closing any descriptor of
a file drops all POSIX locks that the process has on it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from penstock.registry.errors import ConfigurationError

__all__ = ["MIN_BYTES", "PAGE_BYTES", "L2File", "Row", "count_removed", "evict", "is_damage"]

logger = logging.getLogger("penstock.cache")

T = TypeVar("T")
Row = tuple[Any, ...]
"""A row as SQLite returns it. In a damaged file any column can have any type."""

MIN_BYTES: Final = 4 << 20
"""The smallest bound: below it the write-ahead log would leave little room for entries."""
PAGE_BYTES: Final = 8192
"""Four to five entries of 1.5 kB each fill a page nearly whole."""
_APPLICATION_ID: Final = 0x504E4C32  # "PNL2"
_FORMAT: Final = 2
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
_SHARED_MEMORY_BYTES: Final = 128 << 10
_CACHE_KIB: Final = 64 << 10
"""Pages that one connection keeps in memory."""
_LOCK_LOOK_S: Final = 0.005
_LOOK_S: Final = 1.0
"""How often a process looks whether the file is still the one that it has open."""
_DAMAGE: Final = frozenset(
    (
        sqlite3.SQLITE_ERROR,  # a table or column is not there: the schema was changed
        sqlite3.SQLITE_INTERNAL,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_FORMAT,
        sqlite3.SQLITE_SCHEMA,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_TOOBIG,
    )
)
_PRIMARY: Final = 0xFF
"""The part of a result code of SQLite that names the class of the error."""
# Entries lie in the order in which they were stored: a batch fills few pages, and the oldest ones leave as whole pages.
# A table in the order of the names costs three times the CPU per put. `name` is an integer: integers are compared
# faster than blobs. The index over (name, grp) lets `forget` read no entry. `stored` and `expires` are copies of the
# times in `front`, for the index and for counts: they decide when an entry is removed, never whether it is served.
_SCHEMA: Final = (
    "CREATE TABLE entries (id INTEGER PRIMARY KEY, stored INTEGER NOT NULL, expires INTEGER NOT NULL,"
    " grp INTEGER NOT NULL, name INTEGER NOT NULL, bound BLOB NOT NULL, front BLOB NOT NULL, data BLOB NOT NULL)",
    "CREATE UNIQUE INDEX by_name ON entries (name, grp)",
    "CREATE INDEX by_expiry ON entries (expires)",
    "CREATE TABLE groups (grp INTEGER PRIMARY KEY, name TEXT NOT NULL)",
    "CREATE TABLE totals (is_sealed INTEGER NOT NULL, entries INTEGER NOT NULL)",
    f"PRAGMA application_id = {_APPLICATION_ID}",
    f"PRAGMA user_version = {_FORMAT}",
)


class _Foreign(sqlite3.DatabaseError):
    """A sound file of another program, or of another format."""


class _OtherMode(sqlite3.DatabaseError):
    """A file of plain values where values are to be encrypted, or the other way round."""


def is_damage(error: Exception) -> bool:
    """Whether the error says that the content of the file is wrong, not that it cannot be reached now."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, _Foreign) if code is None else (code & _PRIMARY) in _DAMAGE


class L2File:
    """The file at `path`, made if it is missing (mode 0600; its folder, if missing, 0700).

    max_bytes: of the file with its write-ahead log, at least MIN_BYTES. is_sealed: whether values are encrypted; None:
    as in the file, which must exist, and is neither made nor replaced. read_wait_s, write_wait_s: how long a call waits
    for a lock of another process. clock: monotonic seconds.
    Raises ConfigurationError for a place where others could read or replace the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        is_sealed: bool | None,
        read_wait_s: float,
        write_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path: Final = path
        reserve = max_bytes // 16
        self.max_value_bytes: Final = reserve // 2
        """A larger value could make the write-ahead log exceed its share."""
        self._wal_bytes = reserve
        self._max_pages = (max_bytes - reserve - _SHARED_MEMORY_BYTES) // PAGE_BYTES
        self._checkpoint_pages = max(4, min(8 << 20, reserve // 4) // PAGE_BYTES)
        self._is_sealed = bool(is_sealed)
        self._keeps_file = is_sealed is None
        self._read_wait_s = read_wait_s
        self._write_wait_s = write_wait_s
        self._clock = clock
        self._look_at = 0.0
        self._writer: sqlite3.Connection | None = None
        self._writing = threading.Lock()
        self._idle: deque[sqlite3.Cursor] = deque()
        self._identity: tuple[int, int] | None = None
        self._has_opened = False
        self._is_closed = False
        _prepare_place(path)

    @property
    def is_sealed(self) -> bool:
        """Whether the values are encrypted; known after the first call that read or wrote."""
        return self._is_sealed

    @property
    def nbytes(self) -> int:
        """The bytes of the file with its write-ahead log on disk."""
        return _size(self.path) + _size(self._beside("-wal")) + _size(self._beside("-shm"))

    def read(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        """The rows of one query. Raises sqlite3.Error or OSError."""
        if (now := self._clock()) >= self._look_at:
            self._look_at = now + _LOOK_S
            self._look()
        idle = self._idle
        try:
            cursor = idle.pop()
        except IndexError:
            cursor = self._reader()
        try:
            rows = cursor.execute(sql, parameters).fetchall()
        except BaseException:
            cursor.connection.close()
            raise
        if idle is self._idle and not self._is_closed:
            idle.append(cursor)
        else:
            cursor.connection.close()
        return rows

    def write(self, work: Callable[[sqlite3.Cursor], T], *, nbytes: int = 0, waits: bool = True) -> T:
        """Run `work` in one transaction that adds about `nbytes`.

        waits: False: fail at once if another thread of this process writes. Raises sqlite3.Error or OSError.
        """
        if not self._writing.acquire(timeout=self._write_wait_s if waits else 0):
            raise sqlite3.OperationalError("another thread writes")
        try:
            self._look()
            connection = self._writer
            if connection is None or self._identity is None:
                connection = self._open_writer()
            self._shorten_log(connection, nbytes)
            return _transaction(connection, work)
        finally:
            self._writing.release()

    def pages_to_free(self, cursor: sqlite3.Cursor, nbytes: int) -> int:
        """How many pages must leave, inside a transaction, before `nbytes` may be added; at most 0: none."""
        count, free = _page_counts(cursor)
        # Pages of the two indices change too, and the last page of entries is seldom full.
        needed = nbytes * 9 // (PAGE_BYTES * 8) + 16
        return count - free + needed - self._max_pages

    def trim(self, cursor: sqlite3.Cursor) -> None:
        """Give unused pages back to the disk, inside a transaction, if there are many; some at a time."""
        count, free = _page_counts(cursor)
        excess = max(count - self._max_pages, free - (count - free) // 2 - self._checkpoint_pages)
        if excess > 0:
            self._vacuum(cursor, excess)

    def compact(self) -> None:
        """Give all unused pages back to the disk, in several transactions. Raises sqlite3.Error or OSError."""
        while self.write(self._vacuum_some):
            pass

    def _vacuum_some(self, cursor: sqlite3.Cursor) -> bool:
        self._vacuum(cursor, self._checkpoint_pages)
        return _page_counts(cursor)[1] > 0

    def _vacuum(self, cursor: sqlite3.Cursor, count: int) -> None:
        cursor.execute(f"PRAGMA incremental_vacuum({min(count, self._checkpoint_pages)})").fetchall()

    def begin_anew(self, error: Exception) -> None:
        """Move the damaged file aside, unless another process has done so, and let the next call begin a new one.

        Raises OSError, also when another process is at work on the file.
        """
        with self._writing:
            self._drop_readers()
            self._drop_writer()
            with self._locked(fcntl.LOCK_EX):
                if self._identity is not None and _identity(self.path) == self._identity:
                    self._move_aside(error)
            self._identity = None

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        with self._writing:
            self._identity = None
            self._drop_readers()
            self._drop_writer()

    def _look(self) -> None:
        """Leave a file that was moved away or removed by another process."""
        if self._identity is not None and _identity(self.path) != self._identity:
            self._identity = None
            self._drop_readers()

    def _drop_readers(self) -> None:
        idle, self._idle = self._idle, deque()
        for cursor in idle:
            cursor.connection.close()

    def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _reader(self) -> sqlite3.Cursor:
        if self._identity is None:
            with self._writing:
                if self._identity is None:
                    self._open_writer()
        with self._locked(fcntl.LOCK_SH):
            return self._connected(self._read_wait_s, _set_up_reader).cursor()

    def _open_writer(self) -> sqlite3.Connection:
        if self._is_closed:
            raise sqlite3.OperationalError("the cache is closed")
        self._drop_writer()
        with self._locked(fcntl.LOCK_EX):
            for _ in range(2):
                if not self._keeps_file:
                    _prepare_file(self.path)
                try:
                    connection = self._connected(self._write_wait_s, self._set_up)
                    break
                except _OtherMode:
                    self._replace_other_mode()
                except sqlite3.Error as error:
                    if self._keeps_file or not is_damage(error):
                        raise
                    self._move_aside(error)
            else:
                raise sqlite3.OperationalError("a new file cannot be begun")
            self._identity = _identity(self.path)
        self._has_opened = True
        self._writer = connection
        self._shrink(connection)
        return connection

    def _connected(self, wait_s: float, set_up: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"file:{quote(os.fspath(self.path))}?mode=rw",
            uri=True,
            timeout=wait_s,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            # Names of groups are the only text, and damage can make text of anything.
            connection.text_factory = bytes
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max(self.max_value_bytes * 2, 1 << 20))
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            # Sealed values may stay in free pages; plain ones are overwritten.
            connection.execute(f"PRAGMA secure_delete = {'OFF' if self._is_sealed else 'ON'}")
            set_up(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _set_up(self, connection: sqlite3.Connection) -> None:
        ((application,),) = connection.execute("PRAGMA application_id")
        ((version,),) = connection.execute("PRAGMA user_version")
        if _size(self.path) == 0 and not self._keeps_file:
            self._create(connection)
        elif (application, version) != (_APPLICATION_ID, _FORMAT):
            raise _Foreign("the file has another format")
        ((is_sealed,),) = connection.execute("SELECT is_sealed FROM totals LIMIT 1").fetchall() or [(None,)]
        if is_sealed not in (0, 1):
            raise _Foreign("the file has another format")
        if self._keeps_file:
            self._is_sealed = bool(is_sealed)
        if is_sealed != self._is_sealed:
            raise _OtherMode("the file has another mode")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {self._checkpoint_pages}")
        connection.execute(f"PRAGMA journal_size_limit = {self._checkpoint_pages * PAGE_BYTES}")
        connection.execute(f"PRAGMA max_page_count = {self._max_pages}")

    def _create(self, connection: sqlite3.Connection) -> None:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")

        def create(cursor: sqlite3.Cursor) -> None:
            for statement in _SCHEMA:
                cursor.execute(statement)
            cursor.execute("INSERT INTO totals VALUES (?, 0)", (int(self._is_sealed),))

        _transaction(connection, create)

    def _shrink(self, connection: sqlite3.Connection) -> None:
        """Make a file that was larger under an earlier max_bytes fit."""
        ((count,),) = connection.execute("PRAGMA page_count")
        while count > self._max_pages:
            before = count
            _transaction(connection, self._shrink_some)
            self._shorten_log(connection, 0)
            ((count,),) = connection.execute("PRAGMA page_count")
            if count >= before:
                raise sqlite3.OperationalError("the file cannot be made smaller")
        connection.execute(f"PRAGMA max_page_count = {self._max_pages}")

    def _shrink_some(self, cursor: sqlite3.Cursor) -> None:
        _, free = _page_counts(cursor)
        while free < self._checkpoint_pages and evict(cursor, 64):
            _, free = _page_counts(cursor)
        self._vacuum(cursor, self._checkpoint_pages)

    def _shorten_log(self, connection: sqlite3.Connection, nbytes: int) -> None:
        log = self._beside("-wal")
        if _size(log) + nbytes * 5 // 4 <= self._wal_bytes:
            return
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        if _size(log) + nbytes * 5 // 4 > self._wal_bytes:
            raise sqlite3.OperationalError("a reader keeps the write-ahead log from being shortened")

    def _replace_other_mode(self) -> None:
        if self._is_sealed:
            logger.warning("the cache on disk held plain values and is removed: values are encrypted from now on")
        elif not self._has_opened:
            logger.warning("the cache on disk held encrypted values and is removed: there is no key for them")
        else:
            # Another worker encrypts: two workers that remove each other's file would never have one.
            raise sqlite3.OperationalError("another process encrypts this file")
        for path in (self.path, self._beside("-wal"), self._beside("-shm")):
            path.unlink(missing_ok=True)

    def _move_aside(self, error: Exception) -> None:
        aside = self.path.with_name(f"{self.path.name}.aside")
        extra = {"reason": str(error), "file": aside.name}
        if aside.exists():
            logger.error("the cache on disk is unusable; it replaces the one that was moved aside before", extra=extra)
        else:
            logger.error("the cache on disk is unusable and is moved aside; a new one is begun", extra=extra)
        with suppress(FileNotFoundError):
            os.replace(self.path, aside)
        with suppress(FileNotFoundError):
            os.replace(self._beside("-wal"), aside.with_name(f"{aside.name}-wal"))
        self._beside("-shm").unlink(missing_ok=True)

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Holds a lock against other processes while a connection is opened (shared) or files are replaced."""
        descriptor = os.open(self._beside("-lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            until = time.monotonic() + self._write_wait_s
            while True:
                try:
                    fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        raise
                time.sleep(_LOCK_LOOK_S)
            yield
        finally:
            os.close(descriptor)

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(f"{self.path.name}{suffix}")


def _set_up_reader(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA query_only = ON")
    # The log is opened here, under the lock, and never after the file has been moved.
    connection.execute("SELECT entries FROM totals").fetchone()


def evict(cursor: sqlite3.Cursor, count: int) -> int:
    """Remove the `count` entries that were stored first, inside a transaction; returns how many there were."""
    cursor.execute(
        "DELETE FROM entries WHERE id <= (SELECT max(id) FROM (SELECT id FROM entries ORDER BY id LIMIT ?))", (count,)
    )
    return count_removed(cursor)


def count_removed(cursor: sqlite3.Cursor) -> int:
    """The number of entries that the last statement removed, which leaves the total, too."""
    if cursor.rowcount:
        removed = cursor.rowcount
        cursor.execute("UPDATE totals SET entries = entries - ?", (removed,))
        return removed
    return 0


def _transaction(connection: sqlite3.Connection, work: Callable[[sqlite3.Cursor], T]) -> T:
    cursor = connection.cursor()
    cursor.execute("BEGIN IMMEDIATE")
    try:
        done = work(cursor)
        cursor.execute("COMMIT")
    except BaseException:
        # SQLite itself has rolled back after some errors, such as a full disk.
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                cursor.execute("ROLLBACK")
        raise
    return done


def _page_counts(cursor: sqlite3.Cursor) -> tuple[int, int]:
    ((count,),) = cursor.execute("PRAGMA page_count").fetchall()
    ((free,),) = cursor.execute("PRAGMA freelist_count").fetchall()
    return count, free


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        state = os.stat(path)
    except FileNotFoundError:
        return None
    return state.st_dev, state.st_ino


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _prepare_place(path: Path) -> None:
    """Make the folder, and refuse a place where others could read the entries or replace the file."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = path.parent.stat()
        found = path.lstat() if path.is_symlink() or path.exists() else None
    except OSError as error:
        raise ConfigurationError(f"The folder of the cache on disk cannot be used ({error.strerror})") from None
    if folder.st_uid not in (0, os.geteuid()) or folder.st_mode & _WRITABLE_BY_OTHERS:
        raise ConfigurationError(
            "Others may write to the folder of the cache on disk. Expected a folder that only this user may write to"
        )
    if found is None:
        return
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigurationError(f"{path.name} is a link, a folder or another user's. Expected a file of this user")


def _prepare_file(path: Path) -> None:
    """Make the file before SQLite does: its mode decides those of its log and its shared memory."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if path.lstat().st_mode & _OTHERS:
            path.chmod(0o600)
