"""The gateway: requests per second beside FastAPI that calls the model, CPU per request, what a hop costs, gRPC.

Gateway, worker and Redis are separate processes, signing is on, and all take turns. The peer's one process runs the
model, too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection
from typing import Final

from tests.benchmarks.harness import Client, Harness, Program, Sample
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.servers import RedisServer, free_port, wait_until

__all__ = ["measure"]

_CLIENTS: Final = 64
_START_TIMEOUT_S: Final = 60.0
_PEER: Final = "FastAPI"
_JSON: Final = "JSON"
_BINARY: Final = "OIP binary"
_GRPC: Final = "OIP gRPC"
_PYTHON: Final = "AsyncClient"
_REQUIRED_RATIO: Final = 1.2
_AIMED_RATIO: Final = 2.0
_GRPC_RATIO: Final = 0.6
_CPU_US: Final = {_JSON: (220, 120), _BINARY: (150, 80)}
_ADDED_MS: Final = (1.0, 0.4)


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Throughput with 64 clients, CPU of the gateway process per request, and the median of one client at a time."""
    with Harness() as harness:
        server = harness.redis()
        worker = harness.worker(server, "mlp")
        url, rpc, gateway = _gateway(harness, server)
        contenders = {
            _JSON: harness.client("gateway-json", f"{url}/v1/models/mlp:predict", worker=gateway, broker=None),
            _BINARY: harness.client("gateway-oip", f"{url}/v2/models/mlp/infer", worker=gateway, broker=None),
            _GRPC: harness.client("gateway-grpc", rpc, worker=gateway, broker=None),
            _PYTHON: harness.client("async", server.url, worker=worker, broker=server),
        }
        if importlib.util.find_spec("fastapi"):
            contenders[_PEER] = _peer(harness)
        together = _turns(contenders, scale.rounds, scale.http_jobs, _CLIENTS, say)
        alone = _turns(contenders, scale.rounds, scale.alone_jobs, 1, say)
    return [*_rates(together), *_costs(together), *_added(alone)]


def _gateway(harness: Harness, server: RedisServer) -> tuple[str, str, Program]:
    port, grpc_port = free_port(), free_port()
    environment = {**harness.settings, "PENSTOCK_REDIS_URL": server.url}
    program = harness.program("penstock", ["serve", "--port", str(port), "--grpc-port", str(grpc_port)], environment)
    wait_until(lambda: _answers(program, port, "/health/ready"), _START_TIMEOUT_S, "the gateway answers")
    return f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}", program


def _peer(harness: Harness) -> Client:
    port = free_port()
    program = harness.program("tests.benchmarks.fastapi_mlp", [str(port)])
    wait_until(lambda: _answers(program, port, "/openapi.json"), _START_TIMEOUT_S, "FastAPI answers")
    return harness.client("http", f"http://127.0.0.1:{port}/predict", worker=program, broker=None)


def _answers(program: Program, port: int, path: str) -> bool:
    if not program.is_running:
        raise RuntimeError(f"The server ended\n{program.tail()}")
    with closing(HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        try:
            connection.request("GET", path)
            return connection.getresponse().status == HTTPStatus.OK
        except OSError:
            return False


def _turns(
    contenders: Mapping[str, Client], rounds: int, jobs: int, clients: int, say: Progress
) -> dict[str, list[Sample]]:
    taken: dict[str, list[Sample]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, client in contenders.items():
            sample = client.run(jobs, clients)
            # The first round warms up.
            taken[name] += [sample] if number else []
            say(f"gateway {number}/{rounds}, {clients} clients: {name}: {sample.jobs_per_s:,.0f}/s")
    return taken


def _rates(taken: Mapping[str, list[Sample]]) -> list[Row]:
    rates = {name: median(run.jobs_per_s for run in runs) for name, runs in taken.items()}
    rows = [
        Row(f"gateway, {name}, {_CLIENTS} clients", f"{rate:,.0f} requests/s", figures={"requests_per_s": rate})
        for name, rate in rates.items()
        if name != _PEER
    ]
    against_rest = rates[_GRPC] / rates[_BINARY]
    rows.append(
        Row(
            f"gateway, OIP gRPC against REST binary, {_CLIENTS} clients",
            f"{against_rest:.2f}x",
            f">= {_GRPC_RATIO}x",
            ok=verdict(required=against_rest >= _GRPC_RATIO),
            figures={"ratio": against_rest},
        )
    )
    if _PEER not in rates:
        return [*rows, Row(f"peer: {_PEER}, the model per request", "not installed")]
    ratio = rates[_JSON] / rates[_PEER]
    peer_us = median(run.worker_us for run in taken[_PEER])
    return [
        *rows,
        Row(
            f"peer: {_PEER}, the model per request, {_CLIENTS} clients",
            f"{rates[_PEER]:,.0f} requests/s; {peer_us:,.0f} us CPU a request, the model's included",
            figures={"requests_per_s": rates[_PEER], "server_us": peer_us},
        ),
        Row(
            f"gateway, JSON, {_CLIENTS} clients, against {_PEER} that calls the model per request",
            f"{ratio:.2f}x",
            f">= {_REQUIRED_RATIO}x",
            f">= {_AIMED_RATIO:g}x",
            verdict(required=ratio >= _REQUIRED_RATIO, aim=ratio >= _AIMED_RATIO),
            {"ratio": ratio},
        ),
    ]


def _costs(taken: Mapping[str, list[Sample]]) -> list[Row]:
    rows = []
    for name, (required, aim) in _CPU_US.items():
        cost = median(run.worker_us for run in taken[name])
        rows.append(
            Row(
                f"gateway CPU per request, {name} of 384 floats",
                f"{cost:,.0f} us",
                f"<= {required} us",
                f"<= {aim} us",
                verdict(required=cost <= required, aim=cost <= aim),
                {"cpu_us": cost},
            )
        )
    return rows


def _added(alone: Mapping[str, list[Sample]]) -> list[Row]:
    p50_ms = {name: median(run.latency_ms(50) for run in runs) for name, runs in alone.items()}
    required, aim = _ADDED_MS
    return [
        Row(
            f"what the gateway adds to the Python client's p50, one at a time, {name}",
            f"{p50_ms[name] - p50_ms[_PYTHON]:.2f} ms ({p50_ms[name]:.2f} ms)",
            f"<= {required} ms",
            f"<= {aim} ms",
            verdict(required=p50_ms[name] - p50_ms[_PYTHON] <= required, aim=p50_ms[name] - p50_ms[_PYTHON] <= aim),
            {"added_ms": p50_ms[name] - p50_ms[_PYTHON]},
        )
        for name in (_JSON, _BINARY)
    ]
