"""Rate limits and quotas: what a request costs on which meters, and one call of Redis for all requests of a turn.

    Owner, route -> charges (key, tenant, address, route; minute, day, month; requests, tokens)
    admit -- with those of other tasks --> spend.lua -> readings -> the headers RateLimit-Policy and RateLimit
                                                   `-> RateLimited with the seconds until there is room
    further jobs or tokens -> totals, which replace the charges of the entry: they are admitted as a whole, or cost
                              nothing

The counts are in Redis only: several processes together admit as many requests as the limit says, and no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

from penstock.registry.api_keys import KeyLimits
from penstock.registry.broker.meters import TOKENS, Charge, Lines, Meter, Reading, Spent, WindowKind, account_subject
from penstock.registry.errors import InvalidInput, RateLimited
from penstock.registry.queues import meter_key
from penstock.registry.settings_sections import RateLimitConfig

__all__ = ["Owner", "RateLimits", "SpendAll", "admitted", "check_attainable", "headers_of", "totals"]

SpendAll: TypeAlias = Callable[[Sequence[Sequence[Charge]], Mapping[int, Lines]], Awaitable[list[Spent]]]
_Waiting: TypeAlias = tuple[Sequence[Charge], Lines | None, asyncio.Future[Spent]]
_MOST_AT_ONCE: Final = 128
_PER: Final[dict[WindowKind, str]] = {"m": "minute", "d": "day", "M": "month"}
_SECONDS: Final[dict[WindowKind, int]] = {"m": 60, "d": 86_400}


class Owner(NamedTuple):
    """Whom a request is charged to. key_id, tenant: empty without a key; then the address pays."""

    key_id: str
    tenant: str
    limits: KeyLimits
    address: str


class RateLimits:
    """The limits of one process. spend: see AsyncRedisStreams.spend. For one event loop."""

    def __init__(self, config: RateLimitConfig, spend: SpendAll) -> None:
        self._config = config
        self._by_route = config.by_route
        self._spend = spend
        self._waiting: list[_Waiting] = []
        self._sending: asyncio.Task[None] | None = None

    def charges(self, owner: Owner, route: str) -> tuple[Charge, ...]:
        """What one request costs; empty where nothing limits it."""
        own, config = owner.limits, self._config
        who = account_subject(owner.key_id) if owner.key_id else f"address:{owner.address}"
        rate = own.requests_per_minute or (config.requests_per_minute if config.enabled else 0)
        found = [Charge(Meter("requests", meter_key(who, "minute"), "m", rate), 1)] if rate else []
        if own.requests_per_day:
            found.append(Charge(Meter("day", meter_key(who, "day"), "d", own.requests_per_day), 1))
        if own.requests_per_month:
            found.append(Charge(Meter("month", meter_key(who, "month"), "M", own.requests_per_month), 1))
        if own.tokens_per_minute:
            found.append(Charge(Meter(TOKENS, meter_key(who, "tokens"), "m", own.tokens_per_minute), 0))
        if not config.enabled:
            return tuple(found)
        if owner.tenant and (rate := config.tenant_requests_per_minute):
            found.append(Charge(Meter("tenant", meter_key(owner.tenant, "tenant"), "m", rate), 1))
        if rate := config.address_requests_per_minute:
            found.append(Charge(Meter("address", meter_key(owner.address, "address"), "m", rate), 1))
        if rate := self._by_route.get(route, 0):
            found.append(Charge(Meter("route", meter_key(f"{who}:{route}", "route"), "m", rate), 1))
        return tuple(found)

    def line_charges(self, owner: Owner) -> tuple[Charge, ...]:
        """What a line of a batch costs its key and tenant; the address of its caller has gone.

        Lines take at most a half of each limit per minute: the other half is left to single requests.
        """
        charges = self.charges(owner._replace(address=""), "")
        return tuple(Charge(_for_lines(meter), cost) for meter, cost, _ in charges if meter.name != "address")

    async def admit_most(self, charges: Sequence[Charge], tokens: Sequence[int], lines: Lines) -> int:
        """Charges as many lines of a batch as there is room for, from the first one on. tokens: of each, 0: unknown.

        A line of more tokens than the limit is charged as many as that. Raises RateLimited when there is no room
        for the first one, and BrokerUnavailable.
        """
        count = len(tokens)
        while True:
            costs = [Charge(meter, _cost_of(meter, tokens[:count])) for meter, *_ in charges]
            try:
                await self.admit(costs, Lines(lines.batch_id, lines.numbers[:count]))
                return count
            except RateLimited as refused:
                count = min(_fitting(reading, tokens[:count]) for reading in refused.readings)
                if not count:
                    raise

    async def admit(self, charges: Sequence[Charge], lines: Lines | None = None) -> tuple[Reading, ...]:
        """Charges one request, or lines of a batch. Raises RateLimited, and then nothing is charged; and
        BrokerUnavailable."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Spent] = loop.create_future()
        self._waiting.append((charges, lines, answer))
        if self._sending is None:
            self._sending = loop.create_task(self._send_all())
        spent = await answer
        if not spent.is_admitted:
            raise _refusal(charges, spent.readings)
        return spent.readings

    async def _send_all(self) -> None:
        """One call is out at a time; the next one takes all that waits."""
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_MOST_AT_ONCE], self._waiting[_MOST_AT_ONCE:]
                await self._send(batch)
        finally:
            self._sending = None

    async def _send(self, batch: Sequence[_Waiting]) -> None:
        try:
            lines = {place: each for place, (_, each, _) in enumerate(batch) if each is not None}
            answers = await self._spend([charges for charges, _, _ in batch], lines)
        except Exception as error:  # every error belongs to the tasks that await an answer
            for _, _, waiting in batch:
                if not waiting.done():
                    waiting.set_exception(error)
            return
        for (_, _, waiting), answer in zip(batch, answers, strict=True):
            if not waiting.done():
                waiting.set_result(answer)


def admitted(charges: Sequence[Charge], readings: Sequence[Reading]) -> tuple[Charge, ...]:
    """The charges of an admitted request, as those that further costs replace. readings: those of its admission."""
    return tuple(
        charge._replace(replaces=reading.second if charge.cost else 0)
        for charge, reading in zip(charges, readings, strict=True)
    )


def totals(charges: Sequence[Charge], requests: int, tokens: int) -> list[Charge]:
    """The costs of an admitted request with further requests and tokens; [] where no meter counts them."""
    further = [tokens if meter.name == TOKENS else requests for meter, *_ in charges]
    if not any(further):
        return []
    costs = [charge._replace(cost=charge.cost + more) for charge, more in zip(charges, further, strict=True)]
    return [charge for charge in costs if charge.cost]


def check_attainable(charges: Sequence[Charge]) -> None:
    """Raises InvalidInput for costs above a whole limit: a retry is refused at any time."""
    beyond = [charge for charge in charges if charge.cost > charge.meter.limit]
    if not beyond:
        return
    meter, cost, _ = min(beyond, key=lambda charge: charge.meter.limit)
    noun = "tokens" if meter.name == TOKENS else "requests"
    raise InvalidInput(
        f"The request counts as {cost} {noun}. Expected at most {meter.limit}: the limit per {_PER[meter.kind]} "
        f"({meter.name})"
    ) from None


def _for_lines(meter: Meter) -> Meter:
    return meter._replace(limit=max(1, meter.limit // 2)) if meter.kind == "m" else meter


def _cost_of(meter: Meter, tokens: Sequence[int]) -> int:
    return sum(min(each, meter.limit) for each in tokens) if meter.name == TOKENS else len(tokens)


def _fitting(reading: Reading, tokens: Sequence[int]) -> int:
    """How many of the requests the meter has room for."""
    meter, left = reading.meter, reading.left
    if meter.name != TOKENS:
        return min(left, len(tokens))
    if not left:
        return 0
    sums = accumulate(min(each, meter.limit) for each in tokens)
    return sum(found <= left for found in sums)


def headers_of(readings: Sequence[Reading]) -> list[tuple[bytes, bytes]]:
    """`RateLimit-Policy` and `RateLimit` (draft-ietf-httpapi-ratelimit-headers-09); none without a limit."""
    if not readings:
        return []
    policies = ", ".join(f'"{meter.name}";q={meter.limit}{_window(meter.kind)}' for meter, *_ in readings)
    rates = ", ".join(f'"{meter.name}";r={left};t={reset_s}' for meter, left, reset_s, _ in readings)
    return [(b"ratelimit-policy", policies.encode("ascii")), (b"ratelimit", rates.encode("ascii"))]


def _window(kind: WindowKind) -> str:
    seconds = _SECONDS.get(kind)
    return f";w={seconds}" if seconds else ""


def _refusal(charges: Sequence[Charge], readings: Sequence[Reading]) -> RateLimited:
    asked = zip(charges, readings, strict=True)
    spent = [reading for charge, reading in asked if reading.left < max(charge.cost, 1)]
    meter, _, reset_s, _ = max(spent, key=lambda reading: reading.reset_s)
    limit = f"{meter.limit} per {_PER[meter.kind]} ({meter.name})"
    return RateLimited(f"The limit of {limit} is spent. Expected a retry after {reset_s} s", reset_s, readings)
