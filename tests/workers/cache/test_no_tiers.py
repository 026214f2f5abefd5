"""CF-030: without persisted_encrypted a worker writes no cache to the disk, and asks no other server for answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock import Client
from tests.flow.conftest import probe
from tests.packages import write_double
from tests.servers import RedisServer, WorkerProcess, wait_until

X = np.ones((1, 4), np.float32)


@pytest.mark.parametrize("mode", ["ephemeral", "hashes_only"])
def test_cache_stays_in_memory(
    mode: str, shared_redis: RedisServer, redis_server: RedisServer, models_root: Path, tmp_path: Path, slot: str
):
    """The server of cache.redis_url gets no command, and the home no database of a cache, while answers are cached."""
    write_double(models_root, slot)
    environment = {
        "PENSTOCK_INFERENCE_PRIVACY_MODE": mode,
        "PENSTOCK_INFERENCE_CACHE_REDIS_URL": redis_server.url,
        "PENSTOCK_L2_ENCRYPTION_KEY": "00" * 32,
        # The client has no key.
        "PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS": "off",
    }
    folder = tmp_path / "worker"
    folder.mkdir()
    worker = WorkerProcess(shared_redis, models_root, folder, name=f"{slot}@test", environment=environment)
    with redis_server.monitor() as of_the_monitor:
        pass
    with redis_server.monitor() as commands:
        try:
            worker.start()
            with Client(shared_redis.url) as client:
                answers = [client.submit(slot, {"x": X}).result(180)["y"].tolist() for _ in range(2)]
                wait_until(lambda: "penstock_cache_hits_total{" in str(probe(worker, "/metrics")), 30, "a hit")
        finally:
            worker.stop()
    assert commands == of_the_monitor
    assert answers == [[[2, 2, 2, 2]]] * 2
    assert sorted(path.name for path in folder.rglob("*") if "cache" in path.name and path.is_file()) == []
    assert sorted(path.name for path in folder.rglob("*.db*")) == []
