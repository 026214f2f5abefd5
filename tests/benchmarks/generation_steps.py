"""Generation: the sampler, guesses, prefixes, long prompts, the engine's own Python, and the time to load.

Each figure is a ratio of two turns of one process, in CPU seconds of one thread. Wrong tokens end the measurement.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.workers.generation import Engine, SamplingParams
from penstock.workers.generation.sampler import sample
from penstock.workers.generation.sampling_row import SamplingRow
from penstock.workers.generation.token_history import TokenHistory
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.servers import ROOT

__all__ = ["bpe_tokenizer", "measure"]

_ROWS: Final = 32
_SAMPLER_VOCABULARY: Final = 32_000
_VOCABULARY: Final = 4_096
_SETTINGS: Final[list[dict[str, Any]]] = [
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1},
    {"temperature": 0.8, "min_p": 0.05},
]


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module. The caller has set one thread."""
    return [
        _sampler(scale, say),
        *_speculation(scale, say),
        _cached_prefix(scale, say),
        _long_prompt(scale, say),
        _critical(say),
        _own_python(scale, say),
        _load(scale, say),
    ]


# The sampler


def _sampler(scale: Scale, say: Progress) -> Row:
    """Peaked logits, as models have them: the 256 most probable tokens decide."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_ROWS, _SAMPLER_VOCABULARY, generator=generator) * 3
    params = [SamplingParams(**_SETTINGS[at % len(_SETTINGS)]) for at in range(_ROWS)]
    texts = [torch.randint(_SAMPLER_VOCABULARY, (300,), generator=generator).tolist() for _ in range(_ROWS)]
    histories = [TokenHistory() for _ in range(_ROWS)]
    for history, text in zip(histories, texts, strict=True):
        history.follow(text, 100)
    processors = [_processors(each) for each in params]
    ids: list[Any] = [torch.tensor([text]) for text in texts]

    def ours() -> None:
        rows = [
            SamplingRow(each, at, 300, history=histories[at] if each.has_penalties else None)
            for at, each in enumerate(params)
        ]
        sample(logits.clone(), rows)

    def theirs() -> None:
        for at in range(_ROWS):
            scores = processors[at](ids[at], logits[at : at + 1].clone())
            torch.multinomial(scores.softmax(-1), 1)

    times = _in_turn(scale, [ours, theirs], 10)
    ratio = median(second / first for first, second in times)
    say(f"generation: the sampler takes {median(t[0] for t in times) * 1e3:.1f} ms, the processors {ratio:.1f}x that")
    return Row(
        f"generation, sampler, {_ROWS} rows of {_SAMPLER_VOCABULARY:,} logits: against transformers' processors",
        f"{median(t[0] for t in times) * 1e3:.1f} against {median(t[1] for t in times) * 1e3:.1f} ms: {ratio:.1f}x",
        ">= 3x",
        "",
        verdict(required=ratio >= 3),
        {"ratio": ratio},
    )


def _processors(params: SamplingParams) -> LogitsProcessorList:
    chosen: list[Any] = []
    if params.repetition_penalty != 1:
        chosen.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    chosen.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chosen.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chosen.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chosen.append(MinPLogitsWarper(params.min_p))
    return LogitsProcessorList(chosen)


# Guesses


def _speculation(scale: Scale, say: Progress) -> Iterator[Row]:
    """Periodic text of a model whose next token depends mostly on the last one, and text that repeats nothing."""
    periodic = _guessed(scale, _model(is_periodic=True), 1)
    say(f"generation: guesses give {periodic:.2f}x on periodic text")
    yield Row(
        "generation, guesses on periodic text, one row: tokens per CPU second against none",
        f"{periodic:.2f}x",
        ">= 1.25x",
        "",
        verdict(required=periodic >= 1.25),
        {"ratio": periodic},
    )
    # Three of eight tokens were there before at almost each place, and say nothing about the next one.
    others = {rows: _guessed(scale, _positional(), rows, tokens=8) for rows in (1, 2, 8)}
    shown = ", ".join(f"{ratio:.2f}x" for ratio in others.values())
    say(f"generation: guesses give {shown} on other text")
    yield Row(
        "generation, guesses on text that repeats little, 1, 2 and 8 rows: the same",
        shown,
        ">= 0.9x each",
        "",
        verdict(required=min(others.values()) >= 0.9),
        {f"ratio_{rows}": ratio for rows, ratio in others.items()},
    )


def _guessed(scale: Scale, model: Any, rows: int, tokens: int = _VOCABULARY) -> float:
    engines = [_engine(model, num_speculative_tokens=number) for number in (3, 0)]
    allowed = None if tokens == _VOCABULARY else list(range(1, 1 + tokens))
    params = SamplingParams(temperature=0, max_tokens=160, allowed_token_ids=allowed)
    texts: list[Any] = [None, None]

    def run(at: int) -> Callable[[], None]:
        def generate() -> None:
            outputs = engines[at].generate([_prompt(256, row, tokens) for row in range(rows)], params)
            texts[at] = [output.outputs[0].token_ids for output in outputs]

        return generate

    times = _in_turn(scale, [run(0), run(1)], 1)
    if texts[0] != texts[1]:
        raise ValueError("Wrong answers: guesses changed tokens")
    return median(without / guessed for guessed, without in times)


# Prompts


def _cached_prefix(scale: Scale, say: Progress) -> Row:
    engine = _engine(_model())
    shared = _prompt(512, 0)
    serial = iter(range(1, 10_000))

    def first_token(prompt: list[int]) -> None:
        engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1))

    first_token([*shared, *_prompt(16, next(serial))])
    turns = [
        lambda: first_token([*shared, *_prompt(16, next(serial))]),
        lambda: first_token(_prompt(528, next(serial))),
    ]
    times = _in_turn(scale, turns, 5)
    ratio = median(cold / warm for warm, cold in times)
    say(f"generation: a cached prefix gives the first token {ratio:.1f}x earlier")
    return Row(
        "generation, 512 tokens of a prompt in the prefix cache: CPU time to the first token against none",
        f"{median(t[0] for t in times) * 1e3:.1f} against {median(t[1] for t in times) * 1e3:.1f} ms: {ratio:.1f}x",
        ">= 5x",
        ">= 8x",
        verdict(required=ratio >= 5, aim=ratio >= 8),
        {"ratio": ratio},
    )


def _long_prompt(scale: Scale, say: Progress) -> Row:
    """The longest step while the prompt is computed, against the median step of the eight streams alone."""
    engine = _engine(_model(), enable_prefix_caching=False)
    ratios = []
    for turn in range(scale.rounds):
        names = [engine.add_request(None, _prompt(64, row), _endless(400)) for row in range(8)]
        for _ in range(5):
            engine.step()
        alone = median(_seconds(engine.step) for _ in range(30))
        long = engine.add_request(None, _prompt(2_000, turn), _endless(2))
        steps = []
        while long is not None:
            begun = time.process_time()
            outputs = engine.step()
            steps.append(time.process_time() - begun)
            if any(output.request_id == long for output in outputs):
                break
        ratios.append(max(steps) / alone)
        for name in (*names, long):
            engine.abort(name)
        engine.step()
    ratio = median(ratios)
    say(f"generation: the longest step beside a long prompt takes {ratio:.1f}x")
    return Row(
        "generation, a prompt of 2,000 tokens beside 8 streams, default budget: longest step against 8 alone",
        f"{ratio:.1f}x",
        "<= 5x",
        "",
        verdict(required=ratio <= 5),
        {"ratio": ratio},
    )


def _critical(say: Progress) -> Row:
    """Steps, not seconds. A short prompt is one step; a long one is computed in chunks, for the streams beside it."""
    engine = _engine(_model(), max_num_seqs=_ROWS, enable_prefix_caching=False)
    short, long = _prompt(200, 99), _prompt(700, 99)
    prefill = _steps_to_token(engine, short)
    low = [engine.add_request(None, _prompt(32, row), _endless(300), priority="low") for row in range(2 * _ROWS)]
    for _ in range(20):
        engine.step()
    if engine.stats().running != _ROWS:
        raise ValueError("Wrong state: the seats are not taken")
    waited = _steps_to_token(engine, short) - prefill
    chunked = _steps_to_token(engine, long)
    for name in low:
        engine.abort(name)
    say(f"generation: a critical request waits {waited} steps for a seat; with 700 tokens it takes {chunked} in all")
    return Row(
        f"generation, {_ROWS} seats full of low requests, a critical one of 200 tokens: steps to its first token",
        f"{waited} beside the {prefill} of its prompt; with 700 tokens in chunks of 64, {chunked} in all",
        "<= 3 and those of its prompt",
        "",
        verdict(required=waited <= 3),
        {"steps": waited, "prefill_steps": prefill, "steps_of_a_long_prompt": chunked},
    )


def _steps_to_token(engine: Engine, prompt: list[int]) -> int:
    name = engine.add_request(None, prompt, _endless(2), priority="critical")
    steps = 1
    while not any(output.request_id == name and output.delta_token_ids for output in engine.step()):
        steps += 1
    engine.abort(name)
    return steps


# The engine's own Python


def _own_python(scale: Scale, say: Progress) -> Row:
    """All of a step but the model's forward and the sampler, with streams of text."""
    model, tokenizer = _model(), bpe_tokenizer()
    module: Any = importlib.import_module("penstock.workers.generation.verification")
    engine = Engine.from_model(model, tokenizer, max_num_seqs=_ROWS, kv_cache_mb=128)
    inner = _Spent(engine.decoder.forward)
    sampler = _Spent(module.sample)
    shares = []
    original = module.sample
    engine.forwards.decoder = _Forwarding(engine.decoder, inner)  # type: ignore[assignment]
    module.sample = sampler
    try:
        for _ in range(scale.rounds):
            names = [engine.add_request(None, _prompt(64, row), _endless(80)) for row in range(_ROWS)]
            for _ in range(6):
                engine.step()
            inner.seconds = sampler.seconds = 0.0
            whole = sum(_seconds(engine.step) for _ in range(40))
            shares.append(1 - (inner.seconds + sampler.seconds) / whole)
            for name in names:
                engine.abort(name)
            engine.step()
    finally:
        module.sample = original
    share = median(shares)
    say(f"generation: {share:.1%} of a step is the engine's own Python")
    return Row(
        f"generation, scheduler, pages, batch and text: share of the CPU time of a step of {_ROWS} rows",
        f"{share:.1%}",
        "<= 10 %",
        "<= 5 %",
        verdict(required=share <= 0.1, aim=share <= 0.05),
        {"share": share},
    )


class _Spent:
    """Counts the CPU seconds of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.seconds = 0.0
        self._function: Final = function

    def __call__(self, *arguments: Any) -> Any:
        begun = time.process_time()
        try:
            return self._function(*arguments)
        finally:
            self.seconds += time.process_time() - begun


class _Forwarding:
    """A decoder whose forward is counted."""

    def __init__(self, decoder: Any, forward: Callable[..., Any]) -> None:
        self._decoder: Final = decoder
        self.forward: Final = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


# Loading


def _load(scale: Scale, say: Progress) -> Row:
    """The first load proves the model and measures its layers; later ones find this in the cache folder."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as records:
        _model(layers=12, width=512).save_pretrained(folder)
        bpe_tokenizer().save_pretrained(folder)
        engines: list[Engine] = []

        def ours() -> None:
            engines[:] = [Engine.from_pretrained(folder, kv_cache_mb=64, cache_dir=records)]

        def theirs() -> None:
            AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
            AutoTokenizer.from_pretrained(folder, local_files_only=True)

        theirs()
        first_s = _seconds(ours)
        times = _in_turn(scale, [ours, theirs], 3)
        rest_s = _seconds(lambda: [None for _ in iter(engines[0].packing.pack_next, False)])
    ratio = median(own / other for own, other in times)
    say(f"generation: loading takes {ratio:.2f}x of transformers' own, the first time {first_s:.2f} s")
    return Row(
        "generation, 45M parameters: CPU time from a proven folder to a ready engine, against transformers' load",
        f"{median(t[0] for t in times):.3f} against {median(t[1] for t in times):.3f} s: {ratio:.2f}x; the first load "
        f"{first_s:.2f} s; packing in the first steps {rest_s:.2f} s",
        "<= 1.3x",
        "",
        verdict(required=ratio <= 1.3),
        {"ratio": ratio, "first_load_s": first_s, "packing_s": rest_s},
    )


# Models, prompts, turns


def _model(*, is_periodic: bool = False, layers: int = 4, width: int = 256) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4_096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if is_periodic:
        with torch.no_grad():
            model.get_input_embeddings().weight *= 100
    return model


def _positional() -> Any:
    """Its next token depends mostly on the position, so its text repeats nothing."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=_VOCABULARY, n_embd=256, n_layer=4, n_head=8, n_positions=1_024, bos_token_id=None, eos_token_id=None
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.transformer.wpe.weight *= 100
    return model


def _engine(model: Any, **options: Any) -> Engine:
    return Engine.from_model(model, kv_cache_mb=128, **options)


def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of the documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([path.read_text() for path in _documents()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def _documents() -> list[Path]:
    return sorted((ROOT / "docs").rglob("*.md"))


def _prompt(length: int, seed: int, tokens: int = _VOCABULARY - 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 1 + min(tokens, _VOCABULARY - 1), (length,), generator=generator).tolist()


def _endless(number: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=number)


def _in_turn(scale: Scale, turns: list[Callable[[], None]], repeats: int) -> list[tuple[float, ...]]:
    """CPU seconds of each turn, in each round; the first round is not counted."""
    found = []
    for _ in range(scale.rounds + 1):
        found.append(tuple(median(_seconds(turn) for _ in range(repeats)) for turn in turns))
    return found[1:]


def _seconds(run: Callable[[], Any]) -> float:
    begun = time.process_time()
    run()
    return time.process_time() - begun
