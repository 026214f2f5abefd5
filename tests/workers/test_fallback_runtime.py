"""`policy.fallback_runtime` of two models on one worker: what happens when a form of each fails. AR-023."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.registry.tensors import Array
from penstock.workers.runtime.base import Prepared
from penstock.workers.runtime.forms import forms_of
from tests.workers.runtime.formats import write_pytorch
from tests.workers.stepped import SteppedHarness, open_harness


@pytest.fixture
def harness(models_root: Path) -> Iterator[SteppedHarness]:
    write_pytorch(models_root, name="lenient")
    write_pytorch(models_root, name="strict", policy={"endpoints": {"infer": {"fallback_runtime": "none"}}})
    yield from open_harness(models_root)


def _broken(prepared: Prepared) -> dict[str, Array]:
    raise RuntimeError("a kernel is gone")


def test_each_model_falls_back_as_its_package_says(harness: SteppedHarness):
    """One answers the job on which its form failed; the other fails it with the error of the form."""
    worker = harness.start_worker()
    for version in worker.drain.lifecycle.turns:
        forms = forms_of(version.runtime)
        assert forms is not None
        forms.use("compiled", _broken)
    (answered,) = harness.publish("lenient", 7)
    (failed,) = harness.publish("strict", 7)
    for _ in range(4):
        worker.turn(2)
        worker.forwards()
    assert harness.state(answered).name == "COMPLETED"
    assert harness.state(failed).name == "FAILED"
    assert harness.answer(failed) == "ModelError"
