"""Levels 1 to 3: what has proved itself beside the traffic is turned on; what fails is turned off and stays off.

    attach(runtime) -> Profiler <- the drain observes every batch
         tick: evidence -> progression.readiness -> trial -> DecisionLog, audit -> on
                                                   golden jobs: the reference beside the candidate
                                                     -> Gate.judge: as good?  -> timed in turns: faster?
    a form fails at serving -> Forms falls back at once -> one decision: disabled, for as long as this process lives

One background thread builds, judges and times. It never touches the model threads: a form takes its place between two
batches. Each decision is one line of the log and one audit record, written before it takes effect.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import InferenceConfig
from penstock.registry.tensors import STRING, Array
from penstock.safety.golden_store import GoldenStore
from penstock.safety.orchestrator import Gate, joined
from penstock.safety.validators import Validator, changed_precision_validators, same_precision_validators
from penstock.workers.compilation import TorchCompiler
from penstock.workers.levels.decision_log import DecisionKey, DecisionLog, environment
from penstock.workers.levels.profiler import Profiler, trace
from penstock.workers.levels.progression import (
    BATCHING,
    COMPILED,
    HIGHEST_LEVEL,
    MIN_GAIN,
    THRESHOLDS,
    TOKENIZER_CACHE,
    TOKENIZER_POOL,
    Decision,
    Evidence,
    LevelState,
    is_form,
    readiness,
)
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime.base import Counted, Prepared, Runtime
from penstock.workers.runtime.compilable import CompilationRefused
from penstock.workers.runtime.forms import Forward, Tunable, WithProvenance, twin_of
from penstock.workers.runtime.tokeniser import TokenCache, Tokenising

__all__ = ["Action", "Audit", "Optimizer"]

logger = logging.getLogger("penstock.runtime")

Action = Literal["compile", "optimise", "measure", "trace"]
Audit: TypeAlias = Callable[[Mapping[str, object]], None]

_LOOK_S: Final = 1.0
_CACHE_ENTRIES: Final = 50_000
_CACHE_BYTES: Final = 32 << 20
_POOL_TEXTS: Final = 256
_POOL_ROUNDS: Final = 5
_MIN_POOL_GAIN: Final = 1.2
_MOST_BATCHES: Final = 8
"""Golden batches of one trial."""
_FEWEST_ROUNDS: Final = 3
_MOST_ROUNDS: Final = 9
_TIMING_S: Final = 3.0
"""Rounds end after so long, once there were the fewest."""
_LONGEST_ANSWER: Final = 2000
_QUICK_BUILD: Final = frozenset({"bf16", "fp16"})
_SAME_PRECISION: Final = frozenset({COMPILED, "onnx"})


class _Trial(NamedTuple):
    """How a step did; `reason`: why not. forward: what a form that passed does; made: how it was made."""

    reason: str = ""
    gain: float | None = None
    evidence: Mapping[str, float] = {}
    forward: Forward | None = None
    made: Mapping[str, object] = {}

    def decision(self, step: str, criterion: str) -> Decision:
        """What follows from it."""
        return Decision(
            step,
            "refused" if self.reason else "enabled",
            criterion,
            self.reason,
            self.gain,
            self.evidence,
            self.made,
        )


class _Request(NamedTuple):
    model: str
    action: Action
    answer: Future[str]


@dataclass(eq=False)
class _Attached:
    """One loaded version. The optimizer's thread owns it, but for `standing`, which changes under the lock only."""

    key: DecisionKey
    runtime: Runtime
    profiler: Profiler
    steps: tuple[str, ...]
    """Those that this model has, in the order in which they are tried."""
    max_level: int
    max_rows: int
    earlier: Mapping[str, Decision]
    level_state: LevelState = field(default_factory=LevelState)
    asked: frozenset[str] = frozenset()
    measured: dict[str, Decision] = field(default_factory=dict)
    """Trials of forms that may not be used."""
    long_builds: int = 0
    answers: int = 0
    """What operators asked for and was done."""
    answer: str = ""
    """What came of the last of these."""
    is_detached: bool = False

    @property
    def steps_by_level(self) -> list[str]:
        """Those that this model has, as they are shown."""
        return sorted(self.steps, key=lambda step: THRESHOLDS[step].level)

    def evidence(self, step: str) -> Evidence:
        profile, goldens = self.profiler.profile, self.profiler.goldens
        earlier = self.earlier.get(step)
        return Evidence(
            forwards=profile.forwards,
            texts=profile.texts,
            golden_rows=goldens.rows if goldens else 0,
            forward_s=profile.seconds,
            # What is attached was loaded, and the first forward of a load has two rows.
            warmed_rows=min(2, self.max_rows),
            long_builds=self.long_builds,
            is_asked_for=step in self.asked,
            was_accepted=earlier is not None and earlier.action == "enabled",
            form=self.level_state.form,
            form_gain=self.level_state.form_gain,
        )

    def may_try(self, step: str) -> bool:
        """Whether nothing is known yet that speaks against a trial, or an operator wants one all the same."""
        if step in self.level_state.enabled:
            return False
        if step in self.asked:
            return True
        earlier = self.earlier.get(step)
        was_measured = earlier is not None and earlier.action == "refused" and bool(earlier.evidence)
        return step not in self.level_state.settled and not was_measured


class Optimizer:
    """Brings the models of one worker to their level. Its methods are for any thread.

    home: where the decisions are logged. device: the worker's. audit: gets every decision as plain data. compiler: None
    where nothing is compiled. clock: monotonic seconds.
    """

    def __init__(
        self,
        config: InferenceConfig,
        *,
        home: Path,
        device: str,
        audit: Audit,
        metrics: InferenceMetrics,
        compiler: TorchCompiler | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._device = device
        self._audit = audit
        self._metrics = metrics
        self._compiler = compiler if config.compilation.enabled else None
        self._clock = clock
        self._gate = Gate()
        self.log: Final = DecisionLog(home)
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._attached: dict[Hashable, _Attached] = {}
        self._requests: deque[_Request] = deque()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="optimizer", daemon=True)

    # Life

    def start(self) -> None:
        """Begins to look, once a second and whenever a version is attached."""
        self._thread.start()

    def stop(self) -> None:
        """Decides nothing more. A build that is under way ends with the process at the latest."""
        with self._wake:
            self._is_stopping = True
            requests = list(self._requests)
            self._wake.notify()
        if self._compiler is not None:
            self._compiler.stop()
        for request in requests:
            request.answer.cancel()

    def attach(self, key: Hashable, runtime: Runtime, content_hash: str, max_rows: int) -> Profiler:
        """Looks after a loaded version from now on. max_rows: those of its batches.

        The profiler's `observe` is for the drain, once for each batch that has ended.
        """
        spec = runtime.spec
        compilation = self._config.compilation
        judged = f"compiled by {compilation.backend} within {compilation.tolerance:g}"
        key = DecisionKey(spec.name, spec.version, content_hash, environment(self._device, judged))
        keeps_inputs = "hashes_only" not in (self._config.privacy.mode, self._config.cache.privacy_mode)
        has_goldens = keeps_inputs and spec.deterministic and not spec.streams
        profiler = Profiler(runtime, GoldenStore(seed=secrets.randbits(32)) if has_goldens else None)
        attached = _Attached(
            key,
            runtime,
            profiler,
            self._steps_of(runtime, max_rows, keeps_inputs=keeps_inputs),
            self._max_level_of(spec.max_level),
            max_rows,
            self.log.earlier(key),
        )
        if isinstance(runtime, Tunable):
            runtime.forms.on_fallback = partial(self._fell_back, attached)
        with self._wake:
            self._attached[key] = attached
            self._show_level(attached)
            self._wake.notify()
        return profiler

    def detach(self, key: Hashable) -> None:
        """Forgets a version, whose runtime may be closed now. A trial that is under way comes to nothing."""
        with self._lock:
            attached = self._attached.pop(key, None)
            if attached is not None:
                attached.is_detached = True
                key = attached.key
                self._metrics.level(key.model, key.version, "", 0)

    def ask(self, name: str, action: Action) -> Future[str]:
        """Has this done to every version of a model here; the text says what came of it.

        compile, optimise: tries the forms of level 2, or all that the level allows, whatever was decided before.
        measure: tries those of every level and uses none. trace: torch.profiler over golden batches.
        """
        answer: Future[str] = Future()
        with self._wake:
            if self._is_stopping:
                answer.cancel()
            else:
                self._requests.append(_Request(name, action, answer))
                self._wake.notify()
        return answer

    def tick(self) -> bool:
        """Does the next thing that is to be done; False when there is nothing."""
        with self._lock:
            attached = list(self._attached.values())
            request = self._requests.popleft() if self._requests else None
        if request is not None:
            self._answer(request)
            return True
        return any(self._advance(each) for each in attached)

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                has_more = self.tick()
            except Exception:
                # What went wrong concerns one step of one model; the others still need this thread.
                logger.exception("a step could not be decided on")
                has_more = False
            if not has_more:
                with self._wake:
                    if not (self._is_stopping or self._requests):
                        self._wake.wait(_LOOK_S)

    # Steps

    def _max_level_of(self, own: int | None) -> int:
        if not self._config.enabled:
            return 0
        return min(self._config.max_level, HIGHEST_LEVEL if own is None else own, HIGHEST_LEVEL)

    def _steps_of(self, runtime: Runtime, max_rows: int, *, keeps_inputs: bool) -> tuple[str, ...]:
        steps = []
        if isinstance(runtime, Tokenising) and keeps_inputs:
            tokeniser = runtime.tokeniser
            has_threads = tokeniser is not None and tokeniser.max_threads > 1
            steps += [TOKENIZER_CACHE, *([TOKENIZER_POOL] if has_threads else [])]
        if max_rows > 1:
            steps.append(BATCHING)
        if isinstance(runtime, Tunable):
            # What is quickly built first: beside it the others may not be worth their time.
            steps += sorted(runtime.candidates(self._compiler), key=lambda name: THRESHOLDS[name].min_forward_s)
        return tuple(steps)

    def _advance(self, attached: _Attached) -> bool:
        """Tries the first step whose criterion holds; False when there is none."""
        for step in attached.steps:
            if self._is_stopping or attached.is_detached:
                return False
            found = readiness(step, attached.evidence(step), attached.max_level)
            if found.is_ready and attached.may_try(step):
                self._take(attached, step, found.criterion)
                return True
        return False

    def _take(self, attached: _Attached, step: str, criterion: str) -> Decision | None:
        """Tries a step and decides on it; None when the version has gone meanwhile."""
        trial = self._try(attached, step)
        decision = trial.decision(step, criterion)
        with self._lock:
            if attached.is_detached or self._is_stopping:
                return None
            attached.asked -= {step}
            if self._decide(attached, decision) and decision.action == "enabled":
                _turn_on(attached.runtime, step, trial.forward)
        return decision

    def _try(self, attached: _Attached, step: str) -> _Trial:
        try:
            if is_form(step):
                return self._try_form(attached, step)
            return self._try_pool(attached) if step == TOKENIZER_POOL else _Trial()
        except (CompilationRefused, ConfigurationError) as refusal:
            return _Trial(str(refusal))
        except Exception as error:  # what is being built may raise anything, and harms nobody by it
            logger.warning("a step could not be tried", extra={"step": step}, exc_info=True)
            return _Trial(f"{type(error).__name__}: {error!s:.200}")

    def _decide(self, attached: _Attached, decision: Decision) -> bool:
        """Records a decision; False when it cannot be recorded: nothing is turned on that nobody can trace."""
        key = attached.key
        try:
            self._audit(self.log.append(key, decision))
            is_recorded = True
        except Exception:
            logger.exception("a decision could not be recorded", extra={"model": key.model, "step": decision.step})
            is_recorded = False
            if decision.action == "enabled":
                decision = replace(decision, action="refused", reason="it could not be recorded")
                # One record may have been written, and the other not.
                with suppress(OSError):
                    self.log.append(key, decision)
        attached.level_state = attached.level_state.apply(decision)
        logger.info(
            "decided",
            extra={
                "model": key.model,
                "version": key.version,
                "step": decision.step,
                "action": decision.action,
                "gain": decision.gain,
                "reason": decision.reason or decision.criterion,
            },
        )
        self._show_level(attached)
        return is_recorded

    def _show_level(self, attached: _Attached) -> None:
        key = attached.key
        self._metrics.level(key.model, key.version, "", attached.level_state.level)

    def _fell_back(self, attached: _Attached, form: str, reason: str) -> None:
        """A form failed at serving; called on a model thread. Its batch has the reference's answer already."""
        with self._lock:
            if attached.level_state.form == form and not attached.is_detached:
                self._decide(attached, Decision(form, "disabled", "it failed at serving", reason))

    # Trials

    def _try_form(self, attached: _Attached, step: str) -> _Trial:
        """Builds a form, and compares and times it on golden jobs. Changes nothing that serves."""
        runtime = attached.runtime
        attached.long_builds += step not in _QUICK_BUILD
        if not isinstance(runtime, Tunable):
            raise ConfigurationError(f"{attached.key.model} has no other forms")
        batches, served = self._golden_batches(attached)
        as_built = twin_of(runtime.forms.reference)
        reference = [as_built(batch) for batch in batches]
        forward = runtime.candidates(self._compiler)[step]()
        trial = self._judge(attached, step, forward, batches, reference, served)
        return trial._replace(made=forward.made) if isinstance(forward, WithProvenance) else trial

    def _judge(
        self,
        attached: _Attached,
        step: str,
        forward: Forward,
        batches: Sequence[Prepared],
        reference: Sequence[Mapping[str, Array]],
        served: Sequence[Mapping[str, Array]],
    ) -> _Trial:
        outputs = attached.runtime.spec.outputs
        whole = joined(reference)
        loose = changed_precision_validators(outputs, whole)
        repeated = self._gate.judge(served, reference, loose)
        if not repeated.accepted:
            return _Trial(f"the model does not repeat its answers: {'; '.join(repeated.reasons)}")
        validators: Mapping[str, Validator] = changed_precision_validators(outputs, whole, is_int8=step == "int8")
        if step in _SAME_PRECISION:
            validators = same_precision_validators(outputs, self._config.compilation.tolerance)
        verdict = self._gate.judge([forward(batch) for batch in batches], reference, validators)
        key = attached.key
        self._metrics.gate(key.model, key.version, "", "accepted" if verdict.accepted else "refused")
        evidence = {name: value for name, value in verdict.evidence.items() if math.isfinite(value)}
        if not verdict.accepted:
            return _Trial("; ".join(verdict.reasons), None, evidence)
        return self._timed(attached, forward, batches, evidence)

    def _timed(
        self, attached: _Attached, forward: Forward, batches: Sequence[Prepared], evidence: Mapping[str, float]
    ) -> _Trial:
        """Whether the form is faster than the one in use: both run every batch, in turns."""
        runtime = attached.runtime
        in_use = twin_of(runtime.forms.forward) if isinstance(runtime, Tunable) else forward
        ours: list[float] = []
        theirs: list[float] = []
        begun = self._clock()
        while len(ours) < _MOST_ROUNDS and (len(ours) < _FEWEST_ROUNDS or self._clock() - begun < _TIMING_S):
            theirs.append(self._seconds(in_use, batches))
            ours.append(self._seconds(forward, batches))
        # Of the ratios, not of the times: what else the machine does disturbs both halves of a round alike.
        gain = median(their_s / max(our_s, 1e-9) for their_s, our_s in zip(theirs, ours, strict=True))
        figures = {**evidence, "in_use_s": median(theirs), "form_s": median(ours)}
        reason = "" if gain >= MIN_GAIN else f"gain {gain:.2f}, expected at least {MIN_GAIN:g}"
        return _Trial(reason, round(gain, 3), figures, None if reason else forward)

    def _seconds(self, forward: Forward, batches: Iterable[Prepared]) -> float:
        begun = self._clock()
        for batch in batches:
            forward(batch)
        return self._clock() - begun

    def _try_pool(self, attached: _Attached) -> _Trial:
        runtime, goldens = attached.runtime, attached.profiler.goldens
        tokeniser = runtime.tokeniser if isinstance(runtime, Tokenising) else None
        if tokeniser is None or goldens is None:
            return _Trial("nothing is loaded")
        name = next(one.name for one in runtime.spec.inputs if one.dtype == STRING)
        texts = [str(text) for golden in goldens.goldens() for text in golden.inputs[name].tolist()]
        texts = (texts * math.ceil(_POOL_TEXTS / len(texts)))[:_POOL_TEXTS]
        gain = round(tokeniser.pool_gain(texts, _POOL_ROUNDS, self._clock), 3)
        reason = "" if gain >= _MIN_POOL_GAIN else f"gain {gain:.2f}, expected at least {_MIN_POOL_GAIN:g}"
        return _Trial(reason, gain, {"threads": float(tokeniser.max_threads)})

    def _golden_batches(self, attached: _Attached) -> tuple[list[Prepared], list[Mapping[str, Array]]]:
        """Golden jobs in batches as they would be served, and what was served. Raises ConfigurationError for none."""
        runtime, goldens = attached.runtime, attached.profiler.goldens
        signature = runtime.spec.signature
        alike: dict[Hashable, list[Any]] = {}
        for golden in goldens.goldens() if goldens else ():
            if signature.rows(golden.inputs) <= attached.max_rows:
                alike.setdefault(signature.batch_key(dict(golden.inputs)), []).append(golden)
        batches: list[Prepared] = []
        served: list[Mapping[str, Array]] = []
        for group in sorted(alike.values(), key=len, reverse=True):
            for part in _parts(group, lambda golden: signature.rows(golden.inputs), attached.max_rows):
                batches.append(runtime.prepare([golden.inputs for golden in part]))
                served.append(joined([golden.outputs for golden in part]))
        if not batches:
            raise ConfigurationError("no golden job fits into a batch")
        return batches[:_MOST_BATCHES], served[:_MOST_BATCHES]

    # Operators

    def _answer(self, request: _Request) -> None:
        if not request.answer.set_running_or_notify_cancel():
            return
        with self._lock:
            attached = [each for each in self._attached.values() if each.key.model == request.model]
        if not attached:
            request.answer.set_result(f"{request.model} is not loaded here")
            return
        lines: list[str] = []
        for each in attached:
            prefix = f"{each.key.model}/{each.key.version}"
            try:
                done = self._carry_out(each, request.action)
            except Exception as error:
                logger.exception("an operator's wish could not be fulfilled")
                done = [f"it failed: {type(error).__name__}"]
            each.answer, each.answers = "; ".join(done)[:_LONGEST_ANSWER], each.answers + 1
            lines += [f"{prefix}: {line}" for line in done]
        request.answer.set_result("\n".join(lines))

    def _carry_out(self, attached: _Attached, action: Action) -> list[str]:
        if action == "trace":
            return [self._trace(attached)]
        forms = [
            step for step in attached.steps_by_level if is_form(step) and (action != "compile" or step == COMPILED)
        ]
        return [self._measure(attached, s) if action == "measure" else self._insist(attached, s) for s in forms] or [
            "it has no such form"
        ]

    def _insist(self, attached: _Attached, step: str) -> str:
        """Tries a form at an operator's wish."""
        if step in attached.level_state.enabled:
            return f"{step} is enabled already"
        attached.asked |= {step}
        found = readiness(step, attached.evidence(step), attached.max_level)
        decision = self._take(attached, step, found.criterion) if found.is_ready else None
        attached.asked -= {step}
        return f"{step} waits: {found.criterion}" if decision is None else _told(decision)

    def _measure(self, attached: _Attached, step: str) -> str:
        """Tries a form of whatever level, and uses it in no case."""
        if step in attached.level_state.enabled:
            return f"{step} is enabled already"
        decision = self._try(attached, step).decision(step, "measured")
        attached.measured[step] = decision
        return _told(decision).replace("enabled", "would be enabled")

    def _trace(self, attached: _Attached) -> str:
        runtime = attached.runtime
        try:
            batches, _ = self._golden_batches(attached)
            run = twin_of(runtime.forms.forward) if isinstance(runtime, Tunable) else runtime.run
            return trace(run, batches[:2], is_cuda=self._device.startswith("cuda"), clock=self._clock)
        except ConfigurationError as refusal:
            return f"it cannot be traced: {refusal}"
        except Exception as error:
            logger.warning("a trace failed", exc_info=True)
            return f"it cannot be traced: {type(error).__name__}"

    def report(self) -> dict[str, list[dict[str, object]]]:
        """By model, one entry for each version: its level, what each step gained, and what the others wait for."""
        with self._lock:
            attached = list(self._attached.values())
        entries: dict[str, list[dict[str, object]]] = {}
        for each in attached:
            entries.setdefault(each.key.model, []).append(_entry(each))
        return entries


def _entry(attached: _Attached) -> dict[str, object]:
    level_state, profile = attached.level_state, attached.profiler.profile
    goldens = attached.profiler.goldens
    return {
        "version": attached.key.version,
        "content_hash": attached.key.content_hash,
        "level": level_state.level,
        "max_level": attached.max_level,
        "form": level_state.form,
        "profile": {**asdict(profile), "rows_per_s": round(profile.rows_per_s, 1)},
        "goldens": {"jobs": len(goldens), "bytes": goldens.nbytes} if goldens else None,
        "answers": attached.answers,
        "answer": attached.answer,
        "counts": dict(attached.runtime.counts()) if isinstance(attached.runtime, Counted) else {},
        "steps": [_step_entry(attached, step) for step in attached.steps_by_level],
    }


def _step_entry(attached: _Attached, step: str) -> dict[str, object]:
    """`state`: on, disabled, refused, waiting, not tried, or not allowed by max_level; `gain` None: not measured."""
    level_state = attached.level_state
    # What an earlier process measured counts until this one has.
    decision = level_state.settled.get(step) or attached.measured.get(step) or attached.earlier.get(step)
    found = readiness(step, attached.evidence(step), attached.max_level)
    if step in level_state.enabled:
        state = "on"
    elif THRESHOLDS[step].level > attached.max_level:
        state = "not allowed"
    elif decision is not None and decision.action != "enabled" and not attached.may_try(step):
        state = decision.action
    else:
        state = "not tried" if found.is_in_vain else "waiting"
    return {
        "step": step,
        "level": THRESHOLDS[step].level,
        "state": state,
        "criterion": decision.criterion if decision and state == "on" else found.criterion,
        "reason": decision.reason if decision else "",
        "gain": decision.gain if decision else None,
        "evidence": dict(decision.evidence) if decision else {},
        "made": dict(decision.made) if decision else {},
    }


def _told(decision: Decision) -> str:
    gain = "" if decision.gain is None else f", {decision.gain:.2f} times as fast as the form in use"
    return f"{decision.step} {decision.action}{gain}{f': {decision.reason}' if decision.reason else ''}"


def _parts(items: Sequence[Any], rows_of: Callable[[Any], int], max_rows: int) -> list[list[Any]]:
    """The items in order, cut where the next one would make too many rows."""
    parts: list[list[Any]] = []
    rows = max_rows + 1
    for item in items:
        rows += rows_of(item)
        if rows > max_rows:
            parts.append([])
            rows = rows_of(item)
        parts[-1].append(item)
    return parts


def _turn_on(runtime: Runtime, step: str, forward: Forward | None) -> None:
    """Puts a step into effect. Batching is the batcher's, which had its limits from the start."""
    if isinstance(runtime, Tunable) and forward is not None:
        runtime.forms.use(step, forward)
    tokeniser = runtime.tokeniser if isinstance(runtime, Tokenising) else None
    if tokeniser is not None and step == TOKENIZER_CACHE:
        tokeniser.cache = TokenCache(_CACHE_ENTRIES, _CACHE_BYTES)
    if tokeniser is not None and step == TOKENIZER_POOL:
        tokeniser.use_pool(tokeniser.max_threads)
