"""`penstock models`: the group of commands for versions of models, and those that only read.

list, show, history, lineage, verify, export-onnx   read registry, workers and files (here)
check                                               load a package and run one job, without a broker (check.py)
register, promote, demote, rollback, sync, sign     change the registry and the active version (promotion.py)
load, unload, compile, levels                       ask workers to do something with a version (serving.py)

A refusal is one line on stderr and exit status 1. Progress is printed on stderr.
"""

from __future__ import annotations

from pathlib import Path

import click

from penstock.compose.commands.check import check
from penstock.compose.commands.promotion import demote, promote, register, rollback, sign, sync
from penstock.compose.commands.registry_access import RegistryAccess
from penstock.compose.commands.serving import compile_model, levels, load, unload
from penstock.compose.terminal import as_json_option, print_data, print_drawn
from penstock.registry.errors import UnknownModel

__all__ = ["models"]


@click.group()
@click.option("--via", default="", metavar="WORKER", help="Work through this worker, or through `any`: see above.")
@click.pass_context
def models(context: click.Context, via: str) -> None:
    """Register versions of models, choose the active one, and inspect them.

    VERSION is a label such as 2, or at least six digits of a content hash.

    With --via this process connects to nothing but Celery's broker. It sends signed commands to a worker, over Celery's
    remote control. That worker reads and writes the registry, reads its own folders and calls the broker. Folders and
    files in arguments are then those of the worker's machine.

    \b
    penstock models list
    penstock models --via any promote minilm 2 --to production
    """
    context.obj = RegistryAccess(context.obj, via)


@models.command("list")
@click.argument("name", required=False)
@as_json_option
@click.pass_obj
def list_models(access: RegistryAccess, name: str | None, as_json: bool) -> None:
    """List the versions of NAME, or of all models: stage, content hash, the active one, the workers that loaded it.

    \b
    penstock models list
    penstock models list minilm --json
    """
    from penstock.compose.views import versions

    with access.catalogue() as (registry, fleet):
        rows = [row for row in versions.listing(registry.versions(), fleet) if name in (None, row["name"])]
    if name is not None and not rows:
        raise UnknownModel(f"Unknown model {name!r:.80}. Expected one that is registered or served: `models list`")
    print_drawn(rows, as_json, lambda: versions.draw_versions(rows))


@models.command("show")
@click.argument("name")
@click.argument("version", default="latest")
@as_json_option
@click.pass_obj
def show(access: RegistryAccess, name: str, version: str, as_json: bool) -> None:
    """Show the registry's record of VERSION: stage, content hash, files. Default: the version in production.

    \b
    penstock models show minilm 2
    """
    from penstock.compose.views import versions

    with access.records(name) as registry:
        found = registry.find(name, version)
    print_drawn(versions.as_data(found), as_json, lambda: versions.draw_version(found))


@models.command("history")
@click.argument("name")
@as_json_option
@click.pass_obj
def history(access: RegistryAccess, name: str, as_json: bool) -> None:
    """Show the changes of NAME, the newest first: time, operator, stage before and after, reason.

    \b
    penstock models history minilm
    """
    from penstock.compose.views import versions

    with access.records(name) as registry:
        found = registry.history(name)
    newest_first = found[::-1]
    data = [transition.as_data() for transition in newest_first]
    print_drawn(data, as_json, lambda: versions.draw_history(newest_first))


@models.command("lineage")
@click.argument("name")
@click.argument("version")
@as_json_option
@click.pass_obj
def lineage(access: RegistryAccess, name: str, version: str, as_json: bool) -> None:
    """Show the lineage of VERSION of NAME: its data, code, parameters and parent model.

    \b
    penstock models lineage minilm 2
    """
    with access.records(name) as registry:
        found = registry.lineage(name, version).model_dump()
    print_data(found, as_json, "\n".join(f"{field}: {value}" for field, value in found.items()))


@models.command("verify")
@click.argument("name")
@click.argument("version")
@as_json_option
@click.pass_obj
def verify(access: RegistryAccess, name: str, version: str, as_json: bool) -> None:
    """Hash the files of VERSION again, and compare them with the registered digests.

    \b
    penstock models verify minilm 2
    """
    with access.records(name) as registry:
        found = registry.verify(name, version)
    count = len(found.files) + len(found.source_files)
    data = {"name": found.name, "version": found.version, "content_hash": found.content_hash, "files": count}
    text = f"{found.reference}: {count} files match their registered digests ({found.content_hash[:12]})"
    print_data(data, as_json, text)


@models.command("export-onnx")
@click.argument("name")
@click.argument("version")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--int8", "is_int8", is_flag=True, help="Quantise matrices to int8: a smaller file, less exact outputs.")
@as_json_option
@click.pass_obj
def export_onnx(access: RegistryAccess, name: str, version: str, path: Path, is_int8: bool, as_json: bool) -> None:
    """Write VERSION of NAME as an ONNX file, and compare its outputs with the model's own.

    \b
    penstock models export-onnx minilm 2 minilm.onnx
    """
    with access.files() as (registry, files):
        found = registry.verify(name, version)
        exported = files.export(found, path, is_int8=is_int8)
    facts = {"path": exported.path, "bytes": exported.bytes, "differences": exported.differences}
    data = {"name": found.name, "version": found.version, "content_hash": found.content_hash, **facts}
    compared = ", ".join(f"{output} differs by at most {most:.2g}" for output, most in exported.differences.items())
    print_data(data, as_json, f"{found.reference} -> {exported.path}: {exported.bytes:,} bytes; {compared}")


for _command in (check, register, promote, demote, rollback, sync, sign, load, unload, compile_model, levels):
    models.add_command(_command)
