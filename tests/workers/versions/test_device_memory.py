"""The rows that calibration runs: as large as a job's may be. What they take of a GPU: tests/benchmarks/gpu.py."""

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
    """What a job of the longest input takes is what must fit, not what a short one takes."""
    runtime = free_extent(models_root, length_input="x", max_length=77)
    assert largest_example(runtime, 3)["x"].shape == (3, 77)


def test_without_any_limit_the_example_is_the_warm_ups(models_root: Path):
    """What nobody limits cannot be filled."""
    runtime = free_extent(models_root)
    assert largest_example(runtime, 3)["x"].shape == runtime.spec.signature.example(3)["x"].shape


def test_texts_are_as_many_tokens_as_the_model_reads():
    """A sentence encoder is probed with texts that fill what it reads of one, in every row: neither less nor more."""
    models = ROOT / "models"
    package = load_package(models / "minilm" / "1", (models,))
    texts = largest_example(open_runtime(package), 2)["text"].tolist()
    tokenizer = Tokenizer.from_file(str(package.source_folder() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)] == [256, 256]
