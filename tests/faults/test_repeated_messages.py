"""F11: every message is delivered three times, in any order, to workers that share the queue."""

from __future__ import annotations

import random
import threading

import pytest

from penstock.registry.queues import GROUP, Priority, flow_key, stream_key
from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.load import Load
from tests.faults.rounds import seeds

JOBS = 200


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """Two workers, so that copies of a job run at the same time."""
    stage = open_stage(forward_s=0.005)
    stage.start_workers(2)
    return stage


@pytest.mark.parametrize("seed", seeds(ways=2))
def test_message_delivered_three_times_has_one_effect(seed: int, stage: Stage, start_load: StartLoad, trial: Trial):
    """Three entries with the same sealed bytes for every job, shuffled: one result each, told once, and all ends."""
    load = start_load(stage.server, stage.forward_log)
    queue = stream_key(stage.model, Priority.NORMAL)
    for worker in stage.workers:
        worker.freeze()
    try:
        load.publish(JOBS)
        with stage.server.client() as client:
            copies = [fields[b"e"] for _, fields in client.xrange(queue)] * 2
            assert len(copies) == 2 * JOBS
            random.Random(seed).shuffle(copies)
            for sealed in copies:
                client.xadd(queue, {"e": sealed})
    finally:
        for worker in stage.workers:
            worker.thaw()
    findings = trial.check(load.history(), times=3 * JOBS)
    assert findings.re_executed, "no copy ever ran"
    load.check_answers()
    with stage.server.client() as client:
        assert client.xpending(queue, GROUP)["pending"] == 0
        assert not [field for field in client.hkeys(flow_key(stage.model)) if field.startswith(b"t:")]


@pytest.mark.parametrize("seed", seeds(ways=2))
def test_submit_repeated_by_three_clients_is_one_job(seed: int, stage: Stage, start_load: StartLoad, trial: Trial):
    """The same idempotency keys from three connections at once, each in its own order: one job per key."""
    keeper = start_load(stage.server, stage.forward_log)
    numbers = [2_000_000.0 + seed * 1000 + each for each in range(JOBS // 2)]
    ids: list[dict[float, str]] = [{}, {}, {}]
    threads = [
        threading.Thread(target=_submit_all, args=(keeper, random.Random(f"{seed} {turn}"), numbers, ids[turn]))
        for turn in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ids[0] == ids[1] == ids[2]
    assert len(set(ids[0].values())) == len(numbers)
    findings = trial.check(keeper.history(), times=3 * len(numbers))
    assert findings.re_executed == frozenset()


def _submit_all(load: Load, chance: random.Random, numbers: list[float], ids: dict[float, str]) -> None:
    for number in chance.sample(numbers, len(numbers)):
        handle = load.submit(number, idempotency_key=f"key of {number}")
        assert handle is not None
        ids[number] = handle.id
