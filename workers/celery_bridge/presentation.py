"""How Celery and Flower name a job, its arguments and its failure. Shapes are shown, values never."""

from __future__ import annotations

from typing import Final

from penstock.registry.envelope import Failure, JobHeader
from penstock.registry.queues import CELERY_TASK

__all__ = ["shown_arguments", "shown_failure", "shown_id", "shown_name", "shown_traceback"]

_LONGEST_TRACEBACK: Final = 4_000
"""Thousands of events share a message."""


def shown_id(job: JobHeader) -> str:
    """The id under which Flower lists a job: that of the Celery task that brought it, else its own."""
    return job.id.rpartition(".")[2] if job.options.lane else job.id


def shown_name(model: str) -> str:
    """The task name under which Flower lists the jobs of `model`.

    >>> shown_name("mlp")
    'penstock.infer.mlp'
    """
    return f"{CELERY_TASK}.{model}"


def shown_failure(failure: Failure) -> str:
    """The failure in the form of a Python exception: its code, and at most 300 characters of its message."""
    return f"{failure.code}({failure.message!r:.300})"


def shown_traceback(failure: Failure) -> str:
    """The end of the traceback, for operators; empty where no model raised an exception."""
    return failure.traceback[-_LONGEST_TRACEBACK:]


def shown_arguments(job: JobHeader) -> str:
    """The tenant, the priority, and the type and shape of each input, in place of the task's arguments."""
    inputs = {tensor.name: f"{tensor.dtype} {tensor.shape}" for tensor in job.content}
    return repr({"tenant": job.tenant, "priority": job.priority, **inputs})
