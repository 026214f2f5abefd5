"""Packages of format `onnx`: a graph that ONNX Runtime executes, on the CPU or through its CUDA provider.

The graph's inputs and outputs have the declared names and dtypes. Its numbers have the precision of the export. An
input with a default in the graph may be declared optional.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from penstock.registry.errors import ConfigurationError, MissingRequirement, OutOfMemory, shown
from penstock.registry.package import SPEC_FILE, Package
from penstock.registry.package.manifest import Manifest
from penstock.registry.package.signature import TensorSpec
from penstock.registry.tensors import Array
from penstock.workers.frameworks.adapters import adapt
from penstock.workers.runtime.base import DeviceLost, Prepared, concatenate
from penstock.workers.runtime.loading import LoadOptions, PackageRuntime

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

__all__ = ["OnnxRuntime"]

_ELEMENTS: Final = {"float": "float32", "double": "float64"}
"""ONNX's names of dtypes that differ from ours."""
_QUIET: Final = 3
"""The severity from which on ONNX Runtime logs: errors only, because operators cannot act on its warnings."""
_EXHAUSTED: Final = ("Failed to allocate memory", "out of memory", "bad_alloc", "ALLOC_FAILED")
_CUDA_LOST: Final = ("CUDA failure 700", "CUDA failure 710", "CUDA failure 719", "illegal memory access")


class OnnxRuntime(PackageRuntime):
    """Runs an ONNX graph on NumPy arrays."""

    def __init__(self, package: Package, options: LoadOptions | None = None) -> None:
        super().__init__(package, options)
        self._outputs = [spec.name for spec in package.spec.outputs]
        self.model: InferenceSession | None = None
        """The session; None until loaded."""

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        """Concatenates the rows of jobs."""
        inputs = concatenate(jobs)
        return Prepared(self.spec.signature.rows(inputs), inputs)

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """One run of the session."""
        session = self._called
        with _mapped_errors():
            arrays = dict(zip(self._outputs, session(self._outputs, prepared.payload), strict=True))
        self.spec.signature.check_outputs(arrays, prepared.rows)
        return arrays

    def _build(self, manifest: Manifest, device: str, threads: int) -> int:
        self._refuse_precision("a graph has the precision that it was exported with")
        self.model = self._session(manifest, device, threads)
        self._check_names("input", self.spec.inputs, self.model.get_inputs(), self.model.get_overridable_initializers())
        self._check_names("output", self.spec.outputs, self.model.get_outputs(), [])
        self._adapter = adapt(self.model)
        return self._package_bytes(manifest)

    def _release(self) -> None:
        self.model = self._adapter = None

    def _session(self, manifest: Manifest, device: str, threads: int) -> InferenceSession:
        try:
            import onnxruntime
        except ImportError:
            raise MissingRequirement("onnxruntime is not installed. Expected: pip install '.[onnx]'") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _QUIET
        # Threads that spin while they wait take the cores from the worker's other threads.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        file = self._weights_file()
        providers = self._providers(device, onnxruntime.get_available_providers())
        try:
            with self._private_copy(file, manifest) as graph:
                session = onnxruntime.InferenceSession(graph, options, providers=providers)
        except Exception as error:  # its errors share no other class
            raise ConfigurationError(
                f"{self.spec.reference}: weights: {file.name} cannot be loaded ({type(error).__name__})"
            ) from error
        if device != "cpu" and "CUDAExecutionProvider" not in session.get_providers():
            # ONNX Runtime falls back silently when the provider's libraries cannot be loaded.
            raise MissingRequirement(f"{self.spec.reference}: onnxruntime cannot use {device}, expected a CUDA setup")
        return session

    @contextmanager
    def _private_copy(self, file: Path, manifest: Manifest) -> Iterator[Path]:
        """The graph, copied if weights lie beside it: ONNX Runtime maps these, so a write to them would change outputs.

        The copy is deleted once the session is open; the session keeps its mapping.
        """
        folder = self._package.folder
        files = [path for name in manifest.files if (path := folder / name).is_relative_to(file.parent)]
        beside = [path for path in files if path not in (file, folder / SPEC_FILE)]
        if not beside:
            yield file
            return
        with TemporaryDirectory(prefix="penstock-onnx-") as copies:
            for path in (file, *beside):
                copy = Path(copies) / path.relative_to(file.parent)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copyfile(path, copy)
            yield Path(copies) / file.name

    def _providers(self, device: str, available: Sequence[str]) -> list[object]:
        if device == "cpu":
            return ["CPUExecutionProvider"]
        if "CUDAExecutionProvider" not in available:
            raise MissingRequirement(
                f"{self.spec.reference}: this onnxruntime knows no CUDA. Expected: pip install onnxruntime-gpu"
            )
        _, _, number = device.partition(":")
        # The CPU runs the operators that the CUDA provider has no kernel for.
        return [("CUDAExecutionProvider", {"device_id": int(number or 0)}), "CPUExecutionProvider"]

    def _check_names(
        self, kind: str, declared: Sequence[TensorSpec], found: Sequence[Any], with_default: Sequence[Any]
    ) -> None:
        """Raises ConfigurationError unless the graph has the declared names and dtypes, and no others."""
        required = {one.name: _dtype(one.type) for one in found}
        known = required | {one.name: _dtype(one.type) for one in with_default}
        names = {spec.name for spec in declared}
        if not required.keys() <= names <= known.keys():
            raise ConfigurationError(
                f"{self.spec.reference}: {kind}s: found {_listed(names)}, expected {_listed(known)} as the graph says"
            )
        for spec in declared:
            if spec.dtype != known[spec.name]:
                raise ConfigurationError(
                    f"{self.spec.reference}: {kind} {spec.name}: found {spec.dtype}, expected {known[spec.name]} "
                    "as the graph says"
                )
            if spec.optional and spec.name in required:
                raise ConfigurationError(
                    f"{self.spec.reference}: {kind} {spec.name}: found optional, expected it in every job, "
                    "as the graph gives no default"
                )

    def _package_bytes(self, manifest: Manifest) -> int:
        """The size of the package's files: the graph, and the weights that lie beside it."""
        return sum((self._package.folder / path).stat().st_size for path in manifest.files)


@contextmanager
def _mapped_errors() -> Iterator[None]:
    """Raises OutOfMemory and DeviceLost in place of ONNX Runtime's errors for them."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if any(phrase in text for phrase in _CUDA_LOST):
            raise DeviceLost(f"onnxruntime: {text.splitlines()[0]:.200}") from error
        if isinstance(error, MemoryError) or any(phrase in text for phrase in _EXHAUSTED):
            raise OutOfMemory(f"The batch does not fit the device ({type(error).__name__})") from error
        raise


def _dtype(onnx_type: str) -> str:
    """`tensor(float)` -> float32. Other types stay unchanged, and so differ from every dtype."""
    element = onnx_type.removeprefix("tensor(").removesuffix(")")
    return _ELEMENTS.get(element, element)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(shown, sorted(names))) or "none"
