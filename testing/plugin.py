"""Fixtures for pytest, found by the entry point `pytest11`: they are there wherever Penstock is installed.

    penstock_models_root (session) -> penstock_models -> penstock_client, penstock_async_client
                                  `-> penstock_worker (session): Redis and a worker, each a process of its own

A project overrides the first two in its conftest.py. This module imports nothing that costs: pytest does it at every
start, also in projects that use no fixture of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from penstock.producers.async_client import AsyncClient
    from penstock.producers.client import Client
    from penstock.testing.model import Served
    from penstock.testing.stack import WorkerStack

__all__ = [
    "penstock_async_client",
    "penstock_client",
    "penstock_models",
    "penstock_models_root",
    "penstock_worker",
]


@pytest.fixture(scope="session")
def penstock_models_root(pytestconfig: pytest.Config) -> Path:
    """The folder of the model packages: that of the settings, which is `models` in pytest's root folder by default."""
    from penstock.registry.settings import Settings

    return pytestconfig.rootpath / Settings.load(cwd=pytestconfig.rootpath).inference.repo_root


@pytest.fixture
def penstock_models(penstock_models_root: Path) -> Mapping[str, Served]:
    """What `penstock_client` serves, by name. Override it to serve functions; by default: every package."""
    from penstock.registry.package import discover

    found = discover(penstock_models_root) if penstock_models_root.is_dir() else []
    names = dict.fromkeys(each.name for each in found)
    if not names:
        pytest.fail(
            f"There is no model package in the folder {penstock_models_root.name}. Expected one, or a fixture "
            "penstock_models that returns {name: function or path}",
            pytrace=False,
        )
    return {name: penstock_models_root / name for name in names}


@pytest.fixture
def penstock_client(penstock_models: Mapping[str, Served]) -> Iterator[Client]:
    """A Client of the models, in memory: no Redis, no other process. A new one for each test."""
    from penstock.producers.client import Client

    with Client.in_memory(penstock_models) as client:
        yield client


@pytest.fixture
def penstock_async_client(penstock_models: Mapping[str, Served]) -> Iterator[AsyncClient]:
    """An AsyncClient of the models, in memory, for the event loop of the test, whichever plugin runs it."""
    from penstock.testing.async_client import InMemoryAsyncClient

    client = InMemoryAsyncClient(penstock_models)
    try:
        yield client
    finally:
        client.close_worker()


@pytest.fixture(scope="session")
def penstock_worker(penstock_models_root: Path) -> Iterator[WorkerStack]:
    """A real worker of all packages over a private Redis server, for the whole session.

    The test is skipped where no Redis server or no worker is installed; where CI=true it fails.
    """
    from penstock.testing.stack import missing, worker_stack

    if reason := missing():
        _leave_out(reason)
    with worker_stack(penstock_models_root, os.environ) as stack:
        yield stack


def _leave_out(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI needs a worker. {reason}", pytrace=False)
    pytest.skip(reason)
