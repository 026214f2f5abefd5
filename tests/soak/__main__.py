"""`make soak`: many jobs while workers and the broker are killed, and the table of what came of it.

    python -m tests.soak [--jobs 1000000] [--worker-kills 200] [--broker-kills 20] [--minutes 60] [--seed 1]
                         [--clients 2] [--threads 12] [--output FOLDER]

A line of progress every few seconds. Exit status 1 when a promise broke: a job was lost, repeated or answered wrongly,
did not end in time, or the memory of a process grows. `--output` gets soak.md and soak.json. Ctrl-C ends everything.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import random
import signal
import sys
import time
from pathlib import Path
from typing import Final

import click

from tests.soak.client import Tally
from tests.soak.plan import MOST_JOBS, kill_points
from tests.soak.report import Report
from tests.soak.resources import PARTS, Resources
from tests.soak.stage import Stage

__all__ = ["Soak", "main"]

_TURN_S: Final = 0.05
_SAMPLE_EVERY_S: Final = 1.0
_PROGRESS_EVERY_S: Final = 5.0
_EMPTY_S: Final = 60.0
_LONGEST_PAUSE_S: Final = 0.3
"""Before a kill, so that it meets any moment of a batch."""
_WORKER: Final = "a worker"
_BROKER: Final = "the broker"


class Soak:
    """One run on a stage: kills in time, samples, progress."""

    def __init__(self, stage: Stage, *, seed: int, jobs: int, worker_kills: int, broker_kills: int) -> None:
        self._stage = stage
        self._seed = seed
        self._jobs = jobs
        self._chance = random.Random(f"{seed}/victims")
        self._due = {
            _WORKER: kill_points(seed, jobs, worker_kills, _WORKER),
            _BROKER: kill_points(seed, jobs, broker_kills, _BROKER),
        }
        self._done = {_WORKER: 0, _BROKER: 0}
        self._slack = max(1, jobs // max(1, worker_kills))
        """How many jobs may begin beyond a kill that is due and has not been possible yet."""
        self._permitted = 0
        self._resources = Resources()
        self._begun = time.monotonic()
        self._part_begun = [0.0] * PARTS + [0.0]

    def run(self, minutes: float) -> Report:
        """Until every job has ended, a client process fails, or the time is up."""
        sample_at = progress_at = self._begun
        while not (self._stage.is_over or self._stage.has_failed) and self.elapsed_s < minutes * 60:
            now, tally = time.monotonic(), self._stage.tally()
            self._permit()
            self._kill_what_is_due(tally)
            if now >= sample_at:
                sample_at = now + _SAMPLE_EVERY_S
                self._sample(tally.ended)
            if now >= progress_at:
                progress_at = now + _PROGRESS_EVERY_S
                self._stage.shorten_logs()
                _say(self._progress(tally))
            time.sleep(_TURN_S)
        return self._report()

    @property
    def elapsed_s(self) -> float:
        """Since the first job could begin."""
        return time.monotonic() - self._begun

    def _permit(self) -> None:
        """No client runs away from a kill that is due, so that all kills fall into the run."""
        pending = [due[self._done[what]] for what, due in self._due.items() if self._done[what] < len(due)]
        # The last chunks wait for the last kill.
        permitted = (
            min(min(pending) + self._slack, self._jobs - len(self._stage.clients)) if pending else 2 * self._jobs
        )
        if permitted != self._permitted:
            self._permitted = permitted
            self._stage.permit(permitted)

    def _kill_what_is_due(self, tally: Tally) -> None:
        # When all jobs that may begin have ended, only a kill lets the run go on.
        ended = self._jobs if tally.begun == tally.ended > 0 else tally.ended
        if self._is_due(_BROKER, ended):
            self._pause()
            self._stage.restart_broker()
            self._done[_BROKER] += 1
        elif self._is_due(_WORKER, ended):
            self._pause()
            self._done[_WORKER] += self._stage.kill_worker(self._chance)

    def _is_due(self, what: str, ended: int) -> bool:
        due, done = self._due[what], self._done[what]
        return done < len(due) and ended >= due[done]

    def _pause(self) -> None:
        time.sleep(self._chance.uniform(0.0, _LONGEST_PAUSE_S))

    def _sample(self, ended: int) -> None:
        part = min(PARTS - 1, ended * PARTS // self._jobs)
        for later in range(part + 1, PARTS + 1):
            self._part_begun[later] = self.elapsed_s
        self._resources.sample(part, self._stage.pids())
        if (used := self._stage.used_memory()) is not None:
            self._resources.note(part, "redis-server, used_memory", used)

    def _progress(self, tally: Tally) -> str:
        rate = tally.ended / max(self.elapsed_s, 1e-9)
        left = f"{(self._jobs - tally.ended) / rate / 60:.1f} min left" if tally.ended else ""
        kills = ", ".join(f"{what} {self._done[what]}/{len(due)}" for what, due in self._due.items())
        return (
            f"{tally.ended:,}/{self._jobs:,} jobs, {rate:,.0f} a second, killed: {kills}; lost {tally.lost}, "
            f"wrong {tally.wrong}, repeated {tally.repeated}, again {tally.ran_again}; {left}"
        )

    def _report(self) -> Report:
        elapsed_s = self._part_begun[PARTS] = self.elapsed_s
        seconds = [end - begin for begin, end in zip(self._part_begun, self._part_begun[1:], strict=False)]
        return Report(
            jobs=self._jobs,
            seed=self._seed,
            minutes=elapsed_s / 60,
            tally=self._stage.tally(),
            kills={what: (self._done[what], len(due)) for what, due in self._due.items()},
            resources=self._resources,
            left_over=self._left_over(),
            rates=[_rate(self._jobs / PARTS, part_s) for part_s in seconds],
            facts={"machine": f"{os.cpu_count()} cores, {platform.release()}, Python {platform.python_version()}"},
            cores=len(os.sched_getaffinity(0)),
        )

    def _left_over(self) -> int:
        """Workers settle the last jobs a moment after their clients know the results."""
        until = time.monotonic() + _EMPTY_S
        while (left := self._stage.left_over()) and self._stage.is_over and time.monotonic() < until:
            time.sleep(_TURN_S)
        return left


def _rate(jobs: float, seconds: float) -> int:
    """0 for a part that was over before two samples."""
    return round(jobs / seconds) if seconds >= _SAMPLE_EVERY_S else 0


def _say(text: str) -> None:
    click.echo(text)
    sys.stdout.flush()


def _write(report: Report, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "soak.md").write_text(report.markdown())
    (folder / "soak.json").write_text(json.dumps(report.as_json(), indent=2) + "\n")


@click.command()
@click.option("--jobs", type=click.IntRange(100, MOST_JOBS), default=1_000_000, show_default=True)
@click.option("--worker-kills", type=click.IntRange(0), default=200, show_default=True, help="kill -9 of a worker.")
@click.option("--broker-kills", type=click.IntRange(0), default=20, show_default=True, help="kill -9 of Redis.")
@click.option("--minutes", type=click.FloatRange(0.1), default=60.0, show_default=True, help="The run ends then.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option("--clients", type=click.IntRange(1, 8), default=2, show_default=True, help="Client processes.")
@click.option("--threads", type=click.IntRange(1, 64), default=12, show_default=True, help="Threads in each of them.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="The folder for the tables.")
def main(
    jobs: int,
    worker_kills: int,
    broker_kills: int,
    minutes: float,
    seed: int,
    clients: int,
    threads: int,
    output: Path | None,
) -> None:
    """Run many jobs while workers and the broker are killed, and print a table of what was lost."""
    # As Ctrl-C does: the stage ends its processes.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    # One warning for each kill.
    logging.getLogger("penstock.supervisor").setLevel(logging.ERROR)
    _say(f"{jobs:,} jobs, {worker_kills} kills of workers, {broker_kills} of the broker, seed {seed}")
    patience_s = min(300.0, minutes * 60)
    with Stage(seed=seed, jobs=jobs, clients=clients, threads=threads, patience_s=patience_s) as stage:
        run = Soak(stage, seed=seed, jobs=jobs, worker_kills=worker_kills, broker_kills=broker_kills)
        report = run.run(minutes)
    _say(f"\n{report.markdown()}")
    if output is not None:
        _write(report, output)
    broken = report.broken()
    for line in broken:
        _say(f"BROKEN {line} {report.tally.errors or ''}")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
