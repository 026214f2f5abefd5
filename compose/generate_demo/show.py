"""`penstock demo --generate`: eight texts at once, of a model that this machine has made.

home has the writer? -- no: docstrings -> training, with a progress bar -> home
                     '-> embedded stack with its worker -> one text alone -> eight texts at once -> table
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from penstock import Client, JobHandle
from penstock.compose.docstrings import documents
from penstock.compose.generate_demo.figures import EngineCounts, RunFigures, TextRun, draw, figures_of
from penstock.compose.generate_demo.live import LiveTexts
from penstock.compose.generate_demo.recipe import Recipe, Result
from penstock.compose.generate_demo.store import MODEL, SEATS, StoredWriter, ready_writer
from penstock.compose.samples import SampleRequest
from penstock.compose.stack import fleet
from penstock.compose.stack.local import LocalStack, private_settings
from penstock.compose.storage import home_problem
from penstock.registry.errors import ConfigurationError, ModelNotReady
from penstock.registry.extras import not_installed
from penstock.registry.sampling_params import SamplingParams
from penstock.registry.settings import Settings
from penstock.workers.process.device import granted_threads

__all__ = ["show_generation"]

PROMPTS: Final = (
    "def parse_date(",
    "def read_lines(",
    "def connect(",
    "def compress(",
    "class Queue",
    "def remove_item(",
    "def wait_for(",
    "class HTTPError",
)
EXAMPLE: Final = '''\
def copy_file(source, target, *, follow_symlinks=True):
    """Copy the contents of a file to another one.

    If follow_symlinks is false and source is a symbolic link, a new symbolic link is made instead.
    Return the path of the target. An OSError is raised if the target cannot be written to.
    """
'''
"""Before each prompt: what a text looks like. All texts share it, and it is computed once."""
# One docstring after the other: the end of a docstring does not end the text.
_PARAMS: Final = SamplingParams(max_tokens=140, temperature=0.6, top_p=0.9, ignore_eos=True)
_STREAM_S: Final = 120.0
_MOST_ASKED: Final = 100
"""Characters of an own text: with the example before it, and the answer, there are 256 tokens."""
_COUNT_S: Final = 10.0
_COUNT_POLL_S: Final = 0.1
_MOST_THREADS: Final = 8
"""The matrices are small: more threads would wait for each other."""
_LINES: Final = 10
"""Lines of progress where the output is no terminal."""


def show_generation(
    console: Console,
    environ: Mapping[str, str],
    *,
    ask: Sequence[str] = (),
    stay: Callable[[], None] | None = None,
    recipe: Recipe | None = None,
) -> dict[str, Any]:
    """Trains the model where the home has none, serves it, and writes the texts. Returns the facts.

    ask: beginnings of own texts, in place of sample prompts. stay: called while the stack still runs, with Flower and
    the gateway. Raises ConfigurationError where a package is missing, the home cannot be written to, or the stack
    cannot start.
    """
    _check(ask)
    title = ("Penstock demo", "bold")
    console.print(Text.assemble(title, ": eight texts at once, by a model that this machine makes itself"))
    writer = _writer(console, environ, recipe or Recipe())
    prompts = [*ask, *PROMPTS][: len(PROMPTS)]
    with _served(console, environ, writer, with_access=stay is not None) as (settings, stack):
        texts, found = _write(console, settings, stack, prompts)
        console.print()
        console.print(draw(found))
        _tell_what_for(console, writer.result)
        if stay is not None:
            _tell_addresses(console, stack)
            stay()
        console.print("\nStopping the stack.")
    model = {"is_new": writer.is_new, **asdict(writer.result)}
    shown = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
    return {"model": model, "texts": shown, "figures": found.as_json()}


@contextmanager
def _served(
    console: Console, environ: Mapping[str, str], writer: StoredWriter, *, with_access: bool
) -> Iterator[tuple[Settings, LocalStack]]:
    """A private stack. with_access: with Flower and the gateway, to look around."""
    with private_settings(environ, [MODEL], models_root=writer.models_root) as (settings, own):
        stack = LocalStack(
            settings,
            fleet.choose(settings, own),
            environ=own,
            with_flower=with_access,
            with_gateway=with_access,
            gateway_port=0,
            on_progress=_steps(console),
        )
        with stack:
            yield settings, stack


def _check(ask: Sequence[str]) -> None:
    """What is missing is said before the minutes, and not after them."""
    for package in ("torch", "transformers", "tokenizers"):
        if find_spec(package) is None:
            raise ConfigurationError(not_installed(package, "generate"))
    if len(ask) > SEATS:
        raise ConfigurationError(f"--ask: found {len(ask)} texts, expected at most {SEATS} with --generate")
    if (longest := max(map(len, ask), default=0)) > _MOST_ASKED:
        raise ConfigurationError(
            f"--ask: found a text of {longest} characters, expected at most {_MOST_ASKED}: the model reads no more"
        )
    if any(not text.strip() for text in ask):
        raise ConfigurationError("--ask: found an empty text, expected the beginning of one")


def _writer(console: Console, environ: Mapping[str, str], recipe: Recipe) -> StoredWriter:
    home = Settings.load(environ=environ).home
    if problem := home_problem(home):
        raise ConfigurationError(problem)

    def make(folder: Path) -> Result:
        console.print(
            "Once: a model and its tokenizer learn from the docstrings of this Python; about two minutes on two cores"
        )
        texts = documents()
        console.print(f"{len(texts):,} docstrings, {sum(map(len, texts)) / 1e6:.1f} million characters")
        threads = min(granted_threads("cpu", environ), _MOST_THREADS)
        with _compiler_folder(), _training_bar(console, recipe.steps) as on_step:
            from penstock.compose.generate_demo.training import train

            return train(recipe, texts, folder, threads, on_step)

    writer = ready_writer(home, recipe, make)
    result = writer.result
    made = "Trained" if writer.is_new else "The model of an earlier run, trained"
    console.print(
        f"{made} in {result.seconds:,.0f} s with {_counted_threads(result.threads)}: "
        f"{result.parameters / 1e6:.1f} million parameters. Loss on {result.held_out} held-out docstrings: "
        f"{result.loss:.2f} nats per token, {result.loss_before:.2f} before the training"
    )
    return writer


@contextmanager
def _compiler_folder() -> Iterator[None]:
    """The import of torch's compiler, by transformers, makes a folder in the system's temporary folder that nothing
    deletes, unless this variable names another one."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as folder:
        os.environ[name] = folder if before is None else before
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]


def _counted_threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number} threads"


@contextmanager
def _training_bar(console: Console, steps: int) -> Iterator[Callable[[int, float], None]]:
    """Where the output is no terminal: some lines."""
    if not console.is_terminal:
        every = max(1, steps // _LINES)

        def tell(step: int, loss: float) -> None:
            if step % every == 0 or step == steps:
                console.print(f"Training: step {step:,} of {steps:,}, loss {loss:.2f}")

        yield tell
        return
    columns = (
        TextColumn("Training, loss {task.fields[loss]:.2f}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=steps, loss=0.0)
        yield lambda step, loss: progress.update(bar, completed=step, loss=loss)


def _write(
    console: Console, settings: Settings, stack: LocalStack, prompts: Sequence[str]
) -> tuple[list[str], RunFigures]:
    """(the texts, figures) of one text alone, and then of all at once."""
    with Client.from_env(settings=settings) as client:
        start = _counted(stack, 0)["generated_tokens"]
        console.print("\nOne text alone:\n")
        (alone,), _ = _stream(console, client, prompts[:1], seed=len(prompts))
        before = _counted(stack, start + alone.tokens)
        console.print(f"\n{len(prompts)} texts at once:\n")
        runs, texts = _stream(console, client, prompts, seed=0)
        after = _counted(stack, before["generated_tokens"] + sum(run.tokens for run in runs))
    return texts, figures_of(alone, runs, EngineCounts.between(before, after))


def _stream(console: Console, client: Client, prompts: Sequence[str], *, seed: int) -> tuple[list[TextRun], list[str]]:
    """(times, texts). The texts are shown as they are written. Raises JobFailed."""
    news: SimpleQueue[tuple[int, str] | None] = SimpleQueue()

    def read(number: int, job: JobHandle, run: TextRun) -> None:
        try:
            for event in job.stream(timeout=_STREAM_S):
                if event.type == "chunk":
                    run.chunks.append((time.monotonic(), len(event.data["token_ids"])))
                    news.put((number, str(event.data["text"])))
            job.result(timeout=_STREAM_S)
        finally:
            news.put(None)

    runs = [TextRun(time.monotonic()) for _ in prompts]
    with LiveTexts(console, prompts) as live, ThreadPoolExecutor(len(prompts)) as readers:
        reading = []
        for number, (prompt, run) in enumerate(zip(prompts, runs, strict=True)):
            run.submitted_at = time.monotonic()
            job = client.submit(MODEL, {"prompt": EXAMPLE + prompt}, options=replace(_PARAMS, seed=seed + number))
            reading.append(readers.submit(read, number, job, run))
        left = len(prompts)
        while left:
            if (new := news.get()) is None:
                left -= 1
            else:
                live.add(*new)
        for each in reading:
            each.result()
    return runs, list(live.texts)


def _engine(stack: LocalStack) -> dict[str, Any]:
    """The figures of the engine in the last report of its worker."""
    found = [engine for report in stack.worker_reports() for engine in report.get("engines", ())]
    return dict(found[0]) if found else {}


def _counted(stack: LocalStack, tokens: int) -> dict[str, Any]:
    """The engine's figures, once it has reported so many tokens; it reports once a second."""
    until = time.monotonic() + _COUNT_S
    while (found := _engine(stack)).get("generated_tokens", -1) < tokens and time.monotonic() < until:
        time.sleep(_COUNT_POLL_S)
    if "generated_tokens" not in found:
        raise ModelNotReady(f"The worker has not told its figures within {_COUNT_S:g} s. Expected a report each second")
    return found


def _tell_what_for(console: Console, result: Result) -> None:
    console.print(
        f"\nWhat this model is good for: with {result.parameters / 1e6:.1f} million parameters and "
        f"{result.seconds:,.0f} s of training it has the form of docstrings, and words that often stand together. It "
        "knows nothing: most sentences have little meaning, and what they say of functions is made up. It shows the "
        "engine, its streams and its figures; a larger model computes longer for each token. Serve your own: "
        "docs/how-to/generate.md",
        soft_wrap=True,
    )


def _tell_addresses(console: Console, stack: LocalStack) -> None:
    running = stack.running
    if running.flower_url:
        access = f"(user {running.flower_user}, password {running.flower_password})"
        console.print(f"\nFlower: {running.flower_url} {access}", soft_wrap=True)
    if running.gateway_url:
        body = json.dumps({"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 60, "stream": True})
        request = SampleRequest(f"{running.gateway_url}/v1/completions", body)
        console.print(f"OpenAI's API:\n\n{request.as_curl}\n", soft_wrap=True)


def _steps(console: Console) -> Callable[[str], None]:
    begin = time.perf_counter()

    def show(step: str) -> None:
        console.print(Text.assemble((f"{time.perf_counter() - begin:5.1f} s", "dim"), f"  {step}"))

    return show
