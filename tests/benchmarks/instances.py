"""Two instances of a model that holds the interpreter's lock, against one copy: in processes, and in threads beside.

One worker for each way, with one model thread per copy; they take turns. Another user of the machine takes time from
two busy cores sooner than from one, so the best turn of each way counts.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import yaml

from penstock import Client
from tests.benchmarks.harness import Harness
from tests.benchmarks.report import Progress, Row, verdict
from tests.benchmarks.scale import Scale
from tests.packages import write_package

__all__ = ["measure"]

_REQUIRED: Final = 1.8
_JOBS: Final = 60
_SMOKE_JOBS: Final = 4
_IN_FLIGHT: Final = 16
_TURNS_PER_ROUND: Final = 4
_SOURCE: Final = """
import numpy as np

def build():
    step = np.ones(4, np.float32)

    def forward(inputs):
        rows = inputs["x"] * 0
        for number in range(25_000):
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
    best: dict[str, float] = dict.fromkeys((way.name for way in _WAYS), 0.0)
    with Harness() as harness:
        server, root = harness.redis(), harness.folder()
        for way in _WAYS:
            _write(root, way)
            harness.worker(server, way.name, models_root=root)
        client = harness.producer(server)
        for name in best:
            _rate(client, name, _SMOKE_JOBS)
        for turn in range(1 if is_smoke else scale.rounds * _TURNS_PER_ROUND):
            for name in best:
                best[name] = max(best[name], _rate(client, name, _SMOKE_JOBS if is_smoke else _JOBS))
            rates = ", ".join(f"{name} {rate:,.1f}/s" for name, rate in best.items())
            say(f"instances {turn + 1}: best so far {rates}")
    ratio, beside = best["processes"] / best["alone"], best["threads"] / best["alone"]
    return [
        Row(
            "CPU-bound NumPy model of small operations, 2 instances as processes against one copy, two cores",
            f"{best['processes']:,.1f} against {best['alone']:,.1f} jobs/s: {ratio:.2f}x",
            f">= {_REQUIRED:g}x",
            "",
            verdict(required=ratio >= _REQUIRED),
            {"jobs_per_s": best["processes"], "alone_jobs_per_s": best["alone"], "ratio": ratio},
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
    if not np.array_equal(np.stack(answers), rows + 25_000):
        raise ValueError("Wrong answers: not the inputs and 25,000")
    return jobs / seconds
