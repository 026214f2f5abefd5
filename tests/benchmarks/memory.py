"""What a job weighs in Redis and in its append-only file; and whether anything grows with the number of jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from tests.benchmarks import mlp
from tests.benchmarks.harness import Harness
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.servers import RedisServer

__all__ = ["measure_per_job", "retention"]

_BEFORE_KB: Final = (2.02, 0.52, 3.09)
"""Per job: of memory while it is queued and when it is finished, and of the append-only file. By this section on
2026-11-27, of the version of 2026-11-21, which is the one before the hot path was rebuilt."""
_AIM: Final = 0.85
"""Of the figures before."""
_READINGS: Final = 20
_READING_S: Final = 0.02
_TIMEOUT_S: Final = 120.0
_STOP_TIMEOUT_S: Final = 30.0
_ORDERS: Final = 20
_IN_FLIGHT: Final = 256
_FLAT_BYTES: Final = 1 << 20
"""What an allocator may keep; a leak of one object per job is far above."""
_MAX_GROWTH: Final = 1.25
"""Redis expires keys by sampling, so that the dead lag behind a little."""


def measure_per_job(scale: Scale, say: Progress) -> list[Row]:
    """Bytes of Redis per job of 1.5 kB in and 40 B out: of memory before and after it ran, and of the append-only file
    for its whole life, without rewrites."""
    jobs = scale.stored_jobs
    with Harness() as harness:
        server = harness.redis()
        worker = harness.worker(server, "mlp")
        harness.producer(server).map("mlp", mlp.inputs(mlp.BATCH, seed=0))
        worker.terminate()
        worker.wait(_STOP_TIMEOUT_S)
        _stop_rewrites(server)
        empty, empty_aof = _used_memory(server), _aof_bytes(server)
        client, rows = harness.producer(server), mlp.inputs(jobs, seed=1)
        handles = client.submit_many("mlp", [{"x": rows[index : index + 1]} for index in range(jobs)])
        queued = _used_memory(server)
        worker = harness.worker(server, "mlp")
        mlp.check(rows, np.concatenate([handle.result(timeout=_TIMEOUT_S)["logits"] for handle in handles]))
        client.close()
        worker.terminate()
        worker.wait(_STOP_TIMEOUT_S)
        aof = _aof_bytes(server)
        _end_replies(server)
        finished = _used_memory(server)
    taken = (queued - empty, finished - empty, aof - empty_aof)
    # As they are printed: the allocator's own share moves the third digit.
    queued_kb, finished_kb, aof_kb = (round(nbytes / jobs / 1000, 2) for nbytes in taken)
    say(f"memory: queued {queued_kb:.2f} kB, finished {finished_kb:.2f} kB, append-only file {aof_kb:.2f} kB a job")
    what = f"(1.5 kB in, 40 B out), {jobs:,} jobs"
    figures = {"queued_kb": queued_kb, "finished_kb": finished_kb}
    return [
        _row(f"Redis memory per queued / finished job {what}", (queued_kb, finished_kb), _BEFORE_KB[:2], figures),
        _row(f"append-only file of Redis per job {what}", (aof_kb,), _BEFORE_KB[2:], {"aof_kb": aof_kb}),
    ]


def _row(what: str, taken: Sequence[float], before: Sequence[float], figures: Mapping[str, float]) -> Row:
    """Kilobytes against those before: no more is required, and the aim is a part of them."""
    aims = [round(_AIM * each, 2) for each in before]
    return Row(
        what,
        " / ".join(f"{each:.2f}" for each in taken) + " kB",
        " / ".join(f"<= {each:.2f}" for each in before) + " kB",
        " / ".join(f"<= {each:.2f}" for each in aims) + " kB",
        verdict(required=_is_within(taken, before), aim=_is_within(taken, aims)),
        figures,
    )


def _is_within(taken: Sequence[float], limits: Sequence[float]) -> bool:
    return all(each <= limit for each, limit in zip(taken, limits, strict=True))


def retention(jobs: int, ttl_s: int) -> Callable[[Scale, Progress], list[Row]]:
    """The section for `jobs` jobs whose results are kept for `ttl_s` seconds."""

    def measure(_: Scale, say: Progress) -> list[Row]:
        client_bytes, redis_bytes = _watch(jobs, ttl_s, say)
        return [_flat(client_bytes, jobs), _bounded(redis_bytes, jobs, ttl_s)]

    return measure


def _watch(jobs: int, ttl_s: int, say: Progress) -> tuple[list[int], list[int]]:
    """The client's and Redis' bytes after each part of the jobs."""
    client_bytes, redis_bytes = [], []
    with Harness({"PENSTOCK_INFERENCE_QUEUE_RESULT_TTL_S": str(ttl_s)}) as harness:
        server = harness.redis()
        worker = harness.worker(server, "mlp")
        client = harness.client("submit_many", server.url, worker=worker, broker=server)
        client.run(jobs // _ORDERS, _IN_FLIGHT)
        for number in range(_ORDERS):
            client_bytes.append(client.run(jobs // _ORDERS, _IN_FLIGHT).client_bytes)
            redis_bytes.append(_used_memory(server, readings=1))
            megabytes = client_bytes[-1] / 1e6, redis_bytes[-1] / 1e6
            say(f"retention {number + 1}/{_ORDERS}: client {megabytes[0]:.1f} MB, Redis {megabytes[1]:.1f} MB")
    return client_bytes, redis_bytes


def _flat(taken: list[int], jobs: int) -> Row:
    early, late = (median(part) for part in _halves(taken))
    return Row(
        f"client process after {jobs:,} jobs",
        f"{late / 1e6:.1f} MB, half-way {early / 1e6:.1f} MB: {(late - early) / (jobs / 2):+.1f} B a job",
        "flat",
        "",
        verdict(required=late - early <= _FLAT_BYTES),
        {"bytes_half_way": early, "bytes": late},
    )


def _bounded(taken: list[int], jobs: int, ttl_s: int) -> Row:
    early, late = (max(part) for part in _halves(taken))
    return Row(
        f"Redis after {jobs:,} jobs, results kept for {ttl_s} s",
        f"at most {late / 1e6:.1f} MB, until half-way {early / 1e6:.1f} MB",
        "bounded by the retention",
        "",
        verdict(required=late <= early * _MAX_GROWTH),
        {"most_bytes_until_half_way": early, "most_bytes": late},
    )


def _halves(taken: list[int]) -> tuple[list[int], list[int]]:
    return taken[: len(taken) // 2], taken[len(taken) // 2 :]


def _stop_rewrites(server: RedisServer) -> None:
    """The append-only file grows by all that is written from now on."""
    with server.client() as client:
        client.config_set("auto-aof-rewrite-percentage", 0)


def _end_replies(server: RedisServer) -> None:
    """Delete the replies to clients that are closed. They expire after two minutes, and their number is bounded."""
    with server.client() as client:
        for key in client.scan_iter("*:reply:*"):
            client.delete(key)


def _aof_bytes(server: RedisServer) -> int:
    with server.client() as client:
        return int(client.info("persistence")["aof_current_size"])


def _used_memory(server: RedisServer, readings: int = _READINGS) -> int:
    """The least of some readings: buffers of connections and of the append-only file come and go."""
    taken = []
    with server.client() as client:
        for _ in range(readings):
            taken.append(int(client.info("memory")["used_memory"]))
            time.sleep(_READING_S)
    return min(taken)
