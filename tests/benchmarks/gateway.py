"""The gateway: requests per second beside other model servers, CPU per request, what a hop costs, gRPC.

Gateway, worker and Redis are separate processes, signing is on, and all take turns; a second gateway
asks for API keys, and has the same bounds. Peers are started after what is
measured alone, and run the model, too: FastAPI calls it for each request, LitServe and mosec form batches.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

import httpx

from penstock.registry.api_keys import KeyLimits, new_api_key
from penstock.registry.catalog.api_keys import SqlApiKeys
from tests.benchmarks import peers
from tests.benchmarks.harness import Client, Harness, Sample
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.servers import RedisServer, free_port

__all__ = ["measure"]

_CLIENTS: Final = 64
_FASTAPI: Final = "FastAPI, the model per request"
_LITSERVE: Final = peers.SERVERS["litserve"][0]
_MOSEC: Final = [peers.SERVERS[name][0] for name in ("mosec", "mosec-msgpack")]
_JSON: Final = "JSON"
_BINARY: Final = "OIP binary"
_KEYED: Final = "JSON, a key with four limits"
_KEYED_BINARY: Final = "OIP binary, a key with four limits"
_GRPC: Final = "OIP gRPC"
_PYTHON: Final = "AsyncClient"
_MANY: Final = 10**9
_MINUTE_S: Final = 60.0
_OURS: Final = (_JSON, _KEYED, _BINARY, _KEYED_BINARY, _GRPC, _PYTHON)
_CPU_US: Final = {_JSON: (220, 120), _KEYED: (220, 120), _BINARY: (150, 80), _KEYED_BINARY: (150, 80)}
_LIMIT: Final = 1000
"""Requests of one key in a minute, over two gateways. Three times as many are sent."""
_ADDED_MS: Final = (1.0, 0.4)


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Throughput with 64 clients, CPU of the gateway process per request, and the median of one client at a time."""
    with Harness() as harness:
        server = harness.redis()
        worker = harness.worker(server, "mlp")
        grpc_port = str(free_port())
        url, gateway = harness.gateway(server, {"PENSTOCK_INFERENCE_SERVER_GRPC_PORT": grpc_port})
        registry, key = _key(harness)
        asks = {"PENSTOCK_REGISTRY_URL": registry, "PENSTOCK_INFERENCE_SERVER_API_KEYS": "required"}
        keyed_url, keyed = harness.gateway(server, asks)
        keyed_url = keyed_url.replace("://", f"://{key}@")
        predict, infer = "/v1/models/mlp:predict", "/v2/models/mlp/infer"
        contenders = {
            _JSON: harness.client("gateway-json", f"{url}{predict}", worker=gateway, broker=None),
            _KEYED: harness.client("gateway-json", f"{keyed_url}{predict}", worker=keyed, broker=None),
            _BINARY: harness.client("gateway-oip", f"{url}{infer}", worker=gateway, broker=None),
            _KEYED_BINARY: harness.client("gateway-oip", f"{keyed_url}{infer}", worker=keyed, broker=None),
            _GRPC: harness.client("gateway-grpc", f"127.0.0.1:{grpc_port}", worker=gateway, broker=None),
            _PYTHON: harness.client("async", server.url, worker=worker, broker=server),
        }
        alone = _turns(contenders, scale.rounds, scale.alone_jobs, 1, say)
        if importlib.util.find_spec("fastapi"):
            contenders[_FASTAPI] = _fastapi(harness)
        for name in filter(peers.is_installed, peers.SERVERS):
            contenders[peers.SERVERS[name][0]] = peers.client(harness, name)
        together = _turns(contenders, scale.rounds, scale.http_jobs, _CLIENTS, say)
        limit = _exactness(harness, server, registry)
    return [*_rates(together), *_costs(together), _cost_of_key(together), *_added(alone), limit]


def _key(harness: Harness) -> tuple[str, str]:
    """(the URL of a registry, the text of its only key)."""
    registry = f"sqlite:///{harness.folder() / 'keys.db'}"
    made = new_api_key(
        "benchmark",
        now=0,
        limits=KeyLimits(
            requests_per_minute=_MANY, tokens_per_minute=_MANY, requests_per_day=_MANY, requests_per_month=_MANY
        ),
    )
    SqlApiKeys(registry).add(made.key)
    return registry, made.text


def _exactness(harness: Harness, server: RedisServer, registry: str) -> Row:
    """How many requests two gateway processes admit together within a minute, under three times the limit."""
    made = new_api_key("limited", now=0, limits=KeyLimits(requests_per_minute=_LIMIT))
    SqlApiKeys(registry).add(made.key)
    asks = {"PENSTOCK_REGISTRY_URL": registry, "PENSTOCK_INFERENCE_SERVER_API_KEYS": "required"}
    urls = [harness.gateway(server, asks)[0] for _ in range(2)]
    begun = time.monotonic()
    statuses = asyncio.run(_overload(urls, made.text, 3 * _LIMIT))
    took_s = time.monotonic() - begun
    admitted, refused = statuses[200], statuses[429]
    # A minute slides: what was sent later than 60 s after the first request may be admitted, too.
    is_exact = (admitted, refused) == (_LIMIT, 2 * _LIMIT) if took_s < _MINUTE_S else None
    return Row(
        f"a limit of {_LIMIT} requests/min over two gateway processes, under {3 * _LIMIT}",
        f"{admitted} admitted, {refused} refused in {took_s:.0f} s",
        f"{_LIMIT} in the minute, 0 over",
        "",
        "not judged: it took longer than the minute" if is_exact is None else verdict(required=is_exact, aim=None),
        {"admitted": admitted, "refused": refused},
    )


async def _overload(urls: list[str], key: str, count: int) -> Counter[int]:
    """The statuses of so many requests, in turn of each gateway."""
    places = asyncio.Semaphore(_CLIENTS)
    async with httpx.AsyncClient(headers={"X-API-Key": key}, timeout=60) as client:

        async def ask(number: int) -> int:
            async with places:
                return (await client.get(f"{urls[number % len(urls)]}/v2")).status_code

        return Counter(await asyncio.gather(*(ask(number) for number in range(count))))


def _fastapi(harness: Harness) -> Client:
    port = free_port()
    program = harness.program("tests.benchmarks.fastapi_mlp", [str(port)])
    program.wait_to_answer("GET", f"http://127.0.0.1:{port}/openapi.json")
    return harness.client("http", f"http://127.0.0.1:{port}/predict", worker=program, broker=None)


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
    """Requests per second of ours and of the peers, then what the peers' are to ours, in the same round."""
    rates = {name: median(run.jobs_per_s for run in runs) for name, runs in taken.items()}
    rows = []
    for name, rate in rates.items():
        own_us = median(run.worker_us for run in taken[name])
        is_ours = name in _OURS
        rows.append(
            Row(
                f"{'gateway' if is_ours else 'peer'}: {name}, {_CLIENTS} clients",
                f"{rate:,.0f} requests/s"
                + ("" if is_ours else f"; {own_us:,.0f} us CPU a request, the model's included"),
                figures={"requests_per_s": rate} | ({} if is_ours else {"server_us": own_us}),
            )
        )
    bounds: list[tuple[str, list[str], float, float | None]] = [
        (_JSON, [_LITSERVE], 2.5, 4.0),
        (_JSON, [_FASTAPI], 1.2, 2.0),
        (_KEYED, [_LITSERVE], 2.5, 4.0),
        (_KEYED, [_FASTAPI], 1.2, 2.0),
        (_BINARY, _MOSEC, 0.5, 1.0),
        (_KEYED_BINARY, _MOSEC, 0.5, 1.0),
        (_GRPC, [_BINARY], 0.6, None),
    ]
    for ours, their_names, required, aim in bounds:
        title = f"gateway, {ours}, {_CLIENTS} clients, against {' or '.join(their_names)}"
        if not (theirs := [name for name in their_names if name in rates]):
            rows.append(Row(title, "not installed"))
            continue
        fastest = max(theirs, key=rates.__getitem__)
        pairs = zip(taken[ours], taken[fastest], strict=True)
        ratio = median(own.jobs_per_s / peer.jobs_per_s for own, peer in pairs)
        rows.append(
            Row(
                title,
                f"{ratio:.2f}x",
                f">= {required}x",
                "" if aim is None else f">= {aim:g}x",
                verdict(required=ratio >= required, aim=None if aim is None else ratio >= aim),
                {"ratio": ratio},
            )
        )
    return rows


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


def _cost_of_key(taken: Mapping[str, list[Sample]]) -> Row:
    without, with_key = (median(run.worker_us for run in taken[name]) for name in (_JSON, _KEYED))
    return Row(
        "what a key with four limits adds to the gateway's CPU per request",
        f"{with_key - without:,.0f} us ({with_key:,.0f} us)",
        figures={"added_us": with_key - without},
    )


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
        for name in (_JSON, _KEYED, _BINARY, _KEYED_BINARY)
    ]
