"""The mirror of a worker: which jobs become pairs, and that no job waits for one. SH-005, AR-087."""

from __future__ import annotations

import base64
import gc
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from penstock.registry.broker.base import State
from penstock.registry.broker.redis_shadow import RedisShadow
from penstock.registry.envelope import Keyring, Retry
from penstock.registry.queues import shadow_key, shadow_order_key
from penstock.registry.shadow import Sample, ShadowOrder, ShadowPair
from penstock.safety.operator_key import OperatorKey, PublicKeys
from penstock.workers.batch_run import BatchRun
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.shadow.mirror import ShadowMirror
from tests.packages import write_double, write_package, write_raiser
from tests.payload_keys import sealing
from tests.servers import LEAST_PATIENCE_S, RedisServer, wait_until
from tests.workers.shadow.pairs import UNSIGNED, order_of
from tests.workers.stepped import LEASE_S, SteppedHarness, SteppedWorker, open_harness

SIGNED = Keyring.parse(f"first:{base64.b64encode(b'1' * 32).decode()}")


@pytest.fixture
def end(shared_redis: RedisServer) -> Iterator[RedisShadow]:
    """A connection of the test's own."""
    with closing(RedisShadow.from_url(shared_redis.url)) as connected:
        yield connected


@pytest.fixture
def harness(models_root: Path, slot: str) -> Iterator[SteppedHarness]:
    """A broker in memory for one model, which doubles; its shadow queue is in Redis."""
    write_double(models_root, slot)
    yield from open_harness(models_root, cache={"enabled": False})


class Mirrored:
    """A stepped worker with a mirror."""

    def __init__(
        self,
        harness: SteppedHarness,
        url: str,
        *,
        keyring: Keyring = UNSIGNED,
        timeout_s: float = LEAST_PATIENCE_S,
        connect: type[RedisShadow] = RedisShadow,
        **options: Any,
    ) -> None:
        self.metrics = InferenceMetrics((1.0,))
        options = {"verify": None, "linger_s": 0.0, **options}
        self.mirror = ShadowMirror(connect.from_url(url, timeout_s=timeout_s), keyring, self.metrics, **options)
        self.worker: SteppedWorker = harness.start_worker(mirror=self.mirror)
        self._harness = harness

    def report(self) -> None:
        """The lease thread reports: orders are read."""
        self.worker.drain.parts.status.report(is_ready=True)

    def serve(self, model: str, *numbers: float, **how: Any) -> list[str]:
        """Submits jobs and answers them; their ids."""
        ids = self._harness.publish(model, *numbers, **how)
        self.worker.forwards()
        assert {self._harness.state(job_id) for job_id in ids} <= {State.COMPLETED, State.FAILED}
        return ids

    def count(self, outcome: str) -> float:
        """Sampled jobs by outcome."""
        (family,) = [each for each in self.metrics.collect() if each.name == "penstock_shadow_pairs"]
        return sum(each.value for each in family.samples if each.labels["outcome"] == outcome)


def begun(end: RedisShadow, model: str, **more: Any) -> ShadowOrder:
    """A shadow of all jobs runs; version 1 answers, so the candidate is another one."""
    order = order_of(model, **{"candidate": "2", **more})
    assert end.start(order, order.seal()) is None
    return order


def pairs(end: RedisShadow, order: ShadowOrder, count: int, keyring: Keyring = UNSIGNED) -> list[ShadowPair]:
    """So many pairs, once they are in the queue."""
    wait_until(lambda: end.state(order.model).pairs >= count, 30, f"{count} pairs are mirrored")
    taken = end.take(order.model, order.id, "test", 1000, most_bytes=1 << 30, lease_ms=60_000)
    assert taken is not None
    assert len(taken) == count
    return [ShadowPair.open(each.sealed, keyring) for each in taken]


def held_by(kept: object) -> list[object]:
    """All objects that this one keeps in memory, but for what modules keep anyway."""
    held: dict[int, object] = {}
    left = [kept]
    while left:
        each = left.pop()
        if id(each) not in held and not isinstance(each, (type, ModuleType)):
            held[id(each)] = each
            left += gc.get_referents(each)
    return [*held.values()]


def test_without_a_shadow_nothing_is_done(harness: SteppedHarness, shared_redis: RedisServer, slot: str):
    """No thread is started, and the drain does not call the mirror."""
    mirrored = Mirrored(harness, shared_redis.url)
    mirrored.report()
    mirrored.serve(slot, 1, 2, 3)
    assert not mirrored.mirror.is_active
    assert mirrored.mirror._thread is None


def test_answered_jobs_become_pairs(harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow):
    """Inputs as received, outputs as served, the version, its content and the time of the forward."""
    order = begun(end, slot)
    mirrored = Mirrored(harness, shared_redis.url)
    mirrored.report()
    ids = mirrored.serve(slot, 1, 2, 3)
    found = pairs(end, order, 3)
    assert {pair.header.id for pair in found} == {*ids}
    for pair in found:
        assert (pair.outputs["y"] == pair.inputs["x"] * 2).all()
        assert (pair.header.version, pair.header.tenant, pair.header.batch_rows) == ("1", "acme", 3)
        assert len(pair.header.content_hash) == 64
    # The pairs are there a little before they are counted.
    wait_until(lambda: mirrored.count("mirrored") == 3, 30, "they are counted")
    mirrored.mirror.close()


def test_pairs_that_wait_keep_no_batch(harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow):
    """Nor its other jobs: only the bytes of the sampled ones stay in memory."""
    order = begun(end, slot, share=0.3)
    mirrored = Mirrored(harness, shared_redis.url, linger_s=3600.0)
    mirrored.report()
    ids = mirrored.serve(slot, *range(60))
    sampled = {job_id for job_id in ids if job_id in Sample(order)}
    assert 0 < len(sampled) < 60
    assert {job.header.id for answered in mirrored.mirror._waiting for job in answered.jobs} == sampled
    held = held_by(mirrored.mirror._waiting)
    assert not [each for each in held if isinstance(each, (BatchRun, ClaimedJob, np.ndarray))]
    # The envelope of a job has its inputs.
    assert len([each for each in held if isinstance(each, bytes) and len(each) > 64]) <= len(sampled)
    mirrored.mirror.close()
    assert end.state(slot).pairs == len(sampled)


def test_many_pairs_do_not_wait_for_others(
    harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow
):
    """The pairs of one call are enough. Each call is small: the drain and the broker's other clients wait for it."""
    begun(end, slot)
    calls: list[int] = []

    class Recording(RedisShadow):
        def mirror(self, order: ShadowOrder, pairs: Sequence[bytes], *, dropped: int = 0):
            calls.append(len(pairs))
            return super().mirror(order, pairs, dropped=dropped)

    mirrored = Mirrored(harness, shared_redis.url, linger_s=3600.0, connect=Recording)
    mirrored.report()
    mirrored.serve(slot, *range(100))
    wait_until(lambda: end.state(slot).pairs >= 64, 30, "most pairs are there")
    mirrored.mirror.close()
    assert sum(calls) == 100
    assert max(calls) == 32


def test_only_the_sample_is_mirrored(harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow):
    """The jobs that the hash chooses, and no other."""
    order = begun(end, slot, share=0.3)
    mirrored = Mirrored(harness, shared_redis.url)
    mirrored.report()
    ids = mirrored.serve(slot, *range(60))
    expected = {job_id for job_id in ids if job_id in Sample(order)}
    assert 0 < len(expected) < 60
    assert {pair.header.id for pair in pairs(end, order, len(expected))} == expected
    mirrored.mirror.close()


def test_jobs_of_their_own_way_are_mirrored_as_well(
    harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow
):
    """A job with a retry policy is sealed alone. One that named a version is not mirrored: a promotion changes nothing
    for it."""
    order = begun(end, slot)
    mirrored = Mirrored(harness, shared_redis.url)
    mirrored.report()
    (alone,) = mirrored.serve(slot, 5, retry=Retry())
    mirrored.serve(slot, 6, version="1")
    (plain,) = mirrored.serve(slot, 7)
    assert {pair.header.id for pair in pairs(end, order, 2)} == {alone, plain}
    mirrored.mirror.close()


def test_failed_jobs_are_not_mirrored(models_root: Path, shared_redis: RedisServer, slot: str, end: RedisShadow):
    """There is no served output to compare with."""
    write_raiser(models_root, slot)
    for harness in open_harness(models_root, cache={"enabled": False}):
        order = begun(end, slot)
        mirrored = Mirrored(harness, shared_redis.url)
        mirrored.report()
        failed, _ = mirrored.serve(slot, -1), mirrored.serve(slot, 1)
        assert harness.state(failed[0]) is State.FAILED
        assert [pair.inputs["x"][0, 0] for pair in pairs(end, order, 1)] == [1]
        mirrored.mirror.close()


def test_the_answers_of_the_candidate_are_not_mirrored(
    harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow
):
    """It was promoted meanwhile: it would be compared with itself."""
    begun(end, slot, candidate="1")
    mirrored = Mirrored(harness, shared_redis.url)
    mirrored.report()
    mirrored.serve(slot, 1, 2)
    assert mirrored.mirror._thread is None
    assert end.state(slot).pairs == 0


@pytest.mark.parametrize("keyring", [SIGNED, sealing(SIGNED)], ids=["signed", "sealed"])
def test_pairs_are_sealed_as_payloads_are(
    harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow, keyring: Keyring
):
    """A reader with the same keys opens them."""
    order = begun(end, slot)
    mirrored = Mirrored(harness, shared_redis.url, keyring=keyring)
    mirrored.report()
    mirrored.serve(slot, 1)
    (pair,) = pairs(end, order, 1, keyring)
    assert pair.header.is_sealed == keyring.seals
    assert pair.outputs["y"][0, 0] == 2
    mirrored.mirror.close()


def in_redis(server: RedisServer, model: str) -> bytes:
    """All bytes of the shadow queue, as another program would read them."""
    with server.client() as client:
        return b"".join(value for _, fields in client.xrange(shadow_key(model)) for value in fields.values())


@pytest.mark.parametrize("keyring", [SIGNED, sealing(SIGNED)], ids=["signed", "sealed"])
def test_redis_has_the_bytes_of_jobs_only_where_payloads_are_not_sealed(
    harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow, keyring: Keyring
):
    """The numbers of a job and of its answer, as they lie in the broker's memory."""
    begun(end, slot)
    mirrored = Mirrored(harness, shared_redis.url, keyring=keyring)
    mirrored.report()
    mirrored.serve(slot, 1234.5)
    wait_until(lambda: end.state(slot).pairs == 1, 30, "the pair is there")
    lying = in_redis(shared_redis, slot)
    for number in (1234.5, 2 * 1234.5):
        assert (np.array([number, 0, 0, 0], np.float32).tobytes() in lying) is not keyring.seals
    mirrored.mirror.close()


CARD = "4111 1111 1111 1111"
COUNTS = """
import numpy as np

def build():
    return lambda inputs: {"y": np.array([[len(text)] * 4 for text in inputs["x"]], np.float32)}
"""


@pytest.mark.parametrize("keyring", [SIGNED, sealing(SIGNED)], ids=["signed", "sealed"])
def test_pairs_are_never_redacted(
    models_root: Path, shared_redis: RedisServer, slot: str, end: RedisShadow, keyring: Keyring
):
    """A redacted text is another text. The candidate gets the whole one, and Redis has it in plain only unsealed."""
    file = write_package(models_root, slot, COUNTS) / "model.yaml"
    spec = yaml.safe_load(file.read_text())
    spec["inputs"] = [{"name": "x", "dtype": "string", "shape": ["batch"]}]
    file.write_text(yaml.safe_dump(spec))
    redacting = {"redact_detectors": ("payment_card",)}
    for harness in open_harness(models_root, cache={"enabled": False}, privacy=redacting):
        order = begun(end, slot)
        mirrored = Mirrored(harness, shared_redis.url, keyring=keyring)
        mirrored.report()
        harness.publish_inputs(slot, {"x": [CARD]})
        mirrored.worker.forwards()
        wait_until(lambda: end.state(slot).pairs == 1, 30, "the pair is there")
        lying = in_redis(shared_redis, slot)
        assert (CARD.encode() in lying) is not keyring.seals
        assert b"REDACTED" not in lying
        (pair,) = pairs(end, order, 1, keyring)
        assert (pair.inputs["x"].tolist(), pair.outputs["y"][0, 0]) == ([CARD], len(CARD))
        mirrored.mirror.close()


def test_a_job_whose_lease_was_lost_is_not_mirrored(
    harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow
):
    """Another worker has answered it meanwhile: the late commit is fenced off, and nothing of it becomes a pair."""
    order = begun(end, slot)
    late, other = (Mirrored(harness, shared_redis.url) for _ in range(2))
    late.report()
    (job_id,) = harness.publish(slot, 1)
    run = late.worker.begin_next()
    assert [item.job.header.id for item in run.batch.items] == [job_id]
    harness.suspend(late.worker)
    harness.pass_time(3 * LEASE_S)
    other.worker.forwards()
    assert harness.state(job_id) is State.COMPLETED
    wait_until(lambda: other.count("mirrored") == 1, 30, "the other one has mirrored it")
    late.worker.end(run)
    late.worker.turn(5)
    assert late.mirror.is_active
    assert late.mirror._thread is None
    assert [late.count(outcome) for outcome in ("mirrored", "over", "failed", "behind")] == [0, 0, 0, 0]
    late.mirror.close()
    other.mirror.close()
    assert [pair.header.id for pair in pairs(end, order, 1)] == [job_id]


def test_a_stopped_shadow_is_mirrored_no_more(
    harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow
):
    """From the next report on; pairs on their way are refused by the broker."""
    order = begun(end, slot)
    mirrored = Mirrored(harness, shared_redis.url)
    mirrored.report()
    end.stop(slot)
    mirrored.serve(slot, 1)
    wait_until(lambda: mirrored.count("over") == 1, 30, "the pair is refused")
    mirrored.report()
    assert not mirrored.mirror.is_active
    mirrored.serve(slot, 2)
    assert end.state(slot).pairs == 0
    assert order.id not in end.state(slot).flow.values()
    mirrored.mirror.close()


def test_an_unsigned_order_is_refused(
    harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow, tmp_path: Path
):
    """Where operators sign, another process that may write to the broker cannot have jobs copied."""
    key = OperatorKey.generate(tmp_path / "operator.pem")
    order = begun(end, slot)
    verify = PublicKeys.parse(key.public_text).verify
    mirrored = Mirrored(harness, shared_redis.url, verify=verify)
    mirrored.report()
    assert not mirrored.mirror.is_active
    end.stop(slot)
    assert end.start(order, order.seal(key.sign)) is None
    mirrored.report()
    assert mirrored.mirror.is_active


def test_bytes_that_are_no_order_change_nothing(
    harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow
):
    """The worker goes on reporting and serving."""
    with shared_redis.client() as client:
        client.set(shadow_order_key(slot), b"\n{broken")
    mirrored = Mirrored(harness, shared_redis.url)
    mirrored.report()
    mirrored.serve(slot, 1)
    assert not mirrored.mirror.is_active


def test_an_order_of_the_past_is_not_followed(
    harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow
):
    """Its key was put back without its expiry."""
    order = order_of(slot, until_ms=1)
    with shared_redis.client() as client:
        client.set(shadow_order_key(slot), order.seal())
    mirrored = Mirrored(harness, shared_redis.url)
    mirrored.report()
    assert not mirrored.mirror.is_active


def test_what_waits_is_bounded(harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow):
    """Beyond the memory of the mirror, jobs are dropped at once, and the operator sees how many."""
    order = begun(end, slot)
    mirrored = Mirrored(harness, shared_redis.url, most_bytes=1)
    mirrored.report()
    mirrored.serve(slot, 1, 2, 3)
    assert mirrored.count("behind") == 3
    mirrored.mirror._most_bytes = 1 << 20
    mirrored.serve(slot, 4)
    assert len(pairs(end, order, 1)) == 1
    wait_until(lambda: end.state(slot).flow.get("behind") == "3", 30, "the drops are told")
    mirrored.mirror.close()


def test_a_full_queue_fails_no_job(harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow):
    """Pairs beyond the cap are dropped and counted; each job is answered."""
    begun(end, slot, max_pairs=2)
    mirrored = Mirrored(harness, shared_redis.url)
    mirrored.report()
    ids = mirrored.serve(slot, 1, 2, 3, 4, 5)
    wait_until(lambda: mirrored.count("full") == 3, 30, "three are dropped")
    assert [harness.answer(job_id) for job_id in ids] == [2, 4, 6, 8, 10]
    assert (mirrored.count("mirrored"), end.state(slot).pairs) == (2, 2)
    mirrored.mirror.close()


def test_a_full_queue_is_left_alone_for_a_second(
    harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow
):
    """To seal pairs for it would be work for nothing. The drops are told all the same, and then it is tried again."""
    now = [0.0]
    order = begun(end, slot, max_pairs=1)
    mirrored = Mirrored(harness, shared_redis.url, clock=lambda: now[0])
    mirrored.report()
    mirrored.serve(slot, 1, 2)
    wait_until(lambda: mirrored.count("full") == 1, 30, "it is full")
    wait_until(lambda: mirrored.mirror._full_until, 30, "it is left alone")
    assert len(pairs(end, order, 1)) == 1
    end.stop(slot)
    assert end.start(order, order.seal()) is None
    mirrored.serve(slot, 3, 4, 5)
    assert mirrored.count("full") == 4
    wait_until(lambda: end.state(slot).flow.get("behind") == "3", 30, "the drops are told")
    now[0] = 2.0
    mirrored.serve(slot, 6)
    assert len(pairs(end, order, 1)) == 1
    mirrored.mirror.close()


def test_a_broker_that_hangs_delays_no_job(harness: SteppedHarness, redis_server: RedisServer, slot: str):
    """The mirror waits for the frozen server on its own thread; the drain's turns go on, and the pairs are dropped."""
    with closing(RedisShadow.from_url(redis_server.url)) as end:
        begun(end, slot)
        mirrored = Mirrored(harness, redis_server.url, timeout_s=0.5)
        mirrored.report()
        redis_server.pause()
        ids = mirrored.serve(slot, 1, 2)
        assert [harness.answer(job_id) for job_id in ids] == [2, 4]
        wait_until(lambda: mirrored.count("failed") == 2, 30, "the pairs are dropped")
        # The order holds while it cannot be read.
        mirrored.report()
        assert mirrored.mirror.is_active
        redis_server.resume()
        mirrored.serve(slot, 3)
        wait_until(lambda: end.state(slot).pairs >= 1, 30, "it goes on")
        mirrored.mirror.close()


def test_an_error_of_the_mirror_stays_in_the_mirror(
    harness: SteppedHarness, shared_redis: RedisServer, slot: str, end: RedisShadow
):
    """Whatever is wrong with it, the job is answered: here the settlement has no runs that it can read."""
    begun(end, slot)
    mirrored = Mirrored(harness, shared_redis.url)
    mirrored.report()
    mirrored.mirror.offer(None)  # type: ignore[arg-type]  # on purpose
    ids = mirrored.serve(slot, 1)
    assert harness.answer(ids[0]) == 2
    mirrored.mirror.close()
