"""Transformers pipelines: a real, tiny BERT from a local folder, its fields as outputs, and its limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from penstock.registry.errors import ConfigurationError, InvalidInput, ModelError
from penstock.registry.tensors import Array
from penstock.workers.runtime.pipeline import PipelineRuntime
from tests.workers.runtime.formats import LABELS, MAX_TOKENS, answers, opened, write_classifier

TEXTS = ["abc", "", "hello there", "zz top", "ab" * 9]
LONG = "a " * 40


def texts(*values: str) -> Array:
    return np.array(values, object)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def classifier(folder: Path) -> Iterator[PipelineRuntime]:
    runtime = opened(folder)
    assert isinstance(runtime, PipelineRuntime)
    yield runtime
    runtime.close()


def reference(folder: Path, task: str = "text-classification") -> Any:
    make: Any = transformers.pipeline
    return make(task, model=str(folder / "weights"), tokenizer=str(folder / "weights"), device="cpu")


def test_label_and_score_are_those_of_the_library(classifier: PipelineRuntime, folder: Path):
    """Each row gets the answer that the pipeline gives outside, and rows differ."""
    found = answers(classifier, text=texts(*TEXTS))
    expected = reference(folder)(TEXTS)
    assert found["label"].tolist() == [one["label"] for one in expected]
    np.testing.assert_allclose(found["score"], [one["score"] for one in expected], atol=1e-5)
    assert len(set(found["label"].tolist())) > 1
    assert set(found["label"].tolist()) <= set(LABELS)


def test_several_best_answers_have_a_dimension_of_their_own(models_root: Path):
    """Outputs of shape (batch, k) are the k best, best first."""
    outputs = [
        {"name": "score", "dtype": "float64", "shape": ["batch", 3]},
        {"name": "label", "dtype": "string", "shape": ["batch", 3]},
    ]
    found = answers(opened(write_classifier(models_root, outputs=outputs)), text=texts(*TEXTS))
    assert found["label"].shape == found["score"].shape == (5, 3)
    np.testing.assert_allclose(found["score"].sum(1), 1, atol=1e-5)
    assert (np.diff(found["score"], axis=1) <= 0).all()


def test_masked_words_are_filled(models_root: Path):
    """A fill-mask returns numbers and text under its own field names."""
    outputs = [
        {"name": "token", "dtype": "int64", "shape": ["batch", 2]},
        {"name": "token_str", "dtype": "string", "shape": ["batch", 2]},
    ]
    folder = write_classifier(models_root, task="fill-mask", outputs=outputs)
    masked = ["a [MASK]", "[MASK] b c"]
    found = answers(opened(folder), text=texts(*masked))
    expected = reference(folder, "fill-mask")(masked, top_k=2)
    assert found["token"].tolist() == [[one["token"] for one in row] for row in expected]
    assert found["token_str"].tolist() == [[one["token_str"] for one in row] for row in expected]


def write_entities(root: Path, count: int, **fields: Any) -> Path:
    outputs = [
        {"name": name, "dtype": dtype, "shape": ["batch", count]}
        for name, dtype in {"entity_group": "string", "start": "int64", "end": "int64", "score": "float32"}.items()
    ]
    return write_classifier(root, task="token-classification", outputs=outputs, **fields)


def entities(found: dict[str, Array], row: int) -> list[tuple[str, int, int, float]]:
    """Those of one text, without what fills the row up."""
    columns = [found[name][row].tolist() for name in ("entity_group", "start", "end", "score")]
    return [entity for entity in zip(*columns, strict=True) if entity[3] > 0]


def test_entities_are_those_of_the_library_and_rows_are_filled_up(models_root: Path):
    """Best first, as many as the signature says; what a text has not is empty, and neighbours change nothing."""
    folder = write_entities(models_root, 6)
    runtime = opened(folder)
    found, pipeline = answers(runtime, text=texts(*TEXTS)), reference(folder, "token-classification")
    for row, text in enumerate(TEXTS):
        expected = sorted(
            pipeline(text, aggregation_strategy="simple"), key=lambda one: float(one["score"]), reverse=True
        )
        for listed in (entities(found, row), entities(answers(runtime, text=texts(text)), 0)):
            assert [entity[:3] for entity in listed] == [
                (one["entity_group"], one["start"], one["end"]) for one in expected[:6]
            ]
            assert [entity[3] for entity in listed] == pytest.approx([one["score"] for one in expected[:6]], abs=1e-5)
    blank = TEXTS.index("")
    assert found["entity_group"][blank].tolist() == [""] * 6
    assert found["score"][blank].tolist() == [0.0] * 6
    assert len({len(entities(found, row)) for row in range(len(TEXTS))}) > 2, "rows of many lengths"


def test_entities_beyond_the_limit_of_tokens_are_not_found(models_root: Path):
    """This pipeline always cuts at the limit of its tokenizer: with `truncate` that is the package's limit."""
    batching = {"length_input": "text", "max_length": 5, "truncate": True}
    runtime = opened(write_entities(models_root, 6, batching=batching))
    found = entities(answers(runtime, text=texts("a b c d e f g")), 0)
    assert found == entities(answers(runtime, text=texts("a b c")), 0)
    assert 0 < max(end for _, _, end, _ in found) <= len("a b c")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_pipeline_computes_in_the_precision_asked_for(models_root: Path, precision: str):
    """The weights are loaded in it."""
    runtime = opened(write_classifier(models_root, precision=precision))
    assert isinstance(runtime, PipelineRuntime)
    assert runtime.model is not None
    assert str(next(runtime.model.parameters()).dtype) == {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
    assert answers(runtime, text=texts("abc"))["score"].dtype == np.float32


def test_text_that_is_too_long_is_refused_for_its_job_alone(classifier: PipelineRuntime):
    """`check` counts tokens as the model will, the special ones included."""
    room = MAX_TOKENS - 2
    classifier.check({"text": texts("a " * room, "b")})
    with pytest.raises(InvalidInput, match=rf"^text: {MAX_TOKENS + 1} tokens\. Expected at most {MAX_TOKENS}$"):
        classifier.check({"text": texts("b", "a " * (room + 1))})
    with pytest.raises(InvalidInput, match=r"^text: over 2048 characters\. Expected at most 32 tokens$"):
        classifier.check({"text": texts("a" * 3000)})


def test_text_that_is_too_long_is_cut_where_the_package_says_so(models_root: Path):
    """With `truncate` the rest of a text changes nothing, however long it is."""
    batching = {"length_input": "text", "max_length": 8, "truncate": True}
    runtime = opened(write_classifier(models_root, batching=batching))
    runtime.check({"text": texts(LONG)})
    cut = answers(runtime, text=texts("a " * 6))
    for tail in ("b c d", "b" * 10_000):
        longer = answers(runtime, text=texts("a " * 6 + tail))
        assert longer["score"].tolist() == pytest.approx(cut["score"].tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"task": "text-generation"},
            "task: found text-generation, expected one of: fill-mask, text-classification, token-classification",
        ),
        (
            {"batching": {"length_input": "text", "max_length": 33, "truncate": True}},
            "batching.max_length: found 33, expected at most 32 as the weights say",
        ),
        (
            {"outputs": [{"name": "odds", "dtype": "float32", "shape": ["batch"]}]},
            "The pipeline's answers have no odds. Its fields: label, score",
        ),
        (
            {"task": "token-classification"},
            "The pipeline's answers have no label. Its fields: end, entity_group, score, start, word",
        ),
        (
            {"outputs": [{"name": "score", "dtype": "float32", "shape": ["batch", 4]}]},
            "Output score is float32 (2, 3). Declared is float32 (batch, 4) with batch = 2",
        ),
        (
            {"outputs": [{"name": "score", "dtype": "float32", "shape": ["batch", "labels"]}]},
            "outputs: expected all of shape (batch,), or all of (batch, k) for the k best answers of "
            "text-classification",
        ),
        (
            {
                "outputs": [
                    {"name": "score", "dtype": "float32", "shape": ["batch", 2]},
                    {"name": "label", "dtype": "string", "shape": ["batch"]},
                ]
            },
            "outputs: expected all of shape (batch,), or all of (batch, k) for the k best answers of "
            "text-classification",
        ),
    ],
)
def test_package_that_cannot_work_is_refused_when_loaded(models_root: Path, fields: dict[str, Any], text: str):
    """One line that names the field."""
    with pytest.raises(ConfigurationError) as refused:
        opened(write_classifier(models_root, **fields))
    assert str(refused.value) == f"classifier/1: {text}"


def test_fill_mask_of_a_text_without_a_mask_fails_its_job(models_root: Path):
    """What the pipeline raises passes through, for the drain to fail that job alone."""
    outputs = [{"name": "score", "dtype": "float32", "shape": ["batch"]}]
    runtime = opened(write_classifier(models_root, task="fill-mask", outputs=outputs))
    with pytest.raises(Exception, match="mask_token") as raised:
        answers(runtime, text=texts("no mask"))
    assert not isinstance(raised.value, ModelError | ConfigurationError)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_weights_is_refused_and_not_run(models_root: Path, tmp_path: Path, file: str):
    """A folder that names its own Python code is not loaded, and there is no prompt for it."""
    folder = write_classifier(models_root)
    marker = tmp_path / "executed"
    (folder / "weights" / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    config = json.loads((folder / "weights" / file).read_text())
    config["auto_map"] = {"AutoModelForSequenceClassification": "own.Model", "AutoTokenizer": ["own.Tokenizer", None]}
    (folder / "weights" / file).write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="auto_map"):
        opened(folder)
    assert not marker.exists()


def test_pickled_weights_are_refused_and_not_run(models_root: Path):
    """safetensors is all that is read, also where the library would fall back to a pickle."""
    folder = write_classifier(models_root)
    state = load_file(folder / "weights" / "model.safetensors")
    torch.save(state, folder / "weights" / "pytorch_model.bin")
    (folder / "weights" / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"^classifier/1: "):
        opened(folder)
