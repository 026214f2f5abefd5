"""MiniLM behind /v1/embeddings: lists of 32 texts over HTTP, against the same lists by the Python client, in turns."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from time import perf_counter
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from penstock import Client
from penstock.compose import docstrings
from tests.benchmarks.harness import Harness
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale

__all__ = ["measure"]

_LIST: Final = 32
_IN_FLIGHT: Final = 4
"""Lists: the worker always has a batch to run."""
_LISTS_PER_S: Final = 8
_TOLERANCE: Final = 1e-5
_REQUIRED: Final = 0.95
_ROUNDS_PER_ROUND: Final = 2
"""Other users of the machine disturb short turns less often, so there are more of them."""


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Texts per second of both, from the same worker."""
    count = max(_IN_FLIGHT, round(scale.encoder_s * _LISTS_PER_S))
    texts = [str(passage) for passage in docstrings.collect(count * _LIST)]
    lists = [texts[start : start + _LIST] for start in range(0, len(texts) - _LIST + 1, _LIST)]
    ratios, rates = list[float](), list[float]()
    with Harness() as harness, ThreadPoolExecutor(_IN_FLIGHT) as threads:
        server = harness.redis()
        harness.worker(server, "minilm")
        url, _ = harness.gateway(server)
        client = harness.producer(server)

        def timed(embed: Callable[[list[str]], np.ndarray]) -> tuple[float, np.ndarray]:
            begun = perf_counter()
            vectors = np.concatenate(list(threads.map(embed, lists)))
            return len(vectors) / (perf_counter() - begun), vectors

        rounds = scale.rounds * _ROUNDS_PER_ROUND
        for number in range(rounds + 1):
            over_http, vectors = timed(lambda part: _over_http(url, part))
            alone, expected = timed(lambda part: _alone(client, part))
            if not np.allclose(vectors, expected, atol=_TOLERANCE):
                raise ValueError("Wrong answers: embeddings over HTTP differ from those of the client")
            say(f"gateway-embeddings {number}/{rounds}: HTTP {over_http:,.0f}/s, client {alone:,.0f}/s")
            # The first round warms up.
            ratios += [over_http / alone] if number else []
            rates += [over_http] if number else []
    ratio = median(ratios)
    return [
        Row(
            f"MiniLM, /v1/embeddings, lists of {_LIST}, against the worker alone",
            f"{ratio:.2f}x ({median(rates):,.0f} texts/s)",
            f">= {_REQUIRED}x",
            ok=verdict(required=ratio >= _REQUIRED),
            figures={"ratio": ratio, "texts_per_s": median(rates)},
        )
    ]


def _alone(client: Client, texts: list[str]) -> np.ndarray:
    found: np.ndarray = client.submit("minilm", {"text": texts}).result(timeout=60)["embedding"]
    return found


def _over_http(url: str, texts: list[str]) -> np.ndarray:
    """As the official client asks: base64."""
    body = json.dumps({"model": "minilm", "input": texts, "encoding_format": "base64"})
    with closing(HTTPConnection(urlsplit(url).netloc, timeout=60)) as connection:
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        found: dict[str, Any] = json.loads(answer.read())
    if answer.status != 200:
        raise RuntimeError(f"The gateway answered {answer.status}: {found}")
    return np.stack([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in found["data"]])
