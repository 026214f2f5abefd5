"""The operators' commands: dead letters, pauses and purges, who works, what goes on, what is wrong.

dead list, show, replay, purge | queue pause, resume, purge | workers | top | doctor

What changes something asks first or takes --yes; what fails for one of several says so for each, and exits with 1.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.compose.terminal import as_json_option, connected, console, open_broker, printable, terminable
from penstock.registry.errors import InvalidInput, UnknownModel

if TYPE_CHECKING:
    from penstock.registry.broker.base import Broker, DeadLetter
    from penstock.registry.queues import Priority

__all__ = ["dead", "doctor", "queue", "top", "workers"]

_yes = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
_PRIORITIES: Final = click.Choice(["critical", "high", "normal", "low"])


@click.group()
def dead() -> None:
    """Look at dead letters, put them back, or forget them.

    A dead letter is a job that was given up, or bytes that were no job, with the reason.
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
    from penstock.compose.dead_letters import letters, summary

    with open_broker(connected(environ)) as broker:
        found = [letter for slot in _slots(broker, model) for letter in letters(broker, slot)]
    if as_json:
        click.echo(json.dumps([summary(letter) for letter in found]))
    elif not found:
        click.echo("No dead letters.")
    else:
        for letter in found:
            _print_letter(letter)


@dead.command("show")
@click.argument("model")
@click.argument("entry")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the original bytes to this new file."
)
@as_json_option
@click.pass_obj
def show_dead(environ: Mapping[str, str], model: str, entry: str, output: Path | None, as_json: bool) -> None:
    """Show one dead letter: the reason, its header as far as it can be read, and whether it may go back.

    \b
    penstock dead show minilm 1763650000000-0
    penstock dead show minilm 1763650000000-0 --output letter.bin
    """
    from penstock.compose.dead_letters import describe, find, moment
    from penstock.registry.queues import parse_name

    settings = connected(environ)
    with open_broker(settings) as broker:
        letter = find(broker, parse_name("model", model), entry)
        broker.depths(model)
        shown = describe(letter, settings.keyring, broker.now_ms())
    if output is not None:
        _write_new(output, letter.sealed)
    if as_json:
        click.echo(json.dumps(shown))
        return
    header = shown.pop("header")
    for name in ("accepted", "dead_lettered"):
        shown[name] = moment(shown.pop(f"{name}_ms"))
    for name, value in {**shown, **{f"header {key}": value for key, value in (header or {}).items()}}.items():
        click.echo(f"{name.replace('_', ' '):<18} {printable(str(value))}")


@dead.command("replay")
@click.argument("model")
@click.argument("entries", nargs=-1, metavar="[ENTRY]...")
@click.option("--all", "every", is_flag=True, help="All dead letters of the model.")
@as_json_option
@click.pass_obj
def replay_dead(environ: Mapping[str, str], model: str, entries: tuple[str, ...], every: bool, as_json: bool) -> None:
    """Put dead letters back into their queue, each under its own job id; whoever asks for that job gets its result.

    What a worker could not run stays where it is: foreign bytes, another protocol version, a signature that does
    not hold, a deadline that has passed. Exit status 1 when any did.

    \b
    penstock dead replay minilm 1763650000000-0
    penstock dead replay minilm --all
    """
    from penstock.compose.dead_letters import Replayed, find, letters, replay

    settings = connected(environ)
    job_ttl_ms = int(settings.inference.queue.job_ttl_s * 1000)
    outcomes: list[Replayed] = []
    with open_broker(settings) as broker:
        (slot,) = _slots(broker, model)
        for entry in _chosen(entries, every, lambda: [letter.entry for letter in letters(broker, slot)]):
            try:
                letter = find(broker, slot, entry)
            except InvalidInput as error:
                outcomes.append(Replayed(entry, "", False, str(error)))
                continue
            broker.depths(slot)
            outcomes.append(replay(broker, letter, settings.keyring, job_ttl_ms=job_ttl_ms, now_ms=broker.now_ms()))
    if as_json:
        named = ("entry", "job_id", "replayed", "reason")
        click.echo(json.dumps([dict(zip(named, outcome, strict=True)) for outcome in outcomes]))
    for outcome in () if as_json else outcomes:
        told = f"back in the queue as {outcome.job_id}" if outcome.is_back else f"stays: {outcome.reason}"
        click.echo(f"{outcome.entry}  {printable(told)}")
    if not outcomes and not as_json:
        click.echo("No dead letters.")
    if not all(outcome.is_back for outcome in outcomes):
        sys.exit(1)


@dead.command("purge")
@click.argument("model")
@click.argument("entries", nargs=-1, metavar="[ENTRY]...")
@click.option("--all", "every", is_flag=True, help="All dead letters of the model.")
@click.option("--older-than", metavar="AGE", help="Those put aside longer ago than this: 7d, 12h, 30m, 45s.")
@_yes
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
    """Forget dead letters and their bytes; the results that their clients read stay.

    \b
    penstock dead purge minilm 1763650000000-0
    penstock dead purge minilm --older-than 7d --yes
    """
    from penstock.compose.dead_letters import find, letters, older_than_ms

    if older_than is not None and (entries or every):
        raise click.UsageError("Expected entries, --all or --older-than, one of them.")
    age_ms = None if older_than is None else older_than_ms(older_than)
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
            click.confirm(
                f"Forget {_count(len(chosen), 'dead letter')} of {slot}, with the bytes?", abort=True, err=True
            )
        forgotten = broker.purge_dead(slot, chosen)
    if as_json:
        click.echo(json.dumps({"model": slot, "purged": forgotten}))
    else:
        click.echo(f"{_count(forgotten, 'dead letter')} of {slot} forgotten.")


@click.group()
def queue() -> None:
    """Pause, resume or empty a model's queues."""


@queue.command("pause")
@click.argument("model")
@as_json_option
@click.pass_obj
def pause(environ: Mapping[str, str], model: str, as_json: bool) -> None:
    """Let no worker start a job of MODEL until it is resumed, also after restarts.

    Jobs are accepted and wait; those that run finish. Takes effect within two seconds.

    \b
    penstock queue pause minilm
    """
    with open_broker(connected(environ)) as broker:
        _known(broker, model)
        broker.pause(model)
    _say_paused(model, True, as_json)


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
        _known(broker, model)
        broker.resume(model)
    _say_paused(model, False, as_json)


@queue.command("purge")
@click.argument("model")
@click.option("--priority", type=_PRIORITIES, help="Only jobs of this priority.")
@_yes
@as_json_option
@click.pass_obj
def purge_queue(environ: Mapping[str, str], model: str, priority: str | None, yes: bool, as_json: bool) -> None:
    """Withdraw every job of MODEL that waits; each ends cancelled for its client. Running ones go on.

    Needs the signing keys of the jobs, where they are signed.

    \b
    penstock queue purge minilm
    penstock queue purge minilm --priority low --yes
    """
    from penstock.compose.purge import purge
    from penstock.registry.queues import Priority, parse_priority

    settings = connected(environ)
    bands: Sequence[Priority] = tuple(Priority) if priority is None else (parse_priority(priority),)
    with open_broker(settings) as broker, terminable():
        _known(broker, model)
        waiting = sum(depth.jobs - depth.running for depth in broker.depths(model) if depth.priority in bands)
        if not yes:
            click.confirm(f"Withdraw {_count(waiting, 'waiting job')} of {model}?", abort=True, err=True)
        withdrawn = purge(
            broker,
            model,
            bands,
            settings.keyring,
            result_ttl_ms=int(settings.inference.queue.result_ttl_s * 1000),
            on_progress=_progress(waiting),
        )
    if as_json:
        click.echo(json.dumps({"model": model, "priority": priority, "withdrawn": withdrawn}))
    else:
        click.echo(f"{_count(withdrawn, 'job')} of {model} withdrawn.")


@click.command()
@as_json_option
@click.pass_obj
def workers(environ: Mapping[str, str], as_json: bool) -> None:
    """List the workers that live: device, state, models, jobs in memory.

    \b
    penstock workers
    penstock workers --json
    """
    from penstock.compose.views import overview

    with open_broker(connected(environ)) as broker:
        reports = overview.workers(broker)
    if as_json:
        click.echo(json.dumps(reports))
    else:
        console().print(overview.draw_workers(reports))


@click.command()
@click.option("--interval", type=click.FloatRange(0.1), default=2.0, show_default=True, help="Seconds between looks.")
@click.option("--once", is_flag=True, help="Look once, over one interval, and end.")
@as_json_option
@click.pass_obj
def top(environ: Mapping[str, str], interval: float, once: bool, as_json: bool) -> None:
    """Watch the running stack: throughput, depth and age, batch sizes, where the time goes, workers.

    A screen in a terminal (q or Ctrl-C ends it), one line per interval elsewhere.

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
            console().print(watching.draw(watching.look(broker, interval)))
        elif sys.stdout.isatty() and sys.stdin.isatty():
            watching.show_screen(broker, interval, console())
        else:
            watching.write_lines(broker, interval, once=once, draw=watching.line)


@click.command()
@as_json_option
@click.pass_obj
def doctor(environ: Mapping[str, str], as_json: bool) -> None:
    """Say what is installed, reachable, insecure or contradictory, each with the line that mends it.

    Exit status 1 when something is broken. Shows no secrets.

    \b
    penstock doctor
    penstock doctor --json
    """
    from penstock.compose import doctor as examining

    findings = examining.examine(environ, Path.cwd())
    if as_json:
        click.echo(json.dumps(examining.as_json(findings)))
    else:
        examining.write(findings, console())
    if any(finding.status == "broken" for finding in findings):
        sys.exit(1)


def _slots(broker: Broker, model: str | None) -> list[str]:
    from penstock.registry.queues import parse_name

    return broker.models() if model is None else [parse_name("model", model)]


def _known(broker: Broker, model: str) -> None:
    """Raises UnknownModel: a misspelt name must not look like success."""
    if model not in (known := broker.models()):
        raise UnknownModel(f"Unknown model {model!r:.80}. Expected one of: {', '.join(known) or 'none is registered'}")


def _chosen(entries: Sequence[str], every: bool, all_entries: Any) -> list[str]:
    if bool(entries) == every:
        raise click.UsageError("Expected entries, or --all.")
    return all_entries() if every else list(dict.fromkeys(entries))


def _print_letter(letter: DeadLetter) -> None:
    from penstock.compose.dead_letters import moment

    tried = f"{_count(letter.deliveries, 'delivery')}, {_count(letter.crashes, 'crash')}, {_count(letter.size, 'byte')}"
    whose = f"job {letter.job_id} of tenant {letter.tenant}" if letter.job_id else "no job that was accepted"
    click.echo(f"{letter.slot} {letter.entry}  {moment(letter.dead_lettered_ms)}  {tried}")
    click.echo(f"    {printable(whose)}\n    {printable(letter.reason)}")


def _write_new(path: Path, content: bytes) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
    except OSError as error:
        raise click.ClickException(f"{path.name} cannot be written: {error.strerror}. Expected a new file") from None


def _say_paused(model: str, is_paused: bool, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"model": model, "paused": is_paused}))
    elif is_paused:
        click.echo(f"{model} is paused; within two seconds no worker starts a job of it. Running ones finish.")
    else:
        click.echo(f"{model} is resumed.")


def _progress(waiting: int) -> Any:
    """Says on stderr how far a long purge has come, where somebody looks."""
    if not sys.stderr.isatty():
        return lambda _: None
    return lambda so_far: click.echo(f"\r{so_far:,} of {waiting:,} ", err=True, nl=so_far >= waiting)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what if number == 1 else _PLURALS.get(what, what + 's')}"


_PLURALS: Final = {"delivery": "deliveries", "crash": "crashes"}
