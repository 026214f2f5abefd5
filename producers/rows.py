"""`map`'s view of a model: one item in, one row out, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import Any

from penstock.registry.errors import InvalidInput
from penstock.registry.package import ModelSpec
from penstock.registry.tensors import Array

__all__ = ["RowShape", "Tracker"]


class RowShape:
    """How an item becomes inputs, and outputs become a row."""

    def __init__(self, spec: ModelSpec) -> None:
        required = [tensor.name for tensor in spec.inputs if not tensor.optional]
        self._only_input = required[0] if len(required) == 1 else None
        self._only_output = spec.outputs[0].name if len(spec.outputs) == 1 else None
        self._model = spec.name

    def inputs(self, item: Any) -> Mapping[str, object]:
        """The inputs of an item: itself when it is a mapping, else one row of the model's only required input."""
        if isinstance(item, Mapping):
            return item
        if self._only_input is None:
            raise InvalidInput(f"Model {self._model} has several inputs. Expected items that are mappings")
        return {self._only_input: item[None] if hasattr(item, "__array__") else [item]}

    def row(self, outputs: dict[str, Array]) -> Any:
        """The only row of a job's outputs; of one output alone where the model has just that."""
        if self._only_output is not None and len(outputs) == 1:
            return outputs[self._only_output][0]
        return {name: values[0] for name, values in outputs.items()}

    @staticmethod
    def take(source: Iterator[Any], count: int) -> list[Any]:
        """The next items, at most `count`."""
        return list(islice(source, count))


class Tracker:
    """Entered, gives what to call with the count of finished items: a bar's update, the caller's own, or nothing."""

    def __init__(self, wish: bool | Callable[[int], None], items: Iterable[Any]) -> None:
        self._wish = wish
        self._total = len(items) if isinstance(items, Sequence) else None
        self._bar: Any = None

    def __enter__(self) -> Callable[[int], None]:
        if callable(self._wish):
            return self._wish
        if not self._wish:
            return lambda _: None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = self._bar = Progress(*columns, console=Console(stderr=True))
        bar.start()
        task = bar.add_task("jobs", total=self._total)
        return lambda done: bar.update(task, completed=done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
