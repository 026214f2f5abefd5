"""Equal jobs: the cost of keeping answers that no job asks for again, and the gain where jobs do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from penstock.registry.envelope import JobHeader, Keyring, seal
from penstock.registry.tensors import Tensor
from penstock.workers.cache import L1Cache, key_of
from penstock.workers.results import EncodedOutputs
from tests.benchmarks import mlp
from tests.benchmarks.harness import Client, Harness, Sample
from tests.benchmarks.report import Progress, Row, median
from tests.benchmarks.scale import Scale

__all__ = ["measure"]

_IN_FLIGHT: Final = 64
_WITH: Final = {"PENSTOCK_INFERENCE_CACHE_ENABLED": "true", "PENSTOCK_INFERENCE_BATCHING_SINGLE_FLIGHT": "true"}
_KEPT: Final = 10_000
"""What a worker keeps by default: repeated jobs are fewer, or none would be found."""


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module."""
    with Harness() as without, Harness(_WITH) as keeping:
        plain, keeper = _client(without), _client(keeping)
        for client in (plain, keeper):
            client.run(min(512, scale.jobs), _IN_FLIGHT)
        jobs = min(scale.jobs, _KEPT // 2)
        turns = [_turn(plain, keeper, jobs, say) for _ in range(scale.rounds)]
    ran, missed, hit = ([turn[index] for turn in turns] for index in range(3))
    get_ns, bare_ns = _look_up_ns()
    return [
        _against("distinct jobs, response cache on, against off", missed, ran),
        _against("equal jobs, answered by the response cache, against one forward each", hit, ran),
        Row(
            f"response cache: one hit among {_KEPT:,} entries, hashing of 1.5 kB included, "
            "against a dict and a ready key",
            f"{get_ns:,.0f} against {bare_ns:,.0f} ns",
            figures={"get_ns": get_ns, "dict_ns": bare_ns},
        ),
    ]


def _client(harness: Harness) -> Client:
    server = harness.redis()
    return harness.client("submit_many", server.url, worker=harness.worker(server, "mlp"), broker=server)


def _turn(plain: Client, keeper: Client, jobs: int, say: Progress) -> tuple[Sample, Sample, Sample]:
    """The same number of jobs without keeping, with distinct inputs, and with those inputs once more."""
    ran = plain.run(jobs, _IN_FLIGHT)
    missed = keeper.run(jobs, _IN_FLIGHT)
    hit = keeper.run(jobs, _IN_FLIGHT, again=True)
    say("equal: " + ", ".join(f"{each.jobs_per_s:,.0f}/s at {each.worker_us:.0f} us" for each in (ran, missed, hit)))
    return ran, missed, hit


def _against(what: str, ours: list[Sample], theirs: list[Sample]) -> Row:
    ratio = median(our.jobs_per_s / their.jobs_per_s for our, their in zip(ours, theirs, strict=True))
    rates = [median(each.jobs_per_s for each in samples) for samples in (ours, theirs)]
    spent = [median(each.worker_us for each in samples) for samples in (ours, theirs)]
    speed = f"{rates[0]:,.0f} against {rates[1]:,.0f} jobs/s: {ratio:.2f}x"
    return Row(
        what,
        f"{speed}; worker {spent[0]:.0f} against {spent[1]:.0f} us",
        figures={"ratio": ratio, "jobs_per_s": rates[0], "worker_us": spent[0], "worker_us_without": spent[1]},
    )


def _look_up_ns() -> tuple[float, float]:
    """Nanoseconds of a look at a full cache, the key made from the job, and of one at a dict with such keys: medians,
    job by job in turn."""
    cache, bare = L1Cache(_KEPT, 1 << 28), dict[bytes, EncodedOutputs]()
    answer = EncodedOutputs((Tensor("y", "float32", (1, 8)),), bytes(32), "0" * 64, 0)
    header = JobHeader("mlp.0", "default", "mlp", "normal", (Tensor("x", "float32", (1, mlp.WIDTH)),))
    envelopes = [seal("job", header, row.tobytes(), Keyring.parse(None)) for row in mlp.inputs(_KEPT, seed=0)]
    keys = [key_of(header, sealed, "1", tenant="default") for sealed in envelopes]
    for key in keys:
        cache.put(key, answer, 86_400.0)
        bare[key] = answer

    def look(sealed: bytes) -> EncodedOutputs | None:
        return cache.get(key_of(header, sealed, "1", tenant="default"))

    turns = [(_ns(look, sealed), _ns(bare.get, key)) for sealed, key in zip(envelopes, keys, strict=True)]
    ours, theirs = (median(nanoseconds) for nanoseconds in zip(*turns, strict=True))
    return ours, theirs


def _ns(look: Callable[[bytes], object], key: bytes) -> int:
    begun = time.perf_counter_ns()
    look(key)
    return time.perf_counter_ns() - begun
