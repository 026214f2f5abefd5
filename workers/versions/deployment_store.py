"""The last decision about each model that was obeyed on this machine, in files that outlive its workers and its broker.

    claim -- believed --> the worker obeys it -- keep, about once a second --> deployments/<model>.active under the home
    start --> last --> a broker that has an older decision, or none, does not take the worker back

For signed decisions only, and each is verified again when it is read: with another operator's key in the place of
the old one, and equally without the files, everything begins anew.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from penstock.registry.deployment import Deployment
from penstock.registry.errors import Corrupt
from penstock.registry.signed import Verifier

__all__ = ["FileDeploymentStore", "NullDeploymentStore", "DeploymentStore", "epoch_of"]

_MOST_BYTES: Final = 8192
_SUFFIX: Final = ".active"

logger = logging.getLogger("penstock.server")


class DeploymentStore(Protocol):
    """The last decisions, as deliveries bring them along: `<epoch> <record>`."""

    def last(self, model: str) -> bytes:
        """What was kept last, if it is to be believed; empty for nothing."""

    def keep(self, model: str, active: bytes) -> None:
        """Keep a decision that was believed, unless a later one is there. Does not wait for anybody; raises OSError."""


class NullDeploymentStore:
    """Where decisions are not signed: whoever may write to the broker decides anyway."""

    def last(self, model: str) -> bytes:
        """Nothing."""
        return b""

    def keep(self, model: str, active: bytes) -> None:
        """Nothing is kept."""


class FileDeploymentStore:
    """One file per model in `folder`, mode 0600, for all workers of this machine."""

    def __init__(self, folder: Path, verify: Verifier) -> None:
        self._folder = folder
        self._verify = verify

    def last(self, model: str) -> bytes:
        """See DeploymentStore.last. Unreadable files, and records without a trusted signature, count as none."""
        try:
            active = _read(self._folder / f"{model}{_SUFFIX}")
            Deployment.open(active, model, self._verify)
        except FileNotFoundError:
            return b""
        except (OSError, Corrupt) as error:
            logger.warning("the decision that was obeyed last is not known: %s", error, extra={"model": model})
            return b""
        return active

    def keep(self, model: str, active: bytes) -> None:
        """See DeploymentStore.keep."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"{model}{_SUFFIX}"
        with _locked(self._folder):
            if epoch_of(self.last(model)) < epoch_of(active):
                _replace(path, active)


def epoch_of(active: bytes) -> int:
    """The epoch of a decision that was believed; -1 for none."""
    return int(active.partition(b" ")[0] or -1)


def _read(path: Path) -> bytes:
    # A pipe in its place would hang the start, a device might never end.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path.name} is not a file")
        return file.read(_MOST_BYTES)


def _replace(path: Path, data: bytes) -> None:
    """The file is the old one or the new one. Only whoever has the lock writes here."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        # Not synced: leases are not to wait for a disk, and a power failure only makes this machine forget.
        file.write(data)
    os.replace(partial, path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Nor are they to wait for another worker, who may be frozen: the caller tries again.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
