"""Signed control commands to workers, through Celery's remote control, and the workers' replies.

Command -> signed with the operator's key -> broadcast `penstock_models` -> a worker's CommandVerifier -> its reply
Request -> in a Command, sent again until it is done -> a worker's OperatorRpcServer -> its signed response
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
from penstock.registry.broker.broker_url import BrokerAddress, parse_broker_url
from penstock.registry.broker.redis_refusals import final
from penstock.registry.celery_url import celery_url
from penstock.registry.control import CONTROL_COMMAND, Command
from penstock.registry.errors import BrokerUnavailable, ConfigurationError, ModelNotReady, UndecodableEnvelope
from penstock.registry.settings import Settings
from penstock.registry.signed import Signer

__all__ = ["ControlClient"]

_TIMEOUT_S: Final = 5.0
_ROUND_S: Final = 1.0
_POLL_S: Final = (0.05, 1.0)
"""The first pause between two polls of a request, and the longest: each poll is a round trip through the broker."""
_CONNECTION: Final = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S, "max_retries": 0}


class ControlClient:
    """Sends signed commands of one operator. Connects with the first one."""

    def __init__(self, settings: Settings, sign: Signer) -> None:
        self._sign = sign
        self._keyring = settings.keyring
        self._address = _redis_address(settings.celery_url or "")
        self._app = Celery("penstock", broker=celery_url(settings.celery_url or ""), set_as_current=False)
        self._app.conf.update(
            broker_transport_options=_CONNECTION,
            broker_connection_timeout=_TIMEOUT_S,
            task_serializer="json",
            accept_content=["json"],
        )

    def send(self, command: Command, workers: Sequence[str], timeout_s: float = _TIMEOUT_S) -> dict[str, str]:
        """Send a command and return the refusals by worker. A missing reply is a refusal. Raises BrokerUnavailable."""
        refusals = dict.fromkeys(workers, _no_reply(timeout_s))
        replies = self._collect_replies(command, workers, timeout_s)
        refusals.update((worker, str(reply.get("error", ""))) for worker, reply in replies.items())
        return {worker: problem for worker, problem in refusals.items() if problem}

    def notify(self, command: Command, workers: Sequence[str]) -> None:
        """Send a command without waiting for replies. Raises BrokerUnavailable."""
        self._broadcast(command, workers)

    def call(self, request: operator_rpc.Request, worker: str, kind: Any, timeout_s: float = 300.0) -> Any:
        """Run a request in a worker, and return its result as `kind`.

        Raises the error that the worker raised; ModelNotReady when the worker refuses, does not reply or takes too
        long; BrokerUnavailable; Corrupt for a response that is not signed with the signing keys of this process.
        """
        command = Command("rpc", request_id=secrets.token_hex(8), body=operator_rpc.encode(request))
        deadline = time.monotonic() + timeout_s
        pause_s, longest_s = _POLL_S
        while not (response := self._response(command, worker)).is_done:
            if time.monotonic() > deadline:
                raise ModelNotReady(f"{worker} has not finished within {timeout_s:g} s; it continues")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        return response.read(kind)

    def find_worker(self, worker: str | None = None, timeout_s: float = _TIMEOUT_S) -> str:
        """The name of a worker that listens for commands: this one, or any.

        Raises ModelNotReady with the list of listening workers when the time is over; BrokerUnavailable.
        """
        deadline = time.monotonic() + timeout_s
        destination = None if worker is None else [worker]
        while time.monotonic() < deadline:
            if found := self._ping(destination, limit=1):
                return found[0]
        subject = "No worker" if worker is None else f"No worker {worker[:80]!r}"
        listening = ", ".join(self._ping(None)) or "none"
        raise ModelNotReady(f"{subject} listens on Celery's broker. Expected one of: {listening}")

    def close(self) -> None:
        """Close the connections."""
        self._app.close()

    def _response(self, command: Command, worker: str) -> operator_rpc.Response:
        replies = self._collect_replies(command, [worker], _TIMEOUT_S)
        reply = replies.get(worker, {"error": _no_reply(_TIMEOUT_S)})
        if "error" in reply:
            raise ModelNotReady(f"{worker}: {reply['error']}")
        sealed = reply.get("ok")
        if not isinstance(sealed, str):
            raise UndecodableEnvelope("not an RPC response")
        return operator_rpc.open_response(command.request_id, sealed, self._keyring)

    def _collect_replies(self, command: Command, workers: Sequence[str], timeout_s: float) -> dict[str, dict[str, Any]]:
        """The replies that arrive in time, by worker.

        A worker claims jobs shortly before its Celery listens for commands, so a command without a reply is repeated.
        """
        replies: dict[str, dict[str, Any]] = {}
        missing, deadline = list(workers), time.monotonic() + timeout_s
        while missing and time.monotonic() < deadline:
            options = {"reply": True, "timeout": _ROUND_S, "limit": len(missing)}
            for reply in self._broadcast(command, missing, **options) or ():
                replies.update((worker, each) for worker, each in reply.items() if worker in missing)
            missing = [worker for worker in missing if worker not in replies]
        return replies

    def _ping(self, workers: list[str] | None, **options: Any) -> list[str]:
        replies = self._reach(lambda: self._app.control.ping(destination=workers, timeout=_ROUND_S, **options))
        return sorted(name for reply in replies for name in reply)

    def _broadcast(self, command: Command, workers: Sequence[str], **options: Any) -> Any:
        sealed = {"command": command.addressed_to(workers).seal(self._sign)}
        return self._reach(
            lambda: self._app.control.broadcast(CONTROL_COMMAND, arguments=sealed, destination=list(workers), **options)
        )

    def _reach(self, call: Any) -> Any:
        try:
            return call()
        except (OperationalError, RedisError, OSError) as error:
            if self._address is not None and (refused := final(error, self._address)) is not None:
                text = str(refused).replace("PENSTOCK_REDIS_URL", "PENSTOCK_CELERY_URL")
                raise type(refused)(f"Celery's broker: {text}") from error
            raise BrokerUnavailable(f"Celery's broker does not answer ({type(error).__name__})") from error


def _redis_address(url: str) -> BrokerAddress | None:
    """The address of a broker that is Redis; None for the other ones that Celery knows."""
    try:
        return parse_broker_url(url)
    except ConfigurationError:
        return None


def _no_reply(timeout_s: float) -> str:
    return f"did not reply within {timeout_s:g} s"
