"""One gate before anything serves: it names every reason, and its figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from penstock.registry.tensors import Array
from penstock.safety.orchestrator import Gate, joined
from penstock.safety.validators import EmbeddingValidator, ExactValidator, TensorValidator

TOLERANCE = 1e-5
STRICT = {"y": TensorValidator(TOLERANCE, TOLERANCE)}


def batches(error: float = 0.0) -> Sequence[dict[str, Array]]:
    """Two batches of zeros, each number off by `error`: there the tolerance is `atol` alone."""
    return [{"y": np.full((rows, 3), error, np.float64)} for rows in (4, 2)]


@pytest.mark.parametrize(("error", "accepted"), [(0.0, True), (0.5, True), (-0.5, True), (2.0, False), (-2.0, False)])
def test_half_the_tolerance_passes_and_twice_does_not(error: float, accepted: bool):
    """An injected error of 0.5 x tolerance is accepted, 2 x refused (CF-016)."""
    verdict = Gate().judge(batches(error * TOLERANCE), batches(), STRICT)
    assert verdict.accepted is accepted
    assert verdict.evidence["y.max_error_ratio"] == pytest.approx(abs(error))
    assert verdict.evidence["rows"] == 6


def test_every_reason_is_named():
    """An operator sees at once all that is wrong."""
    golden = [{"y": np.zeros((2, 3)), "v": np.eye(2, 3), "label": np.arange(2)}]
    candidate = [{"y": np.ones((2, 3)), "v": np.ones((2, 3)), "label": np.arange(2)}]
    verdict = Gate().judge(candidate, golden, {**STRICT, "v": EmbeddingValidator(), "label": ExactValidator()})
    assert [reason.partition(" ")[0] for reason in verdict.reasons] == ["y:", "v:"]
    assert verdict.evidence["label.agreement"] == 1


def test_missing_output_and_wrong_shape_are_refused():
    """A candidate that answers less than the model does never serves, in whichever batch it does so."""
    golden = batches()
    assert Gate().judge([golden[0], {}], golden, STRICT).reasons == ("y: missing",)
    narrow = [golden[0], {"y": golden[1]["y"][:, :2]}]
    assert Gate().judge(narrow, golden, STRICT).reasons == ("y: shape (2, 2), expected (2, 3)",)


def test_too_few_golden_rows_prove_nothing():
    """Equal outputs of too few rows are refused, and so are none at all."""
    assert Gate(min_rows=6).judge(batches(), batches(), STRICT).accepted
    assert Gate(min_rows=7).judge(batches(), batches(), STRICT).reasons == ("6 golden rows, expected at least 7",)
    assert Gate().judge([], [], STRICT).reasons == ("0 golden rows, expected at least 1",)


def test_nan_anywhere_is_refused():
    """One NaN in one row of one batch."""
    candidate = batches()
    candidate[1]["y"][1, 2] = np.nan
    assert Gate().judge(candidate, batches(), STRICT).reasons == (
        "y: contains NaN or infinity, expected finite numbers",
    )


def test_rows_of_different_widths_are_judged_together():
    """Batches of sequences of different lengths are one run."""
    golden = [{"y": np.ones((1, 2))}, {"y": np.ones((1, 3))}]
    assert joined(golden)["y"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert Gate().judge(golden, golden, STRICT).accepted
