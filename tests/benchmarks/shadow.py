"""What a shadow costs the jobs: the worker at half load, with a shadow of 10 %, against the same without one.

One worker, and five conditions, one after the other: a shadow worker that gives way, none, a slow one, a crashing one,
a full queue. In each of them, short runs with and without the shadow take turns, so that each is compared with the run
before it and the run after it: the speed of the machine changes within seconds. The shadow worker runs all the time.

Jobs come at the rate at which the worker without a shadow uses half of a core: near its limit, its batches grow or
shrink by chance, and with them CPU and latency. Redis rewrites its append-only file between the runs and not during
them, and results are kept for some seconds only: a rewrite takes a core for a second, and would meet some runs and not
others.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import yaml

from penstock import AsyncClient
from penstock.registry.broker.redis_shadow import RedisShadow
from penstock.registry.settings import Settings
from penstock.registry.shadow import ShadowOrder
from penstock.workers.shadow.comparison import FAILED
from tests.benchmarks import mlp
from tests.benchmarks.harness import Harness, Program
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import SMOKE, Scale
from tests.servers import RedisServer, WorkerProcess, wait_until

__all__ = ["measure"]

_SHARE: Final = 0.1
_PAIRS_PER_ROUND: Final = 18
_RUN_S: Final = 2.0
"""54 pairs of short runs at full scale. Two neighbours differ by a twentieth, by chance; a median of 54 is known to a
hundredth."""
_SMOKE_PAIRS: Final = 2
_BURST: Final = 8
_WARM_UP: Final = 8
"""So small a part of the jobs of a run comes before it, and is not measured."""
_RATE_RUNS: Final = 4
_FIRST_RATE: Final = 2000.0
_HALF: Final = 0.5
_CRASHING_PAIRS_PER_ROUND: Final = 3
_CRASHING_RUN_S: Final = 140.0
"""A candidate that crashes at once is loaded again after 99 times the time of its load. The run has a load in it, and
that pause."""
_BESIDE_CRASHING_S: Final = 20.0
"""A run without the shadow before and after it."""
_INPUTS: Final = 20_000
"""Different ones. A longer run has them again: nothing is cached here."""
_FAR_MS: Final = 10**13
_RESULT_TTL_S: Final = "10"
_OFF: Final = "off"


class _Condition(NamedTuple):
    """candidate: its version. has_worker: whether a shadow worker runs. compares: whether it compares pairs in a run.
    caps: of the queue."""

    candidate: str
    has_worker: bool = True
    compares: bool = False
    caps: Mapping[str, int] = {}


_CONDITIONS: Final = {
    "shadow worker": _Condition("1", compares=True),
    "no shadow worker": _Condition("1", has_worker=False),
    # A run is no longer than a forward of it.
    "slow": _Condition("0-slow"),
    "crashing": _Condition("0-crash", compares=True),
    "full": _Condition("1", has_worker=False, caps={"max_pairs": 1}),
}
_SLOW: Final = """

class Slow(torch.nn.Module):
    def forward(self, x):
        time.sleep(2)
        return x[:, :10]


def build():
    return Slow()
"""
_CRASH: Final = """

class Crash(torch.nn.Module):
    def forward(self, x):
        if float(x.abs().max()) > 2:
            os._exit(3)
        return x[:, :10]


def build():
    return Crash()
"""
_REQUIRED_CPU: Final = 1.05
_REQUIRED_P50: Final = 1.05
_REQUIRED_P99: Final = 1.25


class _Taken(NamedTuple):
    """One run: CPU of the worker in microseconds per job, latencies in ms, failed jobs, mirrored and compared pairs."""

    worker_us: float
    p50_ms: float
    p99_ms: float
    failed: int
    mirrored: int
    compared: int


class _Pair(NamedTuple):
    """A run with a shadow, and its neighbours without one."""

    on: _Taken
    before: _Taken
    after: _Taken


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module."""
    settings = {"PENSTOCK_INFERENCE_MODEL_VERSION": "2", "PENSTOCK_INFERENCE_QUEUE_RESULT_TTL_S": _RESULT_TTL_S}
    with Harness(settings) as harness:
        server, root = harness.redis(), _versions(harness.folder())
        worker = harness.worker(server, "mlp", models_root=root)
        # Beside other tests, a process of the lowest class may get no time for minutes.
        priority = "normal" if scale is SMOKE else "idle"
        stage = _Stage(harness, server, worker, root, priority)
        rate = _half_load(stage, scale)
        pairs = {name: _pairs(stage, name, scale, rate, say) for name in _CONDITIONS}
    return [_row(name, runs, rate) for name, runs in pairs.items()]


def _pairs(stage: _Stage, name: str, scale: Scale, rate: float, say: Progress) -> list[_Pair]:
    crashes = name == "crashing"
    number = scale.rounds * (_CRASHING_PAIRS_PER_ROUND if crashes else _PAIRS_PER_ROUND)
    if scale is SMOKE:
        number = _SMOKE_PAIRS
    # At most so many times the jobs of another row: a quick run is short.
    jobs = min(scale.jobs * (48 if crashes else 4), int(rate * (_CRASHING_RUN_S if crashes else _RUN_S)))
    beside = min(jobs, int(rate * _BESIDE_CRASHING_S))
    found: list[_Pair] = []
    with stage.shadow_worker(name):
        before = stage.run(_OFF, beside, rate)
        for turn in range(number):
            on = stage.run(name, jobs, rate)
            after = stage.run(_OFF, beside, rate)
            found.append(_Pair(on, before, after))
            say(f"shadow {name} {turn + 1}: {on}, off: {after}")
            before = after
    return found


def _row(name: str, pairs: Sequence[_Pair], rate: float) -> Row:
    """Medians of the ratios of neighbours."""
    runs = [pair.on for pair in pairs]

    def ratio(of: Callable[[_Taken], float]) -> float:
        return median(2 * of(pair.on) / (of(pair.before) + of(pair.after)) for pair in pairs)

    cpu, p50, p99 = ratio(lambda t: t.worker_us), ratio(lambda t: t.p50_ms), ratio(lambda t: t.p99_ms)
    failed, mirrored = sum(run.failed for run in runs), sum(run.mirrored for run in runs)
    compared, compares = sum(run.compared for run in runs), _CONDITIONS[name].compares
    is_met = cpu <= _REQUIRED_CPU and p50 <= _REQUIRED_P50 and p99 <= _REQUIRED_P99 and not failed
    # A shadow that does nothing costs nothing.
    has_worked = mirrored > 0 and (compared > 0 or not compares)
    return Row(
        f"shadow of {_SHARE:.0%}, {name}, at {rate:,.0f} jobs/s, against off: worker CPU per job / p50 / p99, failed",
        f"{cpu:.3f}x / {p50:.3f}x / {p99:.3f}x, {failed} failed, {mirrored:,} mirrored, {compared:,} compared",
        f"<= {_REQUIRED_CPU}x / {_REQUIRED_P50}x / {_REQUIRED_P99}x, 0, some{', some' * compares}",
        ok=verdict(required=is_met and has_worked),
        figures={
            "cpu_x": cpu,
            "p50_x": p50,
            "p99_x": p99,
            "failed": failed,
            "mirrored": mirrored,
            "compared": compared,
        },
    )


class _Stage:
    """One worker under changing conditions."""

    def __init__(self, harness: Harness, server: RedisServer, worker: WorkerProcess, root: Path, priority: str) -> None:
        """priority: of the shadow worker, as `penstock shadow run` knows it."""
        self._harness, self._server, self._worker, self._root = harness, server, worker, root
        self._priority = priority
        self._settings = Settings.load(environ={**harness.settings, "PENSTOCK_REDIS_URL": server.url})
        self._shadow: Program | None = None
        self._seed = 0

    @contextmanager
    def shadow_worker(self, name: str) -> Iterator[None]:
        """Inside of it, the shadow worker of a condition runs, if it has one, and waits for orders."""
        if not _CONDITIONS[name].has_worker:
            yield
            return
        environment = {
            **self._harness.settings,
            "PENSTOCK_REDIS_URL": self._server.url,
            "PENSTOCK_INFERENCE_REPO_ROOT": str(self._root),
        }
        self._shadow = self._harness.program(
            "penstock", ["shadow", "run", "mlp", "--priority", self._priority], environment
        )
        try:
            yield
        finally:
            self._shadow.stop()
            self._shadow = None

    def run(self, name: str, jobs: int, rate: float) -> _Taken:
        """So many jobs under one condition."""
        self._rewrite_file()
        with closing(RedisShadow.from_url(self._server.url)) as end:
            order = self._begin(name, end) if name != _OFF else None
            # The wait for the order has let the worker's memory get cold.
            asyncio.run(_paced(self._settings, jobs // _WARM_UP, rate, self._next_seed()))
            seed = self._next_seed()
            before_us = _cpu_us(self._worker.pid)
            latencies, failed = asyncio.run(_paced(self._settings, jobs, rate, seed))
            spent_us = _cpu_us(self._worker.pid) - before_us
            mirrored, compared = (0, 0) if order is None else _counted(end)
            if order is not None:
                self._finish(end)
        p50, p99 = np.percentile(latencies, [50, 99]) * 1000
        return _Taken(spent_us / jobs, float(p50), float(p99), failed, mirrored, compared)

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed

    def _rewrite_file(self) -> None:
        with self._server.client() as redis:

            def has_ended() -> bool:
                return not redis.info("persistence")["aof_rewrite_in_progress"]

            redis.config_set("auto-aof-rewrite-percentage", 0)
            wait_until(has_ended, 60, "no rewrite runs")
            redis.bgrewriteaof()
            wait_until(has_ended, 60, "the file is rewritten")

    def _begin(self, name: str, end: RedisShadow) -> ShadowOrder:
        candidate, caps = _CONDITIONS[name].candidate, _CONDITIONS[name].caps
        loads = self._loads()
        order = ShadowOrder.new("mlp", candidate, _SHARE, until_ms=_FAR_MS, canary_pairs=0, **caps)
        end.start(order, order.seal())
        self._await_log("answered jobs are mirrored")
        if self._shadow is not None:
            # A candidate that has crashed often is loaded after a pause.
            wait_until(lambda: self._loads() > loads, 300, "the candidate is loaded")
        return order

    def _loads(self) -> int:
        """How often the shadow worker has loaded a candidate."""
        return 0 if self._shadow is None else self._shadow.output.read_text().count("the candidate is loaded")

    def _finish(self, end: RedisShadow) -> None:
        end.stop("mlp")
        self._await_log("the shadow has ended")

    def _await_log(self, text: str) -> None:
        """Each line is waited for in turn, so the last one is of the last order."""
        lines = ("answered jobs are mirrored", "the shadow has ended")

        def is_last() -> bool:
            output = self._worker.output.read_text().splitlines()
            told = [line for line in output if any(each in line for each in lines)]
            return bool(told) and text in told[-1]

        wait_until(is_last, 30, text)


def _counted(end: RedisShadow) -> tuple[int, int]:
    """The pairs that were mirrored, and those on which a shadow worker has run the candidate."""
    state = end.state("mlp", series=0)
    ran = [int(state.report.get(f"n:{outcome}", 0)) for outcome in ("pass", "fail", *FAILED)]
    return int(state.flow.get("mirrored", 0)), sum(ran)


def _versions(root: Path) -> Path:
    """Version 2 serves, 1 is equal to it, the others misbehave."""
    for label, build in (("2", ""), ("1", ""), ("0-slow", _SLOW), ("0-crash", _CRASH)):
        package = Path(shutil.copytree(mlp.MODELS / "mlp" / "1", root / "mlp" / label))
        spec = yaml.safe_load((package / "model.yaml").read_text())
        # The pairs of a batch that crashed run one by one, each after a pause. One that came alone is counted at once.
        batching = {"max_batch_size": 1} if build is _CRASH else spec["batching"]
        (package / "model.yaml").write_text(yaml.safe_dump({**spec, "version": label, "batching": batching}))
        if build:
            source = (package / "model.py").read_text()
            source = source.replace("import torch", "import os\nimport time\n\nimport torch", 1)
            (package / "model.py").write_text(source.replace("def build(", "def _built(") + build)
    return root


def _half_load(stage: _Stage, scale: Scale) -> float:
    """The rate in jobs per second at which the worker uses half of a core, found by a few runs."""
    rate = _FIRST_RATE
    for _ in range(_RATE_RUNS):
        rate *= _HALF / (stage.run(_OFF, scale.jobs // 4, rate).worker_us * rate / 1e6)
    return rate


async def _paced(settings: Settings, jobs: int, rate: float, seed: int) -> tuple[list[float], int]:
    """Bursts of jobs at this rate; seconds from submission to result of each, and how many failed or were wrong."""
    distinct = mlp.inputs(min(jobs, _INPUTS), seed)
    rows = [distinct[n : n + 1] for n in range(len(distinct))]
    latencies: list[float] = []
    # One array: with as many objects as jobs, the garbage collector would take part in the latency of long runs.
    answers = np.full((jobs, mlp.CLASSES), np.nan, np.float32)
    async with AsyncClient.from_env(settings=settings) as client:

        async def burst(first: int) -> None:
            begun = time.perf_counter()
            batch = [{"x": rows[n % len(rows)]} for n in range(first, min(first + _BURST, jobs))]
            for offset, job in enumerate(await client.submit_many("mlp", batch)):
                try:
                    answers[first + offset] = (await job.result(180))["logits"][0]
                except Exception as error:  # counted, whatever it is
                    print(f"failed: {error}")
                latencies.append(time.perf_counter() - begun)

        begun = time.perf_counter()
        limit = asyncio.Semaphore(64)

        async def bounded(first: int) -> None:
            async with limit:
                await burst(first)

        async with asyncio.TaskGroup() as bursts:
            for number, first in enumerate(range(0, jobs, _BURST)):
                if (early := begun + number * _BURST / rate - time.perf_counter()) > 0:
                    await asyncio.sleep(early)
                bursts.create_task(bounded(first))
    failed = int(np.isnan(answers).any(axis=1).sum())
    if not failed:
        for first in range(0, jobs, len(rows)):
            some = answers[first : first + len(rows)]
            mlp.check(distinct[: len(some)], some)
    return latencies, failed


def _cpu_us(pid: int) -> float:
    """CPU microseconds of all threads of a process; the ticks of /proc/PID/stat are too coarse for a short run."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1000
