"""Packages that cannot be served: one line that names the package, what was found and what is expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import load_package
from penstock.workers.generation.served import GenerateRuntime
from tests.workers.generation.architectures import REFUSED, decoder
from tests.workers.generation.packages import write_writer


def _refusal(package: Path) -> str:
    runtime = GenerateRuntime(load_package(package))
    with pytest.raises(ConfigurationError) as refused:
        runtime.load("cpu", 1)
    runtime.close()
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("name", sorted(REFUSED)[:2])
def test_unsupported_architecture_is_refused_by_name(name: str, tmp_path: Path):
    """When its package is loaded, so that no job of it is accepted for a wrong text."""
    package = write_writer(tmp_path)
    for file in package.glob("*.safetensors"):
        file.unlink()
    model = decoder(name)
    model.save_pretrained(package)
    found = _refusal(package)
    assert found.startswith("writer/1: ")
    assert type(model).__name__ in found


@pytest.mark.parametrize(
    ("generate", "expected"),
    [
        ({"max_model_len": 512}, "max_model_len: found 512, expected at most 256 for this model"),
        ({"kv_cache_mb": 0.001}, "kv_cache_mb: found 0.001, expected at least"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(generate: dict[str, Any], expected: str, tmp_path: Path):
    """They are known when its configuration is read."""
    assert f"writer/1: {expected}" in _refusal(write_writer(tmp_path, **generate))


def test_damaged_configuration_is_refused(tmp_path: Path):
    """A folder whose model no code of transformers has."""
    package = write_writer(tmp_path)
    (package / "config.json").write_text('{"model_type": "unheard-of"}')
    assert "is no model that can be loaded" in _refusal(package)
