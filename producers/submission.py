"""Jobs on their way to the broker, without I/O: chunks for one call, receipts, the pause before the next try.

    publications -> chunks -> [client publishes] -> receipts -> accepted | refused: pause, or error

Both clients run `submit_many` and `map` through SubmitRun. They differ only in how they publish and sleep.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import repeat
from math import inf
from types import TracebackType
from typing import Final, Generic, NamedTuple, Self, TypeVar

from penstock.producers.job_state import HandleCore
from penstock.registry.broker.base import Publication, Receipt
from penstock.registry.envelope import Keyring, RequestContext
from penstock.registry.errors import (
    BrokerUnavailable,
    IdempotencyConflict,
    InvalidInput,
    QueueFull,
    Rejected,
    described,
)
from penstock.registry.unrun import CANCELLED, EXPIRED, unrun_result

__all__ = [
    "HAVE_JOB",
    "ItemIndex",
    "SubmitRun",
    "accepted",
    "cancellation",
    "chunks",
    "expiry",
    "is_elsewhere",
    "log_accepted",
    "logger",
    "with_keys",
]

_CHUNK_JOBS: Final = 256
_CHUNK_BYTES: Final = 1024 * 1024
_LONGEST_PAUSE_S: Final = 1.0
"""A client that waits for room in a queue tries again after this time at the latest."""
_NO_ROOM: Final = {
    "full": "The queue is full",
    "tenant-full": "The tenant has reached its limit of jobs in flight",
    "memory": "The broker is short of memory",
}
HAVE_JOB: Final = frozenset({"accepted", "exists", "known"})
"""The outcomes of a publication that has a job, be it an earlier one."""
logger = logging.getLogger("penstock.client")

Item = TypeVar("Item")
Handle = TypeVar("Handle", bound=HandleCore)


def cancellation(job_id: str, tenant: str, keyring: Keyring) -> bytes:
    """The sealed result of a job that its producer cancelled."""
    return unrun_result(job_id, RequestContext(tenant), CANCELLED, keyring)


def expiry(job_id: str, tenant: str, keyring: Keyring) -> bytes:
    """The sealed result of a job whose time has passed."""
    return unrun_result(job_id, RequestContext(tenant), EXPIRED, keyring)


def accepted(receipt: Receipt, model: str) -> str:
    """The id of the job that answers for a publication. Raises QueueFull or IdempotencyConflict."""
    if receipt.outcome in HAVE_JOB:
        return receipt.job_id
    if receipt.outcome == "conflict":
        raise _conflict()
    reason = _NO_ROOM.get(receipt.outcome, "The queue is full")
    raise QueueFull(
        f"{reason} (model {model}). Expected a retry after {receipt.retry_after_s:.2f} s", receipt.retry_after_s
    )


def is_elsewhere(receipt: Receipt, job_id: str) -> bool:
    """Whether a publication with this id has a job whose reply does not come to its client."""
    return receipt.outcome == "exists" or (receipt.outcome == "known" and receipt.job_id != job_id)


def _conflict() -> IdempotencyConflict:
    return IdempotencyConflict(
        "The idempotency key belongs to a job with another version or other inputs. "
        "Expected the same inputs, or a new key"
    )


def chunks(jobs: Sequence[Publication]) -> Iterator[Sequence[Publication]]:
    """Cuts jobs of one slot into script calls, each short enough for the server."""
    start = size = 0
    for index, job in enumerate(jobs):
        size += len(job.sealed)
        if index > start and (size > _CHUNK_BYTES or index - start == _CHUNK_JOBS):
            yield jobs[start:index]
            start, size = index, len(job.sealed)
    if start < len(jobs):
        yield jobs[start:]


def with_keys(items: Iterable[Item], keys: Iterable[str | None] | None) -> Iterator[tuple[Item, str | None]]:
    """Each item with its idempotency key. Raises InvalidInput unless there is one key for each item."""
    try:
        iter(items)
    except TypeError:
        raise InvalidInput(f"The items are {described(items)}. Expected one for each job") from None
    if keys is None:
        yield from zip(items, repeat(None), strict=False)
        return
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise InvalidInput(f"idempotency_keys is a {type(keys).__name__}. Expected one key for each item")
    if isinstance(items, Sized) and isinstance(keys, Sized) and len(items) != len(keys):
        raise InvalidInput(f"{len(keys)} idempotency keys for {len(items)} items. Expected one key for each item")
    rest = iter(keys)
    for index, item in enumerate(items):
        try:
            key = next(rest)
        except StopIteration:
            raise InvalidInput(f"No idempotency key for item {index}. Expected one key for each item") from None
        yield item, key
    for _ in rest:
        raise InvalidInput("More idempotency keys than items. Expected one key for each item")


class ItemIndex(NamedTuple):
    """The index of a job's item, for errors: items that were refused have no job.

    first: the index of the first item. refused: the indexes of refused items.
    """

    first: int = 0
    refused: Collection[int] = ()

    def __call__(self, position: int) -> int:
        """The index of the item of the job at `position`."""
        index = self.first + position
        for refused in sorted(self.refused):
            index += refused <= index
        return index


_EVERY_ITEM: Final = ItemIndex()


class SubmitRun(Generic[Handle]):
    """One `submit_many` under way. The client publishes each chunk and hands its receipts to `settle`.

    track: makes the handles of jobs before they are published. find: the handle of a job by its id and tenant.
    index_of: the index of a job's item, for errors. deadline: until when to wait for room.
    answered: the handles of jobs that need not be published, by their position among all jobs of the run.
    untaken: takes why items have no job, by their index: conflicts, which are not raised then, and QueueFull, which is.
    stranded: takes the handles of all jobs that the broker has, or may have, where the run ends by an error.
    """

    def __init__(
        self,
        model: str,
        jobs: Sequence[Publication],
        track: Callable[[Sequence[Publication]], list[Handle]],
        find: Callable[[str, str], Handle],
        *,
        index_of: ItemIndex = _EVERY_ITEM,
        deadline: float = inf,
        answered: Mapping[int, Handle] | None = None,
        untaken: dict[int, Rejected] | None = None,
        stranded: list[Handle] | None = None,
    ) -> None:
        self._model = model
        self._untaken = untaken
        self._stranded = stranded
        self._answered = answered or {}
        self._positions: Sequence[int] = range(len(jobs))
        """Of the jobs to publish, among all jobs."""
        if self._answered:
            self._positions = [position for position in self._positions if position not in self._answered]
            jobs = [jobs[position] for position in self._positions]
        self._chunks = chunks(jobs)
        self._track = track
        self._find = find
        self._index_of = index_of
        self._deadline = deadline
        self._handles: list[Handle] = []
        self._waiting: Sequence[Publication] = ()
        """The jobs of the current chunk that are not accepted yet."""
        self._places: Sequence[int] = ()
        """The place of each of them among the published jobs."""
        self._conflicts: set[int] = set()
        """The places of the jobs that will not be accepted."""

    @property
    def handles(self) -> list[Handle]:
        """The handles of the accepted jobs, in the order of the items."""
        outside = self._conflicts.union(self._places)
        if not self._answered:
            return [handle for place, handle in enumerate(self._handles) if place not in outside]
        found = dict(self._answered)
        for place, handle in enumerate(self._handles):
            if place not in outside:
                found[self._positions[place]] = handle
        return [found[position] for position in sorted(found)]

    def next_chunk(self) -> Sequence[Publication]:
        """The jobs to publish now. Empty when every job is accepted."""
        if not self._waiting and (chunk := next(self._chunks, None)):
            self._waiting = chunk
            self._places = range(len(self._handles), len(self._handles) + len(chunk))
            # A reply may arrive before the call that publishes returns.
            self._handles += self._track(chunk)
        return self._waiting

    def settle(self, receipts: Sequence[Receipt], now: float) -> float:
        """Takes the receipts of the last chunk; returns the seconds to wait before the next one.

        Raises IdempotencyConflict, and QueueFull when the wait would pass the deadline. Both carry the accepted jobs.
        """
        waiting, places = self._waiting, self._places
        self._waiting = self._places = ()
        if logger.isEnabledFor(logging.DEBUG):
            log_accepted(receipts, self._model)
        if len(receipts) == len(waiting) and all([receipt.outcome == "accepted" for receipt in receipts]):
            return 0.0
        refused: list[tuple[int, Publication, Receipt]] = []
        for place, job, receipt in zip(places, waiting, receipts, strict=True):
            if is_elsewhere(receipt, job.job_id):
                self._handles[place] = self._find(receipt.job_id, job.tenant)
            elif receipt.outcome == "conflict" and self._untaken is not None:
                self._untaken[self._index(place)] = _conflict()
                self._conflicts.add(place)
            elif receipt.outcome not in HAVE_JOB:
                refused.append((place, job, receipt))
        self._waiting, self._places = [job for _, job, _ in refused], [place for place, _, _ in refused]
        return self._pause_s([receipt for _, _, receipt in refused], now) if refused else 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Puts the handles into the error of a call without an answer, and where they were asked for."""
        if error is not None and self._stranded is not None:
            self._stranded += [*self.handles, *(self._handles[place] for place in self._places)]
        if isinstance(error, BrokerUnavailable):
            error.accepted = self.handles
            error.in_doubt = in_doubt = [self._handles[place] for place in self._places]
            for handle in in_doubt:
                handle._state.doubt()

    def _pause_s(self, refused: Sequence[Receipt], now: float) -> float:
        pause_s = 0.0
        for place, receipt in zip(self._places, refused, strict=True):
            try:
                accepted(receipt, self._model)
            except IdempotencyConflict as conflict:
                error = IdempotencyConflict(f"Item {self._index(place)}: {conflict}")
                error.accepted = self.handles
                raise error from None
            except QueueFull as full:
                pause_s = pause_s or min(full.retry_after_s, _LONGEST_PAUSE_S)
                if now + pause_s > self._deadline:
                    full.accepted = self.handles
                    self._note_untaken(full)
                    raise
        return pause_s

    def _note_untaken(self, full: QueueFull) -> None:
        if self._untaken is not None:
            later = range(len(self._handles), len(self._positions))
            self._untaken |= {self._index(place): full for place in (*self._places, *later)}

    def _index(self, place: int) -> int:
        """The index of the item of a published job."""
        return self._index_of(self._positions[place])


def log_accepted(receipts: Sequence[Receipt], model: str) -> None:
    """One line for each accepted job, at DEBUG. Ask `logger.isEnabledFor` first: most programs log no job."""
    for receipt in receipts:
        if receipt.outcome in HAVE_JOB:
            logger.debug("job submitted", extra={"job_id": receipt.job_id, "model": model})
