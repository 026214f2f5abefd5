"""The batches of one gateway process: look for open ones, run those that no other process runs, end them.

    index -- once a second, and after each new batch --> open batches -- lock free --> check --> BatchRun --> ended
                                                                         lock taken: another process runs it

The lock of a batch is that of its output file. The kernel ends it with its process, also at kill -9, so that another
process goes on at its next look. A batch that is cancelled in one process is stopped by the one that runs it.
One that no process runs yet ends without waiting for a place among the batches that run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from msgspec.structs import replace

from penstock.producers.gateway.batches.batch_run import BatchRun, Endpoint, Resume, StopCode, WriteError
from penstock.producers.gateway.batches.block_file import FileBusy, FileDamaged
from penstock.producers.gateway.batches.file_store import FileStore, NotFound
from penstock.producers.gateway.batches.journal import Journal
from penstock.producers.gateway.batches.lines import Line, check, read_lines
from penstock.producers.gateway.batches.records import ENDED, Batch, BatchError, BatchErrors, BatchStatus, StoredBatch
from penstock.producers.gateway.fleet import GatewayClient
from penstock.registry.errors import PenstockError

__all__ = ["BatchRunner", "RunOptions"]

_LOOK_EVERY_S: Final = 1.0
_MOST_AT_ONCE: Final = 4
"""Batches that one process runs at a time; further ones wait for a process. As many may be ended beside them."""
_RETRY_S: Final = 30.0
_BUSY_S: Final = 5.0
_DELETE_EVERY: Final = 60
"""Looks from one deletion of expired files to the next."""
_MOST_OPEN: Final = 64
"""Batches of this process, with those that wait for limits. Each holds some files open."""
logger = logging.getLogger("penstock.server")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """find: the endpoint of a URL; None: no batch may have it. resume: has the present task act for the caller of a
    batch, by the id of its key and its tenant. max_line_bytes: of one line."""

    find: Callable[[str], Endpoint | None]
    resume: Resume
    write_error: WriteError
    max_outstanding: int
    max_line_bytes: int


class BatchRunner:
    """Runs batches of all tenants until it is closed. clock: Unix time in seconds."""

    def __init__(
        self, store: FileStore, client: GatewayClient, options: RunOptions, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._client = client
        self._options = options
        self._clock = clock
        self._wake = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ending: set[str] = set()
        """Those that were begun to be ended: no line of them is submitted."""
        self._runs: dict[str, BatchRun] = {}
        """Those of the running batches whose lines are being run."""
        self._retry_at: dict[str, float] = {}
        """When a batch that could not go on is tried again."""
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to look for batches, in the running loop."""
        self._looking = asyncio.get_running_loop().create_task(self._look_always())

    def wake(self) -> None:
        """Looks now: there is a new batch."""
        self._wake.set()

    async def aclose(self) -> None:
        """Leaves the batches to other processes, or to a later one. Their jobs go on."""
        tasks = [task for task in (self._looking, *self._running.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_always(self) -> None:
        looks = 0
        while True:
            try:
                await self._look(deletes=looks % _DELETE_EVERY == 0)
            except (PenstockError, OSError) as error:
                logger.warning("the stored files cannot be read: %s", error)
            looks += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._wake.wait()
            self._wake.clear()

    async def _look(self, *, deletes: bool) -> None:
        if not self._store.exists:
            return
        if deletes:
            await asyncio.to_thread(self._store.delete_expired)
        for stored in await asyncio.to_thread(self._store.open_batches):
            batch_id = stored.batch.id
            is_due = self._retry_at.get(batch_id, 0.0) <= asyncio.get_running_loop().time()
            if not is_due or batch_id in self._running:
                continue
            if self._stop_code(stored) is not None:
                if len(self._ending) >= _MOST_AT_ONCE:
                    continue
                self._ending.add(batch_id)
            elif not self._has_place:
                continue
            task = asyncio.get_running_loop().create_task(self._run(stored), name=batch_id)
            self._running[batch_id] = task
            task.add_done_callback(self._end)

    @property
    def _has_place(self) -> bool:
        """Whether another batch may run. Those that wait for the limits of their keys take no place of the others."""
        waiting = sum(run.waiting_groups > 0 for run in self._runs.values())
        running = len(self._running) - len(self._ending)
        return running - waiting < _MOST_AT_ONCE and running < _MOST_OPEN

    def _stop_code(self, stored: StoredBatch) -> StopCode | None:
        """Why no more lines of an open batch are submitted."""
        if stored.batch.status == "cancelling":
            return "batch_cancelled"
        return "batch_expired" if self._clock() >= stored.batch.expires_at else None

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task.get_name(), None)
        self._ending.discard(task.get_name())
        if not task.cancelled() and (error := task.exception()) is not None:
            # It stays open: a full disk or a missing key may be mended.
            self._retry_at[task.get_name()] = task.get_loop().time() + _RETRY_S
            logger.error("a batch cannot go on", exc_info=error, extra={"batch": task.get_name()})

    async def _run(self, stored: StoredBatch) -> None:
        try:
            journal = await asyncio.to_thread(Journal, self._store, stored)
        except FileBusy:
            # Another process runs it. Until the next look at it there is a place for a later batch.
            self._retry_at[stored.batch.id] = asyncio.get_running_loop().time() + _BUSY_S
            return
        with journal:
            # Another process may have ended it before the lock was free.
            stored = await asyncio.to_thread(self._store.batch, stored.tenant, stored.batch.id)
            if stored.batch.status in ENDED:
                return
            try:
                total, errors = await asyncio.to_thread(check, self._lines(stored))
            except (FileDamaged, NotFound) as error:
                total, errors = 0, (BatchError("invalid_file", str(error)),)
            if errors:
                await asyncio.to_thread(self._fail, stored, errors)
            else:
                await self._run_lines(stored, journal, total)

    async def _run_lines(self, stored: StoredBatch, journal: Journal, total: int) -> None:
        endpoint = self._options.find(stored.batch.endpoint)
        if endpoint is None:
            error = BatchError("invalid_endpoint", "No such endpoint. Expected one of the documentation")
            await asyncio.to_thread(self._fail, stored, (error,))
            return
        run = BatchRun(
            self._client,
            stored.batch.id,
            stored.batch.created_at,
            partial(self._options.resume, stored.key_id, stored.tenant),
            stored.batch.endpoint,
            endpoint,
            self._options.write_error,
            journal,
            self._options.max_outstanding,
            dict(stored.rounds),
            partial(self._keep_rounds, stored, journal),
            self._stop_code(stored),
            has_begun=stored.batch.in_progress_at is not None,
        )
        self._runs[stored.batch.id] = run
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch(stored, run, journal, total))
                await run.run(self._lines(stored))
                watch.cancel()
        finally:
            del self._runs[stored.batch.id]
        await asyncio.to_thread(self._finish, stored, journal, total, run.stopped)

    async def _keep_rounds(self, stored: StoredBatch, journal: Journal, rounds: Mapping[int, int]) -> None:
        def keep(before: StoredBatch) -> StoredBatch:
            kept = {number: each for number, each in before.rounds.items() if number not in journal.done}
            return replace(before, rounds={**kept, **rounds})

        await asyncio.to_thread(self._store.change_batch, stored.tenant, stored.batch.id, keep)

    async def _watch(self, stored: StoredBatch, run: BatchRun, journal: Journal, total: int) -> None:
        """Writes the progress down, and stops a run that is cancelled or whose time is over."""
        while True:
            counts, now = journal.counts(total), int(self._clock())

            def note(before: StoredBatch, counts: object = counts, now: int = now) -> StoredBatch:
                batch = before.batch
                if batch.status in ENDED:
                    # A watch that was cancelled may still write in its thread. The end has the last counts.
                    return before
                status: BatchStatus = "in_progress" if batch.status == "validating" else batch.status
                begun = batch.in_progress_at or now
                return _changed(before, status=status, in_progress_at=begun, request_counts=counts)

            latest = await asyncio.to_thread(self._store.change_batch, stored.tenant, stored.batch.id, note)
            code = self._stop_code(latest)
            if code is not None and run.stopped is None:
                await run.stop(code)
            await asyncio.sleep(_LOOK_EVERY_S)

    def _finish(self, stored: StoredBatch, journal: Journal, total: int, stopped: StopCode | None) -> None:
        journal.sync()
        counts, now = journal.counts(total), int(self._clock())

        def finish(before: StoredBatch) -> StoredBatch:
            before = replace(before, rounds={})
            ended = {"request_counts": counts, "finalizing_at": now}
            if stopped == "batch_expired":
                return _changed(before, status="expired", expired_at=now, **ended)
            if stopped == "batch_cancelled" or before.batch.status == "cancelling":
                return _changed(before, status="cancelled", cancelled_at=now, **ended)
            return _changed(before, status="completed", completed_at=now, **ended)

        self._store.end_batch(stored.tenant, stored.batch.id, finish, *journal.sizes)

    def _fail(self, stored: StoredBatch, errors: tuple[BatchError, ...]) -> None:
        now = int(self._clock())

        def fail(before: StoredBatch) -> StoredBatch:
            return _changed(before, status="failed", failed_at=now, errors=BatchErrors(errors))

        self._store.end_batch(stored.tenant, stored.batch.id, fail, 0, 0)

    def _lines(self, stored: StoredBatch) -> Iterator[Line]:
        file = self._store.file(stored.tenant, stored.batch.input_file_id)
        return read_lines(self._store.content(file), self._options.max_line_bytes)


def _changed(stored: StoredBatch, **fields: object) -> StoredBatch:
    batch: Batch = replace(stored.batch, **fields)
    return replace(stored, batch=batch)
