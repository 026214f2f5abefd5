"""The gateway inside of a program or a notebook, with keys for those who call it.

    with ApiServer(port=0, require_api_key=True) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.generate_api_key("notebook"))

The models are those of the workers at the broker: PENSTOCK_REDIS_URL, or a stack that `penstock up` runs. A process
that does nothing else is better served by `penstock serve`.
"""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType

from penstock.compose.api_keys import change_api_key
from penstock.registry.api_keys import KeyRole, new_api_key
from penstock.registry.settings import Settings
from penstock.registry.stack_file import with_broker

__all__ = ["ApiServer"]


class ApiServer:
    """HTTP with OpenAI's routes, and gRPC where a port is given, until `stop`.

    host: another address than the loopback needs API keys, unless require_api_key is False. port, grpc_port: 0 takes
    any free one; no grpc_port: no gRPC. require_api_key: None keeps the setting server.api_keys, by which a gateway on
    the loopback asks for a key once there is one. settings: those of the environment, if None.

    Raises ConfigurationError without a broker, and for settings that cannot be.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        grpc_port: int | None = None,
        require_api_key: bool | None = None,
        settings: Settings | None = None,
    ) -> None:
        from penstock.producers.gateway.server import Binding
        from penstock.producers.gateway.threaded import ThreadedGateway

        changes: dict[str, object] = {"server.host": host, "server.port": port}
        if require_api_key is not None:
            changes["server.api_keys"] = "required" if require_api_key else "off"
        self._settings = with_broker(settings or Settings.load()).changed(changes)
        self._gateway = ThreadedGateway(self._settings, Binding(host, port, grpc_port=grpc_port))

    @property
    def url(self) -> str:
        """Where it listens; empty while it does not. OpenAI's clients want `/v1` behind it."""
        return self._gateway.url

    @property
    def rpc(self) -> str:
        """The address of gRPC; empty without it."""
        return self._gateway.rpc

    def generate_api_key(self, label: str, role: KeyRole = "user") -> str:
        """A new key. It is returned once: the registry's database has its SHA-256 only, and the audit log its id.

        This gateway knows it at once, others within a second; `penstock keys revoke` ends it. Raises InvalidInput for a
        label that is empty or has more than 100 characters and for an unknown role, RegistryUnavailable, and OSError
        for an audit log that cannot be written.
        """
        made = new_api_key(label, now=int(time.time()), role=role, tenant=self._settings.tenant_id)
        change_api_key(self._settings, "create API key", made.key.id, lambda keys: keys.add(made.key))
        self._gateway.read_keys_again()
        return made.text

    def start(self) -> None:
        """Serve in a thread, once a request would be answered. Raises ConfigurationError for an address in use."""
        self._gateway.start()

    def stop(self) -> None:
        """Answer the requests that run, end open streams with a hint to come again, and close the port."""
        self._gateway.stop()

    def serve_forever(self) -> None:
        """Serve until Ctrl-C. Raises what `start` does."""
        with self, suppress(KeyboardInterrupt):
            self._gateway.wait()

    def __enter__(self) -> ApiServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
