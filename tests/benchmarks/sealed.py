"""Sealed payloads: what it costs to encrypt the bodies of jobs and results, against the same jobs in plaintext."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from penstock.safety.sealing import DataKeys
from tests.benchmarks.harness import Client, Harness, Sample
from tests.benchmarks.report import Progress, Row, median
from tests.benchmarks.scale import Scale

__all__ = ["measure"]

_IN_FLIGHT: Final = 64
_KINDS: Final = {"submit_many": "Client.submit_many", "async": "AsyncClient"}
_KEY: Final = b"b" * 32
_SEALED: Final = {
    "PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS": "on",
    "PENSTOCK_L2_ENCRYPTION_KEY": _KEY.hex(),
}
_BODY: Final = bytes(1536)
"""As large as the inputs of the benchmark's model."""
_CALLS: Final = 5_000
_REPEATS: Final = 20


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module. The two take turns, and each begins every second one."""
    with Harness() as without, Harness(_SEALED) as sealing:
        plain, sealed = _clients(without), _clients(sealing)
        for client in (*plain, *sealed):
            client.run(min(512, scale.jobs), _IN_FLIGHT)
        turns: dict[str, list[tuple[Sample, Sample]]] = {kind: [] for kind in _KINDS}
        for number in range(2 * scale.rounds):
            for pair in zip(plain, sealed, strict=True):
                turns[pair[0].kind].append(_turn(pair, scale.jobs, say, begins=number % 2))
    rows = [_row(name, turns[kind]) for kind, name in _KINDS.items()]
    return [*rows, _alone(*_seal_us())]


def _clients(harness: Harness) -> list[Client]:
    server = harness.redis()
    worker = harness.worker(server, "mlp")
    return [harness.client(kind, server.url, worker=worker, broker=server) for kind in _KINDS]


def _turn(pair: tuple[Client, Client], jobs: int, say: Progress, *, begins: int) -> tuple[Sample, Sample]:
    """The same number of jobs of both, in plaintext and sealed. begins: the place of the one that begins."""
    samples = {place: pair[place].run(jobs, _IN_FLIGHT) for place in (begins, 1 - begins)}
    plain, sealed = samples[0], samples[1]
    say(f"{pair[0].kind}: plain {_shown(plain)}; sealed {_shown(sealed)}")
    return plain, sealed


def _shown(sample: Sample) -> str:
    spent = f"{sample.worker_us:.0f} / {sample.client_us:.0f} / {sample.broker_us:.0f} us"
    return f"{sample.jobs_per_s:,.0f}/s, {spent}"


def _row(name: str, turns: Sequence[tuple[Sample, Sample]]) -> Row:
    ratio = median(sealed.jobs_per_s / plain.jobs_per_s for plain, sealed in turns)
    rates = [median(turn[place].jobs_per_s for turn in turns) for place in (1, 0)]
    worker_us, client_us, broker_us = (
        median(getattr(sealed, part) - getattr(plain, part) for plain, sealed in turns)
        for part in ("worker_us", "client_us", "broker_us")
    )
    return Row(
        f"sealed payloads, {name}, {_IN_FLIGHT} in flight, against plaintext; more CPU per job: worker / client / "
        "redis-server",
        f"{rates[0]:,.0f} against {rates[1]:,.0f} jobs/s: {ratio:.2f}x; {worker_us:+.1f} / {client_us:+.1f} / "
        f"{broker_us:+.1f} us",
        figures={"ratio": ratio, "jobs_per_s": rates[0], "worker_us": worker_us, "client_us": client_us},
    )


def _alone(seal_us: float, open_us: float) -> Row:
    return Row(
        f"one seal / one opening of {len(_BODY):,} bytes, bound to a header",
        f"{seal_us:.2f} / {open_us:.2f} us",
        figures={"seal_us": seal_us, "open_us": open_us},
    )


def _seal_us() -> tuple[float, float]:
    """CPU microseconds, the least of some repeats."""
    keys, bound = DataKeys((_KEY,)), bytes(200)
    sealed = keys.seal(_BODY, bound)
    taken: list[tuple[float, float]] = []
    for _ in range(_REPEATS):
        begun = time.thread_time()
        for _ in range(_CALLS):
            keys.seal(_BODY, bound)
        between = time.thread_time()
        for _ in range(_CALLS):
            keys.open(sealed, bound)
        taken.append((between - begun, time.thread_time() - between))
    seal_us, open_us = (min(each) / _CALLS * 1e6 for each in zip(*taken, strict=True))
    return seal_us, open_us
