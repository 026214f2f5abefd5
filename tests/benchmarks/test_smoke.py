"""The benchmark itself: sections run on a small scale and get right answers. No timing is judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.benchmarks import meter, mlp
from tests.benchmarks.__main__ import SECTIONS, main, measure
from tests.benchmarks.gpu import Check
from tests.benchmarks.report import FAILED, Progress, Row, Stage, as_data, markdown, verdict
from tests.benchmarks.scale import SMOKE
from tests.fork_server import ForkServer
from tests.servers import ROOT, fork_server, wait_until

TOO_LONG = {"compilation", "levels", "swap"}
"""Sections that compile, export and compare MiniLM, for a minute however small the scale, and one that starts three
workers; tests of the compiler, the optimizer and of the flow do the same with less."""


FIRST = "urgent"
"""The section that `make test` runs; `make test-all` runs the others."""


def _marked(section: str) -> Any:
    return pytest.param(section, marks=[] if section == FIRST else pytest.mark.slow)


@pytest.fixture(scope="module")
def with_torch() -> Iterator[ForkServer]:
    """Nearly every worker of a section needs it, and how long that takes is not what is tested."""
    with fork_server("torch") as started:
        started.start()
        yield started


@pytest.mark.usefixtures("with_torch")
@pytest.mark.parametrize("section", [_marked(section) for section in SECTIONS if section not in TOO_LONG])
def test_a_section_gets_its_figures_and_leaves_no_process(section):
    """Each section runs real servers, workers and clients, finds every answer right, and ends what it started."""
    before = set(meter.tree(os.getpid()))
    rows, stages = measure([section], SMOKE)
    assert rows or stages
    assert [row for row in rows if row.measured.startswith(FAILED)] == []
    assert set(meter.tree(os.getpid())) <= before


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_process(tmp_path):
    """Ctrl-C in the middle of a section ends its servers, workers and clients."""
    with (tmp_path / "output").open("wb") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks", "--quick", "--only", "alone"],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_until(lambda: b"alone 1" in (tmp_path / "output").read_bytes(), 60, "the first figures")
        family = meter.tree(run.pid)
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(180) != 0
        assert len(family) > 4
        wait_until(lambda: not any(map(_is_alive, family)), 10, f"the end of {family}")
    finally:
        run.kill()
        run.wait()


def test_wrong_answers_are_noticed():
    """Logits of another row do not pass for a row's own."""
    rows = mlp.inputs(2, seed=0)
    swapped = mlp.inputs(2, seed=0)[::-1].copy()
    logits = _logits(swapped)
    with pytest.raises(ValueError, match="Wrong answers"):
        mlp.check(rows, logits)
    mlp.check(swapped, logits)


def test_inputs_are_all_distinct():
    """No row comes twice, within one seed or between two."""
    rows = np.concatenate([mlp.inputs(500, seed=1), mlp.inputs(500, seed=2)])
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_the_table_says_what_was_missed():
    """Targets, bounds and stages go to tables of their own, and a missed target stands out."""
    rows = [
        Row("speed", "3 us", "<= 2 us", "<= 1 us", verdict(required=False), {"us": 3.0}),
        Row("bound: air", "1 us"),
    ]
    stages = [Stage("seal", {64: 1.25, 256: 1.0})]
    text = markdown(rows, stages)
    assert "| speed | <= 2 us | <= 1 us | 3 us | **no** |" in text
    assert "| bound: air | 1 us |" in text
    assert "| seal | 1.2 | 1.0 |" in text
    assert json.loads(json.dumps(as_data(rows, stages)))["rows"][0]["figures"] == {"us": 3.0}


def test_without_a_gpu_every_row_says_so():
    """What was not measured has no figure, and is neither a success nor a failure."""
    checks = [Check("a claim", "a bound", lambda _: pytest.fail("it was run"))]
    row = checks[0].row("no CUDA device", print)
    assert (row.measured, row.required, row.ok) == ("not run: no CUDA device", "a bound", "not run")
    assert row.figures == {}


def test_a_check_that_fails_on_a_gpu_is_a_missed_target():
    """An error is told as such, and the other checks go on."""

    def broken(_: Progress) -> tuple[str, bool, dict[str, float]]:
        raise MemoryError("does not fit")

    assert Check("a claim", "a bound", broken).row("", print).measured == "failed: MemoryError"
    assert Check("a claim", "a bound", lambda _: ("1.1x", False, {})).row("", print).ok == "**no**"


def test_an_unknown_section_is_refused():
    """A misspelt section is a usage error that names those there are."""
    asked = CliRunner().invoke(main, ["--only", "troughput"])
    assert asked.exit_code == 2
    assert "troughput" in asked.stderr
    assert "throughput" in asked.stderr


def _logits(rows: mlp.Float32Array) -> mlp.Float32Array:
    import torch

    with torch.inference_mode():
        logits: mlp.Float32Array = mlp.module()(torch.from_numpy(rows)).numpy()
    return logits


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
