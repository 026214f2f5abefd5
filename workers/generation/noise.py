"""Gumbel noise as a function of seed, position and token: the same in any batch, after a preemption, on any machine.

argmax(log p + noise) is a sample of p. A generator's stream would depend on the rows that drew before.
hash64 is the finaliser of splitmix64 (Steele, Lea and Flood 2014), applied to each of the three in turn.

Importing this module imports torch.
"""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["gumbel", "hash64", "row_key"]

_STEP: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB
_MASK: Final = (1 << 64) - 1


def hash64(seed: int, position: int, token: int) -> int:
    """64 bits that look random, equal for equal arguments."""
    return _mixed(_base(seed, position) + token * _STEP)


def row_key(seed: int, position: int) -> int:
    """What the noise of a row depends on beside the token, as torch has 64 bits."""
    return _signed(_base(seed, position))


def gumbel(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """keys: (S,) int64, the `row_key` of each row. tokens: (S, K) int64, on the same device. Returns (S, K) float64."""
    bits = keys[:, None] + tokens * _signed(_STEP)
    bits = (bits ^ _shifted(bits, 30)) * _signed(_FIRST)
    bits = (bits ^ _shifted(bits, 27)) * _signed(_SECOND)
    bits = bits ^ _shifted(bits, 31)
    # The middle of each of 2**53 intervals: neither 0 nor 1, whose logarithms are no numbers.
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _base(seed: int, position: int) -> int:
    return _mixed(_mixed(seed + _STEP) + position * _STEP)


def _mixed(bits: int) -> int:
    bits &= _MASK
    bits = (bits ^ (bits >> 30)) * _FIRST & _MASK
    bits = (bits ^ (bits >> 27)) * _SECOND & _MASK
    return bits ^ (bits >> 31)


def _signed(bits: int) -> int:
    """The same 64 bits, as torch has them."""
    return bits - (1 << 64) if bits >> 63 else bits


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """A shift that fills up with zeros; that of torch repeats the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
