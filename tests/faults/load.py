"""Jobs for fault tests: published while things break, and everything that was seen of them afterwards.

    Load.running() -- submits, notes what was offered and accepted --> broker --> recorder model -> forward_log
    Load.history() <-- every reply entry, every record, every forward -----------'

Each load is a tenant of its own, and its client reads no reply: a client trims what it has read.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from penstock import Client, JobHandle
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import Keyring, ResultHeader, open_result
from penstock.registry.errors import BrokerUnavailable, QueueFull
from penstock.registry.queues import job_time_ms
from penstock.registry.tensors import decode
from tests.faults.history import Effect, History
from tests.packages import recorded_forwards
from tests.servers import RedisServer, wait_until

__all__ = ["Load", "row"]

_UNKNOWN = -1.0
_numbers = itertools.count(1)
"""Exact in float32 up to 2**24, so that a job is known by its input."""


class Load:
    """Jobs of one tenant for a recorder model; end it with `close`.

    url: where the client publishes, if not straight to the server. timeout_s: the client's. signing_keys: as
    PENSTOCK_SIGNING_KEYS.
    """

    def __init__(
        self,
        server: RedisServer,
        model: str,
        forward_log: Path,
        tenant: str,
        *,
        url: str = "",
        timeout_s: float = 5.0,
        signing_keys: str | None = None,
    ) -> None:
        self.results: dict[float, ResultHeader] = {}
        """By job, once the history was taken: the results that are kept."""
        self.refused: set[float] = set()
        """Jobs whose publishing raised QueueFull: nothing of them may ever be seen."""
        self._server = server
        self._model = model
        self._ledger = forward_log
        self._keyring = Keyring.parse(signing_keys)
        self._client = Client(url or server.url, tenant=tenant, timeout_s=timeout_s, signing_keys=signing_keys)
        self._broker = RedisStreams.from_url(server.url)
        self._handles: dict[float, JobHandle] = {}
        self._history = History()
        self._told: list[bytes] = []
        self._cursors: dict[str, str] = {}

    @property
    def accepted(self) -> int:
        """Jobs so far whose publishing returned."""
        return len(self._history.accepted)

    def publish(self, count: int, **options: Any) -> None:
        """Submit `count` jobs, one by one; the broker may be away, or refuse. `options` are those of `submit`."""
        for _ in range(count):
            self.submit(float(next(_numbers)), **options)

    def publish_at_once(self, count: int, **options: Any) -> None:
        """Submit `count` jobs in few calls, so that no worker ends the first before the last is there."""
        numbers = [float(next(_numbers)) for _ in range(count)]
        self._history.offered.update(numbers)
        handles = self._client.submit_many(self._model, [{"x": row(number)} for number in numbers], **options)
        self._handles.update(zip(numbers, handles, strict=True))
        self._history.accepted.update(numbers)

    def submit(self, number: float, **options: Any) -> JobHandle | None:
        """Submit one job; its handle when it was accepted."""
        self._history.offered.add(number)
        try:
            handle = self._client.submit(self._model, {"x": row(number)}, **options)
        except BrokerUnavailable:
            return None
        except QueueFull:
            self.refused.add(number)
            return None
        self._handles[number] = handle
        self._history.accepted.add(number)
        return handle

    @contextmanager
    def running(self, *, burst: int = 8, pause_s: float = 0.01, **options: Any) -> Iterator[None]:
        """Publishes bursts from a thread inside the block; `options` as for `publish`."""
        is_over = threading.Event()

        def publish_on() -> None:
            while not is_over.wait(pause_s):
                self.publish(burst, **options)

        thread = threading.Thread(target=publish_on, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(30)

    def ended(self) -> int:
        """Accepted jobs that have a result by now."""
        # A copy: the thread of `running` adds to them.
        job_records = self._broker.job_records([handle.id for handle in tuple(self._handles.values())])
        return sum(job_record is not None and bool(job_record.result) for job_record in job_records)

    def await_progress(self, timeout_s: float) -> float:
        """Waits until more jobs have ended than now, and returns how many seconds that took."""
        begun, done = time.monotonic(), self.ended()
        wait_until(lambda: self.ended() > done, timeout_s, "more jobs end")
        return time.monotonic() - begun

    def await_all(self, timeout_s: float) -> float:
        """Waits until every accepted job has ended, and returns how many seconds that took."""
        begun = time.monotonic()
        wait_until(lambda: self.ended() == self.accepted, timeout_s, "all jobs end")
        return time.monotonic() - begun

    def listen(self) -> None:
        """Keeps the replies of so far: a reply stream forgets after 512 entries, or two minutes without one."""
        with self._server.client() as client:
            keys = [key.decode() for key in client.scan_iter(f"{{{self._model}}}:reply:*", count=1000)]
        cursors = {key: self._cursors.get(key, "0-0") for key in keys}
        if cursors:
            for entry in self._broker.read(cursors, 0, 1_000_000):
                self._cursors[entry.key] = entry.entry_id
                # A client that waits beside this load may have woken itself with an empty entry.
                self._told += filter(None, entry.fields[1::2])

    def history(self, timeout_s: float = 30) -> History:
        """Waits until every job has ended, and tells everything about them as it is then."""
        wait_until(lambda: not self._queued(), timeout_s, "the queue is empty")
        history = self._history
        first, last = min(history.offered), max(history.offered)
        rows = itertools.chain.from_iterable(recorded_forwards(self._ledger))
        history.forwards = [number for number in rows if first <= number <= last and number in history.offered]
        self.listen()
        self._note_effects()
        return history

    def check_answers(self, *, without: float | None = None) -> None:
        """Every accepted job's handle gives the model's answer for its input; `without` is a job that has none."""
        for number, handle in self._handles.items():
            if number == without:
                continue
            np.testing.assert_array_equal(handle.result(180)["y"], row(number) * 2)

    def check_records(self) -> None:
        """As `check_answers`, for a client that was told nothing and asks the records."""
        for number, handle in self._handles.items():
            np.testing.assert_array_equal(self._client.job(handle.id).result(180)["y"], row(number) * 2)

    def claimed_ms(self, number: float) -> float:
        """When the worker that answered the job claimed it, in unix ms."""
        result = self.results[number]
        return (job_time_ms(result.id) or 0) + result.timings.queue_ms

    def close(self) -> None:
        """Give the connections back."""
        self._client.close()
        self._broker.close()

    def _queued(self) -> int:
        return sum(depth.jobs for depth in self._broker.depths(self._model))

    def _note_effects(self) -> None:
        history, numbers = self._history, {handle.id: number for number, handle in self._handles.items()}
        history.effects.clear()
        for record in self._told:
            header, body = open_result(record[2:], self._keyring)
            if header.context.tenant != self._client.tenant:
                continue
            number = numbers.get(header.id, _UNKNOWN)
            if header.error is None:
                number = float(decode(header.content, body)["y"][0, 0]) / 2
            history.effects.append(Effect(number, bytes(record[2:]), header.error is None))
            (kept,) = self._broker.job_records([header.id])
            if kept is not None and kept.result:
                history.records[number] = bytes(kept.result)
                self.results[number], _ = open_result(kept.result, self._keyring)


def row(number: float) -> np.ndarray:
    """The input of the job that is known by `number`."""
    return np.array([[number, 0, 0, 0]], np.float32)
