"""A step of one version -> a trial: built beside the traffic, compared with the reference, and timed.

    golden jobs -> batches -> the reference's outputs --.
                         '--> the candidate's outputs --+-> Gate.judge: equal enough? -> timed in turns: faster?

A trial changes nothing that serves. It runs copies of the model for this thread, never on a model thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

from penstock.registry.errors import ConfigurationError
from penstock.registry.tensors import STRING, Array
from penstock.safety.orchestrator import Gate, joined
from penstock.safety.validators import Validator, changed_precision_validators, same_precision_validators
from penstock.workers.compilation import TorchCompiler
from penstock.workers.levels.attached import AttachedVersion
from penstock.workers.levels.profiler import trace
from penstock.workers.levels.progression import COMPILED, MIN_GAIN, TOKENIZER_POOL, Decision, DecisionAction, is_form
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime.base import Prepared, Runtime
from penstock.workers.runtime.compilable import CompilationRefused
from penstock.workers.runtime.forms import Forward, Tunable, WithProvenance, thread_copy_of
from penstock.workers.runtime.tokeniser import Tokenising

__all__ = ["Trial", "Trials"]

logger = logging.getLogger("penstock.runtime")

_POOL_TEXTS: Final = 256
_POOL_ROUNDS: Final = 5
_MIN_POOL_GAIN: Final = 1.2
_MAX_BATCHES: Final = 8
"""Golden batches of one trial."""
_MIN_ROUNDS: Final = 3
_MAX_ROUNDS: Final = 9
_TIMING_S: Final = 3.0
"""After this time no new round begins, once there were `_MIN_ROUNDS`."""
_SAME_PRECISION: Final = frozenset({COMPILED, "onnx"})


class Trial(NamedTuple):
    """How a step did. A trial with a reason has failed.

    forward: the forward of a form that passed. made: how the form was made.
    """

    reason: str = ""
    gain: float | None = None
    evidence: Mapping[str, float] = {}
    forward: Forward | None = None
    made: Mapping[str, object] = {}

    def decision(self, step: str, criterion: str) -> Decision:
        """The decision that follows from the trial."""
        action: DecisionAction = "refused" if self.reason else "enabled"
        return Decision(step, action, criterion, self.reason, self.gain, self.evidence, self.made)


class _GoldenBatches(NamedTuple):
    """Golden jobs in batches as they would be served, and the outputs that these jobs were given."""

    prepared: Sequence[Prepared]
    served: Sequence[Mapping[str, Array]]


class Trials:
    """Builds, judges and times candidates, on the caller's thread.

    tolerance: of forms in the same precision. compiler: None where nothing is compiled. clock: monotonic seconds.
    """

    def __init__(
        self, tolerance: float, metrics: InferenceMetrics, compiler: TorchCompiler | None, clock: Callable[[], float]
    ) -> None:
        self._tolerance = tolerance
        self._metrics = metrics
        self._compiler = compiler
        self._clock = clock
        self._gate = Gate()

    def forms_of(self, runtime: Runtime) -> list[str]:
        """The forms that this runtime may have here, the most promising of each level first."""
        return list(runtime.candidates(self._compiler)) if isinstance(runtime, Tunable) else []

    def run(self, version: AttachedVersion, step: str) -> Trial:
        """Tries a step; whatever the build raises becomes the reason of a failed trial."""
        try:
            if is_form(step):
                return self._try_form(version, step)
            return self._try_pool(version) if step == TOKENIZER_POOL else Trial()
        except (CompilationRefused, ConfigurationError) as refusal:
            return Trial(str(refusal))
        except Exception as error:  # a framework may raise anything while it builds a form
            logger.warning("a step could not be tried", extra={"step": step}, exc_info=True)
            return Trial(f"{type(error).__name__}: {error!s:.200}")

    def trace(self, version: AttachedVersion, *, is_cuda: bool) -> str:
        """The table of torch.profiler for two golden batches, or the reason why there is none."""
        runtime = version.runtime
        try:
            batches = _golden_batches(version).prepared
            run = thread_copy_of(runtime.forms.forward) if isinstance(runtime, Tunable) else runtime.run
            return trace(run, batches[:2], is_cuda=is_cuda, clock=self._clock)
        except ConfigurationError as refusal:
            return f"it cannot be traced: {refusal}"
        except Exception as error:
            logger.warning("a trace failed", exc_info=True)
            return f"it cannot be traced: {type(error).__name__}"

    def _try_form(self, version: AttachedVersion, step: str) -> Trial:
        """Builds a form, and compares and times it on golden jobs."""
        runtime = version.runtime
        if not isinstance(runtime, Tunable):
            raise ConfigurationError(f"{version.key.model} has no other forms")
        batches = _golden_batches(version)
        eager = thread_copy_of(runtime.forms.reference)
        reference = [eager(batch) for batch in batches.prepared]
        # Before the form is built, which can take minutes.
        repeated = self._gate.judge(
            batches.served, reference, changed_precision_validators(runtime.spec.outputs, joined(reference))
        )
        if not repeated.accepted:
            return Trial(f"the model does not repeat its answers: {'; '.join(repeated.reasons)}")
        forward = runtime.candidates(self._compiler)[step]()
        trial = self._judge(version, step, forward, batches, reference)
        return trial._replace(made=forward.made) if isinstance(forward, WithProvenance) else trial

    def _judge(
        self,
        version: AttachedVersion,
        step: str,
        forward: Forward,
        batches: _GoldenBatches,
        reference: Sequence[Mapping[str, Array]],
    ) -> Trial:
        outputs = version.runtime.spec.outputs
        validators: Mapping[str, Validator] = changed_precision_validators(
            outputs, joined(reference), is_int8=step == "int8"
        )
        if step in _SAME_PRECISION:
            validators = same_precision_validators(outputs, self._tolerance)
        verdict = self._gate.judge([forward(batch) for batch in batches.prepared], reference, validators)
        key = version.key
        self._metrics.gate(key.model, key.version, "", "accepted" if verdict.accepted else "refused")
        evidence = {name: value for name, value in verdict.evidence.items() if math.isfinite(value)}
        if not verdict.accepted:
            return Trial("; ".join(verdict.reasons), None, evidence)
        return self._timed(version.runtime, forward, batches.prepared, evidence)

    def _timed(
        self, runtime: Runtime, forward: Forward, batches: Sequence[Prepared], evidence: Mapping[str, float]
    ) -> Trial:
        """Whether the form is faster than the one in use. Both run every batch, in turns."""
        in_use = thread_copy_of(runtime.forms.forward) if isinstance(runtime, Tunable) else forward
        candidate_s: list[float] = []
        in_use_s: list[float] = []
        begun = self._clock()
        while len(candidate_s) < _MIN_ROUNDS or (len(candidate_s) < _MAX_ROUNDS and self._clock() - begun < _TIMING_S):
            in_use_s.append(self._seconds(in_use, batches))
            candidate_s.append(self._seconds(forward, batches))
        # The median of the ratios, not of the times: other load on the machine disturbs both halves of a round alike.
        gain = median(old / max(new, 1e-9) for old, new in zip(in_use_s, candidate_s, strict=True))
        figures = {**evidence, "in_use_s": median(in_use_s), "form_s": median(candidate_s)}
        reason = _too_little(gain, MIN_GAIN)
        return Trial(reason, round(gain, 3), figures, None if reason else forward)

    def _seconds(self, forward: Forward, batches: Iterable[Prepared]) -> float:
        begun = self._clock()
        for batch in batches:
            forward(batch)
        return self._clock() - begun

    def _try_pool(self, version: AttachedVersion) -> Trial:
        runtime, goldens = version.runtime, version.profiler.goldens
        tokeniser = runtime.tokeniser if isinstance(runtime, Tokenising) else None
        if tokeniser is None or goldens is None:
            return Trial("nothing is loaded")
        name = next(one.name for one in runtime.spec.inputs if one.dtype == STRING)
        texts = [str(text) for golden in goldens.goldens() for text in golden.inputs[name].tolist()]
        texts = (texts * math.ceil(_POOL_TEXTS / len(texts)))[:_POOL_TEXTS]
        gain = round(tokeniser.pool_gain(texts, _POOL_ROUNDS, self._clock), 3)
        return Trial(_too_little(gain, _MIN_POOL_GAIN), gain, {"threads": float(tokeniser.max_threads)})


def _too_little(gain: float, least: float) -> str:
    return "" if gain >= least else f"gain {gain:.2f}, expected at least {least:g}"


def _golden_batches(version: AttachedVersion) -> _GoldenBatches:
    """The largest groups of jobs that share a batch key come first. Raises ConfigurationError where no job fits."""
    runtime, goldens = version.runtime, version.profiler.goldens
    signature = runtime.spec.signature
    groups: dict[Hashable, list[Any]] = {}
    for golden in goldens.goldens() if goldens else ():
        if signature.rows(golden.inputs) <= version.max_rows:
            groups.setdefault(signature.batch_key(dict(golden.inputs)), []).append(golden)
    prepared: list[Prepared] = []
    served: list[Mapping[str, Array]] = []
    for group in sorted(groups.values(), key=len, reverse=True):
        for part in _parts(group, lambda golden: signature.rows(golden.inputs), version.max_rows):
            prepared.append(runtime.prepare([golden.inputs for golden in part]))
            served.append(joined([golden.outputs for golden in part]))
    if not prepared:
        raise ConfigurationError("no golden job fits into a batch")
    return _GoldenBatches(prepared[:_MAX_BATCHES], served[:_MAX_BATCHES])


def _parts(items: Sequence[Any], rows_of: Callable[[Any], int], max_rows: int) -> list[list[Any]]:
    """The items in order, cut before the item that would make too many rows."""
    parts: list[list[Any]] = []
    rows = max_rows + 1
    for item in items:
        rows += rows_of(item)
        if rows > max_rows:
            parts.append([])
            rows = rows_of(item)
        parts[-1].append(item)
    return parts
