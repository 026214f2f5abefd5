"""A version in the memory of every live worker of its model, before it is decided to serve there.

prepared -> request the load -> wait for each worker -> the caller's block -> it fails: the request is withdrawn
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from penstock.compose.rollout.load_requests import LoadRequests
from penstock.compose.rollout.replicas import ProgressCallback, Watch, replicas, workers_of
from penstock.registry.broker.base import FleetEnd
from penstock.registry.catalog import ModelRegistryClient
from penstock.registry.catalog.stages import ModelStage
from penstock.registry.catalog.tables import RegisteredVersion
from penstock.registry.errors import (
    BrokerUnavailable,
    ConfigurationError,
    ModelNotReady,
    RegistryUnavailable,
    TransitionRefused,
)

__all__ = ["Preparation"]


class Preparation:
    """Requests loads and watches the workers. For the arguments see Deployer."""

    def __init__(
        self,
        registry: ModelRegistryClient,
        fleet: FleetEnd,
        requests: LoadRequests,
        *,
        sweep_s: float,
        poll_s: float,
        on_progress: ProgressCallback,
    ) -> None:
        self._registry = registry
        self._fleet = fleet
        self._requests = requests
        self._sweep_s = sweep_s
        self._poll_s = poll_s
        self._on_progress = on_progress

    def watch(self, name: str, label: str, *, only: str | None = None) -> Watch:
        """A watch over the workers of a model, of which there may be none. only: one of them."""
        return Watch(
            self._fleet,
            name,
            label,
            sweep_s=self._sweep_s,
            on_progress=self._on_progress,
            only=only,
            poll_s=self._poll_s,
        )

    def watch_workers(self, name: str, label: str, worker: str | None) -> Watch:
        """A watch over at least one worker. Raises ModelNotReady when no worker serves the model."""
        watch = self.watch(name, label, only=worker)
        if not watch.current():
            subject = "No live worker" if worker is None else f"{worker[:80]!r} is no live worker that"
            serving = ", ".join(workers_of(self._fleet, name)) or "there is none"
            raise ModelNotReady(f"{subject} serves {name}. Expected one of: {serving}")
        return watch

    @contextmanager
    def prepared(self, version: RegisteredVersion, timeout_s: float) -> Iterator[tuple[str, ...]]:
        """The block begins when every live worker has the version in memory. An exception withdraws the request.

        A request that existed before belongs to another operator, and stays. Raises TransitionRefused when a worker
        cannot load the version.
        """
        watch = self.watch(version.name, version.version)
        if not watch.current():
            self._on_progress(f"no live worker serves {version.name}: nothing to prepare")
        was_wanted = self._requests.is_wanted(version)
        try:
            yield self._prepare(watch, version, timeout_s)
        except BaseException:
            if not was_wanted:
                self._withdraw(version)
            raise

    def _prepare(self, watch: Watch, version: RegisteredVersion, timeout_s: float) -> tuple[str, ...]:
        try:
            self._requests.request(version, is_wanted=True)
            return tuple(watch.await_ready(version.content_hash, timeout_s))
        except ModelNotReady as problem:
            raise TransitionRefused(f"{version.reference} stays in {version.stage}. {problem}") from None

    def _withdraw(self, version: RegisteredVersion) -> None:
        """Withdraw a load request, unless the version is active: another operator may have promoted it meanwhile."""
        # The caller raises an error already, which counts more than one of these.
        with suppress(BrokerUnavailable, RegistryUnavailable, ConfigurationError, ModelNotReady):
            if self._registry.find(version.name, version.version).stage is not ModelStage.PRODUCTION and not any(
                replica.is_active and replica.content_hash == version.content_hash
                for replica in replicas(self._fleet, version.name, version.version)
            ):
                self._requests.request(version, is_wanted=False)
