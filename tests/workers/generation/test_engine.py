"""The engine as a notebook uses it: folders, texts, streams, steps, aborts, refusals, and requests that fail alone."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.registry.errors import ConfigurationError, InvalidInput
from penstock.workers.generation import CacheConfig, Config, Engine, SamplingParams, SchedulerConfig
from penstock.workers.generation.backend import Delivered
from penstock.workers.generation.model import wrap_decoder
from penstock.workers.runtime.torch_device import keeping_threads
from tests.workers.generation.architectures import ARCHITECTURES, decoder, reference
from tests.workers.generation.engines import (
    GREEDY,
    byte_tokenizer,
    engine_with_pages,
    open_engine,
    prompts_of,
    token_ids,
    write_model,
)

TEXT = "the stream of the river"
ODD = 90
"""The token that OddTokenizer has not."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, in the format of transformers."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    """An engine that several tests share; each leaves it empty."""
    options: dict[str, Any] = {
        "kv_cache_mb": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "packed_linears": "off",
    }
    return Engine.from_pretrained(folder, **options)


def test_a_folder_writes_what_its_model_writes(folder, engine):
    """ES-032: text in, text and tokens out, equal to those of transformers from the same folder."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = engine.decoder.tokenizer
    (output,) = engine.generate(TEXT, GREEDY)
    prompt = tokenizer(TEXT)["input_ids"]
    expected = reference(model, prompt, 16)
    completion = output.outputs[0]
    assert list(completion.token_ids) == expected
    assert completion.text == tokenizer.decode(expected, skip_special_tokens=True)
    assert (output.prompt, list(output.prompt_token_ids)) == (TEXT, prompt)
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (len(prompt), len(expected))
    assert completion.finish_reason == ("stop" if expected[-1] == tokenizer.eos_token_id else "length")


def test_engine_leaves_the_threads_of_its_caller(engine):
    """A notebook that chooses them after it has built the engine keeps them."""
    built = open_engine(decoder("Llama"), kv_cache_mb=4)
    with keeping_threads():
        for each, threads in ((engine, 3), (built, 4)):
            torch.set_num_threads(threads)
            each.generate([prompts_of(3)[0]], GREEDY)
            assert torch.get_num_threads() == threads
        alone = wrap_decoder(decoder("Llama"), None, None)
        torch.set_num_threads(3)
        with alone.device.inference():
            assert torch.get_num_threads() == 3


def test_answers_are_in_the_order_of_the_prompts(engine):
    """ES-032, ES-035: whatever ends first. Texts and token ids may be mixed."""
    prompts: list[Any] = [TEXT, *prompts_of(30, 1, 12), "größe"]
    together = engine.generate(prompts, GREEDY)
    alone = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert token_ids(together) == token_ids(alone)
    assert engine.stats().pages_used == 0


def test_a_stream_is_the_text_in_parts(engine):
    """ES-033: the first delta comes before the end, and all together are what `generate` writes."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
    (whole,) = engine.generate(TEXT, params)
    seen = []
    for output in engine.stream(TEXT, params):
        seen.append(output)
        if not output.finished:
            assert engine.has_unfinished_requests
    assert len(seen) == 40
    assert [output.finished for output in seen] == [False] * 39 + [True]
    assert "".join(output.delta_text for output in seen) == whole.outputs[0].text == seen[-1].outputs[0].text
    assert [token for output in seen for token in output.delta_token_ids] == list(whole.outputs[0].token_ids)


def test_text_without_a_reader_is_decoded_once(folder, engine):
    """ES-011: `generate` decodes at the end, not at each token. The decoding of the tokenizer's own class is used."""
    own = Engine.from_pretrained(folder, kv_cache_mb=2, packed_linears="off")
    tokenizer = own.decoder.tokenizer
    calls = []

    kind: Any = type(tokenizer)

    def counted(self, *args, **options):
        calls.append(1)
        return kind._decode(self, *args, **options)

    tokenizer.__class__ = type("Counted", (kind,), {"_decode": counted})
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    found = own.generate([TEXT, TEXT], params)
    assert len(calls) == 2
    assert [one.outputs[0].text for one in found] == [
        one.outputs[0].text for one in engine.generate([TEXT] * 2, params)
    ]


def test_a_stop_string_cuts_text_and_ends_the_request(engine):
    """ES-034: the text is what comes before the first stop string, also in the stream."""
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=9, ignore_eos=True)
    text = engine.generate(TEXT, params)[0].outputs[0].text
    stop = text[20:23]
    stopped = engine.generate(TEXT, SamplingParams(max_tokens=60, temperature=1.0, seed=9, ignore_eos=True, stop=stop))
    completion = stopped[0].outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < 60
    options = {"max_new_tokens": 60, "temperature": 1.0, "seed": 9, "ignore_eos": True, "stop": [stop]}
    assert "".join(output.delta_text for output in engine.stream(TEXT, options)) == completion.text


def test_a_stop_string_ends_no_text_before_min_tokens(engine):
    """In the whole text, the stream, and a text that another engine continues."""
    plain: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 9, "ignore_eos": True}
    whole = engine.generate(TEXT, plain)[0].outputs[0]
    stop = next(letter for letter in whole.text if whole.text.count(letter) > 1)
    (early,) = engine.generate(TEXT, {**plain, "stop": [stop]})
    least = len(early.outputs[0].token_ids)
    options = {**plain, "stop": [stop], "min_tokens": least}
    found = engine.generate(TEXT, options)[0].outputs[0]
    place = whole.text.index(stop, whole.text.index(stop) + 1)
    assert found.text == whole.text[:place]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    assert len(found.token_ids) > least
    assert "".join(output.delta_text for output in engine.stream(TEXT, options)) == found.text
    delivered = Delivered(found.token_ids[:least], early.outputs[0].text)
    continued = engine.prepare("again", TEXT, SamplingParams(**options), delivered)
    assert continued.finish_reason is None
    never = engine.generate(TEXT, {**options, "min_tokens": 60})[0].outputs[0]
    assert (never.text, never.finish_reason) == (whole.text, "length")


def test_stop_tokens_end_a_text_after_min_tokens():
    """The token itself is in the ids; before `min_tokens` it is not chosen."""
    engine = open_engine(decoder("Llama"), kv_cache_mb=4)
    (prompt,) = prompts_of(9)
    (written,) = token_ids(engine.generate([prompt], GREEDY))
    stop = written[4]
    first = written.index(stop)
    (stopped,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=16, stop_token_ids=[stop]))
    assert list(stopped.outputs[0].token_ids) == written[: first + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    later = {"temperature": 0, "max_tokens": 16, "stop_token_ids": [stop], "min_tokens": 12}
    (kept,) = token_ids(engine.generate([prompt], later))
    assert stop not in kept[:12]
    assert len(kept) >= 12


def test_steps_return_what_is_new(engine):
    """ES-035: add requests, step until none is left; deltas of each add up to its text."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    expected = {str(at): output.outputs[0] for at, output in enumerate(engine.generate([TEXT, "größe"], params))}
    for name, prompt in (("0", TEXT), ("1", "größe")):
        assert engine.add_request(name, prompt, params) == name
    deltas = {"0": "", "1": ""}
    ended = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            deltas[output.request_id] += output.delta_text
            if output.finished:
                ended[output.request_id] = output.outputs[0]
    assert ended == expected
    assert deltas == {name: completion.text for name, completion in expected.items()}
    assert engine.step() == []


def test_short_requests_end_before_long_ones_that_came_first(engine):
    """ES-005: they join and leave between steps."""
    engine.add_request("long", TEXT, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    engine.step()
    engine.add_request("short", TEXT, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    ended = []
    while engine.has_unfinished_requests:
        ended += [output.request_id for output in engine.step() if output.finished]
    assert ended == ["short", "long"]


def test_an_aborted_request_frees_its_pages(engine):
    """Its last output says so, an unknown id is False, and the id can be used again."""
    engine.add_request("gone", TEXT, SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
    engine.step()
    assert engine.stats().pages_used > 0
    assert engine.abort("gone")
    assert not engine.abort("gone")
    assert engine.stats().pages_used == 0
    (output,) = engine.step()
    assert (output.outputs[0].finish_reason, output.finished) == ("abort", True)
    assert not engine.has_unfinished_requests
    engine.add_request("gone", TEXT, GREEDY)
    engine.abort("gone")
    engine.step()


def test_a_closed_stream_is_aborted(engine):
    """Who stops reading, stops the request."""
    stream = engine.stream(TEXT, SamplingParams(max_tokens=100, ignore_eos=True))
    next(iter(stream))
    stream.close()
    assert engine.stats().pages_used == 0
    assert not engine.has_unfinished_requests


def test_a_stream_that_was_never_read_is_aborted(engine):
    """Closed, or dropped."""
    engine.stream(TEXT, SamplingParams(max_tokens=100, ignore_eos=True)).close()
    assert not engine.has_unfinished_requests
    engine.stream(TEXT, SamplingParams(max_tokens=100, ignore_eos=True))
    assert not engine.has_unfinished_requests


class OddTokenizer:
    """One that raises for an id that it has not, as some do that are written in Python: a model may have more."""

    eos_token_id = None
    chat_template = None
    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self._tokenizer(*texts, **options)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def decode(self, ids: list[int], **options: Any) -> str:
        if ODD in ids:
            raise TypeError("no such token")
        return str(self._tokenizer.decode(ids, **options))


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_a_text_that_cannot_be_decoded_fails_alone(stop: tuple[str, ...]):
    """It has ended with its error, its pages come back, and the next one gets its seat."""
    tokenizer = OddTokenizer(byte_tokenizer())
    engine = open_engine(decoder("Llama"), tokenizer, max_num_seqs=1, page_size=4, kv_cache_mb=1)
    sick = SamplingParams(temperature=0, max_tokens=4, logit_bias={ODD: 100}, stop=stop)
    with pytest.raises(TypeError, match="no such token"):
        engine.generate([[1, 2, 3]], sick)
    assert (engine.stats().running, engine.stats().waiting, engine.stats().pages_used) == (0, 0, 0)
    assert not engine.has_unfinished_requests
    (sound,) = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, allowed_token_ids=[5, 6]))
    assert len(sound.outputs[0].token_ids) == 2


@pytest.mark.slow
def test_a_thousand_aborts_give_all_pages_back():
    """At random moments, with prefix hits and preemptions."""
    engine = engine_with_pages(decoder("Llama"), 24, 4, max_num_seqs=4, max_num_batched_tokens=32)
    chosen = torch.Generator().manual_seed(0)
    prompts = prompts_of(5, 20, 33)
    alive: list[str] = []
    for turn in range(1_000):
        alive.append(engine.add_request(None, prompts[turn % 3], SamplingParams(max_tokens=30, seed=turn)))
        if turn % 4 == 0:
            alive = [name for name in alive if name not in {o.request_id for o in engine.step() if o.finished}]
        at = int(torch.randint(len(alive), (1,), generator=chosen))
        assert engine.abort(alive.pop(at))
    while engine.has_unfinished_requests:
        engine.step()
    assert engine.stats().pages_used == 0


def test_a_request_that_is_not_finite_fails_alone():
    """NaN in one request's pages reaches no other, also not one that gets the pages next."""
    model = decoder("Llama")
    sick, *sound = prompts_of(20, 9, 30, 14)
    sick[3] = 96
    sound = [[token % 96 for token in prompt] for prompt in sound]
    # The model may well write the token itself: then it would spoil what was sound.
    with torch.no_grad():
        model.lm_head.weight[96] = 0
    expected = [reference(model, prompt, 16) for prompt in sound]
    assert all(96 not in written for written in expected)
    engine = engine_with_pages(model, 40, 4, max_num_seqs=4, max_num_batched_tokens=16)
    with torch.no_grad():
        model.model.embed_tokens.weight[96] = float("nan")
    outputs = engine.generate([sick, *sound], GREEDY)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert token_ids(outputs)[1:] == expected
    for prompt, written in zip(sound, expected, strict=True):
        assert token_ids(engine.generate([prompt] * 3, GREEDY)) == [written] * 3
    engine.add_request("sick", sick * 4, GREEDY)
    engine.step()
    engine.abort("sick")
    assert token_ids(engine.generate(sound, GREEDY)) == expected


def test_many_threads_may_generate(engine):
    """ES-010: each gets its own answers, and one computes at a time."""
    prompts = prompts_of(5, 9, 13, 17, 21, 25)
    expected = [engine.generate([prompt], GREEDY)[0].outputs for prompt in prompts]
    found: dict[int, Any] = {}

    def ask(at: int) -> None:
        found[at] = engine.generate([prompts[at]], GREEDY)[0].outputs

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[at] for at in range(len(prompts))] == expected


def test_a_critical_request_displaces_a_low_one_that_then_writes_the_same(engine):
    """ES-015: seats full of low, a critical one gets its first token in its first step; no text changes."""
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    prompts = prompts_of(9, 10, 11, 12)
    expected = {
        str(at): list(output.outputs[0].token_ids) for at, output in enumerate(engine.generate(prompts, params))
    }
    before = engine.stats().preemptions
    for at, prompt in enumerate(prompts):
        engine.add_request(str(at), prompt, params, priority="low")
    for _ in range(5):
        engine.step()
    engine.add_request("critical", prompts_of(7)[0], params, priority="critical")
    assert "critical" in [output.request_id for output in engine.step()]
    assert engine.stats().preemptions == before + 1
    ended = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.finished and output.request_id != "critical":
                ended[output.request_id] = list(output.outputs[0].token_ids)
    assert ended == expected


def test_each_step_has_a_line_where_it_is_wanted(engine, caplog):
    """ES-028: with the counts of the step. At level INFO there is none."""
    with caplog.at_level(logging.INFO, "penstock"):
        engine.generate(prompts_of(9, 10), GREEDY)
    assert caplog.records == []
    before = engine.stats()
    with caplog.at_level(logging.DEBUG, "penstock.runtime.steps"):
        engine.generate(prompts_of(11, 12), GREEDY)
    lines = [vars(record) for record in caplog.records if record.message == "a step of generation"]
    after = engine.stats()
    assert [line["step"] for line in lines] == list(range(before.steps + 1, after.steps + 1))
    assert sum(line["rows"] for line in lines) == after.rows - before.rows
    assert lines[0]["tokens"] == after.prompt_tokens_computed - before.prompt_tokens_computed
    assert (lines[0]["running"], lines[0]["waiting"], lines[-1]["running"], lines[-1]["pages_used"]) == (2, 0, 0, 0)


def test_objects_and_keywords_make_the_same_engine(folder):
    """ES-036: Config of CacheConfig and SchedulerConfig, or their fields as keywords."""
    config = Config(
        cache=CacheConfig(page_size=8, kv_cache_mb=2), scheduler=SchedulerConfig(max_num_seqs=3), max_model_len=64
    )
    first = Engine.from_pretrained(folder, config)
    second = Engine.from_pretrained(folder, page_size=8, kv_cache_mb=2, max_num_seqs=3, max_model_len=64)
    assert first.config == second.config
    assert first.pages.num_pages == second.pages.num_pages


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pagesize": 4}, "Unknown option pagesize, did you mean page_size"),
        ({"page_size": 0}, "page_size: found 0, expected an integer of at least 1"),
        ({"kv_cache_mb": 0.001}, "kv_cache_mb: found 0.001, expected at least"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "expected at least max_num_seqs, 8"),
        ({"max_model_len": 1_000}, "max_model_len: found 1000, expected at most 256"),
        ({"precision": "int3"}, "precision: found 'int3', expected one of: fp32, bf16"),
        ({"prefix_cache_capacity": 2}, "prefix_cache_capacity: found 2, expected a number from 0 to 1"),
    ],
)
def test_unusable_options_are_refused(folder, options, message):
    """One line says what was found and what is expected."""
    with pytest.raises(ConfigurationError, match=message):
        Engine.from_pretrained(folder, **options)


def test_what_is_no_model_is_refused(tmp_path):
    """An empty folder, and one whose configuration is of no decoder."""
    with pytest.raises(ConfigurationError, match=r"Found no config\.json"):
        Engine.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ConfigurationError, match="is no model that can be loaded"):
        Engine.from_pretrained(tmp_path)


def test_positions_that_depend_on_the_batch_are_refused(tmp_path):
    """Dynamic rotary scaling reads the longest position of the whole flat batch."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    with pytest.raises(ConfigurationError, match="rotary positions of kind dynamic"):
        Engine.from_pretrained(write_model(tmp_path, rope_parameters=dynamic))


def _long_rope(name: str) -> Any:
    """A model that scales positions in another way once the batch has one beyond 64."""
    half = 8
    scaled = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + at / 8 for at in range(half)],
        "long_factor": [3.0 + at for at in range(half)],
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    }
    config = ARCHITECTURES[name]()
    config.rope_parameters = scaled
    config.original_max_position_embeddings = 64
    return decoder(name, config=config)


@pytest.mark.parametrize("name", ["Llama", "Phi-3"])
def test_longrope_is_served_to_the_end_of_its_short_regime(name):
    """With the tokens of `model.generate`, to the last position; what goes beyond is refused, never wrong."""
    model = _long_rope(name)
    prompts = prompts_of(40, 9, 63)
    expected = [reference(model, prompt, 64 - len(prompt)) for prompt in prompts]
    engine = open_engine(model, kv_cache_mb=2)
    assert (engine.decoder.max_positions, engine.most_tokens) == (64, 64)
    found = [
        engine.generate([prompt], SamplingParams(max_tokens=64 - len(prompt), temperature=0))[0] for prompt in prompts
    ]
    assert token_ids(found) == expected
    with pytest.raises(InvalidInput, match="a prompt of 40 tokens and max_tokens 25, expected at most 64 together"):
        engine.generate(prompts[0], SamplingParams(max_tokens=25, temperature=0))
    with pytest.raises(ConfigurationError, match="max_model_len: found 65, expected at most 64 for this model"):
        open_engine(_long_rope(name), kv_cache_mb=2, max_model_len=65)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "Found an empty prompt"),
        ([1, -1], {}, "Found -1 as a token, expected integers from 0 to"),
        ([1, 10**6], {}, "Found 1000000 as a token"),
        ([1] * 250, {"max_tokens": 10}, "a prompt of 250 tokens and max_tokens 10, expected at most 256 together"),
        ([1], {"stop_token_ids": [10**6]}, "stop_token_ids: found 1000000"),
        ([1], {"top_p": 0}, "top_p: found 0, expected a number above 0, at most 1"),
        ([1], {"beam_width": 3}, "Unknown sampling field beam_width"),
        ([1], {"n": 2, "temperature": 0}, "n: found 2 with temperature 0, expected a temperature above 0"),
        ([1], {"logit_bias": {"1000000": 1}}, "logit_bias: found 1000000, expected numbers below"),
        ([1], {"allowed_token_ids": [10**6]}, "allowed_token_ids: found 1000000"),
        ([1], {"allowed_token_ids": [0], "min_tokens": 1}, "found nothing but ends of texts"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(engine, prompt, options, message):
    """Before anything is computed, and nothing is left of them."""
    with pytest.raises(InvalidInput, match=message):
        engine.generate([[1, 2], prompt], options)
    assert not engine.has_unfinished_requests
    assert engine.stats().waiting == 0


def test_a_request_larger_than_the_pool_is_refused():
    """With the numbers; one that fits exactly is served."""
    engine = engine_with_pages(decoder("Llama"), 5, 4, max_num_seqs=2)
    with pytest.raises(InvalidInput, match="which take 6 pages, expected at most 5"):
        engine.generate([1] * 16, SamplingParams(max_tokens=6, temperature=0))
    assert len(token_ids(engine.generate([1] * 16, SamplingParams(max_tokens=5, temperature=0)))[0]) == 5


def test_ids_priorities_and_texts_are_checked(engine):
    """A duplicate id, an unknown priority, and a text for a model without a tokenizer."""
    engine.add_request("same", TEXT, GREEDY)
    with pytest.raises(InvalidInput, match="Request id same is in use"):
        engine.add_request("same", TEXT, GREEDY)
    engine.abort("same")
    engine.step()
    with pytest.raises(InvalidInput, match="priority: found 'urgent', expected one of: critical, high, normal, low"):
        engine.generate(TEXT, GREEDY, priority="urgent")
    bare = open_engine(decoder("Llama"), kv_cache_mb=2)
    with pytest.raises(InvalidInput, match="without a tokenizer, expected token ids"):
        bare.generate(TEXT)
    with pytest.raises(InvalidInput, match="without a tokenizer, expected stop_token_ids"):
        bare.generate([1], {"stop": ["x"]})


def test_bf16_is_served(folder):
    """ES-018: the weights are bf16, and the probe has held the logits to those of eager bf16."""
    engine = Engine.from_pretrained(folder, kv_cache_mb=2, precision="bf16")
    assert engine.decoder.model.dtype == torch.bfloat16
    (output,) = engine.generate(TEXT, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 8


def test_logprobs_come_with_each_token(engine):
    """The chosen token's is among them, and greedy chooses the highest."""
    (output,) = engine.generate(TEXT, SamplingParams(max_tokens=6, temperature=0, logprobs=2, ignore_eos=True))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert [max(each, key=each.__getitem__) for each in completion.logprobs] == list(completion.token_ids)
    assert all(len(each) == 2 for each in completion.logprobs)
