"""How calls of a deployment become jobs: their priority, their time, and whether they are counted."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.producers.job_state import positive_timeout
from penstock.registry.errors import ConfigurationError, InvalidInput, ResultTimeout, described
from penstock.registry.queues import PriorityName, parse_priority

__all__ = ["RayServeConfig"]


@dataclass(frozen=True, slots=True)
class RayServeConfig:
    """What a deployment does with its calls. Raises ConfigurationError for a value that is no expected one.

    enable_telemetry: counts calls and their seconds in the registry of prometheus_client, which this then needs.
    enable_priority_routing: a job has the priority of its call. False: every job is `normal`, and the priority of a
    call is checked, but has no effect.
    timeout_s: how long a call waits for its outputs. Then the job is cancelled. None: without a limit.
    """

    enable_telemetry: bool = True
    enable_priority_routing: bool = True
    timeout_s: float | None = 30.0

    def __post_init__(self) -> None:
        for name in ("enable_telemetry", "enable_priority_routing"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigurationError(f"{name} is {described(value)}. Expected True or False")
        if self.timeout_s is not None:
            try:
                positive_timeout(self.timeout_s)
            except InvalidInput as error:
                raise ConfigurationError(f"{error}, or None") from None

    def priority(self, named: PriorityName) -> PriorityName:
        """The priority of the job of a call that names this one. Raises InvalidInput for an unknown name."""
        parse_priority(named)
        return named if self.enable_priority_routing else "normal"

    def late(self) -> ResultTimeout:
        """The error of a call whose time is up. The client's own error says that the job goes on."""
        return ResultTimeout(
            f"No result within {self.timeout_s:g} s; the job is cancelled. "
            "Expected a shorter job, or a longer timeout_s of RayServeConfig"
        )
