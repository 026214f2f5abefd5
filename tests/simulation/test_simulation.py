"""The real worker and clients, over the broker in memory, in thousands of schedules full of faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.runs import command_for, outcomes

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "2000"))
"""Schedules per run; `make chaos` runs for minutes."""
CHUNK = 250
MUTANT_SEEDS = 2000
"""A mutant that survives so many schedules is not caught."""
FOUND = {
    16: "ToldTwice: a repeated commit told its client again (broker in memory)",
    56: "IdleTakesOverAfterAPause: an idle worker's first call after a pause took over from the living",
    119: "LateTakeOver: a take-over that lay in the socket of a paused broker took from the living when it woke",
    209: "TakeOverAfterAShortPause: a pause of 0.8 s was not seen as one by workers with leases of 1 s",
}
"""Schedules that show a bug which was found here, and the mutant that brings it back. A seed means the same schedule
only as long as plan.py and the calls of a worker stay as they are; the mutant remains."""


def _check(seeds) -> None:
    broken = [f"{command_for(each.seed)}: {'; '.join(each.violations)}" for each in outcomes(seeds) if each.violations]
    assert not broken, "\n".join(broken[:20])


LATER = [pytest.param(first, marks=pytest.mark.slow) for first in range(CHUNK, SEEDS, CHUNK)]


@pytest.mark.parametrize("first", [0, *LATER])
def test_promises_hold_in_every_schedule(first):
    """Nothing lost, no second effect, no late start, no wrong order, redelivered in time, and an end of everything."""
    _check(range(first, min(first + CHUNK, SEEDS)))


def test_found_bugs_stay_away():
    """The schedules that show the bugs which were once found are clean."""
    _check(sorted(FOUND))


def test_same_seed_gives_the_same_schedule():
    """Neither the process nor its hash seed has a part in a trace: a failure can be repeated anywhere."""
    traces = [_digests(hash_seed) for hash_seed in ("0", "4711")]
    assert traces[0] == traces[1]
    assert len({line.split()[1] for line in traces[0]}) == len(traces[0])


def _digests(hash_seed: str) -> list[str]:
    command = [sys.executable, "-m", "tests.simulation", "--from", "300", "--seeds", "25", "--digests"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    root = Path(__file__).parents[2]
    answer = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return [line for line in answer.stdout.splitlines() if line[0].isdigit() and "schedules" not in line]


LATE = {"PauseForgotten", "VersionsShareAFlight", "VersionsShareAnswers"}
"""Mutants that show themselves after some hundred schedules only: too long for `make test`."""


def _mutants() -> Iterator[Any]:
    """Of those that are caught by the same finding, the first for `make test`, and the others for `make test-all`."""
    found: set[str] = set()
    for mutant in MUTANTS:
        marks = [pytest.mark.slow] if mutant.finding in found or mutant.mutation.name in LATE else []
        found.add(mutant.finding)
        yield pytest.param(mutant, marks=marks, id=mutant.mutation.name)


def test_late_mutants_are_mutants():
    """Each name in LATE is the name of a mutant."""
    assert {mutant.mutation.name for mutant in MUTANTS} >= LATE


@pytest.mark.parametrize("mutant", list(_mutants()))
def test_broken_promise_is_caught(mutant: Mutant):
    """Each mutant shows the finding that it is made for, in a schedule that is clean without it."""
    runs = outcomes(range(MUTANT_SEEDS), mutant.mutation)
    caught = next((each for each in runs if _shows(each.violations, mutant)), None)
    assert caught is not None, f"{mutant.mutation.name} survived {MUTANT_SEEDS} schedules"
    _check([caught.seed])


def _shows(violations: tuple[str, ...], mutant: Mutant) -> bool:
    return any(each.startswith(mutant.finding) for each in violations)
