"""In how few shapes a model is run: length buckets of the package, and what a CUDA graph is captured for.

No GPU is needed here: what a captured graph does is done by the module itself, which notes the shapes that it meets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, Final

import numpy as np
import pytest
import torch

from penstock.registry.tensors import Array
from penstock.workers.batching.buckets import LengthBuckets
from penstock.workers.runtime.compilable import CompilableRuntime
from penstock.workers.runtime.pytorch import PyTorchRuntime
from penstock.workers.runtime.transformers import EncoderRuntime
from tests.servers import ROOT
from tests.workers.runtime.formats import MAX_TOKENS, opened, write_encoder

EDGES: Final = (8, 16, MAX_TOKENS)
POWERS: Final = (1, 2, 4, 8, 16, 32, 64)


@pytest.fixture(scope="module")
def bucketed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EncoderRuntime]:
    """An encoder whose package declares two buckets."""
    batching = {"length_input": "text", "buckets": list(EDGES[:-1])}
    runtime = opened(write_encoder(tmp_path_factory.mktemp("models"), batching=batching))
    assert isinstance(runtime, EncoderRuntime)
    yield runtime
    runtime.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EncoderRuntime]:
    """The same without buckets."""
    runtime = opened(write_encoder(tmp_path_factory.mktemp("models")))
    assert isinstance(runtime, EncoderRuntime)
    yield runtime
    runtime.close()


def batches(count: int) -> list[list[str]]:
    """Texts of all lengths that the model reads, from none to 30 letters, in batches of up to 40."""
    numbers = np.random.default_rng(5)
    return [
        [" ".join("ab"[number % 2] * int(letters)) for number, letters in enumerate(numbers.integers(0, 31, rows))]
        for rows in numbers.integers(1, 41, count)
    ]


def jobs(texts: list[str]) -> list[dict[str, Array]]:
    return [{"text": np.array([text], object)} for text in texts]


def test_rows_are_padded_to_the_packages_buckets_and_answer_alike(bucketed: EncoderRuntime, plain: EncoderRuntime):
    """Whatever comes is run in the declared widths, each is counted, and no vector moves by it."""
    before = bucketed.counts()
    met: Counter[int] = Counter()
    for texts in batches(12):
        prepared = bucketed.prepare(jobs(texts))
        met.update(piece.ids.shape[1] for piece in prepared.payload)
        assert prepared.padded_tokens == sum(piece.ids.numel() for piece in prepared.payload)
        expected = plain.run(plain.prepare(jobs(texts)))["embedding"]
        np.testing.assert_allclose(bucketed.run(prepared)["embedding"], expected, atol=1e-5)
    assert set(met) == set(EDGES)
    counts = bucketed.counts()
    assert {edge: counts[f"slices_of_{edge}"] - before[f"slices_of_{edge}"] for edge in EDGES} == met
    assert not [name for name in plain.counts() if name.startswith("slices")]


def test_rows_of_one_bucket_share_a_forward(bucketed: EncoderRuntime, plain: EncoderRuntime):
    """Lengths of one bucket share a slice: one of 16 tokens, where 10 and 16 tokens would be two slices."""
    texts = [" ".join("a" * letters) for letters in (8, 14) for _ in range(16)]
    assert [piece.ids.shape for piece in bucketed.prepare(jobs(texts)).payload] == [(32, 16)]
    assert len(plain.prepare(jobs(texts)).payload) == 2


def test_batcher_is_told_the_length_that_is_computed(bucketed: EncoderRuntime):
    """Budgets of tokens and the search for similar jobs go by the padded length."""
    lengths = [bucketed.length(job) for job in jobs(["", "ab", "a" * 24, "a" * 28, "a" * 400])]
    assert lengths == [8, 8, 8, 16, MAX_TOKENS]


class Replayed:
    """In the place of a compiled forward with CUDA graphs: the module itself, and the shapes that it has met."""

    is_replayed = True
    made: Mapping[str, object] = {}

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __call__(self, *tensors: torch.Tensor) -> Any:
        (shape,) = {tuple(tensor.shape) for tensor in tensors}
        self.shapes[shape] += 1
        answer = self._module(*tensors)
        # The rows of padding too.
        assert answer.isfinite().all()
        return answer

    def counts(self) -> dict[str, int]:
        return {"cuda_graphs": len(self.shapes)}

    def beside(self) -> Replayed:
        return self


class Replaying:
    """In the place of a TorchCompiler on a GPU."""

    def __init__(self) -> None:
        self.forward: Replayed | None = None

    def compile(self, runtime: CompilableRuntime, form: str) -> Replayed:
        self.forward = Replayed(runtime.compilable(form).module)
        return self.forward


@pytest.mark.parametrize("name", ["bucketed", "plain"])
def test_cuda_graphs_of_an_encoder_are_bounded(name: str, request: pytest.FixtureRequest):
    """Rows are filled up to powers of two and lengths to buckets, ours where the package has none: so many graphs are
    captured at the most, the vectors stay what they were, and the report counts them."""
    runtime: EncoderRuntime = request.getfixturevalue(name)
    compiler = Replaying()
    runtime.forms.use("compiled", runtime.candidates(compiler)["compiled"]())
    for texts in batches(16):
        prepared = runtime.prepare(jobs(texts))
        expected = runtime.forms.reference(prepared)["embedding"]
        np.testing.assert_allclose(runtime.run(prepared)["embedding"], expected, atol=1e-5)
    assert runtime.forms.name == "compiled"
    edges = EDGES if name == "bucketed" else LengthBuckets(MAX_TOKENS).edges
    assert compiler.forward is not None
    assert compiler.forward.shapes.keys() <= set(product(POWERS, edges))
    assert runtime.counts()["cuda_graphs"] == len(compiler.forward.shapes)
    runtime.forms.reset("tested")


def test_cuda_graphs_of_a_torch_module_are_bounded():
    """Batches of up to 64 rows are run in seven shapes, and each row has its own answer."""
    runtime = opened(ROOT / "models" / "mlp" / "1")
    assert isinstance(runtime, PyTorchRuntime)
    compiler = Replaying()
    runtime.forms.use("compiled", runtime.candidates(compiler)["compiled"]())
    numbers = np.random.default_rng(1).standard_normal((64, 384)).astype(np.float32)
    for rows in (1, 2, 3, 5, 9, 17, 33, 64):
        prepared = runtime.prepare([{"x": numbers[:rows]}])
        expected = runtime.forms.reference(prepared)["logits"]
        np.testing.assert_allclose(runtime.run(prepared)["logits"], expected, rtol=1e-4, atol=1e-5)
    assert runtime.forms.name == "compiled"
    assert compiler.forward is not None
    assert compiler.forward.shapes.keys() == {(rows, 384) for rows in POWERS}
    runtime.close()
