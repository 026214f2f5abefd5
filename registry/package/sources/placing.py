"""A package that came from elsewhere -> `<models root>/<name>/<version>`, as its model.yaml says.

What is there already is left as it is, and other content under the same version is refused.
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

__all__ = ["arriving", "place"]


@contextmanager
def arriving(models_root: Path) -> Iterator[Path]:
    """A folder for what is on its way, on the file system of the models root, so that a rename places it.

    Deeper in it than models root are searched.
    """
    models_root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetched-", dir=models_root) as temporary:
        yield Path(temporary)


def place(package: Path, models_root: Path, temporary: Path, label: str) -> Fetched:
    """Moves the files of a package, which lie in `temporary`, to where they are served from.

    label: how errors name the package. Raises ConfigurationError.
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
        # A folder with files in it is never replaced.
        if not target.is_dir():
            raise
    placed = load_package(target).manifest()
    if placed.content_hash != fetched.content_hash:
        raise ConfigurationError(f"{label}: {spec.reference} is there with other content, expected another version")
    return Fetched(target, placed)


def _refuse_pickles(folder: Path, label: str) -> None:
    for path in FileTree(folder, label, links_within=folder).files():
        # TorchScript files are also called .pt; their inspection tells them from checkpoints.
        if path.endswith(PICKLES) and not path.endswith(".pt"):
            raise ConfigurationError(
                f"{label}: file {shown(path)}: found a pickle, which can run code, expected a model package with "
                "safetensors, TorchScript or ONNX"
            )
