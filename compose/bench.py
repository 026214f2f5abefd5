"""`penstock bench`: throughput, latency and CPU time of a stack with one model, measured from outside.

    random inputs that fit the declaration -> a few seconds of warm-up: how many jobs the time allows
        -> saturation: `in_flight` jobs at a time -> jobs/s, latency, CPU per job
        -> idle system: one job at a time         -> the shortest latency of a job

CPU times are read from the kernel and from Redis before and after. The client is this process; workers are counted
when they run on this machine.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import redis
from rich.table import Table
from rich.text import Text

from penstock import Client, JobHandle
from penstock.compose.samples import random_jobs
from penstock.compose.stack import fleet
from penstock.compose.stack.local import LocalStack, private_settings
from penstock.compose.views.overview import served, worker_pids
from penstock.producers.stack_start import LONGEST_START_S, StackStart
from penstock.registry import stack_file
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import UnknownModel
from penstock.registry.package import ModelSpec
from penstock.registry.settings import Settings
from penstock.registry.tensors import Array

__all__ = ["BenchReport", "chosen_model", "draw", "measure", "stack_for"]

_SAMPLE_MODEL: Final = "mlp"
"""Of the checkout's models, the one that a private stack serves by default."""
_WARM_UP: Final = 512
_WARM_UP_S: Final = 3.0
_SATURATED: Final = 20_000
_SATURATED_S: Final = 10.0
_ALONE: Final = 200
_ALONE_S: Final = 3.0
_FEWEST: Final = 8
_PARTS: Final = 4
"""The window of jobs in flight is refilled in so many parts."""
_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Latencies in ms, CPU in microseconds per job; a worker's is None when none runs on this machine."""

    model: str
    jobs: int
    in_flight: int
    jobs_per_s: float
    saturated_p50_ms: float
    saturated_p99_ms: float
    alone_p50_ms: float
    alone_p99_ms: float
    client_cpu_us: float
    worker_cpu_us: float | None
    redis_cpu_us: float

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class _CpuTime(NamedTuple):
    """CPU seconds so far; `workers_s` is None when none runs on this machine."""

    client_s: float
    workers_s: float | None
    redis_s: float


@contextmanager
def stack_for(environ: Mapping[str, str], model: str | None, on_progress: Callable[[str], None]) -> Iterator[Settings]:
    """Settings of the configured broker or the running stack; of a private stack when there is neither.

    A stack that is starting is awaited.
    """
    settings = Settings.load(environ=environ)
    if settings.redis_url or stack_file.read(settings.home):
        if start := StackStart.of(settings, LONGEST_START_S):
            start.wait()
        yield stack_file.with_broker(settings)
        return
    with private_settings(environ, [model or _SAMPLE_MODEL]) as (private, own):
        devices = fleet.choose(private, own)
        with LocalStack(private, devices, environ=own, with_flower=False, on_progress=on_progress):
            yield stack_file.with_broker(private)


def chosen_model(broker: RedisStreams, asked: str | None) -> ModelSpec:
    """The model that is asked for, else the first one that a worker serves. Raises UnknownModel, which lists them."""
    found = served(broker)
    if asked is None and found:
        return found[0]
    sealed = broker.spec(asked) if asked else None
    if sealed is None:
        names = ", ".join(spec.name for spec in found) or "none; `penstock up` or `penstock worker` serves the models"
        what = "No model is served" if asked is None else f"Unknown model {asked!r:.80}"
        raise UnknownModel(f"{what}. Models that a worker serves: {names}")
    return ModelSpec.from_json(sealed)


def measure(settings: Settings, model: str | None, count: int | None, in_flight: int) -> BenchReport:
    """Run `count` jobs with `in_flight` at a time, then a few one at a time. None: see `chosen_model`; what ten seconds
    allow. Raises UnknownModel and JobFailed."""
    with (
        closing(RedisStreams.from_url(settings.redis_url or "")) as broker,
        Client.from_env(settings=settings) as client,
    ):
        spec = chosen_model(broker, model)
        random = np.random.default_rng(0)
        rate = _warm_up(client, spec, in_flight, random)
        inputs = list(random_jobs(spec, count or _allowed(rate, _SATURATED_S, _SATURATED), random))
        before = _cpu_time(settings, broker)
        begin = time.perf_counter()
        saturated_s = _saturate(client, spec.name, inputs, in_flight)
        seconds = time.perf_counter() - begin
        after = _cpu_time(settings, broker)
        alone_s = _one_at_a_time(client, spec, random)
    is_local = before.workers_s is not None and after.workers_s is not None
    return BenchReport(
        spec.name,
        len(inputs),
        in_flight,
        len(inputs) / seconds,
        *_percentiles_ms(saturated_s),
        *_percentiles_ms(alone_s),
        (after.client_s - before.client_s) / len(inputs) * 1e6,
        ((after.workers_s or 0.0) - (before.workers_s or 0.0)) / len(inputs) * 1e6 if is_local else None,
        (after.redis_s - before.redis_s) / len(inputs) * 1e6,
    )


def _allowed(per_s: float, seconds: float, most: int) -> int:
    """How many jobs fit into `seconds` at this rate, from a few to `most`."""
    return max(_FEWEST, min(most, int(per_s * seconds)))


def _warm_up(client: Client, spec: ModelSpec, in_flight: int, random: np.random.Generator) -> float:
    """Jobs per second of a short run, whose length follows the time of its first job."""
    (first,) = random_jobs(spec, 1, random)
    # Twice: the first job of a version may load what the next ones have.
    alone_s = min(_one(client, spec.name, each) for each in (first, *random_jobs(spec, 1, random)))
    inputs = list(random_jobs(spec, _allowed(1 / alone_s, _WARM_UP_S, _WARM_UP), random))
    begin = time.perf_counter()
    _saturate(client, spec.name, inputs, in_flight)
    return len(inputs) / (time.perf_counter() - begin)


def _one_at_a_time(client: Client, spec: ModelSpec, random: np.random.Generator) -> list[float]:
    until = time.perf_counter() + _ALONE_S
    alone_s: list[float] = []
    for inputs in random_jobs(spec, _ALONE, random):
        alone_s.append(_one(client, spec.name, inputs))
        if len(alone_s) >= _FEWEST and time.perf_counter() > until:
            break
    return alone_s


def draw(report: BenchReport) -> Table:
    """The report, one measurement a line."""
    worker = "runs elsewhere" if report.worker_cpu_us is None else f"{report.worker_cpu_us:,.0f} us"
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row(Text(report.model, style="bold"), f"{report.jobs:,} jobs with random inputs")
    table.add_row("throughput", f"{report.jobs_per_s:,.0f} jobs/s, {report.in_flight} in flight")
    table.add_row(
        "latency at saturation", f"p50 {report.saturated_p50_ms:,.2f} ms, p99 {report.saturated_p99_ms:,.2f} ms"
    )
    table.add_row("one at a time", f"p50 {report.alone_p50_ms:,.2f} ms, p99 {report.alone_p99_ms:,.2f} ms")
    table.add_row(
        "CPU per job", f"worker {worker}, client {report.client_cpu_us:,.0f} us, Redis {report.redis_cpu_us:,.0f} us"
    )
    return table


def _saturate(client: Client, model: str, inputs: Sequence[Mapping[str, Array]], in_flight: int) -> list[float]:
    """Seconds from submit to result of each job; results are read in the order of submission."""
    waiting: deque[tuple[JobHandle, float]] = deque()
    latencies: list[float] = []
    part = max(1, in_flight // _PARTS)

    def finish(down_to: int) -> None:
        while len(waiting) > down_to:
            handle, submitted = waiting.popleft()
            handle.result(timeout=_TIMEOUT_S)
            latencies.append(time.perf_counter() - submitted)

    for start in range(0, len(inputs), part):
        finish(in_flight - part)
        submitted = time.perf_counter()
        waiting.extend((handle, submitted) for handle in client.submit_many(model, inputs[start : start + part]))
    finish(0)
    return latencies


def _one(client: Client, model: str, inputs: Mapping[str, Array]) -> float:
    begin = time.perf_counter()
    client.submit(model, inputs).result(timeout=_TIMEOUT_S)
    return time.perf_counter() - begin


def _percentiles_ms(seconds: Sequence[float]) -> tuple[float, float]:
    p50, p99 = (np.percentile(seconds, [50, 99]) * 1000).tolist()
    return p50, p99


def _cpu_time(settings: Settings, broker: RedisStreams) -> _CpuTime:
    with redis.Redis.from_url(settings.redis_url or "") as client:
        cpu = client.info("cpu")
    workers = [_cpu_of(pid) for pid in worker_pids(broker)]
    return _CpuTime(time.process_time(), sum(workers) if workers else None, cpu["used_cpu_user"] + cpu["used_cpu_sys"])


def _cpu_of(pid: int) -> float:
    """User and system seconds of a process of this machine, by proc(5); 0 when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
