"""Signed orders to workers, through Celery's remote control, and what each of them answers.

Command -> signed with the operator's key -> broadcast `penstock_models` -> a worker's Obedience -> its answer
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from registry.control import CONTROL_COMMAND, Command
from registry.errors import BrokerUnavailable
from registry.settings import Settings
from registry.signed import Signer
from workers.boot import celery_url

__all__ = ["Orders"]

_TIMEOUT_S: Final = 5.0
_ROUND_S: Final = 1.0
_CONNECTION: Final = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S, "max_retries": 0}


class Orders:
    """Gives orders in the operator's name. Connects with the first one."""

    def __init__(self, settings: Settings, sign: Signer) -> None:
        self._sign = sign
        self._app = Celery("penstock", broker=celery_url(settings.celery_url or ""), set_as_current=False)
        self._app.conf.update(
            broker_transport_options=_CONNECTION,
            broker_connection_timeout=_TIMEOUT_S,
            task_serializer="json",
            accept_content=["json"],
        )

    def give(self, command: Command, workers: Sequence[str], timeout_s: float = _TIMEOUT_S) -> dict[str, str]:
        """The refusals, by worker; one that has not answered in time counts as one. Raises BrokerUnavailable.

        A worker takes jobs a moment before Celery listens for orders in it: those that are silent are asked again.
        """
        refusals = dict.fromkeys(workers, f"gave no answer within {timeout_s:g} s")
        silent, deadline = list(workers), time.monotonic() + timeout_s
        while silent and time.monotonic() < deadline:
            how = {"reply": True, "timeout": _ROUND_S, "limit": len(silent)}
            for answer in self._broadcast(command.again(), silent, **how) or ():
                refusals.update((worker, str(said.get("error", ""))) for worker, said in answer.items())
                silent = [worker for worker in silent if worker not in answer]
        return {worker: problem for worker, problem in refusals.items() if problem}

    def mention(self, command: Command, workers: Sequence[str]) -> None:
        """Gives an order that nobody has to answer. Raises BrokerUnavailable."""
        self._broadcast(command, workers)

    def close(self) -> None:
        """Give the connections back."""
        self._app.close()

    def _broadcast(self, command: Command, workers: Sequence[str], **how: Any) -> Any:
        order = {"command": command.seal(self._sign)}
        try:
            return self._app.control.broadcast(CONTROL_COMMAND, arguments=order, destination=list(workers), **how)
        except (OperationalError, RedisError, OSError) as error:
            raise BrokerUnavailable(f"Celery's broker does not answer ({type(error).__name__})") from error
