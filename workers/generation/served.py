"""Packages of format `generate`: decoders of transformers that write text, batched continuously.

    job, on its model thread: inputs -> Wish -> Backend --> the whole text
                                                 '--> chunks: text, token_ids

The backend is an engine of this process, or another server. Each running job has a model thread that waits for its
end; of an engine, one thread computes the steps of all. A job whose events were delivered in part by another worker
continues behind them.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import numpy as np

from penstock.registry.errors import ConfigurationError, InputRefused, InvalidInput, ModelError, NonFiniteOutput
from penstock.registry.generation_inputs import read_chat, read_params, with_limit
from penstock.registry.package import ModelSpec, Package
from penstock.registry.package.generation import MESSAGES, PROMPT, TOKEN_IDS, example_inputs
from penstock.registry.package.manifest import Manifest
from penstock.registry.queues import PriorityName
from penstock.registry.sampling_params import SamplingParams
from penstock.registry.tensors import Array
from penstock.safety.orchestrator import SafetyOrchestrator, Subject
from penstock.workers.generation.acceleration_gate import AccelerationGate
from penstock.workers.generation.backend import Backend, Delivered, Wish
from penstock.workers.generation.chat import ChatPrompt, check_template
from penstock.workers.generation.chunks import BEGUN, CONTENT, beginning, chunk_of
from penstock.workers.generation.prompts import Prompt, TooManyTokens
from penstock.workers.observe.metrics import GenerationFigures
from penstock.workers.runtime.base import DeadlinePassed, Prepared, StreamContext, TooLongHere
from penstock.workers.runtime.loading import LoadOptions, NullContext, PackageRuntime

if TYPE_CHECKING:
    from penstock.workers.generation.outputs import ChatMessage, RequestOutput
    from penstock.workers.generation.runner import EngineRunner

__all__ = ["GenerateRuntime", "ResumableContext"]

_LOOK_S: Final = 0.5
"""A job that gets no output looks so often whether it was cancelled, or its deadline has passed."""
_PRECISIONS: Final = {"auto": "fp32", "fp32": "fp32", "bf16": "bf16"}


@runtime_checkable
class ResumableContext(StreamContext, Protocol):
    """The context of a job that can go on where another worker stopped."""

    @property
    def priority(self) -> PriorityName:
        """The priority of the job."""

    @property
    def now_ms(self) -> int:
        """Milliseconds by a clock that all workers share."""

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline of the job; None: it has none."""

    def together(self) -> AbstractContextManager[None]:
        """Inside of it, the chunks of all jobs wait for one write at its end."""

    def chunk(self, values: Mapping[str, Array], /) -> None:
        """Sends values to subscribers."""

    def alive(self) -> None:
        """Shows progress without an event."""

    def earlier_chunks(self) -> list[dict[str, Array]] | None:
        """The chunks that an earlier run of the job has delivered; None: none, or not all of them are known."""

    def resume(self) -> None:
        """The events to come continue those of the earlier run."""


class GenerateRuntime(PackageRuntime):
    """Runs a decoder in an engine of its own, or has its texts written by another server."""

    def __init__(
        self,
        package: Package,
        options: LoadOptions | None = None,
        cache_dir: Path | None = None,
        gate: SafetyOrchestrator | None = None,
    ) -> None:
        """cache_dir: of the engine, see Config. gate: see AccelerationGate."""
        super().__init__(package, options)
        self._cache_dir: Final = cache_dir
        self._gate: Final = gate
        self._backend: Backend | None = None
        self._runner: EngineRunner | None = None
        """The backend that is an engine of this process."""
        self._free_memory: Callable[[], None] = lambda: None

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        """One job."""
        (inputs,) = jobs
        return Prepared(1, inputs)

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """The outputs of a job, without its chunks."""
        steps = self.stream(prepared.payload, NullContext())
        try:
            while True:
                next(steps)
        except StopIteration as end:
            outputs: dict[str, Array] = end.value
            return outputs

    def stream(
        self, inputs: Mapping[str, Array], context: StreamContext
    ) -> Generator[dict[str, Array], None, dict[str, Array]]:
        """Nothing, then the whole text: chunks with new text and tokens go to the context from another thread.

        Raises NonFiniteOutput where logits are not finite, and TooLongHere for more tokens than have room.
        """
        backend = self._loaded
        try:
            params, prompt = read_params(inputs), self._prompt(inputs)
            wish = Wish(context.job_id or _WARM_UP, prompt, _seeded(params, context.job_id), tenant=context.tenant)
            if isinstance(context, ResumableContext):
                wish = replace(wish, priority=context.priority)
            # Several texts come at the end, and a worker that takes their job over writes them anew.
            if isinstance(context, ResumableContext) and params.num_candidates == 1:
                delivered = self._delivered(context, params)
                sink = _Sink(context, params, beginning(self.content_hash, context.now_ms))
                wish = replace(wish, delivered=delivered, resume=sink.resume, sink=sink, together=context.together)
        except InvalidInput as error:
            raise InputRefused(str(error)) from None
        try:
            output = yield from _whole(backend, wish, context)
            return {} if output is None else self._answer(output, prompt, context.job_id)
        except TooManyTokens as error:
            raise TooLongHere(str(error), error.num_tokens) from None
        except InvalidInput as error:
            raise InputRefused(str(error)) from None

    def take_figures(self) -> GenerationFigures | None:
        """The figures of the engine, with the times since the last call; None until it is loaded."""
        return None if self._backend is None else self._backend.take_figures()

    @property
    def room(self) -> int | None:
        """For how many jobs the pages of its engine have room at a time; None: there is no engine. For any thread."""
        runner = self._runner
        return None if runner is None else runner.room

    @property
    def most_tokens(self) -> int | None:
        """Of a prompt and its text, as many as the loaded engine has room for; None: it is not known."""
        return None if self._backend is None else self._backend.most_tokens

    def announced(self, most: int = 0) -> ModelSpec:
        """The spec for those who submit jobs, with the most tokens for which an engine has room.

        most: of all workers; 0: this engine counts.
        """
        own = self.most_tokens
        return self.spec if own is None else with_limit(self.spec, most or own)

    @property
    def _loaded(self) -> Backend:
        if self._backend is None:
            raise self._not_loaded()
        return self._backend

    def _build(self, manifest: Manifest, device: str, threads: int) -> int:
        options = self.spec.generate
        if options is not None and options.runtime_url is not None:
            # Other packages need no HTTP client.
            from penstock.workers.generation.server_backend import ServerBackend

            try:
                self._backend = ServerBackend(options, self.spec.name, self._options.runtime_hosts, os.environ)
            except ConfigurationError as error:
                raise ConfigurationError(f"{self.spec.reference}: {error}") from None
            return 0
        return self._build_engine(manifest, device, threads)

    def _warm_up(self) -> None:
        # A server that is away is no reason against a version: its jobs wait for it.
        options = self.spec.generate
        if options is None or options.runtime_url is None:
            super()._warm_up()

    def _build_engine(self, manifest: Manifest, device: str, threads: int) -> int:
        import torch

        from penstock.workers.generation.config import Config
        from penstock.workers.generation.engine import Engine
        from penstock.workers.generation.runner import EngineRunner

        spec = self.spec
        if spec.generate is None:
            raise ConfigurationError(f"{spec.reference}: generate: missing, expected the options of an engine")
        precision = _PRECISIONS.get(self.precision)
        if precision is None:
            raise ConfigurationError(f"{spec.reference}: precision: found {self.precision}, expected fp32 or bf16")
        placed = {"precision": precision, "device": device, "cache_dir": self._cache_dir}
        options = {**spec.generate.engine_options(), **placed}
        gate = AccelerationGate(self._gate, Subject(spec.name, spec.version, manifest.content_hash))
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            engine = Engine.from_pretrained(self._package.source_folder(), Config.from_options(options), gate=gate)
            check_template(engine.decoder.tokenizer, spec.generate.chat_template)
        except ConfigurationError as error:
            raise type(error)(f"{spec.reference}: {error}") from None
        finally:
            torch.set_num_threads(before)
        self._backend = self._runner = EngineRunner(engine, partial(_set_threads, threads))
        self._free_memory = engine.decoder.device.release_memory
        weights = sum(one.numel() * one.element_size() for one in engine.decoder.model.parameters())
        return int(weights + engine.packing.expected_nbytes + engine.forwards.pools_nbytes)

    def _release(self) -> None:
        backend, self._backend, self._runner = self._backend, None, None
        if backend is not None:
            backend.stop()
            # Its tensors must be gone before their memory can be given back.
            del backend
            self._free_memory()

    def _prompt(self, inputs: Mapping[str, Array]) -> Prompt | ChatPrompt:
        if (chat := read_chat(inputs)) is not None:
            options = self.spec.generate
            own = (None, None) if options is None else (options.chat_template, options.tool_parser)
            return ChatPrompt(*chat, *own)
        if (text := inputs.get(PROMPT)) is not None:
            return str(text[0])
        if (tokens := inputs.get(TOKEN_IDS)) is not None:
            ids: list[int] = tokens[0].tolist()
            return ids
        raise InvalidInput(f"Found no prompt. Expected one of the inputs {PROMPT}, {TOKEN_IDS} and {MESSAGES}")

    def _example(self, rows: int, length: int) -> dict[str, Array]:
        """See example_inputs: it has no free dimension."""
        return example_inputs()

    def _answer(self, output: RequestOutput, prompt: Prompt | ChatPrompt, job_id: str) -> dict[str, Array]:
        choices = output.outputs
        messages, reasons = [""] * len(choices), [str(one.finish_reason) for one in choices]
        if isinstance(prompt, ChatPrompt):
            found = self._loaded.messages(output, prompt)
            messages = [_message_json(one, f"{job_id}{index}") for index, one in enumerate(found)]
            reasons = [str(one.finish_reason) for one in found]
        if any(one.finish_reason == "error" for one in choices):
            raise NonFiniteOutput("The logits contain NaN or infinity. Expected finite numbers")
        longest = max(len(one.token_ids) for one in choices)
        tokens = np.full((len(choices), longest), -1, np.int64)
        for row, one in enumerate(choices):
            tokens[row, : len(one.token_ids)] = one.token_ids
        usage = output.usage
        return {
            "text": np.array([one.text for one in choices], object),
            "token_ids": tokens,
            "finish_reason": np.array(reasons, object),
            "usage": np.array([usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens], np.int64),
            "logprobs": np.array([_logprobs_text(one.logprobs) for one in choices], object),
            "message": np.array(messages, object),
            "prompt_logprobs": np.array([_logprobs_text(output.prompt_logprobs)], object),
        }

    def _delivered(self, context: ResumableContext, params: SamplingParams) -> Delivered | None:
        """What an earlier run has delivered."""
        chunks = context.earlier_chunks()
        if not chunks or CONTENT not in chunks[0] or str(chunks[0][CONTENT]) != self.content_hash:
            return None
        try:
            tokens = [int(token) for chunk in chunks for token in chunk["token_ids"].tolist()]
            text = "".join(str(chunk["text"]) for chunk in chunks)
            logprobs = [one for chunk in chunks for one in _read_logprobs(chunk)] if params.logprobs is not None else []
            elapsed_s = max(0, context.now_ms - int(chunks[0][BEGUN])) / 1000
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ModelError("The delivered events are not those of a text. Expected chunks of text") from error
        return Delivered(tokens, text, logprobs, elapsed_s)


_WARM_UP: Final = "warm-up"


class _Sink:
    """Sends the outputs of one request as chunks."""

    def __init__(self, context: ResumableContext, params: SamplingParams, begins_with: Mapping[str, Array]) -> None:
        self._context = context
        self._has_logprobs = params.logprobs is not None
        self._begins_with = begins_with

    def resume(self) -> None:
        """The outputs to come continue the chunks of an earlier run."""
        self._begins_with = {}
        self._context.resume()

    def __call__(self, output: RequestOutput) -> bool:
        if self._context.is_cancelled:
            return True
        if output.delta_text or output.delta_token_ids:
            chunk = _chunk(output, self._has_logprobs)
            self._context.chunk({**chunk, **self._begins_with})
            self._begins_with = {}
        return False


def _whole(
    backend: Backend, wish: Wish, context: StreamContext
) -> Generator[dict[str, Array], None, RequestOutput | None]:
    """Yields nothing. Returns the last output; None: the job was cancelled. Raises what ended the request.

    Raises DeadlinePassed once the deadline of the job has passed.
    """
    if isinstance(context, ResumableContext):
        wish = replace(wish, left_s=context.left_s)
    answer, turns = backend.open(wish), -1
    try:
        yield from ()
        while (output := answer.next(_LOOK_S)) is None or not output.finished:
            if context.is_cancelled:
                return None
            if isinstance(context, ResumableContext) and (context.left_s or 0.0) < -_LOOK_S:
                # An engine ends its requests itself, before its next step.
                raise DeadlinePassed(has_begun=True)
            # A backend whose turns stand still hangs, and the limit of the forward counts.
            if isinstance(context, ResumableContext) and backend.turns != turns:
                context.alive()
            turns = backend.turns
        return output
    finally:
        answer.close()


def _message_json(message: ChatMessage, id_stem: str) -> str:
    """A message of the assistant in OpenAI's form. id_stem: what the ids of its calls begin with."""
    calls = [
        {
            "id": f"call_{id_stem}_{index}",
            "type": "function",
            "function": {"name": one.name, "arguments": one.arguments},
        }
        for index, one in enumerate(message.tool_calls)
    ]
    plain: dict[str, Any] = {"role": "assistant", "content": message.content}
    return json.dumps({**plain, "tool_calls": calls} if calls else plain, ensure_ascii=False)


def _seeded(params: SamplingParams, job_id: str) -> SamplingParams:
    """The seed of a job that names none comes from its id: a worker that takes the job over draws the same tokens."""
    if params.seed is not None or not job_id:
        return params
    return replace(params, seed=int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8], "big"))


def _chunk(output: RequestOutput, has_logprobs: bool) -> dict[str, Array]:
    text, tokens, logprobs = output.delta_text, output.delta_token_ids, output.outputs[0].logprobs
    if not has_logprobs or logprobs is None:
        return chunk_of(text, tokens, None)
    return chunk_of(text, tokens, _logprobs_text(logprobs[len(logprobs) - len(tokens) :]))


def _logprobs_text(logprobs: Sequence[Mapping[int, float] | None] | None) -> str:
    if logprobs is None:
        return ""
    return json.dumps([None if at is None else {str(token): value for token, value in at.items()} for at in logprobs])


def _read_logprobs(chunk: Mapping[str, Any]) -> list[dict[int, float]]:
    return [{int(token): float(value) for token, value in at.items()} for at in json.loads(str(chunk["logprobs"]))]


def _set_threads(threads: int) -> None:
    """For a thread that is new to torch: its first use of torch gives it the number of the process."""
    import torch

    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
