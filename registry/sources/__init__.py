"""Where model files come from: a folder, the local cache of the Hugging Face hub, an MLflow server.

    reference -> fetch -> Fetched (folder on this machine + manifest)

Files are found, hashed and inspected here; nothing is loaded and nothing in them is executed.
"""

from __future__ import annotations

from registry.sources.base import Fetched, Source
from registry.sources.huggingface import HubSource
from registry.sources.local import LocalSource
from registry.sources.mlflow import MlflowSource

__all__ = ["Fetched", "HubSource", "LocalSource", "MlflowSource", "Source", "base", "huggingface", "local", "mlflow"]
