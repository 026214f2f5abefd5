"""The registry, the files and the broker of a worker, for operators who can reach only Celery's broker.

    ModelRegistryClient -- RemoteRegistryStore --\\
    Deployer            -- RemoteFleet         ---> ControlClient.call -> a worker's OperatorRpcServer
                        -- packages, exports   --/

This process decides and signs, from rows whose signatures it checks. The worker only passes calls on to its own
connections; it is trusted only for the content of its folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.compose.rollout.control_client import ControlClient
from penstock.registry import operator_rpc
from penstock.registry.catalog.store import ModelRows, ModelTransaction
from penstock.registry.catalog.tables import RegisteredVersion
from penstock.registry.errors import ConfigurationError, ModelNotReady
from penstock.registry.package import ModelSpec
from penstock.registry.package.manifest import Manifest

__all__ = ["ANY", "Remote", "RemoteFleet", "RemotePackage", "RemoteRegistryStore"]

ANY: Final = "any"
"""Asks for the first worker that listens."""


class Remote:
    """One worker that runs requests; the Files of its machine. Raises ModelNotReady when it does not listen."""

    def __init__(self, control: ControlClient, worker: str = ANY) -> None:
        self._control = control
        self.worker: Final = control.find_worker(None if worker == ANY else worker)

    def call(self, request: operator_rpc.Request, kind: Any = None) -> Any:
        """See ControlClient.call."""
        return self._control.call(request, self.worker, kind)

    def package(self, path: Path) -> RemotePackage:
        """The package at a path on the worker's machine, below its models root. Raises ConfigurationError."""
        found: operator_rpc.InspectedPackage = self.call(operator_rpc.Inspect(str(path)), operator_rpc.InspectedPackage)
        return RemotePackage(ModelSpec.from_json(found.spec), Path(found.source), _manifest(found.hashed))

    def rehash(self, source: str) -> Manifest:
        """The digests of the files in a package's folder now. Raises ConfigurationError."""
        try:
            return _manifest(self.call(operator_rpc.Rehash(source), operator_rpc.HashedFiles))
        except ModelNotReady as problem:
            # The registry expects this error for a package that cannot be read.
            raise ConfigurationError(str(problem)) from None

    def export(self, version: RegisteredVersion, path: Path, *, is_int8: bool = False) -> operator_rpc.ExportedFile:
        """See Files.export. `path` is a plain name: the worker writes it into its folder of exports."""
        request = operator_rpc.Export(version.source, version.content_hash, str(path), is_int8)
        exported: operator_rpc.ExportedFile = self.call(request, operator_rpc.ExportedFile)
        return exported


@dataclass(frozen=True, slots=True)
class RemotePackage:
    """A package as a worker read it: see Registrable of registry/catalog/client.py."""

    spec: ModelSpec
    folder: Path
    files: Manifest

    def manifest(self) -> Manifest:
        """Its files at the time of the inspection; the worker hashes them again at the registration."""
        return self.files


class RemoteRegistryStore:
    """The registry's rows, read and written by a worker. See RegistryStore of registry/catalog/store.py."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def names(self) -> tuple[str, ...]:
        """See RegistryStore.names."""
        names: tuple[str, ...] = self._remote.call(operator_rpc.Names(), tuple[str, ...])
        return names

    def read(self, names: Sequence[str] | None = None, newest: int | None = None) -> dict[str, ModelRows]:
        """See RegistryStore.read."""
        requested = None if names is None else tuple(names)
        found: dict[str, ModelRows] = self._remote.call(operator_rpc.Read(requested, newest), dict[str, ModelRows])
        return found

    @contextmanager
    def changing(self, name: str, *, is_new: bool = False, newest: int | None = None) -> Iterator[ModelTransaction]:
        """See RegistryStore.changing. It takes no lock: the change is refused at its end when another one was faster.

        A model that does not exist yet needs no preparation, so `is_new` has no effect.
        """
        transaction = _RemoteTransaction(self.read((name,), newest)[name])
        yield transaction
        if transaction.transitions:
            changed = (
                *(transaction.versions, transaction.transitions),
                *(transaction.experiments, transaction.policies),
            )
            self._remote.call(operator_rpc.Enter(*map(tuple, changed)))


class _RemoteTransaction:
    """Collects the rows of a change, which is then sent as a whole."""

    def __init__(self, rows: ModelRows) -> None:
        self.rows: Final = rows
        self.versions: list[dict[str, Any]] = []
        self.transitions: list[dict[str, Any]] = []
        self.experiments: list[dict[str, Any]] = []
        self.policies: list[dict[str, Any]] = []

    def put_version(self, row: operator_rpc.Row) -> None:
        """See ModelTransaction.put_version."""
        self.versions.append(dict(row))

    def put_transition(self, row: operator_rpc.Row) -> None:
        """See ModelTransaction.put_transition."""
        self.transitions.append(dict(row))

    def put_experiment(self, row: operator_rpc.Row) -> None:
        """See ModelTransaction.put_experiment."""
        self.experiments.append(dict(row))

    def put_policy(self, row: operator_rpc.Row) -> None:
        """See ModelTransaction.put_policy."""
        self.policies.append(dict(row))


class RemoteFleet:
    """The broker, called by a worker. See FleetEnd of registry/broker/base.py."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def models(self) -> list[str]:
        """See FleetEnd.models."""
        found: list[str] = self._remote.call(operator_rpc.Models(), list[str])
        return found

    def workers(self) -> list[bytes]:
        """See FleetEnd.workers."""
        found: list[bytes] = self._remote.call(operator_rpc.Workers(), list[bytes])
        return found

    def spec(self, slot: str, version: str = "") -> bytes | None:
        """See FleetEnd.spec."""
        found: bytes | None = self._remote.call(operator_rpc.Spec(slot, version), bytes | None)
        return found

    def put_spec(self, slot: str, spec: bytes, version: str = "") -> None:
        """See FleetEnd.put_spec."""
        self._remote.call(operator_rpc.PutSpec(slot, spec, version))

    def actives(self, slots: Sequence[str]) -> dict[str, bytes]:
        """See FleetEnd.actives."""
        found: dict[str, bytes] = self._remote.call(operator_rpc.Actives(tuple(slots)), dict[str, bytes])
        return found

    def activate(self, slot: str, epoch: int, record: bytes, version: str, spec: bytes) -> bool:
        """See FleetEnd.activate."""
        is_active: bool = self._remote.call(operator_rpc.Activate(slot, epoch, record, version, spec), bool)
        return is_active

    def observations(self, slot: str, experiment: str) -> dict[str, bytes]:
        """See FleetEnd.observations."""
        found: dict[str, bytes] = self._remote.call(operator_rpc.Observations(slot, experiment), dict[str, bytes])
        return found

    def ratings(self, slot: str, experiment: str) -> dict[str, bytes]:
        """See FleetEnd.ratings."""
        found: dict[str, bytes] = self._remote.call(operator_rpc.Ratings(slot, experiment), dict[str, bytes])
        return found


def _manifest(hashed: operator_rpc.HashedFiles) -> Manifest:
    return Manifest(hashed.files, hashed.source_files, hashed.content_hash, ())
