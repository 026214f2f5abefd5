"""The checks before a compiled model serves: graph breaks, memory growth, NaN.

    pre_compile_check -> compile -> check_output_validity of its outputs -> check_health of the process -> it may serve

A check that cannot be made counts as failed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["CheckResult", "HealthResult", "PreCompileResult", "TorchCompileSafetyMonitor"]

_DEEPEST: Final = 16
"""Outputs nested deeper than this are not searched and count as invalid."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Passed if there are no reasons against. True in a condition when passed."""

    reasons: tuple[str, ...] = ()

    @property
    def is_passed(self) -> bool:
        """Whether there is no reason against the compiled model."""
        return not self.reasons

    def __bool__(self) -> bool:
        return self.is_passed


@dataclass(frozen=True, slots=True)
class PreCompileResult(CheckResult):
    """graph_breaks and graphs: those that dynamo found; None where it failed."""

    graph_breaks: int | None = None
    graphs: int | None = None


@dataclass(frozen=True, slots=True)
class HealthResult(CheckResult):
    """growth_mb: by how much the process grew; negative when it shrank."""

    growth_mb: float = 0.0


class TorchCompileSafetyMonitor:
    """The limits for a compiled model."""

    def __init__(self, max_graph_breaks: int = 5, memory_growth_threshold_mb: float = 500.0) -> None:
        """Raises ValueError for a negative limit."""
        if max_graph_breaks < 0 or not memory_growth_threshold_mb >= 0:
            raise ValueError(
                f"Found limits {max_graph_breaks} and {memory_growth_threshold_mb}. Expected numbers from 0 upwards"
            )
        self.max_graph_breaks: Final = max_graph_breaks
        self.memory_growth_threshold_mb: Final = memory_growth_threshold_mb

    def pre_compile_check(self, model: torch.nn.Module, sample_input: object) -> PreCompileResult:
        """Checks the graph breaks that `torch._dynamo.explain` finds in one call. If explain fails, so does the check.

        sample_input: a tensor, a sequence of positional arguments, or a mapping of keywords. Drops
        everything that torch.compile has compiled in this process, because explain does so.
        """
        import torch

        args, kwargs = _call(sample_input)
        try:
            with torch.inference_mode():
                found = torch._dynamo.explain(model)(*args, **kwargs)
        except Exception as error:
            # The model and the tracer may raise anything. A model that cannot be explained is not compiled.
            return PreCompileResult((f"dynamo cannot explain the model ({type(error).__name__}: {error!s:.200})",))
        breaks, graphs = max(0, int(found.graph_break_count)), int(found.graph_count)
        reasons = []
        if graphs == 0:
            reasons.append("dynamo found nothing to compile")
        if breaks > self.max_graph_breaks:
            reasons.append(f"found {breaks} graph breaks, expected at most {self.max_graph_breaks}")
        return PreCompileResult(tuple(reasons), breaks, graphs)

    def check_health(self, pre_mb: float, post_mb: float) -> HealthResult:
        """Whether the process grew by no more than the threshold, in MB, from before to after the compilation."""
        growth_mb = post_mb - pre_mb
        if math.isfinite(growth_mb) and growth_mb <= self.memory_growth_threshold_mb:
            return HealthResult((), growth_mb)
        reason = f"memory grew by {growth_mb:.0f} MB, expected at most {self.memory_growth_threshold_mb:.0f}"
        return HealthResult((reason,), growth_mb)

    def check_output_validity(self, output: object) -> CheckResult:
        """Whether no number in the output is NaN or infinite.

        output: tensors and arrays of any dtype, numbers, and mappings, sequences and dataclasses of them; a
        transformers ModelOutput is a mapping. Text and None have no numbers.
        """
        return CheckResult(tuple(_invalid(output, "output", _DEEPEST)))


def _call(sample_input: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """(positional arguments, keywords)."""
    if isinstance(sample_input, Mapping):
        return (), {str(name): value for name, value in sample_input.items()}
    if isinstance(sample_input, tuple | list):
        return tuple(sample_input), {}
    return (sample_input,), {}


def _invalid(value: object, path: str, depth: int) -> Iterator[str]:
    """One reason for each place that holds NaN or infinity, or an object whose numbers cannot be read."""
    if not depth:
        yield f"{path} is nested deeper than {_DEEPEST} levels"
        return
    parts = _parts(value, path)
    if parts is not None:
        for part, item in parts:
            yield from _invalid(item, part, depth - 1)
    elif problem := _problem(value):
        yield f"{path} {problem}"


def _parts(value: object, path: str) -> Iterator[tuple[str, object]] | None:
    """(path, item) of each part of a value; None for a value without parts."""
    if isinstance(value, Mapping):
        return ((f"{path}[{str(name)!r:.40}]", item) for name, item in value.items())
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        value = value.ravel().tolist()
    if isinstance(value, tuple | list | set | frozenset):
        return ((f"{path}[{number}]", item) for number, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((f"{path}.{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))
    return None


def _problem(value: object) -> str:
    """The problem of one leaf of an output; empty where there is none."""
    if value is None or isinstance(value, str | bytes):
        return ""
    if isinstance(value, int | float | complex | np.generic | np.ndarray):
        array = np.asarray(value)
        is_finite = array.dtype.kind not in "fc" or bool(np.isfinite(array).all())
    else:
        import torch

        if not isinstance(value, torch.Tensor):
            return f"is of type {type(value).__name__}, which cannot be checked"
        is_finite = not (value.is_floating_point() or value.is_complex()) or bool(torch.isfinite(value).all())
    return "" if is_finite else "contains NaN or infinity"
