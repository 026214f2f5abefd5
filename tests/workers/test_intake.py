"""The intake: which deliveries become jobs, and the way of the others to the dead letters and their clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.registry.broker.base import Claim, Delivery, JobRecord, Limits, Publication, State
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import JobHeader, Keyring, open_result, seal
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.queues import Priority, reply_key
from penstock.registry.tensors import encode
from penstock.workers.intake import Intake
from penstock.workers.observe.listener import Ended, NullListener
from penstock.workers.observe.metrics import InferenceMetrics
from tests.workers.doubles import counted, job_of

UNSIGNED = Keyring.parse(None)
TTL_MS = 60_000
ID = "double.one"


class Steps(NullListener):
    """Remembers the jobs that were received and how they ended."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, State | None, str]] = []

    def received(self, jobs: Sequence[JobHeader], at: float) -> None:
        self.steps += [(header.id, None, "") for header in jobs]

    def finished(self, ended: Sequence[Ended], at: float) -> None:
        self.steps += [(each.header.id, each.state, each.version) for each in ended]


class AwayBroker(MemoryBroker):
    """A broker that is away while `is_away` is set."""

    is_away = False

    def dead_letter(
        self, consumer: str, delivery: Delivery, reason: str, *, job_id: str = "", sealed: bytes = b""
    ) -> bool:
        if self.is_away:
            raise BrokerUnavailable("away")
        return super().dead_letter(consumer, delivery, reason, job_id=job_id, sealed=sealed)


class Harness:
    """The intake of one worker, at 5 s by the broker's clock."""

    def __init__(self) -> None:
        self.now = 5.0
        self.broker = AwayBroker(lambda: self.now)
        self.listener, self.metrics = Steps(), InferenceMetrics((1.0,))
        self.intake = self.intake_with(UNSIGNED)

    def intake_with(self, keyring: Keyring) -> Intake:
        """An intake whose envelopes must be signed by these keys, if any."""
        return Intake(
            self.broker,
            "worker-1:boot",
            keyring,
            worker="worker-1",
            job_ttl_ms=TTL_MS,
            max_crashes=3,
            version_of=lambda _model: "7",
            listener=self.listener,
            metrics=self.metrics,
        )

    def claimed(self, sealed: bytes, job_id: str = ID) -> Delivery:
        """These bytes, accepted as this job and claimed by this worker."""
        self.broker.publish("double", [Publication(job_id, Priority.NORMAL, sealed, "acme")], Limits(100, 0, TTL_MS))
        _, (delivery,) = self.broker.exchange("worker-1:boot", [], [Claim("double", 1, 0, 1000)], TTL_MS)
        return delivery

    def record(self, job_id: str = ID) -> JobRecord:
        record = self.broker.job_record(job_id)
        assert record is not None
        return record

    def has_deferred(self) -> bool:
        return self.intake.has_deferred

    def write_all(self) -> int:
        """Write the deferred dead letters; returns how many there were."""
        written = 0
        while self.has_deferred():
            self.intake.dead_letter_next()
            written += 1
        return written

    def reasons(self) -> list[str]:
        return [letter.reason for letter in self.broker.dead_letters("double")]


def sealed_job(keyring: Keyring = UNSIGNED, **fields: Any) -> bytes:
    """The envelope of a job of `double` with one row; `fields` change its header."""
    content, body = encode({"x": np.ones((1, 1), np.float32)})
    header = {"id": ID, "tenant": "acme", "model": "double", "priority": "normal", "content": content, **fields}
    return seal("job", JobHeader(**header), body, keyring)


@pytest.fixture
def harness() -> Harness:
    return Harness()


@pytest.mark.parametrize(
    ("deadline_ms", "first_ms", "queue_ms", "expires_ms"),
    [(0, 0, 1500.0, 65_000), (2000, 0, 1500.0, 7000), (10**9, 0, 1500.0, 65_000), (2000, 4000, 2500.0, 6000)],
    ids=["no deadline", "a deadline", "longer than any job may live", "accepted first before its replay"],
)
def test_a_job_knows_how_long_it_waited_and_until_when_it_may_begin(
    deadline_ms: int, first_ms: int, queue_ms: float, expires_ms: int, harness: Harness
):
    """Both count from the first acceptance, by the broker's clock; no deadline outlasts the lifetime of jobs."""
    harness.claimed(b"", "double.other")
    sealed = sealed_job(deadline_ms=deadline_ms)
    delivery = Delivery("double", Priority.NORMAL, b"5000-0", sealed, accepted_first_ms=first_ms)
    job = harness.intake.open(delivery, 77.0, 6500.0)
    assert job is not None
    assert (job.claimed, job.queue_ms, job.expires_ms) == (77.0, queue_ms, expires_ms)
    assert job.inputs["x"].tolist() == [[1.0]]


def test_no_job_has_waited_less_than_nothing(harness: Harness):
    """The worker's reading of the broker's clock may be older than the acceptance."""
    job = harness.intake.open(harness.claimed(sealed_job()), 0.0, 4990.0)
    assert job is not None
    assert job.queue_ms == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "other"), ("priority", "high"), ("id", "other.one"), ("reply", reply_key("other", "client"))],
)
def test_a_job_that_was_made_for_another_queue_is_no_job(field: str, value: str, harness: Harness):
    """Without signatures anyone may write a header, so each name in it is compared with the queue's."""
    assert harness.intake.open(harness.claimed(sealed_job(UNSIGNED, **{field: value})), 0.0, 5000.0) is None
    harness.intake.dead_letter_next()
    (found,) = harness.reasons()
    assert "another queue" in found


def test_the_client_of_a_forged_job_gets_a_failure(harness: Harness):
    """The record that the broker accepted under the claimed id becomes DEAD, with the reason in its result."""
    forger = Keyring.parse("stranger:" + "A" * 44)
    delivery = harness.claimed(sealed_job(forger, key="stranger"))
    assert harness.intake.open(delivery, 0.0, 5000.0) is None
    assert harness.reasons() == [], "the dead letter waits until there is time for it"
    assert harness.has_deferred()
    harness.intake.dead_letter_next()
    assert not harness.has_deferred()
    assert harness.record().state is State.DEAD
    header, _ = open_result(harness.record().result, UNSIGNED)
    assert header.error is not None
    assert (header.error.code, header.id, header.context.tenant) == ("DeadLettered", ID, "acme")
    assert "BadSignature" in header.error.message
    assert counted(harness.metrics, "penstock_quarantined") == 1
    assert harness.listener.steps == [], "bytes without a valid signature are no job for a monitor"


@pytest.mark.parametrize("keys", [None, "mine:" + "A" * 43 + "="], ids=["unsigned", "signed"])
def test_the_client_of_a_job_whose_tensors_cannot_be_read_gets_a_failure(keys: str | None, harness: Harness):
    """The header names the job although the bytes behind it are not those that it describes."""
    keyring = Keyring.parse(keys)
    harness.intake = harness.intake_with(keyring)
    content, body = encode({"x": np.ones((1, 1), np.float32)})
    key = "mine" if keys else ""
    header = JobHeader(id=ID, tenant="acme", model="double", priority="normal", content=content, key=key)
    delivery = harness.claimed(seal("job", header, body[:-1], keyring))
    assert harness.intake.open(delivery, 0.0, 5000.0) is None
    assert harness.write_all() == 1
    assert harness.record().state is State.DEAD
    result, _ = open_result(harness.record().result, keyring)
    assert result.error is not None
    assert (result.error.code, result.id) == ("DeadLettered", ID)
    (letter,) = harness.broker.dead_letters("double")
    assert (letter.job_id, letter.tenant) == (ID, "acme")
    assert letter.reason.startswith("UndecodableEnvelope")


def test_a_deferred_dead_letter_is_kept_while_the_broker_is_away(harness: Harness):
    """The next try writes it, and each is written once, the oldest first."""
    for number in range(2):
        harness.intake.open(harness.claimed(bytes([number]), f"double.{number}"), 0.0, 5000.0)
    harness.broker.is_away = True
    with pytest.raises(BrokerUnavailable):
        harness.intake.dead_letter_next()
    assert harness.has_deferred()
    harness.broker.is_away = False
    harness.intake.dead_letter_next()
    (letter,) = harness.broker.dead_letters("double")
    kept = harness.broker.read_dead_letter("double", letter.entry)
    assert kept is not None
    assert kept.sealed == b"\0"
    assert harness.write_all() == 1


@pytest.mark.parametrize(("size", "kept"), [(1, 16), (4 << 20, 4), (9 << 20, 1), (17 << 20, 0)])
def test_deferred_dead_letters_are_bounded_in_number_and_in_bytes(size: int, kept: int, harness: Harness):
    """At most 16 and at most 16 MiB wait; beyond these the oldest is written at once."""
    for number in range(kept + 2):
        sealed = bytes(size)
        harness.intake.open(harness.claimed(sealed, f"double.{number}"), 0.0, 5000.0)
        assert len(harness.reasons()) == max(0, number + 1 - kept)
    assert harness.write_all() == kept


@pytest.mark.parametrize("is_lost", [False, True])
def test_poison_becomes_a_dead_letter_at_once_unless_another_worker_has_it(is_lost: bool, harness: Harness):
    """Its client and the monitor hear of it from the worker that still holds it, and from no other."""
    first = harness.claimed(sealed_job())
    poison = Delivery("double", first.priority, first.entry_id, first.sealed, crashes=3)
    if is_lost:
        harness.broker.take_over("worker-2", "double", 0, 1)
    assert harness.intake.open(poison, 0.0, 5000.0) is None
    assert not harness.has_deferred()
    assert harness.record().state is (State.QUEUED if is_lost else State.DEAD)
    assert harness.listener.steps == ([] if is_lost else [(ID, None, ""), (ID, State.DEAD, "7")])
    assert counted(harness.metrics, "penstock_dead_lettered", "7", "queue") == (not is_lost)
    assert counted(harness.metrics, "penstock_jobs", "7", "queue") == (not is_lost)
    assert counted(harness.metrics, "infer_requests") == (not is_lost)


def test_a_job_with_fewer_crashes_than_allowed_runs_again(harness: Harness):
    """It is a suspect, and the limit is the setting's."""
    suspect = job_of(crashes=2).delivery
    job = harness.intake.open(suspect, 0.0, 5000.0)
    assert job is not None
    assert job.is_suspect
    harness.intake.max_crashes = 2
    assert harness.intake.open(suspect, 0.0, 5000.0) is None
