"""Keeps the versions of a worker to the policies that operators change while jobs flow.

    a decision's policies -- follow --> window, concurrency, cache lifetime, time limits: from the next batch on
                                   `--> precision, fallback runtime: another load of the same files, beside the traffic
    its end -- finish --> the new load takes the place; the old one ends its jobs -- take_idle --> unloaded

A load that fails changes nothing: the old model goes on answering under the rest of the new policy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from penstock.registry.package.policy_overlay import opened_overlay
from penstock.registry.settings_sections import InferenceConfig
from penstock.workers.versions.loader import Loaded, Loader
from penstock.workers.versions.table import VersionTable
from penstock.workers.versions.version import ServedModel, ServedVersion, VersionState

__all__ = ["PolicySwaps"]

logger = logging.getLogger("penstock.server")


class PolicySwaps:
    """The policies of one worker's versions, and the loads that they ask for. The I/O thread owns it."""

    def __init__(self, config: InferenceConfig, table: VersionTable, loader: Loader) -> None:
        self._config = config
        self._table = table
        self._loader = loader
        self._replaces: dict[ServedVersion, ServedVersion] = {}
        """By the version that is loading: the one whose place it will take."""
        self._loading: set[ServedVersion] = set()
        """These versions, and those whose policy has changed again meanwhile."""
        self._behind: set[ServedVersion] = set()
        """Versions whose load was under way when their policy changed."""
        self._retired: list[ServedVersion] = []
        """Versions whose place another one has, and that may still have jobs."""
        self._wanted_threads = 0

    @property
    def has_retired(self) -> bool:
        """Whether a version without a place is still in memory."""
        return bool(self._retired)

    def take_wanted_threads(self) -> int:
        """See ModelLifecycle.take_wanted_threads."""
        wanted, self._wanted_threads = self._wanted_threads, 0
        return wanted

    def add_endpoint(self, model: ServedModel, version: ServedVersion, name: str) -> ServedVersion | None:
        """A queue for the first job of an endpoint; None: the version has no such endpoint."""
        found = self._table.endpoint(model, version, name)
        if found is not None:
            self._wanted_threads = max(self._wanted_threads, found.policy.concurrency)
        return found

    def follow(self, model: ServedModel, policies: Mapping[str, Mapping[str, Any]]) -> None:
        """Follow the policies of a decision. Raises InvalidInput for some that are none."""
        overlay = opened_overlay(policies)
        if overlay == model.overlay:
            return
        model.overlay = overlay
        logger.info("policies changed", extra={"model": model.name, "policies": dict(policies)})
        for version in tuple(model.versions.values()):
            self.conform(model, version)

    def conform(self, model: ServedModel, version: ServedVersion) -> None:
        """Let every endpoint of a version keep to its policy."""
        for each in (version, *version.endpoints.values()):
            self._conform(model, each)

    def _conform(self, model: ServedModel, version: ServedVersion) -> None:
        policy = version.policy_under(self._config, model.overlay)
        # A load for an earlier policy goes on, and is dropped at its end.
        self._replaces = {new: old for new, old in self._replaces.items() if old is not version}
        if policy == version.policy:
            return
        self._wanted_threads = max(self._wanted_threads, policy.concurrency)
        version.follow(policy.under_load_of(version.policy))
        if policy == version.policy:
            return
        if version.state is VersionState.LOADING:
            self._behind.add(version)
            return
        new = self._another(model, version)
        if new.shares_model or not version.is_ready:
            self._switch(model, version, new)
            return
        self._replaces[new] = version
        self._loading.add(new)
        self._loader.load(new)

    def _another(self, model: ServedModel, version: ServedVersion) -> ServedVersion:
        """The same version at the same endpoint, under the present policies, with the same files."""
        base = None if version.base is version else version.base
        new = self._table.at_endpoint(model, version, version.endpoint, base)
        if version.calibrated_rows and not new.calibrated_rows:
            new.calibrated_rows = version.calibrated_rows
            new.queue.resize(version.calibrated_rows)
        if not new.shares_model:
            new.pin_content(version.content_hash or version.pinned_hash)
        return new

    def catch_up(self, model: ServedModel, version: ServedVersion) -> None:
        """The load of a version has ended: its policy may have changed meanwhile."""
        if version in self._behind:
            self._behind.discard(version)
            self._conform(model, version)

    def is_replacement(self, version: ServedVersion) -> bool:
        """Whether the version was loaded to take the place of another one."""
        return version in self._loading

    def finish(self, model: ServedModel, loaded: Loaded) -> bool:
        """Put a loaded version in its place; returns whether it has one."""
        new, old = loaded.version, self._replaces.pop(loaded.version, None)
        self._loading.discard(new)
        if loaded.problem:
            if old is not None:
                old.problem = f"its new policy is not in force: {loaded.problem}"
            return False
        if old is None or old.successor is not None:
            # The policy has changed meanwhile.
            new.unload()
            return False
        self._switch(model, old, new)
        return True

    def _switch(self, model: ServedModel, old: ServedVersion, new: ServedVersion) -> None:
        new.pinned_hash = old.pinned_hash
        if old.base is not old:
            old.base.endpoints[old.endpoint] = new
            self._table.turns.append(new)
        else:
            self._switch_base(model, old, new)
        self._retire(old, new)
        facts = {"model": model.name, "version": new.label, "endpoint": new.endpoint, "precision": new.policy.precision}
        logger.info("the model under a new policy answers", extra=facts)

    def _switch_base(self, model: ServedModel, old: ServedVersion, new: ServedVersion) -> None:
        self._table.replace(model, old, new)
        # It ends its jobs.
        self._table.turns.append(old)
        new.experiment = old.experiment
        if model.arms is not None and model.arms.versions.get(old.label) is old:
            model.arms.versions[old.label] = new
        for name, endpoint in old.endpoints.items():
            if endpoint.shares_model or endpoint.policy.load_key == new.policy.load_key:
                self._retire(endpoint, self._table.add_endpoint(model, new, name))
            else:
                endpoint.base = new
                new.endpoints[name] = endpoint

    def _retire(self, old: ServedVersion, new: ServedVersion) -> None:
        old.successor = new
        self._retired.append(old)

    def drop_other_content(self, model: ServedModel, version: ServedVersion, content_hash: str) -> None:
        """Endpoints that have loaded other content than the version is pinned to load it again."""
        for name, endpoint in tuple(version.endpoints.items()):
            if not endpoint.shares_model and endpoint.is_ready and endpoint.content_hash != content_hash:
                self._retire(endpoint, self._table.add_endpoint(model, version, name))

    def take_idle(self) -> list[ServedVersion]:
        """Forget the versions without a place that have no jobs any more; returns those to unload."""
        idle = [each for each in self._retired if each.queue.is_empty and each.is_idle]
        for version in idle:
            self._retired.remove(version)
            self._table.turns.remove(version)
            version.retire()
        return [version for version in idle if version.is_ready and not version.shares_model]
