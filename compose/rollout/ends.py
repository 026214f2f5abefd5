"""Connects a Deployer to registry, broker, workers and files: directly, or through a worker (`via`).

settings, via -> operator's keys -> DeployerEnds: registry, fleet, states, control, files
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.compose.rollout.files import Files, LocalFiles
from penstock.compose.rollout.load_requests import require_control
from penstock.compose.rollout.operator_keys import OperatorKeys, operator_keys
from penstock.compose.rollout.registry import open_registry
from penstock.registry.broker.base import FleetEnd
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.catalog import ModelRegistryClient, Veto
from penstock.registry.desired_state import StateStore
from penstock.registry.settings import Settings
from penstock.registry.signed import Signer

if TYPE_CHECKING:
    from penstock.compose.rollout.control_client import ControlClient

__all__ = ["DeployerEnds", "connect_ends"]

_DIRECT_POLL_S: Final = 0.05
_REMOTE_POLL_S: Final = 0.5
"""Through a worker each poll of the reports is a round trip through Celery's broker."""


@dataclass(frozen=True, slots=True)
class DeployerEnds:
    """The connections of a Deployer. `states` and `control` may be missing; see LoadRequests."""

    registry: ModelRegistryClient
    fleet: FleetEnd
    states: StateStore | None
    control: ControlClient | None
    files: Files
    sign: Signer | None
    poll_s: float


def connect_ends(
    settings: Settings, via: str, exits: ExitStack, *, approve: Veto | None, gate: Veto | None
) -> DeployerEnds:
    """Open the connections; `exits` closes them. Raises ConfigurationError, and ModelNotReady for an unknown worker."""
    # Celery takes a third of a second to import; commands that only read need not wait for it.
    from penstock.compose.rollout.control_client import ControlClient

    keys = operator_keys(settings, for_changes=True)
    control = ControlClient(settings, keys.sign) if keys.sign else None
    if control is not None:
        exits.callback(control.close)
    if via:
        return _through_worker(settings, via, keys, require_control(control), approve, gate)
    broker = RedisStreams.from_url(settings.redis_url or "")
    exits.callback(broker.close)
    states = _state_store(settings)
    if states is not None:
        exits.callback(states.close)
    registry = open_registry(settings, keys, approve=approve, gate=gate)
    return DeployerEnds(registry, broker, states, control, LocalFiles(), keys.sign, _DIRECT_POLL_S)


def _through_worker(
    settings: Settings, via: str, keys: OperatorKeys, control: ControlClient, approve: Veto | None, gate: Veto | None
) -> DeployerEnds:
    from penstock.compose.rollout.remote import Remote, RemoteFleet, RemoteRegistryStore

    remote = Remote(control, via)
    store = RemoteRegistryStore(remote)
    registry = open_registry(settings, keys, store, rehash=remote.rehash, approve=approve, gate=gate)
    return DeployerEnds(registry, RemoteFleet(remote), None, control, remote, keys.sign, _REMOTE_POLL_S)


def _state_store(settings: Settings) -> StateStore | None:
    """The store that workers read their desired versions from; None when the settings turn it off."""
    inference = settings.inference
    if not inference.state_reconcile_enabled:
        return None
    return StateStore.from_url(inference.state_redis_url or settings.redis_url or "", inference.state_prefix)
