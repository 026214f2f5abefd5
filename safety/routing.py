"""Which version answers a job: a key and the arms of an experiment -> the version. Pure, and the same in every process.

    weighted   the key is the job's id: each job is assigned on its own
    sticky     the key is the tenant, or one that the client gave: all its jobs have one version

A key's point is BLAKE2b under the experiment's salt, a number of 64 bits. The arms divide the range of these numbers
in their order, each in proportion to its weight. Two experiments with two salts are independent. CRC-32 would not do:
it is linear, so that another salt only moves all points by the same pattern of bits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from functools import cached_property
from hashlib import blake2b
from math import fsum, isfinite
from typing import Final

import msgspec

from penstock.registry.errors import InvalidInput, described, shown

__all__ = ["MAX_ARMS", "WEIGHTS_WITHIN", "Arm", "RoutingTable", "check_arm", "rollout_table"]

MAX_ARMS: Final = 32
"""A table travels with each claim, so its size has a limit."""

_POINT_BYTES: Final = 8
_POINTS: Final = 1 << 8 * _POINT_BYTES
WEIGHTS_WITHIN: Final = 1e-6
"""Weights come as decimal fractions, whose sum may miss 1 by rounding."""


class Arm(msgspec.Struct, frozen=True, gc=False):
    """One version of an experiment. weight: its share of the keys, 0 to 1. An arm of weight 0 gets none."""

    version: str
    weight: float


class RoutingTable(msgspec.Struct, frozen=True, dict=True):
    """The arms of one experiment. salt: the experiment's name, or any text that no other experiment has.

    While salt, order and number of arms stay the same, the first arm keeps its keys when its weight grows.
    """

    arms: tuple[Arm, ...]
    salt: str
    is_sticky: bool = False

    def check(self, known: Collection[str] | None = None) -> None:
        """Raises InvalidInput (a ValueError) if no traffic can be divided by this table.

        known: the versions of the model; other arms are refused.
        """
        if not 1 <= len(self.arms) <= MAX_ARMS:
            raise InvalidInput(f"{len(self.arms)} arms, expected 1 to {MAX_ARMS}")
        if not self.salt:
            raise InvalidInput("The salt is empty, expected a text that no other experiment has")
        for arm in self.arms:
            check_arm(arm, known)
        versions = [arm.version for arm in self.arms]
        if repeated := [version for version in versions if versions.count(version) > 1]:
            raise InvalidInput(f"The arm {shown(repeated[0])!r} is there twice, expected each version once")
        total = fsum(arm.weight for arm in self.arms)
        if abs(total - 1) > WEIGHTS_WITHIN:
            raise InvalidInput(f"The weights add up to {total:g}, expected 1")

    def key_of(self, job_id: str, sticky_key: str = "") -> str:
        """The key that decides for this job: the sticky key, if the table is sticky and there is one, or the id."""
        return sticky_key if self.is_sticky and sticky_key else job_id

    def version_for(self, key: str | bytes) -> str:
        """The version for this key: always the same one. The table must have passed `check`."""
        salted, ends, versions = self._prepared
        hasher = salted.copy()
        # A key comes from a client, and a lone surrogate in it must not stop a claim.
        hasher.update(key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key)
        return versions[bisect_right(ends, hasher.digest())]

    @cached_property
    def _prepared(self) -> tuple[blake2b, tuple[bytes, ...], tuple[str, ...]]:
        """A hasher that has the salt; where each arm's range ends, as big-endian bytes; the arms' versions."""
        # BLAKE2b takes 16 bytes of salt, so the hash of a longer one stands for it.
        salt = blake2b(self.salt.encode("utf-8", "surrogatepass"), digest_size=blake2b.SALT_SIZE).digest()
        arms = [arm for arm in self.arms if arm.weight > 0]
        # The last range has no end here: it holds the remainder, whatever the rounding of the weights.
        ends = (_point(fsum(arm.weight for arm in arms[:place])) for place in range(1, len(arms)))
        return blake2b(digest_size=_POINT_BYTES, salt=salt), tuple(ends), tuple(arm.version for arm in arms)


def rollout_table(stable: str, candidate: str, share: float, salt: str, *, is_sticky: bool = False) -> RoutingTable:
    """The candidate gets this share of the keys, 0 to 1, and the stable version the others.

    With one salt the shares are nested: a key that has the candidate at 0.05 has it at 0.1, too.
    """
    check_arm(Arm(candidate, share))
    table = RoutingTable((Arm(candidate, float(share)), Arm(stable, 1.0 - share)), salt, is_sticky)
    table.check()
    return table


def check_arm(arm: Arm, known: Collection[str] | None = None) -> None:
    """Raises InvalidInput for an arm without a version, with an unknown one, or with a weight outside 0 to 1."""
    if not isinstance(arm.version, str) or not arm.version:
        raise InvalidInput(f"An arm has the version {described(arm.version)}, expected the name of a version")
    if known is not None and arm.version not in known:
        expected = ", ".join(sorted(map(shown, known))) or "a registered version, and the model has none"
        raise InvalidInput(f"Unknown arm {shown(arm.version)!r}. Expected some of: {expected}")
    # A boolean is an int to Python and a mistake in a weight.
    is_number = isinstance(arm.weight, int | float) and not isinstance(arm.weight, bool)
    if not is_number or not isfinite(arm.weight) or not 0 <= arm.weight <= 1:
        message = f"The arm {shown(arm.version)!r} has the weight {described(arm.weight)}, expected a number 0 to 1"
        raise InvalidInput(message)


def _point(share: float) -> bytes:
    """The share of the range, 0 to 1, as the point that ends it."""
    return min(int(share * _POINTS), _POINTS - 1).to_bytes(_POINT_BYTES, "big")
