"""A paused stack and a broker without workers, for the commands of operators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import redis

from penstock import Client
from penstock.registry.queues import WORKERS_KEY, worker_key
from penstock.registry.settings import Settings
from penstock.registry.stack_file import with_broker
from tests.compose.conftest import penstock
from tests.packages import write_double
from tests.servers import RedisServer, wait_until

X: Final = {"x": [[1.0, 2.0, 3.0, 4.0]]}
"""The inputs of one job of `double`."""


def settings_of(home: Path) -> Settings:
    """The settings of a shell that knows only this home."""
    return with_broker(Settings.load(environ={"PENSTOCK_HOME": str(home)}))


@pytest.fixture
def paused(home: Path) -> Iterator[Client]:
    """A client of the stack, whose worker starts no job until the test resumes the model."""
    shown = penstock(home, "queue", "pause", "double", "--json")
    assert json.loads(shown.stdout) == {"model": "double", "paused": True}
    with Client.from_env(settings=settings_of(home)) as client:
        # A worker reads the pauses just before it reports: the second report from now on proves that it read ours.
        for _ in range(2):
            _await_report(home)
        yield client
    penstock(home, "queue", "purge", "double", "--yes")
    penstock(home, "queue", "resume", "double")


def _await_report(home: Path) -> None:
    with redis.Redis.from_url(settings_of(home).redis_url or "") as client:
        (name,) = client.zrange(WORKERS_KEY, 0, -1)
        left_ms = [int(client.pttl(worker_key(name.decode())))]

        def is_new() -> bool:
            left_ms.append(int(client.pttl(worker_key(name.decode()))))
            return left_ms[-1] > left_ms[-2]

        wait_until(is_new, 10, "the worker reports")


@pytest.fixture
def there(shared_redis: RedisServer, tmp_path: Path, slot: str) -> dict[str, str]:
    """The environment of a shell whose broker has a registered model and no worker."""
    environ = {"PENSTOCK_REDIS_URL": shared_redis.url}
    assert penstock(tmp_path, "models", "register", str(write_double(tmp_path, slot)), **environ).exit_code == 0
    return environ
