"""A package -> an ONNX file: the child process that exports, and the export that an operator requests.

workers/runtime/export.py -- request --> this module as a process -- graph and report --> files
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from penstock.registry.errors import ConfigurationError, InvalidInput
from penstock.registry.package import Package, load_package
from penstock.workers import children
from penstock.workers.runtime.export import export_in_child, export_onnx, report_beside
from penstock.workers.runtime.loading import LoadOptions
from penstock.workers.runtime.open import open_copy

__all__ = ["export_package", "main"]

_NICENESS: Final = 5
"""Forwards of the worker come first."""


def export_package(package: Package, content_hash: str, file: Path, *, is_int8: bool = False) -> dict[str, float]:
    """Writes a package's model to `file`, in a child process: the whole graph after its outputs matched, or nothing.

    Returns, by output, the largest difference between the graph and the model. Raises InvalidInput for a model of
    another kind or a file that cannot be written, ConfigurationError for other content than `content_hash`, and the
    errors of `export_onnx`.
    """
    for framework in ("torch", "onnx", "onnxruntime"):
        if importlib.util.find_spec(framework) is None:
            raise ConfigurationError(f"{framework} is not installed. Expected: pip install '.[torch,onnx]'")
    reference = package.spec.reference
    if not hasattr(open_copy(package, LoadOptions(content_hash)), "exportable"):
        raise InvalidInput(
            f"{reference} is of format {package.spec.format}. Expected pytorch, or an encoder of transformers"
        )
    try:
        with tempfile.TemporaryDirectory(prefix=".penstock-", dir=file.absolute().parent) as folder:
            partial = Path(folder) / "model.onnx"
            request = {
                "package": str(package.folder.absolute()),
                "content_hash": content_hash,
                "precision": "auto",
                "file": str(partial),
                "is_int8": is_int8,
            }
            differences = export_in_child(request, reference)
            partial.replace(file)
    except OSError as error:
        raise InvalidInput(f"{file.name} cannot be written ({error.strerror}). Expected a file in a folder") from None
    return differences


def main() -> None:
    """The child: reads a request from the first line of its input, and writes the graph and a report beside it."""
    request = json.loads(sys.stdin.readline())
    file = Path(request["file"])
    # The parent keeps the pipe open while it waits for the graph.
    children.start_guard(sys.stdin.fileno(), file.parent)
    os.nice(_NICENESS)
    try:
        package = load_package(Path(request["package"]))
        runtime: Any = open_copy(package, LoadOptions(request["content_hash"], request["precision"]))
        runtime.load("cpu", 1)
        report: dict[str, object] = {"differences": export_onnx(runtime, file, is_int8=request["is_int8"])}
    except ConfigurationError as error:
        report = {"refused": str(error)}
    report_beside(file).write_text(json.dumps(report))
    # The process does not wait for threads of the package's own code.
    os._exit(0)


if __name__ == "__main__":
    main()
