"""`penstock models` with a stack as `penstock up` runs it, which has its own operator's key.

CX-003, IN-064, IN-065.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import pytest
import redis
import yaml

from penstock.compose.deploy import Deployer
from penstock.compose.rollout.operator_keys import operator_keys
from penstock.compose.rollout.registry import open_registry
from penstock.compose.stack.fleet import Device
from penstock.compose.stack.local import LocalStack
from penstock.registry.catalog import Change
from penstock.registry.errors import ConfigurationError, TransitionRefused
from penstock.registry.package import load_package
from penstock.registry.settings import Settings
from penstock.safety.audit_reader import entries
from penstock.safety.operator_key import OperatorKey
from tests.compose.conftest import penstock
from tests.conftest import StartWorker
from tests.flow.hot_swap import write_multiplier
from tests.packages import write_package
from tests.servers import ROOT, RedisServer, wait_until

MODEL = "times"
CLOSED = "Control commands are off here. Expected PENSTOCK_OPERATOR_PUBLIC_KEYS on the worker"


def changes_in(folder: Path) -> list[dict[str, Any]]:
    """The changes of the registry in an audit log."""
    return [entry.details for entry in entries([folder], 1000).entries if entry.operation == "registry_change"]


class Stack(NamedTuple):
    """A home whose stack serves `times`, version * x: 1 is in production, 2 in staging, 9 not registered."""

    home: Path
    root: Path


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Not pytest's tmp_path: the path of a unix socket ends at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        root, home = Path(folder) / "models", Path(folder) / "home"
        for version in (1, 2, 9):
            write_multiplier(root, MODEL, version, forward_s=0.0)
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
            "PYTHONPATH": str(ROOT),
            "PENSTOCK_HOME": str(home),
            "PENSTOCK_INFERENCE_REPO_ROOT": str(root),
            "PENSTOCK_METRICS_PORT": "0",
        }
        with LocalStack(Settings.load(environ=environ), [Device("cpu", 0)], environ=environ, with_flower=False):
            for label in ("1", "2"):
                assert penstock(home, "models", "register", str(root / MODEL / label)).exit_code == 0
                assert penstock(home, "models", "promote", MODEL, label, "--to", "staging").exit_code == 0
            assert penstock(home, "models", "promote", MODEL, "1", "--to", "production").exit_code == 0
            yield Stack(home, root)


def _json(stack: Stack, *arguments: str) -> Any:
    shown = penstock(stack.home, "models", *arguments, "--json")
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


def _answer(stack: Stack, *options: str) -> float:
    shown = penstock(stack.home, "submit", MODEL, "-i", "x=[[1, 0, 0, 0]]", "--wait", "--json", *options)
    assert shown.exit_code == 0, shown.output
    return float(json.loads(shown.stdout)["outputs"]["y"][0][0])


def _row(stack: Stack, version: str) -> Any:
    return next(row for row in _json(stack, "list", MODEL) if row["version"] == version)


def test_the_stack_makes_an_operator_key_that_its_workers_trust(stack: Stack):
    """The key is made once and only this user can read it; workers and commands get its public half."""
    file = stack.home / "operator.pem"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    public_keys = json.loads((stack.home / "stack.json").read_bytes())["operator_public_keys"]
    assert public_keys == OperatorKey.load(file).public_text


def test_versions_are_promoted_and_rolled_back(stack: Stack):
    """The promoted version is active, by label or by content hash; table and history show it (CX-003, IN-065)."""
    assert _answer(stack) == 1.0
    content_hash = load_package(stack.root / MODEL / "2").manifest().content_hash
    shown = penstock(stack.home, "models", "promote", MODEL, content_hash[:8], "--to", "production", "--reason", "new")
    assert re.match(rf"{MODEL}: 1 -> 2 \(epoch \d+, \d+\.\d s, workers prepared: 1\)\n\Z", shown.stdout)
    assert f"{MODEL}/2 is ready" in shown.stderr
    assert (_answer(stack), _answer(stack, "--version", "1")) == (2.0, 1.0)
    back = _json(stack, "rollback", MODEL, "--reason", "wrong")
    assert (back["version"], back["replaced"], back["action"]) == ("1", "2", "rollback")
    assert (len(back["prepared"]), back["late"]) == (1, [])
    assert _answer(stack) == 1.0
    history = _json(stack, "history", MODEL)
    decided = [(each["version"], each["reason"]) for each in history[:3]]
    assert decided == [("1", "wrong"), ("2", "new"), ("1", "")]
    assert len({each["epoch"] for each in history}) == len(history)
    recorded = [each for each in changes_in(stack.home / "audit") if each["name"] == MODEL]
    assert [(each["epoch"], each["action"], each["reason"]) for each in recorded[-2:]] == [
        (each["epoch"], each["action"], each["reason"]) for each in history[1::-1]
    ]
    row = _row(stack, "1")
    assert (row["stage"], row["is_active"], len(row["workers"])) == ("production", True, 1)
    assert (_row(stack, "9")["stage"], _row(stack, "9")["is_active"]) == (None, False)
    drawn = penstock(stack.home, "models", "list").stdout
    assert "not registered" in drawn
    assert "production" in drawn
    assert "rollback" in penstock(stack.home, "models", "history", MODEL).stdout
    assert _json(stack, "sync", MODEL)["epoch"] == back["epoch"]


@pytest.mark.parametrize("command", [["show"], ["history"], ["lineage"], ["verify"]], ids=lambda words: words[0])
def test_a_model_that_is_served_and_not_registered_is_named_so(home: Path, command: list[str]):
    """The registry does not know it, a worker does: the error says so, and not that the model is unknown."""
    version = ["1"] if command[0] in ("lineage", "verify") else []
    shown = penstock(home, "models", *command, "double", *version)
    assert shown.exit_code == 1
    assert shown.stderr == (
        "Error: double: served, not registered. Expected `penstock models register` with its folder\n"
    )


def test_load_and_unload_wait_for_the_worker(stack: Stack):
    """All workers read the shared state, one worker gets a signed command; the command waits for the reports."""
    (worker,) = _json(stack, "load", MODEL, "2")["workers"]
    assert _row(stack, "2")["workers"] == [worker]
    assert f"{MODEL}/1 (and " in penstock(stack.home, "workers").stdout
    assert _json(stack, "unload", MODEL, "2", "--worker", worker)["workers"] == [worker]
    assert _row(stack, "2")["workers"] == []


def test_lineage_is_kept(stack: Stack, tmp_path: Path):
    """A lineage is read from YAML or JSON; unknown fields, other documents and missing files are refused by name."""
    package = write_multiplier(stack.root, MODEL, 3, forward_s=0.0)
    file = tmp_path / "trained.yaml"
    trained = {"data_version": "d7", "training_metrics": {"loss": 0.5}, "parent_model": f"{MODEL}/2"}
    for text, line in (
        (yaml.safe_dump({"dataversion": "d7"}), "Lineage: dataversion: "),
        ("[1]", "trained.yaml: found list, expected a mapping"),
        ("a: [", "trained.yaml, line 1: not valid YAML"),
    ):
        file.write_text(text)
        shown = penstock(stack.home, "models", "register", str(package), "--lineage", str(file))
        assert (shown.exit_code, shown.stderr.startswith(f"Error: {line}")) == (1, True), shown.stderr
    os.mkfifo(tmp_path / "pipe")
    for other, what in (("absent", "cannot be read"), ("", "cannot be read"), ("pipe", "no regular file")):
        shown = penstock(stack.home, "models", "register", str(package), "--lineage", str(tmp_path / other))
        assert (shown.exit_code, what in shown.stderr) == (1, True), shown.stderr
    file.write_text(json.dumps(trained))
    _json(stack, "register", str(package), "--lineage", str(file))
    found = _json(stack, "lineage", MODEL, "3")
    assert {name: found[name] for name in trained} == trained
    assert "data_version: d7" in penstock(stack.home, "models", "lineage", MODEL, "3").stdout
    shown = _json(stack, "show", MODEL, "3")
    assert (shown["stage"], shown["lineage"], sorted(shown["files"])) == ("draft", found, ["model.py", "model.yaml"])
    drawn = penstock(stack.home, "models", "show", MODEL, "3").stdout
    assert shown["content_hash"] in drawn
    assert "model.py" in drawn
    assert _json(stack, "demote", MODEL, "3", "--to", "archived")["after"] == "archived"


def test_verify_sees_a_changed_file(stack: Stack):
    """The files of a version are hashed again: a changed file is named, and the version is not promoted."""
    package = write_multiplier(stack.root, MODEL, 4, forward_s=0.0)
    _json(stack, "register", str(package))
    assert _json(stack, "verify", MODEL, "4")["files"] == 2
    with (package / "model.py").open("a") as module:
        module.write("# changed\n")
    content = _row(stack, "4")["content_hash"][:12]
    for arguments in (["verify", MODEL, "4"], ["promote", MODEL, "4", "--to", "staging"]):
        shown = penstock(stack.home, "models", *arguments)
        assert shown.exit_code == 1
        assert shown.stderr == f"Error: {MODEL}/4: file model.py is not as it was registered (content hash {content})\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["show", "nonesuch"], "Unknown model 'nonesuch'. Registered: times"),
        (["promote", MODEL, "77", "--to", "production"], "Unknown version '77' of times. Expected one of: 1 ("),
        (
            ["load", MODEL, "1", "--worker", "absent"],
            "'absent' is no live worker that serves times. Expected one of: c",
        ),
        (["unload", MODEL, "latest"], "times/1 is the active version. Expected another version to be promoted first"),
        (["register", "/nonexistent/model/1"], "model/1/model.yaml: cannot be read"),
        (["register", "runs:/a/b"], "MLFLOW_TRACKING_URI: missing, expected the address"),
        (["register", "org/tiny@main"], "org/tiny@main: revision: found 'main', expected a commit of 40 hex digits"),
        (["--via", "any", "register", "runs:/a/b"], "runs:/a/b is fetched to this machine. Expected no --via"),
        (["export-onnx", MODEL, "1", "out.onnx"], "times/1 is of format python. Expected pytorch, or an encoder"),
        (["compile", "nonesuch"], "No worker has 'nonesuch' loaded"),
        (["levels", "nonesuch"], "No worker reports a level of 'nonesuch'"),
        (["list", "nonesuch"], "Unknown model 'nonesuch'. Expected one that is registered or served"),
    ],
)
def test_a_refusal_is_one_line_and_status_1(stack: Stack, arguments: list[str], line: str):
    """A refusal names the fault and the expectation on stderr."""
    shown = penstock(stack.home, "models", *arguments)
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr.startswith(f"Error: {line}")
    assert shown.stderr.count("\n") == 1


def test_levels_are_the_workers_reports(stack: Stack):
    """Level, form and steps are shown; `compile` exits with 1 for a model without a compiled form.

    A model of Python code has no step: no copy of it can be tried beside the traffic.
    """
    (entry,) = [entry for entry in _json(stack, "levels", MODEL) if entry["version"] == "1"]
    assert (entry["level"], entry["form"], entry["steps"]) == (0, "eager", [])
    assert "serves the form eager" in penstock(stack.home, "models", "levels", MODEL).stdout
    shown = penstock(stack.home, "models", "compile", MODEL)
    assert shown.exit_code == 1
    assert "cpu0@" in shown.stdout


def _row_epoch(stack: Stack) -> int:
    return int(_json(stack, "show", MODEL)["epoch"])


def test_doctor_finds_an_inactive_production_version(stack: Stack):
    """A production version that is not active is broken, and `models sync` is the fix."""
    settings = Settings.load(environ={"PENSTOCK_HOME": str(stack.home)})
    registry = open_registry(settings, operator_keys(settings))
    write_multiplier(stack.root, MODEL, 5, forward_s=0.0)
    _json(stack, "register", str(stack.root / MODEL / "5"))
    registry.promote(MODEL, "5", "staging")
    registry.promote(MODEL, "5", "production")
    assert "not yet" in penstock(stack.home, "models", "list", MODEL).stdout
    found = json.loads(penstock(stack.home, "doctor", "--json").stdout)["findings"]
    (finding,) = [each for each in found if each["area"] == "registry"]
    assert (finding["status"], finding["fix"]) == ("broken", f"penstock models sync {MODEL}")
    _json(stack, "sync", MODEL)
    assert _answer(stack) == 5.0
    slot = f"{{{MODEL}}}:active"
    applied = stack.home / "deployments" / f"{MODEL}.active"
    wait_until(lambda: applied.read_bytes().startswith(b"%d " % _row_epoch(stack)), 5, "the decision is kept")
    with redis.Redis.from_url(json.loads((stack.home / "stack.json").read_bytes())["redis_url"]) as client:
        client.delete(slot)
    found = json.loads(penstock(stack.home, "doctor", "--json").stdout)["findings"]
    (finding,) = [each for each in found if "and keep it" in each["what"]]
    assert finding["fix"].startswith(f"penstock models sync {MODEL}")
    _json(stack, "sync", MODEL)
    _json(stack, "rollback", MODEL)


def test_each_worker_keeps_its_own_state_without_a_store(
    shared_redis: RedisServer, models_root: Path, tmp_path: Path, slot: str, start_worker: StartWorker
):
    """Without a store, commands go to every worker, and the next start does not know them (IN-064)."""
    for version in (1, 2):
        write_multiplier(models_root, slot, version, forward_s=0.0)
    home = tmp_path / "home"
    there = {
        "PENSTOCK_REDIS_URL": shared_redis.url,
        "PENSTOCK_CELERY_URL": shared_redis.celery_url,
        "PENSTOCK_INFERENCE_STATE_RECONCILE_ENABLED": "false",
        "PENSTOCK_INFERENCE_STATE_PREFIX": f"test:{uuid4().hex}",
    }
    operator = OperatorKey.generate(home / "operator.pem")
    own = {**there, "PENSTOCK_OPERATOR_PUBLIC_KEYS": operator.public_text}
    listening = start_worker(shared_redis, models_root, environment=own, wait=False)
    deaf = start_worker(shared_redis, models_root, environment=there, wait=False)
    for worker in (listening, deaf):
        wait_until(worker.is_ready, 60, "the worker is ready")

    def run(*arguments: str) -> Any:
        return penstock(home, "models", *arguments, **there)

    assert run("register", str(models_root / slot / "1")).exit_code == 0
    loaded = run("load", slot, "1", "--worker", listening.name, "--json")
    assert loaded.exit_code == 0, loaded.output
    assert json.loads(loaded.stdout)["workers"] == [listening.name]
    states = [worker.report()["versions"][slot].get("1", {}).get("state") for worker in (listening, deaf)]
    assert states[0] == "ready"
    assert states[1] != "ready"
    refused = run("load", slot, "1")
    assert refused.exit_code == 1
    assert f"{deaf.name}: {CLOSED}" in refused.stderr
    assert run("promote", slot, "1", "--to", "staging").exit_code == 0
    refused = run("promote", slot, "1", "--to", "production")
    assert refused.stderr.endswith(f"{slot}/1 stays in staging. {deaf.name}: {CLOSED}\n")
    done = run("promote", slot, "1", "--to", "production", "--no-prepare", "--json")
    assert (json.loads(done.stdout)["prepared"], json.loads(done.stdout)["after"]) == ([], "production")
    with shared_redis.client() as client:
        assert not list(client.scan_iter(f"{there['PENSTOCK_INFERENCE_STATE_PREFIX']}*"))


def test_the_registry_works_without_a_broker(shared_redis: RedisServer, tmp_path: Path, slot: str):
    """Without a broker the registry can be read and drafts moved; an error of the broker tells what was done."""
    package = write_package(tmp_path / "models", slot, "def build(): return lambda inputs: {'y': inputs['x']}")
    home = tmp_path / "home"
    away = {"PENSTOCK_REDIS_URL": f"unix://{tmp_path}/absent.sock"}
    shown = penstock(home, "models", "register", str(package), **away)
    assert shown.exit_code == 1
    assert f"{slot}/1 is registered, in draft, but its jobs are not accepted yet" in shown.stderr
    assert str(tmp_path) not in shown.stderr
    (row,) = json.loads(penstock(home, "models", "list", "--json").stdout)
    assert (row["name"], row["stage"], row["is_active"]) == (slot, "draft", False)
    assert penstock(home, "models", "promote", slot, "1", "--to", "staging").exit_code == 0
    there = {"PENSTOCK_REDIS_URL": shared_redis.url}
    assert penstock(home, "models", "register", str(package), **there).exit_code == 0


def test_approvers_and_gates_are_asked(shared_redis: RedisServer, tmp_path: Path, slot: str):
    """A program can pass an approver and a gate: their reason is in the refusal, and in no record (AR-020)."""
    package = write_package(tmp_path / "models", slot, "def build(): return lambda inputs: {'y': inputs['x']}")
    settings = Settings.load(environ={"PENSTOCK_HOME": str(tmp_path / "home"), "PENSTOCK_REDIS_URL": shared_redis.url})

    def approve(change: Change) -> str | None:
        return "ask Ann" if change.after == "archived" else None

    with Deployer.connect(settings, approve=approve, gate=lambda change: "drift") as deployer:
        deployer.register(package)
        with pytest.raises(TransitionRefused, match="refused by the approver: ask Ann"):
            deployer.registry.demote(slot, "1", "archived")
        deployer.promote(slot, "1", "staging")
        with pytest.raises(TransitionRefused, match="refused by the gate: drift"):
            deployer.promote(slot, "1")
        assert deployer.registry.find(slot, "1").stage == "staging"
    log = tmp_path / "home" / "audit"
    assert [change["action"] for change in changes_in(log)] == ["register", "promote"]
    shutil.rmtree(log)
    log.touch()
    with Deployer.connect(settings) as deployer:
        with pytest.raises(ConfigurationError, match="audit log"):
            deployer.promote(slot, "1")
        assert deployer.registry.find(slot, "1").stage == "staging"


def test_untrusted_keys_change_nothing(tmp_path: Path):
    """With public keys in the settings the private key must exist and be one of them; reading needs no key."""
    mine = OperatorKey.generate(tmp_path / "mine.pem")
    theirs = OperatorKey.generate(tmp_path / "theirs.pem").public_text

    def settings(public: str, file: str) -> Settings:
        environ = {
            "PENSTOCK_HOME": str(tmp_path / "home"),
            "PENSTOCK_OPERATOR_PUBLIC_KEYS": public,
            "PENSTOCK_OPERATOR_KEY_FILE": str(tmp_path / file),
        }
        return Settings.load(environ=environ)

    assert operator_keys(settings(f"{theirs},{mine.public_text}", "mine.pem"), for_changes=True).sign is not None
    for public, file, what in ((theirs, "mine.pem", "is none of"), (theirs, "absent.pem", "does not exist")):
        with pytest.raises(ConfigurationError, match=what):
            operator_keys(settings(public, file), for_changes=True)
        assert operator_keys(settings(public, file)).verify is not None
    assert not (tmp_path / "absent.pem").exists()
    assert operator_keys(settings("", "new.pem")).verify is None
    made = operator_keys(settings("", "new.pem"), for_changes=True)
    assert made.public_text == OperatorKey.load(tmp_path / "new.pem").public_text
    assert operator_keys(settings("", "new.pem"), for_changes=True).public_text == made.public_text


def test_an_export_needs_a_folder(stack: Stack, tmp_path: Path):
    """The command says so before anything is exported."""
    _json(stack, "register", str(ROOT / "models" / "mlp" / "1"))
    refused = penstock(stack.home, "models", "export-onnx", "mlp", "1", str(tmp_path / "absent" / "mlp.onnx"))
    assert (refused.exit_code, refused.stderr) == (
        1,
        "Error: mlp.onnx cannot be written (No such file or directory). Expected a file in a folder\n",
    )


@pytest.mark.slow
def test_a_version_is_exported(stack: Stack, tmp_path: Path):
    """The exported file computes the model's outputs, and the command prints the differences."""
    import onnxruntime

    _json(stack, "register", str(ROOT / "models" / "mlp" / "1"))
    file = tmp_path / "mlp.onnx"
    exported = _json(stack, "export-onnx", "mlp", "1", str(file))
    assert exported["bytes"] == file.stat().st_size
    assert exported["differences"]["logits"] < 1e-4
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"x": np.zeros((3, 384), np.float32)})
    assert logits.shape[0] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["mlp.onnx"]


def test_every_command_goes_by_signed_control_commands(stack: Stack, tmp_path: Path):
    """Every command works through a worker, with only the address of Celery's broker and the keys (IN-064).

    Other operators see the same state.
    """
    running = json.loads((stack.home / "stack.json").read_bytes())
    keys = Path(running["keys_file"]).read_text("ascii").strip()
    there = {
        "PENSTOCK_CELERY_URL": running["redis_url"],
        "PENSTOCK_SIGNING_KEYS": keys,
        "PENSTOCK_OPERATOR_KEY_FILE": str(stack.home / "operator.pem"),
        "PENSTOCK_OPERATOR_PUBLIC_KEYS": running["operator_public_keys"],
    }
    far = tmp_path / "far"

    def run(*arguments: str) -> Any:
        return penstock(far, "models", "--via", "any", *arguments, **there)

    def data(*arguments: str) -> Any:
        shown = run(*arguments, "--json")
        assert shown.exit_code == 0, shown.output
        return json.loads(shown.stdout)

    write_multiplier(stack.root, MODEL, 7, forward_s=0.0)
    assert data("register", f"{MODEL}/7")["stage"] == "draft"
    assert data("promote", MODEL, "7", "--to", "staging")["after"] == "staging"
    assert data("demote", MODEL, "7")["after"] == "draft"
    assert data("verify", MODEL, "7")["files"] == 2
    (worker,) = data("load", MODEL, "7")["workers"]
    assert data("unload", MODEL, "7")["workers"] == [worker]
    data("promote", MODEL, "7", "--to", "staging")
    done = data("promote", MODEL, "7", "--to", "production", "--reason", "from afar")
    assert (done["prepared"], done["late"], _answer(stack)) == ([worker], [], 7.0)
    assert data("sync", MODEL)["epoch"] == done["epoch"]
    assert data("rollback", MODEL)["version"] == "1"
    assert (data("sign", MODEL)["action"], _answer(stack)) == ("sign", 1.0)
    assert data("history", MODEL) == _json(stack, "history", MODEL)
    assert data("list") == _json(stack, "list")
    assert data("show", MODEL, "7") == _json(stack, "show", MODEL, "7")
    assert data("lineage", MODEL, "7") == _json(stack, "lineage", MODEL, "7")
    assert {entry["worker"] for entry in data("levels", MODEL)} == {worker}
    assert run("compile", MODEL).exit_code == 1
    refused = run("export-onnx", MODEL, "1", str(tmp_path / "x.onnx"))
    assert (refused.exit_code, "is no plain file name" in refused.stderr) == (1, True)
    assert not (far / "registry.db").exists()
    there["PENSTOCK_SIGNING_KEYS"] = "k1:" + "A" * 43 + "="
    assert "which its reader does not have" in run("list").stderr
    unknown = penstock(far, "models", "--via", "absent", "list", **there)
    assert unknown.stderr == f"Error: No worker 'absent' listens on Celery's broker. Expected one of: {worker}\n"


def test_registered_models_are_listed(shared_redis: RedisServer, home, tmp_path, slot):
    """`models list` shows the inputs and outputs of each model."""
    there = {"PENSTOCK_REDIS_URL": shared_redis.url}
    package = write_package(tmp_path, slot, "def build(): return lambda inputs: {'y': inputs['x']}")
    shown = penstock(home, "models", "register", str(package), "--json", **there)
    content_hash = load_package(package).manifest().content_hash
    assert json.loads(shown.output) == {"name": slot, "version": "1", "content_hash": content_hash, "stage": "draft"}
    known = json.loads(penstock(home, "models", "list", slot, "--json", **there).output)
    assert known == [
        {
            "name": slot,
            "version": "1",
            "stage": "draft",
            "content_hash": content_hash,
            "is_active": False,
            "workers": [],
            "inputs": {"x": "float32 (batch, 4)"},
            "outputs": {"y": "float32 (batch, 4)"},
        }
    ]
