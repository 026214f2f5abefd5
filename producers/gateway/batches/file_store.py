"""Files and batches of all tenants in one folder (0700), which the gateway processes of a machine share.

    index.db (SQLite)   one row a file and a batch: id, tenant, and its record as JSON, sealed where the settings say so
    <file id>           its content: block_file.py

Index and contents lie together: no index survives its files, and no file its index. The calls block; gateways make
them on other threads. A file of another tenant does not exist for the caller.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from penstock.producers.gateway.batches.block_file import BlockWriter, read_blocks
from penstock.producers.gateway.batches.records import ENDED, File, Purpose, StoredBatch
from penstock.registry.envelope import BodyKeys
from penstock.registry.errors import BrokerUnavailable, ConfigurationError, PenstockError, Rejected

__all__ = ["FileStore", "NotFound", "StoreFull", "Upload", "keyed_id", "new_id"]

Record = TypeVar("Record", File, StoredBatch)
_LOCK_WAIT_S: Final = 30
_ORPHAN_S: Final = 86_400
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, purpose TEXT NOT NULL,
    nbytes INTEGER NOT NULL, expires_at INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, input TEXT NOT NULL,
    is_open INTEGER NOT NULL, record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS batches_open ON batches (is_open);
"""


class NotFound(Rejected):
    """There is no such file or batch, or it is another tenant's."""


class StoreFull(Rejected):
    """The stored files would take more bytes than the settings allow."""


def new_id(kind: str) -> str:
    """`file-` or `batch_` with 24 random hex digits."""
    return f"{kind}{secrets.token_hex(12)}"


def keyed_id(kind: str, tenant: str, key: str) -> str:
    """The same id for each request of a tenant with this idempotency key."""
    digest = hashlib.sha256(b"%d:%s%s" % (len(tenant.encode()), tenant.encode(), key.encode())).hexdigest()
    return f"{kind}{digest[:24]}"


class Upload:
    """A file that is being written. `FileStore.keep` puts it into the index; `discard` removes it."""

    def __init__(self, path: Path, keys: BodyKeys | None) -> None:
        self.id: Final = path.name
        self._path = path
        self._writer = BlockWriter(path, keys)

    @property
    def nbytes(self) -> int:
        """The plain bytes so far."""
        return self._writer.nbytes

    def append(self, part: bytes) -> None:
        """Writes a part of the content."""
        self._writer.append(part)

    def finish(self) -> None:
        """Waits until the disk has the content."""
        self._writer.sync()
        self._writer.close()

    def discard(self) -> None:
        """Removes what was written."""
        self._writer.close()
        self._path.unlink(missing_ok=True)


class FileStore:
    """The files and batches under a folder. keys: they seal contents and records; None: both are plain.

    max_bytes: of all contents together. keep_s: after how long files are deleted. clock: Unix time in seconds.
    """

    def __init__(
        self, folder: Path, keys: BodyKeys | None, *, max_bytes: int, keep_s: float, clock: Callable[[], float]
    ) -> None:
        self._folder = folder
        self._keys = keys
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._index = folder / "index.db"

    @property
    def exists(self) -> bool:
        """Whether a file was ever stored here."""
        return self._index.exists()

    @property
    def room(self) -> int:
        """The bytes that may still be stored."""
        with self._reading() as rows:
            (used,) = rows.execute("SELECT COALESCE(SUM(nbytes), 0) FROM files").fetchone()
        return self._max_bytes - int(used)

    def upload(self) -> Upload:
        """A new, empty file. Raises StoreFull and ConfigurationError."""
        if self.room <= 0:
            raise StoreFull(f"All files take over {self._max_bytes} bytes. Expected that some are deleted first")
        return Upload(self._folder / new_id("file-"), self._keys)

    def keep(self, upload: Upload, tenant: str, filename: str, purpose: Purpose, keep_s: float | None = None) -> File:
        """Puts a whole upload into the index. keep_s: a lifetime shorter than that of the store."""
        upload.finish()
        file = self._new_file(upload.id, upload.nbytes, filename, purpose, keep_s)
        with self._writing() as rows:
            self._insert_file(rows, tenant, file)
        return file

    def file(self, tenant: str, file_id: str) -> File:
        """One file. Raises NotFound."""
        with self._reading() as rows:
            return self._file(rows, tenant, file_id)

    def files(self, tenant: str, purpose: str | None, after: str | None, limit: int, *, newest: bool) -> list[File]:
        """At most `limit` files behind `after`, by the time of the upload. Raises NotFound for an unknown `after`."""
        where = {"tenant": tenant} if purpose is None else {"tenant": tenant, "purpose": purpose}
        with self._reading() as rows:
            return self._page(rows, "files", File, where, after, limit, newest=newest)

    def content(self, file: File) -> Iterator[bytes]:
        """The content in parts. Raises FileDamaged."""
        return read_blocks(self._folder / file.id, file.bytes, self._keys)

    def delete(self, tenant: str, file_id: str) -> bool:
        """Deletes a file; False: a batch that has not ended reads it. Raises NotFound."""
        with self._writing() as rows:
            self._file(rows, tenant, file_id)
            if rows.execute("SELECT 1 FROM batches WHERE is_open AND input = ?", (file_id,)).fetchone():
                return False
            rows.execute("DELETE FROM files WHERE id = ?", (file_id,))
        (self._folder / file_id).unlink(missing_ok=True)
        return True

    def delete_expired(self) -> int:
        """Deletes the files whose time is over, but those that an open batch reads; returns how many.

        It removes what killed uploads have left, too, a day after the last write.
        """
        with self._writing() as rows:
            found = rows.execute(
                "DELETE FROM files WHERE expires_at <= ? AND id NOT IN (SELECT input FROM batches WHERE is_open) "
                "RETURNING id",
                (int(self._clock()),),
            ).fetchall()
        for (file_id,) in found:
            (self._folder / file_id).unlink(missing_ok=True)
        self._remove_orphans()
        return len(found)

    def _remove_orphans(self) -> None:
        """Removes contents that neither the index nor an open batch names."""
        # The open batches first: the files of one that ends after that are in the index.
        known = {file_id for stored in self.open_batches() for file_id in (stored.output, stored.errors)}
        with self._reading() as rows:
            known |= {file_id for (file_id,) in rows.execute("SELECT id FROM files")}
        for path in self._folder.glob("file-*"):
            with suppress(FileNotFoundError):
                if path.name not in known and path.stat().st_mtime < self._clock() - _ORPHAN_S:
                    path.unlink()

    def add_batch(self, stored: StoredBatch) -> StoredBatch:
        """A new batch, or the earlier one with its id. Raises NotFound without its input file."""
        batch = stored.batch
        with self._writing() as rows:
            self._file(rows, stored.tenant, batch.input_file_id)
            rows.execute(
                "INSERT INTO batches (id, tenant, input, is_open, record) VALUES (?, ?, ?, 1, ?) "
                "ON CONFLICT (id) DO NOTHING",
                (batch.id, stored.tenant, batch.input_file_id, self._sealed(batch.id, stored)),
            )
            return self._batch(rows, stored.tenant, batch.id)

    def batch(self, tenant: str, batch_id: str) -> StoredBatch:
        """One batch. Raises NotFound."""
        with self._reading() as rows:
            return self._batch(rows, tenant, batch_id)

    def batches(self, tenant: str, after: str | None, limit: int) -> list[StoredBatch]:
        """At most `limit` batches behind `after`, the newest first. Raises NotFound for an unknown `after`."""
        with self._reading() as rows:
            return self._page(rows, "batches", StoredBatch, {"tenant": tenant}, after, limit, newest=True)

    def open_batches(self) -> list[StoredBatch]:
        """The batches of all tenants that have not ended, the oldest first."""
        with self._reading() as rows:
            found = rows.execute("SELECT id, record FROM batches WHERE is_open ORDER BY number").fetchall()
        return [self._opened(batch_id, sealed, StoredBatch) for batch_id, sealed in found]

    def change_batch(self, tenant: str, batch_id: str, change: Callable[[StoredBatch], StoredBatch]) -> StoredBatch:
        """Changes a batch in one transaction. `change` may raise, which changes nothing. Raises NotFound."""
        with self._writing() as rows:
            changed = change(self._batch(rows, tenant, batch_id))
            self._put_batch(rows, changed)
        return changed

    def end_batch(
        self,
        tenant: str,
        batch_id: str,
        change: Callable[[StoredBatch], StoredBatch],
        output_bytes: int,
        error_bytes: int,
    ) -> StoredBatch:
        """Ends a batch: its files, where they are not empty, and its end are there together."""
        with self._writing() as rows:
            stored = self._batch(rows, tenant, batch_id)
            ids: dict[str, str | None] = {}
            for field, file_id, nbytes, kind in (
                ("output_file_id", stored.output, output_bytes, "output"),
                ("error_file_id", stored.errors, error_bytes, "error"),
            ):
                ids[field] = file_id if nbytes else None
                if nbytes:
                    file = self._new_file(file_id, nbytes, f"{batch_id}_{kind}.jsonl", "batch_output", None)
                    self._insert_file(rows, tenant, file)
                else:
                    (self._folder / file_id).unlink(missing_ok=True)
            stored = change(replace(stored, batch=replace(stored.batch, **ids)))
            self._put_batch(rows, stored)
        return stored

    def journal(self, file_id: str) -> BlockWriter:
        """The writer of a file of a batch, which is in the index once the batch has ended. Raises FileBusy."""
        return BlockWriter(self._folder / file_id, self._keys)

    def _new_file(self, file_id: str, nbytes: int, filename: str, purpose: Purpose, keep_s: float | None) -> File:
        now = int(self._clock())
        expires_at = now + int(self._keep_s if keep_s is None else min(keep_s, self._keep_s))
        return File(id=file_id, bytes=nbytes, created_at=now, expires_at=expires_at, filename=filename, purpose=purpose)

    def _insert_file(self, rows: sqlite3.Connection, tenant: str, file: File) -> None:
        rows.execute(
            "INSERT INTO files (id, tenant, purpose, nbytes, expires_at, record) VALUES (?, ?, ?, ?, ?, ?)",
            (file.id, tenant, file.purpose, file.bytes, file.expires_at, self._sealed(file.id, file)),
        )

    def _put_batch(self, rows: sqlite3.Connection, stored: StoredBatch) -> None:
        batch = stored.batch
        rows.execute(
            "UPDATE batches SET is_open = ?, record = ? WHERE id = ?",
            (batch.status not in ENDED, self._sealed(batch.id, stored), batch.id),
        )

    def _file(self, rows: sqlite3.Connection, tenant: str, file_id: str) -> File:
        found = rows.execute("SELECT record FROM files WHERE id = ? AND tenant = ?", (file_id, tenant)).fetchone()
        if found is None:
            raise NotFound("There is no such file. Expected the id of a file that was uploaded and not deleted")
        return self._opened(file_id, found[0], File)

    def _batch(self, rows: sqlite3.Connection, tenant: str, batch_id: str) -> StoredBatch:
        found = rows.execute("SELECT record FROM batches WHERE id = ? AND tenant = ?", (batch_id, tenant)).fetchone()
        if found is None:
            raise NotFound("There is no such batch. Expected the id of a batch that was created here")
        return self._opened(batch_id, found[0], StoredBatch)

    def _page(
        self,
        rows: sqlite3.Connection,
        table: str,
        kind: type[Record],
        where: Mapping[str, str],
        after: str | None,
        limit: int,
        *,
        newest: bool,
    ) -> list[Record]:
        filters = " AND ".join(f"{name} = ?" for name in where)
        values: list[Any] = list(where.values())
        if after is not None:
            query = f"SELECT number FROM {table} WHERE id = ? AND {filters}"  # noqa: S608 - fixed words
            found = rows.execute(query, (after, *values)).fetchone()
            if found is None:
                raise NotFound("Bad after. Expected the id of one of the listed objects")
            filters += f" AND number {'<' if newest else '>'} ?"
            values += found
        order = "DESC" if newest else "ASC"
        query = f"SELECT id, record FROM {table} WHERE {filters} ORDER BY number {order} LIMIT ?"  # noqa: S608 - fixed words
        return [self._opened(row_id, sealed, kind) for row_id, sealed in rows.execute(query, (*values, limit))]

    def _sealed(self, row_id: str, record: File | StoredBatch) -> bytes:
        plain = msgspec.json.encode(record)
        return plain if self._keys is None else self._keys.seal(plain, row_id.encode())

    def _opened(self, row_id: str, sealed: bytes, kind: type[Record]) -> Record:
        try:
            plain = sealed if self._keys is None else self._keys.open(sealed, row_id.encode())
            return msgspec.json.decode(plain, type=kind)
        except (PenstockError, msgspec.MsgspecError, UnicodeDecodeError):
            raise ConfigurationError(
                "A record of the stored files cannot be read. Expected the same privacy settings and data keys as at "
                "its writing"
            ) from None

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._connected() as rows:
            yield rows

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._connected() as rows:
            rows.execute("BEGIN IMMEDIATE")
            try:
                yield rows
            except BaseException:
                rows.execute("ROLLBACK")
                raise
            rows.execute("COMMIT")

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection of its own: calls come from many threads, and are rare."""
        try:
            if not self.exists:
                self._make()
            with closing(sqlite3.connect(self._index, timeout=_LOCK_WAIT_S, isolation_level=None)) as rows:
                yield rows
        except sqlite3.OperationalError as error:
            raise BrokerUnavailable(f"The index of the stored files cannot be used ({error})") from None
        except (OSError, sqlite3.Error):
            raise ConfigurationError(
                "The stored files cannot be used. Expected a folder that this user can write"
            ) from None

    def _make(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = self._folder / f"index.{secrets.token_hex(4)}.partial"
        partial.touch(mode=0o600)
        try:
            with closing(sqlite3.connect(partial)) as rows:
                rows.execute("PRAGMA journal_mode = WAL").fetchone()
                rows.executescript(_SCHEMA)
            # If another process was faster, its index is the same.
            with suppress(FileExistsError):
                self._index.hardlink_to(partial)
        finally:
            partial.unlink(missing_ok=True)
