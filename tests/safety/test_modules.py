"""The modules of the safety house, by the names of their ideas: each has a module with a public class. AR-051."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

MODULES = {
    "canary_validator": ("canary", "Canary"),
    "circuit_breaker": ("breaker", "LocalBreakers"),
    "drift_monitor": ("drift", "DriftMonitor"),
    "fallback_chain": ("fallback", "FallbackChain"),
    "golden_store": ("golden_store", "GoldenStore"),
    "hysteresis": ("hysteresis", "Hysteresis"),
    "privacy": ("privacy", "InputRedactor"),
    "safety_orchestrator": ("orchestrator", "SafetyOrchestrator"),
    "validator_registry": ("validator_registry", "ValidatorRegistry"),
    "alert_callbacks": ("alerts", "Alerts"),
    "ab_testing": ("ab_testing", "ABModelComparison"),
    "gradual_rollout": ("rollout", "GradualRollout"),
}
"""Idea -> our module of penstock.safety, and its class."""


@pytest.mark.parametrize(("idea", "place"), MODULES.items())
def test_every_idea_has_a_public_class(idea: str, place: tuple[str, str]):
    """The module can be imported, the class is its own, and it is among its public names."""
    module_name, class_name = place
    module = import_module(f"penstock.safety.{module_name}")
    found = getattr(module, class_name)
    assert inspect.isclass(found), idea
    assert found.__module__ == module.__name__
    assert class_name in module.__all__


def test_the_safety_house_has_the_promised_size():
    """Eight ideas and more, each with a module of its own."""
    assert len({module for module, _ in MODULES.values()}) == len(MODULES) >= 9
