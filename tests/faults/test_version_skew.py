"""P1: clients of the release before and after meet the workers of this one, and the other way round."""

from __future__ import annotations

import uuid

import msgspec
import pytest

from penstock import Client
from penstock.registry.admission import JobBuilder
from penstock.registry.broker.base import Claim, Commit, Limits, Publication, State
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import PROTOCOL, Keyring, RequestContext, ResultHeader, seal
from penstock.registry.errors import DeadLettered, UndecodableEnvelope
from penstock.registry.package import ModelSpec
from penstock.registry.queues import Priority, dead_key, spec_key
from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.load import row
from tests.faults.rounds import seeds
from tests.servers import wait_until

_UNSIGNED = Keyring.parse(None)
_LIMITS = Limits(1000, 0, 60_000)


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """One worker of this release."""
    stage = open_stage()
    stage.start_worker()
    return stage


def _of_protocol(sealed: bytes, protocol: int) -> bytes:
    return sealed[:2] + bytes([protocol]) + sealed[3:]


def _publication(stage: Stage) -> Publication:
    with stage.server.client() as client:
        spec = ModelSpec.from_json(client.get(spec_key(stage.model)))
    return JobBuilder(tenant="skewed", keyring=_UNSIGNED, max_bytes=1 << 20).build(spec, {"x": row(1)})


@pytest.mark.parametrize("skew", [-1, 1])
@pytest.mark.parametrize("seed", seeds(ways=2))
def test_job_of_another_release_is_kept_and_its_client_told(
    seed: int, skew: int, stage: Stage, start_load: StartLoad, trial: Trial
):
    """Its bytes go to the dead letters with the reason, its client reads that reason, and the worker goes on."""
    made = _publication(stage)
    published = msgspec.structs.replace(made, sealed=_of_protocol(made.sealed, PROTOCOL + skew))
    broker = RedisStreams.from_url(stage.server.url)
    broker.publish(stage.model, [published], _LIMITS)
    reason = f"protocol {PROTOCOL + skew}; expected {PROTOCOL}"
    with Client(stage.server.url, tenant="skewed") as client, pytest.raises(DeadLettered, match=reason):
        client.job(made.job_id).result(180)
    with stage.server.client() as server:
        ((_, letter),) = server.xrevrange(dead_key(stage.model), count=1)
    assert letter[b"e"] == published.sealed
    assert reason in letter[b"reason"].decode()
    broker.close()
    load = start_load(stage.server, stage.forward_log)
    load.publish(10)
    trial.check(load.history())


@pytest.mark.parametrize("skew", [-1, 1])
def test_result_of_another_release_is_refused_with_its_number(skew: int, stage: Stage):
    """A client that cannot read a result says which protocol it met and which it expects."""
    slot = f"unserved-{uuid.uuid4().hex[:8]}"
    broker = RedisStreams.from_url(stage.server.url)
    broker.prepare([slot])
    job_id = f"{slot}.{_publication(stage).job_id.rpartition('.')[2]}"
    broker.publish(slot, [Publication(job_id, Priority.NORMAL, b"sealed", "skewed")], _LIMITS)
    _, (delivery,) = broker.exchange("another-release", [], [Claim(slot, 1, 0, 1000)], 60_000)
    header = ResultHeader(id=job_id, context=RequestContext("skewed"))
    sealed = _of_protocol(seal("result", header, b"", _UNSIGNED), PROTOCOL + skew)
    commit = Commit(slot, Priority.NORMAL, delivery.entry_id, job_id, State.COMPLETED, sealed, "skewed")
    broker.exchange("another-release", [commit], [], 60_000)
    with (
        Client(stage.server.url, tenant="skewed") as client,
        pytest.raises(UndecodableEnvelope, match=f"protocol {PROTOCOL + skew}; expected {PROTOCOL}"),
    ):
        client.job(job_id).result(180)
    broker.close()


def test_field_that_a_later_release_added_is_ignored(stage: Stage):
    """Within one protocol a header may grow: a job with a field that is unknown here runs."""
    made = _publication(stage)
    size = int.from_bytes(made.sealed[4:8], "little")
    header = msgspec.msgpack.decode(made.sealed[8 : 8 + size]) | {"mood": "good"}
    head = msgspec.msgpack.encode(header)
    sealed = made.sealed[:4] + len(head).to_bytes(4, "little") + head + made.sealed[8 + size :]
    broker = RedisStreams.from_url(stage.server.url)
    broker.publish(stage.model, [msgspec.structs.replace(made, sealed=sealed)], _LIMITS)
    broker.close()
    with Client(stage.server.url, tenant="skewed") as client:
        job = client.job(made.job_id)
        wait_until(lambda: job.status() == "completed", 10, "the job ends")
        assert job.result(180)["y"][0, 0] == 2
