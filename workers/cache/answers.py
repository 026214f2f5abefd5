"""Answers that outlive their job: a later equal job needs no forward.

route:  find_all --> the cached answers of the version's present content and form, in memory
        ask      --> for those that memory lacks, the other tiers --> take_answered; see tiers.py
commit: keep, keep_all --> the answers of forwards, while their version is still active
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import NamedTuple

from penstock.registry.settings_sections import CacheConfig
from penstock.workers.batch_run import BatchRun
from penstock.workers.cache.memory import L1Cache
from penstock.workers.cache.texts import is_whole
from penstock.workers.cache.tier import TierStats
from penstock.workers.cache.tiers import LookedUp, SharedTiers, form_of
from penstock.workers.job import ClaimedJob
from penstock.workers.results import EncodedOutputs, JobOutcome
from penstock.workers.versions.version import ServedVersion

__all__ = ["AnswerCache", "CacheAccess", "CacheAnswers"]


class CacheAccess(NamedTuple):
    """Look-ups of one kind in one tier. reply: the reply address of the jobs."""

    model: str
    version: str
    reply: str
    tenant: str
    tier: str
    is_hit: bool


class CacheAnswers(NamedTuple):
    """Jobs that a tier was asked for: the answers that it had, and the jobs that need a forward."""

    version: ServedVersion
    found: list[tuple[ClaimedJob, EncodedOutputs]]
    missing: list[ClaimedJob]


class AnswerCache:
    """The cached answers of one worker. tiers: behind its memory; None: there are none. clock: monotonic seconds.

    Attributes:
        memory: the tier in this process's memory.
        tiers: those behind it.
    """

    def __init__(self, config: CacheConfig, clock: Callable[[], float], tiers: SharedTiers | None = None) -> None:
        self.memory = L1Cache(config.l1_size, config.l1_max_bytes, clock)
        self.tiers = tiers
        self._clock = clock
        self._accesses: Counter[CacheAccess] = Counter()

    def find_all(self, jobs: Sequence[ClaimedJob], version: ServedVersion) -> list[EncodedOutputs | None]:
        """The answers to equal jobs, in order: those that the version's present content gave in its present form."""
        content_hash, generation = version.content_hash, version.generation
        found = self.memory.get_all([job.digest for job in jobs])
        hits = 0
        if any(found):
            for number, answer in enumerate(found):
                if answer is None:
                    continue
                if answer.content_hash == content_hash and answer.generation == generation:
                    hits += 1
                else:
                    found[number] = None
        self._count_all(version, jobs, found, hits, self.memory.name)
        if hits:
            version.used_at = self._clock()
        return found

    def miss_all(self, jobs: Sequence[ClaimedJob], version: ServedVersion) -> None:
        """Count a look-up in the memory for each of these jobs, for which it has no answer."""
        self._count_all(version, jobs, [None] * len(jobs), 0, self.memory.name)

    def asks(self, version: ServedVersion) -> bool:
        """Whether the tiers behind the memory are asked for answers of this version."""
        group = version.content_hash
        return self.tiers is not None and bool(group) and self.tiers.is_open(group)

    def ask(self, version: ServedVersion, jobs: Sequence[ClaimedJob]) -> None:
        """Look up the answers to jobs that the memory lacks in the tiers behind it; see take_answered."""
        if self.tiers is None:
            raise RuntimeError("there is no tier to ask")
        self.tiers.ask(version, jobs)

    def take_answered(self) -> list[CacheAnswers]:
        """What was asked for and is known now. The memory keeps what was found, for the rest of its lifetime."""
        if self.tiers is None:
            return []
        return [self._taken_in(each) for each in self.tiers.take_answered()]

    @property
    def next_timeout(self) -> float:
        """When the oldest question has waited too long, in monotonic seconds; infinite without one."""
        return self.tiers.next_timeout if self.tiers is not None else inf

    def _taken_in(self, looked_up: LookedUp) -> CacheAnswers:
        version, jobs, answers = looked_up
        generation, form, content_hash = version.generation, form_of(version), version.content_hash
        result = CacheAnswers(version, [], [])
        for job, answer in zip(jobs, answers, strict=True):
            # Content and form may have changed since the question.
            if answer is None or answer.entry.content_hash != content_hash or answer.entry.form != form:
                result.missing.append(job)
                continue
            outputs = EncodedOutputs(answer.entry.content, answer.entry.body, content_hash, generation)
            result.found.append((job, outputs))
            self.memory.put(job.digest, outputs, min(answer.ttl_s, version.policy.cache_ttl_s))
        if result.found:
            version.used_at = self._clock()
        self._count_in_tiers(looked_up)
        return result

    def _count_all(
        self,
        version: ServedVersion,
        jobs: Sequence[ClaimedJob],
        found: Sequence[object | None],
        hits: int,
        tier: str,
    ) -> None:
        """Count look-ups in one tier. found: what it had for each job. hits: for how many it had something."""
        first, shared = jobs[0].header, jobs[0].shared
        reply, tenant = first.reply, first.tenant
        if (shared is not None and all([job.shared is shared for job in jobs])) or all(
            job.header.reply is reply and job.header.tenant is tenant for job in jobs
        ):
            self._count(version, reply, tenant, tier, hits, len(jobs) - hits)
            return
        for job, answer in zip(jobs, found, strict=True):
            header = job.header
            self._count(version, header.reply, header.tenant, tier, int(answer is not None), int(answer is None))

    def _count_in_tiers(self, looked_up: LookedUp) -> None:
        """A tier was asked for what those before it lacked."""
        version, jobs, answers = looked_up
        asked = [*zip(jobs, answers, strict=True)]
        for tier in self.tiers.names if self.tiers is not None else ():
            if not asked:
                break
            found = [answer if answer is not None and answer.tier == tier else None for _, answer in asked]
            hits = len(found) - found.count(None)
            self._count_all(version, [job for job, _ in asked], found, hits, tier)
            asked = [pair for pair, answer in zip(asked, found, strict=True) if answer is None]

    def _count(self, version: ServedVersion, reply: str, tenant: str, tier: str, hits: int, misses: int) -> None:
        for is_hit, count in ((True, hits), (False, misses)):
            if count:
                self._accesses[CacheAccess(version.name, version.label, reply, tenant, tier, is_hit)] += count

    def keep(self, outcome: JobOutcome, active: ServedVersion | None) -> None:
        """Cache the answer of a forward for equal jobs, if its version still answers in the same form.

        active: the active version of the model now, or this version while it is an arm of an experiment. A batch may
        end after another version was activated.
        """
        job, answer, version = outcome.job, outcome.answer, outcome.version
        if outcome.how != "ran" or not job.digest or version is None or not version.policy.cache_ttl_s:
            return
        if not isinstance(answer, EncodedOutputs) or (version.spec.generate is not None and not is_whole(answer)):
            return
        is_asked_for = bool(job.header.version) or version is active
        if is_asked_for and answer.content_hash == version.content_hash and answer.generation == version.generation:
            self._keep([(job, answer)], version, answer.generation)

    def keeps(self, run: BatchRun, active: ServedVersion | None) -> bool:
        """Whether `keep` would cache the answers of this run for jobs that name no version."""
        version = run.version
        return (
            bool(version.policy.cache_ttl_s)
            and version is active
            and run.model.content_hash == version.content_hash
            and run.generation == version.generation
        )

    def keep_all(self, answers: Sequence[tuple[ClaimedJob, EncodedOutputs]], run: BatchRun) -> None:
        """Cache the answers of a run for which `keeps` is true."""
        if answers:
            self._keep(answers, run.version, run.generation)

    def keep_alike(self, jobs: Sequence[ClaimedJob], answers: Sequence[EncodedOutputs], run: BatchRun) -> None:
        """As `keep_all`, for jobs that have keys, and for answers of one size whose bodies are bytes."""
        if self.tiers is None:
            self.memory.put_alike([job.digest for job in jobs], answers, run.version.policy.cache_ttl_s)
        else:
            self._keep([*zip(jobs, answers, strict=True)], run.version, run.generation)

    def _keep(
        self, answers: Sequence[tuple[ClaimedJob, EncodedOutputs]], version: ServedVersion, generation: int
    ) -> None:
        ttl_s = version.policy.cache_ttl_s
        self.memory.put_all([(job.digest, answer) for job, answer in answers], ttl_s)
        if self.tiers is None:
            return
        form, group = form_of(version), version.content_hash
        # Read after the form: the number is still the same, so this form gave the answers.
        if version.generation == generation:
            self.tiers.keep(answers, group, form, ttl_s)

    def forget(self, content_hash: str) -> int:
        """Remove every answer of this content, in the other tiers soon; returns the number of those in memory."""
        if self.tiers is not None:
            self.tiers.forget(content_hash)
        return self.memory.forget(content_hash)

    def clear(self) -> int:
        """Remove every answer, in the other tiers soon; returns the number of those in memory."""
        if self.tiers is not None:
            self.tiers.clear()
        return self.memory.clear()

    def tier_stats(self) -> Mapping[str, TierStats]:
        """The counters of the tiers behind the memory, by name."""
        return self.tiers.stats() if self.tiers is not None else {}

    def as_data(self) -> dict[str, dict[str, int]]:
        """The state of each tier as plain data, for the report of the worker."""
        memory = self.memory
        shown = {"l1": {"entries": len(memory), "nbytes": memory.nbytes, "evicted": memory.evicted}}
        shown |= {name: asdict(stats) for name, stats in self.tier_stats().items()}
        if faults := self.faults():
            shown["tiers"] = dict(faults)
        return shown

    def faults(self) -> Mapping[str, int]:
        """Look-ups that took too long, and answers that were not written: too many waited, or they must not leave."""
        tiers = self.tiers
        if tiers is None:
            return {}
        return {"timeout": tiers.timeouts, "unwritten": tiers.unwritten, "withheld": tiers.withheld}

    def close(self) -> None:
        """Write what waits to be written, and close the tiers behind the memory."""
        if self.tiers is not None:
            self.tiers.close()

    def take_accesses(self) -> Counter[CacheAccess]:
        """The look-ups since the last call."""
        accesses = self._accesses
        if accesses:
            self._accesses = Counter()
        return accesses
