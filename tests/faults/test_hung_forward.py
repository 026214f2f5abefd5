"""F9: a forward never returns, asleep or holding the interpreter's lock, with neighbours in its batch."""

from __future__ import annotations

import json
import os
import random
import time

import pytest

from penstock.registry.errors import DeadLettered
from penstock.registry.queues import dead_key
from tests.faults.conftest import OpenStage, StartLoad, Trial
from tests.faults.models import HANGING, write_poisonable
from tests.faults.rounds import seeds
from tests.servers import wait_until

BATCH = 16
LIMIT_S = 1.0
KILLED_WITHIN_S = LIMIT_S + 1.0
MARGIN_S = 0.5
"""For a busy machine. That the process is silent is noticed only after 31 s, the limit of other models."""
CRASHES = 2
"""The setting of these workers: hung once, tried again alone, and that is it."""
WITHIN_S = 30.0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("seed", seeds())
def test_hung_forward_is_killed_and_its_neighbours_succeed(
    seed: int, open_stage: OpenStage, start_load: StartLoad, trial: Trial
):
    """The process is gone a second after the limit; the job is tried again, then dead; the others are answered."""
    how = [*HANGING][seed % len(HANGING)]
    stage = open_stage(model="sluggish")
    package = write_poisonable(stage.models_root, stage.forward_log, stage.model, HANGING[how])
    with (package / "model.yaml").open("a") as spec:
        spec.write(f"timeout_s: {LIMIT_S}\n")
    stage.start_worker(is_supervised=True, PENSTOCK_INFERENCE_QUEUE_MAX_CRASHES=str(CRASHES))
    load = start_load(stage.server, stage.forward_log, stage.model)
    poison, place = -1000.0 - seed, random.Random(f"{seed} {how}").randrange(BATCH)

    def hanging() -> list[int]:
        notes = [json.loads(line) for line in stage.forward_log.read_text().splitlines()]
        return [note["pid"] for note in notes if poison in note["rows"]]

    load.publish(place)
    handle = load.submit(poison)
    assert handle is not None
    load.publish(BATCH - 1 - place)
    for crash in range(CRASHES):
        wait_until(lambda: len(hanging()) > crash, WITHIN_S, "the forward hangs")  # noqa: B023  # called at once
        begun = time.monotonic()
        wait_until(lambda: not _is_alive(hanging()[-1]), WITHIN_S, "the process that hangs is killed")
        trial.recovered(time.monotonic() - begun, within=KILLED_WITHIN_S + MARGIN_S)
    load.await_all(WITHIN_S)
    assert len(hanging()) == CRASHES
    with pytest.raises(DeadLettered, match=f"Poison: {CRASHES} worker processes died, or hung"):
        handle.result(60)
    trial.check(load.history(), times=CRASHES)
    load.check_answers(without=poison)
    with stage.server.client() as client:
        assert client.xlen(dead_key(stage.model)) == 1
    stage.close()
