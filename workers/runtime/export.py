"""A loaded torch model -> an ONNX graph that was checked against it, in fp32 or int8.

    runtime.exportable() -> export_onnx -> graph, checked, its answers compared with the model's -> a file
    a worker             -> open_exported: the same in a child process -> a session of ONNX Runtime
    an operator          -> exporter.py: the same -> a file to keep

A child process, because torch.export replaces methods of torch.nn.Module for every thread while it traces: forwards
that run meanwhile fail. The child loads the package anew, so what it exports is what its content hash names.

An output of the graph is called `<name>_out`: with the declared name alone, an output `embedding` would clash with the
operation of that name in the traced graph, and the file would be invalid.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import Package
from penstock.registry.package.spec_sections import Precision
from penstock.registry.tensors import Array

if TYPE_CHECKING:
    import torch

    from penstock.workers.compilation import Compilable

__all__ = ["Exportable", "ExportableRuntime", "Graph", "export_in_child", "export_onnx", "open_exported", "told_beside"]

Graph: TypeAlias = Callable[[Mapping[str, Array]], list[Array]]
"""Inputs by name -> outputs in declared order."""

_OPSET: Final = 18
_TIMEOUT_S: Final = 300.0
_TOLERANCE: Final = 1e-3
"""An exported fp32 graph that differs by more computes something else; how little it must differ is the gate's."""
_SECRETS: Final = "PENSTOCK_"
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

    def compilable(self, form: str) -> Compilable:
        """Whose examples span the shapes that are served; see CompilableRuntime."""


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

        from penstock.workers.compilation.target import Shapes
        from penstock.workers.compilation.tracing import trace
        from penstock.workers.runtime.declared import Declared

        # A graph has no guards: a model that takes another path for some shapes would answer those wrongly.
        served = runtime.compilable("compiled")
        trace(served, Shapes.of(served.examples))
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
        raise ConfigurationError(f"{error.name} is not installed. Expected: pip install '.[onnx]'") from None
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
        export_in_child(request, reference)
        return _open_graph(file, threads)


def export_in_child(request: Mapping[str, object], reference: str) -> dict[str, float]:
    """By output, how far the graph is off. Raises ConfigurationError when there is no graph afterwards."""
    status = _run_child(request)
    told_file = told_beside(Path(str(request["file"])))
    if status != 0 or not told_file.is_file():
        ended = "took too long" if status is None else f"ended with status {status}"
        raise ConfigurationError(f"{reference}: the exporter's process {ended}")
    told = json.loads(told_file.read_bytes())
    if "refused" in told:
        raise ConfigurationError(told["refused"])
    differences: dict[str, float] = told["differences"]
    return differences


def told_beside(file: Path) -> Path:
    """Where the child writes how it went."""
    return file.with_suffix(".json")


def _run_child(request: Mapping[str, object]) -> int | None:
    """The child's exit status; None when the time was over. Nothing of it runs afterwards."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_SECRETS)}
    with subprocess.Popen(
        [sys.executable, "-m", "penstock.workers.runtime.exporter"],
        stdin=subprocess.PIPE,
        # What a package's code prints has no end that anybody knows.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
    ) as child:
        try:
            _tell(child, json.dumps(request).encode() + b"\n")
            return child.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child.returncode is None:
                # A group of its own, so that whatever it started ends with it.
                os.killpg(child.pid, signal.SIGKILL)


def _tell(child: subprocess.Popen[bytes], request: bytes) -> None:
    """Writes the request; the child's input stays open."""
    if child.stdin is None:
        raise ValueError("the child has no pipe")
    # It may have ended already; its status says how.
    with suppress(BrokenPipeError):
        child.stdin.write(request)
        child.stdin.flush()


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
        raise ConfigurationError("onnxruntime is not installed. Expected: pip install '.[onnx]'") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _QUIET
    # Threads that spin for work take the cores from the worker's other threads.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, dict(inputs))
