"""Which inputs one compiled graph serves."""

from __future__ import annotations

import pytest
import torch

from penstock.workers.runtime.compilable import CompilationRefused, Shapes, Span


def pair(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and a mask."""
    return torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, length)


@pytest.fixture
def shapes() -> Shapes:
    """Batches of 1 to 8 rows, 4 to 6 long."""
    return Shapes.of([pair(1, 4), pair(8, 6), pair(2, 5)])


def test_examples_span_their_dimensions(shapes: Shapes):
    """An extent that differs between examples is dynamic, from the smallest to the largest."""
    assert shapes.spans == ((Span(1, 8), Span(4, 6)),) * 2
    assert shapes.equal == (((0, 0), (1, 0)), ((0, 1), (1, 1)))


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("length", [4, 5, 6])
def test_every_extent_in_between_is_covered(shapes: Shapes, rows: int, length: int):
    """Also those that no example has."""
    assert shapes.cover(pair(rows, length))


@pytest.mark.parametrize(
    "tensors",
    [
        pair(0, 4),
        pair(9, 4),
        pair(2, 3),
        pair(2, 7),
        (pair(2, 4)[0], pair(3, 4)[1]),
        (pair(2, 4)[0], pair(2, 5)[1]),
        (pair(2, 4)[1], pair(2, 4)[1]),
        (pair(2, 4)[0],),
        (*pair(2, 4), torch.zeros(1)),
        (pair(2, 4)[0], torch.zeros(2, 4, 1)),
        (pair(2, 4)[0].to("meta"), pair(2, 4)[1]),
    ],
)
def test_other_inputs_are_not_covered(shapes: Shapes, tensors: tuple[torch.Tensor, ...]):
    """Extents out of range or unequal, another dtype, rank, device or number of arguments."""
    assert not shapes.cover(tensors)


def test_traced_example_has_no_extent_of_one(shapes: Shapes):
    """A graph that is traced with an extent of 1 would be for that extent alone."""
    assert [len(one) for one in shapes.traced([pair(1, 4), pair(8, 6)])] == [8, 8]
    with pytest.raises(CompilationRefused, match="Every example has a dynamic extent below 2"):
        shapes.traced([pair(1, 4), pair(1, 6)])


def test_sweep_takes_each_dimension_through_all_extents(shapes: Shapes):
    """Guards are checked for every extent of a dimension, with the others at both ends."""
    swept = {(first[0], first[1]) for first, _ in shapes.sweep()}
    assert swept == {(rows, length) for rows in range(1, 9) for length in (4, 6)} | {
        (rows, length) for rows in (1, 8) for length in (4, 5, 6)
    }
    assert all(first == second for first, second in shapes.sweep())


def test_fixed_shapes_are_swept_once():
    """A model without dynamic dimensions has one shape."""
    assert list(Shapes.of([pair(2, 3)]).sweep()) == [[[2, 3], [2, 3]]]


@pytest.mark.parametrize(
    "examples",
    [[pair(2, 3), pair(2, 4)[::-1]], [pair(2, 3), (torch.zeros(2, 3, dtype=torch.int64),)], [], [()]],
)
def test_examples_of_different_kinds_are_refused(examples: list):
    """One graph has one number of arguments, and one dtype and rank for each."""
    with pytest.raises(CompilationRefused):
        Shapes.of(examples)
