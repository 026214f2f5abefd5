"""A candidate is refused as soon as it is surely wrong, and passes only after enough pairs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.registry.errors import InvalidInput
from penstock.registry.tensors import Array
from penstock.safety.canary import MIN_PAIRS, Canary, CanaryState, NoOutputs, Pair
from penstock.safety.validators import (
    ClassifierValidator,
    Comparison,
    EmbeddingValidator,
    Figure,
    GenerationValidator,
    RerankerValidator,
    Validator,
    Verdict,
)

CHUNK = 50
RNG = np.random.default_rng(15)
LOGITS = (RNG.standard_normal((MIN_PAIRS, 10)) * 5).astype(np.float32)


def pairs(
    change: Callable[[int, Array], Array | BaseException], count: int = MIN_PAIRS, *, ratio: float = 0.0
) -> Iterator[list[Pair]]:
    """Chunks of pairs of one row of logits; `change` makes the candidate's row of the served one."""
    for first in range(0, count, CHUNK):
        chunk = []
        for number in range(first, min(first + CHUNK, count)):
            row = LOGITS[number % len(LOGITS)][None]
            found = change(number, row)
            ours = found if isinstance(found, BaseException) else {"y": found}
            chunk.append(Pair({"y": row}, ours, 0.01, 0.01 * ratio, f"job {number}"))
        yield chunk


def same(_: int, row: Array) -> Array:
    return row.copy()


def canary(validator: Validator | None = None, **limits: float) -> Canary:
    return Canary({"y": validator or ClassifierValidator()}, **limits)  # type: ignore[arg-type]


def test_equal_outputs_pass_after_enough_pairs_and_not_before():
    """INSUFFICIENT with the number that is missing, then PASS."""
    judge = canary()
    verdicts = [judge.observe(chunk) for chunk in pairs(same)]
    assert {verdict.verdict for verdict in verdicts[:-1]} == {Verdict.INSUFFICIENT}
    assert verdicts[0].reasons == ("50 pairs, expected at least 1500",)
    assert (verdicts[-1].verdict, verdicts[-1].reasons, verdicts[-1].pairs) == (Verdict.PASS, (), 1500)
    assert verdicts[-1].figures["y.agreement"] == 1


def test_nan_in_one_of_500_is_refused_by_the_row():
    """The pair is named, and no pair after its chunk is taken in."""
    taken = iter(pairs(lambda number, row: row * np.nan if number % 500 == 499 else row))
    verdict = canary().run(taken)
    assert (verdict.verdict, verdict.pairs) == (Verdict.FAIL, 500)
    assert verdict.reasons == ("y: NaN or infinity, expected finite numbers (1 of 500 rows)",)
    assert verdict.worst == ("job 499",)
    assert len(list(taken)) == (MIN_PAIRS - 500) // CHUNK


def test_a_candidate_that_raises_is_refused_and_does_not_crash():
    """The class of the exception is told, its text is not: it may repeat an input."""
    verdict = canary().run(pairs(lambda number, row: ValueError("4711") if number % 100 == 99 else row))
    assert (verdict.verdict, verdict.pairs) == (Verdict.FAIL, 100)
    assert verdict.reasons == ("the candidate raised ValueError (1 of 100 pairs)",)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _, row: row[:, :9], "y: shape (1, 9), expected (1, 10)"),
        (lambda _, row: np.concatenate([row, row]), "y: shape (2, 10), expected (1, 10)"),
        (lambda _, row: row.astype(object), "y: dtype object, expected numbers"),
        (lambda _, row: np.float32(1.0) * row[0, 0], "y: shape (), expected (1, 10)"),
    ],
)
def test_outputs_of_another_shape_are_refused(change: Callable[[int, Array], Array], reason: str):
    """In the first chunk, with the number of rows."""
    verdict = canary().run(pairs(lambda number, row: np.asarray(change(number, row)) if number == 7 else row))
    assert (verdict.verdict, verdict.pairs, verdict.worst) == (Verdict.FAIL, CHUNK, ("job 7",))
    assert verdict.reasons[0].startswith(reason)


def test_a_missing_output_is_the_candidates_fault_and_a_missing_expected_one_is_ours():
    """A candidate with fewer outputs fails. Pairs without the served output are an error of the caller."""
    row = LOGITS[:1]
    assert canary().observe([Pair({"y": row}, {"z": row})]).reasons == ("y: missing (1 of 1 pairs)",)
    with pytest.raises(InvalidInput, match=r"y: missing in the expected outputs\. Expected: y"):
        canary().observe([Pair({"z": row}, {"y": row})])


def flips(every: int) -> Callable[[int, Array], Array]:
    """Changes the best class of one row of `every`, by less than the limit of the change."""

    def change(number: int, row: Array) -> Array:
        if number % every:
            return row
        ours = row.copy()
        best, second = np.argsort(row[0])[-2:][::-1]
        ours[0, best] = ours[0, second] - 1e-3
        return ours

    return change


def test_a_rare_disagreement_is_judged_at_the_end_by_its_interval():
    """One of 500 is within 99 %, one of 120 is too near to the limit to be sure, one of 50 is beyond it."""
    wide = ClassifierValidator(1e9, 0.99)
    verdicts = {every: canary(wide).run(pairs(flips(every))) for every in (500, 120, 50)}
    assert {every: verdict.verdict for every, verdict in verdicts.items()} == {
        500: Verdict.PASS,
        120: Verdict.MARGINAL,
        50: Verdict.FAIL,
    }
    assert verdicts[50].reasons[0].startswith("y: agreement 0.98")
    assert 2 * CHUNK < verdicts[50].pairs <= MIN_PAIRS


def test_a_frequent_disagreement_is_refused_early():
    """One of five needs no 1,500 pairs; one early miss alone refuses nothing."""
    wide = ClassifierValidator(1e9, 0.99)
    assert canary(wide).run(pairs(flips(5))).pairs <= 2 * CHUNK
    assert canary(wide).observe(next(pairs(flips(10**6)))).verdict is Verdict.INSUFFICIENT


def test_looking_after_each_chunk_refuses_few_right_candidates():
    """A candidate that agrees in 99.5 %, against a limit of 99 %, is seldom stopped early, although it is looked at
    30 times."""
    rng = np.random.default_rng(2015)
    stopped = 0
    for _ in range(50):
        misses = frozenset(np.flatnonzero(rng.random(MIN_PAIRS) < 0.005).tolist())

        def change(number: int, row: Array, misses: frozenset[int] = misses) -> Array:
            return np.roll(row, 1) if number in misses else row

        judge = canary(ClassifierValidator(1e9, 0.99), min_pairs=MIN_PAIRS + 1)
        stopped += judge.run(pairs(change)).verdict is Verdict.FAIL
    assert stopped <= 2


@settings(max_examples=15)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_chunks_of_any_size_give_the_same_verdict(sizes: list[int]):
    """Only the figures of neighbours depend on the chunks."""
    flat = [pair for chunk in pairs(flips(40), 200) for pair in chunk]
    whole = canary(ClassifierValidator(1e9, 0.9), min_pairs=200).observe(flat)
    judge, start = canary(ClassifierValidator(1e9, 0.9), min_pairs=200), 0
    for size in (*sizes, len(flat)):
        verdict = judge.observe(flat[start : start + size])
        start += size
    assert (verdict.verdict, verdict.pairs) == (whole.verdict, whole.pairs)
    assert verdict.figures == pytest.approx(whole.figures)


def test_the_ratio_of_latencies_is_told_and_may_be_limited():
    """Seconds of the candidate over those of the served version; a limit counts from 100 timed pairs on."""
    assert canary().run(pairs(same, ratio=0.5)).latency_ratio == pytest.approx(0.5)
    assert canary().run(pairs(same)).latency_ratio is None
    slow = canary(max_latency_ratio=1.2).run(pairs(same, ratio=1.5))
    assert (slow.verdict, slow.pairs) == (Verdict.FAIL, 100)
    assert slow.reasons == ("latency_ratio 1.5, expected at most 1.2",)


def test_rankings_are_judged_job_by_job():
    """Scores of one job are the ranking of its documents: joined with those of others they would be another one."""
    scores = RNG.standard_normal((200, 8, 1))
    # Each job on a scale of its own: one ranking over all rows would be another one.
    chunk = [Pair({"y": each}, {"y": each * 10.0**number}) for number, each in enumerate(scores)]
    assert canary(RerankerValidator(), min_pairs=200).observe(chunk[:100]).verdict is Verdict.INSUFFICIENT
    assert canary(RerankerValidator(), min_pairs=200).observe(chunk).verdict is Verdict.PASS
    wrong = [Pair({"y": each}, {"y": -each}) for each in scores]
    assert canary(RerankerValidator(), min_pairs=200).observe(wrong).verdict is Verdict.FAIL


def test_jobs_of_other_lengths_are_no_rows_of_each_other():
    """Token sequences of two lengths are compared without padding against each other."""
    short, long = np.arange(1, 5)[None], np.arange(1, 9)[None]
    judge = canary(GenerationValidator(), min_pairs=4)
    chunk = [Pair({"y": short}, {"y": short}), Pair({"y": long}, {"y": long})] * 2
    found = judge.observe(chunk).comparisons["y"]
    assert (found.rows, found.figures["token_agreement"].count) == (4, 24)


def test_a_custom_validator_that_changes_its_limits_fails():
    """Figures of two limits are not one figure: the canary says so and goes on."""

    class Moody:
        limit = 1.0

        def compare(self, candidate: Array, expected: Array) -> Comparison:
            self.limit += 1
            return Comparison(len(expected), {"mood": Figure.largest(0.0, self.limit)})

    verdict = canary(Moody()).run(pairs(same))
    assert verdict.verdict is Verdict.FAIL
    assert "found a largest with limit 3.0, expected a largest with limit 2.0" in verdict.reasons[0]


def test_a_verdict_is_plain_data_with_intervals():
    """For reports: every figure with its limit, its observations and its interval, also after an infinite one."""
    verdict = canary(ClassifierValidator(1e9, 0.99)).run(pairs(flips(500), ratio=2.0))
    data = json.loads(json.dumps(verdict.as_data(), allow_nan=False))
    agreement = data["figures"]["y.agreement"]
    assert (agreement["limit"], agreement["count"], agreement["verdict"]) == (0.99, 1500, "PASS")
    low, high = agreement["interval"]
    assert agreement["value"] == pytest.approx(1497 / 1500)
    assert 0.99 < low < agreement["value"] < high < 1
    assert data["latency_ratio"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("validators", "limits", "message"),
    [
        ({}, {}, "validators: found none"),
        ({"y": EmbeddingValidator()}, {"min_pairs": 0}, "min_pairs: found 0"),
        ({"y": EmbeddingValidator()}, {"max_latency_ratio": 0.0}, "max_latency_ratio: found 0"),
        ({"y": EmbeddingValidator()}, {"max_latency_ratio": float("nan")}, "max_latency_ratio: found nan"),
    ],
)
def test_impossible_canaries_are_refused(validators: dict[str, Validator], limits: dict[str, float], message: str):
    """The error says what was expected."""
    with pytest.raises(InvalidInput, match=message):
        Canary(validators, **limits)  # type: ignore[arg-type]


def test_a_canary_without_pairs_says_so():
    """Before the first chunk, and after an empty one."""
    judge = canary()
    assert judge.run([]) == judge.verdict == judge.observe([])
    assert judge.verdict.verdict is Verdict.INSUFFICIENT


def test_states_of_two_canaries_merge_to_that_of_one():
    """Also through JSON, with infinite figures and problems: the verdict is that on all pairs."""
    rows = list(LOGITS[:4, None])
    worse = [row + np.float32(np.inf if number == 3 else 0.001 * number) for number, row in enumerate(rows)]
    chunk = [
        Pair({"y": row}, {"y": ours}, 1.0, 2.0, f"job {n}")
        for n, (row, ours) in enumerate(zip(rows, worse, strict=True))
    ]
    chunk.append(Pair({"y": rows[0]}, NoOutputs("the candidate took too long"), name="late"))
    whole, first, second = canary(), canary(), canary()
    whole.observe(chunk[:2])
    whole.observe(chunk[2:])
    first.observe(chunk[:2])
    second.observe(chunk[2:])
    merged = CanaryState.decode(first.state.encode()).merged(CanaryState.decode(second.state.encode()))
    assert merged == whole.state
    assert merged.verdict().reasons == whole.verdict.reasons
    assert "the candidate took too long (1 of 5 pairs)" in merged.verdict().reasons


@pytest.mark.parametrize("text", ["", "[]", "{", '{"pairs": "many"}', '{"comparisons": {"y": 1}}'])
def test_a_state_that_cannot_be_read_is_refused(text: str):
    """With one error, whatever the text is."""
    with pytest.raises(InvalidInput, match="The state of a canary cannot be read"):
        CanaryState.decode(text)
