"""`penstock canary run`: a verdict on a candidate, from the stored goldens of the model and from pairs of its shadow.

    stored goldens -- the candidate runs on them --> ShadowCanary -- FAIL: the verdict
                                                        | state
    a shadow: one that runs, or one of its own -- ShadowWorker, stepped here --> canaries of all shadow workers
                                                        '--> merged --> verdict --> the gate's record

The verdict comes as soon as it is sure, after enough pairs, or at the time-out. A shadow that this command has started
ends with it. A FAIL opens the breaker of the candidate, and is one alert; see canary_failures.py. A PASS closes that of
a version, once its pause is over; see canary_passes.py.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from penstock.compose import shadow as shadows
from penstock.compose.canary_failures import CanaryFailures, opened_failures
from penstock.compose.canary_gate import record_verdict
from penstock.compose.canary_passes import CanaryPasses
from penstock.compose.candidates import CheckedCandidate, checked_candidate
from penstock.compose.rollout.active_version import active_deployment
from penstock.compose.rollout.operator_keys import operator_keys
from penstock.registry.broker.base import FleetEnd
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.broker.redis_shadow import RedisShadow
from penstock.registry.errors import (
    BrokerUnavailable,
    ConfigurationError,
    InvalidInput,
    ModelNotReady,
    TransitionConflict,
    UnknownModel,
)
from penstock.registry.settings import Settings
from penstock.registry.shadow import CANARY_PAIRS, ShadowOrder
from penstock.safety.canary import CanaryState, CanaryVerdict, NoOutputs, Pair
from penstock.safety.golden_archive import GoldenArchive
from penstock.safety.golden_store import Golden
from penstock.safety.keys import load_data_keys
from penstock.safety.orchestrator import GateDecision
from penstock.safety.payload_keys import envelope_keys
from penstock.safety.validator_registry import ValidatorRegistry
from penstock.safety.validators import Verdict
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime.loading import LoadOptions
from penstock.workers.shadow.canary import ShadowCanary
from penstock.workers.shadow.candidate import Candidate, CandidateFailed
from penstock.workers.shadow.comparison import Comparer
from penstock.workers.shadow.consumer import ShadowOptions, ShadowWorker
from penstock.workers.versions.policy import VersionPolicy
from penstock.workers.versions.repository import DiskRepository

__all__ = ["CanaryPlan", "run_canary"]

_TIMEOUT_S: Final = 5.0
_CHUNK: Final = 16
"""Goldens between two looks at the verdict."""
_GRACE_S: Final = 60.0
"""A shadow of this command ends by itself so long after the time-out, also when the command was killed."""
_LOOK_S: Final = 0.5
_MOST_EXAMPLES: Final = 5
OnProgress = Callable[[CanaryVerdict, str], None]
"""Gets the verdict so far, and the present step in words."""


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    """How long and on what a canary judges.

    share: of the answered jobs that are mirrored; 0: on stored goldens alone. min_pairs: with fewer, the verdict is
    FAIL or INSUFFICIENT. timeout_s: after it, the verdict is that of the pairs so far. Raises InvalidInput.
    """

    share: float = 1.0
    min_pairs: int = CANARY_PAIRS
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InvalidInput(f"The share of a canary is {self.share:g}. Expected a number from 0 to 1")
        if self.min_pairs < 1:
            raise InvalidInput(f"The pairs of a canary are {self.min_pairs}. Expected a positive number")
        if not 0 < self.timeout_s < float("inf"):
            raise InvalidInput(f"The time-out of a canary is {self.timeout_s:g} s. Expected a positive number")


def run_canary(
    settings: Settings,
    fleet: FleetEnd,
    model: str,
    version: str,
    form: str,
    plan: CanaryPlan,
    *,
    device: str = "cpu",
    on_progress: OnProgress = lambda _verdict, _step: None,
) -> dict[str, Any]:
    """Judges a candidate, and records the decision; returns the verdict as plain data.

    Raises as checked_candidate does; TransitionConflict while another shadow of the model runs; ModelNotReady for a
    candidate that cannot be loaded here; ConfigurationError, BrokerUnavailable and RegistryUnavailable.
    """
    begun = time.monotonic()
    candidate = checked_candidate(settings, fleet, model, version, form)
    metrics = InferenceMetrics(settings.inference.metrics_buckets)
    with (
        closing(RedisShadow.from_url(settings.redis_url or "", timeout_s=_TIMEOUT_S)) as end,
        opened_failures(settings, metrics) as failures,
    ):
        # The pairs of a shadow that runs already may be older than what has opened the breaker.
        since_ms = 0.0 if _has_shadow(end, candidate) else end.server_ms()
        judged = _Judged(settings, candidate, plan, device, on_progress, metrics, failures)
        goldens = _stored_goldens(settings, fleet, candidate)
        if goldens:
            judged.judge_goldens(goldens)
        examples: list[Any] = []
        if plan.share and not judged.verdict.is_final:
            with _shadow(settings, fleet, end, candidate, plan) as shadow_id:
                judged.judge_shadow(end, begun + plan.timeout_s)
                gate = judged.conclude(end, shadow_id)
                examples = shadows.report(settings, model)["worst"][:_MOST_EXAMPLES]
        else:
            gate = judged.conclude(end)
        verdict = judged.verdict
        wait_s = _readmitted(settings, candidate, verdict, since_ms) if verdict.verdict is Verdict.PASS else 0.0
    return {
        "model": model,
        "candidate": candidate.version,
        "form": form,
        "active": candidate.active,
        **verdict.as_data(),
        "accepted": gate.accepted,
        "breaker_stays_open": wait_s > 0,
        "breaker_pause_s": round(wait_s, 3) if 0 < wait_s < inf else None,
        "goldens": judged.goldens.pairs,
        "shadow_pairs": judged.pairs.pairs,
        "examples": examples,
        "seconds": round(time.monotonic() - begun, 3),
    }


def _readmitted(settings: Settings, candidate: CheckedCandidate, verdict: CanaryVerdict, since_ms: float) -> float:
    """Closes the breaker of the version. Returns 0, or the seconds for which it stays open; see CanaryPasses."""
    if candidate.form:
        return 0.0
    with closing(RedisBreakers.from_url(settings.redis_url or "", timeout_s=_TIMEOUT_S)) as breakers:
        return CanaryPasses.of(settings, breakers).readmit(candidate, verdict, since_ms)


def _has_shadow(end: RedisShadow, candidate: CheckedCandidate) -> bool:
    """Whether a shadow of the candidate runs. Raises TransitionConflict for one that is of no use here."""
    state = end.state(candidate.model, series=0)
    if not state.is_running:
        return False
    running = ShadowOrder.open(state.record, candidate.model)
    if (running.candidate, running.form) != (candidate.version, candidate.form) or not running.canary_pairs:
        what = running.label if running.canary_pairs else f"{running.label} without a canary"
        raise TransitionConflict(
            f"{candidate.model} has a shadow with the candidate {what}. Expected `penstock shadow stop "
            f"{candidate.model}` first"
        )
    return True


@contextmanager
def _shadow(
    settings: Settings, fleet: FleetEnd, end: RedisShadow, candidate: CheckedCandidate, plan: CanaryPlan
) -> Iterator[str]:
    """The id of the shadow that runs already, which stays; or of one of its own, which ends with the block."""
    state = end.state(candidate.model, series=0)
    if state.is_running:
        yield ShadowOrder.open(state.record, candidate.model).id
        return
    order = shadows.start(
        settings,
        fleet,
        candidate.model,
        candidate.version,
        plan.share,
        hours=(plan.timeout_s + _GRACE_S) / 3600,
        form=candidate.form,
        canary_pairs=plan.min_pairs,
    )
    try:
        yield order.id
    finally:
        with suppress(UnknownModel, BrokerUnavailable):
            shadows.stop(settings, candidate.model)


def _stored_goldens(settings: Settings, fleet: FleetEnd, candidate: CheckedCandidate) -> list[Golden]:
    """Those of the active version; none where the privacy mode stores none.

    The content of the active version is that of its record; before the first promotion, that of its files here.
    """
    if not settings.inference.persists_goldens:
        return []
    from penstock.registry.catalog.goldens import GoldenOwner

    active = active_deployment(fleet, candidate.model)
    if active is not None:
        content_hash = active.content_hash
    else:
        try:
            content_hash = (
                DiskRepository.of(settings).package(candidate.model, candidate.active).manifest().content_hash
            )
        except (UnknownModel, ConfigurationError):
            return []
    archive = GoldenArchive.of(settings, load_data_keys(settings))
    return archive.load(GoldenOwner(candidate.model, candidate.active, content_hash)) if archive is not None else []


class _Judged:
    """What is known of the candidate: from goldens, and from the shadow's pairs."""

    def __init__(
        self,
        settings: Settings,
        candidate: CheckedCandidate,
        plan: CanaryPlan,
        device: str,
        on_progress: OnProgress,
        metrics: InferenceMetrics,
        failures: CanaryFailures,
    ) -> None:
        self._settings = settings
        self._candidate = candidate
        self._plan = plan
        self._device = device
        self._on_progress = on_progress
        self._metrics = metrics
        self._failures = failures
        self._failed: CanaryVerdict | None = None
        """The FAIL that this process has found as a shadow worker."""
        self._gate: GateDecision | None = None
        """The decision on the verdict, once it is recorded."""
        self._validators = ValidatorRegistry()
        self._validators.load_entry_points()
        self._step = ""
        self.goldens = CanaryState()
        self.pairs = CanaryState()
        """Of the shadow, by all shadow workers."""

    @property
    def verdict(self) -> CanaryVerdict:
        """The verdict on all that was found so far."""
        return self._failed or self.goldens.merged(self.pairs).verdict(self._plan.min_pairs)

    def conclude(self, end: RedisShadow, shadow_id: str = "") -> GateDecision:
        """Records the verdict; then a FAIL opens the breaker, and is told unless another shadow worker has told it.

        shadow_id: of the shadow that was judged; empty: stored goldens alone were.
        """
        verdict = self.verdict
        if self._gate is not None:
            # The shadow worker in this process has found the FAIL, and has done the rest.
            return self._gate
        self._gate = record_verdict(self._settings, self._candidate, verdict)
        if verdict.is_final:
            self._failures.stop(self._candidate, verdict)
            if not shadow_id or self._ends_shadow(end, shadow_id, verdict):
                self._failures.tell(self._candidate, verdict, shadow_id or secrets.token_hex(8))
        return self._gate

    def _ends_shadow(self, end: RedisShadow, shadow_id: str, verdict: CanaryVerdict) -> bool:
        """Ends the shadow. False: the canary of another shadow worker has ended it."""
        model = self._candidate.model
        if end.end(model, shadow_id, f"the canary says {verdict.verdict}: {'; '.join(verdict.reasons)}") is not None:
            return True
        return not end.state(model, series=0).report.get("ended")

    def _found_here(self, end: RedisShadow, verdict: CanaryVerdict) -> None:
        """The canary of this process has a new verdict. A FAIL is recorded before it ends the shadow."""
        if verdict.is_final:
            self.pairs = shadows.merged_canary(end.state(self._candidate.model, series=0))
            merged = self.verdict
            self._failed = merged if merged.is_final else verdict
            self._gate = record_verdict(self._settings, self._candidate, self._failed)

    def judge_goldens(self, goldens: list[Golden]) -> None:
        """Runs the candidate on each golden, until the first sure failure."""
        self._say("loading the candidate")
        config = self._settings.inference
        package = DiskRepository.of(self._settings).package(self._candidate.model, self._candidate.version)
        policy = VersionPolicy.of(package.spec, config)
        options = LoadOptions(self._candidate.content_hash, policy.precision, config.compilation.warmup_requests)
        comparer = Comparer(
            self._candidate.model,
            package.spec.outputs,
            self._validators,
            task=package.spec.task,
            form=self._candidate.form,
        )
        judge = ShadowCanary(comparer, self._plan.min_pairs)
        candidate = Candidate(
            package,
            options,
            form=self._candidate.form,
            device=self._device,
            threads=1,
            timeout_s=policy.timeout_s,
            load_timeout_s=config.load_timeout_s,
            withholds_texts=True,
        )
        with closing(candidate):
            candidate.load()
            self._say("stored goldens")
            for first in range(0, len(goldens), _CHUNK):
                judge.observe([_pair(candidate, golden) for golden in goldens[first : first + _CHUNK]])
                self.goldens = judge.state
                self._say("stored goldens")
                if self.verdict.is_final:
                    return

    def judge_shadow(self, end: RedisShadow, until: float) -> None:
        """Works as a shadow worker until the verdict is there, or until then. until: monotonic seconds."""
        self._say("loading the candidate")
        keys = operator_keys(self._settings)
        options = ShadowOptions(
            consumer=f"canary@{socket.gethostname()}:{secrets.token_hex(4)}",
            device=self._device,
            verify=keys.verify if self._settings.operator_public_keys else None,
            validators=self._validators,
            on_verdict=lambda _order, _content_hash, verdict: self._found_here(end, verdict),
            on_failure=lambda _order, _content_hash, verdict: self._failures.stop(self._candidate, verdict),
            on_ended=lambda order, _content_hash, verdict: self._failures.tell(self._candidate, verdict, order.id),
        )
        worker = ShadowWorker(
            end,
            self._candidate.model,
            DiskRepository.of(self._settings),
            self._settings.inference,
            envelope_keys(self._settings),
            self._metrics,
            options,
        )
        look_at = time.monotonic()
        with closing(worker):
            while time.monotonic() < until and self.verdict.verdict is Verdict.INSUFFICIENT:
                pause_s = worker.step()
                if worker.problem:
                    raise ModelNotReady(f"The candidate cannot be loaded here. {worker.problem}")
                if pause_s or time.monotonic() >= look_at:
                    look_at = time.monotonic() + _LOOK_S
                    state = end.state(self._candidate.model, series=0)
                    self.pairs = shadows.merged_canary(state)
                    self._say("shadow pairs")
                    if not state.is_running:
                        return
                time.sleep(pause_s)

    def _say(self, step: str) -> None:
        self._on_progress(self.verdict, step)


def _pair(candidate: Candidate, golden: Golden) -> Pair:
    try:
        outputs, _ = candidate.run(golden.inputs)
    except CandidateFailed as failure:
        return Pair(golden.outputs, NoOutputs(failure.problem), name=golden.digest)
    return Pair(golden.outputs, outputs, name=golden.digest)
