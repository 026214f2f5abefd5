"""DRAFT -> STAGING -> PRODUCTION -> ARCHIVED: which step of a version is allowed, and as what. Pure.

    from \\ to     draft     staging   production         archived
    draft         -         promote   -                  demote
    staging       demote    -         promote, rollback  demote
    production    -         -         -                  only when another takes its place
    archived      -         promote   rollback           -

A model that has a production version keeps one: it leaves PRODUCTION in the very step in which another enters it.
An archived version can become a candidate again, and a rollback restores it at once.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from penstock.registry.errors import InvalidInput, TransitionRefused, described

__all__ = ["Action", "ModelStage", "check_step", "parse_stage"]


class ModelStage(StrEnum):
    """Where a version stands between its registration and its retirement."""

    DRAFT = "draft"
    STAGING = "staging"
    PRODUCTION = "production"
    ARCHIVED = "archived"


class Action(StrEnum):
    """What an operator did. REGISTER, DESCRIBE and SIGN leave the stage as it is."""

    REGISTER = "register"
    DESCRIBE = "describe"
    PROMOTE = "promote"
    DEMOTE = "demote"
    ROLLBACK = "rollback"
    SIGN = "sign"


_STEPS: Final[dict[ModelStage, dict[ModelStage, tuple[Action, ...]]]] = {
    ModelStage.DRAFT: {ModelStage.STAGING: (Action.PROMOTE,), ModelStage.ARCHIVED: (Action.DEMOTE,)},
    ModelStage.STAGING: {
        ModelStage.DRAFT: (Action.DEMOTE,),
        ModelStage.PRODUCTION: (Action.PROMOTE, Action.ROLLBACK),
        ModelStage.ARCHIVED: (Action.DEMOTE,),
    },
    ModelStage.PRODUCTION: {},
    ModelStage.ARCHIVED: {ModelStage.STAGING: (Action.PROMOTE,), ModelStage.PRODUCTION: (Action.ROLLBACK,)},
}


def check_step(reference: str, action: Action, before: ModelStage, after: ModelStage) -> None:
    """Raises TransitionRefused that says what is allowed instead; `reference` is `name/version`."""
    allowed = _STEPS[before]
    if action in allowed.get(after, ()):
        return
    if before is after:
        raise TransitionRefused(f"{reference} is in {before} already")
    if before is ModelStage.PRODUCTION:
        expected = "another version to be promoted, or a rollback: a model keeps a production version"
    else:
        expected = ", ".join(f"{one} to {stage}" for stage, actions in allowed.items() for one in actions)
    raise TransitionRefused(f"{reference} is in {before}, no {action} leads from there to {after}. Expected {expected}")


def parse_stage(name: str) -> ModelStage:
    """The stage called `name`. Raises InvalidInput that lists the four names."""
    try:
        return ModelStage(name)
    except ValueError:
        raise InvalidInput(f"Unknown stage {described(name)}. Expected one of: {', '.join(ModelStage)}") from None
