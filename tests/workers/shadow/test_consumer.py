"""The shadow worker, stepped over a real Redis: comparisons, failing candidates, orphans. AR-065, AR-087, AR-088."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.broker.redis_shadow import RedisShadow
from penstock.registry.deployment import Deployment
from penstock.registry.errors import BrokerRefused, BrokerUnavailable
from penstock.registry.settings import Settings
from penstock.registry.shadow import ShadowOrder
from penstock.safety.canary import CanaryState, CanaryVerdict
from penstock.safety.validators import Verdict
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.shadow.consumer import ComparedPair, ShadowWorker
from tests.packages import write_package
from tests.servers import RedisServer, wait_until
from tests.workers.shadow.pairs import order_of, pair_of, publish_spec, shadow_worker

DOUBLE = """
def build():
    return lambda inputs: {"y": inputs["x"] * 2}
"""
MISBEHAVING = """
import ctypes, os, time
import numpy as np

def build():
    def forward(inputs):
        first = inputs["x"][:, 0]
        if (first == -1).any():
            raise ValueError("a text with 4111 1111 1111 1111")
        if (first == -2).any():
            time.sleep(3600)
        if (first == -3).any():
            os._exit(3)
        if (first == -4).any():
            ctypes.PyDLL(None).sleep(3600)
        y = inputs["x"] * 2
        y[first == -5] = np.nan
        return {"y": y}

    return forward
"""


class Shadow:
    """A model with a shadow: version 2 has answered, version 1 is the candidate."""

    def __init__(self, end: RedisShadow, root: Path, model: str, candidate: str, ends: ExitStack) -> None:
        self.end, self.root, self.model = end, root, model
        write_package(root, model, candidate, version="1")
        write_package(root, model, DOUBLE, version="2")
        publish_spec(end, root, model, "2")
        self.compared: list[ComparedPair] = []
        self._ends = ends
        self.order = self.started()

    def started(self, **more: Any) -> ShadowOrder:
        """An order that runs now, in the place of the last one."""
        self.end.stop(self.model)
        self.order = order_of(self.model, **more)
        assert self.end.start(self.order, self.order.seal()) is None
        return self.order

    def mirror(self, *numbers: float, **more: Any) -> None:
        """One pair for each number."""
        self.end.mirror(self.order, [pair_of(self.order, number, **more) for number in numbers])

    def worker(self, *, privacy: dict[str, Any] | None = None, timeout_s: float = 30.0, **options: Any) -> ShadowWorker:
        """One more shadow worker."""
        overrides = {"repo_root": self.root, "timeout_seconds": timeout_s, "privacy": privacy or {}}
        settings = Settings.load(environ={}, overrides=overrides)
        worker = shadow_worker(self.end, self.model, settings, on_compared=self.compared.append, **options)
        self._ends.callback(worker.close)
        return worker

    def run(self, worker: ShadowWorker, count: int) -> dict[str, int]:
        """Steps until so many pairs are settled; the counts by outcome."""
        wait_until(lambda: worker.step() is not None and sum(self.outcomes().values()) >= count, 60, "they are settled")
        return self.outcomes()

    def outcomes(self) -> dict[str, int]:
        """Settled pairs by outcome, as the broker has counted them."""
        report = self.end.state(self.model).report
        return {name[2:]: int(value) for name, value in report.items() if name.startswith("n:")}

    def worst(self) -> list[dict[str, Any]]:
        """The examples of the report."""
        return [json.loads(each) for each in self.end.state(self.model).worst]


OpenShadow = Callable[..., Shadow]


@pytest.fixture
def open_shadow(shared_redis: RedisServer, models_root: Path, slot: str) -> Iterator[OpenShadow]:
    """Opens the shadow of a model; its workers end with the test."""
    with ExitStack() as ends:
        end = ends.enter_context(closing(RedisShadow.from_url(shared_redis.url)))
        yield lambda candidate=DOUBLE: Shadow(end, models_root, slot, candidate, ends)


def test_each_pair_is_compared_once_and_deleted(open_shadow: OpenShadow):
    """The figures are those of the pairs, in their order; nothing is left in the queue. The metrics count them."""
    shadow, metrics = open_shadow(), InferenceMetrics((1.0,))
    shadow.mirror(1, 2, 3)
    shadow.mirror(4, factor=3.0)
    assert shadow.run(shadow.worker(metrics=metrics), 4) == {"pass": 3, "fail": 1}
    (family,) = [family for family in metrics.collect() if family.name == "penstock_shadow_compared"]
    counted = {sample.labels["outcome"]: sample.value for sample in family.samples}
    assert (counted, family.samples[0].labels["model_version"]) == ({"pass": 3, "fail": 1}, "1")
    state = shadow.end.state(shadow.model)
    assert (state.pairs, state.flow["bytes"]) == (0, "0")
    assert [each.comparison.outcome for each in shadow.compared] == ["pass"] * 3 + ["fail"]
    assert {(each.shadow, each.candidate, each.version) for each in shadow.compared} == {(shadow.order.id, "1", "2")}
    assert {each.comparison.worse_sides["y.max_delta"] for each in shadow.compared} == {"higher"}
    assert all(len(each.content_hash) == 64 for each in shadow.compared)
    assert [json.loads(point)["outcome"] for point in state.series] == ["pass"] * 3 + ["fail"]
    assert state.report["f:served_ms_per_row"].split()[:2] == ["4", "2"]
    (worst,) = shadow.worst()
    assert worst["job_id"] == shadow.compared[3].job_id
    assert worst["reason"].startswith("y: max_delta")


def test_pairs_share_a_forward(open_shadow: OpenShadow):
    """As many as a batch may have; what each compares is its own row."""
    shadow = open_shadow("""
    def build():
        def forward(inputs):
            rows = inputs["x"]
            return {"y": rows * 2 + (len(rows) > 2) * rows[:, :1] * 0}
        return forward
    """)
    shadow.mirror(*range(16))
    worker = shadow.worker()
    worker.step()
    assert shadow.outcomes() == {"pass": 16}


@pytest.mark.parametrize(
    ("poison", "outcome", "told"),
    [
        (-1, "error", "ValueError"),
        pytest.param(-2, "timeout", "its limit of 5 s", marks=pytest.mark.slow),
        (-3, "crashed", "ended with status 3"),
        pytest.param(-4, "timeout", "its limit of 5 s", marks=pytest.mark.slow),
        (-5, "fail", "NaN"),
    ],
    ids=["raises", "hangs", "exits", "holds-the-lock", "nan"],
)
def test_a_candidate_that_fails_is_counted(open_shadow: OpenShadow, poison: float, outcome: str, told: str):
    """The pairs beside it are compared all the same, and the shadow worker goes on."""
    shadow = open_shadow(MISBEHAVING)
    worker = shadow.worker(timeout_s=5.0)
    # A process that ends before it has answered anything is left alone for longer.
    shadow.mirror(1)
    assert shadow.run(worker, 1) == {"pass": 1}
    shadow.mirror(poison, 2)
    assert shadow.run(worker, 3) == {"pass": 2, outcome: 1}
    assert [told in each["reason"] for each in shadow.worst()] == [True]
    shadow.mirror(3)
    assert shadow.run(worker, 4) == {"pass": 3, outcome: 1}


def test_examples_show_no_personal_data(open_shadow: OpenShadow):
    """The text of the candidate's exception is redacted before it leaves the process."""
    shadow = open_shadow(MISBEHAVING)
    shadow.mirror(-1)
    shadow.run(shadow.worker(privacy={"redact_detectors": ("payment_card",)}), 1)
    (worst,) = shadow.worst()
    assert worst["reason"] == "ValueError: a text with [REDACTED]"
    assert worst["inputs"] == {"x": "float32 (1, 4)"}


def test_examples_of_a_private_model_show_no_text(open_shadow: OpenShadow):
    """Only the class of the exception, and no input."""
    shadow = open_shadow(MISBEHAVING)
    shadow.mirror(-1)
    shadow.run(shadow.worker(privacy={"mode": "hashes_only"}), 1)
    assert [(each["reason"], each["inputs"]) for each in shadow.worst()] == [("ValueError", {})]


def test_a_killed_candidate_is_started_again(open_shadow: OpenShadow):
    """It was ended between two forwards: no pair is at fault."""
    shadow = open_shadow()
    worker = shadow.worker()
    shadow.mirror(1)
    shadow.run(worker, 1)
    before = worker.candidate_pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: _is_dead(before), 30, "it has ended")
    shadow.mirror(2)
    assert shadow.run(worker, 2) == {"pass": 2}


def test_an_order_that_ended_is_left_in_the_pause_of_a_crashing_candidate(open_shadow: OpenShadow):
    """Pauses before restarts grow long. The next order does not wait for them."""
    shadow = open_shadow(MISBEHAVING)
    shadow.mirror(1)
    is_stopping = threading.Event()
    worker = shadow.worker(is_stopping=is_stopping)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        # After an answer, only the second loss is followed by a long pause.
        wait_until(lambda: shadow.outcomes() == {"pass": 1}, 60, "the candidate has answered")
        shadow.mirror(-3, -3, -3)
        wait_until(lambda: shadow.outcomes().get("crashed") == 1, 60, "one pair has crashed alone")
        shadow.started()
        shadow.mirror(1)
        wait_until(lambda: shadow.outcomes() == {"pass": 1}, 60, "the next order is served")
    finally:
        is_stopping.set()
        thread.join()


def _is_dead(pid: int) -> bool:
    """Ended, whether or not its parent has seen that."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_pairs_of_a_dead_shadow_worker_are_compared_by_another(open_shadow: OpenShadow):
    """It took them and died. They are claimed after the lease, and count once."""
    shadow = open_shadow()
    shadow.mirror(1, 2)
    shadow.end.take(shadow.model, shadow.order.id, "dead", 10, most_bytes=1 << 20, lease_ms=60_000)
    assert shadow.run(shadow.worker(lease_s=0.05), 2) == {"pass": 2}
    assert len(shadow.compared) == 2


def test_a_pair_that_ends_its_shadow_workers_is_given_up(open_shadow: OpenShadow):
    """After three deliveries it is counted and deleted."""
    shadow = open_shadow()
    shadow.mirror(1)
    for _ in range(3):
        wait_until(lambda: shadow.end.take(shadow.model, shadow.order.id, "dead", 1, most_bytes=9, lease_ms=20), 30, "")
    assert shadow.run(shadow.worker(lease_s=0.02), 1) == {"abandoned": 1}


def test_pairs_of_a_version_that_is_active_no_more_are_not_compared(open_shadow: OpenShadow):
    """Another version was promoted since they were answered: they are orphans, and counted as such."""
    shadow = open_shadow()
    shadow.mirror(1, version="1")
    shadow.mirror(2)
    assert shadow.run(shadow.worker(), 2) == {"superseded": 1, "pass": 1}
    record = Deployment(1, shadow.model, "3", "f" * 64).seal()
    shadow.end._run(["SET", f"{{{shadow.model}}}:active", b"1 " + record])
    shadow.mirror(3)
    assert shadow.run(shadow.worker(), 3) == {"superseded": 2, "pass": 1}


def test_expired_pairs_are_not_compared(open_shadow: OpenShadow):
    """They waited longer than the order allows."""
    shadow = open_shadow()
    shadow.started(pair_ttl_ms=1)
    long = ShadowOrder(shadow.order.id, shadow.model, "1", 1.0, shadow.order.until_ms)
    shadow.end.mirror(long, [pair_of(shadow.order)])
    assert shadow.run(shadow.worker(), 1) == {"expired": 1}


@pytest.mark.parametrize("sealed", [b"", b"foreign", b"PS\x01P\xff\xff\xff\x7f"])
def test_foreign_bytes_are_counted_and_deleted(open_shadow: OpenShadow, sealed: bytes):
    """They stop nothing."""
    shadow = open_shadow()
    shadow.end.mirror(shadow.order, [sealed])
    shadow.mirror(1)
    assert shadow.run(shadow.worker(), 2) == {"unreadable": 1, "pass": 1}


def test_a_stop_ends_the_candidate(open_shadow: OpenShadow):
    """Its process has gone with the order, and the next shadow begins anew."""
    now = [0.0]
    shadow = open_shadow()
    worker = shadow.worker(clock=lambda: now[0])
    shadow.mirror(1)
    shadow.run(worker, 1)
    shadow.end.stop(shadow.model)
    now[0] += 2
    worker.step()
    assert worker.candidate_pid is None
    shadow.started()
    shadow.mirror(1, 2)
    now[0] += 2
    assert shadow.run(worker, 2) == {"pass": 2}


def test_a_candidate_that_cannot_be_loaded_is_told(open_shadow: OpenShadow):
    """The report says why; the pairs stay until it can, or until they expire. It is tried again."""
    now = [0.0]
    shadow = open_shadow("def build():\n    raise RuntimeError('no weights')")
    worker = shadow.worker(clock=lambda: now[0])
    shadow.mirror(1)
    worker.step()
    assert "no weights" in shadow.end.state(shadow.model).report["problem"]
    assert shadow.end.state(shadow.model).pairs == 1
    (shadow.root / shadow.model / "1" / "model.py").write_text(DOUBLE)
    now[0] += 60
    assert shadow.run(worker, 1) == {"pass": 1}
    assert shadow.end.state(shadow.model).report["problem"] == ""


def test_other_content_than_the_registered_one_is_not_run(open_shadow: OpenShadow):
    """The order names the hash of the files."""
    shadow = open_shadow()
    shadow.started(candidate_hash="0" * 64)
    shadow.worker().step()
    assert "its files differ" in shadow.end.state(shadow.model).report["problem"]


def test_a_candidate_with_another_signature_is_not_run(open_shadow: OpenShadow):
    """The files of this machine may be others than those of the operator."""
    shadow = open_shadow()
    spec = shadow.root / shadow.model / "1" / "model.yaml"
    spec.write_text(spec.read_text().replace("name: y", "name: z"))
    shadow.worker().step()
    assert "output y: missing" in shadow.end.state(shadow.model).report["problem"]


def test_a_failure_of_the_canary_ends_the_shadow(open_shadow: OpenShadow):
    """Its pairs are deleted, the report says why, no pair is taken in, and the next shadow may start."""
    shadow = open_shadow(MISBEHAVING)
    order = shadow.started(canary_pairs=1500)
    verdicts: list[tuple[str, str]] = []
    worker = shadow.worker(on_verdict=lambda of, _, verdict: verdicts.append((of.id, str(verdict.verdict))))
    shadow.mirror(1, 2)
    shadow.run(worker, 2)
    shadow.mirror(-1)
    shadow.run(worker, 3)
    state = shadow.end.state(shadow.model)
    assert state.report["ended"] == "the canary says FAIL: the candidate raised ValueError (1 of 3 pairs)"
    assert verdicts == [(order.id, "FAIL")]
    assert (state.is_running, state.pairs) == (False, 0)
    (found,) = map(CanaryState.decode, state.canaries)
    assert (found.pairs, found.problems) == (3, {"the candidate raised ValueError": 1})
    assert shadow.end.mirror(order, [pair_of(order)]) is None
    assert shadow.end.end(shadow.model, order.id, "again") is None
    following = order_of(shadow.model)
    assert shadow.end.start(following, following.seal()) is None
    assert shadow.end.state(shadow.model).is_running


def test_one_of_two_shadow_workers_tells_of_the_failure(open_shadow: OpenShadow):
    """Both find it before the shadow has ended, and both stop the candidate; the one that ends it sends the alert."""
    shadow = open_shadow(MISBEHAVING)
    shadow.started(canary_pairs=1500)
    told: list[str] = []
    second = shadow.worker(on_failure=lambda *_: told.append("b stops"), on_ended=lambda *_: told.append("b tells"))

    def found(*_: object) -> None:
        shadow.mirror(-1)
        shadow.run(second, 2)

    first = shadow.worker(
        on_verdict=found, on_failure=lambda *_: told.append("a stops"), on_ended=lambda *_: told.append("a tells")
    )
    shadow.mirror(-1)
    shadow.run(first, 1)
    assert told == ["b stops", "b tells", "a stops"]
    assert not shadow.end.state(shadow.model).is_running


def test_failure_is_told_once_the_broker_is_back(open_shadow: OpenShadow):
    """It was away when the breaker was to be opened: the next turn goes on, and the verdict is recorded once."""
    shadow = open_shadow(MISBEHAVING)
    order = shadow.started(canary_pairs=1500)
    told: list[str] = []

    def stop(*_: object) -> None:
        told.append("stop")
        if told.count("stop") == 1:
            raise BrokerUnavailable("away")

    worker = shadow.worker(
        on_verdict=lambda *_: told.append("record"), on_failure=stop, on_ended=lambda *_: told.append("tell")
    )
    shadow.mirror(-1)
    with pytest.raises(BrokerUnavailable):
        shadow.run(worker, 1)
    assert shadow.end.state(shadow.model).is_running
    worker.step()
    assert told == ["record", "stop", "stop", "tell"]
    assert shadow.end.mirror(order, [pair_of(order)]) is None


def test_a_refusal_by_the_broker_ends_the_shadow_worker(open_shadow: OpenShadow, shared_redis: RedisServer):
    """It is raised with the missing right; a worker that only waited would look as if the broker were away."""
    shadow = open_shadow()
    is_stopping = threading.Event()
    ended: list[BaseException] = []

    def run(worker: ShadowWorker) -> None:
        try:
            worker.run()
        except BrokerRefused as error:
            ended.append(error)

    with shared_redis.client() as overseer:
        user = f"without-{shadow.model}"
        overseer.acl_setuser(user, enabled=True, nopass=True, keys=["*"], commands=["+@all", "-xreadgroup"])
        try:
            url = shared_redis.url + ("&" if "?" in shared_redis.url else "?") + f"username={user}&password=x"
            with closing(RedisShadow.from_url(url)) as end:
                shadow.mirror(1)
                shadow.end = end
                thread = threading.Thread(target=run, args=[shadow.worker(is_stopping=is_stopping)])
                thread.start()
                try:
                    wait_until(lambda: ended, 60, "the shadow worker ends")
                finally:
                    is_stopping.set()
                    thread.join()
        finally:
            overseer.acl_deluser(user)
    assert "NOPERM" in str(ended[0])
    assert "`take_shadow` needs" in str(ended[0])


def test_a_late_end_harms_no_later_shadow(open_shadow: OpenShadow):
    """A shadow worker that was slow ends its own shadow only."""
    shadow = open_shadow()
    first = shadow.order
    shadow.started()
    assert shadow.end.end(shadow.model, first.id, "late") is None
    assert shadow.end.state(shadow.model).is_running


def test_the_canaries_of_two_shadow_workers_add_up(open_shadow: OpenShadow):
    """Each writes what it has found; the verdict is on the pairs of both."""
    shadow = open_shadow()
    shadow.started(canary_pairs=4)
    for worker in (shadow.worker(), shadow.worker()):
        before = sum(shadow.outcomes().values())
        shadow.mirror(1, 2)
        shadow.run(worker, before + 2)
        worker.close()
    states = [CanaryState.decode(text) for text in shadow.end.state(shadow.model).canaries]
    assert [state.verdict(4).verdict for state in states] == [Verdict.INSUFFICIENT] * 2
    assert states[0].merged(states[1]).verdict(4).verdict.is_accepted


def test_a_pass_is_told_until_it_has_taken_effect(open_shadow: OpenShadow):
    """The pause of a breaker may outlast the verdict, with jobs or without; what is told has the time of the load."""
    shadow = open_shadow()
    shadow.started(canary_pairs=400)
    told: list[tuple[str, Verdict, bool]] = []
    answers = iter((10_000.0, 0.0))
    later_s = 0.0

    def on_pass(order: ShadowOrder, content_hash: str, verdict: CanaryVerdict, since_ms: float) -> float:
        assert len(content_hash) == 64
        told.append((order.id, verdict.verdict, since_ms <= shadow.end.server_ms()))
        return next(answers)

    worker = shadow.worker(on_pass=on_pass, clock=lambda: time.monotonic() + later_s)
    shadow.mirror(*range(399))
    shadow.run(worker, 399)
    assert told == []
    shadow.mirror(399)
    shadow.run(worker, 400)
    worker.step()
    assert told == [(shadow.order.id, Verdict.PASS, True)]
    later_s = 20_000.0
    for _ in range(3):
        worker.step()
    assert told == [(shadow.order.id, Verdict.PASS, True)] * 2


MODULE = """
import torch

def build():
    module = torch.nn.Linear(4, 4)
    torch.nn.init.eye_(module.weight)
    module.weight.data *= 2
    torch.nn.init.zeros_(module.bias)
    return module
"""


def as_module(shadow: Shadow, version: str) -> None:
    """Writes a version anew, as a torch module."""
    folder = shadow.root / shadow.model / version
    (folder / "model.py").write_text(MODULE)
    file = folder / "model.yaml"
    file.write_text(file.read_text().replace("format: python", "format: pytorch"))


@pytest.mark.slow
def test_a_form_of_the_served_version_is_a_candidate(open_shadow: OpenShadow):
    """The form is built in the candidate's process, and compared with what the version has answered."""
    shadow = open_shadow()
    as_module(shadow, "2")
    shadow.started(candidate="2", form="prepacked", canary_pairs=3)
    shadow.mirror(1, 2, 3)
    assert shadow.run(shadow.worker(timeout_s=120.0), 3) == {"pass": 3}
    (found,) = map(CanaryState.decode, shadow.end.state(shadow.model).canaries)
    assert found.verdict(3).verdict.is_accepted


def test_a_form_that_the_model_does_not_have_is_told(open_shadow: OpenShadow):
    """A NumPy model has no other form: the report says so, and pairs wait."""
    shadow = open_shadow()
    shadow.started(candidate="2", form="int8")
    shadow.mirror(1)
    worker = shadow.worker()
    worker.step()
    assert "has no form 'int8' here. Expected one of: there is none" in worker.problem
    assert shadow.end.state(shadow.model).report["problem"] == worker.problem
