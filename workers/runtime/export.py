"""A loaded torch model -> an ONNX graph that was checked against it, in fp32 or int8.

    runtime.exportable() -> export_onnx -> graph, checked, its answers compared with the model's -> a file
    a worker             -> open_exported: the same in a child process -> a session of ONNX Runtime

A child process, because torch.export replaces methods of torch.nn.Module for every thread while it traces: forwards
that run meanwhile fail. The child loads the package anew, so what it exports is what its content hash names.

An output of the graph is called `<name>_out`: with the declared name alone, an output `embedding` would clash with the
operation of that name in the traced graph, and the file would be invalid.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np

from registry.errors import ConfigurationError
from registry.package import Package, load_package
from registry.sections import Precision
from registry.tensors import Array

if TYPE_CHECKING:
    import torch

__all__ = ["Exportable", "ExportableRuntime", "Graph", "export_onnx", "main", "open_exported"]

Graph: TypeAlias = Callable[[Mapping[str, Array]], list[Array]]
"""Inputs by name -> outputs in declared order."""

_OPSET: Final = 18
_TIMEOUT_S: Final = 300.0
_TOLERANCE: Final = 1e-3
"""An exported fp32 graph that differs by more computes something else; how little it must differ is the gate's."""
_QUIET: Final = 3
"""Errors only, of ONNX Runtime's severities."""


@dataclass(frozen=True, slots=True)
class Exportable:
    """A module with inputs to trace it with.

    module: called with positional tensors on the CPU; returns a tensor, a sequence of them in the order of `outputs`,
    or a mapping by their names.
    examples: two calls, of which the first is traced; dimensions in which they differ are dynamic. No tensor is passed
    twice: it would be traced as one input.
    """

    module: torch.nn.Module
    examples: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class ExportableRuntime(Protocol):
    """A loaded runtime whose model can be exported."""

    @property
    def package(self) -> Package:
        """What was loaded."""

    @property
    def content_hash(self) -> str:
        """The hash of the files that were loaded."""

    @property
    def precision(self) -> Precision:
        """The number format that was asked for."""

    def exportable(self) -> Exportable:
        """What is exported. Raises ConfigurationError where the model has no graph of fixed inputs."""


def export_onnx(runtime: ExportableRuntime, file: Path, *, is_int8: bool = False) -> dict[str, float]:
    """Writes the model as an ONNX graph with dynamic batch and sequence axes. Not for a process that serves.

    Returns, by output, the largest difference between the graph and the model. is_int8: matrices are quantised by ONNX
    Runtime, dynamically. Raises ConfigurationError when the model cannot be exported, or the graph is invalid or, in
    fp32, answers something else.
    """
    import torch

    reference = runtime.package.spec.reference
    exportable = runtime.exportable()
    try:
        import onnx

        from workers.runtime.declared import Declared

        module = Declared(exportable.module, exportable.outputs).eval()
        with torch.inference_mode():
            torch.onnx.export(
                module,
                exportable.examples[0],
                str(file),
                input_names=list(exportable.inputs),
                output_names=[f"{name}_out" for name in exportable.outputs],
                dynamic_shapes=_dynamic_shapes(exportable),
                opset_version=_OPSET,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        onnx.checker.check_model(str(file), full_check=True)
        differences = _differences(module, exportable, file)
        if wrong := [name for name, difference in differences.items() if not difference <= _TOLERANCE]:
            raise ConfigurationError(
                f"{reference}: the exported graph answers another {wrong[0]}, expected the model's"
            )
        if is_int8:
            _quantise(file)
            return _differences(module, exportable, file)
        return differences
    except ImportError as error:
        raise ConfigurationError(f"{error.name} is not installed. Expected: pip install 'penstock[onnx]'") from None
    except ConfigurationError:
        raise
    except Exception as error:  # the exporter and the checker raise classes of their own, or of anybody
        # torch colours its errors, and puts the cause into the exception before.
        first_line = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"{reference}: cannot be exported to ONNX ({type(error).__name__}: {first_line:.160})"
        ) from error


def open_exported(runtime: ExportableRuntime, threads: int, *, is_int8: bool) -> Graph:
    """The model as a session of ONNX Runtime on the CPU; takes some 20 s of a core, in a child process.

    Raises ConfigurationError as `export_onnx` does, or when the child takes too long.
    """
    reference = runtime.package.spec.reference
    with tempfile.TemporaryDirectory(prefix="penstock-onnx-") as folder:
        file = Path(folder) / "model.onnx"
        request = {
            "package": str(runtime.package.folder),
            "content_hash": runtime.content_hash,
            "precision": runtime.precision,
            "file": str(file),
            "is_int8": is_int8,
        }
        refusal = _run_child(request)
        if refusal or not file.is_file():
            raise ConfigurationError(refusal or f"{reference}: the exporter's process ended without a graph")
        return _open_graph(file, threads)


def main() -> None:
    """The child: reads a request from its first line of input, and writes why it was refused, if it was."""
    request = json.loads(sys.stdin.readline())
    # The pipe stays open for as long as anybody wants the answer.
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    from workers.runtime.open import open_runtime

    try:
        package = load_package(Path(request["package"]))
        runtime: Any = open_runtime(package, request["content_hash"], precision=request["precision"])
        runtime.load("cpu", 1)
        export_onnx(runtime, Path(request["file"]), is_int8=request["is_int8"])
    except ConfigurationError as error:
        sys.stderr.write(f"\n{error}")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _run_child(request: Mapping[str, object]) -> str:
    """Why there is no graph; empty when there is one."""
    command = [sys.executable, "-m", "workers.runtime.export"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    ) as child:
        timer = threading.Timer(_TIMEOUT_S, child.kill)
        timer.start()
        try:
            told = _tell_and_listen(child, json.dumps(request).encode() + b"\n")
        finally:
            timer.cancel()
            child.kill()
        status = child.wait()
    lines = told.decode(errors="replace").strip().splitlines()
    return "" if status == 0 else (lines[-1][:400] if lines and status == 1 else f"The exporter ended with {status}")


def _tell_and_listen(child: subprocess.Popen[bytes], request: bytes) -> bytes:
    """What the child wrote to stderr until it ended; its input stays open so long."""
    stdin, stderr = child.stdin, child.stderr
    if stdin is None or stderr is None:
        raise ValueError("the child has no pipes")
    # It may have ended already; its status says how.
    with suppress(BrokenPipeError):
        stdin.write(request)
        stdin.flush()
    return stderr.read()


def _end_with_the_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def _dynamic_shapes(exportable: Exportable) -> tuple[tuple[dict[int, Any], ...]]:
    """Of the one variadic argument that Declared has."""
    from torch.export import Dim

    pairs = zip(*exportable.examples, strict=True)
    shapes = (
        {axis: Dim.DYNAMIC for axis, extent in enumerate(first.shape) if extent != other.shape[axis]}
        for first, other in pairs
    )
    return (tuple(shapes),)


def _differences(module: torch.nn.Module, exportable: Exportable, file: Path) -> dict[str, float]:
    """By output, the largest difference on the example that was not traced; relative where numbers exceed 1."""
    import torch

    example = exportable.examples[1]
    with torch.inference_mode():
        expected = module(*example)
    inputs = dict(zip(exportable.inputs, (tensor.numpy() for tensor in example), strict=True))
    differences = {}
    for name, ours, tensor in zip(exportable.outputs, _open_graph(file, 1)(inputs), expected, strict=True):
        theirs = tensor.double().numpy()
        differences[name] = float((np.abs(ours - theirs) / np.maximum(1, np.abs(theirs))).max(initial=0.0))
    return differences


def _quantise(file: Path) -> None:
    """Replaces an fp32 graph by one whose matrices are int8."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(str(file))
    # The quantiser transposes weights and then finds the shapes noted for them to be wrong.
    del model.graph.value_info[:]
    quantised = file.with_suffix(".int8")
    quantize_dynamic(model, str(quantised), weight_type=QuantType.QInt8)
    quantised.replace(file)


def _open_graph(file: Path, threads: int) -> Graph:
    try:
        import onnxruntime
    except ImportError:
        raise ConfigurationError("onnxruntime is not installed. Expected: pip install 'penstock[onnx]'") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _QUIET
    # Threads that spin for work take the cores from the worker's other threads.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, dict(inputs))


if __name__ == "__main__":
    main()
