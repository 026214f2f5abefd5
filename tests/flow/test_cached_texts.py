"""CF-052: a text that was written once is found in the cache: of another server, and of an engine of the worker."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from click.testing import CliRunner

from penstock import Client, JobHandle, ModelError
from penstock.compose.cli import main
from penstock.registry.api_keys import new_api_key
from penstock.registry.broker.base import Usage
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.catalog.api_keys import SqlApiKeys
from penstock.registry.data_keys import new_data_key
from penstock.registry.sampling_params import SamplingParams
from penstock.registry.settings import Settings
from penstock.safety.operator_key import OperatorKey
from tests.flow.conftest import Samples, amend
from tests.gateway_process import GatewayProcess
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require, wait_until
from tests.workers.generation.packages import write_relay, write_writer
from tests.workers.generation.text_servers import Asked, Reply, TextServer, chat_event, event, usage

PATIENCE_S = 180.0
GREEDY: dict[str, Any] = {"max_tokens": 20, "temperature": 0}
SEEDED: dict[str, Any] = {"max_tokens": 20, "temperature": 0.9, "seed": 7}
MODELS = ["relay", "uncached", "varying", "writer"]
DONE = "[DONE]"


class Upstream(TextServer):
    """A text server that never writes a text twice. A prompt may ask for an error, or for silence behind a word."""

    def __init__(self) -> None:
        super().__init__(self._reply)

    def hits(self, prompt: str) -> int:
        """How many requests had this prompt."""
        return [_prompt(one) for one in self.asked].count(prompt)

    def _reply(self, asked: Asked) -> Reply:
        prompt = _prompt(asked)
        number = self.hits(prompt)
        if "broken" in prompt and number == 1:
            return Reply(status=500, body="no")
        if "silent" in prompt and number == 1:
            return Reply([event("begun ")], hangs=True)
        if "halting" in prompt and number == 2:
            return Reply([event("text ")], hangs=True)
        text = f"text {number} of größe"
        if asked.path.endswith("/chat/completions"):
            call = {"index": 0, "id": "x", "function": {"name": "weather", "arguments": "{}"}}
            calls = [chat_event(tool_calls=[call])] if "tools" in asked.body else []
            pieces = [chat_event(role="assistant", content=text), *calls, chat_event("tool_calls" if calls else "stop")]
        else:
            indices = range(asked.body.get("n", 1))
            pieces = [piece for index in indices for piece in (event(text[:4], index=index), _last(text, index))]
        return Reply([*pieces, usage(3, 5, 1), DONE])


def _prompt(asked: Asked) -> str:
    return str(asked.body["prompt"] if "prompt" in asked.body else asked.body["messages"][-1]["content"])


def _last(text: str, index: int) -> str:
    return event(text[4:], "stop", index)


class Seen(NamedTuple):
    """What a caller and a subscriber have of one job."""

    kinds: list[str]
    """Of the events; chunks in a row are one. Whether a short job is seen to start is a matter of time."""
    text: str
    token_ids: list[int]
    logprobs: list[Any]
    """The three of the chunks together."""
    result: Mapping[str, Any]
    is_cached: bool


class Stage(NamedTuple):
    """A broker, the server behind the packages without weights, and one worker."""

    server: RedisServer
    upstream: Upstream
    root: Path
    folder: Path
    worker: WorkerProcess
    operator_key: Path

    def worker_for(self, name: str, model: str, **environment: str) -> WorkerProcess:
        """A further worker, which is not started yet. Its home stays."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return WorkerProcess(
            self.server, self.root, folder, name=f"{name}@test", models=[model], environment=environment
        )


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("texts")
    root, home = folder / "models", folder / "worker"
    home.mkdir()
    operator = OperatorKey.generate(folder / "operator.pem")
    with ExitStack() as ends:
        upstream = ends.enter_context(Upstream())
        server = RedisServer(require(next(iter(redis_binaries().values()), None), "redis-server")).start()
        ends.callback(server.stop)
        for name in ("relay", "narrow", "shelved"):
            write_relay(root, name, has_cache=True, runtime_url=upstream.url)
        write_relay(root, "relay", "2", has_cache=True, runtime_url=upstream.url, runtime_model="other")
        write_relay(root, "uncached", runtime_url=upstream.url)
        write_relay(root, "varying", has_cache=True, runtime_url=upstream.url)
        amend(root / "varying" / "1", deterministic=False)
        write_writer(root, has_cache=True)
        environment = {"PENSTOCK_OPERATOR_PUBLIC_KEYS": operator.public_text}
        worker = WorkerProcess(server, root, home, name="texts@test", models=MODELS, environment=environment)
        ends.callback(worker.stop)
        yield Stage(server, upstream, root, folder, worker.start(), folder / "operator.pem")


@pytest.fixture
def client(stage: Stage) -> Iterator[Client]:
    with Client(stage.server.url) as client:
        yield client


def end(worker: WorkerProcess) -> None:
    """As an operator ends it: what it keeps on disk is written, and it leaves no report."""
    try:
        worker.terminate()
        worker.wait(PATIENCE_S)
    finally:
        worker.stop()


def ask(client: Client, model: str, inputs: Any, options: Mapping[str, Any] = GREEDY, **how: Any) -> Seen:
    """Submit a job and read it in both ways."""
    inputs = {"prompt": inputs} if isinstance(inputs, str) else inputs
    return read(client.submit(model, inputs, options=SamplingParams(**options), **how))


def read(job: JobHandle) -> Seen:
    """The events of a job, and its result."""
    kinds, text, token_ids, logprobs = list[str](), "", list[int](), list[Any]()
    for one in job.stream(timeout=PATIENCE_S):
        if one.type != "started" and (one.type != "chunk" or kinds[-1:] != ["chunk"]):
            kinds.append(one.type)
        if one.type == "chunk":
            text += str(one.data["text"])
            token_ids += one.data["token_ids"].tolist()
            logprobs += json.loads(str(one.data["logprobs"])) if "logprobs" in one.data else []
    result = {name: values.tolist() for name, values in job.result(PATIENCE_S).items()}
    return Seen(kinds, text, token_ids, logprobs, result, job.info(PATIENCE_S).is_cached)


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", ["prompt", "chat", "tools"])
def test_an_equal_text_asks_the_server_once(client: Client, stage: Stage, kind: str, options: dict[str, Any]):
    """The result and the stream are those of the first job: text, usage, message and ends."""
    prompt = f"once, as a {kind} {options['temperature']}"
    inputs: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
    inputs = {"prompt": prompt} if kind == "prompt" else inputs | ({"tools": TOOLS} if kind == "tools" else {})
    first, second = (ask(client, "relay", inputs, options) for _ in range(2))
    assert (first.is_cached, second.is_cached) == (False, True)
    assert second == first._replace(is_cached=True)
    assert "chunk" in first.kinds
    assert first.text == first.result["text"][0] == "text 1 of größe"
    assert first.result["usage"] == [3, 5, 1]
    assert first.result["finish_reason"] == ["tool_calls" if kind == "tools" else "stop"]
    assert stage.upstream.hits(prompt) == 1


def test_several_texts_are_found_together(client: Client, stage: Stage):
    """With a seed. As in the first job, they come at the end."""
    first, second = (ask(client, "relay", "several", SEEDED | {"n": 2}) for _ in range(2))
    assert first.kinds == ["queued", "completed"]
    assert second == first._replace(is_cached=True)
    assert len(first.result["text"]) == 2
    assert stage.upstream.hits("several") == 1


@pytest.mark.parametrize("options", [{"temperature": 0.9}, {}], ids=["temperature", "defaults"])
def test_a_sampled_text_without_a_seed_is_written_each_time(client: Client, stage: Stage, options: dict[str, Any]):
    """Its caller wants another one."""
    prompt = f"sampled {options}"
    texts = [ask(client, "relay", prompt, options).text for _ in range(3)]
    assert texts == [f"text {number} of größe" for number in (1, 2, 3)]
    assert stage.upstream.hits(prompt) == 3


def test_other_requests_do_not_share_a_text(client: Client, stage: Stage):
    """Another option, tenant or version is another question; each finds its own text afterwards."""
    asked: list[dict[str, Any]] = [
        {},
        {"options": GREEDY | {"max_tokens": 21}},
        {"options": GREEDY | {"stop": ["x"]}},
        {"options": GREEDY | {"seed": 1}},
        {"options": SEEDED},
        {"options": SEEDED | {"seed": 8}},
        {"tenant": "umbrella"},
        {"version": "1"},
    ]
    first = [ask(client, "relay", "shared by none", **how) for how in asked]
    again = [ask(client, "relay", "shared by none", **how) for how in asked]
    assert [one.is_cached for one in first] == [False] * len(asked)
    assert again == [one._replace(is_cached=True) for one in first]
    assert len({one.text for one in first}) == len(asked) == stage.upstream.hits("shared by none")


def test_a_job_that_asks_for_some_outputs_is_written(client: Client, stage: Stage):
    """A stream needs all of them, so such a job has no part in the cache."""
    for _ in range(2):
        found = ask(client, "relay", "some outputs", outputs=["text"])
        assert found.text == found.result["text"][0]
        assert not found.is_cached
    assert stage.upstream.hits("some outputs") == 2


def test_what_is_no_whole_text_is_not_kept(client: Client, stage: Stage):
    """Errors of the server, texts that ended for want of time, and cancelled jobs: the next job asks again."""
    with pytest.raises(ModelError, match="answered 500"):
        client.submit("relay", {"prompt": "broken"}, options=GREEDY).result(PATIENCE_S)
    late = ask(client, "relay", "silent and late", GREEDY | {"timeout_s": 0.5})
    assert late.result["finish_reason"] == ["timeout"]
    job = client.submit("relay", {"prompt": "silent and cancelled"}, options=GREEDY)
    assert any(one.type == "chunk" for one in job.stream(timeout=PATIENCE_S))
    job.cancel()
    assert read_kinds(job)[-1] == "cancelled"
    for prompt, options in (
        ("broken", GREEDY),
        ("silent and late", GREEDY | {"timeout_s": 0.5}),
        ("silent and cancelled", GREEDY),
    ):
        assert not ask(client, "relay", prompt, options).is_cached
        assert stage.upstream.hits(prompt) == 2


def read_kinds(job: JobHandle) -> list[str]:
    """The types of all events."""
    return [one.type for one in job.stream(timeout=PATIENCE_S)]


@pytest.mark.parametrize("model", ["uncached", "varying"])
def test_a_package_may_have_each_text_written(client: Client, stage: Stage, model: str):
    """With `cache_ttl_s: 0` or `deterministic: false`."""
    found = [ask(client, model, f"by {model}") for _ in range(2)]
    assert [one.is_cached for one in found] == [False, False]
    assert stage.upstream.hits(f"by {model}") == 2


def test_the_least_recently_used_text_leaves(client: Client, stage: Stage):
    """`cache.l1_size` bounds the texts in the memory of a worker."""
    worker = stage.worker_for("narrow", "narrow", PENSTOCK_INFERENCE_CACHE_L1_SIZE="2").start()
    try:
        for prompt in ("a", "b", "a", "c"):
            ask(client, "narrow", prompt)
        # `b` was used before `a`, and left for `c`.
        assert [ask(client, "narrow", prompt).is_cached for prompt in ("a", "c", "b")] == [True, True, False]
        assert [stage.upstream.hits(prompt) for prompt in "abc"] == [1, 2, 1]
    finally:
        end(worker)


def keeping_on_disk(stage: Stage) -> tuple[dict[str, str], Settings]:
    """The variables of a worker in the mode `persisted_encrypted`, and the settings of its clients."""
    key = new_data_key()
    environment = {
        "PENSTOCK_INFERENCE_CACHE_PRIVACY_MODE": "persisted_encrypted",
        "PENSTOCK_L2_ENCRYPTION_KEY": key,
        "PENSTOCK_INFERENCE_CACHE_LOOKUP_TIMEOUT_MS": "30000",
    }
    overrides = {"cache.privacy_mode": "persisted_encrypted", "l2_encryption_key": key}
    return environment, Settings.load(environ={}, cwd=stage.folder, overrides=overrides)


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "stops"])
def test_a_found_text_continues_that_of_another_worker(stage: Stage, dies: bool):
    """It ended in the midst of its text. A client of a stream has the beginning: no reset, and nothing twice."""
    environment, settings = keeping_on_disk(stage)
    prompt, name = f"halting {dies}", f"keeper-{dies}"
    with Client(stage.server.url, settings=settings) as client:
        keeper = stage.worker_for(name, "shelved", **environment).start()
        try:
            first = ask(client, "shelved", prompt)
        finally:
            end(keeper)
        writer = stage.worker_for(f"writer-{dies}", "shelved", **environment).start()
        try:
            job = client.submit("shelved", {"prompt": prompt}, options=SamplingParams(**GREEDY))
            assert any(one.type == "chunk" for one in job.stream(timeout=PATIENCE_S))
        finally:
            (writer.kill if dies else partial(end, writer))()
        keeper = stage.worker_for(name, "shelved", **environment).start()
        try:
            found = read(job)
        finally:
            end(keeper)
    assert (found.text, found.result) == (first.text, first.result)
    assert found.is_cached
    assert "reset" not in found.kinds
    assert stage.upstream.hits(prompt) == 2


def test_a_text_outlives_its_worker_on_disk(stage: Stage):
    """In the mode `persisted_encrypted`. The next worker sends the text in a chunk, too."""
    environment, settings = keeping_on_disk(stage)
    worker = stage.worker_for("shelf", "shelved", **environment).start()
    with Client(stage.server.url, settings=settings) as client:
        try:
            first = ask(client, "shelved", "kept on disk")
        finally:
            end(worker)
        worker = stage.worker_for("shelf", "shelved", **environment).start()
        try:
            assert ask(client, "shelved", "kept on disk") == first._replace(is_cached=True)
            assert stage.upstream.hits("kept on disk") == 1
        finally:
            end(worker)


def test_an_operator_clears_the_texts(client: Client, stage: Stage):
    """`penstock cache clear --fleet` voids them."""
    assert [ask(client, "relay", "cleared").is_cached for _ in range(2)] == [False, True]
    environment = {
        "PENSTOCK_HOME": str(stage.folder / "worker" / "home"),
        "PENSTOCK_OPERATOR_KEY_FILE": str(stage.operator_key),
        "PENSTOCK_REDIS_URL": stage.server.url,
        "PENSTOCK_CELERY_URL": stage.server.celery_url,
    }
    cleared = CliRunner().invoke(main, ["cache", "clear", "--yes", "--fleet"], env=environment)
    assert cleared.exit_code == 0, cleared.output
    assert not ask(client, "relay", "cleared").is_cached
    assert stage.upstream.hits("cleared") == 2


def test_an_engine_writes_equal_texts_once(client: Client, stage: Stage):
    """Greedy with log probabilities, seeded, and several with a seed: no further token is computed."""
    wishes: list[dict[str, Any]] = [GREEDY | {"logprobs": 2}, SEEDED, SEEDED | {"n": 2}]
    first = [ask(client, "writer", "größe", options) for options in wishes]

    def tokens() -> float:
        return Samples(stage.worker).total("penstock_tokens_total", model_name="writer", kind="generated")

    written = sum(one.result["usage"][1] for one in first)
    wait_until(lambda: tokens() >= written, PATIENCE_S, "the tokens are counted")
    before = tokens()
    again = [ask(client, "writer", "größe", options) for options in wishes]
    assert again == [one._replace(is_cached=True) for one in first]
    assert ["chunk" in one.kinds for one in again] == [True, True, False]
    assert first[0].token_ids == first[0].result["token_ids"][0]
    assert len(first[0].logprobs) == len(first[0].token_ids) > 0
    unseeded = [ask(client, "writer", "größe", {"max_tokens": 20, "ignore_eos": True}) for _ in range(2)]
    assert not any(one.is_cached for one in unseeded)
    wait_until(lambda: tokens() >= before + 40, PATIENCE_S, "the tokens of the sampled texts are counted")
    assert tokens() == before + 40


def test_clients_of_the_gateway_read_a_found_text_like_a_written_one(stage: Stage):
    """By OpenAI's routes, whole, as a stream and resumed; by the events of the job; and in the usage of the key."""
    url = f"sqlite:///{stage.folder / 'registry.db'}"
    environment = {"PENSTOCK_REGISTRY_URL": url, "PENSTOCK_INFERENCE_SERVER_API_KEYS": "required"}
    made = new_api_key("reader", now=int(time.time()))
    SqlApiKeys(url).add(made.key)
    gateway = GatewayProcess(stage.server, stage.folder / "gateway", environment=environment).start()
    try:
        with gateway.client() as http:
            http.headers["Authorization"] = f"Bearer {made.text}"
            wait_until(lambda: http.get("/v1/models").status_code != 401, PATIENCE_S, "the gateway knows the key")
            _read_through(http)
    finally:
        gateway.stop()
    assert stage.upstream.hits("through the gateway") == 1
    assert stage.upstream.hits("response") == 1
    with closing(RedisStreams.from_url(stage.server.url)) as broker:
        found = [used for (account, _), used in broker.usage("relay").items() if account == made.key.id]
    # Five jobs of 3 + 5 tokens: a key pays for a found text as for a written one.
    assert found == [Usage(5, 15, 25)]


def _read_through(http: httpx.Client) -> None:
    wish = {"model": "relay", "prompt": "through the gateway", **GREEDY}
    first, second = (http.post("/v1/completions", json=wish) for _ in range(2))
    for name in ("choices", "usage"):
        assert first.json()[name] == second.json()[name], first.text
    streamed = _events(http.post("/v1/completions", json={**wish, "stream": True}).text)
    text = "".join(choice["text"] for one in streamed for choice in one["choices"])
    assert text == first.json()["choices"][0]["text"] == "text 1 of größe"
    job_id = second.headers["penstock-job-id"]
    told = http.get(f"/v1/jobs/{job_id}/events").text
    assert told.count("event: chunk") == 1
    assert told.count("event: completed") == 1
    response = {"model": "relay", "input": "response", "temperature": 0, "max_output_tokens": 20}
    for _ in range(2):
        made = http.post("/v1/responses", json={**response, "background": True, "stream": True})
        whole = _events(made.text)
        deltas = "".join(one["delta"] for one in whole if one["type"] == "response.output_text.delta")
        assert deltas == "text 1 of größe"
    name = whole[0]["response"]["id"]
    at = next(number for number, one in enumerate(whole) if one["type"] == "response.output_text.delta")
    rest = http.get(f"/v1/responses/{name}", params={"stream": "true", "starting_after": str(at - 1)})
    assert _events(rest.text)[0]["delta"] == whole[at]["delta"]


def _events(body: str) -> list[dict[str, Any]]:
    """The events of a stream of OpenAI's routes."""
    found = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [json.loads(one) for one in found if one != DONE]
