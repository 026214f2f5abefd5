"""Experiments: versions that share a model's jobs. Begun, changed and ended, first in the registry, then in the broker.

    start -- checks, every live worker loads the arms --> registry: an epoch --> Deployer.sync: the record of the claims
    workers -- what the arms did --> observed --> safety/rollout.py, safety/ab_testing.py

The registry has the state, so that any process goes on from it. After a crash between registry and broker the earlier
shares stay in force; the next change, or `penstock models sync`, activates the decided ones.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from penstock.compose.deploy import Deployer
from penstock.registry.broker.breakers import CANDIDATE, BreakerEnd, breaker_name
from penstock.registry.catalog import ModelStage
from penstock.registry.catalog.client import StateAt
from penstock.registry.catalog.registered_model import check_none_open
from penstock.registry.catalog.tables import Experiment, RegisteredVersion
from penstock.registry.deployment import DeployedArm, ExperimentKind
from penstock.registry.errors import BrokerUnavailable, InvalidInput, TransitionRefused, UnknownModel
from penstock.registry.package import ModelSpec
from penstock.registry.package.signature import TensorSpec, shape_text
from penstock.safety.alerts import Alerts
from penstock.safety.arm_figures import ArmFigures, read_observations, read_ratings
from penstock.safety.routing import Arm, RoutingTable
from penstock.safety.statistics import Moments

__all__ = ["MOST_ARMS", "AuditDecision", "Experiments", "deployed_arms", "new_experiment_id"]

MOST_ARMS: Final = 8
"""The record of the active version has them all, and each claim returns it."""
AuditDecision = Callable[[str, str, Mapping[str, Any]], None]
"""(model, result, details) of one decision, before it takes effect."""


def new_experiment_id(kind: ExperimentKind) -> str:
    """An id that no other experiment has: it is the salt of the assignment."""
    return f"{kind}-{secrets.token_hex(6)}"


class Experiments:
    """The experiments of one operator's models.

    audit: records decisions; None: they are not recorded. breakers: of candidates, which canaries and drift open; None:
    no breaker is read. alerts: hear of each step back of a rollout, and of each rollout that is rolled back.
    """

    def __init__(
        self,
        deployer: Deployer,
        audit: AuditDecision | None = None,
        *,
        breakers: BreakerEnd | None = None,
        alerts: Alerts | None = None,
    ) -> None:
        self._breakers = breakers
        self.alerts: Final = alerts or Alerts()
        self.deployer: Final = deployer
        self.registry: Final = deployer.registry
        self.record: Final[AuditDecision] = audit or (lambda _model, _result, _details: None)

    # Looks

    def why_stopped(self, name: str, candidate: str) -> str:
        """Why the circuit breaker of this candidate is open; empty: it is closed. Raises BrokerUnavailable."""
        if self._breakers is None:
            return ""
        record = self._breakers.breakers(name).records.get(breaker_name(name, candidate, CANDIDATE))
        return "" if record is None or record.is_closed else record.reason

    def last(self, name: str, kind: ExperimentKind) -> Experiment:
        """The open experiment of this kind, or else the last one. Raises UnknownModel when there is none."""
        found = [each for each in self.registry.experiments(name) if each.kind == kind]
        if not found:
            raise UnknownModel(f"{name} has had no {_WORDS[kind]}. Expected `penstock {kind} start {name}` first")
        return next((each for each in found if each.is_open), found[-1])

    def running(self, name: str, kind: ExperimentKind) -> Experiment:
        """The open experiment of this kind. Raises TransitionRefused when there is none."""
        found = self.registry.experiment(name)
        if found is None or found.kind != kind:
            other = f". There is the {_WORDS[found.kind]} {found.experiment}" if found is not None else ""
            raise TransitionRefused(f"No {_WORDS[kind]} of {name} is under way{other}. Expected an open one")
        return found

    def observed(self, experiment: Experiment) -> dict[int, dict[str, ArmFigures]]:
        """What all workers have counted so far, by epoch and version. Raises BrokerUnavailable."""
        return read_observations(self.deployer.fleet.observations(experiment.name, experiment.experiment))

    def ratings(self, experiment: Experiment) -> dict[str, Moments]:
        """The quality that clients have reported so far, by version. Raises BrokerUnavailable."""
        return read_ratings(self.deployer.fleet.ratings(experiment.name, experiment.experiment))

    # Changes

    def check(self, name: str, versions: tuple[str, ...]) -> dict[str, RegisteredVersion]:
        """The versions by label, one of which is in production. Nothing is changed.

        Raises UnknownModel, TransitionRefused while another experiment is open and for a candidate whose circuit
        breaker is open, InvalidInput for another signature than that of the version in production, and
        BrokerUnavailable.
        """
        production = self.registry.find(name)
        check_none_open(self.registry.experiment(name))
        found = {each.version: each for each in (self.registry.find(name, version) for version in versions)}
        if len(found) != len(versions):
            raise InvalidInput(f"The arms name a version twice: {', '.join(versions)}. Expected each version once")
        if production.version not in found:
            raise InvalidInput(
                f"The arms are {', '.join(found)}. Expected {production.version} among them: it is in production, and "
                "answers all jobs when the experiment ends"
            )
        for version in found.values():
            _check_signature(version, production)
            if version.version != production.version and (stopped := self.why_stopped(name, version.version)):
                raise TransitionRefused(
                    f"The circuit breaker of {version.reference} is open: {stopped}. Expected a closed one: a PASS of "
                    f"`penstock canary run {name}`, or of the canary of a new shadow, closes it after its pause"
                )
        return found

    def start(
        self, experiment: Experiment, facts: Mapping[str, Any], *, reason: str, timeout_s: float | None = None
    ) -> Experiment:
        """Begins an experiment whose versions `check` has accepted: workers load its arms, then they share the jobs.

        facts: about it, for the audit log. The audit log comes first, then the registry, then the shares: no job is
        divided without both records. If a worker cannot load an arm, nothing changes. Raises as
        ModelRegistryClient.begin_experiment and Deployer.load do.
        """
        arms = [self.registry.find(experiment.name, arm.version) for arm in experiment.arms]
        candidates = [version for version in arms if version.stage is not ModelStage.PRODUCTION]
        requested = [version for version in candidates if not self.deployer.is_wanted(version)]
        try:
            for version in candidates:
                self.deployer.load(version.name, version.version, timeout_s=timeout_s)
            begun = self._recorded(experiment, facts, [version.version for version in requested], reason)
        except BaseException:
            for version in requested:
                self.deployer.release(version)
            raise
        self.activate(begun)
        return begun

    def _recorded(
        self, experiment: Experiment, facts: Mapping[str, Any], requested: list[str], reason: str
    ) -> Experiment:
        plan = {**experiment.plan, "requested": requested}
        shares = {arm.version: arm.weight for arm in experiment.arms}
        self.record(experiment.name, "begin", {"experiment": experiment.experiment, "shares": shares, **facts})
        try:
            return self.registry.begin_experiment(replace(experiment, plan=plan), reason=reason)
        except Exception:
            self.record(experiment.name, "refused", {"experiment": experiment.experiment})
            raise

    def change(
        self, seen: Experiment, changed: Experiment, *, reason: str, state_at: StateAt | None = None
    ) -> Experiment:
        """Stores a change and activates it. See ModelRegistryClient.change_experiment.

        Raises TransitionConflict if the experiment is not as `seen` any more.
        """
        stored = self.registry.change_experiment(seen, changed, reason=reason, state_at=state_at)
        self.activate(stored)
        return stored

    def activate(self, experiment: Experiment) -> None:
        """Activates what the registry has decided. Raises BrokerUnavailable, and as Deployer.sync does."""
        try:
            self.deployer.sync(experiment.name)
        except BrokerUnavailable as error:
            raise BrokerUnavailable(
                f"The change is in the registry, but the earlier shares of {experiment.name} are still in force: "
                f"{error}. Expected `penstock models sync {experiment.name}`, once the broker answers"
            ) from error

    def stop(self, experiment: Experiment, *, reason: str) -> Experiment:
        """Ends an experiment: the version in production answers all jobs from the next claim on."""
        stopped = self.change(experiment, replace(experiment, status="stopped"), reason=reason)
        self.release(stopped)
        return stopped

    def release(self, experiment: Experiment) -> None:
        """Let workers unload the arms that were loaded for the experiment."""
        for label in experiment.plan.get("requested", ()):
            self.deployer.release(self.registry.find(experiment.name, label))


_WORDS: Final[dict[ExperimentKind, str]] = {"rollout": "rollout", "ab": "A/B experiment"}


def deployed_arms(versions: Mapping[str, RegisteredVersion], weights: Mapping[str, float]) -> tuple[DeployedArm, ...]:
    """The arms in the order of the weights. Raises InvalidInput for weights that divide no traffic."""
    if not 2 <= len(weights) <= MOST_ARMS:
        raise InvalidInput(f"There are {len(weights)} arms. Expected 2 to {MOST_ARMS}")
    RoutingTable(tuple(Arm(label, weight) for label, weight in weights.items()), "salt").check(versions)
    return tuple(
        DeployedArm(versions[label].version, versions[label].content_hash, weight) for label, weight in weights.items()
    )


def _check_signature(version: RegisteredVersion, production: RegisteredVersion) -> None:
    """Clients check their inputs against the version in production, and each job may come to any arm."""
    specs = [ModelSpec.from_json(json.dumps(each.spec).encode()) for each in (version, production)]
    for what in ("inputs", "outputs"):
        here, there = ({tensor.name: tensor for tensor in getattr(spec, what)} for spec in specs)
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) != there.get(name):
                raise InvalidInput(
                    f"{version.reference} has another signature than {production.reference}: {what[:-1]} {name!r} is "
                    f"{_shown(here.get(name))}. Expected {_shown(there.get(name))}"
                )
    if specs[0].streams != specs[1].streams:
        raise InvalidInput(
            f"{version.reference} and {production.reference} differ in `streams`. Expected both to stream, or neither"
        )


def _shown(tensor: TensorSpec | None) -> str:
    if tensor is None:
        return "not there"
    return f"{tensor.dtype}{shape_text(tensor.shape)}"
