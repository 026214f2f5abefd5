"""One batch in one process: lines -> jobs at low priority -> ended lines. A restart goes on where the files end.

    lines not done --> chunks --> prepare --> pay --> submit_items --> answers --> Journal
                          |          |         '-- a limit of the caller is spent: the lines wait
                          |          '-- refused: that line fails
                          '-- at most `max_outstanding` jobs at a time; a full queue makes the chunk wait

The job of a line has an id that follows from the batch, the number of the line, and its round. After a kill -9 the next
process submits the lines without an answer again, and the broker accepts no job that it already has. A job lives for
`queue.job_ttl_s`, a batch up to a week: where a job expires, its line has its next round, which is on the disk before
that job is submitted. A cancelled or expired batch cancels its jobs, those of an earlier process included; lines that
have no answer then are in the error file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Literal, NamedTuple, TypeAlias

from penstock.producers.async_client import AsyncJobHandle
from penstock.producers.gateway.batches.journal import EndedLine, Journal
from penstock.producers.gateway.batches.lines import Line, LineRequest, custom_id_of, open_line
from penstock.producers.gateway.callers import Entry
from penstock.producers.gateway.fleet import Answered, GatewayClient
from penstock.registry.admission import SubmitOptions
from penstock.registry.broker.meters import Lines
from penstock.registry.errors import (
    BadApiKey,
    Cancelled,
    Expired,
    InvalidInput,
    JobLost,
    PenstockError,
    QueueFull,
    RateLimited,
    Rejected,
    ResultGone,
    Retryable,
    Unauthorized,
    UnknownJob,
)
from penstock.registry.queues import DerivedIds
from penstock.registry.tensors import Array

__all__ = ["BatchRun", "Endpoint", "KeepRounds", "LineJob", "Resume", "StopCode", "WriteError"]

_CHUNK_LINES: Final = 64
"""Of one submit: enough that a line costs a small part of a round trip, few enough that requests need not wait."""
_ROOM_TIMEOUT_S: Final = 1.0
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
_MOST_LOSSES: Final = 3
_CANCELS_AT_ONCE: Final = 64
_STOP_GRACE_S: Final = 5.0
"""How long a stopped run waits for jobs that have begun."""
_WAITS: Final = (Retryable, Unauthorized)
"""The broker is away, no worker has the model or the keys: the line waits, until the batch expires."""
_GONE: Final = (JobLost, ResultGone, UnknownJob)
"""The broker does not have the job or its result any more: the line is submitted again."""
StopCode = Literal["batch_cancelled", "batch_expired"]
_STOPPED: Final[Mapping[StopCode, str]] = {
    "batch_cancelled": "This request was not executed before the batch was cancelled",
    "batch_expired": "This request could not be executed before the completion window expired",
}


class LineJob(NamedTuple):
    """The job of a line. write: its outputs, version and id -> the JSON of the answer."""

    model: str
    inputs: Mapping[str, object]
    version: str | None
    outputs: tuple[str, ...]
    write: Callable[[Mapping[str, Array], str, str], bytes]
    tokens: int = 0
    """Of the inputs, where they are counted."""


Endpoint: TypeAlias = Callable[[bytes], Awaitable[LineJob]]
"""The body of a request -> its job. Raises as a request would."""
Resume: TypeAlias = Callable[[str, str], Awaitable[Entry]]
"""The id of a key and a tenant: the present task acts for that caller. Raises BadApiKey and RegistryUnavailable."""
KeepRounds: TypeAlias = Callable[[Mapping[int, int]], Awaitable[None]]
"""Writes the rounds of lines down, by their numbers. Raises BrokerUnavailable, and OSError of the disk."""
WriteError: TypeAlias = Callable[[Exception], tuple[int, bytes]]
"""An error -> the status and the body that a request would get."""


@dataclass(slots=True)
class _Pending:
    line: Line
    custom_id: str
    job: LineJob
    round: int = 0
    """How many of its jobs have expired."""
    losses: int = 0
    is_paid: bool = False
    """Whether it was charged on the limits of the caller."""


@dataclass(slots=True)
class BatchRun:
    """The run of one batch. made_at: when it was created, in Unix seconds. max_outstanding: jobs at a time.
    resume: has the task act for the batch's caller. rounds: those of the lines that are past their first one.
    stopped: why nothing is submitted. has_begun: whether an earlier process may have left jobs of it."""

    client: GatewayClient
    batch_id: str
    made_at: int
    resume: Callable[[], Awaitable[Entry]]
    url: str
    endpoint: Endpoint
    write_error: WriteError
    journal: Journal
    max_outstanding: int
    rounds: dict[int, int]
    keep_rounds: KeepRounds
    stopped: StopCode | None = None
    has_begun: bool = False
    waiting_groups: int = 0
    """Groups of lines that wait for room in a limit."""
    _handles: dict[str, AsyncJobHandle] = field(default_factory=dict)
    """The jobs that have not ended."""
    _charged: frozenset[int] = frozenset()
    """The lines that an earlier process has charged on the limits of the caller."""
    _ids: dict[tuple[str, int], DerivedIds] = field(default_factory=dict)
    """Those of the jobs, by model and round."""
    _limits: set[asyncio.Timeout] = field(default_factory=set)
    """How long each chunk waits for its jobs: without a limit, until the run is stopped."""

    @property
    def is_stopped(self) -> bool:
        """Whether nothing more is submitted."""
        return self.stopped is not None

    async def run(self, lines: Iterable[Line]) -> None:
        """Runs all lines that are not done. Ends when each line has ended. Raises OSError of the disk."""
        self._charged = await self._read_charged()
        left = (line for line in lines if line.number not in self.journal.done)
        chunk_lines = min(_CHUNK_LINES, self.max_outstanding)
        places = asyncio.Semaphore(max(1, self.max_outstanding // chunk_lines))
        async with asyncio.TaskGroup() as tasks:
            for place, chunk in enumerate(_chunks(left, chunk_lines)):
                # An earlier process began no line behind these: its chunks had as many places.
                may_have_jobs = self.has_begun and place * chunk_lines < self.max_outstanding
                await places.acquire()
                tasks.create_task(self._run_chunk(chunk, places, may_have_jobs=may_have_jobs))

    async def stop(self, code: StopCode) -> None:
        """Begins to end the run: nothing more is submitted, and jobs are cancelled.

        A job that a worker holds may still end, and is awaited for a while. The worker may be dead.
        """
        self.stopped = code
        until = asyncio.get_running_loop().time() + _STOP_GRACE_S
        for limit in self._limits:
            if limit.when() is None:
                limit.reschedule(until)
        handles = iter(list(self._handles.values()))
        while part := list(islice(handles, _CANCELS_AT_ONCE)):
            # A job that cannot be cancelled now ends by itself.
            await asyncio.gather(*(handle.cancel() for handle in part), return_exceptions=True)

    async def _run_chunk(self, chunk: Sequence[Line], places: asyncio.Semaphore, *, may_have_jobs: bool) -> None:
        try:
            ended: list[EndedLine] = []
            pending = await self._prepare_all(chunk, ended)
            if may_have_jobs:
                unrun = {each.number for each in ended if each.code in _STOPPED}
                await self._cancel_left([line for line in chunk if line.number in unrun])
            self.journal.write(ended)
            for group in _groups(pending):
                await self._run_group(group)
        finally:
            places.release()

    async def _prepare_all(self, chunk: Sequence[Line], ended: list[EndedLine]) -> list[_Pending]:
        """The jobs of the lines; those that have ended without one are added to `ended`."""
        refusal: PenstockError | None = None
        try:
            await self._enter()
        except PenstockError as error:
            refusal = error
        found: list[_Pending] = []
        for line in chunk:
            if self.is_stopped:
                ended.append(self._unrun(line.number, custom_id_of(line)))
                continue
            try:
                request = open_line(line, self.url)
            except InvalidInput as error:
                text = str(error)
                ended.append(EndedLine(line.number, custom_id_of(line), 0, "", None, "invalid_request", text))
                continue
            try:
                if refusal is not None:
                    raise refusal
                if (job := await self._job_of(request)) is None:
                    ended.append(self._unrun(line.number, request.custom_id))
                else:
                    is_paid = line.number in self._charged
                    found.append(
                        _Pending(line, request.custom_id, job, self.rounds.get(line.number, 0), is_paid=is_paid)
                    )
            except PenstockError as error:
                ended.append(self._failed(line.number, request.custom_id, "", error))
        return found

    async def _cancel_left(self, lines: Sequence[Line]) -> None:
        """Cancels the jobs that an earlier process may have left of lines that do not run any more.

        Those that cannot be found now end by themselves: the batch does not wait for its broker or its key.
        """
        left: list[_Pending] = []
        with suppress(PenstockError, TimeoutError):
            async with asyncio.timeout(_STOP_GRACE_S):
                await self.resume()
                for line in lines:
                    with suppress(Rejected):
                        request = open_line(line, self.url)
                        job = await self.endpoint(bytes(request.body))
                        left.append(_Pending(line, request.custom_id, job, self.rounds.get(line.number, 0)))
        await self._cancel(left)

    async def _cancel(self, group: Sequence[_Pending]) -> None:
        """Cancels the jobs of lines, as far as they have any."""
        with suppress(PenstockError):
            handles = [self.client.job(self._job_id(each)) for each in group]
            await asyncio.gather(*(handle.cancel() for handle in handles), return_exceptions=True)

    async def _read_charged(self) -> frozenset[int]:
        """None of them once the run is stopped: then no line is charged."""
        pause_s = _FIRST_PAUSE_S
        while not self.is_stopped:
            try:
                return await self.client.charged_lines(self.batch_id)
            except _WAITS:
                pause_s = await _pause(pause_s)
        return frozenset()

    async def _enter(self) -> Entry | None:
        """The present task acts for the caller of the batch. None: the run was stopped before.

        Raises BadApiKey: a key that was revoked does not come back.
        """
        pause_s = _FIRST_PAUSE_S
        while not self.is_stopped:
            try:
                return await self.resume()
            except BadApiKey:
                raise
            except _WAITS:
                pause_s = await _pause(pause_s)
        return None

    async def _job_of(self, request: LineRequest) -> LineJob | None:
        """None: the run was stopped before. Raises as a request would."""
        pause_s = _FIRST_PAUSE_S
        while not self.is_stopped:
            try:
                return await self.endpoint(bytes(request.body))
            except BadApiKey:
                raise
            except _WAITS:
                pause_s = await _pause(pause_s)
                await self._enter()
        return None

    async def _run_group(self, group: list[_Pending]) -> None:
        """Runs the lines of one group to their ends. Waits as long as the broker is away or a limit is spent."""
        ended: list[EndedLine] = []
        pause_s = _FIRST_PAUSE_S
        group.sort(key=lambda each: not each.is_paid)
        while group and not self.is_stopped:
            try:
                await self._keep_rounds_of(group)
                if not (count := await self._pay(group)):
                    # The run was stopped meanwhile.
                    continue
                group = [*await self._turn(group[:count], ended), *group[count:]]
                self.journal.write(ended)
                ended, pause_s = [], _FIRST_PAUSE_S
            except QueueFull as full:
                accepted = [handle for handle in full.accepted if isinstance(handle, AsyncJobHandle)]
                self._handles |= {handle.id: handle for handle in accepted}
                if self.stopped:
                    await self.stop(self.stopped)
            except RateLimited as spent:
                self.waiting_groups += 1
                try:
                    await asyncio.sleep(min(_LONGEST_PAUSE_S, spent.retry_after_s))
                finally:
                    self.waiting_groups -= 1
            except BadApiKey as error:
                ended += [self._failed(each.line.number, each.custom_id, "", error) for each in group]
                group = []
            except _WAITS:
                pause_s = await _pause(pause_s)
        # The broker may have accepted them in a call that failed, or in an earlier process.
        await self._cancel(group)
        self.journal.write([*ended, *(self._unrun(each.line.number, each.custom_id) for each in group)])

    async def _keep_rounds_of(self, group: Sequence[_Pending]) -> None:
        """A line has no job in a round that the next process would not know. Raises BrokerUnavailable and OSError."""
        known = self.rounds
        if new := {each.line.number: each.round for each in group if each.round != known.get(each.line.number, 0)}:
            await self.keep_rounds(new)
            known |= new

    async def _pay(self, group: Sequence[_Pending]) -> int:
        """How many lines of a group may run now; 0: none, as the run was stopped. Those not paid for are charged.

        Raises RateLimited when there is no room for any. A key may have been revoked since: raises BadApiKey.
        """
        entry = await self._enter()
        if entry is None:
            return 0
        if paid := sum(each.is_paid for each in group):
            # Lost lines and those of an earlier process, which stand before the others.
            return paid
        lines = Lines(self.batch_id, [each.line.number for each in group])
        count = await entry.spend_for_lines([each.job.tokens for each in group], lines)
        for each in group[:count]:
            each.is_paid = True
        return count

    async def _turn(self, group: Sequence[_Pending], ended: list[EndedLine]) -> list[_Pending]:
        """Submits lines and waits for their ends. Returns those whose jobs have expired, or the broker has lost.

        Raises QueueFull, Retryable and Unauthorized; the same call finds the accepted jobs again.
        """
        refused: dict[int, InvalidInput] = {}
        try:
            handles = await self._submit(group, refused)
        except (QueueFull, *_WAITS):
            raise
        except PenstockError as error:
            ended += [self._failed(each.line.number, each.custom_id, "", error) for each in group]
            return []
        accepted = group if not refused else [each for place, each in enumerate(group) if place not in refused]
        self._handles |= {handle.id: handle for handle in handles}
        results: dict[str, Answered] = {}
        try:
            await self._await_ends(handles, results)
        finally:
            for handle in handles:
                self._handles.pop(handle.id, None)
        for place, refusal in refused.items():
            each = group[place]
            text = InvalidInput(str(refusal).removeprefix(f"Item {place}: "))
            ended.append(self._failed(each.line.number, each.custom_id, "", text))
        left = []
        for each, handle in zip(accepted, handles, strict=True):
            result = results.get(handle.id)
            if isinstance(result, _GONE) and each.losses < _MOST_LOSSES:
                each.losses += 1
                left.append(each)
            elif isinstance(result, Expired) and not self.is_stopped:
                each.round += 1
                left.append(each)
            else:
                ended.append(self._ended(each, handle.id, result))
        return left

    async def _submit(self, group: Sequence[_Pending], refused: dict[int, InvalidInput]) -> list[AsyncJobHandle]:
        job = group[0].job
        tokens = [each.job.tokens for each in group]
        options = SubmitOptions(
            "low", None, None, job.version, job.outputs, prompt_tokens=tokens if any(tokens) else ()
        )
        job_ids = [self._job_id(each) for each in group]
        inputs = [each.job.inputs for each in group]
        return await self.client.submit_items(job.model, inputs, job_ids, options, refused, _ROOM_TIMEOUT_S)

    def _job_id(self, each: _Pending) -> str:
        """Of the job of a line in its present round."""
        ids = self._ids.get((each.job.model, each.round))
        if ids is None:
            # No id of a batch has a dot.
            name = f"{self.batch_id}.{each.round}" if each.round else self.batch_id
            ids = self._ids[each.job.model, each.round] = DerivedIds(each.job.model, name, self.made_at * 1000)
        return ids.of(each.line.number)

    async def _await_ends(self, handles: Sequence[AsyncJobHandle], results: dict[str, Answered]) -> None:
        """Adds how the jobs ended, by id; without those that a stopped run does not await any longer."""
        try:
            async with asyncio.timeout(None) as limit:
                self._limits.add(limit)
                try:
                    if self.stopped is not None:
                        await self.stop(self.stopped)
                    await self.client.await_answers(handles, results)
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            self.client.add_known(handles, results)

    def _ended(self, each: _Pending, job_id: str, result: Answered | None) -> EndedLine:
        number, custom_id = each.line.number, each.custom_id
        if result is None or (isinstance(result, (Cancelled, Expired)) and self.is_stopped):
            return self._unrun(number, custom_id)
        if isinstance(result, Exception):
            return self._failed(number, custom_id, job_id, result)
        outputs, version = result
        try:
            body = each.job.write(outputs, version, job_id)
        except PenstockError as error:
            return self._failed(number, custom_id, job_id, error)
        return EndedLine(number, custom_id, 200, job_id, body)

    def _failed(self, number: int, custom_id: str, job_id: str, error: Exception) -> EndedLine:
        status, body = self.write_error(error)
        return EndedLine(number, custom_id, status, job_id, body)

    def _unrun(self, number: int, custom_id: str | None) -> EndedLine:
        code: StopCode = self.stopped or "batch_cancelled"
        return EndedLine(number, custom_id, 0, "", None, code, _STOPPED[code])


async def _pause(pause_s: float) -> float:
    """Waits, and returns the next pause."""
    await asyncio.sleep(pause_s)
    return min(_LONGEST_PAUSE_S, 2 * pause_s)


def _chunks(lines: Iterable[Line], size: int) -> Iterator[list[Line]]:
    rest = iter(lines)
    while chunk := list(islice(rest, size)):
        yield chunk


def _groups(pending: Sequence[_Pending]) -> Iterator[list[_Pending]]:
    """Lines of one model, version and outputs: they are submitted together."""
    groups: dict[tuple[object, ...], list[_Pending]] = {}
    for each in pending:
        job = each.job
        groups.setdefault((job.model, job.version, job.outputs), []).append(each)
    yield from groups.values()
