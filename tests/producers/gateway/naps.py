"""Jobs that keep a queue busy: for tests in which another job must still wait when something has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock import Client
from tests.producers.gateway.conftest import GatewayStack

__all__ = ["naps_before"]

_NAPS = 200
"""Of 0.3 s each: longer than any machine takes for the end of a gateway."""


@contextmanager
def naps_before(stack: GatewayStack) -> Iterator[Client]:
    """The jobs of `napper` that come inside of it wait behind others. At its end, these are cancelled, and theirs runs.

    Jobs that are more urgent go first.
    """
    with Client(stack.server.url) as client:
        naps = client.submit_many("napper", [{"x": [[n, 8, 8, 8]]} for n in range(_NAPS)])
        try:
            yield client
        finally:
            # From the end: a worker takes them from the beginning.
            for nap in reversed(naps):
                nap.cancel()
