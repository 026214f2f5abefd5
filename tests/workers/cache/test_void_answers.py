"""Answers that must not be cached or not be given any more; the test steps the clock and the threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.producers.job_state import open_outcome
from penstock.registry.broker.base import Claim, State
from penstock.registry.envelope import Retry
from penstock.registry.tensors import Array
from penstock.workers.runtime.base import Prepared
from penstock.workers.runtime.forms import Forms, Tunable
from tests.packages import write_double, write_package
from tests.servers import wait_until
from tests.workers.runtime.formats import affine, write_pytorch
from tests.workers.stepped import UNSIGNED, SteppedHarness, SteppedWorker, open_harness


def _expected(number: float) -> float:
    return float(affine(np.array([[number, 0, 0, 0]], np.float32))[0, 0])


def _positive() -> float:
    """A number with a positive answer, whose negative triple has a negative answer."""
    number = 7.0 if _expected(7) > 0 else -7.0
    assert _expected(number) > 0 > _expected(-3 * number)
    return number


def _forms(worker: SteppedWorker) -> Forms:
    (version,) = worker.drain.lifecycle.turns
    assert isinstance(version.runtime, Tunable)
    return version.runtime.forms


def _wrong(forms: Forms, *, most_rows: int = 100) -> object:
    """A form whose answers are off by a thousand, and NaN where they should be negative."""

    def forward(prepared: Prepared) -> dict[str, Array]:
        answers = np.asarray(forms.reference(prepared)["y"])
        if len(answers) > most_rows:
            raise MemoryError
        return {"y": answers + np.float32(np.nan if (answers[:, 0] < 0).any() else 1000)}

    return forward


def _needs_forward(harness: SteppedHarness, worker: SteppedWorker, number: float) -> bool:
    """Whether a job needs a forward; checks its answer."""
    (job_id,) = harness.publish("m", number)
    harness.pass_time(0.5)
    has_run = bool(worker.forwards())
    assert harness.answer(job_id) == pytest.approx(_expected(number), abs=1e-4)
    return has_run


def test_an_answer_of_a_form_that_another_thread_dropped_is_not_cached(harness: SteppedHarness, models_root: Path):
    """The batch is formed in the eager form, run by another form, and committed after that form was dropped."""
    write_pytorch(models_root, name="m", concurrency=2)
    worker = harness.start_worker()
    forms, number = _forms(worker), _positive()
    harness.publish("m", number)
    worker.turn(2)
    forms.use("int8", _wrong(forms))  # type: ignore[arg-type]
    harness.publish("m", -3 * number)
    worker.turn(2)
    works = {seat: worker.begin(seat) for seat in "ab"}
    for work in works.values():
        assert work is not None
        worker.drain.parts.executor.run(work)
    assert forms.name == "eager"
    for seat, work in works.items():
        assert work is not None
        worker.drain.parts.executor.finish(seat, work)
    worker.turn(3)
    assert _needs_forward(harness, worker, number)
    assert not _needs_forward(harness, worker, number)


def test_an_answer_of_a_form_that_failed_in_the_same_batch_is_not_cached(harness: SteppedHarness, models_root: Path):
    """A batch is halved after an out-of-memory error: the form answers the first half and fails at the second."""
    write_pytorch(models_root, name="m")
    worker = harness.start_worker()
    forms, number = _forms(worker), _positive()
    harness.publish("m", 0.0)
    worker.turn(2)
    busy = worker.begin()
    assert busy is not None
    harness.publish("m", number, -3 * number)
    harness.now += 1.0
    worker.turn(3)
    forms.use("int8", _wrong(forms, most_rows=1))  # type: ignore[arg-type]
    worker.end(busy)
    halved = worker.begin()
    assert halved is not None
    assert len(halved.batch.items) == 2
    worker.end(halved)
    assert forms.name == "eager"
    assert _needs_forward(harness, worker, number)


def test_an_answer_of_a_rebuilt_form_is_not_given(harness: SteppedHarness, models_root: Path):
    """A rebuilt form with the same name is another form."""
    write_pytorch(models_root, name="m")
    worker = harness.start_worker()
    forms = _forms(worker)
    forms.use("int8", _wrong(forms))  # type: ignore[arg-type]
    (job_id,) = harness.publish("m", _positive())
    worker.forwards()
    assert harness.answer(job_id) == pytest.approx(_expected(_positive()) + 1000, abs=1e-2)
    forms.reset("it was wrong")
    forms.use("int8", forms.reference)
    assert _needs_forward(harness, worker, _positive())


def test_an_answer_of_a_form_is_not_given_after_a_reload(harness: SteppedHarness, models_root: Path):
    """The batch is formed in the eager form and run by another form; then the model is loaded again."""
    write_pytorch(models_root, name="m")
    worker = harness.start_worker()
    forms, number = _forms(worker), _positive()
    harness.publish("m", number)
    worker.turn(2)
    forms.use("int8", _wrong(forms))  # type: ignore[arg-type]
    work = worker.begin()
    assert work is not None
    worker.end(work)
    (version,) = worker.drain.lifecycle.turns
    worker.drain.lifecycle._unload(version)
    harness.publish("m", 0.0)

    def is_loaded() -> bool:
        worker.turn()
        return version.is_ready

    wait_until(is_loaded, 10, "it is loaded again")
    worker.forwards()
    assert _needs_forward(harness, worker, number)


@pytest.fixture
def lasting(models_root: Path) -> str:
    """A model whose answers are cached for ten seconds, whatever the setting says."""
    file = write_double(models_root) / "model.yaml"
    file.write_text(file.read_text() + "policy:\n  default:\n    cache_ttl_s: 10\n")
    return "double"


def test_an_answer_lives_as_long_as_its_model_says(harness: SteppedHarness, lasting: str):
    """The model's lifetime replaces the setting's, and a hit does not prolong it (AR-023, CF-019)."""
    worker = harness.start_worker()
    forwards = []
    for _ in range(6):
        harness.publish(lasting, 7)
        harness.pass_time(0.5)
        forwards.append(len(worker.forwards()))
        harness.pass_time(3.5)
    assert forwards == [1, 0, 0, 1, 0, 0]


def test_an_answer_leaves_memory_when_it_expires(harness: SteppedHarness, lasting: str):
    """It leaves also without another equal job."""
    worker = harness.start_worker()
    harness.publish(lasting, *range(20))
    worker.forwards()
    harness.pass_time(2)
    assert worker.counted("penstock_cache_entries") == 20
    assert worker.counted("penstock_cache_bytes") > 20 * 16
    harness.pass_time(10)
    assert worker.counted("penstock_cache_entries") == worker.counted("penstock_cache_bytes") == 0
    assert worker.counted("penstock_cache_evicted") == 0


def test_a_paused_model_answers_no_job(harness: SteppedHarness, models_root: Path):
    """Jobs of a claim that began before the pause are released, also those with a cached answer."""
    write_double(models_root)
    worker = harness.start_worker()
    harness.publish("double", 7)
    worker.forwards()
    jobs = harness.publish("double", 7, 8)
    drain = worker.drain
    _, found = drain.parts.broker.exchange(drain.consumer, [], [Claim("double", 8, 0, 1000)], 1000)
    drain.parts.status.paused = frozenset(["double"])
    harness.broker.pause("double")
    drain._transfers.admit(found)
    worker.turn(3)
    assert [harness.state(job_id) for job_id in jobs] == [State.QUEUED] * 2


def test_listeners_are_told_of_a_start(harness: SteppedHarness, models_root: Path, monkeypatch: pytest.MonkeyPatch):
    """A start is reported also for jobs without their own forward."""
    write_double(models_root)
    worker = harness.start_worker()
    started: list[str] = []
    monkeypatch.setattr(worker.notes, "started", lambda jobs, _at: started.extend(job.id for job in jobs))
    jobs = harness.publish("double", 7, 7)
    worker.forwards()
    jobs += harness.publish("double", 7)
    worker.turn(4)
    assert [harness.answer(job_id) for job_id in jobs] == [14] * 3
    assert sorted(started) == sorted(jobs)


def test_streams_of_cached_answers_have_no_start(harness: SteppedHarness, models_root: Path):
    """No forward began for these jobs."""
    write_double(models_root)
    worker = harness.start_worker()
    jobs = harness.publish("double", 7)
    worker.forwards()
    jobs += harness.publish("double", 7)
    worker.turn(4)
    outcomes = [open_outcome(job_id, harness.job_record(job_id), UNSIGNED) for job_id in jobs]
    assert [(outcome.info().is_cached, outcome.has_run) for outcome in outcomes] == [(False, True), (True, False)]


def test_the_retry_policy_is_no_part_of_the_key(harness: SteppedHarness, models_root: Path):
    """A cached answer and a shared forward serve jobs with any retry policy."""
    write_double(models_root)
    worker = harness.start_worker()
    harness.publish("double", 7)
    worker.forwards()
    harness.publish("double", 7, retry=Retry(attempts=2))
    assert worker.forwards() == []
    harness.publish("double", 8)
    harness.publish("double", 8, retry=Retry(attempts=2))
    assert sum(len(forward) for forward in worker.forwards()) == 1


@pytest.fixture
def hiding(models_root: Path) -> Iterator[SteppedHarness]:
    """A harness that keeps only digests of inputs."""
    yield from open_harness(models_root, privacy={"mode": "hashes_only", "seal_payloads": "off"})


def test_text_outputs_are_not_cached_where_inputs_must_not_be_kept(hiding: SteppedHarness, models_root: Path):
    """A text may repeat its input (CF-031); numbers are cached as usual."""
    source = (
        "import numpy as np\ndef build():\n    return lambda inputs: {'y': inputs['x'].astype(str).astype(object)}\n"
    )
    file = write_package(models_root, "echo", source) / "model.yaml"
    head, outputs, tail = file.read_text().partition("outputs:")
    file.write_text(head + outputs + tail.replace("float32", "string"))
    write_double(models_root)
    worker = hiding.start_worker()
    for model in ("echo", "double"):
        hiding.publish(model, 123456.5)
        worker.forwards()
    kept = [answer for answer, *_ in worker.drain.parts.answers.memory._entries.values()]
    assert len(kept) == 1
    assert np.frombuffer(kept[0].body, np.float32)[0] == 2 * 123456.5
