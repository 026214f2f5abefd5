"""`map` without I/O: one item in, one row out; a bounded number of jobs in flight; progress.

items -> MapRun.next_items -> [client submits] -> MapRun.submitted -> oldest -> [client waits] -> results in order
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, Self, TypeAlias, TypedDict, TypeVar

from penstock.producers.job_state import HandleCore, JobState
from penstock.producers.submission import with_keys
from penstock.registry.errors import ConfigurationError, InvalidInput, JobFailed, JobLost, Rejected
from penstock.registry.tensors import Array

if TYPE_CHECKING:
    from penstock.registry.package import ModelSpec

__all__ = ["MAP_WINDOW", "MapOrder", "MapRun", "OnError", "RowShape", "Tracker"]

OnError: TypeAlias = Literal["raise", "return"]
MAP_WINDOW: Final = 512
"""Jobs in flight of one `map`, unless the caller chooses."""
Handle = TypeVar("Handle", bound=HandleCore)


class RowShape:
    """How an item becomes inputs, and outputs become a row."""

    def __init__(self, spec: ModelSpec, requested: Sequence[str] = ()) -> None:
        required = [tensor.name for tensor in spec.inputs if not tensor.optional]
        outputs = spec.signature.select_outputs(requested)
        self._only_input = required[0] if len(required) == 1 else None
        self._only_output = outputs[0] if len(outputs) == 1 else None
        self._model = spec.name

    def inputs(self, item: Any) -> Mapping[str, object]:
        """The inputs of an item that is one row of the model's only required input."""
        if self._only_input is None:
            raise InvalidInput(f"Model {self._model} has several inputs. Expected items that are mappings")
        return {self._only_input: item[None] if hasattr(item, "__array__") else [item]}

    def row(self, outputs: dict[str, Array]) -> Any:
        """The first row of each output by name. One requested output gives its row alone."""
        if self._only_output is not None and len(outputs) == 1:
            return outputs[self._only_output][0]
        return {name: values[0] for name, values in outputs.items()}


class MapOrder(NamedTuple):
    """The arguments of `map` beside the options of its jobs.

    keys: an idempotency key for each item. window: the largest number of jobs in flight.
    """

    items: Iterable[Any]
    keys: Iterable[str | None] | None
    progress: bool | Callable[[int], None]
    on_error: OnError
    window: int


class Places(TypedDict, Generic[Handle]):
    """Arguments of a client's `_submit_many`: the index of the first item, what takes errors by index, and jobs that an
    error leaves."""

    first_index: int
    refused: dict[int, InvalidInput] | None
    untaken: dict[int, Rejected] | None
    stranded: list[Handle]


class _InFlight(NamedTuple, Generic[Handle]):
    """An item without a result. It has a handle, or the error with which it was refused."""

    handle: Handle | None
    is_whole: bool
    refusal: Rejected | None


class MapRun(Generic[Handle]):
    """One `map` under way: which items to submit next, and the results so far. Entering it shows the progress."""

    def __init__(self, shape: RowShape, order: MapOrder) -> None:
        if type(order.window) is not int or order.window < 1:
            raise ConfigurationError(f"window is {order.window!r:.80}. Expected a whole number of at least 1")
        self.results: list[Any] = []
        self.count = 0
        """Items that were submitted."""
        self._shape = shape
        self._source = with_keys(order.items, order.keys)
        self._window = order.window
        self._chunk = max(1, order.window // 4)
        self._returns_errors = _returns_errors(order.on_error)
        self._refused: dict[int, InvalidInput] | None = None
        """Takes the errors of the items at hand by index. None: the first one is raised."""
        self._untaken: dict[int, Rejected] | None = None
        """The same, for idempotency keys that belong to other jobs."""
        self._stranded: list[Handle] = []
        """The jobs of a chunk that the broker has, or may have, where the call has failed or was cancelled."""
        self._in_flight: deque[_InFlight[Handle]] = deque()
        self._is_exhausted = False
        self._taken: list[bool] = []
        """For each item of the chunk at hand, whether it is a mapping of whole inputs."""
        self._tracker = Tracker(order.progress, order.items)
        self._advance: Callable[[int], None] | None = None

    def __enter__(self) -> Self:
        self._advance = self._tracker.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracker.__exit__(kind, error, trace)

    @property
    def is_over(self) -> bool:
        """Whether no item is left and every submitted one has its result."""
        return self._is_exhausted and not self._in_flight

    def next_items(self) -> list[tuple[Mapping[str, object] | InvalidInput, str | None]]:
        """Inputs and idempotency keys to submit now. Empty when the window is full or no item is left.

        An item that cannot become inputs is an error in their place.
        """
        if self._is_exhausted or len(self._in_flight) > self._window - self._chunk:
            return []
        taken = list(islice(self._source, self._chunk))
        self._is_exhausted = not taken
        self._taken = [isinstance(item, Mapping) for item, _ in taken]
        self._refused, self._untaken = ({}, {}) if self._returns_errors else (None, None)
        return [
            (item if is_whole else self._inputs(item), key)
            for (item, key), is_whole in zip(taken, self._taken, strict=True)
        ]

    def due(self) -> list[Handle]:
        """The oldest jobs, whose results make room for the next items; all jobs when no item is left."""
        count = len(self._in_flight) - (0 if self._is_exhausted else self._window - self._chunk)
        return [each.handle for each in islice(self._in_flight, max(0, count)) if each.handle is not None]

    @property
    def places(self) -> Places[Handle]:
        """With these arguments the last chunk is submitted."""
        return {
            "first_index": self.count,
            "refused": self._refused,
            "untaken": self._untaken,
            "stranded": self._stranded,
        }

    def submitted(self, handles: Sequence[Handle]) -> None:
        """Takes the handles of the last chunk, in its order. Items that were refused have none."""
        refused: dict[int, Rejected] = {**(self._refused or {}), **(self._untaken or {})}
        rest = iter(handles)
        for index, is_whole in enumerate(self._taken, self.count):
            refusal = refused.get(index)
            self._in_flight.append(_InFlight(None if refusal else next(rest), is_whole, refusal))
        self.count += len(self._taken)
        self._keep_refusals()

    def complete(self, job: JobState) -> None:
        """Takes the oldest job, whose end is known. A failure is raised, or kept in the place of the result."""
        try:
            outputs = job.outputs()
        except JobLost as lost:
            self.lose(lost)
            return
        except JobFailed as failure:
            self._in_flight.popleft()
            if not self._returns_errors:
                raise
            self._keep(failure)
        else:
            self._keep(outputs if self._in_flight.popleft().is_whole else self._shape.row(outputs))
        self._keep_refusals()

    def lose(self, lost: JobLost) -> None:
        """Takes the loss of the oldest job. It is raised, or kept in the place of the result."""
        if not self._returns_errors:
            raise lost
        self._in_flight.popleft()
        self._keep(lost)
        self._keep_refusals()

    def unfinished(self) -> list[Handle]:
        """The jobs in flight that this `map` began. An earlier job with the same idempotency key is not among them."""
        handles = (*(each.handle for each in self._in_flight), *self._stranded)
        return [handle for handle in handles if handle is not None and handle._state.awaits_reply]

    def _inputs(self, item: Any) -> Mapping[str, object] | InvalidInput:
        try:
            return self._shape.inputs(item)
        except InvalidInput as error:
            return error

    def _keep_refusals(self) -> None:
        """Puts the errors of refused items among the results, up to the oldest job."""
        while self._in_flight and (refusal := self._in_flight[0].refusal) is not None:
            self._in_flight.popleft()
            self._keep(refusal)

    def _keep(self, result: Any) -> None:
        self.results.append(result)
        if self._advance is not None:
            self._advance(len(self.results))


def _returns_errors(on_error: OnError) -> bool:
    if on_error not in ("raise", "return"):
        raise ConfigurationError(f"on_error is {on_error!r:.80}. Expected 'raise' or 'return'")
    return on_error == "return"


class Tracker:
    """Entering it gives the function that takes the count of finished items, or None without progress."""

    def __init__(self, progress: bool | Callable[[int], None], items: Iterable[Any]) -> None:
        self._progress = progress
        self._total = len(items) if isinstance(items, Sequence) else None
        self._bar: Any = None
        self._has_printed = False

    def __enter__(self) -> Callable[[int], None] | None:
        if callable(self._progress):
            return self._progress
        if not self._progress:
            return None
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
        except ModuleNotFoundError:
            # The base install has no terminal library.
            return self._print_count

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = self._bar = Progress(*columns, console=Console(stderr=True))
        bar.start()
        task = bar.add_task("jobs", total=self._total)
        return lambda done: bar.update(task, completed=done)

    def _print_count(self, done: int) -> None:
        self._has_printed = True
        sys.stderr.write(f"\rjobs {done}/{'?' if self._total is None else self._total}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._has_printed:
            sys.stderr.write("\n")
        if self._bar is not None:
            self._bar.stop()
