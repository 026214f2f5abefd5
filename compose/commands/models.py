"""`penstock models`: which versions there are, which one answers, and in which form.

list, show, history, lineage, verify      look
register, promote, demote, rollback, sync decide which version answers; sign: for a change of keys
load, unload, compile, levels             what workers do with it
export-onnx                               another form of a version, as a file

A refusal is one line on stderr and exit status 1. How things go on is told on stderr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from penstock.compose.rollout.access import RegistryAccess
from penstock.compose.terminal import as_json_option, console
from penstock.registry.errors import ConfigurationError, InvalidInput, ModelNotReady, UnknownModel, shown

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.compose.deploy import Rollout
    from penstock.registry.catalog.lineage import ModelLineage
    from penstock.registry.catalog.tables import Transition

__all__ = ["models"]

_reason = click.option("--reason", default="", metavar="TEXT", help="Why, for the history.")
_timeout = click.option(
    "--timeout", type=click.FloatRange(0), help="Seconds to wait for workers (default: the limit of a load)."
)
_prepare = click.option(
    "--prepare/--no-prepare", default=True, help="Whether workers load the version before it answers."
)
_worker = click.option("--worker", metavar="NAME", help="Only this worker, by a signed control command.")


@click.group()
@click.option("--via", default="", metavar="WORKER", help="Have this worker, or `any`, do it: see above.")
@click.pass_context
def models(context: click.Context, via: str) -> None:
    """Register versions of models, choose which one answers, and look at them.

    VERSION is a label such as 2, or six or more digits of a content hash.

    With --via nothing is connected to but Celery's broker: signed orders over Celery's remote control have a worker
    read and write the registry, look at its folders and reach the broker. Folders and files are that machine's.

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
    """List the versions of NAME, or of all models: stage, content, which one answers, who has it loaded.

    \b
    penstock models list
    penstock models list minilm --json
    """
    from penstock.compose.views import versions

    with access.catalogue() as (registry, fleet):
        rows = [row for row in versions.listing(registry.versions(), fleet) if name in (None, row["name"])]
    if name is not None and not rows:
        raise UnknownModel(f"Unknown model {name!r:.80}. Expected one that is registered or served: `models list`")
    _show(rows, as_json, lambda: versions.draw_versions(rows))


@models.command("show")
@click.argument("name")
@click.argument("version", default="latest")
@as_json_option
@click.pass_obj
def show(access: RegistryAccess, name: str, version: str, as_json: bool) -> None:
    """Show what the registry knows of VERSION: stage, content hash, files. Without it, of the one in production.

    \b
    penstock models show minilm 2
    """
    from penstock.compose.views import versions

    with access.registry() as registry:
        found = registry.find(name, version)
    _show(versions.as_data(found), as_json, lambda: versions.draw_version(found))


@models.command("register")
@click.argument("package")
@click.option("--lineage", "lineage_file", type=click.Path(path_type=Path), help="Where it comes from: YAML or JSON.")
@_reason
@as_json_option
@click.pass_obj
def register(access: RegistryAccess, package: str, lineage_file: Path | None, reason: str, as_json: bool) -> None:
    """Register PACKAGE as a draft, and have jobs for it accepted before a worker runs.

    PACKAGE is a folder; or runs:/RUN/PATH or models:/NAME/VERSION of the MLflow at MLFLOW_TRACKING_URI; or
    organisation/name@COMMIT, a package in the local cache of the Hugging Face hub. What lies elsewhere is copied into
    the models root. A lineage has data_version, code_hash, hyperparameters, training_metrics and parent_model; all may
    be left out.

    \b
    penstock models register models/minilm/1
    penstock models register models/minilm/2 --lineage trained.yaml --reason "new data"
    penstock models register models:/minilm/3
    """
    lineage = _read_lineage(lineage_file) if lineage_file else None
    with access.deployer() as deployer:
        try:
            found = deployer.register(access.fetched(package), lineage, reason=reason)
        except ConfigurationError as error:
            # The package is refused, not this command's own configuration.
            raise click.ClickException(str(error)) from None
    data = {"name": found.name, "version": found.version, "content_hash": found.content_hash, "stage": found.stage}
    _say(data, as_json, f"Registered {found.reference} ({found.stage}, content {found.content_hash[:12]})")


@models.command("promote")
@click.argument("name")
@click.argument("version")
@click.option("--to", type=click.Choice(["staging", "production"]), required=True, help="The stage to enter.")
@_reason
@_prepare
@_timeout
@as_json_option
@click.pass_obj
def promote(
    access: RegistryAccess,
    name: str,
    version: str,
    to: str,
    reason: str,
    prepare: bool,
    timeout: float | None,
    as_json: bool,
) -> None:
    """Take VERSION of NAME to staging, or from there to production, where it answers.

    Every live worker of the model loads it first; if one cannot, nothing changes. Then one write makes it answer all
    jobs that are claimed from that moment on.

    \b
    penstock models promote minilm 2 --to staging
    penstock models promote minilm 2 --to production --reason "better on the golden set"
    """
    if to == "staging":
        with access.registry(for_changes=True) as registry:
            transition = registry.promote(name, version, to, reason=reason)
        _say_moved(transition, as_json)
        return
    with access.deployer() as deployer:
        done = deployer.promote(name, version, to, reason=reason, prepare=prepare, timeout_s=timeout)
    _say_rolled_out(done, as_json)


@models.command("demote")
@click.argument("name")
@click.argument("version")
@click.option(
    "--to", type=click.Choice(["draft", "archived"]), default="draft", show_default=True, help="The stage to enter."
)
@_reason
@as_json_option
@click.pass_obj
def demote(access: RegistryAccess, name: str, version: str, to: str, reason: str, as_json: bool) -> None:
    """Take VERSION of NAME, which must not be in production, back to draft, or to the archive.

    \b
    penstock models demote minilm 2
    """
    with access.registry(for_changes=True) as registry:
        transition = registry.demote(name, version, to, reason=reason)
    _say_moved(transition, as_json)


@models.command("rollback")
@click.argument("name")
@_reason
@_prepare
@_timeout
@as_json_option
@click.pass_obj
def rollback(
    access: RegistryAccess, name: str, reason: str, prepare: bool, timeout: float | None, as_json: bool
) -> None:
    """Put the version of NAME that was in production before back there, prepared like a promotion.

    \b
    penstock models rollback minilm --reason "wrong on long texts"
    """
    with access.deployer() as deployer:
        done = deployer.rollback(name, reason=reason, prepare=prepare, timeout_s=timeout)
    _say_rolled_out(done, as_json)


@models.command("sync")
@click.argument("name")
@as_json_option
@click.pass_obj
def sync(access: RegistryAccess, name: str, as_json: bool) -> None:
    """Make the version of NAME in production the one that answers, after a promotion that did not get that far.

    \b
    penstock models sync minilm
    """
    with access.deployer() as deployer:
        found = deployer.sync(name)
    data = {"name": found.name, "version": found.version, "epoch": found.epoch}
    _say(data, as_json, f"{found.reference} answers (epoch {found.epoch})")


@models.command("sign")
@click.argument("name")
@_reason
@as_json_option
@click.pass_obj
def sign(access: RegistryAccess, name: str, reason: str, as_json: bool) -> None:
    """Sign all records of NAME anew with this operator's key, and the decision which of its versions answers.

    For a change of keys: make the new one, have operators and workers believe both, sign every model, drop the old one.

    \b
    penstock models sign minilm --reason "new key"
    """
    with access.deployer() as deployer:
        transition = deployer.sign(name, reason=reason)
    _say(transition.as_data(), as_json, f"{name} is signed anew (epoch {transition.epoch})")


@models.command("load")
@click.argument("name")
@click.argument("version")
@_worker
@_timeout
@as_json_option
@click.pass_obj
def load(
    access: RegistryAccess, name: str, version: str, worker: str | None, timeout: float | None, as_json: bool
) -> None:
    """Have VERSION of NAME loaded by every live worker of the model, and wait until they have it.

    \b
    penstock models load minilm 2
    penstock models load minilm 2 --worker gpu0@host
    """
    with access.deployer() as deployer:
        workers = deployer.load(name, version, worker=worker, timeout_s=timeout)
    _say_followed("loaded", name, version, workers, as_json)


@models.command("unload")
@click.argument("name")
@click.argument("version")
@_worker
@_timeout
@as_json_option
@click.pass_obj
def unload(
    access: RegistryAccess, name: str, version: str, worker: str | None, timeout: float | None, as_json: bool
) -> None:
    """Have VERSION of NAME, which must not be the one that answers, unloaded, and wait until it is.

    \b
    penstock models unload minilm 1
    """
    with access.deployer() as deployer:
        workers = deployer.unload(name, version, worker=worker, timeout_s=timeout)
    _say_followed("unloaded", name, version, workers, as_json)


@models.command("history")
@click.argument("name")
@as_json_option
@click.pass_obj
def history(access: RegistryAccess, name: str, as_json: bool) -> None:
    """Show what was changed of NAME, the newest first: when, by whom, from which stage to which, why.

    \b
    penstock models history minilm
    """
    from penstock.compose.views import versions

    with access.registry() as registry:
        found = registry.history(name)
    newest_first = found[::-1]
    data = [each.as_data() for each in newest_first]
    _show(data, as_json, lambda: versions.draw_history(newest_first))


@models.command("lineage")
@click.argument("name")
@click.argument("version")
@as_json_option
@click.pass_obj
def lineage(access: RegistryAccess, name: str, version: str, as_json: bool) -> None:
    """Show where VERSION of NAME comes from.

    \b
    penstock models lineage minilm 2
    """
    with access.registry() as registry:
        found = registry.lineage(name, version).model_dump()
    _say(found, as_json, "\n".join(f"{field}: {value}" for field, value in found.items()))


@models.command("verify")
@click.argument("name")
@click.argument("version")
@as_json_option
@click.pass_obj
def verify(access: RegistryAccess, name: str, version: str, as_json: bool) -> None:
    """Hash the files of VERSION again, and compare them with what was registered.

    \b
    penstock models verify minilm 2
    """
    with access.registry() as registry:
        found = registry.verify(name, version)
    count = len(found.files) + len(found.source_files)
    data = {"name": found.name, "version": found.version, "content_hash": found.content_hash, "files": count}
    _say(data, as_json, f"{found.reference}: {count} files are as they were registered ({found.content_hash[:12]})")


@models.command("export-onnx")
@click.argument("name")
@click.argument("version")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--int8", "is_int8", is_flag=True, help="With int8 matrices: smaller, and not the same answers.")
@as_json_option
@click.pass_obj
def export_onnx(access: RegistryAccess, name: str, version: str, path: Path, is_int8: bool, as_json: bool) -> None:
    """Write VERSION of NAME as an ONNX file, checked against the model's own answers.

    \b
    penstock models export-onnx minilm 2 minilm.onnx
    """
    with access.files() as (registry, files):
        found = registry.verify(name, version)
        done = files.export(found, path, is_int8=is_int8)
    facts = {"path": done.path, "bytes": done.bytes, "differences": done.differences}
    data = {"name": found.name, "version": found.version, "content_hash": found.content_hash, **facts}
    compared = ", ".join(f"{output} differs by at most {most:.2g}" for output, most in done.differences.items())
    _say(data, as_json, f"{found.reference} -> {done.path}: {done.bytes:,} bytes; {compared}")


@models.command("compile")
@click.argument("name")
@_worker
@_timeout
@as_json_option
@click.pass_obj
def compile_model(access: RegistryAccess, name: str, worker: str | None, timeout: float | None, as_json: bool) -> None:
    """Have the workers of NAME compile it now, beside their traffic, and wait for what came of it.

    The compiled form answers only after it matched the goldens. Exit status 1 where it does not.

    \b
    penstock models compile minilm
    """
    with access.deployer() as deployer:
        found = deployer.tune(name, "compile", worker=worker, timeout_s=timeout)
    _say(found, as_json, "\n".join(f"{entry['worker']}: {entry['answer']}" for entry in found))
    if not all(entry["form"].startswith("compiled") for entry in found):
        sys.exit(1)


@models.command("levels")
@click.argument("name")
@click.option(
    "--now",
    "action",
    type=click.Choice(["measure", "optimise", "trace"]),
    help="First measure every form and use none; or try those of the levels that are allowed; or trace a few batches.",
)
@_worker
@_timeout
@as_json_option
@click.pass_obj
def levels(
    access: RegistryAccess,
    name: str,
    action: Literal["measure", "optimise", "trace"] | None,
    worker: str | None,
    timeout: float | None,
    as_json: bool,
) -> None:
    """Show how far each worker has taken NAME, on which evidence, what each step gained, and what more would gain.

    \b
    penstock models levels minilm
    penstock models levels minilm --now measure
    """
    from penstock.compose.views.levels import draw_levels, entries

    if action is None:
        with access.fleet() as fleet:
            found = entries(fleet, name, None if worker is None else [worker])
    else:
        with access.deployer() as deployer:
            found = deployer.tune(name, action, worker=worker, timeout_s=timeout)
        for entry in found:
            click.echo(f"{entry['worker']}: {entry['answer']}", err=True)
    if not found:
        raise ModelNotReady(
            f"No worker reports a level of {name!r:.80}. Expected a model that a worker has loaded, with "
            "PENSTOCK_INFERENCE_ENABLED on"
        )
    _show(found, as_json, lambda: draw_levels(found))


def _read_lineage(file: Path) -> ModelLineage:
    from penstock.registry.catalog.lineage import ModelLineage
    from penstock.registry.package.bounded_yaml import BadDocument, read_document, read_yaml

    name = shown(file.name or file)
    try:
        found = read_yaml(read_document(file))
    except OSError as error:
        raise InvalidInput(f"{name}: cannot be read ({error.strerror})") from None
    except BadDocument as problem:
        raise InvalidInput(f"{name}{problem}") from None
    if not isinstance(found, dict):
        raise InvalidInput(f"{name}: found {type(found).__name__}, expected a mapping of fields")
    return ModelLineage.parse(found)


def _show(data: Any, as_json: bool, draw: Any) -> None:
    if as_json:
        click.echo(json.dumps(data))
    else:
        drawn: RenderableType = draw()
        console().print(drawn)


def _say(data: Any, as_json: bool, text: str) -> None:
    click.echo(json.dumps(data) if as_json else text)


def _say_moved(transition: Transition, as_json: bool) -> None:
    line = f"{transition.name}/{transition.version}: {transition.before} -> {transition.after}"
    _say(transition.as_data(), as_json, f"{line} (epoch {transition.epoch})")


def _say_rolled_out(done: Rollout, as_json: bool) -> None:
    transition = done.transition
    data = {
        **transition.as_data(),
        "prepared": done.prepared,
        "late": done.late,
        "flipped_at": done.flipped_at,
        "seconds": round(done.seconds, 3),
    }
    line = f"{transition.name}: {transition.replaced or 'nothing'} -> {transition.version}"
    how = f"epoch {transition.epoch}, {done.seconds:.1f} s, workers prepared: {len(done.prepared)}"
    _say(data, as_json, f"{line} ({how})")
    for worker in done.late:
        click.echo(f"{worker} has not said yet that it answers with {transition.version}", err=True)


def _say_followed(what: str, name: str, version: str, workers: list[str], as_json: bool) -> None:
    data = {"name": name, "version": version, "workers": workers}
    _say(data, as_json, f"{name}/{version} is {what} by {', '.join(workers)}")
