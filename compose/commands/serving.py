"""`penstock models` commands that ask workers to do something with a version: load, unload, compile, levels."""

from __future__ import annotations

import sys
from typing import Literal

import click

from penstock.compose.commands.options import timeout_option, worker_option
from penstock.compose.commands.registry_access import RegistryAccess
from penstock.compose.terminal import as_json_option, print_data, print_drawn
from penstock.registry.errors import ModelNotReady

__all__ = ["compile_model", "levels", "load", "unload"]


@click.command("load")
@click.argument("name")
@click.argument("version")
@worker_option
@timeout_option
@as_json_option
@click.pass_obj
def load(
    access: RegistryAccess, name: str, version: str, worker: str | None, timeout: float | None, as_json: bool
) -> None:
    """Load VERSION of NAME in every live worker of the model, and wait until all have it.

    \b
    penstock models load minilm 2
    penstock models load minilm 2 --worker gpu0@host
    """
    with access.deployer() as deployer:
        workers = deployer.load(name, version, worker=worker, timeout_s=timeout)
    _print_workers("loaded", name, version, workers, as_json)


@click.command("unload")
@click.argument("name")
@click.argument("version")
@worker_option
@timeout_option
@as_json_option
@click.pass_obj
def unload(
    access: RegistryAccess, name: str, version: str, worker: str | None, timeout: float | None, as_json: bool
) -> None:
    """Unload VERSION of NAME in every live worker, and wait until none has it. The active version is refused.

    \b
    penstock models unload minilm 1
    """
    with access.deployer() as deployer:
        workers = deployer.unload(name, version, worker=worker, timeout_s=timeout)
    _print_workers("unloaded", name, version, workers, as_json)


@click.command("compile")
@click.argument("name")
@worker_option
@timeout_option
@as_json_option
@click.pass_obj
def compile_model(access: RegistryAccess, name: str, worker: str | None, timeout: float | None, as_json: bool) -> None:
    """Compile NAME in its workers now, beside their traffic, and wait for the outcome.

    The compiled form is used only after its outputs matched the goldens. Exit status 1 when a worker does not use it.

    \b
    penstock models compile minilm
    """
    with access.deployer() as deployer:
        found = deployer.tune(name, "compile", worker=worker, timeout_s=timeout)
    print_data(found, as_json, "\n".join(f"{entry['worker']}: {entry['answer']}" for entry in found))
    if not all(entry["form"].startswith("compiled") for entry in found):
        sys.exit(1)


@click.command("levels")
@click.argument("name")
@click.option(
    "--now",
    "action",
    type=click.Choice(["measure", "optimise", "trace"]),
    help="First do this: measure every form and use none, try the forms of the allowed levels, or trace a few batches.",
)
@worker_option
@timeout_option
@as_json_option
@click.pass_obj
def levels(
    access: RegistryAccess,
    name: str,
    action: Literal["measure", "optimise", "trace"] | None,
    worker: str | None,
    timeout: float | None,
    as_json: bool,
) -> None:
    """Show the optimization level of NAME in each worker: the evidence, the gain of each step, the next step.

    \b
    penstock models levels minilm
    penstock models levels minilm --now measure
    """
    from penstock.compose.views.levels import draw_levels, entries

    if action is None:
        with access.fleet() as fleet:
            found = entries(fleet, name, None if worker is None else [worker])
    else:
        with access.deployer() as deployer:
            found = deployer.tune(name, action, worker=worker, timeout_s=timeout)
        for entry in found:
            click.echo(f"{entry['worker']}: {entry['answer']}", err=True)
    if not found:
        raise ModelNotReady(
            f"No worker reports a level of {name!r:.80}. Expected a model that a worker has loaded, with "
            "PENSTOCK_INFERENCE_ENABLED on"
        )
    print_drawn(found, as_json, lambda: draw_levels(found))


def _print_workers(state: str, name: str, version: str, workers: list[str], as_json: bool) -> None:
    data = {"name": name, "version": version, "workers": workers}
    print_data(data, as_json, f"{name}/{version} is {state} by {', '.join(workers)}")
