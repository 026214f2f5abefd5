"""Equal jobs: the cost of keeping answers that no job asks for again, and the gain where jobs do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Final, NamedTuple

from penstock.registry.broker.base import Delivery
from penstock.registry.envelope import JobHeader, Keyring, open_job, seal
from penstock.registry.queues import Priority, new_job_id
from penstock.registry.settings_sections import CacheConfig
from penstock.registry.tensors import Tensor
from penstock.safety.cache_entry import KEY_BYTES
from penstock.workers.cache import AnswerCache, JobKeys
from penstock.workers.job import ClaimedJob
from penstock.workers.results import EncodedOutputs
from penstock.workers.shared_headers import SharedHeaders
from tests.benchmarks import mlp
from tests.benchmarks.harness import Client, Harness, Sample
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.workers.doubles import ready_version

__all__ = ["claimed_jobs", "measure"]

_IN_FLIGHT: Final = 64
_WITH: Final = {"PENSTOCK_INFERENCE_CACHE_ENABLED": "true", "PENSTOCK_INFERENCE_BATCHING_SINGLE_FLIGHT": "true"}
_KEPT: Final = 10_000
"""What a worker keeps by default: repeated jobs are fewer, or none would be found."""
_TURNS: Final = 3
"""In each round: the contenders differ by little."""
_REPEATS: Final = 20


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module."""
    with Harness() as without, Harness(_WITH) as keeping:
        plain, keeper = _client(without), _client(keeping)
        for client in (plain, keeper):
            client.run(min(512, scale.jobs), _IN_FLIGHT)
        jobs = min(scale.jobs, _KEPT // 2)
        turns = [_turn(plain, keeper, jobs, say, begins=turn % 2 == 0) for turn in range(_TURNS * scale.rounds)]
    ran, missed, hit = ([turn[index] for turn in turns] for index in range(3))
    return [_distinct(missed, ran), _equal(hit, ran), _found(*_found_us())]


def _client(harness: Harness) -> Client:
    server = harness.redis()
    return harness.client("submit_many", server.url, worker=harness.worker(server, "mlp"), broker=server)


def _turn(plain: Client, keeper: Client, jobs: int, say: Progress, *, begins: bool) -> tuple[Sample, Sample, Sample]:
    """The same number of jobs without keeping, with distinct inputs, and with those inputs once more.

    begins: whether the one without begins.
    """
    if begins:
        ran = plain.run(jobs, _IN_FLIGHT)
    missed = keeper.run(jobs, _IN_FLIGHT)
    hit = keeper.run(jobs, _IN_FLIGHT, again=True)
    if not begins:
        ran = plain.run(jobs, _IN_FLIGHT)
    say("equal: " + ", ".join(f"{each.jobs_per_s:,.0f}/s at {each.worker_us:.0f} us" for each in (ran, missed, hit)))
    return ran, missed, hit


def _distinct(missed: Sequence[Sample], ran: Sequence[Sample]) -> Row:
    measured, figures = _against(missed, ran)
    ratio, cpu_ratio = figures["ratio"], figures["cpu_ratio"]
    return Row(
        "distinct jobs, response cache and single flight on, against off",
        measured,
        ">= 0.98x jobs/s, <= 1.00x worker CPU",
        ">= 1.0x jobs/s",
        verdict(required=ratio >= 0.98 and cpu_ratio <= 1.0, aim=ratio >= 1.0),
        figures,
    )


def _equal(hit: Sequence[Sample], ran: Sequence[Sample]) -> Row:
    measured, figures = _against(hit, ran)
    return Row(
        "equal jobs, answered by the response cache, against one forward each",
        measured,
        ">= 1.0x jobs/s, no more CPU",
        "",
        verdict(required=figures["ratio"] >= 1.0 and figures["cpu_ratio"] <= 1.0),
        figures,
    )


def _against(ours: Sequence[Sample], theirs: Sequence[Sample]) -> tuple[str, dict[str, float]]:
    """Medians of both, and of the ratios of each turn. That of CPU is judged as it is printed, with two decimals."""
    pairs = [*zip(ours, theirs, strict=True)]
    ratio = median(our.jobs_per_s / their.jobs_per_s for our, their in pairs)
    cpu_ratio = round(median(our.worker_us / their.worker_us for our, their in pairs), 2)
    rates = [median(each.jobs_per_s for each in samples) for samples in (ours, theirs)]
    spent = [median(each.worker_us for each in samples) for samples in (ours, theirs)]
    return (
        f"{rates[0]:,.0f} against {rates[1]:,.0f} jobs/s: {ratio:.2f}x; worker {spent[0]:.0f} against "
        f"{spent[1]:.0f} us: {cpu_ratio:.2f}x",
        {
            "ratio": ratio,
            "cpu_ratio": cpu_ratio,
            "jobs_per_s": rates[0],
            "worker_us": spent[0],
            "worker_us_without": spent[1],
        },
    )


class Found(NamedTuple):
    """CPU microseconds of a look-up, the medians: with its key ready, and with the key hashed from the job."""

    ready_us: float
    hashed_us: float

    def __str__(self) -> str:
        return f"{self.ready_us:.2f} / {self.hashed_us:.2f} us"


def _found(cache: Found, bare: Found) -> Row:
    return Row(
        f"response cache: an answer found among {_KEPT:,}, p50, key ready / 1.5 kB hashed as well, a dict beside it",
        f"{cache} (a dict {bare})",
        "<= 0.6 / <= 2.2 us",
        "",
        verdict(required=cache.ready_us <= 0.6 and cache.hashed_us <= 2.2),
        {**cache._asdict(), "dict_ready_us": bare.ready_us, "dict_hashed_us": bare.hashed_us},
    )


def _found_us() -> tuple[Found, Found]:
    """Of a full cache and of a dict, in turns, for claims of so many jobs as are in flight."""
    version, jobs = ready_version(), claimed_jobs(_KEPT)
    cache, keys = AnswerCache(CacheConfig(l1_size=_KEPT), time.monotonic), JobKeys(isolates_tenants=True)
    keys.begin_all(jobs, version.label)
    answer = EncodedOutputs((Tensor("y", "float32", (1, 8)),), bytes(32), version.content_hash, version.generation)
    cache.memory.put_all([(job.digest, answer) for job in jobs], 86_400.0)
    claims = [jobs[start : start + _IN_FLIGHT] for start in range(0, len(jobs), _IN_FLIGHT)]
    by_key = {job.digest: answer for job in jobs}
    by_body = {sha256(job.body).digest()[:KEY_BYTES]: answer for job in jobs}

    def in_cache(claim: list[ClaimedJob], *, is_ready: bool) -> bool:
        if not is_ready:
            keys.begin_all(claim, version.label)
        return None not in cache.find_all(claim, version)

    def in_dict(claim: list[ClaimedJob], *, is_ready: bool) -> bool:
        if is_ready:
            return None not in [by_key.get(job.known_digest) for job in claim]
        return None not in [by_body.get(sha256(job.body).digest()[:KEY_BYTES]) for job in claim]

    def look(find: Callable[..., bool], *, is_ready: bool) -> list[float]:
        taken = []
        for claim in claims:
            begun = time.thread_time()
            is_found = find(claim, is_ready=is_ready)
            taken.append((time.thread_time() - begun) / len(claim) * 1e6)
            if not is_found:
                raise RuntimeError("An answer that was kept was not found")
        return taken

    ways = [partial(look, find, is_ready=is_ready) for find in (in_cache, in_dict) for is_ready in (True, False)]
    turns = [[way() for way in ways] for _ in range(_REPEATS)]
    medians = [median(us for taken in taken_of_way for us in taken) for taken_of_way in zip(*turns, strict=True)]
    return Found(*medians[:2]), Found(*medians[2:])


def claimed_jobs(count: int) -> list[ClaimedJob]:
    """Jobs of one client with distinct inputs, as a worker opens them."""
    keyring, content = Keyring.parse(None), (Tensor("x", "float32", (1, mlp.WIDTH)),)
    headers = SharedHeaders(keyring, job_ttl_ms=3_600_000)
    opened = []
    for row in mlp.inputs(count, seed=0):
        header = JobHeader(new_job_id("mlp"), "default", "mlp", "normal", content)
        delivery = Delivery("mlp", Priority.NORMAL, b"1-1", seal("job", header, row.tobytes(), keyring))
        job = headers.open(delivery, 0.0, 0.0)
        if job is None:
            job = ClaimedJob(delivery, *open_job(delivery.sealed, keyring), 1, 0.0, 0.0, 0)
            headers.learn(job)
        opened.append(job)
    return opened
