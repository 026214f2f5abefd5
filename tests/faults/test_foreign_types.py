"""F21: keys of Penstock hold another type, because another program has written to them, while jobs come in."""

from __future__ import annotations

import random
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.registry import queues
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.metrics import QUARANTINED
from penstock.registry.queues import GROUP, MODELS_KEY, WORKERS_KEY, Priority
from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.rounds import seeds
from tests.foreign_keys import FOREIGN, bytes_of, is_foreign, overwrite
from tests.servers import WorkerProcess, wait_until

MENDED_S = 5.0
_AT_ONCE = 5
FIXED: tuple[Callable[[str], str], ...] = (
    *(lambda model, priority=priority: queues.stream_key(model, priority) for priority in Priority),
    *(queues.dead_key, queues.spec_key, queues.specs_key, queues.keyrings_key, queues.active_key, queues.flow_key),
    *(queues.paused_key, queues.lane_key, queues.quarantine_key, lambda _: MODELS_KEY, lambda _: WORKERS_KEY),
)
"""Keys that every model has: no job need come for a worker to mend them."""
OF_A_JOB: dict[str, Callable[[Stage, str, bytes], str]] = {
    "its record": lambda _, job_id, entry: queues.record_key(job_id),
    "its events": lambda _, job_id, entry: queues.events_key(job_id),
    "its crashes": lambda stage, _, entry: queues.crashes_key(stage.model, Priority.NORMAL, entry),
    "its reply stream": lambda stage, job_id, _: _reply_key(stage, job_id),
}


def _reply_key(stage: Stage, job_id: str) -> str:
    with stage.server.client() as client:
        record = client.get(queues.record_key(job_id)) or b""
    return record.split(b"\n")[2].decode()


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """One worker that nothing starts again."""
    stage = open_stage()
    stage.start_worker()
    return stage


def _are_mended(client: Any, keys: Sequence[str]) -> bool:
    return not any(is_foreign(client, key) for key in keys)


def _counted(worker: WorkerProcess) -> float:
    with urllib.request.urlopen(worker.report()["probe"] + "/metrics", timeout=180) as page:  # noqa: S310  # loopback
        families = text_string_to_metric_families(page.read().decode())
    return sum(sample.value for family in families for sample in family.samples if sample.name == QUARANTINED.name)


@contextmanager
def _nothing_dies(*workers: WorkerProcess) -> Iterator[None]:
    processes = [worker.pid for worker in workers]
    yield
    assert [worker.pid for worker in workers if worker.is_running] == processes


@pytest.mark.parametrize("seed", seeds())
def test_every_key_of_a_model_is_quarantined_by_its_worker(
    seed: int, stage: Stage, start_load: StartLoad, trial: Trial
):
    """Some at a time, in any order: each is mended within 5 s, counted and listed, and the next jobs complete."""
    (worker, *_) = stage.workers
    order = [make(stage.model) for make in FIXED]
    random.Random(seed).shuffle(order)
    load = start_load(stage.server, stage.forward_log)
    load.publish(1)
    load.await_all(30)
    slowest_s = 0.0
    with stage.server.client() as client, closing(RedisStreams.from_url(stage.server.url)) as broker:
        counted = _counted(worker)
        with _nothing_dies(worker):
            for start in range(0, len(order), _AT_ONCE):
                keys = order[start : start + _AT_ONCE]
                for key in keys:
                    overwrite(client, key)
                begun = time.monotonic()
                wait_until(partial(_are_mended, client, keys), 30, "all are mended")
                slowest_s = max(slowest_s, time.monotonic() - begun)
                for key in keys:
                    (aside, *_) = [each for each in broker.quarantined(queues.slot_in(key)) if each.key == key][::-1]
                    assert bytes_of(client, aside.name) == FOREIGN
                wait_until(lambda: broker.spec(stage.model), 30, "the model is announced")
                load.publish(4)
                load.await_all(30)
        wait_until(lambda: _counted(worker) >= counted + len(order), 30, "each is counted")
    trial.recovered(slowest_s, within=MENDED_S)
    trial.check(load.history(), times=len(order))
    load.check_answers()


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("key_of", OF_A_JOB)
def test_a_foreign_key_of_one_job_harms_no_other(
    key_of: str, seed: int, stage: Stage, start_load: StartLoad, trial: Trial
):
    """The key of one job among neighbours in a batch: they complete, and the worker lives."""
    (worker, *_) = stage.workers
    neighbours = start_load(stage.server, stage.forward_log)
    victims = start_load(stage.server, stage.forward_log)
    place = random.Random(seed).randrange(8)
    with stage.server.client() as client, _nothing_dies(worker):
        worker.freeze()
        try:
            neighbours.publish(place)
            victim = victims.submit(-1.0)
            assert victim is not None
            neighbours.publish(8 - place)
            entry_id, _ = client.xrange(queues.stream_key(stage.model, Priority.NORMAL))[place]
            # Its events are followed: then a commit writes to them.
            client.setrange(queues.record_key(victim.id), 1, b"s")
            key = OF_A_JOB[key_of](stage, victim.id, entry_id)
            overwrite(client, key)
        finally:
            worker.thaw()
        neighbours.await_all(30)
        queue = queues.stream_key(stage.model, Priority.NORMAL)
        wait_until(lambda: not client.xpending(queue, GROUP)["pending"], 30, "the victim has ended")
        if key_of != "its crashes":
            wait_until(lambda: not is_foreign(client, key), 30, f"{key_of} is mended")
    trial.check(neighbours.history())
    neighbours.check_records()
    if key_of != "its record":
        victims.check_records()


@pytest.mark.parametrize("seed", seeds())
def test_a_worker_starts_among_foreign_keys(seed: int, open_stage: OpenStage, start_load: StartLoad, trial: Trial):
    """All keys of a model are foreign when its first worker starts: it starts once, and answers."""
    stage = open_stage()
    with stage.server.client() as client:
        order = [make(stage.model) for make in FIXED]
        random.Random(seed).shuffle(order)
        for key in order:
            overwrite(client, key)
        worker = stage.start_worker()
        with _nothing_dies(worker), closing(RedisStreams.from_url(stage.server.url)) as broker:
            wait_until(lambda: not any(is_foreign(client, key) for key in order), 30, "all is mended")
            wait_until(lambda: broker.spec(stage.model), 30, "the model is announced")
            load = start_load(stage.server, stage.forward_log)
            load.publish(20)
            trial.check(load.history(), times=len(order))
            load.check_answers()
    stage.close()
