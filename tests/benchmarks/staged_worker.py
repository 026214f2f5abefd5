"""A Penstock worker that writes down where its CPU time goes: `python -m tests.benchmarks.staged_worker worker ...`.

    stage's method -> CPU time of its thread before and after -> sums in the file STAGES_FILE names, when it ends

Stages that contain one another count each moment once, in the innermost. What no stage covers is the rest of its
thread; threads are told apart by name.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

__all__ = ["STAGES", "STAGES_FILE", "Stages"]

STAGES_FILE: Final = "BENCH_STAGES_FILE"
"""The environment variable that names the file."""

STAGES: Final = (
    ("penstock.workers.transfers", "JobTransfers.admit", "open: verify, decode, check"),
    ("penstock.workers.drain", "Drain._dispatch", "batch"),
    ("penstock.workers.executor", "_answer", "forward: join rows, model, split answers"),
    ("penstock.workers.completer", "Completer.seal", "seal results"),
    ("penstock.registry.broker.redis_scripts", "commit", "write commits"),
    ("penstock.registry.broker.redis_streams", "RedisStreams.exchange", "commit and claim: round trip"),
    ("penstock.registry.broker.redis_streams", "RedisStreams.arm", "blocking claim: round trip"),
    ("penstock.registry.broker.redis_streams", "RedisStreams.collect", "blocking claim: round trip"),
    ("penstock.workers.observe.metrics", "InferenceMetrics.batch", "metrics"),
    ("logging", "Logger.info", "log"),
    ("penstock.workers.completer", "Completer.settle", "settle: release, record events"),
    ("penstock.workers.drain", "Drain._run", "drain: rest of the loop"),
    ("penstock.workers.celery_bridge.events", "CeleryEventSender._flush", "events: encode and send"),
    ("penstock.workers.leases", "LeaseKeeper._run", "leases and report"),
)
"""Module, callable, and the name of the stage."""


class Stages:
    """CPU seconds by stage, of all threads together."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner = threading.local()

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its CPU time less that of the stages inside it added to `stage`."""

        @functools.wraps(function)
        def timing(*args: Any, **kwargs: Any) -> Any:
            inner = self._inner
            outside = getattr(inner, "seconds", 0.0)
            inner.seconds = 0.0
            begun = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - begun
                self.seconds[stage] += spent - inner.seconds
                inner.seconds = outside + spent

        return timing

    def instrument(self) -> None:
        """Puts a timer around each of STAGES."""
        for module, path, stage in STAGES:
            *owners, name = path.split(".")
            owner: Any = functools.reduce(getattr, owners, __import__(module, fromlist=["_"]))
            setattr(owner, name, self.timed(stage, getattr(owner, name)))


def main(arguments: list[str]) -> None:
    """Runs the worker that `celery -A penstock.workers.app` runs, and leaves the figures behind."""
    from celery.signals import worker_shutdown

    from penstock.workers.app import app

    stages, report = Stages(), Path(os.environ[STAGES_FILE])

    def leave(**_: Any) -> None:
        report.write_text(json.dumps(stages.seconds))

    worker_shutdown.connect(leave, weak=False)
    stages.instrument()
    app.worker_main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
