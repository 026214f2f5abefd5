"""Packages of format `generate`: what model.yaml may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import ModelSpec, load_package


def written(root: Path, **fields: Any) -> Path:
    """A package without usable weights: reading its model.yaml needs none."""
    folder = root / "writer" / "1"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    plain = {"name": "writer", "version": "1", "format": "generate"}
    (folder / "model.yaml").write_text(yaml.safe_dump(plain | fields))
    return folder


def test_package_has_inputs_and_outputs_of_its_own(tmp_path: Path):
    """It streams, and a client reads the same spec from the broker."""
    spec = load_package(written(tmp_path)).spec
    assert [one.name for one in spec.inputs] == ["prompt", "prompt_token_ids", "messages", "tools", "sampling_params"]
    assert [one.name for one in spec.outputs] == [
        *("text", "token_ids", "finish_reason", "usage", "logprobs", "message", "prompt_logprobs")
    ]
    assert spec.streams
    assert ModelSpec.from_json(spec.to_json()) == spec


def test_profile_gives_values_that_the_package_has_not(tmp_path: Path):
    """The package's own come first."""
    section = {"profile": "memory_constrained", "max_num_seqs": 3}
    found = load_package(written(tmp_path, generate=section)).spec.generate
    assert found is not None
    assert (found.max_model_len, found.max_num_seqs, found.page_size) == (2048, 3, 32)


@pytest.mark.parametrize(
    ("section", "megabytes", "share"),
    [
        ({}, None, None),
        ({"profile": "gpu"}, None, 0.85),
        ({"profile": "gpu", "kv_cache_mb": 64}, 64, None),
        ({"profile": "memory_constrained"}, None, None),
        ({"profile": "memory_constrained", "hbm_utilization": 0.7}, None, 0.7),
    ],
)
def test_pages_are_sized_in_one_way(tmp_path: Path, section: dict[str, Any], megabytes: Any, share: Any):
    """The package's own replaces that of its profile, also where it is of the other kind. Where there is none, the
    device of the engine decides."""
    found = load_package(written(tmp_path, device="cuda", generate=section)).spec.generate
    assert found is not None
    assert (found.kv_cache_mb, found.hbm_utilization) == (megabytes, share)
    assert found.engine_options()["attention"] == "auto"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"generate": {"page_sise": 16}}, "generate.page_sise: unknown field, expected page_size"),
        ({"generate": {"max_num_seqs": 0}}, "generate.max_num_seqs: found 0, expected"),
        ({"generate": {"max_num_seqs": 16, "max_num_batched_tokens": 8}}, "each running request needs a token"),
        (
            {"source": {}, "generate": {"runtime_url": "http://a:1"}},
            "source: found weights beside generate.runtime_url",
        ),
        (
            {"generate": {"runtime_url": "http://a:1", "page_size": 32}},
            "page_size: found beside runtime_url, expected none",
        ),
        (
            {"generate": {"runtime_url": "http://a:1", "runtime_fields": ["logprobs"]}},
            "found 'logprobs', expected sampl",
        ),
        (
            {"generate": {"runtime_url": "http://a:1", "runtime_key": "AWS_SECRET"}},
            "a variable that ends with _RUNTIME_",
        ),
        (
            {"generate": {"runtime_url": "http://a:1", "runtime_key": "PENSTOCK_RUNTIME_KEY"}},
            "expected the name of a v",
        ),
        ({"generate": {"runtime_model": "a"}}, "runtime_model: found without runtime_url"),
        (
            {"generate": {"runtime_url": "ftp://a"}},
            "generate.runtime_url: found a text that is no URL of http or https",
        ),
        ({"generate": {"runtime_url": "http://a:0"}}, "no URL of http or https"),
        ({"generate": {"runtime_url": "http://a b"}}, "found a text that is no URL, expected the address"),
        ({"generate": {"runtime_url": "http://me:pass@a"}}, "found a URL with a user, a query or a fragment"),
        ({"instances": 2}, "instances: found 2, expected 1 for format generate"),
        ({"concurrency": 2}, "concurrency: found 2, expected 1: generate.max_num_seqs"),
        ({"generate": {"hbm_utilization": 1.1}}, "generate.hbm_utilization: found 1.1, expected"),
        (
            {"generate": {"hbm_utilization": 0.9, "kv_cache_mb": 4}},
            "found kv_cache_mb and hbm_utilization, expected one",
        ),
        ({"device": "cpu", "generate": {"profile": "gpu"}}, "generate.hbm_utilization: found one with device cpu"),
        ({"precision": "fp16"}, "precision: found fp16, expected auto, fp32 or bf16"),
        ({"entrypoint": "model:build"}, "entrypoint: found one, expected none for format generate"),
        ({"outputs": [{"name": "y", "dtype": "int64", "shape": ["batch"]}]}, "outputs: found some, expected none"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, fields: dict[str, Any], expected: str):
    """In one line with the field."""
    with pytest.raises(ConfigurationError, match=expected):
        load_package(written(tmp_path, **fields))


def test_other_formats_have_no_engine(tmp_path: Path):
    """A section that nothing reads is refused."""
    with pytest.raises(ConfigurationError, match="generate: found one, expected none for format python"):
        load_package(
            written(
                tmp_path,
                format="python",
                entrypoint="model:build",
                generate={},
                inputs=[{"name": "x", "dtype": "int64", "shape": ["batch"]}],
                outputs=[{"name": "y", "dtype": "int64", "shape": ["batch"]}],
            )
        )


def test_package_of_another_server_has_no_weights(tmp_path: Path):
    """A client reads from the broker what the server obeys."""
    folder = written(tmp_path, generate={"runtime_url": "http://127.0.0.1:8000/v1/", "runtime_fields": ["top_k"]})
    (folder / "model.safetensors").unlink()
    spec = load_package(folder).spec
    assert spec.source is None
    assert spec.generate is not None
    assert spec.generate.runtime_url == "http://127.0.0.1:8000"
    assert ModelSpec.from_json(spec.to_json()) == spec


def test_secret_of_a_url_is_in_no_message(tmp_path: Path):
    """A user and a password are refused without being repeated."""
    with pytest.raises(ConfigurationError) as refused:
        load_package(written(tmp_path, generate={"runtime_url": "http://me:s3cret@a"}))
    assert "s3cret" not in str(refused.value)
