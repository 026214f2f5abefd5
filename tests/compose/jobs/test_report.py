"""`penstock job`: what is stored about one job at each point of its way, as data and as lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.compose.jobs.report import describe, lines
from penstock.producers.submission import cancellation
from penstock.registry.admission import JobBuilder, SubmitOptions
from penstock.registry.envelope import Keyring, Retry
from penstock.registry.errors import BadSignature, InvalidInput, ResultGone, UnknownJob
from penstock.registry.package import load_package
from penstock.registry.queues import DerivedIds, job_time_ms, new_job_id
from penstock.safety.privacy import InputRedactor
from penstock.safety.sealing import DataKeys
from tests.packages import write_raiser
from tests.workers.stepped import LEASE_S, LIMITS, UNSIGNED, SteppedHarness, open_harness

TTL_S = 3600.0
PLAIN = InputRedactor()


@pytest.fixture
def harness(models_root: Path) -> Iterator[SteppedHarness]:
    """A harness for the model `raiser`, whose results have tracebacks."""
    write_raiser(models_root)
    yield from open_harness(models_root, queue={"lease_s": LEASE_S, "client_tracebacks": True})


def described(harness: SteppedHarness, job_id: str) -> dict[str, Any]:
    return describe(harness.broker, job_id, UNSIGNED, TTL_S, PLAIN)


def shown(facts: dict[str, Any]) -> str:
    return "\n".join(lines(facts)) + "\n"


def test_a_waiting_job_shows_what_was_asked_for(harness: SteppedHarness):
    """Priority, version, deadline and retry come from the queue entry, its time from the broker; no worker has it."""
    how = {"priority": "high", "version": "1", "deadline_s": 60.0, "retry": Retry(attempts=2)}
    (job,) = harness.publish("raiser", 1, **how)
    accepted_ms = int(harness.now * 1000)
    assert described(harness, job) == {
        "job_id": job,
        "model": "raiser",
        "state": "queued",
        "tenant": "acme",
        "attempt": 0,
        "submitted_ms": accepted_ms,
        "priority": "high",
        "version": "1",
        "deadline_ms": accepted_ms + 60_000,
        "tries_allowed": 2,
        "crashes": 0,
    }


def test_a_sealed_job_is_shown_without_the_data_key(harness: SteppedHarness):
    """What is shown stands in the header, which is signed and not sealed."""
    sealing = replace(UNSIGNED, body_keys=DataKeys([b"1" * 32]), seals=True)
    spec = load_package(harness.models_root / "raiser" / "1").spec
    builder = JobBuilder(tenant="acme", keyring=sealing, max_bytes=1 << 20)
    job = builder.build(spec, {"x": [[1, 0, 0, 0]]}, SubmitOptions(priority="high"))
    (receipt,) = harness.broker.publish("raiser", [job], LIMITS)
    assert receipt.outcome == "accepted"
    facts = described(harness, job.job_id)
    assert (facts["state"], facts["tenant"], facts["priority"]) == ("queued", "acme", "high")


def test_a_running_job_shows_its_worker_attempts_and_crashes(harness: SteppedHarness):
    """A process died with it; another one has it now, and is asked to stop it."""
    (job,) = harness.publish("raiser", 1)
    first = harness.start_worker()
    first.turn(2)
    assert first.begin() is not None
    harness.crash(first)
    second = harness.start_worker()
    harness.pass_time(LEASE_S + 1)
    second.turn(2)
    harness.broker.cancel(job, "acme", cancellation(job, "acme", UNSIGNED))
    facts = described(harness, job)
    assert (facts["state"], facts["worker"]) == ("running", second.drain.name)
    assert (facts["attempt"], facts["crashes"], facts["cancel_requested"]) == (2, 1, True)
    text = shown(facts)
    assert f"worker         {second.drain.name}\n" in text
    assert "cancel requested yes\n" in text


def test_a_job_of_a_batch_shows_durations_only(harness: SteppedHarness):
    """Its id has the time of the batch, which may be hours before that of the job."""
    spec = load_package(harness.models_root / "raiser" / "1").spec
    builder = JobBuilder(tenant="acme", keyring=UNSIGNED, max_bytes=1 << 20)
    job_id = DerivedIds("raiser", "batch_1", 1_000).of(1)
    jobs = builder.build_many(spec, [({"x": [[1, 0, 0, 0]]}, None)], job_ids=[job_id])
    assert [receipt.job_id for receipt in harness.broker.publish("raiser", jobs, LIMITS)] == [job_id]
    harness.start_worker().forwards()
    facts = described(harness, job_id)
    assert (facts["state"], facts["batch_size"]) == ("completed", 1)
    assert {"queue_ms", "compute_ms"} <= facts.keys()
    assert not {"submitted_ms", "started_ms", "ended_ms"} & facts.keys()


def test_a_completed_job_shows_its_batch_and_times(harness: SteppedHarness):
    """Durations are stored; the times are reckoned from the id's. The result itself is not shown."""
    job, _ = harness.publish("raiser", 1, 2)
    harness.start_worker().forwards()
    facts = described(harness, job)
    submitted_ms = job_time_ms(job)
    assert submitted_ms is not None
    version = harness.workers[0].drain.lifecycle.models["raiser"].active
    assert version is not None
    started_ms = round(submitted_ms + facts["queue_ms"] + facts["batch_ms"])
    assert facts == {
        "job_id": job,
        "model": "raiser",
        "state": "completed",
        "tenant": "acme",
        "version": "1",
        "content_hash": version.content_hash,
        "worker": "stepped-0",
        "attempt": 1,
        "is_cached": False,
        "queue_ms": facts["queue_ms"],
        "submitted_ms": submitted_ms,
        "batch_size": 2,
        "batch_ms": 0.0,
        "compute_ms": 0.0,
        "started_ms": started_ms,
        "ended_ms": started_ms,
    }
    assert shown(facts).splitlines()[:2] == [f"job            {job}", "state          completed"]


def test_a_failed_job_shows_the_line_and_the_stored_traceback(harness: SteppedHarness, models_root: Path):
    """The error has code, message and line; the traceback comes last, as the worker stored it."""
    (job,) = harness.publish("raiser", -1)
    harness.start_worker().forwards()
    facts = described(harness, job)
    traceback = facts["error"].pop("traceback")
    where = "model.py, line 5, in forward"
    assert facts["error"] == {"code": "ModelError", "message": "ValueError: a negative row", "where": where}
    assert 'raise ValueError("a negative row")' in traceback
    facts["error"]["traceback"] = traceback
    text = shown(facts)
    assert f"error          ModelError: ValueError: a negative row\nat             {where}\n" in text
    assert text.endswith("    ValueError: a negative row\n")


def test_a_cancelled_job_has_no_forward(harness: SteppedHarness):
    """No worker, no batch and no times of a forward are shown: there were none."""
    (job,) = harness.publish("raiser", 1)
    harness.broker.cancel(job, "acme", cancellation(job, "acme", UNSIGNED))
    facts = described(harness, job)
    assert (facts["state"], facts["error"]["code"]) == ("cancelled", "Cancelled")
    assert facts.keys().isdisjoint({"worker", "batch_size", "compute_ms", "started_ms", "ended_ms", "priority"})


def poison(harness: SteppedHarness) -> str:
    """A job that ended three processes, and became a dead letter."""
    (job,) = harness.publish("raiser", 1, priority="low", deadline_s=3600.0)
    for _ in range(3):
        worker = harness.start_worker()
        harness.pass_time(LEASE_S + 1)
        worker.turn(2)
        assert worker.begin() is not None
        harness.crash(worker)
    harness.start_worker()
    harness.pass_time(LEASE_S + 1)
    return job


def test_a_dead_letter_shows_its_reason_and_its_entry(harness: SteppedHarness):
    """Priority, deadline, times and counts are those of the letter."""
    job = poison(harness)
    (letter,) = harness.broker.dead_letters("raiser")
    facts = described(harness, job)
    assert (facts["state"], facts["priority"], facts["dead_letter"]) == ("dead", "low", letter.entry)
    assert (facts["attempt"], facts["crashes"]) == (4, 3)
    assert (facts["submitted_ms"], facts["ended_ms"]) == (letter.accepted_ms, letter.dead_lettered_ms)
    assert facts["deadline_ms"] == letter.accepted_ms + 3_600_000
    assert facts["error"]["message"].startswith("The job went to the dead letters. Poison: 3 worker processes died")


def test_a_dead_letter_outlives_the_record_of_its_job(harness: SteppedHarness):
    """The result has expired: what the letter has is shown, with its own reason."""
    job = poison(harness)
    before = described(harness, job)
    harness.now += 2 * TTL_S
    facts = described(harness, job)
    assert (facts["state"], facts["tenant"], facts["dead_letter"]) == ("dead", "acme", before["dead_letter"])
    assert facts["error"]["code"] == "DeadLettered"
    assert facts["error"]["message"].startswith("Poison: 3 worker processes died")
    assert "worker" not in facts


def test_unknown_and_expired_jobs_are_told_apart(harness: SteppedHarness):
    """By the age of the id; a malformed id is refused before the broker is asked."""
    with pytest.raises(UnknownJob, match=r"Expected the id of a job that this broker accepted$"):
        described(harness, new_job_id("raiser"))
    made_ms = int((time.time() - 2 * TTL_S) * 1000)
    old = f"raiser.{made_ms:012x}"[:15] + f"-{made_ms & 0xFFFF:04x}-7000-8000-000000000000"
    assert job_time_ms(old) == made_ms
    with pytest.raises(ResultGone, match=r"longer ago than records are kept \(3600 s\), or the broker lost it"):
        described(harness, old)
    with pytest.raises(InvalidInput, match="Bad job id"):
        described(harness, "raiser")


def test_a_result_that_cannot_be_verified_is_refused(harness: SteppedHarness):
    """A shell with signing keys trusts no unsigned result; of an unsigned waiting job it shows the record only."""
    (job,) = harness.publish("raiser", 1)
    keyring = Keyring.parse("ours:" + "B" * 44)
    waiting = describe(harness.broker, job, keyring, TTL_S, PLAIN)
    assert (waiting["state"], waiting["tenant"]) == ("queued", "acme")
    assert "priority" not in waiting
    harness.start_worker().forwards()
    with pytest.raises(BadSignature):
        describe(harness.broker, job, keyring, TTL_S, PLAIN)


def test_error_of_a_job_is_redacted(harness: SteppedHarness):
    """CF-034: the message and the traceback, also of records that were written before a pattern was set."""
    (job,) = harness.publish("raiser", -1)
    harness.start_worker().forwards()
    facts = describe(harness.broker, job, UNSIGNED, TTL_S, InputRedactor(["negative"]))
    assert facts["error"]["message"] == "ValueError: a [REDACTED] row"
    assert "negative" in str(described(harness, job))
    assert "negative" not in str(facts)
    assert facts["job_id"] == job


def test_text_from_outside_cannot_move_the_cursor():
    """Escape sequences in a model's message are shown as text."""
    facts = {"job_id": "m.1", "error": {"code": "ModelError", "message": "\x1b[2J", "traceback": "one\n\x1b[2J two"}}
    assert shown(facts).splitlines()[1:] == [
        r"error          ModelError: \x1b[2J",
        "    one",
        r"    \x1b[2J two",
    ]
