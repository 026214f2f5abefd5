"""A loaded torch model -> an ONNX graph in fp32 or int8, compared with the model.

    runtime.exportable() -> export_onnx -> graph, checked, its outputs compared with the model's -> a file
    a worker             -> open_exported: the same in a child process -> a session of ONNX Runtime
    an operator          -> exporter.py: the same -> a file to keep

The export runs in a child process, because torch.export replaces methods of torch.nn.Module for every thread while it
traces: forwards that run meanwhile fail. The child loads the package again, so it exports the content that the content
hash names.

An output of the graph is called `<name>_out`. With the declared name alone, an output `embedding` would have the name
of an operation in the traced graph, and the file would be invalid.
"""

from __future__ import annotations

import importlib.util
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
from penstock.workers import children
from penstock.workers.runtime.compilable import Compilable, Shapes
from penstock.workers.runtime.cpu import saturates_int8
from penstock.workers.runtime.tracing import trace

if TYPE_CHECKING:
    import torch

__all__ = [
    "Exportable",
    "ExportableRuntime",
    "Graph",
    "can_export",
    "export_in_child",
    "export_onnx",
    "open_exported",
    "report_beside",
]

Graph: TypeAlias = Callable[[Mapping[str, Array]], list[Array]]
"""Inputs by name -> outputs in declared order."""

_PACKAGES: Final = ("onnx", "onnxscript", "onnxruntime")
_OPSET: Final = 18
_TIMEOUT_S: Final = 300.0
_TOLERANCE: Final = 1e-3
"""An fp32 graph whose outputs differ by more computes something else. The gate has its own, narrower tolerance."""
_SECRETS: Final = "PENSTOCK_"
_QUIET: Final = 3
"""The severity of ONNX Runtime from which on it logs: errors only."""


@dataclass(frozen=True, slots=True)
class Exportable:
    """A module with inputs to trace it with.

    module: called with positional tensors on the CPU; returns a tensor, a sequence of them in the order of `outputs`,
    or a mapping by their names.
    examples: two calls, of which the first is traced. Dimensions in which they differ are dynamic. No tensor is passed
    twice, because the tracer would take it for one input.
    """

    module: torch.nn.Module
    examples: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class ExportableRuntime(Protocol):
    """A loaded runtime whose model can be exported."""

    @property
    def package(self) -> Package:
        """The package that was loaded."""

    @property
    def content_hash(self) -> str:
        """The hash of the files that were loaded."""

    @property
    def precision(self) -> Precision:
        """The number format that was asked for."""

    def exportable(self) -> Exportable:
        """The module and its examples. Raises ConfigurationError where the model has no graph of fixed inputs."""

    def compilable(self, form: str) -> Compilable:
        """See CompilableRuntime. Its examples span the shapes that are served."""


def can_export() -> bool:
    """Whether the packages are installed that export a model and run the graph."""
    return all(importlib.util.find_spec(package) is not None for package in _PACKAGES)


def export_onnx(runtime: ExportableRuntime, file: Path, *, is_int8: bool = False) -> dict[str, float]:
    """Writes the model as an ONNX graph with dynamic batch and sequence axes. Not for a process that serves.

    Returns, by output, the largest difference between the graph and the model. is_int8: ONNX Runtime quantises the
    matrices dynamically. Raises ConfigurationError when the model cannot be exported, when the graph is invalid, or
    when an fp32 graph gives other outputs than the model.
    """
    reference = runtime.package.spec.reference
    exportable = runtime.exportable()
    try:
        return _exported(runtime, exportable, file, is_int8=is_int8)
    except ImportError as error:
        raise ConfigurationError(f"{error.name} is not installed. Expected: pip install '.[onnx]'") from None
    except ConfigurationError:
        raise
    except Exception as error:  # the exporter and the checker raise exceptions of their own and of other libraries
        # torch colours its errors, and keeps the plain text in the cause.
        first_line = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"{reference}: cannot be exported to ONNX ({type(error).__name__}: {first_line:.160})"
        ) from error


def _exported(runtime: ExportableRuntime, exportable: Exportable, file: Path, *, is_int8: bool) -> dict[str, float]:
    """See export_onnx; raises the errors of the exporter and the checker."""
    import onnx

    from penstock.workers.runtime.declared import Declared

    # A graph has no guards: a model that takes another path for some shapes would give wrong outputs for those.
    served = runtime.compilable("compiled")
    trace(served, Shapes.of(served.examples))
    module = Declared(exportable.module, exportable.outputs).eval()
    _write_graph(module, exportable, file)
    onnx.checker.check_model(str(file), full_check=True)
    differences = _differences(module, exportable, file)
    if wrong := [name for name, difference in differences.items() if not difference <= _TOLERANCE]:
        raise ConfigurationError(
            f"{runtime.package.spec.reference}: the exported graph gives another {wrong[0]}, expected the model's"
        )
    if is_int8:
        _quantise(file)
        return _differences(module, exportable, file)
    return differences


def _write_graph(module: torch.nn.Module, exportable: Exportable, file: Path) -> None:
    import torch

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


def open_exported(runtime: ExportableRuntime, threads: int, *, is_int8: bool, timeout_s: float = _TIMEOUT_S) -> Graph:
    """The model as a session of ONNX Runtime on the CPU. The export takes some 20 s of a core, in a child process.

    Raises ConfigurationError as `export_onnx` does, or when the child takes longer than `timeout_s`.
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
        export_in_child(request, reference, timeout_s)
        return _open_graph(file, threads)


def export_in_child(request: Mapping[str, object], reference: str, timeout_s: float = _TIMEOUT_S) -> dict[str, float]:
    """By output, the largest difference. Raises ConfigurationError when there is no graph afterwards."""
    status = _run_child(request, timeout_s)
    report_file = report_beside(Path(str(request["file"])))
    if status != 0 or not report_file.is_file():
        ended = "took too long" if status is None else f"ended with status {status}"
        raise ConfigurationError(f"{reference}: the exporter's process {ended}")
    report = json.loads(report_file.read_bytes())
    if "refused" in report:
        raise ConfigurationError(report["refused"])
    differences: dict[str, float] = report["differences"]
    return differences


def report_beside(file: Path) -> Path:
    """The file, beside the graph, in which the child reports the differences or its refusal."""
    return file.with_suffix(".json")


def _run_child(request: Mapping[str, object], timeout_s: float) -> int | None:
    """The child's exit status; None after the time-out. Neither the child nor its own children run afterwards."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_SECRETS)}
    with subprocess.Popen(
        [sys.executable, "-m", "penstock.workers.runtime.exporter"],
        stdin=subprocess.PIPE,
        # The output of a package's code has no bound.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
    ) as child:
        if child.stdin is not None:
            children.own(child.stdin.fileno())
        try:
            _send(child, json.dumps(request).encode() + b"\n")
            return child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child.returncode is None:
                # The child has a process group of its own, so the processes that it started end with it.
                os.killpg(child.pid, signal.SIGKILL)


def _send(child: subprocess.Popen[bytes], request: bytes) -> None:
    """Writes the request; the child's input stays open."""
    if child.stdin is None:
        raise ValueError("the child has no pipe")
    # The child may have ended already. Its exit status says why.
    with suppress(BrokenPipeError):
        child.stdin.write(request)
        child.stdin.flush()


def _dynamic_shapes(exportable: Exportable) -> tuple[tuple[dict[int, Any], ...]]:
    """For the one variadic argument of Declared."""
    from torch.export import Dim

    pairs = zip(*exportable.examples, strict=True)
    shapes = (
        {axis: Dim.DYNAMIC for axis, extent in enumerate(first.shape) if extent != other.shape[axis]}
        for first, other in pairs
    )
    return (tuple(shapes),)


def _differences(module: torch.nn.Module, exportable: Exportable, file: Path) -> dict[str, float]:
    """By output, the largest difference for the example that was not traced; relative where numbers exceed 1."""
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
    """Replaces an fp32 graph by one whose matrices are int8; their values have 7 bits on a CPU that saturates."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(str(file))
    # The quantiser transposes weights and would then find the recorded shapes of them wrong.
    del model.graph.value_info[:]
    quantised = file.with_suffix(".int8")
    quantize_dynamic(model, str(quantised), weight_type=QuantType.QInt8, reduce_range=saturates_int8())
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
    # Threads that spin while they wait take the cores from the worker's other threads.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, dict(inputs))
