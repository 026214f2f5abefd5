"""The blocking client: submit, submit_many, map, and a handle per job.

A job that `submit` returned is accepted: it is in the broker and will end in exactly one way. Calls go on for at
most `timeout_s` when the broker is away, and then raise BrokerUnavailable; a repeated publish carries the same
job ids, so that it cannot make a second job.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from penstock.producers.connection import (
    LONGEST_PAUSE_S,
    client_settings,
    new_client_id,
)
from penstock.producers.publish import accepted, cancellation, parcels
from penstock.producers.replies import (
    SILENCE_S,
    EventMerger,
    Inbox,
    JobEvent,
    JobInfo,
    Outcome,
    is_end,
    missing,
    open_outcome,
)
from penstock.producers.rows import RowShape, Tracker
from penstock.registry import stack_file
from penstock.registry.admission import JobBuilder, SpecCache, limits_of
from penstock.registry.broker.base import CancelOutcome, JobRecord, Publication, Receipt, State
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import Retry
from penstock.registry.errors import (
    BrokerUnavailable,
    ConfigurationError,
    JobFailed,
    PenstockError,
    QueueFull,
    ResultTimeout,
)
from penstock.registry.package import ModelSpec
from penstock.registry.queues import slot_of
from penstock.registry.settings import Settings
from penstock.registry.tensors import Array

__all__ = ["Client", "JobHandle"]

logger = logging.getLogger("penstock.client")

Inputs = Mapping[str, object]
_MAP_WINDOW = 512
_LONGEST_WATCH_S = 5.0


class Client:
    """Submits jobs and reads their results. Thread-safe; a forked child goes on with connections of its own.

    url: redis://, rediss:// or unix://. What is not given comes from the settings (environment, pyproject.toml).
    signing_keys: `id:base64[,id:base64]`, as PENSTOCK_SIGNING_KEYS.
    models_root: where to look for a model that the broker has no spec of.
    """

    def __init__(
        self,
        url: str,
        *,
        tenant: str | None = None,
        signing_keys: str | None = None,
        timeout_s: float = 5.0,
        models_root: str | Path | None = None,
        settings: Settings | None = None,
    ) -> None:
        settings = client_settings(settings, tenant=tenant, signing_keys=signing_keys, models_root=models_root)
        queue = settings.inference.queue
        self.tenant = settings.tenant_id
        self._result_ttl_s = queue.result_ttl_s
        self._limits = limits_of(queue)
        self._builder = JobBuilder.of(settings)
        self._specs = SpecCache(settings.inference.repo_root)
        self._broker = RedisStreams.from_url(url, timeout_s=timeout_s, result_ttl_ms=int(queue.result_ttl_s * 1000))
        self._inbox = Inbox(self._broker, new_client_id())
        _clients.add(self)

    @classmethod
    def from_env(cls, *, timeout_s: float = 5.0, settings: Settings | None = None) -> Client:
        """The broker that the settings name; without one, the embedded stack that runs on this home."""
        settings = stack_file.with_broker(settings or Settings.load())
        return cls(settings.redis_url or "", timeout_s=timeout_s, settings=settings)

    def submit(
        self,
        model: str,
        inputs: Inputs,
        *,
        priority: str = "normal",
        deadline_s: float | None = None,
        idempotency_key: str | None = None,
        tenant: str | None = None,
        version: str | None = None,
        outputs: Sequence[str] = (),
        traceparent: str = "",
        retry: Retry | None = None,
    ) -> JobHandle:
        """Publishes one job and returns its handle.

        inputs: name -> NumPy array of the declared dtype, or nested lists; text as str in lists.
        priority: critical, high, normal or low.
        deadline_s: seconds from now after which the job must not start any more; None: as long as it is kept.
        idempotency_key: a second submit of the same model, version and inputs under it returns the first job.
        outputs: the outputs wanted; empty means all.
        retry: how often to repeat a forward that fails, and after what pauses; None: a failure is the job's end.
        Raises a Rejected error before anything is written, QueueFull among them; BrokerUnavailable.
        """
        publication = self._builder.publication(
            self._spec(model, version),
            inputs,
            priority=priority,
            deadline_s=deadline_s,
            idempotency_key=idempotency_key,
            tenant=tenant,
            version=version,
            outputs=outputs,
            traceparent=traceparent,
            retry=retry,
            reply=self._inbox.address(model),
        )
        handle = self._handle(publication)
        receipt = self._broker.publish(model, [publication], self._limits)[0]
        return self._answered(handle, receipt, model)

    def submit_many(
        self,
        model: str,
        batches: Iterable[Inputs],
        *,
        priority: str = "normal",
        deadline_s: float | None = None,
        tenant: str | None = None,
        version: str | None = None,
        outputs: Sequence[str] = (),
        traceparent: str = "",
        retry: Retry | None = None,
        timeout_s: float | None = None,
    ) -> list[JobHandle]:
        """Publishes one job per item, a few hundred in one round trip, and waits for room while the queue is full.

        All items are checked before the first is written. `timeout_s` bounds the waiting: QueueFull then, and the
        jobs accepted so far stay accepted (`error.accepted`, their handles). BrokerUnavailable carries these, too, and
        in `error.in_doubt` the handles of the jobs whose answer did not come.
        """
        spec, reply = self._spec(model, version), self._inbox.address(model)
        publications = [
            self._builder.publication(
                spec,
                inputs,
                priority=priority,
                deadline_s=deadline_s,
                tenant=tenant,
                version=version,
                outputs=outputs,
                traceparent=traceparent,
                retry=retry,
                reply=reply,
            )
            for inputs in batches
        ]
        return self._publish_all(model, publications, timeout_s)

    def map(
        self,
        model: str,
        items: Iterable[Any],
        *,
        priority: str = "normal",
        progress: bool | Callable[[int], None] = False,
        on_error: Literal["raise", "return"] = "raise",
        window: int = _MAP_WINDOW,
    ) -> list[Any]:
        """One job per item, results in the items' order, at most `window` jobs outstanding.

        An item is a mapping of inputs as for `submit`, or, for a model with one required input, one row of it (a
        sentence, a vector). A model with one output gives that output's row, others a dict of rows; items that
        are mappings give whole outputs. `progress`: True draws a bar, a callable gets the count of finished jobs.
        on_error: "raise" the first failure, cancelling what waits, or "return" it in its place.
        """
        if on_error not in ("raise", "return"):
            raise ConfigurationError(f"on_error is {on_error!r:.80}. Expected 'raise' or 'return'")
        shape = RowShape(self._spec(model))
        results: list[Any] = []
        outstanding: deque[tuple[JobHandle, bool]] = deque()
        source, chunk = iter(items), max(1, window // 4)
        with Tracker(progress, items) as advance:
            try:
                while True:
                    if len(outstanding) <= window - chunk and (taken := shape.take(source, chunk)):
                        inputs = [shape.inputs(item) for item in taken]
                        handles = self.submit_many(model, inputs, priority=priority)
                        outstanding.extend(
                            (handle, isinstance(item, Mapping)) for handle, item in zip(handles, taken, strict=True)
                        )
                    elif not outstanding:
                        return results
                    else:
                        handle, is_whole = outstanding.popleft()
                        results.append(_row_of(handle, shape, is_whole, on_error))
                        advance(len(results))
            finally:
                # What ended the map is the error to tell, not that somebody else's end came first.
                for handle, _ in outstanding:
                    with suppress(PenstockError):
                        handle.cancel()

    def job(self, job_id: str, *, tenant: str | None = None) -> JobHandle:
        """The handle of a job that anybody submitted, from its id; nothing is asked yet."""
        slot_of(job_id)
        return JobHandle(self, job_id, tenant or self.tenant, is_ours=False)

    def close(self) -> None:
        """Gives the connections back; jobs go on."""
        self._broker.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _spec(self, model: str, version: str | None = None) -> ModelSpec:
        spec = self._specs.fresh(model) or self._specs.store(model, self._broker.spec(model))
        if not version or version == spec.version:
            return spec
        return self._specs.fresh(model, version) or self._specs.store(model, self._broker.spec(model, version), version)

    def _handle(self, publication: Publication) -> JobHandle:
        # Before publishing: the reply may be there before publish returns.
        handle = JobHandle(self, publication.job_id, publication.tenant, is_ours=True)
        self._inbox.expect(publication.job_id, handle)
        return handle

    def _answered(self, handle: JobHandle, receipt: Receipt, model: str) -> JobHandle:
        job_id = accepted(receipt, model)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("job submitted", extra={"job_id": job_id, "model": model})
        return handle if job_id == handle.id else JobHandle(self, job_id, handle.tenant, is_ours=False)

    def _publish_all(self, model: str, jobs: Sequence[Publication], timeout_s: float | None) -> list[JobHandle]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        handles: list[JobHandle] = []
        for parcel in parcels(jobs):
            waiting = [(job, self._handle(job)) for job in parcel]
            handles += [handle for _, handle in waiting]
            while waiting:
                try:
                    receipts = self._broker.publish(model, [job for job, _ in waiting], self._limits)
                except BrokerUnavailable as error:
                    error.in_doubt = [handle for _, handle in waiting]
                    error.accepted = handles[: len(handles) - len(waiting)]
                    raise
                refused = [
                    (pair, receipt)
                    for pair, receipt in zip(waiting, receipts, strict=True)
                    if receipt.outcome != "accepted"
                ]
                waiting = [pair for pair, _ in refused]
                if refused:
                    _wait_for_room([receipt for _, receipt in refused], model, deadline, handles, waiting)
        if logger.isEnabledFor(logging.DEBUG):
            for handle in handles:
                logger.debug("job submitted", extra={"job_id": handle.id, "model": model})
        return handles

    def _forget_parent(self) -> None:
        self._broker.forget_connections()
        self._inbox = Inbox(self._broker, new_client_id())


class JobHandle:
    """One job: `id`, and what became of it."""

    __slots__ = ("__weakref__", "_client", "_is_known", "_is_ours", "_job_record", "_outcome", "id", "tenant")

    def __init__(self, client: Client, job_id: str, tenant: str, *, is_ours: bool) -> None:
        self.id = job_id
        self.tenant = tenant
        self._client = client
        self._is_ours = is_ours
        self._is_known = is_ours
        self._job_record: JobRecord | None = None
        self._outcome: Outcome | None = None

    def __repr__(self) -> str:
        return f"<JobHandle {self.id}>"

    def receive(self, job_record: JobRecord | None) -> None:
        """The reply has come; see Recipient."""
        self._job_record = job_record
        self._is_ours = False

    def status(self) -> str:
        """queued, running, completed, failed, cancelled, expired or dead.

        Raises UnknownJob, or ResultGone when the retention has ended.
        """
        if self._job_record is None:
            job_record = self._ask()
            if job_record.state is State.QUEUED:
                return "running" if job_record.is_claimed else "queued"
        return self._opened().state.name.lower()

    def result(self, timeout: float | None = None) -> dict[str, Array]:
        """The outputs by name, once they are there. Asking again is free.

        timeout: seconds; None waits until the job has ended. Raises the JobFailed that the job ended with,
        ResultTimeout, ResultGone, UnknownJob, or BrokerUnavailable.
        """
        return self._ended(timeout).outputs()

    def info(self, timeout: float | None = None) -> JobInfo:
        """Which version answered, on which worker, in which batch and how fast, once the job has ended, however.

        timeout: as for `result`. Raises ResultTimeout, ResultGone, UnknownJob, or BrokerUnavailable.
        """
        return self._ended(timeout).info()

    def stream(self, after: int = 0) -> Iterator[JobEvent]:
        """The job's events after sequence number `after`, as they happen; ends after the terminal one.

        May be called at any time, also after completion, and from any process. Raises as `result` does, but for a
        failed job: that is the last event.
        """
        inbox = self._client._inbox
        merger = EventMerger(self.id, self._client._builder.keyring, after)
        subscription = inbox.subscribe(self.id, after)
        try:
            while not merger.is_over:
                job_record = self._ask(subscribe=True)
                yield from merger.entries(inbox.read_now(self.id, merger.last))
                yield from merger.job_record(job_record)
                while not (merger.is_over or merger.awaits_record):
                    if not inbox.wait(lambda: bool(subscription), SILENCE_S):
                        break
                    yield from merger.entries(_drained(subscription))
        finally:
            inbox.unsubscribe(self.id, subscription)

    def cancel(self) -> bool:
        """Whether the job will never run. A running job is asked to stop, which False does not promise."""
        client = self._client
        sealed = cancellation(self.id, self.tenant, client._builder.keyring)
        outcome = client._broker.cancel(self.id, self.tenant, sealed)
        if outcome is CancelOutcome.UNKNOWN:
            raise self._missing()
        if outcome is CancelOutcome.SETTLED:
            return self._opened_or_asked().state is State.CANCELLED
        return outcome is CancelOutcome.CANCELLED

    def _await_end(self, deadline: float | None, timeout: float | None) -> None:
        inbox = self._client._inbox
        while self._job_record is None:
            left = _LONGEST_WATCH_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                self._ask()
                if self._job_record is None:
                    raise ResultTimeout(f"No result within {timeout:g} s; the job goes on")
            elif not (self._is_ours and inbox.expects(self.id)):
                # Also a parent's job in a forked child: the reply goes to the parent.
                self._watch(min(left, _LONGEST_WATCH_S))
            elif inbox.wait(lambda: not self._is_ours, min(left, SILENCE_S)):
                continue
            elif self._ask().state is not State.QUEUED:
                # Its reply never came, and those of other jobs may be gone with it.
                inbox.make_up()

    def _watch(self, seconds: float) -> None:
        """Somebody else's job tells us of its end only through its event stream."""
        inbox = self._client._inbox
        events = inbox.subscribe(self.id, 0)
        try:
            self._ask(subscribe=True)
            if self._job_record is None and inbox.wait(lambda: any(map(is_end, tuple(events))), seconds):
                self._ask()
        finally:
            inbox.unsubscribe(self.id, events)

    def _ask(self, *, subscribe: bool = False) -> JobRecord:
        """Reads the record; keeps it when it is terminal."""
        job_record = self._stand(subscribe=subscribe)
        if job_record.state is not State.QUEUED:
            self._outcome = self._open(job_record)
            self._job_record = job_record
        elif job_record.tenant != self.tenant:
            raise self._missing()
        self._is_known = True
        return job_record

    def _stand(self, *, subscribe: bool) -> JobRecord:
        job_record = self._client._broker.job_record(self.id, subscribe=subscribe)
        if job_record is None:
            raise self._missing()
        return job_record

    def _missing(self) -> Exception:
        return missing(self.id, is_known=self._is_known, result_ttl_s=self._client._result_ttl_s)

    def _ended(self, timeout: float | None) -> Outcome:
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._is_ours and self._job_record is None:
            self._ask()
        if self._job_record is None:
            self._await_end(deadline, timeout)
        return self._opened()

    def _opened_or_asked(self) -> Outcome:
        if self._job_record is None:
            self._ask()
        return self._opened()

    def _opened(self) -> Outcome:
        if self._outcome is None:
            if self._job_record is None:
                raise self._missing()
            self._outcome = self._open(self._job_record)
        return self._outcome

    def _open(self, job_record: JobRecord) -> Outcome:
        outcome = open_outcome(self.id, job_record, self._client._builder.keyring)
        if outcome.header.context.tenant != self.tenant:
            raise self._missing()
        return outcome


def _start_over() -> None:
    for client in list(_clients):
        client._forget_parent()


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
os.register_at_fork(after_in_child=_start_over)


def _drained(entries: deque[Any]) -> list[Any]:
    taken = []
    while entries:
        taken.append(entries.popleft())
    return taken


def _wait_for_room(
    refused: Sequence[Receipt],
    model: str,
    deadline: float | None,
    handles: list[JobHandle],
    waiting: Sequence[tuple[Publication, JobHandle]],
) -> None:
    """Sleeps until the queue may have room again, or raises for the refused jobs."""
    try:
        for receipt in refused:
            accepted(receipt, model)
    except QueueFull as full:
        pause = min(full.retry_after_s, LONGEST_PAUSE_S)
        if deadline is not None and time.monotonic() + pause > deadline:
            outside = {id(handle) for _, handle in waiting}
            full.accepted = [handle for handle in handles if id(handle) not in outside]
            raise
        time.sleep(pause)


def _row_of(handle: JobHandle, shape: RowShape, is_whole: bool, on_error: str) -> Any:
    try:
        outputs = handle.result()
    except JobFailed as failure:
        if on_error == "raise":
            raise
        return failure
    return outputs if is_whole else shape.row(outputs)
