"""The size of a forward, as far as device memory is concerned."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ForwardSize"]


class ForwardSize(NamedTuple):
    """Sizes compare as tuples: padded tokens decide, rows decide where a model has no tokens.

    >>> ForwardSize(0, 16) > ForwardSize(0, 8)
    True
    >>> ForwardSize(800, 4) > ForwardSize(400, 16)
    True
    """

    padded_tokens: int
    """0 for a model without tokens."""
    rows: int
