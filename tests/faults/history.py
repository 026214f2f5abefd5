"""What happened to a set of jobs, and what of it must not happen: the checker of every fault test. Pure.

    clients: offered, accepted, told ----.
    model:   forwards that began --------+--> History -> check -> Findings (lost, recovered, unexpected, ...)
    broker:  records in the end ---------'

A job is known by its number, and the model by the question that is its input: the same number, unless jobs that ask
the same share an answer. An effect is what a client can see: a reply that tells it of a result. A second forward is
allowed, a second effect is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Effect", "Findings", "History", "check"]


@dataclass(frozen=True, slots=True)
class Effect:
    """One reply: the job's number, the sealed result that the client was told, and whether it holds outputs."""

    job: float
    result: bytes
    is_answer: bool = True
    """False for a failure: nothing says that the model ran."""


@dataclass(slots=True)
class History:
    """Jobs by their numbers; times play no part.

    offered: publishing was tried. accepted: publishing returned. records: the sealed results that are kept in the
    end. forwards: the question in every row of every forward that began. questions: of the jobs whose question is not
    their number.
    """

    offered: set[float] = field(default_factory=set)
    accepted: set[float] = field(default_factory=set)
    effects: list[Effect] = field(default_factory=list)
    records: dict[float, bytes] = field(default_factory=dict)
    forwards: list[float] = field(default_factory=list)
    questions: dict[float, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Findings:
    """Jobs by what became of them."""

    lost: frozenset[float]
    """Accepted, and no client was ever told of a result."""
    recovered: frozenset[float]
    """Ended although their client never heard that they were accepted: allowed."""
    unexpected: frozenset[float]
    """Ended although no client offered them, or answered without a forward."""
    duplicated: frozenset[float]
    """Told of more than once, or told one result while another is kept."""
    re_executed: frozenset[float]
    """Questions whose forward began more than once: allowed."""

    @property
    def violations(self) -> dict[str, Sequence[float]]:
        """What must not have happened; empty when all is well."""
        found = {"lost": self.lost, "unexpected": self.unexpected, "duplicated": self.duplicated}
        return {name: sorted(jobs) for name, jobs in found.items() if jobs}


def check(history: History) -> Findings:
    """Judges a history that is over: every job that will end has ended."""
    told = Counter(effect.job for effect in history.effects)
    begun = Counter(history.forwards)
    ended = set(told) | set(history.records)
    answered = {effect.job for effect in history.effects if effect.is_answer}
    unasked = {job for job in answered if history.questions.get(job, job) not in begun}
    contradicted = {effect.job for effect in history.effects if history.records.get(effect.job) != effect.result}
    return Findings(
        lost=frozenset(history.accepted - (set(told) & set(history.records))),
        recovered=frozenset((ended & history.offered) - history.accepted),
        unexpected=frozenset((ended - history.offered) | unasked),
        duplicated=frozenset({job for job, times in told.items() if times > 1} | contradicted),
        re_executed=frozenset(question for question, times in begun.items() if times > 1),
    )
