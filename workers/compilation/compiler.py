"""A loaded runtime -> its compiled form, or one line that says why there is none.

    shapes of the examples -> stored artefact? -> no: build, in a child process -> bind to the serving weights
        -> examples run, their outputs compared with the module's -> memory -> store -> CompiledForward

A new form is compared on every example. A stored form was compared before, so the smallest example is enough.

Backends: `inductor` generates code for the CPU or the GPU. `cudagraphs` replays that code as CUDA graphs, and is
refused on a CPU. `auto` is `inductor` on both.

The build runs in a child process, because tracing is not safe in a process that serves: torch.export and AOTAutograd
replace methods of torch.nn.Module for every thread. Forwards of other threads failed with "module is not installed as a
submodule" (torch 2.13, 3 of 9,030 forwards; an export of the serving module put placeholders in place of its weights).
So the worker never runs dynamo, keeps the interpreter's lock for its forwards, and survives a crash of the compiler.

Measured with MiniLM on one CPU thread of a busy machine: 18 to 43 s until the form is ready, 0.02 to 1 s from a stored
artefact of 2 MB. The warm start of torch.compile's own caches took 14.8 s for five shapes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.registry.package import ModelSpec
from penstock.registry.settings_sections import CompilationConfig
from penstock.workers.compilation.aot_library import AotLibrary, state_of
from penstock.workers.compilation.artifacts import ArtifactStore
from penstock.workers.compilation.build_process import FINDINGS, BuildProcess
from penstock.workers.compilation.cuda_graphs import GraphReplays
from penstock.workers.compilation.forward import Backend, CompilationReport, CompiledForward
from penstock.workers.compilation.safety_monitor import TorchCompileSafetyMonitor
from penstock.workers.runtime.compilable import Compilable, CompilableRuntime, CompilationRefused, Shapes
from penstock.workers.runtime.torch_device import sharing_weights

if TYPE_CHECKING:
    import torch

__all__ = ["TorchCompiler"]

logger = logging.getLogger("penstock.compilation")

_BUILD_TIMEOUT_S: Final = 600.0
_ROUNDING_ERRORS: Final = 4
"""A compiled forward rounds in other places. Its outputs may differ by this many units of the coarsest weight."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_MB: Final = 1e6


class TorchCompiler:
    """Compiles on the caller's thread, one model at a time. The serving module stays unchanged."""

    def __init__(
        self,
        config: CompilationConfig,
        key_file: Path,
        monitor: TorchCompileSafetyMonitor | None = None,
        build_timeout_s: float = _BUILD_TIMEOUT_S,
    ) -> None:
        """Imports no torch. Raises ConfigurationError for a cache folder or a key file that cannot be used."""
        self._config = config
        self._monitor = monitor or TorchCompileSafetyMonitor()
        self._store = ArtifactStore(config.cache_dir, key_file) if config.enabled else None
        self._builds = BuildProcess(build_timeout_s)
        self._turn = threading.Lock()

    @property
    def refused_artifacts(self) -> int:
        """Stored artefacts that were changed on disk and so were not used."""
        return self._store.refused if self._store else 0

    def compile(self, runtime: CompilableRuntime, form: str) -> CompiledForward:
        """The form's module, compiled for all shapes that its examples span; may take a minute.

        Raises CompilationRefused.
        """
        if self._store is None:
            raise CompilationRefused("compilation.enabled is false")
        with self._turn:
            job = _Job.of(self._config, runtime, form)
            with self._store.alone(job.name, lambda: self._builds.is_stopped):
                return self._stored(self._store, job) or self._built(self._store, job)

    def _stored(self, store: ArtifactStore, job: _Job) -> CompiledForward | None:
        """The form from a stored artefact; None where there is none that works."""
        parts = store.load(job.name)
        if parts is None:
            return None
        try:
            return self._checked(job, parts, was_warm=True)
        except CompilationRefused as refusal:
            # This machine sealed it, and it no longer works, for example after a change of drivers.
            logger.warning("a stored compiled model is dropped", extra={"reason": str(refusal)})
            store.discard(job.name)
            return None

    def _built(self, store: ArtifactStore, job: _Job) -> CompiledForward:
        request = {**job.request, "max_graph_breaks": self._monitor.max_graph_breaks}
        parts = self._builds.run(request, threads=job.threads)
        compiled = self._checked(job, parts, was_warm=False)
        store.store(job.name, parts)
        return compiled

    def stop(self) -> None:
        """Ends the compilation under way. It is refused, and so is every later one without a stored artefact."""
        self._builds.stop()

    def _checked(self, job: _Job, parts: Mapping[str, bytes], *, was_warm: bool) -> CompiledForward:
        """The form, after its outputs were compared with the module's."""
        findings = json.loads(parts[FINDINGS])
        # Measured after the build: during its minute the worker may load other models and grow.
        before_mb = _used_mb(job.shapes.device)
        library = job.library(parts)
        self._compare(job, library, was_warm=was_warm)
        health = self._monitor.check_health(before_mb, _used_mb(job.shapes.device))
        if not health:
            raise CompilationRefused("; ".join(health.reasons))
        return CompiledForward(
            job.target.module,
            job.shapes,
            library,
            CompilationReport(
                backend=job.backend,
                graph_breaks=findings["graph_breaks"],
                graphs=findings["graphs"],
                compile_s=time.perf_counter() - job.begun,
                was_warm=was_warm,
                memory_growth_mb=health.growth_mb,
            ),
        )

    def _compare(self, job: _Job, library: Callable[..., Any], *, was_warm: bool) -> None:
        """Warms the form up. Raises CompilationRefused if an output is not finite or differs from the module's."""
        import torch

        tolerance = max(self._config.tolerance, _ROUNDING_ERRORS * _coarsest_unit(job.target.module))
        # The module itself serves on another thread.
        module = sharing_weights(job.target.module)
        with torch.inference_mode():
            for example in job.smallest if was_warm else job.target.examples:
                expected = module(*example)
                try:
                    found = library(*(tensor.contiguous() for tensor in example))
                except RuntimeError as error:
                    raise CompilationRefused(f"The compiled model failed ({error!s:.200})") from error
                validity = self._monitor.check_output_validity(found)
                if not validity and self._monitor.check_output_validity(expected):
                    raise CompilationRefused("; ".join(validity.reasons))
                if not _is_close(found, expected, tolerance):
                    shapes = [list(tensor.shape) for tensor in example]
                    raise CompilationRefused(
                        f"The compiled model gives other outputs than the model for shapes {shapes}"
                    )


@dataclass(frozen=True, slots=True)
class _Job:
    """One compilation: the request, and the state before it."""

    name: str
    """The artefact's name; equal for all compilations that yield the same code."""
    request: Mapping[str, object]
    target: Compilable
    shapes: Shapes
    backend: Backend
    threads: int
    begun: float
    instances: int
    """Calls that may run at the same time."""

    @classmethod
    def of(cls, config: CompilationConfig, runtime: CompilableRuntime, form: str) -> _Job:
        import torch

        begun = time.perf_counter()
        if not runtime.content_hash:
            raise CompilationRefused("The model's files were not hashed. Expected a loaded model")
        target = runtime.compilable(form)
        shapes = Shapes.of(target.examples)
        threads = torch.get_num_threads()
        request = {
            "package": str(runtime.package.folder),
            "content_hash": runtime.content_hash,
            "precision": runtime.precision,
            "form": form,
            "device": str(shapes.device),
            "threads": threads,
        }
        return cls(
            _artifact_name(request, shapes),
            request,
            target,
            shapes,
            _backend(config, shapes.device),
            threads,
            begun,
            _calls_at_a_time(runtime.package.spec),
        )

    @property
    def smallest(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """The one example with the lowest cost."""
        return (min(self.target.examples, key=lambda example: sum(tensor.numel() for tensor in example)),)

    def library(self, parts: Mapping[str, bytes]) -> Callable[..., Any]:
        """The code of an artefact, bound to the module's weights."""
        from safetensors.torch import load

        is_replayed = self.backend == "cudagraphs"
        constants = {name: tensor.to(self.shapes.device) for name, tensor in load(parts["constants"]).items()}
        weights = {**state_of(self.target.module), **constants}
        device = self.shapes.device
        library = AotLibrary(parts["library"], weights, device, instances=self.instances, is_single=is_replayed)
        return GraphReplays(library, device) if is_replayed else library


def _calls_at_a_time(spec: ModelSpec) -> int:
    """One for each of its model threads, and one for the thread that times forms."""
    return 1 + max(spec.policy_for(endpoint).concurrency or 1 for endpoint in ("", *spec.policy.endpoints))


def _backend(config: CompilationConfig, device: torch.device) -> Backend:
    if config.backend == "cudagraphs" and device.type != "cuda":
        raise CompilationRefused(f"compilation.backend: found cudagraphs on {device.type}, expected auto or inductor")
    return "inductor" if config.backend == "auto" else config.backend


def _artifact_name(request: Mapping[str, object], shapes: Shapes) -> str:
    """A hash over everything that the generated code depends on. The package's path is left out."""
    import torch

    depends = {
        **{key: value for key, value in request.items() if key != "package"},
        "shapes": shapes.as_data(),
        "torch": torch.__version__,
        "transformers": _transformers_version(),
        "machine": _machine(shapes.device),
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()


def _transformers_version() -> str:
    """The library's code is compiled too, and no package holds it."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""


def _machine(device: torch.device) -> list[str]:
    """The target of the generated code: the GPU, or the instructions of the CPU."""
    import torch

    described = [platform.machine(), platform.python_version(), torch.backends.cpu.get_cpu_capability()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    described += sorted({line.partition(":")[2].strip() for line in lines if line.startswith(("flags", "Features"))})
    if device.type == "cuda":
        described += [torch.cuda.get_device_name(device), str(torch.cuda.get_device_capability(device))]
    return described


def _used_mb(device: torch.device) -> float:
    """Memory of this process on the host and on the device."""
    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    on_device = 0
    if device.type == "cuda":
        # Memory that torch caches for the next forward is not in use.
        torch.cuda.empty_cache()
        on_device = torch.cuda.memory_reserved(device)
    return (pages * _PAGE_BYTES + on_device) / _MB


def _coarsest_unit(module: torch.nn.Module) -> float:
    """The largest relative rounding error of the module's number formats."""
    import torch

    formats = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    return max((torch.finfo(dtype).eps for dtype in formats), default=torch.finfo(torch.float32).eps)


def _is_close(found: object, expected: object, tolerance: float) -> bool:
    """Whether two outputs have the same structure and, except for rounding, the same numbers."""
    import torch
    from torch.utils import _pytree

    pairs = [_pytree.tree_flatten(output) for output in (found, expected)]
    (values, spec), (wanted, wanted_spec) = pairs
    return spec == wanted_spec and all(
        one.shape == other.shape
        and one.dtype == other.dtype
        and (
            torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance, equal_nan=True)
            if one.is_floating_point()
            else torch.equal(one, other)
        )
        for one, other in zip(values, wanted, strict=True)
    )
