"""The fallback chain in a worker: each level fails in turn, the next one answers, and the result names it. AR-067."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from penstock.registry.broker.base import State
from penstock.registry.envelope import ResultHeader, open_result
from penstock.registry.tensors import Array, decode
from penstock.workers.runtime.base import Prepared
from penstock.workers.runtime.forms import Forms, forms_of
from penstock.workers.versions.repository import DiskRepository
from tests.packages import write_package
from tests.workers.runtime.formats import write_pytorch
from tests.workers.stepped import UNSIGNED, SteppedHarness, SteppedWorker, open_harness

PICKY = """
    def build():
        def forward(inputs):
            if (inputs["x"][:, 0] < 0).any():
                raise ValueError("a negative row: %s" % inputs["x"][:, 0].tolist())
            return {"y": inputs["x"] * 2}

        return forward
    """
"""Answers 2 x, and raises for a batch in which any row begins with a negative number."""


def _write(root: Path, source: str, version: str, **spec: Any) -> None:
    folder = write_package(root, "picky", source, version=version)
    declared = yaml.safe_load((folder / "model.yaml").read_text()) | spec
    (folder / "model.yaml").write_text(yaml.safe_dump(declared))


@pytest.fixture
def harness(models_root: Path) -> Iterator[SteppedHarness]:
    write_pytorch(models_root)
    yield from open_harness(models_root)


@pytest.fixture
def picky(models_root: Path) -> Iterator[SteppedHarness]:
    """Version 1 names version 0, which answers 3 x for every input but -9."""
    _write(models_root, PICKY, "1", policy={"default": {"fallback_version": "0"}})
    source = PICKY.replace("< 0", "== -9").replace("* 2", "* 3").replace("a negative row", "minus nine")
    _write(models_root, source, "0")
    yield from open_harness(models_root)


def _header(harness: SteppedHarness, job_id: str) -> ResultHeader:
    return open_result(harness.job_record(job_id).result, UNSIGNED)[0]


def _answered(harness: SteppedHarness, job_id: str) -> tuple[str, str, float]:
    """Version, level and first number of a completed job."""
    header, body = open_result(harness.job_record(job_id).result, UNSIGNED)
    assert header.error is None
    return header.version, header.level, float(decode(header.content, body)["y"][0, 0])


def _form(worker: SteppedWorker) -> Forms:
    (version,) = worker.drain.lifecycle.turns
    forms = forms_of(version.runtime)
    assert forms is not None
    return forms


def _run(worker: SteppedWorker) -> None:
    for _ in range(6):
        worker.turn(2)
        worker.forwards()
        worker.drain.parts.lifecycle.loader.take_done()


def _wait_for_load(worker: SteppedWorker) -> None:
    """The load of another version has a thread of its own, the only one here."""
    loader = worker.drain.parts.lifecycle.loader
    worker.turn(2)
    worker.forwards()
    worker.turn(2)
    while loader.is_busy:
        loader._has_ended.wait(0.1)
        worker.turn()


def _serve_with_other_versions(harness: SteppedHarness) -> SteppedWorker:
    return harness.start_worker(repository=DiskRepository(harness.models_root, [harness.models_root]))


def test_first_level_is_not_told(harness: SteppedHarness):
    """The results of a model whose levels all work are as they were: they name no level."""
    worker = harness.start_worker()
    (job,) = harness.publish("affine", 1)
    _run(worker)
    assert _header(harness, job).level == ""
    assert worker.counted("penstock_fallback_answers") == 0


@pytest.mark.parametrize(("numbers", "level"), [((1, 2, 3), "micro-batched"), ((1,), "plain")])
def test_failed_form_is_followed_by_the_model_as_built(harness: SteppedHarness, numbers: tuple[float, ...], level: str):
    """The batch on which the form failed names the level that answered, and so do later ones while the form is off."""
    worker = harness.start_worker()
    reference = _form(worker).reference

    def broken(prepared: Prepared) -> dict[str, Array]:
        raise RuntimeError("a kernel is gone")

    _form(worker).use("compiled", broken)
    for _ in range(2):
        jobs = harness.publish("affine", *numbers)
        _run(worker)
        assert {_header(harness, job).level for job in jobs} == {level}
    assert worker.counted("penstock_fallback_answers") == 2 * len(numbers)
    _form(worker).use("compiled", reference)
    (job,) = harness.publish("affine", 9)
    _run(worker)
    assert _header(harness, job).level == ""


def test_form_whose_breaker_is_open_is_told_as_a_skipped_level(harness: SteppedHarness):
    """A client sees that its job was answered by a later level, although nothing failed on it."""
    worker = harness.start_worker()
    forms = _form(worker)
    forms.use("compiled", forms.reference)
    forms.admits = lambda name: False
    jobs = harness.publish("affine", 1, 2)
    _run(worker)
    assert {_header(harness, job).level for job in jobs} == {"micro-batched"}


def test_jobs_of_a_failed_batch_are_answered_one_by_one(models_root: Path):
    """The neighbours of a bad job are answered by the level `plain`. Its error is the same as without neighbours."""
    _write(models_root, PICKY, "1")
    for harness in open_harness(models_root):
        worker = harness.start_worker()
        good, bad, other = harness.publish("picky", 7, -1, -2)
        _run(worker)
        assert _answered(harness, good) == ("1", "plain", 14.0)
        told = _header(harness, bad).error
        assert told is not None
        assert told.message == "ValueError: a negative row: [-1.0]"
        assert _header(harness, other).level == ""
        assert {error.code for error in worker.notes.errors} == {"ModelError"}


def test_error_of_a_job_tells_nothing_of_its_neighbours(picky: SteppedHarness):
    """The failed micro-batch is named with the class of its exception: the text may quote the input of another job."""
    worker = _serve_with_other_versions(picky)
    one, other = picky.publish("picky", -9, -9.5)
    _wait_for_load(worker)
    _run(worker)
    assert _answered(picky, other)[:2] == ("0", "fallback")
    told = _header(picky, one).error
    assert told is not None
    assert "-9.5" not in told.message
    assert "micro-batched: ValueError; plain: ValueError: a negative row: [-9.0]; fallback: " in told.message


def test_failed_job_goes_on_to_the_version_of_the_policy(picky: SteppedHarness):
    """The result names that version and the level; an equal job later is not answered with it from the cache."""
    worker = _serve_with_other_versions(picky)
    for _ in range(2):
        good, bad = picky.publish("picky", 7, -1)
        _wait_for_load(worker)
        _run(worker)
        assert _answered(picky, good)[::2] == ("1", 14.0)
        header = _header(picky, bad)
        assert _answered(picky, bad) == ("0", "fallback", -3.0)
        assert (header.content_hash, header.is_cached) == (_content_of(worker, "0"), False)
    assert worker.counted("penstock_retried") == 2
    assert worker.counted("penstock_fallback_answers") == 3


def _content_of(worker: SteppedWorker, label: str) -> str:
    (version,) = [version for version in worker.drain.lifecycle.turns if version.label == label]
    return version.content_hash


def test_end_of_the_chain_is_an_error_that_names_every_level(picky: SteppedHarness):
    """The version of the policy failed, too: ModelError with each level and its reason."""
    worker = _serve_with_other_versions(picky)
    (bad,) = picky.publish("picky", -9)
    _wait_for_load(worker)
    _run(worker)
    told = _header(picky, bad).error
    assert told is not None
    assert (told.code, told.message) == (
        "ModelError",
        "ValueError: minus nine: [-9.0]. Every level of the fallback chain failed. "
        "plain: ValueError: a negative row: [-9.0]; fallback: ValueError: minus nine: [-9.0]",
    )


def test_version_of_the_policy_refuses_values_as_it_refuses_descriptions(models_root: Path):
    """NaN, which only the job's own version allows: the job keeps the failure of that one, also where the other one
    knows its description."""
    allowing = [{"name": "x", "dtype": "float32", "shape": ["batch", 4], "allow_nan": True}]
    picky = PICKY.replace('(inputs["x"][:, 0] < 0)', '(~(inputs["x"][:, 0] >= 0))')
    _write(models_root, picky, "1", inputs=allowing, policy={"default": {"fallback_version": "0"}})
    _write(models_root, PICKY.replace("< 0", "== -9"), "0")
    for harness in open_harness(models_root):
        worker = _serve_with_other_versions(harness)
        (known,) = harness.publish("picky", -1)
        _wait_for_load(worker)
        _run(worker)
        assert _answered(harness, known)[:2] == ("0", "fallback")
        (job,) = harness.publish("picky", np.nan)
        _run(worker)
        told = _header(harness, job).error
        assert told is not None
        assert (told.code, told.message[:33]) == ("ModelError", "ValueError: a negative row: [nan]")
        assert "fallback: skipped: " in told.message


@pytest.mark.parametrize("missing", ["absent", "other inputs", "broken"])
def test_version_of_the_policy_that_cannot_run_is_named(models_root: Path, missing: str):
    """It is not there, takes other inputs or cannot be loaded: the job ends with its own error and that reason."""
    _write(models_root, PICKY, "1", policy={"default": {"fallback_version": "0"}})
    if missing == "other inputs":
        _write(models_root, PICKY, "0", inputs=[{"name": "z", "dtype": "float32", "shape": ["batch", 4]}])
    if missing == "broken":
        _write(models_root, "raise RuntimeError('no weights')", "0")
    for harness in open_harness(models_root):
        worker = _serve_with_other_versions(harness)
        (bad,) = harness.publish("picky", -1)
        _wait_for_load(worker)
        _run(worker)
        told = _header(harness, bad).error
        assert told is not None
        assert "plain: ValueError: a negative row: [-1.0]; fallback: skipped: " in told.message
        assert harness.state(bad) is State.FAILED


def test_job_that_names_a_version_has_that_version_or_an_error(picky: SteppedHarness):
    """Its client asked for version 1, so version 0 does not answer it."""
    worker = _serve_with_other_versions(picky)
    (bad,) = picky.publish("picky", -1, version="1")
    _run(worker)
    assert picky.answer(bad) == "ModelError"
    assert [version.label for version in worker.drain.lifecycle.turns if version.is_ready] == ["1"]


def test_not_finite_outputs_fall_back(models_root: Path):
    """NaN is a failure like an exception."""
    _write(models_root, PICKY.replace("* 2", "* float('nan')"), "1", policy={"default": {"fallback_version": "0"}})
    _write(models_root, PICKY, "0")
    for harness in open_harness(models_root):
        worker = _serve_with_other_versions(harness)
        (job,) = harness.publish("picky", 4)
        _wait_for_load(worker)
        _run(worker)
        assert _answered(harness, job) == ("0", "fallback", 8.0)
        assert np.isfinite(_answered(harness, job)[2])
