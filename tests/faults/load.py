"""Jobs for fault tests: published while things break, and everything that was seen of them afterwards.

    Load.running() -- submits, notes what was offered and accepted --> broker --> recorder model -> ledger
    Load.history() <-- every reply entry, every record, every forward -----------'

Each load is a tenant of its own and reads no reply before its history is taken: a client trims what it has read.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from producers import Client, JobHandle
from registry.broker.redis_streams import RedisStreams
from registry.envelope import Keyring, ResultHeader, open_result
from registry.errors import BrokerUnavailable
from registry.queues import job_time_ms
from registry.tensors import decode
from tests.faults.history import Effect, History
from tests.packages import recorded_forwards
from tests.servers import RedisServer, wait_until

__all__ = ["Load"]

_UNSIGNED = Keyring.parse(None)
_NOBODYS = -1.0
_numbers = itertools.count(1)
"""Exact in float32 up to 2**24, so that a job is known by its input."""


class Load:
    """Jobs of one tenant for a recorder model; end it with `close`."""

    def __init__(self, server: RedisServer, model: str, ledger: Path, tenant: str) -> None:
        self.results: dict[float, ResultHeader] = {}
        """By job, once the history was taken: the results that are kept."""
        self._server = server
        self._model = model
        self._ledger = ledger
        self._client = Client(server.url, tenant=tenant)
        self._broker = RedisStreams.from_url(server.url)
        self._handles: dict[float, JobHandle] = {}
        self._history = History()

    @property
    def accepted(self) -> int:
        """Jobs so far whose publishing returned."""
        return len(self._history.accepted)

    def publish(self, count: int) -> None:
        """Submit `count` jobs, one by one; the broker may be away."""
        for _ in range(count):
            number = float(next(_numbers))
            self._history.offered.add(number)
            try:
                handle = self._client.submit(self._model, {"x": _row(number)})
            except BrokerUnavailable:
                continue
            self._handles[number] = handle
            self._history.accepted.add(number)

    @contextmanager
    def running(self, *, burst: int = 8, pause_s: float = 0.01) -> Iterator[None]:
        """Publishes bursts from a thread inside the block."""
        is_over = threading.Event()

        def publish_on() -> None:
            while not is_over.wait(pause_s):
                self.publish(burst)

        thread = threading.Thread(target=publish_on, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(30)

    def ended(self) -> int:
        """Accepted jobs that have a result by now."""
        standings = self._broker.standings([handle.id for handle in self._handles.values()])
        return sum(standing is not None and bool(standing.result) for standing in standings)

    def history(self, timeout_s: float = 30) -> History:
        """Waits until every job has ended, and tells everything about them as it is then."""
        wait_until(lambda: not self._queued(), timeout_s, "the queue is empty")
        history = self._history
        first, last = min(history.offered), max(history.offered)
        rows = itertools.chain.from_iterable(recorded_forwards(self._ledger))
        history.forwards = [number for number in rows if first <= number <= last]
        self._note_effects()
        return history

    def check_answers(self) -> None:
        """Every accepted job's handle gives the model's answer for its input."""
        for number, handle in self._handles.items():
            np.testing.assert_array_equal(handle.result(5)["y"], _row(number) * 2)

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
        for record in self._replies():
            header, body = open_result(record[2:], _UNSIGNED)
            if header.context.tenant != self._client.tenant:
                continue
            number = numbers.get(header.id, _NOBODYS)
            if header.error is None:
                number = float(decode(header.content, body)["y"][0, 0]) / 2
            history.effects.append(Effect(number, bytes(record[2:]), header.error is None))
            (kept,) = self._broker.standings([header.id])
            if kept is not None and kept.result:
                history.records[number] = bytes(kept.result)
                self.results[number], _ = open_result(kept.result, _UNSIGNED)

    def _replies(self) -> Iterator[bytes]:
        """Every record that a client of the model was told, in this server's memory."""
        with self._server.client() as client:
            keys = list(client.scan_iter(f"{{{self._model}}}:reply:*", count=1000))
        for entry in self._broker.read({key.decode(): "0-0" for key in keys}, 0, 1_000_000):
            yield from entry.fields[1::2]


def _row(number: float) -> np.ndarray:
    return np.array([[number, 0, 0, 0]], np.float32)
