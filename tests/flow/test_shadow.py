"""The shadow queue end to end: a sample of answered jobs, a candidate, a report. SH-005, AR-087, AR-088."""

from __future__ import annotations

from pathlib import Path

from penstock import Client
from tests.conftest import StartWorker
from tests.flow.shadow_stage import (
    ShadowProcess,
    await_mirror,
    environ_of,
    run_shadow,
    wait_for_compared,
    write_versions,
)
from tests.servers import RedisServer


def test_candidate_is_compared_with_what_was_served(
    shared_redis: RedisServer, slot: str, models_root: Path, tmp_path: Path, start_worker: StartWorker
):
    """Every sampled job has one comparison; the report has agreement, figures and the worst pair."""
    wrong = """
    def build():
        return lambda inputs: {"y": inputs["x"] * 2 + (inputs["x"][:, :1] == 7).astype("float32") * 100}
    """
    write_versions(models_root, slot, wrong)
    environ = environ_of(shared_redis, models_root, tmp_path)
    worker = start_worker(shared_redis, models_root, models=[slot])
    started = run_shadow(environ, "start", slot, "--candidate", "1", "--sample", "1", "--canary-pairs", "0")
    assert started.exit_code == 0, started.output
    await_mirror(worker)
    shadow = ShadowProcess(slot, environ, tmp_path / "shadow")
    try:
        shadow.start()
        with Client(shared_redis.url) as client:
            jobs = client.submit_many(slot, [{"x": [[float(n), 1.0, 2.0, 3.0]]} for n in range(20)])
            answers = [job.result(60)["y"][0, 0] for job in jobs]
        assert answers == [2.0 * n for n in range(20)]
        report = wait_for_compared(environ, slot, 20)
    finally:
        shadow.stop()
    assert report["outcomes"] == {"pass": 19, "fail": 1}
