"""Jobs that come through Celery's `send_task`, and their results on the way back.

    task message --TaskIngress--> <model>.<task id> in the broker --> acknowledged; from then on it is a job like any
    commit --> `{model}:lane` --TaskResultForwarder--> Celery's result backend --> acknowledged

A crash in between repeats a step and changes nothing: a job id is published once, and a result that is stored twice
is the same result. The lane's reply streams are never trimmed: an entry leaves when its results are stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, cast

import redis

from penstock.registry.admission import JobBuilder, SpecCache, SubmitOptions
from penstock.registry.broker.base import Broker, JobRecord, Limits, ProducerEnd, State
from penstock.registry.envelope import Keyring, ResultHeader, open_result
from penstock.registry.errors import (
    Corrupt,
    Forbidden,
    InvalidInput,
    JobFailed,
    QueueFull,
    ResultGone,
    job_failure,
)
from penstock.registry.queues import GROUP, PriorityName, lane_key, slot_of
from penstock.registry.tensors import decode, lists

__all__ = ["TaskIngress", "TaskResultForwarder", "TaskResultBackend"]

_BLOCK_MS: Final = 1_000
_REFRESH_S: Final = 5.0
"""How often new models, and entries whose worker died, are looked for."""
_ABANDONED_MS: Final = 10_000
"""Storing results takes milliseconds: whoever holds an entry for so long is gone."""
_ENTRIES: Final = 64
_RETRY_S: Final = 1.0
_UNREAD: Final = ">"
_OWN_PENDING: Final = "0"
_log = logging.getLogger("penstock.server")


class TaskResultBackend(Protocol):
    """Where the results of tasks are kept for `AsyncResult`."""

    def succeeded(self, task_id: str, result: dict[str, Any]) -> None:
        """The task ended with `result`, plain data."""

    def failed(self, task_id: str, error: Exception) -> None:
        """The task failed."""

    def revoked(self, task_id: str) -> None:
        """The task was withdrawn before it ran."""


class TaskIngress:
    """Turns task messages into jobs. Closed where jobs must be signed by those who send them. One thread's."""

    def __init__(
        self, broker: ProducerEnd, builder: JobBuilder, specs: SpecCache, limits: Limits, *, is_open: bool
    ) -> None:
        self._broker = broker
        self._builder = builder
        self._specs = specs
        self._limits = limits
        self._is_open = is_open

    def admit(
        self,
        task_id: str,
        *,
        model: str,
        inputs: Mapping[str, object],
        tenant: str | None = None,
        priority: str = "normal",
        deadline_s: float | None = None,
        version: str | None = None,
        outputs: Sequence[str] = (),
    ) -> str:
        """Publish the job `<model>.<task id>` and return its id; the same task again is the same job.

        `inputs` are nested lists. Raises Rejected for a job that will never be accepted, QueueFull among them for
        one that may be later, and BrokerUnavailable.
        """
        if not self._is_open:
            raise Forbidden("send_task is off here: jobs are signed by those who send them. Expected a Penstock client")
        spec = self._specs.get(model, version, self._broker.spec)
        job_id = f"{spec.name}.{task_id}"
        slot = slot_of(job_id)
        if slot != spec.name:
            raise InvalidInput(f"Bad task id {task_id!r:.80}. Expected letters, digits, '_', ':' or '-'")
        # `build` checks the name: a task may bring any value.
        options = SubmitOptions(cast(PriorityName, priority), deadline_s, tenant, version, outputs)
        job = self._builder.build(spec, inputs, options, reply=lane_key(slot), job_id=job_id, lane=True)
        (receipt,) = self._broker.publish(slot, [job], self._limits)
        if receipt.outcome not in ("accepted", "known"):
            raise QueueFull(f"No room for another job of model {model}", receipt.retry_after_s)
        return receipt.job_id


class _Entry(NamedTuple):
    slot: str
    entry_id: bytes
    job_ids: tuple[str, ...]


class TaskResultForwarder:
    """The thread that carries finished jobs of the lane into Celery's result backend.

    The streams are shared by all workers through a consumer group. `worker` names this one, also after a restart,
    so that it finds what it had not finished; what a dead worker held goes to another after ten seconds.
    """

    def __init__(
        self, client: redis.Redis, broker: Broker, keyring: Keyring, outcomes: TaskResultBackend, *, worker: str
    ) -> None:
        self._redis = client
        self._broker = broker
        self._keyring = keyring
        self._outcomes = outcomes
        self._worker = worker
        self._slots: tuple[str, ...] = ()
        self._refresh_at = 0.0
        self._cursor = _OWN_PENDING
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lane-replies", daemon=True)

    def start(self) -> None:
        """Begin to carry."""
        self._thread.start()

    def stop(self, timeout_s: float = 3.0) -> None:
        """End after the entry at hand; what is left waits for the next worker."""
        self._stopping.set()
        self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._step()
            except Exception as error:
                # Broker or result backend away, or an answer that makes no sense: the entries stay pending, and
                # this thread must be there when the next ones come.
                _log.warning("Lane results wait: %s", type(error).__name__)
                self._cursor = _OWN_PENDING
                self._refresh_at = 0.0
                self._stopping.wait(_RETRY_S)

    def _step(self) -> None:
        entries: list[_Entry] = []
        if time.monotonic() >= self._refresh_at:
            self._prepare_streams()
            entries += self._abandoned()
            self._refresh_at = time.monotonic() + _REFRESH_S
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
                lane_key(slot), GROUP, self._worker, min_idle_time=_ABANDONED_MS, count=_ENTRIES
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
            gone = "The job has ended, and its result has expired before Celery's result backend could take it"
            self._outcomes.failed(task_id, ResultGone(gone))
            return
        try:
            header, body = open_result(job_record.result, self._keyring)
            outputs = {} if header.error else lists(decode(header.content, body))
        except Corrupt as error:
            self._outcomes.failed(task_id, JobFailed(f"The result cannot be read: {error}"))
            return
        if job_record.state is State.CANCELLED:
            self._outcomes.revoked(task_id)
        elif header.error:
            self._outcomes.failed(task_id, job_failure(header.error.code, header.error.message))
        else:
            self._outcomes.succeeded(task_id, _result(slot, header, outputs))


def _result(model: str, header: ResultHeader, outputs: Mapping[str, Any]) -> dict[str, Any]:
    answered = {"version": header.version, "content_hash": header.content_hash}
    return {"job_id": header.id, "model": model, **answered, "outputs": outputs}


def _entries(slot: str, answer: Sequence[tuple[bytes | None, Mapping[bytes, bytes] | None]]) -> Iterator[_Entry]:
    for entry_id, fields in answer:
        # A deleted entry that is still pending comes as None; an empty local id is a nudge and names no job.
        if entry_id is not None:
            local_ids = (name.decode() for name in fields or () if name)
            yield _Entry(slot, entry_id, tuple(f"{slot}.{local}" for local in local_ids))
