"""Structured text: what a random model writes parses and validates, because other tokens are masked."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from penstock.registry.errors import InvalidInput, MissingRequirement
from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation import Engine
from penstock.workers.generation.structure import StructureCompiler
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import byte_tokenizer, open_engine
from tests.workers.generation.schemas import OPEN, random_schema

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
MOST = 400


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Like those of sentencepiece: a space is a part of a token, and unknown characters are written in bytes."""
    unknown: dict[str, Any] = {"unk_token": "<unk>"}
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, **unknown))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    alphabet = [chr(at) for at in range(33, 127)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the name of a stream", "tags of the age", '{"name": "a", "age": 1}'], trainer)
    # The bytes are ordinary tokens: only the first two are special.
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = made["added_tokens"][:2]
    options: dict[str, Any] = {"eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(made)), **options)


def model_for(tokenizer: Any) -> Any:
    """A random model of its vocabulary, with logits for a few tokens that no tokenizer has."""
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 5,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1_024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    return decoder("Llama", config=config)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Of a byte-level tokenizer."""
    tokenizer = byte_tokenizer()
    return open_engine(model_for(tokenizer), tokenizer, kv_cache_mb=16, max_num_seqs=16)


def assert_valid(engine: Engine, schemas: list[dict[str, Any]], **options: Any) -> None:
    """Each text ends by itself, parses, and validates."""
    names = {}
    for at, schema in enumerate(schemas):
        params = SamplingParams(json_schema=schema, max_tokens=MOST, seed=at, frequency_penalty=2, **options)
        names[engine.add_request(None, f"write {at}", params)] = schema
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.finished:
                completion, schema = output.outputs[0], names.pop(output.request_id)
                assert completion.finish_reason == "stop", (schema, completion.text)
                validate(completion.text, schema)
    assert names == {}


def validate(text: str, schema: dict[str, Any]) -> None:
    """Raises what is wrong with it, also by the formats of strings."""
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


def test_two_hundred_random_schemas_are_held(engine):
    """By a model that knows nothing, at several temperatures: all of the texts parse and validate."""
    for start in range(0, 200, 50):
        schemas = [random_schema(seed) for seed in range(start, start + 50)]
        assert_valid(engine, schemas, temperature=0.5 + start / 100)


@pytest.mark.parametrize("schema", OPEN, ids=str)
def test_open_forms_are_held(engine, schema):
    """A text that ends by itself validates. Some do: the token that ends strings is made more probable."""
    (quote,) = engine.decoder.tokenizer('"')["input_ids"]
    options: dict[str, Any] = {"max_tokens": 120, "frequency_penalty": 2, "logit_bias": {quote: 10}}
    params = [SamplingParams(json_schema=schema, seed=seed, **options) for seed in range(12)]
    found = [engine.generate("write", each)[0].outputs[0] for each in params]
    ended = [one.text for one in found if one.finish_reason == "stop"]
    assert len(ended) >= 4
    for text in ended:
        validate(text, schema)
    assert all(one.finish_reason in ("stop", "length") for one in found)


def test_wrong_texts_are_seen():
    """The check of these tests fails for each kind of schema."""
    defined = random_schema(0)["$defs"]
    for text, schema in (
        ('{"x": 7}', {"$defs": defined, "properties": {"x": {"$ref": "#/$defs/word"}}}),
        ("5", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        ('"2026-13-01"', {"type": "string", "format": "date"}),
        ('"1.2.3"', {"type": "string", "format": "ipv4"}),
        ("0", {"type": "number", "exclusiveMinimum": 0}),
    ):
        with pytest.raises(jsonschema.ValidationError):
            validate(text, schema)


def test_form_beyond_the_limits_of_its_compiler_fails_alone(engine):
    """With an error of its own; the text beside it goes on. The error repeats nothing of the text."""
    rules = [f"r{at}: A r{at} | A" for at in range(20)]
    heavy = "\n".join([f"start: {' | '.join(f'r{at}' for at in range(20))}", *rules, 'A: "a"'])
    (letter,) = engine.decoder.tokenizer("a")["input_ids"]
    light = SamplingParams(regex="[ab]{150}", max_tokens=MOST, seed=1)
    expected = engine.generate("write", light)[0].outputs
    engine.add_request("heavy", "write", SamplingParams(grammar=heavy, max_tokens=MOST, logit_bias={letter: 100}))
    engine.add_request("light", "write", light)
    ended: dict[str, Any] = {}
    while engine.has_unfinished_requests:
        ended |= {output.request_id: output.outputs for output in engine.step() if output.finished}
    assert ended["light"] == expected
    assert ended["heavy"][0].finish_reason == "error"
    assert 50 < len(ended["heavy"][0].token_ids) < MOST
    with pytest.raises(InvalidInput, match=r"^grammar: .*items.*, expected a form that takes less memory and time$"):
        engine.generate("write", SamplingParams(grammar=heavy, max_tokens=MOST, logit_bias={letter: 100}))


def test_without_the_masks_the_text_is_no_json(engine):
    """The same model and seeds write something else, so the test above can fail."""
    output = engine.generate("write 0", SamplingParams(max_tokens=60, seed=0))[0].outputs[0]
    with pytest.raises(json.JSONDecodeError):
        json.loads(output.text)


def test_tokenizers_with_a_space_in_their_tokens_are_bridged():
    """ES-034 and the issue: sentencepiece's form, where unknown characters are bytes."""
    tokenizer = metaspace_tokenizer()
    assert tokenizer.decode(tokenizer("the größe")["input_ids"]) == "the größe"
    engine = open_engine(model_for(tokenizer), tokenizer, kv_cache_mb=16, max_num_seqs=8)
    assert_valid(engine, [PERSON, *(random_schema(seed) for seed in range(6))])
    choice = SamplingParams(choice=["the stream", "日本語"], seed=3, max_tokens=40)
    assert engine.generate("write", choice)[0].outputs[0].text in ("the stream", "日本語")


def test_regex_choice_and_grammar_are_held(engine):
    """The whole text matches, and ends when nothing can follow."""
    date = "[0-9]{4}-(0[1-9]|1[0-2])"
    grammar = 'start: "(" start ")" | WORD\nWORD: /[a-c]{1,3}/'
    for seed in range(8):
        regex, choice, lark = (
            engine.generate("write", SamplingParams(seed=seed, max_tokens=MOST, **form))[0].outputs[0]
            for form in ({"regex": date}, {"choice": ["ja", "nein", "größe 🙂"]}, {"grammar": grammar})
        )
        assert re.fullmatch(date, regex.text)
        assert choice.text in ("ja", "nein", "größe 🙂")
        if lark.finish_reason == "stop":
            assert re.fullmatch(r"(\(*)[a-c]{1,3}(\)*)", lark.text)
            assert lark.text.count("(") == lark.text.count(")")
        assert regex.finish_reason == choice.finish_reason == "stop"


def test_a_form_is_held_in_any_company_and_after_preemption(engine):
    """The same seed writes the same; several texts of one request each have their own place in the form."""
    params = [SamplingParams(json_schema=PERSON, seed=seed, max_tokens=60) for seed in range(5)]
    prompt = [5, 6, 7, 8, 9]
    alone = [engine.generate([prompt], each)[0].outputs[0].token_ids for each in params]
    tokenizer = engine.decoder.tokenizer
    tight = open_engine(model_for(tokenizer), tokenizer, page_size=4, max_num_seqs=5, kv_cache_mb=0.047)
    (output,) = tight.generate([prompt], SamplingParams(json_schema=PERSON, seed=0, max_tokens=60, n=5))
    assert [each.token_ids for each in output.outputs] == alone
    assert tight.stats().preemptions > 0


def test_a_request_that_is_taken_over_gets_the_same_masks(engine):
    """A matcher that reads all tokens at once stands where the one stands that read them in turn."""
    params = SamplingParams(json_schema=PERSON, seed=1, max_tokens=60)
    tokens = engine.generate("write", params)[0].outputs[0].token_ids
    compiler = StructureCompiler(engine.decoder.tokenizer, engine.decoder.vocab_size, engine.decoder.eos_token_ids)
    grown = compiler.matcher(params)
    for end in range(len(tokens)):
        fresh = compiler.matcher(params)
        grown.follow(tokens[:end])
        fresh.follow(tokens[:end])
        assert grown.forbidden().equal(fresh.forbidden())
        assert not grown.forbidden()[tokens[end]]
    grown.follow(tokens)
    assert grown.is_complete


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": {"type": "strnig"}}, "json_schema: Invalid type: strnig, expected one that can be compiled"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema: Pointer '/nowhere' does not exist"),
        (
            {"json_schema": {"oneOf": [{"maximum": 5}, {"minimum": 2}]}},
            "json_schema: oneOf constraints are not supported",
        ),
        ({"json_schema": {"type": "string", "format": "zebra"}}, "json_schema: Unknown format: zebra"),
        ({"json_schema": {"not": {"type": "null"}}}, 'json_schema: Unimplemented keys: \\["not"\\]'),
        ({"regex": "a(b"}, "regex: error: unclosed group"),
        ({"grammar": "start: nowhere"}, 'grammar: .*unknown name: "nowhere"'),
    ],
    ids=str,
)
def test_forms_that_cannot_be_compiled_are_refused(engine, options, message):
    """Before anything is computed, in one line."""
    with pytest.raises(InvalidInput, match=message) as caught:
        engine.generate("write", options)
    assert "\n" not in str(caught.value)
    assert not engine.has_unfinished_requests


def test_forms_need_a_tokenizer_and_the_compiler(engine, monkeypatch):
    """Both are told before a request starts."""
    bare = open_engine(decoder("Llama"), kv_cache_mb=2)
    with pytest.raises(InvalidInput, match="regex: found it for a model without a tokenizer"):
        bare.generate([1], {"regex": "a"})
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingRequirement, match="expected the extra `generate`"):
        engine.generate("write", {"regex": "a"})


def test_a_text_that_is_too_short_for_its_form_says_so(engine):
    """The reason is the length: the caller knows that it is not complete."""
    output = engine.generate("write", SamplingParams(json_schema=PERSON, max_tokens=3, seed=0))[0].outputs[0]
    assert output.finish_reason == "length"
