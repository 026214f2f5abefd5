"""Two instances of a model that holds the interpreter's lock, against one copy: in processes, and in threads beside.

One worker for each way, with one model thread per copy; they take turns. Another user of the machine takes time from
two busy cores sooner than from one: so the best of many short turns counts, and the figure by CPU says what two cores
without other users would give.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import yaml

from penstock import Client
from tests.benchmarks import meter
from tests.benchmarks.harness import Harness
from tests.benchmarks.report import Progress, Row, verdict
from tests.benchmarks.scale import Scale
from tests.packages import write_package

__all__ = ["measure"]

_REQUIRED: Final = 1.8
_CORES: Final = 2
_JOBS: Final = 16
_SMOKE_JOBS: Final = 4
_IN_FLIGHT: Final = 8
_TURNS_PER_ROUND: Final = 6
_SOURCE: Final = """
import numpy as np

def build():
    step = np.ones(4, np.float32)

    def forward(inputs):
        rows = inputs["x"] * 0
        for number in range(100_000):
            rows += step  # a small operation: most of its time is Python's, under the lock
        return {"y": inputs["x"] + rows}

    return forward
"""


class _Way(NamedTuple):
    """A worker's way to run the model."""

    name: str
    fields: dict[str, object]


_WAYS: Final = (
    _Way("alone", {}),
    _Way("processes", {"instances": 2}),
    _Way("threads", {"instances": 2, "instance_kind": "thread"}),
)


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Jobs per second of each way, whole workers behind a queue."""
    is_smoke = scale.rounds == 1
    jobs, turns = (_SMOKE_JOBS, 1) if is_smoke else (_JOBS, scale.rounds * _TURNS_PER_ROUND)
    best: dict[str, float] = {}
    cpu_s: dict[str, float] = {}
    with Harness() as harness:
        server, root = harness.redis(), harness.folder()
        workers = {}
        for way in _WAYS:
            _write(root, way)
            workers[way.name] = harness.worker(server, way.name, models_root=root)
        client = harness.producer(server)
        for name, worker in workers.items():
            _rate(client, name, _SMOKE_JOBS)
            cpu_s[name] = -meter.cpu_seconds(meter.tree(worker.pid))
        for turn in range(turns):
            for name in workers:
                best[name] = max(best.get(name, 0.0), _rate(client, name, jobs))
            rates = ", ".join(f"{name} {rate:,.1f}/s" for name, rate in best.items())
            say(f"instances {turn + 1}/{turns}: best so far {rates}")
        for name, worker in workers.items():
            cpu_s[name] += meter.cpu_seconds(meter.tree(worker.pid))
    ratio, beside = best["processes"] / best["alone"], best["threads"] / best["alone"]
    by_cpu = _CORES * cpu_s["alone"] / cpu_s["processes"]
    return [
        Row(
            "CPU-bound NumPy model of small operations, 2 instances as processes against one copy, two cores",
            f"{best['processes']:,.1f} against {best['alone']:,.1f} jobs/s: {ratio:.2f}x (by CPU {by_cpu:.2f}x)",
            f">= {_REQUIRED:g}x",
            "",
            verdict(required=ratio >= _REQUIRED),
            {
                "jobs_per_s": best["processes"],
                "alone_jobs_per_s": best["alone"],
                "ratio": ratio,
                "cpu_ratio": by_cpu,
            },
        ),
        Row("the same model, 2 instances as threads against one copy", f"{beside:.2f}x", figures={"ratio": beside}),
    ]


def _write(root: Path, way: _Way) -> None:
    file = write_package(root, way.name, _SOURCE, max_batch_size=1) / "model.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | way.fields))


def _rate(client: Client, model: str, jobs: int) -> float:
    rows = np.random.default_rng(jobs).integers(0, 1000, (jobs, 4)).astype(np.float32)
    begun = time.perf_counter()
    answers = client.map(model, rows, window=_IN_FLIGHT)
    seconds = time.perf_counter() - begun
    if not np.array_equal(np.stack(answers), rows + 100_000):
        raise ValueError("Wrong answers: not the inputs and 100,000")
    return jobs / seconds
