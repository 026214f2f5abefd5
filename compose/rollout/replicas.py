"""One version in every live worker of its model: what their reports say of it, until they agree.

workers -> a report a second -> replicas -> await_ready, await_gone -> whoever asked for the version
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from penstock.registry.broker.base import FleetEnd
from penstock.registry.errors import ModelNotReady

__all__ = ["ABSENT", "Replica", "ProgressCallback", "Watch", "replicas"]

ABSENT: Final = "absent"
"""The state of a version that a worker has not met."""
_REPORTS_LATE_S: Final = 3.0
"""A worker reports once a second."""
ProgressCallback = Callable[[str], None]
"""Is told, in a line, how things go on."""


class Replica(NamedTuple):
    """A version in one worker; `state` is cold, loading, ready, failed or ABSENT."""

    worker: str
    state: str
    content_hash: str
    is_active: bool
    problem: str
    """Why it is not to be had; empty while nothing is wrong."""


def replicas(broker: FleetEnd, model: str, label: str) -> list[Replica]:
    """One for each live worker that serves the model. Raises BrokerUnavailable."""
    found = []
    for report in map(json.loads, broker.workers()):
        versions = report.get("versions", {}).get(model)
        if versions is not None:
            said = versions.get(label, {})
            found.append(
                Replica(
                    report["name"],
                    said.get("state", ABSENT),
                    said.get("content_hash", ""),
                    said.get("is_active", False),
                    said.get("problem", ""),
                )
            )
    return found


class Watch:
    """Looks at one version from before it was asked for until the workers have followed.

    sweep_s: how long workers may take to hear of it. only: the one worker that matters. poll_s: between two looks.
    Workers that come in between count, too, and those that leave do not.
    """

    def __init__(
        self,
        broker: FleetEnd,
        model: str,
        label: str,
        *,
        sweep_s: float,
        tell: ProgressCallback,
        only: str | None = None,
        poll_s: float = 0.05,
    ) -> None:
        self._broker = broker
        self._model, self._label = model, label
        self._only = only
        self._poll_s = poll_s
        self._tell = tell
        self._begun = time.monotonic()
        self._heard_s = sweep_s + _REPORTS_LATE_S
        self._told: dict[str, str] = {}
        self._in_trouble_before = {replica.worker for replica in self.look() if replica.problem}

    def look(self) -> list[Replica]:
        """The replicas now."""
        found = replicas(self._broker, self._model, self._label)
        return [replica for replica in found if self._only in (None, replica.worker)]

    def await_ready(self, content_hash: str, timeout_s: float) -> list[str]:
        """Returns the workers once all have this content loaded.

        Raises ModelNotReady with the first problem of one, also that it keeps other content under this label; when
        the time is over; BrokerUnavailable.
        """

        def is_ready(replica: Replica) -> bool:
            if replica.state != "ready":
                if replica.problem and self._is_news(replica):
                    raise ModelNotReady(f"{replica.worker}: {replica.problem}")
                return False
            if replica.content_hash == content_hash:
                return True
            # One that does not answer is loaded again, from files that may have been made right.
            if self._has_had_time or (replica.problem and self._is_news(replica)):
                raise ModelNotReady(
                    f"{replica.worker} has other files under {self._model}/{self._label} "
                    f"({replica.content_hash[:12]}). Expected those that were registered ({content_hash[:12]})"
                )
            return False

        return self._await(is_ready, timeout_s, "ready")

    def await_gone(self, timeout_s: float) -> list[str]:
        """Returns the workers once none has the version in memory. Raises ModelNotReady when the time is over."""
        return self._await(lambda replica: replica.state not in ("ready", "loading"), timeout_s, "unloaded")

    def await_active(self, timeout_s: float) -> list[str]:
        """Returns the workers that do not answer with the version when all do, or when the time is over."""
        deadline = time.monotonic() + timeout_s
        while (late := [each.worker for each in self.look() if not each.is_active]) and time.monotonic() < deadline:
            time.sleep(self._poll_s)
        return late

    def _await(self, is_done: Callable[[Replica], bool], timeout_s: float, wanted: str) -> list[str]:
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.look()
            self._tell_of(found)
            late = [replica for replica in found if not is_done(replica)]
            if not late:
                return [replica.worker for replica in found]
            if time.monotonic() > deadline:
                states = ", ".join(f"{replica.worker} is {replica.state}" for replica in late)
                raise ModelNotReady(
                    f"{self._model}/{self._label} was not {wanted} everywhere within {timeout_s:g} s: {states}"
                )
            time.sleep(self._poll_s)

    def _is_news(self, replica: Replica) -> bool:
        """Whether a problem is one of this time: an earlier one stands in the reports until the worker tries again."""
        return replica.worker not in self._in_trouble_before or self._has_had_time

    @property
    def _has_had_time(self) -> bool:
        """Whether every worker has heard, and has said so."""
        return time.monotonic() - self._begun > self._heard_s

    def _tell_of(self, found: Collection[Replica]) -> None:
        for replica in found:
            if not replica.problem:
                self._in_trouble_before.discard(replica.worker)
            if self._told.get(replica.worker) != replica.state:
                self._told[replica.worker] = replica.state
                self._tell(f"{replica.worker}: {self._model}/{self._label} is {replica.state}")
