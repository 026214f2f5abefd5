"""A model's declared inputs and outputs, and the check that every job passes before anything is written.

    named values of any kind -> Signature.check -> named arrays of exactly the declared dtypes and shapes

Runs in the client for every submitted job, so the plan is made once and each check is cheap. Uses NumPy only. Every
refusal is an InvalidInput with the input, the kind of value found and the kind expected; it never shows a value.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from penstock.registry.errors import InvalidInput, ModelError, shown
from penstock.registry.tensors import DTYPES, MAX_DIMS, STRING, Array

__all__ = ["BATCH", "Signature", "TensorName", "TensorSpec", "as_array", "shape_text"]

BATCH: Final = "batch"
"""The symbolic dimension along which jobs are concatenated. It is always the first one."""
_EXAMPLE_EXTENT: Final = 8
_MOST_NAMES: Final = 64
"""Names that an error lists."""
_PROBE_ELEMENTS: Final = 8192
_EXPONENT: Final = np.uint16(0x7C00)
"""Of a float16."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}\Z")
_PYTHON_NUMBERS: Final = (int, float, np.integer, np.floating)


def _tensor_name(name: str) -> str:
    if not _NAME.match(name):
        raise ValueError(f"found {name!r:.80}, expected 1 to 64 letters, digits, '.', '_' or '-', not a digit first")
    return name


def _dtype_name(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"found {name!r:.80}, expected one of: {', '.join(DTYPES)}")
    return name


def _dimension(value: object) -> object:
    is_extent = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not is_extent and not (isinstance(value, str) and value.isidentifier()):
        raise ValueError(f"found {value!r:.80}, expected an extent of at least 1 or a symbolic name such as batch")
    return value


def _bound(value: object) -> object:
    if value is None:
        return value
    # An integer beyond the range of floats cannot be compared with an input.
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"found {value!r:.80}, expected a finite number")
    return value


Bound: TypeAlias = Annotated[int | float | None, BeforeValidator(_bound)]
Dimension: TypeAlias = Annotated[int | str, BeforeValidator(_dimension)]
TensorName: TypeAlias = Annotated[str, AfterValidator(_tensor_name)]


class TensorSpec(BaseModel):
    """One declared input or output. A dimension is an extent, or a name that means the same extent everywhere."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: TensorName
    """The name that jobs and the model use."""
    dtype: Annotated[str, AfterValidator(_dtype_name), Field(json_schema_extra={"enum": list(DTYPES)})]
    """The type of its elements."""
    shape: Annotated[tuple[Dimension, ...], Field(strict=False, max_length=MAX_DIMS)]
    """An extent or a symbolic name for each axis."""
    optional: bool = False
    """Whether jobs may omit the input."""
    allow_nan: bool = False
    """Whether NaN and infinity are allowed; floats only."""
    min: Bound = None
    """The least value; numbers only."""
    max: Bound = None
    """The greatest value; numbers only."""

    @model_validator(mode="after")
    def _is_consistent(self) -> TensorSpec:
        if BATCH in self.shape[1:]:
            raise ValueError(f"shape: found {shape_text(self.shape)}, expected {BATCH} as the first dimension only")
        if (self.min is not None or self.max is not None) and self.dtype in (STRING, "bool"):
            raise ValueError(f"min, max: found a range for dtype {self.dtype}, expected it for numbers only")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min, max: found {self.min} > {self.max}, expected min <= max")
        self._check_bounds()
        if self.allow_nan and DTYPES[self.dtype].kind != "f":
            raise ValueError(f"allow_nan: found true for dtype {self.dtype}, expected it for floats only")
        return self

    def _check_bounds(self) -> None:
        dtype = DTYPES[self.dtype]
        for name, bound in (("min", self.min), ("max", self.max)):
            if bound is None:
                continue
            limits: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
            is_whole = dtype.kind == "f" or isinstance(bound, int) or bound.is_integer()
            if not is_whole or not int(limits.min) <= bound <= int(limits.max):
                raise ValueError(f"{name}: found {bound!r:.80}, expected a value that {self.dtype} can hold")

    @property
    def must_be_finite(self) -> bool:
        """Whether its numbers may not be NaN or infinity."""
        return DTYPES[self.dtype].kind == "f" and not self.allow_nan

    @property
    def is_batched(self) -> bool:
        """Whether jobs can be concatenated along this tensor's first dimension."""
        return self.shape[:1] == (BATCH,)

    @property
    def length_axis(self) -> int | None:
        """The axis that is the length of the tensor: the first symbolic one besides `batch`."""
        return next((axis for axis, dim in enumerate(self.shape) if isinstance(dim, str) and dim != BATCH), None)


def shape_text(shape: Sequence[int | str]) -> str:
    """`(batch, 384)`, with Python's comma for a single dimension."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


class Signature:
    """Inputs and outputs of one model version. Immutable, and safe to share between threads."""

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        length_input: str | None = None,
        max_length: int | None = None,
    ) -> None:
        """`max_length` bounds the characters, or the length axis, of `length_input`; None: no bound."""
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.length_input = next((spec for spec in self.inputs if spec.name == length_input), None)
        self._max_length = max_length
        self._plans = tuple(_plan(spec, max_length if spec.name == length_input else None) for spec in self.inputs)
        self._names = frozenset(spec.name for spec in self.inputs)
        self._required = frozenset(spec.name for spec in self.inputs if not spec.optional)
        self._row_input = next((spec.name for spec in self.inputs if spec.is_batched and not spec.optional), None)
        self._optional = tuple(spec.name for spec in self.inputs if spec.optional)
        self._outputs = {spec.name: (DTYPES[spec.dtype], spec) for spec in self.outputs}
        self._free_axes = tuple((spec.name, axes) for spec in self.inputs if (axes := _free_axes(spec)))
        self._finite = tuple(spec.name for spec in self.inputs if spec.must_be_finite)

    @property
    def is_of_shapes(self) -> bool:
        """Whether dtypes, shapes and `check_finite` are the whole signature: no text, no range, no limit of length."""
        return not self._max_length and all(
            spec.dtype != STRING and spec.min is None and spec.max is None for spec in self.inputs
        )

    def check(self, inputs: Mapping[str, object]) -> dict[str, Array]:
        """The inputs as arrays of the declared dtypes, in declared order.

        A NumPy array must have the dtype already; conversion.py converts arrays for producers. Python numbers and
        nested lists are converted where no value changes, except that a float is rounded to the declared precision.
        Raises InvalidInput.
        """
        # `dict` first: a check against an abstract class takes longer.
        if not isinstance(inputs, (dict, Mapping)):
            raise InvalidInput(f"Inputs are a {type(inputs).__name__}. Expected a mapping of names to values")
        if inputs.keys() != self._required:
            self._check_names(inputs)
        extents: dict[str, int] = {}
        return {plan.name: plan.accept(inputs[plan.name], extents) for plan in self._plans if plan.name in inputs}

    def check_finite(self, arrays: Mapping[str, Array]) -> None:
        """Refuses NaN and infinity where numbers must be finite. Raises InvalidInput.

        arrays: of one job, or of several jobs joined. The dtypes are the declared ones.
        """
        for name in self._finite:
            if name in arrays:
                _check_finite(name, arrays[name])

    def rows(self, arrays: Mapping[str, Array]) -> int:
        """The rows of a checked job: its `batch` extent, or 1 for a model without that dimension."""
        return 1 if self._row_input is None else int(arrays[self._row_input].shape[0])

    def length(self, arrays: Mapping[str, Array]) -> int:
        """The longest row of `length_input`: characters of text, or the extent of its length axis; 1 without one."""
        spec = self.length_input
        if spec is None or (values := arrays.get(spec.name)) is None:
            return 1
        if spec.dtype == STRING:
            return len(values.item()) if values.size == 1 else max(map(len, values.ravel().tolist()))
        return int(values.shape[spec.length_axis or 0])

    def batch_key(self, arrays: Mapping[str, Array]) -> tuple[Hashable, ...]:
        """Jobs of one forward share this key: the optional inputs that are present, and the symbolic extents."""
        if not self._optional and not self._free_axes:
            return ()
        present = tuple(name for name in self._optional if name in arrays)
        extents = tuple(arrays[name].shape[axis] for name, axes in self._free_axes if name in arrays for axis in axes)
        return (present, extents)

    def select_outputs(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """The declared outputs among `wanted`, or all if it is empty. Raises InvalidInput."""
        is_list = isinstance(wanted, Sequence) and not isinstance(wanted, str)
        if not is_list or not all(isinstance(name, str) for name in wanted):
            raise InvalidInput(f"outputs: not a list of names. Declared outputs: {_listed(self._outputs)}")
        if unknown := set(wanted).difference(self._outputs):
            raise InvalidInput(f"Unknown output(s): {_listed(unknown)}. Declared outputs: {_listed(self._outputs)}")
        return tuple(name for name in self._outputs if not wanted or name in wanted)

    def check_outputs(self, arrays: Mapping[str, Array], rows: int) -> None:
        """Compares the outputs for `rows` rows with the declared ones. Raises ModelError."""
        if arrays.keys() != self._outputs.keys():
            raise ModelError(
                f"The model returned the outputs: {_listed(arrays) or 'none'}. "
                f"Declared outputs: {_listed(self._outputs) or 'none'}"
            )
        extents = {BATCH: rows}
        for name, (dtype, spec) in self._outputs.items():
            found = arrays[name]
            if found.dtype != dtype or not _is_shaped(found.shape, spec.shape, extents):
                raise ModelError(
                    f"Output {name} is {_dtype_text(found.dtype)} {found.shape}. Declared is {spec.dtype} "
                    f"{shape_text(spec.shape)}" + (f" with {BATCH} = {rows}" if spec.is_batched else "")
                )

    def example(self, rows: int, length: int = _EXAMPLE_EXTENT) -> dict[str, Array]:
        """Small valid inputs of `rows` rows for the required names: zeros, or the nearest value in range, or text.

        length: of texts and of symbolic dimensions, limited to that of the model.
        """
        return {spec.name: self._example(spec, rows, length) for spec in self.inputs if not spec.optional}

    def _example(self, spec: TensorSpec, rows: int, length: int) -> Array:
        extent = min(length, self._max_length or length)
        shape = tuple(dim if isinstance(dim, int) else rows if dim == BATCH else extent for dim in spec.shape)
        if spec.dtype == STRING:
            return np.full(shape, "a" * extent, object)
        low = spec.min if spec.min is not None else -math.inf
        high = spec.max if spec.max is not None else math.inf
        return np.full(shape, max(low, min(0, high)), DTYPES[spec.dtype])

    def _check_names(self, inputs: Mapping[str, object]) -> None:
        problems = []
        if missing := self._required.difference(inputs):
            problems.append(f"Missing required input(s): {_listed(missing)}. ")
        if unexpected := set(inputs).difference(self._names):
            problems.append(f"Unexpected input(s): {_listed(unexpected)}. ")
        if problems:
            raise InvalidInput("".join(problems) + f"Expected inputs: {_listed(self._names)}")


class _Numbers:
    """Accepts one numeric or boolean input."""

    def __init__(self, spec: TensorSpec, max_length: int | None) -> None:
        self.name = spec.name
        self._dtype = DTYPES[spec.dtype]
        self._dtype_name = spec.dtype
        self._shape = spec.shape
        self._is_finite = spec.must_be_finite
        self._min = spec.min
        self._max = spec.max
        self._has_range = spec.min is not None or spec.max is not None
        self._max_length = max_length
        self._length_axis = spec.length_axis

    def accept(self, value: object, extents: dict[str, int]) -> Array:
        """`value` as an array of the declared dtype. Raises InvalidInput."""
        if type(value) is not np.ndarray or value.dtype != self._dtype:
            value = self._convert(value)
        _bind(self.name, self._shape, value.shape, extents)
        if self._is_finite:
            _check_finite(self.name, value)
        if self._has_range:
            self._check_range(value)
        if self._max_length is not None:
            _check_length(self.name, value.shape[self._length_axis or 0], self._max_length, "long")
        return value

    def _convert(self, value: object) -> Array:
        if hasattr(value, "__array__"):
            array = as_array(self.name, value)
            if array.dtype.newbyteorder("<") == self._dtype:
                return array.astype(self._dtype)
            raise InvalidInput(
                f"{self.name}: dtype {_dtype_text(array.dtype)}. Expected {self._dtype_name}{self._remedy(array)}"
            )
        elements = _elements(self.name, value)
        kinds = set(map(type, elements.ravel().tolist()))
        self._check_kinds(kinds)
        return self._cast(elements, kinds)

    def _remedy(self, array: Array) -> str:
        """The line that makes numbers of another dtype acceptable, if there is one."""
        return f': {self.name}.astype("{self._dtype_name}")' if array.dtype.kind in "biufO" else ""

    def _check_kinds(self, kinds: Iterable[type]) -> None:
        for kind in kinds:
            is_bool = issubclass(kind, bool | np.bool_)
            if issubclass(kind, list | tuple):
                raise InvalidInput(f"{self.name}: nested lists of unequal lengths. Expected {shape_text(self._shape)}")
            if is_bool != (self._dtype.kind == "b") or not (is_bool or issubclass(kind, _PYTHON_NUMBERS)):
                raise InvalidInput(f"{self.name}: contains {kind.__name__}. Expected {self._dtype_name}")

    def _cast(self, elements: Array, kinds: set[type]) -> Array:
        try:
            with np.errstate(over="ignore"):
                array = elements.astype(self._dtype)
            if self._dtype.kind != "f":
                is_same = bool((array == elements).all())
            else:
                is_same = (kinds == {float} and bool(np.isfinite(array).all())) or _is_only_rounded(elements, array)
        except (OverflowError, ValueError):
            is_same = False
        if not is_same:
            raise InvalidInput(f"{self.name}: a value does not fit. Expected numbers that {self._dtype_name} can hold")
        return array

    def _check_range(self, array: Array) -> None:
        is_below = self._min is not None and bool((array < self._min).any())
        is_above = self._max is not None and bool((array > self._max).any())
        if is_below or is_above:
            low = "" if self._min is None else f" of at least {self._min}"
            high = "" if self._max is None else f"{' and' if low else ' of'} at most {self._max}"
            side = "below" if is_below else "above"
            raise InvalidInput(f"{self.name}: a value is {side} the range. Expected values{low}{high}")


class _Strings:
    """Accepts one input of text: `str` elements in lists, object arrays or NumPy string arrays."""

    def __init__(self, spec: TensorSpec, max_length: int | None) -> None:
        self.name = spec.name
        self._shape = spec.shape
        self._max_length = max_length

    def accept(self, value: object, extents: dict[str, int]) -> Array:
        """`value` as an object array of str. Raises InvalidInput."""
        if isinstance(value, str) and self._shape:
            example = f'{"[" * len(self._shape)}"hello"{"]" * len(self._shape)}'
            raise InvalidInput(f"{self.name}: one str. Expected {shape_text(self._shape)}, such as {example}")
        array = self._convert(value)
        _bind(self.name, self._shape, array.shape, extents)
        elements = array.ravel().tolist()
        for element in elements:
            if not isinstance(element, str):
                raise InvalidInput(f"{self.name}: contains {type(element).__name__}. Expected str")
        if self._max_length is not None and elements:
            _check_length(self.name, max(map(len, elements)), self._max_length, "characters")
        return array

    def _convert(self, value: object) -> Array:
        if not hasattr(value, "__array__"):
            return _elements(self.name, value)
        array = as_array(self.name, value)
        if array.dtype.kind not in "OUT":
            raise InvalidInput(f"{self.name}: dtype {_dtype_text(array.dtype)}. Expected {STRING}")
        return array.astype(object, copy=False)


def _plan(spec: TensorSpec, max_length: int | None) -> _Numbers | _Strings:
    return (_Strings if spec.dtype == STRING else _Numbers)(spec, max_length)


def _free_axes(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(axis for axis, dim in enumerate(spec.shape) if isinstance(dim, str) and dim != BATCH)


def as_array(name: str, value: object) -> Array:
    """The array that an object offers by `__array__`. Raises InvalidInput where that raises, as for bfloat16."""
    try:
        return np.asarray(value)
    except Exception as error:  # it is code of another library
        raise InvalidInput(
            f"{name}: a {type(value).__name__} that gives no array ({type(error).__name__}). Expected one of NumPy"
        ) from error


def _elements(name: str, value: object) -> Array:
    """Nested lists as an object array: every element keeps its Python type, and ragged rows stay lists."""
    try:
        return np.array(value, object)
    except ValueError:
        raise InvalidInput(f"{name}: nested values of unequal shapes. Expected a rectangular array") from None


def _bind(name: str, declared: tuple[int | str, ...], shape: tuple[int, ...], extents: dict[str, int]) -> None:
    """Checks a shape against the declaration. `extents` holds the symbolic extents of this job so far."""
    if len(shape) != len(declared):
        raise InvalidInput(f"{name}: shape {shape}. Expected {shape_text(declared)}")
    for dim, extent in zip(declared, shape, strict=True):
        if dim == extent:
            continue
        if isinstance(dim, int) or extent < 1:
            raise InvalidInput(f"{name}: shape {shape}. Expected {shape_text(declared)}, every extent at least 1")
        if extents.setdefault(dim, extent) != extent:
            raise InvalidInput(
                f"{name}: {dim} is {extent}, but {extents[dim]} in another input. "
                f"Expected the same {dim} wherever the signature names it"
            )


def _is_shaped(shape: tuple[int, ...], declared: tuple[int | str, ...], extents: dict[str, int]) -> bool:
    return len(shape) == len(declared) and all(
        dim == extent or (isinstance(dim, str) and extents.setdefault(dim, extent) == extent)
        for dim, extent in zip(declared, shape, strict=True)
    )


def _check_length(name: str, length: int, limit: int, unit: str) -> None:
    if length > limit:
        raise InvalidInput(f"{name}: {length} {unit}. Expected at most {limit}")


def _check_finite(name: str, array: Array) -> None:
    if not _all_finite(array):
        raise InvalidInput(f"{name}: contains NaN or infinity. Expected finite numbers")


def _all_finite(array: Array) -> bool:
    if array.dtype == np.float16:
        # All bits of the exponent are set. NumPy's isfinite takes eight times as long, because it converts each number.
        return not bool(((array.view(np.uint16) & _EXPONENT) == _EXPONENT).any())
    # A dot product costs half as much as isfinite on a row. If it overflows, the exact check decides.
    if array.size <= _PROBE_ELEMENTS and math.isfinite(np.vdot(array, array)):
        return True
    return bool(np.isfinite(array).all())


def _is_only_rounded(elements: Array, array: Array) -> bool:
    """Whether no integer changed and nothing finite became infinite."""
    for before, after in zip(elements.ravel().tolist(), array.ravel().tolist(), strict=True):
        if isinstance(before, int | np.integer) and before != after:
            return False
        if math.isinf(after) and not math.isinf(before):
            return False
    return True


def _dtype_text(dtype: np.dtype[Any]) -> str:
    return STRING if dtype.kind in "UT" else str(dtype)


def _listed(names: Iterable[object]) -> str:
    listed = sorted(map(shown, names))
    more = [f"and {len(listed) - _MOST_NAMES} more"] if len(listed) > _MOST_NAMES else []
    return ", ".join([*listed[:_MOST_NAMES], *more])
