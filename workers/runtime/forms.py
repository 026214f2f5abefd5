"""The forms of one loaded model, one of which is in use.

    run(prepared) -> the form in use --- outputs ----------------------------------> outputs
                          |  an exception, or NaN where the signature allows none; the fallback chain decides
                          '--> the reference, for this very batch --- outputs -----> outputs; the form is dropped
                                                                  '- it fails too -> the reference's result; form kept

The reference is the eager model, unchanged. The other forms are compiled, of lower precision or exported. The optimizer
swaps one of them in between two batches, after its trial beside the traffic has passed. While its circuit breaker does
not admit it, the reference runs in its place.
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
from penstock.registry.package.spec_sections import Precision
from penstock.registry.tensors import Array
from penstock.safety.fallback import LEVELS, FallbackChain, Level, LevelFailure
from penstock.workers.runtime.base import Counted, DeviceLost, Prepared
from penstock.workers.runtime.compilable import ModelCompiler
from penstock.workers.runtime.tracebacks import error_text

__all__ = [
    "EAGER",
    "Forms",
    "Forward",
    "ThreadCopyable",
    "Tunable",
    "WithProvenance",
    "finite_outputs",
    "forms_of",
    "thread_copy_of",
]

logger = logging.getLogger("penstock.runtime")

Forward: TypeAlias = Callable[[Prepared], dict[str, Array]]
"""One forward of a micro-batch: outputs on the host, rows in the order of the jobs; see Runtime.run."""

_generations: Final = itertools.count(1)

EAGER: Final = "eager"
"""The name of the reference."""


@runtime_checkable
class ThreadCopyable(Protocol):
    """A forward that runs a package's code, which may not support two calls at the same time."""

    def __call__(self, prepared: Prepared) -> dict[str, Array]:
        """See Forward."""

    def thread_copy(self) -> Forward:
        """The same forward for another thread: equal outputs, and no shared state that changes."""


def thread_copy_of(forward: Forward) -> Forward:
    """A forward that another thread may call while the model threads call this one."""
    return forward.thread_copy() if isinstance(forward, ThreadCopyable) else forward


@dataclass(frozen=True, slots=True)
class WithProvenance:
    """A forward with the record of how it was made, and with its counters; see Counted."""

    forward: Forward
    made: Mapping[str, object]
    """Plain data, for the record of the decision to use it."""
    counts: Callable[[], Mapping[str, int]]

    def __call__(self, prepared: Prepared) -> dict[str, Array]:
        """See Forward."""
        return self.forward(prepared)

    def thread_copy(self) -> Forward:
        """See ThreadCopyable."""
        return WithProvenance(thread_copy_of(self.forward), self.made, self.counts)


class _Form(NamedTuple):
    name: str
    forward: Forward


@runtime_checkable
class Tunable(Protocol):
    """A Runtime whose model has other forms."""

    @property
    def forms(self) -> Forms:
        """The model's forms; every forward goes through them."""

    @property
    def precision(self) -> Precision:
        """The number format that was asked for."""

    def candidates(self, compiler: ModelCompiler | None) -> Mapping[str, Callable[[], Forward]]:
        """Name -> builder of each form that this model may have here, the most promising of each level first.

        compiler: None where nothing is compiled.

        A builder may take long, and changes nothing that serves. It is never called on a model thread. Where the form
        turns out not to exist, it raises CompilationRefused, ConfigurationError or an error of its framework.
        """


def forms_of(runtime: object) -> Forms | None:
    """The forms of a Tunable runtime; None: its model has no other forms."""
    forms = getattr(runtime, "forms", None)
    return forms if isinstance(forms, Forms) else None


class Forms:
    """One model's forms. Several model threads may call `run` while another thread swaps the form.

    finite: outputs in which NaN and infinity are errors. Errors of the device (MemoryError, DeviceLost) pass through
    `run` and do not count as failures of the form.
    """

    def __init__(self, reference: Forward, finite: tuple[str, ...] = ()) -> None:
        self.reference: Final = reference
        self.on_fallback: Callable[[str, str], None] = _ignore
        """Called on a model thread with the name of a form that was just dropped and the reason. Must be quick."""
        self.admits: Callable[[str], bool] = _always
        """Whether a form may run now, by its name: asks its circuit breaker, for every batch. Must be quick."""
        self.generation = 0
        """A new number after each change of the form in use; 0 before the first change. Two models of a process share
        no number except 0. So if the number is the same before and after a forward, one form computed it."""
        self.on_failure: Callable[[str, str], None] = _ignore
        """The same for a form that failed, stays in use, and has no fallback. See `chain`."""
        self.chain = FallbackChain(LEVELS[:3])
        """Decides whether the reference runs the batch on which a form failed. In a chain without the level `compiled`
        the form stands in the place of the reference: then its errors go on to the executor."""
        self.stopped = ""
        """The form that was in use and is off since it failed or its breaker opened; empty: there is none."""
        self.withholds_texts = False
        """Whether the reason of a form that failed has no text of its exception."""
        self.redact: Callable[[str], str] | None = None
        """Removes personal data from texts of exceptions."""
        self._finite = finite
        self._reference = _Form(EAGER, reference)
        self._chosen = self._current = self._reference
        """The form that was put in use, and the one that runs: the reference, while the other is not admitted."""
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The form in use, which runs the next batch."""
        return self._admitted().name

    @property
    def forward(self) -> Forward:
        """The forward of the form in use. Unlike `run`, it does not fall back to the reference."""
        return self._admitted().forward

    def counts(self) -> Mapping[str, int]:
        """The counters of the form in use; see Counted."""
        forward = self._chosen.forward
        return forward.counts() if isinstance(forward, Counted) else {}

    def use(self, name: str, forward: Forward) -> None:
        """Puts this form in use from the next batch on."""
        with self._lock:
            self._chosen, self.stopped = _Form(name, forward), ""
            self._change(self._chosen if self.admits(name) else self._reference)

    def reset(self, reason: str) -> None:
        """Puts the reference in use from the next batch on."""
        with self._lock:
            before, self._chosen = self._chosen, self._reference
            self._change(self._reference)
            if before is not self._reference:
                self.stopped = before.name
        if before is not self._reference:
            logger.info("the form is dropped", extra={"form": before.name, "reason": reason})

    def run(self, prepared: Prepared, failures: list[LevelFailure] | None = None) -> dict[str, Array]:
        """The batch's outputs from the form in use or, where that fails and may fall back, from the reference.

        failures: takes the level that failed or was skipped, without texts of exceptions, which may repeat an input.
        """
        form = self._admitted()
        if form is self._reference:
            if (self.stopped or self._chosen is not form) and failures is not None:
                self._note_stopped(failures)
            return self.reference(prepared)
        try:
            outputs = form.forward(prepared)
            reason = self._non_finite(outputs)
            if not reason:
                return outputs
            told = reason
            if not self._falls_back:
                # The executor fails the jobs whose answers are not finite.
                self.on_failure(form.name, reason)
                return outputs
        except (MemoryError, DeviceLost):
            raise
        except BaseException as error:  # compiled code may raise anything
            text = error_text(error, withholds_message=self.withholds_texts, redact=self.redact)
            reason, told = text.line, text.name
            if not self._falls_back:
                self.on_failure(form.name, reason)
                raise
        # Outside the handler: while an exception is handled, it keeps the device memory of the failed forward.
        if not (failures is None or failures):
            failures.append(LevelFailure("compiled", f"{form.name}: {told}"))
        outputs = self.reference(prepared)
        if not self._non_finite(outputs):
            self._drop(form, reason)
        return outputs

    @property
    def _falls_back(self) -> bool:
        """Whether the reference is next when a form has failed."""
        level: Level = "compiled" if "compiled" in self.chain.levels else "micro-batched"
        return self.chain.next([level]) == "micro-batched"

    def _note_stopped(self, failures: list[LevelFailure]) -> None:
        """The form that was put in use may not run now."""
        name = self.stopped or self._chosen.name
        if "compiled" in self.chain.levels and not failures:
            failures.append(LevelFailure("compiled", f"skipped: {name} is stopped"))

    def _admitted(self) -> _Form:
        """The form for the next batch: the chosen one, or the reference while that one's breaker is open."""
        chosen = self._chosen
        if chosen is self._reference:
            return chosen
        form = chosen if self.admits(chosen.name) else self._reference
        if form is not self._current:
            with self._lock:
                if self._chosen is chosen:
                    self._change(form)
        return form

    def _change(self, form: _Form) -> None:
        # The number changes before and after the form: a number that is read in between belongs to no form.
        self.generation = next(_generations)
        self._current = form
        self.generation = next(_generations)

    def _non_finite(self, outputs: Mapping[str, Array]) -> str:
        for name in self._finite:
            if not np.isfinite(outputs[name]).all():
                return f"output {name} contains NaN or infinity"
        return ""

    def _drop(self, form: _Form, reason: str) -> None:
        """The form failed on a batch that the reference ran well. One such failure is enough."""
        with self._lock:
            if self._chosen is not form:
                return
            self._chosen, self.stopped = self._reference, form.name
            self._change(self._reference)
        logger.warning("a form failed and is dropped", extra={"form": form.name, "reason": reason})
        self.on_fallback(form.name, reason)


def finite_outputs(spec: ModelSpec) -> tuple[str, ...]:
    """The outputs in which NaN and infinity fail their job."""
    return tuple(one.name for one in spec.outputs if one.dtype.startswith("float") and not one.allow_nan)


def _ignore(_form: str, _reason: str) -> None:
    """No optimizer is attached."""


def _always(_form: str) -> bool:
    """No breaker is attached."""
    return True
