"""What a candidate's outputs may differ in, by what they are for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from penstock.registry.package.signature import TensorSpec
from penstock.registry.tensors import Array
from penstock.safety.validators import (
    EmbeddingValidator,
    ExactValidator,
    LogitsValidator,
    TensorValidator,
    Validator,
    changed_precision_validators,
    same_precision_validators,
)

TOLERANCE = 1e-5
FINITE = st.floats(-1e6, 1e6, width=32)
ROWS = arrays(np.float32, (3, 4), elements=FINITE)
EVERY: list[Validator] = [TensorValidator(1, 1), EmbeddingValidator(-1), LogitsValidator(1e9, 0)]


def unit_rows(rows: int = 8, width: int = 16, seed: int = 7) -> Array:
    values = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    unit: Array = values / np.linalg.norm(values, axis=1, keepdims=True)
    return unit


def spec(name: str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=("batch", 4))


@pytest.mark.parametrize("validator", EVERY)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_by_every_validator(validator: Validator, bad: float):
    """However wide the tolerance, one number that is none refuses the candidate."""
    golden = unit_rows()
    assert validator.compare(golden, golden).accepted
    candidate = golden.copy()
    candidate[3, 5] = bad
    assert validator.compare(candidate, golden).reason == "contains NaN or infinity, expected finite numbers"


@pytest.mark.parametrize("validator", [*EVERY, ExactValidator(0)])
def test_another_shape_is_refused_by_every_validator(validator: Validator):
    """A row too few is a refusal, not an exception."""
    golden = unit_rows()
    assert validator.compare(golden[:-1], golden).reason == "shape (7, 16), expected (8, 16)"


@pytest.mark.parametrize("validator", [*EVERY, ExactValidator()])
@given(values=ROWS)
def test_equal_outputs_are_accepted_by_every_validator(validator: Validator, values: Array):
    """Whatever the values, zeros included, what is equal passes."""
    assert validator.compare(values.copy(), values).accepted


@given(candidate=ROWS, golden=ROWS)
def test_tensors_are_judged_as_numpy_does(candidate: Array, golden: Array):
    """atol + rtol * |golden|, element by element (CF-016)."""
    ours, theirs = candidate.astype(np.float64), golden.astype(np.float64)
    expected = bool((np.abs(ours - theirs) <= TOLERANCE + TOLERANCE * np.abs(theirs)).all())
    assert TensorValidator(TOLERANCE, TOLERANCE).compare(candidate, golden).accepted is expected


def test_no_tolerance_asks_for_equality():
    """A tolerance of 0 accepts what is equal, and nothing else."""
    golden = np.ones((2, 2), np.float32)
    assert TensorValidator(0, 0).compare(golden, golden).accepted
    assert not TensorValidator(0, 0).compare(np.nextafter(golden, 2, dtype=np.float32), golden).accepted


def turned(golden: Array, cosine: float) -> Array:
    """The rows of `golden`, each turned so far that it has this cosine to what it was."""
    other = unit_rows(len(golden), golden.shape[1], seed=8)
    across = other - (other * golden).sum(axis=1, keepdims=True) * golden
    across /= np.linalg.norm(across, axis=1, keepdims=True)
    moved: Array = cosine * golden + np.sqrt(1 - cosine**2) * across
    return moved


@pytest.mark.parametrize(("cosine", "accepted"), [(0.9999, True), (0.9991, True), (0.9989, False), (0.989, False)])
def test_embeddings_are_judged_by_their_worst_direction(cosine: float, accepted: bool):
    """0.999 is the limit, and 0.989, which is what int8 made of MiniLM, is far below it."""
    golden = unit_rows()
    candidate = golden.copy()
    candidate[5] = turned(golden, cosine)[5]
    comparison = EmbeddingValidator().compare(candidate, golden)
    assert comparison.accepted is accepted
    assert comparison.figures["min_cosine"] == pytest.approx(cosine, abs=1e-6)


def test_length_of_an_embedding_does_not_matter_but_zero_does():
    """Direction is all; a vector of zeros has none, and only another one is like it."""
    golden = unit_rows()
    assert EmbeddingValidator().compare(golden * 3, golden).accepted
    candidate, zeros = golden.copy(), golden.copy()
    candidate[0] = zeros[0] = 0
    assert not EmbeddingValidator().compare(candidate, golden).accepted
    assert EmbeddingValidator().compare(zeros, zeros).accepted


def test_logits_may_move_a_little_and_keep_their_winner():
    """The change is measured against the largest logit; a row whose winner changes counts against the candidate."""
    golden = np.tile(np.array([[1.0, 5.0, 10.0]], np.float32), (100, 1))
    validator = LogitsValidator(0.02, 0.99)
    assert validator.compare(golden + 0.19, golden).accepted
    assert validator.compare(golden + 0.21, golden).reason == "max_delta 0.021, expected at most 0.02"
    near = np.tile(np.array([[9.9, 10.0, 1.0]], np.float32), (100, 1))
    candidate = near.copy()
    candidate[0, 0] = 10.05
    assert validator.compare(candidate, near).figures["agreement"] == 0.99
    assert validator.compare(candidate, near).accepted
    candidate[1, 0] = 10.05
    assert validator.compare(candidate, near).reason == "agreement 0.980, expected at least 0.99"


def test_a_single_number_a_row_has_no_winner():
    """A regression's output is judged by its change alone."""
    golden = np.arange(1, 5, dtype=np.float32)[:, None]
    assert "agreement" not in LogitsValidator(0.02, 1.0).compare(golden, golden).figures


def test_text_and_integers_are_compared_exactly():
    """Labels are right or wrong."""
    golden = np.array(["yes", "no", "no", "yes"], object)
    candidate = golden.copy()
    candidate[0] = "no"
    assert ExactValidator().compare(candidate, golden).reason == "agreement 0.750, expected at least 1"
    assert ExactValidator(0.75).compare(candidate, golden).accepted


def test_same_precision_is_held_to_the_tolerance():
    """Floats within the setting, everything else equal."""
    outputs = (spec("y"), spec("label", "int64"), spec("text", "string"))
    assert same_precision_validators(outputs, TOLERANCE) == {
        "y": TensorValidator(TOLERANCE, TOLERANCE),
        "label": ExactValidator(),
        "text": ExactValidator(),
    }


def test_changed_precision_is_held_to_what_the_output_is_for():
    """Rows of unit length are embeddings, others logits; int8 may move logits further, embeddings not."""
    outputs = (spec("vector"), spec("logits"), spec("label", "int64"))
    golden = {"vector": unit_rows(), "logits": unit_rows() * 4, "label": np.arange(8)}
    reduced = changed_precision_validators(outputs, golden)
    assert reduced == {
        "vector": EmbeddingValidator(0.999),
        "logits": LogitsValidator(0.02, 0.99),
        "label": ExactValidator(0.99),
    }
    int8 = changed_precision_validators(outputs, golden, is_int8=True)
    assert int8["vector"] == reduced["vector"]
    assert int8["logits"] == LogitsValidator(0.1, 0.98)
