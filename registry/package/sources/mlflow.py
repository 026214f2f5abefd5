"""A model package that was logged to MLflow: `runs:/<run>/<path>` or `models:/<name>/<version>`.

    mlflow.log_artifacts(folder with model.yaml) -> fetch -> <models root>/<name>/<version>

Models that MLflow's flavours write are pickles, which can run code wherever they are read, so `mlflow.pytorch` and
`mlflow.pyfunc` models are refused with that reason; what is served is a package, with its weights in safetensors,
TorchScript or ONNX, kept as artefacts of a run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.registry.errors import ConfigurationError, shown
from penstock.registry.package.sources.base import Fetched
from penstock.registry.package.sources.placing import arriving, place

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

__all__ = ["MlflowSource"]


class MlflowSource:
    """Packages among the artefacts of an MLflow server or store, placed under a models root."""

    def __init__(self, tracking_uri: str, models_root: Path, *, registry_uri: str | None = None) -> None:
        """`registry_uri` None: models are registered where runs are tracked."""
        self._tracking_uri = tracking_uri
        self._registry_uri = registry_uri or tracking_uri
        self._models_root = models_root

    def fetch(self, reference: str) -> Fetched:
        """The package among the artefacts at `reference`, now in `<models root>/<name>/<version>`.

        A package that is already there is left as it is; one with other content is refused.
        """
        with arriving(self._models_root) as temporary:
            downloaded = self._download(reference, temporary / "download")
            return place(downloaded, self._models_root, temporary, shown(reference))

    def _download(self, reference: str, into: Path) -> Path:
        # Nobody is told that this machine fetches models.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise ConfigurationError("mlflow is not installed. Expected: pip install '.[mlflow]'") from None
        into.mkdir()
        client = MlflowClient(self._tracking_uri, self._registry_uri)
        try:
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
