"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.servers import ROOT

PACKAGES = ("compose", "producers", "registry", "safety", "testing", "workers")
MODULES = sorted(
    ".".join(("penstock", *path.relative_to(ROOT).with_suffix("").parts))
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("module", MODULES)
def test_examples_are_true(module: str):
    """Each example gives what its docstring shows."""
    results = doctest.testmod(importlib.import_module(module))
    assert results.failed == 0
    assert results.attempted > 0
