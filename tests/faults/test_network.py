"""F6: the network breaks: half-open connections, a partition, 200 ms of latency, resets, answers cut in half."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import NamedTuple

import pytest

from penstock.registry.broker.base import Claim
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import BrokerUnavailable
from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.load import Load
from tests.faults.proxy import Direction, Proxy
from tests.faults.rounds import seeds
from tests.servers import let_pass, wait_until

RESUME_S = 10.0
LATENCY_S = 0.2
LOSSES = 150
"""Of two connections each."""
_SIDES: tuple[tuple[Direction, ...], ...] = (("requests",), ("answers",), ("requests", "answers"))


class Network(NamedTuple):
    """A stage whose worker reaches the broker through the proxy only."""

    stage: Stage
    proxy: Proxy


@pytest.fixture(scope="module")
def network(open_stage: OpenStage) -> Iterator[Network]:
    """One worker behind a proxy."""
    stage = open_stage(forward_s=0.02)
    with Proxy(stage.server.port) as proxy:
        stage.start_worker(url=proxy.url)
        yield Network(stage, proxy)
        worker = stage.workers[0]
        assert worker.is_running, f"the worker ended by itself\n{worker.tail()}"
        # Before its end it would report every lost connection once more.
        stage.workers[0].stop()


def _half_open(proxy: Proxy, load: Load, chance: random.Random) -> float:
    assert proxy.silence(*chance.choice(_SIDES)), "no connection was open"
    # These connections are never healed: their users must notice.
    return load.await_progress(30)


def _partitioned(proxy: Proxy, load: Load, chance: random.Random) -> float:
    proxy.partition()
    try:
        let_pass(chance.uniform(1.5, 3.0))
    finally:
        proxy.heal()
    return load.await_progress(30)


def _slow(proxy: Proxy, load: Load, chance: random.Random) -> float:
    proxy.delay(LATENCY_S, *chance.choice(_SIDES))
    try:
        return max(load.await_progress(30) for _ in range(3))
    finally:
        proxy.delay(0)


def _reset(proxy: Proxy, load: Load, chance: random.Random) -> float:
    slowest = 0.0
    for _ in range(3):
        assert proxy.reset(), "no connection was open"
        slowest = max(slowest, load.await_progress(30))
        let_pass(chance.uniform(0.0, 0.3))
    return slowest


def _cut_short(proxy: Proxy, load: Load, chance: random.Random) -> float:
    slowest = 0.0
    for _ in range(3):
        cuts = proxy.cuts
        proxy.cut(answers := chance.randint(1, 3))
        wait_until(lambda: proxy.cuts >= cuts + answers, 20, "answers are cut")  # noqa: B023  # called at once
        slowest = max(slowest, load.await_progress(30))
    return slowest


_BREAKS: dict[str, Callable[[Proxy, Load, random.Random], float]] = {
    "half-open": _half_open,
    "partition": _partitioned,
    "latency": _slow,
    "reset": _reset,
    "cut": _cut_short,
}


@pytest.mark.parametrize("how", _BREAKS)
@pytest.mark.parametrize("seed", seeds(ways=len(_BREAKS)))
def test_broken_network_loses_and_doubles_nothing(
    seed: int, how: str, network: Network, start_load: StartLoad, trial: Trial
):
    """Worker and client lose the broker in one way: every accepted job ends once, and work goes on within 10 s."""
    stage, proxy = network
    chance = random.Random(f"{seed} {how}")
    through = start_load(stage.server, stage.forward_log, url=proxy.url, timeout_s=2)
    direct = start_load(stage.server, stage.forward_log)
    with through.running(burst=1), direct.running(burst=1):
        through.await_progress(20)
        trial.recovered(_BREAKS[how](proxy, direct, chance), within=RESUME_S)
        through.await_progress(RESUME_S)
    trial.check(through.history(60), direct.history(60))
    through.check_answers()


@pytest.mark.parametrize("seed", seeds(ways=len(_BREAKS)))
def test_idle_worker_notices_that_its_claim_is_lost(seed: int, network: Network, start_load: StartLoad, trial: Trial):
    """While the connection of the blocking claim is half-open, the worker opens another, and jobs run again."""
    stage, proxy = network
    load = start_load(stage.server, stage.forward_log)
    load.publish(1)
    load.await_all(10)
    sides = random.Random(seed).choice(_SIDES)
    wait_until(lambda: proxy.silence(*sides, that_sent=b"XREADGROUP"), 5, "a claim waits")
    for _ in range(2):
        # The first jobs are handed to the silent connection, and come back when their lease has lapsed.
        load.publish(20)
        trial.recovered(load.await_all(30), within=RESUME_S)
    trial.check(load.history())
    load.check_answers()


def test_worker_survives_hundreds_of_lost_connections(network: Network):
    """A worker's end that has lost its connections 300 times claims and waits as on the first day."""
    stage, _ = network
    with Proxy(stage.server.port) as between, closing(RedisStreams.from_url(between.url)) as end:
        end.prepare(["unserved"])
        for _ in range(LOSSES):
            end.exchange("worker", [], [Claim("unserved", 1, 0, 1000)], 60_000)
            end.arm("worker", ["unserved"], 1, 1000)
            between.reset()
            with suppress(BrokerUnavailable):
                end.exchange("worker", [], [], 60_000)
                end.exchange("worker", [], [Claim("unserved", 1, 0, 1000)], 60_000)
            end.drop_armed()
        assert end.exchange("worker", [], [Claim("unserved", 1, 0, 1000)], 60_000) == ([], [])
        end.arm("worker", ["unserved"], 1, 1000)
        assert end.disarm() == []


@pytest.mark.parametrize("seed", seeds(ways=len(_BREAKS)))
def test_ambiguous_submit_and_its_retry_are_one_job(seed: int, network: Network, start_load: StartLoad, trial: Trial):
    """The answer to a submit is lost: the retry, the client's own or the caller's under its key, makes no second."""
    stage, _ = network
    # A proxy of the client's own: the worker is not to suffer.
    with Proxy(stage.server.port, seed) as between:
        load = start_load(stage.server, stage.forward_log, url=between.url, timeout_s=0.5)
        load.publish(1)
        between.cut()
        load.publish(1)
        assert between.cuts == 1
        assert load.accepted == 2, "the client asked again by itself"

        number = 1_000_000.0 + seed
        between.silence("answers")
        assert load.submit(number, idempotency_key=f"key {seed}") is None
        assert load.submit(number, idempotency_key=f"key {seed}") is not None
        history = load.history()
    findings = trial.check(history)
    assert len(history.effects) == 3
    assert findings.re_executed == frozenset()


@pytest.mark.parametrize("seed", seeds(ways=len(_BREAKS)))
def test_worker_behind_a_partition_is_replaced_and_fenced(
    seed: int, network: Network, start_load: StartLoad, trial: Trial
):
    """One of two workers is cut off past its lease: the other does its jobs, and what it sends late changes nothing."""
    stage, proxy = network
    other = stage.start_worker()
    load = start_load(stage.server, stage.forward_log)
    chance = random.Random(seed)
    try:
        with load.running(burst=4):
            load.await_progress(20)
            proxy.partition()
            try:
                let_pass(chance.uniform(2.0, 3.0))
            finally:
                proxy.heal()
            load.await_progress(20)
        trial.check(load.history())
        load.check_answers()
        taken_over = [result for result in load.results.values() if result.attempt > 1]
        assert taken_over, "the partition hit no worker"
        assert {result.worker for result in taken_over} == {other.name}
    finally:
        other.stop()
