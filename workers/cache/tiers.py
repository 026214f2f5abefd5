"""The tiers behind a worker's memory, asked and written on threads of their own: no batch ever waits for a disk.

    I/O thread: ask --> cache-reads:  L2, then L3 for what L2 lacks --> take_answered, once the wake-up rings
                keep --> cache-writes: L2, L3
    an answer that L3 has and L2 lacks is written to L2 with its remaining lifetime

A question that has no answer within `timeout_s` counts as not found. While such a question is open, nothing else is
asked: a tier that hangs delays no further job.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from math import inf
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple, TypeAlias

from penstock.registry.errors import UndecodableEnvelope
from penstock.registry.tensors import Tensor
from penstock.safety.cache_entry import EXACT, CacheEntry, EntryKey, pack, unpack
from penstock.workers.cache.tier import Found, Put, Tier, TierStats
from penstock.workers.job import ClaimedJob
from penstock.workers.levels.progression import THRESHOLDS
from penstock.workers.results import EncodedOutputs
from penstock.workers.runtime.forms import EAGER
from penstock.workers.versions.version import ServedVersion

__all__ = ["LookedUp", "MayLeave", "Question", "SharedTiers", "TierAnswer", "Write", "form_of"]

_EXACT_LEVEL: Final = 2
_MOST_ASKED: Final = 1024
"""Jobs of one look-up; later ones wait for the next."""
_MOST_WRITTEN: Final = 256
"""Entries of one write."""
_MOST_UNWRITTEN_BYTES: Final = 32 * 1024 * 1024
_ENTRY_BYTES: Final = 512
"""The memory of an entry that is not written yet, besides its outputs."""

logger = logging.getLogger("penstock.server")


MayLeave: TypeAlias = Callable[[Sequence[Tensor], bytes | memoryview], bool]


class TierAnswer(NamedTuple):
    """An entry that a tier had, and the seconds until it expires."""

    entry: CacheEntry
    ttl_s: float
    tier: str


class LookedUp(NamedTuple):
    """A question that was answered, or that waited too long."""

    version: ServedVersion
    jobs: Sequence[ClaimedJob]
    answers: Sequence[TierAnswer | None]
    """For each job, in order."""


@dataclass(slots=True, eq=False)
class Question:
    """Jobs of one version whose answers are looked up."""

    version: ServedVersion
    jobs: Sequence[ClaimedJob]
    keys: list[EntryKey]
    asked: float
    removals: int
    """How many removals had begun. What is found after a further one may be an entry that it removes."""
    is_over: bool = False
    """Whether the I/O thread waits no longer."""


class Write(NamedTuple):
    """Answers of one content in one form that are to be written."""

    form: str
    until: float
    """When the answers expire, in monotonic seconds."""
    answers: Sequence[tuple[EntryKey, EncodedOutputs, ClaimedJob | None]]
    """With the jobs, where their inputs decide whether the answers may leave the memory."""
    nbytes: int


class SharedTiers:
    """The tiers behind the memory of one worker, the nearest first. The I/O thread owns it, except `forget` and below.

    isolates_tenants: whether each tenant has entries of its own. may_leave: whether encoded inputs or outputs may leave
    the memory of the process, by their description and their bytes; None: all may. An answer is written if it may
    leave, and its inputs may, too. ring: wakes the I/O thread. clock: monotonic seconds.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        isolates_tenants: bool,
        may_leave: MayLeave | None,
        timeout_s: float,
        ring: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.unwritten = 0
        """Answers that were not written, because too many waited."""
        self.withheld = 0
        """Answers that must not leave the memory of the process."""
        self.timeouts = 0
        """Questions that waited too long."""
        self._tiers = tuple(tiers)
        self._isolates_tenants = isolates_tenants
        self._may_leave = may_leave
        self._timeout_s = timeout_s
        self._ring = ring
        self._clock = clock
        self._open: deque[Question] = deque()
        """Questions that the I/O thread waits for, the oldest first."""
        self._stuck: Question | None = None
        """A question that waited too long and has no answer yet."""
        self._answered: deque[tuple[Question, list[TierAnswer | None]]] = deque()
        self._questions: SimpleQueue[Question | None] = SimpleQueue()
        self._writes: SimpleQueue[Write | Callable[[], object] | None] = SimpleQueue()
        self._waiting_bytes = 0
        self._removals = 0
        """Removals that have begun."""
        self._removing: Counter[str] = Counter()
        """Those that have not ended, by content; empty: of all entries."""
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tiers, the nearest first."""
        return tuple(tier.name for tier in self._tiers)

    def is_open(self, group: str) -> bool:
        """Whether there is anything to ask for this content: a tier, none that hangs, and no removal of its entries."""
        return bool(self._tiers) and self._stuck is None and not self._is_removing(group)

    # Reads

    def ask(self, version: ServedVersion, jobs: Sequence[ClaimedJob]) -> None:
        """Look up the answers to jobs that have digests; see take_answered."""
        self._start()
        group, removals = version.content_hash, self._removals
        if self._is_removing(group):
            # It has begun since `is_open`: the question is void.
            removals -= 1
        for start in range(0, len(jobs), _MOST_ASKED):
            part = jobs[start : start + _MOST_ASKED]
            keys = [self._key_of(group, job) for job in part]
            question = Question(version, part, keys, self._clock(), removals)
            self._open.append(question)
            self._questions.put(question)

    def take_answered(self) -> list[LookedUp]:
        """The questions that were answered since the last call, or that have waited too long."""
        taken: list[LookedUp] = []
        while self._answered:
            question, answers = self._answered.popleft()
            if question is self._stuck:
                self._stuck = None
            if not question.is_over:
                question.is_over = True
                if question.removals != self._removals:
                    answers = [None] * len(question.jobs)
                taken.append(LookedUp(question.version, question.jobs, answers))
        while self._open and self._open[0].is_over:
            self._open.popleft()
        late = self._clock() - self._timeout_s
        while self._open and self._open[0].asked <= late:
            question = self._open.popleft()
            if not question.is_over:
                question.is_over = True
                self.timeouts += 1
                self._stuck = question
                taken.append(LookedUp(question.version, question.jobs, [None] * len(question.jobs)))
        return taken

    @property
    def next_timeout(self) -> float:
        """When the oldest open question has waited too long, in monotonic seconds; infinite without one."""
        return self._open[0].asked + self._timeout_s if self._open else inf

    def _key_of(self, group: str, job: ClaimedJob) -> EntryKey:
        return EntryKey(group, job.digest, job.header.tenant if self._isolates_tenants else "")

    def _read(self) -> None:
        """The thread of the reads."""
        while (question := self._questions.get()) is not None:
            self.answer(question)

    def answer(self, first: Question) -> None:
        """Answer a question, and those that wait behind it. Called on the thread of the reads."""
        questions, size = [first], len(first.keys)
        with suppress(Empty):
            while size < _MOST_ASKED:
                if (following := self._questions.get_nowait()) is None:
                    self._questions.put(None)
                    break
                questions.append(following)
                size += len(following.keys)
        removals = self._removals
        # A question that the I/O thread gave up, or that a removal has made void, costs no look-up.
        keys = [() if each.is_over or each.removals != removals else each.keys for each in questions]
        found = iter(self._find([*chain.from_iterable(keys)], removals))
        for question, asked in zip(questions, keys, strict=True):
            self._answered.append((question, [_answer_of(value) for value in islice(found, len(asked))]))
        self._ring()

    def _find(self, keys: list[EntryKey], removals: int) -> list[tuple[Found, str] | None]:
        """What the first tier that has it holds under each key, and its name. removals: that had begun before."""
        found: list[tuple[Found, str] | None] = [None] * len(keys)
        missing = [*range(len(keys))]
        promoted: list[Put] = []
        for depth, tier in enumerate(self._tiers):
            if not missing:
                break
            values = self._guarded(tier, [keys[number] for number in missing])
            still: list[int] = []
            for number, value in zip(missing, values, strict=True):
                if value is None:
                    still.append(number)
                    continue
                found[number] = value, tier.name
                if depth:
                    promoted.append(Put(keys[number], value.value, value.ttl_s))
            missing = still
        if promoted:
            self._promote(promoted, removals)
        return found

    def _guarded(self, tier: Tier, keys: Sequence[EntryKey]) -> Sequence[Found | None]:
        try:
            return tier.get_many(keys)
        except Exception:  # a tier raises nothing; this thread must outlive a tier with a fault
            logger.exception("a tier of the cache failed", extra={"tier": tier.name})
            return [None] * len(keys)

    # Writes

    def keep(self, answers: Iterable[tuple[ClaimedJob, EncodedOutputs]], group: str, form: str, ttl_s: float) -> None:
        """Write answers of one content in one form, for `ttl_s` seconds; the caller does not wait."""
        self._start()
        asks = self._may_leave is not None
        kept = [(self._key_of(group, job), answer, job if asks else None) for job, answer in answers]
        nbytes = sum([len(answer.body) + _ENTRY_BYTES for _, answer, _ in kept])
        if asks:
            nbytes += sum([len(job.delivery.sealed) for _, _, job in kept if job is not None])
        if self._reserve(nbytes, len(kept)):
            self._writes.put(Write(form, self._clock() + ttl_s, kept, nbytes))

    def _promote(self, puts: Sequence[Put], removals: int) -> None:
        """Write what a further tier had to the nearest one, unless a removal begins first; the caller does not wait."""
        nbytes = sum([len(put.value) + _ENTRY_BYTES for put in puts])

        def write() -> None:
            try:
                if removals == self._removals:
                    self._tiers[0].put_many(puts)
            finally:
                self._release(nbytes)

        if self._reserve(nbytes, len(puts)):
            self._writes.put(write)

    def _reserve(self, nbytes: int, answers: int) -> bool:
        """Take memory for answers that wait to be written; they count as unwritten where there is none left."""
        with self._lock:
            if self._waiting_bytes + nbytes > _MOST_UNWRITTEN_BYTES:
                self.unwritten += answers
                return False
            self._waiting_bytes += nbytes
            return True

    def _release(self, nbytes: int) -> None:
        with self._lock:
            self._waiting_bytes -= nbytes

    def _write(self) -> None:
        """The thread of the writes."""
        while (write := self._writes.get()) is not None:
            self.perform(write)

    def perform(self, write: Write | Callable[[], object]) -> None:
        """Write answers, or do what else changes the tiers. Called on the thread of the writes."""
        try:
            if isinstance(write, Write):
                self._write_answers(write)
            else:
                write()
        except Exception:  # a tier raises nothing; this thread must outlive a tier with a fault
            logger.exception("a tier of the cache failed")

    def _write_answers(self, write: Write) -> None:
        try:
            for start in range(0, len(write.answers), _MOST_WRITTEN):
                ttl_s = write.until - self._clock()
                answers = write.answers[start : start + _MOST_WRITTEN]
                leaving = [(key, answer) for key, answer, job in answers if self._leaves(answer, job)]
                self.withheld += len(answers) - len(leaving)
                puts = [Put(key, pack(_entry_of(answer, write.form)), ttl_s) for key, answer in leaving]
                if puts and ttl_s > 0:
                    for tier in self._tiers:
                        tier.put_many(puts)
        finally:
            self._release(write.nbytes)

    def _leaves(self, answer: EncodedOutputs, job: ClaimedJob | None) -> bool:
        if self._may_leave is None or job is None:
            return True
        try:
            return self._may_leave(answer.content, answer.body) and self._may_leave(job.header.content, job.body)
        except UndecodableEnvelope:
            return False

    # Any thread

    def forget(self, content_hash: str) -> None:
        """Remove every entry of this content, soon. From now on no look-up gives one that was there."""
        if self._tiers and content_hash:
            self._remove(content_hash, lambda tier: tier.forget(content_hash))

    def clear(self) -> None:
        """Remove every entry of this cache, soon; see `forget`."""
        if self._tiers:
            self._remove("", lambda tier: tier.clear())

    def _remove(self, group: str, remove: Callable[[Tier], int]) -> None:
        """Remove the entries of a group, or of all where it is empty."""

        def perform() -> None:
            try:
                for tier in self._tiers:
                    remove(tier)
            finally:
                with self._lock:
                    self._removing[group] -= 1
                    if not self._removing[group]:
                        del self._removing[group]

        self._start()
        with self._lock:
            self._removing[group] += 1
            self._removals += 1
        self._writes.put(perform)

    def _is_removing(self, group: str) -> bool:
        return bool(self._removing) and (group in self._removing or "" in self._removing)

    def stats(self) -> dict[str, TierStats]:
        """The counters by tier."""
        return {tier.name: tier.stats for tier in self._tiers}

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that was kept before is written; returns whether it is."""
        done = threading.Event()
        if not self._threads:
            return True
        self._writes.put(done.set)
        return done.wait(timeout_s)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, for up to `timeout_s` seconds, and close the tiers."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._questions.put(None)
        self._writes.put(None)
        for thread in self._threads:
            with suppress(RuntimeError):
                thread.join(timeout_s)
        if not any(thread.is_alive() for thread in self._threads):
            for tier in self._tiers:
                tier.close()

    def _start(self) -> None:
        if self._threads:
            return
        with self._lock:
            if self._threads or self._is_closed:
                return
            self._threads = [
                threading.Thread(target=self._read, name="cache-reads", daemon=True),
                threading.Thread(target=self._write, name="cache-writes", daemon=True),
            ]
            for thread in self._threads:
                thread.start()


def form_of(version: ServedVersion) -> str:
    """The form that answers the next batch of a version, as entries name it: EXACT, or the form's own name."""
    forms = version.model.forms
    name = EAGER if forms is None else forms.name
    step = THRESHOLDS.get(name)
    return EXACT if name == EAGER or (step is not None and step.level <= _EXACT_LEVEL) else name


def _entry_of(answer: EncodedOutputs, form: str) -> CacheEntry:
    return CacheEntry(answer.content, bytes(answer.body), answer.content_hash, form)


def _answer_of(found: tuple[Found, str] | None) -> TierAnswer | None:
    """The answer in what a tier holds; None for bytes that are none."""
    if found is None:
        return None
    (value, ttl_s), tier = found
    try:
        return TierAnswer(unpack(value), ttl_s, tier)
    except UndecodableEnvelope:
        return None
