"""The real worker and clients, over the broker in memory, in thousands of schedules full of faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.__main__ import MUTATIONS
from tests.simulation.broker import UnreliableEnd
from tests.simulation.every_mutant import EVERY_MUTANT
from tests.simulation.mutants import Mutant
from tests.simulation.parts import SteppedWakeUp
from tests.simulation.runs import command_for, outcomes
from tests.simulation.worker import SteppedDrain

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "2000"))
"""Schedules per run; `make chaos` runs for minutes."""
CHUNK = 250
MUTANT_SEEDS = 2000
"""A mutant that survives so many schedules is not caught."""
FOUND = {
    16: "ToldTwice: a repeated commit told its client again (broker in memory)",
    146: "IdleTakesOverAfterAPause: an idle worker's first call after a pause took over from the living",
    13: "LateTakeOver: a take-over that lay in the socket of a paused broker took from the living when it woke",
    209: "TakeOverAfterAShortPause: a pause of 0.8 s was not seen as one by workers with leases of 1 s",
    987: "ExpiredAfterAPause: a client ended an overdue job after a pause, before its living worker could renew",
    8839: "a worker whose take-overs went on adopted no job of another model meanwhile (too rare for a mutant)",
    302855: "ExpiredAfterAPause: the schedule in which it was found",
}
"""Schedules that show a bug which was found here, and the mutant that brings it back. A seed means the same schedule
only as long as plan.py and the calls of a worker stay as they are; the mutant remains."""


def _check(seeds) -> None:
    broken = [f"{command_for(each.seed)}: {'; '.join(each.violations)}" for each in outcomes(seeds) if each.violations]
    assert not broken, "\n".join(broken[:20])


FEW = 100
LATER = [range(FEW, CHUNK), *(range(first, min(first + CHUNK, SEEDS)) for first in range(CHUNK, SEEDS, CHUNK))]


@pytest.mark.parametrize("seeds", [range(FEW), *(pytest.param(each, marks=pytest.mark.slow) for each in LATER)])
def test_promises_hold_in_every_schedule(seeds: range):
    """Nothing lost, no second effect, no late start, no wrong order, redelivered in time, and an end of everything."""
    _check(seeds)


def test_found_bugs_stay_away():
    """The schedules that show the bugs which were once found are clean."""
    _check(sorted(FOUND))


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 400), marks=pytest.mark.slow)])
def test_a_worker_at_rest_has_nothing_to_wake_up_for(seeds: range, monkeypatch: pytest.MonkeyPatch):
    """In turns that nobody rang for it calls no broker, and is at rest again: its sleep may be that long."""
    turns: Counter[str] = Counter()
    calls: list[str] = []
    step, sleep_s, call = SteppedDrain.step, SteppedDrain.sleep_s, UnreliableEnd._call

    def counted_step(drain: SteppedDrain, longest_wait_s: float = 0.0) -> float | None:
        claimer = drain.parts.claimer
        assert isinstance(claimer.wake_up, SteppedWakeUp)
        wake_up = claimer.wake_up
        has_cause = wake_up.has_rung or wake_up.has_woken or wake_up.has_answer()
        was_asleep = drain.is_at_rest and not has_cause and drain._schedule.now < claimer.next_wakeup()
        calls.clear()
        pause_s = step(drain, longest_wait_s)
        if was_asleep:
            turns["idle" if not calls and drain.is_at_rest else "busy"] += 1
        return pause_s

    def noted_call(end: UnreliableEnd, name: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return call(end, name, *args, **kwargs)

    monkeypatch.setattr(SteppedDrain, "step", counted_step)
    monkeypatch.setattr(SteppedDrain, "sleep_s", lambda drain: min(0.1, sleep_s(drain)))
    monkeypatch.setattr(UnreliableEnd, "_call", noted_call)
    _check(seeds)
    assert turns["idle"] > 10 * len(seeds)
    assert turns["busy"] == 0


def test_same_seed_gives_the_same_schedule():
    """Neither the process nor its hash seed has a part in a trace: a failure can be repeated anywhere."""
    traces = [_digests(hash_seed, processes) for hash_seed, processes in (("0", "1"), ("4711", "2"))]
    assert traces[0] == traces[1]
    assert len({line.split()[1] for line in traces[0]}) == len(traces[0])


def _digests(hash_seed: str, processes: str) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "tests.simulation",
        "--from",
        "300",
        "--seeds",
        "25",
        "--digests",
        "--processes",
        processes,
    ]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    root = Path(__file__).parents[2]
    answer = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True, timeout=180)
    return [line for line in answer.stdout.splitlines() if line[0].isdigit() and "schedules" not in line]


LATE = {"ArmsAreForgotten", "KeptBehindSuspects", "PauseForgotten", "VersionsShareAFlight", "VersionsShareAnswers"}
"""Mutants that show themselves after some hundred schedules only: too long for `make test`."""


def _mutants() -> Iterator[Any]:
    """Of those that are caught by the same finding, the first for `make test`, and the others for `make test-all`."""
    found: set[str] = set()
    for mutant in EVERY_MUTANT:
        is_late = mutant.finding in found or mutant.mutation.name in LATE
        marks = [pytest.mark.slow, pytest.mark.timeout(1800)] if is_late else []
        found.add(mutant.finding)
        yield pytest.param(mutant, marks=marks, id=mutant.mutation.name)


def test_late_mutants_are_mutants():
    """Each name in LATE is the name of a mutant."""
    assert {mutant.mutation.name for mutant in EVERY_MUTANT} >= LATE


def test_every_mutant_has_a_name_of_its_own_by_which_the_command_runs_it():
    """The command takes each of them by its name, in whichever list it is."""
    names = [mutant.mutation.name for mutant in EVERY_MUTANT]
    assert len({*names}) == len(names)
    assert {*names} < {*MUTATIONS}


@pytest.mark.parametrize("mutant", list(_mutants()))
def test_broken_promise_is_caught(mutant: Mutant):
    """Each mutant shows the finding that it is made for, in a schedule that is clean without it."""
    runs = outcomes(range(MUTANT_SEEDS), mutant.mutation)
    caught = next((each for each in runs if _shows(each.violations, mutant)), None)
    assert caught is not None, f"{mutant.mutation.name} survived {MUTANT_SEEDS} schedules"
    _check([caught.seed])


def _shows(violations: tuple[str, ...], mutant: Mutant) -> bool:
    return any(each.startswith(mutant.finding) for each in violations)
