"""What only Redis has: every key that one script touches lies in one hash slot of a cluster."""

from __future__ import annotations

import re
from binascii import crc_hqx
from contextlib import closing
from typing import get_args

import pytest
import redis
from msgspec.structs import replace

from penstock.registry.broker import redis_scripts
from penstock.registry.broker.base import Claim, Emission, Withdrawal
from penstock.registry.broker.breakers import BreakerLimits, breaker_name
from penstock.registry.broker.meters import Charge, Lines, Meter, WindowKind, spend
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.broker.redis_shadow import RedisShadow, Settled
from penstock.registry.queues import GROUP, Priority, lane_key, meter_key, reply_key
from tests.conformance.conftest import OnRedis
from tests.conformance.jobs import ROOMY, TTL_MS, claim, commit_of, held, ids, publication, settle
from tests.workers.shadow.pairs import order_of

CLUSTER_SLOTS = 16384
_KEY_IN_SCRIPT = re.compile(r"\S*\{[^}]+\}\S*")


def cluster_slot(key: str) -> int:
    """The slot of a key, by the Redis Cluster specification: CRC16 of the hash tag, if there is one."""
    tag = re.search(r"\{([^}]+)\}", key)
    return crc_hqx((tag.group(1) if tag else key).encode(), 0) % CLUSTER_SLOTS


def test_cluster_slot_follows_the_specification():
    """The specification's own example, and the tag alone counts."""
    assert crc_hqx(b"123456789", 0) == 0x31C3
    assert cluster_slot("infer.{minilm}.high") == cluster_slot("{minilm}:flow") == cluster_slot("minilm")


def call_breakers(url: str, model: str) -> None:
    """Every script of circuit breakers."""
    limits, name = BreakerLimits(), breaker_name(model, "1", "compiled")
    with closing(RedisBreakers.from_url(url)) as breakers:
        breakers.breakers(model)
        breakers.fail_breaker(name, "a reason", "f", limits)
        breakers.force_open_breaker(name, "a reason", "o", limits)
        breakers.probe_breaker(name, "p", limits)
        breakers.pass_breaker(name, "p")
        breakers.reset_breaker(name)


def call_shadow(url: str, model: str) -> None:
    """Every script of the shadow queue."""
    order = order_of(model)
    with closing(RedisShadow.from_url(url)) as shadow:
        # A sealed order has braces, as keys do.
        shadow.start(order, b"record")
        shadow.mirror(order, [b"a pair"])
        (taken,) = shadow.take(model, order.id, "a", 1, most_bytes=1000, lease_ms=TTL_MS) or []
        shadow.settle(model, order.id, [Settled(taken.entry_id, len(taken.sealed), "pass")])
        shadow.end(model, order.id, "a reason")
        shadow.stop(model)


def call_task_results(url: str, model: str) -> None:
    """The script of the results of Celery tasks. The calls before it have loaded it."""
    with redis.Redis.from_url(url) as client:
        client.xgroup_create(lane_key(model), GROUP, mkstream=True)
        client.execute_command(*redis_scripts.forget_consumers(lane_key(model), 0))


@pytest.mark.parametrize("name", ["minilm", "a.b_c-3", "7"])
def test_all_keys_that_scripts_touch_hash_to_one_slot(redis_brokerage: OnRedis, slot: str, name: str):
    """Declared or derived, every key of a script's commands carries the tag of its model."""
    model = f"{slot}.{name}"
    broker = redis_brokerage.connect()
    broker.prepare([model])
    with redis_brokerage.server.monitor() as commands:
        jobs = [
            replace(
                publication(
                    model,
                    reply=reply_key(model, "me"),
                    idempotency_digest=f"k{n}",
                    fingerprint="p",
                    webhook="https://example.com/",
                ),
                account="a-key",
            )
            for n in range(4)
        ]
        broker.publish(model, jobs, ROOMY)
        broker.job_record(jobs[0].job_id, subscribe=True)
        broker.job_records([job.job_id for job in jobs])
        broker.follow([job.job_id for job in jobs], "a follower", TTL_MS)
        broker.cancel(jobs[0].job_id, "acme", b"")
        broker.expire(jobs[1].job_id, "acme", b"")
        first, second, third = claim(broker, "w", model)
        broker.emit("w", [Emission(held(first), "run", b"")], TTL_MS, max_bytes=1000)
        broker.renew("w", [held(first), held(second)])
        broker.release("w", [held(second)])
        assert ids(broker.take_over("w2", model, 1000, 8)) == [jobs[2].job_id]
        broker.release("w2", [held(second)], version="1")
        assert ids(broker.adopt("w2", model, ["1"], 8)) == [jobs[2].job_id]
        broker.suspect(model, [held(first)], "incident", TTL_MS)
        broker.dead_letter("w", third, "reason")
        (letter,) = broker.dead_letters(model)
        broker.replay(model, letter.entry, jobs[3], TTL_MS)
        (entry,) = broker.waiting(model, Priority.NORMAL, b"", 8, 64)
        broker.withdraw(model, Priority.NORMAL, [Withdrawal(entry.entry_id, jobs[3].job_id, "acme", b"")], TTL_MS)
        broker.purge_dead(model, [letter.entry])
        broker.pause(model)
        broker.paused([model])
        broker.resume(model)
        settle(broker, "w", commit_of(first, reply=reply_key(model, "me"), idempotency_digest="k1"))
        broker.rate(held(first).job_id, "e", "1", 0.5)
        webhook, *_ = broker.take_webhooks(model, 8, TTL_MS)
        broker.give_up_webhook(webhook, "gone")
        broker.list_webhooks(model, dead=True)
        broker.count_webhooks(model)
        broker.replay_webhook(model, webhook.id)
        broker.depths(model)
        broker.put_spec(model, b"{}")
        broker.quarantine([model])
        broker.report_keys(model, b"[]", TTL_MS)
        broker.activate(model, 1, b"record", "1", b"{}")
        call_breakers(redis_brokerage.server.url, model)
        call_shadow(redis_brokerage.server.url, model)
        call_task_results(redis_brokerage.server.url, model)
    broker.close()
    calls = [command for command in commands if command.startswith("EVALSHA")]
    of_models = set(redis_scripts.SOURCES) - {"spend"}
    assert {call.split()[1] for call in calls} == set(map(redis_scripts.sha_of, of_models))
    # The first call of a server loads the scripts, whose tables look like keys.
    sent = [command for command in commands if not command.startswith("SCRIPT LOAD")]
    keys = [key for command in sent for key in _KEY_IN_SCRIPT.findall(command)]
    assert len(keys) > 100
    assert {cluster_slot(key) for key in keys} == {cluster_slot(model)}


def test_claims_of_two_models_are_two_calls(redis_brokerage: OnRedis, slot: str):
    """One exchange over two models never mixes their keys in one script."""
    broker = redis_brokerage.connect()
    broker.prepare([slot, f"{slot}-b"])
    # A server that has not seen the script yet gets it by a second call.
    broker.exchange("w", [], [Claim(slot, 1, 0, 0)], TTL_MS)
    with redis_brokerage.server.monitor() as commands:
        broker.exchange("w", [], [Claim(slot, 1, 0, 0), Claim(f"{slot}-b", 1, 0, 0)], TTL_MS)
    broker.close()
    calls = [command for command in commands if command.startswith("EVALSHA")]
    assert len(calls) == 2
    assert all(len({cluster_slot(key) for key in _KEY_IN_SCRIPT.findall(call)}) == 1 for call in calls)


def test_all_meters_hash_to_one_slot():
    """One call charges the meters of keys, tenants, addresses and routes, whatever model they ask."""
    kinds: tuple[WindowKind, ...] = get_args(WindowKind)
    subjects = ("key.a", "tenant.b", "address.::1", "route./v1/models/{name}:predict")
    charges = [
        Charge(Meter("requests", meter_key(subject, f"{kind}.requests"), kind, 10), 1)
        for subject in subjects
        for kind in kinds
    ]
    call = spend([charges, charges[:2]], {0: Lines("batch_0198c5", [1, 2])})
    keys = call[3 : 3 + call[2]]
    assert len(keys) == len(charges) + 3
    assert len({cluster_slot(key) for key in keys}) == 1
