"""Results of jobs that came through Celery's `send_task`, on their way back to `AsyncResult` and to their followers.

    commit --> `{model}:lane` in the broker -- TaskResultForwarder --> result_store.py --> settled --> acknowledged

A commit writes the entry together with the result, and the entry leaves when every task in it has ended: followers are
sent at least once. After a crash in between, the same or another worker ends the tasks again that were not settled. The
reply streams of the task endpoint are never trimmed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, cast

import redis

from penstock.registry.broker import redis_scripts
from penstock.registry.broker.base import Broker, JobRecord, State
from penstock.registry.broker.foreign_keys import is_foreign
from penstock.registry.envelope import Keyring, ResultHeader, open_result
from penstock.registry.errors import BadSeal, Corrupt, JobFailed, PenstockError, ResultGone
from penstock.registry.queues import GROUP, lane_key
from penstock.registry.tensors import decode, lists
from penstock.workers.celery_bridge.result_store import TaskResultBackend
from penstock.workers.celery_bridge.task_request import TaskRequests

__all__ = ["ANSWER_FIELDS", "TaskResultForwarder"]

ANSWER_FIELDS: Final = frozenset(("job_id", "model", "version", "content_hash", "outputs"))
"""The keys of what `AsyncResult.get` returns and followers receive."""
_BLOCK_MS: Final = 1_000
_REFRESH_S: Final = 5.0
_ABANDONED_S: Final = 10.0
"""To store results takes milliseconds, so a worker that holds an entry for so long is dead."""
_LEFT_S: Final = 3_600.0
"""A consumer that calls no more for so long is that of a dead worker. As in take_over.lua."""
_RETRY_S: Final = 1.0
_ENTRIES: Final = 64
_UNREAD: Final = ">"
_OWN_PENDING: Final = "0"
_WITHDRAWN: Final = {State.CANCELLED: "cancelled", State.EXPIRED: "expired"}
"""The ends that are a revocation in Celery, with its reason."""

logger = logging.getLogger("penstock.server")


class _Entry(NamedTuple):
    slot: str
    entry_id: bytes
    job_ids: tuple[str, ...]


class TaskResultForwarder:
    """The thread that ends the Celery tasks of finished jobs.

    All workers share the streams through a consumer group. `worker` names this consumer, also after a restart, so
    that it finds its own unfinished entries. An entry that its worker leaves for `abandoned_s` goes to another worker.
    A consumer without entries that makes no call for `left_s` is deleted: workers with new names would leave one each.
    refresh_s: how often to look for new models and for abandoned entries. retry_s: the pause after an error.
    """

    def __init__(
        self,
        client: redis.Redis,
        broker: Broker,
        keyring: Keyring,
        requests: TaskRequests,
        backend: TaskResultBackend,
        *,
        worker: str,
        refresh_s: float = _REFRESH_S,
        abandoned_s: float = _ABANDONED_S,
        left_s: float = _LEFT_S,
        retry_s: float = _RETRY_S,
    ) -> None:
        self._redis = client
        self._broker = broker
        self._keyring = keyring
        self._requests = requests
        self._backend = backend
        self._worker = worker
        self._refresh_s = refresh_s
        self._abandoned_ms = int(abandoned_s * 1000)
        self._left_ms = int(left_s * 1000)
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
                self._mend(error)
                self._cursor = _OWN_PENDING
                self._refresh_at = 0.0
                self._stopping.wait(self._retry_s)

    def _mend(self, error: Exception) -> None:
        """A foreign key in the place of one model's stream must not keep the results of the others."""
        if is_foreign(error):
            with suppress(PenstockError):
                self._broker.quarantine(self._slots)

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
            # Behind XAUTOCLAIM: a dead worker with abandoned entries has none left.
            self._forget_consumers(lane_key(slot))

    def _forget_consumers(self, stream: str) -> None:
        call, plain = redis_scripts.forget_consumers(stream, self._left_ms), cast(Any, self._redis)
        try:
            plain.execute_command(*call)
        except redis.exceptions.NoScriptError:
            plain.script_load(redis_scripts.SOURCES["forget_consumers"])
            plain.execute_command(*call)

    def _read(self) -> list[_Entry]:
        streams: Any = {lane_key(slot): self._cursor for slot in self._slots}
        found: Any = self._redis.xreadgroup(GROUP, self._worker, streams, count=_ENTRIES, block=_BLOCK_MS)
        slots = {lane_key(slot).encode(): slot for slot in self._slots}
        return [entry for key, entries in found for entry in _entries(slots[key], entries)]

    def _store(self, entry: _Entry) -> None:
        records = self._broker.job_records(entry.job_ids)
        for job_id, job_record, kept in zip(entry.job_ids, records, self._requests.find(entry.job_ids), strict=True):
            self._settle(job_id, job_record, kept)
            if kept is not None:
                # At once and not with the entry: after a crash, its other tasks do not send their followers again.
                self._requests.settled(job_id)
        key = lane_key(entry.slot)
        with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.xack(key, GROUP, entry.entry_id)
            pipeline.xdel(key, entry.entry_id)
            pipeline.execute()

    def _settle(self, job_id: str, job_record: JobRecord | None, kept: bytes | None) -> None:
        slot, _, task_id = job_id.rpartition(".")
        request: dict[str, Any] | None = None
        try:
            request = None if kept is None else self._requests.opened(job_id, kept)
            if job_record is None:
                gone = "The job has ended, and its result expired before Celery's result backend could store it"
                self._backend.failed(task_id, ResultGone(gone), request)
                return
            header, body = open_result(job_record.result, self._keyring)
            if header.is_sealed:
                raise BadSeal("its outputs are sealed, and Celery's result backend would keep them in plaintext")
            outputs = {} if header.error else lists(decode(header.content, body))
        except Corrupt as error:
            self._backend.failed(task_id, JobFailed(f"The result cannot be read: {error}"), request)
            return
        if (reason := _WITHDRAWN.get(job_record.state)) is not None:
            self._backend.revoked(task_id, reason, request)
        elif header.error:
            self._backend.failed(task_id, header.error.exception(), request)
        else:
            self._backend.succeeded(task_id, _result(slot, header, outputs), request)


def _result(model: str, header: ResultHeader, outputs: Mapping[str, Any]) -> dict[str, Any]:
    answered = {"version": header.version, "content_hash": header.content_hash}
    return {"job_id": header.id, "model": model, **answered, "outputs": outputs}


def _entries(slot: str, answer: Sequence[tuple[bytes | None, Mapping[bytes, bytes] | None]]) -> Iterator[_Entry]:
    for entry_id, fields in answer:
        # A deleted entry that is still pending comes as None; an empty local id is a wake-up call and names no job.
        if entry_id is not None:
            local_ids = (name.decode() for name in fields or () if name)
            yield _Entry(slot, entry_id, tuple(f"{slot}.{local}" for local in local_ids))
