"""Each field of a package of format `generate` reaches what it is for, and its weights may lie where `source` says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import load_package
from penstock.registry.package.generation import PROFILE_SIZES, PROFILES, Generation
from penstock.registry.tensors import Array
from penstock.safety.validators.builtin import GenerationValidator
from penstock.safety.validators.comparison import Verdict
from penstock.workers.generation import engine as engine_module
from penstock.workers.generation.config import CacheConfig, Config, SchedulerConfig
from penstock.workers.generation.engine import Engine
from penstock.workers.generation.prefix_cache import PrefixCache
from penstock.workers.generation.served import GenerateRuntime
from penstock.workers.generation.tool_calls import TOOL_PARSERS
from tests.flow.conftest import amend
from tests.workers.generation.engines import byte_tokenizer
from tests.workers.generation.packages import write_writer
from tests.workers.generation.replayed_device import ReplayedDevice, provide

COMMIT = "0123456789" * 4
GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@contextmanager
def loaded(package: Path) -> Iterator[GenerateRuntime]:
    """The package's runtime, on one thread of the CPU."""
    runtime = GenerateRuntime(load_package(package))
    runtime.load("cpu", 1)
    try:
        yield runtime
    finally:
        runtime.close()


def engine_of(runtime: GenerateRuntime) -> Engine:
    backend: Any = runtime._loaded
    engine: Engine = backend.engine
    return engine


def answer(runtime: GenerateRuntime, inputs: Mapping[str, Any], **params: Any) -> dict[str, Array]:
    """The outputs of one job."""
    given = {name: value if name == "prompt_token_ids" else np.array([value], object) for name, value in inputs.items()}
    sampling = np.array([json.dumps({**GREEDY, **params})], object)
    return runtime.run(runtime.prepare([{**given, "sampling_params": sampling}]))


def _prefixes(engine: Engine) -> PrefixCache:
    assert engine.pages.prefixes is not None
    return engine.pages.prefixes


# Options of the engine

REACHED: dict[str, tuple[Any, Callable[[Engine], Any], Any]] = {
    "max_model_len": (100, lambda engine: engine.decoder.max_positions, 100),
    "max_num_seqs": (3, lambda engine: engine.scheduler.config.max_num_seqs, 3),
    "max_num_batched_tokens": (77, lambda engine: engine.scheduler.config.max_num_batched_tokens, 77),
    "max_long_prefill_tokens": (9, lambda engine: engine.scheduler.config.max_long_prefill_tokens, 9),
    "num_speculative_tokens": (5, lambda engine: engine.config.scheduler.num_speculative_tokens, 5),
    "page_size": (8, lambda engine: engine.pages.page_size, 8),
    # A page of 16 tokens: keys and values of two layers, two heads of 16 numbers in fp32.
    "kv_cache_mb": (2, lambda engine: engine.pages.num_pages, 2_000_000 // (16 * 2 * 2 * 2 * 16 * 4)),
    "enable_prefix_caching": (False, lambda engine: engine.pages.prefixes, None),
    "prefix_cache_capacity": (1.0, lambda engine: _prefixes(engine).capacity, 487),
    "ageing_steps": (7, lambda engine: engine.scheduler.config.ageing_steps, 7),
    "joined_linears": ("on", lambda engine: engine.joined_linears, 4),
    "packed_linears": ("off", lambda engine: engine.packing.layers, 0),
    "async_scheduling": ("on", lambda engine: engine._steps.is_async, True),
}
"""Option -> value in model.yaml, where the engine has it, the value there."""


def _is_compiled(engine: Engine) -> bool:
    graphs = engine.forwards.graphs
    assert graphs is not None
    return graphs._compiled is not None


REACHED_ON_A_GPU: dict[str, tuple[Any, Callable[[Engine], bool]]] = {
    "attention": ("sdpa", lambda engine: engine.decoder.kernel is None),
    "cuda_graphs": (False, lambda engine: engine.forwards.graphs is None),
    "compile_decoding": (True, _is_compiled),
}
"""Option -> value in model.yaml, whether the engine is made so: false by default."""


@pytest.mark.parametrize("name", sorted(REACHED))
def test_option_of_a_package_reaches_the_engine(name: str, tmp_path: Path):
    """Its value is not the default, and the engine's own part has it."""
    value, read, expected = REACHED[name]
    assert value != Generation.model_fields[name].default
    with loaded(write_writer(tmp_path, **{name: value})) as runtime:
        assert read(engine_of(runtime)) == expected


@pytest.mark.parametrize("name", sorted(REACHED_ON_A_GPU))
def test_option_of_a_package_reaches_an_engine_on_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A CPU stands in for it: the engine has another part than the same package without the option."""
    monkeypatch.setattr(engine_module, "_device", lambda config: ReplayedDevice())
    value, is_so = REACHED_ON_A_GPU[name]
    found = []
    with provide():
        for folder, options in (("plain", {}), ("own", {name: value})):
            with loaded(write_writer(tmp_path / folder, max_num_seqs=2, **options)) as runtime:
                found.append(is_so(engine_of(runtime)))
    assert found == [False, True]


def test_package_has_every_option_of_an_engine():
    """But for those that a worker gives. A share of a GPU's memory is tested where the pages are sized."""
    own = {each.name for part in (CacheConfig, SchedulerConfig, Config) for each in fields(part)}
    given = set(Generation().engine_options())
    assert given == (own | {"profile"}) - {"cache", "scheduler", "precision", "device", "cache_dir"}
    assert {*REACHED, *REACHED_ON_A_GPU} == given - {"hbm_utilization", "profile"}


@pytest.mark.parametrize(("number", "has_guesses"), [(0, False), (3, True)])
def test_guesses_are_as_the_package_says(number: int, has_guesses: bool, tmp_path: Path):
    """A text of one token, again and again: guesses are made, or none."""
    with loaded(write_writer(tmp_path, num_speculative_tokens=number)) as runtime:
        answer(runtime, {"prompt": "a"}, max_tokens=50, allowed_token_ids=[70])
        figures = runtime.take_figures()
        assert figures is not None
        assert (figures.drafted > 0) == has_guesses


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (512, 64)),
        ({"max_num_batched_tokens": None, "max_long_prefill_tokens": None}, (512, 64)),
        ({"device": "cuda:0", "max_num_batched_tokens": None}, (2048, 2048)),
        ({"device": "cuda", "max_long_prefill_tokens": 100}, (2048, 100)),
        ({"device": "cuda", "max_num_batched_tokens": 300}, (300, 2048)),
    ],
)
def test_device_decides_the_tokens_of_a_step(options: dict[str, Any], expected: tuple[int, int]):
    """Where nobody else does. A package that says nothing gives None."""
    scheduler = Config.from_options(options).scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_long_prefill_tokens) == expected


# Profiles


@pytest.mark.parametrize("own", [{}, {"max_model_len": 1000, "max_num_seqs": 3, "page_size": 8, "kv_cache_mb": 1.0}])
@pytest.mark.parametrize("profile", ["gpu", "memory_constrained"])
def test_values_of_a_profile_reach_the_engine(profile: str, own: dict[str, Any], tmp_path: Path):
    """ES-054, ES-055: positions, seats, page size and the size of all pages. The package's own values come first."""
    # The share of a GPU's memory cannot be had on a CPU.
    sized = {"kv_cache_mb": 16.0} if profile == "gpu" else {}
    package = write_writer(tmp_path, positions=8192)
    amend(package, generate={"profile": profile, "packed_linears": "off", **sized, **own})
    expected = {**PROFILES[profile], **PROFILE_SIZES.get(profile, {}).get("cpu", {}), **sized, **own}
    with loaded(package) as runtime:
        engine = engine_of(runtime)
        figures = runtime.take_figures()
        assert figures is not None
        assert engine.decoder.max_positions == expected["max_model_len"]
        assert figures.seats == expected["max_num_seqs"]
        assert engine.pages.page_size == expected["page_size"]
        page_nbytes = expected["page_size"] * 2 * 2 * 2 * 16 * 4
        assert engine.pages.num_pages == int(expected["kv_cache_mb"] * 1_000_000) // page_nbytes
        assert len(answer(runtime, {"prompt": "a"})["token_ids"][0]) == GREEDY["max_tokens"]


@pytest.mark.parametrize(
    ("profile", "own", "device", "expected"),
    [
        ("gpu", {}, "cuda", (None, 0.85)),
        ("gpu", {"hbm_utilization": 0.5}, "cuda", (None, 0.5)),
        ("memory_constrained", {}, "cuda:1", (None, 0.7)),
        ("memory_constrained", {}, "cpu", (64.0, None)),
        ("memory_constrained", {"kv_cache_mb": 3}, "cuda", (3, None)),
        ("memory_constrained", {"hbm_utilization": 0.5}, "cuda", (None, 0.5)),
    ],
)
def test_pages_of_a_profile_are_sized_as_the_device_says(profile: Any, own: Any, device: str, expected: Any):
    """ES-054, ES-055: a share of a GPU's memory, or megabytes; of a package, and of an engine alone."""
    package = Generation(profile=profile, **own).engine_options()
    for options in (package, {"profile": profile, **own}):
        config = Config.from_options({**options, "device": device})
        assert (config.cache.kv_cache_mb, config.cache.hbm_utilization) == expected
        assert (config.max_model_len, config.scheduler.max_num_seqs, config.cache.page_size) == (
            (4096, 32, 64) if profile == "gpu" else (2048, 8, 32)
        )


def test_unknown_profile_of_an_engine_is_refused():
    """With those that there are."""
    with pytest.raises(ConfigurationError, match="profile: found 'tpu', expected one of: gpu, memory_constrained"):
        Config.from_options({"profile": "tpu"})


# Chats


def test_template_of_the_package_makes_the_prompt(tmp_path: Path):
    """In place of the tokenizer's own, and for a tokenizer without one."""
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    package = write_writer(tmp_path, chat_template=template)
    (package / "chat_template.jinja").write_text("another")
    chat = json.dumps([{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
    with loaded(package) as runtime:
        found = answer(runtime, {"messages": chat})
        assert found["text"].tolist() == answer(runtime, {"prompt": "[one][two]"})["text"].tolist()


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("llama3_json", '{"name": "look", "parameters": {}}', 1),
        ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": {}}]', 1),
        ("hermes", '{"name": "look", "parameters": {}}', 0),
    ],
)
def test_parser_of_the_package_reads_the_calls(parser: str, text: str, calls: int, tmp_path: Path):
    """The template shows no form of calls. A model of random weights writes this text because nothing else may come."""
    package = write_writer(tmp_path, chat_template="{{ messages[0].content }}", tool_parser=parser)
    with loaded(package) as runtime:
        inputs = {"messages": json.dumps([{"role": "user", "content": "a"}]), "tools": json.dumps([TOOL])}
        found = answer(runtime, inputs, choice=[text], max_tokens=100, ignore_eos=False)
    assert found["text"].tolist() == [text]
    message = json.loads(found["message"][0])
    assert [call["function"]["name"] for call in message.get("tool_calls", [])] == ["look"] * calls


def test_every_parser_may_be_named():
    """The registry lists them without the worker's code."""
    found = [Generation.model_validate({"tool_parser": name}).tool_parser for name in TOOL_PARSERS]
    assert found == list(TOOL_PARSERS)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("a\n{% for %}", "writer/1: chat_template: found .* in line 2, expected a template of Jinja"),
        ("{% raise %}", "chat_template: found .* in line 1"),
    ],
)
def test_template_that_is_none_is_refused_at_load(template: str, expected: str, tmp_path: Path):
    """No chat could use it."""
    runtime = GenerateRuntime(load_package(write_writer(tmp_path, chat_template=template)))
    with pytest.raises(ConfigurationError, match=expected):
        runtime.load("cpu", 1)
    runtime.close()


def test_template_for_a_model_without_a_tokenizer_is_refused(tmp_path: Path):
    """Nothing could read the prompt that it makes."""
    package = write_writer(tmp_path, chat_template="a")
    for file in package.glob("tokenizer*"):
        file.unlink()
    runtime = GenerateRuntime(load_package(package))
    with pytest.raises(ConfigurationError, match="chat_template: found one for a model without a tokenizer"):
        runtime.load("cpu", 1)
    runtime.close()


# Precision


def test_bf16_package_stays_within_the_validator_of_texts(tmp_path: Path):
    """ES-018: the next token at 120 prompts, by the limits for a candidate that need not be equal to fp32."""
    prompts = np.random.default_rng(5).integers(1, len(byte_tokenizer()), (120, 12))
    tokens: dict[str, Array] = {}
    logprobs: dict[str, list[str]] = {}
    for precision in ("fp32", "bf16"):
        package = write_writer(tmp_path / precision)
        amend(package, precision=precision)
        with loaded(package) as runtime:
            weights = engine_of(runtime).decoder.model.dtype
            found = [answer(runtime, {"prompt_token_ids": row[None]}, max_tokens=1, logprobs=1) for row in prompts]
        assert str(weights) == {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[precision]
        tokens[precision] = np.concatenate([each["token_ids"] for each in found])
        logprobs[precision] = [each["logprobs"][0] for each in found]
    assert logprobs["bf16"] != logprobs["fp32"]
    assert GenerationValidator().compare(tokens["bf16"], tokens["fp32"]).verdict is Verdict.PASS
    assert GenerationValidator().compare(tokens["bf16"][::-1], tokens["fp32"]).verdict is Verdict.FAIL


# Weights


@pytest.mark.parametrize("place", ["folder", "package", "hub"])
def test_weights_lie_where_source_says(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder of the package, an installed Python package, and the hub's local cache write the same text."""
    with loaded(write_writer(tmp_path / "plain")) as runtime:
        expected = answer(runtime, {"prompt": "the stream"})["text"].tolist()
    package = write_writer(tmp_path / "models")
    weights = {
        "folder": package / "weights",
        "package": tmp_path / "installed" / "some_weights" / "model",
        "hub": tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT / "model",
    }[place]
    weights.mkdir(parents=True)
    for file in package.iterdir():
        if file.is_file() and file.name != "model.yaml":
            shutil.move(file, weights / file.name)
    (tmp_path / "installed").mkdir(exist_ok=True)
    (weights.parent / "__init__.py").touch()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.syspath_prepend(tmp_path / "installed")
    source = {
        "folder": {"path": "weights"},
        "package": {"package": "some_weights", "path": "model"},
        "hub": {"hub": "org/tiny", "revision": COMMIT, "path": "model"},
    }[place]
    amend(package, source=source)
    with loaded(package) as runtime:
        assert answer(runtime, {"prompt": "the stream"})["text"].tolist() == expected
