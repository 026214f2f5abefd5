"""`penstock models check`: load a package and run one job, without a broker."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TextIO

import click

from penstock.compose.commands.registry_access import RegistryAccess
from penstock.compose.terminal import as_json_option, load_settings
from penstock.registry.errors import ConfigurationError, InvalidInput, MissingRequirement, ModelError

if TYPE_CHECKING:
    from penstock.compose.authoring.check import CheckTarget, PackageReport
    from penstock.registry.settings import Settings

__all__ = ["check", "check_before_registration"]


@click.command("check")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--sample", type=click.File(), help="The inputs of a job, as one JSON object; - for stdin.")
@click.option("--device", help="auto, cpu, cuda or cuda:N (default: the setting, auto).")
@as_json_option
@click.pass_obj
def check(access: RegistryAccess, folder: Path, sample: TextIO | None, device: str | None, as_json: bool) -> None:
    """Load the package in FOLDER, run one job, and compare its outputs with model.yaml. No broker is needed.

    A Python file instead of a folder: each model of it that @penstock.model declares. Without --sample the job has
    small valid inputs. The code of the package runs in this process. Exit status 1: the package or the sample is
    wrong. Exit status 78: this machine lacks what the package needs.

    \b
    penstock models check models/mlp/1
    penstock models check models/mlp/1 --sample inputs.json
    penstock models check my_models.py
    """
    settings = load_settings(access.environ, {"device": device})
    inputs = None if sample is None else _read_sample(sample.read())
    reports = []
    with _packages(folder) as packages:
        for package in packages:
            report = _checked(package, settings, access.environ, inputs, is_quiet=as_json)
            reports.append(report.as_data())
            if not as_json:
                click.echo(f"{report.reference} works ({report.content_hash[:12]})")
    if as_json:
        click.echo(json.dumps(reports if folder.suffix == ".py" else reports[0]))


@contextmanager
def _packages(folder: Path) -> Iterator[list[Path]]:
    """The folder, or the folders of the packages of a Python file. Raises ClickException for a wrong file."""
    if folder.suffix != ".py":
        yield [folder]
        return
    from penstock.registry.package.one_file import read_models, write_packages

    with TemporaryDirectory(prefix="penstock-check-") as place:
        try:
            app = read_models(folder)
            root = write_packages(app, Path(place))
        except ConfigurationError as error:
            raise click.ClickException(str(error)) from None
        # As in a worker of --app: modules beside the file can be imported.
        sys.path.insert(0, str(folder.absolute().parent))
        try:
            yield [root / each.reference for each in app.models]
        finally:
            sys.path.remove(str(folder.absolute().parent))


def check_before_registration(folder: Path, environ: Mapping[str, str]) -> None:
    """Load the package and run one job, as `check` does, without its lines. It runs on the CPU: a GPU may be serving.

    A machine that lacks what the package needs prints a line instead. Raises ClickException for a package that cannot
    work.
    """
    try:
        _checked(folder, load_settings(environ, {"device": "cpu"}), environ, None, is_quiet=True)
    except MissingRequirement as error:
        click.echo(f"The package was not loaded here. {error}", err=True)


def _checked(
    folder: Path, settings: Settings, environ: Mapping[str, str], sample: Mapping[str, object] | None, *, is_quiet: bool
) -> PackageReport:
    """The report of a check that printed its steps, unless it is quiet. Raises MissingRequirement, ClickException."""
    from penstock.compose.authoring.check import check_package, own_traceback

    def tell(step: str, found: str) -> None:
        if not is_quiet:
            click.echo(f"{step:<12}{found}")

    try:
        return check_package(folder, _target(settings, environ), sample, tell)
    except MissingRequirement:
        raise
    except (ConfigurationError, InvalidInput, ModelError) as error:
        click.echo(own_traceback(error, folder), err=True, nl=False)
        # The package is refused, not the configuration of this command: exit status 1.
        raise click.ClickException(str(error)) from None


def _target(settings: Settings, environ: Mapping[str, str]) -> CheckTarget:
    from penstock.compose.authoring.check import CheckTarget
    from penstock.workers.process.device import granted_threads, visible_gpus

    device = settings.inference.device
    if device == "auto":
        device = "cuda" if visible_gpus(environ) else "cpu"
    return CheckTarget(device, granted_threads(device, environ), settings.inference.runtime_hosts)


def _read_sample(text: str) -> dict[str, object]:
    """The inputs in a JSON object. Raises InvalidInput."""
    from penstock.compose.jobs import json_tensors

    try:
        read = json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"--sample: no JSON ({error}). Expected one object: a value for each input") from None
    if not isinstance(read, dict):
        raise InvalidInput(f"--sample: a {type(read).__name__}. Expected one object: a value for each input")
    return json_tensors.read(read)
