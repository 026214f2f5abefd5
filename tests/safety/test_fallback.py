"""The fallback chain: which level is next. Its levels answer in turn in workers/test_fallback_levels.py. AR-067."""

from __future__ import annotations

from itertools import combinations

import pytest

from penstock.registry.errors import InvalidInput
from penstock.safety.fallback import LEVELS, FallbackChain


def test_every_chain_ends():
    """For all sets of failed and skipped levels: the next one is later than all that failed, or there is none."""
    chains = [
        FallbackChain(levels) for size in range(1, 5) for levels in combinations(LEVELS, size) if "plain" in levels
    ]
    for chain in chains:
        for size in range(len(LEVELS) + 1):
            for failed in combinations(LEVELS, size):
                for skipped in (LEVELS, ("compiled",), ()):
                    found = chain.next(failed, skipped=skipped)
                    later = chain.levels if not failed else LEVELS[LEVELS.index(failed[-1]) + 1 :]
                    assert found is None or (found in chain.levels and found in later)
                    assert found == "plain" or found not in skipped
                    if not failed:
                        assert found is not None


@pytest.mark.parametrize(
    "levels", [(), ("compiled",), ("plain", "compiled"), ("plain", "plain"), ("plain", "eager"), ("fallback", "plain")]
)
def test_levels_that_are_no_chain_are_refused(levels):
    """The message names the levels in their order."""
    with pytest.raises(InvalidInput, match="compiled, micro-batched, plain, fallback"):
        FallbackChain(levels)
