"""`make demo`, as a newcomer sees it: one command, real text, answers, figures, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.servers import ROOT

COMMAND = [sys.executable, "-c", "from penstock.compose.cli import main; main()", "demo"]
pytestmark = pytest.mark.timeout(1200)


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path),
        "HOME": str(tmp_path),
        # Wide enough that no line of the output is folded.
        "COLUMNS": "200",
    }
    return subprocess.run(
        [*COMMAND, *arguments], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=1000, check=False
    )


def data_of(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What the command printed, as a document."""
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


def hits_of(shown: dict[str, Any]) -> dict[str, list[str]]:
    """The names of the passages that each question found."""
    return {result["question"]: [hit["name"] for hit in result["hits"]] for result in shown["results"]}


@pytest.fixture
def short_tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the test can search for what the demo left."""
    return tmp_path_factory.mktemp("d")


def test_demo_answers(short_tmp):
    """Without any setting: every passage is embedded, every question and a request over HTTP is answered, and nothing
    is left behind."""
    shown = data_of(run(short_tmp, "--count", "200", "--ask", "How do I sort a list?", "--json"))
    hits = hits_of(shown)
    assert len(hits) >= 3
    assert all(hits.values())
    assert "builtins.list.sort" in hits["How do I sort a list?"]
    assert sum(int(rows) * batches for rows, batches in shown["batch_sizes"].items()) >= 200
    assert set(shown["latency_ms"]) >= {"queue", "batch", "compute", "commit"}
    assert shown["jobs_per_s"] > 0
    assert shown["http"]["curl"].startswith("curl http://127.0.0.1:")
    assert (shown["http"]["status"], shown["http"]["embedding"]) == (200, [1, 384])
    assert list(short_tmp.iterdir()) == []


@pytest.mark.slow
def test_demo_finds_what_was_asked(short_tmp):
    """The sample questions find strptime and compress."""
    hits = hits_of(data_of(run(short_tmp, "--count", "1500", "--json")))
    assert "time.strptime" in hits["How do I parse a date?"]
    assert "gzip.compress" in hits["How do I compress bytes?"]


@pytest.mark.slow
def test_demo_closes_with_its_figures(short_tmp):
    """For people: a progress bar, the answers, the histogram, where the time went, and Flower's address."""
    ended = run(short_tmp, "--count", "100")
    assert ended.returncode == 0, ended.stderr
    for expected in (
        "Embedding",
        "How do I parse a date?",
        "rows in a batch",
        "jobs/s",
        "commit:",
        "Flower",
        "password",
        "curl http://127.0.0.1:",
    ):
        assert expected in ended.stdout
    assert list(short_tmp.iterdir()) == []
