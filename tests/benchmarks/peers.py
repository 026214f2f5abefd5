"""Model servers that batch, beside us: same MLP, 64 clients, lists as JSON; what is not installed is skipped."""

from __future__ import annotations

import importlib.util
import json
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection
from typing import Final

from tests.benchmarks import mlp
from tests.benchmarks.harness import Client, Harness, Sample
from tests.benchmarks.report import Progress, Row, median
from tests.benchmarks.scale import Scale
from tests.servers import free_port, wait_until

__all__ = ["measure"]

_CLIENTS: Final = 64
_START_TIMEOUT_S: Final = 60.0
_SERVERS: Final = {
    "litserve": ("LitServe", "/predict", ("tests.benchmarks.litserve_mlp", "{port}")),
    "mosec": (
        "mosec",
        "/inference",
        ("tests.benchmarks.mosec_mlp", "--address", "127.0.0.1", "--port", "{port}"),
    ),
}
"""Distribution: its name, the path of its predictions, its command."""


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Jobs per second and CPU of the server's side per job, all of them taking turns."""
    with Harness() as harness:
        found = [name for name in _SERVERS if importlib.util.find_spec(name)]
        clients = {_SERVERS[name][0]: _client(harness, name) for name in found}
        if clients:
            server = harness.redis()
            worker = harness.worker(server, "mlp")
            clients["Penstock, AsyncClient"] = harness.client("async", server.url, worker=worker, broker=server)
        taken: dict[str, list[Sample]] = {name: [] for name in clients}
        for number in range(scale.rounds + 1):
            for name, client in clients.items():
                sample = client.run(scale.http_jobs, _CLIENTS)
                # The first round warms up.
                taken[name] += [sample] if number else []
                say(f"peers {number}/{scale.rounds}: {name}: {sample.jobs_per_s:,.0f}/s")
    rows = [_row(name, runs) for name, runs in taken.items()]
    return rows + [Row(f"peer: {_SERVERS[name][0]}", "not installed") for name in _SERVERS if name not in found]


def _client(harness: Harness, name: str) -> Client:
    _, path, (module, *arguments) = _SERVERS[name]
    port = free_port()
    body = json.dumps({"x": mlp.inputs(1, seed=0)[0].tolist()})
    program = harness.program(module, [part.format(port=port) for part in arguments])

    def answers() -> bool:
        if not program.is_running:
            raise RuntimeError(f"{name} ended\n{program.tail()}")
        with closing(HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
            try:
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                return connection.getresponse().status == HTTPStatus.OK
            except OSError:
                return False

    wait_until(answers, _START_TIMEOUT_S, f"{name} answers")
    return harness.client("http", f"http://127.0.0.1:{port}{path}", worker=program, broker=None)


def _row(name: str, runs: list[Sample]) -> Row:
    rate = median(run.jobs_per_s for run in runs)
    server_us = median(run.worker_us + run.broker_us for run in runs)
    p99 = median(run.latency_ms(99) for run in runs)
    return Row(
        f"{'' if name.startswith('Penstock') else 'peer: '}{name}, {_CLIENTS} clients",
        f"{rate:,.0f} jobs/s, p99 {p99:,.0f} ms; server and broker {server_us:,.0f} us CPU a job",
        figures={"jobs_per_s": rate, "server_us": server_us, "p99_ms": p99},
    )
