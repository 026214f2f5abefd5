"""`penstock models levels --now` and `compile` against a stack that serves the model which the tests here compile once.

The same stack without that artefact shows the codecs of packages and the models root.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from penstock import Client
from penstock.compose.stack.fleet import Device
from penstock.compose.stack.local import LocalStack
from penstock.registry.settings import Settings
from penstock.safety.audit import GATE_DECISION, STATE_CHANGE
from penstock.safety.audit_reader import entries
from tests.compose.conftest import penstock
from tests.packages import write_double
from tests.servers import ROOT
from tests.workers.compilation.conftest import Compiled
from tests.workers.compilation.packages import write_module

JOBS = 48
pytestmark = pytest.mark.timeout(900)
"""A C++ compiler beside other tests takes minutes on a slow machine."""


class Stack(NamedTuple):
    """A home whose stack serves what lies in `root`: `module`, compiled before, and `coded`, whose codec is base64."""

    home: Path
    root: Path


@pytest.fixture(scope="module")
def compiled_stack(compiled: Compiled) -> Iterator[Stack]:
    """With the artefact and its key, so that nothing is compiled again."""
    with serving(compiled.package, compiled.config.cache_dir, compiled.key_file) as stack:
        yield stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Without an artefact."""
    home = tmp_path_factory.mktemp("served")
    with serving(write_module(home / "models"), home / "cache") as stack:
        yield stack


@contextmanager
def serving(package: Path, cache: Path, key_file: Path | None = None) -> Iterator[Stack]:
    """A stack that serves `package` and `coded`. Not pytest's tmp_path: the path of a unix socket ends at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        root, home = Path(folder) / "here", Path(folder) / "home"
        shutil.copytree(package, root / "module" / "1", ignore=shutil.ignore_patterns("__pycache__"))
        spec = write_double(root, "coded") / "model.yaml"
        spec.write_text(f"{spec.read_text()}codecs: {{default: base64}}\n")
        home.mkdir(mode=0o700)
        if key_file is not None:
            shutil.copy2(key_file, home)
        write_double(Path(folder) / "models", "elsewhere")
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
            "PYTHONPATH": str(ROOT),
            "PENSTOCK_HOME": str(home),
            "PENSTOCK_INFERENCE_REPO_ROOT": str(root),
            "PENSTOCK_INFERENCE_COMPILATION_CACHE_DIR": str(cache),
            "PENSTOCK_METRICS_PORT": "0",
        }
        with LocalStack(Settings.load(environ=environ), [Device("cpu", 0)], environ=environ, with_flower=False):
            yield Stack(home, root)


def _levels(stack: Stack, *options: str) -> dict[str, Any]:
    shown = penstock(stack.home, "models", "levels", "module", "--json", *options)
    assert shown.exit_code == 0, shown.output
    (entry,) = json.loads(shown.stdout)
    return dict(entry)


def _answers(stack: Stack) -> np.ndarray[Any, Any]:
    """The same jobs each time, one after the other: for a row alone the compiled form is more than twice as fast."""
    numbers = np.random.default_rng(11).standard_normal((JOBS, 1, 16)).astype(np.float32)
    with Client.from_env(settings=Settings.load(environ={"PENSTOCK_HOME": str(stack.home)})) as client:
        return np.concatenate([client.submit("module", {"x": rows}).result(timeout=180)["y"] for rows in numbers])


@pytest.mark.slow
def test_a_form_is_traced_compiled_and_used_between_jobs(compiled_stack: Stack):
    """`--now trace` tells what a forward consists of; `compile` ends with 0 when the compiled form answers, with the
    numbers that the model gave; each step that was taken is one record of the worker's audit, and looking at it again
    is none; `--now optimise` then finds the form in place (CX-046, AR-029, AR-055)."""
    before = _answers(compiled_stack)
    traced = _levels(compiled_stack, "--now", "trace")
    assert "aten::tanh" in traced["answer"]
    assert (traced["form"], traced["level"]) == ("eager", 2)
    compiled = penstock(compiled_stack.home, "models", "compile", "module")
    assert compiled.exit_code == 0, compiled.output
    assert compiled.stdout.startswith("cpu0@")
    np.testing.assert_allclose(_answers(compiled_stack), before, rtol=1e-4, atol=1e-5)
    entry = _levels(compiled_stack)
    (step,) = [step for step in entry["steps"] if step["step"] == "compiled"]
    assert (entry["form"], step["state"]) == ("compiled", "on")
    assert step["gain"] >= 1.1
    audit = compiled_stack.home / "audit"
    records = [entry for entry in entries([audit], 1000).entries if entry.model_id == "module"]
    states = [(entry.optimization_name, entry.result) for entry in records if entry.operation == STATE_CHANGE]
    assert states == [("batching", "enabled"), ("compiled", "enabled")]
    verdicts = [(entry.optimization_name, entry.result) for entry in records if entry.operation == GATE_DECISION]
    assert verdicts == [("batching", "PASS"), ("compiled", "PASS")]
    _levels(compiled_stack)
    again = [entry for entry in entries([audit], 1000).entries if entry.model_id == "module"]
    assert len(again) == len(records)
    assert "compiled is enabled already" in _levels(compiled_stack, "--now", "optimise")["answer"]


def test_a_worker_serves_the_models_of_its_root_and_no_others(stack: Stack):
    """REPO_ROOT names the folder: what lies there is listed, and what lies under another one is unknown (IN-013)."""
    (worker,) = json.loads(penstock(stack.home, "workers", "--json").stdout)
    assert set(worker["models"]) == {path.name for path in stack.root.iterdir()} == {"module", "coded"}
    refused = penstock(stack.home, "submit", "elsewhere", "-i", "x=[[1, 2, 3, 4]]")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("Error: Unknown model 'elsewhere'")


def test_outputs_are_written_as_the_package_says(stack: Stack):
    """`codecs.default`: base64 are the very bytes with dtype and shape, lists are json; either may be an input again,
    and one that contradicts itself is refused (IN-004, IN-027)."""
    shown = penstock(stack.home, "submit", "coded", "-i", "x=[[1, 2, 3, 4]]", "--wait", "--json")
    assert shown.exit_code == 0, shown.output
    answer = json.loads(shown.stdout)["outputs"]["y"]
    assert (answer["dtype"], answer["shape"]) == ("float32", [1, 4])
    assert np.frombuffer(base64.b64decode(answer["base64"]), "<f4").tolist() == [2, 4, 6, 8]
    again = {"x": answer}
    shown = penstock(stack.home, "submit", "coded", "--inputs", "-", "--wait", stdin=json.dumps(again))
    assert "y float32 (1, 4)\n[[ 4.  8. 12. 16.]]" in shown.stdout, shown.output
    again["x"]["shape"] = [2, 4]
    refused = penstock(stack.home, "submit", "coded", "--inputs", "-", stdin=json.dumps(again))
    assert (refused.exit_code, refused.stderr.startswith("Error: x: bytes that do not fit")) == (1, True)
    answer = json.loads(penstock(stack.home, "submit", "module", "-i", f"x={[[0] * 16]}", "--wait", "--json").stdout)
    assert np.shape(answer["outputs"]["y"]) == (1, 16)
