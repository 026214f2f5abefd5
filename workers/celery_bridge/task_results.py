"""Results of jobs that came through Celery's `send_task`, on their way back to `AsyncResult`.

    commit --> `{model}:lane` in the broker -- TaskResultForwarder --> Celery's result backend --> acknowledged

A crash in between repeats a step and changes nothing: the same result is stored twice. The reply streams of the task
endpoint are never trimmed: an entry leaves when its results are stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import redis
from celery import Celery, states

from penstock.registry.broker.base import Broker, JobRecord, State
from penstock.registry.envelope import Keyring, ResultHeader, open_result
from penstock.registry.errors import Corrupt, JobFailed, ResultGone
from penstock.registry.queues import GROUP, lane_key
from penstock.registry.tensors import decode, lists

__all__ = ["CeleryResultStore", "TaskResultBackend", "TaskResultForwarder"]

_BLOCK_MS: Final = 1_000
_REFRESH_S: Final = 5.0
_ABANDONED_S: Final = 10.0
"""To store results takes milliseconds, so a worker that holds an entry for so long is dead."""
_RETRY_S: Final = 1.0
_ENTRIES: Final = 64
_UNREAD: Final = ">"
_OWN_PENDING: Final = "0"

logger = logging.getLogger("penstock.server")


class TaskResultBackend(Protocol):
    """Keeps the results of tasks for `AsyncResult`."""

    def succeeded(self, task_id: str, result: dict[str, Any]) -> None:
        """The task ended with `result`, plain data."""

    def failed(self, task_id: str, error: Exception) -> None:
        """The task failed."""

    def revoked(self, task_id: str) -> None:
        """The task was withdrawn before it ran."""


class CeleryResultStore:
    """Celery's result backend, for tasks whose jobs ended after their message was acknowledged."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def succeeded(self, task_id: str, result: dict[str, Any]) -> None:
        """Make `AsyncResult.get` return `result`, which is plain data."""
        self._app.backend.mark_as_done(task_id, result)

    def failed(self, task_id: str, error: Exception) -> None:
        """Make `AsyncResult.get` raise an exception with the class name and the text of `error`.

        `AsyncResult.traceback` is the traceback of the model; where it stays in the worker, the model's last frame.
        """
        self._app.backend.mark_as_failure(task_id, error, traceback=_traceback_of(error))

    def revoked(self, task_id: str) -> None:
        """Make `AsyncResult.get` raise Celery's TaskRevokedError."""
        self._app.backend.mark_as_revoked(task_id, reason="cancelled", state=states.REVOKED)


class _Entry(NamedTuple):
    slot: str
    entry_id: bytes
    job_ids: tuple[str, ...]


class TaskResultForwarder:
    """The thread that carries the results of finished jobs into Celery's result backend.

    All workers share the streams through a consumer group. `worker` names this consumer, also after a restart, so
    that it finds its own unfinished entries. An entry that its worker leaves for `abandoned_s` goes to another worker.
    refresh_s: how often to look for new models and for abandoned entries. retry_s: the pause after an error.
    """

    def __init__(
        self,
        client: redis.Redis,
        broker: Broker,
        keyring: Keyring,
        backend: TaskResultBackend,
        *,
        worker: str,
        refresh_s: float = _REFRESH_S,
        abandoned_s: float = _ABANDONED_S,
        retry_s: float = _RETRY_S,
    ) -> None:
        self._redis = client
        self._broker = broker
        self._keyring = keyring
        self._backend = backend
        self._worker = worker
        self._refresh_s = refresh_s
        self._abandoned_ms = int(abandoned_s * 1000)
        self._retry_s = retry_s
        self._slots: tuple[str, ...] = ()
        self._refresh_at = 0.0
        self._cursor = _OWN_PENDING
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="task-results", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 3.0) -> None:
        """End the thread after the current entry. Entries that are left wait for the next worker."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._step()
            except Exception as error:
                # The broker or the result backend is away, or a reply is malformed. The entries stay pending, and the
                # thread must go on for the next ones.
                logger.warning("Results of Celery tasks wait: %s", type(error).__name__)
                self._cursor = _OWN_PENDING
                self._refresh_at = 0.0
                self._stopping.wait(self._retry_s)

    def _step(self) -> None:
        entries: list[_Entry] = []
        if time.monotonic() >= self._refresh_at:
            self._prepare_streams()
            entries += self._abandoned()
            self._refresh_at = time.monotonic() + self._refresh_s
        if not self._slots:
            self._stopping.wait(_BLOCK_MS / 1000)
            return
        own = self._read()
        for entry in (*entries, *own):
            self._store(entry)
        if self._cursor == _OWN_PENDING and not own:
            self._cursor = _UNREAD

    def _prepare_streams(self) -> None:
        self._slots = tuple(self._broker.models())
        for slot in self._slots:
            try:
                self._redis.xgroup_create(lane_key(slot), GROUP, id="0", mkstream=True)
            except redis.ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    def _abandoned(self) -> Iterator[_Entry]:
        for slot in self._slots:
            answer = self._redis.xautoclaim(
                lane_key(slot), GROUP, self._worker, min_idle_time=self._abandoned_ms, count=_ENTRIES
            )
            yield from _entries(slot, answer[1])

    def _read(self) -> list[_Entry]:
        streams: Any = {lane_key(slot): self._cursor for slot in self._slots}
        found: Any = self._redis.xreadgroup(GROUP, self._worker, streams, count=_ENTRIES, block=_BLOCK_MS)
        slots = {lane_key(slot).encode(): slot for slot in self._slots}
        return [entry for key, entries in found for entry in _entries(slots[key], entries)]

    def _store(self, entry: _Entry) -> None:
        for job_id, job_record in zip(entry.job_ids, self._broker.job_records(entry.job_ids), strict=True):
            self._settle(job_id, job_record)
        key = lane_key(entry.slot)
        with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.xack(key, GROUP, entry.entry_id)
            pipeline.xdel(key, entry.entry_id)
            pipeline.execute()

    def _settle(self, job_id: str, job_record: JobRecord | None) -> None:
        slot, _, task_id = job_id.rpartition(".")
        if job_record is None:
            gone = "The job has ended, and its result expired before Celery's result backend could store it"
            self._backend.failed(task_id, ResultGone(gone))
            return
        try:
            header, body = open_result(job_record.result, self._keyring)
            outputs = {} if header.error else lists(decode(header.content, body))
        except Corrupt as error:
            self._backend.failed(task_id, JobFailed(f"The result cannot be read: {error}"))
            return
        if job_record.state is State.CANCELLED:
            self._backend.revoked(task_id)
        elif header.error:
            self._backend.failed(task_id, header.error.exception())
        else:
            self._backend.succeeded(task_id, _result(slot, header, outputs))


def _traceback_of(error: Exception) -> str | None:
    if not isinstance(error, JobFailed):
        return None
    place = f"Traceback (the last frame of the model):\n  {error.where}\n{error}" if error.where else None
    return error.traceback or place


def _result(model: str, header: ResultHeader, outputs: Mapping[str, Any]) -> dict[str, Any]:
    answered = {"version": header.version, "content_hash": header.content_hash}
    return {"job_id": header.id, "model": model, **answered, "outputs": outputs}


def _entries(slot: str, answer: Sequence[tuple[bytes | None, Mapping[bytes, bytes] | None]]) -> Iterator[_Entry]:
    for entry_id, fields in answer:
        # A deleted entry that is still pending comes as None; an empty local id is a wake-up call and names no job.
        if entry_id is not None:
            local_ids = (name.decode() for name in fields or () if name)
            yield _Entry(slot, entry_id, tuple(f"{slot}.{local}" for local in local_ids))
