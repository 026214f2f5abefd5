"""Celery's `send_task` as a way to submit jobs: the task endpoint.

    task message -- InferRequest --> InferTask -- TaskIngress --> job <model>.<task id> in the broker --> acknowledged

After that it is a job like any other; task_results.py carries its result back. A crash before the acknowledgement
makes Celery deliver the message again, which changes nothing: the broker accepts a job id once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn, cast

from celery import Task
from celery.exceptions import Ignore, InvalidTaskError, Reject
from celery.worker.request import Request

from penstock.registry.admission import JobBuilder, SpecCache, SubmitOptions
from penstock.registry.broker.base import Limits, ProducerEnd
from penstock.registry.errors import (
    BrokerUnavailable,
    ConfigurationError,
    Forbidden,
    InvalidInput,
    QueueFull,
    Rejected,
)
from penstock.registry.queues import CELERY_TASK, PriorityName, lane_key, slot_of

__all__ = ["InferRequest", "InferTask", "TaskIngress"]

_LONGEST_WAIT_S: Final = 0.25
"""How long one task message may hold Celery's thread while its queue is full; remote control waits for as long."""


class TaskIngress:
    """Turns task messages into jobs, on Celery's thread.

    is_open: False refuses every task. Task messages carry no signature, so the settings close the endpoint where
    jobs must be signed.
    """

    def __init__(
        self, broker: ProducerEnd, builder: JobBuilder, specs: SpecCache, limits: Limits, *, is_open: bool
    ) -> None:
        self._broker = broker
        self._builder = builder
        self._specs = specs
        self._limits = limits
        self._is_open = is_open

    def admit(
        self,
        task_id: str,
        *,
        model: str,
        inputs: Mapping[str, object],
        tenant: str | None = None,
        priority: str = "normal",
        deadline_s: float | None = None,
        version: str | None = None,
        outputs: Sequence[str] = (),
    ) -> str:
        """Publish the job `<model>.<task id>` and return its id. The same task id again is the same job.

        `inputs` are nested lists. Raises Rejected for a job that cannot be accepted, now or later; QueueFull, which
        is a Rejected, for one that can be accepted later; and BrokerUnavailable.
        """
        if not self._is_open:
            raise Forbidden("send_task is off here: jobs must be signed by their sender. Expected a Penstock client")
        spec = self._specs.get(model, version, self._broker.spec)
        job_id = f"{spec.name}.{task_id}"
        slot = slot_of(job_id)
        if slot != spec.name:
            raise InvalidInput(f"Bad task id {task_id!r:.80}. Expected letters, digits, '_', ':' or '-'")
        # `build` checks the name of the priority: a task may bring any value.
        options = SubmitOptions(cast(PriorityName, priority), deadline_s, tenant, version, outputs)
        job = self._builder.build(spec, inputs, options, reply=lane_key(slot), job_id=job_id, lane=True)
        (receipt,) = self._broker.publish(slot, [job], self._limits)
        if receipt.outcome not in ("accepted", "known"):
            raise QueueFull(f"No room for another job of model {model}", receipt.retry_after_s)
        return receipt.job_id


class InferTask(Task):  # type: ignore[misc]  # Celery is untyped
    """`penstock.infer`: publishes the job and ends without a result. The result follows when the job ends.

    Attributes:
        ingress: set while a worker is open; None elsewhere, for example in a producer that imports the application.
    """

    name = CELERY_TASK
    Request = "penstock.workers.celery_bridge.task_ingress:InferRequest"
    throws = (Rejected,)
    ingress: TaskIngress | None = None

    def run(
        self,
        model: str,
        inputs: Mapping[str, object],
        tenant: str | None = None,
        priority: str = "normal",
        deadline_s: float | None = None,
        version: str | None = None,
        outputs: Sequence[str] = (),
    ) -> NoReturn:
        """Raises Rejected for a job that will never be accepted: the task fails with it."""
        if self.ingress is None:
            raise ConfigurationError(f"{CELERY_TASK} runs in a Penstock worker only. Expected send_task to its queue")
        try:
            self.ingress.admit(
                self.request.id,
                model=model,
                inputs=inputs,
                tenant=tenant,
                priority=priority,
                deadline_s=deadline_s,
                version=version,
                outputs=outputs,
            )
        except (QueueFull, BrokerUnavailable) as error:
            # The message goes back to the end of Celery's queue, which keeps it as safely as this process would.
            time.sleep(min(getattr(error, "retry_after_s", _LONGEST_WAIT_S), _LONGEST_WAIT_S))
            raise Reject(str(error), requeue=True) from None
        # Acknowledges the message, and stores no result yet.
        raise Ignore


class InferRequest(Request):  # type: ignore[misc]  # Celery is untyped
    """The request of a `penstock.infer` task. It keeps the payload out of events, `inspect` and log lines."""

    def __init__(self, message: Any, **options: Any) -> None:
        # `options` are Celery's own and differ between its versions.
        try:
            super().__init__(message, **options)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            # Celery catches InvalidTaskError and drops the message; any other error would end the worker.
            raise InvalidTaskError(f"not a task message: {type(error).__name__}") from None
        model = self._kwargs.get("model") if isinstance(self._kwargs, dict) else None
        self._argsrepr = self._request_dict["argsrepr"] = "()"
        self._kwargsrepr = self._request_dict["kwargsrepr"] = repr({"model": str(model)[:64]})

    def info(self, safe: bool = False) -> dict[str, Any]:
        """Celery's facts about the request, always without the arguments."""
        shown: dict[str, Any] = super().info(safe=True)
        return shown
