"""What the acts stand on: a private stack, traffic of checked jobs, and commands that run as a user would run them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from penstock import Client
from penstock.compose.safety_demo.models import EMBEDDING, TOPICS, write_models
from penstock.compose.stack import fleet
from penstock.compose.stack.local import LocalStack, private_settings
from penstock.registry.broker.breakers import BreakerRecord, breaker_name
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.broker.redis_shadow import RedisShadow
from penstock.registry.errors import ConfigurationError, PenstockError
from penstock.registry.settings import Settings
from penstock.registry.tensors import Array

__all__ = ["Answered", "CommandRun", "Stage", "Traffic", "open_stage"]

_RESULT_S: Final = 60.0
_COMMAND_S: Final = 400.0
_OWN: Final = {
    # int8 and ONNX are forms on a CPU. A compiled form would take half a minute more, and shows nothing else.
    "PENSTOCK_INFERENCE_DEVICE": "cpu",
    "PENSTOCK_INFERENCE_COMPILATION_ENABLED": "false",
    "PENSTOCK_INFERENCE_MAX_LEVEL": "2",
    "PENSTOCK_INFERENCE_ENABLED": "true",
}


@dataclass(frozen=True, slots=True)
class CommandRun:
    """A command that ended: its words, what it printed as data, and its seconds."""

    words: tuple[str, ...]
    exit_code: int
    data: Any
    seconds: float

    @property
    def text(self) -> str:
        """The command line as a user types it."""
        return "penstock " + " ".join(self.words)


@dataclass(frozen=True, slots=True)
class Answered:
    """One job of the traffic: seconds since its begin, milliseconds until the answer. problem: empty if it is right.
    level: of the fallback chain, see JobInfo; empty also where it was not asked."""

    at_s: float
    latency_ms: float
    problem: str = ""
    level: str = ""


class Stage:
    """A running stack with both models. `open_stage` makes one."""

    def __init__(self, console: Console, settings: Settings, environ: Mapping[str, str], stack: LocalStack) -> None:
        self.console: Final = console
        self.settings: Final = settings
        self._environ = dict(environ)
        self._stack = stack
        self.url: Final = stack.running.redis_url

    def client(self) -> Client:
        """A client of the stack."""
        return Client.from_env(settings=self.settings)

    def run(self, *words: str) -> CommandRun:
        """Runs `penstock WORDS --json` in a process of its own, and shows its progress.

        Raises ConfigurationError when it does not end in time, or prints no data.
        """
        self.console.print(Text(f"  $ penstock {' '.join(words)}", style="cyan"))
        begun = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-m", "penstock", *words, "--json"],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            lines: list[str] = []
            teller = threading.Thread(target=self._tell, args=(child, lines), daemon=True)
            teller.start()
            late = threading.Timer(_COMMAND_S, child.kill)
            late.start()
            try:
                printed = child.stdout.read() if child.stdout is not None else ""
                child.wait()
            finally:
                late.cancel()
                child.kill()
                teller.join(1.0)
        try:
            data = json.loads(printed)
        except ValueError:
            told = lines[-1] if lines else f"exit status {child.returncode}"
            raise ConfigurationError(f"penstock {' '.join(words)}: {told}. Expected data") from None
        return CommandRun(words, child.returncode, data, round(time.monotonic() - begun, 1))

    def _tell(self, child: subprocess.Popen[str], lines: list[str]) -> None:
        for line in child.stderr or ():
            lines.append(line.rstrip())
            self.console.print(Text(f"    {lines[-1]}", style="dim"))

    def form(self, model: str) -> str:
        """The form in use, as the worker reported it last; empty: it has not reported one."""
        for report in self._stack.worker_reports():
            for entry in report.get("levels", {}).get(model, ()):
                return str(entry["form"])
        return ""

    def breaker(self, model: str, form: str) -> tuple[BreakerRecord, float]:
        """The circuit breaker of a form of version 1, and the broker's clock in ms."""
        with closing(RedisBreakers.from_url(self.url)) as end:
            reading = end.breakers(model)
        return reading.records.get(breaker_name(model, "1", form), BreakerRecord()), reading.now_ms

    def series(self, model: str) -> list[dict[str, Any]]:
        """The figures of the compared pairs of the model's last shadow, in order."""
        with closing(RedisShadow.from_url(self.url)) as end:
            return [json.loads(point) for point in end.state(model).series]


class Traffic:
    """Jobs in a thread until the block ends. inputs: makes those of job n. check: what is wrong with the answer."""

    def __init__(
        self,
        stage: Stage,
        model: str,
        inputs: Callable[[int], Mapping[str, Any]],
        check: Callable[[int, Mapping[str, Array]], str],
        *,
        burst: int,
        pause_s: float,
    ) -> None:
        self.answered: list[Answered] = []
        self.tells_levels = False
        """Whether each job is asked for the level that answered it."""
        self._stage = stage
        self._model = model
        self._inputs = inputs
        self._check = check
        self._burst = burst
        self._pause_s = pause_s
        self._begun = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._submit, name="demo-traffic")

    @property
    def now_s(self) -> float:
        """Seconds since the begin."""
        return time.monotonic() - self._begun

    @property
    def problems(self) -> list[str]:
        """Failed jobs and wrong answers."""
        return [each.problem for each in self.answered if each.problem]

    @property
    def facts(self) -> dict[str, Any]:
        """Jobs so far, and those that failed or were answered wrongly."""
        return {"jobs": len(self.answered), "wrong_or_failed": len(self.problems), "problems": self.problems[:3]}

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def submit(self, client: Client, numbers: Sequence[int]) -> None:
        """Submits these jobs and takes their answers in."""
        begun = time.monotonic()
        jobs = client.submit_many(self._model, [self._inputs(number) for number in numbers])
        for number, job in zip(numbers, jobs, strict=True):
            try:
                problem = self._check(number, job.result(timeout=_RESULT_S))
            except PenstockError as error:
                problem = f"{type(error).__name__}: {error}"
            latency_ms = (time.monotonic() - begun) * 1e3
            level = job.info(timeout=_RESULT_S).level if self.tells_levels and not problem else ""
            self.answered.append(Answered(round(begun - self._begun, 3), round(latency_ms, 2), problem, level))

    def _submit(self) -> None:
        number = 0
        with self._stage.client() as client:
            while not self._is_over.is_set():
                self.submit(client, range(number, number + self._burst))
                number += self._burst
                self._is_over.wait(self._pause_s)


@contextmanager
def open_stage(console: Console, environ: Mapping[str, str], folder: Path) -> Iterator[Stage]:
    """Starts the stack. folder: an empty one, for the models. Raises ConfigurationError when it cannot start."""
    write_models(folder)
    begun = time.monotonic()

    def show(step: str) -> None:
        console.print(Text.assemble((f"{time.monotonic() - begun:5.1f} s", "dim"), f"  {step}"))

    with ExitStack() as ends:
        models = [EMBEDDING, TOPICS]
        settings, own = ends.enter_context(private_settings({**environ, **_OWN}, models, models_root=folder))
        devices = fleet.choose(settings, own)
        stack = ends.enter_context(LocalStack(settings, devices, environ=own, with_flower=False, on_progress=show))
        yield Stage(console, settings, own, stack)
