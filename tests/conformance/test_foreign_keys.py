"""What only Redis has: keys of ours that another program has replaced by keys of another type. Every key x every call.

The call works, the foreign bytes are quarantined and not lost, and the next job of the model is answered.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from msgspec.structs import replace

from penstock.registry import queues
from penstock.registry.audit_heads import AuditHead
from penstock.registry.broker.base import (
    Broker,
    CancelOutcome,
    Claim,
    CommitStatus,
    Delivery,
    Emission,
    Limits,
    Position,
    Publication,
    Quarantined,
    State,
    Withdrawal,
)
from penstock.registry.broker.breakers import BreakerLimits, breaker_name
from penstock.registry.broker.limits import QUARANTINE_CAP
from penstock.registry.broker.redis_async import AsyncRedisStreams
from penstock.registry.broker.redis_audit_heads import RedisAuditHeads
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.broker.webhooks import BrokerOfWebhooks, Webhook
from penstock.registry.desired_state import DesiredVersion, StateStore
from penstock.registry.envelope import Keyring
from penstock.registry.errors import BrokerDamaged
from penstock.registry.queues import Priority, key_type
from penstock.workers.celery_bridge.task_request import TaskRequests
from tests.conformance.conftest import OnRedis
from tests.conformance.jobs import ROOMY, TTL_MS, claim, commit_of, held, publication, publish, settle
from tests.foreign_keys import FOREIGN, bytes_of, is_foreign, overwrite


@dataclass
class World:
    """One model with a running job, a waiting job and a dead letter; every key of theirs exists, and the worker's."""

    server: OnRedis
    slot: str
    broker: BrokerOfWebhooks
    reply: str
    running: Delivery = field(init=False)
    waiting: Publication = field(init=False)
    letter: str = field(init=False)
    emission: Emission = field(init=False)
    emitted: Position = field(init=False)
    webhook: Webhook = field(init=False)

    def __post_init__(self) -> None:
        broker, slot = self.broker, self.slot
        broker.put_spec(slot, b"{}")
        broker.put_spec(slot, b"{}", "1")
        broker.report(self.worker, b"{}", TTL_MS)
        broker.report_keys(slot, b"[]", TTL_MS)
        dead, running = publish(broker, slot, 2, reply=self.reply)
        letter, self.running = claim(broker, "w", slot)
        assert (letter.sealed.decode(), self.running.sealed.decode()) == (dead, running)
        broker.dead_letter("w", letter, "a reason", job_id=dead, sealed=b"dead")
        (found,) = broker.dead_letters(slot)
        self.letter = found.entry
        (_,) = broker.publish(slot, [publication(slot, webhook="https://receiver.example")], ROOMY)
        settle(broker, "w", *map(commit_of, claim(broker, "w", slot)))
        (self.webhook,) = broker.take_webhooks(slot, 1, 1)
        self.emission = Emission(held(self.running), "a run", b"1")
        (self.emitted,) = broker.emit("w", [self.emission], TTL_MS, max_bytes=1000)
        _with_breakers(self, lambda end: end.force_open_breaker(self.breaker, "a reason", "first", BREAKER_LIMITS))
        broker.suspect(slot, [held(self.running)], "incident", TTL_MS)
        self.waiting = publication(slot, reply=self.reply, idempotency_digest="d", fingerprint="f")
        broker.publish(slot, [self.waiting], ROOMY)
        broker.job_record(self.waiting.job_id, subscribe=True)

    @property
    def breaker(self) -> str:
        """The name of a circuit breaker that is open."""
        return breaker_name(self.slot, "1", "compiled")

    @property
    def worker(self) -> str:
        """The name of the worker."""
        return f"{self.slot}@host"

    def asked(self, call: Callable[[AsyncRedisStreams], Any]) -> Any:
        """The answer of the asyncio client's end."""

        async def ask() -> Any:
            end = AsyncRedisStreams.from_url(self.server.server.url)
            try:
                return await call(end)
            finally:
                await end.aclose()

        return asyncio.run(ask())


def _collect(world: World) -> object:
    world.broker.arm("w", [world.slot], 1, 1)
    return world.broker.collect()


def _replay(world: World) -> object:
    return world.broker.replay(world.slot, world.letter, publication(world.slot), TTL_MS)


def _withdraw(world: World) -> object:
    found = world.broker.waiting(world.slot, Priority.NORMAL, b"", 1, 64)
    jobs = [Withdrawal(entry.entry_id, world.waiting.job_id, "acme", b"withdrawn") for entry in found]
    return world.broker.withdraw(world.slot, Priority.NORMAL, jobs, TTL_MS)


def _settled(world: World) -> None:
    with world.server.server.client() as client:
        TaskRequests(client, Keyring.parse(None), keep_ms=TTL_MS, settled_ms=TTL_MS).settled(world.waiting.job_id)


def _with_heads(world: World, call: Callable[[RedisAuditHeads], object]) -> object:
    with closing(RedisAuditHeads.from_url(world.server.server.url)) as heads:
        return call(heads)


BREAKER_LIMITS: Final = BreakerLimits(open_ms=1)


def _with_breakers(world: World, call: Callable[[RedisBreakers], object]) -> object:
    with closing(RedisBreakers.from_url(world.server.server.url)) as end:
        return call(end)


CALLS: dict[str, Callable[[World], object]] = {
    # Clients
    "publish": lambda w: w.broker.publish(w.slot, [publication(w.slot)], ROOMY),
    "publish again": lambda w: w.broker.publish(w.slot, [w.waiting], ROOMY),
    "publish while full": lambda w: w.broker.publish(w.slot, [publication(w.slot)], Limits(0, 1, TTL_MS)),
    "job_records": lambda w: w.broker.job_records([w.waiting.job_id, w.running.sealed.decode()]),
    "job_record": lambda w: w.broker.job_record(w.waiting.job_id, subscribe=True),
    "read": lambda w: w.broker.read({w.reply: "0", queues.events_key(w.waiting.job_id): "0"}, 1),
    "trim": lambda w: w.broker.trim(w.reply, "1-1"),
    "nudge": lambda w: w.broker.nudge(w.reply),
    "spec": lambda w: (w.broker.spec(w.slot), w.broker.spec(w.slot, "1")),
    "announced": lambda w: w.broker.announced(w.slot),
    "async publish": lambda w: w.asked(lambda end: end.publish(w.slot, [publication(w.slot)], ROOMY)),
    "async job_record": lambda w: w.asked(lambda end: end.job_record(w.waiting.job_id, subscribe=True)),
    "async read": lambda w: w.asked(lambda end: end.read({w.reply: "0", queues.events_key(w.waiting.job_id): "0"}, 1)),
    "async spec": lambda w: w.asked(lambda end: end.spec(w.slot, "1")),
    # Workers
    "prepare": lambda w: w.broker.prepare([w.slot]),
    "claim": lambda w: w.broker.exchange("w", [], [Claim(w.slot, 0, 0, 0)], TTL_MS),
    "claim one": lambda w: w.broker.exchange("w2", [], [Claim(w.slot, 2, 1, 0)], TTL_MS),
    "collect": _collect,
    "paused": lambda w: w.broker.paused([w.slot]),
    "renew": lambda w: w.broker.renew("w", [held(w.running)]),
    "take_over": lambda w: w.broker.take_over("w2", w.slot, 3_600_000, 8),
    "adopt": lambda w: w.broker.adopt("w2", w.slot, ["1"], 8),
    "suspect": lambda w: w.broker.suspect(w.slot, [held(w.running)], "another", TTL_MS),
    "emit": lambda w: w.broker.emit("w", [w.emission._replace(sealed=b"2", after=w.emitted)], TTL_MS, max_bytes=1000),
    "put_spec": lambda w: w.broker.put_spec(w.slot, b"{}", "1"),
    "announce": lambda w: w.broker.announce(w.slot, b"{}", {"1": b"{}"}, replaces=False),
    "actives": lambda w: w.broker.actives([w.slot]),
    "report": lambda w: w.broker.report(w.worker, b"{}", TTL_MS),
    "report_keys": lambda w: w.broker.report_keys(w.slot, b"[]", TTL_MS),
    "settled": _settled,
    "store audit heads": lambda w: _with_heads(w, lambda heads: heads.put({"w": AuditHead(1, "00")})),
    "observe": lambda w: w.broker.observe(w.slot, "e", "1 w", b"{}", TTL_MS),
    "observations": lambda w: w.broker.observations(w.slot, "e"),
    "ratings": lambda w: w.broker.ratings(w.slot, "e"),
    "breakers": lambda w: _with_breakers(w, lambda end: end.breakers(w.slot)),
    "probe_breaker": lambda w: _with_breakers(w, lambda end: end.probe_breaker(w.breaker, "p", BREAKER_LIMITS)),
    "pass_breaker": lambda w: _with_breakers(w, lambda end: end.pass_breaker(w.breaker, "p")),
    "fail_breaker": lambda w: _with_breakers(w, lambda end: end.fail_breaker(w.breaker, "x", "f", BREAKER_LIMITS)),
    "force_open_breaker": lambda w: _with_breakers(
        w, lambda end: end.force_open_breaker(w.breaker, "drift", "d", BREAKER_LIMITS)
    ),
    "reset_breaker": lambda w: _with_breakers(w, lambda end: end.reset_breaker(w.breaker)),
    # Operators
    "models": lambda w: w.broker.models(),
    "depths": lambda w: w.broker.depths(w.slot),
    "read audit heads": lambda w: _with_heads(w, lambda heads: heads.all()),
    "usage": lambda w: w.broker.usage(w.slot),
    "committed": lambda w: w.broker.committed(w.slot),
    "workers": lambda w: w.broker.workers(),
    "waiting": lambda w: w.broker.waiting(w.slot, Priority.NORMAL, b"", 8, 8),
    "newest_entry": lambda w: w.broker.newest_entry(w.slot, Priority.NORMAL),
    "queued_job": lambda w: w.broker.queued_job(w.waiting.job_id),
    "pause": lambda w: w.broker.pause(w.slot),
    "resume": lambda w: w.broker.resume(w.slot),
    "dead_letters": lambda w: w.broker.dead_letters(w.slot),
    "read_dead_letter": lambda w: w.broker.read_dead_letter(w.slot, w.letter),
    "quarantined": lambda w: w.broker.quarantined(w.slot),
    # Those that end jobs come last.
    "follow": lambda w: w.broker.follow([w.waiting.job_id], "a follower", TTL_MS),
    "unfollow": lambda w: w.broker.unfollow([w.waiting.job_id], "a follower"),
    "abandon": lambda w: w.broker.abandon(w.waiting.job_id, "acme", b"cancelled"),
    "cancel": lambda w: w.broker.cancel(w.waiting.job_id, "acme", b"cancelled"),
    "rate": lambda w: w.broker.rate(w.waiting.job_id, "e", "1", 0.5),
    "expire": lambda w: w.broker.expire(w.waiting.job_id, "acme", b"expired"),
    "withdraw": _withdraw,
    "activate": lambda w: w.broker.activate(w.slot, 1, b"record", "1", b"{}"),
    "replay": _replay,
    "commit": lambda w: settle(w.broker, "w", commit_of(w.running, reply=w.reply)),
    "dead_letter": lambda w: w.broker.dead_letter(
        "w", w.running, "a reason", job_id=w.running.sealed.decode(), sealed=b"dead"
    ),
    "release": lambda w: w.broker.release("w", [held(w.running)]),
    "purge_dead": lambda w: w.broker.purge_dead(w.slot, [w.letter]),
    "withdraw the report": lambda w: w.broker.report(w.worker, b"", TTL_MS),
    "withdraw the keys": lambda w: w.broker.report_keys(w.slot, b"[]", TTL_MS, is_live=False),
    "quarantine": lambda w: w.broker.quarantine([w.slot]),
    # Deliverers of webhooks
    "webhook_slots": lambda w: w.broker.webhook_slots(),
    "take_webhooks": lambda w: w.broker.take_webhooks(w.slot, 8, 1),
    "postpone_webhook": lambda w: w.broker.postpone_webhook(w.webhook, 0, "an error"),
    "list_webhooks": lambda w: w.broker.list_webhooks(w.slot, dead=False),
    "replay_webhook": lambda w: w.broker.replay_webhook(w.slot, w.webhook.id),
    "count_webhooks": lambda w: w.broker.count_webhooks(w.slot),
}

KEYS: dict[str, Callable[[World], list[str]]] = {
    "active_key": lambda w: [queues.active_key(w.slot)],
    "breakers_key": lambda w: [queues.breakers_key(w.slot)],
    "crashes_key": lambda w: [queues.crashes_key(w.slot, w.running.priority, w.running.entry_id)],
    "dead_key": lambda w: [queues.dead_key(w.slot)],
    "events_key": lambda w: [queues.events_key(w.running.sealed.decode()), queues.events_key(w.waiting.job_id)],
    "experiment_key": lambda w: [queues.experiment_key(w.slot, "e")],
    "flow_key": lambda w: [queues.flow_key(w.slot)],
    "followers_key": lambda w: [queues.followers_key(w.waiting.job_id)],
    "idempotency_key": lambda w: [queues.idempotency_key(w.slot, "d")],
    "keyrings_key": lambda w: [queues.keyrings_key(w.slot)],
    "lane_key": lambda w: [queues.lane_key(w.slot)],
    "paused_key": lambda w: [queues.paused_key(w.slot)],
    "quarantine_key": lambda w: [queues.quarantine_key(w.slot)],
    "ratings_key": lambda w: [queues.ratings_key(w.slot, "e")],
    "record_key": lambda w: [queues.record_key(w.running.sealed.decode()), queues.record_key(w.waiting.job_id)],
    "reply_key": lambda w: [w.reply],
    "spec_key": lambda w: [queues.spec_key(w.slot)],
    "specs_key": lambda w: [queues.specs_key(w.slot)],
    "stream_key": lambda w: [queues.stream_key(w.slot, Priority.NORMAL), queues.stream_key(w.slot, Priority.LOW)],
    "task_request_key": lambda w: [queues.task_request_key(w.waiting.job_id)],
    "usage_key": lambda w: [queues.usage_key(w.slot)],
    "webhook_key": lambda w: [queues.webhook_key(w.slot, w.webhook.id)],
    "webhook_keys": lambda w: list(queues.webhook_keys(w.slot)),
    "worker_key": lambda w: [queues.worker_key(w.worker)],
    "AUDIT_HEADS_KEY": lambda w: [queues.AUDIT_HEADS_KEY],
    "MODELS_KEY": lambda w: [queues.MODELS_KEY],
    "WEBHOOKS_KEY": lambda w: [queues.WEBHOOKS_KEY],
    "WORKERS_KEY": lambda w: [queues.WORKERS_KEY],
}
_OTHER_NAMES: Final = {
    *("event_stream_key", "is_reply_key", "local_record_key", "meter_key", "charged_key", "overdue_key", "stream_keys"),
}
"""Names in queues.py that make no further key; `overdue_key` has a test of its own below. Meters are no part of a
broker: tests/registry/broker/test_meters.py has them."""


def test_every_key_has_a_type_and_a_row_here():
    """A new key without a guard fails."""
    names = {name for name in queues.__all__ if name.lower().endswith(("_key", "_keys"))} - _OTHER_NAMES
    # The keys of shadows are no part of a broker: tests/registry/broker/test_redis_shadow.py has them.
    names = {name for name in names if not name.startswith("shadow_")}
    assert names == KEYS.keys()


def _aside(broker: Broker, key: str) -> list[Quarantined]:
    return [each for each in broker.quarantined(queues.slot_in(key)) if each.key == key]


@pytest.fixture
def opened(redis_brokerage: OnRedis, slot: str) -> Iterator[Callable[[], World]]:
    """Makes worlds, each with a model of its own."""
    numbers = iter(range(1_000_000))
    with closing(redis_brokerage.connect()) as broker:

        def open_() -> World:
            model = f"{slot}-{next(numbers)}"
            return World(redis_brokerage, model, broker, queues.reply_key(model, "me"))

        yield open_


@pytest.mark.parametrize("name", KEYS)
def test_no_call_fails_or_destroys_a_foreign_key(redis_brokerage: OnRedis, opened: Callable[[], World], name: str):
    """Whatever meets it: the bytes are where they were or in the quarantine, and the next job is answered. Some call
    quarantines each key: none stays for ever."""
    moved: dict[int, list[str]] = defaultdict(list)
    with redis_brokerage.server.client() as client:
        for called, call in CALLS.items():
            world = opened()
            for number, key in enumerate(KEYS[name](world)):
                key_type(key) or pytest.fail(f"no type is known for {key}")
                before = len(_aside(world.broker, key))
                overwrite(client, key)
                call(world)
                call(world)
                if is_foreign(client, key):
                    assert bytes_of(client, key) == FOREIGN, called
                else:
                    moved[number].append(called)
                    assert len(_aside(world.broker, key)) == before + 1, (called, key)
                    assert bytes_of(client, _aside(world.broker, key)[-1].name) == FOREIGN, called
            world.broker.quarantine([world.slot])
            world.broker.resume(world.slot)
            (job_id,) = publish(world.broker, world.slot, reply=world.reply)
            deliveries = [each for each in claim(world.broker, "w3", world.slot) if each.sealed.decode() == job_id]
            assert settle(world.broker, "w3", *map(commit_of, deliveries)) == [CommitStatus.COMMITTED], called
            (record,) = world.broker.job_records([job_id])
            assert record is not None
            assert record.state is State.COMPLETED, called
    assert all(moved[number] for number in range(len(KEYS[name](opened()))))


def test_a_foreign_key_of_a_job_harms_no_neighbour_in_its_commit(redis_brokerage: OnRedis, slot: str):
    """Three jobs in one commit: the record or the events of the middle one are foreign. The others are committed."""
    with redis_brokerage.server.client() as client, closing(redis_brokerage.connect()) as broker:
        for make, middle in ((queues.record_key, CommitStatus.FENCED), (queues.events_key, CommitStatus.COMMITTED)):
            reply = queues.reply_key(slot, make.__name__)
            job_ids = publish(broker, slot, 3, reply=reply)
            broker.job_record(job_ids[1], subscribe=True)
            deliveries = claim(broker, "w", slot)
            overwrite(client, make(job_ids[1]))
            statuses = settle(broker, "w", *(commit_of(each, reply=reply) for each in deliveries))
            assert statuses == [CommitStatus.COMMITTED, middle, CommitStatus.COMMITTED]
            assert client.hget(queues.flow_key(slot), "t:acme") is None
            told = [name for entry in broker.read({reply: "0"}, 0) for name in entry.fields[::2]]
            assert {job_ids[0].rpartition(".")[2].encode(), job_ids[2].rpartition(".")[2].encode()} <= set(told)
            assert sum(depth.jobs for depth in broker.depths(slot)) == 0


def test_jobs_before_a_foreign_key_are_counted_once(redis_brokerage: OnRedis, slot: str):
    """The key of the second of three is foreign: the call is repeated, and the first job is in the queue already."""
    with redis_brokerage.server.client() as client, closing(redis_brokerage.connect()) as broker:
        overwrite(client, queues.idempotency_key(slot, "d"))
        jobs = [publication(slot), publication(slot, idempotency_digest="d", fingerprint="f"), publication(slot)]
        assert [each.outcome for each in broker.publish(slot, jobs, ROOMY)] == ["accepted"] * 3
        assert client.hget(queues.flow_key(slot), "t:acme") == b"3"
        settle(broker, "w", *map(commit_of, claim(broker, "w", slot)))
        assert client.hget(queues.flow_key(slot), "t:acme") is None


def test_a_foreign_record_is_quarantined_by_a_commit_that_comes_late(redis_brokerage: OnRedis, slot: str):
    """The job is not held any more: the error of its first commit may have been lost on the way."""
    with closing(redis_brokerage.connect()) as broker, redis_brokerage.server.client() as client:
        (job_id,) = publish(broker, slot)
        (delivery,) = claim(broker, "w", slot)
        key = queues.record_key(job_id)
        overwrite(client, key)
        assert settle(broker, "another", commit_of(delivery)) == [CommitStatus.FENCED]
        assert not is_foreign(client, key)


def test_a_foreign_note_of_an_overdue_job_ends_it_later(redis_brokerage: OnRedis, slot: str):
    """The time that was counted for its dead worker begins anew."""
    with redis_brokerage.server.client() as client, closing(redis_brokerage.connect()) as broker:
        broker.prepare([slot])
        # A worker that looks for jobs tells the length of its leases.
        broker.take_over("other", slot, 100, 8)
        job = publication(slot, deadline_ms=50)
        broker.publish(slot, [job], ROOMY)
        claim(broker, "dead", slot)
        redis_brokerage.elapse(120)
        assert not broker.expire(job.job_id, "acme", b"expired")
        overwrite(client, queues.overdue_key(job.job_id))
        assert not broker.expire(job.job_id, "acme", b"expired")
        (aside,) = _aside(broker, queues.overdue_key(job.job_id))
        assert aside.kind == "list"


@pytest.mark.parametrize("field_name", ["t:acme", "done", "mark", "at", "rate", "memory_at", "short", "dead", "lease"])
def test_a_counter_that_is_no_number_stops_nothing(redis_brokerage: OnRedis, opened: Callable[[], World], field_name):
    """The hash is quarantined where a counter cannot be counted on; any other field is made anew."""
    with redis_brokerage.server.client() as client:
        for called, call in CALLS.items():
            world = opened()
            client.hset(queues.flow_key(world.slot), field_name, "no number")
            call(world)
            assert world.broker.publish(world.slot, [publication(world.slot)], ROOMY)[0].outcome == "accepted", called


@pytest.mark.parametrize("how", ["cancel", "dead letter", "withdraw"])
@pytest.mark.parametrize("is_counter", [True, False], ids=["counter", "events"])
def test_an_end_is_told_though_a_key_beside_it_is_foreign(
    redis_brokerage: OnRedis, slot: str, how: str, is_counter: bool
):
    """Its webhook is queued and its client hears of it. A repeated call would find the job ended."""
    with closing(redis_brokerage.connect()) as broker, redis_brokerage.server.client() as client:
        job = publication(slot, reply=queues.reply_key(slot, "c"), webhook="https://example.com/hook")
        broker.publish(slot, [job], ROOMY)
        broker.job_record(job.job_id, subscribe=True)
        if is_counter:
            client.hset(queues.flow_key(slot), "t:acme", "no number")
        else:
            overwrite(client, queues.events_key(job.job_id))
        if how == "cancel":
            assert broker.cancel(job.job_id, "acme", b"end") is CancelOutcome.CANCELLED
        elif how == "dead letter":
            (delivery,) = claim(broker, "w", slot)
            assert broker.dead_letter("w", delivery, "poison", job_id=job.job_id, sealed=b"end")
        else:
            (entry,) = broker.waiting(slot, Priority.NORMAL, b"", 9, 64)
            withdrawal = Withdrawal(entry.entry_id, job.job_id, "acme", b"end")
            assert broker.withdraw(slot, Priority.NORMAL, [withdrawal], TTL_MS) == 1
        assert broker.count_webhooks(slot).waiting == 1
        assert [entry.fields[1][1:] for entry in broker.read({job.reply: "0-0"}, 0)] == [b"-end"]


@pytest.mark.parametrize("what", ["usage", "flow"])
@pytest.mark.parametrize("value", ["no number", "007", "-0", str(2**63 - 1)])
def test_only_the_hash_with_the_bad_counter_is_quarantined(redis_brokerage: OnRedis, slot: str, what: str, value: str):
    """Redis does not name it. The other one has the jobs in flight, or what an account has used."""
    with closing(redis_brokerage.connect()) as broker, redis_brokerage.server.client() as client:
        paid = replace(publication(slot), account="k1")
        assert broker.publish(slot, [paid], ROOMY)[0].outcome == "accepted"
        (month,) = {field.partition(b":")[2] for field in client.hgetall(queues.usage_key(slot))}
        if what == "usage":
            client.hset(queues.usage_key(slot), b"k1:" + month, value)
        else:
            client.hset(queues.flow_key(slot), "t:acme", value)
        for _ in range(2):
            job = replace(publication(slot), account="k1")
            assert broker.publish(slot, [job], ROOMY)[0].outcome == "accepted"
        bad = queues.usage_key(slot) if what == "usage" else queues.flow_key(slot)
        assert [each.key for each in broker.quarantined(slot)] == [bad]


def test_the_oldest_make_room_in_the_quarantine(redis_brokerage: OnRedis, slot: str):
    """It keeps a bounded number of keys of a model. A key that an operator deleted is not listed."""
    with redis_brokerage.server.client() as client, closing(redis_brokerage.connect()) as broker:
        for number in range(QUARANTINE_CAP + 5):
            client.set(queues.flow_key(slot), number)
            broker.quarantine([slot])
        found = broker.quarantined(slot)
        assert len(found) == QUARANTINE_CAP
        assert [client.get(found[index].name) for index in (0, -1)] == [b"5", str(QUARANTINE_CAP + 4).encode()]
        assert {each.kind for each in found} == {"string"}
        client.unlink(found[0].name)
        assert broker.quarantined(slot) == found[1:]
        (last,) = [each for each in broker.take_quarantined() if each == found[-1]]
        assert (last.key, queues.slot_in(last.key)) == (queues.flow_key(slot), slot)
        assert broker.take_quarantined() == []


def test_a_user_who_may_not_rename_is_told(redis_brokerage: OnRedis, slot: str):
    """A producer gets BrokerDamaged with the groups of keys; a look at a job says that there is none."""
    with redis_brokerage.server.client() as client, closing(redis_brokerage.connect()) as broker:
        (job_id,) = publish(broker, slot)
        client.execute_command("ACL", "SETUSER", "poor", "on", ">pw", "~*", "&*", "+@all", "-rename")
        url = redis_brokerage.server.url.replace("unix://", "unix://poor:pw@")
        try:
            with closing(RedisStreams.from_url(url)) as poor:
                overwrite(client, queues.record_key(job_id))
                assert poor.job_record(job_id) is None
                assert poor.job_records([job_id]) == [None]
                overwrite(client, queues.flow_key(slot))
                with pytest.raises(BrokerDamaged, match=r"\{\*\}:flow \(hash\).*`penstock doctor` shows it"):
                    poor.publish(slot, [publication(slot)], ROOMY)
                broker.quarantine([slot])
                assert poor.publish(slot, [publication(slot)], ROOMY)[0].outcome == "accepted"
        finally:
            client.execute_command("ACL", "DELUSER", "poor")


def test_the_store_of_model_states_makes_its_hashes_anew(redis_brokerage: OnRedis, slot: str):
    """For any prefix; the bytes are in the quarantine of keys without a model."""
    with redis_brokerage.server.client() as client, closing(redis_brokerage.connect()) as broker:
        store = StateStore.from_url(redis_brokerage.server.url, f"state-{slot}")
        for key in (f"state-{slot}:wanted", f"state-{slot}:loaded"):
            client.set(key, FOREIGN)
        store.put(DesiredVersion(slot, "1"))
        store.report("w", {"models": {}})
        assert list(store.desired()) == [f"{slot}/1"]
        assert list(store.loaded()) == ["w"]
        store.close()
        assert {each.key for each in broker.quarantined()} >= {f"state-{slot}:wanted", f"state-{slot}:loaded"}
