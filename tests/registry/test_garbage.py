"""The settings of the garbage collector in a process of ours."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from penstock.registry import garbage


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Gives this process its own settings back."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_imports_trigger_few_collections():
    """Until a worker is ready, 10,000 containers that stay cause fewer collections than before."""

    def collections() -> int:
        before = sum(each["collections"] for each in gc.get_stats())
        kept = [[number] for number in range(30_000)]
        assert len(kept) == 30_000
        return int(sum(each["collections"] for each in gc.get_stats()) - before)

    usual = collections()
    garbage.collect_seldom()
    assert collections() < usual / 5


def test_frozen_objects_are_not_looked_through_again():
    """What a worker has loaded takes part in no collection any more."""
    held = [[number] for number in range(1_000)]
    garbage.freeze()
    assert gc.get_freeze_count() > len(held)
    assert gc.get_threshold()[0] == 10_000
