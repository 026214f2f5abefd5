"""`penstock queue`: pause, resume and purge the queues of a model. `purge` asks for confirmation or takes --yes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from penstock.compose.commands.options import priority_choice, yes_option
from penstock.compose.terminal import as_json_option, connected, counted, open_broker, print_data, terminable
from penstock.registry.errors import UnknownModel

if TYPE_CHECKING:
    from penstock.registry.broker.base import Broker
    from penstock.registry.queues import Priority

__all__ = ["check_known", "queue"]


@click.group()
def queue() -> None:
    """Pause, resume or empty the queues of a model."""


@queue.command("pause")
@click.argument("model")
@as_json_option
@click.pass_obj
def pause(environ: Mapping[str, str], model: str, as_json: bool) -> None:
    """Pause MODEL: until it is resumed no worker starts a job of it, also after restarts.

    Jobs are accepted and wait; running jobs finish. The pause takes effect within two seconds.

    \b
    penstock queue pause minilm
    """
    with open_broker(connected(environ)) as broker:
        check_known(broker, model)
        broker.pause(model)
    text = f"{model} is paused: within two seconds workers start no more jobs of it. Running jobs finish."
    print_data({"model": model, "paused": True}, as_json, text)


@queue.command("resume")
@click.argument("model")
@as_json_option
@click.pass_obj
def resume(environ: Mapping[str, str], model: str, as_json: bool) -> None:
    """End the pause of MODEL.

    \b
    penstock queue resume minilm
    """
    with open_broker(connected(environ)) as broker:
        check_known(broker, model)
        broker.resume(model)
    print_data({"model": model, "paused": False}, as_json, f"{model} is resumed.")


@queue.command("purge")
@click.argument("model")
@click.option("--priority", type=priority_choice, help="Only jobs of this priority.")
@yes_option
@as_json_option
@click.pass_obj
def purge_queue(environ: Mapping[str, str], model: str, priority: str | None, yes: bool, as_json: bool) -> None:
    """Withdraw every waiting job of MODEL: each ends as cancelled for its client. Running jobs finish.

    Signed jobs need their signing keys here, because the result `Cancelled` is signed, too.

    \b
    penstock queue purge minilm
    penstock queue purge minilm --priority low --yes
    """
    from penstock.compose.jobs.purge import purge
    from penstock.registry.queues import Priority, parse_priority

    settings = connected(environ)
    bands: Sequence[Priority] = tuple(Priority) if priority is None else (parse_priority(priority),)
    with open_broker(settings) as broker, terminable():
        check_known(broker, model)
        waiting = sum(depth.jobs - depth.running for depth in broker.depths(model) if depth.priority in bands)
        if not yes:
            click.confirm(f"Withdraw {counted(waiting, 'waiting job')} of {model}?", abort=True, err=True)
        withdrawn = purge(
            broker,
            model,
            bands,
            settings.keyring,
            result_ttl_ms=int(settings.inference.queue.result_ttl_s * 1000),
            on_progress=_progress(waiting),
        )
    data = {"model": model, "priority": priority, "withdrawn": withdrawn}
    print_data(data, as_json, f"{counted(withdrawn, 'job')} of {model} withdrawn.")


def check_known(broker: Broker, model: str) -> None:
    """Raises UnknownModel: a misspelt name must not look like success."""
    if model not in (known := broker.models()):
        raise UnknownModel(f"Unknown model {model!r:.80}. Expected one of: {', '.join(known) or 'none is registered'}")


def _progress(waiting: int) -> Callable[[int], None]:
    """Prints the progress of a long purge on stderr when that is a terminal."""
    if not sys.stderr.isatty():
        return lambda _: None
    return lambda so_far: click.echo(f"\r{so_far:,} of {waiting:,} ", err=True, nl=so_far >= waiting)
