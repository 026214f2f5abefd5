"""OpenAI's batches, through OpenAI's client: a file of lines, a file of answers, a file of errors."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.registry.api_keys import KeyLimits, ShownKey, new_api_key
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.catalog.api_keys import SqlApiKeys
from penstock.registry.queues import meter_key
from tests.conftest import StartWorker
from tests.gateway_process import GatewayProcess
from tests.packages import recorded_forwards, write_recorder
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.servers import RedisServer, require_module, wait_until

ENDED = {"failed", "completed", "expired", "cancelled"}
EMBEDDINGS = "/v1/embeddings"
PREDICT = "/v1/models/recorder:predict"


@pytest.fixture
def openai(stack: GatewayStack) -> Iterator[Any]:
    """OpenAI's client of the shared gateway, without its own retries."""
    with client_of(stack.gateway) as client:
        yield client


def client_of(gateway: GatewayProcess, api_key: str = "none") -> Any:
    """OpenAI's client of a gateway."""
    return require_module("openai").OpenAI(base_url=f"{gateway.url}/v1", api_key=api_key, max_retries=0)


def line(custom_id: str, text: object = "abcd", url: str = EMBEDDINGS, method: str = "POST", **fields: Any) -> str:
    """A line that asks for an embedding."""
    body = {"model": "embedder", "input": text, **fields}
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def prediction(number: int) -> str:
    """A line that asks `recorder`."""
    body = {"inputs": {"x": [[number, 0, 0, 0]]}}
    return json.dumps({"custom_id": f"n{number}", "method": "POST", "url": PREDICT, "body": body})


def create(openai: Any, lines: Sequence[str], endpoint: str = EMBEDDINGS, window: str = "24h", **fields: Any) -> Any:
    """A batch of lines."""
    file = openai.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    return openai.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **fields)


def ended(openai: Any, batch_id: str) -> Any:
    """The batch, once it has ended."""

    def found() -> Any:
        batch = openai.batches.retrieve(batch_id)
        return batch if batch.status in ENDED else None

    return wait_until(found, 60, "the batch has ended")


def answers(openai: Any, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of a file by custom_id, each of which it has once."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in openai.files.content(file_id).text.splitlines()]
    found = {entry["custom_id"]: entry for entry in lines}
    assert len(found) == len(lines)
    return found


def test_every_line_ends_in_one_of_two_files(openai: Any):
    """300 lines, some of them wrong in their own way: those fail with a reason, the others have their vectors."""
    good = {f"line-{number}": f"text {number}" for number in range(290)}
    bad = {
        "url": line("url", url="/v1/chat/completions"),
        "method": line("method", method="GET"),
        "model": line("model", model="nothing"),
        "empty": line("empty", ""),
        "field": line("field", encoding_format="hex"),
        "body": '{"custom_id": "body", "method": "POST", "url": "/v1/embeddings"}',
        "cut": '{"custom_id": "cut", "method": "POST", "url": "/v1/emb',
    }
    lines = [line(name, text) for name, text in good.items()]
    for place, text in enumerate(bad.values()):
        lines.insert(place * 40, text)
    batch = create(openai, [*lines, "", line("short", "ab", encoding_format="base64"), ""], metadata={"who": "test"})
    assert batch.object == "batch"
    assert batch.metadata == {"who": "test"}
    batch = ended(openai, batch.id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (298, 291, 7)
    found = answers(openai, batch.output_file_id)
    assert found.keys() == {*good, "short"}
    for name, text in good.items():
        answer = found[name]
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        vector = answer["response"]["body"]["data"][0]["embedding"]
        assert vector == pytest.approx([byte / 255 for byte in text.encode()[:4]], rel=1e-6)
    in_base64 = base64.b64decode(found["short"]["response"]["body"]["data"][0]["embedding"])
    assert np.frombuffer(in_base64, "<f4") == pytest.approx([byte / 255 for byte in b"ab  "], rel=1e-6)
    failed = answers(openai, batch.error_file_id)
    assert failed.keys() == bad.keys()
    assert all("Expected" in json.dumps(entry) for entry in failed.values())
    for name in ("url", "method", "body", "cut"):
        assert failed[name]["response"] is None
        assert failed[name]["error"]["code"] == "invalid_request"
    assert failed["model"]["response"]["status_code"] == 404
    assert failed["empty"]["response"]["body"]["error"]["type"] == "invalid_request_error"
    assert openai.files.retrieve(batch.output_file_id).purpose == "batch_output"


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([line("a"), line("b"), line("a")], "duplicate_custom_id"),
        ([line("a", "x"), '{"custom_id": "a", "method"'], "duplicate_custom_id"),
        ([" ", "\t"], "empty_file"),
        ([line(str(number)) for number in range(50_001)], "too_many_lines"),
    ],
    ids=["duplicate", "duplicate-of-a-broken-line", "empty", "long"],
)
def test_a_file_that_is_wrong_as_a_whole_fails(openai: Any, lines: list[str], code: str):
    """Before its first line runs, with the number of the line."""
    batch = ended(openai, create(openai, lines).id)
    assert batch.status == "failed"
    assert [error.code for error in batch.errors.data] == [code]
    assert batch.errors.data[0].line == {"duplicate_custom_id": len(lines), "too_many_lines": 50_001}.get(code)
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"endpoint": "/v1/nothing"},
        {"completion_window": "1 day"},
        {"completion_window": "8d"},
        {"metadata": {"k": "v" * 513}},
        {"metadata": {f"k{number}": "v" for number in range(17)}},
        {"input_file_id": 3},
    ],
)
def test_bad_batch_is_422(openai: Any, http: httpx.Client, fields: Mapping[str, Any]):
    """Nothing of it runs."""
    file = openai.files.create(file=("lines.jsonl", line("a").encode()), purpose="batch")
    batch = {"input_file_id": file.id, "endpoint": EMBEDDINGS, "completion_window": "24h"}
    found = http.post("/v1/batches", json={**batch, **fields})
    assert found.status_code == 422
    assert "Expected" in found.json()["error"]["message"]


def test_unknown_batches_and_files_are_404(openai: Any):
    """Also as the input of a batch, and for a cancellation."""
    module = require_module("openai")
    for call in (
        lambda: openai.batches.retrieve("batch_0"),
        lambda: openai.batches.cancel("batch_0"),
        lambda: openai.batches.create(input_file_id="file-0", endpoint=EMBEDDINGS, completion_window="24h"),
    ):
        with pytest.raises(module.NotFoundError):
            call()


def test_batches_are_listed_by_pages(openai: Any):
    """The newest first; the client walks through the pages."""
    made = [create(openai, [line("a")]).id for _ in range(3)]
    listed = [batch.id for batch in openai.batches.list(limit=2)]
    assert listed[:3] == made[::-1]


def test_a_cancelled_batch_keeps_its_answers(stack: GatewayStack, openai: Any):
    """Lines without an answer are in the error file. A batch that has ended cannot be cancelled."""
    lines = [
        json.dumps(
            {
                "custom_id": f"n{number}",
                "method": "POST",
                "url": "/v1/models/napper:predict",
                "body": {"inputs": {"x": [[number, 1, 0, 0]]}},
            }
        )
        for number in range(300)
    ]
    batch = create(openai, lines, "/v1/models/napper:predict")
    wait_until(lambda: openai.batches.retrieve(batch.id).in_progress_at, 60, "the batch runs")
    assert openai.batches.cancel(batch.id).status == "cancelling"
    batch = ended(openai, batch.id)
    assert batch.status == "cancelled"
    assert batch.cancelled_at >= batch.cancelling_at
    found, failed = answers(openai, batch.output_file_id), answers(openai, batch.error_file_id)
    assert found.keys() | failed.keys() == {f"n{number}" for number in range(300)}
    assert not found.keys() & failed.keys()
    assert {entry["error"]["code"] for entry in failed.values()} == {"batch_cancelled"}
    with pytest.raises(require_module("openai").ConflictError):
        openai.batches.cancel(batch.id)


def test_an_expired_batch_ends_without_a_worker(stack: GatewayStack, openai: Any):
    """Its jobs are cancelled, and its lines say why they have no answer."""
    stack.worker.freeze()
    try:
        batch = create(openai, [line(f"n{number}") for number in range(100)], window="2s")
        batch = ended(openai, batch.id)
    finally:
        stack.worker.thaw()
    assert batch.status == "expired"
    failed = answers(openai, batch.error_file_id)
    assert len(failed) + len(answers(openai, batch.output_file_id)) == 100
    assert {entry["error"]["code"] for entry in failed.values()} == {"batch_expired"}


def test_a_full_queue_makes_a_batch_wait(openai: Any, start_gateway: StartGateway, tmp_path: Path):
    """The queue takes 8 jobs at a time; the batch asks again until each line has run."""
    small = start_gateway(
        PENSTOCK_INFERENCE_QUEUE_MAX_DEPTH="8", PENSTOCK_INFERENCE_BATCHES_PATH=str(tmp_path / "files")
    )
    with client_of(small) as client:
        batch = ended(client, create(client, [line(f"n{number}", f"w{number}") for number in range(200)]).id)
        assert batch.status == "completed"
        assert batch.request_counts.completed == 200


@pytest.fixture
def recorded(
    redis_server: RedisServer, start_worker: StartWorker, models_root: Path, tmp_path: Path
) -> Iterator[Callable[..., GatewayProcess]]:
    """Starts gateways of one folder on a server with the model `recorder`; they end with the test."""
    write_recorder(models_root, tmp_path / "forwards", forward_s=0.05)
    # Equal jobs would share a forward, and a line that is submitted twice would not show.
    alone = {"PENSTOCK_INFERENCE_CACHE_ENABLED": "false", "PENSTOCK_INFERENCE_BATCHING_SINGLE_FLIGHT": "false"}
    start_worker(redis_server, models_root, environment=alone)
    started: list[GatewayProcess] = []

    def start(**environment: str) -> GatewayProcess:
        environment = {"PENSTOCK_INFERENCE_BATCHES_PATH": str(tmp_path / "files"), **environment}
        started.append(GatewayProcess(redis_server, tmp_path / f"gateway{len(started)}", environment=environment))
        return started[-1].start()

    yield start
    for gateway in started:
        gateway.stop()


@pytest.fixture
def paying(tmp_path: Path) -> tuple[dict[str, str], ShownKey]:
    """The settings of gateways that ask for keys, and a key with a quota for the day."""
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    made = new_api_key("pays", now=int(time.time()), limits=KeyLimits(requests_per_day=1_000_000))
    SqlApiKeys(url).add(made.key)
    return {"PENSTOCK_REGISTRY_URL": url, "PENSTOCK_INFERENCE_SERVER_API_KEYS": "required"}, made


def test_a_killed_gateway_leaves_its_batch_to_another_one(
    recorded: Callable[..., GatewayProcess],
    redis_server: RedisServer,
    paying: tuple[dict[str, str], ShownKey],
    tmp_path: Path,
):
    """SIGKILL in the middle: the other gateway goes on. Each line ran once, has one answer, and is charged once."""
    count, (settings, made) = 600, paying
    first = recorded(PENSTOCK_INFERENCE_BATCHES_MAX_OUTSTANDING="128", **settings)
    with client_of(first, made.text) as client:
        batch = create(client, [prediction(number) for number in range(count)], PREDICT)
        wait_until(lambda: len(recorded_forwards(tmp_path / "forwards")) >= 12, 60, "the batch runs")
    first.kill()
    assert count > lines_charged(redis_server, made) > 0
    second = recorded(**settings)
    with client_of(second, made.text) as client:
        asked = 0

        def ends() -> Any:
            nonlocal asked
            asked += 1
            found = client.batches.retrieve(batch.id)
            return found if found.status in ENDED else None

        batch = wait_until(ends, 60, "the batch has ended")
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (count, 0)
        found = answers(client, batch.output_file_id)
    assert found.keys() == {f"n{number}" for number in range(count)}
    ran = [row for rows in recorded_forwards(tmp_path / "forwards") for row in rows]
    # The warm-up runs zeros.
    assert sorted(row for row in ran if row) == [float(number) for number in range(1, count)]
    # The file and the batch, each look at it, and the answers.
    assert lines_charged(redis_server, made) == 2 + asked + 1 + count
    assert jobs_used(redis_server, made) == count


def test_a_batch_outlives_a_restart_of_the_broker(
    recorded: Callable[..., GatewayProcess],
    redis_server: RedisServer,
    paying: tuple[dict[str, str], ShownKey],
    tmp_path: Path,
):
    """It waits while the broker is away. Each line has one answer and is charged once, as if nothing had happened."""
    count, (settings, made) = 400, paying
    gateway = recorded(PENSTOCK_INFERENCE_BATCHES_MAX_OUTSTANDING="64", **settings)
    unavailable = require_module("openai").InternalServerError
    with client_of(gateway, made.text) as client, redis_server.client() as redis:
        # All that was answered is on the disk: what follows counts exactly.
        redis.config_set("appendfsync", "always")
        batch = create(client, [prediction(number) for number in range(count)], PREDICT)
        wait_until(lambda: len(recorded_forwards(tmp_path / "forwards")) >= 8, 60, "the batch runs")
        redis_server.kill()
        with pytest.raises(unavailable, match="broker"):
            client.batches.retrieve(batch.id)
        redis_server.start()
        asked = 0

        def ends() -> Any:
            nonlocal asked
            try:
                found = client.batches.retrieve(batch.id)
            except unavailable:
                # Its limits cannot be read before the gateway has connected again.
                return None
            asked += 1
            return found if found.status in ENDED else None

        batch = wait_until(ends, 60, "the batch has ended")
        assert (batch.request_counts.completed, batch.request_counts.failed) == (count, 0)
        assert answers(client, batch.output_file_id).keys() == {f"n{number}" for number in range(count)}
    assert lines_charged(redis_server, made) == 2 + asked + 1 + count
    assert jobs_used(redis_server, made) == count


def lines_charged(server: RedisServer, made: ShownKey) -> int:
    """What the key has spent of its day."""
    with server.client() as redis:
        return int(redis.hget(meter_key(f"key:{made.key.id}", "day"), "sum") or 0)


def jobs_used(server: RedisServer, made: ShownKey) -> int:
    """The jobs in the usage of the key."""
    with closing(RedisStreams.from_url(server.url)) as broker:
        (found,) = [used for (account, _), used in broker.usage("recorder").items() if account == made.key.id]
    return found.jobs


@pytest.mark.slow
def test_outstanding_jobs_of_a_batch_are_bounded(recorded: Callable[..., GatewayProcess], redis_server: RedisServer):
    """While the batch runs, the queue never holds more jobs than the setting allows."""
    gateway = recorded(PENSTOCK_INFERENCE_BATCHES_MAX_OUTSTANDING="10")
    most = 0
    with client_of(gateway) as client, redis_server.client() as redis:
        batch = create(client, [prediction(number) for number in range(100)], PREDICT)

        def has_ended() -> bool:
            nonlocal most
            most = max(most, redis.xlen("infer.{recorder}.low"))
            return client.batches.retrieve(batch.id).status in ENDED

        wait_until(has_ended, 60, "the batch has ended")
    assert 0 < most <= 10
