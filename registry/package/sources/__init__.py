"""Where model files come from: a folder, the local cache of the Hugging Face hub, an MLflow server.

    reference -> fetch -> Fetched (folder on this machine + manifest)
    what an operator names -> package_folder -> fetched from wherever that is

Files are found, hashed and inspected here; nothing is loaded and nothing in them is executed.
"""

from __future__ import annotations

from penstock.registry.package.sources.base import Fetched, Source
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
    "Source",
    "base",
    "huggingface",
    "is_elsewhere",
    "local",
    "mlflow",
    "package_folder",
    "placing",
    "reference",
]
