"""Celery's `send_task` as a way to submit jobs: the task endpoint.

    task message -- InferRequest --> InferTask -- TaskIngress --> request kept, job <model>.<task id> --> acknowledged

After that it is a job like any other; task_results.py ends the task with it. A crash before the acknowledgement makes
Celery deliver the message again, which changes nothing: the broker accepts a job id once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NoReturn, TypeGuard, cast

from celery import Task
from celery.app.task import Context
from celery.exceptions import Ignore, InvalidTaskError, Reject
from celery.utils.time import maybe_iso8601, maybe_make_aware
from celery.worker.request import Request

from penstock.registry.admission import JobBuilder, SpecCache, SubmitOptions
from penstock.registry.broker.base import Limits, ProducerEnd
from penstock.registry.envelope import TRACEPARENT
from penstock.registry.errors import (
    BrokerUnavailable,
    ConfigurationError,
    Forbidden,
    InvalidInput,
    QueueFull,
    Rejected,
)
from penstock.registry.queues import CELERY_TASK, PriorityName, lane_key, parse_name, slot_of
from penstock.workers.celery_bridge.presentation import shown_name
from penstock.workers.celery_bridge.task_request import essence
from penstock.workers.celery_bridge.task_results import ANSWER_FIELDS

__all__ = ["InferRequest", "InferTask", "TaskIngress"]

_LEAST_DEADLINE_S: Final = 0.001
_MOST_DEADLINE_S: Final = 365 * 86_400.0
"""Later than the end of any job's lifetime."""
_LONGEST_WAIT_S: Final = 0.25
"""How long one task message may hold Celery's thread while its queue is full; remote control waits for as long."""


class TaskIngress:
    """Turns task messages into jobs, on Celery's thread.

    keep: keeps the request of a job's task until the job has ended. is_open: False refuses every task. Task messages
    carry no signature and no sealed inputs, so the settings close the endpoint where jobs must be signed or sealed.
    """

    def __init__(
        self,
        broker: ProducerEnd,
        builder: JobBuilder,
        specs: SpecCache,
        limits: Limits,
        keep: Callable[[str, Mapping[str, object]], None],
        *,
        is_open: bool,
    ) -> None:
        self._broker = broker
        self._builder = builder
        self._specs = specs
        self._limits = limits
        self._keep = keep
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
        endpoint: str | None = None,
        traceparent: str = "",
        request: Mapping[str, object] | None = None,
    ) -> str:
        """Publish the job `<model>.<task id>` and return its id. The same task id again is the same job.

        `inputs` are nested lists. request: what the message says besides; see task_request.essence. Raises Rejected
        for a job that cannot be accepted, now or later; QueueFull, which is a Rejected, for one that can be accepted
        later; and BrokerUnavailable.
        """
        if not self._is_open:
            raise Forbidden(
                "send_task is off here: jobs must be signed or sealed by their sender. Expected a Penstock client"
            )
        spec = self._specs.get(model, version, self._broker.spec)
        job_id = f"{spec.name}.{task_id}"
        slot = slot_of(job_id)
        if slot != spec.name:
            raise InvalidInput(f"Bad task id {task_id!r:.80}. Expected letters, digits, '_', ':' or '-'")
        # `build` checks the name of the priority: a task may bring any value.
        named = cast(PriorityName, priority)
        options = SubmitOptions(named, deadline_s, tenant, version, outputs, traceparent, endpoint=endpoint)
        job = self._builder.build(spec, inputs, options, reply=lane_key(slot), job_id=job_id, lane=True)
        # Before the job, which may end at once.
        self._keep(job_id, request or {})
        (receipt,) = self._broker.publish(slot, [job], self._limits)
        if receipt.outcome not in ("accepted", "exists", "known"):
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
        *positional: object,
        model: str,
        inputs: Mapping[str, object] | None = None,
        tenant: str | None = None,
        priority: str = "normal",
        deadline_s: float | None = None,
        version: str | None = None,
        outputs: Sequence[str] = (),
        endpoint: str | None = None,
    ) -> NoReturn:
        """The only positional argument is what a chain, a link or a chord hands on: the inputs, or an answer of this
        task, whose outputs are the inputs then.

        Raises Rejected for a job that will never be accepted: the task fails with it.
        """
        if self.ingress is None:
            raise ConfigurationError(f"{CELERY_TASK} runs in a Penstock worker only. Expected send_task to its queue")
        _refuse_time_limits(self.request.timelimit)
        try:
            self.ingress.admit(
                self.request.id,
                model=model,
                inputs=_handed_on(positional, inputs),
                tenant=tenant,
                priority=priority,
                deadline_s=_earlier(deadline_s, self.request.expires),
                version=version,
                outputs=outputs,
                endpoint=endpoint,
                traceparent=_traceparent(self.request),
                request=essence(self.request),
            )
        except (QueueFull, BrokerUnavailable) as error:
            # The message goes back to the end of Celery's queue, which keeps it as safely as this process would.
            time.sleep(min(getattr(error, "retry_after_s", _LONGEST_WAIT_S), _LONGEST_WAIT_S))
            raise Reject(str(error), requeue=True) from None
        # Acknowledges the message, and stores no result yet.
        raise Ignore


def _handed_on(positional: Sequence[object], inputs: Mapping[str, object] | None) -> Mapping[str, object]:
    """The inputs of a task. Raises InvalidInput."""
    if len(positional) > 1:
        raise InvalidInput(f"{len(positional)} positional arguments. Expected one at most, the inputs")
    if not positional:
        if inputs is None:
            raise InvalidInput("There are no inputs. Expected `inputs`, a mapping from input name to value")
        return inputs
    if inputs is not None:
        raise InvalidInput("A positional argument and `inputs` are given. Expected one of them")
    (given,) = positional
    if isinstance(given, Mapping) and given.keys() == ANSWER_FIELDS:
        given = given["outputs"]
    # `build` refuses anything that is no mapping.
    return cast(Mapping[str, object], given)


def _refuse_time_limits(limits: Sequence[object] | None) -> None:
    if any(limits or ()):
        raise InvalidInput(
            "time_limit and soft_time_limit do not apply: a forward runs for many jobs. Expected no time limit; "
            "`timeout_s` in model.yaml limits a forward, `expires` limits the wait"
        )


def _traceparent(request: Context) -> str:
    """The trace context of the sender, which OpenTelemetry's instrumentation of Celery writes into the headers.

    Empty without one, and for any other text: no task fails for the sake of its trace.
    """
    headers = request.headers if isinstance(request.headers, Mapping) else {}
    sent = getattr(request, "traceparent", None) or headers.get("traceparent")
    return sent if isinstance(sent, str) and TRACEPARENT.fullmatch(sent) else ""


def _earlier(deadline_s: float | None, expires: object) -> float | None:
    """The seconds until the earlier one of the task's deadline and Celery's `expires`."""
    if expires is None:
        return deadline_s
    left_s: float = (maybe_make_aware(maybe_iso8601(expires)) - datetime.now(UTC)).total_seconds()
    # Celery has revoked what expired before. A task that expires at this moment expires as a job.
    left_s = max(_LEAST_DEADLINE_S, min(left_s, _MOST_DEADLINE_S))
    if deadline_s is None:
        return left_s
    # `build` refuses a deadline that is no number.
    return min(deadline_s, left_s) if isinstance(deadline_s, int | float) else deadline_s


class InferRequest(Request):  # type: ignore[misc]  # Celery is untyped
    """The request of a `penstock.infer` task. It keeps the payload out of events, `inspect` and log lines.

    For monitors the task is its job: it has the job's name, and events.py reports its start and its end.
    """

    name: str

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
        if self.name == CELERY_TASK and _is_name(model):
            self.name = shown_name(model)

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Celery's pool takes the task to publish its job: neither is running yet, so nothing is counted or sent."""
        self.worker_pid = pid

    def info(self, safe: bool = False) -> dict[str, Any]:
        """Celery's facts about the request, always without the arguments."""
        shown: dict[str, Any] = super().info(safe=True)
        return shown


def _is_name(model: object) -> TypeGuard[str]:
    try:
        parse_name("model", model)
    except InvalidInput:
        return False
    return True
