"""spend.lua on a real Redis: minutes that slide, days and months of UTC, and all or nothing over several meters."""

from __future__ import annotations

import asyncio
import calendar
import uuid
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest
import redis

from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.meters import (
    Charge,
    Lines,
    Meter,
    Spent,
    WindowKind,
    charged,
    parse_charged,
    spend,
    spent,
)
from penstock.registry.broker.redis_async import AsyncRedisStreams
from penstock.registry.queues import meter_key
from tests.servers import RedisServer


@pytest.fixture
def client(shared_redis: RedisServer) -> Iterator[redis.Redis]:
    """A connection with the script loaded."""
    with closing(shared_redis.client()) as found:
        found.script_load(scripts.SOURCES["spend"])
        yield found


def meter(limit: int, kind: WindowKind = "m") -> Meter:
    """A meter of its own."""
    return Meter("requests", meter_key(uuid.uuid4().hex, "minute"), kind, limit)


def asked(client: redis.Redis, *requests: list[Charge]) -> list[Spent]:
    """One call."""
    return spent(requests, client.execute_command(*spend(requests)))


def age(client: redis.Redis, key: str, seconds: int) -> None:
    """Makes all that a minute has counted older."""
    found: Any = client.hgetall(key)
    fields = {name.decode(): int(value) for name, value in found.items()}
    client.delete(key)
    moved: dict[Any, Any] = {str(int(name) - seconds): value for name, value in fields.items() if name.isdigit()}
    client.hset(key, mapping={**moved, "sum": fields["sum"], "first": fields["first"] - seconds})


def test_lines_of_a_batch_are_charged_once(client: redis.Redis):
    """A call whose answer was lost, or whose process died, is repeated. Other lines of the batch are charged."""
    minute, day, batch_id = meter(10), meter(100, "d"), uuid.uuid4().hex
    costs = [Charge(minute, 3), Charge(day, 3)]
    first = Lines(batch_id, [0, 8, 49_999])

    def ask(lines: Lines) -> Spent:
        other = [Charge(meter(2), 1)]
        requests = [other, costs, other]
        _, found, last = spent(requests, client.execute_command(*spend(requests, {1: lines})))
        assert last.is_admitted
        return found

    def read() -> frozenset[int]:
        return parse_charged(client.execute_command(*charged(batch_id)))

    assert read() == frozenset()
    assert [reading.left for reading in ask(first).readings] == [7, 97]
    assert [reading.left for reading in ask(first).readings] == [7, 97]
    assert read() == {0, 8, 49_999}
    assert [reading.left for reading in ask(Lines(batch_id, [8, 1, 2])).readings] == [4, 94]
    assert [reading.left for reading in ask(Lines(uuid.uuid4().hex, [0, 8, 49_999])).readings] == [1, 91]
    # A refused request charges and notes nothing; lines that were charged go on without room.
    assert not ask(Lines(batch_id, [3, 4, 5])).is_admitted
    assert read() == {0, 1, 2, 8, 49_999}
    assert ask(first).is_admitted


@pytest.mark.parametrize("kind", ["m", "d", "M"])
def test_a_limit_is_exact(client: redis.Redis, kind: WindowKind):
    """As many requests as the limit says, in one call or in several, and what is left counts down to 0."""
    one = meter(5, kind)
    found = asked(client, *[[Charge(one, 1)]] * 3)
    found += [each for _ in range(4) for each in asked(client, [Charge(one, 1)])]
    assert [each.is_admitted for each in found] == [True] * 5 + [False] * 2
    assert [each.readings[0].left for each in found] == [4, 3, 2, 1, 0, 0, 0]


def test_a_request_is_charged_on_all_meters_or_on_none(client: redis.Redis):
    """The wide meter loses nothing to requests that the narrow one refuses."""
    narrow, wide = meter(2), meter(100)
    found = asked(client, *[[Charge(narrow, 1), Charge(wide, 1)]] * 5)
    assert [each.is_admitted for each in found] == [True, True, False, False, False]
    assert asked(client, [Charge(wide, 1)])[0].readings[0].left == 97


def test_a_minute_slides(client: redis.Redis):
    """A request counts for 60 whole seconds, and leaves within the next one."""
    one = meter(3)
    assert asked(client, [Charge(one, 2)])[0].is_admitted
    age(client, one.key, 59)
    assert asked(client, [Charge(one, 1)])[0].is_admitted
    refused = asked(client, [Charge(one, 1)])[0]
    assert not refused.is_admitted
    assert 0 <= refused.readings[0].reset_s <= 2
    age(client, one.key, 3)
    again = asked(client, *[[Charge(one, 1)]] * 3)
    assert [each.is_admitted for each in again] == [True, True, False]
    assert again[-1].readings[0].reset_s >= 55
    age(client, one.key, 10_000)
    assert asked(client, [Charge(one, 3)])[0].is_admitted


def test_a_cost_above_what_is_left_is_refused(client: redis.Redis):
    """And charges nothing; the cost 0 asks for room for 1, and charges nothing either."""
    one = meter(10)
    assert asked(client, [Charge(one, 8)])[0].is_admitted
    assert not asked(client, [Charge(one, 3)])[0].is_admitted
    assert asked(client, [Charge(one, 0)])[0].readings[0].left == 2
    assert asked(client, [Charge(one, 2)])[0].is_admitted
    assert not asked(client, [Charge(one, 0)])[0].is_admitted


@pytest.mark.parametrize("kind", ["m", "d", "M"])
def test_a_replaced_charge_is_taken_back(client: redis.Redis, kind: WindowKind):
    """Whether the request that replaces it is admitted or refused, on each of its meters and only once."""
    narrow, wide = meter(10, kind), meter(100, kind)
    (entered,) = asked(client, [Charge(narrow, 1), Charge(wide, 1)])

    def raised(cost: int) -> list[Charge]:
        return [Charge(one.meter, cost, one.second) for one in entered.readings]

    (refused,) = asked(client, raised(11))
    assert not refused.is_admitted
    assert [reading.left for reading in refused.readings] == [10, 100]
    (entered,) = asked(client, [Charge(narrow, 1), Charge(wide, 1)])
    (found,) = asked(client, raised(10))
    assert found.is_admitted
    assert [reading.left for reading in found.readings] == [0, 90]


def test_of_two_batches_of_a_whole_limit_one_is_admitted(client: redis.Redis):
    """Both have entered when both ask for their jobs: the refused one leaves its room to the other one."""
    one = meter(10)
    first, second = asked(client, [Charge(one, 1)], [Charge(one, 1)])
    found = asked(client, *([Charge(one, 10, each.readings[0].second)] for each in (first, second)))
    assert [each.is_admitted for each in found] == [False, True]
    assert not asked(client, [Charge(one, 1)])[0].is_admitted


def test_a_replaced_charge_leaves_the_second_it_was_charged_at(client: redis.Redis):
    """At another second the sum would be too low for a while, and a minute would have more than its limit."""
    one = meter(10)
    (entered,) = asked(client, [Charge(one, 1)])
    age(client, one.key, 30)
    assert asked(client, [Charge(one, 4)])[0].is_admitted
    second = entered.readings[0].second - 30
    assert asked(client, [Charge(one, 11, second)])[0].readings[0].left == 6
    age(client, one.key, 32)
    assert asked(client, [Charge(one, 0)])[0].readings[0].left == 6


@pytest.mark.parametrize("kind", ["m", "d", "M"])
def test_a_charge_that_has_left_its_window_is_not_taken_back(client: redis.Redis, kind: WindowKind):
    """The body of the request came later than that: all that is counted now is of others."""
    one = meter(10, kind)
    (entered,) = asked(client, [Charge(one, 1)])
    client.delete(one.key)
    assert asked(client, [Charge(one, 3)])[0].is_admitted
    long_ago = entered.readings[0].second - 40 * 86_400
    assert asked(client, [Charge(one, 8, long_ago)])[0].readings[0].left == 7


def test_meters_go_with_their_windows(client: redis.Redis):
    """A caller that comes no more leaves nothing behind."""
    most: dict[WindowKind, int] = {"m": 62, "d": 25 * 3600, "M": 32 * 86_400}
    for kind, most_s in most.items():
        one = meter(5, kind)
        asked(client, [Charge(one, 1)])
        assert 0 < client.pttl(one.key) <= most_s * 1000


def test_a_new_day_begins_at_0(client: redis.Redis):
    """The count of another day or month is not that of this one."""
    kinds: tuple[WindowKind, ...] = ("d", "M")
    for kind in kinds:
        one = meter(1, kind)
        assert [each.is_admitted for each in asked(client, *[[Charge(one, 1)]] * 2)] == [True, False]
        client.hset(one.key, "period", "1999-12-31" if kind == "d" else "1999-12")
        assert asked(client, [Charge(one, 1)])[0].is_admitted


@pytest.mark.parametrize(
    "moment",
    ["1970-01-01", "2000-02-29", "2023-12-31", "2024-02-29", "2024-12-31", "2026-03-01", "2099-12-31", "2100-02-28"],
)
def test_the_calendar_is_that_of_utc(client: redis.Redis, moment: str):
    """Days and months of the scripts are those of Python's calendar, and end when they end."""
    day = datetime.fromisoformat(moment).replace(tzinfo=UTC)
    at = calendar.timegm(day.timetuple()) + 3600
    source = scripts.SOURCES["spend"].partition("-- Admit requests")[0]
    source += (
        "local a, b = period(tonumber(ARGV[1]), 'd') local c, d = period(tonumber(ARGV[1]), 'M') return {a, b, c, d}"
    )
    found_day, day_left, month, month_left = client.eval(source, 0, at)
    days = calendar.monthrange(day.year, day.month)[1]
    assert (found_day.decode(), day_left) == (moment, 86_400 - 3600)
    assert (month.decode(), month_left) == (moment[:7], (days - day.day + 1) * 86_400 - 3600)


def test_the_asyncio_client_spends(shared_redis: RedisServer):
    """The gateway's own way to the script."""
    one = meter(2)

    async def scenario() -> list[bool]:
        streams = AsyncRedisStreams.from_url(shared_redis.url)
        found = [(await streams.spend([[Charge(one, 1)]]))[0].is_admitted for _ in range(3)]
        await streams.aclose()
        return found

    assert asyncio.run(scenario()) == [True, True, False]


def test_a_clock_that_went_back_opens_nothing(client: redis.Redis):
    """What was counted in the near future counts now."""
    one = meter(2)
    assert asked(client, [Charge(one, 2)])[0].is_admitted
    age(client, one.key, -30)
    assert not asked(client, [Charge(one, 1)])[0].is_admitted
