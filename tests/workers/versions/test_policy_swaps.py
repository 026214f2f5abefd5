"""Policies per endpoint in one worker, and their change while it runs. AR-023."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.broker.base import State
from penstock.registry.deployment import DeployedArm, Deployment, Routing
from penstock.registry.envelope import open_result
from penstock.registry.errors import InvalidInput
from penstock.registry.package import load_package
from penstock.registry.tensors import Array
from penstock.workers.runtime.base import Prepared
from penstock.workers.runtime.forms import forms_of
from penstock.workers.versions import peers
from penstock.workers.versions.repository import DiskRepository
from penstock.workers.versions.version import ServedVersion
from tests.flow.conftest import amend
from tests.packages import write_package
from tests.servers import wait_until
from tests.workers.runtime.formats import write_pytorch
from tests.workers.stepped import UNSIGNED, SteppedHarness, SteppedWorker, open_harness

MODEL = "tuned"
ROWS = """
import numpy as np


def build():
    return lambda inputs: {{"y": np.full_like(inputs["x"], {factor} * len(inputs["x"]))}}
"""
"""Answers how many rows its forward had, so that an answer tells its batch."""
ENDPOINTS = {"bulk": {"window_ms": 3_600_000, "cache_ttl_s": 60}, "wide": {"concurrency": 2}}


class Site:
    """Versions 1 and 2 of a model with the endpoints `infer`, `bulk` and `wide`, and workers of both."""

    def __init__(self, root: Path, harness: SteppedHarness) -> None:
        self.root = root
        self.harness = harness
        self._epoch = 0

    def start(self) -> SteppedWorker:
        worker = self.harness.start_worker(repository=DiskRepository(self.root, [self.root]))
        self.run(worker)
        return worker

    def run(self, worker: SteppedWorker) -> None:
        """Turns and forwards until nothing is left to run."""
        worker.turn(4)
        worker.forwards()

    def decide(self, routing: Routing | None = None, **policies: dict[str, Any]) -> None:
        """The next decision: version 1 is active, with these knobs set by endpoint."""
        self._epoch += 1
        package = load_package(self.root / MODEL / "1")
        record = Deployment(self._epoch, MODEL, "1", package.manifest().content_hash, routing, policies).seal()
        assert self.harness.broker.activate(MODEL, self._epoch, record, "1", package.spec.to_json())

    def follow(self, worker: SteppedWorker) -> None:
        """The worker has seen the decision, and what it loads for that is in its place."""
        worker.drain.lifecycle.poll_records()
        lifecycle = worker.drain.lifecycle

        def has_followed() -> bool:
            worker.turn(2)
            return not lifecycle.loader.is_busy

        wait_until(has_followed, 30, "the policies are followed")

    def version(self, worker: SteppedWorker, endpoint: str = "infer") -> ServedVersion:
        active = worker.drain.lifecycle.models[MODEL].active
        assert active is not None
        return active if endpoint == "infer" else active.endpoints[endpoint]

    def error(self, job_id: str) -> str:
        header, _ = open_result(self.harness.job_record(job_id).result, UNSIGNED)
        return header.error.message if header.error else ""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(peers, "_LOOK_EVERY_S", 0.0)
    root = tmp_path / "models"
    for version, factor in (("1", 1), ("2", 100)):
        folder = write_package(root, MODEL, ROWS.format(factor=factor), version=version)
        amend(folder, policy={"default": {"cache_ttl_s": 0, "window_ms": 0}, "endpoints": ENDPOINTS})
    for harness in open_harness(root, cache={"enabled": True}, batching={"single_flight": False}):
        yield Site(root, harness)


def busy(site: Site, worker: SteppedWorker) -> Any:
    """The only model thread has a forward."""
    site.harness.publish(MODEL, 1000)
    worker.turn(2)
    run = worker.begin()
    assert run is not None
    return run


def rows_of(site: Site, worker: SteppedWorker, endpoint: str, first: float) -> list[float | str]:
    """Two jobs that come one after the other while the device is busy: the rows of their forwards."""
    run = busy(site, worker)
    jobs: list[str] = []
    for number in (first, first + 1):
        jobs += site.harness.publish(MODEL, number, endpoint=endpoint)
        worker.turn(2)
    worker.end(run)
    site.run(worker)
    return [site.harness.answer(job) for job in jobs]


def test_endpoints_have_windows_of_their_own_which_change_at_run_time(site: Site):
    """Without a window the first job goes ahead alone; with one it waits for the second. Each change is followed."""
    worker = site.start()
    assert rows_of(site, worker, "infer", 1) == [1, 1]
    assert rows_of(site, worker, "bulk", 3) == [2, 2]
    site.decide(infer={"window_ms": 60_000}, bulk={"window_ms": 0, "cache_ttl_s": 0})
    site.follow(worker)
    assert rows_of(site, worker, "infer", 5) == [2, 2]
    assert rows_of(site, worker, "bulk", 7) == [1, 1]
    site.decide()
    site.follow(worker)
    assert rows_of(site, worker, "infer", 9) == [1, 1]
    assert rows_of(site, worker, "bulk", 11) == [2, 2]


def begun_at_once(site: Site, worker: SteppedWorker, endpoint: str) -> int:
    """How many of two jobs' forwards may run at the same time, with more model threads than that."""
    runs = []
    for number, seat in enumerate("ab", 20):
        site.harness.publish(MODEL, number, endpoint=endpoint)
        worker.turn(3)
        if (run := worker.begin(seat)) is not None:
            runs.append((run, seat))
    for run, seat in runs:
        worker.end(run, seat)
    site.run(worker)
    return len(runs)


def test_endpoints_have_concurrency_of_their_own_which_changes_at_run_time(site: Site):
    """`wide` may run two forwards of the one loaded model, and `infer` one; a change makes model threads."""
    worker = site.start()
    site.harness.publish(MODEL, 1, endpoint="wide")
    site.run(worker)
    assert worker.drain.parts.executor.threads == 2
    assert site.version(worker, "wide").runtime is site.version(worker).runtime
    assert [begun_at_once(site, worker, each) for each in ("infer", "wide")] == [1, 2]
    site.decide(infer={"concurrency": 2}, wide={"concurrency": 1})
    site.follow(worker)
    assert [begun_at_once(site, worker, each) for each in ("infer", "wide")] == [2, 1]


def is_cached(site: Site, worker: SteppedWorker, endpoint: str, number: float) -> bool:
    """Whether the second of two equal jobs is answered without a forward."""
    for _ in range(2):
        (job,) = site.harness.publish(MODEL, number, endpoint=endpoint)
        site.run(worker)
    return open_result(site.harness.job_record(job).result, UNSIGNED)[0].is_cached


def test_endpoints_have_cache_lifetimes_of_their_own_which_change_at_run_time(site: Site):
    """`bulk` caches and `infer` does not, nor does it take the answers of `bulk`; then the other way round."""
    worker = site.start()
    assert is_cached(site, worker, "bulk", 1)
    assert not is_cached(site, worker, "infer", 1)
    site.decide(infer={"cache_ttl_s": 60}, bulk={"cache_ttl_s": 0})
    site.follow(worker)
    assert is_cached(site, worker, "infer", 1)
    assert not is_cached(site, worker, "bulk", 1)
    site.decide(infer={"cache_ttl_s": 5})
    site.follow(worker)
    (job,) = site.harness.publish(MODEL, 2)
    site.run(worker)
    site.harness.now += 6
    (job,) = site.harness.publish(MODEL, 2)
    site.run(worker)
    assert not open_result(site.harness.job_record(job).result, UNSIGNED)[0].is_cached


def test_a_rollout_gives_an_endpoint_at_least_its_own_share(site: Site):
    """The record has the share of the endpoint: all of its jobs have the candidate, and those of `infer` do not."""
    arms = tuple(
        DeployedArm(label, load_package(site.root / MODEL / label).manifest().content_hash, weight)
        for label, weight in (("2", 0.0), ("1", 1.0))
    )
    site.decide(Routing("rollout-1", "rollout", arms, shares={"bulk": 1.0}))
    worker = site.start()
    worker.drain.lifecycle.request_load(MODEL, "2")
    site.follow(worker)
    jobs = {each: site.harness.publish(MODEL, *range(8), endpoint=each) for each in ("infer", "bulk")}
    site.run(worker)
    labels = {
        each: {open_result(site.harness.job_record(job).result, UNSIGNED)[0].version for job in found}
        for each, found in jobs.items()
    }
    assert labels == {"infer": {"1"}, "bulk": {"2"}}


def test_unknown_endpoint_is_refused_at_submit_and_by_a_worker_of_another_version(site: Site):
    """The client names the known ones; a job that was checked against another spec fails, and no other one does."""
    with pytest.raises(InvalidInput, match=r"Unknown endpoint 'slow' of tuned\. Expected one of: bulk, infer, wide"):
        site.harness.publish(MODEL, 1, endpoint="slow")
    worker = site.start()
    (refused,) = site.harness.publish(MODEL, 1, endpoint="bulk")
    version = site.version(worker)
    version.spec.__dict__["endpoints"] = ("infer",)
    (answered,) = site.harness.publish(MODEL, 1)
    site.run(worker)
    assert site.error(refused) == "tuned/1 has no endpoint 'bulk'. Expected one of: infer"
    assert site.harness.state(answered) is State.COMPLETED


@pytest.mark.parametrize("knobs", [{"window_ms": -1}, {"window": 1}, {"precision": "int3"}, {"concurrency": 65}])
def test_record_with_an_impossible_policy_changes_nothing(site: Site, knobs: dict[str, Any]):
    """The worker refuses the record as a whole, and goes on under the earlier one."""
    worker = site.start()
    site.decide(infer={"window_ms": 60_000})
    site.follow(worker)
    site.decide(infer=knobs)
    site.follow(worker)
    assert rows_of(site, worker, "infer", 1) == [2, 2]


class Exact:
    """A package of pytorch whose endpoints have another precision and another fallback."""

    X = 1.001
    """bfloat16 has no such number."""

    def __init__(self, root: Path) -> None:
        source = "import torch\ndef build():\n    class Same(torch.nn.Module):\n"
        source += "        def __init__(self):\n            super().__init__()\n"
        source += "            self.weight = torch.nn.Parameter(torch.zeros(4, 4))\n"
        source += "            self.bias = torch.nn.Parameter(torch.zeros(4))\n"
        source += "        def forward(self, x):\n            return x.to(self.weight.dtype) * 1.0\n"
        source += "    return Same()\n"
        endpoints = {"rough": {"precision": "bf16"}, "strict": {"fallback_runtime": "none"}}
        write_pytorch(root, source, name=MODEL, policy={"endpoints": {"infer": {"precision": "fp32"}, **endpoints}})


@pytest.fixture
def exact(tmp_path: Path) -> Iterator[Site]:
    root = tmp_path / "models"
    Exact(root)
    for harness in open_harness(root, cache={"enabled": True}):
        yield Site(root, harness)


def number_at(site: Site, worker: SteppedWorker, endpoint: str) -> float | str:
    """What an endpoint answers, once it has loaded what it needs."""
    (job,) = site.harness.publish(MODEL, Exact.X, endpoint=endpoint)
    wait_until(lambda: (worker.forwards(), site.harness.state(job) is not State.QUEUED)[1], 30, "the job has ended")
    return site.harness.answer(job)


FULL, ROUGH = pytest.approx(1.001, abs=1e-5), 1.0


def test_endpoints_have_a_precision_of_their_own_which_is_swapped_at_run_time(exact: Site):
    """Each endpoint has a loaded model of its own, equal jobs share no answers, and jobs of before are answered."""
    worker = exact.start()
    assert [number_at(exact, worker, each) for each in ("infer", "rough")] == [FULL, ROUGH]
    before = exact.version(worker)
    exact.decide(infer={"precision": "bf16"}, rough={"precision": "fp32"})
    (waiting,) = exact.harness.publish(MODEL, 1.005)
    worker.turn(3)
    exact.follow(worker)
    assert [number_at(exact, worker, each) for each in ("infer", "rough")] == [ROUGH, FULL]
    exact.run(worker)
    assert exact.harness.state(waiting) is State.COMPLETED
    assert exact.version(worker) is not before
    worker.turn()
    assert not before.is_ready
    assert len(worker.drain.lifecycle.turns) == 2
    exact.decide(rough={"precision": "fp32"})
    exact.follow(worker)
    assert [number_at(exact, worker, each) for each in ("infer", "rough")] == [FULL, FULL]
    assert exact.version(worker, "rough").runtime is exact.version(worker).runtime


def test_load_that_fails_leaves_the_model_in_its_place(exact: Site):
    """The files have changed: the old model answers on, the other knobs hold, and the report has the reason."""
    worker = exact.start()
    assert number_at(exact, worker, "infer") == FULL
    exact.decide(infer={"precision": "bf16", "window_ms": 7})
    (exact.root / MODEL / "1" / "model.py").write_text("raise ValueError('no')")
    exact.follow(worker)
    assert number_at(exact, worker, "infer") == FULL
    assert exact.version(worker).policy.limits.max_wait_s == 0.007
    described = worker.drain.lifecycle.described()[MODEL]["1"]
    assert described["problem"].startswith("its new policy is not in force: ")


def _broken(prepared: Prepared) -> dict[str, Array]:
    raise RuntimeError("a kernel is gone")


def test_endpoints_have_a_fallback_of_their_own_which_is_swapped_at_run_time(exact: Site):
    """A form fails on both: one endpoint answers by the model as built, the other fails the job; then both answer."""
    worker = exact.start()
    for endpoint in ("infer", "strict"):
        number_at(exact, worker, endpoint)
        forms = forms_of(exact.version(worker, endpoint).runtime)
        assert forms is not None
        forms.use("compiled", _broken)
    exact.harness.now += 10_000
    assert [number_at(exact, worker, each) for each in ("infer", "strict")] == [FULL, "ModelError"]
    exact.decide(strict={"fallback_runtime": "reference"})
    exact.follow(worker)
    assert number_at(exact, worker, "strict") == FULL
