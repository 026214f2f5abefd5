"""Deliveries to a real receiver over HTTP: success, failure, patience with slow hosts, and an end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec import structs

from penstock.producers.webhooks.delivery import Deliverer, DelivererLimits
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.broker.webhooks import Webhook, WebhookCounts
from penstock.registry.envelope import Keyring
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.webhook_secrets import new_secret, parse_secrets
from penstock.registry.webhook_target import sealed_target
from penstock.registry.webhooks.address import AddressRules
from penstock.registry.webhooks.request import Requests
from penstock.registry.webhooks.schedule import PAUSES_S
from tests.conformance.jobs import ROOMY, claim, commit_of, publication, settle
from tests.receiver import HANG, Answering, Receiver, Reply, verify

SECRET = new_secret()
UNSIGNED = Keyring.parse(None)
SIGNED = Keyring.parse("k:" + "A" * 43 + "=")
LOOPBACK = AddressRules(["127.0.0.0/8"])
SLOT = "double"


class Clock:
    """The broker's clock, and that of the deliverer."""

    now_s = 1_763_650_000.0

    def __call__(self) -> float:
        return self.now_s


class Heard:
    """What the metrics heard."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.counts: dict[str, WebhookCounts] = {}

    def webhook_tried(self, model: str, outcome: str) -> None:
        self.outcomes.append(outcome)

    def webhooks_counted(self, model: str, counts: WebhookCounts) -> None:
        self.counts[model] = counts


class Office:
    """A broker with jobs that have ended, and a deliverer that takes one turn at a time."""

    def __init__(self) -> None:
        self.clock, self.heard = Clock(), Heard()
        self.broker = MemoryBroker(self.clock)

    def ended(self, *targets: str, slot: str = SLOT) -> list[str]:
        """Jobs with these webhooks that have completed; their ids."""
        jobs = [publication(slot, webhook=target) for target in targets]
        self.broker.publish(slot, jobs, ROOMY)
        settle(self.broker, "w", *map(commit_of, claim(self.broker, "w", slot)))
        return [job.job_id for job in jobs]

    def turns(
        self,
        count: int = 1,
        *,
        rules: AddressRules = LOOPBACK,
        keyring: Keyring = UNSIGNED,
        limits: DelivererLimits | None = None,
        timeout_s: float = 30,
        meanwhile: Callable[[], None] = lambda: None,
        broker: Any = None,
    ) -> None:
        """So many turns; `meanwhile` is called in each, while its tries are under way. All have ended afterwards."""

        async def run() -> None:
            requests = Requests(rules, timeout_s=timeout_s)
            deliverer = Deliverer(
                broker or self.broker,
                requests,
                keyring=keyring,
                keys=parse_secrets(SECRET),
                listener=self.heard,
                limits=limits,
                now_s=self.clock,
                jitter=lambda: 0.0,
            )
            for _ in range(count):
                await deliverer.turn()
                await asyncio.to_thread(meanwhile)
            await deliverer.join()
            over = asyncio.Event()
            over.set()
            await deliverer.run(over)

        asyncio.run(run())

    @property
    def waiting(self) -> list[Webhook]:
        """Those that are not delivered yet."""
        return self.broker.list_webhooks(SLOT, dead=False)

    @property
    def dead(self) -> list[Webhook]:
        """Those that were given up."""
        return self.broker.list_webhooks(SLOT, dead=True)


@pytest.fixture
def office() -> Office:
    """One for each test."""
    return Office()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """It answers 200."""
    with Receiver() as found:
        yield found


def _in_turn(*replies: Reply) -> Answering:
    left = list(replies)
    return lambda call: left.pop(0) if len(left) > 1 else left[0]


def test_ended_job_is_told_of_once(office: Office, receiver: Receiver):
    """A signed event that names the job and nothing of its inputs or outputs; then the broker has forgotten it."""
    (job_id,) = office.ended(receiver.url("/hook?a=1"))
    office.turns(3)
    (call,) = receiver.calls
    assert verify(call, SECRET)
    assert call.path == "/hook?a=1"
    assert call.event["type"] == "job.completed"
    assert call.event["data"] == {"id": job_id, "model": SLOT, "status": "completed"}
    assert call.id == call.event["id"]
    assert office.waiting == office.dead == []
    assert office.heard.outcomes == ["delivered"]


def test_failed_try_is_repeated_with_the_same_id(office: Office):
    """500, then 200: after the first pause of the schedule, with a timestamp of its own."""
    with Receiver(_in_turn(Reply(500), Reply(200))) as receiver:
        office.ended(receiver.url())
        office.turns(2)
        (waiting,) = office.waiting
        assert (waiting.tries, waiting.error) == (1, "the receiver answered 500")
        assert waiting.due_ms == int((office.clock.now_s + PAUSES_S[0]) * 1000)
        office.clock.now_s += PAUSES_S[0] - 0.1
        office.turns()
        assert len(receiver.calls) == 1
        office.clock.now_s += 0.1
        office.turns()
    first, second = receiver.calls
    assert first.id == second.id
    assert first.body == second.body
    assert int(second.headers["webhook-timestamp"]) - int(first.headers["webhook-timestamp"]) == PAUSES_S[0]
    assert verify(second, SECRET)
    assert office.heard.outcomes == ["failed", "delivered"]
    assert office.waiting == office.dead == []


def test_gone_receiver_ends_it_at_once(office: Office):
    """410: dead, with the reason; a replay calls again."""
    with Receiver(_in_turn(Reply(410), Reply(200))) as receiver:
        office.ended(receiver.url())
        office.turns(2)
        (dead,) = office.dead
        assert dead.error == "the receiver answered 410: gone"
        assert office.waiting == []
        office.broker.replay_webhook(SLOT, dead.id)
        office.turns()
    assert [call.id for call in receiver.calls] == [dead.id] * 2
    assert office.heard.outcomes == ["dead", "delivered"]
    assert office.dead == []


def test_redirect_is_a_failure(office: Office, receiver: Receiver):
    """The other place hears nothing."""
    with Receiver(lambda call: Reply(307, {"Location": receiver.url()})) as redirecting:
        office.ended(redirecting.url())
        office.turns()
    assert receiver.calls == []
    assert [webhook.error for webhook in office.waiting] == ["the receiver answered 307: redirects are not followed"]


def test_retry_after_is_respected(office: Office):
    """The next try is not before it."""
    with Receiver(lambda call: Reply(503, {"Retry-After": "900"})) as receiver:
        office.ended(receiver.url())
        office.turns()
    assert [webhook.due_ms for webhook in office.waiting] == [int((office.clock.now_s + 900) * 1000)]


def test_tries_end_after_the_schedule(office: Office):
    """Eleven tries over days, then dead with the last reason."""
    with Receiver(lambda call: Reply(500)) as receiver:
        office.ended(receiver.url())
        for pause_s in (*PAUSES_S, 0):
            office.turns()
            office.clock.now_s += pause_s
        office.turns()
    assert len(receiver.calls) == len(PAUSES_S) + 1
    (dead,) = office.dead
    assert (dead.tries, dead.error) == (len(PAUSES_S) + 1, "the receiver answered 500")
    assert office.waiting == []


def test_tries_of_killed_deliverers_make_no_pause_longer(office: Office):
    """Two deliverers die with it; the first failure that is seen has the first pause."""
    with Receiver(lambda call: Reply(500)) as receiver:
        office.ended(receiver.url())
        for _ in range(2):
            assert len(office.broker.take_webhooks(SLOT, 8, 1000)) == 1
            office.clock.now_s += 2
        office.turns()
    (webhook,) = office.waiting
    assert (webhook.tries, webhook.failures) == (3, 1)
    assert webhook.due_ms == int((office.clock.now_s + PAUSES_S[0]) * 1000)


def test_hanging_receiver_does_not_stop_the_others(office: Office, receiver: Receiver):
    """Only so many tries wait for it; the others of its webhooks go back without a try, and other hosts are served."""
    begun = threading.Semaphore(0)

    def hang(call: object) -> Reply:
        begun.release()
        return HANG

    with Receiver(hang) as hanging:
        office.ended(*[hanging.url()] * 10, *[receiver.url()] * 3)

        def wait() -> None:
            for _ in range(2):
                assert begun.acquire(timeout=180)

        office.turns(limits=DelivererLimits(per_host=2, in_flight=64), timeout_s=3, meanwhile=wait)
        assert len(hanging.calls) == 2
    # Of the healthy receiver, too, only two tries ran at a time.
    assert len(receiver.calls) == 2
    tried = sorted(webhook.tries for webhook in office.waiting)
    assert tried == [0] * 9 + [1] * 2
    assert {webhook.error for webhook in office.waiting if webhook.tries} == {"no answer within 3 s"}
    office.clock.now_s += 0.5
    office.turns(limits=DelivererLimits(per_host=64))
    assert len(receiver.calls) == 3


def test_slow_receiver_is_waited_for(office: Office):
    """A 200 that comes late, and within the time-out, is a delivery; nothing is sent twice meanwhile."""
    answering = threading.Event()

    def late(call: object) -> Reply:
        assert answering.wait(180)
        return Reply(200)

    with Receiver(late) as receiver:
        office.ended(receiver.url())
        office.turns(3, timeout_s=60, meanwhile=answering.set)
    assert len(receiver.calls) == 1
    assert office.heard.outcomes == ["delivered"]


def test_address_that_is_not_allowed_is_dead_at_once(office: Office, receiver: Receiver):
    """The URL names a loopback address, and the operator has not allowed it: nothing is sent."""
    office.ended(receiver.url())
    office.turns(rules=AddressRules())
    assert receiver.calls == []
    (dead,) = office.dead
    assert dead.error == "the address of 127.0.0.1 is not a public one, and webhooks.allow does not name it"


def test_only_signed_urls_are_called(office: Office, receiver: Receiver):
    """Whoever can write to the broker and has no key cannot have a URL called: without, with another job's, with a
    changed or a stranger's signature."""
    url = receiver.url()
    job = publication(SLOT)
    good = sealed_target(url, job.job_id, SIGNED)
    stranger = sealed_target(url, job.job_id, Keyring.parse("k:" + "B" * 43 + "="))
    forged = [url, f"{url} ", good.replace("/hook", "/other"), stranger, good[:-1] + ("0" if good[-1] != "0" else "1")]
    office.ended(*forged, good)
    office.turns(keyring=SIGNED)
    assert receiver.calls == []
    assert len(office.dead) == len(forged) + 1
    assert {webhook.error.partition(".")[0] for webhook in office.dead} == {
        "a webhook whose URL is not signed with a key of its deliverer"
    }
    office.broker.publish(SLOT, [structs.replace(job, webhook=good)], ROOMY)
    settle(office.broker, "w", *map(commit_of, claim(office.broker, "w", SLOT)))
    office.turns(keyring=SIGNED)
    assert [call.event["data"]["id"] for call in receiver.calls] == [job.job_id]


def test_url_that_no_client_sends_is_dead(office: Office):
    """A record that was written by other means."""
    office.ended("gopher://example.com/", "https://user:password@example.com/", "nonsense")
    office.turns()
    assert len(office.dead) == 3
    assert not any("user:" in webhook.error or "example" in webhook.error for webhook in office.dead)


def test_broker_that_is_away_loses_nothing(office: Office, receiver: Receiver):
    """The outcome of a try is written when the broker is back."""

    class Flaky:
        failures = 2

        def __getattr__(self, name: str) -> Any:
            if name == "webhook_delivered" and Flaky.failures:
                Flaky.failures -= 1
                raise BrokerUnavailable("away")
            return getattr(office.broker, name)

    office.ended(receiver.url())
    office.turns(broker=Flaky())
    assert len(receiver.calls) == 1
    assert office.waiting == []


def test_event_that_ends_its_deliverers_is_given_up(office: Office, receiver: Receiver):
    """Its tries begin and are never settled: after three times the schedule it is dead."""
    office.ended(receiver.url())
    for _ in range(3 * len(PAUSES_S)):
        assert len(office.broker.take_webhooks(SLOT, 8, 1000)) == 1
        office.clock.now_s += 2
    office.turns()
    assert receiver.calls == []
    assert [dead.error for dead in office.dead] == ["none of its tries ended: its deliverers died"]


def test_every_model_has_its_turn(office: Office, receiver: Receiver):
    """A flood of one model's webhooks leaves room for another's."""
    office.ended(*[receiver.url()] * 20)
    office.ended(receiver.url("/other"), slot="other")
    office.turns(2, limits=DelivererLimits(in_flight=4, per_host=64))
    assert "/other" in [call.path for call in receiver.calls]


def test_metrics_hear_of_what_waits(office: Office, receiver: Receiver):
    """Waiting, dead, and the age of the oldest."""
    office.ended(receiver.url(), receiver.url())
    office.clock.now_s += 90

    async def report() -> None:
        deliverer = Deliverer(
            office.broker, Requests(LOOPBACK), keyring=UNSIGNED, keys=parse_secrets(SECRET), listener=office.heard
        )
        stopping = asyncio.Event()
        running = asyncio.create_task(deliverer.run(stopping))
        while SLOT not in office.heard.counts:
            await asyncio.sleep(0.01)
        stopping.set()
        await running

    asyncio.run(asyncio.wait_for(report(), 60))
    assert office.heard.counts[SLOT] == (2, 0, 90.0)


def test_stop_lets_a_try_end(office: Office):
    """What is under way is answered and settled; nothing new is taken."""
    begun, answering = threading.Event(), threading.Event()

    def late(call: object) -> Reply:
        begun.set()
        assert answering.wait(180)
        return Reply(200)

    async def run(receiver: Receiver) -> None:
        deliverer = Deliverer(
            office.broker,
            Requests(LOOPBACK),
            keyring=UNSIGNED,
            keys=parse_secrets(SECRET),
            listener=office.heard,
            # No room beside the first one: a turn that is under way at the stop takes nothing.
            limits=DelivererLimits(in_flight=1),
        )
        stopping = asyncio.Event()
        running = asyncio.create_task(deliverer.run(stopping))
        assert await asyncio.to_thread(begun.wait, 60)
        stopping.set()
        office.ended(receiver.url("/later"))
        await asyncio.sleep(0)
        answering.set()
        await running

    with Receiver(late) as receiver:
        office.ended(receiver.url())
        asyncio.run(asyncio.wait_for(run(receiver), 60))
    assert [call.path for call in receiver.calls] == ["/hook"]
    assert office.heard.outcomes == ["delivered"]
    assert len(office.waiting) == 1
