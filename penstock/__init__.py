"""Event-driven, queue-based inference: the names that a program which submits jobs needs.

    from penstock import Client, QueueFull
    client = Client.from_env()
    job = client.submit("minilm", {"text": ["a sentence"]})
    job.result(timeout=30)["embedding"]            # (1, 384) float32

The import is lazy: each name is loaded when it is first used, and none needs torch. The subpackages are the folders of
the repository's top level; they are links here, so that one package is installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock import package
    from penstock.producers.async_client import AsyncClient, AsyncJobHandle
    from penstock.producers.client import Client, JobHandle
    from penstock.producers.events import EventType, JobEvent
    from penstock.producers.job_state import CancelStatus, JobInfo, JobStatus
    from penstock.registry.envelope import Retry
    from penstock.registry.errors import (
        BadSignature,
        BrokerDamaged,
        BrokerRefused,
        BrokerUnavailable,
        Cancelled,
        ClientUnusable,
        ConfigurationError,
        ContentChanged,
        Corrupt,
        DeadLettered,
        DeadlineExceeded,
        Expired,
        Forbidden,
        ForwardTimeout,
        IdempotencyConflict,
        InputRefused,
        InvalidInput,
        JobFailed,
        JobLost,
        MissingRequirement,
        ModelError,
        ModelNotReady,
        NonFiniteOutput,
        OutOfMemory,
        PenstockError,
        QueueFull,
        RegistryUnavailable,
        Rejected,
        ResultGone,
        ResultTimeout,
        Retryable,
        TransitionConflict,
        TransitionRefused,
        Unauthorized,
        UndecodableEnvelope,
        UnknownJob,
        UnknownModel,
    )
    from penstock.registry.package.model_decorator import model
    from penstock.registry.queues import PriorityName
    from penstock.safety.audit import AuditLogger
    from penstock.safety.privacy import InputRedactor, TenantIsolation
    from penstock.safety.security import SecurityValidator

__all__ = [
    "AsyncClient",
    "AsyncJobHandle",
    "AuditLogger",
    "BadSignature",
    "BrokerDamaged",
    "BrokerRefused",
    "BrokerUnavailable",
    "CancelStatus",
    "Cancelled",
    "Client",
    "ClientUnusable",
    "ConfigurationError",
    "ContentChanged",
    "Corrupt",
    "DeadLettered",
    "DeadlineExceeded",
    "EventType",
    "Expired",
    "Forbidden",
    "ForwardTimeout",
    "IdempotencyConflict",
    "InputRedactor",
    "InputRefused",
    "InvalidInput",
    "JobEvent",
    "JobFailed",
    "JobHandle",
    "JobInfo",
    "JobLost",
    "JobStatus",
    "MissingRequirement",
    "ModelError",
    "ModelNotReady",
    "NonFiniteOutput",
    "OutOfMemory",
    "PenstockError",
    "PriorityName",
    "QueueFull",
    "RegistryUnavailable",
    "Rejected",
    "ResultGone",
    "ResultTimeout",
    "Retry",
    "Retryable",
    "SecurityValidator",
    "TenantIsolation",
    "TransitionConflict",
    "TransitionRefused",
    "Unauthorized",
    "UndecodableEnvelope",
    "UnknownJob",
    "UnknownModel",
    "model",
    "package",
]

_ERRORS = "penstock.registry.errors"
_MODULES = {
    "AsyncClient": "penstock.producers.async_client",
    "AsyncJobHandle": "penstock.producers.async_client",
    "AuditLogger": "penstock.safety.audit",
    "CancelStatus": "penstock.producers.job_state",
    "Client": "penstock.producers.client",
    "EventType": "penstock.producers.events",
    "InputRedactor": "penstock.safety.privacy",
    "JobEvent": "penstock.producers.events",
    "JobHandle": "penstock.producers.client",
    "JobInfo": "penstock.producers.job_state",
    "JobStatus": "penstock.producers.job_state",
    "PriorityName": "penstock.registry.queues",
    "Retry": "penstock.registry.envelope",
    "SecurityValidator": "penstock.safety.security",
    "TenantIsolation": "penstock.safety.privacy",
    "model": "penstock.registry.package.model_decorator",
}
"""The module of each name; a name that is missing here is an error class."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "package":
        return importlib.import_module("penstock.package")
    value = globals()[name] = getattr(importlib.import_module(_MODULES.get(name, _ERRORS)), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
