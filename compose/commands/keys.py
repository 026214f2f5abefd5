"""`penstock keys`: the API keys of the gateway's callers, and the keys that encrypt data.

create, list, revoke, usage   API keys: compose/commands/api_keys.py
generate, show                data keys
rotate                        of an API key with its id, else of the data keys
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from penstock.compose.commands.api_keys import create, list_keys, revoke, rotate_api_key, usage
from penstock.compose.terminal import as_json_option, load_settings

if TYPE_CHECKING:
    from penstock.safety.keys import KeyChange

__all__ = ["keys"]


@click.group()
def keys() -> None:
    """Make, rotate and show API keys of the gateway, and the keys that encrypt data at rest.

    API keys: create, list, revoke, usage, and rotate with the id of one. They are in the registry's database.

    Data keys: generate, show, and rotate without an id. PENSTOCK_INFERENCE_PRIVACY_ENCRYPTION_KEY_SOURCE says where
    they are: env, file or hsm. The first key seals, all open. Workers read them when they start.
    """


for _command in (create, list_keys, revoke, usage):
    keys.add_command(_command)


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
    with audit_logger(settings, "keys") as log:
        change = generate_keys(settings, key_audit(log), makes_wrapping_key=make_wrapping_key)
    _print_change(change)


@keys.command("rotate")
@click.argument("api_key", metavar="[API_KEY_ID]", required=False)
@click.option("--last", "is_last", is_flag=True, help="Add the new key behind the others: it opens, and does not seal.")
@click.option("--to", "key_id", metavar="ID", help="Make no key; put the one with this id first.")
@as_json_option
@click.pass_obj
def rotate(environ: Mapping[str, str], api_key: str | None, is_last: bool, key_id: str | None, as_json: bool) -> None:
    """Give the API key API_KEY_ID a new secret; the old one opens no more after a second. The id and its limits stay.

    Without an id: put a new data key first. The old ones stay, and open what they sealed. Restart the workers
    afterwards. Where several machines share sealed data, add the key with --last on all of them
    first, restart, and then put it first with --to.

    \b
    penstock keys rotate 3f9a0c2b7d41
    penstock keys rotate
    penstock keys rotate --last
    penstock keys rotate --to 1a2b3c4d
    """
    from penstock.compose.rollout.audit_log import audit_logger
    from penstock.safety.keys import key_audit, promote_key, rotate_keys

    if api_key is not None:
        if is_last or key_id is not None:
            raise click.UsageError("--last and --to are of data keys. Expected none of them with the id of an API key")
        rotate_api_key(environ, api_key, as_json)
        return
    if as_json:
        raise click.UsageError("--json is of API keys. Expected the id of one")
    if key_id is not None and is_last:
        raise click.UsageError("--last adds a new key and --to makes none. Expected one of them")
    settings = load_settings(environ)
    with audit_logger(settings, "keys") as log:
        audit = key_audit(log)
        if key_id is None:
            change = rotate_keys(settings, audit, is_last=is_last)
        else:
            change = promote_key(settings, audit, key_id)
    _print_change(change)


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
    with audit_logger(settings, "keys") as log:
        ids = read_data_keys(settings, key_audit(log)).ids
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
