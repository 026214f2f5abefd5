"""Extras: what is here, and the line about what is not."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from penstock.registry import extras


def test_nothing_is_missing_where_everything_is_installed():
    """The environment of the tests has every extra that the command knows."""
    assert {extra: extras.missing_package(extra) for extra in extras.EXTRAS} == dict.fromkeys(extras.EXTRAS, "")


@pytest.mark.parametrize(
    ("package", "distribution"),
    [("uvicorn", "uvicorn"), ("grpc_health", "grpcio-health-checking"), ("google.protobuf", "protobuf")],
)
def test_a_missing_package_is_named_as_it_is_installed(monkeypatch, package: str, distribution: str):
    """Also where the namespace around it is missing, as `google` is without protobuf."""
    found = importlib.util.find_spec

    def find(name: str):
        if name == package and "." in name:
            raise ModuleNotFoundError(name)
        return None if name == package else found(name)

    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(extras, "find_spec", find)
    assert extras.missing_package("gateway") == distribution
    assert extras.missing_package("cli") == ""
