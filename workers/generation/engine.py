"""Text generation in one process, without a broker: requests in, texts out, batched continuously.

    add_request, generate, stream -> checks -> scheduler
    step:  plan -> flat batch -> forward -> sample -> record -> texts, ends

    engine = Engine.from_pretrained("folder", max_num_seqs=16)
    engine.generate(["def add(", "def sub("], SamplingParams(max_tokens=32))[0].outputs[0].text

At level DEBUG the logger `penstock.runtime.steps` has a line for each step.

Any thread may call an engine. One lock is held for a step, so at most one thread computes at a time, and each caller
computes steps until its own requests have ended.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, Final

from penstock.registry.chat_messages import Message
from penstock.registry.errors import ConfigurationError, InvalidInput, described, shown
from penstock.registry.queues import Priority, PriorityName
from penstock.registry.sampling_params import SamplingParams
from penstock.safety.orchestrator import Subject
from penstock.workers.generation.acceleration_gate import AccelerationGate
from penstock.workers.generation.accelerations import joined_weights, proof_with_kernel
from penstock.workers.generation.backend import Delivered
from penstock.workers.generation.chat import ChatPrompt, chat_output, parser_of
from penstock.workers.generation.config import Config
from penstock.workers.generation.engine_counts import EngineCounts
from penstock.workers.generation.forwards import Forwards
from penstock.workers.generation.load_records import LoadRecords
from penstock.workers.generation.model import Decoder, load_decoder, wrap_decoder
from penstock.workers.generation.outputs import ChatOutput, EngineStats, FinishReason, RequestOutput
from penstock.workers.generation.packing import Packing
from penstock.workers.generation.pages import PagePool
from penstock.workers.generation.pool_size import pool_pages
from penstock.workers.generation.prefix_cache import PrefixCache
from penstock.workers.generation.probe import Proof, probe
from penstock.workers.generation.prompts import Prompt, PromptReader, TooManyTokens
from penstock.workers.generation.request import GenerationRequest
from penstock.workers.generation.sampler import Sampled, is_free_of_host
from penstock.workers.generation.scheduler import Chunk, Scheduler
from penstock.workers.generation.scheduler import Sequence as Scheduled
from penstock.workers.generation.steps import Steps
from penstock.workers.generation.structure import StructureCompiler
from penstock.workers.generation.text import TextStream
from penstock.workers.generation.text_group import add_siblings, has_news, is_finished, members, output
from penstock.workers.generation.token_rules import token_rules
from penstock.workers.runtime.base import DeadlinePassed
from penstock.workers.runtime.prepacked import PackedFailure
from penstock.workers.runtime.torch_device import TorchDevice

__all__ = ["Engine"]


class Engine:
    """Made by `from_pretrained` or `from_model`."""

    def __init__(
        self,
        decoder: Decoder,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
        gate: AccelerationGate | None = None,
    ) -> None:
        """gate: is asked about each form that makes the decoder faster; None: its decisions are lines of the log."""
        cache = config.cache
        gate = AccelerationGate(None, Subject(decoder.name, "")) if gate is None else gate
        self.config: Final = config
        self.decoder: Final = decoder
        self._clock: Final = clock
        self._prompts: Final = PromptReader(decoder.tokenizer, decoder.vocab_size, decoder.max_positions)
        self._structures: Final = StructureCompiler(decoder.tokenizer, decoder.vocab_size, decoder.eos_token_ids)
        records = LoadRecords(config.cache_dir)
        self.joined_linears: Final = joined_weights(decoder, config, records, gate)
        """Weights that were joined."""
        self.packing: Final = Packing(decoder.model, config.packed_linears, records, gate)
        prove = partial(self._probed, records)
        page_nbytes = (proof_with_kernel(decoder, config, prove, gate) or prove()).page_nbytes
        num_pages = pool_pages(decoder, config, page_nbytes)
        prefixes = None
        if cache.enable_prefix_caching:
            prefixes = PrefixCache(cache.page_size, int(cache.prefix_cache_capacity * (num_pages - 1)))
        self.pages: Final = PagePool(num_pages, cache.page_size, prefixes)
        self.scheduler: Final = Scheduler(config.scheduler, self.pages)
        self.forwards: Final = Forwards(decoder, num_pages, cache.page_size, page_nbytes, gate)
        self.forwards.try_graphs(
            is_wanted=config.cuda_graphs,
            compiles=config.compile_decoding,
            most_rows=config.scheduler.max_num_seqs,
        )
        self._requests: dict[str, GenerationRequest] = {}
        self._open: dict[str, GenerationRequest] = {}
        """The first text of each request that has not ended."""
        self._timed: dict[str, GenerationRequest] = {}
        """Those of them that have a time to end."""
        self._stepped: dict[str, GenerationRequest] = {}
        """Requests whose outputs `step` returns: those of `add_request`."""
        self._lock: Final = threading.RLock()
        self._serials: Final = count()
        self._counts: Final = EngineCounts()
        self._steps: Final = Steps(
            config,
            self.forwards,
            self.scheduler,
            self.packing,
            self._counts,
            self._requests,
            settle=self._settle,
            fail=self._fail,
        )

    @classmethod
    def from_pretrained(
        cls, path: str | Path, config: Config | None = None, *, gate: AccelerationGate | None = None, **options: Any
    ) -> Engine:
        """A folder in the format of transformers; nothing is fetched.

        options: the fields of Config, CacheConfig and SchedulerConfig, in place of `config`. gate: as of an Engine.
        Raises ConfigurationError for an unknown option, and for a model that is not served.
        """
        config = _config(config, options)
        return cls(load_decoder(path, config.precision, config.max_model_len, _device(config)), config, gate=gate)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any = None,
        config: Config | None = None,
        *,
        gate: AccelerationGate | None = None,
        **options: Any,
    ) -> Engine:
        """A loaded model of transformers, which is the engine's from here on: it moves to the device in its own dtype.

        Without a tokenizer, prompts are token ids and answers have no text.
        """
        config = _config(config, options)
        return cls(wrap_decoder(model, tokenizer, config.max_model_len, _device(config)), config, gate=gate)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        priority: PriorityName = "normal",
        tenant: str = "",
    ) -> list[RequestOutput]:
        """The whole texts, in the order of the prompts.

        Raises InvalidInput before anything is computed, and, when all have ended, what the model raised for one of the
        prompts. A request whose logits are not finite ends with the finish reason `error`; the others go on.
        """
        params = _params(sampling_params)
        made = [self._request(None, prompt, params, is_streamed=False) for prompt in _prompts(prompts)]
        requests = [self._start(request, priority, tenant) for request in made]
        try:
            while not all(map(is_finished, requests)):
                self._advance()
        finally:
            self._drop(requests)
        for request in requests:
            if request.failure is not None:
                raise request.failure
        return [output(request) for request in requests]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        priority: PriorityName = "normal",
        tenant: str = "",
    ) -> Iterator[RequestOutput]:
        """The outputs of one request as it grows; `delta_text` is what is new. Closing the iterator aborts it."""
        request = self._request(None, prompt, _params(sampling_params), is_streamed=True)
        self._start(request, priority, tenant)
        return _Streamed(self._streamed(request), lambda: self._drop([request]))

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template: str | None = None,
        tool_parser: str | None = None,
        priority: PriorityName = "normal",
        tenant: str = "",
    ) -> ChatOutput:
        """The next message of the assistant, with the tools that it calls.

        chat_template: in place of the tokenizer's own. tool_parser: one of `TOOL_PARSERS`; None takes that whose form
        the template shows. Raises InvalidInput before anything is computed.
        """
        prompt = ChatPrompt(messages, tools, chat_template, tool_parser)
        params = _params(sampling_params)
        tokens = self._prompts.tokens(prompt, params.max_tokens)
        (found,) = self.generate([tokens], params, priority=priority, tenant=tenant)
        return chat_output(found, parser_of(self.decoder.tokenizer, prompt), prompt.tool_names)

    def add_request(
        self,
        request_id: str | None,
        prompt: Prompt,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        priority: PriorityName = "normal",
        tenant: str = "",
    ) -> str:
        """Adds a request for `step` to compute. Returns its id, which is a new one for None.

        Raises InvalidInput for an id that is in use, and for a request that can never fit.
        """
        request = self._request(request_id, prompt, _params(sampling_params), is_streamed=True)
        with self._lock:
            self._start(request, priority, tenant)
            self._stepped[request.request_id] = request
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Computes one step. Returns the new outputs of `add_request`, in the order in which they were added."""
        with self._lock:
            self._advance()
            changed = [request for request in self._stepped.values() if has_news(request)]
            for request in changed:
                if is_finished(request):
                    del self._stepped[request.request_id]
            return [output(request) for request in changed]

    def prepare(
        self,
        request_id: str,
        prompt: Prompt | ChatPrompt,
        params: SamplingParams,
        delivered: Delivered | None = None,
        left_s: float | None = None,
    ) -> GenerationRequest:
        """A request for `admit`: checked, its prompt in tokens, its form compiled. For any thread, beside a step.

        delivered: what another engine has delivered of it; this one computes the rest. left_s: seconds after which it
        fails with DeadlinePassed, also while it waits. Raises InvalidInput as `add_request` does.
        """
        expires_s = None if left_s is None else self._clock() + left_s
        request = self._request(request_id, prompt, params, is_streamed=True)
        if delivered is not None:
            request.resume(delivered)
        request.expires_s = expires_s
        return request

    def admit(self, request: GenerationRequest, *, priority: PriorityName = "normal", tenant: str = "") -> None:
        """Adds a prepared request, whose outputs the caller takes from it, on the thread that calls `advance`.

        Raises InvalidInput for an id that is in use.
        """
        if request.finish_reason is None:
            self._start(request, priority, tenant)

    def advance(self) -> None:
        """Computes one step."""
        self._advance()

    def abort(self, request_id: str) -> bool:
        """Ends a request; its pages are free for the next step. Returns False for an id that is not in use."""
        with self._lock:
            request = self._open.get(request_id)
            if request is None:
                return False
            self._finish(request, "abort")
            return True

    @property
    def most_tokens(self) -> int:
        """Of a prompt and its text together: what the model and the pages have room for."""
        # The last token is never computed.
        return min(self.decoder.max_positions, self.pages.num_usable * self.pages.page_size + 1)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a request waits or runs, or `step` has an output to return."""
        return self.scheduler.has_work or bool(self._stepped)

    def stats(self) -> EngineStats:
        """Counts of this engine. It does not wait for a step of another thread, so its numbers may be of two steps."""
        prefixes = self.pages.prefixes
        return EngineStats(
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            requests_finished=self._counts.requests_finished,
            steps=self._counts.steps,
            rows=self._counts.rows,
            preemptions=self.scheduler.num_preemptions,
            prompt_tokens_computed=self._counts.prompt_tokens,
            tokens_generated=self._counts.generated,
            pages_used=self.pages.num_used,
            pages_peak=self._counts.pages_peak,
            pages_total=self.pages.num_usable,
            pages_cached=len(prefixes) if prefixes else 0,
            prefix_tokens_found=prefixes.hits if prefixes else 0,
            prefix_tokens_queried=prefixes.queries if prefixes else 0,
            draft_tokens=self._counts.drafts,
            draft_tokens_accepted=self._counts.drafts_accepted,
        )

    def _probed(self, records: LoadRecords) -> Proof:
        page_size, joined = self.config.cache.page_size, f"{self.joined_linears} joined"
        packed = self.config.packed_linears if self.packing.packed else "off"
        try:
            return probe(self.decoder, page_size, records, f"{packed}, {joined}")
        except PackedFailure as failure:
            self.packing.give_up(failure)
        return probe(self.decoder, page_size, records, f"off, {joined}")

    # One step

    def _advance(self) -> None:
        """ends by time -> step -> ends."""
        with self._lock:
            self._end_late()
            self._steps.advance()

    def _settle(self, request: GenerationRequest, chunk: Chunk, sampled: Sequence[Sampled]) -> None:
        for sibling in request.siblings:
            # The pages of the prompt are complete now, and can be shared.
            if not sibling.sequence.arrival and sibling.finish_reason is None:
                self.scheduler.add(sibling.sequence)
        if sampled[-1].token is None:
            request.finish("error")
        else:
            self._counts.generated += request.accept(sampled, len(chunk.drafts))
            self._counts.drafts += len(chunk.drafts)
            self._counts.drafts_accepted += len(sampled) - 1
        if request.finish_reason is not None:
            self._end(request)

    def _fail(self, chunk: Chunk, error: Exception) -> None:
        """Ends all texts of the request with this error."""
        if (request := self._requests.get(chunk.sequence.request_id)) is not None:
            request.first.failure = error
            self._finish(request.first, "error")

    def _end_late(self) -> None:
        if not self._timed:
            return
        now = self._clock()
        for request in [*self._timed.values()]:
            timeout_s, expires_s = _or_never(request.deadline_s), _or_never(request.expires_s)
            if timeout_s <= min(now, expires_s):
                self._finish(request, "timeout")
            elif expires_s <= now:
                request.failure = DeadlinePassed(has_begun=request.has_begun)
                self._finish(request, "abort")

    # Requests

    def _request(
        self, request_id: str | None, prompt: Prompt | ChatPrompt, params: SamplingParams, *, is_streamed: bool
    ) -> GenerationRequest:
        """Checks everything that can be known now. Raises InvalidInput."""
        if request_id is None:
            request_id = f"request-{next(self._serials)}"
        tokens = self._prompts.tokens(prompt, params.max_tokens)
        tokenizer = self.decoder.tokenizer
        if params.stop and tokenizer is None:
            raise InvalidInput("stop: found strings for a model without a tokenizer, expected stop_token_ids")
        self._check_fits(len(tokens), params.max_tokens)
        has_stream = tokenizer is not None and (is_streamed or bool(params.stop))
        sequence = Scheduled(
            request_id,
            tokens,
            len(tokens),
            wants_prompt_logits=params.prompt_logprobs is not None,
            most_tokens=len(tokens) + params.max_tokens,
        )
        request = GenerationRequest(
            sequence=sequence,
            prompt=prompt if isinstance(prompt, str) else None,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            rules=token_rules(params, self.decoder),
            tokenizer=tokenizer,
            stream=TextStream(tokenizer, params.stop) if has_stream else None,
            matcher=self._structures.matcher(params) if params.is_structured else None,
            deadline_s=None if params.timeout_s is None else self._clock() + params.timeout_s,
            is_free_of_host=is_free_of_host(params, self.decoder.vocab_size),
        )
        add_siblings(request)
        return request

    def _check_fits(self, prompt: int, most: int) -> None:
        # The last token is never computed.
        if (needed := self.pages.pages_for(prompt + most - 1)) > self.pages.num_usable:
            raise TooManyTokens(
                f"Found a prompt of {prompt} tokens and max_tokens {most}, which take {needed} pages, expected at most "
                f"{self.pages.num_usable} (kv_cache_mb)",
                prompt + most,
            )

    def _start(self, request: GenerationRequest, priority: str, tenant: str) -> GenerationRequest:
        level = getattr(Priority, priority.upper(), None) if isinstance(priority, str) else None
        if level is None:
            names = ", ".join(each.name.lower() for each in Priority)
            raise InvalidInput(f"priority: found {described(priority)}, expected one of: {names}")
        with self._lock:
            if request.request_id in self._open or request.request_id in self._stepped:
                raise InvalidInput(f"Request id {shown(request.request_id)} is in use, expected another one")
            for each in members(request):
                each.sequence.priority, each.sequence.tenant = int(level), tenant
                self._requests[each.request_id] = each
            self._open[request.request_id] = request
            if request.deadline_s is not None or request.expires_s is not None:
                self._timed[request.request_id] = request
            # The others follow when the prompt's pages can be shared.
            self.scheduler.add(request.sequence)
        return request

    def _finish(self, first: GenerationRequest, reason: FinishReason) -> None:
        """Ends all texts of a request that have not ended."""
        for request in members(first):
            if request.finish_reason is None:
                request.finish(reason)
                self._end(request)

    def _end(self, request: GenerationRequest) -> None:
        """This text has ended: its pages come back now."""
        del self._requests[request.request_id]
        # Texts that waited for the first one's prompt were not added.
        if request.sequence.arrival:
            self.scheduler.remove(request.sequence)
        first = request.first
        if is_finished(first):
            self._counts.requests_finished += 1
            del self._open[first.request_id]
            self._timed.pop(first.request_id, None)

    def _drop(self, requests: Sequence[GenerationRequest]) -> None:
        """Ends what is left of these requests: their caller has gone."""
        for request in requests:
            self.abort(request.request_id)

    def _streamed(self, request: GenerationRequest) -> Generator[RequestOutput, None, None]:
        try:
            while not is_finished(request):
                self._advance()
                if has_news(request) and request.failure is None:
                    yield output(request)
            if request.failure is not None:
                raise request.failure
            if has_news(request):
                yield output(request)
        finally:
            self._drop([request])


class _Streamed(Iterator[RequestOutput]):
    """The outputs of a request that has begun. A generator that was never asked would not abort it at its end."""

    def __init__(self, outputs: Generator[RequestOutput, None, None], drop: Callable[[], None]) -> None:
        self._outputs = outputs
        self._drop = drop

    def __next__(self) -> RequestOutput:
        return next(self._outputs)

    def close(self) -> None:
        """Aborts the request, if it has not ended."""
        self._outputs.close()
        self._drop()

    def __del__(self) -> None:
        self.close()


def _or_never(moment_s: float | None) -> float:
    return inf if moment_s is None else moment_s


def _config(config: Config | None, options: Mapping[str, Any]) -> Config:
    if config is not None and options:
        raise ConfigurationError(f"Found a config and {', '.join(options)}, expected one of both")
    return Config.from_options(options) if config is None else config


def _device(config: Config) -> TorchDevice:
    return TorchDevice(config.device)


def _params(given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    if given is None:
        return SamplingParams()
    if isinstance(given, Mapping):
        return SamplingParams.from_mapping(given)
    if isinstance(given, SamplingParams):
        return given
    raise InvalidInput(f"sampling_params: found {described(given)}, expected SamplingParams or a mapping of its fields")


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several: a list of integers is one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
