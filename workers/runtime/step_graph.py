"""Packages of format `pipeline`: several packages run one after another in this process, on one micro-batch.

    rows of all jobs -> step 1: check, prepare, run -> named tensors -> step 2 ... -> the declared outputs

Each step has its own runtime, which runs the model as its author built it. Tensors between steps are arrays on the
host. Every error of a step names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

from penstock.registry.errors import (
    ConfigurationError,
    InvalidInput,
    JobFailed,
    ModelError,
    ModelNotReady,
    NonFiniteOutput,
    OutOfMemory,
)
from penstock.registry.package import Package
from penstock.registry.package.conversion import cast
from penstock.registry.package.manifest import Manifest
from penstock.registry.package.steps import Step
from penstock.registry.tensors import DTYPES, Array
from penstock.workers.runtime.base import Counted, DeviceLost, Prepared, Runtime, concatenate
from penstock.workers.runtime.forms import finite_outputs
from penstock.workers.runtime.loading import LoadOptions, PackageRuntime
from penstock.workers.runtime.tracebacks import message_of, name_of

__all__ = ["OpenStep", "StepGraphRuntime"]

OpenStep = Callable[[Package, LoadOptions], Runtime]
"""Opens one copy of a step's package, not yet loaded."""
_MESSAGE_CHARACTERS: Final = 500


class StepGraphRuntime(PackageRuntime):
    """Runs the steps of a pipeline, in their order, for a whole batch."""

    def __init__(self, package: Package, options: LoadOptions, open_step: OpenStep) -> None:
        super().__init__(package, options)
        own = LoadOptions("", self.precision, min(1, options.warmup_requests))
        steps = package.spec.steps or ()
        packages = {step.package: each for step, each in zip(steps, package.steps, strict=True)}
        self._runtimes: Final = {path: open_step(each, own) for path, each in packages.items()}
        inputs = {spec.name for spec in package.spec.inputs}
        self._steps: Final = [_BoundStep(step, self._runtimes[step.package], inputs) for step in steps]
        self._is_built = False

    @property
    def call_count(self) -> int:
        """Calls of the models of all steps."""
        counts = (step.counts() for step in self._runtimes.values() if isinstance(step, Counted))
        return sum(count.get("model_calls", 0) for count in counts)

    def check(self, inputs: Mapping[str, Array]) -> None:
        """Raises InvalidInput for a text with too many tokens for a step that takes it."""
        for step in self._steps:
            step.check(inputs)

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        """Concatenates the rows of jobs; each step prepares its own inputs."""
        if not self._is_built:
            raise self._not_loaded()
        inputs = concatenate(jobs)
        return Prepared(self.spec.signature.rows(inputs), inputs)

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """One forward of each step."""
        if not self._is_built:
            raise self._not_loaded()
        tensors: dict[str, Array] = dict(prepared.payload)
        for step in self._steps:
            tensors |= step.run(tensors)
        outputs = {}
        for spec in self.spec.outputs:
            outputs[spec.name] = _as_declared(f"Output {spec.name}", tensors[spec.name], spec.dtype)
        self.spec.signature.check_outputs(outputs, prepared.rows)
        return outputs

    def _build(self, manifest: Manifest, device: str, threads: int) -> int:
        for path, runtime in self._runtimes.items():
            self._check_open()
            try:
                runtime.load(device, threads)
            except ConfigurationError as error:
                # The class says whether the package is wrong or this machine lacks something.
                raise type(error)(f"{self.spec.reference}: step {path}: {error}") from error.__cause__
        self._is_built = True
        # A pipeline may declare more than its runtimes can measure.
        return max((self.spec.memory_mb or 0) << 20, sum(one.memory_bytes for one in self._runtimes.values()))

    def _release(self) -> None:
        self._is_built = False
        for runtime in self._runtimes.values():
            runtime.close()


class _BoundStep:
    """One step with its runtime. inputs: the names of the pipeline's inputs."""

    def __init__(self, step: Step, runtime: Runtime, inputs: set[str]) -> None:
        self._step: Final = step
        self._runtime: Final = runtime
        self._dtypes: Final = {spec.name: spec.dtype for spec in runtime.spec.inputs}
        self._finite: Final = [name for name in finite_outputs(runtime.spec) if name in step.outputs]
        self._is_fed_by_jobs: Final = inputs.issuperset(step.inputs.values())

    def check(self, inputs: Mapping[str, Array]) -> None:
        """See Runtime.check. A step that takes outputs of another one checks them when it runs."""
        if self._is_fed_by_jobs:
            try:
                self._runtime.check(self._inputs(inputs))
            except (InvalidInput, ModelError) as error:
                raise InvalidInput(f"step {self._step.package}: {error}") from None

    def run(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of one forward under their names in the pipeline."""
        with _naming(self._step.package):
            inputs = self._runtime.spec.signature.check(self._inputs(tensors))
            if not self._is_fed_by_jobs:
                self._runtime.check(inputs)
            outputs = self._runtime.run(self._runtime.prepare([inputs]))
            for name in self._finite:
                if not np.isfinite(outputs[name]).all():
                    raise NonFiniteOutput(f"Output {name} contains NaN or infinity. Expected finite numbers")
        return {name: outputs[own] for own, name in self._step.outputs.items()}

    def _inputs(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """The inputs of the step, in its dtypes. Optional ones are absent where the job omits them."""
        return {
            own: _as_declared(f"Input {own}", tensors[name], self._dtypes[own])
            for own, name in self._step.inputs.items()
            if name in tensors
        }


def _as_declared(what: str, array: Array, dtype: str) -> Array:
    """The array in a dtype. Raises ModelError when a value does not fit it."""
    wanted = DTYPES[dtype]
    if array.dtype == wanted:
        return array
    changed = cast(array, wanted)
    if changed is None:
        raise ModelError(
            f"{what}: dtype {array.dtype}, and a value does not fit. Expected numbers that {dtype} can hold"
        )
    return changed


@contextmanager
def _naming(step: str) -> Iterator[None]:
    """Names a step in the error that its model raises. Those of the device keep their meaning."""
    place = f"step {step}"
    try:
        yield
    except (DeviceLost, ModelNotReady):
        raise
    except MemoryError as error:
        raise OutOfMemory(f"{place}: {message_of(error, _MESSAGE_CHARACTERS)}") from error
    except JobFailed as error:
        raise type(error)(f"{place}: {error}") from error
    except InvalidInput as error:
        raise ModelError(f"{place}: {error}") from error
    except (Exception, SystemExit) as error:  # a model may raise anything
        text = message_of(error, _MESSAGE_CHARACTERS)
        raise ModelError(f"{place}: {name_of(error)}: {text}") from error
