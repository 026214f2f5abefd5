"""Signed orders to workers, through Celery's remote control, and what each of them answers.

Command -> signed with the operator's key -> broadcast `penstock_models` -> a worker's CommandVerifier -> its answer
Request -> in a Command, repeated until the response is there -> a worker's OperatorRpcServer -> its signed response
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from penstock.registry import operator_rpc
from penstock.registry.celery_url import celery_url
from penstock.registry.control import CONTROL_COMMAND, Command
from penstock.registry.errors import BrokerUnavailable, ModelNotReady, UndecodableEnvelope
from penstock.registry.settings import Settings
from penstock.registry.signed import Signer

__all__ = ["ControlClient"]

_TIMEOUT_S: Final = 5.0
_ROUND_S: Final = 1.0
_LOOK_S: Final = (0.05, 1.0)
"""The first pause between two looks at a request, and the longest: each look is a round through Celery's broker."""
_CONNECTION: Final = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S, "max_retries": 0}


class ControlClient:
    """Gives orders in the operator's name. Connects with the first one."""

    def __init__(self, settings: Settings, sign: Signer) -> None:
        self._sign = sign
        self._keyring = settings.keyring
        self._app = Celery("penstock", broker=celery_url(settings.celery_url or ""), set_as_current=False)
        self._app.conf.update(
            broker_transport_options=_CONNECTION,
            broker_connection_timeout=_TIMEOUT_S,
            task_serializer="json",
            accept_content=["json"],
        )

    def give(self, command: Command, workers: Sequence[str], timeout_s: float = _TIMEOUT_S) -> dict[str, str]:
        """The refusals, by worker; one that has not answered in time counts as one. Raises BrokerUnavailable."""
        refusals = dict.fromkeys(workers, _silence(timeout_s))
        said = self._ask(command, workers, timeout_s)
        refusals.update((worker, str(answer.get("error", ""))) for worker, answer in said.items())
        return {worker: problem for worker, problem in refusals.items() if problem}

    def notify(self, command: Command, workers: Sequence[str]) -> None:
        """Gives an order that nobody has to answer. Raises BrokerUnavailable."""
        self._broadcast(command, workers)

    def run(self, request: operator_rpc.Request, worker: str, kind: Any, timeout_s: float = 300.0) -> Any:
        """Has a worker run a request, and returns the value of its response, as `kind`.

        Raises what it raised there; ModelNotReady when the worker refuses, is silent or takes too long;
        BrokerUnavailable; Corrupt for an answer that no worker with the same signing keys gave.
        """
        command = Command("rpc", request_id=secrets.token_hex(8), body=operator_rpc.encode(request))
        deadline = time.monotonic() + timeout_s
        pause_s, longest_s = _LOOK_S
        while not (answer := self._answer(command, worker)).is_done:
            if time.monotonic() > deadline:
                raise ModelNotReady(f"{worker} has not finished within {timeout_s:g} s; it goes on")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        return answer.read(kind)

    def listener(self, worker: str | None = None, timeout_s: float = _TIMEOUT_S) -> str:
        """The name of a worker that listens for orders, of any or of this one.

        Raises ModelNotReady that lists who listens, when there is none within the time; BrokerUnavailable.
        """
        deadline = time.monotonic() + timeout_s
        destination = None if worker is None else [worker]
        while time.monotonic() < deadline:
            if on_heartbeat := self._ping(destination, limit=1):
                return on_heartbeat[0]
        who = "No worker" if worker is None else f"No worker {worker[:80]!r}"
        listening = ", ".join(self._ping(None)) or "none"
        raise ModelNotReady(f"{who} listens on Celery's broker. Expected one of: {listening}")

    def close(self) -> None:
        """Give the connections back."""
        self._app.close()

    def _answer(self, command: Command, worker: str) -> operator_rpc.Response:
        said = self._ask(command, [worker], _TIMEOUT_S).get(worker, {"error": _silence(_TIMEOUT_S)})
        if "error" in said:
            raise ModelNotReady(f"{worker}: {said['error']}")
        sealed = said.get("ok")
        if not isinstance(sealed, str):
            raise UndecodableEnvelope("not an RPC response")
        return operator_rpc.open_response(command.request_id, sealed, self._keyring)

    def _ask(self, command: Command, workers: Sequence[str], timeout_s: float) -> dict[str, dict[str, Any]]:
        """What each has answered in time.

        A worker takes jobs a moment before Celery listens for orders in it: those that are silent are asked again.
        """
        said: dict[str, dict[str, Any]] = {}
        silent, deadline = list(workers), time.monotonic() + timeout_s
        while silent and time.monotonic() < deadline:
            how = {"reply": True, "timeout": _ROUND_S, "limit": len(silent)}
            for answer in self._broadcast(command, silent, **how) or ():
                said.update((worker, each) for worker, each in answer.items() if worker in silent)
            silent = [worker for worker in silent if worker not in said]
        return said

    def _ping(self, workers: list[str] | None, **how: Any) -> list[str]:
        answers = self._tried(lambda: self._app.control.ping(destination=workers, timeout=_ROUND_S, **how))
        return sorted(name for answer in answers for name in answer)

    def _broadcast(self, command: Command, workers: Sequence[str], **how: Any) -> Any:
        order = {"command": command.addressed_to(workers).seal(self._sign)}
        return self._tried(
            lambda: self._app.control.broadcast(CONTROL_COMMAND, arguments=order, destination=list(workers), **how)
        )

    def _tried(self, step: Any) -> Any:
        try:
            return step()
        except (OperationalError, RedisError, OSError) as error:
            raise BrokerUnavailable(f"Celery's broker does not answer ({type(error).__name__})") from error


def _silence(timeout_s: float) -> str:
    return f"gave no answer within {timeout_s:g} s"
