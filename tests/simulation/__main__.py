"""Runs schedules: `python -m tests.simulation [--from SEED] [--seeds N] [--minutes M] [--mutant NAME] [--trace]`."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

from tests.simulation.checker import SOUND, Outcome
from tests.simulation.every_mutant import EVERY_MUTANT
from tests.simulation.runs import command_for, outcomes, outcomes_on

_PROGRESS_EVERY_S: Final = 5.0
_MOST_SHOWN: Final = 20
MUTATIONS: Final = {mutation.name: mutation for mutation in (SOUND, *(mutant.mutation for mutant in EVERY_MUTANT))}


class _Tally:
    """What has come of the schedules so far."""

    def __init__(self) -> None:
        self.failed: list[int] = []
        self._begun = time.perf_counter()
        self._schedules = self._steps = self._jobs = self._re_executed = 0
        self._injected: Counter[str] = Counter()

    def add(self, outcome: Outcome) -> None:
        """One more."""
        self._schedules += 1
        self._steps += outcome.steps
        self._jobs += outcome.jobs
        self._re_executed += outcome.re_executed
        self._injected += outcome.injected
        if outcome.violations:
            self.failed.append(outcome.seed)

    @property
    def elapsed_s(self) -> float:
        """Since the first schedule began."""
        return time.perf_counter() - self._begun

    def line(self) -> str:
        """All in one line."""
        rate = self._schedules / max(self.elapsed_s, 1e-9) * 60
        return (
            f"{self._schedules} schedules ({rate:.0f}/min), {self._jobs} jobs, {self._steps} steps, "
            f"{self._injected.total()} faults, {self._re_executed} run again, {len(self.failed)} violations"
        )

    def faults(self) -> str:
        """How many of each kind."""
        return ", ".join(f"{kind} {count}" for kind, count in sorted(self._injected.items()))


def main() -> int:
    """Exits 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Runs simulated schedules.")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="SEED", help="the first seed (0)")
    parser.add_argument("--seeds", type=int, metavar="N", help="how many (5000, or as many as the minutes allow)")
    parser.add_argument("--minutes", type=float, metavar="M", help="for how long at most")
    parser.add_argument("--trace", action="store_true", help="show everything that happens")
    parser.add_argument("--digests", action="store_true", help="show each trace in one word")
    parser.add_argument("--mutant", choices=MUTATIONS, default=SOUND.name, metavar="NAME", help="see every_mutant.py")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="one for each core")
    options = parser.parse_args()
    count = options.seeds or (5000 if options.minutes is None else None)
    tally = _Tally()
    tell_at = _PROGRESS_EVERY_S
    seeds, mutation = _seeds(options.first, count), MUTATIONS[options.mutant]
    # Traces stay in the process that made them, and a mutation cannot be sent to another one.
    is_alone = options.trace or options.processes == 1 or mutation is not SOUND
    runs = outcomes(seeds, mutation) if is_alone else outcomes_on(options.processes, seeds)
    for outcome in _shown(runs, trace=options.trace, digests=options.digests):
        tally.add(outcome)
        if outcome.violations and len(tally.failed) <= _MOST_SHOWN:
            _say(f"seed {outcome.seed}: {'; '.join(outcome.violations)}\n  {command_for(outcome.seed)}")
        if tally.elapsed_s >= tell_at:
            tell_at = tally.elapsed_s + _PROGRESS_EVERY_S
            sys.stderr.write(f"{tally.line()}\n")
        if options.minutes is not None and tally.elapsed_s > options.minutes * 60:
            break
    _say(f"faults: {tally.faults()}")
    _say(tally.line())
    return 1 if tally.failed else 0


def _seeds(first: int, count: int | None) -> Iterator[int]:
    return iter(range(first, first + count)) if count is not None else itertools.count(first)


def _shown(runs: Iterator[Outcome], *, trace: bool, digests: bool) -> Iterator[Outcome]:
    for outcome in runs:
        if trace:
            _say(f"{outcome.plan}\n" + "\n".join(outcome.trace))
        if digests:
            _say(f"{outcome.seed} {outcome.digest}")
        yield outcome


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
