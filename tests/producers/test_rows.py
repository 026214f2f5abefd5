"""MapRun and RowShape: which items a `map` submits next, which results it awaits, what a row is."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from penstock.producers.job_state import HandleCore, JobState, ResultPolicy
from penstock.producers.rows import MapOrder, MapRun, RowShape
from penstock.registry.broker.base import JobRecord, State
from penstock.registry.envelope import Failure, Keyring, RequestContext, ResultHeader, seal
from penstock.registry.errors import (
    ConfigurationError,
    IdempotencyConflict,
    InvalidInput,
    JobLost,
    ModelError,
    Rejected,
)
from penstock.registry.package import ModelSpec
from penstock.registry.tensors import encode

POLICY = ResultPolicy(Keyring.parse(None), ttl_s=60)
_X = {"name": "x", "dtype": "float32", "shape": ["batch", 2]}


def _spec(outputs: int = 1, inputs: int = 1) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": "m",
            "version": "1",
            "format": "python",
            "entrypoint": "model:build",
            "inputs": [{**_X, "name": f"x{number}"} for number in range(inputs)],
            "outputs": [{**_X, "name": f"y{number}"} for number in range(outputs)],
        }
    )


def _run(items: Any, *, window: int = 8, keys: Any = None, **how: Any) -> MapRun[HandleCore]:
    order = MapOrder(items, keys, how.get("progress", False), how.get("on_error", "raise"), window)
    return MapRun(RowShape(_spec()), order)


def _handles(first: int, count: int, *, awaits_reply: bool = True) -> list[HandleCore]:
    ids = [f"m.{number}" for number in range(first, first + count)]
    return [HandleCore(None, JobState(each, "acme", POLICY, awaits_reply=awaits_reply)) for each in ids]


def _ended(number: float = 0, error: Failure | None = None) -> JobState:
    content, body = encode({"y0": np.full((1, 2), number, np.float32)})
    header = ResultHeader("m.0", RequestContext("acme"), content=content, error=error)
    sealed = seal("result", header, body, POLICY.keyring)
    job = JobState("m.0", "acme", POLICY, awaits_reply=True)
    job.receive(JobRecord(State.FAILED if error else State.COMPLETED, "", sealed))
    return job


def test_items_are_submitted_by_the_quarter_of_a_window():
    """Eight in flight at most: four chunks of two fill the window, and results are awaited for two at a time."""
    run = _run([[0.0, 0.0]] * 10)
    for first in range(0, 8, 2):
        assert len(run.next_items()) == 2
        run.submitted(_handles(first, 2))
    assert run.next_items() == []
    assert [handle.id for handle in run.due()] == ["m.0", "m.1"]
    run.complete(_ended())
    assert run.next_items() == []
    run.complete(_ended())
    assert len(run.next_items()) == 2
    run.submitted(_handles(8, 2))
    assert run.count == 10
    assert not run.is_over


def test_all_results_are_due_when_no_item_is_left():
    """The last turn awaits every job in flight; then the run is over, with a result for each item."""
    run = _run([[0.0, 0.0]] * 3)
    for first, count in ((0, 2), (2, 1)):
        run.next_items()
        run.submitted(_handles(first, count))
        assert run.due() == []
    assert run.next_items() == []
    assert len(run.due()) == 3
    for number in range(3):
        run.complete(_ended(number))
    assert run.is_over
    assert [row.tolist() for row in run.results] == [[0, 0], [1, 1], [2, 2]]


def test_no_items_give_no_results():
    """A map of nothing submits nothing and is over at once."""
    run = _run([])
    assert run.next_items() == []
    assert run.is_over


def test_only_jobs_that_this_map_began_are_unfinished():
    """An earlier job that a key leads to belongs to its own submitter: this map does not cancel it."""
    run = _run([[0.0, 0.0]] * 2, keys=["a", "b"])
    assert [key for _, key in run.next_items()] == ["a", "b"]
    run.submitted([*_handles(0, 1), *_handles(1, 1, awaits_reply=False)])
    assert [handle.id for handle in run.unfinished()] == ["m.0"]


def test_a_failure_is_raised_or_kept():
    """on_error decides. A kept failure counts as a finished item."""
    failure = Failure("ModelError", "no")
    counts: list[int] = []
    for on_error in ("raise", "return"):
        run = _run([[0.0, 0.0]], on_error=on_error, progress=counts.append)
        with run:
            run.next_items()
            run.submitted(_handles(0, 1))
            if on_error == "raise":
                with pytest.raises(ModelError):
                    run.complete(_ended(error=failure))
            else:
                run.complete(_ended(error=failure))
                assert isinstance(run.results[0], ModelError)
    assert counts == [1]


def test_one_requested_output_gives_its_row_alone():
    """A row of the only output, or of the only requested one; otherwise a dict of rows."""
    values = np.array([[1, 2]], np.float32)
    assert RowShape(_spec()).row({"y0": values}).tolist() == [1, 2]
    assert RowShape(_spec(outputs=2), ["y1"]).row({"y1": values}).tolist() == [1, 2]
    both = RowShape(_spec(outputs=2)).row({"y0": values, "y1": values})
    assert {name: row.tolist() for name, row in both.items()} == {"y0": [1, 2], "y1": [1, 2]}
    with pytest.raises(InvalidInput, match=r"Unknown output\(s\): q"):
        RowShape(_spec(), ["q"])


def test_rows_need_a_model_with_one_required_input():
    """A model with several inputs takes mappings only."""
    with pytest.raises(InvalidInput, match="Expected items that are mappings"):
        RowShape(_spec(inputs=2)).inputs([1.0, 2.0])


@pytest.mark.parametrize("window", [0, -1, 2.5, True])
def test_a_window_without_room_is_refused(window: Any):
    """A map could never submit an item: it says so instead of waiting for ever."""
    with pytest.raises(ConfigurationError, match="Expected a whole number of at least 1"):
        _run([[1.0, 2.0]], window=window)


def test_a_job_that_is_lost_is_raised_or_kept():
    """Its end is known by a missing record. When it is raised, the job is still in flight: `map` cancels it."""
    for on_error in ("raise", "return"):
        run = _run([[0.0, 0.0]], on_error=on_error)
        run.next_items()
        run.submitted(_handles(0, 1))
        lost = JobState("m.0", "acme", POLICY, awaits_reply=False, seen_at=time.monotonic())
        if on_error == "raise":
            with pytest.raises(JobLost):
                run.complete(lost)
            assert [handle.id for handle in run.unfinished()] == ["m.0"]
        else:
            run.complete(lost)
            assert isinstance(run.results[0], JobLost)


def test_refused_items_stand_among_the_results():
    """Each in its place, before, between and after jobs; they count as finished, and have no handle to wait for."""
    counts: list[int] = []
    with _run([[0.0, 0.0]] * 6, window=24, on_error="return", progress=counts.append) as run:
        run.next_items()
        places = run.places
        assert places == {"first_index": 0, "refused": {}, "untaken": {}, "stranded": []}
        assert places["refused"] is not None
        assert places["untaken"] is not None
        places["refused"].update({index: InvalidInput(f"Item {index}: bad") for index in (0, 3, 5)})
        places["untaken"][1] = IdempotencyConflict("another job has the key")
        run.submitted(_handles(0, 2))
        assert counts == [1, 2]
        assert run.next_items() == []
        assert [handle.id for handle in run.due()] == ["m.0", "m.1"]
        assert [handle.id for handle in run.unfinished()] == ["m.0", "m.1"]
        run.complete(_ended(2))
        assert counts == [1, 2, 3, 4]
        run.complete(_ended(4))
        assert run.is_over
    assert [str(each) if isinstance(each, Rejected) else each[0] for each in run.results] == [
        *("Item 0: bad", "another job has the key", 2, "Item 3: bad", 4, "Item 5: bad")
    ]


def test_items_that_cannot_be_rows_are_errors_among_the_inputs():
    """A model with several inputs takes mappings only, and says so for the item."""
    run: MapRun[HandleCore] = MapRun(RowShape(_spec(inputs=2)), MapOrder([[1.0], {"x0": 1}], None, False, "return", 8))
    (refused, _), (inputs, _) = run.next_items()
    assert isinstance(refused, InvalidInput)
    assert inputs == {"x0": 1}
