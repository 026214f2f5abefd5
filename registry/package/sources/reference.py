"""An operator's reference to a package -> its folder on this machine.

    runs:/<run>/<path>, models:/<name>/<version>   the MLflow server or store at MLFLOW_TRACKING_URI
    organisation/name@<40 hex digits>              the local cache of the Hugging Face hub
    anything else                                  a folder, which is not copied

Fetched packages are copied into the models root, where workers look for them. An operator who registers a package with
code allows this code to run: a models root is a trusted root unless the settings name others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.registry.errors import ConfigurationError
from penstock.registry.package.sources.huggingface import HubPackages
from penstock.registry.package.sources.mlflow import MlflowSource

__all__ = ["is_elsewhere", "package_folder"]

_MLFLOW: Final = ("runs:/", "models:/")


def is_elsewhere(reference: str) -> bool:
    """Whether the reference has to be fetched: it is not a path on this machine."""
    is_path = reference.startswith(("/", ".")) or "@" not in reference or Path(reference).exists()
    return reference.startswith(_MLFLOW) or not is_path


def package_folder(reference: str, models_root: Path, environ: Mapping[str, str] | None = None) -> Path:
    """The folder of the package that `reference` names, fetched if necessary.

    Raises ConfigurationError in one line: it does not exist, is no package, or may not be served.
    """
    if not is_elsewhere(reference):
        return Path(reference)
    if not reference.startswith(_MLFLOW):
        return HubPackages(models_root).fetch(reference).folder
    tracking_uri = (os.environ if environ is None else environ).get("MLFLOW_TRACKING_URI")
    if not tracking_uri:
        raise ConfigurationError("MLFLOW_TRACKING_URI: missing, expected the address of the MLflow server or store")
    return MlflowSource(tracking_uri, models_root).fetch(reference).folder
