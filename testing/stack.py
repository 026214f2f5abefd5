"""A real worker and a private Redis server for a test session, in a temporary home.

    packages -> LocalStack: redis-server, one worker per device -> WorkerStack.client -> ... -> both end, the home goes

The same stack as `penstock up` runs, without Flower. Its processes die with this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.producers.async_client import AsyncClient
from penstock.producers.client import Client
from penstock.registry.errors import ConfigurationError
from penstock.registry.extras import missing_package, not_installed
from penstock.registry.settings import Settings

__all__ = ["WorkerStack", "missing", "worker_stack"]


@dataclass(frozen=True, slots=True)
class WorkerStack:
    """A stack that runs. environ: what a process needs in its environment for `Client.from_env()` to find it."""

    url: str
    environ: Mapping[str, str]
    log_folder: Path
    settings: Settings

    def client(self) -> Client:
        """A new client of the stack. The caller closes it."""
        return Client.from_env(settings=self.settings)

    def async_client(self) -> AsyncClient:
        """A new client of the stack for one event loop. The caller closes it."""
        return AsyncClient.from_env(settings=self.settings)


def missing() -> str:
    """Why no worker can be started here, with the remedy; empty if it can."""
    if package := missing_package("worker"):
        return not_installed(package, "worker")
    from penstock.compose.stack.local import redis_binary

    try:
        redis_binary()
    except ConfigurationError as error:
        return str(error)
    return ""


@contextmanager
def worker_stack(models_root: Path, environ: Mapping[str, str]) -> Iterator[WorkerStack]:
    """A stack that serves every package of a models root, for the length of the block.

    environ: further settings of the worker. Raises ConfigurationError when the stack cannot start.
    """
    from penstock.compose.stack.fleet import choose
    from penstock.compose.stack.local import LocalStack, private_settings

    with (
        private_settings(environ, (), models_root=models_root) as (settings, own),
        LocalStack(settings, choose(settings, own), environ=own, with_flower=False) as stack,
    ):
        home = {"PENSTOCK_HOME": str(settings.home)}
        yield WorkerStack(stack.running.redis_url, home, stack.log_folder, settings)
