"""One client process of a soak run: threads that submit chunks, wait for them, and check each answer.

    stdin:  one number per line: how many jobs this process may have begun. When it closes, this process ends.
    stdout: one line of JSON a second: the tally so far; `is_over` with the last one

Each chunk has one idempotency key per job, and is submitted again until the broker has accepted all of it. The reply
streams are watched on their way to the client: a job that is told of twice is repeated.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, cast

import numpy as np

from penstock import BrokerUnavailable, Client, JobHandle, ResultGone, ResultTimeout, UnknownJob
from penstock.producers.replies import ReplyReader
from penstock.registry.broker.base import ProducerEnd, StreamEntry
from tests.soak.plan import Chunk, chunks, expected, inputs

__all__ = ["Order", "ReplyCount", "SoakClient", "Tally", "main"]

_TELL_EVERY_S: Final = 1.0
_GATHER_S: Final = 20.0
_REMEMBERED: Final = 50_000
"""Jobs that have ended, and for which a second reply is still noticed."""
_PAUSE_S: Final = 0.05
_TIMEOUT_S: Final = 0.5
_LONGEST_ERROR: Final = 200
_MOST_KINDS: Final = 50


@dataclass(frozen=True, slots=True)
class Order:
    """What one process does: the jobs from `first` to `last` - 1, on so many threads."""

    url: str
    seed: int
    first: int
    last: int
    threads: int
    patience_s: float
    """A job that has not ended so long after its chunk was begun is lost."""


@dataclass(slots=True)
class Tally:
    """Jobs by what became of them, so far. Only counts: memory must not grow with the run."""

    begun: int = 0
    completed: int = 0
    wrong: int = 0
    lost: int = 0
    repeated: int = 0
    ran_again: int = 0
    """Their answer came from a second or later delivery: allowed."""
    resubmitted: int = 0
    """Submitted again because the broker did not answer: allowed."""
    errors: dict[str, int] = field(default_factory=dict)
    """The lost and the wrong ones, by their error."""
    is_over: bool = False

    @property
    def ended(self) -> int:
        """Jobs that this process is done with."""
        return self.completed + self.wrong + self.lost

    def fail(self, kind: str, jobs: int = 1) -> None:
        """More lost or wrong jobs."""
        if kind in self.errors or len(self.errors) < _MOST_KINDS:
            self.errors[kind] = self.errors.get(kind, 0) + jobs


class ReplyCount:
    """How often the reply streams told of each job. Bounded: a job is forgotten some time after its end."""

    def __init__(self) -> None:
        self.repeated = 0
        self._lock = threading.Lock()
        self._told: dict[bytes, int] = {}
        self._ended: deque[bytes] = deque()

    def tell(self, job: bytes) -> None:
        """A reply about this job came; `job` is the last part of its id."""
        with self._lock:
            self._told[job] = times = self._told.get(job, 0) + 1
            self.repeated += times == 2

    def end(self, job_ids: Sequence[str]) -> None:
        """These jobs have ended, and were looked at."""
        with self._lock:
            self._ended.extend(job_id.rpartition(".")[2].encode() for job_id in job_ids)
            while len(self._ended) > _REMEMBERED:
                self._told.pop(self._ended.popleft(), None)


class _WatchedBroker:
    """The broker's end of a client, which counts the replies that are read."""

    def __init__(self, broker: ProducerEnd, replies: ReplyCount) -> None:
        self._broker = broker
        self._replies = replies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def read(self, cursors: Mapping[str, str], *options: Any) -> list[StreamEntry]:
        """As the broker's."""
        entries = self._broker.read(cursors, *options)
        for entry in entries:
            if ":reply:" in entry.key:
                # An entry without a job only wakes the reader.
                for job in filter(None, entry.fields[::2]):
                    self._replies.tell(job)
        return entries


class SoakClient:
    """Threads over one client. `run` returns when every job has ended."""

    def __init__(self, order: Order) -> None:
        self.tally = Tally()
        self._order = order
        # Short, so that calls give up while the broker restarts: submitting again is a part of the run.
        self._client = Client(order.url, timeout_s=_TIMEOUT_S)
        self._replies = ReplyCount()
        self._client._reader = ReplyReader(cast(ProducerEnd, _WatchedBroker(self._client._broker, self._replies)))
        self._chunks = chunks(order.seed, range(order.first, order.last))
        self._next = next(self._chunks, None)
        self._changed = threading.Condition()
        self._permitted = 0

    def permit(self, jobs: int) -> None:
        """So many jobs in all may have begun."""
        with self._changed:
            self._permitted = jobs
            self._changed.notify_all()

    def run(self) -> None:
        """Every job of the order, once."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self._order.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._client.close()
        with self._changed:
            self.tally.is_over = True

    def told(self) -> str:
        """The tally as a line."""
        with self._changed:
            facts = asdict(self.tally)
        return json.dumps({**facts, "repeated": facts["repeated"] + self._replies.repeated})

    def _work(self) -> None:
        for chunk in self._permitted_chunks():
            try:
                self._run_chunk(chunk)
            except Exception as error:  # each one is a finding of the run, and the other chunks go on
                with self._changed:
                    self.tally.lost += len(chunk.rows)
                    self.tally.fail(f"{type(error).__name__}: {error}"[:_LONGEST_ERROR], len(chunk.rows))

    def _run_chunk(self, chunk: Chunk) -> None:
        until = time.monotonic() + self._order.patience_s
        handles = self._submitted(chunk, until)
        self._judge(chunk, handles, self._ends(handles, until))

    def _permitted_chunks(self) -> Iterator[Chunk]:
        while True:
            with self._changed:
                while self._next is not None and self.tally.begun + len(self._next.rows) > self._permitted:
                    self._changed.wait()
                chunk = self._next
                if chunk is None:
                    return
                self._next = next(self._chunks, None)
                self.tally.begun += len(chunk.rows)
            yield chunk

    def _submitted(self, chunk: Chunk, until: float) -> list[JobHandle]:
        """The handles of the chunk's jobs; fewer when the broker was away all the time."""
        items = [
            {"x": inputs(chunk.model, number, rows)} for number, rows in zip(chunk.numbers, chunk.rows, strict=True)
        ]
        keys = [f"soak-{number}" for number in chunk.numbers]
        options: Any = {"priority": chunk.priority, "idempotency_keys": keys}
        earlier: list[JobHandle] = []
        doubtful: list[JobHandle] = []
        while time.monotonic() < until:
            try:
                handles = self._client.submit_many(chunk.model, items, **options)
            except BrokerUnavailable as error:
                earlier += cast("Sequence[JobHandle]", error.accepted)
                doubtful += cast("Sequence[JobHandle]", error.in_doubt)
                with self._changed:
                    self.tally.resubmitted += len(items)
                time.sleep(_PAUSE_S)
                continue
            self._check_once({handle.id for handle in handles}, earlier, doubtful, until)
            return handles
        return []

    def _check_once(
        self, job_ids: set[str], earlier: Sequence[JobHandle], doubtful: Sequence[JobHandle], until: float
    ) -> None:
        """One job for each key: accepted ones are found again, and doubtful ones are found or never arrived."""
        repeated = sum(handle.id not in job_ids for handle in earlier)
        repeated += sum(self._arrived(handle, until) for handle in doubtful if handle.id not in job_ids)
        with self._changed:
            self.tally.repeated += repeated

    def _arrived(self, handle: JobHandle, until: float) -> bool:
        while time.monotonic() < until:
            try:
                handle.status()
            except (UnknownJob, ResultGone):
                # Too early for the end of a retention: the job never arrived.
                return False
            except BrokerUnavailable:
                time.sleep(_PAUSE_S)
                continue
            return True
        return False

    def _ends(self, handles: list[JobHandle], until: float) -> list[Any]:
        """The outputs or the error of each job; ResultTimeout for one that has not ended in time."""
        while (left := until - time.monotonic()) > 0:
            try:
                return self._client.gather(handles, return_exceptions=True, timeout=min(_GATHER_S, left))
            except (BrokerUnavailable, ResultTimeout):
                time.sleep(_PAUSE_S)
        return [_end_now(handle) for handle in handles]

    def _judge(self, chunk: Chunk, handles: Sequence[JobHandle], ends: Sequence[Any]) -> None:
        tally = self.tally
        for position, (number, rows) in enumerate(zip(chunk.numbers, chunk.rows, strict=True)):
            end: Any = ends[position] if position < len(ends) else BrokerUnavailable("never accepted")
            is_answer = not isinstance(end, Exception)
            is_right = is_answer and np.array_equal(end["y"], expected(chunk.model, inputs(chunk.model, number, rows)))
            ran_again = is_answer and handles[position].info().attempt > 1
            with self._changed:
                tally.completed += is_right
                tally.wrong += is_answer and not is_right
                tally.lost += not is_answer
                tally.ran_again += ran_again
                if not is_right:
                    tally.fail("another answer" if is_answer else type(end).__name__)
        self._replies.end([handle.id for handle in handles])


def _end_now(handle: JobHandle) -> Any:
    try:
        return handle.result(0)
    except Exception as error:  # the report counts it by its class
        return error


def _follow_permits(client: SoakClient) -> None:
    for line in sys.stdin:
        client.permit(int(line))
    # The soak run has gone.
    os._exit(1)


def _tell(client: SoakClient) -> None:
    sys.stdout.write(client.told() + "\n")
    sys.stdout.flush()


def main(order: str) -> None:
    """Carries out the order, which is JSON."""
    client = SoakClient(Order(**json.loads(order)))
    threading.Thread(target=_follow_permits, args=(client,), daemon=True).start()
    work = threading.Thread(target=client.run, daemon=True)
    work.start()
    while work.is_alive():
        _tell(client)
        work.join(_TELL_EVERY_S)
    _tell(client)


if __name__ == "__main__":
    main(sys.argv[1])
