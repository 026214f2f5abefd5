"""A registered version -> an ONNX file, in this process: for machines with the frameworks, and no worker's."""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from registry.errors import ConfigurationError, InvalidInput
from registry.package import load_package
from registry.tables import RegisteredVersion

__all__ = ["Exported", "export"]


class Exported(NamedTuple):
    """The file's size, and by output how far its answers are from the model's at most."""

    bytes: int
    differences: dict[str, float]


def export(version: RegisteredVersion, path: Path, *, is_int8: bool = False) -> Exported:
    """Writes the file as a whole or not at all, once its answers matched the model's.

    Raises InvalidInput for a model of another kind or a path that cannot be written, and ConfigurationError when a
    package is missing or the model has no such graph.
    """
    for framework in ("torch", "onnx", "onnxruntime"):
        if importlib.util.find_spec(framework) is None:
            raise ConfigurationError(f"{framework} is not installed. Expected: pip install 'penstock[torch,onnx]'")
    from workers.runtime.export import export_onnx
    from workers.runtime.open import open_runtime

    package = load_package(Path(version.source))
    runtime: Any = open_runtime(package, version.content_hash)
    if not hasattr(runtime, "exportable"):
        raise InvalidInput(
            f"{version.reference} is of format {package.spec.format}. Expected pytorch, or an encoder of transformers"
        )
    try:
        with tempfile.TemporaryDirectory(prefix=".penstock-", dir=path.absolute().parent) as folder:
            partial = Path(folder) / "model.onnx"
            runtime.load("cpu", 1)
            with _quiet_exporter():
                differences = export_onnx(runtime, partial, is_int8=is_int8)
            exported = Exported(partial.stat().st_size, differences)
            partial.replace(path)
    except OSError as error:
        raise InvalidInput(f"{path.name} cannot be written ({error.strerror}). Expected a file in a folder") from None
    finally:
        runtime.close()
    return exported


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """PyTorch's exporter warns of packages that nobody needs, and of its own deprecated parts."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
