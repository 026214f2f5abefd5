"""Answers that must not be kept, or not be given any more, under a clock and threads that are the test's."""

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
    """A number that the model answers with a positive one, and three times its opposite with a negative one."""
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


def _runs_anew(harness: SteppedHarness, worker: SteppedWorker, number: float) -> bool:
    """Whether a job has a forward, and the model's answer."""
    (job_id,) = harness.publish("m", number)
    harness.pass_time(0.5)
    has_run = bool(worker.forwards())
    assert harness.answer(job_id) == pytest.approx(_expected(number), abs=1e-4)
    return has_run


def test_what_a_form_said_before_another_thread_gave_it_up(harness: SteppedHarness, models_root: Path):
    """Made while the model answered as built, run by a form, and committed when that was given up."""
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
    assert _runs_anew(harness, worker, number)
    assert not _runs_anew(harness, worker, number)


def test_what_a_form_said_before_its_batch_gave_it_up(harness: SteppedHarness, models_root: Path):
    """A batch that is halved for want of memory: the form answers the first half, and fails at the second."""
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
    assert _runs_anew(harness, worker, number)


def test_what_a_form_said_that_was_built_anew(harness: SteppedHarness, models_root: Path):
    """The same name is not the same form."""
    write_pytorch(models_root, name="m")
    worker = harness.start_worker()
    forms = _forms(worker)
    forms.use("int8", _wrong(forms))  # type: ignore[arg-type]
    (job_id,) = harness.publish("m", _positive())
    worker.forwards()
    assert harness.answer(job_id) == pytest.approx(_expected(_positive()) + 1000, abs=1e-2)
    forms.reset("it was wrong")
    forms.use("int8", forms.reference)
    assert _runs_anew(harness, worker, _positive())


def test_what_a_form_said_before_the_model_was_loaded_anew(harness: SteppedHarness, models_root: Path):
    """Made while the model answered as built, run by a form; then the model comes back as built."""
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

    wait_until(is_loaded, 10, "it is loaded anew")
    worker.forwards()
    assert _runs_anew(harness, worker, number)


@pytest.fixture
def lasting(models_root: Path) -> str:
    """A model whose answers last ten seconds, whatever the setting says."""
    file = write_double(models_root) / "model.yaml"
    file.write_text(file.read_text() + "policy:\n  default:\n    cache_ttl_s: 10\n")
    return "double"


def test_an_answer_lives_as_long_as_its_model_says(harness: SteppedHarness, lasting: str):
    """The model's lifetime goes before the setting's, and being given does not prolong it (AR-023, CF-019)."""
    worker = harness.start_worker()
    forwards = []
    for _ in range(6):
        harness.publish(lasting, 7)
        harness.pass_time(0.5)
        forwards.append(len(worker.forwards()))
        harness.pass_time(3.5)
    assert forwards == [1, 0, 0, 1, 0, 0]


def test_an_answer_leaves_memory_when_it_expires(harness: SteppedHarness, lasting: str):
    """Also when nobody asks for it again."""
    worker = harness.start_worker()
    harness.publish(lasting, *range(20))
    worker.forwards()
    harness.pass_time(2)
    assert worker.counted("penstock_cache_entries") == 20
    assert worker.counted("penstock_cache_bytes") > 20 * 16
    harness.pass_time(10)
    assert worker.counted("penstock_cache_entries") == worker.counted("penstock_cache_bytes") == 0
    assert worker.counted("penstock_cache_evicted") == 0


def test_a_paused_model_answers_nobody(harness: SteppedHarness, models_root: Path):
    """What a claim brings that was under way when the model was paused goes back, known or not."""
    write_double(models_root)
    worker = harness.start_worker()
    harness.publish("double", 7)
    worker.forwards()
    jobs = harness.publish("double", 7, 8)
    drain = worker.drain
    _, found = drain.parts.broker.exchange(drain.consumer, [], [Claim("double", 8, 0, 1000)], 1000)
    drain.parts.status.paused = frozenset(["double"])
    harness.broker.pause("double")
    drain._admit(found)
    worker.turn(3)
    assert [harness.state(job_id) for job_id in jobs] == [State.QUEUED] * 2


def test_those_who_watch_hear_of_a_start(harness: SteppedHarness, models_root: Path, monkeypatch: pytest.MonkeyPatch):
    """Received, started, succeeded: of jobs that need no forward of their own, too."""
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


def test_streams_of_kept_answers_have_no_start(harness: SteppedHarness, models_root: Path):
    """No forward was begun for them."""
    write_double(models_root)
    worker = harness.start_worker()
    jobs = harness.publish("double", 7)
    worker.forwards()
    jobs += harness.publish("double", 7)
    worker.turn(4)
    outcomes = [open_outcome(job_id, harness.job_record(job_id), UNSIGNED) for job_id in jobs]
    assert [(outcome.info().is_cached, outcome.has_run) for outcome in outcomes] == [(False, True), (True, False)]


def test_the_retry_policy_asks_no_other_question(harness: SteppedHarness, models_root: Path):
    """A kept answer will do, whatever was to happen had there been a failure; a failure is not shared with others."""
    write_double(models_root)
    worker = harness.start_worker()
    harness.publish("double", 7)
    worker.forwards()
    harness.publish("double", 7, retry=Retry(attempts=2))
    assert worker.forwards() == []
    harness.publish("double", 8)
    harness.publish("double", 8, retry=Retry(attempts=2))
    assert sum(len(forward) for forward in worker.forwards()) == 2


@pytest.fixture
def hiding(models_root: Path) -> Iterator[SteppedHarness]:
    """A harness that keeps nothing of what was asked but digests."""
    yield from open_harness(models_root, privacy={"mode": "hashes_only"})


def test_text_is_not_kept_where_inputs_must_not_be(hiding: SteppedHarness, models_root: Path):
    """It may repeat what was asked (CF-031); numbers are kept as ever."""
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
    kept = [answer for answer, _ in worker.drain.parts.answers.memory._entries.values()]
    assert len(kept) == 1
    assert np.frombuffer(kept[0].body, np.float32)[0] == 2 * 123456.5
