"""Which versions workers have loaded, when several share a store and when each keeps its own state."""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import redis
from celery import Celery

from penstock import Client
from penstock.registry.control import CONTROL_COMMAND, Command
from penstock.registry.desired_state import DesiredVersion, StateStore
from penstock.safety.operator_key import OperatorKey
from tests.conftest import StartWorker
from tests.packages import write_package
from tests.servers import RedisServer, WorkerProcess, wait_until

INTERVAL_S = 2.0
X = {"x": np.ones((1, 4), np.float32)}


@pytest.fixture
def name(models_root: Path) -> str:
    """A model with the versions 1 (x) and 2 (10 x)."""
    name = f"scaled-{secrets.token_hex(4)}"
    for version, factor in (("1", 1), ("2", 10)):
        source = f"def build():\n    return lambda inputs: {{'y': inputs['x'] * {factor}}}\n"
        write_package(models_root, name, source, version=version)
    return name


def ask(app: Celery, worker: str, command: str) -> dict[str, str]:
    """A worker's answer to a control command; it is asked again when its Celery side did not listen yet."""

    def answers() -> list[dict[str, dict[str, str]]]:
        given: list[dict[str, dict[str, str]]] = app.control.broadcast(
            CONTROL_COMMAND, {"command": command}, [worker], reply=True, timeout=3, limit=1
        )
        return given

    return wait_until(answers, 60, f"{worker} answers")[0][worker]


def state(worker: WorkerProcess, name: str, version: str) -> str:
    """Where the version is on its way into the worker's memory."""
    return str(worker.report().get("versions", {}).get(name, {}).get(version, {}).get("state", ""))


def test_workers_converge_and_outlive_the_store(
    shared_redis: RedisServer, redis_server: RedisServer, models_root: Path, start_worker: StartWorker, name: str
):
    """IN-007, IN-017, IN-018, IN-020: what is wanted is loaded by both; when the store dies
    nothing is unloaded and jobs are answered as before."""
    prefix = f"pods-{secrets.token_hex(4)}"
    environment = {
        "PENSTOCK_INFERENCE_STATE_REDIS_URL": redis_server.url,
        "PENSTOCK_INFERENCE_STATE_PREFIX": prefix,
        "PENSTOCK_INFERENCE_STATE_RECONCILE_INTERVAL_S": str(INTERVAL_S),
    }
    workers = [start_worker(shared_redis, models_root, environment=environment) for _ in range(2)]
    store = StateStore.from_url(redis_server.url, prefix)
    store.put(DesiredVersion(name, "1", at=time.time()))
    wait_until(
        lambda: sum(each["models"][name].get("1", {}).get("state") == "ready" for each in store.loaded().values()) == 2,
        30,
        "both have loaded it, and the store says so",
    )
    with redis.Redis.from_url(redis_server.url) as client:
        assert set(client.scan_iter("*")) == {f"{prefix}:wanted".encode(), f"{prefix}:loaded".encode()}
    wait_until(lambda: all(state(worker, name, "1") == "ready" for worker in workers), 5, "their reports say so")
    redis_server.kill()
    # Every worker looks for the store once more.
    time.sleep(1.2 * INTERVAL_S)
    with Client(shared_redis.url) as client:
        for version, factor in (("1", 1.0), ("2", 10.0)):
            answer = client.submit(name, X, version=version).result(timeout=180)["y"]
            assert float(answer[0, 0]) == factor
    assert [state(worker, name, "1") for worker in workers] == ["ready", "ready"]
    assert all(worker.is_running for worker in workers)


def test_without_a_store_each_worker_keeps_its_own_state(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker, name: str, tmp_path: Path
):
    """IN-017, IN-019, IN-064: no worker sweeps or connects to the store of the settings. A signed control command
    changes only the worker that it is sent to.
    """
    operator = OperatorKey.generate(tmp_path / "operator.pem")
    environment = {
        "PENSTOCK_INFERENCE_STATE_RECONCILE_ENABLED": "false",
        "PENSTOCK_INFERENCE_STATE_RECONCILE_INTERVAL_S": "0.1",
        "PENSTOCK_INFERENCE_STATE_PREFIX": f"own-{name}",
        "PENSTOCK_OPERATOR_PUBLIC_KEYS": operator.public_text,
    }
    named = socket.create_server(("127.0.0.1", 0))
    url = f"redis://127.0.0.1:{named.getsockname()[1]}"
    told, other = (
        start_worker(shared_redis, models_root, environment={**environment, **where})
        for where in ({"PENSTOCK_INFERENCE_STATE_REDIS_URL": url}, {})
    )
    StateStore.from_url(shared_redis.url, f"own-{name}").put(DesiredVersion(name, "1"), operator.sign)
    app = Celery(broker=shared_redis.celery_url)
    stranger = OperatorKey.generate(tmp_path / "stranger.pem")
    for sign, answer in ((stranger.sign, "error"), (operator.sign, "ok")):
        command = Command("load", name, "1").addressed_to([told.name]).seal(sign)
        assert list(ask(app, told.name, command)) == [answer]
    wait_until(lambda: state(told, name, "1") == "ready", 5, "the worker that was told has loaded it")
    assert state(other, name, "1") in ("", "cold")
    with shared_redis.client() as client:
        assert not client.exists(f"own-{name}:loaded")
    named.setblocking(False)
    with named, pytest.raises(BlockingIOError):
        named.accept()
    app.close()
