"""The specs of this worker's versions in the broker: clients check their jobs with them."""

from __future__ import annotations

from penstock.registry.broker.base import Broker
from penstock.registry.deployment import Deployment
from penstock.workers.versions.table import VersionTable
from penstock.workers.versions.token_limits import announced_at_load
from penstock.workers.versions.version import ServedVersion

__all__ = ["Announcements"]


class Announcements:
    """Publishes the specs of the versions of one worker."""

    def __init__(self, broker: Broker, table: VersionTable) -> None:
        self._broker = broker
        self._table = table

    def publish(self, version: ServedVersion) -> None:
        """Publish the specs of an active version and of those that jobs may name. Raises BrokerUnavailable."""
        announced_at_load(self._broker, version)
        model = self._table.models[version.name]
        found = {label: self._table.resolve(model, label) for label in self._table.labels(version.name)}
        versions = {label: other.spec_json for label, other in found.items() if other is not None}
        self._broker.announce(version.name, version.spec_json, versions, replaces=True)

    def publish_again(self, *, replaces: bool) -> None:
        """Publish the specs of all models again. For the lease thread. Raises BrokerUnavailable.

        replaces: the broker's data are not those of before. Then the decisions that this worker follows are put back,
        too, unless the broker has later ones. Otherwise only missing specs are filled in.
        """
        for name, model in tuple(self._table.models.items()):
            active, decided = model.active, model.decided
            if active is None:
                continue
            spec = active.spec_json
            if replaces and decided and Deployment.open(decided, name).version == active.label:
                epoch, _, record = decided.partition(b" ")
                self._broker.activate(name, int(epoch), record, active.label, spec)
            versions = {label: version.spec_json for label, version in tuple(model.versions.items())}
            self._broker.announce(name, spec, versions, replaces=replaces)
