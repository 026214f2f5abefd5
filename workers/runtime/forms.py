"""The forms in which one loaded model can answer, and the one that does.

    run(prepared) -> the form in use --- an answer ------------------------------> outputs
                          |  an exception, or NaN where none belongs
                          '--> the reference, for this very batch -- an answer --> outputs; the form is given up
                                                                  '- the same ---> the model's own answer; it stays

The reference is the model as its author built it. Other forms (compiled, of lower precision, exported) are swapped in
between two batches by the optimizer, once they have proved themselves beside the traffic.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from penstock.registry.package import ModelSpec
from penstock.registry.tensors import Array
from penstock.workers.runtime.base import Counted, DeviceLost, Prepared
from penstock.workers.runtime.compilable import ModelCompiler

__all__ = ["EAGER", "Forms", "Forward", "WithProvenance", "Tunable", "ThreadCopyable", "finite_outputs", "twin_of"]

logger = logging.getLogger("penstock.runtime")

Forward: TypeAlias = Callable[[Prepared], dict[str, Array]]
"""One forward of a micro-batch: outputs on the host, rows in the order of the jobs; see Runtime.run."""

_stamps: Final = itertools.count(1)

EAGER: Final = "eager"
"""The name of the reference."""


@runtime_checkable
class ThreadCopyable(Protocol):
    """A forward that runs an author's code, which need not bear a second call at the same time."""

    def __call__(self, prepared: Prepared) -> dict[str, Array]:
        """See Forward."""

    def thread_copy(self) -> Forward:
        """The same for another thread: it answers alike and shares nothing that changes."""


def twin_of(forward: Forward) -> Forward:
    """What a thread that is none of the model's may call while the model serves."""
    return forward.thread_copy() if isinstance(forward, ThreadCopyable) else forward


@dataclass(frozen=True, slots=True)
class WithProvenance:
    """A forward of which is known how it was made, and what it has met since; see Counted."""

    forward: Forward
    made: Mapping[str, object]
    """Plain data, for the record of the decision to use it."""
    counts: Callable[[], Mapping[str, int]]

    def __call__(self, prepared: Prepared) -> dict[str, Array]:
        """See Forward."""
        return self.forward(prepared)


class _Form(NamedTuple):
    name: str
    forward: Forward


@runtime_checkable
class Tunable(Protocol):
    """What a runtime whose model has other forms shows besides `Runtime`."""

    @property
    def forms(self) -> Forms:
        """Through which it runs."""

    def candidates(self, compiler: ModelCompiler | None) -> Mapping[str, Callable[[], Forward]]:
        """The forms that could be had here, by name, the most promising of each level first.

        compiler: None where nothing is to be compiled.

        A builder may take long and changes nothing that serves; it is never called on a model thread. It raises
        CompilationRefused, ConfigurationError or whatever its framework does when there is no such form after all.
        """


class Forms:
    """One model's forms. `run` may be called on several model threads while another thread swaps.

    finite: outputs in which NaN and infinity are never right. What says that the device is at fault (MemoryError,
    DeviceLost) passes through `run` and is held against no form.
    """

    def __init__(self, reference: Forward, finite: tuple[str, ...] = ()) -> None:
        self.reference: Final = reference
        self.on_fallback: Callable[[str, str], None] = _unheard
        """Called on a model thread with the name of a form that was just given up, and why. Must be quick."""
        self.generation = 0
        """Another number after each change of the form in use; 0 before the first. No two models of a process share
        one but 0: what was answered under a number was answered by one form, unless the number changed meanwhile."""
        self._finite = finite
        self._reference = _Form(EAGER, reference)
        self._current = self._reference
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The form that answers the next batch."""
        return self._current.name

    @property
    def forward(self) -> Forward:
        """What that form does; unlike `run` it has no reference to fall back to."""
        return self._current.forward

    def counts(self) -> Mapping[str, int]:
        """What the form in use has counted; see Counted."""
        forward = self._current.forward
        return forward.counts() if isinstance(forward, Counted) else {}

    def use(self, name: str, forward: Forward) -> None:
        """From the next batch on this form answers."""
        self._change(_Form(name, forward))

    def reset(self, reason: str) -> None:
        """From the next batch on the reference answers."""
        former = self._current
        self._change(self._reference)
        if former is not self._reference:
            logger.info("the form is given up", extra={"form": former.name, "reason": reason})

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """The batch's outputs, by the form in use or, where that fails, by the reference."""
        form = self._current
        if form is self._reference:
            return self.reference(prepared)
        try:
            outputs = form.forward(prepared)
            reason = self._non_finite(outputs)
            if not reason:
                return outputs
        except (MemoryError, DeviceLost):
            raise
        except Exception as error:  # a compiler's output may raise anything
            reason = f"{type(error).__name__}: {error!s:.200}"
        # Out here, because an exception that is being handled keeps what the failed forward had on the device.
        outputs = self.reference(prepared)
        if not self._non_finite(outputs):
            self._give_up(form, reason)
        return outputs

    def _change(self, form: _Form) -> None:
        # Before and after: whoever reads the number in between sees one that holds for nothing.
        self.generation = next(_stamps)
        self._current = form
        self.generation = next(_stamps)

    def _non_finite(self, outputs: Mapping[str, Array]) -> str:
        for name in self._finite:
            if not np.isfinite(outputs[name]).all():
                return f"output {name} contains NaN or infinity"
        return ""

    def _give_up(self, form: _Form, reason: str) -> None:
        """What the reference did right, this form did wrong: once is enough."""
        with self._lock:
            if self._current is not form:
                return
            self._change(self._reference)
        logger.warning("a form failed and is given up", extra={"form": form.name, "reason": reason})
        self.on_fallback(form.name, reason)


def finite_outputs(spec: ModelSpec) -> tuple[str, ...]:
    """The outputs in which NaN and infinity fail their job."""
    return tuple(one.name for one in spec.outputs if one.dtype.startswith("float") and not one.allow_nan)


def _unheard(_form: str, _reason: str) -> None:
    """Nobody asked to be told."""
