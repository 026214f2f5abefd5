"""What a replica counts: its calls and their seconds, by the model, the job's priority and the outcome.

    completed   the outputs came
    refused     the call was wrong, or the queue had no room: no job was published
    failed      the job failed, or another program cancelled it
    timeout     the time of the call was up
    cancelled   the caller left
    error       anything else, such as a broker that cannot be reached

The priority is empty for a call that was refused before its priority was known.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from penstock.registry import metrics
from penstock.registry.errors import JobFailed, MissingRequirement, Rejected, ResultTimeout
from penstock.registry.extras import not_installed

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from penstock.producers.ray_serve.config import RayServeConfig
    from penstock.registry.queues import PriorityName

__all__ = ["CountedCall", "NullTelemetry", "Telemetry", "outcome_of", "telemetry_of"]

Outcome: TypeAlias = Literal["completed", "refused", "failed", "timeout", "cancelled", "error"]
_BY_KIND: Final[tuple[tuple[type[BaseException], Outcome], ...]] = (
    (Rejected, "refused"),
    (JobFailed, "failed"),
    (ResultTimeout, "timeout"),
    (asyncio.CancelledError, "cancelled"),
)


def outcome_of(error: BaseException) -> Outcome:
    """The outcome of a call that raised this."""
    return next((outcome for kind, outcome in _BY_KIND if isinstance(error, kind)), "error")


@dataclass(slots=True)
class CountedCall:
    """A call that runs. priority: that of its job, once it is known."""

    priority: PriorityName | Literal[""] = ""


class NullTelemetry:
    """Counts nothing."""

    @contextmanager
    def counted(self, model: str) -> Iterator[CountedCall]:
        """See Telemetry.counted."""
        yield CountedCall()


class Telemetry(NullTelemetry):
    """Counts in a registry of prometheus_client. Raises MissingRequirement without that package."""

    def __init__(self, registry: CollectorRegistry | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """registry: None for that of the process."""
        try:
            from prometheus_client import REGISTRY, Counter, Histogram
        except ModuleNotFoundError:
            missing = not_installed("prometheus-client", "worker")
            raise MissingRequirement(f"{missing}, or RayServeConfig(enable_telemetry=False)") from None
        registry, calls, seconds = registry or REGISTRY, metrics.RAY_SERVE_CALLS, metrics.RAY_SERVE_SECONDS
        self._clock = clock
        self._calls = Counter(calls.name, calls.help, calls.labels, registry=registry)
        self._seconds = Histogram(
            seconds.name, seconds.help, seconds.labels, registry=registry, buckets=seconds.buckets
        )

    @contextmanager
    def counted(self, model: str) -> Iterator[CountedCall]:
        """Counts the call inside of the block when the block ends, in whichever way."""
        call, begun, outcome = CountedCall(), self._clock(), "completed"
        try:
            yield call
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            labels = (model, call.priority, outcome)
            self._calls.labels(*labels).inc()
            self._seconds.labels(*labels).observe(self._clock() - begun)


def telemetry_of(config: RayServeConfig) -> NullTelemetry:
    """That of this process, which has one registry; or one that counts nothing. Raises MissingRequirement."""
    if not config.enable_telemetry:
        return _NULL
    # The registry takes no second metric of a name, and calls may begin in several threads.
    with _making:
        return _of_process()


_NULL: Final = NullTelemetry()
_making: Final = threading.Lock()
_of_process: Final = cache(Telemetry)
