"""S0.7: tenants meet nowhere: results, streams, cancels, idempotency keys, shared forwards. Crossings: 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis.connection import AbstractConnection

from penstock import Client
from penstock.registry.errors import Cancelled, PenstockError, ResultGone, UnknownJob
from penstock.registry.queues import new_job_id
from penstock.registry.settings import Settings
from tests.packages import recorded_forwards
from tests.servers import wait_until
from tests.threats.conftest import AttackedWorker
from tests.threats.fuzz import KEYS

ROW = {"x": [[1.0, 2.0, 3.0, 4.0]]}
_LOOKS: dict[str, Callable[[Any], object]] = {
    "status": lambda job: job.status(),
    "result": lambda job: job.result(timeout=0.2),
    "cancel": lambda job: job.cancel(),
    "stream": lambda job: list(job.stream()),
}


def _refusal(look: Callable[[Any], object], client: Client, job_id: str) -> tuple[type[BaseException], str]:
    """What a look at a job raises, with the job's id left out of the text."""
    with pytest.raises(PenstockError) as refused:
        look(client.job(job_id))
    return type(refused.value), str(refused.value).replace(job_id, "<id>")


@pytest.mark.parametrize("state", ["completed", "waiting", "running", "cancelled"])
def test_another_tenants_job_looks_like_a_missing_one(state: str, target: AttackedWorker):
    """The same class and the same text in every state of the job; the job itself is not touched by it."""
    with target.client("owner") as owner, target.client("stranger") as stranger:
        # One after the other, so that the last one waits for some seconds.
        jobs = owner.submit_many("napper", [{"x": [[n, 0, 0, 0]]} for n in range(15)])
        job = jobs[0] if state in ("running", "completed") else jobs[-1]
        if state == "cancelled":
            assert job.cancel() == "cancelled"
        elif state == "running":
            wait_until(lambda: job.status() != "queued", 30, "the first job runs")
        elif state == "completed":
            job.result(180)
        for look in _LOOKS.values():
            missing = _refusal(look, stranger, new_job_id("double"))
            assert _refusal(look, stranger, job.id) == missing
            assert missing[0] is UnknownJob
        for each in jobs:
            if each is not job:
                each.cancel()
        if state == "cancelled":
            with pytest.raises(Cancelled):
                job.result(180)
        else:
            job.result(180)


def test_looking_costs_as_much_as_for_a_missing_job(target: AttackedWorker, monkeypatch: pytest.MonkeyPatch):
    """As many commands to the broker, and as many bytes to it: nothing that a stranger could time tells them apart."""
    with target.client("owner") as owner, target.client("stranger") as stranger:
        job = owner.submit("double", ROW)
        job.result(180)
        ids = {"theirs": job.id, "missing": new_job_id("double")}
        sent: dict[str, list[int]] = {name: [] for name in ids}
        with pytest.raises(UnknownJob):
            stranger.job(new_job_id("double")).status()  # connects
        for name, job_id in ids.items():
            with monkeypatch.context() as patch:
                patch.setattr(AbstractConnection, "send_packed_command", _noting(sent[name]))
                with pytest.raises(UnknownJob):
                    stranger.job(job_id).status()
    assert sent["theirs"]
    assert sent["theirs"] == sent["missing"]


def _noting(sent: list[int]) -> Callable[..., None]:
    """`send_packed_command`, which adds the bytes of each command to `sent`."""
    send = AbstractConnection.send_packed_command

    def send_and_note(self: AbstractConnection, command: Any, *args: Any, **options: Any) -> None:
        sent.append(len(b"".join(command)) if isinstance(command, list) else len(command))
        send(self, command, *args, **options)

    return send_and_note


def test_old_job_of_another_tenant_is_gone_like_a_missing_one(target: AttackedWorker):
    """An id older than results are kept: gone, for every tenant, whether or not it existed."""
    old = "double.01900000-0000-7000-8000-000000000000"
    with target.client("stranger") as stranger:
        assert _refusal(_LOOKS["status"], stranger, old)[0] is ResultGone


def test_idempotency_keys_of_tenants_are_apart(target: AttackedWorker):
    """The same key, model and inputs: each tenant has its own job, and other inputs make no conflict."""
    with target.client("owner") as owner, target.client("stranger") as stranger:
        mine = owner.submit("double", ROW, idempotency_key="order-17")
        theirs = stranger.submit("double", ROW, idempotency_key="order-17")
        assert mine.id != theirs.id
        assert owner.submit("double", ROW, idempotency_key="order-17").id == mine.id
        with target.client("third") as other:
            row = {"x": [[9.0, 9.0, 9.0, 9.0]]}
            assert other.submit("double", row, idempotency_key="order-17").result(180)["y"].tolist() == [[18.0] * 4]


def test_equal_jobs_of_tenants_share_no_forward(target: AttackedWorker):
    """Single flight is within a tenant: equal inputs of two tenants at the same time run twice."""
    marker = 31337.0
    row = {"x": [[marker, 0, 0, 0]]}
    with target.client("owner") as owner, target.client("stranger") as stranger:
        jobs = [*owner.submit_many("recorder", [row] * 4), *stranger.submit_many("recorder", [row] * 4)]
        for job in jobs:
            assert job.result(180)["y"].tolist() == [[2 * marker, 0, 0, 0]]
    rows = [each for batch in recorded_forwards(target.forward_log) for each in batch]
    assert rows.count(marker) >= 2


def test_a_client_hears_no_replies_of_another(target: AttackedWorker):
    """Each client has reply streams of its own: what one waits for, the other is never told."""
    with target.client("owner") as owner, target.client("stranger") as stranger, target.server.client() as redis:
        owner.submit("double", ROW).result(180)
        stranger.submit("double", ROW).result(180)
        streams = {key for key in redis.scan_iter("{double}:reply:*", count=1_000)}
        heard = [{entry for _, fields in redis.xrange(key) for entry in fields} for key in streams]
    assert len(streams) >= 2
    assert sum(map(len, heard)) == len(set().union(*heard))


def test_tenants_limits_are_their_own(target: AttackedWorker):
    """A tenant at its limit of jobs in flight stops no other tenant."""
    settings = Settings.load(environ={}, overrides={"queue.tenant_max_in_flight": 2})
    with (
        Client(target.server.url, tenant="owner", signing_keys=KEYS, settings=settings) as owner,
        Client(target.server.url, tenant="stranger", signing_keys=KEYS, settings=settings) as stranger,
    ):
        jobs = [owner.submit("napper", {"x": [[n, 1, 0, 0]]}) for n in range(2)]
        with pytest.raises(PenstockError, match="has reached its limit of jobs in flight"):
            owner.submit("napper", ROW)
        jobs.append(stranger.submit("napper", {"x": [[7, 1, 0, 0]]}, priority="critical"))
        for job in jobs:
            job.result(180)
