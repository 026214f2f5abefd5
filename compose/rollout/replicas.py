"""One version in every live worker of its model, read from their reports until they agree.

workers -> a report a second -> replicas -> await_ready, await_gone, await_active -> Deployer
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from penstock.registry.broker.base import FleetEnd
from penstock.registry.errors import ModelNotReady

__all__ = ["ABSENT", "ProgressCallback", "Replica", "Watch", "replicas", "workers_of"]

ABSENT: Final = "absent"
"""The state of a version that a worker does not know."""
_REPORTS_LATE_S: Final = 3.0
"""A worker reports once a second."""
ProgressCallback = Callable[[str], None]
"""Called with one line per step."""


class Replica(NamedTuple):
    """A version in one worker; `state` is cold, loading, ready, failed or ABSENT."""

    worker: str
    state: str
    content_hash: str
    is_active: bool
    problem: str
    """Why the worker cannot load it; empty when there is no problem."""


def replicas(fleet: FleetEnd, model: str, label: str) -> list[Replica]:
    """One for each live worker that serves the model. Raises BrokerUnavailable."""
    found = []
    for report in map(json.loads, fleet.workers()):
        versions = report.get("versions", {}).get(model)
        if versions is not None:
            entry = versions.get(label, {})
            found.append(
                Replica(
                    report["name"],
                    entry.get("state", ABSENT),
                    entry.get("content_hash", ""),
                    entry.get("is_active", False),
                    entry.get("problem", ""),
                )
            )
    return found


def workers_of(fleet: FleetEnd, model: str, *, only: str | None = None) -> list[str]:
    """The live workers that serve the model, or `only` when it is one of them. Raises BrokerUnavailable."""
    return [replica.worker for replica in replicas(fleet, model, "") if only in (None, replica.worker)]


class Watch:
    """Reads the reports on one version, from before its request until the workers have applied it.

    sweep_s: how long workers may take to read the request. only: the one worker that is watched. poll_s: seconds
    between two reads. Workers that start meanwhile are included, workers that stop are left out.
    """

    def __init__(
        self,
        fleet: FleetEnd,
        model: str,
        label: str,
        *,
        sweep_s: float,
        on_progress: ProgressCallback,
        only: str | None = None,
        poll_s: float = 0.05,
    ) -> None:
        self._fleet = fleet
        self._model, self._label = model, label
        self._only = only
        self._poll_s = poll_s
        self._on_progress = on_progress
        self._begun = time.monotonic()
        self._applied_within_s = sweep_s + _REPORTS_LATE_S
        self._last_states: dict[str, str] = {}
        self._had_problem = {replica.worker for replica in self.current() if replica.problem}

    def current(self) -> list[Replica]:
        """The replicas now."""
        found = replicas(self._fleet, self._model, self._label)
        return [replica for replica in found if self._only in (None, replica.worker)]

    def await_ready(self, content_hash: str, timeout_s: float) -> list[str]:
        """Returns the workers once all have loaded the version with this content hash.

        Raises ModelNotReady with the first problem of a worker, also when it has other files under this label, and when
        the time is over; BrokerUnavailable.
        """

        def is_ready(replica: Replica) -> bool:
            if replica.state != "ready":
                if replica.problem and self._is_new_problem(replica):
                    raise ModelNotReady(f"{replica.worker}: {replica.problem}")
                return False
            if replica.content_hash == content_hash:
                return True
            # An inactive version with another content hash is loaded again, from files that may be correct by now.
            if self._is_sweep_over or (replica.problem and self._is_new_problem(replica)):
                raise ModelNotReady(
                    f"{replica.worker} has other files under {self._model}/{self._label} "
                    f"({replica.content_hash[:12]}). Expected the registered ones ({content_hash[:12]})"
                )
            return False

        return self._await(is_ready, timeout_s, "ready")

    def await_gone(self, timeout_s: float) -> list[str]:
        """Returns the workers once none has the version in memory. Raises ModelNotReady when the time is over."""
        return self._await(lambda replica: replica.state not in ("ready", "loading"), timeout_s, "unloaded")

    def await_active(self, timeout_s: float) -> list[str]:
        """Waits until the version is active in all workers; returns those where it is not when the time is over."""
        deadline = time.monotonic() + timeout_s
        while (late := [each.worker for each in self.current() if not each.is_active]) and time.monotonic() < deadline:
            time.sleep(self._poll_s)
        return late

    def _await(self, is_done: Callable[[Replica], bool], timeout_s: float, goal: str) -> list[str]:
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.current()
            self._report_changes(found)
            late = [replica for replica in found if not is_done(replica)]
            if not late:
                return [replica.worker for replica in found]
            if time.monotonic() > deadline:
                states = ", ".join(f"{replica.worker} is {replica.state}" for replica in late)
                raise ModelNotReady(
                    f"{self._model}/{self._label} was not {goal} everywhere within {timeout_s:g} s: {states}"
                )
            time.sleep(self._poll_s)

    def _is_new_problem(self, replica: Replica) -> bool:
        """Whether a problem belongs to this request: an older one stays in the reports until the worker tries again."""
        return replica.worker not in self._had_problem or self._is_sweep_over

    @property
    def _is_sweep_over(self) -> bool:
        """Whether every worker has had the time to read the request and to report."""
        return time.monotonic() - self._begun > self._applied_within_s

    def _report_changes(self, found: Collection[Replica]) -> None:
        for replica in found:
            if not replica.problem:
                self._had_problem.discard(replica.worker)
            if self._last_states.get(replica.worker) != replica.state:
                self._last_states[replica.worker] = replica.state
                self._on_progress(f"{replica.worker}: {self._model}/{self._label} is {replica.state}")
