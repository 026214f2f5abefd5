"""Streaming jobs on a model thread: how each ends, and that the thread goes on, whatever the model does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from penstock import Cancelled, Client, Expired, InputRefused, ModelError, NonFiniteOutput
from penstock.registry.settings import Settings
from penstock.registry.tensors import Array
from penstock.testing import Model
from penstock.workers.runtime.base import DeadlinePassed, TooLongHere

PATIENCE_S = 180.0
Ending = Callable[[Any], None]


class Own(BaseException):
    """No `except Exception` sees it."""


def _raise(error: BaseException) -> Ending:
    def ending(_: Any) -> None:
        raise error

    return ending


ENDINGS: dict[str, Ending] = {
    "swallows": lambda _: None,
    "raises": _raise(ValueError("not now")),
    "interrupts": _raise(KeyboardInterrupt()),
    "exits": _raise(SystemExit(3)),
    "raises its own": _raise(Own()),
    "reports": lambda ctx: ctx.progress(0.5),
}


def endless(ending: Ending) -> Callable[[Mapping[str, Array], Any], Iterator[Any]]:
    """A stream without an end, which does this when it is closed."""

    def stream(inputs: Mapping[str, Array], ctx: Any) -> Iterator[Any]:
        for number in range(int(inputs["count"][0])):
            try:
                yield {"n": np.array([number])}
            except BaseException:
                ending(ctx)

    return stream


def submit(client: Client, model: str, count: int) -> Any:
    return client.submit(model, {"count": [count]})


# A generator that yields on when it is closed is closed once more when it is freed; Python says so on stderr.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ENDINGS)
def test_cancelled_stream_ends_as_cancelled(name: str):
    """And the same thread serves the next job."""
    with Client.in_memory({"endless": endless(ENDINGS[name])}) as client:
        job = submit(client, "endless", 1_000_000_000)
        events = job.stream()
        assert next(event for event in events if event.type == "chunk").data["n"].tolist() == [0]
        job.cancel()
        with pytest.raises(Cancelled):
            job.result(PATIENCE_S)
        assert next(event.type for event in events if event.is_terminal) == "cancelled"
        assert len([*submit(client, "endless", 3).stream()]) == 6


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), Own(), SystemExit(3), ValueError("no")]
)
def test_stream_that_raises_fails_with_the_chunks_before_it(error: BaseException):
    """At once, with the class in the message; the thread goes on."""

    def stream(inputs: Mapping[str, Array], ctx: Any) -> Iterator[Any]:
        yield {"n": np.array([7])}
        if inputs["count"][0]:
            raise error

    with Client.in_memory({"raising": stream}) as client:
        job = submit(client, "raising", 1)
        assert [event.type for event in job.stream()] == ["queued", "started", "chunk", "failed"]
        with pytest.raises(ModelError, match=f"^{type(error).__name__}"):
            job.result(PATIENCE_S)
        assert submit(client, "raising", 0).result(PATIENCE_S) == {}


@pytest.mark.parametrize(
    ("end", "error", "message"),
    [
        (DeadlinePassed(has_begun=True), Expired, "The job's deadline passed while it ran"),
        (DeadlinePassed(has_begun=False), Expired, "The job's deadline or lifetime had passed before it ran"),
        (TooLongHere("Found 9 tokens, expected at most 8", 9), InputRefused, "Found 9 tokens, expected at most 8"),
    ],
    ids=["late", "late before it began", "too long for all workers"],
)
def test_stream_that_its_runtime_ends(end: Exception, error: type[Exception], message: str):
    """With an error of its own, and no traceback of a model."""

    def stream(inputs: Mapping[str, Array], ctx: Any) -> Iterator[Any]:
        yield {"n": np.array([7])}
        if inputs["count"][0]:
            raise end

    with Client.in_memory({"ending": stream}) as client:
        job = submit(client, "ending", 1)
        with pytest.raises(error) as found:
            job.result(PATIENCE_S)
        assert str(found.value) == message
        assert job.status() == ("expired" if error is Expired else "failed")
        assert submit(client, "ending", 0).result(PATIENCE_S) == {}


def test_refused_chunk_fails_a_job_whose_model_goes_on():
    """The model catches the refusal and yields the next one, which nobody gets."""
    small = Settings.load(overrides={"queue.max_event_bytes": 1 << 16})

    def stream(inputs: Mapping[str, Array], ctx: Any) -> Iterator[Any]:
        for size in (1, 1 << 17, 1):
            try:
                yield {"n": np.zeros(size, np.uint8)}
            except ModelError:
                continue

    with Client.in_memory({"large": stream}, settings=small) as client:
        *events, end = submit(client, "large", 1).stream()
        assert [event.type for event in events] == ["queued", "started", "chunk"]
        assert isinstance(end.data, ModelError)
        assert "It has 131072 bytes. Expected at most 65536" in str(end.data)


def test_events_of_many_jobs_stay_apart():
    """Eight clients of one worker: each gets its own chunks, all of them, in order."""
    ready = threading.Barrier(8)

    def stream(inputs: Mapping[str, Array], ctx: Any) -> Iterator[Any]:
        base = int(inputs["count"][0])
        for number in range(300):
            yield {"n": np.array([base + number])}
            ctx.progress(number / 300)

    with Client.in_memory({"many": stream}) as client:
        found: dict[int, list[int]] = {}

        def follow(base: int) -> None:
            ready.wait(PATIENCE_S)
            events = [*submit(client, "many", base).stream()]
            assert [event.seq for event in events] == [*range(1, 604)]
            found[base] = [int(event.data["n"][0]) for event in events if event.type == "chunk"]

        threads = [threading.Thread(target=follow, args=(1000 * number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert found == {1000 * number: [*range(1000 * number, 1000 * number + 300)] for number in range(8)}


def test_nan_under_the_name_of_an_output_fails_the_job():
    """As in a result; other names are free."""

    def stream(inputs: Mapping[str, Array], ctx: Any) -> Generator[Any, None, Any]:
        yield {"free": np.array([np.nan], np.float32)}
        if inputs["count"][0]:
            yield {"y": np.array([np.nan], np.float32)}
        return {"y": np.ones(1, np.float32)}

    model = Model(
        stream,
        inputs=[{"name": "count", "dtype": "int64", "shape": [1]}],
        outputs=[{"name": "y", "dtype": "float32", "shape": [1]}],
    )
    with Client.in_memory({"nan": model}) as client:
        assert submit(client, "nan", 0).result(PATIENCE_S)["y"].tolist() == [1]
        with pytest.raises(NonFiniteOutput):
            submit(client, "nan", 1).result(PATIENCE_S)
