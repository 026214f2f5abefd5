"""Every refusal of a client: its class, its whole text, and that nothing was written. IN-031, IN-034, CX-017."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from penstock import AsyncClient, Client
from penstock.registry.errors import ConfigurationError, DeadlineExceeded, InvalidInput, Rejected, UnknownModel
from tests.servers import RedisServer

X = np.ones((2, 4), np.float32)
MIB = 1024 * 1024
_NAME_RULE = "Expected 1 to 64 characters of a-z, 0-9, '.', '_' or '-', starting with a letter or digit"
_INPUTS: list[tuple[str, object, str]] = [
    ("missing", {}, "Missing required input(s): x. Expected inputs: label, x"),
    ("unexpected", {"x": X, "w": X}, "Unexpected input(s): w. Expected inputs: label, x"),
    (
        "misspelt",
        {"X": X},
        "Missing required input(s): x. Unexpected input(s): X. Expected inputs: label, x",
    ),
    ("truth values", {"x": X.astype(bool)}, 'x: dtype bool. Expected float32: x.astype("float32")'),
    ("objects", {"x": X.astype(object)}, 'x: dtype object. Expected float32: x.astype("float32")'),
    ("complex", {"x": X.astype(complex)}, "x: dtype complex128. Expected float32"),
    (
        "overflow",
        {"x": X.astype(np.float64) * 1e39},
        "x: dtype float64, and a value does not fit. Expected numbers that float32 can hold",
    ),
    (
        "rounded integers",
        {"x": X.astype(np.int64) * (2**24 + 1)},
        "x: dtype int64, and a value does not fit. Expected numbers that float32 can hold, "
        'or x.astype("float32") to round them',
    ),
    (
        "fractions",
        {"x": X, "label": np.array([1, 1.5])},
        "label: dtype float64, and a value does not fit. Expected numbers that int64 can hold",
    ),
    (
        "converted and wrong",
        {"x": X[:, :3].astype(np.float64)},
        "x: shape (2, 3). Expected (batch, 4), every extent at least 1",
    ),
    ("extent", {"x": X[:, :3]}, "x: shape (2, 3). Expected (batch, 4), every extent at least 1"),
    ("rank", {"x": X[0]}, "x: shape (4,). Expected (batch, 4)"),
    ("empty", {"x": X[:0]}, "x: shape (0, 4). Expected (batch, 4), every extent at least 1"),
    ("nan", {"x": X * math.nan}, "x: contains NaN or infinity. Expected finite numbers"),
    ("infinity", {"x": X * math.inf}, "x: contains NaN or infinity. Expected finite numbers"),
    ("text", {"x": [["a"] * 4]}, "x: contains str. Expected float32"),
    ("ragged", {"x": [[1, 2], [3]]}, "x: nested lists of unequal lengths. Expected (batch, 4)"),
    (
        "range",
        {"x": X, "label": [1, 10]},
        "label: a value is above the range. Expected values of at least 0 and at most 9",
    ),
    (
        "rows",
        {"x": X, "label": [1, 2, 3]},
        "label: batch is 3, but 2 in another input. Expected the same batch wherever the signature names it",
    ),
    ("no mapping", [X], "Inputs are a list. Expected a mapping from input name to value"),
]
_ARGUMENTS: list[tuple[dict[str, Any], type[Rejected], str]] = [
    ({"deadline_s": 0}, DeadlineExceeded, "deadline_s is 0. Expected a positive number of seconds from now"),
    ({"deadline_s": -3}, DeadlineExceeded, "deadline_s is -3. Expected a positive number of seconds from now"),
    ({"deadline_s": math.nan}, DeadlineExceeded, "deadline_s is nan. Expected a positive number of seconds from now"),
    ({"deadline_s": "soon"}, InvalidInput, "deadline_s is a str. Expected seconds from now"),
    ({"deadline_s": math.inf}, InvalidInput, "deadline_s is inf. Expected at most 31622400"),
    ({"priority": "urgent"}, InvalidInput, "Unknown priority 'urgent'. Expected one of: critical, high, normal, low"),
    ({"priority": 0}, InvalidInput, "Unknown priority 0. Expected one of: critical, high, normal, low"),
    ({"tenant": "Bad Tenant"}, InvalidInput, f"Bad tenant name 'Bad Tenant'. {_NAME_RULE}"),
    ({"outputs": ["q"]}, InvalidInput, "Unknown output(s): q. Declared outputs: y, z"),
    ({"idempotency_key": ""}, InvalidInput, "Bad idempotency key. Expected a string of 1 to 255 characters"),
    (
        {"webhook": "http://example.com/hook"},
        InvalidInput,
        "The URL of the webhook is not encrypted. Expected https://host/path, or http:// for a loopback host",
    ),
    (
        {"webhook": "https://me:secret@example.com/"},
        InvalidInput,
        "The URL of the webhook has a user or a password. Expected https://host/path, or http:// for a loopback host",
    ),
    (
        {"webhook": b"https://example.com/"},
        InvalidInput,
        "webhook is of type bytes. Expected https://host/path, or http:// for a loopback host",
    ),
]


@pytest.fixture
def written(shared_redis: RedisServer, parked: str):
    """The names of all keys of the parked model; called again, what there is then."""

    def keys() -> set[bytes]:
        with shared_redis.client() as client:
            return set(client.scan_iter(f"*{parked}*", count=10_000))

    return keys


@pytest.mark.parametrize(("inputs", "text"), [case[1:] for case in _INPUTS], ids=[case[0] for case in _INPUTS])
def test_inputs_that_do_not_fit_are_refused(inputs, text, client: Client, parked: str, written):
    """The text names the input, what was found and what is expected; no key appears in the broker."""
    before = written()
    with pytest.raises(InvalidInput) as refused:
        client.submit(parked, inputs)
    assert str(refused.value) == text
    assert written() == before


@pytest.mark.parametrize(("arguments", "error", "text"), _ARGUMENTS, ids=[str(case[0]) for case in _ARGUMENTS])
def test_arguments_that_do_not_fit_are_refused(arguments, error, text, client: Client, parked: str, written):
    """A deadline that has passed, an unknown priority or output, a bad name: refused before anything is written."""
    before = written()
    with pytest.raises(error) as refused:
        client.submit(parked, {"x": X}, **arguments)
    assert str(refused.value) == text
    assert written() == before


@pytest.mark.parametrize("traceparent", ["x" * 70_000, 3], ids=["long", "number"])
def test_traceparent_that_no_worker_could_read_is_refused(traceparent, client: Client, parked: str):
    """A header that a worker cannot decode would be accepted and never end."""
    with pytest.raises(InvalidInput, match="Bad traceparent"):
        client.submit(parked, {"x": X}, traceparent=traceparent)


@pytest.mark.parametrize("model", ["No/Such", "../secret", "", "a" * 65, None])
def test_bad_model_name_is_refused_without_asking_the_broker(model, redis_server: RedisServer):
    """A name that no model can have never becomes part of a key."""
    redis_server.kill()
    with Client(redis_server.url, timeout_s=0.2) as client, pytest.raises(InvalidInput) as refused:
        client.submit(model, {"x": X})
    assert str(refused.value) == f"Bad model name {model!r:.80}. {_NAME_RULE}"


def test_unknown_model_is_refused(client: Client, slot: str, parked: str):
    """Neither a spec in the broker nor a package under the models root; nor the version that was asked for."""
    with pytest.raises(UnknownModel) as refused:
        client.submit(slot[:-1] + "z", {"x": X})
    assert str(refused.value) == (
        f"Unknown model '{slot[:-1]}z'. Expected one that a worker serves or that `penstock models register` "
        "has announced"
    )
    with pytest.raises(UnknownModel, match="Expected version: 1"):
        client.submit(parked, {"x": X}, version="9")


def test_one_bad_item_refuses_all_of_submit_many(client: Client, parked: str, written):
    """All items are checked before the first is written."""
    before = written()
    with pytest.raises(InvalidInput):
        client.submit_many(parked, [{"x": X}, {"x": X}, {"x": X[:, :3]}])
    assert written() == before


async def _submit_asynchronously(url: str, model: str, inputs: dict[str, Any], arguments: dict[str, Any]) -> None:
    async with AsyncClient(url) as client:
        await client.submit(model, inputs, **arguments)


def test_asyncio_client_refuses_the_same(shared_redis: RedisServer, parked: str, written):
    """Both clients share the checks."""
    before = written()
    for arguments, error, text in _ARGUMENTS:
        with pytest.raises(error) as refused:
            asyncio.run(_submit_asynchronously(shared_redis.url, parked, {"x": X}, arguments))
        assert str(refused.value) == text
    assert written() == before


def test_size_cap_is_exact(client: Client, parked: str, written):
    """10 MiB of inputs pass; one element more is refused, and nothing is enqueued."""
    rows = 10 * MIB // 16
    client.submit(parked, {"x": np.zeros((rows, 4), np.float32)}).cancel()
    before = written()
    with pytest.raises(InvalidInput) as refused:
        client.submit(parked, {"x": np.zeros((rows + 1, 4), np.float32)})
    assert str(refused.value) == "The inputs take 10485776 bytes. Expected at most 10485760"
    assert written() == before


@pytest.mark.parametrize("job_id", ["x", "parked.", "parked.x y", "../x.y", "parked.{y}", None])
def test_bad_job_id_is_refused(job_id, client: Client):
    """What is no job id never becomes part of a key."""
    with pytest.raises(InvalidInput) as refused:
        client.job(job_id)
    assert str(refused.value) == f"Bad job id {job_id!r:.80}. Expected <model>.<uuid>"


def test_url_of_another_kind_is_refused():
    """The error names the schemes, not the URL, which may hold a password."""
    with pytest.raises(ConfigurationError) as refused:
        Client("http://user:secret@localhost")
    assert "Expected redis://" in str(refused.value)
    assert "secret" not in str(refused.value)
