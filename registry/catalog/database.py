"""A URL -> transactions on the registry's database, which the first use makes and upgrades.

    Database.reading: one consistent view         Database.writing: one atomic change

SQLite writers exclude each other (BEGIN IMMEDIATE); PostgreSQL writers lock the row of their model. Each transaction
has a connection of its own: transactions are rare, and no connection survives a fork or a restart of the server.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from sqlalchemy import Connection, Engine, column, create_engine, event, inspect, select, table, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.pool import NullPool

from penstock.registry.catalog.tables import SCHEMA_TABLE
from penstock.registry.errors import ConfigurationError, RegistryUnavailable, TransitionConflict

__all__ = ["REVISION", "Database"]

REVISION: Final = "0006"
"""The schema that this code reads and writes: the head of registry/catalog/migrations."""

_LOCK_WAIT_S: Final = 30
_CONNECT_TIMEOUT_S: Final = 5
_UPGRADE_LOCK: Final = 0x50454E53
"""The advisory lock of PostgreSQL that the maker of the schema holds."""
_EXPECTED: Final = "Expected sqlite:///FILE or postgresql://USER@HOST/DATABASE"
_DRIVERS: Final = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
_STATES: Final = {
    "55P03": f"another process has held its lock for {_LOCK_WAIT_S} s",
    "57P01": "the server closed the connection",
    "57P03": "the server is starting or stopping",
    "53300": "the server has too many connections",
    "42501": "its user lacks the permission",
}
_SAID: Final = re.compile(
    r"Connection refused|No such file or directory|(database|role) \"[\w-]{1,64}\" does not exist|"
    r"password authentication failed|Name or service not known|timeout expired",
)
"""The messages of libpq for failed connections, which have no SQLSTATE."""


class Database:
    """The registry's database. Connects with the first transaction. Raises ConfigurationError for an unusable URL."""

    def __init__(self, url: str) -> None:
        self._url = _parse(url)
        self._is_ready = False

    @property
    def exists(self) -> bool:
        """False for a database file that the first transaction will make."""
        return not self._is_sqlite or Path(self._url.database or "").exists()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A read-only transaction on one state of the database. Raises RegistryUnavailable."""
        self._prepare()
        with _translated(), self._connect(is_writing=False) as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that is committed at the end of the block, and undone by an exception.

        Raises RegistryUnavailable, and TransitionConflict when a constraint of the database forbids the change.
        """
        self._prepare()
        with _translated(), self._connect(is_writing=True) as connection:
            yield connection

    @contextmanager
    def _connect(self, *, is_writing: bool) -> Iterator[Connection]:
        options: dict[str, Any] = {"is_writing": is_writing}
        if not is_writing and not self._is_sqlite:
            options["isolation_level"] = "REPEATABLE READ"
        with self._engine.connect().execution_options(**options) as connection, connection.begin():
            yield connection

    def _prepare(self) -> None:
        if self._is_ready:
            return
        if self._is_sqlite:
            _make_file(Path(self._url.database or ""))
        with _translated():
            with self._connect(is_writing=False) as connection:
                is_current = _is_current(connection)
            if not is_current:
                self._upgrade()
        self._is_ready = True

    def _upgrade(self) -> None:
        with self._connect(is_writing=True) as connection:
            if not self._is_sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
            # Another process may have made the schema while this one waited for the lock.
            if not _is_current(connection):
                _migrate(connection)

    @property
    def _is_sqlite(self) -> bool:
        return self._url.get_backend_name() == "sqlite"

    @cached_property
    def _engine(self) -> Engine:
        if self._is_sqlite:
            engine = create_engine(self._url, poolclass=NullPool, connect_args={"timeout": _LOCK_WAIT_S})
            event.listen(engine, "connect", _configure_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
            return engine
        # The server ends the transactions of a frozen client, and of a client that waits too long for a lock.
        limits = f"-c lock_timeout={_LOCK_WAIT_S}s -c idle_in_transaction_session_timeout={_LOCK_WAIT_S // 2}s"
        return create_engine(
            self._url,
            poolclass=NullPool,
            connect_args={"connect_timeout": _CONNECT_TIMEOUT_S, "options": _joined(self._url.query, limits)},
        )


def _parse(url: str) -> URL:
    """The parsed URL. Messages never show it: it may hold a password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigurationError(f"The registry's URL cannot be parsed. {_EXPECTED}") from None
    driver = _DRIVERS.get(parsed.drivername)
    if driver is None:
        raise ConfigurationError(f"The registry's URL begins with {parsed.drivername[:40]!r}. {_EXPECTED}")
    if driver == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise ConfigurationError(f"The registry's URL names no file. {_EXPECTED}")
    if driver != "sqlite":
        _require_psycopg()
    return parsed.set(drivername=driver)


def _require_psycopg() -> None:
    try:
        import psycopg  # noqa: F401 - SQLAlchemy loads it by name
    except ImportError:
        raise ConfigurationError("The registry's URL needs psycopg. Expected penstock[postgres] installed") from None


def _joined(query: Mapping[str, Any], options: str) -> str:
    return f"{query.get('options', '')} {options}".strip()


def _make_file(path: Path) -> None:
    """Makes an empty database in WAL mode that only this user may read (mode 0600), in one atomic step.

    Two processes that both switched a new file to WAL mode would collide.
    """
    if path.exists():
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            partial = Path(folder) / path.name
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            connection = sqlite3.connect(partial)
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
            connection.close()
            # If another process was faster, its file is the same.
            with suppress(FileExistsError):
                os.link(partial, path)
    except (OSError, sqlite3.Error):
        raise ConfigurationError(
            f"The registry's file {path.name} cannot be made. Expected a writable folder"
        ) from None


def _configure_sqlite(connection: Any, _: object) -> None:
    # A committed promotion must survive a power cut: workers may know of it.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _begin_sqlite(connection: Connection) -> None:
    # The driver would begin the transaction late, and only before changes.
    is_writing = connection.get_execution_options().get("is_writing", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writing else "BEGIN")


def _is_current(connection: Connection) -> bool:
    """Whether the schema is that of this code. Raises ConfigurationError for a newer one."""
    if not inspect(connection).has_table(SCHEMA_TABLE):
        return False
    revision: str = connection.execute(select(column("version_num")).select_from(table(SCHEMA_TABLE))).scalar_one()
    if revision > REVISION:
        raise ConfigurationError(
            f"The registry's database has schema {revision!r:.40}, which a newer Penstock made. Expected {REVISION}"
        )
    return revision == REVISION


def _migrate(connection: Connection) -> None:
    # Alembic is slow to import, and only a new database needs it.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "penstock.registry.catalog:migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise TransitionConflict("The registry's database forbids this change: another one came first") from None
    except DBAPIError as error:
        raise RegistryUnavailable(f"The registry's database cannot be used ({_cause(error)})") from None


def _cause(error: DBAPIError) -> str:
    """The cause in words of the driver or our own, without addresses, users and statements."""
    if isinstance(error.orig, sqlite3.Error):
        return str(error.orig)
    state: str | None = getattr(error.orig, "sqlstate", None)
    if state:
        return _STATES.get(state, state)
    said = _SAID.search(str(error.orig))
    # The name is part of the URL, which is not shown.
    return re.sub(' "[^"]*"', "", said.group()) if said else "no connection"
