"""The long run: `python -m tests.threats --messages 100000` attacks all endpoints, and a real worker the most.

Prints for each endpoint how many, how many refused, messages a second, the slowest refusal; and what the worker made of
its messages. Exit status 1 when anything was found.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import pytest

from penstock import Client
from tests.packages import write_double
from tests.servers import RedisServer, WorkerProcess, redis_binaries
from tests.threats import fuzz
from tests.threats.hostile_load import send_hostile_entries, send_hostile_tasks

_SHARES = {"envelope": 0.2, "tensors": 0.1, "inputs": 0.15, "spec": 0.03, "settings": 0.03, "lane": 0.09}
"""Of the messages; the rest goes through the worker."""
_PER_TASK = 0.01
_PER_BROKEN_TASK = 0.0002


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.threats", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    _say(f"{options.messages} messages, seed {options.seed}")
    with tempfile.TemporaryDirectory() as folder:
        findings = _endpoints(Path(folder), options.messages, options.seed)
        findings += _worker(Path(folder), options.messages, options.seed)
    for finding in findings[:20]:
        _say(f"FINDING {finding}")
    _say(f"findings: {len(findings)}")
    return 1 if findings else 0


def _endpoints(folder: Path, messages: int, seed: int) -> list[str]:
    findings = []
    for ingress in fuzz.targets(folder):
        count = int(messages * _SHARES[ingress.name])
        refused, slowest, slowest_cpu, begun = 0, 0.0, 0.0, time.perf_counter()
        for number in range(count):
            # Each offer has a seed of its own: a finding is repeated without those before it.
            offered = ingress.make(Random(f"{seed} {ingress.name} {number}"))
            try:
                outcome = ingress.offer(offered, fuzz.LIMIT_S)
            except fuzz.Finding as finding:
                findings.append(f"{number}: {finding}")
                continue
            if outcome.refusal:
                refused += 1
                slowest, slowest_cpu = max(slowest, outcome.seconds), max(slowest_cpu, outcome.cpu_seconds)
        rate = count / (time.perf_counter() - begun)
        _say(
            f"{ingress.name:9} {count:6} offered, {refused:6} refused, {rate:7.0f}/s, slowest refusal "
            f"{slowest * 1000:.1f} ms ({slowest_cpu * 1000:.1f} ms of CPU)"
        )
    return findings


def _worker(folder: Path, messages: int, seed: int) -> list[str]:
    server = RedisServer(next(iter(redis_binaries().values())))
    write_double(folder / "served")
    environment = {"PENSTOCK_SIGNING_KEYS": fuzz.KEYS, "PENSTOCK_INFERENCE_CELERY_LANE": "trusted"}
    (folder / "worker").mkdir()
    worker = WorkerProcess(server, folder / "served", folder / "worker", name="target@fuzz", environment=environment)
    count = messages - sum(int(messages * share) for share in _SHARES.values())
    tasks, broken = int(messages * _PER_TASK), max(1, int(messages * _PER_BROKEN_TASK))
    try:
        server.start()
        worker.start()
        with Client(server.url, signing_keys=fuzz.KEYS) as client:
            load = send_hostile_entries(worker, client, Random(seed), count - tasks - broken)
        begun = time.monotonic()
        send_hostile_tasks(worker, Random(seed), tasks, broken=broken)
        lane_s = time.monotonic() - begun
    except (AssertionError, pytest.fail.Exception) as error:
        return [f"worker: {type(error).__name__}: {error}"]
    finally:
        deaths = 0 if worker.is_running else 1
        worker.stop()
        server.stop()
    _say(
        f"worker    {load.sent:6} entries in its queues, {load.dead_lettered:6} dead-lettered, "
        f"{load.sent / load.seconds:7.0f}/s, slowest good job among them {load.slowest_good_s * 1000:.0f} ms\n"
        f"worker    {tasks + broken:6} messages on Celery's queue ({broken} of them no tasks) in {lane_s:.1f} s\n"
        f"worker deaths: {deaths}"
    )
    return []


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
