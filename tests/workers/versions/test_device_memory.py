"""The rows that calibration runs: as large as those of any job. For GPU memory see tests/benchmarks/gpu.py."""

from __future__ import annotations

from pathlib import Path

import yaml
from tokenizers import Tokenizer

from penstock.registry.package import load_package
from penstock.workers.runtime.base import Runtime
from penstock.workers.runtime.open import open_runtime
from penstock.workers.versions.device_memory import largest_example
from tests.packages import write_package
from tests.servers import ROOT

_SOURCE = """
def build():
    return lambda inputs: {"y": inputs["x"]}
"""


def free_extent(root: Path, **batching: object) -> Runtime:
    """A loaded model that takes `x` float32 (batch, tokens)."""
    folder = write_package(root, "free", _SOURCE)
    spec = yaml.safe_load((folder / "model.yaml").read_text())
    for tensor in (*spec["inputs"], *spec["outputs"]):
        tensor["shape"] = ["batch", "tokens"]
    spec["batching"] = batching
    (folder / "model.yaml").write_text(yaml.safe_dump(spec))
    runtime = open_runtime(load_package(folder, (root,)))
    runtime.load("cpu", 1)
    return runtime


def test_free_dimensions_are_as_long_as_the_package_allows(models_root: Path):
    """The longest input of a job must fit into memory."""
    runtime = free_extent(models_root, length_input="x", max_length=77)
    assert largest_example(runtime, 3)["x"].shape == (3, 77)


def test_without_any_limit_the_example_is_the_warm_ups(models_root: Path):
    """A dimension without a limit has the length of the warm-up."""
    runtime = free_extent(models_root)
    assert largest_example(runtime, 3)["x"].shape == runtime.spec.signature.example(3)["x"].shape


def test_texts_are_as_many_tokens_as_the_model_reads():
    """Every text of the probe has exactly as many tokens as the sentence encoder reads."""
    models = ROOT / "models"
    package = load_package(models / "minilm" / "1", (models,))
    texts = largest_example(open_runtime(package), 2)["text"].tolist()
    tokenizer = Tokenizer.from_file(str(package.source_folder() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)] == [256, 256]
