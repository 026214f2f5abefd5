"""The addresses of a home's embedded stack: compose/stack/local.py writes them, every client of the stack reads them.

    hold -> write (awaits="Redis") -> write (awaits="worker cpu0 ...") -> write (awaits="") -> remove -> lock released
            '------------------------ starting ----------------------'    '--- ready ---'

`<home>/stack.json` (mode 0600) holds the addresses, and what a starting stack waits for. `<home>/stack.lock` is locked
while the stack's process lives, so that the file of a killed stack is ignored.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.registry.errors import ConfigurationError

if TYPE_CHECKING:
    from penstock.registry.settings import Settings

__all__ = ["RunningStack", "hold", "read", "remove", "with_broker", "write", "write_private"]

_FILE: Final = "stack.json"
_LOCK: Final = "stack.lock"
_HOLD_TIMEOUT_S: Final = 0.5
"""A reader holds the lock for some microseconds, a stack for longer."""


@dataclass(frozen=True, slots=True)
class RunningStack:
    """The addresses of an embedded stack. Flower's fields are empty without Flower, the gateway's without a gateway.

    operator_public_keys: the operators that its workers trust, in the format of that setting.
    awaits: the part that a starting stack waits for; empty once jobs are served.
    """

    pid: int
    redis_url: str
    keys_file: str
    flower_url: str = ""
    flower_user: str = ""
    flower_password: str = field(default="", repr=False)
    operator_public_keys: str = ""
    gateway_url: str = ""
    gateway_grpc: str = ""
    awaits: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether its workers take jobs. Until then the addresses are right, and nothing may answer yet."""
        return not self.awaits

    def signing_keys(self) -> str:
        """The signing keys, as PENSTOCK_SIGNING_KEYS holds them. Raises ConfigurationError if they are unreadable."""
        try:
            return Path(self.keys_file).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            raise ConfigurationError("The signing keys of the running stack cannot be read by this user") from None


def read(home: Path) -> RunningStack | None:
    """The stack that runs on `home` or starts there, or None."""
    if not _is_held(home):
        return None
    try:
        return RunningStack(**json.loads((home / _FILE).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        raise ConfigurationError(
            "The stack.json of the stack that runs on this home cannot be read. Expected the same user and the same "
            "version of Penstock"
        ) from None


def with_broker(settings: Settings) -> Settings:
    """The settings with a broker: the given URL, else that of the running or starting stack with its keys.

    Raises ConfigurationError when there is neither.
    """
    if settings.redis_url:
        return settings
    stack = read(settings.home)
    if stack is None:
        raise ConfigurationError(
            "No broker is configured and no embedded stack runs. Expected PENSTOCK_REDIS_URL, or `penstock up`"
        )
    from pydantic import SecretStr

    keys = settings.signing_keys or SecretStr(stack.signing_keys())
    return settings.model_copy(
        update={
            "redis_url": stack.redis_url,
            "celery_url": settings.celery_url or stack.redis_url,
            "signing_keys": keys,
            "operator_public_keys": settings.operator_public_keys or stack.operator_public_keys,
        }
    )


def write(home: Path, stack: RunningStack) -> None:
    """Write the addresses of `stack`. The caller holds the home."""
    write_private(home / _FILE, json.dumps(asdict(stack)))


def remove(home: Path) -> None:
    """Delete the addresses that `write` wrote, also those that a killed stack left. The caller holds the home."""
    (home / _FILE).unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Writes a file that only this user may read (mode 0600), in one atomic step."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)


@contextmanager
def hold(home: Path) -> Iterator[None]:
    """Be the only stack of `home`, which must exist. Raises ConfigurationError with the process that holds it."""
    try:
        lock = open(home / _LOCK, "a+b")  # noqa: SIM115 - closed by the block below
    except OSError as error:
        raise ConfigurationError(
            f"PENSTOCK_HOME cannot be written to ({error.strerror}). Expected a writable folder"
        ) from None
    with lock:
        deadline = time.monotonic() + _HOLD_TIMEOUT_S
        while not _try_lock(lock.fileno(), fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                other = read(home)
                raise ConfigurationError(
                    f"A stack already runs on this home{f' (process {other.pid})' if other else ''}. "
                    "Stop it first, or choose another home with PENSTOCK_HOME"
                )
            time.sleep(0.01)
        yield


def _is_held(home: Path) -> bool:
    try:
        with open(home / _LOCK, "rb") as lock:
            return not _try_lock(lock.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigurationError(
            f"PENSTOCK_HOME cannot be read ({error.strerror}). Expected a folder of this user"
        ) from None


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
