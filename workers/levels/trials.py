"""A step of one version -> a trial: built beside the traffic, compared with the reference, and timed.

    golden jobs -> batches -> the reference's outputs --.
                         '--> the candidate's outputs --+-> judged: equal enough? -> timed in turns: faster?
    Trial: what was found -> SafetyOrchestrator.gate_optimization decides

A trial changes nothing that serves. It runs copies of the model for this thread, never on a model thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple

from penstock.registry.errors import ConfigurationError
from penstock.registry.tensors import STRING, Array
from penstock.safety.drift import DriftLimits
from penstock.safety.golden_store import Golden
from penstock.safety.orchestrator import Action, GateEvidence, Judgement, joined, judge
from penstock.safety.validator_registry import ValidatorRegistry
from penstock.safety.validators import Validator, changed_precision_validators, same_precision_validators
from penstock.workers.compilation import TorchCompiler
from penstock.workers.levels.attached import AttachedVersion
from penstock.workers.levels.profiler import trace
from penstock.workers.levels.progression import (
    BATCHING,
    MIN_GAIN,
    SAME_PRECISION,
    TOKENIZER_CACHE,
    TOKENIZER_POOL,
    Decision,
    is_form,
)
from penstock.workers.levels.spot_check import SpotFinding, SpotSample, SpotWatch
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime.base import Prepared, Runtime
from penstock.workers.runtime.compilable import CompilationRefused
from penstock.workers.runtime.forms import Forward, Tunable, WithProvenance, thread_copy_of
from penstock.workers.runtime.tokeniser import Tokenising
from penstock.workers.runtime.tracebacks import error_text

__all__ = ["Trial", "Trials"]

logger = logging.getLogger("penstock.runtime")

_POOL_TEXTS: Final = 256
_POOL_ROUNDS: Final = 5
_MIN_POOL_GAIN: Final = 1.2
_MAX_BATCHES: Final = 8
"""Golden batches of one trial."""
_MOST_ALONE: Final = 32
"""Golden jobs that run alone, to be compared with a batch of them."""
_SAMPLE_TEXTS: Final = ["", "a", "A second text, with a comma.", "Zwölf Boxkämpfer", "数字 12 and 345", "x" * 200]
"""For a model whose texts are not kept."""
_MIN_ROUNDS: Final = 3
_MAX_ROUNDS: Final = 9
_TIMING_S: Final = 3.0
"""After this time no new round begins, once there were `_MIN_ROUNDS`."""


class Trial(NamedTuple):
    """What was found about a step. forward: that of a form with nothing against it. has_raised: whether building or
    running it raised an error, other than one that says that there is no such form here."""

    evidence: GateEvidence
    forward: Forward | None = None
    has_raised: bool = False

    @property
    def reason(self) -> str:
        """All reasons against the step in one line; empty where there is none."""
        return "; ".join(self.evidence.reasons)

    @property
    def is_refuted(self) -> bool:
        """Whether outputs were compared, and differed."""
        judgement = self.evidence.judgement
        return judgement is not None and bool(judgement.reasons)

    @property
    def is_failure(self) -> bool:
        """Whether the step erred, and was not merely too slow, or unknown here."""
        return self.has_raised or self.is_refuted

    def decision(self, step: str, criterion: str) -> Decision:
        """The decision that the gate would make."""
        found = self.evidence
        action: Action = "refused" if self.reason else "enabled"
        return Decision(step, action, criterion, self.reason, found.gain, found.measured, found.made)


class _GoldenBatches(NamedTuple):
    """Golden jobs in batches as they would be served, and the outputs that these jobs were given."""

    inputs: Sequence[Sequence[Mapping[str, Array]]]
    """Those of each job, by batch."""
    prepared: Sequence[Prepared]
    served: Sequence[Mapping[str, Array]]


class Trials:
    """Builds, judges and times candidates, on the caller's thread.

    tolerance: of forms in the same precision. compiler: None where nothing is compiled. clock:
    monotonic seconds. validators: custom ones take the place of those for a changed precision. withholds_texts: whether
    the reason of a failure has no text of its exception. redact: changes those texts. drift: the limits of spot checks.
    """

    def __init__(
        self,
        tolerance: float,
        metrics: InferenceMetrics,
        compiler: TorchCompiler | None,
        clock: Callable[[], float],
        *,
        validators: ValidatorRegistry | None = None,
        withholds_texts: bool = False,
        redact: Callable[[str], str] | None = None,
        drift: DriftLimits | None = None,
    ) -> None:
        self._drift = drift or DriftLimits()
        self._text_of = partial(error_text, withholds_message=withholds_texts, redact=redact)
        self._tolerance = tolerance
        self._metrics = metrics
        self._compiler = compiler
        self._clock = clock
        self._validators = validators or ValidatorRegistry()

    def forms_of(self, runtime: Runtime) -> list[str]:
        """The forms that this runtime may have here, the most promising of each level first."""
        return list(runtime.candidates(self._compiler)) if isinstance(runtime, Tunable) else []

    def run(self, version: AttachedVersion, step: str) -> Trial:
        """Tries a step; whatever the build raises becomes a problem of a failed trial."""
        tries = {BATCHING: self._try_batching, TOKENIZER_CACHE: self._try_cache, TOKENIZER_POOL: self._try_pool}
        try:
            return self._try_form(version, step) if is_form(step) else tries[step](version)
        except (CompilationRefused, ConfigurationError) as refusal:
            return _failed(str(refusal))
        except Exception as error:  # a framework may raise anything while it builds a form
            text = self._text_of(error)
            logger.warning("a step could not be tried", extra={"step": step, "exception": text.traceback})
            return _failed(text.line)._replace(has_raised=True)

    def spot_check(self, version: AttachedVersion, sample: SpotSample) -> SpotFinding | None:
        """Run the reference on a batch that a form answered, and compare. None: the model itself raised an error.

        The batch is whole: the reference has the rows that the form had.
        """
        runtime = version.runtime
        if not isinstance(runtime, Tunable):
            return None
        try:
            prepared = runtime.prepare([job.inputs for job in sample.jobs])
            outputs = thread_copy_of(runtime.forms.reference)(prepared)
        except Exception as error:  # the model may raise anything; it has not answered yet
            text = self._text_of(error)
            logger.warning("a spot check could not be made", extra={"model": version.key.model, "error": text.name})
            return None
        expected: list[Mapping[str, Array]] = []
        start = 0
        for job in sample.jobs:
            stop = start + runtime.spec.signature.rows(job.inputs)
            expected.append({name: values[start:stop] for name, values in outputs.items()})
            start = stop
        if version.watch is None or version.watch.form != sample.form:
            validators = self._of_changed_precision(version, [outputs], is_int8=sample.form == "int8")
            version.watch = SpotWatch(sample.form, validators, self._drift)
        found = version.watch.judge(sample.jobs, expected)
        self._metrics.canary(version.key.model, version.key.version, sample.form, found.verdict.verdict)
        self._metrics.drift(version.key.model, version.key.version, sample.form, found.drift)
        return found

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
            text = self._text_of(error)
            logger.warning("a trace failed", extra={"exception": text.traceback})
            return f"it cannot be traced: {text.name}"

    def _try_form(self, version: AttachedVersion, step: str) -> Trial:
        """Builds a form, and compares and times it on golden jobs."""
        runtime = version.runtime
        if not isinstance(runtime, Tunable):
            raise ConfigurationError(f"{version.key.model} has no other forms")
        batches = _golden_batches(version)
        eager = thread_copy_of(runtime.forms.reference)
        reference = [eager(batch) for batch in batches.prepared]
        # Before the form is built, which can take minutes.
        repeated = judge(batches.served, reference, self._of_changed_precision(version, reference))
        if not repeated.accepted:
            return _failed(f"the model does not repeat its answers: {'; '.join(repeated.reasons)}")
        forward = runtime.candidates(self._compiler)[step]()
        trial = self._judge(version, step, forward, batches, reference)
        made = forward.made if isinstance(forward, WithProvenance) else {}
        return trial._replace(evidence=replace(trial.evidence, made=made))

    def _of_changed_precision(
        self, version: AttachedVersion, reference: Sequence[Mapping[str, Array]], *, is_int8: bool = False
    ) -> dict[str, Validator]:
        """Custom validators of the model and its workloads, else those for a candidate of another precision."""
        spec, expected = version.runtime.spec, joined(reference)
        defaults = changed_precision_validators(spec.outputs, expected, is_int8=is_int8)
        return self._validators.validators_for(spec.name, spec.outputs, expected, spec.task, defaults=defaults)

    def _judge(
        self,
        version: AttachedVersion,
        step: str,
        forward: Forward,
        batches: _GoldenBatches,
        reference: Sequence[Mapping[str, Array]],
    ) -> Trial:
        validators: Mapping[str, Validator] = (
            same_precision_validators(version.runtime.spec.outputs, self._tolerance)
            if step in SAME_PRECISION
            else self._of_changed_precision(version, reference, is_int8=step == "int8")
        )
        judgement = judge([forward(batch) for batch in batches.prepared], reference, validators)
        self._count(version, judgement)
        self._metrics.canary(version.key.model, version.key.version, step, judgement.verdict)
        if not judgement.accepted:
            return Trial(GateEvidence(judgement=judgement))
        return self._timed(version.runtime, forward, batches.prepared, judgement)

    def _count(self, version: AttachedVersion, judgement: Judgement) -> None:
        key = version.key
        self._metrics.gate(key.model, key.version, "", "accepted" if judgement.accepted else "refused")

    def _timed(self, runtime: Runtime, forward: Forward, batches: Sequence[Prepared], judgement: Judgement) -> Trial:
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
        figures = {"in_use_s": median(in_use_s), "form_s": median(candidate_s)}
        evidence = GateEvidence((), judgement, figures, round(gain, 3), MIN_GAIN)
        return Trial(evidence, None if evidence.reasons else forward)

    def _seconds(self, forward: Forward, batches: Iterable[Prepared]) -> float:
        begun = self._clock()
        for batch in batches:
            forward(batch)
        return self._clock() - begun

    def _try_batching(self, version: AttachedVersion) -> Trial:
        """Whether golden jobs have the same outputs in a batch as alone. No two rows of a batch may depend on each
        other; the rounding of another batch size is within the limits of a changed precision."""
        runtime = version.runtime
        if not isinstance(runtime, Tunable):
            raise ConfigurationError(f"{version.key.model} has no copy that could be tried beside the traffic")
        eager = thread_copy_of(runtime.forms.reference)
        batches = _golden_batches(version, _MOST_ALONE)
        if all(len(jobs) == 1 for jobs in batches.inputs):
            raise ConfigurationError("no two golden jobs share a batch")
        together = [eager(batch) for batch in batches.prepared]
        validators = self._of_changed_precision(version, together)
        for output in runtime.spec.outputs:
            if output.allow_nan:
                validators.pop(output.name)
        if not validators:
            return _failed("every output may have NaN, so none can be compared")
        repeated = judge([eager(batch) for batch in batches.prepared], together, validators)
        if not repeated.accepted:
            return _failed(f"the model does not repeat its answers: {'; '.join(repeated.reasons)}")
        alone = [joined([eager(runtime.prepare([inputs])) for inputs in jobs]) for jobs in batches.inputs]
        judgement = judge(together, alone, validators)
        self._count(version, judgement)
        return Trial(GateEvidence(judgement=judgement, figures={"jobs_alone": float(sum(map(len, batches.inputs)))}))

    def _try_cache(self, version: AttachedVersion) -> Trial:
        """Whether the tokenizer gives each text the same ids again: a cache would freeze those of the first time."""
        tokeniser = version.runtime.tokeniser if isinstance(version.runtime, Tokenising) else None
        if tokeniser is None:
            return _failed("nothing is loaded")
        texts = _golden_texts(version) or _SAMPLE_TEXTS
        agreement = tokeniser.cache_agreement(texts)
        problems = () if agreement == 1 else (f"id_agreement {agreement:.4g}, expected 1",)
        return Trial(GateEvidence(problems, None, {"id_agreement": agreement, "texts": float(len(texts))}))

    def _try_pool(self, version: AttachedVersion) -> Trial:
        tokeniser = version.runtime.tokeniser if isinstance(version.runtime, Tokenising) else None
        texts = _golden_texts(version)
        if tokeniser is None or not texts:
            return _failed("nothing is loaded")
        texts = (texts * math.ceil(_POOL_TEXTS / len(texts)))[:_POOL_TEXTS]
        gain = round(tokeniser.pool_gain(texts, _POOL_ROUNDS, self._clock), 3)
        return Trial(GateEvidence((), None, {"threads": float(tokeniser.max_threads)}, gain, _MIN_POOL_GAIN))


def _failed(problem: str) -> Trial:
    return Trial(GateEvidence((problem,)))


def _golden_texts(version: AttachedVersion) -> list[str]:
    goldens = version.profiler.goldens
    name = next((one.name for one in version.runtime.spec.inputs if one.dtype == STRING), None)
    if goldens is None or name is None:
        return []
    return [str(text) for golden in goldens.goldens() for text in golden.inputs[name].tolist()]


def _golden_batches(version: AttachedVersion, max_jobs: int | None = None) -> _GoldenBatches:
    """The largest groups of jobs that share a batch key come first. Raises ConfigurationError where no job fits.

    max_jobs: of all batches together.
    """
    runtime, goldens = version.runtime, version.profiler.goldens
    signature = runtime.spec.signature
    groups: dict[Hashable, list[Golden]] = {}
    for golden in goldens.goldens()[:max_jobs] if goldens else ():
        if signature.rows(golden.inputs) <= version.max_rows:
            groups.setdefault(signature.batch_key(dict(golden.inputs)), []).append(golden)
    parts = [
        part
        for group in sorted(groups.values(), key=len, reverse=True)
        for part in _parts(group, lambda golden: signature.rows(golden.inputs), version.max_rows)
    ][:_MAX_BATCHES]
    if not parts:
        raise ConfigurationError("no golden job fits into a batch")
    inputs = [[golden.inputs for golden in part] for part in parts]
    served = [joined([golden.outputs for golden in part]) for part in parts]
    return _GoldenBatches(inputs, [runtime.prepare(jobs) for jobs in inputs], served)


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
