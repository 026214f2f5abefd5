"""The blocking client: submit, submit_many, map, and a handle for each job.

A job that `submit` returned is accepted: it is in the broker and will end in exactly one way. While the broker does
not answer, a call repeats itself for at most `timeout_s` and then raises BrokerUnavailable. A repeated call carries the
same job ids, so that it cannot make a second job.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.producers.core import ClientCore, Inputs, Items
from penstock.producers.events import EventMerger, JobEvent, is_end
from penstock.producers.job_state import HandleCore, JobInfo, JobState, JobStatus, Outcome, result_timeout
from penstock.producers.replies import SILENCE_S, ReplyReader
from penstock.producers.rows import MapOrder
from penstock.producers.submission import cancellation
from penstock.registry.admission import SubmitOptions
from penstock.registry.broker.base import CancelOutcome, JobRecord, State
from penstock.registry.errors import BrokerUnavailable, PenstockError
from penstock.registry.tensors import Array

if TYPE_CHECKING:
    from penstock.registry.settings import Settings
    from penstock.testing.model import Served

__all__ = ["Client", "JobHandle"]

_LONGEST_WATCH_S = 5.0


class Client(ClientCore["JobHandle", "JobHandle", "list[JobHandle]", list[Any]]):
    """Submits jobs and reads their results. Thread-safe. A forked child goes on with its own connections.

    url: redis://, rediss:// or unix://. The settings (environment, pyproject.toml) give what no argument gives.
    signing_keys: `id:base64[,id:base64]`, as in PENSTOCK_SIGNING_KEYS.
    models_root: the folder of packages for a model whose spec the broker does not have.
    """

    _reader: ReplyReader

    @classmethod
    def in_memory(
        cls, models: Mapping[str, Served], *, tenant: str | None = None, settings: Settings | None = None
    ) -> Client:
        """A client of a worker in this process, for tests: no Redis, no Celery, no other process. Close it.

        models: by name, a function `(inputs) -> outputs`, a `penstock.testing.Model`, or the path of a package.
        """
        from penstock.testing.client import InMemoryClient

        return InMemoryClient(models, tenant=tenant, settings=settings)

    def _submit(self, model: str, inputs: Inputs, options: SubmitOptions, key: str | None) -> JobHandle:
        spec = self._specs.get(model, options.version, self._broker.spec)
        job, handle = self._new_job(spec, inputs, options, key)
        (receipt,) = self._broker.publish(model, [job], self._limits)
        return self._accepted(handle, receipt, model)

    def _submit_many(
        self, model: str, items: Items, options: SubmitOptions, *, first_index: int = 0, timeout_s: float | None = None
    ) -> list[JobHandle]:
        spec = self._specs.get(model, options.version, self._broker.spec)
        with self._submit_run(spec, items, options, first_index, timeout_s) as run:
            while chunk := run.next_chunk():
                receipts = self._broker.publish(model, chunk, self._limits)
                if pause_s := run.settle(receipts, time.monotonic()):
                    time.sleep(pause_s)
        return run.handles

    def _map(self, model: str, options: SubmitOptions, order: MapOrder) -> list[Any]:
        spec = self._specs.get(model, options.version, self._broker.spec)
        with self._map_run(spec, options, order) as run:
            try:
                while not run.is_over:
                    if chunk := run.next_items():
                        run.submitted(self._submit_many(model, chunk, options, first_index=run.count))
                    for handle in run.due():
                        run.complete(handle._ended(None))
            finally:
                # The error that ended the map is raised, not an error of this cleaning up.
                for handle in run.unfinished():
                    try:
                        handle.cancel()
                    except BrokerUnavailable:
                        # Each further call would wait for the broker, too.
                        break
                    except PenstockError:
                        continue
        return run.results

    def close(self) -> None:
        """Closes the connections. Submitted jobs go on."""
        self._broker.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, url: str, timeout_s: float, result_ttl_ms: int) -> None:
        # For the first client: redis costs more than the rest of `from penstock import Client`.
        from penstock.registry.broker.redis_streams import RedisStreams

        self._broker = RedisStreams.from_url(url, timeout_s=timeout_s, result_ttl_ms=result_ttl_ms)
        self._reader = ReplyReader(self._broker)

    def _leave_parent(self) -> None:
        self._broker.forget_connections()
        self._reader = ReplyReader(self._broker)

    def _handle(self, state: JobState) -> JobHandle:
        return JobHandle(self, state)


class JobHandle(HandleCore):
    """One job: `id`, `tenant`, and how it ends."""

    __slots__ = ()
    _client: Client

    def status(self) -> JobStatus:
        """queued, running, completed, failed, cancelled, expired or dead.

        Raises UnknownJob, or ResultGone after the retention of results.
        """
        return self._state.status(self._state.record or self._read_record())

    def result(self, timeout: float | None = None) -> dict[str, Array]:
        """The outputs by name, once the job has ended. A second call costs nothing.

        timeout: seconds. None waits until the job has ended. Raises the JobFailed that ended the job, ResultTimeout,
        ResultGone, UnknownJob, or BrokerUnavailable.
        """
        return self._ended(timeout).outputs()

    def info(self, timeout: float | None = None) -> JobInfo:
        """The status, version, worker, batch and timings of the job, once it has ended in any way.

        timeout: as for `result`. Raises ResultTimeout, ResultGone, UnknownJob, or BrokerUnavailable.
        """
        return self._ended(timeout).info()

    def stream(self, after: int = 0) -> Iterator[JobEvent]:
        """The job's events after sequence number `after`, as they happen. The terminal event is the last one.

        It works at any time, also after the end of the job, and in any process. A failed job does not raise: its
        failure is the last event. Otherwise it raises as `result` does.
        """
        reader = self._client._reader
        merger = EventMerger(self.id, self._client._builder.keyring, after)
        subscription = reader.subscribe(self.id, after)
        try:
            while not merger.is_over:
                record = self._read_record(subscribe=True)
                yield from merger.entries(reader.read_now(self.id, merger.last))
                yield from merger.record(record)
                while not (merger.is_over or merger.awaits_record):
                    if not reader.wait(lambda: bool(subscription), SILENCE_S):
                        break
                    yield from merger.entries(_drained(subscription))
        finally:
            reader.unsubscribe(self.id, subscription)

    def cancel(self) -> bool:
        """Whether the job will never run.

        A running job is asked to stop. The answer is then False, because the job may still end with a result.
        """
        client, state = self._client, self._state
        sealed = cancellation(state.id, state.tenant, client._builder.keyring)
        outcome = client._broker.cancel(state.id, state.tenant, sealed)
        if outcome is CancelOutcome.SETTLED and state.record is None:
            self._read_record()
        return state.cancelled(outcome)

    def _read_record(self, *, subscribe: bool = False) -> JobRecord:
        return self._state.accept(self._client._broker.job_record(self.id, subscribe=subscribe))

    def _ended(self, timeout: float | None) -> Outcome:
        state = self._state
        if state.record is None:
            deadline = None if timeout is None else time.monotonic() + timeout
            if not state.awaits_reply:
                self._read_record()
            self._wait_for_end(deadline, timeout)
        return state.opened()

    def _wait_for_end(self, deadline: float | None, timeout: float | None) -> None:
        state, reader = self._state, self._client._reader
        while state.record is None:
            left = _LONGEST_WATCH_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                if self._read_record().state is State.QUEUED and state.record is None:
                    raise result_timeout(timeout)
            elif not (state.awaits_reply and reader.expects(state.id)):
                # In a forked child, also a job of the parent: the parent gets the reply.
                self._watch(min(left, _LONGEST_WATCH_S))
            elif reader.wait(lambda: not state.awaits_reply, min(left, SILENCE_S)):
                continue
            elif self._read_record().state is not State.QUEUED:
                # The reply was lost, and those of other jobs may be lost, too.
                reader.catch_up()

    def _watch(self, seconds: float) -> None:
        """Waits for the end in the job's event stream: no reply comes to this reader."""
        reader = self._client._reader
        events = reader.subscribe(self.id, 0)
        try:
            record = self._read_record(subscribe=True)
            if record.state is State.QUEUED and reader.wait(lambda: any(map(is_end, tuple(events))), seconds):
                self._read_record()
        finally:
            reader.unsubscribe(self.id, events)


def _drained(entries: deque[Any]) -> list[Any]:
    taken = []
    while entries:
        taken.append(entries.popleft())
    return taken
