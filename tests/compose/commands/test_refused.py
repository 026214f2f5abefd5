"""Every command that needs a broker which refuses its URL: one line, at once, with exit status 78 and no secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.workers.process.exit_status import EXIT_CONFIGURATION
from tests.compose.conftest import penstock
from tests.packages import write_double
from tests.servers import RedisServer

COMMANDS = [
    "status",
    "workers",
    "top --once",
    "submit double -i x=[[1,2,3,4]]",
    "dead list double",
    "dead show double 1-0",
    "queue pause double",
    "queue purge double --yes",
    "models list",
    "models levels double",
    "bench --model double --count 1",
    "worker --device cpu",
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("unix://:hunter2@{socket}", "the URL has a password, and the server's default user has none"),
        ("unix://{socket}?db=99", "the server has no database 99"),
    ],
    ids=["password", "database"],
)
def test_the_refusal_is_one_line(shared_redis: RedisServer, tmp_path: Path, command: str, url: str, text: str):
    """The line names the address without the password and the path, and the side to change."""
    write_double(tmp_path / "models")
    environ = {
        "PENSTOCK_REDIS_URL": url.format(socket=shared_redis.socket),
        "PENSTOCK_INFERENCE_REPO_ROOT": str(tmp_path / "models"),
    }
    with shared_redis.client() as observer:
        before = observer.info("stats")["total_connections_received"]
        shown = penstock(tmp_path, *command.split(), **environ)
        # With repeated tries there would be one each 50 ms, for 5 s.
        assert observer.info("stats")["total_connections_received"] - before <= 2
    assert shown.exit_code == EXIT_CONFIGURATION
    assert shown.stderr.startswith(f"Error: the broker's unix socket, database {99 if '99' in url else 0}: {text}")
    assert shown.stderr.count("\n") == 1
    assert "hunter2" not in shown.output + shown.stderr


def test_a_worker_asks_celerys_broker_too(shared_redis: RedisServer, tmp_path: Path):
    """Its Celery side would repeat the connection for ever."""
    write_double(tmp_path / "models")
    environ = {
        "PENSTOCK_REDIS_URL": shared_redis.url,
        "PENSTOCK_CELERY_URL": f"unix://{shared_redis.socket}?db=77",
        "PENSTOCK_INFERENCE_REPO_ROOT": str(tmp_path / "models"),
    }
    shown = penstock(tmp_path, "worker", "--device", "cpu", **environ)
    assert shown.exit_code == EXIT_CONFIGURATION
    assert "has no database 77" in shown.stderr
