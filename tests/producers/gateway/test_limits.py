"""Limits of keys, tenants, addresses, routes: which meters a request has, what its headers say; one call for many."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from websockets.asyncio.client import connect

from penstock.producers.gateway.limits import Owner, RateLimits, admitted, check_attainable, headers_of, totals
from penstock.registry.api_keys import KeyLimits
from penstock.registry.broker.meters import Charge, Lines, Meter, Reading, Spent
from penstock.registry.errors import BrokerUnavailable, InvalidInput, RateLimited
from penstock.registry.queues import meter_key
from penstock.registry.settings_sections import RateLimitConfig
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.rpc.conftest import INFER, Caller, infer_request

OF_KEY = KeyLimits(requests_per_minute=5, tokens_per_minute=50, requests_per_day=70, requests_per_month=90)
EVERY = RateLimitConfig(
    enabled=True,
    requests_per_minute=11,
    tenant_requests_per_minute=12,
    address_requests_per_minute=13,
    routes=("/v1/jobs=14", "/predict=15"),
)


async def _unused(requests: Any, _lines: Any) -> Any:
    raise AssertionError("no call is made")


def _limits(config: RateLimitConfig, owner: Owner, route: str) -> dict[str, tuple[int, int]]:
    """By meter: (limit, cost of a request)."""
    charges = RateLimits(config, _unused).charges(owner, route)
    assert len({charge.meter.key for charge in charges}) == len(charges)
    return {charge.meter.name: (charge.meter.limit, charge.cost) for charge in charges}


@pytest.mark.parametrize(
    ("config", "owner", "route", "expected"),
    [
        (RateLimitConfig(), Owner("", "", KeyLimits(), "10.0.0.1"), "/v1/jobs", {}),
        (RateLimitConfig(), Owner("k", "acme", KeyLimits(), "10.0.0.1"), "/v1/jobs", {}),
        (
            RateLimitConfig(),
            Owner("k", "acme", OF_KEY, "10.0.0.1"),
            "/v1/jobs",
            {"requests": (5, 1), "day": (70, 1), "month": (90, 1), "tokens": (50, 0)},
        ),
        (
            EVERY,
            Owner("k", "acme", KeyLimits(), "10.0.0.1"),
            "/predict",
            {"requests": (11, 1), "tenant": (12, 1), "address": (13, 1), "route": (15, 1)},
        ),
        (
            EVERY,
            Owner("", "", KeyLimits(), "10.0.0.1"),
            "/v1/models",
            {"requests": (11, 1), "address": (13, 1)},
        ),
        (EVERY, Owner("k", "acme", OF_KEY, "a"), "/v1/jobs", {"requests": (5, 1), "tenant": (12, 1)}),
    ],
)
def test_limits_are_those_of_the_key_or_settings(
    config: RateLimitConfig, owner: Owner, route: str, expected: dict[str, tuple[int, int]]
):
    """enabled, requests_per_minute, tenant_requests_per_minute, address_requests_per_minute, routes; none is read while
    the limits are off, but those of the key."""
    found = _limits(config, owner, route)
    assert {name: found[name] for name in expected} == expected
    assert len(found) == len(expected) or owner.limits == OF_KEY


def test_callers_have_meters_of_their_own():
    """Two keys of one tenant share its meter only; without keys, two addresses share none."""
    limits = RateLimits(EVERY, _unused)

    def keys(owner: Owner) -> set[str]:
        return {charge.meter.key for charge in limits.charges(owner, "/v1/jobs")}

    one, two = (keys(Owner(name, "acme", KeyLimits(), f"10.0.0.{name}")) for name in "12")
    assert [key for key in one & two if not key.endswith(":acme")] == []
    assert len(one & two) == 1
    assert not keys(Owner("", "", KeyLimits(), "a")) & keys(Owner("", "", KeyLimits(), "b"))


class Server:
    """Answers calls when it is told to, and notes how many requests each had."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.open = asyncio.Event()
        self.error: Exception | None = None

    async def spend(self, requests: Sequence[Sequence[Charge]], _lines: Mapping[int, Lines]) -> list[Spent]:
        """See AsyncRedisStreams.spend."""
        self.calls.append(len(requests))
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return [
            Spent(charges[0].cost < 5, tuple(Reading(each.meter, 3, 7) for each in charges)) for charges in requests
        ]


CHARGE = Charge(Meter("requests", "k", "m", 10), 1)


def test_requests_of_one_turn_share_a_call():
    """While a call is out, those that come travel in the next one; each gets its own answer."""

    async def scenario() -> list[int]:
        server = Server()
        limits = RateLimits(RateLimitConfig(), server.spend)
        first = [asyncio.create_task(limits.admit([CHARGE])) for _ in range(10)]
        while not server.calls:
            await asyncio.sleep(0)
        later = [asyncio.create_task(limits.admit([CHARGE._replace(cost=4 + n % 2)])) for n in range(20)]
        await asyncio.sleep(0)
        first[0].cancel()
        server.open.set()
        found = await asyncio.gather(*first, *later, return_exceptions=True)
        assert [type(each).__name__ for each in found] == [
            "CancelledError",
            *["tuple"] * 9,
            *["tuple", "RateLimited"] * 10,
        ]
        await limits.admit([CHARGE])
        return server.calls

    assert asyncio.run(scenario()) == [10, 20, 1]


def test_a_broker_that_is_away_admits_nothing():
    """The error reaches every request of the call, and the next one asks again."""

    async def scenario() -> int:
        server = Server()
        server.open.set()
        server.error = BrokerUnavailable("away")
        limits = RateLimits(RateLimitConfig(), server.spend)
        found = await asyncio.gather(*(limits.admit([CHARGE]) for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in found] == [BrokerUnavailable] * 3
        server.error = None
        assert (await limits.admit([CHARGE]))[0].left == 3
        return len(server.calls)

    assert asyncio.run(scenario()) == 2


def test_further_costs_go_to_the_meters_that_count_them():
    """Jobs of a batch on the meters of requests, tokens on the meter of tokens. The sum replaces the charge of the
    entry on every meter, so that a refusal takes it back; nothing is asked for nothing."""
    charges = RateLimits(RateLimitConfig(), _unused).charges(Owner("k", "acme", OF_KEY, "a"), "/v1/jobs")
    entered = admitted(charges, [Reading(charge.meter, 4, 61, 1000 + place) for place, charge in enumerate(charges)])

    def costs(requests: int, tokens: int) -> list[tuple[str, int, int]]:
        return [(each.meter.name, each.cost, each.replaces) for each in totals(entered, requests, tokens)]

    assert costs(0, 9) == [("requests", 1, 1000), ("day", 1, 1001), ("month", 1, 1002), ("tokens", 9, 0)]
    assert costs(3, 0) == [("requests", 4, 1000), ("day", 4, 1001), ("month", 4, 1002)]
    assert costs(0, 0) == []
    assert totals(entered[:-1], 0, 9) == []


def test_a_cost_above_a_whole_limit_is_no_matter_of_time():
    """The refusal tells the least limit that is exceeded, and the number found. The whole limit is attainable."""
    minute, tokens = Meter("requests", "k", "m", 10), Meter("tokens", "t", "m", 50)
    check_attainable([Charge(minute, 10), Charge(tokens, 50)])
    with pytest.raises(InvalidInput, match=r"counts as 11 requests\. Expected at most 10: the limit per minute"):
        check_attainable([Charge(minute._replace(limit=20), 21), Charge(minute, 11), Charge(tokens, 51)])
    with pytest.raises(
        InvalidInput, match=r"counts as 51 tokens\. Expected at most 50: the limit per minute \(tokens\)"
    ):
        check_attainable([Charge(minute, 10), Charge(tokens, 51)])


def test_the_refusal_names_the_limit_that_lasts_longest():
    """Of two spent limits, waiting for the shorter one would be refused again."""
    charges = [Charge(Meter("requests", "k", "m", 10), 1), Charge(Meter("day", "d", "d", 99), 1)]

    async def spend(requests: object, _lines: object) -> list[Spent]:
        return [Spent(False, (Reading(charges[0].meter, 0, 30), Reading(charges[1].meter, 0, 4000)))]

    with pytest.raises(
        RateLimited, match=r"The limit of 99 per day \(day\) is spent\. Expected a retry after 4000 s"
    ) as e:
        asyncio.run(RateLimits(RateLimitConfig(), spend).admit(charges))
    assert e.value.retry_after_s == 4000


def test_headers_are_those_of_the_draft():
    """Items of structured fields: the name, and its quota, window, rest and reset."""
    readings = [Reading(Meter("requests", "k", "m", 600), 599, 61), Reading(Meter("month", "k", "M", 9), 4, 99)]
    assert headers_of(readings) == [
        (b"ratelimit-policy", b'"requests";q=600;w=60, "month";q=9'),
        (b"ratelimit", b'"requests";r=599;t=61, "month";r=4;t=99'),
    ]
    assert headers_of(()) == []


def test_an_address_has_a_limit_of_its_own(start_gateway: StartGateway):
    """CX-042: behind a proxy, the address is the last one in PENSTOCK_INFERENCE_SERVER_ADDRESS_HEADER."""
    name = uuid.uuid4().hex
    gateway = start_gateway(
        PENSTOCK_INFERENCE_SERVER_ADDRESS_HEADER="X-Real-IP",
        PENSTOCK_INFERENCE_SAFEGUARDS_RATE_LIMIT_ENABLED="true",
        PENSTOCK_INFERENCE_SAFEGUARDS_RATE_LIMIT_REQUESTS_PER_MINUTE="3",
    )
    with gateway.client() as client:
        one, two = (
            [client.get("/v1/models", headers={"X-Real-IP": f"{forged}, {name}{n}"}).status_code for forged in "abcd"]
            for n in range(2)
        )
    assert one == two == [200, 200, 200, 429]


def test_a_forged_address_is_not_believed(stack: GatewayStack, start_gateway: StartGateway):
    """CX-042: without server.address_header the address is that of the connection, whatever a client writes, in every
    protocol; with it no other header counts."""
    limits = {
        "PENSTOCK_INFERENCE_SAFEGUARDS_RATE_LIMIT_ENABLED": "true",
        "PENSTOCK_INFERENCE_SAFEGUARDS_RATE_LIMIT_ADDRESS_REQUESTS_PER_MINUTE": "1000",
    }
    forged = uuid.uuid4().hex
    names = ("x-real-ip", "x-forwarded-for", "forwarded", "x-client-ip", "true-client-ip")
    headers = {name: f"for={forged}" if name == "forwarded" else forged for name in names}

    async def shake(url: str) -> None:
        await (await connect(f"{url.replace('http', 'ws')}/predict/stream", additional_headers=headers)).close()

    plain = start_gateway(**limits)
    with plain.client() as client:
        assert client.get("/v1/models", headers=headers).status_code == 200
    asyncio.run(shake(plain.url))
    caller = Caller(plain.rpc)
    caller.call(INFER, infer_request(), metadata=[*headers.items()])
    caller.channel.close()
    assert {"127.0.0.1"} <= (seen := _addresses(stack))
    assert not [address for address in seen if forged in address]
    behind = start_gateway(**limits, PENSTOCK_INFERENCE_SERVER_ADDRESS_HEADER="X-Real-IP")
    with behind.client() as client:
        client.get("/v1/models", headers={**headers, "x-real-ip": f"real-{forged}"})
    assert [address for address in _addresses(stack) if forged in address] == [f"real-{forged}"]


def _addresses(stack: GatewayStack) -> set[str]:
    """Those that a limit was charged for."""
    prefix = meter_key("", "address")
    with stack.server.client() as redis:
        return {key.decode().removeprefix(prefix) for key in redis.scan_iter(f"{prefix}*")}


def test_lines_of_a_batch_leave_half_of_a_minute_to_requests():
    """On the meters of requests; the quota as a whole. Addresses and routes have none."""
    limits = RateLimits(EVERY, _unused)
    owner = Owner("k", "acme", OF_KEY, "")
    lines = {charge.meter.name: charge.meter for charge in limits.line_charges(owner)}
    assert {name: meter.limit for name, meter in lines.items()} == {
        "requests": 2,
        "tokens": 25,
        "tenant": 6,
        "day": 70,
        "month": 90,
    }
    charges = limits.charges(owner._replace(address="10.0.0.1"), "/v1/jobs")
    requests = {charge.meter.name: charge.meter.key for charge in charges}
    assert all(meter.key == requests[name] for name, meter in lines.items())
    (least,) = RateLimits(RateLimitConfig(), _unused).line_charges(
        Owner("k", "acme", KeyLimits(requests_per_minute=1), "")
    )
    assert least.meter.limit == 1


@pytest.mark.parametrize(
    ("room", "tokens", "expected"),
    [
        ({"requests": 9, "tokens": 25}, [4, 4, 4], 3),
        ({"requests": 2, "tokens": 25}, [4, 4, 4], 2),
        ({"requests": 9, "tokens": 9}, [4, 4, 4], 2),
        # More than the whole limit: it is charged as much as that.
        ({"requests": 9, "tokens": 25}, [99, 1], 1),
        ({"requests": 9, "tokens": 1}, [0, 0], 2),
        ({"requests": 9, "tokens": 0}, [0, 0], None),
        ({"requests": 0, "tokens": 25}, [1], None),
        ({"requests": 9, "tokens": 3}, [4, 1], None),
    ],
)
def test_as_many_lines_are_charged_as_there_is_room_for(room: dict[str, int], tokens: list[int], expected: int | None):
    """From the first one on. Without room for it nothing is charged; tokens that are not known need room for one."""
    left = dict(room)

    async def spend(requests: Sequence[Sequence[Charge]], _lines: Mapping[int, Lines]) -> list[Spent]:
        (charges,) = requests
        fits = all(left[each.meter.name] >= max(each.cost, 1) for each in charges)
        readings = tuple(Reading(each.meter, left[each.meter.name], 30) for each in charges)
        if fits:
            left.update({each.meter.name: left[each.meter.name] - each.cost for each in charges})
        return [Spent(fits, readings)]

    owner = Owner("k", "acme", KeyLimits(requests_per_minute=20, tokens_per_minute=50), "")
    limits = RateLimits(RateLimitConfig(), spend)
    charges = limits.line_charges(owner)
    if expected is None:
        with pytest.raises(RateLimited):
            asyncio.run(limits.admit_most(charges, tokens, Lines("batch", range(len(tokens)))))
        assert left == room
        return
    assert asyncio.run(limits.admit_most(charges, tokens, Lines("batch", range(len(tokens))))) == expected
    cost = sum(min(each, 25) for each in tokens[:expected])
    assert left == {"requests": room["requests"] - expected, "tokens": room["tokens"] - cost}
