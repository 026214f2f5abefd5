"""A run with a real worker in the audit log: gate decisions, state changes, cache accesses and promotions (CF-040)."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from penstock import Client
from penstock.compose.stack.fleet import Device
from penstock.compose.stack.local import LocalStack
from penstock.registry.settings import Settings
from penstock.safety.audit_reader import entries
from tests.compose.conftest import penstock
from tests.conftest import StartWorker
from tests.packages import write_double
from tests.safety.audits import files_of
from tests.servers import ROOT, RedisServer, wait_until
from tests.workers.compilation.packages import write_module

JOBS = 48


@contextmanager
def serving(folder: Path, **environment: str) -> Iterator[Path]:
    """The home of a stack that serves `module`. With an optional input it has one other form, built in no time."""
    package = write_module(folder / "models")
    source = (package / "model.py").read_text()
    (package / "model.py").write_text(source.replace("def forward(self, x):", "def forward(self, x, extra=None):"))
    spec = yaml.safe_load((package / "model.yaml").read_text())
    spec["inputs"].append({"name": "extra", "dtype": "float32", "shape": ["batch", 16], "optional": True})
    (package / "model.yaml").write_text(yaml.safe_dump(spec))
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
        "PYTHONPATH": str(ROOT),
        "PENSTOCK_HOME": str(folder / "home"),
        "PENSTOCK_INFERENCE_REPO_ROOT": str(folder / "models"),
        "PENSTOCK_METRICS_PORT": "0",
        **environment,
    }
    settings = Settings.load(environ=environ)
    with LocalStack(settings, [Device("cpu", 0)], environ=environ, with_flower=False):
        yield settings.home


def submit(home: Path) -> None:
    """Different jobs, and then each one again for another tenant and for the same."""
    numbers = np.random.default_rng(11).standard_normal((JOBS, 1, 16)).astype(np.float32)
    settings = Settings.load(environ={"PENSTOCK_HOME": str(home)})
    with Client.from_env(settings=settings) as client:
        for tenant in ("default", "default", "acme"):
            for rows in numbers:
                client.submit("module", {"x": rows}, tenant=tenant).result(timeout=180)


def verified(home: Path) -> Mapping[str, Any]:
    shown = penstock(home, "audit", "verify", "--json")
    assert shown.exit_code in (0, 1), shown.output
    return dict(json.loads(shown.stdout))


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """After a run: jobs, a registration, the trial of every form; the stack has stopped."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        folder = Path(name)
        with serving(folder) as home:
            submit(home)
            assert penstock(home, "models", "register", str(folder / "models" / "module" / "1")).exit_code == 0
            tried = penstock(home, "models", "levels", "module", "--now", "optimise")
            assert tried.exit_code == 0, tried.output
            wait_until(lambda: verified(home)["heads"]["broker"] == 2, 30, "both writers have stored their ends")
        yield home


def test_all_kinds_are_recorded(home: Path):
    """A verdict of the gate, the state of the step, the look-ups of each tenant, and the change of the registry."""
    recorded = entries([home / "audit"], 1000).entries
    verdicts = [entry for entry in recorded if entry.operation == "gate_decision"]
    assert ("module", "prepacked") in {(entry.model_id, entry.optimization_name) for entry in verdicts}
    assert {entry.result for entry in verdicts} <= {"PASS", "FAIL"}
    states = {(entry.optimization_name, entry.result) for entry in recorded if entry.operation == "optimization_state"}
    assert ("batching", "enabled") in states
    assert {name for name, _ in states} >= {"prepacked"}
    counts: dict[str, list[int]] = {}
    for entry in recorded:
        if entry.operation == "cache_access":
            of_tenant = counts.setdefault(entry.details["tenant"], [0, 0])
            of_tenant[0] += entry.details["hits"]
            of_tenant[1] += entry.details["misses"]
    assert counts == {"default": [JOBS, JOBS], "acme": [0, JOBS]}
    (change,) = [entry for entry in recorded if entry.operation == "registry_change"]
    assert (change.model_id, change.result, change.details["version"]) == ("module", "register", "1")


def test_the_verification_has_kept_the_ends_in_the_registry(home: Path):
    """The broker of the stack is gone, and a log that is cut off now is found by the registry's heads."""
    before = verified(home)
    assert (before["damage"], before["chains"], list(before["heads"])) == ([], 2, ["registry"])
    (file,) = [file for file in files_of(home / "audit") if file.name.startswith("cpu0@")]
    kept = file.read_bytes()
    file.write_bytes(kept[: kept.index(b"\n") + 1])
    (damage,) = verified(home)["damage"]
    assert (damage["file"], damage["line"], damage["sequence"]) == (file.name, 2, 2)
    assert "truncated" in damage["problem"]
    file.write_bytes(kept)


def test_a_worker_without_an_audit_log_leaves_no_line(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker, slot: str
):
    """audit_log_enabled = false: jobs run, and there is neither a file nor a key (CF-025)."""
    write_double(models_root, slot)
    worker = start_worker(
        shared_redis, models_root, environment={"PENSTOCK_INFERENCE_PRIVACY_AUDIT_LOG_ENABLED": "false"}
    )
    with Client(shared_redis.url) as client:
        for _ in range(2):
            client.submit(slot, {"x": np.ones((1, 4), np.float32)}).result(180)
    worker.terminate()
    assert worker.wait(180) == 0
    home = worker.folder / "home"
    assert home.is_dir()
    assert not (home / "audit").exists()
    assert not (home / "audit.key").exists()


def test_a_worker_that_is_killed_leaves_a_sound_log(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker, slot: str
):
    """kill -9 after a decision: the entry is on disk, its end in the broker, and the chain verifies."""
    write_module(models_root, name=slot)
    worker = start_worker(shared_redis, models_root)
    home, environ = worker.folder / "home", {"PENSTOCK_REDIS_URL": shared_redis.url}
    with Client(shared_redis.url) as client:
        rows = [np.full(16, number, np.float32) for number in range(64)]
        wait_until(lambda: client.map(slot, rows) and files_of(home / "audit"), 60, "a decision")
    (writer,) = {file.name.split(".")[0] for file in files_of(home / "audit")}
    with shared_redis.client() as redis:
        wait_until(lambda: redis.hexists("penstock:audit_heads", writer), 30, "its end is stored")
    worker.kill()
    shown = penstock(home, "audit", "verify", "--json", **environ)
    damage = [each for each in json.loads(shown.stdout)["damage"] if each["file"].startswith(writer)]
    assert damage == []
    shutil.rmtree(home / "audit")
    shown = penstock(home, "audit", "verify", "--json", **environ)
    damage = [each for each in json.loads(shown.stdout)["damage"] if each["file"].startswith(writer)]
    assert [each["problem"] for each in damage] == ["the file is missing"]
    assert shown.exit_code == 1


@pytest.mark.parametrize(("how", "results"), [("sampled", ["miss"]), ("off", [])])
def test_cache_accesses_are_recorded_as_the_setting_says(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker, slot: str, how: str, results: list[str]
):
    """Of 150 look-ups that find nothing the hundredth is an entry, or none is; audit_cache_accesses decides."""
    write_double(models_root, slot)
    environment = {"PENSTOCK_INFERENCE_PRIVACY_AUDIT_CACHE_ACCESSES": how}
    worker = start_worker(shared_redis, models_root, environment=environment)
    with Client(shared_redis.url) as client:
        client.map(slot, [np.full(4, number, np.float32) for number in range(150)])
    worker.terminate()
    assert worker.wait(180) == 0
    recorded = entries([worker.folder / "home" / "audit"], 1000).entries
    assert [entry.result for entry in recorded if entry.operation == "cache_access"] == results
