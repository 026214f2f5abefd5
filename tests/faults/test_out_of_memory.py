"""F8: the model runs out of memory at a batch of 16, and at one of 8."""

from __future__ import annotations

import pytest

from tests.faults.conftest import OpenStage, StartLoad, Trial
from tests.faults.models import write_cramped
from tests.faults.rounds import seeds
from tests.packages import recorded_forwards

BATCH = 16
FITS = 4
WITHIN_S = 2.0


@pytest.mark.parametrize("seed", seeds())
def test_batch_that_does_not_fit_is_split_and_the_cap_is_learnt(
    seed: int, open_stage: OpenStage, start_load: StartLoad, trial: Trial
):
    """16 become 8 become 4, all succeed; of the next jobs no batch is above 4, and memory runs out no more."""
    stage = open_stage(model="cramped")
    write_cramped(stage.models_root, stage.forward_log, stage.model, fits=FITS, max_batch_size=BATCH)
    worker = stage.start_worker()
    load = start_load(stage.server, stage.forward_log, stage.model)
    warm = len(recorded_forwards(stage.forward_log))

    worker.freeze()
    load.publish(BATCH + seed)
    worker.thaw()
    trial.recovered(load.await_all(30), within=WITHIN_S)
    sizes = [len(rows) for rows in recorded_forwards(stage.forward_log)[warm:]]
    assert any(large > FITS for large in sizes), "everything fitted"
    learnt_at = len(recorded_forwards(stage.forward_log))

    load.publish(4 * BATCH)
    load.await_all(10)
    assert max(len(rows) for rows in recorded_forwards(stage.forward_log)[learnt_at:]) <= FITS
    history = load.history()
    # A forward that did not fit counts as begun: only answers are to be single.
    findings = trial.check(history)
    assert len(findings.re_executed) <= BATCH + seed
    load.check_answers()
    assert {result.attempt for result in load.results.values()} == {1}
    assert worker.is_running
    stage.close()
