"""The built-in validators: an output of a candidate and the expected one -> figures with limits.

    TensorValidator      every element within atol + rtol * |expected|: a candidate of the same precision
    ExactValidator       integers, booleans, labels
    EmbeddingValidator   embedding: direction of the vectors, and their neighbours
    ClassifierValidator  classifier: the top classes, and the change of the logits
    RerankerValidator    reranker: the order of the documents
    GenerationValidator  generation: tokens and lengths
    EncoderValidator     encoder: absolute errors of hidden states

NaN and infinity in a candidate are always a problem, with the number of rows that have them. Pure NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from penstock.registry.errors import InvalidInput
from penstock.registry.tensors import Array
from penstock.safety.validators.comparison import Comparison, Figure

__all__ = [
    "ClassifierValidator",
    "EmbeddingValidator",
    "EncoderValidator",
    "ExactValidator",
    "GenerationValidator",
    "RerankerValidator",
    "TensorValidator",
]

_AS_NEAR: Final = 1e-3
_MOST_NEIGHBOUR_ROWS: Final = 512
"""Neighbours are looked for among so many rows at a time: the work grows with the square."""


@dataclass(frozen=True, slots=True)
class TensorValidator:
    """Every element within atol + rtol * |expected|: for a candidate of the same precision."""

    atol: float
    rtol: float

    def compare(self, candidate: Array, expected: Array) -> Comparison:
        """Figures: max_error; max_error_ratio, whose limit is 1. Arrays of numbers, of any equal shape."""
        if (failed := _misfit(candidate, expected)) is not None:
            return failed
        error = np.abs(candidate.astype(np.float64) - expected.astype(np.float64))
        allowed = self.atol + self.rtol * np.abs(expected.astype(np.float64))
        # With a tolerance of 0, equal elements are accepted.
        ratio = np.divide(error, allowed, out=np.where(error > 0, np.inf, 0.0), where=allowed > 0)
        figures = {
            "max_error": Figure.largest(error.max(initial=0.0), None),
            "max_error_ratio": Figure.largest(ratio.max(initial=0.0), 1.0),
        }
        return Comparison(_rows(expected), figures)


@dataclass(frozen=True, slots=True)
class ExactValidator:
    """Equal in nearly every element: for integers, booleans and labels."""

    min_agreement: float = 1.0

    def __post_init__(self) -> None:
        _check_shares(min_agreement=self.min_agreement)

    def compare(self, candidate: Array, expected: Array) -> Comparison:
        """Figures: agreement, the share of equal elements."""
        if problem := _wrong_shape(candidate, expected):
            return Comparison.failed(problem, _rows(expected))
        hits = int(np.count_nonzero(candidate == expected))
        return Comparison(_rows(expected), {"agreement": Figure.share(hits, expected.size, self.min_agreement)})


@dataclass(frozen=True, slots=True)
class EmbeddingValidator:
    """Every vector has the direction of the expected one, and its nearest vectors are the same.

    min_cosine: of each vector, along the last axis. min_overlap: the mean share of its `neighbours` nearest vectors
    among the rows of one call that are nearest ones of the expected vector, too. A vector whose cosine is as high as
    theirs, within 0.001, counts as one: the order of equally near vectors means nothing.
    """

    min_cosine: float = 0.999
    min_overlap: float = 0.9
    neighbours: int = 10

    def __post_init__(self) -> None:
        _check_shares(min_overlap=self.min_overlap)
        if not -1 <= self.min_cosine <= 1:
            raise InvalidInput(f"min_cosine: found {self.min_cosine}, expected a number from -1 to 1")
        _check_count(neighbours=self.neighbours)

    def compare(self, candidate: Array, expected: Array) -> Comparison:
        """Figures: min_cosine; neighbour_overlap, if there are at least three vectors in a matrix (rows, width)."""
        if (failed := _misfit(candidate, expected)) is not None:
            return failed
        ours, theirs = candidate.astype(np.float64), expected.astype(np.float64)
        cosines = _cosines(ours, theirs)
        figures = {"min_cosine": Figure.smallest(cosines.min(initial=1.0), self.min_cosine, cosines.size)}
        if expected.ndim == 2 and len(expected) > 2:
            parts = range(0, len(expected), _MOST_NEIGHBOUR_ROWS)
            overlaps = [
                self._overlaps(ours[one : one + _MOST_NEIGHBOUR_ROWS], theirs[one : one + _MOST_NEIGHBOUR_ROWS])
                for one in parts
            ]
            figures["neighbour_overlap"] = Figure.mean(np.concatenate(overlaps), self.min_overlap, ideal=1.0)
        return Comparison(_rows(expected), figures)

    def _overlaps(self, ours: Array, theirs: Array) -> Array:
        """For each row, the share of its nearest rows that are nearest in the expected vectors."""
        count = min(self.neighbours, len(theirs) // 2)
        if count < 1:
            return np.empty(0)
        near, expected_near = _likeness(ours), _likeness(theirs)
        chosen = np.argpartition(-near, count - 1, axis=1)[:, :count]
        least = np.partition(expected_near, -count, axis=1)[:, -count][:, None]
        is_near = np.take_along_axis(expected_near, chosen, axis=1) >= least - _AS_NEAR
        shares: Array = is_near.mean(axis=1)
        return shares


@dataclass(frozen=True, slots=True)
class ClassifierValidator:
    """The same best class in nearly every row, and small changes everywhere: for logits.

    max_delta: the largest change, as a share of the largest expected number. min_agreement: the share of rows along
    the last axis with the same best class. top_k: with more than 1, the mean share of the expected `top_k` classes
    that are among the candidate's has this limit, too.
    """

    max_delta: float = 0.02
    min_agreement: float = 0.99
    top_k: int = 1

    def __post_init__(self) -> None:
        _check_shares(min_agreement=self.min_agreement)
        _check_count(top_k=self.top_k)

    def compare(self, candidate: Array, expected: Array) -> Comparison:
        """Figures: max_delta; agreement and top_k_agreement, if rows have more than one number."""
        if (failed := _misfit(candidate, expected)) is not None:
            return failed
        ours, theirs = candidate.astype(np.float64), expected.astype(np.float64)
        scale = float(np.abs(theirs).max(initial=0.0)) or 1.0
        delta = float(np.abs(ours - theirs).max(initial=0.0))
        figures = {"max_delta": Figure.largest(delta, self.max_delta, _rows(expected), scale=scale)}
        if expected.ndim > 1 and expected.shape[-1] > 1 and expected.size:
            same = ours.argmax(axis=-1) == theirs.argmax(axis=-1)
            figures["agreement"] = Figure.share(int(same.sum()), same.size, self.min_agreement)
            if 1 < self.top_k < expected.shape[-1]:
                shares = _top_shares(ours, theirs, self.top_k)
                figures["top_k_agreement"] = Figure.mean(shares, self.min_agreement, ideal=1.0)
        return Comparison(_rows(expected), figures)


@dataclass(frozen=True, slots=True)
class RerankerValidator:
    """The same order of documents: for scores of which only the order counts.

    A ranking is a row of a matrix (queries, documents), or all rows of one job: (documents,) or (documents, 1).
    min_correlation: the mean of Spearman's rank correlation over the rankings, ties with their average rank.
    min_top_agreement: the share of rankings with the same best document.
    """

    is_per_job: ClassVar[bool] = True

    min_correlation: float = 0.99
    min_top_agreement: float = 0.98

    def __post_init__(self) -> None:
        _check_shares(min_top_agreement=self.min_top_agreement)
        if not -1 <= self.min_correlation <= 1:
            raise InvalidInput(f"min_correlation: found {self.min_correlation}, expected a number from -1 to 1")

    def compare(self, candidate: Array, expected: Array) -> Comparison:
        """Figures: rank_correlation, top_agreement. Rankings without an order, as of one document, do not count."""
        if (failed := _misfit(candidate, expected)) is not None:
            return failed
        is_matrix = expected.ndim == 2 and expected.shape[1] > 1
        ours = candidate.astype(np.float64).reshape(len(expected) if is_matrix else 1, -1)
        theirs = expected.astype(np.float64).reshape(ours.shape)
        has_order = theirs.max(axis=1, initial=-np.inf) > theirs.min(axis=1, initial=np.inf)
        ours, theirs = ours[has_order], theirs[has_order]
        ranks = [_spearman(own, other) for own, other in zip(ours, theirs, strict=True)]
        # A candidate may pick any of several equally good documents, and may not call all documents equally good.
        best = np.take_along_axis(theirs, ours.argmax(axis=1)[:, None], axis=1)[:, 0] if len(ours) else np.empty(0)
        is_same = (best == theirs.max(axis=1, initial=-np.inf)) & (np.ptp(ours, axis=1) > 0) if len(ours) else best
        figures = {
            "rank_correlation": Figure.mean(np.array(ranks), self.min_correlation, ideal=1.0),
            "top_agreement": Figure.share(int(is_same.sum()), len(is_same), self.min_top_agreement),
        }
        return Comparison(_rows(expected), figures)


@dataclass(frozen=True, slots=True)
class GenerationValidator:
    """The same tokens in the same places, and texts of the same length.

    Integers are token ids (rows, length), padded at the end with `pad_id`. Texts are compared word by word.
    min_agreement: the share of places with the same token; a place that one side lacks is another token.
    max_length_change: the mean change of a row's length, as a share of the expected one.
    """

    min_agreement: float = 0.9
    max_length_change: float = 0.1
    pad_id: int = 0

    def __post_init__(self) -> None:
        _check_shares(min_agreement=self.min_agreement)

    def compare(self, candidate: Array, expected: Array) -> Comparison:
        """Figures: token_agreement, length_change. The rows may have other lengths than those expected."""
        if len(candidate) != len(expected) or candidate.dtype.kind != expected.dtype.kind:
            found, wanted = (f"{len(each)} rows of {each.dtype}" for each in (candidate, expected))
            return Comparison.failed(f"{found}, expected {wanted}", _rows(expected))
        if expected.dtype.kind not in "iuO":
            return Comparison.failed(f"dtype {expected.dtype}, expected token ids or text", _rows(expected))
        hits = places = 0
        changes = []
        for ours, theirs in zip(map(self._tokens, candidate), map(self._tokens, expected), strict=True):
            shorter = min(len(ours), len(theirs))
            hits += sum(one == other for one, other in zip(ours[:shorter], theirs[:shorter], strict=True))
            places += max(len(ours), len(theirs))
            changes.append(abs(len(ours) - len(theirs)) / max(1, len(theirs)))
        figures = {
            "token_agreement": Figure.share(hits, places, self.min_agreement),
            "length_change": Figure.mean(np.array(changes), self.max_length_change, ideal=0.0),
        }
        return Comparison(_rows(expected), figures)

    def _tokens(self, row: Array | str) -> list[object]:
        values = np.asarray(row, object if isinstance(row, str) else None).ravel()
        if values.dtype == object:
            return [word for text in values.tolist() for word in str(text).split()]
        used = np.flatnonzero(values != self.pad_id)
        return list(values[: used[-1] + 1].tolist()) if used.size else []


@dataclass(frozen=True, slots=True)
class EncoderValidator:
    """Small absolute errors: for hidden states, (rows, length, width) or any other shape."""

    max_error: float = 0.05
    max_mean_error: float = 0.005

    def compare(self, candidate: Array, expected: Array) -> Comparison:
        """Figures: max_error; mean_error, the mean of the rows' mean errors."""
        if (failed := _misfit(candidate, expected)) is not None:
            return failed
        error = np.abs(candidate.astype(np.float64) - expected.astype(np.float64))
        of_rows = error.reshape(len(error), -1).mean(axis=1) if error.size else np.empty(0)
        figures = {
            "max_error": Figure.largest(error.max(initial=0.0), self.max_error),
            "mean_error": Figure.mean(of_rows, self.max_mean_error, ideal=0.0),
        }
        return Comparison(_rows(expected), figures)


def _cosines(ours: Array, theirs: Array) -> Array:
    lengths = np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1)
    products = (ours * theirs).sum(axis=-1)
    # A vector of zeros has no direction. It equals only another one.
    both_are_zero: Array = np.asarray(1.0 - (ours.any(axis=-1) | theirs.any(axis=-1)))
    cosines: Array = np.divide(products, lengths, out=both_are_zero, where=lengths > 0)
    return cosines


def _likeness(vectors: Array) -> Array:
    """(rows, rows): the cosine of each row with each other one, and -2 with itself."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    likeness: Array = unit @ unit.T
    np.fill_diagonal(likeness, -2.0)
    return likeness


def _top_shares(ours: Array, theirs: Array, top_k: int) -> Array:
    """For each row, the share of its expected top classes that are among the candidate's."""
    ours, theirs = ours.reshape(-1, ours.shape[-1]), theirs.reshape(-1, theirs.shape[-1])
    chosen, wanted = (np.argpartition(-each, top_k - 1, axis=1)[:, :top_k] for each in (ours, theirs))
    shares: Array = (chosen[:, :, None] == wanted[:, None, :]).any(axis=2).mean(axis=1)
    return shares


def _spearman(ours: Array, theirs: Array) -> float:
    """Pearson's correlation of the ranks, ties with their average rank; 0 where `ours` has no order."""
    own, other = (_ranks(each) - (len(each) - 1) / 2 for each in (ours, theirs))
    scale = float(np.sqrt(np.square(own).sum() * np.square(other).sum()))
    return float((own * other).sum()) / scale if scale else 0.0


def _ranks(values: Array) -> Array:
    """From 0 on; equal values share the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Array = (ends - (counts + 1) / 2)[places]
    return ranks


def _rows(values: Array) -> int:
    return len(values) if values.ndim else 1


def _misfit(candidate: Array, expected: Array) -> Comparison | None:
    """The failed comparison of arrays that are no numbers, of other extents, or with NaN; None for all others."""
    rows = _rows(expected)
    if problem := _wrong_shape(candidate, expected):
        return Comparison.failed(problem, rows)
    for values in (candidate, expected):
        if values.dtype.kind not in "biuf":
            return Comparison.failed(f"dtype {values.dtype}, expected numbers", rows)
    # An expected NaN allows none in the candidate: nothing could be said about that row.
    is_finite = np.isfinite(candidate) & np.isfinite(expected)
    if is_finite.all():
        return None
    bad = int((~is_finite.reshape(rows, -1).all(axis=1)).sum())
    return Comparison.failed("NaN or infinity, expected finite numbers", rows, bad)


def _wrong_shape(candidate: Array, expected: Array) -> str:
    return "" if candidate.shape == expected.shape else f"shape {candidate.shape}, expected {expected.shape}"


def _check_shares(**shares: float) -> None:
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise InvalidInput(f"{name}: found {share}, expected a share from 0 to 1")


def _check_count(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InvalidInput(f"{name}: found {count}, expected at least 1")
