"""`penstock demo`: the whole path on real text, on any machine, with nothing to download.

    docstrings of this Python -> Client.map("minilm") -> embedded stack -> (N, 384) -> nearest to each question

The stack is a private one in a temporary home; it is gone when the demo ends.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from compose import fleet, overview
from compose.docstrings import Passage, collect
from compose.local import LocalStack
from producers import Client
from registry.settings import Settings

__all__ = ["Answer", "Demonstration", "demonstrate", "draw", "private_settings"]

MODELS_ROOT: Final = Path(__file__).resolve().parent.parent / "models"
MODEL: Final = "minilm"
QUESTIONS: Final = (
    "How do I parse a date?",
    "How do I compress bytes?",
    "How do I run a command and read its output?",
)
_HITS: Final = 3
_WHERE_THINGS_ARE: Final = (
    "PENSTOCK_REDIS_URL",
    "PENSTOCK_CELERY_URL",
    "PENSTOCK_SIGNING_KEYS",
    "PENSTOCK_REGISTRY_URL",
)


@dataclass(frozen=True, slots=True)
class Hit:
    """One passage that answers a question; `score` is the cosine."""

    name: str
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A question and the passages nearest to it, best first."""

    question: str
    hits: list[Hit]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What a demo found and measured, ready for JSON."""

    passages: int
    seconds: float
    jobs_per_s: float
    answers: list[Answer]
    batch_sizes: dict[int, int]
    latency_ms: dict[str, dict[str, float]]
    flower: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@contextmanager
def private_settings(environ: Mapping[str, str], models: Sequence[str]) -> Iterator[tuple[Settings, dict[str, str]]]:
    """Settings and environment of a stack of its own in a temporary home, with the models of this checkout.

    What says where things are is left out of the user's settings; how models are served is kept.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as home:
        own = {
            **{name: value for name, value in environ.items() if name not in _WHERE_THINGS_ARE},
            "PENSTOCK_HOME": home,
            "PENSTOCK_INFERENCE_REPO_ROOT": str(MODELS_ROOT),
            "PENSTOCK_WORKER_MODELS": ",".join(models),
            "PENSTOCK_METRICS_PORT": "0",
        }
        yield Settings.load(environ=own), own


def demonstrate(
    console: Console, environ: Mapping[str, str], *, count: int, ask: Sequence[str], stay: Callable[[], None]
) -> Demonstration:
    """Start a stack, embed `count` docstrings, answer the sample questions and those in `ask`, measure.

    `stay` is called with everything still running. Raises ConfigurationError when the stack cannot start.
    """
    console.print("[bold]Penstock demo[/]: semantic search over the docstrings of this Python's standard library")
    with private_settings(environ, [MODEL]) as (settings, own):
        devices = fleet.choose(settings, own)
        stack = LocalStack(settings, devices, environ=own, on_progress=_steps(console))
        with (
            stack,
            Client(stack.running.redis_url, signing_keys=stack.running.signing_keys(), settings=settings) as client,
        ):
            if stack.running.flower_url:
                console.print(_flower_line(stack))
            passages = collect(count)
            begin = time.perf_counter()
            vectors = _embed(console, client, [str(passage) for passage in passages])
            seconds = time.perf_counter() - begin
            answers = _answer([*QUESTIONS, *ask], passages, vectors, client)
            found = overview.snapshots(stack.worker_reports())
            demonstration = Demonstration(
                passages=len(passages),
                seconds=seconds,
                jobs_per_s=len(passages) / seconds,
                answers=answers,
                batch_sizes=overview.merged(found, MODEL),
                latency_ms=found[0]["models"][MODEL]["latency_ms"] if found else {},
                flower={
                    "url": stack.running.flower_url,
                    "user": stack.running.flower_user,
                    "password": stack.running.flower_password,
                },
            )
            draw(console, demonstration)
            stay()
            console.print("Everything stops...")
    return demonstration


def draw(console: Console, shown: Demonstration) -> None:
    """The answers, then the tables."""
    for answer in shown.answers:
        console.print(f"\n[bold]{answer.question}[/]")
        table = Table(box=None, show_header=False, pad_edge=False)
        for hit in answer.hits:
            table.add_row(f"{hit.score:.2f}", f"[cyan]{hit.name}[/]", hit.text)
        console.print(table)
    console.print(
        f"\n[bold]{shown.jobs_per_s:,.0f} jobs/s[/]: {shown.passages:,} sentences embedded in {shown.seconds:.1f} s, "
        "one job each\n"
    )
    console.print(overview.draw_batches(shown.batch_sizes))
    console.print()
    console.print(overview.draw_latency(shown.latency_ms))
    if shown.flower["url"]:
        console.print(
            f"\nFlower shows every one of these jobs at [bold]{shown.flower['url']}[/] while the stack runs "
            f"(user {shown.flower['user']}, password {shown.flower['password']})"
        )


def _answer(
    questions: Sequence[str], passages: Sequence[Passage], vectors: npt.NDArray[np.float32], client: Client
) -> list[Answer]:
    asked = np.stack(client.map(MODEL, questions))
    answers = []
    for question, scores in zip(questions, asked @ vectors.T, strict=True):
        best = np.argsort(-scores, kind="stable")[:_HITS]
        answers.append(
            Answer(question, [Hit(passages[i].name, passages[i].text, round(float(scores[i]), 3)) for i in best])
        )
    return answers


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
        console.print(f"[dim]{time.perf_counter() - begin:5.1f} s[/]  {step}")

    return show


def _flower_line(stack: LocalStack) -> str:
    running = stack.running
    return f"Flower: {running.flower_url} (user {running.flower_user}, password {running.flower_password})"
