"""`penstock status`, `workers` and `top`: the state of a running stack, read from its broker."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

import click

from penstock.compose.terminal import as_json_option, connected, console, open_broker, print_drawn, terminable
from penstock.registry.errors import BrokerUnavailable

__all__ = ["status", "top", "workers"]


@click.command()
@as_json_option
@click.pass_obj
def status(environ: Mapping[str, str], as_json: bool) -> None:
    """Show the queues with depth and age, the workers and the models.

    Workers of this machine that crash are named with their restarts, the last exit status and the next start; in JSON
    `supervised` lists every worker that `penstock worker` or `penstock up` keeps running on this home.

    \b
    penstock status
    penstock status --json
    """
    from penstock.compose.stack import restarts
    from penstock.compose.views import overview

    settings = connected(environ)
    supervised = restarts.read(settings.home, time.monotonic())
    try:
        with open_broker(settings) as broker:
            state = {**overview.status(broker), "supervised": supervised}
    except BrokerUnavailable:
        for row in restarts.failing(supervised):
            click.echo(restarts.sentence(row), err=True)
        raise
    print_drawn(state, as_json, lambda: overview.draw_status(state))


@click.command()
@as_json_option
@click.pass_obj
def workers(environ: Mapping[str, str], as_json: bool) -> None:
    """List the live workers: device, state, models, jobs in memory.

    \b
    penstock workers
    penstock workers --json
    """
    from penstock.compose.views import overview

    with open_broker(connected(environ)) as broker:
        reports = overview.workers(broker)
    print_drawn(reports, as_json, lambda: overview.draw_workers(reports))


@click.command()
@click.option(
    "--interval", type=click.FloatRange(0.1), default=2.0, show_default=True, help="Seconds between two snapshots."
)
@click.option("--once", is_flag=True, help="Print the figures of one interval, and exit.")
@as_json_option
@click.pass_obj
def top(environ: Mapping[str, str], interval: float, once: bool, as_json: bool) -> None:
    """Watch the running stack: throughput, depth and age, batch sizes, the split of the latency, workers.

    In a terminal it is a screen (q or Ctrl-C ends it); elsewhere it prints one line per interval.

    \b
    penstock top
    penstock top --once
    penstock top --interval 10 --json >> load.jsonl
    """
    from penstock.compose.views import top as watching

    with open_broker(connected(environ), timeout_s=2.0) as broker, terminable(), suppress(KeyboardInterrupt):
        if as_json:
            watching.write_lines(broker, interval, once=once, draw=json.dumps)
        elif once:
            console().print(watching.draw(watching.measure(broker, interval)))
        elif sys.stdout.isatty() and sys.stdin.isatty():
            watching.show_screen(broker, interval, console())
        else:
            watching.write_lines(broker, interval, once=once, draw=watching.line)
