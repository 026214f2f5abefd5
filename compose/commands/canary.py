"""`penstock canary`: a verdict on a candidate, before it answers a job."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from penstock.compose.commands.options import form_option
from penstock.compose.terminal import as_json_option, connected, open_broker, print_drawn, terminable

if TYPE_CHECKING:
    from penstock.safety.canary import CanaryVerdict

__all__ = ["canary"]

_LINE_S: Final = 5.0
"""Between two lines of progress where the output is no terminal."""


@click.group()
def canary() -> None:
    """Judge a candidate beside the active version: PASS, MARGINAL, FAIL or INSUFFICIENT. No answer changes."""


@canary.command("run")
@click.argument("model")
@click.option("--candidate", required=True, metavar="VERSION", help="The version that is judged.")
@form_option
@click.option(
    "--sample", "share", type=float, default=1.0, show_default=True, help="The share of answered jobs; 0: goldens only."
)
@click.option("--pairs", "min_pairs", type=int, default=1500, show_default=True, help="Pairs that a verdict needs.")
@click.option(
    "--timeout", type=float, default=600.0, show_default=True, help="Seconds until the verdict at the latest."
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@as_json_option
@click.pass_obj
def run(
    environ: Mapping[str, str],
    model: str,
    candidate: str,
    form: str,
    share: float,
    min_pairs: int,
    timeout: float,
    device: str,
    as_json: bool,
) -> None:
    """Run the candidate of MODEL on stored goldens and on a sample of answered jobs, and say whether it is right.

    It works as a shadow worker until there are enough pairs, or until a failure is sure. With --form the candidate may
    be the active version in another form. Exit status 1 on FAIL.

    \b
    penstock canary run minilm --candidate 2
    penstock canary run minilm --candidate 1 --form int8 --json
    """
    from penstock.compose.canary import CanaryPlan, run_canary
    from penstock.compose.views.canary import draw_canary

    settings = connected(environ)
    plan = CanaryPlan(share, min_pairs, timeout)
    with open_broker(settings) as broker, terminable(), _shown(min_pairs) as show:
        found = run_canary(settings, broker, model, candidate, form, plan, device=device, on_progress=show)
    print_drawn(found, as_json, lambda: draw_canary(found))
    if found["verdict"] == "FAIL":
        sys.exit(1)


@contextmanager
def _shown(min_pairs: int) -> Iterator[Callable[[CanaryVerdict, str], None]]:
    """Progress on the error output: a bar on a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        yield _Lines(min_pairs).show
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=min_pairs)
        yield lambda verdict, step: progress.update(bar, completed=verdict.pairs, description=step)


class _Lines:
    """A line for each new step, and one every few seconds."""

    def __init__(self, min_pairs: int) -> None:
        self._min_pairs = min_pairs
        self._step = ""
        self._line_at = 0.0

    def show(self, verdict: CanaryVerdict, step: str) -> None:
        """Print the step and the pairs so far."""
        now = time.monotonic()
        if step != self._step or now >= self._line_at:
            self._step, self._line_at = step, now + _LINE_S
            click.echo(f"{step}: {verdict.pairs:,} of {self._min_pairs:,} pairs, {verdict.verdict} so far", err=True)
