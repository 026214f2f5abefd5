"""Alerts: each failure reaches each hook once, and no hook disturbs the decision that it hears of.

    a gate refuses, a breaker opens, a metric drifts -- Alert --> Alerts.notify -- known id --> nothing
                                                                        '--> every hook, its errors counted

A hook is a plain function of the alert: a callback of the program, or the sender of a webhook. alert_hooks.py opens
those of the settings. A hook that takes time belongs into a BackgroundHook.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from queue import Empty, Full, Queue
from typing import Any, Final, Literal, TypeAlias

from penstock.registry.broker.breakers import BreakerRecord, split_breaker_name
from penstock.registry.errors import InvalidInput, described

__all__ = ["Alert", "AlertHook", "AlertKind", "Alerts", "BackgroundHook", "Outcome", "alert_event", "breaker_alert"]

AlertKind: TypeAlias = Literal["gate", "canary", "breaker", "drift", "rollout"]
Outcome: TypeAlias = Literal["sent", "failed", "dropped"]

_REMEMBERED: Final = 10_000
"""Ids of alerts: the oldest are forgotten first."""
_WAITING: Final = 100
logger = logging.getLogger("penstock.safety")


@dataclass(frozen=True, slots=True)
class Alert:
    """One failure. `id`: the same for every report of this failure. at_s: Unix seconds.

    `reason` and `figures` say what was found; they hold no inputs and no outputs of jobs.
    """

    id: str
    kind: AlertKind
    model: str
    reason: str
    at_s: float
    version: str = ""
    optimisation: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


AlertHook: TypeAlias = Callable[[Alert], object]


def breaker_alert(name: str, record: BreakerRecord, at_s: float) -> Alert:
    """The alert of a breaker that opened. name: as `minilm/2:compiled`.

    The worker whose call opened it sends it: the transition says so to one worker only.
    """
    model, local = split_breaker_name(name)
    version, _, optimisation = local.partition(":")
    return Alert(
        f"breaker {name} {record.opened_by}",
        "breaker",
        model,
        record.reason,
        at_s,
        version,
        optimisation,
        {"epoch": float(record.epoch)},
    )


def alert_event(alert: Alert) -> dict[str, Any]:
    """The event of a webhook, ready for JSON: the shape of those that tell of ended jobs. Equal alerts have one id."""
    return {
        "id": f"evt_{hashlib.sha256(alert.id.encode(errors='replace')).hexdigest()[:32]}",
        "object": "event",
        "type": f"safety.{alert.kind}",
        "created_at": int(alert.at_s),
        "data": {
            "model": alert.model,
            "version": alert.version,
            "optimisation": alert.optimisation,
            "reason": alert.reason,
            "figures": dict(alert.figures),
        },
    }


class Alerts:
    """The hooks of this process. Thread-safe.

    on_outcome: is told (name of the hook, outcome) for each alert and hook; the metrics listen there.
    """

    def __init__(
        self,
        *,
        on_outcome: Callable[[str, Outcome], None] = lambda name, outcome: None,
        remembered: int = _REMEMBERED,
    ) -> None:
        self._on_outcome = on_outcome
        self._remembered = remembered
        self._hooks: dict[str, AlertHook] = {}
        self._known: OrderedDict[str, None] = OrderedDict()
        self._outcomes: Counter[tuple[str, Outcome]] = Counter()
        self._lock = threading.Lock()

    def register(self, name: str, hook: AlertHook) -> None:
        """Call this hook for each alert from now on.

        A hook that returns False has dropped the alert. Raises InvalidInput for a name in use or an async function.
        """
        if not callable(hook) or iscoroutinefunction(hook):
            kind = "an async function" if callable(hook) else f"of type {type(hook).__name__}"
            raise InvalidInput(f"The alert hook {name} is {kind}. Expected a plain function of the alert")
        with self._lock:
            if name in self._hooks:
                raise InvalidInput(f"There is an alert hook {name} already. Expected a new name, or `unregister` first")
            self._hooks[name] = hook

    def unregister(self, name: str) -> None:
        """Call this hook no more. Raises InvalidInput for an unknown one."""
        with self._lock:
            if self._hooks.pop(name, None) is None:
                known = ", ".join(sorted(self._hooks)) or "none"
                raise InvalidInput(f"There is no alert hook {described(name)}. Expected one of: {known}")

    def notify(self, alert: Alert) -> bool:
        """Tell every hook, on this thread. Whether the alert is new. It never raises for a hook.

        An alert counts as told once this call has begun, so that no failure is told twice.
        """
        with self._lock:
            if alert.id in self._known:
                self._known.move_to_end(alert.id)
                return False
            self._known[alert.id] = None
            while len(self._known) > self._remembered:
                self._known.popitem(last=False)
            hooks = list(self._hooks.items())
        facts = {"kind": alert.kind, "model": alert.model, "version": alert.version, "reason": alert.reason}
        logger.warning("safety alert", extra=facts)
        for name, hook in hooks:
            self._call(name, hook, alert)
        return True

    def count(self, name: str, outcome: Outcome) -> int:
        """How often a hook had this outcome."""
        with self._lock:
            return self._outcomes[name, outcome]

    def _call(self, name: str, hook: AlertHook, alert: Alert) -> None:
        outcome: Outcome = "sent"
        try:
            if hook(alert) is False:
                outcome = "dropped"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, too: a hook must not end a worker
            outcome = "failed"
            logger.warning("an alert hook failed", extra={"hook": name, "error": type(error).__name__})
        with self._lock:
            self._outcomes[name, outcome] += 1
        self._on_outcome(name, outcome)


class BackgroundHook:
    """A hook that runs on a thread of its own, such as the sender of a webhook. A callable for Alerts.register.

    When more than `waiting` alerts wait for a slow hook, the next ones are dropped; Alerts counts them. failures: how
    often the hook raised. on_failure: is told of it, on that thread.
    """

    def __init__(
        self, hook: AlertHook, *, waiting: int = _WAITING, on_failure: Callable[[BaseException], None] | None = None
    ) -> None:
        self.failures = 0
        self._hook = hook
        self._on_failure = on_failure
        self._queue: Queue[Alert] = Queue(waiting)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def __call__(self, alert: Alert) -> bool:
        """Whether there was room for the alert."""
        with self._lock:
            if self._is_closed:
                return False
            try:
                self._queue.put_nowait(alert)
            except Full:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)
                self._thread.start()
        return True

    def close(self, timeout_s: float = 5.0) -> bool:
        """Take no more alerts, and wait for those that wait. Whether all of them were handled in time."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                alert = self._queue.get(timeout=0.2)
            except Empty:
                if self._is_closed:
                    return
                continue
            try:
                self._hook(alert)
            except BaseException as error:  # as in Alerts
                self.failures += 1
                logger.warning("an alert hook failed", extra={"error": type(error).__name__})
                if self._on_failure is not None:
                    self._on_failure(error)
