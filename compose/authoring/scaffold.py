"""A name and a format -> a new package under the models root, which works as it stands.

The package is complete or absent: it is written beside its place, its weights are made, and it is moved.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from penstock.compose.authoring.templates import TEMPLATES, Template
from penstock.registry.errors import ConfigurationError, InvalidInput, MissingRequirement
from penstock.registry.package import SPEC_FILE
from penstock.registry.queues import parse_name

__all__ = ["write_package"]

_MAKE_TIMEOUT_S: Final = 300.0


def write_package(
    root: Path, name: str, version: str, kind: str, templates: Mapping[str, Template] = TEMPLATES
) -> Path:
    """Writes a package of a format and returns its folder.

    Raises InvalidInput for a bad name or one that is taken, MissingRequirement when the format's framework is not
    installed, and ConfigurationError when the folder cannot be written or the weights cannot be made.
    """
    place = root / parse_name("model", name) / parse_name("version", version)
    if place.exists():
        raise InvalidInput(f"{name}/{version} is there already. Expected a new name, or another --version")
    template = templates[kind]
    _check_installed(kind, template)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=root) as beside:
            # As deep as a package below a models root, so that no worker finds it before it is complete.
            folder = Path(beside) / name / version
            folder.mkdir(parents=True)
            for file, text in template.files.items():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(_filled(text, name, version, kind) if file == SPEC_FILE else text)
            if "make.py" in template.files:
                _make(folder, f"{name}/{version}")
            place.parent.mkdir(exist_ok=True)
            folder.rename(place)
    except OSError as error:
        raise ConfigurationError(f"The models root cannot be written ({error.strerror}). Expected a folder") from None
    return place


def _filled(text: str, name: str, version: str, kind: str) -> str:
    # YAML reads some names as numbers or as true and false, unless they are in quotes.
    quoted = yaml.safe_dump([name]).removeprefix("- ").strip()
    number = version if version.isdecimal() and not version.startswith("0") else f'"{version}"'
    return text.replace("NAME", quoted).replace("VERSION", number).replace("FORMAT", kind)


def _check_installed(kind: str, template: Template) -> None:
    for package in template.needs:
        if importlib.util.find_spec(package) is None:
            raise MissingRequirement(
                f"{package} is not installed, and a package of format {kind} needs it. Expected: "
                f"pip install '.[{template.extras}]', or --format python"
            )


def _make(folder: Path, reference: str) -> None:
    # torch warns about formats that it asks its users to leave.
    command = [sys.executable, "-W", "ignore", "make.py"]
    try:
        subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_MAKE_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().rpartition("\n")[2]
        raise ConfigurationError(f"{reference}: make.py failed ({reason:.200}). Expected the model's weights") from None
    except subprocess.TimeoutExpired:
        raise ConfigurationError(
            f"{reference}: make.py took longer than {_MAKE_TIMEOUT_S:g} s. Expected the model's weights"
        ) from None
