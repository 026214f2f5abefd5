"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = [
    "app_option",
    "form_option",
    "prepare_option",
    "priority_choice",
    "reason_option",
    "timeout_option",
    "worker_option",
    "yes_option",
]


def _serve_app(context: click.Context, _parameter: click.Parameter, file: Path | None) -> None:
    """Give the command an environment in which workers serve the models of the file."""
    if file is None or context.resilient_parsing:
        return
    from penstock.compose.stack.app_file import serving

    context.obj = serving(file, context.obj)


app_option = click.option(
    "--app",
    type=click.Path(path_type=Path),
    metavar="FILE",
    expose_value=False,
    callback=_serve_app,
    help="Serve the models of this Python file, those of @penstock.model, and no others.",
)
form_option = click.option(
    "--form",
    default="",
    metavar="FORM",
    help="A form of the version, such as compiled, onnx or int8 (default: as built).",
)
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
