"""Shadows: an operator starts, stops and reads one; a shadow worker serves one until a signal stops it.

start -- checks --> ShadowOrder, signed --> the broker --> workers mirror, shadow workers compare
"""

from __future__ import annotations

import json
import logging
import secrets
import signal
import socket
import threading
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.compose.canary_gate import record_verdict
from penstock.compose.candidates import CheckedCandidate, checked_candidate
from penstock.compose.rollout.audit_log import audit_logger
from penstock.compose.rollout.operator_keys import operator_keys
from penstock.compose.terminal import stop_signals
from penstock.registry.broker.base import FleetEnd
from penstock.registry.broker.breakers import CANDIDATE
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.broker.redis_shadow import RedisShadow, ShadowState
from penstock.registry.errors import (
    ConfigurationError,
    Corrupt,
    InvalidInput,
    PenstockError,
    TransitionConflict,
    UnknownModel,
)
from penstock.registry.queues import parse_name
from penstock.registry.settings import Settings
from penstock.registry.shadow import CANARY_PAIRS, ShadowOrder
from penstock.safety.audit import STATE_CHANGE
from penstock.safety.canary import CanaryState, CanaryVerdict
from penstock.safety.drift import DriftLimits
from penstock.safety.shadow_report import report_of
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.versions.repository import DiskRepository

if TYPE_CHECKING:
    from penstock.safety.alerts import Alerts
    from penstock.workers.shadow.consumer import ComparedPair
    from penstock.workers.shadow.drift import CandidateWatch

__all__ = ["canary_of", "merged_canary", "report", "serve_shadow", "start", "status", "stop"]

_TIMEOUT_S: Final = 5.0
_MOST_EXAMPLES: Final = 10
_DRIFTED: Final = "it drifted in the shadow"

logger = logging.getLogger("penstock.shadow")


def start(
    settings: Settings,
    fleet: FleetEnd,
    model: str,
    candidate: str,
    share: float,
    *,
    hours: float = 168.0,
    max_pairs: int = 10_000,
    max_bytes: int = 64 * 1024 * 1024,
    pair_ttl_s: float = 600.0,
    form: str = "",
    canary_pairs: int = CANARY_PAIRS,
) -> ShadowOrder:
    """Start a shadow: from the next report of each worker on, a share of the answered jobs is mirrored.

    After an error nothing has changed. Raises as checked_candidate does, InvalidInput for values out of range,
    TransitionConflict when the model has a shadow, ConfigurationError without an operator's key.
    """
    checked = checked_candidate(settings, fleet, model, candidate, form)
    if not hours > 0:
        raise InvalidInput(f"A shadow of {hours:g} hours. Expected a positive number")
    with closing(_end(settings)) as end:
        order = ShadowOrder.new(
            model,
            checked.version,
            share,
            until_ms=int(end.server_ms() + hours * 3_600_000),
            candidate_hash=checked.content_hash,
            max_pairs=max_pairs,
            max_bytes=max_bytes,
            pair_ttl_ms=int(pair_ttl_s * 1000),
            form=form,
            canary_pairs=canary_pairs,
        )
        record = order.seal(operator_keys(settings, for_changes=True).sign)
        # The log is written first: no shadow runs without its record.
        _audit(settings, order, "started", checked.active)
        if (running := end.start(order, record)) is not None:
            _audit(settings, order, "refused", checked.active)
            raise TransitionConflict(
                f"{model} has a shadow{_named(running, model)} already. Expected `penstock shadow stop {model}` first"
            )
    return order


def stop(settings: Settings, model: str) -> dict[str, Any]:
    """Stop the shadow of a model, and delete its pairs. Raises UnknownModel when none runs."""
    parse_name("model", model)
    with closing(_end(settings)) as end:
        record = end.orders([model])[model]
        if record:
            with suppress(Corrupt):
                _audit(settings, ShadowOrder.open(record, model), "stopped", "")
        stopped = end.stop(model) if record else None
        if stopped is None:
            raise UnknownModel(f"{model} has no shadow. Expected a model that `penstock shadow status` lists")
        return {"model": model, "candidate": _candidate_of(stopped[0], model), "discarded": stopped[1]}


def status(settings: Settings, fleet: FleetEnd, model: str = "") -> list[dict[str, Any]]:
    """The shadow of a model, or those of all models; ready for JSON."""
    names = [parse_name("model", model)] if model else fleet.models()
    with closing(_end(settings)) as end:
        now_ms = end.server_ms()
        found = [_status(name, end.state(name, series=0), now_ms) for name in names]
    return [each for each in found if each["is_running"] or model]


def report(settings: Settings, model: str) -> dict[str, Any]:
    """What the shadow of a model has shown, also after its end. Raises UnknownModel when there never was one."""
    parse_name("model", model)
    with closing(_end(settings)) as end:
        state, now_ms = end.state(model), end.server_ms()
    if not state.report:
        raise UnknownModel(f"{model} has had no shadow. Expected `penstock shadow start {model}` first")
    worst = [json.loads(example) for example in state.worst[:_MOST_EXAMPLES]]
    limits = DriftLimits.of(settings.inference.safety)
    found = {**_status(model, state, now_ms), **report_of(state.report, state.series, limits), "worst": worst}
    return {**found, "canary": canary_of(state)}


def canary_of(state: ShadowState) -> dict[str, Any] | None:
    """The verdict of the canary on the pairs of all shadow workers; None: the shadow has no canary."""
    min_pairs = _number(state.report.get("canary_pairs"))
    return merged_canary(state).verdict(min_pairs).as_data() if min_pairs else None


def merged_canary(state: ShadowState) -> CanaryState:
    """What the canaries of all shadow workers have found. A state that cannot be read is passed over."""
    total = CanaryState()
    for text in state.canaries:
        with suppress(InvalidInput):
            total = total.merged(CanaryState.decode(text))
    return total


def serve_shadow(
    settings: Settings, model: str, metrics: InferenceMetrics, *, device: str = "cpu", gives_way: bool = True
) -> None:
    """Serve the shadow of a model until SIGTERM, SIGINT or SIGHUP; without one, wait for it.

    gives_way: whether the process and the candidate's get only the time of the processors that nobody else wants.
    Raises ConfigurationError, and BrokerRefused when the broker's user lacks a right.
    """
    # Here: the other commands load no part of a worker.
    from penstock.compose.canary_failures import CanaryFailures
    from penstock.compose.canary_passes import CanaryPasses
    from penstock.safety.alert_hooks import open_alerts
    from penstock.safety.payload_keys import envelope_keys
    from penstock.safety.validator_registry import ValidatorRegistry
    from penstock.workers.process.background import give_way
    from penstock.workers.shadow.consumer import ShadowOptions, ShadowWorker

    parse_name("model", model)
    if gives_way:
        give_way()
    is_stopping = threading.Event()
    for number in stop_signals():
        signal.signal(number, lambda *_: is_stopping.set())
    validators = ValidatorRegistry()
    validators.load_entry_points()
    opened = open_alerts(settings, metrics.alert)
    breakers, end = _breakers(settings), _end(settings)
    failures = CanaryFailures.of(settings, breakers, opened.alerts, metrics, reaches_stores=False)
    passes = CanaryPasses.of(settings, breakers, reaches_stores=False)
    watch = _watch(settings, model, breakers, end, opened.alerts, metrics)
    options = ShadowOptions(
        validators=validators,
        consumer=f"shadow@{socket.gethostname()}:{secrets.token_hex(4)}",
        device=device,
        verify=operator_keys(settings).verify if settings.operator_public_keys else None,
        on_verdict=partial(_record_verdict, settings, metrics),
        on_pass=lambda order, content, verdict, since_ms: passes.readmit(_candidate(order, content), verdict, since_ms),
        on_failure=lambda order, content, verdict: failures.stop(_candidate(order, content), verdict),
        on_ended=lambda order, content, verdict: failures.tell(_candidate(order, content), verdict, order.id),
        is_stopping=is_stopping,
        on_compared=watch.observe,
    )
    with closing(opened), closing(breakers), closing(end), closing(watch):
        worker = ShadowWorker(
            end, model, DiskRepository.of(settings), settings.inference, envelope_keys(settings), metrics, options
        )
        try:
            worker.run()
        finally:
            worker.close()


def _watch(
    settings: Settings,
    model: str,
    breakers: RedisBreakers,
    end: RedisShadow,
    alerts: Alerts,
    metrics: InferenceMetrics,
) -> CandidateWatch:
    """Looks for drift, with the limits, the audit log and the stored state of the settings."""
    from penstock.compose.breaker_audit import record_opening
    from penstock.workers.shadow.drift import CandidateWatch, DriftStore

    def record(pair: ComparedPair, reason: str) -> None:
        drifted = CheckedCandidate(model, pair.candidate, pair.form, pair.content_hash, pair.version)
        record_opening(settings, drifted, _DRIFTED, reason, reaches_stores=False)

    store = DriftStore(partial(end.drift, model), partial(end.note_drift, model))
    return CandidateWatch(model, breakers, metrics, alerts, settings.inference.safety, store=store, on_drift=record)


def _record_verdict(
    settings: Settings, metrics: InferenceMetrics, order: ShadowOrder, content_hash: str, verdict: CanaryVerdict
) -> None:
    """A verdict that cannot be recorded ends the shadow all the same: it switches nothing on."""
    metrics.canary(order.model, order.candidate, order.form or CANDIDATE, verdict.verdict)
    try:
        record_verdict(settings, _candidate(order, content_hash), verdict, reaches_stores=False)
    except PenstockError as error:
        logger.error("the verdict of the canary is not in the audit log: %s", error, extra={"model": order.model})


def _candidate(order: ShadowOrder, content_hash: str) -> CheckedCandidate:
    return CheckedCandidate(order.model, order.candidate, order.form, content_hash, "")


def _breakers(settings: Settings) -> RedisBreakers:
    return RedisBreakers.from_url(settings.redis_url or "", timeout_s=_TIMEOUT_S)


def _end(settings: Settings) -> RedisShadow:
    return RedisShadow.from_url(settings.redis_url or "", timeout_s=_TIMEOUT_S)


def _audit(settings: Settings, order: ShadowOrder, action: str, active: str) -> None:
    if not settings.inference.privacy.audit_log_enabled:
        return
    facts = {
        "id": order.id,
        "candidate": order.candidate,
        "form": order.form,
        "share": order.share,
        "until_ms": order.until_ms,
    }
    if active:
        facts["active"] = active
    with audit_logger(settings, "shadow") as log:
        try:
            log.log_event(STATE_CHANGE, order.model, "shadow", action, facts)
        except OSError as error:
            raise ConfigurationError(
                f"The audit log cannot be written ({error.strerror}), and nothing was changed. Expected room for it"
            ) from None
        log.anchor()


def _candidate_of(record: bytes, model: str) -> str:
    try:
        return ShadowOrder.open(record, model).label
    except Corrupt:
        return ""


def _named(record: bytes, model: str) -> str:
    candidate = _candidate_of(record, model)
    return f" with the candidate {candidate}" if candidate else ""


def _status(model: str, state: ShadowState, now_ms: float) -> dict[str, Any]:
    order: ShadowOrder | None = None
    problem = state.report.get("problem", "")
    if state.record:
        try:
            order = ShadowOrder.open(state.record, model)
        except Corrupt as error:
            problem = str(error)
    counts = {name: _number(state.flow.get(name)) for name in ("mirrored", "full", "behind", "expired", "discarded")}
    asked = _number(state.flow.get("asked"))
    return {
        "model": model,
        "is_running": state.is_running,
        "id": order.id if order else state.report.get("id", ""),
        "candidate": order.candidate if order else state.report.get("candidate", ""),
        "form": order.form if order else state.report.get("form", ""),
        "ended": state.report.get("ended", ""),
        "candidate_hash": state.report.get("candidate_hash", ""),
        "share": order.share if order else None,
        "ends_in_s": round((order.until_ms - now_ms) / 1000, 1) if order else None,
        "queue": {"pairs": state.pairs, "bytes": _number(state.flow.get("bytes"))},
        "mirror": counts,
        "worker": {
            "name": state.flow.get("consumer", ""),
            "asked_s_ago": round(max(0.0, now_ms - asked) / 1000, 1) if asked else None,
        },
        "problem": problem,
    }


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
