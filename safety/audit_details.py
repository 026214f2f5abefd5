"""The details of an audit entry: any data -> data that may be written, redacted and without objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import TypeAlias

__all__ = ["Redact", "cleaned"]

Redact: TypeAlias = Callable[[str], str]

_DEEPEST = 8


def cleaned(details: Mapping[str, object], redact: Redact) -> dict[str, object]:
    """The details as plain data for JSON, with every string redacted, those of names and of nested data included.

    Bytes, arrays and other objects may hold inputs: only their type is written. So are levels below the eighth.
    """
    return {redact(str(name)): _clean(value, redact, _DEEPEST) for name, value in details.items()}


def _clean(value: object, redact: Redact, depth: int) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return redact(str(value))
    if isinstance(value, Integral):
        return _number(int(value))
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if depth > 0 and isinstance(value, Mapping):
        return {redact(str(name)): _clean(each, redact, depth - 1) for name, each in value.items()}
    if depth > 0 and isinstance(value, list | tuple | set | frozenset):
        return [_clean(each, redact, depth - 1) for each in value]
    return f"({type(value).__name__})"


def _number(value: int) -> int | str:
    # JSON readers agree on integers of 64 bits only.
    return value if -(2**63) <= value < 2**64 else str(value)
