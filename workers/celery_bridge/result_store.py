"""The end of a Celery task: its followers are sent and its result is stored, by Celery's own functions.

    result -- link, then chain --> their queues -- mark_as_done --> result backend --> chord counter --> chord body
    failure, revocation -- mark_as_failure, mark_as_revoked --> result backend --> chord, rest of the chain, errbacks

The order is that of `celery.app.trace`. A call that raises may be repeated: the same result is stored again, and a
chord counts a task once, but links and errbacks are sent again. A follower that cannot be sent fails the task, as in
Celery; while Celery's broker or its result backend is away, the call raises instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import redis
from celery import Celery, group
from celery.app.task import Context
from celery.canvas import maybe_signature
from kombu.exceptions import OperationalError

from penstock.registry.errors import JobFailed

__all__ = ["CeleryResultStore", "TaskResultBackend"]

_AWAY: Final = (OperationalError, redis.RedisError, OSError)
"""What kombu and the result backend raise while their server is away."""

Request = Mapping[str, Any]
"""See task_request.essence."""

logger = logging.getLogger("penstock.server")


class TaskResultBackend(Protocol):
    """Ends tasks for their senders. `request` is what the message said of the task; None: store the result only."""

    def succeeded(self, task_id: str, result: dict[str, Any], request: Request | None) -> None:
        """The task ended with `result`, plain data."""

    def failed(self, task_id: str, error: Exception, request: Request | None) -> None:
        """The task failed."""

    def revoked(self, task_id: str, reason: str, request: Request | None) -> None:
        """The task was withdrawn before it ran."""


class CeleryResultStore:
    """Celery's result backend, for tasks whose jobs ended after their message was acknowledged."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def succeeded(self, task_id: str, result: dict[str, Any], request: Request | None) -> None:
        """Make `AsyncResult.get` return `result`, which is plain data, and send it to the followers."""
        context = _context(request)
        try:
            self._send_followers(task_id, result, context)
        except _AWAY:
            raise
        except Exception as error:
            # The signatures come from the message: anything may be wrong with them.
            logger.error("The followers of a Celery task cannot be sent: %s", type(error).__name__)
            self.failed(task_id, error, request)
            return
        self._end(lambda known: self._app.backend.mark_as_done(task_id, result, request=known), context)

    def failed(self, task_id: str, error: Exception, request: Request | None) -> None:
        """Make `AsyncResult.get` raise an exception with the class name and the text of `error`; call the errbacks.

        `AsyncResult.traceback` is the traceback of the model; where it stays in the worker, the model's last frame.
        """
        context = _context(request)
        is_stored = not context.ignore_result
        self._end(
            lambda known: self._app.backend.mark_as_failure(
                task_id, error, traceback=_traceback_of(error), request=known, store_result=is_stored
            ),
            context,
        )

    def revoked(self, task_id: str, reason: str, request: Request | None) -> None:
        """Make `AsyncResult.get` raise Celery's TaskRevokedError."""
        context = _context(request)
        is_stored = not context.ignore_result
        self._end(
            lambda known: self._app.backend.mark_as_revoked(task_id, reason, request=known, store_result=is_stored),
            context,
        )

    def _send_followers(self, task_id: str, result: dict[str, Any], context: Context) -> None:
        relation = {"parent_id": task_id, "root_id": context.root_id or task_id}
        for signature in self._links(context.callbacks or ()):
            context.children.append(signature.apply_async((result,), **relation))
        if context.chain:
            *rest, following = context.chain
            step = maybe_signature(following, app=self._app)
            context.children.append(step.apply_async((result,), chain=rest, **relation))

    def _links(self, callbacks: Sequence[Any]) -> list[Any]:
        """The callbacks as Celery sends them: each group by itself, the others as one group."""
        signatures = [maybe_signature(callback, app=self._app) for callback in callbacks]
        if len(signatures) <= 1:
            return signatures
        groups = [each for each in signatures if isinstance(each, group)]
        others = [each for each in signatures if not isinstance(each, group)]
        return [*groups, group(others, app=self._app)] if others else groups

    def _end(self, mark: Callable[[Context | None], object], context: Context) -> None:
        """Store the outcome. When the rest of the request cannot be followed, the outcome is stored all the same."""
        try:
            mark(context)
        except _AWAY:
            raise
        except Exception as error:
            logger.error("The request of a Celery task cannot be followed: %s", type(error).__name__)
            mark(None)


def _traceback_of(error: Exception) -> str | None:
    if not isinstance(error, JobFailed):
        return None
    place = f"Traceback (the last frame of the model):\n  {error.where}\n{error}" if error.where else None
    return error.traceback or place


def _context(request: Request | None) -> Context:
    return Context(request or {}, called_directly=False)
