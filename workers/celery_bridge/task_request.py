"""What Celery's message says of a task beside its arguments. It is kept from the acknowledgement to the job's end.

    message -- essence --> keep --> `{model}:task:<task id>` -- find --> followers, chord, errbacks --> settled

`keep` comes before the job is published, so every accepted job of a task has its request. `settled` leaves an empty
mark for as long as results live: a message that Celery delivers again does not put the request back. With signing keys
the request is signed, because a worker sends what it names to Celery's queues.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from typing import Any, Final

import redis
from celery.app.task import Context
from kombu.utils import json as kombu_json

from penstock.registry.broker.foreign_keys import is_foreign
from penstock.registry.broker.redis_connection import quarantine_keys
from penstock.registry.envelope import Keyring
from penstock.registry.errors import BadSignature, BrokerUnavailable, UndecodableEnvelope
from penstock.registry.queues import key_type, task_request_key

__all__ = ["TaskRequests", "essence"]

_FIELDS: Final = (
    *("id", "task", "root_id", "parent_id", "group", "group_index", "shadow", "retries", "expires", "hostname"),
    *("callbacks", "errbacks", "chain", "chord", "ignore_result", "reply_to", "correlation_id", "delivery_info"),
    *("headers", "stamps", "stamped_headers", "replaced_task_nesting", "origin"),
)
"""The attributes of Celery's Context that its functions read at the end of a task; no arguments."""
_PURPOSE: Final = b"penstock task request 1\n"
"""Begins every signed text, so that the signature of a job cannot pass for one of a request."""
_SETTLED: Final = b""
_json: Any = kombu_json
"""Celery's messages hold types beyond JSON's, such as dates: kombu reads and writes them."""


def essence(request: Context) -> dict[str, Any]:
    """The fields of a task's request that its end needs, without those that are unset."""
    fields = {name: getattr(request, name, None) for name in _FIELDS}
    return {name: value for name, value in fields.items() if value not in (None, [], {})}


class TaskRequests:
    """The kept requests, in the broker's Redis. Thread-safe.

    keep_ms: how long a request is kept for a job that does not end. settled_ms: how long the mark stays.
    """

    def __init__(self, client: redis.Redis, keyring: Keyring, *, keep_ms: int, settled_ms: int) -> None:
        self._redis = client
        self._keyring = keyring
        self._keep_ms = keep_ms
        self._settled_ms = settled_ms

    def keep(self, job_id: str, request: Mapping[str, Any]) -> None:
        """Keep the request of a task. The first one of a job stays. Raises BrokerUnavailable."""
        text = _json.dumps(request).encode()
        key_id = self._keyring.signing_id
        sealed = b"\n".join((key_id.encode(), self._mac(key_id, job_id, text) if key_id else b"", text))
        try:
            self._redis.set(task_request_key(job_id), sealed, nx=True, px=self._keep_ms)
        except redis.RedisError as error:
            raise BrokerUnavailable(f"The request of a task cannot be kept: {type(error).__name__}") from None

    def find(self, job_ids: Sequence[str]) -> list[bytes | None]:
        """The kept bytes of each job of one model, for `opened`; None where there is nothing left to do."""
        if not job_ids:
            return []
        found: Any = self._redis.mget([task_request_key(job_id) for job_id in job_ids])
        return [kept or None for kept in found]

    def opened(self, job_id: str, kept: bytes) -> dict[str, Any]:
        """The request. Raises BadSignature, UndecodableEnvelope."""
        key_id, _, signed = kept.partition(b"\n")
        mac, _, text = signed.partition(b"\n")
        if key_id or self._keyring.signs:
            name = key_id.decode(errors="replace")
            if name not in self._keyring.job_macs or not hmac.compare_digest(mac, self._mac(name, job_id, text)):
                raise BadSignature("the request of a Celery task lacks the signature of a key that this worker has")
        try:
            request = _json.loads(text)
        except (ValueError, TypeError, RecursionError):
            request = None
        if not isinstance(request, dict):
            raise UndecodableEnvelope("the request of a Celery task is not a JSON object")
        return request

    def settled(self, job_id: str) -> None:
        """The task has ended, and its followers are sent."""
        key = task_request_key(job_id)
        try:
            # With GET, SET refuses a key of another type: it is quarantined and not overwritten.
            self._redis.set(key, _SETTLED, px=self._settled_ms, get=True)
        except redis.ResponseError as error:
            if not is_foreign(error):
                raise
            quarantine_keys(self._redis, {key: key_type(key)})
            self._redis.set(key, _SETTLED, px=self._settled_ms)

    def _mac(self, key_id: str, job_id: str, text: bytes) -> bytes:
        signed = b"".join((_PURPOSE, job_id.encode(), b"\n", text))
        return self._keyring.job_macs[key_id].digest(signed).hex().encode()
