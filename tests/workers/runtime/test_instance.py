"""A streaming entry point in a process of its own: its job stays with the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
import yaml

from penstock.registry.errors import InvalidInput
from penstock.registry.package import load_package
from penstock.workers.runtime.base import InstanceLost
from penstock.workers.runtime.instances import ProcessInstances
from penstock.workers.runtime.loading import LoadOptions
from tests.packages import write_package
from tests.workers.runtime.jobs import Listener, drained

SOURCE = """
import gc, threading
import numpy as np
seen, contexts = [], []
def earlier():
    for ctx in contexts[:-1]:
        ctx.progress(0.5)
    return [int(ctx.is_cancelled) for ctx in contexts[:-1]]
def report(ctx, thread):
    for number in range(ASKED):
        ctx.progress((thread * ASKED + number) / 1024)
        assert not ctx.is_cancelled
        seen.append(thread)
def build():
    def stream(inputs, ctx):
        count = int(inputs["x"][0, 0])
        contexts.append(ctx)
        if count == ASK_EARLIER:
            yield {"part": np.array(earlier())}
            return {"y": inputs["x"]}
        if count == ASK_IN_THREADS:
            seen.clear()
            threads = [threading.Thread(target=report, args=(ctx, number)) for number in range(4)]
            for thread in threads:
                thread.start()
            for number in range(ASKED):
                yield {"part": np.array([number])}
            for thread in threads:
                thread.join()
            return {"y": inputs["x"] * 0 + len(seen)}
        try:
            if count > 100:
                ctx.progress(2.0)
            for number in range(count):
                yield {"part": np.array([number]), "text": np.array([ctx.job_id])}
                if ctx.is_cancelled:
                    break
                ctx.progress((number + 1) / count)
            if count < 0:
                raise ValueError("a negative count")
            return {"y": inputs["x"] * 0 + len(seen)}
        finally:
            seen.append(ctx.is_cancelled)
            if count == INTERRUPT_CLOSE:
                (channel,) = [each for each in gc.get_objects() if type(each).__name__ == "Channel"]
                channel.send("loaded")
    return stream
"""
ASKED: Final = 64
"""Questions of each thread."""
ASK_EARLIER: Final = -2
ASK_IN_THREADS: Final = -3
INTERRUPT_CLOSE: Final = 99


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Streams so many chunks to this subscriber."""
    counts = (ASKED, ASK_EARLIER, ASK_IN_THREADS, INTERRUPT_CLOSE)
    source = f"ASKED, ASK_EARLIER, ASK_IN_THREADS, INTERRUPT_CLOSE = {counts}{SOURCE}"
    folder = write_package(tmp_path_factory.mktemp("models"), "stream", source)
    file = folder / "model.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"streams": True, "batching": {}}))
    runtime = ProcessInstances(load_package(folder), LoadOptions(warmup_requests=0))
    runtime.load("cpu", 1)
    yield lambda count, listener: runtime.stream({"x": np.full((1, 4), count, np.float32)}, listener)
    runtime.close()


def test_chunks_progress_and_the_result_cross_over(stream: Callable[..., Any]):
    """In order, with the id of the job."""
    listener = Listener(job_id="stream.7")
    chunks, outputs = drained(stream(4, listener))
    assert [(int(chunk["part"][0]), chunk["text"].tolist()) for chunk in chunks] == [
        (number, ["stream.7"]) for number in range(4)
    ]
    assert listener.fractions == [0.25, 0.5, 0.75, 1.0]
    assert list(outputs) == ["y"]


def test_a_cancellation_is_seen_between_chunks(stream: Callable[..., Any]):
    """The entry point asks the worker each time."""
    listener = Listener()
    steps = stream(50, listener)
    next(steps)
    listener.is_cancelled = True
    chunks, _ = drained(steps)
    assert chunks == []
    assert listener.fractions == []


def test_a_stream_that_is_closed_cleans_up_and_the_next_one_runs(stream: Callable[..., Any]):
    """The entry point's own cleanup has run when `close` returns."""
    _, before = drained(stream(1, Listener()))
    steps = stream(50, Listener())
    next(steps)
    steps.close()
    _, after = drained(stream(1, Listener()))
    assert after["y"][0, 0] - before["y"][0, 0] == 2


def test_an_instance_that_sends_another_message_while_it_is_closed_is_killed(stream: Callable[..., Any]):
    """The next job does not get the rest of its messages."""
    steps = stream(INTERRUPT_CLOSE, Listener())
    next(steps)
    with pytest.raises(InstanceLost, match=r"^an instance was killed: found the message loaded, expected outputs$"):
        steps.close()
    drained(stream(1, Listener()))


def test_exceptions_cross_over_in_both_directions(stream: Callable[..., Any]):
    """The model's reaches the worker; that of a wrong progress is raised in the model."""

    class Strict(Listener):
        def progress(self, fraction: float) -> None:
            raise InvalidInput(f"progress is {fraction}. Expected a number from 0 to 1")

    with pytest.raises(Exception, match=r"^a negative count$") as raised:
        drained(stream(-1, Listener()))
    assert type(raised.value).__name__ == "ValueError"
    with pytest.raises(InvalidInput, match=r"^progress is 2\.0\. Expected"):
        drained(stream(200, Strict()))
    drained(stream(1, Listener()))


@pytest.mark.timeout(300)
def test_threads_of_an_entry_point_share_its_context(stream: Callable[..., Any]):
    """Each question gets its own answer, also while chunks are sent."""
    listener = Listener()
    chunks, outputs = drained(stream(ASK_IN_THREADS, listener))
    assert [int(chunk["part"][0]) for chunk in chunks] == list(range(ASKED))
    assert outputs["y"][0, 0] == 4 * ASKED
    assert sorted(listener.fractions) == [number / 1024 for number in range(4 * ASKED)]


def test_context_of_an_ended_stream_reaches_no_later_job(stream: Callable[..., Any]):
    """It ignores progress, and its last answer about the cancellation stands."""
    drained(stream(50, Listener(is_cancelled=True)))
    drained(stream(1, Listener()))
    listener = Listener(is_cancelled=True)
    chunks, _ = drained(stream(ASK_EARLIER, listener))
    assert chunks[0]["part"].tolist()[-2:] == [1, 0]
    assert listener.fractions == []
