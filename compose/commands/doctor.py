"""`penstock doctor`: prints the findings of compose/doctor/, and exits with 1 when one is `broken`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from penstock.compose.terminal import as_json_option, console

__all__ = ["doctor"]


@click.command()
@as_json_option
@click.pass_obj
def doctor(environ: Mapping[str, str], as_json: bool) -> None:
    """Check installation, settings, security, broker, workers and registry, and print the fix of each fault.

    Exit status 1 when something is broken. Prints no secrets.

    \b
    penstock doctor
    penstock doctor --json
    """
    from penstock.compose.doctor import examine, findings

    found = examine(environ, Path.cwd())
    if as_json:
        click.echo(json.dumps(findings.as_json(found)))
    else:
        findings.write(found, console())
    if any(finding.status == "broken" for finding in found):
        sys.exit(1)
