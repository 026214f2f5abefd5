"""Outputs beside outputs: verdicts, figures, and which pair is the worst. AR-088."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.registry.package.signature import TensorSpec
from penstock.registry.tensors import Array
from penstock.safety.validator_registry import ValidatorRegistry
from penstock.safety.validators import Comparison
from penstock.workers.shadow.comparison import Comparer, PairComparison

LOGITS = TensorSpec(name="y", dtype="float32", shape=("batch", 4))
LABEL = TensorSpec(name="label", dtype="string", shape=("batch",))
ROW = np.array([[1, 2, 3, 4]], np.float32)


def test_equal_outputs_pass():
    """Their figures are those of equal outputs, and nothing is bad about them."""
    found = Comparer("m", [LOGITS]).compare({"y": ROW.copy()}, {"y": ROW})
    assert (found.outcome, found.reason, found.badness) == ("pass", "", 0)
    assert dict(found.figures) == {"y.max_delta": 0, "y.agreement": 1}
    assert dict(found.worse_sides) == {"y.max_delta": "higher", "y.agreement": "lower"}


def test_a_difference_beyond_the_tolerance_fails():
    """The reason names output, figure and limit."""
    found = Comparer("m", [LOGITS]).compare({"y": ROW[:, ::-1]}, {"y": ROW})
    assert found.outcome == "fail"
    assert found.reason.startswith("y: max_delta 0.75, expected at most")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_candidate_that_is_not_finite_fails(value: float):
    """No figure is infinite: they are added up in the broker."""
    found = Comparer("m", [LOGITS]).compare({"y": np.full_like(ROW, value)}, {"y": ROW})
    assert found.outcome == "fail"
    assert "NaN" in found.reason
    assert all(map(np.isfinite, found.figures.values()))


@pytest.mark.parametrize("values", [ROW[:, :3], np.repeat(ROW, 2, axis=0)])
def test_another_shape_fails(values: np.ndarray):
    """It is no error."""
    assert "shape" in Comparer("m", [LOGITS]).compare({"y": values}, {"y": ROW}).reason


def test_a_missing_output_fails():
    """The others are compared all the same."""
    served = {"y": ROW, "label": np.array(["a"], object)}
    found = Comparer("m", [LOGITS, LABEL]).compare({"label": np.array(["a"], object)}, served)
    assert found.reason == "y: missing, expected an output"
    assert found.figures == {"label.agreement": 1}


def test_a_job_that_asked_for_one_output_is_compared_by_that_one():
    """The candidate gives all of them."""
    candidate = {"y": ROW * 9, "label": np.array(["a"], object)}
    assert Comparer("m", [LOGITS, LABEL]).compare(candidate, {"label": np.array(["a"], object)}).outcome == "pass"


def test_embeddings_are_compared_by_their_direction():
    """Rows of unit length; their cosine is the figure."""
    unit = ROW / np.linalg.norm(ROW)
    found = Comparer("m", [LOGITS]).compare({"y": -unit}, {"y": unit})
    assert found.figures == {"y.min_cosine": pytest.approx(-1)}
    assert found.outcome == "fail"


def test_a_custom_validator_judges_in_place_of_the_built_in_one():
    """One that is registered for the model counts, also an async one, and one that raises fails the pair."""

    class Half:
        async def compare(self, candidate: Array, expected: Array) -> Comparison:
            if not candidate.any():
                raise RuntimeError("zeros")
            is_half = bool((candidate * 2 == expected).all())
            return Comparison(len(expected)) if is_half else Comparison.failed("not a half", len(expected))

    registry = ValidatorRegistry()
    registry.register(Half(), model="m")
    halves, others = (Comparer(name, [LOGITS], registry) for name in ("m", "other"))
    assert halves.compare({"y": ROW / 2}, {"y": ROW}).outcome == "pass"
    assert "not a half" in halves.compare({"y": ROW}, {"y": ROW}).reason
    assert "RuntimeError" in halves.compare({"y": ROW * 0}, {"y": ROW}).reason
    assert others.compare({"y": ROW / 2}, {"y": ROW}).outcome == "fail"


def test_the_worst_pairs_are_those_without_outputs_then_those_that_fail_most():
    """A crash is worse than a large difference, which is worse than a small one."""
    by_badness = [
        PairComparison("pass", "", {"y.max_delta": 0.0}),
        PairComparison("pass", "", {"y.min_cosine": 0.9995}),
        PairComparison("fail", "far", {"y.max_delta": 0.5}),
        PairComparison("fail", "farther", {"y.max_delta": 0.9}),
        PairComparison("timeout", "slow"),
    ]
    assert sorted(by_badness, key=lambda each: each.badness) == by_badness
    assert len({each.badness for each in by_badness}) == 5
