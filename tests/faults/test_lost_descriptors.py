"""F17: a model closes the worker's descriptors."""

from __future__ import annotations

import random

import pytest

from penstock.workers.process.exit_status import EXIT_UNHEALTHY
from tests.faults.companion import Companion
from tests.faults.conftest import OpenStage, Stage, StartFailing, StartLoad, Trial
from tests.faults.models import CLOSING, CLOSING_ALL, write_misbehaving
from tests.faults.rounds import seeds
from tests.packages import write_package
from tests.servers import wait_until

FIRST, *OTHERS = CLOSING_ALL
BATCH = 4
WITHIN_S = 2.0
"""A lease and a second."""
REPLACED_WITHIN_S = 10.0
"""A watch, the commit of what has run, the supervisor's pause and the start of a process; leases of a second."""
CHATTY = """
import os

def build():
    def forward(inputs):
        print("from Python")
        os.write(1, b"from a library\\n")
        return {"y": inputs["x"] * 2}

    return forward
"""


def open_with(open_stage: OpenStage, faults: list[str]) -> Stage:
    """A supervised worker with a model that does this and one that prints."""
    stage = open_stage(model="fragile")
    write_misbehaving(stage.models_root, stage.forward_log, stage.model, faults)
    write_package(stage.models_root, "chatty", CHATTY)
    stage.start_worker(is_supervised=True)
    return stage


@pytest.mark.parametrize("seed", seeds())
def test_without_standard_streams_a_worker_goes_on(
    seed: int, open_stage: OpenStage, start_load: StartLoad, trial: Trial
):
    """The job and its neighbours are answered, the process and its log stay, another model prints and answers."""
    shuffled = random.Random(seed)
    order = shuffled.sample(range(len(CLOSING)), len(CLOSING))
    stage = open_with(open_stage, [*CLOSING.values()])
    (worker,) = stage.workers
    companion, process = Companion(), worker.report()["pid"]
    histories = []
    with companion.asked(stage.server, "chatty"):
        # Every connection that is made with the first jobs is there: one that is made at the very moment of the fault
        # gets the number that was closed.
        companion.await_answers(20)
        for index in order:
            load = start_load(stage.server, stage.forward_log, stage.model)
            place = shuffled.randrange(BATCH)
            load.publish(place)
            load.submit(-1.0 - index)
            load.publish(BATCH - 1 - place)
            load.await_all(60)
            load.check_answers()
            histories.append(load.history())
            companion.await_answers(2)
    trial.check(*histories, times=len(order))
    trial.recovered(companion.longest_s, within=WITHIN_S)
    assert worker.report()["pid"] == process
    told = [line["msg"] for line in worker.logs() if "a model closed" in line["msg"]]
    assert len(told) == len(set(told)), "said once for each stream"
    stage.close()


@pytest.mark.parametrize("seed", seeds(ways=len(CLOSING_ALL)))
@pytest.mark.parametrize("fault", [FIRST, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_without_connections_a_worker_is_replaced(
    fault: str, seed: int, open_stage: OpenStage, start_load: StartLoad, trial: Trial
):
    """What has run is committed or runs again, one process ends for it, and the next one serves both models."""
    stage = open_with(open_stage, [CLOSING_ALL[fault]])
    (worker,) = stage.workers
    companion, process = Companion(), worker.report()["pid"]
    place = random.Random(seed).randrange(BATCH)
    with companion.asked(stage.server, "chatty"):
        load = start_load(stage.server, stage.forward_log, stage.model)
        load.publish(place)
        load.submit(-1.0)
        load.publish(BATCH - 1 - place)
        load.await_all(60)
        wait_until(lambda: worker.report().get("pid", process) != process, 60, "another process serves")
        wait_until(worker.is_ready, 60, "it is ready")
        after = worker.report()["pid"]
        companion.await_answers(2)
    later = start_load(stage.server, stage.forward_log, stage.model)
    later.publish(BATCH)
    later.await_all(60)
    if fault != "all":
        # Its log is left: not the supervisor ended it, after a silence, but the process itself, in order.
        reasons = [line["reason"] for line in worker.logs() if line["msg"] == "worker gives up"]
        assert [reason.partition(":")[0] for reason in reasons] == ["a model closed descriptors of this process"]
    trial.check(load.history(), later.history(), times=1)
    trial.recovered(companion.longest_s, within=REPLACED_WITHIN_S)
    load.check_answers()
    later.check_answers()
    assert worker.report()["pid"] == after, "one process ended"
    stage.close()


@pytest.mark.parametrize("point", ["before-commit", "before-claim"])
def test_a_drain_without_progress_is_replaced_whatever_the_reason(
    point: str, open_stage: OpenStage, start_failing: StartFailing, start_load: StartLoad, trial: Trial
):
    """The I/O thread hangs while leases are renewed and the process lives: it ends after the limit, with status 70,
    and another worker has its jobs."""
    stage = open_stage()
    limits = {"PENSTOCK_INFERENCE_QUEUE_PROGRESS_TIMEOUT_S": "2", "PENSTOCK_INFERENCE_TIMEOUT_SECONDS": "1"}
    hanging = start_failing(stage.server, stage.models_root, how="hang", point=point, environment=limits)
    load = start_load(stage.server, stage.forward_log, stage.model)
    load.publish(BATCH)
    assert hanging.wait(180) == EXIT_UNHEALTHY
    reasons = [line["reason"] for line in hanging.logs() if line["msg"] == "worker gives up"]
    assert reasons == ["the drain thread has made no progress for 2 s"]
    stage.start_worker()
    load.await_all(60)
    trial.check(load.history(), times=1)
    load.check_answers()
    stage.close()
