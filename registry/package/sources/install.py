"""A fetched package -> `<models root>/<name>/<version>`, with the name and version of its model.yaml.

An installed package is never changed: other content under the same version is refused.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.registry.errors import ConfigurationError, shown
from penstock.registry.package import SPEC_FILE, load_package, read_spec
from penstock.registry.package.inspection import PICKLES
from penstock.registry.package.manifest import FileTree
from penstock.registry.package.sources.base import Fetched

__all__ = ["download_folder", "install"]


@contextmanager
def download_folder(models_root: Path) -> Iterator[Path]:
    """A temporary folder inside the models root: on its file system, so that a rename installs a package.

    Workers do not look for packages so deep in the models root. Raises ConfigurationError, also for an OSError of the
    block.
    """
    try:
        models_root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetched-", dir=models_root) as temporary:
            yield Path(temporary)
    except OSError as error:
        raise ConfigurationError(
            f"Models root {models_root.name!r}: a package cannot be written there ({error.strerror}). "
            f"Expected a folder with room, and in it <name>/<version>/{SPEC_FILE}"
        ) from None


def install(package: Path, models_root: Path, temporary: Path, label: str) -> Fetched:
    """Moves a package from the folder `temporary` to its folder in the models root.

    label: names the package in messages. Raises ConfigurationError.
    """
    _refuse_pickles(package, label)
    if not (package / SPEC_FILE).is_file():
        raise ConfigurationError(f"{label}: found no {SPEC_FILE}, expected the folder of a model package")
    spec = read_spec(package / SPEC_FILE, f"{label}: {SPEC_FILE}")
    folder = temporary / "packages" / spec.name / spec.version
    folder.parent.mkdir(parents=True)
    package.rename(folder)
    fetched = load_package(folder).manifest()
    target = models_root / spec.name / spec.version
    target.parent.mkdir(exist_ok=True)
    try:
        folder.rename(target)
    except OSError:
        # A rename never replaces a folder that holds files.
        if not target.is_dir():
            raise
    installed = load_package(target).manifest()
    if installed.content_hash != fetched.content_hash:
        raise ConfigurationError(f"{label}: {spec.reference} is installed with other content, expected another version")
    return Fetched(target, installed)


def _refuse_pickles(folder: Path, label: str) -> None:
    for path in FileTree(folder, label, links_within=folder).files():
        # TorchScript files also end with .pt. Their inspection refuses checkpoints.
        if path.endswith(PICKLES) and not path.endswith(".pt"):
            raise ConfigurationError(
                f"{label}: file {shown(path)}: found a pickle, which can run code, expected a model package with "
                "safetensors, TorchScript or ONNX"
            )
