"""`make bench`: every figure that Penstock promises, measured here and now beside its bounds and peers."""

from __future__ import annotations

import json
import os

# Before anything imports a numeric library: figures are per thread.
os.environ["OMP_NUM_THREADS"] = "1"

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import click
import pytest

from tests.benchmarks import (
    audit,
    batches,
    breakdown,
    breakers,
    cached,
    compilation,
    drift,
    encoder,
    equal,
    first_answer,
    gateway,
    gateway_embeddings,
    gateway_streams,
    generation,
    generation_queue,
    hot_swap,
    imports,
    instances,
    latency,
    levels,
    memory,
    peeking,
    peers,
    promotions,
    proxy,
    queries,
    scaling,
    sealed,
    shadow,
    shapes,
    step_load,
    streams,
    throughput,
    tiers,
    tiers_l3,
)
from tests.benchmarks.report import FAILED, Progress, Row, Stage, as_data, machine, markdown, verdict
from tests.benchmarks.scale import FULL, QUICK, Scale

__all__ = ["SECTIONS", "main"]


def _retention(scale: Scale, say: Progress) -> list[Row]:
    return memory.retention(scale.retention_jobs, scale.retention_ttl_s)(scale, say)


SECTIONS: Final[dict[str, Callable[[Scale, Progress], list[Row] | list[Stage]]]] = {
    "throughput": throughput.measure,
    "alone": latency.measure_alone,
    "minilm": encoder.measure,
    "levels": levels.measure,
    "equal": equal.measure,
    "tiers": tiers.measure,
    "cached": cached.measure,
    "tiers-l3": tiers_l3.measure,
    "sealed": sealed.measure,
    "shadow": shadow.measure,
    "shapes": shapes.measure,
    "urgent": latency.measure_urgent,
    "workers": scaling.measure,
    "instances": instances.measure,
    "memory": memory.measure_per_job,
    "retention": _retention,
    "step": step_load.measure,
    "swap": hot_swap.measure,
    "promotions": promotions.measure,
    "queries": queries.measure,
    "proxy": proxy.measure,
    "audit": audit.measure,
    "streams": streams.measure,
    "compilation": compilation.measure,
    "peeking": peeking.measure,
    "peers": peers.measure,
    "gateway": gateway.measure,
    "batches": batches.measure,
    "gateway-streams": gateway_streams.measure,
    "gateway-embeddings": gateway_embeddings.measure,
    "imports": imports.measure,
    "first": first_answer.measure,
    "breakers": breakers.measure,
    "drift": drift.measure,
    "generation": generation.measure,
    "generation-queue": generation_queue.measure,
    "breakdown": breakdown.measure,
}
"""In the order of the table."""

_MILLION: Final = {"retention_jobs": 1_000_000, "retention_ttl_s": 10}
_EXAMPLE: Final = """Example:

  python -m tests.benchmarks --quick --only throughput,alone --json figures.json
"""


@click.command(epilog=_EXAMPLE)
@click.option("--quick", is_flag=True, help="Fewer jobs and rounds: some minutes instead of ten.")
@click.option("--only", metavar="NAME,...", default="", help=f"Some of: {', '.join(SECTIONS)}.")
@click.option("--million", is_flag=True, help="Let `retention` run 1,000,000 jobs; some minutes more.")
@click.option(
    "--json",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the figures there as well.",
)
def main(quick: bool, only: str, million: bool, file: Path | None) -> None:
    """Measure Penstock and print the figures as Markdown; progress goes to stderr.

    Servers and workers are this run's own and end with it. Answers are compared with the model's. The exit status is
    1 when a section failed or got a wrong answer; a missed target is a line of the table.
    """
    names = [name.strip() for name in only.split(",")] if only else list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        raise click.BadParameter(f"{', '.join(unknown)}. Expected some of: {', '.join(SECTIONS)}", param_hint="--only")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    scale = QUICK if quick else FULL
    before = machine()
    rows, stages = measure(names, replace(scale, **_MILLION) if million else scale)
    after = machine()
    described = ", ".join(f"{name} {value}" for name, value in after.items() if name not in ("load", "date"))
    click.echo(f"{after['date']}; {described}; load before {before['load']}, after {after['load']}\n")
    click.echo(markdown(rows, stages))
    if file is not None:
        file.write_text(json.dumps({**as_data(rows, stages), "load_before": before["load"]}, indent=1))
    if any(row.measured.startswith(FAILED) for row in rows):
        sys.exit(1)


def _say(text: str) -> None:
    click.echo(text, err=True)


def measure(names: list[str], scale: Scale) -> tuple[list[Row], list[Stage]]:
    """The figures of these sections; one that fails, or gets a wrong answer, becomes a row that says so."""
    rows: list[Row] = []
    stages: list[Stage] = []
    for name in names:
        found: Sequence[Row | Stage]
        try:
            found = SECTIONS[name](scale, _say)
        except (RuntimeError, ValueError, pytest.fail.Exception) as error:
            # What the other sections found out is worth having.
            _say(f"{name}: {error}")
            found = [Row(name, f"{FAILED}: {type(error).__name__}", ok=verdict(required=False))]
        rows += [row for row in found if isinstance(row, Row)]
        stages += [stage for stage in found if isinstance(stage, Stage)]
    return rows, stages


if __name__ == "__main__":
    main()
