"""A model package that was logged to MLflow: `runs:/<run>/<path>` or `models:/<name>/<version>`.

    mlflow.log_artifacts(folder with model.yaml) -> fetch -> <models root>/<name>/<version>

Models that MLflow's flavours write are pickles, which can run code wherever they are read, so `mlflow.pytorch` and
`mlflow.pyfunc` models are refused with that reason; what is served is a package, with its weights in safetensors,
TorchScript or ONNX, kept as artefacts of a run.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from registry.errors import ConfigurationError, shown
from registry.inspection import PICKLES
from registry.manifest import FileTree
from registry.package import SPEC_FILE, load_package, read_spec
from registry.sources.base import Fetched

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
        self._models_root.mkdir(parents=True, exist_ok=True)
        # Deeper than the models root is searched, and on its file system, so that a rename moves it.
        with tempfile.TemporaryDirectory(prefix=".fetched-", dir=self._models_root) as temporary:
            downloaded = self._download(reference, Path(temporary) / "download")
            return self._place(downloaded, Path(temporary) / "packages", shown(reference))

    def _download(self, reference: str, into: Path) -> Path:
        # Nobody is told that this machine fetches models.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise ConfigurationError("mlflow is not installed. Expected: pip install 'penstock[mlflow]'") from None
        into.mkdir()
        client = MlflowClient(self._tracking_uri, self._registry_uri)
        try:
            run, path = _artifact(client, reference)
            return Path(client.download_artifacts(run, path, str(into)))
        except MlflowException as error:
            raise ConfigurationError(f"{shown(reference)}: MLflow answers {error.error_code}, expected files") from None
        except OSError as error:
            raise ConfigurationError(f"{shown(reference)}: cannot be fetched ({type(error).__name__})") from None

    def _place(self, downloaded: Path, temporary: Path, label: str) -> Fetched:
        _refuse_pickles(downloaded, label)
        if not (downloaded / SPEC_FILE).is_file():
            raise ConfigurationError(f"{label}: found no {SPEC_FILE}, expected the folder of a model package")
        spec = read_spec(downloaded / SPEC_FILE, f"{label}: {SPEC_FILE}")
        folder = temporary / spec.name / spec.version
        folder.parent.mkdir(parents=True)
        downloaded.rename(folder)
        fetched = load_package(folder).manifest()
        target = self._models_root / spec.name / spec.version
        target.parent.mkdir(exist_ok=True)
        try:
            folder.rename(target)
        except OSError:
            # A folder with files in it is never replaced.
            if not target.is_dir():
                raise
        placed = load_package(target).manifest()
        if placed.content_hash != fetched.content_hash:
            raise ConfigurationError(f"{label}: {spec.reference} is there with other content, expected another version")
        return Fetched(target, placed)


def _artifact(client: MlflowClient, reference: str) -> tuple[str, str]:
    """(run, path of the artefact) of a reference."""
    scheme, _, rest = reference.partition(":/")
    first, _, second = rest.lstrip("/").partition("/")
    if scheme == "models" and first and second:
        return _artifact(client, client.get_model_version_download_uri(first, second))
    if scheme == "runs" and first and second:
        return first, second
    raise ConfigurationError(f"{shown(reference)}: expected runs:/<run>/<path> or models:/<name>/<version> of a run")


def _refuse_pickles(folder: Path, label: str) -> None:
    for path in FileTree(folder, label, links_within=folder).files():
        # TorchScript files are also called .pt; their inspection tells them from checkpoints.
        if path.endswith(PICKLES) and not path.endswith(".pt"):
            raise ConfigurationError(
                f"{label}: file {shown(path)}: found a pickle, which can run code, expected a model package with "
                "safetensors, TorchScript or ONNX"
            )
