"""`penstock webhooks`: deliver webhooks, list and replay those that are not delivered, test a receiver."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import click

from penstock.compose.commands.metrics_page import metrics_port_option, served_metrics
from penstock.compose.terminal import as_json_option, connected, counted, load_settings, open_broker, printable
from penstock.registry.errors import BrokerRefused, BrokerUnavailable

if TYPE_CHECKING:
    from penstock.registry.settings import Settings

__all__ = ["webhooks"]

_FIRST_CONTACT_S: Final = 1.0


@click.group()
def webhooks() -> None:
    """Deliver webhooks of ended jobs; list, replay and test them.

    A job that was submitted with `webhook=URL` has its end told to that URL by a signed POST.
    """


@webhooks.command("run")
@metrics_port_option
@click.pass_obj
def run(environ: Mapping[str, str], metrics_port: int | None) -> None:
    """Deliver webhooks until Ctrl-C. Several such processes share the work.

    `penstock up` runs one, if a secret exists. A failed try is repeated after 5 s, 1 min, 5 min, 30 min, 2 h, 5 h,
    10 h, 14 h, 20 h and 24 h; then the webhook is dead. After SIGTERM or Ctrl-C the tries under way have ten
    seconds. With --metrics-port, /health/ready answers 503 while the broker cannot be reached.

    \b
    penstock webhooks run
    penstock webhooks run --metrics-port 9463
    """
    from penstock.compose.webhooks import deliver, deliverer_of
    from penstock.registry import logs
    from penstock.workers.observe.metrics import InferenceMetrics

    settings = connected(environ)
    _check_broker(settings)
    logs.configure()
    metrics = InferenceMetrics(settings.inference.metrics_buckets)
    with open_broker(settings) as broker:
        deliverer = deliverer_of(settings, broker, metrics)
        with served_metrics(metrics, settings, metrics_port, "webhooks", lambda: deliverer.reaches_broker):
            deliver(deliverer)


@webhooks.command("list")
@click.argument("model", required=False)
@click.option("--dead", is_flag=True, help="Only those that were given up.")
@as_json_option
@click.pass_obj
def list_webhooks(environ: Mapping[str, str], model: str | None, dead: bool, as_json: bool) -> None:
    """List the webhooks of MODEL, or of all models, that are not delivered: waiting ones and dead ones.

    Of a URL only the receiver is shown.

    \b
    penstock webhooks list
    penstock webhooks list minilm --dead --json
    """
    from penstock.compose.webhooks import described, find_all

    kinds = (("dead", True),) if dead else (("waiting", False), ("dead", True))
    with open_broker(connected(environ)) as broker:
        slots = broker.webhook_slots() if model is None else [model]
        found = [
            described(webhook, status)
            for slot in slots
            for status, is_dead in kinds
            for webhook in find_all(broker, slot, dead=is_dead)
        ]
    if as_json:
        click.echo(json.dumps(found))
    elif not found:
        click.echo("No webhooks.")
    else:
        for facts in found:
            _print_webhook(facts)


@webhooks.command("replay")
@click.argument("model")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--all", "every", is_flag=True, help="All dead webhooks of the model.")
@as_json_option
@click.pass_obj
def replay(environ: Mapping[str, str], model: str, ids: tuple[str, ...], every: bool, as_json: bool) -> None:
    """Deliver dead webhooks again, under their own ids and with all their tries. Exit status 1 when one is unknown.

    \b
    penstock webhooks replay minilm evt_0198c5f2-7c1e-7abc-8def-0123456789ab_1763650000000
    penstock webhooks replay minilm --all
    """
    from penstock.compose.webhooks import find_all

    if bool(ids) == every:
        raise click.UsageError("Expected ids, or --all.")
    with open_broker(connected(environ)) as broker:
        chosen = [webhook.id for webhook in find_all(broker, model, dead=True)] if every else list(dict.fromkeys(ids))
        outcomes = {event_id: broker.replay_webhook(model, event_id) for event_id in chosen}
    if as_json:
        click.echo(json.dumps([{"id": event_id, "replayed": done} for event_id, done in outcomes.items()]))
    else:
        for event_id in (event_id for event_id, done in outcomes.items() if not done):
            click.echo(f"{printable(event_id)}  is no dead webhook of {model}")
        click.echo(f"{counted(sum(outcomes.values()), 'webhook')} of {model} replayed.")
    if not all(outcomes.values()):
        sys.exit(1)


@webhooks.command("test")
@click.argument("url")
@as_json_option
@click.pass_obj
def test(environ: Mapping[str, str], url: str, as_json: bool) -> None:
    """Send one signed event of the type `webhook.test` to URL, and print the answer. Needs no broker.

    Exit status 1 when the receiver does not answer with 2xx.

    \b
    penstock webhooks test https://example.com/penstock
    """
    from penstock.compose.webhooks import send_test
    from penstock.registry.webhooks.schedule import Answer

    event_id = f"evt_test_{uuid4().hex}"
    answer = send_test(load_settings(environ), url, event_id, time.time())
    status = answer.status if isinstance(answer, Answer) else None
    if as_json:
        click.echo(json.dumps({"id": event_id, "status": status, "error": getattr(answer, "error", "")}))
    elif isinstance(answer, Answer):
        click.echo(f"{event_id}  the receiver answered {answer.status}")
    else:
        click.echo(f"{event_id}  {printable(answer.error)}")
    if status is None or not 200 <= status < 300:
        sys.exit(1)


@webhooks.command("secret")
@click.pass_obj
def secret(environ: Mapping[str, str]) -> None:
    """Print the secret with which receivers verify webhooks. The first call for a home makes it.

    `penstock up` and `penstock webhooks run` of the same home sign with it. PENSTOCK_WEBHOOK_SECRETS takes its place.

    \b
    penstock webhooks secret
    """
    from penstock.compose.webhooks import made_secret

    click.echo(made_secret(load_settings(environ)))


def _check_broker(settings: Settings) -> None:
    """Asks the broker once. A deliverer waits for one that is away. Raises BrokerRefused, and ConfigurationError."""
    from penstock.registry.broker.redis_connection import check_broker

    try:
        check_broker(settings.redis_url or "", _FIRST_CONTACT_S)
    except BrokerRefused:
        raise
    except BrokerUnavailable as error:
        click.echo(f"{error}. The deliverer waits for it", err=True)


def _print_webhook(facts: Mapping[str, Any]) -> None:
    from penstock.compose.jobs.dead_letters import utc_time

    tries = counted(facts["tries"], "try", "tries")
    when = f"due {utc_time(facts['due_ms'])}" if facts["status"] == "waiting" else "dead"
    click.echo(f"{facts['model']} {printable(facts['id'])}  {facts['state']}  {when}, {tries}")
    click.echo(f"    {printable(facts['receiver'])}  {printable(facts['error'])}".rstrip())
