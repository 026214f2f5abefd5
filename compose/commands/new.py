"""`penstock new`: a package to begin with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import click

from penstock.compose.authoring.templates import TEMPLATES
from penstock.compose.terminal import load_settings

__all__ = ["new"]


@click.command()
@click.argument("name")
@click.option("--format", "kind", type=click.Choice(list(TEMPLATES)), default="python", show_default=True)
@click.option("--version", default="1", show_default=True, help="The version of the model.")
@click.pass_obj
def new(environ: Mapping[str, str], name: str, kind: str, version: str) -> None:
    """Write a model package NAME under the models root. It works as it stands: edit it into your own.

    Formats but python write small weights with the framework, which must be installed. A package that is there is
    never overwritten.

    \b
    penstock new sentiment
    penstock new classifier --format torchscript
    """
    from penstock.compose.authoring.scaffold import write_package

    folder = write_package(load_settings(environ).inference.repo_root, name, version, kind)
    files = ", ".join(sorted(file.name for file in folder.iterdir()))
    shown = _shown(folder)
    click.echo(
        f"Wrote {shown}: {files}\n"
        "\n"
        "Next:\n"
        f"  penstock models check {shown}\n"
        "  penstock up\n"
        "\n"
        "and, while it runs, in Python:\n"
        "  from penstock import Client\n"
        "  with Client.from_env() as client:\n"
        f'      print(client.submit("{name}", {TEMPLATES[kind].inputs}).result(timeout=30))'
    )


def _shown(folder: Path) -> str:
    """The folder as a reader would type it here."""
    absolute, here = folder.absolute(), Path.cwd()
    return os.fspath(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)
