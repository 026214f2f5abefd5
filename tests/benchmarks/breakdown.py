"""Where a worker's CPU goes at saturation: a run of its own, with timers around the worker's stages."""

from __future__ import annotations

import json
import sys
from typing import Final

from tests.benchmarks import mlp
from tests.benchmarks.harness import Harness
from tests.benchmarks.report import Progress, Stage
from tests.benchmarks.scale import Scale
from tests.benchmarks.staged_worker import STAGES, STAGES_FILE
from tests.benchmarks.throughput import IN_FLIGHT
from tests.servers import WorkerProcess

__all__ = ["measure"]

_STOP_TIMEOUT_S: Final = 30.0
_WHOLE: Final = "the whole process while the jobs ran"


class StagedWorker(WorkerProcess):
    """A worker that leaves behind what its stages cost."""

    def launch(self) -> None:
        """See WorkerProcess.launch."""
        worker = [sys.executable, "-m", "tests.benchmarks.staged_worker", "worker"]
        self._spawn([*worker, "-P", "solo", "-c", "1", "-n", self.name], self._environment)


def measure(scale: Scale, say: Progress) -> list[Stage]:
    """CPU per job and stage, submit_many, 64 and 256 in flight."""
    taken = {in_flight: _run(scale.jobs, in_flight, say) for in_flight in IN_FLIGHT}
    names = [*dict.fromkeys(name for _, _, name in STAGES), _WHOLE]
    return [Stage(name, {in_flight: taken[in_flight].get(name, 0.0) for in_flight in taken}) for name in names]


def _run(jobs: int, in_flight: int, say: Progress) -> dict[str, float]:
    with Harness() as harness:
        server, folder = harness.redis(), harness.folder()
        environment = {**harness.settings, STAGES_FILE: str(folder / "stages")}
        worker = StagedWorker(server, mlp.MODELS, folder, name="w@bench", models=["mlp"], environment=environment)
        harness.started(worker)
        sample = harness.client("submit_many", server.url, worker=worker, broker=server).run(jobs, in_flight)
        say(f"breakdown: {in_flight} in flight: {sample.jobs_per_s:,.0f}/s with timers")
        worker.terminate()
        worker.wait(_STOP_TIMEOUT_S)
        seconds: dict[str, float] = json.loads((folder / "stages").read_text())
    return {name: spent / jobs * 1e6 for name, spent in seconds.items()} | {_WHOLE: sample.worker_us}
