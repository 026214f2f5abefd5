"""F9: a forward never returns, asleep or holding the interpreter's lock, with neighbours in its batch."""

from __future__ import annotations

import json
import os
import random
import time

import pytest

from penstock.registry.errors import ForwardTimeout
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
    """The process is gone a second after the limit; the job runs once more alone, and its client gets a time-out.

    The others are answered. A job that hung alone at once has no second forward.
    """
    how = [*HANGING][seed % len(HANGING)]
    stage = open_stage(model="sluggish")
    package = write_poisonable(stage.models_root, stage.forward_log, stage.model, HANGING[how])
    with (package / "model.yaml").open("a") as spec:
        spec.write(f"timeout_s: {LIMIT_S}\n")
    stage.start_worker(is_supervised=True)
    load = start_load(stage.server, stage.forward_log, stage.model)
    poison, place = -1000.0 - seed, random.Random(f"{seed} {how}").randrange(BATCH)

    def hanging() -> list[tuple[int, int]]:
        """The process and the number of rows of each forward that hangs."""
        notes = [json.loads(line) for line in stage.forward_log.read_text().splitlines()]
        return [(note["pid"], len(note["rows"])) for note in notes if poison in note["rows"]]

    load.publish(place)
    handle = load.submit(poison)
    assert handle is not None
    load.publish(BATCH - 1 - place)
    forwards = rows = 0
    while rows != 1:
        wait_until(lambda: len(hanging()) > forwards, WITHIN_S, "the forward hangs")  # noqa: B023  # called at once
        begun = time.monotonic()
        forwards += 1
        pid, rows = hanging()[-1]
        wait_until(lambda: not _is_alive(pid), WITHIN_S, "the process that hangs is killed")  # noqa: B023  # as above
        trial.recovered(time.monotonic() - begun, within=KILLED_WITHIN_S + MARGIN_S)
    with pytest.raises(ForwardTimeout, match=f"The forward took longer than its limit of {LIMIT_S:g} s"):
        handle.result(180)
    load.await_all(WITHIN_S)
    assert len(hanging()) == forwards <= 2
    trial.check(load.history(), times=forwards)
    load.check_answers(without=poison)
    with stage.server.client() as client:
        assert client.xlen(dead_key(stage.model)) == 0
    stage.close()
