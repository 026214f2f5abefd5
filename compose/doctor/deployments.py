"""Checks of the registry against the broker and this machine: is each production version the active one?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sqlalchemy.engine import make_url

from penstock.compose.doctor.findings import Finding
from penstock.compose.rollout.active_version import active_deployment
from penstock.compose.rollout.operator_keys import operator_keys
from penstock.compose.rollout.registry import open_registry
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.catalog.stages import ModelStage
from penstock.registry.catalog.tables import RegisteredVersion
from penstock.registry.errors import ConfigurationError, Corrupt, RegistryUnavailable
from penstock.registry.settings import Settings
from penstock.workers.versions.deployment_store import FileDeploymentStore, epoch_of

__all__ = ["check_deployments"]


def check_deployments(settings: Settings, broker: RedisStreams) -> Iterator[Finding]:
    """Production versions that are not active, and decisions that the broker has lost. Raises BrokerUnavailable."""
    try:
        registry = open_registry(settings, operator_keys(settings))
        registered = registry.versions() if _has_registry(settings.registry_url) else ()
    except (ConfigurationError, Corrupt, RegistryUnavailable) as error:
        fix = "correct PENSTOCK_REGISTRY_URL, or ask the operator of the registry"
        yield Finding("registry", "broken", str(error), fix)
        return
    production = [version for version in registered if version.stage is ModelStage.PRODUCTION]
    inactive = [version for version in production if not _is_active(broker, version)]
    for version in inactive:
        what = f"{version.reference} is in production, but it is not the active version"
        yield Finding("registry", "broken", what, f"penstock models sync {version.name}")
    yield from _check_lost_decisions(settings, broker)
    if not inactive:
        names = ", ".join(version.reference for version in production)
        yield Finding("registry", "ok", f"in production and active: {names or 'none'}")


def _check_lost_decisions(settings: Settings, broker: RedisStreams) -> Iterator[Finding]:
    """Models for which the workers of this machine applied a later decision than the broker has."""
    verify = operator_keys(settings).verify
    if verify is None:
        return
    applied = FileDeploymentStore(settings.home / "deployments", verify)
    for model in broker.models():
        last, now = epoch_of(applied.last(model)), _broker_epoch(broker, model)
        if last > now:
            what = f"workers here applied epoch {last} of {model} and keep it; the broker has epoch {now}"
            fix = f"penstock models sync {model}; after a new registry, delete deployments/{model}.active"
            yield Finding("registry", "broken", what, fix)


def _broker_epoch(broker: RedisStreams, model: str) -> int:
    try:
        decision = active_deployment(broker, model)
    except Corrupt:
        return 0
    return decision.epoch if decision else 0


def _has_registry(url: str) -> bool:
    """Whether the registry exists: a connection to SQLite would create the file, and doctor changes nothing."""
    parsed = make_url(url)
    return not parsed.drivername.startswith("sqlite") or Path(parsed.database or "").is_file()


def _is_active(broker: RedisStreams, version: RegisteredVersion) -> bool:
    try:
        decision = active_deployment(broker, version.name)
    except Corrupt:
        return False
    return decision is not None and (decision.epoch, decision.content_hash) == (version.epoch, version.content_hash)
