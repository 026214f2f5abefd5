"""The knobs of endpoints that operators set at run time, over those of model.yaml.

    `penstock policy set` -> checked_knobs -> registry -> Deployment.policies -> opened_overlay -> a worker's versions

A knob that is not set has the value of model.yaml, or else of the worker's setting. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeAlias

from pydantic import ValidationError

from penstock.registry.errors import InvalidInput, described, shown
from penstock.registry.package.spec_sections import EndpointPolicy

__all__ = ["MAX_OVERLAY_BYTES", "Overlay", "changed_overlay", "check_endpoint", "checked_knobs", "opened_overlay"]

Overlay: TypeAlias = Mapping[str, EndpointPolicy]
"""By endpoint: the knobs that are set; the others are null."""
MAX_OVERLAY_BYTES: Final = 2000
"""As JSON. The record of the active version has it, and each claim returns that."""


def check_endpoint(name: str, known: Collection[str], model: str) -> None:
    """Raises InvalidInput for an endpoint that the model does not have. known: the endpoints of the model."""
    if name not in known:
        raise InvalidInput(f"Unknown endpoint {described(name)} of {model}. Expected one of: {', '.join(known)}")


def checked_knobs(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """These knobs as plain data. Raises InvalidInput that names the knob, with what was expected."""
    for name, value in knobs.items():
        if value is None:
            raise InvalidInput(f"The knob {shown(name)!r} has no value. Expected one, or `penstock policy reset`")
    try:
        policy = EndpointPolicy.model_validate(dict(knobs))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "policy"
        if first["type"] == "extra_forbidden":
            raise InvalidInput(f"Unknown knob {shown(name)!r}. Expected some of: {_NAMES}") from None
        raise InvalidInput(f"Bad {shown(name)} {described(knobs.get(name))}. {first['msg']}") from None
    return {name: value for name, value in policy.model_dump().items() if value is not None}


def changed_overlay(
    before: Mapping[str, Mapping[str, Any]], endpoint: str, knobs: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The overlay with these knobs of an endpoint set. Raises InvalidInput for knobs out of range, or too many."""
    overlay = {name: dict(values) for name, values in before.items()}
    overlay[endpoint] = {**overlay.get(endpoint, {}), **checked_knobs(knobs)}
    if (size := len(json.dumps(overlay))) > MAX_OVERLAY_BYTES:
        raise InvalidInput(
            f"The policies of this model take {size} bytes. Expected at most {MAX_OVERLAY_BYTES}: `penstock policy "
            "reset` frees those that model.yaml can have"
        )
    return overlay


def opened_overlay(policies: Mapping[str, Mapping[str, Any]]) -> Overlay:
    """The overlay in a record. Raises InvalidInput for anything but knobs in their range."""
    opened: dict[str, EndpointPolicy] = {}
    for endpoint, knobs in policies.items():
        try:
            opened[endpoint] = EndpointPolicy.model_validate(dict(knobs))
        except ValidationError:
            raise InvalidInput(
                f"The policy of endpoint {shown(endpoint)!r} is none. Expected knobs in their range"
            ) from None
    return opened


_NAMES: Final = ", ".join(EndpointPolicy.model_fields)
