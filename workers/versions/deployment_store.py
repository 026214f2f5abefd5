"""The last decision about each model that this machine followed, in files that outlive its workers and its broker.

    claim -- accepted --> the worker follows it -- keep, about once a second --> deployments/<model>.active in the home
    start -- last --> the worker ignores an older decision of the broker

Only signed decisions are kept, and each is verified again when it is read. Without the files, or after the operator's
key was replaced, the worker accepts the broker's decision.
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
    """The last decisions, in the form in which deliveries carry them: `<epoch> <record>`."""

    def last(self, model: str) -> bytes:
        """The decision that was kept last, if it is valid; empty for none."""

    def keep(self, model: str, active: bytes) -> None:
        """Keep an accepted decision, unless a later one is kept. Waits for no other process. Raises OSError."""


class NullDeploymentStore:
    """For decisions without signatures: every process that may write to the broker may decide."""

    def last(self, model: str) -> bytes:
        """Empty."""
        return b""

    def keep(self, model: str, active: bytes) -> None:
        """Keeps nothing."""


class FileDeploymentStore:
    """One file for each model in `folder`, mode 0600, for all workers of this machine."""

    def __init__(self, folder: Path, verify: Verifier) -> None:
        self._folder = folder
        self._verify = verify

    def last(self, model: str) -> bytes:
        """See DeploymentStore.last. An unreadable file and a record without a trusted signature count as none."""
        try:
            active = _read(self._folder / f"{model}{_SUFFIX}")
            Deployment.open(active, model, self._verify)
        except FileNotFoundError:
            return b""
        except (OSError, Corrupt) as error:
            logger.warning("the last followed decision cannot be read: %s", error, extra={"model": model})
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
    """The epoch of an accepted decision; -1 for none."""
    return int(active.partition(b" ")[0] or -1)


def _read(path: Path) -> bytes:
    # A pipe in its place would block the start; reading a device might never end.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path.name} is not a file")
        return file.read(_MOST_BYTES)


def _replace(path: Path, data: bytes) -> None:
    """Replace the file in one step. Only the holder of the lock calls this."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        # Not synced: the lease thread must not wait for a disk. After a power failure the decision may be lost.
        file.write(data)
    os.replace(partial, path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Nor must it wait for another worker, which may be frozen: the caller tries again.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
