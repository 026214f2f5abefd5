"""The stages of the breakdown by CPU time name code that exists."""

from __future__ import annotations

import importlib
from functools import reduce

import pytest

from tests.benchmarks.staged_worker import STAGES


@pytest.mark.parametrize(("module", "path"), [(module, path) for module, path, _ in STAGES])
def test_stage_names_a_function(module: str, path: str):
    """A stage that was renamed in the product would end the staged worker at its start."""
    assert callable(reduce(getattr, path.split("."), importlib.import_module(module)))
