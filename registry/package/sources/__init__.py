"""Sources of model files: a folder, the local cache of the Hugging Face hub, an MLflow server.

    reference               -> ModelSource.fetch -> Fetched (folder on this machine + manifest)
    an operator's reference -> package_folder    -> the folder, fetched if necessary

Files are found, hashed and inspected here. No model is loaded, and no file is executed.
"""

from __future__ import annotations

from penstock.registry.package.sources.base import Fetched, ModelSource
from penstock.registry.package.sources.huggingface import HubPackages, HubSource
from penstock.registry.package.sources.local import LocalSource
from penstock.registry.package.sources.mlflow import MlflowSource
from penstock.registry.package.sources.reference import is_elsewhere, package_folder

__all__ = [
    "Fetched",
    "HubPackages",
    "HubSource",
    "LocalSource",
    "MlflowSource",
    "ModelSource",
    "base",
    "huggingface",
    "install",
    "is_elsewhere",
    "local",
    "mlflow",
    "package_folder",
    "reference",
]
