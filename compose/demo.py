"""`penstock demo`: search real text on any machine, without a download.

    docstrings of this Python -> Client.map("minilm") -> embedded stack -> (N, 384) -> nearest to each question
    a line of curl -> the same request over HTTP -> gateway -> embedded stack -> 384 numbers

The docstrings are collected while the stack starts. The stack is private and has a temporary home, which is deleted
when the demo ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from penstock import Client
from penstock.compose.docstrings import Passage, collect
from penstock.compose.samples import SampleRequest, first_request
from penstock.compose.stack import fleet
from penstock.compose.stack.local import LocalStack, private_settings
from penstock.compose.views import overview
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.registry.stack_file import RunningStack

__all__ = ["Demonstration", "Hit", "HttpAnswer", "SearchResult", "demonstrate", "draw"]

MODEL: Final = "minilm"
QUESTIONS: Final = (
    "How do I parse a date?",
    "How do I compress bytes?",
    "How do I run a command and read its output?",
)
_HITS: Final = 3
# How long the demo waits until the workers have counted its last batch, and how often it looks.
_COUNT_S: Final = 10.0
_COUNT_POLL_S: Final = 0.1
_HTTP_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Hit:
    """One passage found for a question; `score` is the cosine similarity."""

    name: str
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A question and the passages nearest to it, best first."""

    question: str
    hits: list[Hit]


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A line of curl, and how the gateway answered its request."""

    curl: str
    status: int
    embedding: list[int]
    """Its shape."""
    ms: float


@dataclass(frozen=True, slots=True)
class Demonstration:
    """The search results and measurements of a demo, ready for JSON."""

    passages: int
    seconds: float
    jobs_per_s: float
    results: list[SearchResult]
    batch_sizes: dict[int, int]
    latency_ms: dict[str, dict[str, float]]
    flower_url: str
    http: HttpAnswer | None
    """None without a gateway."""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def demonstrate(
    console: Console, environ: Mapping[str, str], *, count: int, ask: Sequence[str], stay: Callable[[], None]
) -> Demonstration:
    """Start a stack, embed `count` docstrings, search them for the sample questions and those in `ask`, measure.

    `stay` is called after the output, while the stack still runs. Raises ConfigurationError when it cannot start.
    """
    title = ("Penstock demo", "bold")
    console.print(Text.assemble(title, ": search the docstrings of this Python's standard library by meaning"))
    with ThreadPoolExecutor(1) as beside, private_settings(environ, [MODEL]) as (settings, own):
        collecting = beside.submit(collect, count)
        devices = fleet.choose(settings, own)
        with LocalStack(
            settings, devices, environ=own, with_gateway=True, gateway_port=0, on_progress=_steps(console)
        ) as stack:
            running = stack.running
            flower = f"{running.flower_url} (user {running.flower_user}, password {running.flower_password})"
            console.print(f"Flower shows every job at {flower}", soft_wrap=True)
            answer = _ask_over_http(console, running)
            passages = collecting.result()
            console.print(f"{len(passages):,} docstrings collected")
            demonstration = _search(console, settings, stack, passages, _questions(ask), answer)
            draw(console, demonstration)
            console.print(f"\nFlower: {flower}; `penstock demo --stay` keeps it running", soft_wrap=True)
            stay()
            console.print("\nStopping the stack.")
    return demonstration


def _questions(ask: Sequence[str]) -> list[str]:
    """The sample questions, then the user's own, each once."""
    by_text = {question.casefold().strip(): question for question in (*ask, *QUESTIONS)}
    own = [by_text.pop(question.casefold().strip()) for question in ask if question.casefold().strip() in by_text]
    return [*by_text.values(), *own]


def _search(
    console: Console,
    settings: Settings,
    stack: LocalStack,
    passages: Sequence[Passage],
    questions: Sequence[str],
    answer: HttpAnswer | None,
) -> Demonstration:
    with Client.from_env(settings=settings) as client:
        begin = time.perf_counter()
        vectors = _embed(console, client, [str(passage) for passage in passages])
        seconds = time.perf_counter() - begin
        found = _counted(stack, len(passages))
        asked = np.stack(client.map(MODEL, questions))
    return Demonstration(
        passages=len(passages),
        seconds=round(seconds, 3),
        jobs_per_s=round(len(passages) / seconds, 1),
        results=[
            SearchResult(question, _nearest(vectors @ vector, passages))
            for question, vector in zip(questions, asked, strict=True)
        ],
        batch_sizes=overview.batch_sizes(found, MODEL),
        latency_ms=overview.latency_ms(found, MODEL),
        flower_url=stack.running.flower_url,
        http=answer,
    )


def _ask_over_http(console: Console, running: RunningStack) -> HttpAnswer | None:
    """Show the line of curl, and make its request."""
    if not running.gateway_url:
        return None
    with closing(RedisStreams.from_url(running.redis_url)) as broker:
        (spec,) = overview.served(broker)
    request = first_request(spec, running.gateway_url)
    console.print(f"The gateway answers over HTTP while the demo runs:\n\n{request.as_curl}\n", soft_wrap=True)
    begin = time.perf_counter()
    status, answer = _post(request)
    ms = round((time.perf_counter() - begin) * 1000, 1)
    if status != HTTPStatus.OK:
        raise ConfigurationError(f"The gateway answered {status}: {answer.get('detail', '')}. Expected 200")
    embedding = answer["outputs"]["embedding"]
    shape = list(embedding["shape"])
    console.print(f"It answered {status} after {ms:,.0f} ms: embedding, {embedding['dtype']} {shape}")
    return HttpAnswer(request.as_curl, status, shape, ms)


def _post(request: SampleRequest) -> tuple[int, dict[str, Any]]:
    parts = urlsplit(request.url)
    # No urllib: it would ask the proxy that the environment names.
    with closing(HTTPConnection(parts.netloc, timeout=_HTTP_S)) as connection:
        try:
            connection.request("POST", parts.path, request.body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, HTTPException, ValueError) as error:
            raise ConfigurationError(f"The gateway did not answer ({error}). Expected a document") from None


def _counted(stack: LocalStack, jobs: int) -> list[dict[str, Any]]:
    """The workers' snapshots, which count a batch just after its clients have the results."""
    until = time.monotonic() + _COUNT_S
    while True:
        found = overview.snapshots(stack.worker_reports())
        if overview.jobs(found, MODEL) >= jobs or time.monotonic() >= until:
            return found
        time.sleep(_COUNT_POLL_S)


def draw(console: Console, demonstration: Demonstration) -> None:
    """The search results, then the measurements."""
    for result in demonstration.results:
        console.print(Text(f"\n{result.question}", style="bold"))
        table = Table(box=None, show_header=False, pad_edge=False)
        for hit in result.hits:
            table.add_row(f"{hit.score:.2f}", Text(hit.name, style="cyan"), Text(hit.text))
        console.print(table)
    rate = (f"\n{demonstration.jobs_per_s:,.0f} jobs/s", "bold")
    summary = f": {demonstration.passages:,} texts embedded in {demonstration.seconds:.1f} s, one job each\n"
    console.print(Text.assemble(rate, summary))
    console.print(overview.draw_batches(demonstration.batch_sizes))
    console.print()
    console.print(overview.draw_latency(demonstration.latency_ms))


def _nearest(scores: npt.NDArray[np.float32], passages: Sequence[Passage]) -> list[Hit]:
    best = np.argsort(-scores, kind="stable")[:_HITS]
    return [Hit(passages[i].name, passages[i].text, round(float(scores[i]), 3)) for i in best]


def _embed(console: Console, client: Client, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=False) as progress:
        bar = progress.add_task("Embedding", total=len(texts))
        rows = client.map(MODEL, texts, progress=lambda done: progress.update(bar, completed=done))
    vectors: npt.NDArray[np.float32] = np.stack(rows)
    return vectors


def _steps(console: Console) -> Callable[[str], None]:
    begin = time.perf_counter()

    def show(step: str) -> None:
        console.print(Text.assemble((f"{time.perf_counter() - begin:5.1f} s", "dim"), f"  {step}"))

    return show
