"""submit, submit_many and map of both clients accept the same options, and each option has its effect."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from penstock import AsyncClient, Cancelled, Client, EventType, JobStatus, PriorityName, Retry
from penstock.producers.job_state import END_NAMES
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import JobHeader, Keyring, open_job
from penstock.registry.errors import IdempotencyConflict, InvalidInput
from penstock.registry.queues import Priority, stream_key
from tests.producers.answers import claim, end
from tests.servers import RedisServer, require_module, wait_until

X = np.ones((1, 4), np.float32)
KINDS = ("blocking", "asyncio")
CALLS = ("submit", "submit_many", "map")
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
_OPTIONS: dict[str, tuple[Any, Callable[[JobHeader], Any], Any]] = {
    "priority": ("high", lambda header: header.priority, "high"),
    "deadline_s": (30, lambda header: header.deadline_ms, 30_000),
    "tenant": ("acme", lambda header: header.tenant, "acme"),
    "version": ("1", lambda header: header.version, "1"),
    "outputs": (["z"], lambda header: header.options.outputs, ("z",)),
    "traceparent": (TRACE, lambda header: header.traceparent, TRACE),
    "retry": (Retry(2), lambda header: header.options.retry, Retry(2)),
    "webhook": ("https://example.com/x", lambda header: header.options.webhook, "https://example.com/x"),
    "endpoint": ("bulk", lambda header: header.options.endpoint, "bulk"),
    "sticky_key": ("user 7", lambda header: header.options.sticky_key, "user 7"),
}
"""Option -> its value, how a job's header shows it, and as what."""


def _run(kind: str, url: str, act: Callable[[Any], Any]) -> Any:
    """`act` with a client of either kind; its answer is awaited where the client is asyncio's."""
    if kind == "blocking":
        with Client(url) as client:
            return act(client)

    async def await_it() -> Any:
        async with AsyncClient(url) as client:
            found: Awaitable[Any] = act(client)
            return await found

    return asyncio.run(await_it())


def _headers(server: RedisServer, model: str) -> list[JobHeader]:
    with server.client() as client:
        entries = [fields[b"e"] for band in Priority for _, fields in client.xrange(stream_key(model, band))]
    return [open_job(sealed, Keyring.parse(None))[0] for sealed in entries]


@contextmanager
def _mapping(kind: str, server: RedisServer, model: str, count: int, **options: Any) -> Iterator[list[JobHeader]]:
    """A map of two items under way without a worker; afterwards its first job is cancelled, which ends it."""
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(_run, kind, server.url, lambda client: client.map(model, [{"x": X}] * 2, **options))
        wait_until(lambda: len(_headers(server, model)) == count, 5, "all items wait")
        headers = _headers(server, model)
        try:
            yield headers
        finally:
            with Client(server.url) as other:
                assert other.job(headers[0].id, tenant=headers[0].tenant).cancel() == "cancelled"
            with pytest.raises(Cancelled):
                ended.result(180)


def test_the_three_calls_accept_the_same_options():
    """Signatures are spelt out, and only keys, waiting and the results of `map` differ."""
    names = {call: set(inspect.signature(getattr(Client, call)).parameters) for call in CALLS}
    shared = {"self", "model", *_OPTIONS}
    # `generate` is the `map` of texts.
    assert names["submit"] == shared | {"inputs", "idempotency_key", "options"}
    assert names["submit_many"] == shared | {"batches", "idempotency_keys", "options", "timeout_s"}
    assert names["map"] == shared | {"items", "idempotency_keys", "progress", "on_error", "window"}


@pytest.mark.parametrize("call", CALLS)
def test_both_clients_have_one_signature_and_one_text(call: str):
    """The calls stand once, for both clients, and help shows their arguments and text."""
    blocking, awaited = getattr(Client, call), getattr(AsyncClient, call)
    assert inspect.signature(blocking) == inspect.signature(awaited)
    assert "In AsyncClient, await it" in (inspect.getdoc(awaited) or "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_every_option_reaches_the_job(call: str, kind: str, shared_redis: RedisServer, parked: str):
    """All options at once, read back from the queue itself."""
    options = {name: value for name, (value, _, _) in _OPTIONS.items()}
    if call == "map":
        with _mapping(kind, shared_redis, parked, 2, **options) as headers:
            found = headers
    elif call == "submit":
        _run(kind, shared_redis.url, lambda client: client.submit(parked, {"x": X}, **options))
        found = _headers(shared_redis, parked)
    else:
        _run(kind, shared_redis.url, lambda client: client.submit_many(parked, [{"x": X}] * 2, **options))
        found = _headers(shared_redis, parked)
    assert len(found) == (1 if call == "submit" else 2)
    for header in found:
        assert {name: read(header) for name, (_, read, _) in _OPTIONS.items()} == {
            name: expected for name, (_, _, expected) in _OPTIONS.items()
        }


@pytest.mark.parametrize("kind", KINDS)
def test_each_item_of_submit_many_has_its_key(kind: str, shared_redis: RedisServer, parked: str, broker: RedisStreams):
    """Equal items under one key are one job, also across calls. None leaves an item without a key."""

    def submit(client: Any) -> Any:
        return client.submit_many(parked, [{"x": X}] * 4, idempotency_keys=["a", "b", "a", None])

    first, again = (_run(kind, shared_redis.url, submit) for _ in range(2))
    ids = [job.id for job in first]
    assert ids[0] == ids[2]
    assert len(set(ids)) == 3
    assert [job.id for job in again][:3] == ids[:3]
    assert again[3].id != ids[3]
    assert sum(depth.jobs for depth in broker.depths(parked)) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_conflict_in_submit_many_names_its_item(kind: str, shared_redis: RedisServer, parked: str):
    """The other items are accepted: the error carries their handles."""
    items = [{"x": X}, {"x": X * 2}, {"x": X}]
    with pytest.raises(IdempotencyConflict, match=r"^Item 1: The idempotency key belongs to") as conflict:
        _run(
            kind,
            shared_redis.url,
            lambda client: client.submit_many(parked, items, idempotency_keys=["a", "a", "b"]),
        )
    accepted = [header.id for header in _headers(shared_redis, parked)]
    assert [job.id for job in conflict.value.accepted] == accepted  # type: ignore[attr-defined]
    assert len(accepted) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_conflict_in_map_leaves_no_job_behind(
    kind: str, shared_redis: RedisServer, parked: str, broker: RedisStreams
):
    """The jobs that were accepted with it are cancelled, as those of any map that fails."""
    with pytest.raises(IdempotencyConflict, match=r"^Item 1: The idempotency key belongs to"):
        _run(
            kind,
            shared_redis.url,
            lambda client: client.map(parked, [X[0], X[0] * 2, X[0]], idempotency_keys=["a", "a", "b"]),
        )
    ids = [header.id for header in _headers(shared_redis, parked)]
    assert sum(depth.jobs for depth in broker.depths(parked)) == 0, ids


@pytest.mark.parametrize("kind", KINDS)
def test_map_gives_each_item_its_key(kind: str, shared_redis: RedisServer, parked: str):
    """Two equal items under one key are one job in the queue."""
    with _mapping(kind, shared_redis, parked, 1, idempotency_keys=["a", "a"]) as headers:
        assert len(headers) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_that_fails_leaves_earlier_jobs_of_its_keys(kind: str, shared_redis: RedisServer, parked: str):
    """The job of a known key belongs to its first submitter: the map does not cancel it with its own."""
    with Client(shared_redis.url) as client:
        earlier = client.submit(parked, {"x": X}, idempotency_key="known", priority="low")
        with _mapping(kind, shared_redis, parked, 2, idempotency_keys=["new", "known"]) as headers:
            assert headers[-1].id == earlier.id
        assert earlier.status() == "queued"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["submit_many", "map"])
def test_a_bad_item_is_named_by_its_index(call: str, kind: str, shared_redis: RedisServer, parked: str):
    """Also beyond the first chunk of a map."""
    items = [{"x": X}] * 6 + [{"x": X[:, :3]}]
    window = {"window": 8} if call == "map" else {}
    with pytest.raises(InvalidInput, match=r"^Item 6: x: shape \(1, 3\)"):
        _run(kind, shared_redis.url, lambda client: getattr(client, call)(parked, items, **window))
    assert _headers(shared_redis, parked) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["submit_many", "map"])
def test_too_few_keys_are_refused(call: str, kind: str, shared_redis: RedisServer, parked: str):
    """Nothing is in the queue afterwards."""
    with pytest.raises(InvalidInput, match="1 idempotency keys for 2 items"):
        _run(
            kind,
            shared_redis.url,
            lambda client: getattr(client, call)(parked, [{"x": X}] * 2, idempotency_keys=["a"]),
        )
    assert _headers(shared_redis, parked) == []


def test_the_literal_types_name_all_values():
    """A type checker knows the same priorities, statuses and event types as the broker."""
    assert get_args(PriorityName) == tuple(priority.label for priority in Priority)
    assert set(get_args(JobStatus)) == {"queued", "running", *END_NAMES.values()}
    assert set(get_args(EventType)) == {"queued", "started", "chunk", "progress", "reset", *END_NAMES.values()}


@pytest.mark.parametrize("kind", KINDS)
def test_map_returns_the_error_of_a_bad_item_in_its_place(
    kind: str, shared_redis: RedisServer, parked: str, broker: RedisStreams
):
    """Of the first and the last one, too, and beyond the first chunk. The other items are submitted and answered."""
    items: list[Any] = [X[0, :3], X[0], {"x": X}, "text", X[0], X[0], X[0], {"w": X}]

    with ThreadPoolExecutor(1) as pool:
        mapping = pool.submit(
            _run,
            kind,
            shared_redis.url,
            lambda client: client.map(parked, items, on_error="return", window=8),
        )
        wait_until(lambda: len(_headers(shared_redis, parked)) == 5, 60, "all good items wait")
        end(broker, *claim(broker, parked), value=2)
        results = mapping.result(180)
    errors = {index: str(each) for index, each in enumerate(results) if isinstance(each, InvalidInput)}
    assert list(errors) == [0, 3, 7]
    assert errors[0] == "Item 0: x: shape (1, 3). Expected (batch, 4), every extent at least 1"
    assert errors[7].startswith("Item 7: Missing required input(s): x. Unexpected input(s): w.")
    rows = [each["y"].shape for each in results if isinstance(each, dict)]
    assert rows == [(4,), (1, 4), (4,), (4,), (4,)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_of_bad_items_submits_nothing(kind: str, shared_redis: RedisServer, parked: str):
    """Every result is the error of its item."""
    results = _run(kind, shared_redis.url, lambda client: client.map(parked, ["text"] * 9, on_error="return", window=4))
    assert [str(each).partition(":")[0] for each in results] == [f"Item {index}" for index in range(9)]
    assert _headers(shared_redis, parked) == []


PROGRAM = """
from collections.abc import Mapping
from typing import Any

import numpy as np
from penstock import AsyncClient, CancelStatus, Client, EventType, JobHandle, JobStatus, PriorityName

X: list[Mapping[str, object]] = [{"x": [1.0]}]


def wrong(client: Client, job: JobHandle) -> None:
    client.submit("m", X[0], priority="hgih")
    client.submit_many("m", X, priority="urgent")
    client.map("m", ["a"], on_error="ignore")
    job.status() == "complete"
    job.info().status == "queued"
    job.cancel() == "canceled"
    next(job.stream()).type == "chunks"


def right(client: Client, job: JobHandle, priority: PriorityName) -> None:
    client.submit("m", X[0], priority=priority).status() == "completed"
    cancelled: CancelStatus = job.cancel()
    status: JobStatus = job.status()
    kind: EventType = next(job.stream(timeout=5)).type
    outputs: list[dict[str, np.ndarray[Any, Any]]] = client.map("m", X)
    gathered: list[dict[str, np.ndarray[Any, Any]]] = client.gather([job])
    reveal_type(client.map("m", X))
    reveal_type(client.map("m", ["a"]))
    reveal_type(client.gather([job], return_exceptions=True))
    np.stack(client.map("m", np.zeros((2, 4))))
    anything: list[Any] = []
    np.stack(client.map("m", anything))
    client.map("m", (each for each in X))[0]["y"].shape


async def right_too(client: AsyncClient) -> None:
    reveal_type(await client.map("m", X))
    reveal_type(await client.gather([await client.submit("m", X[0])]))
"""


@pytest.mark.slow  # mypy reads NumPy and the client anew
def test_a_type_checker_finds_misspelt_words_and_knows_the_results(tmp_path: Path):
    """priority="hgih" is an error before the program runs; a map of mappings gives a list of mappings."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    api = require_module("mypy.api")
    out, err, _ = api.run(["--strict", "--no-incremental", str(program)])
    found = [line.partition("program.py:")[2] for line in out.splitlines() if "program.py:" in line]
    wrong = [int(line.split(":")[0]) for line in found if " error: " in line]
    begin = PROGRAM.splitlines().index("def wrong(client: Client, job: JobHandle) -> None:") + 2
    assert wrong == [*range(begin, begin + 7)], out + err
    revealed = [line.partition("Revealed type is ")[2] for line in found if "Revealed type" in line]
    assert ["dict[" in each for each in revealed] == [True, False, True, True, True], revealed
