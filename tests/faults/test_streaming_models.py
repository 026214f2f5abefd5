"""F18: streaming models refuse to be closed, raise what no `except Exception` sees, or yield what cannot be sent."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from penstock import Cancelled, Client, Expired, JobEvent, JobHandle, ModelError, NonFiniteOutput
from penstock.registry.queues import dead_key
from penstock.registry.settings_sections import QueueConfig
from tests.faults.conftest import OpenStage, Stage, Trial
from tests.faults.rounds import seeds
from tests.faults.streaming_models import ENDLESS, HANGS, RAISING, UNSENDABLE, open_stubborn
from tests.servers import WorkerProcess, wait_until

PATIENCE_S = 180.0
LIMIT_S = 5.0
"""Of a forward without progress, where a test waits for its end. On a busy machine a cancellation takes a second."""
CLOSABLE = [kind for kind in ENDLESS if kind != HANGS]
CAP = QueueConfig().max_event_bytes


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """One worker, which must survive the whole table."""
    stage = open_stubborn(open_stage)
    stage.start_worker()
    return stage


def _submit(client: Client, kind: str, deadline_s: float | None = None) -> JobHandle:
    return client.submit("stubborn", {"kind": [kind]}, deadline_s=deadline_s)


def _chunks(events: Iterator[JobEvent], count: int) -> list[JobEvent]:
    """So many chunks, as they come."""
    found: list[JobEvent] = []
    while len(found) < count:
        event = next(events)
        assert not event.is_terminal, event.data
        found += [event] if event.type == "chunk" else []
    return found


def _check_goes_on(client: Client, stage: Stage, worker: WorkerProcess) -> None:
    """The same process serves the next job, and no job became a dead letter."""
    assert _submit(client, "ordinary").result(PATIENCE_S)["total"].tolist() == [3]
    assert worker.report()["pid"] == worker.pid
    with stage.server.client() as redis:
        assert redis.xlen(dead_key("stubborn")) == 0


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("kind", CLOSABLE)
def test_cancelled_stream_ends_whatever_its_model_does(
    kind: str, seed: int, client: Client, stage: Stage, trial: Trial
):
    """The job ends as cancelled in its first delivery, and its subscriber hears of it; the process lives on."""
    job = _submit(client, kind)
    events = job.stream()
    _chunks(events, 3 + seed % 5)
    assert job.cancel() == "requested"
    with pytest.raises(Cancelled):
        job.result(PATIENCE_S)
    assert [event.type for event in events if event.type != "chunk"][-1] == "cancelled"
    assert job.info().attempt == 1
    _check_goes_on(client, stage, stage.workers[0])
    trial.note(times=1, jobs=2)


@pytest.mark.parametrize("kind", RAISING)
def test_stream_that_raises_anything_fails_at_once(kind: str, client: Client, stage: Stage, trial: Trial):
    """One delivery, the class in the message, and every chunk before it reached the subscriber."""
    job = _submit(client, kind)
    events = [*job.stream()]
    assert [event.type for event in events] == ["queued", "started", "chunk", "chunk", "chunk", "failed"]
    name = "RuntimeError: generator raised StopIteration" if kind == "StopIteration" else kind
    with pytest.raises(ModelError, match=f"^{name}"):
        job.result(PATIENCE_S)
    assert job.info().attempt == 1
    _check_goes_on(client, stage, stage.workers[0])
    trial.note(times=1, jobs=2)


@pytest.mark.parametrize("kind", UNSENDABLE)
def test_chunk_that_cannot_be_sent_is_refused_where_it_is_yielded(
    kind: str, client: Client, stage: Stage, trial: Trial
):
    """The job fails with the line of the `yield`, although the model catches everything; no subscriber gets the chunk.

    The text of a chunk beyond the cap has its size and the cap.
    """
    job = _submit(client, kind)
    events = [*job.stream()]
    assert [event.type for event in events] == ["queued", "started", "chunk", "chunk", "chunk", "failed"]
    failure = events[-1].data
    assert type(failure) is (NonFiniteOutput if kind == "NaN" else ModelError)
    line = UNSENDABLE[kind]
    source = (stage.models_root / "stubborn" / "1" / "model.py").read_text().splitlines()
    assert re.match(rf"model\.py, line {source.index(f'        {line}') + 1}, in kind_\d+$", failure.where)
    if kind == "160 MB":
        assert str(160_000_000) in str(failure)
        assert str(CAP) in str(failure)
    _check_goes_on(client, stage, stage.workers[0])
    trial.note(times=1, jobs=2)


@pytest.mark.parametrize("seed", seeds())
def test_job_behind_an_endless_stream_expires(seed: int, client: Client, stage: Stage, trial: Trial):
    """Its deadline ends it while the other one runs, and it never runs."""
    endless = _submit(client, CLOSABLE[seed % len(CLOSABLE)])
    _chunks(endless.stream(), 1)
    with pytest.raises(Expired):
        _submit(client, "ordinary", deadline_s=1).result(PATIENCE_S)
    endless.cancel()
    with pytest.raises(Cancelled):
        endless.result(PATIENCE_S)
    _check_goes_on(client, stage, stage.workers[0])
    trial.note(times=1, jobs=3)


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("kind", ["catches everything", "raises when it is closed"])
def test_fenced_stream_ends_in_the_worker_that_lost_it(kind: str, seed: int, open_stage: OpenStage, trial: Trial):
    """The worker freezes beyond its lease: the next one begins anew, and the first one lives on and serves others."""
    stage = open_stubborn(open_stage)
    first = stage.start_worker()
    with Client(stage.server.url) as client:
        job = _submit(client, kind)
        events = job.stream()
        seen = _chunks(events, 3 + seed % 5)
        first.freeze()
        second = stage.start_worker()
        reset = next(event for event in events if event.type == "reset")
        assert reset.data == "redelivered"
        first.thaw()
        seen += _chunks(events, 30)
        job.cancel()
        with pytest.raises(Cancelled):
            job.result(PATIENCE_S)
        assert job.info().attempt == 2
        second.terminate()
        second.wait(PATIENCE_S)
        _check_goes_on(client, stage, first)
    assert [event.seq for event in seen] == sorted({event.seq for event in seen})
    stage.close()
    trial.note(times=1, jobs=2)


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("kind", ["never looks", "catches everything"])
def test_drained_stream_goes_to_another_worker(kind: str, seed: int, open_stage: OpenStage, trial: Trial):
    """SIGTERM: after the grace the job is released, no crash is counted, and the process ends by itself with 0."""
    stage = open_stubborn(open_stage)
    first = stage.start_worker(PENSTOCK_INFERENCE_QUEUE_DRAIN_GRACE_S="1", PENSTOCK_INFERENCE_QUEUE_MAX_CRASHES="1")
    with Client(stage.server.url) as client:
        job = _submit(client, kind)
        events = job.stream()
        _chunks(events, 3 + seed % 5)
        first.terminate()
        assert first.wait(PATIENCE_S) == 0
        second = stage.start_worker(PENSTOCK_INFERENCE_QUEUE_MAX_CRASHES="1")
        assert next(event for event in events if event.type == "reset").data == "redelivered"
        _chunks(events, 3)
        job.cancel()
        with pytest.raises(Cancelled):
            job.result(PATIENCE_S)
        _check_goes_on(client, stage, second)
    stage.close()
    trial.note(times=1, jobs=2)


@pytest.mark.parametrize("seed", seeds())
def test_only_a_stream_that_never_returns_costs_its_process(seed: int, open_stage: OpenStage, trial: Trial):
    """Its job ends as cancelled at the limit of the forward, one process is replaced, and the next job is served."""
    stage = open_stubborn(open_stage, timeout_s=LIMIT_S)
    worker = stage.start_worker(is_supervised=True)
    pid = worker.report()["pid"]
    with Client(stage.server.url) as client:
        job = _submit(client, HANGS)
        _chunks(job.stream(), 3 + seed % 5)
        job.cancel()
        with pytest.raises(Cancelled):
            job.result(PATIENCE_S)
        assert _submit(client, "ordinary").result(PATIENCE_S)["total"].tolist() == [3]
        wait_until(worker.is_ready, PATIENCE_S, "the supervisor has a worker again")
        assert worker.report()["pid"] != pid
        with stage.server.client() as redis:
            assert redis.xlen(dead_key("stubborn")) == 0
    stage.close()
    trial.note(times=1, jobs=2)
