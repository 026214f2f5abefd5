"""A package's folder -> loaded, warmed up and run as a worker would, without a broker.

    read -> hash -> load and warm up -> one job -> its outputs and its latency

Each step is told as it ends. A package that cannot work is a ConfigurationError, as in a worker.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from penstock.compose.terminal import counted
from penstock.registry.errors import ModelError, PenstockError
from penstock.registry.generation_inputs import checked
from penstock.registry.package import Package, load_package
from penstock.registry.package.generation import example_inputs
from penstock.registry.package.signature import TensorSpec, shape_text
from penstock.registry.tensors import Array
from penstock.workers.generation.served import GenerateRuntime
from penstock.workers.runtime.base import Runtime
from penstock.workers.runtime.forms import finite_outputs
from penstock.workers.runtime.open import open_runtime
from penstock.workers.runtime.tracebacks import message_of, name_of

__all__ = ["CheckTarget", "FailedForward", "PackageReport", "check_package", "own_traceback"]

_MOST_FORWARDS: Final = 20
_EXAMPLE_CHUNKS: Final = 32
_MEASURED_S: Final = 0.5
"""No further forward is measured after this time."""


class FailedForward(ModelError):
    """The model raised an exception for the sample; the exception is the cause."""


class CheckTarget(NamedTuple):
    """device, threads: see Runtime.load. runtime_hosts: see the setting."""

    device: str
    threads: int
    runtime_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PackageReport:
    """The findings of one check. chunks: of a model that streams. latency_ms: the median of the measured forwards."""

    reference: str
    content_hash: str
    device: str
    load_s: float
    memory_bytes: int
    outputs: Mapping[str, Array]
    chunks: int
    latency_ms: float
    forwards: int

    def as_data(self) -> dict[str, Any]:
        """The report as plain data."""
        outputs = {
            name: {"dtype": _dtype(values), "shape": list(values.shape)} for name, values in self.outputs.items()
        }
        return {
            "reference": self.reference,
            "content_hash": self.content_hash,
            "device": self.device,
            "load_s": round(self.load_s, 3),
            "memory_bytes": self.memory_bytes,
            "outputs": outputs,
            "chunks": self.chunks,
            "latency_ms": round(self.latency_ms, 3),
            "forwards": self.forwards,
        }


Teller = Callable[[str, str], None]
"""(name of the step, what it found)."""


def check_package(
    folder: Path, target: CheckTarget, sample: Mapping[str, object] | None = None, tell: Teller = lambda _s, _t: None
) -> PackageReport:
    """Loads the package, runs one job, and compares the outputs with the declaration.

    sample: the inputs of the job; None: small valid ones. Raises ConfigurationError for a package that cannot work,
    MissingRequirement when this machine cannot run it, InvalidInput for a sample that does not fit, FailedForward when
    the model fails for the sample, and ModelError for outputs that a job could not get.
    """
    package = load_package(folder)
    tell("model.yaml", f"{package.spec.reference}, format {package.spec.format}")
    if package.steps:
        tell("steps", ", ".join(f"{each.folder.name} ({each.spec.format})" for each in package.steps))
    tell("inputs", _declared(package.spec.inputs))
    tell("outputs", _declared(package.spec.outputs))
    if sample is not None:
        given = sample if package.spec.generate is None else checked(package.spec, sample)
    else:
        given = package.spec.signature.example(1) if package.spec.generate is None else example_inputs()
    inputs = package.spec.signature.check(given)
    tell("files", _files(package))
    with closing(open_runtime(package, runtime_hosts=target.runtime_hosts, generate=GenerateRuntime)) as runtime:
        began = time.monotonic()
        runtime.load(target.device, target.threads)
        load_s = time.monotonic() - began
        size = f", {runtime.memory_bytes / 1e6:,.1f} MB" if runtime.memory_bytes else ""
        warmed = "" if package.spec.streams else "; warmed up, outputs as declared"
        tell("load", f"{load_s:.2f} s on {target.device}{size}{warmed}")
        runtime.check(inputs)
        return _run(runtime, target, inputs, load_s, "example" if sample is None else "sample", tell)


def own_traceback(error: BaseException, folder: Path) -> str:
    """The traceback of the exception behind an error, from the first line of the package on; empty without one."""
    cause = error.__cause__
    if cause is None:
        return ""
    found = traceback.TracebackException.from_exception(cause)
    own = [place for place, frame in enumerate(found.stack) if Path(frame.filename).is_relative_to(folder.absolute())]
    if not own:
        return ""
    found.stack = traceback.StackSummary.from_list(list(found.stack)[own[0] :])
    return "".join(found.format(chain=False))


class _Listener:
    """The context of a streaming job that is checked."""

    job_id = ""
    tenant = ""

    def __init__(self) -> None:
        self.is_cancelled = False

    def progress(self, fraction: float) -> None:
        """Does nothing."""


def _run(
    runtime: Runtime, target: CheckTarget, inputs: dict[str, Array], load_s: float, word: str, tell: Teller
) -> PackageReport:
    tell(word, ", ".join(map(_described, inputs, inputs.values())))
    is_example = word == "example"
    outputs, chunks = _forward(runtime, inputs, is_example=is_example)
    for name in finite_outputs(runtime.spec):
        if name in outputs and not np.isfinite(outputs[name]).all():
            raise ModelError(f"Output {name} contains NaN or infinity. Expected finite numbers, or allow_nan: true")
    streamed = f"{counted(chunks, 'chunk')}, then " if runtime.spec.streams else ""
    tell("run", streamed + (", ".join(map(_described, outputs, outputs.values())) or "no outputs"))
    seconds = _measured(runtime, inputs, is_example=is_example)
    latency_ms = statistics.median(seconds) * 1e3
    tell("latency", f"{latency_ms:.2f} ms, median of {len(seconds)} forwards")
    return PackageReport(
        runtime.spec.reference,
        runtime.content_hash,
        target.device,
        load_s,
        runtime.memory_bytes,
        outputs,
        chunks,
        latency_ms,
        len(seconds),
    )


def _forward(runtime: Runtime, inputs: dict[str, Array], *, is_example: bool) -> tuple[dict[str, Array], int]:
    """(outputs, number of chunks).

    With the example, a stream is cancelled after some chunks: some models stream until their job is cancelled. One
    that goes on for as many again is closed, and has no outputs.
    """
    chunks, context = 0, _Listener()
    stream = runtime.stream(inputs, context)
    try:
        while not is_example or chunks < 2 * _EXAMPLE_CHUNKS:
            try:
                next(stream)
            except StopIteration as end:
                return end.value, chunks
            chunks += 1
            context.is_cancelled = is_example and chunks >= _EXAMPLE_CHUNKS
        stream.close()
        return {}, chunks
    except (PenstockError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise FailedForward(
            f"{runtime.spec.reference}: the model failed ({name_of(error)}: {message_of(error)}), expected outputs"
        ) from error


def _measured(runtime: Runtime, inputs: dict[str, Array], *, is_example: bool) -> list[float]:
    """The seconds of some forwards."""
    seconds: list[float] = []
    end = time.monotonic() + _MEASURED_S
    while not seconds or (len(seconds) < _MOST_FORWARDS and time.monotonic() < end):
        began = time.monotonic()
        _forward(runtime, inputs, is_example=is_example)
        seconds.append(time.monotonic() - began)
    return seconds


def _files(package: Package) -> str:
    manifest = package.manifest()
    count = len(manifest.files) + len(manifest.source_files)
    return f"{counted(count, 'file')}, {manifest.nbytes:,} bytes, content hash {manifest.content_hash[:12]}"


def _declared(tensors: Sequence[TensorSpec]) -> str:
    return (
        ", ".join(
            f"{one.name} {one.dtype} {shape_text(one.shape)}{' optional' if one.optional else ''}" for one in tensors
        )
        or "none"
    )


def _described(name: str, values: Array) -> str:
    return f"{name} {_dtype(values)} {values.shape}"


def _dtype(values: Array) -> str:
    return "string" if values.dtype.kind == "O" else str(values.dtype)
