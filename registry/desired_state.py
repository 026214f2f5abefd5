"""The versions that operators want loaded, and the versions that workers have loaded: records in Redis.

operator   -- StateStore.put     --> `<prefix>:wanted`, one signed record per version --> workers
worker     -- StateStore.report  --> `<prefix>:loaded`, one report per worker         --> operators
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import msgspec
import redis

from penstock.registry.broker.broker_url import BrokerAddress, parse_broker_url
from penstock.registry.broker.foreign_keys import is_foreign
from penstock.registry.broker.redis_connection import connection_options, quarantine_keys
from penstock.registry.broker.redis_refusals import final
from penstock.registry.errors import BrokerDamaged, BrokerUnavailable, UndecodableEnvelope
from penstock.registry.signed import Signer, Verifier, open_record, seal_record

__all__ = ["DesiredVersion", "StateStore"]

_CONTEXT: Final = "wanted version"
_TIMEOUT_S: Final = 5.0


class DesiredVersion(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request to the workers of a model: load a version, or keep it only for jobs that name it."""

    model: str
    version: str
    is_wanted: bool = True
    content_hash: str = ""
    """The content that the version must have; empty: any."""
    at: float = 0.0
    """Unix seconds. They make a repeated request a new one."""

    @property
    def reference(self) -> str:
        """`name/version`."""
        return f"{self.model}/{self.version}"

    def seal(self, sign: Signer | None) -> bytes:
        """The record, signed if there is a signer."""
        return seal_record(msgspec.json.encode(self), sign, _CONTEXT)

    @classmethod
    def open(cls, record: bytes, verify: Verifier | None) -> DesiredVersion:
        """The request of a record. Raises Corrupt unless it is a record that the operators have signed."""
        try:
            return _decode(open_record(record, verify, _CONTEXT))
        except msgspec.MsgspecError as error:
            raise UndecodableEnvelope(f"the record of a wanted version: {error!s:.200}") from None


_decode = msgspec.json.Decoder(DesiredVersion).decode


class StateStore:
    """Model states in Redis, under one prefix. Calls raise BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: redis.Redis, prefix: str, address: BrokerAddress) -> None:
        self._redis: Any = client
        self._address = address
        self._wanted = f"{prefix}:wanted"
        self._loaded = f"{prefix}:loaded"

    @classmethod
    def from_url(cls, url: str, prefix: str) -> Self:
        """From the URL of Redis. Connects with the first call. Raises ConfigurationError for an unusable URL."""
        client = redis.Redis.from_url(url, **connection_options(_TIMEOUT_S))
        return cls(client, prefix, parse_broker_url(url))

    def put(self, desired_version: DesiredVersion, sign: Signer | None = None) -> None:
        """Ask every worker of the model to load or to unload the version."""
        record = desired_version.seal(sign)
        self._ask(self._wanted, lambda: self._redis.hset(self._wanted, desired_version.reference, record))

    def desired(self) -> dict[str, bytes]:
        """All records, by `name/version`."""
        found = self._ask(self._wanted, lambda: self._redis.hgetall(self._wanted))
        return {reference.decode(errors="replace"): record for reference, record in found.items()}

    def report(self, worker: str, loaded: Mapping[str, object]) -> None:
        """Publish the loaded versions of a worker."""
        report = json.dumps({"at": time.time(), **loaded})
        self._ask(self._loaded, lambda: self._redis.hset(self._loaded, worker, report))

    def withdraw(self, worker: str) -> None:
        """Delete the report of a worker."""
        self._ask(self._loaded, lambda: self._redis.hdel(self._loaded, worker))

    def loaded(self) -> dict[str, dict[str, Any]]:
        """The reports of workers, by name."""
        found = self._ask(self._loaded, lambda: self._redis.hgetall(self._loaded))
        return {worker.decode(errors="replace"): json.loads(report) for worker, report in found.items()}

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _ask(self, key: str, step: Callable[[], Any]) -> Any:
        """One step on one hash. A foreign key in its place is quarantined first."""
        try:
            try:
                return step()
            except redis.ResponseError as error:
                if not is_foreign(error):
                    raise
                quarantine_keys(self._redis, {key: "hash"})
                return step()
        except (redis.RedisError, OSError) as error:
            if is_foreign(error.__context__):
                raise BrokerDamaged(
                    f"{key} ({self._address}) holds another type than a hash, and this user may not quarantine it. An "
                    "operator does: `penstock models load` or `unload`"
                ) from error
            away = BrokerUnavailable(f"The store of model states does not answer ({type(error).__name__})")
            raise final(error, self._address) or away from error
