"""Which version of each model is active: the operators' decisions, and the last ones that this machine followed.

a delivery's record -- accept --> the decision to follow, or None: refused, or older than the last decision
start -- last --> the decision that this machine followed before
lease thread -- remember --> DeploymentStore, for the next start

While a record cannot be accepted the previous version stays active. Where operators sign and have promoted a version
of a model, a job can only cause content to be loaded that an operator promoted, requested or registered. Before the
first promotion, a job may have any package under the models root loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from penstock.registry.deployment import Deployment
from penstock.registry.errors import Corrupt, InvalidInput
from penstock.registry.package.policy_overlay import opened_overlay
from penstock.registry.queues import DEFAULT_ENDPOINT
from penstock.registry.signed import Verifier
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.versions.deployment_store import DeploymentStore, epoch_of
from penstock.workers.versions.version import ServedModel, ServedVersion, routing_table

__all__ = ["ActiveVersions"]

logger = logging.getLogger("penstock.server")


class ActiveVersions:
    """Accepts decisions; the lifecycle acts on them. The I/O thread owns it, the lease thread calls `remember`, and
    `may_be_loaded` is for any thread.

    verify: checks the operators' signatures on records; None: no signatures are required. is_pinned: the settings name
    the active version, and promotions change nothing.
    """

    def __init__(
        self, deployments: DeploymentStore, verify: Verifier | None, metrics: InferenceMetrics, *, is_pinned: bool
    ) -> None:
        self.is_pinned = is_pinned
        self._deployments = deployments
        self._verify = verify
        self._metrics = metrics
        self._remembered: dict[str, bytes] = {}
        """By model, the decision that the store has; empty for a decision that could not be written."""

    @property
    def are_signed(self) -> bool:
        """Whether only signed decisions count."""
        return self._verify is not None

    def may_be_loaded(self, model: ServedModel, version: ServedVersion) -> bool:
        """Whether a job may have the version loaded; see the module."""
        if self._verify is None:
            return True
        is_decided = bool(model.record or model.decided) and not self.is_pinned
        return not is_decided or version is model.active or version.is_approved

    def accept(self, model: ServedModel, record: bytes) -> Deployment | None:
        """Note the model's record, and return the decision in it if the worker is to follow it."""
        model.record = record
        if not record or self.is_pinned:
            return None
        try:
            deployment = Deployment.open(record, model.name, self._verify)
            if deployment.routing is not None:
                for endpoint in (DEFAULT_ENDPOINT, *deployment.routing.shares):
                    routing_table(deployment.routing, endpoint)
            opened_overlay(deployment.policies)
        except (Corrupt, InvalidInput) as error:
            logger.error("the record of the active version is refused: %s", error, extra={"model": model.name})
            self._metrics.quarantined(model.name)
            return None
        if model.deployment is not None and deployment.epoch < model.deployment.epoch:
            logger.warning("an older decision is ignored", extra={"model": model.name, "epoch": deployment.epoch})
            return None
        model.deployment, model.decided = deployment, record
        return deployment

    def last(self, model: ServedModel) -> bytes:
        """The record of the decision that this machine followed last; empty for none."""
        return self._deployments.last(model.name)

    def check_start(self, model: ServedModel, last: bytes) -> None:
        """After the records of a start were followed: `last`, then the broker's."""
        if last and model.decided == last != model.record:
            logger.error(
                "the broker has no decision, or an older one than this machine followed: the later one stays in force. "
                "Expected a new decision, or `penstock models sync`. To start again, use another operator's key, or "
                "delete the file in deployments/ under PENSTOCK_HOME",
                extra={"model": model.name, "epoch": epoch_of(last)},
            )
        if model.record and model.deployment is None and not self.is_pinned:
            # A version was promoted, and this worker cannot read which: the highest version on disk may be a draft.
            model.active = None

    def remember(self, models: Mapping[str, ServedModel]) -> None:
        """Keep the followed decisions for this machine's next start. May wait for the disk."""
        for name, model in tuple(models.items()):
            decided, remembered = model.decided, self._remembered.get(name)
            if not decided or decided == remembered:
                continue
            try:
                self._deployments.keep(name, decided)
            except BlockingIOError:
                # Another worker of this machine writes now; the next report tries again.
                continue
            except OSError as error:
                if remembered != b"":
                    logger.warning("a decision will be forgotten at the next start: %s", error, extra={"model": name})
                self._remembered[name] = b""
            else:
                self._remembered[name] = decided
