"""Runs operators' RPC requests in a worker; see registry/operator_rpc.py.

    a signed Command, on Celery's thread -> OperatorRpcServer.handle -> a thread of its own -> registry, files, broker
    the same command again, until done   -> the signed response

Rows and active versions come with the operator's signature; the worker checks it before it writes them, and signs none
itself. A request can do nothing that the worker's user, broker role and registry URL do not allow.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.registry import operator_rpc
from penstock.registry.broker.base import FleetEnd
from penstock.registry.control import Command
from penstock.registry.deployment import Deployment
from penstock.registry.envelope import Keyring
from penstock.registry.errors import ConfigurationError, Forbidden, InvalidInput, ModelNotReady, PenstockError
from penstock.registry.package import ModelSpec, Package, load_package
from penstock.registry.settings import Settings
from penstock.registry.signed import Verifier

if TYPE_CHECKING:
    from penstock.registry.catalog.store import RegistryStore
    from penstock.registry.package.manifest import Manifest

__all__ = ["OperatorRpcServer"]

_WAIT_S: Final = 0.2
"""How long Celery's thread waits for a request before it responds "not done"."""
_AT_ONCE: Final = 4
_REMEMBERED: Final = 256
_EXPORTS: Final = "exports"
_PLAIN: Final = re.compile(r"\w[\w.-]{0,127}\Z")

logger = logging.getLogger("penstock.server")


class _Begun(NamedTuple):
    """A request that runs or has ended. body_hash: SHA-256 of its body."""

    body_hash: bytes
    value: Future[Any]


class OperatorRpcServer:
    """Runs at most four requests at a time. verify: checks the operators' signatures."""

    def __init__(self, settings: Settings, broker: FleetEnd, verify: Verifier | None) -> None:
        self._broker = broker
        self._verify = verify
        self._registry_url = settings.registry_url
        self._root = settings.inference.repo_root
        self._trusted_roots = settings.trusted_roots
        self._exports = settings.home / _EXPORTS
        self._keyring: Keyring = settings.keyring
        self._begun: OrderedDict[str, _Begun] = OrderedDict()
        self._running = threading.Semaphore(_AT_ONCE)

    def handle(self, command: Command) -> str:
        """Begins the request of a command, or finds it if it has begun; returns the signed response.

        Raises UndecodableEnvelope, InvalidInput for an id that another request has, and ModelNotReady when too many
        requests run.
        """
        body_hash = hashlib.sha256(command.body).digest()
        begun = self._begun.get(command.request_id)
        if begun is None:
            request = operator_rpc.decode(command.body)
            begun = self._begun[command.request_id] = _Begun(body_hash, self._begin(request))
            self._forget_oldest()
        elif begun.body_hash != body_hash:
            # Its operator would take the response to the other request for the response to this one.
            raise InvalidInput("This id belongs to another operator request. Expected a new id for each request")
        return operator_rpc.seal_response(command.request_id, _response(begun.value), self._keyring)

    def _begin(self, request: operator_rpc.Request) -> Future[Any]:
        if not self._running.acquire(blocking=False):
            raise ModelNotReady(
                f"This worker runs {_AT_ONCE} operator requests already. Expected another worker, or a later try"
            )
        logger.info("operator request", extra={"request": type(request).__name__})
        future: Future[Any] = Future()
        # A daemon thread: a worker that stops does not wait until a large package is hashed.
        thread = threading.Thread(target=self._run, args=(future, request), name="operator-rpc", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._running.release()
            raise ModelNotReady(
                "This worker can start no thread for an operator request. Expected another worker, or a later try"
            ) from None
        return future

    def _forget_oldest(self) -> None:
        """Of too many requests, the oldest that has ended: one that runs would begin again with the next command."""
        if len(self._begun) > _REMEMBERED:
            del self._begun[next(key for key, begun in self._begun.items() if begun.value.done())]

    def _run(self, future: Future[Any], request: operator_rpc.Request) -> None:
        try:
            future.set_result(self._do(request))
        except PenstockError as problem:
            future.set_exception(problem)
        except Exception:
            logger.exception("operator request failed", extra={"request": type(request).__name__})
            future.set_exception(PenstockError("The worker failed on this request. Its log has the reason"))
        finally:
            self._running.release()

    def _do(self, request: operator_rpc.Request) -> object:
        match request:
            case operator_rpc.Names():
                return self._store.names()
            case operator_rpc.Read(names, newest):
                return self._store.read(names, newest)
            case operator_rpc.Enter():
                self._enter(request)
                return None
            case operator_rpc.Inspect(path):
                package = self._package(self._root / path)
                return operator_rpc.InspectedPackage(
                    package.spec.to_json(), str(package.folder), _hashed(package.manifest())
                )
            case operator_rpc.Rehash(source):
                return _hashed(self._package(Path(source)).manifest())
            case operator_rpc.Export():
                return self._export(request)
            case operator_rpc.Models():
                return self._broker.models()
            case operator_rpc.Spec(slot, version):
                return self._broker.spec(slot, version)
            case operator_rpc.PutSpec(slot, spec, version):
                _check_spec(slot, spec, version)
                self._broker.put_spec(slot, spec, version)
                return None
            case operator_rpc.Actives(slots):
                return self._broker.actives(slots)
            case operator_rpc.Activate():
                return self._activate(request)
            case operator_rpc.Observations(slot, experiment):
                return self._broker.observations(slot, experiment)
            case operator_rpc.Ratings(slot, experiment):
                return self._broker.ratings(slot, experiment)
            case operator_rpc.Workers():
                return self._broker.workers()

    @cached_property
    def _store(self) -> RegistryStore:
        # SQLAlchemy costs a third of a second and 30 MB; the first request to the registry pays for it.
        from penstock.registry.catalog.store import SqlStore

        return SqlStore(self._registry_url)

    def _activate(self, request: operator_rpc.Activate) -> bool:
        """Refuses a record that workers would refuse: they would stop answering."""
        Deployment.open(b"%d " % request.epoch + request.record, request.slot, self._verify)
        _check_spec(request.slot, request.spec, request.version)
        return self._broker.activate(request.slot, request.epoch, request.record, request.version, request.spec)

    def _enter(self, change: operator_rpc.Enter) -> None:
        from penstock.registry.catalog.store import enter

        if self._verify is None:
            raise Forbidden(
                "Operator requests that write are off here. Expected PENSTOCK_OPERATOR_PUBLIC_KEYS on the worker"
            )
        enter(
            self._store,
            change.versions,
            change.transitions,
            change.experiments,
            change.policies,
            verify=self._verify,
            rehash=lambda source: self._package(Path(source)).manifest(),
        )

    def _package(self, folder: Path) -> Package:
        return load_package(folder, self._trusted_roots)

    def _export(self, request: operator_rpc.Export) -> operator_rpc.ExportedFile:
        from penstock.workers.runtime.exporter import export_package

        if not _PLAIN.match(request.file):
            raise InvalidInput(
                f"{request.file!r:.80} is no plain file name. Expected one, for a file in the worker's export folder"
            )
        try:
            self._exports.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"The worker's export folder cannot be made ({error.strerror})") from None
        file = self._exports / request.file
        package = self._package(Path(request.source))
        differences = export_package(package, request.content_hash, file, is_int8=request.is_int8)
        return operator_rpc.ExportedFile(os.fspath(file), file.stat().st_size, differences)


def _response(begun: Future[Any]) -> operator_rpc.Response:
    try:
        return operator_rpc.Response.of(begun.result(_WAIT_S))
    except PenstockError as problem:
        return operator_rpc.Response.refusal(problem)
    except TimeoutError:
        return operator_rpc.Response()


def _check_spec(slot: str, encoded: bytes, version: str) -> None:
    """Refuses a spec that clients of the model could not read: they would submit no more jobs."""
    spec = ModelSpec.from_json(encoded)
    if spec.name != slot or version not in ("", spec.version):
        raise InvalidInput(
            f"Found the spec of {spec.reference}. Expected that of {slot!r:.80}, version {version!r:.80}"
        )


def _hashed(manifest: Manifest) -> operator_rpc.HashedFiles:
    return operator_rpc.HashedFiles(dict(manifest.files), dict(manifest.source_files), manifest.content_hash)
