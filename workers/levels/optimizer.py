"""Levels 1 to 3: a step is enabled after a trial beside the traffic, and disabled for good when it fails at serving.

    attach(runtime) -> Profiler <- the drain observes every batch
         tick: evidence -> progression.readiness -> Trials.run -> DecisionLog, audit -> the step is on
    a form fails at serving -> Forms falls back at once -> one decision: disabled, until this process ends

One background thread builds, judges and times; see trials.py. It never runs on a model thread: a form is swapped in
between two batches. Each decision is one line of the log and one audit record. Both are written before the decision
takes effect.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from penstock.registry.settings import InferenceConfig
from penstock.safety.golden_store import GoldenStore
from penstock.workers.compilation import TorchCompiler
from penstock.workers.levels.attached import AttachedVersion
from penstock.workers.levels.decision_log import DecisionKey, DecisionLog, environment
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
from penstock.workers.levels.trials import Trials
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime.base import Runtime
from penstock.workers.runtime.forms import Forward, Tunable
from penstock.workers.runtime.tokeniser import TokenCache, Tokenising

__all__ = ["Audit", "LevelCommand", "Optimizer"]

logger = logging.getLogger("penstock.runtime")

LevelCommand = Literal["compile", "optimise", "measure", "trace"]
Audit: TypeAlias = Callable[[Mapping[str, object]], None]

_TICK_S: Final = 1.0
_CACHE_ENTRIES: Final = 50_000
_CACHE_BYTES: Final = 32 << 20
_MAX_ANSWER: Final = 2000
"""Characters of an answer to an operator that the report holds."""
_QUICK_BUILD: Final = frozenset({"bf16", "fp16"})


class _Request(NamedTuple):
    model: str
    command: LevelCommand
    answer: Future[str]


class Optimizer:
    """Brings the models of one worker to their level. Its methods are for any thread.

    home: the folder of the decision log. device: the worker's. audit: gets every decision as plain data. compiler: None
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
        self._trials = Trials(config.compilation.tolerance, metrics, self._compiler, clock)
        self.log: Final = DecisionLog(home)
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

    def stop(self) -> None:
        """Makes no more decisions. A build under way ends with the process at the latest."""
        with self._wake:
            self._is_stopping = True
            requests = list(self._requests)
            self._wake.notify()
        if self._compiler is not None:
            self._compiler.stop()
        for request in requests:
            request.answer.cancel()

    def attach(self, key: Hashable, runtime: Runtime, content_hash: str, max_rows: int) -> Profiler:
        """Takes charge of a loaded version. max_rows: the most rows of its batches.

        The drain calls the profiler's `observe` once for each batch that has ended.
        """
        config, spec = self._config, runtime.spec
        judged = f"compiled by {config.compilation.backend} within {config.compilation.tolerance:g}"
        decision_key = DecisionKey(spec.name, spec.version, content_hash, environment(self._device, judged))
        keeps_inputs = "hashes_only" not in (config.privacy.mode, config.cache.privacy_mode)
        has_goldens = keeps_inputs and spec.deterministic and not spec.streams
        version = AttachedVersion(
            decision_key,
            runtime,
            Profiler(runtime, GoldenStore(seed=secrets.randbits(32)) if has_goldens else None),
            self._steps_of(runtime, max_rows, keeps_inputs=keeps_inputs),
            self._max_level_of(spec.max_level),
            max_rows,
            self.log.earlier(decision_key),
        )
        if isinstance(runtime, Tunable):
            runtime.forms.on_fallback = partial(self._fell_back, version)
        with self._wake:
            self._attached[key] = version
            self._show_level(version)
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

        compile, optimise: tries the forms of level 2, or all that max_level allows, despite earlier decisions.
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
        return any(self._advance(version) for version in attached)

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
        # Quick builds come first: once one of them is in use, a long build may not be worth its time.
        forms = sorted(self._trials.forms_of(runtime), key=lambda name: THRESHOLDS[name].min_forward_s)
        return (*steps, *forms)

    def _advance(self, version: AttachedVersion) -> bool:
        """Tries the first step whose criterion holds; False when there is none."""
        for step in version.steps:
            if self._is_stopping or version.is_detached:
                return False
            found = version.readiness(step)
            if found.is_ready and version.may_try(step):
                self._take(version, step, found.criterion)
                return True
        return False

    def _take(self, version: AttachedVersion, step: str, criterion: str) -> Decision | None:
        """Tries a step and decides on it; None when the version was detached meanwhile."""
        self._count_build(version, step)
        trial = self._trials.run(version, step)
        decision = trial.decision(step, criterion)
        with self._lock:
            if version.is_detached or self._is_stopping:
                return None
            version.requested -= {step}
            if self._decide(version, decision) and decision.action == "enabled":
                _turn_on(version.runtime, step, trial.forward)
        return decision

    def _count_build(self, version: AttachedVersion, step: str) -> None:
        version.long_builds += is_form(step) and step not in _QUICK_BUILD

    def _decide(self, version: AttachedVersion, decision: Decision) -> bool:
        """Records a decision; False when that failed. A step without a record could not be traced, so it is not on."""
        key = version.key
        try:
            self._audit(self.log.append(key, decision))
            is_recorded = True
        except Exception:
            logger.exception("a decision could not be recorded", extra={"model": key.model, "step": decision.step})
            is_recorded = False
            if decision.action == "enabled":
                decision = replace(decision, action="refused", reason="it could not be recorded")
                # The log may have the first decision although the audit has not.
                with suppress(OSError):
                    self.log.append(key, decision)
        version.level_state = version.level_state.apply(decision)
        _log_decision(key, decision)
        self._show_level(version)
        return is_recorded

    def _show_level(self, version: AttachedVersion) -> None:
        self._metrics.level(version.key.model, version.key.version, "", version.level_state.level)

    def _fell_back(self, version: AttachedVersion, form: str, reason: str) -> None:
        """A form failed at serving. Called on a model thread, after the reference has answered the batch."""
        with self._lock:
            if version.level_state.form == form and not version.is_detached:
                self._decide(version, Decision(form, "disabled", "it failed at serving", reason))

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


def _log_decision(key: DecisionKey, decision: Decision) -> None:
    logger.info(
        "optimization decision",
        extra={
            "model": key.model,
            "version": key.version,
            "step": decision.step,
            "action": decision.action,
            "gain": decision.gain,
            "reason": decision.reason or decision.criterion,
        },
    )


def _turn_on(runtime: Runtime, step: str, forward: Forward | None) -> None:
    """Puts a step into effect. Batching needs nothing here: the batcher has had its limits since the load."""
    if isinstance(runtime, Tunable) and forward is not None:
        runtime.forms.use(step, forward)
    tokeniser = runtime.tokeniser if isinstance(runtime, Tokenising) else None
    if tokeniser is not None and step == TOKENIZER_CACHE:
        tokeniser.cache = TokenCache(_CACHE_ENTRIES, _CACHE_BYTES)
    if tokeniser is not None and step == TOKENIZER_POOL:
        tokeniser.use_pool(tokeniser.max_threads)
