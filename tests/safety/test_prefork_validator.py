"""An async validator inside a child of Celery's prefork pool (AR-071)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from celery import Celery

from tests.servers import ROOT, RedisServer

pytestmark = pytest.mark.slow


def test_an_async_validator_is_awaited_in_a_prefork_child(shared_redis: RedisServer, slot: str):
    """The task judges a right and a wrong candidate one after the other: each comparison has an event loop."""
    url = f"redis+socket://{shared_redis.socket}"
    environment = {**os.environ, "VALIDATOR_BROKER": url}
    worker = [sys.executable, "-m", "celery", "-A", "tests.safety.prefork_validator", "worker", "-P", "prefork"]
    process = subprocess.Popen(
        [*worker, "-c", "1", "-Q", slot, "--without-gossip", "--without-mingle", "-n", f"{slot}@test"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        app = Celery("caller", broker=url, backend=url)
        with app:
            answers = [app.send_task("judge", (error,), queue=slot).get(timeout=120) for error in (0.1, 2.0)]
    finally:
        process.terminate()
        process.wait(180)
    assert answers == [["PASS", "", True], ["FAIL", "off 2, expected at most 0.5", True]]
