"""`penstock keys`: make, rotate and show the keys that encrypt data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from penstock.compose.terminal import as_json_option, load_settings

if TYPE_CHECKING:
    from penstock.safety.keys import KeyChange

__all__ = ["keys"]


@click.group()
def keys() -> None:
    """Make, rotate and show the keys that encrypt data at rest.

    PENSTOCK_INFERENCE_PRIVACY_ENCRYPTION_KEY_SOURCE says where they are: env, file or hsm. The first key seals, all
    open. Workers read them when they start.
    """


@keys.command("generate")
@click.option("--make-wrapping-key", is_flag=True, help="Make the key in the HSM that wraps the data key, too.")
@click.pass_obj
def generate(environ: Mapping[str, str], make_wrapping_key: bool) -> None:
    """Make the first data key of the configured source. An existing key is not touched.

    For the source env the key is printed on stdout, as the line that sets the variable. For file and hsm it is written
    to the key file (mode 0600); for hsm it is wrapped.

    \b
    penstock keys generate
    penstock keys generate --make-wrapping-key
    """
    from penstock.compose.rollout.audit_log import audit_logger
    from penstock.safety.keys import generate_keys, key_audit

    settings = load_settings(environ)
    _print_change(
        generate_keys(settings, key_audit(audit_logger(settings, "keys")), makes_wrapping_key=make_wrapping_key)
    )


@keys.command("rotate")
@click.option("--last", "is_last", is_flag=True, help="Add the new key behind the others: it opens, and does not seal.")
@click.option("--to", "key_id", metavar="ID", help="Make no key; put the one with this id first.")
@click.pass_obj
def rotate(environ: Mapping[str, str], is_last: bool, key_id: str | None) -> None:
    """Put a new data key first. The old ones stay, and open what they sealed.

    Restart the workers afterwards. Where several machines share sealed data, add the key with --last on all of them
    first, restart, and then put it first with --to.

    \b
    penstock keys rotate
    penstock keys rotate --last
    penstock keys rotate --to 1a2b3c4d
    """
    from penstock.compose.rollout.audit_log import audit_logger
    from penstock.safety.keys import key_audit, promote_key, rotate_keys

    if key_id is not None and is_last:
        raise click.UsageError("--last adds a new key and --to makes none. Expected one of them")
    settings = load_settings(environ)
    audit = key_audit(audit_logger(settings, "keys"))
    _print_change(
        rotate_keys(settings, audit, is_last=is_last) if key_id is None else promote_key(settings, audit, key_id)
    )


@keys.command("show")
@as_json_option
@click.pass_obj
def show(environ: Mapping[str, str], as_json: bool) -> None:
    """Print the ids of the data keys, the sealing one first. Ids tell nothing about keys, and no key is shown.

    \b
    penstock keys show
    penstock keys show --json
    """
    from penstock.compose.rollout.audit_log import audit_logger
    from penstock.safety.keys import key_audit, needs_data_keys, read_data_keys

    settings = load_settings(environ)
    ids = read_data_keys(settings, key_audit(audit_logger(settings, "keys"))).ids
    source = settings.inference.privacy.encryption_key_source
    is_needed = needs_data_keys(settings)
    if as_json:
        click.echo(json.dumps({"source": source, "keys": ids, "is_needed": is_needed}))
        return
    click.echo(f"source {source}; {'needed' if is_needed else 'nothing is encrypted'} with these settings")
    for line in _described(ids):
        click.echo(line)


def _print_change(change: KeyChange) -> None:
    """Only a line for the environment, which holds keys, goes to stdout."""
    for line in _described(change.ids):
        click.echo(line, err=True)
    if change.line:
        click.echo("Set this variable for every worker, and keep it secret:", err=True)
        click.echo(change.line)
    else:
        click.echo("The key file is written. Workers read it when they start.", err=True)


def _described(ids: Sequence[str]) -> list[str]:
    return [f"{key_id}  {'opens' if place else 'seals and opens'}" for place, key_id in enumerate(ids)]
