"""Answers that outlive their job: a later equal job needs no forward.

route: find --> a cached answer of the version's present content and form
commit: keep --> the answer of a forward, while its version is still active
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from penstock.registry.settings import CacheConfig
from penstock.workers.cache.memory import L1Cache
from penstock.workers.job import ClaimedJob
from penstock.workers.results import EncodedOutputs, JobOutcome
from penstock.workers.versions.version import ServedVersion

__all__ = ["AnswerCache"]


class AnswerCache:
    """The cached answers of one worker. clock: monotonic seconds.

    Attributes:
        memory: the tier in this process's memory.
    """

    def __init__(self, config: CacheConfig, clock: Callable[[], float]) -> None:
        self.memory = L1Cache(config.l1_size, config.l1_max_bytes, clock)
        self._clock = clock
        self._lookups: Counter[tuple[str, str, str, bool]] = Counter()

    def find(self, job: ClaimedJob, version: ServedVersion) -> EncodedOutputs | None:
        """The answer to an equal job, if the version's present content gave it in its present form."""
        cached = self.memory.get(job.digest)
        is_hit = (
            cached is not None
            and cached.content_hash == version.content_hash
            and cached.generation == version.generation
        )
        self._lookups[version.name, version.label, job.header.reply, is_hit] += 1
        if not is_hit:
            return None
        version.used_at = self._clock()
        return cached

    def keep(self, outcome: JobOutcome, active: ServedVersion | None) -> None:
        """Cache the answer of a forward for equal jobs, if its version still answers in the same form.

        active: the active version of the model now. A batch may end after another version was activated.
        """
        job, answer, version = outcome.job, outcome.answer, outcome.version
        if outcome.how != "ran" or not job.digest or version is None or not version.policy.cache_ttl_s:
            return
        if not isinstance(answer, EncodedOutputs):
            return
        is_asked_for = bool(job.header.version) or version is active
        if is_asked_for and answer.content_hash == version.content_hash and answer.generation == version.generation:
            self.memory.put(job.digest, answer, version.policy.cache_ttl_s)

    def take_lookups(self) -> Counter[tuple[str, str, str, bool]]:
        """Look-ups since the last call, by model, version, reply address of the job, and by whether they were hits."""
        lookups, self._lookups = self._lookups, Counter()
        return lookups
