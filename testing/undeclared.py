"""The spec of a function without a declaration: names, dtypes and shapes are what each job brings.

What holds for every model still holds: inputs have a first dimension of rows, outputs have one row for each row of the
inputs, and floats of the outputs are finite. A declaration alone can say which jobs may share a forward or an answer,
so each job is one call of the function.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
from pydantic import ValidationError

from penstock.registry.errors import ConfigurationError, InvalidInput, ModelError, shown
from penstock.registry.package import ModelSpec
from penstock.registry.package.signature import BATCH, Signature, TensorSpec
from penstock.registry.package.spec import first_problem
from penstock.registry.package.spec_sections import Batching
from penstock.registry.queues import parse_name
from penstock.registry.tensors import DTYPES, STRING, Array
from penstock.testing.model import Function, is_generator

__all__ = ["UndeclaredSignature", "UndeclaredSpec"]

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_MOST_ROWS: Final = 65_536
_MOST_SIGNATURES: Final = 256
"""Signatures of earlier jobs that are kept."""


class UndeclaredSignature(Signature):
    """Takes inputs of any names, dtypes and shapes. Of a model that streams, also inputs without rows."""

    def __init__(self, *, streams: bool) -> None:
        super().__init__((), ())
        self._streams = streams
        self._jobs = itertools.count()
        self._signatures: dict[tuple[Hashable, ...], Signature] = {}

    def check(self, inputs: Mapping[str, object]) -> dict[str, Array]:
        """The inputs as arrays: an array keeps its dtype, a list becomes what NumPy makes of it."""
        if not isinstance(inputs, Mapping):
            raise InvalidInput(f"Inputs are a {type(inputs).__name__}. Expected a mapping of names to values")
        arrays = {name: _array(shown(name), value) for name, value in inputs.items()}
        return self._signature_of(arrays).check(arrays)

    def rows(self, arrays: Mapping[str, Array]) -> int:
        """The rows of a checked job; 1 for a model that streams, and for a job without inputs."""
        return 1 if self._streams or not arrays else len(next(iter(arrays.values())))

    def batch_key(self, arrays: Mapping[str, Array]) -> tuple[Hashable, ...]:
        """Differs for every job: each is a call of its own."""
        return (next(self._jobs),)

    def select_outputs(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """All outputs. Raises InvalidInput for a selection: the names are not known before the function was called."""
        if wanted:
            raise InvalidInput("outputs: the model declares none. Expected no selection, or a penstock.testing.Model")
        return ()

    def check_outputs(self, arrays: Mapping[str, Array], rows: int) -> None:
        """Raises ModelError for outputs that no declaration can allow."""
        if self._streams:
            return
        if not arrays:
            raise ModelError("The model returned no outputs. Expected at least one")
        for name, values in arrays.items():
            if values.shape[:1] != (rows,):
                raise ModelError(
                    f"Output {shown(name)} has shape {values.shape}. Expected {rows} as the first extent: one row for "
                    "each row of the inputs"
                )

    def _signature_of(self, arrays: Mapping[str, Array]) -> Signature:
        """The signature that these inputs would fit."""
        rowless = 0 if self._streams else 1
        key = tuple((name, values.dtype, values.shape[rowless:], values.ndim) for name, values in arrays.items())
        signature = self._signatures.get(key)
        if signature is None:
            if len(self._signatures) >= _MOST_SIGNATURES:
                self._signatures.clear()
            signature = Signature([_tensor(name, values, rowless) for name, values in arrays.items()], ())
            self._signatures[key] = signature
        return signature


class UndeclaredSpec(ModelSpec):
    """The spec of a function without a declaration. It is never read from bytes, which cannot say this."""

    @classmethod
    def of(cls, name: str, function: Function) -> UndeclaredSpec:
        """The spec of this function under this name. Raises ConfigurationError."""
        streams = is_generator(function)
        try:
            parse_name("model", name)
        except InvalidInput as error:
            raise ConfigurationError(str(error)) from None
        return cls.model_construct(
            name=name,
            version="1",
            format="python",
            inputs=(),
            outputs=(),
            batching=Batching() if streams else Batching(max_batch_size=_MOST_ROWS),
            streams=streams,
            deterministic=False,
        )

    @cached_property
    def signature(self) -> UndeclaredSignature:
        """The check for this model's inputs."""
        return UndeclaredSignature(streams=self.streams)


def _array(name: str, value: object) -> Array:
    try:
        array = np.asarray(value)
    except ValueError:
        raise InvalidInput(f"{name}: nested lists of unequal lengths. Expected a rectangular array") from None
    if array.dtype.kind in "UT":
        return array.astype(object)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype not in _NAMES:
        raise InvalidInput(f"{name}: dtype {array.dtype}. Expected one of: {', '.join(DTYPES)}")
    return array


def _tensor(name: str, values: Array, rowless: int) -> TensorSpec:
    dtype = _NAMES[values.dtype]
    declared: dict[str, Any] = {
        "name": name,
        "dtype": dtype,
        "shape": (*(BATCH,) * rowless, *values.shape[rowless:]),
        "allow_nan": dtype != STRING and values.dtype.kind == "f",
    }
    try:
        return TensorSpec.model_validate(declared)
    except ValidationError as error:
        raise InvalidInput(f"{shown(name)}: {first_problem(error)}") from None
