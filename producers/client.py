"""The blocking client: submit, submit_many, map, and a handle for each job.

A job that `submit` returned is accepted: it is in the broker and will end in exactly one way. While the broker does
not answer, a call repeats itself for at most `timeout_s` and then raises BrokerUnavailable. A repeated call carries the
same job ids, so that it cannot make a second job.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from penstock.producers.core import ClientCore, Inputs, Item, Items, Refused, Untaken
from penstock.producers.events import EventMerger, JobEvent, Silence, is_end, unqueued_events
from penstock.producers.gathering import (
    ENDS,
    FOLLOW_TTL_MS,
    MOST_FOLLOWED,
    Awaited,
    EndedJobs,
    Follower,
    Gathered,
    listed,
)
from penstock.producers.job_state import (
    CancelStatus,
    HandleCore,
    JobInfo,
    JobState,
    JobStatus,
    checked_timeout,
    result_timeout,
)
from penstock.producers.replies import RECORDS_AT_ONCE, SILENCE_S, ReplyReader
from penstock.producers.rows import MapOrder
from penstock.producers.submission import cancellation, expiry, log_accepted, logger
from penstock.producers.unusable import CLOSED
from penstock.registry.admission import SubmitOptions
from penstock.registry.broker.base import JobRecord, ProducerEnd, State, StreamEntry
from penstock.registry.errors import BrokerUnavailable, JobLost, PenstockError
from penstock.registry.tensors import Array

if TYPE_CHECKING:
    from penstock.producers.cached_answers import CachedAnswer, CachedAnswers
    from penstock.registry.package import ModelSpec
    from penstock.registry.settings import Settings
    from penstock.testing.model import Served

__all__ = ["Client", "JobHandle"]

_LONGEST_WATCH_S = 5.0


class Connection(ProducerEnd, Protocol):
    """The broker's connection of a blocking client."""

    def close(self) -> None:
        """Close the connections."""

    def forget_connections(self) -> None:
        """After a fork: drop the parent's connections without closing its sockets."""


class Client(ClientCore["JobHandle", "JobHandle", "list[JobHandle]", list[Any], list[dict[str, Array]]]):
    """Submits jobs and reads their results. Thread-safe. A forked child goes on with its own connections.

    url: redis://, rediss:// or unix://. The settings (environment, pyproject.toml) give what no argument gives.
    signing_keys: `id:base64[,id:base64]`, as in PENSTOCK_SIGNING_KEYS.
    models_root: the folder of packages for a model whose spec the broker does not have.
    """

    _broker: Connection
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
        spec = self._specs.get(model, options.version, self._read_spec)
        if self._cached is not None and (found := self._look_up(self._cached, spec, [(inputs, key)], options)):
            return self._ended(found[0])
        job, handle = self._new_job(spec, inputs, options, key)
        receipts = self._broker.publish(model, [job], self._limits)
        if logger.isEnabledFor(logging.DEBUG):
            log_accepted(receipts, model)
        return self._accepted(handle, receipts[0], model)

    def _submit_many(
        self,
        model: str,
        items: Items,
        options: SubmitOptions,
        *,
        first_index: int = 0,
        refused: Refused = None,
        timeout_s: float | None = None,
        untaken: Untaken = None,
        stranded: list[JobHandle] | None = None,
    ) -> list[JobHandle]:
        spec = self._specs.get(model, options.version, self._read_spec)
        found: Mapping[int, CachedAnswer] = {}
        if self._cached is not None:
            items = list(items)
            found = self._look_up(self._cached, spec, items, options)
        with self._submit_run(
            spec, items, options, first_index, refused, timeout_s, found, untaken, stranded=stranded
        ) as run:
            while chunk := run.next_chunk():
                receipts = self._broker.publish(model, chunk, self._limits)
                if pause_s := run.settle(receipts, time.monotonic()):
                    time.sleep(pause_s)
        return run.handles

    def _look_up(
        self, cached: CachedAnswers, spec: ModelSpec, items: Sequence[Item], options: SubmitOptions
    ) -> dict[int, CachedAnswer]:
        """The answers of the shared cache, by the place of the item."""
        if not cached.takes(spec, options):
            return {}
        if cached.is_due(spec.name):
            now = cached.now()
            cached.note(spec.name, self._broker.actives([spec.name])[spec.name], now)
        asked = cached.ask_all(self._builder, spec, items, options)
        found = zip(asked, cached.find(list(asked.values())), strict=True)
        return {place: answer for place, answer in found if answer is not None}

    def _map(self, model: str, options: SubmitOptions, order: MapOrder) -> list[Any]:
        spec = self._specs.get(model, options.version, self._read_spec)
        with self._map_run(spec, options, order) as run:
            try:
                while not run.is_over:
                    if chunk := run.next_items():
                        run.submitted(self._submit_many(model, chunk, options, **run.places))
                    for handle in run.due():
                        try:
                            if handle._state.record is None:
                                handle._find_end(None)
                        except JobLost as lost:
                            run.lose(lost)
                        else:
                            run.complete(handle._state)
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

    def as_completed(self, jobs: Iterable[JobHandle], timeout: float | None = None) -> Iterator[JobHandle]:
        """The handles in the order in which their jobs end, in any way: `result` of a yielded handle waits no more.

        jobs: handles of this client. A handle that is given twice is yielded twice.
        timeout: seconds from the first wait until all have ended. Then ResultTimeout is raised, and the jobs go on.
        None means no limit. Raises BrokerUnavailable, too.
        """
        return self._ends(Awaited(self, jobs, timeout))

    @overload
    def gather(
        self, jobs: Iterable[JobHandle], *, return_exceptions: Literal[False] = False, timeout: float | None = None
    ) -> list[dict[str, Array]]: ...

    @overload
    def gather(
        self, jobs: Iterable[JobHandle], *, return_exceptions: bool, timeout: float | None = None
    ) -> list[Gathered]: ...

    def gather(
        self, jobs: Iterable[JobHandle], *, return_exceptions: bool = False, timeout: float | None = None
    ) -> list[Any]:
        """The outputs of all jobs, in the order of the handles.

        return_exceptions: True puts the error of a job in the place of its outputs. Otherwise the first error that
        comes is raised at once. The other jobs go on.
        timeout: as for `as_completed`.
        """
        handles = listed(jobs)
        gathered: dict[str, Gathered] = {}
        for job in self.as_completed(handles, timeout):
            try:
                gathered[job.id] = job.result()
            except ENDS as error:
                if not return_exceptions:
                    raise
                gathered[job.id] = error
        return [gathered[job.id] for job in handles]

    def _ends(self, awaited: Awaited[JobHandle]) -> Iterator[JobHandle]:
        yield from awaited.take_known()
        if not awaited:
            return
        reader, ended = self._reader, EndedJobs()
        reader.watch(ended)
        try:
            with self._following(ended.follower):
                yield from self._ends_in_turn(awaited, ended)
        finally:
            reader.unwatch(ended)
            for job_id in ended.followed:
                reader.unsubscribe(job_id, ended)

    def _ends_in_turn(self, awaited: Awaited[JobHandle], ended: EndedJobs) -> Iterator[JobHandle]:
        reader = self._reader
        # The replies of some jobs may have come before `watch`.
        yield from awaited.take_known()
        others = deque(each.id for each in awaited.handles() if not _is_told(reader, each._state))
        yield from self._read_ends(awaited, list(others))
        while awaited:
            yield from self._follow(awaited, ended, others)
            self._tell(ended.follower)
            left = awaited.until(time.monotonic()) - time.monotonic()
            if left <= 0:
                yield from self._read_ends(awaited, awaited.ids)
                if awaited:
                    raise awaited.late()
            elif reader.wait(lambda: bool(ended), min(left, SILENCE_S, awaited.seconds_left(time.monotonic()))):
                for job_id in ended.take():
                    if ended.unfollow(job_id):
                        reader.unsubscribe(job_id, ended)
                    yield from awaited.take(job_id)
            elif not awaited.seconds_left(time.monotonic()):
                for handle in awaited.overdue(time.monotonic()):
                    yield from awaited.settle([(handle.id, handle._look())])
            elif found := list(self._read_ends(awaited, awaited.sample(RECORDS_AT_ONCE))):
                # Replies were lost, and those of other jobs may be lost, too.
                reader.catch_up()
                yield from found

    def _follow(self, awaited: Awaited[JobHandle], ended: EndedJobs, others: deque[str]) -> Iterator[JobHandle]:
        """Reads the event streams of jobs without a reply; yields those that have ended meanwhile."""
        while others and len(ended.followed) < MOST_FOLLOWED:
            job_id = others.popleft()
            if job_id in awaited:
                ended.follow(job_id)
                self._reader.attach(job_id, 0, ended)
                found = awaited.settle([(job_id, self._broker.job_record(job_id, subscribe=True))])
                if found and ended.unfollow(job_id):
                    self._reader.unsubscribe(job_id, ended)
                yield from found

    def _tell(self, follower: Follower) -> None:
        """Tells the broker which jobs of other processes this client waits for."""
        now = time.monotonic()
        if due := follower.due(now):
            self._broker.follow(due, follower.id, FOLLOW_TTL_MS)
            follower.told(due, now)

    @contextmanager
    def _following(self, follower: Follower) -> Iterator[None]:
        """Tells the broker at the end of the block that this client waits no longer."""
        try:
            yield
        except BrokerUnavailable:
            # What the broker was told lapses. Another call would wait for the broker again.
            follower.take_told()
            raise
        finally:
            with suppress(PenstockError):
                if told := follower.take_told():
                    self._broker.unfollow(told, follower.id)

    def _read_ends(self, awaited: Awaited[JobHandle], job_ids: Sequence[str]) -> Iterator[JobHandle]:
        for start in range(0, len(job_ids), RECORDS_AT_ONCE):
            part = job_ids[start : start + RECORDS_AT_ONCE]
            yield from awaited.settle(zip(part, self._broker.job_records(part), strict=True))

    def report_quality(self, job: str | JobHandle, quality: float) -> bool:
        """The same as `client.job(job).rate(quality)`: for the id of an ended job, in any process."""
        return self.job(job).rate(quality)

    def close(self) -> None:
        """Closes the connections. Submitted jobs go on. A later call that needs the broker raises ClientUnusable."""
        if self._is_closed:
            return
        self._is_closed = True
        broker, reader = self._broker, self._reader
        self._broker = self._reader = CLOSED
        reader.close()
        broker.close()
        if self._cached is not None:
            self._cached.close()

    def __enter__(self) -> Client:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_spec(self, model: str, version: str) -> bytes | None:
        return self._broker.spec(model, version) if version else self._spec_of(self._broker.announced(model))

    def _connect(self, url: str, timeout_s: float, result_ttl_ms: int) -> None:
        # For the first client: redis costs more than the rest of `from penstock import Client`.
        from penstock.registry.broker.redis_streams import RedisStreams

        self._broker = RedisStreams.from_url(url, timeout_s=timeout_s, result_ttl_ms=result_ttl_ms)
        self._reader = ReplyReader(self._broker)

    def _leave_parent(self) -> None:
        self._broker.forget_connections()
        self._reader = ReplyReader(self._broker)

    def _handle(self, state: JobState) -> JobHandle:
        # For each submit: a list and its only element would take longer.
        return JobHandle(self, state)

    def _handles(self, states: Iterable[JobState]) -> list[JobHandle]:
        return [JobHandle(self, state) for state in states]


class JobHandle(HandleCore):
    """One job: `id`, `tenant`, and how it ends."""

    __slots__ = ()
    _client: Client

    def status(self) -> JobStatus:
        """queued, running, completed, failed, cancelled, expired or dead.

        Raises JobLost, UnknownJob, or ResultGone after the retention of results.
        """
        return self._state.status(self._state.record or self._read_record())

    def result(self, timeout: float | None = None) -> dict[str, Array]:
        """The outputs by name, once the job has ended. A second call costs nothing.

        timeout: seconds. None waits until the job has ended. Raises the JobFailed that ended the job, JobLost,
        ResultTimeout, ResultGone, UnknownJob, or BrokerUnavailable.
        """
        timeout, state = checked_timeout(timeout), self._state
        if state.record is None:
            self._find_end(timeout)
        return state.outputs()

    def info(self, timeout: float | None = None) -> JobInfo:
        """The status, version, worker, batch and timings of the job, once it has ended in any way.

        timeout: as for `result`. Raises JobLost, ResultTimeout, ResultGone, UnknownJob, or BrokerUnavailable.
        """
        timeout, state = checked_timeout(timeout), self._state
        if state.record is None:
            self._find_end(timeout)
        return state.opened().info()

    def stream(self, after: int = 0, timeout: float | None = None) -> Iterator[JobEvent]:
        """The job's events after sequence number `after`, as they happen. The terminal event is the last one.

        timeout: the longest time between two events, in seconds, and before the first. None waits until the job has
        ended. Raises ResultTimeout; the job goes on, and `stream(after=event.seq)` continues.

        It works at any time, also after the end of the job, and in any process. A failed job does not raise: its
        failure is the last event. Otherwise it raises as `result` does.
        """
        if (outcome := self._state.outcome) is not None and not self._state.was_queued:
            yield from unqueued_events(outcome, after)
            return
        reader, silence = self._client._reader, Silence(timeout)
        merger = EventMerger(self.id, self.tenant, self._client._builder.keyring, after)
        subscription = reader.subscribe(self.id, after)
        try:
            with self._client._following(follower := self._follower()):
                yield from self._events(merger, silence, subscription, follower)
        finally:
            reader.unsubscribe(self.id, subscription)

    def _events(
        self, merger: EventMerger, silence: Silence, subscription: deque[StreamEntry], follower: Follower
    ) -> Iterator[JobEvent]:
        reader = self._client._reader
        while not merger.is_over:
            record = self._read_record(subscribe=True)
            if record.state is State.QUEUED:
                self._client._tell(follower)
            found = merger.entries(reader.read_now(self.id, merger.last))
            for event in chain(found, merger.record(record)):
                yield event
                silence.broken()
            while not (merger.is_over or merger.awaits_record or follower.is_due(time.monotonic())):
                left = silence.left(time.monotonic(), merger.last)
                if not reader.wait(lambda: bool(subscription), self._state.seconds_left(min(left, SILENCE_S))):
                    break
                for event in merger.entries(_drained(subscription)):
                    yield event
                    silence.broken()
        follower.drop(self.id)

    def cancel(self) -> CancelStatus:
        """Cancels the job as far as that is possible, and returns what it did.

        "cancelled": the job will never run. "requested": a worker has it and is told to stop; it may still end with a
        result. "too_late": it had ended in another way. Raises JobLost, UnknownJob or ResultGone.
        """
        client, state = self._client, self._state
        if not state.was_queued:
            return "too_late"
        sealed = cancellation(state.id, state.tenant, client._builder.keyring)
        return state.cancelled(client._broker.cancel(state.id, state.tenant, sealed))

    def rate(self, quality: float, timeout: float | None = None) -> bool:
        """Reports the quality of the answer to a running A/B experiment or rollout; returns whether it counts.

        quality: a finite number, in the unit of your metric. False: no experiment divided the job, or the job was rated
        before. timeout: as for `result`. Raises InvalidInput for a job that failed, and as `info` does.
        """
        timeout, state = checked_timeout(timeout), self._state
        if state.record is None:
            self._find_end(timeout)
        arm = state.arm(quality)
        if arm is None:
            return False
        rating = self._client._broker.rate(state.id, arm.experiment, arm.version, quality)
        return state.rated(rating)

    def _read_record(self, *, subscribe: bool = False) -> JobRecord:
        return self._state.accept(self._look(subscribe=subscribe))

    def _look(self, *, subscribe: bool = False) -> JobRecord | None:
        """The record as it is now. A job whose time has passed, and that no worker holds, is ended."""
        broker, state = self._client._broker, self._state
        record = broker.job_record(state.id, subscribe=subscribe)
        if record is not None and state.is_overdue(record):
            sealed = expiry(state.id, state.tenant, self._client._builder.keyring)
            is_ended = broker.expire(state.id, state.tenant, sealed)
            record = JobRecord(State.EXPIRED, "", sealed) if is_ended else broker.job_record(state.id)
        return record

    def _find_end(self, timeout: float | None) -> None:
        """Waits until the end is known."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._state.awaits_reply:
            self._wait_for_end(deadline, timeout, None)
            return
        self._read_record()
        with self._client._following(follower := self._follower()):
            self._wait_for_end(deadline, timeout, follower)
            follower.drop(self.id)

    def _follower(self) -> Follower:
        """The wait for this job. Its submitter needs none: it cancels the job itself."""
        return Follower(() if self._state.awaits_reply else (self.id,))

    def _wait_for_end(self, deadline: float | None, timeout: float | None, follower: Follower | None) -> None:
        state, reader = self._state, self._client._reader
        while state.record is None:
            left = _LONGEST_WATCH_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                if self._read_record().state is State.QUEUED and state.record is None:
                    raise result_timeout(timeout)
            elif not _is_told(reader, state):
                # In a forked child, also a job of the parent: the parent gets the reply.
                if follower is not None:
                    self._client._tell(follower)
                self._watch(min(left, _LONGEST_WATCH_S))
            elif reader.wait(lambda: not state.awaits_reply, state.seconds_left(min(left, SILENCE_S))):
                continue
            elif self._read_record().state not in (State.QUEUED, State.EXPIRED):
                # The reply was lost, and those of other jobs may be lost, too. An expired job's may not have been sent.
                reader.catch_up()

    def _watch(self, seconds: float) -> None:
        """Waits for the end in the job's event stream: no reply comes to this reader."""
        reader = self._client._reader
        events = reader.subscribe(self.id, 0)
        try:
            record = self._read_record(subscribe=True)
            seconds = self._state.seconds_left(seconds)
            if record.state is State.QUEUED and reader.wait(lambda: any(map(is_end, tuple(events))), seconds):
                self._read_record()
        finally:
            reader.unsubscribe(self.id, events)


def _is_told(reader: ReplyReader, state: JobState) -> bool:
    """Whether a reply about the job will come to this reader."""
    return state.awaits_reply and reader.expects(state.id)


def _drained(entries: deque[Any]) -> list[Any]:
    taken = []
    while entries:
        taken.append(entries.popleft())
    return taken
