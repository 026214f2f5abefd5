"""What workers count of the arms of an experiment: jobs, errors, latency.

    worker -- its totals of one epoch, once a second --> Broker.observe --> merged --> gates and reports

A worker writes its totals and no increments: a repeated write changes nothing, and kill -9 loses the jobs since the
last write at most. An epoch is one decision about the shares, so that each step of a rollout has figures of its own.

Latency is from the acceptance of a job to the commit of its answer, for jobs that had a forward: cached answers would
favour the arm with the fuller cache. Quality is what clients report of answers: one number for a job, summed by
version at the broker. Its quantiles come from buckets with a relative error of at most 5 %
(DDSketch: Masson, Rim, Lee, VLDB 2019, section 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, exp, fsum, isfinite, log
from typing import Final

import msgspec

from penstock.safety.statistics import Moments

__all__ = ["ArmFigures", "merged", "observation_field", "read_observations", "read_ratings"]

_ACCURACY: Final = 0.05
_LOG_GAMMA: Final = log((1 + _ACCURACY) / (1 - _ACCURACY))
_SHORTEST_S: Final = 1e-6
_MOST_DIGITS: Final = 18


class ArmFigures(msgspec.Struct, omit_defaults=True):
    """The counts of one arm; the counts of several workers can be added."""

    jobs: int = 0
    """Jobs that ended with an answer or with an error of the arm."""
    errors: int = 0
    cached: int = 0
    """Of `jobs`: those that needed no forward."""
    latency_s: Moments = Moments()
    """Of the jobs that a forward answered."""
    buckets: dict[int, int] = {}
    """The same latencies by bucket: bucket i ends at gamma^i seconds."""

    def add_latencies(self, seconds: Sequence[float]) -> None:
        """Count these latencies."""
        if not seconds:
            return
        mean = fsum(seconds) / len(seconds)
        m2 = fsum([(each - mean) ** 2 for each in seconds])
        self.latency_s = self.latency_s.merged(Moments(len(seconds), mean, m2))
        buckets = self.buckets
        for each in seconds:
            bucket = ceil(log(max(each, _SHORTEST_S)) / _LOG_GAMMA)
            buckets[bucket] = buckets.get(bucket, 0) + 1

    def add(self, other: ArmFigures) -> None:
        """Count what `other` has counted."""
        self.jobs += other.jobs
        self.errors += other.errors
        self.cached += other.cached
        self.latency_s = self.latency_s.merged(other.latency_s)
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count

    @property
    def error_rate(self) -> float | None:
        """Errors per job, 0 to 1; None without a job."""
        return self.errors / self.jobs if self.jobs else None

    @property
    def mean_s(self) -> float | None:
        """The mean latency in seconds; None without one."""
        return self.latency_s.mean if self.latency_s.count else None

    def quantile_s(self, share: float) -> float | None:
        """The latency that `share` of the jobs, 0 to 1, did not exceed, within 5 %; None without one."""
        rank, seen = share * (self.latency_s.count - 1), 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen > rank:
                # The value within the bucket whose relative error is the same at both of its ends.
                return 2 * exp(bucket * _LOG_GAMMA) / (1 + exp(_LOG_GAMMA))
        return None

    def beyond(self, seconds: float) -> int:
        """Jobs whose latency was longer than this, to a bucket."""
        last = ceil(log(max(seconds, _SHORTEST_S)) / _LOG_GAMMA)
        return sum(count for bucket, count in self.buckets.items() if bucket > last)

    @property
    def is_sound(self) -> bool:
        """Whether these can be counts: another program may have written them."""
        count, mean, m2 = self.latency_s.count, self.latency_s.mean, self.latency_s.m2
        counts = (self.jobs, self.errors, self.cached, count, *self.buckets.values())
        if any(each < 0 for each in counts) or not isfinite(mean) or not isfinite(m2) or mean < 0 or m2 < 0:
            return False
        return self.errors + self.cached + count <= self.jobs and count == sum(self.buckets.values())


_decode: Final = msgspec.json.Decoder(dict[str, ArmFigures]).decode


def observation_field(epoch: int, consumer: str) -> str:
    """The name under which one boot of a worker writes its totals of one epoch."""
    return f"{epoch} {consumer}"


def read_observations(written: Mapping[str, bytes]) -> dict[int, dict[str, ArmFigures]]:
    """The figures of all workers by epoch and version. Entries that no worker has written so are left out."""
    found: dict[int, dict[str, ArmFigures]] = {}
    for field, value in written.items():
        epoch, space, _ = field.partition(" ")
        if not space or not epoch.isdecimal() or len(epoch) > _MOST_DIGITS:
            continue
        try:
            arms = _decode(value)
        except msgspec.MsgspecError:
            continue
        if all(figures.is_sound for figures in arms.values()):
            epochs = found.setdefault(int(epoch), {})
            for version, figures in arms.items():
                epochs.setdefault(version, ArmFigures()).add(figures)
    return found


def read_ratings(written: Mapping[str, bytes]) -> dict[str, Moments]:
    """The quality that clients have reported, by version. Entries that no client has written so are left out."""
    found: dict[str, Moments] = {}
    for version, sums in written.items():
        count, _, rest = sums.decode(errors="replace").partition(" ")
        try:
            mean, m2 = map(float, rest.split(" "))
        except ValueError:
            continue
        if count.isdecimal() and len(count) <= _MOST_DIGITS and isfinite(mean) and isfinite(m2) and m2 >= 0:
            found[version] = Moments(int(count), mean, m2)
    return found


def merged(figures: Iterable[ArmFigures]) -> ArmFigures:
    """The counts of all of these together."""
    total = ArmFigures()
    for each in figures:
        total.add(each)
    return total
