"""Drives a rollout: reads what the workers have counted, decides, records, activates; then waits for the next look.

    begin_rollout -> RolloutDriver.run: turn, pause, turn ... -> the candidate is in production, or it was rolled back

The state is in the registry. Any process may drive, and a driver that is killed loses nothing: `resume` goes on from
the recorded step. Of two drivers, one gets TransitionConflict and looks again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from penstock.compose.experiments.changes import Experiments, deployed_arms, new_experiment_id
from penstock.compose.rollout.endpoint_shares import endpoint_policy
from penstock.registry.catalog import ModelStage
from penstock.registry.catalog.stages import TransitionAction, check_step
from penstock.registry.catalog.tables import Experiment, RegisteredVersion
from penstock.registry.deployment import DeployedArm
from penstock.registry.errors import (
    BrokerUnavailable,
    InvalidInput,
    RegistryUnavailable,
    TransitionConflict,
    TransitionRefused,
)
from penstock.registry.queues import DEFAULT_ENDPOINT
from penstock.safety.alerts import Alert
from penstock.safety.rollout import (
    STEPS,
    Action,
    GradualRollout,
    RolloutDecision,
    RolloutPlan,
    RolloutState,
    figures_of_step,
    steps_from,
)

__all__ = ["RolloutDriver", "begin_rollout", "first_steps", "rollout_report"]

_MAX_REASON: Final = 500
Progress = Callable[[str], None]
OnDecision = Callable[[str, str, Action], None]
"""Gets the model, the candidate and the action of a decision."""


def first_steps(version: RegisteredVersion, policies: Mapping[str, Mapping[str, Any]]) -> tuple[float, ...]:
    """The steps of a rollout without an order: the usual ones, from `rollout_percent` of the endpoint `infer` on.

    policies: the knobs that operators have set over those of its model.yaml. Raises TransitionRefused for 0.
    """
    percent = endpoint_policy(version, policies, DEFAULT_ENDPOINT).rollout_percent
    if percent is None:
        return STEPS
    if percent == 0:
        raise TransitionRefused(
            f"{version.reference} has rollout_percent 0 at {DEFAULT_ENDPOINT}, which allows no rollout. Expected a "
            "percentage above 0 in its model.yaml or by `penstock policy set`, or --steps"
        )
    return steps_from(percent)


def begin_rollout(
    experiments: Experiments,
    name: str,
    to: str,
    plan: RolloutPlan,
    *,
    now: float,
    takes_own_steps: bool = False,
    is_sticky: bool = False,
    reason: str = "",
    timeout_s: float | None = None,
) -> Experiment:
    """The first step of a rollout of version `to`. Until it begins, the version in production answers all jobs.

    takes_own_steps: the steps are those of `first_steps`, and not those of the plan. is_sticky: jobs of one sticky key
    have one version, and a key that has the candidate keeps it while the share grows. Raises UnknownModel,
    TransitionRefused, InvalidInput and ModelNotReady; then nothing has changed.
    """
    registry = experiments.registry
    stable, candidate = registry.find(name), registry.find(name, to)
    check_step(candidate.reference, TransitionAction.PROMOTE, candidate.stage, ModelStage.PRODUCTION)
    versions = experiments.check(name, (candidate.version, stable.version))
    if takes_own_steps:
        policy = registry.policy(name)
        plan = msgspec.structs.replace(plan, steps=first_steps(candidate, policy.endpoints if policy else {}))
    rollout = GradualRollout(plan)
    state = rollout.begin(now)
    experiment = Experiment(
        name=name,
        experiment=new_experiment_id("rollout"),
        kind="rollout",
        status="running",
        epoch=0,
        arms=_arms(versions, candidate.version, stable.version, rollout.share(state)),
        assignment="sticky" if is_sticky else "weighted",
        plan={
            "candidate": candidate.version,
            "stable": stable.version,
            "rollout": msgspec.to_builtins(plan),
        },
        state=msgspec.to_builtins(state),
        begun_at="",
        changed_at="",
        actor="",
    )
    text = reason or f"rollout of {candidate.version} begins with {rollout.share(state) * 100:g} %"
    return experiments.start(experiment, experiment.plan, reason=text, timeout_s=timeout_s)


class RolloutDriver:
    """One driver of the rollout of a model. clock: unix seconds. pause: waits, in seconds.

    on_decision: is told each decision of this driver once, when the registry has it; a look without one is none.
    """

    def __init__(
        self,
        experiments: Experiments,
        name: str,
        *,
        clock: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
        poll_s: float = 1.0,
        on_progress: Progress = lambda line: None,
        on_decision: OnDecision = lambda model, candidate, action: None,
    ) -> None:
        self._experiments = experiments
        self._name = name
        self._clock = clock
        self._pause = pause
        self._poll_s = poll_s
        self._on_progress = on_progress
        self._on_decision = on_decision

    def run(self) -> Experiment:
        """Drives until the rollout is over, paused or stopped, and returns it as it is then.

        While broker or registry do not answer, the present step goes on. Raises TransitionRefused when the candidate
        cannot be promoted at the end.
        """
        self._experiments.activate(self._experiments.last(self._name, "rollout"))
        is_active = True
        while True:
            try:
                found = self._experiments.last(self._name, "rollout")
                if not is_active:
                    self._experiments.activate(found)
                    if found.status == "stopped":
                        # The roll-back did not come so far.
                        self._experiments.release(found)
                    is_active = True
                if found.status != "running":
                    return found
                self.turn(found)
            except TransitionConflict as conflict:
                # Another driver or operator was faster: the next look shows what they decided.
                self._on_progress(str(conflict))
            except (BrokerUnavailable, RegistryUnavailable) as problem:
                # The registry may have a decision that the broker lacks, such as a roll-back: activate it first.
                is_active = False
                self._on_progress(f"no decision now: {problem}")
            self._pause(self._poll_s)

    def turn(self, experiment: Experiment) -> RolloutDecision:
        """One look at a running rollout, and the decision, which is in force when this returns."""
        rollout, state = parsed(experiment)
        if reason := self._experiments.why_stopped(self._name, experiment.plan["candidate"]):
            decision = rollout.roll_back(state, f"the circuit breaker of the candidate is open: {reason}")
        else:
            decision = rollout.decide(state, self._clock(), self._figures(experiment, rollout, state))
        if decision.action is not Action.WAIT:
            self._apply(experiment, decision)
        return decision

    def _figures(self, experiment: Experiment, rollout: GradualRollout, state: RolloutState) -> Any:
        observed = self._experiments.observed(experiment)
        stable, candidate = experiment.plan["stable"], experiment.plan["candidate"]
        return figures_of_step(observed, state, rollout.plan, stable=stable, candidate=candidate)

    def _apply(self, experiment: Experiment, decision: RolloutDecision) -> None:
        action, candidate = decision.action, experiment.plan["candidate"]
        facts = {
            "experiment": experiment.experiment,
            "candidate": candidate,
            "after_epoch": experiment.epoch,
            "shares": {candidate: decision.share, experiment.plan["stable"]: 1 - decision.share},
        }
        self._experiments.record(self._name, str(action), {**facts, **decision.as_data()})
        changed = replace(experiment, state=_stored_state(decision, decision.state.from_epoch))
        reason = _reason(decision, candidate)
        self._on_progress(reason)
        try:
            self._carry_out(changed, experiment, decision, reason)
        except (BrokerUnavailable, RegistryUnavailable):
            # A decision that the registry has is made, and is not made again once the broker is back.
            if self._is_stored(experiment, decision):
                self._tell(experiment, decision, reason)
            raise
        self._tell(experiment, decision, reason)

    def _carry_out(self, changed: Experiment, seen: Experiment, decision: RolloutDecision, reason: str) -> None:
        action, candidate = decision.action, seen.plan["candidate"]
        if action is Action.COMPLETE:
            completed = replace(changed, status="completed")
            self._experiments.deployer.promote(self._name, candidate, reason=reason, completes=completed)
        elif action is Action.ROLL_BACK:
            stopped = self._experiments.change(seen, replace(changed, status="stopped"), reason=reason)
            self._experiments.release(stopped)
        else:
            arms = _shared(seen.arms, candidate, decision.share)
            begins_step = action in (Action.ADVANCE, Action.STEP_BACK)
            # The figures of a step are those since its change. The epoch of the experiment is no bound for them: after
            # a change of the policy, workers count under a later one.
            state_at = partial(_stored_state, decision) if begins_step else None
            self._experiments.change(seen, replace(changed, arms=arms), reason=reason, state_at=state_at)

    def _is_stored(self, seen: Experiment, decision: RolloutDecision) -> bool:
        """Whether the decision on the experiment as `seen` is in the registry."""
        found = self._experiments.last(self._name, "rollout")
        is_next = found.experiment == seen.experiment and found.epoch > seen.epoch
        return is_next and found.state.get("last") == decision.as_data()

    def _tell(self, experiment: Experiment, decision: RolloutDecision, reason: str) -> None:
        action, candidate = decision.action, experiment.plan["candidate"]
        self._on_decision(self._name, candidate, action)
        if action in (Action.STEP_BACK, Action.ROLL_BACK):
            self._experiments.alerts.notify(_alert(experiment, candidate, reason, self._clock()))


def _alert(experiment: Experiment, candidate: str, reason: str, at_s: float) -> Alert:
    """Each decision has an epoch of its own: a second step back is a failure of its own."""
    id = f"rollout {experiment.experiment} {experiment.epoch}"
    return Alert(id, "rollout", experiment.name, reason, at_s, candidate)


def parsed(experiment: Experiment) -> tuple[GradualRollout, RolloutState]:
    """The plan and the state of a stored rollout. Raises InvalidInput for those of no rollout."""
    try:
        plan = msgspec.convert(experiment.plan["rollout"], RolloutPlan)
        state = msgspec.convert(experiment.state, RolloutState)
    except (KeyError, msgspec.ValidationError) as error:
        raise InvalidInput(
            f"{experiment.experiment} is no rollout that this version can read: {error!s:.200}"
        ) from None
    return GradualRollout(plan), state


def rollout_report(experiments: Experiments, experiment: Experiment, now: float) -> dict[str, Any]:
    """What a rollout has done so far, as plain data. now: unix seconds. Raises BrokerUnavailable."""
    rollout, state = parsed(experiment)
    observed = experiments.observed(experiment)
    stable, candidate = experiment.plan["stable"], experiment.plan["candidate"]
    figures = figures_of_step(observed, state, rollout.plan, stable=stable, candidate=candidate)
    gate = rollout.plan.gate.judge(figures)
    share = rollout.share(state) if experiment.is_open else float(experiment.status == "completed")
    return {
        "model": experiment.name,
        "experiment": experiment.experiment,
        "status": experiment.status,
        "stable": stable,
        "candidate": candidate,
        "assignment": experiment.assignment,
        "percent": share * 100,
        "step": state.step + 1,
        "steps": list(rollout.plan.steps),
        "dwell_left_s": rollout.dwell_left_s(state, now) if experiment.is_open else 0.0,
        "failures": state.failures,
        "holds": state.holds,
        "gate": {"verdict": str(gate.verdict), "reason": gate.reason, "evidence": dict(gate.evidence)},
        "last_decision": experiment.state.get("last"),
        "epoch": experiment.epoch,
        "begun_at": experiment.begun_at,
        "changed_at": experiment.changed_at,
        "actor": experiment.actor,
    }


def _arms(
    versions: Mapping[str, RegisteredVersion], candidate: str, stable: str, share: float
) -> tuple[DeployedArm, ...]:
    """The candidate first: with a growing share it keeps the jobs that it had; see safety/routing.py."""
    return deployed_arms(versions, {candidate: share, stable: 1 - share})


def _shared(arms: tuple[DeployedArm, ...], candidate: str, share: float) -> tuple[DeployedArm, ...]:
    return tuple(msgspec.structs.replace(arm, weight=share if arm.version == candidate else 1 - share) for arm in arms)


def _stored_state(decision: RolloutDecision, from_epoch: int) -> dict[str, Any]:
    state = msgspec.structs.replace(decision.state, from_epoch=from_epoch)
    return {**msgspec.to_builtins(state), "last": decision.as_data()}


def _reason(decision: RolloutDecision, candidate: str) -> str:
    percent = f"{decision.share * 100:g} %"
    what = {
        Action.HOLD: f"{candidate} is held at {percent}",
        Action.ADVANCE: f"{candidate} advances to {percent}",
        Action.STEP_BACK: f"{candidate} goes back to {percent}",
        Action.ROLL_BACK: f"{candidate} is rolled back",
        Action.COMPLETE: f"{candidate} is healthy at {percent}",
    }[decision.action]
    return f"{what}: {decision.gate.verdict}: {decision.gate.reason}"[:_MAX_REASON]
