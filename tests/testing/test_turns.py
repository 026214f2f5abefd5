"""The shared turns: as many forwards at a time as are allowed, no lost wake-up, no job lost between threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from penstock import Client, Retry
from penstock.registry.tensors import Array
from tests.testing.models import PATIENCE_S, declared, double, row


class Crowd:
    """A model that counts how many of its forwards run at a time, and waits until so many have met."""

    def __init__(self, meeting: int) -> None:
        self.most = 0
        self._running = 0
        self._lock = threading.Lock()
        self._met = threading.Barrier(meeting)

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
        self._met.wait(PATIENCE_S)
        with self._lock:
            self._running -= 1
        return double(inputs)


def test_forwards_run_beside_each_other_as_far_as_allowed():
    """`concurrency` forwards meet, and there is never one more, although one more thread takes turns."""
    crowd = Crowd(3)
    with Client.in_memory({"crowd": declared(crowd, concurrency=3, batching={"max_batch_size": 1})}) as client:
        jobs = client.submit_many("crowd", [row(number) for number in range(30)])
        assert [job.result(PATIENCE_S)["y"][0, 0] for job in jobs] == [2.0 * number for number in range(30)]
    assert crowd.most == 3


def test_no_job_is_lost_between_threads():
    """Many threads submit one job after the other to two models: each wake-up is heard, and each job is answered."""
    answers: list[list[float]] = []

    def ask(client: Client, model: str, first: int) -> None:
        numbers = range(first, first + 100)
        answers.append([client.submit(model, row(n)).result(PATIENCE_S)["y"][0, 0] - 2.0 * n for n in numbers])

    with Client.in_memory({"plain": double, "declared": declared(concurrency=2)}) as client:
        threads = [
            threading.Thread(target=ask, args=(client, model, 1000 * number))
            for number, model in enumerate(["plain", "declared"] * 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert answers == [[0.0] * 100] * 6


def test_a_pause_between_two_tries_ends_while_a_forward_runs():
    """A turn that is due by the clock is taken by the thread that is left for turns."""
    entered, opened = threading.Event(), threading.Event()
    retried = threading.Event()
    tries: list[int] = []

    def slow(inputs: Mapping[str, Array]) -> dict[str, Array]:
        entered.set()
        assert opened.wait(PATIENCE_S)
        return double(inputs)

    def flaky(inputs: Mapping[str, Array]) -> dict[str, Array]:
        tries.append(len(tries))
        if len(tries) == 1:
            raise OSError("not yet")
        retried.set()
        return double(inputs)

    with Client.in_memory({"slow": declared(slow, concurrency=2), "flaky": declared(flaky)}) as client:
        client.submit("slow", row())
        assert entered.wait(PATIENCE_S)
        job = client.submit("flaky", row(), retry=Retry(2, 0.05, 0.05))
        assert retried.wait(PATIENCE_S)
        assert job.result(PATIENCE_S)["y"][0, 0] == 2.0
        opened.set()


def test_an_idle_worker_takes_few_turns():
    """Nothing spins: without jobs there are a few turns a second at most, and a job has some at once."""
    with Client.in_memory({"plain": double}) as client:
        client.submit("plain", row()).result(PATIENCE_S)
        drain = client._worker._drain  # type: ignore[attr-defined] # the turns are nobody else's business
        turns: list[float | None] = []
        step = drain.step

        def counted_step(longest_wait_s: float = 0.0) -> float | None:
            turns.append(step(longest_wait_s))
            return turns[-1]

        drain.step = counted_step
        assert not threading.Event().wait(0.5)
        assert len(turns) < 30
        before = len(turns)
        client.submit("plain", row()).result(PATIENCE_S)
        assert len(turns) > before
