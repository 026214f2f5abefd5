"""What a candidate's outputs may differ in, by what they are for."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from penstock.registry.errors import InvalidInput
from penstock.registry.package.signature import TensorSpec
from penstock.registry.tensors import Array
from penstock.safety.statistics import wilson_interval
from penstock.safety.validator_registry import compare_outputs
from penstock.safety.validators import (
    BUILT_IN,
    ClassifierValidator,
    Comparison,
    EmbeddingValidator,
    EncoderValidator,
    ExactValidator,
    Figure,
    GenerationValidator,
    RerankerValidator,
    TensorValidator,
    Verdict,
    changed_precision_validators,
    same_precision_validators,
    workload_of,
)
from penstock.safety.validators.comparison import Z_95

TOLERANCE = 1e-5
FINITE = st.floats(-1e6, 1e6, width=32)
ROWS = arrays(np.float32, (3, 4), elements=FINITE)
BuiltIn = (
    TensorValidator
    | EmbeddingValidator
    | ClassifierValidator
    | RerankerValidator
    | EncoderValidator
    | ExactValidator
    | GenerationValidator
)
EVERY: list[BuiltIn] = [
    TensorValidator(1, 1),
    EmbeddingValidator(-1, 0),
    ClassifierValidator(1e9, 0),
    RerankerValidator(-1, 0),
    EncoderValidator(1e9, 1e9),
]


def unit_rows(rows: int = 8, width: int = 16, seed: int = 7) -> Array:
    values = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    unit: Array = values / np.linalg.norm(values, axis=1, keepdims=True)
    return unit


def spec(name: str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=("batch", 4))


@pytest.mark.parametrize("validator", EVERY)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_by_every_validator(validator: BuiltIn, bad: float):
    """However wide the tolerance, one number that is none refuses the candidate."""
    golden = unit_rows()
    assert validator.compare(golden, golden).accepted
    candidate = golden.copy()
    candidate[3, 5] = bad
    found = validator.compare(candidate, golden)
    assert (found.reason, found.verdict) == ("NaN or infinity, expected finite numbers (1 of 8 rows)", Verdict.FAIL)


@pytest.mark.parametrize("validator", [*EVERY, ExactValidator(0)])
def test_another_shape_is_refused_by_every_validator(validator: BuiltIn):
    """A row too few is a refusal, not an exception."""
    golden = unit_rows()
    assert validator.compare(golden[:-1], golden).reason == "shape (7, 16), expected (8, 16) (8 of 8 rows)"


@pytest.mark.parametrize("validator", [*EVERY, ExactValidator()])
@given(values=ROWS)
def test_equal_outputs_are_accepted_by_every_validator(validator: BuiltIn, values: Array):
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
    assert comparison.values["min_cosine"] == pytest.approx(cosine, abs=1e-6)


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
    validator = ClassifierValidator(0.02, 0.99)
    assert validator.compare(golden + 0.19, golden).accepted
    assert validator.compare(golden + 0.21, golden).reason == "max_delta 0.021, expected at most 0.02"
    near = np.tile(np.array([[9.9, 10.0, 1.0]], np.float32), (100, 1))
    candidate = near.copy()
    candidate[0, 0] = 10.05
    assert validator.compare(candidate, near).values["agreement"] == 0.99
    assert validator.compare(candidate, near).accepted
    candidate[1, 0] = 10.05
    assert validator.compare(candidate, near).reason == "agreement 0.98, expected at least 0.99"


def test_a_single_number_a_row_has_no_winner():
    """A regression's output is judged by its change alone."""
    golden = np.arange(1, 5, dtype=np.float32)[:, None]
    assert "agreement" not in ClassifierValidator(0.02, 1.0).compare(golden, golden).figures


def test_text_and_integers_are_compared_exactly():
    """Labels are right or wrong."""
    golden = np.array(["yes", "no", "no", "yes"], object)
    candidate = golden.copy()
    candidate[0] = "no"
    assert ExactValidator().compare(candidate, golden).reason == "agreement 0.75, expected at least 1"
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
        "logits": ClassifierValidator(0.02, 0.99),
        "label": ExactValidator(0.99),
    }
    int8 = changed_precision_validators(outputs, golden, is_int8=True)
    assert int8["vector"] == reduced["vector"]
    assert int8["logits"] == ClassifierValidator(0.1, 0.98)


# Figures and verdicts


@pytest.mark.parametrize(
    ("figure", "side"),
    [
        (Figure.largest(0.5, 1.0), "higher"),
        (Figure.largest(0.0, 0.0), "higher"),
        (Figure.largest(0.5, None), "higher"),
        (Figure.smallest(0.9995, 0.999), "lower"),
        (Figure.smallest(0.9995, None), "lower"),
        (Figure.share(99, 100, 0.9), "lower"),
        (Figure.share(99, 100, 1.0), "lower"),
        (Figure.mean(np.array([0.9]), 0.8, ideal=1.0), "lower"),
        (Figure.mean(np.array([0.1]), 0.2, ideal=0.0), "higher"),
        (Figure.mean(np.array([0.1]), None, ideal=0.0), "either"),
    ],
)
def test_a_figure_knows_the_side_on_which_it_gets_worse(figure: Figure, side: str):
    """An error is worse when it is higher, a likeness when it is lower; of a mean only the limit tells."""
    assert figure.worse_side == side


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [
        (Figure.largest(0.5, 1.0), Verdict.PASS),
        (Figure.largest(0.9, 1.0), Verdict.MARGINAL),
        (Figure.largest(1.0, 1.0), Verdict.MARGINAL),
        (Figure.largest(1.001, 1.0), Verdict.FAIL),
        (Figure.largest(5.0, None), Verdict.PASS),
        (Figure.smallest(0.9995, 0.999), Verdict.PASS),
        (Figure.smallest(0.9991, 0.999), Verdict.MARGINAL),
        (Figure.smallest(0.9989, 0.999), Verdict.FAIL),
        (Figure.share(99, 100, 0.99), Verdict.MARGINAL),
        (Figure.share(98, 100, 0.99), Verdict.FAIL),
        (Figure.share(380, 380, 0.99), Verdict.MARGINAL),
        (Figure.share(381, 381, 0.99), Verdict.PASS),
        (Figure.share(0, 0, 0.99), Verdict.PASS),
        (Figure.mean(np.full(50, 0.02), 0.1, ideal=0.0), Verdict.PASS),
        (Figure.mean(np.array([0.0, 0.18]), 0.1, ideal=0.0), Verdict.MARGINAL),
        (Figure.mean(np.array([0.2, 0.2]), 0.1, ideal=0.0), Verdict.FAIL),
        (Figure.mean(np.array([0.8, 0.8]), 0.9, ideal=1.0), Verdict.FAIL),
        (Figure.mean(np.array([]), 0.1, ideal=0.0), Verdict.PASS),
    ],
)
def test_a_figure_is_judged_by_its_limit_and_its_interval(figure: Figure, verdict: Verdict):
    """Beyond the limit is FAIL. Near it, or with an interval that reaches beyond it, is MARGINAL."""
    assert figure.verdict is verdict


def test_the_interval_of_a_share_is_that_of_wilson():
    """Values of Wilson's formula for 81 of 263 (Newcombe 1998, method 3), and its closed form for no miss."""
    assert wilson_interval(81, 263, Z_95) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148, Z_95) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(1500, 1500, Z_95)[0] == pytest.approx(1500 / (1500 + 1.959963984540054**2))
    assert wilson_interval(0, 0, Z_95) == (0.0, 1.0)


def test_only_a_clear_miss_is_sure():
    """Two of three misses may be chance. 20 of 100 are not, against a limit of 99 %."""
    assert not Figure.share(1, 3, 0.7).is_surely_beyond
    assert Figure.share(80, 100, 0.99).is_surely_beyond
    assert Figure.largest(1.1, 1.0).is_surely_beyond
    assert not Figure.mean(np.full(29, 0.2), 0.1, ideal=0.0).is_surely_beyond
    assert Figure.mean(np.full(30, 0.2), 0.1, ideal=0.0).is_surely_beyond


def test_a_change_is_a_share_of_the_largest_number_of_all_chunks():
    """A chunk of small logits does not refuse a candidate that is as near everywhere."""
    small, large = Figure.largest(0.05, 0.02, 20, scale=1.0), Figure.largest(0.05, 0.02, 20, scale=10.0)
    assert small.verdict is Verdict.FAIL
    merged = small.merged(large)
    assert (merged, merged.verdict) == (large.merged(small), Verdict.PASS)
    assert merged.value == pytest.approx(0.005)
    assert (merged.scale, merged.count) == (10.0, 40)
    assert not Figure.largest(5.0, 0.02, 29, scale=2.0).is_surely_beyond
    assert Figure.largest(5.0, 0.02, 30, scale=2.0).is_surely_beyond


@given(values=arrays(np.float64, st.integers(2, 60), elements=st.floats(-1e3, 1e3)), cut=st.integers(1, 59))
def test_merged_figures_equal_those_of_all_rows(values: Array, cut: int):
    """However the rows are cut into chunks: mean, spread, extremes and shares are those of one call."""
    one, other = values[:cut], values[cut:]
    whole = Figure.mean(values, 1.0, ideal=0.0)
    merged = Figure.mean(one, 1.0, ideal=0.0).merged(Figure.mean(other, 1.0, ideal=0.0))
    assert merged.value == pytest.approx(whole.value, abs=1e-9)
    assert merged.count == whole.count
    assert merged.squares == pytest.approx(whole.squares, rel=1e-9, abs=1e-6)
    hits = [int((part > 0).sum()) for part in (one, other)]
    shares = Figure.share(hits[0], len(one), 0.5).merged(Figure.share(hits[1], len(other), 0.5))
    assert shares.value == pytest.approx(float((values > 0).mean()))
    largest = [Figure.largest(part.max(initial=-1e9), 0.0, len(part)) for part in (one, other)]
    assert largest[0].merged(largest[1]).value == values.max()


def test_figures_of_other_limits_are_not_merged():
    """A validator whose limit changes from call to call gets an error that names both limits."""
    with pytest.raises(InvalidInput, match=r"found a share with limit 0\.5, expected a share with limit 0\.9"):
        Figure.share(1, 1, 0.9).merged(Figure.share(1, 1, 0.5))


def test_a_comparison_has_the_worst_verdict_and_all_reasons():
    """No rows are INSUFFICIENT. A problem is FAIL, whatever the figures say, and its rows add up."""
    assert Comparison().verdict is Verdict.INSUFFICIENT
    assert Comparison().accepted
    figures = {"good": Figure.largest(0.0, 1.0), "near": Figure.largest(0.9, 1.0)}
    assert Comparison(2, figures).verdict is Verdict.MARGINAL
    both = Comparison(2, figures).merged(Comparison.failed("NaN", 3, 1)).merged(Comparison.failed("NaN", 5, 2))
    assert (both.rows, both.verdict, both.reason) == (10, Verdict.FAIL, "NaN (3 of 10 rows)")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExactValidator(1.5), "min_agreement: found 1.5, expected a share from 0 to 1"),
        (lambda: EmbeddingValidator(2.0), "min_cosine: found 2.0, expected a number from -1 to 1"),
        (lambda: EmbeddingValidator(neighbours=0), "neighbours: found 0, expected at least 1"),
        (lambda: ClassifierValidator(top_k=0), "top_k: found 0, expected at least 1"),
        (lambda: Figure.largest(1.0, float("nan")), "limit: found nan, expected a finite number"),
        (lambda: Figure.mean(np.array([np.nan]), 1.0, ideal=0.0), "figure: found nan"),
    ],
)
def test_impossible_limits_are_refused(make: Callable[[], object], message: str):
    """A limit that no candidate can meet is an error at once, not a verdict later."""
    with pytest.raises(InvalidInput, match=re.escape(message)):
        make()


# Workloads


def test_one_nan_in_500_rows_is_found_and_counted():
    """The first figure of the issue: not an average hides it."""
    golden = unit_rows(500)
    candidate = golden.copy()
    candidate[321, 3] = np.nan
    assert EmbeddingValidator().compare(candidate, golden).reasons == (
        "NaN or infinity, expected finite numbers (1 of 500 rows)",
    )


def test_neighbours_of_embeddings_must_stay():
    """Half of each group moves to another group. A limit of -1 for cosines does not see it; the neighbours tell it."""
    rng = np.random.default_rng(3)
    groups = np.repeat(np.eye(4, 16), 8, axis=0) + 0.01 * rng.standard_normal((32, 16))
    moved = groups.copy()
    moved[::2] += 3 * np.roll(groups, 8, axis=0)[::2]
    validator = EmbeddingValidator(min_cosine=-1, min_overlap=0.9, neighbours=7)
    assert validator.compare(groups, groups).values["neighbour_overlap"] == 1
    found = validator.compare(moved, groups)
    assert found.values["neighbour_overlap"] < 0.6
    assert [reason.partition(" ")[0] for reason in found.sure_reasons] == ["neighbour_overlap"]


def test_equal_texts_are_neighbours_in_any_order():
    """Traffic has repeated inputs: which of several equal vectors is nearest means nothing."""
    golden = np.repeat(unit_rows(4), 10, axis=0)
    candidate = golden + 1e-4 * np.random.default_rng(5).standard_normal(golden.shape).astype(np.float32)
    assert EmbeddingValidator(neighbours=3).compare(candidate, golden).values["neighbour_overlap"] == 1


def test_top_classes_are_compared_without_their_order():
    """Two of the three best classes are the same in every row."""
    golden = np.tile(np.array([[9.0, 8.0, 7.0, 1.0, 0.0]]), (50, 1))
    candidate = np.tile(np.array([[9.0, 7.9, 1.0, 7.0, 0.0]]), (50, 1))
    found = ClassifierValidator(1.0, 0.5, top_k=3).compare(candidate, golden)
    assert found.values["agreement"] == 1
    assert found.values["top_k_agreement"] == pytest.approx(2 / 3)


def test_rank_correlation_is_that_of_spearman():
    """1 - 6 sum(d^2) / (n (n^2 - 1)) without ties; with ties Pearson's correlation of their average ranks."""
    scores = np.array([[0.1, 0.9, 0.5, 0.3]])
    ours = np.array([[0.1, 0.9, 0.2, 0.3]])  # two neighbours change places: d = 1, 1
    found = RerankerValidator().compare(ours, scores)
    assert found.values["rank_correlation"] == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert found.values["top_agreement"] == 1
    tied = RerankerValidator().compare(np.array([[1.0, 1.0, 2.0]]), np.array([[1.0, 2.0, 3.0]]))
    assert tied.values["rank_correlation"] == pytest.approx(np.corrcoef([0.5, 0.5, 2], [0, 1, 2])[0, 1])


def test_scores_of_one_job_are_one_ranking():
    """A column of scores is the ranking of its documents, in any scale; one document has no order."""
    validator = RerankerValidator()
    scores = np.array([[3.0], [1.0], [2.0]])
    assert validator.compare(scores * 100 - 7, scores).verdict is Verdict.MARGINAL  # one ranking is little
    assert not validator.compare(-scores, scores).accepted
    assert not validator.compare(np.zeros_like(scores), scores).accepted
    assert validator.compare(scores[:1] * 2, scores[:1]).figures["top_agreement"].count == 0


def test_tokens_are_compared_place_by_place():
    """Padding does not count; a token too many, too few or in another place does."""
    validator = GenerationValidator(min_agreement=0.7, max_length_change=0.5)
    golden = np.array([[5, 6, 7, 0], [8, 9, 0, 0]])
    found = validator.compare(np.array([[5, 6, 4, 3, 0], [8, 9, 0, 0, 0]]), golden)
    assert found.values["token_agreement"] == pytest.approx(4 / 6)
    assert found.values["length_change"] == pytest.approx((1 / 3 + 0) / 2)
    assert validator.compare(golden, golden).values == {"token_agreement": 1.0, "length_change": 0.0}
    texts = np.array(["a pump lifts water", "no"], object)
    ours = np.array(["a pump lifts oil", "no"], object)
    assert validator.compare(ours, texts).values["token_agreement"] == pytest.approx(4 / 5)
    assert not validator.compare(ours, golden).accepted
    assert validator.compare(golden[:1], golden).reason.startswith("1 rows of int64, expected 2 rows of int64")


RNG = np.random.default_rng(11)
LOGITS = RNG.standard_normal((400, 10)) * 5
HIDDEN = RNG.standard_normal((8, 12, 16))
TOKENS = RNG.integers(1, 1000, (40, 30))
SCORES = RNG.standard_normal((400, 12))
VECTORS = unit_rows(400)


@pytest.mark.parametrize(
    ("workload", "expected", "right", "wrong"),
    [
        ("embedding", VECTORS, VECTORS + 1e-4, np.roll(VECTORS, 1, axis=1)),
        ("classifier", LOGITS, LOGITS * 1.001, np.roll(LOGITS, 1, axis=1)),
        ("reranker", SCORES, SCORES * 2 + 1, -SCORES),
        ("generation", TOKENS, TOKENS, np.roll(TOKENS, 1, axis=1)),
        ("encoder", HIDDEN, HIDDEN + 1e-3, HIDDEN + 0.1),
        ("exact", np.arange(400), np.arange(400), np.arange(400) + 1),
    ],
)
def test_each_workload_passes_a_right_candidate_and_fails_a_wrong_one(
    workload: str, expected: Array, right: Array, wrong: Array
):
    """AR-063, AR-069: a slightly other result is a PASS; a head that is off by one, or a reversed order, is a FAIL."""
    validator = BUILT_IN[workload]
    assert compare_outputs(validator, right, expected).verdict is Verdict.PASS
    failed = compare_outputs(validator, wrong, expected)
    assert failed.verdict is Verdict.FAIL
    assert failed.sure_reasons


@pytest.mark.parametrize(
    ("dtype", "expected", "task", "workload"),
    [
        ("float32", unit_rows(), None, "embedding"),
        ("float32", unit_rows() * 4, "text-classification", "classifier"),
        ("float32", HIDDEN, None, "encoder"),
        ("int64", np.arange(4), None, "exact"),
        ("string", np.array(["yes"], object), None, "exact"),
        ("string", np.array(["yes"], object), "summarization", "generation"),
        ("int64", TOKENS, "text-generation", "generation"),
        ("float32", SCORES, "text-generation", "classifier"),
        ("float32", SCORES, "text-ranking", "reranker"),
    ],
)
def test_the_use_of_an_output_is_known_from_task_and_numbers(
    dtype: str, expected: Array, task: str | None, workload: str
):
    """Unit length is an embedding, three axes are hidden states; a task decides what numbers cannot tell."""
    assert workload_of(spec("y", dtype), expected, task) == workload


@pytest.mark.parametrize(("ideal", "worse"), [(1.0, 0.9), (0.0, 0.1)], ids=["likeness", "error"])
def test_a_limit_at_the_ideal_allows_nothing(ideal: float, worse: float):
    """Top-k agreement of 1, or no error at all: what misses it fails, and what meets it passes."""
    values = np.full(100, ideal)
    assert Figure.mean(values, ideal, ideal=ideal).verdict is Verdict.PASS
    values[0] = worse
    missed = Figure.mean(values, ideal, ideal=ideal)
    assert missed.verdict is Verdict.FAIL
    assert missed.worse_side == ("lower" if ideal else "higher")
