"""`penstock audit`: show the entries of the audit log, and verify its chains. Exit status 1 when one is damaged."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.compose.terminal import as_json_option, counted, load_settings, printable

if TYPE_CHECKING:
    from penstock.registry.settings import Settings
    from penstock.safety.audit_chain import AuditEntry
    from penstock.safety.audit_reader import Found

__all__ = ["audit"]

_FOLDERS = click.argument(
    "folders",
    nargs=-1,
    metavar="[FOLDER]...",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
)


@click.group()
def audit() -> None:
    """Show the entries of the audit log, and find those that were changed or deleted."""


@audit.command("tail")
@click.option("-n", "--lines", "most", type=click.IntRange(1), default=20, show_default=True, help="Number of entries.")
@as_json_option
@click.pass_obj
def tail(environ: Mapping[str, str], most: int, as_json: bool) -> None:
    """Show the newest entries of all writers on this machine, oldest first.

    \b
    penstock audit tail
    penstock audit tail -n 100 --json
    """
    from penstock.safety.audit_reader import entries

    _print_found(entries([_folder(load_settings(environ))], most), as_json)


@audit.command("since")
@click.argument("when", metavar="TIME")
@click.option("-n", "--lines", "most", type=click.IntRange(1), default=10_000, help="At most the newest 10,000.")
@as_json_option
@click.pass_obj
def since(environ: Mapping[str, str], when: str, most: int, as_json: bool) -> None:
    """Show the entries later than TIME: an age such as 1h, 30m or 7d, or a date such as 2026-11-23T18:00:00Z.

    \b
    penstock audit since 1h
    penstock audit since 2026-11-23T18:00:00Z --json
    """
    from penstock.safety.audit_reader import entries

    _print_found(entries([_folder(load_settings(environ))], most, _parse_time(when)), as_json)


@audit.command("verify")
@_FOLDERS
@as_json_option
@click.pass_obj
def verify(environ: Mapping[str, str], folders: tuple[Path, ...], as_json: bool) -> None:
    """Verify every chain in the folder of the settings, or in these FOLDERs, such as an archive beside it.

    Changed, deleted, inserted, swapped and truncated entries are named with file, line and sequence number; exit status
    1 when there is one. The ends of sound chains are then stored in the registry.

    \b
    penstock audit verify
    penstock audit verify ~/.penstock/audit /mnt/archive/audit --json
    """
    from penstock.compose.rollout.audit_log import verify_log
    from penstock.registry import stack_file

    settings = load_settings(environ)
    if not settings.redis_url and stack_file.read(settings.home) is not None:
        settings = stack_file.with_broker(settings)
    verified = verify_log(settings, folders)
    found = verified.verification
    if as_json:
        data = {
            "chains": found.chains,
            "entries": found.entries,
            "damage": [damage._asdict() for damage in found.damage],
            "unanchored": found.unanchored,
            "foreign": found.foreign,
            "heads": dict(verified.heads),
            "problems": dict(verified.problems),
        }
        click.echo(json.dumps(data))
    else:
        for damage in found.damage:
            place = f"{damage.file}, line {damage.line}" if damage.line else damage.file
            click.echo(f"{printable(place)}, entry {damage.sequence}: {printable(damage.problem)}")
        _print_summary(found.chains, found.entries, len(found.damage), verified.heads)
        _warn(found.unanchored, found.foreign, verified.problems)
    if found.damage:
        sys.exit(1)


def _print_summary(chains: int, entries: int, damaged: int, heads: Mapping[str, int]) -> None:
    state = f"{counted(damaged, 'chain')} damaged" if damaged else "no damage"
    compared = ", ".join(f"{name} {number}" for name, number in heads.items()) or "none"
    read = f"{counted(entries, 'entry', 'entries')} in {counted(chains, 'chain')}"
    click.echo(f"{read}: {state}; stored heads: {compared}.")


def _warn(unanchored: Iterable[str], foreign: Iterable[str], problems: Mapping[str, str]) -> None:
    for name, problem in problems.items():
        click.echo(f"warning: the heads in the {name} were not compared: {printable(problem)}", err=True)
    if missing := list(unanchored):
        what = counted(len(missing), "chain")
        click.echo(f"warning: {what} had no stored head until now; entries cut from the end are not found", err=True)
    for name in foreign:
        click.echo(f"warning: {printable(name)} is no part of a chain and was not verified", err=True)


def _print_found(found: Found, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([_as_data(entry) for entry in found.entries]))
    elif not found.entries:
        click.echo("No entries.")
    else:
        for entry in found.entries:
            _print_entry(entry)
    if found.unreadable:
        lines = counted(found.unreadable, "line")
        click.echo(f"warning: {lines} could not be read; `penstock audit verify` names the first", err=True)


def _print_entry(entry: AuditEntry) -> None:
    named = " ".join(str(each) for each in (entry.model_id, entry.optimization_name, entry.result) if each != "")
    click.echo(f"{_utc(entry.time)}  {printable(entry.operation):<18} {printable(named)}")
    click.echo(f"    {printable(entry.writer)} {entry.sequence}  {printable(json.dumps(entry.details))}")


def _as_data(entry: AuditEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__struct_fields__}


def _folder(settings: Settings) -> Path:
    return settings.inference.privacy.audit_log_path


def _parse_time(text: str) -> float:
    """Unix seconds."""
    from penstock.compose.jobs.dead_letters import parse_age_ms
    from penstock.registry.errors import InvalidInput

    with suppress(ValueError):
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    try:
        return time.time() - parse_age_ms(text) / 1000
    except InvalidInput:
        raise InvalidInput(
            f"Bad time {text!r:.40}. Expected an age such as 1h, 30m or 7d, or a date such as 2026-11-23T18:00:00Z"
        ) from None


def _utc(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return "?"
