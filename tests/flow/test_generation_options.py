"""Options of packages through the queue: servers of each kind, and stop strings behind `min_tokens`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from penstock import Client, InvalidInput
from tests.flow.conftest import read_text
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require
from tests.workers.generation.packages import write_relay, write_writer
from tests.workers.generation.text_dialects import FORM, TEXT, tgi, vllm
from tests.workers.generation.text_servers import TextServer

PATIENCE_S = 180.0
WHOLE = "".join(TEXT)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CHAT = [{"role": "user", "content": "a"}]


class Stage(NamedTuple):
    """A client, and the servers that its worker calls."""

    client: Client
    vllm: TextServer
    tgi: TextServer


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("options")
    root = folder / "models"
    write_writer(root)
    server = RedisServer(require(next(iter(redis_binaries().values()), None), "redis-server")).start()
    with TextServer(vllm()) as of_vllm, TextServer(tgi) as of_tgi, Client(server.url) as client:
        write_relay(root, "by-vllm", runtime_url=of_vllm.url, runtime_kind="vllm")
        write_relay(root, "by-tgi", runtime_url=of_tgi.url, runtime_kind="tgi")
        models = ["writer", "by-vllm", "by-tgi"]
        worker = WorkerProcess(server, root, folder, name="options@test", models=models).start()
        yield Stage(client, of_vllm, of_tgi)
        worker.stop()
    server.stop()


@pytest.mark.parametrize("name", ["by-vllm", "by-tgi"])
@pytest.mark.parametrize("inputs", [{"prompt": "a"}, {"messages": CHAT}], ids=["prompt", "chat"])
def test_server_of_each_kind_writes_and_streams(stage: Stage, name: str, inputs: dict[str, Any]):
    """AR-005, AR-048: its own routes; the stop string is in no chunk, and a form is held."""
    job = stage.client.submit(name, inputs, options={"stop": ["ee."], "seed": 1})
    text, _ = read_text(job)
    result = job.result(PATIENCE_S)
    assert text == result["text"][0] == "one two thr"
    assert result["finish_reason"].tolist() == ["stop"]
    assert result["usage"].tolist()[0] == 3
    assert stage.client.submit(name, inputs).result(PATIENCE_S)["text"][0] == WHOLE
    form = stage.client.submit(name, inputs, options={"json_schema": {"type": "object"}})
    assert form.result(PATIENCE_S)["text"][0] == FORM


@pytest.mark.parametrize(
    ("name", "inputs", "options", "expected"),
    [
        ("by-tgi", {"prompt": "a"}, {"n": 2}, "n: found a value, expected none"),
        ("by-tgi", {"messages": CHAT}, {"logit_bias": {"3": 1}}, "logit_bias: found a value"),
        ("by-tgi", {"prompt_token_ids": [1, 2]}, {}, "prompt_token_ids: found some, expected prompt"),
        ("by-tgi", {"messages": CHAT, "tools": TOOLS}, {"regex": "a"}, "regex: found beside tools"),
        ("by-vllm", {"prompt": "a"}, {"best_of": 2}, "best_of: found a value"),
    ],
)
def test_what_a_server_ignores_is_refused_before_it_is_queued(
    stage: Stage, name: str, inputs: dict[str, Any], options: dict[str, Any], expected: str
):
    """By its name; the server is not asked."""
    asked = len(stage.vllm.asked) + len(stage.tgi.asked)
    with pytest.raises(InvalidInput, match=expected):
        stage.client.submit(name, inputs, options=options)
    assert len(stage.vllm.asked) + len(stage.tgi.asked) == asked


def test_stop_strings_of_a_job_count_behind_min_tokens(stage: Stage):
    """As in an engine alone; the chunks add up to the text."""
    plain: dict[str, Any] = {"max_tokens": 60, "temperature": 0.9, "seed": 3, "ignore_eos": True}
    whole = stage.client.submit("writer", {"prompt": "the stream"}, options=plain).result(PATIENCE_S)["text"][0]
    stop = next(letter for letter in whole if letter.isascii() and whole.count(letter) > 1)
    early = stage.client.submit("writer", {"prompt": "the stream"}, options={**plain, "stop": [stop]}).result(
        PATIENCE_S
    )
    least = early["token_ids"].shape[1]
    job = stage.client.submit(
        "writer", {"prompt": "the stream"}, options={**plain, "stop": [stop], "min_tokens": least}
    )
    text, _ = read_text(job)
    assert text == job.result(PATIENCE_S)["text"][0] == whole[: whole.index(stop, whole.index(stop) + 1)]
