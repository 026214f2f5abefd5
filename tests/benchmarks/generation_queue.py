"""Generation: tokens per second through the queue and the streams, against the same engine alone in a process.

    32 requests of one client, each read as it is written; prompts of 16 to 256 tokens, outputs of mixed lengths, greedy

Engine and worker take turns and have one thread for a step each. The texts are compared token by token. Both sides are
warm: the worker has written the texts once before, and the client is connected.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final

import torch
import yaml

from penstock import AsyncClient
from penstock.registry.package.generation import TOKEN_IDS
from penstock.registry.sampling_params import SamplingParams
from penstock.registry.settings import Settings
from penstock.workers.generation import Engine
from tests.benchmarks import generation_steps, meter
from tests.benchmarks.generation import decoder, workload
from tests.benchmarks.harness import Harness
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale

__all__ = ["measure"]

_MODEL: Final = "writer"
_OPTIONS: Final[dict[str, Any]] = {
    "max_num_seqs": 32,
    "kv_cache_mb": 128,
    "enable_prefix_caching": False,
    # The trials of two processes may differ.
    "packed_linears": "on",
}
_PATIENCE_S: Final = 300.0


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Harness() as harness:
            server, root = harness.redis(), harness.folder()
            folder = _package(root)
            worker = harness.worker(server, _MODEL, models_root=root)
            settings = Settings.load(environ={**harness.settings, "PENSTOCK_REDIS_URL": server.url})
            engine = Engine.from_pretrained(folder, **_OPTIONS)
            turns = []
            for number in range(scale.rounds + 1):
                alone_cpu_s = -time.process_time()
                alone_s, expected = _alone(engine)
                alone_cpu_s += time.process_time()
                used_s = -meter.cpu_seconds(meter.tree(worker.pid))
                queue_s, found = asyncio.run(_through(settings))
                used_s += meter.cpu_seconds(meter.tree(worker.pid))
                if found != expected:
                    raise ValueError("Wrong answers: the worker's tokens are not those of the engine")
                tokens = sum(map(len, found))
                say(
                    f"generation: queue {tokens / queue_s:,.0f}, engine {tokens / alone_s:,.0f} tokens/s; the worker "
                    f"used {used_s:.2f} s of CPU in {queue_s:.2f} s, the engine {alone_cpu_s:.2f}"
                )
                if number:
                    turns.append((tokens / queue_s, tokens / alone_s, tokens / used_s, tokens / alone_cpu_s))
    finally:
        torch.set_num_threads(before)
    ratio = median(turn[0] / turn[1] for turn in turns)
    cpu_ratio = median(turn[2] / turn[3] for turn in turns)
    rates = [median(turn[at] for turn in turns) for at in range(4)]
    return [
        Row(
            "generation, 5M parameters, 32 streams: tokens/s through the queue against the engine alone",
            f"{rates[0]:,.0f} against {rates[1]:,.0f}: {ratio:.2f}x; per CPU second of the process "
            f"{rates[2]:,.0f} against {rates[3]:,.0f}: {cpu_ratio:.2f}x",
            ">= 0.95x",
            ">= 0.98x",
            verdict(required=ratio >= 0.95, aim=ratio >= 0.98),
            {"ratio": ratio, "cpu_ratio": cpu_ratio, "tokens_per_s": rates[0], "tokens_per_s_alone": rates[1]},
        )
    ]


def _package(root: Path) -> Path:
    folder = root / _MODEL / "1"
    folder.mkdir(parents=True)
    decoder().save_pretrained(folder)
    generation_steps.bpe_tokenizer().save_pretrained(folder)
    spec: dict[str, Any] = {"name": _MODEL, "version": "1", "format": "generate"}
    spec["generate"] = {**_OPTIONS, "max_model_len": 1024}
    # Each turn has the same prompts, and the engine is to write them again.
    spec["policy"] = {"default": {"cache_ttl_s": 0}}
    (folder / "model.yaml").write_text(yaml.safe_dump(spec))
    return folder


def _params(most: int) -> SamplingParams:
    return SamplingParams(max_tokens=most, temperature=0)


def _alone(engine: Engine) -> tuple[float, list[list[int]]]:
    work = workload()
    begun = time.perf_counter()
    names = [engine.add_request(None, prompt, _params(most)) for prompt, most in work]
    written: dict[str, list[int]] = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.finished:
                written[output.request_id] = list(output.outputs[0].token_ids)
    return time.perf_counter() - begun, [written[name] for name in names]


async def _through(settings: Settings) -> tuple[float, list[list[int]]]:
    """The seconds from the first submission to the last end, and the tokens of each stream, in order."""
    async with AsyncClient.from_env(settings=settings) as client:

        async def read(prompt: list[int], most: int) -> list[int]:
            job = await client.submit(_MODEL, {TOKEN_IDS: [prompt]}, options=_params(most))
            found: list[int] = []
            async for event in job.stream(timeout=_PATIENCE_S):
                if event.type == "chunk":
                    values: Any = event.data["token_ids"]
                    found += values.tolist()
            return found

        # The first job of a client connects it, and reads the spec.
        await (await client.submit(_MODEL, {TOKEN_IDS: [[1]]}, options=_params(1))).result(timeout=_PATIENCE_S)
        begun = time.perf_counter()
        found = list(await asyncio.gather(*(read(prompt, most) for prompt, most in workload())))
        return time.perf_counter() - begun, found
