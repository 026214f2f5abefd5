"""What a Celery message says of a task beside its arguments, kept until the job has ended."""

from __future__ import annotations

import pytest
from celery.app.task import Context

from penstock.registry.envelope import Keyring
from penstock.registry.errors import BadSignature, BrokerUnavailable, UndecodableEnvelope
from penstock.registry.queues import task_request_key
from penstock.workers.celery_bridge.task_request import essence
from tests.servers import RedisServer
from tests.workers.celery_bridge.endpoint import UNSIGNED, task_requests

OLD, NEW = ("k1:" + "A" * 43 + "=", "k2:" + "B" * 43 + "=")
CANARY = "canary-payload"


@pytest.fixture
def job_id(slot: str) -> str:
    """The job of a Celery task."""
    return f"{slot}.task-1"


def test_a_kept_request_comes_back(shared_redis: RedisServer, job_id: str):
    """Until the task is settled; the first request of a job stays."""
    requests = task_requests(shared_redis)
    assert requests.find([job_id]) == [None]
    requests.keep(job_id, {"id": "task-1", "chain": [{"task": "after"}]})
    requests.keep(job_id, {"id": "task-1"})
    (kept,) = requests.find([job_id])
    assert kept is not None
    assert requests.opened(job_id, kept) == {"id": "task-1", "chain": [{"task": "after"}]}


def test_a_settled_request_does_not_come_back(shared_redis: RedisServer, job_id: str):
    """Celery may deliver the message again after the task has ended. The mark and the request both expire."""
    requests = task_requests(shared_redis)
    with shared_redis.client() as client:
        requests.keep(job_id, {"id": "task-1"})
        assert 0 < client.pttl(task_request_key(job_id)) <= 60_000
        requests.settled(job_id)
        assert 0 < client.pttl(task_request_key(job_id)) <= 60_000
    requests.keep(job_id, {"id": "task-1"})
    assert requests.find([job_id]) == [None]


def test_a_request_holds_no_arguments():
    """The inputs are in the job only; the rest of the message is what followers, chords and errbacks need."""
    request = Context(
        {"id": "t", "task": "penstock.infer", "args": [CANARY], "kwargs": {"inputs": CANARY}, "kwargsrepr": CANARY},
        callbacks=[{"task": "after"}],
        chain=None,
        group="g",
        group_index=0,
        ignore_result=False,
        delivery_info={"priority": 3},
    )
    assert essence(request) == {
        "id": "t",
        "task": "penstock.infer",
        "callbacks": [{"task": "after"}],
        "group": "g",
        "group_index": 0,
        "retries": 0,
        "ignore_result": False,
        "delivery_info": {"priority": 3},
        "replaced_task_nesting": 0,
    }


def test_a_request_is_signed_where_jobs_are(shared_redis: RedisServer, job_id: str, slot: str):
    """A request that was written without the key, for another job, or with other content is refused."""
    keyring = Keyring.parse(f"{NEW},{OLD}")
    task_requests(shared_redis, Keyring.parse(OLD)).keep(job_id, {"id": "task-1"})
    requests = task_requests(shared_redis, keyring)
    (kept,) = requests.find([job_id])
    assert kept is not None
    assert requests.opened(job_id, kept) == {"id": "task-1"}
    unsigned = b"\n\n" + kept.rpartition(b"\n")[2]
    for forged in (unsigned, kept.replace(b"task-1", b"task-2"), kept.replace(b"k1", b"k2"), b"", b"k1"):
        with pytest.raises(BadSignature):
            requests.opened(job_id, forged)
    with pytest.raises(BadSignature):
        requests.opened(f"{slot}.task-2", kept)
    with pytest.raises(BadSignature):
        task_requests(shared_redis).opened(job_id, kept)


@pytest.mark.parametrize("text", [b"", b"7", b"[]", b"no json", b"\xff", b"[" * 100_000])
def test_bytes_that_are_no_request_are_refused(shared_redis: RedisServer, job_id: str, text: bytes):
    """The task fails then; the thread of results goes on."""
    with pytest.raises(UndecodableEnvelope):
        task_requests(shared_redis, UNSIGNED).opened(job_id, b"\n\n" + text)


def test_a_broker_that_is_away_keeps_no_request(redis_server: RedisServer, job_id: str):
    """The message goes back to Celery's queue, as for every job that cannot be published."""
    requests = task_requests(redis_server)
    redis_server.kill()
    with pytest.raises(BrokerUnavailable):
        requests.keep(job_id, {"id": "task-1"})
