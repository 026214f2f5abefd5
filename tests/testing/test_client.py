"""A client in memory: every call of a real one, on a real worker's parts, in this process."""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import (
    BrokerUnavailable,
    Cancelled,
    Client,
    ConfigurationError,
    Expired,
    IdempotencyConflict,
    InvalidInput,
    JobFailed,
    ModelError,
    NonFiniteOutput,
    PenstockError,
    ResultTimeout,
    Retry,
    UnknownModel,
)
from penstock.registry.settings import Settings
from penstock.registry.tensors import Array
from penstock.testing import Model
from penstock.testing.model import Served
from tests.packages import write_double, write_package, write_raiser
from tests.servers import RedisServer, let_pass, wait_until
from tests.testing.models import PATIENCE_S, Gate, X, Y, declared, double, row


@contextmanager
def held(gate: Gate, **fields: Any) -> Iterator[Client]:
    """A client of the model `gate`, whose first job is in its forward."""
    with Client.in_memory({"gate": declared(gate, **fields)}) as client:
        try:
            client.submit("gate", row(0.0))
            gate.await_forward()
            yield client
        finally:
            gate.opened.set()


def test_a_job_is_answered():
    """Submit, result, status and info, as from a worker process."""
    with Client.in_memory({"double": declared()}) as client:
        job = client.submit("double", row(3.0))
        assert job.result(PATIENCE_S)["y"].tolist() == [[6.0] * 4]
        assert job.status() == "completed"
        info = job.info()
        assert (info.status, info.version, info.attempt, info.batch_size) == ("completed", "1", 1, 1)
        assert len(info.content_hash) == 64
        assert client.job(job.id).result(PATIENCE_S)["y"].tolist() == [[6.0] * 4]


def test_several_models_are_served():
    """A function, a declared one and a package, side by side."""
    with Client.in_memory({"plain": lambda inputs: {"z": -inputs["n"]}, "double": declared()}) as client:
        jobs = [client.submit("plain", {"n": [number]}) for number in range(20)]
        others = [client.submit("double", row(number)) for number in range(20)]
        assert [int(job.result(PATIENCE_S)["z"][0]) for job in jobs] == [-number for number in range(20)]
        assert [float(job.result(PATIENCE_S)["y"][0, 0]) for job in others] == [2.0 * number for number in range(20)]


def test_many_jobs_share_forwards():
    """What waits while a forward runs is one batch, as `max_batch_size` allows."""
    gate = Gate()
    with held(gate, batching={"max_batch_size": 8}) as client:
        jobs = client.submit_many("gate", [row(number) for number in range(1, 9)])
        gate.opened.set()
        assert [float(job.result(PATIENCE_S)["y"][0, 0]) for job in jobs] == [2.0 * number for number in range(1, 9)]
        assert gate.forwards == [[0.0], [float(number) for number in range(1, 9)]]
        assert jobs[0].info().batch_size == 8


def test_map_answers_rows_in_order():
    """A row of the only input gives a row of the only output."""
    with Client.in_memory({"double": declared()}) as client:
        rows = client.map("double", np.arange(40, dtype=np.float32).reshape(10, 4))
        assert np.array_equal(rows, np.arange(40).reshape(10, 4) * 2)


def test_the_more_urgent_job_runs_first():
    """Priorities decide about what waits."""
    gate = Gate()
    with held(gate, batching={"max_batch_size": 1}) as client:
        jobs = [
            client.submit("gate", row(1), priority="low"),
            client.submit("gate", row(2), priority="normal"),
            client.submit("gate", row(3), priority="critical"),
        ]
        gate.opened.set()
        for job in jobs:
            job.result(PATIENCE_S)
    assert gate.forwards == [[0.0], [3.0], [2.0], [1.0]]


def test_a_job_whose_deadline_passes_expires():
    """It takes no forward."""
    gate = Gate()
    with held(gate) as client:
        job = client.submit("gate", row(1.0), deadline_s=0.01)
        let_pass(0.05)
        gate.opened.set()
        with pytest.raises(Expired):
            job.result(PATIENCE_S)
    assert gate.forwards == [[0.0]]


def test_a_waiting_job_can_be_cancelled():
    """It never runs."""
    gate = Gate()
    with held(gate, batching={"max_batch_size": 1}) as client:
        jobs = [client.submit("gate", row(number)) for number in range(1, 40)]
        jobs[-1].cancel()
        with pytest.raises(Cancelled):
            jobs[-1].result(PATIENCE_S)
        gate.opened.set()
        jobs[-2].result(PATIENCE_S)
    assert [39.0] not in gate.forwards


def test_result_waits_no_longer_than_its_timeout():
    """The job goes on, and is answered later."""
    gate = Gate()
    with held(gate) as client:
        job = client.submit("gate", row(2.0))
        with pytest.raises(ResultTimeout):
            job.result(0.01)
        assert job.status() in ("queued", "running")
        gate.opened.set()
        assert job.result(PATIENCE_S)["y"][0, 0] == 4.0


def test_a_failed_forward_is_repeated():
    """As its Retry allows: the third forward answers."""
    calls: list[int] = []

    def flaky(inputs: Mapping[str, Array]) -> dict[str, Array]:
        calls.append(len(calls))
        if len(calls) < 3:
            raise OSError("not yet")
        return double(inputs)

    with Client.in_memory({"flaky": declared(flaky)}) as client:
        assert client.submit("flaky", row(), retry=Retry(3, 0.001)).result(PATIENCE_S)["y"][0, 0] == 2.0
        calls.clear()
        with pytest.raises(ModelError, match="OSError: not yet"):
            client.submit("flaky", row(5.0), retry=Retry(2, 0.001)).result(PATIENCE_S)
    assert len(calls) == 2


def test_a_model_that_raises_fails_its_own_job():
    """Jobs of the same batch are answered; the error has the class and the text of the exception."""
    gate = Gate()

    def moody(inputs: Mapping[str, Array]) -> dict[str, Array]:
        outputs = gate(inputs)
        if (inputs["x"] < 0).any():
            raise KeyError("negative")
        return outputs

    with Client.in_memory({"moody": declared(moody)}) as client:
        client.submit("moody", row(0.0))
        gate.await_forward()
        jobs = client.submit_many("moody", [row(1.0), row(-1.0), row(2.0)])
        gate.opened.set()
        with pytest.raises(ModelError, match="KeyError: 'negative'"):
            jobs[1].result(PATIENCE_S)
        assert [float(job.result(PATIENCE_S)["y"][0, 0]) for job in (jobs[0], jobs[2])] == [2.0, 4.0]


def test_an_output_that_is_not_finite_fails_its_job():
    """With a declaration and without one; the other jobs of the batch are answered."""
    gate = Gate()

    def infinite(inputs: Mapping[str, Array]) -> dict[str, Array]:
        outputs = gate(inputs)
        return {"y": np.where(inputs["x"] < 0, np.float32("nan"), outputs["y"])}

    for model in (declared(infinite), infinite):
        with Client.in_memory({"m": model}) as client:
            client.submit("m", row(0.0))
            gate.await_forward()
            jobs = client.submit_many("m", [row(1.0), row(-1.0)])
            gate.opened.set()
            with pytest.raises(NonFiniteOutput, match=r"Output y contains NaN or infinity\. Expected finite numbers"):
                jobs[1].result(PATIENCE_S)
            assert jobs[0].result(PATIENCE_S)["y"][0, 0] == 2.0


def test_an_output_other_than_declared_fails_the_job():
    """With the text of a worker process."""
    with Client.in_memory({"wide": declared(lambda inputs: {"y": inputs["x"].astype("float64")})}) as client:
        job = client.submit("wide", row())
        with pytest.raises(ModelError, match=r"Output y is float64 \(1, 4\). Declared is float32 \(batch, 4\)"):
            job.result(PATIENCE_S)


def test_a_failure_of_pytest_inside_a_model_fails_the_job():
    """pytest.fail raises no Exception: it must not end the worker's thread."""

    def strict(inputs: Mapping[str, Array]) -> dict[str, Array]:
        if inputs["x"][0, 0] < 0:
            pytest.fail("negative")
        return double(inputs)

    def stream(inputs: Mapping[str, Array], ctx: Any) -> Iterator[Any]:
        yield {"y": inputs["x"]}
        pytest.fail("in a stream")

    with Client.in_memory({"strict": strict, "stream": stream}) as client:
        with pytest.raises(ModelError, match="Failed: negative"):
            client.submit("strict", row(-1.0)).result(PATIENCE_S)
        with pytest.raises(ModelError, match="Failed: in a stream"):
            client.submit("stream", row()).result(PATIENCE_S)
        assert client.submit("strict", row()).result(PATIENCE_S)["y"][0, 0] == 2.0


def counting(inputs: Mapping[str, Array], ctx: Any) -> Generator[dict[str, Array], None, dict[str, Array]]:
    """Yields 0 to n - 1 with progress, then returns n."""
    count = int(inputs["n"][0])
    for number in range(count):
        ctx.progress(number / count)
        yield {"i": np.array([number])}
    return {"total": np.array([count])}


def test_a_generator_function_streams():
    """Chunks and progress in order, then the end with the outputs."""
    with Client.in_memory({"counting": counting}) as client:
        job = client.submit("counting", {"n": [3]})
        events = [(event.type, event.data) for event in job.stream()]
        assert [kind for kind, _ in events] == ["queued", "started", *["progress", "chunk"] * 3, "completed"]
        assert [int(data["i"][0]) for kind, data in events if kind == "chunk"] == [0, 1, 2]
        assert job.result(PATIENCE_S)["total"].tolist() == [3]


def test_a_running_stream_hears_of_its_cancellation():
    """Also when the client closes while it runs."""
    running = threading.Semaphore(0)
    ended = threading.Semaphore(0)

    def endless(inputs: Mapping[str, Array], ctx: Any) -> Iterator[Any]:
        running.release()
        while not ctx.is_cancelled:
            yield {"y": inputs["x"]}
            let_pass(0.002)
        ended.release()

    patient = Settings.load(overrides={"queue.drain_grace_s": 3600})
    with Client.in_memory({"endless": endless}, settings=patient) as client:
        job = client.submit("endless", row())
        assert running.acquire(timeout=PATIENCE_S)
        job.cancel()
        with pytest.raises(Cancelled):
            job.result(PATIENCE_S)
        assert ended.acquire(timeout=PATIENCE_S)
        client.submit("endless", row(2.0))
        assert running.acquire(timeout=PATIENCE_S)
    assert ended.acquire(timeout=0)


def test_one_idempotency_key_is_one_job():
    """The second submit gives the first job; other inputs are a conflict."""
    with Client.in_memory({"double": declared()}) as client:
        first = client.submit("double", row(), idempotency_key="once")
        assert client.submit("double", row(), idempotency_key="once").id == first.id
        with pytest.raises(IdempotencyConflict):
            client.submit("double", row(2.0), idempotency_key="once")


def test_equal_jobs_of_a_declared_model_share_an_answer():
    """As in production, unless the declaration says that the model is not deterministic; a plain function shares
    nothing."""
    gate = Gate()
    gate.opened.set()
    models: dict[str, Served] = {"same": declared(gate), "each": declared(gate, deterministic=False), "plain": gate}
    with Client.in_memory(models) as client:
        for name, forwards in (("same", 1), ("each", 3), ("plain", 3)):
            gate.forwards.clear()
            for _ in range(3):
                assert client.submit(name, row()).result(PATIENCE_S)["y"][0, 0] == 2.0
            assert len(gate.forwards) == forwards, name


def test_bad_inputs_are_refused_as_by_a_real_broker(shared_redis: RedisServer, models_root: Path):
    """The same class and the same text for the same package, whichever broker the client has."""
    write_double(models_root)
    bad: list[dict[str, Any]] = [
        {},
        {"x": [[1.0, 2.0]]},
        {"x": np.zeros((1, 4), complex)},
        {"x": [["a"] * 4]},
        {"x": [[float("nan")] * 4]},
        {**row(), "z": 1},
    ]

    def refusals(client: Client) -> list[tuple[type, str]]:
        found = []
        for inputs in bad:
            with pytest.raises(PenstockError) as refused:
                client.submit("double", inputs)
            found.append((refused.type, str(refused.value)))
        return found

    with Client(shared_redis.url, models_root=models_root) as real:
        expected = refusals(real)
    assert {kind for kind, _ in expected} == {InvalidInput}
    with Client.in_memory({"double": models_root / "double"}) as client:
        assert refusals(client) == expected
    with Client.in_memory({"double": declared()}) as client:
        assert refusals(client) == expected


def test_a_package_is_served_by_its_folder(models_root: Path):
    """The folder of a model gives its highest version and, by name, each other one; that of a version only itself."""
    for version, factor in (("1", 1), ("2", 10)):
        source = f"def build():\n    return lambda inputs: {{'y': inputs['x'] * {factor}}}\n"
        write_package(models_root, "scaled", source, version=version)
    with Client.in_memory({"scaled": str(models_root / "scaled")}) as client:
        assert client.submit("scaled", row()).result(PATIENCE_S)["y"][0, 0] == 10.0
        assert client.submit("scaled", row(), version="1").result(PATIENCE_S)["y"][0, 0] == 1.0
    with Client.in_memory({"scaled": models_root / "scaled" / "1"}) as client:
        assert client.submit("scaled", row()).result(PATIENCE_S)["y"][0, 0] == 1.0
        with pytest.raises(UnknownModel, match=r"Unknown model 'scaled/2'\. Expected one of: scaled"):
            client.submit("scaled", row(), version="2")


def test_a_package_that_raises_gives_its_error(models_root: Path):
    """A package's failure is that of production, too."""
    write_raiser(models_root)
    with Client.in_memory({"raiser": models_root / "raiser"}) as client:
        job = client.submit("raiser", row(-1.0))
        with pytest.raises(ModelError, match="ValueError: a negative row"):
            job.result(PATIENCE_S)


def test_an_unknown_model_is_refused(models_root: Path):
    """Also one that has a package on disk: nothing would ever answer its jobs."""
    write_double(models_root, "other")
    settings = Settings.load(overrides={"repo_root": models_root})
    with Client.in_memory({"a": double, "b": double}, settings=settings) as client:
        for name in ("other", "nowhere"):
            with pytest.raises(UnknownModel, match=f"Unknown model '{name}'. Expected one of: a, b"):
                client.submit(name, row())


@pytest.mark.parametrize("kind", ["no name", "another name", "no package", "a broken package", "a declaration", "none"])
def test_what_cannot_be_served_is_refused_at_once(models_root: Path, kind: str):
    """With the model's name and what was expected; no thread is left."""
    write_package(models_root, "broken", "def build():\n    raise OSError('no weights')\n")
    cases: dict[str, tuple[dict[str, Served], str]] = {
        "no name": ({"No Name": double}, "Bad model name"),
        "another name": ({"mine": models_root / "broken" / "1"}, "mine: found the folder of 'broken'"),
        "no package": ({"absent": models_root / "absent"}, "absent"),
        "a broken package": ({"good": double, "broken": models_root / "broken"}, "OSError: no weights"),
        "a declaration": ({"m": Model(double, inputs=[{**X, "dtype": "float"}], outputs=[Y])}, "m: .*dtype"),
        "none": ({}, "There is no model to serve"),
    }
    models, text = cases[kind]
    before = set(threading.enumerate())
    with pytest.raises(ConfigurationError, match=text):
        Client.in_memory(models)
    assert set(threading.enumerate()) <= before


def test_close_ends_every_thread():
    """A job that waits ends with the client; a second close does nothing; a later call is refused."""
    before = set(threading.enumerate())
    gate = Gate()
    client = Client.in_memory({"gate": declared(gate, concurrency=3), "double": double})
    client.submit("gate", row())
    gate.await_forward()
    waiting = client.submit("gate", row(2.0))
    assert {thread.name for thread in set(threading.enumerate()) - before} >= {"drain", "leases", "model", "prepare"}
    gate.opened.set()
    client.close()
    assert set(threading.enumerate()) <= before
    client.close()
    with pytest.raises(PenstockError, match="This client was closed"):
        client.submit("double", row())
    assert waiting.id


def test_a_client_that_is_dropped_leaves_no_thread():
    """The threads of a client without `close` end soon after it."""
    before = set(threading.enumerate())
    client = Client.in_memory({"double": double})
    client.submit("double", row()).result(PATIENCE_S)
    del client
    gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= before, PATIENCE_S, "the threads end")


def test_a_hung_forward_is_told():
    """A worker process would be killed; no call can end the thread here, so the client says what happened."""
    gate = Gate()
    with held(gate, timeout_s=0.05) as client:
        job = client.submit("gate", row(2.0))
        with pytest.raises(BrokerUnavailable, match=r"a forward of gate took longer than its limit of 0\.05 s"):
            job.result(PATIENCE_S)


def test_a_model_may_use_another_one():
    """A function may submit and wait, where a second forward may run beside it."""
    with Client.in_memory({"double": declared(concurrency=2)}) as inner:

        def twice(inputs: Mapping[str, Array]) -> dict[str, Array]:
            return inner.submit("double", {"x": inner.submit("double", inputs).result(PATIENCE_S)["y"]}).result()

        with Client.in_memory({"twice": declared(twice)}) as client:
            assert client.submit("twice", row(3.0)).result(PATIENCE_S)["y"][0, 0] == 12.0


def test_a_forked_child_is_told_where_the_worker_is():
    """The parent goes on; the child gets an error and can make a client of its own."""
    with Client.in_memory({"double": double}) as client:
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of each fork beside threads; this is what is shown here.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            try:
                client.submit("double", row())
            except BrokerUnavailable as error:
                with Client.in_memory({"double": double}) as own:
                    answer = own.submit("double", row()).result(PATIENCE_S)["y"][0, 0]
                os.write(writing, f"{error} {answer}".encode())
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            told = pipe.read().decode()
        assert os.waitpid(child, 0)[1] == 0
        assert told == "The worker in memory is in the parent process. Expected a client that the child makes 2.0"
        assert client.submit("double", row(4.0)).result(PATIENCE_S)["y"][0, 0] == 8.0


def _forking_batch(fork: Callable[[], None]) -> Any:
    def batch(inputs: Mapping[str, Array]) -> dict[str, Array]:
        fork()
        return double(inputs)

    return batch


def _forking_step(fork: Callable[[], None]) -> Any:
    def stream(inputs: Mapping[str, Array], ctx: Any) -> Generator[Any, None, Any]:
        fork()
        yield double(inputs)
        return double(inputs)

    return stream


def _forking_at_a_refusal(fork: Callable[[], None]) -> Any:
    def stream(inputs: Mapping[str, Array], ctx: Any) -> Generator[Any, None, Any]:
        try:
            yield {"y": np.full((1, 4), np.nan, np.float32)}
        except NonFiniteOutput:
            fork()
        return double(inputs)

    return stream


def _forking_at_its_end(fork: Callable[[], None]) -> Any:
    def stream(inputs: Mapping[str, Array], ctx: Any) -> Generator[Any, None, Any]:
        try:
            while True:
                yield double(inputs)
        finally:
            fork()

    return stream


@pytest.mark.parametrize(
    "model_of",
    [_forking_batch, _forking_step, _forking_at_a_refusal, _forking_at_its_end],
    ids=lambda each: each.__name__,
)
def test_a_fork_that_comes_back_from_a_model_ends(model_of: Callable[[Callable[[], None]], Any]):
    """It would wait for ever, with a copy of the program, for jobs that no other thread brings."""
    forks: list[int] = []

    def fork() -> None:
        if pid := os.fork():
            forks.append(pid)

    with warnings.catch_warnings():
        # As above.
        warnings.simplefilter("ignore", DeprecationWarning)
        with Client.in_memory({"forks": declared(model_of(fork)), "double": double}) as client:
            job = client.submit("forks", row())
            if model_of is _forking_at_its_end:
                next(event for event in job.stream() if event.type == "chunk")
                job.cancel()
            with suppress(JobFailed):
                job.result(PATIENCE_S)
            assert client.submit("double", row(4.0)).result(PATIENCE_S)["y"][0, 0] == 8.0
    (pid,) = forks
    try:
        status = wait_until(lambda: _status_of(pid), PATIENCE_S, "the fork ends")
        assert status is not None
        assert os.waitstatus_to_exitcode(status) == 1
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise


def _status_of(pid: int) -> int | None:
    """The status of a child that has ended without success; None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return status if found else None


def test_settings_and_signatures_are_those_of_the_program():
    """The tenant, the signing key and the limits come from the settings, as for a client of Redis."""
    key = "test:MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
    settings = Settings.load(overrides={"signing_keys": key, "tenant_id": "acme"})
    with Client.in_memory({"double": declared()}, settings=settings) as client:
        job = client.submit("double", row())
        assert job.tenant == "acme"
        assert job.result(PATIENCE_S)["y"][0, 0] == 2.0
    with Client.in_memory({"double": declared()}, tenant="other") as client:
        assert client.submit("double", row()).tenant == "other"
