"""For the tests of programs that submit jobs: models in the test's own process, and fixtures of pytest.

    Client.in_memory({"iris": function}) -> a client, a broker in memory, a worker on threads of this process

This room sees every other one, as compose does. No worker and no command imports it.
"""

from __future__ import annotations

from penstock.testing.model import Model

__all__ = ["Model"]
