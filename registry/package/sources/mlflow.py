"""A model package that was logged to MLflow: `runs:/<run>/<path>` or `models:/<name>/<version>`.

    mlflow.log_artifacts(folder with model.yaml) -> fetch -> <models root>/<name>/<version>

Models of `mlflow.pytorch` and `mlflow.pyfunc` are pickles, which can run code when they are read, so they are refused.
A served model is a package among the artefacts of a run, with its weights in safetensors, TorchScript or ONNX.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.registry.errors import ConfigurationError, shown
from penstock.registry.package.sources.base import Fetched
from penstock.registry.package.sources.install import download_folder, install

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

__all__ = ["MlflowSource"]


class MlflowSource:
    """Packages among the artefacts of an MLflow server or store, installed in a models root."""

    def __init__(self, tracking_uri: str, models_root: Path, *, registry_uri: str | None = None) -> None:
        """`registry_uri` None: models are registered at `tracking_uri`."""
        self._tracking_uri = tracking_uri
        self._registry_uri = registry_uri or tracking_uri
        self._models_root = models_root

    def fetch(self, reference: str) -> Fetched:
        """The package among the artefacts at `reference`, now in `<models root>/<name>/<version>`.

        An installed package is not changed: other content under the same version is refused.
        """
        with download_folder(self._models_root) as temporary:
            downloaded = self._download(reference, temporary / "download")
            return install(downloaded, self._models_root, temporary, shown(reference))

    def _download(self, reference: str, into: Path) -> Path:
        # MLflow must not report that this machine fetches models.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise ConfigurationError("mlflow is not installed. Expected: pip install '.[mlflow]'") from None
        into.mkdir()
        try:
            client = MlflowClient(self._tracking_uri, self._registry_uri)
            run, path = _artifact(client, reference)
            return Path(client.download_artifacts(run, path, str(into)))
        except MlflowException as error:
            raise ConfigurationError(f"{shown(reference)}: MLflow answers {error.error_code}, expected files") from None
        except OSError as error:
            raise ConfigurationError(f"{shown(reference)}: cannot be fetched ({type(error).__name__})") from None


def _artifact(client: MlflowClient, reference: str) -> tuple[str, str]:
    """(run, path of the artefact) of a reference."""
    scheme, _, rest = reference.partition(":/")
    first, _, second = rest.lstrip("/").partition("/")
    if scheme == "models" and first and second:
        return _artifact(client, client.get_model_version_download_uri(first, second))
    if scheme == "runs" and first and second:
        return first, second
    raise ConfigurationError(f"{shown(reference)}: expected runs:/<run>/<path> or models:/<name>/<version> of a run")
