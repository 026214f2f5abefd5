"""The overdue jobs of a paused model leave its queue without a client that asks."""

from __future__ import annotations

import pytest

from penstock.registry.admission import JobBuilder, SubmitOptions
from penstock.registry.broker.base import JobRecord, Limits, State
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import Keyring, open_result
from penstock.registry.overdue import OverdueJobs
from penstock.registry.package import ModelSpec
from penstock.registry.queues import Priority

HOUR_MS = 3_600_000
KEYS = Keyring.parse("a:" + "A" * 44)
SPEC = ModelSpec.model_validate(
    {
        "name": "m",
        "version": "1",
        "format": "python",
        "entrypoint": "model:build",
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch"]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch"]}],
    }
)


class Queue:
    """A queue in memory with a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0
        self.broker = MemoryBroker(lambda: self.now_s)

    def publish(self, count: int = 1, *, deadline_s: float | None = None, keyring: Keyring = KEYS) -> list[str]:
        """Jobs of the model; their ids."""
        builder = JobBuilder(tenant="acme", keyring=keyring, max_bytes=1 << 20)
        options = SubmitOptions(deadline_s=deadline_s)
        jobs = [builder.build(SPEC, {"x": [1.0]}, options) for _ in range(count)]
        self.broker.publish("m", jobs, Limits(10_000, 0, HOUR_MS))
        return [job.job_id for job in jobs]

    def sweep(self, keyring: Keyring = KEYS) -> OverdueJobs:
        """What a worker has."""
        return OverdueJobs(self.broker, keyring, job_ttl_ms=HOUR_MS, result_ttl_ms=HOUR_MS, worker="w@test")

    def states(self, ids: list[str]) -> list[State | None]:
        """How the jobs stand."""
        return [None if record is None else record.state for record in self.broker.job_records(ids)]


@pytest.fixture
def queue() -> Queue:
    """Empty."""
    return Queue()


def test_only_overdue_jobs_end(queue: Queue):
    """A passed deadline and a passed lifetime end a job; others stay."""
    old = queue.publish()
    queue.now_s += 3500
    soon, later = queue.publish(deadline_s=10), queue.publish(deadline_s=1000)
    queue.now_s += 101
    assert queue.sweep().end_some("m", queue.broker.now_ms()) == 2
    assert queue.states([*old, *soon, *later]) == [State.EXPIRED, State.EXPIRED, State.QUEUED]


def test_end_is_signed_with_the_key_of_the_job(queue: Queue):
    """Its client can verify the result, which names the worker."""
    (job_id,) = queue.publish(deadline_s=1)
    queue.now_s += 2
    keyring = Keyring.parse("b:" + "B" * 43 + "=,a:" + "A" * 44)
    assert queue.sweep(keyring).end_some("m", queue.broker.now_ms()) == 1
    (record,) = queue.broker.job_records([job_id])
    assert record is not None
    header, _ = open_result(record.result, KEYS)
    assert (header.id, header.context.tenant, header.worker, header.key) == (job_id, "acme", "w@test", "a")
    assert header.error is not None
    assert header.error.code == "Expired"


def test_job_with_a_foreign_key_stays(queue: Queue):
    """Without its key no result can be signed: the job waits for a process that has it."""
    ids = queue.publish(deadline_s=1)
    queue.now_s += 2
    assert queue.sweep(Keyring.parse("b:" + "B" * 43 + "=")).end_some("m", queue.broker.now_ms()) == 0
    assert queue.states(ids) == [State.QUEUED]


def test_long_queue_is_looked_at_page_by_page(queue: Queue):
    """Each call looks at one page of each queue, goes on behind it, and begins again after the last."""
    patient = queue.publish(200)
    late = queue.publish(200, deadline_s=1)
    queue.now_s += 2
    sweep = queue.sweep()
    found = [sweep.end_some("m", queue.broker.now_ms()) for _ in range(5)]
    assert sum(found) == 200
    assert found[0] == 0
    assert set(queue.states(late)) == {State.EXPIRED}
    assert set(queue.states(patient)) == {State.QUEUED}
    (again,) = queue.publish(deadline_s=1)
    queue.now_s += 2
    assert sum(sweep.end_some("m", queue.broker.now_ms()) for _ in range(4)) == 1
    assert queue.broker.job_record(again) != JobRecord(State.QUEUED, "acme")


def test_bytes_that_are_no_job_stay(queue: Queue):
    """A worker makes a dead letter of them."""
    queue.broker._state.queue("m", Priority.NORMAL).add(b"no job", queue.broker.now_ms())
    queue.now_s += 2 * HOUR_MS
    assert queue.sweep().end_some("m", queue.broker.now_ms()) == 0
