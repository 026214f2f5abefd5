"""F7: poison (SIGSEGV, os._exit, abort) inside a batch of 16 kills every process that runs it."""

from __future__ import annotations

import random
from contextlib import closing

import pytest

from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import DeadLettered
from penstock.registry.package import load_package
from penstock.registry.queues import Priority, dead_key, stream_key
from tests.faults.conftest import OpenStage, StartLoad, Trial
from tests.faults.models import DEADLY, write_poisonable
from tests.faults.rounds import seeds
from tests.packages import recorded_forwards
from tests.servers import wait_until

BATCH = 16
CRASHES = 3
WITHIN_S = 30.0
"""Three deaths: each time a lease of a second, the supervisor's pause, and the start of a process."""


@pytest.mark.parametrize("seed", seeds())
def test_poison_ends_in_the_dead_letters_and_harms_no_other_job(
    seed: int, open_stage: OpenStage, start_load: StartLoad, trial: Trial
):
    """The 15 others succeed, once each; the poison is a dead letter with reason and bytes after three crashes."""
    fault = [*DEADLY][seed % len(DEADLY)]
    stage = open_stage(model="fragile")
    package = load_package(write_poisonable(stage.models_root, stage.forward_log, stage.model, DEADLY[fault]))
    # The spec is there before a worker starts, so that the first batch is a full one.
    with closing(RedisStreams.from_url(stage.server.url)) as broker:
        broker.put_spec(stage.model, package.spec.to_json())
    load = start_load(stage.server, stage.forward_log, stage.model)
    poison, place = -1000.0 - seed, random.Random(seed).randrange(BATCH)
    load.publish(place)
    handle = load.submit(poison)
    assert handle is not None
    load.publish(BATCH - 1 - place)
    with stage.server.client() as client:
        _, fields = client.xrange(stream_key(stage.model, Priority.NORMAL))[place]
        worker = stage.start_worker(is_supervised=True, wait=False)
        trial.recovered(load.await_all(2 * WITHIN_S), within=WITHIN_S)
        ((_, letter),) = client.xrange(dead_key(stage.model))
    assert letter[b"e"] == fields[b"e"]
    with pytest.raises(DeadLettered, match=rf"Poison: {CRASHES} worker processes died"):
        handle.result(180)
    findings = trial.check(load.history(), times=CRASHES)
    load.check_answers(without=poison)
    forwards = recorded_forwards(stage.forward_log)
    assert [rows for rows in forwards if poison in rows][1:] == [[poison]] * (CRASHES - 1), "a suspect had company"
    assert max(map(len, forwards)) == BATCH
    assert len(findings.re_executed - {poison}) <= BATCH - 1
    wait_until(worker.is_ready, 30, "the supervisor has a worker again")
    later = start_load(stage.server, stage.forward_log, stage.model)
    later.publish(BATCH)
    trial.check(later.history(), times=0)
    later.check_answers()
    stage.close()
