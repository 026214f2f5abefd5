"""Which tokens of which requests one step computes. Pure: no torch, no clock; the number of the step is the clock.

    add -> waiting --admit--> running --record--> finished, aborted
              '---preempt---------'

    plan():    displace, for a more urgent request that waits and finds no seat or no pages
               running requests, decoding ones first, within the budget of tokens; out of pages, the last is preempted
               waiting requests, where nobody was preempted for pages
    record():  what was computed, and the sampled tokens
    launch(), confirm():  the same for a step whose tokens are read after the next one was planned

A preempted request gives its pages back and keeps its place, its tokens and its age. It computes its tokens again when
it returns, without those that the prefix cache still has. The request that is first in order can always run: each
fits into the pool alone, and all others give way to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from penstock.workers.generation.config import SchedulerConfig
from penstock.workers.generation.pages import PagePool
from penstock.workers.generation.prefix_cache import CachedPage
from penstock.workers.generation.request_queue import PriorityRequestQueue, level_at, order_at

__all__ = ["Chunk", "Scheduler", "Sequence", "StepPlan"]

_LONG: Final = 4
"""Shorter prompts than so many chunks are computed at once: a throughput of many of them is lost otherwise."""
_NO_DRAFTS: Final[Mapping[str, Tokens[int]]] = {}


@dataclass(slots=True, eq=False)
class Sequence:
    """One request, as the scheduler knows it. priority: lower comes first."""

    request_id: str
    tokens: list[int]
    """The prompt, then what was generated."""
    num_prompt: int
    priority: int = 2
    tenant: str = ""
    arrival: int = 0
    since_step: int = 0
    num_computed: int = 0
    """Tokens whose keys and values lie in pages."""
    num_verified: int = 0
    """Tokens that came before logits which were found finite."""
    num_cached: int = 0
    """Tokens of the prompt that were found in the prefix cache, at the first admission."""
    pages: list[int] = field(default_factory=list)
    num_written: int = 0
    """Tokens whose keys and values were written to pages, with drafts that were rejected."""
    num_published: int = 0
    parent: int | None = 0
    """The id of the last published page in the prefix cache; None: nothing more can be published."""
    num_preempted: int = 0
    wants_prompt_logits: bool = False
    """Every token of the prompt is computed, and its logits are wanted."""
    donor: Sequence | None = None
    """A request with the same prompt, whose full pages of it are shared while it runs."""
    most_tokens: int = 0
    """Of the prompt and the text together; 0: no limit."""
    num_ahead: int = 0
    """Tokens behind `tokens` that a launched step chooses: it was not read yet which ones they are."""

    @property
    def num_known(self) -> int:
        """Tokens with their places: those that are chosen now have one each."""
        return len(self.tokens) + self.num_ahead

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) + self.num_ahead - self.num_computed

    @property
    def is_full(self) -> bool:
        """Whether the launched steps choose its last token."""
        return self.num_ahead > 0 and 0 < self.most_tokens <= self.num_known


class Chunk(NamedTuple):
    """`num_tokens` of a sequence from `start`, the last of them drafts. samples: they reach the sequence's last token.

    Drafts are guesses of the tokens behind the last one. The logits before and at each of them are wanted.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Behind the last token that is no draft."""
        return self.start + self.num_tokens - len(self.drafts)

    @property
    def samples(self) -> bool:
        return self.end == len(self.sequence.tokens) + self.sequence.num_ahead

    @property
    def num_logits(self) -> int:
        """So many last tokens of the chunk have logits that are wanted."""
        if self.sequence.wants_prompt_logits and self.start < self.sequence.num_prompt:
            return self.num_tokens
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def tokens(self) -> list[int]:
        return [*self.sequence.tokens[self.start : self.end], *self.drafts]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward computes, and the requests that lost their seats to it."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class Scheduler:
    """Requests in, step plans out."""

    def __init__(self, config: SchedulerConfig, pages: PagePool) -> None:
        self.config: Final = config
        self.pages: Final = pages
        self.waiting: Final[PriorityRequestQueue[Sequence]] = PriorityRequestQueue(config.ageing_steps)
        self.running: list[Sequence] = []
        self.step = 0
        self.num_preemptions = 0
        self._arrivals = 0
        self._unverified: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.running) or len(self.waiting) > 0

    def add(self, sequence: Sequence) -> None:
        """Appends a request. The caller has checked that it fits into the pool alone."""
        self._arrivals += 1
        sequence.arrival, sequence.since_step = self._arrivals, self.step
        self.waiting.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A request has ended, or is aborted: its pages come back now."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence)

    def take_unverified_pages(self) -> list[int]:
        """Pages that became free with values that no finite logits vouch for. They are cleared before they are used."""
        taken, self._unverified = self._unverified, []
        return taken

    def plan(self, drafts: Mapping[str, Tokens[int]] = _NO_DRAFTS) -> StepPlan:
        """The next step. It is empty where no request waits or runs.

        drafts: by request. They are taken where tokens of the budget and pages are left over.
        """
        self.step += 1
        preempted = self._displace()
        planned: list[Chunk] = []
        victims = self._plan_running(planned, drafts)
        if not victims:
            self._admit(planned)
        return StepPlan(tuple(planned), (*preempted, *victims))

    def record(
        self, chunks: Iterable[Chunk], sampled: Mapping[str, int], accepted: Mapping[str, Tokens[int]] = _NO_DRAFTS
    ) -> None:
        """These chunks were computed. sampled: by request, for each chunk that samples and had finite logits.

        accepted: the drafts before the sampled token that were right.
        """
        for chunk in chunks:
            sequence = chunk.sequence
            right = accepted.get(sequence.request_id, ())
            sequence.num_computed = chunk.end + len(right)
            sequence.num_written = max(sequence.num_written, chunk.start + chunk.num_tokens)
            token = sampled.get(sequence.request_id)
            if token is not None:
                sequence.tokens.extend(right)
                sequence.num_verified = sequence.num_computed
                self._publish(sequence)
                sequence.tokens.append(token)

    def launch(self, chunks: Iterable[Chunk]) -> None:
        """These chunks are being computed, one token each, and each chooses one. `confirm` tells it later."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.end
            sequence.num_written = max(sequence.num_written, chunk.end)
            sequence.num_ahead += 1

    def confirm(self, chunk: Chunk, token: int) -> None:
        """The token that a launched chunk has chosen, from finite logits."""
        sequence = chunk.sequence
        # A request that lost its pages computes them again, with this token.
        if sequence.num_ahead:
            sequence.num_ahead -= 1
            sequence.num_verified = chunk.end
            self._publish(sequence)
        sequence.tokens.append(token)

    def disturb(self, chunks: Iterable[Chunk]) -> None:
        """The forward of these chunks has failed, and may have written some of their keys and values."""
        for chunk in chunks:
            chunk.sequence.num_written = max(chunk.sequence.num_written, chunk.start + chunk.num_tokens)

    def _order(self, sequence: Sequence) -> tuple[int, int]:
        return order_at(sequence, self.step, self.config.ageing_steps)

    # Running requests

    def _plan_running(self, planned: list[Chunk], drafts: Mapping[str, Tokens[int]]) -> list[Sequence]:
        """Plans what runs, in order. Returns the requests that lost their pages to it."""
        victims: list[Sequence] = []
        budget = self.config.max_num_batched_tokens
        ordered = sorted(self.running, key=self._order)
        # A seat has a token of the budget, so no decoding request waits for a long prompt.
        decoding = [one for one in ordered if one.num_left == 1 and not one.is_full]
        spare = budget - len(decoding)
        for sequence in decoding:
            if (victims and sequence in victims) or not self._grow(sequence, 1, victims):
                continue
            taken: tuple[int, ...] = ()
            if drafts:
                taken = self._room_for(sequence, drafts.get(sequence.request_id, ())[:spare])
                spare -= len(taken)
            planned.append(Chunk(sequence, sequence.num_computed, 1 + len(taken), taken))
            budget -= 1 + len(taken)
        for sequence in ordered if len(decoding) < len(ordered) else ():
            if sequence.num_left == 1 or sequence in victims or budget == 0:
                continue
            number = self._chunk_tokens(sequence, budget, is_alone=not decoding)
            if self._grow(sequence, number, victims):
                planned.append(Chunk(sequence, sequence.num_computed, number))
                budget -= number
        return victims

    def _chunk_tokens(self, sequence: Sequence, budget: int, *, is_alone: bool) -> int:
        """Tokens of a sequence in this step. A long prompt must not make the streams beside it wait."""
        most = self.config.max_long_prefill_tokens
        is_long = len(sequence.tokens) > _LONG * most
        return min(sequence.num_left, budget if is_alone or not is_long else min(budget, most))

    def _room_for(self, sequence: Sequence, drafts: Tokens[int]) -> tuple[int, ...]:
        """The drafts, with their pages, or none: a page that another running request may need is left to it."""
        missing = self.pages.pages_for(sequence.num_computed + 1 + len(drafts)) - len(sequence.pages)
        if missing > 0:
            if missing + len(self.running) > self.pages.num_available:
                return ()
            sequence.pages.extend(self.pages.allocate(missing) or ())
        return tuple(drafts)

    def _grow(self, sequence: Sequence, number: int, victims: list[Sequence]) -> bool:
        """Gets the pages for so many more tokens; others, and at last the request itself, give way.

        No victim is planned yet: only decoding requests lack pages, they are planned in order, and the last gives way.
        """
        needed = sequence.num_computed + number
        if needed <= len(sequence.pages) * self.pages.page_size:
            return True
        while True:
            missing = self.pages.pages_for(needed) - len(sequence.pages)
            if (pages := self.pages.allocate(max(0, missing))) is not None:
                sequence.pages.extend(pages)
                return True
            victim = max(self.running, key=self._order)
            self._preempt(victim)
            victims.append(victim)
            if victim is sequence:
                return False

    # Waiting requests

    def _displace(self) -> list[Sequence]:
        """A waiting request takes the seats or pages of less urgent ones, where that lets it in.

        Its own priority counts, and of the others the aged one: a request that has waited for long keeps its seat.
        """
        head = self.waiting.peek(self.step)
        if head is None or not self.running or self._fits(head, 0, 0):
            return []
        less_urgent = [
            one
            for one in sorted(self.running, key=self._order, reverse=True)
            if level_at(one, self.step, self.config.ageing_steps) > head.priority
        ]
        # Pages that the head shares with a victim are no gain: they count as its own already.
        own = {entry.page for entry in self._cached(head)}.union(self._donated(head))
        gained = 0
        for number, victim in enumerate(less_urgent, 1):
            gained += sum(self.pages.users(page) == 1 and page not in own for page in victim.pages)
            if self._fits(head, number, gained):
                for one in less_urgent[:number]:
                    self._preempt(one)
                return less_urgent[:number]
        return []

    def _fits(self, sequence: Sequence, seats: int, pages: int) -> bool:
        """Whether the request could be admitted after so many seats and pages came back."""
        if len(self.running) - seats >= self.config.max_num_seqs:
            return False
        cached, donated = self._cached(sequence), self._donated(sequence)
        idle = 0 if len(donated) > len(cached) else sum(self.pages.users(entry.page) == 0 for entry in cached)
        needed = self.pages.pages_for(len(sequence.tokens)) - max(len(cached), len(donated))
        return needed <= self.pages.num_available - idle + pages

    def _admit(self, planned: list[Chunk]) -> None:
        """Lets requests in, in order, while seats, tokens of the budget and pages are there.

        The first that does not fit is waited for: otherwise small requests would starve a large one.
        """
        budget = self.config.max_num_batched_tokens - sum(chunk.num_tokens for chunk in planned)
        while budget > 0 and len(self.running) < self.config.max_num_seqs:
            head = self.waiting.peek(self.step)
            if head is None or not self._seat(head):
                return
            self.waiting.pop(self.step)
            self.running.append(head)
            is_alone = not any(chunk.samples for chunk in planned)
            number = self._chunk_tokens(head, budget, is_alone=is_alone)
            planned.append(Chunk(head, head.num_computed, number))
            budget -= number

    def _seat(self, sequence: Sequence) -> bool:
        """Gives a request the pages of all its tokens, shared ones first; False, and none, where there are fewer."""
        prefixes = self.pages.prefixes
        cached, donated = self._cached(sequence), self._donated(sequence)
        is_donated = len(donated) > len(cached)
        shared = self.pages.join(donated) if is_donated else self.pages.share(cached)
        pages = self.pages.allocate(self.pages.pages_for(len(sequence.tokens)) - len(shared))
        if pages is None:
            self.pages.release(shared)
            return False
        sequence.pages = [*shared, *pages]
        sequence.num_computed = sequence.num_verified = len(shared) * self.pages.page_size
        sequence.num_published = len(shared)
        # The prefix cache does not know all of a donor's pages, so it can know none behind them.
        sequence.parent = None if is_donated else cached[-1].uid if cached else 0
        if not sequence.num_preempted:
            # Its own pages, found again after a preemption, would look like a use of the cache.
            if prefixes is not None:
                prefixes.queries += len(sequence.tokens)
                prefixes.hits += len(cached) * self.pages.page_size
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        return True

    def _cached(self, sequence: Sequence) -> list[CachedPage]:
        prefixes = self.pages.prefixes
        if prefixes is None or sequence.wants_prompt_logits:
            return []
        return prefixes.match(sequence.tokens, sequence.tenant)

    def _donated(self, sequence: Sequence) -> list[int]:
        """Full pages of the prompt that the donor has now. At least the last token is left to compute."""
        if sequence.donor is None:
            return []
        computed = min(sequence.donor.num_verified, sequence.num_prompt - 1)
        return sequence.donor.pages[: computed // self.pages.page_size]

    # Pages

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        sequence.num_preempted += 1
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.push(sequence)

    def _release(self, sequence: Sequence) -> None:
        freed = self.pages.release(sequence.pages)
        if sequence.num_written > sequence.num_verified:
            self._unverified.extend(freed)
        sequence.pages = []
        sequence.num_computed = sequence.num_verified = sequence.num_written = sequence.num_published = 0
        sequence.num_ahead = 0
        sequence.parent = 0

    def _publish(self, sequence: Sequence) -> None:
        """Offers the full pages that were computed. A page that is known already keeps its number here."""
        size = self.pages.page_size
        while sequence.parent is not None and (sequence.num_published + 1) * size <= sequence.num_verified:
            start = sequence.num_published * size
            page = sequence.pages[sequence.num_published]
            tokens: Iterable[int] = sequence.tokens[start : start + size]
            sequence.parent = self.pages.publish(sequence.parent, tokens, sequence.tenant, page)
            sequence.num_published += 1
