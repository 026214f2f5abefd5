"""Wanted and loaded versions, brought together: what operators want lies in Redis, and every worker sweeps for it.

    operator -- want, unwant --> `<prefix>:wanted`, a signed record per version
    worker   -- Reconciler.sweep, every few seconds --> loads what is new there, lets go of what is not wanted any more
             -- `<prefix>:loaded`, what it has --> whoever looks

A record is acted on once, when it is new: a version that cannot be loaded is not tried for ever, and asking again
writes a new record. A store that is away or was emptied unloads nothing that answers jobs. Without a store each
worker keeps its own state, and is told by control commands what to load.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import msgspec
import redis

from penstock.registry.errors import BrokerUnavailable, Corrupt, UndecodableEnvelope
from penstock.registry.signed import Signer, Verifier, open_record, seal_record

__all__ = ["Host", "Reconciler", "StateStore", "Wish"]

_CONTEXT: Final = "wanted version"
_TIMEOUT_S: Final = 5.0
_LEAVE_S: Final = 1.0
"""How long a store that does not answer may keep a worker from its end."""

logger = logging.getLogger("penstock.server")


class Wish(msgspec.Struct, frozen=True, omit_defaults=True):
    """That a version of a model be loaded by the workers of that model, or be left to the jobs that name it."""

    model: str
    version: str
    is_wanted: bool = True
    content_hash: str = ""
    """What must lie under that version; empty: whatever does."""
    at: float = 0.0
    """Unix seconds: what makes a repeated wish a new one."""

    @property
    def reference(self) -> str:
        """`name/version`."""
        return f"{self.model}/{self.version}"

    def seal(self, sign: Signer | None) -> bytes:
        """The record, signed where there is a signer."""
        return seal_record(msgspec.json.encode(self), sign, _CONTEXT)

    @classmethod
    def open(cls, record: bytes, verify: Verifier | None) -> Wish:
        """Raises Corrupt for anything but a record, and for one that the operators did not sign."""
        try:
            return _decode(open_record(record, verify, _CONTEXT))
        except msgspec.MsgspecError as error:
            raise UndecodableEnvelope(f"the record of a wanted version: {error!s:.200}") from None


_decode = msgspec.json.Decoder(Wish).decode


class StateStore:
    """Model states in Redis, under one prefix. Calls raise BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self._redis: Any = client
        self._wanted = f"{prefix}:wanted"
        self._loaded = f"{prefix}:loaded"

    @classmethod
    def from_url(cls, url: str, prefix: str) -> StateStore:
        """Connects at the first call."""
        client = redis.Redis.from_url(url, protocol=2, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        return cls(client, prefix)

    def put(self, wish: Wish, sign: Signer | None = None) -> None:
        """Ask every worker of the model to load the version, or to let it go."""
        self._ask(lambda: self._redis.hset(self._wanted, wish.reference, wish.seal(sign)))

    def wishes(self) -> dict[str, bytes]:
        """Every record, by `name/version`."""
        found = self._ask(lambda: self._redis.hgetall(self._wanted))
        return {reference.decode(errors="replace"): record for reference, record in found.items()}

    def report(self, worker: str, loaded: Mapping[str, object]) -> None:
        """Say what a worker has."""
        self._ask(lambda: self._redis.hset(self._loaded, worker, json.dumps({"at": time.time(), **loaded})))

    def withdraw(self, worker: str) -> None:
        """A worker has left."""
        self._ask(lambda: self._redis.hdel(self._loaded, worker))

    def loaded(self) -> dict[str, dict[str, Any]]:
        """What the workers have said, by name."""
        found = self._ask(lambda: self._redis.hgetall(self._loaded))
        return {worker.decode(errors="replace"): json.loads(report) for worker, report in found.items()}

    def close(self) -> None:
        """Give the connections back."""
        self._redis.close()

    def _ask(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except (redis.RedisError, OSError) as error:
            raise BrokerUnavailable(f"The store of model states does not answer ({type(error).__name__})") from error


class Host(Protocol):
    """A worker, as the reconciler sees it."""

    def may_serve(self, name: str) -> bool:
        """Whether the model is one that this worker serves."""

    def want(self, name: str, label: str, *, content_hash: str = "") -> None:
        """Load a version and keep it."""

    def let_go_of(self, name: str, label: str, *, content_hash: str = "") -> None:
        """Unload a version once it is idle, unless it answers; jobs that name it may have this content loaded."""

    def versions(self) -> Mapping[str, object]:
        """What is loaded here, as plain data."""


class Reconciler:
    """Sweeps every `interval_s` seconds, on a thread of its own, or when nudged."""

    def __init__(
        self, store: StateStore, host: Host, *, worker: str, interval_s: float, verify: Verifier | None = None
    ) -> None:
        self._store = store
        self._host = host
        self._worker = worker
        self._interval_s = interval_s
        self._verify = verify
        self._followed: dict[str, bytes] = {}
        self._is_nudged = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        """Begins with a sweep."""
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Begins no further sweep; does not wait for the one that is under way."""
        self._is_stopping = True
        self._is_nudged.set()

    def stop(self) -> None:
        """Ends, and takes back what it had reported, unless the store does not answer."""
        self.ask_to_stop()
        if self._thread.ident is not None:
            self._thread.join(_LEAVE_S)
            if self._thread.is_alive():
                logger.warning("the report of loaded models stays: the store of model states does not answer")

    def nudge(self) -> None:
        """Sweep now."""
        self._is_nudged.set()

    def sweep(self) -> None:
        """Act on what is new, then say what is loaded. Raises BrokerUnavailable, and then nothing was unloaded."""
        wishes = self._store.wishes()
        for reference, record in wishes.items():
            if self._followed.get(reference) != record:
                self._follow(reference, record)
        self._followed = wishes
        self._store.report(self._worker, {"models": self._host.versions()})

    def _follow(self, reference: str, record: bytes) -> None:
        try:
            wish = Wish.open(record, self._verify)
        except Corrupt as error:
            logger.error("a wanted version is not believed: %s", error, extra={"reference": reference[:160]})
            return
        if wish.reference != reference or not self._host.may_serve(wish.model):
            return
        if wish.is_wanted:
            self._host.want(wish.model, wish.version, content_hash=wish.content_hash)
        else:
            self._host.let_go_of(wish.model, wish.version, content_hash=wish.content_hash)

    def _run(self) -> None:
        while not self._is_stopping:
            self._try(self.sweep, "models are not reconciled")
            self._is_nudged.wait(self._interval_s)
            # Afterwards, or the nudge of a stop that came meanwhile would be lost.
            self._is_nudged.clear()
        self._try(lambda: self._store.withdraw(self._worker), "the report of loaded models stays")
        self._store.close()

    def _try(self, step: Callable[[], None], otherwise: str) -> None:
        try:
            step()
        except BrokerUnavailable as error:
            logger.warning("%s: %s", otherwise, error)
