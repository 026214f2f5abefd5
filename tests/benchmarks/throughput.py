"""Saturation: jobs/s and CPU per job, ours, plain Celery and bare Redis taking turns.

64 and 256 in flight x AsyncClient, Client.submit_many, a Celery task per job, Redis without features
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tests.benchmarks import mlp
from tests.benchmarks.events import EventListener
from tests.benchmarks.harness import Client, Harness, Sample
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale

__all__ = ["measure"]

IN_FLIGHT: Final = (64, 256)
_NAMES: Final = {"async": "AsyncClient", "submit_many": "Client.submit_many"}


class Cpu(NamedTuple):
    """Microseconds per job."""

    worker: float
    client: float
    redis: float

    def __str__(self) -> str:
        return f"{self.worker:,.0f} / {self.client:,.0f} / {self.redis:,.0f} us"

    def is_within(self, limit: Cpu) -> bool:
        """Whether each part is."""
        return all(part <= most for part, most in zip(self, limit, strict=True))

    @property
    def total(self) -> float:
        """Of all three."""
        return self.worker + self.client + self.redis


_REQUIRED: Final = Cpu(40, 24, 28)
_AIM: Final = Cpu(30, 18, 20)
_REQUIRED_SPEED: Final = 27.0
_AIMED_SPEED: Final = 35.0
"""Times the jobs per second of a plain Celery task."""
_REQUIRED_TOTAL: Final = 2.2
_AIMED_TOTAL: Final = 1.7
"""Times the CPU of bare Redis streams."""

Samples = Mapping[tuple[str, int], Sequence[Sample]]


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module."""
    with Harness() as harness:
        ours, theirs, bare = harness.redis(), harness.redis(), harness.redis()
        worker, plain, raw = harness.worker(ours, "mlp"), harness.celery_worker(theirs), harness.raw_worker(bare)
        clients = [
            harness.client("async", ours.url, worker=worker, broker=ours),
            harness.client("submit_many", ours.url, worker=worker, broker=ours),
            harness.client("celery", theirs.celery_url, worker=plain, broker=theirs),
            harness.client("raw", bare.url, worker=raw, broker=bare),
        ]
        with EventListener(ours.celery_url) as listener:
            jobs = sum(each.jobs for each in _warm_up(clients, scale) if each is not None)
            samples = _take_turns(clients, scale, say)
            jobs += sum(each.jobs for (kind, _), runs in samples.items() if kind in _NAMES for each in runs)
            seen = listener.await_succeeded(jobs)
        rows = [_ratio(samples, kind, in_flight) for in_flight in IN_FLIGHT for kind in _NAMES]
        rows += [_cpu(samples, kind, in_flight) for in_flight in IN_FLIGHT for kind in _NAMES]
        rows += [_total(samples, kind, in_flight) for in_flight in IN_FLIGHT for kind in _NAMES]
        alone = mlp.in_process_rate(mlp.inputs(scale.jobs, seed=0))
    rows += [_beside(samples, "celery", "plain Celery task per job, prefork, one process", n) for n in IN_FLIGHT]
    rows += [_beside(samples, "raw", "bound: bare Redis streams, pipelined, no features", n) for n in IN_FLIGHT]
    rows.append(
        Row("bound: the model alone in process, full batches", f"{alone:,.0f} jobs/s", figures={"jobs_per_s": alone})
    )
    rows.append(Row("Celery events of those jobs that a listener received", f"{seen:,} of {jobs:,}"))
    return rows


def _warm_up(clients: Sequence[Client], scale: Scale) -> list[Sample | None]:
    """The samples of ours, None for others."""
    runs = [(client, client.run(min(512, _jobs(client, scale)), IN_FLIGHT[0])) for client in clients]
    return [run if client.kind in _NAMES else None for client, run in runs]


def _take_turns(clients: Sequence[Client], scale: Scale, say: Progress) -> Samples:
    samples = defaultdict(list)
    for number in range(scale.rounds):
        for in_flight in IN_FLIGHT:
            for client in clients:
                sample = client.run(_jobs(client, scale), in_flight)
                samples[client.kind, in_flight].append(sample)
                say(
                    f"throughput {number + 1}/{scale.rounds}: {client.kind}, {in_flight} in flight: "
                    f"{sample.jobs_per_s:,.0f}/s, {_spent([sample])}"
                )
    return samples


def _jobs(client: Client, scale: Scale) -> int:
    return scale.celery_jobs if client.kind == "celery" else scale.jobs


def _ratio(samples: Samples, kind: str, in_flight: int) -> Row:
    ours, theirs = samples[kind, in_flight], samples["celery", in_flight]
    ratio = median(our.jobs_per_s / their.jobs_per_s for our, their in zip(ours, theirs, strict=True))
    rate, plain = (median(each.jobs_per_s for each in runs) for runs in (ours, theirs))
    return Row(
        f"jobs/s end to end, {_NAMES[kind]}, {in_flight} in flight, against one plain Celery task per job",
        f"{rate:,.0f} against {plain:,.0f}: {ratio:.1f}x",
        f">= {_REQUIRED_SPEED:g}x",
        f">= {_AIMED_SPEED:g}x",
        verdict(required=ratio >= _REQUIRED_SPEED, aim=ratio >= _AIMED_SPEED),
        {"jobs_per_s": rate, "celery_jobs_per_s": plain, "ratio": ratio, **_latencies(ours)},
    )


def _cpu(samples: Samples, kind: str, in_flight: int) -> Row:
    spent = _spent(samples[kind, in_flight])
    return Row(
        f"CPU per job, {_NAMES[kind]}, {in_flight} in flight: worker / client / redis-server",
        str(spent),
        f"<= {_REQUIRED}",
        f"<= {_AIM}",
        verdict(required=spent.is_within(_REQUIRED), aim=spent.is_within(_AIM)),
        spent._asdict(),
    )


def _total(samples: Samples, kind: str, in_flight: int) -> Row:
    ours, bare = samples[kind, in_flight], samples["raw", in_flight]
    ratio = median(_spent([our]).total / _spent([one]).total for our, one in zip(ours, bare, strict=True))
    return Row(
        f"CPU per job of all three processes, {_NAMES[kind]}, {in_flight} in flight, against bare Redis streams",
        f"{_spent(ours).total:,.0f} against {_spent(bare).total:,.0f} us: {ratio:.1f}x",
        f"<= {_REQUIRED_TOTAL:g}x",
        f"<= {_AIMED_TOTAL:g}x",
        verdict(required=ratio <= _REQUIRED_TOTAL, aim=ratio <= _AIMED_TOTAL),
        {"us": _spent(ours).total, "bare_us": _spent(bare).total, "ratio": ratio},
    )


def _beside(samples: Samples, kind: str, what: str, in_flight: int) -> Row:
    runs = samples[kind, in_flight]
    rate, spent = median(each.jobs_per_s for each in runs), _spent(runs)
    return Row(
        f"{what}, {in_flight} in flight",
        f"{rate:,.0f} jobs/s; worker / client / redis-server {spent}",
        figures={"jobs_per_s": rate, **spent._asdict(), **_latencies(runs)},
    )


def _spent(runs: Sequence[Sample]) -> Cpu:
    return Cpu(*(median(getattr(run, part) for run in runs) for part in ("worker_us", "client_us", "broker_us")))


def _latencies(runs: Sequence[Sample]) -> dict[str, float]:
    return {f"p{percentile}_ms": median(run.latency_ms(percentile) for run in runs) for percentile in (50, 99)}
