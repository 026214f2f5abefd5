"""What tests of the shadow share: a model in two versions, and a shadow worker as a process."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result

from penstock import Client
from penstock.compose.cli import main
from penstock.registry.broker.breakers import CANDIDATE, BreakerRecord, breaker_name
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.tensors import Array
from penstock.registry.webhook_secrets import new_secret
from tests.packages import write_package
from tests.receiver import Receiver
from tests.servers import ROOT, Process, RedisServer, WorkerProcess, wait_until

__all__ = [
    "DOUBLE",
    "ShadowProcess",
    "Traffic",
    "alerts_to",
    "await_mirror",
    "breaker_of",
    "environ_of",
    "report_of",
    "run_command",
    "run_shadow",
    "wait_for_compared",
    "write_versions",
]

DOUBLE = """
def build():
    return lambda inputs: {"y": inputs["x"] * 2}
"""


def write_versions(root: Path, name: str, candidate: str = DOUBLE, *, served: str = DOUBLE) -> None:
    """Version 2 is served, because it is the highest one; version 1 is the candidate."""
    write_package(root, name, candidate, version="1")
    write_package(root, name, served, version="2")


def environ_of(server: RedisServer, root: Path, folder: Path, **more: str) -> dict[str, str]:
    """The environment of an operator and of a shadow worker."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "PENSTOCK_HOME": str(folder / "home"),
        "PENSTOCK_REDIS_URL": server.url,
        "PENSTOCK_INFERENCE_REPO_ROOT": str(root),
        "PENSTOCK_INFERENCE_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def alerts_to(receiver: Receiver) -> dict[str, str]:
    """The environment of a process whose alerts go to this receiver."""
    return {
        "PENSTOCK_INFERENCE_SAFETY_ALERT_WEBHOOKS": receiver.url("/alerts"),
        "PENSTOCK_INFERENCE_WEBHOOKS_ALLOW": "127.0.0.1",
        "PENSTOCK_WEBHOOK_SECRETS": new_secret(),
    }


def breaker_of(server: RedisServer, model: str, version: str) -> BreakerRecord:
    """The breaker of a candidate, as Redis has it."""
    with closing(RedisBreakers.from_url(server.url)) as end:
        return end.breakers(model).records.get(breaker_name(model, version, CANDIDATE)) or BreakerRecord()


def run_command(environ: Mapping[str, str], *words: str) -> Result:
    """`penstock WORDS`, in this process, with this environment and no other variable of ours."""
    return CliRunner(env=dict(environ)).invoke(main, words)


def run_shadow(environ: Mapping[str, str], *words: str) -> Result:
    """`penstock shadow WORDS`."""
    return run_command(environ, "shadow", *words)


class Traffic:
    """Jobs in a thread until the block ends: row n is `n, 1, 2, 3`. expected: what row n is answered; it is checked."""

    def __init__(self, server: RedisServer, model: str, expected: Callable[[Array], Array], *, burst: int = 50) -> None:
        self.answered = 0
        self.problems: list[object] = []
        """Failed jobs and wrong answers."""
        self._server = server
        self._model = model
        self._expected = expected
        self._burst = burst
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._submit)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _submit(self) -> None:
        with Client(self._server.url) as client:
            while not self._is_over.is_set():
                rows = [
                    np.array([[number, 1, 2, 3]], np.float32)
                    for number in range(self.answered, self.answered + self._burst)
                ]
                jobs = client.submit_many(self._model, [{"x": row} for row in rows])
                for row, job in zip(rows, jobs, strict=True):
                    try:
                        answer = job.result(180)["y"]
                    except Exception as error:  # every one is a failed job
                        self.problems.append(error)
                    else:
                        if not np.array_equal(answer, self._expected(row)):
                            self.problems.append((row, answer))
                    self.answered += 1
                # The shadow worker has the same processors, and is to keep up.
                self._is_over.wait(0.05)


def report_of(environ: Mapping[str, str], model: str) -> dict[str, Any]:
    """The report as JSON."""
    shown = run_shadow(environ, "report", model, "--json")
    assert shown.exit_code == 0, shown.output
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


class ShadowProcess(Process):
    """`penstock shadow run MODEL`."""

    def __init__(self, model: str, environ: Mapping[str, str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder)
        self.model = model
        self._environ = {**environ, "PENSTOCK_CONFIG": ""}

    def start(self, priority: str = "normal", *words: str) -> ShadowProcess:
        """Start it; it waits for an order. It does not give way: the tests keep all processors busy.

        priority: empty for that of a user who says nothing. words: further options.
        """
        chosen = ["--priority", priority] if priority else []
        self._run("penstock", ["shadow", "run", self.model, *chosen, *words], self._environ)
        return self

    def start_anew(self, path: Path) -> ShadowProcess:
        """Start it by a Python of its own, which finds what is installed in this folder."""
        environ = {**self._environ, "PYTHONPATH": os.pathsep.join((self._environ["PYTHONPATH"], str(path)))}
        command = [sys.executable, "-m", "penstock", "shadow", "run", self.model, "--priority", "normal"]
        self._spawn(command, environ)
        return self

    def stop(self) -> None:
        """Kill it, frozen or not."""
        if self._child is not None:
            self.thaw()
            self.kill()


def await_mirror(worker: WorkerProcess, times: int = 1) -> None:
    """Return when the worker has followed so many orders."""
    wait_until(lambda: worker.output.read_text().count("answered jobs are mirrored") >= times, 30, "it is followed")


def wait_for_compared(environ: Mapping[str, str], model: str, count: int) -> dict[str, Any]:
    """The report, once it has so many pairs."""

    def enough() -> bool:
        found.update(report_of(environ, model))
        return bool(found["compared"] >= count)

    found: dict[str, Any] = {}
    wait_until(enough, 60, f"{count} pairs are compared")
    return found
