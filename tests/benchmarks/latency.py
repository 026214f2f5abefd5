"""One job at a time on an idle system, beside one bare round trip through Redis; and one urgent job behind many."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from penstock import Client
from penstock.registry.broker.redis_streams import RedisStreams
from tests.benchmarks import mlp
from tests.benchmarks.harness import Harness
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.servers import RedisServer, wait_until

__all__ = ["measure_alone", "measure_urgent"]

_ROUNDS_PER_ROUND: Final = 2
"""Turns are short here, so there are more of them."""
_BATCHES_TIMED: Final = 30
_MOST_FILLS: Final = 5
_MARGIN: Final = 5
"""The queue is filled above the wanted depth by this part of it."""
_FLOOD_SEED: Final = 1_000
_TIMEOUT_S: Final = 60.0
_BUSY: Final = "with 0.5 ms of model"
_BARE: Final = "raw"
_BUSY_BUILD: Final = """

class Busy(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        until = time.perf_counter() + 0.0005
        answer = self.inner(x)
        while time.perf_counter() < until:
            pass
        return answer


def build():
    return Busy(_module())
"""
_REQUIRED_P50: Final = {"submit_many": 3.0, "async": 3.2}
_AIMED_P50: Final = 2.2
_REQUIRED_P99: Final = 3.0
_NAMES: Final = {"async": "AsyncClient", "submit_many": "Client"}


class Percentiles(NamedTuple):
    """Milliseconds."""

    p50: float
    p99: float


def measure_alone(scale: Scale, say: Progress) -> list[Row]:
    """p50 and p99 from submit to result, one job at a time; the same with a model that takes half a millisecond."""
    with Harness() as harness:
        ours, busy, bare = harness.redis(), harness.redis(), harness.redis()
        worker, raw = harness.worker(ours, "mlp"), harness.raw_worker(bare)
        busy_worker = harness.worker(busy, "mlp", models_root=_busy_models(harness.folder()))
        kinds = ("submit_many", "async")
        clients = {kind: harness.client(kind, ours.url, worker=worker, broker=ours) for kind in kinds}
        clients[_BUSY] = harness.client(kinds[0], busy.url, worker=busy_worker, broker=busy)
        clients[_BARE] = harness.client("raw", bare.url, worker=raw, broker=bare)
        for client in clients.values():
            client.run(scale.alone_jobs, 1)
        taken: dict[str, list[np.ndarray]] = {name: [] for name in clients}
        for number in range(scale.rounds * _ROUNDS_PER_ROUND):
            for name, client in clients.items():
                sample = client.run(scale.alone_jobs, 1)
                taken[name].append(sample.latencies_s)
                middle, tail = sample.latency_ms(50), sample.latency_ms(99)
                say(f"alone {number + 1}: {name}: p50 {middle:.2f} ms, p99 {tail:.2f} ms")
    of = {name: Percentiles(*np.percentile(np.concatenate(runs), [50, 99]) * 1000) for name, runs in taken.items()}
    bound, busy_times = of.pop(_BARE), of.pop(_BUSY)
    return [
        *(_alone(kind, percentiles, bound) for kind, percentiles in of.items()),
        _alone_with_model(busy_times, bound),
        Row(
            "bound: XADD, XREADGROUP BLOCK, XADD, XREAD BLOCK and nothing else, p50 / p99",
            f"{bound.p50:.2f} / {bound.p99:.2f} ms",
            figures={"p50_ms": bound.p50, "p99_ms": bound.p99},
        ),
    ]


def _alone(kind: str, ours: Percentiles, bound: Percentiles) -> Row:
    ratio, required = ours.p50 / bound.p50, _REQUIRED_P50[kind]
    return Row(
        f"one job at a time, idle system, {_NAMES[kind]}, p50 end to end against bare Redis (p99 beside it)",
        f"{ours.p50:.2f} against {bound.p50:.2f} ms: {ratio:.1f}x ({ours.p99:.2f} ms)",
        f"<= {required:g}x",
        f"<= {_AIMED_P50:g}x",
        verdict(required=ratio <= required, aim=ratio <= _AIMED_P50),
        {"p50_ms": ours.p50, "p99_ms": ours.p99, "p50_x_raw": ratio, "p99_x_raw": ours.p99 / bound.p99},
    )


def _alone_with_model(ours: Percentiles, bound: Percentiles) -> Row:
    ratio = ours.p99 / bound.p99
    return Row(
        "the same with 0.5 ms of model, Client: p99 against bare Redis without a model (p50 beside it)",
        f"{ours.p99:.2f} against {bound.p99:.2f} ms: {ratio:.1f}x ({ours.p50:.2f} ms)",
        f"<= {_REQUIRED_P99:g}x",
        ok=verdict(required=ratio <= _REQUIRED_P99),
        figures={"p50_ms": ours.p50, "p99_ms": ours.p99, "p99_x_raw": ratio},
    )


def _busy_models(root: Path) -> Path:
    """The benchmark's model, with a forward that takes half a millisecond longer."""
    package = Path(shutil.copytree(mlp.MODELS / "mlp" / "1", root / "mlp" / "1"))
    source = (package / "model.py").read_text().replace("import torch", "import time\n\nimport torch", 1)
    (package / "model.py").write_text(source.replace("def build(", "def _module(") + _BUSY_BUILD)
    return root


class Urgent(NamedTuple):
    """One critical job: what it took longer than on an idle system, and behind how many."""

    extra_s: float
    depth: int
    redis_rewrites: bool
    """Redis was compacting its append-only file meanwhile, which takes a core and the disk."""


def measure_urgent(scale: Scale, say: Progress) -> list[Row]:
    """What a critical job waits longer when thousands of low priority are queued, in batch times."""
    with Harness() as harness:
        server = harness.redis()
        harness.worker(server, "mlp")
        # A client of its own: the flooding client has its own replies to read.
        flood, urgent = harness.producer(server), harness.producer(server)
        broker = RedisStreams.from_url(server.url)
        idle_s = median(_one(urgent, number) for number in range(scale.urgent_jobs))
        taken: list[Urgent] = []
        for number in range(scale.urgent_jobs):
            _fill(flood, broker, scale.backlog_jobs, seed=_FLOOD_SEED + number * _MOST_FILLS)
            depth, rewrites = _waiting(broker), _rewrites_its_file(server)
            extra_s = _one(urgent, scale.urgent_jobs + number) - idle_s
            taken.append(Urgent(extra_s, depth, rewrites or _rewrites_its_file(server)))
            say(f"urgent {number + 1}/{scale.urgent_jobs}: {extra_s * 1000:+.2f} ms behind {depth:,} jobs")
        _fill(flood, broker, scale.backlog_jobs, seed=_FLOOD_SEED - _MOST_FILLS)
        batch_s = _batch_time(broker)
        broker.close()
    return [_urgent(taken, batch_s, scale)]


def _urgent(taken: Sequence[Urgent], batch_s: float, scale: Scale) -> Row:
    batches = [each.extra_s / batch_s for each in taken]
    undisturbed = [number for number, each in zip(batches, taken, strict=True) if not each.redis_rewrites]
    least = min(each.depth for each in taken)
    middle, longest, longest_undisturbed = median(batches), max(batches), max(undisturbed, default=0.0)
    return Row(
        f"{scale.backlog_jobs:,} jobs of low priority queued, one critical job, {scale.urgent_jobs} times: "
        "median / longest extra latency",
        f"{middle:.1f} / {longest:.1f} batch times of {batch_s * 1000:.2f} ms, "
        f"at least {least:,} queued ({len(taken) - len(undisturbed)} of them while Redis rewrote its append-only file; "
        f"longest of the others {longest_undisturbed:.1f})",
        "<= 2 / <= 5 batch times",
        "",
        verdict(required=middle <= 2 and longest <= 5),
        {
            "median": middle,
            "longest": longest,
            "longest_undisturbed": longest_undisturbed,
            "batch_ms": batch_s * 1000,
        },
    )


def _rewrites_its_file(server: RedisServer) -> bool:
    with server.client() as client:
        return bool(client.info("persistence")["aof_rewrite_in_progress"])


def _one(client: Client, seed: int) -> float:
    row = mlp.inputs(1, seed)
    # The flood was this process' own: what it left must not be swept up while the clock runs.
    gc.collect()
    begun = time.perf_counter()
    logits = client.submit("mlp", {"x": row}, priority="critical").result(timeout=_TIMEOUT_S)["logits"]
    seconds = time.perf_counter() - begun
    mlp.check(row, logits)
    return seconds


def _waiting(broker: RedisStreams) -> int:
    return sum(depth.jobs for depth in broker.depths("mlp"))


def _fill(client: Client, broker: RedisStreams, jobs: int, seed: int) -> None:
    """Tops the queue up to `jobs` and a little above, as the worker goes on meanwhile."""
    for attempt in range(_MOST_FILLS):
        missing = jobs - _waiting(broker)
        if missing <= 0:
            return
        rows = mlp.inputs(missing + jobs // _MARGIN, seed + attempt)
        client.submit_many("mlp", [{"x": row[None]} for row in rows], priority="low")


def _batch_time(broker: RedisStreams) -> float:
    """Seconds from one full batch to the next, over some that leave the queue."""
    at_first, begun = _waiting(broker), time.perf_counter()
    jobs = min(_BATCHES_TIMED * mlp.BATCH, at_first // 2)
    left = (
        wait_until(lambda: (now := _waiting(broker)) <= at_first - jobs and now + 1, _TIMEOUT_S, "the queue shrinks")
        - 1
    )
    return (time.perf_counter() - begun) / (at_first - left) * mlp.BATCH
