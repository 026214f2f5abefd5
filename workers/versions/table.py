"""The models of one worker and the versions of each model that the worker knows.

start -- packages --> add
a job or an operator names a version -- resolve --> a known version, or one that lies under the models root now
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

from penstock.registry.errors import ConfigurationError, InvalidInput, PenstockError, UnknownModel
from penstock.registry.package import Package
from penstock.registry.settings_sections import InferenceConfig
from penstock.safety.orchestrator import SafetyOrchestrator
from penstock.workers.versions.repository import ModelRepository
from penstock.workers.versions.version import ServedModel, ServedVersion, VersionState

__all__ = ["UNLOADED", "VersionTable"]

UNLOADED: Final = (VersionState.COLD, VersionState.FAILED)
"""The states in which a version may begin to load."""

logger = logging.getLogger("penstock.server")


class VersionTable:
    """Models by name, versions by label. The I/O thread owns it; `active`, `models` and `turns` may be read elsewhere,
    after a copy.

    packages: the versions that are active at the start. repository: where other versions are found. gate: see
    ServedVersion.
    """

    def __init__(
        self,
        config: InferenceConfig,
        repository: ModelRepository,
        packages: Sequence[Package],
        gate: SafetyOrchestrator | None = None,
    ) -> None:
        self.models: Final[dict[str, ServedModel]] = {}
        self.turns: Final[deque[ServedVersion]] = deque()
        """All versions of all models, in the order in which they may begin their next batch."""
        self._config = config
        self._repository = repository
        self._gate = gate
        self._registered: dict[tuple[str, str], str] = {}
        """By model and label, the content that operators registered; its files may come later."""
        for package in packages:
            self.add(package)

    def add(self, package: Package) -> ServedModel:
        """Add a model whose active version is this package."""
        version = ServedVersion(package, self._config, gate=self._gate)
        model = self.models[package.spec.name] = ServedModel(package.spec.name, version)
        self.turns.append(version)
        return model

    def active(self) -> list[ServedVersion]:
        """The active version of each model that has one here. For any thread."""
        return [model.active for model in tuple(self.models.values()) if model.active is not None]

    def answering(self) -> list[ServedVersion]:
        """The active versions, and the arms of experiments. For any thread."""
        found = self.active()
        for model in tuple(self.models.values()):
            if (arms := model.arms) is not None:
                found += [version for version in arms.here() if version is not model.active]
        return found

    def package(self, name: str, label: str) -> Package:
        """The package under the models root now. Raises UnknownModel, InvalidInput, ConfigurationError."""
        return self._repository.package(name, label)

    def labels(self, name: str) -> list[str]:
        """The versions of a model under the models root, in ascending order."""
        return self._repository.labels(name)

    def lower_labels(self, model: ServedModel) -> list[str]:
        """The versions under the models root below the active one, the highest first."""
        labels = self.labels(model.name)
        return labels[: labels.index(model.label)][::-1] if model.label in labels else []

    def resolve(self, model: ServedModel, label: str) -> ServedVersion | None:
        """The version with this label, loaded or not; None if the worker does not know it and does not find it."""
        if (version := model.versions.get(label)) is not None:
            return version
        version = self._find(model.name, label)
        if version is None:
            return None
        rows = max((known.calibrated_rows for known in model.versions.values()), default=0)
        if rows and version.policy.is_sized_by_memory:
            # A new measurement would take the memory in which the active version runs.
            version.calibrated_rows = rows
            version.queue.resize(rows)
        if content_hash := self.registered_hash(version):
            version.pin_content(content_hash)
        model.versions[label] = version
        self.turns.append(version)
        return version

    def reread(self, model: ServedModel, version: ServedVersion | None) -> ServedVersion | None:
        """The version as its package is now; unchanged while it is loaded, or while jobs wait for it."""
        if version is None or version.state not in UNLOADED or not version.is_idle or version.queue.in_memory:
            return version
        if any(not endpoint.queue.is_empty for endpoint in version.endpoints.values()):
            return version
        package = self._package(model.name, version.label)
        if package is None or package.spec == version.package.spec:
            return version
        found = self._served(package)
        if found is None:
            return version
        self.replace(model, version, found)
        for endpoint in version.endpoints.values():
            self.turns.remove(endpoint)
        return found

    def replace(self, model: ServedModel, version: ServedVersion, found: ServedVersion) -> None:
        """`found` takes the place of the version, with its turn."""
        found.is_wanted = version.is_wanted
        model.versions[version.label] = found
        self.turns[self.turns.index(version)] = found
        if model.active is version:
            model.active = found

    def endpoint(self, model: ServedModel, version: ServedVersion, name: str) -> ServedVersion | None:
        """The version at one of its endpoints, with a queue of its own from its first job on; None: it has no such."""
        known = version.endpoints.get(name)
        if known is not None:
            return known
        if name not in version.spec.endpoints:
            return None
        return self.add_endpoint(model, version, name)

    def add_endpoint(self, model: ServedModel, version: ServedVersion, name: str) -> ServedVersion:
        """A new queue for the jobs of an endpoint, with the model of `infer` or one of its own."""
        found = self.at_endpoint(model, version, name, base=version)
        version.endpoints[name] = found
        self.turns.append(found)
        return found

    def at_endpoint(
        self, model: ServedModel, version: ServedVersion, name: str, base: ServedVersion | None
    ) -> ServedVersion:
        """The same version at an endpoint under the present policies, which is in no table. base: see ServedVersion."""
        return ServedVersion(version.package, self._config, model.overlay, endpoint=name, base=base, gate=self._gate)

    def register(self, name: str, label: str, content_hash: str) -> None:
        """Operators registered this content: jobs that name the version may have it loaded."""
        self._registered[name, label] = content_hash

    def registered_hash(self, version: ServedVersion) -> str:
        """The content that operators registered under the version's label; empty for none."""
        return self._registered.get((version.name, version.label), "")

    def problem(self, name: str, label: str) -> str:
        """Why a requested version is not found, in one line."""
        try:
            self._repository.package(name, label)
        except (ConfigurationError, InvalidInput, UnknownModel) as error:
            return str(error)
        return f"{name}/{label} is not under this worker's models root with the requested content"

    def _find(self, name: str, label: str) -> ServedVersion | None:
        package = self._package(name, label)
        return self._served(package) if package is not None else None

    def _package(self, name: str, label: str) -> Package | None:
        try:
            return self._repository.package(name, label)
        except (ConfigurationError, InvalidInput, UnknownModel) as error:
            _log_not_found(name, label, error)
            return None

    def _served(self, package: Package) -> ServedVersion | None:
        model = self.models.get(package.spec.name)
        try:
            overlay = model.overlay if model is not None else None
            return ServedVersion(package, self._config, overlay, gate=self._gate)
        except (ConfigurationError, InvalidInput, UnknownModel) as error:
            _log_not_found(package.spec.name, package.spec.version, error)
            return None


def _log_not_found(name: str, label: str, error: PenstockError) -> None:
    # Jobs may name any version: such lines would fill the log.
    logger.debug("version not found: %s", error, extra={"model": name, "version": label[:80]})
