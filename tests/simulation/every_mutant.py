"""The mutants of all parts, for the tests and for the command."""

from __future__ import annotations

from typing import Final

from tests.simulation.arm_mutants import ARM_MUTANTS
from tests.simulation.client_mutants import CLIENT_MUTANTS
from tests.simulation.fast_way_mutants import FAST_WAY_MUTANTS
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.tier_mutants import TIER_MUTANTS

__all__ = ["EVERY_MUTANT"]

EVERY_MUTANT: Final[tuple[Mutant, ...]] = (
    *MUTANTS,
    *FAST_WAY_MUTANTS,
    *CLIENT_MUTANTS,
    *TIER_MUTANTS,
    *ARM_MUTANTS,
)
