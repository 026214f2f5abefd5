"""Fixtures of the drain's tests: a stepped harness, and the file in which models note their forwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.stepped import (
    SteppedHarness,
    open_harness,
)


@pytest.fixture
def harness(models_root: Path) -> Iterator[SteppedHarness]:
    """A harness with models that the test has written, or writes before it starts a worker."""
    yield from open_harness(models_root)


@pytest.fixture
def forward_log(tmp_path: Path) -> Path:
    """Where recorders note their forwards."""
    return tmp_path / "forward_log"
