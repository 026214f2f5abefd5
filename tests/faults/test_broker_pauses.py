"""F5: the broker is paused (SIGSTOP) for 15 s, then goes on."""

from __future__ import annotations

import time

import pytest

from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.rounds import is_full, seeds

PAUSE_S = 15.0 if is_full() else 3.0
"""Longer than the workers' leases of one second either way."""
TIMEOUT_S = 1.0
"""The client's."""
RESUME_S = 2.0


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """Two workers: each could take the other for dead."""
    stage = open_stage(forward_s=0.05)
    stage.start_workers(2)
    return stage


@pytest.mark.parametrize("seed", seeds())
def test_paused_broker_answers_no_call_and_work_resumes(seed: int, stage: Stage, start_load: StartLoad, trial: Trial):
    """During the pause calls end within their time-out; after it workers go on within 2 s, and no job ran twice."""
    waiting = start_load(stage.server, stage.forward_log)
    hasty = start_load(stage.server, stage.forward_log, timeout_s=TIMEOUT_S)
    hasty.publish(1)
    with waiting.running():
        waiting.await_progress(20)
        stage.server.pause()
        paused = time.monotonic()
        try:
            refused = 0
            while time.monotonic() < paused + PAUSE_S:
                hasty.publish(1)
                refused += 1
        finally:
            stage.server.resume()
        trial.recovered(waiting.await_progress(30), within=RESUME_S)
    assert refused > 1
    findings = trial.check(waiting.history(), hasty.history())
    assert findings.re_executed == frozenset()
    waiting.check_answers()
