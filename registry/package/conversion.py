"""Inputs of another dtype -> inputs of the declared one, where every value keeps its meaning. Pure; for producers.

    float -> float    rounded to the declared precision; refused when a finite value would become infinite
    other numbers     only when no value changes: int64 to int32, float64 to int64, int64 to float32
    one str           one row, for an input of text with the shape (batch,)

Nothing else is converted: a truth value is no number, and text is no number. Workers accept the declared dtypes only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from penstock.registry.errors import InvalidInput
from penstock.registry.package.signature import BATCH, TensorSpec, as_array
from penstock.registry.tensors import DTYPES, STRING, Array

__all__ = ["cast", "conversions"]

_NUMBERS: Final = frozenset("iuf")


def conversions(specs: Iterable[TensorSpec], inputs: Mapping[str, object]) -> dict[str, object]:
    """The inputs that can be converted, by name, each as it is to be sent.

    Raises InvalidInput for numbers of another dtype that do not fit the declared one.
    """
    changed: dict[str, object] = {}
    for spec in specs:
        value = inputs.get(spec.name)
        if isinstance(value, str):
            if spec.dtype == STRING and spec.shape == (BATCH,):
                changed[spec.name] = [str(value)]
        elif hasattr(value, "__array__"):
            found, dtype = as_array(spec.name, value), DTYPES[spec.dtype]
            if found.dtype.newbyteorder("<") != dtype and {found.dtype.kind, dtype.kind} <= _NUMBERS:
                if (array := cast(found, dtype)) is None:
                    raise _misfit(spec, found)
                changed[spec.name] = array
    return changed


def cast(array: Array, dtype: np.dtype[Any]) -> Array | None:
    """The numbers of `array` as `dtype`. None when one would lose its meaning."""
    # Values that overflow are found below.
    with np.errstate(all="ignore"):
        if array.dtype.kind == dtype.kind == "f":
            changed = array.astype(dtype)
            is_kept = bool((np.isfinite(changed) | ~np.isfinite(array)).all())
            return changed if is_kept else None
        return array.astype(dtype) if _is_unchanged(array, dtype) else None


def _misfit(spec: TensorSpec, found: Array) -> InvalidInput:
    text = f"{spec.name}: dtype {found.dtype}, and a value does not fit. Expected numbers that {spec.dtype} can hold"
    # Rounding may be meant. An overflow never is.
    is_rounding = found.dtype.kind != "f" and DTYPES[spec.dtype].kind == "f"
    return InvalidInput(f'{text}, or {spec.name}.astype("{spec.dtype}") to round them' if is_rounding else text)


def _is_unchanged(array: Array, dtype: np.dtype[Any]) -> bool:
    """Whether no value changes, where integers take part."""
    if array.size == 0:
        return True
    if array.dtype.kind == "f":
        return _is_within(array, dtype) and bool((array == np.trunc(array)).all())
    if dtype.kind == "f":
        # Back again, but not from a number that the integer dtype cannot hold.
        there = array.astype(dtype)
        return _is_within(there, array.dtype) and bool((there.astype(array.dtype) == array).all())
    info = np.iinfo(dtype)
    return int(info.min) <= int(array.min()) and int(array.max()) <= int(info.max)


def _is_within(floats: Array, dtype: np.dtype[Any]) -> bool:
    """Whether all are finite and within the range of an integer dtype."""
    info = np.iinfo(dtype)
    # In a float16 the bounds would be infinite. In wider floats they are exact, as powers of two.
    wide = floats.astype(np.promote_types(floats.dtype, np.float64))
    return bool(((wide >= float(info.min)) & (wide < float(int(info.max) + 1))).all())
