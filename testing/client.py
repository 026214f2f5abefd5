"""The blocking client of models in this process; `Client.in_memory` makes it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from penstock.producers.client import Client
from penstock.producers.replies import ReplyReader
from penstock.registry.admission import SpecCache
from penstock.registry.errors import UnknownModel
from penstock.registry.package import ModelSpec
from penstock.registry.settings import Settings
from penstock.testing.model import Served
from penstock.testing.worker import InMemoryWorker, InParent

__all__ = ["InMemoryClient", "ServedSpecs"]


class InMemoryClient(Client):
    """A Client with a broker and a worker of its own, on threads of this process. `close` ends them."""

    _broker: Any
    _reader: Any
    """A ClientEnd in the place of a connection to Redis, and its reader; in a forked child InParent for both."""

    def __init__(
        self, models: Mapping[str, Served], *, tenant: str | None = None, settings: Settings | None = None
    ) -> None:
        settings = settings or Settings.load()
        self._worker = InMemoryWorker(models, settings)
        super().__init__("", tenant=tenant, settings=settings)
        self._specs = ServedSpecs(self._worker, settings)
        weakref.finalize(self, self._worker.abandon).atexit = False

    def close(self) -> None:
        """Ends the worker and its threads. Its running jobs are asked to stop; waiting ones end with it."""
        super().close()
        self._worker.close()

    def _connect(self, url: str, timeout_s: float, result_ttl_ms: int) -> None:
        self._broker = self._worker.connect()
        self._reader = ReplyReader(self._broker)

    def _leave_parent(self) -> None:
        self._worker.forget()
        self._broker = self._reader = InParent()


class ServedSpecs(SpecCache):
    """The specs of the models of one worker in memory. No other model is known: its jobs would wait for ever."""

    def __init__(self, worker: InMemoryWorker, settings: Settings) -> None:
        super().__init__(settings.inference.repo_root)
        self._worker = worker

    def store(self, model: str, found: bytes | None, version: str = "") -> ModelSpec:
        """See SpecCache.store."""
        if (undeclared := self._worker.undeclared.get(model)) is not None and not version:
            return undeclared
        if found is None:
            reference = f"{model}/{version}" if version else model
            raise UnknownModel(f"Unknown model {reference!r:.80}. Expected one of: {', '.join(self._worker.models)}")
        return super().store(model, found, version)
