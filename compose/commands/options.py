"""Options and arguments that several commands share."""

from __future__ import annotations

import click

__all__ = ["prepare_option", "priority_choice", "reason_option", "timeout_option", "worker_option", "yes_option"]

prepare_option = click.option(
    "--prepare/--no-prepare", default=True, help="Whether workers load the version before it is activated."
)
priority_choice = click.Choice(["critical", "high", "normal", "low"])
reason_option = click.option("--reason", default="", metavar="TEXT", help="The reason, for the history.")
timeout_option = click.option(
    "--timeout", type=click.FloatRange(0), help="Seconds to wait for workers (default: the limit of a load)."
)
worker_option = click.option("--worker", metavar="NAME", help="Only this worker, by a signed control command.")
yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
