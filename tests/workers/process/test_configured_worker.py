"""CF-002: a worker shows the settings that it read in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from celery import Celery

from tests.packages import write_double
from tests.servers import RedisServer, WorkerProcess, wait_until

PYPROJECT = """
[tool.penstock.inference]
enabled = true
max_level = 1
frameworks = ["pytorch"]

[tool.penstock.inference.batching]
max_wait_ms = 7.5

[tool.penstock.inference.cache]
redis_url = "redis://:a-password@localhost:1/0"
"""


def test_inspect_shows_the_settings_of_the_folder(shared_redis: RedisServer, models_root: Path, tmp_path: Path):
    """CF-002: `inspect stats` shows the settings of a worker beside a pyproject.toml, and no secret."""
    write_double(models_root, "configured-double")
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PYPROJECT)
    environment = {"PENSTOCK_INFERENCE_BATCHING_MAX_BATCH_SIZE": "9", "PENSTOCK_SIGNING_KEYS": "k1:" + "A" * 43 + "="}
    worker = WorkerProcess(shared_redis, models_root, folder, name="shown@test", environment=environment)
    try:
        worker.start()
        with Celery("remote", broker=shared_redis.celery_url, set_as_current=False) as app:
            inspect = app.control.inspect([worker.name], timeout=3, limit=1)  # asked again: it may not listen yet
            stats: dict[str, Any] = wait_until(inspect.stats, 60, "the worker answers")[worker.name]
    finally:
        worker.stop()
    inference = stats["inference"]
    assert (inference["enabled"], inference["max_level"], inference["frameworks"]) == (True, 1, ["pytorch"])
    assert (inference["batching"]["max_wait_ms"], inference["batching"]["max_batch_size"]) == (7.5, 9)
    assert "a-password" not in str(stats)
    assert "A" * 43 not in str(stats)
