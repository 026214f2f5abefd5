"""How many tokens an engine has room for differs from worker to worker: the largest room of all is what clients see.

    reports of live workers -> the largest limit of each version --> in the spec that clients check their jobs with
                                                                 '-> the receiver of a job that is too long here

A job that is too long for this worker is handed over to a receiver that is named after the larger limit. Workers whose
engine has that limit claim the jobs of this receiver.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress

from penstock.registry.broker.base import Broker
from penstock.registry.errors import BrokerUnavailable, ConfigurationError
from penstock.registry.package import ModelSpec
from penstock.workers.versions.peers import limits_in
from penstock.workers.versions.version import ServedModel, ServedVersion

__all__ = ["announced_at_load", "follow_limits", "receiver_of"]

logger = logging.getLogger("penstock.server")


def receiver_of(label: str, most_tokens: int) -> str:
    """The name under which jobs are handed over to engines with this limit. No label has a space.

    >>> receiver_of("1", 8192)
    '1 8192'
    """
    return f"{label} {most_tokens}"


def announced_at_load(broker: Broker, version: ServedVersion) -> None:
    """The limit of other workers stands in the spec of a version whose engine was loaded, where there are any.

    A larger one of its own is announced when its own report tells it: others must know where long jobs can go.
    """
    if version.most_tokens:
        with suppress(BrokerUnavailable):
            version.announce_limit(limits_in(broker.workers()).get((version.name, version.label), 0))


def follow_limits(broker: Broker, models: Mapping[str, ServedModel]) -> None:
    """Announce the largest limit of all live workers, where the announced one is another. For the lease thread.

    The spec of a promoted version stays as it is, and so does all where reports cannot be read. Raises
    BrokerUnavailable.
    """
    engines = [
        model.active for model in tuple(models.values()) if model.deployment is None and model.active is not None
    ]
    engines = [version for version in engines if version.most_tokens]
    if not engines:
        return
    try:
        limits = limits_in(broker.workers())
    except BrokerUnavailable as error:
        # A worker without the right to read reports goes on with all else.
        logger.debug("the reports of other workers cannot be read: %s", error)
        return
    for version in engines:
        most = max(version.most_tokens, limits.get((version.name, version.label), 0))
        version.announce_limit(most)
        if _limit_in(broker.announced(version.name).spec) != most:
            logger.info("the longest texts", extra={"model": version.name, "version": version.label, "tokens": most})
            broker.announce(version.name, version.spec_json, {version.label: version.spec_json}, replaces=True)


def _limit_in(spec: bytes | None) -> int | None:
    try:
        generate = ModelSpec.from_json(spec).generate if spec is not None else None
    except ConfigurationError:
        return None
    return None if generate is None else generate.max_model_len
