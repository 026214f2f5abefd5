"""The policy of a version: a package's own value, the setting in its place, and the rules that override both.

For the batch size by level see test_version.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.registry.package import ModelSpec
from penstock.registry.settings_sections import InferenceConfig
from penstock.workers.versions.policy import VersionPolicy
from tests.registry.package.documents import ENCODER, PLAIN, changed

CONFIGURED = {
    "precision": "bf16",
    "timeout_seconds": 20,
    "batching": {"max_wait_ms": 40, "target_latency_ms": 250},
    "cache": {"ttl_seconds": 600},
    "queue": {"ageing_s": 7},
}
TEXT_OUT = [{"name": "text", "dtype": "string", "shape": ["batch"]}]
TOKENS: dict[str, Any] = {"inputs": [{"name": "x", "dtype": "int64", "shape": ["batch", "sequence"]}]}


def spec_of(base: dict[str, Any] = PLAIN, **fields: Any) -> ModelSpec:
    """The spec of a model.yaml with some fields replaced."""
    return ModelSpec.model_validate(changed(base, **fields))


def policy_of(spec: ModelSpec, **settings: Any) -> VersionPolicy:
    """The policy of a package under these settings."""
    return VersionPolicy.of(spec, InferenceConfig.model_validate(settings))


def test_settings_apply_to_a_package_without_own_values():
    """Milliseconds of settings become seconds."""
    policy = policy_of(spec_of(), **CONFIGURED)
    assert (policy.precision, policy.timeout_s, policy.cache_ttl_s) == ("bf16", 20.0, 600.0)
    assert (policy.target_latency_s, policy.limits.max_wait_s, policy.limits.ageing_s) == (0.25, 0.04, 7.0)
    assert policy.concurrency == 1


def test_the_package_comes_before_the_settings():
    """Its own limits and time-outs replace those of the settings."""
    batching = {"max_wait_ms": 2, "length_input": "x", "max_tokens": 512, "max_bytes": 4096, "sort_window": 8}
    policy = policy_of(
        spec_of(
            **TOKENS,
            batching=batching,
            timeout_s=3.5,
            concurrency=4,
            policy={"default": {"precision": "fp16", "cache_ttl_s": 60.0}},
        ),
        **CONFIGURED,
    )
    assert (policy.precision, policy.timeout_s, policy.cache_ttl_s, policy.concurrency) == ("fp16", 3.5, 60.0, 4)
    limits = policy.limits
    assert (limits.max_wait_s, limits.max_tokens, limits.max_bytes, limits.sort_window) == (0.002, 512, 4096, 8)


@pytest.mark.parametrize("section", [{"default": {"window_ms": 0.0}}, {"endpoints": {"infer": {"window_ms": 0.0}}}])
def test_a_window_of_zero_is_a_value(section: dict[str, Any]):
    """The policy's window comes before the model's and the setting's, also a window without any wait."""
    spec = spec_of(batching={"max_wait_ms": 9}, policy=section)
    assert policy_of(spec, **CONFIGURED).limits.max_wait_s == 0.0


@pytest.mark.parametrize(
    ("fields", "settings", "expected"),
    [
        ({}, {}, True),
        ({"batching": {"max_batch_size": 8}}, {}, False),
        ({}, {"batching": {"max_batch_size": 8}}, False),
        ({}, {"max_level": 1}, False),
        ({"streams": True}, {}, False),
    ],
    ids=["no size", "package", "setting", "no batching", "streams"],
)
def test_memory_decides_the_batch_size_only_where_nothing_else_does(
    fields: dict[str, Any], settings: dict[str, Any], expected: bool
):
    """A size in the package or in the settings is kept, and a model without batches needs no measurement."""
    assert policy_of(spec_of(**fields), **settings).is_sized_by_memory is expected


def test_a_streaming_model_has_one_row_and_no_sort_window():
    """Its jobs run one at a time: nothing is sorted, and no answer is shared or cached."""
    policy = policy_of(spec_of(streams=True, batching={"sort_window": 8}))
    assert (policy.limits.max_rows, policy.limits.sort_window) == (1, 1)
    assert (policy.shares_flights, policy.cache_ttl_s) == (False, 0.0)


@pytest.mark.parametrize(
    ("fields", "settings", "shares", "caches"),
    [
        ({}, {}, True, True),
        ({"deterministic": False}, {}, False, False),
        ({}, {"enabled": False}, False, False),
        ({}, {"batching": {"single_flight": False}}, False, True),
        ({}, {"cache": {"enabled": False}}, True, False),
        ({"policy": {"default": {"cache_ttl_s": 0.0}}}, {}, True, False),
    ],
    ids=["default", "chance", "enabled", "single_flight", "cache.enabled", "cache_ttl_s"],
)
def test_equal_jobs_share_answers_where_answers_repeat(
    fields: dict[str, Any], settings: dict[str, Any], shares: bool, caches: bool
):
    """One forward for simultaneous jobs and one cached answer for later jobs are switched off separately."""
    policy = policy_of(spec_of(**fields), **settings)
    assert (policy.shares_flights, policy.cache_ttl_s > 0) == (shares, caches)


@pytest.mark.parametrize(
    ("fields", "settings", "ttl_s"),
    [
        ({}, {}, 86400.0),
        ({"policy": {"default": {"cache_ttl_s": 60.0}}}, {}, 60.0),
        ({"policy": {"default": {"cache_ttl_s": 0.0}}}, {}, 0.0),
        ({"deterministic": False}, {}, 0.0),
        ({}, {"cache": {"enabled": False}}, 0.0),
        ({}, {"privacy": {"mode": "hashes_only"}}, 0.0),
    ],
    ids=["default", "own", "off", "chance", "cache.enabled", "hashes_only"],
)
@pytest.mark.parametrize("generate", [{}, {"runtime_url": "http://127.0.0.1:8000"}], ids=["engine", "server"])
def test_generated_texts_are_cached_and_not_shared(
    generate: dict[str, Any], fields: dict[str, Any], settings: dict[str, Any], ttl_s: float
):
    """CF-052: each of the equal jobs that are here together streams; a later one finds the text."""
    spec = {"name": "writer", "version": "1", "format": "generate", "generate": generate, **fields}
    policy = policy_of(ModelSpec.model_validate(spec if generate else {**spec, "source": {}}), **settings)
    assert (policy.shares_flights, policy.cache_ttl_s) == (False, ttl_s)


@pytest.mark.parametrize("settings", [{"privacy": {"mode": "hashes_only"}}, {"cache": {"privacy_mode": "hashes_only"}}])
def test_text_is_not_cached_where_inputs_are_hidden(settings: dict[str, Any]):
    """An output text may repeat the input: the stricter privacy mode counts, and numbers are still cached."""
    policy = {"default": {"cache_ttl_s": 60.0}}
    assert policy_of(spec_of(outputs=TEXT_OUT, policy=policy), **settings).cache_ttl_s == 0.0
    assert policy_of(spec_of(policy=policy), **settings).cache_ttl_s == 60.0
    assert policy_of(spec_of(outputs=TEXT_OUT, policy=policy)).cache_ttl_s == 60.0


@pytest.mark.parametrize("section", [{"privacy": "mode"}, {"cache": "privacy_mode"}], ids=str)
@pytest.mark.parametrize("mode", ["ephemeral", "hashes_only", "persisted_encrypted"])
def test_texts_of_exceptions_are_withheld_where_inputs_must_not_leave(section: dict[str, str], mode: str):
    """The stricter one of both settings applies."""
    settings = {name: {key: mode} for name, key in section.items()}
    assert policy_of(spec_of(), **settings).withholds_texts == (mode != "ephemeral")


def test_finite_outputs_are_floats_that_may_not_be_nan():
    """Integers cannot be NaN, and an output may allow it."""
    shape = {"shape": ["batch"]}
    outputs = [
        {"name": "score", "dtype": "float32", **shape},
        {"name": "half", "dtype": "float16", **shape},
        {"name": "label", "dtype": "int64", **shape},
        {"name": "mask", "dtype": "float32", "allow_nan": True, **shape},
    ]
    assert policy_of(spec_of(outputs=outputs)).finite_outputs == ("score", "half")


def test_only_a_transformers_model_tokenises():
    """Its runtime cuts batches by length itself: a larger fixed cost makes the batcher fill them first."""
    encoder, plain = policy_of(spec_of(ENCODER)), policy_of(spec_of())
    assert (encoder.tokenises, plain.tokenises) == (True, False)
    assert encoder.limits.overhead_tokens > 1000 * plain.limits.overhead_tokens
