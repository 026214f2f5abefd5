"""`penstock cache`: the cache of answers on this machine's disk, beside running workers or without them; with --fleet
the caches of all live workers, in memory, on disk and in Redis.

`clear` asks for confirmation or takes --yes. No command shows a value. A file that is missing is an empty cache; a
damaged one is refused, and the next worker moves it aside.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.compose.commands.options import yes_option
from penstock.compose.terminal import (
    as_json_option,
    connected,
    counted,
    load_settings,
    open_broker,
    print_data,
    print_drawn,
    printable,
    terminable,
)

if TYPE_CHECKING:
    from penstock.registry.settings import Settings
    from penstock.safety.sealing import DataKeys
    from penstock.workers.cache.l2_upkeep import Contents, Upkeep

__all__ = ["cache"]

_WAIT_S: Final = 5.0
_MIB: Final = 1 << 20
_NO_FILE: Final = "There is no cache on this machine's disk."


@click.group()
def cache() -> None:
    """Inspect, verify, clear and encrypt anew the cache of answers: on this machine's disk, or of all workers."""


fleet_option = click.option("--fleet", is_flag=True, help="The caches of all live workers, each in all its tiers.")


@cache.command("stats")
@fleet_option
@as_json_option
@click.pass_obj
def stats(environ: Mapping[str, str], fleet: bool, as_json: bool) -> None:
    """Show the number of entries and the size of the file; with --fleet the counters of every worker, by tier.

    \b
    penstock cache stats
    penstock cache stats --fleet
    penstock cache stats --json
    """
    if fleet:
        from penstock.compose.views.cached import caches, draw_caches

        with open_broker(connected(environ)) as broker:
            found = caches(broker)
        print_drawn({"workers": found}, as_json, lambda: draw_caches(found))
        return
    settings = load_settings(environ)
    data = {"entries": 0, "bytes": 0, "max_bytes": settings.inference.cache.l2_max_bytes, "encrypted": None}
    with _opened(settings, with_keys=False) as upkeep:
        if upkeep is not None:
            data |= {"entries": upkeep.entries, "bytes": upkeep.nbytes, "encrypted": upkeep.is_sealed}
    entries = counted(data["entries"] or 0, "entry", "entries")
    text = f"{entries}, {_mib(data['bytes'])} of {_mib(data['max_bytes'])} on disk"
    print_data(data, as_json, text if data["encrypted"] is not None else _NO_FILE)


@cache.command("inspect")
@as_json_option
@click.pass_obj
def inspect(environ: Mapping[str, str], as_json: bool) -> None:
    """Show the entries by version and by encryption key, without values. Needs no key.

    \b
    penstock cache inspect
    penstock cache inspect --json
    """
    with _opened(load_settings(environ), with_keys=False) as upkeep:
        contents = None if upkeep is None else upkeep.inspect()
    if as_json:
        print_data(None if contents is None else asdict(contents), True, "")
    elif contents is None:
        click.echo(_NO_FILE)
    else:
        _print_contents(contents)


@cache.command("verify")
@as_json_option
@click.pass_obj
def verify(environ: Mapping[str, str], as_json: bool) -> None:
    """Open every entry with the keys of these settings. Exit status 1 when one does not open. Changes nothing.

    \b
    penstock cache verify
    """
    with _opened(load_settings(environ)) as upkeep:
        found = None if upkeep is None else upkeep.verify(_progress())
    if found is None:
        print_data(None, as_json, _NO_FILE)
        return
    text = (
        f"{counted(found.good, 'entry is', 'entries are')} good, {found.expired:,} expired, "
        f"{found.changed:,} changed or damaged, {found.other_key:,} sealed by a key that is not here."
    )
    print_data(asdict(found), as_json, text)
    if found.unopenable:
        sys.exit(1)


@cache.command("rekey")
@as_json_option
@click.pass_obj
def rekey(environ: Mapping[str, str], as_json: bool) -> None:
    """Seal entries of older keys with the first key. Workers go on; an interrupted run is continued by the next one.

    Afterwards an older key can be removed from the settings, when no other worker seals with it.

    \b
    penstock cache rekey
    """
    with _opened(load_settings(environ)) as upkeep, terminable():
        done = None if upkeep is None else upkeep.rekey(_progress())
    if done is None:
        print_data(None, as_json, _NO_FILE)
        return
    text = (
        f"{counted(done.resealed, 'entry', 'entries')} sealed anew, {done.current:,} had the first key's seal, "
        f"{done.unopenable:,} do not open and stay as they are."
    )
    print_data(asdict(done), as_json, text)


@cache.command("clear")
@fleet_option
@click.option("--model", metavar="NAME", default="", help="With --fleet: only the answers of this model.")
@yes_option
@as_json_option
@click.pass_obj
def clear(environ: Mapping[str, str], fleet: bool, model: str, yes: bool, as_json: bool) -> None:
    """Remove all entries from this machine's disk. Repeated inputs run their models again.

    With --fleet every live worker forgets its answers, in memory, on disk and in Redis. The command is signed with the
    operator's key, and workers without the operator's public key refuse it.

    \b
    penstock cache clear
    penstock cache clear --fleet --model minilm --yes
    """
    if model and not fleet:
        raise click.UsageError("The file on disk is cleared as a whole. Expected --fleet with --model")
    if fleet:
        if not yes:
            what = f"the cached answers of {printable(model)}" if model else "all cached answers"
            click.confirm(f"Remove {what} of all workers?", abort=True, err=True)
        asked = _clear_fleet(environ, model)
        print_data({"workers": asked}, as_json, f"{counted(len(asked), 'worker')} cleared: {', '.join(asked) or '-'}")
        return
    removed = 0
    with _opened(load_settings(environ), with_keys=False) as upkeep:
        if upkeep is not None:
            if not yes:
                question = f"Remove {counted(upkeep.entries, 'entry', 'entries')} from this machine's disk?"
                click.confirm(question, abort=True, err=True)
            removed = upkeep.clear(_progress())
    print_data({"removed": removed}, as_json, f"{counted(removed, 'entry', 'entries')} removed.")


def _clear_fleet(environ: Mapping[str, str], model: str) -> list[str]:
    from penstock.compose.deploy import Deployer

    with terminable(), Deployer.connect(connected(environ)) as deployer:
        return deployer.clear_cache(model)


@contextmanager
def _opened(settings: Settings, *, with_keys: bool = True) -> Iterator[Upkeep | None]:
    """The file of the cache; None if there is none. Raises ConfigurationError if it is encrypted and no key is here."""
    from penstock.workers.cache.l2_file import L2File
    from penstock.workers.cache.l2_rows import rows_for
    from penstock.workers.cache.l2_upkeep import Upkeep

    config = settings.inference.cache
    if not config.l2_path.is_file():
        yield None
        return
    file = L2File(
        config.l2_path.absolute(),
        max_bytes=config.l2_max_bytes,
        is_sealed=None,
        read_wait_s=_WAIT_S,
        write_wait_s=_WAIT_S,
    )
    try:
        file.read("SELECT 1")
        keys = _data_keys(settings) if with_keys and file.is_sealed else None
        yield Upkeep(file, rows_for(keys))
    except (sqlite3.Error, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise click.ClickException(
            f"The cache on disk cannot be used ({reason}). Expected a sound file that no other program locks"
        ) from None
    finally:
        file.close()


def _data_keys(settings: Settings) -> DataKeys:
    from penstock.compose.rollout.audit_log import audit_logger
    from penstock.safety.keys import key_audit, read_data_keys

    with audit_logger(settings, "keys") as log:
        return read_data_keys(settings, key_audit(log))


def _progress() -> Callable[[int, int], None]:
    """Prints the progress of long work on stderr when that is a terminal."""
    if not sys.stderr.isatty():
        return lambda _done, _total: None
    return lambda done, total: click.echo(f"\r{done:,} of {total:,} ", err=True, nl=done >= total)


def _print_contents(contents: Contents) -> None:
    from penstock.compose.jobs.dead_letters import utc_time

    mode = "encrypted" if contents.is_sealed else "plain"
    click.echo(f"{counted(contents.entries, 'entry', 'entries')}, {mode}, {_mib(contents.file_bytes)} on disk")
    for group, found in sorted(contents.groups.items()):
        click.echo(
            f"version {printable(group)[:16]}  {counted(found.entries, 'entry', 'entries')}, {_mib(found.nbytes)}, "
            f"{found.expired:,} expired, stored {utc_time(found.oldest_ms or 0)} to {utc_time(found.newest_ms or 0)}"
        )
    for key, entries in sorted(contents.keys.items()):
        click.echo(f"key {key}  {counted(entries, 'entry', 'entries')}")


def _mib(nbytes: Any) -> str:
    return f"{nbytes / _MIB:,.1f} MiB"
