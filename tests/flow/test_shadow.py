"""The shadow queue end to end: a sample of answered jobs, a candidate, a report. SH-005, AR-087, AR-088."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from penstock import Client
from penstock.registry.broker.redis_shadow import RedisShadow
from penstock.safety.audit_reader import entries
from tests.conftest import StartWorker
from tests.flow.conftest import Samples
from tests.flow.shadow_stage import (
    ShadowProcess,
    alerts_to,
    await_mirror,
    breaker_of,
    environ_of,
    run_shadow,
    wait_for_compared,
    write_versions,
)
from tests.installed import install
from tests.receiver import Receiver
from tests.servers import RedisServer, free_port, wait_until
from tests.workers.shadow.pairs import order_of, pair_of, publish_spec


def test_candidate_is_compared_with_what_was_served(
    shared_redis: RedisServer, slot: str, models_root: Path, tmp_path: Path, start_worker: StartWorker
):
    """Every sampled job has one comparison; the report has agreement, figures and the worst pair."""
    wrong = """
    def build():
        return lambda inputs: {"y": inputs["x"] * 2 + (inputs["x"][:, :1] == 7).astype("float32") * 100}
    """
    write_versions(models_root, slot, wrong)
    environ = environ_of(shared_redis, models_root, tmp_path)
    worker = start_worker(shared_redis, models_root, models=[slot])
    started = run_shadow(environ, "start", slot, "--candidate", "1", "--sample", "1", "--canary-pairs", "0")
    assert started.exit_code == 0, started.output
    await_mirror(worker)
    shadow = ShadowProcess(slot, environ, tmp_path / "shadow")
    try:
        shadow.start()
        with Client(shared_redis.url) as client:
            jobs = client.submit_many(slot, [{"x": [[float(n), 1.0, 2.0, 3.0]]} for n in range(20)])
            answers = [job.result(180)["y"][0, 0] for job in jobs]
        assert answers == [2.0 * n for n in range(20)]
        report = wait_for_compared(environ, slot, 20)
    finally:
        shadow.stop()
    assert report["outcomes"] == {"pass": 19, "fail": 1}


def test_shadow_worker_opens_the_breaker_of_a_candidate_that_drifts(
    shared_redis: RedisServer, slot: str, models_root: Path, tmp_path: Path
):
    """AR-065, AR-068: every pair is accepted, and all of them together are worse than before. One alert says so.

    The shadow worker that finds the drift has started after the reference window: it goes on from what the first one
    has stored. The audit log has the decision.
    """
    write_versions(models_root, slot)
    order = order_of(slot)
    noise = np.random.default_rng(3).uniform(0.5, 1.5, 400) * 1e-6
    with Receiver() as receiver, closing(RedisShadow.from_url(shared_redis.url)) as end:
        publish_spec(end, models_root, slot, "2")
        assert end.start(order, order.seal()) is None
        environ = {**environ_of(shared_redis, models_root, tmp_path), **alerts_to(receiver)}
        shadow = ShadowProcess(slot, environ, tmp_path)

        def mirror(distances: list[float]) -> int:
            """Pairs whose served answers are so far from the candidate's."""
            end.mirror(order, [pair_of(order, 1.0, factor=2 + distance) for distance in distances])
            wait_until(lambda: end.state(slot).pairs == 0, 120, "the pairs are compared")
            return int(end.state(slot).report["n:pass"])

        try:
            shadow.start()
            assert mirror(noise[:300].tolist()) == 300
            assert (receiver.calls, breaker_of(shared_redis, slot, "1").is_closed) == ([], True)
            shadow.terminate()
            assert shadow.wait(180) == 0
            shadow.start()
            assert mirror((noise[300:] + 4e-6).tolist()) == 400
            wait_until(lambda: receiver.calls, 60, "the alert arrives")
        finally:
            shadow.stop()
    (alert,) = (call.event for call in receiver.calls)
    assert (alert["type"], alert["data"]["optimisation"]) == ("safety.breaker", "candidate")
    assert alert["data"]["reason"].startswith("drift: y.")
    assert breaker_of(shared_redis, slot, "1").circuit == "open"
    (entry,) = entries([tmp_path / "home" / "audit"], 10).entries
    assert (entry.operation, entry.optimization_name, entry.result) == ("optimization_state", "candidate", "disabled")
    assert (entry.details["version"], entry.details["criterion"]) == ("1", "it drifted in the shadow")
    assert entry.details["reason"] == alert["data"]["reason"]


def test_verdicts_of_the_canary_are_counted(shared_redis: RedisServer, slot: str, models_root: Path, tmp_path: Path):
    """AR-099: one process refuses the candidate of two shadows; its page has as many verdicts as the audit log."""
    write_versions(models_root, slot)
    environ, port = environ_of(shared_redis, models_root, tmp_path), free_port()
    shadow = ShadowProcess(slot, environ, tmp_path)

    def counted(**labels: str) -> float:
        page = Samples(f"http://127.0.0.1:{port}")
        return page.total("penstock_canary_verdicts_total", model_name=slot, **labels)

    with closing(RedisShadow.from_url(shared_redis.url)) as end:
        publish_spec(end, models_root, slot, "2")
        try:
            shadow.start("normal", "--metrics-port", str(port))
            for number in (1, 2):
                order = order_of(slot, canary_pairs=60)
                assert end.start(order, order.seal()) is None
                # The candidate answers 2 x.
                end.mirror(order, [pair_of(order, 1.0, factor=3.0) for _ in range(60)])
                wait_until(lambda: not end.state(slot).is_running, 120, "the canary ends the shadow")
                assert counted(model_version="1", optimization="candidate", verdict="FAIL") == counted() == number
        finally:
            shadow.stop()
    files = (Path(environ["PENSTOCK_HOME"]) / "audit").glob("*.jsonl")
    entries = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [each["result"] for each in entries if each["operation"] == "gate_decision"] == ["FAIL"] * 2


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has a class for work that gives way")
def test_shadow_worker_gives_way(shared_redis: RedisServer, slot: str, models_root: Path, tmp_path: Path):
    """SH-005: its process is in the class that gets what nobody else wants, without a word of the operator."""
    shadow = ShadowProcess(slot, environ_of(shared_redis, models_root, tmp_path), tmp_path)
    try:
        shadow.start("")
        wait_until(lambda: os.sched_getscheduler(shadow.pid) == os.SCHED_IDLE, 120, "it gives way")
        assert os.getpriority(os.PRIO_PROCESS, shadow.pid) == 19
    finally:
        shadow.stop()


def test_installed_validator_judges_the_pairs(shared_redis: RedisServer, slot: str, models_root: Path, tmp_path: Path):
    """AR-070: a distribution beside the shadow worker brings it, by its entry point for this model."""
    write_versions(models_root, slot)
    source = """
    from penstock.safety.validators import Comparison, Figure


    class Sums:
        def compare(self, candidate, expected):
            return Comparison(len(expected), {"sums": Figure.largest(float(candidate.sum() - expected.sum()), 100.0)})
    """
    path = install(tmp_path / "site", "its_sums", source, {"penstock.validators": {f"model:{slot}": "Sums"}})
    order = order_of(slot)
    with closing(RedisShadow.from_url(shared_redis.url)) as end:
        publish_spec(end, models_root, slot, "2")
        assert end.start(order, order.seal()) is None
        # Too far away for the built-in validator: the model answers 2 x.
        end.mirror(order, [pair_of(order, 1.0, factor=factor) for factor in (2.0, 1.0)])
        shadow = ShadowProcess(slot, environ_of(shared_redis, models_root, tmp_path), tmp_path)
        try:
            shadow.start_anew(path)
            report = wait_for_compared(environ_of(shared_redis, models_root, tmp_path), slot, 2)
            # It was told not to give way.
            assert os.getpriority(os.PRIO_PROCESS, shadow.pid) == os.getpriority(os.PRIO_PROCESS, 0)
        finally:
            shadow.stop()
    assert report["outcomes"] == {"pass": 2}
    assert report["figures"]["y.sums"]["largest"] == 7.0
