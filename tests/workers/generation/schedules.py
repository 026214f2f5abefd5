"""Random schedules against the pure scheduler: an oracle knows which tokens lie in each place of each page.

A forward is played: it reads every place before a chunk, where the request's own tokens of its own tenant must lie, and
writes the places of the chunk, which no other request may use.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from penstock.workers.generation.config import SchedulerConfig
from penstock.workers.generation.pages import PagePool
from penstock.workers.generation.prefix_cache import PrefixCache
from penstock.workers.generation.scheduler import Chunk, Scheduler, Sequence, StepPlan

__all__ = ["Schedule", "run_schedule"]

Content = tuple[str, tuple[int, ...]]


@dataclass
class Schedule:
    """One scheduler, its requests, and what lies in its pages."""

    chosen: random.Random
    scheduler: Scheduler
    wanted: dict[str, int] = field(default_factory=dict)
    """Tokens that each request generates."""
    alive: dict[str, Sequence] = field(default_factory=dict)
    content: dict[tuple[int, int], Content] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    drafted: int = 0
    """Drafts that were computed."""

    @classmethod
    def random(cls, seed: int) -> Schedule:
        """Of a small pool, so that pages are short."""
        chosen = random.Random(seed)
        page_size = chosen.choice([1, 2, 4, 16])
        num_pages = chosen.randrange(4, 30)
        seats = chosen.randrange(1, 9)
        capacity = chosen.choice([0, 2, num_pages])
        prefixes = PrefixCache(page_size, capacity) if chosen.random() < 0.7 else None
        config = SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=seats + chosen.randrange(0, 20),
            max_long_prefill_tokens=chosen.choice([1, 4, 64]),
            ageing_steps=chosen.choice([1, 5, 30]),
        )
        return cls(chosen, Scheduler(config, PagePool(num_pages, page_size, prefixes)))

    def add(self, name: str, *, priority: int | None = None) -> None:
        """A request that fits into the pool alone. Few different tokens, so that beginnings are equal."""
        room = self.scheduler.pages.num_usable * self.scheduler.pages.page_size
        wanted = self.chosen.randrange(1, max(2, min(12, room)))
        length = self.chosen.randrange(1, max(2, min(60, room - wanted + 2)))
        tokens = [self.chosen.choice([1, 1, 1, 2]) for _ in range(length)]
        sequence = Sequence(name, tokens, length, tenant=self.chosen.choice(["a", "b"]))
        sequence.priority = self.chosen.randrange(4) if priority is None else priority
        self.wanted[name] = wanted
        self.alive[name] = sequence
        self.scheduler.add(sequence)

    def fork(self, donor: Sequence, name: str) -> None:
        """One more text of the same prompt."""
        own = donor.tokens[: donor.num_prompt]
        sequence = Sequence(name, own, donor.num_prompt, tenant=donor.tenant, priority=donor.priority, donor=donor)
        self.wanted[name] = self.wanted[donor.request_id]
        self.alive[name] = sequence
        self.scheduler.add(sequence)

    def step(self) -> StepPlan:
        """Plans, plays the forward, records, ends what is complete, and checks everything."""
        drafts = {
            sequence.request_id: [self.chosen.choice([1, 1, 2]) for _ in range(self.chosen.randrange(4))]
            for sequence in self.scheduler.running
            if self.chosen.random() < 0.5
        }
        drafts = {name: each[: self._left(self.alive[name]) - 1] for name, each in drafts.items()}
        plan = self.scheduler.plan(drafts)
        self.check_plan(plan)
        for chunk in plan.chunks:
            self._read(chunk.sequence, chunk.start)
        for chunk in plan.chunks:
            self._write(chunk)
        self.drafted += sum(len(chunk.drafts) for chunk in plan.chunks)
        self.scheduler.record(
            plan.chunks,
            {chunk.sequence.request_id: self.chosen.choice([1, 1, 2]) for chunk in plan.chunks if chunk.samples},
            {
                chunk.sequence.request_id: chunk.drafts[: self.chosen.randrange(len(chunk.drafts) + 1)]
                for chunk in plan.chunks
            },
        )
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert self._left(sequence) >= 0
            if self._left(sequence) == 0:
                self.end(sequence)
                self.finished.append(sequence.request_id)
        self.check_pages()
        return plan

    def end(self, sequence: Sequence) -> None:
        """Takes a request out, at any moment."""
        del self.alive[sequence.request_id]
        self.scheduler.remove(sequence)

    def check_plan(self, plan: StepPlan) -> None:
        """The budget and the seats are kept, and only what runs is computed."""
        config = self.scheduler.config
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(self.scheduler.running) <= config.max_num_seqs
        assert plan.chunks or not self.scheduler.has_work
        planned = [chunk.sequence for chunk in plan.chunks]
        assert len(set(map(id, planned))) == len(planned)
        assert all(sequence in self.scheduler.running for sequence in planned)
        assert all(chunk.num_tokens > 0 and chunk.start == chunk.sequence.num_computed for chunk in plan.chunks)
        decoding = [one for one in self.scheduler.running if one.num_left == 1]
        assert all(sequence in planned for sequence in decoding)

    def check_pages(self) -> None:
        """Each page is free, idle or used by those that name it; none is two of these, and none is lost."""
        pages = self.scheduler.pages
        users = Counter(page for sequence in self.alive.values() for page in sequence.pages)
        assert 0 not in users
        assert all(pages.users(page) == users[page] for page in range(1, pages.num_pages))
        assert pages.num_used == len(users)
        assert pages.num_available + len(users) == pages.num_usable
        waiting = {id(sequence) for sequence in self.scheduler.waiting}
        assert all(not sequence.pages for sequence in self.scheduler.waiting)
        assert len(waiting) + len(self.scheduler.running) == len(self.alive)
        assert pages.prefixes is None or len(pages.prefixes) <= pages.prefixes.capacity

    def _read(self, sequence: Sequence, end: int) -> None:
        for place in range(end):
            assert self.content[self._at(sequence, place)] == self._content(sequence, place)

    def _write(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        tokens = [*sequence.tokens[: chunk.start], *chunk.tokens]
        for place in range(chunk.start, chunk.start + chunk.num_tokens):
            at = self._at(sequence, place)
            assert self.scheduler.pages.users(at[0]) == 1
            self.content[at] = sequence.tenant, tuple(tokens[: place + 1])

    def _left(self, sequence: Sequence) -> int:
        return self.wanted[sequence.request_id] - (len(sequence.tokens) - sequence.num_prompt)

    def _at(self, sequence: Sequence, place: int) -> tuple[int, int]:
        size = self.scheduler.pages.page_size
        return sequence.pages[place // size], place % size

    @staticmethod
    def _content(sequence: Sequence, place: int) -> Content:
        return sequence.tenant, tuple(sequence.tokens[: place + 1])


def run_schedule(seed: int) -> Schedule:
    """Requests come and are aborted at random; then all that are left end. Returns the drained schedule."""
    schedule = Schedule.random(seed)
    for turn in range(schedule.chosen.randrange(5, 60)):
        if schedule.chosen.random() < 0.6:
            schedule.add(f"{seed}-{turn}")
        if schedule.scheduler.running and schedule.chosen.random() < 0.2:
            schedule.fork(schedule.chosen.choice(schedule.scheduler.running), f"{seed}-{turn}-fork")
        if schedule.alive and schedule.chosen.random() < 0.1:
            schedule.end(schedule.chosen.choice(list(schedule.alive.values())))
            schedule.check_pages()
        schedule.step()
    # Each step computes at least one token of the request that is first in order.
    most = 20 * sum(len(one.tokens) + schedule.wanted[one.request_id] for one in schedule.alive.values()) + 10
    for _ in range(most):
        if not schedule.alive:
            break
        schedule.step()
    return schedule
