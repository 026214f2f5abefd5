"""`penstock cost`: what the jobs of each model cost, and what its optimized form saves."""

from __future__ import annotations

from collections.abc import Mapping

import click

from penstock.compose.terminal import as_json_option, connected, open_broker, print_drawn

__all__ = ["cost"]


@click.command()
@click.option(
    "--interval",
    type=click.FloatRange(2.0),
    default=5.0,
    show_default=True,
    help="Seconds in which the present rate of jobs is counted. Workers report once a second.",
)
@click.option(
    "--requests-per-hour",
    type=click.FloatRange(0),
    help="Project the savings of each model at this rate, instead of the present one.",
)
@as_json_option
@click.pass_obj
def cost(environ: Mapping[str, str], interval: float, requests_per_hour: float | None, as_json: bool) -> None:
    """Show the cost of 1,000 jobs of each model, as built and optimized, and the projected savings.

    Costs are compute seconds times the hourly rate of each worker's device: workers need a setting such as
    PENSTOCK_INFERENCE_COST_HOURLY_RATE=2.5. A month has 730 hours.

    \b
    penstock cost
    penstock cost --requests-per-hour 50000
    penstock cost --json
    """
    from penstock.compose.views import costs

    with open_broker(connected(environ)) as broker:
        rows = costs.measure(broker, interval, requests_per_hour)
    print_drawn(rows, as_json, lambda: costs.draw_costs(rows))
