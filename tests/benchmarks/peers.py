"""Model servers that batch, beside us: same MLP, 64 clients, JSON or msgpack; what is not installed is skipped."""

from __future__ import annotations

import importlib.util
import json
from typing import Final

import msgspec

from tests.benchmarks import mlp
from tests.benchmarks.harness import Client, Harness, Sample
from tests.benchmarks.report import Progress, Row, median
from tests.benchmarks.scale import Scale
from tests.servers import free_port

__all__ = ["SERVERS", "client", "is_installed", "measure"]

_CLIENTS: Final = 64
_MOSEC: Final = ("--address", "127.0.0.1", "--port", "{port}")
SERVERS: Final = {
    "litserve": ("LitServe", "/predict", "http", ("tests.benchmarks.litserve_mlp", "{port}")),
    "mosec": ("mosec", "/inference", "http", ("tests.benchmarks.mosec_mlp", *_MOSEC)),
    "mosec-msgpack": ("mosec, msgpack", "/inference", "msgpack", ("tests.benchmarks.mosec_msgpack_mlp", *_MOSEC)),
}
"""Name: its title, the path of its predictions, the kind of its client, its command."""


def is_installed(name: str) -> bool:
    """Whether the peer's package is here."""
    return importlib.util.find_spec(name.partition("-")[0]) is not None


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Jobs per second and CPU of the server's side per job, all of them taking turns."""
    with Harness() as harness:
        found = [name for name in SERVERS if is_installed(name)]
        clients = {SERVERS[name][0]: client(harness, name) for name in found}
        if clients:
            server = harness.redis()
            worker = harness.worker(server, "mlp")
            clients["Penstock, AsyncClient"] = harness.client("async", server.url, worker=worker, broker=server)
        taken: dict[str, list[Sample]] = {name: [] for name in clients}
        for number in range(scale.rounds + 1):
            for name, each in clients.items():
                sample = each.run(scale.http_jobs, _CLIENTS)
                # The first round warms up.
                taken[name] += [sample] if number else []
                say(f"peers {number}/{scale.rounds}: {name}: {sample.jobs_per_s:,.0f}/s")
    rows = [_row(name, runs) for name, runs in taken.items()]
    return rows + [Row(f"peer: {SERVERS[name][0]}", "not installed") for name in SERVERS if name not in found]


def client(harness: Harness, name: str) -> Client:
    """A client of a peer that was started, and answers."""
    _, path, kind, (module, *arguments) = SERVERS[name]
    url = f"http://127.0.0.1:{(port := free_port())}{path}"
    program = harness.program(module, [part.format(port=port) for part in arguments])
    row = mlp.inputs(1, seed=0)[0]
    body = (
        msgspec.msgpack.encode({"x": row.tobytes()}) if kind == "msgpack" else json.dumps({"x": row.tolist()}).encode()
    )
    program.wait_to_answer("POST", url, body)
    return harness.client(kind, url, worker=program, broker=None)


def _row(name: str, runs: list[Sample]) -> Row:
    rate = median(run.jobs_per_s for run in runs)
    server_us = median(run.worker_us + run.broker_us for run in runs)
    p99 = median(run.latency_ms(99) for run in runs)
    return Row(
        f"{'' if name.startswith('Penstock') else 'peer: '}{name}, {_CLIENTS} clients",
        f"{rate:,.0f} jobs/s, p99 {p99:,.0f} ms; server and broker {server_us:,.0f} us CPU a job",
        figures={"jobs_per_s": rate, "server_us": server_us, "p99_ms": p99},
    )
