"""The wheel in empty environments: each extra does what it is for, and the command names the one that is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.producers.client import Client
from tests.conftest import StartWorker
from tests.install import client_calls
from tests.install.conftest import StartInstalled
from tests.install.environments import Environment
from tests.packages import write_double
from tests.servers import ROOT, RedisServer

Install = Callable[[str], Environment]
pytestmark = [pytest.mark.install, pytest.mark.slow, pytest.mark.timeout(1200)]
ROW = {"x": [[1.0, 2.0, 3.0, 4.0]]}


def test_base_submits(
    install: Install, redis_server: RedisServer, start_worker: StartWorker, models_root: Path, tmp_path: Path
):
    """A client of the base install uses every call against a worker of another environment."""
    environment = install("")
    write_double(models_root, "served")
    worker = start_worker(redis_server, models_root, models=["served"])
    write_double(models_root, "local")
    program = shutil.copy(client_calls.__file__, tmp_path)
    variables = {"PENSTOCK_REDIS_URL": redis_server.url, "PENSTOCK_INFERENCE_REPO_ROOT": str(models_root)}
    ended = environment.run("python", program, "served", "local", environment=variables)
    assert (ended.returncode, ended.stdout) == (0, "12\n"), f"{ended.stderr}\n{worker.tail()}"
    refused = environment.run("penstock", "status")
    assert (refused.returncode, refused.stdout) == (os.EX_CONFIG, "")
    assert refused.stderr.endswith("is not installed. Expected: pip install '.[cli]' in the checkout of Penstock\n")
    assert refused.stderr.count("\n") == 1


def test_cli_operates(install: Install, redis_server: RedisServer, models_root: Path):
    """`[cli]` asks, registers and examines; the command that would start a worker names `[worker]`."""
    environment = install("[cli]")
    package = str(write_double(models_root))
    variables = {"PENSTOCK_REDIS_URL": redis_server.url, "PENSTOCK_INFERENCE_REPO_ROOT": str(models_root)}
    for command in (["status"], ["models", "register", package], ["models", "history", "double"], ["doctor"]):
        ended = environment.run("penstock", *command, environment=variables)
        assert "Traceback" not in ended.stderr, ended.stderr
        assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
    refused = environment.run("penstock", "worker", environment=variables)
    assert (refused.returncode, refused.stderr.count("\n")) == (os.EX_CONFIG, 1)
    assert "pip install '.[worker]'" in refused.stderr


def test_worker_serves_python(
    install: Install, redis_server: RedisServer, start_installed: StartInstalled, models_root: Path
):
    """`celery -A penstock.workers.app worker`, bare, serves a model that needs no framework."""
    environment = install("[worker]")
    write_double(models_root)
    worker = start_installed(environment, redis_server, models_root)
    with Client(redis_server.url) as client:
        assert client.submit("double", ROW).result(180)["y"].tolist() == [[2.0, 4.0, 6.0, 8.0]], worker.tail()


def test_worker_serves_torch(
    install: Install, redis_server: RedisServer, start_installed: StartInstalled, models_root: Path
):
    """`[worker,torch]` serves a PyTorch module."""
    environment = install("[worker,torch]")
    shutil.copytree(ROOT / "models" / "mlp", models_root / "mlp")
    worker = start_installed(environment, redis_server, models_root)
    with Client(redis_server.url) as client:
        logits = client.submit("mlp", {"x": np.ones((1, 384), np.float32)}).result(180)["logits"]
    assert logits.shape == (1, 10), worker.tail()
