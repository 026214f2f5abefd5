"""The wheel of this checkout, built once, and environments to install it into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.install.environments import Environment, InstalledWorker, build, copy_sources
from tests.servers import RedisServer


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, with the secrets that compose/new-secrets.sh would have written."""
    sources = copy_sources(tmp_path_factory.mktemp("sources") / "checkout")
    (sources / "compose" / ".env").write_text("REDIS_PASSWORD=secret\n")
    (sources / "compose" / "secrets").mkdir()
    (sources / "compose" / "secrets" / "token").write_text("secret\n")
    return sources


@pytest.fixture(scope="session")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return build(sources, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture
def install(wheel: Path, tmp_path: Path) -> Callable[[str], Environment]:
    """An empty environment with the wheel and an extra, such as `[worker]`."""

    def install(extra: str) -> Environment:
        environment = Environment(tmp_path / "environment")
        environment.install(f"penstock{extra} @ {wheel.as_uri()}")
        return environment

    return install


StartInstalled = Callable[..., InstalledWorker]
"""(environment, server, models_root, *command) -> a worker that is ready."""


@pytest.fixture
def start_installed(tmp_path: Path) -> Iterator[StartInstalled]:
    """Starts workers of other environments, and kills those that the test leaves."""
    with ExitStack() as ends:

        def start(environment: Environment, server: RedisServer, models_root: Path) -> InstalledWorker:
            folder = tmp_path / "worker"
            folder.mkdir(exist_ok=True)
            worker = InstalledWorker(server, models_root, folder, name="installed")
            worker.environment = environment
            ends.callback(worker.stop)
            worker.start(60)
            return worker

        yield start
