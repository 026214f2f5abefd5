"""Workers that break the look-ups in the tier behind their memory; see tiers.py.

A job whose answer is looked up is a waiting job, and others follow it. That it is cancelled, lost or given back
meanwhile is tested in tests/workers/cache/test_shared_tiers.py: the broker fences what would run all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from penstock.workers.cache.answers import AnswerCache, CacheAnswers
from penstock.workers.cache.tiers import LookedUp
from penstock.workers.job import ClaimedJob
from penstock.workers.results import CachedAnswers
from penstock.workers.transfers import JobTransfers
from tests.simulation.checker import Mutation
from tests.simulation.mutants import Mutant
from tests.simulation.tiers import SimulatedTiers
from tests.simulation.worker import STEPPED

__all__ = ["TIER_MUTANTS"]


class SoughtForgotten(AnswerCache):
    """A job that the tier has no answer for never runs."""

    def take_answered(self) -> list[CacheAnswers]:
        return [each._replace(missing=[]) for each in super().take_answered()]


class FoundAnswersSwapped(SimulatedTiers):
    """The answers of one look-up go to its jobs in another order."""

    def take_answered(self) -> list[LookedUp]:
        return [each._replace(answers=[*each.answers][::-1]) for each in super().take_answered()]


class FollowersOfFoundForgotten(JobTransfers):
    """A job whose answer was found leaves those that follow it behind."""

    def take_in_answers(self) -> None:
        flights = self._parts.flights
        end_all = flights.end_all

        def end_some(jobs: Sequence[ClaimedJob]) -> list[ClaimedJob]:
            return end_all(jobs)[:1]

        flights.end_all = end_some  # type: ignore[method-assign,assignment]  # for these jobs only
        super().take_in_answers()
        del flights.end_all


class FoundNeverCommitted(JobTransfers):
    """Answers that were found are dropped."""

    def take_in_answers(self) -> None:
        completer = self._parts.completer

        def drop(_cached: CachedAnswers) -> None:
            pass

        completer.add_cached = drop  # type: ignore[method-assign,assignment]  # for these answers only
        super().take_in_answers()
        del completer.add_cached


def _misled(finding: str, **part: type[Any]) -> Mutant:
    (kind,) = part.values()
    return Mutant(Mutation(kind.__name__, types=replace(STEPPED, **part)), finding)


TIER_MUTANTS: Final[tuple[Mutant, ...]] = (
    _misled("no end", answers=SoughtForgotten),
    _misled("the answer of another", tiers=FoundAnswersSwapped),
    _misled("no end", transfers=FollowersOfFoundForgotten),
    _misled("no end", transfers=FoundNeverCommitted),
)
