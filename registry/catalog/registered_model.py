"""One model of the registry: its versions, and questions about them. Pure.

rows -> RegisteredModel -> select, before_production, check_unchanged, productions_after -> registry/catalog/client.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.registry.catalog.stages import ModelStage, TransitionAction
from penstock.registry.catalog.tables import Experiment, PolicyRecord, RegisteredVersion, Transition
from penstock.registry.errors import (
    BadSignature,
    InvalidInput,
    TransitionConflict,
    TransitionRefused,
    UnknownModel,
    described,
)

__all__ = [
    "HISTORY",
    "LATEST",
    "Change",
    "RegisteredModel",
    "check_none_open",
    "check_whole",
    "described_experiment",
    "listed",
]

HISTORY: Final = 100
"""Productions of one model that the history keeps. Rollbacks can go back through them."""
LATEST: Final = "latest"
"""The label of the version in production."""

_PREFIX: Final = re.compile(r"[0-9a-f]{6,64}\Z")
_MAX_LISTED: Final = 20


@dataclass(frozen=True, slots=True)
class Change:
    """A change before it is done, as approvers and the gate see it."""

    action: TransitionAction
    version: RegisteredVersion
    after: ModelStage
    replaces: RegisteredVersion | None = None
    """The version in production that is archived in the same step."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A model at one moment. `epoch`: that of its last change. `productions`: the labels that rollbacks restore."""

    name: str
    versions: Mapping[str, RegisteredVersion]
    epoch: int = 0
    productions: tuple[str, ...] = ()
    experiment: Experiment | None = None
    """The open experiment, or None."""
    policy: PolicyRecord | None = None
    """The policy that operators have set, or None."""

    @property
    def production(self) -> RegisteredVersion | None:
        """The version in production, or None."""
        return next((each for each in self.versions.values() if each.stage is ModelStage.PRODUCTION), None)

    def select(self, wanted: str) -> RegisteredVersion:
        """The version with this label, else the only one with this hash prefix; LATEST is the one in production.

        Raises UnknownModel, and InvalidInput for a prefix that several versions share.
        """
        if wanted == LATEST:
            if self.production is None:
                raise UnknownModel(f"{self.name} has no version in production. There are: {self._known()}")
            return self.production
        if found := self.versions.get(wanted):
            return found
        matching = [each for each in self.versions.values() if _is_prefix(wanted, each.content_hash)]
        if len(matching) > 1:
            labels = listed(each.version for each in matching)
            raise InvalidInput(
                f"{wanted!r:.80} begins the hash of several versions of {self.name}: {labels}. Expected more digits"
            )
        if not matching:
            raise UnknownModel(f"Unknown version {described(wanted)} of {self.name}. Expected one of: {self._known()}")
        return matching[0]

    def before_production(self) -> str:
        """The label that a rollback restores. Raises TransitionRefused when there is none."""
        if len(self.productions) < 2:
            raise TransitionRefused(
                f"{self.name} has no earlier production version to restore. There are: {self._known()}"
            )
        return self.productions[-2]

    def check_unchanged(self, change: Change) -> None:
        """Raises TransitionConflict if the model has changed since the change was decided."""
        current = self.versions[change.version.version]
        if current != change.version:
            raise TransitionConflict(
                f"{current.reference} was changed meanwhile and is in {current.stage} now. "
                f"Expected it in {change.version.stage}"
            )
        if change.after is ModelStage.PRODUCTION and self.production != change.replaces:
            raise TransitionConflict(
                f"{self.name} has another production version now: {_label(self.production)}. "
                f"Expected {_label(change.replaces)}"
            )

    def check_no_experiment(self, change: Change, completes: str = "") -> None:
        """Raises TransitionRefused for a change of a version that an open experiment needs.

        completes: the id of the experiment that the change completes.
        """
        experiment = self.experiment
        if experiment is None or experiment.experiment == completes:
            return
        is_arm = any(arm.version == change.version.version for arm in experiment.arms)
        if change.after is ModelStage.PRODUCTION or is_arm:
            raise TransitionRefused(
                f"{change.version.reference} stays in {change.version.stage}: {described_experiment(experiment)} is "
                f"under way. Expected `penstock {experiment.kind} stop {self.name}` first"
            )

    def productions_after(self, change: Change) -> tuple[str, ...]:
        """The labels that rollbacks restore after the change, oldest first."""
        if change.action is TransitionAction.ROLLBACK:
            return self.productions[:-1]
        if change.action is TransitionAction.PROMOTE and change.after is ModelStage.PRODUCTION:
            return (*self.productions, change.version.version)[-HISTORY:]
        return self.productions

    def _known(self) -> str:
        return listed(f"{each.version} ({each.stage}, {each.content_hash[:8]})" for each in self.versions.values())


def check_none_open(experiment: Experiment | None) -> None:
    """Raises TransitionRefused while this experiment is open: a model has one at a time. None: there is none."""
    if experiment is not None:
        raise TransitionRefused(
            f"{described_experiment(experiment)} is under way since {experiment.begun_at}. Expected "
            f"`penstock {experiment.kind} stop {experiment.name}` first: a model has one experiment at a time"
        )


def described_experiment(experiment: Experiment) -> str:
    """For a message: the kind of the experiment, its model and its arms."""
    kind = "the rollout" if experiment.kind == "rollout" else "the A/B experiment"
    shares = listed(f"{arm.version}={arm.weight:g}" for arm in experiment.arms)
    return f"{kind} of {experiment.name} ({shares})"


def check_whole(model: RegisteredModel, history: Sequence[Transition]) -> None:
    """Raises BadSignature when signed rows do not belong together: one is missing, or an older one was put back."""
    first = following = history[0].epoch if history else 1
    changed: dict[str, int] = {}
    for transition in history:
        # Signing again may start from an older copy of the registry, with an epoch after that of the workers.
        is_leap = transition.action is TransitionAction.SIGN and transition.epoch > following
        if transition.epoch != following and not is_leap:
            raise BadSignature(f"the history of {model.name} has no epoch {following}")
        changed.update(dict.fromkeys(filter(None, (transition.version, transition.replaced)), transition.epoch))
        following = transition.epoch + 1
    for label, version in model.versions.items():
        expected = changed.get(label)
        if version.epoch != expected and (expected is not None or version.epoch >= first):
            raise BadSignature(f"the record of {version.reference} is not the one of its last change")
    _check_policy(model, history, first)
    if missing := changed.keys() - model.versions.keys():
        raise BadSignature(f"the record of {model.name}/{min(missing)} is missing")


def _check_policy(model: RegisteredModel, history: Sequence[Transition], first: int) -> None:
    """Raises BadSignature when the policy is not the one of its last change."""
    expected = max((each.epoch for each in history if each.action is TransitionAction.POLICY), default=None)
    epoch = model.policy.epoch if model.policy is not None else 0
    if epoch != expected and (expected is not None or epoch >= first):
        raise BadSignature(f"the policy of {model.name} is not the one of its last change")


def listed(names: Iterable[str]) -> str:
    """Names for a message, at most _MAX_LISTED."""
    every = list(names)
    more = f" and {len(every) - _MAX_LISTED} more" if len(every) > _MAX_LISTED else ""
    return ", ".join(every[-_MAX_LISTED:]) + more or "none"


def _is_prefix(wanted: object, content_hash: str) -> bool:
    return isinstance(wanted, str) and bool(_PREFIX.match(wanted)) and content_hash.startswith(wanted)


def _label(version: RegisteredVersion | None) -> str:
    return version.version if version else "none"
