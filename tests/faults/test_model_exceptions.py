"""F16: models raise what is not an Exception, or what cannot be printed."""

from __future__ import annotations

import random

import pytest

from penstock.registry.errors import JobFailed
from penstock.registry.queues import dead_key
from tests.faults.companion import Companion
from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.load import Load
from tests.faults.models import RAISING, write_misbehaving
from tests.faults.rounds import seeds
from tests.packages import write_double

BATCH = 4
WITHIN_S = 2.0
"""A lease and a second: the longest pause of another model of the worker."""


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """A supervised worker with the model that misbehaves and another one; no round may cost it a process."""
    stage = open_stage(model="fragile")
    write_misbehaving(stage.models_root, stage.forward_log, stage.model, [*RAISING.values()])
    write_double(stage.models_root)
    stage.start_worker(is_supervised=True)
    return stage


def fail_one(load: Load, number: float, place: int) -> None:
    """A batch whose job at `place` has this number: it fails, and its neighbours are answered."""
    load.publish(place)
    handle = load.submit(number)
    assert handle is not None
    load.publish(BATCH - 1 - place)
    with pytest.raises(JobFailed, match=r"\(model\.py, line \d+, in \w+\)"):
        handle.result(180)
    load.await_all(60)
    load.check_answers(without=number)


@pytest.mark.parametrize("seed", seeds())
def test_every_exception_fails_its_job_at_once_and_costs_no_process(
    seed: int, stage: Stage, start_load: StartLoad, trial: Trial
):
    """Each kind in a batch of four: one failed job, three answers, the same process, and answers of another model."""
    shuffled = random.Random(seed)
    order = shuffled.sample(range(len(RAISING)), len(RAISING))
    companion, process = Companion(), stage.workers[0].report()["pid"]
    histories = []
    with companion.asked(stage.server, "double"):
        for index in order:
            load = start_load(stage.server, stage.forward_log, stage.model)
            fail_one(load, -1.0 - index, shuffled.randrange(BATCH))
            histories.append(load.history())
        companion.await_answers(2)
    trial.check(*histories, times=len(order))
    trial.recovered(companion.longest_s, within=WITHIN_S)
    assert stage.workers[0].report()["pid"] == process
    with stage.server.client() as client:
        assert client.xlen(dead_key(stage.model)) == 0
