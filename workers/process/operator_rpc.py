"""Does errands: what operators without a way to the database or the broker ask of a worker (registry/operator_rpc.py).

    a signed Command, on Celery's thread -> OperatorRpcServer.attend -> a thread of its own -> registry, files, broker
    asked again, until it is done        -> the answer, sealed

A worker signs nothing of it: rows and active versions come with the operator's signature, and are checked before they
are written. It can do no errand that its own user, its role in the broker and its URL of the registry do not allow.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.registry import operator_rpc
from penstock.registry.broker.base import FleetEnd
from penstock.registry.control import Command
from penstock.registry.deployment import Deployment
from penstock.registry.envelope import Keyring
from penstock.registry.errors import ConfigurationError, Forbidden, InvalidInput, ModelNotReady, PenstockError
from penstock.registry.package import Package, load_package
from penstock.registry.settings import Settings
from penstock.registry.signed import Verifier

if TYPE_CHECKING:
    from penstock.registry.catalog.store import RegistryStore
    from penstock.registry.package.manifest import Manifest

__all__ = ["OperatorRpcServer"]

_PATIENCE_S: Final = 0.2
"""How long Celery's thread waits for an errand before it says that it is not done yet."""
_AT_ONCE: Final = 4
_REMEMBERED: Final = 256
_EXPORTS: Final = "exports"
_PLAIN: Final = re.compile(r"\w[\w.-]{0,127}\Z")

_log = logging.getLogger("penstock.server")


class OperatorRpcServer:
    """Does errands one after the other, or a few at a time where they take long. verify: the operators' signatures."""

    def __init__(self, settings: Settings, broker: FleetEnd, verify: Verifier | None) -> None:
        self._broker = broker
        self._verify = verify
        self._registry_url = settings.registry_url
        self._root = settings.inference.repo_root
        self._trusted_roots = settings.trusted_roots
        self._exports = settings.home / _EXPORTS
        self._keyring: Keyring = settings.keyring
        self._done: OrderedDict[str, Future[Any]] = OrderedDict()
        self._running = threading.Semaphore(_AT_ONCE)

    def handle(self, command: Command) -> str:
        """Begins the errand of a command, or looks for one that was begun; the sealed answer.

        Raises UndecodableEnvelope, and ModelNotReady when too many are under way.
        """
        begun = self._done.get(command.errand)
        if begun is None:
            begun = self._begin(command.errand, operator_rpc.decode(command.body))
        return operator_rpc.seal_answer(command.errand, _answer(begun), self._keyring)

    def _begin(self, key: str, errand: operator_rpc.Errand) -> Future[Any]:
        if not self._running.acquire(blocking=False):
            raise ModelNotReady(f"This worker does {_AT_ONCE} errands already. Expected another worker, or patience")
        _log.info("errand", extra={"errand": type(errand).__name__})
        future: Future[Any] = Future()
        self._done[key] = future
        if len(self._done) > _REMEMBERED:
            self._done.popitem(last=False)
        # A daemon: a worker that stops does not wait for a large package to be hashed.
        threading.Thread(target=self._run, args=(future, errand), name="operator-rpc", daemon=True).start()
        return future

    def _run(self, future: Future[Any], errand: operator_rpc.Errand) -> None:
        try:
            future.set_result(self._do(errand))
        except PenstockError as problem:
            future.set_exception(problem)
        except Exception:
            _log.exception("an errand failed", extra={"errand": type(errand).__name__})
            future.set_exception(PenstockError("The worker failed over this errand; its log says why"))
        finally:
            self._running.release()

    def _do(self, errand: operator_rpc.Errand) -> object:
        match errand:
            case operator_rpc.Names():
                return self._store.names()
            case operator_rpc.Read(names, newest):
                return self._store.read(names, newest)
            case operator_rpc.Enter(versions, transitions):
                self._enter(versions, transitions)
                return None
            case operator_rpc.Inspect(path):
                package = self._package(self._root / path)
                return operator_rpc.InspectedPackage(
                    package.spec.to_json(), str(package.folder), _hashed(package.manifest())
                )
            case operator_rpc.Rehash(source):
                return _hashed(self._package(Path(source)).manifest())
            case operator_rpc.Export():
                return self._export(errand)
            case operator_rpc.Models():
                return self._broker.models()
            case operator_rpc.Spec(slot, version):
                return self._broker.spec(slot, version)
            case operator_rpc.PutSpec(slot, spec, version):
                self._broker.put_spec(slot, spec, version)
                return None
            case operator_rpc.Actives(slots):
                return self._broker.actives(slots)
            case operator_rpc.Activate():
                return self._activate(errand)
            case operator_rpc.Workers():
                return self._broker.workers()

    @cached_property
    def _store(self) -> RegistryStore:
        # SQLAlchemy costs a third of a second and 30 MB, for the first operator who asks.
        from penstock.registry.catalog.store import SqlStore

        return SqlStore(self._registry_url)

    def _activate(self, errand: operator_rpc.Activate) -> bool:
        """Writes no decision that workers would not believe: it would keep them from answering."""
        Deployment.open(b"%d " % errand.epoch + errand.record, errand.slot, self._verify)
        return self._broker.activate(errand.slot, errand.epoch, errand.record, errand.version, errand.spec)

    def _enter(self, versions: tuple[dict[str, Any], ...], transitions: tuple[dict[str, Any], ...]) -> None:
        from penstock.registry.catalog.store import enter

        if self._verify is None:
            raise Forbidden("Errands are off here. Expected PENSTOCK_OPERATOR_PUBLIC_KEYS on the worker")
        enter(
            self._store,
            versions,
            transitions,
            verify=self._verify,
            rehash=lambda source: self._package(Path(source)).manifest(),
        )

    def _package(self, folder: Path) -> Package:
        return load_package(folder, self._trusted_roots)

    def _export(self, errand: operator_rpc.Export) -> operator_rpc.ExportedFile:
        from penstock.workers.runtime.exporter import export_package

        if not _PLAIN.match(errand.file):
            raise InvalidInput(
                f"{errand.file!r:.80} is no plain name. Expected one: the worker writes it into its folder of exports"
            )
        try:
            self._exports.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"The worker's folder of exports cannot be made ({error.strerror})") from None
        file = self._exports / errand.file
        package = self._package(Path(errand.source))
        differences = export_package(package, errand.content_hash, file, is_int8=errand.is_int8)
        return operator_rpc.ExportedFile(os.fspath(file), file.stat().st_size, differences)


def _answer(begun: Future[Any]) -> operator_rpc.Answer:
    try:
        return operator_rpc.Answer.of(begun.result(_PATIENCE_S))
    except PenstockError as problem:
        return operator_rpc.Answer.refusal(problem)
    except TimeoutError:
        return operator_rpc.Answer()


def _hashed(manifest: Manifest) -> operator_rpc.HashedFiles:
    return operator_rpc.HashedFiles(dict(manifest.files), dict(manifest.source_files), manifest.content_hash)
