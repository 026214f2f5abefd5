"""The seam between workers and the shared state of circuit breakers: one breaker for each optimisation of a model.

    minilm/2:compiled    model / version : optimisation

    closed -- failures within the window --> open -- its pause is over --> half-open: one probe among all workers
       ^                                      ^                                |            |
       |                                      '------ the probe fails ---------'            |
       '---------------------------------------- the probe passes --------------------------'

Rules that every implementation keeps, and that tests/conformance checks:
  * Each transition is atomic, by the clock of the store. A repeated call has no second effect: its id tells it apart.
  * A half-open breaker has one probe. After the lease of the probe, the next caller gets it.
  * A failure without a probe counts on a closed breaker only: others began before it opened.
  * The record of a breaker that has opened stays. A worker that finds an open one missing knows that the store lost it.

A breaker of registry/circuit_breaker.py is another thing: it skips calls to a server, and belongs to one process.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from penstock.registry.errors import InvalidInput, described
from penstock.registry.queues import parse_name

__all__ = [
    "BreakerEnd",
    "BreakerLimits",
    "BreakerReading",
    "BreakerRecord",
    "BreakerTransition",
    "Circuit",
    "FailureMark",
    "breaker_name",
    "new_breaker_id",
    "split_breaker_name",
    "CANDIDATE",
]

Circuit: TypeAlias = Literal["closed", "open", "half-open"]

_LOCAL: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}:[a-z0-9][a-z0-9._-]{0,63}\Z")


class BreakerLimits(NamedTuple):
    """When a breaker opens, and for how long. Times in ms.

    failures: so many within `window_ms` open it. open_ms: the pause before the first probe. probe_ms: the lease of a
    probe; another worker probes when the first one has not told its outcome by then.
    """

    failures: int = 3
    window_ms: int = 60_000
    open_ms: int = 60_000
    probe_ms: int = 30_000

    def check(self) -> BreakerLimits:
        """These limits. Raises InvalidInput for one below 1."""
        for name, value in self._asdict().items():
            if value < 1:
                raise InvalidInput(f"{name} of a circuit breaker is {value}. Expected at least 1")
        return self


class FailureMark(NamedTuple):
    """One failure on a closed breaker: when, in ms of the store's clock, and its id."""

    at_ms: int
    id: str


class BreakerRecord(NamedTuple):
    """The state of one breaker. Times in ms of the store's clock."""

    circuit: Circuit = "closed"
    epoch: int = 0
    """How often it has opened."""
    opened_ms: int = 0
    retry_ms: int = 0
    """The end of the pause, when a probe may begin."""
    probe_until_ms: int = 0
    opened_by: str = ""
    """The id of the failure that opened it."""
    probe: str = ""
    """The id of the probe that runs; after its end that of the last one."""
    failures: tuple[FailureMark, ...] = ()
    """The last ones on the closed breaker, oldest first."""
    reason: str = ""
    """Why it opened."""

    @property
    def is_closed(self) -> bool:
        """Whether the optimisation may serve."""
        return self.circuit == "closed"

    def may_probe(self, now_ms: float) -> bool:
        """Whether a probe would be granted now."""
        due_ms = self.retry_ms if self.circuit == "open" else self.probe_until_ms
        return not self.is_closed and now_ms >= due_ms


class BreakerTransition(NamedTuple):
    """The record after a call, and whether the call did what its name says; the same for a call that is repeated."""

    record: BreakerRecord
    did: bool


class BreakerReading(NamedTuple):
    """All breakers of a model that have a record, by name, and the store's clock in ms."""

    now_ms: int
    records: Mapping[str, BreakerRecord]


class BreakerEnd(Protocol):
    """The calls of workers and operators. Names as `minilm/2:compiled`; see breaker_name.

    `id`, `probe`: of new_breaker_id; a call that is repeated has the id of the first. Each call raises InvalidInput
    for a name of another form, and BrokerUnavailable when the store does not answer in time.
    """

    def breakers(self, model: str) -> BreakerReading:
        """The breakers of a model."""

    def fail_breaker(
        self, name: str, reason: str, id: str, limits: BreakerLimits, *, probe: str = ""
    ) -> BreakerTransition:
        """Note a failure. `did`: it opened the breaker."""

    def pass_breaker(self, name: str, probe: str) -> BreakerTransition:
        """The probe passed. `did`: the breaker is closed by it."""

    def probe_breaker(self, name: str, probe: str, limits: BreakerLimits) -> BreakerTransition:
        """Ask for the probe. `did`: it is granted."""

    def force_open_breaker(self, name: str, reason: str, id: str, limits: BreakerLimits) -> BreakerTransition:
        """Open the breaker whatever its state. `did`: it was not open; an open one begins its pause anew."""

    def reset_breaker(self, name: str) -> BreakerTransition:
        """Close the breaker: the decision of an operator, or of a new gate. `did`: it was not closed."""


CANDIDATE: Final = "candidate"
"""The optimisation in the name of the breaker of a whole version: canaries, drift and failures open it, rollouts and
A/B experiments obey it."""


def breaker_name(model: str, version: str, optimisation: str) -> str:
    """`model/version:optimisation`. Raises InvalidInput.

    >>> breaker_name("minilm", "2", "compiled")
    'minilm/2:compiled'
    """
    name = f"{model}/{version}:{optimisation}"
    split_breaker_name(name)
    return name


def split_breaker_name(name: str) -> tuple[str, str]:
    """(model, `version:optimisation`). Raises InvalidInput.

    >>> split_breaker_name("minilm/2:compiled")
    ('minilm', '2:compiled')
    """
    model, slash, local = name.partition("/") if isinstance(name, str) else ("", "", "")
    if not slash or not _LOCAL.match(local):
        raise InvalidInput(
            f"Bad name of a circuit breaker {described(name)}. Expected model/version:optimisation, such as "
            "minilm/2:compiled"
        )
    return parse_name("model", model), local


def new_breaker_id() -> str:
    """An id for a failure or a probe: 16 random hex digits."""
    return secrets.token_hex(8)
