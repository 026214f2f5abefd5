"""Levels 1 to 3: a step is enabled after a trial beside the traffic, and disabled when it fails at serving.

    attach(runtime) -> Profiler <- the drain observes every batch
         tick: evidence -> progression.readiness -> Trials.run -> the gate -> DecisionLog, audit -> the step is on
    a form fails at serving -> Forms falls back at once -> one decision: disabled; its circuit breaker opens
    a form drifts in its spot checks -> its circuit breaker opens; see spot_check.py
    a candidate errs, a breaker opens -> one alert
    golden jobs differ in a batch and alone -> batching is refused -> one job for each forward from then on

One background thread builds, judges and times; see trials.py. It never runs on a model thread: a form is swapped in
between two batches. Each decision is the gate's (safety/orchestrator.py), one line of the log and one audit record.
Both are written before the decision takes effect. Micro-batches themselves are declared by the package, whose signature
says that rows do not depend on each other: the step `batching` proves it or ends it.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

from penstock.registry.broker.breakers import BreakerEnd, BreakerRecord, split_breaker_name
from penstock.registry.settings_sections import InferenceConfig
from penstock.safety.alerts import Alert, Alerts, breaker_alert
from penstock.safety.drift import DriftLimits
from penstock.safety.golden_archive import GoldenArchive
from penstock.safety.golden_store import GoldenStore
from penstock.safety.hysteresis import StateChange
from penstock.safety.orchestrator import GateDecision
from penstock.safety.privacy import InputRedactor, redactor_of
from penstock.safety.validator_registry import ValidatorRegistry
from penstock.safety.validators import Verdict
from penstock.workers.compilation import TorchCompiler
from penstock.workers.levels.attached import AttachedVersion
from penstock.workers.levels.decision_log import DecisionKey, DecisionLog, environment
from penstock.workers.levels.decision_recorder import Audit, DecisionRecorder
from penstock.workers.levels.form_breakers import FormBreakers
from penstock.workers.levels.golden_archiving import GoldenArchiving
from penstock.workers.levels.profiler import Profiler
from penstock.workers.levels.progression import (
    BATCHING,
    COMPILED,
    HIGHEST_LEVEL,
    THRESHOLDS,
    TOKENIZER_CACHE,
    TOKENIZER_POOL,
    Decision,
    is_form,
)
from penstock.workers.levels.report import described, version_entry
from penstock.workers.levels.spot_check import SpotSampler
from penstock.workers.levels.trials import Trial, Trials
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime.base import Runtime
from penstock.workers.runtime.forms import Forward, Tunable
from penstock.workers.runtime.tokeniser import TokenCache, Tokenising

__all__ = ["InferenceOptimizer", "LevelCommand"]

logger = logging.getLogger("penstock.runtime")

LevelCommand = Literal["compile", "optimise", "measure", "trace"]

_TICK_S: Final = 1.0
_CACHE_ENTRIES: Final = 50_000
_CACHE_BYTES: Final = 32 << 20
_MAX_ANSWER: Final = 2000
"""Characters of an answer to an operator that the report holds."""
_QUICK_BUILD: Final = frozenset({"prepacked", "bf16", "fp16"})


class _Request(NamedTuple):
    model: str
    command: LevelCommand
    answer: Future[str]


class InferenceOptimizer:
    """Brings the models of one worker to their level. Its methods are for any thread.

    home: the folder of the decision log. device: the worker's. audit: gets every decision as plain data. compiler: None
    where nothing is compiled. clock: monotonic seconds. validators: custom ones. archive: keeps goldens beyond this
    process; None: they are in memory only. breakers: shared with the other workers of the models; None: there are none,
    and a form that fails here goes on elsewhere. alerts: hear of each candidate that errs and of each breaker that
    opens. random: numbers in [0, 1) that choose batches for spot checks.
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
        validators: ValidatorRegistry | None = None,
        archive: GoldenArchive | None = None,
        breakers: BreakerEnd | None = None,
        alerts: Alerts | None = None,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._alerts = alerts or Alerts()
        self._random = random
        self._clock = clock
        self._config = config
        self._device = device
        self._metrics = metrics
        self._compiler = compiler if config.compilation.enabled else None
        self._redactor = redactor_of(config.privacy)
        self._trials = Trials(
            config.compilation.tolerance,
            metrics,
            self._compiler,
            clock,
            validators=validators,
            withholds_texts=config.withholds_texts,
            redact=self._redactor.redact,
            drift=DriftLimits.of(config.safety),
        )
        self._archiving = GoldenArchiving(archive, clock) if archive is not None else None
        self._breakers: FormBreakers | None = None
        if breakers is not None:
            self._breakers = FormBreakers(
                breakers,
                self._guarded_models,
                self._breaker_changed,
                clock,
                config=config.safety,
                forms=self._breakers_of_forms,
                on_trip=self._breaker_tripped,
                on_transition=self._form_switched,
            )
        self.log: Final = DecisionLog(home)
        self._recorder = DecisionRecorder(self.log, audit, metrics)
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._attached: dict[Hashable, AttachedVersion] = {}
        self._requests: deque[_Request] = deque()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="optimizer", daemon=True)

    # Life

    def start(self) -> None:
        """Begins to look for steps, once a second and whenever a version is attached."""
        self._thread.start()
        if self._breakers is not None:
            self._breakers.shared.start()

    def stop(self) -> None:
        """Makes no more decisions. A build under way ends with the process at the latest."""
        with self._wake:
            self._is_stopping = True
            requests = list(self._requests)
            self._wake.notify()
        if self._compiler is not None:
            self._compiler.stop()
        if self._breakers is not None:
            self._breakers.shared.stop()
        for request in requests:
            request.answer.cancel()

    def attach(self, key: Hashable, runtime: Runtime, content_hash: str, max_rows: int) -> Profiler:
        """Takes charge of a loaded version. max_rows: the most rows of its batches.

        The drain calls the profiler's `observe` once for each batch that has ended.
        """
        config, spec = self._config, runtime.spec
        judged = f"compiled by {config.compilation.backend} within {config.compilation.tolerance:g}"
        if isinstance(runtime, Tunable):
            # Endpoints may differ in it: each has a model of its own.
            judged += f", precision {runtime.precision}"
        decision_key = DecisionKey(spec.name, spec.version, content_hash, environment(self._device, judged))
        keeps_inputs = config.effective_mode != "hashes_only"
        has_goldens = keeps_inputs and spec.deterministic and not spec.streams
        version = AttachedVersion(
            decision_key,
            runtime,
            Profiler(
                runtime,
                _new_goldens(self._redactor) if has_goldens else None,
                self._sampler(runtime) if has_goldens else None,
            ),
            _steps_of(runtime, self._trials.forms_of(runtime), max_rows, keeps_inputs=keeps_inputs),
            _max_level_of(config, spec.max_level),
            max_rows,
            self.log.earlier(decision_key),
        )
        if isinstance(runtime, Tunable):
            runtime.forms.on_fallback = partial(self._fell_back, version)
            runtime.forms.on_failure = partial(self._failed, version)
            if self._breakers is not None:
                runtime.forms.admits = partial(_admits, self._breakers, version)
        if version.was_refuted(BATCHING):
            version.end_batching()
        with self._wake:
            self._attached[key] = version
            self._recorder.show_level(version)
            self._wake.notify()
        return version.profiler

    def detach(self, key: Hashable) -> None:
        """Forgets a version; its runtime may be closed now. The result of a trial under way is discarded."""
        with self._lock:
            version = self._attached.pop(key, None)
            if version is not None:
                version.is_detached = True
                self._metrics.level(version.key.model, version.key.version, "", 0)

    def ask(self, name: str, command: LevelCommand) -> Future[str]:
        """Requests a command for every loaded version of a model. The future holds the result as text.

        compile, optimise: tries the compiled form, or all that max_level allows, despite earlier decisions.
        measure: tries the forms of every level and uses none. trace: torch.profiler over golden batches.
        """
        answer: Future[str] = Future()
        with self._wake:
            if self._is_stopping:
                answer.cancel()
            else:
                self._requests.append(_Request(name, command, answer))
                self._wake.notify()
        return answer

    def tick(self) -> bool:
        """Answers one request or tries one step; False when there is neither."""
        with self._lock:
            attached = list(self._attached.values())
            request = self._requests.popleft() if self._requests else None
        if request is not None:
            self._answer(request)
            return True
        if self._archiving is not None:
            self._archiving.step(attached)
        return any(self._probe(version) or self._advance(version) or self._spot_check(version) for version in attached)

    def report(self) -> dict[str, list[dict[str, object]]]:
        """Model -> one entry for each attached version; see report.py."""
        with self._lock:
            attached = list(self._attached.values())
        entries: dict[str, list[dict[str, object]]] = {}
        for version in attached:
            entries.setdefault(version.key.model, []).append(version_entry(version))
        return entries

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                has_more = self.tick()
            except Exception:
                # The failure concerns one step of one model; the other models still need this thread.
                logger.exception("a step could not be decided on")
                has_more = False
            if not has_more:
                with self._wake:
                    if not (self._is_stopping or self._requests):
                        self._wake.wait(_TICK_S)

    # Steps

    def _sampler(self, runtime: Runtime) -> SpotSampler | None:
        share = self._config.safety.spot_check_share
        if not share or not isinstance(runtime, Tunable):
            return None
        return SpotSampler(runtime.forms, share, random=self._random, clock=self._clock)

    def _advance(self, version: AttachedVersion) -> bool:
        """Tries the first step whose criterion holds; False when there is none."""
        for step in version.steps:
            if self._is_stopping or version.is_detached:
                return False
            found = version.readiness(step)
            if found.is_ready and version.may_try(step) and not self._is_open(version, step):
                self._take(version, step, found.criterion)
                return True
        return False

    def _take(self, version: AttachedVersion, step: str, criterion: str) -> Decision | None:
        """Tries a step and decides on it; None when the version was detached meanwhile."""
        self._count_build(version, step)
        trial = self._trials.run(version, step)
        with self._lock:
            if version.is_detached or self._is_stopping:
                return None
            version.requested -= {step}
            version.returning -= {step}
            gate = self._recorder.gated(version, trial, step, criterion)
            if gate is None:
                return self._recorder.not_recorded(version, trial.decision(step, criterion))
            decision = self._recorder.settle(version, Decision.of(gate, version.level_state.form))
            if gate.accepted:
                _turn_on(version.runtime, gate, trial.forward)
                if is_form(step):
                    version.watch = None
                if self._breakers is not None and is_form(step):
                    self._breakers.switched_on(version.breaker_of(step))
            elif step == BATCHING and trial.is_refuted:
                version.end_batching()
        if not gate.accepted and trial.is_failure:
            self._alerts.notify(_gate_alert(version.key, gate))
        return decision

    def _count_build(self, version: AttachedVersion, step: str) -> None:
        version.long_builds += is_form(step) and step not in _QUICK_BUILD

    def _fell_back(self, version: AttachedVersion, form: str, reason: str) -> None:
        """A form failed at serving. Called on a model thread, after the reference has answered the batch."""
        self._disable(version, form, reason, "it failed at serving")
        if self._breakers is not None:
            self._breakers.trip(version.breaker_of(form), reason)

    def _failed(self, version: AttachedVersion, form: str, reason: str) -> None:
        """A form failed that has no fallback, and its jobs with it. Called on a model thread.

        Bad jobs fail in every form: only several failures speak against this one, and its breaker counts them.
        """
        if self._breakers is not None:
            self._breakers.failed(version.breaker_of(form), reason)

    def _disable(self, version: AttachedVersion, form: str, reason: str, criterion: str) -> None:
        with self._lock:
            if version.level_state.form != form or version.is_detached:
                return
            self._recorder.disabled(version, form, reason, criterion)

    # Spot checks

    def _spot_check(self, version: AttachedVersion) -> bool:
        """Run a sampled batch again by the reference; False when none waits."""
        form = version.level_state.form
        if self._breakers is not None and form:
            self._breakers.advance(version.breaker_of(form))
        sampler = version.profiler.spot
        if sampler is None or (sample := sampler.take()) is None or sample.form != form:
            return False
        begun = self._clock()
        found = self._trials.spot_check(version, sample)
        sampler.took(self._clock() - begun)
        if found is None:
            return True
        if found.alert is not None:
            self._metrics.drift_alert(version.key.model, version.key.version, form)
            self._switch_off(version, form, found.alert.reason, "it drifted at serving")
        elif found.verdict.verdict is Verdict.FAIL:
            reason = f"spot checks: {'; '.join(found.verdict.reasons)}"
            if self._breakers is None:
                self._switch_off(version, form, reason, "its spot checks failed")
            else:
                self._breakers.observed(version.breaker_of(form), Verdict.FAIL, reason)
        return True

    def _switch_off(self, version: AttachedVersion, form: str, reason: str, criterion: str) -> None:
        """Off at once here, and on the other workers as soon as they read the breaker."""
        if self._breakers is not None:
            self._breakers.trip(version.breaker_of(form), reason)
        if isinstance(version.runtime, Tunable):
            version.runtime.forms.reset(reason)
        self._disable(version, form, reason, criterion)

    # Circuit breakers

    def _breaker_tripped(self, name: str, record: BreakerRecord) -> None:
        """A report of this worker has opened the breaker. Called on the breakers' thread."""
        model, version, form = _named(name)
        self._metrics.breaker_tripped(model, version, form)
        self._alerts.notify(breaker_alert(name, record, time.time()))

    def _form_switched(self, name: str, change: StateChange) -> None:
        """A form went on or off here. Called on any thread."""
        model, version, form = _named(name)
        self._metrics.transition(model, version, form, "on" if change.is_on else "off")

    def _guarded_models(self) -> list[str]:
        """The models whose breakers are read: those with a form that was ever in use, or that waits for its breaker."""
        with self._lock:
            attached = list(self._attached.values())
        return sorted(
            {version.key.model for version in attached if version.has_used_a_form or version.has_met_an_open_breaker}
        )

    def _breakers_of_forms(self) -> set[str]:
        """The breakers of the forms that this worker has a model for."""
        with self._lock:
            attached = list(self._attached.values())
        return {version.breaker_of(step) for version in attached for step in version.steps if is_form(step)}

    def _is_open(self, version: AttachedVersion, step: str) -> bool:
        if self._breakers is None or not is_form(step) or not self._breakers.is_open(version.breaker_of(step)):
            return False
        version.has_met_an_open_breaker = True
        return True

    def _breaker_changed(self, name: str, record: BreakerRecord) -> None:
        """A breaker has opened or closed, on this worker or on another one. Called on the breakers' thread."""
        with self._lock:
            attached = list(self._attached.values())
        for version in attached:
            form = next((step for step in version.steps if is_form(step) and version.breaker_of(step) == name), None)
            if form is None or not isinstance(version.runtime, Tunable):
                continue
            if record.is_closed:
                self._metrics.breaker(version.key.model, version.key.version, form, is_open=False)
                with self._wake:
                    version.returning |= {form}
                    self._wake.notify()
                continue
            self._metrics.breaker(version.key.model, version.key.version, form, is_open=True)
            if version.runtime.forms.name == form:
                version.runtime.forms.reset(record.reason)
            self._disable(version, form, record.reason, "its circuit breaker opened")

    def _probe(self, version: AttachedVersion) -> bool:
        """Carry out a probe that this worker was granted; False without one."""
        if self._breakers is None:
            return False
        for form in filter(is_form, version.steps):
            name = version.breaker_of(form)
            if probe := self._breakers.take_probe(name):
                self._count_build(version, form)
                while not self._is_stopping:
                    trial = self._trials.run(version, form)
                    if not self._breakers.judged(name, probe, _verdict_of(trial), trial.reason):
                        break
                return True
        return False

    # Operators

    def _answer(self, request: _Request) -> None:
        if not request.answer.set_running_or_notify_cancel():
            return
        with self._lock:
            attached = [version for version in self._attached.values() if version.key.model == request.model]
        if not attached:
            request.answer.set_result(f"{request.model} is not loaded here")
            return
        lines: list[str] = []
        for version in attached:
            try:
                results = self._carry_out(version, request.command)
            except Exception as error:
                logger.exception("an operator's request failed")
                results = [f"it failed: {type(error).__name__}"]
            version.answer, version.answers = "; ".join(results)[:_MAX_ANSWER], version.answers + 1
            lines += [f"{version.key.model}/{version.key.version}: {result}" for result in results]
        request.answer.set_result("\n".join(lines))

    def _carry_out(self, version: AttachedVersion, command: LevelCommand) -> list[str]:
        if command == "trace":
            return [self._trials.trace(version, is_cuda=self._device.startswith("cuda"))]
        forms = [
            step for step in version.steps_by_level if is_form(step) and (command != "compile" or step == COMPILED)
        ]
        carry_out = self._measure if command == "measure" else self._try_on_request
        return [carry_out(version, step) for step in forms] or ["it has no such form"]

    def _try_on_request(self, version: AttachedVersion, step: str) -> str:
        if step in version.level_state.enabled:
            return f"{step} is enabled already"
        if self._is_open(version, step):
            return f"{step} waits: its circuit breaker is open"
        version.requested |= {step}
        found = version.readiness(step)
        decision = self._take(version, step, found.criterion) if found.is_ready else None
        version.requested -= {step}
        return f"{step} waits: {found.criterion}" if decision is None else described(decision)

    def _measure(self, version: AttachedVersion, step: str) -> str:
        """Tries a form of any level, without using it."""
        if step in version.level_state.enabled:
            return f"{step} is enabled already"
        self._count_build(version, step)
        decision = self._trials.run(version, step).decision(step, "measured")
        version.measured[step] = decision
        return described(decision).replace("enabled", "would be enabled")


def _steps_of(runtime: Runtime, forms: Sequence[str], max_rows: int, *, keeps_inputs: bool) -> tuple[str, ...]:
    """In the order in which they are tried. forms: those that the runtime may have here."""
    steps = []
    if isinstance(runtime, Tokenising) and keeps_inputs:
        tokeniser = runtime.tokeniser
        has_threads = tokeniser is not None and tokeniser.max_threads > 1
        steps += [TOKENIZER_CACHE, *([TOKENIZER_POOL] if has_threads else [])]
    # A model without a copy for this thread cannot be tried beside the traffic.
    if max_rows > 1 and isinstance(runtime, Tunable):
        steps.append(BATCHING)
    # Quick builds come first: once one of them is in use, a long build may not be worth its time.
    return (*steps, *sorted(forms, key=lambda name: THRESHOLDS[name].min_forward_s))


def _max_level_of(config: InferenceConfig, own: int | None) -> int:
    """own: what the package allows; None: it says nothing."""
    if not config.enabled:
        return 0
    return min(config.max_level, HIGHEST_LEVEL if own is None else own, HIGHEST_LEVEL)


def _new_goldens(redactor: InputRedactor) -> GoldenStore:
    return GoldenStore(seed=secrets.randbits(32), redactor=redactor if redactor.is_active else None)


def _named(breaker: str) -> tuple[str, str, str]:
    """(model, version, form) of a breaker."""
    model, local = split_breaker_name(breaker)
    version, _, form = local.partition(":")
    return model, version, form


def _gate_alert(key: DecisionKey, gate: GateDecision) -> Alert:
    """Each trial that erred is a failure of its own: a step is tried again on request only."""
    name = f"gate {key.model}/{key.version}:{gate.optimization} {key.content_hash} {secrets.token_hex(8)}"
    figures = dict(gate.evidence)
    return Alert(name, "gate", key.model, gate.reason, time.time(), key.version, gate.optimization, figures)


def _admits(breakers: FormBreakers, version: AttachedVersion, form: str) -> bool:
    return breakers.admits(version.breaker_of(form))


def _verdict_of(trial: Trial) -> Verdict:
    if trial.reason:
        return Verdict.FAIL
    judgement = trial.evidence.judgement
    return judgement.verdict if judgement is not None else Verdict.PASS


def _turn_on(runtime: Runtime, gate: GateDecision, forward: Forward | None) -> None:
    """Puts a step into effect that the gate has accepted. The only place that does so.

    Batching needs nothing here: the batcher has had its limits since the load.
    """
    if isinstance(runtime, Tunable) and forward is not None:
        runtime.forms.use(gate.optimization, forward)
    tokeniser = runtime.tokeniser if isinstance(runtime, Tokenising) else None
    if tokeniser is not None and gate.optimization == TOKENIZER_CACHE:
        tokeniser.cache = TokenCache(_CACHE_ENTRIES, _CACHE_BYTES)
    if tokeniser is not None and gate.optimization == TOKENIZER_POOL:
        tokeniser.use_pool(tokeniser.max_threads)
