"""The fallback chain: which level answers next when one fails. Pure decisions; the callers run the levels.

    compiled -> micro-batched -> plain -> fallback runtime or version -> a clear error

    compiled        a faster form of the model, on the whole micro-batch: skipped while its breaker admits none
    micro-batched   the model as its author built it, on the whole micro-batch
    plain           the same on parts of the micro-batch, down to one job at a time
    fallback        the version that the model's policy names

The workers run the levels: Forms and the executor within a batch, the completer for the fallback. A result tells its
level, and the error at the end of the chain names every level and its reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from penstock.registry.errors import InvalidInput, described

__all__ = ["LEVELS", "FallbackChain", "Level", "LevelFailure", "exhausted"]

Level: TypeAlias = Literal["compiled", "micro-batched", "plain", "fallback"]
LEVELS: Final[tuple[Level, ...]] = ("compiled", "micro-batched", "plain", "fallback")
"""From the fastest to the last resort."""
_MOST_REASON: Final = 300
"""Characters of one level's reason in the error."""


class LevelFailure(NamedTuple):
    """A level that failed or was skipped, and why."""

    level: Level
    reason: str


@dataclass(frozen=True, slots=True)
class FallbackChain:
    """The levels that a model has, fastest first. Raises InvalidInput for levels that are no chain.

    >>> chain = FallbackChain(("compiled", "micro-batched", "plain"))
    >>> chain.next(), chain.next(["compiled"]), chain.next(["compiled"], skipped=["micro-batched"])
    ('compiled', 'micro-batched', 'plain')
    """

    levels: tuple[Level, ...] = ("micro-batched", "plain")

    def __post_init__(self) -> None:
        for level in self.levels:
            _check(level)
        if list(self.levels) != sorted(set(self.levels), key=LEVELS.index) or "plain" not in self.levels:
            raise InvalidInput(
                f"The fallback chain is {', '.join(self.levels) or 'empty'}. Expected some of {', '.join(LEVELS)} in "
                "this order, each once, and plain among them"
            )

    def next(self, failed: Iterable[Level] = (), *, skipped: Collection[Level] = ()) -> Level | None:
        """The level that runs next: the first one after every level that has failed. None: the chain is at its end.

        The plain level is never skipped: it is the model itself.
        """
        reached = -1
        for level in failed:
            _check(level)
            reached = max(reached, LEVELS.index(level))
        for level in self.levels:
            if LEVELS.index(level) > reached and (level == "plain" or level not in skipped):
                return level
        return None


def exhausted(failures: Sequence[LevelFailure]) -> str:
    """The text of the error at the end of the chain.

    >>> exhausted([LevelFailure("compiled", "RuntimeError: x"), LevelFailure("plain", "ValueError: y")])
    'Every level of the fallback chain failed. compiled: RuntimeError: x; plain: ValueError: y'
    """
    reasons = "; ".join(f"{failure.level}: {failure.reason[:_MOST_REASON]}" for failure in failures)
    return f"Every level of the fallback chain failed. {reasons}"


def _check(level: object) -> None:
    if level not in LEVELS:
        raise InvalidInput(f"Unknown level {described(level)}. Expected one of: {', '.join(LEVELS)}")
