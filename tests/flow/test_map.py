"""map: many rows in, as many out, in order, with a bounded number on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from penstock import AsyncClient, Client
from penstock.registry.errors import ConfigurationError, InvalidInput, ModelError
from tests.flow.conftest import Fleet

ROWS = [np.array([number, 0, 0, 0], np.float32) for number in range(300)]


def _firsts(rows: list[np.ndarray]) -> list[float]:
    return [float(row[0]) for row in rows]


def test_rows_come_back_in_order(client: Client):
    """A row in, a row out, in any batches; lists and mappings are items too."""
    answers = client.map("double", ROWS)
    assert answers[0].shape == (4,)
    assert _firsts(answers) == [number * 2 for number in range(300)]
    assert _firsts(client.map("double", [[1, 2, 3, 4]])) == [2]
    (whole,) = client.map("double", [{"x": np.ones((2, 4), np.float32)}])
    assert whole["y"].shape == (2, 4)


def test_asyncio_rows_come_back_in_order(fleet: Fleet):
    """As the blocking client."""

    async def double_all() -> list[np.ndarray]:
        async with AsyncClient(fleet.server.url) as client:
            return await client.map("double", ROWS, window=32)

    assert _firsts(asyncio.run(double_all())) == [number * 2 for number in range(300)]


def test_progress_counts_finished_items(client: Client, capsys: pytest.CaptureFixture[str]):
    """A callable gets every count once, rising; True draws a bar on stderr."""
    counts: list[int] = []
    client.map("double", ROWS[:50], progress=counts.append)
    assert counts == list(range(1, 51))
    client.map("double", ROWS[:50], progress=True)
    assert "50/50" in capsys.readouterr().err


def test_failures_are_raised_or_returned(client: Client):
    """on_error: the first failure is raised, or each stands in its place; another word is refused."""
    rows = [np.array([-1 if number in (3, 7) else number, 0, 0, 0], np.float32) for number in range(10)]
    with pytest.raises(ModelError, match="a negative row"):
        client.map("raiser", rows)
    answers = client.map("raiser", rows, on_error="return")
    assert [number for number, answer in enumerate(answers) if isinstance(answer, ModelError)] == [3, 7]
    assert answers[9][0] == 18
    with pytest.raises(ConfigurationError, match="Expected 'raise' or 'return'"):
        client.map("raiser", rows, on_error="ignore")  # type: ignore[call-overload]


def test_refused_item_names_the_input(client: Client):
    """An item of another shape is refused as a submit would be."""
    with pytest.raises(InvalidInput, match=r"x: shape \(1, 3\)"):
        client.map("double", [np.ones(3, np.float32)])


def test_window_bounds_what_is_outstanding(client: Client, fleet: Fleet):
    """However long the input, no more than `window` jobs are taken from it ahead of the results."""
    taken = answered = most = 0

    def rows() -> Iterator[np.ndarray]:
        nonlocal taken, most
        for row in ROWS:
            taken += 1
            most = max(most, taken - answered)
            yield row

    def note(count: int) -> None:
        nonlocal answered
        answered = count

    client.map("double", rows(), window=16, progress=note)
    assert taken == 300
    assert 8 < most <= 16
