"""Models that change their process and do no harm: a real worker answers their jobs and all others."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

import numpy as np

from penstock import Client
from tests.faults.models import HARMLESS, write_misbehaving
from tests.packages import recorded_forwards, write_double
from tests.servers import RedisServer, WorkerProcess, wait_until


def x(*numbers: float) -> list[dict[str, np.ndarray]]:
    """One input per number."""
    return [{"x": np.array([[number, 0, 0, 0]], np.float32)} for number in numbers]


def test_a_worker_outlives_what_models_do_to_their_process(redis_server: RedisServer, tmp_path: Path):
    """Each of them in a batch of four: all four are answered, by one process, which SIGTERM still ends in order."""
    root, forward_log = tmp_path / "models", tmp_path / "forward_log"
    write_misbehaving(root, forward_log, "restless", [*HARMLESS.values()])
    write_double(root)
    folder = tmp_path / "worker"
    folder.mkdir()
    worker = WorkerProcess(redis_server, root, folder, name="restless@test")
    try:
        worker.start()
        with closing(Client(redis_server.url)) as client:
            for number, what in enumerate(HARMLESS, 1):
                jobs = client.submit_many("restless", x(1, 2, -number, 4))
                answers = [job.result(180)["y"][0, 0] for job in jobs]
                assert answers == [2, 4, -2 * number, 8], what
                assert client.submit("double", x(7)[0]).result(180)["y"][0, 0] == 14, what
        assert worker.is_running
        wait_until(lambda: not _living(worker.pid), 30, "children of the forks end")
        assert len(recorded_forwards(forward_log)) < 3 * len(HARMLESS), "no child of a fork ran a batch"
        worker.terminate()
        assert worker.wait(180) == 0, worker.tail()
    finally:
        worker.stop()


def _living(pid: int) -> list[str]:
    """The children of a process that are no zombies."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            facts = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            if facts["PPid"].strip() == str(pid) and not facts["State"].strip().startswith("Z"):
                found.append(status.parent.name)
    return found
