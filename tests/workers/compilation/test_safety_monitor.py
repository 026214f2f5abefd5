"""TorchCompileSafetyMonitor: graph breaks, memory growth and NaN each speak against a compiled model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from penstock.workers.compilation import TorchCompileSafetyMonitor


class Breaking(torch.nn.Module):
    """Breaks the graph `breaks` times."""

    def __init__(self, breaks: int) -> None:
        super().__init__()
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks > 5:
            x = x + 1
            torch._dynamo.graph_break()
        x = x + 1
        torch._dynamo.graph_break()
        x = x * 2
        torch._dynamo.graph_break()
        x = x + 3
        torch._dynamo.graph_break()
        x = x * 4
        torch._dynamo.graph_break()
        x = x + 5
        torch._dynamo.graph_break()
        return x * 6


class Raising(torch.nn.Module):
    """Fails on every input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such layer")


@dataclass
class Scores:
    """An output of a custom class."""

    logits: object
    label: str = "positive"


@pytest.fixture(autouse=True)
def _no_traces_left() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def test_five_graph_breaks_are_accepted():
    """CF-059: the limit itself is within it, and the result has the counts."""
    result = TorchCompileSafetyMonitor().pre_compile_check(Breaking(5), torch.ones(2))
    assert result.is_passed
    assert (result.graph_breaks, result.graphs) == (5, 6)


def test_six_graph_breaks_are_refused():
    """CF-059, AR-041, AR-062: one more than the limit is refused, with both numbers."""
    result = TorchCompileSafetyMonitor().pre_compile_check(Breaking(6), (torch.ones(2),))
    assert not result
    assert result.reasons == ("found 6 graph breaks, expected at most 5",)


def test_limit_of_graph_breaks_can_be_set():
    """CF-059: max_graph_breaks sets the limit."""
    assert not TorchCompileSafetyMonitor(max_graph_breaks=4).pre_compile_check(Breaking(5), {"x": torch.ones(2)})


def test_failing_explain_refuses():
    """CF-060: what cannot be explained is not compiled."""
    result = TorchCompileSafetyMonitor().pre_compile_check(Raising(), torch.ones(2))
    assert not result.is_passed
    assert result.graph_breaks is None
    assert "dynamo cannot explain the model" in result.reasons[0]


def test_wrong_sample_refuses():
    """CF-060: a sample that the model does not take fails the explanation, not the caller."""
    assert not TorchCompileSafetyMonitor().pre_compile_check(torch.nn.Linear(2, 2), torch.ones(1, 3))


@pytest.mark.parametrize(
    ("pre_mb", "post_mb", "is_healthy"),
    [
        (1000.0, 1050.0, True),
        (1000.0, 1500.0, True),
        (1000.0, 1501.0, False),
        (1000.0, 400.0, True),
        (1000.0, float("nan"), False),
        (1000.0, float("inf"), False),
    ],
)
def test_memory_may_grow_up_to_the_threshold(pre_mb: float, post_mb: float, is_healthy: bool):
    """CF-061, AR-041: growth of 500 MB is healthy and of 501 is not, by the documented keywords."""
    result = TorchCompileSafetyMonitor().check_health(pre_mb=pre_mb, post_mb=post_mb)
    assert bool(result) is is_healthy
    assert bool(result.reasons) is not is_healthy


def test_growth_is_measured_by_its_own_threshold():
    """CF-061: memory_growth_threshold_mb sets the limit."""
    monitor = TorchCompileSafetyMonitor(memory_growth_threshold_mb=10.0)
    assert monitor.check_health(0, 10).growth_mb == 10
    assert monitor.check_health(0, 11).reasons == ("memory grew by 11 MB, expected at most 10",)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("output", "place"),
    [
        (torch.tensor([1.0, NAN]), "output"),
        (torch.tensor([1.0, -INF], dtype=torch.bfloat16), "output"),
        (torch.tensor([NAN], dtype=torch.float16), "output"),
        (torch.tensor([complex(0, INF)]), "output"),
        (np.array([[1.0, INF]]), "output"),
        (np.array([torch.tensor([NAN])], dtype=object), "output[0]"),
        (np.float32(NAN), "output"),
        (NAN, "output"),
        ({"a": torch.ones(1), "b": {"c": torch.tensor([NAN])}}, "output['b']['c']"),
        ([torch.ones(1), (1, [torch.tensor(NAN)])], "output[1][1][0]"),
        (BaseModelOutputWithPooling(torch.ones(1), torch.tensor([NAN])), "output['pooler_output']"),
        (BaseModelOutputWithPooling(hidden_states=(torch.ones(1), torch.tensor([INF]))), "output['hidden_states'][1]"),
        (Scores([torch.tensor([NAN], dtype=torch.bfloat16)]), "output.logits[0]"),
    ],
)
def test_non_finite_number_is_found_wherever_it_is(output: object, place: str):
    """CF-062, AR-041: NaN and infinity are found in every container and number format, and the place is named."""
    result = TorchCompileSafetyMonitor().check_output_validity(output)
    assert not result
    assert result.reasons == (f"{place} contains NaN or infinity",)


@pytest.mark.parametrize(
    "output",
    [
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([1, 2]),
        torch.tensor([True]),
        np.array([1, 2]),
        np.array(["nan"]),
        {"a": [1.5, 2, None, "nan", b"inf", True]},
        BaseModelOutputWithPooling(torch.ones(1)),
        Scores(np.ones(2)),
        (),
    ],
)
def test_finite_output_is_valid(output: object):
    """CF-062: whole numbers, text and finite floats are valid."""
    assert TorchCompileSafetyMonitor().check_output_validity(output).reasons == ()


def test_output_that_cannot_be_looked_into_is_refused():
    """CF-062: an unknown type may hold anything."""
    assert TorchCompileSafetyMonitor().check_output_validity({"a": object()}).reasons == (
        "output['a'] is of type object, which cannot be checked",
    )


def test_output_that_contains_itself_is_refused():
    """CF-062: the search ends."""
    output: list[object] = []
    output.append(output)
    assert not TorchCompileSafetyMonitor().check_output_validity(output)


@pytest.mark.parametrize("limits", [{"max_graph_breaks": -1}, {"memory_growth_threshold_mb": -0.1}])
def test_negative_limits_are_refused(limits: dict):
    """No model can keep a negative limit, so it is an error of the configuration."""
    with pytest.raises(ValueError, match="Expected numbers from 0 upwards"):
        TorchCompileSafetyMonitor(**limits)
