"""A retry policy that no worker could follow cannot be made, and nothing else is taken for one by either client."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from penstock import AsyncClient, Client, Retry
from penstock.registry.broker.base import Claim
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import JobHeader, Keyring, Options, open_job, seal
from penstock.registry.errors import InvalidInput, UndecodableEnvelope
from penstock.registry.package import ModelSpec
from tests.servers import RedisServer

X = np.ones((1, 4), np.float32)
_ATTEMPTS = "Expected a whole number from 1 to 100"
_PAUSES = "Expected plain numbers, backoff_s <= longest_s, both from 0 to 3600"
_REFUSED: list[tuple[Any, str]] = [
    (3, "retry is a int. Expected a Retry(attempts, backoff_s, longest_s)"),
    ({"attempts": 3}, "retry is a dict. Expected a Retry(attempts, backoff_s, longest_s)"),
]
_UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"attempts": 0}, f"retry.attempts is 0. {_ATTEMPTS}"),
    ({"attempts": 101}, f"retry.attempts is 101. {_ATTEMPTS}"),
    ({"attempts": 2.5}, f"retry.attempts is 2.5. {_ATTEMPTS}"),
    ({"attempts": 3.0}, f"retry.attempts is 3.0. {_ATTEMPTS}"),
    ({"attempts": True}, f"retry.attempts is True. {_ATTEMPTS}"),
    ({"attempts": "3"}, f"retry.attempts is '3'. {_ATTEMPTS}"),
    ({"attempts": 10**400}, f"retry.attempts is 1{'0' * 39}. {_ATTEMPTS}"),
    ({"backoff_s": -1}, f"retry pauses are -1 to 30.0 s. {_PAUSES}"),
    ({"backoff_s": 31}, f"retry pauses are 31 to 30.0 s. {_PAUSES}"),
    ({"longest_s": 3601}, f"retry pauses are 0.5 to 3601 s. {_PAUSES}"),
    ({"longest_s": math.inf}, f"retry pauses are 0.5 to inf s. {_PAUSES}"),
    ({"backoff_s": math.nan}, f"retry pauses are nan to 30.0 s. {_PAUSES}"),
    ({"backoff_s": True}, f"retry pauses are True to 30.0 s. {_PAUSES}"),
    ({"backoff_s": "1"}, f"retry pauses are '1' to 30.0 s. {_PAUSES}"),
    ({"backoff_s": np.float64(1)}, "Expected plain numbers"),
    ({"longest_s": 10**400}, f"retry pauses are 0.5 to 1{'0' * 39} s. {_PAUSES}"),
]


@pytest.mark.parametrize(("numbers", "text"), _UNUSABLE, ids=[str(case)[:40] for case, _ in _UNUSABLE])
def test_a_policy_that_no_worker_could_follow_cannot_be_made(numbers: dict[str, Any], text: str):
    """The text says what was given and what is expected, where it was given."""
    with pytest.raises(InvalidInput) as refused:
        Retry(**numbers)
    assert text in str(refused.value)


def test_a_forged_policy_is_no_job():
    """A header whose policy could not be made is undecodable, also under a good signature."""
    header = JobHeader("double.1", "default", "double", "normal", (), options=Options(retry=Retry(attempts=7)))
    sealed = seal("job", header, b"", Keyring.parse(None))
    assert sealed.count(b"\xa8attempts\x07") == 1
    with pytest.raises(UndecodableEnvelope, match="its header is not the header of a job"):
        open_job(sealed.replace(b"\xa8attempts\x07", b"\xa8attempts\x00"), Keyring.parse(None))


async def _submit(url: str, model: str, retry: Any) -> str:
    async with AsyncClient(url) as client:
        return (await client.submit(model, {"x": X}, retry=retry)).id


@pytest.mark.parametrize(("retry", "text"), _REFUSED, ids=[str(case)[:40] for case, _ in _REFUSED])
def test_what_is_no_retry_policy_is_refused(
    retry: Any, text: str, client: Client, shared_redis: RedisServer, parked: str, broker: RedisStreams
):
    """The text says what was given and what is expected; nothing is in the queue."""
    with pytest.raises(InvalidInput) as refused:
        client.submit(parked, {"x": X}, retry=retry)
    assert text in str(refused.value)
    with pytest.raises(InvalidInput) as refused_too:
        asyncio.run(_submit(shared_redis.url, parked, retry))
    assert str(refused_too.value) == str(refused.value)
    assert sum(depth.jobs for depth in broker.depths(parked)) == 0


@pytest.mark.parametrize("retry", [Retry(), Retry(attempts=1, backoff_s=0, longest_s=0), Retry(100, 3600, 3600)])
def test_a_good_retry_policy_reaches_the_worker(
    retry: Retry, client: Client, shared_redis: RedisServer, parked: str, broker: RedisStreams
):
    """What was accepted can be read where it is followed."""
    client.submit(parked, {"x": X}, retry=retry)
    asyncio.run(_submit(shared_redis.url, parked, retry))
    broker.prepare([parked])
    _, found = broker.exchange("test", [], [Claim(parked, 10, 0, 1000)], 1000)
    headers = [open_job(delivery.sealed, Keyring.parse(None))[0] for delivery in found]
    assert [header.options.retry for header in headers] == [retry, retry]


def test_jobs_that_stream_are_not_retried(client: Client, shared_redis: RedisServer, slot: str, broker: RedisStreams):
    """Subscribers keep the events that they have read: a retry policy is refused, and the text says why."""
    spec = ModelSpec.model_validate(
        {
            "name": slot,
            "version": "1",
            "format": "python",
            "entrypoint": "model:build",
            "streams": True,
            "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}],
            "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 4]}],
        }
    )
    broker.put_spec(slot, spec.to_json())
    with pytest.raises(InvalidInput) as refused:
        client.submit(slot, {"x": X}, retry=Retry())
    assert str(refused.value) == f"{slot} streams, and a retry cannot take back its events. Expected no retry"
