"""`penstock job`: what is stored about one job."""

from __future__ import annotations

import json
from collections.abc import Mapping

import click

from penstock.compose.terminal import as_json_option, connected, open_broker

__all__ = ["job"]


@click.command()
@click.argument("job_id", metavar="ID")
@as_json_option
@click.pass_obj
def job(environ: Mapping[str, str], job_id: str, as_json: bool) -> None:
    """Show one job: its state, model, version, times, worker, attempts, and why it failed.

    ID is what `penstock submit` printed, or the id of a handle. A job that has ended is shown until its record expires
    (queue.result_ttl_s); a dead letter, until it is purged. A field that is not stored is left out. Of an ended job the
    result is not shown, and no data key is needed; its times are reckoned from its id and from the stored durations.

    \b
    penstock job minilm.019a8c5e-4f7b-7c21-9d30-5b1f0c6f2a11
    penstock job minilm.019a8c5e-4f7b-7c21-9d30-5b1f0c6f2a11 --json
    """
    from penstock.compose.jobs.report import describe, lines
    from penstock.safety.privacy import redactor_of

    settings = connected(environ)
    with open_broker(settings) as broker:
        facts = describe(
            broker,
            job_id,
            settings.keyring,
            settings.inference.queue.result_ttl_s,
            redactor_of(settings.inference.privacy),
        )
    if as_json:
        click.echo(json.dumps(facts))
        return
    for line in lines(facts):
        click.echo(line)
