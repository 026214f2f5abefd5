"""The tiers behind the memory of a worker, through a drain: the test is the I/O thread and the threads of the cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from penstock.registry.broker.base import State
from penstock.registry.tensors import Tensor
from penstock.safety.cache_entry import EXACT, CacheEntry, pack, unpack
from penstock.workers.assembly import PartTypes
from penstock.workers.cache import answers
from penstock.workers.cache.tier import Put, TierStats
from penstock.workers.cache.tiers import SharedTiers, form_of
from penstock.workers.results import EncodedOutputs
from penstock.workers.versions.version import ServedVersion
from tests.packages import recorded_forwards, write_raiser, write_recorder
from tests.servers import wait_until
from tests.workers.cache.stepped_tiers import DictTier, SteppedTiers
from tests.workers.doubles import job_of, ready_version
from tests.workers.runtime.formats import write_pytorch
from tests.workers.stepped import SteppedHarness, SteppedWorker, open_harness

TIMEOUT_S = 0.03
LIFETIME_S = 100.0


class Stage:
    """A stepped worker of the model `m`, with two tiers behind its memory."""

    def __init__(self, harness: SteppedHarness, **options: Any) -> None:
        self.harness = harness
        self.l2, self.l3 = (DictTier(name, harness.clock) for name in ("l2", "l3"))
        self.worker = self.start_worker(**options)

    def start_worker(self, **options: Any) -> SteppedWorker:
        """One more worker over the same tiers."""
        return self.harness.start_worker(tiers=[self.l2, self.l3], types=PartTypes(tiers=SteppedTiers), **options)

    def tiers_of(self, worker: SteppedWorker) -> SteppedTiers:
        tiers = worker.drain.parts.answers.tiers
        assert isinstance(tiers, SteppedTiers)
        return tiers

    @property
    def tiers(self) -> SteppedTiers:
        return self.tiers_of(self.worker)

    def run(self, *numbers: float, **how: Any) -> list[str]:
        """Jobs to their end, with every look-up answered; their ids."""
        ids = self.harness.publish("m", *numbers, **how)
        self.end_jobs()
        return ids

    def end_jobs(self, worker: SteppedWorker | None = None) -> None:
        worker = worker or self.worker
        for _ in range(4):
            worker.turn(2)
            self.tiers_of(worker).read()
            worker.turn(1)
            worker.forwards()
            self.tiers_of(worker).write()

    def answers(self, ids: list[str]) -> list[float | str]:
        return [self.harness.answer(each) for each in ids]

    def forget_memory(self) -> None:
        """As after a restart."""
        (version,) = self.worker.drain.lifecycle.turns
        self.worker.drain.parts.answers.memory.forget(version.content_hash)


@pytest.fixture
def stage(models_root: Path, tmp_path: Path) -> Iterator[Stage]:
    write_recorder(models_root, tmp_path / "forward_log", "m")
    cache = {"ttl_seconds": LIFETIME_S, "lookup_timeout_ms": TIMEOUT_S * 1000}
    for harness in open_harness(models_root, cache=cache):
        yield Stage(harness)


@pytest.fixture
def forwards(tmp_path: Path) -> Any:
    """The rows of all forwards so far, without those of the warm-up."""
    return lambda: _rows(tmp_path)


def test_an_answer_in_a_tier_needs_no_forward(stage: Stage, forwards: Any):
    """It is written behind the commit, found by a worker with an empty memory, and from then on in its memory, too."""
    (first,) = stage.run(7)
    assert (len(stage.l2.entries), len(stage.l3.entries)) == (1, 1)
    stage.forget_memory()
    (second,) = stage.run(7)
    looked_up = len(stage.l2.asked)
    (third,) = stage.run(7)
    assert stage.answers([first, second, third]) == [14, 14, 14]
    assert forwards() == [7]
    assert len(stage.l2.asked) == looked_up, "the third was found in memory"
    assert stage.worker.counted("penstock_cache_hits") == 2


def test_another_worker_finds_what_this_one_has_written(stage: Stage, forwards: Any):
    """L3 only, as on another machine; what it finds there it writes to its own L2, with the rest of the lifetime."""
    stage.run(7, 8)
    stage.l2.entries.clear()
    stage.harness.now += 60.0
    stage.harness.suspend(stage.worker)
    stage.worker = stage.start_worker()
    ids = stage.run(7, 8)
    assert stage.answers(ids) == [14, 16]
    assert forwards() == [7, 8]
    ends = {until for _, until in stage.l2.entries.values()}
    assert ends == {until for _, until in stage.l3.entries.values()}, "a promotion prolongs nothing"
    stage.harness.now += 39.0
    stage.run(7)
    assert forwards() == [7, 8]
    stage.harness.now += 2.0
    stage.run(7)
    assert forwards() == [7, 8, 7], "the answer has expired in every tier, in memory too"


def test_hits_and_misses_are_counted_by_tier(stage: Stage):
    """A tier is asked for what those before it lack."""
    stage.run(7, 8, 9)
    stage.forget_memory()
    (eight,) = [key for key, (value, _) in stage.l2.entries.items() if _number(value) == 16]
    del stage.l2.entries[eight]
    stage.run(7, 8, 10)
    (hits,) = [family for family in stage.worker.metrics.collect() if family.name == "penstock_cache_hits"]
    assert {sample.labels["tier"]: sample.value for sample in hits.samples} == {"l2": 1, "l3": 1}
    (misses,) = [family for family in stage.worker.metrics.collect() if family.name == "penstock_cache_misses"]
    assert {sample.labels["tier"]: sample.value for sample in misses.samples} == {"l1": 6, "l2": 5, "l3": 4}


def _rows(folder: Path) -> list[float]:
    return [row for rows in recorded_forwards(folder / "forward_log") for row in rows if row]


def _number(packed: bytes) -> float:
    return float(np.frombuffer(unpack(packed).body, np.float32)[0])


def test_equal_jobs_ask_once_and_share_the_answer(stage: Stage, forwards: Any):
    """A follower waits for the look-up of its leader."""
    stage.run(7)
    stage.forget_memory()
    ids = stage.harness.publish("m", 7, 7, 7)
    stage.worker.turn(2)
    assert [stage.harness.state(each) for each in ids] == [State.QUEUED] * 3
    stage.tiers.read()
    stage.worker.turn(2)
    assert stage.answers(ids) == [14, 14, 14]
    assert forwards() == [7]
    assert len(stage.l2.asked[-1]) == 1
    assert stage.worker.drain.parts.flights.end_all([]) == []
    (version,) = stage.worker.drain.lifecycle.turns
    assert version.queue.in_memory == 0
    assert len(stage.worker.drain.parts.leased) == 0


def test_a_tier_that_hangs_delays_no_job_beyond_the_limit(stage: Stage, forwards: Any):
    """The first jobs wait for the limit, later ones not at all; once the tier answers, it is asked again."""
    stage.run(7)
    stage.forget_memory()
    (waiting,) = stage.harness.publish("m", 7)
    stage.worker.turn(2)
    assert stage.worker.forwards() == []
    assert stage.worker.drain.sleep_s() == pytest.approx(TIMEOUT_S)
    stage.harness.now += TIMEOUT_S
    assert stage.worker.forwards() == [[waiting]]
    assert forwards() == [7, 7]
    (behind,) = stage.harness.publish("m", 8)
    assert stage.worker.forwards() == [[behind]], "nothing is asked while a question is open"
    assert stage.tiers.timeouts == 1
    stage.tiers.read()
    stage.worker.turn(1)
    stage.tiers.write()
    stage.forget_memory()
    stage.run(7)
    assert forwards() == [7, 7, 8], "the tier answers again"


def test_a_tier_with_a_fault_harms_no_job(stage: Stage, forwards: Any):
    """No tier may raise; if one does, its thread goes on, and so does the next tier."""
    stage.run(7)
    stage.forget_memory()
    stage.l2.fault = RuntimeError("a fault of ours")
    stage.run(7)
    assert forwards() == [7], "L3 had it"
    stage.l3.fault = RuntimeError("another one")
    stage.forget_memory()
    ids = stage.run(7, 8)
    assert stage.answers(ids) == [14, 16]
    assert sorted(forwards()) == [7, 7, 8]


@pytest.mark.parametrize("what", ["cancelled", "expired", "lost", "paused", "stopped"])
def test_a_job_whose_answer_is_looked_up_is_a_waiting_job(stage: Stage, forwards: Any, what: str):
    """It is cancelled, ends with its deadline, is lost with its lease, and goes back from a paused or stopping worker.
    An answer that comes later changes nothing.
    """
    harness, worker = stage.harness, stage.worker
    stage.run(7)
    stage.forget_memory()
    (job_id,) = harness.publish("m", 7, **({"deadline_s": 5.0} if what == "expired" else {}))
    worker.turn(2)
    assert [job.header.id for job in worker.drain.parts.backlog] == [job_id]
    tiers = stage.tiers
    tiers._timeout_s = 1000.0
    if what == "cancelled":
        harness.broker.cancel(job_id, "acme", b"cancelled")
        harness.pass_time(2.0)
        assert harness.state(job_id) is State.CANCELLED
    elif what == "expired":
        harness.pass_time(6.0)
        assert harness.state(job_id) is State.EXPIRED
    elif what == "lost":
        harness.suspend(worker)
        other = stage.start_worker()
        harness.pass_time(12.0)
        stage.end_jobs(other)
        assert harness.answer(job_id) == 14
        worker.drain.leases.tick()
    elif what == "paused":
        harness.broker.pause("m")
        worker.drain.parts.status.report(is_ready=True)
        worker.turn(2)
        assert harness.state(job_id) is State.QUEUED
    else:
        worker.drain.ask_to_stop(10.0)
        worker.turn(3)
        assert harness.state(job_id) is State.QUEUED
    assert len(worker.drain.parts.leased) == (1 if what == "lost" else 0)
    before = harness.job_record(job_id)
    tiers.read()
    worker.turn(3)
    assert len(worker.drain.parts.leased) == 0
    assert harness.job_record(job_id) == before
    assert forwards() == ([7, 7] if what == "lost" else [7]), "the other worker did not wait for its tiers"


def test_an_answer_of_another_content_or_form_is_not_given(stage: Stage):
    """The version changes while the tiers are asked, or between two workers."""
    stage.run(7)
    (key,) = stage.l2.entries
    value, until = stage.l2.entries[key]
    entry = unpack(value)
    assert entry.form == EXACT
    for changed in (
        CacheEntry(entry.content, b"\0" * len(entry.body), "0" * 64, EXACT),
        CacheEntry(entry.content, b"\0" * len(entry.body), entry.content_hash, "bf16"),
    ):
        stage.l2.entries[key] = pack(changed), until
        stage.l3.entries.clear()
        stage.forget_memory()
        (job_id,) = stage.run(7)
        assert stage.answers([job_id]) == [14]
    stage.l2.entries[key] = b"no entry at all", until
    stage.forget_memory()
    assert stage.answers(stage.run(7)) == [14]


def test_an_answer_of_a_form_that_was_changed_meanwhile_is_neither_given_nor_written(
    models_root: Path, monkeypatch: pytest.MonkeyPatch
):
    """Between the question and its answer, and between a look at the form and a look at its generation."""
    write_pytorch(models_root, name="m")
    for harness in open_harness(models_root):
        stage = Stage(harness)
        stage.run(7)
        assert len(stage.l2.entries) == 1
        stage.forget_memory()
        (job_id,) = harness.publish("m", 7)
        stage.worker.turn(2)
        stage.tiers.read()
        (version,) = stage.worker.drain.lifecycle.turns
        forms = version.model.forms
        assert forms is not None
        forms.use("bf16", forms.reference)
        assert stage.worker.forwards() == [[job_id]]
        stage.tiers.write()

        def changing(version: ServedVersion) -> str:
            assert version.model.forms is not None
            version.model.forms.use("int8", version.model.forms.reference)
            return "int8"

        monkeypatch.setattr(answers, "form_of", changing)
        written = len(stage.l2.entries)
        assert stage.answers(stage.run(8))
        assert len(stage.l2.entries) == written


def test_a_promotion_removes_the_answers_of_the_old_content(stage: Stage):
    """In each tier; those of other contents stay (AR-018)."""
    stage.run(7)
    (key,) = stage.l2.entries
    other = key._replace(group="ab" * 32)
    for tier in (stage.l2, stage.l3):
        tier.entries[other] = b"", stage.harness.now + 60.0
    stage.worker.drain.parts.answers.forget(key.group)
    stage.tiers.write()
    assert [list(tier.entries) for tier in (stage.l2, stage.l3)] == [[other], [other]]


def test_tenants_have_entries_of_their_own(stage: Stage):
    """The name of an entry has its tenant, besides the digest that has it, too."""
    stage.run(7)
    (key,) = stage.l2.entries
    assert key.tenant == "acme"


def test_what_must_not_leave_the_memory_is_in_no_tier(models_root: Path, tmp_path: Path):
    """An answer, and an answer to such inputs, is still found in memory."""
    unwanted = {np.float32(number).tobytes() for number in (14, 8)}
    write_recorder(models_root, tmp_path / "forward_log", "m")
    for harness in open_harness(models_root):
        stage = Stage(harness, may_leave=lambda _content, body: bytes(body[:4]) not in unwanted)
        stage.run(7, 8, 9)
        assert [_number(value) for value, _ in stage.l2.entries.values()] == [18]
        assert stage.tiers.withheld == 2
        stage.run(7)
        assert _rows(tmp_path) == [7, 8, 9]


def test_failures_are_in_no_tier(models_root: Path):
    """A model that fails answers nothing."""
    write_raiser(models_root, "m")
    for harness in open_harness(models_root):
        stage = Stage(harness)
        (job_id,) = stage.run(-1)
        assert harness.state(job_id) is State.FAILED
        assert not stage.l2.entries
        assert not stage.l3.entries


def test_the_form_of_an_entry_is_exact_up_to_level_two(models_root: Path):
    """Forms within the tolerance share their answers; forms of another precision have their own."""
    write_pytorch(models_root, name="m")
    for harness in open_harness(models_root):
        worker = harness.start_worker()
        (version,) = worker.drain.lifecycle.turns
        forms = version.model.forms
        assert forms is not None
        names = {}
        for name in ("eager", "compiled", "prepacked", "onnx", "bf16", "int8", "unheard of"):
            forms.use(name, forms.reference)
            names[name] = form_of(version)
        exact = dict.fromkeys(("eager", "compiled", "prepacked", "onnx"), EXACT)
        assert names == exact | {"bf16": "bf16", "int8": "int8", "unheard of": "unheard of"}
    assert form_of(ready_version()) == EXACT


def test_threads_read_and_write_and_end_with_the_drain(models_root: Path):
    """With real threads: they begin with the first question, and what was kept is written before the tiers close."""
    rung = threading.Event()
    tiers = [DictTier("l2", time.monotonic)]
    shared = SharedTiers(
        tiers,
        isolates_tenants=True,
        may_leave=None,
        timeout_s=30.0,
        ring=rung.set,
        clock=time.monotonic,
    )
    version = ready_version()
    assert not [each for each in threading.enumerate() if each.name.startswith("cache-")]
    job = job_of(7)
    job.digest = b"d" * 16
    shared.ask(version, [job])
    assert rung.wait(180)
    ((_, jobs, answers),) = wait_until(shared.take_answered, 30, "the question is answered")
    assert (jobs, answers) == ([job], [None])
    shared.keep([(job, _encoded())], version.content_hash, EXACT, 60.0)
    assert shared.flush(30)
    assert len(tiers[0].entries) == 1
    shared.keep([(job, _encoded())], "cd" * 32, EXACT, 60.0)
    shared.close(30.0)
    assert len(tiers[0].entries) == 2
    assert tiers[0].is_closed
    assert not [each for each in threading.enumerate() if each.name.startswith("cache-")]
    shared.close()


def _encoded() -> EncodedOutputs:
    return EncodedOutputs((Tensor("y", "float32", (1, 4)),), memoryview(b"1234" * 4), "ab" * 32, 0)


def test_too_many_unwritten_answers_are_dropped_and_counted(stage: Stage):
    """A slow disk costs entries, and no memory without a limit."""
    tiers = stage.tiers
    job = job_of(7)
    job.digest = b"d" * 16
    large = structs.replace(_encoded(), body=bytes(20 << 20))
    for _ in range(3):
        tiers.keep([(job, large)], "ab" * 32, EXACT, 60.0)
    assert tiers.unwritten == 2
    tiers.write()
    assert len(stage.l2.entries) == 1
    tiers.keep([(job, large)], "cd" * 32, EXACT, 60.0)
    tiers.write()
    assert len(stage.l2.entries) == 2


def test_too_many_unwritten_promotions_are_dropped_and_counted(stage: Stage):
    """Answers of the fleet's tier wait for a slow disk no longer than others; they are found all the same."""
    (version,) = stage.worker.drain.lifecycle.turns
    large = pack(CacheEntry(_encoded().content, bytes(20 << 20), "", EXACT))
    jobs = [job_of(number) for number in range(3)]
    for number, job in enumerate(jobs):
        job.digest = bytes([number]) * 16
        key = stage.tiers._key_of(version.content_hash, job)
        stage.l3.put_many([Put(key, large, 60.0)])
    for job in jobs:
        stage.tiers.ask(version, [job])
        stage.tiers.read()
        ((_, _, (answer,)),) = stage.tiers.take_answered()
        assert answer is not None
        assert answer.tier == "l3"
    assert stage.tiers.unwritten == 2
    stage.tiers.write()
    assert len(stage.l2.entries) == 1
    stage.tiers.ask(version, jobs[1:2])
    stage.tiers.read()
    stage.tiers.write()
    assert len(stage.l2.entries) == 2, "what was written has given its memory back"


def test_the_report_shows_each_tier(stage: Stage):
    """Counters of the tiers, and how often a look-up took too long."""
    stage.l2._stats = TierStats(hits=3, errors=2)
    stage.run(7)
    shown = stage.worker.drain.parts.answers.as_data()
    assert shown["l1"]["entries"] == 1
    assert (shown["l2"]["hits"], shown["l2"]["errors"]) == (3, 2)
    assert shown["tiers"] == {"timeout": 0, "unwritten": 0, "withheld": 0}
    stage.l3._stats = TierStats(is_size_known=False)
    stage.worker.drain.parts.status.report(is_ready=True)
    assert stage.worker.counted("penstock_cache_faults") == 2
    (entries,) = [family for family in stage.worker.metrics.collect() if family.name == "penstock_cache_entries"]
    assert {sample.labels["tier"] for sample in entries.samples} == {"l1", "l2"}, "Redis does not tell it"


def _remove(stage: Stage, how: str) -> None:
    """Ask for the removal of all entries, or of those of the version."""
    cache = stage.worker.drain.parts.answers
    (version,) = stage.worker.drain.lifecycle.turns
    if how == "clear":
        cache.clear()
    else:
        cache.forget(version.content_hash)


@pytest.mark.parametrize("how", ["clear", "forget"])
def test_a_look_up_beside_a_removal_keeps_no_entry(stage: Stage, forwards: Any, how: str):
    """What was found before is not given, and is in no memory afterwards."""
    stage.run(7)
    stage.forget_memory()
    stage.harness.publish("m", 7)
    stage.worker.turn(2)
    stage.tiers.read()
    _remove(stage, how)
    stage.tiers.write()
    stage.worker.turn(1)
    assert len(stage.worker.drain.parts.answers.memory) == 0
    stage.end_jobs()
    assert forwards() == [7, 7]


@pytest.mark.parametrize("how", ["clear", "forget"])
def test_a_promotion_behind_a_removal_writes_nothing(stage: Stage, forwards: Any, how: str):
    """L3 is read while its removal waits for the thread of the writes. Until then nothing is asked, and then it is."""
    stage.run(7)
    stage.l2.entries.clear()
    stage.forget_memory()
    stage.harness.publish("m", 7)
    stage.worker.turn(2)
    _remove(stage, how)
    stage.harness.publish("m", 8)
    stage.worker.turn(2)
    looked_up = len(stage.l3.asked)
    stage.tiers.read()
    assert len(stage.l3.asked) == looked_up
    stage.tiers.write()
    assert not stage.l2.entries
    assert not stage.l3.entries
    stage.end_jobs()
    stage.forget_memory()
    stage.run(7, 8)
    assert sorted(forwards()) == [7, 7, 8]


@pytest.mark.parametrize("how", ["clear", "forget"])
def test_a_promotion_that_was_read_before_a_removal_writes_nothing(stage: Stage, how: str):
    """It waits for the thread of the writes behind a removal that came first."""
    stage.run(7)
    stage.l2.entries.clear()
    stage.forget_memory()
    stage.harness.publish("m", 7)
    stage.worker.turn(2)
    find = stage.l3.get_many

    def found_before_removal(keys: Any) -> Any:
        found = find(keys)
        _remove(stage, how)
        return found

    stage.l3.get_many = found_before_removal  # type: ignore[method-assign]
    stage.tiers.read()
    stage.tiers.write()
    assert not stage.l2.entries


def test_a_cleared_cache_is_empty_in_every_tier(stage: Stage, forwards: Any):
    """Also its memory; the next equal job has a forward."""
    stage.run(7, 8)
    assert stage.worker.drain.parts.answers.clear() == 2
    stage.tiers.write()
    assert not stage.l2.entries
    assert not stage.l3.entries
    assert stage.worker.drain.parts.answers.memory.nbytes == 0
    stage.run(7)
    assert forwards() == [7, 8, 7]
