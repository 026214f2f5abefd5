"""Routers that break a promise about experiments: what the simulator must catch in its schedules with arms."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from penstock.registry.envelope import Failure
from penstock.workers.job import ClaimedJob
from penstock.workers.results import JobOutcome
from penstock.workers.router import Answered, Aside, Route
from penstock.workers.versions.version import ServedArms, ServedVersion
from tests.simulation.checker import Mutation
from tests.simulation.mutants import Mutant
from tests.simulation.parts import SteppedRouter
from tests.simulation.worker import STEPPED

__all__ = ["ARM_MUTANTS"]


class AnotherArmAnswers(SteppedRouter):
    """While the version of its arm is not ready, a job is answered by any arm that is."""

    def _arm_here(self, job: ClaimedJob, arms: ServedArms) -> ServedVersion | None:
        found = super()._arm_here(job, arms)
        return found or next((each for each in arms.here() if each.is_ready), None)


class ArmsAreForgotten(SteppedRouter):
    """A job of an arm that no worker has is failed, as one that names such a version is."""

    def _place_of_arm(self, job: ClaimedJob, waiting: int) -> Route:
        place = super()._place_of_arm(job, waiting)
        is_of_arm = self._lifecycle.models[job.delivery.slot].arms is not None
        if place is not Aside.GIVE_BACK or not is_of_arm:
            return place
        return Answered(JobOutcome(job, Failure("ModelError", "no worker has it"), "refused", None))


ARM_MUTANTS: Final = (
    Mutant(
        Mutation("AnotherArmAnswers", types=replace(STEPPED, router=AnotherArmAnswers)),
        "answered by an arm that it did not have",
    ),
    Mutant(Mutation("ArmsAreForgotten", types=replace(STEPPED, router=ArmsAreForgotten)), "ended failed"),
)
