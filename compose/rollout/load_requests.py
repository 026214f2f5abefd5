"""Asks workers to load or to unload a version, in one of two ways.

all workers, with a state store  -> a signed DesiredVersion in the store, and a command to read it now
one worker, or no state store    -> a signed control command to each worker
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from penstock.compose.rollout.replicas import replicas, workers_of
from penstock.registry.broker.base import FleetEnd
from penstock.registry.catalog.tables import RegisteredVersion
from penstock.registry.control import Command
from penstock.registry.desired_state import DesiredVersion, StateStore
from penstock.registry.errors import BrokerUnavailable, ConfigurationError, Corrupt, ModelNotReady
from penstock.registry.signed import Signer

if TYPE_CHECKING:
    from penstock.compose.rollout.control_client import ControlClient

__all__ = ["LoadRequests", "require_control"]


class LoadRequests:
    """The requests of one operator.

    states: the store that workers read; None: each worker gets a command. control: sends signed commands; None without
    an operator's key. sign: the operator's signature.
    """

    def __init__(
        self, fleet: FleetEnd, states: StateStore | None, control: ControlClient | None, sign: Signer | None
    ) -> None:
        self._fleet = fleet
        self._states = states
        self._control = control
        self._sign = sign

    @property
    def are_stored(self) -> bool:
        """Whether a store keeps the requests for workers that start later."""
        return self._states is not None

    def request(self, version: RegisteredVersion, *, is_wanted: bool, worker: str | None = None) -> None:
        """Ask all workers of the model, or one, to load the version, or to unload it.

        Raises ModelNotReady when a worker refuses, ConfigurationError without an operator's key, BrokerUnavailable.
        """
        if worker is None and self._states is not None:
            # An unload request is stored, too: from it workers learn the content hash of a version that jobs may name.
            desired = DesiredVersion(version.name, version.version, is_wanted, version.content_hash, time.time())
            self._states.put(desired, self._sign)
            self._notify_workers(version.name)
            return
        action: Literal["load", "unload"] = "load" if is_wanted else "unload"
        command = Command(action, version.name, version.version, version.content_hash)
        self.send(command, workers_of(self._fleet, version.name, only=worker))

    def send(self, command: Command, workers: Sequence[str]) -> None:
        """Send a command to these workers. Raises ModelNotReady with the first refusal, and ConfigurationError."""
        refusals = require_control(self._control).send(command, workers) if workers else {}
        for worker, problem in refusals.items():
            raise ModelNotReady(f"{worker}: {problem}")

    def is_wanted(self, version: RegisteredVersion) -> bool:
        """Whether the last request was to load the version. Without a store: whether a worker has it loaded."""
        if self._states is None:
            return any(replica.state == "ready" for replica in replicas(self._fleet, version.name, version.version))
        desired = self._stored(version)
        return desired is not None and desired.is_wanted

    def is_known(self, version: RegisteredVersion) -> bool:
        """Whether a request for this version with this content hash is stored, to load or to unload."""
        desired = self._stored(version)
        return desired is not None and desired.content_hash == version.content_hash

    def _stored(self, version: RegisteredVersion) -> DesiredVersion | None:
        record = self._states.desired().get(version.reference) if self._states is not None else None
        try:
            return None if record is None else DesiredVersion.open(record, None)
        except Corrupt:
            return None

    def _notify_workers(self, name: str) -> None:
        """Ask workers to read the store now. Workers that accept no commands read it every few seconds."""
        workers = workers_of(self._fleet, name)
        if self._control is not None and workers:
            with suppress(BrokerUnavailable):
                self._control.notify(Command("reconcile"), workers)


def require_control(control: ControlClient | None) -> ControlClient:
    """The client of control commands. Raises ConfigurationError without one, which means without an operator key."""
    if control is None:
        raise ConfigurationError("Control commands are signed. Expected an operator's key, see `penstock doctor`")
    return control
