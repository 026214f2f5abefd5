"""The sentence encoder: its vectors are those of the reference implementation, and texts are padded little."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.errors import ConfigurationError, InvalidInput, ModelError
from penstock.registry.package import load_package
from penstock.workers.runtime.transformers import EncoderRuntime, slice_by_length
from tests.servers import ROOT, leave_out, require_module
from tests.workers.runtime.formats import opened

SAMPLES = ROOT / "models"
TEXTS = [
    "Returns the date that a string stands for.",
    "",
    "Ein Satz mit Umlauten: äöü, und 数字 🙂.",
    "Compresses bytes. " * 120,
    "short",
    "a" * 5000,
]


def test_minilm_equals_sentence_transformers(minilm: EncoderRuntime):
    """Embeddings agree with the reference implementation to 1e-5, long, empty and foreign text included."""
    sentence_transformers = require_module("sentence_transformers")
    folder = load_package(SAMPLES / "minilm" / "1").source_folder()
    reference = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    ours = minilm.run(minilm.prepare([{"text": np.array(TEXTS, object)}]))["embedding"]
    np.testing.assert_allclose(ours, reference.encode(TEXTS, normalize_embeddings=True), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-5)


def test_minilm_pads_little_in_arrival_order(minilm: EncoderRuntime):
    """One long text does not make the short ones of its batch as dear as itself."""
    texts = ["a few words"] * 31 + ["word " * 250]
    prepared = minilm.prepare([{"text": np.array([text], object)} for text in texts])
    padded_together = 32 * max(piece.ids.shape[1] for piece in prepared.payload)
    assert prepared.padded_tokens <= 1.1 * prepared.tokens
    assert prepared.padded_tokens <= 0.1 * padded_together


def test_minilm_length_grows_with_the_text_up_to_what_is_read(minilm: EncoderRuntime):
    """The estimate orders jobs by cost and ends at the cut."""
    lengths = [minilm.length({"text": np.array([text], object)}) for text in ("", "a few words", "word " * 20)]
    assert lengths == sorted(set(lengths))
    assert minilm.length({"text": np.array(["short", "word " * 9000], object)}) == 256


def write_encoder(root: Path, **batching: object) -> Path:
    """MiniLM as a package with its own weights folder; returns its folder."""
    sample = load_package(SAMPLES / "minilm" / "1")
    folder = root / "encoder" / "1"
    shutil.copytree(sample.source_folder(), folder / "weights")
    document = yaml.safe_load((sample.folder / "model.yaml").read_text())
    document |= {"name": "encoder", "source": {"path": "weights"}}
    document["batching"] |= batching
    (folder / "model.yaml").write_text(yaml.safe_dump(document))
    return folder


def test_unreadable_tokenizer_is_one_clear_line(models_root: Path):
    """The load reports an interrupted download, without a path."""
    folder = write_encoder(models_root)
    (folder / "weights" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"^encoder/1: the weights or the tokenizer cannot be read \(\w+\)$"):
        opened(folder)


def test_limit_beyond_what_the_model_can_read_is_refused(models_root: Path):
    """More tokens than the model has positions would fail on the first long text."""
    folder = write_encoder(models_root, max_length=513)
    with pytest.raises(ConfigurationError, match=r"^encoder/1: batching\.max_length: found 513, expected at most 512"):
        opened(folder)


def test_weights_that_are_pooled_in_another_way_are_refused(models_root: Path):
    """A model trained for another pooling would answer with plausible nonsense."""
    folder = write_encoder(models_root)
    pooling = '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}'
    (folder / "weights" / "1_Pooling" / "config.json").write_text(pooling)
    with pytest.raises(ConfigurationError, match="pooled by cls_token, expected mean_tokens"):
        opened(folder)


@given(st.lists(st.integers(1, 256), min_size=1, max_size=64), st.integers(0, 512))
def test_slices_hold_every_row_once_and_pad_within_the_cost_of_a_forward(lengths: list[int], forward_tokens: int):
    """No row is lost or doubled; within a slice lengths ascend and padding stays below what a forward costs."""
    slices = slice_by_length(lengths, forward_tokens)
    assert sorted(row for rows in slices for row in rows) == list(range(len(lengths)))
    for rows in slices:
        ascending = [lengths[row] for row in rows]
        assert ascending == sorted(ascending)
        assert sum(ascending[-1] - length for length in ascending) <= forward_tokens


def test_text_of_too_many_tokens_is_refused_unless_it_is_to_be_cut(models_root: Path):
    """Nothing is cut that was not asked to be: one token too many is refused, with the count (CX-022)."""
    runtime = opened(write_encoder(models_root, truncate=False, max_length=512))
    fits, too_long = ({"text": np.array(["short", "word " * words], object)} for words in (510, 511))
    runtime.check(fits)
    assert runtime.prepare([fits]).tokens == 512 + 3
    with pytest.raises(InvalidInput, match=r"^text: 513 tokens\. Expected at most 512$"):
        runtime.check(too_long)
    with pytest.raises(ModelError, match=r"^text: 513 tokens\. Expected at most 512$"):
        runtime.prepare([too_long])
    with pytest.raises(InvalidInput, match=r"^text: over 32768 characters\. Expected at most 512 tokens$"):
        runtime.check({"text": np.array(["word " * 7000], object)})
    runtime.close()


def test_text_of_too_many_tokens_is_cut_where_asked(minilm: EncoderRuntime):
    """The sample package asks for it: what lies beyond its 256 tokens is not read."""
    text = {"text": np.array(["word " * 9000], object)}
    minilm.check(text)
    assert minilm.prepare([text]).tokens == 256


def test_precision_that_a_package_asks_for_is_kept(minilm: EncoderRuntime, models_root: Path):
    """An encoder in bf16 answers float32 vectors of the same direction, and no other precision is offered for it."""
    folder = write_encoder(models_root)
    document = yaml.safe_load((folder / "model.yaml").read_text())
    (folder / "model.yaml").write_text(yaml.safe_dump(document | {"precision": "bf16"}))
    reduced = opened(folder)
    assert isinstance(reduced, EncoderRuntime)
    job = {"text": np.array(TEXTS, object)}
    ours, exact = (one.run(one.prepare([job]))["embedding"] for one in (reduced, minilm))
    assert ours.dtype == np.float32
    assert 0.999 <= (ours * exact).sum(axis=1).min() < 1 - 1e-6
    assert reduced.memory_bytes < 0.6 * minilm.memory_bytes
    assert list(reduced.candidates(None)) == []
    reduced.close()


def test_bf16_answers_short_and_long_texts_alike(minilm: EncoderRuntime):
    """Both kinds of attention that the form uses, with and without padding, point where fp32 does."""
    form = minilm.candidates(None).get("bf16")
    if form is None:
        leave_out("this CPU has no units for bf16")
    lengths = [3, 40, 120, 125, 130, 180, 240]
    prepared = minilm.prepare([{"text": np.array(["word " * length for length in lengths], object)}])
    assert {piece.ids.shape[1] > 128 for piece in prepared.payload} == {True, False}
    ours, exact = form()(prepared)["embedding"], minilm.run(prepared)["embedding"]
    assert 0.999 <= (ours * exact).sum(axis=1).min() < 1 - 1e-7
