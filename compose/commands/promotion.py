"""`penstock models` commands that change the registry or the active version.

register, promote, demote, rollback, sync, sign
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.compose.commands.check import check_before_registration
from penstock.compose.commands.options import prepare_option, reason_option, timeout_option
from penstock.compose.commands.registry_access import RegistryAccess
from penstock.compose.terminal import as_json_option, print_data
from penstock.registry.errors import ConfigurationError, InvalidInput, shown

if TYPE_CHECKING:
    from penstock.compose.deploy import Rollout
    from penstock.registry.catalog.lineage import ModelLineage
    from penstock.registry.catalog.tables import Transition

__all__ = ["demote", "promote", "register", "rollback", "sign", "sync"]


@click.command("register")
@click.argument("package")
@click.option("--lineage", "lineage_file", type=click.Path(path_type=Path), help="The lineage: a YAML or JSON file.")
@click.option("--check/--no-check", "is_checked", default=True, help="Whether to load the package and run one job.")
@reason_option
@as_json_option
@click.pass_obj
def register(
    access: RegistryAccess, package: str, lineage_file: Path | None, is_checked: bool, reason: str, as_json: bool
) -> None:
    """Register PACKAGE as a draft. From then on jobs of the model are accepted, also while no worker runs.

    PACKAGE is a folder; or runs:/RUN/PATH or models:/NAME/VERSION of the MLflow at MLFLOW_TRACKING_URI; or
    organisation/name@COMMIT, a package in the local cache of the Hugging Face hub. A package that is not a folder is
    copied into the models root. A lineage file may have data_version, code_hash, hyperparameters, training_metrics and
    parent_model.

    The package is loaded on the CPU first, and one job runs, as `models check` does; a package that cannot work is
    refused. A machine that lacks what the package needs registers it and says that it was not loaded. With --via
    nothing is loaded.

    \b
    penstock models register models/minilm/1
    penstock models register models/minilm/2 --lineage trained.yaml --reason "new data"
    penstock models register models:/minilm/3
    """
    lineage = _read_lineage(lineage_file) if lineage_file else None
    with access.deployer() as deployer:
        try:
            folder = access.fetched(package)
            if is_checked and not access.via:
                check_before_registration(folder, access.environ)
            found = deployer.register(folder, lineage, reason=reason)
        except ConfigurationError as error:
            # The package is refused, not the configuration of this command: exit status 1.
            raise click.ClickException(str(error)) from None
    data = {"name": found.name, "version": found.version, "content_hash": found.content_hash, "stage": found.stage}
    print_data(data, as_json, f"Registered {found.reference} ({found.stage}, content hash {found.content_hash[:12]})")


@click.command("promote")
@click.argument("name")
@click.argument("version")
@click.option("--to", type=click.Choice(["staging", "production"]), required=True, help="The new stage.")
@reason_option
@prepare_option
@timeout_option
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
    """Move VERSION of NAME to staging, or from staging to production, where it is the active version.

    For production, every live worker of the model loads the version first. If one of them cannot, nothing changes.
    Then one write activates the version for every job that is claimed afterwards.

    \b
    penstock models promote minilm 2 --to staging
    penstock models promote minilm 2 --to production --reason "better on the golden set"
    """
    if to == "staging":
        with access.registry(for_changes=True) as registry:
            transition = registry.promote(name, version, to, reason=reason)
        _print_transition(transition, as_json)
        return
    with access.deployer() as deployer:
        rollout = deployer.promote(name, version, to, reason=reason, prepare=prepare, timeout_s=timeout)
    _print_rollout(rollout, as_json)


@click.command("demote")
@click.argument("name")
@click.argument("version")
@click.option(
    "--to", type=click.Choice(["draft", "archived"]), default="draft", show_default=True, help="The new stage."
)
@reason_option
@as_json_option
@click.pass_obj
def demote(access: RegistryAccess, name: str, version: str, to: str, reason: str, as_json: bool) -> None:
    """Move VERSION of NAME back to draft, or to the archive. It must not be in production.

    \b
    penstock models demote minilm 2
    """
    with access.registry(for_changes=True) as registry:
        transition = registry.demote(name, version, to, reason=reason)
    _print_transition(transition, as_json)


@click.command("rollback")
@click.argument("name")
@reason_option
@prepare_option
@timeout_option
@as_json_option
@click.pass_obj
def rollback(
    access: RegistryAccess, name: str, reason: str, prepare: bool, timeout: float | None, as_json: bool
) -> None:
    """Restore the previous production version of NAME. Workers load it first, as for a promotion.

    \b
    penstock models rollback minilm --reason "wrong on long texts"
    """
    with access.deployer() as deployer:
        rollout = deployer.rollback(name, reason=reason, prepare=prepare, timeout_s=timeout)
    _print_rollout(rollout, as_json)


@click.command("sync")
@click.argument("name")
@as_json_option
@click.pass_obj
def sync(access: RegistryAccess, name: str, as_json: bool) -> None:
    """Activate the production version of NAME, after a promotion that stopped before the activation.

    \b
    penstock models sync minilm
    """
    with access.deployer() as deployer:
        found = deployer.sync(name)
    data = {"name": found.name, "version": found.version, "epoch": found.epoch}
    print_data(data, as_json, f"{found.reference} is active (epoch {found.epoch})")


@click.command("sign")
@click.argument("name")
@reason_option
@as_json_option
@click.pass_obj
def sign(access: RegistryAccess, name: str, reason: str, as_json: bool) -> None:
    """Sign all records of NAME again with this operator's key, the active-version record included.

    To rotate a key: make the new one; let operators and workers trust both keys; sign every model; drop the old key.

    \b
    penstock models sign minilm --reason "new key"
    """
    with access.deployer() as deployer:
        transition = deployer.sign(name, reason=reason)
    print_data(transition.as_data(), as_json, f"{name} is signed again (epoch {transition.epoch})")


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


def _print_transition(transition: Transition, as_json: bool) -> None:
    line = f"{transition.name}/{transition.version}: {transition.before} -> {transition.after}"
    print_data(transition.as_data(), as_json, f"{line} (epoch {transition.epoch})")


def _print_rollout(rollout: Rollout, as_json: bool) -> None:
    transition = rollout.transition
    data = {
        **transition.as_data(),
        "prepared": rollout.prepared,
        "late": rollout.late,
        "activated_at": rollout.activated_at,
        "seconds": round(rollout.seconds, 3),
    }
    line = f"{transition.name}: {transition.replaced or 'nothing'} -> {transition.version}"
    details = f"epoch {transition.epoch}, {rollout.seconds:.1f} s, workers prepared: {len(rollout.prepared)}"
    print_data(data, as_json, f"{line} ({details})")
    for worker in rollout.late:
        click.echo(f"{worker} has not reported yet that it serves {transition.version}", err=True)
