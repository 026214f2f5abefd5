"""F24: a deliverer of webhooks is killed while receivers fail."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import Client
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.webhook_secrets import new_secret
from tests.deliverer_process import DelivererProcess
from tests.faults.conftest import OpenStage, Stage, Trial
from tests.faults.history import Effect, History
from tests.faults.load import row
from tests.faults.rounds import seeds
from tests.packages import recorded_forwards
from tests.receiver import HANG, Call, Receiver, Reply, verify
from tests.servers import wait_until

JOBS = 60
KILLS = 3
TIMEOUT_S = 1.0
LEASE_S = 2 * TIMEOUT_S
FIRST_PAUSE_S = 6.0
"""The first pause of the schedule with its jitter."""
WITHIN_S = LEASE_S + 3 * FIRST_PAUSE_S
SECRET = new_secret()
KEYS = "k:" + "A" * 43 + "="


class Failing:
    """A receiver's answers: the first call for a job is a success, an error, or none; later ones are successes.

    delivered: the events that got a 200, by job.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self.calls = 0
        self.delivered: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def await_calls(self, count: int) -> None:
        """Wait for so many more calls than now."""
        wanted = self.calls + count
        wait_until(lambda: self.calls >= wanted, 30, "receivers are called")

    def __call__(self, call: Call) -> Reply:
        assert verify(call, SECRET)
        job_id = call.event["data"]["id"]
        with self._lock:
            self.calls += 1
            reply = Reply(200)
            if job_id not in self._known:
                self._known.add(job_id)
                reply = self._random.choice([Reply(200), Reply(500), Reply(302), HANG])
            if reply.status == 200:
                self.delivered[job_id][call.id] += 1
            return reply


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """A worker that ends the jobs."""
    found = open_stage()
    found.start_worker(PENSTOCK_SIGNING_KEYS=KEYS)
    return found


@pytest.fixture
def deliverers(stage: Stage, tmp_path: Path) -> Iterator[list[DelivererProcess]]:
    """Two of them, not started, and a third one to take over; all are ended."""
    environment = {
        "PENSTOCK_SIGNING_KEYS": KEYS,
        "PENSTOCK_INFERENCE_WEBHOOKS_TIMEOUT_S": str(TIMEOUT_S),
        "PENSTOCK_INFERENCE_WEBHOOKS_PER_HOST": "16",
    }
    found = [
        DelivererProcess(stage.server, tmp_path / f"deliverer-{number}", SECRET, environment=environment)
        for number in range(KILLS + 1)
    ]
    yield found
    for each in found:
        if each.is_running:
            each.kill()


@pytest.mark.parametrize("seed", seeds())
def test_killed_deliverers_lose_no_webhook(seed: int, stage: Stage, deliverers: list[DelivererProcess], trial: Trial):
    """Each ended job is told of under one event id, whatever its receiver answered and whoever was killed meanwhile."""
    answers = Failing(seed)
    pauses = random.Random(seed)
    with (
        Receiver(answers) as receiver,
        Client(stage.server.url, tenant=f"f24-{seed}", signing_keys=KEYS) as client,
    ):
        numbers = [float(seed * 1000 + number) for number in range(JOBS)]
        items = [{"x": row(number)} for number in numbers]
        jobs = client.submit_many("recorder", items, webhook=receiver.url())
        results = client.gather(jobs, timeout=180)
        assert len(results) == JOBS
        for victim in deliverers[:-1]:
            victim.launch()
            answers.await_calls(5)
            time.sleep(pauses.random() * 0.3)
            victim.kill()
        begun = time.monotonic()
        deliverers[-1].launch()
        wait_until(lambda: len(answers.delivered) == JOBS, 60, f"all are delivered\n{deliverers[-1].tail()}")
        trial.recovered(time.monotonic() - begun, within=WITHIN_S)
        _check_queue_is_empty(stage)
    trial.check(_history(stage, dict(zip([job.id for job in jobs], numbers, strict=True)), answers), times=KILLS)


def _check_queue_is_empty(stage: Stage) -> None:
    broker = RedisStreams.from_url(stage.server.url)
    wait_until(lambda: broker.count_webhooks("recorder").waiting == 0, 30, "every delivery is settled")
    assert broker.count_webhooks("recorder").dead == 0
    broker.close()


def _history(stage: Stage, numbers: dict[str, float], answers: Failing) -> History:
    """An event id that a receiver took is one effect of its job; repeated calls under one id are none."""
    history = History(offered=set(numbers.values()), accepted=set(numbers.values()))
    for job_id, events in answers.delivered.items():
        for event_id in events:
            history.effects.append(Effect(numbers[job_id], event_id.encode()))
        history.records[numbers[job_id]] = next(iter(events)).encode()
    rows = (number for batch in recorded_forwards(stage.forward_log) for number in batch)
    history.forwards = [number for number in rows if number in history.offered]
    return history
