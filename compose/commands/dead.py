"""`penstock dead`: list, show, replay and purge dead letters.

`purge` asks for confirmation or takes --yes. A command that fails for one of several letters reports each, and exits
with status 1.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.compose.commands.options import yes_option
from penstock.compose.commands.queue import check_known
from penstock.compose.terminal import as_json_option, connected, counted, open_broker, print_data, printable
from penstock.registry.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.compose.jobs.dead_letters import Replayed
    from penstock.registry.broker.base import Broker, DeadLetter
    from penstock.registry.settings import Settings
    from penstock.safety.privacy import InputRedactor

__all__ = ["dead"]


@click.group()
def dead() -> None:
    """List, show, replay and purge dead letters.

    A dead letter is a job that was given up, or bytes that are no valid job. It keeps the bytes and the reason.
    """


@dead.command("list")
@click.argument("model", required=False)
@as_json_option
@click.pass_obj
def list_dead(environ: Mapping[str, str], model: str | None, as_json: bool) -> None:
    """List the dead letters of MODEL, or of all models.

    \b
    penstock dead list
    penstock dead list minilm --json
    """
    from penstock.compose.jobs.dead_letters import letters, summary
    from penstock.safety.privacy import redactor_of

    settings = connected(environ)
    redactor = redactor_of(settings.inference.privacy)
    with open_broker(settings) as broker:
        found = [letter for slot in _slots(broker, model) for letter in letters(broker, slot)]
    if as_json:
        click.echo(json.dumps([summary(letter, redactor) for letter in found]))
    elif not found:
        click.echo("No dead letters.")
    else:
        for letter in found:
            _print_letter(letter, redactor)


@dead.command("show")
@click.argument("model")
@click.argument("entry")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the original bytes to this new file."
)
@as_json_option
@click.pass_obj
def show_dead(environ: Mapping[str, str], model: str, entry: str, output: Path | None, as_json: bool) -> None:
    """Show one dead letter: the reason, the readable part of its header, and whether it can be replayed.

    With privacy.redact_patterns or redact_detectors the texts are redacted, and bytes in which these find something are
    not written.
    Inputs are not shown. `body` says whether they are sealed, and whether the data key of this shell opens them.

    \b
    penstock dead show minilm 1763650000000-0
    penstock dead show minilm 1763650000000-0 --output letter.bin
    """
    from penstock.compose.jobs.dead_letters import describe, find, utc_time
    from penstock.registry.queues import parse_name
    from penstock.safety.payload_keys import envelope_keys
    from penstock.safety.privacy import redactor_of

    settings = connected(environ)
    redactor = redactor_of(settings.inference.privacy)
    with open_broker(settings) as broker:
        letter = find(broker, parse_name("model", model), entry)
        broker.depths(model)
        described = describe(letter, envelope_keys(settings, may_lack=True), broker.now_ms(), redactor)
    if output is not None and redactor.changes(letter.sealed):
        raise click.ClickException(
            "The bytes have text that privacy.redact_patterns or privacy.redact_detectors remove. Expected no --output"
        )
    if output is not None:
        _write_new(output, letter.sealed)
    if as_json:
        click.echo(json.dumps(described))
        return
    header = described.pop("header")
    for name in ("accepted", "dead_lettered"):
        described[name] = utc_time(described.pop(f"{name}_ms"))
    for name, value in {**described, **{f"header {key}": value for key, value in (header or {}).items()}}.items():
        click.echo(f"{name.replace('_', ' '):<18} {printable(str(value))}")


@dead.command("replay")
@click.argument("model")
@click.argument("entries", nargs=-1, metavar="[ENTRY]...")
@click.option("--all", "every", is_flag=True, help="All dead letters of the model.")
@as_json_option
@click.pass_obj
def replay_dead(environ: Mapping[str, str], model: str, entries: tuple[str, ...], every: bool, as_json: bool) -> None:
    """Replay dead letters: each returns to its queue under its own job id, so that its client gets the result.

    A letter that no worker could run stays: foreign bytes, another protocol version, an invalid signature, a deadline
    that has passed, inputs that are sealed with a data key that is not here. Exit status 1 when one stays.

    \b
    penstock dead replay minilm 1763650000000-0
    penstock dead replay minilm --all
    """
    from penstock.compose.jobs.dead_letters import letters

    _check_choice(entries, every)
    settings = connected(environ)
    with open_broker(settings) as broker:
        (slot,) = _slots(broker, model)
        chosen = _chosen(entries, every, lambda: [letter.entry for letter in letters(broker, slot)])
        outcomes = [_replay_one(broker, slot, entry, settings) for entry in chosen]
    if as_json:
        names = ("entry", "job_id", "replayed", "reason")
        click.echo(json.dumps([dict(zip(names, outcome, strict=True)) for outcome in outcomes]))
    elif not outcomes:
        click.echo("No dead letters.")
    for outcome in () if as_json else outcomes:
        result = f"replayed as {outcome.job_id}" if outcome.is_replayed else f"stays: {outcome.reason}"
        click.echo(f"{outcome.entry}  {printable(result)}")
    if not all(outcome.is_replayed for outcome in outcomes):
        sys.exit(1)


@dead.command("purge")
@click.argument("model")
@click.argument("entries", nargs=-1, metavar="[ENTRY]...")
@click.option("--all", "every", is_flag=True, help="All dead letters of the model.")
@click.option("--older-than", metavar="AGE", help="Those dead-lettered longer ago than this: 7d, 12h, 30m, 45s.")
@yes_option
@as_json_option
@click.pass_obj
def purge_dead(
    environ: Mapping[str, str],
    model: str,
    entries: tuple[str, ...],
    every: bool,
    older_than: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete dead letters with their bytes. The failed results that clients read stay.

    \b
    penstock dead purge minilm 1763650000000-0
    penstock dead purge minilm --older-than 7d --yes
    """
    from penstock.compose.jobs.dead_letters import find, letters, parse_age_ms

    if older_than is not None and (entries or every):
        raise click.UsageError("Expected one of: entries, --all, --older-than.")
    age_ms = None if older_than is None else parse_age_ms(older_than)
    _check_choice(entries, every or age_ms is not None)
    with open_broker(connected(environ)) as broker:
        (slot,) = _slots(broker, model)
        broker.depths(slot)
        before_ms = float("inf") if age_ms is None else broker.now_ms() - age_ms
        chosen = _chosen(
            entries,
            every or age_ms is not None,
            lambda: [letter.entry for letter in letters(broker, slot) if letter.dead_lettered_ms < before_ms],
        )
        for entry in entries:
            find(broker, slot, entry)
        if chosen and not yes:
            question = f"Delete {counted(len(chosen), 'dead letter')} of {slot}, with the bytes?"
            click.confirm(question, abort=True, err=True)
        purged = broker.purge_dead(slot, chosen)
    text = f"{counted(purged, 'dead letter')} of {slot} deleted."
    print_data({"model": slot, "purged": purged}, as_json, text)


def _replay_one(broker: Broker, slot: str, entry: str, settings: Settings) -> Replayed:
    from penstock.compose.jobs.dead_letters import Replayed, find, replay
    from penstock.safety.payload_keys import envelope_keys
    from penstock.safety.privacy import redactor_of

    try:
        letter = find(broker, slot, entry)
    except InvalidInput as error:
        return Replayed(entry, "", False, str(error))
    broker.depths(slot)
    job_ttl_ms = int(settings.inference.queue.job_ttl_s * 1000)
    keyring = envelope_keys(settings, may_lack=True)
    outcome = replay(broker, letter, keyring, job_ttl_ms=job_ttl_ms, now_ms=broker.now_ms())
    return outcome._replace(reason=redactor_of(settings.inference.privacy).redact(outcome.reason))


def _slots(broker: Broker, model: str | None) -> list[str]:
    """The model that is named, or all. Raises UnknownModel for one that is not announced and has no letters."""
    from penstock.registry.queues import parse_name

    if model is None:
        return broker.models()
    slot = parse_name("model", model)
    # The letters of a model outlive it.
    if not broker.dead_letters(slot, count=1):
        check_known(broker, slot)
    return [slot]


def _check_choice(entries: Sequence[str], every: bool) -> None:
    if bool(entries) == every:
        raise click.UsageError("Expected entries, or --all.")


def _chosen(entries: Sequence[str], every: bool, all_entries: Callable[[], list[str]]) -> list[str]:
    return all_entries() if every else list(dict.fromkeys(entries))


def _print_letter(letter: DeadLetter, redactor: InputRedactor) -> None:
    from penstock.compose.jobs.dead_letters import utc_time

    counts = (
        counted(letter.deliveries, "delivery", "deliveries"),
        counted(letter.crashes, "crash", "crashes"),
        counted(letter.size, "byte"),
    )
    owner = f"job {letter.job_id} of tenant {letter.tenant}" if letter.job_id else "no accepted job"
    click.echo(f"{letter.slot} {letter.entry}  {utc_time(letter.dead_lettered_ms)}  {', '.join(counts)}")
    click.echo(f"    {printable(owner)}\n    {printable(redactor.redact(letter.reason))}")


def _write_new(path: Path, content: bytes) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
    except OSError as error:
        raise click.ClickException(f"{path.name} cannot be written: {error.strerror}. Expected a new file") from None
