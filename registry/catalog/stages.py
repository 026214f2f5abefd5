"""DRAFT -> STAGING -> PRODUCTION -> ARCHIVED: the allowed steps of a version, by action. Pure.

    from \\ to     draft     staging   production         archived
    draft         -         promote   -                  demote
    staging       demote    -         promote, rollback  demote
    production    -         -         -                  only when another version replaces it
    archived      -         promote   rollback           -

A model that has a production version always has one: a version leaves PRODUCTION in the step in which another enters.
An archived version can be promoted to STAGING again, and a rollback restores it directly.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from penstock.registry.errors import InvalidInput, TransitionRefused, described

__all__ = ["TransitionAction", "ModelStage", "check_step", "parse_stage"]


class ModelStage(StrEnum):
    """The stage of a version, from registration to retirement."""

    DRAFT = "draft"
    STAGING = "staging"
    PRODUCTION = "production"
    ARCHIVED = "archived"


class TransitionAction(StrEnum):
    """An operator's action. REGISTER, DESCRIBE, SIGN, ROUTE and POLICY do not change the stage.

    ROUTE begins, changes or ends an experiment: how versions share the jobs. POLICY changes knobs of endpoints.
    """

    REGISTER = "register"
    DESCRIBE = "describe"
    PROMOTE = "promote"
    DEMOTE = "demote"
    ROLLBACK = "rollback"
    SIGN = "sign"
    ROUTE = "route"
    POLICY = "policy"


_STEPS: Final[dict[ModelStage, dict[ModelStage, tuple[TransitionAction, ...]]]] = {
    ModelStage.DRAFT: {
        ModelStage.STAGING: (TransitionAction.PROMOTE,),
        ModelStage.ARCHIVED: (TransitionAction.DEMOTE,),
    },
    ModelStage.STAGING: {
        ModelStage.DRAFT: (TransitionAction.DEMOTE,),
        ModelStage.PRODUCTION: (TransitionAction.PROMOTE, TransitionAction.ROLLBACK),
        ModelStage.ARCHIVED: (TransitionAction.DEMOTE,),
    },
    ModelStage.PRODUCTION: {},
    ModelStage.ARCHIVED: {
        ModelStage.STAGING: (TransitionAction.PROMOTE,),
        ModelStage.PRODUCTION: (TransitionAction.ROLLBACK,),
    },
}


def check_step(reference: str, action: TransitionAction, before: ModelStage, after: ModelStage) -> None:
    """Raises TransitionRefused with the allowed steps. `reference` is `name/version`."""
    allowed = _STEPS[before]
    if action in allowed.get(after, ()):
        return
    if before is after:
        raise TransitionRefused(f"{reference} is in {before} already")
    if before is ModelStage.PRODUCTION:
        expected = "another version to be promoted, or a rollback: a model keeps a production version"
    else:
        expected = ", ".join(f"{one} to {stage}" for stage, actions in allowed.items() for one in actions)
    raise TransitionRefused(
        f"{reference} is in {before}. A {action} does not lead from there to {after}. Expected {expected}"
    )


def parse_stage(name: str) -> ModelStage:
    """The stage with this name. Raises InvalidInput with the four names."""
    try:
        return ModelStage(name)
    except ValueError:
        raise InvalidInput(f"Unknown stage {described(name)}. Expected one of: {', '.join(ModelStage)}") from None
