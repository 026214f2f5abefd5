"""A small model with other forms on a simulated clock, and the traffic that an optimizer observes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.registry.package import ModelSpec
from penstock.registry.package.spec_sections import Precision
from penstock.registry.tensors import Array
from penstock.workers.runtime.base import Prepared, Runtime
from penstock.workers.runtime.compilable import ModelCompiler
from penstock.workers.runtime.forms import Forms, Forward, WithProvenance, finite_outputs, forms_of
from penstock.workers.versions.tuner import AnsweredJob, BatchObservation
from tests.workers.doubles import RowRuntime

__all__ = ["Clock", "Form", "Rotation", "served"]

WIDTH = 4


class Clock:
    """Seconds that pass only while a form of the model runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Form:
    """How a candidate changes the reference's outputs, and the seconds of its forward."""

    change: Callable[[Array], Array]
    cost_s: float = 0.5
    fails: Exception | None = None
    """Raised when it is built."""
    made: Mapping[str, object] | None = None
    """How its builder says that it was made."""


class Rotation(RowRuntime):
    """Gives each row at unit length: an embedding. Its reference takes one second for each batch."""

    def __init__(self, clock: Clock, forms: Mapping[str, Form], *, noise: float = 0.0, **spec: object) -> None:
        self._clock = clock
        self._candidates = dict(forms)
        self._noise = np.random.default_rng(3)
        self._noise_size = noise
        self.calls = 0
        """Forwards of all forms."""
        self.while_building: Callable[[], None] = lambda: None
        tensors = {"dtype": "float32", "shape": ["batch", WIDTH]}
        document = {
            "name": "rotation",
            "version": "1",
            "format": "python",
            "entrypoint": "model:build",
            "inputs": [{"name": "x", **tensors}],
            "outputs": [{"name": "y", **tensors}],
            **spec,
        }
        self.spec = ModelSpec.model_validate(document)
        self.forms = Forms(self._reference, finite_outputs(self.spec))

    content_hash = "ab" * 32
    precision: Precision = "auto"

    def run(self, prepared: Prepared) -> dict[str, Array]:
        return self.forms.run(prepared)

    def candidates(self, compiler: ModelCompiler | None) -> dict[str, Callable[[], Forward]]:
        return {name: lambda name=name: self._built(name) for name in self._candidates}  # type: ignore[misc]

    def _reference(self, prepared: Prepared) -> dict[str, Array]:
        return self._answered(prepared, lambda rows: rows, 1.0)

    def _built(self, name: str) -> Forward:
        form = self._candidates[name]
        self.while_building()
        if form.fails is not None:
            raise form.fails

        def forward(prepared: Prepared) -> dict[str, Array]:
            return self._answered(prepared, form.change, form.cost_s)

        return forward if form.made is None else WithProvenance(forward, form.made, dict)

    def _answered(self, prepared: Prepared, change: Callable[[Array], Array], cost_s: float) -> dict[str, Array]:
        self.calls += 1
        self._clock.now += cost_s
        rows = prepared.payload + self._noise.standard_normal(prepared.payload.shape) * self._noise_size
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return {"y": change(unit).astype(np.float32)}


def answered_of(jobs: Iterable[AnsweredJob]) -> Callable[[Callable[[str], bool]], list[AnsweredJob]]:
    """What an observation has of these jobs."""
    return lambda is_wanted: [job for job in jobs if is_wanted(job.job_id)]


def served(
    runtime: Runtime,
    clock: Callable[[], float],
    jobs: Sequence[Mapping[str, Array]],
    observe: Callable[[BatchObservation], None],
    first: int = 0,
) -> list[Mapping[str, Array]]:
    """Runs these jobs as one batch, has it observed, and returns the outputs of each job.

    first: the number of the first job; ids are made of these.
    """
    begun, forms = clock(), forms_of(runtime)
    generation = forms.generation if forms is not None else 0
    prepared = runtime.prepare(jobs)
    outputs = runtime.run(prepared)
    seconds = clock() - begun
    answered: list[AnsweredJob] = []
    row = 0
    for number, inputs in enumerate(jobs, first):
        after = row + runtime.spec.signature.rows(inputs)
        own = {name: values[row:after] for name, values in outputs.items()}
        answered.append(AnsweredJob(f"{runtime.spec.name}.{number:032x}", inputs, own))
        row = after
    observe(BatchObservation(prepared.rows, prepared.tokens, seconds, answered_of(answered), generation))
    return [job.outputs for job in answered]
