"""Every odd call that a new user made, with the whole text that both clients answer, and that nothing was sent.

Brokers are in memory where their nature does not matter. The refusals of the model's signature that need no odd value
are in test_bad_input.py, on a real broker; closed clients are in test_closed_client.py, URLs in test_broker_url.py.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import numpy as np
import pytest

from penstock import AsyncClient, Client, ClientUnusable, ConfigurationError, InvalidInput, PenstockError, Retry
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.testing import Model
from tests.producers.answers import claim, end
from tests.servers import RedisServer, wait_until

KINDS = ["blocking", "asyncio"]
PATIENCE_S = 180.0
ROW = np.arange(4, dtype=np.float32).reshape(1, 4)
_RULE = "Expected 1 to 64 characters of a-z, 0-9, '.', '_' or '-', starting with a letter or digit"
_SECONDS = "Expected a number of seconds, or None to wait without a limit"
_EVENT = "Expected the sequence number of an event, or 0 for all events"
_JOBS = "Expected handles of this client, such as [job]"

Call = Callable[[Any], Any]


def _models() -> dict[str, Any]:
    """`odd`: numbers, and optional text in two shapes -> 2 x."""
    inputs: list[dict[str, Any]] = [
        {"name": "x", "dtype": "float32", "shape": ["batch", 4]},
        {"name": "text", "dtype": "string", "shape": ["batch"], "optional": True},
        {"name": "pair", "dtype": "string", "shape": ["batch", 2], "optional": True},
    ]
    outputs = [{"name": "y", "dtype": "float32", "shape": ["batch", 4]}]
    return {"odd": Model(lambda given: {"y": given["x"] * 2}, inputs=inputs, outputs=outputs)}


def _sent(client: Any) -> int:
    """The jobs that the broker has accepted: their records stay after their end."""
    return len(client._worker._broker._state.records.values())


def _outcome(kind: str, call: Call) -> tuple[object, int]:
    """(what a call gives, or its error; the jobs that the broker has afterwards)."""
    if kind == "blocking":
        with Client.in_memory(_models()) as client:
            return _settled(lambda: call(client)), _sent(client)

    async def main() -> tuple[object, int]:
        async with AsyncClient.in_memory(_models()) as client:
            try:
                found = call(client)
                value = await found if inspect.isawaitable(found) else found
            except PenstockError as error:
                value = error
            return value, _sent(client)

    return asyncio.run(main())


def _settled(call: Callable[[], object]) -> object:
    try:
        return call()
    except PenstockError as error:
        return error


def submit(value: object = ROW, **how: Any) -> Call:
    """A submit of `x`, or of other inputs, with options."""
    inputs = value if isinstance(value, dict) else {"x": value}
    return lambda client: client.submit("odd", inputs, **how)


_REFUSED: dict[str, tuple[Call, str]] = {
    "NaN": (submit(ROW * math.nan), "x: contains NaN or infinity. Expected finite numbers"),
    "infinity in a list": (submit([[1, 2, 3, math.inf]]), "x: contains NaN or infinity. Expected finite numbers"),
    "ragged": (submit([[1, 2], [3]]), "x: nested lists of unequal lengths. Expected (batch, 4)"),
    "ragged in depth": (
        submit([[1, 2, 3, 4], [1, [2], 3, 4]]),
        "x: nested lists of unequal lengths. Expected (batch, 4)",
    ),
    "None": (submit(None), "x: contains NoneType. Expected float32"),
    "generator": (submit(iter([1.0])), "x: contains list_iterator. Expected float32"),
    "one number": (submit(1.0), "x: shape (). Expected (batch, 4)"),
    "104 MB": (
        submit(np.zeros((6_500_000, 4), np.float32)),
        "The inputs take 104000000 bytes. Expected at most 10485760",
    ),
    "lone surrogate": (
        submit({"x": ROW, "text": ["\ud800"]}),
        "text: contains a lone surrogate. Expected text that UTF-8 can encode",
    ),
    "bytes": (submit({"x": ROW, "text": [b"hello"]}), "text: contains bytes. Expected str"),
    "one str": (
        submit({"x": ROW, "pair": "hello"}),
        'pair: one str. Expected (batch, 2), such as [["hello"]]',
    ),
    "name that is no text": (
        submit({1: ROW}),
        "Missing required input(s): x. Unexpected input(s): 1. Expected inputs: pair, text, x",
    ),
    "no inputs": (
        lambda client: client.submit("odd", None),
        "Inputs are a NoneType. Expected a mapping from input name to value",
    ),
    "no model": (lambda client: client.submit(None, {"x": ROW}), f"Bad model name None. {_RULE}"),
    "list of models": (lambda client: client.submit(["odd"], {"x": ROW}), f"Bad model name of type list. {_RULE}"),
    "misspelt model": (lambda client: client.submit("ood", {"x": ROW}), "Unknown model 'ood'. Expected one of: odd"),
    "priority": (submit(priority="hgih"), "Unknown priority 'hgih'. Expected one of: critical, high, normal, low"),
    "deadline of text": (submit(deadline_s="3"), "deadline_s is a str. Expected seconds from now"),
    "deadline of time": (
        submit(deadline_s=timedelta(seconds=3)),
        "deadline_s is a timedelta. Expected seconds from now",
    ),
    "deadline NaN": (submit(deadline_s=math.nan), "deadline_s is nan. Expected a positive number of seconds from now"),
    "key": (submit(idempotency_key=3), "Bad idempotency key. Expected a string of 1 to 255 characters"),
    "tenant": (submit(tenant=3), f"Bad tenant name 3. {_RULE}"),
    "version": (submit(version=1), f"Bad version name 1. {_RULE}"),
    "outputs": (submit(outputs="y"), "outputs: not a list of names. Declared outputs: y"),
    "retry": (submit(retry=3), "retry is a int. Expected a Retry(attempts, backoff_s, longest_s)"),
    "retry without an attempt": (
        lambda client: client.submit("odd", {"x": ROW}, retry=Retry(attempts=0)),
        "retry.attempts is 0. Expected a whole number from 1 to 100",
    ),
    "retry after NaN": (
        lambda client: client.submit("odd", {"x": ROW}, retry=Retry(backoff_s=math.nan)),
        "retry pauses are nan to 30.0 s. Expected plain numbers, backoff_s <= longest_s, both from 0 to 3600",
    ),
    "many: no items": (lambda client: client.submit_many("odd", None), "The items are None. Expected one for each job"),
    "many: one job's inputs": (
        lambda client: client.submit_many("odd", {"x": ROW}),
        "Item 0: Inputs are a str. Expected a mapping from input name to value",
    ),
    "many: a bad item": (
        lambda client: client.submit_many("odd", [{"x": ROW}, {"x": [[1, 2]]}]),
        "Item 1: x: shape (1, 2). Expected (batch, 4), every extent at least 1",
    ),
    "many: time-out of text": (
        lambda client: client.submit_many("odd", [{"x": ROW}], timeout_s="1"),
        f"timeout_s is '1'. {_SECONDS}",
    ),
    "many: time-out NaN": (
        lambda client: client.submit_many("odd", [{"x": ROW}], timeout_s=math.nan),
        f"timeout_s is nan. {_SECONDS}",
    ),
    "map: no items": (lambda client: client.map("odd", None), "The items are None. Expected one for each job"),
    "map: text": (lambda client: client.map("odd", "abc"), "Item 0: x: contains str. Expected float32"),
    "map: on_error": (
        lambda client: client.map("odd", [ROW[0]], on_error="ignore"),
        "on_error is 'ignore'. Expected 'raise' or 'return'",
    ),
    "map: window": (
        lambda client: client.map("odd", [ROW[0]], window=0),
        "window is 0. Expected a whole number of at least 1",
    ),
    "gather: no jobs": (lambda client: client.gather(None), f"The jobs are None. {_JOBS}"),
    "gather: ids": (lambda client: client.gather(["odd.1"]), "Job 0 is a str. Expected a handle of this client"),
    "as_completed: no jobs": (lambda client: client.as_completed(None), f"The jobs are None. {_JOBS}"),
    "as_completed: time-out": (lambda client: client.as_completed([], timeout="1"), f"timeout is '1'. {_SECONDS}"),
    "job: None": (lambda client: client.job(None), "Bad job id None. Expected <model>.<uuid>"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", _REFUSED)
def test_an_odd_call_is_refused_and_nothing_is_sent(case: str, kind: str):
    """Both clients say what was found and what is expected; the broker has no job."""
    call, text = _REFUSED[case]
    error, sent = _outcome(kind, call)
    assert isinstance(error, PenstockError), error
    assert str(error) == text
    assert sent == 0


_ACCEPTED: dict[str, tuple[object, np.ndarray]] = {
    "big-endian": (ROW.astype(">f4"), ROW),
    "Fortran order": (np.asfortranarray(np.vstack([ROW, ROW + 4])), np.vstack([ROW, ROW + 4])),
    "every second row": (np.vstack([ROW, ROW * 9, ROW + 4])[::2], np.vstack([ROW, ROW + 4])),
    "read-only": (np.frombuffer(ROW.tobytes(), np.float32).reshape(1, 4), ROW),
    "float64": (ROW.astype(np.float64), ROW),
    "float16": (ROW.astype(np.float16), ROW),
    "integers": (ROW.astype(np.int64), ROW),
    "lists of floats": (ROW.tolist(), ROW),
    "lists of NumPy numbers": ([list(ROW[0])], ROW),
    "tuples": (((0, 1, 2, 3),), ROW),
    "matrix": (ROW.view(np.matrix), ROW),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", _ACCEPTED)
def test_odd_numbers_arrive_as_they_are_meant(case: str, kind: str):
    """Byte order, memory order, another dtype and nested sequences change no value."""
    value, meant = _ACCEPTED[case]

    async def ask(client: Any) -> Any:
        return (await (await client.submit("odd", {"x": value})).result(PATIENCE_S))["y"]

    def call(client: Any) -> Any:
        if kind == "asyncio":
            return ask(client)
        return client.submit("odd", {"x": value}).result(PATIENCE_S)["y"]

    answer, sent = _outcome(kind, call)
    np.testing.assert_array_equal(answer, meant * 2)
    assert sent == 1


_OF_HANDLES: dict[str, tuple[Call, str]] = {
    "result: text": (lambda job: job.result(timeout="1"), f"timeout is '1'. {_SECONDS}"),
    "result: NaN": (lambda job: job.result(timeout=math.nan), f"timeout is nan. {_SECONDS}"),
    "result: time": (lambda job: job.result(timeout=timedelta(seconds=1)), f"timeout is of type timedelta. {_SECONDS}"),
    "info: text": (lambda job: job.info(timeout="1"), f"timeout is '1'. {_SECONDS}"),
    "stream: text": (lambda job: job.stream(timeout="1"), f"timeout is '1'. {_SECONDS}"),
    "stream: after text": (lambda job: job.stream(after="1"), f"after is '1'. {_EVENT}"),
    "stream: after -1": (lambda job: job.stream(after=-1), f"after is -1. {_EVENT}"),
    "stream: after 1.5": (lambda job: job.stream(after=1.5), f"after is 1.5. {_EVENT}"),
    # Redis would refuse to read it, and with it the events and replies of all other jobs.
    "stream: after 2**64": (lambda job: job.stream(after=2**64), f"after is 18446744073709551616. {_EVENT}"),
    "stream: after True": (lambda job: job.stream(after=True), f"after is True. {_EVENT}"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", _OF_HANDLES)
def test_an_odd_question_about_a_job_is_refused(case: str, kind: str):
    """Before the broker is asked, and also when the result is known already."""
    ask, text = _OF_HANDLES[case]

    async def ask_asyncio(client: Any) -> object:
        job = await client.submit("odd", {"x": ROW})
        found = ask(job)
        return await (anext(found) if inspect.isasyncgen(found) else found)

    def call(client: Any) -> object:
        if kind == "asyncio":
            return ask_asyncio(client)
        found = ask(client.submit("odd", {"x": ROW}))
        return next(found) if inspect.isgenerator(found) else found

    error, _ = _outcome(kind, call)
    assert isinstance(error, InvalidInput), error
    assert str(error) == text


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize("timeout_s", ["5", math.nan, -1, 0, None, True])
def test_a_client_needs_a_positive_time_out(client: Any, timeout_s: object):
    """The text names the argument; nothing connects."""
    with pytest.raises(InvalidInput) as refused:
        client("redis://127.0.0.1:1/0", timeout_s=timeout_s)
    assert str(refused.value) == f"timeout_s is {timeout_s!r}. Expected a positive number of seconds"


@pytest.mark.parametrize("carry", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_a_client_says_why_it_does_not_travel(client: Any, carry: Callable[[object], object]):
    """As an argument of a process pool: the text says what travels in its place."""
    with pytest.raises(ClientUnusable) as refused:
        carry(client("redis://user:hunter2@127.0.0.1:1/0"))
    assert str(refused.value) == (
        "This client cannot be pickled or copied: its connections and keys belong to this process. Expected a client "
        "that each process makes, and handles or ids of jobs"
    )


@pytest.mark.parametrize("models", [None, ["odd"], "odd"])
@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_models_in_memory_are_a_mapping(client: Any, models: Any):
    """A list of names, as elsewhere in Python, is not enough."""
    found = {"None": "None", "list": "of type list", "str": "'odd'"}[
        "None" if models is None else type(models).__name__
    ]
    with pytest.raises(ConfigurationError) as refused:
        client.in_memory(models)
    assert str(refused.value) == (f"The models are {found}. Expected a mapping from name to function, Model or path")


def test_forty_threads_get_their_own_answers():
    """On one client: each thread asks ten times."""
    with Client.in_memory(_models()) as client, ThreadPoolExecutor(40) as pool:
        both = threading.Barrier(40)

        def ask(thread: int) -> list[float]:
            both.wait(PATIENCE_S)
            jobs = [client.submit("odd", {"x": ROW * 0 + (10 * thread + each)}) for each in range(10)]
            return [float(job.result(PATIENCE_S)["y"][0, 0]) for job in jobs]

        answers = list(pool.map(ask, range(40)))
    assert answers == [[2.0 * (10 * thread + each) for each in range(10)] for thread in range(40)]


def test_eight_threads_have_event_loops_of_their_own(shared_redis: RedisServer, parked: str, broker: RedisStreams):
    """Each with a client of its own, on a real broker: all are answered, whichever ends first."""
    count, each = 8, 5

    async def ask(thread: int) -> list[float]:
        async with AsyncClient(shared_redis.url) as client:
            jobs = [await client.submit(parked, {"x": ROW + thread}) for _ in range(each)]
            return [float(outputs["z"][0]) for outputs in await client.gather(jobs, timeout=PATIENCE_S)]

    with ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(asyncio.run, ask(thread)) for thread in range(count)]

        def are_all_answered() -> bool:
            end(broker, *claim(broker, parked), value=7)
            return all(one.done() for one in asked)

        wait_until(are_all_answered, PATIENCE_S, "every thread has its answers")
        assert [one.result(PATIENCE_S) for one in asked] == [[7.0] * each] * count


@contextmanager
def interrupted_inside(function: str) -> Iterator[None]:
    """Ctrl-C while the main thread is inside a function of this name, as soon as it is."""

    def interrupt(_number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_name == function:
                raise KeyboardInterrupt
            frame = frame.f_back
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_client_goes_on_after_an_interrupted_wait(client: Client, parked: str, broker: RedisStreams):
    """Ctrl-C inside result(), twice: the same handle has its result afterwards, and so has a job of later."""
    job = client.submit(parked, {"x": ROW})
    for _ in range(2):
        with interrupted_inside("wait"), pytest.raises(KeyboardInterrupt):
            job.result(PATIENCE_S)
    end(broker, *claim(broker, parked), value=3)
    assert job.result(PATIENCE_S)["z"].tolist() == [3.0]
    later = client.submit(parked, {"x": ROW})
    end(broker, *claim(broker, parked), value=4)
    assert later.result(PATIENCE_S)["z"].tolist() == [4.0]


def test_a_client_in_memory_goes_on_after_an_interrupted_wait():
    """The model holds its answer until the wait was interrupted."""
    held = threading.Event()

    def forward(inputs: Any) -> dict[str, np.ndarray]:
        assert held.wait(PATIENCE_S)
        return {"y": inputs["x"] * 2}

    with closing(Client.in_memory({"held": forward})) as client:
        job = client.submit("held", {"x": ROW})
        with interrupted_inside("wait"), pytest.raises(KeyboardInterrupt):
            job.result(PATIENCE_S)
        held.set()
        assert job.result(PATIENCE_S)["y"].tolist() == (ROW * 2).tolist()
        assert client.submit("held", {"x": ROW}).result(PATIENCE_S)["y"].tolist() == (ROW * 2).tolist()


def test_an_asyncio_client_goes_on_after_an_interrupted_wait(
    shared_redis: RedisServer, parked: str, broker: RedisStreams
):
    """Ctrl-C ends the event loop; the same client and handle go on in the next one."""
    client = AsyncClient(shared_redis.url)
    jobs: list[Any] = []

    async def wait() -> None:
        jobs.append(await client.submit(parked, {"x": ROW}))
        asyncio.get_running_loop().call_later(0.05, signal.raise_signal, signal.SIGINT)
        await jobs[0].result(PATIENCE_S)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(wait())
    end(broker, *claim(broker, parked), value=5)

    async def go_on() -> list[float]:
        async with client:
            outputs = await jobs[0].result(PATIENCE_S)
            return list(outputs["z"].tolist())

    assert asyncio.run(go_on()) == [5.0]
