"""The shares of a rollout's candidate by endpoint: `rollout_percent` of model.yaml, or of the operators. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.registry.catalog.tables import RegisteredVersion
from penstock.registry.deployment import Routing
from penstock.registry.package import ModelSpec
from penstock.registry.package.policy_overlay import opened_overlay
from penstock.registry.package.spec_sections import EndpointPolicy
from penstock.registry.queues import DEFAULT_ENDPOINT

__all__ = ["endpoint_policy", "endpoint_shares"]

_Policies = Mapping[str, Mapping[str, Any]]


def endpoint_policy(version: RegisteredVersion, policies: _Policies, endpoint: str) -> EndpointPolicy:
    """The policy of a version at an endpoint. policies: the knobs that operators have set, by endpoint."""
    declared = ModelSpec.from_json(json.dumps(version.spec).encode()).policy_for(endpoint)
    overlay = opened_overlay(policies).get(endpoint)
    return declared if overlay is None else overlay.over(declared)


def endpoint_shares(candidate: RegisteredVersion, policies: _Policies, routing: Routing) -> dict[str, float]:
    """The candidate's share of the jobs of each endpoint that begins above the rollout's step, 0 to 1.

    At `infer` the rollout's step decides, which begins with its `rollout_percent`.
    """
    step = routing.arms[0].weight
    shares: dict[str, float] = {}
    for endpoint in ModelSpec.from_json(json.dumps(candidate.spec).encode()).endpoints:
        percent = endpoint_policy(candidate, policies, endpoint).rollout_percent or 0.0
        if endpoint != DEFAULT_ENDPOINT and percent / 100 > step:
            shares[endpoint] = percent / 100
    return shares
