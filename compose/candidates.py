"""The candidate of a shadow or a canary: which version and form it is, and whether it can answer the model's jobs.

model, version, form --> named by workers, broker, registry or models root --> CheckedCandidate, or one clear error
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from penstock.compose.rollout.operator_keys import operator_keys
from penstock.compose.views.overview import workers
from penstock.registry.broker.base import FleetEnd
from penstock.registry.broker.breakers import CANDIDATE
from penstock.registry.deployment import Deployment
from penstock.registry.errors import (
    ConfigurationError,
    Corrupt,
    InvalidInput,
    PenstockError,
    TransitionRefused,
    UnknownModel,
    shown,
)
from penstock.registry.package import ModelSpec
from penstock.registry.queues import parse_name
from penstock.registry.settings import Settings
from penstock.registry.signature_match import signature_difference
from penstock.workers.levels.progression import THRESHOLDS, is_form
from penstock.workers.versions.repository import DiskRepository

__all__ = ["CheckedCandidate", "checked_candidate"]


@dataclass(frozen=True, slots=True)
class CheckedCandidate:
    """A candidate that can answer the jobs of its model.

    form: empty for the version as its author built it. content_hash: as registered; empty: any. active: the version
    that serves.
    """

    model: str
    version: str
    form: str
    content_hash: str
    active: str

    @property
    def optimisation(self) -> str:
        """In the name of the breaker that opens when the candidate fails: that of the form, or of the whole version."""
        return self.form or CANDIDATE


def checked_candidate(
    settings: Settings, fleet: FleetEnd, model: str, version: str, form: str = ""
) -> CheckedCandidate:
    """Raises InvalidInput for an unknown form and for another signature, UnknownModel for a model that is not served
    and for an unknown version, and TransitionRefused for the active version as its author built it.
    """
    parse_name("model", model)
    forms = [name for name in THRESHOLDS if is_form(name)]
    if form and form not in forms:
        raise InvalidInput(f"There is no form {shown(form)}. Expected one of: {', '.join(forms)}")
    active = _served_version(fleet, model)
    served = _spec(fleet, model, "")
    spec = _candidate_spec(settings, fleet, model, version)
    if spec.version == active and not form:
        raise TransitionRefused(
            f"{spec.reference} is the active version. Expected another version as the candidate, or a form of it"
        )
    if difference := signature_difference(spec, served):
        raise InvalidInput(f"{spec.reference} cannot answer the jobs of {served.reference}. {difference}")
    return CheckedCandidate(model, spec.version, form, _registered_hash(settings, model, spec.version), active)


def _served_version(fleet: FleetEnd, model: str) -> str:
    """The version that live workers serve. Raises UnknownModel."""
    labels = [report["models"][model] for report in workers(fleet) if report["models"].get(model)]
    if not labels:
        names = sorted({name for report in workers(fleet) for name, label in report["models"].items() if label})
        raise UnknownModel(f"No live worker serves {model}. Expected one of: {', '.join(names) or 'there is none'}")
    active = fleet.actives([model])[model]
    with suppress(Corrupt):
        if active:
            return Deployment.open(active, model).version
    return str(labels[0])


def _spec(fleet: FleetEnd, model: str, version: str) -> ModelSpec:
    spec = fleet.spec(model, version)
    if spec is None:
        raise UnknownModel(f"Unknown version {shown(version)} of {model}. Expected a registered version")
    return ModelSpec.from_json(spec)


def _candidate_spec(settings: Settings, fleet: FleetEnd, model: str, candidate: str) -> ModelSpec:
    """The spec that was published at the registration, else that of the package under this machine's models root."""
    parse_name("version", candidate)
    with suppress(UnknownModel):
        return _spec(fleet, model, candidate)
    repository = DiskRepository.of(settings)
    try:
        return repository.package(model, candidate).spec
    except (UnknownModel, ConfigurationError):
        known = ", ".join(_labels(repository, model)) or "there is none"
        raise UnknownModel(
            f"Unknown version {shown(candidate)} of {model}. Expected a registered version, or one under the models "
            f"root: {known}"
        ) from None


def _labels(repository: DiskRepository, model: str) -> list[str]:
    try:
        return repository.labels(model)
    except PenstockError:
        return []


def _registered_hash(settings: Settings, model: str, version: str) -> str:
    """The content that was registered under this version; empty: it is not registered."""
    # Here: SQLAlchemy is slow to import.
    from penstock.compose.rollout.registry import open_registry

    try:
        return open_registry(settings, operator_keys(settings)).find(model, version).content_hash
    except UnknownModel:
        return ""
