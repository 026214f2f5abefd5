"""`make chaos`: every fault test with its full counts, and the table of what was lost.

    python -m tests.faults [--rounds 20] [--seed 1] [--only F5] [--output FILE]

pytest shows the progress, one line per round. Exit status 1 when a test failed or a recovery took too long.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import pytest

FOLDER: Final = Path(__file__).parent
_COLUMNS: Final = (
    *("Fault", "What was done", "How often", "Jobs", "Lost", "Duplicate effects", "Hangs", "Slowest recovery"),
)
_MOST_SEED: Final = 100
"""A worker takes more steps than that under any load."""
_SIGNS_OF_A_HANG: Final = ("not within", "Timeout", "still runs after")
"""How tests/servers.py and pytest-timeout say that something waited in vain."""


@dataclass(slots=True)
class Tally:
    """What the rounds of one fault add up to."""

    fault: str
    done: str
    times: int = 0
    jobs: int = 0
    lost: int = 0
    duplicated: int = 0
    hangs: int = 0
    slowest_s: float | None = None
    late: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, report: pytest.TestReport) -> None:
        """One round."""
        told = defaultdict(list)
        for name, value in report.user_properties:
            told[name].append(value)
        self.times += sum(map(_whole, told["times"])) or (report.failed and report.when == "call")
        self.jobs += sum(map(_whole, told["jobs"]))
        self.lost += sum(map(_whole, told["lost"]))
        self.duplicated += sum(map(_whole, told["duplicated"]))
        for seconds, limit_s in zip(told["recovery_s"], told["recovery_limit_s"], strict=True):
            self._add_recovery(report.nodeid, float(str(seconds)), float(str(limit_s)))
        if report.failed:
            self.failed.append(f"{report.nodeid} ({report.when})")
            self.hangs += any(sign in report.longreprtext for sign in _SIGNS_OF_A_HANG)

    def _add_recovery(self, test: str, seconds: float, limit_s: float) -> None:
        self.slowest_s = max(self.slowest_s or 0.0, seconds)
        if seconds > limit_s:
            self.late.append(f"{test}: {seconds:.2f} s, promised {limit_s:g} s")

    def cells(self) -> list[str]:
        """Its line of the table."""
        slowest = "" if self.slowest_s is None else f"{self.slowest_s:.2f} s"
        counts = (self.times, self.jobs, self.lost, self.duplicated, self.hangs)
        return [self.fault, self.done, *(f"{count:,}" for count in counts), slowest]


class Recorder:
    """A pytest plugin that adds the rounds up by test module: a fault is a module, and its first line says it."""

    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Faults in the order of their numbers, each in the order of its file."""
        items.sort(key=lambda item: _rank(_described(item.path)[0]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for setup, call and teardown of every test."""
        if report.when != "call" and not report.failed:
            return
        path = report.nodeid.partition("::")[0]
        if path not in self.tallies:
            self.tallies[path] = Tally(*_described(FOLDER / Path(path).name))
        self.tallies[path].add(report)


def _whole(value: object) -> int:
    return int(str(value))


def _described(module: Path) -> tuple[str, str]:
    """("F4", "the broker is killed ...") from the first line of a test module."""
    first = module.read_text().splitlines()[0].strip('"')
    fault, _, done = first.partition(": ")
    return fault, done.rstrip(".")


def _rank(fault: str) -> tuple[str, int]:
    number = fault[1:]
    return fault[:1], int(number) if number.isdigit() else 0


def table(tallies: Sequence[Tally]) -> str:
    """The table of docs/reliability.md, in Markdown."""
    lines = [_COLUMNS, ["---"] * 2 + ["---:"] * (len(_COLUMNS) - 2)]
    lines += [tally.cells() for tally in sorted(tallies, key=lambda tally: _rank(tally.fault))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def modules(only: Sequence[str]) -> list[str]:
    """The test modules of these faults; of all when none is named. Raises click.UsageError for one that is unknown."""
    found = [(path, _described(path)) for path in sorted(FOLDER.glob("test_*.py"))]
    known = [(str(path), fault) for path, (fault, _) in found if fault[:1] in "FP" and fault[1:].isdigit()]
    if unknown := set(only) - {fault for _, fault in known}:
        expected = ", ".join(sorted({fault for _, fault in known}, key=_rank))
        raise click.UsageError(f"Unknown fault {min(unknown)}. Expected one of: {expected}")
    return [path for path, fault in known if not only or fault in only]


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="Rounds of every fault.")
@click.option(
    "--seed",
    type=click.IntRange(0, _MOST_SEED),
    default=1,
    show_default=True,
    help="The first round's. Some faults strike so many steps after the start of a worker.",
)
@click.option("--only", multiple=True, metavar="FAULT", help="F1 to F27 or P1; may be repeated.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the table to this file, too.")
def main(rounds: int, seed: int, only: Sequence[str], output: Path | None) -> None:
    """Break everything, often, and print a table of what was lost."""
    chosen = modules([fault.upper() for fault in only])
    os.environ.update(_counts(rounds, seed))
    begun, recorder = time.monotonic(), Recorder()
    status = pytest.main(["-v", "--no-header", "--timeout=300", *chosen], plugins=[recorder])
    tallies = [*recorder.tallies.values()]
    text = table(tallies)
    click.echo(f"\n{text}\n{rounds} rounds from seed {seed} in {(time.monotonic() - begun) / 60:.0f} minutes")
    for name in [name for tally in tallies for name in tally.failed]:
        click.echo(f"FAILED {name}")
    late = [line for tally in tallies for line in tally.late]
    for line in late:
        click.echo(f"LATE {line}")
    if output is not None:
        output.write_text(text)
    sys.exit(int(status) or bool(late))


def _counts(rounds: int, seed: int) -> Mapping[str, Any]:
    return {"FAULT_ROUNDS": str(rounds), "FAULT_SEED": str(seed)}


if __name__ == "__main__":
    main()
