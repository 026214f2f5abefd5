"""`penstock demo --safety`: three acts on real workers, and the facts that its files state. Issue 15."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.safety.canary import MIN_PAIRS
from tests.servers import ROOT, require_module

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the demo has filled. It has left nothing else."""
    require_module("matplotlib")
    home = tmp_path_factory.mktemp("d")
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "TMPDIR": str(home),
        "HOME": str(home),
        "MPLCONFIGDIR": str(home / "matplotlib"),
    }
    command = [sys.executable, "-m", "penstock", "demo", "--safety", "--output", "out", "--json"]
    ended = subprocess.run(command, env=environ, cwd=home, capture_output=True, text=True, timeout=1100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == json.loads((home / "out" / "facts.json").read_text()) | {
        "files": json.loads(ended.stdout)["files"]
    }
    assert not [path for path in home.iterdir() if path.name.startswith("penstock-")]
    return home / "out"


@pytest.fixture(scope="module")
def facts(output: Path) -> dict[str, Any]:
    """The figures."""
    found: dict[str, Any] = json.loads((output / "facts.json").read_text())
    return found


def test_int8_without_calibration_is_refused(facts: dict[str, Any]):
    """Within 1,500 pairs, with the reason and exit status 1; no served job is wrong."""
    act = facts["refused"]
    canary = act["canary"]
    assert (canary["verdict"], act["exit_code"]) == ("FAIL", 1)
    assert 0 < canary["pairs"] <= MIN_PAIRS
    assert any(reason.startswith("embedding: min_cosine 0.") for reason in canary["reasons"])
    assert min(act["cosines"]) < 0.999
    assert act["served"]["jobs"] > 0
    assert act["served"]["wrong_or_failed"] == 0


def test_the_right_form_is_promoted(facts: dict[str, Any]):
    """The canary passes, the gate has measured a gain, and the form answers."""
    act = facts["promoted"]
    assert act["canary"]["verdict"] in ("PASS", "MARGINAL")
    assert act["canary"]["pairs"] >= MIN_PAIRS
    assert (act["is_promoted"], act["form"], act["why_not"]) == (True, "onnx", "")
    assert act["gain"] >= 1.1
    assert act["served"]["wrong_or_failed"] == 0


def test_the_broken_form_is_held_off(facts: dict[str, Any]):
    """The fallback answers the poisoned job rightly, the breaker opens once and stays open, and no job is wrong."""
    act = facts["broken"]
    assert act["poison"]["is_right"]
    assert act["poison"]["level"] in ("plain", "micro-batched")
    assert (act["breaker"]["circuit"], act["breaker"]["pause_s"]) == ("open", 300.0)
    assert "NaN" in act["breaker"]["reason"]
    assert act["asked_again"]["answer"] == "onnx waits: its circuit breaker is open"
    assert (act["at_the_end"]["circuit"], act["at_the_end"]["times_opened"]) == ("open", 1)
    assert act["at_the_end"]["left_s"] > 0
    assert act["served"]["wrong_or_failed"] == 0


def test_the_report_needs_no_other_file(output: Path, facts: dict[str, Any]):
    """Each picture is a PNG, and the report holds it."""
    report = (output / "report.html").read_text()
    acts = ("refused", "promoted", "broken")
    assert all(facts[name] for name in acts)
    assert {path.stem for path in output.glob("*.png")} == {*acts}
    for act in acts:
        picture = (output / f"{act}.png").read_bytes()
        assert picture.startswith(PNG)
        assert base64.b64encode(picture).decode() in report
    assert not re.findall(r'(?:src|href)="(?!data:)', report)
