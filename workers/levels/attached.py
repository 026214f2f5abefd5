"""One loaded version as the optimizer knows it: its steps, the evidence for them, and the decisions so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.registry.broker.breakers import breaker_name
from penstock.safety.orchestrator import Subject
from penstock.workers.levels.decision_log import DecisionKey
from penstock.workers.levels.profiler import Profiler
from penstock.workers.levels.progression import (
    THRESHOLDS,
    Decision,
    Evidence,
    LevelState,
    StepReadiness,
    is_form,
    readiness,
)
from penstock.workers.levels.spot_check import SpotWatch
from penstock.workers.runtime.base import Runtime

__all__ = ["AttachedVersion"]


@dataclass(eq=False)
class AttachedVersion:
    """The optimizer's thread owns it, except for `level_state`, which changes under the optimizer's lock only."""

    key: DecisionKey
    runtime: Runtime
    profiler: Profiler
    steps: tuple[str, ...]
    """The steps that this model has, in the order in which they are tried."""
    max_level: int
    max_rows: int
    earlier: Mapping[str, Decision]
    """The last decision of earlier processes on each step."""
    level_state: LevelState = field(default_factory=LevelState)
    requested: frozenset[str] = frozenset()
    """Steps that an operator requested and that are not tried yet."""
    returning: frozenset[str] = frozenset()
    """Forms whose circuit breaker has closed again, and that are not tried since."""
    measured: dict[str, Decision] = field(default_factory=dict)
    """Trials of forms that may not be used."""
    long_builds: int = 0
    answers: int = 0
    """How many requests of operators were carried out."""
    answer: str = ""
    """The result of the last of them."""
    watch: SpotWatch | None = None
    """The spot checks of the form in use; None: it had none yet."""
    is_detached: bool = False
    has_met_an_open_breaker: bool = False
    """Whether a form was not tried because its circuit breaker was open."""

    @property
    def steps_by_level(self) -> list[str]:
        """The steps in the order in which they are shown."""
        return sorted(self.steps, key=lambda step: THRESHOLDS[step].level)

    def readiness(self, step: str) -> StepReadiness:
        """Whether this step may be tried now, as far as its criteria say."""
        return readiness(step, self._evidence(step), self.max_level)

    def may_try(self, step: str) -> bool:
        """Whether no decision forbids a trial, or an operator requested one."""
        if step in self.level_state.enabled:
            return False
        if step in self.requested or step in self.returning:
            return True
        return step not in self.level_state.settled and not self.was_refuted(step)

    def was_refuted(self, step: str) -> bool:
        """Whether an earlier process refused the step after measurements."""
        earlier = self.earlier.get(step)
        return earlier is not None and earlier.action == "refused" and bool(earlier.evidence)

    @property
    def subject(self) -> Subject:
        """What decisions about this version are about."""
        return Subject(self.key.model, self.key.version, self.key.content_hash)

    def breaker_of(self, form: str) -> str:
        """The name of the form's circuit breaker."""
        return breaker_name(self.key.model, self.key.version, form)

    @property
    def has_used_a_form(self) -> bool:
        """Whether a form other than the eager model is or was in use."""
        settled = self.level_state.settled
        return any(is_form(step) and settled[step].action != "refused" for step in settled)

    def end_batching(self) -> None:
        """One job for each forward from the next batch on: the rows of a batch depend on each other."""
        self.max_rows = self.profiler.row_limit = 1

    def _evidence(self, step: str) -> Evidence:
        profile, goldens = self.profiler.profile, self.profiler.goldens
        earlier = self.earlier.get(step)
        return Evidence(
            forwards=profile.forwards,
            texts=profile.texts,
            golden_rows=goldens.rows if goldens else 0,
            forward_s=profile.seconds,
            long_builds=self.long_builds,
            is_requested=step in self.requested,
            was_accepted=step in self.returning or (earlier is not None and earlier.action == "enabled"),
            form=self.level_state.form,
            form_gain=self.level_state.form_gain,
        )
