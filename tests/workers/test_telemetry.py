"""Settlements as events, metrics and log lines: each is reported once, and only at the flush."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from penstock.registry.broker.base import State
from penstock.registry.envelope import Failure
from penstock.registry.queues import lane_key, reply_key
from penstock.registry.settings_sections import CacheConfig
from penstock.registry.unrun import EXPIRED
from penstock.workers.cache import AnswerCache
from penstock.workers.completer import CompletedFromCache, CompletedRun, Settlement
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.listener import Ended, NullListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.results import EncodedOutputs, JobOutcome
from penstock.workers.telemetry import BatchTelemetry
from tests.workers.doubles import job_of, ready_version, run_of

DONE = EncodedOutputs((), b"", "", 0)
AT = 100.0


class Ends(NullListener):
    """Remembers how jobs ended, call by call."""

    def __init__(self) -> None:
        self.calls: list[list[Ended]] = []

    def finished(self, ended: Sequence[Ended], at: float) -> None:
        self.calls.append(list(ended))


class Harness:
    """The telemetry of one worker."""

    def __init__(self) -> None:
        self.version = ready_version()
        self.listener, self.metrics = Ends(), InferenceMetrics((0.5, 1.0, 2.0, 4.0))
        self.answers = AnswerCache(CacheConfig(), lambda: AT)
        self.telemetry = BatchTelemetry(self.listener, self.metrics, self.answers)

    def settle(self, *outcomes: JobOutcome) -> None:
        """One commit, which took half a second."""
        by_run = {run: [each for each in outcomes if each.run is run] for run in {each.run for each in outcomes}}
        self.telemetry.add(Settlement([], [(each, each.state) for each in outcomes], by_run, 0.5, AT))

    def ran(self, job: ClaimedJob, answer: EncodedOutputs | Failure = DONE) -> JobOutcome:
        """A job that had a forward to itself, from 97 s to 98 s."""
        return self.ran_together(job, answer=answer)[0]

    def ran_together(self, *jobs: ClaimedJob, answer: EncodedOutputs | Failure = DONE) -> list[JobOutcome]:
        """Jobs that shared such a forward."""
        run = run_of(self.version, *jobs)
        run.started, run.ended, run.tokens, run.padded_tokens = 97.0, 98.0, 30, 40
        return [JobOutcome(job, answer, "ran", self.version, run) for job in jobs]

    def cached(self, job: ClaimedJob) -> JobOutcome:
        """A job that the cache answered."""
        return JobOutcome(job, DONE, "cached", self.version)

    def by_endpoint(self, name: str) -> dict[str, float]:
        """The value of a metric of version 1 for each endpoint."""
        return {
            sample.labels["endpoint"]: sample.value
            for family in self.metrics.collect()
            for sample in family.samples
            if sample.name == name and sample.labels["model_version"] == "1"
        }

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples with this name and these labels."""
        samples = [sample for family in self.metrics.collect() for sample in family.samples]
        return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_a_settlement_is_reported_at_the_next_flush_and_once(harness: Harness):
    """Reports wait until the next batch and the next claim are on their way."""
    harness.settle(harness.ran(job_of()))
    assert (harness.listener.calls, harness.telemetry.batches) == ([], 0)
    harness.telemetry.flush()
    harness.telemetry.flush()
    assert (len(harness.listener.calls), harness.telemetry.batches) == (1, 1)


def test_the_listener_hears_of_all_jobs_of_a_commit_at_once(harness: Harness):
    """With their state, their failure, the version, and the seconds from the start of the batch to the commit."""
    failure = Failure("ModelError", "ValueError: no")
    done, failed, refused = job_of(), job_of(), job_of(claimed=99.0)
    harness.settle(harness.ran(done), harness.ran(failed, failure), JobOutcome(refused, EXPIRED, "refused", None))
    harness.telemetry.flush()
    assert harness.listener.calls == [
        [
            Ended(done.header, State.COMPLETED, 3.0, None, "1"),
            Ended(failed.header, State.FAILED, 3.0, failure, "1"),
            Ended(refused.header, State.EXPIRED, 1.0, EXPIRED, ""),
        ]
    ]


def test_a_report_that_fails_ends_no_worker(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The jobs are committed. The settlements behind it are reported, and the log has the error."""
    heard = harness.listener.finished

    def fail_once(ended: Sequence[Ended], at: float) -> None:
        monkeypatch.setattr(harness.listener, "finished", heard)
        raise ValueError("too many values")

    monkeypatch.setattr(harness.listener, "finished", fail_once)
    harness.settle(harness.ran(job_of()))
    harness.settle(harness.ran(job_of()), harness.ran(job_of()))
    harness.telemetry.flush()
    assert [len(ended) for ended in harness.listener.calls] == [2]
    assert harness.value("infer_requests_total", model="double") == 2
    (line,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert line.message == "a report of ended jobs failed"
    assert not harness.telemetry.has_work


def test_each_ended_job_counts_as_one_request_with_one_outcome(harness: Harness):
    """By model, version and state."""
    harness.settle(harness.ran(job_of()), harness.ran(job_of()), JobOutcome(job_of(), EXPIRED, "refused", None))
    harness.telemetry.flush()
    assert harness.value("infer_requests_total", model="double") == 3
    assert harness.value("penstock_jobs_total", outcome="completed", model_version="1") == 2
    assert harness.value("penstock_jobs_total", outcome="expired", model_version="") == 1


def client_job(client: str = "a1") -> ClaimedJob:
    return job_of(reply=reply_key("double", client))


def celery_job() -> ClaimedJob:
    return job_of(reply=lane_key("double"))


def test_requests_and_jobs_are_counted_by_the_way_they_came(harness: Harness):
    """Every client is `queue`, however many there are and whether it waits for a reply; `send_task` is `celery`."""
    harness.settle(
        *harness.ran_together(client_job("a1"), client_job("a2"), job_of(), celery_job()),
        JobOutcome(celery_job(), EXPIRED, "refused", None),
    )
    harness.telemetry.flush()
    assert harness.value("infer_requests_total", model="double", route="queue") == 3
    assert harness.value("infer_requests_total", model="double", route="celery") == 2
    assert harness.value("infer_requests_total") == 5
    assert harness.by_endpoint("penstock_jobs_total") == {"queue": 3, "celery": 1}


def test_a_batch_has_the_endpoint_of_its_jobs(harness: Harness):
    """Also beside batches of the other way in the same commit; one with jobs of both is `mixed`."""
    for outcomes in (
        [harness.ran(celery_job())],
        [harness.ran(client_job()), harness.ran(celery_job())],
        harness.ran_together(client_job(), celery_job()),
    ):
        harness.settle(*outcomes)
    harness.telemetry.flush()
    by_batch = {"queue": 1, "celery": 2, "mixed": 1}
    for name in ("compute_seconds", "commit_seconds", "batch_rows", "padding_ratio"):
        assert harness.by_endpoint(f"penstock_{name}_count") == by_batch, name
    for name in ("queue_wait_seconds", "batch_wait_seconds"):
        assert harness.by_endpoint(f"penstock_{name}_count") == by_batch | {"mixed": 2}, name


def test_cached_answers_and_look_ups_say_how_their_job_came(harness: Harness):
    """Both ways of one commit apart, with the version that answered."""
    harness.answers.find_all([client_job(), celery_job(), celery_job()], harness.version)
    harness.settle(harness.cached(client_job()), harness.cached(celery_job()))
    harness.telemetry.flush()
    assert harness.by_endpoint("penstock_cache_misses_total") == {"queue": 1, "celery": 2}
    assert harness.metrics.snapshot()["models"]["double"]["jobs"] == 2
    assert harness.by_endpoint("penstock_compute_seconds_count") == {"queue": 0, "celery": 0}


@pytest.mark.parametrize(
    ("failure", "raised", "name"),
    [
        (Failure("ModelError", "ValueError: no"), "ValueError", "ValueError"),
        (Failure("ModelError", "alice_smith: an unknown customer"), "ModelError", "ModelError"),
        (Failure("ModelError", "alice_smith: an unknown customer"), "", "ModelError"),
        (Failure("NonFiniteOutput", "NaN: in y"), "", "NonFiniteOutput"),
    ],
)
def test_a_failure_is_counted_under_the_class_of_the_models_exception(
    failure: Failure, raised: str, name: str, harness: Harness
):
    """Where nothing was raised, under the code of the failure. A message may begin with anything, also with inputs."""
    outcome = harness.ran(job_of(), failure)
    if raised and outcome.run is not None:
        outcome.run.exceptions[outcome.job] = raised
    harness.settle(outcome)
    harness.telemetry.flush()
    assert harness.value("infer_exceptions_total", exception=name) == 1
    assert harness.value("infer_exceptions_total") == 1


def test_a_job_that_was_cancelled_or_expired_is_no_exception(harness: Harness):
    """Only failed jobs are the model's."""
    harness.settle(JobOutcome(job_of(), EXPIRED, "refused", None))
    harness.telemetry.flush()
    assert harness.value("infer_exceptions_total") == 0


def test_the_latency_of_a_job_counts_from_its_acceptance_to_its_commit(harness: Harness):
    """Of a batch and of a cached answer; a refused job has none."""
    harness.settle(
        harness.ran(job_of(claimed=97.5, queue_ms=500.0)),
        harness.cached(job_of(claimed=98.0, queue_ms=1000.0)),
        JobOutcome(job_of(), EXPIRED, "refused", None),
    )
    harness.telemetry.flush()
    assert harness.value("infer_latency_seconds_count") == 2
    assert harness.value("infer_latency_seconds_sum") == 6.0
    assert harness.value("penstock_padding_ratio_sum") == 0.25
    assert harness.telemetry.batches == 1, "a cached answer needs no batch"


@pytest.mark.parametrize("way", ["ran", "cached"])
def test_a_trace_is_named_in_the_log_and_beside_the_latency(
    harness: Harness, caplog: pytest.LogCaptureFixture, way: str
):
    """The id of a job's trace; a text that is no trace context, which another program may write, is left out."""
    traced, foreign = job_of(traceparent=f"00-{'4' * 32}-{'2' * 16}-01"), job_of(traceparent="00-trace")
    jobs = [traced, foreign, job_of()]
    if way == "ran":
        harness.settle(*harness.ran_together(*jobs))
    else:
        harness.settle(*map(harness.cached, jobs))
    with caplog.at_level(logging.INFO, "penstock.server"):
        harness.telemetry.flush()
    assert [record.__dict__["trace_ids"] for record in caplog.records] == [["4" * 32]]
    found = [sample.exemplar for family in harness.metrics.collect() for sample in family.samples if sample.exemplar]
    assert [each.labels for each in found] == [{"trace_id": "4" * 32}]


def test_the_time_of_a_job_is_told_in_parts(harness: Harness):
    """In the queue and before the forward for each job, forward and commit for the batch, and the rows of the batch."""
    jobs = [job_of(claimed=96.0, queue_ms=500.0), job_of(claimed=96.5, queue_ms=2500.0)]
    harness.settle(*harness.ran_together(*jobs))
    harness.telemetry.flush()
    seconds = {part: harness.value(f"penstock_{part}_seconds_sum") for part in ("queue_wait", "batch_wait")}
    assert seconds == {"queue_wait": 3.0, "batch_wait": 1.5}
    assert (harness.value("penstock_compute_seconds_sum"), harness.value("penstock_commit_seconds_sum")) == (1.0, 0.5)
    assert (harness.value("penstock_batch_rows_sum"), harness.value("infer_batch_size_sum")) == (2, 2)


def test_look_ups_in_the_cache_are_counted_at_the_flush(harness: Harness):
    """Each once, by model and result."""
    job = job_of()
    job.digest = b"equal"
    for _ in range(3):
        harness.answers.find_all([job], harness.version)
    harness.answers.memory.put(b"equal", EncodedOutputs((), b"", harness.version.content_hash, 0), 60.0)
    harness.answers.find_all([job], harness.version)
    harness.telemetry.flush()
    harness.telemetry.flush()
    assert (harness.value("penstock_cache_misses_total"), harness.value("penstock_cache_hits_total")) == (3, 1)


def samples(harness: Harness) -> dict[tuple[object, ...], float]:
    """Every sample of every metric."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in harness.metrics.collect()
        for sample in family.samples
    }


def test_what_is_settled_as_a_whole_is_reported_like_its_jobs(caplog: pytest.LogCaptureFixture):
    """A run with a follower, and cached answers of one claim: the same metrics, events and log lines."""
    ran = [client_job() for _ in range(3)]
    cached = [job_of(claimed=98.0, queue_ms=queue_ms) for queue_ms in (500.0, 1500.0)]
    reported = []
    with caplog.at_level(logging.INFO, "penstock.server"):
        for is_whole in (True, False):
            harness = Harness()
            outcomes = harness.ran_together(*ran[:2])
            run = outcomes[0].run
            assert run is not None
            outcomes.append(outcomes[0].of_follower(ran[2], harness.version))
            if is_whole:
                totals_s = [AT - job.claimed + job.queue_ms / 1000 for job in (*ran, *cached)]
                completed = CompletedRun(run, ran, totals_s[:3])
                found = CompletedFromCache(harness.version, cached, totals_s[3:])
                harness.telemetry.add(Settlement([completed], [], {}, 0.5, AT, [found]))
            else:
                harness.settle(*outcomes, *(harness.cached(job) for job in cached))
            caplog.clear()
            harness.telemetry.flush()
            events = [end for call in harness.listener.calls for end in call]
            lines = [(record.message, record.__dict__["job_ids"]) for record in caplog.records]
            reported.append((samples(harness), events, sorted(lines), harness.telemetry.batches))
    assert reported[0] == reported[1]
    assert len(reported[0][1]) == 5
    assert [message for message, _ in reported[0][2]] == ["batch committed", "cache hits"]
