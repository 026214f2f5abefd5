"""Cached answers: an equal job needs no forward, and never gets an answer of another model, tenant or form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.registry.admission import JobBuilder
from penstock.registry.envelope import ResultHeader
from penstock.registry.package import find
from penstock.workers.drain import Drain
from penstock.workers.runtime.forms import Tunable
from tests.packages import recorded_forwards, write_package, write_recorder
from tests.servers import wait_until
from tests.workers.runtime.formats import affine, write_pytorch
from tests.workers.test_drain import ROOMY, UNSIGNED, Connect, DrainHarness, StartDrain, connect, start
from tests.workers.versions.test_lifecycle import Stage, two_versions, write_scale

__all__ = ["connect", "start"]


@pytest.fixture
def forward_log(tmp_path: Path, models_root: Path, slot: str) -> Path:
    """The file in which a model notes every row of its forwards."""
    write_recorder(models_root, tmp_path / "forward_log", slot)
    return tmp_path / "forward_log"


def _configure(models_root: Path, slot: str, text: str) -> None:
    (file,) = models_root.glob(f"{slot}/*/model.yaml")
    file.write_text(file.read_text() + text)


def _times_run(forward_log: Path, number: float) -> int:
    return [row for rows in recorded_forwards(forward_log) for row in rows].count(number)


def _ask(harness: DrainHarness, slot: str, number: float, **how: Any) -> ResultHeader:
    """Run one job to its end, and check its answer; returns the result header."""
    (job_id,) = harness.publish(slot, number, **how)
    header, answer = harness.result(job_id)
    assert answer == 2 * number
    return header


def test_equal_job_needs_no_forward(start: StartDrain, forward_log: Path, slot: str):
    """Its result is marked as cached and names the content; other inputs need a forward (SH-004, CF-017, CX-006)."""
    harness = start()
    first, second, other = (_ask(harness, slot, number) for number in (7, 7, 8))
    assert (_times_run(forward_log, 7), _times_run(forward_log, 8)) == (1, 1)
    assert (first.is_cached, second.is_cached, other.is_cached) == (False, True, False)
    assert (first.batch_size, second.batch_size) == (1, 0)
    assert second.id != first.id
    assert (second.content_hash, second.version) == (first.content_hash, first.version)
    assert len(second.content_hash) == 64
    wait_until(lambda: harness.counted("penstock_cache_hits") == 1, 5, "the hit is counted")
    assert harness.counted("penstock_cache_misses") == 2
    outcomes = {"completed": 3}
    wait_until(lambda: harness.metrics.snapshot()["models"][slot]["outcomes"] == outcomes, 5, "the jobs are counted")
    assert harness.metrics.snapshot()["models"][slot]["jobs"] == 3
    wait_until(lambda: harness.counted("penstock_cache_entries") == 2, 5, "the entries are counted")


@pytest.mark.parametrize(
    ("settings", "model"),
    [
        ({"cache": {"enabled": False}}, ""),
        ({"enabled": False}, ""),
        ({}, "deterministic: false\n"),
        ({}, "policy:\n  default:\n    cache_ttl_s: 0\n"),
    ],
    ids=["cache.enabled", "enabled", "chance", "cache_ttl_s"],
)
def test_answers_are_not_cached_where_caching_is_off(
    start: StartDrain, models_root: Path, forward_log: Path, slot: str, settings: dict[str, Any], model: str
):
    """By setting or by model: the model runs every time and no lookup is counted (CF-003, CF-017, AR-023)."""
    _configure(models_root, slot, model)
    harness = start(**settings)
    assert not any(_ask(harness, slot, 7).is_cached for _ in range(3))
    assert _times_run(forward_log, 7) == 3
    assert {harness.counted(f"penstock_cache_{each}") for each in ("hits", "misses")} == {0}
    assert _kept(harness.drain) == 0


@pytest.mark.parametrize("isolated", [True, False])
def test_tenants_share_answers_only_if_allowed(start: StartDrain, forward_log: Path, slot: str, isolated: bool):
    """The same input of two tenants needs two forwards, or one without isolation (CF-024)."""
    harness = start(privacy={"cache_tenant_isolation": isolated})
    _ask(harness, slot, 7)
    other = JobBuilder(tenant="umbrella", keyring=UNSIGNED, max_bytes=1 << 20)
    job = other.build(harness._models[slot], {"x": [[7, 0, 0, 0]]})
    harness.broker.publish(slot, [job], ROOMY)
    header, answer = harness.result(job.job_id)
    assert (answer, header.context.tenant, header.is_cached) == (14, "umbrella", not isolated)
    assert _times_run(forward_log, 7) == (2 if isolated else 1)


def test_failures_are_not_cached(start: StartDrain, models_root: Path, slot: str, tmp_path: Path):
    """After an exception and after a NaN the next equal job has its own forward."""
    source = f"""
from pathlib import Path

CALLS = Path({str(tmp_path / "calls")!r})

def build():
    def forward(inputs):
        calls = len(CALLS.read_text()) if CALLS.exists() else 0
        if inputs["x"][0, 0] == 7:
            CALLS.write_text("x" * (calls + 1))
            if calls == 0:
                raise ValueError("not today")
            if calls == 1:
                return {{"y": inputs["x"] * float("nan")}}
        return {{"y": inputs["x"] * 2}}
    return forward
"""
    write_package(models_root, slot, source, max_batch_size=1)
    harness = start()
    for text in ("not today", "NaN"):
        header, _ = harness.result(harness.publish(slot, 7)[0])
        assert header.error is not None
        assert text in header.error.message
        assert not header.is_cached
    assert [_ask(harness, slot, 7).is_cached for _ in range(2)] == [False, True]


def test_an_answer_of_another_form_is_not_given(start: StartDrain, models_root: Path, slot: str):
    """After a change of form its cached answers are not given: the form may have been dropped for wrong answers."""
    write_pytorch(models_root, name=slot)
    harness = start()

    def is_cached() -> bool:
        (job_id,) = harness.publish(slot, 7)
        header, answer = harness.result(job_id)
        assert answer == pytest.approx(affine(np.array([[7, 0, 0, 0]], np.float32))[0, 0], abs=1e-5)
        return header.is_cached

    assert [is_cached() for _ in range(2)] == [False, True]
    (version,) = harness.drain.lifecycle.turns
    assert isinstance(version.runtime, Tunable)
    version.runtime.forms.use("other", version.runtime.forms.reference)
    assert [is_cached() for _ in range(2)] == [False, True]
    version.runtime.forms.reset("it was wrong")
    assert not is_cached()


def test_least_recently_used_answers_leave(start: StartDrain, forward_log: Path, slot: str):
    """The setting bounds the number of entries (CF-018)."""
    harness = start(cache={"l1_size": 3})
    for number in (1, 2, 3, 1, 4):
        _ask(harness, slot, number)
    assert [_ask(harness, slot, number).is_cached for number in (1, 3, 4)] == [True, True, True]
    assert not _ask(harness, slot, 2).is_cached
    assert _times_run(forward_log, 2) == 2


@pytest.fixture
def stage(connect: Connect, tmp_path: Path) -> Iterator[Stage]:
    """See two_versions."""
    with two_versions(tmp_path, connect) as stage:
        yield stage


def _kept(drain: Drain) -> int:
    return len(drain.parts.answers.memory)


def test_a_change_of_version_empties_every_workers_cache(stage: Stage):
    """Three workers get one signal each; no job gets the old version's answer (AR-018, AR-080)."""
    drains = [stage.start() for _ in range(3)]
    numbers = [float(number) for number in range(1, 4)]

    def all_have_some() -> bool:
        for number in numbers:
            assert stage.answer(number) == ("2", 10 * number)
        return all(_kept(drain) for drain in drains)

    wait_until(all_have_some, 20, "every worker has cached answers")
    stage.promote("1", epoch=1)
    wait_until(lambda: not any(map(_kept, drains)), 30, "the caches are empty")
    for _ in range(3):
        assert [stage.answer(number) for number in numbers] == [("1", number) for number in numbers]
    assert len(stage.changes) == 3
    assert len({old for _, old, _ in stage.changes}) == 1


def test_other_content_under_the_same_label_has_its_own_answers(stage: Stage):
    """One changed byte makes other content, also under the same label (AR-018)."""
    drain = stage.start()
    assert [stage.answer(3.0) for _ in range(2)] == [("2", 30.0)] * 2
    first, _ = stage.result(stage.submit(3.0))
    assert first.is_cached
    source = find(stage.root, stage.model, "2").path / "model.py"
    source.write_text(source.read_text().replace("* 10", "* 11"))
    stage.promote("2", epoch=1)
    wait_until(lambda: stage.answer(3.0)[1] == 33.0, 10, "the new content answers")
    header, value = stage.result(stage.submit(3.0))
    assert (value, header.is_cached, header.content_hash != first.content_hash) == (33.0, True, True)
    assert drain.health.unhealthy_reason() is None


def test_a_named_version_has_its_own_answers(stage: Stage):
    """They are cached beside those of the active version."""
    stage.start()
    for _ in range(2):
        assert [stage.answer(3.0, version) for version in ("1", "2")] == [("1", 3.0), ("2", 30.0)]
    assert all(stage.result(stage.submit(3.0, version))[0].is_cached for version in ("1", "2"))


def _unload(stage: Stage, drain: Drain, label: str) -> None:
    """Unload a version, as the memory limit does."""
    (version,) = [version for version in drain.lifecycle.turns if version.label == label]
    drain.lifecycle.request(lambda: drain.lifecycle._unload(version))
    wait_until(lambda: stage.state(label, drain) == "cold", 5, "it is unloaded")


def test_other_content_of_a_named_version_has_its_own_answers(stage: Stage):
    """The version is unloaded and loaded again with other files, without a promotion (AR-018)."""
    drain = stage.start()
    assert [stage.answer(3.0, "1") for _ in range(2)] == [("1", 3.0)] * 2
    _unload(stage, drain, "1")
    source = find(stage.root, stage.model, "1").path / "model.py"
    source.write_text(source.read_text().replace("* 1}", "* 7}"))
    assert stage.answer(4.0, "1") == ("1", 28.0)
    assert stage.answer(3.0, "1") == ("1", 21.0)


def test_answers_of_the_former_version_are_not_cached(stage: Stage):
    """The former version ends its batch after the other one became active (AR-080)."""
    write_scale(stage.root, stage.model, "3", 100, forward_s=1.5)
    drain = stage.start()
    before = stage.submit(3.0)
    wait_until(drain.active, 5, "the former version's forward")
    stage.promote("1", epoch=1)
    wait_until(lambda: stage.changes, 5, "the change")
    assert stage.result(before)[1] == 300.0
    assert stage.answer(4.0) == ("1", 4.0)
    assert {answer.content_hash for answer, *_ in drain.parts.answers.memory._entries.values()} == {stage.changes[0][2]}


def test_an_unloaded_former_version_loses_its_answers(stage: Stage):
    """Its answers are removed, and the change names the content that was active before (AR-080)."""
    drain = stage.start(preload=False)
    assert [stage.answer(3.0) for _ in range(2)] == [("2", 30.0)] * 2
    _unload(stage, drain, "2")
    stage.promote("1", epoch=1)
    wait_until(lambda: stage.changes, 5, "the change")
    assert [len(content_hash) for content_hash in stage.changes[0][1:]] == [64, 64]
    wait_until(lambda: _kept(drain) == 0, 5, "the cache is empty")
