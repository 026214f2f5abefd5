"""The deliverer of webhooks: takes those that are due, calls their receivers, and settles each try in the broker.

    take (a lease) -> room at the receiver? --no--> due again soon; no try is counted
                            | yes
                     one POST -> delivered | later, after a pause of schedule.py | dead

Any number of deliverers may run. What a killed one had taken is due again after the lease, so an event may come twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol

from penstock.producers.webhooks.event import event_of
from penstock.registry.backoff import backoff_delay_s
from penstock.registry.broker.webhooks import Webhook, WebhookCounts, WebhookEnd
from penstock.registry.envelope import Keyring
from penstock.registry.errors import BadSignature, BrokerUnavailable, InvalidInput
from penstock.registry.webhook_target import opened_target
from penstock.registry.webhooks.request import Requests, host_of
from penstock.registry.webhooks.schedule import PAUSES_S, Delivered, Failed, pause_s, verdict
from penstock.registry.webhooks.signing import body_of, headers_of

__all__ = ["Deliverer", "DelivererLimits", "DeliveryListener"]

_TRIES_PER_LEASE: Final = 2
"""The lease is as long as so many tries: the time after the first is for settling it."""
_GRACE_S: Final = 10.0
_MOST_BEGUN: Final = 3 * len(PAUSES_S)
"""Tries that a webhook may begin: an event that ends each of its deliverers must not come back for ever."""
_RETRY_S: Final = 0.5
_REPORT_S: Final = 5.0
_BROKER_THREADS: Final = 4
_PER_TAKE: Final = 64
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.2, 300.0
_UNKNOWN_S: Final = 0.5
logger = logging.getLogger("penstock.webhooks")


class DeliveryListener(Protocol):
    """What the metrics hear of deliveries."""

    def webhook_tried(self, model: str, outcome: str) -> None:
        """A try ended: delivered, failed (another one follows) or dead."""

    def webhooks_counted(self, model: str, counts: WebhookCounts) -> None:
        """The webhooks of a model at present."""


@dataclass(frozen=True, slots=True)
class DelivererLimits:
    """in_flight: tries at a time. per_host: those at one receiver. poll_s: the pause while nothing is due."""

    in_flight: int = 64
    per_host: int = 4
    poll_s: float = 0.5


@dataclass(slots=True)
class _Receiver:
    """The tries at one receiver now. `turned_away`: webhooks since its last try ended that found no room there."""

    running: int = 0
    turned_away: int = 0
    last_s: float = _UNKNOWN_S

    def wait_s(self, per_host: int) -> float:
        """When the next webhook that finds no room may come back."""
        self.turned_away += 1
        return min(max(_SHORTEST_WAIT_S, self.last_s * self.turned_away / per_host), _LONGEST_WAIT_S)


class Deliverer:
    """Delivers webhooks until it is told to stop. Belongs to one event loop.

    keyring: verifies the URLs. keys: sign the events, see event.py. now_s, jitter: unix time, and a number in [0, 1).

    Attributes:
        reaches_broker: whether the last turn did.
    """

    def __init__(
        self,
        broker: WebhookEnd,
        requests: Requests,
        *,
        keyring: Keyring,
        keys: tuple[bytes, ...],
        listener: DeliveryListener,
        limits: DelivererLimits | None = None,
        now_s: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.reaches_broker = False
        self._broker = broker
        self._requests = requests
        self._keyring = keyring
        self._keys = keys
        self._listener = listener
        self._limits = limits or DelivererLimits()
        self._now_s = now_s
        self._jitter = jitter
        self._lease_s = requests.timeout_s * _TRIES_PER_LEASE
        self._receivers: dict[str, _Receiver] = {}
        self._tries: set[asyncio.Task[None]] = set()
        self._outcomes: Counter[str] = Counter()
        self._first = 0
        # Not the loop's own threads: a resolver that hangs occupies those.
        self._threads = ThreadPoolExecutor(_BROKER_THREADS, "webhooks")

    async def run(self, stopping: asyncio.Event) -> None:
        """Deliver until `stopping` is set. Tries under way then have ten seconds; others may repeat them."""
        failures, report_at = 0, 0.0
        while not stopping.is_set():
            try:
                if time.monotonic() >= report_at:
                    await self._report()
                    report_at = time.monotonic() + _REPORT_S
                found = await self.turn()
                failures = 0
                self.reaches_broker = True
            except BrokerUnavailable as error:
                failures += 1
                found = 0
                self.reaches_broker = False
                if failures == 1:
                    logger.warning("webhooks wait: %s", error)
            pause = backoff_delay_s(failures, self._limits.poll_s, 10.0, self._jitter()) if failures else 0.0
            await self._wait(stopping, pause or (0.0 if found else self._limits.poll_s))
        await self._finish()

    async def turn(self) -> int:
        """Take what is due, and begin its tries. Returns how many were taken. Raises BrokerUnavailable."""
        taken, slots = 0, await self._ask(self._broker.webhook_slots)
        # Each turn begins with another model, so that the webhooks of one do not keep those of the others waiting.
        self._first = (self._first + 1) % max(1, len(slots))
        for slot in [*slots[self._first :], *slots[: self._first]]:
            room = min(self._limits.in_flight - len(self._tries), _PER_TAKE)
            if room > 0:
                webhooks = await self._ask(self._broker.take_webhooks, slot, room, int(self._lease_s * 1000))
                taken += len(webhooks)
                await asyncio.gather(*map(self._begin, webhooks))
        return taken

    async def join(self) -> None:
        """Wait for the tries under way."""
        while self._tries:
            await asyncio.wait(set(self._tries))

    async def _begin(self, webhook: Webhook) -> None:
        if webhook.tries > _MOST_BEGUN:
            await self._settle(webhook, "", Failed("none of its tries ended: its deliverers died", is_final=True))
            return
        try:
            url = opened_target(webhook.target, webhook.job_id, self._keyring)
        except (BadSignature, InvalidInput) as error:
            await self._settle(webhook, "", Failed(str(error), is_final=True))
            return
        host = host_of(url)
        receiver = self._receivers.setdefault(host, _Receiver())
        if receiver.running >= self._limits.per_host:
            wait_ms = int(receiver.wait_s(self._limits.per_host) * 1000)
            await self._ask(self._broker.postpone_webhook, webhook, wait_ms, webhook.error, counts=False)
            return
        receiver.running += 1
        task = asyncio.create_task(self._deliver(webhook, url, host, receiver))
        self._tries.add(task)
        task.add_done_callback(self._tries.discard)

    async def _deliver(self, webhook: Webhook, url: str, host: str, receiver: _Receiver) -> None:
        begun = time.monotonic()
        try:
            body = body_of(event_of(webhook))
            answer = await self._requests.post(url, headers_of(webhook.id, body, self._keys, self._now_s()), body)
        finally:
            receiver.running -= 1
            receiver.turned_away, receiver.last_s = 0, time.monotonic() - begun
            if not receiver.running:
                self._receivers.pop(host, None)
        result = answer if isinstance(answer, Failed) else verdict(answer, self._now_s())
        await self._settle(webhook, host, result)

    async def _settle(self, webhook: Webhook, host: str, result: Delivered | Failed) -> None:
        """Write how a try ended. While the broker is away it is repeated, until the lease has lapsed."""
        until = time.monotonic() + self._lease_s
        while True:
            try:
                outcome = await self._write(webhook, result)
                break
            except BrokerUnavailable as error:
                if time.monotonic() + _RETRY_S > until:
                    logger.warning("a try is not settled, and is repeated: %s", error, extra={"webhook": webhook.id})
                    return
                await asyncio.sleep(_RETRY_S)
        self._outcomes[outcome] += 1
        self._listener.webhook_tried(webhook.slot, outcome)
        if isinstance(result, Failed):
            facts = {"webhook": webhook.id, "job_id": webhook.job_id, "receiver": host, "tries": webhook.tries}
            level = logging.WARNING if outcome == "dead" else logging.INFO
            logger.log(level, "webhook %s: %s", outcome, result.error, extra=facts)

    async def _write(self, webhook: Webhook, result: Delivered | Failed) -> str:
        """Returns the outcome: delivered, failed or dead."""
        if isinstance(result, Delivered):
            await self._ask(self._broker.webhook_delivered, webhook)
            return "delivered"
        pause = None if result.is_final else pause_s(webhook.failures + 1, self._jitter(), result.least_pause_s)
        if pause is None:
            await self._ask(self._broker.give_up_webhook, webhook, result.error)
            return "dead"
        await self._ask(self._broker.postpone_webhook, webhook, int(pause * 1000), result.error)
        return "failed"

    async def _report(self) -> None:
        """The metrics, and one line of the log when tries ended since the last one."""
        waiting = 0
        for slot in await self._ask(self._broker.webhook_slots):
            counts = await self._ask(self._broker.count_webhooks, slot)
            self._listener.webhooks_counted(slot, counts)
            waiting += counts.waiting
        if self._outcomes:
            logger.info("webhooks", extra={**self._outcomes, "waiting": waiting})
            self._outcomes.clear()

    async def _wait(self, stopping: asyncio.Event, seconds: float) -> None:
        """Wait for the stop, and where all tries are under way, for the end of one."""
        is_full = len(self._tries) >= self._limits.in_flight
        if not is_full and not seconds:
            await asyncio.sleep(0)
            return
        stop = asyncio.create_task(stopping.wait())
        waiting = {stop, *self._tries} if is_full else {stop}
        await asyncio.wait(waiting, timeout=seconds or None, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()

    async def _finish(self) -> None:
        if self._tries:
            logger.info("stopping", extra={"in_flight": len(self._tries)})
            await asyncio.wait(set(self._tries), timeout=_GRACE_S)
        for task in set(self._tries):
            task.cancel()
        await asyncio.gather(*self._tries, return_exceptions=True)
        self._threads.shutdown(wait=False)

    async def _ask(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """A call of the broker, which blocks, in another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: call(*arguments, **options))
