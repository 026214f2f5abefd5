"""One loaded version as the optimizer knows it: its steps, the evidence for them, and the decisions so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.workers.levels.decision_log import DecisionKey
from penstock.workers.levels.profiler import Profiler
from penstock.workers.levels.progression import THRESHOLDS, Decision, Evidence, LevelState, StepReadiness, readiness
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
    measured: dict[str, Decision] = field(default_factory=dict)
    """Trials of forms that may not be used."""
    long_builds: int = 0
    answers: int = 0
    """How many requests of operators were carried out."""
    answer: str = ""
    """The result of the last of them."""
    is_detached: bool = False

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
        if step in self.requested:
            return True
        earlier = self.earlier.get(step)
        was_measured = earlier is not None and earlier.action == "refused" and bool(earlier.evidence)
        return step not in self.level_state.settled and not was_measured

    def _evidence(self, step: str) -> Evidence:
        profile, goldens = self.profiler.profile, self.profiler.goldens
        earlier = self.earlier.get(step)
        return Evidence(
            forwards=profile.forwards,
            texts=profile.texts,
            golden_rows=goldens.rows if goldens else 0,
            forward_s=profile.seconds,
            # An attached version was loaded, and the first forward of a load has two rows.
            warmed_rows=min(2, self.max_rows),
            long_builds=self.long_builds,
            is_requested=step in self.requested,
            was_accepted=earlier is not None and earlier.action == "enabled",
            form=self.level_state.form,
            form_gain=self.level_state.form_gain,
        )
