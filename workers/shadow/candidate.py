"""The candidate of a shadow, in a process of its own: it may hang, crash or hold the interpreter's lock.

    ShadowWorker -- run --> a thread that waits --> InstanceProcess --> outputs
                     `-- after the time limit: the process is killed --> CandidateFailed; the next run starts it again

The process has no secrets and no connection to the broker, and it ends with the shadow worker.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock.registry.backoff import backoff_delay_s
from penstock.registry.errors import ConfigurationError
from penstock.registry.package import Package
from penstock.registry.tensors import Array
from penstock.workers.runtime.base import InstanceLost
from penstock.workers.runtime.instance_process import FormRequest, InstanceProcess
from penstock.workers.runtime.loading import LoadOptions, NullContext
from penstock.workers.runtime.tracebacks import message_of, name_of

__all__ = ["Candidate", "CandidateFailed", "CandidateUnwanted"]

T = TypeVar("T")

_FORM_PROGRAM: Final = "penstock.workers.shadow.form_process"
_BEAT_S: Final = 1.0
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_QUICK_RESTARTS: Final = 3
"""Of one candidate whose process had answered something."""
_LOADS_BETWEEN: Final = 99
"""So many times the duration of a load lie between two others: they take a hundredth of the time, and the p99 of the
jobs beside them stays what it is."""
_ENDED_S: Final = 10.0
"""How long a call may take to end once its process was killed."""


class CandidateFailed(Exception):
    """The candidate gave no outputs. outcome: `error`, `timeout` or `crashed`. problem: the same in words that quote
    no input."""

    def __init__(self, outcome: str, reason: str, problem: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.problem = problem


class CandidateUnwanted(Exception):
    """Nobody wants the outputs any more: the pause before a restart was left."""


class Candidate:
    """One version in a child process, one forward at a time. Call load, then run, then close.

    form: the form that runs; empty: the version as its author built it. device, threads: see Runtime.load. timeout_s:
    of a forward; load_timeout_s: of a load. withholds_texts: whether of an exception only the class is told. on_wait:
    called about once a second while a call waits. is_wanted: asked as often in the pause before a restart. pause: waits
    for some seconds, or less. clock: monotonic seconds.

    A process that ended in a forward is started again after a pause, longer each time until a forward succeeds. If the
    process had answered nothing, or others before it had ended, too, the next load comes a multiple of its duration
    after the last one: loads without end would take more of the machine than the candidate.
    """

    def __init__(
        self,
        package: Package,
        options: LoadOptions,
        *,
        form: str = "",
        device: str,
        threads: int,
        timeout_s: float,
        load_timeout_s: float,
        withholds_texts: bool,
        on_wait: Callable[[], None] = lambda: None,
        is_wanted: Callable[[], bool] = lambda: True,
        pause: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.package: Final = package
        self._options = options
        self._form = form
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """What a form needs while it runs."""
        self._device = device
        self._threads = threads
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._withholds_texts = withholds_texts
        self._on_wait = on_wait
        self._is_wanted = is_wanted
        self._pause = pause
        self._clock = clock
        self._process: InstanceProcess | None = None
        self.content_hash = ""
        """Of the loaded files; empty until they are."""
        self._lost_in_a_row = 0
        """Processes that ended in a forward since one succeeded."""
        self._has_answered = False
        """Whether a forward of the present process, or of the last one, succeeded."""
        self._quick_restarts = _QUICK_RESTARTS
        """Those that are left."""
        self._load_s = 0.0
        """How long the last load took."""
        self._loaded_at = 0.0

    @property
    def pid(self) -> int | None:
        """The process of the candidate; None: it does not run."""
        return self._process.pid if self._process is not None else None

    def load(self) -> None:
        """Start the process and load the version. Raises ConfigurationError, also after the time limit."""
        self.close()
        process = self._process = InstanceProcess(
            self.package, self._options, self._threads, self._device, form=self._form_request()
        )
        begun = self._clock()
        process.begin_load()
        try:
            loaded = self._within(process, process.end_load, self._load_timeout_s)
        except CandidateFailed as failure:
            raise ConfigurationError(f"{self.package.spec.reference}: {failure}") from None
        except BaseException:
            self.close()
            raise
        self.content_hash = loaded.content_hash
        self._has_answered = False
        self._loaded_at = self._clock()
        self._load_s = self._loaded_at - begun

    def run(self, inputs: Mapping[str, Array]) -> tuple[dict[str, Array], float]:
        """One forward: the outputs, and its seconds. A process that ended is started again first.

        Raises CandidateFailed, CandidateUnwanted, and ConfigurationError when the version cannot be loaded again.
        """
        if self._process is None or not self._process.is_alive:
            self._await_restart()
            self.load()
        process = self._process
        if process is None:
            raise ConfigurationError(f"{self.package.spec.reference}: its process has ended")
        begun = self._clock()
        try:
            outputs = self._within(process, lambda: self._forward(process, inputs), self._timeout_s)
        except CandidateFailed:
            self._lost_in_a_row += 1
            raise
        except InstanceLost as error:
            self.close()
            self._lost_in_a_row += 1
            raise CandidateFailed("crashed", str(error), "the process of the candidate ended") from None
        except Exception as error:  # the process raises what the model raised
            raise CandidateFailed("error", self._told(error), f"the candidate raised {name_of(error)}") from None
        self._lost_in_a_row = 0
        self._has_answered = True
        return outputs, self._clock() - begun

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end()
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _form_request(self) -> FormRequest | None:
        if not self._form:
            return None
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-form-", ignore_cleanup_errors=True)
        return FormRequest(self._form, _FORM_PROGRAM, Path(self._folder.name))

    def _await_restart(self) -> None:
        if not self._lost_in_a_row:
            return
        left_s = backoff_delay_s(self._lost_in_a_row, _FIRST_PAUSE_S, _LONGEST_PAUSE_S, 0.0)
        due_s = _LOADS_BETWEEN * self._load_s - (self._clock() - self._loaded_at)
        if due_s > left_s:
            if self._has_answered and self._quick_restarts:
                self._quick_restarts -= 1
            else:
                left_s = due_s
        while left_s > 0:
            self._on_wait()
            if not self._is_wanted():
                raise CandidateUnwanted
            self._pause(min(_BEAT_S, left_s))
            left_s -= _BEAT_S

    def _forward(self, process: InstanceProcess, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if not self.package.spec.streams:
            return process.run(inputs)
        steps = process.stream(inputs, NullContext())
        try:
            while True:
                next(steps)
        except StopIteration as end:
            outputs: dict[str, Array] = end.value
            return outputs

    def _told(self, error: BaseException) -> str:
        return name_of(error) if self._withholds_texts else f"{name_of(error)}: {message_of(error)}"

    def _within(self, process: InstanceProcess, call: Callable[[], T], limit_s: float) -> T:
        """The value of the call. After the time limit, the process is killed. Raises CandidateFailed then."""
        ended = threading.Event()
        outcome: list[Any] = []

        def work() -> None:
            try:
                outcome[:] = [call(), None]
            except BaseException as error:  # it is raised by the thread that waits
                outcome[:] = [None, error]
            ended.set()

        threading.Thread(target=work, name="candidate", daemon=True).start()
        until = self._clock() + limit_s
        while not ended.wait(max(0.0, min(_BEAT_S, until - self._clock()))):
            self._on_wait()
            if self._clock() >= until:
                process.end()
                ended.wait(_ENDED_S)
                self._process = None
                late = f"took longer than its limit of {limit_s:g} s"
                raise CandidateFailed("timeout", f"it {late}", f"the candidate {late}")
        value, error = outcome
        if error is not None:
            raise error
        result: T = value
        return result
